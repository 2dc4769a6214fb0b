"""Damage to a store of `tests/columnar/support.py`, and which of its messages each hits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.columnar.support import SEGMENT

Row = dict[str, Any]


@dataclass(frozen=True)
class Damage:
    """What is done to a store, and which of its messages that hits: `unlisted` are no longer in their queues, which a
    query takes for the end of a queue or for retention; of `damaged` a queue tells, and the log has something else."""

    apply: Callable[[Path], None]
    unlisted: Callable[[Row], bool] = lambda row: False
    damaged: Callable[[Row], bool] = lambda row: False

    def __str__(self) -> str:
        return self.apply.__name__


def in_t0(row: Row) -> bool:
    return (row["topic"], row["queue_id"]) == ("t", 0)


def in_first_segment(row: Row) -> bool:
    return bool(row["physical_offset"] < SEGMENT)


def change(file: Path, at: int, data: bytes) -> None:
    old = file.read_bytes()
    file.write_bytes(old[:at] + data + old[at + len(data) :])


def queue_file(path: Path) -> Path:
    return path / "consumequeue" / "t" / "0" / f"{0:020d}"


def first_segment(path: Path) -> Path:
    return path / "commitlog" / f"{0:020d}"


def cut_queue(path: Path) -> None:
    queue_file(path).write_bytes(queue_file(path).read_bytes()[:50])


def spoil_queue(path: Path) -> None:
    change(queue_file(path), 0, b"\xff" * 100)


def point_past_the_end(path: Path) -> None:
    change(queue_file(path), 20, (1 << 40).to_bytes(8, "big"))


def spoil_body(path: Path) -> None:
    place = int.from_bytes(queue_file(path).read_bytes()[60:68], "big")
    change(first_segment(path), place + 90, b"\xff")


def spoil_segment(path: Path) -> None:
    change(first_segment(path), 0, b"\xff" * SEGMENT)


def cut_segment(path: Path) -> None:
    first_segment(path).write_bytes(first_segment(path).read_bytes()[:CUT])


def lose_segment(path: Path) -> None:
    first_segment(path).unlink()


def lose_queues(path: Path) -> None:
    shutil.rmtree(path / "consumequeue")


CUT = 333
DAMAGES = [
    Damage(cut_queue, unlisted=lambda row: in_t0(row) and row["queue_offset"] >= 2),
    Damage(spoil_queue, unlisted=lambda row: in_t0(row) and row["queue_offset"] < 5),
    Damage(point_past_the_end, damaged=lambda row: in_t0(row) and row["queue_offset"] == 1),
    Damage(spoil_body, damaged=lambda row: in_t0(row) and row["queue_offset"] == 3),
    Damage(spoil_segment, damaged=in_first_segment),
    Damage(cut_segment, damaged=lambda row: in_first_segment(row) and row["physical_offset"] + row["size"] > CUT),
    Damage(lose_segment, unlisted=in_first_segment),
    Damage(lose_queues, unlisted=lambda row: True),
]
