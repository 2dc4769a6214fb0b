"""Transactions: messages that become visible at their commit (delivery#transactions).
The clients' side is in clients#transaction.

    begin      half message -> RMQ_SYS_TRANS_HALF_TOPIC, queue 0          REAL_TOPIC, REAL_QID, PGROUP, TRAN_MSG,
                                                                          __transactionId__ = UNIQ_KEY
    commit     copy -> the real topic and queue, type COMMIT, prepared_transaction_offset = the half's; then an op
    rollback   an op, written before `end` returns
    op         record of ended halves (`OpLog`). Those of commits are collected

    open --commit, rollback--> ended          the same end again has the same result; another: TransactionStateError
      |  ^
      |  +- unknown, an exception, or no callback
      +--- after 6 s (or the message's immunity), then every 30 s: its producer's group is asked
      +--- asked 15 times, or older than retention keeps: copied to TRANS_CHECK_MAX_TIME_TOPIC, done

The two topics are the state. At open the table is built from them: the halves after one committed offset
(`CID_RMQ_SYS_TRANS`) that are in no op after the other. Both offsets pass only ended halves. After a crash:

    lost with the process           then
    an op of a commit               the commit's copy is found by its key and its half's address: not committed twice
    the count of checks             starts at 0, because another producer gave no answer; age still ends it

Half messages are not routed. A timer takes effect at the commit, and a delay level is refused. Times are those of the
store's clock, because producers' clocks differ. Callbacks run in the thread of `run_once`, outside all locks. A slow
producer answers None and calls `end` later. Lock order: one half's lock, then the table's or those of the ops.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from typing import Final, Literal, cast

from mqstore.broker.background.context import Parts, messages_of
from mqstore.broker.background.service import BackgroundService, Pin, Wake
from mqstore.broker.delay.route import number
from mqstore.broker.routing.selection import RoundRobin
from mqstore.broker.routing.uniquekey import new_unique_key
from mqstore.broker.tables.names import HALF_TOPIC, OP_TOPIC, TIMER_TOPIC, TRANS_CHECK_TOPIC, TRANS_GROUP, QueueKey
from mqstore.broker.tables.topics import check_queue
from mqstore.broker.transactions.prepared import (
    CHECK_EVERY_MS,
    OP_EVERY_MS,
    Ended,
    OpLog,
    PreparedMessage,
    PreparedMessages,
    TransactionHandle,
)
from mqstore.errors import ConfigError, FlushTimeoutError, InvalidMessageError, MQStoreError, TransactionStateError
from mqstore.layout.properties import (
    CHECK_IMMUNITY_TIME_IN_SECONDS,
    CRC_TAIL_BYTES,
    DELAY,
    MAX_PROPERTIES_BYTES,
    PGROUP,
    REAL_QID,
    REAL_TOPIC,
    TIMER_OUT_MS,
    TRAN_MSG,
    TRAN_PREPARED_QUEUE_OFFSET,
    TRANSACTION_CHECK_TIMES,
    TRANSACTION_ID,
    UNIQ_KEY,
    WAIT,
    encode_properties,
)
from mqstore.layout.record import TRANSACTION_COMMIT, TRANSACTION_MASK
from mqstore.log.commitlog import SendReceipt
from mqstore.log.message import Message
from mqstore.log.writing.outgoing import Body, flat_body, user_properties
from mqstore.log.writing.writer import RecordOptions, fields_of
from mqstore.logger import log as _log
from mqstore.options import Durability, Duration, Retention, milliseconds, seconds
from mqstore.signalsafe import Lock

__all__ = ["NOT_ASKED", "NobodyAsked", "Outcome", "TransactionHandle", "Transactions"]

_IMMUNITY_MAX_S: Final = 366 * 86_400
_RETURN_MS: Final = 600_000
"""Number of ms after opening in which producers may return for a check."""
CHECKS_MAX: Final = 15
_CHECKS_A_RUN: Final = 32
"""Number of callbacks before other services get their turn."""
_QUEUE: Final = 0

Outcome = Literal["commit", "rollback", "unknown"]


class NobodyAsked(Enum):
    """Answer of a check callback without a producer to ask. The check then does not count."""

    NOT_ASKED = "not asked"


NOT_ASKED: Final = NobodyAsked.NOT_ASKED
CheckCallback = Callable[[Message], bool | NobodyAsked | None]


class Transactions(BackgroundService):
    """Transactions of a store: begin, end, check.

    The class is long because all three change one table of open halves, which is in `halves`.

    >>> import mqstore, tempfile
    >>> from mqstore.log.store import MessageStore
    >>> from mqstore.broker.background.context import open_parts
    >>> with tempfile.TemporaryDirectory() as folder, MessageStore(folder) as store:
    ...     transactions = Transactions(open_parts(store), lambda: None)
    ...     paid = transactions.begin("orders", b"paid", producer_group="till", queue_id=0)
    ...     before = store.offsets_or_none("orders", 0)
    ...     receipt = transactions.end(paid, "commit")
    ...     before, [message.body for message in store.read("orders")]
    (None, [b'paid'])
    """

    def __init__(self, parts: Parts, wake: Wake) -> None:
        self._parts = parts
        self._store = parts.store
        self._clock = parts.clock
        self._wake = wake
        self._turns = RoundRobin()
        parts.topics.on_change.append(self._turns.forget)
        age = (parts.config.retention or Retention()).age
        self._age_ms = None if age is None else milliseconds(age, "retention.age")
        self._callbacks: dict[str | None, CheckCallback] = {}
        self._lock = Lock()
        self._halves = PreparedMessages()
        self._promised_ms: int | None = None
        """Time that the last `run_once` returned."""
        self._last_ms = self._opened_ms = parts.clock.now_ms()
        self._ops = OpLog(parts)
        self._half_done = 0
        self._rebuild()

    # -- state from the log -----------------------------------------------------------------------------------------

    def _rebuild(self) -> None:
        """Fill the table from the two topics."""
        self._half_done, half_end = self._span(HALF_TOPIC)
        done = self._ops.load(*self._span(OP_TOPIC))
        nowhere = [
            message.offset
            for message in messages_of(self._store, HALF_TOPIC, self._half_done, half_end)
            if message.offset not in done and not self._recover(message, done)
        ]
        if nowhere:
            _log.error("%s: %d half messages have no valid target and are skipped, the first at %d",
                       self._store.path, len(nowhere), nowhere[0])  # fmt: skip

    def _span(self, topic: str) -> tuple[int, int]:
        """Return (committed offset, end) of one of the two queues. The offset is between the queue's bounds."""
        low, high = self._store.offsets_or_none(topic, _QUEUE) or (0, 0)
        return max(low, min(high, self._parts.offsets.committed(QueueKey(TRANS_GROUP, topic, _QUEUE)) or 0)), high

    def _recover(self, message: Message, done: set[int]) -> bool:
        """Add a half from the log. Return False if its target is unknown."""
        properties = message.stored_properties()
        before = number(properties.get(TRAN_PREPARED_QUEUE_OFFSET))
        if before is not None and before in done:
            return True  # RocketMQ's copy of a half that has ended
        topic = properties.get(REAL_TOPIC)
        if topic is None or number(properties.get(REAL_QID)) is None:
            return False
        handle = TransactionHandle(
            message.unique_key, topic, properties.get(PGROUP, ""), message.offset, message.physical_offset
        )
        half = PreparedMessage(
            handle, message.store_timestamp_ms, properties.get(CHECK_IMMUNITY_TIME_IN_SECONDS), recovered=True
        )
        half.checks = max(0, number(properties.get(TRANSACTION_CHECK_TIMES)) or 0)
        if half.stored_ms > self._last_ms:  # the clock was set back meanwhile
            half.next_ms = self._last_ms
        self._halves.recover(half)
        return True

    # -- beginning --------------------------------------------------------------------------------------------------

    def begin(
        self,
        topic: str,
        body: Body,
        *,
        producer_group: str,
        queue_id: int | None = None,
        tag: str | None = None,
        keys: str | Iterable[str] | None = None,
        properties: Mapping[str, str] | None = None,
        unique_key: str | None = None,
        flag: int = 0,
        immunity: Duration | None = None,
        durability: Durability | None = None,
    ) -> TransactionHandle:
        """Store a message that is invisible until `end(handle, "commit")`.
        `unique_key` is the transaction's id, by default a new one. `immunity` is the number of seconds, at least 6,
        before its producer's group is first asked about it. After that time only an answer to such a check may end it.
        Raises the errors of `Router.put` and `prepare`."""
        stored = user_properties(tag, keys, properties, unique_key)
        if immunity is not None:
            wait_s = seconds(immunity, "immunity")
            if wait_s > _IMMUNITY_MAX_S:
                raise ConfigError(f"immunity must be at most a year, got {wait_s:g} s")
            stored[CHECK_IMMUNITY_TIME_IN_SECONDS] = str(max(1, round(wait_s)))
        return self.prepare(
            topic, body, stored, producer_group=producer_group, queue_id=queue_id, flag=flag, durability=durability
        )

    def prepare(
        self,
        topic: str,
        body: Body,
        properties: Mapping[str, str],
        *,
        producer_group: str,
        queue_id: int | None = None,
        flag: int = 0,
        sys_flag: int = 0,
        durability: Durability | None = None,
    ) -> TransactionHandle:
        """Store a half message with stored properties, reserved ones included. See `begin`.
        Raises InvalidMessageError for a DELAY level, a timer that could not start at commit, an open id, a queue that
        the topic does not have, and an empty producer group. If it raises FlushTimeoutError, the half is stored and
        rolled back, or its producer group will be asked. The caller must not run the transaction's work."""
        if (number(properties.get(DELAY)) or 0) > 0:
            raise InvalidMessageError("a transaction cannot be delayed by a level; use a timer", "delay_level")
        if not producer_group:
            raise InvalidMessageError("a transaction needs a producer group for checks", "producer_group")
        config = self._parts.topics.for_send(topic)
        if queue_id is None:
            queue_id = self._turns.next(topic, config.write_queues)
        else:
            check_queue(config, queue_id)
        identity = properties.get(UNIQ_KEY) or new_unique_key()
        marked = {**properties, UNIQ_KEY: identity, TRAN_MSG: "true", PGROUP: producer_group, TRANSACTION_ID: identity}
        # Checked now, because a commit, at which a timer adds its own properties, must not fail.
        _, _, visible = self._parts.router.route(topic, queue_id, {**marked, WAIT: "false"}, TRANSACTION_COMMIT)
        _check_room(visible)
        stored = {**marked, REAL_TOPIC: topic, REAL_QID: str(queue_id)}
        body = flat_body(body)
        self._store.writer.check_room(len(body))
        self._parts.topics.ensure(HALF_TOPIC, 1)
        bounds = self._store.offsets_or_none(HALF_TOPIC, _QUEUE)
        self._halves.announce(identity, bounds[1] if bounds else 0)
        late: FlushTimeoutError | None = None
        half: PreparedMessage | None = None
        try:
            try:
                receipt = self._store.append(
                    HALF_TOPIC,
                    _QUEUE,
                    body,
                    properties=stored,
                    flag=flag,
                    sys_flag=sys_flag & ~TRANSACTION_MASK,
                    durability=durability,
                )
            except FlushTimeoutError as error:
                receipt, late = cast(SendReceipt, error.receipt), error
            handle = TransactionHandle(identity, topic, producer_group, receipt.offset, receipt.physical_offset)
            immunity = stored.get(CHECK_IMMUNITY_TIME_IN_SECONDS)
            half = PreparedMessage(handle, receipt.store_timestamp_ms, immunity, recovered=False)
        finally:
            self._halves.enter(identity, half)
        self._due_at(half.next_ms)
        if late is not None:
            with suppress(MQStoreError):  # if even this cannot be written, a check will end the transaction
                self.end(handle, "rollback", from_check=True, durability="append")
            raise late
        return handle

    # -- ending -----------------------------------------------------------------------------------------------------

    def end(
        self,
        transaction: TransactionHandle | str,
        outcome: Outcome,
        *,
        from_check: bool = False,
        durability: Durability | None = None,
    ) -> SendReceipt | None:
        """Commit or roll back, by handle or id. The outcome "unknown" changes nothing.

        Returns the receipt of the visible message. It is None for a rollback, and for a commit of an earlier process.
        On return either outcome is as durable as a put. The same end again returns the same, and writes nothing. Raises
        ConfigError for another outcome. Raises InvalidMessageError (field "transaction_id") for an unknown transaction,
        or one that ended before the last 20,000. Raises TransactionStateError for one with another outcome or whose
        immunity is over, and LookupError if its record was damaged. Raises the errors of a put. Then it is still open,
        but after FlushTimeoutError it has ended, of unknown durability."""
        if outcome not in ("commit", "rollback", "unknown"):
            raise ConfigError(f"outcome must be 'commit', 'rollback' or 'unknown', got {outcome!r}")
        if outcome == "unknown":
            return None
        half = self._halves.find(transaction)
        late: FlushTimeoutError | None = None
        with half.lock:
            if half.ended is None and half.recovered and self._committed_before(half):
                self._end(half, "commit")
            if half.ended is None:
                if not from_check:
                    self._refuse_late(half)
                if outcome == "commit":
                    late = self._commit(half, durability)
                else:
                    self._ops.write_now(half.handle.offset)
                self._end(half, outcome)
            elif half.ended != outcome:
                raise TransactionStateError(
                    f"transaction {half.handle.transaction_id!r} has already ended with {half.ended}", half.ended
                )
        if late is not None:
            raise late
        if outcome == "rollback":  # only then, because a commit has waited for its copy
            durability = durability or self._store.durability
        if durability == "flush":
            self._store.flush()
        return half.receipt

    def _refuse_late(self, half: PreparedMessage) -> None:
        age_ms = self._clock.now_ms() - half.stored_ms
        if half.immunity_ms is not None and age_ms > half.immunity_ms:
            raise TransactionStateError(
                f"transaction {half.handle.transaction_id!r} is {age_ms} ms old, so its immunity of {half.immunity_ms} "
                "ms is over, and only the answer to a check can end it",
                None,
            )

    def _commit(self, half: PreparedMessage, durability: Durability | None) -> FlushTimeoutError | None:
        """Put the visible message. Return the error of a put whose durability is unknown, or None."""
        message = self._store.at(half.handle.physical_offset)
        properties = message.stored_properties()
        queue_id = self._parts.router.target_queue(message, half.handle.topic, int(properties.pop(REAL_QID)))
        if queue_id is None:
            self._end(half, "discard")
            raise TransactionStateError(
                f"transaction {half.handle.transaction_id!r} is discarded, because topic {half.handle.topic!r} was "
                "deleted",
                "discard",
            )
        for name in (REAL_TOPIC, TRAN_PREPARED_QUEUE_OFFSET, TRANSACTION_CHECK_TIMES):
            properties.pop(name, None)
        properties[WAIT] = "false"
        try:
            half.receipt = self._parts.router.copy(
                message,
                half.handle.topic,
                queue_id,
                properties,
                sys_flag=message.sys_flag & ~TRANSACTION_MASK | TRANSACTION_COMMIT,
                prepared_transaction_offset=half.handle.physical_offset,
                durability=durability,
            )
        except FlushTimeoutError as error:
            half.receipt = error.receipt if isinstance(error.receipt, SendReceipt) else None
            return error
        return None

    def _committed_before(self, half: PreparedMessage) -> bool:
        """Return True if the log has this half's commit, but no op, because the process ended between the two."""
        for topic in (half.handle.topic, TIMER_TOPIC):
            for message in self._store.find(topic, unique_key=half.handle.transaction_id, limit=sys.maxsize):
                if (
                    message.prepared_transaction_offset == half.handle.physical_offset
                    and message.sys_flag & TRANSACTION_MASK == TRANSACTION_COMMIT
                ):
                    return True
        half.recovered = False
        return False

    def _end(self, half: PreparedMessage, outcome: Ended) -> None:
        """Record that a half has ended, and collect its op. Never fails, because the decision is final.
        The op of a rollback is written before this, because nothing else in the log shows the rollback."""
        self._halves.end(half, outcome)
        self._parts.statistics.add(_COUNTERS[outcome], half.handle.topic)
        if outcome != "rollback" and self._ops.add(half.handle.offset):
            try:
                self._ops.write()
            except MQStoreError as error:  # not raised, because the half has ended; `run_once` writes the ops later
                _log.warning("%s: cannot write ops of transactions yet (%s)", self._store.path, error)
        due_ms = self._ops.due_ms
        if due_ms is not None:
            self._due_at(due_ms)

    # -- asking -----------------------------------------------------------------------------------------------------

    def on_check(self, producer_group: str | None, callback: CheckCallback | None) -> None:
        """Set the callback for checks of a producer group's open transactions.

        Group None means every group without its own callback. `callback` None removes the current one. A callback gets
        the half message (its topic is REAL_TOPIC). The answer True commits, False rolls back, and None means unknown.
        NOT_ASKED means unknown, and does not count as one of the 15 checks. An error is logged and counts as None.
        Halves that waited for a callback are due at once. Raises StoreClosedError if the store is closed."""
        if callback is not None:
            self._store.check_open()
        with self._lock:
            if callback is None:
                self._callbacks.pop(producer_group, None)
                return
            self._callbacks[producer_group] = callback
        self._halves.ask_again(producer_group)
        self._wake()

    def _due_at(self, when_ms: int) -> None:
        """Wake the housekeeper if `run_once` must run earlier than it returned."""
        if self._promised_ms is None or when_ms < self._promised_ms:
            self._wake()

    def _check(self, half: PreparedMessage, now_ms: int) -> None:
        """Ask the producer group about a half, or give it up."""
        try:
            message = self._store.at(half.handle.physical_offset)
        except LookupError as error:
            self._give_up(half, None, f"its record is damaged: {error}")
            return
        if half.recovered and self._committed_before(half):
            self.end(half.handle, "commit", from_check=True)
            return
        group = half.handle.producer_group
        callback = self._callbacks.get(group) or self._callbacks.get(None)
        if half.checks >= CHECKS_MAX:
            self._give_up(half, message, f"its outcome was unknown in all {half.checks} checks")
            return
        # A half of any age is checked once. After a restart its producers get some time to return for that.
        age_ms = now_ms - half.stored_ms
        too_old = self._age_ms is not None and age_ms > self._age_ms
        asked = half.checks > 0
        if too_old and (asked or (callback is None and now_ms - self._opened_ms >= _RETURN_MS)):
            self._give_up(half, message, f"it is {age_ms // 3_600_000} hours old")
            return
        if callback is None:
            return
        answer: bool | NobodyAsked | None
        try:
            answer = callback(message)
        except Exception:
            _log.exception("%s: the check of transaction %r failed", self._store.path, half.handle.transaction_id)
            answer = None
        if answer is True or answer is False:
            # An answer that cannot be applied (on a full disk, for example) does not count as a check.
            try:
                self.end(half.handle, "commit" if answer else "rollback", from_check=True)
            except TransactionStateError as error:
                _log.warning("%s: the answer to a check came too late (%s)", self._store.path, error)
        elif answer is not NOT_ASKED:
            half.checks += 1
        elif too_old and now_ms - self._opened_ms >= _RETURN_MS:
            self._give_up(half, message, f"it is {age_ms // 3_600_000} hours old, and no producer can be asked")

    def _give_up(self, half: PreparedMessage, message: Message | None, why: str) -> None:
        """Move a half to a topic where an operator can find it and it is never checked."""
        with half.lock:
            if half.ended is not None:
                return
            if message is not None:
                self._parts.topics.ensure(TRANS_CHECK_TOPIC, 1)
                properties = message.stored_properties() | {TRANSACTION_CHECK_TIMES: str(half.checks)}
                options: RecordOptions = {**fields_of(message), "durability": "append", "copied": True}
                body = bytes(message.body_view)
                self._store.append(TRANS_CHECK_TOPIC, _QUEUE, body, properties=properties, **options)
            self._end(half, "discard")
        kept = "" if message is None else f"; its message is kept in {TRANS_CHECK_TOPIC}"
        _log.error("%s: transaction %r of group %r for topic %r is discarded, %s%s", self._store.path,
                   half.handle.transaction_id, half.handle.producer_group, half.handle.topic, why, kept)  # fmt: skip

    # -- as a mechanism ---------------------------------------------------------------------------------------------

    def run_once(self, now_ms: int) -> int | None:
        """Write collected ops, check due halves, move offsets over done ones. Return the next time."""
        if now_ms < self._last_ms:
            self._halves.clock_set_back(now_ms)
        self._last_ms = now_ms
        due_ms = self._ops.due_ms
        if due_ms is not None and not due_ms - OP_EVERY_MS <= now_ms < due_ms:
            self._ops.write()
        for half in self._halves.due(now_ms, _CHECKS_A_RUN):
            if half.ended is None:  # the callback of another half may have ended it
                half.next_ms = now_ms + CHECK_EVERY_MS
                self._check(half, now_ms)
        self._note_progress()
        times = (each for each in (self._halves.next_ms(), self._ops.due_ms) if each is not None)
        self._promised_ms = min(times, default=None)
        return self._promised_ms

    def _note_progress(self) -> None:
        """Move the two committed offsets past halves and ops that are done.
        A half is done even if its op is only collected, because an offset past the half makes the op unnecessary."""
        bounds = self._store.offsets_or_none(HALF_TOPIC, _QUEUE)
        if bounds is None:
            return
        half_done = max(self._halves.first_needed(bounds[1]), self._half_done)
        moved = half_done != self._half_done
        self._half_done = half_done
        op_done = self._ops.needed_from(half_done)
        offsets = self._parts.offsets
        halves, ops = QueueKey(TRANS_GROUP, HALF_TOPIC, _QUEUE), QueueKey(TRANS_GROUP, OP_TOPIC, _QUEUE)
        if moved or offsets.committed(halves) is None:
            offsets.commit(halves, half_done)
        if offsets.committed(ops) != op_done:
            offsets.commit(ops, op_done)

    def persist(self) -> None:
        """Write the collected ops, and save the offsets of the two queues."""
        self._ops.write()
        self._note_progress()

    def pins(self) -> Iterator[Pin]:
        """Yield the record of the oldest open half."""
        half = self._halves.oldest()
        if half is not None:
            why = f"transaction {half.handle.transaction_id} of producer group {half.handle.producer_group} is open"
            yield Pin(half.handle.physical_offset, HALF_TOPIC, _QUEUE, TRANS_GROUP, why)

    # -- inspection -------------------------------------------------------------------------------------------------

    def half_message(self, transaction: TransactionHandle) -> Message:
        """Return the half message, as checks get it. Raises LookupError if its record is damaged."""
        return self._store.at(transaction.physical_offset)

    def get(self, transaction_id: str) -> TransactionHandle | None:
        """Return the open transaction of that id, or None."""
        return self._halves.open_id(transaction_id)

    def open_transactions(self) -> list[TransactionHandle]:
        """Return the open transactions, oldest first."""
        return self._halves.handles()

    def open_count(self) -> int:
        return len(self._halves)


_COUNTERS: Final[Mapping[str, str]] = {
    "commit": "COMMIT_NUMS",
    "rollback": "ROLLBACK_NUMS",
    "discard": "TRANSACTION_DISCARD_NUMS",
}


def _check_room(properties: Mapping[str, str]) -> None:
    """Raise InvalidMessageError if a timer's properties would fit a half message, but not its commit."""
    room = MAX_PROPERTIES_BYTES - CRC_TAIL_BYTES
    if TIMER_OUT_MS in properties and (size := len(encode_properties(properties))) > room:
        raise InvalidMessageError(f"properties with the timer's take {size} bytes, at most {room}", "properties")
