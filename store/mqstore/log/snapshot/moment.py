"""What a store is at one moment, while others use it: what of its files a copy takes (see `take.py`).

    first    everything small, read to memory: manifest, checkpoint, `config/`, `local_offsets/`; and copied to a folder
             aside: the bundles that wait in the inbox, the timer's files
    then     where the log ends: behind the last whole record, or where a splice under way began
    again    what must not have changed in between, else all of it once more: the tables of topics and groups and the
             record of splices, by the identity of their files, since what was done may be undone
    and then there is time for the bulk: queues, and the segments below that end, the oldest of which are held open, so
             that retention takes none. Behind it `has_changed` tells whether somebody else has opened the store since,
             or who was just opening it has cut the log

Progress is as old as the log or older, as after any crash: what it lags behind comes again, nothing is skipped. A topic
that a record names is in the table; a bundle is recorded as in, or waits.

Only looks at the store.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from mqstore.clock import SYSTEM_CLOCK
from mqstore.errors import FormatError, StoreBusyError
from mqstore.files.filesystem import FileSystem
from mqstore.files.jsonfile import JSON_BYTES_MAX, decode_json, encode_json
from mqstore.files.limit import free_descriptors
from mqstore.files.lock import writer_alive
from mqstore.files.quiet import QUIET
from mqstore.files.segment import Segment, segment_start
from mqstore.files.segments import SegmentRun
from mqstore.layout.checkpoint import FILE_BYTES, decode, encode
from mqstore.log import manifest as manifests
from mqstore.log.bulk.inbox import inbox_state
from mqstore.log.bulk.txn import TXN_FILE, IntentWatch, TxnState, doubt
from mqstore.log.recovery.scanner import Bad, End, scan_log, used_end
from mqstore.options import StoreConfig

__all__ = ["Found", "Moment", "Original"]

_PATIENCE_S: Final = 10.0
_PAUSE_S: Final = 0.02
_TAIL_BYTES: Final = 4096
_HELD: Final = 256
"""Segments held open: while these are copied retention will hardly come to the next."""
_SMALL: Final = ("config", "local_offsets")
_TIMER: Final = ("timerlog", "timerwheel")
_BULK: Final = ("batchconsumequeue", "consumequeue", "consumequeue_ext")  # units lead into the last of these
_DEFINITIONS: Final = ("config/topics.json", "config/subscriptionGroup.json", TXN_FILE)
_UNTOLD: Final = frozenset(
    {*("lock", "tmp", "index", "_staging", "inbox", "serve.json", "serve.sock"), "abort.bak", "checkpoint.bak"}
)
"""What nobody misses, is made anew, or has a rule of its own."""


class Found(NamedTuple):
    """A file. `name`: its path within the store."""

    name: str
    length: int
    rocksdb: bool


@dataclass(frozen=True, slots=True)
class Moment:
    """`live`: somebody had the store open for writing. `small`: contents by name. `end`: where the log ends; of a store
    without a writer where its files do. `segments`: those that hold it, ascending; `held`: descriptors of the first of
    them, by start. `bundles`: those that wait. `aside`: what was copied while looking."""

    live: bool
    small: Mapping[str, bytes]
    end: int
    segments: tuple[Segment, ...]
    held: Mapping[int, int]
    bundles: tuple[str, ...]
    aside: tuple[Found, ...]
    identity: tuple[object, ...]
    tail: bytes = b""
    """Of a log that is being written: what lies before its end."""
    written: int = 0
    """`end`, or of a store without a writer where records end in its files: the next writer goes on there or before."""

    def length_of(self, segment: Segment) -> int | None:
        """How much of a segment counts; None: whatever its file holds."""
        return min(segment.length, self.end - segment.start) if self.live else None

    def is_done(self, segment: Segment) -> bool:
        """Whether a segment is whole, and has one behind it that records have come to: nobody writes to it any more."""
        return segment is not self.segments[-1] and segment.length == segment.size and segment.end <= self.written


class Original:
    """The store at `root`. Opening it raises what opening for reading does."""

    folders: Final = ("commitlog", "index", *_SMALL, *_TIMER, *_BULK)
    """The names that its files lie under."""

    def __init__(self, root: Path, config: StoreConfig) -> None:
        self.root = root
        self.left: list[str] = []
        """A sentence for each thing in the directory that is not taken and that somebody may miss."""
        self._fs: FileSystem = QUIET
        self.manifest = manifests.resolve(
            root, writer=False, create=False, profile=None, config=config, clock=SYSTEM_CLOCK, fs=QUIET
        )
        config = replace(config, retention=None)
        if not self.manifest.has_file:  # the index files alone tell their shape, and they are not copied
            slots, entries = self.manifest.index_slots, self.manifest.index_entries
            config = replace(config, index_slots=slots, index_entries=entries)
        self.config = config
        """For who opens the copy."""
        self._run = SegmentRun(root / "commitlog", self.manifest.commitlog_segment_bytes, fs=QUIET)
        self._intents = IntentWatch(root, QUIET)
        self._odd_before: frozenset[tuple[str, bytes]] = frozenset()

    # -- looking ----------------------------------------------------------------------------------------------------

    def moment(self, opened: ExitStack, bring: Callable[[list[Found]], None] | None = None) -> Moment:
        """Look until nothing that matters changed from the beginning of the look to its end. `bring` copies what has to
        be copied while it lasts, with every look anew; None: nothing is copied. `opened` closes what is held open.
        Raises StoreBusyError."""
        begun = time.monotonic()
        while True:
            with ExitStack() as held:
                if (found := self._look(held, bring)) is not None:
                    opened.push(held.pop_all())
                    return found
            if (took := time.monotonic() - begun) > _PATIENCE_S:
                raise StoreBusyError(
                    f"{self.root}: its topics, groups or splices have changed whenever they were looked at, for "
                    f"{took:.0f} s: try again when it is calmer"
                )
            time.sleep(_PAUSE_S)

    def _look(self, opened: ExitStack, bring: Callable[[list[Found]], None] | None) -> Moment | None:
        identity = self._identity()  # first: who comes behind it is seen here, or changes it
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
        # One that comes later had not been promised; one that is taken in changes the record of splices.
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
            # Of a killed mqstore's, when a Java broker has gone on behind it: its records stay, as at an opening.
            self._run.limit = None
            self._run.load()
            if doubt(pending, self._run, self.manifest.checksum, None, from_backup=False):
                pending = None
        self._run.limit = None if pending is None else pending.start
        self._run.load()
        if pending is not None and TXN_FILE in small:
            # The log ends where that began, so in the copy nothing of it is to be undone.
            state = TxnState.from_json(decode_json(small[TXN_FILE]))
            small[TXN_FILE] = encode_json(replace(state, intent=None).as_json())
        if (noted := decode(self._read("checkpoint") or b"").log_start) is not None:
            # As of the listing, since retention moves the note before it deletes segments.
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
        return Moment(live, small, end, segments, held, bundles, tuple(aside), identity, tail, written)

    @staticmethod
    def _odd(small: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
        """What may be otherwise in a moment: a Java broker writes a backup in place, and removes a file before it
        renames the new one to it."""
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

    def has_changed(self, moment: Moment) -> bool:
        """Whether somebody else has opened the store for writing since, or who had it was still opening it, and has cut
        the log: what is there may be another log by now."""
        came = not moment.live and writer_alive(self.root, self._fs)
        told_by = slice(2 if moment.live else None)  # a writer changes the others all the time
        return came or self._identity()[told_by] != moment.identity[told_by] or self._is_cut(moment)

    def _is_cut(self, moment: Moment) -> bool:
        if not moment.tail:
            return False
        last = moment.segments[-1]
        try:
            return self._tail(last, moment.end) != moment.tail
        except FileNotFoundError:  # retention takes from the front
            self._run.limit = None
            self._run.load()
            return self._run.min_offset <= last.start

    def _tail(self, segment: Segment, end: int) -> bytes:
        at = min(end, segment.end) - segment.start
        with self._fs.opened(segment.path, os.O_RDONLY) as fd:
            return self._fs.pread(fd, min(at, _TAIL_BYTES), max(0, at - _TAIL_BYTES))

    def _identity(self) -> tuple[object, ...]:
        """What a writer that comes changes first: the file that it locks, twice. Then what shows one that was there."""
        return self.identity_of("lock"), self._read("lock"), self._read("abort"), self._read("checkpoint")

    def identity_of(self, name: str) -> tuple[int, int, int] | None:
        """Of what bears a name; None when it is gone."""
        with suppress(FileNotFoundError):
            found = self._fs.stat(self.root / name)
            return found.st_ino, found.st_mtime_ns, found.st_size
        return None

    def _written_end(self, checkpoint: bytes) -> int:
        """Behind the last whole record of a log that somebody is writing: at worst the next one is half there."""
        segments = self._run.segments()
        # The next one may be there already; a Java broker makes it long before.
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
                    break  # the checkpoint is wrong, or the disk is
                end = event.position if isinstance(event, End) else event.end
            else:
                return end
        return end

    def _is_empty(self, segment: Segment) -> bool:
        return not any(self._run.mapping(segment)[:8]) and not used_end(self._run, segment)

    # -- files ------------------------------------------------------------------------------------------------------

    def bulk(self) -> Iterator[Found]:
        """What may be copied at leisure, beside the segments."""
        for folder in _BULK:
            yield from self._files(folder)
        for folder in _SMALL:
            yield from (each for each in self._files(folder) if each.rocksdb)

    def tell_left(self, moment: Moment) -> None:
        """Note what lies in the directory and is not taken."""
        known = {*_UNTOLD, *_SMALL, *_TIMER, *_BULK, "commitlog", *moment.small}
        for name in self._fs.scandir(self.root):
            if name not in known:
                self._leave(f"{name}: not a part of the store")
        if (log := self.root / "commitlog").is_dir():
            for name in self._fs.scandir(log):
                if segment_start(name) is None and f"commitlog/{name}" not in moment.small:
                    self._leave(f"commitlog/{name}: no segment")
        if refused := inbox_state(self.root, self._fs).refused:
            self._leave(f"inbox/refused: bundles that could not be spliced, {len(refused)} of them")

    def _read_small(self) -> Iterator[tuple[str, bytes]]:
        """FileNotFoundError when one is gone that was listed: what it said may be in another one, read before."""
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

    def _aside(self, bundles: tuple[str, ...]) -> Iterator[Found]:
        for name in bundles:
            yield from self._files(f"inbox/{name}")
        yield from self._files("timerlog")
        # Ours is made anew at each opening; a Java broker believes what it finds.
        if self.manifest.profile == "rocketmq" and (self.root / "timerwheel").is_file():
            yield Found("timerwheel", self._fs.size(self.root / "timerwheel"), False)

    def _files(self, folder: str, rocksdb: bool = False) -> Iterator[Found]:
        """The files below a folder, but not below links in it, which may lead in a circle. Those of RocksDB are for
        nobody but RocksDB to copy while it is at work."""
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
            if name not in taken and os.path.lexists(path / name):  # and not gone meanwhile
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
