"""kill -9 among items of all priorities that fail and are given back, against a model that is written apart.

A child works on the queue, with a clock that it moves itself, and says each step before and after it. The parent kills
it at any time, and starts another on the directory, at the time that the last one had. The model knows every state that
an item may be in: one, unless a kill has left a step open. Each answer of the queue must fit one of them, with the
attempt, and leaves those that it fits. An item of which a kill may have made two copies is `loose`: its answers are not
checked.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import mqstore
from mqstore import QueueEmpty, RetryPolicy, SimulatedClock, StoreConfig
from tests.children import killed_child
from tests.client.support import advance, settle
from tests.log.support import open_in

_ROUNDS = int(os.environ.get("MQSTORE_CAMPAIGN_ROUNDS", "15"))
_SEED = os.environ.get("MQSTORE_ITEM_SEED", "20261129")
_VISIBLE_MS = 20_000
_KINDS = {"put": 32, "get": 26, "ack": 20, "nack": 8, "release": 16, "advance": 5}
"""Steps, and how often."""

Step = dict[str, Any]


# -- the queue, in the child ------------------------------------------------------------------------------------------


class Work:
    """A queue, and steps on it."""

    def __init__(self, path: Path, now_ms: int, ordered: bool) -> None:
        self.clock, self.ordered = SimulatedClock(now_ms), ordered
        config = StoreConfig(clock=self.clock, segment_bytes=1 << 18, index_slots=64, index_entries=512)
        self.store = mqstore.open(path, config=config)
        options: Any = {"ordered": ordered, "visibility": _VISIBLE_MS / 1000, "retry": RetryPolicy(None, [3])}
        self.queue = self.store.queue("jobs", codec=mqstore.JSON, **options)
        settle(self.store.broker, self.clock, ())
        self.tasks: dict[int, tuple[Any, int]] = {}
        """Leased tasks, and when their leases end."""

    def do(self, step: Step) -> Step:
        """Do a step, and return the queue's answer."""
        given = {name: value for name, value in step.items() if name != "do"}
        found: Step = getattr(self, step["do"])(**given)
        settle(self.store.broker, self.clock, ())
        return found

    def put(self, n: int, **options: Any) -> Step:
        self.queue.put(n, **options)
        return {}

    def get(self) -> Step:
        try:
            task = self.queue.get(block=False)
        except QueueEmpty:
            return {"n": None}
        self.tasks[task.value] = task, self.clock.now_ms() + _VISIBLE_MS
        return {"n": task.value, "attempt": task.attempt}

    def ack(self, n: int) -> Step:
        self.tasks.pop(n)[0].ack()
        return {}

    def nack(self, n: int, delay: int) -> Step:
        self.tasks.pop(n)[0].nack(delay)
        return {}

    def release(self, n: int, delay: int) -> Step:
        self.tasks.pop(n)[0].release(delay)
        return {}

    def advance(self, seconds: float) -> Step:
        advance(self.store.broker, self.clock, (), seconds)
        self.tasks = {n: held for n, held in self.tasks.items() if held[1] > self.clock.now_ms()}
        return {}

    def steps(self, rng: random.Random, first: int) -> Iterator[Step]:
        """Yield random steps for ever, with puts from number `first` on."""
        while True:
            kind = rng.choices([*_KINDS], _KINDS.values())[0]
            if kind == "put":
                yield {"do": kind, "n": first} | ({} if self.ordered else {"priority": rng.choice((0, 0, 1, 5, 9))})
                first += 1
            elif kind in ("ack", "nack", "release") and self.tasks:
                delay = {} if kind == "ack" else {"delay": rng.choice((0, 1, 5))}
                yield {"do": kind, "n": rng.choice([*self.tasks])} | delay
            elif kind == "advance":
                yield {"do": kind, "seconds": rng.choice((0.5, 2, 2, 7, 21))}
            else:
                yield {"do": "get"}


def work(path: Path, pipe: int, model: Model, seed: int) -> None:
    """Work until somebody stops it."""

    def say(said: Step) -> None:
        os.write(pipe, json.dumps(said).encode() + b"\n")

    say({"do": "open"})
    here = Work(path, model.now_ms, model.ordered)
    say({"answer": {}})
    for step in here.steps(random.Random(seed), max(model.items, default=-1) + 1_000):
        say(step)
        say({"answer": here.do(step)})


# -- the model, in the parent -----------------------------------------------------------------------------------------


class State(NamedTuple):
    kind: str
    """absent, ready, failed, given, leased or done"""
    attempt: int = 1
    """Number of its present or next delivery."""
    at_ms: int = 0
    """Time at which a failed one, or one that was given back, is ready, or a lease ends."""


_GONE = ("absent", "done")


@dataclass
class Item:
    n: int
    priority: int
    states: set[State] = field(default_factory=lambda: {State("ready")})
    loose: bool = False

    def leave(self, fits: Callable[[State], bool], answer: str) -> None:
        """Leave the states that fit the answer of the queue."""
        assert self.loose or any(map(fits, self.states)), f"{answer}, but item {self.n} is {sorted(self.states)}"
        self.states = {state for state in self.states if fits(state)} or self.states


