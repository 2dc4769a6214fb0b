"""The compiled pop and ack, held against those of Python: the same records, the same receipts, the same memory."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import mqstore
from mqstore.broker.pop import unordered
from mqstore.broker.pop.batch import Batch
from mqstore.broker.pop.ordered import OrderedQueues
from mqstore.broker.pop.poplog import journal
from mqstore.broker.pop.request import Delivery
from mqstore.broker.pop.state import QueueFields
from mqstore.broker.pop.unordered import UnorderedQueues
from mqstore.broker.reads.filters.filter import parse_filter
from mqstore.broker.reads.waiting import Wanted
from mqstore.broker.tables.names import POP_LOG_TOPIC, QueueKey, pop_retry_topic
from mqstore.errors import MQStoreError
from mqstore.native import kernel
from tests.broker.popsupport import DLQ, RETRY, PopBench, interrupted_puts, memory, orders
from tests.waiting import ended, in_thread
from tests.without import compiled

ORDERS = {"no order": {}, "in order": {"order": True}, "without what is acked": {"order": True, "skip_acked": True}}
"""Ways to pop."""
ways = pytest.mark.parametrize("way", list(ORDERS))


class Pair:
    """Two stores that are told the same; the second pops by Python alone."""

    def __init__(self, folder: Path, way: str = "no order", **config: Any) -> None:
        self.way = ORDERS[way]
        names = ("compiled", "python")
        self.benches = [PopBench(folder / name, rng=random.Random(7).random, **config) for name in names]
        self.deliveries: list[tuple[Delivery, Delivery]] = []
        self.benches[1].by_python()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        for bench in self.benches:
            bench.__exit__()

    def do(self, call: Callable[[PopBench], Any]) -> list[Any]:
        """What both say; an error counts as that."""
        answers = []
        for bench in self.benches:
            try:
                answers.append(call(bench))
            except MQStoreError as error:
                answers.append(error)
        assert repr(answers[0]) == repr(answers[1])
        return answers

    def pop(self, **options: Any) -> int:
        options = {**self.way, **options}
        found = self.do(lambda bench: [tuple(delivery) for delivery in bench.pop(**options)])
        if isinstance(found[0], list):
            pairs = [(Delivery(*one), Delivery(*other)) for one, other in zip(*found, strict=True)]
            assert all(type(one.receipt) is str and one[1:] == other[1:] for one, other in pairs)
            self.deliveries += pairs
            return len(pairs)
        return 0

    def ack(self, receipts: list[str], *, give_back: bool = False) -> None:
        self.do(lambda bench: (bench.service.release if give_back else bench.service.ack)("g", "t", receipts))

    def reopen(self, *, kill: bool) -> None:
        for bench in self.benches:
            if kill:
                bench.kill()
            bench.reopen()
        self.benches[1].by_python()

    def check(self) -> None:
        states = [bench.tables.states for bench in self.benches]
        assert list(states[0]) == list(states[1])
        for key in states[0]:
            assert memory(states[0][key]) == memory(states[1][key])
        assert orders(self.benches[0]) == orders(self.benches[1])
        logs = [[message.body for message in bench.read(POP_LOG_TOPIC)] for bench in self.benches]
        assert logs[0] == logs[1]
        journals = [bench.tables.journal.read() for bench in self.benches]
        assert journals[0] == journals[1]
        assert self.benches[0].tables.journal_end == self.benches[1].tables.journal_end


def create(pair: Pair, queues: int) -> None:
    """Create the topic, or give it more queues."""
    pair.do(lambda bench: bench.parts.topics.create("t", queues=1) and None)
    pair.do(lambda bench: bench.parts.topics.alter("t", queues=queues) and None)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """A pair with one queue."""
    with Pair(tmp_path) as pair:
        create(pair, 1)
        yield pair


STEPS = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 2), st.integers(1, 5)),
    st.tuples(st.just("pop"), st.sampled_from([1, 1, 1, 2, 3, 32]), st.sampled_from([60_000, 60_000, 1000, 200])),
    st.tuples(st.just("pop from"), st.integers(-1, 2), st.booleans()),
    st.tuples(st.just("pop tagged"), st.sampled_from([None, "a", "b"]), st.sampled_from([1, 3])),
    st.tuples(st.just("pop otherwise"), st.booleans(), st.sampled_from([None, None, "a", "b"])),
    st.tuples(st.just("ack"), st.integers(0, 40), st.sampled_from([1, 2, 3, 9])),
    st.tuples(st.just("ack"), st.integers(-3, 40), st.just(1)),
    st.tuples(st.just("pop and ack"), st.integers(1, 4), st.just(1)),
    st.tuples(st.just("give back"), st.integers(0, 40), st.integers(1, 2)),
    st.tuples(
        st.sampled_from(["nack", "renew", "change", "bury"]), st.integers(0, 40), st.sampled_from([0, 500, 70_000])
    ),
    st.tuples(st.just("time"), st.sampled_from([0, 1, 1, 2, 999, 60_000]), st.just(None)),
    st.tuples(st.just("clock"), st.sampled_from([-2000, -1, 1, 5000]), st.just(None)),
    st.tuples(st.just("reset"), st.integers(0, 2), st.integers(0, 9)),
    st.tuples(st.just("flush"), st.just(None), st.just(None)),
    st.tuples(st.just("reopen"), st.booleans(), st.just(None)),
)


def step(pair: Pair, kind: str, first: Any, second: Any, serial: int) -> None:
    taken = pair.deliveries
    match kind:
        case "put":
            tag = "ab"[serial % 2]
            pair.do(lambda bench: bench.put("t", second, queue_id=first, first=serial * 10, tag=tag))
        case "pop":
            pair.pop(n=first, invisible_ms=second)
        case "pop from":
            pair.pop(queue_id=first, local=second)
        case "pop otherwise":
            pair.pop(order=first, attempt_id=second)
        case "pop and ack":
            for _ in range(first):
                if pair.pop():
                    pair.ack([taken[-1][0].receipt])
        case "pop tagged":
            pair.pop(filter=None if first is None else parse_filter(first), n=second)
        case "ack" | "give back" if taken:
            chosen = [taken[(first + i) % len(taken)] for i in range(second)]
            pair.ack([one.receipt for one, _ in chosen], give_back=kind == "give back")
        case "nack" | "renew" | "change" | "bury" if taken:
            one, other = taken[first % len(taken)]
            name = {"nack": "nack", "bury": "dead_letter"}.get(kind, "change_invisible")
            last = "no good" if kind == "bury" else second
            renew = {"renew": True} if kind == "renew" else {}
            found = pair.do(lambda bench: bench.change(name, one.receipt, last, **renew))
            if isinstance(found[0], str):
                taken.append((one._replace(receipt=found[0]), other._replace(receipt=found[1])))
        case "time":
            for bench in pair.benches:
                bench.advance(first)
        case "clock":
            for bench in pair.benches:
                bench.clock.set_wall(bench.now_ms + first)
        case "put anew":
            for bench in pair.benches:
                bench.rewrite()
        case "reset":
            pair.do(lambda bench: bench.reset(second, first))
        case "flush":
            for bench in pair.benches:
                bench.service.flush()
        case "reopen":
            pair.reopen(kill=first)


@compiled
@given(
    steps=st.lists(STEPS, max_size=40),
    queues=st.integers(1, 3),
    way=st.sampled_from(list(ORDERS)),
    room=st.sampled_from([900, 1 << 18]),
)
def test_compiled_pops_leave_what_pops_of_python_leave(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, Any, Any]], queues: int, way: str, room: int
) -> None:
    with Pair(tmp_path_factory.mktemp("pair"), way) as pair, pytest.MonkeyPatch.context() as patched:
        patched.setattr(journal, "_FILE_BYTES", room)  # 900: for three pops
        create(pair, queues)
        pair.do(lambda bench: bench.put("t", 8))
        for serial, (kind, first, second) in enumerate(steps):
            if kind in ("put", "reset"):
                first %= queues
            step(pair, kind, first, second, serial)
            pair.check()


POP = ("pop", 1, 60_000)
DONE = ("pop and ack", 3, None)
"""Behind it the last batch is one that compiled code may take the place of."""


TURNS: dict[str, list[tuple[str, Any, Any]]] = {
    "reset, and popped again in the same millisecond": [POP, POP, ("reset", 0, 0), POP, POP, POP],
    "given back": [POP, POP, POP, ("give back", -2, 1), POP, POP],
    "due before the others": [POP, POP, ("pop", 1, 1000), ("time", 1, None), POP, ("time", 999, None)],
    "by an old receipt": [POP, ("nack", -1, 70_000), ("ack", -2, 1), ("ack", -1, 1)],
    "by a receipt that was renewed": [POP, ("renew", -1, 70_000), ("ack", -1, 1)],
    "one of many": [("pop", 32, 60_000), ("ack", -2, 1), ("ack", -8, 1), ("ack", -1, 1), ("ack", -2, 1)],
    "one of many, with gaps": [("pop tagged", "b", 3), ("ack", -2, 1), ("ack", -3, 1), ("ack", -1, 1)],
    "popped with a filter": [POP, ("pop tagged", "b", 1), POP, POP],
    "clock set back": [POP, ("ack", -1, 1), ("ack", -1, 1), POP, ("clock", -2000, None), POP, POP],
    "clock set back, and reset": [
        *(POP, ("ack", -1, 1), ("clock", -500, None), ("reset", 0, 2), *[("pop", 1, 100)] * 2, ("time", 1200, None))
    ],
    "too late": [POP, ("time", 60_000, None), POP, POP, ("ack", -3, 1)],
    "after a crash": [POP, ("reopen", True, None), POP, POP, ("ack", -3, 1), ("ack", -2, 1)],
    "to the last": [DONE, ("pop", 2, 60_000), ("ack", -2, 2), ("pop", 3, 60_000), ("ack", -3, 3)],
    "beyond it": [DONE, ("pop", 2, 60_000), ("ack", -1, 2), ("pop", 4, 60_000), ("ack", -4, 4)],
    "beyond the end": [POP] * 7 + [("put", 0, 3)] + [POP] * 5,
    "failed": [DONE, POP, ("nack", -1, 0), POP, ("ack", -2, 1), ("ack", -1, 1), POP],
    "timed out": [DONE, ("pop", 1, 200), ("time", 1200, None), POP, ("ack", -1, 1), POP],
    "given back unseen": [DONE, POP, ("give back", -1, 1), POP, ("ack", -1, 1), POP],
    "a dead letter": [DONE, POP, ("bury", -1, None), POP, ("ack", -2, 1), ("ack", -1, 1)],
    "four, the last first": [
        *(DONE, ("pop", 4, 60_000), ("ack", -1, 1), ("ack", -3, 1), ("ack", -4, 1), ("ack", -2, 1), POP)
    ],
    "four, of which one was settled in time": [
        *(DONE, ("pop", 4, 200), ("ack", -3, 1), ("time", 1200, None), ("pop", 4, 60_000), ("ack", -4, 1), POP)
    ],
    "two of four": [DONE, ("pop", 4, 60_000), ("ack", -3, 2), ("ack", -4, 1), ("ack", -4, 4), POP],
    "one twice": [("pop", 4, 60_000), ("ack", -4, 4), ("pop", 3, 60_000), ("ack", -2, 3), POP],
    "of two batches": [("pop", 2, 60_000), ("pop", 2, 60_000), ("ack", -3, 2), ("ack", -4, 4), POP],
    "one was given back": [("pop", 4, 60_000), ("give back", -2, 1), ("ack", -3, 3), POP],
    "one failed": [("pop", 4, 60_000), ("nack", -1, 0), ("ack", -5, 4), ("ack", -1, 1)],
    "asked twice": [DONE, ("pop otherwise", True, "a"), ("pop otherwise", True, "a"), POP],
    "the other way": [DONE, ("pop otherwise", False, None), ("pop otherwise", True, None)],
    "put anew": [DONE, POP, ("put anew", 0, 0), ("ack", -1, 1), ("reopen", True, None), DONE],
    "in flight at a crash": [DONE, POP, ("reopen", True, None), POP, ("ack", -1, 1), DONE],
    "settled, opened again": [DONE, ("reopen", False, None), DONE, ("reopen", True, None), DONE],
    "settled, other clock": [DONE, ("clock", -2000, None), DONE, ("clock", 5000, None), DONE],
}


@compiled
@pytest.mark.parametrize("way", ["no order", "in order"])
@pytest.mark.parametrize("steps", TURNS.values(), ids=TURNS.keys())
def test_longer_pop_paths_agree(pair: Pair, way: str, steps: list[tuple[str, Any, Any]]) -> None:
    """The cases that compiled code leaves alone, each with a pop or an ack behind it that could get it wrong."""
    pair.way = ORDERS[way]
    for _ in range(2):  # the second time the group is there, and the route to its queues
        for serial in range(8):
            step(pair, "put", 0, 1, serial)
        for serial, (kind, first, second) in enumerate(steps):
            step(pair, kind, first, second, serial)
            pair.check()


@compiled
@pytest.mark.parametrize(
    ("way", "settles", "n", "found", "next_"),
    [
        ("no order", True, 1, [0, 1, 4, 5], 8),
        ("no order", False, 1, [0, 1, 4, 5], 8),
        ("no order", True, 2, [0, 1, 4, 5], 8),
        # Behind the last it is read again, and here there is something by then.
        ("in order", True, 1, [0, 1, 4, 5, 6], 7),
        ("in order", True, 2, [0, 1, 4, 5, 6, 7], 8),
    ],
)
def test_messages_that_cannot_be_read_are_passed_over(
    pair: Pair, way: str, settles: bool, n: int, found: list[int], next_: int
) -> None:
    """Between two, and behind the last: as a read leaves them out whose units are void."""
    pair.way = ORDERS[way]
    pair.do(lambda bench: bench.put("t", 8))
    pair.pop()
    for bench in pair.benches:
        bench.state.ahead = [message for message in bench.state.ahead if message.offset not in (2, 3, 6, 7)]
    for _ in range(4):
        if settles:
            for one, _ in pair.deliveries:
                pair.ack([one.receipt])
        pair.pop(n=n)
        pair.check()
    assert [one.message.offset for one, _ in pair.deliveries] == found
    pair.do(lambda bench: bench.put("t", 1))
    for one, _ in pair.deliveries[-n:]:
        pair.ack([one.receipt])
    assert pair.pop() == 1
    assert pair.deliveries[-1][0].message.offset == next_


@compiled
@ways
def test_a_reset_that_is_pending_comes_first(pair: Pair, way: str) -> None:
    pair.way = ORDERS[way]
    pair.do(lambda bench: bench.put("t", 8))
    for _ in range(3):
        pair.pop()
        pair.ack([pair.deliveries[-1][0].receipt])
    for bench in pair.benches:
        bench.parts.offsets.resets[QueueKey("g", "t", 0)] = 1  # as one that could not be logged when it was asked for
    for _ in range(3):
        pair.pop()
        pair.check()
        pair.ack([pair.deliveries[-1][0].receipt])
    assert [one.message.offset for one, _ in pair.deliveries] == [0, 1, 2, 1, 2, 3]


@compiled
def test_batches_of_several_queues_are_settled_in_one_call(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by one record, in the order of the receipts. A batch in two places is for Python, which puts it together,
    and so is a wrong receipt: nothing is settled then."""
    create(pair, 3)
    for queue_id in range(3):
        pair.do(lambda bench, queue_id=queue_id: bench.put("t", 40, queue_id=queue_id))
        pair.pop(queue_id=queue_id)
        pair.ack([pair.deliveries.pop()[0].receipt])
    for queue_id in (0, 1, 0, 2, 1):
        pair.pop(queue_id=queue_id, n=3)
    receipts = [one.receipt for one, _ in pair.deliveries]
    by_python: list[Any] = []
    real = UnorderedQueues.settle
    monkeypatch.setattr(UnorderedQueues, "settle", lambda *rest: by_python.append(rest[1]) or real(*rest))
    wrong = " ".join(["1000", *receipts[3].split()[1:-1], "1000"])
    for chosen, *calls in (
        ([receipts[0], wrong], 0, 0),
        ([receipts[i] for i in (0, 6, 1)], 1, 1),
        ([receipts[i] for i in (3, 9, 2, 7)], 0, 3),
        (receipts, 5, 5),
    ):
        by_python.clear()
        pair.ack(chosen)
        pair.check()
        assert [sum(map(by_python.count, bench.tables.states.values())) for bench in pair.benches] == calls
    assert all(bench.service.in_flight() == 0 for bench in pair.benches)


