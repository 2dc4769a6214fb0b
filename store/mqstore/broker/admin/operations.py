"""Work of an operator on a store: what commands show and change, with plain arguments and results.

    a directory    looks at the files; changes them with the writer's lock           of_directory(path)
    a server       looks at its own files; changes by its broker                     serve/operators.py
    a client       each method is a call to the server                               remoting/calls.py

With `dry_run` a change is checked completely and nothing is written. Beside a writer it is refused, as the change is.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, NamedTuple

from mqstore.broker.admin.inspect import QueueLag, delay_levels, group_names, sections_of, timer_view
from mqstore.broker.admin.offline import Offline, look, offline
from mqstore.broker.background.context import Tables
from mqstore.broker.pop.orderinfo import BlockedQueue
from mqstore.broker.reads.filters import sql92
from mqstore.broker.reads.reading import Reads, Start
from mqstore.broker.redelivery.dead_letters import DeadLetters, Replay, letter_origin, letters_of
from mqstore.broker.tables.groups import GroupConfig, RetryPolicy, default_retry
from mqstore.broker.tables.names import is_dlq_topic, pop_retry_topic, retry_topic
from mqstore.broker.tables.topics import TopicConfig
from mqstore.errors import ConfigError, GroupNotFoundError, ReadOnlyStoreError, TopicNotFoundError
from mqstore.log.commitlog import QueueRef
from mqstore.log.message import Message


class TopicView(NamedTuple):
    """A topic."""

    config: TopicConfig
    messages: int
    groups: list[str]
    """Groups with committed offsets in it, sorted."""


class GroupView(NamedTuple):
    """A consumer group."""

    config: GroupConfig
    registered: bool
    """False if it has committed offsets, but no settings."""
    topics: list[str]
    suspended: dict[QueueRef, BlockedQueue]
    """Failed message of each queue that one blocks. Empty for a group that was just changed."""


class Move(NamedTuple):
    """A committed offset that was reset."""

    queue: QueueRef
    first: int
    """Offset of the first message that counts."""
    before: int | None
    to: int


Opening = Callable[[], AbstractContextManager[Offline]]


class Operations:
    """What an operator sees and changes. Use `of_directory`, or the `admin` of a connected store's broker.
    Raises the errors of `Offline` and its tables."""

    def __init__(self, looking: Opening, planning: Opening, changing: Opening) -> None:
        self._looking, self._planning, self._changing = looking, planning, changing

    def _opened(self, dry_run: bool) -> AbstractContextManager[Offline]:
        return (self._planning if dry_run else self._changing)()

    # -- looking ----------------------------------------------------------------------------------------------------

    def topics(self, system: bool = False) -> list[TopicView]:
        """Return the topics, sorted by name. System topics are included only with `system`."""
        with self._looking() as opened:
            return [_topic(opened, name) for name in opened.topics.names(system)]

    def groups(self, name: str | None = None) -> list[GroupView]:
        """Return every group, or one. Raises GroupNotFoundError."""
        with self._looking() as opened:
            names = group_names(opened.tables)
            if name is not None:
                _check_group(opened, name)
                names = [name]
            failed: dict[str, dict[QueueRef, BlockedQueue]] = defaultdict(dict)
            for key, blocked in sorted(opened._pops.suspended.items()):
                failed[key.group][QueueRef(key.topic, key.queue_id)] = blocked
            return [_group(opened, each)._replace(suspended=failed[each]) for each in names]

    def lag(self, group: str | None = None, topic: str | None = None) -> list[QueueLag]:
        """Return the lag of each queue in which a group has started, of all groups or one.
        Raises GroupNotFoundError and TopicNotFoundError."""
        with self._looking() as opened:
            if topic is not None:
                opened.topics.require(topic)
            names = group_names(opened.tables) if group is None else [group]
            return [lag for name in names for lag in opened.lag(name) if topic in (None, lag.topic)]

    def delays(self) -> dict[str, Any]:
        """Return the messages that wait to be delivered later, as `mqstore delay show --json` prints them.
        `levels` has a row for each level in use, orphans included, and `timer` has `waiting` and `next_due_ms`."""
        with self._looking() as opened:
            sections = sections_of(opened.tables)
            return {"levels": sections["delay_levels"](), "timer": sections["timer"]()}

    def activity(self) -> dict[str, Any]:
        """Return the counts that `mqstore top` shows and compares, as plain values.

            store, taken_ms, log_bytes, free_bytes, delayed
            topics    [messages, end] by topic
            groups    {oldest_age_ms, dead_letters, topics} by group; topics has [queues, done, lag, in flight] by topic

        `end` and `done` are sums over queues. They grow with each message that is stored, and that the group settles.
        Two values of `done` can be compared if `queues`, in which the group has started, are as many."""
        with self._looking() as opened:
            tables, store = opened.tables, opened.tables.store
            names, now_ms = group_names(opened.tables), tables.clock.now_ms()
            letters = {each.group: len(each) for each in letters_of(tables)}
            groups = {}
            for name in sorted({*names, *letters}):
                oldest_ms, topics = [], dict[str, list[int]]()
                for lag in opened.lag(name) if name in names else ():
                    if lag.committed is not None:
                        row = 1, lag.end - lag.messages, lag.messages, lag.in_flight
                        topics[lag.topic] = [*map(sum, zip(row, topics.get(lag.topic, [0] * 4), strict=True))]
                        oldest_ms += [lag.oldest_ms] if lag.oldest_ms else []
                age_ms = max(0, now_ms - min(oldest_ms)) if oldest_ms else None
                groups[name] = {"oldest_age_ms": age_ms, "dead_letters": letters.get(name, 0), "topics": topics}
            stored = {*store.topics()}
            ends = {}
            for name in (each for each in opened.topics.names() if not is_dlq_topic(each)):
                bounds = [opened.offsets.bounds(*ref) for ref in (store.queues(name) if name in stored else ())]
                ends[name] = [sum(high - low for low, high in bounds), sum(high for _, high in bounds)]
            waiting = sum(level.waiting for level in delay_levels(tables)) + timer_view(tables).waiting
            disk = {"log_bytes": store.stats().commitlog_bytes, "free_bytes": shutil.disk_usage(store.path).free}
            view = {"store": str(store.path), "taken_ms": now_ms, **disk, "delayed": waiting}
            return {**view, "topics": ends, "groups": groups}

    def pending(
        self, group: str, topics: list[str], start: Start | None = None
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Return a row for each queue and retry queue that a group would consume, and the topics that do not exist.
        A row has `topic`, `queue_id`, `from`, `end`, `messages` and `in_flight`. `start` decides where a group begins
        that has not started; None: its configuration does."""
        with self._planning() as opened:
            missing = [topic for topic in topics if opened.topics.get(topic) is None]
            topics = [topic for topic in topics if topic not in missing]
            begin = start or _config(opened, group).start
            known = opened.lag(group) if group in group_names(opened.tables) else []
            lags = {(each.topic, each.queue_id): each for each in known if each.committed is not None}
            queues = [(topic, i) for topic in topics for i in range(opened.topics.require(topic).read_queues)]
            again = {retry_topic(group), *(pop_retry_topic(group, topic) for topic in topics)}
            queues += sorted(key for key in lags if key[0] in again)
            reads = Reads(opened.tables)
            rows = []
            for topic, queue_id in queues:
                end = opened.offsets.bounds(topic, queue_id)[1]
                if (lag := lags.get((topic, queue_id))) is not None:
                    first, messages, in_flight = max(lag.first, lag.committed or 0), lag.messages, lag.in_flight
                else:
                    first, in_flight = reads.place(topic, queue_id, begin), 0
                    messages = max(0, end - first)
                row = {"from": first, "end": end, "messages": messages, "in_flight": in_flight}
                rows.append({"topic": topic, "queue_id": queue_id, **row})
            return rows, missing

    # -- changing ---------------------------------------------------------------------------------------------------

    def create_topic(
        self,
        name: str,
        queues: int | None = None,
        perm: int = 6,
        message_type: str | None = None,
        *,
        dry_run: bool = False,
    ) -> TopicView | None:
        """Create a topic. None in a dry run. Raises ConfigError for an existing one."""
        with self._opened(dry_run) as opened, _checking(dry_run):
            opened.topics.create(name, queues=queues, perm=perm, message_type=message_type, exist_ok=False)
            return _topic(opened, name)
        return None

    def alter_topic(
        self, name: str, settings: dict[str, Any], *, force: bool = False, dry_run: bool = False
    ) -> TopicView | None:
        """Change settings of a topic, arguments of `TopicTable.alter`. None in a dry run."""
        with self._opened(dry_run) as opened, _checking(dry_run):
            opened.topics.alter(name, force=force, **settings)
            return _topic(opened, name)
        return None

    def delete_topic(self, name: str, *, force: bool = False, dry_run: bool = False) -> TopicView:
        """Delete a topic, its messages and its offsets. Return it as it was."""
        with self._opened(dry_run) as opened, _checking(dry_run):
            view = _topic(opened, name)
            opened._delete_topic(name, force=force)
        return view

    def set_group(
        self,
        name: str,
        settings: dict[str, Any],
        retry: RetryPolicy | None = None,
        max_attempts: int | None = None,
        *,
        create: bool = False,
        dry_run: bool = False,
    ) -> GroupView | None:
        """Change settings of a group, or create it. None in a dry run. `settings` are fields of `GroupConfig`. `retry`
        has the delays, and the attempts are `max_attempts`, 0 for no limit. Raises ConfigError for an existing group to
        create, and GroupNotFoundError for another one to change."""
        with self._opened(dry_run) as opened, _checking(dry_run):
            old = default_retry(bool(settings.get("orderly"))) if create else _config(opened, name).retry_policy
            if retry is not None or max_attempts is not None:
                attempts = old.max_attempts if max_attempts is None else max_attempts or None
                settings = {**settings, "retry_policy": (retry or old).with_attempts(attempts)}
            if create:
                opened.groups.create(name, exist_ok=False, **settings)
            else:
                opened.groups.alter(name, **settings)
            return _group(opened, name)
        return None

    def delete_group(self, name: str, *, dry_run: bool = False) -> GroupView:
        """Delete a group, its committed offsets and its deliveries in flight. Return it as it was."""
        with self._opened(dry_run) as opened, _checking(dry_run):
            _check_group(opened, name)
            view = _group(opened, name)
            opened._delete_group(name)
        return view

    def reset(
        self, group: str, topic: str, to: Start | int, queue_id: int | None = None, *, dry_run: bool = False
    ) -> list[Move]:
        """Reset a group's committed offsets in a topic, or in one queue."""
        with self._opened(dry_run) as opened:
            opened.topics.require(topic)
            before = dict(opened.offsets.of_group(group))
            moved = sorted(opened.reset(group, topic, queue_id, to).items())
            return [Move(ref, opened.offsets.bounds(*ref)[0], before.get(ref), target) for ref, target in moved]

    def cancel(self, handle: str, *, dry_run: bool = False) -> bool:
        """Cancel a delayed message. False if there is nothing to cancel."""
        with self._opened(dry_run) as opened:
            return opened._cancel(handle, dry_run=dry_run)

    def purge(self, group: str, *, before_ms: int | None = None, dry_run: bool = False) -> int:
        """Remove dead letters of a group, all or those stored before a time. Return their number."""
        with self._opened(dry_run) as opened:
            return opened.dead_letters(group).purge(before_ms=before_ms, dry_run=dry_run)

    def replay(
        self,
        groups: list[str] | None = None,
        *,
        offsets: list[int] | None = None,
        topics: list[str] | None = None,
        where: str | None = None,
        before_ms: int | None = None,
        all_groups: bool = False,
        to_topic: str | None = None,
        dry_run: bool = False,
    ) -> dict[str, Replay]:
        """Send dead letters again, as `jobs.dlq_resend` does. Return those of each group that has some to send. Raises
        ConfigError for an unknown group, and for offsets without a dead letter."""
        with self._opened(dry_run) as opened:
            tables = opened.tables
            known = letter_groups(tables)
            if unknown := sorted({*(groups or ())} - known):
                raise ConfigError(f"{tables.store.path} has no group {', '.join(map(repr, unknown))}")
            if offsets is not None:
                check_letters(tables, groups, offsets)
            letters = [each for each in letters_of(tables) if groups is None or each.group in groups]
            way: dict[str, Any] = {"all_groups": all_groups, "to_topic": to_topic}
            way |= {"stop_ms": before_ms, "where": letter_filter(topics, where)}
            if not dry_run:  # nothing is sent if one of them cannot be
                for each in letters:
                    each.replay(offsets, dry_run=True, **way)
            done = {each.group: each.replay(offsets, dry_run=dry_run, **way) for each in letters}
            return {group: replay for group, replay in done.items() if replay.topics}