@dataclass
class Model:
    ordered: bool
    now_ms: int = 1_700_000_000_000
    items: dict[int, Item] = field(default_factory=dict)
    step: Step | None = None
    """Step without an answer."""
    steps: Counter[str] = field(default_factory=Counter)

    def hear(self, said: Step) -> None:
        """Take in a step, or its answer."""
        if "do" in said:
            self.step = said
            self.steps[said["do"]] += 1
            self.now_ms += round(1000 * said.get("seconds", 0))
        else:
            step, self.step = self.step, None
            assert step is not None
            self._done(step, said["answer"])

    def _done(self, step: Step, answer: Step) -> None:
        given = {name: value for name, value in step.items() if name != "do"}
        getattr(self, step["do"])(answer, **given)
        for item in self.items.values():
            item.states = set(map(self._now, item.states))

    def _now(self, state: State) -> State:
        """Return a state at the present time."""
        if state.kind not in ("failed", "given", "leased") or state.at_ms > self.now_ms:
            return state
        return State("ready", state.attempt + (state.kind == "leased"))

    def open(self, answer: Step) -> None:
        """All that was leased is ready again."""

    def advance(self, answer: Step, seconds: float) -> None:
        """Time has passed when the step was said."""

    def put(self, answer: Step, n: int, priority: int = 0) -> None:
        self.items[n] = Item(n, priority)

    def get(self, answer: Step) -> None:
        n, states = answer["n"], [state for item in self.items.values() for state in item.states]
        blocked = self.ordered and any(state.kind in ("leased", "failed", "given") for state in states)
        for item in self.items.values():
            if (n is None and not blocked) or (n is not None and item.priority > self.items[n].priority):
                item.leave(lambda state: state.kind != "ready", f"{n} was found")
        if n is not None:
            item = self.items[n]
            item.leave(lambda state: state[:2] == ("ready", answer["attempt"]), f"it was found as {answer}")
            item.states = {State("leased", answer["attempt"], self.now_ms + _VISIBLE_MS)}

    def ack(self, answer: Step, n: int) -> None:
        self.items[n].states = {State("done")}

    def nack(self, answer: Step, n: int, delay: int) -> None:
        self._return(n, delay, "failed", 1)

    def release(self, answer: Step, n: int, delay: int) -> None:
        self._return(n, delay, "given", 0)

    def _return(self, n: int, delay: int, kind: str, more: int) -> None:
        item, at_ms = self.items[n], self.now_ms + 1000 * delay
        item.states = {State(kind, state.attempt + more, at_ms) for state in item.states}

    def killed(self) -> None:
        """Add the states that the step under way may have made. Then end all leases."""
        step, self.step = self.step or {"do": "get"}, None
        kind, n = step["do"], step.get("n", -1)
        for item in self.items.values():
            # The copy for the next attempt may be there twice. Nothing is copied in order, or for one given back.
            moves = any(s.kind in ("leased", "failed") and s.at_ms <= self.now_ms for s in item.states)
            item.loose |= not self.ordered and kind in ("advance", "open") and moves
        if kind == "put":
            self._done(step, {})
            self.items[n].states.add(State("absent"))
        elif kind in ("ack", "nack", "release"):
            before = self.items[n].states
            self._done(step, {})
            self.items[n].states |= before
            self.items[n].loose |= not self.ordered and kind == "nack" and step["delay"] == 0
        for item in self.items.values():
            if kind == "get":  # it may have been on its way
                ready = {state for state in item.states if state.kind == "ready"}
                item.states |= {State("leased", state.attempt, self.now_ms) for state in ready}
            # They are copied by the next open, which makes them ready.
            ended = {state for state in item.states if state.kind == "leased"}
            item.states = item.states - ended | {State("leased", state.attempt, self.now_ms) for state in ended}


# -- the campaign -----------------------------------------------------------------------------------------------------


def one_round(path: Path, model: Model, rng: random.Random) -> None:
    """Let a child work, and kill it."""
    seed, last, pending = rng.getrandbits(32), rng.choice((rng.randrange(1, 4), *[rng.randrange(4, 300)] * 3)), b""
    heard_steps = 0

    def heard(data: bytes) -> bool:
        nonlocal pending, heard_steps
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            model.hear(json.loads(line))
            heard_steps += 1
        return heard_steps >= last

    killed_child(lambda pipe: work(path, pipe, model, seed), heard, rng.randrange(4_000))
    model.killed()


def drain(path: Path, model: Model) -> None:
    """Take all that is left."""
    here = Work(path, model.now_ms, model.ordered)

    def do(step: Step) -> Step:
        model.hear(step)
        answer = here.do(step)
        model.hear({"answer": answer})
        return answer

    try:
        model.hear({"do": "open"})
        model.hear({"answer": {}})
        for _ in range(12):
            while (n := do({"do": "get"})["n"]) is not None:
                do({"do": "ack", "n": n})
            do({"do": "advance", "seconds": 2})
        assert here.queue.qsize() == 0
        assert len(here.queue.dead_letters) == 0
    finally:
        here.store.close()


@pytest.mark.parametrize("ordered", [False, True], ids=["priorities", "ordered"])
def test_killed_queue_keeps_priorities_attempts_and_delays(tmp_path: Path, ordered: bool) -> None:
    rng, model = random.Random(f"{_SEED} {ordered}"), Model(ordered)
    for _ in range(_ROUNDS):
        one_round(tmp_path / "store", model, rng)
    drain(tmp_path / "store", model)

    for item in model.items.values():
        assert item.loose or {state.kind for state in item.states} <= {*_GONE}, f"it was never delivered: {item}"
    assert sum(item.loose for item in model.items.values()) <= len(model.items) / 4
    assert set(model.steps) == {"open", *_KINDS}
    with open_in("r", tmp_path / "store") as store:
        assert list(store.verify()) == []
