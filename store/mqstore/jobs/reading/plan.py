"""Choice of the messages that a query reads, and their partitions.

    stores      a path, a glob, a store set, many of these with ids
    snapshot    the bounds of every queue, once for a query: messages added later are not read
    regions     queues that share a log are read in alternation, region by region of the log, if they are read whole
    partitions  lists of slices: small queues together, large ones cut, about 128 MiB or 500 000 messages each,
                four times that for a query with tags

A slice names a store by its path, so that every task opens the stores it needs. Only plain values are pickled.

`readBy=auto` reads queues if there are any. Reading the log in its order touches each page once, but every record must
be found by walking. Measured from the page cache, this reaches 0.5 to 1.0 of the rate of the queues.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from mqstore.broker.background.context import open_tables
from mqstore.broker.tables.names import DLQ_PREFIX, RETRY_PREFIX, is_system_topic
from mqstore.errors import ConfigError, MQStoreError, OffsetOutOfRangeError, TopicNotFoundError
from mqstore.jobs.errors import warn_once
from mqstore.jobs.options.options import ANY, EARLIEST, LATEST, Key, Offsets, SourceOptions
from mqstore.jobs.reading.keyindex import KeyIndex
from mqstore.jobs.reading.opening import StoreName, check_queues, open_store, opened, queues_of
from mqstore.jobs.reading.store_set import SET_FILE, read_set
from mqstore.layout.arrays.dispatch import LIGHT_PREFIX
from mqstore.layout.consumequeue import UNIT
from mqstore.log.commitlog import QueueRef
from mqstore.log.derived.consumequeue import ConsumeQueue
from mqstore.log.reading.reader import StoreReader

_ENGINES = (RETRY_PREFIX, DLQ_PREFIX, LIGHT_PREFIX)
"""Prefixes of the engine's topics. Light queues are among them: their messages are in a user's topic, too."""
_PARTITION_BYTES = 128 << 20
_PARTITION_MESSAGES = 500_000
_LEAST_PARTITION = 0.5
"""Smallest share of the usual partition that is worth a task."""
_REGION_BYTES = 64 << 20
_MAX_REGION_BYTES = 128 << 20
"""Limit of a region, since a segment may be unmapped before the next queue is read from it."""
_REGION_MESSAGES = 4096
"""Average number of messages of a queue in a region. The cost of a slice is that of some hundred messages."""
_MOST_SLICES = 100_000
_TAGGED = 0.25
"""Relative cost of a message in a query with tags, which reads each unit, but only some records."""
_GO_ON = " (failOnDataLoss=false reads the remaining ones)"
_FOR_QUEUES = (
    *("endingOffsets", "startingTimestamp", "startingOffsetsByTimestamp", "endingTimestamp", "startingGroup", "assign"),
)


@dataclass(frozen=True, slots=True)
class QueueSlice:
    """Queue offsets [start, stop) of a queue."""

    store: StoreName
    topic: str
    queue_id: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class LogSlice:
    """Records that begin at physical offsets [start, stop)."""

    store: StoreName
    start: int
    stop: int


Slice = QueueSlice | LogSlice


class Bounds(NamedTuple):
    """Bounds of a queue or log: [low, top) exists, and [low, high) may be read.
    They are queue offsets or physical offsets."""

    low: int
    high: int
    top: int


def stores_of(options: SourceOptions) -> list[StoreName]:
    """Return the stores that the options name, in order. ConfigError for an empty glob or a repeated id."""
    if isinstance(options.paths, dict):
        found = [_named(name, path) for name, path in options.paths.items()]
    else:
        found = [store for path in options.paths for store in _stores_at(path)]
    if twice := sorted(name for name, number in Counter(store.id for store in found).items() if number > 1):
        raise ConfigError(
            f"two stores have the id {', '.join(map(repr, twice))}; give ids by paths={{'id': 'path', ...}}"
        )
    return found


def _named(name: str, path: str) -> StoreName:
    """Return a store under its given id. ConfigError if there may be several stores at the path."""
    if os.path.exists(os.path.join(path, SET_FILE)) or (glob.has_magic(path) and not os.path.isdir(path)):
        raise ConfigError(
            f"option paths: {path} with the id {name!r} is a glob or a store set, which cannot have an id: use an array"
        )
    return StoreName(name, path)


def _stores_at(path: str) -> Iterator[StoreName]:
    """Return the store at a path, or those of a set or a glob."""
    folders = [path]
    if glob.has_magic(path) and not os.path.isdir(path):
        folders = [each for each in sorted(glob.glob(path)) if os.path.isdir(each)]
    if not folders:
        raise ConfigError(
            f"no folder matches the glob {path!r} on the machine that plans the query: give another one, or paths"
        )
    for folder in folders:
        place = os.path.normpath(folder)
        if (manifest := read_set(Path(folder))) is not None:
            yield from (StoreName(name, os.path.join(place, where)) for name, where in manifest["stores"].items())
        else:
            # A checkpoint has positions by id, so the id must be the same however the path is spelled next time. It is
            # text in columns and checkpoints, so bytes of the path that are not UTF-8 become \xff.
            yield StoreName(os.fsencode(place).decode("utf-8", "backslashreplace"), place)


def is_wanted(options: SourceOptions) -> Callable[[str], bool]:
    """Return a function that is true for the topics that the options choose."""
    named = options.topics if options.topics is not None else options.assign
    if named is not None:
        return frozenset(named).__contains__
    pattern, system = options.topic_pattern, options.include_system_topics

    def wanted(topic: str) -> bool:
        if not system and (is_system_topic(topic) or topic.startswith(_ENGINES)):
            return False
        return pattern is None or pattern.fullmatch(topic) is not None

    return wanted


def names_queue(options: SourceOptions) -> Callable[[str, int], bool]:
    """Return a function of topic and queue id, true for the queues that the options choose and for any log."""
    wanted, assign = is_wanted(options), options.assign
    return lambda topic, queue_id: not topic or (wanted(topic) and (assign is None or queue_id in assign[topic]))


def bounds_of(store: StoreReader, queue: ConsumeQueue, options: SourceOptions) -> Bounds:
    """Return the bounds of a queue that was just loaded."""
    low, top = queue.min_offset, queue.max_offset
    return Bounds(low, min(top, _flushed(store, queue.ref, low, top)) if options.isolation == "flushed" else top, top)


def bounds_of_log(store: StoreReader, options: SourceOptions) -> Bounds:
    """Return the bounds of the dispatched part of the log. ConfigError for options that need queues."""
    by_queue = ["startingOffsets"] if len(options.starting_offsets or ()) > 1 else []
    options.refuse(
        [*_FOR_QUEUES, *by_queue],
        " needs queues, but readBy=log reads whole logs: leave the option out, or give readBy=queue",
    )
    low, listed = store.min_offset, store.parts.listed_end()
    # Queues may have listed more before: records of a deleted topic stay in the log.
    top = max(listed, store.parts.readable_end(max(low, listed)))
    if store.clean_shutdown and store.parts.has_lost_queues():
        listed = top
    if options.isolation == "flushed" and not store.clean_shutdown:
        return Bounds(low, min(listed, store.parts.checkpoint.flushed or 0), top)
    return Bounds(low, listed, top)


class Weighed(NamedTuple):
    """A slice and the cost of reading it."""

    slice: Slice
    each: float
    """Cost of a message (or byte) of the slice, as a share of a partition."""


def weigh(name: StoreName, queue: ConsumeQueue | None, start: int, stop: int, scale: float = 1.0) -> Weighed:
    """Return messages [start, stop) of a queue, or records of the log without a queue, with their cost.
    There must be at least one. `scale` is the cost of a message relative to reading it whole."""
    if queue is None:
        return Weighed(LogSlice(name, start, stop), 1 / _PARTITION_BYTES)
    each = max(mean_size(queue, start, stop) / _PARTITION_BYTES, 1 / _PARTITION_MESSAGES)
    return Weighed(QueueSlice(name, queue.topic, queue.queue_id, start, stop), each * scale)


def plan(
    options: SourceOptions, *, only_queues: bool = False, by_region: bool = False, slots: int = 1
) -> list[list[Slice]]:
    """Return the partitions of a query for `slots` parallel tasks, [] if there is nothing to read.

    `only_queues`: refuse a store that lacks queues, whose log a query would read instead. `by_region`: read queues that
    share a log in alternation, for a query that reads every record. Each queue stays in order.

    With `fail_on_data_loss` raises TopicNotFoundError for a named topic or queue that no store has, and
    OffsetOutOfRangeError for deleted messages. Raises ConfigError, and the errors of opening a store.
    """
    stores = stores_of(options)
    wanted = Wanted(options, stores)
    names = names_queue(options)
    found: list[Weighed] = []
    for name in stores:
        if (store := opened(name, options, open_store)) is None:
            continue
        with store:
            queues = queues_of(store)
            by_log = options.read_by == "log" or (options.read_by == "auto" and not queues and not only_queues)
            if not by_log:
                check_queues(name, store, queues, options, job=only_queues)
            if (queues or options.read_by == "queue") and store.has_unlisted():
                warn_once(
                    f"mqstore: after a crash, queues of {name.path} lack messages of the log, which a query does not "
                    "see: open the store for writing once, or run `mqstore recover`"
                )
            if by_log:
                wanted.missing = {}  # the topics of a log are unknown until it is read
                start, stop = wanted.part(Key(name.id), bounds_of_log(store, options))
                found += [weigh(name, None, start, stop)] if start < stop else []
                continue
            wanted.open(store, queues)
            # onCorrupt=keep needs a row for each damaged message, whose keys are unknown, so all must be read.
            by_key = KeyIndex(store, options.keys) if options.keys and options.on_corrupt != "keep" else None
            mine: list[Weighed] = []
            for queue in (queue for queue in queues if names(*queue.ref)):
                key, bounds = Key(name.id, *queue.ref), bounds_of(store, queue, options)
                start, stop = wanted.part(key, bounds)
                if start < stop:
                    parts = [(start, stop)] if by_key is None else _by_key(by_key, store, queue, start, stop)
                    mine += [weigh(name, queue, *part, _TAGGED if options.tags else 1.0) for part in parts]
            found += _by_region(store, mine) if by_region and not options.tags and not options.keys else mine
    wanted.check("reads the others")
    return [*partitions(found, options.min_partitions, slots)]


class Losses:
    """Missing messages, which make a query or stream fail unless data loss is allowed."""

    def __init__(self, options: SourceOptions) -> None:
        self._fails = options.fail_on_data_loss
        self._found: dict[Key, tuple[Callable[[str], MQStoreError], str, str]] = {}
        """Error, its text and a remedy, by queue or log."""

    def add(self, key: Key, error: Callable[[str], MQStoreError], text: str, remedy: str = _GO_ON) -> None:
        """Record that messages of a queue or log are missing."""
        self._found.setdefault(key, (error, text, remedy))

    def clamp(self, key: Key, at: int, bounds: Bounds) -> int:
        """Return a wanted offset (`EARLIEST` and `LATEST` included), or the nearest existing one."""
        low, high, top = bounds
        at = {EARLIEST: low, LATEST: high}.get(at, at)
        lost, what = (low - at if at < low else at - top), "messages" if key.topic else "bytes"
        if lost > 0:
            text = f"{key}: offset {at} is not in {low}..{top}: {lost} {what} are "
            beyond = "missing. Was the store restored, or its tail lost in a power cut? "
            text += "lost" if at < low else f"{beyond}isolation=flushed does not read an unsynced tail"
            self.add(key, partial(OffsetOutOfRangeError, min_offset=low, max_offset=top), text)
        return min(max(at, low), top)

    def settle(self) -> None:
        """Raise the error of the first loss, or log it as a warning."""
        if self._found:
            error, text, remedy = next(iter(self._found.values()))
            more = len(self._found) - 1
            text += f". {more} more queues have lost messages" if more else ""
            if self._fails:
                raise error(f"{text}{remedy}")
            warn_once(f"{text}; skipped because of failOnDataLoss=false")


class Wanted:
    """Queues and offsets that the options of a query choose, in stores opened one after the other.
    It also finds named topics and queues that no store has, because an empty result for a misspelt topic would look
    right. A queue exists if it has had a message, or if the topic's entry has that many queues."""

    def __init__(self, options: SourceOptions, stores: Sequence[StoreName], default: int = EARLIEST) -> None:
        """`default` is the start if no option sets one. ConfigError for offsets of other stores."""
        self._options = options
        self._starting = _of_stores("startingOffsets", options.starting_offsets or {ANY: default}, stores)
        self._instants = _of_stores("startingOffsetsByTimestamp", options.starting_offsets_by_timestamp or {}, stores)
        self._ending = _of_stores("endingOffsets", options.ending_offsets or {ANY: LATEST}, stores)
        self._committed: dict[tuple[str, int], int] = {}
        self._knows_group = options.starting_group is None
        self.losses = Losses(options)
        self.missing: dict[tuple[str, int | None], str] = {}
        """Option that names each (topic, queue id), or (topic, None) for any queue."""
        if options.read_by != "log":
            by_time = options.starting_timestamp_ms is not None or options.starting_group is not None
            ending = self._ending if options.ending_timestamp_ms is None else {}
            self.missing |= {(key.topic, key.queue_id): "endingOffsets" for key in ending if key.topic}
            starting = {} if by_time else self._starting
            self.missing |= {(key.topic, key.queue_id): "startingOffsets" for key in starting if key.topic}
            self.missing |= {(key.topic, key.queue_id): "startingOffsetsByTimestamp" for key in self._instants}
            self.missing |= {(topic, i): "assign" for topic, ids in (options.assign or {}).items() for i in ids}
            self.missing |= {(topic, None): "subscribe" for topic in options.topics or ()}

    def open(self, store: StoreReader, queues: Iterable[ConsumeQueue]) -> None:
        """Continue with this store. `queues` are its queues that have had a message."""
        self._store = store
        if self._options.starting_group is not None:
            self._committed = open_tables(store).offsets.of_group(self._options.starting_group)
            self._knows_group |= bool(self._committed)
        refs = {queue.ref for queue in queues} if self.missing else set()
        there: set[tuple[str, int | None]] = {*refs, *((ref.topic, None) for ref in refs)}
        if left := self.missing.keys() - there:
            table = open_tables(store).topics
            for topic, queue_id in left:
                config = table.get(topic)
                if config is not None and (queue_id or 0) < max(config.read_queues, config.write_queues):
                    there.add((topic, queue_id))
        self.missing = {key: option for key, option in self.missing.items() if key not in there}

    def start(self, key: Key, bounds: Bounds) -> int:
        """Return the offset at which reading a queue of the store, or its log, starts."""
        options, ref = self._options, (key.topic, key.queue_id)
        at = self._starting.get(key, self._starting[ANY])
        if (instant := self._instants.get(key, options.starting_timestamp_ms)) is not None:
            at = self._store.offset_at(*ref, instant)
        elif options.starting_group is not None:
            at = self._committed.get(ref, EARLIEST)
        return self.losses.clamp(key, at, bounds)

    def part(self, key: Key, bounds: Bounds) -> tuple[int, int]:
        """Return the offsets [start, stop) to read of a queue of the store, or of its log."""
        at = self._ending.get(key, self._ending[ANY])
        if self._options.ending_timestamp_ms is not None:
            at = self._store.offset_at(key.topic, key.queue_id, self._options.ending_timestamp_ms)
        return self.start(key, bounds), min(self.losses.clamp(key, at, bounds), bounds.high)

    def check(self, goes_on: str) -> None:
        """Raise an error for names that no store has. Called after the last store.
        ConfigError for an unknown group, TopicNotFoundError for `missing` topics and queues, and the error of `Losses`.
        If data loss is allowed, warn that the query `goes_on`."""
        if not self._knows_group:
            raise ConfigError(
                f"option startingGroup={self._options.starting_group!r}: no store has committed offsets of this group; "
                "`mqstore lag` lists all groups, and without the option reading begins at the oldest message"
            )
        if self.missing:
            option = next(iter(self.missing.values()))
            names = [
                repr(topic) if queue_id is None else f"{topic!r}, queue {queue_id}"
                for (topic, queue_id), each in self.missing.items()
                if each == option
            ]
            text = f"no store has the topic {'; '.join(names)}, which option {option} names"
            if self._options.fail_on_data_loss:
                raise TopicNotFoundError(f"{text} (failOnDataLoss=false {goes_on})")
            warn_once(f"{text}; failOnDataLoss=false {goes_on}")
        self.losses.settle()


