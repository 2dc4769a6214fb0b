# ruff: noqa: A002  (`filter` is the word of the engine contract, clients#contract)
"""Waiting for messages: who found nothing parks here until a queue grows (delivery#waiting, delivery#x6).

    (topic, queue id | -1) -> bucket(group, filter) -> waiters, oldest first        -1: any queue of the topic

    register --> look again --> parked --+-- a unit >= its offset may pass its filter ----> fired, True
                     |                   +-- units were passed over, 5 s have gone by ----> fired, True (read on)
                     |                   +-- deadline, or the engine closes --------------> fired, False
                     +-- there already: fired, True
                                         +-- `remove_waiter` -----------------------------> gone, never fired

In that order nothing is missed: what became visible before the second look is seen by it, what comes later finds the
waiter in its bucket. Fired exactly once. Two sorts share a bucket's form:

    group None      readers with an offset of their own (or none): each one is woken that a unit concerns
    group "G"       receivers that compete (pop): as many are woken as there are units, the longest parked first

A thread parks on a bare lock that the dispatching thread releases. A callback is run by whoever dispatches, perhaps by
a reader in the middle of anything, though never under our lock. So it only wakes another thread: that saves a change
of threads at each wake-up. A signal handler may raise in the main thread: what that would run, the housekeeper runs
(`run_once`). A parked waiter costs a few hundred bytes: no thread, no turn of any loop. Deadlines lie in a heap, whose
entries count only while their waiter is still due at that very time.

Knows units and filters; nothing of messages, nor of what a group has consumed.
"""

from __future__ import annotations

import heapq
import logging
import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from mqstore.errors import ConfigError, StoreBusyError, StoreClosedError
from mqstore.log.tagfilter import UnitFilter
from mqstore.options import Duration, seconds
from mqstore.signalsafe import Bell

if TYPE_CHECKING:
    from mqstore.broker.parts import Parts, Pin, Wake

__all__ = ["ANY_QUEUE", "Callback", "Waiter", "Waiters"]

_log = logging.getLogger("mqstore")

ANY_QUEUE = -1
"""As queue id: whichever queue of the topic grows."""
Callback = Callable[[bool], object]
"""What to do once the wait is over; True: it is worth reading."""

_PASSED_OVER_MS = 5_000
"""How long units that a filter refused may lie before the reader is sent to step over them (delivery#waiting)."""
_LOOK_UNITS = 8_192
"""Units matched for one wake-up at most: as many as the dispatcher makes visible at once. Whoever has more before him
need not wait: he has reading to do."""
_MAX_PARKED = 100_000
_SWEEP = 1_024
"""Stale heap entries that are worth a sweep."""


class Waiter:
    """Somebody parked, or no longer. Opaque: `add_waiter` gives it, `remove_waiter` takes it."""

    __slots__ = ("bell", "callback", "deadline_ms", "due_ms", "next", "outcome", "places")

    def __init__(self, offset: int | None, deadline_ms: int | None, callback: Callback | None) -> None:
        self.next = offset
        """First queue offset that has not been matched yet; None: whatever comes from now on."""
        self.deadline_ms = deadline_ms
        self.callback = callback
        self.bell: Bell | None = None
        self.places: tuple[_Bucket, ...] = ()
        """The buckets it is in; none: it is not parked."""
        self.due_ms: int | None = None
        """When the heap's entry for it counts."""
        self.outcome: bool | None = None
        """None until fired."""


class _Bucket:
    """Waiters of one group with one filter on one queue, oldest first."""

    # OrderedDict: both an end to take from and a place to remove, at a cost that does not grow.
    __slots__ = ("due_ms", "filter", "group", "key", "name", "waiters")

    def __init__(
        self, key: tuple[str, int], name: tuple[str | None, int], group: str | None, filter: UnitFilter | None
    ) -> None:
        self.key = key
        self.name = name
        self.group = group
        self.filter = filter
        self.waiters: OrderedDict[Waiter, None] = OrderedDict()
        self.due_ms: int | None = None
        """Of a group: when its first waiter is sent to step over what the filter refused."""


