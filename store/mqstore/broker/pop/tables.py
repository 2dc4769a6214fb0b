"""Shared tables of pop: states of all queues, pop log, order info, agenda of queues that need the housekeeper.

Each state has one lock, and no other lock is taken under the locks here. A state is dropped with its group or topic. It
is then marked `gone` for threads that waited for its lock.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Container, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any

from mqstore.broker.background.context import Parts
from mqstore.broker.background.service import Wake
from mqstore.broker.delay.route import number
from mqstore.broker.pop.batch import ENTRY, Batch, entry_bytes, pop_body, settled_body
from mqstore.broker.pop.orderinfo import OrderInfo, OrderInfoTable, record_of
from mqstore.broker.pop.poplog.journal import ENTRY_ROOM, PopJournal
from mqstore.broker.pop.poplog.log import ACK, LOCAL, POP, PopLog
from mqstore.broker.pop.request import Delivery
from mqstore.broker.pop.state import Counts, QueueState, Standing
from mqstore.broker.reads.filters.filter import Filter
from mqstore.broker.reads.reading import Reads, Start
from mqstore.broker.reads.waiting import Waiter, Waiters
from mqstore.broker.redelivery.attempt_journal import Address, AttemptJournal
from mqstore.broker.redelivery.reason import PROCESS_ENDED, Reason
from mqstore.broker.redelivery.retry import origin_topic
from mqstore.broker.tables.names import DEAD_LETTER, QueueKey
from mqstore.errors import MQStoreError
from mqstore.layout.properties import EXPIRES_MS
from mqstore.log.commitlog import SendReceipt
from mqstore.log.message import Message
from mqstore.log.writing.log_tail import LogTail, QueueTail
from mqstore.logger import log as _log
from mqstore.native import kernel
from mqstore.signalsafe import Lock

if TYPE_CHECKING:
    from mqstore.broker.pop.routes import Route

DeadLetter = Callable[..., object]
"""Signature of `Retries.dead_letter(message, group, reason, *, origin_topic, reconsume_times)`."""
_AHEAD_MAX = 1024
_EXPIRY_LOG_MS = 10_000
_NEAR = 8
"""Maximum distance of messages that are read together."""
_LOOKS = 16
"""Maximum number of reads in which one pop searches for a message that passes its filter."""


class PopFields:
    """Base of `PopTables`."""

    noting: Lock
    journal_map: mmap.mmap | None
    journal_end: int

    def note_entry(self, position: int, body: bytes) -> int:
        """Append an entry to the journal (`journal.py`), and close it if it is full. Return the name of the entry.
        Returns 0 if the journal is closed or the entry does not fit.
        Compiled, no other thread runs meanwhile, so the lock is not needed."""
        with self.noting:
            at, journal = self.journal_end, self.journal_map
            if journal is None or not at:
                return 0
            begin, end = at + ENTRY.size, at + entry_bytes(len(body))
            if end + 8 > len(journal):
                self.journal_end = 0
                return 0
            ENTRY.pack_into(journal, at, 0, position)
            journal[begin : begin + len(body)] = body
            journal[end : end + 8] = bytes(8)
            journal[at : at + 8] = ENTRY.pack(len(body), 0)[:8]  # last: until then the entry is the end
            self.journal_end = end if end + ENTRY_ROOM <= len(journal) else 0
            return -at


if not TYPE_CHECKING and kernel is not None:
    PopFields = kernel.PopFields


class PopTables(PopFields):
    """Tables of one store.
    Compiled methods need the fields up to `_delivery` besides a queue's state. If `_tip` is None they decline."""

    _tip: LogTail | None
    _queue: QueueTail
    """Queue of the pop log."""
    _pop_tail: bytes
    """Bytes after the body of a `ck` record."""
    _ack_tail: bytes
    _max_body: int
    _resets: dict[QueueKey, int]
    """Pending resets of the offset table."""
    _orders: dict[QueueKey, OrderInfo | Batch]
    """Entries of the order info table."""
    _order_changes: int
    """Number of changes to the order info by compiled code."""
    _by_topic: dict[str, dict[str, dict[int, int]]]
    """Committed offsets of the offset table."""
    _offset_changes: int
    """Number of changes to committed offsets by compiled code."""
    _note: Callable[[QueueKey, int], None]
    """`OffsetTable.note`."""
    _freed: Callable[[QueueState], None]
    """Callback for a queue whose last FIFO batch is settled. Called without its lock."""
    _batch: type[Batch]
    _delivery: type[tuple[Any, ...]]
    journal_map: mmap.mmap | None
    """Mapping of the journal, while it has a file."""
    journal_end: int
    """End of the journal's entries. 0 while it is closed."""
    _parked: set[Waiter]
    routes: dict[str, dict[str, Route]]
    """Known routes, by group and topic."""
    slow: Callable[[str, str, int, int, bool], list[Delivery]]
    """`UnorderedQueues.pop_at_once`, with waiting receivers."""

    if TYPE_CHECKING:

        def deliver(
            self, state: QueueState, n: int, invisible_ms: int, topic: str, local: bool, in_order: bool
        ) -> list[Delivery] | None:
            """Pop the next `n` messages, which must be prefetched neighbours. Takes the state's lock.
            Returns None, with nothing changed, for any other case of `pop` of `UnorderedQueues` or `OrderedQueues`."""

        def pop_at_once(self, group: str, topic: str, n: int, invisible_ms: int, order: bool) -> list[Delivery]:
            """Pop like `UnorderedQueues.pop_at_once`."""

        def ack_at_once(self, group: str, topic: str, receipts: Sequence[str]) -> int:
            """Acknowledge like `UnorderedQueues.ack_at_once`."""

        def settle(self, states: list[QueueState], receipts: Sequence[str]) -> int:
            """Acknowledge deliveries from queues of `states`, a list by queue id. Takes the states' locks.
            Returns the number of settled receipts, from the front. It stops, with no further change, at the first
            receipt that `settle` of `UnorderedQueues` or `OrderedQueues` must handle. In order, all receipts
            must be of one batch."""

    def __init__(
        self,
        parts: Parts,
        wake: Wake,
        waiters: Waiters,
        reads: Reads,
        dead_letter: DeadLetter,
        begun: AttemptJournal | None = None,
    ) -> None:
        self.parts = parts
        self.store = parts.store
        self.offsets = parts.offsets
        self.clock = parts.clock
        self.waiters = waiters
        self.reads = reads
        self.dead_letter = dead_letter
        self.begun = begun
        self.log = PopLog(parts.store)
        self.orders = OrderInfoTable()
        self.states: dict[QueueKey, QueueState] = {}
        self.last_counts: list[tuple[QueueKey, Counts]] = []
        """Last counts of dropped states."""
        self.moving = Lock()
        """Held while messages move to another queue, until they are visible there, and while messages are counted.
        Otherwise a count would have a message twice, or not at all. Taken before the lock of a state."""
        self._wake = wake
        self._lock = Lock()
        self._expired, self._expiry_logged_ms = 0, -_EXPIRY_LOG_MS
        """Number of leases that ran out since the last line about them, and the time of that line."""
        self._agenda: list[tuple[int, int, QueueState]] = []
        self._entered: set[tuple[int, QueueState]] = set()
        """Entries of the agenda. A distant delivery is announced again after each visit to its queue."""
        self._serials = count()
        self._promised_ms: int | None = None
        """Time of the housekeeper's next run. None if it only runs when woken."""
        self.noting = Lock()
        self._tip = self.journal_map = None
        self._order_changes = self._offset_changes = self.journal_end = 0
        pop, ack = self.log.ways.get(POP), self.log.ways.get(ACK)
        if pop is not None and ack is not None:
            self._tip, self._queue, self._pop_tail, self._max_body = pop
            self._ack_tail = ack.tail
            self._resets = self.offsets.resets
            self._orders = self.orders.entries
            self._by_topic, self._note = self.offsets.by_topic, self.offsets.note
            self._freed = self.wake_if_free
            self._batch, self._delivery = Batch, Delivery
        self.journal = PopJournal(self, wake, wanted=self._tip is not None)

    def begin(self, slow: Callable[[str, str, int, int, bool], list[Delivery]]) -> None:
        """Serve receivers. Views of the same tables do not, so they must not take the offset table's counter."""
        self.slow, self._parked = slow, self.waiters.parked
        self.offsets.compiled_changes = lambda: self._offset_changes

    # -- states -----------------------------------------------------------------------------------------------------

    def route(self, group: str, topic: str) -> Route | None:
        """Return the route of a group that pops a topic, if it is known."""
        return self.routes.get(group, {}).get(topic)

    def state(self, key: QueueKey) -> QueueState:
        """Return the queue's state, which may not be opened yet."""
        return self.states.get(key) or self.states.setdefault(key, QueueState(key))  # at once, so two threads agree

    def open(self, state: QueueState, start: Start | None = None) -> None:
        """Set the state's position from the committed offset. Call under the state's lock.
        `start` decides the position if the group has no committed offset in the queue."""
        committed = self.offsets.committed(state.key)
        if committed is None:
            committed = self.reads.first_position(state.key, start)
        state.cursor = state.committed = state.written = state.logged = committed
        state.drop_ahead()

    def drop(self, concerned: Callable[[QueueKey], bool]) -> None:
        """Forget the states of a deleted group or topic, and append that to the pop log.
        Otherwise a new group with the same name would inherit them at the next start."""
        for key in self.orders.records():  # also entries that only count attempts, and have no state
            if concerned(key):
                self.orders.put(key, None)
        for key, state in list(self.states.items()):
            if not concerned(key):
                continue
            with state.lock:
                if state.gone:
                    continue
                try:
                    self.log.put_reset(state.head, -1)
                except (MQStoreError, OSError) as error:
                    # Not raised, because the group or topic is deleted already. At worst a new group with this name
                    # gets messages again that were in flight.
                    _log.error("%s: cannot log that %s was deleted (%s)", self.store.path, key, error)
                state.gone = True
                state.clear(-1)
                if (counts := state.counts()) is not None:
                    self.last_counts.append((key, counts))
                self.orders.put(key, None)
                self.states.pop(key, None)

    def reset(self, state: QueueState, offset: int, *, reads: bool = False) -> None:
        """Continue at `offset` with nothing in flight: existing receipts expire. Call under the state's lock.
        `reads`: by offset."""
        self.log.put_reset(state.head, offset, reads=reads)
        state.clear(offset)
        state.reset_ms = state.last_pop_ms or self.clock.now_ms()  # the last pop time before opening is unknown
        self.orders.put(state.key, None)
        self.commit(state)

    def commit(self, state: QueueState) -> None:
        """Pass the queue's committed offset to the offset table. Call under the state's lock."""
        if state.gone:
            return  # it no longer has a position
        committed = state.advance()
        if committed != state.written:
            self.offsets.note(state.key, committed)
            state.written = committed

    def ready(self, state: QueueState, start: Start | None) -> bool:
        """Prepare the state for its next pop. Return False if it is gone. Call under the state's lock."""
        if state.gone:
            return False
        if state.cursor >= 0 and not self.offsets.resets:
            return True
        if state.cursor < 0:
            self.open(state, start)
        offset = self.offsets.resets.get(state.key)
        if offset is not None:
            self.reset(state, offset)  # if this fails the reset stays pending
            self.offsets.take_reset(state.key)
        return True

    def read_ahead(self, state: QueueState, filter: Filter | None) -> bool:  # noqa: A002
        """Prefetch messages from the state's cursor on. Call under the state's lock.
        Returns False if no message up to the queue end, or within the reads of one pop, passes the filter. The cursor
        is then after the messages that were skipped."""
        group, topic, queue_id = state.key
        state.drop_ahead()
        state.ahead_filter = filter
        for _ in range(_LOOKS):
            bounds = self.store.offsets_or_none(topic, queue_id)
            if bounds is None or state.cursor == bounds[1]:
                return False
            result = self.reads.read(
                topic, queue_id, state.cursor, state.ahead_size, filter=filter, group=group, delivers=False
            )
            if result.status == "OFFSET_RESET":
                self.reset(state, result.next_offset)
            elif messages := state.without_skipped(result.messages):
                state.ahead = messages
                state.ahead_next = result.next_offset
                # A receiver that takes all prefetched messages reads on, so the next read fetches more at once.
                state.ahead_size = min(2 * state.ahead_size, _AHEAD_MAX)
                return True
            elif result.next_offset == state.cursor:
                return False
            else:
                state.cursor = result.next_offset
                state.drop_ahead()
        return False

    def skip(self, state: QueueState, offsets: Sequence[int]) -> None:
        """Settle messages that were not delivered yet (delivery#pop-skip). Call under the state's lock."""
        state.skip(offsets, self.log.put_skip(state.head, offsets))

    def unexpired(self, state: QueueState, messages: list[Message], known: Container[int] = ()) -> list[Message]:
        """Return the messages that may be delivered, and settle the expired ones (delivery#pop-expire).
        `known` are the offsets of those that were delivered before. A crash may repeat a dead letter. Only topics with
        the attribute `EXPIRY` need this. It is set before the first such message is put, and takes pops of the topic
        off the compiled path. Call under the state's lock."""
        now_ms = self.clock.now_ms()
        late = [
            message
            for message in messages
            if (at_ms := number(message._stored_property(EXPIRES_MS))) is not None
            and at_ms <= now_ms
            and message.offset not in known
        ]
        if late:
            for message in late if state.expiry == DEAD_LETTER else ():
                self.file_dead_letter(state.key.group, message, Reason("expired"), message.reconsume_times)
            self.skip(state, [message.offset for message in late])
            self.parts.statistics.add("EXPIRED_NUMS", f"{state.key.topic}@{state.key.group}", len(late))
        return state.without_skipped(messages)

    def note_expired(self, key: QueueKey, offsets: Sequence[int]) -> None:
        """Log that leases have run out: one line in 10 s, with the number since the last one."""
        self._expired += len(offsets)
        now_ms = self.clock.now_ms()
        if offsets and not 0 <= now_ms - self._expiry_logged_ms < _EXPIRY_LOG_MS:
            _log.info(
                "group %s did not settle message %d of %s/%d in time, and gets it again (leases that ran out: %d)",
                *(key.group, offsets[0], key.topic, key.queue_id, self._expired),
            )
            self._expired, self._expiry_logged_ms = 0, now_ms

    def lost(self, state: QueueState, offset: int) -> None:
        """Report a delivery whose message was lost before it was settled.
        It is damaged, or retention has deleted it."""
        group, topic, queue_id = state.key
        self.parts.statistics.lost(state.key, 1)
        self.reads.note_loss(state.key, offset, offset + 1)
        self.waiters.wake_one(*state.key)  # a receiver must pop to learn of the loss
        _log.error(
            "%s: message %d of %s/%d, popped by group %s and not acknowledged, can no longer be read",
            *(self.store.path, offset, topic, queue_id, group),
        )

    def ended_process(self, key: QueueKey, offset: int) -> bool:
        """Return True if a handler of the message was running when its process was killed, and none since."""
        address = Address(key.topic, key.queue_id, offset)
        return self.begun is not None and self.begun.suspects.holds(key.group, address)

    def comes_again(self, key: QueueKey, offset: int, copy: SendReceipt | None) -> None:
        """Replace a suspect by its copy. `copy` None: it is a dead letter."""
        if self.begun is not None and self.ended_process(key, offset):
            if copy is not None:
                self.begun.suspects.add(key.group, [Address(*copy.queue, copy.offset)])
            self.begun.suspects.clear(key.group, [Address(key.topic, key.queue_id, offset)])

    def last_reason(self, key: QueueKey, offset: int, attempt: int, limit: int) -> Reason:
        """Return the reason of a dead letter whose last attempt nobody settled."""
        if self.ended_process(key, offset):
            return PROCESS_ENDED
        return Reason(f"attempt {attempt} of {limit} ended without acknowledgement")

    # -- FIFO records -----------------------------------------------------------------------------------------------

    def order(self, state: QueueState) -> OrderInfo | None:
        """Return the queue's FIFO batch, or None. Clears `state.fifo` if its entry was cleaned away."""
        if state.fifo is None:
            return None
        record = self.orders.get(state.key)
        if record is None:
            state.fifo = None
            return None
        state.fifo.left = record.left(state.cursor)
        return record

    def put_order(self, state: QueueState, record: OrderInfo) -> None:
        """Store the record of `state.fifo`, or that batch itself if it says the same.
        Call under the state's lock."""
        assert state.fifo is not None
        state.fifo.left = record.left(state.cursor)
        self.orders.put(state.key, state.fifo if record == record_of(state.fifo) else record)

    def wake_if_free(self, state: QueueState) -> None:
        """Wake a waiting receiver, or one about to wait, if the queue has a message for it. Needs no lock."""
        last = state.fifo
        if (last is None or last.left) and self.orders.blocks(state.key, self.clock.now_ms()):
            return
        key = state.key
        bounds = (0, state.cursor + 1) if state.ahead else self.store.offsets_or_none(key.topic, key.queue_id)
        if bounds is not None and state.cursor < bounds[1]:
            self.waiters.wake_one(*key)

    @property
    def order_version(self) -> int:
        """Version of the order info, including changes by compiled code."""
        return self.orders.version + self._order_changes

    # -- batches ----------------------------------------------------------------------------------------------------

    def log_batch(
        self,
        state: QueueState,
        offsets: Sequence[int],
        pop_time_ms: int,
        invisible_ms: int,
        cursor: int,
        *,
        local: bool,
        more: str = "",
        noted: bool = False,
        before: int | None = None,
    ) -> Batch:
        """Append a batch of the queue to the pop log. `more`: members of its record that make it a FIFO one.
        `noted`: to the journal instead, if it is open. `before`: the cursor before its messages were taken."""
        more += LOCAL if local else ""
        record = state.head, offsets, pop_time_ms, invisible_ms, cursor, more
        name = self._noted(state, pop_body(*record)) if noted else 0
        if not name:
            self.journal.fold(state, before)  # first, because the batches in flight have the order of their names
            name = self.log.put_pop(*record)
            state.logged = cursor
        return Batch(name, offsets, pop_time_ms, invisible_ms, local)

    def log_settled(
        self, state: QueueState, kind: str, batch: Batch, offsets: Sequence[int], reason: Reason | None = None
    ) -> None:
        """Append `ACK`, `REVIVE` or `GIVE` for some offsets of one batch of the queue, in short form if possible."""
        if kind != ACK or not batch.local or not self._noted(state, settled_body(batch.name, offsets)):
            self.log.put_settled(kind, self._name_of(state, batch), offsets, reason)
        elif batch.name >= 0:
            state.acks.update(dict.fromkeys(offsets, batch.name))

    def log_change(
        self, state: QueueState, batch: Batch, offset: int, times: tuple[int, int], reason: Reason | None
    ) -> None:
        """Append a new (pop time, invisible ms) of one message. `reason` says why no receiver holds it any more."""
        self.log.put_change(self._name_of(state, batch), offset, times, reason)
        state.note_reason(batch, offset, reason)

    def _name_of(self, state: QueueState, batch: Batch) -> int:
        """Return the position of the batch in the pop log, to which it is appended if only the journal has it."""
        if batch.name < 0:
            self.journal.fold(state)
        return batch.name

    def _noted(self, state: QueueState, body: bytes) -> int:
        if not self.journal_end or self.store.wakeups.log.failed is not None:
            return 0
        state.noted = True  # first, because a thread that folds all passes over the others
        return self.note_entry(self._queue.next_offset, body)

    # -- messages ---------------------------------------------------------------------------------------------------

    def limit(self, group: str) -> int | None:
        """Return the greatest number of attempts in the group, or None without a limit."""
        config = self.parts.groups.get(group)
        return None if config is None else config.max_attempts

    def message(self, key: QueueKey, offset: int) -> Message | None:
        """Return the message at `offset`, or None if it is gone or damaged."""
        if self.store.offsets_or_none(key.topic, key.queue_id) is None:
            return None
        found = self.store.get(key.topic, key.queue_id, offset, 1).messages
        return found[0] if found and found[0].offset == offset else None

    def messages(self, key: QueueKey, offsets: Sequence[int]) -> list[Message | None]:
        """Return the messages at ascending offsets, None for each that is gone or damaged.
        Neighbours are read together."""
        messages: list[Message | None] = []
        low = (self.store.offsets_or_none(key.topic, key.queue_id) or (0, 0))[0]
        while (i := len(messages)) < len(offsets):
            j = i + 1
            if offsets[-1] - offsets[i] == len(offsets) - j:
                j = len(offsets)  # all neighbours
            while j < len(offsets) and offsets[j] - offsets[j - 1] <= _NEAR:
                j += 1
            begin = max(low, offsets[i])
            read: list[Message] = []
            if begin <= offsets[j - 1]:
                read = self.store.get(key.topic, key.queue_id, begin, offsets[j - 1] + 1 - begin).messages
            if len(read) == j - i == offsets[j - 1] + 1 - begin:
                messages += read  # all neighbours
            else:
                found = {message.offset: message for message in read}
                messages += map(found.get, offsets[i:j])
        return messages

    def move_to_dead_letters(self, state: QueueState, offset: int, reason: Reason, attempts: int | None = None) -> None:
        """Dead-letter the message at `offset`, or report it as lost if it is gone."""
        message = self.message(state.key, offset)
        if message is None:
            self.lost(state, offset)
        else:
            self.file_dead_letter(state.key.group, message, reason, attempts)

    def file_dead_letter(self, group: str, message: Message, reason: Reason, attempts: int | None = None) -> None:
        """Call `dead_letter` of `Retries` for a group that pops. `attempts` None: the next number of the message."""
        origin = origin_topic(message, group)
        self.dead_letter(message, group, reason, origin_topic=origin, reconsume_times=attempts)

    # -- the agenda -------------------------------------------------------------------------------------------------

    def announce(self, state: QueueState, at_ms: int) -> None:
        """Make the housekeeper check the queue at `at_ms` or earlier. Call under the state's lock."""
        if state.announced_ms <= at_ms:
            return
        state.announced_ms = at_ms
        with self._lock:
            if (at_ms, state) not in self._entered:
                self._entered.add((at_ms, state))
                heappush(self._agenda, (at_ms, next(self._serials), state))
            early = self._promised_ms is None or at_ms < self._promised_ms
            if early:
                self._promised_ms = at_ms
        if early:
            self._wake()

    def announce_first(self, state: QueueState) -> None:
        """Announce the time at which the first delivery of the queue must be checked."""
        first_ms = state.timeline.first()
        if first_ms is not None:
            self.announce(state, first_ms)

    def follow_clock(self, now_ms: int) -> None:
        """Announce the queues whose deliveries may be over because the clock was set back."""
        for state in list(self.states.values()):
            with state.lock:
                if not state.gone and (state.follow_clock(now_ms) or state.fifo is not None):
                    self.announce(state, now_ms)

    def due(self, now_ms: int) -> list[QueueState]:
        """Take the queues announced for `now_ms` or earlier from the agenda."""
        found = []
        with self._lock:
            while self._agenda and self._agenda[0][0] <= now_ms:
                at_ms, _, state = heappop(self._agenda)
                self._entered.discard((at_ms, state))
                found.append(state)
        return list(dict.fromkeys(found))

    def promise(self, at_most_ms: int | None) -> int | None:
        """Return the time of the housekeeper's next run: `at_most_ms`, or earlier for a queue."""
        with self._lock:
            times = [self._agenda[0][0]] if self._agenda else []
            if at_most_ms is not None:
                times.append(at_most_ms)
            self._promised_ms = min(times, default=None)
            return self._promised_ms

    # -- measurements -----------------------------------------------------------------------------------------------

    def counts(self) -> Iterator[tuple[QueueKey, Counts]]:
        """Yield the counts of each queue since the last call. Queues without a change are left out."""
        while self.last_counts:
            yield self.last_counts.pop()
        for key, state in list(self.states.items()):
            if state.pops or state.acked:  # read without the lock: a later change is for the next call
                with state.lock:
                    found = state.counts()
                if found is not None:
                    yield key, found

    def standing(self, key: QueueKey) -> Standing | None:
        """Return the standing of the group in a queue.
        Returns None if the group has not popped from the queue since the store was opened and nothing is in flight."""
        state = self.states.get(key)
        if state is None or state.cursor < 0:
            return None
        with state.lock:
            return state.standing(self.order(state), self.clock.now_ms())

    def backlog(self, now_ms: int) -> tuple[int, int, int]:
        """Return (overdue deliveries, ms that the first one has waited, open batches).
        Overdue deliveries wait to be redelivered. An open batch has a message that is not settled."""
        overdue: list[int] = []
        batches = 0
        for state in list(self.states.values()):
            with state.lock:
                batches += state.open_batches
                overdue += state.overdue(now_ms)
        return len(overdue), now_ms - min(overdue, default=now_ms), batches
