"""Small stores for the log's tests: tiny files so that every boundary is near, a clock that stands still."""

from __future__ import annotations

import ipaddress
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

import mqstore
from mqstore import Durability, Profile, QueueRef, SimulatedClock, StoreConfig
from mqstore.files.filesystem import FileSystem, StrPath
from mqstore.jobs import recover
from mqstore.layout.checkpoint import Checkpoint, decode
from mqstore.log import commitlog
from mqstore.log.directory.store_files import CheckpointFile
from mqstore.log.reading.reader import StoreReader
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.store import MessageStore
from mqstore.log.writing.dispatcher import Dispatcher

__all__ = [
    "EXPORTED",
    "HEADER",
    "SEGMENT",
    "Unsynced",
    "act_behind",
    "all_queues",
    "as_ours",
    "checkpoint_of",
    "checkpointed",
    "delete_as_java",
    "dispatcher_of",
    "files",
    "flip",
    "flip_log",
    "kill",
    "note_in_checkpoint",
    "open_store",
    "overwrite",
    "overwrite_log",
    "reboot",
    "recovered",
    "segment",
    "segment_of",
    "units_of",
    "until_parked",
]

SEGMENT = 4096
HEADER = 91
"""What a V1 record with IPv4 hosts takes beside body, topic and properties (format#record)."""


EXPORTED = (
    *("topic", "queue_id", "queue_offset", "physical_offset", "size", "tags", "keys", "properties", "flag", "sys_flag"),
    *("born_timestamp_ms", "born_host", "store_timestamp_ms", "store_host", "reconsume_times"),
    *("prepared_transaction_offset", "message_id", "unique_key"),
)
"""What `row_of` and the Java engine's listings both say of a message, beside its body."""


class Unsynced(FileSystem):
    """Files without a single sync: nothing here cuts the power, and a sync costs more than all else a test does."""

    def fdatasync(self, fd: int) -> None:
        self.stat(fd)  # whoever syncs a closed descriptor still hears of it

    def sync_directory(self, path: StrPath) -> None:
        self.stat(path)


def open_in(mode: str, path: Path | str, **options: Any) -> Any:
    """A `MessageStore` for mode "rw", a `ReadOnlyMessageStore` for "r"."""
    return {"rw": MessageStore, "r": ReadOnlyMessageStore}[mode](path, **options)


def open_store(
    path: Path,
    mode: Literal["rw", "r"] = "rw",
    *,
    profile: Profile | None = None,
    durability: Durability = "append",
    fs: FileSystem | None = None,
    **config: Any,
) -> Any:
    """A store without threads: what is not asked for by `dispatch` or `run_once` only happens when a reader needs it.

    Sizes are small when it is created here, and its own when it exists.
    """
    new = mode == "rw" and not (path / "commitlog").exists()
    small = {"segment_bytes": SEGMENT, "consumequeue_units": 8, "index_slots": 16, "index_entries": 32} if new else {}
    chosen = StoreConfig(**{**small, "clock": SimulatedClock(), **config})
    if mode == "rw":
        return MessageStore(path, profile=profile, durability=durability, config=chosen, fs=fs or Unsynced())
    return ReadOnlyMessageStore(path, profile=profile, config=chosen, fs=fs or Unsynced())


def kill(store: MessageStore) -> None:
    """What the system does for a dead process: locks and descriptors are given back, nothing else happens."""
    store._closed = True
    store._release()


def dispatcher_of(store: MessageStore) -> Dispatcher:
    """The dispatcher, of which the store shows only `dispatch` and `on_growth`."""
    return store._dispatcher


def until_parked(store: MessageStore, count: int = 1) -> None:
    """Return when so many threads wait for a message of one queue."""
    while len(next(iter(store._dispatcher._parked.copy().values()), ())) < count:
        pass


def reboot(root: Path) -> None:
    """Make it look as if the machine had gone down with its writer: the abort mark is of an earlier boot."""
    (root / "abort").write_text("4711 8c6f2a0e-earlier-boot")


def act_behind(monkeypatch: pytest.MonkeyPatch, call: str, act: Callable[[], object]) -> None:
    """Call `act` once, right after the commitlog's next call of `call`, for example "crc32c" or "_CRC.pack_into".
    A signal handler or another thread may run there. All patches of `monkeypatch` are undone first."""
    name, _, method = call.partition(".")
    whole = getattr(commitlog, name)
    real = getattr(whole, method) if method else whole

    def interrupted(*arguments: Any, **named: Any) -> Any:
        result = real(*arguments, **named)
        monkeypatch.undo()
        act()
        return result

    patched = SimpleNamespace(**{method: interrupted}) if method else interrupted
    monkeypatch.setattr(commitlog, name, patched)


