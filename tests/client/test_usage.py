# ruff: noqa: N818, T201  (as the examples have it)
"""The examples that the library was designed by, as they stand there but for what they leave
open: what handlers do, and when one has seen enough."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import mqstore

LONG_S = 20.0


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[mqstore.Store]:
    monkeypatch.chdir(tmp_path)
    with mqstore.open("var/mq") as store:
        yield store


def test_1_open_put_put_many_read_by_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with mqstore.open("var/mq") as store:
        store.create_topic("orders", queues=4)
        r = store.put("orders", b"hello", tag="created", keys=["o-1", "cust-7"])
        store.put_many("orders", (f"n={i}".encode() for i in range(10_000)))
        for m in store.read(*r.queue, offset=r.offset, max_messages=10):
            print(m.offset, m.tag, m.text())

    assert capsys.readouterr().out.startswith("0 created hello\n")


def test_2_a_persistent_queue_in_five_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fetched: list[bytes] = []
    q = mqstore.open("var/mq").queue("jobs", visibility=30)
    q.put(b"https://example.org")
    for task in q:
        with task:
            fetched.append(task.value)
    q._broker.close()

    assert fetched == [b"https://example.org"]


def test_3_queue_queue_style(store: mqstore.Store) -> None:
    q = store.queue("jobs")
    crunched: list[bytes] = []

    def worker() -> None:
        while True:
            try:
                task = q.get()
            except mqstore.QueueShutDown:
                return
            crunched.append(task.value)
            q.task_done()

    threads = [threading.Thread(target=worker, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    items = [f"{i}".encode() for i in range(100)]
    q.put_many(items)
    assert q.join(LONG_S)
    q.shutdown()
    for thread in threads:
        thread.join(LONG_S)

    assert sorted(crunched) == sorted(items)


def test_4_a_producer_and_sends_that_do_not_wait(store: mqstore.Store) -> None:
    lines = [b"one", b"two", b"three"]
    with store.producer(durability="flush") as p:
        futures = [p.submit("metrics", line) for line in lines]
        p.flush()
        last = futures[-1].result()

    assert store.get(last.message_id).body == b"three"


def test_5_a_push_consumer(store: mqstore.Store) -> None:
    class RateLimited(Exception):
        wait = 0.05

    class BadOrder(Exception):
        pass

    booked: list[object] = []
    done = threading.Event()

    def book(order: dict[str, object]) -> None:
        if order["id"] == 2 and not booked.count("limited"):
            booked.append("limited")
            raise RateLimited
        if order["id"] == 3:
            raise BadOrder("no such customer")
        booked.append(order["id"])
        if {1, 2} <= set(booked):
            done.set()

    consumer = store.push_consumer("billing", workers=8)

    @consumer.subscribe("orders", tags="paid || refunded")
    def handle(msg: mqstore.Message) -> None:
        try:
            book(msg.json())
        except RateLimited as e:
            raise mqstore.Retry(delay=e.wait) from e
        except BadOrder as e:
            raise mqstore.Reject(str(e)) from e

    for number, tag in ((1, "paid"), (2, "refunded"), (3, "paid"), (4, "created")):
        store.put("orders", b'{"id": %d}' % number, tag=tag)

    def stop() -> None:
        done.wait(LONG_S)
        consumer.stop()

    threading.Thread(target=stop).start()
    consumer.run()

    assert sorted(booked, key=str) == [1, 2, "limited"]
    assert [letter.properties["dlq_reason"] for letter in store.dead_letters("billing")] == ["no such customer"]


def test_6_in_order(store: mqstore.Store) -> None:
    shipped: list[bytes] = []
    stop_event = threading.Event()

    def ship(message: mqstore.Message) -> None:
        shipped.append(message.body)
        if message.body == b"done":
            stop_event.set()

    for step in (b"created", b"paid", b"done"):
        store.put("orders", step, message_group="o-42")
    with store.push_consumer("shipping", ordered=True, suspend=2.0) as c:
        c.subscribe("orders", ship)
        stop_event.wait(LONG_S)

    assert shipped == [b"created", b"paid", b"done"]


def test_7_a_simple_consumer(store: mqstore.Store) -> None:
    sent: list[bytes] = []
    store.put("mail", b"hello")
    with store.simple_consumer("mailer", visibility=30) as c:
        c.subscribe("mail")
        for delivery in c.receive(16, wait=5):
            with delivery as msg:
                if len(msg.body) > 1 << 20:
                    delivery.extend(300)
                sent.append(msg.body)

    assert sent == [b"hello"]
    assert store.lag("mailer") == dict.fromkeys(store.queues("mail"), 0)


def test_8_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ahead = mqstore.StoreConfig(max_delay=timedelta(days=3660))  # else that morning is too far away
    with mqstore.open("var/mq", config=ahead) as store:
        store.put("reminders", b"in 15 min", delay=timedelta(minutes=15))
        h = store.put("reminders", b"at nine", deliver_at=datetime(2030, 1, 1, 9, tzinfo=UTC)).recall_handle
        assert h is not None
        assert store.recall(h)
        store.put("reminders", b"level 3 = 10 s", delay_level=3)

        stats = store.broker.stats()
        assert store.offsets("reminders", 0) == (0, 0)
        assert stats.delay_levels[3] == (0, 1)


def test_9_a_retry_policy_and_dead_letters(store: mqstore.Store, capsys: pytest.CaptureFixture[str]) -> None:
    policy = mqstore.backoff(1, 5, 30, 300, max_attempts=5)
    assert [policy.delay(attempt) for attempt in range(1, 6)] == [1, 5, 30, 300, 300]
    growing = mqstore.exponential(initial=1, factor=2, maximum=600)
    assert [growing.delay(attempt) for attempt in (1, 2, 3, 17)] == [1, 2, 4, 600]

    with store.push_consumer("billing", retry=policy) as consumer:
        consumer.subscribe("orders", lambda message: None)
    config = store.broker.groups.need("billing")
    assert config.retry_policy == policy
    receipt = store.put("orders", b"x", unique_key="k-1")
    store.broker.send_back("billing", receipt.physical_offset, delay_level=-1, reason="bad")
    dlq = store.dead_letters("billing")
    for m in dlq:
        print(m.properties["dlq_reason"], m.unique_key)
    assert dlq.replay().topics == {"orders": 1}

    assert capsys.readouterr().out == "bad k-1\n"


def test_10_asyncio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    processed: list[bytes] = []

    async def main() -> None:
        async with mqstore.aio.open("var/mq") as store:
            await store.put("orders", b"x")
            async with store.simple_consumer("web", topics={"orders": "*"}) as c:
                async for delivery in c:
                    async with delivery as msg:
                        processed.append(msg.body)
                    break

    asyncio.run(main())

    assert processed == [b"x"]


def test_11_a_transaction(store: mqstore.Store) -> None:
    class Database:
        def __init__(self, works: bool) -> None:
            self.works = works

        def commit(self) -> None:
            if not self.works:
                raise RuntimeError("no")

    with store.producer() as producer:
        for db in (Database(True), Database(False)):
            try:
                with producer.transaction() as tx:
                    tx.send("orders", b"paid")
                    db.commit()
            except RuntimeError:
                pass

    assert [message.body for message in store.iter("orders")] == [b"paid"]


def test_12_a_second_process(store: mqstore.Store) -> None:
    reader = """
import mqstore
with mqstore.open("var/mq", mode="r") as ro:
    print("ready", flush=True)
    for m in ro.iter("orders", start="latest", follow=True):
        print(m.text())
        break
"""
    store.put("orders", b"old")
    with subprocess.Popen([sys.executable, "-c", reader], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        stop = threading.Event()

        def put() -> None:
            while not stop.wait(0.05):  # "latest" is where it is once it has looked
                store.put("orders", b"new")

        thread = threading.Thread(target=put)
        thread.start()
        assert process.stdout.readline() == "new\n"
        stop.set()
        thread.join()
        assert process.wait(LONG_S) == 0
