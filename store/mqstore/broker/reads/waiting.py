# ruff: noqa: A002  (`filter` is the word of the engine contract, clients#contract)
"""Waiting for messages until a queue grows (delivery#waiting, delivery#x6).

    (topic, queue id | -1) -> bucket(group, filter) -> waiters, oldest first        -1: any queue of the topic

    register --> check again -> parked --+-- a unit >= its offset may pass its filter ----> fired, True
                     |                   +-- 5 s after units that the filter refused -----> fired, True (read on)
                     |                   +-- deadline, or the engine closes --------------> fired, False
                     +-- a message is there: fired, True
                                         +-- `remove_waiter` -----------------------------> removed, never fired

In this order nothing is missed: the second check sees units that became visible before it, and later units find the
waiter in its bucket. A waiter is fired exactly once. Buckets have two kinds of waiters:

    group None      readers with their own offset, or none: each reader is woken for which a unit may be of interest
    group "G"       receivers that compete (pop): as many are woken as there are units, the longest parked first

A thread parks on a bare lock that the dispatching thread releases. The dispatching thread also runs callbacks, which
saves a thread switch at each wake-up. It may be any reader, but never holds this module's lock. So a callback may only
wake another thread. In the main thread a signal handler may raise, so the housekeeper runs its callbacks (`run_once`).

A parked waiter costs a few hundred bytes, but no thread and no polling. Deadlines are in a heap. An entry whose waiter
is no longer due at that time is ignored.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from mqstore import arrays as np
from mqstore.broker.background.service import BackgroundService, Wake
from mqstore.errors import ConfigError, StoreBusyError, StoreClosedError
from mqstore.log.reading.tagfilter import UnitFilter
from mqstore.logger import log as _log
from mqstore.signalsafe import Bell, Lock

if TYPE_CHECKING:
    from mqstore.broker.background.context import Parts

ANY_QUEUE = -1
"""Queue id that means any queue of the topic."""
Callback = Callable[[bool], object]
"""Function to call when the wait is over. True means that a read is worth it."""

_PASSED_OVER_MS = 5_000
"""Number of ms after which a reader is woken to skip units that its filter refused (delivery#waiting)."""
_LOOK_UNITS = 8_192
"""Maximum number of units matched for one wake-up: as many as the dispatcher makes visible at once.
A reader with more unread units is woken without a match."""
_MAX_PARKED = 100_000
_SWEEP = 1_024
"""Number of stale heap entries that are worth a sweep."""


@dataclass(slots=True, eq=False, repr=False)
class Waiter:
    """Parked reader or receiver, or a former one. Opaque, for `add_waiter` and `remove_waiter`."""

    next: int | None
    """First queue offset that has not been matched yet. None: any new message."""
    deadline_ms: int | None
    callback: Callback | None = None
    bell: Bell | None = None
    places: tuple[_Bucket, ...] = ()
    """Buckets that contain it, none if it is not parked."""
    due_ms: int | None = None
    """Time of its valid entry in the heap."""
    outcome: bool | None = None
    """Result of the wait, None until fired."""


class Wanted(NamedTuple):
    """Messages for which somebody waits."""

    topic: str
    queue_id: int
    """A queue, which need not exist yet, or `ANY_QUEUE`."""
    offset: int | None = None
    """First offset wanted in one queue, or None for any new message. With None, messages before the wait are missed,
    unless `seen` was taken before a search for messages, or the caller searches again."""
    filter: UnitFilter | None = None
    group: str | None = None
    """Receivers of a group compete: a new unit wakes one receiver. A woken receiver that does not receive must pass the
    wake-up on with `wake_one`. Receivers have no offset."""
    also: Sequence[str] = ()
    """Further topics of which any queue counts, such as those of the group's retries."""
    seen: int | None = None
    """Result of `Waiters.seen` for these topics."""

    def check(self) -> None:
        if self.queue_id < ANY_QUEUE:
            rule = f"a queue, or {ANY_QUEUE} for any queue of the topic"
            raise ConfigError(f"queue_id must be {rule}, got {self.queue_id}")
        if self.offset is not None and (self.queue_id == ANY_QUEUE or self.group is not None):
            raise ConfigError("an offset needs one queue, and cannot be combined with a group")


@dataclass(slots=True, eq=False, repr=False)
class _Bucket:
    """Waiters of one group with one filter on one queue, oldest first."""

    key: tuple[str, int]
    """Topic and queue id."""
    group: str | None
    filter: UnitFilter | None
    waiters: OrderedDict[Waiter, None] = field(default_factory=OrderedDict)
    """An OrderedDict takes from one end and removes anywhere at constant cost."""
    due_ms: int | None = None
    """Time at which a group's first waiter is woken to skip refused units."""


class Waiters(BackgroundService):
    """All waiters on the queues of one store. Listens to `store.on_growth`.
    The class is long because one lock guards all its tables: buckets, deadlines and fired waiters."""

    def __init__(self, parts: Parts, wake: Wake) -> None:
        self._store = parts.store
        self._clock = parts.clock
        # A thread that waits by the system clock needs no wake-up at its deadline, but by a test's clock it does.
        self._threads_time_themselves = parts.config.clock is None
        self._wake = wake
        self._lock = Lock()
        self._buckets: dict[tuple[str, int], dict[tuple[str | None, int], _Bucket]] = {}
        """Buckets by (topic, queue id), and then by (group, id of the filter). The bucket keeps the filter alive."""
        self.parked: set[Waiter] = set()
        """All waiters. Callers must not change it."""
        self._news: dict[str, int] = {}
        """Number of changes by topic, for `seen`. Growth and wake-ups without a waiter increase it."""
        self._group_news = 0
        """Number of changes of groups. It counts for every topic, because a group about to wait is not known yet."""
        self._heap: list[tuple[int, int, Waiter | _Bucket]] = []
        self._stale = 0
        self._serial = count()
        self._armed_ms: int | None = None
        """Time of the next run that the housekeeper knows."""
        self._ready: deque[Waiter] = deque()
        """Fired waiters whose callbacks must run."""
        self._ring = False
        self._closed = False
        self._store.on_growth.append(self._grown)
        self._store.on_lost.append(wake)

    # -- waiting ----------------------------------------------------------------------------------------------------

    def seen(self, topic: str, also: Sequence[str] = ()) -> int:
        """Return the number of changes of these topics, for `wait` or `add_waiter` with the same topics.
        Call it before a search for messages. Then the waiter is also woken by changes during the search."""
        with self._lock:
            return self._news_of((topic, *also))

    def wait(self, wanted: Wanted, timeout_s: float) -> bool:
        """Block until a read is worth it. Return False after the timeout.
        Returns True when a unit at or after the offset may pass the filter, or at most 5 s after units that may not.
        The errors are those of `add_waiter`. Closing the engine ends every wait with False."""
        wanted.check()
        if timeout_s == 0:
            if wanted.offset is not None:
                return self._look(wanted, wanted.offset)[0]
            return wanted.seen is not None and self.seen(wanted.topic, wanted.also) != wanted.seen
        deadline_ms = None if math.isinf(timeout_s) else self._clock.monotonic_ms() + math.ceil(timeout_s * 1000)
        bell = Bell()
        waiter = Waiter(wanted.offset, deadline_ms, bell=bell)
        own_time = self._threads_time_themselves
        try:
            self._park(waiter, wanted, None if own_time else deadline_ms)
            bell.wait(timeout_s if own_time else None)
            if waiter.outcome is None and self.remove_waiter(waiter):
                return False
            return bool(waiter.outcome)  # fired, perhaps at the very end of its time
        except BaseException:  # for example Ctrl-C: another receiver must get the message of this waiter
            if not self.remove_waiter(waiter) and waiter.outcome and wanted.group is not None:
                self.wake_one(wanted.group, wanted.topic, wanted.queue_id)
            raise

    def add_waiter(self, wanted: Wanted, callback: Callback, deadline_ms: int | None = None) -> Waiter:
        """Call `callback(worth_reading)` once, when a thread in `wait` would be woken.

        The dispatching thread calls it during the dispatch. So it may only wake other threads, and must not block, put
        or read. At `deadline_ms` of `clock.monotonic_ms()` it is called with False. An error of the callback is logged.
        Raises StoreBusyError with 100 000 parked, StoreClosedError, and ConfigError for members of `wanted` that
        contradict each other."""
        wanted.check()
        waiter = Waiter(wanted.offset, deadline_ms, callback)
        self._park(waiter, wanted, deadline_ms)
        return waiter

    def remove_waiter(self, waiter: Waiter) -> bool:
        """Remove `waiter`, so that its callback is not called. Return False if it has fired already."""
        with self._lock:
            if not waiter.places:
                return False
            self._take_out(waiter)
            return True

    def wake_one(self, group: str, topic: str, queue_id: int) -> bool:
        """Wake the longest parked receiver of `group` on the queue, or else on any queue of the topic.
        There may be a message for it without growth, such as a released one, or the next one in order. Returns True if
        there was a receiver. If not, a caller that has taken `seen` and is about to park is woken."""
        with self._lock:
            buckets = self._buckets_of(topic, queue_id)
            bucket = next((bucket for bucket in buckets if bucket.group == group), None)
            if bucket is None:
                self._news[topic] = self._news.get(topic, 0) + 1
                return False
            self._release(bucket, 1)
        self._after_change()
        return True

    def wake_all(self, topic: str) -> None:
        """Wake all waiters on `topic`, after its offsets were reset or while it is deleted."""
        with self._lock:
            self._news[topic] = self._news.get(topic, 0) + 1
            for bucket in [each for key, found in self._buckets.items() if key[0] == topic for each in found.values()]:
                self._release(bucket, len(bucket.waiters))
        self._after_change()

    def wake_group(self, group: str) -> None:
        """Wake all waiting receivers of `group`, after it was altered or while it is deleted."""
        with self._lock:
            self._group_news += 1
            for bucket in self._all_buckets():
                if bucket.group == group:
                    self._release(bucket, len(bucket.waiters))
        self._after_change()

    # -- as a mechanism ---------------------------------------------------------------------------------------------

    def run_once(self, now_ms: int) -> int | None:
        """Fire due waiters and run the callbacks of fired ones. Return the time of the next run."""
        if self._store.closed:  # for example because its directory was deleted: end all waits
            self.close()
            return None
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
        """End every wait. Later callers get StoreClosedError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for waiter in list(self.parked):
                self._fire(waiter, False)
            self._heap.clear()
            self._stale = 0
        self._hand_over()

    def _hand_over(self) -> None:
        """Run the callbacks of fired waiters. Call without the lock."""
        while self._ready:
            try:
                waiter = self._ready.popleft()
            except IndexError:  # another thread runs callbacks, too
                return
            _call(waiter)

    def _after_change(self) -> None:
        """Run callbacks, or wake the housekeeper if it must do something. Call without the lock."""
        if self._ready:
            if self._threads_time_themselves and threading.current_thread() is threading.main_thread():
                self._ring = True  # a signal handler may raise here, but not in the housekeeper
            else:
                self._hand_over()
        if self._ring:  # any thread may reset it, since its reason was recorded before it was set
            self._ring = False
            self._wake()

    # -- growth -----------------------------------------------------------------------------------------------------

    def _grown(self, topic: str, queue_id: int, begin: int, end: int) -> None:
        """Serve waiters when units from `begin` to `end` have become visible (`store.on_growth`).
        The dispatching thread calls this under the dispatcher's lock, so it must not make the store dispatch."""
        key = (topic, queue_id)
        with self._lock:
            self._news[topic] = self._news.get(topic, 0) + 1
            for bucket in self._buckets_of(topic, queue_id) if self.parked else ():
                if bucket.group is None:
                    self._serve_each(bucket, key, begin, end)
                else:
                    self._serve_group(bucket, key, begin, end)
        self._after_change()

    def _serve_group(self, bucket: _Bucket, key: tuple[str, int], begin: int, end: int) -> None:
        found, _ = self._hits(bucket.filter, key, begin, end)
        if found:
            self._release(bucket, found)
        elif bucket.due_ms is None and begin < end:
            self._schedule(bucket, self._clock.monotonic_ms() + _PASSED_OVER_MS)

    def _serve_each(self, bucket: _Bucket, key: tuple[str, int], begin: int, end: int) -> None:
        # Most waiters have read up to the old queue end. A waiter that is just parking may have an earlier offset.
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
        """Return (number, last offset) of the units [begin, end) that may pass. After an error all may pass."""
        everything = (end - begin, end - 1)
        if filter is None or end - begin > _LOOK_UNITS:
            return everything
        try:
            units = self._store.units(*key, begin, end - begin)
            if len(units) != end - begin:  # retention removed some
                return everything
            found = np.flatnonzero(filter.prefilter(units["tags_code"].astype(np.int64)))
        except Exception:  # the reader will get the error itself
            _log.exception("units %d..%d of %s/%d could not be matched", begin, end, *key)
            return everything
        return (len(found), begin + int(found[-1])) if len(found) else (0, -1)

    # -- parking ----------------------------------------------------------------------------------------------------

    def _park(self, waiter: Waiter, wanted: Wanted, due_ms: int | None) -> None:
        with self._lock:
            if self._closed:
                self._store.check_closed()
                raise StoreClosedError(f"{self._store.path} is closing; open it again")
            if len(self.parked) >= _MAX_PARKED:
                raise StoreBusyError(f"too many waiting receivers ({len(self.parked)})")
            keys = [(wanted.topic, wanted.queue_id), *((each, ANY_QUEUE) for each in wanted.also)]
            waiter.places = tuple(self._bucket(wanted.group, key, wanted.filter) for key in dict.fromkeys(keys))
            for bucket in waiter.places:
                bucket.waiters[waiter] = None
            self.parked.add(waiter)
            if len(self.parked) == 1:
                self._store._attend(True)
            if due_ms is not None:
                self._schedule(waiter, due_ms)
        self._after_change()
        self._look_again(waiter, wanted)

    def _look(self, wanted: Wanted, offset: int) -> tuple[bool, int]:
        """Return (True if a read at `offset` is worth it, the offset up to which units were matched)."""
        key = wanted.topic, wanted.queue_id
        bounds = self._store.offsets_or_none(*key)
        if bounds is None or bounds[1] <= offset:
            return False, offset
        return self._hits(wanted.filter, key, offset, bounds[1])[0] > 0, bounds[1]

    def _look_again(self, waiter: Waiter, wanted: Wanted) -> None:
        """Check again, because units that became visible before the waiter was in its bucket have woken nobody."""
        offset = wanted.offset
        if offset is not None:
            there, end = self._look(wanted, offset)
            if not there and end == offset:
                return
        elif wanted.seen is None:
            return
        with self._lock:
            if not waiter.places:
                return
            if offset is None:
                if self._news_of((wanted.topic, *wanted.also)) != wanted.seen:
                    self._fire(waiter, True)
            elif there:
                self._fire(waiter, True)
            else:
                self._pass_over(waiter, end)
        self._after_change()

    # -- under the lock ---------------------------------------------------------------------------------------------

    def _news_of(self, topics: Iterable[str]) -> int:
        return self._group_news + sum(self._news.get(topic, 0) for topic in topics)

    def _all_buckets(self) -> list[_Bucket]:
        """Return all buckets. It is a list here and below, because a wake-up changes the table."""
        return [bucket for buckets in self._buckets.values() for bucket in buckets.values()]

    def _buckets_of(self, topic: str, queue_id: int) -> list[_Bucket]:
        """Return the buckets of a queue, then those of any queue of its topic."""
        keys = dict.fromkeys(((topic, queue_id), (topic, ANY_QUEUE)))
        return [bucket for key in keys for bucket in self._buckets.get(key, {}).values()]

    def _bucket(self, group: str | None, key: tuple[str, int], filter: UnitFilter | None) -> _Bucket:
        buckets, name = self._buckets.setdefault(key, {}), (group, id(filter))
        if name not in buckets:
            buckets[name] = _Bucket(key, group, filter)
        return buckets[name]

    def _release(self, bucket: _Bucket, number: int) -> None:
        """Wake the first `number` waiters of a bucket. They also skip refused units."""
        if bucket.due_ms is not None:
            bucket.due_ms = None
            self._stale += 1
        while number > 0 and bucket.waiters:
            waiter = next(iter(bucket.waiters))
            number -= waiter.outcome is None  # else it was fired before, and a signal handler interrupted its removal
            self._fire(waiter, True)

    def _fire(self, waiter: Waiter, outcome: bool) -> None:
        # Fired first, then removed, so that after an exception of a signal handler in between it is fired again.
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
        self.parked.discard(waiter)
        if not self.parked:
            self._store._attend(False)
        if self._stale > _SWEEP and 2 * self._stale > len(self._heap):
            self._heap[:] = [entry for entry in self._heap if entry[2].due_ms == entry[0]]
            heapq.heapify(self._heap)
            self._stale = 0

    def _drop(self, bucket: _Bucket) -> None:
        buckets = self._buckets.get(bucket.key, {})
        buckets.pop((bucket.group, id(bucket.filter)), None)
        if not buckets:
            self._buckets.pop(bucket.key, None)
        if bucket.due_ms is not None:
            bucket.due_ms = None
            self._stale += 1

    def _pass_over(self, waiter: Waiter, end: int) -> None:
        """Record that the waiter's filter has refused all units below `end`."""
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
        return  # it was fired twice
    try:
        callback(bool(waiter.outcome))
    except Exception:  # the other callbacks must still be called
        _log.exception("a waiter's callback failed")
