"""Consumer groups: permissions, and redelivery of failed messages (delivery#groups).

A retry policy is used in two ways (delivery#backoff). `r` is the number of times a message was sent back, `attempt` the
delivery that failed, from 1: `attempt` = r + 1. An entry past the end of a list is its last one.

===========  ================================  ==================================  ========================
kind         queue model sends back            pop and orderly wait                stored as
===========  ================================  ==================================  ========================
levels       entry r + 2 of the standard 18,   entry attempt - 1 of the same 18,   CUSTOMIZED, no list
             10 s, 30 s, 1 m, ...              1 s, 5 s, 10 s, ...
custom       entry r of the user's list        entry attempt - 1                   CUSTOMIZED, with its list
exponential  initial * multiplier ** r         initial * multiplier ** (attempt-1) EXPONENTIAL
===========  ================================  ==================================  ========================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal

from mqstore.broker.tables.configfile import NOTHING, ConfigTable, data_version, entries, member, object_member
from mqstore.broker.tables.names import check_group, is_system_group
from mqstore.errors import ConfigError, GroupNotFoundError, NotPermittedError
from mqstore.log.reading.reader import StoreReader
from mqstore.logger import log as _log
from mqstore.options import DEFAULT_DELAY_LEVELS, UNIT_MS, Duration, delay_table_ms, milliseconds

_FORBIDDEN_READ = 1 << 2
"""Bit of a forbidden mask that stops reads of a topic. RocketMQ's other bits have no effect here."""

_FOR_EVER = 0x7FFF_FFFF
# RocketMQ limits the exponent, so that the number stays finite. The maximum delay is reached long before.
_EXPONENT_MAX = 32
_STANDARD_MS = delay_table_ms(DEFAULT_DELAY_LEVELS)
_FIRST_SEND_BACK = 2
"""Entry of the standard delays for the first retry in the queue model: delay level 3."""
_START = "mqstoreStart"
_EXPONENTIAL = {"initial": 5_000, "multiplier": 2, "max": 7_200_000}
"""Members of a stored exponential policy, with RocketMQ's defaults."""

_Kind = Literal["levels", "custom", "exponential"]


