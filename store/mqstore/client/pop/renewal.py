"""Renewal of the leases of deliveries that are in use (clients#renewal).

    add ---> held ---- a third of the lease is left ---> renewed for a whole lease, the receipt stays valid
              |  \\---- it came too late --------------> no longer renewed, and logged
              |  \\---- an error such as a full disk --> again in the next run
              +----- remove

A renewal is a record in the log, so it is made late: most deliveries are settled long before. Deliveries that came
together are held together, and few are ever due. So each run looks at all. This module has no thread and no clock. The
caller of `run_once` has both.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from operator import attrgetter

from mqstore.client.limitedlog import LimitedLog
from mqstore.contract import BrokerContract, Delivery
from mqstore.errors import InvalidReceiptError, MQStoreError, ReceiptExpiredError
from mqstore.log.message import Message
from mqstore.signalsafe import Lock

_message = attrgetter("message")


class Held:
    """Unsettled deliveries that came together."""

    __slots__ = ("deliveries", "due_ms", "lost")

    def __init__(self, deliveries: Sequence[Delivery]) -> None:
        self.deliveries = dict(zip(map(id, map(_message, deliveries)), deliveries, strict=True))
        """Deliveries by the `id` of their messages, which is cheaper than their hash."""
        self.due_ms = 0
        """Time of the next renewal (monotonic ms)."""
        self.lost: set[int] = set()
        """Keys of deliveries that another consumer may have. They are no longer renewed."""

    def messages(self) -> list[Message]:
        """Return the messages of the deliveries, in their order."""
        return list(map(_message, self.deliveries.values()))


class Renewer:
    """Deliveries that one consumer of `group` holds, renewed for `visibility_ms` at a time.
    Thread-safe, except that only one thread at a time may call `run_once`.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     _ = store.put("mail", b"hello")
    ...     held = Held(store.broker.pop("mailer", "mail", invisible=60))
    ...     renewer = Renewer(store.broker, "mailer", 60_000)
    ...     renewer.add(held, 60_000)
    ...     renewer.run_once(40_000)
    ...     held.due_ms, len(renewer)
    (80000, 1)
    """

    def __init__(self, broker: BrokerContract, group: str, visibility_ms: int, log: LimitedLog | None = None) -> None:
        self._broker = broker
        self._group = group
        self._visibility_ms = visibility_ms
        self._log = LimitedLog(f"group {group}") if log is None else log
        self._lock = Lock()
        self._held: dict[Held, None] = {}
        self._count = 0

    def __len__(self) -> int:
        """Return the number of deliveries held."""
        return self._count

    def add(self, held: Held, expires_ms: int) -> None:
        """Renew deliveries, which are leased until `expires_ms`, until they are removed."""
        held.due_ms = expires_ms - self._visibility_ms // 3
        with self._lock:
            self._held[held] = None
            self._count += len(held.deliveries)

    def remove(self, held: Held, messages: Iterable[Message]) -> list[Message]:
        """Remove the deliveries of these messages. Return the messages that were held until now."""
        with self._lock:
            gone = [each for each in messages if held.deliveries.pop(id(each), None) is not None]
            if held in self._held:
                self._count -= len(gone)
                if not held.deliveries:
                    del self._held[held]
        return gone

    def clear(self) -> None:
        with self._lock:
            self._held.clear()
            self._count = 0

    def run_once(self, now_ms: int) -> None:
        """Renew the leases that are due (monotonic ms). Call it several times in a third of a lease."""
        with self._lock:
            due = [held for held in self._held if held.due_ms <= now_ms]
        for held in due:
            with self._lock:
                deliveries = [(key, each) for key, each in held.deliveries.items() if key not in held.lost]
            renewed = [self._renew(held, key, each) for key, each in deliveries]
            if all(renewed):
                held.due_ms = now_ms + self._visibility_ms - self._visibility_ms // 3

    def _renew(self, held: Held, key: int, each: Delivery) -> bool:
        """Renew a delivery. Return False if it must be tried again."""
        if key not in held.deliveries:  # settled meanwhile
            return True
        name = f"{each.topic}/{each.queue_id}, offset {each.message.offset}"
        try:
            # Never wait for the disk: a power cut that loses the renewal also ends this consumer.
            self._broker.renew(self._group, each.topic, each.receipt, self._visibility_ms / 1000, durability="append")
        except (ReceiptExpiredError, InvalidReceiptError) as error:
            if key in held.deliveries:
                held.lost.add(key)
                self._say(each.topic, f"{name} was lost before its handler ended", "lost", error)
        except MQStoreError as error:
            self._say(each.topic, f"{name} could not be renewed, and is tried again", "not renewed", error)
            return False
        return True

    def _say(self, topic: str, what: str, like: str, error: MQStoreError) -> None:
        self._log.say(logging.WARNING, what, at=topic, error=error, like=like)
