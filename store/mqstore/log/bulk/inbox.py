"""Inbox of bundles: staged shards that wait for the process that owns the store (spark#inbox).

    inbox/<app>-<version>/bundle.json   {"version": 1, "app", "ver", "shards": [names in order],
                                         "create": {TOPIC: queues}, "highest": {TOPIC: queue id}}
                          <shard>/      in the format of `log.shard`
    inbox/refused/<name>/               a bundle that cannot be appended, with reason.txt
    inbox/.<name>, inbox/_<name>        being created or removed, and ignored

    bundle --append--> recorded --rename to _done-<name>--> --remove--> gone
       \\--bad----> refused/<name>, with reason.txt added

One rename puts a complete bundle into the inbox. Appending it records its version, and then it is removed. After a
crash in between, its version is the last recorded one, and it is only removed. A lower version may have been appended
long ago, or never, so such a bundle is neither appended nor removed but moved aside. The bundles of an application are
appended in the order of their versions. While one cannot be read, later ones wait. If `bundle.json` cannot be read, the
folder's name shows the application.

A faulty bundle is moved aside at once. After an error of the disk a bundle stays and is retried, at growing intervals.
If its own files cannot be read, it is moved aside after `_TRIES` times. Bundles of other applications do not wait for
it. No bundle waits for an appended one that cannot be deleted.

`highest` is the highest queue id in the records of a topic. Older programs do not write it. If the topic has lost
queues since the bundle was staged, no consumer would read some of its records, so the bundle is refused.

The broker creates the topics of a bundle. Without a broker, they are saved for the next one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from mqstore.files.filesystem import FileSystem
from mqstore.files.flusher import GroupCommit
from mqstore.files.jsonfile import load_json
from mqstore.log.bulk.shard import read_note
from mqstore.log.bulk.splice import Splicer, SpliceResult
from mqstore.log.bulk.txn import is_app
from mqstore.log.directory.names import check_topic, is_path_safe
from mqstore.log.directory.store_files import StoreParts
from mqstore.log.stats import TaskErrors
from mqstore.logger import log as _log

_REFUSED = "refused"
_DONE = "_done-"
QUEUES_MAX = 16_384
_ENTRY = {"readQueueNums": 16, "writeQueueNums": 16, "perm": 6}
"""Members of an entry of `topics.json`, and RocketMQ's defaults for absent ones."""
_TRIES = 8
_PAUSE_MIN_MS, _PAUSE_MAX_MS = 1_000, 300_000

CreateTopics = Callable[[Mapping[str, int]], None]
"""Function that creates topics, given the number of queues of each.
Its errors about a name or a number are faults of the bundle."""


class Bundle(NamedTuple):
    """Content of a `bundle.json`."""

    folder: Path
    app: str
    version: int
    shards: tuple[str, ...]
    create: Mapping[str, int]
    highest: Mapping[str, int]

    @classmethod
    def load(cls, folder: Path, fs: FileSystem) -> Bundle:
        """Read the bundle in `folder`. Raises FormatError if it is missing or invalid, else StoreIOError."""
        path = folder / "bundle.json"
        value = read_note(path, fs, "bundle")
        app: Any = value.get("app")
        version: Any = value.get("ver")
        shards: Any = value.get("shards")
        create, highest = value.get("create", {}), value.get("highest", {})
        are_names = isinstance(shards, list) and all(isinstance(name, str) and is_path_safe(name) for name in shards)
        are_counts = isinstance(create, dict) and all(type(n) is int and 0 < n <= QUEUES_MAX for n in create.values())
        are_ids = isinstance(highest, dict) and all(type(each) is int for each in highest.values())
        is_version = type(version) is int and 0 <= version < 1 << 63
        goods = {"app": is_app(app), "ver": is_version, "shards": are_names, "create": are_counts, "highest": are_ids}
        for field, good in goods.items():
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


def queues_entered(root: Path, fs: FileSystem) -> dict[str, int]:
    """Return the number of queues of each topic in the table of the store at `root`. Raises the errors of `load_json`.
    A topic without an entry has every queue that was ever put to, so at most `QUEUES_MAX`."""
    value = load_json(root / "config" / "topics.json", writer=False, fs=fs, root=root).value or {}
    table = value.get("topicConfigTable")
    found: dict[str, int] = {}
    for topic, entry in table.items() if isinstance(table, dict) else ():
        if isinstance(entry, dict):
            read, write, perm = (entry.get(name, default) for name, default in _ENTRY.items())
            if type(read) is type(write) is type(perm) is int:
                found[topic] = max(read, write)
    return found


