"""Records that retention keeps because their names are unique for a time (clients#queue-unique)."""

from __future__ import annotations

from collections.abc import Iterator

from mqstore.broker.context import Parts
from mqstore.broker.names import KEPT_NAMES, TIMER_TOPIC
from mqstore.broker.retention import physical_of
from mqstore.broker.service import BackgroundService, Pin


class KeptNames(BackgroundService):
    """Pins of all topics that had an item with `unique_for`. The time is an attribute of the topic."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def run_once(self, now_ms: int) -> None:
        """Do nothing: there is no work."""

    def pins(self) -> Iterator[Pin]:
        """Yield the first record of each queue whose name may still count."""
        store, now_ms = self._parts.store, self._parts.clock.now_ms()
        for config in self._parts.topics.configs():
            if (kept_s := config.attributes.get(KEPT_NAMES)) is None or not kept_s.isdecimal():
                continue
            for topic, queue_id in ((TIMER_TOPIC, 0), *((config.name, i) for i in config.queue_ids)):
                if store.offsets_or_none(topic, queue_id) is not None:
                    offset = store.offset_at(topic, queue_id, now_ms - 1000 * int(kept_s))
                    if (physical := physical_of(store, topic, queue_id, offset)) is not None:
                        yield Pin(physical, topic, queue_id, "", "names of items that are unique for a time")
