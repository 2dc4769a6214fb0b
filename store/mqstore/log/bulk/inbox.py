"""Bundles of staged shards that wait for the owner of the store, who has its lock (spark#inbox).

    inbox/<app>-<version>/bundle.json   {"version": 1, "app", "ver", "shards": [names in order],
                                         "create": {TOPIC: queues}, "highest": {TOPIC: queue id}}
                          <shard>/      as `log.shard` describes them
    inbox/refused/<name>/               a bundle that cannot be spliced, with reason.txt
    inbox/.<name>, inbox/_<name>        being made, or being removed: not looked at

    bundle --splice--> recorded --rename to _done-<name>--> --remove--> gone
       \\--bad----> refused/<name>, and reason.txt beside what it holds

A bundle comes by one rename and is whole then. It is spliced, which records its version, and only then removed: a crash
in between meets the version that was the last one in. One of a version below that was never in, or was long ago:
nobody knows any more, so it is not spliced and not removed but moved aside. The bundles of one application go in the
order of their versions; while one cannot be read, the later ones wait. Of one whose `bundle.json` cannot be read the
application is told from the folder's name.

What is wrong with the bundle itself moves it aside at once. What is wrong with the disk leaves it where it is, and it
is tried again, ever more rarely; one whose own files cannot be read is moved aside after `_TRIES` times. Those of other
applications do not wait for it, and nobody waits for one that is in and cannot be deleted.

`highest`, which older programs do not write: the highest queue that the records of a topic name. While a bundle was
staged or waited its topic may have lost queues, and records in those nobody would read: such a bundle is refused.

Knows folders and the splicer. Who is to enter the topics of a bundle is a function that a broker gives; without one the
splice notes them for a broker to come.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mqstore.clock import Clock
from mqstore.errors import (
    ConfigError,
    FormatError,
    InvalidMessageError,
    MQStoreError,
    NotPermittedError,
    ReadOnlyStoreError,
    StoreBusyError,
    StoreClosedError,
    StoreIOError,
)
from mqstore.files.filesystem import FILE_MODE, FileSystem
from mqstore.files.jsonfile import decode_json, load_json, read_json
from mqstore.log.bulk.txn import is_app
from mqstore.log.names import check_topic, is_path_safe

__all__ = ["Bundle", "Inbox", "InboxState", "check_highest", "free_path", "inbox_state", "queues_of", "topics_entered"]

_log = logging.getLogger("mqstore")
_REFUSED = "refused"
_DONE = "_done-"
_QUEUES_MAX = 16_384
_ENTRY = {"readQueueNums": 16, "writeQueueNums": 16, "perm": 6}
"""Members of an entry of `topics.json`, and what RocketMQ takes where one is absent."""
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
    highest: Mapping[str, int]

    @classmethod
    def load(cls, folder: Path, fs: FileSystem) -> Bundle:
        """FormatError when it is missing or says what nobody can do, StoreIOError when it cannot be read."""
        path = folder / "bundle.json"
        try:
            value = decode_json(read_json(path, fs))
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
        highest: Any = value.get("highest", {})
        for good, field in (
            (is_app(app), "app"),
            (type(version) is int and 0 <= version < 1 << 63, "ver"),
            (isinstance(shards, list) and all(_is_name(name) for name in shards), "shards"),
            (isinstance(create, dict) and all(map(_is_count, create.values())), "create"),
            (isinstance(highest, dict) and all(type(each) is int for each in highest.values()), "highest"),
        ):
            if not good:
                raise FormatError(f"{path}: {field} is {value.get(field)!r:.80}", field, 0)
        if len(set(shards)) != len(shards):
            raise FormatError(f"{path}: a shard is named twice", "shards", 0)
        for topic in create:
            try:
                check_topic(topic)
            except InvalidMessageError as error:
                raise FormatError(f"{path}: create: {error}", "create", 0) from error
        return cls(folder, app, version, tuple(shards), create, highest)


def _is_name(name: Any) -> bool:
    """Whether a shard's name leads to a folder of the bundle and nowhere else."""
    return isinstance(name, str) and is_path_safe(name)


