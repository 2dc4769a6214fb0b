"""Messages of a store directory, damaged or not, for tools that read it from outside (format#damage).

A `Store` opened for reading serves applications: it passes over damage, and stops before a record that may be
half-written. Tools and exports need the opposite: all readable messages, and one report of each fault.

`walk_log` reads the log and needs no queue. It yields the messages that `mqstore recover` would list, and skips all
damage, regardless of the watermark:

    records that verify                        the messages, in log order
    bytes without a record                     Finding, at a place in the commitlog
    queue offsets without a record             Gap: these messages are lost

`walk_queue` reads the units of one queue:

    unit points to a record that verifies      the message
    void unit                                  nothing: its record was lost and reported before
    record does not verify                     Finding bad_record, at a place in the commitlog
    record in a missing file                   Finding missing_segment, once for each file
    record below the log's first segment       nothing: retention deleted it, perhaps meanwhile
    no unit, though later units exist          Finding missing_units, at a place in the queue

`StoreFiles` takes no lock and leaves no trace, not even in access times (`files.readonly_fs`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from mqstore import arrays as np
from mqstore.closing import Closing
from mqstore.errors import FormatError
from mqstore.files.readonly_fs import QUIET
from mqstore.files.segment import place_in_file
from mqstore.layout.consumequeue import UNIT_BYTES, is_void
from mqstore.layout.messageid import decode_message_id
from mqstore.log.derived.consumequeue import ConsumeQueue
from mqstore.log.message import Message, UnitBatch, json_lines
from mqstore.log.reading.reader import StoreReader
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.reading.records import RemovedBodyError
from mqstore.log.reading.tagfilter import parse_tags
from mqstore.log.recovery.offset_assigner import Placed
from mqstore.log.recovery.report import Finding
from mqstore.log.recovery.scanning.scanner import Bad, End, Good, batch_for, scan_log
from mqstore.log.recovery.verify import Gap, Verifier
from mqstore.log.writing.log_tail import QueueRef

_STEP = 512


def walk_log(
    store: StoreReader, verifier: Verifier, wanted: Callable[[str, int], bool] | None = None
) -> Iterator[list[Message] | Finding | Gap]:
    """Yield all messages in a reader's log of the queues `wanted`, by topic and queue id. None means all.

    `verifier` is a new one of `store`. Its `front` and `done_bytes` show the progress of the walk. Messages come in log
    order, in lists of messages of one segment: some thousand, or with many queues some 100,000. While a writer runs,
    the log ends where it ended when `verifier` was made. Needs bounded memory.
    """
    yield from (finding for finding in verifier.segments() if finding.kind in ("missing_segment", "bad_json"))
    first = verifier.front
    batch = batch_for(len(store.queue_table))
    events = scan_log(store.log_files, first, store.manifest.checksum, on_front=verifier.front_moved, batch=batch)
    for event in events if store.log_files.starts else ():
        if isinstance(event, Good):
            batches: list[UnitBatch] = []
            parts: list[Placed] = []
            for found in verifier.placed(verifier.rows_of(event), wanted):
                if isinstance(found, Finding):
                    if found.kind != "queue_offset":  # the right number is known, so no message is lost
                        yield found
                    continue
                if found.first > found.expected:
                    yield (*found.queue.ref, found.expected, found.first)
                find = store.records.finder(found.queue.topic)
                batches.append(UnitBatch(found.queue.ref, event.buffer, found.units.tobytes(), found.first, find))
                parts.append(found)
            verifier.done_bytes = event.end - first
            yield _in_log_order(event.base, batches, parts) if parts else []
        elif isinstance(event, Bad):
            yield verifier.bad(event)
        else:
            yield from verifier.end(event)
    if not verifier.is_live:
        yield from _lost_behind(store, verifier, wanted)


def _in_log_order(base: int, batches: list[UnitBatch], parts: list[Placed]) -> list[Message]:
    """Return the messages of `parts`, one queue after the other, as a list in the order of the log.
    `batches` has the batch of each part, `base` is the physical offset of their buffer."""
    counts = [len(part.units) for part in parts]
    physical = np.concatenate([part.units["physical_offset"] for part in parts]).astype(np.int64)
    order = np.argsort(physical, kind="stable")
    number = np.repeat(np.arange(len(parts)), counts)
    begins = np.array([part.first for part in parts]) - np.cumsum([0, *counts[:-1]])
    slots = np.arange(len(physical)) + begins[number]
    batch_of = map(batches.__getitem__, number[order].tolist())
    return [*map(Message, batch_of, (physical - base)[order].tolist(), slots[order].tolist())]


def _lost_behind(store: StoreReader, verifier: Verifier, wanted: Callable[[str, int], bool] | None) -> Iterator[Gap]:
    """Yield the queue offsets after the last record of each queue that have units, or void units."""
    for queue in store.queue_table:
        if wanted is None or wanted(*queue.ref):
            after = verifier.slots.behind(queue, verifier.front, store.log_files.end)
            if after.stop > after.first:
                yield (*queue.ref, after.first, after.stop)


def walk_queue(
    store: StoreReader,
    topic: str,
    queue_id: int,
    start: int | None = None,
    stop: int | None = None,
    *,
    step: int = _STEP,
) -> Iterator[Message | Finding]:
    """Yield the messages of queue offsets [start, stop) in order, and a `Finding` for unreadable ones.

    `start` None means the first offset, and a lower one is raised to it. `stop` None means the present end. Reads
    `step` messages at once. Raises TopicNotFoundError.
    """
    low, high = store.offsets(topic, queue_id)
    queue = store.queue_table.get(topic, queue_id)
    assert queue is not None
    position = low if start is None else max(start, low)
    end = high if stop is None else min(stop, high)
    missing: set[str] = set()
    while position < end:
        count = min(step, end - position)
        result = store.get(topic, queue_id, position, count, tell=False)
        if result.status == "OFFSET_TOO_SMALL":  # retention ran meanwhile
            position = result.min_offset
            continue
        # A read that got nowhere found no record that verifies in the whole step.
        after = result.next_offset if result.next_offset > position else position + count
        after = min(after, end)
        messages = [message for message in result.messages if message.offset < after]
        if len(messages) == after - position:
            yield from messages
        else:
            units = queue.units(position, after - position)
            # After reading the units, since retention deletes a record before its unit.
            front = store.records.find_front(queue)
            yield from _with_gaps(store, queue, position, messages, units, front, missing)
        position = after


def _with_gaps(
    store: StoreReader,
    queue: ConsumeQueue,
    first: int,
    messages: list[Message],
    units: np.ndarray,
    front: int,
    missing: set[str],
) -> Iterator[Message | Finding]:
    """Yield the messages of the slots from `first` on, and findings in place of missing ones.
    The slots have `units`. Retention may have deleted records of slots before `front`."""
    per = store.manifest.consumequeue_segment_bytes // UNIT_BYTES
    void = is_void(units)
    readable = {message.offset: message for message in messages}

    def kind_of(slot: int) -> tuple[str, int]:
        """Return the kind of a slot's content, and the number of its file."""
        _, length, _ = units[slot - first].tolist()
        kind = "message" if slot in readable else "hole" if length <= 0 else "void" if void[slot - first] else "bad"
        return kind if slot >= front or kind == "message" else "void", slot // per

    for (kind, _), group in groupby(range(first, first + len(units)), kind_of):
        slots = list(group)
        if kind == "message":
            yield from (readable[slot] for slot in slots)
        elif kind == "hole":
            yield queue.missing_units(slots[0], slots[-1])
        for slot in slots if kind == "bad" else ():
            physical, length, _ = units[slot - first].tolist()
            if 0 <= physical < store.min_offset:
                continue
            loss = store.records.loss_at(physical, length, queue.ref, slot)
            if loss.file not in missing:
                yield loss
            if loss.kind == "missing_segment":
                missing.add(loss.file)


