"""Tables of open and recently ended half messages, and the log of ended ones (delivery#transactions)."""

from __future__ import annotations

from collections import OrderedDict, deque
from heapq import nsmallest
from typing import Final, Literal, NamedTuple

from mqstore.broker.background.context import Parts, messages_of
from mqstore.broker.delay.route import number
from mqstore.broker.tables.names import OP_TOPIC
from mqstore.errors import InvalidMessageError
from mqstore.layout.properties import TAGS
from mqstore.log.commitlog import SendReceipt
from mqstore.log.message import Message
from mqstore.log.writing.writer import AppendHandle
from mqstore.signalsafe import Lock

CHECK_AFTER_MS: Final = 6_000
CHECK_EVERY_MS: Final = 30_000
_ENDED_KEPT: Final = 20_000
"""Number of ended transactions to remember.
They distinguish a repeated answer from a contradiction."""

Ended = Literal["commit", "rollback", "discard"]


class TransactionHandle(NamedTuple):
    """Open transaction. Valid as long as its half message exists, even after restarts."""

    transaction_id: str
    topic: str
    """Topic to which a commit puts the message."""
    producer_group: str
    offset: int
    """Queue offset of the half message."""
    physical_offset: int


class PreparedMessage:
    """One half message. `lock` is held while it ends, so that it ends only once."""

    __slots__ = ("checks", "ended", "handle", "immunity_ms", "lock", "next_ms", "receipt", "recovered", "stored_ms")

    def __init__(self, handle: TransactionHandle, stored_ms: int, immunity: str | None, *, recovered: bool) -> None:
        self.handle = handle
        self.stored_ms = stored_ms
        self.immunity_ms = _immunity_ms(immunity)
        """Time in ms before its producer is asked. None if the message does not name one."""
        self.next_ms = self.first_ms
        self.checks = 0
        self.recovered = recovered
        """True if an earlier process may have committed it."""
        self.ended: Ended | None = None
        self.receipt: SendReceipt | None = None
        self.lock = Lock()

    @property
    def first_ms(self) -> int:
        return self.stored_ms + (self.immunity_ms or CHECK_AFTER_MS)


class PreparedMessages:
    """Table of half messages. Thread-safe. No other lock is taken under its lock."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._open: dict[int, PreparedMessage] = {}
        """Open halves by queue offset."""
        self._by_id: dict[str, PreparedMessage] = {}
        self._beginning: dict[str, int] = {}
        """Lowest possible offset, by id, of each half that is being put."""
        self._ended: OrderedDict[str, PreparedMessage] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def announce(self, identity: str, offset: int) -> None:
        """Keep the committed offset at or below a half that is about to be put at `offset` or later.
        Raises InvalidMessageError for an id that is open."""
        with self._lock:
            if identity in self._by_id or identity in self._beginning:
                raise InvalidMessageError(
                    f"transaction {identity!r} is open; a unique key names one message", "unique_key"
                )
            self._beginning[identity] = offset

    def enter(self, identity: str, half: PreparedMessage | None) -> None:
        """Add an announced half. None: it was not put."""
        with self._lock:
            del self._beginning[identity]
            if half is not None:
                self._ended.pop(identity, None)
                self._by_id[identity] = self._open[half.handle.offset] = half

    def recover(self, half: PreparedMessage) -> None:
        """Add a half that an earlier process put."""
        self._by_id[half.handle.transaction_id] = self._open[half.handle.offset] = half

    def end(self, half: PreparedMessage, outcome: Ended) -> None:
        identity = half.handle.transaction_id
        with self._lock:
            half.ended = outcome
            self._open.pop(half.handle.offset, None)
            if self._by_id.get(identity) is half:
                del self._by_id[identity]
            self._ended[identity] = half
            while len(self._ended) > _ENDED_KEPT:
                self._ended.popitem(last=False)

    def find(self, transaction: TransactionHandle | str) -> PreparedMessage:
        """Return the half of a transaction, open or ended. Raises InvalidMessageError for an unknown one."""
        identity = transaction if isinstance(transaction, str) else transaction.transaction_id
        with self._lock:
            half = None if isinstance(transaction, str) else self._open.get(transaction.offset)
            half = half or self._by_id.get(identity) or self._ended.get(identity)
        if half is None or (not isinstance(transaction, str) and half.handle != transaction):
            raise InvalidMessageError(f"unknown transaction {identity[:150]!r}", "transaction_id")
        return half

    def open_id(self, transaction_id: str) -> TransactionHandle | None:
        half = self._by_id.get(transaction_id)
        return None if half is None else half.handle

    def handles(self) -> list[TransactionHandle]:
        with self._lock:
            return [self._open[offset].handle for offset in sorted(self._open)]

    def oldest(self) -> PreparedMessage | None:
        """Return the open half with the lowest offset, or None."""
        with self._lock:
            return self._open[min(self._open)] if self._open else None

    def first_needed(self, end: int) -> int:
        """Return the offset of the first half that is open or being put, or `end` without one.
        Read `end` before this call, so that later halves are after it."""
        with self._lock:
            return min(end, min(self._open, default=end), min(self._beginning.values(), default=end))

    def due(self, now_ms: int, count: int) -> list[PreparedMessage]:
        """Return up to `count` open halves that are due for a check, the longest due first."""
        with self._lock:
            late = (half for half in self._open.values() if half.next_ms <= now_ms)
            return nsmallest(count, late, key=lambda half: (half.next_ms, half.handle.offset))

    def next_ms(self) -> int | None:
        """Return the time at which the next half is due for a check, or None."""
        with self._lock:
            return min((half.next_ms for half in self._open.values()), default=None)

    def ask_again(self, producer_group: str | None) -> None:
        """Make checks due that waited for a callback of this producer group. None: of any group."""
        with self._lock:
            for half in self._open.values():
                waits = producer_group is None or half.handle.producer_group == producer_group
                if waits and not half.checks and half.next_ms > half.first_ms:
                    half.next_ms = half.first_ms

    def clock_set_back(self, now_ms: int) -> None:
        """Move check times back after the wall clock was set back, so that none has to wait for its old time."""
        with self._lock:
            for half in self._open.values():
                if half.next_ms > now_ms + CHECK_EVERY_MS and now_ms < half.stored_ms:
                    half.next_ms = now_ms
                elif half.next_ms > now_ms + CHECK_EVERY_MS + (half.immunity_ms or 0):
                    half.next_ms = now_ms + CHECK_EVERY_MS


def _immunity_ms(text: str | None) -> int | None:
    """Return a message's immunity in ms, at least 6 s, or None without a valid one."""
    wanted = number(text)
    return None if wanted is None or wanted < 0 else max(wanted * 1000, CHECK_AFTER_MS)


