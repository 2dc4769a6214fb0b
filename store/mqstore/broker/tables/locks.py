"""Queue locks for orderly consumption: which client of a group may consume a queue (delivery#locks).

A lock is a lease in memory, by the monotonic clock. It does not survive a restart, which is safe because the clients of
this process do not either.

::

    free ──────── try_lock ────────► held by c  ──── try_lock by c ─────────────────► renewed
      ▲                                │   │
      ├──────── unlock by c ───────────┘   └─── age > LEASE_MS, then try_lock by another ────► held by the other
      └── unlock by another: ignored

    held by c ── begin_work by c ──► at work: no client can lock or unlock ── end_work ──► held by c

A process may be stopped during a handler for longer than a lease. When it continues, the handler is still at work, so
no other client may get its queue. Before a handler starts, it calls `begin_work`, which fails if the lock was lost.

Listeners are called with the group whose locks were released, outside the mutex, in the releasing thread. So a member
whose request was refused need not poll. No listener is called when a lease expires.
All calls, renewals included, run under one mutex (delivery#x7).

Clients that held locks when the process was killed (delivery#lock-list, `LockList`):

    running         each second the clients that hold locks are saved, if they have changed
    killed          locks are gone, but an ordered client of a server continues with its messages for up to 30 s
    started again   for 60 s only these clients get locks in their groups

So no other member gets the queue of a client that still works on it. The member `locks` of `config/locks.json` has the
client ids by group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from mqstore.broker.tables.configfile import ConfigFile, object_member
from mqstore.broker.tables.members import notify
from mqstore.clock import Clock
from mqstore.log.commitlog import QueueRef
from mqstore.log.reading.reader import StoreReader
from mqstore.log.writing.log_tail import as_queue
from mqstore.signalsafe import Lock

LEASE_MS: Final = 60_000
"""Age in ms up to which a lock holds after its last renewal. An older lock may be taken over."""
_LOCKS: Final = "locks"


class QueueLock(NamedTuple):
    """One lock, for `stats()` and inspection."""

    group: str
    queue: QueueRef
    client_id: str
    age_ms: int
    """Number of ms since it was taken or last renewed."""
    expired: bool


@dataclass(slots=True)
class _Lease:
    client_id: str
    renewed_ms: int
    at_work: bool = False

    def expired(self, now_ms: int) -> bool:
        return not self.at_work and now_ms - self.renewed_ms > LEASE_MS


class QueueLocks:
    """All queue locks of a store. Thread-safe. Only the mutex blocks.

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
        """Start without locks.
        `check_open` raises if the store is closed: another process may then grant its locks."""
        self._clock = clock
        self._check_open = check_open
        self._mutex = Lock()
        self._leases: dict[str, dict[QueueRef, _Lease]] = {}
        self.on_release: list[Callable[[str], None]] = []
        """Functions called with the name of a group that has released locks."""

    def try_lock(self, group: str, queue: QueueRef, client_id: str) -> bool:
        """Lock `queue` for `client_id`, or renew its lock. False while another client's lock holds."""
        return bool(self.try_lock_batch(group, (queue,), client_id))

    def try_lock_batch(self, group: str, queues: Iterable[QueueRef], client_id: str) -> set[QueueRef]:
        """Call `try_lock` for all `queues` atomically. Return the queues that `client_id` holds now.
        These may not be all. Raises StoreClosedError."""
        self._check_open()
        wanted = [as_queue(queue) for queue in queues]  # not under the mutex, because it runs the caller's iterator
        with self._mutex:
            # Read under the mutex, else a renewal could get an earlier time than the take-over before it.
            now_ms = self._clock.monotonic_ms()
            return {queue for queue in wanted if self._take(group, queue, client_id, now_ms)}

    def renew_batch(self, group: str, queues: Iterable[QueueRef], client_id: str) -> set[QueueRef]:
        """Renew the locks of `client_id` on `queues`. Return the queues whose locks were not lost.
        An expired lock is lost only if another client has taken it, even if it is free again."""
        wanted = [as_queue(queue) for queue in queues]
        with self._mutex:
            now_ms = self._clock.monotonic_ms()
            kept = self._own(group, wanted, client_id)
            for lease in kept.values():
                lease.renewed_ms = now_ms
            return {*kept}

    def begin_work(self, group: str, queue: QueueRef, client_id: str) -> bool:
        """Keep the lock of `client_id` on `queue` until `end_work`. Return False if it was lost.
        `renew_batch` says when a lock is lost."""
        with self._mutex:
            lease = self._leases.get(group, {}).get(queue)
            if lease is None or lease.client_id != client_id or lease.at_work:
                return False
            lease.at_work = True
            return True

    def end_work(self, group: str, queue: QueueRef) -> None:
        """Make the lock of `begin_work` expire again."""
        with self._mutex:
            if (lease := self._leases.get(group, {}).get(queue)) is not None:
                lease.at_work = False

    def unlock_batch(self, group: str, queues: Iterable[QueueRef], client_id: str) -> set[QueueRef]:
        """Release the locks of `client_id` on `queues`, expired ones included. Return the released ones.
        Locks of others stay, and those at work."""
        wanted = list(queues)
        with self._mutex:
            leases = self._leases.get(group, {})
            released = {queue for queue, lease in self._own(group, wanted, client_id).items() if not lease.at_work}
            for queue in released:
                del leases[queue]
            if not leases:
                self._leases.pop(group, None)
        if released:
            notify(self.on_release, group, "have released locks")
        return released

    def drop(self, client_id: str, groups: Collection[str] | None = None) -> None:
        """Release all locks of a client that has ended, or has left `groups`, those at work included."""
        released = []
        with self._mutex:
            for group, leases in self._leases.items():
                held = [queue for queue, lease in leases.items() if lease.client_id == client_id]
                if held and (groups is None or group in groups):
                    released.append(group)
                    for queue in held:
                        del leases[queue]
        for group in released:
            notify(self.on_release, group, "have released locks")

    def forget(self, group: str) -> None:
        """Forget the locks of a deleted group, unless one is at work."""
        with self._mutex:
            if not any(lease.at_work for lease in self._leases.get(group, {}).values()):
                self._leases.pop(group, None)

    def owner(self, group: str, queue: QueueRef) -> str | None:
        """Return the client that holds `queue`, or None if it is free or expired. Renews nothing."""
        with self._mutex:
            lease = self._leases.get(group, {}).get(queue)
            return None if lease is None or lease.expired(self._clock.monotonic_ms()) else lease.client_id

    def snapshot(self) -> list[QueueLock]:
        """Return all locks by group and queue, expired ones that nobody took over included."""
        with self._mutex:
            now_ms = self._clock.monotonic_ms()
            return sorted(
                QueueLock(group, queue, lease.client_id, now_ms - lease.renewed_ms, lease.expired(now_ms))
                for group, leases in self._leases.items()
                for queue, lease in leases.items()
            )

    def _own(self, group: str, queues: Iterable[QueueRef], client_id: str) -> dict[QueueRef, _Lease]:
        leases = self._leases.get(group, {})
        return {queue: lease for queue in queues if (lease := leases.get(queue)) and lease.client_id == client_id}

    def _take(self, group: str, queue: QueueRef, client_id: str, now_ms: int) -> bool:
        leases = self._leases.setdefault(group, {})
        lease = leases.get(queue)
        if lease is not None and (lease.at_work or (lease.client_id != client_id and not lease.expired(now_ms))):
            return False  # at work: even with the same client id, it may belong to a consumer that is stopping
        leases[queue] = _Lease(client_id, now_ms)
        return True


