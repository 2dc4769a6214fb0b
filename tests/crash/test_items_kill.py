"""kill -9 among unique, cancelled, expiring, delayed and failing items, against a model that is written apart.

A child works on the queue, with a clock that it moves itself, and says each step before and after it. The parent kills
it at any time, and starts another on the directory, at the time that the last one had. The model knows every state that
an item may be in: one, unless a kill has left a step open. Each answer of the queue must fit one of them, and leaves
those that it fits. An item of which a kill may have made two copies is `loose`: its answers are not checked, until it
is cancelled.

`make items N=500` runs so many rounds. MQSTORE_ITEM_SEED runs others.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
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
_VISIBLE_MS, _UNIQUE_FOR_MS = 20_000, 15_000
_REPEATS_MS = 2_000
"""The timer may deliver a message again after a kill if it did so in this time before."""
_KINDS = {"put": 34, "get": 30, "ack": 16, "nack": 8, "cancel": 12, "advance": 7}
"""Steps, and how often."""

Step = dict[str, Any]


# -- the queue, in the child ------------------------------------------------------------------------------------------


class Work:
    """A queue, and steps on it."""

    def __init__(self, path: Path, now_ms: int, ordered: bool) -> None:
        self.clock = SimulatedClock(now_ms)
        config = StoreConfig(clock=self.clock, segment_bytes=1 << 18, index_slots=64, index_entries=512)
        self.store = mqstore.open(path, config=config)
        options: Any = {"ordered": ordered, "visibility": _VISIBLE_MS / 1000, "dead_letter_expired": True}
        self.queue = self.store.queue("jobs", codec=mqstore.JSON, retry=RetryPolicy(None, [3]), **options)
        settle(self.store.broker, self.clock, ())
        self.tasks: dict[int, tuple[Any, int]] = {}
        """Leased tasks, and when their leases end."""
        self.ids: dict[int, str] = {}

    def do(self, step: Step) -> Step:
        """Do a step, and return the queue's answer."""
        found: Step = getattr(self, step["do"])(**{name: value for name, value in step.items() if name != "do"})
        return found

    def put(self, n: int, **options: Any) -> Step:
        receipt = self.queue.put(n, **options)
        stored = int(self.store.broker.message_at(receipt).body)
        self.ids[stored] = receipt.id
        return {"n": stored, "id": receipt.id}

    def get(self) -> Step:
        try:
            task = self.queue.get(block=False)
        except QueueEmpty:
            return {"n": None}
        self.tasks[task.value] = task, self.clock.now_ms() + _VISIBLE_MS
        return {"n": task.value, "id": task.message.unique_key, "attempt": task.attempt}

    def ack(self, n: int) -> Step:
        self.tasks.pop(n)[0].ack()
        return {}

    def nack(self, n: int, delay: int) -> Step:
        self.tasks.pop(n)[0].nack(delay)
        return {}

    def cancel(self, n: int) -> Step:
        return {"done": self.queue.cancel(self.ids[n])}

    def advance(self, seconds: float) -> Step:
        advance(self.store.broker, self.clock, (), seconds)
        self.tasks = {n: held for n, held in self.tasks.items() if held[1] > self.clock.now_ms()}
        return {}

    def steps(self, rng: random.Random, first: int) -> Iterator[Step]:
        """Yield random steps for ever, with puts from number `first` on."""
        while True:
            kind = rng.choices([*_KINDS], _KINDS.values())[0]
            if kind == "put":
                yield {"do": kind, "n": first, **_options(rng)}
                first += 1
            elif kind == "ack" and self.tasks:
                yield {"do": kind, "n": rng.choice([*self.tasks])}
            elif kind == "nack" and self.tasks:
                yield {"do": kind, "n": rng.choice([*self.tasks]), "delay": rng.choice((1, 5))}
            elif kind == "cancel" and self.ids:
                yield {"do": kind, "n": rng.choice([*self.ids][-12:])}
            elif kind == "advance":
                yield {"do": kind, "seconds": rng.choice((0.5, 2, 2, 7))}
            else:
                yield {"do": "get"}


