"""Kills of the server and of clients under load: what was acknowledged stays (remoting-server, sections 14.4 and 21).

Every process writes what it was told into a ledger of its own, with the time. The ledgers are the model: the store and
the order of the lines must agree with them. `make serve-faults N=100` kills N times.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pytest

import mqstore
from mqstore import Store
from mqstore.errors import ConnectionLostError, NotPermittedError, QueueEmpty, ReceiptExpiredError, StoreBusyError
from tests.children import fork, in_child
from tests.remote.servers import pid_of
from tests.serve.support import ORDERS, SEND, Client, started
from tests.waiting import until

KILLS = int(os.environ.get("MQSTORE_CAMPAIGN_ROUNDS", "2"))
"""Number of kills (`make serve-faults`)."""
PAUSE_S = 0.002 if KILLS > 2 else 0.01
"""A producer's pause after each message. Consumers should not fall far behind."""
LIMIT_S = 40 + 10 * KILLS
"""A process that takes longer hangs."""
pytestmark = pytest.mark.timeout(3 * LIMIT_S)


class Line(NamedTuple):
    """What a process knows at a time."""

    time_ns: int
    worker: str
    event: str
    """put, perhaps, rolled back: of a message. got, acked: of a delivery, with the group's name before it."""
    body: str


class Ledger:
    """What one process was told, in order."""

    def __init__(self, folder: Path, worker: str) -> None:
        self.worker = worker
        self._folder = folder
        self._file = os.open(folder / f"{worker}.ledger", os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def note(self, event: str, *bodies: object) -> None:
        now = time.monotonic_ns()
        os.write(self._file, b"".join(f"{now}|{self.worker}|{event}|{body}\n".encode() for body in bodies))

    def until(self, word: str) -> Iterator[int]:
        """Count until the test has said a word."""
        number = 0
        while not (self._folder / word).exists():
            yield number
            number += 1

    def sends(self, send: Callable[[str], object]) -> None:
        """Send numbered messages until the end. A lost one is perhaps stored, and not sent again."""
        for number in self.until("enough"):
            body = f"{self.worker} {number}"
            self.note("perhaps", body)  # if this process is killed, nobody knows
            try:
                self.note("put" if send(body) is not None else "rolled back", body)
            except ConnectionLostError as lost:
                if not lost.sent:
                    self.note("no server within the timeout", body)
            time.sleep(PAUSE_S)


def ledgers(folder: Path) -> list[Line]:
    """Return the lines of all processes in the order of time."""
    lines = [line.split("|") for each in folder.glob("*.ledger") for line in each.read_text().splitlines()]
    return sorted(Line(int(stamp), *rest) for stamp, *rest in lines)


# -- workers: each is a process ---------------------------------------------------------------------------------------


def put_keyed(store: Store, ledger: Ledger) -> None:
    worker = ledger.worker
    ledger.sends(lambda body: store.put("numbers", body.encode(), message_group=worker, unique_key=body))


def put_flushed(store: Store, ledger: Ledger) -> None:
    worker = ledger.worker
    ledger.sends(lambda body: store.put("numbers", body.encode(), message_group=worker, durability="flush"))


def put_items(store: Store, ledger: Ledger) -> None:
    with store.queue("jobs", codec=mqstore.TEXT) as jobs:
        ledger.sends(lambda body: jobs.put(body) or body)


def commit(store: Store, ledger: Ledger) -> None:
    """Commit two of three transactions, and roll the third back."""

    def send(body: str) -> str | None:
        with suppress(ZeroDivisionError), producer.transaction() as transaction:
            transaction.send("paid", body.encode())
            return body if int(body.split()[1]) % 3 else str(1 / 0)
        return None

    with store.producer("till", checker=lambda message: None) as producer:
        ledger.sends(send)


def take_items(store: Store, ledger: Ledger) -> None:
    with store.queue("jobs", codec=mqstore.TEXT, visibility=3) as jobs:
        for _ in ledger.until("end"):
            with suppress(QueueEmpty, ReceiptExpiredError):
                task = jobs.get(timeout=0.2)
                ledger.note("jobs got", task.value)
                task.ack()
                ledger.note("jobs acked", task.value)


def receive(store: Store, ledger: Ledger) -> None:
    with store.simple_consumer("simple", {"numbers": "*"}, visibility=3) as consumer:
        for _ in ledger.until("end"):
            deliveries = consumer.receive(8, wait=0.2)
            # All at once: while an ack waits for the next server, the leases of the others may end.
            ledger.note("simple got", *[delivery.message.text() for delivery in deliveries])
            for delivery in deliveries:
                with suppress(ReceiptExpiredError):
                    delivery.ack()
                    ledger.note("simple acked", delivery.message.text())


def poll(store: Store, ledger: Ledger) -> None:
    with store.pull_consumer("pull", auto_commit=False) as consumer:
        consumer.subscribe("numbers")
        for _ in ledger.until("end"):
            bodies = [message.text() for message in consumer.poll(timeout=0.2)]
            ledger.note("pull got", *bodies)
            with suppress(NotPermittedError):  # queues were lost with the server
                consumer.commit(durability="flush")
                ledger.note("pull acked", *bodies)


def handle_in_order(store: Store, ledger: Ledger) -> None:
    def handler(message: mqstore.Message) -> None:
        ledger.note("ordered got", message.text())

    consumer = store.push_consumer("ordered", ordered=True)
    consumer.subscribe("numbers", handler)
    with consumer:
        for _ in ledger.until("end"):
            time.sleep(0.05)


ROLES = [put_keyed, put_keyed, put_flushed, put_items, commit]
ROLES += [take_items, take_items, receive, receive, poll, handle_in_order, handle_in_order]


def send_as_java(address: tuple[str, int], ledger: Ledger) -> None:
    """Send by RocketMQ's protocol. A refused connection is an error of a client, which tries again."""
    client: Client | None = None
    for number in ledger.until("enough"):
        body = f"{ledger.worker} {number}"
        ledger.note("perhaps", body)
        try:
            client = client or Client(address)
            sent = client.ask(SEND, ORDERS | {"b": "numbers", "i": f"UNIQ_KEY\x01{body}\x02"}, body.encode())
            assert sent.code in (0, 1500), sent
            ledger.note("put" if sent.code == 0 else "refused", body)
        except ConnectionError:
            if client is not None:
                client.socket.close()
                client = None
            time.sleep(0.05)


# -- servers ----------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def served(kind: str, directory: Path) -> Iterator[tuple[tuple[str, int], Callable[[], None]]]:
    """Serve a directory. Yield its address, and the function that kills the server and returns once another serves."""
    options = ["--listen", f"127.0.0.1:{free_port()}", "--supervise" if kind == "supervised" else "--flush"]
    running = [started(directory, *options)]
    parent, there = running[0].__enter__()

    def kill() -> None:
        os.kill(killed := pid_of(directory), signal.SIGKILL)
        if kind == "supervised":
            until(lambda: pid_of(directory) != killed)
        else:
            running.pop().__exit__(None, None, None)
            time.sleep(0.3)  # nobody listens
            running.append(started(directory, *options))
            running[0].__enter__()

    try:
        yield there, kill
        if kind == "supervised":
            parent.terminate()
            assert parent.wait(30) == 0
    finally:
        running.pop().__exit__(None, None, None)


def descriptors(directory: Path) -> int:
    """Return the number of sockets and pipes that the server has open."""
    names = [os.readlink(each) for each in Path(f"/proc/{pid_of(directory)}/fd").iterdir()]
    return sum(name.startswith(("socket:", "pipe:")) for name in names)


@pytest.mark.parametrize("kind", ["supervised", "flushed", "clients"])
def test_kills_under_load_lose_and_disorder_nothing(tmp_path: Path, kind: str) -> None:
    chance = random.Random(7)
    directory = tmp_path / "mq"
    with served(kind, directory) as (there, kill):
        before = descriptors(directory)
        targets = [directory, "{}:{}".format(*there)]
        with mqstore.connect(directory) as store:
            for topic in ("numbers", "paid", "jobs"):
                store.create_topic(topic)

        def begin(number: int, life: int) -> int:
            def work() -> None:
                ledger = Ledger(tmp_path, f"w{number}.{life}")
                if number == len(ROLES):
                    send_as_java(there, ledger)
                    return
                with mqstore.connect(targets[number % 2], timeout=30) as store:
                    ROLES[number](store, ledger)

            return fork(work, 2 * LIMIT_S)

        pids = [begin(number, 0) for number in range(len(ROLES) + 1)]
        try:
            for life in range(1, (KILLS // 2 * len(pids) if kind == "clients" else KILLS) + 1):
                time.sleep(chance.uniform(0.3, 1.0) if kind != "clients" else 0.15)
                if kind == "clients":
                    os.kill(pids[number := life % len(pids)], signal.SIGKILL)
                    os.waitpid(pids[number], 0)
                    pids[number] = begin(number, life)
                else:
                    kill()
            time.sleep(0.5)
            (tmp_path / "enough").touch()
            until(lambda: not missing(tmp_path), LIMIT_S, 0.1)
        finally:
            (tmp_path / "enough").touch()
            (tmp_path / "end").touch()
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        assert set(codes) == {0}, codes
        until(lambda: descriptors(directory) <= before)
    check_store(directory, ledgers(tmp_path))
    check_deliveries(ledgers(tmp_path))


def missing(folder: Path) -> dict[str, set[str]]:
    """Return what was put and no consumer got, by group."""
    by_event: dict[str, set[str]] = defaultdict(set)
    for line in ledgers(folder):
        of = {"w3": "jobs ", "w4": "paid "}.get(line.body.split(".")[0], "numbers ") if line.event == "put" else ""
        by_event[of + line.event].add(line.body)
    wanted = {"jobs got": "jobs put"} | dict.fromkeys(("simple got", "pull got", "ordered got"), "numbers put")
    return {event: left for event, put in wanted.items() if (left := by_event[put] - by_event[event])}


def check_store(directory: Path, lines: list[Line]) -> None:
    """Everything acknowledged is stored, in its order; what has a key, once; what was rolled back, never."""
    events: dict[str, set[str]] = defaultdict(set)
    for line in lines:
        events[line.event].add(line.body)
    with mqstore.open(directory, lock_timeout=20) as store:
        assert not list(store.verify())
        stored: Counter[str] = Counter()
        for topic in ("numbers", "paid", "jobs"):
            for queue in store.queues(topic):
                last: dict[str, int] = defaultdict(lambda: -1)
                for message in store.iter(*queue):
                    stored[message.text()] += 1
                    worker, number = message.text().split()
                    assert int(number) > last[worker], f"{message.text()} is stored out of order, or twice"
                    last[worker] = int(number)
    assert not events["put"] - stored.keys()
    assert not events["rolled back"] & stored.keys()
    assert not events["no server within the timeout"]
    assert stored.keys() <= events["perhaps"]


def check_deliveries(lines: list[Line]) -> None:
    """Nothing acknowledged comes again, and the ordered group sees each producer's messages in order."""
    acked: set[tuple[str, str]] = set()
    handled: dict[str, int] = defaultdict(lambda: -1)
    seen: set[str] = set()
    for line in lines:
        group, _, event = line.event.partition(" ")
        if event == "acked":
            acked.add((group, line.body))
        elif event == "got":
            assert (group, line.body) not in acked, f"{line} was acknowledged before"
            if group == "ordered" and line.body not in seen:
                worker, number = line.body.split()
                assert int(number) > handled[worker], f"{line} is out of order"
                handled[worker] = int(number)
                seen.add(line.body)


def test_commit_that_was_saved_is_not_lost_with_the_server_before(tmp_path: Path) -> None:
    """The commit was done by a server that was killed, and the next one saved its offsets without it."""
    with served("supervised", tmp_path / "mq") as (_, kill), mqstore.connect(tmp_path / "mq") as store:
        store.put_many("numbers", [b"x"] * 100, queue_id=0)
        for offset in range(1, 4):
            store.broker.commit("billing", "numbers", 0, offset)
            kill()
            store.broker.save_offsets()
            assert store.broker.committed("billing", "numbers", 0) == offset


def test_signal_in_a_call_is_refused_or_done(tmp_path: Path) -> None:
    """A handler raises, or calls the store itself. The call raises, or is done, and the next ones work."""

    class Interrupted(Exception):  # noqa: N818
        pass

    def work() -> None:
        chance, done, over = random.Random(3), list[bytes](), threading.Event()

        def handle(_: int, frame: FrameType | None) -> None:
            if frame is not None and frame.f_globals["__name__"].startswith("mqstore") and chance.random() < 0.5:
                raise Interrupted
            with suppress(StoreBusyError, ConnectionLostError):
                store.put("handled", b"x")

        def disturb() -> None:
            while not over.wait(chance.uniform(0.0005, 0.005)):
                os.kill(os.getpid(), signal.SIGUSR1)

        store = mqstore.connect(tmp_path / "mq")
        jobs = store.queue("jobs", visibility=1)
        signal.signal(signal.SIGUSR1, handle)
        thread = threading.Thread(target=disturb)
        with suppress(Interrupted):  # its first signals come before this returns
            thread.start()
        for number in range(150 * KILLS):
            with suppress(Interrupted, ConnectionLostError, StoreBusyError, QueueEmpty, ReceiptExpiredError):
                store.put("numbers", b"%d" % number)
                done.append(b"%d" % number)
                jobs.put(b"%d" % number)
                jobs.get(timeout=0.01).ack()
        over.set()
        thread.join()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        store.put("numbers", b"last")
        stored = {message.body for message in store.iter("numbers")}
        assert stored >= {*done, b"last"}
        jobs.put(b"last")
        until(lambda: jobs.get(timeout=20).value == b"last")
        store.close()

    with started(tmp_path / "mq", "--listen", "127.0.0.1:0"):
        assert in_child(work, 60 + 5 * KILLS) == 0
