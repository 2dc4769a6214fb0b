"""What a campaign of crash images itself needs."""

from __future__ import annotations

import os
import random
import tracemalloc
from pathlib import Path
from weakref import WeakSet

import pytest

from tests.crash.campaign import Campaign
from tests.crash.recording import RecordingFileSystem

_SIZE = 1 << 22


def test_long_campaign_needs_the_memory_of_one_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make crash N=3000` was ended by the system: each script kept 164 MB of files of a timer that were gone."""
    monkeypatch.setenv("MQSTORE_CRASH_IMAGES", "12")
    monkeypatch.delenv("MQSTORE_CRASH_SEED", raising=False)
    scripts: WeakSet[RecordingFileSystem] = WeakSet()
    recorded: list[int] = []
    checked = []

    def record(number: int, root: Path, fs: RecordingFileSystem) -> RecordingFileSystem:
        recorded.append(number)
        scripts.add(fs)
        fd = fs.open(root / "sparse", os.O_RDWR | os.O_CREAT)
        fs.truncate_sparse(fd, _SIZE)
        fs.close(fd)
        return fs

    def check(script: RecordingFileSystem, _rng: random.Random, image: Path) -> None:
        checked.append(image.name)
        assert script.events

    campaign = Campaign("test_some_images.py", record, images=1, chunk=2, images_a_script=4)
    tracemalloc.start()
    try:
        for first in campaign.chunks():
            campaign.run(first, check, tmp_path)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert recorded == [0, 1, 2]
    assert checked == [f"image-{seed}" for seed in range(12)]
    assert len(scripts) == 1
    assert held < _SIZE
