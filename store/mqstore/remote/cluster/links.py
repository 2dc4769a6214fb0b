"""Connections of one client to the name servers and brokers of a cluster, and its background thread.

    route      topic -> queues and brokers      asked of a name server, kept for 30 s
    call       broker name, request -> answer   one connection for each broker, and for each member of a group another:
                                                a broker knows a member by its connection
    later      call in the background thread    heartbeats, commits, routes, waits

A broker that cannot be reached gets no messages for 30 s, unless a queue of it was asked for.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, Final

from mqstore.errors import (
    ConfigError,
    ConnectionLostError,
    FilterError,
    GroupNotFoundError,
    InvalidMessageError,
    MQStoreError,
    NotPermittedError,
    ResultCode,
    StoreBusyError,
    StoreClosedError,
    TopicNotFoundError,
)
from mqstore.log.commitlog import QueueRef
from mqstore.log.message import Message
from mqstore.logger import log as _log
from mqstore.remote.cluster.records import message_at, records
from mqstore.remote.cluster.routes import Place, RoutedTopic, addresses, fastjson, routed
from mqstore.remote.connection import Connection
from mqstore.remote.line import Answered
from mqstore.remoting.codes import Code
from mqstore.remoting.frames import Frame
from mqstore.signalsafe import Bell, Lock
from mqstore.threads import start_thread

OUT_S: Final = 30.0
"""Time for which a broker that could not be reached gets no messages."""
_ROUTE_S, _ABSENT_S = 30.0, 3.0
"""Time after which a route, or that there is none, is asked for again."""
_PING: Final = 60
"""GET_TIMER_CHECK_POINT, whose answer is small. A code that a broker does not know fills its log with errors."""
_ERRORS: Final[Mapping[int, Callable[[str], MQStoreError]]] = {
    ResultCode.SYSTEM_BUSY: StoreBusyError,
    ResultCode.SERVICE_NOT_AVAILABLE: StoreBusyError,
    ResultCode.MESSAGE_ILLEGAL: lambda text: InvalidMessageError(text, "body"),
    ResultCode.NO_PERMISSION: NotPermittedError,
    ResultCode.TOPIC_NOT_EXIST: TopicNotFoundError,
    ResultCode.SUBSCRIPTION_PARSE_FAILED: lambda text: FilterError(text, 0),
    ResultCode.SUBSCRIPTION_GROUP_NOT_EXIST: GroupNotFoundError,
    ResultCode.INVALID_PARAMETER: ConfigError,
}

Fields = Mapping[str, Any]


def named(names: str, *values: object) -> dict[str, Any]:
    """Return the fields of a request.

    >>> list(named("topic queueId", "orders", 3).items())
    [('topic', 'orders'), ('queueId', 3)]
    """
    return dict(zip(names.split(), values, strict=True))


def _known(fields: Fields) -> Fields:
    """Return the fields that travel: those that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def checked(answer: Frame | None, who: str, ok: Collection[int] = (0,)) -> Frame:
    """Return an answer whose code is in `ok`. Raises the error for any other, and ConnectionLostError without one."""
    if answer is None:
        raise ConnectionLostError(f"the connection to {who} was lost: the call is perhaps done", sent=True)
    if answer.code in ok:
        return answer
    text = f"{who} refused: {(answer.remark or 'no reason').splitlines()[0]} (code {answer.code})"
    raise _ERRORS.get(answer.code, MQStoreError)(text)


