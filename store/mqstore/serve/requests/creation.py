"""Topics and groups that are created when a request first names them, as in RocketMQ.

    request -> names of `_WANTED` that do not exist -> worker thread creates them -> handler
                  |
                  +-- all exist: handler, at once

Creating writes a file, which the loop must not wait for. So no handler creates anything: it finds
what its request wants. A request for one that is being created waits for it, too, so that the requests of a client
stay in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mqstore.broker.tables.names import RETRY_PREFIX, SCHEDULE_TOPIC, TIMER_TOPIC, is_retry_topic, retry_topic
from mqstore.errors import MQStoreError, StoreBusyError
from mqstore.layout.properties import DELAY
from mqstore.logger import log as _log
from mqstore.remoting.codes import DEFAULT_TOPIC, Code
from mqstore.remoting.shapes import loads
from mqstore.serve.registry import consumers_of
from mqstore.serve.requests.routes import TRACE_TOPIC

if TYPE_CHECKING:
    from mqstore.broker.broker import Broker
    from mqstore.serve.connection import Call
    from mqstore.serve.server import Server

_QUEUES_MAX: Final = 8
"""Queues of a topic that a send creates: RocketMQ's limit, whatever the producer asks for."""
_MINUTE_S: Final = 60
_DELAY, _TIMER = f"{DELAY}\x01", "TIMER_"
"""Parts of the properties of a delayed message."""


class Wanted(NamedTuple):
    """A group or a topic: "group", "topic", "own topic" of the engine, or "sent topic" with default queues."""

    kind: str
    name: str
    queues: int = 1

    def exists(self, broker: Broker) -> bool:
        """Return True if there is nothing to create."""
        table = broker.groups if self.kind == "group" else broker.topics
        return table.get(self.name) is not None

    def create(self, broker: Broker) -> None:
        """Create it. Raises the errors of `require` of groups, or of `create` of topics."""
        if self.kind == "group":
            broker.groups.require(self.name)
        elif self.kind == "own topic":
            broker.topics.ensure(self.name, self.queues)
        elif self.kind == "sent topic":
            broker.topics.for_send(self.name)
        else:
            broker.topics.create(self.name, queues=self.queues)


def own_topic(name: str, queues: int = 1) -> Wanted:
    """Return a topic of the engine: for retries, dead letters, delays."""
    return Wanted("own topic", name, queues)


def delay_topics(broker: Broker) -> list[Wanted]:
    """Return the topics in which delayed messages wait."""
    return [own_topic(SCHEDULE_TOPIC, len(broker.store.delay_table_ms)), own_topic(TIMER_TOPIC)]


