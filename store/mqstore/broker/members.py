"""Who consumes in which group, and whether they agree (clients#group).

A registry in memory: members register when they start and are unregistered when they stop or are given up (a server
gives up clients whose heartbeats ceased; within a process nobody dies alone). It assigns no queues. What it refuses, it
refuses before anything changed::

    another member of the group consumes in another mode        GroupInUseError
    beside other members it asks for another retry policy       GroupInUseError
    another member of the group subscribes to something else    SubscriptionConflictError
    the group's settings forbid it (told by `may_join`)          NotPermittedError

Members that subscribe differently would each be given queues of topics that they do not read, and would commit what
they never saw. Members that divide queues by two strategies would leave some to nobody. A member that is alone may
register again with another mode or other subscriptions. The retry policy that it asks for becomes the group's once it
is a member (`set_retry`). `check` refuses what `register` would, and makes no member.

Listeners are told after every change of a group, outside the lock, in the thread that made it. They are told the group
and nothing else: what they read then is at least as new as the change.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple

from mqstore.broker.groups import GroupTable, RetryPolicy
from mqstore.broker.names import is_retry_topic
from mqstore.errors import ConfigError, GroupInUseError, SubscriptionConflictError

__all__ = ["Expression", "Member", "Members", "Mode", "Subscriptions"]

_log = logging.getLogger(__name__)

Expression = tuple[str, str]
"""Kind and text of a filter: ("TAG", "a || b"), ("SQL92", "price > 5"); ("TAG", "*") is everything."""
Subscriptions = Mapping[str, Expression]
"""Topic -> filter."""


class Mode(NamedTuple):
    """How a group consumes; all its members alike (clients#group)."""

    model: Literal["queue", "pop"]
    ordered: bool = False
    broadcasting: bool = False
    strategy: str | None = None
    """Name of the function that divides the queues; None in pop and broadcasting, where nothing is divided."""

    def __str__(self) -> str:
        order = "ordered" if self.ordered else "unordered"
        shown = f"{self.model}, {order}, {'broadcasting' if self.broadcasting else 'clustering'}"
        return shown if self.strategy is None else f"{shown}, strategy {self.strategy!r}"


@dataclass(frozen=True, slots=True)
class Member:
    """One registered client of a group."""

    client_id: str
    mode: Mode
    subscriptions: Subscriptions
    owner: object = field(default=None, compare=False, repr=False)
    """Consumer of this process that registered, or None."""


class Members:
    """The members of all groups of a store. Safe to call from many threads.

    >>> members = Members()
    >>> members.register("c2", "billing", {"orders": ("TAG", "*")}, Mode("queue"))
    True
    >>> members.register("c1", "billing", {"orders": ("TAG", "*")}, Mode("queue"))
    True
    >>> members.members("billing")
    ['c1', 'c2']
    """

    def __init__(
        self,
        may_join: Callable[[str, Mode], object] = lambda group, mode: None,
        settings: GroupTable | None = None,
    ) -> None:
        """`may_join` raises for who may not consume in a group in that mode, whoever its other members are. `settings`
        has the groups' retry policies; without it nobody may ask for one."""
        self._may_join = may_join
        self._settings = settings
        self._lock = threading.Lock()
        self._groups: dict[str, dict[str, Member]] = {}
        self.on_change: list[Callable[[str], None]] = []
        """Called with the name of a group whose members, or their subscriptions, have changed."""

    def register(
        self,
        client_id: str,
        group: str,
        subscriptions: Subscriptions,
        mode: Mode,
        *,
        owner: object = None,
        retry: RetryPolicy | None = None,
    ) -> bool:
        """Make `client_id` a member of `group`, or renew its registration. Return True if anything changed. The policy
        `retry` that a new member asks for becomes the group's.

        Only the owner that registered a client id may register it again, so a call that was interrupted can be
        repeated. Raises ConfigError for an empty client id, `GroupInUseError` if the client id has another owner,
        `GroupInUseError` and `SubscriptionConflictError` as the module's table says, NotPermittedError for
        broadcasting where the group's settings forbid it, StoreClosedError; for `retry` as `GroupTable.alter`.
        """
        wanted = _normalized(subscriptions)
        with self._lock:
            known = self._check(client_id, group, wanted, mode, owner, retry)
            if known is not None and known.mode == mode and known.subscriptions == wanted:
                return False
            member = Member(client_id, mode, MappingProxyType(wanted), owner)
            self._groups.setdefault(group, {})[client_id] = member
        if known is None and retry is not None:
            try:
                self.set_retry(client_id, group, retry)
            except BaseException:
                self.unregister(client_id, group, owner=owner)
                raise
        self._tell(group)
        return True

    def check(
        self,
        client_id: str,
        group: str,
        subscriptions: Subscriptions | None,
        mode: Mode,
        *,
        owner: object = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        """Raise what `register` would raise. `subscriptions`: None if they are not known yet."""
        wanted = None if subscriptions is None else _normalized(subscriptions)
        with self._lock:
            self._check(client_id, group, wanted, mode, owner, retry)

    def _check(
        self,
        client_id: str,
        group: str,
        wanted: Subscriptions | None,
        mode: Mode,
        owner: object,
        retry: RetryPolicy | None,
    ) -> Member | None:
        """Return the registration of `client_id`, which may register so."""
        self._may_join(group, mode)
        if not client_id or not isinstance(client_id, str):
            raise ConfigError(f"a client id is a str that is not empty, not {client_id!r}")
        known = self._groups.get(group, {}).get(client_id)
        if known is not None and known.owner is not owner:
            raise GroupInUseError(
                f"group {group!r} has a member {client_id!r} already; close it first, or take another client_id"
            )
        others = self._others(client_id, group)
        for other in others:
            if other.mode != mode:
                raise GroupInUseError(
                    f"group {group!r} is consumed as ({other.mode}) by {other.client_id!r}; {client_id!r} asks for "
                    f"({mode}): stop the other members first, or use another group"
                )
        if wanted is not None:
            _check_subscriptions(group, client_id, wanted, others)
        if known is None:
            self._check_retry(client_id, group, retry)
        return known

    def _others(self, client_id: str, group: str) -> list[Member]:
        return [member for name, member in self._groups.get(group, {}).items() if name != client_id]

    def check_retry(self, client_id: str, group: str, retry: RetryPolicy | None) -> None:
        """Raise GroupInUseError if `retry` is not the policy of `group` and members besides `client_id` live by it."""
        with self._lock:
            self._check_retry(client_id, group, retry)

    def _check_retry(self, client_id: str, group: str, retry: RetryPolicy | None) -> None:
        others = self._others(client_id, group)
        known = None if self._settings is None else self._settings.get(group)
        if retry is not None and others and known is not None and known.retry_policy != retry:
            raise GroupInUseError(
                f"group {group!r} retries by {known.retry_policy}, and has the member {others[0].client_id!r}; "
                f"{client_id!r} asks for {retry}: stop the other members first, or leave retry= out"
            )

    def set_retry(self, client_id: str, group: str, retry: RetryPolicy) -> None:
        """Make `retry` the policy of `group`, as `client_id` asks, which need not be a member. Errors as `check_retry`
        and `GroupTable.alter`."""
        self.check_retry(client_id, group, retry)
        if self._settings is not None:
            self._settings.alter(group, retry_policy=retry)  # not under the lock: it writes a file, and tells

    def get(self, client_id: str, group: str) -> Member | None:
        """Return the registration of `client_id`, None if it is no member."""
        return self._groups.get(group, {}).get(client_id)

    def unregister(self, client_id: str, group: str, *, owner: object = None) -> bool:
        """Take `client_id` out of `group`. Return False if it was no member, or if another than `owner` has registered
        it; None: whoever has."""
        with self._lock:
            members = self._groups.get(group, {})
            known = members.get(client_id)
            if known is None or (owner is not None and known.owner is not owner):
                return False
            del members[client_id]
            if not members:
                del self._groups[group]
        self._tell(group)
        return True

    def members(self, group: str) -> list[str]:
        """The client ids of `group`, sorted as rebalancing wants them."""
        with self._lock:
            return sorted(self._groups.get(group, {}))

    def subscriptions(self, group: str) -> Subscriptions:
        """What every member of `group` subscribes to; empty without members."""
        with self._lock:
            return next((member.subscriptions for member in self._groups.get(group, {}).values()), MappingProxyType({}))

    def mode(self, group: str) -> Mode | None:
        """How `group` consumes; None without members."""
        with self._lock:
            return next((member.mode for member in self._groups.get(group, {}).values()), None)

    def groups(self) -> list[str]:
        """The groups that have members, sorted."""
        with self._lock:
            return sorted(self._groups)

    def _tell(self, group: str) -> None:
        for listener in list(self.on_change):
            try:
                listener(group)
            except Exception:  # the change stands, and the other listeners must hear of it
                _log.exception("a listener failed when told that the members of group %s changed", group)


def _check_subscriptions(group: str, client_id: str, wanted: Subscriptions, others: list[Member]) -> None:
    for other in others:
        if other.subscriptions != wanted:
            rule = "all members of a group must subscribe alike"
            if _own(other.subscriptions) == _own(wanted):
                rule = (
                    "one reads the group's retries and the other does not, as push and pull consumers; they need "
                    "a group each"
                )
            raise SubscriptionConflictError(
                f"{client_id!r} subscribes to {_shown(wanted)}, but {other.client_id!r} of the same group {group!r} to "
                f"{_shown(other.subscriptions)}: {rule}"
            )


def _own(subscriptions: Subscriptions) -> Subscriptions:
    """What the user asked for."""
    return {topic: expression for topic, expression in subscriptions.items() if not is_retry_topic(topic)}


def _normalized(subscriptions: Subscriptions) -> dict[str, Expression]:
    return {topic: (kind, _normal(kind, text)) for topic, (kind, text) in subscriptions.items()}


def _normal(kind: str, text: str) -> str:
    """One spelling for tag expressions that mean the same, so that members are not refused for a blank or an order."""
    if kind != "TAG":
        return text.strip()
    tags = {tag.strip() for tag in text.split("||")} - {""} if text else set()
    return "*" if not tags or tags == {"*"} else " || ".join(sorted(tags))


def _shown(subscriptions: Subscriptions) -> str:
    return (
        ", ".join(f"{topic} ({kind} {text[:80]})" for topic, (kind, text) in sorted(subscriptions.items())) or "nothing"
    )
