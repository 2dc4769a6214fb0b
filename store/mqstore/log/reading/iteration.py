"""Iteration over the messages of a queue or topic, with or without waiting for more (format#reads)."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator
from datetime import datetime
from heapq import merge
from itertools import chain
from typing import Literal

from mqstore.errors import InvalidMessageError
from mqstore.log.derived.consumequeue import ConsumeQueue
from mqstore.log.message import Message
from mqstore.log.reading.reader import StoreReader, outside
from mqstore.log.writing.log_tail import QueueRef
from mqstore.logger import log as _log

_FOLLOW_MIN_S, _FOLLOW_MAX_S = 0.001, 0.1
_EMPTY_LOOK_S = 0.02
_FOLLOW_LOOK_S = 1.0
"""Interval at which a following iteration checks whether the end has moved back."""


Begin = Literal["earliest", "latest"] | datetime | int


class AtEnd(list[Message]):
    """No more messages at present. Read again when a queue has grown beyond its position, or a new one exists."""

    def __init__(self, positions: dict[QueueRef, int]) -> None:
        super().__init__()
        self.positions = positions


class IteratingReader(StoreReader):
    """Store whose messages can be iterated over. Base of stores opened for reading or for writing."""

    def iter(
        self,
        topic: str,
        queue_id: int | None = None,
        *,
        start: Literal["earliest", "latest"] | datetime | int = "earliest",
        stop: int | None = None,
        follow: bool = False,
        tags: str | None = "*",
    ) -> Iterator[Message]:
        """Yield messages of one queue in order, or of all queues of the topic, merged by store time.

        `queue_id` None means all queues. `start` is a word, a time, or for one queue an offset. `stop` is the offset
        to end before. None means the present end. With `follow` it waits for more messages without end, and yields
        those of several queues in rounds, merged within each round. If a writer cuts messages that this reader has
        seen, following continues at the cut, and logs it. It does the same if retention overtakes the reader.
        Unreadable messages are skipped as by `read`. Raises OffsetOutOfRangeError for a `start` offset that does not
        exist.
        """

        parts = self.in_parts(topic, queue_id, start, stop, follow, tags)
        return chain.from_iterable(self.waiting(topic, queue_id, parts))  # a generator would run for each message

    def in_parts(
        self, topic: str, queue_id: int | None, start: Begin, stop: int | None, follow: bool, tags: str | None
    ) -> Iterator[Iterable[Message]]:
        """Yield the messages of `iter` in parts, and with `follow` an `AtEnd` when the caller has to wait for more."""
        if queue_id is not None:
            queue = self.queue_named(topic, queue_id)
            position, named = self._start_of(queue, start), isinstance(start, int)
            end = queue.max_offset if stop is None and not follow and position <= queue.max_offset else stop
            yield from self._batches(queue, position, end, follow, tags, named=named)
            return
        if isinstance(start, int) or stop is not None:
            raise InvalidMessageError("start and stop are offsets of one queue: give queue_id=, too", "start")
        positions = {ref: self._start_of(self.queue_named(*ref), start) for ref in self.queues(topic)}
        yield from self._rounds(topic, positions, tags) if follow else [self._merged(positions, tags)]

    def waiting(
        self, topic: str, queue_id: int | None, parts: Iterable[Iterable[Message]]
    ) -> Iterator[Iterable[Message]]:
        """Yield parts, and wait at each `AtEnd`."""
        for part in parts:
            if isinstance(part, AtEnd):
                self._wait_for_news(topic, queue_id, part.positions)
            yield part

    def follow_queues(
        self, topic: str, positions: dict[QueueRef, int], tags: str | None, queue_id: int | None = None
    ) -> Iterator[Message]:
        """Yield messages of a topic, or of one of its queues, from `positions` on, endlessly, merged by store time.
        Queues without a position start at their first message."""
        return chain.from_iterable(self.waiting(topic, queue_id, self._rounds(topic, positions, tags, queue_id)))

    def _rounds(
        self, topic: str, positions: dict[QueueRef, int], tags: str | None, queue_id: int | None = None
    ) -> Iterator[Iterable[Message]]:
        cuts: dict[QueueRef, int] = {}
        while True:
            for ref in self._refs(topic, queue_id):
                queue = self.queue_named(*ref)
                positions.setdefault(ref, queue.min_offset)
                if queue.cuts != cuts.setdefault(ref, queue.cuts):
                    cuts[ref] = queue.cuts
                    if positions[ref] > queue.cut_to:
                        positions[ref] = self._back_to_cut(queue, positions[ref])
            before = dict(positions)
            yield self._merged(positions, tags)
            if positions == before:
                yield AtEnd(positions)

    def _refs(self, topic: str, queue_id: int | None) -> list[QueueRef]:
        return [ref for ref in self.queues(topic) if queue_id in (None, ref.queue_id)]

    def _merged(self, positions: dict[QueueRef, int], tags: str | None) -> Iterator[Message]:
        """Yield the messages that the queues have now, from `positions` on, and move the positions."""
        rounds = [chain.from_iterable(self._round(ref, positions, tags)) for ref in positions]
        return merge(*rounds, key=lambda m: (m.store_timestamp_ms, m.physical_offset))

    def _round(self, ref: QueueRef, positions: dict[QueueRef, int], tags: str | None) -> Iterator[list[Message]]:
        queue = self.queue_named(*ref)
        positions[ref] = yield from self._batches(queue, positions[ref], queue.max_offset, False, tags)

    def _wait_for_news(self, topic: str, queue_id: int | None, positions: dict[QueueRef, int]) -> None:
        """Return when a queue has grown beyond its position, or a new one exists, or after a while."""
        self.check_open()
        if not any(positions.values()):  # a topic without a message
            time.sleep(_EMPTY_LOOK_S)
            return
        if queue_id is not None and len(positions) == 1:
            [(ref, position)] = positions.items()
            if (queue := self.queue_named(*ref, position)).max_offset > position:
                time.sleep(_FOLLOW_MAX_S)  # its record cannot be read yet
            else:
                self.news.wait(queue, position, _FOLLOW_LOOK_S, lambda: self.closed)
            return
        pause = _FOLLOW_MIN_S
        polls = 0
        while True:
            self.check_open()
            time.sleep(pause)  # at least once, since messages beyond a position may not be readable yet
            pause = min(2 * pause, _FOLLOW_MAX_S)
            polls += 1
            if any(self.queue_named(*ref, offset).max_offset != offset for ref, offset in positions.items()):
                return
            # For another process a new queue is a new folder. Looking for folders is expensive, so not every time.
            if (self.mode == "rw" or polls % 10 == 0) and any(
                ref not in positions for ref in self._refs(topic, queue_id)
            ):
                return

    def _start_of(self, queue: ConsumeQueue, start: str | datetime | int) -> int:
        if isinstance(start, int):
            return start
        if isinstance(start, datetime):
            return self.offset_at(queue.topic, queue.queue_id, start)
        if start not in ("earliest", "latest"):
            raise InvalidMessageError(
                f"start must be 'earliest', 'latest', a datetime or offset, not {start!r}", "start"
            )
        return queue.min_offset if start == "earliest" else queue.max_offset

    def _batches(
        self, queue: ConsumeQueue, start: int, stop: int | None, follow: bool, tags: str | None, *, named: bool = False
    ) -> Generator[list[Message], None, int]:
        """Yield messages of `queue`, many at a time. Return the offset after the last one examined.
        With `named`, the caller asked for offset `start`, and gets an error if it does not exist."""
        position = start
        size = 32
        cuts = queue.cuts
        while stop is None or position < stop:
            want = size if stop is None else min(size, stop - position)
            result = self.get(queue.topic, queue.queue_id, position, want, tags=tags)
            if follow and queue.cuts != cuts:
                cuts = queue.cuts
                if position > queue.cut_to:
                    position = self._back_to_cut(queue, position)
                    continue
            if result.status == "OFFSET_TOO_SMALL" and not (named and position == start):
                _log.warning(
                    "%s: retention deleted offsets %d to %d of %s/%d before they were read; reading continues at %d",
                    *(self.path, position, result.min_offset - 1, queue.topic, queue.queue_id, result.min_offset),
                )
                position = result.min_offset
                continue
            if result.status in ("OFFSET_TOO_SMALL", "OFFSET_OVERFLOW_BADLY"):
                raise outside(queue.ref, position, result)
            messages = result.messages
            if stop is not None and messages and messages[-1].offset >= stop:
                yield [message for message in messages if message.offset < stop]
                return stop
            yield messages
            if result.next_offset > position:
                position = result.next_offset
                size = min(2 * size, 1024)
            elif not follow:
                return position
            else:
                size = 32
                yield AtEnd({queue.ref: position})
        return position

    def _back_to_cut(self, queue: ConsumeQueue, position: int) -> int:
        """Return the position at which following continues after the end of `queue` has moved back (format#readers)."""
        _log.warning(
            "%s: the log was cut, and %s/%d now ends at %d, before offset %d that was read; "
            "following continues at its end",
            *(self.path, queue.topic, queue.queue_id, queue.cut_to, position),
        )
        return queue.cut_to
