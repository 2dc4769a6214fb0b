"""`mqstore export`: every readable message of every queue, field by field, and nothing lost beside damage."""

from __future__ import annotations

import base64
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import lz4.frame
import pytest
import zstandard
from click.testing import Result

from mqstore.engine import StoreFiles
from tests.conftest import GOLDEN_NAMES, Golden
from tests.faults import FaultyFileSystem
from tests.log.splicesupport import Row, kill_in_splice, stage
from tests.log.support import EXPORTED, as_ours, delete_as_java, flip_log, open_store
from tests.tools.damages import DAMAGES, filled
from tests.tools.support import json_lines, mqstore, seen_on_a_terminal

COMPRESSED, TRANSACTION_PREPARED, TRANSACTION_ROLLBACK = 1, 4, 12
"""Bits of sys_flag (format#flags)."""
#: The contract, in its order.
FIELDS = [*EXPORTED[:5], "body", *EXPORTED[5:]]


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_java_store_is_exported_as_by_java(golden: Golden, name: str) -> None:
    store = golden(name)
    expected = {(m["topic"], m["queue_id"], m["queue_offset"]): m for m in store.of("message")}

    result = mqstore("export", store.path, exit_code=0)

    found = json_lines(result.stdout)
    assert [m["physical_offset"] for m in found] == sorted(m["physical_offset"] for m in found)
    assert {(m["topic"], m["queue_id"], m["queue_offset"]) for m in found} == expected.keys()
    assert len(found) == len(expected)
    for message in found:
        wanted = expected[message["topic"], message["queue_id"], message["queue_offset"]]
        assert list(message) == FIELDS
        for field, value in message.items():
            assert value == as_ours(field, wanted[field]), (field, wanted)


# -- damage ------------------------------------------------------------------------------------------------------------


