"""Router: the only entry to the log, for every message (delivery#put-path).

    a user's put        -> queue by id, message group or turn -> \\
    retry, dead letter, commit, delivery of a delayed message ->  route -> log
                                                                   |
              DELAY = n            SCHEDULE_TOPIC_XXXX, queue n - 1    for `levels.py`
              TIMER_DELIVER_MS ... rmq_sys_wheel_timer, queue 0        for `timer.py`
              else                 its own topic and queue

REAL_TOPIC and REAL_QID of a delayed record are its own topic and queue. A service that restores it must remove the
delay first, or it would be delayed again.
"""

from __future__ import annotations

import math
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Literal, TypeVar, Unpack, cast

from mqstore.broker.delay.recall import recall_handle
from mqstore.broker.delay.route import PRECISION_MS, delay_route, routed_properties
from mqstore.broker.redelivery.references import References
from mqstore.broker.routing.selection import RoundRobin, group_queue
from mqstore.broker.routing.uniquekey import PROCESS_KEYS
from mqstore.broker.tables.names import SCHEDULE_TOPIC, TIMER_TOPIC
from mqstore.broker.tables.offsets import OffsetTable
from mqstore.broker.tables.topics import TopicConfig, TopicTable, check_queue
from mqstore.errors import InvalidMessageError, StoreBusyError
from mqstore.layout.properties import NAME_END, ORIGIN_MESSAGE_ID, PAIR_END, TIMER_OUT_MS, UNIQ_KEY, encode_properties
from mqstore.layout.record import (
    COMPRESSED,
    COMPRESSION_ZLIB,
    TRANSACTION_MASK,
    TRANSACTION_PREPARED,
    TRANSACTION_ROLLBACK,
)
from mqstore.log.commitlog import SendReceipt, SendReceipts
from mqstore.log.directory.names import MAX_QUEUE_ID
from mqstore.log.message import Message
from mqstore.log.store import MessageStore
from mqstore.log.writing.outgoing import (
    Body,
    Copy,
    OutgoingMessage,
    check_integer,
    checked_group,
    flat_body,
    no_such_option,
    refuse_options,
)
from mqstore.log.writing.writer import PutOptions, RecordOptions, fields_of
from mqstore.native import Sending, compiled_put, kernel
from mqstore.options import Durability, Duration, milliseconds
from mqstore.signalsafe import Bell, Future
from mqstore.threads import start_thread

Item = TypeVar("Item")


class SendOptions(PutOptions, total=False):
    """Options of a put: those of `MessageStore.put`, delays, and `compressed`.

    At most one of `message_group`, `delay`, `deliver_at` and `delay_level` may be given. A message group chooses the
    queue, so it excludes `queue_id`. `compressed` says that the body is already a zlib stream. Readers get it inflated.

    >>> import mqstore, tempfile
    >>> options: SendOptions = {"tag": "paid", "message_group": "customer-7"}
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     receipt = store.put("orders", b"o-1", **options)
    ...     [message] = store.read(*receipt.queue, receipt.offset)
    ...     message.tag, message.message_group
    ('paid', 'customer-7')
    """

    delay: Duration | None
    deliver_at: datetime | float | None
    delay_level: int | None
    compressed: Literal["zlib"] | None


class DelayedReceipt(SendReceipt):
    """Receipt of the waiting copy of a delayed message, with the handle that cancels it.
    After the items of a `SendReceipt` it has the topic and the time, from which the handle is made on request."""

    __slots__ = ()

    @property
    def recall_handle(self) -> str | None:
        topic, deliver_ms = cast("tuple[str, int]", tuple(self)[7:])
        return recall_handle(topic, deliver_ms, self.unique_key)


AppendPlain = Callable[[str, int, bytes, str, int, int, int, bytes, int], SendReceipt | None]
"""Function of topic, queue id, body, encoded properties, flag, system flag, born time (ms), encoded born host and
reconsume times. It does what `Router.append` does if the properties have a unique key, none of them changes where or
how the message is stored, and the put does not wait for the disk. Otherwise it changes nothing and returns None."""
_COMPRESSED = {None: 0, "zlib": COMPRESSED | COMPRESSION_ZLIB}


def _declined(*_: object) -> None:
    """`append_plain` without compiled parts."""