def of_directory(path: str | os.PathLike[str]) -> Operations:
    """Return the operations on the store in directory `path`. Each call opens it."""
    return Operations(partial(look, path), partial(look, path, alone=True), partial(offline, path))


def _topic(opened: Offline, name: str) -> TopicView:
    config, bounds = opened.topics.require(name), list[tuple[int, int]]()
    with suppress(TopicNotFoundError):  # entered, but without a queue
        bounds = [opened.offsets.bounds(*ref) for ref in opened.tables.store.queues(name)]
    return TopicView(config, sum(high - low for low, high in bounds), sorted(opened.offsets.groups_of(name)))


def _config(opened: Offline, group: str) -> GroupConfig:
    return opened.groups.get(group) or GroupConfig(group)


def _group(opened: Offline, name: str) -> GroupView:
    topics = sorted({topic for topic, _ in opened.offsets.of_group(name)})
    return GroupView(_config(opened, name), opened.groups.get(name) is not None, topics, {})


def _check_group(opened: Offline, name: str) -> None:
    if name not in group_names(opened.tables):
        raise GroupNotFoundError(
            f"{opened.tables.store.path} has no group {name!r}: no settings, no committed offsets; "
            "`mqstore groups list` shows all"
        )


def _checking(dry_run: bool) -> suppress:
    """Suppress the error that a dry run ends with after all checks."""
    return suppress(*[ReadOnlyStoreError] * dry_run)


