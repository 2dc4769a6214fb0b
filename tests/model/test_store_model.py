"""A state machine: random operations on a store, compared after each with a model of plain lists.

Operations: put in every way, read in every way, retention, a clean restart, and the restart a killed process leaves
behind: the directory copied while the store is open, with whatever of it had been dispatched, flushed or noted by then.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mqstore import OutgoingMessage, SimulatedClock
from mqstore.errors import OffsetOutOfRangeError
from tests.log.support import Unsynced, open_store

TOPICS = ("alpha", "beta", "%RETRY%" + "g" * 130)  # the last has records of version 2
TAGS = (None, "Aa", "BB", "other")
SEGMENT = 2048
BODIES = st.integers(0, 1500).map(lambda n: bytes([n % 251]) * n) | st.binary(max_size=20)


@dataclass
class Stored:
    """A message as the model remembers it."""

    body: bytes
    tag: str | None
    key: str | None
    time_ms: int
    physical_offset: int


@dataclass
class ModelQueue:
    messages: list[Stored] = field(default_factory=list)
    first: int = 0
    """The first that retention has left."""


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="mqstore-model-"))
        self.generation = 0
        self.queues: dict[tuple[str, int], ModelQueue] = {}
        self.clock = SimulatedClock()
        self.store: Any = None

    @initialize(profile=st.sampled_from(["mqstore", "rocketmq"]), durability=st.sampled_from(["append", "flush"]))
    def create(self, profile: Any, durability: Any) -> None:
        self.durability = durability
        sizes = {"segment_bytes": SEGMENT, "consumequeue_units": 5, "index_slots": 7, "index_entries": 12}
        self.store = self.open(profile=profile, **sizes)

    def open(self, profile: Any = None, **sizes: int) -> Any:
        path = self.folder / str(self.generation)
        return open_store(path, profile=profile, durability=self.durability, fs=Unsynced(), clock=self.clock, **sizes)

    @property
    def opened(self) -> Any:
        assert self.store is not None
        return self.store

    def teardown(self) -> None:
        if self.store is not None:
            self.store.close()
        shutil.rmtree(self.folder)

    def remember(self, topic: str, queue_id: int, messages: list[Any], receipts: Any) -> None:
        queue = self.queues.setdefault((topic, queue_id), ModelQueue())
        receipts = list(receipts)
        assert [r.offset for r in receipts] == list(range(len(queue.messages), len(queue.messages) + len(messages)))
        now = self.clock.now_ms()
        for (body, tag, key), receipt in zip(messages, receipts, strict=True):
            assert receipt.store_timestamp_ms == now
            queue.messages.append(Stored(body, tag, key, now, receipt.physical_offset))

    # -- changing it ------------------------------------------------------------------------------------------------

    @rule(
        topic=st.sampled_from(TOPICS),
        queue_id=st.integers(0, 1),
        body=BODIES,
        tag=st.sampled_from(TAGS),
        key=st.sampled_from([None, "k1", "k2"]),
        durability=st.sampled_from([None, "append", "flush"]),
    )
    def put(self, topic: str, queue_id: int, body: bytes, tag: str | None, key: str | None, durability: Any) -> None:
        receipt = self.opened.put(topic, body, queue_id, tag=tag, keys=key, durability=durability)
        self.remember(topic, queue_id, [(body, tag, key)], [receipt])

    @rule(
        topic=st.sampled_from(TOPICS),
        queue_id=st.integers(0, 1),
        messages=st.lists(
            st.tuples(BODIES, st.sampled_from(TAGS), st.sampled_from([None, "k1", "k2"])), min_size=1, max_size=12
        ),
    )
    def put_many(self, topic: str, queue_id: int, messages: list[Any]) -> None:
        lot = [OutgoingMessage(body, tag=tag, keys=key) for body, tag, key in messages]
        self.remember(topic, queue_id, messages, self.opened.put_many(topic, lot, queue_id))

    @rule(duration_ms=st.integers(0, 5000))
    def time_goes_on(self, duration_ms: int) -> None:
        self.clock.advance(duration_ms)

    @rule()
    def housekeeping(self) -> None:
        self.opened.run_once(self.clock.monotonic_ms())

    @rule()
    def flush(self) -> None:
        self.opened.flush()

    @rule()
    def dispatch(self) -> None:
        self.opened.dispatch()

    @precondition(lambda self: self.queues)
    @rule(data=st.data())
    def retention(self, data: st.DataObject) -> None:
        store = self.opened
        store.flush()
        store.dispatch()
        store.drop_before(data.draw(st.integers(0, store.max_offset)))
        for queue in self.queues.values():
            kept = [i for i, m in enumerate(queue.messages) if m.physical_offset >= store.min_offset]
            queue.first = kept[0] if kept else len(queue.messages)

    @rule()
    def reopen(self) -> None:
        self.opened.close()
        self.store = self.open()
        assert self.opened.clean_shutdown
        assert self.opened.recovery.scanned_from is None

    @rule()
    def crash(self) -> None:
        before = self.opened
        self.generation += 1
        shutil.copytree(before.path, self.folder / str(self.generation))
        before.close()
        shutil.rmtree(before.path)
        self.store = self.open()
        assert not self.opened.clean_shutdown
        assert self.opened.recovery.findings == self.opened.recovery.truncated == []

    # -- looking at it ----------------------------------------------------------------------------------------------

    def visible(self, topic: str, queue_id: int) -> int:
        """The queue's end: all that was put, or in a store that shows only what is durable what it says itself."""
        queue = self.queues[topic, queue_id]
        if self.durability == "append" or self.opened.stats().flush_lag_bytes == 0:
            return len(queue.messages)
        if not self.opened.queue_table.get(topic, queue_id) or topic not in self.opened.topics():
            return 0
        flushed = self.opened.max_offset - self.opened.stats().flush_lag_bytes
        return next((i for i, m in enumerate(queue.messages) if m.physical_offset >= flushed), len(queue.messages))

    @precondition(lambda self: self.queues)
    @rule(data=st.data(), count=st.integers(0, 40), tags=st.sampled_from(["*", "Aa", "BB || other", "none"]))
    def read(self, data: st.DataObject, count: int, tags: str) -> None:
        topic, queue_id = data.draw(st.sampled_from(sorted(self.queues)))
        queue, end = self.queues[topic, queue_id], self.visible(topic, queue_id)
        offset = data.draw(st.integers(-1, len(queue.messages) + 1))
        if not end:
            return
        if not queue.first <= offset <= end:
            try:
                self.opened.read(topic, queue_id, offset, count, tags=tags)
            except OffsetOutOfRangeError as error:
                bounds = (error.min_offset, error.max_offset)
            else:
                bounds = None
            assert bounds == (queue.first, end)
            return
        wanted = {piece.strip() for piece in tags.split("||")}
        matching = [i for i in range(offset, end) if tags == "*" or queue.messages[i].tag in wanted]
        found = self.opened.read(topic, queue_id, offset, count, tags=tags)
        # Of colliding hashes fewer may come at a time, but the first that match, and some if there are any.
        assert [m.offset for m in found] == matching[: len(found)]
        assert len(found) == min(count, len(matching)) or (found and tags != "*")

    @precondition(lambda self: self.queues)
    @rule(data=st.data(), key=st.sampled_from(["k1", "k2", "k3"]))
    def find(self, data: st.DataObject, key: str) -> None:
        topic = data.draw(st.sampled_from(sorted({topic for topic, _ in self.queues})))
        self.opened.flush()
        expected = sorted(
            (
                m.physical_offset
                for (name, _), queue in self.queues.items()
                for m in queue.messages[queue.first :]
                if name == topic and m.key == key
            ),
            reverse=True,
        )
        assert [m.physical_offset for m in self.opened.find(topic, key=key, limit=10_000)] == expected

    @precondition(lambda self: self.queues)
    @rule(data=st.data())
    def offset_at(self, data: st.DataObject) -> None:
        topic, queue_id = data.draw(st.sampled_from(sorted(self.queues)))
        self.opened.flush()
        queue = self.queues[topic, queue_id]
        end = len(queue.messages)
        times = sorted({m.time_ms for m in queue.messages})
        stamp = data.draw(st.sampled_from(times)) + data.draw(st.integers(-1, 1))
        kept = range(queue.first, end)
        after = [i for i in kept if queue.messages[i].time_ms >= stamp]
        before = [i for i in kept if queue.messages[i].time_ms <= stamp]
        assert self.opened.offset_at(topic, queue_id, stamp) == min(after, default=end)
        assert self.opened.offset_at(topic, queue_id, stamp, "upper") == max(before, default=queue.first)

    @invariant()
    def every_queue_is_what_the_model_says(self) -> None:
        for (topic, queue_id), queue in self.queues.items():
            end = self.visible(topic, queue_id)
            if not end:
                continue
            assert self.opened.offsets(topic, queue_id) == (queue.first, end)
            found = [(m.offset, m.body, m.tag, m.physical_offset) for m in self.opened.iter(topic, queue_id)]
            assert found == [
                (i, m.body, m.tag, m.physical_offset) for i, m in enumerate(queue.messages[:end]) if i >= queue.first
            ]

    @rule()
    def verify(self) -> None:
        self.opened.flush()
        assert list(self.opened.verify()) == []


TestStoreModel = StoreMachine.TestCase
TestStoreModel.settings = settings(stateful_step_count=25, suppress_health_check=list(HealthCheck))
