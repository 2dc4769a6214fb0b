"""Which records a read comes upon, checked, before a column of them is made.

    queue scan   units of a queue -> where the records lie, window by window, in queue order
    log scan     a range of the commitlog, cut anywhere -> the records that begin in it, in log order

Both give `Piece`s, joined to batches of bounded rows and bytes. Each record is checked before any of its bytes is
used: it lies in what the file holds, its magic, its own offset, its inner lengths and what its unit says of it agree,
and (`verify`) its checksum. What does not pass is damage, and `Policy` says what becomes of it; what retention has
taken away is counted, not damage.

The log scan lists what dispatch would: no prepared or rolled back record, no queue that cannot be. It needs no consume
queue. A range may begin in the middle of a record: the first record that verifies there begins it, since a record
names its own position (store-format 2.1), so ranges that follow each other share no record and lose none.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from mqstore.errors import CorruptStoreError
from mqstore.layout.consumequeue import UNIT_DTYPE, is_void
from mqstore.layout.dispatch import is_listed
from mqstore.layout.pairs import Pairs
from mqstore.layout.record import (
    BODY_AT_V4,
    MIN_RECORD_BYTES,
    TRANSACTION_COMMIT,
    TRANSACTION_MASK,
    Checksum,
    check_record,
)
from mqstore.layout.scan import Headers, find_next, gather, ordinary_bodies, topic_is, verify, walk
from mqstore.log.commitlog import QueueRef
from mqstore.log.consumequeue import ConsumeQueue
from mqstore.log.names import is_path_safe
from mqstore.log.report import Finding
from mqstore.log.store import MessageStore
from mqstore.log.stretch import Stretch
from mqstore.log.tagfilter import TagFilter
from mqstore.spark.arrow import cut
from mqstore.spark.windows import Window, Windows, lie_far_apart

__all__ = ["Keep", "OnCorrupt", "Piece", "Policy", "at_once", "log_batches", "queue_batches", "stretch_batches"]

OnCorrupt = Literal["fail", "skip", "keep"]
_Int64s = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]
_CHUNK_UNITS = 1 << 16
_FILTERED_CHUNK_UNITS = 1 << 18
_ENOUGH_ROWS = 4096
"""A batch of so many rows costs little more a row than a larger one."""
_WORTH_COPYING = 64
_SMALL_BYTES = 8 << 10


@dataclass(slots=True)
class Policy:
    """What a read does, whatever its columns. Counts what it left out."""

    max_rows: int = 20_000
    max_bytes: int = 8 << 20
    """Of records; a batch has at least one row."""
    verify: bool = True
    on_corrupt: OnCorrupt = "fail"
    tell: Callable[[Finding], None] | None = None
    """Called with everything that `on_corrupt` "skip" or "keep" passes over."""
    corrupt: int = field(default=0, init=False)
    removed: int = field(default=0, init=False)
    """Messages that retention took between planning and reading; of a log scan, segments that held some."""

    def damage(self, finding: Finding) -> None:
        """Raise CorruptStoreError, or count."""
        if self.on_corrupt == "fail":
            raise CorruptStoreError(
                f"{finding.kind}: {finding.place}: {finding.detail} (onCorrupt 'skip' leaves such messages out, 'keep' "
                "gives a row that says so; see also `mqstore verify`)",
                finding.file,
                finding.position,
            )
        self.corrupt += 1
        if self.tell is not None:
            self.tell(finding)


class Keep(NamedTuple):
    """What those who check records are to keep of them: a look less for who needs it, wasted on others."""

    bodies: bool = False
    headers: bool = False


@dataclass
class Piece:
    """Messages whose records lie in one buffer. `slots`, `physical`, `sizes`, `tags_codes` have an element a row.

    Rows that are `bad` have no record: `headers` has one less for each of them, and `errors` their texts.
    """

    topic: str | None
    """None in a log scan, and of several queues: the records tell."""
    queue_id: int | None
    slots: _Int64s
    physical: _Int64s
    sizes: _Int64s
    tags_codes: _Int64s | None
    buffer: mmap.mmap | bytes = b""
    """Where `headers` have their positions: a window, or of a queue scan a copy of the records alone."""
    base: int = 0
    """Of a log scan: the physical offset of the buffer's first byte."""
    known_headers: Headers | None = None
    bad: _Bools | None = None
    errors: Sequence[str] = ()
    bodies: dict[int, bytes | None] = field(default_factory=dict)
    """Inflated bodies, by row among the records; None for one that does not inflate."""
    body_errors: dict[int, str] = field(default_factory=dict)
    """Why it does not, likewise."""
    plain_bodies: tuple[npt.NDArray[np.uint8], _Int64s] | None = None
    """All bodies side by side, and their sizes, if the check has copied them: none of them is compressed."""
    positions: _Int64s | None = None
    """Where in the buffer each row's record begins, if every row has one and nothing of them was kept: `headers` looks
    once more."""

    def __len__(self) -> int:
        return len(self.physical)

    @property
    def headers(self) -> Headers | None:
        """Of the rows that have a record; None when no record was looked at."""
        if self.known_headers is None and self.positions is not None:
            headers = gather(self.buffer, self.positions)
            if not (headers.ok & (headers.physical_offset == self.physical)).all():
                raise CorruptStoreError(
                    f"records behind {int(self.physical[0])} have changed since they were checked, as the recovery of "
                    "another process changes them; read again",
                    "commitlog",
                    int(self.physical[0]),
                )
            self.known_headers = headers
        return self.known_headers

    @property
    def records(self) -> int:
        """Rows that have a record."""
        return len(self) - len(self.errors)

    @cached_property
    def pairs(self) -> Pairs:
        """The properties of all records."""
        assert self.headers is not None
        starts = self.headers.properties_position
        ends = starts + self.headers.properties_size
        if not len(starts) or int(ends.max()) >= len(self.buffer):
            return Pairs.of([self.buffer[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)])
        # With the byte behind each, which then becomes the 02 that closes it.
        blobs = cut(self.buffer, starts, ends + 1)
        _, offsets, data = blobs.buffers()
        closing = np.frombuffer(offsets, np.int32, len(blobs) + 1)[1:].astype(np.int64) - 1
        text = np.frombuffer(data, np.uint8, int(closing[-1]) + 1)
        if not text.flags.writeable:
            text = text.copy()
        text[closing] = 2
        return Pairs(text, closing)

    def rows(self, low: int, high: int) -> Piece:
        """Rows [low, high), before any record was looked at."""
        here = slice(low, high)
        codes = None if self.tags_codes is None else self.tags_codes[here]
        return Piece(self.topic, self.queue_id, self.slots[here], self.physical[here], self.sizes[here], codes)

    def sound(self) -> Piece:
        """Without the rows that have no record."""
        if self.bad is None:
            return self
        rows = ~self.bad
        codes = None if self.tags_codes is None else self.tags_codes[rows]
        return Piece(
            self.topic,
            self.queue_id,
            self.slots[rows],
            self.physical[rows],
            self.sizes[rows],
            codes,
            self.buffer,
            self.base,
            self.known_headers,
            bodies=self.bodies,
        )


