"""Delivery of delayed messages with compiled parts and without: the same records, dead letters and numbers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from mqstore import Message
from mqstore.broker.delay import levels as delay
from mqstore.broker.routing import router
from mqstore.broker.tables.names import HALF_TOPIC, SCHEDULE_TOPIC
from mqstore.layout.properties import decode_properties
from mqstore.log.writing import writer
from tests.broker.delaysupport import Delays
from tests.without import compiled

ENDS = [
    {"REAL_TOPIC": "orders", "REAL_QID": "0"},
    {"REAL_TOPIC": "orders", "REAL_QID": "1"},
    {"REAL_TOPIC": "orders", "REAL_QID": "+1"},
    {"REAL_TOPIC": "orders", "REAL_QID": "1", "UNIQ_KEY": "u"},
    {"REAL_TOPIC": "orders", "REAL_QID": "6"},  # beyond its queues
    {"REAL_TOPIC": "mails", "REAL_QID": "1", "WAIT": "true"},
    {"REAL_TOPIC": "deleted", "REAL_QID": "0"},
    {"REAL_TOPIC": HALF_TOPIC, "REAL_QID": "0"},
    {"REAL_TOPIC": SCHEDULE_TOPIC, "REAL_QID": "0"},
    {"REAL_TOPIC": "orders"},
]
BEGINS: list[dict[str, str]] = [
    {},
    {},
    {"TAGS": "a"},
    {"UNIQ_KEY": "key"},
    {"ORIGIN_MESSAGE_ID": "", "KEYS": "k"},
    {"MYDELAY": "3", "xUNIQ_KEY": "no"},
    {"TIMER_DELAY_SEC": "1"},
    {"REAL_TOPIC": "mails"},
    {"INNER_NUM": "1", "PROPERTY": "v" * 300},
]
RAW = [b"", b"UNIQ_KEY\x01\x02", b"junk\x02", b"junk", b"DELAY\x01\x02", b"\x02", b"x\x01\x01DELAY\x01y\x02"]


def encoded(properties: dict[str, str]) -> bytes:
    return "".join(f"{name}\x01{value}\x02" for name, value in properties.items()).encode()


def blobs(draw: random.Random, count: int) -> list[bytes]:
    """Properties as the engine writes them, and as it does not."""
    found = []
    while len(found) < count:
        begin = b"" if draw.random() < 0.8 else draw.choice(RAW)
        begin += encoded(draw.choice(BEGINS) | ({"n": str(len(found))} if draw.random() < 0.5 else {}))
        pieces = list(draw.choice(ENDS[:4] if draw.random() < 0.8 else ENDS).items())
        pieces.insert(draw.choice((0, 0, 0, len(pieces))), ("DELAY", draw.choice("11112")))
        end = encoded(dict(pieces)) + (b"" if draw.random() < 0.9 else draw.choice(RAW))
        found += [begin + end] * draw.choice((1, 1, 1, 4))
    return found


def run(path: Path, seed: int, **options: Any) -> tuple[object, ...]:
    """Everything that is left of the delivery of many random messages."""
    draw = random.Random(seed)
    delays = Delays(path, segment_bytes=1 << 13, **options)
    topics, store = delays.parts.topics, delays.store
    topics.create("orders", read_queues=4, write_queues=4)
    sources: list[Message] = []
    for n in range(6):
        host = "[2001:db8::7]:80" if n == 5 else "10.1.2.3:4567"
        receipt = store.append("from", 0, b"body %d" % n * (1 + 40 * n), properties={}, born_host=host, flag=n)
        sources += store.read("from", 0, receipt.offset, 1)
    for properties in blobs(draw, 90):
        message = draw.choice(sources)
        if message._plain_parts() is None or b"INNER_" in properties:
            pairs = decode_properties(properties).items()
            delays.raw(1, {name: value for name, value in pairs if value and "\x01" not in value})
        else:
            assert store.copy_many([(message, SCHEDULE_TOPIC, 0, properties)]) == 1
        if draw.random() < 0.02:
            topics.create("deleted")
            topics.delete("deleted", force=True)
    store.dispatch()
    delays.pass_ms(10_000)
    snapshot = delays.parts.statistics.snapshot()
    log = b"".join(store.log_files.mapping(segment)[:] for segment in store.log_files.segments())
    queues = {topic: [store.offsets(*ref) for ref in store.queues(topic)] for topic in store.topics()}
    found = log, queues, delays.dead, snapshot.totals, delays.service.progress(), delays.service.errors
    delays.close()
    return found


@compiled
@pytest.mark.parametrize("seed", range(5))
def test_the_same_is_delivered_without_compiled_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    options: dict[str, Any] = {"store_host": "[::1]:9"} if seed % 5 == 4 else {}
    found = run(tmp_path / "compiled", seed, **options)
    for module in delay, router, writer:
        monkeypatch.setattr(module, "kernel", None)
    assert run(tmp_path / "python", seed, **options) == found
    assert "orders" in found[1]  # type: ignore[operator]
