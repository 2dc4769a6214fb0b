"""Assignment of queue offsets ("slots") to records. Recovery, verify and export share this class.

    a queue offset that                              the record gets
    follows the previous record's offset             that slot
    jumps over no more than lost records explain     that slot, with a gap before it
    its unit and its neighbors contradict            their slot (profile `rocketmq`: no checksum covers the offset)
    nothing supports                                 no slot

Records are taken in log order. Records of an earlier generation of their topic are left out (`TopicGenerations`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from mqstore import arrays as np
from mqstore.files.segment import place_in_file
from mqstore.layout.arrays.dispatch import Rows
from mqstore.layout.consumequeue import UNIT, VOID, is_void
from mqstore.layout.record import MIN_RECORD_BYTES
from mqstore.log.derived.consumequeue import ConsumeQueue
from mqstore.log.directory.names import is_path_safe
from mqstore.log.directory.store_files import StoreParts
from mqstore.log.recovery.report import Finding, Kind
from mqstore.log.recovery.scanning.scanner import record_at

MAX_SLOT = (1 << 63) // 64
"""Maximum number of units of a queue. Their byte offset is an i64, and they have 20 bytes each."""

LOST_SEGMENTS = 1024
"""A unit that points more segments than this beyond the end of the log is damaged, and shows no lost segment."""
_TRIED = 64
"""Maximum number of units to examine when searching for one that points to its record. Some may be damaged."""
_NONE = 0, -1
Leads = Callable[[ConsumeQueue, int, int], bool]
"""Function that returns True if the record at a physical offset (third argument) has the given slot."""
FirstSlot = Callable[[ConsumeQueue, int], tuple[int | None, int]]
"""Function with the result of `first_slot_in_range`, given a queue and the smallest queue offset seen."""


class Placed(NamedTuple):
    """Consecutive records of a queue, with their slots."""

    queue: ConsumeQueue
    first: int
    """Slot of the first record."""
    expected: int
    """Slot after the record before these, or `first` if it is unknown. Slots between the two are a gap."""
    units: np.NDArray[np.void]
    is_first: bool
    """True if no record of the queue came before."""
    seen: int
    """Physical end of the record before these, or 0 if unknown."""


class Behind(NamedTuple):
    """Slots after the last record of a queue.
    Records of [first, inside) are lost within the log. Records of [inside, stop) were beyond its end, at `places`."""

    first: int
    inside: int
    stop: int
    places: np.NDArray[np.int64]
    seen: int
    """End of the queue's last record."""


class Misnumbered(NamedTuple):
    """A record whose queue offset is wrong. It gets another slot, or none (`slot` None)."""

    queue: ConsumeQueue
    physical_offset: int
    size: int
    said: int
    slot: int | None

    def finding(self, segment_bytes: int) -> Finding:
        """Return the finding about this record."""
        rest = "" if self.slot is None else f"; according to its unit and neighbours it is {self.slot}"
        name = f"{self.queue.topic}/{self.queue.queue_id}"
        detail = f"queueOffset {self.said} of {name} does not follow its neighbours{rest}"
        kind: Kind = "bad_record" if self.slot is None else "queue_offset"
        return Finding(kind, *place_in_file(self.physical_offset, segment_bytes), self.size, detail)


