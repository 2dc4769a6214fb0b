"""Power cuts while messages that wait are moved to the end of the log: what one may leave is opened and run to
the end of all delays.

    reliability#p4
        what was put with durability "flush" is delivered, never before its moment, though the segment it was put to may
        be gone; what was recalled durably does not come
        it comes once, but for what was copied since the last checkpoint of who copied it: `copied` without a `saved`

Made like `test_timer_images.py`. What retention deleted was on disk, so a delivered message that is not in the image
was there before: ("doomed", copies) is noted before each deletion. MQSTORE_CRASH_SEED=n runs one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mqstore import Retention, SimulatedClock, StoreConfig
from mqstore.broker.background import retention
from mqstore.broker.background.context import Parts, open_parts
from mqstore.broker.background.retention import RetentionService
from mqstore.broker.background.service import Roller
from mqstore.broker.delay.levels import DelayService
from mqstore.broker.delay.timer import TimerService
from mqstore.broker.redelivery.retry import Retries
from mqstore.files.filesystem import FileSystem
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.store import MessageStore
from mqstore.log.writing.outgoing import Copy
from tests.broker.support import messages_of, settle, shrink_timer_log
from tests.crash.campaign import Campaign
from tests.crash.recording import Event, RecordingFileSystem, build_image
from tests.crash.support import checkpoint_of, if_new
from tests.log.support import Unsynced, kill

S, DAY = 1_000, 86_400_000
LEVELS_MS = (1_000, 20 * DAY)
SEGMENT = 8192
POLICY = Retention(age=None, max_bytes=2 * SEGMENT, unconsumed="drop")


@dataclass
class Script:
    """A run that was recorded. Marks: ("time", ms); ("put", body) and ("recalled", body) on disk; ("copied", (who,
    body)): delivered or moved; ("saved", who): what he had copied by now is on record; ("doomed", copies that were
    delivered, and are deleted next); ("killed", 1)."""

    events: list[Event]
    due: dict[str, int] = field(default_factory=dict)
    rolling: list[int] = field(default_factory=list)
    """Moments while messages are moved."""


class Broker:
    """A store with the three that matter here."""

    def __init__(self, path: Path, fs: FileSystem, clock: SimulatedClock) -> None:
        sizes = if_new(path, segment_bytes=SEGMENT, consumequeue_units=64, index_slots=64, index_entries=256)
        config = StoreConfig(clock=clock, delay_levels="1s 20d", retention=POLICY, **sizes)
        self.clock = clock
        self.store = MessageStore(path, config=config, fs=fs)
        self.parts: Parts = open_parts(self.store)
        self.delay = DelayService(self.parts, lambda: None, Retries(self.parts).dead_letter)
        self.timer = TimerService(self.parts, lambda: None)
        rollers: list[Roller] = [self.delay, self.timer]
        self.retention = RetentionService(self.parts, rollers, rollers)

    def deliver(self) -> None:
        settle(self.parts, [self.delay, self.timer])

    def arrived(self) -> list[tuple[str, int, int]]:
        """(body, when delivered, where) of what came."""
        found = messages_of(self.parts, "orders")
        return [(message.text(), message.store_timestamp_ms, message.physical_offset) for message in found]

    def close(self) -> None:
        self.retention.close()
        for each in (self.timer, self.delay):
            each.persist()
            each.close()
        self.store.close()

    def kill(self) -> None:
        kill(self.store)


def spied(broker: Broker, fs: RecordingFileSystem) -> Broker:
    """`broker`, with a mark for each copy and each checkpoint."""

    def after(target: Any, name: str, tell: Callable[..., object]) -> None:
        real = getattr(target, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            tell(*args)
            result = real(*args, **kwargs)
            if name.startswith("save"):
                fs.mark(("saved", "timer" if target is not broker.delay else "level"))
            return result

        setattr(target, name, call)

    def tell_all(copies: Sequence[Copy]) -> None:
        for message, *_ in copies:
            fs.mark(("copied", ("level", message.text())))

    router = broker.parts.router
    after(router, "copy", lambda message, *_: fs.mark(("copied", ("timer", message.text()))))
    after(router, "copy_many", tell_all)
    after(checkpoint_of(broker.timer), "save", lambda *_: None)
    after(broker.delay, "save", lambda *_: None)
    return broker


def run_script(seed: int, root: Path, fs: RecordingFileSystem) -> Script:
    rng = random.Random(f"rolling {seed}")
    script = Script(fs.events)
    clock = SimulatedClock()
    handles: dict[str, str] = {}
    broker = spied(Broker(root, fs, clock), fs)

    def deletion() -> None:
        flushed = broker.store.max_offset - broker.store.stats().flush_lag_bytes
        bound = min(broker.store.expired(POLICY), broker.retention.bound(POLICY), flushed) // SEGMENT * SEGMENT
        fs.mark(("doomed", [each for each in broker.arrived() if each[2] < bound]))
        broker.store.drop_before(bound)

    def put(body: str) -> None:
        durable = rng.random() < 0.7
        if rng.random() < 0.6:
            wait = rng.choice((3 * S, DAY, 6 * DAY, 30 * DAY)) + rng.randrange(S)
            properties = {"TIMER_DELAY_MS": str(wait)}
        else:
            level = rng.randrange(1, 3)
            wait, properties = LEVELS_MS[level - 1], {"DELAY": str(level)}
        receipt = broker.parts.router.append(
            "orders", 0, body.encode(), properties, durability="flush" if durable else "append"
        )
        if receipt.recall_handle is not None:
            handles[body] = receipt.recall_handle
        script.due[body] = clock.now_ms() + wait
        if durable:
            fs.mark(("put", body))

    def house() -> None:
        """What ten seconds of a busy broker do, with the time that passes in them."""
        for _ in range(rng.randrange(4, 12)):
            broker.parts.router.append("busy", 0, rng.randbytes(1500), {})
        broker.deliver()
        if rng.random() < 0.7:
            broker.store.flush()
        begin = len(fs.events)
        for _ in range(rng.randrange(1, 20)):
            if (broker.retention.run_once(clock.now_ms()) or 0) > clock.now_ms():
                break
            fs.observe()
        script.rolling.extend(range(begin, len(fs.events) + 1))
        clock.advance(rng.choice((S, 5 * S, 10 * S)))
        fs.mark(("time", clock.now_ms()))
        broker.deliver()
        deletion()
        script.rolling.extend(range(len(fs.events) - 10, len(fs.events) + 1))

    for step in range(rng.randrange(15, 35)):
        choice = rng.random()
        if choice < 0.35:
            for part in range(rng.randrange(1, 4)):
                put(f"{step}.{part}")
        elif choice < 0.45 and handles:
            body = rng.choice(sorted(handles))
            if broker.timer.recall(handles[body]):
                broker.store.flush()
                fs.mark(("recalled", body))
        elif choice < 0.5:
            broker.close()
            broker = spied(Broker(root, fs, clock), fs)
        elif choice < 0.54:
            fs.observe()
            broker.kill()
            fs.mark(("killed", 1))
            broker = spied(Broker(root, fs, clock), fs)
        elif choice < 0.6:
            clock.advance(rng.choice((3 * S, DAY, 6 * DAY)))
            fs.mark(("time", clock.now_ms()))
            broker.deliver()
        else:
            house()
    if rng.random() < 0.5:
        broker.close()
    else:
        fs.observe()
        broker.kill()
    fs.mark(("time", clock.now_ms()))
    return script


CAMPAIGN = Campaign("test_rolling_images.py", run_script, images=20, chunk=10, images_a_script=10)


def check_image(script: Script, rng: random.Random, image: Path) -> None:
    if script.rolling and rng.random() < 0.8:
        moment = min(len(script.events), rng.choice(script.rolling))
    else:
        moment = rng.randrange(1, len(script.events) + 1)
    marks = build_image(script.events[:moment], rng, image)
    put, recalled, doomed, kills = set[str](), set[str](), set[tuple[str, int, int]](), 0
    unsaved: dict[str, Counter[str]] = {"timer": Counter(), "level": Counter()}
    for kind, value in marks:
        if kind == "put":
            put.add(value)
        elif kind == "recalled":
            recalled.add(value)
        elif kind == "doomed":
            doomed.update(value)
        elif kind == "copied":
            unsaved[value[0]][value[1]] += 1
        elif kind == "saved":
            unsaved[value].clear()
        kills += kind == "killed"
    ahead = [event.operands[0][1] for event in script.events[moment:] if event.kind == "mark"]
    times = [value for kind, value in marks if kind == "time"] or [SimulatedClock().now_ms()]
    now = next((value for value in ahead if isinstance(value, int) and value > 1), times[-1])

    broker = Broker(image, Unsynced(), SimulatedClock(now))
    for _ in range(45):
        broker.deliver()
        broker.clock.advance(DAY)
    broker.deliver()
    came = doomed.union(broker.arrived())
    counts = Counter(body for body, *_ in came)
    assert not recalled & counts.keys(), "what was recalled came"
    missing = put - recalled - counts.keys()
    assert not missing, f"{sorted(missing)} never came"
    for body, at_ms, _ in came:
        assert at_ms >= script.due[body], f"{body} came {script.due[body] - at_ms} ms early"
    for body, count in counts.items():
        # Moved and then delivered, both not on record: all three are there.
        doublings = sum(copied[body] for copied in unsaved.values()) + 2 * kills
        assert count <= 1 << doublings, f"{body} came {count} times; not on record: {unsaved}"
    assert broker.timer.waiting() == broker.delay.waiting() == 0
    broker.close()
    with ReadOnlyMessageStore(image) as reader:
        assert list(reader.verify()) == []


@pytest.mark.parametrize("first", CAMPAIGN.chunks())
def test_power_cut_in_a_relocation_loses_nothing(tmp_path: Path, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_timer_log(monkeypatch, units=6)
    monkeypatch.setattr(retention, "_ROLL_STEP", 2)
    CAMPAIGN.run(first, check_image, tmp_path)
