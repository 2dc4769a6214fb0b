"""Power cuts under a file of `config/` that is saved quickly between synced saves (reliability#p3, reliability#p10).

Each seed saves rising numbers, some of them with a sync, some quickly, and now and then is killed and goes on. Then the
power is cut: names and bytes have reached the disk in any order. Of what is left it is asked:

    loads           there is a good copy from the first synced save on
    no going back   what it says was saved, and no earlier than the last synced save that had returned
"""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from mqstore import SimulatedClock, StoreConfig
from mqstore.broker.tables.configfile import ConfigFile
from mqstore.files.filesystem import FileSystem
from mqstore.log.store import MessageStore
from tests.crash.campaign import Campaign
from tests.crash.recording import Event, RecordingFileSystem, build_image
from tests.log.support import Unsynced


def open_file(root: Path, fs: FileSystem) -> tuple[ConfigFile, int]:
    """The file, and the number that it holds."""
    store = SimpleNamespace(
        path=root, fs=fs, clock=SimulatedClock(), config=StoreConfig(), mode="rw", closed=False, check_open=lambda: None
    )
    file = ConfigFile(cast(MessageStore, store), "x.json", log_end=1_000)
    return file, int((file.load() or {"n": 0})["n"])


def record(seed: int, root: Path, fs: RecordingFileSystem) -> list[Event]:
    """Marks: a number before its save, minus it when a synced save of it has returned."""
    rng = random.Random(f"progress {seed}")
    file, number = open_file(root, fs)
    for _ in range(rng.randrange(5, 25)):
        if rng.random() < 0.3:
            file, number = open_file(root, fs)
        number += 1
        fs.mark(number)
        quick = file.has_saved and rng.random() < 0.7
        filler = "x" * rng.choice((0, 0, 5_000))
        file.save({"n": number, "filler": filler}, quick_log_end=500 if quick else None)
        if not quick:
            fs.mark(-number)
    return fs.events


CAMPAIGN = Campaign("test_progress_images.py", record, images=60, chunk=60, images_a_script=10)


def check_image(events: list[Event], rng: random.Random, image: Path) -> None:
    marks = build_image(events[: rng.randrange(1, len(events) + 1)], rng, image)
    _, number = open_file(image, Unsynced())
    synced = -min(marks, default=0) if min(marks, default=0) < 0 else 0
    assert synced <= number <= max(marks, default=0)
    _, again = open_file(image, Unsynced())
    assert again == number


@pytest.mark.parametrize("first", CAMPAIGN.chunks())
def test_a_power_cut_takes_back_quick_saves_and_no_synced_one(tmp_path: Path, first: int) -> None:
    CAMPAIGN.run(first, check_image, tmp_path)