@pytest.fixture
def ordered(pair: Pair) -> Pair:
    """A pair that pops in order, and whose last batch is settled."""
    pair.way = ORDERS["in order"]
    pair.do(lambda bench: bench.put("t", 9))
    step(pair, *DONE, 0)
    return pair


@compiled
def test_a_last_batch_that_is_not_noted_yet_is_for_python(ordered: Pair) -> None:
    """As an exception of a signal handler may leave it, between the record in the log and the order info."""
    for bench in ordered.benches:
        bench.state.fifo = Batch(99, [3], bench.now_ms, 1000, True)
    tables, state = ordered.benches[0].tables, ordered.benches[0].state
    assert tables.deliver(state, 1, 60_000, "t", True, True) is None


@compiled
def test_a_queue_that_was_dropped_hands_out_nothing(pair: Pair) -> None:
    pair.do(lambda bench: bench.put("t", 9))
    for _ in range(3):
        pair.pop()
    tables, state = pair.benches[0].tables, pair.benches[0].state
    receipt = pair.deliveries[-1][0].receipt
    ahead, next_, in_flight = state.ahead, state.ahead_next, dict(state.in_flight)
    pair.do(lambda bench: bench.parts.groups.delete("g"))
    assert state.gone
    # As if somebody had looked it up before, and the drop had left everything else.
    state.cursor, state.committed, state.ahead, state.ahead_next, state.in_flight = 3, 0, ahead, next_, in_flight
    assert tables.deliver(state, 1, 60_000, "t", True, False) is None
    assert tables.settle([state], [receipt]) == 0


