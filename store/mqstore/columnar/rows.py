"""Checked records of a read, from which columns are built.

    queue scan   units of a queue -> the records they point to, segment by segment, in queue order
    log scan     a range of the commitlog, cut anywhere -> the records that begin in it, in log order
    reader       either of them, and filters by tags, SQL92 and keys

All yield `Piece`s, from which `columns.py` builds columns. Counting those of a queue needs no pyarrow. Each record is
checked before its bytes are used (`check_units`, `scan_segment`). A record that does not verify, or a body that cannot
be inflated, is damage, and `Policy` decides about it. Messages removed by retention are counted, but are not damage.

The log scan lists the records that dispatch would list: none that is prepared or rolled back, no impossible queue. It
needs no consume queue. A range may begin in the middle of a record. The lengths of the records before it lead to the
first one that begins there, so consecutive ranges share no record and lose none.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mqstore.broker.reads.filters import sql92
from mqstore.errors import CorruptStoreError
from mqstore.layout.arrays.pairs import Pairs
from mqstore.layout.arrays.scan import Headers, collect, walk
from mqstore.layout.consumequeue import is_void
from mqstore.layout.properties import KEYS, TAGS, UNIQ_KEY, decode_properties
from mqstore.layout.record import BODY_AT_V4, TRANSACTION_COMMIT, TRANSACTION_MASK
from mqstore.log.derived.consumequeue import ConsumeQueue
from mqstore.log.directory.names import is_path_safe
from mqstore.log.reading.checking import Units, check_units
from mqstore.log.reading.reader import StoreReader
from mqstore.log.reading.tagfilter import TagFilter, parse_tags
from mqstore.log.recovery.report import Finding, Kind
from mqstore.log.recovery.scanning.scanner import Bad, Good, check_at, scan_segment
from mqstore.native import kernel

OnCorrupt = Literal["fail", "skip", "keep"]
_Int64s = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]
_Buffer = mmap.mmap | bytes
_CHUNK_UNITS = 1 << 16
_FAR_BYTES = 16 << 10
"""Records farther apart than this are read by calls, since the system maps about 64 KiB at each page fault."""
_MOST_FILES = 32


@dataclass(slots=True)
class Policy:
    """Options of a read apart from its columns, and counts of the messages that it left out."""

    max_rows: int = 20_000
    max_bytes: int = 8 << 20
    """Bytes of the records of a batch, which has at least one row."""
    verify: bool = True
    on_corrupt: OnCorrupt = "fail"
    tell: Callable[[Finding], None] | None = None
    """Called with everything that `on_corrupt` "skip" or "keep" leaves out."""
    corrupt: int = field(default=0, init=False)
    removed: int = field(default=0, init=False)
    """Messages that retention removed between planning and reading. A log scan counts segments instead."""

    def damage(self, finding: Finding) -> None:
        """Raise CorruptStoreError, or count the damage."""
        if self.on_corrupt == "fail":
            raise CorruptStoreError(
                f"{finding.kind}: {finding.place}: {finding.detail} (onCorrupt 'skip' leaves such messages out, 'keep' "
                "returns a row with the error; see also `mqstore verify`)",
                finding.file,
                finding.position,
            )
        self.corrupt += 1
        if self.tell is not None:
            self.tell(finding)


@dataclass
class Piece:
    """Messages whose records are in one buffer, or damaged messages with an error each.
    `slots`, `physical`, `sizes` and `tags_codes` have one element for each row. -1 means unknown."""

    topic: str | None
    """None in a log scan, and for several queues. Then the records have it."""
    queue_id: int | None
    slots: _Int64s
    physical: _Int64s
    sizes: _Int64s
    tags_codes: _Int64s | None
    buffer: _Buffer = b""
    """Segment of the records, or a concatenated copy."""
    base: int = 0
    """Physical offset of the buffer's first byte, in a log scan."""
    positions: _Int64s | None = None
    """Position of each record in the buffer. None if no record was examined."""
    errors: Sequence[str] = ()
    bodies: Any = None
    """Bodies as an Arrow array, if they were copied or inflated already."""

    def __len__(self) -> int:
        return len(self.physical)

    @property
    def records(self) -> bool:
        """True if the records were examined and are sound."""
        return self.positions is not None

    @cached_property
    def headers(self) -> Headers:
        """Header fields of the records. Raises CorruptStoreError if they have changed since they were checked."""
        assert self.positions is not None
        headers = Headers(self.buffer, self.positions)
        if not (headers.ok & (headers.physical_offset == self.physical)).all():
            raise CorruptStoreError(
                f"records after {int(self.physical[0])} have changed since they were checked, probably by the recovery "
                "of another process; read again",
                "commitlog",
                int(self.physical[0]),
            )
        return headers

    @cached_property
    def pairs(self) -> Pairs:
        """Properties of all records."""
        starts = self.headers.properties_position
        ends = starts + self.headers.properties_size
        if not len(starts) or int(ends.max()) >= len(self.buffer):
            return Pairs.of([self.buffer[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)])
        # With the byte after each, which is then replaced by the 02 that closes it.
        sizes = ends + 1 - starts
        text, closing = collect(self.buffer, starts, sizes), np.cumsum(sizes) - 1
        text[closing] = 2
        return Pairs(text, closing)

    def take(self, rows: slice | npt.NDArray[Any]) -> Piece:
        """Return some of the rows, without bodies."""
        codes, positions = (None if values is None else values[rows] for values in (self.tags_codes, self.positions))
        here = Piece(self.topic, self.queue_id, self.slots[rows], self.physical[rows], self.sizes[rows], codes)
        return replace(here, buffer=self.buffer, base=self.base, positions=positions)

    def only(self, passes: _Bools) -> Piece:
        """Return the rows of a mask."""
        return self if passes.all() else self.take(passes)

    def damaged(self, findings: Sequence[Finding], policy: Policy) -> Iterator[Piece]:
        """Report one finding for each row. Yield the rows without their records if damaged rows are kept."""
        for finding in findings:
            policy.damage(finding)
        if policy.on_corrupt == "keep":
            yield replace(self, positions=None, bodies=None, errors=[finding.detail for finding in findings])


