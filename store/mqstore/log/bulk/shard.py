"""Staged shard: records that a task has encoded, complete except for their position in the log (spark#stage).

    <folder>/records.bin    complete records, contiguous, in the store's profile; queueOffset, physicalOffset,
                            storeTimestamp and checksum are zero, no BLANKs
    <folder>/shard.json     {"version": 1, "profile", "records": n, "bytes": n, "crc32c": of records.bin,
                            "largest": bytes of the largest record, "queues": {TOPIC: {"0": records}}}

Earlier versions added a member "index" and a file records.idx. Both are ignored.

`Shard.load` reads the JSON, and `check` reads all records. A fault is a `FormatError` with file, position and reason,
raised before any record is stored. `windows` then yields the records in batches, in bounded memory, and compares the
CRC again. So a file that changed between check and copy is found before the bulk append is committed.

All records that a put would refuse are refused here, since programs that read the log trust its bytes to be records.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from mqstore import arrays as np
from mqstore.errors import FormatError, StoreIOError
from mqstore.files.filesystem import FileSystem
from mqstore.files.jsonfile import decode_json, encode_json, read_json
from mqstore.files.safe_open import REFUSED
from mqstore.layout.arrays.dispatch import SCHEDULE_TOPIC, topics_of
from mqstore.layout.arrays.scan import Headers, collect, has_crc_tail, walk
from mqstore.layout.properties import CRC32
from mqstore.layout.record import BLANK_BYTES, INNER_BATCH, TRANSACTION_COMMIT, TRANSACTION_MASK, unreadable_number
from mqstore.log.directory.names import MAX_QUEUE_ID, is_path_safe
from mqstore.log.reading.prefetch import Prefetch
from mqstore.log.writing.log_tail import QueueRef
from mqstore.native import crc32c
from mqstore.options import Profile

WINDOW_BYTES = 8 << 20
_INNER = re.compile(b"INNER_")
_NUMBERS = ("records", "bytes", "crc32c", "largest")
"""Members of `shard.json`, and fields of `Shard`, that are numbers."""


class Limits(NamedTuple):
    """Limits of the store for a record."""

    profile: Profile
    segment_bytes: int
    max_body_bytes: int

    @property
    def max_record_bytes(self) -> int:
        return self.segment_bytes - BLANK_BYTES


class Window(NamedTuple):
    """Whole records at the start of `data`, up to `stop`. `headers.positions` count from the start."""

    data: memoryview
    headers: Headers
    stop: int


class Groups(NamedTuple):
    """Queues of a window's records: record i goes to `keys[group[i]]`. `counts` are totals by key."""

    keys: list[QueueRef]
    group: np.NDArray[np.integer]
    counts: np.NDArray[np.int64]


