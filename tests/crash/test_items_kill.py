"""All verbs of a queue, and kill -9 among them, against a model that is written apart.

A child works on the queue, with a clock that it moves itself, and says each step before and after it. The parent kills
it at any time, and starts another on the directory, at the time that the last one had. The model knows every state that
an item may be in: one, unless a kill has left a step open. Each answer of the queue must fit one of them, and leaves
those that it fits. So does a look at all items, the first step of each child. An item of which a kill may have made two
copies is `loose`: its answers are not checked, until it is cancelled or purged, or a look finds one copy.

`make items N=500` runs so many rounds. MQSTORE_ITEM_SEED runs others.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import mqstore
from mqstore import QueueEmpty, RetryPolicy, SimulatedClock, StoreConfig
from mqstore.broker.pop.poplog import journal
from mqstore.errors import ConfigError
from tests.children import killed_child
from tests.client.support import advance, settle
from tests.log.support import open_in

_ROUNDS = int(os.environ.get("MQSTORE_CAMPAIGN_ROUNDS", "12"))
_SEED = os.environ.get("MQSTORE_ITEM_SEED", "20261129")
_VISIBLE_MS, _UNIQUE_FOR_MS = 20_000, 15_000
_REPEATS_MS = 2_000
"""The timer may deliver a message again after a kill if it did so in this time before."""
_KEYS = ("key-a", "key-b")
_STATES: Any = ("ready", "leased", "retry", "delayed", "dead")
_HELD = {"ack": 18, "nack": 7, "reject": 3, "release": 8, "progress": 3}
"""Steps with a leased item, and how often."""
_KINDS = {"put": 32, "get": 28, **_HELD, "cancel": 9, "purge": 2, "advance": 6, "look": 3}

Step = dict[str, Any]


# -- the queue, in the child ------------------------------------------------------------------------------------------


class Work:
    """A queue, and steps on it. The child's copy of the model says which can be done."""

    def __init__(self, path: Path, model: Model) -> None:
        self.model, self.clock = model, SimulatedClock(model.now_ms)
        config = StoreConfig(clock=self.clock, segment_bytes=1 << 18, index_slots=64, index_entries=512)
        self.store = mqstore.open(path, config=config)
        options: Any = {"ordered": model.ordered, "visibility": _VISIBLE_MS / 1000, "dead_letter_expired": True}
        self.queue = self.store.queue("jobs", codec=mqstore.JSON, retry=RetryPolicy(None, [3]), **options)
        settle(self.store.broker, self.clock, ())
        self.tasks: dict[int, Any] = {}

    def do(self, step: Step, say: Callable[[Step], object]) -> Step:
        """Do a step, and return the queue's answer. Both are said, and checked here, too."""
        for tell in (say, self.model.hear):
            tell(step)
        answer: Step = getattr(self, step["do"])(**_given(step))
        settle(self.store.broker, self.clock, ())
        for tell in (say, self.model.hear):
            tell({"answer": answer})
        return answer

    def put(self, n: int, **options: Any) -> Step:
        receipt = self.queue.put(n, **options)
        return {"n": int(self.store.broker.message_at(receipt).body), "id": receipt.id}

    def get(self) -> Step:
        try:
            task = self.queue.get(block=False)
        except QueueEmpty:
            return {"n": None}
        self.tasks[task.value] = task
        return {"n": task.value, "id": task.message.unique_key, "attempt": task.attempt}

    def _settle(self, verb: str, n: int, *given: Any) -> Step:
        getattr(self.tasks.pop(n), verb)(*given)
        return {}

    def ack(self, n: int) -> Step:
        return self._settle("ack", n)

    def nack(self, n: int, delay: int) -> Step:
        return self._settle("nack", n, delay)

    def reject(self, n: int) -> Step:
        return self._settle("reject", n, "no")

    def release(self, n: int, delay: int) -> Step:
        return self._settle("release", n, delay)

    def progress(self, n: int, text: str) -> Step:
        self.tasks[n].progress(text)
        return {}

    def cancel(self, n: int) -> Step:
        return {"done": self.queue.cancel(self.model.items[n].id or "")}

    def purge(self, state: Any) -> Step:
        held = self.held() if state in (None, "leased") else []
        try:
            count = self.queue.purge(state)
        except ConfigError:
            return {"count": None}
        for n in held:
            self.tasks.pop(n).ack()
        return {"count": count}

    def advance(self, seconds: float) -> Step:
        advance(self.store.broker, self.clock, (), seconds)
        return {}

    def look(self) -> Step:
        def rows(items: Any) -> list[Any]:
            return sorted([i.value, i.state, i.attempt, round(1000 * (i.until or 0)), i.progress] for i in items)

        number = self.model.steps["look"]  # all keys and states each time would take twice as long
        key, state = _KEYS[number % len(_KEYS)], _STATES[number % len(_STATES)]
        found, states = {key: rows(self.queue.find(key))}, {state: rows(self.queue.items(state))}
        counts, size = self.queue.counts(), self.queue.qsize()
        return {"items": rows(self.queue.items()), "states": states, "counts": counts, "size": size, "keys": found}

    def held(self) -> list[int]:
        """Return the items that are leased here."""
        items = self.model.items
        return [n for n in self.tasks if n in items and {state.kind for state in items[n].states} == {"leased"}]

    def steps(self, rng: random.Random, first: int) -> Iterator[Step]:
        """Yield random steps for ever, with puts from number `first` on."""
        yield {"do": "look"}
        while True:
            kind = rng.choices([*_KINDS], _KINDS.values())[0]
            known = [n for n, item in self.model.items.items() if item.id]
            held = self.held()
            if kind == "put":
                yield {"do": kind, "n": first, **_options(rng, self.model.ordered)}
                first += 1
            elif kind in _HELD and held:
                delay = {"delay": rng.choice((0, 1, 5))} if kind in ("nack", "release") else {}
                text = {"text": f"{first} %"} if kind == "progress" else {}
                yield {"do": kind, "n": rng.choice(held), **delay, **text}
            elif kind == "cancel" and known:
                now_ms, items = self.model.now_ms, self.model.items
                just = [n for n in known if now_ms - 1_000 < items[n].due_ms <= now_ms]  # the timer may not know yet
                yield {"do": kind, "n": rng.choice(just or known[-12:])}
            elif kind == "purge":
                yield {"do": kind, "state": rng.choice((None, "ready", "leased", "retry", "delayed", "dead", "dead"))}
            elif kind == "advance":
                yield {"do": kind, "seconds": rng.choice((0.5, 1, 1, 2, 7, 21))}
            else:
                yield {"do": "look" if kind == "look" else "get"}


