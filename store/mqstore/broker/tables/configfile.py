"""Files of `config/`: reading and writing of the broker's tables (delivery#tables, delivery#saved-offsets).

`files.jsonfile` writes the bytes to disk and handles damaged files.

    load    read the members, and remember unknown ones
    save    write `value` over the remembered members, so that those of a newer mqstore or a Java broker are kept

A quick save costs no sync. It is for `kill -9`, and has the log end on which it depends: {"logEnd": 8192, ...}. After a
power cut the log may end earlier. Then its backup, the last synced save, is loaded instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast

from mqstore.errors import ReadOnlyStoreError
from mqstore.files.jsonfile import EncodedEntry, FileState, encode_entry, load_json, save_json, sync_json
from mqstore.files.lock import refusal_to_reader
from mqstore.log.recovery.queueends import LOG_END
from mqstore.logger import log as _log
from mqstore.signalsafe import Lock

if TYPE_CHECKING:
    from mqstore.log.reading.reader import StoreReader
    from mqstore.log.store import MessageStore

QUICK_MS: Final = 100
"""Number of ms from a change of offsets to the quick save that includes it."""
NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


def member(entry: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    """Return `entry[name]`, or `default` if it is absent or null, as in RocketMQ.
    Raises ValueError if the type is not exactly `kind`: this makes the whole file invalid (format#json-load). Exactly,
    because `True` is an int in Python, but not in the engine that wrote the file."""
    value = entry.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise ValueError(f"{name} must be of type {kind.__name__}, not {value!r:.80}")
    return value


def object_member(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the object `value[name]`, or {} if it is absent or null. Raises ValueError for another type."""
    found: dict[str, Any] = member(value, name, dict, None) or {}
    return found


def entries(value: Mapping[str, Any], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of the table `value[name]` by name, without null entries.
    Raises ValueError for another type."""
    for key, entry in object_member(value, name).items():
        if entry is not None:
            if type(entry) is not dict:
                raise ValueError(f"{name}: {key[:300]!r} must be an object")
            yield key, entry


def data_version(value: Mapping[str, Any]) -> dict[str, int]:
    """Return the version of a table, which RocketMQ's tools compare to find the newer copy.
    Members that RocketMQ 4.x did not have yet count as 0. Raises ValueError for another type."""
    version = object_member(value, "dataVersion")
    return {name: member(version, name, int, 0) for name in ("counter", "stateVersion", "timestamp")}


class ConfigFile:
    """One JSON file of a store. Not thread-safe: its table calls it under the table's own lock."""

    def __init__(
        self,
        store: StoreReader,
        name: str,
        check: Callable[[dict[str, Any]], object] | None = None,
        *,
        folder: str = "config",
        log_end: int | None = None,
    ) -> None:
        """Use the file `name` in a folder of a store.
        `check(value)` raises ValueError for an object of the wrong shape, which then counts as damaged. `log_end` is
        the log end that was found at opening. A quick save that depends on more of the log counts as damaged, unless
        `log_end` is None."""
        self.path = store.path / folder / name
        self.problems: list[str] = []
        """Problems found by `load`, a sentence each. Each is logged once."""
        self._store = store
        self._check = check
        self._members: dict[str, Any] = {}
        self._log_end = log_end
        self.has_saved = False
        """True after a synced save since `load`. Only then is a quick save allowed."""
        self._is_quick = False
        self._last: FileState | None = None
        """State of the file after the last save."""

    def load(self) -> dict[str, Any] | None:
        """Return the value of the file or of its backup, or None if neither was ever written.
        Raises CorruptStoreError if there was a value and no good copy is left. The message names the command that
        discards the value, because mqstore never does so by itself (reliability#p10). Raises StoreIOError if a file
        cannot be read."""
        store = self._store
        value, problems = load_json(
            self.path, writer=store.mode == "rw", fs=store.fs, clock=store.clock, check=self._fits, root=store.path
        )
        for problem in problems:
            self.report(problem)
        self._members = {name: each for name, each in (value or {}).items() if name != LOG_END}
        return value

    def _fits(self, value: dict[str, Any]) -> None:
        end = member(value, LOG_END, int, 0)
        if self._log_end is not None and end > self._log_end:
            raise ValueError(
                f"it was saved without a sync when the log ended at {end}, but now the log ends at {self._log_end}"
            )
        if self._check is not None:
            self._check(value)

    def report(self, problem: str) -> None:
        self.problems.append(problem)
        _log.warning("%s", problem)

    def writable(self) -> MessageStore:
        """Return the store. Raises ReadOnlyStoreError if it is open for reading."""
        if self._store.mode != "rw":
            raise ReadOnlyStoreError(refusal_to_reader(self._store.path, self._store.fs))
        return cast("MessageStore", self._store)

    def flush_log(self) -> None:
        """Flush the log, because the next save depends on all messages that were put before it.
        Raises the errors of `MessageStore.flush`, and ReadOnlyStoreError."""
        self.writable().flush()

    def save(self, value: dict[str, Any], *, steps: int | None = None, quick_log_end: int | None = None) -> None:
        """Save `value`, and the members of the loaded file that it does not have.
        With `steps` the file has a version, which then counts so many more changes. A save is durable, except with
        `quick_log_end`. That makes a quick save, which depends on the log up to there and is allowed only after
        `has_saved`. Raises StoreFullError, StoreIOError, ReadOnlyStoreError, StoreClosedError. The file is then
        unchanged."""
        store = self.writable()
        fs = store.fs
        store.check_open()  # after a close, another process may have saved a newer value
        if not self.has_saved:  # an earlier process may have been killed before it synced folder and file
            for name in reversed(self.path.relative_to(store.path).parents[:-1]):
                folder = store.path / name
                fs.mkdir(folder, exist_ok=True)
                fs.sync_directory(folder.parent)
            sync_json(self.path, fs)
        merged = {**self._members, **value}
        if steps is not None:
            version = data_version(self._members)
            if steps:
                version |= {"counter": version["counter"] + steps, "stateVersion": 0, "timestamp": store.clock.now_ms()}
            merged["dataVersion"] = version
        quick = quick_log_end is not None
        self._last = save_json(
            self.path,
            {LOG_END: quick_log_end, **merged} if quick else merged,
            fs,
            check=self._fits,
            file_mode=store.config.file_mode,
            synced=not quick,
            back_up=not self._is_quick,
            last=self._last,
        )
        self._members, self._is_quick = merged, quick
        self.has_saved = True


class ConfigTable:
    """Table of topics or groups in a file. A look-up takes no lock.
    A change is saved before it takes effect: if a method raises, nothing changed."""

    def __init__(self, store: StoreReader, name: str, check: Callable[[dict[str, Any]], object]) -> None:
        self.on_change: list[Callable[[str], None]] = []
        """Functions called with the name of a created, changed or deleted entry.
        They are called in the thread that changed it, without a lock."""
        self._lock = Lock()
        self._file = ConfigFile(store, name, check)
        self._lines: dict[str, tuple[object, EncodedEntry]] = {}

    def _encoded(self, table: Mapping[str, Any]) -> dict[str, EncodedEntry]:
        """Return the line of each entry of `table`: immutable objects with a method `as_json`.
        An entry is encoded when it changed, not with every save."""
        lines = {}
        for name, entry in table.items():
            line = self._lines.get(name)
            if line is None or line[0] is not entry:
                line = entry, encode_entry(name, entry.as_json())
            lines[name] = line
        self._lines = lines
        return {name: line for name, (_, line) in lines.items()}

    def _notify(self, name: str) -> None:
        for function in list(self.on_change):
            function(name)
