"""What a splice leaves behind: which versions of which applications are in, and which one is under way (spark#splice).

    config/spark/txn.json
    {"version": 1,
     "apps":   {APP: {"version": n, "used_ms": ms}},           the last version that was spliced for each application
     "create": {TOPIC: queues},                                topics that a broker is still to enter in its table
     "intent": {"app", "version", "start", "stamp_ms",         absent but while a splice is under way
                "queues": {TOPIC: {"0": n}}}}

`start` is the end of the log before the splice, `queues` the next offset of each queue it appends to. Every record of a
splice bears the store time `stamp_ms`, by which its records are told from anybody else's.

    state on disk        means                                   who opens the store for writing
    no intent            all that is in the log counts           goes on
    intent               bytes at and beyond `start` are half    cuts the log back to `start`, then clears the intent
                         a transaction, not yet in any queue

Recording a version and clearing its intent is one rename, so there is no third state. An intent is not acted on, only
reported and cleared, where it cannot be the last word (`doubt`): it comes from the backup of a damaged file, the log
was flushed beyond `start` since, or somebody else's records lie there, as when a Java broker has gone on with the
directory, which knows nothing of this file. Then half a transaction may stay; a stored message is never lost for it.

The table keeps who was used last: beyond 10,000 applications those that nobody used for 30 days go, beyond 100,000 the
oldest. A streaming query uses its entry with every batch; what goes is batch jobs that will hardly be run again.

Knows JSON and the log's scanner; knows neither shards nor how they are appended.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mqstore.clock import Clock
from mqstore.errors import CorruptStoreError, UnsupportedStoreError
from mqstore.files.filesystem import FILE_MODE, FileSystem
from mqstore.files.jsonfile import load_json, save_json
from mqstore.files.segments import SegmentRun
from mqstore.layout.record import Checksum
from mqstore.log.checkpoint import CheckpointFile
from mqstore.log.recovery.scanner import Good, scan_log

__all__ = ["TXN_FILE", "Intent", "IntentWatch", "TxnFile", "TxnState", "doubt", "is_app", "read_txn"]

TXN_FILE = os.path.join("config", "spark", "txn.json")
_SCHEMA = 1
_APPS_KEPT = 10_000
_APPS_MAX = 100_000
_UNUSED_MS = 30 * 86_400_000
_APP_BYTES_MAX = 255


def is_app(app: object) -> bool:
    """Whether `app` may name an application: a text of 1..255 bytes. The file keeps up to 100,000 of them."""
    return isinstance(app, str) and 1 <= len(app.encode("utf-8", "surrogatepass")) <= _APP_BYTES_MAX


def _nothing() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Intent:
    """A splice under way. Offsets: `start` physical, `queues` by (topic, queue id)."""

    app: str
    version: int
    start: int
    stamp_ms: int
    queues: Mapping[tuple[str, int], int]

    def as_json(self) -> dict[str, Any]:
        queues: dict[str, dict[str, int]] = {}
        for (topic, queue_id), offset in self.queues.items():
            queues.setdefault(topic, {})[str(queue_id)] = offset
        return {
            "app": self.app,
            "version": self.version,
            "start": self.start,
            "stamp_ms": self.stamp_ms,
            "queues": queues,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Intent:
        """ValueError for a member that is missing or of another type."""
        queues = {
            (topic, int(queue_id)): _number(offset, "queues")
            for topic, offsets in _object(value, "queues").items()
            for queue_id, offset in _object({"queues": offsets}, "queues").items()
        }
        app = value.get("app")
        if not isinstance(app, str):
            raise ValueError(f"intent.app must be a text, not {app!r:.80}")
        version, start, stamp_ms = (_number(value.get(name), name) for name in ("version", "start", "stamp_ms"))
        return cls(app, version, start, stamp_ms, queues)


@dataclass(frozen=True, slots=True)
class TxnState:
    """The content of the file. `apps`: (version, when it was used) by application."""

    apps: Mapping[str, tuple[int, int]] = field(default_factory=_nothing)
    intent: Intent | None = None
    create: Mapping[str, int] = field(default_factory=_nothing)
    unknown: Mapping[str, Any] = field(default_factory=_nothing)
    """Members of a newer program, kept on rewriting."""

    def version_of(self, app: str) -> int:
        """The last version spliced for `app`; -1: none, or none that is remembered."""
        return self.apps[app][0] if app in self.apps else -1

    def recorded(self, app: str, version: int, now_ms: int, create: Mapping[str, int]) -> TxnState:
        """With `version` as the last of `app`, no intent, and these topics to be created."""
        apps = {**self.apps, app: (version, now_ms)}
        if len(apps) > _APPS_KEPT:
            newest_first = sorted(apps.items(), key=lambda item: -item[1][1])
            apps = {
                name: entry
                for i, (name, entry) in enumerate(newest_first[:_APPS_MAX])
                if i < _APPS_KEPT or now_ms - entry[1] < _UNUSED_MS
            }
        wanted = {**self.create}
        for topic, queues in create.items():
            wanted[topic] = max(queues, wanted.get(topic, 0))
        return replace(self, apps=apps, intent=None, create=wanted)

    def as_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {**self.unknown, "version": _SCHEMA}
        value["apps"] = {app: {"version": version, "used_ms": used} for app, (version, used) in self.apps.items()}
        if self.create:
            value["create"] = dict(self.create)
        if self.intent is not None:
            value["intent"] = self.intent.as_json()
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any], file: str | os.PathLike[str] = TXN_FILE) -> TxnState:
        """ValueError for another shape: that makes the file a bad one (format#json-load). UnsupportedStoreError, which
        names `file`, for one of a newer program: that is no damage, and nobody may move it aside."""
        if (version := _number(value.get("version"), "version")) > _SCHEMA:
            raise UnsupportedStoreError(
                f"{os.fspath(file)} was written by a newer mqstore (version {version}); this one knows version "
                f"{_SCHEMA}: upgrade mqstore",
                version,
                (),
            )
        apps = {}
        for app in _object(value, "apps"):
            entry = _object(value["apps"], app)
            apps[app] = (_number(entry.get("version"), "version"), _number(entry.get("used_ms"), "used_ms"))
        intent = Intent.from_json(_object(value, "intent")) if "intent" in value else None
        create = {topic: _number(queues, "create") for topic, queues in _object(value, "create").items()}
        unknown = {key: value[key] for key in value.keys() - {"version", "apps", "create", "intent"}}
        return cls(apps, intent, create, unknown)


def _object(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = value.get(name, {})
    if not isinstance(found, dict):
        raise ValueError(f"{name} must be an object, not {found!r:.80}")
    return found


def _number(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{name} must be a number of 63 bits, not {value!r:.80}")
    return value


class TxnFile:
    """The file of a writer. Not thread-safe: the splicer calls it under its own lock."""

    def __init__(self, root: Path, fs: FileSystem, clock: Clock, file_mode: int) -> None:
        self.path = root / TXN_FILE
        self.state = TxnState()
        self.written = False
        """Whether there is, or was, such a file."""
        self.problems: list[str] = []
        self._root = root
        self._fs = fs
        self._clock = clock
        self._file_mode = file_mode
        self._folders_durable = False
        self._check = partial(TxnState.from_json, file=self.path)

    def load(self) -> None:
        """Read `state`. Raises CorruptStoreError when there was a value and no good copy is left, UnsupportedStoreError
        for that of a newer program, StoreIOError."""
        value, self.problems = load_json(
            self.path, writer=True, fs=self._fs, clock=self._clock, check=self._check, root=self._root
        )
        self.written = value is not None
        self.state = self._check(value) if value is not None else TxnState()

    def save(self, state: TxnState) -> None:
        """Write `state`, durable on return. Raises StoreFullError, StoreIOError: then the file says what it said
        before, or `state` if only the last sync failed (`on_disk` tells). ValueError, nothing written, for a state that
        could not be read again: opening would take it for damage, and an older one for the last word."""
        value = state.as_json()
        self._check(value)
        self._make_folders()
        save_json(self.path, value, self._fs, check=self._check, file_mode=self._file_mode)
        self.state, self.written = state, True

    def on_disk(self) -> TxnState:
        """What the file says now, as far as the page cache knows."""
        return read_txn(self._root, self._fs)

    def _make_folders(self) -> None:
        if self._folders_durable:
            return
        spark = self.path.parent
        for folder in (spark.parent, spark):
            self._fs.mkdir(folder, exist_ok=True)
            self._fs.sync_directory(folder.parent)
        self._folders_durable = True


def read_txn(root: Path, fs: FileSystem) -> TxnState:
    """What the file says now, as far as the page cache knows, for anybody. Raises as `TxnFile.load` does."""
    return _read(root, fs)[0]


def _read(root: Path, fs: FileSystem) -> tuple[TxnState, list[str]]:
    """Likewise, and what was amiss with the file."""
    check = partial(TxnState.from_json, file=root / TXN_FILE)
    value, problems = load_json(root / TXN_FILE, writer=False, fs=fs, check=check, root=root)
    return (check(value) if value is not None else TxnState()), problems


class IntentWatch:
    """For readers: whether a splice is under way. The file may be long, so it is read again only when it has changed:
    each change is a rename, which gives it another inode, another time, or both."""

    def __init__(self, root: Path, fs: FileSystem) -> None:
        self._root = root
        self._fs = fs
        self._seen: tuple[int, int, int] | None = None
        self._intent: Intent | None = None

    def pending(self) -> Intent | None:
        """The splice from whose start on the log is half a transaction; None without one.

        A file that cannot be used counts as none, and so does an intent below what was flushed: whoever opens the store
        for writing will say so. But a newer program's is UnsupportedStoreError: what counts in the log is not known.
        """
        seen = self._signature()
        if seen is None or seen != self._seen:
            self._seen = None  # in case reading raises
            self._intent = self._found()
            self._seen = seen
        if self._intent is None:
            return None
        checkpoint = CheckpointFile(self._root, self._fs, FILE_MODE)
        checkpoint.load()  # after the intent: one that was recorded in between is no longer pending
        flushed = checkpoint.current.flushed
        return None if flushed is not None and flushed > self._intent.start else self._intent

    def _signature(self) -> tuple[int, int, int] | None:
        """Taken before the file is read: what changes in between is then read once more, not once too few."""
        try:
            found = self._fs.stat(self._root / TXN_FILE)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _found(self) -> Intent | None:
        try:
            state, problems = _read(self._root, self._fs)
        except CorruptStoreError:
            return None
        return None if problems else state.intent


def doubt(intent: Intent, run: SegmentRun, checksum: Checksum, flushed: int | None, from_backup: bool) -> str:
    """Why `intent` must not be acted on; "" when what lies beyond its start is its own and nothing else."""
    if from_backup:
        return "it was read from a backup, the file itself being damaged"
    if flushed is not None and flushed > intent.start:
        return f"the log was flushed up to {flushed} since"
    for event in scan_log(run, intent.start, checksum):
        if isinstance(event, Good) and bool((event.headers.store_timestamp_ms != intent.stamp_ms).any()):
            return f"records of somebody else lie before {event.end}"
    return ""
