"""Committed offsets of each group in each queue, and forced restarts (delivery#offsets).

Callers check that a group or topic is registered.

=========  ==================================  =====  ==========================================================
table      key -> value                        kept   meaning
=========  ==================================  =====  ==========================================================
committed  group, topic, queue id -> offset    yes    everything before is consumed; absent is not 0
pulled     group, topic, queue id -> offset    no     end of the last read; messages before it may be in flight
resets     group, topic, queue id -> offset    no     start of the next read, once
=========  ==================================  =====  ==========================================================

A forced restart, queue by queue (delivery#reset)::

    reset(o)      committed := o, a reset is pending
    commit(x)     dropped while a reset is pending
    take_reset()  the next read or pop gets o, once; commits count again
    published(x)  ends a pending reset, and committed := x, because a publisher never takes a reset

The file is `config/consumerOffset.json` (delivery#saved-offsets). Between two synced saves there are quick ones::

    commit ---> wakes the housekeeper, if it is the first one after a save ---> 100 ms ---> quick save
                                                 later, if quick saves would take more than 2 % of a processor

Offsets that other processes publish (`external_offsets.py`) are added as commits at opening, every `commit_interval`
and at closing. A process that opens the store for reading sees them earlier.

The group `START_GROUP` has each queue's *logical start* in the same table: earlier messages were purged. A start only
moves forward, and survives the removal of groups. It is removed with its topic, since the log then hides the messages.

Dead letters after a logical start that were sent again are in the member `sentLetters` of the file: ranges
[start, stop] by topic, ascending and apart. A start that reaches a range moves to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from json.encoder import encode_basestring
from operator import index
from time import thread_time
from typing import Any

from mqstore.broker.background.service import BackgroundService
from mqstore.broker.tables.configfile import QUICK_MS, ConfigFile, data_version, entries, object_member
from mqstore.broker.tables.external_offsets import ExternalOffsetFiles
from mqstore.broker.tables.names import START_GROUP, QueueKey, is_system_group
from mqstore.errors import ConfigError
from mqstore.files.jsonfile import EncodedEntry
from mqstore.log.directory.names import is_path_safe
from mqstore.log.reading.reader import StoreReader
from mqstore.log.recovery.queueends import load_ends
from mqstore.options import Durability, milliseconds
from mqstore.signalsafe import Lock

_OFFSET_MAX = 0x7FFF_FFFF_FFFF_FFFF
_QUEUE_ID_MAX = 0x7FFF_FFFF
_BROADCAST = "broadcast"
# RocketMQ's consumerOffsetUpdateVersionStep: its data version does not count single commits.
_VERSION_STEP = 500
_QUICK_REST = 50
"""Shortest pause before the next quick save, as a multiple of the last one's duration, since the table may be large."""


