"""A connection: what is repeated, what is reported, and what ends with it."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import Message, Store, exponential
from mqstore.errors import ConfigError, ConnectionLostError, InvalidMessageError, StoreClosedError
from mqstore.remote.connection import Connection
from mqstore.remoting.calls import CALLS
from mqstore.remoting.frames import RESPONSE, Frame, FrameReader, encode
from mqstore.serve.thread import ServerThread
from tests.children import in_child
from tests.waiting import until

ECHO = 500
Answer = Callable[[int, Frame], Frame | bytes | None]
"""Function of a `Script`: its answer to a request on the n-th connection. Bytes are sent as they are."""


def address_of(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


class Script:
    """A server that answers each request by a function, which may also end the connection by an OSError."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = address_of(self._listener)
        self.requests: list[Frame] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        for line in range(1_000):
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(line, sock), daemon=True).start()

    def _serve(self, line: int, sock: socket.socket) -> None:
        reader = FrameReader()
        try:
            while data := sock.recv(1 << 16):
                reader.feed(data)
                for request in reader:
                    self.requests.append(request)
                    answer = self._answer(line, request)
                    if isinstance(answer, bytes):
                        sock.sendall(answer)
                    elif answer is not None:
                        answer.opaque, answer.binary, answer.flag = request.opaque, request.binary, RESPONSE
                        sock.sendall(encode(answer))
        except OSError:
            pass
        finally:
            sock.close()

    def close(self) -> None:
        with suppress(OSError):  # it was closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._listener.close()


@contextmanager
def connected(answer: Answer, **options: Any) -> Iterator[tuple[Script, Connection]]:
    script = Script(answer)
    connection = Connection(script.address, **{"timeout_s": 5.0, **options})
    try:
        yield script, connection
    finally:
        connection.close()
        script.close()


def echo(line: int, frame: Frame) -> Frame:
    return Frame(0, body=frame.body)


def lost_at_first(line: int, frame: Frame) -> Frame:
    if line == 0:
        raise OSError
    return echo(line, frame)


def test_thread_that_has_its_answer_lets_another_one_read() -> None:
    both = threading.Barrier(2)

    def answer(line: int, frame: Frame) -> Frame:
        if frame.body == b"first":
            both.wait(20)
        return echo(line, frame)

    with connected(answer) as (script, connection), ThreadPoolExecutor(2) as pool:
        for number in range(1, 40, 2):
            calls = [pool.submit(connection.call, ECHO, b"first")]
            until(lambda number=number: len(script.requests) == number)
            calls.append(pool.submit(connection.call, ECHO, b"second"))
            until(lambda: len(connection.line.waiting) == 2)  # type: ignore[union-attr]
            both.wait(20)
            assert [call.result(20).body for call in calls] == [b"first", b"second"]


def test_withdrawn_call_is_not_called_back() -> None:
    found: list[object] = []
    with connected(lambda line, frame: None if frame.body else Frame(0)) as (_, connection):
        handle = connection.park(ECHO, found.append, b"a")
        number = connection.withdraw(handle)
        assert number is not None
        assert connection.withdraw(handle) is None
        connection.call(ECHO)
        assert found == []


def test_parked_call_is_sent_again() -> None:
    found: list[bytes] = []
    with connected(lost_at_first) as (script, connection):
        connection.park(ECHO, lambda answer: found.append(answer.body if answer else b""), b"a")
        until(lambda: found == [b"a"])
        assert len(script.requests) == 2


def test_call_that_loses_every_line_is_given_up() -> None:
    def answer(line: int, frame: Frame) -> Frame | None:
        raise OSError

    with connected(answer) as (script, connection), pytest.raises(ConnectionLostError):
        connection.call(ECHO, repeat=True)
    assert len(script.requests) == 4


