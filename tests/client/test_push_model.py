"""State machines: push consumers of either mode, without order and in order. Random puts, failures, members that come,
go and hang, pauses, resets and kills, and from inside of handlers the same by other members.

The model knows messages: how often each is to fail, how often it was begun, and what became of it. It asserts
clients#invariants: nothing is lost, and nothing comes twice but for a crash (1), no position passes what is not done
(2), calls of a queue never overlap, and none begins before its predecessors are settled (3), at most one member holds
a queue (4), who always fails is handled `ATTEMPTS` times and is one dead letter (5), caches have limits (6), each queue
of a member has one pull (7), and when `stop` returns nothing runs or is leased (8). What was popped and settled is in
the log by then, so that a kill at any moment brings none of it again. Owners of queues keep their progress in a file,
so a kill may.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mqstore import BatchFailure, QueueRef, Reject, Retry, RetryPolicy
from tests.client.popsupport import Bench, Push
from tests.client.pushsupport import engine_of, pulls, unsettled
from tests.client.support import turns_left

ATTEMPTS = 3
REJECTS = -1
PAUSE_MS = 3_000
"""Longest pause before a failed message is delivered again."""
PREFETCH = 6
RECORD = 1_000
"""More bytes than any message here has."""
RETRIES = QueueRef("%RETRY%g", 0)
SOME = settings(
    stateful_step_count=30,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # to shorten a story takes minutes
)
SAME = settings(SOME, derandomize=True, database=None)
"""Each run has the same stories."""


@dataclass
class Fate:
    """What the model knows of one message."""

    lane: tuple[object, ...]
    """What it keeps its order in."""
    place: tuple[QueueRef, int]
    fails: int
    """How often its handler fails."""
    inside: str
    """What else happens while its handler runs."""
    begun: int = 0
    over: bool = False
    loose: bool = False
    """A kill, a hung member or a reset came between: what was in hand may have an attempt more."""
    skipped: bool = False
    """True if the group was moved behind this message."""
    dragged: bool = False
    """True if a batch failed as a whole with this message: its number of attempts depends on the others."""
    letter: bool = False
    """True if its last call has made it a dead letter."""


class Standard(RuleBasedStateMachine):
    ordered = False
    mode = "pop"

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="mqstore-push-"))
        self.bench = Bench(self.folder / "store")
        self.queues = 0
        """Number of queues. There is no topic before `begin`."""
        self.options: dict[str, Any] = {}
        """Options of the next consumers, over the defaults of `join`."""
        self.fates: list[Fate] = []
        self.joined = 0
        self.living: list[Push] = []
        self.running: list[Push] = []
        """Who is in a handler, the innermost last."""
        self.busy: list[tuple[object, ...]] = []
        self.wrong: list[str] = []
        self.positions_seen: dict[QueueRef, int] = {}
        self.paused = False

    @initialize(queues=st.integers(1, 3))
    def begin(self, queues: int) -> None:
        self.queues = queues
        self.bench.store.create_topic("t", queues=queues)
        self.join()

    # -- the handler ------------------------------------------------------------------------------------------------

    def handle(self, push: Push, message: Any) -> None:
        body = int(message.body)
        fate = self.fates[body]
        if fate.over and not fate.loose:
            self.wrong.append(f"{body} came again when it was over")
        fate.begun += 1
        if message.attempt != fate.begun and not fate.loose:
            self.wrong.append(f"{body} is begun the {fate.begun}. time, as attempt {message.attempt}")
        if self.ordered:
            if fate.lane in self.busy:
                self.wrong.append(f"{body} overlaps another of {fate.lane}")
            if any(not each.over for each in self.fates[:body] if each.lane == fate.lane):
                self.wrong.append(f"{body} was begun before its predecessors were over")
        self.running.append(push)
        self.busy.append(fate.lane)
        try:
            self.happen(fate.inside)
        finally:
            self.running.remove(push)
            self.busy.remove(fate.lane)
        last = message.attempt >= ATTEMPTS
        if fate.fails == REJECTS:
            fate.over = fate.letter = True
            raise Reject("no")
        if message.attempt <= fate.fails:
            fate.over = fate.letter = last
            raise Retry(2) if body % 2 else ValueError("again")
        fate.over, fate.letter = True, False

    def happen(self, inside: str) -> None:
        """Once, and not within what happens already."""
        if len(self.running) > 1:
            return
        match inside:
            case "others run":
                self.others_run()
            case "join" if len(self.living) < 4:
                self.join()
                self.others_run()
            case "leave":
                idle = [each for each in self.living if each not in self.running]
                if idle:
                    self.stop(idle[-1])
            case "time":
                self.bench.clock.advance(25_000)
                for push in self.living:
                    push.consumer.run_once()  # timers have a thread of their own: leases are renewed
                self.others_run()

    def others_run(self) -> None:
        for push in list(self.living):
            if push not in self.running:
                push.go()

    # -- what may happen --------------------------------------------------------------------------------------------

    @rule(
        group=st.sampled_from([None, "a", "b", "c"]),
        fails=st.sampled_from([0, 0, 0, 1, 2, ATTEMPTS, REJECTS]),
        inside=st.sampled_from(["", "", "", "others run", "join", "leave", "time"]),
        count=st.integers(1, 4),
    )
    def put(self, group: str | None, fails: int, inside: str, count: int) -> None:
        for _ in range(count):
            body = len(self.fates)
            receipt = self.bench.store.put("t", b"%d" % body, message_group=group)
            self.fates.append(Fate((receipt.queue,), (receipt.queue, receipt.offset), fails, inside))

    @precondition(lambda self: len(self.living) < 3)
    @rule(prefetch=st.sampled_from([2, 5, 1000]))
    def join(self, prefetch: int = 1000) -> None:
        self.joined += 1
        push = Push(
            self.bench,
            lambda given: self.handle(push, given),
            ordered=self.ordered,
            mode=self.mode,
            retry=RetryPolicy(ATTEMPTS, [1, 3]),
            start=False,
            client_id=f"{self.joined * 7 % 10}-{self.joined}",  # the order of ids divides the queues: no chance here
            **{"prefetch": prefetch, **self.options},
        )
        push.consumer.start()
        if self.paused:
            push.consumer.pause()
        self.living.append(push)

    @precondition(lambda self: self.living)
    @rule(pick=st.integers(0, 9))
    def leave(self, pick: int) -> None:
        self.stop(self.living[pick % len(self.living)])

    def stop(self, push: Push) -> None:
        self.living.remove(push)
        if not push.consumer.stop():
            self.wrong.append("a stop did not end")
        if push.held():
            self.wrong.append("what was leased is kept by who has stopped")
        # A failed message is pending, too, for the pause before its next attempt.
        leases = [each for each in self.bench.broker.pending("g") if each.visible_at_ms - each.pop_time_ms > PAUSE_MS]
        if leases and not (self.living or self.running):
            self.wrong.append("a message is leased to a consumer that is gone")

    @rule()
    def pause(self) -> None:
        self.paused = True
        for push in self.living:
            push.consumer.pause()

    @rule()
    def resume(self) -> None:
        self.paused = False
        for push in self.living:
            push.consumer.resume()

    def loosen(self) -> None:
        for fate in self.fates:
            fate.loose = fate.loose or not fate.over

    @precondition(lambda self: self.living)
    @rule(pick=st.integers(0, 9))
    def hang(self, pick: int) -> None:
        """From now on this one does nothing, and nobody is told."""
        del self.living[pick % len(self.living)]
        if self.mode == "pop":
            self.loosen()

    @rule(graceful=st.booleans())
    def reopen(self, graceful: bool) -> None:
        if graceful:
            for push in list(self.living):
                self.stop(push)
            self.bench.store.close()
        else:
            for push in self.living:
                push.halt()
            self.bench.kill()
            self.loosen()
            self.lose_progress()
        self.bench.open()
        self.living.clear()
        self.join()

    def lose_progress(self) -> None:
        """What a kill does to members that own queues."""

    @precondition(lambda self: self.living)
    @rule(pick=st.integers(0, 9), seconds=st.sampled_from([0, 0.5, 3, 25, 70]))
    def advance(self, pick: int, seconds: float) -> None:
        self.living[pick % len(self.living)].advance(seconds)

    # -- what holds -------------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_wrong(self) -> None:
        assert self.wrong == []

    @invariant()
    def positions(self) -> None:
        """clients#invariants. Without order what failed lies in the retry topic as well."""
        committed = self.committed()
        for body, fate in enumerate(self.fates):
            queue, offset = fate.place
            if not (fate.over or fate.begun or fate.loose) or (self.ordered and not fate.over and not fate.loose):
                assert committed[queue] <= offset, f"{body} was passed over"

    def committed(self) -> dict[QueueRef, int]:
        return {QueueRef("t", i): self.bench.broker.committed("g", "t", i) or 0 for i in range(self.queues)}

    def teardown(self) -> None:
        try:
            if self.queues:
                self.drain()
        finally:
            self.bench.store.close()
            shutil.rmtree(self.folder)

    def drain(self) -> None:
        """Let everything come to its end."""
        if not self.living:
            self.join()
        self.resume()
        for _ in range(400):
            for push in list(self.living):
                push.advance(1)
            if not sum(self.bench.store.lag("g").values()):
                break
        self.come_to_rest()
        self.nothing_is_wrong()
        letters = Counter(int(letter.body) for letter in self.bench.store.dead_letters("g"))
        assert not any(self.bench.store.lag("g").values())
        assert self.bench.broker.pending("g") == []
        for body, fate in enumerate(self.fates):
            assert fate.over or fate.skipped or (fate.loose and letters[body]), f"{body} was lost"
            assert letters[body] <= 1 or (fate.loose and self.mode == "queue")
            assert letters[body] >= fate.letter, f"{body} is no dead letter"
            if not fate.loose:
                expected = 1 if fate.fails == REJECTS else min(fate.fails + 1, ATTEMPTS)
                assert fate.dragged or fate.begun == expected
                assert letters[body] == (fate.letter if fate.dragged else fate.fails in (REJECTS, ATTEMPTS))
        for push in list(self.living):
            self.stop(push)
        self.nothing_is_wrong()

    def come_to_rest(self) -> None:
        """See that those who live at the end have what they should."""