def flip(path: Path, position: int, bit: int = 0) -> None:
    """Change one bit of a file in place."""
    with open(path, "r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


def segment(root: Path, number: int) -> Path:
    """The file of the log that bears this number, in a store of small ones."""
    return root / "commitlog" / f"{number * SEGMENT:020d}"


def segment_of(root: Path, position: int) -> Path:
    """The file of the log that this physical offset lies in."""
    starts = (int(file.name) for file in (root / "commitlog").iterdir() if file.name.isdigit())
    return root / "commitlog" / f"{max(start for start in starts if start <= position):020d}"


def flip_log(root: Path, position: int, bit: int = 0) -> None:
    """Change one bit of the log at a physical offset."""
    segment = segment_of(root, position)
    flip(segment, position - int(segment.name), bit)


def overwrite(file: Path, position: int, data: bytes) -> None:
    """Write over bytes of a file."""
    with open(file, "r+b") as opened:
        opened.seek(position)
        opened.write(data)


def overwrite_log(root: Path, position: int, data: bytes) -> None:
    """Write over bytes of the log, from a physical offset on."""
    segment = segment_of(root, position)
    overwrite(segment, position - int(segment.name), data)


def checkpointed(store: MessageStore) -> None:
    """Dispatch and flush all, and have the checkpoint say so."""
    store.flush()
    store.dispatch()
    store.run_once(1)
    store.run_once(2000)


def checkpoint_of(root: Path) -> Checkpoint:
    """What the checkpoint says."""
    return decode((root / "checkpoint").read_bytes())


def note_in_checkpoint(root: Path, **said: Any) -> None:
    """Have the checkpoint say something else."""
    checkpoint = CheckpointFile(root, Unsynced(), 0o600)
    checkpoint.load()
    checkpoint.save(replace(checkpoint.current, **said))


def recovered(root: Path, **options: Any) -> Any:
    """Recover a store, and return the report."""
    [found] = recover(root, **options)
    assert found.report is not None
    return found.report


def delete_as_java(root: Path, topic: str) -> None:
    """Delete a topic as a Java broker does, which keeps no note of queues: its records stay in the log."""
    shutil.rmtree(root / "consumequeue" / topic)
    note_in_checkpoint(root, queues=None)


def numbered(
    path: Path, profile: Profile, *topics: str, size: int = 1 << 14, body: bytes = b"x" * 80, as_java: bool = True
) -> list[Path]:
    """Make a store of 400 messages, in turn of these topics, and return its segments. With `as_java` one of profile
    "rocketmq" is as Java leaves it."""
    config = StoreConfig(segment_bytes=size, consumequeue_units=512, index_slots=256, index_entries=1024)
    with mqstore.open(path, profile=profile, config=config) as store:
        for n in range(400):
            store.put(topics[n % len(topics)], b"%d " % n + body, queue_id=0, keys=f"k{n}")
    if profile == "rocketmq" and as_java:
        for file in path.glob("mqstore.json*"):
            file.unlink()
    return sorted(path.glob("commitlog/0*"))


def all_queues(store: StoreReader) -> list[QueueRef]:
    """All queues of all topics."""
    return [ref for topic in store.topics() for ref in store.queues(topic)]


def files(root: Path, *, lock: bool = True) -> dict[str, bytes]:
    """Every file below `root` by relative path. Its lock says who wrote last."""
    return {
        os.path.relpath(os.path.join(folder, name), root): Path(folder, name).read_bytes()
        for folder, _, names in os.walk(root)
        for name in names
        if os.path.isfile(os.path.join(folder, name)) and (lock or name != "lock")
    }


def units_of(root: Path, topic: str, queue_id: int = 0) -> list[tuple[int, int, int]]:
    """(physical offset, size, tags code) of each unit that the queue's files hold, up to the first that is all zero."""
    data = b"".join(file.read_bytes() for file in sorted((root / "consumequeue" / topic / str(queue_id)).iterdir()))
    units = []
    for unit in struct.iter_unpack(">qiq", data):
        if unit == (0, 0, 0):
            break
        units.append(unit)
    return units


def as_ours(name: str, value: Any) -> Any:
    """A listed value in our notation: Java writes an IPv6 host as eight groups without brackets."""
    if name in ("born_host", "store_host") and value.count(":") > 1:
        address, _, port = value.rpartition(":")
        return f"[{ipaddress.IPv6Address(address)}]:{port}"
    return value
