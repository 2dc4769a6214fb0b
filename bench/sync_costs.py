"""What decides how a durable put compares with a bare loop of synced writes? `python -m bench.sync_costs`

The sides write records of one size and wait for the disk after each. They differ in the state of the file's blocks, and
in the call that syncs. They take turns after every few records, so that work of others on the machine meets all alike,
and the first quarter of each side's turns is compared. Where the file system is ext4 with a journal, its commits are
counted as well; of the disk, its flushes and what is written. Nothing else should use that file system.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import mqstore
from bench.harness import Load, scratch

BLOCK = 4096
TURN = 36
SEGMENT_BYTES = 64 << 20

Turn = Callable[[int], None]
Prepare = Callable[[int, int], object]
"""Brings a new file into a state, given its descriptor and how much will be written to it."""


def new(fd: int, size: int) -> None:
    """Each write makes the file longer."""


def allocated(fd: int, size: int) -> None:
    os.posix_fallocate(fd, 0, max(size, SEGMENT_BYTES))


def written(fd: int, size: int) -> None:
    """By blocks: a long write leaves large folios in the page cache of some kernels, and each write to one walks it."""
    for position in range(0, size + BLOCK, BLOCK):
        os.pwrite(fd, bytes(BLOCK), position)


@contextmanager
def bare(path: Path, load: Load, prepare: Prepare, flag: int) -> Iterator[Turn]:
    """A loop of `pwrite`: to a descriptor with the open flag O_DSYNC, or followed by `fdatasync` each."""
    record = load.bodies()[0].ljust(load.record_bytes, b"\1")
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    prepare(fd, load.messages * len(record))
    os.fsync(fd)
    os.close(fd)
    fd = os.open(path, os.O_RDWR | flag)
    position = 0

    def turn(count: int) -> None:
        nonlocal position
        pwrite, sync = os.pwrite, os.fdatasync
        for _ in range(count):
            pwrite(fd, record, position)
            if not flag:
                sync(fd)
            position += len(record)

    try:
        yield turn
    finally:
        os.close(fd)


@contextmanager
def put(path: Path, load: Load) -> Iterator[Turn]:
    body = load.bodies()[0]
    with closing(mqstore.engine.MessageStore(path, durability="flush")) as store:
        store.put(load.topic, body, queue_id=0)

        def turn(count: int) -> None:
            for _ in range(count):
                store.put(load.topic, body, queue_id=0)

        yield turn


def counters(directory: Path) -> tuple[int, int, int]:
    """(commits of the journal, flushes, sectors written) so far, of the disk below `directory`; 0 where unknown."""
    device = os.stat(directory).st_dev
    disk = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    commits = [path.read_text().split()[0] for path in Path("/proc/fs/jbd2").glob(f"{disk.name}-*/info")]
    try:
        figures = (disk / "stat").read_text().split()
    except OSError:
        return 0, 0, 0
    return int(commits[0]) if commits else 0, int(figures[15]), int(figures[6])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sync_costs", description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", help="where to write; default: as for the other benchmarks")
    parser.add_argument("--messages", type=int, default=3600)
    options = parser.parse_args()
    for body_bytes in (128, 1024):
        compare(Load(body_bytes, options.messages), options.directory)


def compare(load: Load, parent: str | None) -> None:
    states: dict[str, Prepare] = {"written blocks": written, "allocated blocks": allocated, "appending": new}
    with scratch("sync", parent) as directory, ExitStack() as stack:
        sides: dict[str, Turn] = {}
        for number, (state, prepare) in enumerate(states.items()):
            for call, flag in (("O_DSYNC", os.O_DSYNC), ("fdatasync", 0)):
                file = directory / f"{call}-{number}"
                sides[f"{call}, {state}"] = stack.enter_context(bare(file, load, prepare, flag))
        sides["mqstore put"] = stack.enter_context(put(directory / "store", load))
        found: dict[str, list[tuple[float, ...]]] = {name: [] for name in sides}
        order = list(sides)
        os.sync()
        gc.disable()
        for _ in range(load.messages // TURN):
            order.append(order.pop(0))
            for name in order:
                before, begin = counters(directory), time.perf_counter()
                sides[name](TURN)
                taken = time.perf_counter() - begin
                counted = (after - old for after, old in zip(counters(directory), before, strict=True))
                found[name].append((taken / TURN, *(each / TURN for each in counted)))
        gc.enable()
    times = {name: statistics.quantiles([turn[0] for turn in turns])[0] for name, turns in found.items()}
    print(f"{load.body_bytes} B{'us':>29} {'rate':>8} {'commits':>8} {'flushes':>8} {'KiB':>6}   for each record")
    for name, turns in found.items():
        commits, flushes, sectors = (statistics.fmean(turn[at] for turn in turns) for at in (1, 2, 3))
        ratio = times["O_DSYNC, written blocks"] / times[name]
        print(f"{name:<27} {times[name] * 1e6:7.1f} {ratio:8.2f} {commits:8.3f} {flushes:8.2f} {sectors / 2:6.1f}")


if __name__ == "__main__":
    main()
