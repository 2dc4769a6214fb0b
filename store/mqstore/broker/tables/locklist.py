"""Clients that held queue locks when the process was killed (delivery#lock-list).

    running         each second the clients that hold locks are saved, if they have changed
    killed          locks are gone, but an ordered client of a server continues with its messages for up to 30 s
    started again   for 60 s only these clients get locks in their groups

So no other member gets the queue of a client that still works on it. The member `locks` of `config/locks.json` has the
client ids by group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from mqstore.broker.tables.configfile import ConfigFile, object_member
from mqstore.broker.tables.locks import LEASE_MS, QueueLocks
from mqstore.clock import Clock
from mqstore.log.reading.reader import StoreReader

_LOCKS: Final = "locks"


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
