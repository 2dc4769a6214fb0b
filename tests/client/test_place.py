"""A store stays in the directory in which it was opened: whatever the working directory is, and whoever removes it.

`store = mqstore.open("mq")` kept the relative path, so that later files were opened below the working directory of that
time. After a `chdir` to a folder with another "mq", 256 of 300 acknowledged puts went into the other store's log.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import mqstore
import mqstore.aio
from mqstore import MQStoreError, QueueRef, Store, StoreConfig, jobs
from mqstore.admin import DeadLetters
from mqstore.broker.broker import Broker
from mqstore.errors import MissingFileError, QueueEmpty
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.store import MessageStore
from tests.client.support import ended, in_thread, until
from tests.tools.support import mqstore as command

Call = Callable[[Any], object]
REF = QueueRef("t", 0)
CONFIG = StoreConfig(segment_bytes=1 << 14, consumequeue_units=64)  # small: many files are opened later
NOW = datetime(2024, 1, 1, tzinfo=UTC)
NO_FILE = {"close", "close_halted", "closed", "halt", "mode", "path", "recovery", "run_once"}
"""Names that end a store, or that only show values in memory."""


def _subscribed(consumer: Any) -> Any:
    consumer.subscribe("t")
    return consumer


def _with(make: Call, *calls: Call) -> Call:
    def call(store: Any) -> object:
        made = make(store)
        return [made, *(each(made) for each in calls)]

    return call


def _pushed(store: Store) -> None:
    seen = threading.Event()
    consumer = store.push_consumer("push", start="earliest")
    consumer.subscribe("t", lambda message: seen.set())
    with consumer:
        assert seen.wait(20)


def _transaction(producer: mqstore.Producer) -> None:
    with producer.transaction() as transaction:
        transaction.send("t", b"here")


def _dead(store: Store) -> DeadLetters:
    return store.dead_letters("jobs")


def _settled(queue: mqstore.Queue, settle: Call) -> object:
    queue.put(b"here")
    return settle(queue.get(timeout=20))


STORE: dict[str, Call] = {
    "broker": lambda store: store.broker.stats(),
    "commit_offset": lambda store: store.commit_offset("g", REF, 1, durability="flush"),
    "committed": lambda store: store.committed("g", REF),
    "create_topic": lambda store: store.create_topic("new"),
    "dead_letters": _with(_dead, lambda letters: list(letters.select())),
    "find": lambda store: store.find("t", key="k"),
    "flush": lambda store: store.flush(),
    "get": lambda store: store.get(next(store.iter("t")).message_id).body,
    "iter": lambda store: [message.body for message in store.iter("t")],
    "lag": lambda store: store.lag("g"),
    "offset_at": lambda store: store.offset_at("t", 0, NOW),
    "offsets": lambda store: store.offsets("t", 0),
    "producer": _with(lambda store: store.producer(), lambda made: made.send("t", b"here"), _transaction),
    "pull_consumer": _with(
        lambda store: _subscribed(store.pull_consumer("pull", start="earliest")), lambda made: made.poll(20)
    ),
    "push_consumer": _pushed,
    "put": lambda store: [store.put("t", b"here" + bytes(500), queue_id=0, keys="k") for _ in range(100)],
    "put_many": lambda store: store.put_many("t", [b"here" + bytes(500)] * 100, queue_id=0, durability="flush"),
    "queue": lambda store: _settled(store.queue("jobs"), lambda task: task.ack()),
    "queues": lambda store: store.queues("t"),
    "read": lambda store: [message.body for message in store.read("t", 0, 0)],
    "recall": lambda store: store.recall(store.put("t", b"here", delay=60).recall_handle),
    "simple_consumer": _with(
        lambda store: _subscribed(store.simple_consumer("simple", start="earliest")), lambda made: made.receive(wait=20)
    ),
    "snapshot": lambda store: store.snapshot(store.path.with_name("copy")),
    "stats": lambda store: store.stats(),
    "to_arrow": lambda store: store.to_arrow("t").column("body"),
    "topics": lambda store: store.topics(),
    "verify": lambda store: [str(finding) for finding in store.verify()],
}
QUEUE: dict[str, Call] = {
    "ack": lambda queue: _settled(queue, queue.ack),
    "dead_letters": lambda queue: list(queue.dead_letters.select()),
    "empty": lambda queue: queue.empty(),
    "full": lambda queue: queue.full(),
    "get": lambda queue: _settled(queue, lambda task: task.ack()),
    "_get_at_once": lambda queue: queue._get_at_once(),
    "get_many": lambda queue: _settled(queue, lambda task: [task.ack(), queue.get_many(3)]),
    "get_nowait": lambda queue: queue.get_nowait(),
    "join": lambda queue: queue.join(0.001),
    "nack": lambda queue: _settled(queue, lambda task: queue.nack(task, 0)),
    "put": lambda queue: queue.put(b"here", delay=60),
    "put_many": lambda queue: queue.put_many([b"here" + bytes(500)] * 100),
    "put_nowait": lambda queue: queue.put_nowait(b"here"),
    "qsize": lambda queue: queue.qsize(),
    "shutdown": lambda queue: None,  # it changes only memory
    "task_done": lambda queue: _settled(queue, lambda task: queue.task_done()),
    "_when_ready": lambda queue: queue._when_ready(lambda: None).cancel(),
}
BROKER: dict[str, Call] = {
    "committed": lambda broker: broker.committed("g", "t", 0),
    "commit": lambda broker: broker.commit("g", "t", 0, 1),
    "delete_group": _with(lambda broker: broker.groups.create("gone") and broker, lambda b: b.delete_group("gone")),
    "lag": lambda broker: broker.lag("g"),
    "max_offset": lambda broker: broker.max_offset("t", 0),
    "min_offset": lambda broker: broker.min_offset("t", 0),
    "pending": lambda broker: broker.pending("jobs"),
    "pop": lambda broker: [broker.pop("popper", "t", n=32) for _ in range(50)],
    "put_async": lambda broker: broker.put_async("t", b"here", durability="flush").result(20),
    "reset": lambda broker: broker.reset("g", "t", 0, 0),
    "save": lambda broker: broker.save(),
    "suspended": lambda broker: broker.suspended("g"),
}
LOG: dict[str, Call] = {
    "append": lambda log: log.append("t", 0, b"here"),
    "at": lambda log: log.at(log.min_offset),
    "clean": lambda log: log.clean(),
    "dispatch": lambda log: log.dispatch(),
    "find": lambda log: log.find("t", key="k"),
    "flush": lambda log: log.flush(),
    "get": lambda log: log.get("t", 0, 0),
    "iter": lambda log: [message.body for message in log.iter("t")],
    "offset_at": lambda log: log.offset_at("t", 0, NOW),
    "queues": lambda log: log.queues("t"),
    "read": lambda log: log.read("t"),
    "take_inbox": lambda log: log.take_inbox(),
    "topics": lambda log: log.topics(),
    "verify": lambda log: [str(finding) for finding in log.verify()],
}
READER = {name: call for name, call in LOG.items() if hasattr(ReadOnlyMessageStore, name)}
TABLES: dict[str, tuple[Callable[[Store], Any], dict[str, Call]]] = {
    "store": (lambda store: store, STORE),
    "queue": (lambda store: store.queue("jobs"), QUEUE),
    "broker": (lambda store: store.broker, BROKER),
    "log": (lambda store: store.log, LOG),
}


def test_calls_are_complete() -> None:
    for kind, table in ((Store, STORE), (mqstore.Queue, QUEUE)):
        assert {name for name in dir(kind) if name[0] != "_"} - NO_FILE == {name for name in table if name[0] != "_"}
    for kind, table in ((Broker, BROKER), (MessageStore, LOG)):
        assert set(table) <= set(dir(kind))


def _filled(folder: Path, word: bytes) -> Path:
    folder.mkdir()
    with mqstore.open(folder / "mq", config=CONFIG) as store:
        store.put_many("t", [word + bytes(400)] * 100, queue_id=0)
        store.put("t", word, queue_id=0, keys="k")
        store.commit_offset("g", REF, 1)
        store.queue("jobs").put(word)
    return folder


def _bytes_of(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Stand where "mq" is a store, and move to a folder where "mq" is another one, which nobody may touch."""
    _filled(tmp_path / "here", b"here")
    there = _filled(tmp_path / "there", b"there")
    before = _bytes_of(there)
    monkeypatch.chdir(tmp_path / "here")
    yield partial(os.chdir, there)
    monkeypatch.chdir(tmp_path)
    assert _bytes_of(there) == before