def _options(rng: random.Random) -> Step:
    options: Step = {}
    if rng.random() < 0.5:
        options["unique"] = f"name {rng.randrange(6)}"
        if rng.random() < 0.3:
            options["unique_for"] = _UNIQUE_FOR_MS // 1000
    if rng.random() < 0.25:
        options["delay"] = rng.choice((1, 3, 10))
    if rng.random() < 0.25:
        options["expires"] = rng.choice((4, 12)) + options.get("delay", 0)
    return options


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
    """absent, ready, delayed, leased, retry, done or dead"""
    at_ms: int = 0
    """Time at which a delayed or failed one is due, or a lease ends."""
    begun: bool = False


_GONE = ("absent", "done", "dead")
_DEAD = State("dead")
_AGAIN = State("ready", begun=True)


@dataclass
class Item:
    n: int
    put_ms: int
    states: set[State]
    name: str | None = None
    expires_ms: float = inf
    due_ms: float = -inf
    id: str | None = None
    loose: bool = False
    cancelled: bool = False
    letters: int = 0
    """Number of its dead letters that kills may have repeated."""

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
    returning: set[int] = field(default_factory=set)
    """Items that were leased at the last kill."""

    def is_free(self, item: Item, state: State) -> bool:
        """Return True if a get may return the item."""
        is_due = state.kind == "ready" or (state.kind in ("delayed", "retry", "leased") and state.at_ms <= self.now_ms)
        return is_due and (state.begun or item.expires_ms > self.now_ms)

    def is_over(self, item: Item, state: State) -> bool:
        """Return True if the item has expired, and a get may find that."""
        is_due = state.kind == "ready" or (state.kind == "delayed" and state.at_ms <= self.now_ms)
        return is_due and not state.begun and item.expires_ms <= self.now_ms

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

    def open(self, answer: Step) -> None:
        self.returning = set()

    def advance(self, answer: Step, seconds: float) -> None:
        """Time has passed when the step was said."""

    def put(self, answer: Step, n: int, **options: Any) -> None:
        item, lasts = self.new(n, **options), "unique_for" in options
        same = [each for each in self.items.values() if item.name is not None and each.name == item.name]
        if answer["n"] == n:  # then none of the same name may be there
            for each in same:
                if lasts and each.put_ms > self.now_ms - _UNIQUE_FOR_MS:
                    each.leave(lambda state: state.kind == "absent", f"put {n} was stored for a time")
                elif not lasts:
                    each.leave(lambda state: state.kind in _GONE, f"put {n} was stored")
            item.id = answer["id"]
            self.items[n] = item
            return
        first = self.items[answer["n"]]
        assert first.id in (None, answer["id"])
        assert first in same
        first.id = answer["id"]
        if lasts:
            first.leave(lambda state: state.kind != "absent", f"put {n} returned it")
            assert first.loose or first.put_ms > self.now_ms - _UNIQUE_FOR_MS, f"the time of {first} was over for {n}"
            newer = [each for each in same if each.put_ms > first.put_ms and State("absent") not in each.states]
            assert not newer, f"put {n} returned {first}, which is older than {newer}"
        else:
            first.leave(lambda state: state.kind not in _GONE, f"put {n} returned it")

    def new(self, n: int, delay: int = 0, expires: float = inf, unique: str | None = None, **_: Any) -> Item:
        due_ms = self.now_ms + 1000 * delay
        states = {State("delayed", due_ms) if delay else State("ready")}
        return Item(n, self.now_ms, states, unique, self.now_ms + 1000 * expires, due_ms if delay else -inf)

    def get(self, answer: Step) -> None:
        n = answer["n"]
        blocked = self.ordered and any(
            s.kind in ("leased", "retry") for each in self.items.values() for s in each.states
        )
        for item in self.items.values():
            over = {state for state in item.states if self.is_over(item, state)}
            if over and (n is not None or blocked):  # perhaps it was not its turn
                item.states |= {_DEAD}
            elif over:
                item.states = item.states - over | {_DEAD}
            if n is None and not blocked:
                item.leave(lambda state, item=item: not self.is_free(item, state), "nothing was found")  # type: ignore[misc]
        if n is None:
            return
        item = self.items[n]
        assert item.id in (None, answer["id"])
        item.id = answer["id"]
        item.leave(lambda state: self.is_free(item, state) and state.begun == (answer["attempt"] > 1), "it was found")
        item.states = {State("leased", self.now_ms + _VISIBLE_MS, begun=True)}

    def ack(self, answer: Step, n: int) -> None:
        self.items[n].states = {State("done")}

    def nack(self, answer: Step, n: int, delay: int) -> None:
        self.items[n].states = {State("retry", self.now_ms + 1000 * delay, begun=True)}

    def cancel(self, answer: Step, n: int) -> None:
        item = self.items[n]

        def waits(state: State) -> bool:
            return state.kind not in (*_GONE, "leased")

        def may_be_held(state: State) -> bool:  # a lease that has ended makes the item ready, if it was returned
            return state.kind == "leased" and state.at_ms <= self.now_ms

        if answer["done"]:
            item.leave(lambda state: waits(state) or may_be_held(state), "it was cancelled")
            item.states, item.loose, item.cancelled = {State("done")}, False, True
        else:
            item.leave(lambda state: not waits(state), "it was not cancelled")

    def killed(self) -> None:
        """Add the states that the step under way may have made. Then end all leases."""
        step, self.step = self.step or {"do": "get"}, None
        kind, n, since_ms = step["do"], step.get("n", -1), self.now_ms - 1000 * step.get("seconds", 0)
        if kind == "put":
            given = {name: value for name, value in step.items() if name != "do"}
            self.items[n] = self.new(**given)
            self.items[n].states.add(State("absent"))
        elif kind in ("ack", "nack"):
            before = self.items[n].states
            self._done(step, {})
            self.items[n].states |= before
        elif kind == "cancel" and any(state.kind not in _GONE for state in self.items[n].states):
            self.items[n].states.add(State("done"))
        for item in self.items.values():
            if kind == "get":
                free = any(self.is_free(item, state) for state in item.states)
                over = any(self.is_over(item, state) for state in item.states)
                item.states |= {_AGAIN} if free else set()
                item.states |= {_DEAD} if over else set()
                item.letters += over
            moves = {s for s in item.states if s.kind in ("leased", "retry") and s.at_ms <= self.now_ms}
            if not self.ordered and (
                (kind == "advance" and moves) or (kind == "open" and (moves or item.n in self.returning))
            ):
                item.loose = True
            if since_ms - _REPEATS_MS < item.due_ms <= self.now_ms and not item.cancelled:
                item.loose = True
            ends = {state for state in item.states if state.kind == "leased"}
            item.states = item.states - ends | {_AGAIN for _ in ends}
            if ends:
                self.returning.add(item.n)