class InOrder(Standard):
    ordered = True


class Owners(Standard):
    """Members that own queues."""

    mode = "queue"

    def handle(self, push: Push, message: Any) -> None:
        if self.bench.broker.locks.owner("g", message.queue) != push.consumer.client_id:
            self.wrong.append(f"{message.queue} is handled by a member that does not hold it")
        super().handle(push, message)

    def lose_progress(self) -> None:
        for fate in self.fates:
            fate.loose = True
        self.positions_seen.clear()

    @rule(seconds=st.sampled_from([0, 0.05, 0.6, 3, 25, 70]))
    def advance_together(self, seconds: float) -> None:
        self.bench.consumers = [push.consumer for push in self.living]
        self.bench.advance(seconds)
        # Who was left out for long has learned by now what it has lost. Who has joined meanwhile has not run since.
        for consumer in self.bench.consumers:
            if any(push.consumer is consumer for push in self.living):
                for ref in consumer.assignment():
                    assert self.bench.broker.locks.owner("g", ref) == consumer.client_id

    @invariant()
    def one_owner_each(self) -> None:
        holders = Counter(
            ref
            for push in self.living
            for ref in push.consumer.assignment()
            if self.bench.broker.locks.owner("g", ref) == push.consumer.client_id
        )
        assert all(number == 1 for number in holders.values()), holders

    @invariant()
    def no_position_goes_back(self) -> None:
        committed = self.committed()
        assert all(committed[ref] >= before for ref, before in self.positions_seen.items())
        self.positions_seen = committed

    @invariant()
    def one_pull_each(self) -> None:
        consumers = [push.consumer for push in self.living]
        if not any(map(turns_left, consumers)):
            for consumer in consumers:
                assert all(len(places) == 1 for places in pulls(consumer).values()), pulls(consumer)

    def come_to_rest(self) -> None:
        """See that the last member has all queues, has done all of them, and keeps nothing."""
        for push in self.living[:-1]:
            self.stop(push)
        [last] = self.living
        # Members that hang keep their locks for a minute, and a queue without a position counts for no lag.
        last.advance(200)
        committed = {ref: at for ref, at in self.committed().items() if self.bench.broker.topics.get(ref.topic)}
        assert last.consumer.assignment() >= committed.keys()
        assert committed == {ref: self.bench.broker.max_offset(*ref) for ref in committed}
        assert not any(unsettled(last.consumer).values())
        self.one_pull_each()


