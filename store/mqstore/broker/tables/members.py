"""Registry of the members of consumer groups, in memory (clients#group).

Members register when they start, and are unregistered when they stop. A server also unregisters clients without
heartbeats. The registry assigns no queues. It refuses a member before anything changes::

    another member of the group consumes in another mode        GroupInUseError
    other members have another retry policy                      GroupInUseError
    another member of the group subscribes to something else    SubscriptionConflictError
    the group's settings forbid it (by `may_join`)               NotPermittedError

Clients of a server cannot be refused (`admit`): they share the queues, and the log says what does not agree.

Members with different subscriptions would get queues of topics that they do not read, and would commit messages that
they never saw. With two strategies some queues would have no member. A member that is alone may register again with
another mode or other subscriptions. Its retry policy becomes the group's once it is a member (`set_retry`). `check`
has the same rules as `register`, and makes no member.

Listeners are called with the group after every change, outside the lock, in the thread that made it. The members that
they read then are at least as new as the change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple

from mqstore.broker.tables.groups import GroupTable, RetryPolicy
from mqstore.broker.tables.localoffsets import refuse_clients
from mqstore.broker.tables.names import is_retry_topic
from mqstore.errors import ConfigError, GroupInUseError, SubscriptionConflictError
from mqstore.signalsafe import Lock

_log = logging.getLogger(__name__)

Expression = tuple[str, str]
"""Kind and text of a filter: ("TAG", "a || b"), ("SQL92", "price > 5"), or ("TAG", "*") for all."""
Subscriptions = Mapping[str, Expression]
"""Filters by topic."""


class Mode(NamedTuple):
    """Mode in which a group consumes, the same for all its members (clients#group)."""

    model: Literal["queue", "pop"]
    ordered: bool = False
    broadcasting: bool = False
    strategy: str | None = None
    """Name of the function that divides the queues. None in pop and broadcasting, which divide nothing."""

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
    owner: str | None = field(default=None, compare=False, repr=False)
    """Text that only the consumer knows that registered, or None."""
    remote: bool = field(default=False, compare=False)
    """True for a client of a server. It does not say whether it keeps the order."""


class Members:
    """Members of all groups of a store. Thread-safe.

    >>> members = Members()
    >>> members.register("c2", "billing", {"orders": ("TAG", "*")}, Mode("queue"))
    True
    >>> members.register("c1", "billing", {"orders": ("TAG", "*")}, Mode("queue"))
    True
    >>> members.members("billing")
    ['c1', 'c2']
    """

    def __init__(
        self, may_join: Callable[[str, Mode], object] = lambda group, mode: None, settings: GroupTable | None = None
    ) -> None:
        """Start without members.
        `may_join` raises if a member may not consume in a group in that mode, whatever its other members are.
        `settings` has the groups' retry policies. Without it no member may ask for one."""
        self._may_join = may_join
        self._settings = settings
        self._lock = Lock()
        self._groups: dict[str, dict[str, Member]] = {}
        self.on_change: list[Callable[[str], None]] = []
        """Functions called with the name of a group whose members or subscriptions have changed."""
        self.on_save: list[Callable[..., object]] = []
        """Functions that save positions which consumers have not committed yet, or keep themselves."""

    def register(
        self,
        client_id: str,
        group: str,
        subscriptions: Subscriptions,
        mode: Mode,
        *,
        owner: str | None = None,
        retry: RetryPolicy | None = None,
    ) -> bool:
        """Make `client_id` a member of `group`, or renew its registration. Return True if anything changed.

        The policy `retry` of a new member becomes the group's. Only the owner that registered a client id may register
        it again, so an interrupted call can be repeated. Raises ConfigError for an empty client id, GroupInUseError if
        the client id has another owner, and GroupInUseError or SubscriptionConflictError by the module's table. Raises
        NotPermittedError for broadcasting if the group's settings forbid it, StoreClosedError, and for `retry` what
        `GroupTable.alter` raises."""
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
        notify(self.on_change, group, "have joined, left or changed")
        return True

    def admit(self, client_id: str, group: str, subscriptions: Subscriptions, mode: Mode) -> None:
        """Make a client of a server a member, or renew its registration. It is never refused: RocketMQ's clients could
        not show that. A conflict with another member is logged when it begins. A member of this process with the same
        client id stays."""
        member = Member(client_id, mode, MappingProxyType(_normalized(subscriptions)), remote=True)
        with self._lock:
            members = self._groups.setdefault(group, {})
            known = members.get(client_id)
            if known == member or not (known is None or known.remote):
                return
            members[client_id] = member
            try:
                self._check_others(client_id, group, member.subscriptions, mode, remote=True)
            except (GroupInUseError, SubscriptionConflictError) as error:
                _log.warning("%s joins all the same, since clients of a server cannot be refused: %s", client_id, error)
        notify(self.on_change, group, "have joined, left or changed")

    def check(
        self,
        client_id: str,
        group: str,
        subscriptions: Subscriptions | None,
        mode: Mode,
        *,
        owner: str | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        """Raise the errors of `register`. `subscriptions` is None if they are not known yet."""
        wanted = None if subscriptions is None else _normalized(subscriptions)
        with self._lock:
            self._check(client_id, group, wanted, mode, owner, retry)

    def _check(
        self,
        client_id: str,
        group: str,
        wanted: Subscriptions | None,
        mode: Mode,
        owner: str | None,
        retry: RetryPolicy | None,
    ) -> Member | None:
        """Return the registration of `client_id`, after checking that it may register."""
        self._may_join(group, mode)
        if not client_id or not isinstance(client_id, str):
            raise ConfigError(f"a client id is a str that is not empty, not {client_id!r}")
        known = self._groups.get(group, {}).get(client_id)
        if known is not None and known.owner != owner:
            raise GroupInUseError(
                f"group {group!r} has a member {client_id!r} already; close it first, or take another client_id"
            )
        self._check_others(client_id, group, wanted, mode)
        if known is None:
            self._check_retry(client_id, group, retry)
        return known

    def _check_others(
        self, client_id: str, group: str, wanted: Subscriptions | None, mode: Mode, *, remote: bool = False
    ) -> None:
        others = self._others(client_id, group)
        for other in others:
            order_is_known = not (remote or other.remote)
            if other.mode != (mode if order_is_known else mode._replace(ordered=other.mode.ordered)):
                raise GroupInUseError(
                    f"group {group!r} is consumed as ({other.mode}) by {other.client_id!r}; {client_id!r} asks for "
                    f"({mode}): stop the other members first, or use another group"
                )
        if wanted is not None:
            _check_subscriptions(group, client_id, wanted, others)

    def _others(self, client_id: str, group: str) -> list[Member]:
        return [member for name, member in self._groups.get(group, {}).items() if name != client_id]

    def check_retry(self, client_id: str, group: str, retry: RetryPolicy | None) -> None:
        """Raise GroupInUseError if `retry` is not the policy of `group`, which has other members."""
        with self._lock:
            self._check_retry(client_id, group, retry)

    def _check_retry(self, client_id: str, group: str, retry: RetryPolicy | None) -> None:
        others = self._others(client_id, group)
        known = None if self._settings is None else self._settings.get(group)
        if retry is not None and others and known is not None and known.retry_policy != retry:
            raise GroupInUseError(
                f"group {group!r} retries by {known.retry_policy!r}, and has the member {others[0].client_id!r}; "
                f"{client_id!r} asks for {retry!r}: stop the other members first, or leave retry= out"
            )

    def set_retry(self, client_id: str, group: str, retry: RetryPolicy) -> None:
        """Make `retry` the policy of `group`. `client_id`, which asks for it, need not be a member.
        Raises the errors of `check_retry` and `GroupTable.alter`."""
        self.check_retry(client_id, group, retry)
        if self._settings is not None:
            self._settings.alter(group, retry_policy=retry)  # not under the lock: it writes a file and calls listeners

    def get(self, client_id: str, group: str) -> Member | None:
        """Return a member, or None."""
        return self._groups.get(group, {}).get(client_id)

    def unregister(self, client_id: str, group: str, *, owner: str | None = None) -> bool:
        """Remove `client_id` from `group`. Return False if it was not a member, or of another owner.
        `owner` None removes it for any owner."""
        with self._lock:
            members = self._groups.get(group, {})
            known = members.get(client_id)
            if known is None or (owner is not None and known.owner != owner):
                return False
            del members[client_id]
            if not members:
                del self._groups[group]
        notify(self.on_change, group, "have joined, left or changed")
        return True

    def members(self, group: str) -> list[str]:
        """Return the client ids of `group`, sorted as rebalancing needs them."""
        with self._lock:
            return sorted(self._groups.get(group, {}))

    def subscriptions(self, group: str) -> Subscriptions:
        """Return the subscriptions of every member of `group`, empty without members."""
        with self._lock:
            return next((member.subscriptions for member in self._groups.get(group, {}).values()), MappingProxyType({}))

    def mode(self, group: str) -> Mode | None:
        """Return the mode of the members of `group`, or None without members."""
        with self._lock:
            return next((member.mode for member in self._groups.get(group, {}).values()), None)

    def check_clustering(self, group: str) -> None:
        """Raise ConfigError if `group` has broadcasting members. It says how to move each and to see its lag."""
        if (mode := self.mode(group)) is not None and mode.broadcasting:
            refuse_clients(group, self.members(group))

    def groups(self) -> list[str]:
        """Return the groups that have members, sorted."""
        with self._lock:
            return sorted(self._groups)


def notify(listeners: Iterable[Callable[[str], None]], group: str, what: str) -> None:
    """Call `listeners` with a group, whose clients have done `what`. The change stays, and all are called."""
    for listener in list(listeners):
        try:
            listener(group)
        except Exception:
            _log.exception("a listener failed when notified that clients of group %s %s", group, what)


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
    """Return the subscriptions without retry topics."""
    return {topic: expression for topic, expression in subscriptions.items() if not is_retry_topic(topic)}


def _normalized(subscriptions: Subscriptions) -> dict[str, Expression]:
    return {topic: (kind, _normal(kind, text)) for topic, (kind, text) in subscriptions.items()}


def _normal(kind: str, text: str) -> str:
    """Return one spelling for tag expressions of one meaning, so that blanks and order do not matter."""
    if kind != "TAG":
        return text.strip()
    tags = {tag.strip() for tag in text.split("||")} - {""} if text else set()
    return "*" if not tags or tags == {"*"} else " || ".join(sorted(tags))


def _shown(subscriptions: Subscriptions) -> str:
    return (
        ", ".join(f"{topic} ({kind} {text[:80]})" for topic, (kind, text) in sorted(subscriptions.items())) or "nothing"
    )
