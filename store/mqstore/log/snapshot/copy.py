"""Copy of a store as of one time, while others put to it (spark#snapshot).

The copy is a store that was closed cleanly. Its content is that of the original after a kill of its writer at some
time of the call (`point_in_time.py`). Segments are copied from oldest to newest. If retention deletes one before
it is copied, the copy starts again at a later time, and so includes the relocated messages. It also starts again if
another process has opened the store, and perhaps cut it.

Then `repair.recover_store` reads the whole copy, as after a crash. It builds the index, which is changed in place and
hard to copy, and repairs queues that the writer was changing. So every byte of the log has been read back before the
copy gets its name:

    DEST.partial-XXXXXXXX/store/     --rename--> DEST
                          aside/     files copied during the snapshot's time, moved to store/ at the end

With `link`, complete segments are not copied but get a second name (hard links), which costs no space and hardly any
time. A recovery that must cut such a segment, or write to it, copies it first (`SegmentWriter.own`). Nothing else
writes to it, except a Java broker that finds damage.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from mqstore.closing import Closing
from mqstore.errors import ConfigError, StoreBusyError, raise_os_error
from mqstore.files.filesystem import REAL, FileSystem
from mqstore.files.jsonfile import NO_CHECKS, Check
from mqstore.files.readonly_fs import QUIET
from mqstore.files.safe_open import resolved
from mqstore.files.segment import Segment
from mqstore.log.recovery.recover import Progress, RecoverOptions
from mqstore.log.recovery.repair import recover_store
from mqstore.log.recovery.report import Cut, Finding, RecoveryReport
from mqstore.log.snapshot.point_in_time import Found, Original, PointInTime, Saved
from mqstore.options import StoreConfig

_STARTS: Final = 20
_SUFFIX: Final = ".partial-"
_LEFT_SHOWN: Final = 8
_UNSYNCED: Final = 16
"""Number of files that the system may be writing at the same time."""


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """Plan of a snapshot. Offsets are physical, sizes are in bytes.

    >>> import tempfile
    >>> from mqstore.log.store import MessageStore
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     MessageStore(f"{folder}/mq").close()
    ...     plan = plan_snapshot(f"{folder}/mq", f"{folder}/copy")
    >>> plan.writer_alive, plan.log_start, plan.log_end, plan.left
    (False, 0, 0, ())
    """

    store: str
    snapshot: str
    writer_alive: bool
    """True if a writer had the store open."""
    log_start: int
    log_end: int
    """End of the copied log. Without a writer, the end of its files."""
    segments: int
    linked: int
    """Number of segments that get a second name instead of a copy."""
    bundles: int
    """Number of Spark's bundles that wait in the inbox, and so in the copy."""
    files: int
    bytes: int
    """Number of bytes to be copied. Holes in files count, the rebuilt index does not."""
    free_bytes: int
    """Number of free bytes on the file system of the copy."""
    left: tuple[str, ...]
    """A sentence for each thing in the directory that is not copied and that a user may miss."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, under the names of `mqstore snapshot --json`."""
        return {**asdict(self), "left": list(self.left)}


