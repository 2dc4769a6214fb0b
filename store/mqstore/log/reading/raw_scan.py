"""Walk over all messages of a log or a queue, damaged or not, for exports (format#damage).

`MessageStore.read` serves consumers. While a writer runs, a reader stops before a record that does not verify, since it
may be half-written. An export needs the opposite: all readable messages, and one report of each fault.

`walk_log` reads the log and needs no queue. It yields the messages that `mqstore recover` would list, and skips all
damage, regardless of the watermark:

    records that verify                        the messages, in log order
    bytes without a record                     Finding, at a place in the commitlog
    queue offsets without a record             Gap: these messages are lost

`walk_queue` reads the units of one queue:

    unit points to a record that verifies      the message
    void unit                                  nothing: its record was lost and reported before
    record does not verify                     Finding bad_record, at a place in the commitlog
    record in a missing file                   Finding missing_segment, once for each file
    record below the log's first segment       nothing: retention deleted it, perhaps meanwhile
    no unit, though later units exist          Finding missing_units, at a place in the queue
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby, repeat
from operator import attrgetter

from mqstore import arrays as np
from mqstore.layout.consumequeue import UNIT, UNIT_BYTES, is_void
from mqstore.log.consumequeue import ConsumeQueue
from mqstore.log.message import Find, Message, UnitBatch
from mqstore.log.reading.reader import StoreReader
from mqstore.log.recovery.offset_assigner import Placed
from mqstore.log.recovery.report import Finding
from mqstore.log.recovery.scanner import Bad, End, Good, batch_for, scan_log
from mqstore.log.recovery.verify import Gap, Verifier

_STEP = 512
_FEW_UNITS = 16
"""Fewer units are read faster one by one than as an array."""


def walk_log(
    store: StoreReader, verifier: Verifier, wanted: Callable[[str, int], bool] | None = None
) -> Iterator[list[Message] | Finding | Gap]:
    """Yield all messages in a reader's log of the queues `wanted`, by topic and queue id. None means all.

    `verifier` is a new one of `store`. Its `front` and `done_bytes` show the progress of the walk. Messages come in log
    order, in lists of messages of one segment: some thousand, or with many queues some 100,000. While a writer runs,
    the log ends where it ended when `verifier` was made. Needs bounded memory.
    """
    yield from (finding for finding in verifier.segments() if finding.kind in ("missing_segment", "bad_json"))
    first = verifier.front
    batch = batch_for(len(store.queue_table))
    events = scan_log(store.log_files, first, store.manifest.checksum, on_front=verifier.front_moved, batch=batch)
    for event in events if store.log_files.starts else ():
        if isinstance(event, Good):
            messages: list[Message] = []
            parts = 0
            for found in verifier.placed(verifier.rows_of(event), wanted):
                if isinstance(found, Finding):
                    if found.kind != "queue_offset":  # the right number is known, so no message is lost
                        yield found
                    continue
                if found.first > found.expected:
                    yield (*found.queue.ref, found.expected, found.first)
                messages += _messages_of(event, found, store.records.finder(found.queue.topic))
                parts += 1
            if parts > 1:  # one queue after the other
                messages.sort(key=attrgetter("physical_offset"))
            verifier.done_bytes = event.end - first
            yield messages
        elif isinstance(event, Bad):
            yield verifier.bad(event)
        else:
            yield from verifier.end(event)
    if not verifier.is_live:
        yield from _lost_behind(store, verifier, wanted)


def damage_at(store: StoreReader, position: int) -> Iterator[Finding]:
    """Yield the damaged range of a reader's log that contains physical offset `position`, if it is damaged.
    Reads the log from the start of that segment up to there."""
    verifier = store.verifier()
    size = store.manifest.commitlog_segment_bytes
    start = max(position // size * size, verifier.front)
    before = max((each for each in store.log_files.starts if each <= start), default=start)
    for event in scan_log(store.log_files, before, store.manifest.checksum, on_front=verifier.front_moved):
        if isinstance(event, Bad) and event.start <= position < event.end:
            yield verifier.bad(event)
        elif isinstance(event, End) and event.position <= position:
            yield from verifier.end(event)
        if not isinstance(event, End) and event.end > position:
            return


def _messages_of(good: Good, found: Placed, find: Find | None) -> Iterator[Message]:
    units, data = found.units, found.units.tobytes()
    batch = UnitBatch(found.queue.ref, good.buffer, data, found.first, find)
    if len(units) < _FEW_UNITS:
        starts = [physical - good.base for physical, _, _ in UNIT.iter_unpack(data)]
    else:
        starts = (units["physical_offset"].astype(np.int64) - good.base).tolist()
    return map(Message, repeat(batch), starts, range(found.first, found.first + len(units)))


def _lost_behind(store: StoreReader, verifier: Verifier, wanted: Callable[[str, int], bool] | None) -> Iterator[Gap]:
    """Yield the queue offsets after the last record of each queue that have units, or void units."""
    for queue in store.queue_table:
        if wanted is None or wanted(*queue.ref):
            after = verifier.slots.behind(queue, verifier.front, store.log_files.end)
            if after.stop > after.first:
                yield (*queue.ref, after.first, after.stop)


def walk_queue(
    store: StoreReader,
    topic: str,
    queue_id: int,
    start: int | None = None,
    stop: int | None = None,
    *,
    step: int = _STEP,
) -> Iterator[Message | Finding]:
    """Yield the messages of queue offsets [start, stop) in order, and a `Finding` for unreadable ones.

    `start` None means the first offset, and a lower one is raised to it. `stop` None means the present end. Reads
    `step` messages at once. Raises TopicNotFoundError.
    """
    low, high = store.offsets(topic, queue_id)
    queue = store.queue_table.get(topic, queue_id)
    assert queue is not None
    position = low if start is None else max(start, low)
    end = high if stop is None else min(stop, high)
    missing: set[str] = set()
    while position < end:
        count = min(step, end - position)
        result = store.get(topic, queue_id, position, count, tell=False)
        if result.status == "OFFSET_TOO_SMALL":  # retention ran meanwhile
            position = result.min_offset
            continue
        # A read that got nowhere found no record that verifies in the whole step.
        after = result.next_offset if result.next_offset > position else position + count
        after = min(after, end)
        messages = [message for message in result.messages if message.offset < after]
        if len(messages) == after - position:
            yield from messages
        else:
            units = queue.units(position, after - position)
            # After reading the units, since retention deletes a record before its unit.
            front = store.records.find_front(queue)
            yield from _with_gaps(store, queue, position, messages, units, front, missing)
        position = after


def _with_gaps(
    store: StoreReader,
    queue: ConsumeQueue,
    first: int,
    messages: list[Message],
    units: np.ndarray,
    front: int,
    missing: set[str],
) -> Iterator[Message | Finding]:
    """Yield the messages of the slots from `first` on, and findings in place of missing ones.
    The slots have `units`. Retention may have deleted records of slots before `front`."""
    per = store.manifest.consumequeue_segment_bytes // UNIT_BYTES
    void = is_void(units)
    readable = {message.offset: message for message in messages}

    def kind_of(slot: int) -> tuple[str, int]:
        """Return the kind of a slot's content, and the number of its file."""
        _, length, _ = units[slot - first].tolist()
        kind = "message" if slot in readable else "hole" if length <= 0 else "void" if void[slot - first] else "bad"
        return kind if slot >= front or kind == "message" else "void", slot // per

    for (kind, _), group in groupby(range(first, first + len(units)), kind_of):
        slots = list(group)
        if kind == "message":
            yield from (readable[slot] for slot in slots)
        elif kind == "hole":
            yield queue.missing_units(slots[0], slots[-1])
        for slot in slots if kind == "bad" else ():
            physical, length, _ = units[slot - first].tolist()
            if 0 <= physical < store.min_offset:
                continue
            loss = store.records.loss_at(physical, length, queue.ref, slot)
            if loss.file not in missing:
                yield loss
            if loss.kind == "missing_segment":
                missing.add(loss.file)
