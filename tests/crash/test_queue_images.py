"""Power cuts under a queue with all its verbs (reliability#p14).

A seeded script puts items with names, priorities, delays and times of expiry, gets and settles them, cancels, purges,
is closed, is killed, and goes on. The first item with a priority comes at any time, and gives the topic ten queues.
Each seed cuts the power at a moment of one script, and asks of the image:

    nothing lost      what was on disk, and neither settled nor removed since, is there or is a dead letter
    nothing back      what was acknowledged, cancelled or purged, and flushed since, is not there
    names             a put with the name of an item that is there returns that one, another name is stored
    opened twice      a second opening finds the same items

Half of the scripts flush each call (`durability="flush"`), the others at times. `make crash N=100000` runs more;
MQSTORE_CRASH_SEED=n runs one.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import RetryPolicy, SimulatedClock, StoreConfig
from mqstore.broker.broker import Broker
from mqstore.errors import ConfigError
from mqstore.log.store import MessageStore
from tests.client.support import advance, settle
from tests.crash.campaign import Campaign
from tests.crash.recording import RecordingFileSystem, build_image
from tests.crash.support import if_new
from tests.log.support import Unsynced, kill, open_in

SIZES = {"segment_bytes": 16_384, "consumequeue_units": 16, "index_slots": 8, "index_entries": 32}
NAMES = [f"name {n}" for n in range(4)]


class Place:
    """A broker and its queue."""

    def __init__(self, path: Path, fs: Any, clock: SimulatedClock, ordered: bool, durability: Any = "append") -> None:
        config = StoreConfig(clock=clock, **if_new(path, **SIZES))
        self.clock = clock
        self.broker = Broker(MessageStore(path, config=config, durability=durability, fs=fs))
        options: Any = {"ordered": ordered, "dead_letter_expired": True, "retry": RetryPolicy(None, [1])}
        self.queue: Any = mqstore.Queue(self.broker, "jobs", codec=mqstore.JSON, **options)
        settle(self.broker, clock, ())

    def alive(self) -> dict[int, Any]:
        return {item.value[0]: item for item in self.queue.items() if item.state != "dead"}


class Script:
    """A run that was recorded. Marks: ("time", ms); ("put", numbers) on disk; ("ending", numbers) before a call that
    settles or removes them; ("gone", numbers) they are, on disk."""

    def __init__(self, seed: int, root: Path, fs: RecordingFileSystem) -> None:
        self.rng = random.Random(f"queue {seed}")
        self.root, self.fs, self.events = root, fs, fs.events
        self.ordered, self.clock = self.rng.random() < 0.3, SimulatedClock()
        self.durability = self.rng.choice(("flush", "append"))
        self.delayed: set[int] = set()
        """Items that were put with a delay: after a crash the timer may deliver those again that were done."""
        self.ids: dict[int, str] = {}
        self.gone: set[int] = set()
        self.held: dict[int, Any] = {}
        self.open()

    def open(self) -> None:
        self.place = Place(self.root, self.fs, self.clock, self.ordered, self.durability)
        self.held.clear()

    def run(self) -> Script:
        self.flush()
        steps = [*[self.put] * 8, *[self.get] * 5, *[self.settle] * 5, *[self.cancel] * 3, self.purge, self.wait]
        steps += [self.flush, self.restart]
        for _ in range(self.rng.randrange(30, 70)):
            self.rng.choice(steps)()
            settle(self.place.broker, self.clock, ())
            self.fs.mark(("time", self.clock.now_ms()))
            if self.durability == "flush":
                self.mark()
        self.fs.observe()
        kill(self.place.broker.store)
        return self

    def put(self) -> None:
        rng, number = self.rng, len(self.ids)
        options: dict[str, Any] = {} if self.ordered or rng.random() < 0.7 else {"priority": rng.choice((1, 5, 9))}
        if rng.random() < 0.4:
            options["unique"] = rng.choice(NAMES)
        if rng.random() < 0.3:
            options["delay"] = rng.choice((1, 5, 60))
        if rng.random() < 0.2:
            options["expires"] = 3 + options.get("delay", 0)
        body = [number, options.get("unique"), "x" * rng.choice((1, 50, 900))]
        receipt = self.place.queue.put(body, **options)
        if receipt.id not in self.ids.values():
            self.ids[number] = receipt.id
            self.delayed |= {number} & ({number} if "delay" in options else set())

    def get(self) -> None:
        for task in self.place.queue.get_many(self.rng.randrange(1, 3)):
            self.held[task.value[0]] = task

    def settle(self) -> None:
        if self.held:
            number = self.rng.choice([*self.held])
            task, verb = self.held.pop(number), self.rng.choice(("ack", "ack", "ack", "nack", "release", "reject"))
            if verb == "ack":
                self.end({number}, task.ack)
            else:
                getattr(task, verb)(*{"release": (self.rng.choice((0, 2)),)}.get(verb, ()))

    def end(self, numbers: set[int], call: Any) -> None:
        self.fs.mark(("ending", frozenset(numbers)))
        if call() is not False:
            self.gone |= numbers

    def cancel(self) -> None:
        if self.ids:
            number = self.rng.choice([*self.ids][-8:])
            self.end({number}, lambda: self.place.queue.cancel(self.ids[number]))

    def purge(self) -> None:
        state = self.rng.choice((None, "ready", "leased", "retry", "delayed"))
        found = {n for n, item in self.place.alive().items() if state in (None, item.state)}

        def call() -> bool:
            try:
                self.place.queue.purge(state)
            except ConfigError:
                return False
            self.held = {n: task for n, task in self.held.items() if n not in found}
            return True

        self.end(found, call)

    def wait(self) -> None:
        advance(self.place.broker, self.clock, (), self.rng.choice((1, 4, 20)))
        self.held.clear()  # some leases are over

    def flush(self) -> None:
        self.place.broker.sync()
        self.mark()

    def mark(self) -> None:
        self.fs.mark(("put", frozenset(self.ids)))
        self.fs.mark(("gone", frozenset(self.gone)))

    def restart(self) -> None:
        if self.rng.random() < 0.5:
            self.place.broker.close()
        else:
            self.fs.observe()
            kill(self.place.broker.store)
        self.open()
        self.mark()  # what a killed process left counts as durable from then on


def record(number: int, root: Path, fs: RecordingFileSystem) -> Script:
    return Script(number, root, fs).run()


CAMPAIGN = Campaign("test_queue_images.py", record, images=36, chunk=12, images_a_script=12)


def check_image(script: Script, rng: random.Random, image: Path) -> None:
    first = next(i for i, event in enumerate(script.events) if event.kind == "mark")
    moment = rng.randrange(first + 1, len(script.events) + 1)
    marks = build_image(script.events[:moment], rng, image, in_order=rng.random() < 0.3)
    clock = SimulatedClock(max((mark[1] for mark in marks if mark[0] == "time"), default=script.clock.now_ms()))
    kept, ending, gone = (
        set().union(*(mark[1] for mark in marks if mark[0] == kind)) for kind in ("put", "ending", "gone")
    )

    place = Place(image, Unsynced(), clock, script.ordered)
    found = place.alive()
    dead = {item.value[0] for item in place.queue.items("dead")}
    assert not kept - ending - set(found) - dead, f"{kept - ending - set(found) - dead} are lost"
    assert not (set(found) & gone) - script.delayed, f"{set(found) & gone} came back"
    kill(place.broker.store)
    place = Place(image, Unsynced(), clock, script.ordered)
    assert set(place.alive()) == set(found)

    taken = {item.value[1]: {i.id for i in found.values() if i.value[1] == item.value[1]} for item in found.values()}
    for name in NAMES:
        receipt = place.queue.put([-1, name, ""], unique=name)
        others = {item.id for item in found.values() if item.value[1] != name}
        assert receipt.id in taken.get(name, {receipt.id}) - others, f"{name!r}: {receipt.id}, not {taken.get(name)}"
    for _ in range(40):
        while tasks := place.queue.get_many(32):
            for task in tasks:
                found.pop(task.value[0], None)
                task.ack()
        advance(place.broker, clock, (), 2)
    dead = {item.value[0] for item in place.queue.items("dead")}
    assert not set(found) - dead, f"{set(found) - dead} are never delivered"
    place.broker.close()
    with open_in("r", image) as store:
        assert list(store.verify()) == []


@pytest.mark.parametrize("first", CAMPAIGN.chunks())
def test_power_cut_loses_no_item_and_brings_none_back(tmp_path: Path, first: int) -> None:
    CAMPAIGN.run(first, check_image, tmp_path)
