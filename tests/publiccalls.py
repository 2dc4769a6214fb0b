"""One call of every public method of a store, its broker and its clients, by name."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import mqstore
from mqstore import Delivery, Producer, PullConsumer, PushConsumer, Queue, QueueRef, SimpleConsumer, Store, Task
from mqstore.admin import DeadLetters
from mqstore.broker.broker import Broker
from mqstore.broker.tables.groups import GroupTable
from mqstore.broker.tables.locks import QueueLocks
from mqstore.broker.tables.members import Members, Mode
from mqstore.broker.tables.topics import TopicTable
from mqstore.broker.transactions.service import Transactions
from mqstore.client.send.transaction import Transaction

__all__ = ["CALLS", "CLOSING", "Things", "names_of", "opened"]

CLASSES: tuple[type, ...] = (
    *(Store, Broker, TopicTable, GroupTable, QueueLocks, Members, Transactions, DeadLetters, Queue, Task),
    *(Producer, Transaction, PushConsumer, SimpleConsumer, PullConsumer, Delivery),
)
NOT_CALLED = frozenset(
    [
        "Broker.run_once",  # for applications that own the clock, as the other four
        "Producer.run_once",
        "PushConsumer.run_once",
        "Transactions.run_once",
        "PushConsumer.run",  # waits for a signal
        "Queue.run",
        "Store.to_arrow",  # needs pyarrow, and reads as `Store.iter` does
    ]
)


USED_BY_AIO = frozenset(
    [
        *(
            "Queue._get_at_once",
            "Queue._when_ready",
            "SimpleConsumer._when_ready",
            "PullConsumer._when_ready",
            "PullConsumer._take",
        ),
        *("Task._ack_at_once", "Delivery._ack_at_once"),
        *("Store._close_stopped", "Store._stop_handlers", "PushConsumer._stop_handlers"),
    ]
)
"""Private methods that do what the public ones of `mqstore.aio` do."""


def names_of() -> set[str]:
    """Return the names of all methods and properties that are called: the public ones, and `USED_BY_AIO`."""
    public = {f"{kind.__name__}.{name}" for kind in CLASSES for name in dir(kind) if not name.startswith("_")}
    return public - NOT_CALLED | USED_BY_AIO


class Things:
    """A store with one of each client, and what they have in flight."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store, self.folder, self.broker = store, folder, store.broker
        self.count = 0
        store.create_topic("t", queues=1)
        for body in (b"first", b"second", b"third"):
            self.receipt = store.put("t", body, keys="k")
        self.handle = store.put("t", b"later", delay=300).recall_handle
        self.queue = store.queue("jobs")
        self.queue.put_many([b"1", b"2", b"3"])
        self.tasks = self.queue.get_many(2)
        self.producer = store.producer("p")
        self.half = self.broker.transactions.begin("t", b"half", producer_group="b")
        self.push = store.push_consumer("push", workers=1)
        self.push.subscribe("none", print)
        self.pull = store.pull_consumer("pull", client_id="one")
        self.pull.subscribe("t")
        while not self.pull.poll(timeout=5):
            pass
        self.simple = store.simple_consumer("simple", {"t": "*"})
        [self.delivery] = self.simple.receive(1, wait=5)
        self.popped = self.broker.pop("g", "t", 1)
        self.dead = store.dead_letters("jobs")

    @property
    def pop_receipt(self) -> str:
        return self.popped[0].receipt if self.popped else "0 1 60000 0 0 mqstore 0 0"

    def new(self, prefix: str = "new") -> str:
        self.count += 1
        return f"{prefix}-{self.count}"

    def receipts(self) -> list[str]:
        return [self.pop_receipt]


@contextmanager
def opened(**options: Any) -> Iterator[Things]:
    with tempfile.TemporaryDirectory() as folder, mqstore.open(f"{folder}/s", **options) as store:
        yield Things(store, Path(folder))


CLOSING = frozenset(
    [
        *(
            "Store.close",
            "Store._close_stopped",
            "Store._stop_handlers",
            "Broker.close",
            "Transactions.close",
            "Queue.shutdown",
        ),
        *(
            "Producer.close",
            "PushConsumer._stop_handlers",
            "PushConsumer.stop",
            "SimpleConsumer.close",
            "PullConsumer.close",
        ),
    ]
)
"""Calls after which others are refused."""

_ONE = QueueRef("t", 0)
_LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


def _nothing(*_: object) -> None:
    pass


def _waiter(x: Things) -> Any:
    return x.broker.add_waiter("t", 0, 1 << 40, _nothing)