@dataclass(frozen=True, slots=True, init=False, repr=False)
class RetryPolicy:
    """Number of deliveries before a message becomes a dead letter, and the delays between them.

    >>> RetryPolicy().delay(1), RetryPolicy(delays=[0.5, 2]).delay(9), exponential(5, 2, 60).delay(3)
    (1.0, 2.0, 20.0)
    >>> RetryPolicy(None, [0.5, 90]), exponential(5, 2, 7200)
    (<RetryPolicy: unlimited attempts, 500ms 90s>, <RetryPolicy: 17 attempts, 5s x2 2h>)
    """

    max_attempts: int | None
    """Maximum number of deliveries. None: no limit."""
    _kind: _Kind
    _times: tuple[int, ...]
    """Delays in ms: the 18 standard ones for kind "levels", the user's for "custom". For "exponential" the first delay,
    the factor, and the longest delay."""
    _unknown: Mapping[str, Any] = field(compare=False)
    """Members of the stored policy that this kind does not use. They are written back."""

    def __init__(self, max_attempts: int | None = 17, delays: Iterable[Duration] | None = None) -> None:
        """Take `delays` in seconds or timedeltas, the first for the first retry in every model.
        The standard delays begin at 10 s in the queue model, at 1 s in pop and orderly consumption. Raises ConfigError
        for no or negative delays, and fewer attempts than 1."""
        if delays is None:
            self._set(_checked_attempts(max_attempts))
            return
        given: object = delays
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise ConfigError(f"delays must be a list, as in [10, 60, 600], not {delays!r:.100}")
        table = tuple(milliseconds(delay, "delays") for delay in delays)
        if not table:
            raise ConfigError("delays is empty; leave it out for the standard ones, or give [0] to retry at once")
        self._set(_checked_attempts(max_attempts), "custom", table)

    @classmethod
    def _of(cls, *values: Any) -> RetryPolicy:
        policy = cls.__new__(cls)
        cls._set(policy, *values)
        return policy

    def _set(
        self,
        max_attempts: int | None,
        kind: _Kind = "levels",
        times: tuple[int, ...] = _STANDARD_MS,
        unknown: Mapping[str, Any] = NOTHING,
    ) -> None:
        for each, value in zip(fields(self), (max_attempts, kind, times, unknown), strict=True):
            object.__setattr__(self, each.name, value)

    def with_attempts(self, max_attempts: int | None) -> RetryPolicy:
        """Return a policy with the same delays and another number of attempts."""
        return self._of(_checked_attempts(max_attempts), self._kind, self._times, self._unknown)

    def delay(self, attempt: int) -> float:
        """Return the seconds to wait after delivery `attempt` (from 1) failed, in pop and orderly groups.
        Raises ConfigError for an attempt before the first."""
        return self._delay_ms(attempt) / 1000

    def _delay_ms(self, attempt: int) -> int:
        if attempt < 1:
            raise ConfigError(f"attempt must be 1 or more, got {attempt}")
        return self._entry(attempt - 1)

    def _next_delay_ms(self, reconsume_times: int) -> int:
        """Return the delay in ms of a message that was sent back `reconsume_times` times (queue model)."""
        first = _FIRST_SEND_BACK if self._kind == "levels" else 0
        return self._entry(max(reconsume_times, 0) + first)

    def _entry(self, i: int) -> int:
        if self._kind == "exponential":
            initial_ms, multiplier, max_ms = self._times
            factor: int = multiplier ** min(i, _EXPONENT_MAX)
            return min(max_ms, initial_ms * factor)
        return self._times[min(i, len(self._times) - 1)]

    def __str__(self) -> str:
        """Return the delays as `mqstore groups --retry` takes them."""
        if self._kind == "exponential":
            initial_ms, multiplier, max_ms = self._times
            return f"{_word(initial_ms)} x{multiplier} {_word(max_ms)}"
        return "standard" if self._kind == "levels" else " ".join(map(_word, self._times))

    def __repr__(self) -> str:
        return f"<RetryPolicy: {self.max_attempts or 'unlimited'} attempts, {self}>"

    def _as_json(self) -> dict[str, Any]:
        """Return RocketMQ's `groupRetryPolicy`. `max_attempts` is in the group's `retryMaxTimes` instead."""
        value = {**self._unknown, "type": "EXPONENTIAL" if self._kind == "exponential" else "CUSTOMIZED"}
        if self._kind == "custom":
            value["customizedRetryPolicy"] = {"next": list(self._times)}
        elif self._kind == "exponential":
            value["exponentialRetryPolicy"] = dict(zip(_EXPONENTIAL, self._times, strict=True))
        return value

    @classmethod
    def _from_json(cls, value: Mapping[str, Any], max_attempts: int | None = 17) -> RetryPolicy:
        """Read a `groupRetryPolicy`. Raises ValueError for members of the wrong type.
        No list, or an empty one, means the standard delays. Numbers below 0 are read as 0."""
        unknown = dict(value)
        if member(value, "type", str, "CUSTOMIZED") == "EXPONENTIAL":
            numbers = object_member(value, "exponentialRetryPolicy")
            unknown.pop("exponentialRetryPolicy", None)
            known = tuple(max(0, member(numbers, key, int, default)) for key, default in _EXPONENTIAL.items())
            return cls._of(max_attempts, "exponential", known, unknown)
        table = member(object_member(value, "customizedRetryPolicy"), "next", list, [])
        if not all(type(delay) is int for delay in table):
            raise ValueError(f"customizedRetryPolicy.next must be milliseconds, not {table!r:.80}")
        if not table:
            return cls._of(max_attempts, "levels", _STANDARD_MS, unknown)
        unknown.pop("customizedRetryPolicy", None)
        return cls._of(max_attempts, "custom", tuple(max(0, delay) for delay in table), unknown)


def _word(duration_ms: int) -> str:
    unit = next((each for each in "dhms" if not duration_ms % UNIT_MS[each]), None) if duration_ms else "s"
    return f"{duration_ms // UNIT_MS[unit]}{unit}" if unit else f"{duration_ms}ms"


def backoff(*delays: Duration, max_attempts: int | None = 17) -> RetryPolicy:
    """Return a policy with these delays, in seconds or timedeltas, the last of which repeats.

    >>> [backoff(1, 5, 30).delay(attempt) for attempt in (1, 2, 3, 4)]
    [1.0, 5.0, 30.0, 30.0]
    """
    return RetryPolicy(max_attempts, delays)