@pytest.mark.parametrize("kind", TABLES)
def test_chdir_changes_no_call_of_a_writer(moves: Callable[[], None], tmp_path: Path, kind: str) -> None:
    make, table = TABLES[kind]
    results = {}
    with mqstore.open("mq", config=CONFIG) as store:
        made = make(store)
        moves()
        for name, call in table.items():
            with suppress(QueueEmpty):
                results[name] = call(made)
    assert "there" not in repr(results).replace("/there", "")
    with mqstore.open(tmp_path / "here" / "mq", config=CONFIG) as store:
        assert store.recovery.clean_shutdown
        assert {message.body[:4] for message in store.iter("t")} == {b"here"}


def test_chdir_changes_no_call_of_a_reader(moves: Callable[[], None], tmp_path: Path) -> None:
    with mqstore.open("mq", "r") as store, ReadOnlyMessageStore("mq") as log:
        following = store.iter("t", 0, start="latest", follow=True)
        thread, outcome = in_thread(lambda: [next(following).body for _ in range(300)])
        moves()
        for name, call in READER.items():
            assert "there" not in repr(call(log)), name
        for name in ("find", "get", "iter", "read", "to_arrow", "topics", "verify"):
            assert "there" not in repr(STORE[name](store)), name
        with mqstore.open(tmp_path / "here" / "mq", config=CONFIG) as writer:
            writer.put_many("t", [b"here" + bytes(400)] * 400, queue_id=0)
            assert {body[:4] for body in ended(thread, outcome)} == {b"here"}


