"""Power cuts under the delay levels: no message is lost, early or out of order (reliability#p4).

Which messages come twice is known one by one.

A seeded script puts delayed messages, lets time pass, flushes, closes, is killed, and goes on. Each seed then picks a
moment of it, most often inside the service's own work, builds what a power cut may leave (tests/crash/recording.py),
opens that and lets all delays run out. With v = what the progress file of the image says of a level (its backup, if it
is torn, or was saved quickly when the log was longer than what the image has of it):

    unit below v        its copy is in the image, and it does not come again (delivery#x2)
    unit at v or above  comes once more than the image shows it; this window is counted (delivery#level-crash)
    every copy          stored when its message was due, or later
    copies of a level   in the order of their puts, each time the level was gone through

`make crash N=100000` runs more of them; MQSTORE_CRASH_SEED=n runs one.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mqstore import Message, SimulatedClock
from tests.broker.delaysupport import Delays
from tests.crash.campaign import Campaign
from tests.crash.recording import Event, RecordingFileSystem, build_image
from tests.log.support import Unsynced, open_in

TABLE_MS = (1_000, 5_000, 12_000)
QUEUES = [("orders", 0), ("orders", 1), ("clicks", 0)]
SIZES = {"segment_bytes": 8192, "consumequeue_units": 16, "index_slots": 8, "index_entries": 32}


@dataclass
class Script:
    """A run that was recorded. Marks: ("time", ms) the wall clock, ("flushed", n) the first n puts are on disk, and
    ("killed", 1) that the process was, and another went on."""

    events: list[Event]
    puts: int = 0
    busy: list[int] = field(default_factory=list)
    """Moments inside the service's work."""


class Broker(Delays):
    """A store with its delay service. A dead letter would be a loss."""

    def __init__(self, path: Path, fs: Any, clock: SimulatedClock) -> None:
        super().__init__(path, fs=fs, clock=clock, delay_levels="1s 5s 12s", **SIZES)

    def run(self) -> None:
        self.store.dispatch()
        self.service.run_once(self.clock.now_ms())

    def scheduled(self) -> dict[tuple[int, int], Message]:
        """(level, offset) -> message, of all that the store holds."""
        return {
            (level, message.offset): message
            for level in range(1, len(TABLE_MS) + 1)
            for message in self.messages("SCHEDULE_TOPIC_XXXX", level - 1)
        }

    def copies(self) -> list[Message]:
        return [message for queue in QUEUES for message in self.messages(*queue)]


def run_script(seed: int, root: Path, fs: RecordingFileSystem) -> Script:
    rng = random.Random(f"delay {seed}")
    script = Script(fs.events)
    clock = SimulatedClock()
    broker = Broker(root, fs, clock)

    def work() -> None:
        fs.mark(("time", clock.now_ms()))
        begin = len(fs.events)
        broker.run()
        fs.observe()
        script.busy.extend(range(begin, len(fs.events) + 1))

    for _ in range(rng.randrange(30, 70)):
        step = rng.random()
        if step < 0.45:
            for _ in range(rng.randrange(1, 6)):
                topic, queue_id = rng.choice(QUEUES)
                body = b"%d " % script.puts + rng.randbytes(rng.choice((0, 10, 300)))
                broker.parts.router.append(topic, queue_id, body, {"DELAY": str(rng.randrange(1, 4))})
                script.puts += 1
        elif step < 0.8:
            clock.advance(rng.choice((300, 1_000, 2_500, 6_000)))
            work()
        elif step < 0.86:
            broker.store.run_once(clock.monotonic_ms())
        elif step < 0.92:
            broker.store.flush()
            fs.mark(("flushed", script.puts))
        elif step < 0.96:
            broker.close()
            fs.mark(("flushed", script.puts))
            broker = Broker(root, fs, clock)
        else:
            fs.observe()
            broker.kill()
            fs.mark(("killed", 1))
            broker = Broker(root, fs, clock)
            fs.mark(("flushed", script.puts))
        fs.mark(("time", clock.now_ms()))
    fs.observe()
    broker.kill()
    return script


CAMPAIGN = Campaign("test_delay_images.py", run_script, images=25, chunk=25, images_a_script=25)


def progress_of(values: list[dict[str, Any] | None], log_end: int) -> dict[str, int]:
    """Progress by level, as the first of the file and its backup says that can be relied on."""
    for value in values:
        if value is not None and value.get("logEnd", 0) <= log_end:
            return value["offsetTable"]  # type: ignore[no-any-return]
    return {}


def decoded(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_bytes())  # type: ignore[no-any-return]
    except (FileNotFoundError, ValueError):
        return None


def number_of(message: Message) -> int:
    return int(message.body.split(b" ", 1)[0])


def check_image(script: Script, rng: random.Random, image: Path) -> None:
    if script.busy and rng.random() < 0.8:
        moment = rng.choice(script.busy)
    else:
        moment = rng.randrange(1, len(script.events) + 1)
    marks = build_image(script.events[:moment], rng, image)
    flushed = max((n for kind, n in marks if kind == "flushed"), default=0)
    opened = 1 + sum(n for kind, n in marks if kind == "killed")
    clock = SimulatedClock(max((ms for kind, ms in marks if kind == "time"), default=SimulatedClock().now_ms()))

    files = [decoded(image / "config" / name) for name in ("delayOffset.json", "delayOffset.json.bak")]
    broker = Broker(image, Unsynced(), clock)
    on_disk = progress_of(files, broker.store.max_offset)
    scheduled = broker.scheduled()
    before = Counter(number_of(message) for message in broker.copies())

    numbers = {number_of(message) for message in scheduled.values()}
    assert numbers >= set(range(flushed)), "a delayed message that was on disk is gone"
    for _ in range(15):
        clock.advance(1_000)
        for _ in range(3):
            broker.run()
    assert broker.service.waiting() == 0
    assert (broker.service.errors, broker.dead) == ({}, [])

    copies = broker.copies()
    after = Counter(map(number_of, copies))
    for (level, offset), message in scheduled.items():
        number = number_of(message)
        seen = on_disk.get(str(level), 0)
        if offset < seen:
            assert before[number], f"progress of level {level} is {seen} on disk, but {offset} was not delivered: lost"
        assert after[number] == before[number] + (offset >= seen), f"unit {offset} of level {level}, progress {seen}"
        assert after[number] >= 1

    place = {number_of(message): (level, offset) for (level, offset), message in scheduled.items()}
    for copy in copies:
        level, offset = place[number_of(copy)]
        source = scheduled[level, offset]
        assert copy.store_timestamp_ms >= source.store_timestamp_ms + TABLE_MS[level - 1], "early"
        assert copy.body == source.body
        assert "DELAY" not in copy.stored_properties()
    for queue in QUEUES:
        for level in range(1, len(TABLE_MS) + 1):
            offsets = [place[number_of(m)][1] for m in broker.messages(*queue) if place[number_of(m)][0] == level]
            backwards = sum(other <= one for one, other in pairwise(offsets))
            assert backwards <= opened, f"level {level} goes back without a crash: {offsets}"
            firsts = list(dict.fromkeys(offsets))
            assert firsts == sorted(firsts), f"level {level} out of order: {offsets}"
    broker.close()
    with open_in("r", image) as reader:
        assert list(reader.verify()) == []


@pytest.mark.parametrize("first", CAMPAIGN.chunks())
def test_power_cut_keeps_delayed_messages_in_time_and_order(tmp_path: Path, first: int) -> None:
    CAMPAIGN.run(first, check_image, tmp_path)
