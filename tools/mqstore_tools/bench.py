"""`mqstore bench`: measure the speed of mqstore on this machine and disk, in a few seconds.

It shows the order of magnitude. `make bench` repeats each test and compares with other queues.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click

import mqstore
from mqstore import Durability
from mqstore.jobs import verify
from mqstore_tools.render import progress, show_bytes, show_tables
from mqstore_tools.shared import command

_MANY = 1000
_SYNCS = 200
"""Largest number of puts that wait for the disk."""
_TOPIC = "bench"


@command(
    short_help="Measure mqstore on this machine.",
    examples="""
  mqstore bench
  mqstore bench --messages 20000 --body-bytes 1024 --json
  mqstore bench --directory /mnt/slow         # on another disk""",
)
@click.option("--messages", type=click.IntRange(1), default=200_000, help="Messages of each test.")
@click.option("--body-bytes", type=click.IntRange(0, 4 << 20), default=128, help="Size of a body.")
@click.option(
    "--directory",
    metavar="DIR",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Parent of the temporary directory, which is removed at the end.",
)
def bench(messages: int, body_bytes: int, directory: Path | None) -> None:
    """Measure put, put_many, reading and verification in a temporary directory.

    Each test runs once, so the figures are only an order of magnitude.
    """
    syncs = min(_SYNCS, messages)
    body = bytes(i * 7 & 0xFF for i in range(body_bytes))
    results: list[dict[str, object]] = []
    rows: list[tuple[str, ...]] = []
    tests: list[tuple[str, int, Callable[[Path], Callable[[], int]]]] = [
        ("put, append", messages, lambda path: lambda: _put(path, body, messages)),
        ("put_many of 1000, append", messages, lambda path: lambda: _put_many(path, body, messages)),
        ("put, flush", syncs, lambda path: lambda: _put(path, body, syncs, "flush")),
        ("read as messages", messages, lambda path: _reader(path, body, messages, _read_messages)),
        ("verify", messages, lambda path: _reader(path, body, messages, _verify)),
    ]
    with (
        tempfile.TemporaryDirectory(prefix="mqstore-bench-", dir=directory) as folder,
        progress("measuring", of_bytes=False) as report,
    ):
        for i, (name, count, prepare) in enumerate(tests):
            report(i, len(tests))
            run = prepare(Path(folder) / str(i))
            begin = time.perf_counter()
            done = run()
            seconds = time.perf_counter() - begin
            if done != count:
                raise click.ClickException(f"{name}: expected {count} messages, got {done}")
            figures = {"seconds": round(seconds, 6), "per_second": round(count / seconds)}
            figures["body_bytes_per_second"] = round(count * body_bytes / seconds)
            results.append({"name": name, "messages": count, **figures})
            rate = show_bytes(round(count * body_bytes / seconds))
            rows.append((name, f"{count:,}", f"{count / seconds:,.0f}", f"{rate}/s"))
    title = f"bodies of {body_bytes} bytes, one run each, under {directory or tempfile.gettempdir()}"
    cells = (title, ("test", "messages>", "a second>", "of bodies>"), rows)
    show_tables({"body_bytes": body_bytes, "results": results}, cells)


def _put(path: Path, body: bytes, count: int, durability: Durability = "append") -> int:
    with mqstore.open(path, durability=durability) as store:
        put = store.put
        for _ in range(count):
            put(_TOPIC, body, queue_id=0)
    return count


def _put_many(path: Path, body: bytes, count: int) -> int:
    done = 0
    with mqstore.open(path) as store:
        while done < count:
            done += len(store.put_many(_TOPIC, [body] * min(_MANY, count - done), queue_id=0))
    return done


def _reader(path: Path, body: bytes, count: int, read: Callable[[Path], int]) -> Callable[[], int]:
    _put_many(path, body, count)
    return lambda: read(path)


def _read_messages(path: Path) -> int:
    offset = 0
    with mqstore.open(path, "r") as store:
        while messages := store.read(_TOPIC, 0, offset, _MANY):
            for message in messages:
                _ = message.body
            offset += len(messages)
    return offset


def _verify(path: Path) -> int:
    report = verify(path)
    return report.messages if report.ok else -1
