"""Commands beside a running server: by the directory that it has open, by its address, and when it is not there."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

import mqstore as library
from mqstore.remoting.frames import RESPONSE, Frame, FrameReader, encode
from mqstore_tools.main import cli
from tests.children import fork
from tests.serve.support import Client
from tests.tools.brokers import filled
from tests.tools.support import forked, mqstore
from tests.waiting import until

ROWS = b'{"body": "a", "message_group": "g", "tag": "t", "key": "k9"}\n{"body": "b", "delay": 3600}\n'
CHANGES = {
    "produce": "orders --body hello --queue-id 1 --key k1 --property region=eu",
    "produce, rows": "orders --format jsonl",
    "produce, flush": "fresh --body hello --queue-id 0 --flush",
    "consume": "orders other --group billing --idle-exit 0 --exec true",
    "consume, a few": "orders --group nightly --max-attempts 3 --max-messages 4 --from earliest --exec true",
    "topics create": "payments --queues 2 --type fifo",
    "topics alter": "orders --perm r",
    "topics delete": "orders --force --yes",
    "groups create": "ledger --fifo --max-attempts 5 --start latest",
    "groups alter": "billing --retry '10s 1m' --max-attempts 4 --start 2026-01-31T12:00:00Z",
    "groups delete": "billing --yes",
    "offsets reset": "--group billing --topic orders --to earliest --yes",
    "offsets reset, a queue": "--group billing --topic orders --to 9 --queue-id 0 --yes",
    "offsets reset, a time": "--group billing --topic orders --to 2020-01-01 --yes",
    "delay cancel": "HANDLE",
    "dlq replay": "--group audit --offset 0",
    "dlq replay, elsewhere": "--topic other --where \"dlq_reason = 'no such thing'\" --before 2999-01-01 --to repaired",
    "dlq purge": "--group audit --before 2999-01-01 --yes",
}
"""Each command that a server does, some in several ways -> its words after the store."""
REFUSED = {
    "produce DIR 'a b' --body x": "letters",
    "produce DIR orders --queue-id 7 --body x": "queue_id",
    "consume DIR orders --group 'a b'": "letters",
    "topics create DIR orders": "exists already",
    "topics create DIR rmq_sys_mine": "is a system topic",
    "topics alter DIR orders --read-queues 1": "never read",
    "topics delete DIR orders --yes": "consumed by billing",
    "topics delete DIR nonesuch --yes": "no topic",
    "topics delete DIR orders --force": "Cannot ask without a terminal",
    "groups create DIR billing": "exists already",
    "groups alter DIR nonesuch --fifo": "no group",
    "groups delete DIR nonesuch --yes": "no group",
    "groups show DIR nonesuch": "no group",
    "offsets reset DIR --group billing --topic orders --to 11 --yes": "must be 0..10",
    "offsets reset DIR --group billing --topic nonesuch --to latest --yes": "no topic",
    "offsets show DIR --group nonesuch": "no group",
    "delay cancel DIR nonsense": "handle",
    "dlq replay DIR --group nonesuch": "nonesuch",
    "dlq replay DIR --group audit --offset 7": "nothing was sent",
    "dlq replay DIR --group audit --to %DLQ%audit": "to the dead-letter topic",
    "dlq replay DIR --where '!'": "",
    "dlq purge DIR --group nonesuch --yes": "no group",
}
"""Requests that are refused -> a part of the text."""
READING = ("topics --system", "groups", "groups show billing", "offsets", "delay", "dlq show --group audit")
VOLATILE = {"seconds", "physical_offset", "store_timestamp_ms", "message_id", "unique_key", "store", "next_due_ms"}


@contextmanager
def served(path: Path, *options: str) -> Iterator[tuple[int, str]]:
    """Run `mqstore serve` on a store in a child. Yield its process id and address. It ends cleanly."""

    def serve() -> None:
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        cli(["serve", str(path), "--listen", "127.0.0.1:0", *options], standalone_mode=False)

    pid = fork(serve)
    file = path / "serve.json"
    try:
        until(lambda: file.exists() and json.loads(file.read_text())["pid"] == pid, pause_s=0.005)
        yield pid, json.loads(file.read_text())["endpoints"][0]
    finally:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """`orders`, which `billing` consumes, a dead letter of `audit`, and a delayed message with its handle."""
    path = filled(tmp_path_factory.mktemp("original") / "s")
    with library.open(path) as store, store.producer("shop") as producer:
        receipt: Any = producer.send("orders", b"later", delay=7200)
    return path, receipt.recall_handle


@pytest.fixture
def store(original: tuple[Path, str], tmp_path: Path) -> Path:
    return Path(shutil.copytree(original[0], tmp_path / "s"))


def scrubbed(value: Any) -> Any:
    """Return a value of JSON without what differs between two runs."""
    if isinstance(value, list):
        return [scrubbed(each) for each in value]
    if isinstance(value, dict):
        return {name: scrubbed(each) for name, each in value.items() if name not in VOLATILE}
    return value


def printed(target: object, name: str, words: str, *more: str) -> tuple[int, Any]:
    """Run a command with --json. Return its exit code, and what it printed."""
    stdin = ROWS if "jsonl" in words else None
    result = mqstore(*name.partition(",")[0].split(), target, *shlex.split(words), *more, "--json", stdin=stdin)
    try:
        return result.exit_code, scrubbed(json.loads(result.stdout))
    except ValueError:
        return result.exit_code, [scrubbed(json.loads(line)) for line in result.stdout.splitlines()]


def state(path: Path) -> list[Any]:
    """Return everything that commands change in a store."""
    tables = [printed(path, name, "") for name in ("topics", "groups", "offsets", "delay")]
    with library.open(path, "r") as opened:
        topics = sorted(topic for topic in opened.log.topics() if not topic.startswith("rmq_sys"))
        messages = [
            (topic, sorted(message.body for message in opened.iter(topic, start="earliest"))) for topic in topics
        ]
    return [*tables, messages, printed(path, "dlq list", "")]


@pytest.fixture(scope="module")
def alone(original: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Any]]:
    """`alone(name)`: what a command prints with and without --dry-run, and the state after it. "": of no command."""

    @cache
    def run(name: str) -> tuple[Any, Any]:
        path = shutil.copytree(original[0], tmp_path_factory.mktemp("alone") / "s")
        words = CHANGES.get(name, "").replace("HANDLE", original[1])
        return [printed(path, name, words, *more) for more in (["--dry-run"], []) if name], state(path)

    return run


@pytest.mark.parametrize(("name", "planned_by"), [*zip(CHANGES, cycle(["directory", "address"]), strict=False)])
def test_server_does_what_the_command_does_alone(
    original: tuple[Path, str], alone: Callable[[str], tuple[Any, Any]], store: Path, name: str, planned_by: str
) -> None:
    """It is planned by the directory and done by the address of the server, or the other way round."""
    words = CHANGES[name].replace("HANDLE", original[1])
    expected, after = alone(name)

    with served(store) as (_, address):
        targets = (store, address) if planned_by == "directory" else (address, store)
        planned = printed(targets[0], name, words, "--dry-run")
        between = state(store)
        done = [planned, printed(targets[1], name, words)]

    assert done == expected
    assert expected[0][0] == expected[1][0] == 0
    assert between == alone("")[1]
    assert state(store) == after


def test_server_refuses_what_the_command_refuses_alone(original: tuple[Path, str], store: Path) -> None:
    def run(words: str, target: object, *more: str) -> tuple[int, str]:
        result = mqstore(*(target if word == "DIR" else word for word in shlex.split(words)), *more)
        return result.exit_code, result.stderr

    alone = {words: run(words, original[0]) for words in REFUSED}
    with served(store) as (_, address):
        for words, text in REFUSED.items():
            assert (alone[words][0], text in alone[words][1]) == (2, True), (words, alone[words])
            for target in (store, address):
                code, said = run(words, target)
                assert (code, text in said) == (2, True), (words, said)

    assert state(store) == state(original[0])


def test_reading_by_address_shows_what_the_files_have(original: tuple[Path, str], store: Path) -> None:
    with served(store) as (_, address):
        for words in READING:
            name, _, rest = words.partition(" show ")
            name, rest = (f"{name} show", rest) if rest else words.partition(" ")[::2]
            assert printed(address, name, rest) == printed(store, name, rest)


def test_operator_of_a_server_sees_commits_at_once(store: Path) -> None:
    with served(store), library.connect(store) as client:
        for offset in (8, 9, 10):
            client.broker.commit("billing", "orders", 0, offset)
        assert [lag.committed for lag in client.admin.lag("billing")] == [10, 2]


# -- two processes -----------------------------------------------------------------------------------------------------


def test_produce_and_consume_run_at_once(tmp_path: Path) -> None:
    path = tmp_path / "s"
    count = 3000
    with served(path) as (_, address):
        consumer = forked(
            "consume", address, "numbers", "--group", "billing", "--max-messages", count, "--format=jsonl"
        )
        producer = forked("produce", path, "numbers", "--rate", 3000, stdin=-1)
        producer.communicate(b"".join(b"%d\n" % i for i in range(count)), 60)
        out, err = consumer.communicate(timeout=60)

    assert (producer.returncode, consumer.returncode) == (0, 0), err
    assert len({json.loads(line)["message_id"] for line in out.splitlines()}) == count
    assert f"{count} done" in err.decode()
    assert printed(path, "offsets show", "--group billing")[1]["offsets"][0]["behind"] == 0


@pytest.mark.parametrize("way", ["directory", "address"])
def test_produce_says_what_a_killed_server_has_stored(tmp_path: Path, way: str) -> None:
    path, lines = tmp_path / "s", tmp_path / "lines"
    lines.write_bytes(b"".join(b"%d\n" % i for i in range(1_000_000)))
    with served(path) as (pid, address):
        target = path if way == "directory" else address
        producer = forked("produce", target, "numbers", lines, "--json", "--rate", 50_000)
        with library.open(path, "r") as reader:
            until(lambda: "numbers" in reader.topics() and sum(1 for _ in reader.iter("numbers")) > 5000)
        os.kill(pid, signal.SIGKILL)
        out, err = producer.communicate(timeout=60)

    done, errors = json.loads(out), err.decode()
    with library.open(path) as store:
        stored = sum(1 for _ in store.iter("numbers"))
    assert (producer.returncode, done["failed"] in errors) == (3, True)
    assert 0 < done["messages"] <= stored <= done["messages"] + done["perhaps_stored"]
    assert f"{done['messages']} messages were stored before this error" in errors


# -- servers that are not there, or others -----------------------------------------------------------------------------

ASKING = ("topics create TARGET new", "produce TARGET new --body x", "consume TARGET new --group g", "clients TARGET")


@contextmanager
def answering(answer: Callable[[bytes], bytes]) -> Iterator[str]:
    """Listen on a port, and answer what each connection sends first. Yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(answer(connection.recv(1 << 16)))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(20)


