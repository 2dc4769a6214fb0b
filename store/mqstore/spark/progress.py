"""How far a stream has come, and what its next batch is (spark#stream-calls, spark#stream). Knows no Spark.

    offset      where each queue of each store goes on: what Spark keeps in its checkpoint, and gives back (`positions`)
    snapshot    the bounds of every queue at a moment
    latest      offset + snapshot + limit (`pacing`) -> the next offset
    partitions  what lies between two offsets, by the same road as a batch's (`plan`)

===========================  =========================================================================================
a queue                      goes on
===========================  =========================================================================================
first seen later             at its oldest message
below its oldest message     there; the messages between are lost
beyond its end               at its end: the store was restored, or lost its tail in a power cut; that much is lost
not there, or not its store  nowhere, its position is kept: it goes on if it comes back; what it had is lost
no longer wanted             likewise, and nothing is lost
===========================  =========================================================================================

Lost messages fail the stream, unless `fail_on_data_loss` is off. Looked for when the next offset is asked for, and
again when a batch is planned, for Spark may plan one that it has logged long ago. Tasks look a third time (`tasks`).

Between two offsets there is one sequence of messages, whoever asks and however often, so that a sink which takes a
batch once sees each message once. For that the first offset must be in the checkpoint before a message is read, but
Spark asks for it anew until the first batch is done. So where it depends on the moment (latest, times, groups), the
first batch ends where it begins: empty, it pins the position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from mqstore.broker.published import publish
from mqstore.errors import ConfigError, MQStoreError, NotAStoreError, OffsetOutOfRangeError, TopicNotFoundError
from mqstore.log.store import MessageStore
from mqstore.spark.options import SourceOptions
from mqstore.spark.pacing import Costs, Limit, admit, costs_of
from mqstore.spark.plan import (
    Bounds,
    Expected,
    Slice,
    SlicedStore,
    Starts,
    StoreName,
    Weighed,
    bounds_of,
    bounds_of_log,
    check_ids,
    names_queue,
    open_sliced,
    open_store,
    partitions,
    queues_of,
    stores_of,
    weigh,
    weigh_log,
)
from mqstore.spark.positions import Key, Offsets, decode_offset, encode_offset
from mqstore.spark.telling import warn_once

__all__ = ["Snapshot", "StreamProgress", "advance", "look"]

# -- what there is -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All queues of all stores at a moment."""

    bounds: dict[Key, Bounds]
    starts: Offsets = field(default_factory=dict)
    """Where the options would have a new stream begin; only if that was asked for."""
    absent: frozenset[str] = frozenset()
    """Stores that the options name, but that are not there."""

    @property
    def ends(self) -> Offsets:
        return {key: bounds.high for key, bounds in self.bounds.items()}


def look(options: SourceOptions, *, first: bool = False) -> Snapshot:
    """The stores as they are now, each opened and closed again. `first`: and where a new stream begins.

    ConfigError, OffsetOutOfRangeError for a start that is gone; with `first` NotAStoreError for a store that is not
    there and TopicNotFoundError for a topic or queue that the options name and no store has, unless data loss is
    allowed: later what is absent is for `advance` to judge.
    """
    names = stores_of(options)
    by_log = options.read_by == "log"
    if first:
        check_ids(options, names)
    begin = Starts(options, "latest", several=len(names) > 1)
    bounds: dict[Key, Bounds] = {}
    starts: Offsets = {}
    absent = []
    expected = Expected(options)
    wanted = names_queue(options)
    for name in names:
        try:
            store = open_store(name)
        except NotAStoreError:
            if first and options.fail_on_data_loss:
                raise
            absent.append(name.id)
            continue
        with store:
            if by_log:
                key = Key(name.id)
                bounds[key] = bounds_of_log(store, options)
                starts[key] = bounds[key].low if options.starting_offsets == "earliest" else bounds[key].high
                continue
            queues = queues_of(store)
            if first:
                begin.open(name, store)
                expected.find(store, queues)
            for queue in (each for each in queues if wanted(*each.ref)):
                key = Key(name.id, *queue.ref)
                bounds[key] = bounds_of(store, queue, options)
                if first:
                    starts[key] = begin.of(queue, bounds[key])
    if first:
        begin.check()
        if not by_log:
            _tell_missing(options, expected)
    return Snapshot(bounds, starts, frozenset(absent))


