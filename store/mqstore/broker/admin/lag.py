"""How far a group is behind in one queue (delivery#statistics): one rule for a broker at work and for who looks at its
files from outside.

    lag       = ready + in flight
    popped    ready: not delivered yet, or free to be delivered again     in flight: delivered and not settled
    read      ready: behind the last read                                 in flight: read and not committed

What was acknowledged behind a message in flight is no lag, though the committed offset stands before it. Where a group
has no progress nothing is known of it, which counts as 0. Files do not tell how far a group has read: of one that
reads, what is in flight counts as ready there, and the sum is the same.
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
    """Where a group stands in a queue, and what that means for the bounds the queue has now."""

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
    """The lag of a group that goes on at `committed`; `popped`: where it stands by what it popped, if it did. None for
    a queue that is not there yet."""
    bounds = store.offsets_or_none(key.topic, key.queue_id)
    if bounds is None:
        return None
    low, high = max(bounds[0], offsets.start_of(key.topic, key.queue_id)), bounds[1]
    # One that has nothing popped, and is committed elsewhere than its pops ended, reads by now.
    if popped is not None and (popped.in_flight or popped.again or popped.first == committed):
        first, ready, behind = (max(low, offset) for offset in (popped.first, popped.ready_from, popped.next))
        return Lag(Standing(first, ready, behind, popped.in_flight, popped.again), max(behind, high))
    # Who reads has in flight what was read and is not committed.
    first = min(high, max(low, committed))
    pulled = min(high, max(first, offsets.query_pull(key) or 0))
    return Lag(Standing(first, pulled, pulled, pulled - first, 0), high)