class StoreFiles(Closing):
    """Store directory, opened to read its messages and its damage, also while a writer runs.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with mqstore.open(folder) as store:
    ...         _ = store.put_many("orders", [b"a", b"b"], queue_id=0)
    ...     with StoreFiles(folder) as files:
    ...         print(files.bounds("orders"))
    ...         [[message.body for message in found] for found in files.log()]
    {QueueRef(topic='orders', queue_id=0): (0, 2)}
    [[b'a', b'b']]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the directory. Raises NotAStoreError, CorruptStoreError and UnsupportedStoreError."""
        self.path = Path(path)
        self._store = ReadOnlyMessageStore(path, fs=QUIET)
        self.front = (0, 0)
        """Physical offsets where the log began when `log` was called, and now. Retention moves it."""

    def close(self) -> None:
        self._store.close()

    # -- one message ------------------------------------------------------------------------------------------------

    def at(self, place: int | str) -> Message:
        """Return the message with this physical offset, or with this message id. Raises LookupError if there is none,
        InvalidMessageError if it is not a message id."""
        return self._store.get_by_id(place) if isinstance(place, str) else self._store.at(place)

    def damage_at(self, place: int | str) -> list[Finding]:
        """Return the damage at this physical offset, or where the message with this id was.
        Reads the log from the start of that segment up to there."""
        position = decode_message_id(place)[1] if isinstance(place, str) else place
        run, checksum, verifier = self._store.log_files, self._store.manifest.checksum, self._store.verifier()
        start = max(position // run.segment_bytes * run.segment_bytes, verifier.front)
        before = max((each for each in run.starts if each <= start), default=start)
        found: list[Finding] = []
        for event in scan_log(run, before, checksum, on_front=verifier.front_moved):
            if isinstance(event, Bad) and event.start <= position < event.end:
                found.append(verifier.bad(event))
            elif isinstance(event, End) and event.position <= position:
                found += verifier.end(event)
            if not isinstance(event, End) and event.end > position:
                break
        return found

    # -- a queue ----------------------------------------------------------------------------------------------------

    def bounds(self, topic: str) -> dict[QueueRef, tuple[int, int]]:
        """Return (offset of the first message, offset of the next one to come) of each queue with messages.
        Raises TopicNotFoundError."""
        return {ref: self._store.offsets(*ref) for ref in self._store.queues(topic)}

    def walk(self, queue: QueueRef, start: int | None = None, stop: int | None = None) -> Iterator[Message | Finding]:
        """Yield the messages of queue offsets [start, stop), and a finding for each that is damaged."""
        return walk_queue(self._store, *queue, start, stop)

    def follow(
        self, topic: str, positions: dict[QueueRef, int], tags: str, queue_id: int | None = None
    ) -> Iterator[Message]:
        """Yield messages from `positions` on as they come, without end. Moves `positions`.
        Raises FilterError at once, and TopicNotFoundError while the topic does not exist."""
        parse_tags(tags, topic)
        return self._store.follow_queues(topic, positions, tags, queue_id)

    # -- the log ----------------------------------------------------------------------------------------------------

    def log(
        self,
        topics: Collection[str] = (),
        queue_id: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[list[Message] | Finding | Gap]:
        """Yield all messages of the log, or of these topics or one queue of each, in the order of the log.
        Messages that no queue lists are included. Damage is a finding, and a missing offset a gap (topic, queue id,
        first, stop). `progress` is called with (bytes read, all bytes). Raises TopicNotFoundError: at once if the
        queues are complete, otherwise at the end."""
        store, queues = self._store, set[str]()
        if store.parts.has_all_queues():
            self._check(topics, queue_id)
        verifier = store.verifier()
        began = verifier.front
        wanted = (lambda topic, number: topic in topics and queue_id in (None, number)) if topics else None
        for item in walk_log(store, verifier, wanted):
            self.front = began, verifier.front
            if topics and isinstance(item, list):
                queues.update(map(attrgetter("topic"), item))
            if progress is not None:
                progress(verifier.done_bytes, verifier.total_bytes)
            yield item
        self._check({*topics} - queues, queue_id)

    def _check(self, topics: Collection[str], queue_id: int | None) -> None:
        """Raise TopicNotFoundError for a missing topic or queue."""
        for topic in topics:
            self._store.queues(topic)
            if queue_id is not None:
                self._store.offsets(topic, queue_id)

    def lines(
        self, messages: list[Message], *, stored: bool = False
    ) -> Iterator[tuple[str, int] | Finding | ImportError]:
        """Yield messages as `mqstore export` writes them: (lines of JSON, how many). With `stored` a compressed body
        stays as it is.

        Yields a finding for a body that cannot be inflated, and the ImportError if that needs a package. Skips a
        message whose body retention has removed: it waited for its time once, and nothing waits for it now.
        """
        first = 0
        while first < len(messages):
            try:
                text, after = json_lines(messages, first, stored=stored)
            except ImportError as error:
                yield error
            except FormatError as error:
                if not isinstance(error, RemovedBodyError):
                    yield self._not_inflated(messages[first], error)
            else:
                yield text, after - first
                first = after
                continue
            first += 1

    def _not_inflated(self, message: Message, error: FormatError) -> Finding:
        where = f"{message.topic}, queue {message.queue_id}, offset {message.offset}"
        detail = f"{where}: skipped, its body does not inflate ({error})"
        segment_bytes = self._store.manifest.commitlog_segment_bytes
        return Finding("bad_record", *place_in_file(message.physical_offset, segment_bytes), message.size, detail)

    # -- completeness -----------------------------------------------------------------------------------------------

    @property
    def clean_shutdown(self) -> bool:
        """True if the last writer had closed the store."""
        return self._store.clean_shutdown

    @property
    def bad_records(self) -> int:
        """Number of records that `follow` passed over since they do not verify."""
        return self._store.stats().bad_records

    def unlisted_queue(self, topic: str) -> QueueRef | None:
        """Return a queue of the topic that does not list all its messages, and that no writer will complete."""
        return self._store.unlisted_queue({topic})