def test_orphan_records_are_exported(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        store.put("t", b"a")
        store.dispatch()
        store.put("t", b"b")
        shutil.copytree(store.path, tmp_path / "crashed")

    result = mqstore("export", tmp_path / "crashed")

    assert (result.exit_code, len(json_lines(result.stdout))) == (0, 2)


@pytest.mark.parametrize("name", ["clean", "crashed"])
def test_a_java_store_is_exported_without_its_queues(golden: Golden, name: str) -> None:
    path = golden(name).path
    before = mqstore("export", path).stdout
    shutil.rmtree(path / "consumequeue")

    result = mqstore("export", path)

    assert (result.exit_code, result.stdout) == (0, before)
    assert "no queue lists" not in result.stderr
    for words in (("get", path, "--topic", "orders"), ("get", path, "--topic", "orders", "--last", 10)):
        assert "queues have lost files" in mqstore(*words).stderr


def earlier_generation(root: Path) -> set[tuple[str, int]]:
    """A Java broker deleted the topic, and made it again."""
    with open_store(root, profile="rocketmq") as store:
        store.put_many("orders", [b"old"] * 9, queue_id=0)
        store.put("others", b"other", queue_id=0)
    delete_as_java(root, "orders")
    with open_store(root) as store:
        store.put_many("orders", [b"new"] * 3, queue_id=0)
    return {("orders", n) for n in range(3)} | {("others", 0)}


def prepared_transaction(root: Path) -> set[tuple[str, int]]:
    with open_store(root) as store:
        store.put("orders", b"before", queue_id=0)
        store.append("orders", 0, b"prepared", sys_flag=TRANSACTION_PREPARED)
        store.append("orders", 0, b"rolled back", sys_flag=TRANSACTION_ROLLBACK)
        store.put("orders", b"behind", queue_id=0)
    return {("orders", 0), ("orders", 1)}


def unfinished_bulk_append(root: Path) -> set[tuple[str, int]]:
    """All records are written, and nothing says yet that they count."""
    store = open_store(root, fs=FaultyFileSystem())
    store.put("orders", b"before", queue_id=0)
    store.dispatch()
    kill_in_splice(store, [stage(root.parent / "shard", [Row(b"batch")] * 3)])
    return {("orders", 0)}


@pytest.mark.parametrize("make", [earlier_generation, prepared_transaction, unfinished_bulk_append])
def test_omitted_records_are_not_exported(tmp_path: Path, make: Callable[[Path], set[tuple[str, int]]]) -> None:
    listed = make(tmp_path / "s")

    result = mqstore("export", tmp_path / "s")

    found = json_lines(result.stdout)
    assert (result.exit_code, {(m["topic"], m["queue_offset"]) for m in found}, len(found)) == (0, listed, len(listed))
    mqstore("recover", tmp_path / "s")
    assert json_lines(mqstore("export", tmp_path / "s").stdout) == found


@pytest.mark.parametrize("damage", ["none", "queues gone", "neighbours"])
def test_only_chosen_messages_and_losses_are_reported(tmp_path: Path, damage: str) -> None:
    puts = filled(tmp_path / "s", "mqstore", killed=False)
    DAMAGES[damage](tmp_path / "s", puts)
    lost = [40, 41, 43] if damage == "neighbours" else []
    wanted = [i for i, put in enumerate(puts) if put["topic"] == "topic1" and put["queue_offset"] >= 5]

    chosen = ("--topic", "topic1", "--from-offset", 5)
    result = mqstore("export", tmp_path / "s", "--json", *chosen)

    places = [m["physical_offset"] for m in json_lines(result.stdout)]
    assert places == [puts[i]["physical_offset"] for i in wanted if i not in lost]
    assert json_lines(result.stderr)[-1]["missing"] == len({*wanted} & {*lost})


def test_the_selection_narrows_what_is_exported(golden: Golden) -> None:
    store = golden("clean")
    of_queue = [m for m in store.of("message") if (m["topic"], m["queue_id"]) == ("orders", 1)]

    chosen = ["--topic", "orders", "--queue-id", 1, "--from-offset", 3, "--max-messages", 4]
    found = json_lines(mqstore("export", store.path, *chosen).stdout)

    assert [m["queue_offset"] for m in found] == [3, 4, 5, 6]
    assert len(of_queue) > 7
    assert len(json_lines(mqstore("export", store.path, "--topic", "orders").stdout)) > len(of_queue)
    assert mqstore("export", store.path, "--max-messages", 0).stdout == ""


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    """A closed store of ten messages of 100 bytes in one queue."""
    with open_store(tmp_path / "ten", segment_bytes=1 << 16) as store:
        store.put_many("orders", [b"%d" % i * 100 for i in range(10)])
    return tmp_path / "ten"


@pytest.mark.parametrize("victims", [[0], [4], [9], [8, 9], [3, 4, 9], list(range(9)), list(range(10))], ids=str)
def test_damage_costs_only_the_messages_it_hit(ten: Path, victims: list[int]) -> None:
    """Also at the end of the log, where there is no record behind the damage."""
    whole = json_lines(mqstore("export", ten).stdout)
    for i in victims:
        flip_log(ten, whole[i]["physical_offset"] + 100)

    result, told = mqstore("export", ten, "--json"), mqstore("export", ten)

    assert result.exit_code == 1
    assert json_lines(result.stdout) == [m for m in whole if m["queue_offset"] not in victims]
    assert "missing: orders, queue 0, offset" in told.stderr
    assert f"exported {10 - len(victims)} messages of " in told.stderr
    assert f" queues, {len(victims)} messages are missing" in told.stderr
    summary = json_lines(result.stderr)[-1]
    assert summary == {
        "ok": False,
        "messages": 10 - len(victims),
        "queues": int(len(victims) < 10),
        "missing": len(victims),
        "findings": summary["findings"],
    }
    assert summary["findings"] > 0


def test_undecodable_body_is_omitted_and_reported(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        store.put("orders", b"before")
        bad = store.append("orders", 0, b"\x1b[31mnot zlib", sys_flag=COMPRESSED)
        store.put("orders", b"behind")

    result = mqstore("export", tmp_path / "s", exit_code=1)

    assert [base64.b64decode(m["body"]) for m in json_lines(result.stdout)] == [b"before", b"behind"]
    assert f"at {bad.physical_offset}, {bad.size} bytes" in result.stderr
    assert "exported 2 messages" in result.stderr


LZ4, ZSTD = 0x101, 0x201


@pytest.fixture
def compressed(tmp_path: Path) -> Path:
    """A store with three plain messages, three bodies in LZ4, and one in Zstandard."""
    with open_store(tmp_path / "s") as store:
        for i in range(3):
            store.put("orders", b"plain %d" % i)
            store.append("orders", 0, lz4.frame.compress(b"lz4 %d" % i), sys_flag=LZ4)
        store.append("orders", 0, zstandard.compress(b"zstd"), sys_flag=ZSTD)
    return tmp_path / "s"


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lz4.frame", None)
    monkeypatch.setitem(sys.modules, "zstandard", None)


def exported_bodies(result: Result) -> list[bytes]:
    return [base64.b64decode(message["body"]) for message in json_lines(result.stdout)]


def test_bodies_in_lz4_and_zstandard_are_inflated(compressed: Path) -> None:
    result = mqstore("export", compressed, exit_code=0)

    assert exported_bodies(result) == [b"plain 0", b"lz4 0", b"plain 1", b"lz4 1", b"plain 2", b"lz4 2", b"zstd"]


def check_not_inflated(stderr: str) -> None:
    *findings, summary = json_lines(stderr)
    assert [finding["kind"] for finding in findings] == ["not_inflated"] * 2
    for finding, count, package in zip(findings, (3, 1), ("lz4", "zstandard"), strict=True):
        assert finding["detail"].startswith(f"{count} messages are skipped")
        assert f"pip install {package}" in finding["detail"]
    assert (summary["ok"], summary["messages"]) == (False, 3)


@pytest.mark.usefixtures("without_packages")
def test_missing_package_is_one_line(compressed: Path) -> None:
    """Each was a bad_record, with a line of its own: 13 to 16 % of the messages of a store in order."""
    result = mqstore("export", compressed, "--json", exit_code=1)

    assert exported_bodies(result) == [b"plain 0", b"plain 1", b"plain 2"]
    check_not_inflated(result.stderr)


@pytest.mark.usefixtures("without_packages")
def test_raw_bodies_are_written_as_they_are_stored(compressed: Path) -> None:
    result = mqstore("export", compressed, "--raw-bodies", exit_code=0)

    messages = json_lines(result.stdout)
    assert [message["sys_flag"] for message in messages] == [0, LZ4, 0, LZ4, 0, LZ4, ZSTD]
    assert exported_bodies(result)[1] == lz4.frame.compress(b"lz4 0")


def test_a_file_appears_only_when_it_is_complete(ten: Path, tmp_path: Path) -> None:
    target = tmp_path / "all.jsonl"

    result = mqstore("export", ten, "--output", target, "--json", exit_code=0)

    assert json.loads(result.stdout) == {
        "version": 1,
        "ok": True,
        "messages": 10,
        "queues": 1,
        "missing": 0,
        "findings": 0,
    }
    assert len(json_lines(target.read_text())) == 10
    assert sorted(p.name for p in tmp_path.iterdir()) == ["all.jsonl", "ten"]


def test_a_failed_export_leaves_the_old_file_and_nothing_else(ten: Path, tmp_path: Path) -> None:
    target = tmp_path / "all.jsonl"
    target.write_text("old")

    mqstore("export", ten, "--topic", "nonesuch", "--output", target, exit_code=2)

    assert target.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["all.jsonl", "ten"]


def test_hostile_text_is_ascii_on_the_way_and_whole_on_arrival(tmp_path: Path) -> None:
    """A Java producer may have put anything into properties; `append` is how an import writes such a record."""
    evil = "\x1b]0;owned\x07\x7f\x9b\u202e"
    with open_store(tmp_path / "s") as store:
        store.append("orders", 0, os.fsencode(evil), properties={"TAGS": evil, "KEYS": evil, evil: evil})

    result = mqstore("export", tmp_path / "s")

    assert result.stdout.isascii()
    assert "\x7f" not in result.stdout
    [message] = json_lines(result.stdout)
    assert (message["tags"], message["keys"], message["properties"][evil]) == (evil, evil, evil)
    assert base64.b64decode(message["body"]).decode() == evil


@pytest.mark.parametrize("there", [True, False])
def test_an_output_that_is_a_link_is_written_where_it_leads(ten: Path, tmp_path: Path, there: bool) -> None:
    """The link was replaced by a file; where it led to another file system, the whole export was in vain."""
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "all.jsonl", tmp_path / "link"
    link.symlink_to(target)
    if there:
        target.write_text("old")

    assert mqstore("export", ten, "--output", link).exit_code == 0

    assert link.is_symlink()
    assert len(target.read_text().splitlines()) == 10
    assert [path.name for path in target.parent.iterdir()] == ["all.jsonl"]


def test_an_output_that_is_no_file_is_written_and_not_replaced(ten: Path, tmp_path: Path) -> None:
    """`--output /dev/null` of who may do so put a file in the place of the device."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # 10 lines fit the pipe
    try:
        assert mqstore("export", ten, "--output", pipe).exit_code == 0
        assert len(os.read(reader, 1 << 16).splitlines()) == 10
    finally:
        os.close(reader)

    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_an_output_for_which_there_is_no_room_is_named(ten: Path) -> None:
    result = mqstore("export", ten, "--output", "/dev/full", exit_code=3)

    assert "'/dev/full'" in result.stderr


def test_later_messages_are_not_exported(tmp_path: Path) -> None:
    """The log is read to the end that the queues had at the start."""
    with open_store(tmp_path / "s") as writer:
        for queue_id in range(3):
            writer.put_many("orders", [b"before"] * 10, queue_id=queue_id)
        writer.dispatch()
        with StoreFiles(tmp_path / "s") as files:
            log = files.log()
            found = next(log)
            for queue_id in range(3):
                writer.put_many("orders", [b"meanwhile"] * 10, queue_id=queue_id)
            writer.dispatch()
            found += [message for messages in log for message in messages]

    assert [message.body for message in found] == [b"before"] * 30


def test_a_progress_bar_on_a_terminal_leaves_the_output_alone(ten: Path) -> None:
    """With a terminal at stderr the messages went there, and a file or pipe at stdout stayed empty."""
    code, out, seen = seen_on_a_terminal("export", ten)

    assert (code, len(json_lines(out))) == (0, 10)
    assert ("exporting" in seen, "queue_offset" in seen) == (True, False)
