"""Writer: puts messages as records into the log, and waits for the disk if requested (format#limits).

    put        one message: look up the queue, check, append, count
    put_many   many to one queue, encoded together
    append     one record with every field given, for the engine's own copies and for imports
    copy_many  copies of stored records, each to its own queue, built together from their bytes

All checks are made before anything is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from itertools import pairwise
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack, cast

from mqstore import arrays as np
from mqstore.errors import FormatError, InvalidMessageError, MQStoreError
from mqstore.layout.arrays.dispatch import SCHEDULE_TOPIC
from mqstore.layout.arrays.encode import lengths_of
from mqstore.layout.hosts import encode_host
from mqstore.layout.properties import MAX_PROPERTIES_BYTES, REFUSED, UNIQ_KEY, decode_properties, encode_properties
from mqstore.layout.record import BLANK_BYTES, INNER_BATCH, MAGIC_V1, MAGIC_V2, MAX_TOPIC_BYTES_V1, unreadable_number
from mqstore.log.commitlog import ALLOWANCE, ORDINARY, CommitLog, Fields, SendReceipt, SendReceipts
from mqstore.log.derived.consumequeue import ConsumeQueue
from mqstore.log.directory.names import MAX_QUEUE_ID, check_topic
from mqstore.log.directory.store_files import StoreParts
from mqstore.log.message import Message
from mqstore.log.stats import Histogram
from mqstore.log.writing.log_tail import LogTail, QueueRef, QueueTail
from mqstore.log.writing.outgoing import (
    SLOTS,
    Body,
    Copy,
    OutgoingMessage,
    check_integer,
    flat_body,
    no_such_option,
    refuse_routing,
    tail_of_bytes,
    user_properties,
    without_place,
)
from mqstore.log.writing.syncs import LogSyncs
from mqstore.native import kernel
from mqstore.options import Durability, waits_for_disk
from mqstore.signalsafe import Lock

_Method = TypeVar("_Method", bound=Callable[..., Any])
_INNER = b"INNER_"
_UNCOUNTED: Mapping[str, int] = {}
_ENTRY_BYTES = 64
"""Maximum bytes of the unit of a message and its index entries."""
_FIELD_BITS = {"flag": 32, "sys_flag": 32, "reconsume_times": 32, "prepared_transaction_offset": 64}


class MessageOptions(TypedDict, total=False):
    """Options of `put`, without topic, body and queue id."""

    tag: str | None
    keys: str | Iterable[str] | None
    properties: Mapping[str, str] | None
    unique_key: str | None
    message_group: str | int | None
    flag: int


class PutOptions(MessageOptions, total=False):
    """Message options and `durability`: "append" or "flush". None means the store's durability."""

    durability: Durability | None


class RecordOptions(TypedDict, total=False):
    """Options of `append`, without properties: the `Fields` of a record, and how it is put."""

    flag: int
    sys_flag: int
    """Flags of the record. The caller sets the compression and transaction bits."""
    born_timestamp_ms: int | None
    born_host: str | None
    reconsume_times: int
    prepared_transaction_offset: int
    durability: Durability | None
    copied: bool
    """True if the body was accepted before. It may be larger than the present `max_message_size`."""
    latest: int
    """Maximum physical offset of the record. Beyond it OutOfReachError is raised, and nothing is written."""


def fields_of(message: Message) -> RecordOptions:
    """Return the fields of `message` that its copies share."""
    return {
        "flag": message.flag,
        "sys_flag": message.sys_flag,
        "born_timestamp_ms": message.born_timestamp_ms,
        "born_host": message.born_host,
        "reconsume_times": message.reconsume_times,
    }


class Prepared(NamedTuple):
    """Checked parts of a record, without its body, and how it is put."""

    properties: bytes = b""
    """Encoded."""
    key: str | None = None
    """Unique key, for the receipt."""
    fields: Fields = ORDINARY
    durability: Durability | None = None
    asks: bool = True
    """True for puts of applications, which ask for room. The reserve is for the engine's own records."""
    copied: bool = False
    latest: int | None = None


