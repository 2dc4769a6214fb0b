"""Trace of a key or unique key through topics, retries, delays and dead letters, in time order.

A task reads every queue of one store, system queues included, with the Spark source's option `keys`
(`mqstore.jobs.keyindex`). Records that a crash left in no queue are not found: a warning is logged. A store with lost
queues is refused.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Unpack

from mqstore.broker.context import Tables, open_tables
from mqstore.broker.names import (
    DLQ_PREFIX,
    HALF_TOPIC,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
    is_dlq_topic,
    is_retry_topic,
    is_system_topic,
)
from mqstore.errors import ConfigError
from mqstore.jobs.opening import StoreName, open_store
from mqstore.jobs.runner import Runner, Where
from mqstore.jobs.selection import Selection, Shaped, Stores, check_followed, select
from mqstore.jobs.tasks import policy_of, read_pieces
from mqstore.layout.properties import DLQ_ORIGIN_TOPIC, DLQ_REASON, REAL_TOPIC, RETRY_TOPIC, TIMER_OUT_MS, UNIQ_KEY
from mqstore.log.message import Message

_MOST: Final = 100_000
"""Limit of hops in a store. A key with more messages is refused."""


@dataclass(frozen=True, slots=True)
class Hop(Shaped):
    """One stored copy of a message."""

    store_ms: int
    store: str
    kind: str
    """`sent`, `retry`, `dead letter`, `delay level`, `timer`, `half` (a transaction not yet decided), or `system`."""
    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    message_id: str
    unique_key: str | None
    keys: tuple[str, ...]
    tag: str | None
    size: int
    """Size of the record in bytes."""
    born_ms: int
    attempts: int
    """Number of earlier deliveries."""
    group: str | None
    """Group of a retry or dead letter, from its topic. `group+topic` for a retry of a group that pops."""
    origin_topic: str | None
    """Topic where it was first sent, or will be delivered."""
    deliver_ms: int | None
    """Time when a delayed message is due."""
    reason: str | None
    """Reason of a dead letter."""
    consumed_by: tuple[str, ...]
    waiting_for: tuple[str, ...]
    """Groups with a committed offset in the queue, after this message or not."""


@dataclass(frozen=True, slots=True)
class Trace(Shaped):
    """Result of `trace`."""

    key: str
    hops: tuple[Hop, ...]
    """Hops by time of storing."""


def trace(stores: Stores | Selection, key: str, **where: Unpack[Where]) -> Trace:
    """Find every copy of the messages with this `key`: one of their keys, or their unique key.

    `spark` and `progress`: see `mqstore.jobs`. Raises ConfigError for an invalid key, for a key with more than 100,000
    messages in a store, and for a selection with more than stores.
    """
    if type(key) is not str or not key or any(each in key for each in " \x01\x02"):
        raise ConfigError(f"key={key!r} is not a key: give one word, without spaces")
    chosen = select(stores)
    check_followed(chosen)
    found = Runner(**where).run(chosen.stores(), partial(_look, chosen, key), "mqstore trace")
    hops = sorted(
        (hop for part in found for hop in part), key=lambda hop: (hop.store_ms, hop.store, hop.physical_offset)
    )
    return Trace(key, tuple(hops))


# -- in the tasks ------------------------------------------------------------------------------------------------------


def _look(stores: Selection, key: str, name: StoreName) -> list[Hop]:
    chosen = stores.with_options(
        paths={name.id: name.path}, keys=(key,), include_system_topics=True, on_corrupt="skip", fail_on_data_loss=False
    )
    policy = policy_of(chosen.options)
    places: set[int] = set()
    for task in chosen.queue_tasks():
        for _, piece in read_pieces(chosen.options, {"unit"}, task, policy):
            places.update(piece.physical.tolist())
    with open_store(name) as store:
        if len(places) > _MOST:
            raise ConfigError(f"key={key!r}: {len(places)} messages of {name.id} have it, too many for a trace")
        tables = open_tables(store)
        hops = []
        for place in sorted(places):
            with suppress(LookupError):  # retention has deleted it meanwhile
                hops.append(_hop(tables, name, store.at(place)))
    return hops


def _hop(tables: Tables, name: StoreName, message: Message) -> Hop:
    properties = message.stored_properties()
    topic = message.topic
    kind, group = _kind(topic)
    committed = tables.offsets.of_queue(topic, message.queue_id)
    return Hop(
        store_ms=message.store_timestamp_ms,
        store=name.id,
        kind=kind,
        topic=topic,
        queue_id=message.queue_id,
        queue_offset=message.offset,
        physical_offset=message.physical_offset,
        message_id=message.message_id,
        unique_key=properties.get(UNIQ_KEY),
        keys=tuple(message.keys),
        tag=message.tag,
        size=message.size,
        born_ms=message.born_timestamp_ms,
        attempts=message.reconsume_times,
        group=group,
        origin_topic=properties.get(DLQ_ORIGIN_TOPIC) or properties.get(RETRY_TOPIC) or properties.get(REAL_TOPIC),
        deliver_ms=_due_ms(kind, message, properties),
        reason=properties.get(DLQ_REASON),
        consumed_by=tuple(each for each, at in committed.items() if at is not None and at > message.offset),
        waiting_for=tuple(each for each, at in committed.items() if at is not None and at <= message.offset),
    )


def _kind(topic: str) -> tuple[str, str | None]:
    if is_retry_topic(topic):
        return "retry", topic.removeprefix(RETRY_PREFIX)
    if is_dlq_topic(topic):
        return "dead letter", topic.removeprefix(DLQ_PREFIX)
    known = {SCHEDULE_TOPIC: "delay level", TIMER_TOPIC: "timer", HALF_TOPIC: "half"}
    return known.get(topic, "system" if is_system_topic(topic) else "sent"), None


def _due_ms(kind: str, message: Message, properties: dict[str, str]) -> int | None:
    if kind == "delay level":
        return message.tags_code if message.tags_code > 0 else None
    out = properties.get(TIMER_OUT_MS, "") if kind == "timer" else ""
    return int(out) if out.isdecimal() else None
