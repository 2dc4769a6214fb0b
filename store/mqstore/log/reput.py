"""The dispatcher: follows the commitlog and builds consume queues and index from it (format#dispatch).

    position --- records ---> end        everything below `position` has its units; readers see units, never the log

It runs in passes, each over what was appended since the last: read, units by queue, index entries, wake who waits.
The one message that somebody waits for takes the same steps without arrays (`dispatch.few`). Who calls it does not
matter, a background thread or a reader that wants to see its own put: one lock, one order.
A put does not wait for it; only a `put_many` of several chunks dispatches what is left before it returns. If a write
fails, nothing is lost: `position` stays, and the next pass does it again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from mqstore.layout.consumequeue import UNIT_BYTES
from mqstore.layout.dispatch import Output, few
from mqstore.layout.record import Checksum, check_record
from mqstore.layout.scan import find_next, read_run
from mqstore.layout.spares import Spares
from mqstore.log.commitlog import CommitLog
from mqstore.log.consumequeue import ConsumeQueue, QueueTable
from mqstore.log.index import Index
from mqstore.log.names import is_path_safe
from mqstore.log.taskerrors import TaskErrors
from mqstore.log.wakeups import NEVER, Wakeups
from mqstore.signalsafe import Bell, is_held_here

__all__ = ["Dispatcher", "slot_runs"]

_log = logging.getLogger("mqstore")
_BATCH = 1 << 15
"""Records of one pass: those of a chunk of `put_many`. Each pass waits some times for the interpreter, which a thread
that puts has."""
_PACE_S, _PACE_BYTES = 0.01, 4 << 20
"""How long, and for how many bytes, the dispatcher lets puts run before its next pass, while nobody waits: a pass has a
fixed cost, and each switch of threads costs as much as thousands of puts."""
_RETRY_MIN_S, _RETRY_MAX_S = 0.1, 10.0


def slot_runs(end: int, offsets: npt.NDArray[np.int64] | Sequence[int]) -> list[tuple[int, int]]:
    """(start, stop) index ranges of `offsets` that are consecutive slots, none below `end` nor below an earlier one.

    A record whose slot is taken already is a repeat and left out: the first one stands (format#unit-append).
    """
    if isinstance(offsets, np.ndarray):
        count = len(offsets)
        if (
            count
            and offsets[0] >= end
            and offsets[-1] - offsets[0] == count - 1
            and bool((np.diff(offsets) == 1).all())
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
    """Builds units and index entries for everything below `end_of()`."""

    def __init__(
        self,
        log: CommitLog,
        queues: QueueTable,
        index: Index,
        *,
        checksum: Checksum,
        end_of: Callable[[], int],
    ) -> None:
        self.position = 0
        self.dispatched = 0
        """Records that got a unit since opening."""
        self.error: Exception | None = None
        """What stopped the last pass; None once a pass has succeeded again."""
        self.listeners: list[Callable[[str, int, int, int], None]] = []
        """Called with topic, queue id, first new offset and next offset of each queue that has grown, in the
        dispatching thread; must not block."""
        self.last_store_timestamp_ms = 0
        self.attended = False
        """Somebody needs news at once, and hears of it by `listeners`."""
        self._log = log
        self._queues = queues
        self._index = index
        self._checksum = checksum
        self._end_of = end_of
        self._turn = threading.RLock()
        self._lock = threading.RLock()
        self._parked: dict[ConsumeQueue, list[Bell]] = {}
        self._parked_lock = threading.Lock()
        self._closing = False
        self._unsafe: set[str] = set()

    def run_once(self) -> int:
        """Dispatch everything appended before this call, and perhaps more. Return the number of bytes dispatched.

        Called by a signal handler that interrupted a pass, it does nothing. Raises whatever writing units or index
        entries raised.
        """
        if is_held_here(self._turn):
            return 0
        with self._turn:  # `run_again` waits for its turn, so it cannot take the lock before this thread gets it
            return self._run()

    def run_again(self) -> int:
        """Dispatch as `run_once`, but after every thread that is waiting there: for a thread that loops."""
        with self._turn:
            pass
        return self._run()

    def _run(self) -> int:
        end = self._end_of()  # fixed before waiting: beside constant puts a moving end is never reached
        with self._lock:
            begin = self.position
            spares = Spares()
            try:
                while self.position < end:
                    self._pass(self._end_of(), spares)
                self.error = None
            except Exception as error:
                self.error = error
                raise
            return self.position - begin

    def run_thread(self, wakeups: Wakeups, errors: TaskErrors) -> None:
        """Run in the dispatcher thread until the store is closed. A pass that fails is noted, and tried again."""
        bell = wakeups.dispatcher
        retry_s = _RETRY_MIN_S
        while not wakeups.stopping:
            try:
                done = self.run_again()
            except Exception as error:
                errors.note("dispatch", error)
                bell.wait(retry_s)
                retry_s = min(2 * retry_s, _RETRY_MAX_S)
                continue
            errors.clear("dispatch")
            retry_s = _RETRY_MIN_S
            if done and not self.is_awaited:
                mark = self.position + _PACE_BYTES
                wakeups.wake_dispatcher_at(mark)
                if self._end_of() < mark:
                    bell.wait(_PACE_S)
                wakeups.wake_dispatcher_at(NEVER)
                continue
            wakeups.wake_dispatcher_at(0)
            # A put between our pass and that line saw no alarm: look again before sleeping.
            if self.position >= self._end_of():
                bell.wait()
            wakeups.wake_dispatcher_at(NEVER)

    def catch_up(self) -> bool:
        """As `run_once`, for a reader: what hinders dispatch is noted and shows in `stats()`, what is dispatched can
        still be read. Whether all is dispatched."""
        try:
            self.run_once()
        except OSError as error:
            _log.debug("dispatch is behind: %s", error)
        return self.error is None

    def _pass(self, end: int, spares: Spares) -> None:
        """One stretch: the rest of a segment, or `_BATCH` records of it."""
        run = self._log.run
        segment = run.find(self.position)
        if segment is None:
            # The front was dropped under a dispatcher that lay far behind.
            following = [start for start in run.starts if start > self.position]
            self.position = min(end, following[0]) if following else end
            return
        base = segment.start
        buffer = run.mapping(segment)
        stop_at = min(end - base, len(buffer))
        queues = self._queues
        output = few(buffer, self.position - base, stop_at, base, queues.delay_table_ms, queues.batch_topics)
        if output is not None:
            self._write(output, base + stop_at)
            return
        headers, stop, _ = read_run(
            memoryview(buffer)[:stop_at],
            self.position - base,
            stop_at,
            base,
            self._checksum,
            _BATCH,
            checksums=False,
            spares=spares,
        )
        if len(headers):
            self._write(queues.rows_of(buffer, headers, base).output(), base + stop)
            if stop >= stop_at or len(headers) == _BATCH:
                return
        check = check_record(buffer, stop, len(buffer), base + stop, self._checksum)
        if check.status == "blank" or stop >= len(buffer):
            self.position = base + run.segment_bytes
            return
        found = find_next(buffer, stop + 1, stop_at, base, self._checksum)
        self.position = end if found is None and end - base <= len(buffer) else base + (found or run.segment_bytes)
        _log.error("commitlog damaged at %d: %s; dispatch goes on at %d", base + stop, check.detail, self.position)

    def _write(self, output: Output, position: int) -> None:
        """Publish `output`, whose records end at `position`."""
        self._dispatch(output, position)
        self.position = position
        if output.last_store_timestamp_ms is not None:
            # After the position: who reads the two in this order never has a time of records beyond it.
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
                    # Now: who waits is told whatever ends this pass half-way.
                    if not grown or grown[-1][0] is not queue:
                        grown.append((queue, first))
                    queue.publish(first + stop - start)
                    self.dispatched += stop - start
            if len(output.entry_hash):
                with suppress(OSError):  # they wait in memory: `put_pending` says what hinders them
                    self._index.put(
                        output.entry_hash, output.entry_physical_offset, output.entry_store_timestamp_ms, end=position
                    )
        finally:  # a queue that another's full disk came behind is visible all the same
            for queue, begin in grown:
                self._wake(queue)
                for listener in self.listeners:
                    try:
                        listener(queue.topic, queue.queue_id, begin, queue.max_offset)
                    except Exception:  # its trouble, not that of the messages
                        _log.exception("a listener failed on %s/%d", queue.topic, queue.queue_id)

    def put_pending(self) -> None:
        """Put index entries that found no room when their records were dispatched. Raises what hinders them still."""
        if self._index.pending:
            with self._lock:
                self._index.put_pending()

    def _usable(self, topic: str) -> bool:
        if is_path_safe(topic):
            return True
        if topic not in self._unsafe and len(self._unsafe) < 1000:
            self._unsafe.add(topic)
            _log.warning("topic %r cannot be a folder name: its messages are found by physical offset only", topic)
        return False

    # -- waiting ----------------------------------------------------------------------------------------------------

    def _wake(self, queue: ConsumeQueue) -> None:
        if queue in self._parked:
            with self._parked_lock:
                for bell in self._parked.get(queue, ()):
                    bell.ring()
                self._parked.pop(queue, None)

    def wake_all(self) -> None:
        """Let every waiter go, and whoever comes later not wait at all: the store is closing."""
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
        """Park until `queue` grows, or the time is up; whether it has a unit at `offset`. `on_parked` is called once
        this thread is sure to be woken by any later dispatch."""
        bell = Bell()
        try:
            with self._parked_lock:
                if self._closing:
                    return queue.max_offset > offset
                self._parked.setdefault(queue, []).append(bell)
            # Only now: what was dispatched before we were on the list has woken nobody.
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