class OffsetAssigner:
    """Assigns slots to the records of a log. `first_slot` is called for a queue's first record."""

    def __init__(self, parts: StoreParts, first_slot: FirstSlot) -> None:
        self.generations = TopicGenerations(parts)
        self._run, self._queues, self._checksum = parts.log_files, parts.queue_table, parts.checksum
        self._first_slot = first_slot
        self._last: dict[ConsumeQueue, tuple[int, int]] = {}
        """By queue: the slot after the last assigned one, and the end of that slot's record."""

    def place(
        self, rows: Rows, wanted: Callable[[str, int], bool] | None = None, *, skip_listed: bool = False
    ) -> Iterator[Placed | Misnumbered | Finding]:
        """Yield the slots of the records in `rows`, and a Finding for a topic that cannot be a folder name.

        The records before these must have been placed. `wanted` chooses queues by topic and queue id. None means all.
        With `skip_listed`, records that follow the queue's last ones, and have their units, are left out. The caller
        must handle each result before it asks for the next one, since that may read units of the queue.
        """
        queues = rows.queues()
        for name, start, stop, low, high, begin, end, straight in queues.edges():
            if wanted is not None and not wanted(*name):
                continue
            if name[1] < 0 or not is_path_safe(name[0]):
                file, at = place_in_file(begin, self._run.segment_bytes)
                what = f"topic {name[0]!r}, queue {name[1]} cannot be a folder name"
                yield Finding("unsafe_name", file, at, 0, what)
                continue
            queue = self._queues.create(*name)
            known = self._last.get(queue)
            is_current = self.generations.begin(queue, low, begin)[1] < 0
            said, units = queues.slots[start:stop], queues.units[start:stop]
            follows = straight and is_current and known is not None and low == known[0]
            if skip_listed and follows and queue.kept(low, stop - start) == units.tobytes():
                self._last[queue] = high + 1, end
                continue
            if not is_current:
                kept = self.generations.current(queue, said, units["physical_offset"])
                if kept is not None:
                    said, units, straight = said[kept], units[kept], False
                    if not len(said):
                        continue
            is_first = known is None
            expected: int | None
            expected, seen = known or self._first_slot(
                queue, low if straight else least_plausible(said, units["physical_offset"])
            )
            if straight and low == expected and self._checksum == "crc32c-record":
                yield Placed(queue, low, low, units, is_first, seen)
                self._last[queue] = high + 1, end
                continue
            physical, sizes = units["physical_offset"].astype(np.int64), units["size"].astype(np.int32)
            # In the other profile the checksum covers the offset, so units cannot contradict it.
            doubted = self._checksum == "crc32-body"
            leads = self.generations.leads_to_record
            slots, runs, odd = sort_out(expected, seen, said, physical, sizes, queue, leads, doubted=doubted)
            for i in odd:
                yield Misnumbered(queue, int(physical[i]), int(sizes[i]), int(said[i]), None)
            for i in np.flatnonzero(slots != said).tolist():
                yield Misnumbered(queue, int(physical[i]), int(sizes[i]), int(said[i]), int(slots[i]))
            for low, high in runs:
                first = slots.item(low)
                yield Placed(queue, first, first if expected is None else expected, units[low:high], is_first, seen)
                is_first = False
                expected = first + high - low
                seen = sum(units.item(high - 1)[:2])
                # Records without a slot do not count. Their offset is lost, so the next record's offset jumps by one.
                self._last[queue] = expected, seen

    def is_met(self, queue: ConsumeQueue) -> bool:
        return queue in self._last

    def follows(self, queue: ConsumeQueue, first: int, physical: int) -> bool:
        """Return True if the queue continues with queue offset `first`, whose record is at `physical`."""
        if self.generations.begin(queue, first, physical)[1] >= 0:
            return False  # this record, or later ones, may be of an earlier generation
        known = self._last.get(queue)
        expected = known[0] if known else self._first_slot(queue, first)[0]
        return first == expected if expected is not None else 0 <= first < MAX_SLOT

    def advance(self, queue: ConsumeQueue, stop: int, end: int) -> None:
        """Accept a run of records up to slot `stop`, whose last record ends at physical offset `end`.
        The run must have passed `follows`."""
        self._last[queue] = stop, end

    def forget(self) -> None:
        self._last.clear()

    def behind(self, queue: ConsumeQueue, start: int, end: int) -> Behind:
        """Return the slots after a queue's last record. Reading began at `start`, and the log ends at `end`."""
        first, seen = self._last.get(queue) or first_slot_in_range(queue, start, None)
        first = queue.max_offset if first is None else first
        if first >= queue.max_offset:
            return Behind(first, first, first, np.empty(0, np.int64), seen)
        inside = self._behind_lost(queue, first, seen, end)
        far = max(end, self._run.end) + LOST_SEGMENTS * self._run.segment_bytes
        stop = self._behind_lost(queue, inside, max(seen, end), far)
        found = [units["physical_offset"][~is_void(units)] for _, units in queue.chunks(inside, stop)]
        places = np.concatenate(found).astype(np.int64) if found else np.empty(0, np.int64)
        return Behind(first, inside, stop if len(places) else inside, places, seen)

    def lost_tail(
        self, queues: Iterable[ConsumeQueue], start: int, end: int, mark: int, what: str = ""
    ) -> Finding | None:
        """Return the finding about records that existed beyond the end of the log, or None without evidence.
        Evidence are units of `queues` that point there, or a sync of the log up to `mark`. `what` describes the bytes
        there now."""
        tails = [places for queue in queues if len(places := self.behind(queue, start, end).places)]
        if end >= mark and not tails:
            return None
        reasons = [f"the log once reached {mark} and was synced{what}"] if end < mark else []
        if tails:
            last = max(int(places[-1]) for places in tails)
            count = sum(map(len, tails))
            reasons.append(f"{count} units of {len(tails)} queues point to records after it, the last one at {last}")
            mark = max(mark, last)
        return Finding("lost_tail", *place_in_file(end, self._run.segment_bytes), mark - end, "; ".join(reasons))

    def _behind_lost(self, queue: ConsumeQueue, first: int, seen: int, end: int) -> int:
        """Return the slot after the last one from `first` on that a lost record may have had.

        No queue offset may be used twice, so the units of lost records count. Such records were contiguous between
        `seen`, the end of the record before `first`, and `end`, the end of the log. A unit that points elsewhere,
        points to an existing record, or lacks room for its record is not of this queue. If it counted, the next record
        would get a wrong queue offset.
        """
        for at, units in queue.chunks(first, queue.max_offset):
            least = seen + np.arange(at - first, at - first + len(units)) * MIN_RECORD_BYTES
            void = is_void(units)
            place = np.where(void, least, units["physical_offset"])
            believed = (place >= least) & (place <= end - MIN_RECORD_BYTES) & (units["size"] > 0)
            for i in range(len(units)):
                if not believed[i] or not (void[i] or record_at(self._run, int(place[i]), self._checksum) is None):
                    return at + i
        return max(first, queue.max_offset)