@dataclass(slots=True)
class SnapshotReport:
    """Report of a snapshot: its plan, and the result of reading it back.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(f"{folder}/mq") as store:
    ...     report = store.snapshot(f"{folder}/copy")
    >>> report.plan.writer_alive, report.messages, report.findings
    (True, 0, [])
    """

    plan: SnapshotPlan
    log_end: int = 0
    """End of the log of the copy."""
    messages: int = 0
    """Number of records that verified."""
    findings: list[Finding] = field(default_factory=list)
    """Faults of the copy, which the original has, too."""
    truncated: list[Cut] = field(default_factory=list)
    """Ranges that the copy lacks, since an opening of the original would cut them."""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, under the names of `mqstore snapshot --json`."""
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
    """Return the plan of `snapshot_store`. Changes nothing. Raises the same errors."""
    original = Original(Path(resolved(path)), config or StoreConfig())
    place = _checked(original, target, link)
    with ExitStack() as opened:
        return _plan(original, original.moment(opened), place, link)


def snapshot_store(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    link: bool = False,
    config: StoreConfig | None = None,
    progress: Progress | None = None,
    json_checks: Mapping[str, Check] = NO_CHECKS,
    saved: Saved | None = None,
    fs: FileSystem = REAL,
) -> SnapshotReport:
    """Copy the store at `path`, in use or not, to `target`, a new or empty folder. The module describes how.

    The copy has everything that was put, committed and created before the call, and a prefix of later changes. It has
    the store id of the original. The original is not changed, except that with `link` its complete segments get a
    second name. `recover_store` describes `config` and `json_checks`, `Original` describes `saved`. `progress(bytes
    done, total bytes)` is called while copying and while reading back.

    An error or Ctrl-C removes the copy. A kill leaves `TARGET.partial-` with eight letters, which you must remove.
    Raises NotAStoreError, CorruptStoreError (the manifest), UnsupportedStoreError, ConfigError for an unusable target,
    StoreBusyError if the store keeps changing, StoreFullError, ReadOnlyStoreError and StoreIOError.

    >>> import tempfile
    >>> from mqstore.log.store import MessageStore
    >>> from mqstore.log.reading.readonly import ReadOnlyMessageStore
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with MessageStore(f"{folder}/mq") as store:
    ...         receipt = store.put("orders", b"hello")
    ...         report = snapshot_store(store.path, f"{folder}/copy")
    ...     with ReadOnlyMessageStore(f"{folder}/copy") as copy:
    ...         report.messages, report.findings, copy.clean_shutdown, [bytes(m.body) for m in copy.read("orders")]
    (1, [], True, [b'hello'])
    """
    started = time.monotonic()
    original = Original(Path(resolved(path)), config or StoreConfig(), saved)
    place = _checked(original, target, link)
    parents: list[Path] = []
    work = place.with_name(place.name + _SUFFIX + secrets.token_hex(4))
    try:
        _make_parents(place.parent, fs, parents)
        fs.mkdir(work)
        report = _Making(original, place, work, link, progress, fs).run(json_checks)
        try:
            fs.replace(work / "store", place)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise ConfigError(f"{place} was created meanwhile, and is unchanged. Name another folder") from error
            raise
        fs.sync_directory(place.parent)
        parents.clear()
    finally:
        with suppress(OSError):  # the first error is more useful
            fs.remove_tree(work)
            for folder in reversed(parents):
                fs.rmdir(folder)
    report.seconds = time.monotonic() - started
    return report


# -- the target --------------------------------------------------------------------------------------------------------


def _checked(original: Original, target: str | os.PathLike[str], link: bool) -> Path:
    """Return the absolute path of the copy. Raises ConfigError if no copy can be made there."""
    text = os.fspath(target)
    try:
        is_name = bool(os.fsencode(text)) and "\0" not in text
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise ConfigError(f"{text!r} is not a folder name")
    head, name = os.path.split(text.rstrip(os.sep))
    place = Path(resolved(head or os.curdir), name)
    if name in ("", os.curdir, os.pardir):
        place = Path(resolved(text))
    root = Path(os.path.realpath(original.root))
    real = Path(os.path.realpath(place))
    folders = {_identity(original.root / name) for name in ("", *original.folders)} - {None}
    if any(_identity(each) in folders for each in (real, *real.parents)):  # also by a mount, or by a link in the store
        raise ConfigError(f"{text} is inside the store. Name a folder outside of {original.root}")
    if real in root.parents:
        raise ConfigError(f"{text} is above the store. Name a folder that does not exist yet")
    if os.path.lexists(place):
        if os.path.islink(place) or not place.is_dir() or QUIET.scandir(place):
            raise ConfigError(f"{text} already exists. Name a folder that does not exist yet, or is empty")
        if os.path.ismount(place):
            raise ConfigError(f"{text} is a mount point, to which no folder can be renamed. Name a folder below it")
    above = _existing(place)
    if not above.is_dir():
        raise ConfigError(f"{text}: {above} is not a folder")
    made_in = _existing(place.parent)
    if not os.access(made_in, os.W_OK | os.X_OK):
        raise_os_error(PermissionError(errno.EACCES, os.strerror(errno.EACCES)), made_in, "mkdir")
    if link:
        with suppress(FileNotFoundError):  # a store without a log
            if QUIET.stat(original.root / "commitlog").st_dev != QUIET.stat(above).st_dev:
                raise ConfigError(f"link: {text} is on another file system than {original.root}. Copy without link")
    return place


def _identity(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        found = os.stat(path)
        return found.st_dev, found.st_ino
    return None


def _existing(folder: Path) -> Path:
    """Return the first existing path of `folder` and its parents. A broken link counts as existing."""
    while not os.path.lexists(folder):
        folder = folder.parent
    return folder


def _make_parents(folder: Path, fs: FileSystem, made: list[Path]) -> None:
    for name in folder.relative_to(there := _existing(folder)).parts:
        there /= name
        with suppress(FileExistsError):  # created meanwhile. If it is not a folder, the next call reports it
            fs.mkdir(there)
            made.append(there)
        fs.sync_directory(there.parent)


def _plan(original: Original, moment: PointInTime, place: Path, link: bool) -> SnapshotPlan:
    linked = [segment for segment in moment.segments if link and _is_linked(segment, moment)]
    sizes = [len(content) for content in moment.small.values()]
    sizes += [each.length for each in moment.aside]
    sizes += [each.length for each in original.bulk()]
    for segment in moment.segments:
        if segment not in linked:
            length = moment.length_of(segment)
            sizes.append(segment.length if length is None else length)
    original.log_left(moment)
    left = original.left[:_LEFT_SHOWN]
    if len(original.left) > _LEFT_SHOWN:
        left.append(f"and {len(original.left) - _LEFT_SHOWN} more")
    return SnapshotPlan(
        store=os.fspath(original.root),
        snapshot=os.fspath(place),
        writer_alive=moment.live,
        log_start=moment.segments[0].start if moment.segments else moment.end,
        log_end=moment.end,
        segments=len(moment.segments),
        linked=len(linked),
        bundles=len(moment.bundles),
        files=len(sizes),
        bytes=sum(sizes),
        free_bytes=shutil.disk_usage(_existing(place)).free,
        left=tuple(left),
    )


def _is_linked(segment: Segment, moment: PointInTime) -> bool:
    # A second name would be a name of the link itself, and its target may be on another disk.
    return moment.is_done(segment) and not os.path.islink(segment.path)


# -- copying -----------------------------------------------------------------------------------------------------------


class TreeCopy(Closing):
    """New directory `target`, filled from `source` by `file`, `content` and `link`. Names are paths within the two.

    Modes and times are the original's, and so is the owner if that is permitted. `on_bytes(count)` is called for
    written bytes. Errors are those of `FileSystem`. A name that already exists is FileExistsError.
    """

    def __init__(self, source: Path, target: Path, fs: FileSystem, on_bytes: Callable[[int], object]) -> None:
        self._source = source
        self._target = target
        self._fs = fs
        self._on_bytes = on_bytes
        self._unsynced: deque[int] = deque()
        self._folders: dict[str, None] = {}
        self.folder("")

    def close(self) -> None:
        """Close the files that are still open."""
        while self._unsynced:
            self._fs.close(self._unsynced.popleft())

    def folder(self, name: str) -> None:
        """Create a folder and its parents."""
        if name in self._folders:
            return
        if name:
            self.folder(os.path.dirname(name))
        self._fs.mkdir(self._target / name, exist_ok=True)
        self._folders[name] = None

    def content(self, name: str, content: bytes) -> None:
        """Write a file whose content was read before. The original may be gone."""
        fd = self._create(name)
        self._fs.pwrite(fd, content, 0)
        with suppress(FileNotFoundError):
            self._fs.take_after(fd, QUIET.stat(self._source / name))
        self._on_bytes(len(content))
        self._sync_some()

    def file(self, name: str, source: int, length: int | None = None) -> None:
        """Copy an open file, or its first `length` bytes with zeros up to its size.
        Bytes written later through a mapping get their disk blocks then."""
        found = QUIET.stat(source)
        length = found.st_size if length is None else length
        fd = self._create(name)
        self._fs.truncate_sparse(fd, found.st_size)
        self._fs.copy(source, fd, length)
        self._fs.take_after(fd, found)
        self._fs.write_back(fd)
        self._on_bytes(length)
        self._sync_some()

    def link(self, name: str) -> None:
        """Give the same file a second name. Both directories must be on one file system."""
        self.folder(os.path.dirname(name))
        self._fs.link(self._source / name, self._target / name)

    def sync(self) -> None:
        """Return once all copied files, and the directory itself, are on disk."""
        self._sync_some(0)
        for name in reversed(self._folders):
            with suppress(FileNotFoundError):
                self._fs.take_after(self._target / name, QUIET.stat(self._source / name))
        self._fs.sync_each(self._fs.sync_directory, [*map(self._target.joinpath, self._folders), self._target.parent])

    def _create(self, name: str) -> int:
        self.folder(os.path.dirname(name))
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        fd = self._fs.open(self._target / name, flags)
        self._unsynced.append(fd)
        return fd

    def _sync_some(self, least: int = _UNSYNCED) -> None:
        """Sync the files, if there are more than `least`, by the descriptors that wrote them.
        These receive the system's errors."""
        if len(self._unsynced) > least:
            self._fs.sync_each(self._fs.fdatasync, self._unsynced)
            self.close()


