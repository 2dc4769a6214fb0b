"""Search for messages of a store directory by key, time, tag, properties and body.

    key or unique key, and an index      candidates of the index in each topic, newest first
    a topic whose queues are complete    its queues, in the order of the log
    anything else                        the log, also messages that no queue lists

Queues and log are searched for the first message of the time, and read to its last one: messages outside of it are not
read. This needs store times that ascend along the log, as they do unless the clock was set back.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from heapq import merge
from operator import attrgetter
from typing import Any, Final

from mqstore.broker.reads.filters.filter import parse_filter
from mqstore.errors import ConfigError, FormatError
from mqstore.files.segment import place_in_file
from mqstore.layout.record import Record
from mqstore.log.directory.store_files import NO_INDEX
from mqstore.log.message import Message
from mqstore.log.reading.directory import StoreFiles, walk_queue
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.reading.tagfilter import parse_tags
from mqstore.log.recovery.report import Finding
from mqstore.log.recovery.scanning.scanner import Bad, Good, first_good_in, record_at, scan_log

_NEVER_MS: Final = 1 << 62
_CANDIDATES: Final = 1 << 20
"""Largest number of a topic's messages that the index is asked for."""
_AHEAD: Final = 4096
"""Number of messages that are read ahead in all queues of a topic together."""


