"""What the mechanisms of a broker share, and what each of them offers (ARCHITECTURE.md).

    mechanism   run_once(now_ms) -> next_run_ms     does what is due; a housekeeper thread or a test calls it
                close()                             persists what it keeps
                pins()                              which records of the log it still needs
    roller      waiting_below(offset)               those of them that it can put again at the end of the log
                roll(offset, count, now_ms)         does so

`wake`, which each is given, says "something may be due before the time I named": from any thread, at once.
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
        offset = result.next_offset  # behind what is damaged, or was just freed


class Pin(NamedTuple):
    """A record that must stay, and for whom."""

    physical_offset: int
    topic: str
    queue_id: int
    group: str
    why: str
    rolls: bool = False
    """Whether the mechanism can put the message again at the end of the log (`Roller`)."""


class Mechanism(Protocol):
    """One kind of background work."""

    def run_once(self, now_ms: int) -> int | None:
        """Do what is due at `now_ms` (wall clock); when to come again, None: when woken."""

    def close(self) -> None:
        """Persist. Called once, after the last `run_once`, while the store is still open."""

    def pins(self) -> Iterable[Pin]:
        """The oldest record that each thing it keeps still needs."""


class Roller(Mechanism, Protocol):
    """One that keeps messages for long, and can put them again at the end of the log instead of holding all that has
    come since (delivery#retention-bound). Both calls come from the thread that calls `run_once`."""

    def waiting_below(self, physical_offset: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Physical offsets and sizes of the records below `physical_offset` that wait. An estimate."""

    def roll(self, physical_offset: int, count: int, now_ms: int) -> int:
        """Put up to `count` of them again, oldest first, to wait for the same time; how many were dealt with, 0: there
        are none, or none can be now. Not durable when it returns: `pins` says when it is. Raises what a put raises;
        what was rolled by then stays so."""


@dataclass(frozen=True, slots=True)
class Tables:
    """A store and what its `config` folder says. Those of a store opened for reading check a change whole, and then
    refuse it with ReadOnlyStoreError."""

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
    """The tables of a store open for writing, and the one way in."""

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
    """Where queues were shortened so are their order info and the progress of clients that broadcast, and that of delay
    levels is not taken if it was saved quickly before; before anybody saves that of groups, and voids the note by it.
    """
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
    """Forget a group: settings, progress, and what it was to have again; who listens to `parts.groups` forgets what is
    in flight. Its dead letters stay. On disk when it returns. GroupNotFoundError when it has neither settings nor
    progress; as `OffsetTable.save`, and then it is forgotten here, and on disk with the next save."""
    known = parts.groups.get(group) is not None
    if not known and group not in parts.offsets.groups():
        raise GroupNotFoundError(f"{parts.store.path} has no group {group!r}: no settings, no progress")
    if known:
        parts.groups.delete(group)
    parts.topics.delete_retries(group)
    parts.offsets.remove_group(group)
    parts.offsets.save()  # else a crash would leave the progress to a group of the same name, which would skip as much