# -- dead letters ------------------------------------------------------------------------------------------------------


def letter_groups(tables: Tables) -> set[str]:
    """Return the groups of a store, those that have only dead letters included."""
    return {*group_names(tables), *(letters.group for letters in letters_of(tables))}


def letter_filter(topics: Iterable[str] | None, where: str | None) -> Callable[[Message], bool] | None:
    """Return a function that tests a dead letter's original topic and properties, or None if all pass."""
    chosen = None if topics is None else {*topics}
    matches = None if where is None else sql92.compile(where).matches
    if chosen is None and matches is None:
        return None

    def passes(letter: Message) -> bool:
        if chosen is not None and letter_origin(letter) not in chosen:
            return False
        return matches is None or matches(letter.stored_properties())

    return passes


def check_letters(tables: Tables, groups: Iterable[str] | None, offsets: Iterable[int]) -> None:
    """Raise ConfigError unless there is a dead letter of one group at each offset."""
    named = [*(groups or ())]
    if len(named) != 1:
        raise ConfigError("offsets need exactly one store and one group")
    there = {letter.offset for letter in DeadLetters(tables, named[0]).select(offsets=offsets)}
    if missing := sorted({*offsets} - there):
        numbers = ", ".join(map(str, missing))
        raise ConfigError(f"no dead letter of {named[0]!r} at offset {numbers}; nothing was sent")
