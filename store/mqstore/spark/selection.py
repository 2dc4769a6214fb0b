"""Which messages of which stores a job reads, and the form of its results.

select(...)  -> Selection       checked before anything is opened
Selection    -> tasks           lists of slices (`mqstore.spark.plan`), or stores
Shaped.to_dict()                plain values for JSON
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

from mqstore.errors import ConfigError, NotAStoreError
from mqstore.log.reader import to_ms
from mqstore.spark import optiontable
from mqstore.spark.options import OPTIONS, SourceOptions
from mqstore.spark.plan import (
    QueueSlice,
    Slice,
    StoreName,
    open_store,
    plan,
    queues_of,
    stores_of,
)

__all__ = [
    "Bound",
    "Selection",
    "Shaped",
    "Stores",
    "check_followed",
    "check_known",
    "local_path",
    "select",
]

Stores = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, str | os.PathLike[str]]
"""A store, a store set or a glob of stores; several; or paths by the ids that rows and reports call them."""
Bound = int | datetime | None
"""Where reading begins, or ends before: a queue offset, or a store time (UTC, if it does not say)."""

_LAST = (1 << 63) - 1
_NAMED = 20


# -- results -----------------------------------------------------------------------------------------------------------


class Shaped:
    """A result: a frozen dataclass whose fields are its documented shape. Times are ms since the epoch."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON: fields by name, tuples as lists, keys of mappings as text."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))  # type: ignore[call-overload]
        return found


# -- which messages ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Selection:
    """Which messages of which stores. Made by `select`; paths are absolute, for tasks run elsewhere."""

    options: SourceOptions
    offsets: tuple[int, int] = (0, _LAST)
    """First queue offset, and the first behind the last."""
    times_ms: tuple[int, int] = (-_LAST, _LAST)
    """Likewise."""
    given: Mapping[str, str] = field(default_factory=dict)
    """`options` as Spark is told them."""

    def stores(self) -> list[StoreName]:
        """The stores, one at least. ConfigError, as `plan.stores_of`, and for store sets that have no member: a job
        that looked at nothing must not say that all is well."""
        found = stores_of(self.options)
        if not found:
            paths = self.options.paths
            named = ", ".join(paths.values() if isinstance(paths, dict) else paths)
            raise ConfigError(f"{named}: a store set that has no stores yet; give one that has, or a store")
        return found

    def with_options(self, **values: Any) -> Selection:
        """The same with other fields of `SourceOptions`; `given` stays as it was."""
        return replace(self, options=replace(self.options, **values))

    def tasks(self, *, by_region: bool = False, resumed: bool = False, slots: int = 1) -> list[list[Slice]]:
        """The messages cut into tasks, as `plan.plan` does."""
        if self.options.read_by == "log" and (self.offsets, self.times_ms) != ((0, _LAST), (-_LAST, _LAST)):
            raise ConfigError("readBy=log reads whole logs and knows no offsets and times of queues: use readBy=queue")
        return plan(
            self.options,
            offsets=self.offsets,
            times_ms=self.times_ms,
            by_region=by_region,
            resumed=resumed,
            slots=slots,
        )

    def queue_tasks(self, *, by_region: bool = False, resumed: bool = False, slots: int = 1) -> list[list[QueueSlice]]:
        """As `tasks`, for a job that goes by queues. ConfigError for a store that has records and no queues, unless the
        user has said readBy=queue, and for a store that lost some of its queues: opening it brings them back, and a job
        that notes how far it has come would pass over them."""
        for name in self.stores():
            try:
                store = open_store(name)
            except NotAStoreError:
                continue  # what that means is for planning to say
            with store:
                if self.options.read_by == "auto" and not queues_of(store) and store.parts.has_records():
                    raise ConfigError(
                        f"{name.path} has records, and no consume queues to read them by: `mqstore recover` rebuilds "
                        "these (and readBy=queue reads what there is, which is nothing)"
                    )
                if store.clean_shutdown and store.parts.has_lost_queues():
                    raise ConfigError(
                        f"queues of {name.path} have lost files since it was closed: open it for writing once, or "
                        "`mqstore recover` it; until then messages would be missing"
                    )
        by_queue = self.with_options(read_by="queue") if self.options.read_by == "auto" else self
        found = by_queue.tasks(by_region=by_region, resumed=resumed, slots=slots)
        return [[piece for piece in task if isinstance(piece, QueueSlice)] for task in found]


