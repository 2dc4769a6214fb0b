"""State machines: random pops, settlements, clock moves, closes and kills, compared with a plain model after each.

The model of a standard group is two lists of messages (topic and retry topic) and a dict of what is in flight; of a
FIFO group one list and the last batch. Both know the rules of delivery#ack, delivery#pop-log and delivery#order-rules,
and nothing of logs: a kill changes nothing in them but that receivers of this process are gone.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mqstore.errors import ReceiptExpiredError
from tests.broker.popsupport import PopBench

MAX_ATTEMPTS = 3
DELAYS_MS = (1_000, 5_000, 10_000)
RETRY, DLQ = "%RETRY%g+t", "%DLQ%g"
INVISIBLE_MS = st.sampled_from([100, 1_000, 7_000, 60_000])
SOME = settings(stateful_step_count=40, suppress_health_check=list(HealthCheck), derandomize=True)


class Machine(RuleBasedStateMachine):
    """What both have in common: a bench in a folder of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="mqstore-pop-"))
        self.bench = PopBench(self.folder / "store", segment_bytes=8192)
        self.bench.parts.topics.create("t", queues=1)
        self.bench.parts.groups.create("g", retry_max_times=MAX_ATTEMPTS - 1)
        self.bodies = 0

    def teardown(self) -> None:
        self.bench.close()
        shutil.rmtree(self.folder)

    def restart(self, how: str) -> None:
        (self.bench.close if how == "close" else self.bench.kill)()
        self.bench.reopen()


@dataclass
class Flight:
    body: bytes
    receipt: str
    visible_ms: int
    attempt: int
    local: bool
    held: bool = True
    """False: given back for later, so that nobody's death brings it earlier."""


@dataclass
class Queue:
    messages: list[tuple[bytes, int]] = field(default_factory=list)
    """(body, attempt)"""
    cursor: int = 0
    released: set[int] = field(default_factory=set)
    flights: dict[int, Flight] = field(default_factory=dict)

    def next(self, count: int) -> list[int]:
        """Offsets that a pop of `count` takes."""
        fresh = range(self.cursor, len(self.messages))
        taken = [*sorted(self.released), *fresh][:count]
        self.released -= set(taken)
        self.cursor = max(self.cursor, *(offset + 1 for offset in taken)) if taken else self.cursor
        return taken

    @property
    def committed(self) -> int:
        return min((*self.released, *self.flights), default=self.cursor)


def topic_of(receipt: str) -> str:
    return "t" if receipt.split()[4] == "0" else RETRY


