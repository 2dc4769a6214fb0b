"""Retention: delete only records that no group or mechanism still needs (delivery#retention-bound).

`docs/retention.md` lists the needed records. The bound is the smallest of them, with `unconsumed="drop"` without those
that only groups need: the engine's undelivered messages are kept under every policy. A body of a retry is within
`Pin.reach` bytes before the first waiting record.

One message delayed by months must not keep all later ones:

    segment    0         1         2         3         4            5
    needed     nothing   delayed   nothing   delayed   unconsumed   kept by the policy
               free      +---- relocated ------------+ firm

Every ten seconds, delayed messages in segments without other needed records are relocated to the log end (`Roller`), to
wait for the same time. The copies may take at most half of the freed bytes, so messages are not moved in circles, and
take at most twice their size in the log, however many wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from mqstore import arrays as np
from mqstore.broker.background.context import Parts, Tables, kept_for_consumers
from mqstore.broker.background.service import BackgroundService, Pin, Roller, oldest_of
from mqstore.layout.consumequeue import UNIT, UNIT_BYTES, VOID
from mqstore.log.reading.reader import StoreReader
from mqstore.logger import log as _log
from mqstore.options import Retention

_INTERVAL_MS = 10_000
_CHUNK_UNITS = 256
_ROLL_STEP = 500
"""Number of messages relocated in one `run_once`: some milliseconds, then other services get their turn."""


def physical_of(store: StoreReader, topic: str, queue_id: int, offset: int) -> int | None:
    """Return the physical offset of the first record at or after `offset` of a queue, or None."""
    count = 1  # usually enough
    while units := store.unit_bytes(topic, queue_id, offset, count):
        for physical, size, code in UNIT.iter_unpack(units):
            if size > 0 and (physical, size, code) != VOID:
                return physical  # type: ignore[no-any-return]
        offset, count = offset + len(units) // UNIT_BYTES, _CHUNK_UNITS
    return None


def all_pins(parts: Tables, mechanisms: Iterable[BackgroundService]) -> Iterator[Pin]:
    """Yield the oldest record that each mechanism needs, and each queue's oldest unconsumed record."""
    for topic, queue_id, first, _, group, why in kept_for_consumers(parts):
        physical = physical_of(parts.store, topic, queue_id, first)
        if physical is not None:
            yield Pin(physical, topic, queue_id, group, why)
    for mechanism in mechanisms:
        yield from mechanism.pins()


def worth_rolling(
    offsets: np.NDArray[np.int64], sizes: np.NDArray[np.int64], before: int, segment_bytes: int
) -> int | None:
    """Return the last segment boundary up to `before` that frees at least twice the copied bytes, or None.

    `offsets` and `sizes` are those of waiting records below `before`, in any order.

    >>> one = np.array([10]), np.array([100])
    >>> worth_rolling(*one, 3000, 1000), worth_rolling(*one, 3000, 199), worth_rolling(*one, 180, 90)
    (3000, 2985, None)
    """
    first = int(offsets.min()) // segment_bytes
    count = before // segment_bytes - first
    if count <= 0:
        return None
    copied = np.bincount(offsets // segment_bytes - first, weights=sizes, minlength=count)[:count]
    freed = np.arange(1, count + 1) * segment_bytes
    worth = np.flatnonzero(2 * np.cumsum(copied) <= freed)
    return (first + int(worth[-1]) + 1) * segment_bytes if len(worth) else None


class RetentionService(BackgroundService):
    """Retention of a broker: the bound of deletion, and relocation.
    A store without a policy gets the default one."""

    def __init__(self, parts: Parts, mechanisms: Sequence[BackgroundService], rollers: Sequence[Roller] = ()) -> None:
        """Set the store's bound."""
        self._parts = parts
        self._mechanisms = mechanisms
        self._rollers = rollers
        self._due_ms = 0
        self._roll_before: int | None = None
        """End offset of the running pass of relocation, or None."""
        self._rolled = 0
        self._logged: Pin | None = None
        parts.store.room.bound = self.bound
        parts.store.default_retention = Retention()

    def oldest_pin(self) -> Pin | None:
        """Return the pin that keeps the oldest segment under the current policy."""
        return oldest_of(self._pins(self._parts.config.retention or Retention()))

    def _pins(self, policy: Retention) -> Iterator[Pin]:
        if policy.unconsumed == "keep":
            yield from all_pins(self._parts, self._mechanisms)
            return
        for mechanism in self._mechanisms:
            yield from mechanism.pins()

    def bound(self, policy: Retention) -> int:
        """Return the smallest physical offset that is still needed, by the state on disk.
        A commit in memory may depend on a copy (a retry, a dead letter) that a power cut would remove. Then only the
        original would be left."""
        end = self._parts.store.max_offset
        pin = self._parts.router.references.oldest(lambda: self._pins(policy))
        # After the pins were read, so that the changes that moved them are on disk before a segment is deleted.
        self._parts.store.flush()
        self._parts.offsets.save()
        if pin is None:
            return end
        if self._logged is None or pin[1:] != self._logged[1:]:
            _log.info("the log is kept from %d on for %s/%d %s: %s", pin.kept_from, *pin[1:5])
        self._logged = pin
        return pin.kept_from

    def run_once(self, now_ms: int) -> int | None:
        """Search for records to relocate every ten seconds, and relocate some. The store deletes segments itself.
        Raises the errors of a put, and the next run tries again."""
        if now_ms >= self._due_ms or now_ms < self._due_ms - _INTERVAL_MS:
            self._due_ms = now_ms + _INTERVAL_MS
            if self._roll_before is None:
                self._roll_before = self._dead_before(self._parts.config.retention or Retention())
        return now_ms if self._roll_some(now_ms) else self._due_ms

    def _dead_before(self, policy: Retention) -> int | None:
        """Return the offset before which all needed records are worth relocating, or None."""
        parts = self._parts
        expired = parts.store.expired(policy)
        if not self._rollers or expired <= parts.store.min_offset:
            return None
        firm, movable = expired, expired
        for pin in self._pins(policy):
            if pin.rolls:
                movable = min(movable, pin.physical_offset)
            else:
                firm = min(firm, pin.kept_from)
        segment_bytes = parts.store.manifest.commitlog_segment_bytes
        before = firm // segment_bytes * segment_bytes
        if movable >= before:
            return None
        found = [each for roller in self._rollers for each in roller.waiting_below(before) if len(each[0])]
        if not found:
            return None
        offsets, sizes = map(np.concatenate, zip(*found, strict=True))
        # A waiting message whose record is gone still pins the log. It counts as the first existing record.
        return worth_rolling(np.maximum(offsets, parts.store.min_offset), sizes, before, segment_bytes)

    def _roll_some(self, now_ms: int) -> bool:
        """Relocate some messages. Return True if there may be more."""
        before = self._roll_before
        if before is None:
            return False
        done = 0
        for roller in self._rollers:
            if done < _ROLL_STEP:
                done += roller.roll(before, _ROLL_STEP - done, now_ms)
        self._rolled += done
        if done:
            return True
        if self._rolled:
            _log.info(
                "%s: %d waiting messages were relocated to the end of the log, so that segments before %d can be "
                "deleted",
                self._parts.store.path,
                self._rolled,
                before,
            )
        self._roll_before, self._rolled = None, 0
        return False

    def close(self) -> None:
        self._parts.store.room.bound = lambda policy: 0  # the flusher still runs, and must not delete needed segments
