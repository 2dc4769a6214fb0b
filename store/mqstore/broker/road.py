"""The one way in: what every message passes on its way to the log (delivery#put-path).

    a user's put        -> queue by id, message group or turn -> \\
    retry, dead letter, commit, delivery of a delayed message ->  route -> log
                                                                   |
              DELAY = n            SCHEDULE_TOPIC_XXXX, queue n - 1    for `levels.py`
              TIMER_DELIVER_MS ... rmq_sys_wheel_timer, queue 0        for `timer.py`
              else                 where it was going

REAL_TOPIC and REAL_QID of a diverted record say where it was going. Who restores one takes the delay off first, or it
would be diverted again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Literal, Unpack, cast

from mqstore.broker.delay.route import PRECISION_MS, delay_route
from mqstore.broker.delay.routing import routed_properties
from mqstore.broker.names import SCHEDULE_TOPIC, TIMER_TOPIC
from mqstore.broker.offsets import OffsetTable
from mqstore.broker.pop.receipts import recall_handle
from mqstore.broker.selection import RoundRobin, group_queue
from mqstore.broker.topics import TopicConfig, TopicTable
from mqstore.broker.uniquekey import PROCESS_KEYS
from mqstore.errors import InvalidMessageError
from mqstore.layout.properties import (
    NAME_END,
    ORIGIN_MESSAGE_ID,
    PAIR_END,
    TIMER_OUT_MS,
    UNIQ_KEY,
)
from mqstore.layout.record import (
    COMPRESSED,
    COMPRESSION_ZLIB,
    TRANSACTION_MASK,
    TRANSACTION_PREPARED,
    TRANSACTION_ROLLBACK,
)
from mqstore.log.commitlog import SendReceipt, SendReceipts
from mqstore.log.message import Message
from mqstore.log.outgoing import (
    Body,
    Copy,
    OutgoingMessage,
    check_integer,
    checked_group,
    no_such_option,
    refuse_options,
)
from mqstore.log.store import MessageStore
from mqstore.log.writer import MAX_QUEUE_ID, PutOptions, RecordOptions, Sending, compiled_put, fields_of
from mqstore.native import kernel
from mqstore.options import Durability, Duration, milliseconds

__all__ = ["DelayedReceipt", "Road", "SendOptions"]


class SendOptions(PutOptions, total=False):
    """What a put takes beside topic, body and queue id, more than `MessageStore.put` does; at most one of the first
    four. `compressed`: the body is a zlib stream already, and is inflated for whoever reads it.

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
    """The receipt of a message that waits for its moment: of its waiting copy, with the handle that cancels it.

    Behind the items of a `SendReceipt` stand the topic and the moment. The handle is made of them when it is read.
    """

    __slots__ = ()

    @property
    def recall_handle(self) -> str | None:
        topic, deliver_ms = cast("tuple[str, int]", tuple(self)[7:])
        return recall_handle(topic, deliver_ms, self.unique_key)


_COMPRESSED = {None: 0, "zlib": COMPRESSED | COMPRESSION_ZLIB}


