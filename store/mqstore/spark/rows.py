"""Which records a read comes upon, checked, before a column of them is made.

    queue scan   units of a queue -> where the records lie, segment by segment, in queue order
    log scan     a range of the commitlog, cut anywhere -> the records that begin in it, in log order

Both give `Piece`s, joined to batches of bounded rows and bytes. Each record is checked before any of its bytes is
used: it lies in what the file holds, its magic, its own offset, its inner lengths and what its unit says of it agree,
and (`verify`) its checksum. What does not pass is damage, and `Policy` says what becomes of it; what retention has
taken away is counted, not damage.

The log scan lists what dispatch would: no prepared or rolled back record, no queue that cannot be. It needs no consume
queue. A range may begin in the middle of a record: the first record that verifies there begins it, since a record
names its own position (format#record), so ranges that follow each other share no record and lose none.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mqstore.errors import CorruptStoreError
from mqstore.layout.consumequeue import UNIT_DTYPE, is_void
from mqstore.layout.pairs import Pairs
from mqstore.layout.record import BODY_AT_V4, MIN_RECORD_BYTES, TRANSACTION_COMMIT, TRANSACTION_MASK, check_record
from mqstore.layout.scan import Headers, gather, ordinary_bodies, topic_is, verify, walk
from mqstore.log.checking import sound_records
from mqstore.log.consumequeue import ConsumeQueue
from mqstore.log.names import is_path_safe
from mqstore.log.recovery.report import Finding
from mqstore.log.recovery.scanner import Bad, Good, first_good_in, scan_segment
from mqstore.log.store import MessageStore
from mqstore.log.tagfilter import TagFilter
from mqstore.spark.arrow import cut

__all__ = ["OnCorrupt", "Piece", "Policy", "QueueScan", "at_once", "log_batches"]

OnCorrupt = Literal["fail", "skip", "keep"]
_Int64s = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]
_Buffer = mmap.mmap | bytes
_CHUNK_UNITS = 1 << 16
_ENOUGH_ROWS = 4096
"""A batch of so many rows costs little more a row than a larger one."""


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
    buffer: _Buffer = b""
    """The segment that holds the records."""
    base: int = 0
    """Of a log scan: the physical offset of the buffer's first byte."""
    known_headers: Headers | None = None
    bad: _Bools | None = None
    errors: Sequence[str] = ()
    bodies: dict[int, bytes | str] = field(default_factory=dict)
    """Inflated bodies, by row among the records; of one that does not inflate a text says why."""
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

    def take(self, rows: slice | npt.NDArray[Any], records: slice | npt.NDArray[Any] | None = None) -> Piece:
        """Some rows, without inflated bodies. `records`: the records that belong to them; None: none was looked at."""
        bad, errors = None, [*self.errors]
        if self.bad is not None:
            number = np.cumsum(self.bad) - 1
            kept = self.bad[rows]
            errors = [errors[i] for i in number[rows][kept].tolist()]
            bad = kept if errors else None
        headers = None
        if records is not None:
            assert self.headers is not None
            headers = gather(self.buffer, self.headers.positions[records])
        codes = None if self.tags_codes is None else self.tags_codes[rows]
        here = Piece(self.topic, self.queue_id, self.slots[rows], self.physical[rows], self.sizes[rows], codes)
        return replace(here, buffer=self.buffer, base=self.base, known_headers=headers, bad=bad, errors=errors)


def _spans(sizes: _Int64s, max_rows: int, max_bytes: int) -> Iterator[slice]:
    """The rows of each batch."""
    low, count = 0, len(sizes)
    ends = np.cumsum(sizes)
    while low < count:
        before = int(ends[low - 1]) if low else 0
        high = int(np.searchsorted(ends, before + max_bytes, side="right"))
        high = min(count, max(low + 1, high), low + max_rows)
        yield slice(low, high)
        low = high


# -- queue scan --------------------------------------------------------------------------------------------------------


