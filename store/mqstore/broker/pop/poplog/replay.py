"""Start-up: rebuild the states of pop from the order info file, the offset table and the pop log.

    order info file     FIFO batches at its last save; the only state of order in directories of a Java broker
    + pop log           from the replay position: every batch with an unsettled message, and its later events
    + offset table      position of queues that are not in the log
    + a Java broker's   its deliveries in flight, if there are any, which are first appended to the log (`java.py`)

    cursor     = the offset of the last reset, or of the table; then the largest nx of later records
    committed  = the first offset that is in flight or released, or the cursor

Messages held by receivers of the ended process are visible at once (delivery#pop-replay): the writer lock proves that
these receivers are gone.

If records of the log are lost, a batch may be lost, too. Then a later batch only shows that the cursor has moved. The
messages between count as delivered and not acknowledged, in a new batch.

A FIFO batch that only the file has gets a new `ck`, because acknowledgements name one. A settled batch needs none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from mqstore.broker.pop.batch import SAME_MOMENT_MS, Batch
from mqstore.broker.pop.ordered import OrderedQueues
from mqstore.broker.pop.orderinfo import OrderInfo
from mqstore.broker.pop.poplog.java import JavaTakeover
from mqstore.broker.pop.poplog.log import CHANGE, GIVE, LOOK_BACK, POP, RESET, REVIVE, SKIP, Record
from mqstore.broker.pop.state import MAX_BATCH, QueueState
from mqstore.broker.pop.tables import PopTables
from mqstore.broker.redelivery.attempt_journal import Address, AttemptJournal
from mqstore.broker.redelivery.reason import GIVEN_BACK, PROCESS_ENDED, REOPENED, Reason
from mqstore.broker.tables.names import POP_LOG_KEY, RETRY_PREFIX, QueueKey, is_retry_topic
from mqstore.errors import MQStoreError
from mqstore.logger import log as _log


class Replay:
    """One replay of the log into `tables`, which must be empty except for the order info."""

    def __init__(self, tables: PopTables) -> None:
        self._tables = tables
        self._orders = tables.orders
        self._batches: dict[int, tuple[QueueState, Batch]] = {}
        self._placed: set[QueueKey] = set()
        """Queues whose position only the log has, because a reset was read, and the group has not read since."""
        self._in_order: set[QueueKey] = set()
        """Queues whose order info now comes from the log, not from the file."""
        self._settled_before: dict[int, QueueKey] = {}
        """Queue of each settled batch, which only shows the messages that were redelivered."""
        self._next_position = 0
        self._is_holed = False
        """True if records are missing from the log."""
        self._unsaid: dict[QueueKey, set[int]] = {}
        """Offsets before the start of a later batch that are in no batch of a log with holes."""

    def run(self, *, release: bool) -> None:
        """Rebuild the states. `release`: make deliveries of receivers in the ended process visible again."""
        self.read()
        tables = self._tables
        java = JavaTakeover(tables)
        java.take()
        now_ms = tables.clock.now_ms()
        self._say(now_ms)
        states = [state for state in list(tables.states.values()) if self._settle_position(state)]
        self._fold()
        for state in states:
            if release:
                self._release(state, now_ms)
            state.drop_ahead()
            tables.commit(state)
            tables.announce_first(state)
        self._adopt(now_ms)
        self._begin_retries()
        java.mark()

    def _begin_retries(self) -> None:
        """Begin in retry queues whose first position was not saved before a kill, so that their messages count."""
        parts = self._tables.parts
        for config in parts.topics.configs():
            group, of_topic, _ = config.name.removeprefix(RETRY_PREFIX).partition("+")
            if of_topic and is_retry_topic(config.name) and parts.groups.get(group) is not None:
                for queue_id in config.queue_ids:
                    if parts.store.offsets_or_none(config.name, queue_id) is not None:
                        parts.offsets.begin(QueueKey(group, config.name, queue_id))

    def _fold(self) -> None:
        """Fold the journal of a killed process, sync the log, as recovery does, and remove the file."""
        tables = self._tables
        tables.journal.base = tables.offsets.committed(POP_LOG_KEY) or 0
        try:
            if any(state.noted for state in tables.states.values()):
                tables.journal.fold_all()
                tables.store.flush()
            tables.journal.remove()  # if the log was cut, a later replay would take its entries for new messages
        except (MQStoreError, OSError) as error:
            tables.journal.wanted = False  # it keeps the file
            _log.error("%s: the journal of pops stays in use (%s)", tables.store.path, error)

    def look(self) -> None:
        """Rebuild the states as `run` will, for a view of a store.
        Nothing is released, written, or taken over from a Java broker."""
        self.read()
        for state in list(self._tables.states.values()):
            self._settle_position(state)
        for key, record in self._in_file():
            state = self._state(key)
            if state.fifo is None and record.unacked():
                state.fifo = Batch(-1, record.offsets, record.pop_time_ms, record.invisible_ms or 0, False)
            if state.fifo is not None:
                state.cursor = max(state.cursor, record.next_offset())

    def read(self) -> None:
        """Read the log into the states, before anything is concluded from them."""
        tables = self._tables
        begin = self._next_position = tables.offsets.committed(POP_LOG_KEY) or 0
        of_queue = {POP: self._pop, RESET: self._reset, SKIP: self._skip}
        for record in self._records(begin):
            try:
                if 0 <= record.position < begin:
                    self._before(record)
                    continue
                if record.position >= 0:
                    self._is_holed |= record.position > self._next_position
                    self._next_position = record.position + 1
                if record.kind in of_queue:
                    of_queue[record.kind](record.position, record.value)
                elif (found := self._batches.get(record.value["k"])) is None:
                    self._before(record)  # a batch from before the replay position, entirely settled
                elif found[0].fifo is not found[1]:
                    if record.position < 0 <= found[1].name:
                        found[0].acks.update(dict.fromkeys(record.value["o"], found[1].name))
                        found[0].noted = True
                    self._event(*found, record.kind, record.value)
                else:
                    self._event_in_order(*found, record.kind, record.value)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                # mqstore never writes such a record, so it is skipped. At worst this redelivers a message.
                _log.error("record %d of the pop log is invalid (%r): %.200s", record.position, error, record.value)

        for state in tables.states.values():
            if state.noted:  # batches that are only in the journal are last, as before the kill
                named = sorted(state.in_flight.items(), key=lambda item: item[1].name < 0)
                state.in_flight = dict(named)

    def _records(self, begin: int) -> Iterator[Record]:
        """Yield the records of the log, and between them those of the journal. The journal is read first: it may be
        folded meanwhile. Entries before the replay position are from before a power cut took back that position."""
        entries = deque(entry for entry in self._tables.journal.read() if entry[0] >= begin)
        for record in self._tables.log.records(max(0, begin - LOOK_BACK)):
            while entries and entries[0][0] <= record.position:
                yield entries.popleft()[1]
            yield record
        yield from (record for _, record in entries)

    # -- contents of records ----------------------------------------------------------------------------------------

    def _pop(self, position: int, value: dict[str, Any]) -> None:
        key = QueueKey(value["c"], value["t"], value["q"])
        start, pop_time_ms, invisible_ms, cursor = value["so"], value["pt"], value["it"], value["nx"]
        distances = value["d"]
        # The invisible time is negative if the clock was set back and the batch was relocated afterwards.
        numbers = (key.queue_id, start, pop_time_ms, abs(invisible_ms), cursor, *distances)
        if not distances or not _are_numbers(numbers):
            raise ValueError("the batch has no messages, or an invalid number")
        if type(key.topic) is not str or type(key.group) is not str:
            raise ValueError("topic and group of the batch must be names")
        offsets = [start + distance for distance in distances]
        batch = Batch(position, offsets, pop_time_ms, invisible_ms, value.get("l") == 1)
        state = self._state(key)
        self._batches[position] = state, batch
        if position < 0:
            state.noted = True
        else:
            state.logged = cursor
        if value.get("f") == 1:
            state.last_pop_ms = max(state.last_pop_ms, pop_time_ms)
            self._pop_in_order(state, batch, offsets, value)
            return
        if self._is_holed and 0 <= state.cursor < start:
            low, high = self._tables.store.offsets_or_none(key.topic, key.queue_id) or (0, 0)
            self._unsaid.setdefault(key, set()).update(range(max(low, state.cursor), min(high, start)))
        elif key in self._unsaid:  # an earlier opening has logged it
            self._unsaid[key].difference_update(offsets)
        state.replace(batch, offsets)
        if value.get("cm"):  # it only shows the cursor (`ACKED`)
            state.settle(batch, offsets[:1])
        state.cursor = max(state.cursor, cursor)

    def _say(self, now_ms: int) -> None:
        """Append batches for lost records to the log, because later acknowledgements must name one."""
        for key, lost in self._unsaid.items():
            lost -= self._state(key).skipped.keys()
            if not lost or self._tables.parts.groups.get(key.group) is None:
                continue
            _log.error(
                "the pop log has lost records: %d messages of %s/%d, perhaps delivered already, are delivered to %s",
                *(len(lost), key.topic, key.queue_id, key.group),
            )
            state, ordered = self._state(key), sorted(lost)
            for at in range(0, len(lost), MAX_BATCH):
                offsets = ordered[at : at + MAX_BATCH]
                batch = self._tables.log_batch(state, offsets, now_ms, 0, offsets[-1] + 1, local=True)
                state.replace(batch, offsets)

    def _pop_in_order(self, state: QueueState, batch: Batch, offsets: list[int], value: dict[str, Any]) -> None:
        there = self._orders.get(state.key)
        state.fifo = batch
        state.cursor = offsets[0]
        # The file may be newer than the batches read here: saved after its batch was logged, or by a Java broker. The
        # pop times decide, unless a clock was set back. A batch that begins after the file's batch was popped after
        # it, and so was everything later in the log. If the file's pop time is ahead of the clock, only the log can
        # decide, which has all of mqstore's batches.
        latest_ms, popped_ms = self._tables.clock.now_ms() + SAME_MOMENT_MS, batch.pop_time_ms
        newer = there is not None and popped_ms < there.pop_time_ms <= latest_ms and there.offsets[-1] >= offsets[0]
        if newer and state.key not in self._in_order:
            return
        self._in_order.add(state.key)
        bits = (1 << len(offsets)) - 1
        acked = value.get("cm", 0)
        suspended = {}
        if there is not None:  # the log does not say since when they have failed
            suspended = {offset: there.suspended[offset] for offset in offsets if offset in there.suspended}
            if (there.pop_time_ms, there.offsets) == (batch.pop_time_ms, tuple(offsets)):
                acked |= there.acked  # a Java broker continued our batch
        record = OrderInfo(
            tuple(offsets),
            batch.pop_time_ms,
            batch.invisible_ms,
            batch.pop_time_ms,
            value.get("a"),
            counts=_numbers(value.get("oc")),
            visible_ms=_numbers(value.get("ot")),
            acked=acked & bits,
            released=value.get("rel", 0) & bits,
            suspended=suspended,
        )
        self._orders.put(state.key, record)

    def _event(self, state: QueueState, batch: Batch, kind: str, value: dict[str, Any]) -> None:
        """Apply a settlement or a change to messages of a batch without order."""
        if kind == CHANGE:
            offset, pop_time_ms, invisible_ms, reason = _change_of(value)
            state.last_pop_ms = max(state.last_pop_ms, pop_time_ms)
            if state.in_flight.get(offset) is batch:
                state.note_reason(batch, offset, reason)
                state.change(batch, offset, pop_time_ms, invisible_ms)
        elif kind == GIVE:
            state.release(batch, value["o"])
        else:
            state.settle(batch, value["o"])
            if kind == REVIVE:
                state.note_revived(value["o"])

    def _event_in_order(self, state: QueueState, batch: Batch, kind: str, value: dict[str, Any]) -> None:
        """Apply a settlement or a change to messages of the queue's last batch."""
        if kind == CHANGE:
            offset, pop_time_ms, invisible_ms, reason = _change_of(value)
            state.last_pop_ms = max(state.last_pop_ms, pop_time_ms)
            state.note_reason(batch, offset, reason)
        record = self._orders.get(state.key)
        if record is None or record.pop_time_ms != batch.pop_time_ms:
            return  # the entry is of another batch
        if kind == CHANGE:
            record = record.moved([offset], pop_time_ms + invisible_ms, reason)
        elif kind == GIVE:
            at_ms = min(batch.pop_time_ms, self._tables.clock.now_ms())  # a pop time may be ahead of the clock
            record = record.moved(value["o"], at_ms, GIVEN_BACK)
        else:
            record = record.acknowledged(value["o"])
            state.cursor = max(state.cursor, record.next_offset())
        self._orders.put(state.key, record)

    def _reset(self, position: int, value: dict[str, Any]) -> None:
        key, offset = QueueKey(value["c"], value["t"], value["q"]), value["o"]
        if not _are_numbers([offset]):
            raise ValueError("the offset of the reset is not a number")
        state = self._state(key)
        self._unsaid.pop(key, None)
        state.clear(offset)
        state.reset_ms = state.last_pop_ms or self._tables.clock.now_ms()
        self._orders.put(key, None)
        if offset < 0:
            self._placed.discard(key)
            del self._tables.states[key]
        elif value.get("r") == 1:
            self._placed.discard(key)
        else:
            self._placed.add(key)

    def _skip(self, position: int, value: dict[str, Any]) -> None:
        key, offsets = QueueKey(value["c"], value["t"], value["q"]), value["o"]
        if not _are_numbers(offsets):
            raise ValueError("the skipped offsets are not numbers")
        self._state(key).skip(offsets, position)

    def _before(self, record: Record) -> None:
        """Note the redelivered messages of a settled batch, which may be acknowledged too late."""
        value = record.value
        if record.kind == POP and value.get("f") != 1:
            self._settled_before[record.position] = QueueKey(value["c"], value["t"], value["q"])
        elif record.kind == REVIVE and (key := self._settled_before.get(value["k"])) is not None:
            self._state(key).note_revived(value["o"])

    def _state(self, key: QueueKey) -> QueueState:
        state = self._tables.state(key)
        if state.cursor < 0 and key not in self._placed:
            state.cursor = self._tables.offsets.committed(key) or 0
        return state

    # -- conclusions ------------------------------------------------------------------------------------------------

    def _settle_position(self, state: QueueState) -> bool:
        """Set the queue's position from log and table. Return False if its group, and so the state, is deleted."""
        tables, key = self._tables, state.key
        group, topic, queue_id = key
        if tables.parts.groups.get(group) is None:
            del tables.states[key]
            self._orders.put(key, None)
            return False
        low = tables.offsets.start_of(topic, queue_id)
        high = (tables.store.offsets_or_none(topic, queue_id) or (0, 0))[1]
        table = tables.offsets.committed(key)
        if key not in self._placed and table is not None:
            state.cursor = max(state.cursor, table)
        state.cursor = max(min(state.cursor, high), min(low, high))
        state.skipped = {offset: name for offset, name in state.skips().items() if offset < high}
        # Do not wait for messages of a deleted topic, or messages that only a damaged log names.
        for held in (state.in_flight, state.released):
            if held and not low <= min(held) <= max(held) < high:
                for batch in dict.fromkeys(held.values()):
                    state.settle(batch, [offset for offset in batch.open_offsets() if not low <= offset < high])
        state.committed = min(chain(state.in_flight, state.released), default=state.cursor)
        return True

    def _release(self, state: QueueState, now_ms: int) -> None:
        """End the deliveries of receivers that ended with their process, as if their time had run out."""
        begun = self._tables.begun
        if begun is not None and state.key.group in begun.groups:
            self._release_fetched(state, begun, now_ms)
        for batch in dict.fromkeys(state.in_flight.values()):
            if batch.local:
                moved = (batch.moved or {}).items()
                batch.moved = {each: times for each, times in moved if state.reason(batch, each)} or None
                batch.invisible_ms = min(0, now_ms - batch.pop_time_ms)
                state.timeline.add(batch.pop_time_ms + batch.invisible_ms, batch)
        record = self._orders.get(state.key)
        if record is not None and state.fifo is not None and state.fifo.local:
            held = [o for o in record.unacked() if state.holds(state.fifo, o) and record.visible_at(o) > now_ms]
            self._orders.put(state.key, record.moved(held, now_ms))

    def _release_fetched(self, state: QueueState, begun: AttemptJournal, now_ms: int) -> None:
        """Release messages that were only fetched, and record a failed attempt for the others.
        Then later openings do not need the attempt journal. A push consumer renews its deliveries, so their time had
        not run out when the process ended, however late it is now."""
        for batch in dict.fromkeys(state.in_flight.values()):
            held = [o for o in batch.open_offsets() if state.in_flight.get(o) is batch and state.holds(batch, o)]
            fetched, ended = _parted(state.key, held, begun)
            times = batch.pop_time_ms, min(0, now_ms - batch.pop_time_ms)
            if fetched:
                self._tables.log_settled(state, GIVE, batch, fetched, REOPENED)
                state.release(batch, fetched)
            for offset in ended:
                self._tables.log_change(state, batch, offset, times, PROCESS_ENDED)
                state.change(batch, offset, *times)
        record = self._tables.order(state)
        if record is None or state.fifo is None:
            return
        held = [o for o in record.unacked(state.cursor) if state.holds(state.fifo, o)]
        fetched, ended = _parted(state.key, held, begun)
        if fetched:
            self._tables.log.put_settled(GIVE, state.fifo.name, fetched, REOPENED)
            record = record.moved(fetched, now_ms, GIVEN_BACK)
        for offset in ended:
            times = record.pop_time_ms, now_ms - record.pop_time_ms
            self._tables.log_change(state, state.fifo, offset, times, PROCESS_ENDED)
        if held:
            self._orders.put(state.key, record.moved(ended, now_ms))

    def _in_file(self) -> Iterator[tuple[QueueKey, OrderInfo]]:
        """Yield the FIFO batches of existing groups in the order info."""
        for key, record in self._orders.records().items():
            if record.pop_time_ms != 0 and record.offsets and self._tables.parts.groups.get(key.group) is not None:
                yield key, record

    def _adopt(self, now_ms: int) -> None:
        """Take over the FIFO batches of the file: mark settled messages, append the others to the log."""
        tables = self._tables
        self._orders.cut(lambda topic, queue_id: (tables.store.offsets_or_none(topic, queue_id) or (0, 0))[1])
        for key, known in self._in_file():
            state = tables.state(key)
            if state.cursor < 0:
                tables.open(state)
            # The offset table is newer than the file, so offsets before its committed offset are acknowledged.
            settled = sum(1 << i for i, offset in enumerate(known.offsets) if offset < state.cursor)
            record = known._replace(acked=known.acked | settled)
            self._orders.put(key, record)
            if state.fifo is None and record.unacked():
                OrderedQueues(tables).rewrite(state)
            state.cursor = max(state.cursor, record.next_offset()) if state.fifo is not None else state.cursor
            tables.commit(state)
            if tables.order(state) is not None and record.unacked():
                tables.announce(state, now_ms)


