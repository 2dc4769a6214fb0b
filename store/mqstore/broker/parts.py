"""Shared state of a broker's mechanisms, and their protocols (ARCHITECTURE.md).

    mechanism   run_once(now_ms) -> next_run_ms     does what is due; a housekeeper thread or a test calls it
                close()                             saves its state
                pins()                              records of the log that it still needs
    roller      waiting_below(offset)               those of them that it can relocate to the log end
                roll(offset, count, now_ms)         relocates them

Each mechanism gets a function `wake` for "something may be due before my next run". Any thread may call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mqstore.broker.admin.statistics import Statistics
from mqstore.broker.configfile import ConfigFile
from mqstore.broker.groups import GroupTable
from mqstore.broker.localoffsets import lower_all
from mqstore.broker.offsets import OffsetTable
from mqstore.broker.pop.orderinfo import OrderInfoTable, check_order_info
from mqstore.broker.road import Road
from mqstore.broker.topics import TopicTable
from mqstore.clock import Clock
from mqstore.errors import GroupNotFoundError
from mqstore.files.filesystem import FileSystem
from mqstore.log.message import Message
from mqstore.log.reader import StoreReader
from mqstore.log.recovery.queueends import forget_ends, load_ends
from mqstore.log.store import MessageStore
from mqstore.options import StoreConfig

__all__ = [
    "Mechanism",
    "Parts",
    "Pin",
    "Roller",
    "Tables",
    "Wake",
    "delete_group",
    "messages_of",
    "open_parts",
    "open_tables",
]

Wake = Callable[[], None]

_PAGE = 256


def messages_of(store: StoreReader, topic: str, offset: int, end: int) -> Iterator[Message]:
    """Yield the messages of queue 0 of `topic` in [offset, end) that can be read, a page at a time."""
    while offset < end:
        result = store.get(topic, 0, offset, min(_PAGE, end - offset))
        yield from result.messages
        if result.next_offset <= offset:
            return
        offset = result.next_offset  # behind damaged or just freed messages


class Pin(NamedTuple):
    """Record that must stay, and the group that needs it."""

    physical_offset: int
    topic: str
    queue_id: int
    group: str
    why: str
    rolls: bool = False
    """True if the mechanism can relocate the message to the log end (`Roller`)."""


class Mechanism(Protocol):
    """Background mechanism of a broker."""

    def run_once(self, now_ms: int) -> int | None:
        """Do what is due at `now_ms` (wall clock). Return the time of the next run, None: when woken."""

    def close(self) -> None:
        """Save the state. Called once, after the last `run_once`, while the store is still open."""

    def pins(self) -> Iterable[Pin]:
        """Return pins of the oldest records that the mechanism still needs."""


class Roller(Mechanism, Protocol):
    """Mechanism that keeps messages for long, and can relocate them (delivery#retention-bound).
    Relocated messages do not hold the log that was written since. Both methods are called in the thread of
    `run_once`."""

    def waiting_below(self, physical_offset: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return physical offsets and sizes of waiting records below `physical_offset`. An estimate."""

    def roll(self, physical_offset: int, count: int, now_ms: int) -> int:
        """Relocate up to `count` waiting messages, oldest first. Return how many were handled.
        They wait for the same time. 0 means that there are none, or that none can be relocated now. The copies may not
        be on disk when it returns: `pins` changes when they are. Raises what a put raises, after which relocated
        messages stay so."""


@dataclass(frozen=True, slots=True)
class Tables:
    """Store with the tables of its `config` folder.
    The tables of a store opened for reading check a change completely, and then raise ReadOnlyStoreError."""

    store: StoreReader
    config: StoreConfig
    clock: Clock
    fs: FileSystem
    topics: TopicTable
    groups: GroupTable
    offsets: OffsetTable
    statistics: Statistics


@dataclass(frozen=True, slots=True)
class Parts(Tables):
    """Tables of a store open for writing, and the road for its messages."""

    store: MessageStore
    road: Road


def open_tables(store: StoreReader) -> Tables:
    """Read the tables of a store."""
    offsets = OffsetTable(store)
    topics = TopicTable(store, offsets)
    groups = GroupTable(store)
    topics.group_names = lambda: {*groups.names(), *offsets.groups()}
    topics.in_order.append(lambda group, _: (known := groups.get(group)) is not None and known.orderly)
    return Tables(
        store=store,
        config=store.config,
        clock=store.clock,
        fs=store.fs,
        topics=topics,
        groups=groups,
        offsets=offsets,
        statistics=Statistics(store.clock),
    )


def open_parts(store: MessageStore) -> Parts:
    """Read the tables of a store that is open for writing, cut to where its queues end."""
    _cut_with_queues(store)
    tables = open_tables(store)
    forget_ends(store.path, store.fs)
    road = Road(store, tables.topics, tables.offsets)
    return Parts(**{each.name: getattr(tables, each.name) for each in fields(Tables)}, road=road)


def _cut_with_queues(store: StoreReader) -> None:
    """Shorten order info and broadcast offsets to the noted queue ends.
    Offsets of delay levels from an earlier quick save are not loaded. This runs before group offsets are saved, which
    voids the note."""
    noted = load_ends(store.path, store.fs)
    if noted is None:
        return
    file = ConfigFile(store, "consumerOrderInfo.json", check_order_info)
    orders = OrderInfoTable()
    orders.load(file.load() or {})
    if orders.cut(noted.of):
        file.save(orders.as_json())
    lower_all(store, noted.of)
    ConfigFile(store, "delayOffset.json", log_end=noted.log_end).load()


def delete_group(parts: Parts, group: str) -> None:
    """Forget a group: settings, committed offsets and retries. It is on disk when this returns.
    Listeners of `parts.groups` drop deliveries in flight. Its dead letters stay. Raises GroupNotFoundError if it has
    neither settings nor committed offsets, and what `OffsetTable.save` raises. Then the group is forgotten here, and on
    disk with the next save."""
    known = parts.groups.get(group) is not None
    if not known and group not in parts.offsets.groups():
        raise GroupNotFoundError(f"{parts.store.path} has no group {group!r}: no settings, no progress")
    if known:
        parts.groups.delete(group)
    parts.topics.delete_retries(group)
    parts.offsets.remove_group(group)
    parts.offsets.save()  # otherwise a group of the same name would get these offsets after a crash, and skip messages
