"""Progress that a process beside the owner publishes: files in `config/spark/groups/` (spark#publish-group).

Who reads a store without owning it may not write `consumerOffset.json`. It leaves a file for each of its groups, and
the owner folds them into its own offsets at its next save. Knows names and numbers; what they mean is the owner's.

    GROUP.json         {"version": 1, "group": GROUP, "offsets": {topic: {queue id: offset}}}, replaced whole
    GROUP.json.tmp     being written; means nothing
    GROUP.json.taken   the owner has it in hand
    GROUP.json.corrupt did not decode: reported once, set aside, never fatal

    publish   tmp, synced            -> GROUP.json          whoever publishes
    take      GROUP.json             -> GROUP.json.taken    the owner: read, and put among its offsets
    settle    GROUP.json.taken removed                      the owner, after these were saved

So each file counts once, when it is taken, as a commit does: the last one wins, also backwards, and what is reset or
removed later is not undone by an old file. A crash between the last two steps leaves `.taken`; the next owner takes it
once more, before anybody can have changed the offsets it brought. A newer file may come at any moment: taken over an
older one it replaces it, for each names all that its publisher reads. One publisher a group.

A folder of its own: what else lives in `config/spark/` has names that a group might have.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mqstore.errors import FormatError
from mqstore.files.beneath import resolved
from mqstore.files.filesystem import REAL, FileSystem
from mqstore.files.jsonfile import decode_json, read_json, save_json
from mqstore.log.names import is_path_safe

__all__ = ["Published", "PublishedFiles", "publish"]

_FOLDER = ("config", "spark", "groups")
_OFFSET_MAX = 0x7FFF_FFFF_FFFF_FFFF


class Published(NamedTuple):
    """A file's content: (topic, queue id) -> offset, everything before which is consumed."""

    group: str
    offsets: dict[tuple[str, int], int]


def publish(
    root: str | os.PathLike[str], group: str, offsets: Mapping[tuple[str, int], int], fs: FileSystem = REAL
) -> None:
    """Leave the progress of `group` for the owner of the store at `root`. Durable when it returns; takes no lock.

    The folder is made if need be, with the permissions of `config` that the umask allows. ValueError for a group that
    cannot be a file's name; StoreIOError, StoreFullError, PermissionError: the file is then as it was.
    """
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
    """Whether a group's name can be a file's, endings included, and a key of the owner's offsets."""
    return is_path_safe(group) and "@" not in group and len(group.encode()) <= 200


class PublishedFiles:
    """The published files of a store, for its owner, and for others that only look. Not thread-safe."""

    def __init__(self, root: Path, fs: FileSystem, report: Callable[[str], object]) -> None:
        """`report` is called with a sentence for each thing amiss, once."""
        self._folder = root.joinpath(*_FOLDER)
        self._fs = fs
        self._first = True
        self._taken: list[str] = []
        self._reported: set[str] = set()
        self._tell = report

    def look(self) -> Iterator[Published]:
        """What waits to be taken, older first. Changes nothing."""
        names = self._names()
        for name in [*(n for n in names if n.endswith(".taken")), *(n for n in names if n.endswith(".json"))]:
            found = self._read(name)
            if found is not None:
                yield found

    def take(self) -> Iterator[Published]:
        """What was published since the last `take`; of the first one, also what an owner before had not settled."""
        names = self._names()
        if self._first:
            self._taken += [name for name in names if name.endswith(".taken")]
            self._first = False
        for name in names:
            if name.endswith(".json"):
                try:
                    self._fs.replace(self._folder / name, self._folder / f"{name}.taken")
                except OSError as error:
                    self._report(f"{self._folder / name} cannot be taken, and is not counted: {error}")
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
        """What was taken is saved elsewhere."""
        if not self._taken:
            return
        for name in self._taken:
            try:
                self._fs.unlink(self._folder / name, missing_ok=True)
            except OSError as error:
                self._report(f"{self._folder / name} cannot be removed; the next owner will count it again: {error}")
        self._taken.clear()
        with suppress(OSError):
            self._fs.sync_directory(self._folder)

    def forget(self, group: str) -> None:
        """Drop what waits of a group that is removed."""
        for name in (f"{group}.json", f"{group}.json.taken"):
            if name in self._names():
                self._fs.unlink(self._folder / name, missing_ok=True)

    def _names(self) -> list[str]:
        try:
            return self._fs.scandir(self._folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self._report(f"{self._folder} cannot be listed; progress published there is not counted: {error}")
            return []

    def _read(self, name: str) -> Published | None:
        try:
            return _decode(read_json(self._folder / name, self._fs), name.removesuffix(".taken"))
        except FileNotFoundError:  # its owner has just settled it
            return None
        except (OSError, ValueError) as error:
            self._report(f"{self._folder / name} is damaged, and is not counted: {error}")
            return None

    def _report(self, problem: str) -> None:
        if problem not in self._reported:
            self._reported.add(problem)
            self._tell(problem)


def _decode(data: bytes, name: str) -> Published:
    """ValueError (FormatError among them) for what `publish` would not have written."""
    value = decode_json(data)
    group, table = value.get("group"), value.get("offsets")
    if value.get("version") != 1 or not isinstance(group, str) or not isinstance(table, dict):
        raise FormatError("no progress of a group, or of a version that this mqstore does not know", "json", 0)
    if f"{group}.json" != name or not _is_name(group):
        raise FormatError(f"it says that it is of group {group[:150]!r}", "json", 0)
    offsets: dict[tuple[str, int], int] = {}
    for topic, queues in table.items():
        if not isinstance(queues, dict):
            raise FormatError(f"topic {topic[:150]!r} has no table of queues", "json", 0)
        for text, offset in queues.items():
            good = text.isascii() and text.isdecimal() and len(text) < 10 and str(int(text)) == text
            if not good or type(offset) is not int or not 0 <= offset <= _OFFSET_MAX:
                raise FormatError(f"{topic[:150]!r}, queue {text[:20]!r}: {offset!r:.80} is no offset", "json", 0)
            offsets[topic, int(text)] = offset
    return Published(group, offsets)
