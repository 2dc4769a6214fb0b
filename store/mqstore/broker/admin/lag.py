"""Lag of a group in one queue, by one rule for brokers and file views (delivery#statistics).

    lag       = ready + in flight
    popped    ready: not delivered yet, or free to be redelivered         in flight: delivered and not settled
    read      ready: behind the last read                                 in flight: read and not committed

Messages that were acknowledged behind a message in flight are no lag, although the committed offset is lower. Without a
committed offset the lag is 0. Files do not show how far a group has read: from outside, its messages in flight count as
ready, and the sum is the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mqstore.broker.pop.state import Standing

if TYPE_CHECKING:
    from mqstore.broker.names import QueueKey
    from mqstore.broker.offsets import OffsetTable
    from mqstore.log.reader import StoreReader

__all__ = ["Lag", "measure"]


class Lag(NamedTuple):
    """Standing of a group in a queue, and the end of the queue by which its lag is measured."""

    standing: Standing
    end: int

    @property
    def ready(self) -> int:
        return self.end - self.standing.next + self.standing.again

    @property
    def messages(self) -> int:
        return self.ready + self.standing.in_flight


def measure(
    store: StoreReader, offsets: OffsetTable, key: QueueKey, committed: int, popped: Standing | None
) -> Lag | None:
    """Return the lag of a group whose next offset is `committed`, or None if the queue does not exist.
    `popped` is its standing by the pop log, if it has popped."""
    bounds = store.offsets_or_none(key.topic, key.queue_id)
    if bounds is None:
        return None
    low, high = max(bounds[0], offsets.start_of(key.topic, key.queue_id)), bounds[1]
    # A group without popped messages that is committed elsewhere than its pops ended reads by offset now.
    if popped is not None and (popped.in_flight or popped.again or popped.first == committed):
        first, ready, behind = (max(low, offset) for offset in (popped.first, popped.ready_from, popped.next))
        return Lag(Standing(first, ready, behind, popped.in_flight, popped.again), max(behind, high))
    # For a group that reads, the messages in flight are those that were read and not committed.
    first = min(high, max(low, committed))
    pulled = min(high, max(first, offsets.query_pull(key) or 0))
    return Lag(Standing(first, pulled, pulled, pulled - first, 0), high)