class Waiters:
    """All who wait on the queues of one store. Listens to `store.on_growth` from its construction to `close`.

    Long because one lock guards all of it: who is parked where, when each is due, and who is chosen to wake.
    """

    def __init__(self, parts: Parts, wake: Wake) -> None:
        self._store = parts.store
        self._clock = parts.clock
        # A thread that waits by the machine's clock times itself. By a clock that a test moves it must be told.
        self._threads_time_themselves = parts.config.clock is None
        self._wake = wake
        self._lock = threading.Lock()
        self._topics: dict[str, dict[int, dict[tuple[str | None, int], _Bucket]]] = {}
        self._parked: set[Waiter] = set()
        self._news: dict[str, int] = {}
        """What `seen` shows: moves with each growth of a topic, and with each wake-up that found nobody."""
        self._group_news = 0
        """The same of groups, of which one that is about to wait has left no name yet: it counts for every topic."""
        self._heap: list[tuple[int, int, Waiter | _Bucket]] = []
        self._stale = 0
        self._serial = count()
        self._armed_ms: int | None = None
        """When the housekeeper knows that it has to come."""
        self._ready: deque[Waiter] = deque()
        """Fired, with callbacks to run."""
        self._ring = False
        self._closed = False
        self._store.on_growth.append(self._grown)

    @property
    def parked(self) -> int:
        """How many wait now."""
        return len(self._parked)

    # -- waiting ----------------------------------------------------------------------------------------------------

    def seen(self, topic: str, also: Sequence[str] = ()) -> int:
        """A mark of the news there were of these topics. Take it before looking for messages, and give it to `wait` or
        `add_waiter` with the same topics: what came in between then counts as seen by the waiter."""
        with self._lock:
            return self._news_of((topic, *also))

    def wait(
        self,
        topic: str,
        queue_id: int,
        offset: int | None,
        timeout: Duration,
        filter: UnitFilter | None = None,
        *,
        group: str | None = None,
        also: Sequence[str] = (),
        seen: int | None = None,
    ) -> bool:
        """Block this thread until it is worth reading on at `offset`; False: `timeout` seconds have passed.

        True as soon as a unit at or behind `offset` may pass `filter`, or at most 5 s after units came that may not.
        The other arguments, and the errors, are those of `add_waiter`. Closing the engine ends every wait with False.
        """
        timeout_s = seconds(timeout, "timeout")
        self._check(group, queue_id, offset)
        if timeout_s == 0:
            if offset is not None:
                return self._look(topic, queue_id, offset, filter)[0]
            return seen is not None and self.seen(topic, also) != seen
        deadline_ms = None if math.isinf(timeout_s) else self._clock.monotonic_ms() + math.ceil(timeout_s * 1000)
        waiter = Waiter(offset, deadline_ms, None)
        waiter.bell = bell = Bell()
        own_time = self._threads_time_themselves
        try:
            self._park(waiter, group, topic, queue_id, filter, also, due_ms=None if own_time else deadline_ms)
            self._look_again(waiter, topic, queue_id, offset, filter, also, seen)
            bell.wait(timeout_s if own_time else None)
            if waiter.outcome is None and self.remove_waiter(waiter):
                return False
            return bool(waiter.outcome)  # fired, be it at the very end of its time
        except BaseException:  # Ctrl-C, say: the message that this one was chosen for is still there
            if not self.remove_waiter(waiter) and waiter.outcome and group is not None:
                self.wake_one(group, topic, queue_id)
            raise

    def add_waiter(
        self,
        topic: str,
        queue_id: int,
        offset: int | None,
        filter: UnitFilter | None,
        callback: Callback,
        deadline_ms: int | None = None,
        *,
        group: str | None = None,
        also: Sequence[str] = (),
        seen: int | None = None,
    ) -> Waiter:
        """Have `callback(worth_reading)` called once, when a thread in `wait` would be woken.

        It is called by whoever dispatches, in the middle of that. So it wakes other threads and does no more: it must
        neither block nor put or read anything.

        queue_id     a queue, which need not exist yet, or `ANY_QUEUE`
        offset       of the first message wanted, in one queue; None: whatever comes. Then what comes before this call
                     is missed, unless `seen` was taken before the caller looked, or the caller looks once more
        deadline_ms  `clock.monotonic_ms()` at which to call it with False; None: never
        group        receivers of a group compete: a new unit wakes one of them. Who is woken and then does not receive
                     has to pass it on with `wake_one`. They have no offset
        also         further topics of which any queue counts, such as those of the group's retries

        An error of the callback is logged. Raises StoreBusyError with 100 000 parked, StoreClosedError, ConfigError for
        arguments that do not go together.
        """
        self._check(group, queue_id, offset)
        waiter = Waiter(offset, deadline_ms, callback)
        self._park(waiter, group, topic, queue_id, filter, also, due_ms=deadline_ms)
        self._look_again(waiter, topic, queue_id, offset, filter, also, seen)
        return waiter

    def remove_waiter(self, waiter: Waiter) -> bool:
        """Let `waiter` go; its callback will not be called. False: it has fired, and the call has come or will."""
        with self._lock:
            if not waiter.places:
                return False
            self._take_out(waiter)
            return True

    def wake_one(self, group: str, topic: str, queue_id: int) -> bool:
        """Wake the longest parked receiver of `group` on the queue, else on any queue of the topic: there may be
        something for it that is no growth, such as what another one left over, or an order that goes on.

        Whether there was one; if not, whoever has taken `seen` and is about to park is told.
        """
        with self._lock:
            buckets = self._buckets_of(topic, dict.fromkeys((queue_id, ANY_QUEUE)))
            bucket = next((bucket for bucket in buckets if bucket.group == group), None)
            if bucket is None:
                self._news[topic] = self._news.get(topic, 0) + 1
                return False
            self._release(bucket, 1)
        self._tell()
        return True

    def wake_all(self, topic: str) -> None:
        """Wake whoever waits on `topic`: its offsets were reset, or it is being deleted."""
        with self._lock:
            self._news[topic] = self._news.get(topic, 0) + 1
            for bucket in self._buckets_of(topic):
                self._release(bucket, len(bucket.waiters))
        self._tell()

    def wake_group(self, group: str) -> None:
        """Wake whoever waits to receive for `group`: it was altered, or is being deleted."""
        with self._lock:
            self._group_news += 1
            for topic in list(self._topics):
                for bucket in self._buckets_of(topic):
                    if bucket.group == group:
                        self._release(bucket, len(bucket.waiters))
        self._tell()

    # -- as a mechanism ---------------------------------------------------------------------------------------------

    def run_once(self, now_ms: int) -> int | None:
        """Fire whose time has come and run the callbacks of those who were fired; when to come again."""
        now = self._clock.monotonic_ms()
        heap = self._heap
        with self._lock:
            while heap and (heap[0][0] <= now or heap[0][2].due_ms != heap[0][0]):
                due_ms, _, target = heapq.heappop(heap)
                if target.due_ms != due_ms:
                    self._stale -= 1
                    continue
                target.due_ms = None
                if isinstance(target, _Bucket):
                    self._release(target, 1)
                else:
                    self._fire(target, target.deadline_ms is None or now < target.deadline_ms)
            self._armed_ms = heap[0][0] if heap else None
            next_ms = None if self._armed_ms is None else now_ms + self._armed_ms - now
        self._hand_over()
        return next_ms

    def close(self) -> None:
        """End every wait; whoever comes later gets StoreClosedError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for topic in list(self._topics):
                for bucket in self._buckets_of(topic):
                    for waiter in list(bucket.waiters):
                        self._fire(waiter, False)
            self._heap.clear()
            self._stale = 0
        self._store.on_growth.remove(self._grown)
        self._hand_over()

    def pins(self) -> Iterable[Pin]:
        """Nothing: who waits holds no record."""
        return ()

    def _hand_over(self) -> None:
        """Without our lock: run the callbacks of those who were fired."""
        while self._ready:
            try:
                waiter = self._ready.popleft()
            except IndexError:  # another thread hands over, too
                return
            _call(waiter)

    def _tell(self) -> None:
        """Without our lock: rouse the housekeeper if there is something for it."""
        if self._ready:
            if self._threads_time_themselves and threading.current_thread() is threading.main_thread():
                self._ring = True  # a signal handler may raise in here: for the housekeeper, which it cannot hit
            else:
                self._hand_over()
        if self._ring:  # whoever sees it takes it: what it stands for happened before it was set
            self._ring = False
            self._wake()

    # -- growth -----------------------------------------------------------------------------------------------------

    def _grown(self, topic: str, queue_id: int, begin: int, end: int) -> None:
        """`store.on_growth`: units from `begin` to `end` have become visible. In the dispatching thread, under the
        dispatcher's lock: nothing here may make the store look for news."""
        key = (topic, queue_id)
        with self._lock:
            self._news[topic] = self._news.get(topic, 0) + 1
            if topic in self._topics:
                for bucket in self._buckets_of(topic, (queue_id, ANY_QUEUE)):
                    if bucket.group is None:
                        self._serve_each(bucket, key, begin, end)
                    else:
                        self._serve_group(bucket, key, begin, end)
        self._tell()

    def _serve_group(self, bucket: _Bucket, key: tuple[str, int], begin: int, end: int) -> None:
        found, _ = self._hits(bucket.filter, key, begin, end)
        if found:
            self._release(bucket, found)
        elif bucket.due_ms is None and begin < end:
            self._schedule(bucket, self._clock.monotonic_ms() + _PASSED_OVER_MS)

    def _serve_each(self, bucket: _Bucket, key: tuple[str, int], begin: int, end: int) -> None:
        # Most have looked as far as the queue reached until now; who is just parking may have begun farther back.
        concerned = [
            (first, waiter)
            for waiter in bucket.waiters
            if (first := begin if waiter.next is None else waiter.next) < end
        ]
        if not concerned:
            return
        _, last = self._hits(bucket.filter, key, min(concerned, key=lambda pair: pair[0])[0], end)
        for first, waiter in concerned:
            if first <= last:
                self._fire(waiter, True)
            else:
                self._pass_over(waiter, end)

    def _hits(self, filter: UnitFilter | None, key: tuple[str, int], begin: int, end: int) -> tuple[int, int]:
        """(how many, the last) of the units [begin, end) that may pass. In doubt all do: a read finds out."""
        everything = (end - begin, end - 1)
        if filter is None or end - begin > _LOOK_UNITS:
            return everything
        try:
            units = self._store.units(*key, begin, end - begin)
            if len(units) != end - begin:  # retention was there
                return everything
            found = np.flatnonzero(filter.units(units["tags_code"].astype(np.int64)))
        except Exception:  # the reader will meet it, and can be told
            _log.exception("units %d..%d of %s/%d could not be matched", begin, end, *key)
            return everything
        return (len(found), begin + int(found[-1])) if len(found) else (0, -1)

    # -- parking ----------------------------------------------------------------------------------------------------

    @staticmethod
    def _check(group: str | None, queue_id: int, offset: int | None) -> None:
        if queue_id < ANY_QUEUE:
            raise ConfigError(f"queue id {queue_id}: a queue's number, or {ANY_QUEUE} for any queue of the topic")
        if offset is not None and (queue_id == ANY_QUEUE or group is not None):
            raise ConfigError("an offset belongs to one queue, and to a reader who does not share it with a group")

    def _park(
        self,
        waiter: Waiter,
        group: str | None,
        topic: str,
        queue_id: int,
        filter: UnitFilter | None,
        also: Sequence[str],
        due_ms: int | None,
    ) -> None:
        with self._lock:
            if self._closed:
                raise StoreClosedError(f"{self._store.path} is closed; open it again")
            if len(self._parked) >= _MAX_PARKED:
                raise StoreBusyError(f"{len(self._parked)} waiters are parked already; receive with fewer at a time")
            keys = [(topic, queue_id), *((each, ANY_QUEUE) for each in also)]
            waiter.places = tuple(self._bucket(group, key, filter) for key in dict.fromkeys(keys))
            for bucket in waiter.places:
                bucket.waiters[waiter] = None
            self._parked.add(waiter)
            if len(self._parked) == 1:
                self._store.attend(True)
            if due_ms is not None:
                self._schedule(waiter, due_ms)
        self._tell()

    def _look(self, topic: str, queue_id: int, offset: int, filter: UnitFilter | None) -> tuple[bool, int]:
        """(whether a read at `offset` is worth it, how far that was looked at)."""
        bounds = self._store.offsets_or_none(topic, queue_id)
        if bounds is None or bounds[1] <= offset:
            return False, offset
        return self._hits(filter, (topic, queue_id), offset, bounds[1])[0] > 0, bounds[1]

    def _look_again(
        self,
        waiter: Waiter,
        topic: str,
        queue_id: int,
        offset: int | None,
        filter: UnitFilter | None,
        also: Sequence[str],
        seen: int | None,
    ) -> None:
        """What became visible before the waiter was in its bucket has woken nobody."""
        if offset is not None:
            there, end = self._look(topic, queue_id, offset, filter)
            if not there and end == offset:
                return
        elif seen is None:
            return
        with self._lock:
            if not waiter.places:
                return
            if offset is None:
                if self._news_of((topic, *also)) != seen:
                    self._fire(waiter, True)
            elif there:
                self._fire(waiter, True)
            else:
                self._pass_over(waiter, end)
        self._tell()

    # -- under the lock ---------------------------------------------------------------------------------------------

    def _news_of(self, topics: Iterable[str]) -> int:
        return self._group_news + sum(self._news.get(topic, 0) for topic in topics)

    def _buckets_of(self, topic: str, queue_ids: Iterable[int] | None = None) -> list[_Bucket]:
        """Of these queues, in that order; None: of all. A list, for who wakes changes what it came from."""
        queues = self._topics.get(topic, {})
        return [
            bucket
            for queue_id in (list(queues) if queue_ids is None else queue_ids)
            for bucket in queues.get(queue_id, {}).values()
        ]

    def _bucket(self, group: str | None, key: tuple[str, int], filter: UnitFilter | None) -> _Bucket:
        buckets = self._topics.setdefault(key[0], {}).setdefault(key[1], {})
        name = (group, id(filter))  # nobody else gets that id while the bucket holds the filter
        bucket = buckets.get(name)
        if bucket is None:
            bucket = buckets[name] = _Bucket(key, name, group, filter)
        return bucket

    def _release(self, bucket: _Bucket, number: int) -> None:
        """Wake the first `number` waiters of a bucket: what was passed over they will step over."""
        if bucket.due_ms is not None:
            bucket.due_ms = None
            self._stale += 1
        while number > 0 and bucket.waiters:
            waiter = next(iter(bucket.waiters))
            number -= waiter.outcome is None  # else a signal handler has interrupted the end of its wait
            self._fire(waiter, True)

    def _fire(self, waiter: Waiter, outcome: bool) -> None:
        # Told first, then taken out: if a signal handler raises in between, it is in its bucket and is told again.
        waiter.outcome = outcome
        if waiter.bell is not None:
            waiter.bell.ring()
        else:
            self._ready.append(waiter)
        self._take_out(waiter)

    def _take_out(self, waiter: Waiter) -> None:
        for bucket in waiter.places:
            bucket.waiters.pop(waiter, None)
            if not bucket.waiters:
                self._drop(bucket)
        waiter.places = ()
        if waiter.due_ms is not None:
            waiter.due_ms = None
            self._stale += 1
        self._parked.discard(waiter)
        if not self._parked:
            self._store.attend(False)
        if self._stale > _SWEEP and 2 * self._stale > len(self._heap):
            self._heap[:] = [entry for entry in self._heap if entry[2].due_ms == entry[0]]
            heapq.heapify(self._heap)
            self._stale = 0

    def _drop(self, bucket: _Bucket) -> None:
        topic, queue_id = bucket.key
        queues = self._topics.get(topic, {})
        buckets = queues.get(queue_id, {})
        buckets.pop(bucket.name, None)
        if not buckets:
            queues.pop(queue_id, None)
        if not queues:
            self._topics.pop(topic, None)
        if bucket.due_ms is not None:
            bucket.due_ms = None
            self._stale += 1

    def _pass_over(self, waiter: Waiter, end: int) -> None:
        """The waiter's filter has refused everything below `end`."""
        sent_ms = self._clock.monotonic_ms() + _PASSED_OVER_MS
        if waiter.next is not None:
            waiter.next = max(waiter.next, end)
        known = waiter.due_ms if waiter.due_ms is not None else waiter.deadline_ms
        if known is None or sent_ms < known:
            self._schedule(waiter, sent_ms)

    def _schedule(self, target: Waiter | _Bucket, due_ms: int) -> None:
        if target.due_ms is not None:
            self._stale += 1
        target.due_ms = due_ms
        heapq.heappush(self._heap, (due_ms, next(self._serial), target))
        if self._armed_ms is None or due_ms < self._armed_ms:
            self._armed_ms = due_ms
            self._ring = True


def _call(waiter: Waiter) -> None:
    callback, waiter.callback = waiter.callback, None
    if callback is None:
        return  # it was told twice
    try:
        callback(bool(waiter.outcome))
    except Exception:  # its owner's trouble, not that of the others
        _log.exception("a waiter's callback failed")