def _is_count(queues: Any) -> bool:
    """Whether a topic may have so many queues."""
    return type(queues) is int and 1 <= queues <= _QUEUES_MAX


class Entered(NamedTuple):
    """What a topic's entry says."""

    read_queues: int
    write_queues: int
    perm: int


def topics_entered(root: Path, fs: FileSystem) -> dict[str, Entered]:
    """The topics that the store at `root` has in its table. One without an entry has as many queues as were ever put
    to. The file is a broker's, who changes it before he goes by it. Raises as `load_json`."""
    value = load_json(root / "config" / "topics.json", writer=False, fs=fs, root=root).value or {}
    table = value.get("topicConfigTable")
    found: dict[str, Entered] = {}
    for topic, entry in table.items() if isinstance(table, dict) else ():
        if isinstance(entry, dict):
            numbers = [entry.get(name, default) for name, default in _ENTRY.items()]
            if all(type(each) is int for each in numbers):
                found[topic] = Entered(*numbers)
    return found


def check_highest(root: Path, entered: Mapping[str, Entered], highest: Mapping[str, int]) -> None:
    """ConfigError if a topic of the store at `root`, which has `topics_entered`, has no longer the `highest` queue that
    records were given."""
    for topic, queue_id in highest.items():
        queues = queues_of(entered.get(topic))
        if queue_id >= queues:
            raise ConfigError(
                f"{root}: rows were written for queue {queue_id} of topic {topic!r}, which has {queues} queues now: it "
                "was altered meanwhile; write them again"
            )


def queues_of(entry: Entered | None) -> int:
    """Return the number of queues that a topic has by its entry; without one, the most that a topic can have."""
    return _QUEUES_MAX if entry is None else max(entry.read_queues, entry.write_queues)


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


