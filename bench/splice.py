"""What splicing staged shards costs beside copying the same bytes (S9 of the Spark design).

    python -m bench.splice [--mib N] [--rounds N] [--profile mqstore|rocketmq]

Both sides in every round, in turns, into the same file system, page cache warm:

    splice   `MessageStore.splice` of the shards into an empty store: checked, numbered, copied, synced, recorded
    copy     `shutil.copyfile` of each records.bin, then fsync of the copy

Messages: bodies of 100 to 900 bytes, three properties, eight queues, one shard for each 128 MiB. Goal: at least 0.5 of
the rate of copying. `--uniform` gives all bodies 500 bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from crc32c import crc32c

from bench.goals import ROUNDS, WARM_UPS, report
from mqstore.engine import MessageStore
from mqstore.layout.properties import encode_properties
from mqstore.layout.record import encode_record
from mqstore.options import Profile

_SEED = 20_240_301
_SHARD_BYTES = 128 << 20
_BLOCK_RECORDS = 4096


def stage(folder: Path, size: int, profile: Profile, *, uniform: bool = False) -> Path:
    """A shard of about `size` bytes, as `log.shard` describes it. One block of records, over and over."""
    source = random.Random(_SEED)
    folder.mkdir(parents=True)
    counts = [0] * 8
    block = bytearray()
    largest = 0
    for i in range(_BLOCK_RECORDS):
        queue_id = source.randrange(8)
        counts[queue_id] += 1
        record = bytearray(
            encode_record(
                topic="orders",
                body=source.randbytes(500 if uniform else source.randint(100, 900)),
                properties=encode_properties({"TAGS": "ABC"[i % 3], "KEYS": f"k-{i:08d}", "colour": "blue"}),
                queue_id=queue_id,
                queue_offset=0,
                physical_offset=0,
                born_timestamp_ms=1_700_000_000_000,
                store_timestamp_ms=0,
                checksum="crc32-body",
            )
        )
        record[8:12] = bytes(4)
        largest = max(largest, len(record))
        block += record
    times = max(1, size // len(block))
    crc = 0
    with open(folder / "records.bin", "wb") as file:
        for _ in range(times):
            file.write(block)
            crc = crc32c(block, crc)
        os.fsync(file.fileno())
    said = {
        "version": 1,
        "profile": profile,
        "records": _BLOCK_RECORDS * times,
        "bytes": len(block) * times,
        "crc32c": crc,
        "largest": largest,
        "queues": {"orders": {str(i): count * times for i, count in enumerate(counts)}},
    }
    (folder / "shard.json").write_text(json.dumps(said))
    return folder


class Took(NamedTuple):
    """Seconds: on the wall, and of a processor."""

    wall: float
    processor: float


def _clock() -> Took:
    return Took(time.perf_counter(), time.process_time())


def _since(begin: Took) -> Took:
    now = _clock()
    return Took(now.wall - begin.wall, now.processor - begin.processor)


def splice(shards: list[Path], folder: Path, profile: Profile) -> Took:
    with MessageStore(folder / "store", profile=profile) as store:
        begin = _clock()
        store.splice(shards, app="bench", version=0)
        return _since(begin)


def copy(shards: list[Path], folder: Path, profile: Profile) -> Took:
    begin = _clock()
    for number, shard in enumerate(shards):
        target = folder / str(number)
        shutil.copyfile(shard / "records.bin", target)
        with open(target, "r+b") as file:
            os.fsync(file.fileno())
    return _since(begin)


def main() -> None:
    parser = argparse.ArgumentParser(description="Splicing beside copying.")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--profile", choices=("mqstore", "rocketmq"), default="mqstore")
    parser.add_argument("--uniform", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        total = options.mib << 20
        sizes = [min(_SHARD_BYTES, total - at) for at in range(0, total, _SHARD_BYTES)]
        shards = [
            stage(root / f"shard-{i}", size, options.profile, uniform=options.uniform) for i, size in enumerate(sizes)
        ]
        amount = sum((shard / "records.bin").stat().st_size for shard in shards)
        ratios = []
        best: dict[str, float] = {}
        for number in range(options.rounds + WARM_UPS):
            took: dict[str, Took] = {}
            for side in (splice, copy) if number % 2 else (copy, splice):
                folder = root / "round"
                folder.mkdir()
                took[side.__name__] = side(shards, folder, options.profile)
                shutil.rmtree(folder)
            if number >= WARM_UPS:
                ratios.append(took["copy"].wall / took["splice"].wall)
                best = {name: min(best.get(name, each.wall), each.wall) for name, each in took.items()}
                rates = [
                    f"{name} {amount / each.wall / (1 << 20):.0f} MiB/s ({each.processor:.2f} s of a processor)"
                    for name, each in took.items()
                ]
                print(f"{', '.join(rates)}: {ratios[-1]:.2f}")
        report("S9", "splice, of the rate of copying", best["copy"] / best["splice"], 0.5)
        spread = f"({min(ratios):.2f}..{max(ratios):.2f})"
        report("S9", f"the same, the median of rounds {spread}", statistics.median(ratios))


if __name__ == "__main__":
    main()