def check_lock_list(value: Mapping[str, Any]) -> None:
    """Raise ValueError unless `value` is a valid content of `locks.json`."""
    for group, clients in object_member(value, _LOCKS).items():
        if type(clients) is not list or not all(type(client) is str for client in clients):
            raise ValueError(f"locks: {group!r:.80} must have a list of client ids")


class LockList:
    """The saved list of a store, and the locks that it forbids. `save` may run in another thread than `may_lock`."""

    def __init__(self, store: StoreReader, locks: QueueLocks, clock: Clock) -> None:
        """Load the file. Raises CorruptStoreError if it is damaged."""
        self._file = ConfigFile(store, "locks.json", check_lock_list)
        self._locks, self._clock = locks, clock
        self._saved: dict[str, list[str]] = object_member(self._file.load() or {}, _LOCKS)
        self._before = {} if store.clean_shutdown else self._saved
        self._until_ms = clock.monotonic_ms() + LEASE_MS

    def may_lock(self, group: str, client_id: str) -> bool:
        """Return False while only the clients that held locks before a kill may lock queues of the group."""
        if self._before and self._clock.monotonic_ms() >= self._until_ms:
            self._before = {}
        return client_id in self._before.get(group, (client_id,))

    def save(self, is_remote: Callable[[str, str], bool]) -> None:
        """Save the clients that hold locks, without those for which `is_remote(group, client)` is false: they end with
        this process. Raises the errors of `ConfigFile.save`."""
        held = {group: set(clients) for group, clients in self._before.items()}  # for a second kill within the time
        for lock in self._locks.snapshot():
            if not lock.expired and is_remote(lock.group, lock.client_id):
                held.setdefault(lock.group, set()).add(lock.client_id)
        wanted = {group: sorted(clients) for group, clients in held.items()}
        if wanted != self._saved:
            self._file.save({_LOCKS: wanted})
            self._saved = wanted