def _check_highest(root: Path, highest: Mapping[str, int], fs: FileSystem) -> None:
    """Raise ConfigError if a topic no longer has the `highest` queue that its records name."""
    entered = queues_entered(root, fs) if highest else {}
    for topic, queue_id in highest.items():
        queues = entered.get(topic, QUEUES_MAX)
        if queue_id >= queues:
            raise ConfigError(
                f"{root}: rows were written for queue {queue_id} of topic {topic!r}, which was altered and now has "
                f"{queues} queues. Write the rows again"
            )


class InboxState(NamedTuple):
    """Names of waiting bundles, of refused bundles, and of batches that jobs have staged but not committed."""

    waiting: tuple[str, ...]
    refused: tuple[str, ...]
    staged: tuple[str, ...]


def inbox_state(root: Path, fs: FileSystem) -> InboxState:
    """Return the content of the inbox of the store at `root`. Changes nothing."""
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
    """Return `path`, with a number appended if it already exists."""
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
    """A failed bundle: number of tries, monotonic time of the next try, and the error."""

    tries: int
    due_ms: int
    error: OSError


class BulkAppender:
    """Appends staged shards and the bundles of the inbox to an open store, one at a time (spark#commit)."""

    def __init__(self, parts: StoreParts, splicer: Splicer, commit: GroupCommit) -> None:
        self.create_topics: CreateTopics | None = None
        """Function that creates the topics of bundles. Set by a broker."""
        self.spliced = 0
        """Number of bundles appended since the store was opened."""
        self.refused = 0
        """Number of bundles moved aside since the store was opened."""
        self.txn = splicer.txn
        self.lock = splicer.lock
        self.splicer = splicer
        self._commit = commit
        self._root = parts.root
        self._folder = parts.root / "inbox"
        self._fs = parts.fs
        self._clock = parts.clock
        self._file_mode = parts.config.file_mode
        self._trouble: dict[str, _Trouble] = {}
        self._undeletable: set[Path] = set()

    def show(self, result: SpliceResult) -> SpliceResult:
        """Make the records of a bulk append visible to all readers. Return `result`."""
        if not result.already:
            try:
                self._commit.sync_now()
            except (OSError, MQStoreError) as error:  # later puts will fail, but this bulk append has succeeded
                _log.error("%s: %s; earlier bulk appends are complete", self._root, error)
            self.splicer.wakeups.passed()
        return result

    def take_inbox(self) -> int:
        """Append the waiting bundles. Return the number of appended ones.

        Without an inbox this costs one look at its folder. Raises the error that keeps a bundle from being appended,
        but only after all bundles had their turn. A later call retries it.
        """
        fs = self._fs
        if not fs.exists(self._folder):
            return 0
        for name in _folders(self._folder, fs):
            if name.startswith(_DONE) and not os.path.islink(self._folder / name):
                self._tidy(self._folder / name)  # a crash has interrupted its removal
        before = self.spliced
        names = [name for name in _folders(self._folder, fs) if _is_bundle(name)]
        self._trouble = {name: trouble for name, trouble in self._trouble.items() if name in names}
        found: list[Bundle] = []
        stuck: set[str] = set()  # applications with a bundle that cannot be read, or be appended yet
        for name in names:
            if not self._try(name, partial(self._load, self._folder / name, found)):
                stuck.add(name.rpartition("-")[0])
        for bundle in sorted(found, key=lambda bundle: (bundle.app, bundle.version, bundle.folder.name)):
            name = bundle.folder.name
            if bundle.app not in stuck and (self._pauses(name) or not self._try(name, partial(self._take, bundle))):
                stuck.add(bundle.app)
        for trouble in self._trouble.values():
            raise trouble.error
        return self.spliced - before

    def _load(self, folder: Path, found: list[Bundle]) -> None:
        if os.path.islink(folder):
            raise FormatError(f"{folder}: a link, not a folder", "bundle", 0)
        found.append(Bundle.load(folder, self._fs))

    def _take(self, bundle: Bundle) -> None:
        for name in bundle.shards:
            if os.path.islink(bundle.folder / name):
                raise FormatError(f"{bundle.folder / name}: a link, not a folder", "shards", 0)
        _check_highest(self._root, bundle.highest, self._fs)
        noted: Mapping[str, int] = bundle.create
        if self.create_topics is not None and bundle.create:
            self.create_topics(bundle.create)
            noted = {}
        shards = [bundle.folder / name for name in bundle.shards]
        self.show(self.splicer.splice(shards, app=bundle.app, version=bundle.version, create=noted))
        last = self.txn.state.version_of(bundle.app)  # also while the store is being closed
        if last > bundle.version:
            raise FormatError(
                f"{bundle.folder}: ver is {bundle.version}, the last appended one is {last}: a later version of the "
                "application was appended. Stage it again under another app",
                "ver",
                0,
            )
        self.spliced += 1
        self._trouble.pop(bundle.folder.name, None)
        self._remove(bundle.folder)

    def _try(self, name: str, step: Callable[[], None]) -> bool:
        """Run `step` for the bundle `name`. Return False if it must be retried. A bad bundle is moved aside."""
        try:
            try:
                step()
            except NotPermittedError as error:  # first, since it is an OSError too, but about a topic
                self._refuse(self._folder / name, error)
            except (OSError, StoreBusyError, StoreClosedError):
                raise  # a fault of the disk or the state of the store, as far as is known, not of the bundle
            except MQStoreError as error:
                self._refuse(self._folder / name, error)
        except OSError as error:
            return self._give_up(name, error)
        return True

    def _pauses(self, name: str) -> bool:
        trouble = self._trouble.get(name)
        return trouble is not None and self._clock.monotonic_ms() < trouble.due_ms

    def _give_up(self, name: str, error: OSError) -> bool:
        """Count a failure. Return True if the bundle was moved aside because its own files failed repeatedly."""
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
        trouble.due_ms = self._clock.monotonic_ms() + min(_PAUSE_MAX_MS, _PAUSE_MIN_MS << min(trouble.tries, 16))
        return False

    def _refuse(self, folder: Path, error: Exception) -> None:
        """Move a bundle aside, with the reason."""
        fs = self._fs
        aside = self._folder / _REFUSED
        fs.mkdir(aside, exist_ok=True)
        target = free_path(aside / folder.name)
        fs.replace(folder, target)
        fs.sync_directory(aside)
        fs.sync_directory(self._folder)
        self.refused += 1
        self._trouble.pop(folder.name, None)
        _log.error("%s was refused and moved to %s: %s", folder, target, error)
        if os.path.islink(target):
            return
        path = target / "reason.txt"
        with fs.opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, self._file_mode) as fd:
            fs.pwrite(fd, f"{type(error).__name__}: {error}\n".encode("utf-8", "backslashreplace"), 0)
            fs.fdatasync(fd)

    def _remove(self, folder: Path) -> None:
        """Remove an appended bundle.
        It is durably renamed first, so that a half-removed bundle never looks like a waiting one."""
        done = free_path(self._folder / f"{_DONE}{folder.name}")
        self._fs.replace(folder, done)
        self._fs.sync_directory(self._folder)
        self._tidy(done)

    def _tidy(self, folder: Path) -> None:
        """Delete an appended bundle. If that fails, a later call of `take_inbox` does it."""
        try:
            self._fs.remove_tree(folder)
            self._undeletable.discard(folder)
        except OSError as error:
            if folder not in self._undeletable:  # logged once, not on every sweep
                _log.warning("%s was appended, but cannot be deleted: %s", folder, error)
            self._undeletable.add(folder)

    def take_inbox_if_idle(self) -> None:
        """Append the bundles that wait in the inbox, unless a bulk append runs or the store is being closed."""
        if self.lock.acquire(blocking=False):  # the flusher must not wait: a bulk append may wait for it
            try:
                if not self.splicer.wakeups.stopping:
                    self.take_inbox()
            finally:
                self.lock.release()

    def enter_topics_by(self, create_topics: CreateTopics, errors: TaskErrors) -> None:
        """Create the topics of later bundles with `create_topics`.
        Topics of bundles that were appended without a broker are created at once, one by one. If one of them fails,
        its messages stay, and the others are created."""

        def enter_noted() -> None:
            for topic, queues in self.txn.state.create.items():
                try:
                    create_topics({topic: queues})
                except (InvalidMessageError, ConfigError, NotPermittedError) as error:
                    _log.error("%s: topic %r of a bundle cannot be created (%s)", self._root, topic, error)
            self.txn.save(self.txn.state._replace(create={}))

        with self.lock:
            self.create_topics = create_topics
            if self.txn.state.create:
                errors.attempt("topics of bundles", enter_noted)