class Links:
    """Connections and routes of one client. Thread-safe."""

    def __init__(self, name_servers: Collection[str], client_id: str, **options: Any) -> None:
        """Connect. `options` are timeout_s, sign and tls of each `Connection`."""
        self.client_id = client_id
        self.name = ";".join(name_servers)
        self.closed = False
        self.requested: Callable[[str, Frame], object] = lambda broker, frame: None
        """Function for requests of brokers, called in the background thread."""
        self.topics_changed: Callable[[str], object] = lambda topic: None
        """Function called with a topic whose route has changed, in the background thread."""
        self._options = options
        self._names = [Connection(each, **options) for each in name_servers]
        self._addresses: dict[str, str] = {}
        self._links: dict[tuple[str, str], Connection] = {}
        self._routes: dict[str, tuple[float, RoutedTopic | None]] = {}
        self._seen: dict[str, RoutedTopic] = {}
        self._configs: dict[str, Mapping[str, str]] = {}
        self._out: dict[str, float] = {}
        self._lock = Lock()
        self._bell = Bell()
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._serial = count()
        try:
            self._look_for_brokers()
        except BaseException:
            for each in self._names:
                each.close()
            raise
        start_thread(self, self._bell, "cluster")
        self.every(_ROUTE_S, self._refresh)

    # -- the background thread --------------------------------------------------------------------------------------

    def later(self, delay_s: float, call: Callable[[], object]) -> None:
        """Call `call` in the background thread."""
        with self._lock:
            heapq.heappush(self._due, (time.monotonic() + delay_s, next(self._serial), call))
        self._bell.ring()

    def every(self, period_s: float, call: Callable[[], object]) -> None:
        """Call `call` in the background thread again and again."""

        def again() -> None:
            try:
                call()
            finally:
                self.later(period_s, again)

        self.later(period_s, again)

    def step(self) -> float | None:
        """Do the due work (`mqstore.threads`)."""
        while not self.closed:
            with self._lock:
                pause_s = self._due[0][0] - time.monotonic() if self._due else 3600.0
                if pause_s > 0:
                    return pause_s
                call = heapq.heappop(self._due)[2]
            try:
                call()
            except StoreClosedError:
                pass
            except Exception as error:
                _log.warning("%s: %s", self.name, error, exc_info=not isinstance(error, MQStoreError))
        return None

    def close(self) -> None:
        self.closed = True
        self._bell.ring()
        for link in [*self._names, *self._links.values()]:
            link.close()

    def check_open(self) -> None:
        """Raise StoreClosedError after `close`."""
        if self.closed:
            raise StoreClosedError(f"the connection to the cluster {self.name} is closed; connect again")

    # -- name servers -----------------------------------------------------------------------------------------------

    def _ask(self, code: int, fields: Fields) -> Frame:
        """Ask the first name server that answers."""
        self.check_open()
        for link in list(self._names):
            try:
                link.open()
                return link.call(code, fields=_known(fields), repeat=True)
            except ConnectionLostError as error:
                lost = error
                with self._lock:  # the others first, from now on
                    self._names.append(self._names.pop(self._names.index(link)))
        raise lost

    def _look_for_brokers(self) -> None:
        answer = checked(self._ask(Code.GET_BROKER_CLUSTER_INFO, {}), self.name)
        self._addresses.update(addresses((fastjson(answer.body).get("brokerAddrTable") or {}).values()))

    @property
    def brokers(self) -> list[str]:
        """Names of all known brokers, sorted. Those that cannot be reached are last."""
        return sorted(self._addresses, key=lambda broker: (self.is_out(broker), broker))

    def route(self, topic: str) -> RoutedTopic | None:
        """Return a topic as the name servers knew it at most 30 s ago, or None."""
        due_s, known = self._routes.get(topic, (0.0, None))
        return known if due_s > time.monotonic() else self._look(topic)

    def _look(self, topic: str) -> RoutedTopic | None:
        asked = self._ask(Code.GET_ROUTEINFO_BY_TOPIC, {"topic": topic, "acceptStandardJsonOnly": True})
        answer = checked(asked, self.name, (0, ResultCode.TOPIC_NOT_EXIST))
        found = None
        if answer.code == 0:
            route = fastjson(answer.body)
            self._addresses.update(addresses(route["brokerDatas"]))
            found = self._seen[topic] = routed(topic, route, self._seen.get(topic))
        before = self._routes.get(topic)
        self._routes[topic] = time.monotonic() + (_ABSENT_S if found is None else _ROUTE_S), found
        if before is not None and before[1] != found:
            self.later(0, lambda: self.topics_changed(topic))
        return found

    def forget(self, topic: str) -> None:
        """Ask for the route of a topic again when it is needed next."""
        if topic in self._routes:
            self._routes[topic] = 0.0, self._routes[topic][1]

    def _refresh(self) -> None:
        self._look_for_brokers()
        for topic in list(self._routes):
            self._look(topic)

    def topic_names(self) -> list[str]:
        """Return the names of all topics but the brokers' own."""
        codes = Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, Code.GET_SYSTEM_TOPIC_LIST_FROM_NS
        lists = [fastjson(checked(self._ask(code, {}), self.name).body) for code in codes]
        topics, own = (set(each.get("topicList") or ()) for each in lists)
        return sorted(topics - own)

    def place(self, topic: str, queue_id: int) -> Place:
        """Return the queue of a number. Raises TopicNotFoundError, ConfigError."""
        route = self.route(topic) or self._seen.get(topic)
        if route is None:
            raise TopicNotFoundError(f"the cluster {self.name} has no topic {topic!r}; create it")
        if type(queue_id) is not int or not 0 <= queue_id < len(route.places):
            raise ConfigError(f"topic {topic!r} has queues 0..{len(route.places) - 1}, not {queue_id!r}")
        return route.places[queue_id]

    def number(self, topic: str, broker: str, queue_id: int) -> int:
        """Return the number of a broker's queue, or 0 if the topic's route does not have it."""
        route = self.route(topic)
        return 0 if route is None else route.numbers.get((broker, queue_id), 0)

    def ref(self, queue: Mapping[str, Any]) -> QueueRef:
        """Return the queue that an object of a body names."""
        return QueueRef(queue["topic"], self.number(queue["topic"], queue["brokerName"], queue["queueId"]))

    # -- brokers ----------------------------------------------------------------------------------------------------

    def call(
        self,
        broker: str,
        code: int,
        fields: Fields,
        body: bytes = b"",
        *,
        ok: Collection[int] = (0,),
        repeat: bool = True,
        member: str = "",
    ) -> Frame:
        """Ask a broker, as a member of a group on a connection of its own. Return the answer if its code is in `ok`.
        Without `repeat` a call is not sent again after its connection was lost. Raises ConnectionLostError,
        StoreClosedError, and the error for any other answer."""
        send = partial(self._link(broker, member).call, code, body, fields=_known(fields), repeat=repeat)
        return checked(self._reached(broker, member, send), f"broker {broker}", ok)

    def park(self, broker: str, code: int, fields: Fields, answered: Answered, body: bytes = b"") -> None:
        """Send a request whose answer may take long, or for which nobody waits. `answered` is called with it, or with
        None."""
        link = self._link(broker, "")
        self._reached(broker, "", partial(link.park, code, answered, body, fields=_known(fields), repeat=False))

    def call_many(self, calls: Sequence[tuple[str, int, Fields]]) -> None:
        """Ask brokers at once: (broker, code, fields). Raises the first error after all have answered."""
        bell, answers = Bell(), deque[tuple[str, Frame | None]]()

        def answered(broker: str, answer: Frame | None) -> None:
            answers.append((broker, answer))
            bell.ring()

        for broker, code, fields in calls:
            self.park(broker, code, fields, partial(answered, broker))
        while len(answers) < len(calls):
            bell.wait()
        for broker, answer in answers:
            checked(answer, f"broker {broker}")

    def _reached(self, broker: str, member: str, send: Callable[[], Any]) -> Any:
        """Send on an open connection. A broker without one is out from now on."""
        try:
            self._link(broker, member).open()  # one attempt only: another broker may be there
            answer = send()
        except ConnectionLostError:
            self._out[broker] = time.monotonic() + OUT_S
            raise
        self._out.pop(broker, None)
        return answer

    def is_out(self, broker: str) -> bool:
        """Return True if a broker could not be reached in the last 30 s."""
        return self._out.get(broker, 0.0) > time.monotonic()

    def config(self, broker: str) -> Mapping[str, str]:
        """Return the configuration of a broker, as it was when first asked for. Empty if it is refused."""
        if broker not in self._configs:
            answer = self.call(broker, Code.GET_BROKER_CONFIG, {}, ok=range(1 << 16))
            lines = answer.body.decode("utf-8", "replace").splitlines() if answer.code == 0 else []
            self._configs[broker] = dict(line.split("=", 1) for line in lines if "=" in line)
        return self._configs[broker]

    def record(self, broker: str, physical_offset: int) -> Message:
        """Return the message of a broker at a physical offset. Raises LookupError if it is gone."""
        answer = self.call(broker, Code.VIEW_MESSAGE_BY_ID, {"offset": physical_offset}, ok=(0, 1))
        for message in self.messages(broker, answer.body):
            return message
        raise LookupError(f"broker {broker} has no message at {physical_offset}: {answer.remark}")

    def broker_at(self, address: str) -> str:
        """Return the broker of an address. Raises LookupError."""
        for broker, known in self._addresses.items():
            if known == address:
                return broker
        raise LookupError(f"the cluster {self.name} has no broker at {address}")

    def messages(self, broker: str, body: bytes) -> list[Message]:
        """Return the messages of any queues of a broker in the body of an answer."""
        return [
            message_at(body, at, QueueRef(topic, self.number(topic, broker, queue_id)), offset)
            for at, topic, queue_id, offset in records(body)
        ]

    def _link(self, broker: str, member: str) -> Connection:
        self.check_open()
        if (address := self._addresses.get(broker)) is None:
            raise ConnectionLostError(f"the cluster {self.name} has no broker {broker!r} that takes calls", sent=False)
        with self._lock:
            link = self._links.get((address, member))
            if link is None:
                requested = partial(self._requested, broker)
                link = Connection(address, ping=_PING, requested=requested, **self._options)
                self._links[address, member] = link
            return link

    def _requested(self, broker: str, frame: Frame) -> None:
        self.later(0, lambda: self.requested(broker, frame))

    def attend(self, broker: str, member: str) -> None:
        """Take the requests of a broker to a member from now on."""
        link = self._link(broker, member)
        if not link.listens:
            link.attend()

    def leave(self, member: str) -> None:
        """Close the connections of a member."""
        with self._lock:
            links = [self._links.pop(key) for key in list(self._links) if key[1] == member]
        for link in links:
            link.close()
