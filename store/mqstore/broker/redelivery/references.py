"""References instead of bodies: a message that waits for a retry has its body in the record of the failed attempt.

    failed attempt         waits in a level or the timer       due
    record O, with body    record W, a reference to O          %RETRY%group, with the body of O

So a failed attempt writes the body once, in profile mqstore. In profile rocketmq W has the body, since a Java broker
may read it. W becomes whole again wherever it is copied (`Message._whole`).

O must stay for as long as W waits. The rule needs no list of references, neither in memory nor on disk:

    W refers to O only if W is at most `reach` bytes after O       checked when W gets its offset in the log
    retention keeps `reach` bytes before the first waiting W       `Pin.reach`

A later W is after the first one, so its O is kept, too. If O is too far away, W has the body itself. So it does if the
body is no longer than a reference.

Until W is in the log, perhaps nothing else keeps O: the group's offset was reset, or the policy keeps nothing
unconsumed. So O is pinned here meanwhile. While retention searches for the oldest pin, no reference is made, since it
may have read the pins here already. Then W has the body itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from mqstore.broker.background.service import Pin, oldest_of
from mqstore.layout.bodyref import REFERENCE_BYTES
from mqstore.layout.record import BODY_ELSEWHERE
from mqstore.log.commitlog import OutOfReachError, SendReceipt
from mqstore.log.directory.manifest import Manifest
from mqstore.log.message import Message
from mqstore.log.store import MessageStore
from mqstore.log.writing.writer import RecordOptions
from mqstore.signalsafe import Lock


def reach_of(manifest: Manifest) -> int:
    """Return the largest distance in bytes of a waiting record from its body: a segment, or 0 in profile rocketmq."""
    return manifest.commitlog_segment_bytes if manifest.profile == "mqstore" else 0


class References:
    """Writer of records that refer to a body. Thread-safe."""

    def __init__(self, store: MessageStore) -> None:
        self.reach = reach_of(store.manifest)
        self._store = store
        self._lock = Lock()
        self._held: dict[object, int] = {}
        """Offsets of the records whose references are just being appended."""
        self._searches: set[object] = set()
        """A key for each thread that searches for the oldest pin."""
        self._kept_from = 0
        """Greatest offset before which retention may delete."""

    def append(
        self, topic: str, queue_id: int, message: Message, properties: Mapping[str, str], options: RecordOptions
    ) -> SendReceipt | None:
        """Append a record that refers to the body of `message`, or return None if it must have the body.
        Raises the errors of `MessageStore.append`."""
        store, place = self._store, message.physical_offset
        # A record that has only a reference has a body of this length. So nothing refers to it.
        if len(message.body_view) <= REFERENCE_BYTES or store.max_offset - place > self.reach:
            return None
        key = object()
        try:
            with self._lock:
                if self._searches or place < max(self._kept_from, store.min_offset):
                    return None
                self._held[key] = place
            flags = options.get("sys_flag", 0) | BODY_ELSEWHERE
            record: RecordOptions = {**options, "sys_flag": flags, "latest": place + self.reach}
            return store.append(topic, queue_id, message._reference(), properties=properties, **record)
        except OutOfReachError:  # other threads have appended too much meanwhile
            return None
        finally:
            with self._lock:
                self._held.pop(key, None)

    def oldest(self, pins: Callable[[], Iterator[Pin]]) -> Pin | None:
        """Return the oldest of `pins`, or None. Segments before it may be deleted from now on."""
        store, key = self._store, object()
        try:
            with self._lock:
                self._searches.add(key)
                found = [Pin(place, "", 0, "", "a message that is sent back") for place in self._held.values()]
            end = store.max_offset
            store.news.catch_up(None)
            if self.reach and (dispatched := store.dispatched_end) < end:  # `pins` does not see later waiting records
                found.append(Pin(dispatched, "", 0, "", "messages that are not dispatched", reach=self.reach))
            pin = oldest_of([*found, *pins()])
            with self._lock:
                self._kept_from = max(self._kept_from, store.max_offset if pin is None else pin.kept_from)
            return pin
        finally:
            with self._lock:
                self._searches.discard(key)