class QueueScan:
    """Reads queues of one store. `bodies`, `headers`: what the check keeps of each record, if it can: it saves a second
    look at them."""

    def __init__(self, store: MessageStore, policy: Policy, *, bodies: bool = False, headers: bool = True) -> None:
        self._store = store
        self._policy = policy
        self._bodies = bodies
        self._headers = headers

    def batches(
        self, topic: str, queue_id: int, start: int, stop: int, *, records: bool = True, tags: TagFilter | None = None
    ) -> Iterator[list[Piece]]:
        """Messages of queue offsets [start, stop), in order. `records` False looks at units alone; `tags` lets pass
        what its hash lets pass, so some that it would not."""
        queue = self._store.queue_table.get(topic, queue_id)
        if queue is None:
            return iter(())
        pieces = self._pieces(queue, start, stop, records, tags)
        return _joined(pieces, self._policy.max_rows, self._policy.max_bytes if records else 1 << 62, _ENOUGH_ROWS)

    def _pieces(
        self, queue: ConsumeQueue, start: int, stop: int, records: bool, tags: TagFilter | None
    ) -> Iterator[Piece]:
        store, policy = self._store, self._policy
        while start < stop:
            count = min(_CHUNK_UNITS, stop - start)
            units = queue.units(start, count)
            whole = _of_units(*queue.ref, np.arange(start, start + count, dtype=np.int64), units)
            live = (whole.sizes > 0) & (whole.physical >= 0)
            if not live.all():
                store.find_news()
                queue.correct_min(store.min_offset)  # retention may have taken the file they were in
                gone = ~live & (whole.slots < queue.min_offset)
                if live[0] or gone[0]:
                    # Up to the first hole; what comes behind is looked at next, so that rows stay in order.
                    count = int(np.argmax(~live & ~gone)) or count
                else:
                    count = int(np.argmax(live)) or count
                    yield from self._holes(queue, whole.slots[:count])
                policy.removed += int(gone[:count].sum())
                units, whole, live = units[:count], whole.take(slice(count)), live[:count]
            live &= ~is_void(units)
            if tags is not None:
                live &= tags.units(units["tags_code"].astype(np.int64))
            if not live.all():
                whole = whole.take(live)
            if records:
                yield from self._looked_up(queue, whole)
            else:
                yield from map(whole.take, _spans(whole.sizes, policy.max_rows, 1 << 62))
            start += count

    def _holes(self, queue: ConsumeQueue, slots: _Int64s) -> Iterator[Piece]:
        """Units that are not there, though later ones are."""
        for slot in slots.tolist():
            finding = queue.missing_units(slot, slot)
            self._policy.damage(finding)
            if self._policy.on_corrupt == "keep":
                one, bad = np.full(1, -1, np.int64), np.ones(1, np.bool_)
                yield Piece(*queue.ref, np.full(1, slot), one, one, None, bad=bad, errors=[finding.detail])

    def _looked_up(self, queue: ConsumeQueue, whole: Piece) -> Iterator[Piece]:
        """`whole` by the segments that its records lie in, checked."""
        store, policy = self._store, self._policy
        size = store.manifest.commitlog_segment_bytes
        segments = whole.physical // size
        for part in np.split(np.arange(len(whole)), np.flatnonzero(np.diff(segments)) + 1) if len(whole) else ():
            first, last = int(part[0]), int(part[-1]) + 1
            here = slice(first, last)
            there = store.checker.segment_at(
                int(whole.physical[first]), int((whole.physical[here] + whole.sizes[here]).max())
            )
            if there is None and int(whole.physical[first]) < store.min_offset:
                policy.removed += last - first
                continue
            buffer = b"" if there is None else there[1]
            for rows in _spans(whole.sizes[here], policy.max_rows, policy.max_bytes):
                piece = whole.take(slice(first + rows.start, first + rows.stop))
                yield from self._checked(queue, buffer, piece.physical - int(segments[first]) * size, piece)

    def _checked(self, queue: ConsumeQueue, buffer: _Buffer, positions: _Int64s, piece: Piece) -> Iterator[Piece]:
        """The records at these positions of a buffer, to which the units lead."""
        if self._are_ordinary(queue, buffer, positions, piece):
            yield piece
            return
        store, policy = self._store, self._policy
        checksum = store.checksum if policy.verify else None
        units = piece.physical, piece.sizes, piece.slots
        rows, headers = sound_records(queue, buffer, positions, *units, checksum)
        if len(rows) < len(piece):
            piece.bad = np.ones(len(piece), np.bool_)
            piece.bad[rows] = False
            lost = np.flatnonzero(piece.bad)
            places = zip(*(values[lost].tolist() for values in (piece.physical, piece.sizes, piece.slots)), strict=True)
            findings = [store.loss_at(physical, size, queue.ref, slot) for physical, size, slot in places]
            for finding in findings:
                policy.damage(finding)
            piece.errors = [finding.detail for finding in findings]
            if policy.on_corrupt != "keep":
                piece = piece.take(rows)
        piece.buffer, piece.known_headers = buffer, headers
        if len(piece):
            yield piece

    def _are_ordinary(self, queue: ConsumeQueue, buffer: _Buffer, positions: _Int64s, piece: Piece) -> bool:
        """Whether all records are sound and nothing rare, by compiled parts: one pass, in which is kept what is wanted.
        Of all else, `_checked` finds out what it is."""
        verifies = self._policy.verify
        if verifies and self._store.checksum != "crc32c-record":
            return False
        found = ordinary_bodies(
            *(buffer, positions, piece.physical, piece.sizes, piece.slots, queue.queue_id, queue.topic_bytes),
            copied=self._bodies,
            headers=self._headers,
            checksums=verifies,
        )
        if found is None:
            return False
        ends, bodies, piece.known_headers = found
        piece.buffer, piece.positions = buffer, positions
        if bodies is not None:
            piece.plain_bodies = bodies, ends - positions - BODY_AT_V4
        return True