def _spans(sizes: _Int64s, max_rows: int, max_bytes: int) -> Iterator[slice]:
    low, count = 0, len(sizes)
    ends = np.cumsum(sizes)
    while low < count:
        before = int(ends[low - 1]) if low else 0
        high = int(np.searchsorted(ends, before + max_bytes, side="right"))
        high = min(count, max(low + 1, high), low + max_rows)
        yield slice(low, high)
        low = high


# -- reader, and its queue scan ----------------------------------------------------------------------------------------


Cost = Literal["unit", "header", "body", "properties", "record"]
"""Part of a message that must be read: its unit, or a part of its record."""


class PieceReader:
    """Reader of the pieces of one store. Not for several threads.

    `costs`: parts of the messages that are needed. `tags`: as for `MessageStore.read`. `where`: an SQL92 expression
    over properties. `keys`: keys or unique keys of which a message must have one. Raises FilterError.
    """

    def __init__(
        self,
        store: StoreReader,
        costs: Collection[Cost],
        policy: Policy,
        *,
        tags: str | None = None,
        where: str | None = None,
        keys: Sequence[str] | None = None,
    ) -> None:
        self.store = store
        self.policy = policy
        self._tags = tags
        self._passes = _passes(where, keys)
        filtered = parse_tags(tags, "") is not None or self._passes is not None
        self._looks = filtered or not {*costs} <= {"unit"}
        """True to examine the records. If False, only units are read."""
        self._keeps_bodies = "body" in costs and not filtered
        """True to keep the bodies that the check has copied."""
        self._keeps_headers = filtered or not {*costs} <= {"unit", "body"}
        """True to keep the headers that the check has read."""

    def queue_pieces(self, topic: str, queue_id: int, start: int, stop: int) -> Iterator[Piece]:
        """Yield the pieces of queue offsets [start, stop), checked and filtered, in order.
        Records are only read if a part of them is needed."""
        chosen = parse_tags(self._tags, topic)
        return self._chosen(self._scan(topic, queue_id, start, stop, chosen), chosen)

    def log_pieces(self, start: int, stop: int, wanted: Callable[[str], bool]) -> Iterator[Piece]:
        """Yield the pieces of a log, checked and filtered."""
        pieces = _log_pieces(self.store, start, stop, self.policy, wanted)
        return self._chosen(pieces, parse_tags(self._tags, ""))

    def _chosen(self, pieces: Iterable[Piece], tags: TagFilter | None) -> Iterator[Piece]:
        """Yield the rows that pass the filters, and damaged ones, since their content is unknown."""
        for piece in pieces:
            if not piece.errors and tags is not None:
                piece = piece.only(_tagged(piece, tags.tags))
            if not piece.errors and self._passes is not None:
                piece = piece.only(_passing(piece, self._passes))
            if len(piece):
                yield piece

    def _scan(self, topic: str, queue_id: int, start: int, stop: int, tags: TagFilter | None) -> Iterator[Piece]:
        """Yield the messages of queue offsets [start, stop), in order.
        `tags` compares only hashes, so some messages with another tag pass."""
        store, policy = self.store, self.policy
        known = store.queue_table.get(topic, queue_id)
        # Its bounds matter only if units are missing, and finding them takes longer than reading a few messages.
        queue = known or ConsumeQueue(store.queue_table, topic, queue_id)
        while start < stop:
            count = min(_CHUNK_UNITS, stop - start)
            units = queue.units(start, count)
            physical, sizes, codes = (units[name].astype(np.int64) for name in ("physical_offset", "size", "tags_code"))
            slots = np.arange(start, start + count, dtype=np.int64)
            whole = Piece(topic, queue_id, slots, physical, sizes, codes)
            live = (whole.sizes > 0) & (whole.physical >= 0)
            if not live.all():
                store.news.list_again()
                if known is None:
                    queue.load(exact=False)
                    if not queue.list_files():
                        return  # the queue was deleted
                queue.correct_min(store.min_offset)  # retention may have removed their file
                gone = ~live & (whole.slots < queue.min_offset)
                if live[0] or gone[0]:
                    # Up to the first hole. The rest is examined next, so that rows stay in order.
                    count = int(np.argmax(~live & ~gone)) or count
                else:
                    count = int(np.argmax(live)) or count
                    nowhere = np.full(1, -1, np.int64)
                    for slot in whole.slots[:count].tolist():  # units are missing, although later ones exist
                        hole = Piece(*queue.ref, np.full(1, slot), nowhere, nowhere, None)
                        yield from hole.damaged([queue.missing_units(slot, slot)], policy)
                policy.removed += int(gone[:count].sum())
                units, whole, live = units[:count], whole.take(slice(count)), live[:count]
            live &= ~is_void(units)
            if tags is not None:
                live &= tags.prefilter(units["tags_code"].astype(np.int64))
            whole = whole.only(live)
            if self._looks:
                yield from self._looked_up(queue, whole, apart=tags is not None)
            else:
                yield from map(whole.take, _spans(whole.sizes, policy.max_rows, 1 << 62))
            start += count

    def _looked_up(self, queue: ConsumeQueue, whole: Piece, *, apart: bool) -> Iterator[Piece]:
        """Check the records of `whole` by segments, or copied together if they are `apart`."""
        store, policy = self.store, self.policy
        if apart:
            for rows in _spans(whole.sizes, policy.max_rows, policy.max_bytes):
                piece = whole.take(rows)
                if self._copy(piece):
                    yield from self._checked(queue, piece)
                else:
                    yield from self._looked_up(queue, piece, apart=False)
            return
        size = store.manifest.commitlog_segment_bytes
        segments = whole.physical // size
        for part in np.split(np.arange(len(whole)), np.flatnonzero(np.diff(segments)) + 1) if len(whole) else ():
            first, last = int(part[0]), int(part[-1]) + 1
            here = slice(first, last)
            there = store.records.segment_at(
                int(whole.physical[first]), int((whole.physical[here] + whole.sizes[here]).max())
            )
            if there is None and int(whole.physical[first]) < store.min_offset:
                policy.removed += last - first
                continue
            buffer = b"" if there is None else there[1]
            for rows in _spans(whole.sizes[here], policy.max_rows, policy.max_bytes):
                piece = whole.take(slice(first + rows.start, first + rows.stop))
                piece.buffer, piece.positions = buffer, piece.physical - int(segments[first]) * size
                yield from self._checked(queue, piece)

    def _copy(self, piece: Piece) -> bool:
        """Copy the records of a piece together, each by a separate read.
        For records far apart this costs a fraction of mapping their pages. Return False if they are not far apart, are
        in many files, are missing, or claim to be too large."""
        parts, size = self.store.parts, self.store.manifest.commitlog_segment_bytes
        numbers, which = np.unique(piece.physical // size, return_inverse=True)
        far = int(np.ptp(piece.physical)) >= len(piece) * _FAR_BYTES
        if kernel is None or not far or len(numbers) > _MOST_FILES or int(piece.sizes.sum()) > self.policy.max_bytes:
            return False
        with ExitStack() as files:
            descriptors = []
            for number in numbers.tolist():
                segment = parts.log_files.find(number * size)
                if segment is None:
                    return False
                try:
                    descriptors.append(files.enter_context(parts.fs.opened(segment.path, os.O_RDONLY)))
                except FileNotFoundError:  # retention removed it
                    return False
            data = kernel.read_at(
                np.array(descriptors)[which], piece.physical % size, np.ascontiguousarray(piece.sizes)
            )
        if data is None:
            return False
        piece.buffer, piece.positions = data, np.cumsum(piece.sizes) - piece.sizes
        return True

    def _checked(self, queue: ConsumeQueue, piece: Piece) -> Iterator[Piece]:
        """Yield the sound records of a piece, and separately the damaged messages."""
        assert piece.positions is not None
        sound, headers, ends, bodies = check_units(
            queue,
            piece.buffer,
            Units(piece.positions, piece.physical, piece.sizes, piece.slots),
            self.store.checksum if self.policy.verify else None,
            copied=self._keeps_bodies,
            headers=self._keeps_headers,
        )
        if headers is not None:
            piece.headers = headers
        if bodies is not None:
            from mqstore.columnar.arrow import laid  # needs pyarrow

            assert ends is not None
            piece.bodies = laid(bodies, ends - piece.positions - BODY_AT_V4)
        if sound.all():
            yield piece
            return
        for run in np.split(np.arange(len(piece)), np.flatnonzero(np.diff(sound)) + 1):
            part = piece.take(run)
            if sound[run[0]]:
                yield part
            else:
                places = zip(part.physical.tolist(), part.sizes.tolist(), part.slots.tolist(), strict=True)
                findings = [
                    self.store.records.loss_at(physical, size, queue.ref, slot) for physical, size, slot in places
                ]
                yield from part.damaged(findings, self.policy)


# -- log scan ----------------------------------------------------------------------------------------------------------


def _log_pieces(
    store: StoreReader, start: int, stop: int, policy: Policy, wanted: Callable[[str], bool]
) -> Iterator[Piece]:
    """Yield messages of `wanted` topics whose records begin at physical offsets [start, stop), in log order.
    `stop` is at or below the dispatched end, or in a segment's BLANK."""

    @cache
    def wanted_from(topic: bytes) -> int:
        """Return the physical offset from which messages of a topic are wanted. Earlier ones were deleted."""
        name = topic.decode("utf-8", "surrogateescape")
        return store.deleted_at(name) if is_path_safe(name) and wanted(name) else stop

    size = store.manifest.commitlog_segment_bytes
    for base in range(start // size * size, stop, size):
        low = max(start, base)
        for found in _events(store, base, low, min(stop, base + size), policy):
            if isinstance(found, Bad):
                yield from _no_record(store, found._replace(start=max(found.start, low)), policy)
                continue
            headers, chosen = found.headers, _listed(found, wanted_from)
            numbers = (headers.queue_offset, headers.physical_offset, headers.size.astype(np.int64))
            whole = Piece(None, None, *numbers, None, found.buffer, base, headers.positions).take(chosen)
            yield from map(whole.take, _spans(whole.sizes, policy.max_rows, policy.max_bytes))


def _events(store: StoreReader, base: int, low: int, high: int, policy: Policy) -> Iterator[Good | Bad]:
    """Yield the records that begin in [low, high) of the segment at `base`, and bytes without a record."""
    there = store.records.segment_at(low, high)
    if there is None:
        if low < store.min_offset:
            policy.removed += 1  # at least: their number is unknown
        else:
            yield Bad("missing_segment", low, high, "no file holds these bytes")
        return
    segment, buffer = there
    run, checksum = store.log_files, store.checksum
    # From the start of the segment: scanning from `low` might find a record image in the body of a record.
    _, at = walk(buffer, 0, min(low - base, len(buffer)))
    for event in scan_segment(run, segment, at, checksum, stop=low - base, checksums=False):
        at = event.end - base
    end = base + (yield from scan_segment(run, segment, at, checksum, stop=high - base, checksums=policy.verify))
    if end < high:
        yield Bad("bad_record", end, high, check_at(run, segment, end - base, checksum).detail)


def _listed(found: Good, wanted_from: Callable[[bytes], int]) -> _Bools:
    """Return a mask of the wanted records for which dispatch writes a unit."""
    from mqstore.columnar.arrow import cut  # needs pyarrow

    headers = found.headers
    transaction = headers.sys_flag & TRANSACTION_MASK
    chosen: _Bools = (transaction == 0) | (transaction == TRANSACTION_COMMIT)
    chosen &= headers.queue_id >= 0
    at = headers.topic_position
    topics = cut(found.buffer, at, at + headers.topic_size).dictionary_encode()
    begins = np.array([wanted_from(topic) for topic in topics.dictionary.to_pylist()], np.int64)
    if begins.any():
        chosen &= headers.physical_offset >= begins[topics.indices.to_numpy()]
    return chosen


def _no_record(store: StoreReader, found: Bad, policy: Policy) -> Iterator[Piece]:
    size, length = store.manifest.commitlog_segment_bytes, found.end - found.start
    missing = store.records.missing_segment(found.start)
    file, position = missing or f"commitlog/{found.start - found.start % size:020d}", found.start % size
    kind: Kind = "bad_record" if missing is None else "missing_segment"
    detail = f"{length} bytes are not a record: {found.detail or 'they do not verify'}"
    piece = Piece(None, None, np.full(1, -1), np.full(1, found.start), np.full(1, length), None)
    yield from piece.damaged([Finding(kind, file, position, length, detail)], policy)


# -- filters -----------------------------------------------------------------------------------------------------------


def _tagged(piece: Piece, tags: Iterable[str]) -> _Bools:
    """Return a mask of the records that have one of these tags."""
    pairs, found = piece.pairs, np.zeros(len(piece), np.bool_)
    chosen = pairs.named(TAGS.encode())
    starts, sizes = pairs.value[chosen], pairs.value_size[chosen]
    for tag in tags:
        wanted = np.frombuffer(tag.encode(), np.uint8)
        rows = np.flatnonzero(sizes == len(wanted))
        rows = rows[(pairs.data[starts[rows, None] + np.arange(len(wanted))] == wanted).all(axis=1)]
        found[pairs.blob[chosen[rows]]] = True
    return found


def _passing(piece: Piece, passes: Callable[[dict[str, str]], bool]) -> _Bools:
    """Return a mask of the records whose properties pass. Each distinct set of properties is evaluated once."""
    sizes = piece.headers.properties_size.astype(np.int64)
    data = collect(piece.buffer, piece.headers.properties_position, sizes).tobytes()
    edges = np.cumsum(sizes).tolist()
    blobs = [data[low:high] for low, high in pairwise([0, *edges])]
    verdicts = {blob: passes(decode_properties(blob)) for blob in set(blobs)}
    return np.fromiter(map(verdicts.__getitem__, blobs), np.bool_, len(blobs))


def _passes(where: str | None, keys: Sequence[str] | None) -> Callable[[dict[str, str]], bool] | None:
    """Return the condition on the properties of a message, or None without one. Raises FilterError."""
    if where is None and keys is None:
        return None
    matches = sql92.compile(where).matches if where is not None else lambda properties: True
    wanted = None if keys is None else frozenset(keys) - {""}

    def passes(properties: dict[str, str]) -> bool:
        if wanted is not None and wanted.isdisjoint((*properties.get(KEYS, "").split(" "), properties.get(UNIQ_KEY))):
            return False
        return matches(properties)

    return passes
