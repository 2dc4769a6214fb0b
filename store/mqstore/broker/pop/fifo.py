"""Popping in order: a queue's next batch only when nothing of the last is invisible (delivery#pop-fifo).

    pop      blocked?  -> nothing
             else      -> ck record, then the order info's new batch; committed = its first message. With `skip_acked`
                          it keeps what the last batch knew of messages that this one does not hand out
    settle   ack record, then the bit; committed = first message not acknowledged
    change   chg record, then the visible time
    visit    attempts all used up -> dead letter, rev record, then as acknowledged
             else the queue is free: a parked receiver is woken

Nothing is copied to come again: the queue is read again from `committed`, acknowledged messages too, unless the pop is
to skip them: for who works through the message groups of a batch side by side. Which messages of
the last batch are settled and until when the others are invisible is the order info's to say (orderinfo.py);
`state.fifo` names its `ck` record.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from mqstore.broker.begun import PROCESS_ENDED
from mqstore.broker.pop.ask import Ask, Claim, Delivery, expired
from mqstore.broker.pop.log import ACK, GIVE, LOCAL, REVIVE, deltas_text, fifo_members
from mqstore.broker.pop.orderinfo import BATCH_MAX, OrderInfo
from mqstore.broker.pop.state import Batch, QueueState, Standing
from mqstore.broker.pop.tables import PopTables
from mqstore.broker.pop.time import pop_time
from mqstore.broker.retry import origin_topic
from mqstore.errors import InvalidMessageError, InvalidReceiptError
from mqstore.log.message import Message

__all__ = ["FifoQueues"]

_log = logging.getLogger("mqstore")

_RETRY_MS = 1_000
"""When a dead letter that could not be filed is tried again."""


class FifoQueues:
    """The operations on one queue of a group that pops in order, all under the state's lock."""

    def __init__(self, tables: PopTables) -> None:
        self._tables = tables
        self._log = tables.log
        self._orders = tables.orders

    # -- popping ----------------------------------------------------------------------------------------------------

    def pop(self, state: QueueState, ask: Ask, room: int, mark: int, out: list[Delivery]) -> bool:
        """Deliver the next batch, up to `room` messages, if the queue is free. False: there is nothing to wake another
        receiver for, since the queue is blocked now or empty."""
        tables, key = self._tables, state.key
        if not tables.ready(state, ask.start) or state.in_flight or state.released:
            return False  # the group popped this queue without order before: those deliveries have to end first
        self._bury_exhausted(state, ask.now_ms, ask.max_attempts)
        record = tables.order(state)
        if record is not None and record.blocks(ask.attempt_id, ask.invisible_ms, ask.now_ms):
            return False
        cursor = state.cursor
        try:
            if state.ahead_from != cursor or state.ahead_filter != ask.filter:
                state.drop_ahead()
            known = record if ask.skip_acked else None
            messages = self._take(state, ask, room, known)
            if not messages:
                tables.commit(state)  # behind what the filter passes over
                return False
            offsets, done, left = _with_known([message.offset for message in messages], known)
            if offsets[-1] < messages[-1].offset:  # more than one batch can name
                messages = [message for message in messages if message.offset <= offsets[-1]]
            start, count = offsets[0], len(offsets)
            old = self._orders.get(*key)
            last_ms = max(state.reset_ms, 0 if old is None else old.pop_time_ms)
            pop_time_ms = pop_time(ask.now_ms, last_ms)
            visible_ms = ask.now_ms + ask.invisible_ms
            invisible_ms = max(0, visible_ms - pop_time_ms)
            counts = None if old is None else old.redelivered(ask.attempt_id, offsets)
            deltas = None if offsets[-1] - start == count - 1 else tuple(offset - start for offset in offsets)
            acked = sum(1 << offsets.index(offset) for offset in done)
            released = sum(1 << offsets.index(offset) for offset in left)
            free = dict.fromkeys(left, ask.now_ms)
            more = fifo_members(ask.attempt_id, counts, free, acked, released) + (LOCAL if ask.local else "")
            text = deltas_text(deltas, count)
            name = self._log.put_pop(state.head, start, pop_time_ms, invisible_ms, text, state.cursor, more)
        except BaseException:  # what no record names was not popped
            state.cursor = cursor
            state.drop_ahead()
            raise
        self._orders.update(ask.attempt_id, *key, pop_time_ms, invisible_ms, offsets, ask.now_ms)
        for offset in done:
            self._orders.commit_and_next(*key, offset, pop_time_ms, start)
        if left:
            self._orders.release(*key, left, pop_time_ms, ask.now_ms)
        state.fifo = Batch(name, start, pop_time_ms, invisible_ms, deltas, count, ask.local)
        state.pops += 1
        state.popped += len(messages)
        state.popped_bytes += sum([message.size for message in messages])
        state.last_pop_ms = max(state.last_pop_ms, pop_time_ms)
        state.cursor = start
        if done:
            tables.order(state)
        tables.commit(state)
        tables.announce(state, visible_ms)
        head = f"{start} {pop_time_ms} {invisible_ms} 999 {mark} mqstore {key.queue_id} "
        redeliveries = counts or {}
        out += [
            Delivery(
                message,
                head + str(message.offset),
                visible_ms,
                ask.topic,
                key.queue_id,
                redeliveries.get(message.offset, 0),
            )
            for message in messages
        ]
        return False

    def _take(self, state: QueueState, ask: Ask, room: int, known: OrderInfo | None) -> list[Message]:
        """The next messages, up to `room`, without what is acknowledged in `known`. The cursor is behind them then."""
        done = set(known.offsets).difference(known.unacked()) if known is not None else ()
        found: list[Message] = []
        while len(found) < room and (state.ahead or (not found and self._tables.read_ahead(state, ask.filter))):
            found += [message for message in state.take_ahead(room - len(found)) if message.offset not in done]
        return found

    # -- settling ---------------------------------------------------------------------------------------------------

    def settle(self, state: QueueState, claims: Iterable[Claim]) -> list[str]:
        """Acknowledge; the receipts that came too late. InvalidReceiptError for an offset that was not in the batch,
        before anything is written."""
        late: list[str] = []
        offsets: list[int] = []
        record = self._tables.order(state)
        for claim in claims:
            if claim.offset < state.cursor:
                continue  # settled before
            if record is None and claim.offset == state.cursor and self._record_lost(state, claim):
                # With it the order of what was popped is lost: only the next in line may go (delivery#order-missing).
                self._tables.reset(state, claim.offset + 1)
            elif record is None or claim.pop_time_ms != record.pop_time_ms:
                late.append(claim.text)
            elif claim.offset not in record.offsets:
                raise InvalidReceiptError(f"receipt {claim.text!r}: no message {claim.offset} was delivered with it")
            elif not record.acked >> record.offsets.index(claim.offset) & 1:
                offsets.append(claim.offset)
        if offsets and state.fifo is not None and record is not None:
            self._log.put_settled(ACK, state.fifo.name, offsets)
            self._note_settled(state, record, offsets)
            state.acked += len(set(offsets))  # one may be named twice
            self._wake_if_free(state)
        return late

    def _record_lost(self, state: QueueState, claim: Claim) -> bool:
        """Whether a queue without a record had one, and the claim is of it: not from before the queue was reset, or the
        group began to pop it without order. Such a claim would settle what others have in flight."""
        if state.in_flight or state.released or self._tables.offsets.has_reset(*state.key):
            return False
        return claim.pop_time_ms > state.reset_ms

    def give_back(self, state: QueueState, claims: Iterable[Claim]) -> list[str]:
        """Take deliveries back unseen: visible at once, their next delivery no redelivery."""
        late: list[str] = []
        offsets: list[int] = []
        record = self._tables.order(state)
        for claim in claims:
            if record is None or claim.pop_time_ms != record.pop_time_ms or claim.offset not in record.offsets:
                late.append(claim.text)
            elif not record.acked >> record.offsets.index(claim.offset) & 1:
                offsets.append(claim.offset)
        if offsets and state.fifo is not None and record is not None:
            self._log.put_settled(GIVE, state.fifo.name, offsets)
            self._orders.release(*state.key, offsets, record.pop_time_ms, self._tables.clock.now_ms())
            self._wake_if_free(state)
        return late

    def change(
        self, state: QueueState, claim: Claim, invisible_ms: int, *, renew: bool = False, failed: bool = False
    ) -> str:
        """Let a delivery become visible in `invisible_ms` from now. The pop time stays, so that the old receipt stays
        good as well; the new one differs in its invisible time only. `failed`: who had it has it no more."""
        del renew
        if claim.offset < state.cursor:
            return claim.text  # settled before
        record, batch = self._need(state, claim)
        if claim.offset not in record.unacked():
            return claim.text
        now_ms = self._tables.clock.now_ms()
        visible_ms = now_ms + invisible_ms
        # Negative where the pop time is ahead of the clock, which was set back since.
        invisible_ms = visible_ms - record.pop_time_ms
        self._log.put_change(batch.name, claim.offset, record.pop_time_ms, invisible_ms, failed=failed)
        batch.note_failed(claim.offset, failed)
        self._orders.update_next_visible_time(*state.key, claim.offset, record.pop_time_ms, visible_ms)
        self._tables.announce(state, visible_ms)
        head = f"{record.offsets[0]} {record.pop_time_ms} {max(0, invisible_ms)} 999"
        return f"{head} {claim.mark} mqstore {claim.queue_id} {claim.offset}"

    def attempt(self, state: QueueState, claim: Claim) -> int:
        """Which delivery of its message this is, from 1. ReceiptExpiredError when it came too late."""
        if claim.offset < state.cursor:
            return 1
        return self._attempt_of(self._need(state, claim)[0], claim.offset)

    def bury(self, state: QueueState, claim: Claim, reason: str) -> None:
        """File the message as a dead letter, then settle it."""
        if claim.offset < state.cursor:
            raise expired([claim.text])
        record, _ = self._need(state, claim)
        if claim.offset not in record.unacked():
            raise expired([claim.text])
        self._bury(state, record, claim.offset, reason)
        self._wake_if_free(state)

    # -- what is measured -------------------------------------------------------------------------------------------

    def standing(self, state: QueueState, record: OrderInfo, now_ms: int) -> Standing:
        """Where the group stands, with `record` for its last batch."""
        cursor = state.cursor
        left = [offset for offset in record.unacked() if offset >= cursor]
        again = [offset for offset in left if record.is_visible(offset, now_ms)]
        behind = max(cursor, record.offsets[-1] + 1) if record.offsets else cursor
        ready = again[0] if again else behind
        return Standing(left[0] if left else behind, ready, behind, len(left) - len(again), len(again))

    # -- attempts that ended ----------------------------------------------------------------------------------------

    def visit(self, state: QueueState, now_ms: int) -> None:
        """File the dead letters that are due, wake a receiver if the queue is free, announce the next visible time."""
        group = self._tables.parts.groups.get(state.key.group)
        try:
            self._bury_exhausted(state, now_ms, None if group is None else group.max_attempts)
            self._wake_if_free(state)
        except BaseException:
            self._tables.announce(state, now_ms + _RETRY_MS)  # what is due names no later time of its own
            raise
        finally:
            self.announce_next(state, now_ms)

    def announce_next(self, state: QueueState, now_ms: int) -> None:
        """Have the housekeeper come when the next message becomes visible."""
        record = self._tables.order(state)
        if record is not None:
            times = [record.visible_at(offset) for offset in record.unacked() if not record.is_visible(offset, now_ms)]
            if times:
                self._tables.announce(state, min(times))

    def _bury_exhausted(self, state: QueueState, now_ms: int, limit: int | None) -> None:
        """Dead letters of the messages that became visible after their last attempt (delivery#pop-change)."""
        record = self._tables.order(state)
        if record is None or limit is None:
            return
        for i, offset in enumerate(record.offsets):
            if offset < state.cursor or record.acked >> i & 1 or record.released >> i & 1:
                continue
            if not record.is_visible(offset, now_ms):
                continue
            attempt = self._attempt_of(record, offset)
            if attempt < limit:
                continue
            try:
                reason = f"attempt {attempt} of {limit} ended without acknowledgement"
                ended = self._tables.ended_process(state, offset)
                self._bury(state, record, offset, PROCESS_ENDED if ended else reason)
                if ended:
                    self._tables.comes_again(state, offset, None)
            except InvalidMessageError as error:
                # No later try will fare better: its record is as long as one can be. It goes on being delivered.
                topic, group, queue_id = state.key
                _log.error(
                    "message %d of %s/%d cannot be a dead letter of %s: %s", offset, topic, queue_id, group, error
                )

    def _bury(self, state: QueueState, record: OrderInfo, offset: int, reason: str) -> None:
        key = state.key
        message = self._tables.message(key, offset)
        if message is None:
            self._tables.lost(state, offset)
        else:
            self._tables.dead_letter(
                message,
                key.group,
                reason,
                origin_topic=origin_topic(message, key.group),
                reconsume_times=self._attempt_of(record, offset),
            )
        assert state.fifo is not None
        self._log.put_settled(REVIVE, state.fifo.name, [offset])
        self._note_settled(state, record, [offset])

    def _note_settled(self, state: QueueState, record: OrderInfo, offsets: Iterable[int]) -> None:
        for offset in offsets:
            state.cursor = self._orders.commit_and_next(*state.key, offset, record.pop_time_ms, state.cursor)
        self._tables.order(state)
        self._tables.commit(state)

    def _wake_if_free(self, state: QueueState) -> None:
        topic, group, queue_id = state.key
        if not self._orders.check_block(None, topic, group, queue_id, 0, self._tables.clock.now_ms()):
            bounds = self._tables.store.offsets_or_none(topic, queue_id)
            if bounds is not None and state.cursor < bounds[1]:
                self._tables.waiters.wake_one(topic, queue_id, group)

    def _need(self, state: QueueState, claim: Claim) -> tuple[OrderInfo, Batch]:
        record = self._tables.order(state)
        if record is None or state.fifo is None or claim.pop_time_ms != record.pop_time_ms:
            raise expired([claim.text])
        if claim.offset not in record.offsets:
            raise InvalidReceiptError(f"receipt {claim.text!r}: no message {claim.offset} was delivered with it")
        return record, state.fifo

    @staticmethod
    def _attempt_of(record: OrderInfo, offset: int) -> int:
        return (record.counts or {}).get(offset, 0) + 1

    # -- keeping the log short --------------------------------------------------------------------------------------

    def put_anew(self, state: QueueState) -> None:
        """Append the last batch again at the end of the log, so that a replay may begin behind its old record."""
        record = self._tables.order(state) or self._orders.get(*state.key)
        if record is None or not record.offsets or record.pop_time_ms == 0:
            return
        local = state.fifo is not None and state.fifo.local
        start, count = record.offsets[0], len(record.offsets)
        deltas = tuple(offset - start for offset in record.offsets)
        more = fifo_members(record.attempt_id, record.counts, record.visible_ms) + (LOCAL if local else "")
        invisible_ms = record.invisible_ms or 0
        text = deltas_text(deltas, count)
        name = self._log.put_pop(
            state.head, start, record.pop_time_ms, invisible_ms, text, record.offsets[-1] + 1, more
        )
        acked = [offset for i, offset in enumerate(record.offsets) if record.acked >> i & 1]
        given = [offset for i, offset in enumerate(record.offsets) if record.released >> i & 1]
        for kind, offsets in ((ACK, acked), (GIVE, given)):
            if offsets:
                self._log.put_settled(kind, name, offsets)
        failed = state.fifo.failed if state.fifo is not None else None
        state.fifo = Batch(name, start, record.pop_time_ms, invisible_ms, deltas, count, local)
        for offset in sorted(failed or ()):
            later_ms = record.visible_at(offset) - record.pop_time_ms
            self._log.put_change(name, offset, record.pop_time_ms, later_ms, failed=True)
            state.fifo.note_failed(offset, True)
        self._tables.order(state)


def _with_known(popped: list[int], known: OrderInfo | None) -> tuple[list[int], list[int], list[int]]:
    """The offsets of a batch that hands out `popped` and keeps what is `known` behind the first of them; of those that
    it does not hand out the acknowledged ones, and the others: free for the next pop, their counts as if they came
    now."""
    if known is None:
        return popped, [], []
    offsets = sorted({*popped, *(offset for offset in known.offsets if offset > popped[0])})[:BATCH_MAX]
    kept = set(offsets).difference(popped)
    unacked = kept.intersection(known.unacked())
    return offsets, sorted(kept - unacked), sorted(unacked)