def _spans(sizes: _Int64s, max_rows: int, max_bytes: int) -> Iterator[tuple[int, int]]:
    """Rows [low, high) of each batch."""
    low, count = 0, len(sizes)
    ends = np.cumsum(sizes)
    while low < count:
        before = int(ends[low - 1]) if low else 0
        high = int(np.searchsorted(ends, before + max_bytes, side="right"))
        high = min(count, max(low + 1, high), low + max_rows)
        yield low, high
        low = high


# -- queue scan --------------------------------------------------------------------------------------------------------


def queue_batches(
    store: MessageStore,
    windows: Windows,
    topic: str,
    queue_id: int,
    start: int,
    stop: int,
    policy: Policy,
    *,
    records: bool = True,
    keep: Keep,
    tags: TagFilter | None = None,
) -> Iterator[list[Piece]]:
    """Messages of queue offsets [start, stop), in order. `records` False looks at units alone; `keep`: what is kept by
    the way, if it can be; `tags` lets pass what its hash lets pass, so some that it would not."""
    queue = store._queues.get(topic, queue_id)
    if queue is None:
        return
    encoded = topic.encode("utf-8", "surrogateescape")
    step = _CHUNK_UNITS if tags is None else _FILTERED_CHUNK_UNITS
    while start < stop:
        count = min(step, stop - start)
        units = queue.units(start, count)
        physical = units["physical_offset"].astype(np.int64)
        sizes = units["size"].astype(np.int64)
        codes = units["tags_code"].astype(np.int64)
        live = (sizes > 0) & (physical >= 0)
        slots = np.arange(start, start + count, dtype=np.int64)
        if not live.all():
            store._find_news()
            queue.correct_min(store.min_offset)  # retention may have taken the file they were in
            gone = ~live & (slots < queue.min_offset)
            if live[0] or gone[0]:
                # Up to the first hole; what comes behind is looked at next, so that rows stay in order.
                count = int(np.argmax(~live & ~gone)) or count
            else:
                count = int(np.argmax(live)) or count
                yield from _holes(queue, slots[:count], policy)
            policy.removed += int(gone[:count].sum())
            units, slots, live = units[:count], slots[:count], live[:count]
            physical, sizes, codes = physical[:count], sizes[:count], codes[:count]
        live &= ~is_void(units)
        if tags is not None:
            live &= tags.units(codes)
        if not live.all():
            slots, physical, sizes, codes = slots[live], physical[live], sizes[live], codes[live]
        whole = Piece(topic, queue_id, slots, physical, sizes, codes)
        if records:
            yield from _joined(_looked_up(store, windows, encoded, whole, policy, keep), policy)
        else:
            yield from ([whole.rows(low, high)] for low, high in _spans(sizes, policy.max_rows, 1 << 62))
        start += count


