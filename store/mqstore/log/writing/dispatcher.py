"""Dispatcher: follows the commitlog and builds consume queues and index from it (format#dispatch).

    position --- records ---> end        everything below `position` has its units; readers see units, never the log

It runs in passes over newly appended records: read them, write units by queue, write index entries, wake waiting
readers. A single message takes the same steps without arrays (`dispatch.few`). Batches without properties need not be
read: the log has noted their places (`CommitLog.noted`). A background thread may call it, or a
reader that wants to see its own put, under one lock and in one order. If a write fails, nothing is lost: `position`
does not move, and the next pass repeats the work.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import suppress
from struct import Struct

from mqstore import arrays as np
from mqstore.errors import StoreFullError
from mqstore.layout.arrays.dispatch import FEW_RECORDS, FEW_WITHOUT_NUMPY, Output, few
from mqstore.layout.arrays.scan import find_next, read_run
from mqstore.layout.consumequeue import UNIT_BYTES, unit_dtype
from mqstore.log.commitlog import CommitLog
from mqstore.log.derived.consumequeue import ConsumeQueue
from mqstore.log.directory.names import is_path_safe
from mqstore.log.directory.store_files import StoreParts
from mqstore.log.recovery.scanning.scanner import check_at
from mqstore.log.stats import TaskErrors
from mqstore.log.writing.log_tail import QueueTail
from mqstore.log.writing.wakeups import NEVER, Wakeups
from mqstore.logger import log as _log
from mqstore.signalsafe import Bell, Lock
from mqstore.threads import breathe

_BATCH = 1 << 15
"""Maximum number of records of one pass, as many as a chunk of `put_many` has.
Each pass waits several times for the interpreter, while a putting thread holds it."""
_NOTED_MIN = 16
_PACE_S, _PACE_BYTES = 0.01, 4 << 20
"""Time and bytes that puts may use before the next pass, if no reader waits.
A pass has a fixed cost, and each switch of threads costs as much as thousands of puts."""
_HEAD, _END = Struct(">qqq"), Struct(">q")
"""First and last numbers of a noted batch."""
_RETRY_MIN_S, _RETRY_MAX_S = 0.1, 10.0


def slot_runs(end: int, offsets: np.NDArray[np.int64] | list[int] | range) -> list[tuple[int, int]]:
    """Return the index ranges (start, stop) of `offsets` that are consecutive, free slots from `end` on.

    A record whose slot is already used is a repeat and is left out. The first one counts (format#unit-append).
    """
    if isinstance(offsets, range):
        skipped = max(0, end - offsets.start)
        return [(skipped, len(offsets))] if skipped < len(offsets) else []
    if not isinstance(offsets, list):  # an array
        count = len(offsets)
        if (
            count
            and offsets[0] >= end
            and offsets[-1] - offsets[0] == count - 1
            and (count == 1 or bool((np.diff(offsets) == 1).all()))
        ):
            return [(0, count)]
        offsets = offsets.tolist()
    runs: list[tuple[int, int]] = []
    for i, offset in enumerate(offsets):
        if offset < end:
            continue
        if runs and runs[-1][1] == i and offset == end:
            runs[-1] = (runs[-1][0], i + 1)
        else:
            runs.append((i, i + 1))
        end = offset + 1
    return runs


class Dispatcher:
    """Builds units and index entries of all records below `end_of()`."""

    def __init__(self, parts: StoreParts, log: CommitLog, end_of: Callable[[], int]) -> None:
        self.position = 0
        self.dispatched = 0
        """Number of records that got a unit since opening."""
        self.error: Exception | None = None
        """Error that stopped the last pass, or None if it succeeded."""
        self.listeners: list[Callable[[str, int, int, int], None]] = []
        """Called with topic, queue id, first new offset and next offset of each queue that has grown.
        They run in the dispatching thread, and must not block."""
        self.last_store_timestamp_ms = 0
        self.attended = False
        """True if somebody needs notice of new messages at once, and gets it through `listeners`."""
        self._log = log
        self._queues, self._index, self._checksum = parts.queue_table, parts.index, parts.checksum
        self.visible_end = end_of
        """Function that returns the physical offset below which records may be dispatched."""
        self._turn = Lock()
        self.lock = Lock()
        """Held during a pass."""
        self._parked: dict[ConsumeQueue, list[Bell]] = {}
        self._parked_lock = Lock()
        self._closing = False
        self._unsafe: set[str] = set()

    def run_once(self) -> int:
        """Dispatch all records appended before this call, and perhaps more. Return the number of bytes.

        Does nothing in a signal handler that interrupted a pass. Raises errors of writing units or index entries.
        """
        if self._turn.is_held_here:
            return 0
        with self._turn:  # `run_again` waits for it, so it cannot take the lock before this thread
            return self._run()

    def run_again(self) -> int:
        """Dispatch as `run_once` does, but after all threads that wait there. For a looping thread, so that it cannot
        starve them."""
        with self._turn:
            pass
        return self._run()

    def _run(self) -> int:
        end = self.visible_end()  # read before waiting: under constant puts, a moving end is never reached
        with self.lock:
            begin = self.position
            try:
                while self.position < end:
                    self._pass(self.visible_end())
                    breathe()
                self.error = None
            except Exception as error:
                self.error = error
                if isinstance(error, StoreFullError):
                    self._log.set_free_until(0)  # so the next put asks for room, and is refused
                raise
            return self.position - begin

    def catch_up(self) -> bool:
        """Dispatch as `run_once` does, for a reader. Return True if everything is dispatched.
        An error is saved for `stats()`. Dispatched messages can still be read."""
        try:
            self.run_once()
        except OSError as error:
            _log.debug("dispatch failed and will be tried again: %s", error)
        return self.error is None

    def _pass(self, end: int) -> None:
        """Dispatch the rest of a segment, at most `_BATCH` records, or batches that the log has noted."""
        if "numpy" in sys.modules and (noted := self._noted(end)) is not None:
            self._write(*noted)
            return
        run = self._log.run
        segment = run.find(self.position)
        if segment is None:
            # Retention removed the front while the dispatcher was slow.
            following = [start for start in run.starts if start > self.position]
            self.position = min(end, following[0]) if following else end
            return
        base = segment.start
        buffer = run.mapping(segment)
        stop_at = min(end - base, len(buffer))
        if end >= segment.end:  # the data may have ended early, with a hole after it
            stop_at = run.data_end(segment, self.position - base)
        queues = self._queues
        limit = FEW_RECORDS if "numpy" in sys.modules else FEW_WITHOUT_NUMPY
        output = few(buffer, self.position - base, stop_at, base, queues.delay_table_ms, queues.batch_topics, limit)
        if output is not None:
            self._write(output, base + stop_at)
            return
        headers, stop, _ = read_run(
            memoryview(buffer)[:stop_at], self.position - base, stop_at, base, self._checksum, _BATCH, checksums=False
        )
        if len(headers):
            self._write(queues.rows_of(buffer, headers, base).output(), base + stop)
            if stop >= stop_at or len(headers) == _BATCH:
                return
        check = check_at(run, segment, stop, self._checksum)
        if check.status == "blank" or stop >= len(buffer):
            self.position = base + run.segment_bytes
            return
        found = find_next(buffer, stop + 1, stop_at, base, self._checksum)
        self.position = end if found is None and end - base <= len(buffer) else base + (found or run.segment_bytes)
        _log.error("commitlog damaged at %d: %s; dispatch continues at %d", base + stop, check.detail, self.position)

    def _noted(self, end: int) -> tuple[Output, int] | None:
        """Return the units of the noted batches that follow each other from `position` on, and their end. Fewer records
        are read as fast, and give None."""
        noted, at, count = self._log.noted, self.position, 0
        batches: list[tuple[QueueTail, int, int]] = []
        starts: list[bytes] = []
        stamp = None
        while noted and count < _BATCH:
            queue, data, index = noted[0]
            offset, stored_ms, start = _HEAD.unpack_from(data, index)
            [stop] = _END.unpack_from(data, len(data) - _END.size)
            if start > at or stop > end:
                break
            noted.popleft()
            if start == at:  # else it was read
                starts.append(data[index + 16 : -8])
                batches.append((queue, offset, len(starts[-1]) // 8))
                at, count, stamp = stop, count + batches[-1][2], stored_ms
        if count < _NOTED_MIN:
            return None
        bounds = np.frombuffer(b"".join((*starts, _END.pack(at))), ">i8")
        rows = np.zeros(count, unit_dtype())
        rows["physical_offset"], rows["size"] = bounds[:-1], bounds[1:] - bounds[:-1]
        units, begin = rows.tobytes(), 0
        chains: dict[QueueTail, tuple[int, list[bytes]]] = {}
        for queue, offset, number in batches:
            chains.setdefault(queue, (offset, []))[1].append(units[begin : (begin := begin + number * UNIT_BYTES)])
        queues = []
        for queue, (first, parts) in chains.items():
            own = b"".join(parts)
            queues.append((*queue.ref, range(first, first + len(own) // UNIT_BYTES), own))
        return Output(queues, (), (), (), stamp), at

    def _write(self, output: Output, position: int) -> None:
        """Publish `output`, whose records end at `position`."""
        self._dispatch(output, position)
        self.position = position
        if output.last_store_timestamp_ms is not None:
            # After the position: code that reads both in this order never gets the time of a later record.
            self.last_store_timestamp_ms = output.last_store_timestamp_ms

    def _dispatch(self, output: Output, position: int) -> None:
        grown: list[tuple[ConsumeQueue, int]] = []
        try:
            for topic, queue_id, offsets, units in output.queues:
                queue = self._queues.get(topic, queue_id)
                if queue is None:
                    if queue_id < 0 or not self._usable(topic):
                        continue
                    queue = self._queues.create(topic, queue_id)
                for start, stop in slot_runs(queue.max_offset, offsets):
                    first = int(offsets[start])
                    queue.write(first, units[start * UNIT_BYTES : stop * UNIT_BYTES])
                    # Added before publishing, so that waiting readers are woken even if an error ends this pass.
                    if not grown or grown[-1][0] is not queue:
                        grown.append((queue, first))
                    queue.publish(first + stop - start)
                    self.dispatched += stop - start
            if len(output.entry_hash):
                with suppress(OSError):  # the entries wait in memory, and `put_pending` raises the error
                    self._index.put(
                        output.entry_hash, output.entry_physical_offset, output.entry_store_timestamp_ms, end=position
                    )
        finally:  # queues that were written before an error are visible
            for queue, begin in grown:
                self._wake(queue)
                for listener in self.listeners:
                    try:
                        listener(queue.topic, queue.queue_id, begin, queue.max_offset)
                    except Exception:  # must not affect the messages
                        _log.exception("a listener failed on %s/%d", queue.topic, queue.queue_id)

    def put_pending(self) -> None:
        """Put index entries that had no disk space at dispatch. Raises the error if there is still none."""
        if self._index.pending:
            with self.lock:
                self._index.put_pending()

    def _usable(self, topic: str) -> bool:
        if is_path_safe(topic):
            return True
        if topic not in self._unsafe and len(self._unsafe) < 1000:
            self._unsafe.add(topic)
            _log.warning("topic %r cannot be a folder name. Its messages are found by physical offset only", topic)
        return False

    def _wake(self, queue: ConsumeQueue) -> None:
        if queue in self._parked:
            with self._parked_lock:
                for bell in self._parked.get(queue, ()):
                    bell.ring()
                self._parked.pop(queue, None)

    def wake_all(self) -> None:
        """Wake all waiting threads, and refuse to make later ones wait, since the store is closing."""
        with self._parked_lock:
            self._closing = True
            for bells in self._parked.values():
                for bell in bells:
                    bell.ring()

    @property
    def is_awaited(self) -> bool:
        """Return True if somebody waits for the next message."""
        return self.attended or bool(self._parked)

    def wait(self, queue: ConsumeQueue, offset: int, timeout_s: float, on_parked: Callable[[], None]) -> bool:
        """Wait until `queue` grows, or the time is up. Return True if it has a unit at `offset`.
        `on_parked` is called when any later dispatch is sure to wake this thread."""
        bell = Bell()
        try:
            with self._parked_lock:
                if self._closing:
                    return queue.max_offset > offset
                self._parked.setdefault(queue, []).append(bell)
            # Checked after adding the bell, since a dispatch before that did not wake this thread.
            if queue.max_offset > offset:
                return True
            on_parked()
            bell.wait(timeout_s)
            return queue.max_offset > offset
        finally:
            with self._parked_lock:
                others = [each for each in self._parked.get(queue, ()) if each is not bell]
                if others:
                    self._parked[queue] = others
                else:
                    self._parked.pop(queue, None)


class DispatchThread:
    """Work of the dispatcher thread (`mqstore.threads`). A failed pass is recorded and retried."""

    def __init__(self, dispatcher: Dispatcher, wakeups: Wakeups, errors: TaskErrors) -> None:
        self._dispatcher = dispatcher
        self._wakeups = wakeups
        self._errors = errors
        self._retry_s = _RETRY_MIN_S

    def step(self) -> float | None:
        """Make a pass. Return how long puts may run before the next one, or None once the store is closed."""
        dispatcher, wakeups = self._dispatcher, self._wakeups
        wakeups.wake_dispatcher_at(NEVER)
        if wakeups.stopping:
            return None
        try:
            done = dispatcher.run_again()
        except Exception as error:
            self._errors.note("dispatch", error)
            retry_s, self._retry_s = self._retry_s, min(2 * self._retry_s, _RETRY_MAX_S)
            return retry_s
        self._errors.clear("dispatch")
        self._retry_s = _RETRY_MIN_S
        if done and not dispatcher.is_awaited:
            mark = dispatcher.position + _PACE_BYTES
            wakeups.wake_dispatcher_at(mark)
            return _PACE_S if dispatcher.visible_end() < mark else 0.0
        wakeups.wake_dispatcher_at(0)
        # A put between the pass and that line raised no alarm, so check again before sleeping.
        return math.inf if dispatcher.position >= dispatcher.visible_end() else 0.0
