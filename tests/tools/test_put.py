"""`mqstore put`: one body, a file, or the lines of stdin; refused whole, or stored whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

import mqstore as library
from tests.tools.support import mqstore, process, snapshot


def bodies(path: Path, topic: str = "orders", queue_id: int = 0) -> list[bytes]:
    with library.MessageStore(path, "r") as store:
        return [message.body for message in store.iter(topic, queue_id)]


def test_a_body_with_everything(tmp_path: Path) -> None:
    options = ["--tag", "created", "--key", "k1", "--key", "k2", "--unique-key", "u", "--property", "region=e=u"]

    result = mqstore("put", tmp_path / "s", "orders", "héllo", "--queue-id", 3, "--durability", "flush", *options)

    assert result.exit_code == 0, result.output
    assert "orders/3, offset 0" in result.stdout
    with library.MessageStore(tmp_path / "s", "r") as store:
        [message] = store.read("orders", 3)
        assert message.body == "héllo".encode()
        assert (message.tag, message.keys, message.unique_key) == ("created", ("k1", "k2"), "u")
        assert dict(message.properties) == {"region": "e=u"}
        assert store.clean_shutdown


def test_json_tells_where_each_message_went(tmp_path: Path) -> None:
    result = mqstore("put", tmp_path / "s", "orders", "-", "--json", stdin=b"one\ntwo\r\n\nlast")

    receipts = [json.loads(line) for line in result.stdout.splitlines()]
    assert [receipt["queue_offset"] for receipt in receipts] == [0, 1, 2, 3]
    assert bodies(tmp_path / "s") == [b"one", b"two\r", b"", b"last"]
    with library.MessageStore(tmp_path / "s", "r") as store:
        assert [store.get_by_id(r["message_id"]).body for r in receipts] == [b"one", b"two\r", b"", b"last"]


def test_many_lines_in_many_chunks(tmp_path: Path) -> None:
    text = b"".join(b"%d\n" % i for i in range(2500))

    result = mqstore("put", tmp_path / "s", "orders", "-", stdin=text)

    assert "put 2500 messages to orders/0, offsets 0..2499" in result.stdout
    assert bodies(tmp_path / "s") == text.splitlines()


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_lines_that_were_stored_before_one_that_cannot_be_are_told(tmp_path: Path, options: list[str]) -> None:
    """Only the error was told, and whoever mended the input and put it again had the first lines twice."""
    text = b"".join(b"%d\n" % i for i in range(2500)) + b"x" * ((4 << 20) + 1)

    result = mqstore("put", tmp_path / "s", "orders", "-", *options, stdin=text)

    stored = bodies(tmp_path / "s")
    assert result.exit_code == 2
    assert stored == text.splitlines()[: len(stored)]
    assert stored
    first, error = result.stderr.splitlines()
    assert first == f"the first {len(stored)} lines were stored, none behind them:"
    assert "line 2501" in error
    assert len(result.stdout.splitlines()) == (len(stored) if options else 0)


def test_lines_of_a_chunk_that_found_the_disk_full_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: library.MessageStore, topic: str, *arguments: Any, **options: Any) -> None:
        error = library.StoreFullError(28, "No space left on device", "commitlog", "allocate")
        error.receipts = [self.put(topic, b"0"), self.put(topic, b"1")]
        raise error

    monkeypatch.setattr(library.MessageStore, "put_many", full)

    result = mqstore("put", tmp_path / "s", "orders", "-", "--json", stdin=b"0\n1\n2\n")

    assert result.exit_code == 3
    assert "the first 2 lines were stored" in result.stderr
    assert [json.loads(line)["queue_offset"] for line in result.stdout.splitlines()] == [0, 1]


def test_an_interrupt_tells_how_many_lines_were_stored(tmp_path: Path) -> None:
    with process("put", tmp_path / "s", "orders", "-", "--json", stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"".join(b"%d\n" % i for i in range(1000)) + b"one more\n")
        child.stdin.flush()
        for _ in range(1000):
            child.stdout.readline()
        child.send_signal(signal.SIGINT)
        assert child.stderr is not None
        told = child.stderr.read()

    assert child.returncode == 130
    assert told == b"the first 1000 lines were stored, none behind them:\n"
    assert len(bodies(tmp_path / "s")) == 1000


def test_no_line_no_message(tmp_path: Path) -> None:
    result = mqstore("put", tmp_path / "s", "orders", "-", stdin=b"")

    assert (result.exit_code, result.stdout) == (0, "")


def test_a_file_is_one_body(tmp_path: Path) -> None:
    data = bytes(range(256)) * 10
    (tmp_path / "body").write_bytes(data)

    mqstore("put", tmp_path / "s", "orders", "--file", tmp_path / "body")

    assert bodies(tmp_path / "s") == [data]


@pytest.mark.parametrize(
    "arguments",
    [
        ["orders"],
        ["orders", "body", "--file", __file__],
        ["or/ders", "body"],
        ["%RETRY%billing", "body"],
        ["SCHEDULE_TOPIC_XXXX", "body"],
        ["orders", "body", "--tag", "a|b"],
        ["orders", "body", "--key", "a b"],
        ["orders", "body", "--property", "novalue"],
        ["orders", "body", "--property", "UNIQ_KEY=x"],
        ["orders", "body", "--queue-id", "-1"],
        ["orders", "body", "--queue-id", "16384"],
        ["orders", "body", "--durability", "maybe"],
        ["orders", "-", "--unique-key", "u"],
        ["orders", "--file", "/nonexistent"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["real", "dry"])
def test_bad_arguments_are_wrong_usage(tmp_path: Path, arguments: list[str], dry: list[str]) -> None:
    mqstore("put", tmp_path / "s", "orders", "first")

    result = mqstore("put", tmp_path / "s", *arguments, *dry)

    assert result.exit_code == 2
    assert bodies(tmp_path / "s") == [b"first"]


def test_a_body_beyond_the_limit_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    long = b"x" * ((4 << 20) + 1)
    (tmp_path / "long").write_bytes(long)

    for result in (
        mqstore("put", tmp_path / "s", "orders", "-", stdin=b"fine\n" + long),
        mqstore("put", tmp_path / "s", "orders", "--file", tmp_path / "long"),
    ):
        assert result.exit_code == 2
        assert "4194304" in result.stderr


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    fresh = mqstore("put", tmp_path / "s", "orders", "-", "--dry-run", "--json", stdin=b"a\nbc\n")
    assert json.loads(fresh.stdout) == {
        "dry_run": True,
        "topic": "orders",
        "queue_id": 0,
        "messages": 2,
        "body_bytes": 3,
    }
    assert not (tmp_path / "s").exists()

    mqstore("put", tmp_path / "s", "orders", "first")
    before = snapshot(tmp_path / "s")
    assert mqstore("put", tmp_path / "s", "orders", "second", "--dry-run").exit_code == 0
    assert snapshot(tmp_path / "s") == before


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["real", "dry"])
def test_no_create_makes_no_store(tmp_path: Path, dry: list[str]) -> None:
    result = mqstore("put", tmp_path / "s", "orders", "body", "--no-create", *dry)

    assert result.exit_code == 3
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["real", "dry"])
def test_a_store_that_another_process_writes_is_refused(tmp_path: Path, dry: list[str]) -> None:
    with library.MessageStore(tmp_path / "s"):
        child = process("put", tmp_path / "s", "orders", "body", *dry)
        _, error = child.communicate(timeout=60)

    assert child.returncode == 3
    assert b"open for writing in process %d" % os.getpid() in error


def test_a_directory_of_something_else_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("dear")

    for dry in ([], ["--dry-run"]):
        assert mqstore("put", tmp_path, "orders", "body", *dry).exit_code == 3
    assert [p.name for p in tmp_path.iterdir()] == ["letter"]


@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["put", "dry run"])
def test_a_queue_that_nobody_reads_is_refused(tmp_path: Path, more: list[str]) -> None:
    """It said where the message had gone, and no consumer ever saw it: the topic has two queues."""
    store = tmp_path / "s"
    assert mqstore("put", store, "free", "x", "--queue-id", "7").exit_code == 0  # in no table: its queues are these
    assert mqstore("topics", "create", store, "orders", "--queues", "2").exit_code == 0
    assert mqstore("topics", "create", store, "closed", "--perm", "r").exit_code == 0

    beyond = mqstore("put", store, "orders", "x", "--queue-id", "2", *more)
    closed = mqstore("put", store, "closed", "x", *more)

    assert (beyond.exit_code, beyond.stdout) == (2, "")
    assert "0..1, the queues of 'orders'" in beyond.stderr
    assert (closed.exit_code, closed.stdout) == (2, "")
    assert "may not be written to" in closed.stderr
    assert mqstore("put", store, "orders", "x", "--queue-id", "1", *more).exit_code == 0
    assert mqstore("put", store, "free", "x", "--queue-id", "9", *more).exit_code == 0