def at_once(
    store: MessageStore, windows: Windows, parts: Sequence[tuple[str, int, int, int]], policy: Policy
) -> Piece | None:
    """The messages of (topic, queue id, start, stop) of several queues, one part behind the other, in one piece: small
    batches of a stream are a message or two of each of many queues, and each step costs the same for one as for all.

    None unless everything about them is as it should be, and they fit one window and a batch: then nothing was counted
    or told, and `queue_batches` of each part finds what it is.
    """
    # The bounds of a queue do not matter here, so none is looked for in the store, which may not have loaded it.
    units = (
        ConsumeQueue(store._queues, topic, queue_id).read(start, stop - start) for topic, queue_id, start, stop in parts
    )
    found = np.frombuffer(b"".join(units), UNIT_DTYPE)
    physical, sizes = found["physical_offset"].astype(np.int64), found["size"].astype(np.int64)
    if not len(found) or len(found) > policy.max_rows or int(sizes.sum()) > policy.max_bytes:
        return None
    if (sizes < MIN_RECORD_BYTES).any() or (physical < 0).any() or is_void(found).any():
        return None
    cells = windows.cells(physical)
    ends = physical + sizes
    window = windows.of(int(cells[0]), int(ends.max())) if (cells == cells[0]).all() else None
    if window is None or int(ends.max()) > window.end:
        return None
    counts = [stop - start for _, _, start, stop in parts]
    slots = np.concatenate([np.arange(start, stop, dtype=np.int64) for _, _, start, stop in parts])
    headers = gather(window.buffer, physical - window.base)
    fine = headers.ok & (headers.size == sizes) & (headers.physical_offset == physical)
    fine &= (headers.queue_id == np.repeat([part[1] for part in parts], counts)) & (headers.queue_offset == slots)
    topics = [part[0].encode("utf-8", "surrogateescape") for part in parts]
    for topic in {*topics}:
        fine &= topic_is(window.buffer, headers, topic) | np.repeat([each != topic for each in topics], counts)
    if not fine.all() or (policy.verify and not verify(window.buffer, headers, store._checksum).all()):
        return None
    codes = found["tags_code"].astype(np.int64)
    return Piece(None, None, slots, physical, sizes, codes, window.buffer, window.base, headers)