@compiled
def test_a_long_run_of_single_messages(pair: Pair) -> None:
    """Past the read-ahead's ends, and past the first tidying of the timeline."""
    pair.do(lambda bench: bench.put("t", 1500))
    draw = random.Random(3)
    for i in range(1500):
        assert pair.pop() == 1
        if i % 7 == 0:
            for bench in pair.benches:
                bench.clock.advance(1)
        if draw.random() < 0.9:
            one, _ = pair.deliveries.pop(draw.randrange(len(pair.deliveries)))
            pair.ack([one.receipt])
    pair.check()
    pair.reopen(kill=True)
    pair.check()


@compiled
def test_a_long_run_of_messages_settled_at_once(pair: Pair) -> None:
    """In one millisecond: pop times in order run ahead of the clock by as much as they may, and begin again."""
    pair.way = ORDERS["in order"]
    pair.do(lambda bench: bench.put("t", 1110))
    for _ in range(1100):
        assert pair.pop() == 1
        pair.ack([pair.deliveries[-1][0].receipt])
    pair.check()
    pop_times = [int(one.receipt.split()[1]) - pair.benches[0].now_ms for one, _ in pair.deliveries]
    assert (min(pop_times), max(pop_times)) == (0, 1000)
    pair.reopen(kill=True)
    pair.check()
    pair.pop()
    assert pair.deliveries[-1][0].message.offset == 1100


