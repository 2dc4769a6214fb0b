"""Bundles of staged shards that wait for the owner of the store, who has its lock (spark B6, target `inbox`).

    inbox/<app>-<version>/bundle.json   {"version": 1, "app", "ver", "shards": [names in order],
                                         "create": {TOPIC: queues}}
                          <shard>/      as `log.shard` describes them
    inbox/refused/<name>/               a bundle that cannot be spliced, with reason.txt
    inbox/.<name>, inbox/_<name>        being made, or being removed: not looked at

    bundle --splice--> recorded --rename to _done-<name>--> --remove--> gone
       \\--bad----> refused/<name>, and reason.txt beside what it holds

A bundle comes by one rename and is whole then. It is spliced, which records its version, and only then removed: a crash
in between meets a version that is in already. The bundles of one application go in the order of their versions; while
one cannot be read, the later ones wait, for once they are in it would count as done.

What is wrong with the bundle itself moves it aside at once. What is wrong with the disk leaves it where it is, and it
is tried again, ever more rarely; one whose own files cannot be read is moved aside after `_TRIES` times.

Knows folders and the splicer. Who is to enter the topics of a bundle is a function that a broker gives; without one the
splice notes them for a broker to come.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mqstore.clock import Clock
from mqstore.errors import (
    ConfigError,
    FormatError,
    InvalidMessageError,
    NotPermittedError,
    StoreIOError,
)
from mqstore.files.filesystem import FILE_MODE, FileSystem
from mqstore.files.jsonfile import decode_json
from mqstore.log.names import is_path_safe

__all__ = ["Bundle", "Inbox", "InboxState", "inbox_state"]

_log = logging.getLogger("mqstore")
_REFUSED = "refused"
_DONE = "_done-"
_JSON_BYTES_MAX = 16 << 20
_TRIES = 8
_PAUSE_MIN_MS, _PAUSE_MAX_MS = 1_000, 300_000

CreateTopics = Callable[[Mapping[str, int]], None]
"""Enter topics with so many queues. What it raises about a name or a number is the bundle's fault."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """What `bundle.json` says."""

    folder: Path
    app: str
    version: int
    shards: tuple[str, ...]
    create: Mapping[str, int]

    @classmethod
    def load(cls, folder: Path, fs: FileSystem) -> Bundle:
        """FormatError when it is missing or says what nobody can do, StoreIOError when it cannot be read."""
        path = folder / "bundle.json"
        try:
            value = decode_json(fs.read_whole(path, _JSON_BYTES_MAX))
        except FileNotFoundError as error:
            raise FormatError(f"{path}: the file is missing", "bundle", 0) from error
        except FormatError as error:
            raise FormatError(f"{path}: {error}", error.field, error.position) from error
        if value.get("version") != 1:
            raise FormatError(f"{path}: version {value.get('version')!r:.80} is not 1", "version", 0)
        app: Any = value.get("app")
        version: Any = value.get("ver")
        shards: Any = value.get("shards")
        create: Any = value.get("create", {})
        for good, field in (
            (isinstance(app, str) and app != "", "app"),
            (type(version) is int and 0 <= version < 1 << 63, "ver"),
            (isinstance(shards, list) and all(_is_name(name) for name in shards), "shards"),
            (isinstance(create, dict) and all(type(n) is int and n > 0 for n in create.values()), "create"),
        ):
            if not good:
                raise FormatError(f"{path}: {field} is {value.get(field)!r:.80}", field, 0)
        if len(set(shards)) != len(shards):
            raise FormatError(f"{path}: a shard is named twice", "shards", 0)
        return cls(folder, app, version, tuple(shards), create)


def _is_name(name: Any) -> bool:
    """Whether a shard's name leads to a folder of the bundle and nowhere else."""
    return isinstance(name, str) and is_path_safe(name)


@dataclass(frozen=True, slots=True)
class InboxState:
    """Names of bundles that wait, of those that were refused, and of what jobs have staged and not committed."""

    waiting: tuple[str, ...]
    refused: tuple[str, ...]
    staged: tuple[str, ...]


def inbox_state(root: Path, fs: FileSystem) -> InboxState:
    """What lies in the inbox of the store at `root`; changes nothing."""
    folder = root / "inbox"
    names = [name for name in _folders(folder, fs) if _is_bundle(name)]
    refused, staged = _folders(folder / _REFUSED, fs), _folders(root / "_staging", fs)
    return InboxState(tuple(names), tuple(refused), tuple(staged))


def _folders(path: Path, fs: FileSystem) -> list[str]:
    try:
        return fs.scandir_directories(path)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_bundle(name: str) -> bool:
    return name != _REFUSED and not name.startswith((".", "_"))


@dataclass(slots=True)
class _Trouble:
    """A bundle that could not be taken in: how often, when to try again (monotonic), and why."""

    tries: int
    due_ms: int
    error: OSError