def test_garbage_ends_the_line_and_not_the_process() -> None:
    garbage = b"HTTP/1.1 400 Bad Request\r\n\r\n"
    with connected(lambda line, frame: garbage) as (_, connection), pytest.raises(ConnectionLostError):
        connection.call(ECHO)


def test_silent_server_is_found_by_a_ping() -> None:
    """As a machine that lost its power, or a half-open connection."""
    with connected(lambda line, frame: None, timeout_s=0.2) as (script, connection):
        with pytest.raises(ConnectionLostError) as caught:
            connection.call(ECHO)
        assert caught.value.sent
        assert [request.code for request in script.requests[:2]] == [ECHO, 31001]


def test_slow_answer_is_awaited_while_pings_are_answered() -> None:
    late = threading.Event()

    def answer(line: int, frame: Frame) -> Frame | None:
        if frame.code == 31001:
            late.set()
            return Frame(3)
        if frame.body == b"slow":
            return None
        return Frame(0)

    with connected(answer, timeout_s=0.2) as (script, connection), ThreadPoolExecutor(1) as pool:
        pending = pool.submit(connection.call, ECHO, b"slow")
        until(lambda: [request.code for request in script.requests].count(31001) > 2)
        assert not pending.done()
        connection.close()
        with pytest.raises(StoreClosedError):
            pending.result(20)


def test_server_that_is_gone_is_reported_to_all_who_wait() -> None:
    with connected(echo, timeout_s=0.3) as (script, connection):
        connection.call(ECHO)
        script.close()
        connection.line.fail("the test ends it")  # type: ignore[union-attr]
        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(connection.call, ECHO, repeat=True) for _ in range(4)]
            errors = [call.exception(20) for call in calls]
        assert [type(error) for error in errors] == [ConnectionLostError] * 4
        assert not any(getattr(error, "sent", True) for error in errors)


@pytest.mark.parametrize("text", ["host", "host:", ":1", "host:x", "host:0", "host:70000", "host:²"])
def test_bad_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        Connection(text)


# -- the store of a server ------------------------------------------------------------------------------------------


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[Store]:
    """The store in the server."""
    with mqstore.open(tmp_path / "mq") as store:
        yield store


@pytest.fixture
def store(serving: ServerThread) -> Iterator[Store]:
    with mqstore.connect(serving.address) as store:
        yield store


def lose(store: Any) -> None:
    """Lose the connection, as a network does, and return when there is another one."""
    connection = store.broker._connection
    line = connection.line
    line._socket.shutdown(socket.SHUT_RDWR)
    until(lambda: connection.line is not line)


def test_no_server_is_an_error_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = address_of(listener)
    with pytest.raises(ConnectionLostError, match=address):
        mqstore.connect(address)
    with pytest.raises(ConnectionLostError, match="mqstore serve"):
        mqstore.connect(tmp_path)