def count_begun(tables: PopTables, begun: AttemptJournal) -> bool:
    """Count an attempt of each message whose handler had started in the queue model.
    Returns True if there was one."""
    counted = False
    for group, addresses in begun.groups.items():
        ended = []
        for address in addresses if tables.parts.groups.get(group) is not None else ():
            topic, queue_id, offset = address
            key = QueueKey(group, topic, queue_id)
            state = tables.states.get(key)
            record = None if state is None else tables.order(state)
            passed = max(tables.offsets.committed(key) or 0, 0 if state is None else state.cursor)
            if offset < passed or (record is not None and offset in record.offsets):
                continue  # settled, or a batch has its outcome
            attempts = tables.orders.attempts(key).get(offset, 0) + 1
            tables.orders.note_attempt(key, offset, attempts, tables.clock.now_ms())
            ended.append(address)
        begun.suspects.add(group, ended)
        counted |= bool(ended)
    return counted


def _parted(key: QueueKey, held: list[int], begun: AttemptJournal) -> tuple[list[int], list[int]]:
    """Return (offsets that were only fetched, offsets whose handler had started).
    The latter become suspects."""
    noted = begun.groups[key.group]
    ended = [offset for offset in held if Address(key.topic, key.queue_id, offset) in noted]
    begun.suspects.add(key.group, [Address(key.topic, key.queue_id, offset) for offset in ended])
    return [offset for offset in held if offset not in ended], ended


def _change_of(value: dict[str, Any]) -> tuple[int, int, int, Reason | None]:
    """Return (offset, pop time, invisible ms, reason why no receiver holds the delivery) of a change.
    The invisible time is negative if the clock was set back. Raises ValueError unless all are numbers of 64 bits."""
    offset, pop_time_ms, invisible_ms = value["o"], value["pt"], value["it"]
    if (
        not _are_numbers([offset, pop_time_ms])
        or type(invisible_ms) is not int
        or not _are_numbers([abs(invisible_ms)])
    ):
        raise ValueError("the change of a visible time has a wrong number")
    return offset, pop_time_ms, invisible_ms, Reason.of(value) if value.get("n") == 1 else None


def _are_numbers(values: Sequence[Any]) -> bool:
    """Return True if all values are in the range of an offset or a time."""
    return {*map(type, values)} <= {int} and -1 <= min(values, default=0) <= max(values, default=0) < 1 << 63


def _numbers(value: dict[str, int] | None) -> dict[int, int] | None:
    return None if value is None else {int(key): number for key, number in value.items()}