def _given(step: Step) -> Step:
    return {name: value for name, value in step.items() if name != "do"}


def _options(rng: random.Random, ordered: bool) -> Step:
    options: Step = {} if ordered else {"priority": rng.choice((0, 0, 0, 1, 5, 9))}
    if rng.random() < 0.4:
        options["unique"] = f"name {rng.randrange(6)}"
        if rng.random() < 0.3:
            options["unique_for"] = _UNIQUE_FOR_MS // 1000
    if rng.random() < 0.2:
        options["key"] = rng.choice(_KEYS)
    if rng.random() < 0.25:
        options["delay"] = rng.choice((1, 3, 10))
    if rng.random() < 0.2:
        options["expires"] = rng.choice((4, 12)) + options.get("delay", 0)
    return options


def work(path: Path, pipe: int, model: Model, seed: int) -> None:
    """Work until somebody stops it."""

    def say(said: Step) -> None:
        os.write(pipe, json.dumps(said).encode() + b"\n")

    first = model.last + 1_000
    say({"do": "open"})
    model.hear({"do": "open"})
    here = Work(path, model)
    say({"answer": {}})
    model.hear({"answer": {}})
    for step in here.steps(random.Random(seed), first):
        here.do(step, say)


# -- the model, in the parent -----------------------------------------------------------------------------------------


class State(NamedTuple):
    kind: str
    """absent, ready, delayed, leased, retry, done or dead"""
    attempt: int = 1
    """Number of its present or next delivery."""
    at_ms: int = 0
    """Time at which a lease ends, or the item becomes ready."""
    begun: bool = False
    """It was delivered before, so it cannot expire."""


_GONE = ("absent", "done", "dead")
_DONE, _DEAD = State("done"), State("dead")


