"""Stores from which recovery has cut messages, for the tests of `cut/`: what was put is known from the tables here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mqstore import Message, SendReceipt, SimulatedClock, StoreConfig
from mqstore.files.filesystem import FileSystem
from mqstore.log.reading.reader import StoreReader
from mqstore.log.recovery.recover import RecoverOptions
from mqstore.log.recovery.repair import recover_store
from mqstore.log.recovery.report import RecoveryReport
from mqstore.log.store import MessageStore
from tests.log.support import SEGMENT, flip, open_store
from tests.records import encode_record

__all__ = [
    "SENT",
    "Sent",
    "all_of",
    "config",
    "copy_of_log",
    "crafted",
    "cut_from",
    "kept",
    "make",
    "open_again",
    "sent_as",
]

BORN_MS = 1_600_000_000_000


@dataclass(frozen=True)
class Sent:
    """One message that was put, with every field that it keeps when it is restored."""

    topic: str
    queue_id: int
    body: bytes
    properties: dict[str, str] = field(default_factory=dict)
    flag: int = 0
    sys_flag: int = 0
    born_timestamp_ms: int = BORN_MS
    born_host: str = "10.0.0.7:4711"
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0

    def fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _PUT}


_PUT = (
    *("properties", "flag", "sys_flag", "born_timestamp_ms", "born_host", "reconsume_times"),
    "prepared_transaction_offset",
)
_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"properties": {"TAGS": "paid", "KEYS": "k-1 k-2", "shop": "3"}},
    {"properties": {"__SHARDINGKEY": "customer 7"}, "flag": -5},
    {"born_host": "[2001:db8::1]:99", "reconsume_times": 2},
    {"sys_flag": 8, "prepared_transaction_offset": 1234, "properties": {"UNIQ_KEY": "C0A8"}},
    {"topic": "%RETRY%billing", "queue_id": 0, "properties": {"RETRY_TOPIC": "orders"}},
    {"topic": "SCHEDULE_TOPIC_XXXX", "queue_id": 2, "properties": {"DELAY": "3", "REAL_TOPIC": "o", "REAL_QID": "1"}},
)
SENT = [
    Sent(
        **{
            "topic": ("orders", "clicks")[n % 3 == 0],
            "queue_id": n % 2,
            "body": b"message %03d " % n * (1 + n * 7 % 30),
            **_OPTIONS[n % len(_OPTIONS)],
        }
    )
    for n in range(60)
]
"""Messages of several topics and kinds, for about five segments."""


def config(**options: Any) -> StoreConfig:
    return StoreConfig(clock=SimulatedClock(), **options)


def make(path: Path, profile: str = "mqstore", sent: Sequence[Sent] = SENT) -> list[SendReceipt]:
    """A store of these messages that was closed."""
    with open_store(path, profile=profile) as store:  # type: ignore[arg-type]
        return [store.append(each.topic, each.queue_id, each.body, **each.fields()) for each in sent]


def cut_from(path: Path, receipt: SendReceipt) -> RecoveryReport:
    """Damage the body of one record, and have recovery cut the log there."""
    at = receipt.physical_offset % SEGMENT
    flip(path / "commitlog" / f"{receipt.physical_offset - at:020d}", at + 100)
    return recover_store(path, RecoverOptions(prefix=True), config=config())


def copy_of_log(path: Path, start: int, stop: int, name: str | None = None) -> Path:
    """A file in `cut/` of these bytes of the log, which lie in one segment."""
    (path / "cut").mkdir(exist_ok=True)
    segment = path / "commitlog" / f"{start // SEGMENT * SEGMENT:020d}"
    file = path / "cut" / (name or f"{start:020d}-7")
    file.write_bytes(segment.read_bytes()[start % SEGMENT : start % SEGMENT + stop - start])
    return file


def open_again(path: Path, fs: FileSystem | None = None) -> MessageStore:
    return open_store(path, fs=fs)


def crafted(path: Path, start: int, **fields: object) -> None:
    """A file in `cut/` of one record at `start`."""
    given: dict[str, Any] = {"topic": "orders", "queue_id": 0, "queue_offset": 5, "physical_offset": start}
    record = encode_record(**{**given, "born_timestamp_ms": 1, "store_timestamp_ms": 2, **fields})
    (path / "cut").mkdir(exist_ok=True)
    (path / "cut" / f"{start:020d}-9").write_bytes(record)


def kept(path: Path) -> list[Sent]:
    """Every message that a closed store lists. Nothing in it is damaged."""
    with open_store(path, "r") as store:
        assert list(store.verify()) == []
        return all_of(store)


def sent_as(message: Message) -> Sent:
    """The fields of a message that it was put with."""
    return Sent(
        message.topic,
        message.queue_id,
        message.body,
        message.stored_properties(),
        message.flag,
        message.sys_flag & ~0x30,  # kinds of hosts
        message.born_timestamp_ms,
        message.born_host,
        message.reconsume_times,
        message.prepared_transaction_offset,
    )


def all_of(store: StoreReader) -> list[Sent]:
    """Every message that a queue lists, in the order of the log."""
    found = []
    for topic in store.topics():
        for ref in store.queues(topic):
            low, high = store.offsets(*ref)
            found += store.read(*ref, low, high - low) if high > low else []
    return [sent_as(message) for message in sorted(found, key=lambda message: message.physical_offset)]
