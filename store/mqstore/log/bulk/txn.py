"""Record of bulk appends: the last version of each application, and an unfinished one (spark#splice).

    config/spark/txn.json
    {"version": 1,
     "apps":   {APP: {"version": n, "used_ms": ms}},           the last appended version of each application
     "create": {TOPIC: queues},                                topics that the next broker must create
     "intent": {"app", "version", "start", "stamp_ms"}}        only present during a bulk append

`start` is the end of the log before the bulk append. Each of its records has the store time `stamp_ms`, which
distinguishes them from other records.

    state on disk        meaning                                 opening the store for writing
    no intent            all records in the log count            continues
    intent               bytes at and beyond `start` are half    cuts the log back to `start`, then clears the intent
                         a transaction, not yet in any queue

One rename records a version and clears its intent, so no third state exists. An intent that may be outdated (`doubt`)
is only reported and cleared (spark#splice-undo). Then half a transaction may stay, but no stored message is lost.

Beyond 10,000 applications, those unused for 30 days are removed. Beyond 100,000, the oldest are. A streaming query uses
its entry with every batch, so this removes batch jobs that will hardly run again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from mqstore.errors import CorruptStoreError, UnsupportedStoreError
from mqstore.files.filesystem import FILE_MODE, FileSystem
from mqstore.files.jsonfile import FileState, load_json, save_json, state_of
from mqstore.files.segments import SegmentRun
from mqstore.layout.record import Checksum
from mqstore.log.directory.store_files import CheckpointFile, StoreParts
from mqstore.log.recovery.scanning.scanner import Good, scan_log

TXN_FILE = os.path.join("config", "spark", "txn.json")
_SCHEMA = 1
_APPS_KEPT = 10_000
_APPS_MAX = 100_000
_UNUSED_MS = 30 * 86_400_000
_APP_BYTES_MAX = 255


def is_app(app: object) -> bool:
    """Return True if `app` may name an application: a text of 1..255 bytes. The file keeps up to 100,000."""
    return isinstance(app, str) and 1 <= len(app.encode("utf-8", "surrogatepass")) <= _APP_BYTES_MAX


class Intent(NamedTuple):
    """Unfinished bulk append. `start` is a physical offset."""

    app: str
    version: int
    start: int
    stamp_ms: int

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Intent:
        """Return the intent in `value`. Raises ValueError for a member that is missing or of the wrong type."""
        app = value.get("app")
        if not isinstance(app, str):
            raise ValueError(f"intent.app must be a text, not {app!r:.80}")
        version, start, stamp_ms = (_number(value.get(name), name) for name in ("version", "start", "stamp_ms"))
        return cls(app, version, start, stamp_ms)


class TxnState(NamedTuple):
    """Content of the file. `apps` has (version, time of last use) by application."""

    apps: Mapping[str, tuple[int, int]] = MappingProxyType({})
    intent: Intent | None = None
    create: Mapping[str, int] = MappingProxyType({})
    unknown: Mapping[str, Any] = MappingProxyType({})
    """Members that a newer program wrote, kept when the file is written."""

    def version_of(self, app: str) -> int:
        """Return the last version appended for `app`, or -1 if none is saved."""
        return self.apps[app][0] if app in self.apps else -1

    def recorded(self, app: str, version: int, now_ms: int, create: Mapping[str, int]) -> TxnState:
        """Return a state with `version` as the last of `app`, no intent, and these topics to create."""
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
        return self._replace(apps=apps, intent=None, create=wanted)

    def as_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {**self.unknown, "version": _SCHEMA}
        value["apps"] = {app: {"version": version, "used_ms": used} for app, (version, used) in self.apps.items()}
        if self.create:
            value["create"] = dict(self.create)
        if self.intent is not None:
            value["intent"] = self.intent._asdict()
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any], file: str | os.PathLike[str] = TXN_FILE) -> TxnState:
        """Return the state in `value`. Raises ValueError for a wrong shape, which makes a bad file (format#json-load).
        Raises UnsupportedStoreError, naming `file`, if a newer program wrote it. That is not damage, so nothing may
        move the file aside."""
        if (version := _number(value.get("version"), "version")) > _SCHEMA:
            raise UnsupportedStoreError(
                f"{os.fspath(file)} was written by a newer mqstore (version {version}); this version supports "
                f"{_SCHEMA}. Upgrade mqstore",
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
    """The file, for a writer. Not thread-safe: the splicer calls it under its own lock."""

    def __init__(self, parts: StoreParts) -> None:
        self.path = parts.root / TXN_FILE
        self.state = TxnState()
        self.written = False
        """True if the file exists, or existed."""
        self.problems: list[str] = []
        self._parts = parts
        self._folders_durable = False
        self._check = partial(TxnState.from_json, file=self.path)

    def load(self) -> None:
        """Read `state`.
        Raises CorruptStoreError if there was a value and no good copy is left, UnsupportedStoreError if a newer program
        wrote it, and StoreIOError."""
        parts = self._parts
        value, self.problems = load_json(
            self.path, writer=True, fs=parts.fs, clock=parts.clock, check=self._check, root=parts.root
        )
        self.written = value is not None
        self.state = self._check(value) if value is not None else TxnState()

    def save(self, state: TxnState) -> None:
        """Write `state`. Durable on return.

        Raises StoreFullError or StoreIOError. Then the file has its old value, or `state` if only the last sync failed
        (see `on_disk`)."""
        self._make_folders()
        parts = self._parts
        save_json(self.path, state.as_json(), parts.fs, check=self._check, file_mode=parts.config.file_mode)
        self.state, self.written = state, True

    def on_disk(self) -> TxnState:
        return read_txn(self._parts.root, self._parts.fs)

    def _make_folders(self) -> None:
        if self._folders_durable:
            return
        spark, fs = self.path.parent, self._parts.fs
        for folder in (spark.parent, spark):
            fs.mkdir(folder, exist_ok=True)
            fs.sync_directory(folder.parent)
        self._folders_durable = True


def read_txn(root: Path, fs: FileSystem) -> TxnState:
    """Return the current value of the file, as the page cache has it. Raises the errors of `TxnFile.load`."""
    return _read(root, fs)[0]


def _read(root: Path, fs: FileSystem) -> tuple[TxnState, list[str]]:
    check = partial(TxnState.from_json, file=root / TXN_FILE)
    value, problems = load_json(root / TXN_FILE, writer=False, fs=fs, check=check, root=root)
    return (check(value) if value is not None else TxnState()), problems


class IntentWatch:
    """Unfinished bulk append as seen by a reader.
    The file may be long, so it is read again only if it has changed. Each change is a rename, which changes its inode,
    its time, or both."""

    def __init__(self, root: Path, fs: FileSystem) -> None:
        self._root = root
        self._fs = fs
        self._seen: FileState | None = None
        self._intent: Intent | None = None

    def pending(self) -> Intent | None:
        """Return the unfinished bulk append, or None. From its start on, the log is half a transaction.

        An unusable file counts as None, and so does an intent below the flushed offset. The next opening for writing
        reports them. Raises UnsupportedStoreError for a newer program's file, since then it is unknown which records
        count.
        """
        seen = None
        with suppress(OSError):  # before the file is read, so that a change meanwhile is read again
            seen = state_of(self._root / TXN_FILE, self._fs)
        if seen is None or seen != self._seen:
            self._seen = self._intent = None
            with suppress(CorruptStoreError):
                state, problems = _read(self._root, self._fs)
                self._intent = None if problems else state.intent
            self._seen = seen  # unless reading raised
        if self._intent is None:
            return None
        checkpoint = CheckpointFile(self._root, self._fs, FILE_MODE)
        checkpoint.load()  # after the intent: an intent that was cleared in between is no longer pending
        flushed = checkpoint.current.flushed
        return None if flushed is not None and flushed > self._intent.start else self._intent


def doubt(intent: Intent, run: SegmentRun, checksum: Checksum, flushed: int | None, from_backup: bool) -> str:
    """Return why `intent` must be ignored, or "" if only its own records are beyond its start."""
    if from_backup:
        return "it was read from a backup, since the file is damaged"
    if flushed is not None and flushed > intent.start:
        return f"the log was flushed up to {flushed} since then"
    for event in scan_log(run, intent.start, checksum):
        if isinstance(event, Good) and bool((event.headers.store_timestamp_ms != intent.stamp_ms).any()):
            return f"there are records of another writer before {event.end}"
    return ""