def unit_findings(
    queue: ConsumeQueue, kind: Kind, first: int, wrong: np.NDArray[np.bool_], detail: str
) -> Iterator[Finding]:
    """Yield a finding for each run of contiguous `wrong` units in one file. They begin at slot `first`."""
    slots = np.flatnonzero(wrong) + first
    if not len(slots):
        return
    breaks = np.flatnonzero((np.diff(slots) > 1) | (np.diff(slots // queue.units_per_file) > 0)) + 1
    for group in np.split(slots, breaks):
        units = f"unit {group[0]}" if len(group) == 1 else f"units {group[0]}..{group[-1]}"
        yield queue.finding(kind, int(group[0]), int(group[-1]), f"{units}: {detail}")


def least_plausible(offsets: np.NDArray[np.int64], physical: np.NDArray[np.int64]) -> int:
    """Return the smallest plausible queueOffset of one queue's records at `physical`, which ascends.
    An offset is plausible if it is not too far from the median for the bytes between the first record and the last."""
    middle = int(np.median(offsets))
    room = int(physical[-1] - physical[0]) // MIN_RECORD_BYTES + 1
    return int(offsets[np.abs(offsets - middle) <= room].min(initial=middle))


def first_slot_in_range(queue: ConsumeQueue, start: int, least: int | None) -> tuple[int | None, int]:
    """Return the first slot of the range being read, and the end of the record before that slot.

    It is the first slot whose unit does not belong to a record below `start`. Units ascend along the queue, so the
    search goes backwards from its end, or from the offset `least` if that is lower. A void unit below `least` counts as
    one of a record below `start`, since an earlier recovery let the queue begin after it. If no file reaches back to
    `least`, the slot is None: the queue begins with the first offset seen.
    """
    if not queue.list_files() or (least is not None and least < queue.first_offset()):
        return (None if least is not None else queue.max_offset), 0
    slot = end = queue.max_offset if least is None else min(queue.max_offset, least)
    for slot, units in queue.held_before(end, 1024):
        void = is_void(units)
        passed = (units["physical_offset"] < start) & (units["size"] > 0)
        older = np.flatnonzero(passed | void if least is not None else passed)
        if len(older):
            live = older[~void[older]]
            seen = sum(units[live[-1]].tolist()[:2]) if len(live) else 0
            return slot + int(older[-1]) + 1, max(0, min(seen, start))
    return slot, 0


def strays_in_front(queue: ConsumeQueue, stop: int, start: int) -> Iterator[tuple[int, int]]:
    """Yield the runs [low, high) of slots before `stop` whose units wrongly point beyond `start`.
    The log begins at `start`, and retention has removed the records of slots before `stop`. So these units have no
    record and must become void. A queue whose first file begins with one would begin there (format#queue-start)."""
    for at, units in queue.held(queue.first_offset(), min(stop, queue.max_offset)):
        wrong = np.flatnonzero((units["physical_offset"] >= start) & ~is_void(units))
        for group in np.split(wrong, np.flatnonzero(np.diff(wrong) > 1) + 1) if len(wrong) else []:
            yield at + int(group[0]), at + int(group[-1]) + 1


def sort_out(
    expected: int | None,
    seen: int,
    offsets: np.NDArray[np.int64],
    physical: np.NDArray[np.int64],
    sizes: np.NDArray[np.int32],
    queue: ConsumeQueue | None = None,
    leads: Leads = lambda queue, slot, physical: False,
    *,
    doubted: bool = True,
) -> tuple[np.NDArray[np.int64], list[tuple[int, int]], list[int]]:
    """Find the slots of one queue's records, which are at `physical` in the log and contain `offsets`.

    Returns (the slot of each record, index ranges of consecutive slots in order, indices of the records without a
    slot). `expected` is the slot after the record before these, which ends at `seen`. It is None without such a
    record.

    A queue offset is wrong if another record has it already, if it jumps further than lost records could explain, or if
    later records contradict it. In profile `rocketmq` no checksum covers it (`doubted`). Accepting it would void the
    slots of the other records. Such a record gets the slot whose unit points to it, if its neighbours leave room for
    it, or else the only slot that they leave. A record of another queue, whose queue id is damaged, gets no slot that
    another record has. A free queue offset whose unit points to the record is right, whatever is missing before it.
    With `queue` None no units are read. `leads` returns whether a unit points to the record of its slot.
    """
    count = len(offsets)
    asked = queue if doubted else None
    follow = (
        count
        and (offsets[0] == expected or (expected is None and 0 <= offsets[0] < MAX_SLOT))
        and offsets[-1] - offsets[0] == count - 1
        and bool((np.diff(offsets) == 1).all())
    )
    if follow and (asked is None or not _contrary(asked.units(int(offsets[0]), count), physical).any()):
        return offsets, [(0, count)], []
    said = offsets
    if asked is not None:
        offsets = _by_units(asked, expected, offsets, physical, sizes, leads)
    # The smallest offset of the later records. A record with a greater offset leaves no slot for that record.
    wanted = np.where(offsets >= (expected or 0), offsets, MAX_SLOT)
    least_behind = np.append(np.minimum.accumulate(wanted[::-1])[::-1], MAX_SLOT).tolist()
    runs: list[tuple[int, int]] = []
    odd: list[int] = []
    ends = (physical + sizes).tolist()
    for i, (offset, at, end) in enumerate(zip(offsets.tolist(), physical.tolist(), ends, strict=True)):
        if expected is None:
            follows = 0 <= offset < least_behind[i + 1] or offset == 0
        else:
            gap = offset - expected
            follows = gap == 0 or (0 < gap <= (at - seen) // MIN_RECORD_BYTES and offset < least_behind[i + 1])
            if gap > 0 and follows and asked is not None:  # the skipped record must be lost
                follows = not _is_kept(asked, expected, leads)
        if not follows and queue is not None and offset >= (expected or 0):
            follows = offset < MAX_SLOT and queue.units(offset, 1)[0].tolist()[:2] == (at, end - at)
        if not follows:
            odd.append(i)
            continue
        skipped = i - (runs[-1][1] if runs else 0)
        if skipped and offset - skipped >= 0 and expected in (None, offset - skipped):  # only these slots are left
            offsets = offsets.copy()
            offsets[i - skipped : i] = np.arange(offset - skipped, offset)
            del odd[-skipped:]
            runs.append((i - skipped, i))
        if runs and runs[-1][1] == i and offset == offsets[i - 1] + 1:
            runs[-1] = (runs[-1][0], i + 1)
        else:
            runs.append((i, i + 1))
        expected, seen = offset + 1, end
    if odd and offsets is not said:
        offsets[odd] = said[odd]
    return offsets, runs, odd


def _is_kept(queue: ConsumeQueue, slot: int, leads: Leads) -> bool:
    """Return True if the unit of a slot points to the record of that slot."""
    physical, size, _ = queue.units(slot, 1)[0].tolist()
    return size > 0 and leads(queue, slot, physical)


def _contrary(units: np.NDArray[np.void], physical: np.NDArray[np.int64]) -> np.NDArray[np.bool_]:
    """Return a mask of the units that point elsewhere than `physical`."""
    contrary: np.NDArray[np.bool_] = (units["size"] > 0) & ~is_void(units) & (units["physical_offset"] != physical)
    return contrary


def _by_units(
    queue: ConsumeQueue,
    expected: int | None,
    offsets: np.NDArray[np.int64],
    physical: np.NDArray[np.int64],
    sizes: np.NDArray[np.int32],
    leads: Leads,
) -> np.NDArray[np.int64]:
    """Return `offsets`, corrected by units where an offset does not fit its neighbours.
    The corrected offset is the slot whose unit points to the record."""
    low = int(np.median(offsets)) - len(offsets) if expected is None else expected
    found = np.full(len(offsets), -1, np.int64)
    displaced = []
    for at, units in queue.held(max(0, low), min(queue.max_offset, max(0, low) + 2 * len(offsets))):
        order = np.argsort(units["physical_offset"], kind="stable")
        nearest = order[np.minimum(np.searchsorted(units["physical_offset"][order], physical), len(units) - 1)]
        own = np.clip(offsets - at, 0, len(units) - 1)
        for chosen in (nearest, own):  # the record's own offset is preferred if its unit points to the record
            here = (units["physical_offset"][chosen] == physical) & (units["size"][chosen] == sizes)
            found[here] = at + chosen[here]
        for i in np.flatnonzero(_contrary(units[own], physical) & (at + own == offsets)).tolist():
            if leads(queue, int(offsets[i]), int(units["physical_offset"][own[i]])):
                displaced.append(i)
    fixed = offsets.copy()
    fixed[displaced] = -1
    for i in np.flatnonzero((found >= 0) & (found != offsets)).tolist():
        before = max(fixed[:i].max(initial=-1), -1 if expected is None else expected - 1)
        after = offsets[i + 1] if i + 1 < len(offsets) else MAX_SLOT
        if before < found[i] < after:
            fixed[i] = found[i]
    return fixed


class TopicGenerations:
    """Classifies records by topic generation: the current one or an earlier one.

    A Java broker that deletes a topic removes the folders of its queues. The records stay in the commitlog until
    retention removes them. The queues of the next generation count from 0 again:

        log      0 1 2 ... 89 | 0 1 2 ... 14         of one queue

    A record is of an earlier generation if it is before all records that the queue lists, and its queue offset is not
    below the offset of the first listed one. A log of one generation has no such record, since offsets before the first
    listed one are smaller. So a lost unit, or one that points elsewhere, is still noticed.

    The result for a queue depends on its files at the first call. A topic deleted by mqstore needs none of this, since
    the position of its deletion is known (`log.deleted`).
    """

    def __init__(self, parts: StoreParts) -> None:
        self._run, self._queues, self._checksum = parts.log_files, parts.queue_table, parts.checksum
        self._begins: dict[ConsumeQueue, tuple[int, int]] = {}
        self._listed: dict[ConsumeQueue, int] = {}
        """Physical offset from which on all records are of the current generation."""

    def current(
        self, queue: ConsumeQueue, offsets: np.NDArray[np.int64], physical: np.NDArray[np.int64]
    ) -> np.NDArray[np.bool_] | None:
        """Return a mask of a queue's records of the current generation, or None if all are.
        `offsets` are their queue offsets, `physical` their physical offsets, ascending."""
        slot, place = self.begin(queue, offsets.item(0), physical.item(0))
        if place < 0:
            return None
        kept: np.NDArray[np.bool_] = (physical >= place) | (offsets < slot)
        return None if kept.all() else kept

    def note_listed(self, queue: ConsumeQueue, physical: int) -> None:
        """Accept that a queue lists the record at a physical offset, so that `begin` reads no unit."""
        self._listed[queue] = min(physical, self._listed.get(queue, physical))

    def are_older(self, queue: ConsumeQueue, least: int, physical: int, end: int) -> bool:
        """Return True if all records of a queue in `[physical, end)` are of an earlier generation.
        `least` is the smallest of their queue offsets."""
        slot, place = self.begin(queue, least, physical)
        return end <= place and least >= slot

    def leads_to_record(self, queue: ConsumeQueue, slot: int, physical: int) -> bool:
        """Return True if the record at a physical offset verifies and belongs to a slot."""
        record = record_at(self._run, physical, self._checksum)
        return record is not None and (*queue.ref, slot) == (record.topic, record.queue_id, record.queue_offset)

    def begin(self, queue: ConsumeQueue, offset: int, physical: int) -> tuple[int, int]:
        """Return the slot and the physical offset that delimit the earlier generations of a queue.
        Their records have at least that slot and are below that offset. Returns (0, -1) if the record `offset` at
        `physical`, and all later ones, are of the current generation."""
        if physical < (place := self._queues.deleted.get(queue.topic, 0)):
            return 0, place
        if physical >= self._listed.get(queue, 1 << 62):
            return _NONE
        begin = self._begins.get(queue)
        if begin is None and queue.max_offset:
            unit = UNIT.unpack(queue.kept(max(0, min(offset, queue.max_offset - 1)), 1))
            if unit[1] > 0 and unit[0] <= physical and unit != VOID:
                self._listed[queue] = physical  # the record is listed, or follows a listed one
                return _NONE
        if begin is None:
            begin = self._begins[queue] = self._first_listed(queue)
        return begin if physical < begin[1] else _NONE

    def _first_listed(self, queue: ConsumeQueue) -> tuple[int, int]:
        """Return the first slot whose unit points to its record, and the least physical offset so far.
        That is the least of all units up to that slot. Returns (0, -1) without such a slot."""
        tried, place = 0, 1 << 62
        first, end = queue.first_offset(), queue.max_offset
        near = min(first + _TRIED, end)  # usually enough, and much less than a whole file
        for at, units in chain(queue.held(first, near), queue.held(near, end)):
            for i in np.flatnonzero((units["size"] > 0) & ~is_void(units))[: _TRIED - tried].tolist():
                physical = int(units["physical_offset"][i])
                place = min(place, physical)
                if self.leads_to_record(queue, at + i, physical):
                    return at + i, place
                tried += 1
            if tried == _TRIED:
                break
        return _NONE
