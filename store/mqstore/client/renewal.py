"""Keeping deliveries invisible while they are in use (clients#renewal).

    add ---> held ---- a third of the loan is left ---> renewed for a whole loan, the receipt stays good
              |  \\---- it came too late --------------> let go of, and logged
              |  \\---- the disk is full, say ---------> again after a second
              +----- remove

A renewal is a record in the log, so it is made late: most deliveries are settled long before. There are as many as a
consumer holds, and few are ever due; so each run looks at all, and adding one costs no more than an entry in a table.
Has no thread and no clock: who calls `run_once` has both.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from mqstore.broker.broker import Broker
from mqstore.client.limitedlog import LimitedLog
from mqstore.errors import InvalidReceiptError, MQStoreError, ReceiptExpiredError

__all__ = ["Renewer"]

AGAIN_MS = 1_000

Key = TypeVar("Key", bound=Hashable)


class Renewer(Generic[Key]):
    """The deliveries that one consumer of `group` holds, each for `loan_ms` at a time. Thread-safe, but that one thread
    at a time calls `run_once`.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     _ = store.put("mail", b"hello")
    ...     [delivery] = store.broker.pop("mailer", "mail", invisible=60)
    ...     renewer = Renewer(store.broker, "mailer", 60_000)
    ...     renewer.add([("first", "mail", delivery.receipt)], 60_000)
    ...     renewer.run_once(0), renewer.run_once(40_000), renewer.run_once(80_000)
    (40000, 80000, 120000)
    """

    def __init__(self, broker: Broker, group: str, loan_ms: int, log: LimitedLog | None = None) -> None:
        self._broker = broker
        self._group = group
        self._loan_ms = loan_ms
        self._log = LimitedLog(f"group {group}") if log is None else log
        self._lock = threading.Lock()
        self._held: dict[Key, tuple[str, str, int]] = {}
        """Topic, receipt, and when it is renewed (monotonic ms)."""

    def __len__(self) -> int:
        return len(self._held)

    def add(self, deliveries: Iterable[tuple[Key, str, str]], expires_ms: int) -> None:
        """Keep deliveries, (key, topic, receipt), which are on loan until `expires_ms`, invisible until removed."""
        due_ms = expires_ms - self._loan_ms // 3
        with self._lock:
            for key, topic, receipt in deliveries:
                self._held[key] = topic, receipt, due_ms

    def remove(self, *keys: Key) -> int:
        """Stop renewing these. Return how many of them were renewed."""
        with self._lock:
            return sum([self._held.pop(key, None) is not None for key in keys])

    def run_once(self, now_ms: int) -> int | None:
        """Renew what is due; when to come again (monotonic ms), None: there is nothing."""
        with self._lock:
            due = [(key, topic, receipt) for key, (topic, receipt, due_ms) in self._held.items() if due_ms <= now_ms]
        for key, topic, receipt in due:
            if key in self._held:
                self._renew(key, topic, receipt, now_ms)
        with self._lock:
            return min((due_ms for _, _, due_ms in self._held.values()), default=None)

    def _renew(self, key: Key, topic: str, receipt: str, now_ms: int) -> None:
        due_ms = now_ms + self._loan_ms - self._loan_ms // 3
        try:
            # Not waited for, whatever the store does: a power cut that takes it takes us, for whom it is.
            self._broker.renew(self._group, topic, receipt, self._loan_ms / 1000, durability="append")
        except (ReceiptExpiredError, InvalidReceiptError) as error:
            if self.remove(key):  # else it was settled meanwhile
                self._say(topic, f"{key} was lost before its handler ended", "lost", error)
        except MQStoreError as error:
            self._say(topic, f"{key} could not be renewed, again in a second", "not renewed", error)
            due_ms = now_ms + AGAIN_MS
        with self._lock:
            if key in self._held:
                self._held[key] = topic, receipt, due_ms

    def _say(self, topic: str, what: str, like: str, error: MQStoreError) -> None:
        self._log.say(logging.WARNING, what, at=topic, error=error, like=like)
