"""A copy of stores that has of each key the last message alone (spark.md B7); `mqstore.spark.jobs.keyed` makes it.

Within a topic, messages with the same key are one thing at different times, of which the last one counts. A message has
one key: with `key="keys"` all of the KEYS property, so one that bears two keys replaces only those that bear both.
Messages without a key are copied.

A tombstone is a message with a key and no body: what it was about is gone. It replaces what came before it, as any
other does, and stays so that consumers hear of it, but for those that are older than `retention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mqstore.clock import SYSTEM_CLOCK, Clock
from mqstore.errors import ConfigError
from mqstore.options import seconds
from mqstore.spark.copying import Spread
from mqstore.spark.jobs.keyed import Found, Judge, Rows, TopicChange, check_fields, check_new, last_of_each, sifted
from mqstore.spark.jobs.rewrite import (
    CopyPlan,
    Dests,
    Part,
    Rewrite,
    Wishes,
    app_of,
    derived_id,
    living,
    parts_of,
    plan_of,
    prepare,
    queue_selection,
    sinks_of,
)
from mqstore.spark.jobs.shape import Progress, Selection, Shaped, Stores, select

__all__ = ["CompactReport", "Sifting", "compact", "compact_plan", "planned"]


@dataclass(frozen=True, slots=True)
class CompactReport(Shaped):
    """What `compact` or `dedup` has done."""

    id: str
    dest: str
    target: str
    already: bool
    """The target had this run before; nothing was written."""
    before: int
    """Messages of the sources."""
    after: int
    """Of the target."""
    bytes_before: int
    """Of records."""
    bytes_after: int
    keys: int
    """Different ones, by topic."""
    without_key: int
    """Messages that have none; all of them are in the target."""
    damaged: int
    topics: tuple[TopicChange, ...]
    stores: tuple[str, ...]
    """target=set: ids of its stores."""
    seconds: float


def compact(
    spark: Any,
    stores: Stores | Selection,
    dest: str,
    *,
    key: str | Sequence[str] = "keys",
    keep: str = "latest",
    tombstones: bool = True,
    retention: float | timedelta | None = None,
    topics: str | Sequence[str] | None = None,
    queues: int | None = None,
    spread: Spread = "queue",
    target: str = "store",
    id: str | None = None,  # noqa: A002
    progress: Progress | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> CompactReport:
    """Copy into `dest`, a new store or (`target="set"`) a new set, of each topic and key the message that `keep` says
    (`"latest"`), in the order in which they lie in their queues. `spark`: a session, or None to run here.

    `key`: `keys`, `tags`, `unique_key`, `sharding_key`, `body`, `body.NAME` (a member of a JSON body, with dots one of
    its members), or the name of a property; several make one key. `tombstones`: an empty body takes away its key, and
    goes itself when it is older than `retention` (seconds, or a timedelta; None: never); False: it is a message as any
    other, as where the key is of bodies, of which it has none. Run again with the same arguments, or the same `id`, it
    does nothing.

    Raises ConfigError for arguments and for a target that is not new, and as `replay`.
    """
    if keep != "latest":
        raise ConfigError(f"keep={keep!r}: compaction keeps the latest; dedup keeps the first")
    sifting, age_ms = _compaction(stores, dest, key, tombstones, retention, topics, queues, spread, target, id)
    oldest_ms = None if age_ms is None else clock.now_ms() - age_ms
    return sifting.run(spark, partial(_superseded, oldest_ms), progress)


def compact_plan(
    stores: Stores | Selection,
    dest: str,
    *,
    key: str | Sequence[str] = "keys",
    tombstones: bool = True,
    retention: float | timedelta | None = None,
    topics: str | Sequence[str] | None = None,
    queues: int | None = None,
    spread: Spread = "queue",
    target: str = "store",
    id: str | None = None,  # noqa: A002
) -> CopyPlan:
    """What `compact` with these arguments would read; it reads it twice. Raises what it raises before it begins."""
    return _compaction(stores, dest, key, tombstones, retention, topics, queues, spread, target, id)[0].plan()


def _compaction(
    stores: Stores | Selection,
    dest: str,
    key: str | Sequence[str],
    tombstones: bool,
    retention: float | timedelta | None,
    topics: str | Sequence[str] | None,
    queues: int | None,
    spread: Spread,
    target: str,
    name: str | None,
) -> tuple[Sifting, int | None]:
    """The copy, and ms after which tombstones go (None: never). ConfigError."""
    if retention is not None and not tombstones:
        raise ConfigError("retention is that of tombstones, and tombstones=False knows none")
    fields = check_fields("key", key)
    age_ms = None if retention is None else int(seconds(retention, "retention") * 1000)
    wishes = Wishes({}, queues, spread)
    return planned("compact", stores, dest, topics, fields, wishes, target, name, [tombstones, age_ms]), age_ms


def _superseded(oldest_ms: int | None, rows: Rows) -> npt.NDArray[np.bool_]:
    """All but the last of each key; of tombstones, those that were stored before `oldest_ms` as well."""
    of_store = np.lexsort((rows.physical, rows.store, rows.key))
    of_store = of_store[last_of_each(rows.key[of_store], rows.store[of_store])]
    order = of_store[np.lexsort((rows.store[of_store], rows.stored_ms[of_store], rows.key[of_store]))]
    last = order[last_of_each(rows.key[order])]
    if oldest_ms is not None:
        last = last[~(rows.empty[last] & (rows.stored_ms[last] < oldest_ms))]
    left_out = np.ones(len(rows.key), np.bool_)
    left_out[last] = False
    return left_out


# -- shared with `dedup` -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sifting:
    """A copy without some, with its arguments checked."""

    kind: str
    name: str
    fields: tuple[str, ...]
    rewrite: Rewrite
    parts: list[Part]

    def plan(self) -> CopyPlan:
        """What `run` would read, twice."""
        return plan_of(self.rewrite, self.parts, self.name)

    def run(self, spark: Any, judge: Judge, progress: Progress | None) -> CompactReport:
        title = f"mqstore {self.kind}"
        found = sifted(spark, self.rewrite, self.parts, self.name, self.fields, judge, progress=progress, title=title)
        return _report(self.name, found)


def planned(
    kind: str,
    stores: Stores | Selection,
    dest: Dests,
    topics: str | Sequence[str] | None,
    fields: tuple[str, ...],
    wishes: Wishes,
    target: str,
    name: str | None,
    asked: Sequence[Any],
) -> Sifting:
    """Check everything; writes nothing. `asked`: what else tells runs apart that have no `name` of their own."""
    chosen = queue_selection(select(stores, topics=topics))
    sinks = sinks_of(dest, target=target)
    [options] = sinks.values()
    if not name:
        said = [list(fields), *asked, wishes.queues, wishes.spread]
        name = derived_id(kind, chosen, options.path, options.target, *said)
    app = app_of(kind, name)
    check_new(options, app, 0)
    tasks = living(chosen.tasks())
    to = prepare(chosen, sinks, tasks, wishes)
    return Sifting(kind, name, fields, Rewrite(chosen.options, to, app, 0), parts_of(tasks, to, None))


def _report(name: str, found: Found) -> CompactReport:
    rewritten = found.rewritten
    [dest] = rewritten.dests
    return CompactReport(
        name,
        dest.path,
        dest.target,
        dest.already,
        sum(each.before for each in found.topics),
        dest.messages,
        found.bytes_before,
        dest.bytes,
        found.keys,
        found.without_key,
        rewritten.damaged,
        found.topics,
        dest.stores,
        rewritten.seconds,
    )