class Inbox:
    """The inbox of a store that is open for writing.

    `splice(shards, app, version, create)` stores a bundle; `create_topics`: see the module, set by a broker.
    """

    def __init__(
        self,
        root: Path,
        fs: FileSystem,
        clock: Clock,
        *,
        splice: Callable[[list[Path], str, int, Mapping[str, int]], object],
        file_mode: int = FILE_MODE,
    ) -> None:
        self.create_topics: CreateTopics | None = None
        self.spliced = 0
        """Bundles that were spliced since opening."""
        self.refused = 0
        """Bundles that were moved aside since opening."""
        self._folder = root / "inbox"
        self._fs = fs
        self._clock = clock
        self._splice = splice
        self._file_mode = file_mode
        self._trouble: dict[str, _Trouble] = {}

    def run_once(self) -> int:
        """Take in what waits; how many bundles were spliced. Where there is no inbox this is one look.

        Raises what keeps a bundle from being taken in, when all others have had their turn; it is tried again by a
        later call.
        """
        fs = self._fs
        if not fs.exists(self._folder):
            return 0
        self._sweep()
        before = self.spliced
        stuck: set[str] = set()
        bundles = self._in_order()
        names = {bundle.folder.name for bundle in bundles}
        self._trouble = {name: trouble for name, trouble in self._trouble.items() if name in names}
        for bundle in bundles:
            if bundle.app in stuck:
                continue
            trouble = self._trouble.get(bundle.folder.name)
            if trouble is not None and self._clock.monotonic_ms() < trouble.due_ms:
                stuck.add(bundle.app)
                continue
            try:
                self._take(bundle)
            except (FormatError, InvalidMessageError, ConfigError, NotPermittedError) as error:
                self._refuse(bundle.folder, error)
            except OSError as error:
                if not self._give_up(bundle, error):
                    stuck.add(bundle.app)
        for trouble in self._trouble.values():
            raise trouble.error
        return self.spliced - before

    def _in_order(self) -> list[Bundle]:
        """The bundles that wait, by application and version; bad ones are moved aside."""
        found = []
        for name in filter(_is_bundle, _folders(self._folder, self._fs)):
            folder = self._folder / name
            try:
                if os.path.islink(folder):
                    raise FormatError(f"{folder}: a link, not a folder", "bundle", 0)
                found.append(Bundle.load(folder, self._fs))
            except FormatError as error:
                self._refuse(folder, error)
        return sorted(found, key=lambda bundle: (bundle.app, bundle.version, bundle.folder.name))

    def _take(self, bundle: Bundle) -> None:
        for name in bundle.shards:
            if os.path.islink(bundle.folder / name):
                raise FormatError(f"{bundle.folder / name}: a link, not a folder", "shards", 0)
        noted: Mapping[str, int] = bundle.create
        if self.create_topics is not None and bundle.create:
            self.create_topics(bundle.create)
            noted = {}
        self._splice([bundle.folder / name for name in bundle.shards], bundle.app, bundle.version, noted)
        self.spliced += 1
        self._trouble.pop(bundle.folder.name, None)
        self._remove(bundle.folder)

    def _give_up(self, bundle: Bundle, error: OSError) -> bool:
        """Count a failure; whether the bundle was moved aside, its own files being the reason time and again."""
        name = bundle.folder.name
        trouble = self._trouble.setdefault(name, _Trouble(0, 0, error))
        trouble.error = error
        own = isinstance(error, StoreIOError) and str(error.filename or "").startswith(f"{bundle.folder}{os.sep}")
        trouble.tries += 1
        if own and trouble.tries >= _TRIES:
            self._refuse(bundle.folder, error)
            return True
        pause_ms = min(_PAUSE_MAX_MS, _PAUSE_MIN_MS << min(trouble.tries, 16))
        trouble.due_ms = self._clock.monotonic_ms() + pause_ms
        return False

    # -- folders ----------------------------------------------------------------------------------------------------

    def _refuse(self, folder: Path, error: Exception) -> None:
        """Move a bundle aside, and say why."""
        fs = self._fs
        aside = self._folder / _REFUSED
        fs.mkdir(aside, exist_ok=True)
        target = aside / folder.name
        number = 0
        while os.path.lexists(target):
            number += 1
            target = aside / f"{folder.name}.{number}"
        fs.replace(folder, target)
        fs.sync_directory(aside)
        fs.sync_directory(self._folder)
        self.refused += 1
        self._trouble.pop(folder.name, None)
        _log.error("%s is refused and moved to %s: %s", folder, target, error)
        if os.path.islink(target):
            return
        path = target / "reason.txt"
        fd = fs.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, self._file_mode)
        try:
            fs.pwrite(fd, f"{type(error).__name__}: {error}\n".encode("utf-8", "backslashreplace"), 0)
            fs.fdatasync(fd)
        finally:
            fs.close(fd)

    def _remove(self, folder: Path) -> None:
        """Remove a bundle that is in. The new name first, durably: half of one must never look like one that waits."""
        done = self._folder / f"{_DONE}{folder.name}"
        if os.path.lexists(done):
            self._delete(done)
        self._fs.replace(folder, done)
        self._fs.sync_directory(self._folder)
        self._delete(done)

    def _sweep(self) -> None:
        """Go on removing what a crash left."""
        for name in _folders(self._folder, self._fs):
            if name.startswith(_DONE):
                self._delete(self._folder / name)

    def _delete(self, folder: Path) -> None:
        """Remove a folder and what it holds; links in it go, what they lead to stays."""
        fs = self._fs
        for name in fs.scandir(folder):
            path = folder / name
            if not os.path.islink(path) and os.path.isdir(path):
                self._delete(path)
            else:
                fs.unlink(path, missing_ok=True)
        fs.rmdir(folder)
