"""`mqstore get`: one message or a few, by every way there is to name one."""

from __future__ import annotations

import base64
import json
import signal
from pathlib import Path
from typing import Any

import pytest

import mqstore as library
from mqstore import Profile, SendReceipt, SimulatedClock
from tests.log.support import flip_log, open_store
from tests.tools.damages import DAMAGES, filled
from tests.tools.support import json_lines, mqstore, running
from tests.waiting import is_readable


@pytest.fixture
def store(tmp_path: Path) -> tuple[Path, list[SendReceipt]]:
    """Five messages in orders/0; number 3 bears key k3, unique key u3 and tag odd."""
    with open_store(tmp_path / "s") as opened:
        receipts = [
            opened.put("orders", b"body %d" % i, tag="odd" if i % 2 else "even", keys=f"k{i}", unique_key=f"u{i}")
            for i in range(5)
        ]
    return tmp_path / "s", receipts


def get(path: Path, *options: object) -> list[dict[str, Any]]:
    result = mqstore("get", path, *options, "--json", exit_code=0)
    return json_lines(result.stdout)


def offsets(messages: list[dict[str, Any]]) -> list[int]:
    return [message["queue_offset"] for message in messages]


def test_by_offset(store: tuple[Path, list[SendReceipt]]) -> None:
    path, _ = store

    assert offsets(get(path, "--topic", "orders", "--offset", 1)) == [1]
    assert offsets(get(path, "--topic", "orders", "--offset", 2, "--max-messages", 2)) == [2, 3]
    assert offsets(get(path, "--topic", "orders", "--max-messages", 9, "--tag", "odd")) == [1, 3]


def test_by_id_and_place(store: tuple[Path, list[SendReceipt]]) -> None:
    path, receipts = store

    assert offsets(get(path, "--message-id", receipts[3].message_id)) == [3]
    assert offsets(get(path, "--physical-offset", receipts[3].physical_offset)) == [3]


def test_for_people_it_shows_names_and_an_escaped_body(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", segment_bytes=1 << 14) as store:
        store.append(
            "orders",
            0,
            b"\x1b[31mred\xff" + b"x" * 5000,
            properties={"TAGS": "\x1b[2J", "KEYS": "a\u202eb", "region": "eu"},
        )

    shown = mqstore("get", tmp_path / "s", "--topic", "orders").stdout

    assert "orders/0@0" in shown
    assert "\\x1b[31mred\\xff" in shown
    assert "... 5009 bytes" in shown
    assert "tag=\\x1b[2J" in shown
    assert "keys=a\\u202eb" in shown
    assert "region=eu" in shown


def test_empty_queue_differs_from_a_missing_topic(store: tuple[Path, list[SendReceipt]]) -> None:
    path, _ = store

    result = mqstore("get", path, "--topic", "orders", "--queue-id", 7)

    assert "queue 7 of 'orders' is empty; there are messages in 0" in result.stderr


def test_a_search_without_hits_exits_with_1(store: tuple[Path, list[SendReceipt]]) -> None:
    result = mqstore("get", store[0], "--topic", "orders", "--key", "nobody")

    assert (result.exit_code, result.stdout, result.stderr) == (
        1,
        "",
        "no message\nsearched by index: 0 messages of 0 B, segments: 0\n",
    )


@pytest.mark.parametrize(("profile", "killed"), [("mqstore", False), ("rocketmq", True)], ids=["closed", "killed"])
@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("queue gone", ["--topic", "topic0", "--queue-id", "0"], "topic0, queue 0, lacks messages"),
        ("queue gone", ["--topic", "topic0", "--queue-id", "0", "--offset", "3"], "topic0, queue 0, lacks messages"),
        ("topic gone", ["--topic", "topic1", "--queue-id", "1"], "topic1, queue 0, lacks messages"),
        ("topic gone", ["--topic", "topic1", "--key", "k1", "--max-messages", "2"], "topic1, queue 0, lacks messages"),
        ("queues gone", ["--topic", "topic0", "--queue-id", "0"], "topic0, queue 0, lacks messages"),
        ("index gone", ["--topic", "topic0", "--key", "k2"], "recover"),
        ("one message", ["--physical-offset", "40"], "bad_record: commitlog/"),
        ("segment gone", ["--physical-offset", "45"], "missing_segment: commitlog/"),
        ("last message", ["--physical-offset", "89"], "_tail: commitlog/"),
    ],
)
def test_an_answer_that_loss_may_have_cut_short_exits_with_1(
    tmp_path: Path, name: str, options: list[str], says: str, profile: Profile, killed: bool
) -> None:
    puts = filled(tmp_path / "s", profile, killed=killed)
    DAMAGES[name](tmp_path / "s", puts)
    if options[0] == "--physical-offset":
        options = [options[0], str(puts[int(options[1])]["physical_offset"])]

    result = mqstore("get", tmp_path / "s", *options, exit_code=1)

    assert says in result.stderr
    if says.endswith("lacks messages"):
        assert f"`mqstore recover {tmp_path / 's'}`" in result.stderr