def of_rocketmq(request: bytes) -> bytes:
    """Return what a broker of RocketMQ answers to a code that it does not know."""
    reader = FrameReader(1 << 16)
    reader.feed(request)
    return b"".join(
        encode(Frame(3, {}, opaque=frame.opaque, flag=RESPONSE, remark="not supported")) for frame in reader
    )


OTHERS = {
    "HTTP": (lambda request: b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", 3, "no server answers"),
    "one that hangs up": (lambda request: b"", 3, "no server answers"),
    "RocketMQ": (of_rocketmq, 3, "refused: not supported"),
}
"""Other servers -> exit code and text of a command at their address."""


@pytest.mark.parametrize("name", OTHERS)
def test_server_of_another_kind_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    answer, code, text = OTHERS[name]
    with answering(answer) as address:
        for command in ASKING:
            result = mqstore(*(address if word == "TARGET" else word for word in command.split()))
            assert (result.exit_code, text in result.stderr) == (code, True), (command, result.output)
    assert list(tmp_path.iterdir()) == []


def test_address_without_a_server_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    for target in (address, f"unix:{tmp_path}/none.sock", "[::1]:1"):
        for command in ASKING:
            result = mqstore(*(target if word == "TARGET" else word for word in command.split()))
            assert (result.exit_code, "no server answers at" in result.stderr) == (3, True), (command, result.output)
    assert list(tmp_path.iterdir()) == []


def test_directory_named_like_an_address_is_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mqstore("produce", "./localhost:9876", "orders", "--body", "x", exit_code=0)
    mqstore("topics", "create", "localhost:9876", "new", exit_code=0)

    assert [path.name for path in tmp_path.iterdir()] == ["localhost:9876"]


STALE = {
    "garbage": b"\x00\xff{",
    "no object": b"[1]",
    "no endpoints": b'{"pid": PID}',
    "wrong types": b'{"pid": "x", "endpoints": 7}',
    "no addresses": b'{"pid": PID, "endpoints": ["nonsense", 5, null]}',
    "endless": b'{"pid": PID, "endpoints": [' + b'"127.0.0.1:1",' * 100_000,
    "of another server": b'{"pid": 1, "endpoints": ["ADDRESS", "unix:SOCKET"]}',
    "of another server, which runs": b'{"pid": PID, "endpoints": ["ADDRESS", "unix:SOCKET"]}',
}
"""Contents of `serve.json` that lead to no server of the directory. Nobody has its lock."""


@pytest.mark.parametrize("name", STALE)
def test_file_of_a_dead_server_misleads_no_command(store: Path, tmp_path: Path, name: str) -> None:
    with served(tmp_path / "other") as (pid, address):
        text = STALE[name]
        for word, value in {b"PID": pid, b"ADDRESS": address, b"SOCKET": f"{tmp_path}/other/serve.sock"}.items():
            text = text.replace(word, str(value).encode())
        (store / "serve.json").write_bytes(text)

        mqstore("topics", "create", store, "new", exit_code=0)
        mqstore("produce", store, "new", "--body", "x", exit_code=0)
        assert mqstore("clients", store).exit_code == 3
        assert "new" not in mqstore("topics", address).stdout
        with library.open(store):
            result = mqstore("topics", "create", store, "newer")
            assert (result.exit_code, f"process {os.getpid()}" in result.stderr) == (3, True)

    assert "new" in mqstore("topics", store).stdout


def test_pipe_in_place_of_the_file_blocks_no_command(store: Path) -> None:
    os.mkfifo(store / "serve.json")
    mqstore("topics", "create", store, "new", exit_code=0)


def test_copy_of_a_served_directory_is_another_store(store: Path, tmp_path: Path) -> None:
    with served(store):
        copy = tmp_path / "copy"
        shutil.copytree(store, copy, ignore=shutil.ignore_patterns("*.sock"))
        mqstore("topics", "create", copy, "new", exit_code=0)
        assert "new" not in mqstore("topics", store).stdout


# -- clients -----------------------------------------------------------------------------------------------------------


@contextmanager
def crowd(path: Path) -> Iterator[tuple[str, Client]]:
    """Serve a store to two consumers of RocketMQ and one of mqstore. Yield its address, and the first of them."""
    with ExitStack() as stack:
        _, address = stack.enter_context(served(path))
        host, _, port = address.rpartition(":")
        first, second = (stack.enter_context(Client((host, int(port)))) for _ in range(2))
        first.heartbeat("c1", orders="paid || new")
        second.heartbeat("c2", orders="new||paid", **{"%RETRY%billing": "*"})
        mine = stack.enter_context(library.connect(path))
        consumer = stack.enter_context(mine.push_consumer("audit"))
        consumer.subscribe("other", lambda message: None)
        yield address, first


def test_clients_are_listed(store: Path) -> None:
    with crowd(store) as (address, first):
        [one, two, mine] = printed(address, "clients", "")[1]["clients"]
        shown, peer = mqstore("clients", store, exit_code=0).stdout, first.socket.getsockname()
        assert mqstore("clients", address, "--conflicts", exit_code=0).stdout == ""

    wanted = {"topic": "orders", "kind": "TAG", "expression": "paid || new"}
    member = {"client_id": "c1", "mode": "CONSUME_PASSIVELY, clustering", "subscriptions": [wanted]}
    assert (one["client_id"], one["groups"], two["client_id"]) == ("c1", [{"group": "billing", **member}], "c2")
    assert one["peer"] == f"{peer[0]}:{peer[1]}"
    assert (mine["language"], mine["groups"][0]["group"], f"@{os.getpid()}@" in mine["client_id"]) == (
        *("PYTHON", "audit"),
        True,
    )
    assert all(word in shown for word in ("c1", "billing", "orders TAG new||paid", "audit", "other TAG *"))


def test_conflicting_members_are_a_finding(store: Path) -> None:
    with crowd(store) as (address, first):
        first.heartbeat("c1", orders="refunded")
        for target in (store, address):
            code, found = printed(target, "clients", "--conflicts")
            [conflict] = found["conflicts"]
            assert (code, conflict["group"], [each["client_id"] for each in conflict["members"]]) == (
                *(1, "billing"),
                ["c1", "c2"],
            )
        assert "refunded" in mqstore("clients", store, "--conflicts", exit_code=1).stdout
        assert printed(store, "clients", "")[0] == 0


def test_topics_and_groups_of_connected_consumers_stay(store: Path) -> None:
    with crowd(store) as (address, first):
        for command in ("topics delete TARGET orders --force", "groups delete TARGET billing"):
            for more in ("--yes", "--dry-run"):
                result = mqstore(*(address if word == "TARGET" else word for word in command.split()), more)
                assert (result.exit_code, "leave" in result.stderr) == (2, True), result.output
        first.notices.clear()
        mqstore("offsets", "reset", store, "--group", "billing", "--topic", "orders", "--to", "latest", "--yes")
        while (notice := first.notice()).code != 220:
            pass
        assert notice.fields["topic"] == "orders"