@compiled
@pytest.mark.parametrize(
    ("way", "n", "has_retries", "least", "most"),
    [
        ("no order", 1, False, 0, 15),
        ("no order", 1, True, 40, 150),
        ("in order", 1, False, 0, 15),
        ("without what is acked", 1, False, 0, 15),
        ("in order", 8, False, 0, 15),
        ("no order", 8, False, 0, 15),
    ],
)
def test_single_messages_take_the_compiled_way(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, way: str, n: int, has_retries: bool, least: int, most: int
) -> None:
    """Or all these tests would compare Python with itself. What is left to Python: the reads, and the
    fifth of the pops that looks at the retry topic first, and then at the queue."""
    bench = pair.benches[0]
    if has_retries:
        bench.parts.topics.ensure(pop_retry_topic("g", "t"), 1)
    bench.put("t", 240)
    calls = {"pop": 0, "settle": 0}
    for kind, name in product((UnorderedQueues, OrderedQueues), calls):
        real = getattr(kind, name)

        def counted(self: Any, *args: Any, name: str = name, real: Any = real, **options: Any) -> Any:
            calls[name] += 1
            return real(self, *args, **options)

        monkeypatch.setattr(kind, name, counted)
    for i in range(240 // n):
        found = bench.pop(n=n, **ORDERS[way])
        for delivery in reversed(found[1:] if i % 2 else ()):
            bench.ack(delivery)
        bench.ack(*found[: 1 if i % 2 else None])
    assert least <= calls["pop"] < most
    assert calls["settle"] < 15  # where a segment of the log is full
    assert bench.committed() == 240


@compiled
def test_offsets_noted_by_compiled_code_are_saved(tmp_path: Path) -> None:
    with PopBench(tmp_path, queues=1) as bench:
        bench.put("t", 8)
        for committed in (1, 2, 3):
            bench.ack(*bench.pop())
            assert bench.parts.offsets.dirty
            bench.parts.offsets.save()
            saved = json.loads((tmp_path / "config" / "consumerOffset.json").read_bytes())
            assert saved["offsetTable"]["t@g"] == {"0": committed}
            assert not bench.parts.offsets.dirty


def test_a_pop_at_once_leaves_retry_topics_to_pop(tmp_path: Path) -> None:
    with PopBench(tmp_path, queues=1) as pops:
        pops.put("t", 8)
        assert [delivery.message.offset for delivery in (*pops.pop(), *pops.pop())] == [0, 1]
        assert len(pops.service.pop_at_once("g", "t", 1, 60_000, False)) == 1  # read ahead by the second pop
        pops.advance(60_000)  # copies of what was popped go to the retry topic
        pops.pop()
        assert pops.service.pop_at_once("g", "t", 1, 60_000, False) == []


def test_an_ack_of_a_retry_leaves_the_first_delivery_of_its_offset(tmp_path: Path) -> None:
    with PopBench(tmp_path, queues=1) as pops:
        pops.put("t", 2)
        for _ in range(2):  # copies 0 and 1 in the retry topic, then 2 and 3
            assert len(pops.pop(n=2)) == 2
            pops.advance(60_000)
        pops.put("t", 2, first=2)
        found = pops.pop(n=4)
        assert [delivery.message.offset for delivery in found] == [2, 3, 2, 3]
        pops.ack(*[delivery for delivery in found if delivery.message.topic != "t"])
        assert [(each.topic, each.offset) for each in pops.service.pending("g")] == [("t", 2), ("t", 3)]


@pytest.mark.parametrize("durability", ["append", "flush"])
def test_only_stores_that_wait_for_no_disk_pop_at_once(tmp_path: Path, durability: Any) -> None:
    with mqstore.open(tmp_path, durability=durability) as store:
        store.create_topic("t", queues=1)
        store.put_many("t", [b""] * 8)
        store.log.dispatch()
        popped = [*store.broker.pop("g", "t"), *store.broker.pop("g", "t")]
        assert len(store.broker.pop_at_once("g", "t", 1, 60_000, False)) == (durability == "append")
        assert len(store.broker.pop("g", "t", order=0, local=1)) == 1  # type: ignore[arg-type]
        assert store.broker.ack_at_once("g", "t", [popped[0].receipt]) == (durability == "append")


@compiled
def test_the_last_ack_of_a_batch_in_order_wakes_a_receiver(ordered: Pair) -> None:
    """One that waits, or that has looked and is about to wait."""
    ordered.pop(n=3)
    told: list[bool] = []
    bench = ordered.benches[0]
    bench.park(told.append, order=True)
    for one, _ in ordered.deliveries[-3:]:
        bench.waiters.run_once(bench.now_ms)
        seen = bench.waiters.seen("t")
        assert told == []
        bench.service.ack("g", "t", [one.receipt])
    bench.waiters.run_once(bench.now_ms)
    assert told == [True]
    [last] = bench.pop(order=True)
    seen = bench.waiters.seen("t")
    bench.ack(last)
    assert bench.waiters.seen("t") != seen


@compiled
@pytest.mark.parametrize("change", ["attempt of the queue model", "cleaned away"])
def test_a_record_that_says_more_is_not_replaced(ordered: Pair, change: str) -> None:
    """Compiled code asks the order info, and not only the last batch that it has seen."""
    for bench in ordered.benches:
        if change == "attempt of the queue model":
            bench.service.note_attempt(QueueKey("g", "t", 0), 3, 2)
        else:
            bench.tables.orders.put(QueueKey("g", "t", 0), None)
    ordered.pop()
    attempt = 3 if change == "attempt of the queue model" else 1
    assert [(one.message.offset, one.attempt) for one, _ in ordered.deliveries[-1:]] == [(3, attempt)]
    ordered.check()
    ordered.ack([ordered.deliveries[-1][0].receipt])
    ordered.check()


@compiled
def test_busy_queue_is_awaited(pair: Pair) -> None:
    bench = pair.benches[0]
    bench.put("t", 3)
    [first] = bench.pop()
    tables, state = bench.tables, bench.state
    before = memory(state)
    with state.lock:
        assert tables.deliver(state, 1, 1000, "t", True, False) is None
        assert tables.settle([state], [first.receipt]) == 0
        popping, acknowledging = in_thread(bench.pop), in_thread(lambda: bench.ack(first))
        assert memory(state) == before
    assert len(ended(*popping)) == 1
    assert ended(*acknowledging) is None
    assert list(state.in_flight) == [1]
    assert not state.lock.is_held_here


@compiled
def test_failed_put_leaves_the_message(pair: Pair) -> None:
    """The alarm that a put rings runs Python, into which Ctrl-C may come."""
    bench = pair.benches[0]
    bench.put("t", 3)
    [first] = bench.pop(local=False)
    before = memory(bench.state)
    for call in (lambda: bench.pop(local=False), lambda: bench.ack(first)):
        with interrupted_puts(bench.parts.store), pytest.raises(KeyboardInterrupt):
            call()
        assert memory(bench.state) == before
        assert not bench.state.lock.is_held_here
    assert [delivery.message.offset for delivery in (*bench.pop(), *bench.pop())] == [1, 2]
    bench.ack(first)
    assert bench.committed() == 1


@compiled
@pytest.mark.parametrize("queues", [1, 3])
@pytest.mark.parametrize("parks", [False, True])
def test_compiled_calls_at_once_are_those_of_python(tmp_path: Path, queues: int, parks: bool) -> None:
    with Pair(tmp_path) as pair:
        create(pair, queues)
        for queue_id in range(queues):
            pair.do(lambda bench, queue_id=queue_id: bench.put("t", 8, queue_id=queue_id))
            pair.pop(queue_id=queue_id)
        woken: list[list[bool]] = [[], []]
        for bench, fired in zip(pair.benches, woken, strict=True):
            bench.tables._tip = bench.tables.log.ways["ck"].log  # deliver by compiled code in both
            if parks:
                bench.waiters.add_waiter(Wanted("t", -1, group="g"), fired.append)
        compiled_calls, python_calls = pair.benches[0].tables, pair.benches[1].service
        for topic, n, invisible_ms in [
            *[("t", 1, 60_000)] * 4,
            *(("nowhere", 1, 60_000), ("t", 1, 99), ("t", 1, 43_200_001), ("t", 33, 60_000), ("t", 2, 60_000)),
        ]:
            given = [each.pop_at_once("g", topic, n, invisible_ms, False) for each in (compiled_calls, python_calls)]
            assert [each[1:] for each in given[0]] == [each[1:] for each in given[1]]
            receipts = [each.receipt for each in given[0]]
            done = [each.ack_at_once("g", topic, receipts) for each in (compiled_calls, python_calls)]
            assert done == [len(receipts)] * 2
        pair.do(lambda bench: bench.settle() and None)
        assert woken[0] == woken[1]
        pair.check()


CALLS = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 3), st.integers(1, 3)),
    st.tuples(st.just("pop"), st.sampled_from([-1, -1, 0, 3]), st.integers(1, 3)),
    st.tuples(st.just("pop at once"), st.just(0), st.integers(1, 2)),
    st.tuples(st.sampled_from(["ack", "release"]), st.integers(0, 9), st.just(0)),
)
ACKS = [("ack", 0, 0)] * 4