class Search:
    """Choice of messages for one search, and afterwards the figures of that search.

    >>> import mqstore, tempfile
    >>> from mqstore.engine import StoreFiles
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with mqstore.open(folder) as store:
    ...         _ = store.put("orders", b"3 apples", keys="o-1")
    ...         _ = store.put("orders", b"7 pears", keys="o-2")
    ...     with StoreFiles(folder) as files:
    ...         search = Search(grep=r"\\d pears")
    ...         [message.keys for message in search.run(files)], search.by
    ([('o-2',)], 'log')
    """

    def __init__(
        self,
        topics: Collection[str] = (),
        queue_id: int | None = None,
        *,
        key: str | None = None,
        unique_key: str | None = None,
        tags: str = "*",
        start_ms: int | None = None,
        stop_ms: int | None = None,
        where: str | None = None,
        grep: str | None = None,
        from_offset: int = 0,
        limit: int | None = None,
    ) -> None:
        """Choose messages that match everything that is given.

        `topics` are those in which messages are stored. Without one, all are searched, also those of retries, delays
        and dead letters. Store times are in [start_ms, stop_ms), in ms since the epoch. `where` is an SQL92 expression
        over the properties, as of a subscription. `grep` is a regular expression of `re`, which is searched in the
        decompressed body as bytes; `.` also matches a line end, and a pattern that backtracks without end takes its
        time. `from_offset` is the first queue offset of each queue. `limit` is the largest number of messages: the
        newest ones of a key, otherwise the first. Raises FilterError for `tags` and `where`, and ConfigError for `grep`
        and for a time that ends too early.
        """
        self.topics, self.queue_id, self.from_offset = topics, queue_id, from_offset
        self.key, self.unique_key, self.limit = key, unique_key, limit
        self.by = ""
        """Way of the search: `index`, `queue` or `log`."""
        self.messages = 0
        """Number of messages that were read."""
        self.bytes = 0
        """Bytes of their records."""
        self.missed: list[str] = []
        """Reasons why messages may be missing from the result."""
        self._segments: set[int] = set()
        self._segment_bytes = _NEVER_MS
        self._tags = parse_tags(tags, "")
        self._where = None if where is None else parse_filter(where, "SQL92")
        self._by_time = start_ms is not None, stop_ms is not None
        self._low, self._high = start_ms or 0, _NEVER_MS if stop_ms is None else stop_ms
        if self._low >= self._high:
            raise ConfigError(f"the time begins at {self._low} ms, but ends at {self._high} ms: give an earlier begin")
        try:
            self._grep = None if grep is None else re.compile(grep.encode(), re.DOTALL)
        except (re.error, RecursionError, OverflowError, UnicodeEncodeError) as error:
            raise ConfigError(f"pattern {grep!r} is not a regular expression of bytes: {error}") from error

    def __bool__(self) -> bool:
        """Return True if a message may fail to match."""
        chosen = (self.key, self.unique_key, self._tags, self._where, self._grep)
        return any(self._by_time) or any(each is not None for each in chosen)

    def _matches(self, message: Message) -> bool:
        """Raises FormatError and ImportError if that depends on a body that cannot be decompressed."""
        return (
            (not self.topics or message.topic in self.topics)
            and self.queue_id in (None, message.queue_id)
            and message.offset >= self.from_offset
            and self._low <= message.store_timestamp_ms < self._high
            and (self.key is None or self.key in message.keys)
            and self.unique_key in (None, message.unique_key)
            and (self._tags is None or message.tag in self._tags.tags)
            and (self._where is None or self._where.matches(message.stored_properties()))
            and (self._grep is None or self._grep.search(message.body) is not None)
        )

    def run(self, files: StoreFiles) -> Iterator[Message | Finding]:
        """Yield the messages, and findings for damage that may hide others. Raises TopicNotFoundError.
        Bodies that cannot be decompressed are counted in `missed` if they matter."""
        store = files._store  # noqa: SLF001
        by_key = self.key is not None or self.unique_key is not None
        unlisted = store.unlisted_queue(self.topics or None)
        for topic in self.topics if unlisted is None else ():
            store.queues(topic)
        doubt = store.parts.index_doubt() if by_key else ""
        if by_key and not doubt and unlisted is None:
            self.by, found = "index", self._by_index(store)
        elif self.topics and unlisted is None:
            self.by, found = "queue", self._by_queue(store)
        else:
            self.by, found = "log", self._by_log(store)
        self._segment_bytes = store.log_files.segment_bytes
        count, oldest_first = 0, by_key and self.by != "index"
        newest = deque[Message](maxlen=self.limit)
        for item in self.passing(found):
            if oldest_first and isinstance(item, Message):
                newest.append(item)
                continue
            yield item
            count += isinstance(item, Message)
            if count == self.limit:
                break
        if doubt and (newest or doubt != NO_INDEX):  # a store without keys has no index
            self.missed.append(f"{doubt}, so the log was read: run `mqstore recover {store.path} --rebuild index`")
        yield from reversed(newest)

    def passing(self, found: Iterable[Message | Finding]) -> Iterator[Message | Finding]:
        """Yield the messages of `found` that match, and all findings. The others are counted in the figures."""
        undecoded = 0
        for item in found:
            if isinstance(item, Finding):
                yield item
                continue
            self.messages += 1
            self.bytes += item.size
            self._segments.add(item.physical_offset // self._segment_bytes)
            try:
                if self._matches(item):
                    yield item
            except (FormatError, ImportError) as error:
                undecoded += 1
                self.missed[:] = [*self.missed[: -1 if undecoded > 1 else None], f"bodies of {undecoded}: {error}"]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures of the search as plain values, for JSON."""
        figures = {"by": self.by, "messages": self.messages, "bytes": self.bytes, "segments": len(self._segments)}
        return {**figures, "missed": self.missed}

    # -- ways ---------------------------------------------------------------------------------------------------------

    def _by_index(self, store: ReadOnlyMessageStore) -> Iterator[Message | Finding]:
        wanted = self.unique_key if self.key is None else self.key
        assert wanted is not None
        places: set[int] = set()
        for topic in self.topics or store.topics():
            found = store.index.query(topic, wanted, self._low, self._high, _CANDIDATES)
            places.update(place for place in found if place >= store.deleted_at(topic))
            if len(found) == _CANDIDATES:
                self.missed.append(
                    f"older messages of {topic} with this key than {_CANDIDATES}: choose an earlier time"
                )
        for place in sorted(places, reverse=True):
            try:
                yield store.at(place)
            except LookupError as error:
                if place >= store.min_offset:  # otherwise retention has deleted it
                    yield Finding("bad_record", *place_in_file(place, store.log_files.segment_bytes), 0, str(error))

    def _by_queue(self, store: ReadOnlyMessageStore) -> Iterator[Message | Finding]:
        refs = [ref for topic in self.topics for ref in store.queues(topic) if self.queue_id in (None, ref.queue_id)]
        walks = [
            walk_queue(
                store,
                *ref,
                max(self.from_offset, store.offset_at(*ref, self._low) if self._by_time[0] else 0),
                store.offset_at(*ref, self._high) if self._by_time[1] else None,
                step=max(8, _AHEAD // len(refs)),
            )
            for ref in refs
        ]
        return merge(*walks, key=lambda item: -1 if isinstance(item, Finding) else item.physical_offset)

    def _by_log(self, store: ReadOnlyMessageStore) -> Iterator[Message | Finding]:
        while True:
            verifier = store.verifier()
            try:
                first, stop = verifier.front, store.log_files.end
                first = _between(store, self._low, first)[0] if self._by_time[0] else first
                stop = _between(store, self._high, first)[1] if self._by_time[1] else stop
                break
            except FileNotFoundError:  # a writer has just deleted the first segments
                store.news.list_again()
        if stop < store.log_files.end:
            verifier = store.verifier(until=stop)
        if not self._by_time[0]:
            yield from (each for each in verifier.segments() if each.kind in ("missing_segment", "bad_json"))
        try:
            run = store.log_files
            for event in scan_log(run, first, store.checksum, on_front=verifier.front_moved) if run.starts else ():
                if isinstance(event, Good):
                    for at in event.headers.positions.tolist():
                        found = store.records.decoded(event.buffer, event.base, at)
                        if found.physical_offset >= store.deleted_at(found.topic):
                            yield found
                elif isinstance(event, Bad):
                    yield verifier.bad(event)
                else:
                    yield from verifier.end(event)
        finally:
            store.news.list_again()  # without the limit of `until`


def _between(store: ReadOnlyMessageStore, stamp_ms: int, front: int) -> tuple[int, int]:
    """Return (end of the last record before a time, start of the first one at or after it), from `front` on.
    Both are ends of the log if there is none. Reads some records, and the bytes between damage and the next record."""
    run, checksum = store.log_files, store.checksum
    segments = run.segments()

    def first(start: int, stop: int) -> Record | None:
        """Return the first record that begins in a range and verifies."""
        for segment in segments[bisect_right(segments, start, key=attrgetter("end")) :]:
            if segment.start >= stop:
                break
            at, before = max(0, start - segment.start), stop - segment.start
            if (place := first_good_in(run, segment, at, checksum, before)) is not None:
                return record_at(run, place, checksum)
        return None

    low, high = before, after = front, run.end
    while low < high:
        middle = (low + high) // 2
        record = first(middle, high)
        if record is not None and record.store_timestamp_ms < stamp_ms:
            low, before = record.physical_offset + 1, record.physical_offset + record.total_size
        else:
            high, after = middle, after if record is None else record.physical_offset
    return before, after
