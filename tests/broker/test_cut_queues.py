"""Queues that a crash has shortened: offsets, attempts and starts skip no message that is put afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mqstore import QueueRef
from mqstore.admin import offline
from tests.broker.support import Bench, Broker

LOCAL = "local_offsets"


def ten_old(bench: Bench) -> int:
    """Put ten messages, and return the physical offset of the sixth."""
    bench.broker.put_many("t", [b"old %d" % n for n in range(10)], queue_id=0)
    return bench.broker.read("t", 0, 5, 1).messages[0].physical_offset


def lose_tail(bench: Bench, physical_offset: int) -> None:
    """Close, and leave a log that ends at an offset, as a power cut may."""
    bench.broker.close()
    log = bench.path / "commitlog" / f"{0:020d}"
    log.write_bytes(log.read_bytes()[:physical_offset].ljust(log.stat().st_size, b"\0"))
    (bench.path / "abort").write_text("1")


def put_eight_without_broker(bench: Bench) -> list[bytes]:
    """Put eight messages into the closed store, and return their bodies. The broker opens it afterwards."""
    bodies = [b"new %d" % n for n in range(8)]
    bench.put_without_broker(bodies)
    bench.open()
    return bodies


@pytest.mark.parametrize("between", ["put", "twice", "nothing"])
def test_group_skips_no_message_put_after_a_cut(tmp_path: Path, between: str) -> None:
    """It had come to 100; the queue was cut at 40, and by the time that a broker looked it was longer than before."""
    path = tmp_path / "store"
    bench = Bench(path, segment_bytes=4096)
    bench.broker.topics.create("t", queues=1)
    for n in range(100):
        bench.broker.put("t", b"old %d" % n)
    while bench.drain():
        pass
    bench.broker.close()
    segments = sorted(file for file in (path / "commitlog").iterdir() if file.name.isdigit())
    for file in segments[-3:]:
        file.unlink()
    expected = []
    for turn in range({"put": 1, "twice": 2, "nothing": 0}[between]):
        new = [b"new %d %d" % (turn, n) for n in range(100)]
        bench.put_without_broker(new)
        expected += new
        (path / "abort").write_text("1")  # as if it had been killed
        (path / "checkpoint").unlink()
    bench.open()
    got = []
    while found := bench.drain():
        got += found
    assert [body for body in got if body.startswith(b"new")] == expected
    bench.broker.put("t", b"last")
    assert bench.drain() == [b"last"]
    bench.again()
    assert bench.drain() == [], "the note counts once"
    bench.broker.close()


@pytest.mark.parametrize("between", ["nothing", "puts", "tables", "puts, crash", "crash"])
def test_batch_in_order_skips_no_message_put_after_a_cut(bench: Bench, broker: Broker, between: str) -> None:
    """The file of order info said that 4, 5 and 6 were acknowledged, and the queue ended at 5: what came as 5 and 6 was
    skipped."""
    broker.groups.create("g", orderly=True)
    sixth = ten_old(bench)
    first = broker.pop("g", "t", 4, order=True)
    broker.ack("g", "t", [each.receipt for each in first])
    second = broker.pop("g", "t", 6, order=True)
    broker.ack("g", "t", [each.receipt for each in second[:3]])
    bench.jump(10_000)
    broker.save()
    lose_tail(bench, sixth)
    expected = [b"new %d" % n for n in range(8)]
    if between.startswith("puts") or between == "tables":
        bench.put_without_broker(expected)
    if between == "tables":  # a command that changes tables, and knows nothing of pop
        with offline(bench.path) as opened:
            opened.topics.create("other")
    bench.open()
    if between in ("nothing", "crash"):
        for body in expected:
            bench.broker.put("t", body, queue_id=0)
    if between.endswith("crash"):
        bench.broker.store.flush()
        bench.kill()
    bench.jump(100_000)
    got: list[bytes] = []
    while batch := bench.broker.pop("g", "t", 32, order=True):
        got += [each.message.body for each in batch]
        bench.broker.ack("g", "t", [each.receipt for each in batch])
    assert [body for body in got if body.startswith(b"new")] == expected


def test_attempts_of_cut_messages_are_forgotten(bench: Bench, broker: Broker) -> None:
    """A message that had failed fifteen times was cut; the new one of its number died of its first failure."""
    broker.groups.create("g", orderly=True)
    sixth = ten_old(bench)
    for offset in (3, 7):
        broker.note_attempt("g", "t", 0, offset, 15)
    bench.jump(10_000)
    broker.save()
    lose_tail(bench, sixth)
    put_eight_without_broker(bench)
    assert bench.broker.attempts("g", "t", 0) == {3: 15}


def test_broadcasting_client_skips_no_message_put_after_a_cut(bench: Bench) -> None:
    """Of a file that is damaged nothing is changed: its own client tells what to do."""
    path = bench.path
    bench.broker.topics.create("t", queues=2)
    sixth = ten_old(bench)

    def offsets(client: str) -> Any:
        return bench.broker.local_offsets(client, "prices")

    for client, offset in (("a-1", 10), ("b-1", 3)):
        file = offsets(client)
        file.commit(QueueRef("t", 0), offset)
        file.commit(QueueRef("t", 1), 0)
        file.save()
    (path / LOCAL / "bad").mkdir()
    (path / LOCAL / "bad" / "prices.json").write_text("{")
    lose_tail(bench, sixth)
    put_eight_without_broker(bench)
    assert [offsets(client).committed(QueueRef("t", 0)) for client in ("a-1", "b-1")] == [5, 3]
    assert [offsets(client).committed(QueueRef("t", 1)) for client in ("a-1", "b-1")] == [0, 0]
    assert (path / LOCAL / "bad" / "prices.json").read_text() == "{"


def test_start_of_a_cut_queue_hides_no_new_message(bench: Bench, broker: Broker) -> None:
    """What a deletion had hidden began behind the new messages' numbers."""
    sixth = ten_old(bench)
    broker.topics.delete("t")
    lose_tail(bench, sixth)
    bodies = put_eight_without_broker(bench)
    bench.broker.topics.create("t", queues=1)
    assert bench.drain() == bodies