@dataclass
class Item:
    n: int
    put_ms: int
    states: set[State]
    name: str | None = None
    key: str | None = None
    priority: int = 0
    expires_ms: float = inf
    due_ms: float = -inf
    id: str | None = None
    text: str = ""
    loose: bool = False
    letters: int = 0
    """Number of its dead letters that kills may have added."""

    def leave(self, fits: Callable[[State], bool], answer: str) -> None:
        """Leave the states that fit the answer of the queue."""
        assert self.loose or any(map(fits, self.states)), f"{answer}, but item {self.n} is {sorted(self.states)}"
        self.states = {state for state in self.states if fits(state)} or self.states

    def end(self) -> None:
        """It was removed with all its copies."""
        self.states, self.loose, self.due_ms = {_DONE}, False, -inf

    def rows(self, state: State) -> list[Any]:
        """Return what a look shows of it, without dead letters."""
        text = self.text if state.kind == "leased" else ""
        at_ms = state.at_ms if state.kind in ("delayed", "leased", "retry") else 0
        return [] if state.kind in _GONE else [[self.n, state.kind, state.attempt, at_ms, text]]


@dataclass
class Model:
    ordered: bool
    now_ms: int = 1_700_000_000_000
    items: dict[int, Item] = field(default_factory=dict)
    opened_ms: int = 0
    last: int = -1
    """Greatest number of an item."""
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
        getattr(self, step["do"])(answer, **_given(step))
        for item in self.items.values():
            item.states = set(map(self._now, item.states))

    def _now(self, state: State) -> State:
        """Return a state at the present time."""
        if state.kind not in ("delayed", "leased", "retry") or state.at_ms > self.now_ms:
            return state
        return State("ready", state.attempt + (state.kind == "leased"), begun=state.begun)

    def is_over(self, item: Item, state: State) -> bool:
        """Return True if the item has expired, and a get may find that."""
        return state.kind == "ready" and not state.begun and item.expires_ms <= self.now_ms

    def is_free(self, item: Item, state: State) -> bool:
        """Return True if a get may return the item."""
        return state.kind == "ready" and not self.is_over(item, state)

    def open(self, answer: Step) -> None:
        self.opened_ms = self.now_ms

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

    def new(
        self,
        n: int,
        delay: int = 0,
        expires: float = inf,
        unique: str | None = None,
        key: str | None = None,
        priority: int = 0,
        **_: Any,
    ) -> Item:
        self.last, due_ms = n, self.now_ms + 1000 * delay
        states = {State("delayed", at_ms=due_ms) if delay else State("ready")}
        times = self.now_ms + 1000 * expires, due_ms if delay else -inf
        return Item(n, self.now_ms, states, unique, key, priority, *times)

    def get(self, answer: Step) -> None:
        n, item = answer["n"], self.items.get(answer["n"])
        assert (n is None) == (item is None), f"item {n} is forgotten"
        blocked = self.ordered and any(
            state.begun and state.kind in ("delayed", "leased", "retry")
            for each in self.items.values()
            for state in each.states
        )

        def passed(other: Item, state: State) -> bool:
            """Return True if the answer is wrong for another item in this state."""
            if item is None:
                return not blocked and self.is_free(other, state)
            if self.ordered and state.begun and state.kind not in _GONE:
                return True
            first = (self.ordered or not state.begun) and other.n < n and other.due_ms == item.due_ms == -inf
            is_new = any(not each.begun for each in item.states)
            first &= other.priority == item.priority and is_new
            return self.is_free(other, state) and (other.priority > item.priority or first)

        for other in self.items.values():
            over = {state for state in other.states if self.is_over(other, state)}
            if over:  # unless it was not its turn
                other.states = (other.states if n is not None or blocked else other.states - over) | {_DEAD}
            if other is not item:
                other.leave(lambda state, other=other: not passed(other, state), f"{n} was found")  # type: ignore[misc]
        if item is not None:
            assert item.id in (None, answer["id"])
            item.id, item.text, attempt = answer["id"], "", answer["attempt"]
            item.leave(
                lambda state: self.is_free(item, state) and state.attempt == attempt, f"it was found as {answer}"
            )
            item.states = {State("leased", attempt, self.now_ms + _VISIBLE_MS, begun=True)}

    def ack(self, answer: Step, n: int) -> None:
        self.items[n].states = {_DONE}

    def reject(self, answer: Step, n: int) -> None:
        self.items[n].states = {_DEAD}

    def nack(self, answer: Step, n: int, delay: int) -> None:
        self._return(n, delay, "retry", 1)

    def release(self, answer: Step, n: int, delay: int) -> None:
        self._return(n, delay, "delayed", 0)

    def progress(self, answer: Step, n: int, text: str) -> None:
        self.items[n].text = text
        self._return(n, _VISIBLE_MS // 1000, "leased", 0)

    def _return(self, n: int, delay: int, kind: str, more: int) -> None:
        item, at_ms = self.items[n], self.now_ms + 1000 * delay
        item.states = {State(kind, state.attempt + more, at_ms, begun=True) for state in item.states}

    def cancel(self, answer: Step, n: int) -> None:
        item = self.items[n]

        def waits(state: State) -> bool:
            return state.kind in ("ready", "delayed", "retry")

        item.leave(lambda state: waits(state) == answer["done"], f"it was cancelled: {answer['done']}")
        if answer["done"]:
            item.end()

    def purge(self, answer: Step, state: str | None) -> None:
        if answer["count"] is None:
            assert (self.ordered, state) == (True, "ready")
            assert any(each.begun for item in self.items.values() for each in item.states if each.kind not in _GONE)
            return
        least, most, loose = 0, 0, any(item.loose for item in self.items.values())
        for item in self.items.values():
            chosen = self._chosen(item, state)
            more = item.letters if state == "dead" else 0
            least += chosen == item.states
            most += bool(chosen) + more
            if state is None and chosen | {_DONE} >= item.states:
                item.end()
            elif chosen:
                item.states = item.states - chosen | {_DONE}
            item.letters -= more
        assert loose or least <= answer["count"] <= most, f"purge {state}: {answer}, not {least} to {most}"

    @staticmethod
    def _chosen(item: Item, wanted: str | None) -> set[State]:
        return {s for s in item.states if s.kind == wanted or (wanted is None and s.kind not in _GONE)}

    def look(self, answer: Step) -> None:
        rows, items = answer["items"], self.items
        counts, seen = Counter(answer["counts"]), Counter(row[1] for row in rows)
        assert all(found == [row for row in rows if row[1] == state] for state, found in answer["states"].items())
        least = seen["ready"] + seen["leased"] + seen["retry"]
        assert least <= answer["size"] <= least + seen["delayed"]
        if self.now_ms < self.opened_ms + 1_000:  # cancelled ones that were due in this second may count
            counts["delayed"] = max(counts["delayed"], seen["delayed"])
        assert counts == seen
        unknown = {row[0] for row in rows} - items.keys()
        assert not unknown, f"{unknown} came back"
        for key, found in answer["keys"].items():
            assert found == [row for row in rows if items[row[0]].key == key]
        shown: dict[int, list[Any]] = {n: [] for n in items}
        for row in rows:
            shown[row[0]].append(row)
        for item in items.values():
            alive = [row for row in shown[item.n] if row[1] != "dead"]
            letters = len(shown[item.n]) - len(alive)
            if item.loose:
                assert shown[item.n] or any(s.kind in _GONE for s in item.states), f"{item} is lost"
                if len(alive) > 1:
                    continue
                gone = {s for s in item.states if s.kind in ("absent", "done")} or {_DONE}
                item.loose, item.letters, item.states = False, letters, {_DEAD} if letters else gone
                if alive:
                    [[_, *state, item.text]] = alive
                    item.states = {State(*state, begun=begun) for begun in (True, state[1] > 1)}
            item.leave(
                lambda s, item=item, alive=alive, letters=letters: (  # type: ignore[misc]
                    alive == item.rows(s) and (s == _DEAD) <= letters <= (s == _DEAD) + item.letters
                ),
                f"a look shows {shown[item.n]}",
            )
            item.letters = letters - (_DEAD in item.states)
        old = self.now_ms - 4 * _UNIQUE_FOR_MS
        for n in [n for n, item in items.items() if not shown[n] and not item.loose and item.put_ms < old]:
            del items[n]

    def killed(self) -> None:
        """Add the states that the step under way may have made. Then end all leases."""
        step, self.step = self.step or {"do": "get"}, None
        kind, n, since_ms = step["do"], step.get("n", -1), self.now_ms - 1000 * step.get("seconds", 0)
        for item in self.items.values():
            # The copy for the next attempt may be there twice. Nothing is copied in order, or for one given back.
            moves = any(s.kind in ("leased", "retry") and s.at_ms <= self.now_ms for s in item.states)
            item.loose |= not self.ordered and kind in ("advance", "open") and moves
            item.loose |= since_ms - _REPEATS_MS < item.due_ms <= self.now_ms
        if kind == "put":
            self.items[n] = self.new(**_given(step))
            self.items[n].states.add(State("absent"))
        elif kind in _HELD:
            before, item = self.items[n].states, self.items[n]
            getattr(self, kind)({}, **_given(step))
            item.states |= before
            item.letters += kind == "reject"
            item.loose |= not self.ordered and kind == "nack" and step["delay"] == 0
        for item in self.items.values():
            if kind == "get":  # it may have been on its way
                if any(self.is_over(item, state) for state in item.states):
                    item.states |= {_DEAD}
                    item.letters += 1
                item.states |= {State("leased", s.attempt, 0, True) for s in item.states if self.is_free(item, s)}
            elif (kind == "cancel" and item.n == n) or kind == "purge":
                chosen = self._chosen(item, step.get("state"))
                item.states |= {_DONE for state in chosen if kind == "purge" or state.kind != "leased"}
        self.closed()

    def closed(self) -> None:
        """End all leases. Their items are copied by the next open, which makes them ready."""
        for item in self.items.values():
            item.states = {s._replace(at_ms=self.now_ms) if s.kind == "leased" else s for s in item.states}


# -- the campaign -----------------------------------------------------------------------------------------------------


def one_round(path: Path, model: Model, rng: random.Random) -> None:
    """Let a child work, and kill it."""
    seed, last, pending = rng.getrandbits(32), rng.choice((rng.randrange(1, 6), *[rng.randrange(4, 300)] * 2)), b""
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


def opened(path: Path, model: Model) -> Work:
    """Open the queue in this process."""
    model.hear({"do": "open"})
    here = Work(path, model)
    model.hear({"answer": {}})
    return here


def drain(path: Path, model: Model) -> None:
    """Take all that is left."""
    here = opened(path, model)

    def do(kind: str, **given: Any) -> Step:
        return here.do({"do": kind, **given}, lambda said: None)

    try:
        do("look")
        for _ in range(30):
            while (n := do("get")["n"]) is not None:
                do("ack", n=n)
            do("advance", seconds=2)
        do("purge", state="dead")
        assert do("look")["items"] == []
        assert here.queue.qsize() == 0
    finally:
        here.store.close()


@pytest.mark.parametrize("ordered", [False, True], ids=["standard", "ordered"])
@pytest.mark.parametrize("seed", range(max(2, _ROUNDS // 20)))
def test_queue_is_as_the_model(tmp_path: Path, seed: int, ordered: bool) -> None:
    """Nobody kills it, so the model knows the state of each item."""
    rng, model = random.Random(f"{_SEED} {seed}"), Model(ordered)
    for _ in range(4):
        here = opened(tmp_path / "store", model)
        for step in islice(here.steps(rng, model.last + 1), 80):
            here.do(step, lambda said: None)
            here.do({"do": "look"}, lambda said: None)
        here.store.close()
        model.closed()
        assert all(len(item.states) == 1 for item in model.items.values() if item.expires_ms == inf)
    drain(tmp_path / "store", model)


@pytest.mark.parametrize("kind", ["standard", "ordered", "small journal"])
def test_killed_queue_is_as_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    if kind == "small journal":
        monkeypatch.setattr(journal, "_FILE_BYTES", 1024)
    rng, model = random.Random(f"{_SEED} {kind}"), Model(kind == "ordered")
    loose = 0
    for _ in range(_ROUNDS):
        one_round(tmp_path / "store", model, rng)
        loose += sum(item.loose for item in model.items.values())
    drain(tmp_path / "store", model)

    assert loose <= model.steps["put"] / 2  # the model still decides most
    assert set(model.steps) == {"open", *_KINDS}
    with open_in("r", tmp_path / "store") as store:
        assert list(store.verify()) == []
