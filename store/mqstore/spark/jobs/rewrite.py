"""What all jobs share that copy stored messages into other stores: `replay`, `mirror`, `compact`, `dedup` (B6, B7).

    plan      slices of queues of the sources; where each topic goes; checked against every target before a task runs
    stage     a task copies its slices into a shard under each target's `_staging` (`mqstore.spark.copying`)
    publish   the driver commits the shards in the order of the tasks (`mqstore.spark.publish`)

A queue's slices lie in tasks that follow each other, a task copies in order, and shards are spliced in the order of the
tasks: so what was in order in a queue of the source is in order in its queue of the target.

A rewrite is known by (app, version) in each target. What is in is not staged again, a run that fails takes away what
it staged, and nothing of another one that is at the same (`Rewrite.writer`), and one that is killed leaves staging
that nobody reads: whatever happens in between, running it once more gives each target each message once. With several
targets each has its own commit; the run that comes after a crash completes those that lack it. Between the two runs
the sources may have grown, so the later targets may have more.

Knows no pyspark.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mqstore.broker.names import START_GROUP, check_user_topic, is_dlq_topic, is_retry_topic, is_system_topic
from mqstore.broker.parts import open_parts
from mqstore.errors import ConfigError
from mqstore.spark import publish
from mqstore.spark.copying import Copier, Spread, Target
from mqstore.spark.encode import Encoded
from mqstore.spark.jobs.shape import Plan, Progress, Selection, Shaped, run
from mqstore.spark.options import SourceOptions
from mqstore.spark.plan import QueueSlice, Slice, StoreName, open_store
from mqstore.spark.rows import Piece, Policy
from mqstore.spark.sinkoptions import APP_NAME, SinkOptions
from mqstore.spark.staging import ShardInfo, transaction_folder, write_shards
from mqstore.spark.tasks import policy_of, read_pieces

__all__ = [
    "CopyPlan",
    "DestReport",
    "Destination",
    "Dests",
    "Part",
    "Rewrite",
    "RewriteReport",
    "Route",
    "Wishes",
    "app_of",
    "derived_id",
    "execute",
    "living",
    "parts_of",
    "plan_of",
    "prepare",
    "queue_selection",
    "remove_if_empty",
    "sinks_of",
]

_Bools = npt.NDArray[np.bool_]

Dests = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, str | os.PathLike[str]]
"""A target; several; or paths by the names that `route` calls them."""
Route = Literal["all", "queue"] | Mapping[str, str] | None
"""With several targets: all messages to each; each queue to one; or the target of each topic, by name."""
_PAUSE_S = 0.5


# -- what is asked for -------------------------------------------------------------------------------------------------


def sinks_of(dests: Dests, *, target: str, lock_timeout: str | None = None) -> dict[str, SinkOptions]:
    """The targets by their names (their paths, if none were given). ConfigError, also for two that are one."""
    if isinstance(dests, Mapping):
        named = {str(name): os.fspath(path) for name, path in dests.items()}
    else:
        given = [dests] if isinstance(dests, str | os.PathLike) else [*dests]
        named = {os.fspath(path): os.fspath(path) for path in given}
        if len(named) < len(given):
            raise ConfigError("a target is named twice")
    if not named:
        raise ConfigError("no target: give the path of a store, or of a store set")
    more = {} if lock_timeout is None else {"lockTimeout": lock_timeout}
    found = {
        name: SinkOptions.parse({"path": os.path.abspath(path), "target": target, **more})
        for name, path in named.items()
    }
    places = Counter(os.path.realpath(options.path) for options in found.values())
    twice = [place for place, count in places.items() if count > 1]
    if twice:
        raise ConfigError(f"two targets are one folder: {twice[0]}")
    return found


def queue_selection(selection: Selection) -> Selection:
    """The selection, read by queues. ConfigError for options that a copy cannot follow, and for stores whose queues do
    not list what is in their logs."""
    options = selection.options
    if options.read_by == "log":
        raise ConfigError(
            "option readBy=log: copies keep the order of queues, so they are read by queues: readBy=queue"
        )
    if options.on_corrupt == "keep":
        raise ConfigError("option onCorrupt=keep: what is damaged cannot be copied; say skip, or fail")
    selection.check_queues(whole=True)
    return selection.with_options(read_by="queue")


def derived_id(kind: str, selection: Selection, *rest: Any) -> str:
    """A name for a rewrite that was given none: the same arguments, the same name. What the sources hold is no part of
    it, so a run that is repeated after they have grown is still the same one, and writes nothing twice. Bounds are: one
    that the caller computes from the clock makes another name each time."""
    said = [kind, asdict(selection.options), selection.offsets, selection.times_ms, *rest]
    text = json.dumps(said, sort_keys=True, default=_said)
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=10).hexdigest()


def _said(value: object) -> object:
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def app_of(kind: str, name: str) -> str:
    """Who writes, for the targets. ConfigError for a name that cannot be part of a folder's."""
    app = f"{kind}-{name}"
    if type(name) is not str or not name or not APP_NAME.fullmatch(app):
        raise ConfigError(
            f"{kind} id {name!r}: give 1 to {100 - len(kind) - 1} letters, digits, '.', '_' and '-'; it names the run"
        )
    return app