def stretch_batches(stretches: Iterable[Stretch], policy: Policy) -> Iterator[list[Piece]]:
    """Messages that were found and checked before, such as those of `log.walk.walk_log`."""
    return _joined((each for stretch in stretches for each in _pieces(stretch, policy)), policy, policy.max_rows)


def _pieces(stretch: Stretch, policy: Policy) -> Iterator[Piece]:
    for low, high in _spans(stretch.sizes, policy.max_rows, policy.max_bytes):
        here = slice(low, high)
        headers = gather(stretch.buffer, stretch.starts[here])
        slots, physical = stretch.slots[here], headers.physical_offset
        sizes, codes = stretch.sizes[here], stretch.tags_codes[here]
        yield Piece(*stretch.queue, slots, physical, sizes, codes, stretch.buffer, known_headers=headers)


def _joined(pieces: Iterator[Piece], policy: Policy, enough: int = _ENOUGH_ROWS) -> Iterator[list[Piece]]:
    """Pieces by batches: small ones together, each as it comes once there are `enough` rows. Joining costs a copy."""
    group: list[Piece] = []
    rows = size = 0
    for piece in pieces:
        more = int(piece.sizes.sum())
        if group and (rows >= enough or rows + len(piece) > policy.max_rows or size + more > policy.max_bytes):
            yield group
            group, rows, size = [], 0, 0
        group.append(piece)
        rows += len(piece)
        size += more
    if group:
        yield group


def _holes(queue: ConsumeQueue, slots: _Int64s, policy: Policy) -> Iterator[list[Piece]]:
    """Units that are not there, though later ones are."""
    for slot in slots.tolist():
        finding = queue.missing_units(slot, slot)
        policy.damage(finding)
        if policy.on_corrupt == "keep":
            one, bad = np.full(1, -1, np.int64), np.ones(1, np.bool_)
            yield [Piece(*queue.ref, np.full(1, slot), one, one, None, bad=bad, errors=[finding.detail])]


def _looked_up(
    store: MessageStore, windows: Windows, topic: bytes, whole: Piece, policy: Policy, keep: Keep
) -> Iterator[Piece]:
    """`whole`, checked."""
    if not len(whole) or not lie_far_apart(whole.physical, whole.sizes):
        yield from _through_windows(store, windows, topic, whole, policy, keep)
        return
    for low, high in _spans(whole.sizes, policy.max_rows, policy.max_bytes):
        piece = whole.rows(low, high)
        data = windows.read(piece.physical, piece.sizes)
        if data is None:
            yield from _through_windows(store, windows, topic, piece, policy, keep)
        else:
            yield from _checked(store, data, np.cumsum(piece.sizes) - piece.sizes, topic, piece, policy, keep)


def _through_windows(
    store: MessageStore, windows: Windows, topic: bytes, whole: Piece, policy: Policy, keep: Keep
) -> Iterator[Piece]:
    """`whole` by the windows that its records lie in."""
    size = store.manifest.commitlog_segment_bytes
    physical, ends = whole.physical, whole.physical + whole.sizes
    cells = windows.cells(physical)
    bounds = (np.flatnonzero(np.diff(cells)) + 1).tolist()
    for first, last in zip([0, *bounds], [*bounds, len(cells)], strict=True):
        if first == last:
            continue
        cell = int(cells[first])
        end = min(int(ends[first:last].max()), cell - cell % size + size)
        window = windows.of(cell, end)
        if window is None:
            store._find_news()
            if int(physical[first]) < store.min_offset:
                policy.removed += last - first
                continue
            window = windows.of(cell, end) or Window(cell, b"", True)
        for low, high in _spans(whole.sizes[first:last], policy.max_rows, policy.max_bytes):
            piece = whole.rows(first + low, first + high)
            yield from _checked(store, window.buffer, piece.physical - window.base, topic, piece, policy, keep)