def select(
    stores: Stores | Selection,
    *,
    topics: str | Sequence[str] | None = None,
    start: Bound = None,
    stop: Bound = None,
    where: str | None = None,
    options: Mapping[str, str] | None = None,
) -> Selection:
    """The messages of `topics` (all topics of users) in `stores`, from `start` up to before `stop` in each queue, whose
    properties fulfil `where` (SQL92); `options` are further ones of the Spark source (`docs/spark-options.md`).

    A selection is given back as it is, which then has to say everything. Raises ConfigError.
    """
    if isinstance(stores, Selection):
        if (topics, start, stop, where, options) != (None,) * 5:
            raise ConfigError("a selection says all of it: give topics, bounds and options to `select`")
        return stores
    given = dict(options or {})
    topics = topics if topics is None or isinstance(topics, str) else ",".join(topics)
    for name, value in (("subscribe", topics), ("filter", where), ("paths", json.dumps(_paths(stores)))):
        if value is not None:
            if name.lower() in {each.lower() for each in given}:
                raise ConfigError(f"option {name!r} is given twice: by its argument, and among the options")
            given[name] = value
    checked = SourceOptions.parse(given).for_batch()
    if checked.view != "messages":
        raise ConfigError(f"option view={checked.view!r}: a job reads messages")
    offsets, times_ms = [0, _LAST], [-_LAST, _LAST]
    for at, bound in enumerate((start, stop)):
        if isinstance(bound, datetime):
            times_ms[at] = to_ms(bound)
        elif bound is not None:
            if type(bound) is not int or bound < 0:
                raise ConfigError(f"{'start' if not at else 'stop'}={bound!r} is neither a queue offset nor a time")
            offsets[at] = bound
    return Selection(checked, (offsets[0], offsets[1]), (times_ms[0], times_ms[1]), given)


def _paths(stores: Stores) -> list[str] | dict[str, str]:
    if isinstance(stores, Mapping):
        return {name: local_path(path) for name, path in stores.items()}
    if isinstance(stores, str | os.PathLike):
        return [local_path(stores)]
    return [local_path(path) for path in stores]


def check_followed(selection: Selection, *followed: str, bounds: bool = False) -> None:
    """ConfigError for options of the source that a job does not go by, but for the fields that it does, and unless it
    goes by `bounds` for these: what was to leave messages out must not be passed over."""
    plain = Selection(selection.options)
    if not bounds and (selection.offsets, selection.times_ms) != (plain.offsets, plain.times_ms):
        raise ConfigError("start and stop (--from, --to): this job does not go by it; leave it out")
    unused = [name for name, option in OPTIONS.items() if option.field not in ("paths", *followed)]
    ignored = selection.options.set_among(unused)
    if ignored:
        raise ConfigError(f"option {', '.join(ignored)}: this job does not go by it; leave it out")


def check_known(what: str, wanted: Iterable[str], known: Iterable[str]) -> None:
    """ConfigError for names of groups or topics (`what`) that no store has, with those that there are: a name that is
    misspelt must not look like one that has nothing to report."""
    there = sorted({*known})
    unknown = sorted({*wanted} - {*there})
    if unknown:
        more = f" and {len(there) - _NAMED} more" if len(there) > _NAMED else ""
        names = f"there are {', '.join(map(repr, there[:_NAMED]))}{more}" if there else "there is none"
        raise ConfigError(f"no store knows the {what} {', '.join(map(repr, unknown))}; {names}")


def local_path(path: str | os.PathLike[str]) -> str:
    """The absolute path: executors have working directories of their own. ConfigError for a URL of what is no file
    system."""
    try:
        return os.path.abspath(optiontable.local_path(os.fspath(path)))
    except ValueError as error:
        raise ConfigError(f"{os.fspath(path)!r} is no path to read stores from or write files to: {error}") from error
