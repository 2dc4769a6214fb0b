"""Power cuts under a whole broker whose groups read, commit, send back and bury (delivery#saved-offsets).

What pop, delays, timer and transactions do in a crash their own files ask. Here one group reads a topic and its retry
topic by offset, gives messages back, has dead letters, replays and purges them; segments are dropped behind it; topics
and groups are made, altered and deleted. Of each image it is asked:

    at least once   a message that was on disk is consumed yet, or was handled, or is a dead letter, or was let go of
    no skip         a committed offset is one that was committed, and none below the last that was made durable
    told truly      no loss is told to a group that lost nothing
    settings        a topic and a group are as some call left them, and no earlier than the last that returned

`make crash N=100000` runs more of them; MQSTORE_CRASH_SEED=n runs one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mqstore import Message, Retention, RetryPolicy, SimulatedClock
from tests.crash import support
from tests.crash.campaign import Campaign
from tests.crash.recording import Event, RecordingFileSystem, build_image
from tests.log.support import Unsynced, kill

TOPICS = ("t", "%RETRY%g")
SIZES = {"segment_bytes": 4096, "consumequeue_units": 16, "index_slots": 8, "index_entries": 32}


@dataclass
class Script:
    """A run that was recorded. Marks: ("time", ms); ("put", n) the first n are on disk; ("handling", body) before a
    commit that passes it; ("purging", n) before all letters go; ("committing", topic, offset) before a commit and
    ("durable", topic, offset) what is on disk; ("setting", kind, name, value) before a call and ("set", kind, name,
    value) when it has returned."""

    events: list[Event]
    puts: list[bytes] = field(default_factory=list)
    letters: dict[int, frozenset[bytes]] = field(default_factory=dict)
    """Dead letters at the n-th purge."""
    drops: list[int] = field(default_factory=list)
    """Moments before segments were dropped."""


def open_broker(path: Path, clock: SimulatedClock, fs: Any) -> Any:
    return support.open_broker(path, SIZES, fs, clock=clock, retention=Retention(age=5), delay_levels="1s 5s")


class Run:
    """The script's broker, and a consumer that reads by offset."""

    def __init__(self, seed: int, root: Path, fs: RecordingFileSystem) -> None:
        self.rng = random.Random(f"broker {seed}")
        self.root, self.fs = root, fs
        self.script = Script(self.fs.events)
        self.clock = SimulatedClock()
        self.broker = open_broker(self.root, self.clock, self.fs)
        self.broker.topics.create("t", queues=1)
        by_level_or_timer_s = self.rng.choice((1, 2))
        self.broker.groups.create("g", retry_policy=RetryPolicy(2, [by_level_or_timer_s]))
        self.broker.start_of("g", "t", 0)
        self.fs.mark(("begun",))

    def run(self) -> Script:
        steps = [*[self.put] * 5, *[self.consume] * 6, self.work, self.work, *[self.clean] * 3, self.replay, self.purge]
        steps += [self.flush, self.restart, self.alter_group, self.alter_topic]
        for _ in range(self.rng.randrange(40, 90)):
            self.rng.choice(steps)()
            self.fs.mark(("time", self.clock.now_ms()))
        self.fs.observe()
        kill(self.broker.store)
        return self.script

    def put(self) -> None:
        for _ in range(self.rng.randrange(1, 6)):
            body = b"%d " % len(self.script.puts) + bytes(
                self.rng.choice((20, 50, 900))
            )  # longer than a reference to it
            self.broker.put("t", body)
            self.script.puts.append(body)

    def consume(self) -> None:
        topic = self.rng.choice([topic for topic in TOPICS if self.broker.topics.get(topic) is not None])
        start = self.broker.start_of("g", topic, 0)
        result = self.broker.read(topic, 0, start, self.rng.randrange(1, 9), group="g")
        assert result.lost == 0
        for message in result.messages:
            step = self.rng.random()
            if step < 0.5:
                self.fs.mark(("handling", message.body))
            else:
                self.broker.send_back("g", message.physical_offset, delay_level=-1 if step > 0.9 else 0)
        self.fs.mark(("committing", topic, result.next_offset))
        durable = self.rng.random() < 0.2
        self.broker.commit("g", topic, 0, result.next_offset, durability="flush" if durable else None)
        if durable:
            self.mark_durable()

    def work(self) -> None:
        self.clock.advance(self.rng.choice((300, 1_000, 3_000, 12_000)))
        self.broker.run_once()

    def clean(self) -> None:
        self.clock.advance(6_000)
        before = len(self.script.events)
        if self.broker.store.clean():
            self.script.drops.append(before)

    def replay(self) -> None:
        letters = self.broker.dead_letters("g")
        chosen = [letter.offset for letter in letters if self.rng.random() < 0.5]
        letters.replay(None if self.rng.random() < 0.5 else chosen)

    def purge(self) -> None:
        letters = self.broker.dead_letters("g")
        number = len(self.script.letters)
        self.script.letters[number] = frozenset(letter.body for letter in letters)
        self.fs.mark(("purging", number))
        letters.purge()

    def flush(self) -> None:
        self.broker.store.flush()
        self.fs.mark(("put", len(self.script.puts)))

    def restart(self) -> None:
        if self.rng.random() < 0.5:
            self.broker.close()
        else:
            self.fs.observe()
            kill(self.broker.store)
        self.broker = open_broker(self.root, self.clock, self.fs)
        self.fs.mark(("put", len(self.script.puts)))

    def mark_durable(self) -> None:
        self.fs.mark(("put", len(self.script.puts)))
        for topic in TOPICS:
            self.fs.mark(("durable", topic, self.broker.committed("g", topic, 0)))

    def alter_group(self) -> None:
        name, groups = self.rng.choice(("g1", "g2")), self.broker.groups
        if groups.get(name) is not None and self.rng.random() < 0.3:
            self.set("group", name, None, lambda: self.broker.delete_group(name))
        else:
            attempts = self.rng.randrange(1, 99)
            change = groups.create if groups.get(name) is None else groups.alter
            self.set("group", name, attempts, lambda: change(name, max_attempts=attempts))

    def alter_topic(self) -> None:
        name, topics = self.rng.choice(("u1", "u2")), self.broker.topics
        if topics.get(name) is not None and self.rng.random() < 0.3:
            self.set("topic", name, None, lambda: topics.delete(name))
        else:
            queues = 1 if (there := topics.get(name)) is None else there.read_queues + 1
            if there is None:
                self.set("topic", name, queues, lambda: topics.create(name, queues=queues))
            else:
                self.set("topic", name, queues, lambda: topics.alter(name, read_queues=queues))

    def set(self, kind: str, name: str, value: int | None, call: Callable[[], object]) -> None:
        self.fs.mark(("setting", kind, name, value))
        call()
        self.fs.mark(("set", kind, name, value))