_PLAIN = Prepared()


class HandleState(NamedTuple):
    """State with which an `AppendHandle` puts."""

    log: LogTail
    queue: QueueTail
    tail: bytes
    """Bytes after each body."""
    max_body: int


class AppendHandle:
    """Puts messages with the same properties, encoded once, to one queue."""

    __slots__ = ("_append", "_max_body", "_queue", "_tail", "_writer")

    def __init__(self, writer: LogWriter, queue: ConsumeQueue, tail: bytes) -> None:
        self._writer = writer
        self._queue = queue
        self._tail = tail
        self._append = writer.log.append
        self._max_body = writer.max_body

    def put(self, body: bytes, durability: Durability | None = None) -> SendReceipt:
        """Append one message. Raises the errors of `LogWriter.put`."""
        writer = self._writer
        if len(body) > self._max_body:
            writer.refuse_body(len(body))
        waits = durability != "append" and writer.waits(durability)
        receipt = self._append(self._queue, body, self._tail)
        writer.after_put(receipt if waits else None)
        return receipt

    def way(self) -> HandleState | None:
        """Return the state for compiled callers, which store records themselves, or None if a put needs more steps."""
        writer = self._writer
        return None if writer.syncs.by_default else HandleState(writer.log, self._queue, self._tail, self._max_body)


def _counts_failures(method: _Method) -> _Method:
    @wraps(method)
    def counted(self: LogWriter, /, *args: Any, **options: Any) -> Any:
        try:
            return method(self, *args, **options)
        except Exception:
            self.failed_puts += 1
            raise

    return cast(_Method, counted)


def _encoded(topic: str, properties: Mapping[str, str]) -> bytes:
    """Return encoded properties, which may have reserved names.
    Raises InvalidMessageError for those that recovery would treat as damage (format#verifies)."""
    encoded = without_place(encode_properties(properties))
    if wrong := unreadable_number(topic.encode(), encoded):
        raise InvalidMessageError(wrong, "properties")
    return encoded