def test_idle_connection_with_a_high_descriptor_is_kept(serving: ServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call after a pause looks whether the server is there. It took each such connection for a lost one."""
    monkeypatch.setattr("mqstore.remote.line._STALE_S", 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2_048:
        pytest.skip("this process may not have so many descriptors")
    with ExitStack() as files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2_048), hard))
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while files.enter_context(open(os.devnull)).fileno() < 1_024:
            pass
        with mqstore.connect(serving.address) as store:
            line = store.broker._connection.line
            assert line._socket.fileno() > 1_023
            store.put("t", b"a")
            assert store.broker._connection.line is line


def test_directory_of_a_server_is_an_address(behind: Store, serving: ServerThread) -> None:
    with mqstore.connect(behind.path) as store:
        receipt = store.put("t", b"a")
    assert [message.body for message in behind.read(*receipt.queue, 0)] == [b"a"]


def test_client_of_another_protocol_is_refused(serving: ServerThread) -> None:
    connection = Connection(serving.address)
    hello = CALLS["session.hello"]
    answer = connection.call(hello.code, hello.request({"protocol": 2, "client": "c"}))
    assert (answer.code, "same version" in (answer.remark or "")) == (29, True)
    put = CALLS["put"]
    assert connection.call(put.code, put.request({"topic": "t", "body": b""})).code == 29  # without hello
    assert connection.call(put.code, b"\0\0\0").code != 0
    connection.close()


def test_limits_are_those_of_the_server(store: Store) -> None:
    with pytest.raises(InvalidMessageError):
        store.put("t", bytes(5 << 20))
    receipts = store.put_many("t", [bytes(1 << 20)] * 20, queue_id=0)  # more than a frame can have
    assert [receipt.offset for receipt in receipts] == list(range(20))
    assert sum(len(message.body) for message in store.iter("t")) == 20 << 20


def test_put_with_a_key_is_stored_once_whenever_the_answer_is_lost(store: Any, behind: Store) -> None:
    send = store.broker._connection.line.__class__.wait

    def lost(line: Any, call: Any) -> Any:
        found = send(line, call)
        if call.frame.code == 31011 and "again" not in call.frame.fields:
            line.fail("the test loses the answer")
            return None
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mqstore.remote.line.Line.wait", lost)
        receipt = store.put("t", b"a", unique_key="k-1", queue_id=0)
        with pytest.raises(ConnectionLostError):
            store.put("t", b"b", queue_id=0)
        with pytest.raises(ConnectionLostError):
            store.put("t", b"c", unique_key="k-2", delay=5)
    assert (receipt.offset, receipt.unique_key) == (0, "k-1")
    assert receipt.message_id == behind.find("t", unique_key="k-1")[0].message_id
    assert [message.body for message in behind.iter("t")] == [b"a", b"b"]


def test_members_return_with_the_connection(store: Any, behind: Store) -> None:
    seen: list[bytes] = []
    consumer = store.push_consumer("g", workers=1, ordered=True)
    consumer.subscribe("t", lambda message: seen.append(message.body))
    consumer.start()
    store.put("t", b"a")
    until(lambda: seen == [b"a"])
    lose(store)
    until(lambda: len(behind.broker.members.members("g")) == 1)
    behind.put("t", b"b")
    until(lambda: seen == [b"a", b"b"])
    consumer.stop()
    assert behind.broker.members.members("g") == []


def test_end_of_a_connection_ends_members_locks_and_waits(serving: ServerThread, behind: Store) -> None:
    queue = mqstore.QueueRef("t", 0)
    with mqstore.connect(serving.address) as store:
        store.create_topic("t")
        broker: Any = store.broker
        broker.members.register("c", "g", {"t": ("TAG", "*")}, mqstore.contract.Mode("queue"), owner="o")
        assert broker.locks.try_lock("g", queue, "c")
        assert broker.locks.begin_work("g", queue, "c")
        broker.add_pop_waiter("g", "t", lambda worth: None)
        until(lambda: len(behind.broker._waiters.parked) == 1)
        assert not behind.broker.locks.try_lock("g", queue, "other")
    until(lambda: not behind.broker._waiters.parked and not behind.broker.members.members("g"))
    assert behind.broker.locks.try_lock("g", queue, "other")


def test_a_second_connection_of_a_process_ends_its_first(store: Any, behind: Store) -> None:
    """What was sent on the first and not yet read must not be done after what is repeated on the second."""
    line = store.broker._connection.line
    other = Connection(store.broker._connection.address, greet=store.broker._greet)
    other.open()
    until(lambda: line.is_gone() or bool(line.lost))
    other.close()


@pytest.fixture
def clocked(tmp_path: Path) -> Iterator[tuple[Store, Any, ServerThread]]:
    """A store whose time stands still, so that nothing happens by itself; the store of its client; and its server."""
    config = mqstore.StoreConfig(clock=mqstore.SimulatedClock())
    with mqstore.open(tmp_path / "clocked", config=config) as behind:
        serving = behind.serve("127.0.0.1:0")
        with mqstore.connect(serving.address) as store:
            yield behind, store, serving


def test_wait_withdrawn_after_its_answer_passes_its_turn(clocked: tuple[Store, Any, ServerThread]) -> None:
    """The answer was on its way when the client withdrew the wait, and the message waited with everybody else."""
    behind, store, _ = clocked
    store.create_topic("t")
    called: list[int] = []
    for i in range(2):
        store.broker.add_pop_waiter("g", "t", lambda worth, i=i: called.append(i))
    store.broker.members.members("g")  # the waits are there
    behind.put("t", b"a")
    behind.broker.run_once()
    until(lambda: bool(called))
    withdraw = CALLS["session.withdraw"]
    body = withdraw.request({"number": 999_999, "turn": ("g", "t", -1)})  # the server knows no such wait any more
    store.broker._connection.tell(withdraw.code, body)
    until(lambda: sorted(called) == [0, 1])


def test_news_continue_on_the_next_connection(store: Any, behind: Store) -> None:
    heard: list[str] = []
    store.broker.listen("topics", heard.append)
    lose(store)
    behind.create_topic("t")
    until(lambda: heard == ["t"])


def test_restart_of_the_server_ends_no_lease(tmp_path: Path) -> None:
    """Its receivers are other processes, which still work."""
    with mqstore.open(tmp_path) as behind:
        behind.put("t", b"a")
        serving = behind.serve("127.0.0.1:0")
        with mqstore.connect(serving.address) as store:
            [delivery] = store.broker.pop("g", "t", invisible=3600)
    with mqstore.open(tmp_path) as behind:
        assert behind.broker.pop("g", "t") == []
        behind.broker.ack("g", "t", [delivery.receipt])


def test_check_counts_if_the_client_does_not_know(clocked: tuple[Store, Any, ServerThread]) -> None:
    asked: list[bytes] = []
    behind, store, serving = clocked
    unknown, transactions = serving._server.own._unknown, behind.broker.transactions
    with store.producer(group="till", checker=lambda message: asked.append(message.body)):
        transactions.begin("t", b"a", producer_group="till")
        for _ in range(3):
            behind.broker.clock.advance(40_000)  # type: ignore[attr-defined]
            behind.broker.run_once()
            until(lambda: len(unknown) == 1)
        [half] = transactions._halves._open.values()
    assert asked == [b"a"] * 3
    assert half.checks == 2  # the third answer is still with the server


@pytest.mark.parametrize(("ends", "error"), [("client", StoreClosedError), ("server", ConnectionLostError)])
def test_end_of_either_side_reaches_waiting_calls(behind: Store, ends: str, error: type[Exception]) -> None:
    server = behind.serve("127.0.0.1:0")
    store = mqstore.connect(server.address, timeout=0.5)
    queue = store.queue("jobs")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(queue.get)
        until(lambda: store.broker._connection.line.has_parked())  # type: ignore[attr-defined]
        (store if ends == "client" else server).close()
        with pytest.raises(error):
            waiting.result(30)
    store.close()


def test_transaction_of_a_lost_process_is_decided_by_another(serving: ServerThread, behind: Store) -> None:
    asked: list[bytes] = []

    def check(message: Message) -> bool:
        asked.append(message.body)
        return message.body == b"paid"

    with mqstore.connect(serving.address) as store, store.producer(group="till", checker=check):
        for body in (b"paid", b"not paid"):
            behind.broker.transactions.begin("t", body, producer_group="till")
        behind.broker.run_once(behind.broker.clock.now_ms() + 7_000)
        until(lambda: len(asked) == 2)
        until(lambda: not behind.broker.transactions.open_count())
    assert [message.body for message in behind.iter("t")] == [b"paid"]


def test_dead_letters_are_read_by_pages(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqstore.serve.own._ANSWER_BYTES_MAX", 10_000)
    store.put_many("t", [b"%d" % i for i in range(600)], queue_id=0)
    for message in store.iter("t"):
        store.broker.send_back("g", message, delay_level=-1, reason="no")
    letters = store.dead_letters("g")
    assert len(letters) == 600
    assert len(store.broker._call("letters.select", ("g",), {"offsets": range(256)})) < 100
    assert [letter.body for letter in letters] == [b"%d" % i for i in range(600)]
    odd = letters.replay(where=lambda letter: int(letter.body) % 2 == 1)
    assert (odd.count, len(letters), letters.purge(before_offset=100), len(letters)) == (300, 300, 50, 250)
    assert [letter.offset for letter in letters.select(offsets=[100, 101, 102])] == [100, 102]


def test_reads_of_a_store(store: Any, behind: Store, tmp_path: Path) -> None:
    receipts = [store.put("t", b"%d" % i, queue_id=i % 2, keys=f"k{i}", tag=f"T{i % 2}") for i in range(6)]
    assert store.topics() == behind.topics() == ["t"]
    assert store.queues("t") == behind.queues("t")
    assert store.offsets("t", 0) == (0, 3)
    assert [message.body for message in store.iter("t")] == [message.body for message in behind.iter("t")]
    assert [message.body for message in store.iter("t", 0, start=1, tags="T0")] == [b"2", b"4"]
    assert store.find("t", key="k3") == behind.find("t", key="k3")
    assert store.get(receipts[0].message_id) == behind.get(receipts[0].message_id)
    assert store.stats().puts == 6
    assert list(store.verify()) == []
    assert store.snapshot(tmp_path / "copy").messages == 6
    for refused in (store.to_arrow, lambda topic: store.recovery):
        with pytest.raises(ConfigError, match="server"):
            refused("t")
    follow = store.iter("t", 0, start=2, follow=True)
    assert next(follow).body == b"4"
    threading.Timer(0.05, behind.put, ("t", b"new"), {"queue_id": 0}).start()
    assert next(follow).body == b"new"


def test_retry_policy_and_settings_travel(store: Any) -> None:
    policy = exponential(1, 3, 9, max_attempts=4)
    group = store.broker.groups.create("g", retry_policy=policy, orderly=True)
    assert (group.retry_policy, group.orderly) == (policy, True)
    assert store.broker.groups.get("g") == group


def test_broadcasting_keeps_its_offsets_on_this_machine(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    offsets = store.broker.local_offsets("cache-1", "prices")
    offsets.commit(mqstore.QueueRef("t", 0), 7)
    offsets.save()
    assert store.broker.local_offsets("cache-1", "prices").committed(mqstore.QueueRef("t", 0)) == 7
    assert len(list(tmp_path.glob(".mqstore/offsets/*/local_offsets/cache-1/prices.json"))) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_forked_child_has_a_connection_of_its_own(store: Any, behind: Store) -> None:
    store.queue("jobs").put(b"parent")

    def work() -> None:
        with store.queue("jobs").get(timeout=20) as task:
            store.put("t", task.value + b"'s child", queue_id=0)

    assert in_child(work) == 0
    assert store.put("t", b"parent", queue_id=0).offset == 1
    assert [message.body for message in behind.iter("t")] == [b"parent's child", b"parent"]


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_killed_client_frees_its_queues_at_once(serving: ServerThread, behind: Store) -> None:
    behind.create_topic("t", queues=1)

    def work() -> None:
        store = mqstore.connect(serving.address)
        consumer = store.pull_consumer("g")
        consumer.subscribe("t")
        consumer.poll(timeout=0)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(work) == -signal.SIGKILL
    with mqstore.connect(serving.address) as store, store.pull_consumer("g") as consumer:
        consumer.subscribe("t")
        until(lambda: consumer.poll(timeout=0) == [] and len(consumer.assignment()) == 1)


def test_thread_exists_only_while_something_is_parked(store: Any) -> None:
    store.put("t", b"a")
    assert store.broker._connection._thread is None
