"""How much of the waiting messages a batch of a stream may have (spark#pacing). Knows no Spark.

A limit is shared among queues in proportion to what waits in each. Queues whose share is less than a message get one
each, for up to half of the limit; what rounding leaves over goes to whoever can use it. Who is first changes from batch
to batch, so nobody starves behind the large ones. A batch is never empty while something waits.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from mqstore.spark.options import Key, Offsets

__all__ = ["admit"]


def admit(begin: Mapping[Key, int], end: Mapping[Key, int], most: int) -> Offsets:
    """Return how far each queue goes towards `end` in a batch of at most `most` messages, at least one if one waits."""
    at = dict(begin)
    waiting = sorted(key for key in end if at[key] < end[key])
    if not waiting:
        return at
    text = repr([(key, at[key]) for key in waiting])
    turn = zlib.crc32(text.encode()) % len(waiting)  # another with every batch, the same for the same batch
    waiting = waiting[turn:] + waiting[:turn]
    weights = {key: end[key] - at[key] for key in waiting}
    left = most

    def take(key: Key, room: int) -> None:
        nonlocal left
        used = min(room, end[key] - at[key])
        at[key] += used
        left -= used

    small = {key for key in waiting if most * weights[key] < sum(weights.values())}
    for key in [key for key in waiting if key in small][: max(1, most // 2)]:
        take(key, 1)
    rest = left
    total = sum(weights[key] for key in waiting if key not in small)
    for key in waiting:
        if key not in small:
            take(key, min(left, rest * weights[key] // total))
    for key in waiting:  # what rounding left over
        take(key, left)
    return at
