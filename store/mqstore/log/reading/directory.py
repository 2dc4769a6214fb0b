"""Messages of a store directory, damaged or not, for tools that read it from outside.

A `Store` opened for reading serves applications: it passes over damage. `StoreFiles` reports damage, and reads messages
that no queue lists. It takes no lock and leaves no trace, not even in access times (`files.readonly_fs`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from operator import attrgetter
from pathlib import Path

from mqstore.closing import Closing
from mqstore.errors import FormatError
from mqstore.files.readonly_fs import QUIET
from mqstore.files.segment import place_in_file
from mqstore.layout.messageid import decode_message_id
from mqstore.log.message import Message, json_lines
from mqstore.log.reading.raw_scan import damage_at, walk_log, walk_queue
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.reading.records import RemovedBodyError
from mqstore.log.reading.tagfilter import parse_tags
from mqstore.log.recovery.report import Finding
from mqstore.log.recovery.verify import Gap
from mqstore.log.writing.log_tail import QueueRef


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
        self._front = (0, 0)

    def close(self) -> None:
        """Close all files."""
        self._store.close()

    # -- one message ------------------------------------------------------------------------------------------------

    def at(self, place: int | str) -> Message:
        """Return the message with this physical offset, or with this message id. Raises LookupError if there is none,
        InvalidMessageError if it is not a message id."""
        return self._store.get_by_id(place) if isinstance(place, str) else self._store.at(place)

    def damage_at(self, place: int | str) -> list[Finding]:
        """Return the damage at this physical offset, or where the message with this id was."""
        position = decode_message_id(place)[1] if isinstance(place, str) else place
        return [*damage_at(self._store, position)]

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
            self._front = began, verifier.front
            if isinstance(item, list):
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
    def front(self) -> tuple[int, int]:
        """Physical offsets where the log began when `log` was called, and now. Retention moves it."""
        return self._front

    @property
    def clean_shutdown(self) -> bool:
        """True if the last writer had closed the store."""
        return self._store.clean_shutdown

    @property
    def bad_records(self) -> int:
        """Number of records that `iter`, `find` and `follow` passed over since they do not verify."""
        return self._store.stats().bad_records

    def unlisted_queue(self, topic: str) -> QueueRef | None:
        """Return a queue of the topic that does not list all its messages, and that no writer will complete."""
        return self._store.unlisted_queue({topic})
