"""Popping in order: a batch waits while a message of the last is invisible (delivery#pop-fifo).

    pop      blocked?  -> nothing
             else      -> ck record, then the order info's new batch; committed = its first message. With `skip_acked`
                          it keeps the state of messages of the last batch that this one does not deliver
    settle   ack record, then the bit; committed = first message not acknowledged. Released: rel record
    change   chg record, then the visible time
    visit    attempts all used up -> dead letter, rev record, then as acknowledged
             else the queue is free: a parked receiver is woken

Redelivery makes no copies: the queue is read again from `committed`. Acknowledged messages are read again, too, unless
the pop skips them, as receivers do that handle the message groups of a batch in parallel. The order info knows which
messages of the last batch are settled, and until when the others are invisible (orderinfo.py). `state.fifo` names its
`ck` record.
"""

from __future__ import annotations

from collections.abc import Iterable

from mqstore.broker.pop.batch import Claim, expired, pop_time, receipt_head
from mqstore.broker.pop.orderinfo import BATCH_MAX, OrderInfo
from mqstore.broker.pop.poplog.log import ACK, GIVE, REVIVE, order_members
from mqstore.broker.pop.request import Delivery, PopRequest
from mqstore.broker.pop.state import QueueState
from mqstore.broker.pop.tables import PopTables
from mqstore.broker.reads.filters.filter import Filter
from mqstore.broker.redelivery.reason import GIVEN_BACK, Reason
from mqstore.errors import InvalidMessageError, InvalidReceiptError
from mqstore.log.message import Message, stored_bytes
from mqstore.logger import log as _log

_RETRY_MS = 1_000
"""Number of ms after which a failed dead-lettering is tried again."""


