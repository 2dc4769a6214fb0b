"""Putting: from what a caller gives to a record in the log, and to the disk if asked (store-format 2.7, 8.1, 10.6).

    put        one message, the hot path: look up the queue, check, append, count
    put_many   many to one queue, encoded together
    append     one record with every field given, for the engine's own copies and for imports

Checks come before anything is written; a put with durability "flush" syncs in its own thread, or waits for the thread
that is already doing it for all.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from mqstore.errors import ConfigError, FlushFailedError, FlushTimeoutError, InvalidMessageError, ReadOnlyStoreError
from mqstore.files.flusher import GroupCommit
from mqstore.layout.batch import decode_batch
from mqstore.layout.hosts import encode_host
from mqstore.layout.properties import UNIQ_KEY
from mqstore.log.commitlog import ALLOWANCE, BLANK_BYTES, CommitLog, SendReceipt
from mqstore.log.consumequeue import ConsumeQueue
from mqstore.log.names import check_topic
from mqstore.log.outgoing import (
    Body,
    OutgoingMessage,
    check_integer,
    flat_body,
    tail_of,
    tail_of_bytes,
    user_properties,
)
from mqstore.log.reader import StoreReader
from mqstore.log.stats import Histogram
from mqstore.options import Durability, StoreConfig, seconds

__all__ = ["MAX_QUEUE_ID", "StoreWriter"]

MAX_QUEUE_ID = 16_383


class StoreWriter(StoreReader):
    """The putting half of `MessageStore`."""

    config: StoreConfig
    durability: Durability
    _log: CommitLog
    _commit: GroupCommit
    _store_host: bytes

    def _init_writer(self) -> None:
        self._put_latency = Histogram()
        self._flush_latency = Histogram()
        self._flush_by_default = self.durability == "flush"
        self._flush_timeout_s = seconds(self.config.flush_timeout, "flush_timeout")
        self._max_body = min(self.config.max_message_size, self._log.max_record_bytes)
        self._putters: dict[tuple[str, int], ConsumeQueue] = {}

    def _flushed(self) -> None:
        """Called after a put has waited for its sync: what it synced may be visible now."""
        raise NotImplementedError

    # -- putting ----------------------------------------------------------------------------------------------------

    def put(
        self,
        topic: str,
        body: Body,
        queue_id: int = 0,
        *,
        tag: str | None = None,
        keys: str | Iterable[str] | None = None,
        properties: Mapping[str, str] | None = None,
        unique_key: str | None = None,
        flag: int = 0,
        durability: Durability | None = None,
    ) -> SendReceipt:
        """Append one message to a queue of `topic`, which comes into being with its first message.

        With durability "flush" (here or of the store) it is on disk when this returns. Raises InvalidMessageError
        (nothing written), StoreFullError (likewise), FlushTimeoutError (stored, durability unknown), FlushFailedError,
        ReadOnlyStoreError, StoreClosedError.
        """
        sample = not self._log.puts & 31
        if sample:
            begin = time.perf_counter_ns()
        queue = self._putters.get((topic, queue_id)) or self._putter(topic, queue_id)
        if type(body) is not bytes:
            body = flat_body(body)
        if len(body) > self._max_body:
            self._refuse_body(len(body))
        if tag is None and keys is None and properties is None and unique_key is None:
            tail = queue.plain_tail
        else:
            tail = tail_of(queue.plain_tail, user_properties(tag, keys, properties, unique_key))
        receipt = self._log.append(queue, body, tail, flag, 0, None, None, 0, 0, len(topic) > 127, unique_key)
        if durability == "flush" or (durability is None and self._flush_by_default):
            self._wait_flushed(receipt[3] + receipt[4], receipt)
        elif durability is not None and durability != "append":
            raise ConfigError(f"durability must be 'append' or 'flush', not {durability!r}")
        if sample:
            self._put_latency.add(time.perf_counter_ns() - begin)
        return receipt

    def append(
        self,
        topic: str,
        queue_id: int,
        body: Body,
        *,
        properties: Mapping[str, str] | None = None,
        flag: int = 0,
        sys_flag: int = 0,
        born_timestamp_ms: int | None = None,
        born_host: str | None = None,
        reconsume_times: int = 0,
        prepared_transaction_offset: int = 0,
        durability: Durability | None = None,
    ) -> SendReceipt:
        """Append a record with every field given: for copies that an engine makes (delay, retry, half messages) and for
        imports. `properties` may bear reserved names; compression and transaction bits of `sys_flag` are the caller's.
        Errors as of `put`."""
        queue = self._putters.get((topic, queue_id)) or self._putter(topic, queue_id)
        body = flat_body(body)
        if len(body) > self._max_body:
            self._refuse_body(len(body))
        properties = properties or {}
        tail = tail_of(queue.plain_tail, properties)
        host = None if born_host is None else encode_host(born_host)
        for name, value, bits in (
            ("flag", flag, 32),
            ("sys_flag", sys_flag, 32),
            ("reconsume_times", reconsume_times, 32),
            ("prepared_transaction_offset", prepared_transaction_offset, 64),
            ("born_timestamp_ms", born_timestamp_ms or 0, 64),
        ):
            check_integer(value, bits, name)
        receipt = self._log.append(
            queue,
            body,
            tail,
            flag,
            sys_flag & ~0x30,
            born_timestamp_ms,
            host,
            reconsume_times,
            prepared_transaction_offset,
            len(queue.topic) > 127,
            properties.get(UNIQ_KEY),
        )
        if self._waits(durability):
            self._wait_flushed(receipt.physical_offset + receipt.size, receipt)
        return receipt

    def put_many(
        self,
        topic: str,
        bodies: Iterable[Body | OutgoingMessage],
        queue_id: int = 0,
        *,
        durability: Durability | None = None,
    ) -> list[SendReceipt]:
        """Append many messages with one flush wait. They lie together, and become visible together, in chunks of about
        `max_message_size` bytes; all are checked before the first is written. Errors as of `put`."""
        queue = self._putters.get((topic, queue_id)) or self._putter(topic, queue_id)
        waits = self._waits(durability)
        flat: list[bytes] = []
        tails: list[bytes] | bytes = queue.plain_tail
        flags: list[int] | int = 0
        unique: dict[int, str] = {}
        for item in bodies:
            if type(item) is bytes:
                flat.append(item)
                if type(tails) is list:
                    tails.append(queue.plain_tail)
            elif isinstance(item, OutgoingMessage):
                if type(tails) is not list:
                    tails = [queue.plain_tail] * len(flat)
                properties = user_properties(item.tag, item.keys, item.properties, item.unique_key)
                tails.append(tail_of(queue.plain_tail, properties))
                if item.flag:
                    check_integer(item.flag, 32, "flag")
                    if type(flags) is not list:
                        flags = []
                    flags += [0] * (len(flat) - len(flags))
                    flags.append(item.flag)
                if item.unique_key is not None:
                    unique[len(flat)] = item.unique_key
                flat.append(flat_body(item.body))
            else:
                flat.append(flat_body(item))
                if type(tails) is list:
                    tails.append(queue.plain_tail)
        if type(flags) is list:
            flags += [0] * (len(flat) - len(flags))
        if not flat:
            return []
        longest = max(map(len, flat))
        if longest > self._max_body:
            self._refuse_body(longest)
        header = 80 + len(self._store_host)
        sizes = [header + len(body) for body in flat]
        if type(tails) is list:
            sizes = [size + len(tail) for size, tail in zip(sizes, tails, strict=True)]
        else:
            sizes = [size + len(tails) for size in sizes]
        room = min(max(self.config.max_message_size, 1) + ALLOWANCE, self._log.max_record_bytes)
        if max(sizes) > self._log.max_record_bytes:
            self._refuse_record(max(sizes))
        receipts: list[SendReceipt] = []
        start = 0
        while start < len(flat):
            stop, total = start, 0
            while stop < len(flat) and (total + sizes[stop] <= room or stop == start):
                total += sizes[stop]
                stop += 1
            offset, position, written, now = self._log.append_many(
                queue,
                flat[start:stop],
                tails[start:stop] if type(tails) is list else tails,
                flags[start:stop] if type(flags) is list else flags,
                None,
                len(queue.topic) > 127,
            )
            name, host = queue.topic, self._store_host
            for i, size in enumerate(written):
                receipts.append(
                    tuple.__new__(
                        SendReceipt, (name, queue_id, offset + i, position, size, now, host, unique.get(start + i))
                    )
                )
                position += size
            start = stop
        if waits:
            last = receipts[-1]
            self._wait_flushed(last.physical_offset + last.size, last)
        return receipts

    def put_batch(
        self, topic: str, wire: bytes, queue_id: int = 0, *, durability: Durability | None = None
    ) -> list[SendReceipt]:
        """Append a batch in the producers' wire form (store-format 2.9), all or nothing. Raises FormatError when it is
        malformed, InvalidMessageError when its records together do not fit a segment."""
        queue = self._putters.get((topic, queue_id)) or self._putter(topic, queue_id)
        elements = decode_batch(wire)
        if not elements:
            return []
        bodies = [element.body for element in elements]
        tails = [tail_of_bytes(queue.plain_tail, element.properties) for element in elements]
        header = 80 + len(self._store_host)
        total = sum(map(len, bodies)) + sum(map(len, tails)) + header * len(bodies)
        if total > self._log.max_record_bytes:
            self._refuse_record(total)
        if max(map(len, bodies)) > self._max_body:
            self._refuse_body(max(map(len, bodies)))
        offset, position, written, now = self._log.append_many(
            queue, bodies, tails, [element.flag for element in elements], None, len(queue.topic) > 127
        )
        receipts = []
        for i, size in enumerate(written):
            receipts.append(SendReceipt(topic, queue_id, offset + i, position, size, now, self._store_host, None))
            position += size
        if self._waits(durability):
            self._wait_flushed(position, receipts[-1])
        return receipts

    def _putter(self, topic: str, queue_id: int) -> ConsumeQueue:
        """The queue to put to, after every check of its name."""
        self._check_open()
        if self.mode == "r":
            raise ReadOnlyStoreError(f"{self.path} was opened for reading; open it with mode='rw' to put")
        name = check_topic(topic)
        if type(queue_id) is not int or not 0 <= queue_id <= MAX_QUEUE_ID:
            raise InvalidMessageError(f"queue_id {queue_id!r} does not lie in 0..{MAX_QUEUE_ID}", "queue_id")
        queue = self._queues.create(topic, queue_id)
        queue.plain_tail = len(name).to_bytes(1 if len(name) <= 127 else 2, "big") + name + b"\0\0"
        self._putters[topic, queue_id] = queue
        return queue

    def _refuse_body(self, size: int) -> None:
        limit = self.config.max_message_size
        if size > limit:
            raise InvalidMessageError(f"the body has {size} bytes; max_message_size is {limit}", "body")
        self._refuse_record(size)

    def _refuse_record(self, size: int) -> None:
        raise InvalidMessageError(
            f"a record of {size} bytes or more does not fit a segment of {self._run.segment_bytes} "
            f"with its end mark of {BLANK_BYTES}; create the store with larger segment_bytes",
            "body",
        )

    def _waits(self, durability: Durability | None) -> bool:
        if durability not in (None, "append", "flush"):
            raise ConfigError(f"durability must be 'append' or 'flush', not {durability!r}")
        return durability == "flush" or (durability is None and self._flush_by_default)

    # -- durability -------------------------------------------------------------------------------------------------

    def _visible_end(self) -> int:
        """Readers see messages below this: in a store with durability "flush" only what a crash cannot take back."""
        return self._commit.flushed if self._flush_by_default else self._log.end

    def _sync(self, flushed: int) -> int:
        """Make everything appended so far durable; the group commit calls it, one thread at a time."""
        begin = time.perf_counter_ns()
        end = self._log.end
        try:
            self._run.sync(flushed, end)
        except Exception as error:
            self._log.poison(
                FlushFailedError(f"a sync of {self.path} failed ({error}); close the store and open it again")
            )
            raise
        self._flush_latency.add(time.perf_counter_ns() - begin)
        return end

    def _wait_flushed(self, position: int, receipt: SendReceipt | None) -> None:
        if not self._commit.wait_until(position, self._flush_timeout_s):
            raise FlushTimeoutError(
                f"stored, but not known to be on disk after {self._flush_timeout_s} s (flush_timeout)", receipt
            )
        self._flushed()

    def flush(self) -> None:
        """Return once everything put before is on disk. Raises FlushFailedError, FlushTimeoutError."""
        self._check_writable()
        if self._log.end > self._commit.flushed:
            self._wait_flushed(self._log.end, None)

    def _check_writable(self) -> None:
        self._check_open()
        if self.mode == "r":
            raise ReadOnlyStoreError(f"{self.path} was opened for reading; open it with mode='rw'")
