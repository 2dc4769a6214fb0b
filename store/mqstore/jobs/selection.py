"""Messages and stores that a job reads, and the form of its results.

select(...)  -> Selection       options, checked before anything is opened
Selection    -> tasks           lists of slices (`mqstore.jobs.plan`), or stores
Shaped.to_dict()                plain values for JSON
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

from mqstore.errors import ConfigError
from mqstore.jobs.opening import StoreName
from mqstore.jobs.options import SOURCE_OPTIONS, SourceOptions
from mqstore.jobs.paths import local_path
from mqstore.jobs.plan import QueueSlice, plan, stores_of
from mqstore.layout.jsontext import BODY, decode

__all__ = ["Bound", "Selection", "Shaped", "Stores", "check_followed", "check_known", "select"]

Stores = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, str | os.PathLike[str]]
"""One store, store set or glob of stores, several of them, or paths by the ids that rows and reports show."""
Bound = datetime | str | None
"""Store time at which reading begins, or ends before. UTC by default. Text as the options have it."""

_NAMED = 20


class Shaped:
    """A result: a frozen dataclass whose fields are its documented shape. Times are ms since the epoch."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON: fields by name, tuples as lists, keys of mappings as text."""
        found: dict[str, Any] = decode(json.dumps(asdict(self)), BODY)  # type: ignore[call-overload]
        return found


@dataclass(frozen=True, slots=True)
class Selection:
    """A choice of stores and messages, made by `select`. Paths are absolute, because tasks run elsewhere."""

    options: SourceOptions
    given: Mapping[str, str] = field(default_factory=dict)
    """`options` as given to Spark."""

    def stores(self) -> list[StoreName]:
        """Return the stores, at least one. ConfigError as `plan.stores_of`, and for sets without a member.
        A job that looked at nothing must not say that all is well."""
        found = stores_of(self.options)
        if not found:
            paths = self.options.paths
            raise ConfigError(f"paths={paths}: a store set that has no stores yet; give one that has, or a store")
        return found

    def with_options(self, **values: Any) -> Selection:
        """Return the selection with other fields of `SourceOptions`. `given` is not changed."""
        return replace(self, options=replace(self.options, **values))

    def queue_tasks(self, *, by_region: bool = False, slots: int = 1) -> list[list[QueueSlice]]:
        """Return the messages cut into tasks, as `plan.plan` does with `only_queues`, and raise as it does.
        ConfigError for `readBy=log`."""
        if self.options.read_by == "log":
            raise ConfigError("option readBy=log: this job goes by queues: use readBy=queue")
        self.stores()
        found = plan(self.options, only_queues=True, by_region=by_region, slots=slots)
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
    """Choose the messages of `topics` (all topics of users) in `stores`.

    Chosen are those stored in [`start`, `stop`) whose properties match `where` (SQL92). `options` are further ones of
    the Spark source (`docs/spark-options.md`), such as `startingOffsets` and `endingOffsets`. A selection is returned
    as it is. Other arguments are then refused. Raises ConfigError.
    """
    if isinstance(stores, Selection):
        if (topics, start, stop, where, options) != (None,) * 5:
            raise ConfigError("a selection says all of it: give topics, bounds and options to `select`")
        return stores
    given = dict(options or {})
    arguments = {
        "subscribe": topics if topics is None or isinstance(topics, str) else ",".join(topics),
        "filter": where,
        "startingTimestamp": _time("start", start, "startingOffsets"),
        "endingTimestamp": _time("stop", stop, "endingOffsets"),
        "paths": json.dumps(_paths(stores)),
    }
    for name, value in arguments.items():
        if value is not None:
            if name.lower() in {each.lower() for each in given}:
                raise ConfigError(f"option {name!r} is given twice: by its argument, and among the options")
            given[name] = value
    checked = SourceOptions.parse(given).for_batch()
    if checked.view != "messages":
        raise ConfigError(f"option view={checked.view!r}: a job reads messages")
    return Selection(checked, given)


def _time(name: str, bound: Bound, by_offset: str) -> str | None:
    if not isinstance(bound, datetime | str | None):
        raise ConfigError(f"{name}={bound!r} is no time; for queue offsets use the option {by_offset}")
    return bound.isoformat() if isinstance(bound, datetime) else bound


def _paths(stores: Stores) -> list[str] | dict[str, str]:
    if isinstance(stores, Mapping):
        return {name: local_path(path) for name, path in stores.items()}
    return [local_path(path) for path in ([stores] if isinstance(stores, str | os.PathLike) else stores)]


def check_followed(selection: Selection, *followed: str) -> None:
    """Raise ConfigError for options that a job ignores: they were to leave messages out.
    `followed` are the fields of `SourceOptions` that the job uses."""
    unused = [name for name, option in SOURCE_OPTIONS.options.items() if option.field not in ("paths", *followed)]
    selection.options.refuse(unused, ": this job does not go by it; leave it out")


def check_known(what: str, wanted: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError for names of groups or topics (`what`) that no store has, with existing names.
    A misspelt name must not look like one that has nothing to report."""
    there = sorted({*known})
    unknown = sorted({*wanted} - {*there})
    if unknown:
        more = f" and {len(there) - _NAMED} more" if len(there) > _NAMED else ""
        names = f"there are {', '.join(map(repr, there[:_NAMED]))}{more}" if there else "there is none"
        raise ConfigError(f"no store knows the {what} {', '.join(map(repr, unknown))}; {names}")