class StandardMachine(Machine):
    def __init__(self) -> None:
        super().__init__()
        self.queues = {"t": Queue(), RETRY: Queue()}
        self.dead: Counter[bytes] = Counter()
        self.done: list[str] = []
        """Receipts that were acknowledged."""
        self.expired: list[str] = []
        """Receipts of deliveries that were put up again."""
        self.replaced: list[str] = []
        """Receipts in whose place another came; once that has settled the message they are as good as that."""
        self.old: list[str] = []
        """Receipts from before a reset: as good as none, unless what they name was done with since, or lies before."""

    def flights(self) -> list[tuple[str, int]]:
        return [(topic, offset) for topic, queue in self.queues.items() for offset in queue.flights]

    def pick(self, n: int) -> tuple[Queue, int]:
        topic, offset = self.flights()[n % len(self.flights())]
        return self.queues[topic], offset

    @rule(count=st.integers(1, 5))
    def put(self, count: int) -> None:
        self.bench.put("t", count, first=self.bodies)
        for i in range(self.bodies, self.bodies + count):
            self.queues["t"].messages.append((str(i).encode(), 1))
        self.bodies += count

    @rule(n=st.integers(1, 6), invisible_ms=INVISIBLE_MS, local=st.booleans())
    def pop(self, n: int, invisible_ms: int, local: bool) -> None:
        now_ms = self.bench.now_ms
        found = self.bench.pop(n=n, invisible_ms=invisible_ms, local=local)
        expected = []
        for topic, queue in self.queues.items():
            for offset in queue.next(n - len(expected)):
                expected.append((topic, offset, *queue.messages[offset]))
        got = [(d.message.topic, d.message.offset, d.message.body, d.attempt) for d in found]
        assert got == expected
        for delivery in found:
            assert delivery.visible_at_ms == now_ms + invisible_ms
            message = delivery.message
            self.queues[message.topic].flights[message.offset] = Flight(
                message.body, delivery.receipt, delivery.visible_at_ms, delivery.attempt, local
            )

    @precondition(lambda self: self.flights())
    @rule(picks=st.lists(st.integers(0, 99), min_size=1, max_size=5))
    def ack(self, picks: list[int]) -> None:
        chosen = {(id(queue), offset): (queue, offset) for queue, offset in map(self.pick, picks)}
        receipts = [queue.flights.pop(offset).receipt for queue, offset in chosen.values()]
        self.bench.service.ack("g", "t", receipts)
        self.done += receipts

    @precondition(lambda self: self.done or self.expired or self.replaced or self.old)
    @rule(n=st.integers(0, 99))
    def ack_again(self, n: int) -> None:
        receipt = (all_ := self.done + self.expired + self.replaced + self.old)[n % len(all_)]
        try:
            self.bench.service.ack("g", "t", receipt)
        except ReceiptExpiredError:
            assert receipt not in self.done
        else:
            assert receipt not in self.expired
            queue, offset = self.queues[topic_of(receipt)], int(receipt.split()[7])
            assert offset < queue.cursor
            assert offset not in queue.flights
            assert offset not in queue.released

    @precondition(lambda self: self.flights())
    @rule(n=st.integers(0, 99), invisible_ms=INVISIBLE_MS, renew=st.booleans())
    def change(self, n: int, invisible_ms: int, renew: bool) -> None:
        queue, offset = self.pick(n)
        flight = queue.flights[offset]
        receipt = self.bench.change("change_invisible", flight.receipt, invisible_ms, renew=renew)
        if renew:
            assert receipt == flight.receipt
        else:
            self.replaced.append(flight.receipt)
        flight.receipt, flight.visible_ms, flight.held = receipt, self.bench.now_ms + invisible_ms, True

    @precondition(lambda self: self.flights())
    @rule(n=st.integers(0, 99))
    def nack(self, n: int) -> None:
        queue, offset = self.pick(n)
        flight = queue.flights[offset]
        receipt = self.bench.service.nack("g", "t", flight.receipt)
        (self.expired if receipt is None else self.replaced).append(flight.receipt)
        if flight.attempt >= MAX_ATTEMPTS:
            assert receipt is None
            self.dead[queue.flights.pop(offset).body] += 1
        else:
            assert receipt is not None
            flight.receipt, flight.held = receipt, False
            flight.visible_ms = self.bench.now_ms + DELAYS_MS[flight.attempt - 1]

    @precondition(lambda self: self.flights())
    @rule(n=st.integers(0, 99))
    def release(self, n: int) -> None:
        queue, offset = self.pick(n)
        receipt = queue.flights.pop(offset).receipt
        self.bench.service.release("g", "t", [receipt])
        queue.released.add(offset)
        self.replaced.append(receipt)

    @rule(topic=st.sampled_from(["t", "t", RETRY]), n=st.integers(0, 99))
    def reset(self, topic: str, n: int) -> None:
        queue = self.queues[topic]
        if topic == RETRY and not queue.messages:
            return  # there is none yet
        offset = n % (len(queue.messages) + 1)
        self.bench.reset(offset, topic=topic)
        self.old += [flight.receipt for flight in queue.flights.values()]
        for receipts in (self.done, self.expired, self.replaced):
            mine = [receipt for receipt in receipts if topic_of(receipt) == topic]
            receipts[:] = [receipt for receipt in receipts if topic_of(receipt) != topic]
            self.old += mine
        queue.flights.clear()
        queue.released.clear()
        queue.cursor = offset

    @rule(duration_ms=st.sampled_from([1, 99, 100, 1_000, 6_000, 70_000]))
    def advance(self, duration_ms: int) -> None:
        self.bench.advance(duration_ms)
        self.redeliver(self.bench.now_ms)

    @rule(how=st.sampled_from(["close", "kill"]))
    def restart_(self, how: str) -> None:
        self.restart(how)
        for queue in self.queues.values():
            for flight in queue.flights.values():
                if flight.local and flight.held:
                    flight.visible_ms = 0
        self.bench.settle()
        self.redeliver(self.bench.now_ms)

    def redeliver(self, now_ms: int) -> None:
        """Copies and dead letters of what is visible by now. Which copy comes first within a moment is not promised."""
        copies: Counter[tuple[bytes, int]] = Counter()
        for queue in self.queues.values():
            for offset, flight in list(queue.flights.items()):
                if flight.visible_ms <= now_ms:
                    del queue.flights[offset]
                    self.expired.append(flight.receipt)
                    if flight.attempt >= MAX_ATTEMPTS:
                        self.dead[flight.body] += 1
                    else:
                        copies[flight.body, flight.attempt + 1] += 1
        retry = self.queues[RETRY].messages
        new = [(copy.body, copy.attempt) for copy in self.bench.read(RETRY)[len(retry) :]]
        assert Counter(new) == copies
        retry += new

    @invariant()
    def same(self) -> None:
        service = self.bench.service
        expected = sorted(
            (topic, offset, flight.visible_ms)
            for topic, queue in self.queues.items()
            for offset, flight in queue.flights.items()
        )
        assert [(p.topic, p.offset, p.visible_at_ms) for p in service.pending("g")] == expected
        assert service.in_flight() == len(expected)
        for topic, queue in self.queues.items():
            assert (self.bench.committed(topic=topic) or 0) == queue.committed
        assert Counter(dead.body for dead in self.bench.read(DLQ)) == self.dead


