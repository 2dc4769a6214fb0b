"""Crash images by seed: which are tried, in which order, and how a failing one is named.

A script is a run on a recording file layer; each yields several images, since making one costs as much as checking a
few. `make crash N=100000` tries more of them; MQSTORE_CRASH_SEED tries one.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from tests.crash.recording import RecordingFileSystem

__all__ = ["Campaign"]

Script = TypeVar("Script")


class Campaign(Generic[Script]):
    """The seeds of one test file. `record(number, root, fs)` makes script `number` of a store in `root`; `images`: how
    many by default."""

    def __init__(
        self,
        test: str,
        record: Callable[[int, Path, RecordingFileSystem], Script],
        *,
        images: int,
        chunk: int,
        images_a_script: int,
    ) -> None:
        self._test = test
        self._record = record
        self._chunk = chunk
        self._images_a_script = images_a_script
        self._images = int(os.environ.get("MQSTORE_CRASH_IMAGES", images))
        self._only = os.environ.get("MQSTORE_CRASH_SEED")
        self._newest: tuple[int, Script] | None = None
        """The script that the last image came from. Only one: a campaign of 100,000 images has thousands of them."""

    def chunks(self) -> list[int]:
        """First seeds, one for each test; to parametrize with."""
        return [int(self._only)] if self._only else list(range(0, self._images, self._chunk))

    def _script(self, seed: int, tmp: Path) -> Script:
        """The script of this seed's image. Its directory is gone again: the record is what counts."""
        number = seed // self._images_a_script
        if self._newest is None or self._newest[0] != number:
            here = tmp / f"script-{number}"
            (here / "store").mkdir(parents=True)
            fs = RecordingFileSystem(here / "store")
            self._newest = number, self._record(number, here / "store", fs)
            fs.dispose()
            shutil.rmtree(here)
        return self._newest[1]

    def run(self, first: int, check: Callable[[Script, random.Random, Path], None], tmp: Path) -> None:
        """`check(script, rng, image)` for each seed of the chunk that begins at `first`. It makes the image there, and
        perhaps more under names that begin alike."""
        name = self._test.removeprefix("test_").removesuffix("images.py").replace("_", " ")
        for seed in range(first, first + 1 if self._only else min(first + self._chunk, self._images)):
            try:
                check(self._script(seed, tmp), random.Random(f"{name}image {seed}"), tmp / f"image-{seed}")
            except Exception as error:
                command = f"MQSTORE_CRASH_SEED={seed} pytest tests/crash/{self._test}"
                raise AssertionError(f"crash image {seed}: {error}; to see it again: {command}") from error
            for path in tmp.glob(f"image-{seed}*"):
                shutil.rmtree(path)