def exponential(
    initial: Duration = 5, factor: int = 2, maximum: Duration = 7200, *, max_attempts: int | None = 17
) -> RetryPolicy:
    """Return a policy that waits `initial`, then `factor` times as long each time, at most `maximum`.
    The times are seconds or timedeltas. Raises ConfigError for other values."""
    if type(factor) is not int or factor < 1:
        raise ConfigError(f"factor must be an integer from 1, not {factor!r}")
    times = milliseconds(initial, "initial"), factor, milliseconds(maximum, "maximum")
    return RetryPolicy._of(_checked_attempts(max_attempts), "exponential", times)


def _checked_attempts(max_attempts: int | None) -> int | None:
    if max_attempts is not None and (type(max_attempts) is not int or not 1 <= max_attempts <= _FOR_EVER):
        raise ConfigError(f"max_attempts must be an integer from 1, or None for ever, not {max_attempts!r}")
    return max_attempts


ORDERED_RETRY: Final = exponential(1, 2, 60, max_attempts=None)
"""Retry policy of a group created to consume in order. It has no limit, so an outage leaves no gap."""


def default_retry(orderly: bool) -> RetryPolicy:
    """Return the retry policy of a group that is created without one."""
    return ORDERED_RETRY if orderly else RetryPolicy()


# Member of the file -> field, type, and RocketMQ's default. The policy and `start` are read separately.
_MEMBERS: dict[str, tuple[str, type, Any]] = {
    "consumeEnable": ("consume_enable", bool, True),
    "consumeBroadcastEnable": ("consume_broadcast_enable", bool, True),
    "consumeMessageOrderly": ("orderly", bool, False),
    "retryQueueNums": ("retry_queues", int, 1),
}
_OWN_MEMBERS = frozenset({*_MEMBERS, "groupName", "retryMaxTimes", "groupRetryPolicy", _START})


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """Configuration of a consumer group (delivery#groups).

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     group = store.broker.groups.create("billing", retry_policy=mqstore.RetryPolicy(3, [5, 60]))
    ...     group.name, group.orderly, group.max_attempts, group.retry_policy.delay(2)
    ('billing', False, 3, 60.0)
    """

    name: str
    consume_enable: bool = True
    """If False, each request for messages raises NotPermittedError."""
    consume_broadcast_enable: bool = True
    """If False, a broadcasting member gets NotPermittedError."""
    orderly: bool = False
    """Members of the gRPC protocol consume in order if this is True."""
    retry_queues: int = 1
    """Queues of the group's retry topic. If below 1 (only from a file), a failed message is dead-lettered at once."""
    retry_policy: RetryPolicy = RetryPolicy()
    start: Literal["earliest", "latest"] | int = "earliest"
    """First position in a queue without a committed offset. A number is in ms since the epoch."""
    unknown: Mapping[str, Any] = field(default_factory=lambda: NOTHING, hash=False, repr=False)
    """Members of the file's entry that have no effect here. They are written back."""

    @property
    def max_attempts(self) -> int | None:
        """Number of deliveries before a message becomes a dead letter. None: no limit. 1 without retries."""
        return self.retry_policy.max_attempts if self.retry_queues > 0 else 1

    @property
    def retry_max_times(self) -> int:
        """RocketMQ's number of retries, not deliveries. 2147483647: no limit."""
        attempts = self.retry_policy.max_attempts
        return _FOR_EVER if attempts is None else attempts - 1

    def delay_ms(self, attempt: int) -> int:
        """Return the ms that a message is invisible, or its queue blocked, after delivery `attempt` failed."""
        return self.retry_policy._delay_ms(attempt)

    def check_broadcast(self) -> None:
        """Raise NotPermittedError if members may not broadcast."""
        if not self.consume_broadcast_enable:
            raise NotPermittedError(f"group {self.name!r} may not broadcast; alter it: consume_broadcast_enable=True")

    def as_json(self) -> dict[str, Any]:
        """Return the entry of `subscriptionGroup.json`."""
        entry = {**self.unknown, "groupName": self.name}
        for key, (name, _, _) in _MEMBERS.items():
            entry[key] = getattr(self, name)
        entry["retryMaxTimes"] = self.retry_max_times
        entry["groupRetryPolicy"] = self.retry_policy._as_json()
        if self.start != "earliest":
            entry[_START] = self.start
        return entry

    @classmethod
    def from_json(cls, name: str, entry: Mapping[str, Any]) -> GroupConfig:
        """Read an entry of `subscriptionGroup.json`. Raises ValueError for a value of the wrong type."""
        known = {field: member(entry, key, kind, default) for key, (field, kind, default) in _MEMBERS.items()}
        times = member(entry, "retryMaxTimes", int, 16)
        attempts = None if times >= _FOR_EVER else max(1, times + 1)
        policy = RetryPolicy._from_json(object_member(entry, "groupRetryPolicy"), attempts)
        start: Any = entry.get(_START)
        if start is None:
            start = "earliest"
        elif not _is_start(start):
            raise ValueError(f"{_START} must be earliest, latest or milliseconds, not {start!r:.80}")
        unknown = {key: value for key, value in entry.items() if key not in _OWN_MEMBERS}
        return cls(name, **known, retry_policy=policy, start=start, unknown=unknown)