def _of_stores(option: str, offsets: Offsets, stores: Sequence[StoreName]) -> Offsets:
    """Return offsets by queue with the ids of stores. ConfigError for an unknown or a missing id."""
    ids = [store.id for store in stores]
    alone = ids[0] if len(ids) == 1 else ""
    found = {key._replace(store=key.store or alone) if key.topic else key: at for key, at in offsets.items()}
    if unknown := sorted({key.store for key in found if key.topic} - {*ids}):
        raise ConfigError(
            f"option {option} names queues of unknown stores {', '.join(map(repr, unknown))}; existing: "
            f"{', '.join(map(repr, ids))}. With several stores give {{store: {{topic: {{queue id: offset}}}}}}"
        )
    return found


def _by_key(index: KeyIndex, store: StoreReader, queue: ConsumeQueue, start: int, stop: int) -> list[tuple[int, int]]:
    """Return the parts of [start, stop) that may have messages with the wanted keys."""
    covered = []
    at = start
    for low, high in index.answered:
        first = _slot_at(store, queue.ref, at, stop, low)
        at = _slot_at(store, queue.ref, first, stop, high)
        covered.append((first, at))
    return [*index.narrowed(queue.ref, start, stop, covered)]


def _by_region(store: StoreReader, found: list[Weighed]) -> list[Weighed]:
    """Cut the slices at regions of the log, and return them region by region.
    So each page is mapped and read once, not once for each queue with a record in it. The cuts are approximate."""
    if len(found) < 2:
        return found
    pieces = [each.slice for each in found if isinstance(each.slice, QueueSlice)]
    refs = [QueueRef(piece.topic, piece.queue_id) for piece in pieces]
    ends = [
        [int(store.units(*ref, slot, 1)["physical_offset"][0]) for slot in (piece.start, piece.stop - 1)]
        for piece, ref in zip(pieces, refs, strict=True)
    ]
    low, high = min(min(places) for places in ends), max(max(places) for places in ends)
    messages = sum(piece.stop - piece.start for piece in pieces)
    regions = min((high - low) // _REGION_BYTES, min(messages // _REGION_MESSAGES, _MOST_SLICES) // len(pieces))
    if regions < 2 or (high - low) // regions > _MAX_REGION_BYTES:
        return found
    edges = [low + (high - low) * (region + 1) // regions for region in range(regions - 1)]
    cut: list[tuple[int, Weighed]] = []
    for weighed, piece, ref, (first, last) in zip(found, pieces, refs, ends, strict=True):
        at = [piece.start]
        for edge in edges:
            near = _REGION_MESSAGES // 4
            inside = _slot_at(store, ref, at[-1], piece.stop, edge, near) if first < edge <= last else at[-1]
            at.append(piece.stop if edge > last else inside)
        for region, (start, stop) in enumerate(pairwise([*at, piece.stop])):
            if start < stop:
                cut.append((region, Weighed(replace(piece, start=start, stop=stop), weighed.each)))
    return [each for _, each in sorted(cut, key=lambda pair: pair[0])]


def mean_size(queue: ConsumeQueue, start: int, stop: int) -> float:
    """Return the mean size of the records in [start, stop), from a few samples of units."""
    places = (start,) if stop - start <= 256 else (start, (start + stop) // 2, stop - 32)
    units = b"".join([queue.read(at, min(32, stop - at)) for at in places])
    sizes = [size for _, size, _ in UNIT.iter_unpack(units) if 0 < size < 1 << 30]  # too few for an array to pay
    return sum(sizes) / len(sizes) if sizes else 1.0


def _slot_at(
    store: StoreReader, ref: QueueRef, low: int, high: int, physical: int, near: int = 0, *, ends: bool = False
) -> int:
    """Return the first slot of [low, high) whose record begins at or after `physical`.
    With `ends` its end counts instead. The result may be up to `near` slots earlier. Void units count as earlier."""
    while high - low > near:
        middle = (low + high) // 2
        at, value = middle, -1
        while at < high:
            unit = store.units(*ref, at, 1)[0]
            value = int(unit["physical_offset"]) + (int(unit["size"]) if ends else 0)
            if 0 < int(unit["size"]) < 0x7FFF_FFFF:
                break
            at += 1
        if at < high and value < physical:
            low = at + 1
        else:
            high = middle
    return low


def _flushed(store: StoreReader, ref: QueueRef, low: int, high: int) -> int:
    """Return the offset after the last message that is known to be on disk."""
    if store.clean_shutdown:
        return high
    checkpoint = store.parts.checkpoint
    if checkpoint.flushed is not None:
        return _slot_at(store, ref, low, high, checkpoint.flushed + 1, ends=True)
    return store.offset_at(*ref, checkpoint.physic_msg_timestamp_ms)


def partitions(found: Sequence[Weighed], least: int, slots: int = 1) -> Iterator[list[Slice]]:
    """Yield the slices, in order, in at least `least` partitions of about equal weight.
    With several `slots` they fill whole rounds, with half to one and a half of the usual weight."""
    total = sum((piece.stop - piece.start) * each for piece, each in found)
    if not total:
        return
    number = max(least, -int(-total // 1))
    if slots > 1:
        rounds = max(1, round(total / slots))
        number = max(least, 1, min(rounds * slots, int(total / _LEAST_PARTITION)))
    group: list[Slice] = []
    room, left = (full := total / number), total
    for piece, each in found:
        start, stop = piece.start, piece.stop
        while start < stop:
            fits = max(1, round(room / each))
            # A small rest is not worth a cut.
            end = stop if (stop - start - fits) * each < full / 64 else start + fits
            group.append(replace(piece, start=start, stop=end))
            room -= (end - start) * each
            left -= (end - start) * each
            start = end
            if room < full / 64 <= left and number > 1:
                yield group
                # Computed again, because a message may weigh more than a partition. The others share the rest.
                number -= 1
                group, room = [], (full := left / number)
    if group:
        yield group
