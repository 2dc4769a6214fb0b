"""Messages of stores into other stores again: chosen by topics, bounds and properties, under other topics, over other
queues (spark.md B7).

What a copy keeps and what it gets is in `mqstore.spark.copying`: bytes of body and properties, the time of birth, the
attempts are kept; offsets and the time of storing are the target's own, as a store's log is ordered by them. That time
can be kept beside it, in the property REPLAY_STORE_TIME (`keep_time`).

A replay has an id. Each target remembers it with the messages, in one step: the same replay once more writes nothing,
whether the first one ended or crashed. Without an id it is derived from the arguments: bounds that are computed from
the clock want one.

Copied is what users sent. Topics of retries and of dead letters are asked for by name and `system`; what waits in the
engine's own topics (delays, timers, transactions that are not decided) is not copied: it is not sent yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mqstore.errors import ConfigError
from mqstore.layout.properties import encode_properties
from mqstore.spark.copying import Spread
from mqstore.spark.jobs.rewrite import (
    CopyPlan,
    Dests,
    Part,
    Rewrite,
    RewriteReport,
    Route,
    Wishes,
    app_of,
    derived_id,
    execute,
    living,
    parts_of,
    plan_of,
    prepare,
    queue_selection,
    sinks_of,
)
from mqstore.spark.jobs.shape import Bound, Progress, Selection, Stores, select, slots_of

__all__ = ["REPLAY_ID", "REPLAY_STORE_TIME", "replay", "replay_plan"]

REPLAY_ID: Final = "REPLAY_ID"
"""Property of a copy: which replay made it."""
REPLAY_STORE_TIME: Final = "REPLAY_STORE_TIME"
"""Property of a copy: when the original was stored, ms since the epoch."""


def replay(
    spark: Any,
    src: Stores | Selection,
    dests: Dests,
    *,
    topics: str | Sequence[str] | None = None,
    start: Bound = None,
    stop: Bound = None,
    where: str | None = None,
    rename: Mapping[str, str] | None = None,
    queues: int | None = None,
    spread: Spread = "queue",
    rate: float | None = None,
    keep_time: bool = False,
    tag: bool = False,
    route: Route = None,
    system: bool = False,
    target: str = "store",
    id: str | None = None,  # noqa: A002 - what it is called everywhere
    lock_timeout: str | None = None,
    progress: Progress | None = None,
) -> RewriteReport:
    """Copy the messages of `topics` in `src`, from `start` up to before `stop`, whose properties fulfil `where`, into
    `dests`. `spark`: a session, or None to run here.

    `rename`: new names of topics. `queues`: spread over so many, a queue of the source into one (`spread="queue"`) or
    by message group (`"key"`); None: each stays in the queue with its number. `rate`: messages a second that are read,
    by all tasks together; they become visible all at once. `keep_time`: also note when the original was stored. `tag`:
    mark each copy with the id of the replay. `route`: see `Route`. `target`: as the sink's option of that name.

    Raises, before anything is written, ConfigError for arguments and for targets that they do not fit,
    TopicNotFoundError; from the tasks InvalidMessageError for a message that a target cannot take, and what reading
    raises; then no target that is not complete has anything of it.
    """
    asked = _Asked(
        topics,
        start,
        stop,
        where,
        rename,
        queues,
        spread,
        rate,
        keep_time,
        tag,
        route,
        system,
        target,
        id,
        lock_timeout,
    )
    rewrite, parts, name = asked.planned(spark, src, dests)
    return execute(spark, rewrite, parts, name, progress=progress, title="mqstore replay")


def replay_plan(src: Stores | Selection, dests: Dests, **options: Any) -> CopyPlan:
    """What `replay` with these options would read, for all targets together that do not have it yet. Raises what it
    raises before it begins."""
    return plan_of(*_Asked(**options).planned(None, src, dests))


@dataclass(frozen=True, slots=True)
class _Asked:
    """The arguments of `replay`."""

    topics: str | Sequence[str] | None = None
    start: Bound = None
    stop: Bound = None
    where: str | None = None
    rename: Mapping[str, str] | None = None
    queues: int | None = None
    spread: Spread = "queue"
    rate: float | None = None
    keep_time: bool = False
    tag: bool = False
    route: Route = None
    system: bool = False
    target: str = "store"
    id: str | None = None
    lock_timeout: str | None = None

    def planned(self, spark: Any, src: Stores | Selection, dests: Dests) -> tuple[Rewrite, list[Part], str]:
        if self.rate is not None and not self.rate > 0:
            raise ConfigError(f"rate={self.rate!r} is not a number of messages a second above 0")
        asked = select(src, topics=self.topics, start=self.start, stop=self.stop, where=self.where)
        chosen = queue_selection(asked)
        sinks = sinks_of(dests, target=self.target, lock_timeout=self.lock_timeout)
        wishes = Wishes(dict(self.rename or {}), self.queues, self.spread, self.system)
        name = self.id or derived_id(
            "replay",
            chosen,
            [[options.path, options.target] for options in sinks.values()],
            [dict(wishes.rename), self.queues, self.spread, self.keep_time, self.tag, self.route],
        )
        app = app_of("replay", name)
        tasks = living(chosen.tasks())
        to = prepare(chosen, sinks, tasks, wishes)
        parts = parts_of(tasks, to, self.route)
        at_once = max(1, min(len(parts), slots_of(spark)))
        rewrite = Rewrite(
            chosen.options,
            to,
            app,
            0,
            mark=encode_properties({REPLAY_ID: name}) if self.tag else b"",
            store_time=REPLAY_STORE_TIME if self.keep_time else None,
            rate=None if self.rate is None else self.rate / at_once,
        )
        return rewrite, parts, name
