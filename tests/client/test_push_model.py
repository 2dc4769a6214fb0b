"""Push consumers under everything that may happen to them, against a model that knows only what was sent and what
handlers were given (clients#invariants, invariants 1, 2, 4, 5, 6, 7, 8)."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mqstore import Message, PushConsumer, QueueRef, Reject, Retry, RetryPolicy
from tests.client.pushsupport import PushBench, engine_of, pulls, unsettled
from tests.client.support import turns_left

PREFETCH = 6
RECORD = 1_000
"""More bytes than any message here has."""
ATTEMPTS = 3
RETRY = "%RETRY%g"
Copy = tuple[str, int, int]


class Push(RuleBasedStateMachine):
    """Handlers fail as often as each message is told to. `copies` are what lies in a queue, `bodies` what was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.sent: dict[int, tuple[Copy, str, int]] = {}
        """Body -> where it lies, its tag, how often handlers shall fail."""
        self.excused: set[int] = set()
        """Passed over on purpose: the group was moved behind them."""
        self.calls: Counter[int] = Counter()
        self.done: Counter[int] = Counter()
        self.copies: Counter[Copy] = Counter()
        self.calm = True
        """So far nothing has happened that may make a message come twice."""
        self.high: dict[QueueRef, int] = {}
        self.paused = False
        self.wrong = False
        """A handler was given what it did not ask for."""

    @initialize(
        queues=st.integers(1, 3),
        batch_size=st.sampled_from([1, 1, 3]),
        total=st.sampled_from([None, 1, 4, 7]),
        size=st.sampled_from([1, 700, 1 << 20]),
    )
    def begin(self, queues: int, batch_size: int, total: int | None, size: int) -> None:
        self.total = total
        self.size = size
        self.batch_size = batch_size
        self.queues = queues
        self.bench = PushBench(self.folder, queues=queues)
        self.living: list[PushConsumer] = []
        self.join()

    def teardown(self) -> None:
        try:
            if hasattr(self, "bench"):
                self.drain()
        finally:
            if hasattr(self, "bench"):
                self.bench.kill()
            shutil.rmtree(self.folder)

    # -- the handler ------------------------------------------------------------------------------------------------

    def handle(self, given: Message | list[Message]) -> None:
        batch = [given] if isinstance(given, Message) else list(given)
        self.wrong |= not self.caches_are_bounded()
        first_error: Exception | None = None
        for message in batch:
            body = int(message.body)
            _, tag, _ = self.sent[body]
            self.wrong |= message.topic != "t" or tag != "a"
            self.calls[body] += 1
            self.copies[(*message.queue, message.offset)] += 1
        for message in batch:
            first_error = first_error or self._trouble(int(message.body))
        if first_error is not None:
            raise first_error
        self.done.update(int(message.body) for message in batch)

    def _trouble(self, body: int) -> Exception | None:
        fails = self.sent[body][2]
        if self.calls[body] > fails:
            return None
        return (ValueError("again"), Retry(2), Reject("no"))[body % 3 if fails < 9 else 2]

    # -- what may happen --------------------------------------------------------------------------------------------

    @rule(
        tag=st.sampled_from("aaab"),
        fails=st.sampled_from([0, 0, 0, 1, 2, 5, 9]),
        number=st.integers(1, 9),
        padding=st.sampled_from([0, 0, 100, 500]),
        data=st.data(),
    )
    def put(self, tag: str, fails: int, number: int, padding: int, data: st.DataObject) -> None:
        queue_id = data.draw(st.integers(0, self.queues - 1))
        for _ in range(number):
            body = len(self.sent)
            receipt = self.bench.broker.put("t", b"%d" % body + b" " * padding, queue_id=queue_id, tag=tag)
            assert receipt.size < RECORD
            self.sent[body] = ((*receipt.queue, receipt.offset), tag, fails)

    @precondition(lambda self: len(self.living) < 3)
    @rule()
    def join(self) -> None:
        consumer = self.bench.consumer(
            self.handle,
            tags="a",
            prefetch=PREFETCH,
            prefetch_bytes=self.size,
            prefetch_total=self.total,
            batch_size=self.batch_size,
            retry=RetryPolicy(ATTEMPTS, delays=[1, 3]),
        )
        self.living.append(consumer)
        if self.paused:
            consumer.pause()

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        consumer = data.draw(st.sampled_from(self.living))
        mine = set(engine_of(consumer).membership.held)
        self.forget(consumer)
        assert consumer.stop() is True
        assert not any(self.bench.broker.locks.owner("g", queue) == consumer.client_id for queue in mine)
        file = json.loads((self.folder / "config" / "consumerOffset.json").read_bytes())["offsetTable"]
        for queue in mine:
            assert file[f"{queue.topic}@g"][str(queue.queue_id)] == self.bench.broker.committed("g", *queue)

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """It hangs, and is never run again."""
        self.forget(data.draw(st.sampled_from(self.living)))
        self.calm = False

    def forget(self, consumer: PushConsumer) -> None:
        self.living.remove(consumer)
        self.bench.consumers.remove(consumer)

    @precondition(lambda self: self.queues < 5)
    @rule()
    def grow(self) -> None:
        self.queues += 1
        self.bench.broker.topics.alter("t", read_queues=self.queues, write_queues=self.queues)

    @rule(whole=st.booleans(), data=st.data())
    def pause(self, whole: bool, data: st.DataObject) -> None:
        for consumer in self.living:
            consumer.pause(*(() if whole else (QueueRef("t", data.draw(st.integers(0, self.queues - 1))),)))
        self.paused = self.paused or whole

    @rule()
    def resume(self) -> None:
        self.paused = False
        for consumer in self.living:
            consumer.resume()

    @rule(data=st.data(), by_reset=st.booleans())
    def move(self, data: st.DataObject, by_reset: bool) -> None:
        broker = self.bench.broker
        queue = QueueRef("t", data.draw(st.integers(0, self.queues - 1)))
        to = data.draw(st.integers(0, broker.max_offset(*queue)))
        if by_reset:
            broker.reset("g", *queue, to)
        else:
            owner = next((each for each in self.living if queue in each.assignment()), None)
            if owner is None:
                return
            owner.seek(queue, to)
        self.calm = False
        self.high[queue] = 0
        self.excused.update(body for body, (copy, _, _) in self.sent.items() if copy[:2] == queue and copy[2] < to)

    @rule()
    def kill(self) -> None:
        self.bench.kill()
        self.bench.open()
        self.living.clear()
        self.high.clear()
        self.calm = False
        self.join()

    @rule(seconds=st.sampled_from([0.05, 0.6, 3, 25, 70]))
    def advance(self, seconds: float) -> None:
        self.bench.advance(seconds)

    @rule()
    def settle(self) -> None:
        self.bench.settle()

    # -- what holds -------------------------------------------------------------------------------------------------

    @invariant()
    def positions(self) -> None:
        """Nothing that was not handled lies below a committed offset; and none goes back by itself."""
        if not hasattr(self, "bench"):
            return
        broker = self.bench.broker
        committed: dict[QueueRef, int] = {}
        for topic, queues in (("t", self.queues), (RETRY, 1)):
            for queue_id in range(queues):
                offset = broker.committed("g", topic, queue_id)
                if offset is not None:
                    committed[QueueRef(topic, queue_id)] = offset
        for queue, offset in committed.items():
            assert offset >= self.high.get(queue, 0), f"{queue} went back to {offset}"
            self.high[queue] = offset
        for body, (copy, tag, _) in self.sent.items():
            if tag == "a" and body not in self.excused and not self.calls[body]:
                assert committed.get(QueueRef(*copy[:2]), 0) <= copy[2], f"{copy} was passed over"
        for offset in range(committed.get(QueueRef(RETRY, 0), 0)):
            assert self.copies[RETRY, 0, offset], f"retry {offset} was passed over"

    @invariant()
    def owners(self) -> None:
        """No queue has two members (clients#invariants)."""
        if not hasattr(self, "bench"):
            return
        held: Counter[QueueRef] = Counter()
        for consumer in self.living:
            for ref in consumer.assignment():
                if self.bench.broker.locks.owner("g", ref) == consumer.client_id:
                    held[ref] += 1
        assert all(number == 1 for number in held.values()), held
        assert self.caches_are_bounded()

    def caches_are_bounded(self) -> bool:
        """Also the part of prefetch_total. A queue may hold one message, whatever its size: no pull asks for more
        bytes than there is room for, so the excess is a message at most."""
        for consumer in self.living:
            for queue in consumer.stats().queues.values():
                if queue.cached.messages > min(PREFETCH, self.total or PREFETCH):
                    return False
                if queue.cached.size >= self.size + RECORD:
                    return False
        return True

    @invariant()
    def copies_once(self) -> None:
        """Handing over makes no duplicates, and no message more attempts than it is due (clients#invariants)."""
        if not self.calm:
            return
        assert all(number == 1 for number in self.copies.values()), self.copies
        assert all(number <= ATTEMPTS for number in self.calls.values())

    @invariant()
    def one_pull_each(self) -> None:
        """clients#invariants, once what was asked for is done."""
        if not hasattr(self, "bench"):
            return
        if any(turns_left(consumer) for consumer in self.living):
            return
        for consumer in self.living:
            for ref, places in pulls(consumer).items():
                assert len(places) == 1, f"{ref}: {places}"

    def drain(self) -> None:
        """clients#invariants: let everything come to an end; then each message was handled, or is a dead letter."""
        while len(self.living) > 1:
            consumer = self.living[0]
            self.forget(consumer)
            consumer.stop()
        if not self.living:
            self.join()
        [consumer] = self.living
        self.paused = False
        consumer.resume()
        self.bench.advance(200)
        self.positions()
        self.one_pull_each()
        assert not self.wrong
        dead = Counter(int(body) for body in self.bench.dead())
        for body, (copy, tag, fails) in self.sent.items():
            if tag == "b":
                assert not self.calls[body]
                continue
            if body not in self.excused:
                assert self.done[body] or dead[body], f"{body} at {copy} was lost"
            if self.calm and self.batch_size == 1:
                rejected = fails >= 9 or (fails and body % 3 == 2)
                expected = 1 if rejected else min(fails + 1, ATTEMPTS)
                assert self.calls[body] == expected
                assert dead[body] == (1 if rejected or fails >= ATTEMPTS else 0)
                assert self.done[body] == 1 - dead[body]
        for queue_id in range(self.queues):
            queue = QueueRef("t", queue_id)
            assert queue in consumer.assignment()
            assert self.bench.committed(queue_id) == self.bench.broker.max_offset(*queue)
        assert not any(unsettled(consumer).values())


TestPush = Push.TestCase
TestPush.settings = settings(
    stateful_step_count=25,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # a story of twenty steps takes minutes to shorten
)