def _checked(
    store: MessageStore,
    buffer: mmap.mmap | bytes,
    positions: _Int64s,
    topic: bytes,
    piece: Piece,
    policy: Policy,
    keep: Keep,
) -> Iterator[Piece]:
    """The records at these positions of a buffer, to which the units lead."""
    if _are_ordinary(store, buffer, positions, topic, piece, policy, keep):
        yield piece
        return
    inside = (positions + piece.sizes <= len(buffer)) & (piece.sizes >= MIN_RECORD_BYTES)
    rows = np.arange(len(piece)) if inside.all() else np.flatnonzero(inside)
    if policy.verify and store._checksum == "crc32c-record" and _lie_apart(positions, piece.sizes):
        buffer, positions = _put_together(buffer, positions, piece.sizes, rows)
    headers = gather(buffer, positions[rows], topic=topic)
    fine = headers.ok & (headers.size == piece.sizes[rows]) & (headers.physical_offset == piece.physical[rows])
    if not fine.all():
        rows = rows[fine]
        headers = gather(buffer, positions[rows])
    fine = verify(buffer, headers, store._checksum) if policy.verify else np.ones(len(rows), np.bool_)
    own = (headers.queue_id == piece.queue_id) & (headers.queue_offset == piece.slots[rows])
    own &= topic_is(buffer, headers, topic)
    for i in np.flatnonzero(fine & ~own).tolist():
        assert piece.topic is not None
        assert piece.queue_id is not None
        row = rows[i]
        fine[i] = is_listed(buffer, int(positions[row]), piece.topic, piece.queue_id, int(piece.slots[row]))
    if not fine.all():
        rows = rows[fine]
        headers = gather(buffer, positions[rows])
    piece.buffer, piece.known_headers = buffer, headers
    if len(rows) < len(piece):
        bad = np.ones(len(piece), np.bool_)
        bad[rows] = False
        errors = []
        for row in np.flatnonzero(bad).tolist():
            slot, physical, size = int(piece.slots[row]), int(piece.physical[row]), int(piece.sizes[row])
            assert piece.topic is not None
            assert piece.queue_id is not None
            finding = store.loss_at(physical, size, QueueRef(piece.topic, piece.queue_id), slot)
            errors.append(finding.detail)
            policy.damage(finding)
        piece.bad, piece.errors = bad, errors
        if policy.on_corrupt != "keep":
            piece = piece.sound()
    if len(piece):
        yield piece


def _are_ordinary(
    store: MessageStore,
    buffer: mmap.mmap | bytes,
    positions: _Int64s,
    topic: bytes,
    piece: Piece,
    policy: Policy,
    keep: Keep,
) -> bool:
    """Whether all records are sound and nothing rare, by compiled parts: one pass, in which is kept what is wanted. Of
    all else, `_checked` finds out what it is."""
    if policy.verify and store._checksum != "crc32c-record":
        return False
    assert piece.queue_id is not None, "of a queue scan"
    found = ordinary_bodies(
        *(buffer, positions, piece.physical, piece.sizes, piece.slots, piece.queue_id, topic),
        copied=keep.bodies,
        headers=keep.headers,
        checksums=policy.verify,
    )
    if found is None:
        return False
    ends, bodies, piece.known_headers = found
    piece.buffer, piece.positions = buffer, positions
    if bodies is not None:
        piece.plain_bodies = bodies, ends - positions - BODY_AT_V4
    return True