def free_path(path: Path) -> Path:
    """`path`, or it with a number behind: a name that nothing has."""
    number = 0
    found = path
    while os.path.lexists(found):
        number += 1
        found = path.with_name(f"{path.name}.{number}")
    return found


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

    `splice(shards, app, version, create)` stores a bundle, and gives the version of `app` that is the last one in by
    then: a higher one when nothing was done. `create_topics`: see the module, set by a broker.
    """

    def __init__(
        self,
        root: Path,
        fs: FileSystem,
        clock: Clock,
        *,
        splice: Callable[[list[Path], str, int, Mapping[str, int]], int],
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
        self._undeletable: set[Path] = set()

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
        names = [name for name in _folders(self._folder, fs) if _is_bundle(name)]
        self._trouble = {name: trouble for name, trouble in self._trouble.items() if name in names}
        stuck: set[str] = set()
        for bundle in self._in_order(names, stuck):
            name = bundle.folder.name
            if bundle.app not in stuck and (self._pauses(name) or not self._try(name, partial(self._take, bundle))):
                stuck.add(bundle.app)
        for trouble in self._trouble.values():
            raise trouble.error
        return self.spliced - before

    def _in_order(self, names: list[str], stuck: set[str]) -> list[Bundle]:
        """The bundles that wait, by application and version; bad ones are moved aside. The applications of those that
        cannot be read come to `stuck`."""
        found: list[Bundle] = []
        for name in names:
            if not self._try(name, partial(self._load, self._folder / name, found)):
                stuck.add(name.rpartition("-")[0])
        return sorted(found, key=lambda bundle: (bundle.app, bundle.version, bundle.folder.name))

    def _load(self, folder: Path, found: list[Bundle]) -> None:
        if os.path.islink(folder):
            raise FormatError(f"{folder}: a link, not a folder", "bundle", 0)
        found.append(Bundle.load(folder, self._fs))

    def _take(self, bundle: Bundle) -> None:
        for name in bundle.shards:
            if os.path.islink(bundle.folder / name):
                raise FormatError(f"{bundle.folder / name}: a link, not a folder", "shards", 0)
        if bundle.highest:
            root = self._folder.parent
            check_highest(root, topics_entered(root, self._fs), bundle.highest)
        noted: Mapping[str, int] = bundle.create
        if self.create_topics is not None and bundle.create:
            self.create_topics(bundle.create)
            noted = {}
        last = self._splice([bundle.folder / name for name in bundle.shards], bundle.app, bundle.version, noted)
        if last > bundle.version:
            what = f"{bundle.folder}: ver is {bundle.version}, the last one in is {last}"
            raise FormatError(
                f"{what}: a later version of the application is in; stage it again under another app", "ver", 0
            )
        self.spliced += 1
        self._trouble.pop(bundle.folder.name, None)
        self._remove(bundle.folder)

    def _try(self, name: str, step: Callable[[], None]) -> bool:
        """Do `step` of the bundle `name`; False when it is to be tried again. One at fault itself is moved aside."""
        try:
            try:
                step()
            except NotPermittedError as error:  # before the others: it is an OSError, but of a topic
                self._refuse(self._folder / name, error)
            except (OSError, StoreBusyError, StoreClosedError):
                raise  # the disk, or the state of the store: no fault of the bundle, as far as is known
            except MQStoreError as error:
                self._refuse(self._folder / name, error)
        except OSError as error:
            return self._give_up(name, error)
        return True

    def _pauses(self, name: str) -> bool:
        trouble = self._trouble.get(name)
        return trouble is not None and self._clock.monotonic_ms() < trouble.due_ms

    def _give_up(self, name: str, error: OSError) -> bool:
        """Count a failure; whether the bundle was moved aside, its own files being the reason time and again."""
        if self._pauses(name):
            return False
        folder = self._folder / name
        trouble = self._trouble.setdefault(name, _Trouble(0, 0, error))
        trouble.error = error
        inside = str(getattr(error, "filename", None) or "").startswith(f"{folder}{os.sep}")
        trouble.tries += 1
        if inside and isinstance(error, StoreIOError | ReadOnlyStoreError) and trouble.tries >= _TRIES:
            try:
                self._refuse(folder, error)
                return True
            except OSError as worse:
                trouble.error = worse
        pause_ms = min(_PAUSE_MAX_MS, _PAUSE_MIN_MS << min(trouble.tries, 16))
        trouble.due_ms = self._clock.monotonic_ms() + pause_ms
        return False

    # -- folders ----------------------------------------------------------------------------------------------------

    def _refuse(self, folder: Path, error: Exception) -> None:
        """Move a bundle aside, and say why."""
        fs = self._fs
        aside = self._folder / _REFUSED
        fs.mkdir(aside, exist_ok=True)
        target = free_path(aside / folder.name)
        fs.replace(folder, target)
        fs.sync_directory(aside)
        fs.sync_directory(self._folder)
        self.refused += 1
        self._trouble.pop(folder.name, None)
        _log.error("%s is refused and moved to %s: %s", folder, target, error)
        if os.path.islink(target):
            return
        path = target / "reason.txt"
        with fs.opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, self._file_mode) as fd:
            fs.pwrite(fd, f"{type(error).__name__}: {error}\n".encode("utf-8", "backslashreplace"), 0)
            fs.fdatasync(fd)

    def _remove(self, folder: Path) -> None:
        """Remove a bundle that is in. The new name first, durably: half of one must never look like one that waits."""
        done = free_path(self._folder / f"{_DONE}{folder.name}")
        self._fs.replace(folder, done)
        self._fs.sync_directory(self._folder)
        self._tidy(done)

    def _sweep(self) -> None:
        """Go on removing what a crash left."""
        for name in _folders(self._folder, self._fs):
            if name.startswith(_DONE) and not os.path.islink(self._folder / name):
                self._tidy(self._folder / name)

    def _tidy(self, folder: Path) -> None:
        """Delete what is done with, or leave it to a later sweep: nobody has to wait for that."""
        try:
            self._fs.remove_tree(folder)
            self._undeletable.discard(folder)
        except OSError as error:
            if folder not in self._undeletable:  # told once, not with every look
                _log.warning("%s is done with and cannot be deleted: %s", folder, error)
            self._undeletable.add(folder)
