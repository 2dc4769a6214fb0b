"""Small stores for crash images, and recoveries that are cut short themselves."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any, Literal

from mqstore import Profile, SimulatedClock, StoreConfig
from mqstore.broker.broker import Broker
from mqstore.broker.delay.timer import TimerService
from mqstore.broker.delay.timercheck import TimerCheck
from mqstore.files.filesystem import REAL, FileSystem
from mqstore.log.store import MessageStore
from tests.crash.recording import RecordingFileSystem, build_image, crash_point
from tests.log.support import kill, open_in

QUEUES = [("orders", 0), ("orders", 1), ("clicks", 0)]


def if_new(path: Path, **sizes: int) -> dict[str, int]:
    """Options that only a new store may be given."""
    there = any((path / name).exists() for name in ("mqstore.json", "mqstore.json.bak", "commitlog"))
    return {} if there else sizes


def open_store(path: Path, mode: Literal["rw", "r"], profile: Profile, fs: FileSystem = REAL) -> Any:
    sizes = {"segment_bytes": 8192, "consumequeue_units": 16, "index_slots": 8, "index_entries": 32}
    if profile != "rocketmq":
        sizes = if_new(path, **sizes) if mode == "rw" else {}
    config = StoreConfig(clock=SimulatedClock(), **sizes)
    return open_in(mode, path, profile=profile, config=config, fs=fs)


def open_broker(path: Path, sizes: dict[str, int], fs: FileSystem = REAL, **config: Any) -> Broker:
    """A broker on a store of these sizes, if it is new."""
    return Broker(MessageStore(path, config=StoreConfig(**config, **if_new(path, **sizes)), fs=fs))


def checkpoint_of(timer: TimerService) -> TimerCheck:
    """The file of the timer's progress, for scripts that note each save."""
    return timer._check


def cut_short(image: Path, rng: random.Random, profile: Profile, *, in_order: bool) -> Path:
    """What power cuts during the recovery of `image` leave of it: of up to two, or none (`image` itself)."""
    source = image
    for attempt in range(rng.choice((0, 0, 1, 2))):
        copy = image.with_name(f"{image.name}-recording-{attempt}")
        shutil.copytree(source, copy)
        fs = RecordingFileSystem(copy)
        baseline = len(fs.events)
        store = open_store(copy, "rw", profile, fs)
        fs.observe()
        kill(store)
        fs.dispose()
        source = image.with_name(f"{image.name}-torn-{attempt}")
        build_image(fs.events[: crash_point(fs.events, rng, baseline)], rng, source, in_order=in_order)
        shutil.rmtree(copy)
    return source