@dataclass(frozen=True, slots=True)
class Wishes:
    """How topics and queues of the sources become those of a target."""

    rename: Mapping[str, str] = field(default_factory=dict)
    queues: int | None = None
    spread: Spread = "queue"
    system: bool = False
    """Retry and dead-letter topics may be copied, as such."""
    grow: bool = False
    """A topic of a target that has fewer queues than are copied gets more, by who asks for that."""


# -- planning ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Destination:
    """A target, and what becomes of each topic there. Plain values: it travels."""

    name: str
    options: SinkOptions
    plan: publish.Plan
    targets: Mapping[str, Target]
    """By topic of the sources."""
    create: Mapping[str, int]
    """Queues of topics that the target lacks, or that have fewer there."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A rewrite with its arguments checked, as tasks are told it."""

    source: SourceOptions
    to: tuple[Destination, ...]
    app: str
    version: int
    mark: bytes = b""
    store_time: str | None = None
    rate: float | None = None
    """Messages a second that one task reads at most."""
    writer: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Where its tasks stage, apart from those of the same run that was started a second time beside it."""


@dataclass(frozen=True, slots=True)
class Part:
    """A task: slices for one of the targets."""

    to: int
    number: int
    slices: tuple[QueueSlice, ...]


def living(tasks: Sequence[Sequence[Slice]]) -> list[list[Slice]]:
    """The tasks without what lies before the logical start of its queue: messages of a topic that was deleted, letters
    that were purged. Until retention takes them they are in the log, and queues list them, but nobody in the source
    gets them any more; in a target everybody would."""
    starts: dict[tuple[StoreName, str, int], int] = {}
    for name in dict.fromkeys(piece.store for task in tasks for piece in task):
        with open_store(name) as store:
            for ref, start in open_parts(store).offsets.of_group(START_GROUP).items():
                starts[name, *ref] = start
    if not starts:
        return [[*task] for task in tasks]
    found: list[list[Slice]] = []
    for task in tasks:
        left: list[Slice] = []
        for piece in task:
            assert isinstance(piece, QueueSlice)
            start = max(piece.start, starts.get((piece.store, piece.topic, piece.queue_id), 0))
            if start < piece.stop:
                left.append(replace(piece, start=start))
        if left:
            found.append(left)
    return found


def prepare(
    selection: Selection,
    sinks: Mapping[str, SinkOptions],
    tasks: Sequence[Sequence[Slice]],
    wishes: Wishes,
    *,
    all_topics: bool = True,
) -> tuple[Destination, ...]:
    """Look at the targets, and find a place there for each topic of the tasks, which are `living`. ConfigError,
    InvalidMessageError for what will not go; writes nothing. `all_topics`: what is renamed must be among them."""
    _check_wishes(wishes)
    _refuse_overlap(selection, sinks)
    queues = _queues_of(tasks)
    unknown = sorted(set(wishes.rename) - set(queues)) if queues and all_topics else []
    if unknown:
        raise ConfigError(f"rename names {', '.join(map(repr, unknown))}, of which nothing is to be copied")
    for topic in queues:
        _refuse_topic(topic, wishes)
    found = []
    for name, options in sinks.items():
        plan = publish.plan_target(options)
        targets: dict[str, Target] = {}
        create: dict[str, int] = {}
        for topic, counts in queues.items():
            targets[topic] = _target(options, plan, wishes.rename.get(topic, topic), counts, wishes, create)
        found.append(Destination(name, options, plan, targets, create))
    return tuple(found)


def _check_wishes(wishes: Wishes) -> None:
    if wishes.queues is not None and (type(wishes.queues) is not int or not 1 <= wishes.queues <= 16_384):
        raise ConfigError(f"queues={wishes.queues!r} is not a number from 1 to 16384")
    if wishes.spread not in ("queue", "key"):
        raise ConfigError(f"spread={wishes.spread!r}: there are queue and key")
    if wishes.spread == "key" and wishes.queues is None:
        raise ConfigError("spread='key' finds a queue among so many: give queues, too")
    for old, new in wishes.rename.items():
        if is_retry_topic(new) or is_dlq_topic(new) or is_system_topic(new):
            raise ConfigError(f"rename {old!r} to {new!r}: that topic belongs to a group, or to the engine")
        check_user_topic(new)


def _refuse_topic(topic: str, wishes: Wishes) -> None:
    if is_system_topic(topic):
        raise ConfigError(
            f"topic {topic!r} belongs to the engine: what waits or half is in it has no meaning in another store; "
            "name topics of users"
        )
    if (is_retry_topic(topic) or is_dlq_topic(topic)) and not wishes.system and topic not in wishes.rename:
        raise ConfigError(
            f"topic {topic!r} holds what a group has again, or gave up: it is copied only if that is asked for "
            "(system=True, --system), or under the name of another topic (rename)"
        )


def _target(
    options: SinkOptions,
    plan: publish.Plan,
    name: str,
    counts: tuple[int, int],
    wishes: Wishes,
    create: dict[str, int],
) -> Target:
    count, used = counts
    known = plan.rules.topics.get(name)
    ours = is_retry_topic(name) or is_dlq_topic(name)
    if known is None or ours:
        if not ours:
            check_user_topic(name)
        size = wishes.queues if wishes.queues is not None and not ours else count
        create[name] = max(create.get(name, 0), size, known.queues if known is not None else 0)
        there = create[name]
    else:
        plan.rules.topic(name)  # raises for one that may not be written to
        there = known.queues if wishes.queues is None else known.write_queues
        if wishes.grow and wishes.queues is None and used > there and options.target == "store":
            create[name] = there = max(create.get(name, 0), count)
    wanted = wishes.queues if wishes.queues is not None and not ours else None
    if (wanted or used) > there:
        raise ConfigError(
            f"{options.path}: topic {name!r} has {there} queues, and the copies want {wanted or used}: "
            f"give queues={there} to spread them over those, or alter the topic"
        )
    rules = plan.rules
    return Target(name, wanted, wishes.spread, rules.group_hash, rules.max_body_bytes, rules.max_record_bytes)


def _queues_of(tasks: Sequence[Sequence[Slice]]) -> dict[str, tuple[int, int]]:
    """Topics of the tasks: how many queues each has in the source that has most of them, and up to which there are
    messages to copy."""
    slices = [piece for task in tasks for piece in task]
    found: Counter[str] = Counter()
    used: Counter[str] = Counter()
    for name in dict.fromkeys(piece.store for piece in slices):
        with open_store(name) as store:
            table = open_parts(store).topics
            for topic in {piece.topic for piece in slices if isinstance(piece, QueueSlice) and piece.store == name}:
                config = table.get(topic)
                found[topic] = max(found[topic], 0 if config is None else max(config.read_queues, config.write_queues))
    for piece in slices:
        assert isinstance(piece, QueueSlice)
        used[piece.topic] = max(used[piece.topic], piece.queue_id + 1)
    return {topic: (max(found[topic], count), count) for topic, count in sorted(used.items())}


def _refuse_overlap(selection: Selection, sinks: Mapping[str, SinkOptions]) -> None:
    """A source is read while the target is written: they must be two."""
    for name in selection.stores():
        source = Path(os.path.realpath(name.path))
        for options in sinks.values():
            target = Path(os.path.realpath(options.path))
            if source.is_relative_to(target) or target.is_relative_to(source):
                raise ConfigError(
                    f"target {options.path} and source {name.path} lie in one another: give another folder"
                )


def parts_of(tasks: Sequence[Sequence[Slice]], to: Sequence[Destination], route: Route) -> list[Part]:
    """The tasks, by targets. ConfigError for a route that leads nowhere."""
    names = [each.name for each in to]
    if route is None and len(to) > 1:
        raise ConfigError(
            f"{len(to)} targets: say by route what goes where: 'all', 'queue', or a target for each topic"
        )
    if isinstance(route, str) and route not in ("all", "queue"):
        raise ConfigError(f"route={route!r}: there are 'all', 'queue', and a target for each topic")
    if isinstance(route, Mapping):
        lost = sorted(set(route.values()) - set(names))
        topics = {piece.topic for task in tasks for piece in task if isinstance(piece, QueueSlice)}
        missing = sorted(topics - set(route))
        if lost or missing:
            raise ConfigError(
                f"route leads to {', '.join(map(repr, lost))}, which is no target; there are {', '.join(names)}"
                if lost
                else f"route names no target for topic {', '.join(map(repr, missing))}"
            )

    def leads(index: int, piece: QueueSlice) -> bool:
        if route is None or route == "all":
            return True
        if route == "queue":
            text = f"{piece.topic}\0{piece.queue_id}".encode("utf-8", "surrogateescape")
            return zlib.crc32(text) % len(to) == index
        assert isinstance(route, Mapping)
        return route[piece.topic] == names[index]

    parts = []
    for index in range(len(to)):
        for number, task in enumerate(tasks):
            slices = tuple(each for each in task if isinstance(each, QueueSlice) and leads(index, each))
            if slices:
                parts.append(Part(index, number, slices))
    return parts


# -- results -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DestReport(Shaped):
    """What became of one target."""

    path: str
    target: str
    already: bool
    """It had this run, or a later one of the same id; nothing was written to it."""
    messages: int
    bytes: int
    """Of records."""
    topics: Mapping[str, int]
    """Messages by topic of the target."""
    stores: tuple[str, ...]
    """target=set: ids of the new stores."""


@dataclass(frozen=True, slots=True)
class RewriteReport(Shaped):
    """What a job that copies has done."""

    id: str
    """Of the run: given again, nothing is written twice."""
    dests: tuple[DestReport, ...]
    read: int
    """Messages of the sources that passed the filters; counted for each target that they were read for."""
    left_out: int
    """Of those, the ones that the job does not copy."""
    damaged: int
    """Passed over, with onCorrupt=skip."""
    seconds: float

    @property
    def messages(self) -> int:
        """Copied, to all targets."""
        return sum(each.messages for each in self.dests)

    @property
    def already(self) -> bool:
        """Every target had it before."""
        return bool(self.dests) and all(each.already for each in self.dests)


@dataclass(frozen=True, slots=True)
class CopyPlan(Plan):
    """What a job that copies would read: nothing for targets that have the run."""

    id: str
    already: bool
    """Every target has it; nothing would be done."""


def plan_of(rewrite: Rewrite, parts: Sequence[Part], name: str) -> CopyPlan:
    """The plan of a rewrite that was checked."""
    there = [publish.is_committed(to.options, rewrite.app, rewrite.version) for to in rewrite.to]
    found = Plan.of_slices([part.slices for part in parts if not there[part.to]])
    return CopyPlan(found.stores, found.queues, found.messages, found.bytes, found.tasks, name, all(there))


# -- in the tasks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Staged:
    """What a task tells the driver."""

    to: int
    number: int
    shards: tuple[ShardInfo, ...]
    read: int
    damaged: int


Sifter = Callable[[QueueSlice, Piece], _Bools | None]
"""Which rows of a piece are copied; None: all."""


def stage(rewrite: Rewrite, part: Part, *, sift: Sifter | None = None) -> Staged:
    """Copy the slices of a part into a shard."""
    to = rewrite.to[part.to]
    policy = policy_of(rewrite.source)
    counts = Counter[str]()
    pace = None if rewrite.rate is None else Pace(rewrite.rate)
    shards = []
    folder = transaction_folder(Path(to.options.path), rewrite.app, rewrite.version, rewrite.writer)
    pieces = _copies(rewrite, to, part, policy, counts, sift, pace)
    for shard in write_shards(pieces, folder, part.number, 0, profile=to.plan.profile):
        if to.options.target == "set":
            publish.make_member(folder, shard, to.options, create=to.create)
        shards.append(shard)
    return Staged(part.to, part.number, tuple(shards), counts["read"], policy.corrupt)


def _copies(
    rewrite: Rewrite,
    to: Destination,
    part: Part,
    policy: Policy,
    counts: Counter[str],
    sift: Sifter | None,
    pace: Pace | None,
) -> Iterator[Encoded]:
    copiers: dict[str, Copier] = {}
    for piece, found in read_pieces(rewrite.source, part.slices, policy):
        if piece.topic not in copiers:
            copiers[piece.topic] = Copier(to.targets[piece.topic], mark=rewrite.mark, store_time=rewrite.store_time)
        counts["read"] += len(found)
        rows = None if sift is None else sift(piece, found)
        if pace is not None:
            pace.take(len(found))
        if rows is None or rows.any():
            yield copiers[piece.topic].copy(found, piece.store.id, rows)


class Pace:
    """Lets `rate` messages pass a second: who has taken more waits until the time for them has come."""

    def __init__(
        self, rate: float, now: Callable[[], float] = time.monotonic, wait: Callable[[float], None] = time.sleep
    ) -> None:
        self._rate = rate
        self._now = now
        self._wait = wait
        self._start = now()
        self._taken = 0

    def take(self, count: int) -> None:
        self._taken += count
        while (left := self._start + self._taken / self._rate - self._now()) > 0:
            self._wait(min(left, _PAUSE_S))


# -- the driver --------------------------------------------------------------------------------------------------------


def execute(
    spark: Any,
    rewrite: Rewrite,
    parts: Sequence[Part],
    name: str,
    *,
    work: Callable[[Rewrite, Part], Staged] = stage,
    progress: Progress | None = None,
    title: str = "mqstore",
) -> RewriteReport:
    """Stage and publish, in each target that does not have it yet. `work`: a function of a module, as `run` takes it.

    Raises what tasks and commits raise; what was staged and not published is taken away.
    """
    started = time.monotonic()
    there = [publish.is_settled(to.options, rewrite.app, rewrite.version) for to in rewrite.to]
    made = [not os.path.lexists(to.options.path) for to in rewrite.to]
    staged: list[Staged] = []
    published: dict[int, publish.Published] = {}
    try:
        staged = run(spark, [part for part in parts if not there[part.to]], partial(work, rewrite), progress, title)
        for index, to in enumerate(rewrite.to):
            shards = _shards(staged, index)
            if not there[index] and shards:  # nothing at all is no run that should be remembered as done
                wanted = publish.Commit(rewrite.app, rewrite.version, shards, writer=rewrite.writer, create=to.create)
                published[index] = publish.commit(to.options, wanted)
    finally:
        for index, to in enumerate(rewrite.to):
            if index not in published and not there[index]:
                publish.abort(to.options, rewrite.app, rewrite.version, writer=rewrite.writer)
                if made[index]:
                    remove_if_empty(to.options.path)
    dests = tuple(
        _report(to, there[index], published.get(index), _shards(staged, index)) for index, to in enumerate(rewrite.to)
    )
    read, damaged = sum(each.read for each in staged), sum(each.damaged for each in staged)
    copied = sum(shard.records for each in staged for shard in each.shards)
    return RewriteReport(name, dests, read, read - copied, damaged, time.monotonic() - started)


def remove_if_empty(path: str) -> None:
    """A target's folder that only staging had made."""
    with suppress(OSError):
        os.rmdir(path)


def _shards(staged: Sequence[Staged], index: int) -> list[ShardInfo]:
    mine = sorted((each for each in staged if each.to == index), key=lambda each: each.number)
    return [shard for each in mine for shard in each.shards]


def _report(
    to: Destination, there: bool, published: publish.Published | None, shards: Sequence[ShardInfo]
) -> DestReport:
    already = there or (published is not None and published.already)
    topics: Counter[str] = Counter()
    for shard in () if already else shards:
        for (topic, _), count in shard.queues.items():
            topics[topic] += count
    size = 0 if already else sum(shard.bytes for shard in shards)
    stores = () if published is None else published.stores
    return DestReport(
        to.options.path, to.options.target, already, topics.total(), size, dict(sorted(topics.items())), stores
    )
