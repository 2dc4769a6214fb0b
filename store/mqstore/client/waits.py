"""Waiting until there may be something to read, or to pop, in one topic or in several at once (delivery#waiting).

For who pops:

    look, nothing there --> add: parked at every topic --+-- a topic calls --------> over; the turn is that topic's
                                                         +-- `ring` ---------------> over, and no turn
                                                         +-- `cancel`, time out ---> over, silently

The broker calls one receiver for each message. So a turn must be used, by a pop of that topic, or passed on; else a
message lies there while others who could have it sleep. A wait uses the first turn it is given. What other topics call
it for in the meantime it passes on at once, and `cancel` passes on what nobody used.

Nothing is missed between the look and the parking: the broker looks once more when it parks somebody, and who rings
moves `rings`, which whoever waits has read before it looked.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from mqstore.broker.broker import Broker
from mqstore.broker.filters import Filter
from mqstore.broker.waiting import Waiter
from mqstore.signalsafe import Bell

__all__ = ["Ready", "Wait", "Waits"]

_log = logging.getLogger("mqstore")

Topics = Iterable[tuple[str, Filter | None]]


class Ready:
    """Somebody who waits for messages from offsets on, until there may be something to do."""

    __slots__ = ("_callback", "_lock", "_open", "_over", "_parked")

    def __init__(self, callback: Callable[[], object], lock: threading.Lock, waiting: set[Ready]) -> None:
        """`waiting`: those that are not over; `lock` guards it."""
        self._callback = callback
        self._lock = lock
        self._open = waiting
        self._parked: list[Callable[[], object]] = []
        """Take it away from where it is parked."""
        self._over = False

    def cancel(self) -> None:
        """Wait no longer: the callback will not be called, unless it was already. Again is harmless."""
        self._end()

    def fire(self) -> None:
        if self._end():
            try:
                self._callback()
            except Exception:  # not the trouble of who brings the news
                _log.exception("the callback of a consumer that waited failed")

    def _end(self) -> bool:
        """Let it be over; False: it was."""
        with self._lock:
            if self._over:
                return False
            self._over = True
            self._open.discard(self)
        for remove in list(self._parked):
            remove()
        return True

    def park(
        self,
        broker: Broker,
        topic: str,
        queue_id: int,
        offset: int,
        filter: Filter | str | None = None,  # noqa: A002
        timeout_s: float | None = None,
    ) -> None:
        waiter = broker.add_waiter(topic, queue_id, offset, lambda worth: self.fire(), filter=filter, timeout=timeout_s)
        self._parked.append(partial(broker.remove_waiter, waiter))
        if self._over:  # meanwhile; whoever ended it may not have seen this one
            broker.remove_waiter(waiter)


class Wait:
    """Somebody who waits, or no longer does."""

    __slots__ = ("_is_kept", "_over", "_parked", "_waits", "call", "topic")

    def __init__(self, waits: Waits, call: Callable[[], object], is_kept: bool) -> None:
        self._waits = waits
        self.call = call
        self._is_kept = is_kept
        self._parked: list[Waiter] = []
        self._over = False
        self.topic: str | None = None
        """Whose turn was given and not passed on."""

    @property
    def over(self) -> bool:
        """Whether the callback was called, or is about to be, or never will."""
        return self._over

    def cancel(self) -> None:
        """Wait no longer. After the callback: it will not be answered by another look, so the turn is passed on to who
        else waits. Harmless at any time, and again."""
        if not self.end(None):
            with self._waits.lock:
                topic, self.topic = self.topic, None
                if topic is not None and self._is_kept and topic in self._waits.turns:
                    self._waits.turns.remove(topic)
            if topic is not None:
                self._waits.pass_on(topic)

    def park(self, topic: str, filter: Filter | None) -> None:  # noqa: A002
        waiter = self._waits.add_waiter(topic, filter, lambda worth: self._called(topic, worth))
        if waiter is not None:
            self._parked.append(waiter)
            if self._over:  # meanwhile; whoever ended it may not have seen this one
                self._waits.broker.remove_waiter(waiter)

    def _called(self, topic: str, worth: bool) -> None:
        """By whoever dispatches. Not `worth`: the broker closes, and the next look will say so."""
        if self.end(topic if worth else None):
            self.call()
        elif worth:
            self._waits.pass_on(topic)

    def end(self, topic: str | None) -> bool:
        """Let it be over, with the turn of `topic`; False: it was."""
        waits = self._waits
        with waits.lock:
            if self._over:
                return False
            self._over = True
            self.topic = topic
            waits.open.discard(self)
            if topic is not None and self._is_kept:
                waits.turns.append(topic)
        for waiter in list(self._parked):
            waits.broker.remove_waiter(waiter)  # one that has fired calls, and is passed on
        return True


class Waits:
    """All who wait for one group's messages by way of one object of the application's. Thread-safe."""

    def __init__(self, broker: Broker, group: str, *, order: bool = False) -> None:
        self.broker = broker
        self._group = group
        self._order = order
        self.lock = threading.RLock()  # a signal handler may ring while its thread has it
        self.open: set[Wait] = set()
        """Those that are not over."""
        self.turns: deque[str] = deque()
        """Topics whose turn was given to somebody who looks later (`add` with `keep`)."""
        self.rings = 0
        """How often `ring` was called. Read it before you look, and give it to `wait` and `add`."""

    def wait(self, topics: Topics, timeout_s: float, rings: int) -> str | None:
        """Block until there may be something; the topic whose turn it is, which is to be looked at first. None: the
        time is over, or somebody rang."""
        bell = Bell()
        wait = self.add(topics, bell.ring, rings)
        try:
            bell.wait(timeout_s)
            wait.end(None)
            return wait.topic
        except BaseException:  # Ctrl-C, say: let another have the message
            wait.cancel()
            raise

    def add(self, topics: Topics, call: Callable[[], object], rings: int, *, keep: bool = False) -> Wait:
        """Have `call()` called once, when there may be something in one of `topics` or somebody rings: by whoever
        dispatches (so it only wakes somebody, and does nothing with the store), by who rings, or right here. A topic
        that is not there is passed over. `keep`: the turn is found in `turns`.

        StoreBusyError with 100 000 waiting, StoreClosedError, and what a pop raises of group and topics.
        """
        wait = Wait(self, call, keep)
        with self.lock:
            self.open.add(wait)  # first: who rings from here on finds it
            rung = rings != self.rings
        if rung:
            wait.end(None)
            call()
            return wait
        try:
            for topic, filter in topics:  # noqa: A001
                wait.park(topic, filter)
        except BaseException:
            wait.cancel()
            raise
        return wait

    def next_turn(self) -> str | None:
        """The topic that the next look begins with, if somebody was called for one and has not looked yet."""
        if not self.turns:
            return None
        with self.lock:
            return self.turns.popleft() if self.turns else None

    def ring(self) -> None:
        """End every wait: what is waited for has changed."""
        with self.lock:
            self.rings += 1
            rung = list(self.open)
        for wait in rung:
            if wait.end(None):
                wait.call()

    def pass_on(self, topic: str) -> None:
        """Somebody else's turn."""
        self.broker.wake_one(self._group, topic)

    def add_waiter(self, topic: str, filter: Filter | None, callback: Callable[[bool], object]) -> Waiter | None:  # noqa: A002
        if self.broker.topics.get(topic) is None:
            return None
        return self.broker.add_pop_waiter(self._group, topic, callback, filter=filter, order=self._order)
