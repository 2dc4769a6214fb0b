"""Takeover of deliveries that a Java broker had in flight (delivery#java-pop).

A Java broker moves a group's offset when it pops. Only its checkpoints show that a message before the offset is not
acknowledged. They are ordinary records, which wait in the timer topic until they are nearly due:

    rmq_sys_wheel_timer  --when due-->  rmq_sys_REVIVE_LOG_<cluster>, some queues  --read by its group-->  redelivered

    TAGS   body                                                     due
    ck     t c q so pt it n d [offset - so ...] bm bn [rp]          pt + it - 1 s     n messages were popped
    ack    t c q so pt bn ao                                        pt + it           one of them was acknowledged
    bAck   t c q so pt bn aol [offset ...]                          pt + it           several

A delivery is identified by (t, c, q, so, pt, bn). Opening takes over, in these steps:

    read    the records that wait in the timer topic, by Java's own checkpoint of the timer, and those of the revive
            queues that the revive group has not read
    decide  which messages of each checkpoint are in flight: not acknowledged, not redelivered, before the cursor
    take    append one `ck` to our own pop log for each such checkpoint, with its pop time and visible time. From then
            on it is a delivery like ours, with the receipt of the Java broker
    answer  append one `bAck` for each to the timer topic. A Java broker understands only such an acknowledgement. It
            also holds for copies of the checkpoint that a timer delivers later, or twice. One more member, `taken`,
            distinguishes it from a consumer's: messages that were not taken were not consumed
    mark    save the revive group's offsets, together with those of all groups, before anything is delivered

If an opening fails on the way, the marks stay unchanged, and the next one finds the taken deliveries in the pop log.

A cursor is moved over offsets that checkpoints name without a gap, because the file of offsets is seconds old after a
crash. Nothing is taken beyond a gap: no record proves that those messages were popped, so they are delivered as new.

Two kinds of deliveries are not seen: those that were only in the memory of a Java broker when it was killed
(`enablePopBufferMerge`), and those that its other pop engine keeps in RocksDB (`popConsumerKVServiceEnable`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from mqstore import arrays as np
from mqstore.broker.delay.route import number, slot_of
from mqstore.broker.delay.timercheck import TimerCheck
from mqstore.broker.pop.tables import PopTables
from mqstore.broker.tables.names import TIMER_TOPIC, QueueKey, popped_topic
from mqstore.errors import MQStoreError
from mqstore.layout.consumequeue import LAST_ADDRESS
from mqstore.layout.jsontext import decode
from mqstore.layout.properties import REAL_QID, REAL_TOPIC, TAGS, TIMER_DELIVER_MS, TIMER_OUT_MS, UNIQ_KEY
from mqstore.log.directory.names import is_path_safe
from mqstore.log.message import Message
from mqstore.log.reading.tagfilter import TagFilter
from mqstore.logger import log as _log

_REVIVE_PREFIX: Final = "rmq_sys_REVIVE_LOG_"
"""Prefix of a revive topic's name, before the name of the cluster."""
_REVIVE_GROUP: Final = "CID_RMQ_SYS_REVIVE_GROUP"
"""Its committed offset is, as in Java, the last record that is done, not the next to read. The one for the timer topic
is ours: the first record there that still waits, so that later openings read little."""
_CHECKPOINT, _ACK, _BATCH_ACK = "ck", "ack", "bAck"
_TAKEN = "taken"
"""Member of an acknowledgement that mqstore wrote."""
_CHUNK = 1_024
_I32_MAX, _I64_MAX = 2**31 - 1, 2**63 - 1
_BATCH_MAX = 127
"""Maximum number of messages of a checkpoint, which counts them in a signed byte."""
_LATE_MS = 1_000
"""Number of ms from now at which the answer to an overdue checkpoint is due.
The answer must come after the checkpoint in the queue, whichever broker's timer delivers both."""


