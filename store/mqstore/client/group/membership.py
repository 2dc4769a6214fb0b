"""Membership in a group: registration, share of the queues, locks (clients#group, clients#seat).

    join ──► share ──► take ──► read, commit ──► give ──► leave
               ▲         │refused                  │
               └─────────┴────── on_change ◄───────┘  of another member

    on_change is called when      the group's members or subscriptions changed
                                  a subscribed topic, or a retry topic, came, was altered or went
                                  a queue that `take` was refused is free again

Within a process a member does not die alone, but it may hang or be forgotten. So a seat is a lease, too, renewed by
`share` and `renew`. A member that finds an expired seat in a clustering group unregisters its client, so that the
others get its queues. A client that returns takes its seat again, and learns by `renew` which queues it has lost.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable

from mqstore.broker.tables.names import is_retry_topic
from mqstore.client.group.allocation import Strategy, name_of
from mqstore.contract import BrokerContract, Event, Mode, RetryPolicy, Subscriptions
from mqstore.errors import ConfigError
from mqstore.log.commitlog import QueueRef
from mqstore.logger import log as _log
from mqstore.signalsafe import Lock

_CLIENT_ID = re.compile(r"[a-zA-Z0-9_.@#-]{1,120}")


def client_id_of(client_id: object) -> str:
    """Return a client id for a group, which also names a folder. None makes a new one.
    Raises ConfigError, with the rule, for a bad id."""
    if client_id is None:
        return f"{os.getpid()}-{os.urandom(4).hex()}"
    if not isinstance(client_id, str) or not _CLIENT_ID.fullmatch(client_id) or client_id in (".", ".."):
        raise ConfigError(
            f"client id {client_id!r:.150}: a client id is 1 to 120 of letters, digits, '_', '.', '@', '#', '-', "
            f"and neither '.' nor '..'"
        )
    return client_id


class Membership:
    """Member of `group`, from `join` to `leave`. Thread-safe with one exception.
    The owner must call `join`, `take`, `give`, `renew` and `leave` one at a time.
    """

    def __init__(
        self,
        broker: BrokerContract,
        group: str,
        client_id: str,
        mode: Mode,
        strategy: Strategy,
        on_change: Callable[[], None],
        *,
        retry: RetryPolicy | None = None,
    ) -> None:
        """`on_change` reports changes, from any thread, and must be quick. `retry` is the group's new policy."""
        self.group = group
        self.client_id = client_id
        self._broker = broker
        self._mode = mode if mode.broadcasting else mode._replace(strategy=name_of(strategy))
        self._strategy = strategy
        self._retry = retry
        self._on_change = on_change
        self._lock = Lock()
        self._joined = False
        self._subscriptions: Subscriptions = {}
        self._token = os.urandom(16).hex()
        """Owner of the registration: another consumer may have the same client id."""
        self._seats = f"@{group}"
        """Group of the leases on seats in the table of locks. No other group has this name."""
        self._seat = QueueRef(client_id, 0)
        self._held: set[QueueRef] = set()
        self._wanted: set[QueueRef] = set()
        """Queues that `take` was refused, and that are still in the share."""
        self._complaints: set[str] = set()
        """Topics whose problem was logged. It is not logged again until it is over."""

    @property
    def held(self) -> frozenset[QueueRef]:
        """Queues that were taken and not given back. Queues that `renew` found lost are not included."""
        with self._lock:
            return frozenset(self._held)

    # -- the seat ---------------------------------------------------------------------------------------------------

    def join(self, subscriptions: Subscriptions) -> None:
        """Become a member, or change the subscriptions. Locks are kept.

        Raises GroupInUseError or SubscriptionConflictError, and then nothing has changed. GroupInUseError: the other
        members have another mode, strategy or retry policy, or another consumer of this store uses the client id.
        SubscriptionConflictError: the other members subscribe otherwise.
        """
        self._clear_seats()  # members that hang need not agree
        changed = self._register(subscriptions)
        for event, listener in self._listeners():
            self._broker.listen(event, listener)
        with self._lock:
            first, self._joined = not self._joined, True
            self._subscriptions = dict(subscriptions)
        self._sit()
        if first or changed:
            self._on_change()  # for changes before we listened

    def _register(self, subscriptions: Subscriptions) -> bool:
        return self._broker.members.register(
            self.client_id, self.group, subscriptions, self._mode, owner=self._token, retry=self._retry
        )

    def _is_taken(self) -> bool:
        """Return True if another consumer has registered with this client id."""
        member = self._broker.members.get(self.client_id, self.group)
        return member is not None and member.owner != self._token

    def _listeners(self) -> tuple[tuple[Event, Callable[[str], None]], ...]:
        return ("members", self._members_changed), ("topics", self._topic_changed), ("locks", self._lock_released)

    def leave(self) -> None:
        """Leave the group and release every lock, except of queues at work. Repeating it is harmless.
        Offsets must be committed before. The end of work releases the remaining locks."""
        with self._lock:
            self._joined = False
        for event, listener in self._listeners():
            self._broker.unlisten(event, listener)
        # Locks first, so that members whose share grows find them free.
        with self._lock:
            queues, self._held, self._wanted = self._held, set(), set()
        if not self._is_taken():  # otherwise another consumer with our client id has the locks
            self._broker.locks.unlock_batch(self.group, queues, self.client_id)
            self._broker.locks.unlock_batch(self._seats, (self._seat,), self.client_id)
        self._broker.members.unregister(self.client_id, self.group, owner=self._token)

    def _sit(self) -> None:
        """Renew the seat, or take it again if it was lost. Raises the errors of `join`."""
        if self._mode.broadcasting or not self._joined:
            return
        member = self._broker.members.get(self.client_id, self.group)
        if member is None or member.owner != self._token:
            self._register(self._subscriptions)  # raises if another consumer has taken the client id
        self._broker.locks.try_lock(self._seats, self._seat, self.client_id)

    def _clear_seats(self) -> None:
        """Unregister members whose leases on their seats have expired."""
        if self._mode.broadcasting:
            return
        for lock in self._broker.locks.snapshot():
            if lock.group == self._seats and lock.expired:
                age_s = lock.age_ms / 1000
                _log.warning(
                    "%s of group %s was not heard of for %.0f s: it has no share", lock.client_id, self.group, age_s
                )
                self._broker.locks.unlock_batch(self._seats, (lock.queue,), lock.client_id)
                self._broker.members.unregister(lock.client_id, self.group)

    # -- the share --------------------------------------------------------------------------------------------------

    def share(self, topics: Iterable[str] | None = None) -> dict[str, frozenset[QueueRef]]:
        """Return this member's queues of each of `topics`, by the strategy. None means the subscribed topics.

        When broadcasting, all readable queues are returned. A topic that may not be read has none.
        A topic that does not exist yet, or for which the strategy failed, is missing. Members keep the queues of it
        that they have, and it is logged once. Raises the errors of `join` if this member lost its seat and no longer
        agrees with the others.
        """
        self._sit()
        self._clear_seats()
        members = self._broker.members.members(self.group)
        shares = {}
        for topic in sorted(self._subscriptions if topics is None else topics):
            mine = self._share_of(topic, members)
            if mine is not None:
                shares[topic] = mine
        with self._lock:  # queues of other members are no longer wanted
            self._wanted = {queue for queue in self._wanted if queue in shares.get(queue.topic, (queue,))}
        return shares

    def _share_of(self, topic: str, members: list[str]) -> frozenset[QueueRef] | None:
        config = self._broker.topics.get(topic)
        if config is None:
            if is_retry_topic(topic):  # the first failure creates it
                return None
            text = "topic %r is not there; group %s waits for it"  # it may be created soon
            self._complain(topic, text, topic, self.group, level=logging.INFO)
            return None
        if not config.readable:
            self._complain(topic, "topic %r may not be read (perm %d); group %s waits", topic, config.perm, self.group)
            return frozenset()
        queues = [QueueRef(topic, i) for i in config.queue_ids]
        if self._mode.broadcasting:
            return self._fine(topic, queues)
        if not queues:
            return self._fine(topic, ())
        if self.client_id not in members:
            self._complain(topic, "%s is no longer a member of group %s", self.client_id, self.group)
            return frozenset()
        try:
            mine = list(self._strategy(self.client_id, tuple(queues), tuple(members)))
            if not set(queues).issuperset(mine):
                raise ConfigError(f"it gave {mine!r:.200}, of the queues 0..{len(queues) - 1} of topic {topic!r}")
        except Exception:
            text = "group %s: the strategy failed for topic %r; shares stay as they are"
            self._complain(topic, text, self.group, topic, level=logging.ERROR)
            return None
        return self._fine(topic, mine)

    def _complain(self, topic: str, text: str, *arguments: object, level: int = logging.WARNING) -> None:
        """Log a problem of a topic once, until it is over."""
        if topic not in self._complaints:
            self._complaints.add(topic)
            _log.log(level, text, *arguments, exc_info=level == logging.ERROR)

    def _fine(self, topic: str, queues: Iterable[QueueRef]) -> frozenset[QueueRef]:
        self._complaints.discard(topic)
        return frozenset(queues)

    # -- the locks --------------------------------------------------------------------------------------------------

    def take(self, queues: Iterable[QueueRef]) -> set[QueueRef]:
        """Lock `queues` and return those that are this member's now. After `leave` there are none.
        Broadcasting needs no locks. `on_change` is called when one of the others is released. After the death of an
        owner it is not called, so try again after a while."""
        wanted = set(queues)
        if self._mode.broadcasting:
            got = wanted
        else:
            with self._lock:  # before the request, so that a release in between counts as news
                self._wanted |= wanted
            got = self._broker.locks.try_lock_batch(self.group, wanted, self.client_id)
        with self._lock:
            left = not self._joined
            if not left:
                self._wanted -= got
                self._held |= got
        if left:  # we left meanwhile, perhaps in a hook: nobody would release these
            self.give(got)
            return set()
        return got

    def give(self, queues: Iterable[QueueRef]) -> None:
        """Release the locks of `queues`, and want them no longer. Offsets must be committed before."""
        given = set(queues)
        with self._lock:
            self._held -= given
            self._wanted -= given
            left = not self._joined
        if self._mode.broadcasting or (left and self._is_taken()):
            return
        self._broker.locks.unlock_batch(self.group, given, self.client_id)

    def begin_work(self, queue: QueueRef) -> bool:
        """Keep the lock of `queue` until `end_work`. Return False if another client has it."""
        return self._mode.broadcasting or self._broker.locks.begin_work(self.group, queue, self.client_id)

    def end_work(self, queue: QueueRef) -> None:
        if not self._mode.broadcasting:
            self._broker.locks.end_work(self.group, queue)

    def renew(self) -> set[QueueRef]:
        """Renew the seat and the locks of all queues held. Return the queues that were lost.
        To be called every 20 seconds, since after 60 others may take the locks. Raises the errors of `share`."""
        if self._mode.broadcasting:
            return set()
        self._sit()  # first, since another consumer with our client id may have the locks
        held = self.held
        lost = held - self._broker.locks.renew_batch(self.group, held, self.client_id)
        with self._lock:
            self._held -= lost
        return set(lost)

    # -- news -------------------------------------------------------------------------------------------------------

    def _members_changed(self, group: str) -> None:
        if group == self.group:
            self._on_change()

    def _topic_changed(self, topic: str) -> None:
        if topic in self._subscriptions or is_retry_topic(topic):
            self._on_change()

    def _lock_released(self, group: str) -> None:
        if group != self.group:
            return
        with self._lock:
            wanted = list(self._wanted)
        if any(self._broker.locks.owner(group, queue) is None for queue in wanted):
            self._on_change()