@compiled
@example(calls=[("pop at once", 0, 2), ("release", 5, 0)], kind="PRIORITY", order=False)
@example(calls=[*ACKS, *[("pop", queue_id, 1) for queue_id in range(4)], *ACKS], kind="PRIORITY", order=True)
@given(calls=st.lists(CALLS, max_size=20), kind=st.sampled_from(["PRIORITY", "NORMAL"]), order=st.booleans())
def test_compiled_code_selects_the_queue_of_python(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[str, int, int]], kind: str, order: bool
) -> None:
    with Pair(tmp_path_factory.mktemp("pair"), "in order" if order else "no order") as pair:
        pair.do(lambda bench: bench.parts.topics.create("t", queues=4, message_type=kind) and None)
        pair.do(lambda bench: setattr(bench.tables, "_tip", bench.tables.log.ways["ck"].log))  # `deliver` is compiled
        pop_at_once = pair.benches[0].tables.pop_at_once, pair.benches[1].service.pop_at_once
        begin = [
            *[("put", queue_id, 3) for queue_id in range(4)],
            *[("pop", queue_id, 1) for queue_id in (0, 0, 1, 2, 3)],
        ]
        for call, at, count in [*begin, *calls, *[("pop at once", 0, 1)] * 6]:
            if call == "put":
                pair.do(lambda bench, at=at, count=count: bench.put("t", count, queue_id=at))
            elif call == "pop":
                pair.pop(queue_id=at, n=count)
            elif call == "pop at once":
                found = [pop("g", "t", count, 60_000, order) for pop in pop_at_once]
                assert [each[1:] for each in found[0]] == [each[1:] for each in found[1]]
                pair.deliveries += zip(*found, strict=True)
            elif pair.deliveries:
                one, _ = pair.deliveries.pop(at % len(pair.deliveries))
                pair.ack([one.receipt], give_back=call == "release")
        pair.check()