class Router(Sending):
    """Router of all messages to their topics, or to the topics of delayed messages."""

    def __init__(self, store: MessageStore, topics: TopicTable, offsets: OffsetTable) -> None:
        self._store = store
        self._writer = store.writer
        self._topics = topics
        self._offsets = offsets
        self._clock = store.clock
        self._levels = len(store.delay_table_ms)
        self._max_delay_ms = milliseconds(store.config.max_delay, "max_delay")
        self._group_hash = store.manifest.group_hash
        self.references = References(store)
        self._turns = RoundRobin()
        topics.on_change.append(self._turns.forget)
        self._sender = sender = self._writer.sender(
            topics=topics,
            counters=self._turns,
            group_queue=group_queue,
            group_hash=self._group_hash,
            keys=PROCESS_KEYS,
            delayed=DelayedReceipt,
            timer_topic=TIMER_TOPIC,
            schedule_topic=SCHEDULE_TOPIC,
            levels=self._levels,
            max_delay_ms=self._max_delay_ms,
            precision_ms=PRECISION_MS,
        )
        self.append_plain: AppendPlain = _declined if sender is None else sender.append
        """Append a record from a client's fields, in one compiled call. None: `append` must do it."""

    @compiled_put
    def put(
        self, topic: str, body: Body, *, queue_id: int | None = None, **options: Unpack[SendOptions]
    ) -> SendReceipt:
        """Append one message to `queue_id`, the queue of its `message_group`, or the next one in turn.
        `delay` (seconds) and `deliver_at` (aware datetime, or seconds since the epoch) delay it, and the receipt has a
        `recall_handle`. `delay_level` delays it by a level of the table. Raises InvalidMessageError,
        TopicNotFoundError, NotPermittedError, and the errors of `MessageStore.put`."""
        properties: dict[str, str] = {}
        if options:
            unknown = options.keys() - SendOptions.__annotations__.keys()
            if unknown:
                raise no_such_option(unknown, SendOptions.__annotations__)
            properties = routed_properties(options, now_ms=self._clock.now_ms(), max_delay_ms=self._max_delay_ms)
            flag = options.get("flag", 0)
            check_integer(flag, 32, "flag")
            compressed = options.get("compressed")
            if compressed not in _COMPRESSED:
                raise InvalidMessageError(f"compressed must be 'zlib' or None, got {compressed!r}", "compressed")
        if self._topics.entered(topic) is None:  # a put that is refused creates no topic
            encode_properties(properties)
            if (size := len(flat_body(body))) > self._writer.max_body:
                self._writer.refuse_body(size)
        config = self._topics.for_send(topic)
        group = options.get("message_group")
        if queue_id is None:
            if group is None:
                queue_id = next(self._turns[topic]) % config.write_queues  # as `RoundRobin.next`, without its call
            else:
                queue_id = group_queue(checked_group(group), config.write_queues, self._group_hash)
        elif group is not None:
            raise InvalidMessageError("message_group chooses the queue: leave out queue_id", "message_group")
        else:
            check_queue(config, queue_id)
        if not options:
            return self._writer.put_record(topic, queue_id, body)
        body = flat_body(body)
        self._writer.check_room(len(body))
        return self.append(
            topic,
            queue_id,
            body,
            properties,
            flag=flag,
            sys_flag=_COMPRESSED[compressed],
            durability=options.get("durability"),
        )

    def put_many(
        self,
        topic: str,
        bodies: Iterable[Body | OutgoingMessage],
        *,
        queue_id: int | None = None,
        durability: Durability | None = None,
        **options: object,
    ) -> SendReceipts:
        """Append many messages (see `Broker.put_many`). Raises the errors of `MessageStore.put_many`."""
        if options:
            refuse_options(options)
        return self._writer.put_many(topic, bodies, self._chosen_queue(topic, queue_id), durability=durability)

    def put_packed(self, topic: str, data: bytes, queue_id: int | None) -> bytes | int:
        """Append the messages in the body of a `put_many`, and return that of its answer (`LogWriter.put_packed`).
        Otherwise return the queue for `put_many`, which must do it. Raises the errors of `TopicTable.for_send` and
        `check_queue`."""
        queue_id = self._chosen_queue(topic, queue_id)
        return self._writer.put_packed(topic, data, queue_id) or queue_id

    def _chosen_queue(self, topic: str, queue_id: int | None) -> int:
        """Return the queue for messages that are put together: the given one, or the next one in turn."""
        config = self._topics.for_send(topic)
        return self._turns.next(topic, config.write_queues) if queue_id is None else check_queue(config, queue_id)

    def append(
        self,
        topic: str,
        queue_id: int,
        body: Body,
        properties: Mapping[str, str],
        *,
        origin: Message | None = None,
        **options: Unpack[RecordOptions],
    ) -> SendReceipt:
        """Append a record with all fields, reserved properties included, to the topic chosen by `route`.
        If it waits there, it may refer to the body of `origin`, which has the same body."""
        where, at, stored = self.route(topic, queue_id, properties, options.get("sys_flag", 0))
        receipt = None
        if origin is not None and where != topic:
            receipt = self.references.append(where, at, origin, stored, options)
        if receipt is None:
            receipt = self._store.append(where, at, body, properties=stored, **options)
        if where != TIMER_TOPIC or topic == TIMER_TOPIC:
            return receipt
        return DelayedReceipt((*receipt, topic, int(stored[TIMER_OUT_MS]) + 1))  # type: ignore[arg-type]  # two more

    def copy(
        self,
        message: Message,
        topic: str,
        queue_id: int,
        properties: Mapping[str, str],
        *,
        refers: bool = False,
        **options: Unpack[RecordOptions],
    ) -> SendReceipt:
        """Append a copy of `message` elsewhere, with its stored body and birth, and these properties.
        `options` replace fields of the message. A message without a unique key gets its first address as
        ORIGIN_MESSAGE_ID, which identifies all its copies. This does not wait for the disk, because the original still
        exists. A caller that removes the original must flush first. With `refers`, a waiting copy may have a reference
        instead of the body. Raises FormatError if the message has a reference, and its body cannot be read."""
        origin, message = message if refers else None, message._whole()
        if UNIQ_KEY not in properties and ORIGIN_MESSAGE_ID not in properties:
            properties = {**properties, ORIGIN_MESSAGE_ID: message.message_id}
        fields: RecordOptions = {**fields_of(message), "durability": "append", "copied": True, **options}
        return self.append(topic, queue_id, message.body_view, properties, origin=origin, **fields)

    def target_queue(self, message: Message, topic: str, queue_id: int) -> int | None:
        """Return the queue of `topic` for a message that waited for `queue_id`.
        If this queue no longer exists, another is chosen, as if the message were put again. None: the topic was deleted
        meanwhile."""
        if message.physical_offset < self._store.deleted_at(topic):
            return None
        config = self._topics.entered(topic)
        if config is None or queue_id < _queues_read(config):
            return queue_id
        group = message.message_group
        queues = max(1, min(config.read_queues, config.write_queues))
        return queue_id % queues if group is None else group_queue(group, queues, self._group_hash)

    def settled_queues(self, topic: str) -> int:
        """Return the queue id below which all waiting messages keep their queue. For others call `target_queue`."""
        if self._store.deleted_at(topic):
            return 0
        return _queues_read(self._topics.entered(topic))

    def copy_many(self, copies: Sequence[Copy], attempts: int = 0) -> int:
        """Append copies of many messages, which must not have a delay. Return how many, at least 1.
        It stores the first of `copies` that fit together, with `attempts` added to their `reconsume_times`. If it
        raises, for the first copy, it stores none."""
        return self._store.copy_many(_identified(copies), attempts)

    def route(
        self, topic: str, queue_id: int, properties: Mapping[str, str], sys_flag: int = 0
    ) -> tuple[str, int, Mapping[str, str]]:
        """Return (topic, queue id, properties) with which to store a record (delivery#level-put)."""
        if sys_flag & TRANSACTION_MASK in (TRANSACTION_PREPARED, TRANSACTION_ROLLBACK):
            return topic, queue_id, properties
        delayed = delay_route(
            topic, queue_id, properties, self._clock.now_ms, levels=self._levels, max_delay_ms=self._max_delay_ms
        )
        if delayed is None:
            return topic, queue_id, properties
        self._topics.ensure(delayed[0], self._levels if delayed[0] == SCHEDULE_TOPIC else 1)
        return delayed


