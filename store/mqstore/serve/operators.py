"""Operators of a running server: its store by `broker/admin/operations.py`, and who is connected.

views, dry runs    read the files of the store, after everything in memory has been saved to them
changes            by the broker; nothing is deleted that a connected client uses, and a reset reaches consumers
clients            RocketMQ's by their heartbeats, mqstore's by their sessions, and members in the server's process
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from mqstore.broker.admin.offline import Offline, look
from mqstore.broker.admin.operations import Operations
from mqstore.broker.reads.reading import Start
from mqstore.broker.tables.names import is_retry_topic
from mqstore.errors import MQStoreError
from mqstore.log.commitlog import QueueRef
from mqstore.version import VERSION

if TYPE_CHECKING:
    from mqstore.broker.broker import Broker
    from mqstore.serve.connection import Connection
    from mqstore.serve.registry import Consumer
    from mqstore.serve.server import Server


class _Live(Offline):
    """Tables of a running broker. Its services make the changes."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._parts = self.tables = broker._parts  # noqa: SLF001
        self.topics, self.groups, self.offsets = broker.topics, broker.groups, broker.offsets

    def reset(self, group: str, topic: str, queue_id: int | None, to: Start | int) -> dict[QueueRef, int]:
        return self._broker.reset(group, topic, queue_id, to)

    def _delete_group(self, group: str) -> None:
        self._broker.delete_group(group)

    def _delete_topic(self, topic: str, *, force: bool = False) -> None:
        self.topics.delete(topic, force=force)

    def _cancel(self, handle: str, *, dry_run: bool = False) -> bool:
        cancelled = self._broker.recall(handle)
        self._broker.sync()
        return cancelled


def operations(broker: Broker) -> Operations:
    """Return the operations on the store of a running broker. Any thread may call them, except the loop's."""

    @contextmanager
    def looking() -> Iterator[Offline]:
        with suppress(MQStoreError):  # as on a full disk: what was saved before is shown
            broker.save()
        with look(broker.store.path) as opened:
            yield opened

    return Operations(looking, looking, lambda: nullcontext(_Live(broker)))


# -- clients -----------------------------------------------------------------------------------------------------------


Row = dict[str, Any]


def clients(server: Server, sessions: Mapping[Connection, Any], asking: Connection) -> list[Row]:
    """Return the connected clients, in the order in which they came, without the one that asks, unless it consumes.
    For the loop's thread."""
    now_s, now_ms = server.loop.time(), round(time.time() * 1000)
    members = server.broker.members
    left = {(group, name) for group in members.groups() for name in members.members(group)}

    def row(of: Connection | None, seen_s: float, groups: Iterable[Row], **values: Any) -> Row:
        groups = list(groups)
        left.difference_update((each["group"], each["client_id"]) for each in groups)
        parked = 0 if of is None else len(of.parked)
        seen_ms = now_ms - round((now_s - seen_s) * 1000)
        return {
            **values,
            "groups": groups,
            "peer": "-" if of is None else of.peer,
            "parked": parked,
            "seen_ms": seen_ms,
        }

    def own(names: Iterable[tuple[str, str]]) -> Iterator[Row]:
        for group, client_id in sorted(names):
            if (member := members.get(client_id, group)) is not None:
                yield _member(group, client_id, str(member.mode), member.subscriptions)

    found = []
    for client_id, client in server.registry.clients.items():
        groups = [_consumer(each, client_id, server.registry.consumers(each)[client_id]) for each in client.consumes]
        about = {"client_id": client_id, "language": client.language, "version": str(client.version)}
        found.append(row(client.connection, client.seen_s, groups, **about, produces=sorted(client.produces)))
    for connection, session in sessions.items():
        if connection is not asking or session.members:
            about = {"client_id": session.client, "language": "PYTHON", "version": session.version}
            seen_s, produces = connection.last_frame_s, sorted(session.groups)
            found.append(row(connection, seen_s, own(session.members), **about, produces=produces))
    if left:
        about = {"client_id": "(the server's process)", "language": "PYTHON", "version": VERSION}
        found.append(row(None, now_s, own(left), **about, produces=[]))
    return found


def _consumer(group: str, client_id: str, consumer: Consumer) -> Row:
    mode = f"{consumer.kind}, {'broadcasting' if consumer.broadcasting else 'clustering'}"
    of = {each.topic: (each.kind, each.expression) for each in consumer.subscriptions.values()}
    return _member(group, client_id, mode, of)


def _member(group: str, client_id: str, mode: str, subscriptions: Mapping[str, tuple[str, str]]) -> Row:
    """Return a member without its retry topics, which only some kinds of consumers name."""
    wanted = [
        {"topic": topic, "kind": kind, "expression": text}
        for topic, (kind, text) in sorted(subscriptions.items())
        if not is_retry_topic(topic)
    ]
    return {"group": group, "client_id": client_id, "mode": mode, "subscriptions": wanted}