def test_loss_elsewhere_does_not_matter(tmp_path: Path) -> None:
    puts = filled(tmp_path / "s", "mqstore", killed=False)
    DAMAGES["topic gone"](tmp_path / "s", puts)

    assert mqstore("get", tmp_path / "s", "--topic", "topic0", "--max-messages", 99).exit_code == 0
    assert mqstore("get", tmp_path / "s", "--topic", "nonesuch").exit_code == 2
    assert mqstore("get", tmp_path / "s", "--physical-offset", puts[3]["physical_offset"] + 1).exit_code == 2


def test_damage_exits_with_1(store: tuple[Path, list[SendReceipt]]) -> None:
    path, receipts = store
    flip_log(path, receipts[2].physical_offset + 90)

    result = mqstore("get", path, "--topic", "orders", "--max-messages", 5, "--json", exit_code=1)

    assert offsets([json.loads(line) for line in result.stdout.splitlines()]) == [0, 1, 3, 4]


def test_damaged_last_message_does_not_hang(store: tuple[Path, list[SendReceipt]]) -> None:
    """A reader takes it for a record that is being written, and must not wait for it."""
    path, receipts = store
    flip_log(path, receipts[4].physical_offset + 90)

    result = mqstore("get", path, "--topic", "orders", "--offset", 4)

    assert (result.exit_code, result.stdout) == (1, "")


def test_a_body_that_does_not_inflate_is_shown_as_stored(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        store.append("orders", 0, b"not zlib", sys_flag=1)

    people, program = (mqstore("get", tmp_path / "s", "--topic", "orders", *o) for o in ([], ["--json"]))

    assert (people.exit_code, program.exit_code) == (1, 1)
    assert "    not zlib" in people.stdout
    assert program.stdout == ""
    assert "zlib" in program.stderr
    raw = mqstore("get", tmp_path / "s", "--topic", "orders", "--offset", 0, "--raw-bodies", "--json")
    assert (raw.exit_code, raw.stderr) == (0, "")
    assert base64.b64decode(json.loads(raw.stdout)["body"]) == b"not zlib"


# -- the newest, and those that come ----------------------------------------------------------------------------------


@pytest.fixture
def turns(tmp_path: Path) -> Path:
    """Messages 0..29 in three queues by turns, each a millisecond behind the other."""
    clock = SimulatedClock()
    with open_store(tmp_path / "turns", clock=clock) as store:
        for i in range(30):
            clock.advance(1)
            store.put("orders", b"%d" % i, i % 3, tag="tens" if i % 10 == 0 else None)
    return tmp_path / "turns"


@pytest.mark.parametrize(
    ("options", "bodies"),
    [
        (["--last", 2], [28, 29]),
        (["--last", 1000], list(range(30))),
        (["--last", 3, "--queue-id", 1], [22, 25, 28]),
        (["--last", 2, "--tag", "tens"], [10, 20]),
    ],
)
def test_the_newest_of_the_queues_come_by_store_time(turns: Path, options: list[object], bodies: list[int]) -> None:
    found = get(turns, "--topic", "orders", *options)

    assert [int(base64.b64decode(message["body"])) for message in found] == bodies


def test_follow_alone_leaves_out_what_is_there(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        store.put("orders", b"old")
        store.dispatch()
        with running("get", tmp_path / "s", "--topic", "orders", "--follow", "--json") as child:
            while not is_readable(child.stdout, 0.1):
                store.put("orders", b"new")
                store.dispatch()
            line = child.stdout.readline()

    assert json.loads(line)["queue_offset"] > 0


@pytest.mark.parametrize("options", [["--last", 5], ["--last", 5, "--queue-id", 0]], ids=str)
def test_follow_prints_what_comes_until_interrupted(tmp_path: Path, options: list[object]) -> None:
    with open_store(tmp_path / "s") as store:
        store.put("other", b"so that there is a store")
        store.dispatch()
        with running("get", tmp_path / "s", "--topic", "orders", "--follow", "--json", *options) as child:
            seen = []
            for i in range(3):  # the topic, and later two more messages, appear under its eyes
                store.put("orders", b"%d" % i)
                store.dispatch()
                seen.append(json.loads(child.stdout.readline())["queue_offset"])
            child.send_signal(signal.SIGINT)
            rest, error = child.communicate(timeout=60)

    assert seen == [0, 1, 2]
    assert (child.returncode, rest, error) == (0, b"", b"")


def test_damage_among_the_newest_hides_nothing(turns: Path) -> None:
    with library.open(turns, "r") as store:
        [last] = store.read("orders", 2, 9)
    flip_log(turns, last.physical_offset + 88)

    result = mqstore("get", turns, "--topic", "orders", "--last", 3, exit_code=1)

    assert [int(line) for line in result.stdout.splitlines() if line.startswith("    ")] == [26, 27, 28]
    assert result.stderr.startswith("bad_record: commitlog/")