class Creation:
    """Topics and groups that are being created. For the loop's thread."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._pending: Counter[tuple[str, str]] = Counter()
        self._minute_s = -1
        self._created = 0
        """Number of topics and groups created in this minute."""

    def may_lack(self, topic: str) -> bool:
        """Return True unless a topic exists and nothing is being created. For the path of each message."""
        return bool(self._pending) or self._server.broker.topics.entered(topic) is None

    def before(self, call: Call, then: Callable[[], object]) -> None:
        """Call `then` once everything that the request wants exists."""
        find = _WANTED.get(call.frame.code)
        self.ensure(call, () if find is None else find(self._server, call), then)

    def ensure(self, call: Call, wanted: Sequence[Wanted], then: Callable[[], object]) -> None:
        """Call `then` once all of `wanted` exist. Raises StoreBusyError if too many were created in this minute, except
        for a heartbeat, which is never refused: its error is only logged."""
        server, broker = self._server, self._server.broker
        missing = wanted and [each for each in wanted if each[:2] in self._pending or not each.exists(broker)]
        if not missing:
            then()
            return

        keys = {each[:2] for each in missing}

        def work() -> int:
            absent = [each for each in missing if not each.exists(broker)]
            for each in absent:
                each.create(broker)
            return len(absent)

        def done() -> None:
            self._pending -= Counter(keys)
            if (error := creation.exception()) is None:
                self._created += creation.result()
            server.resume(call, then if error is None else partial(_fail, call, error, then))

        try:
            self._check_minute()
            creation = server.in_thread(call, work)
        except StoreBusyError as error:
            _fail(call, error, then)
            return
        self._pending.update(keys)
        creation.add_done_callback(lambda _: server.post(done))

    def _check_minute(self) -> None:
        minute_s = int(self._server.loop.time()) // _MINUTE_S
        if minute_s != self._minute_s:
            self._minute_s, self._created = minute_s, 0
        if self._created >= self._server.limits.creations:
            raise StoreBusyError(f"{self._created} topics and groups have been created in this minute; try again later")


def _fail(call: Call, error: BaseException, then: Callable[[], object]) -> None:
    if call.frame.code != Code.HEART_BEAT or not isinstance(error, MQStoreError):
        raise error
    _log.warning("a heartbeat of %s: %s", call.connection.peer, error)
    then()


def _of_send(server: Server, call: Call) -> list[Wanted]:
    values = call.values
    topic: str = values["topic"]
    text: str = call.frame.body.decode("latin-1") if values["batch"] else values["properties"] or ""
    wanted = delay_topics(server.broker) if _DELAY in text or _TIMER in text else []
    if is_retry_topic(topic):
        wanted += [Wanted("group", topic.removeprefix(RETRY_PREFIX)), own_topic(topic)]
    elif topic == TRACE_TOPIC:
        wanted.append(own_topic(topic))
    elif server.creation.may_lack(topic) and values["defaultTopic"] == DEFAULT_TOPIC and server.auto_create:
        wanted.append(Wanted("topic", topic, max(1, min(values["defaultTopicQueueNums"], _QUEUES_MAX))))
    return wanted


def _of_heartbeat(server: Server, call: Call) -> list[Wanted]:
    clustering = [name for name, consumer in consumers_of(loads(call.frame.body), call.connection).items()
                  if not consumer.broadcasting]  # fmt: skip
    return [each for name in clustering for each in (Wanted("group", name), own_topic(retry_topic(name)))]


def _of_route(server: Server, call: Call) -> list[Wanted]:
    # Otherwise the first retry of a new group waits until its consumers ask again, 30 s later.
    topic: str = call.values["topic"]
    return [own_topic(topic)] if is_retry_topic(topic) or topic == TRACE_TOPIC else []


def _group(server: Server, call: Call) -> list[Wanted]:
    return [Wanted("group", call.values["consumerGroup"])]


def of_own(server: Server, name: str, given: Mapping[str, Any]) -> list[Wanted]:
    """Return the names that a call of mqstore's own clients may create: `given` has its arguments."""
    wanted = [] if _OWN_DELAYS.isdisjoint(given) else delay_topics(server.broker)
    if (kind := _OWN.get(name)) is not None and type(value := given.get(kind)) is str:
        if kind == "group":
            wanted.append(Wanted(kind, value))
        elif server.creation.may_lack(value) and server.auto_create:
            wanted.append(Wanted("sent topic", value))
    return wanted


_OWN: Final[Mapping[str, str]] = {
    **dict.fromkeys(("put", "put_many", "session.puts"), "topic"),
    **dict.fromkeys(("commit", "read", "start_of", "pop", "add_pop_waiter"), "group"),
}
_OWN_DELAYS: Final = frozenset(("delay", "deliver_at", "delay_level"))
_WANTED: Final[Mapping[int, Callable[[Server, Call], list[Wanted]]]] = {
    **dict.fromkeys((Code.SEND_MESSAGE, Code.SEND_MESSAGE_V2, Code.SEND_BATCH_MESSAGE), _of_send),
    **dict.fromkeys((Code.PULL_MESSAGE, Code.LITE_PULL_MESSAGE, Code.POP_MESSAGE, Code.NOTIFICATION), _group),
    Code.UPDATE_CONSUMER_OFFSET: _group,
    Code.HEART_BEAT: _of_heartbeat,
    Code.GET_ROUTEINFO_BY_TOPIC: _of_route,
}