def by_queue(window: Window) -> Groups:
    topics, topic = topics_of(window.data, window.headers)
    codes = topic.astype(np.int64) * (MAX_QUEUE_ID + 1) + np.clip(window.headers.queue_id, 0, MAX_QUEUE_ID)
    counts = np.bincount(codes)
    present = np.flatnonzero(counts)
    number = np.zeros(len(counts), np.int64)
    number[present] = np.arange(len(present))
    keys = [QueueRef(topics[code // (MAX_QUEUE_ID + 1)], code % (MAX_QUEUE_ID + 1)) for code in present.tolist()]
    # Sorting 16-bit numbers is a radix sort, several times faster.
    kind = np.uint16 if len(keys) < 1 << 16 else np.int64
    return Groups(keys, number[codes].astype(kind), counts[present])


class Shard(NamedTuple):
    """Content of a `shard.json`. `queues` has the number of records of each queue."""

    folder: Path
    records: int
    bytes: int
    crc32c: int
    largest: int
    queues: Mapping[QueueRef, int]
    limits: Limits
    fs: FileSystem

    @property
    def file(self) -> Path:
        return self.folder / "records.bin"

    @classmethod
    def load(cls, folder: Path, limits: Limits, fs: FileSystem) -> Shard:
        """Read the `shard.json` in `folder`, without its records.
        Raises FormatError if it is missing, does not decode, or does not fit this store. Raises StoreIOError if it
        cannot be read."""
        path = folder / "shard.json"
        value = read_note(path, fs, "shard", "the file is missing, so staging the shard was not completed")
        if value.get("profile") != limits.profile:
            _refuse(
                path,
                f"its records are of profile {value.get('profile')!r:.80}, the store's is {limits.profile!r}. "
                "Stage it again",
                "profile",
            )
        for name in _NUMBERS:
            if type(value.get(name)) is not int or not 0 <= value[name] < 1 << 63:
                _refuse(path, f"{name} must be a number that is not negative, not {value.get(name)!r:.80}", name)
        numbers = {name: value[name] for name in _NUMBERS}
        shard = cls(folder, **numbers, queues=_queues(path, value.get("queues")), limits=limits, fs=fs)
        if shard.largest > limits.max_record_bytes:
            _refuse(
                path,
                f"its largest record has {shard.largest} bytes; the store's segments of {limits.segment_bytes} bytes "
                f"accept {limits.max_record_bytes}",
                "largest",
            )
        if sum(shard.queues.values()) != shard.records:
            _refuse(path, f"its queues get {sum(shard.queues.values())} records, but it has {shard.records}", "queues")
        return shard

    def check(self, progress: Callable[[int], None], remember: int = 0) -> list[Groups] | None:
        """Read and check every record. Calls `progress(bytes)` after each window.

        Returns the groups of the windows, which `windows` always cuts alike, or None for more than `remember` records.
        Raises FormatError about the first fault, and StoreIOError.
        """
        counts: dict[QueueRef, int] = {}
        records = largest = done = 0
        remembered: list[Groups] = []
        buffers = cycle([np.empty(self.window_bytes(), np.uint8).data for _ in range(2)])
        for window in self.windows(lambda _: next(buffers)):
            self._check_heads(window, done)
            groups = by_queue(window)
            self._check_tails(window, groups, done)
            records += len(window.headers)
            largest = max(largest, int(window.headers.size.max()))
            if records <= remember:
                remembered.append(groups)
            for key, amount in zip(groups.keys, groups.counts.tolist(), strict=True):
                counts[key] = counts.get(key, 0) + amount
            done += window.stop
            progress(window.stop)
        said = {key: count for key, count in self.queues.items() if count}
        for name, found, wanted in (
            ("records", records, self.records),
            ("largest", largest, self.largest),
            ("queues", counts, said),
        ):
            if found != wanted:
                _refuse(self.file, f"{name}: shard.json says {wanted!r:.200}, the records are {found!r:.200}", name)
        return remembered if records <= remember else None

    def window_bytes(self) -> int:
        """Return a buffer size that fits any record, and most windows."""
        return max(1, min(self.bytes, max(WINDOW_BYTES, self.largest)))

    def windows(self, take: Callable[[int], memoryview]) -> Iterator[Window]:
        """Yield all records in order, in windows.

        `take(n)` returns the buffer of at least `n` bytes for the next window, which the receiver may change. It is
        called before the previous window is yielded, since the next one is read meanwhile. Raises FormatError if
        records, size or CRC differ from `shard.json`, at the end at the latest. Raises StoreIOError if the file cannot
        be read."""
        with ExitStack() as held:
            fd = _open(self.file, self.fs, "shard")
            held.callback(self.fs.close, fd)
            found = self.fs.size(fd)
            if found != self.bytes:
                _refuse(self.file, f"it has {found} bytes, shard.json says {self.bytes}", "bytes")
            ahead = held.enter_context(Prefetch[int]("mqstore-shard"))
            wanted = self.window_bytes()

            def begin(position: int) -> memoryview:
                buffer = take(wanted)
                room = buffer[: min(wanted, self.bytes - position)]
                ahead.begin(partial(self.fs.read_into, fd, room, position))
                return buffer

            done = crc = 0
            coming = begin(0) if self.bytes else None
            while coming is not None:
                data, length = coming, ahead.result()
                positions, stop = walk(data, 0, length)
                if not len(positions):
                    _refuse(self.file, "no whole record starts here", "record", done)
                coming = begin(done + stop) if done + stop < self.bytes else None
                crc = crc32c(data[:stop], crc)
                yield Window(data, Headers(data, positions), stop)
                done += stop
            if crc != self.crc32c:
                _refuse(self.file, f"its CRC-32C is {crc}, but shard.json says {self.crc32c}: it is damaged", "crc32c")

    def _check_heads(self, window: Window, base: int) -> None:
        """Check the headers of a window as a put would. Raises FormatError."""
        headers = window.headers
        limits = self.limits
        transaction = headers.sys_flag & TRANSACTION_MASK
        for wrong, field, why in (
            (~headers.ok, "record", "its inner lengths do not add up to its size"),
            (headers.size > limits.max_record_bytes, "record", f"it has more than {limits.max_record_bytes} bytes"),
            (headers.body_size > limits.max_body_bytes, "body", f"max_message_size is {limits.max_body_bytes} bytes"),
            ((headers.queue_id < 0) | (headers.queue_id > MAX_QUEUE_ID), "queue_id", "no queue has this id"),
            (headers.checksum != 0, "checksum", "it must be zero"),
            (headers.queue_offset != 0, "queue_offset", "it must be zero, since the queue assigns it"),
            (headers.physical_offset != 0, "physical_offset", "it must be zero, since the log assigns it"),
            (headers.store_timestamp_ms != 0, "store_timestamp", "it must be zero, since the store assigns it"),
            (
                (transaction != 0) & (transaction != TRANSACTION_COMMIT),
                "sys_flag",
                "a prepared or rolled back message cannot be in a queue",
            ),
            (headers.sys_flag & INNER_BATCH != 0, "sys_flag", "a batch in one record cannot be written"),
        ):
            if wrong.any():
                row = int(np.argmax(wrong))
                _refuse(self.file, f"record {row} of this window: {why}", field, base + int(headers.positions[row]))

    def _check_tails(self, window: Window, groups: Groups, base: int) -> None:
        """Check topics and properties of a window. Raises FormatError.
        Refuses invalid topics, and properties that would make a record unreadable: a CRC tail, which the copy would
        invalidate, and fields that are not valid numbers (format#crc-tail, format#verifies)."""
        headers, data = window.headers, window.data
        topics = [topic for topic, _ in groups.keys]
        for topic in set(topics):
            if not is_path_safe(topic):
                _refuse(self.file, f"topic {topic!r:.80} cannot be a folder name", "topic", base)
        tailed = np.flatnonzero(has_crc_tail(data, headers))
        if len(tailed):
            at = base + int(headers.positions[tailed[0]])
            _refuse(self.file, f"property {CRC32} is reserved for the log", "properties", at)
        doubtful = _rows_with_inner(window)
        if SCHEDULE_TOPIC in topics:
            delayed = np.array([topic == SCHEDULE_TOPIC for topic in topics])
            doubtful = np.concatenate((doubtful, np.flatnonzero(delayed[groups.group])))
        starts, sizes = headers.properties_position[doubtful], headers.properties_size[doubtful]
        for row, start, size in zip(doubtful.tolist(), starts.tolist(), sizes.tolist(), strict=True):
            wrong = unreadable_number(topics[groups.group[row]].encode(), bytes(data[start : start + size]))
            if wrong:
                _refuse(self.file, wrong, "properties", base + int(headers.positions[row]))


def _rows_with_inner(window: Window) -> np.NDArray[np.int64]:
    """Return the records whose properties may have one of the two reserved names. Some may be listed twice."""
    sizes = window.headers.properties_size
    # Properties that are longer than their record were refused before.
    properties = collect(window.data, window.headers.properties_position, sizes).tobytes()
    # `in` takes a fraction of the expression's time.
    places = [found.start() for found in _INNER.finditer(properties)] if b"INNER_" in properties else []
    return np.searchsorted(np.cumsum(sizes), np.array(places, np.int64), "right")


def shard_json(
    profile: Profile, *, records: int, size: int, crc: int, largest: int, queues: Mapping[QueueRef, int]
) -> bytes:
    """Return the `shard.json` of `size` bytes of records whose CRC-32C is `crc`."""
    counts: dict[str, dict[str, int]] = {}
    for (topic, queue_id), count in sorted(queues.items()):
        counts.setdefault(topic, {})[str(queue_id)] = count
    value = {"version": 1, "profile": profile, "records": records, "bytes": size, "crc32c": crc, "largest": largest}
    return encode_json({**value, "queues": counts})


def read_note(path: Path, fs: FileSystem, field: str, missing: str = "the file is missing") -> dict[str, Any]:
    """Return the object in a JSON file that a job has written.
    Raises FormatError if the file is missing, does not decode, or has another version than 1. Raises StoreIOError if it
    cannot be read."""
    try:
        value = decode_json(read_json(path, fs))
    except FileNotFoundError:
        _refuse(path, missing, field)
    except FormatError as error:
        raise FormatError(f"{path}: {error}", error.field, error.position) from error
    if value.get("version") != 1:
        _refuse(path, f"version {value.get('version')!r:.80} is not 1, the only supported one", "version")
    return value


def _open(path: Path, fs: FileSystem, field: str) -> int:
    """Open `path` for reading. Raises FormatError if it is missing or not a regular file."""
    try:
        return fs.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        _refuse(path, "the file is missing", field)
    except StoreIOError as error:
        if error.errno not in REFUSED:
            raise
        _refuse(path, str(error.strerror), field)


def _queues(path: Path, value: Any) -> dict[QueueRef, int]:
    queues: dict[QueueRef, int] = {}
    if not isinstance(value, dict):
        _refuse(path, f"queues must be an object, not {value!r:.80}", "queues")
    for topic, counts in value.items():
        if not is_path_safe(topic):  # not the rules for new messages, since these may be restored ones
            _refuse(path, f"topic {topic!r:.80} cannot be a folder name", "topic")
        if not isinstance(counts, dict):
            _refuse(path, f"the queues of {topic!r} must be an object, not {counts!r:.80}", "queues")
        for text, count in counts.items():
            if not (text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= MAX_QUEUE_ID):
                _refuse(path, f"queue {text!r:.80} of {topic!r} must be in 0..{MAX_QUEUE_ID}", "queues")
            if type(count) is not int or count < 0:
                _refuse(path, f"queue {text} of {topic!r} has {count!r:.80} records", "queues")
            queues[QueueRef(topic, int(text))] = count
    return queues


def _refuse(path: Path, why: str, field: str, position: int = 0) -> NoReturn:
    raise FormatError(f"{path}: {why}", field, position)