OP_EVERY_MS: Final = 3_000
OP_BYTES: Final = 4_096
_QUEUE: Final = 0


class OpLog:
    """Collected ops, and written ones that are still needed. Thread-safe.
    An op is a record of half messages that have ended.

    op         RMQ_SYS_TRANS_OP_HALF_TOPIC, queue 0, tag d, body "12,15," = queue offsets of halves that are done

    add ---> collected, for 3 s or until they take 4096 bytes ---> written as one op ---> needed, until all halves
    write_now ---> written alone                                                   /     before its largest one are done
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._bytes_max = min(OP_BYTES, parts.store.manifest.commitlog_segment_bytes // 2)
        self._writing = Lock()
        """Lock for a whole write, taken before `_lock`."""
        self._outlet: AppendHandle | None = None
        self._lock = Lock()
        self._gathered: list[int] = []
        self._gathered_bytes = 0
        self._gathered_ms = 0
        self._written: deque[tuple[int, int]] = deque()
        """Queue offset of each op, and the largest half in it."""
        self._end = 0

    def load(self, first: int, end: int) -> set[int]:
        """Read the ops in [first, end) of their queue. Return the queue offsets of the halves that they name."""
        done: set[int] = set()
        for message in messages_of(self._parts.store, OP_TOPIC, first, end):
            halves = _halves_of(message)
            done.update(halves)
            self._written.append((message.offset, max(halves, default=-1)))
        self._end = end
        return done

    @property
    def due_ms(self) -> int | None:
        """Time at which the collected ops must be written (wall clock). None without any."""
        with self._lock:
            return self._gathered_ms + OP_EVERY_MS if self._gathered else None

    def add(self, half: int) -> bool:
        """Collect the queue offset of a half that has ended. Return True if an op is full, to be written now."""
        with self._lock:
            if not self._gathered:
                self._gathered_ms = self._parts.clock.now_ms()
            self._gathered.append(half)
            self._gathered_bytes += len(str(half)) + 1
            return self._gathered_bytes > self._bytes_max

    def write(self) -> None:
        """Put the collected ops into the op topic. After an error of a put, unwritten ops stay collected."""
        with self._writing:
            while self._gathered:
                with self._lock:
                    count, size = 0, 0
                    while count < len(self._gathered) and size <= self._bytes_max:
                        size += len(str(self._gathered[count])) + 1
                        count += 1
                    halves = self._gathered[:count]
                self._put(halves)
                with self._lock:
                    del self._gathered[:count]
                    self._gathered_bytes -= size

    def write_now(self, half: int) -> None:
        """Put an op for one half. Raises the errors of a put, and then stores no op."""
        with self._writing:
            self._put([half])

    def _put(self, halves: list[int]) -> None:
        """Put one op. Call under `_writing`."""
        if self._outlet is None:
            self._parts.topics.ensure(OP_TOPIC, 1)
            self._outlet = self._parts.store._outlet(OP_TOPIC, _QUEUE, {TAGS: "d"})
        receipt = self._outlet.put("".join(f"{half}," for half in halves).encode(), "append")
        with self._lock:
            self._written.append((receipt.offset, max(halves)))
            self._end = receipt.offset + 1

    def needed_from(self, half_done: int) -> int:
        """Return the queue offset of the first op still needed if all halves before `half_done` are done."""
        with self._lock:
            while self._written and self._written[0][1] < half_done:
                self._written.popleft()
            return self._written[0][0] if self._written else self._end


def _halves_of(op: Message) -> list[int]:
    """Return the half offsets in an op. Other content of its body is ignored."""
    return [
        int(piece) for piece in op.body.decode("ascii", "replace").split(",") if piece.isascii() and piece.isdigit()
    ]