PROPERTIES = st.dictionaries(
    st.sampled_from(
        ["mine", "DELAY", "DELAYED", "TIMER_OUT_MS", "TIMER_MINE", "1ST_POP_TIME", "POP_CK", "UNIQ_KEY", "TAGS"]
    ),
    st.sampled_from(["1", "é", "x" * 30]),
)


@compiled
@given(messages=st.lists(st.tuples(PROPERTIES, st.integers(0, 4), st.integers(1, 3)), min_size=1, max_size=12))
def test_compiled_copies_have_the_properties_of_python(
    tmp_path_factory: pytest.TempPathFactory, messages: list[tuple[dict[str, str], int, int]]
) -> None:
    with Pair(tmp_path_factory.mktemp("pair")) as pair:
        create(pair, 1)
        for bench in pair.benches:
            bench.parts.groups.create("g", max_attempts=4)
            for properties, attempts, _ in messages:
                bench.parts.store.append("t", 0, b"x", properties=properties, reconsume_times=attempts)
        for _, _, count in messages:
            pair.pop(n=count)
            pair.do(lambda bench: bench.clock.advance(1))
        pair.benches[0].advance(60_000)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(unordered, "kernel", None)
            pair.benches[1].advance(60_000)
        copies = [
            [(topic, each.stored_properties(), each.attempt) for topic in (RETRY, DLQ) for each in bench.read(topic)]
            for bench in pair.benches
        ]
        assert copies[0] == copies[1]
        assert len(copies[0]) == len(messages)