def record(seed: int, root: Path, fs: RecordingFileSystem) -> Script:
    return Run(seed, root, fs).run()


CAMPAIGN = Campaign("test_broker_images.py", record, images=36, chunk=12, images_a_script=12)


def settings_of(broker: Any) -> dict[tuple[str, str], int | None]:
    found: dict[tuple[str, str], int | None] = {}
    for name in ("g1", "g2"):
        found["group", name] = None if (group := broker.groups.get(name)) is None else group.max_attempts
    for name in ("u1", "u2"):
        found["topic", name] = None if (topic := broker.topics.get(name)) is None else topic.read_queues
    return found


def check_settings(marks: list[Any], found: dict[tuple[str, str], int | None]) -> None:
    allowed: dict[tuple[str, str], set[int | None]] = {key: {None} for key in found}
    for mark in marks:
        if mark[0] == "setting":
            allowed[mark[1], mark[2]].add(mark[3])
        elif mark[0] == "set":
            allowed[mark[1], mark[2]] = {mark[3]}
    for key, value in found.items():
        assert value in allowed[key], f"{' '.join(key)} is {value}, not one of {allowed[key]}"


def drain(broker: Any, clock: SimulatedClock, *, kept: int) -> list[Message]:
    """Everything that the group has before it, in the topic and, after any delay, in its retry topic."""
    found: list[Message] = []
    for _ in range(4):
        for topic in TOPICS:
            if broker.store.offsets_or_none(topic, 0) is None:
                continue
            offset = broker.start_of("g", topic, 0)
            while (result := broker.read(topic, 0, offset, group="g")).next_offset > offset or result.messages:
                # Of a log that was never flushed a power cut may take the front and leave the rest of its numbers.
                assert result.lost == 0 or not kept, f"{result.lost} messages of {topic} are told lost from {offset} on"
                found += result.messages
                offset = result.next_offset
            broker.commit("g", topic, 0, offset)
        clock.advance(6_000)
        broker.run_once()
        broker.run_once()
    return found


def check_image(script: Script, rng: random.Random, image: Path) -> None:
    first = next(i for i, event in enumerate(script.events) if event.kind == "mark")
    moment = rng.randrange(first + 1, len(script.events) + 1)
    if script.drops and rng.random() < 0.5:
        moment = min(rng.choice(script.drops) + rng.randrange(1, 20), len(script.events))
    marks = build_image(script.events[:moment], rng, image)
    clock = SimulatedClock(max((mark[1] for mark in marks if mark[0] == "time"), default=SimulatedClock().now_ms()))
    kept = max((mark[1] for mark in marks if mark[0] == "put"), default=0)

    broker = open_broker(image, clock, Unsynced())
    check_settings(marks, settings_of(broker))
    for topic in TOPICS:
        committed = broker.committed("g", topic, 0)
        tried = {mark[2] for mark in marks if mark[0] == "committing" and mark[1] == topic}
        surely = [mark[2] for mark in marks if mark[0] == "durable" and mark[1] == topic and mark[2] is not None]
        assert committed is None or committed in tried | {0}, f"{topic}: {committed} was never committed"
        assert not surely or (committed or 0) >= surely[-1], f"{topic}: {committed}, and {surely[-1]} was durable"
    handled = {mark[1] for mark in marks if mark[0] == "handling"}
    purged = set().union(*(script.letters[mark[1]] for mark in marks if mark[0] == "purging"))
    dead = {letter.body for letter in broker.dead_letters("g")}
    came = {message.body for message in drain(broker, clock, kept=kept)}
    missing = set(script.puts[:kept]) - handled - purged - dead - came
    assert not missing, f"{sorted(body.split()[0] for body in missing)} are lost"
    assert broker.stats().errors == {}
    broker.close()


@pytest.mark.parametrize("first", CAMPAIGN.chunks())
def test_power_cut_skips_nothing_and_keeps_settings(tmp_path: Path, first: int) -> None:
    CAMPAIGN.run(first, check_image, tmp_path)