def _queues_read(config: TopicConfig | None) -> int:
    """Return the number of queues that are read. A topic without an entry may get any queue."""
    return MAX_QUEUE_ID + 1 if config is None else max(config.read_queues, 1)


_IDENTITIES = UNIQ_KEY.encode() + NAME_END, ORIGIN_MESSAGE_ID.encode() + NAME_END
_UNIQUE = re.compile(rb"(?:\A|\x02)(?:" + b"|".join(_IDENTITIES) + rb")[^\x02]")


def _identified(copies: Sequence[Copy]) -> list[Copy]:
    """Return `copies` with a property that identifies all copies of a message."""
    known: list[Copy] = []
    if kernel is not None and type(copies) is list:
        known = kernel.identify(copies, _IDENTITIES, _IDENTITIES[1])
    for copy in copies[len(known) :]:
        message, topic, queue_id, properties = copy
        if not _UNIQUE.search(properties):
            identity = b"".join((properties, _IDENTITIES[1], message.message_id.encode(), PAIR_END))
            copy = message, topic, queue_id, identity
        known.append(copy)
    return known


_AsyncPut = tuple[Future[SendReceipt], Callable[[], SendReceipt], bool]
"""A future, the put that returns its receipt, and True if it waits for the disk."""


def _taken(items: deque[Item]) -> Iterator[Item]:
    """Take items from the front, one at a time. Other threads may do so at the same time."""
    with suppress(IndexError):
        while True:
            yield items.popleft()