TEXTS = st.one_of(
    st.text(max_size=60),
    st.tuples(
        *[st.one_of(st.integers(0, 10**20).map(str), st.sampled_from(["", "-1", "00", "0", "1", "999", "x"]))] * 7
    ).map(lambda parts: " ".join((*parts[:5], "mqstore", *parts[5:]))),
)


@compiled
@given(
    st.lists(st.one_of(TEXTS, st.tuples(st.integers(0, 60), st.characters()), st.integers(0, 60)), max_size=20),
    st.sampled_from(list(ORDERS)),
)
def test_forged_receipts_are_refused_as_by_python(
    tmp_path_factory: pytest.TempPathFactory, forged: list[str | tuple[int, str] | int], way: str
) -> None:
    with Pair(tmp_path_factory.mktemp("pair"), way) as pair:
        create(pair, 2)
        pair.do(lambda bench: bench.put("t", 6))
        step(pair, *DONE, 0)
        pair.pop()
        pair.pop()
        for each in forged:
            receipt = pair.deliveries[3][0].receipt
            if isinstance(each, tuple):  # one character changed, or cut off behind
                receipt = receipt[: each[0]] + each[1] + receipt[each[0] + 1 :]
            else:
                receipt = receipt[:each] if isinstance(each, int) else each
            pair.ack([receipt])
            pair.check()