class OffsetTable(BackgroundService):
    """Committed offsets of all groups. Thread-safe. Look-ups take no lock.

    The class is long because its tables (offsets, resets, logical starts, sent dead letters) are in one file and change
    together.
    """

    def __init__(self, store: StoreReader) -> None:
        """Load the file. Raises CorruptStoreError if no good copy of it is left, StoreIOError."""
        self._store = store
        self._interval_ms = max(1, milliseconds(store.config.commit_interval, "commit_interval"))
        self._due_ms: int | None = None
        self._noted = load_ends(store.path, store.fs)
        """Queue ends after a recovery shortened queues, or None. Also None once these offsets are loaded."""
        log_end = self._log_end() if store.mode == "rw" else None
        self._file = ConfigFile(store, "consumerOffset.json", check_offsets, log_end=log_end)
        self.wake: Callable[[], None] = lambda: None
        """Function to call when `run_once` must run earlier than it returned."""
        self._quick_due_ms: int | None = None
        self._quick_pause_ms = QUICK_MS
        self._wakes = True
        """True if the next commit must call `wake`."""
        self._lock = Lock()
        self.by_topic: dict[str, dict[str, dict[int, int]]] = {}
        """Topic -> group -> queue id -> offset. Compiled settlements of pop change it like `note`, but without the
        lock, between any two calls of Python. So Python code must not make a call between reading an offset and writing
        it, and this is always the same dict."""
        self.compiled_changes: Callable[[], int] = int
        """Function that returns the number of changes by compiled code."""
        self._beginning: dict[tuple[str, str], dict[int, int]] = {}
        """First offsets by (group, topic) that are being saved."""
        self._sent: dict[str, tuple[tuple[int, int], ...]] = {}
        """Ranges [start, stop) of dead letters sent again, by topic.
        They are ascending, do not touch, and are after the topic's start."""
        self._pulled: dict[QueueKey, int] = {}
        self.resets: dict[QueueKey, int] = {}
        """Pending resets. Callers must not change them."""
        # _changes does not count those by compiled code. _saved counts all changes on disk, _written those in the page
        # cache, too. _saving is the lock for a whole save, taken before _lock.
        self._changes = 0
        self._saved = 0
        self._written = 0
        self._saving = Lock()
        self._foreign: dict[str, Any] = {}
        self._versioned = 0
        """Number of changes that the version counts, in steps."""
        self._load()
        self._published = ExternalOffsetFiles(store.path, store.fs, self._file.report)
        self._fold()
        # Save at once. Otherwise, after the queue has grown past a lowered offset, the old one in the file would look
        # valid again, and after a crash the group would skip messages. A reader lowers it only in memory.
        if store.mode == "rw":
            self.save()
            self._published.settle()
        self._noted = None

    # -- committed --------------------------------------------------------------------------------------------------

    def committed(self, key: QueueKey) -> int | None:
        """Return the group's committed offset in a queue, or None if it never committed, which is not 0."""
        group, topic, queue_id = key
        groups = self.by_topic.get(topic)
        if groups is None or (queues := groups.get(group)) is None:
            return None
        return queues.get(queue_id)

    def commit(self, key: QueueKey, offset: int, *, durability: Durability | None = None) -> None:
        """Commit that the group has consumed all messages of the queue before `offset`.

        The last commit wins, also backwards. A commit while a reset is pending is dropped. With "flush" the commit is
        on disk when this returns, together with its messages, and is never lost. Raises ConfigError for a number below
        0 or an invalid name. With "flush" it raises the errors of `save`, and then the commit stays in memory and is
        saved later.
        """
        group, topic, queue_id = key
        if type(offset) is not int or type(queue_id) is not int:
            # A numpy integer, which JSON cannot encode, would make every later save fail.
            offset, queue_id = index(offset), index(queue_id)
            key = QueueKey(group, topic, queue_id)
        if not (0 <= offset <= _OFFSET_MAX and 0 <= queue_id <= _QUEUE_ID_MAX):
            raise ConfigError(
                f"offset {offset} of queue {queue_id} of {topic!r}: an offset must be 0..{_OFFSET_MAX}, "
                f"a queue id 0..{_QUEUE_ID_MAX}"
            )
        self.note(key, offset)
        if durability == "flush":
            self.save()
        elif self._wakes:
            self._wakes = False
            self.wake()

    def note(self, key: QueueKey, offset: int) -> None:
        """Commit without a quick save: offsets of the engine, or offsets that are in the pop log, too."""
        with self._lock:
            if not self.resets or key not in self.resets:
                group, topic, queue_id = key
                try:
                    self.by_topic[topic][group][queue_id] = offset
                except KeyError:
                    self._queues_of(group, topic)[queue_id] = offset
                self._changes += 1

    def begin(self, key: QueueKey) -> None:
        """Commit a queue's first message for a group without a committed offset in it.
        Its messages then count as the group's lag, and retention keeps them. For retry topics (delivery#pop-queues).
        Raises ConfigError like `commit`."""
        if self.committed(key) is None:
            group, topic, queue_id = key
            first, _ = self.bounds(topic, queue_id)
            with self._lock:
                self._queues_of(group, topic).setdefault(queue_id, first)
                self._changes += 1

    def start(self, group: str, topic: str, begins: Mapping[int, int], *, durable: bool) -> None:
        """Commit first offsets by queue id for a group without committed offsets in these queues.
        With `durable` they are on disk when this returns. Raises the errors of `commit` and `save`, and then nothing
        changed."""
        if durable:
            # The file is saved first, so that no caller relies on an offset that may be lost.
            with self._lock:
                self._beginning[group, topic] = dict(begins)
                self._changes += 1
            try:
                self.save()
            except BaseException:
                with self._lock:
                    del self._beginning[group, topic]
                    self._changes += 1
                raise
        with self._lock:
            self._beginning.pop((group, topic), None)
            queues = self._queues_of(group, topic)
            for queue_id, offset in begins.items():
                queues.setdefault(queue_id, offset)
            self._changes += 1

    def _queues_of(self, group: str, topic: str) -> dict[int, int]:
        """Return the group's offsets in a topic, to be changed. A missing table is created.
        Raises ConfigError for names that could not be read back from the file."""
        for name in (group, topic):
            if "@" in name or not is_path_safe(name):
                raise ConfigError(
                    f"{name!r} cannot have offsets: a name is 1 to 255 bytes without '@', '/' or controls"
                )
        return self.by_topic.setdefault(topic, {}).setdefault(group, {})

    # -- the last read ----------------------------------------------------------------------------------------------

    def note_pull(self, key: QueueKey, offset: int) -> None:
        """Record that a read of the group ended before `offset`."""
        with self._lock:
            self._pulled[key] = offset

    def query_pull(self, key: QueueKey) -> int | None:
        """Return the end of the group's last read in this process, or else its committed offset."""
        offset = self._pulled.get(key)
        return self.committed(key) if offset is None else offset

    # -- forced restarts --------------------------------------------------------------------------------------------

    def reset(self, key: QueueKey, offset: int) -> None:
        """Move the group's committed offset in this queue, whatever running consumers commit meanwhile.
        The caller has checked that the queue has this offset. Raises ConfigError like `commit`. On disk with the next
        save."""
        with self._lock:
            queues = self._queues_of(key.group, key.topic)
            self.resets[key] = offset  # first, because it stops compiled code from changing the offset
            queues[key.queue_id] = offset
            self._changes += 1
            self._pulled.pop(key, None)

    def take_reset(self, key: QueueKey) -> int | None:
        """Take the pending reset, or None, for the read or pop that starts there."""
        if not self.resets:
            return None
        with self._lock:
            return self.resets.pop(key, None)

    # -- whole groups and topics ------------------------------------------------------------------------------------

    def remove_group(self, group: str) -> None:
        """Forget all offsets of a group. Raises ConfigError for a system group."""
        if is_system_group(group):
            raise ConfigError(f"{group!r} is a system group and cannot be removed")
        with self._lock:
            for topic, groups in list(self.by_topic.items()):
                if groups.pop(group, None) is not None:
                    self._changes += 1
                if not groups:
                    del self.by_topic[topic]
            self._forget(lambda key: key.group == group)
        if self._store.mode == "rw":
            self._published.forget(group)

    def remove_topics(self, topics: Collection[str]) -> None:
        """Forget all offsets in deleted topics, on disk when this returns.
        Raises the errors of `save`, and then the next save writes it."""
        with self._lock:
            for topic in topics:
                self._changes += len(self.by_topic.pop(topic, {}))
                self._sent.pop(topic, None)
            self._forget(lambda key: key.topic in topics)
        self.save()

    def move_starts(self, topics: Mapping[str, Mapping[int, int]]) -> None:
        """Move the logical starts of queues (topic -> queue id -> offset). They are on disk on return.
        A committed offset before the start moves to it. Later offsets stay, so a late call redelivers nothing. Raises
        the errors of `save`, and then nothing changed."""
        before: dict[str, dict[str, dict[int, int]]] = {}
        with self._lock:
            sent = dict(self._sent)
            for topic, ends in topics.items():
                before[topic] = {group: dict(queues) for group, queues in self.by_topic.get(topic, {}).items()}
                self._raise_to(topic, ends)
                for queue_id, offset in ends.items():
                    self._move_start(topic, queue_id, offset)
        try:
            self.save()
        except BaseException:
            with self._lock:
                self.by_topic.update(before)
                self._sent = sent
                self._changes += 1
            raise

    def _raise_to(self, topic: str, starts: Mapping[int, int]) -> None:
        for group, queues in self.by_topic.get(topic, {}).items():
            if is_system_group(group):
                continue
            for queue_id, start in starts.items():
                if queue_id in queues and queues[queue_id] < start:  # no call in here: compiled code may note an offset
                    queues[queue_id] = start
        self._changes += 1
        self._forget(lambda key: key.topic == topic and key.queue_id in starts)

    def _forget(self, concerned: Callable[[QueueKey], bool]) -> None:
        for table in (self._pulled, self.resets):
            for key in [key for key in table if concerned(key)]:
                del table[key]

    def of_group(self, group: str) -> dict[tuple[str, int], int]:
        """Return the group's committed offsets by (topic, queue id)."""
        with self._lock:
            return {
                (topic, queue_id): offset
                for topic, groups in self.by_topic.items()
                for queue_id, offset in groups.get(group, {}).items()
            }

    def of_all(self) -> list[tuple[str, str, dict[int, int]]]:
        """Return (group, topic, committed offsets by queue id) of all consumer groups."""
        with self._lock:
            return [
                (group, topic, dict(queues))
                for topic, groups in self.by_topic.items()
                for group, queues in groups.items()
                if not is_system_group(group)
            ]

    def groups(self) -> set[str]:
        """Return the consumer groups that have committed offsets."""
        with self._lock:
            return {group for groups in self.by_topic.values() for group in groups if not is_system_group(group)}

    def groups_of(self, topic: str) -> set[str]:
        with self._lock:
            return {
                group for group, queues in self.by_topic.get(topic, {}).items() if queues and not is_system_group(group)
            }

    def of_queue(self, topic: str, queue_id: int) -> dict[str, int | None]:
        """Return the committed offset of each group of the topic in one queue, by group in order.
        It is None for a group that never committed there."""
        return {group: self.committed(QueueKey(group, topic, queue_id)) for group in sorted(self.groups_of(topic))}

    # -- logical starts ---------------------------------------------------------------------------------------------

    def start_of(self, topic: str, queue_id: int) -> int:
        """Return the logical start of a queue, before which no message counts. It is usually 0."""
        start = self.committed(QueueKey(START_GROUP, topic, queue_id)) or 0
        if self._store.deleted_at(topic) and (bounds := self._store.offsets_or_none(topic, queue_id)) is not None:
            return max(start, bounds[0])
        return start

    def bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Return (offset of the first message that counts, end of the queue), equal without messages."""
        low, high = self._store.offsets_or_none(topic, queue_id) or (0, 0)
        return min(high, max(low, self.start_of(topic, queue_id))), high

    def move_start(self, topic: str, queue_id: int, offset: int) -> None:
        """Move a queue's logical start to `offset`. A lower offset changes nothing."""
        with self._lock:
            self._move_start(topic, queue_id, offset)

    def sent(self, topic: str) -> Sequence[tuple[int, int]]:
        """Return [start, stop) of the later dead letters of `topic` that were sent again, ascending."""
        return self._sent.get(topic, ())

    def note_sent(self, topic: str, letters: Iterable[tuple[int, int]]) -> None:
        """Record dead letters [start, stop) of `topic` as sent again. They are saved together with the starts."""
        with self._lock:
            found: list[tuple[int, int]] = []
            for low, high in sorted([*self.sent(topic), *letters]):
                if found and low <= found[-1][1]:
                    found[-1] = (found[-1][0], max(high, found[-1][1]))
                else:
                    found.append((low, high))
            self._keep_sent(topic, found)
            self._move_start(topic, 0, self.start_of(topic, 0))

    def _keep_sent(self, topic: str, letters: Sequence[tuple[int, int]]) -> None:
        if letters != [*self.sent(topic)]:
            self._sent[topic] = tuple(letters)
            self._changes += 1
        if not letters:
            self._sent.pop(topic, None)

    def _move_start(self, topic: str, queue_id: int, offset: int) -> None:
        if queue_id == 0 and (sent := self.sent(topic)):
            offset = after_sent(max(offset, self.start_of(topic, 0)), sent)
            self._keep_sent(topic, [letters for letters in sent if letters[0] > offset])
        if offset > self.start_of(topic, queue_id):
            self._queues_of(START_GROUP, topic)[index(queue_id)] = index(offset)
            self._changes += 1

    # -- the file ---------------------------------------------------------------------------------------------------

    @property
    def dirty(self) -> bool:
        return self._count() != self._saved

    def _count(self) -> int:
        """Return the number of all changes."""
        return self._changes + self.compiled_changes()

    def save(self) -> None:
        """Save all commits made before this call, unless they are on disk.
        Raises FlushFailedError, FlushTimeoutError (for the commitlog, which is flushed first), StoreFullError,
        StoreIOError, ReadOnlyStoreError. The file is then unchanged, and the next save tries again."""
        wanted = self._count()
        with self._saving:
            if self._saved < wanted:  # otherwise another save included our change
                self._write(quick=False)

    def _save_quickly(self) -> None:
        """Save all commits made before this call without a sync. Raises the errors of `save`."""
        self._wakes = True
        with self._saving:
            if self._written != self._count():
                self._write(quick=self._file.has_saved)

    def _write(self, *, quick: bool) -> None:
        """Write the table. Call under `_saving`."""
        self._wakes = True  # before the copy, so that a commit that the copy misses wakes the housekeeper
        with self._lock:
            changes = self._count()
            table = {
                (group, topic): dict(queues)
                for topic, groups in self.by_topic.items()
                for group, queues in groups.items()
            }
            for key, begins in self._beginning.items():
                table[key] = begins | table.get(key, {})
            sent = {topic: [[*each] for each in letters] for topic, letters in self._sent.items()}
        # After the copy, so that every message before an offset of the copy is flushed.
        log_end = self._store.max_offset if quick else None
        if not quick:
            self._file.flush_log()
        begin_s = thread_time()  # without waits for the disk or the interpreter's lock
        steps = changes // _VERSION_STEP - self._versioned
        keyed = ((f"{topic}@{group}", queues) for (group, topic), queues in table.items() if queues)
        written = {key: _line(key, queues) for key, queues in keyed}
        more = {"sentLetters": sent} if sent else {}
        self._file.save({"offsetTable": self._foreign | written, **more}, steps=steps, quick_log_end=log_end)
        self._written, self._versioned = changes, self._versioned + steps
        if not quick:
            self._saved = changes
        self._quick_pause_ms = max(QUICK_MS, round((thread_time() - begin_s) * 1000 * _QUICK_REST))

    def run_once(self, now_ms: int) -> int:
        """Save changes every `commit_interval`, and new commits quickly. Return the next time (wall ms).
        Raises the errors of `save`."""
        if self._due_ms is None:
            self._due_ms = now_ms + self._interval_ms
        # The second condition of each is for a wall clock that was set back, which would delay the save.
        if now_ms >= self._due_ms or now_ms + self._interval_ms < self._due_ms:
            self.persist()
            self._due_ms, self._quick_due_ms = now_ms + self._interval_ms, None
        elif self._quick_due_ms is not None and not now_ms < self._quick_due_ms <= now_ms + self._quick_pause_ms:
            self._save_quickly()
            self._quick_due_ms = None
        if self._quick_due_ms is None and not self._wakes:
            self._quick_due_ms = now_ms + self._quick_pause_ms
        return self._due_ms if self._quick_due_ms is None else min(self._due_ms, self._quick_due_ms)

    def persist(self) -> None:
        """Save changes, and offsets that other processes have published. Raises the errors of `save`."""
        if self._store.mode == "rw":
            self._fold()
        self.save()
        self._published.settle()

    def _log_end(self) -> int:
        end = self._store.max_offset
        return end if self._noted is None else min(end, self._noted.log_end)

    def _load(self) -> None:
        value = self._file.load() or {}
        for key, queues in object_member(value, "offsetTable").items():
            topic, at, group = key.partition("@")
            if at and "@" not in group and is_path_safe(topic) and is_path_safe(group):
                offsets = dict(self._usable(key, queues or {}))
                if offsets:
                    self.by_topic.setdefault(topic, {})[group] = offsets
                continue
            self._foreign[key] = queues
            if not group.endswith("@" + _BROADCAST):  # the key of a Java broker's broadcast offsets
                self._file.report(f"{self._file.path}: {key!r} is not topic@group; its offsets are kept, but ignored")

        for topic, letters in object_member(value, "sentLetters").items():
            where = f"{self._file.path}: sentLetters of {topic}"
            lowered = [(low, self._lowered(where, topic, 0, high)) for low, high in letters]
            self._sent[topic] = tuple((low, high) for low, high in lowered if low < high)

    def _usable(self, key: str, queues: dict[str, Any]) -> Iterator[tuple[int, int]]:
        """Yield (queue id, offset) of an entry of the file, corrected to fit the queues."""
        for text, offset in queues.items():
            queue_id = int(text) if text.isascii() and text.isdigit() and len(text) < 11 else -1
            where = f"{self._file.path}: {key}, queue {text[:80]}"
            if not 0 <= queue_id <= _QUEUE_ID_MAX or str(queue_id) != text:
                self._change(f"{where}: invalid queue id; its offset {offset} is ignored")
            elif offset is None:
                continue
            elif offset < 0:
                self._change(f"{where}: offset {offset} is negative; it is ignored")
            else:
                topic, _, group = key.partition("@")
                yield queue_id, self._lowered(where, topic, queue_id, offset, group=group)

    def _fold(self) -> None:
        """Commit published offsets, except in queues that do not exist."""
        writable = self._store.mode == "rw"
        for group, offsets in self._published.take() if writable else self._published.look():
            if is_system_group(group):
                self._file.report(f"{self._store.path}: published offsets of the system group {group} are ignored")
                continue
            for (topic, queue_id), offset in offsets.items():
                if self._store.offsets_or_none(topic, queue_id) is None or not is_path_safe(topic) or "@" in topic:
                    continue
                if not writable:
                    self._queues_of(group, topic)[queue_id] = offset
                    continue
                offset = self._lowered(f"published by {group}: {topic}, queue {queue_id}", topic, queue_id, offset)
                key = QueueKey(group, topic, queue_id)
                self.take_reset(key)
                if self.committed(key) != offset:
                    self.commit(key, offset)

    def _lowered(self, where: str, topic: str, queue_id: int, offset: int, *, group: str = "") -> int:
        end = offset
        if self._store.mode == "rw":  # for a reader, the writer may have added messages that it has not seen yet
            end = (self._store.offsets_or_none(topic, queue_id) or (0, 0))[1]
        noted = self._noted
        if noted is not None and (noted.readable or group != START_GROUP):
            end = min(end, noted.of(topic, queue_id))
        if offset <= end:
            return offset
        self._change(f"{where}: offset {offset} is above the end of the queue; it is lowered to {end}")
        return end

    def _change(self, problem: str) -> None:
        self._file.report(problem)
        self._changes += 1


