"""Waiting for messages to read or to pop, in one topic or several at once (delivery#waiting).

For pops:

    look, nothing there --> add: parked at every topic --+-- a topic calls --------> over; the turn is that topic's
                                                         +-- `ring` ---------------> over, and no turn
                                                         +-- `cancel`, timeout ----> over, silently

The broker calls one receiver for each message. So a turn must be used by a pop of that topic, or passed on. Otherwise a
message waits while other receivers that could have it sleep. A wait uses the first turn that it gets. It passes on the
calls of other topics at once, and `cancel` passes on an unused turn. Nothing is missed between the look and the
parking. The broker looks once more when it parks a waiter. A ring increments `rings`, which a receiver has read before
it looked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from mqstore.contract import BrokerContract, Filter, Waiter
from mqstore.logger import log as _log
from mqstore.signalsafe import Bell, Lock

Topics = Iterable[tuple[str, Filter | None]]


class Ready:
    """Wait for messages at several offsets, until there may be something to do."""

    __slots__ = ("_call", "_lock", "_open", "_parked", "over")

    def __init__(self, call: Callable[[], object], lock: Lock, waiting: set[Any]) -> None:
        """`waiting` is the set of waits that are not over. `lock` guards it."""
        self._call = call
        self._lock = lock
        self._open = waiting
        self._parked: list[Callable[[], object]] = []
        """Functions that remove the parked waiters."""
        self.over = False
        """True if the callback was called, is about to be, or never will be."""

    def cancel(self) -> None:
        """Stop waiting. The callback will not be called any more. Repeating it is harmless."""
        self.end()

    def fire(self, topic: str | None = None) -> bool:
        """End the wait as `end` does, and call back."""
        if not self.end(topic):
            return False
        try:
            self._call()
        except Exception:  # the thread that brings the news must not fail
            _log.exception("the callback of a consumer that waited failed")
        return True

    def end(self, topic: str | None = None) -> bool:
        """End the wait, one for messages to pop with the turn of `topic`. Return False if it was over."""
        with self._lock:
            if self.over:
                return False
            self.over = True
            self._open.discard(self)
            self._take_turn(topic)
        for remove in list(self._parked):
            remove()  # a waiter that has fired calls back, and its turn is passed on
        return True

    def _take_turn(self, topic: str | None) -> None:
        """Keep a turn, under the lock."""

    def park(
        self,
        broker: BrokerContract,
        topic: str,
        queue_id: int,
        offset: int,
        filter: Filter | str | None = None,  # noqa: A002
        timeout_s: float | None = None,
    ) -> None:
        call = broker.add_waiter(topic, queue_id, offset, lambda worth: self.fire(), filter=filter, timeout=timeout_s)
        self._add(broker, call)

    def _add(self, broker: BrokerContract, waiter: Waiter) -> None:
        self._parked.append(partial(broker.remove_waiter, waiter))
        if self.over:  # ended meanwhile, perhaps without this waiter
            broker.remove_waiter(waiter)


class Wait(Ready):
    """Wait for messages to pop."""

    __slots__ = ("_is_kept", "_waits", "topic")

    def __init__(self, waits: Waits, call: Callable[[], object], is_kept: bool) -> None:
        super().__init__(call, waits.lock, waits.open)
        self._waits = waits
        self._is_kept = is_kept
        self.topic: str | None = None
        """Topic whose turn this wait got and did not pass on."""

    def cancel(self) -> None:
        """Stop waiting, and pass on the turn if the callback was already called. Always harmless.
        A turn must be passed on because no look will use it."""
        if not self.end():
            with self._lock:
                topic, self.topic = self.topic, None
                if topic is not None and self._is_kept and topic in self._waits.turns:
                    self._waits.turns.remove(topic)
            if topic is not None:
                self._waits.pass_on(topic)

    def park_at(self, topic: str, filter: Filter | None) -> None:  # noqa: A002
        waits = self._waits
        if waits.broker.topics.get(topic) is not None:
            called = partial(self._called, topic)
            self._add(
                waits.broker, waits.broker.add_pop_waiter(waits.group, topic, called, filter=filter, order=waits.order)
            )

    def _called(self, topic: str, worth: bool) -> None:
        """Use or pass on a turn, on the dispatching thread. Without `worth` the broker is closing.
        The next look will raise that."""
        if not self.fire(topic if worth else None) and worth:
            self._waits.pass_on(topic)

    def _take_turn(self, topic: str | None) -> None:
        self.topic = topic
        if topic is not None and self._is_kept:
            self._waits.turns.append(topic)


class Waits:
    """All waits for one group's messages by one object of the application. Thread-safe."""

    def __init__(self, broker: BrokerContract, group: str, *, order: bool = False) -> None:
        self.broker = broker
        self.group = group
        self.order = order
        self.lock = Lock()
        self.open: set[Wait] = set()
        """Waits that are not over."""
        self.turns: deque[str] = deque()
        """Topics whose turn belongs to a receiver that looks later (`add` with `keep`)."""
        self.generation = 0
        """Number of calls of `ring`. Read it before you look, and pass it to `wait` and `add`."""

    def wait(self, topics: Topics, timeout_s: float, generation: int) -> str | None:
        """Block until there may be messages. Return the topic whose turn it is, to be looked at first.
        Return None if the time is over or after a ring."""
        bell = Bell()
        wait = self.add(topics, bell.ring, generation)
        try:
            bell.wait(timeout_s)
            wait.end()
            return wait.topic
        except BaseException:  # Ctrl-C or similar: another receiver may have the message
            wait.cancel()
            raise

    def add(self, topics: Topics, call: Callable[[], object], generation: int, *, keep: bool = False) -> Wait:
        """Call `call()` once, when there may be messages in one of `topics`, or after a ring.
        For callers that wait without a thread, such as an event loop. They look first, then call this, and look again
        when called: messages that come in between cause a call, too. It is called by the dispatching thread, by `ring`,
        or right here. So it must only pass the news on (`loop.call_soon_threadsafe`), and not use the store. A
        caller that does not look then calls `cancel` of the result, since the broker calls one receiver a message.

        An unknown topic is skipped. With `keep` the turn is stored in `turns`. Raises StoreBusyError with 100 000
        waiting, StoreClosedError, and the errors of a pop about group and topics.
        """
        wait = Wait(self, call, keep)
        with self.lock:
            self.open.add(wait)  # first, so that a later ring finds it
            rung = generation != self.generation
        if rung:
            wait.end()
            call()
            return wait
        try:
            for topic, filter in topics:  # noqa: A001
                wait.park_at(topic, filter)
        except BaseException:
            wait.cancel()
            raise
        return wait

    def next_turn(self) -> str | None:
        """Return the topic that the next look begins with, if a kept turn has not been used yet."""
        if not self.turns:
            return None
        with self.lock:
            return self.turns.popleft() if self.turns else None

    def ring(self) -> None:
        """End every wait, so that the receivers look again."""
        with self.lock:
            self.generation += 1
            rung = list(self.open)
        for wait in rung:
            wait.fire()

    def pass_on(self, topic: str) -> None:
        """Give a turn to another receiver."""
        self.broker.wake_one(self.group, topic)