@compiled
def test_states_that_are_none_are_left_alone(pair: Pair) -> None:
    tables, receipts = pair.benches[0].tables, ["0 1 1 0 0 mqstore 0 0", "1 1 1 0 0 mqstore 0 1"]
    bare, half = kernel.QueueFields(), QueueFields()
    half.key = QueueKey("g", "t", 0)
    for thing in (None, 1, "state", object(), bare, half):
        assert tables.deliver(thing, 1, 1, "t", True, False) is None
        assert tables.settle([thing], receipts[:1]) == tables.settle([thing], receipts) == 0
    for states, wrong in (((), receipts), ([], receipts), ([bare], [b"0 1 1 0 0 mqstore 0 0"]), ([bare], [])):
        assert tables.settle(states, wrong) == 0
    state = tables.state(half.key)
    for n, invisible_ms in [*((n, 1) for n in (0, 33, -1, None, 1.0)), *((1, ms) for ms in (None, -1, 1 << 63, 1.0))]:
        assert tables.deliver(state, n, invisible_ms, "t", True, False) is None
    for call in (lambda: tables.deliver(state), tables.settle):
        with pytest.raises(TypeError):
            call()
    fields = kernel.PopFields()
    assert fields.deliver(state, 1, 1, "t", True, False) is None
    assert fields.settle([state], receipts) == 0


def test_a_store_that_flushes_each_put_pops_by_python(tmp_path: Path) -> None:
    with PopBench(tmp_path / "store", durability="flush", queues=1) as bench:
        bench.put("t", 5)
        assert not bench.is_compiled
        for i in range(5):
            [delivery] = bench.pop()
            assert delivery.message.offset == i
            bench.ack(delivery)
        assert bench.committed() == 5


@compiled
def test_names_that_do_not_fit_are_left_to_python(pair: Pair) -> None:
    bench = pair.benches[0]
    bench.put("t", 3)
    bench.pop(local=False)
    tables, state = bench.tables, bench.state
    head, before = state.head, memory(state)
    for length in (1025, 5000):
        state.head = head.ljust(length)
        assert tables.deliver(state, 1, 60_000, "t", False, False) is None
    state.head = head
    assert memory(state) == before
    state.head = head.ljust(1024)
    assert tables.deliver(state, 1, 60_000, "t", False, False) is not None
    assert bench.read(POP_LOG_TOPIC)[-1].body.startswith(state.head.encode() + b'"so":1,')