def _of_units(topic: str | None, queue_id: int | None, slots: _Int64s, units: npt.NDArray[np.void]) -> Piece:
    """The messages that these units lead to, before a record is looked at."""
    physical, sizes, codes = (units[name].astype(np.int64) for name in ("physical_offset", "size", "tags_code"))
    return Piece(topic, queue_id, slots, physical, sizes, codes)


def at_once(store: MessageStore, parts: Sequence[tuple[str, int, int, int]], policy: Policy) -> Piece | None:
    """The messages of (topic, queue id, start, stop) of several queues, one part behind the other, in one piece: small
    batches of a stream are a message or two of each of many queues, and each step costs the same for one as for all.

    None unless everything about them is as it should be, and they fit one segment and a batch: then nothing was counted
    or told, and a `QueueScan` of each part finds what it is.
    """
    # The bounds of a queue do not matter here, so none is looked for in the store, which may not have loaded it.
    read = (
        ConsumeQueue(store.queue_table, topic, queue_id).read(low, high - low) for topic, queue_id, low, high in parts
    )
    units = np.frombuffer(b"".join(read), UNIT_DTYPE)
    counts = [stop - start for _, _, start, stop in parts]
    slots = np.concatenate([np.arange(start, stop, dtype=np.int64) for _, _, start, stop in parts])
    if len(units) != len(slots) or not 0 < len(units) <= policy.max_rows:
        return None
    piece = _of_units(None, None, slots, units)
    physical, sizes = piece.physical, piece.sizes
    size = store.manifest.commitlog_segment_bytes
    base = int(physical[0]) // size * size
    if (
        int(sizes.sum()) > policy.max_bytes
        or (sizes < MIN_RECORD_BYTES).any()
        or (physical // size * size != base).any()
    ):
        return None
    there = store.checker.segment_at(base, int((physical + sizes).max())) if base >= 0 else None
    if there is None or base + len(there[1]) < int((physical + sizes).max()) or is_void(units).any():
        return None
    piece.buffer = buffer = there[1]
    piece.known_headers = headers = gather(buffer, physical - base)
    fine = headers.ok & (headers.size == sizes) & (headers.physical_offset == physical)
    fine &= (headers.queue_id == np.repeat([part[1] for part in parts], counts)) & (headers.queue_offset == slots)
    topics = [part[0].encode("utf-8", "surrogateescape") for part in parts]
    for topic in {*topics}:
        fine &= topic_is(buffer, headers, topic) | np.repeat([each != topic for each in topics], counts)
    if not fine.all() or (policy.verify and not verify(buffer, headers, store.checksum).all()):
        return None
    return piece


def _joined(pieces: Iterator[Piece], max_rows: int, max_bytes: int, enough: int) -> Iterator[list[Piece]]:
    """Pieces by batches: small ones together, each as it comes once there are `enough` rows. Joining costs a copy."""
    group: list[Piece] = []
    rows = size = 0
    for piece in pieces:
        more = int(piece.sizes.sum())
        if group and (rows >= enough or rows + len(piece) > max_rows or size + more > max_bytes):
            yield group
            group, rows, size = [], 0, 0
        group.append(piece)
        rows += len(piece)
        size += more
    if group:
        yield group


# -- log scan ----------------------------------------------------------------------------------------------------------


def log_batches(
    store: MessageStore,
    start: int,
    stop: int,
    policy: Policy,
    wanted: Callable[[str], bool],
) -> Iterator[list[Piece]]:
    """Messages, of the topics `wanted`, whose records begin at physical offsets [start, stop), in log order.

    `stop` lies at or below the end of what has been dispatched, or in a segment's BLANK. The first record at or behind
    `start` is found from the start of its segment.
    """
    seen: dict[bytes, bool] = {}

    def is_wanted(topic: bytes) -> bool:
        if topic not in seen:
            name = topic.decode("utf-8", "surrogateescape")
            seen[topic] = is_path_safe(name) and wanted(name)
        return seen[topic]

    size = store.manifest.commitlog_segment_bytes
    for base in range(start // size * size, stop, size):
        low, high = max(start, base), min(stop, base + size)
        for found in _events(store, base, low, high, policy):
            if isinstance(found, Bad):
                yield from _no_record(store, found, policy)
                continue
            chosen = _listed(found, is_wanted)
            positions, sizes = found.headers.positions[chosen], found.headers.size[chosen].astype(np.int64)
            for rows in _spans(sizes, policy.max_rows, policy.max_bytes):
                headers = gather(found.buffer, positions[rows])
                numbers = headers.queue_offset, headers.physical_offset, sizes[rows]
                yield [Piece(None, None, *numbers, None, found.buffer, base, headers)]


def _events(store: MessageStore, base: int, low: int, high: int, policy: Policy) -> Iterator[Good | Bad]:
    """The records that begin in [low, high) of the segment at `base`, and the bytes that are none."""
    there = store.checker.segment_at(low, high)
    if there is None:
        if low < store.min_offset:
            policy.removed += 1  # at least: nobody knows how many they were
        else:
            yield Bad("missing_segment", low, high, "no file holds these bytes")
        return
    segment, buffer = there
    start = _led_to(store, buffer, base, low - base)
    if start is None:
        found = first_good_in(store.log_files, segment, low - base, store.checksum, high - base)
        start = None if found is None else found - base
    if start is not None and start < high - base:
        scan = scan_segment(store.log_files, segment, start, store.checksum, stop=high - base, checksums=policy.verify)
        end = base + (yield from scan)
        if end < high:
            yield Bad(
                "bad_record", end, high, check_record(buffer, end - base, len(buffer), end, store.checksum).detail
            )


def _led_to(store: MessageStore, buffer: _Buffer, base: int, low: int) -> int | None:
    """Where the first record at or behind `low` begins, as the lengths of those before it lead there from the start of
    their segment; None where they do not. Who looked for one from `low` on might take for a record what the body of
    another holds, made by a producer for just that place."""
    low = min(low, len(buffer))
    _, at = walk(buffer, 0, low)
    if at == low:
        return at
    _, end = walk(buffer, at, len(buffer), 1)
    if end > at:
        return end
    return len(buffer) if check_record(buffer, at, len(buffer), base + at, store.checksum).status == "blank" else None


def _listed(found: Good, is_wanted: Callable[[bytes], bool]) -> _Bools:
    """Which records dispatch gives a unit, of the topics that are wanted."""
    headers = found.headers
    transaction = headers.sys_flag & TRANSACTION_MASK
    chosen: _Bools = (transaction == 0) | (transaction == TRANSACTION_COMMIT)
    chosen &= headers.queue_id >= 0
    at = headers.topic_position
    topics = cut(found.buffer, at, at + headers.topic_size).dictionary_encode()
    verdicts = np.array([is_wanted(topic) for topic in topics.dictionary.to_pylist()], np.bool_)
    if not verdicts.all():
        chosen &= verdicts[topics.indices.to_numpy()]
    return chosen


def _no_record(store: MessageStore, found: Bad, policy: Policy) -> Iterator[list[Piece]]:
    size, length = store.manifest.commitlog_segment_bytes, found.end - found.start
    missing = store.missing_segment(found.start)
    file, position = missing or f"commitlog/{found.start - found.start % size:020d}", found.start % size
    kind: Literal["missing_segment", "bad_record"] = "bad_record" if missing is None else "missing_segment"
    detail = f"{length} bytes hold no record: {found.detail or 'it is not what it should be'}"
    policy.damage(Finding(kind, file, position, length, detail))
    if policy.on_corrupt == "keep":
        where, absent = np.full(1, found.start, np.int64), np.full(1, -1, np.int64)
        whole = np.full(1, length, np.int64)
        yield [Piece(None, None, absent, where, whole, None, bad=np.ones(1, np.bool_), errors=[detail])]
