"""What a Java broker leaves, as its own directory and as records that a test writes (delivery#java-pop)."""

from __future__ import annotations

import itertools
import json
import lzma
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqstore import SimulatedClock
from mqstore.admin import inspect_store
from mqstore.broker.delay.timer import TimerService
from mqstore.broker.pop.poplog.java import JavaTakeover
from mqstore.broker.pop.poplog.log import PopLog
from mqstore.broker.routing.router import Router
from mqstore.broker.tables.names import TIMER_TOPIC, QueueKey
from mqstore.broker.tables.offsets import OffsetTable
from tests.broker.popsupport import POP_LOG_TOPIC, PopBench
from tests.broker.support import new_parts
from tests.log.support import kill

__all__ = [
    "INVISIBLE_MS",
    "REVIVE",
    "REVIVE_GROUP",
    "TIMER_TOPIC",
    "Java",
    "Seen",
    "ck_records",
    "in_flight",
    "killed_in_take_over",
    "look_at",
    "numbers",
    "revived",
    "with_timer",
    "without_saves",
    "without_take_over",
]

HERE = Path(__file__).parent
REVIVE = "rmq_sys_REVIVE_LOG_TestCluster"
REVIVE_GROUP = "CID_RMQ_SYS_REVIVE_GROUP"
INVISIBLE_MS = 60_000

Flight = tuple[str, str, int, int, int, int]
"""Group, topic, queue, offset, pop time, visible time."""


def in_flight(bench: PopBench, *, fifo: bool = False) -> set[Flight]:
    return {
        (group, each.topic, each.queue_id, each.offset, each.pop_time_ms, each.visible_at_ms)
        for group in bench.parts.groups.names()
        for each in bench.service.pending(group)
        if each.fifo == fifo
    }


def numbers(bench: PopBench, group: str = "g", topic: str = "t", queue_id: int = 0) -> list[int]:
    """Offsets that the group has in flight in a queue."""
    return [p.offset for p in bench.service.pending(group) if (p.topic, p.queue_id) == (topic, queue_id)]


def ck_records(bench: PopBench) -> int:
    return sum(1 for message in bench.read(POP_LOG_TOPIC) if message.tag == "ck")


def with_timer(bench: PopBench) -> None:
    """Let the timer run, too."""
    bench.mechanisms.insert(0, TimerService(bench.parts, lambda: None))


class Seen:
    """What the client of the real broker saw."""

    def __init__(self) -> None:
        with lzma.open(HERE / "popjava.jsonl.xz", "rt", encoding="utf-8") as file:
            *self.lines, last = [json.loads(line) for line in file]
        assert last["what"] == "stopped"
        self.stopped_ms: int = last["now_ms"]
        self.read = {0: last["read0"], 1: last["read1"]}
        self.ends = {0: last["revive0"], 1: last["revive1"]}

    def open(self) -> list[dict[str, Any]]:
        """The deliveries that nobody acknowledged, that no change of their time replaced, and that the broker did not
        redeliver itself; without those of the group that was deleted."""
        left: dict[str, dict[str, Any]] = {}
        for line in self.lines:
            name = f"{line['group']} {line['real_topic']} {line['receipt']}"
            if line["what"] in ("ack", "gone"):
                del left[name]
            elif line["what"] == "pop":
                left[name] = line
        # The first pop of "retried" had a second; what was not acknowledged of it came again in the retry topic.
        return [line for line in left.values() if line["group"] != "gone" and line["receipt"].split(" ")[2] != "1000"]

    def flights(self) -> set[Flight]:
        return {
            (
                line["group"],
                line["real_topic"],
                line["queue_id"],
                line["offset"],
                int(line["receipt"].split(" ")[1]),
                line["visible_ms"],
            )
            for line in self.open()
        }


def revived(bench: PopBench) -> dict[tuple[str, str, int], list[int]]:
    """What the Java broker's revive service would redeliver from what is in its revive queues, by its own rules: in the
    order of a queue, from behind its offset on, acks count for a ck that came before them (PopReviveService)."""
    found: dict[tuple[str, str, int], list[int]] = {}
    for queue_id in (0, 1):
        last = bench.parts.offsets.committed(QueueKey(REVIVE_GROUP, REVIVE, queue_id))
        checkpoints: dict[tuple[Any, ...], dict[int, bool]] = {}
        for message in bench.read(REVIVE, queue_id)[0 if last is None else last + 1 :]:
            value = message.json()
            key = tuple(value[name] for name in ("t", "c", "q", "so", "pt", "bn"))
            if message.tag == "ck":
                checkpoints[key] = {value["so"] + distance: False for distance in value["d"]}
            elif key in checkpoints:
                acked = [value["ao"]] if message.tag == "ack" else value["aol"]
                checkpoints[key].update({offset: True for offset in acked if offset in checkpoints[key]})
        for (topic, group, q, *_), offsets in checkpoints.items():
            found.setdefault((group, topic, q), []).extend(o for o, done in offsets.items() if not done)
    return {key: sorted(offsets) for key, offsets in found.items() if offsets}