class Road(Sending):
    """Puts, with the rewriting that delay asks for."""

    def __init__(self, store: MessageStore, topics: TopicTable, offsets: OffsetTable) -> None:
        self._store = store
        self._writer = store.writer
        self._topics = topics
        self._offsets = offsets
        self._clock = store.clock
        self._levels = len(store.delay_table_ms)
        self._max_delay_ms = milliseconds(store.config.max_delay, "max_delay")
        self._group_hash = store.manifest.group_hash
        self._turns = RoundRobin()
        self._sender = self._writer.sender(
            topics=topics,
            counters=self._turns.counters,
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

    # -- a user's message -------------------------------------------------------------------------------------------

    @compiled_put
    def put(
        self, topic: str, body: Body, *, queue_id: int | None = None, **options: Unpack[SendOptions]
    ) -> SendReceipt:
        """Append one message. Queue: `queue_id`, else by `message_group` (all of a group in one queue), else by turns.

        `delay` (seconds) and `deliver_at` (aware datetime, or seconds since the epoch) hold it back to a moment, with a
        `recall_handle` in the receipt; `delay_level` by a level of the table. Raises InvalidMessageError,
        TopicNotFoundError, NotPermittedError, and what `MessageStore.put` raises.
        """
        config = self._topics.for_send(topic)
        if queue_id is None:
            group = options.get("message_group")
            if group is None:
                queue_id = self._turns.next(topic, config.write_queues)
            else:
                queue_id = group_queue(checked_group(group), config.write_queues, self._group_hash)
        elif type(queue_id) is not int or not 0 <= queue_id < max(config.write_queues, config.read_queues):
            raise InvalidMessageError(
                f"queue_id {queue_id!r} does not lie in 0..{max(config.write_queues, config.read_queues) - 1}, "
                f"the queues of {topic!r}",
                "queue_id",
            )
        if not options:
            return self._writer.put(topic, body, queue_id)
        unknown = options.keys() - SendOptions.__annotations__.keys()
        if unknown:
            raise no_such_option(unknown, SendOptions.__annotations__)
        properties = routed_properties(options, now_ms=self._clock.now_ms(), max_delay_ms=self._max_delay_ms)
        flag = options.get("flag", 0)
        check_integer(flag, 32, "flag")
        compressed = options.get("compressed")
        if compressed not in _COMPRESSED:
            raise InvalidMessageError(f"compressed {compressed!r}: a body is compressed by 'zlib' or not", "compressed")
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
        """Append many to one queue (None: whose turn it is), with one flush wait. Errors: `MessageStore.put_many`.
        `options` are those of one message: InvalidMessageError says what takes them."""
        if options:
            refuse_options(options)
        config = self._topics.for_send(topic)
        if queue_id is None:
            queue_id = self._turns.next(topic, config.write_queues)
        return self._store.put_many(topic, bodies, queue_id, durability=durability)

    # -- any record -------------------------------------------------------------------------------------------------

    def append(
        self, topic: str, queue_id: int, body: Body, properties: Mapping[str, str], **options: Unpack[RecordOptions]
    ) -> SendReceipt:
        """Append a record with every field given, reserved properties included, to where it belongs now (`route`)."""
        where, at, stored = self.route(topic, queue_id, properties, options.get("sys_flag", 0))
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
        **options: Unpack[RecordOptions],
    ) -> SendReceipt:
        """Append `message` again, elsewhere: its body as stored, born where and when it was, with these properties.
        `options` replace fields of the message.

        A message that came without a unique key gets its first address as ORIGIN_MESSAGE_ID: its copies are then known
        as one. Does not wait for the disk, since what it is copied from is there as well; whoever lets go of that
        flushes first.
        """
        if UNIQ_KEY not in properties and ORIGIN_MESSAGE_ID not in properties:
            properties = {**properties, ORIGIN_MESSAGE_ID: message.message_id}
        fields: RecordOptions = {**fields_of(message), "durability": "append", "copied": True, **options}
        return self.append(topic, queue_id, bytes(message.body_view), properties, **fields)

    def home(self, message: Message, topic: str, queue_id: int) -> int | None:
        """In which queue of `topic` a message goes on that waited to come to `queue_id`: another if that is none by
        now, as put to the topic anew. None: nowhere, its topic was deleted meanwhile."""
        if message.physical_offset < self._offsets.deleted_at(topic):
            return None
        config = self._topics.entered(topic)
        if config is None or queue_id < _queues_read(config):
            return queue_id
        group = message.message_group
        queues = max(1, min(config.read_queues, config.write_queues))
        return queue_id % queues if group is None else group_queue(group, queues, self._group_hash)

    def settled_queues(self, topic: str) -> int:
        """Below which queue id every message, however old, goes on as it was put; `home` knows of the others."""
        if self._offsets.deleted_at(topic):
            return 0
        return _queues_read(self._topics.entered(topic))

    def copy_many(self, copies: Sequence[Copy]) -> int:
        """As `copy`, for messages that may not be delayed once more, many at once: the first of `copies`, as many as go
        together in one piece; how many, at least one. Stores all of these or, if it raises, none; raises for the first.
        """
        return self._store.copy_many(_identified(copies))

    def route(
        self, topic: str, queue_id: int, properties: Mapping[str, str], sys_flag: int = 0
    ) -> tuple[str, int, Mapping[str, str]]:
        """Where a record with these properties goes now, and with which properties (delivery#level-put)."""
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
    """Below which queue id a topic is read; one that is known by its queues alone gets them as messages come."""
    return MAX_QUEUE_ID + 1 if config is None else max(config.read_queues, 1)


_IDENTITIES = UNIQ_KEY.encode() + NAME_END, ORIGIN_MESSAGE_ID.encode() + NAME_END
_UNIQUE = re.compile(rb"(?:\A|\x02)(?:" + b"|".join(_IDENTITIES) + rb")[^\x02]")


def _identified(copies: Sequence[Copy]) -> list[Copy]:
    """`copies` with properties by which all copies of a message are known as one."""
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
