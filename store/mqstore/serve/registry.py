"""Clients of the server by their heartbeats: producers, consumers, subscriptions (remoting-server, section 6).

    heartbeat     names the client, its groups, and their subscriptions, each 30 s
    gone          the connection closes, the client leaves, or two minutes without a heartbeat: its queues are unlocked
    changed       a consumer came or went, or subscribes to something else: every consumer of the group gets a notice

A heartbeat is never refused, because clients have no way to show that. As in RocketMQ the last subscription counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mqstore.logger import log as _log
from mqstore.remoting.shapes import read_body

if TYPE_CHECKING:
    from mqstore.serve.connection import Connection

EXPIRES_S: Final = 120
"""Seconds without a heartbeat after which a client is gone."""


class Subscription(NamedTuple):
    """A consumer's filter of one topic."""

    topic: str
    expression: str
    kind: str
    """TAG or SQL92."""


@dataclass(frozen=True, slots=True)
class Consumer:
    """A client as a member of one group."""

    connection: Connection = field(compare=False)
    subscriptions: Mapping[str, Subscription]
    broadcasting: bool
    kind: str
    """CONSUME_PASSIVELY (push) or CONSUME_ACTIVELY (pull)."""
    start: str
    """Where it begins without an offset, as CONSUME_FROM_LAST_OFFSET."""


@dataclass(slots=True)
class Client:
    """One client id."""

    connection: Connection
    language: str
    version: int
    seen_s: float
    consumes: set[str]
    """Groups that it consumes in."""
    produces: set[str]


class Registry:
    """Every client of a server. For the loop's thread, unless a method says otherwise."""

    def __init__(self, *, clients: int, groups: int, subscriptions: int) -> None:
        """Start without clients. The arguments are limits: of all clients, of all groups, of each consumer's topics."""
        self._limits = clients, groups, subscriptions
        self.clients: dict[str, Client] = {}
        self._consumers: dict[str, dict[str, Consumer]] = {}
        self._producers: dict[str, set[str]] = {}

    def heartbeat(
        self, connection: Connection, body: Mapping[str, Any], now_s: float, language: str, version: int
    ) -> set[str]:
        """Note a heartbeat. Return the groups whose consumers have changed.
        Raises FormatError for a body of another shape, and notes nothing."""
        client_id, consumers, producers = _heartbeat(body, connection)
        max_clients, max_groups, max_topics = self._limits
        if client_id not in self.clients and len(self.clients) >= max_clients:
            _log.warning("the heartbeat of %s is ignored: there are %d clients", client_id, max_clients)
            return set()
        client = old = self.clients.get(client_id)
        changed = set()
        if client is None or client.connection is not connection:
            consumes, produces = (set(), set()) if old is None else (old.consumes, old.produces)
            client = self.clients[client_id] = Client(connection, language, version, now_s, consumes, produces)
            connection.client_ids.add(client_id)
            changed.update(consumes)
        client.seen_s = now_s
        for group, consumer in consumers.items():
            if len(consumer.subscriptions) > max_topics or (
                group not in self._consumers and len(self._consumers) >= max_groups
            ):
                _log.warning("the subscriptions of %s in group %s are ignored: too many", client_id, group)
                continue
            members = self._consumers.setdefault(group, {})
            known = members.get(client_id)
            if known is not None and body.get("withoutSub") is True:
                consumer = replace(consumer, subscriptions=known.subscriptions)
            if known != consumer or known.connection is not connection:
                changed.add(group)
            members[client_id] = consumer
            client.consumes.add(group)
        for group in producers:
            if group not in self._producers and len(self._producers) >= max_groups:
                _log.warning("the producer %s of group %s is ignored: too many groups", client_id, group)
                continue
            self._producers.setdefault(group, set()).add(client_id)
            client.produces.add(group)
        if old is None:
            _log_client("has come", client_id, client)
        return changed

    def consumer(self, group: str, connection: Connection) -> Consumer | None:
        """Return the consumer of `group` on this connection, or None before its heartbeat."""
        members = self._consumers.get(group, {})
        return next((members[name] for name in connection.client_ids if name in members), None)

    def consumers(self, group: str) -> Mapping[str, Consumer]:
        """Return the consumers of a group by client id."""
        return self._consumers.get(group, {})

    def groups(self) -> list[str]:
        """Return the groups that have consumers."""
        return sorted(self._consumers)

    def subscription(self, group: str, topic: str) -> Subscription | None:
        """Return the subscription of a group's consumers to a topic, or None."""
        found = (consumer.subscriptions.get(topic) for consumer in self.consumers(group).values())
        return next(filter(None, found), None)

    def producers(self, group: str) -> list[Connection]:
        """Return the connections of a group's producers. Any thread may call this."""
        names = list(self._producers.get(group, ()))
        clients = (self.clients.get(name) for name in names)
        return [client.connection for client in clients if client is not None]

    def leave(self, client_id: str, *, consumer_group: str | None = None, producer_group: str | None = None) -> bool:
        """Remove a client from groups. Return True if the consumers of the group have changed."""
        client = self.clients.get(client_id)
        if client is None:
            return False
        if producer_group is not None:
            client.produces.discard(producer_group)
            _discard(self._producers, producer_group, client_id)
        if consumer_group is None or consumer_group not in client.consumes:
            return False
        client.consumes.discard(consumer_group)
        _discard(self._consumers, consumer_group, client_id)
        return True

    def drop(self, client_id: str, connection: Connection | None = None) -> set[str]:
        """Remove a client, unless it is on another connection than the one given. Return the groups it consumed in."""
        client = self.clients.get(client_id)
        if client is None or connection not in (None, client.connection):
            return set()
        del self.clients[client_id]
        _log_client("has gone", client_id, client)
        client.connection.client_ids.discard(client_id)
        for group in client.produces:
            _discard(self._producers, group, client_id)
        for group in client.consumes:
            _discard(self._consumers, group, client_id)
        return set(client.consumes)

    def expired(self, now_s: float) -> list[str]:
        """Return the clients without a heartbeat for two minutes."""
        return [name for name, client in self.clients.items() if now_s - client.seen_s > EXPIRES_S]