def test_chdir_changes_no_call_for_asyncio(moves: Callable[[], None], tmp_path: Path) -> None:
    async def main() -> None:
        opening = mqstore.aio.open("mq", config=CONFIG)
        moves()
        async with opening as store:
            queue = await store.queue("jobs")
            await queue.put(b"here")
            await (await queue.get()).ack()
            await store.put("t", b"here" + bytes(500), queue_id=0, durability="flush")
            assert {message.body[:4] async for message in store.iter("t", 0)} == {b"here"}
            assert store.sync.path == tmp_path / "here" / "mq"

    asyncio.run(main())


JOBS: Mapping[str, Callable[[Any, Path], Any]] = {
    "dlq_report": lambda stores, _: jobs.dlq_report(stores),
    "dlq_resend": lambda stores, _: jobs.dlq_resend(stores, dry_run=True),
    "export_parquet": lambda stores, out: jobs.export_parquet(stores, out / "lake"),
    "lag_report": lambda stores, _: jobs.lag_report(stores),
    "recover": lambda stores, _: jobs.recover(stores, dry_run=True),
    "trace": lambda stores, _: jobs.trace(stores, key="k"),
    "traffic_report": lambda stores, _: jobs.traffic_report(stores),
    "verify": lambda stores, _: jobs.verify(stores),
}


@pytest.mark.parametrize("name", JOBS)
def test_chdir_changes_no_job(moves: Callable[[], None], tmp_path: Path, name: str) -> None:
    assert set(JOBS) == set(jobs.__all__) - {"clean_target", "select"}  # a target is a path, not a selection
    selection = jobs.select("mq")
    moves()
    found = JOBS[name](selection, tmp_path)
    assert str(tmp_path / "there") not in repr([*found] if isinstance(found, Iterator) else found)


def test_commands_take_a_relative_path(moves: Callable[[], None], tmp_path: Path) -> None:
    for arguments in (("verify",), ("inspect",), ("topics",), ("recover", "--dry-run"), ("lag",), ("quarantine",)):
        name, *more = arguments
        assert command(name, "mq", *more).exit_code == 0


# -- a directory that is gone ---------------------------------------------------------------------------------------


def _removed(path: Path) -> None:
    shutil.rmtree(path)