class LogWriter:
    """Puts messages to a log.
    `flush_soon` wakes the flusher to sync at once. `check_open` raises if the store is closed. `dispatch` makes puts
    visible. `make_room` frees room for an application's put, or raises StoreFullError."""

    def __init__(
        self,
        parts: StoreParts,
        log: CommitLog,
        syncs: LogSyncs,
        *,
        flush_soon: Callable[[], None],
        check_open: Callable[[], None],
        dispatch: Callable[[], object],
        make_room: Callable[[int, Mapping[str, int]], None],
    ) -> None:
        self.failed_puts = 0
        self.latency = Histogram()
        """Durations of the sampled puts."""
        self._put_times: dict[QueueRef, list[int]] = {}
        """Nanoseconds and number of the sampled puts of each queue since the last `take_put_times`."""
        self._put_times_lock = Lock()
        self._queue_table = parts.queue_table
        self._segment_bytes = parts.log_files.segment_bytes
        self._store_host = encode_host(parts.config.store_host)
        self.log = log
        self.syncs = syncs
        self._flush_soon = flush_soon
        self._check_open = check_open
        self._dispatch = dispatch
        self._make_room = make_room
        self._max_message_size = parts.manifest.max_message_size
        self.max_body = min(self._max_message_size, log.max_record_bytes)
        self._max_chunk = min(self._max_message_size + ALLOWANCE, log.max_record_bytes)
        self._putters: dict[str, dict[int, ConsumeQueue]] = {}

    def put(self, topic: str, body: Body, queue_id: int = 0, **options: Unpack[PutOptions]) -> SendReceipt:
        """Append one message to a queue of `topic`. The first message creates the queue.

        Options: `tag`, `keys`, `properties`, `unique_key`, `message_group` (you choose the queue), `flag`, `durability`
        (`PutOptions`). With durability "flush" (here or of the store) the message is on disk when this returns. Raises
        InvalidMessageError and StoreFullError (nothing is written), FlushTimeoutError (stored, durability unknown),
        FlushFailedError, ReadOnlyStoreError and StoreClosedError. Raises StoreBusyError in a signal handler that
        interrupted a put in progress.
        """
        return self.put_record(topic, queue_id, body, self._checked(options) if options else _PLAIN)

    @_counts_failures
    def _checked(self, options: PutOptions) -> Prepared:
        durability = options.pop("durability", None)
        self.waits(durability)
        unknown = options.keys() - MessageOptions.__annotations__.keys()
        if unknown:
            raise no_such_option(unknown, PutOptions.__annotations__)
        flag = options.pop("flag", 0)
        check_integer(flag, 32, "flag")
        properties = encode_properties(user_properties(**options))  # type: ignore[misc]  # `flag` is taken out
        return Prepared(properties, options.get("unique_key"), Fields(flag), durability)

    def put_record(self, topic: str, queue_id: int, body: Body, prepared: Prepared = _PLAIN) -> SendReceipt:
        """Append one record: the only way from a put to the log. Every helper here would cost each put one more call.
        Raises the errors of `put`."""
        try:
            try:
                queue = self._putters[topic][queue_id]
            except (KeyError, TypeError):
                queue = self._putter(topic, queue_id)
            properties, key, fields, durability, asks, copied, latest = prepared
            if type(body) is not bytes:
                body = flat_body(body)
            size = len(body)
            if size > self.max_body and not copied:
                self.refuse_body(size)
            by_default = self.syncs.by_default
            waits = by_default if durability is None else self.waits(durability)
            tail = tail_of_bytes(queue.plain_tail, properties) if properties else queue.plain_tail
            if asks and not self.log.has_room(size + ALLOWANCE):
                self._make_room(size + ALLOWANCE, _UNCOUNTED)
            begin = None if queue.next_offset & 63 else time.perf_counter_ns()
            receipt = self.log.append(queue, body, tail, fields, key, latest)
            if waits:
                self.syncs.flush(receipt)
            elif by_default:
                self._flush_soon()
            if begin is not None:
                self._note_put(queue, time.perf_counter_ns() - begin)
            return receipt
        except Exception:
            self.failed_puts += 1
            raise

    def check_room(self, size: int, messages: Mapping[str, int] = _UNCOUNTED) -> None:
        """Ask for room before an application's bytes are appended, unless there is room. Raises StoreFullError.
        `messages` is the number of messages by topic. It may leave out a few. The engine's own records do not ask,
        since the reserve is for them."""
        size += ALLOWANCE + sum(messages.values()) * _ENTRY_BYTES
        if not self.log.has_room(size):
            self._make_room(size, messages)

    def _put_encoded(
        self, topic: str, queue_id: int, body: bytes, properties: bytes, key: str | None, *numbers: int
    ) -> SendReceipt:
        """Put the parts that a compiled sender has checked and encoded, but could not store.
        `numbers` are flag, system flag, and 1 to wait for the disk."""
        flag, sys_flag, waits = numbers
        durability: Durability = "flush" if waits else "append"
        return self.put_record(topic, queue_id, body, Prepared(properties, key, Fields(flag, sys_flag), durability))

    def sender(self, **more: object) -> Any:
        """Return the `_sender` of an object with a `compiled_put`, or None without compiled parts.
        `more` are the values that choose the queue, as `Router.put` does."""
        if kernel is None:
            return None
        return kernel.Sender(
            tip=self.log,
            putters=self._putters,
            finish=self._put_encoded,
            after=self._after_stored,
            note=self._note_put,
            reserved=REFUSED,
            max_body=self.max_body,
            flushes=self.syncs.by_default,
            **more,
        )

    def _note_put(self, queue: ConsumeQueue, took_ns: int) -> None:
        self.latency.add(took_ns)
        if self._put_times_lock.is_held_here:
            return  # a signal handler's put interrupted this call: the put is stored, and one sample is lost
        with self._put_times_lock:
            times = self._put_times.setdefault(queue.ref, [0, 0])
            times[0] += took_ns
            times[1] += 1

    def take_put_times(self) -> dict[QueueRef, list[int]]:
        """Return the durations of sampled puts since the last call: by queue [nanoseconds, puts]."""
        with self._put_times_lock:
            taken, self._put_times = self._put_times, {}
        return taken

    def outlet(self, topic: str, queue_id: int = 0, properties: Mapping[str, str] | None = None) -> AppendHandle:
        """Return an object for frequent puts with the same properties. Reserved names are allowed."""
        queue = self.queue_to_put(topic, queue_id)
        return AppendHandle(self, queue, tail_of_bytes(queue.plain_tail, _encoded(topic, properties or {})))

    def append(
        self,
        topic: str,
        queue_id: int,
        body: Body,
        *,
        properties: Mapping[str, str] | None = None,
        **options: Unpack[RecordOptions],
    ) -> SendReceipt:
        """Append a record with every field given (`RecordOptions`). Raises the errors of `put`.
        For the engine's own copies (delay, retry, half messages) and for imports. `properties` may have reserved
        names."""
        return self.put_record(topic, queue_id, body, self._prepared(topic, queue_id, properties or {}, options))

    @_counts_failures
    def _prepared(self, topic: str, queue_id: int, properties: Mapping[str, str], options: RecordOptions) -> Prepared:
        self.queue_to_put(topic, queue_id)  # raises the errors of a bad name first
        copied, durability = options.pop("copied", False), options.pop("durability", None)
        self.waits(durability)
        host, latest = options.pop("born_host", None), options.pop("latest", None)
        fields = Fields(**options)  # type: ignore[arg-type, misc]  # other options were popped
        if host is not None:
            fields = fields._replace(born_host=encode_host(host))
        if fields != ORDINARY:
            for name, bits in _FIELD_BITS.items():
                check_integer(getattr(fields, name), bits, name)
            check_integer(fields.born_timestamp_ms or 0, 64, "born_timestamp_ms")
            if fields.sys_flag & INNER_BATCH:
                raise InvalidMessageError("sys_flag marks a batch in one record, which no queue would list", "sys_flag")
        return Prepared(
            _encoded(topic, properties), properties.get(UNIQ_KEY), fields, durability, False, copied, latest
        )

    @_counts_failures
    def put_many(
        self,
        topic: str,
        bodies: Iterable[Body | OutgoingMessage],
        queue_id: int = 0,
        *,
        durability: Durability | None = None,
    ) -> SendReceipts:
        """Append many messages with one flush wait. Raises the errors of `put`.
        They are contiguous and become visible together, in chunks of about `max_message_size` bytes. All are checked
        before the first is written. A kill may leave the first messages of a chunk without the others."""
        queue = self.queue_to_put(topic, queue_id)
        waits = self.waits(durability)
        items = list(bodies)  # a copy, since another thread may change the caller's
        tails: list[bytes] | bytes = queue.plain_tail
        flags: list[int] | int = 0
        unique: dict[int, str] = {}
        sizes = lengths_of(items)
        if sizes is not None:
            flat = cast(list[bytes], items)
        else:
            flat, tails, flags = [], [], []
            while (at := len(flat)) < len(items):
                if kernel is not None and kernel.message_parts(
                    items, at, topic, queue.plain_tail, SLOTS, REFUSED, flat, tails, flags, unique
                ):
                    continue  # compiled code has handled some ordinary ones
                item, tail, flag = items[at], queue.plain_tail, 0
                if isinstance(item, OutgoingMessage):
                    refuse_routing(item, topic)
                    check_integer(item.flag, 32, "flag")
                    properties = user_properties(item.tag, item.keys, item.properties, item.unique_key)
                    tail = tail_of_bytes(tail, encode_properties(properties))
                    flag = item.flag
                    if item.unique_key is not None:
                        unique[at] = item.unique_key
                    item = item.body
                flat.append(flat_body(item))
                tails.append(tail)
                flags.append(flag)
            sizes = lengths_of(flat)
            assert sizes is not None, "bodies are plain bytes here"
        return self._put_flat(queue, flat, sizes, tails, flags, unique, waits)

    def put_packed(self, topic: str, data: bytes, queue_id: int) -> bytes | None:
        """Do a `put_many` in one compiled call, with packed messages and receipts (`remoting/short.py`).
        None: nothing was written, and `put_many` must do it. It also waits for the disk, and refuses bad input."""
        queue = self.queue_to_put(topic, queue_id)
        return None if kernel is None else self.log.put_packed(queue, data, self.max_body)

    def copy_many(self, copies: Sequence[Copy], attempts: int = 0) -> int:
        """Append the first of `copies`, as many as fit one batch. Return their number, at least one.

        `attempts` is added to the `reconsume_times` of each. They are contiguous and become visible together. None is
        stored if this raises. Does not wait for the disk. Raises the errors of `append` and `Message._whole`, for the
        first copy. A fault of a later copy is raised when that copy is the first.
        """
        room = self._max_chunk
        overhead = self.log.header_bytes
        queues: list[ConsumeQueue] = []
        heads: list[bytes] = []
        bodies: list[bytes] = []
        tails: list[bytes] = []
        while (at := len(heads)) < len(copies):
            if kernel is not None and type(copies) is list:
                # Compiled code handles ordinary copies to queues that were put to before.
                count, room = kernel.copy_parts(copies, at, self._putters, overhead, room, queues, heads, bodies, tails)
                if count:
                    continue
            message, topic, queue_id, properties = copies[at]
            try:
                queue = self.queue_to_put(topic, queue_id)
                parts = message._whole()._plain_parts()
                if parts is None:
                    break
                head, body = parts
                tail = self._copied_tail(queue, properties)
            except (InvalidMessageError, FormatError):
                if heads:
                    break
                raise
            room -= overhead + len(body) + len(tail)
            if room < 0 and heads:
                break
            queues.append(queue)
            heads.append(head)
            bodies.append(body)
            tails.append(tail)
        if not heads:
            self._copy_one(copies[0], attempts)
            return 1
        self.log.append_copies(queues, heads, bodies, tails, attempts)
        self.after_put(None)
        return len(heads)

    def _copied_tail(self, queue: ConsumeQueue, properties: bytes) -> bytes:
        if len(properties) > MAX_PROPERTIES_BYTES:
            raise InvalidMessageError(
                f"properties take {len(properties)} bytes, the limit is {MAX_PROPERTIES_BYTES}", "properties"
            )
        if properties.find(_INNER) >= 0 or queue.topic == SCHEDULE_TOPIC:
            wrong = unreadable_number(queue.topic.encode(), properties)
            if wrong:
                raise InvalidMessageError(wrong, "properties")
        return tail_of_bytes(queue.plain_tail, properties)

    def _copy_one(self, copy: Copy, attempts: int) -> None:
        """Append one copy by `append`, which supports every kind of record."""
        message, topic, queue_id, properties = copy
        message = message._whole()
        fields: RecordOptions = {**fields_of(message), "durability": "append", "copied": True}
        fields["reconsume_times"] += attempts
        self.append(topic, queue_id, message.body_view, properties=decode_properties(properties), **fields)

    def _put_flat(
        self,
        queue: ConsumeQueue,
        bodies: list[bytes],
        sizes: tuple[int, int],
        tails: list[bytes] | bytes,
        flags: list[int] | int,
        unique: dict[int, str],
        waits: bool,
    ) -> SendReceipts:
        """Append encoded parts, in as few chunks as the limits allow. `sizes` are the `lengths_of` the bodies."""
        receipts = SendReceipts(queue.ref, self._store_host, unique)
        if not bodies:
            return receipts
        longest, body_bytes = sizes
        if longest > self.max_body:
            self.refuse_body(longest)
        overhead = self.log.header_bytes + (len(tails) if isinstance(tails, bytes) else max(map(len, tails)))
        # Most batches fit in one chunk. Only count bytes one by one if the cheap bound shows that this one may not.
        cuts = [0, len(bodies)]
        if (longest + overhead) * len(bodies) > self._max_chunk:
            cuts = self._cuts(bodies, tails)
        try:
            for start, stop in pairwise(cuts):
                count = stop - start
                self.check_room(min((longest + overhead) * count, self._max_chunk), {queue.topic: count})
                receipts.add(
                    *self.log.append_many(
                        queue,
                        bodies if stop - start == len(bodies) else bodies[start:stop],
                        tails if isinstance(tails, bytes) else tails[start:stop],
                        flags if isinstance(flags, int) else flags[start:stop],
                        body_bytes if stop - start == len(bodies) else sum(map(len, bodies[start:stop])),
                    )
                )
        except MQStoreError as error:
            error.receipts = receipts
            raise
        self.after_put(receipts[-1] if waits else None)
        if len(cuts) > 2:  # otherwise the first reader of a large batch would have to dispatch it, for milliseconds
            self._dispatch()
        return receipts

    def _cuts(self, bodies: list[bytes], tails: list[bytes] | bytes) -> list[int]:
        """Return indices that cut a batch into chunks of at most `_max_chunk` bytes each."""
        count = len(bodies)
        sizes = np.fromiter(map(len, bodies), np.int64, count) + self.log.header_bytes
        sizes += len(tails) if isinstance(tails, bytes) else np.fromiter(map(len, tails), np.int64, count)
        if (largest := int(sizes.max())) > self.log.max_record_bytes:
            self._refuse_record(largest)
        ends = np.cumsum(sizes)
        cuts = [0]
        while (start := cuts[-1]) < count:
            before = int(ends[start - 1]) if start else 0
            cuts.append(max(start + 1, int(np.searchsorted(ends, before + self._max_chunk, "right"))))
        return cuts

    def queue_to_put(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Return the queue. A new one is created. Raises InvalidMessageError for a bad name or id."""
        try:
            return self._putters[topic][queue_id]
        except (KeyError, TypeError):
            return self._putter(topic, queue_id)

    def _putter(self, topic: str, queue_id: int) -> ConsumeQueue:
        self._check_open()
        check_topic(topic)
        queue = self.queue_to_splice(topic, queue_id)
        self._putters.setdefault(topic, {})[queue_id] = queue
        return queue

    def queue_to_splice(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Return the queue for checked records. A new one is created.
        The records may be restored ones of a topic whose name a Java broker allows, but no put."""
        name = topic.encode()
        if topic in self._queue_table.batch_topics:
            raise InvalidMessageError(
                f"topic {topic!r} has batch queues, which only RocketMQ writes. Put to another topic", "topic"
            )
        if type(queue_id) is not int or not 0 <= queue_id <= MAX_QUEUE_ID:
            raise InvalidMessageError(f"queue_id must be 0..{MAX_QUEUE_ID}, got {queue_id!r}", "queue_id")
        queue = self._queue_table.create(topic, queue_id)
        v1 = len(name) <= MAX_TOPIC_BYTES_V1
        queue.magic = MAGIC_V1 if v1 else MAGIC_V2
        queue.plain_tail = len(name).to_bytes(1 if v1 else 2, "big") + name + b"\0\0"
        return queue

    def refuse_body(self, size: int) -> None:
        limit = self._max_message_size
        if size > limit:
            raise InvalidMessageError(f"the body has {size} bytes; max_message_size is {limit}", "body")
        self._refuse_record(size)

    def _refuse_record(self, size: int) -> None:
        raise InvalidMessageError(
            f"a record of {size} bytes or more does not fit a segment of {self._segment_bytes} "
            f"with its end mark of {BLANK_BYTES}. Create the store with larger segment_bytes",
            "body",
        )

    def waits(self, durability: Durability | None) -> bool:
        return waits_for_disk(durability, self.syncs.by_default)

    def after_put(self, awaited: SendReceipt | None) -> None:
        """Wait until `awaited` is on disk, or wake the flusher."""
        if awaited is not None:
            self.syncs.flush(awaited)
        elif self.syncs.by_default:
            self._flush_soon()

    _after_stored = _counts_failures(after_put)
    """`after_put` for compiled code, which has stored the message."""
