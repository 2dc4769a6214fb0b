"""Progress of a stream, and its next batch (spark#stream-calls, spark#stream).

    offset      next offset of each queue of each store, which Spark saves in its checkpoint and gives back
    snapshot    the bounds of every queue at one time
    latest      offset + snapshot + limit -> the next offset
    partitions  slices of the messages between two offsets, cut as for a batch (`plan`)

===========================  =========================================================================================
position of a queue          the stream continues
===========================  =========================================================================================
none yet, the queue is new   at its oldest message
below its oldest message     at its oldest message; the messages before it are lost
beyond its end               at its end: the store was restored, or lost its tail in a power cut; the rest is lost
queue or store is missing    nowhere; the position is kept in case it comes back, and its messages are lost
no longer wanted             nowhere; the position is kept, and nothing is lost
===========================  =========================================================================================

Two offsets always enclose the same sequence of messages, so a sink that writes each batch once writes each message
once. Therefore the first offset must be in the checkpoint before a message is read. But Spark asks for it again until
the first batch is done. So if it depends on the time of the call (latest, times, groups), the first batch is empty and
only pins the position.

In an offset, a store without an id is named by its absolute path, not by the path in the query.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from mqstore.broker.tables.external_offsets import publish
from mqstore.clock import SYSTEM_CLOCK, Clock
from mqstore.closing import Closing
from mqstore.errors import ConfigError, NotAStoreError, TopicNotFoundError
from mqstore.jobs.options.options import ANY, LATEST, Key, Offsets, SourceOptions, queue_id_of
from mqstore.jobs.reading.opening import (
    SlicedStore,
    StoreName,
    check_queues,
    open_sliced,
    open_store,
    opened,
    queues_of,
)
from mqstore.jobs.reading.plan import (
    Bounds,
    Losses,
    Slice,
    Wanted,
    Weighed,
    bounds_of,
    bounds_of_log,
    mean_size,
    names_queue,
    partitions,
    stores_of,
    weigh,
)
from mqstore.layout.consumequeue import is_message
from mqstore.log.derived.consumequeue import ConsumeQueue

_CHUNK_UNITS = 8192


class Limit(NamedTuple):
    """Limit of a batch of a stream. A stream that reads whole logs (readBy=log) cannot have one.
    The size of a backlog is estimated from samples. Messages of a batch are counted by the sizes in their units."""

    most: int
    unit: Literal["messages", "bytes"]


class Costs(Closing):
    """Costs of messages against a limit. Here each message costs 1."""

    def close(self) -> None:
        """Close the store that was used last."""

    def weight(self, key: Key, start: int, stop: int) -> float:
        """Return the approximate cost of the messages in [start, stop)."""
        return stop - start

    def cost(self, key: Key, at: int) -> int:
        return 1

    def reach(self, key: Key, start: int, stop: int, budget: int) -> tuple[int, int]:
        """Return (offset up to which the budget pays from `start`, at most `stop`; its cost)."""
        to = min(stop, start + budget)
        return to, to - start


def admit(begin: Mapping[Key, int], end: Mapping[Key, int], most: int, costs: Costs) -> Offsets:
    """Return the end of each queue, at most `end`, in a batch that costs at most `most` (spark#pacing).
    A batch may also be one larger message, so that a stream always makes progress.

    Each queue has a share of the limit. The rest from rounding goes to any queue that can use it. The first queue
    changes from batch to batch, so that large queues cannot starve small ones.
    """
    at = dict(begin)
    waiting = sorted(key for key in end if at[key] < end[key])
    if not waiting:
        return at
    text = repr([(key, at[key]) for key in waiting])
    first = zlib.crc32(text.encode()) % len(waiting)  # not random: the same batch may be planned again
    waiting = waiting[first:] + waiting[:first]
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
    for key in waiting:  # the rest from rounding
        if left > 0:
            take(key, left)
    return at


class _QueueBytes(Costs):
    """Costs of messages by the sizes of their records, from the units.
    Only the store that was used last stays open: a store has a descriptor for each queue, a fleet has many stores, and
    `admit` goes through the queues store by store."""

    def __init__(self, options: SourceOptions) -> None:
        self._names = {name.id: name for name in stores_of(options)}
        self._open = ""
        self._store: SlicedStore | None = None

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _queue(self, key: Key) -> ConsumeQueue:
        if self._store is None or self._open != key.store:
            self.close()
            self._store, self._open = open_sliced(self._names[key.store]), key.store
        return ConsumeQueue(self._store.queue_table, key.topic, key.queue_id)  # only units are read: no bounds needed

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
    """Return the costs that count against `limit`. Close them after use."""
    return _QueueBytes(options) if limit.unit == "bytes" else Costs()


_VERSION = 1


def encode_offset(offsets: Mapping[Key, int], *, by_log: bool) -> dict[str, Any]:
    """Return the JSON of an offset, with sorted names.

    >>> encode_offset({Key("s", "t", 10): 5, Key("s", "t", 9): 0}, by_log=False)
    {'v': 1, 's': {'s': {'t': {'9': 0, '10': 5}}}}
    """
    if by_log:
        return {"v": _VERSION, "p": {key.store: offsets[key] for key in sorted(offsets)}}
    stores: dict[str, dict[str, dict[str, int]]] = {}
    for key in sorted(offsets):
        stores.setdefault(key.store, {}).setdefault(key.topic, {})[str(key.queue_id)] = offsets[key]
    return {"v": _VERSION, "s": stores}


def decode_offset(value: Any, *, by_log: bool) -> Offsets:
    """Decode the JSON of `encode_offset`. ConfigError for another version or `readBy`, and for damage."""
    if not isinstance(value, dict) or value.get("v") != _VERSION:
        raise ConfigError(
            f"the checkpoint has an unknown offset, {value!r:.200}, not one of version {_VERSION}: use the mqstore "
            "that wrote it, or a new checkpoint"
        )
    was, now = (("queue", "log")[log] for log in ("p" in value, by_log))
    if was != now:
        raise ConfigError(
            f"the checkpoint belongs to a stream with readBy={was}, but this one has readBy={now}. Use readBy={was}, "
            "or a new checkpoint"
        )
    try:
        if by_log:
            found = {Key(store): position for store, position in value["p"].items()}
        else:
            found = {
                Key(store, topic, queue_id_of(queue_id)): offset
                for store, topics in value["s"].items()
                for topic, queues in topics.items()
                for queue_id, offset in queues.items()
            }
        if not all(type(offset) is int and offset >= 0 for offset in found.values()):
            raise ValueError("an offset must be a whole number from 0")
    except (KeyError, AttributeError, ValueError) as error:
        raise ConfigError(f"the checkpoint has a damaged offset ({error}): {value!r:.200}") from error
    return found


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Bounds of all queues of all stores at one time."""

    bounds: dict[Key, Bounds]
    starts: Offsets = field(default_factory=dict)
    """Offsets at which a new stream begins, if requested."""
    stores: Mapping[str, StoreName] = field(default_factory=dict)
    """Stores that the options name, by id."""
    absent: frozenset[str] = frozenset()
    """Ids of missing stores that the options name."""

    @property
    def ends(self) -> Offsets:
        return {key: bounds.high for key, bounds in self.bounds.items()}


def look(options: SourceOptions, *, first: bool = False, again: bool = False) -> Snapshot:
    """Return the bounds of the stores now, and with `first` also where a new stream begins.

    Each store is opened and closed again. If a run looks `again`, only the queues of named topics are loaded. Raises
    ConfigError, also for lost queues, and with `first` NotAStoreError, TopicNotFoundError and OffsetOutOfRangeError
    like `plan`. Without `first`, `advance` handles missing stores and queues.
    """
    names = stores_of(options)
    names_it = names_queue(options)
    wanted = Wanted(options, names, LATEST) if first else None
    bounds: dict[Key, Bounds] = {}
    starts: Offsets = {}
    absent = []
    some = again and options.read_by != "log" and (options.assign or options.topics) is not None
    for name in names:
        store = opened(name, options, open_sliced if some else open_store, missing_ok=not first)
        if store is None:
            absent.append(name.id)
            continue
        with store:
            if options.read_by == "log":
                here = {Key(name.id): bounds_of_log(store, options)}
                queues = []
            else:
                if isinstance(store, SlicedStore):
                    queues = store.named(options)
                else:
                    queues = queues_of(store)
                    check_queues(name, store, queues, options)
                chosen = (queue for queue in queues if names_it(*queue.ref))
                here = {Key(name.id, *queue.ref): bounds_of(store, queue, options) for queue in chosen}
            bounds |= here
            if wanted is not None:
                wanted.open(store, queues)
                starts |= {key: wanted.start(key, each) for key, each in here.items()}
    if wanted is not None:
        wanted.check("waits for it; so does subscribePattern")
    return Snapshot(bounds, starts, {name.id: name for name in names}, frozenset(absent))


def _gone(losses: Losses, key: Key, wanted: int, stores: Mapping[str, StoreName], *, queue: bool = False) -> None:
    """Record the loss of a store, or with `queue` of its queue. `stores` are those in the options, by id."""
    text = f"{key} is to be read from offset {wanted}, but "
    name = stores.get(key.store)
    if name is None:  # an error: the stream might read the same store again under another id
        there = ", ".join(map(repr, list(stores)[:5]))  # some stores of a fleet
        text += f"the options no longer name store {key.store!r}"
        remedy = (
            f". They name {there}: use the path or id that the query was started with, or paths={{{key.store!r}: path}}"
        )
        losses.add(key, NotAStoreError, text, remedy)
    elif queue:
        losses.add(key, TopicNotFoundError, f"{text}it is no longer in {name.path}")
    else:
        losses.add(key, NotAStoreError, f"{text}{name.path} is no longer a store")


def advance(
    options: SourceOptions, start: Mapping[Key, int], now: Snapshot, target: Mapping[Key, int] | None = None
) -> tuple[Offsets, Offsets]:
    """Return (next offset, end) of each queue, by the table in the module's docstring.

    `target` limits the ends and the set of queues. Raises errors for lost messages."""
    names_it = names_queue(options)
    losses = Losses(options)
    begin: Offsets = {}
    end: Offsets = {}
    new = {key: each.low for key, each in now.bounds.items() if key not in start and (target is None or key in target)}
    for key, position in {**start, **new}.items():
        begin[key] = end[key] = position
        if (bounds := now.bounds.get(key)) is not None:
            begin[key] = losses.clamp(key, position, bounds)
            end[key] = max(begin[key], bounds.high if target is None else min(bounds.high, target.get(key, 0)))
        elif names_it(key.topic, key.queue_id) and not (options.ignore_corrupt_files and key.store in now.absent):
            _gone(losses, key, position, now.stores, queue=key.store not in now.absent)
    losses.settle()
    return begin, end


class StreamProgress:
    """One run of a stream, which answers Spark's calls. No store stays open between calls."""

    def __init__(self, options: SourceOptions, clock: Clock = SYSTEM_CLOCK) -> None:
        self._options = options
        self._clock = clock
        self._batch_ms: int | None = None
        """Monotonic time of the last batch."""
        self._by_log = options.read_by == "log"
        self._encode = partial(encode_offset, by_log=self._by_log)
        self._decode = partial(decode_offset, by_log=self._by_log)
        self._initial: Offsets | None = None
        self._pin = False
        self._seen: Snapshot | None = None
        self._target: Offsets | None = None
        self._last: Offsets = {}
        self._published: dict[str, dict[tuple[str, int], int]] = {}

    def initial(self) -> dict[str, Any]:
        """Return where a new stream begins. All calls of a run return the same. Raises like `look`."""
        if self._initial is None:
            self._seen = look(self._options, first=True)
            self._initial = dict(self._seen.starts)
            if self._target is not None:
                starts, target = self._initial, self._target
                self._initial = {key: min(at, target[key]) for key, at in starts.items() if key in target}
            self._last = self._initial
            self._pin = self._moves_with_time()
        return self._encode(self._initial)

    def _moves_with_time(self) -> bool:
        """Return True if the first offset depends on the time of the call."""
        options = self._options
        by_time = options.set_among(("startingTimestamp", "startingOffsetsByTimestamp", "startingGroup"))
        return bool(by_time) or LATEST in (options.starting_offsets or {ANY: LATEST}).values()

    def fix_target(self) -> None:
        """Exclude messages that are stored from now on, for a run that ends when it has read all others."""
        self._seen = look(self._options, again=self._seen is not None)
        self._target = self._seen.ends

    def latest(self, start: dict[str, Any] | None, limit: Limit | None = None) -> dict[str, Any]:
        """Return the offset at which the next batch ends, or `start` without new messages.

        With None the batch begins at the offset of the last call (Spark 4.1). Spark calls this when the batch that
        ended at `start` is done, so `start` is committed, as by `commit`. Raises errors for lost messages, and
        ConfigError for a `start` of another kind of stream.
        """
        begin = self._last if start is None else self._decode(start)
        if start is not None:
            self.commit(start)
        if self._pin:
            self._pin = False
            if self._initial == begin:
                return self._encode(begin)
        self._seen = look(self._options, again=self._seen is not None)
        at, end = advance(self._options, begin, self._seen, self._target)
        if self._waits(sum(end.values()) - sum(at.values())):
            return self._encode(begin)
        if limit is not None:
            with costs_of(self._options, limit) as costs:
                end = admit(at, end, limit.most, costs)
        self._last = end
        return self._encode(end)

    def _waits(self, messages: int) -> bool:
        """Return True if a batch of this number of messages waits for more. The first batch of a run never waits."""
        least, now_ms = self._options.min_offsets_per_trigger or 0, self._clock.monotonic_ms()
        if self._target is None and self._batch_ms is not None and messages < least:
            return now_ms - self._batch_ms < self._options.max_trigger_delay_s * 1000
        self._batch_ms = now_ms
        return False

    def reported(self) -> dict[str, Any] | None:
        """Return the last known end of all stores, for the progress report of a query."""
        return None if self._seen is None else self._encode({**self._last, **self._seen.ends})

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[list[Slice]]:
        """Return slices of the messages from `start` to `end`, [] if there are none.

        Raises like `latest`, since retention may have deleted messages: after a restart Spark asks for a batch that it
        logged before."""
        begin, to = self._decode(start), self._decode(end)
        self._last = to
        self._pin = False  # the first batch is in the checkpoint
        names = {name.id: name for name in stores_of(self._options)}
        losses = Losses(self._options)
        found: list[Weighed] = []
        moving = sorted(key for key in to if begin.get(key, -1) < to[key])
        for store_id, keys in groupby(moving, lambda key: key.store):
            name = names.get(store_id)
            opening = open_store if self._by_log else open_sliced
            store = None if name is None else opened(name, self._options, opening, missing_ok=True)
            if name is None or store is None:
                for key in keys if name is None or not self._options.ignore_corrupt_files else ():
                    _gone(losses, key, begin.get(key, 0), names)
                continue
            with store:
                for key in keys:
                    queue = store.load(key.topic, key.queue_id) if isinstance(store, SlicedStore) else None
                    if queue is not None and queue.next_offset:
                        bounds = Bounds(queue.min_offset, queue.max_offset, queue.max_offset)
                    elif self._by_log:
                        bounds = bounds_of_log(store, self._options)
                    else:
                        _gone(losses, key, begin.get(key, 0), names, queue=True)
                        continue
                    first, stop = (losses.clamp(key, at, bounds) for at in (begin.get(key, bounds.low), to[key]))
                    if first < stop:
                        found.append(weigh(name, queue, first, stop))
        losses.settle()
        return [*partitions(found, self._options.min_partitions)]

    def commit(self, end: dict[str, Any]) -> None:
        """Publish `end` as the committed offsets of the group in `commit_group`, if there is one.
        Only queues that the options name are published, since the lag of others would grow for ever. ConfigError if a
        store cannot be written."""
        group = self._options.commit_group
        if group is None:
            return
        names_it = names_queue(self._options)
        by_store: dict[str, dict[tuple[str, int], int]] = {}
        for key, offset in self._decode(end).items():
            if names_it(key.topic, key.queue_id):
                by_store.setdefault(key.store, {})[key.topic, key.queue_id] = offset
        for name in stores_of(self._options):
            offsets = by_store.get(name.id)
            if offsets and self._published.get(name.id) != offsets:
                try:
                    publish(name.path, group, offsets)
                except FileNotFoundError:
                    continue  # the store is gone: the next batch raises the error, if it is one
                except OSError as error:
                    raise ConfigError(
                        f"option commitGroup={group!r}: cannot write the offsets to {name.path} ({error}). Let Spark's "
                        "user write in config/spark, or leave out the option"
                    ) from error
                self._published[name.id] = offsets
