"""Reads of a cluster's messages without a group, as `RemoteStore` asks for them (`remoting.calls.LogCalls`)."""

from __future__ import annotations

from datetime import datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from mqstore.broker.filters.filter import parse_filter
from mqstore.broker.names import is_system_topic
from mqstore.layout.messageid import decode_message_id
from mqstore.log.commitlog import QueueRef
from mqstore.log.message import Message
from mqstore.log.reading.reader import GetResult, to_ms
from mqstore.remote.cluster.degrade import refuse

if TYPE_CHECKING:
    from mqstore.remote.cluster.broker import ClusterBroker
    from mqstore.remote.cluster.links import Links


def log_of(broker: ClusterBroker, links: Links) -> SimpleNamespace:
    """Return the reads of a cluster."""

    def get(
        topic: str, queue_id: int, offset: int, max_messages: int = 32, *, tags: str | None = "*", **asked: Any
    ) -> GetResult:
        result = broker.read(topic, queue_id, offset, max_messages, filter=parse_filter(tags), **asked)
        return GetResult(*result[:5])  # type: ignore[arg-type]  # without a group there is no reset

    def find(
        topic: str, *, key: str | None = None, unique_key: str | None = None, limit: int = 32, **asked: Any
    ) -> list[Message]:
        start_ms, stop_ms = asked.get("start_ms", 0), asked.get("stop_ms", 1 << 62)
        if unique_key is not None:
            found = broker.find(topic, unique_key=unique_key, limit=limit)
        else:
            found = broker.find_by(topic, key or "", start_ms, stop_ms, limit)
        return [message for message in found if start_ms <= message.store_timestamp_ms < stop_ms]

    def offsets(topic: str, queue_id: int) -> tuple[int, int]:
        return broker.min_offset(topic, queue_id), broker.max_offset(topic, queue_id)

    def offsets_or_none(topic: str, queue_id: int) -> tuple[int, int] | None:
        route = broker.topics.get(topic)
        return offsets(topic, queue_id) if route is not None and 0 <= queue_id < len(route.places) else None

    def stats() -> NoReturn:
        refuse("counting segments and bytes", "use mqadmin brokerStatus")

    def verify() -> NoReturn:
        refuse("verifying the store", "the brokers check their files when they start")

    def snapshot(target: str, *, link: bool = False) -> NoReturn:
        refuse("a snapshot", "copy the brokers' folders, or run slaves")

    def get_by_id(message_id: str) -> Message:
        address, physical_offset = decode_message_id(message_id)
        return links.record(links.broker_at(address), physical_offset)

    def offset_at(topic: str, queue_id: int, when: datetime) -> int:
        return broker.offset_for_time(topic, queue_id, to_ms(when))

    def queues(topic: str) -> list[QueueRef]:
        return [QueueRef(topic, i) for i in broker.topics.require(topic).queue_ids]

    def topics() -> list[str]:
        return [name for name in links.topic_names() if not is_system_topic(name)]

    return SimpleNamespace(
        **{call.__name__: call for call in (
            get, find, get_by_id, offsets, offsets_or_none, offset_at, queues, topics, stats, verify, snapshot
        )}
    )  # fmt: skip