@dataclass
class Part:
    """A message of the last FIFO batch."""

    receipt: str
    visible_ms: int
    attempt: int
    acked: bool = False
    released: bool = False
    held: bool = True


class FifoMachine(Machine):
    def __init__(self) -> None:
        super().__init__()
        self.committed = 0
        self.batch: dict[int, Part] = {}
        self.attempt_id: str | None = None
        self.local = False
        self.dead: list[bytes] = []
        self.dropped: list[str] = []

    def open_parts(self) -> list[int]:
        return [offset for offset, part in self.batch.items() if not part.acked]

    def settle_part(self, offset: int) -> None:
        self.batch[offset].acked = True
        left = self.open_parts()
        self.committed = left[0] if left else max(self.batch) + 1

    def bury_exhausted(self) -> None:
        for offset in self.open_parts():
            part = self.batch[offset]
            if part.visible_ms <= self.bench.now_ms and part.attempt >= MAX_ATTEMPTS and not part.released:
                self.dead.append(str(offset).encode())
                self.settle_part(offset)

    @rule(count=st.integers(1, 5))
    def put(self, count: int) -> None:
        self.bench.put("t", count, first=self.bodies)
        self.bodies += count

    @rule(
        n=st.integers(1, 6),
        invisible_ms=INVISIBLE_MS,
        local=st.booleans(),
        attempt_id=st.sampled_from([None, None, "A", "B"]),
        skip_acked=st.booleans(),
    )
    def pop(self, n: int, invisible_ms: int, local: bool, attempt_id: str | None, skip_acked: bool) -> None:
        now_ms = self.bench.now_ms
        found = self.bench.pop(
            n=n, invisible_ms=invisible_ms, local=local, attempt_id=attempt_id, order=True, skip_acked=skip_acked
        )
        self.bury_exhausted()
        same = attempt_id is not None and attempt_id == self.attempt_id and bool(self.batch)
        if not same and any(self.batch[offset].visible_ms > now_ms for offset in self.open_parts()):
            assert found == []
            return
        known = {offset: part for offset, part in self.batch.items() if skip_acked and offset >= self.committed}
        done = {offset for offset, part in known.items() if part.acked}
        expected = [offset for offset in range(self.committed, self.bodies) if offset not in done][:n]
        got = [d.message.offset for d in found]
        assert got == expected[: len(got)]
        assert bool(got) == bool(expected)
        assert len(got) == len(expected) or max(got) < self.bodies - 1  # what was read before the last put comes first
        if not expected:
            return
        self.take(found, got, known, same=same)
        self.attempt_id, self.local = attempt_id, local
        assert {part.visible_ms for part in self.batch.values() if part.receipt} == {now_ms + invisible_ms}

    def take(self, found: list[Any], offsets: list[int], known: dict[int, Part], *, same: bool) -> None:
        """`known`: what is kept of the last batch, handed out or not."""
        old, self.batch = self.batch, {}
        for offset, part in known.items():
            attempt = part.attempt + (0 if same or part.released else 1)
            self.batch[offset] = Part("", self.bench.now_ms, attempt, part.acked, not part.acked)
        for delivery, offset in zip(found, offsets, strict=True):
            before = old.get(offset)
            attempt = 1 if before is None else before.attempt + (0 if same or before.released else 1)
            assert delivery.attempt == attempt
            self.batch[offset] = Part(delivery.receipt, delivery.visible_at_ms, attempt)
        self.batch = dict(sorted(self.batch.items()))
        self.dropped += [part.receipt for part in old.values() if not part.acked and part.receipt]

    def out(self) -> list[int]:
        return [offset for offset in self.open_parts() if self.batch[offset].receipt]

    @precondition(lambda self: self.out())
    @rule(picks=st.lists(st.integers(0, 99), min_size=1, max_size=5))
    def ack(self, picks: list[int]) -> None:
        chosen = {(left := self.out())[n % len(left)] for n in picks}
        self.bench.service.ack("g", "t", [self.batch[offset].receipt for offset in chosen])
        for offset in chosen:
            self.settle_part(offset)

    @precondition(lambda self: self.dropped)
    @rule(n=st.integers(0, 99))
    def ack_late(self, n: int) -> None:
        receipt = self.dropped[n % len(self.dropped)]
        try:
            self.bench.service.ack("g", "t", receipt)
        except ReceiptExpiredError:
            assert int(receipt.split()[7]) >= self.committed
        else:
            assert int(receipt.split()[7]) < self.committed

    @precondition(lambda self: self.out())
    @rule(n=st.integers(0, 99), invisible_ms=INVISIBLE_MS)
    def change(self, n: int, invisible_ms: int) -> None:
        part = self.batch[(left := self.out())[n % len(left)]]
        part.receipt = self.bench.service.change_invisible("g", "t", part.receipt, invisible_ms)
        part.visible_ms, part.held = self.bench.now_ms + invisible_ms, True

    @precondition(lambda self: self.out())
    @rule(n=st.integers(0, 99))
    def nack(self, n: int) -> None:
        offset = (left := self.out())[n % len(left)]
        part = self.batch[offset]
        receipt = self.bench.service.nack("g", "t", part.receipt)
        if part.attempt >= MAX_ATTEMPTS:
            assert receipt is None
            self.dead.append(str(offset).encode())
            self.settle_part(offset)
        else:
            assert receipt is not None
            part.receipt, part.held = receipt, False
            part.visible_ms = self.bench.now_ms + DELAYS_MS[part.attempt - 1]

    @precondition(lambda self: self.out())
    @rule(n=st.integers(0, 99))
    def release(self, n: int) -> None:
        part = self.batch[(left := self.out())[n % len(left)]]
        self.bench.service.release("g", "t", [part.receipt])
        part.released, part.visible_ms = True, self.bench.now_ms

    @rule(n=st.integers(0, 99))
    def reset(self, n: int) -> None:
        self.committed = n % (self.bodies + 1)
        self.bench.reset(self.committed)
        self.dropped += [part.receipt for part in self.batch.values() if part.receipt]
        self.batch, self.attempt_id = {}, None

    @rule(duration_ms=st.sampled_from([1, 99, 100, 1_000, 6_000, 70_000]))
    def advance(self, duration_ms: int) -> None:
        self.bench.advance(duration_ms)
        self.bury_exhausted()

    @precondition(lambda self: self.committed < self.bodies)
    @rule(n=st.integers(1, 3), turns=st.integers(1, MAX_ATTEMPTS), local=st.booleans(), skip_acked=st.booleans())
    def fail(self, n: int, turns: int, local: bool, skip_acked: bool) -> None:
        """Nobody answers, several times in a row: chance alone seldom comes so far as to the last attempt."""
        for _ in range(turns):
            self.pop(n, 1_000, local, None, skip_acked)
            left = [self.batch[offset].visible_ms for offset in self.open_parts()]
            self.advance(max(1, max(left, default=0) - self.bench.now_ms))

    @rule(how=st.sampled_from(["close", "kill"]))
    def restart_(self, how: str) -> None:
        self.restart(how)
        if self.local:
            for offset in self.open_parts():
                if self.batch[offset].held:
                    self.batch[offset].visible_ms = min(self.batch[offset].visible_ms, self.bench.now_ms)
        self.bench.settle()
        self.bury_exhausted()

    @invariant()
    def same(self) -> None:
        assert (self.bench.committed() or 0) == self.committed
        now_ms = self.bench.now_ms
        expected = [
            (offset, self.batch[offset].visible_ms)
            for offset in self.open_parts()
            if self.batch[offset].visible_ms > now_ms
        ]
        assert [(p.offset, p.visible_at_ms) for p in self.bench.service.pending("g")] == expected
        assert Counter(dead.body for dead in self.bench.read(DLQ)) == Counter(self.dead)


TestStandard = StandardMachine.TestCase
TestStandard.settings = SOME
TestFifo = FifoMachine.TestCase
TestFifo.settings = SOME