def _moved(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def _replaced(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    shutil.copytree(path.with_name("other"), path)


GOING = {"removed": _removed, "moved": _moved, "replaced": _replaced}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (_filled(tmp_path / "a", b"other") / "mq").rename(tmp_path / "other")
    return _filled(tmp_path / "b", b"here").rename(tmp_path / "c") / "mq"


@pytest.mark.parametrize("going", GOING)
@pytest.mark.parametrize("kind", TABLES)
def test_every_call_names_a_directory_that_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, going: str
) -> None:
    (_filled(tmp_path / "a", b"other") / "mq").rename(tmp_path / "other")
    (_filled(tmp_path / "b", b"here") / "mq").rename(path := tmp_path / "mq")
    before = _bytes_of(tmp_path / "other")
    make, table = TABLES[kind]
    store = mqstore.open(path, config=CONFIG)
    made = make(store)
    waiting = in_thread(store.queue("nothing").get)
    following = in_thread(lambda: list(store.iter("t", follow=True)))
    GOING[going](path)
    until(lambda: store.closed)  # its flusher looks twice a second, and each of many calls

    silent, errors = set(), {}
    for name, call in table.items():
        try:
            call(made)
            silent.add(name)
        except Exception as error:
            errors[name] = error
    assert not {name: error for name, error in errors.items() if not isinstance(error, MissingFileError)}
    assert silent <= {"full", "_get_at_once", "shutdown", "stats"}  # in memory; `stats` shows the error
    assert "removed or moved" in store.stats().errors["directory"]
    for thread, outcome in (waiting, following):
        assert isinstance(ended(thread, outcome), MissingFileError)
    with pytest.raises(MissingFileError, match=f"{path}: the directory was removed or moved"):
        store.close()
    store.close()
    assert any("removed or moved" in record.message for record in caplog.records)
    if going == "replaced":
        assert _bytes_of(path) == before
    if going != "removed":
        with mqstore.open(tmp_path / "elsewhere", config=CONFIG) as again:  # its lock is free
            assert {message.body[:4] for message in again.iter("t")} == {b"here"}


def test_a_gone_directory_is_seen_by_a_call_at_once(tmp_path: Path) -> None:
    """With a clock of its own a store has no thread that looks."""
    store = mqstore.open(tmp_path / "mq", config=StoreConfig(clock=mqstore.SimulatedClock()))
    _removed(store.path)
    with pytest.raises(MissingFileError, match="removed or moved"):
        store.flush()
    with pytest.raises(MissingFileError, match="removed or moved"):
        store.close()


def test_a_durable_put_into_a_removed_directory_is_no_success(tmp_path: Path) -> None:
    store = mqstore.open(tmp_path / "mq", durability="flush", config=StoreConfig(clock=mqstore.SimulatedClock()))
    store.put("t", b"a")
    _removed(store.path)
    with pytest.raises(MQStoreError, match=str(store.path)):
        store.put("t", b"b")
    with pytest.raises(MissingFileError):
        store.close()


def test_a_reader_of_a_gone_directory_ends(tmp_path: Path) -> None:
    path = _filled(tmp_path / "a", b"here") / "mq"
    with mqstore.open(path, "r") as store:
        following = in_thread(lambda: list(store.iter("t", 0, follow=True)))
        _moved(path)
        assert isinstance(ended(*following), MissingFileError)
        for call in (store.topics, lambda: store.read("t", 0, 0), lambda: list(store.iter("t")), store.stats):
            if call != store.stats:
                with pytest.raises(MissingFileError, match=str(path)):
                    call()


def _file(folder: Path) -> Path:
    (folder / "file").write_text("a")
    return folder / "file"


def _circle(folder: Path) -> Path:
    (folder / "circle").symlink_to("circle")
    return folder / "circle"


def _lock_is_a_folder(folder: Path) -> Path:
    (folder / "mq" / "lock").mkdir(parents=True)
    return folder / "mq"


@pytest.mark.parametrize(
    ("place", "step"),
    [
        (lambda folder: Path("/proc/x"), "mkdir"),
        (lambda folder: Path("/proc/x/y"), "mkdir"),
        (_file, "is a file"),
        (lambda folder: _file(folder) / "mq", "stat"),
        (_circle, "stat"),
        (lambda folder: _circle(folder) / "mq", "stat"),
        (lambda folder: folder / ("a" * 300), "stat"),
        (_lock_is_a_folder, "lock: it is a folder"),
    ],
    ids=["proc", "below proc", "file", "below a file", "circle", "below a circle", "long name", "lock is a folder"],
)
def test_a_place_for_no_store_is_named_with_the_step(tmp_path: Path, place: Callable[[Path], Path], step: str) -> None:
    path = place(tmp_path)
    with pytest.raises(MQStoreError, match=step) as raised:
        mqstore.open(path)
    assert str(path.parent if path.name == "y" else path) in str(raised.value)


def test_a_relative_path_in_a_removed_directory_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with mqstore.open(tmp_path / "mq") as store:
        for call in (mqstore.open, mqstore.aio.open, jobs.select, jobs.verify, store.snapshot):
            with pytest.raises(MQStoreError, match="finding the working directory"):
                call("relative")