class AsyncPuts:
    """Futures of receipts whose records are not yet synced, or not yet stored.
    An event loop must not wait for a sync, nor a signal handler for the call that it interrupted. They get futures, and
    one thread, started with the first future, does the rest. Signal handlers may put at any time, so no lock is
    taken."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._bell = Bell()
        self._later: deque[_AsyncPut] = deque()
        self._waiting: deque[tuple[Future[SendReceipt], SendReceipt]] = deque()
        self._threads: list[threading.Thread] = []
        """One thread, or several if puts came while the first was started. One bell wakes them in turn."""
        self._closed = False

    def put(self, put: Callable[[], SendReceipt], *, synced: bool) -> Future[SendReceipt]:
        """Call `put`, which must not wait for the disk itself. Return its future receipt.
        The future is done when `put` returns or, with `synced`, once its record is on disk. It has the error that `put`
        raises. If that is StoreBusyError, the thread calls `put` again."""
        future: Future[SendReceipt] = Future()
        future.set_running_or_notify_cancel()
        if self._put((future, put, synced), again=True):
            self._wake()
        return future

    def _put(self, wanted: _AsyncPut, *, again: bool = False) -> bool:
        """Make a put, or with `again` postpone it if the store is busy. Return True if work remains for the thread."""
        future, put, synced = wanted
        try:
            receipt = put()
        except Exception as error:
            if again and isinstance(error, StoreBusyError):
                self._later.append(wanted)
                return True
            future.set_exception(error)
            return False
        if synced:
            self._waiting.append((future, receipt))
        else:
            future.set_result(receipt)
        return synced

    def _wake(self) -> None:
        self._bell.ring()
        if self._closed:
            self.step()
        elif not self._threads:
            self._threads.append(start_thread(self, self._bell, "async-put"))

    def step(self) -> float | None:
        """Repeat postponed puts, and sync waiting ones, in the thread (`mqstore.threads`) or while closing."""
        for wanted in _taken(self._later):
            self._put(wanted)
        if batch := [*_taken(self._waiting)]:
            try:
                self._store.flush()
            except Exception as error:
                for future, _ in batch:
                    future.set_exception(error)
            else:
                for future, receipt in batch:
                    future.set_result(receipt)
        if self._closed:
            self._bell.ring()  # for the next thread
            return None
        return math.inf

    def close(self) -> None:
        """Finish waiting puts. Later calls of `put` finish theirs at once."""
        self._closed = True
        self._bell.ring()
        for thread in self._threads:
            if thread is not threading.current_thread():  # a callback may call `close`
                thread.join()
        self.step()  # for puts that the threads have not taken