def _lie_apart(positions: _Int64s, sizes: _Int64s) -> bool:
    """Whether few of these records, mostly small ones, lie side by side: their queue shares the log with others."""
    if len(positions) < _WORTH_COPYING or int(sizes.sum()) > len(sizes) * _SMALL_BYTES:
        return False
    return 2 * int((positions[1:] == positions[:-1] + sizes[:-1]).sum()) < len(positions)


def _put_together(
    buffer: mmap.mmap | bytes, positions: _Int64s, sizes: _Int64s, rows: _Int64s
) -> tuple[bytes, _Int64s]:
    """(a copy of the records of these rows side by side, where in it each begins). Checksums of records that lie side
    by side are compared by the run (`layout.scan.verify`), which saves far more than the copy costs."""
    _, offsets, data = cut(buffer, positions[rows], positions[rows] + sizes[rows]).buffers()
    moved = np.zeros(len(positions), np.int64)
    moved[rows] = np.frombuffer(offsets, np.int32, len(rows) + 1)[:-1]
    return data.to_pybytes(), moved


# -- log scan ----------------------------------------------------------------------------------------------------------


def log_batches(
    store: MessageStore,
    windows: Windows,
    start: int,
    stop: int,
    policy: Policy,
    wanted: Callable[[str], bool],
    *,
    at_record: bool = False,
) -> Iterator[list[Piece]]:
    """Messages, of the topics `wanted`, whose records begin at physical offsets [start, stop), in log order.

    `stop` lies at or below the end of what has been dispatched, or in a segment's BLANK. `at_record`: a record is known
    to begin at `start`; else the way there is found from the start of its segment.
    """
    seen: dict[bytes, bool] = {}

    def is_wanted(topic: bytes) -> bool:
        if topic not in seen:
            name = topic.decode("utf-8", "surrogateescape")
            seen[topic] = is_path_safe(name) and wanted(name)
        return seen[topic]

    size = store.manifest.commitlog_segment_bytes
    for first in range(start // size * size, stop, size):
        low, high = max(start, first), min(stop, first + size)
        known = low if at_record or low == first else _led_to(windows, first, low, first + size, store._checksum)
        for window, found in _records(store, windows, low, high, known, policy):
            if isinstance(found, Finding):
                yield [_stretch_without_record(first, found)]
                continue
            chosen = _listed(window, found, is_wanted)
            headers = found if chosen.all() else gather(window.buffer, found.positions[chosen])
            if len(headers):
                sizes = headers.size.astype(np.int64)
                offsets, physical = headers.queue_offset, headers.physical_offset
                yield [Piece(None, None, offsets, physical, sizes, None, window.buffer, window.base, headers)]


def _stretch_without_record(segment: int, finding: Finding) -> Piece:
    where = np.array([segment + finding.position], np.int64)
    length = np.array([finding.length], np.int64)
    absent = np.full(1, -1, np.int64)
    return Piece(None, None, absent, where, length, None, bad=np.ones(1, np.bool_), errors=[finding.detail])


def _listed(window: Window, headers: Headers, is_wanted: Callable[[bytes], bool]) -> _Bools:
    """Which records dispatch gives a unit, of the topics that are wanted."""
    transaction = headers.sys_flag & TRANSACTION_MASK
    chosen: _Bools = (transaction == 0) | (transaction == TRANSACTION_COMMIT)
    chosen &= headers.queue_id >= 0
    at = headers.topic_position
    topics = cut(window.buffer, at, at + headers.topic_size).dictionary_encode()
    verdicts = np.array([is_wanted(topic) for topic in topics.dictionary.to_pylist()], np.bool_)
    if not verdicts.all():
        chosen &= verdicts[topics.indices.to_numpy()]
    return chosen


def _records(
    store: MessageStore, windows: Windows, low: int, high: int, known: int | None, policy: Policy
) -> Iterator[tuple[Window, Headers | Finding]]:
    """Records that begin in [low, high) of one segment, a batch at a time; with the policy "keep" also what is none.
    `known`: where the first begins; None: at the first place where one verifies."""
    size = store.manifest.commitlog_segment_bytes
    last = low - low % size + size
    length = 0
    at, synced = (low, False) if known is None else (known, True)
    while at < high:
        window = windows.from_(at, min(last, at + length))
        if window is None:
            store._find_news()
            if at < store.min_offset:
                policy.removed += 1  # at least: nobody knows how many they were
            else:
                yield from _no_record(store, Window(at, b"", True), at, high, "no file holds these bytes", policy)
            return
        buffer, base = window.buffer, window.base
        if not synced:
            found = find_next(buffer, at - base, len(buffer), base, store._checksum)
            if found is None and not window.at_end:
                length = last - at  # it may not fit the window
                continue
            if found is None or base + found >= high:
                return
            at, synced = base + found, True
        positions, stop = walk(buffer, at - base, len(buffer))
        positions = positions[: int(np.searchsorted(positions, high - base))]
        bad_at = -1
        sizes = np.diff(np.append(positions, stop))
        for a, b in _spans(sizes, policy.max_rows, policy.max_bytes):
            headers = gather(buffer, positions[a:b])
            fine = headers.ok & (headers.physical_offset == headers.positions + base)
            if policy.verify:
                fine &= verify(buffer, headers, store._checksum)
            if not fine.all():
                good = int(np.argmin(fine))
                bad_at = base + int(positions[a + good])
                headers = gather(buffer, positions[a : a + good])
            if len(headers):
                yield window, headers
            if bad_at >= 0:
                break
        if bad_at < 0:
            if base + stop >= high:
                return
            moved, at = base + stop > at, base + stop
            if not window.at_end and moved:
                length = 0  # the next record may lie across the window's end
                continue
            bad_at = at
            if check_record(buffer, at - base, last - base, at, store._checksum).status == "blank":
                return
        if not window.at_end and not length:
            at, length = bad_at, last - bad_at  # it, or what comes behind the damage, may be larger than the window
            continue
        detail = check_record(buffer, bad_at - base, last - base, bad_at, store._checksum).detail
        found = find_next(buffer, bad_at - base + 1, len(buffer), base, store._checksum)
        behind = high if found is None else min(high, base + found)
        yield from _no_record(store, window, bad_at, behind, detail or "it is not what it should be", policy)
        at, length = behind, 0


def _led_to(windows: Windows, first: int, low: int, last: int, checksum: Checksum) -> int | None:
    """Where the first record at or behind `low` begins, as the lengths of those before it lead there from `first`, the
    segment's start; None where they do not. Who looked for one from `low` on might take for a record what the body of
    another holds, made by a producer for just that place."""
    at = first
    length = 0
    while at < low:
        window = windows.from_(at, min(last, at + length))
        if window is None:
            return None
        positions, stop = walk(window.buffer, at - window.base, len(window.buffer))
        behind = int(np.searchsorted(positions, low - window.base))
        if behind < len(positions):
            return window.base + int(positions[behind])
        if window.base + stop > at:
            at, length = window.base + stop, 0
        elif not window.at_end and not length:
            length = last - at  # the record may be larger than the window
        else:
            blank = check_record(window.buffer, at - window.base, last - window.base, at, checksum).status == "blank"
            return last if blank else None
    return at


def _no_record(
    store: MessageStore, window: Window, start: int, end: int, detail: str, policy: Policy
) -> Iterator[tuple[Window, Finding]]:
    size = store.manifest.commitlog_segment_bytes
    missing = store.missing_segment(start)
    file, position = missing or f"commitlog/{start - start % size:020d}", start % size
    kind: Literal["missing_segment", "bad_record"] = "bad_record" if missing is None else "missing_segment"
    finding = Finding(kind, file, position, end - start, f"{end - start} bytes hold no record: {detail}")
    policy.damage(finding)
    if policy.on_corrupt == "keep":
        yield window, finding
