"""A store of known messages, and what may happen to it on a bad day. Every kind of damage is in tests/damage."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mqstore import Profile
from tests.log.support import flip_log, kill, open_store, segment_of

__all__ = ["DAMAGES", "Damage", "Put", "filled", "flipped"]

Put = dict[str, Any]
Damage = Callable[[Path, list[Put]], None]
"""Damages a store in which these messages were put."""


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


def flipped(*which: int) -> Damage:
    """One bit in the body of each of these messages."""

    def damage(root: Path, puts: list[Put]) -> None:
        for place in (puts[i]["physical_offset"] + 100 for i in which):
            flip_log(root, place)

    return damage


def segment_gone(which: int) -> Damage:
    """The segment of this message."""
    return lambda root, puts: segment_of(root, puts[which]["physical_offset"]).unlink()


def removed(name: str) -> Damage:
    """A file or folder that holds no message."""

    def damage(root: Path, puts: list[Put]) -> None:
        path = root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


DAMAGES: dict[str, Damage] = {
    "none": lambda root, puts: None,
    "one message": flipped(40),
    "last message": flipped(89),
    "neighbours": flipped(40, 41, 43),
    "segment gone": segment_gone(45),
    "queue gone": removed("consumequeue/topic0/0"),
    "topic gone": removed("consumequeue/topic1"),
    "queues gone": removed("consumequeue"),
    "queue's end gone": removed(f"consumequeue/topic0/1/{8 * 20:020d}"),
    "index gone": removed("index"),
}