# -- the campaign -----------------------------------------------------------------------------------------------------


def one_round(path: Path, model: Model, rng: random.Random) -> None:
    """Let a child work, and kill it."""
    seed, last, pending = rng.getrandbits(32), rng.choice((rng.randrange(1, 4), rng.randrange(4, 300))), b""
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


def drain(path: Path, model: Model) -> list[int]:
    """Take all that is left. Return the dead letters."""
    here = Work(path, model.now_ms, model.ordered)
    try:
        for _ in range(30):
            while True:
                model.hear({"do": "get"})
                answer = here.do({"do": "get"})
                model.hear({"answer": answer})
                if answer["n"] is None:
                    break
                model.hear({"do": "ack", "n": answer["n"]})
                model.hear({"answer": here.do({"do": "ack", "n": answer["n"]})})
            model.hear({"do": "advance", "seconds": 2})
            model.hear({"answer": here.do({"do": "advance", "seconds": 2})})
        assert here.queue.qsize() == 0
        return [int(letter.body) for letter in here.queue.dead_letters]
    finally:
        here.store.close()


@pytest.mark.parametrize("ordered", [False, True], ids=["standard", "ordered"])
def test_killed_queue_keeps_names_cancels_and_times(tmp_path: Path, ordered: bool) -> None:
    rng, model = random.Random(f"{_SEED} {ordered}"), Model(ordered)
    for _ in range(_ROUNDS):
        one_round(tmp_path / "store", model, rng)
    letters = Counter(drain(tmp_path / "store", model))

    for item in model.items.values():
        kinds = {state.kind for state in item.states}
        assert item.loose or kinds <= {*_GONE}, f"it was never delivered: {item}"
        if not item.loose:
            least = kinds == {"dead"}
            assert least <= letters[item.n] <= ("dead" in kinds) + item.letters, (
                f"{letters[item.n]} dead letters of {item}"
            )
    assert sum(item.loose for item in model.items.values()) <= len(model.items) / 4
    assert set(model.steps) == {"open", *_KINDS}
    with open_in("r", tmp_path / "store") as store:
        assert list(store.verify()) == []