class _GoneError(Exception):
    """Retention has deleted a segment before it was copied."""


class _Making:
    """Maker of the copy, in the folder `work`."""

    def __init__(
        self, original: Original, place: Path, work: Path, link: bool, progress: Progress | None, fs: FileSystem
    ) -> None:
        self._original = original
        self._place = place
        self._store = work / "store"
        self._aside = work / "aside"
        self._link = link
        self._fs = fs
        self._meter = _Meter(progress)
        self._bundles: dict[str, object] = {}
        """Identity of each bundle copied in full, by name."""

    def run(self, json_checks: Mapping[str, Check]) -> SnapshotReport:
        """Make the copy, in order and on disk, and return the report."""
        plan = self._bring()
        roots = self._of_root()
        recovered = recover_store(
            self._store,
            RecoverOptions(copied_live=plan.writer_alive),
            config=self._original.config,
            progress=self._meter.second,
            json_checks=json_checks,
            fs=self._fs,
        )
        # Only now, since opening a store for writing appends the waiting bundles.
        for name in self._fs.scandir(self._aside):
            self._fs.replace(self._aside / name, self._store / name)
        self._give_to_owner(roots)
        self._fs.sync_directory(self._store)
        return self._report(plan, recovered)

    def _bring(self) -> SnapshotPlan:
        original = self._original
        for _ in range(_STARTS):
            original.left.clear()
            with ExitStack() as opened:
                moment = original.moment(opened, self._bring_aside)
                plan = _plan(original, moment, self._place, self._link)
                self._meter.begin(plan.bytes + plan.log_end - plan.log_start)
                self._meter.add(sum(each.length for each in moment.aside))
                self._fs.remove_tree(self._store)  # from an earlier attempt
                with suppress(_GoneError), self._copy_to(self._store) as copy:
                    self._bring_rest(copy, moment)
                    copy.sync()
                    if not original.has_changed(moment):
                        return plan
        raise StoreBusyError(
            f"{original.root}: another process opened it, or retention shortened it, during each of {_STARTS} attempts "
            "to copy it. Try again later"
        )

    def _copy_to(self, target: Path) -> TreeCopy:
        return TreeCopy(self._original.root, target, self._fs, self._meter.add)

    def _bring_aside(self, files: list[Found]) -> None:
        """Copy the files that go aside, again for each attempt.
        A bundle never changes, so each is copied once."""
        bundles: dict[str, list[str]] = {"": []}
        for each in files:
            folder = "/".join(each.name.split("/")[:2]) if each.name.startswith("inbox/") else ""
            bundles.setdefault(folder, []).append(each.name)
        found = {folder: self._original.identity_of(folder) for folder in bundles if folder}
        self._bundles = {name: known for name, known in self._bundles.items() if found.get(name) == known}
        self._meter.begin(0)
        for name in self._fs.scandir(self._aside) if self._aside.exists() else ():
            if name != "inbox" or not self._bundles:
                self._fs.remove_tree(self._aside / name)
        for name in self._fs.scandir(self._aside / "inbox") if self._bundles else ():
            if f"inbox/{name}" not in self._bundles:
                self._fs.remove_tree(self._aside / "inbox" / name)
        for folder, names in bundles.items():
            if folder in self._bundles:
                continue
            with self._copy_to(self._aside) as copy:
                for name in names:
                    self._file(copy, name)
                copy.sync()
            if folder:
                self._bundles[folder] = found[folder]

    def _bring_rest(self, copy: TreeCopy, moment: PointInTime) -> None:
        for name, content in moment.small.items():
            copy.content(name, content)
        for each in self._original.bulk():
            with suppress(FileNotFoundError):  # deleted with its topic or by retention. The log decides what counts
                self._file(copy, each.name)
        copy.folder("commitlog")
        for segment in moment.segments:
            name, length = f"commitlog/{os.path.basename(segment.path)}", moment.length_of(segment)
            if not (self._link and _is_linked(segment, moment) and self._still(segment, copy.link, name)):
                fd = moment.held.get(segment.start)
                if fd is not None:
                    copy.file(name, fd, length)
                elif not self._still(segment, self._file, copy, name, length):
                    raise _GoneError

    def _still(self, segment: Segment, bring: Callable[..., None], *arguments: Any) -> bool:
        """Return True if the segment existed when `bring` ran."""
        try:
            bring(*arguments)
        except FileNotFoundError:
            if os.path.lexists(segment.path):
                raise  # the folder of the copy is gone
            return False
        return True

    def _file(self, copy: TreeCopy, name: str, length: int | None = None) -> None:
        with QUIET.opened(self._original.root / name, os.O_RDONLY) as fd:
            copy.file(name, fd, length)

    def _of_root(self) -> dict[int, str]:
        """Return the files of the copy owned by root, by inode. Empty if this process does not run as root."""
        found: dict[int, str] = {}
        for folder, _, names in os.walk(self._store.parent) if os.geteuid() == 0 else ():
            for path in (folder, *(os.path.join(folder, name) for name in names)):
                status = self._fs.stat(path)
                if status.st_uid == 0:
                    found[status.st_ino] = path
        return found

    def _give_to_owner(self, roots: Mapping[int, str]) -> None:
        """Give the files that the recovery created to the owner of the store.
        Files owned by root in the original stay root's. A link may have led to their content elsewhere, or the file may
        be shared."""
        owner = QUIET.stat(self._original.root)
        if (owner.st_uid, owner.st_gid) != (0, 0):
            for inode, path in self._of_root().items():
                if inode not in roots:
                    self._fs.give_to(path, owner)

    def _report(self, plan: SnapshotPlan, recovered: RecoveryReport) -> SnapshotReport:
        before, after = os.fspath(self._store), os.fspath(self._place)
        findings = [replace(each, detail=each.detail.replace(before, after)) for each in recovered.findings]
        return SnapshotReport(plan, recovered.log_end, recovered.messages, findings, recovered.truncated)


class _Meter:
    """Counts copied bytes, then those read back. After another `begin` its progress does not go back."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._total = self._done = self._shown = 0

    def begin(self, total: int) -> None:
        self._total, self._done = total, 0

    def add(self, count: int) -> None:
        self._done += count
        self._tell(self._done)

    def second(self, done: int, of: int) -> None:
        self._tell(self._done + done)

    def _tell(self, done: int) -> None:
        if self._progress is not None and self._total:
            self._shown = max(self._shown, min(done, self._total))
            self._progress(self._shown, self._total)
