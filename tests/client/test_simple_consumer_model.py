"""State machines: random receives, verbs, clock moves, closes and kills, by way of `SimpleConsumer` alone.

The model knows messages, not queues: for each body what became of it and who holds it until when. What it asserts are
the promises of clients#invariants (1, 3, 5): everything is delivered, to one at a time, at most so often, in order if
that was asked for; and what was done or given up does not come again.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import mqstore
from mqstore import Delivery, RetryPolicy
from tests.client.popsupport import Bench

MAX_ATTEMPTS = 3
TOPICS = ("t", "u")
PLACES = st.tuples(st.sampled_from(TOPICS), st.sampled_from([0, 1]))
LOANS_S = st.sampled_from([0.5, 5, 60])
SOME = settings(stateful_step_count=40, suppress_health_check=list(HealthCheck), derandomize=True)


@dataclass
class Fate:
    """What the model knows of one message."""

    place: tuple[str, int]
    attempts: int = 0
    """Deliveries that counted."""
    holder: Delivery | None = None
    until_ms: int = 0
    """Invisible until then: on loan, or waiting for its next attempt."""
    ended: str = ""
    """ "ack" or "dlq"."""
    batch: int = -1
    """Of its last delivery."""


class Machine(RuleBasedStateMachine):
    ordered = False
    most = 1000
    """Messages of one receive."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="mqstore-simple-"))
        self.bench = Bench(self.folder / "store", segment_bytes=16384)
        for topic in TOPICS:
            self.bench.store.create_topic(topic, queues=2)
        self.fates: dict[bytes, Fate] = {}
        self.batches = 0
        self.join()

    def join(self) -> None:
        self.consumers = [self.bench.consumer(*TOPICS, ordered=self.ordered, retry=RetryPolicy(MAX_ATTEMPTS, [1, 5]))]
        self.consumers.append(self.bench.consumer(*TOPICS, ordered=self.ordered))

    @property
    def now_ms(self) -> int:
        return self.bench.clock.now_ms()

    # -- what may happen ----------------------------------------------------------------------------------------------

    @rule(place=PLACES, count=st.integers(1, 4))
    def put(self, place: tuple[str, int], count: int) -> None:
        for _ in range(count):
            body = b"%04d" % len(self.fates)
            self.fates[body] = Fate(place)
            self.bench.put(body, topic=place[0], queue_id=place[1])

    @rule(who=st.sampled_from([0, 1]), count=st.sampled_from([1, 1, 3, 40]), loan_s=LOANS_S)
    def receive(self, who: int, count: int, loan_s: float) -> None:
        self.take(who, count, loan_s)

    def take(self, who: int, count: int, loan_s: float) -> list[Delivery]:
        count = min(count, self.most)
        found = self.consumers[who].receive(count, wait=0, visibility=loan_s)
        assert len(found) <= count
        self.batches += 1
        for delivery in found:
            self.note(delivery, loan_s)
        return found

    def note(self, delivery: Delivery, loan_s: float) -> None:
        message = delivery.message
        fate = self.fates[message.body]
        assert message.topic == fate.place[0]
        assert fate.batch != self.batches, "twice in one receive"
        assert not fate.ended
        assert fate.until_ms <= self.now_ms, "somebody has it, or it is not due"
        fate.attempts += 1
        assert delivery.attempt == message.attempt
        assert delivery.attempt == fate.attempts <= MAX_ATTEMPTS
        if self.ordered:
            self.check_order(message.body, fate)
        fate.holder, fate.until_ms, fate.batch = delivery, self.now_ms + round(loan_s * 1000), self.batches

    def check_order(self, body: bytes, fate: Fate) -> None:
        """All that stand before it in its queue have ended, or are in the same batch."""
        for other, before in self.fates.items():
            if other < body and before.place == fate.place:
                assert before.ended or before.batch == self.batches

    def held(self, pick: int) -> tuple[Fate, Delivery] | None:
        held = [(fate, fate.holder) for fate in self.fates.values() if fate.holder is not None]
        return held[pick % len(held)] if held else None

    def settle(self, pick: int, verb: str, delay_s: float | None = None) -> None:
        chosen = self.held(pick)
        if chosen is None:
            return
        fate, delivery = chosen
        fate.holder = None
        was_due = fate.until_ms <= self.now_ms
        try:
            if verb == "nack":
                delivery.nack(delay_s)
            elif verb == "release":
                delivery._release()
            else:
                getattr(delivery, verb)()
        except mqstore.ReceiptExpiredError:
            assert was_due
            return
        if verb == "ack":
            fate.ended = "ack"
        elif verb == "reject" or (verb == "nack" and delivery.attempt >= MAX_ATTEMPTS):
            fate.ended = "dlq"
        elif verb == "nack":
            pause_s = (1, 5)[delivery.attempt - 1] if delay_s is None else delay_s
            fate.until_ms = self.now_ms + round(pause_s * 1000)
        else:
            fate.attempts -= 1
            fate.until_ms = self.now_ms

    @rule(pick=st.integers(0, 99))
    def ack(self, pick: int) -> None:
        self.settle(pick, "ack")

    @rule(pick=st.integers(0, 99), delay_s=st.sampled_from([None, 0, 3]))
    def nack(self, pick: int, delay_s: float | None) -> None:
        self.settle(pick, "nack", delay_s)

    @rule(pick=st.integers(0, 99))
    def reject(self, pick: int) -> None:
        self.settle(pick, "reject")

    @rule(pick=st.integers(0, 99))
    def release(self, pick: int) -> None:
        self.settle(pick, "release")

    @rule(pick=st.integers(0, 99), loan_s=LOANS_S)
    def extend(self, pick: int, loan_s: float) -> None:
        chosen = self.held(pick)
        if chosen is None:
            return
        fate, delivery = chosen
        try:
            delivery.extend(loan_s)
        except mqstore.ReceiptExpiredError:
            assert fate.until_ms <= self.now_ms
            return
        fate.until_ms = self.now_ms + round(loan_s * 1000)

    @rule(duration_s=st.sampled_from([0.1, 1, 5, 70]))
    def time_passes(self, duration_s: float) -> None:
        self.bench.advance(duration_s)
        self.expire()

    def expire(self) -> None:
        """The last attempt that ends without a word is a dead letter."""
        for fate in self.fates.values():
            if not fate.ended and fate.attempts >= MAX_ATTEMPTS and fate.until_ms <= self.now_ms:
                fate.ended, fate.holder = "dlq", None

    @rule(how=st.sampled_from(["close", "kill"]))
    @precondition(lambda self: self.fates)
    def restart(self, how: str) -> None:
        """Who held something is gone with the process: it comes again at once, as the next attempt."""
        (self.bench.kill if how == "kill" else self.bench.store.close)()
        self.bench.open()
        self.join()
        self.bench.settle()
        for fate in self.fates.values():
            fate.holder = None
            if not fate.ended and fate.until_ms > self.now_ms:
                fate.until_ms = self.now_ms
        self.expire()

    # -- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def what_was_given_up_is_a_dead_letter_once(self) -> None:
        letters = Counter(letter.body for letter in self.bench.store.dead_letters("g"))
        assert letters == Counter(body for body, fate in self.fates.items() if fate.ended == "dlq")

    def teardown(self) -> None:
        """At last everything is delivered and done."""
        try:
            for _ in range(3 * MAX_ATTEMPTS):
                self.time_passes(70)
                while found := self.take(0, 40, 60):
                    for delivery in found:
                        delivery.ack()
                        fate = self.fates[delivery.message.body]
                        fate.ended, fate.holder = "ack", None
            assert all(fate.ended for fate in self.fates.values())
            assert sum(self.bench.store.lag("g").values()) == 0
            assert self.consumers[0].pending() == []
            self.what_was_given_up_is_a_dead_letter_once()
        finally:
            self.bench.store.close()
            shutil.rmtree(self.folder)


class Standard(Machine):
    pass


class Ordered(Machine):
    """Batches of one, so that nothing comes again that was acknowledged."""

    ordered = True
    most = 1


TestStandard = Standard.TestCase
TestStandard.settings = SOME
TestOrdered = Ordered.TestCase
TestOrdered.settings = SOME
