"""Carving: whole records from any bytes, such as a disk image, into a new store.

    source      blocks are searched for the magic of a record, at any byte; a record counts if its checksum is right
    place       it is written at its own physical offset in DIR/commitlog, with its queue offset: no byte changes
    recovery    makes queues, index and checkpoint; places without a record are damage that is known from then on
    rest        a record whose place is taken by another one, or whose queue offset contradicts its neighbours, is
                appended at the end, with new offsets

So records of the engine (half messages, delays, retries) go as they are, and references between records stay right. A
record inside the body of a whole record is part of that body, and is not searched for. The same bytes with the same
physical offset are one record. A source is read through windows: memory holds one window, the ranges of the log that
are filled, and four numbers for each record that is appended.
"""

from __future__ import annotations

import os
import stat
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from mqstore.broker.background.context import open_tables
from mqstore.broker.tables.configchecks import CONFIG_CHECKS
from mqstore.broker.tables.names import POP_LOG_TOPIC
from mqstore.errors import ConfigError, InvalidMessageError, raise_os_error
from mqstore.files.filesystem import REAL
from mqstore.files.readonly_fs import QUIET
from mqstore.files.segment import segment_name
from mqstore.layout.arrays.dispatch import LIGHT_PREFIX, topics_of
from mqstore.layout.arrays.scan import Headers, whole_runs
from mqstore.layout.bodyref import is_reference
from mqstore.layout.consumequeue import is_message
from mqstore.layout.record import Checksum
from mqstore.log.message import Message, UnitBatch
from mqstore.log.recovery.recover import RecoverOptions
from mqstore.log.recovery.repair import recover_store
from mqstore.log.store import MessageStore
from mqstore.log.writing.log_tail import QueueRef
from mqstore.log.writing.writer import fields_of
from mqstore.native import crc32c
from mqstore.options import Profile, StoreConfig

_WINDOW: Final = 64 << 20
LARGEST: Final = 16 << 20
"""Size of records that are surely found: windows overlap by this. Larger ones are found if a window has them whole."""
_PIECE: Final = 64 << 10
"""Length of a piece that counts as zeros if a device cannot read all bytes."""
_SPARE_SEGMENTS: Final = 1024
"""Segments that hostile records, far from each other, may have beyond twice those that the sources would fill."""
_PROFILES: Final[dict[Profile, tuple[Checksum, int]]] = {
    "mqstore": ("crc32c-record", 64 << 20),
    "rocketmq": ("crc32-body", 1 << 30),
}
"""Checksum of a profile, and size of the segments of a new store."""

Progress = Callable[[int, int], None]