def _is_start(value: object) -> bool:
    return value in ("earliest", "latest") if isinstance(value, str) else type(value) is int and value >= 0


# Settings, and the check of their values.
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **{
        name: (lambda value: type(value) is bool, "True or False")
        for name in ("consume_enable", "consume_broadcast_enable", "orderly")
    },
    "retry_queues": (lambda value: type(value) is int and 1 <= value <= 16_384, "1 to 16384"),
    "retry_policy": (lambda value: isinstance(value, RetryPolicy), "a RetryPolicy"),
    "start": (_is_start, "'earliest', 'latest' or milliseconds since the epoch"),
}
assert set(_CHECKS) == {f.name for f in fields(GroupConfig)} - {"name", "unknown"}


class GroupTable(ConfigTable):
    """Table of all consumer groups of a store. Thread-safe."""

    def __init__(self, store: StoreReader) -> None:
        """Load the file. Raises CorruptStoreError if no good copy of it is left, StoreIOError."""
        super().__init__(store, "subscriptionGroup.json", check_groups)
        self._auto_create = store.config.auto_create_groups
        value = self._file.load() or {}
        self._groups = {
            name: GroupConfig.from_json(name, entry) for name, entry in entries(value, "subscriptionGroupTable")
        }
        self._forbidden = _forbidden_of(value)

    # -- looking up -------------------------------------------------------------------------------------------------

    def get(self, name: str) -> GroupConfig | None:
        """Return the group, or None."""
        return self._groups.get(name)

    def require(self, name: str) -> GroupConfig:
        """Return the group for a consumer, and create it if necessary.
        Raises GroupNotFoundError if `auto_create_groups` is off or the name is invalid, NotPermittedError for a system
        group, and the errors of `create`."""
        return self._groups.get(name) or self._create_to_consume(name)

    def names(self, system: bool = False) -> list[str]:
        """Return the group names, sorted.
        System groups, which another broker may have created, are included only if `system` is true."""
        return sorted(name for name in self._groups if system or not is_system_group(name))

    def _create_to_consume(self, name: str) -> GroupConfig:
        try:
            _check_user_group(name)
        except ConfigError as error:
            raise GroupNotFoundError(f"the group does not exist and cannot be created: {error}") from error
        if not self._auto_create:
            raise GroupNotFoundError(f"there is no group {name!r}, and auto_create_groups is off; create it first")
        return self._put(GroupConfig(name), exist_ok=True)

    # -- changing ---------------------------------------------------------------------------------------------------

    def create(self, name: str, *, exist_ok: bool = True, **settings: Any) -> GroupConfig:
        """Create a group. With `exist_ok` an existing one is returned unchanged, otherwise it is an error.

        `settings` are fields of `GroupConfig`, and `max_attempts` (None: no limit) of the policy, or `retry_max_times`,
        which is one less. A group created with `orderly=True` has the policy `ORDERED_RETRY` unless these set another.
        Raises ConfigError for an existing group or an invalid name or setting, NotPermittedError for a system group,
        StoreFullError and StoreIOError if it cannot be saved."""
        _check_user_group(name)
        config = GroupConfig(name, retry_policy=default_retry(settings.get("orderly", False)))
        return self._put(_with(config, settings), exist_ok=exist_ok)

    def alter(self, name: str, **settings: Any) -> GroupConfig:
        """Change the given settings. Raises GroupNotFoundError without such a group, and the errors of `create`."""
        with self._lock:
            old = self._groups.get(name)
            if old is None:
                raise GroupNotFoundError(f"there is no group {name!r}; create it first")
            new = _with(old, settings)
            if new == old:
                return old
            self._write({**self._groups, name: new}, self._forbidden)
        self._notify(name)
        return new

    def delete(self, name: str) -> None:
        """Delete the settings of a group, not its committed offsets.
        Raises GroupNotFoundError without such a group."""
        with self._lock:
            if name not in self._groups:
                raise GroupNotFoundError(f"there is no group {name!r}")
            self._write(
                {key: value for key, value in self._groups.items() if key != name},
                {key: value for key, value in self._forbidden.items() if key != name},
            )
        self._notify(name)

    # -- forbidden topics --------------------------------------------------------------------------------------------

    def may_read(self, group: str, topic: str) -> bool:
        """Return False if `forbid` stops the group from reading the topic."""
        return not self._forbidden.get(group, {}).get(topic, 0) & _FORBIDDEN_READ

    def forbid(self, group: str, topic: str, on: bool = True) -> None:
        """Stop a group from reading a topic, or allow it again (`on` False).
        Raises GroupNotFoundError without such a group. Unlike in RocketMQ, clearing the last bit of a topic is saved
        and does not change the group's other topics."""
        with self._lock:
            if group not in self._groups:
                raise GroupNotFoundError(f"there is no group {group!r}")
            topics = dict(self._forbidden.get(group, {}))
            old = topics.pop(topic, 0)
            mask = old | _FORBIDDEN_READ if on else old & ~_FORBIDDEN_READ
            if mask == old:
                return
            if mask:
                topics[topic] = mask
            table = {key: value for key, value in self._forbidden.items() if key != group}
            self._write(self._groups, {**table, group: topics} if topics else table)
        self._notify(group)

    # -- the file ---------------------------------------------------------------------------------------------------

    def _put(self, config: GroupConfig, *, exist_ok: bool) -> GroupConfig:
        with self._lock:
            present = self._groups.get(config.name)
            if present is not None:
                if exist_ok:
                    return present
                raise ConfigError(f"group {config.name!r} exists already; alter it")
            self._write({**self._groups, config.name: config}, self._forbidden)
        self._notify(config.name)
        return config

    def _write(self, groups: dict[str, GroupConfig], forbidden: dict[str, dict[str, int]]) -> None:
        """Replace the tables, first on disk, then in memory by new dicts, so that look-ups need no lock."""
        self._file.save({"forbiddenTable": forbidden, "subscriptionGroupTable": self._encoded(groups)}, steps=1)
        self._groups, self._forbidden = groups, forbidden


