"""Queue locks for orderly consumption: which client of a group may consume a queue (delivery#locks).

A lock is a lease in memory: it ends when its owner gives it back, or when it was not renewed for `LEASE_MS`. While its
owner is at work on the queue (`begin_work`) it does not end. Leases are measured on the monotonic clock and are gone
after a restart, which is safe because the clients of this process are gone with it. Knows neither which groups exist
nor who is a member: a client id is just a name.

::

    free ──────── try_lock ────────► held by c  ──── try_lock by c ─────────────────► renewed
      ▲                                │   │
      ├──────── unlock by c ───────────┘   └─── age > LEASE_MS, then try_lock by another ────► held by that one
      └── unlock by another: ignored

    held by c ── begin_work by c ──► at work: no try_lock and no unlock by anybody ── end_work ──► held by c

A process may be stopped for longer than a lease in the middle of a handler. When it goes on, the handler is still at
work, so nobody else may get its queue. A handler that is about to begin asks first, and finds out what was lost.

Listeners are told the group of which locks were given back, outside the mutex, in the thread that gave them: a member
that was refused need not ask again and again. Of a lease that runs out nobody is told.

Every path, the renewal too, runs under the one mutex: RocketMQ renews without it, and a renewal that lands on a lease
just taken over leaves two clients each believing that the queue is theirs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from mqstore.clock import Clock
from mqstore.log.commitlog import QueueRef
from mqstore.log.tip import as_queue

__all__ = ["LEASE_MS", "QueueLock", "QueueLocks"]

_log = logging.getLogger(__name__)

LEASE_MS: Final = 60_000
"""A lock not renewed for longer than this may be taken over; at exactly this age it still holds."""


class QueueLock(NamedTuple):
    """One lock, for `stats()` and inspection."""

    group: str
    queue: QueueRef
    client_id: str
    age_ms: int
    """Since it was taken or last renewed."""
    expired: bool


@dataclass(slots=True)
class _Lease:
    client_id: str
    renewed_ms: int
    at_work: bool = False

    def expired(self, now_ms: int) -> bool:
        return not self.at_work and now_ms - self.renewed_ms > LEASE_MS


class QueueLocks:
    """All queue locks of a store. Safe to call from many threads; nothing here blocks but for the mutex.

    >>> from mqstore.clock import SimulatedClock
    >>> clock = SimulatedClock()
    >>> locks, queue = QueueLocks(clock), QueueRef("orders", 0)
    >>> locks.try_lock("billing", queue, "c1"), locks.try_lock("billing", queue, "c2")
    (True, False)
    >>> clock.advance(LEASE_MS + 1)
    >>> locks.try_lock("billing", queue, "c2"), locks.owner("billing", queue)
    (True, 'c2')
    """

    def __init__(self, clock: Clock, check_open: Callable[[], object] = lambda: None) -> None:
        """`check_open` raises when there is no store any more: another process may grant its locks by then."""
        self._clock = clock
        self._check_open = check_open
        self._mutex = threading.Lock()
        self._leases: dict[str, dict[QueueRef, _Lease]] = {}
        self.on_release: list[Callable[[str], None]] = []
        """Called with the name of a group that has given locks back."""

    def try_lock(self, group: str, queue: QueueRef, client_id: str) -> bool:
        """Lock `queue` for `client_id`, or renew its lock. False while another client's lock holds."""
        return bool(self.try_lock_batch(group, (queue,), client_id))

    def try_lock_batch(self, group: str, queues: Iterable[QueueRef], client_id: str) -> set[QueueRef]:
        """`try_lock` for each of `queues`, all at one moment; those that `client_id` holds now, perhaps not all.
        StoreClosedError."""
        self._check_open()
        wanted = [as_queue(queue) for queue in queues]  # runs the caller's iterator: not under the mutex
        with self._mutex:
            # Read under the mutex: an older reading would date a renewal before the take-over that it follows.
            now_ms = self._clock.monotonic_ms()
            return {queue for queue in wanted if self._take(group, queue, client_id, now_ms)}

    def renew_batch(self, group: str, queues: Iterable[QueueRef], client_id: str) -> set[QueueRef]:
        """Renew the locks of `client_id` on `queues`; those it has not lost. One that ran out and that nobody has taken
        since counts as held without a break, one that another had meanwhile does not, be it free again or not."""
        wanted = [as_queue(queue) for queue in queues]
        with self._mutex:
            now_ms = self._clock.monotonic_ms()
            leases = self._leases.get(group, {})
            kept = {queue for queue in wanted if (lease := leases.get(queue)) and lease.client_id == client_id}
            for queue in kept:
                leases[queue].renewed_ms = now_ms
            return kept

    def begin_work(self, group: str, queue: QueueRef, client_id: str) -> bool:
        """Let the lock of `client_id` on `queue` hold until `end_work`. Return False if it was lost, as `renew_batch`
        says."""
        with self._mutex:
            lease = self._leases.get(group, {}).get(queue)
            if lease is None or lease.client_id != client_id or lease.at_work:
                return False
            lease.at_work = True
            return True

    def end_work(self, group: str, queue: QueueRef) -> None:
        """End what `begin_work` has begun."""
        with self._mutex:
            self._leases[group][queue].at_work = False

    def unlock_batch(self, group: str, queues: Iterable[QueueRef], client_id: str) -> set[QueueRef]:
        """Give back the locks of `client_id` on `queues`, expired or not; those that were given back. Locks of others
        stay, and those at work."""
        wanted = list(queues)
        with self._mutex:
            leases = self._leases.get(group, {})
            given = {
                queue
                for queue in wanted
                if (lease := leases.get(queue)) and lease.client_id == client_id and not lease.at_work
            }
            for queue in given:
                del leases[queue]
            if not leases:
                self._leases.pop(group, None)
        if given:
            self._tell(group)
        return given

    def owner(self, group: str, queue: QueueRef) -> str | None:
        """The client that holds `queue`; None when it is free or its lock has expired. Renews nothing."""
        with self._mutex:
            lease = self._leases.get(group, {}).get(queue)
            return None if lease is None or lease.expired(self._clock.monotonic_ms()) else lease.client_id

    def snapshot(self) -> list[QueueLock]:
        """All locks, expired ones that nobody took over included; by group and queue."""
        with self._mutex:
            now_ms = self._clock.monotonic_ms()
            return sorted(
                QueueLock(group, queue, lease.client_id, now_ms - lease.renewed_ms, lease.expired(now_ms))
                for group, leases in self._leases.items()
                for queue, lease in leases.items()
            )

    def _tell(self, group: str) -> None:
        for listener in list(self.on_release):
            try:
                listener(group)
            except Exception:  # the locks are free, and the other listeners must hear of it
                _log.exception("a listener failed when told that group %s has given locks back", group)

    def _take(self, group: str, queue: QueueRef, client_id: str, now_ms: int) -> bool:
        leases = self._leases.setdefault(group, {})
        lease = leases.get(queue)
        if lease is not None and (lease.at_work or (lease.client_id != client_id and not lease.expired(now_ms))):
            return False  # one at work may be of a consumer that was stopped and had the same client id
        leases[queue] = _Lease(client_id, now_ms)
        return True
