"""`mqstore.open(path, shared=True)`: several processes use a directory, and lose nothing whatever ends (section 17)."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mqstore
import mqstore.aio
from mqstore.errors import ConfigError, StoreLockedError
from tests.children import fork
from tests.remote import workers
from tests.remote.servers import has_ended, pid_of, starts
from tests.waiting import until

ROUNDS = int(os.environ.get("MQSTORE_CAMPAIGN_ROUNDS", "3"))
"""Number of kills and of idle ends (`make shared`)."""


def ended_well(pids: list[int]) -> bool:
    return {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids} == {0}


def bodies(directory: Path, topic: str = "numbers") -> Counter[bytes]:
    """Return how often each message is stored, once the server has ended."""
    with mqstore.open(directory, lock_timeout=20) as store:
        assert not list(store.verify())
        return Counter(message.body for message in store.iter(topic))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_pool_share_one_queue(tmp_path: Path, method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    with mqstore.open(tmp_path / "mq", shared=True) as store:
        jobs = store.queue("jobs", codec=mqstore.TEXT)
        jobs.put_many(str(number) for number in range(100))
        done = [tmp_path / str(number) for number in range(2 if method == "spawn" else 4)]
        pool = [context.Process(target=workers.take_all, args=(tmp_path / "mq", each)) for each in done]
        for worker in pool:
            worker.start()
        for worker in pool:
            worker.join(60)
        assert all(each.exists() for each in done)
        results = store.queue("results", codec=mqstore.TEXT)
        found = [task.value for task in results.get_many(1000)]
    assert sorted(map(int, found)) == list(range(100))
    assert starts(tmp_path / "mq") == 1


def test_workers_forked_after_the_opening_share_the_store(tmp_path: Path) -> None:
    with mqstore.open(tmp_path / "mq", shared=True) as store:
        store.put("numbers", b"0")
        store.push_consumer("parent").subscribe("numbers", lambda message: None)
        jobs = store.queue("jobs")
        waiting = threading.Thread(target=jobs.get)
        waiting.start()

        def work() -> None:
            for number in range(20):
                store.put("numbers", b"%d" % number)
            for queue in (jobs, store.queue("jobs")):
                with queue.get(timeout=20):
                    pass
            handled = threading.Event()
            consumer = store.push_consumer(f"child-{os.getpid()}")
            consumer.subscribe("numbers", lambda message: handled.set())
            consumer.start()
            assert handled.wait(20)
            consumer.stop()
            store.close()

        pids = [fork(work) for _ in range(4)]
        jobs.put_many([b"x"] * 9)
        assert ended_well(pids)
        waiting.join(20)
        store.put("numbers", b"0")
    assert bodies(tmp_path / "mq")[b"0"] == 6


def keep_putting(directory: Path, worker: int, stop: Path, burst: int, pause_s: float = 0) -> Callable[[], None]:
    """Return the work of a process, which puts `burst` messages in each opening, and notes how many in all."""

    def work() -> None:
        acked = 0
        while not stop.exists():
            with mqstore.open(directory, shared=True) as store:
                for number in range(acked, acked + burst):
                    store.put("numbers", b"%d %d" % (worker, number), unique_key=f"{worker}-{number}")
            acked += burst
            time.sleep(pause_s)
        (directory.parent / f"acked-{worker}").write_text(str(acked))

    return work


def all_acked(folder: Path, workers: int) -> Counter[bytes]:
    return Counter(
        b"%d %d" % (worker, number)
        for worker in range(workers)
        for number in range(int((folder / f"acked-{worker}").read_text()))
    )


def kill_again_and_again(directory: Path) -> None:
    killed = 0
    for _ in range(ROUNDS):
        until(lambda: (directory / "serve.json").exists() and pid_of(directory) != killed)  # noqa: B023
        time.sleep(0.5)  # under load; a call gives up after some servers in a row
        killed = pid_of(directory)
        os.kill(killed, signal.SIGKILL)


def test_kills_of_the_server_lose_and_repeat_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "mq"
    stop = tmp_path / "stop"
    pids = [fork(keep_putting(directory, worker, stop, burst=200)) for worker in range(4)]
    try:
        kill_again_and_again(directory)
    finally:
        stop.touch()
        assert ended_well(pids)
    assert bodies(directory) == all_acked(tmp_path, 4)


def test_kills_of_the_server_lose_no_task(tmp_path: Path) -> None:
    directory = tmp_path / "mq"
    numbers = [b"%d" % number for number in range(500 * ROUNDS)]

    def work() -> None:
        with mqstore.open(directory, shared=True) as store:
            for _ in range(len(numbers)):
                with store.queue("jobs", visibility=20).get(timeout=30) as task:
                    if task.value == b"end":
                        return
                    store.put("numbers", task.value, unique_key=task.value.decode())

    with mqstore.open(directory, shared=True) as store:
        store.queue("jobs").put_many(numbers)
        pids = [fork(work) for _ in range(4)]
        try:
            kill_again_and_again(directory)
        finally:
            until(lambda: store.queue("jobs").qsize() == 0, limit_s=120)
            store.queue("jobs").put_many([b"end"] * 4)
            assert ended_well(pids)
    assert set(bodies(directory)) == set(numbers)


def test_idle_ends_of_the_server_lose_no_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqstore.remote.shared._LINGER_S", 0.01)
    directory = tmp_path / "mq"
    stop = tmp_path / "stop"
    pids = [fork(keep_putting(directory, worker, stop, burst=3, pause_s=0.05)) for worker in range(2)]
    try:
        until(lambda: (directory / "serve.log").exists() and starts(directory) > ROUNDS)
    finally:
        stop.touch()
        assert ended_well(pids)
    assert bodies(directory) == all_acked(tmp_path, 2)


def test_waiting_call_survives_a_kill_of_the_server(tmp_path: Path) -> None:
    with mqstore.open(tmp_path / "mq", shared=True) as store, mqstore.open(tmp_path / "mq", shared=True) as other:
        jobs = store.queue("jobs")
        found: list[bytes] = []
        getter = threading.Thread(target=lambda: found.append(jobs.get(timeout=60).value))
        getter.start()
        pid = pid_of(tmp_path / "mq")
        os.kill(pid, signal.SIGKILL)
        until(lambda: has_ended(pid))
        other.queue("jobs").put(b"hello")
        getter.join(60)
        assert found == [b"hello"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_task_continues_when_the_server_is_replaced(tmp_path: Path, number: int) -> None:
    with mqstore.open(tmp_path / "mq", shared=True) as store:
        jobs = store.queue("jobs")
        jobs.put(b"hello")
        task = jobs.get()
        pid = pid_of(tmp_path / "mq")
        os.kill(pid, number)
        until(lambda: has_ended(pid))
        with pytest.raises(mqstore.QueueEmpty):
            jobs.get(timeout=0.5)
        task.ack()
        assert jobs.qsize() == 0


def test_stop_of_the_server_fails_no_call(tmp_path: Path) -> None:
    with mqstore.open(tmp_path / "mq", shared=True) as store:
        for number in range(2):
            pid = pid_of(tmp_path / "mq")
            os.kill(pid, signal.SIGTERM)
            while not has_ended(pid):
                store.put("numbers", b"%d" % number)
            store.put("numbers", b"%d" % number)
        end = store.put("numbers", b"last")
        assert store.read(*end.queue, end.offset)[0].body == b"last"


def test_asyncio_store_is_shared(tmp_path: Path) -> None:
    async def main() -> list[bytes]:
        async with mqstore.aio.open(tmp_path / "mq", shared=True) as store:
            await store.put("numbers", b"hello")
            return [message.body async for message in store.iter("numbers")]

    assert asyncio.run(main()) == [b"hello"]


def test_shared_opening_is_for_writing_and_locks_as_another(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mode"):
        mqstore.open(tmp_path / "mq", "r", shared=True)
    store = mqstore.open(tmp_path / "mq")
    with pytest.raises(StoreLockedError):
        mqstore.open(tmp_path / "mq", shared=True)
    closing = threading.Timer(0.2, store.close)
    closing.start()
    with mqstore.open(tmp_path / "mq", shared=True, lock_timeout=20) as shared:
        with pytest.raises(StoreLockedError, match=r"which serves it; use mqstore\.connect\(.*/mq"):
            mqstore.open(tmp_path / "mq")
        with pytest.raises(ConfigError, match="serve"):
            shared.serve()
    closing.join()