def _check_user_group(name: str) -> None:
    check_group(name)
    if is_system_group(name):
        raise NotPermittedError(f"group {name!r} is a system group; choose another name")


def _with(config: GroupConfig, settings: Mapping[str, Any]) -> GroupConfig:
    """Return `config` with these settings, after checking them."""
    given = dict(settings)
    times = given.pop("retry_max_times", None)
    limited = "max_attempts" in given
    attempts = given.pop("max_attempts", None)
    for name, value in given.items():
        if name not in _CHECKS:
            raise ConfigError(
                f"unknown setting {name!r} of a group; use {', '.join(_CHECKS)}, max_attempts or retry_max_times"
            )
        fits, values = _CHECKS[name]
        if not fits(value):
            raise ConfigError(f"group {config.name!r}: {name} must be {values}, not {value!r}")
    if times is not None:
        if type(times) is not int or not 0 <= times <= _FOR_EVER:
            raise ConfigError(f"group {config.name!r}: retry_max_times must be 0..{_FOR_EVER}, got {times!r}")
        of_times = None if times == _FOR_EVER else times + 1
        if limited and attempts != of_times:
            raise ConfigError(
                f"group {config.name!r}: max_attempts={attempts!r} and retry_max_times={times} contradict each other"
            )
        limited, attempts = True, of_times
    if limited:
        given["retry_policy"] = given.get("retry_policy", config.retry_policy).with_attempts(attempts)
    old = config.retry_policy
    new = replace(config, **given)
    if new.retry_policy != old:
        facts = (new.retry_policy.max_attempts, new.retry_policy, old.max_attempts, old)
        _log.info("group %s: retry policy changed to %s attempts, %s (was %s, %s)", config.name, *facts)
    return new


def _forbidden_of(value: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    return {
        group: {topic: member(topics, topic, int, 0) for topic in topics}
        for group, topics in entries(value, "forbiddenTable")
    }


def check_groups(value: dict[str, Any]) -> None:
    """Raise ValueError if an entry is not an object with members of the right types."""
    data_version(value)
    _forbidden_of(value)
    for name, entry in entries(value, "subscriptionGroupTable"):
        GroupConfig.from_json(name, entry)