def _tell_missing(options: SourceOptions, expected: Expected) -> None:
    """TopicNotFoundError for topics and queues that the options name and no store has. If data loss is allowed, a
    warning: they may come yet."""
    if options.fail_on_data_loss:
        expected.check("failOnDataLoss=false waits for it, and so does subscribePattern")
    if missing := sorted({topic for topic, _ in expected.missing}):
        names = ", ".join(map(repr, missing))
        warn_once(f"no store has the topic {names}: the stream waits for it; see that it is spelled right")


# -- loss --------------------------------------------------------------------------------------------------------------

_GO_ON = " (failOnDataLoss=false goes on with what is left)"


@dataclass(slots=True)
class _Losses:
    """What is found to be lost. `settle` fails for the first, or warns."""

    found: list[tuple[Callable[[str], MQStoreError], str, str]] = field(default_factory=list)
    """The error, what it says, and what the user can do."""

    def out_of_range(self, key: Key, start: int, stop: int, low: int, top: int) -> None:
        """Note what of [start, stop) is lost, where a queue or log holds [low, top)."""
        what = "messages" if key.topic else "bytes"
        texts = []
        if start < low:
            goes_on = f"the stream goes on at offset {start}, but the oldest that is kept is {low}"
            texts.append(f"{goes_on}: {min(low, stop) - start} {what} are lost")
        if stop > top:
            texts.append(
                f"the stream has come to offset {stop}, but there are {low} to {top}: {stop - top} {what} are not "
                "there any more, and what is stored next bears their numbers. Was the store restored, or its tail lost "
                "in a power cut (isolation=flushed never reads such)?"
            )
        for text in texts:
            self.found.append((lambda whole: OffsetOutOfRangeError(whole, low, top), f"{key}: {text}", _GO_ON))

    def queue(self, key: Key, wanted: int, name: StoreName) -> None:
        text = f"{key} is not in {name.path} any more; the stream wants it from offset {wanted}"
        self.found.append((TopicNotFoundError, text, _GO_ON))

    def store(self, key: Key, wanted: int, known: Mapping[str, StoreName]) -> None:
        """`known`: the stores that the options name, by id."""
        name = known.get(key.store)
        if name is not None:
            where, remedy = f"{name.path} is no store any more", _GO_ON
        else:
            # To go on would read what may be the same store, under another id, a second time.
            where = f"no option names store {key.store!r} any more"
            there = ", ".join(map(repr, list(known)[:5]))  # some stores of a fleet
            remedy = (
                f". There are {there}: use the path or id that the query was started with, or "
                f"paths={{{key.store!r}: path}}"
            )
        self.found.append((NotAStoreError, f"{key}: {where}; the stream wants it from offset {wanted}", remedy))

    def settle(self, options: SourceOptions) -> None:
        if not self.found:
            return
        error, text, remedy = self.found[0]
        text += f". {len(self.found) - 1} more queues have lost messages" if len(self.found) > 1 else ""
        if options.fail_on_data_loss:
            raise error(f"{text}{remedy}")
        warn_once(f"{text}; passed over, as failOnDataLoss=false has it")


# -- the next offset ---------------------------------------------------------------------------------------------------


def _admits(options: SourceOptions) -> Callable[[Key], bool]:
    """Return a function that says whether the options name a queue, or a log."""
    wanted = names_queue(options)
    return lambda key: not key.topic or wanted(key.topic, key.queue_id)


