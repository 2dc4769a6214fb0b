"""A copy of a store as it was at one moment, while others put to it (spark B4.9, reliability P2, P3, P7).

What comes out is a store that was closed cleanly. It holds what the original would after its writer had been killed at
a moment during the call:

    first   everything small, read to memory: manifest, checkpoint, `config/`, `local_offsets/`; what waits in the
            inbox, held open
    then    where the log ends: behind the last whole record, or where a splice under way began
    again   what must not have changed in between, else all of it once more: tables of topics and groups, record of
            splices. With no writer about: that none has come
    at last the bulk of it at leisure: queues, timer log, segments below that end

Progress is as old as the log or older, as after any crash: what it lags behind comes again, nothing is skipped. A
topic that a record names is in the table, and a bundle is either recorded as in, or waits. Segments and queue files are
copied from the newest to the oldest: those that retention takes meanwhile are the oldest there are.

Then `repair.recover_store` reads the whole copy, as after a crash. It builds the index, which is changed in place and
hard to copy, and mends queues where the writer was just then writing. So a snapshot has been read back, every byte of
its log, before it gets its name:

    DEST.partial/lock       who is at it; what a killed one left is removed by the next
    DEST.partial/store/     --rename--> DEST

With `link` the segments that the writer has done with are not copied but get a second name (hard links): it costs no
space and hardly any time. Whoever writes into such a segment later, `recover --truncate` say, takes a copy of its own
first (`SegmentRun`); a Java broker does not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from mqstore.clock import SYSTEM_CLOCK
from mqstore.errors import ConfigError, StoreBusyError
from mqstore.files.filesystem import REAL, FileSystem
from mqstore.files.jsonfile import JSON_BYTES_MAX, NO_CHECKS, Check, decode_json, encode_json
from mqstore.files.lock import WriterLock, writer_alive
from mqstore.files.quiet import QUIET
from mqstore.files.segments import Segment, SegmentRun
from mqstore.files.treecopy import TreeCopy
from mqstore.log import manifest as manifests
from mqstore.log.inbox import inbox_state
from mqstore.log.recovery import Progress, RecoverOptions
from mqstore.log.repair import recover_store
from mqstore.log.report import Cut, Finding
from mqstore.log.scanner import End, scan_log
from mqstore.log.txn import TXN_FILE, IntentWatch, TxnState
from mqstore.options import StoreConfig

__all__ = ["SnapshotPlan", "SnapshotReport", "plan_snapshot", "snapshot_store"]

_TRIES: Final = 100
_PAUSE_S: Final = 0.02
_STARTS: Final = 3
_SMALL: Final = ("config", "local_offsets")
_BULK: Final = ("timerlog", "batchconsumequeue", "consumequeue_ext", "consumequeue")
_WHEEL: Final = "timerwheel"
_DEFINITIONS: Final = ("config/topics.json", "config/subscriptionGroup.json", TXN_FILE)
_UNTOLD: Final = frozenset(
    {*("lock", "tmp", "index", "_staging", "inbox", "serve.json", "serve.sock"), "abort.bak", "checkpoint.bak"}
)
"""What nobody misses, is made anew, or is copied by another rule."""
_LEFT_SHOWN: Final = 8


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """What a snapshot copies. Offsets are physical, sizes in bytes.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     mqstore.MessageStore(f"{folder}/mq").close()
    ...     plan = plan_snapshot(f"{folder}/mq", f"{folder}/copy")
    >>> plan.writer_alive, plan.log_start, plan.log_end, plan.left
    (False, 0, 0, ())
    """

    store: str
    snapshot: str
    writer_alive: bool
    """Whether somebody had the store open for writing."""
    log_start: int
    log_end: int
    """Where the copied log ends; of a store without a writer where its files end."""
    segments: int
    linked: int
    """Segments that get a second name in place of a copy."""
    bundles: int
    """Bundles of Spark's that wait in the inbox, and wait in the copy, too."""
    files: int
    bytes: int
    """To be copied; of files with holes in them all the same."""
    free_bytes: int
    """What the file system of the copy has room for."""
    left: tuple[str, ...]
    """A sentence for each thing in the directory that is not copied and that somebody may miss."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, under the names of `mqstore snapshot --json`."""
        return {**asdict(self), "left": list(self.left)}


