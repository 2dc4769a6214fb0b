"""Context shared by a broker's services: the store, its tables, and the router of messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import chain
from typing import NamedTuple

from mqstore.broker.admin.statistics import Statistics
from mqstore.broker.pop.orderinfo import OrderInfoTable, check_order_info
from mqstore.broker.pop.poplog.log import unreadable_records
from mqstore.broker.routing.router import Router
from mqstore.broker.tables.configfile import ConfigFile
from mqstore.broker.tables.groups import GroupTable
from mqstore.broker.tables.localoffsets import lower_all
from mqstore.broker.tables.names import POP_LOG_TOPIC, START_GROUP, is_dlq_topic, is_system_topic
from mqstore.broker.tables.offsets import OffsetTable
from mqstore.broker.tables.topics import TopicTable
from mqstore.clock import Clock
from mqstore.errors import GroupNotFoundError
from mqstore.files.filesystem import FileSystem
from mqstore.layout.arrays.dispatch import LIGHT_PREFIX
from mqstore.log.message import Message
from mqstore.log.reading.reader import StoreReader
from mqstore.log.recovery.queueends import forget_ends, load_ends
from mqstore.log.recovery.report import Finding
from mqstore.log.store import MessageStore
from mqstore.logger import log as _log
from mqstore.options import StoreConfig

_PAGE = 256
_SAVED = [f"config/{name}.json{suffix}" for name in ("topics", "consumerOffset") for suffix in ("", ".bak")]
_LOST = (
    "topics.json and consumerOffset.json are missing: offsets of groups and settings of topics are lost. Put config/ "
    "back, such as that of a snapshot, before a program opens the store, since its groups then begin again"
)


def messages_of(store: StoreReader, topic: str, offset: int, end: int, queue_id: int = 0) -> Iterator[Message]:
    """Yield the messages of a queue in [offset, end) that can be read, a page at a time."""
    while offset < end:
        result = store.get(topic, queue_id, offset, min(_PAGE, end - offset))
        yield from result.messages
        if result.next_offset <= offset:
            return
        offset = result.next_offset  # after messages that are damaged or were just deleted


@dataclass(frozen=True, slots=True)
class Tables:
    """Store with the tables of its `config` folder.
    Tables of a store open for reading check a change completely before they raise ReadOnlyStoreError."""

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
    """Tables of a store open for writing, and the router of its messages."""

    store: MessageStore
    router: Router


class KeptMessages(NamedTuple):
    """Messages of a queue that are kept for consumers."""

    topic: str
    queue_id: int
    first: int
    deliveries: int
    """Number of deliveries to come, summed over the groups."""
    group: str
    why: str


def kept_for_consumers(parts: Tables) -> Iterator[KeptMessages]:
    """Yield the unconsumed messages of each queue that has any, except in system topics."""
    store, offsets = parts.store, parts.offsets
    for topic in store.topics():
        if is_system_topic(topic):
            continue
        groups = offsets.groups_of(topic)
        if topic.startswith(LIGHT_PREFIX) and not groups:
            continue  # readers of light queues keep their own offsets, and the user's topic keeps the messages
        for queue in store.queue_table.of(topic):  # `topics` has just listed them
            ref = queue.ref
            if not queue.is_there:
                continue
            start, end = offsets.bounds(*ref)
            if is_dlq_topic(topic):
                needed, deliveries, group, why = start, 0, START_GROUP, "dead letters"
            elif not groups:
                needed, deliveries, group, why = start, end - start, "", "no group has consumed it"
            else:
                committed = {
                    each: start if at is None else max(at, start)
                    for each, at in offsets.of_queue(topic, ref.queue_id).items()
                }
                needed, group = min((at, each) for each, at in committed.items())
                deliveries, why = sum(max(0, end - at) for at in committed.values()), "not consumed"
            if needed < end:
                yield KeptMessages(topic, ref.queue_id, needed, deliveries, group, why)


def broker_findings(store: StoreReader) -> Iterator[Finding]:
    """Yield findings about lost tables, and about the pop log."""
    return chain(_lost_config(store), unreadable_records(store))


def _lost_config(store: StoreReader) -> Iterator[Finding]:
    """Yield a finding if messages were popped, but neither topics nor offsets are saved.
    A topic is saved before its first message."""
    if store.queue_table.of(POP_LOG_TOPIC) and not any(store.fs.exists(store.path / name) for name in _SAVED):
        yield Finding("bad_json", "config", 0, 0, _LOST)


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
    """Read the tables of a store that is open for writing, and lower offsets to the ends of its queues."""
    for lost in _lost_config(store):
        _log.warning("%s/%s: %s", store.path, lost.file, lost.detail)
    _cut_with_queues(store)
    tables = open_tables(store)
    forget_ends(store.path, store.fs)
    offsets, router = tables.offsets, Router(store, tables.topics, tables.offsets)
    store.room.deliveries = lambda: sum(each.deliveries for each in kept_for_consumers(tables))
    store.room.groups = lambda topic: max(1, len(offsets.groups() if topic is None else offsets.groups_of(topic)))
    return Parts(**{each.name: getattr(tables, each.name) for each in fields(Tables)}, router=router)


def _cut_with_queues(store: StoreReader) -> None:
    """Lower order info and broadcast offsets to the queue ends that a recovery has saved.
    Offsets of delay levels from an earlier quick save are not loaded. This runs before group offsets are saved, after
    which the saved ends are removed."""
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
    neither settings nor committed offsets. Raises the errors of `OffsetTable.save`, and then the group is forgotten in
    memory, and on disk with the next save."""
    known = parts.groups.get(group) is not None
    if not known and group not in parts.offsets.groups():
        raise GroupNotFoundError(f"{parts.store.path} has no group {group!r}: no settings, no committed offsets")
    if known:
        parts.groups.delete(group)
    parts.topics.delete_retries(group)
    parts.offsets.remove_group(group)
    parts.offsets.save()  # else, after a crash, a new group of this name would get these offsets and skip messages