def advance(
    options: SourceOptions, start: Mapping[Key, int], now: Snapshot, target: Mapping[Key, int] | None = None
) -> tuple[Offsets, Offsets]:
    """Where each queue goes on, and how far it could go; the table of the module. `target`: not beyond these, and no
    queue that is not among them. Raises for lost messages."""
    admits = _admits(options)
    losses = _Losses()
    begin: Offsets = {}
    end: Offsets = {}
    named = {name.id: name for name in stores_of(options)} if any(key not in now.bounds for key in start) else {}
    for key, position in start.items():
        bounds = now.bounds.get(key)
        begin[key] = end[key] = position
        if bounds is None:
            if admits(key):
                if key.store not in named or key.store in now.absent:
                    losses.store(key, position, named)
                else:
                    losses.queue(key, position, named[key.store])
            continue
        losses.out_of_range(key, position, max(position, bounds.low), bounds.low, bounds.top)
        begin[key] = end[key] = min(max(position, bounds.low), bounds.top)
        if position <= bounds.top:
            end[key] = max(begin[key], bounds.high if target is None else min(bounds.high, target.get(key, 0)))
    losses.settle(options)
    for key, bounds in now.bounds.items():
        if key not in start and (target is None or key in target):
            begin[key] = bounds.low
            end[key] = max(bounds.low, bounds.high if target is None else min(bounds.high, target[key]))
    return begin, end


# -- a stream ----------------------------------------------------------------------------------------------------------