def _line(key: str, queues: Mapping[int, int]) -> EncodedEntry:
    """Return `encode_entry` of these offsets, four times as fast, because each save encodes the whole table."""
    numbers = ", ".join([f'"{queue_id}": {offset}' for queue_id, offset in sorted(queues.items())])
    return EncodedEntry(f"{encode_basestring(key)}: {{{numbers}}}")


def after_sent(offset: int, sent: Iterable[tuple[int, int]]) -> int:
    """Return the first offset from `offset` on outside the ascending ranges `sent`.

    >>> after_sent(3, [(3, 5), (5, 6), (8, 9)]), after_sent(7, [(3, 5), (8, 9)])
    (6, 7)
    """
    for low, high in sent:
        if low <= offset < high:
            offset = high
    return offset


def check_offsets(value: dict[str, Any]) -> None:
    """Raise ValueError if this is not a table of tables of integers. Null means absent."""
    for topic, letters in object_member(value, "sentLetters").items():
        end = -1
        for each in letters if type(letters) is list else [None]:
            if type(each) is not list or [*map(type, each)] != [int, int] or not end < each[0] < each[1]:
                raise ValueError(f"sentLetters: {topic[:150]!r} must be a list of [start, stop], ascending and apart")
            end = each[1]
    data_version(value)
    for key, queues in entries(value, "offsetTable"):
        for queue_id, offset in queues.items():
            if offset is not None and type(offset) is not int:
                raise ValueError(
                    f"offsetTable: {key[:150]!r}, queue {queue_id[:20]!r}: {offset!r:.80} is not an offset"
                )
