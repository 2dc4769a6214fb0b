"""Limits of a batch of a stream, in messages or bytes (spark#pacing).

Each queue has a share of the limit. What rounding the shares leaves over goes to any queue that can use it. The first
queue changes from batch to batch, so none starves behind the large ones.

Bytes are those of records. The size of a backlog is estimated from samples. What is taken is counted by the sizes in
units. A stream that reads whole logs (readBy=log) has no limit: the options refuse one.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from mqstore.jobs.options import Key, Offsets, SourceOptions
from mqstore.jobs.plan import SlicedStore, mean_size, open_sliced, stores_of
from mqstore.layout.consumequeue import is_message
from mqstore.log.consumequeue import ConsumeQueue

__all__ = ["Costs", "Limit", "admit", "costs_of"]

_CHUNK_UNITS = 8192


class Limit(NamedTuple):
    most: int
    unit: Literal["messages", "bytes"]


class Costs:
    """Costs of messages against a limit, here 1 each."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the store that was looked at last."""

    def weight(self, key: Key, start: int, stop: int) -> float:
        """Return the approximate cost of all in [start, stop)."""
        return stop - start

    def cost(self, key: Key, at: int) -> int:
        """Return the cost of one message."""
        return 1

    def reach(self, key: Key, start: int, stop: int, budget: int) -> tuple[int, int]:
        """Return how far a budget goes from `start`, at most to `stop`, and what that costs."""
        to = min(stop, start + budget)
        return to, to - start


def admit(begin: Mapping[Key, int], end: Mapping[Key, int], most: int, costs: Costs) -> Offsets:
    """Return how far each queue goes towards `end` in a batch that costs at most `most`.
    A batch may also be one larger message. Something moves if something can."""
    at = dict(begin)
    waiting = sorted(key for key in end if at[key] < end[key])
    if not waiting:
        return at
    text = repr([(key, at[key]) for key in waiting])
    turn = zlib.crc32(text.encode()) % len(waiting)  # another with every batch, the same for the same batch
    waiting = waiting[turn:] + waiting[:turn]
    weights = {key: max(1.0, costs.weight(key, at[key], end[key])) for key in waiting}
    total = sum(weights.values())
    left = most

    def take(key: Key, room: int) -> None:
        nonlocal left
        at[key], used = costs.reach(key, at[key], end[key], room)
        left -= used

    def share(key: Key, whole: int) -> int:
        return int(whole * weights[key] / total)

    small = {key: cost for key in waiting if (cost := costs.cost(key, at[key])) > share(key, most)}
    for number, (key, cost) in enumerate(small.items()):
        if number == 0 or cost <= left - (most + 1) // 2:
            at[key], left = at[key] + 1, left - cost
    rest = left
    total = sum(weights[key] for key in waiting if key not in small)
    for key in waiting:
        if left > 0 and key not in small:
            take(key, min(left, share(key, rest)))
    for key in waiting:  # what rounding left over
        if left > 0:
            take(key, left)
    return at


class _QueueBytes(Costs):
    """Costs of messages by the sizes of their records, as units say.
    The store asked for last stays open. A store has one descriptor for each queue, a fleet has many stores, and `admit`
    goes through the queues store by store."""

    def __init__(self, options: SourceOptions) -> None:
        self._names = {name.id: name for name in stores_of(options)}
        self._open = ""
        self._store: SlicedStore | None = None

    def __exit__(self, *_: object) -> None:
        if self._store is not None:
            self._store.close()

    def _queue(self, key: Key) -> ConsumeQueue:
        if self._store is None or self._open != key.store:
            self.__exit__()
            self._store, self._open = open_sliced(self._names[key.store]), key.store
        return ConsumeQueue(self._store.queue_table, key.topic, key.queue_id)  # its units are there: no bounds needed

    def weight(self, key: Key, start: int, stop: int) -> float:
        return mean_size(self._queue(key), start, stop) * (stop - start)

    def cost(self, key: Key, at: int) -> int:
        return int(self._sizes(key, at, 1)[0])

    def _sizes(self, key: Key, start: int, count: int) -> npt.NDArray[np.int64]:
        units = self._queue(key).units(start, count)
        return np.where(is_message(units), units["size"], 0).astype(np.int64)

    def reach(self, key: Key, start: int, stop: int, budget: int) -> tuple[int, int]:
        used, count = 0, 256
        while start < stop:
            totals = used + np.cumsum(self._sizes(key, start, min(count, stop - start)))
            fits = int(np.searchsorted(totals, budget, side="right"))
            if fits:
                start, used = start + fits, int(totals[fits - 1])
            if fits < len(totals):
                break
            count = _CHUNK_UNITS
        return start, used


def costs_of(options: SourceOptions, limit: Limit) -> Costs:
    """Return the costs that count against `limit`. The last store stays open until the exit."""
    return _QueueBytes(options) if limit.unit == "bytes" else Costs()