class StreamProgress:
    """One run of a stream: what Spark asks of it, offset by offset. Keeps no store open between two calls."""

    def __init__(
        self,
        options: SourceOptions,
        look: Callable[..., Snapshot] = look,
        costs: Callable[[SourceOptions, Limit], AbstractContextManager[Costs]] = costs_of,
    ) -> None:
        self._options = options
        self._by_log = options.read_by == "log"
        self._look = look
        self._costs = costs
        self._initial: Offsets | None = None
        self._pin = False
        self._seen: Snapshot | None = None
        self._target: Offsets | None = None
        self._last: Offsets = {}
        self._published: dict[str, dict[tuple[str, int], int]] = {}

    def initial(self) -> dict[str, Any]:
        """Where a new stream begins; the same however often it is asked for in a run. As `look`."""
        if self._initial is None:
            self._seen = self._look(self._options, first=True)
            self._initial = dict(self._seen.starts)
            if self._target is not None:
                starts, target = self._initial, self._target
                self._initial = {key: min(at, target[key]) for key, at in starts.items() if key in target}
            self._last = self._initial
            self._pin = self._moves_with_time()
        return self._encode(self._initial)

    def _moves_with_time(self) -> bool:
        """Whether another moment would give another first offset, of messages that are there."""
        options = self._options
        if options.starting_timestamp_ms is not None or options.starting_group is not None:
            return True
        offsets = options.starting_offsets
        return offsets != "earliest" if isinstance(offsets, str | None) else -1 in _numbers(offsets)

    def fix_target(self) -> None:
        """From now on nothing counts that is stored later: for a run that ends with what there is."""
        self._seen = self._look(self._options)
        self._target = self._seen.ends

    def latest(self, start: dict[str, Any] | None, limit: Limit | None = None) -> dict[str, Any]:
        """The offset that the next batch ends at; `start` itself if there is nothing new. None for `start`: that of the
        last call, for a Spark that does not say.

        Spark asks when the batch that ended at `start` is done, so `start` is committed, as by `commit`.

        Raises for lost messages, as the module has it; ConfigError for a `start` of another kind of stream.
        """
        begin = self._last if start is None else self._decode(start)
        if start is not None:
            self._publish(begin)
        if self._pin:
            self._pin = False
            if self._initial == begin:
                return self._encode(begin)
        self._seen = self._look(self._options)
        at, end = advance(self._options, begin, self._seen, self._target)
        if limit is not None:
            with self._costs(self._options, limit) as costs:
                end = admit(at, end, limit.most, costs)
        self._last = end
        return self._encode(end)

    def reported(self) -> dict[str, Any] | None:
        """The end of what there is, for the progress report of a query; as of the last call that looked."""
        return None if self._seen is None else self._encode({**self._last, **self._seen.ends})

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[list[Slice]]:
        """The messages from `start` to `end`, cut as a batch's are; [] for none, and where `end` lies before `start`.

        Raises as `latest`: retention goes on, and Spark may ask for a batch that it logged before it was stopped.
        """
        begin, to = self._decode(start), self._decode(end)
        self._last = to
        self._pin = False  # the first batch is in the checkpoint
        moving: dict[str, list[Key]] = {}
        for key in sorted(to):
            if begin.get(key, -1) < to[key]:
                moving.setdefault(key.store, []).append(key)
        names = {name.id: name for name in stores_of(self._options)}
        losses = _Losses()
        found: list[Weighed] = []
        for store_id, keys in moving.items():
            name = names.get(store_id)
            try:
                store = None if name is None else open_store(name) if self._by_log else open_sliced(name)
            except NotAStoreError:
                store = None
            if name is None or store is None:
                for key in keys:
                    losses.store(key, begin.get(key, 0), names)
                continue
            with store:
                found += _between(self._options, name, store, keys, begin, to, losses)
        losses.settle(self._options)
        return [*partitions(found, self._options.min_partitions)]

    def commit(self, end: dict[str, Any]) -> None:
        """Everything before `end` is processed: tell the stores, if a group was named, of the queues that the options
        name: of others nothing is read, so they would lag for good. ConfigError for a store that cannot be told."""
        self._publish(self._decode(end))

    def _publish(self, done: Offsets) -> None:
        group = self._options.commit_group
        if group is None:
            return
        admits = _admits(self._options)
        by_store: dict[str, dict[tuple[str, int], int]] = {}
        for key, offset in done.items():
            if admits(key):
                by_store.setdefault(key.store, {})[key.topic, key.queue_id] = offset
        for name in stores_of(self._options):
            offsets = by_store.get(name.id)
            if offsets and self._published.get(name.id) != offsets:
                try:
                    publish(name.path, group, offsets)
                except FileNotFoundError:
                    continue  # the store is gone: what that means, the next batch decides
                except OSError as error:
                    raise ConfigError(
                        f"option commitGroup={group!r}: the progress cannot be written to {name.path}: {error}. Let "
                        "the user that Spark runs as write in config/spark, or leave the option out"
                    ) from error
                self._published[name.id] = offsets

    def _encode(self, offsets: Offsets) -> dict[str, Any]:
        return encode_offset(offsets, by_log=self._by_log)

    def _decode(self, value: Any) -> Offsets:
        return decode_offset(value, by_log=self._by_log)


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, dict):
        for each in value.values():
            yield from _numbers(each)
    else:
        yield value


def _between(
    options: SourceOptions,
    name: StoreName,
    store: MessageStore,
    keys: Iterable[Key],
    begin: Mapping[Key, int],
    end: Mapping[Key, int],
    losses: _Losses,
) -> Iterator[Weighed]:
    """What there is of these queues between the two offsets."""
    for key in keys:
        if not isinstance(store, SlicedStore):
            queue = None
            low, _, top = bounds_of_log(store, options)
        else:
            queue = store.load(key.topic, key.queue_id)
            if queue is None or not queue.next_offset:
                losses.queue(key, begin.get(key, 0), name)
                continue
            low, top = queue.min_offset, queue.max_offset
        start, stop = begin.get(key, low), end[key]
        losses.out_of_range(key, start, stop, low, top)
        start, stop = max(start, low), min(stop, top)
        if start < stop:
            yield weigh_log(name, start, stop) if queue is None else weigh(name, queue, start, stop)