class _Marked(TagFilter):
    """Filter for units with the hash of one of the three tags, so that unreadable records are counted."""

    __slots__ = ()

    def apply(self, messages: list[Message]) -> list[Message]:
        return messages


_MARKED = _Marked(frozenset((_CHECKPOINT, _ACK, _BATCH_ACK)))


class _Batch(NamedTuple):
    """Common fields of a checkpoint and its acknowledgements: one pop of one queue."""

    key: QueueKey
    start: int
    pop_time_ms: int


@dataclass(slots=True)
class _Checkpoint:
    """Messages of one pop."""

    batch: _Batch
    broker: str
    invisible_ms: int
    offsets: list[int]
    """Offsets of the delivered messages, ascending."""
    acked: set[int]
    home: tuple[str, int]
    """Revive topic and queue that hold it, or to which the timer will deliver it."""

    @property
    def open_offsets(self) -> list[int]:
        return [offset for offset in self.offsets if offset not in self.acked]


class JavaTakeover:
    """Takeover of a Java broker's deliveries at one opening: `take`, then settle the states, then `mark`."""

    def __init__(self, tables: PopTables) -> None:
        self._tables = tables
        self._parts = tables.parts
        self._store = tables.store
        self._offsets = tables.offsets
        self._topics = [name for name in self._parts.topics.names(system=True) if name.startswith(_REVIVE_PREFIX)]
        self._checkpoints: dict[tuple[_Batch, str], _Checkpoint] = {}
        self._acks: dict[_Batch, list[tuple[str, list[int]]]] = {}
        self._taken: set[tuple[_Batch, str]] = set()
        """Batches that an earlier opening has answered."""
        self._first_waiting: int | None = None
        self._marks: list[tuple[QueueKey, int]] = []
        self._answers: list[_Checkpoint] = []

    # -- the steps --------------------------------------------------------------------------------------------------

    def take(self) -> None:
        """Append the deliveries in flight to the pop log, and add them to the states. Raises the errors of a put.
        Nothing is written for a store from which no Java broker popped."""
        if not self._topics and self._store.manifest.profile != "rocketmq":
            return
        self._read()
        queues: dict[QueueKey, list[_Checkpoint]] = {}
        for checkpoint in self._checkpoints.values():
            queues.setdefault(checkpoint.batch.key, []).append(checkpoint)
        taken = 0
        for key, checkpoints in sorted(queues.items()):
            if self._lives(key):
                taken += self._take_queue(key, checkpoints)
            elif count := sum(len(checkpoint.open_offsets) for checkpoint in checkpoints):
                _log.warning(
                    "%s: %d messages of %s/%d that a Java broker had delivered to group %s are not taken over, "
                    "because the topic or group was deleted",
                    *(self._store.path, count, key.topic, key.queue_id, key.group),
                )
        if taken:
            _log.info("%s: %d deliveries of a Java broker are taken over", self._store.path, taken)

    def mark(self) -> None:
        """Record for the Java broker and the next opening which deliveries are taken. On disk on return.

        Call it after the states have settled, since the same save stores the committed offsets of all groups. Raises
        the errors of a put or a save."""
        now_ms = self._tables.clock.now_ms()
        for checkpoint in self._answers:
            self._answer(checkpoint, now_ms)
        for key, offset in self._marks:
            if self._offsets.committed(key) != offset:
                self._offsets.commit(key, offset)
        if self._marks:
            self._offsets.save()

    # -- read -------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        self._read_timer()
        for topic in self._topics:
            config = self._parts.topics.get(topic)
            for queue_id in range(0 if config is None else config.read_queues):
                bounds = self._store.offsets_or_none(topic, queue_id)
                if bounds is None or not bounds[1]:
                    continue
                key = QueueKey(_REVIVE_GROUP, topic, queue_id)
                last = self._offsets.committed(key)
                begin = max(bounds[0], 0 if last is None else last + 1)
                for message in self._records(topic, queue_id, begin):
                    self._understand(message, message.tag, (topic, queue_id))
                self._marks.append((key, bounds[1] - 1))
        for name in self._taken & self._checkpoints.keys():
            del self._checkpoints[name]
        for (batch, broker), checkpoint in self._checkpoints.items():
            for by, offsets in self._acks.get(batch, ()):
                if not by or not broker or by == broker:
                    checkpoint.acked.update(offsets)

    def _read_timer(self) -> None:
        bounds = self._store.offsets_or_none(TIMER_TOPIC, 0)
        if bounds is None:
            return
        check = TimerCheck(self._store.path / "config" / "timercheck", self._parts.fs, self._parts.config.file_mode)
        progress = check.load()
        key = QueueKey(_REVIVE_GROUP, TIMER_TOPIC, 0)
        begin = max(bounds[0], self._offsets.committed(key) or 0)
        for message in self._records(TIMER_TOPIC, 0, begin):
            properties = message.stored_properties()
            topic, queue_id = properties.get(REAL_TOPIC, ""), number(properties.get(REAL_QID))
            out_ms = number(properties.get(TIMER_OUT_MS))
            if not topic.startswith(_REVIVE_PREFIX) or queue_id is None or out_ms is None:
                continue
            if progress is not None and out_ms < progress.read_ms and message.offset < progress.queue_offset:
                continue  # in its revive queue already
            if self._first_waiting is None:
                self._first_waiting = message.offset
            self._understand(message, properties.get(TAGS), (topic, queue_id))
        if self._topics or self._first_waiting is not None:
            first = bounds[1] if self._first_waiting is None else self._first_waiting
            self._marks.append((key, first))

    def _records(self, topic: str, queue_id: int, begin: int) -> Iterator[Message]:
        """Yield the records of a queue that have one of the three tags.
        Records that cannot be read are counted and logged."""
        store = self._store
        end = (store.offsets_or_none(topic, queue_id) or (0, 0))[1]
        while begin < end:
            result = store.get(topic, queue_id, begin, _CHUNK, tags=_MARKED)
            if result.next_offset <= begin:
                return
            codes: np.NDArray[np.int64] = store.units(topic, queue_id, begin, result.next_offset - begin)["tags_code"]
            known = codes > LAST_ADDRESS  # other codes may match any tag
            lost = int(np.count_nonzero(_MARKED.prefilter(codes) & known)) - len(result.messages)
            if lost:
                _log.error(
                    "%s: %d records of %s/%d between %d and %d cannot be read, so deliveries or acknowledgements of a "
                    "Java broker may be missing; some messages may be delivered again",
                    *(store.path, lost, topic, queue_id, begin, result.next_offset),
                )
            yield from result.messages
            begin = result.next_offset

    def _understand(self, message: Message, tag: str | None, home: tuple[str, int]) -> None:
        """Process one record. A record that cannot be understood is logged and skipped."""
        if tag not in _MARKED.tags:
            return  # another tag with the same hash
        try:
            value = decode(message.body)
            if type(value) is not dict:
                raise ValueError("no JSON object")
            if tag == _CHECKPOINT:
                self._enter(_checkpoint_of(value, home))
            else:
                batch, broker = _batch_of(value)
                if value.get(_TAKEN) == 1:
                    self._taken.add((batch, broker))
                else:
                    self._acks.setdefault(batch, []).append((broker, _acked(value, tag)))
        except (ValueError, MQStoreError) as error:
            _log.error(
                "%s: record %d of %s/%d, a %r of a Java broker's pop, is invalid and skipped (%s)",
                *(self._store.path, message.offset, message.topic, message.queue_id, tag, error),
            )

    def _enter(self, checkpoint: _Checkpoint) -> None:
        if not checkpoint.offsets:
            return  # a filter refused all: the file of offsets has the new offset
        name = checkpoint.batch, checkpoint.broker
        there = self._checkpoints.setdefault(name, checkpoint)
        # The record may be there twice: the timer delivered it twice, or Java failed to redeliver one message and put
        # that again. The record with more messages is complete.
        if len(checkpoint.offsets) > len(there.offsets):
            self._checkpoints[name] = checkpoint

    # -- decide -----------------------------------------------------------------------------------------------------

    def _lives(self, key: QueueKey) -> bool:
        """Return True if topic and group exist.
        If the store has no group at all, the file of groups was lost. Then a group is created, as when it consumes."""
        parts = self._parts
        if parts.topics.get(key.topic) is None or parts.topics.get(popped_topic(key.group, key.topic)) is None:
            return False
        if parts.groups.get(key.group) is not None:
            return True
        if parts.groups.names() or not parts.config.auto_create_groups:
            return False
        try:
            parts.groups.require(key.group)
        except MQStoreError as error:
            _log.error("%s: cannot create group %r (%s)", self._store.path, key.group, error)
            return False
        return True

    def _take_queue(self, key: QueueKey, checkpoints: list[_Checkpoint]) -> int:
        """Take over the deliveries in flight in one queue. Return the number of messages."""
        offsets = self._offsets
        offsets.begin(key)  # the file of offsets may have been lost
        committed = offsets.committed(key) or 0
        cursor = self._cursor(key, committed, checkpoints)
        if cursor > committed:  # without a delivery in flight, no record of our log has the cursor
            offsets.commit(key, cursor)
        taken = 0
        for checkpoint, mine in self._newest(key, cursor, checkpoints):
            taken += len(mine)
            state = self._tables.state(key)
            pop_time_ms, invisible_ms = checkpoint.batch.pop_time_ms, checkpoint.invisible_ms
            state.replace(self._tables.log_batch(state, mine, pop_time_ms, invisible_ms, cursor, local=False), mine)
            state.cursor = max(state.cursor, cursor)
        self._answers += [each for each in checkpoints if each.open_offsets]
        return taken

    def _cursor(self, key: QueueKey, committed: int, checkpoints: Iterable[_Checkpoint]) -> int:
        """Return the next offset to pop: the committed one, moved past checkpoints that follow without a gap."""
        low, high = self._store.offsets_or_none(key.topic, key.queue_id) or (0, 0)
        state = self._tables.states.get(key)
        if state is not None and state.fifo is not None:
            return committed  # only its order info knows the next offset
        cursor = max(committed, low)
        for checkpoint in sorted(checkpoints, key=lambda each: each.batch.start):
            if checkpoint.batch.start <= cursor:
                cursor = max(cursor, min(checkpoint.offsets[-1] + 1, high))
        return cursor

    def _newest(
        self, key: QueueKey, cursor: int, checkpoints: Iterable[_Checkpoint]
    ) -> Iterator[tuple[_Checkpoint, list[int]]]:
        """Yield each checkpoint and its offsets in flight, oldest first.
        If a message was delivered several times, only its last delivery counts. It does not count if our log has it, or
        a later one."""
        low = self._offsets.start_of(key.topic, key.queue_id)
        ordered = sorted(checkpoints, key=lambda each: each.batch.pop_time_ms)
        last = {offset: each for each in ordered for offset in each.offsets if low <= offset < cursor}
        state = self._tables.states.get(key)
        for each in ordered:
            mine = []
            for offset in each.open_offsets:
                there = None if state is None else state.in_flight.get(offset, state.released.get(offset))
                known = there is not None and there.times(offset)[0] >= each.batch.pop_time_ms
                if last.get(offset) is each and not known:
                    mine.append(offset)
            if mine:
                yield each, mine

    # -- answer -----------------------------------------------------------------------------------------------------

    def _answer(self, checkpoint: _Checkpoint, now_ms: int) -> None:
        """Acknowledge the whole checkpoint for the reader of the revive queue.
        Messages that were not taken are not lost: they are after the cursor, or in a later checkpoint."""
        topic, queue_id = checkpoint.home
        key, start, pop_time_ms = checkpoint.batch
        broker = checkpoint.broker
        value: dict[str, Any] = {
            "ao": -1,
            "aol": checkpoint.offsets,
            "bn": broker,
            "c": key.group,
            "pt": pop_time_ms,
            "q": key.queue_id,
            "so": start,
            "t": key.topic,
            _TAKEN: 1,
        }
        due_ms = max(pop_time_ms + checkpoint.invisible_ms, now_ms + _LATE_MS)
        properties = {
            TAGS: _BATCH_ACK,
            UNIQ_KEY: f"{key.topic}@{key.queue_id}@-1@{key.group}@{pop_time_ms}@{broker}@{_ACK}",
            REAL_TOPIC: topic,
            REAL_QID: str(queue_id),
            TIMER_DELIVER_MS: str(due_ms),
            TIMER_OUT_MS: str(slot_of(due_ms)),
        }
        body = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
        self._parts.router.append(TIMER_TOPIC, 0, body, properties, durability="append")