class OrderedQueues:
    """Operations on one queue of a group that pops in order, all under the state's lock."""

    def __init__(self, tables: PopTables) -> None:
        self._tables = tables
        self._log = tables.log
        self._orders = tables.orders

    def pop(self, state: QueueState, request: PopRequest, mark: int, out: list[Delivery]) -> bool:
        """Deliver the next batch, until `out` has as many as requested, if the queue is free.
        Always returns False: the queue is then blocked or empty, so no other receiver needs to be woken."""
        tables, key, now_ms = self._tables, state.key, self._tables.clock.now_ms()
        if not tables.ready(state, request.start) or state.in_flight or state.released:
            return False  # the group popped this queue without order before, and those deliveries must end first
        self._dead_letter_exhausted(state, now_ms)
        last = tables.order(state)
        if last is not None and last.blocks(request.attempt_id, now_ms):
            return False
        cursor = state.cursor
        try:
            if state.ahead_from != cursor or state.ahead_filter != request.filter:
                state.drop_ahead()
            known = last if request.skip_acked else None
            messages = self._take(state, request.filter, request.n - len(out), known, last)
            if not messages:
                tables.commit(state)  # after the messages that the filter refuses
                return False
            offsets, done, left = _with_known([message.offset for message in messages], known)
            if offsets[-1] < messages[-1].offset:  # more messages than one batch can name
                messages = [message for message in messages if message.offset <= offsets[-1]]
            old = self._orders.get(key)
            pop_time_ms = pop_time(now_ms, max(state.reset_ms, 0 if old is None else old.pop_time_ms))
            visible_ms = now_ms + request.invisible_ms
            invisible_ms = max(0, visible_ms - pop_time_ms)
            record = OrderInfo(tuple(offsets), pop_time_ms, invisible_ms, pop_time_ms, request.attempt_id)
            if old is not None:
                record = old.followed_by(record)
                tables.note_expired(key, [each for each in _overdue(old, state, cursor) if each in record.offsets])
            if done:
                record = record.acknowledged(done)
            if left:
                record = record.moved(left, now_ms, GIVEN_BACK)
            self._name(state, record, state.cursor, local=request.local, before=cursor)
        except BaseException:  # without its record the batch was not popped, so its messages must be read again
            state.cursor = cursor
            state.drop_ahead()
            raise
        # Back to the first message, because redelivery reads the queue again from here.
        state.cursor = offsets[0]
        tables.put_order(state, record)
        for message in messages if state.progress else ():
            state.progress.pop(message.offset, None)  # of an earlier delivery
        state.pops += 1
        state.popped += len(messages)
        state.popped_bytes += stored_bytes(messages)
        state.last_pop_ms = max(state.last_pop_ms, pop_time_ms)
        tables.commit(state)
        tables.announce(state, visible_ms)
        head = receipt_head(offsets[0], pop_time_ms, invisible_ms, mark, key.queue_id, fifo=True)
        for message in messages:
            before, receipt = record.attempt(message.offset) - 1, f"{head}{message.offset}"
            out.append(Delivery(message, receipt, visible_ms, request.topic, key.queue_id, before))
        return False

    def _take(
        self, state: QueueState, only: Filter | None, room: int, known: OrderInfo | None, last: OrderInfo | None
    ) -> list[Message]:
        """Take the next messages, up to `room`, without those acknowledged in `known`.
        Moves the cursor past them. Those of the last batch do not expire any more."""
        done = known.among(known.acked) if known is not None else ()
        found: list[Message] = []
        while len(found) < room and (state.ahead or (not found and self._tables.read_ahead(state, only))):
            taken = state.take_ahead(room - len(found))
            if state.expiry is not None:
                taken = self._tables.unexpired(state, taken, () if last is None else last.offsets)
            found += [message for message in taken if message.offset not in done]
        return found

    def _name(
        self, state: QueueState, record: OrderInfo, cursor: int, *, local: bool, before: int | None = None
    ) -> None:
        """Append a batch to the log, in place of the one that `state.fifo` names."""
        invisible_ms, more = record.invisible_ms or 0, order_members(record)
        state.fifo = self._tables.log_batch(
            state, record.offsets, record.pop_time_ms, invisible_ms, cursor, local=local, more=more, before=before
        )

    def settle(self, state: QueueState, claims: Iterable[Claim], kind: str = ACK) -> list[str]:
        """Acknowledge deliveries, or release them unseen (`GIVE`). Return the expired receipts.
        Released messages are visible at once, and their next delivery is not a redelivery. Raises InvalidReceiptError
        for an offset that was not in the batch, before anything is written."""
        late: list[str] = []
        offsets: list[int] = []
        record = self._tables.order(state)
        for claim in claims:
            if claim.offset < state.cursor:
                continue  # settled before
            if record is None or not self._is_of(record, claim):
                late.append(claim.text)
            elif not record.acked >> record.offsets.index(claim.offset) & 1:
                offsets.append(claim.offset)
        if offsets and record is not None and state.fifo is not None:
            self._log.put_settled(kind, state.fifo.name, offsets)
            if kind == GIVE:
                self._orders.put(state.key, record.moved(offsets, self._tables.clock.now_ms(), GIVEN_BACK))
            else:
                self._note_settled(state, record, offsets)
                state.acked += len(set(offsets))  # one may be named twice
            self._tables.wake_if_free(state)
        return late

    def change(
        self, state: QueueState, claim: Claim, invisible_ms: int, *, renew: bool = False, reason: Reason | None = None
    ) -> str:
        """Make a delivery visible in `invisible_ms` from now. Return its new receipt.
        The pop time stays, so the old receipt stays valid. The new one differs only in its invisible time. `reason`
        says why its receiver does not hold it any more. After a failure the queue is suspended."""
        del renew
        if claim.offset < state.cursor:
            return claim.text  # settled before
        record = self._need(state, claim)
        if claim.offset not in record.unacked():
            return claim.text
        assert state.fifo is not None
        now_ms = self._tables.clock.now_ms()
        visible_ms = now_ms + invisible_ms
        # Negative if the clock was set back, so that the pop time is ahead of it.
        invisible_ms = visible_ms - record.pop_time_ms
        self._tables.log_change(state, state.fifo, claim.offset, (record.pop_time_ms, invisible_ms), reason)
        if reason is not None and reason.counts:
            record = record.failed(claim.offset, record.attempt(claim.offset), now_ms, reason.text)
        self._orders.put(state.key, record.moved([claim.offset], visible_ms, reason))
        self._tables.announce(state, visible_ms)
        start, shown_ms = record.offsets[0], max(0, invisible_ms)
        head = receipt_head(start, record.pop_time_ms, shown_ms, claim.mark, claim.queue_id, fifo=True)
        return f"{head}{claim.offset}"

    def attempt(self, state: QueueState, claim: Claim) -> int:
        """Return the number of this delivery of its message, from 1. Raises ReceiptExpiredError if late."""
        return 1 if claim.offset < state.cursor else self._need(state, claim).attempt(claim.offset)

    def dead_letter(self, state: QueueState, claim: Claim, reason: Reason) -> None:
        """Dead-letter the message, then settle it."""
        if claim.offset < state.cursor or claim.offset not in (record := self._need(state, claim)).unacked():
            raise expired([claim.text])
        self._dead_letter(state, record, claim.offset, reason)
        self._tables.wake_if_free(state)

    def cancel(self, state: QueueState, offset: int) -> None:
        """Settle a message that no receiver holds, so that it is not delivered any more."""
        record = self._tables.order(state)
        if record is None or state.fifo is None or offset not in record.unacked(state.cursor):
            self._tables.skip(state, [offset])
        else:
            self._log.put_settled(ACK, state.fifo.name, [offset])
            self._note_settled(state, record, [offset])
            self._tables.wake_if_free(state)

    def visit(self, state: QueueState, now_ms: int) -> None:
        """Dead-letter exhausted messages, wake a receiver if the queue is free, announce the next time."""
        try:
            self._dead_letter_exhausted(state, now_ms)
            self._tables.wake_if_free(state)
        except BaseException:
            self._tables.announce(state, now_ms + _RETRY_MS)  # a due message announces no later time
            raise
        finally:
            record = self._tables.order(state)
            if record is not None and (held := record.held(0, now_ms)):
                self._tables.announce(state, min(map(record.visible_at, held)))

    def _dead_letter_exhausted(self, state: QueueState, now_ms: int) -> None:
        """Dead-letter messages that became visible after their last attempt (delivery#pop-change)."""
        record, limit = self._tables.order(state), self._tables.limit(state.key.group)
        if record is None or limit is None:
            return
        given_back = record.among(record.released)
        for offset in record.unacked(state.cursor):
            attempt = record.attempt(offset)
            if attempt < limit or offset in given_back or not record.is_visible(offset, now_ms):
                continue
            try:
                reason = self._tables.last_reason(state.key, offset, attempt, limit)
                record = self._dead_letter(state, record, offset, reason)
                self._tables.comes_again(state.key, offset, None)
            except InvalidMessageError as error:
                # A later try would fail, too, because the record has the greatest possible length. So it stays in its
                # queue and is delivered again and again.
                _log.error("message %d of %s cannot be a dead letter: %s", offset, state.key, error)

    def _dead_letter(self, state: QueueState, record: OrderInfo, offset: int, reason: Reason) -> OrderInfo:
        self._tables.move_to_dead_letters(state, offset, reason, record.attempt(offset))
        assert state.fifo is not None
        self._log.put_settled(REVIVE, state.fifo.name, [offset])
        return self._note_settled(state, record, [offset])

    def _note_settled(self, state: QueueState, record: OrderInfo, offsets: list[int]) -> OrderInfo:
        record = record.acknowledged(offsets)
        state.cursor = record.next_offset()
        self._tables.put_order(state, record)
        self._tables.commit(state)
        return record

    def _need(self, state: QueueState, claim: Claim) -> OrderInfo:
        record = self._tables.order(state)
        if record is None or not self._is_of(record, claim):
            raise expired([claim.text])
        return record

    @staticmethod
    def _is_of(record: OrderInfo, claim: Claim) -> bool:
        """Return True if the claim is of that batch.
        Raises InvalidReceiptError if the claim names a message that was not in the batch."""
        if claim.pop_time_ms != record.pop_time_ms:
            return False
        if claim.offset not in record.offsets:
            raise InvalidReceiptError(f"receipt {claim.text!r}: no message {claim.offset} was delivered with it")
        return True

    def rewrite(self, state: QueueState) -> None:
        """Append the last batch again at the log end, so that a replay may begin after its old record."""
        record = self._orders.get(state.key)
        if record is None or not record.offsets or record.pop_time_ms == 0:
            return
        old = state.fifo
        self._name(state, record, record.offsets[-1] + 1, local=old is not None and old.local)
        assert state.fifo is not None
        for offset in record.offsets:
            if (reason := state.reason(old, offset)) is not None:
                times = record.pop_time_ms, record.visible_at(offset) - record.pop_time_ms
                self._tables.log_change(state, state.fifo, offset, times, reason)
        self._tables.put_order(state, record)


def _overdue(last: OrderInfo, state: QueueState, cursor: int) -> list[int]:
    """Return the messages of the last batch from `cursor` on whose lease ran out. After an opening they are visible
    earlier."""
    end_ms, given = last.pop_time_ms + (last.invisible_ms or 0), last.among(last.released)
    return [
        each
        for each in last.unacked(cursor)
        if last.pop_time_ms and each not in given and last.visible_at(each) >= end_ms
        if state.reason(state.fifo, each) is None
    ]


def _with_known(popped: list[int], known: OrderInfo | None) -> tuple[list[int], list[int], list[int]]:
    """Return (all offsets of the batch, offsets kept as acknowledged, offsets kept as released).
    The batch delivers `popped`, and keeps the offsets of `known` after the first one of these. Released ones are free
    for the next pop, with the counts that they would have if they were delivered now."""
    if known is None:
        return popped, [], []
    offsets = sorted({*popped, *(offset for offset in known.offsets if offset > popped[0])})[:BATCH_MAX]
    kept = set(offsets).difference(popped)
    unacked = kept.intersection(known.unacked())
    return offsets, sorted(kept - unacked), sorted(unacked)
