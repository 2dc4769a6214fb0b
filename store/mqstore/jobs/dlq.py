"""What groups gave up, and why: dead letters of one store or many.

A task goes through the dead letters of one store, from where each group's begin (what was purged or sent again is not
counted), and gives back a row for each group and topic that they came from. Reasons may be texts of exceptions, all
different, so of these only the frequent ones are kept (`mqstore.spark.tally`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np

from mqstore.broker import sql92
from mqstore.broker.deadletters import DeadLetters
from mqstore.broker.inspect import group_names
from mqstore.broker.names import DLQ_PREFIX, is_dlq_topic
from mqstore.broker.parts import Parts, open_parts
from mqstore.errors import ConfigError, FormatError
from mqstore.jobs.runner import Progress, Runner
from mqstore.layout.compression import MissingPackageError
from mqstore.layout.properties import DLQ_ORIGIN_TOPIC, DLQ_REASON, RETRY_TOPIC
from mqstore.log.message import Message
from mqstore.spark.plan import StoreName, open_store
from mqstore.spark.selection import Selection, Shaped, Stores, check_followed, check_known, select
from mqstore.spark.tally import HeavyHitters

__all__ = ["DeadLetterReport", "DeadLetterRow", "Reason", "Sample", "dlq_report", "groups_of"]

_REASONS: Final = 256
_SAMPLE_BYTES: Final = 200


@dataclass(frozen=True, slots=True)
class Reason(Shaped):
    """Why letters were given up; None for those that do not say."""

    reason: str | None
    at_least: int
    at_most: int


@dataclass(frozen=True, slots=True)
class Sample(Shaped):
    """One dead letter."""

    store: str
    queue_offset: int
    store_ms: int
    message_id: str
    keys: tuple[str, ...]
    attempts: int
    reason: str | None
    body: str
    """Its first bytes as text; what does not print is escaped, as in a Python string."""
    body_bytes: int


@dataclass(frozen=True, slots=True)
class DeadLetterRow(Shaped):
    """The dead letters of a group that came from one topic."""

    group: str
    origin_topic: str | None
    """None where they do not say."""
    count: int
    oldest_ms: int
    newest_ms: int
    max_attempts: int
    reasons: tuple[Reason, ...]
    """Most frequent first."""
    samples: tuple[Sample, ...]
    """The newest."""


@dataclass(frozen=True, slots=True)
class DeadLetterReport(Shaped):
    """What `dlq_report` found."""

    total: int
    rows: tuple[DeadLetterRow, ...]
    """Most letters first."""


def dlq_report(
    stores: Stores | Selection,
    *,
    jobs: int = 1,
    spark: Any = None,
    progress: Progress | None = None,
    groups: Iterable[str] | None = None,
    samples: int = 3,
    reasons: int = 10,
) -> DeadLetterReport:
    """Count the dead letters of `groups` (all), with the newest `samples` and most frequent `reasons` by origin.

    A selection says which, as for `dlq_resend`: bounds are of when letters were filed, or of their offsets, topics name
    where they came from, and a filter tests their properties. `jobs`, `spark` and `progress`: see `mqstore.jobs`.
    Raises ConfigError, also for a group that no store knows, and what opening a store raises.
    """
    for name, value in (("samples", samples), ("reasons", reasons)):
        if type(value) is not int or value < 0:
            raise ConfigError(f"{name}={value!r} is no number from 0 on")
    chosen = select(stores)
    check_followed(chosen, "topics", "filter", bounds=True)
    wanted = None if groups is None else frozenset(groups)
    found: dict[tuple[str, str | None], _Heap] = {}
    with Runner(jobs, spark, progress) as runner:
        parts = runner.run(chosen.stores(), partial(_look, chosen, wanted, samples), "mqstore dlq")
    check_known("group", wanted or (), (name for groups_there, _ in parts for name in groups_there))
    for _, part in parts:
        for key, heap in part.items():
            found.setdefault(key, _Heap()).merge(heap, samples)
    rows = [heap.row(*key, reasons) for key, heap in found.items()]
    rows.sort(key=lambda row: (-row.count, row.group, row.origin_topic or ""))
    return DeadLetterReport(sum(row.count for row in rows), tuple(rows))


@dataclass(slots=True)
class _Heap:
    """Letters of a group that came from one topic."""

    count: int = 0
    oldest_ms: int = (1 << 63) - 1
    newest_ms: int = -(1 << 63)
    max_attempts: int = 0
    reasons: HeavyHitters = field(default_factory=lambda: HeavyHitters(_REASONS))
    samples: list[Sample] = field(default_factory=list)
    """Newest first."""

    def merge(self, other: _Heap, samples: int) -> None:
        self.count += other.count
        self.oldest_ms = min(self.oldest_ms, other.oldest_ms)
        self.newest_ms = max(self.newest_ms, other.newest_ms)
        self.max_attempts = max(self.max_attempts, other.max_attempts)
        self.reasons.merge(other.reasons)
        self.samples = sorted(
            [*self.samples, *other.samples], key=lambda each: (-each.store_ms, each.store, -each.queue_offset)
        )[:samples]

    def row(self, group: str, origin: str | None, reasons: int) -> DeadLetterRow:
        frequent = tuple(Reason(text or None, least, most) for text, least, most in self.reasons.top(reasons))
        bounds = (self.count, self.oldest_ms, self.newest_ms, self.max_attempts)
        return DeadLetterRow(group, origin, *bounds, frequent, tuple(self.samples))


def _look(
    selection: Selection, groups: frozenset[str] | None, samples: int, name: StoreName
) -> tuple[set[str], Mapping[tuple[str, str | None], _Heap]]:
    """All groups of one store, and the letters of those that were asked for."""
    found: dict[tuple[str, str | None], _Heap] = {}
    latest: dict[tuple[str, str | None], list[Message]] = {}
    start_ms, stop_ms = selection.times_ms
    first, behind = selection.offsets
    origins, where = selection.options.topics, selection.options.filter
    matches = None if where is None else sql92.compile(where).matches
    one = np.ones(1, np.int64)
    with open_store(name) as store:
        parts = open_parts(store)
        known = groups_of(parts)
        for topic in store.topics():
            group = topic.removeprefix(DLQ_PREFIX)
            if not is_dlq_topic(topic) or (groups is not None and group not in groups):
                continue
            for letter in DeadLetters(parts, group).select(start_ms=start_ms, stop_ms=stop_ms):
                properties = letter.stored_properties()
                origin = properties.get(DLQ_ORIGIN_TOPIC) or properties.get(RETRY_TOPIC)
                if origins is not None and origin not in origins:
                    continue
                if not first <= letter.offset < behind or (matches is not None and not matches(properties)):
                    continue
                heap = found.setdefault((group, origin), _Heap())
                heap.count += 1
                heap.oldest_ms = min(heap.oldest_ms, letter.store_timestamp_ms)
                heap.newest_ms = max(heap.newest_ms, letter.store_timestamp_ms)
                heap.max_attempts = max(heap.max_attempts, letter.reconsume_times)
                heap.reasons.add([properties.get(DLQ_REASON, "")], one)
                newest = latest.setdefault((group, origin), [])
                newest.append(letter)
                del newest[: -samples or None]
        for key, letters in latest.items():
            found[key].samples = [_sample(name, letter) for letter in reversed(letters)]
    return known, found


def groups_of(parts: Parts) -> set[str]:
    """The groups of a store: those with progress or settings, and those that have only dead letters left."""
    letters = (topic.removeprefix(DLQ_PREFIX) for topic in parts.store.topics() if is_dlq_topic(topic))
    return {*group_names(parts), *letters}


def _sample(name: StoreName, letter: Message) -> Sample:
    try:
        body = bytes(letter.body)
    except (FormatError, MissingPackageError):
        body = bytes(letter.body_view)  # as it is stored: better than nothing
    return Sample(
        name.id,
        letter.offset,
        letter.store_timestamp_ms,
        letter.message_id,
        tuple(letter.keys),
        letter.reconsume_times,
        letter.stored_properties().get(DLQ_REASON),
        _shown(body[:_SAMPLE_BYTES]),
        len(body),
    )


def _shown(body: bytes) -> str:
    text = body.decode("utf-8", "surrogateescape")
    return "".join(char if char.isprintable() and char != "\\" else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    byte = ord(char) - 0xDC00  # of what is no UTF-8, as PEP 383 carries it
    return f"\\x{byte:02x}" if 0x80 <= byte <= 0xFF else char.encode("unicode_escape").decode("ascii")
