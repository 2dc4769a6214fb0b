"""Everything in a queue, one message after the other, damaged or not: for exports and rebuilds (store-format 9.7).

`MessageStore.read` serves consumers: a reader beside a writer stops before a record that does not verify, since it may
be one that is just being written. Whoever copies a store out wants the opposite: all that can be read, and to be told
of each slot that cannot, once.

    unit points at a record that verifies      the message
    void unit                                  nothing: a record lost earlier, which was reported then
    record does not verify                     Finding bad_record, where in the commitlog
    record below the log's first segment       nothing: retention took it, perhaps just now
    no unit, though later ones are there       Finding missing_units, where in the queue
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mqstore.layout.consumequeue import UNIT_BYTES, is_void
from mqstore.log.message import Message
from mqstore.log.report import Finding
from mqstore.log.store import MessageStore

__all__ = ["walk_queue"]

_STEP = 512


def walk_queue(
    store: MessageStore, topic: str, queue_id: int, start: int | None = None, stop: int | None = None
) -> Iterator[Message | Finding]:
    """Messages of queue offsets [start, stop) in order, and a `Finding` in place of what cannot be read.

    `start` None: the first there is; one below that moves up to it. `stop` None: the end as of now. Bounded memory.
    Raises TopicNotFoundError.
    """
    low, high = store.offsets(topic, queue_id)
    queue = store._queue(topic, queue_id, 0)
    position = low if start is None else max(start, low)
    end = high if stop is None else min(stop, high)
    while position < end:
        count = min(_STEP, end - position)
        result = store.get(topic, queue_id, position, count)
        if result.status == "OFFSET_TOO_SMALL":  # retention went on meanwhile
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
            front = store._find_front(queue)  # behind the look at the units: retention takes a record before its unit
            yield from _with_gaps(store, topic, queue_id, position, messages, units, front)
        position = after


def _with_gaps(
    store: MessageStore, topic: str, queue_id: int, first: int, messages: list[Message], units: np.ndarray, front: int
) -> Iterator[Message | Finding]:
    per = store.manifest.consumequeue_segment_bytes // UNIT_BYTES
    size = store.manifest.commitlog_segment_bytes
    void = is_void(units).tolist()
    readable = {message.offset: message for message in messages}
    hole: list[int] = []

    def holes() -> Iterator[Finding]:
        if hole:
            file = f"consumequeue/{topic}/{queue_id}/{hole[0] // per * per * UNIT_BYTES:020d}"
            detail = f"offsets {hole[0]}..{hole[-1]}: no unit, though later ones are there"
            yield Finding("missing_units", file, hole[0] % per * UNIT_BYTES, len(hole) * UNIT_BYTES, detail)
            hole.clear()

    for i, (physical, length, _) in enumerate(units.tolist()):
        slot = first + i
        if slot < front and slot not in readable:
            continue
        if length <= 0 and slot not in readable:
            if hole and slot % per == 0:
                yield from holes()
            hole.append(slot)
            continue
        yield from holes()
        if slot in readable:
            yield readable[slot]
        elif not void[i] and not 0 <= physical < store.min_offset:
            start = max(physical, 0) // size * size
            detail = f"{topic}, queue {queue_id}, offset {slot}: the record does not verify"
            yield Finding("bad_record", f"commitlog/{start:020d}", max(physical, 0) - start, length, detail)
    yield from holes()
