"""Choice of the messages and stores that a job reads, and the form of its results.

select(...)  -> Selection       options, checked before anything is opened
Selection    -> tasks           lists of slices (`mqstore.jobs.reading.plan`), or stores
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
from mqstore.jobs.options.options import SOURCE_OPTIONS, SourceOptions, local_path
from mqstore.jobs.reading.opening import StoreName
from mqstore.jobs.reading.plan import QueueSlice, plan, stores_of
from mqstore.layout.jsontext import BODY, decode

Stores = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, str | os.PathLike[str]]
"""A store, store set or glob of stores, a list of them, or a dict of paths by the ids shown in rows and reports."""
Bound = datetime | str | None
"""Store time, UTC by default. Text has the form of the Spark options."""

_NAMED = 20


class Shaped:
    """Base of results: frozen dataclasses with documented fields. Times are ms since the epoch."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON: fields by name, tuples as lists, keys of mappings as text."""
        found: dict[str, Any] = decode(json.dumps(asdict(self)), BODY)  # type: ignore[call-overload]
        return found


@dataclass(frozen=True, slots=True)
class Selection:
    """Choice of stores and messages, made by `select`. Paths are absolute, because tasks run elsewhere."""

    options: SourceOptions
    given: Mapping[str, str] = field(default_factory=dict)
    """`options` as they were given."""

    def stores(self) -> list[StoreName]:
        """Return the stores, at least one. Raises ConfigError like `plan.stores_of`, and for sets without stores.
        A job that has read no store must not report that all is well."""
        found = stores_of(self.options)
        if not found:
            paths = self.options.paths
            raise ConfigError(f"paths={paths}: this store set has no stores yet; give another one, or a store")
        return found

    def with_options(self, **values: Any) -> Selection:
        """Return the selection with other fields of `SourceOptions`. `given` is not changed."""
        return replace(self, options=replace(self.options, **values))

    def queue_tasks(self, *, by_region: bool = False, slots: int = 1) -> list[list[QueueSlice]]:
        """Return the tasks that `plan.plan` makes with `only_queues`. Raises like it.
        Raises ConfigError for `readBy=log`."""
        if self.options.read_by == "log":
            raise ConfigError("option readBy=log: this job reads queues; use readBy=queue")
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
    """Choose the messages of `topics` (default: all users' topics) in `stores`.

    These are the messages stored in [`start`, `stop`) whose properties match `where` (SQL92). `options` are further
    options of the Spark source (`docs/spark-options.md`), such as `startingOffsets` and `endingOffsets`. A selection is
    returned unchanged, and other arguments are then refused. Raises ConfigError.
    """
    if isinstance(stores, Selection):
        if (topics, start, stop, where, options) != (None,) * 5:
            raise ConfigError("pass topics, bounds and options to `select`, not along with its result")
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
                raise ConfigError(f"option {name!r} is given twice, by an argument and in `options`")
            given[name] = value
    checked = SourceOptions.parse(given).for_batch()
    if checked.view != "messages":
        raise ConfigError(f"option view={checked.view!r}: a job reads messages")
    return Selection(checked, given)


def _time(name: str, bound: Bound, by_offset: str) -> str | None:
    if not isinstance(bound, datetime | str | None):
        raise ConfigError(f"{name}={bound!r} is not a time; for queue offsets use the option {by_offset}")
    if isinstance(bound, datetime) and bound.tzinfo is None:
        raise ConfigError(f"{name}={bound!r} has no time zone; use an aware one as datetime.now(timezone.utc)")
    return bound.isoformat() if isinstance(bound, datetime) else bound


def _paths(stores: Stores) -> list[str] | dict[str, str]:
    if isinstance(stores, Mapping):
        return {name: local_path(path) for name, path in stores.items()}
    return [local_path(path) for path in ([stores] if isinstance(stores, str | os.PathLike) else stores)]


def check_followed(selection: Selection, *followed: str) -> None:
    """Raise ConfigError for options without effect in a job: the user expects them to exclude messages.
    `followed` are the fields of `SourceOptions` that the job uses."""
    unused = [name for name, option in SOURCE_OPTIONS.options.items() if option.field not in ("paths", *followed)]
    selection.options.refuse(unused, " has no effect in this job; leave it out")


def names_of(given: Iterable[str]) -> tuple[str, ...]:
    """Return the names in `given`, each once. A str is one name."""
    return (given,) if isinstance(given, str) else tuple(dict.fromkeys(given))


def check_known(what: str, wanted: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError for groups or topics (`what`) that no store has. The text lists existing names.
    A misspelt name must not look like a group or topic with nothing to report."""
    there = sorted({*known})
    unknown = sorted({*wanted} - {*there})
    if unknown:
        more = f" and {len(there) - _NAMED} more" if len(there) > _NAMED else ""
        names = f"existing: {', '.join(map(repr, there[:_NAMED]))}{more}" if there else f"no {what} exists"
        raise ConfigError(f"no store has the {what} {', '.join(map(repr, unknown))}; {names}")