def _log_client(what: str, client_id: str, client: Client) -> None:
    """Log a client: the only line about it when it comes, and when it goes."""
    groups = ", ".join(sorted(client.consumes | client.produces))
    _log.info(
        "client %.200s %s: %s %d, from %s, groups %.500s",
        *(client_id, what, client.language, client.version, client.connection.peer, groups),
    )


def _discard(table: dict[str, Any], group: str, client_id: str) -> None:
    members = table.get(group)
    if members is not None:
        members.discard(client_id) if isinstance(members, set) else members.pop(client_id, None)
        if not members:
            del table[group]


def consumers_of(body: Mapping[str, Any], connection: Connection) -> Mapping[str, Consumer]:
    """Return the consumers of a heartbeat by group. Raises FormatError for another body."""
    return _heartbeat(body, connection)[1]


def _heartbeat(body: Mapping[str, Any], connection: Connection) -> tuple[str, dict[str, Consumer], list[str]]:
    """Return client id, consumers by group, and producer groups of a heartbeat."""
    with read_body():
        client_id = _name(body["clientID"])
        consumers = {
            _name(each["groupName"]): Consumer(
                connection,
                dict(_subscriptions(each.get("subscriptionDataSet") or ())),
                each.get("messageModel") == "BROADCASTING",
                str(each.get("consumeType") or "CONSUME_PASSIVELY"),
                str(each.get("consumeFromWhere") or "CONSUME_FROM_LAST_OFFSET"),
            )
            for each in body.get("consumerDataSet") or ()
        }
        return client_id, consumers, [_name(each["groupName"]) for each in body.get("producerDataSet") or ()]


def _subscriptions(data: Any) -> Iterator[tuple[str, Subscription]]:
    for each in data:
        topic = _name(each["topic"])
        yield topic, Subscription(topic, str(each.get("subString") or "*"), str(each.get("expressionType") or "TAG"))


def _name(value: Any) -> str:
    if type(value) is not str or not value:
        raise ValueError(f"{value!r:.80} is not a name")
    return value