# -- contents of records ----------------------------------------------------------------------------------------------


def _whole(value: dict[str, Any], name: str, limit: int) -> int:
    found = value.get(name)
    if type(found) is not int or not 0 <= found <= limit:
        raise ValueError(f"{name} is {found!r:.80}, not a number from 0 to {limit}")
    return found


def _name(value: dict[str, Any], name: str) -> str:
    found = value.get(name)
    if type(found) is not str:
        raise ValueError(f"{name} is {found!r:.80}, not a name")
    return found


def _batch_of(value: dict[str, Any]) -> tuple[_Batch, str]:
    """Return (the delivery that is named, the broker's name, or "" if there is none)."""
    key = QueueKey(_name(value, "c"), _name(value, "t"), _whole(value, "q", _I32_MAX))
    broker = value.get("bn")
    if broker is not None and type(broker) is not str:
        raise ValueError(f"bn is {broker!r:.80}, not a name")
    return _Batch(key, _whole(value, "so", _I64_MAX), _whole(value, "pt", _I64_MAX)), (broker or "").strip()


def _checkpoint_of(value: dict[str, Any], home: tuple[str, int]) -> _Checkpoint:
    batch, broker = _batch_of(value)
    for name in (batch.key.topic, batch.key.group):
        if "@" in name or not is_path_safe(name):  # such a name cannot have offsets
            raise ValueError(f"{name[:80]!r} is not a name of a topic or a group")
    invisible_ms = _whole(value, "it", _I64_MAX - batch.pop_time_ms)
    count = _whole(value, "n", _BATCH_MAX)
    distances = value.get("d")
    if not distances:  # from a broker without filters: the messages are consecutive
        distances = list(range(count))
    if type(distances) is not list or len(distances) < count:
        raise ValueError(f"d is {distances!r:.80}, which does not name {count} messages")
    offsets = [batch.start + each for each in distances[:count] if type(each) is int and each >= 0]
    if len(offsets) != count or sorted(set(offsets)) != offsets or (offsets and offsets[-1] > _I64_MAX):
        raise ValueError(f"d is {distances!r:.80}, not ascending distances")
    bits = value.get("bm", 0)
    if type(bits) is not int:
        raise ValueError(f"bm is {bits!r:.80}, not a number")
    acked = {offset for i, offset in enumerate(offsets) if i < 32 and bits >> i & 1}
    return _Checkpoint(batch, broker, invisible_ms, offsets, acked, home)


def _acked(value: dict[str, Any], tag: str) -> list[int]:
    if tag == _ACK:
        return [_whole(value, "ao", _I64_MAX)]
    found = value.get("aol")
    if type(found) is not list or any(type(each) is not int for each in found):
        raise ValueError(f"aol is {found!r:.80}, not a list of offsets")
    return found
