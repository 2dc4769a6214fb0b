"""Reading and restoring of messages that recovery has cut from the log.

    cut/<physical offset>-<ms>     bytes of one segment: byte i was at that offset (20 digits) + i, until that time
    cut/restored/                  files whose messages were appended again
    cut/staged/, restoring.json    files of a `restore` that is running or was killed

A restore appends all its messages by one bulk append (`log.splice`), so all of them or none are in the log. Each
restore has a number, which is the version of that bulk append:

    step                                                     a crash right after it leaves
    1 stage the records that are not in the log              files that the next restore removes
    2 write restoring.json (number, names of the files)      the same; the number is not recorded
    3 bulk append                                            the number is recorded, so the files count as restored
    4 move the files to cut/restored/, remove restoring.json nothing to do

A message is not appended if its bytes are still at its offset in the log, or in an earlier file of the same restore.
Files that share a message are therefore restored together or not at all.

The files are untrusted, so every record is verified, and links, pipes and devices are refused.
"""

from __future__ import annotations

import mmap
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from mqstore.errors import ConfigError, FormatError, StoreIOError
from mqstore.files.jsonfile import decode_json, read_json, save_json
from mqstore.files.lock import refuse_beside_writer
from mqstore.files.readonly_fs import QUIET
from mqstore.files.safe_open import REFUSED
from mqstore.layout.arrays.dispatch import tags_code_at, topics_of
from mqstore.layout.arrays.scan import check_place, find_next, read_run
from mqstore.layout.bodyref import place_of
from mqstore.layout.consumequeue import UNIT
from mqstore.layout.record import (
    CHECKSUM_AT,
    INNER_BATCH,
    QUEUE_ID_AT,
    QUEUE_OFFSET_AT,
    SYS_FLAG_AT,
    TOTAL_SIZE_AT,
    TRANSACTION_COMMIT,
    TRANSACTION_MASK,
    store_timestamp_at,
    unreadable_number,
)
from mqstore.log.bulk.inbox import QUEUES_MAX, free_path, queues_entered
from mqstore.log.bulk.shard import shard_json
from mqstore.log.bulk.txn import read_txn
from mqstore.log.directory.names import HALF_TOPIC, MAX_QUEUE_ID, SYSTEM_PREFIX, TIMER_TOPIC, is_path_safe
from mqstore.log.message import Message, UnitBatch
from mqstore.log.reading.reader import StoreReader
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.recovery.recover import Progress
from mqstore.log.recovery.report import Finding
from mqstore.log.store import MessageStore
from mqstore.log.writing.log_tail import QueueRef
from mqstore.log.writing.outgoing import without_place
from mqstore.native import crc32c

__all__ = ["CutFile", "Progress", "Restore", "Tally", "cut_messages", "restore_cut"]

_NAME: Final = re.compile(r"[0-9]{20}-(surplus-)?[0-9]+(\.[0-9]+)*")
_OFFSET_DIGITS: Final = 20
# Not the name of the command: stores have it on disk, and an interrupted restore is recognized by it.
_APP: Final = "mqstore cut"
"""Name under which `config/spark/txn.json` keeps the number of the last restore."""
_JOURNAL: Final = "restoring.json"
_RESTORED: Final = "restored"
_STAGED: Final = "staged"
_BATCH: Final = 8192
_BUFFER_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class CutFile:
    """A file of bytes that were cut. `name` is its path below `cut/`, `segment_bytes` the size of segments."""

    name: str
    segment_bytes: int

    @property
    def start(self) -> int:
        """Physical offset of its first byte. Earlier versions named a surplus by the previous segment."""
        surplus = "-surplus-" in self.name
        return int(os.path.basename(self.name)[:_OFFSET_DIGITS]) + (self.segment_bytes if surplus else 0)


@dataclass(slots=True)
class Tally:
    """Counts of one file: messages by outcome, and bytes outside whole messages."""

    file: str
    messages: int = 0
    appended: int = 0
    in_place: int = 0
    """Messages that are still in the log."""
    repeated: int = 0
    """Messages that are also in an earlier file of the same restore."""
    bookkeeping: int = 0
    """Records of the engine's own topics, which are never restored: they name old offsets of other messages."""
    refused: Counter[str] = field(default_factory=Counter)
    """Messages that cannot be restored, by reason."""
    other_bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "refused": dict(self.refused)}


