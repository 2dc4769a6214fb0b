"""Messages into a cluster: choice of the queue, batches, delays, half messages (remoting-server, 7, 10 and 13.4).

A message that may be in any queue goes to another broker if its own cannot be reached. A message that was sent, but
not answered, is not sent again: it would perhaps be stored twice.

    prepare      a send with TRAN_MSG                   answered with the place of the half message
    end          END_TRANSACTION to its broker
    on_check     producer group in the heartbeat        a broker asks by CHECK_TRANSACTION_STATE, and `end` answers
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar, Unpack

from mqstore.broker.delay.recall import parse_recall_handle
from mqstore.broker.delay.route import routed_properties
from mqstore.broker.routing.selection import RoundRobin, group_queue
from mqstore.broker.routing.uniquekey import new_unique_key
from mqstore.clock import Clock
from mqstore.contract import NOT_ASKED, NobodyAsked, SendOptions, TransactionHandle
from mqstore.errors import ConfigError, ConnectionLostError, InvalidMessageError, MQStoreError, NotPermittedError
from mqstore.layout.properties import DELAY, PGROUP, TIMER_DELAY_MS, TIMER_DELIVER_MS, TRAN_MSG, UNIQ_KEY
from mqstore.layout.record import COMPRESSED, COMPRESSION_ZLIB, TRANSACTION_PREPARED
from mqstore.log.commitlog import QueueRef, SendReceipt
from mqstore.log.message import Message
from mqstore.log.writing.outgoing import (
    Body,
    OutgoingMessage,
    check_integer,
    checked_group,
    flat_body,
    no_such_option,
    refuse_options,
    refuse_routing,
)
from mqstore.logger import log as _log
from mqstore.options import DEFAULT_DELAY_LEVELS, delay_table_ms, milliseconds
from mqstore.remote.broker import RemoteContract
from mqstore.remote.cluster.degrade import refuse
from mqstore.remote.cluster.links import Links, checked, named
from mqstore.remote.cluster.records import KEPT_FLAGS, STORED, Receipt, receipts, send_fields
from mqstore.remote.cluster.routes import Place, RoutedTopic
from mqstore.remote.cluster.tables import Members, Topics
from mqstore.remoting.codes import QUERY_NOT_FOUND, Code
from mqstore.remoting.frames import Frame
from mqstore.remoting.shapes import batch_item
from mqstore.signalsafe import Future

Sent = TypeVar("Sent")
PRODUCER: Final = "mqstore"
_BATCH_BYTES: Final = 4_000_000
_DAY_MS: Final = 86_400_000
Answer = Callable[[Message], "bool | NobodyAsked | None"]
_OUTCOMES: Final[Mapping[str | bool | None, int]] = {
    "commit": 8,
    "rollback": 12,
    "unknown": 0,
    True: 8,
    False: 12,
    None: 0,
}
_NO_OFFSET: Final = -1
_ENDED_KEPT: Final = 10_000
_NOTED_S: Final = 60.0
"""Time after an end in which a broker may ask although it knows: it notes ends some seconds later. An answer would
commit the message twice."""
_SYS_FLAGS: Final = {None: 0, "zlib": COMPRESSED | COMPRESSION_ZLIB}


class Prepared(NamedTuple):
    """Message as it is sent."""

    properties: Mapping[str, str]
    flag: int
    sys_flag: int
    body: bytes
    born_ms: int
    group: str = PRODUCER

    def receipt(self, queue: QueueRef, answer: Frame) -> SendReceipt:
        """Return the receipt in the answer to a send."""
        return receipts(queue, answer, [self.properties[UNIQ_KEY]], self.born_ms)[0]


class _Any(int):
    """Number of a queue that was chosen here, so that another one may be taken instead."""


class Turns(RoundRobin):
    """Choice of queues for messages without a group: those of reachable brokers, in turn."""

    def __init__(self, links: Links) -> None:
        self._links = links

    def next(self, topic: str, queues: int) -> int:
        if (route := self._links.route(topic)) is None:
            return _Any(0)
        ids = route.writable_ids
        ids = [i for i in ids if not self._links.is_out(route.places[i].broker)] or ids or [0]
        return _Any(ids[next(self[topic]) % len(ids)])


class Sends(RemoteContract):
    """Puts of a `ClusterBroker`. Thread-safe."""

    _links: Links
    topics: Topics
    clock: Clock
    _has_warned = False

    def put(
        self, topic: str, body: Body, *, queue_id: int | None = None, **options: Unpack[SendOptions]
    ) -> SendReceipt:
        route = self.topics.for_send(topic)
        prepared = self._prepared(route, body, options)
        return self.send_prepared(route, queue_id, prepared, options.get("message_group"))[1]

    def send_prepared(
        self, route: RoutedTopic, queue_id: int | None, prepared: Prepared, message_group: object = None
    ) -> tuple[Frame, SendReceipt]:
        """Send one message. Return the answer, too."""

        def send(place: Place) -> Frame:
            fields, broker = self._send_fields(route, place, prepared), place.broker
            return self._links.call(broker, Code.SEND_MESSAGE_V2, fields, prepared.body, ok=STORED, repeat=False)

        number, answer = self._try(route, queue_id, message_group, send)
        return answer, prepared.receipt(QueueRef(route.name, number), answer)

    def put_async(
        self, topic: str, body: Body, *, queue_id: int | None = None, **options: Unpack[SendOptions]
    ) -> Future[SendReceipt]:
        route = self.topics.for_send(topic)
        prepared = self._prepared(route, body, options)
        future: Future[SendReceipt] = Future()
        future.set_running_or_notify_cancel()

        def send(place: Place) -> None:
            queue = QueueRef(topic, route.numbers[place[:2]])

            def answered(answer: Frame | None) -> None:
                try:
                    future.set_result(prepared.receipt(queue, checked(answer, f"broker {place.broker}", STORED)))
                except MQStoreError as error:
                    future.set_exception(error)

            fields = self._send_fields(route, place, prepared)
            self._links.park(place.broker, Code.SEND_MESSAGE_V2, fields, answered, prepared.body)

        try:
            self._try(route, queue_id, options.get("message_group"), send)
        except MQStoreError as error:
            future.set_exception(error)
        return future

    def put_many(
        self,
        topic: str,
        bodies: Iterable[Body | OutgoingMessage],
        *,
        queue_id: int | None = None,
        durability: object = None,
        **options: object,
    ) -> Sequence[SendReceipt]:
        """Append many messages to one queue, in batches of at most 4 MiB. An error has the receipts of those before."""
        if options:
            refuse_options(options)
        route = self.topics.for_send(topic)
        if queue_id is None and self.turns is not None:
            queue_id = self.turns.next(topic, route.write_queues)
        done: list[SendReceipt] = []
        items: list[bytes] = []
        keys: list[str] = []
        for each in bodies:
            message = each if isinstance(each, OutgoingMessage) else OutgoingMessage(each)
            refuse_routing(message, topic)
            options = {name: getattr(message, name) for name in ("tag", "keys", "properties", "unique_key")}
            prepared = self._prepared(route, message.body, options)
            items.append(batch_item(message.flag, prepared.body, prepared.properties))
            keys.append(prepared.properties[UNIQ_KEY])
        try:
            while items:
                size, stop = 0, 0
                while stop < len(items) and (not stop or size + len(items[stop]) <= _BATCH_BYTES):
                    size, stop = size + len(items[stop]), stop + 1
                done += self._batch(route, queue_id, b"".join(items[:stop]), keys[:stop])
                del items[:stop], keys[:stop]
        except MQStoreError as error:
            error.receipts = done
            raise
        return done

    def _batch(self, route: RoutedTopic, queue_id: int | None, body: bytes, keys: list[str]) -> list[SendReceipt]:
        now_ms = self.clock.now_ms()

        def send(place: Place) -> Frame:
            fields = send_fields(PRODUCER, route.name, *place[:2], {}, now_ms, batch=True)
            return self._links.call(place.broker, Code.SEND_BATCH_MESSAGE, fields, body, ok=STORED, repeat=False)

        number, answer = self._try(route, queue_id, None, send)
        return receipts(QueueRef(route.name, number), answer, keys, now_ms)

    def _try(
        self, route: RoutedTopic, queue_id: int | None, message_group: object, send: Callable[[Place], Sent]
    ) -> tuple[int, Sent]:
        """Send to a queue, or if any queue will do, to one of each broker until one is reached. Return its number."""
        numbers = self._candidates(route, queue_id, message_group)
        for number in numbers:
            try:
                return number, send(route.places[number])
            except ConnectionLostError as error:
                if error.sent or number == numbers[-1]:
                    raise
        raise AssertionError("there is a queue to send to")

    def _candidates(self, route: RoutedTopic, queue_id: int | None, group: object) -> list[int]:
        ids = route.writable_ids
        if not ids:
            raise NotPermittedError(f"topic {route.name!r} has no queue that may be written")
        if group is not None:
            if queue_id is not None:
                raise InvalidMessageError("message_group chooses the queue: leave out queue_id", "message_group")
            return [ids[group_queue(checked_group(group), len(ids))]]
        if queue_id is None and self.turns is not None:
            queue_id = self.turns.next(route.name, len(ids))
        if queue_id not in ids:
            what = f"queue_id {queue_id!r} is not one of the writable queues of {route.name!r}"
            raise InvalidMessageError(f"{what}, {ids[0]}..{ids[-1]}", "queue_id")
        first = {} if type(queue_id) is int else {route.places[i].broker: i for i in reversed(ids)}
        first.pop(route.places[queue_id].broker, None)
        return [int(queue_id), *first.values()]

    def _send_fields(self, route: RoutedTopic, place: Place, prepared: Prepared) -> dict[str, Any]:
        properties, flag, sys_flag, _, born_ms, group = prepared
        if TIMER_DELIVER_MS in properties or TIMER_DELAY_MS in properties:
            properties = self._as_level(place.broker, properties, born_ms)
        return send_fields(group, route.name, *place[:2], properties, born_ms, flag=flag, sys_flag=sys_flag)

    def _prepared(self, route: RoutedTopic, body: Body, options: Mapping[str, Any]) -> Prepared:
        """Return the parts of a message as they are sent. Raises InvalidMessageError, and TypeError for an unknown
        option."""
        if unknown := options.keys() - SendOptions.__annotations__.keys():
            raise no_such_option(unknown, SendOptions.__annotations__)
        flat, limit = flat_body(body), self.limits.max_message_size
        if len(flat) > limit:
            raise InvalidMessageError(f"the body has {len(flat)} bytes; max_message_size is {limit}", "body")
        now_ms = self.clock.now_ms()
        properties = routed_properties(options, now_ms=now_ms, max_delay_ms=1 << 60)
        properties.setdefault(UNIQ_KEY, new_unique_key())
        if options.get("delay") and properties.pop(TIMER_DELIVER_MS, None):
            properties[TIMER_DELAY_MS] = str(milliseconds(options["delay"], "delay"))  # our clock does not matter then
        flag = options.get("flag", 0)
        check_integer(flag, 32, "flag")
        if (compressed := options.get("compressed")) not in _SYS_FLAGS:
            raise InvalidMessageError(f"compressed must be 'zlib' or None, got {compressed!r}", "compressed")
        if options.get("durability") == "flush" and not self._has_warned:
            self._has_warned = True
            _log.warning("%s ignores durability='flush'; the brokers flush by their flushDiskType", self._links.name)
        return Prepared(properties, flag, _SYS_FLAGS[compressed], flat, now_ms)

    def _as_level(self, broker: str, properties: Mapping[str, str], now_ms: int) -> Mapping[str, str]:
        """Return the properties of a delayed message for a broker. Without a timer it has only levels."""
        config = self._links.config(broker)
        if config.get("timerWheelEnable") == "true":
            return properties
        rest = dict(properties)
        deliver_ms, delay_ms = (rest.pop(name, None) for name in (TIMER_DELIVER_MS, TIMER_DELAY_MS))
        wait_ms = int(delay_ms or int(deliver_ms or 0) - now_ms)
        levels_ms = delay_table_ms(config.get("messageDelayLevel") or DEFAULT_DELAY_LEVELS)
        if wait_ms not in levels_ms:
            nearest = min(range(len(levels_ms)), key=lambda i: abs(levels_ms[i] - wait_ms))
            raise ConfigError(
                f"broker {broker} has no timer (timerWheelEnable), only levels of delay; the nearest one is "
                f"delay_level={nearest + 1}, {levels_ms[nearest] / 1000:g} s"
            )
        return rest | {DELAY: str(levels_ms.index(wait_ms) + 1)}

    def copy(self, message: Message, topic: str, properties: Mapping[str, str]) -> None:
        """Send a stored message again, with these properties, to any queue of a topic."""
        properties = {UNIQ_KEY: message.unique_key, **properties}
        flags = message.flag, message.sys_flag & KEPT_FLAGS
        prepared = Prepared(properties, *flags, bytes(message.body_view), message.born_timestamp_ms)
        self.send_prepared(self.topics.require(topic), None, prepared)

    # -- stored messages --------------------------------------------------------------------------------------------

    def sync(self) -> None:
        self._links.check_open()  # the brokers flush as their flushDiskType says

    def recall(self, recall_handle: str) -> bool:
        topic = parse_recall_handle(recall_handle).topic
        broker = base64.urlsafe_b64decode(recall_handle + "=" * (-len(recall_handle) % 4)).decode().split(" ")[2]
        if self._links.config(broker).get("recallMessageEnable") == "false":
            refuse("recalling a message", f"set recallMessageEnable=true at broker {broker}")
        fields = named("topic recallHandle producerGroup", topic, recall_handle, PRODUCER)
        return self._links.call(broker, Code.RECALL_MESSAGE, fields, ok=(0, 1, 604)).code == 0

    def message_at(self, receipt: SendReceipt) -> Message:
        return self._links.record(self._links.place(*receipt.queue).broker, receipt.physical_offset)

    def find(self, topic: str, *, unique_key: str, limit: int = 32) -> list[Message]:
        return self.find_by(topic, unique_key, 0, self.clock.now_ms() + _DAY_MS, limit, unique=True)

    def find_by(
        self, topic: str, key: str, start_ms: int, stop_ms: int, limit: int, *, unique: bool = False
    ) -> list[Message]:
        """Return messages with a key, or with `unique` of that unique key, stored in a range of time, newest first."""
        names = "topic key maxNum beginTimestamp endTimestamp _UNIQUE_KEY_QUERY"
        fields = named(names, topic, key, limit, start_ms, min(stop_ms, 1 << 60), unique or None)
        found: list[Message] = []
        for broker in self.topics.require(topic).brokers:
            answer = self._links.call(broker, Code.QUERY_MESSAGE, fields, ok=(0, QUERY_NOT_FOUND))
            for each in self._links.messages(broker, answer.body):
                if each.unique_key == key if unique else key in each.keys:
                    found.append(each)
        return sorted(found, key=lambda message: -message.store_timestamp_ms)[:limit]


class _Half(NamedTuple):
    broker: str
    handle: TransactionHandle
    receipt: SendReceipt


class Transactions:
    """Half messages of one client (`contract.TransactionCalls`)."""

    def __init__(self, links: Links, sends: Sends, members: Members) -> None:
        self._links = links
        self._sends = sends
        self._members = members
        self._open: dict[str, _Half] = {}
        self._ended: dict[str, tuple[str | bool, float]] = {}
        """Outcomes and times of the end, the oldest first."""
        self._answers: dict[str, Answer] = {}

    def prepare(
        self, topic: str, body: Body, properties: Mapping[str, str], *, producer_group: str, **asked: Any
    ) -> TransactionHandle:
        """Store a half message (`TransactionCalls.prepare`). `asked` is some of queue_id, flag and sys_flag."""
        route = self._sends.topics.for_send(topic)
        marked = {**properties, TRAN_MSG: "true", PGROUP: producer_group}
        flags = asked.get("flag", 0), asked.get("sys_flag", 0) | TRANSACTION_PREPARED
        prepared = Prepared(marked, *flags, flat_body(body), self._sends.clock.now_ms(), producer_group)
        answer, receipt = self._sends.send_prepared(route, asked.get("queue_id"), prepared)
        key = marked[UNIQ_KEY]
        offset = int(answer.fields["queueOffset"])
        handle = TransactionHandle(key, topic, producer_group, offset, receipt.physical_offset)
        self._open[key] = _Half(route.places[receipt.queue_id].broker, handle, receipt)
        return handle

    def end(
        self, transaction: TransactionHandle | str, outcome: str, *, from_check: bool = False, **asked: object
    ) -> SendReceipt | None:
        """End a half message. The receipt of a commit has the address of the half message and the offset -1, since a
        broker does not tell where the visible message is."""
        key = transaction if isinstance(transaction, str) else transaction.transaction_id
        if (half := self._open.get(key)) is None:
            raise InvalidMessageError(f"unknown transaction {key[:150]!r}", "transaction_id")
        self._end(half.broker, half.handle, outcome, from_check=from_check)
        if outcome != "commit":
            return None
        queue, _, *more = half.receipt
        return Receipt((queue, _NO_OFFSET, *more))  # type: ignore[arg-type]

    def _end(self, broker: str, handle: TransactionHandle, outcome: str | bool | None, *, from_check: bool) -> None:
        names = "producerGroup tranStateTableOffset commitLogOffset commitOrRollback fromTransactionCheck msgId"
        key, _, group, offset, physical = handle
        fields = {"transactionId": key} | named(
            names, group, offset, physical, code := _OUTCOMES[outcome], from_check, key
        )
        self._links.call(broker, Code.END_TRANSACTION, fields)
        if code:
            self._open.pop(key, None)
            self._ended[key] = outcome or False, time.monotonic()
            while len(self._ended) > _ENDED_KEPT:
                self._ended.pop(next(iter(self._ended)), None)

    def on_check(self, producer_group: str | None, callback: Answer | None) -> None:
        if producer_group is None:
            return
        if callback is None:
            self._answers.pop(producer_group, None)
            self._members.producers.discard(producer_group)
        else:
            self._answers[producer_group] = callback
            self._members.producers.add(producer_group)
            self._links.later(0, self._members.beat_producers)

    def half_message(self, transaction: TransactionHandle) -> Message:
        return self._links.record(self._open[transaction.transaction_id].broker, transaction.physical_offset)

    def get(self, transaction_id: str) -> TransactionHandle | None:
        half = self._open.get(transaction_id)
        return None if half is None else half.handle

    def answer(self, broker: str, frame: Frame) -> None:
        """Answer a broker's question about a half message."""
        [message] = self._links.messages(broker, frame.body)
        group = message.stored_properties().get(PGROUP, "")
        said: str | bool | NobodyAsked | None
        if (ended := self._ended.get(message.unique_key)) is not None:
            said = NOT_ASKED if time.monotonic() - ended[1] < _NOTED_S else ended[0]
        else:
            callback = self._answers.get(group)
            said = NOT_ASKED if callback is None else callback(message)
        if isinstance(said, NobodyAsked):
            return
        offset, physical = int(frame.fields["tranStateTableOffset"]), int(frame.fields["commitLogOffset"])
        handle = TransactionHandle(message.unique_key, message.topic, group, offset, physical)
        self._end(broker, handle, said, from_check=True)
