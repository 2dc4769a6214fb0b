"""A store stays in the directory in which it was opened: whatever the working directory is, and whoever removes it.

`store = mqstore.open("mq")` kept the relative path, so that later files were opened below the working directory of that
time. After a `chdir` to a folder with another "mq", 256 of 300 acknowledged puts went into the other store's log.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import mqstore
import mqstore.aio
from mqstore import MQStoreError, QueueRef, StoreConfig, jobs
from mqstore.errors import MissingFileError
from tests.client.support import ended, in_thread, until
from tests.publiccalls import CALLS, CLOSING, Things
from tests.tools.support import mqstore as command

Call = Callable[[Any], object]
REF = QueueRef("t", 0)
CONFIG = StoreConfig(segment_bytes=1 << 14, consumequeue_units=64)  # small: many files are opened later
NOW = datetime(2024, 1, 1, tzinfo=UTC)
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
READER: dict[str, Call] = {
    "find": lambda store: store.find("t", key="k"),
    "get": lambda store: store.get(next(store.iter("t")).message_id).body,
    "iter": lambda store: [message.body for message in store.iter("t")],
    "read": lambda store: [message.body for message in store.read("t", 0, 0)],
    "to_arrow": lambda store: store.to_arrow("t").column("body"),
    "topics": lambda store: store.topics(),
    "verify": lambda store: [str(finding) for finding in store.verify()],
}
OPEN = {name: call for name, call in CALLS.items() if name not in CLOSING}
"""Every public call of a store, its broker and its clients that leaves it open."""
IN_MEMORY = {
    *("Store.broker", "Store.closed", "Store.mode", "Store.path", "Store.producer", "Store.push_consumer"),
    *("Store.recovery", "Store.stats", "Broker.closed", "Broker.filter", "Broker.listen", "Broker.pop_retry_topics"),
    *("Broker.take_losses", "Broker.unlisten", "Broker.wait", "Broker.wake_one", "Queue.full", "Queue._get_at_once"),
    "Broker.put_async",  # its future has the error
    *("Broker.add_waiter", "Broker.remove_waiter", "Broker.add_pop_waiter"),  # refused once the housekeeper has looked
}
TOUCHING = {name for name in OPEN if name.startswith(("Store.", "Broker.", "Queue."))} - IN_MEMORY | LOG.keys()
"""Calls that fail without the store's directory."""


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


def _answer(call: Call, of: Any) -> object:
    try:
        return call(of)
    except MQStoreError as error:
        return error


def test_chdir_changes_no_call_of_a_writer(moves: Callable[[], None], tmp_path: Path) -> None:
    with mqstore.open("mq", config=CONFIG) as store:
        things = Things(store, tmp_path)
        moves()
        store.put_many("t", [b"here" + bytes(500)] * 100, queue_id=0)
        results = [_answer(call, things) for call in OPEN.values()]
        results += [_answer(call, store.log) for call in LOG.values()]
    assert "b'there" not in repr(results)
    assert str(tmp_path / "there") not in repr(results)
    with mqstore.open(tmp_path / "here" / "mq", config=CONFIG) as store:
        assert store.recovery.clean_shutdown
        assert b"there" not in {message.body[:5] for message in store.iter("t")}


def test_chdir_changes_no_call_of_a_reader(moves: Callable[[], None], tmp_path: Path) -> None:
    with mqstore.open("mq", "r") as store:
        following = store.iter("t", 0, start="latest", follow=True)
        thread, outcome = in_thread(lambda: [next(following).body for _ in range(300)])
        moves()
        for name, call in READER.items():
            assert "there" not in repr(call(store)), name
        for name in set(LOG) & set(dir(store.log)):
            assert "there" not in repr(LOG[name](store.log)), name
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
    assert set(JOBS) == set(jobs.__all__) - {"clean_target", "duration_s", "select"}  # these take no selection
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


@pytest.mark.parametrize("going", GOING)
def test_every_call_names_a_directory_that_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, going: str
) -> None:
    (_filled(tmp_path / "a", b"other") / "mq").rename(tmp_path / "other")
    (_filled(tmp_path / "b", b"here") / "mq").rename(path := tmp_path / "mq")
    before = _bytes_of(tmp_path / "other")
    store = mqstore.open(path, config=CONFIG)
    things = Things(store, tmp_path)
    waiting = in_thread(store.queue("nothing").get)
    following = in_thread(lambda: list(store.iter("t", follow=True)))
    GOING[going](path)
    until(lambda: store.closed)  # its flusher looks twice a second, and each of many calls

    answers = {name: _answer(call, things) for name, call in OPEN.items()}
    answers |= {name: _answer(call, store.log) for name, call in LOG.items()}
    told = {name for name, answer in answers.items() if isinstance(answer, MissingFileError)}
    assert TOUCHING - told == set()
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
            assert not [message for message in again.iter("t") if message.body.startswith(b"other")]


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