class OwnersInOrder(Owners):
    ordered = True

    @rule(pick=st.integers(0, 9), back=st.integers(0, 4))
    def reset(self, pick: int, back: int) -> None:
        ref = QueueRef("t", pick % self.queues)
        self.others_run()
        to = max(0, self.committed()[ref] - back)
        self.bench.broker.reset("g", *ref, to)
        self.bench.broker.save()  # otherwise a kill could take it back
        for fate in self.fates:
            if fate.place >= (ref, to) and fate.lane == (ref,):
                fate.over, fate.loose = False, True
        self.positions_seen[ref] = to
        self.others_run()

    @invariant()
    def no_position_passes_what_is_not_over(self) -> None:
        committed = self.committed()
        for body, fate in enumerate(self.fates):
            assert fate.over or committed[fate.place[0]] <= fate.place[1], f"{body} was passed over"


class Readers(Owners):
    """Members without order that own queues. They have filters, limits and batches, and are moved anywhere."""

    def __init__(self) -> None:
        self.copies: Counter[tuple[QueueRef, int]] = Counter()
        """How often each stored message was handled. A retry is stored in another place."""
        super().__init__()

    @initialize(
        queues=st.integers(1, 3),
        batch_size=st.sampled_from([1, 3]),
        total=st.sampled_from([None, 1, 4, 7]),
        size=st.sampled_from([1, 700, 1 << 20]),
    )
    def begin(self, queues: int, batch_size: int, total: int | None, size: int) -> None:  # type: ignore[override]
        self.most = min(PREFETCH, total or PREFETCH), size + RECORD
        limits = {"prefetch": PREFETCH, "prefetch_total": total, "prefetch_bytes": size}
        self.options = {"tags": "a", "batch_size": batch_size, **limits}
        super().begin(queues)

    def handle(self, push: Push, given: Any) -> None:
        batch = given if isinstance(given, tuple) else (given,)
        self.copies.update((message.queue, message.offset) for message in batch)
        if any(message.topic != "t" or message.tag != "a" for message in batch):
            self.wrong.append("a message was handled that the filter refuses, or not as it was sent")
        if not self.caches_are_bounded():
            self.wrong.append("a cache is too large")
        failures: list[tuple[Any, Exception]] = []
        for message in batch:
            try:
                super().handle(push, message)
            except (Retry, Reject, ValueError) as error:
                failures.append((message, error))
        if not failures:
            return
        error = next((each for _, each in failures if isinstance(each, Reject)), failures[0][1])
        if len(batch) > 1 and not isinstance(error, Reject) and int(failures[0][0].body) % 4 > 1:
            raise BatchFailure([message for message, _ in failures])
        for message in batch:
            fate = self.fates[int(message.body)]
            fate.dragged = fate.dragged or len(batch) > 1
            fate.over = fate.letter = isinstance(error, Reject) or message.attempt >= ATTEMPTS
        raise error

    def stop(self, push: Push) -> None:
        held = engine_of(push.consumer).membership.held
        super().stop(push)
        offsets = json.loads((self.bench.path / "config" / "consumerOffset.json").read_bytes())["offsetTable"]
        for ref in held:
            if self.bench.broker.locks.owner("g", ref) == push.consumer.client_id:
                self.wrong.append("a lock is kept by who has stopped")
            if offsets[f"{ref.topic}@g"][str(ref.queue_id)] != self.bench.broker.committed("g", *ref):
                self.wrong.append("a position is not on disk when who had it has stopped")

    @rule(
        tag=st.sampled_from("aaab"),
        fails=st.sampled_from([0, 0, 0, 1, 2, ATTEMPTS, REJECTS, REJECTS]),
        inside=st.sampled_from(["", "", "", "others run", "join", "leave", "time"]),
        count=st.integers(1, 9),
        padding=st.sampled_from([0, 0, 100, 500]),
        pick=st.integers(0, 9),
    )
    def put(self, tag: str, fails: int, inside: str, count: int, padding: int, pick: int) -> None:  # type: ignore[override]
        for _ in range(count):
            body = b"%d" % len(self.fates) + bytes(padding).replace(b"\0", b" ")
            receipt = self.bench.store.put("t", body, queue_id=pick % self.queues, tag=tag)
            if tag == "a":
                self.fates.append(Fate((receipt.queue,), (receipt.queue, receipt.offset), fails, inside))

    @precondition(lambda self: self.queues < 5)
    @rule()
    def grow(self) -> None:
        self.queues += 1
        self.bench.broker.topics.alter("t", read_queues=self.queues, write_queues=self.queues)

    @rule(pick=st.integers(0, 9))
    def pause_queue(self, pick: int) -> None:
        for push in self.living:
            push.consumer.pause(QueueRef("t", pick % self.queues))

    @rule(pick=st.integers(0, 9), to=st.integers(0, 99), by_reset=st.booleans())
    def move(self, pick: int, to: int, by_reset: bool) -> None:
        broker, ref = self.bench.broker, QueueRef("t", pick % self.queues)
        to %= broker.max_offset(*ref) + 1
        owner = next((push for push in self.living if ref in push.consumer.assignment()), None)
        if by_reset:
            broker.reset("g", *ref, to)
        elif owner is not None:
            owner.consumer.seek(ref, to)
        else:
            return
        for fate in self.fates:
            if fate.place[0] == ref:
                fate.loose = True
                fate.skipped = fate.skipped or fate.place[1] < to
        self.positions_seen.pop(ref, None)

    def committed(self) -> dict[QueueRef, int]:
        return {**super().committed(), RETRIES: self.bench.broker.committed("g", *RETRIES) or 0}

    @invariant()
    def no_position_passes_what_was_not_begun(self) -> None:
        committed = self.committed()
        for body, fate in enumerate(self.fates):
            queue, offset = fate.place
            assert fate.begun or fate.skipped or committed[queue] <= offset, f"{body} was passed over"
        for offset in range(committed[RETRIES]):
            assert self.copies[RETRIES, offset], f"retry {offset} was passed over"

    @invariant()
    def caches_have_limits(self) -> None:
        assert self.caches_are_bounded()

    def drain(self) -> None:
        """Let the last member do what the others leave."""
        for push in self.living[:-1]:
            self.stop(push)
        super().drain()

    def caches_are_bounded(self) -> bool:
        """A queue may hold one message, whatever its size: no pull asks for more bytes than there is room for, so the
        excess is a message at most."""
        caches = [each.cached for push in self.living for each in push.consumer.stats().queues.values()]
        messages, size = getattr(self, "most", (1_000, 1 << 30))
        return all(each.messages <= messages and each.size < size for each in caches)


TestStandard = Standard.TestCase
TestStandard.settings = SAME
TestInOrder = InOrder.TestCase
TestInOrder.settings = SAME
TestOwnersInOrder = OwnersInOrder.TestCase
TestOwnersInOrder.settings = SAME
TestReaders = Readers.TestCase
TestReaders.settings = SOME