@dataclass(frozen=True, slots=True)
class Restore:
    """Result of a restore, or its plan.
    `queues` is the number of messages appended to each queue. `offsets` are the queue offsets that they got, (first,
    end). In a plan `offsets` is empty."""

    files: Sequence[Tally]
    queues: Mapping[QueueRef, int]
    offsets: Mapping[QueueRef, tuple[int, int]]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, under the names of `mqstore quarantine restore --json`."""
        queues = []
        for ref, count in sorted(self.queues.items()):
            first, end = self.offsets.get(ref, (None, None))
            queues.append({**ref._asdict(), "messages": count, "first_offset": first, "end_offset": end})
        return {"files": [tally.as_dict() for tally in self.files], "queues": queues}


# -- reading -----------------------------------------------------------------------------------------------------------


def cut_files(store: StoreReader, names: Sequence[str] = ()) -> list[CutFile]:
    """Return the files in `cut/` that were not restored, by offset, or those with these `names`.

    A name that begins with `restored/` means a file that was restored. Raises ConfigError for an unknown name.
    """
    done = _spliced(store)
    waiting = [file for file in _listed(store, "") if file.name not in done]
    if not names:
        return waiting
    known = {file.name: file for file in (*waiting, *_listed(store, _RESTORED))}
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{store.path / 'cut'} has no file {name!r}; `mqstore quarantine list` shows the names of its files"
            )
    return sorted({known[name] for name in names}, key=_order)


def _listed(store: StoreReader, folder: str) -> list[CutFile]:
    try:
        names = store.fs.scandir(store.path / "cut" / folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    size = store.manifest.commitlog_segment_bytes
    files = [CutFile(os.path.join(folder, name), size) for name in names if _NAME.fullmatch(name)]
    return sorted(files, key=_order)


def _order(file: CutFile) -> tuple[int, str]:
    return file.start, file.name


def contents(store: StoreReader, file: CutFile) -> Iterator[Message | Finding]:
    """Yield each whole message of a file, in order, and a Finding for each other range of bytes.

    A message counts only if it verifies, and its physical offset matches the file's name. Raises StoreIOError if the
    name is not a regular file.
    """
    buffer = _map(store, file)
    if buffer:
        yield from _walk(store, file, buffer)


def cut_messages(
    path: str | os.PathLike[str], names: Sequence[str] = ()
) -> Iterator[tuple[CutFile, Iterator[Message | Finding]]]:
    """Yield each file in `cut/` of the store at `path` that was not restored, or those with these `names`.
    With each come its whole messages, and a Finding for each range of bytes that is not one, or for a file that cannot
    be read. Reads also while a writer runs, and leaves no trace. Raises ConfigError for a name that does not exist."""
    with ReadOnlyMessageStore(path, fs=QUIET) as store:
        for file in cut_files(store, names):
            yield file, _readable(store, file)


def _readable(store: StoreReader, file: CutFile) -> Iterator[Message | Finding]:
    try:
        yield from contents(store, file)
    except StoreIOError as error:
        if error.errno not in REFUSED:
            raise
        yield Finding("bad_record", f"cut/{file.name}", 0, 0, str(error.strerror))


def _map(store: StoreReader, file: CutFile) -> mmap.mmap | bytes:
    fs = store.fs
    fd = fs.open(store.path / "cut" / file.name, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        size = fs.size(fd)
        return fs.map(fd, size, writable=False) if size else b""
    finally:
        fs.close(fd)


def _walk(store: StoreReader, file: CutFile, buffer: mmap.mmap | bytes) -> Iterator[Message | Finding]:
    name, start, size = f"cut/{file.name}", file.start, len(buffer)
    checksum, segment_bytes = store.manifest.checksum, store.manifest.commitlog_segment_bytes
    if start + size >= 1 << 63:
        yield Finding("bad_record", name, 0, size, "the offset in the file's name is too large")
        return
    at = met = 0
    while at < size:
        headers, at, met = read_run(buffer, at, size, start, checksum, _BATCH, met=met)
        topics, topic = topics_of(memoryview(buffer), headers)
        for position, number, queue_id, slot, length in zip(
            headers.positions.tolist(),
            topic.tolist(),
            headers.queue_id.tolist(),
            headers.queue_offset.tolist(),
            headers.size.tolist(),
            strict=True,
        ):
            code = tags_code_at(buffer, position, store.delay_table_ms)
            unit = UNIT.pack(start + position, length, code)
            find = None if store.records.finder(topics[number]) is None else partial(_origin, store)
            yield Message(UnitBatch(QueueRef(topics[number], queue_id), buffer, unit, slot, find), position, slot)
        if len(headers) or at >= size:
            continue
        end = at + segment_bytes - (start + at) % segment_bytes
        check = check_place(buffer, at, end, start + at, checksum)
        if check.status == "blank":
            at += check.size
            continue
        found = find_next(buffer, at + 1, size, start, checksum)
        stop = size if found is None else found
        yield Finding("bad_record", name, at, stop - at, check.detail)
        at = stop


def _origin(store: StoreReader, reference: bytes) -> Message:
    """Return the message whose body `reference` names, from the log or from `cut/`. Raises FormatError."""
    try:
        return store.records.origin(reference)
    except FormatError:
        place = place_of(reference)
        for file in cut_files(store):
            if 0 <= (at := place - file.start) < len(buffer := _map(store, file)):
                check = check_place(buffer, at, len(buffer), place, store.manifest.checksum)
                found = Message(UnitBatch(QueueRef("", 0), buffer, b"", 0), at, 0)
                if check.status == "ok" and found._reference() == reference:
                    return found
        raise


# -- restoring ---------------------------------------------------------------------------------------------------------


def restore_cut(
    path: str | os.PathLike[str], names: Sequence[str] = (), *, dry_run: bool = False, progress: Progress | None = None
) -> Restore:
    """Append the messages of the files in `cut/` of the store at `path`, or of those with these `names`.
    No writer may have the store open: StoreLockedError, with `dry_run` too.

    They are appended in the order of their old offsets. Queue, body, properties, flags, born time and born host stay.
    Queue offset, physical offset and store time are new. All messages become visible at once, or none. Then the files
    are moved to `cut/restored/`. The call may be killed and repeated. With `dry_run` nothing is written. `progress` is
    called with (bytes done, total bytes).

    Raises ConfigError for an unknown name, for files that share messages with files that are not named, and for a
    message whose topic no longer has its queue. Raises the errors of `MessageStore.splice`. After an error nothing was
    appended.
    """
    if dry_run:
        with ReadOnlyMessageStore(path, fs=QUIET) as looked_at:
            refuse_beside_writer(path, QUIET)
            return _restore(looked_at, None, names, progress)
    with MessageStore(path, create=False) as store:
        _settle(store)
        return _restore(store, store, names, progress)


def _restore(
    store: StoreReader, writer: MessageStore | None, names: Sequence[str], progress: Progress | None
) -> Restore:
    """Restore by `writer`, or without one plan it."""
    files = cut_files(store, names)
    for name in names:
        if name.startswith(_RESTORED):
            raise ConfigError(f"{name} was restored already; to append its messages once more, move it to cut/ first")
    staged, report = _Staged(store, write=writer is not None), progress or _unheard
    try:
        tallies = _gather(store, files, staged, report)
        moved = [tally.file for tally in tallies if tally.messages]
        if writer is None or not moved:
            return Restore(tallies, staged.queues, {})
        staged.finish()
        number = writer.spliced_version(_APP) + 1
        save_json(
            store.path / "cut" / _JOURNAL,
            {"number": number, "files": moved},
            store.fs,
            file_mode=store.config.file_mode,
        )
        read = sum(_size(store, file) for file in files)

        def spliced(done: int, total: int) -> None:
            report(read + done, read + total)

        result = writer.splice([staged.folder], app=_APP, version=number, progress=spliced, accepted=True)
        _settle(store)
        return Restore(tallies, staged.queues, result.offsets)
    finally:
        staged.close()


def _unheard(done: int, total: int) -> None:
    """Ignore the progress."""


def _size(store: StoreReader, file: CutFile) -> int:
    return len(_map(store, file))  # `stat` would follow a link


def _gather(store: StoreReader, files: Sequence[CutFile], staged: _Staged, progress: Progress) -> list[Tally]:
    """Stage each message that must be appended, and count the others."""
    entered = queues_entered(store.path, store.fs)
    others = [file for file in cut_files(store) if file not in files]
    sizes = {file: _size(store, file) for file in (*files, *others)}
    total = 3 * sum(sizes[file] for file in files)  # a splice reads everything twice
    done = 0
    tallies = []

    def overlapping(file: CutFile, candidates: Sequence[CutFile]) -> list[tuple[CutFile, mmap.mmap | bytes]]:
        """Return the candidates that have bytes of the same physical offsets, mapped."""
        stop = file.start + sizes[file]
        found = [each for each in candidates if each.start < stop and file.start < each.start + sizes[each]]
        return [(each, _map(store, each)) for each in found]

    for i, file in enumerate(files):
        earlier, left = overlapping(file, files[:i]), overlapping(file, others)
        tally = Tally(file.name)
        for item in contents(store, file):
            if isinstance(item, Finding):
                tally.other_bytes += item.length
                continue
            tally.messages += 1
            if _is_bookkeeping(item.topic):
                tally.bookkeeping += 1
            elif obstacle := _obstacle(item):
                tally.refused[obstacle] += 1
            elif _is_in_log(store, item):
                tally.in_place += 1
            elif _holder(item, earlier) is not None:
                tally.repeated += 1
            elif (other := _holder(item, left)) is not None:
                raise ConfigError(
                    f"{file.name} and {other.name} have the same message, of physical offset {item.physical_offset}; "
                    "restore both together, else it would be appended twice"
                )
            else:
                if item.queue_id >= (queues := entered.get(item.topic, QUEUES_MAX)):
                    raise ConfigError(
                        f"{file.name} has a message for queue {item.queue_id} of topic {item.topic!r}, which has "
                        f"{queues} queues now; give it {item.queue_id + 1} with `mqstore topics alter --queues`, and "
                        "restore again"
                    )
                tally.appended += 1
                staged.add(item)
            if tally.messages % _BATCH == 0:
                progress(done + item.physical_offset - file.start, total)
        done += sizes[file]
        tallies.append(tally)
    return tallies


def _is_bookkeeping(topic: str) -> bool:
    """Return True for a topic in which the engine keeps records about other messages, unlike half messages."""
    return topic.lower().startswith(SYSTEM_PREFIX) and topic not in (TIMER_TOPIC, HALF_TOPIC)


def _obstacle(message: Message) -> str:
    """Return why a message cannot be appended, or "" if it can."""
    if message.topic == HALF_TOPIC or message.sys_flag & TRANSACTION_MASK not in (0, TRANSACTION_COMMIT):
        return "message of a transaction that was not committed"
    if message.sys_flag & INNER_BATCH:
        return "batch in one record"
    try:
        message._whole()
    except FormatError:
        return "message whose body is in a deleted record"
    if not 0 <= message.queue_id <= MAX_QUEUE_ID:
        return "invalid queue id"
    if not is_path_safe(message.topic):
        return "invalid topic name"
    return (
        "property that must be a number"
        if unreadable_number(message.topic.encode(), message._encoded_properties)
        else ""
    )


def _is_in_log(store: StoreReader, message: Message) -> bool:
    place = message.physical_offset
    if not store.min_offset <= place < store.max_offset:
        return False  # `at` would list the log's folder to find out
    try:
        return store.at(place)._record_bytes() == message._record_bytes()
    except LookupError:
        return False


def _holder(message: Message, files: Sequence[tuple[CutFile, mmap.mmap | bytes]]) -> CutFile | None:
    """Return the file that has the bytes of `message` at the same physical offset."""
    if not files:
        return None
    record = message._record_bytes()
    for file, buffer in files:
        at = message.physical_offset - file.start
        if at >= 0 and buffer[at : at + len(record)] == record:
            return file
    return None


class _Staged:
    """Records that must be appended, as a shard (`log.shard`). With `write` false they are only counted."""

    def __init__(self, store: StoreReader, *, write: bool) -> None:
        self.folder: Path = store.path / "cut" / _STAGED
        self.queues: Counter[QueueRef] = Counter()
        self._store = store
        self._write = write
        self._fd = -1
        self._buffer = bytearray()
        self._bytes = self._crc = self._largest = 0

    def add(self, message: Message) -> None:
        self.queues[message.queue] += 1
        if not self._write:
            return
        record = _without_place(message)
        self._largest = max(self._largest, len(record))
        self._buffer += record
        if len(self._buffer) >= _BUFFER_BYTES:
            self._flush()

    def _flush(self) -> None:
        fs = self._store.fs
        if self._fd < 0:
            fs.mkdir(self.folder)
            self._fd = self._create("records.bin")
        fs.pwrite(self._fd, self._buffer, self._bytes)
        self._crc = crc32c(self._buffer, self._crc)
        self._bytes += len(self._buffer)
        self._buffer = bytearray()

    def _create(self, name: str) -> int:
        return self._store.fs.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, self._store.config.file_mode)

    def finish(self) -> None:
        self._flush()
        content = shard_json(
            self._store.manifest.profile,
            records=self.queues.total(),
            size=self._bytes,
            crc=self._crc,
            largest=self._largest,
            queues=self.queues,
        )
        fs = self._store.fs
        fd = self._create("shard.json")
        try:
            fs.pwrite(fd, content, 0)
        finally:
            fs.close(fd)

    def close(self) -> None:
        if self._fd >= 0:
            self._store.fs.close(self._fd)
        if self._write:
            self._store.fs.remove_tree(self.folder)


def _without_place(message: Message) -> bytes:
    """Return a record as a shard has it: all fields that the log sets are zero or absent."""
    message = message._whole()
    record = bytearray(message._record_bytes())
    properties = message._encoded_properties
    kept = without_place(properties)
    if kept is not properties:
        record[len(record) - len(properties) - 2 :] = len(kept).to_bytes(2, "big") + kept
        record[TOTAL_SIZE_AT : TOTAL_SIZE_AT + 4] = len(record).to_bytes(4, "big")
    stamp_at = store_timestamp_at(message.sys_flag)
    for begin, end in ((CHECKSUM_AT, QUEUE_ID_AT), (QUEUE_OFFSET_AT, SYS_FLAG_AT), (stamp_at, stamp_at + 8)):
        record[begin:end] = bytes(end - begin)
    return bytes(record)


# -- once --------------------------------------------------------------------------------------------------------------


def _spliced(store: StoreReader) -> frozenset[str]:
    """Return the names of the files that the last restore has appended, and may not have moved yet."""
    path = store.path / "cut" / _JOURNAL
    try:
        value = decode_json(read_json(path, store.fs))
        number, names = value.get("number"), value.get("files")
        if type(number) is not int or not isinstance(names, list):
            raise FormatError("it needs a number and a list of files", "number", 0)
        if not all(isinstance(name, str) and _NAME.fullmatch(name) for name in names):
            raise FormatError("its files are not names of cut files", "files", 0)
    except FileNotFoundError:
        return frozenset()
    except FormatError as error:
        raise FormatError(
            f"{path}: {error}. It names the files of cut/ that a restore wanted to append. If their messages are in "
            "the log, move those files to cut/restored/. Then remove this file",
            error.field,
            error.position,
        ) from error
    return frozenset(names) if number <= read_txn(store.path, store.fs).version_of(_APP) else frozenset()


def _settle(store: StoreReader) -> None:
    """Finish the last restore: move its files, and remove its temporary files."""
    fs, folder = store.fs, store.path / "cut"
    done = _spliced(store)
    if done:
        restored = folder / _RESTORED
        fs.mkdir(restored, exist_ok=True)
        for name in sorted(done):
            with suppress(FileNotFoundError):
                fs.replace(folder / name, free_path(restored / name))
        fs.sync_directory(restored)
        fs.sync_directory(folder)
    fs.unlink(folder / _JOURNAL, missing_ok=True)
    fs.remove_tree(folder / _STAGED)