def carve(
    sources: Sequence[str | os.PathLike[str]],
    into: str | os.PathLike[str],
    *,
    profile: Profile | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Put each whole record in the bytes of `sources`, files or block devices, into a new store at `into`, once.

    Only records of `profile` are found. None: those of "mqstore" if there are any, else those of "rocketmq". Returns
    the counts that `mqstore recover --carve --json` prints. With `dry_run` nothing is written, and a record at a place
    that is taken counts as a duplicate. `progress` is called with (bytes read, all bytes). Raises ConfigError for a
    folder that is not empty and for a source of another kind, StoreIOError, and StoreFullError, which leaves a part of
    the store.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with mqstore.open(f"{folder}/mq") as store:
    ...         _ = store.put_many("orders", [b"a", b"b"], queue_id=0)
    ...     found = carve([f"{folder}/mq/commitlog/{0:020d}"], f"{folder}/new")
    ...     with mqstore.open(f"{folder}/new", "r") as store:
    ...         found["found"], [message.body for message in store.read("orders", 0, 0)]
    (2, [b'a', b'b'])
    """
    target = Path(into)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} must be an empty folder, or not exist")
    with ExitStack() as stack:
        opened = [_Source(Path(each), stack) for each in sources]
        for name in [profile] if profile else _PROFILES:
            work = _Carving(opened, target, name, dry_run=dry_run)
            try:
                work.read(progress)
                if work.found and not dry_run:
                    work.finish()
            finally:
                work.close()
            if work.found:
                break
        return work.as_dict()


class _Source:
    """A file or a block device."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        self.unreadable = 0
        try:
            mode = os.stat(path).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
                raise ConfigError(f"{path} is neither a file nor a block device")
            # A regular file keeps its access time. The file system that does this refuses devices.
            self.fd = QUIET.open(path, os.O_RDONLY) if stat.S_ISREG(mode) else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(QUIET.close if stat.S_ISREG(mode) else os.close, self.fd)
            self.bytes = os.lseek(self.fd, 0, os.SEEK_END)
        except OSError as error:
            raise_os_error(error, path, "open")

    def read(self, at: int, length: int) -> bytes:
        """Return the bytes of a range. Those that the device cannot read are zeros."""
        try:
            return os.pread(self.fd, length, at)
        except OSError:
            if length <= _PIECE:
                self.unreadable += length
                return bytes(length)
        return b"".join(self.read(each, min(_PIECE, at + length - each)) for each in range(at, at + length, _PIECE))


class _Carving:
    """One pass over the sources, with the checksum of one profile."""

    def __init__(self, sources: Sequence[_Source], target: Path, profile: Profile, *, dry_run: bool) -> None:
        self._sources, self._target, self._profile, self._dry_run = sources, target, profile, dry_run
        self._checksum, self._size = _PROFILES[profile]
        self._starts: list[int] = []
        self._ends: list[int] = []
        """Ranges of the log that are filled, ascending. Adjacent ones are one."""
        self._later = array("q")
        """Records to append: physical offset, number of the source, position, size."""
        self._fd = self._open = -1
        self._segments = set[int]()
        """Numbers of the segments that have records."""
        self._most = _SPARE_SEGMENTS + 2 * sum(source.bytes for source in sources) // self._size
        self.found = self.duplicates = self.damaged = self.appended = self.listed = 0
        self.refused = Counter[str]()
        self.topics: dict[str, Counter[str]] = {}

    # -- reading ----------------------------------------------------------------------------------------------------

    def read(self, progress: Progress | None) -> None:
        """Place the records of all sources."""
        total, before = sum(source.bytes for source in self._sources), 0
        for number, source in enumerate(self._sources):
            source.unreadable = at = 0
            while at < source.bytes:
                data = memoryview(source.read(at, min(_WINDOW, source.bytes - at)))
                stop = len(data) if at + len(data) >= source.bytes else len(data) - LARGEST
                end = stop
                for run in whole_runs(data, stop, self._checksum):
                    if run is None:
                        self.damaged += 1
                        continue
                    self._take(number, at, data, run)
                    end = max(stop, int(run.positions[-1]) + int(run.size[-1]))
                at += end
                if not len(data):  # a file that was shortened
                    break
                if progress is not None:
                    progress(before + at, total)
            before += source.bytes

    def _take(self, number: int, base: int, data: memoryview, run: Headers) -> None:
        """Place consecutive records. `base` is the position of `data` in its source."""
        if not self.found and not self._dry_run:
            self._create()
        positions, sizes = run.positions.tolist(), run.size.tolist()
        first, stop = positions[0], positions[-1] + sizes[-1]
        place = int(run.physical_offset[0])
        if self._is_free(place, place + stop - first):
            kept = len(positions)
            self._put(place, data[first:stop])
        else:
            kept = 0
            for at, size in zip(positions, sizes, strict=True):
                kept += self._take_one(number, base, place + at - first, data[at : at + size], at)
        self.found += len(positions)
        names, topic = topics_of(data, run)
        for index, size in zip(topic.tolist(), sizes, strict=True):
            self.topics.setdefault(names[index], Counter()).update(messages=1, bytes=size)

    def _take_one(self, number: int, base: int, place: int, record: memoryview, at: int) -> bool:
        if self._is_free(place, place + len(record)):
            self._put(place, record)
            return True
        index = bisect_right(self._starts, place) - 1
        inside = index >= 0 and place + len(record) <= self._ends[index]
        if inside and (self._dry_run or self._present(place, len(record)) == record):
            self.duplicates += 1
        else:
            self._later.extend((place, number, base + at, len(record)))
        return False

    # -- the new log ------------------------------------------------------------------------------------------------

    def _is_free(self, start: int, stop: int) -> bool:
        """Return True if records of [start, stop) may be written at their place, in one segment."""
        if start < 0 or stop >= 1 << 62 or start // self._size != (stop - 1) // self._size:
            return False
        index = bisect_right(self._starts, start)
        fits = (not index or self._ends[index - 1] <= start) and (
            index == len(self._starts) or stop <= self._starts[index]
        )
        return fits and (len(self._segments) < self._most or start // self._size in self._segments)

    def _put(self, place: int, data: memoryview) -> None:
        stop, index = place + len(data), bisect_right(self._starts, place)
        self._segments.add(place // self._size)
        joins_before = bool(index) and self._ends[index - 1] == place
        joins_after = index < len(self._starts) and self._starts[index] == stop
        begin = index - joins_before
        low = self._starts[begin] if joins_before else place
        high = self._ends[index] if joins_after else stop
        self._starts[begin : index + joins_after] = [low]
        self._ends[begin : index + joins_after] = [high]
        if not self._dry_run:
            self._segment(place // self._size * self._size)
            REAL.pwrite(self._fd, data, place % self._size)

    def _present(self, place: int, size: int) -> bytes:
        """Return bytes that were written before. They may begin in one segment alone."""
        self._segment(place // self._size * self._size)
        return REAL.pread(self._fd, min(size, self._size - place % self._size), place % self._size)

    def _segment(self, start: int) -> None:
        """Open a segment, a new one with holes."""
        if self._open == start:
            return
        self.close()
        path = self._target / "commitlog" / segment_name(start)
        self._fd, self._open = REAL.open(path, os.O_RDWR | os.O_CREAT, StoreConfig().file_mode), start
        REAL.truncate_sparse(self._fd, self._size)

    def close(self) -> None:
        if self._fd >= 0:
            REAL.close(self._fd)
        self._fd = self._open = -1

    def _create(self) -> None:
        MessageStore(self._target, profile=self._profile, config=StoreConfig(segment_bytes=self._size)).close()
        REAL.mkdir(self._target / "commitlog", exist_ok=True)
        REAL.unlink(self._target / "checkpoint", missing_ok=True)  # it is that of an empty log

    def finish(self) -> None:
        """Make the store of the placed records, and append the others."""
        self.close()
        report = recover_store(self._target, RecoverOptions(), json_checks=CONFIG_CHECKS)
        # By their old places, so in the order of their queues, in whatever order the sources were given.
        later = sorted(zip(*(self._later[each::4] for each in range(4)), strict=True))
        seen = set[tuple[int, int, int]]()
        with MessageStore(self._target, create=False) as store:
            for _, number, at, size in later:
                self._append(store, self._sources[number].read(at, size), seen)
            # Records whose queue offset contradicts that of their neighbours, such as those of another store.
            for each in report.findings:
                if each.kind == "bad_record" and each.file.startswith("commitlog/") and each.length <= LARGEST:
                    place = int(os.path.basename(each.file)) + each.position
                    self._append(store, self._present(place, each.length), seen)
            store.dispatch()
            if store.queue_table.of(POP_LOG_TOPIC):  # else the table would count as lost
                open_tables(store).topics.ensure(POP_LOG_TOPIC)
            self.listed = sum(
                int(is_message(units).sum())
                for queue in store.queue_table
                if not queue.topic.startswith(LIGHT_PREFIX)
                for _, units in queue.held(queue.min_offset, queue.max_offset)
            )

    def _append(self, store: MessageStore, record: bytes, seen: set[tuple[int, int, int]]) -> None:
        run = next(whole_runs(record, 1, self._checksum), None) if record else None
        if run is None:  # no record is here, or no more
            return
        key = int(run.physical_offset[0]), len(record), crc32c(record)
        if key in seen:
            self.duplicates += 1
            return
        seen.add(key)
        [topic], _ = topics_of(memoryview(record), run)
        message = Message(UnitBatch(QueueRef(topic, int(run.queue_id[0])), record, b"", 0), 0, 0)
        if is_reference(message.sys_flag):
            self.refused["message whose body is in another record"] += 1
            return
        options = fields_of(message)
        options["prepared_transaction_offset"], options["copied"] = message.prepared_transaction_offset, True
        properties, body = message.stored_properties(), bytes(message.body_view)
        try:
            store.append(topic, message.queue_id, body, properties=properties, **options)
            self.appended += 1
        except (InvalidMessageError, ConfigError) as error:
            self.refused[type(error).__name__] += 1

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        later = self.appended if not self._dry_run else len(self._later) // 4
        return {
            "into": os.fspath(self._target),
            "profile": self._profile,
            "dry_run": self._dry_run,
            "sources": [
                {"path": os.fspath(each.path), "bytes": each.bytes, "unreadable_bytes": each.unreadable}
                for each in self._sources
            ],
            "found": self.found,
            "duplicates": self.duplicates,
            "damaged": self.damaged,
            "renumbered": later,
            "refused": dict(self.refused),
            "unlisted": 0 if self._dry_run else self.found - self.duplicates - self.refused.total() - self.listed,
            "topics": {name: dict(counts) for name, counts in sorted(self.topics.items())},
        }
