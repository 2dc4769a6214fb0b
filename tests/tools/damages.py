"""A store of known messages, and what may happen to it on a bad day: which bytes of the log each damage changes."""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mqstore.options import Profile
from tests.log.support import SEGMENT, flip, kill, open_store

__all__ = ["DAMAGES", "Damage", "Put", "Range", "filled", "flipped"]

Put = dict[str, Any]
Range = tuple[int, int]
Damage = Callable[[Path, list[Put]], list[Range]]
"""Damages a store in which these messages were put, and returns the physical ranges of the log that it changed."""


def filled(path: Path, profile: Profile, *, killed: bool) -> list[Put]:
    """A store of several segments, queues and topics, whose writer closed it, or was killed when it had dispatched most
    of it. Returns what was put."""
    store = open_store(path, profile=profile)
    puts = []
    for i in range(90):
        body = b"%02d" % i * (20 + i % 5 * 10)
        receipt = store.put(f"topic{i % 2}", body, i % 3, keys=[f"k{i}"], tag="abc"[i % 3])
        place = {"physical_offset": receipt.physical_offset, "size": receipt.size}
        key = {"topic": receipt.topic, "queue_id": receipt.queue_id, "queue_offset": receipt.offset}
        puts.append({**key, **place, "body": base64.b64encode(body).decode()})
        if i == 70:
            store.dispatch()
    if killed:
        kill(store)
    else:
        store.close()
    return puts


def segment_of(root: Path, place: int) -> Path:
    return root / "commitlog" / f"{place // SEGMENT * SEGMENT:020d}"


def flipped(*which: int) -> Damage:
    """One bit in the body of each of these messages."""

    def damage(root: Path, puts: list[Put]) -> list[Range]:
        places = [puts[i]["physical_offset"] + 100 for i in which]
        for place in places:
            flip(segment_of(root, place), place % SEGMENT)
        return [(place, place + 1) for place in places]

    return damage


def size_flipped(root: Path, puts: list[Put]) -> list[Range]:
    place = puts[40]["physical_offset"]
    flip(segment_of(root, place), place % SEGMENT + 3)
    return [(place, place + 4)]


def zeroed(root: Path, puts: list[Put]) -> list[Range]:
    """400 bytes from the middle of a message on."""
    place = puts[30]["physical_offset"] + 50
    stop = min(place + 400, place // SEGMENT * SEGMENT + SEGMENT)
    with open(segment_of(root, place), "r+b") as file:
        file.seek(place % SEGMENT)
        file.write(bytes(stop - place))
    return [(place, stop)]


def segment_gone(which: int) -> Damage:
    """The segment of this message."""

    def damage(root: Path, puts: list[Put]) -> list[Range]:
        start = puts[which]["physical_offset"] // SEGMENT * SEGMENT
        segment_of(root, start).unlink()
        return [(start, start + SEGMENT)]

    return damage


def segment_short(root: Path, puts: list[Put]) -> list[Range]:
    start = puts[45]["physical_offset"] // SEGMENT * SEGMENT
    os.truncate(segment_of(root, start), 1000)
    return [(start + 1000, start + SEGMENT)]


def segment_long(root: Path, puts: list[Put]) -> list[Range]:
    with open(segment_of(root, puts[45]["physical_offset"]), "ab") as file:
        file.write(b"too much")
    return []


def all_segments_gone(root: Path, puts: list[Put]) -> list[Range]:
    for path in (root / "commitlog").glob("0*"):
        path.unlink()
    return [(0, 1 << 60)]


def removed(*names: str) -> Damage:
    """Files and folders that hold no message."""

    def damage(root: Path, puts: list[Put]) -> list[Range]:
        for name in names:
            path = root / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        return []

    return damage


def unit_flipped(root: Path, puts: list[Put]) -> list[Range]:
    flip(root / "consumequeue" / "topic0" / "0" / f"{0:020d}", 3 * 20 + 7)
    return []


def after(*damages: Damage) -> Damage:
    return lambda root, puts: [each for damage in damages for each in damage(root, puts)]


DAMAGES: dict[str, Damage] = {
    "none": after(),
    "one message": flipped(40),
    "neighbours": flipped(40, 41, 43),
    "first message": flipped(0),
    "last message": flipped(89),
    "last messages": flipped(88, 89),
    "last dispatched": flipped(70, 71),
    "all messages": flipped(*range(90)),
    "size": size_flipped,
    "zeros": zeroed,
    "segment gone": segment_gone(45),
    "last segment gone": segment_gone(89),
    "all segments gone": all_segments_gone,
    "segment short": segment_short,
    "segment too long": segment_long,
    "queue gone": removed("consumequeue/topic0/0"),
    "topic gone": removed("consumequeue/topic1"),
    "queues gone": removed("consumequeue"),
    "queue's end gone": removed(f"consumequeue/topic0/1/{8 * 20:020d}"),
    "unit": unit_flipped,
    "index gone": removed("index"),
    "checkpoint gone": removed("checkpoint"),
    "queue gone and a message": after(removed("consumequeue/topic0/0"), flipped(36)),
    "only the log left, and damaged": after(
        removed("consumequeue", "index", "checkpoint"), flipped(3), zeroed, segment_short
    ),
}
