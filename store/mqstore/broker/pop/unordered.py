"""Popping without order: unacknowledged messages are redelivered as copies (delivery#pop-queue).

    pop      ck record, then in flight                           attempt ended by expiry (`visit`) or `dead_letter`:
    settle   ack record, then settled                               copy to the retry topic, or dead letter
    settle, to release: rel record, then popped again first         then rev record, then settled
    change   chg record, then visible at another time

Each record is appended under the queue's lock before memory changes (delivery#pop-state). For receivers in this process
those of pops and acknowledgements are appended to the journal instead (`journal.py`). After a crash between copy
and `rev` the message is copied once more. Nothing else happens twice, and nothing is lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from operator import attrgetter, itemgetter

from mqstore.broker.pop.batch import Batch, Claim, claim_of, expired, pop_time, receipt_head
from mqstore.broker.pop.poplog.log import ACK, GIVE, REVIVE
from mqstore.broker.pop.request import MAX_INVISIBLE_MS, MIN_INVISIBLE_MS, Delivery, PopRequest
from mqstore.broker.pop.state import QueueState
from mqstore.broker.pop.tables import PopTables
from mqstore.broker.reads.filters.filter import Filter
from mqstore.broker.redelivery.reason import EXPIRED, REOPENED, Reason, set_reason
from mqstore.broker.tables.names import QueueKey, pop_retry_topic
from mqstore.broker.tables.priorities import retry_queue
from mqstore.errors import InvalidMessageError, InvalidReceiptError
from mqstore.layout.properties import (
    FIRST_POP_TIME,
    NAME_END,
    NOT_REDELIVERED,
    PAIR_END,
    RETRY_REASON,
    TIMER_DELIVER_MS,
    encode_properties,
    kept,
)
from mqstore.log.message import Message, stored_bytes
from mqstore.log.writing.outgoing import Copy
from mqstore.logger import log as _log
from mqstore.native import kernel
from mqstore.options import milliseconds

_COPIES = 256
"""Maximum number of messages that are copied together: some two milliseconds. More together are not faster."""
_CHANGED = (
    b"TIMER_",  # of ten names, which compiled code would look for one by one
    *(name.encode() + NAME_END for name in (FIRST_POP_TIME, *sorted(NOT_REDELIVERED)) if not name.startswith("TIMER_")),
)
"""Beginnings of the properties that a copy drops or sets."""
_CHUNK = 64
"""Maximum number of batches redelivered at once. This limits how long the queue is locked."""
_BACKOFF_MIN_MS, _BACKOFF_MAX_MS = 1_000, 60_000
_offset = attrgetter("offset")
_new = tuple.__new__


class UnorderedQueues:
    """Operations on one queue of a standard group, all under the state's lock."""

    def __init__(self, tables: PopTables) -> None:
        self._tables = tables
        self._log = tables.log

    def pop_at_once(self, group: str, topic: str, n: int, invisible_ms: int, order: bool) -> list[Delivery]:
        """Deliver prefetched messages to a receiver in this process, without waiting for the disk, or for a lock in
        compiled code. [] does not mean that the queues are empty or the arguments valid: then call `PopService.pop`. It
        is always [] for a group with retry topics, because only that chooses between topics, and for a store that waits
        for the disk by default."""
        tables = self._tables
        route = tables.route(group, topic)
        if route is None or not route.at_once or not MIN_INVISIBLE_MS <= invisible_ms <= MAX_INVISIBLE_MS:
            return []
        found: list[Delivery] = []
        for _, state in route.sources(-1, order, False)[:1]:
            if kernel is not None:
                found = tables.deliver(state, n, invisible_ms, topic, True, order) or found
            elif not order and tables.journal_end:
                with state.lock:
                    if 1 <= n <= len(state.ahead) - state.ahead_at:
                        self.pop(state, PopRequest(group, topic, n=n, invisible_ms=invisible_ms), 0, found)
            if found and not order and tables.waiters.parked and state.ahead:
                tables.waiters.wake_one(group, topic, -1)
        return found

    def ack_at_once(self, group: str, topic: str, receipts: Sequence[str]) -> int:
        """Acknowledge under the same conditions. Return the number of settled receipts, from the front. The others are
        for `PopService.ack`."""
        tables = self._tables
        route = tables.route(group, topic)
        if route is None or not route.settled:
            return 0
        if kernel is not None:
            return tables.settle(route.settled, receipts)
        # Several at once are for `ack`: it settles none if one of them is bad, and those of a batch by one record.
        if len(receipts) != 1 or not tables.journal_end:
            return 0
        with suppress(InvalidReceiptError):
            claim = claim_of(receipts[0])
            if not (claim.mark or claim.fifo) and claim.queue_id < len(route.queues):
                state = route.queues[claim.queue_id]
                with state.lock:
                    if self._batch(state, claim) is not None:
                        self.settle(state, [claim])
                        return 1
        return 0

    def pop(self, state: QueueState, request: PopRequest, mark: int, out: list[Delivery]) -> bool:
        """Deliver messages until `out` has as many as requested. Return True if there seem to be more."""
        tables, only, room = self._tables, request.filter, request.n - len(out)
        if not tables.ready(state, request.start) or (state.fifo is not None and not self._leave_fifo(state)):
            return False
        cursor = state.cursor
        try:
            messages = self._released(state, only, room) if state.released else []
            while len(messages) < room:
                if state.ahead_filter is not only and state.ahead_filter != only:
                    state.drop_ahead()
                if not state.ahead and not tables.read_ahead(state, only):
                    break
                found = state.take_ahead(room - len(messages))
                if state.is_retry:
                    found = self._within_limit(state, found)
                elif state.expiry is not None:
                    found = tables.unexpired(state, found)
                messages = messages + found if messages else found
            if messages:
                self._deliver(state, request, mark, messages, cursor, out)
        except BaseException:  # without its record the batch was not popped, so its messages must be read again
            state.cursor = cursor
            state.drop_ahead()
            raise
        tables.commit(state)
        return bool(messages) and bool(state.ahead or state.released)

    def _deliver(
        self,
        state: QueueState,
        request: PopRequest,
        mark: int,
        messages: list[Message],
        before: int,
        out: list[Delivery],
    ) -> None:
        now_ms, invisible_ms = self._tables.clock.now_ms(), request.invisible_ms
        visible_ms = now_ms + invisible_ms
        last_ms, noted = state.reset_ms, request.local
        if state.released:
            messages.sort(key=_offset)
            for message in messages:
                if message.offset in state.released:
                    noted = False  # the log has it as released
                    last_ms = max(last_ms, state.released[message.offset].times(message.offset)[0])
        pop_time_ms = now_ms
        if last_ms >= now_ms:
            pop_time_ms = pop_time(now_ms, last_ms)
            invisible_ms = max(0, visible_ms - pop_time_ms)
        count = len(messages)
        start = messages[0].offset
        offsets = (start,) if count == 1 else [message.offset for message in messages]
        batch = self._tables.log_batch(
            *(state, offsets, pop_time_ms, invisible_ms, state.cursor), local=request.local, noted=noted, before=before
        )
        state.add(batch, offsets)
        state.pops += 1
        state.popped += count
        state.popped_bytes += stored_bytes(messages)
        if pop_time_ms > state.last_pop_ms:
            state.last_pop_ms = pop_time_ms
        if visible_ms < state.announced_ms:
            self._tables.announce(state, visible_ms)
        topic, queue_id = request.topic, state.key.queue_id
        head = receipt_head(start, pop_time_ms, invisible_ms, mark, queue_id)
        for message, offset in zip(messages, offsets, strict=True):
            out.append(_new(Delivery, (message, f"{head}{offset}", visible_ms, topic, queue_id, None)))

    def _released(self, state: QueueState, only: Filter | None, room: int) -> list[Message]:
        """Return released messages. A message that is gone, or that the filter now refuses, is settled."""
        found: list[Message] = []
        for offset in state.first_released(room):
            message = self._tables.message(state.key, offset)
            if message is not None and (only is None or only.apply([message])):
                found.append(message)
                continue
            if message is None:
                self._tables.lost(state, offset)
            self._settle(state, ACK, state.released[offset], [offset])
        return found

    def _within_limit(self, state: QueueState, messages: list[Message]) -> list[Message]:
        """Return the messages that have an attempt left. The others become dead letters.
        Such copies exist if the limit was lowered, or if a Java broker made them. The cursor has passed them. After a
        crash before it is saved they are dead-lettered a second time."""
        limit = self._tables.limit(state.key.group)
        if limit is None:
            return messages
        for message in messages:
            if (times := message.reconsume_times) >= limit:
                reason = Reason(f"{times} attempts ended, of {limit}")
                self._tables.file_dead_letter(state.key.group, message, reason, times)
        return [message for message in messages if message.reconsume_times < limit]

    def _leave_fifo(self, state: QueueState) -> bool:
        """End the order in which the group popped before. Return False if its last batch still blocks.
        Unsettled messages of that batch then count as not popped yet."""
        if self._tables.order(state) is not None:
            if self._tables.orders.blocks(state.key, self._tables.clock.now_ms()):
                return False
            self._tables.reset(state, state.cursor)
        return True

    def settle(self, state: QueueState, claims: Iterable[Claim], kind: str = ACK) -> list[str]:
        """Acknowledge deliveries, or release them unseen (`GIVE`). Return the expired receipts.
        Settling a delivery a second time is allowed."""
        late: list[str] = []
        found: dict[Batch, list[int]] = {}
        for claim in claims:
            batch = self._batch(state, claim)
            if batch is None:
                if not self._is_done(state, claim):
                    late.append(claim.text)
            else:
                found.setdefault(batch, []).append(claim.offset)
        for batch, offsets in found.items():
            self._tables.log_settled(state, kind, batch, offsets)
            if kind == GIVE:
                state.release(batch, offsets)
            else:
                state.acked += state.settle(batch, offsets)
        self._tables.commit(state)
        if kind == GIVE and state.released:
            self._tables.waiters.wake_one(*state.key)
        return late

    def change(
        self, state: QueueState, claim: Claim, invisible_ms: int, *, renew: bool = False, reason: Reason | None = None
    ) -> str:
        """Make a delivery visible in `invisible_ms` from now. Return its new receipt.
        `renew`: the old receipt stays valid. `reason` says why its receiver does not hold it any more."""
        batch, now_ms = self._need(state, claim), self._tables.clock.now_ms()
        pop_time_ms = claim.pop_time_ms if renew else pop_time(now_ms, claim.pop_time_ms)
        # Negative if the clock was set back, so that the pop time is ahead of it.
        invisible_ms = now_ms + invisible_ms - pop_time_ms
        self._tables.log_change(state, batch, claim.offset, (pop_time_ms, invisible_ms), reason)
        state.change(batch, claim.offset, pop_time_ms, invisible_ms)
        state.last_pop_ms = max(state.last_pop_ms, pop_time_ms)
        self._tables.announce(state, pop_time_ms + invisible_ms)
        if renew:
            return claim.text
        head = receipt_head(claim.offset, pop_time_ms, max(0, invisible_ms), claim.mark, claim.queue_id)
        return f"{head}{claim.offset}"

    def attempt(self, state: QueueState, claim: Claim) -> int:
        """Return the number of this delivery of its message, from 1. Raises ReceiptExpiredError if late."""
        self._need(state, claim)
        message = self._tables.message(state.key, claim.offset)
        return 1 if message is None else message.attempt

    def dead_letter(self, state: QueueState, claim: Claim, reason: Reason) -> None:
        """Dead-letter the message, then settle it: a crash between the two makes a second copy, and loses none."""
        batch = self._need(state, claim)
        self._tables.move_to_dead_letters(state, claim.offset, reason)
        self._settle(state, REVIVE, batch, [claim.offset])
        state.note_revived([claim.offset])

    def cancel(self, state: QueueState, offset: int) -> None:
        """Settle a message that no receiver holds, so that it is not delivered any more."""
        batch = state.in_flight.get(offset) or state.released.get(offset)
        if batch is None:
            self._tables.skip(state, [offset])
        else:
            self._settle(state, ACK, batch, [offset])

    def _settle(
        self, state: QueueState, kind: str, batch: Batch, offsets: Sequence[int], reason: Reason | None = None
    ) -> None:
        # Logged before memory changes, so that a replay of the log always makes the same.
        self._tables.log_settled(state, kind, batch, offsets, reason)
        state.settle(batch, offsets)
        self._tables.commit(state)

    def _batch(self, state: QueueState, claim: Claim) -> Batch | None:
        """Return the batch in which the claim's delivery is in flight, or None."""
        batch = state.in_flight.get(claim.offset)
        if batch is None:
            return None
        if batch.moved is None:
            return batch if batch.pop_time_ms == claim.pop_time_ms else None
        return batch if batch.times(claim.offset)[0] == claim.pop_time_ms else None

    def _is_done(self, state: QueueState, claim: Claim) -> bool:
        """Return True if a delivery not in flight was acknowledged, as far as known, and not redelivered."""
        offset = claim.offset
        if offset in state.in_flight or offset in state.released or offset >= state.cursor:
            return False
        return offset not in state.revived

    def _need(self, state: QueueState, claim: Claim) -> Batch:
        batch = self._batch(state, claim)
        if batch is None:
            raise expired([claim.text])
        return batch

    def visit(self, state: QueueState, now_ms: int) -> None:
        """Redeliver a chunk of the visible messages, and announce the time of the next.
        If a put fails its error is raised, and the other messages stay in flight and are tried again."""
        batches = state.timeline.take(now_ms, 1)
        if batches:
            batches += state.timeline.take(now_ms, min(_CHUNK - 1, _COPIES // batches[0].count))
        try:
            self._redeliver(state, batches, now_ms)
            state.backoff_ms = 0
        except BaseException:
            state.backoff_ms = min(_BACKOFF_MAX_MS, max(_BACKOFF_MIN_MS, 2 * state.backoff_ms))
            for batch in batches:
                if batch.left:
                    state.timeline.add(now_ms + state.backoff_ms, batch)
            raise
        finally:
            self._tables.announce_first(state)

    def _redeliver(self, state: QueueState, batches: list[Batch], now_ms: int) -> None:
        due = [
            (offset, batch)
            for batch in dict.fromkeys(batches)
            # Usually all of a batch: then nothing is asked of each message, of which there may be a million.
            for alike in [batch.moved is None and not state.released and batch.is_visible(batch.start, now_ms)]
            for offset in batch.open_offsets()
            if alike or (batch.is_visible(offset, now_ms) and state.in_flight.get(offset) is batch)
        ]
        due.sort(key=itemgetter(0))
        moved = 0
        copies: list[Copy] = []
        sources: list[tuple[int, Batch]] = []
        done: dict[Batch, list[int]] = {}
        stay: dict[Batch, list[int]] = {}
        if state.reasons:
            for offset, batch in due:
                if state.is_given_back(batch, offset):
                    stay.setdefault(batch, []).append(offset)
            due = [(offset, batch) for offset, batch in due if not state.is_given_back(batch, offset)]

        def move(offset: int, message: Message | None, batch: Batch) -> None:
            ended = done if self._move(state, offset, message, batch) else stay
            ended.setdefault(batch, []).append(offset)

        if any(batch.invisible_ms > 0 for batch in batches):
            late = [offset for offset, batch in due if batch.invisible_ms > 0 and offset not in state.reasons]
            self._tables.note_expired(state.key, late)
        try:
            messages = self._tables.messages(state.key, [offset for offset, _ in due])
            while (at := len(sources) + moved) < len(due):
                if count := self._plain_copies(state, messages, due, at, copies):
                    sources += due[at : at + count]
                    continue
                (offset, batch), message = due[at], messages[at]
                if message is None or (properties := self._properties(state, message, batch)) is None:
                    move(offset, message, batch)
                    moved += 1
                    continue
                copies.append((message, *self._retry_queue(state), properties))
                sources.append((offset, batch))
            at = 0
            while at < len(copies):
                try:
                    count = self._tables.parts.router.copy_many(copies[at : at + _COPIES], attempts=1)
                except InvalidMessageError:  # of the first copy: `_move` finds the reason and handles it
                    move(sources[at][0], copies[at][0], sources[at][1])
                    at += 1
                    continue
                for batch, stored in groupby(sources[at : at + count], itemgetter(1)):
                    done.setdefault(batch, []).extend([offset for offset, _ in stored])
                at += count
        finally:  # settled after the copies are in the log: a crash between the two makes a second copy, and loses none
            for batch, offsets in done.items():
                for reason, some in _by_reason(state, batch, offsets):
                    self._settle(state, REVIVE, batch, some, reason)
                state.note_revived(offsets)
            for batch, offsets in stay.items():
                self._tables.log_settled(state, GIVE, batch, offsets)
                state.release(batch, offsets)
                self._tables.waiters.wake_one(*state.key)

    def move_all(self, state: QueueState) -> None:
        """Copy every unsettled message to the retry topic, to be delivered at its time.
        For a group that reads the queue from now on. Otherwise it would read from the first of them, and get the
        acknowledged messages after it again."""
        for offset, batch in sorted((state.in_flight | state.released).items()):
            message, is_free = self._tables.message(state.key, offset), offset in state.released
            visible_ms = 0 if is_free else batch.visible_at(offset)
            unseen = is_free or state.is_given_back(batch, offset)
            if not self._move(state, offset, message, batch, visible_ms, unseen=unseen):
                break  # the group reads from this message on
            self._settle(state, REVIVE, batch, [offset])

    def _plain_copies(
        self,
        state: QueueState,
        messages: list[Message | None],
        due: Sequence[tuple[int, Batch]],
        at: int,
        copies: list[Copy],
    ) -> int:
        """Append copies of the messages from index `at` on that get the same new properties, by compiled code.
        Returns their number. At the first other one it stops, for `_properties`."""
        group, begun, message = state.key.group, self._tables.begun, messages[at]
        limit = self._tables.limit(group)
        last = math.inf if limit is None else limit - 1
        if kernel is None or state.is_retry or (begun is not None and group in begun.suspects.left):
            return 0  # a message in a retry topic has its pop time already
        if message is None or message.reconsume_times >= last:
            return 0
        (offset, batch), some = due[at], [message]
        reason = _reason(state, batch, offset)
        first, properties = (batch.pop_time_ms, reason.text), {FIRST_POP_TIME: str(batch.pop_time_ms)}
        set_reason(properties, RETRY_REASON, reason)
        suffixes = {b"": (*self._retry_queue(state), encode_properties(properties))}
        if not kernel.restore(some, 0, PAIR_END, suffixes, _CHANGED, copies):
            return 0  # before the others are looked at, which are often like it
        for message, (offset, batch) in zip(messages[at + 1 : at + _COPIES], due[at + 1 : at + _COPIES], strict=True):
            new = batch.pop_time_ms, _reason(state, batch, offset).text
            if message is None or message.reconsume_times >= last or new != first:
                break
            some.append(message)
        return 1 + int(kernel.restore(some, 1, PAIR_END, suffixes, _CHANGED, copies))

    def _properties(self, state: QueueState, message: Message, batch: Batch) -> bytes | None:
        """Return the properties of a copy for the next attempt, or None if `_move` must handle the message.
        Then it was the last attempt, or the handler's process was killed, or the properties are too long."""
        limit = self._tables.limit(state.key.group)
        if (limit is not None and message.attempt >= limit) or self._tables.ended_process(state.key, message.offset):
            return None
        try:
            return encode_properties(_retry_properties(message, batch, state))
        except InvalidMessageError:
            return None

    def _retry_queue(self, state: QueueState) -> tuple[str, int]:
        """Return (retry topic, queue id) for copies of the queue's messages. The topic is created if it is new."""
        key, parts = state.key, self._tables.parts
        if state.is_retry:
            return key.topic, key.queue_id
        queue_id = retry_queue(parts.topics.get(key.topic), key.queue_id)
        topic = pop_retry_topic(key.group, key.topic, parts.config.pop_retry_version)
        parts.topics.ensure_queues(topic, queue_id + 1)
        parts.offsets.begin(QueueKey(key.group, topic, queue_id))
        return topic, queue_id

    def _move(
        self,
        state: QueueState,
        offset: int,
        message: Message | None,
        batch: Batch,
        visible_ms: int = 0,
        *,
        unseen: bool = False,
    ) -> bool:
        """Append the copy for the next attempt at `visible_ms`, or the dead letter after the last one.
        The attempt of an `unseen` message has not ended. Returns False if a copy would be too long. Then the message is
        redelivered from its own queue."""
        tables, key = self._tables, state.key
        if message is None:
            tables.lost(state, offset)
            return True
        limit = None if unseen else tables.limit(key.group)
        attempts = message.reconsume_times + (not unseen)
        try:
            if limit is not None and attempts >= limit:
                tables.file_dead_letter(key.group, message, tables.last_reason(key, offset, attempts, limit))
                tables.comes_again(key, offset, None)
                return True
            (topic, queue_id), properties = self._retry_queue(state), _retry_properties(message, batch, state)
            if visible_ms > (now_ms := tables.clock.now_ms()):
                latest_ms = now_ms + milliseconds(tables.parts.config.max_delay, "max_delay")
                properties[TIMER_DELIVER_MS] = str(min(visible_ms, latest_ms))
            try:
                copy = tables.parts.router.copy(message, topic, queue_id, properties, reconsume_times=attempts)
                tables.comes_again(key, offset, copy)
            except InvalidMessageError as error:
                # A later try would fail, too, because the properties leave no room for those of a copy.
                tables.file_dead_letter(key.group, message, Reason(f"cannot be retried: {error}"))
        except InvalidMessageError as error:
            _log.error("message %d of %s is too long for a copy and stays in its queue (%s)", offset, key, error)
            return False
        return True

    def rewrite(self, state: QueueState, batch: Batch) -> None:
        """Append the open rest of an old batch at the log end, so that a replay may begin after its old record."""
        released = {offset for offset in batch.open_offsets() if state.released.get(offset) is batch}
        alike: dict[tuple[int, int, bool], list[int]] = {}
        for offset in batch.open_offsets():
            alike.setdefault((*batch.times(offset), state.holds(batch, offset)), []).append(offset)
        for (pop_time_ms, invisible_ms, local), offsets in alike.items():
            new = self._tables.log_batch(state, offsets, pop_time_ms, invisible_ms, state.cursor, local=local)
            state.replace(new, offsets)
            for offset in offsets:
                if (reason := state.reason(batch, offset)) is not None:
                    self._tables.log_change(state, new, offset, (pop_time_ms, invisible_ms), reason)
            if free := [offset for offset in offsets if offset in released]:
                self._log.put_settled(GIVE, new.name, free)
                state.release(new, free)
        self._tables.announce_first(state)


def _by_reason(state: QueueState, batch: Batch, offsets: list[int]) -> list[tuple[Reason, list[int]]]:
    """Return (reason, offsets) of deliveries that end. Its text is empty if their own records have it, or if their time
    has run out. Nothing else lets a delivery end before it began."""
    own, moved = Reason(holder=state.holder(offsets[0])), batch.moved or ()  # one holder of all of them
    found: dict[Reason, list[int]] = {}
    for offset in offsets:
        known = batch.invisible_ms > 0 or offset in moved or offset in state.reasons
        found.setdefault(own if known else REOPENED, []).append(offset)
    return [*found.items()]


def _reason(state: QueueState, batch: Batch, offset: int) -> Reason:
    return state.reason(batch, offset) or EXPIRED


def _retry_properties(message: Message, batch: Batch, state: QueueState) -> dict[str, str]:
    properties = kept(message.stored_properties(), NOT_REDELIVERED)
    properties.setdefault(FIRST_POP_TIME, str(batch.pop_time_ms))
    set_reason(properties, RETRY_REASON, _reason(state, batch, message.offset))
    return properties