class Java:
    """Writes what a Java broker writes when it pops and acknowledges, into a store that a bench has open."""

    def __init__(self, bench: PopBench) -> None:
        self.bench = bench
        self.pop_time_ms = bench.now_ms

    def ck(
        self,
        start: int,
        distances: list[int],
        *,
        topic: str = "t",
        group: str = "g",
        queue_id: int = 0,
        invisible_ms: int = INVISIBLE_MS,
        pop_time_ms: int | None = None,
        revive: int = 0,
        waits: bool = True,
        **members: Any,
    ) -> dict[str, Any]:
        """A checkpoint. `members` replace those of its body; None: left out."""
        value: dict[str, Any] = {
            "bm": 0,
            "bn": "broker-a",
            "c": group,
            "d": distances,
            "it": invisible_ms,
            "n": len(distances),
            "pt": self.pop_time_ms if pop_time_ms is None else pop_time_ms,
            "q": queue_id,
            "ro": 0,
            "so": start,
            "t": topic,
        } | members
        value = {name: member for name, member in value.items() if member is not None}
        due_ms = value["pt"] + value["it"] - 1000 if type(value["it"]) is int else self.pop_time_ms
        unique = f"{topic}@{queue_id}@{start}@{group}@{value['pt']}@broker-a@ck"
        self.record("ck", json.dumps(value).encode(), due_ms, unique, revive=revive, waits=waits)
        return value

    def ack(self, ck: dict[str, Any], *offsets: int, batch: bool = False, waits: bool = True, **members: Any) -> None:
        """Acknowledge messages of a checkpoint, one record each, or one for all."""
        same = {name: ck[name] for name in ("bn", "c", "pt", "q", "so", "t")}
        acks = [{"ao": -1, "aol": list(offsets)}] if batch else [{"ao": offset} for offset in offsets]
        for ack in acks:
            value = {name: member for name, member in {**ack, **same, **members}.items() if member is not None}
            unique = f"{ck['t']}@{ck['q']}@{ack['ao']}@{ck['c']}@{ck['pt']}@broker-a@ack"
            due_ms = ck["pt"] + ck["it"]
            self.record("bAck" if batch else "ack", json.dumps(value).encode(), due_ms, unique, waits=waits)

    def record(self, tag: str, body: bytes, due_ms: int, unique: str, *, revive: int = 0, waits: bool = True) -> None:
        properties = {"TAGS": tag, "UNIQ_KEY": unique, "TIMER_DELIVER_MS": str(due_ms)}
        where, queue_id = REVIVE, revive
        if waits:
            properties |= {
                "REAL_TOPIC": REVIVE,
                "REAL_QID": str(revive),
                "TIMER_OUT_MS": str((due_ms - 1) // 1000 * 1000),
            }
            where, queue_id = TIMER_TOPIC, 0
        self.bench.parts.store.append(where, queue_id, body, properties=properties)

    def committed(self, offset: int, *, topic: str = "t", group: str = "g", queue_id: int = 0) -> None:
        self.bench.parts.offsets.commit(QueueKey(group, topic, queue_id), offset)

    def timercheck(self, read_ms: int, queue_offset: int) -> None:
        page = struct.pack(">3q", read_ms, 0, queue_offset).ljust(4096, b"\0")
        (self.bench.path / "config" / "timercheck").write_bytes(page)


def look_at(folder: Path) -> None:
    """Show all that can be shown of a store, and read its tables."""
    assert not inspect_store(folder)["broker"].get("not_shown")
    new_parts(folder, "r").store.close()


def without_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open as a Java broker does: nobody takes over what waits in the timer and the revive queues."""
    monkeypatch.setattr(JavaTakeover, "take", lambda _: iter(()))
    monkeypatch.setattr(JavaTakeover, "mark", lambda _: None)


def without_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no offset come to the disk."""
    monkeypatch.setattr(OffsetTable, "save", lambda _: None)


class _Killed(BaseException):
    """The process ends here."""


def killed_in_take_over(folder: Path, clock: SimulatedClock, at: int) -> bool:
    """Open the store in a process that ends before the `at`-th write of its take-over, counted from 0.
    False: it had no such write."""
    count = itertools.count()

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if next(count) == at:
                raise _Killed
            return original(*args, **options)

        return call

    parts = new_parts(folder, clock=clock)
    bench = PopBench.__new__(PopBench)
    bench._rng = lambda: 0.5
    with pytest.MonkeyPatch.context() as patch:
        for target, name in ((PopLog, "put_pop"), (Router, "append"), (OffsetTable, "save")):
            patch.setattr(target, name, watched(getattr(target, name)))
        try:
            bench._service(parts, lambda: None)
        except _Killed:
            return True
        finally:
            kill(parts.store)
    return False