@dataclass(slots=True)
class SnapshotReport:
    """What was copied, and what reading it back has found.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(f"{folder}/mq") as store:
    ...     report = store.snapshot(f"{folder}/copy")
    >>> report.plan.writer_alive, report.messages, report.findings
    (True, 0, [])
    """

    plan: SnapshotPlan
    log_end: int = 0
    """Where the log of the copy ends."""
    messages: int = 0
    """Records that verified."""
    findings: list[Finding] = field(default_factory=list)
    """What is wrong with the original, too."""
    truncated: list[Cut] = field(default_factory=list)
    """What the copy lacks, as an opening of the original would cut it."""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, under the names of `mqstore snapshot --json`."""
        return {
            **self.plan.as_dict(),
            "log_end": self.log_end,
            "messages": self.messages,
            "findings": [finding.as_dict() for finding in self.findings],
            "truncated": [cut.as_dict() for cut in self.truncated],
            "seconds": self.seconds,
        }


def plan_snapshot(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    link: bool = False,
    config: StoreConfig | None = None,
) -> SnapshotPlan:
    """What `snapshot_store` would do now; changes nothing. Raises as that does."""
    source = _Source(Path(path), Path(target), link, config or StoreConfig())
    with ExitStack() as opened:
        return source.plan(source.moment(opened))


def snapshot_store(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    link: bool = False,
    config: StoreConfig | None = None,
    progress: Progress | None = None,
    json_checks: Mapping[str, Check] = NO_CHECKS,
    fs: FileSystem = REAL,
) -> SnapshotReport:
    """Copy the store at `path`, in use or not, to `target`, which must not exist or be an empty folder. See the module.

    All that had been put, committed and created before the call is in it; of what comes meanwhile, a prefix. The store
    id is the original's: it is the same store, at a moment. The original is not changed; with `link` its closed
    segments get a second name. `config`, `json_checks`: as of `recover_store`. `progress(bytes done, bytes in all)`,
    of copying and of reading back.

    After an error, or Ctrl-C, nothing is left; killed, `TARGET.partial`, which the next call removes. Raises
    NotAStoreError, CorruptStoreError (the manifest), UnsupportedStoreError, ConfigError for a target that is in the
    way, StoreLockedError when another call is at the same target, StoreBusyError when the store does not come to rest,
    StoreFullError, StoreIOError.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with mqstore.MessageStore(f"{folder}/mq") as store:
    ...         receipt = store.put("orders", b"hello")
    ...         report = snapshot_store(store.path, f"{folder}/copy")
    ...     with mqstore.MessageStore(f"{folder}/copy", "r") as copy:
    ...         report.messages, report.findings, copy.clean_shutdown, [bytes(m.body) for m in copy.read("orders")]
    (1, [], True, [b'hello'])
    """
    begun = time.monotonic()
    source = _Source(Path(path), Path(target), link, config or StoreConfig())
    work = source.target.with_name(f"{source.target.name}.partial")
    _make_parents(source.target.parent, fs)
    fs.mkdir(work, exist_ok=True)
    lock = WriterLock(work, "mqstore snapshot", clock=SYSTEM_CLOCK, fs=fs)
    lock.acquire()
    try:
        _refuse_strangers(work, fs)
        try:
            fs.remove_tree(work / "store")
            report = source.copy_to(work / "store", progress, json_checks, fs)
            fs.replace(work / "store", source.target)
            fs.sync_directory(source.target.parent)
        finally:
            with suppress(OSError):  # an error that is on its way says more; the next call removes it
                fs.remove_tree(work)
    finally:
        lock.release()
    report.seconds = time.monotonic() - begun
    return report


def _existing(folder: Path) -> Path:
    """The first of `folder` and those above it that is there."""
    while not folder.exists():
        folder = folder.parent
    return folder


def _make_parents(folder: Path, fs: FileSystem) -> None:
    for name in folder.relative_to(there := _existing(folder)).parts:
        there /= name
        fs.mkdir(there, exist_ok=True)
        fs.sync_directory(there.parent)


def _refuse_strangers(work: Path, fs: FileSystem) -> None:
    """What lies at `work` is removed later, so it must be ours."""
    if others := set(fs.scandir(work)) - {"lock", "store"}:
        raise ConfigError(f"{work} is in the way, and holds {min(others)!r}, which is not ours: move it away")


class _File(NamedTuple):
    """`name`: its path within the store."""

    name: str
    length: int
    rocksdb: bool


class _Held(NamedTuple):
    """A file that was opened, so that it stays if it is removed. `name`: its path within the store."""

    name: str
    fd: int


@dataclass(frozen=True, slots=True)
class _Moment:
    live: bool
    small: Mapping[str, bytes]
    end: int
    segments: tuple[Segment, ...]
    last: _Held | None
    """The last of them, so that there is at least one when their turn comes."""
    bundles: tuple[str, ...]
    waiting: Sequence[_Held]
    """The files of these."""
    signature: tuple[object, ...]


class _Source:
    """The store that is copied. Only looks at it, but for hard links."""

    def __init__(self, root: Path, target: Path, link: bool, config: StoreConfig) -> None:
        self.root = root
        self.target = Path(os.path.abspath(target))
        self.link = link
        self._fs = QUIET
        self._manifest = manifests.resolve(
            root, writer=False, create=False, profile=None, config=config, clock=SYSTEM_CLOCK, fs=QUIET
        )
        config = replace(config, retention=None)
        if not self._manifest.has_file:  # the index files alone tell their shape, and they are not copied
            slots, entries = self._manifest.index_slots, self._manifest.index_entries
            config = replace(config, index_slots=slots, index_entries=entries)
        self._config = config
        self._refuse_target()
        if link:
            self._refuse_link()
        self._run = SegmentRun(
            root / "commitlog", root / "tmp", self._manifest.commitlog_segment_bytes, fs=QUIET, writable=False
        )
        self._intents = IntentWatch(root, QUIET)
        self._left: list[str] = []

    def _refuse_target(self) -> None:
        target, root = os.path.realpath(self.target), os.path.realpath(self.root)
        if target == root or Path(root) in Path(target).parents:
            raise ConfigError(f"{self.target} lies in the store itself: name a folder outside of {self.root}")
        if Path(target) in Path(root).parents:
            raise ConfigError(f"{self.target} is above the store: name a folder that does not exist yet")
        if not os.path.lexists(self.target):
            return
        if not self.target.is_dir() or os.path.islink(self.target) or os.listdir(self.target):
            raise ConfigError(f"{self.target} is there already: name a folder that does not exist yet, or is empty")
        if os.path.ismount(self.target):
            raise ConfigError(f"{self.target} is a mount point, which no folder can be renamed to: name one below it")

    def _refuse_link(self) -> None:
        """Hard links stay within a file system."""
        with suppress(FileNotFoundError):
            if self._fs.stat(self.root / "commitlog").st_dev != self._fs.stat(_existing(self.target)).st_dev:
                raise ConfigError(f"link: {self.target} lies on another file system than {self.root}: leave it out")

    # -- the moment -------------------------------------------------------------------------------------------------

    def moment(self, opened: ExitStack) -> _Moment:
        """Look until nothing that matters has changed from the beginning of the look to its end. What is held open is
        closed by `opened`."""
        for _ in range(_TRIES):
            with ExitStack() as held:
                found = self._look(held)
                if found is not None:
                    opened.push(held.pop_all())
                    return found
            time.sleep(_PAUSE_S)
        raise StoreBusyError(
            f"{self.root}: its topics, groups or splices have changed whenever they were looked at, for "
            f"{_TRIES * _PAUSE_S:.0f} s: try again when it is calmer"
        )

    def _look(self, opened: ExitStack) -> _Moment | None:
        live = writer_alive(self.root, self._fs)
        signature = self._signature()
        small = dict(self._read_small())
        definitions = {name: small.get(name) for name in _DEFINITIONS}
        # One that comes later had not been promised; one that is taken in changes the record of splices.
        bundles = inbox_state(self.root, self._fs).waiting
        pending = self._intents.pending() if live else None
        self._run.limit = None if pending is None else pending.start
        self._run.load()
        if pending is not None and TXN_FILE in small:
            state = TxnState.from_json(decode_json(small[TXN_FILE]))
            # It ends where that began, so in the copy nothing of it is to be undone.
            small[TXN_FILE] = encode_json(replace(state, intent=None).as_json())
        end = self._written_end() if live else self._run.end
        segments = tuple(segment for segment in self._run.segments() if segment.start < end)
        try:
            waiting = [self._hold(each.name, opened) for name in bundles for each in self._files(f"inbox/{name}")]
            last = self._hold(_name_of(segments[-1]), opened) if segments else None
        except FileNotFoundError:
            return None  # it was just taken in, or retention is that quick
        if definitions != {name: self._read(name) for name in _DEFINITIONS}:
            return None
        if not live and self._has_changed(signature):
            return None
        return _Moment(live, small, end, segments, last, bundles, waiting, signature)

    def _signature(self) -> tuple[object, ...]:
        """What a writer that comes changes first. What no checkpoint and no mark shows, the lock file does."""
        try:
            found = self._fs.stat(self.root / "lock")
            lock: object = (found.st_ino, found.st_mtime_ns)
        except FileNotFoundError:
            lock = None
        return lock, self._read("abort"), self._read("checkpoint")

    def _has_changed(self, signature: tuple[object, ...]) -> bool:
        return writer_alive(self.root, self._fs) or self._signature() != signature

    def _written_end(self) -> int:
        """Behind the last whole record of a log that somebody is writing: at worst the next one is half there."""
        last = self._run.last
        end = 0 if last is None else last.start
        if last is not None:
            for event in scan_log(self._run, last.start, self._manifest.checksum):
                end = event.position if isinstance(event, End) else event.end
        return end

    def _read_small(self) -> Iterator[tuple[str, bytes]]:
        names = [manifests.MANIFEST, f"{manifests.MANIFEST}.bak", "checkpoint", "abort"]
        names += [f"commitlog/{name}" for name, _ in self._other_files("commitlog")]
        for folder in _SMALL:
            names += [each.name for each in self._files(folder) if not (each.rocksdb or each.name.endswith(".tmp"))]
        for name in names:
            content = self._read(name)
            if content is not None:
                yield name, content

    def _other_files(self, folder: str) -> list[tuple[str, int]]:
        """Files beside the segments: what guards the directory from a Java broker."""
        guard = os.path.relpath(manifests.GUARD, folder)
        with suppress(FileNotFoundError):
            return [found for found in self._fs.scandir_files(self.root / folder) if found[0] == guard]
        return []

    def _read(self, name: str) -> bytes | None:
        with suppress(FileNotFoundError):
            return self._fs.read_whole(self.root / name, JSON_BYTES_MAX)
        return None

    def _hold(self, name: str, opened: ExitStack) -> _Held:
        fd = self._fs.open(self.root / name, os.O_RDONLY | os.O_NONBLOCK)
        opened.callback(self._fs.close, fd)
        return _Held(name, fd)

    def _files(self, folder: str, rocksdb: bool = False) -> Iterator[_File]:
        """The files below a folder, of each folder the last names first. Those of RocksDB are for nobody but RocksDB to
        copy while it is at work."""
        path = self.root / folder
        if not path.is_dir():
            return
        try:
            files = self._fs.scandir_files(path)
            folders = self._fs.scandir_directories(path)
        except FileNotFoundError:
            return
        rocksdb = rocksdb or any(name == "CURRENT" for name, _ in files)
        if rocksdb and writer_alive(self.root, self._fs):
            self._leave(f"{folder}/: RocksDB, which a broker has open")
            return
        for name in folders:
            yield from self._files(f"{folder}/{name}", rocksdb)
        for name, length in reversed(files):
            yield _File(f"{folder}/{name}", length, rocksdb)

    def _bulk_files(self) -> Iterator[_File]:
        # Ours is made anew at each opening; a Java broker believes what it finds. Before the log that it points into.
        if self._manifest.profile == "rocketmq" and (self.root / _WHEEL).is_file():
            yield _File(_WHEEL, self._fs.size(self.root / _WHEEL), False)
        for folder in _BULK:
            yield from self._files(folder)
        for folder in _SMALL:
            yield from (each for each in self._files(folder) if each.rocksdb)

    def _leave(self, sentence: str) -> None:
        if sentence not in self._left:
            self._left.append(sentence)

    # -- the plan ---------------------------------------------------------------------------------------------------

    def plan(self, moment: _Moment) -> SnapshotPlan:
        """What `copy_to` is about to do."""
        sizes = [len(content) for content in moment.small.values()]
        sizes += [self._fs.size(held.fd) for held in moment.waiting]
        sizes += [each.length for each in self._bulk_files()]
        linked = sum(self._is_linked(segment, moment) for segment in moment.segments)
        sizes += [_used(segment, moment) for segment in moment.segments if not self._is_linked(segment, moment)]
        known = {*_UNTOLD, *_SMALL, *_BULK, _WHEEL, "commitlog", *moment.small}
        for name in self._fs.scandir(self.root):
            if name not in known:
                self._leave(f"{name}: not a part of the store")
        if refused := inbox_state(self.root, self._fs).refused:
            self._leave(f"inbox/refused: bundles that could not be spliced, {len(refused)} of them")
        free = os.statvfs(_existing(self.target))
        left = self._left[:_LEFT_SHOWN]
        if len(self._left) > _LEFT_SHOWN:
            left.append(f"and {len(self._left) - _LEFT_SHOWN} more")
        return SnapshotPlan(
            store=os.fspath(self.root),
            snapshot=os.fspath(self.target),
            writer_alive=moment.live,
            log_start=moment.segments[0].start if moment.segments else moment.end,
            log_end=moment.end,
            segments=len(moment.segments),
            linked=linked,
            bundles=len(moment.bundles),
            files=len(sizes),
            bytes=sum(sizes),
            free_bytes=free.f_bavail * free.f_frsize,
            left=tuple(left),
        )

    def _is_linked(self, segment: Segment, moment: _Moment) -> bool:
        """Whether it is whole, and has one behind it that records have come to: nobody writes to it any more."""
        return self.link and segment is not moment.segments[-1] and segment.length == segment.size

    # -- copying ----------------------------------------------------------------------------------------------------

    def copy_to(
        self, work: Path, progress: Progress | None, json_checks: Mapping[str, Check], fs: FileSystem
    ) -> SnapshotReport:
        """Make the copy at `work`, in order and on disk."""
        for _ in range(_STARTS):
            with ExitStack() as opened:
                self._left.clear()
                moment = self.moment(opened)
                plan = self.plan(moment)
                total = plan.bytes + plan.log_end - plan.log_start
                meter = _Meter(progress, total)
                copy = opened.enter_context(TreeCopy(self.root, work, fs=fs, source_fs=self._fs, on_bytes=meter.add))
                self._copy_bulk(copy, moment)
                if not moment.live and self._has_changed(moment.signature):
                    fs.remove_tree(work)  # somebody has opened it meanwhile: the next moment is one of a live store
                    continue
                copy.sync()
                recovered = recover_store(
                    work,
                    RecoverOptions(),
                    config=self._config,
                    progress=meter.behind(),
                    json_checks=json_checks,
                    fs=fs,
                )
                for held in moment.waiting:  # not before: whoever opens a store for writing takes in what waits
                    copy.file(held.name, held.fd)
                copy.sync()
                before, after = os.fspath(work), os.fspath(self.target)
                findings = [replace(each, detail=each.detail.replace(before, after)) for each in recovered.findings]
                return SnapshotReport(plan, recovered.log_end, recovered.messages, findings, recovered.truncated)
        raise StoreBusyError(f"{self.root}: opened and closed by others {_STARTS} times meanwhile; try again")

    def _copy_bulk(self, copy: TreeCopy, moment: _Moment) -> None:
        for name, content in moment.small.items():
            copy.content(name, content)
        for each in self._bulk_files():
            with suppress(FileNotFoundError):
                self._copy_file(copy, each.name)
        copy.folder("commitlog")
        for segment in reversed(moment.segments):
            name = _name_of(segment)
            length = _used(segment, moment) if moment.live else None
            try:
                if moment.last is not None and name == moment.last.name:
                    copy.file(name, moment.last.fd, length, allocate=True)
                elif self._is_linked(segment, moment):
                    copy.link(name)
                else:
                    self._copy_file(copy, name, length, allocate=True)
            except FileNotFoundError:
                return  # retention has taken it, and with it what is older

    def _copy_file(self, copy: TreeCopy, name: str, length: int | None = None, *, allocate: bool = False) -> None:
        with ExitStack() as opened:
            copy.file(name, self._hold(name, opened).fd, length, allocate=allocate)


def _name_of(segment: Segment) -> str:
    return f"commitlog/{os.path.basename(segment.path)}"


def _used(segment: Segment, moment: _Moment) -> int:
    return min(segment.length, moment.end - segment.start)


class _Meter:
    """Counts bytes over both halves of the work."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def add(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)

    def behind(self) -> Progress | None:
        """For the second half: reports what is done of it on top of the first."""
        report = self._progress
        if report is None:
            return None
        first, total = self._done, self._total
        call: Callable[[int, int], None] = report
        return lambda done, of: call(min(first + done, total), total)
