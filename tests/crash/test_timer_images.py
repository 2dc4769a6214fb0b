"""Power cuts under the timer: what one may leave of log, wheel, checkpoint and commitlog is opened and run to its end.

    reliability#p4
        what was put with durability "flush" is delivered, never before its moment; what was delivered before a
        checkpoint was written is not delivered again; what was recalled durably does not come

Made like `test_images.py`: a seeded script is recorded, each seed picks a moment of one and a subset of what was not
synced by then. MQSTORE_CRASH_SEED=n runs one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mqstore import SimulatedClock
from mqstore.broker.delay.timer import TimerService
from mqstore.broker.delay.timercheck import Progress
from mqstore.broker.tables.names import TIMER_TOPIC
from mqstore.files.filesystem import FileSystem
from tests.broker.support import ServiceBench, shrink_timer_log
from tests.crash.campaign import Campaign
from tests.crash.recording import Event, RecordingFileSystem, build_image
from tests.crash.support import checkpoint_of
from tests.log.support import Unsynced

S, HOUR, DAY = 1_000, 3_600_000, 86_400_000


@dataclass
class Script:
    """A run that was recorded. Marks in `events`: ("time", ms) the wall clock, ("put", body) on disk,
    ("recalling", bodies) under way: they may come or not, ("recalled", body) on disk, ("saved", bodies) a checkpoint
    stands that was written after they were delivered."""

    events: list[Event]
    due: dict[str, int] = field(default_factory=dict)


class Timers(ServiceBench[TimerService]):
    """A store with its timer. `saved` is told what was delivered before each checkpoint."""

    def __init__(
        self, path: Path, clock: SimulatedClock, fs: FileSystem, saved: Callable[[list[str]], None] = lambda _: None
    ) -> None:
        self._fs, self._saved = fs, saved
        sizes = {"segment_bytes": 1 << 16, "consumequeue_units": 64, "index_slots": 64, "index_entries": 256}
        super().__init__(path, TimerService, clock=clock, **sizes)

    def open(self, fs: FileSystem | None = None, **config: Any) -> None:
        super().open(self._fs, **config)
        checkpoint = checkpoint_of(self.service)
        save = checkpoint.save

        def noted(progress: Progress, now_ms: int) -> None:
            delivered = [body for body, _ in self.delivered()]
            save(progress, now_ms)
            self._saved(delivered)

        checkpoint.save = noted  # type: ignore[method-assign]

    def delivered(self) -> list[tuple[str, int]]:
        """(body, when delivered) of what came."""
        return [(message.text(), message.store_timestamp_ms) for message in self.messages()]


def run_script(seed: int, root: Path, fs: RecordingFileSystem) -> Script:
    rng = random.Random(f"timer {seed}")
    script = Script(fs.events)
    clock = SimulatedClock()
    handles: dict[str, str] = {}
    timers = Timers(root, clock, fs, lambda delivered: fs.mark(("saved", delivered)))
    for step in range(rng.randrange(15, 40)):
        choice = rng.random()
        if choice < 0.45:
            body = str(step)
            wait = rng.choice((500, S, 3 * S, 8 * S, HOUR, 3 * DAY, 6 * DAY)) + rng.randrange(S)
            durable = rng.random() < 0.6
            receipt = timers.parts.router.append(
                "orders", 0, body.encode(), {"TIMER_DELAY_MS": str(wait)}, durability="flush" if durable else "append"
            )
            assert receipt.recall_handle is not None
            handles[body] = receipt.recall_handle
            script.due[body] = clock.now_ms() + wait
            if durable:
                fs.mark(("put", body))
        elif choice < 0.55 and handles:
            body = rng.choice(sorted(handles))
            fs.mark(("recalling", {body}))
            if timers.service.recall(handles[body]):
                timers.parts.store.flush()
                fs.mark(("recalled", body))
            fs.mark(("recalling", set()))
        elif choice < 0.62:
            timers.reopen()
        elif choice < 0.66:
            fs.observe()
            timers.crash()
        else:
            for _ in range(rng.randrange(1, 5)):
                timers.pass_ms(rng.choice((300, S, S, 2 * S, HOUR, DAY)))
                fs.mark(("time", clock.now_ms()))
    (timers.close if rng.random() < 0.5 else timers.kill)()
    fs.mark(("time", clock.now_ms()))
    return script


CAMPAIGN = Campaign("test_timer_images.py", run_script, images=20, chunk=10, images_a_script=10)


def check_image(script: Script, rng: random.Random, image: Path) -> None:
    moment = rng.randrange(1, len(script.events) + 1)
    marks = build_image(script.events[:moment], rng, image)
    told: dict[str, list[object]] = {"time": [SimulatedClock().now_ms()], "put": [], "recalled": [], "saved": [[]]}
    told["recalling"] = [set()]
    for kind, value in marks:
        told[kind].append(value)
    # Time goes on from the end of the script's run, so that nothing that came early there could hide.
    ahead = [value for kind, (value, *_) in script.events[moment:] if kind == "mark" for value in [value[1]]]
    times = [t for t in ahead if isinstance(t, int)]
    now = times[0] if times else told["time"][-1]
    assert isinstance(now, int)
    timers = Timers(image, SimulatedClock(now), Unsynced())
    held = {message.text() for message in timers.messages(TIMER_TOPIC) if message.body}
    assert {str(body) for body in told["put"]} <= held
    timers.pass_ms(10 * DAY)
    found = timers.delivered()
    counts = Counter(body for body, _ in found)
    recalled = set(told["recalled"])
    assert not recalled & set(counts), "what was recalled came"
    recalling = told["recalling"][-1]
    assert isinstance(recalling, set)
    missing = set(told["put"]) - recalled - recalling - set(counts)
    assert not missing, f"{sorted(map(str, missing))} never came"
    for body, at_ms in found:
        assert at_ms >= script.due[body], f"{body} came {script.due[body] - at_ms} ms early"
    saved = told["saved"][-1]
    assert isinstance(saved, list)
    again = {body for body in saved if counts[body] > saved.count(body)}
    assert not again, f"{sorted(again)} were delivered before the checkpoint, and came again"
    assert timers.service.waiting() == 0
    assert not list(timers.service.pins())
    timers.close()


@pytest.mark.parametrize("first", CAMPAIGN.chunks())
def test_power_cut_keeps_timers_on_time(tmp_path: Path, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_timer_log(monkeypatch, units=6)
    if first // 10 % 2:  # every other script, so that two messages of one second take several steps
        monkeypatch.setattr("mqstore.broker.delay.timer._STEP", 1)
        monkeypatch.setattr("mqstore.broker.delay.timer._LOOKS", 1)
    CAMPAIGN.run(first, check_image, tmp_path)
