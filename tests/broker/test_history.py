"""Histories of messages: each event has its time and reason, whatever happens to a message, and gaps are named."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import RetryPolicy, SimulatedClock, Store, StoreConfig
from mqstore.admin import cut_messages
from mqstore.jobs import trace
from tests.broker.cutsupport import cut_from, make
from tests.log.support import kill

T0 = 1_700_000_000_000
BY_PROCESS, BY_CLIENT = "in the store's process", "by a client"
LATE, REOPENED, ERROR = "not settled in time", "the store was reopened", "KeyError: 'id'"
LISTED = "dispatched to its queue and the index"
Told = tuple[Any, ...]
"""(seconds since T0, event, seconds since T0 until then, reason)"""


class World:
    """A store with time by hand, a topic `t` and a group `g`."""

    def __init__(self, path: Path) -> None:
        self.path, self.clock = path, SimulatedClock(T0)
        self.open()
        self.store.broker.topics.create("t", queues=1)
        self.store.broker.groups.create("g", retry_policy=RetryPolicy(3, [30]))

    def open(self, **options: Any) -> None:
        config = StoreConfig(clock=self.clock, segment_bytes=1 << 16, index_slots=64, index_entries=1024, **options)
        self.store: Store = mqstore.open(self.path, config=config)

    def put(self, **options: Any) -> Any:
        return self.store.put("t", b"x", keys="k", **options)

    @property
    def broker(self) -> Any:
        return self.store.broker

    def one_attempt(self) -> None:
        self.broker.groups.alter("g", retry_policy=RetryPolicy(1, [1]))

    def pop(self, **options: Any) -> None:
        [delivery] = self.broker.pop("g", "t", **options)
        self.receipt = str(delivery.receipt)

    def ack(self) -> None:
        self.broker.ack("g", "t", [self.receipt])

    def nack(self, delay: float | None) -> None:
        self.broker.nack("g", "t", self.receipt, delay, error=ERROR)

    def renew(self) -> None:
        self.broker.renew("g", "t", self.receipt, 60)

    def release(self, **options: Any) -> None:
        self.broker.release("g", "t", [self.receipt], **options)

    def transaction(self, end: str) -> None:
        properties = {"KEYS": "k", "UNIQ_KEY": "U" * 32}
        handle = self.broker.transactions.prepare("t", b"x", properties, producer_group="p", queue_id=0)
        self.later(2)
        self.broker.transactions.end(handle, end)

    def reopen(self, seconds: float, *, killed: bool = False) -> None:
        if killed:
            kill(self.store.log)
        else:
            self.store.close()
        self.clock.advance(round(seconds * 1000))
        self.open()

    def later(self, seconds: float) -> None:
        self.clock.advance(round(seconds * 1000))
        self.broker.run_once()

    def told(self, what: str = "k") -> list[Told]:
        [history] = trace(self.path, what, ["g"]).messages
        return [
            (_s(event.at_ms), event.event, _s(event.until_ms), event.reason) if event.until_ms else
            (_s(event.at_ms), event.event, event.reason)
            for event in history.events
        ]  # fmt: skip

    def state(self, what: str = "k") -> str:
        [history] = trace(self.path, what, ["g"]).messages
        return history.groups[0].state


def _s(at_ms: int | None) -> float | None:
    return None if at_ms is None else (at_ms - T0) / 1000


@pytest.fixture
def world(tmp_path: Path) -> Any:
    made = World(tmp_path / "s")
    yield made
    made.store.close()


STORED = (0, "stored", LISTED)
LIVES: dict[str, tuple[Callable[[World], Any], list[Told], str]] = {
    "acknowledged": (
        lambda w: (w.put(), w.pop(local=False), w.later(5), w.ack()),
        [STORED, (0, "delivered", 60, BY_CLIENT), (5, "acknowledged", "")], "done"),
    "failed": (
        lambda w: (w.put(), w.later(2), w.pop(), w.nack(None), w.later(40)),
        [STORED, (2, "delivered", 62, BY_PROCESS), (2, "failed", 32, ERROR), (42, "retry", ERROR)], "ready"),
    "failed and popped": (
        lambda w: (w.put(), w.later(2), w.pop(), w.nack(0), w.later(1), w.pop(local=False)),
        [STORED, (2, "delivered", 62, BY_PROCESS), (2, "failed", 2, ERROR), (3, "retry", ERROR),
         (3, "delivered", 63, BY_CLIENT)], "leased"),
    "expired": (
        lambda w: (w.put(), w.pop(invisible=10), w.later(25)),
        [STORED, (0, "delivered", 10, BY_PROCESS), (10, "lease ended", LATE), (25, "retry", "")], "ready"),
    "renewed": (
        lambda w: (w.put(), w.pop(local=False), *(w.later(20) or w.renew() for _ in range(3)), w.ack()),
        [STORED, (0, "delivered", 60, BY_CLIENT), (60, "extended", 120, ""), (60, "acknowledged", "")], "done"),
    "released": (
        lambda w: (w.put(), w.pop(), w.release(), w.later(1), w.pop(), w.release(delay=7), w.later(20)),
        [STORED, (0, "delivered", 60, BY_PROCESS), (0, "released", ""), (1, "delivered", 61, BY_PROCESS),
         (1, "released", 8, "")], "ready"),
    "rejected": (
        lambda w: (w.put(), w.pop(), w.later(1), w.broker.dead_letter("g", "t", w.receipt, "no such address")),
        [STORED, (0, "delivered", 60, BY_PROCESS), (1, "dead letter", "no such address")], "dead"),
    "last attempt": (
        lambda w: (w.one_attempt(), w.put(), w.pop(), w.nack(None)),
        [STORED, (0, "delivered", 60, BY_PROCESS), (0, "dead letter", f"attempt 1 of 1 failed: {ERROR}")], "dead"),
    "last attempt expires": (
        lambda w: (w.one_attempt(), w.put(), w.pop(invisible=10), w.later(10)),
        [STORED, (0, "delivered", 10, BY_PROCESS), (10, "lease ended", LATE),
         (10, "dead letter", "attempt 1 of 1 ended without acknowledgement")], "dead"),
    "killed": (
        lambda w: (w.put(), w.pop(invisible=3600), w.reopen(5, killed=True), w.later(0)),
        [STORED, (0, "delivered", 3600, BY_PROCESS), (5, "process ended", REOPENED), (5, "retry", "")], "ready"),
    "closed": (
        lambda w: (w.put(), w.pop(invisible=10), w.reopen(500), w.later(0)),
        [STORED, (0, "delivered", 10, BY_PROCESS), (500, "process ended", REOPENED), (500, "retry", "")], "ready"),
    "in order": (
        lambda w: (w.put(), w.pop(order=True, invisible=10), w.later(15), w.pop(order=True), w.nack(5), w.later(5),
                   w.pop(order=True), w.ack()),
        [STORED, (0, "delivered", 10, BY_PROCESS), (10, "lease ended", LATE), (15, "delivered", 75, BY_PROCESS),
         (15, "failed", 20, ERROR), (20, "delivered", 80, BY_PROCESS), (20, "acknowledged", "then or before")],
        "done"),
    "in order, killed": (
        lambda w: (w.put(), w.pop(order=True), w.later(5), w.reopen(0, killed=True), w.pop(order=True)),
        [STORED, (0, "delivered", 60, BY_PROCESS), (5, "process ended", REOPENED), (5, "delivered", 65, BY_PROCESS)],
        "ready"),
    "reset": (
        lambda w: (w.put(), w.pop(local=False), w.ack(), w.later(3), w.broker.reset("g", "t", None, "earliest"),
                   w.later(1), w.pop(local=False)),
        [STORED, (0, "delivered", 60, BY_CLIENT), (0, "acknowledged", ""),
         (3, "reset", "the group was set to offset 0"), (4, "delivered", 64, BY_CLIENT)], "leased"),
    "by offset": (
        lambda w: (place := w.put().physical_offset, w.later(1),
                   w.broker.send_back("g", place, delay=4, reason="ValueError: \x1b[31m no"),
                   *(w.later(1) for _ in range(6))),
        [STORED, (1, "delayed", 5, "ValueError:  [31m no"), (5, "retry", "ValueError:  [31m no")], "ready"),
    "delayed": (lambda w: w.put(delay=50), [(0, "delayed", 50, LISTED)], "delayed"),
    "recalled": (
        lambda w: (handle := w.put(delay=50).recall_handle, w.later(1), w.broker.recall(handle)),
        [(0, "delayed", 50, "recalled"), (1, "recall", LISTED)], "not started"),
    "rolled back": (
        lambda w: w.transaction("rollback"), [(0, "prepared", "committed or rolled back")], "not started"),
    "committed": (
        lambda w: (w.transaction("commit"), w.later(4)),
        [(0, "prepared", "committed"), (2, "stored", LISTED)], "not started"),
    "committed, and killed before the operation was written": (
        lambda w: (w.transaction("commit"), kill(w.store.log), w.open()),
        [(0, "prepared", "committed"), (2, "stored", LISTED)], "not started"),
    "stored with an expiry": (
        lambda w: w.put(properties={"mqstore_expires_ms": str(T0 + 7000)}), [(0, "stored", 7, LISTED)], "not started"),
}  # fmt: skip


@pytest.mark.parametrize("beside", [True, False], ids=["beside the writer", "closed"])
@pytest.mark.parametrize("name", LIVES)
def test_events_have_their_time_and_reason(world: World, name: str, beside: bool) -> None:
    happens, events, state = LIVES[name]
    happens(world)
    world.later(0)
    if not beside:
        world.store.close()

    assert world.told() == events
    assert world.state() == state


# -- items of queues, and what finds them ------------------------------------------------------------------------------


def test_items_of_a_queue_are_found_by_id_name_and_place(world: World) -> None:
    queue = world.store.queue("jobs", retry=RetryPolicy(3, [1]))
    plain, named = queue.put(b"plain"), queue.put(b"named", key="o-1", unique="report 7")
    with pytest.raises(KeyError), queue.get():
        raise KeyError("id")
    world.later(2)
    world.store.close()
    happened = ["stored", "delivered", "failed", "retry"]
    for what in (plain.id, "jobs/0@0", str(plain.physical_offset), "%RETRY%jobs+jobs/0@0"):
        [history] = trace(world.path, what).messages
        assert [event.event for event in history.events] == happened, what
        assert [(each.group, each.state, each.attempt) for each in history.groups] == [("jobs", "ready", 2)], what
    for what in (named.id, "o-1", "report 7", "jobs/0@1"):
        [history] = trace(world.path, what).messages
        assert (history.unique_key, [event.event for event in history.events]) == (named.id, ["stored"]), what


def test_items_that_nobody_gets_are_cancelled_or_expired(world: World) -> None:
    queue = world.store.queue("jobs")
    cancelled, expired = queue.put(b"a", key="a"), queue.put(b"b", key="b", expires=5)
    world.later(1)
    assert queue.cancel(cancelled)
    world.later(9)
    assert queue.qsize() <= 1
    with pytest.raises(mqstore.QueueEmpty):
        queue.get(block=False)
    world.later(0)

    for receipt, event in ((cancelled, (1, "cancelled", "")), (expired, (10, "expired", ""))):
        [history] = trace(world.path, receipt.id).messages
        assert [(_s(each.at_ms), each.event, each.reason) for each in history.events[1:]] == [event]
        assert history.groups[0].state == "done"


def test_key_of_many_messages_shows_the_newest(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqstore.broker.admin.history._MESSAGES", 3)
    receipts = [world.put() for _ in range(5)]
    world.later(0)

    found = trace(world.path, "k")

    assert [history.unique_key for history in found.messages] == [each.id for each in receipts[2:]]
    assert found.missed == ("2 older messages that have it, too: give an id",)


def test_only_asked_groups_are_shown(world: World) -> None:
    world.put()
    for group in ("g", "h"):
        world.broker.pop(group, "t")
    world.later(0)

    [history] = trace(world.path, "k", ["h"]).messages

    assert {event.group for event in history.events} == {None, "h"}
    assert [(each.group, each.state) for each in history.groups] == [("h", "leased")]


@pytest.mark.parametrize("order", [False, True])
def test_client_of_a_server_that_fails_is_named(world: World, order: bool) -> None:
    world.put()
    for seconds in (0, 100):
        world.later(seconds)
        found = world.broker.pop("g", "t", local=False, order=order)
        world.broker.items.note_holder("g", found, "worker-7")
        if not seconds:
            world.broker.nack("g", "t", found[0].receipt, 1, error="busy")
    world.later(100)
    world.later(0)

    [history] = trace(world.path, "k").messages
    named = [(event.event, event.holder) for event in history.events if event.holder]
    assert named == [("failed", "worker-7"), *[("lease ended", "worker-7")] * (not order)]


def test_each_delivery_of_an_answer_names_its_client(world: World) -> None:
    for topic in "ttu":
        world.store.put(topic, b"x", keys="k")
    found = [each for topic in "tu" for each in world.broker.pop("g", topic, 9, local=False)]
    world.broker.items.note_holder("g", found, "worker-7")
    world.broker.ack("g", "t", [found[0].receipt])
    world.later(100)
    ended = [event.holder for each in trace(world.path, "k").messages for event in each.events if event.holder]
    assert ended == ["worker-7"] * 2


@pytest.mark.parametrize("order", [False, True])
def test_handler_that_was_running_at_a_kill_has_failed(world: World, order: bool) -> None:
    """A push consumer had one message in its handler, and had only fetched the other."""
    receipts = [world.store.put("t", b"x", keys=key) for key in ("running", "fetched")]
    world.broker.pop("g", "t", 2, order=order)
    folder = world.path / "config" / "begun"
    folder.mkdir(exist_ok=True)
    head = json.dumps({"group": "g", "workers": 1, "cells": 3}).encode()
    (folder / "0").write_bytes(head.ljust(512, b"\0") + struct.pack("<3q", receipts[0].physical_offset, -1, -1))
    world.reopen(5, killed=True)
    world.later(0)
    world.broker.pop("g", "t", 2, order=order)
    world.later(0)

    told = {
        key: [each for each in world.told(key) if each[1] in ("failed", "released")] for key in ("running", "fetched")
    }
    assert told["running"] == [(5, "failed", 5, "the process ended while it was handled")]
    assert told["fetched"] == [(5, "released", "the store was reopened")]
    [running, fetched] = [trace(world.path, key).messages[0].events for key in ("running", "fetched")]
    assert [event.attempt for event in running if event.event == "delivered"] == [1, 2]
    assert [event.attempt for event in fetched if event.event == "delivered"] == [1, 1]


# -- records that repeat, or are missing -------------------------------------------------------------------------------


def test_folding_and_compaction_repeat_no_event(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqstore.broker.pop.poplog.compaction._REPLAY_RECORDS", 4)
    world.put()
    world.pop()
    world.nack(3000)
    world.broker.pop("g", "t", order=False)
    for number in range(20):
        world.store.put("t", b"other", keys=f"o-{number}")
        world.later(5)
        world.pop(local=False)
        world.ack()
    assert world.store.offsets("rmq_sys_pop_log", 0)[1] > 20

    assert world.told() == [STORED, (0, "delivered", 60, BY_PROCESS), (0, "failed", 3000, ERROR)]
    assert world.state() == "retry"


def test_compaction_repeats_no_cancellation(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqstore.broker.pop.poplog.compaction._REPLAY_RECORDS", 4)
    queue = world.store.queue("jobs")
    queue.put(b"held")
    receipt = queue.put(b"cancelled")
    queue.get()
    assert queue.cancel(receipt)
    for _ in range(20):
        world.put()
        world.later(5)
        world.pop(local=False)
        world.ack()
    records = [bytes(each.body) for each in world.store.iter("rmq_sys_pop_log") if each.tag == "skp"]
    assert len(records) > 1

    [history] = trace(world.path, receipt.id).messages
    assert [event.event for event in history.events] == ["stored", "cancelled"]


def test_deleted_first_copy_is_named(world: World) -> None:
    receipt = world.put(unique_key="U" * 32)
    world.store.put("t", bytes(65_000))
    for _ in range(2):
        for delivery in world.broker.pop("g", "t", 2):
            world.broker.nack("g", "t", delivery.receipt, 0)
        world.later(1)
    world.store.close()
    first, *_ = sorted((world.path / "commitlog").iterdir())
    first.unlink()

    found = trace(world.path, receipt.id)

    assert [event.event for event in found.messages[0].events][:2] == ["retry", "delivered"]
    assert found.missed == (f"events of {receipt.id} before %RETRY%g+t: retention has deleted the records",)


def test_hostile_records_of_deliveries_are_passed_over(world: World) -> None:
    world.put()
    world.later(0)
    for tag, body in (
        ("ck", b'{"t":"t","c":"g","q":0,"so":0,"pt":1e99,"it":1,"d":[0],"nx":1}'),
        ("ck", b'{"t":"t","c":["g"],"q":0,"so":0,"pt":5,"it":1,"d":[0],"nx":1}'),
        ("ck", b'{"t":"t","c":"g","q":0,"so":0,"pt":"5","it":[],"d":{},"nx":1}'),
        ("ack", b'{"k":[0],"o":5}'),
        ("skp", b'{"t":"t","c":"g","q":0,"o":7}'),
        ("rst", b'{"t":"t","c":"g","q":0,"o":"x"}'),
        ("chg", b'{"k":0,"o":0,"pt":{},"it":0}'),
        ("rev", b"t not json"),
    ):
        world.store.log.append("rmq_sys_pop_log", 0, body, properties={"TAGS": tag})
    world.later(0)

    assert world.told() == [STORED]


def test_cut_messages_are_found_with_the_time_of_the_cut(tmp_path: Path) -> None:
    receipts = make(tmp_path)
    cut_from(tmp_path, receipts[20])
    [(file, _), *_] = cut_messages(tmp_path)

    found = trace(tmp_path, receipts[25].id)

    cut_ms = int(file.name.rpartition("-")[2].partition(".")[0])
    events = [(event.at_ms, event.event) for history in found.messages for event in history.events]
    assert (cut_ms, "cut") in events
    assert {event for _, event in events} == {"stored", "cut"}


# -- the log of the program --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [False, True])
def test_expired_leases_are_logged_once_in_a_while(world: World, caplog: pytest.LogCaptureFixture, order: bool) -> None:
    caplog.set_level(logging.INFO, "mqstore")
    for _ in range(3):
        world.put()
    for _ in range(2):
        assert len(world.broker.pop("g", "t", 3, order=order, invisible=5)) == 3
        world.later(5)
    if order:
        world.broker.pop("g", "t", 3, order=True)
    lines = [each.getMessage() for each in caplog.records if "in time" in each.getMessage()]
    assert lines[0].startswith("group g did not settle message 0 of t/0 in time, and gets it again")
    assert len(lines) == 1


def test_failed_and_released_deliveries_are_not_logged_as_expired(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mqstore")
    for name in ("failed", "released"):
        LIVES[name][0](world)
    world.reopen(0)
    world.later(0)
    assert "in time" not in caplog.text


def test_delivery_in_order_that_a_kill_ended_is_not_logged_as_expired(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mqstore")
    LIVES["in order, killed"][0](world)
    assert "in time" not in caplog.text
