"""Saving means everything: `Broker.save`, a snapshot and a clean close write the same.

Each scene leaves something in memory that the next process must know. The store is then saved and killed, saved and cut
off from power, copied by a snapshot, or closed. What the next process sees is in all cases the same, and is given here.
A mechanism without a scene, and without a reason in `STATELESS`, fails the first test.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mqstore import PullConsumer, PushConsumer, QueueRef, RetryPolicy, SimulatedClock
from mqstore.broker.background.service import BackgroundService
from mqstore.broker.broker import Broker
from mqstore.broker.tables.external_offsets import publish
from mqstore.errors import StoreClosedError, StoreFullError
from mqstore.files.filesystem import FileSystem
from mqstore.log.snapshot.copy import snapshot_store
from tests.crash.recording import RecordingFileSystem, build_image
from tests.log.support import Unsynced, kill, open_store

T = QueueRef("t", 0)
BODIES = [b"%d" % n for n in range(6)]


class Desk:
    """A broker whose time stands still, with topic t of one queue and group g."""

    def __init__(self, path: Path, clock: SimulatedClock, fs: FileSystem | None = None) -> None:
        self.path = path
        self.clock = clock
        self.broker = Broker(
            open_store(path, fs=fs, clock=clock, delay_levels="1s 5s", dlq_retention=60, commit_interval=3_600)
        )

    def run(self, duration_ms: int = 0) -> None:
        self.clock.advance(duration_ms)
        for _ in range(8):
            self.broker.run_once()

    def bodies(self, topic: str = "t") -> list[bytes]:
        self.broker.store.dispatch()
        low, high = self.broker.store.offsets_or_none(topic, 0) or (0, 0)
        return [message.body for message in self.broker.read(topic, 0, low, 99).messages] if high else []

    def push(self, handled: list[bytes], **options: Any) -> PushConsumer:
        consumer = PushConsumer(self.broker, "c", client_id="one", **options)
        consumer.subscribe("t", lambda message: handled.append(message.body))
        consumer.start()
        for _ in range(4):
            self.broker.run_once()
            consumer.run_once()
        return consumer


class Scene(NamedTuple):
    """What a program does, and what the next process sees. `of` is the mechanism that must save it."""

    of: str
    act: Callable[[Desk], object]
    see: Callable[[Desk], object]
    expected: object


def put_all(desk: Desk, **options: Any) -> None:
    for body in BODIES:
        desk.broker.put("t", body, queue_id=0, **options)
    desk.run()


def commit(desk: Desk) -> None:
    put_all(desk)
    desk.broker.commit("g", "t", 0, 4)


def publish_beside(desk: Desk) -> None:
    put_all(desk)
    publish(desk.path, "spark", {("t", 0): 5}, desk.broker.store.fs)


def deliver_level(desk: Desk) -> None:
    put_all(desk, delay_level=1)
    desk.run(1_000)


def deliver_timed(desk: Desk) -> None:
    put_all(desk, delay=2)
    desk.run(3_000)


def all_delayed(desk: Desk) -> list[bytes]:
    desk.run(60_000)
    return desk.bodies()


def leave_timed_unplaced(desk: Desk) -> None:
    desk.broker.put("t", b"0", delay=2, queue_id=0)


def note_attempt(desk: Desk) -> None:
    put_all(desk)
    desk.broker.note_attempt("g", "t", 0, 2, 3, error="a reason")


def attempts(desk: Desk) -> object:
    blocked = desk.broker.suspended("g")
    return desk.broker.attempts("g", "t", 0), [each.error for each in blocked.values()]


def pop_in_order(desk: Desk) -> None:
    put_all(desk)
    first, second = desk.broker.pop("p", "t", n=2, order=True)
    desk.broker.ack("p", "t", [first.receipt])
    desk.broker.nack("p", "t", second.receipt, delay=0)


def popped(desk: Desk) -> object:
    desk.run(60_000)
    return [(each.message.body, each.attempt) for each in desk.broker.pop("p", "t", n=3, order=True)]


def end_transactions(desk: Desk) -> None:
    begin = desk.broker.transactions.begin
    for outcome in ("commit", "rollback"):
        desk.broker.transactions.end(begin("t", outcome.encode(), producer_group="p", queue_id=0), outcome)  # type: ignore[arg-type]
    begin("t", b"open", producer_group="p", queue_id=0)


def transactions(desk: Desk) -> object:
    return desk.broker.transactions.open_count(), desk.bodies()


def expire_letters(desk: Desk) -> None:
    put_all(desk)
    [first, *_] = desk.broker.read("t", 0, 0, 1).messages
    desk.broker.send_back("g", first.physical_offset, delay_level=-1)
    desk.run(61_000)


def broadcast(desk: Desk) -> None:
    put_all(desk)
    desk.push([], model="broadcasting")


def handled_again(desk: Desk) -> list[bytes]:
    handled: list[bytes] = []
    desk.push(handled, model="broadcasting")
    return handled


def poll(desk: Desk) -> None:
    put_all(desk)
    consumer = PullConsumer(desk.broker, "c", client_id="one")
    consumer.subscribe("t")
    assert [len(consumer.poll(0, max_messages=2)) for _ in range(2)] == [2, 2]  # the second two may not be done


SCENES = {
    "commit": Scene("offsets", commit, lambda desk: desk.broker.committed("g", "t", 0), 4),
    "published": Scene("offsets", publish_beside, lambda desk: desk.broker.committed("spark", "t", 0), 5),
    "level": Scene("delay", deliver_level, all_delayed, BODIES),
    "timed": Scene("timer", deliver_timed, all_delayed, BODIES),
    "timed, new": Scene("timer", leave_timed_unplaced, all_delayed, [b"0"]),
    "attempts": Scene("pop", note_attempt, attempts, ({2: 3}, ["a reason"])),
    "pop": Scene("pop", pop_in_order, popped, [(b"1", 2), (b"2", 1), (b"3", 1)]),
    "transactions": Scene("transactions", end_transactions, transactions, (1, [b"commit"])),
    "letters": Scene("offsets", expire_letters, lambda desk: len(desk.broker.dead_letters("g")), 0),
    "broadcast": Scene("a member", broadcast, handled_again, []),
    "poll": Scene("a member", poll, lambda desk: desk.broker.committed("c", "t", 0), 2),
}
STATELESS = {
    "waiters": "callers that wait do not outlive their process",
    "dead letters": "what expires moves the logical start, which is saved with the offsets",
    "retention": "deletes by what is on disk",
    "statistics": "count from the opening on",
}


def open_desk(path: Path, clock: SimulatedClock, fs: FileSystem | None = None) -> Desk:
    desk = Desk(path, clock, fs)
    if desk.broker.topics.get("t") is None:
        desk.broker.topics.create("t", queues=1)
        desk.broker.groups.create("g", orderly=True, retry_policy=RetryPolicy(5, [1]))
        desk.broker.groups.create("p")
    return desk


def test_each_mechanism_has_a_scene_or_a_reason(tmp_path: Path) -> None:
    desk = open_desk(tmp_path / "mq", SimulatedClock())
    jobs = {name: job.mechanism for name, job in desk.broker._housekeeper._jobs.items()}
    desk.broker.close()
    with_state = {name for name, each in jobs.items() if type(each).persist is not BackgroundService.persist}
    assert with_state == {scene.of for scene in SCENES.values()} - {"a member"}
    assert jobs.keys() == with_state | STATELESS.keys()


@pytest.mark.parametrize("way", ["close", "kill", "power cut", "snapshot"])
@pytest.mark.parametrize("name", SCENES)
def test_the_next_process_sees_what_was_saved(tmp_path: Path, name: str, way: str) -> None:
    scene, clock, left = SCENES[name], SimulatedClock(), tmp_path / "left"
    (tmp_path / "mq").mkdir()
    fs = RecordingFileSystem(tmp_path / "mq")
    desk = open_desk(tmp_path / "mq", clock, fs)
    scene.act(desk)
    if way == "snapshot":
        report = snapshot_store(desk.path, left, saved=desk.broker.saved, fs=Unsynced())
        assert report.findings == []
        kill(desk.broker.store)
    elif way == "close":
        desk.broker.save()  # of members; a store stops its consumers first
        desk.broker.close()
        left = desk.path
    else:
        desk.broker.save()
        fs.observe()
        build_image(fs.events, random.Random(name), left, luck=way == "kill")
        kill(desk.broker.store)
    fs.dispose()
    after = open_desk(left, clock)
    assert scene.see(after) == scene.expected
    after.broker.close()


@pytest.mark.parametrize("options", [{"ordered": True}, {"workers": 1}, {"mode": "pop", "workers": 1}])
def test_messages_done_while_a_handler_runs_are_saved(tmp_path: Path, options: dict[str, Any]) -> None:
    clock = SimulatedClock()
    desk, other = open_desk(tmp_path / "mq", clock), tmp_path / "copy"
    put_all(desk)

    def handle(message: Any) -> None:
        if message.body == BODIES[3]:  # time stands still, so the last settlement is too recent for another one
            snapshot_store(desk.path, other, saved=desk.broker.saved, fs=Unsynced())

    consumer = PushConsumer(desk.broker, "c", **options)
    consumer.subscribe("t", handle)
    consumer.start()
    for _ in range(4):
        consumer.run_once()
    consumer.stop()
    desk.broker.close()
    handled: list[bytes] = []
    copy = open_desk(other, clock)
    copy.push(handled, **options)
    copy.broker.close()
    assert sorted(handled) == BODIES[3:]  # last the one whose handler had begun


def test_snapshot_has_nothing_that_came_after_its_save(tmp_path: Path) -> None:
    clock = SimulatedClock()
    desk = open_desk(tmp_path / "mq", clock)
    put_all(desk, delay_level=1)
    put_all(desk, delay=1)
    clock.advance(5_000)

    def saved(look: Callable[[], Any]) -> Any:
        found = desk.broker.saved(look)
        desk.run()  # what was due is delivered while the large files are copied
        return found

    snapshot_store(desk.path, tmp_path / "copy", saved=saved, fs=Unsynced())
    desk.broker.close()
    copy = open_desk(tmp_path / "copy", clock)
    assert sorted(all_delayed(copy)) == sorted(2 * BODIES)
    copy.broker.close()


def test_mechanisms_stand_still_while_a_snapshot_looks(tmp_path: Path) -> None:
    desk = open_desk(tmp_path / "mq", SimulatedClock())
    turn = desk.broker._housekeeper.turn
    with ThreadPoolExecutor(1) as other:
        assert not desk.broker.saved(lambda: other.submit(turn.acquire, blocking=False).result())
    desk.broker.close()


def test_save_continues_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = open_desk(tmp_path / "mq", SimulatedClock())
    commit(desk)

    def fail() -> None:
        raise StoreFullError(errno.ENOSPC, "no room for delays", "delayOffset.json", "write")

    monkeypatch.setattr(desk.broker._delay, "persist", fail)
    with pytest.raises(StoreFullError, match="no room for delays"):
        desk.broker.save()
    assert not desk.broker.offsets.dirty
    desk.broker.close()


def test_save_of_a_closed_broker_is_refused(tmp_path: Path) -> None:
    desk = open_desk(tmp_path / "mq", SimulatedClock())
    desk.broker.close()
    with pytest.raises(StoreClosedError, match="closed"):
        desk.broker.save()


def test_consumers_that_stopped_are_not_saved(tmp_path: Path) -> None:
    desk = open_desk(tmp_path / "mq", SimulatedClock())
    put_all(desk)
    desk.push([]).stop()
    with PullConsumer(desk.broker, "p") as consumer:
        consumer.subscribe("t")
        consumer.poll(0)
        assert len(desk.broker.members.on_save) == 1
    assert not desk.broker.members.on_save
    desk.broker.close()
