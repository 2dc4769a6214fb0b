"""State of a store at one time, while others use it: the files that a snapshot copies (`copy.py`).

    first    the small files, read to memory: manifest, checkpoint, `config/`, `local_offsets/`. Waiting bundles of the
             inbox and the timer's files are copied to a folder aside
    then     the end of the log: after the last whole record, or at the start of an unfinished bulk append
    again    the files that must not have changed in between, or everything starts again: the tables of topics and
             groups and the record of bulk appends. Their identity is compared, since a change may have been undone
    last     the large files, without hurry: queues, and the segments below that end. The oldest segments are held open,
             so that retention cannot remove them. Then `has_changed` checks whether another process has opened the
             store since, or a writer that was opening it has cut the log

Committed offsets are as old as the log or older, as after any crash: messages may be redelivered, but none is skipped.
A process that has the store open for writing saves everything, and pauses its services until the end of the log is
known. Then the log has nothing of theirs that the small files do not have, such as a delivered delayed message. A topic
that a record names is in the table. A bundle is recorded as appended, or it waits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from mqstore.clock import SYSTEM_CLOCK
from mqstore.errors import FormatError, StoreBusyError
from mqstore.files.filesystem import FileSystem, free_descriptors
from mqstore.files.jsonfile import JSON_BYTES_MAX, FileState, decode_json, encode_json, state_of
from mqstore.files.lock import writer_alive
from mqstore.files.readonly_fs import QUIET
from mqstore.files.segment import Segment, segment_start
from mqstore.files.segments import SegmentRun
from mqstore.layout.checkpoint import FILE_BYTES, decode, encode
from mqstore.log.bulk.inbox import inbox_state
from mqstore.log.bulk.txn import TXN_FILE, IntentWatch, TxnState, doubt
from mqstore.log.directory import manifest as manifests
from mqstore.log.recovery.scanning.scanner import Bad, End, scan_log, used_end
from mqstore.options import StoreConfig

_PATIENCE_S: Final = 10.0
_PAUSE_S: Final = 0.02
_TAIL_BYTES: Final = 4096
_HELD: Final = 256
"""Maximum number of segments held open. While these are copied, retention hardly reaches later ones."""
_SMALL: Final = ("config", "local_offsets")
_TIMER: Final = ("timerlog", "timerwheel")
_BULK: Final = ("batchconsumequeue", "consumequeue", "consumequeue_ext")  # units may point into the last of these
_DEFINITIONS: Final = ("config/topics.json", "config/subscriptionGroup.json", TXN_FILE)
_UNTOLD: Final = frozenset(
    {*("lock", "tmp", "index", "_staging", "inbox", "serve.json", "serve.sock"), "abort.bak", "checkpoint.bak"}
)
"""Names of files that nobody needs, that are rebuilt, or that have a separate rule."""


Saved = Callable[[Callable[[], "PointInTime | None"]], "PointInTime | None"]
"""Function that saves everything, and returns the result of its argument before anything else is done."""


class Found(NamedTuple):
    """File to copy. `name` is its path within the store."""

    name: str
    length: int
    rocksdb: bool


@dataclass(frozen=True, slots=True)
class PointInTime:
    """State of a store at one time.

    `live` is true if a writer had the store open. `small` has contents by name. `end` is the end of the log, or without
    a writer the end of its files. `segments` are those of the log, ascending. `held` has descriptors of the first ones,
    by start. `bundles` are waiting ones. `aside` are the files that were copied meanwhile."""

    live: bool
    small: Mapping[str, bytes]
    end: int
    segments: tuple[Segment, ...]
    held: Mapping[int, int]
    bundles: tuple[str, ...]
    aside: tuple[Found, ...]
    identity: tuple[object, ...]
    tail: bytes = b""
    """Last bytes before the end of the log, if there is a writer."""
    written: int = 0
    """`end`, or without a writer the end of the records. The next writer continues there or before."""

    def length_of(self, segment: Segment) -> int | None:
        """Return the number of bytes of a segment that count, or None for its whole file."""
        return min(segment.length, self.end - segment.start) if self.live else None

    def is_done(self, segment: Segment) -> bool:
        """Return True if a segment is full and a later one has records, so that it is never written again."""
        return segment is not self.segments[-1] and segment.length == segment.size and segment.end <= self.written


class Original:
    """The store at `root`. Opening it raises the errors of opening for reading."""

    folders: Final = ("commitlog", "index", *_SMALL, *_TIMER, *_BULK)
    """Names of the folders that contain its files."""

    def __init__(self, root: Path, config: StoreConfig, saved: Saved | None = None) -> None:
        """`saved` wraps each look at the store: `Broker.saved` of the process that has it open for writing."""
        self.root = root
        self._saved = saved
        self.left: list[str] = []
        """A sentence for each thing in the directory that is not copied and that a user may miss."""
        self._fs: FileSystem = QUIET
        self.manifest = manifests.resolve(
            root, writer=False, create=False, profile=None, config=config, clock=SYSTEM_CLOCK, fs=QUIET
        )
        config = replace(config, retention=None)
        if not self.manifest.has_file:  # otherwise only the index files, which are not copied, show these sizes
            slots, entries = self.manifest.index_slots, self.manifest.index_entries
            config = replace(config, index_slots=slots, index_entries=entries)
        self.config = config
        """Configuration for opening the copy."""
        self._run = SegmentRun(root / "commitlog", self.manifest.commitlog_segment_bytes, fs=QUIET)
        self._intents = IntentWatch(root, QUIET)
        self._odd_before: frozenset[tuple[str, bytes]] = frozenset()

    def moment(self, opened: ExitStack, bring: Callable[[list[Found]], None] | None = None) -> PointInTime:
        """Examine the store until nothing that matters has changed meanwhile. Raises StoreBusyError.
        `bring` copies the files that must be copied meanwhile, again for each attempt. None copies nothing. `opened`
        closes the files that are held open."""
        started = time.monotonic()
        while True:
            with ExitStack() as held:
                # Bundles may be large, so copy them before services pause. A copied bundle is not copied again.
                if bring is not None and self._saved is not None:
                    with suppress(FileNotFoundError):
                        bring([*self._bundles(inbox_state(self.root, self._fs).waiting)])
                look = partial(self._look, held, bring)
                if (found := look() if self._saved is None else self._saved(look)) is not None:
                    opened.push(held.pop_all())
                    return found
            if (took := time.monotonic() - started) > _PATIENCE_S:
                raise StoreBusyError(
                    f"{self.root}: topics, groups or bulk appends changed during every attempt for {took:.0f} s. "
                    "Try again when fewer changes are made"
                )
            time.sleep(_PAUSE_S)

    def _look(self, opened: ExitStack, bring: Callable[[list[Found]], None] | None) -> PointInTime | None:
        identity = self._identity()  # first: a writer that comes later is seen below, or changes it
        live = writer_alive(self.root, self._fs)
        definitions = [self.identity_of(name) for name in _DEFINITIONS]
        try:
            small = dict(self._read_small())
        except FileNotFoundError:
            return None
        odd, before = frozenset(self._odd(small)), self._odd_before
        if odd - before:
            self._odd_before = odd
            return None
        # A later bundle was not promised. One that is appended meanwhile changes the record of bulk appends.
        bundles = inbox_state(self.root, self._fs).waiting
        aside = [*self._aside(bundles)]
        try:
            if bring is not None:
                bring(aside)
        except FileNotFoundError:
            return None
        intent = self._intents.pending()
        pending = intent if live else None
        if pending is not None and self.manifest.profile == "rocketmq":
            # A Java broker may have continued after a killed mqstore. Then its records stay, as in an opening.
            self._run.limit = None
            self._run.load()
            if doubt(pending, self._run, self.manifest.checksum, None, from_backup=False):
                pending = None
        self._run.limit = None if pending is None else pending.start
        self._run.load()
        if pending is not None and TXN_FILE in small:
            # The log of the copy ends where the bulk append started, so there is nothing to undo.
            state = TxnState.from_json(decode_json(small[TXN_FILE]))
            small[TXN_FILE] = encode_json(state._replace(intent=None).as_json())
        if (noted := decode(self._read("checkpoint") or b"").log_start) is not None:
            # The log start must match the listing: retention saves it before it deletes segments.
            small["checkpoint"] = encode(replace(decode(small.get("checkpoint", b"")), log_start=noted)).ljust(
                FILE_BYTES, b"\0"
            )
        try:
            written = self._written_end(small.get("checkpoint", b""))
            end = written if live else self._run.end
            written = written if live or intent is None else min(written, intent.start)
            segments = tuple(segment for segment in self._run.segments() if segment.start < end)
            tail = self._tail(segments[-1], end) if live and segments else b""
            held = self._hold(segments, opened)
        except FileNotFoundError:
            return None
        if definitions != [self.identity_of(name) for name in _DEFINITIONS]:
            return None
        return PointInTime(live, small, end, segments, held, bundles, tuple(aside), identity, tail, written)

    @staticmethod
    def _odd(small: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
        """Yield the backups in a state that may be temporary, with their content.
        A Java broker writes a backup in place, and removes a file before it renames the new one to it."""
        for name, content in small.items():
            if name.endswith(".bak"):
                try:
                    decode_json(content)
                except FormatError:
                    yield name, content
                else:
                    if name.removesuffix(".bak") not in small:
                        yield name, b""

    def _hold(self, segments: tuple[Segment, ...], opened: ExitStack) -> dict[int, int]:
        held = {}
        for segment in segments[: min(_HELD, free_descriptors() // 8)]:
            held[segment.start] = fd = self._fs.open(segment.path, os.O_RDONLY)
            opened.callback(self._fs.close, fd)
        return held

    def has_changed(self, moment: PointInTime) -> bool:
        """Return True if the log may be another one now.
        The cause is another process that opened the store for writing since, or a writer that was still opening it and
        cut the log."""
        came = not moment.live and writer_alive(self.root, self._fs)
        compared = slice(2 if moment.live else None)  # a writer changes the other two all the time
        return came or self._identity()[compared] != moment.identity[compared] or self._is_cut(moment)

    def _is_cut(self, moment: PointInTime) -> bool:
        if not moment.tail:
            return False
        last = moment.segments[-1]
        try:
            return self._tail(last, moment.end) != moment.tail
        except FileNotFoundError:  # retention removes from the front
            self._run.limit = None
            self._run.load()
            return self._run.min_offset <= last.start

    def _tail(self, segment: Segment, end: int) -> bytes:
        at = min(end, segment.end) - segment.start
        with self._fs.opened(segment.path, os.O_RDONLY) as fd:
            return self._fs.pread(fd, min(at, _TAIL_BYTES), max(0, at - _TAIL_BYTES))

    def _identity(self) -> tuple[object, ...]:
        """Return the lock file, which a new writer changes first, and the files that show an earlier writer."""
        return self.identity_of("lock"), self._read("lock"), self._read("abort"), self._read("checkpoint")

    def identity_of(self, name: str) -> FileState | None:
        """Return the identity of the file `name`, or None if it is gone."""
        with suppress(FileNotFoundError):
            return state_of(self.root / name, self._fs)
        return None

    def _written_end(self, checkpoint: bytes) -> int:
        """Return the end of the last whole record of a log with a writer. The next one may be half-written."""
        segments = self._run.segments()
        # The next segment may exist already, and be empty. A Java broker creates it long before.
        while len(segments) > 1 and self._is_empty(segments[-1]):
            del segments[-1]
        if not segments:
            return 0
        last = segments[-1]
        flushed = decode(checkpoint).flushed
        starts = [last.start] if flushed is None or not last.start < flushed < last.end else [flushed, last.start]
        for start in starts:
            end = start
            for event in scan_log(self._run, start, self.manifest.checksum):
                if isinstance(event, Bad) and event.start == start != last.start:
                    break  # the checkpoint is wrong, or the disk is damaged
                end = event.position if isinstance(event, End) else event.end
            else:
                return end
        return end

    def _is_empty(self, segment: Segment) -> bool:
        return not any(self._run.mapping(segment)[:8]) and not used_end(self._run, segment)

    def bulk(self) -> Iterator[Found]:
        """Yield the files that may be copied without hurry, without the segments."""
        for folder in _BULK:
            yield from self._files(folder)
        for folder in _SMALL:
            yield from (each for each in self._files(folder) if each.rocksdb)

    def log_left(self, moment: PointInTime) -> None:
        """List the things in the directory that are not copied."""
        known = {*_UNTOLD, *_SMALL, *_TIMER, *_BULK, "commitlog", *moment.small}
        for name in self._fs.scandir(self.root):
            if name not in known:
                self._leave(f"{name}: not a part of the store")
        if (log := self.root / "commitlog").is_dir():
            for name in self._fs.scandir(log):
                if segment_start(name) is None and f"commitlog/{name}" not in moment.small:
                    self._leave(f"commitlog/{name}: not a segment")
        if refused := inbox_state(self.root, self._fs).refused:
            self._leave(f"inbox/refused: {len(refused)} bundles that could not be appended")

    def _read_small(self) -> Iterator[tuple[str, bytes]]:
        """Yield the small files: (name, content).
        Raises FileNotFoundError if a listed file is gone. Its content may have moved to another one that was read
        before."""
        listed = []
        for folder in _SMALL:
            listed += [each.name for each in self._files(folder) if not (each.rocksdb or each.name.endswith(".tmp"))]
        for name in (manifests.MANIFEST, f"{manifests.MANIFEST}.bak", "checkpoint", "abort", manifests.GUARD):
            content = self._read(name)
            if content is not None:
                yield name, content
        for name in listed:
            yield name, self._fs.read_whole(self.root / name, JSON_BYTES_MAX)

    def _read(self, name: str) -> bytes | None:
        with suppress(FileNotFoundError):
            return self._fs.read_whole(self.root / name, JSON_BYTES_MAX)
        return None

    def _bundles(self, names: tuple[str, ...]) -> Iterator[Found]:
        for name in names:
            yield from self._files(f"inbox/{name}")

    def _aside(self, bundles: tuple[str, ...]) -> Iterator[Found]:
        yield from self._bundles(bundles)
        yield from self._files("timerlog")
        # mqstore rebuilds its own at each opening, but a Java broker trusts the existing one.
        if self.manifest.profile == "rocketmq" and (self.root / "timerwheel").is_file():
            yield Found("timerwheel", self._fs.size(self.root / "timerwheel"), False)

    def _files(self, folder: str, rocksdb: bool = False) -> Iterator[Found]:
        """Yield the files below a folder, except below links in it, which may form a cycle.
        Files of RocksDB are left out while a broker has them open, since only RocksDB may copy them then."""
        path = self.root / folder
        if not path.is_dir():
            return
        try:
            names = self._fs.scandir(path)
            files = self._fs.scandir_files(path)
            folders = self._fs.scandir_directories(path)
        except FileNotFoundError:
            return
        taken = {*folders, *(name for name, _ in files)}
        for name in names:
            if name not in taken and os.path.lexists(path / name):  # and not removed meanwhile
                self._leave(f"{folder}/{name}: neither a file nor a folder")
        rocksdb = rocksdb or any(name == "CURRENT" for name, _ in files)
        if rocksdb and writer_alive(self.root, self._fs):
            self._leave(f"{folder}/: RocksDB, which a broker has open")
            return
        for name in folders:
            if os.path.islink(path / name):
                self._leave(f"{folder}/{name}: a link to a folder")
            else:
                yield from self._files(f"{folder}/{name}", rocksdb)
        for name, length in files:
            yield Found(f"{folder}/{name}", length, rocksdb)

    def _leave(self, sentence: str) -> None:
        if sentence not in self.left:
            self.left.append(sentence)
