"""Offsets that another process publishes in `config/spark/groups/` (spark#publish-group).

A process that reads a store without owning it must not write `consumerOffset.json`. It writes a file for each of its
groups, and the owner commits these offsets at its next save.

    GROUP.json         {"version": 1, "group": GROUP, "offsets": {topic: {queue id: offset}}}, always complete
    GROUP.json.tmp     being written; ignored
    GROUP.json.taken   the owner is reading it
    GROUP.json.corrupt did not decode; reported once and moved aside

    publish   tmp, synced            -> GROUP.json          by the publisher
    take      GROUP.json             -> GROUP.json.taken    by the owner, which reads and commits it
    settle    GROUP.json.taken removed                      by the owner, after the offsets were saved

So each file is committed once, when it is taken: the last one wins, also backwards, and an old file does not undo a
later reset or removal. A crash between the last two steps leaves `.taken`. The next owner takes it once more, before
its offsets can have changed. A newer file replaces an older taken one, because each has all queues that its publisher
reads. A group has one publisher.

The folder is separate because a group might have the name of another file in `config/spark/`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mqstore.errors import FormatError
from mqstore.files.filesystem import REAL, FileSystem
from mqstore.files.jsonfile import decode_json, read_json, save_json
from mqstore.files.safe_open import resolved
from mqstore.log.directory.names import is_path_safe

_FOLDER = ("config", "spark", "groups")
_OFFSET_MAX = 0x7FFF_FFFF_FFFF_FFFF


class ExternalOffsets(NamedTuple):
    """Content of a file: committed offsets by (topic, queue id)."""

    group: str
    offsets: dict[tuple[str, int], int]


def publish(
    root: str | os.PathLike[str], group: str, offsets: Mapping[tuple[str, int], int], fs: FileSystem = REAL
) -> None:
    """Write the offsets of `group` for the owner of the store at `root`. Takes no lock.
    The file is durable when this returns. The folder is created if necessary, with the permissions of `config` that the
    umask allows. Raises ValueError for a group that cannot be the name of a file. After StoreIOError, StoreFullError or
    PermissionError the file is unchanged."""
    if not _is_name(group):
        raise ValueError(f"group {group[:150]!r} cannot be the name of a file")
    table: dict[str, dict[str, int]] = {}
    for (topic, queue_id), offset in sorted(offsets.items()):
        table.setdefault(topic, {})[str(queue_id)] = offset
    folder = resolved(root)
    mode = 0o700
    for name in _FOLDER:
        outer, folder = folder, os.path.join(folder, name)
        if not os.path.isdir(folder):
            fs.mkdir(folder, mode, exist_ok=True)
            fs.sync_directory(outer)
        mode = os.stat(folder).st_mode & 0o777
    path = os.path.join(folder, f"{group}.json")
    value = {"version": 1, "group": group, "offsets": table}
    save_json(path, value, fs, file_mode=mode & 0o666, back_up=False)


def _is_name(group: str) -> bool:
    """Return True if a group's name can be a file name, suffixes included, and a key of the owner's offsets."""
    return is_path_safe(group) and "@" not in group and len(group.encode()) <= 200


class ExternalOffsetFiles:
    """Published files of a store, for its owner and for readers. Not thread-safe."""

    def __init__(self, root: Path, fs: FileSystem, report: Callable[[str], object]) -> None:
        """Use the folder of the store at `root`. `report` is called once with a sentence for each problem."""
        self._folder = root.joinpath(*_FOLDER)
        self._fs = fs
        self._first = True
        self._taken: list[str] = []
        self._reported: set[str] = set()
        self._on_problem = report

    def look(self) -> Iterator[ExternalOffsets]:
        """Yield the files that wait to be taken, older ones first. Changes nothing."""
        names = self._names()
        for name in [*(n for n in names if n.endswith(".taken")), *(n for n in names if n.endswith(".json"))]:
            found = self._read(name)
            if found is not None:
                yield found

    def take(self) -> Iterator[ExternalOffsets]:
        """Yield the files published since the last `take`.
        The first call also yields those that an earlier owner had not settled."""
        names = self._names()
        if self._first:
            self._taken += [name for name in names if name.endswith(".taken")]
            self._first = False
        for name in names:
            if name.endswith(".json"):
                try:
                    self._fs.replace(self._folder / name, self._folder / f"{name}.taken")
                except OSError as error:
                    self._report(f"cannot rename {self._folder / name}, so its offsets are ignored: {error}")
                    continue
                if f"{name}.taken" not in self._taken:
                    self._taken.append(f"{name}.taken")
        for name in list(self._taken):
            found = self._read(name)
            if found is not None:
                yield found
            else:
                self._taken.remove(name)
                with suppress(OSError):
                    self._fs.replace(self._folder / name, self._folder / f"{name.removesuffix('.taken')}.corrupt")

    def settle(self) -> None:
        """Remove the taken files, after their offsets were saved."""
        if not self._taken:
            return
        for name in self._taken:
            try:
                self._fs.unlink(self._folder / name, missing_ok=True)
            except OSError as error:
                self._report(f"cannot remove {self._folder / name}; the next owner will commit it again: {error}")
        self._taken.clear()
        with suppress(OSError):
            self._fs.sync_directory(self._folder)

    def forget(self, group: str) -> None:
        """Remove the files of a group that is deleted."""
        for name in (f"{group}.json", f"{group}.json.taken"):
            if name in self._names():
                self._fs.unlink(self._folder / name, missing_ok=True)

    def _names(self) -> list[str]:
        try:
            return self._fs.scandir(self._folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self._report(f"cannot list {self._folder}, so published offsets are ignored: {error}")
            return []

    def _read(self, name: str) -> ExternalOffsets | None:
        try:
            return _decode(read_json(self._folder / name, self._fs), name.removesuffix(".taken"))
        except FileNotFoundError:  # the owner has just settled it
            return None
        except (OSError, ValueError) as error:
            self._report(f"{self._folder / name} is damaged and ignored: {error}")
            return None

    def _report(self, problem: str) -> None:
        if problem not in self._reported:
            self._reported.add(problem)
            self._on_problem(problem)


def _decode(data: bytes, name: str) -> ExternalOffsets:
    """Decode a file. Raises ValueError (or FormatError) for content that `publish` would not write."""
    value = decode_json(data)
    group, table = value.get("group"), value.get("offsets")
    if value.get("version") != 1 or not isinstance(group, str) or not isinstance(table, dict):
        raise FormatError("not the offsets of a group, or an unknown version", "json", 0)
    if f"{group}.json" != name or not _is_name(group):
        raise FormatError(f"it belongs to group {group[:150]!r}", "json", 0)
    offsets: dict[tuple[str, int], int] = {}
    for topic, queues in table.items():
        if not isinstance(queues, dict):
            raise FormatError(f"topic {topic[:150]!r} has no table of queues", "json", 0)
        for text, offset in queues.items():
            good = text.isascii() and text.isdecimal() and len(text) < 10 and str(int(text)) == text
            if not good or type(offset) is not int or not 0 <= offset <= _OFFSET_MAX:
                raise FormatError(f"{topic[:150]!r}, queue {text[:20]!r}: {offset!r:.80} is not an offset", "json", 0)
            offsets[topic, int(text)] = offset
    return ExternalOffsets(group, offsets)