def _transact(x: Things) -> None:
    with x.producer.transaction() as transaction:
        transaction.send("t", b"half")


CALLS: dict[str, Callable[[Things], Any]] = {
    "Store.broker": lambda x: x.store.broker,
    "Store.close": lambda x: x.store.close(),
    "Store._close_stopped": lambda x: x.store._close_stopped(1, 0),
    "Store.closed": lambda x: x.store.closed,
    "Store.commit_offset": lambda x: x.store.commit_offset("c", _ONE, 0),
    "Store.committed": lambda x: x.store.committed("c", _ONE),
    "Store.create_topic": lambda x: x.store.create_topic(x.new()),
    "Store.dead_letters": lambda x: x.store.dead_letters("jobs"),
    "Store.find": lambda x: x.store.find("t", key="k"),
    "Store.flush": lambda x: x.store.flush(),
    "Store.get": lambda x: x.store.get(x.receipt.message_id),
    "Store._stop_handlers": lambda x: x.store._stop_handlers(),
    "Store.iter": lambda x: list(x.store.iter("t", 0, stop=3)),
    "Store.lag": lambda x: x.store.lag("g"),
    "Store.mode": lambda x: x.store.mode,
    "Store.offset_at": lambda x: x.store.offset_at("t", 0, _LONG_AGO),
    "Store.offsets": lambda x: x.store.offsets("t", 0),
    "Store.path": lambda x: x.store.path,
    "Store.producer": lambda x: x.store.producer(x.new()),
    "Store.pull_consumer": lambda x: x.store.pull_consumer(x.new()),
    "Store.push_consumer": lambda x: x.store.push_consumer(x.new()),
    "Store.put": lambda x: x.store.put("t", b"put"),
    "Store.put_many": lambda x: x.store.put_many("t", [b"many"] * 5),
    "Store.queue": lambda x: x.store.queue(x.new()),
    "Store.queues": lambda x: x.store.queues("t"),
    "Store.read": lambda x: x.store.read("t", 0, 0),
    "Store.recall": lambda x: x.store.recall(x.handle or ""),
    "Store.recovery": lambda x: x.store.recovery,
    "Store.serve": lambda x: x.store.serve(()).close(),
    "Store.simple_consumer": lambda x: x.store.simple_consumer(x.new()),
    "Store.snapshot": lambda x: x.store.snapshot(x.folder / x.new("copy")),
    "Store.stats": lambda x: x.store.stats(),
    "Store.topics": lambda x: x.store.topics(),
    "Store.verify": lambda x: list(x.store.verify()),
    "Broker.ack": lambda x: x.broker.ack("g", "t", x.receipts()),
    "Broker.add_pop_waiter": lambda x: x.broker.remove_waiter(x.broker.add_pop_waiter("none", "t", _nothing)),
    "Broker.add_waiter": lambda x: x.broker.remove_waiter(_waiter(x)),
    "Broker.attempts": lambda x: x.broker.attempts("g", "t", 0),
    "Broker.change_invisible": lambda x: x.broker.change_invisible("g", "t", x.pop_receipt, 60),
    "Broker.check_open": lambda x: x.broker.check_open(),
    "Broker.close": lambda x: x.broker.close(),
    "Broker.closed": lambda x: x.broker.closed,
    "Broker.commit": lambda x: x.broker.commit("c", "t", 0, 0),
    "Broker.committed": lambda x: x.broker.committed("c", "t", 0),
    "Broker.dead_letter": lambda x: x.broker.dead_letter("g", "t", x.pop_receipt, "why"),
    "Broker.dead_letters": lambda x: x.broker.dead_letters("jobs"),
    "Broker.delete_group": lambda x: x.broker.delete_group("unused"),
    "Broker.release_all": lambda x: x.broker.release_all("c", "t", 0),
    "Broker.filter": lambda x: x.broker.filter("a > 1", "SQL92"),
    "Broker.find": lambda x: x.broker.find("t", unique_key=x.receipt.unique_key),
    "Broker.lag": lambda x: x.broker.lag("g"),
    "Broker.listen": lambda x: x.broker.listen("topics", _nothing),
    "Broker.local_offsets": lambda x: x.broker.local_offsets("me", "c"),
    "Broker.max_offset": lambda x: x.broker.max_offset("t", 0),
    "Broker.message_at": lambda x: x.broker.message_at(x.receipt),
    "Broker.min_offset": lambda x: x.broker.min_offset("t", 0),
    "Broker.nack": lambda x: x.broker.nack("g", "t", x.pop_receipt),
    "Broker.note_attempt": lambda x: x.broker.note_attempt("c", "t", 0, 0, 1),
    "Broker.offset_for_time": lambda x: x.broker.offset_for_time("t", 0, 0),
    "Broker.pending": lambda x: x.broker.pending("g"),
    "Broker.pop": lambda x: x.broker.pop("g", "t", 4),
    "Broker.pop_retry_topics": lambda x: x.broker.pop_retry_topics("g", "t"),
    "Broker.prometheus": lambda x: x.broker.prometheus(),
    "Broker.put": lambda x: x.broker.put(x.new(), b"to a new topic"),
    "Broker.put_async": lambda x: x.broker.put_async("t", b"async"),
    "Broker.put_many": lambda x: x.broker.put_many("t", [bytes(2_000)] * 10),
    "Broker.read": lambda x: x.broker.read("t", 0, 0),
    "Broker.recall": lambda x: x.broker.recall(x.handle or ""),
    "Broker.release": lambda x: x.broker.release("g", "t", x.receipts()),
    "Broker.remove_waiter": lambda x: x.broker.remove_waiter(_waiter(x)),
    "Broker.renew": lambda x: x.broker.renew("g", "t", x.pop_receipt, 60),
    "Broker.reset": lambda x: x.broker.reset("c", "t", 0, 0),
    "Broker.save": lambda x: x.broker.save(),
    "Broker.saved": lambda x: x.broker.saved(_nothing),
    "Broker.send_back": lambda x: x.broker.send_back("c", x.receipt.physical_offset, delay_level=3),
    "Broker.start_of": lambda x: x.broker.start_of(x.new(), "t", 0),
    "Broker.stats": lambda x: x.broker.stats(),
    "Broker.suspended": lambda x: x.broker.suspended("g"),
    "Broker.sync": lambda x: x.broker.sync(),
    "Broker.take_losses": lambda x: x.broker.take_losses("g"),
    "Broker.unlisten": lambda x: x.broker.unlisten("topics", _nothing),
    "Broker.wait": lambda x: x.broker.wait("t", 0, 1 << 40, 0),
    "Broker.wake_one": lambda x: x.broker.wake_one("g", "t"),
    "TopicTable.alter": lambda x: x.broker.topics.alter("t", perm=6),
    "TopicTable.configs": lambda x: x.broker.topics.configs(),
    "TopicTable.create": lambda x: x.broker.topics.create(x.new()),
    "TopicTable.delete": lambda x: x.broker.topics.delete("unused"),
    "TopicTable.delete_retries": lambda x: x.broker.topics.delete_retries("unused"),
    "TopicTable.expire": lambda x: x.broker.topics.expire("t"),
    "TopicTable.keep_names": lambda x: x.broker.topics.keep_names("t", 60),
    "TopicTable.ensure": lambda x: x.broker.topics.ensure(x.new()),
    "TopicTable.ensure_queues": lambda x: x.broker.topics.ensure_queues(x.new(), 2),
    "TopicTable.entered": lambda x: x.broker.topics.entered("t"),
    "TopicTable.for_priority": lambda x: x.broker.topics.for_priority(x.new()),
    "TopicTable.for_send": lambda x: x.broker.topics.for_send(x.new()),
    "TopicTable.get": lambda x: x.broker.topics.get("t"),
    "TopicTable.names": lambda x: x.broker.topics.names(),
    "TopicTable.require": lambda x: x.broker.topics.require("t"),
    "GroupTable.alter": lambda x: x.broker.groups.alter("g", consume_enable=True),
    "GroupTable.create": lambda x: x.broker.groups.create(x.new()),
    "GroupTable.delete": lambda x: x.broker.groups.delete("unused"),
    "GroupTable.forbid": lambda x: x.broker.groups.forbid("g", "none"),
    "GroupTable.get": lambda x: x.broker.groups.get("g"),
    "GroupTable.may_read": lambda x: x.broker.groups.may_read("g", "t"),
    "GroupTable.names": lambda x: x.broker.groups.names(),
    "GroupTable.require": lambda x: x.broker.groups.require(x.new()),
    "QueueLocks.begin_work": lambda x: x.broker.locks.begin_work("pull", _ONE, "one"),
    "QueueLocks.drop": lambda x: x.broker.locks.drop("nobody"),
    "QueueLocks.end_work": lambda x: x.broker.locks.end_work("pull", _ONE),
    "QueueLocks.forget": lambda x: x.broker.locks.forget("unused"),
    "QueueLocks.owner": lambda x: x.broker.locks.owner("pull", _ONE),
    "QueueLocks.renew_batch": lambda x: x.broker.locks.renew_batch("pull", [_ONE], "one"),
    "QueueLocks.snapshot": lambda x: x.broker.locks.snapshot(),
    "QueueLocks.try_lock": lambda x: x.broker.locks.try_lock("free", _ONE, "one"),
    "QueueLocks.try_lock_batch": lambda x: x.broker.locks.try_lock_batch("free", [_ONE], "one"),
    "QueueLocks.unlock_batch": lambda x: x.broker.locks.unlock_batch("free", [_ONE], "one"),
    "Members.admit": lambda x: x.broker.members.admit(x.new(), x.new(), {"t": ("TAG", "*")}, Mode("queue")),
    "Members.check": lambda x: x.broker.members.check("one", "new", {"t": ("TAG", "*")}, Mode("queue")),
    "Members.check_clustering": lambda x: x.broker.members.check_clustering("pull"),
    "Members.check_retry": lambda x: x.broker.members.check_retry("one", "new", None),
    "Members.get": lambda x: x.broker.members.get("one", "pull"),
    "Members.groups": lambda x: x.broker.members.groups(),
    "Members.members": lambda x: x.broker.members.members("pull"),
    "Members.mode": lambda x: x.broker.members.mode("pull"),
    "Members.register": lambda x: x.broker.members.register(x.new(), "many", {"t": ("TAG", "*")}, Mode("queue")),
    "Members.set_retry": lambda x: x.broker.members.set_retry("one", "none", mqstore.RetryPolicy()),
    "Members.subscriptions": lambda x: x.broker.members.subscriptions("pull"),
    "Members.unregister": lambda x: x.broker.members.unregister("one", "none"),
    "Transactions.begin": lambda x: x.broker.transactions.begin("t", b"half", producer_group="b"),
    "Transactions.close": lambda x: x.broker.transactions.close(),
    "Transactions.end": lambda x: x.broker.transactions.end(x.half, "commit"),
    "Transactions.get": lambda x: x.broker.transactions.get(x.half.transaction_id),
    "Transactions.half_message": lambda x: x.broker.transactions.half_message(x.half),
    "Transactions.on_check": lambda x: x.broker.transactions.on_check("b", None),
    "Transactions.open_count": lambda x: x.broker.transactions.open_count(),
    "Transactions.open_transactions": lambda x: x.broker.transactions.open_transactions(),
    "Transactions.persist": lambda x: x.broker.transactions.persist(),
    "Transactions.pins": lambda x: list(x.broker.transactions.pins()),
    "Transactions.prepare": lambda x: x.broker.transactions.prepare("t", b"half", {}, producer_group="b"),
    "DeadLetters.bounds": lambda x: x.dead.bounds,
    "DeadLetters.purge": lambda x: x.dead.purge(),
    "DeadLetters.replay": lambda x: x.dead.replay(dry_run=True),
    "DeadLetters.select": lambda x: list(x.dead.select()),
    "Queue.ack": lambda x: x.queue.ack(x.tasks[0]),
    "Queue.cancel": lambda x: x.queue.cancel("none"),
    "Queue.counts": lambda x: x.queue.counts(),
    "Queue.dead_letters": lambda x: x.queue.dead_letters,
    "Queue.empty": lambda x: x.queue.empty(),
    "Queue.find": lambda x: x.queue.find("k"),
    "Queue.full": lambda x: x.queue.full(),
    "Queue.get": lambda x: x.queue.get(timeout=0.01),
    "Queue._get_at_once": lambda x: x.queue._get_at_once(),
    "Queue.get_many": lambda x: x.queue.get_many(3),
    "Queue.get_nowait": lambda x: x.queue.get_nowait(),
    "Queue.join": lambda x: x.queue.join(timeout=0.01),
    "Queue.nack": lambda x: x.queue.nack(x.tasks[1]),
    "Queue.put": lambda x: x.queue.put(b"put"),
    "Queue.put_many": lambda x: x.queue.put_many([b"many"] * 3),
    "Queue.put_nowait": lambda x: x.queue.put_nowait(b"put"),
    "Queue.items": lambda x: list(x.queue.items()),
    "Queue.peek": lambda x: x.queue.peek(2),
    "Queue.purge": lambda x: x.queue.purge("dead"),
    "Queue.qsize": lambda x: x.queue.qsize(),
    "Queue.shutdown": lambda x: x.queue.shutdown(),
    "Queue.task_done": lambda x: x.queue.task_done(),
    "Queue._when_ready": lambda x: x.queue._when_ready(_nothing).cancel(),
    "Task.ack": lambda x: x.tasks[0].ack(),
    "Task._ack_at_once": lambda x: x.tasks[0]._ack_at_once(),
    "Task.attempt": lambda x: x.tasks[0].attempt,
    "Task.expires_at": lambda x: x.tasks[0].expires_at,
    "Task.extend": lambda x: x.tasks[0].extend(60),
    "Task.progress": lambda x: x.tasks[0].progress("half"),
    "Task.release": lambda x: x.tasks[0].release(),
    "Task.message": lambda x: x.tasks[0].message.body,
    "Task.nack": lambda x: x.tasks[1].nack(),
    "Task.reject": lambda x: x.tasks[1].reject("why"),
    "Task.settled": lambda x: x.tasks[0].settled,
    "Task.value": lambda x: x.tasks[0].value,
    "Producer.close": lambda x: x.producer.close(1),
    "Producer.flush": lambda x: x.producer.flush(1),
    "Producer.send": lambda x: x.producer.send("t", b"sent"),
    "Producer.send_many": lambda x: x.producer.send_many("t", [b"sent"] * 3),
    "Producer.send_oneway": lambda x: x.producer.send_oneway("t", b"sent"),
    "Producer.submit": lambda x: x.producer.submit("t", b"submitted"),
    "Producer.transaction": lambda x: x.producer.transaction(),
    "Transaction.send": _transact,
    "PushConsumer.assignment": lambda x: x.push.assignment(),
    "PushConsumer._stop_handlers": lambda x: x.push._stop_handlers(),
    "PushConsumer.pause": lambda x: x.push.pause(),
    "PushConsumer.resume": lambda x: x.push.resume(),
    "PushConsumer.seek": lambda x: x.push.seek(QueueRef("none", 0), 0),
    "PushConsumer.start": lambda x: x.push.start(),
    "PushConsumer.stats": lambda x: x.push.stats(),
    "PushConsumer.stop": lambda x: x.push.stop(1),
    "PushConsumer.subscribe": lambda x: x.push.subscribe("none", print),
    "PushConsumer.unsubscribe": lambda x: x.push.unsubscribe("none"),
    "SimpleConsumer.close": lambda x: x.simple.close(),
    "SimpleConsumer.pending": lambda x: x.simple.pending(),
    "SimpleConsumer.receive": lambda x: x.simple.receive(wait=0),
    "SimpleConsumer.subscribe": lambda x: x.simple.subscribe("t"),
    "SimpleConsumer.subscriptions": lambda x: x.simple.subscriptions,
    "SimpleConsumer.unsubscribe": lambda x: x.simple.unsubscribe("none"),
    "SimpleConsumer._when_ready": lambda x: x.simple._when_ready(_nothing).cancel(),
    "PullConsumer.assign": lambda x: x.pull.assign(_ONE),
    "PullConsumer.assignment": lambda x: x.pull.assignment(),
    "PullConsumer.close": lambda x: x.pull.close(),
    "PullConsumer.commit": lambda x: x.pull.commit(),
    "PullConsumer.committed": lambda x: x.pull.committed(_ONE),
    "PullConsumer.pause": lambda x: x.pull.pause(),
    "PullConsumer.poll": lambda x: x.pull.poll(0),
    "PullConsumer.position": lambda x: x.pull.position(_ONE),
    "PullConsumer.resume": lambda x: x.pull.resume(),
    "PullConsumer.seek": lambda x: x.pull.seek(_ONE, 0),
    "PullConsumer.subscribe": lambda x: x.pull.subscribe("t"),
    "PullConsumer._take": lambda x: x.pull._take(0, 1, 1),
    "PullConsumer.unsubscribe": lambda x: x.pull.unsubscribe("none"),
    "PullConsumer._when_ready": lambda x: x.pull._when_ready(_nothing).cancel(),
    "Delivery.attempt": lambda x: x.delivery.attempt,
    "Delivery.expires_at": lambda x: x.delivery.expires_at,
    "Delivery.receipt": lambda x: x.delivery.receipt,
    "Delivery.settled": lambda x: x.delivery.settled,
    "Delivery.message": lambda x: x.delivery.message.body,
    "Delivery.ack": lambda x: x.delivery.ack(),
    "Delivery._ack_at_once": lambda x: x.delivery._ack_at_once(),
    "Delivery.extend": lambda x: x.delivery.extend(60),
    "Delivery.nack": lambda x: x.delivery.nack(),
    "Delivery.reject": lambda x: x.delivery.reject("why"),
    "Delivery.progress": lambda x: x.delivery.progress("half"),
    "Delivery.release": lambda x: x.delivery.release(),
}
