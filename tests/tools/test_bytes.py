"""`mqstore inspect --file` and `mqstore get --hex`: fields beside bytes, of whole, damaged and hostile files."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mqstore as library
from examples import shop
from mqstore import SimulatedClock, StoreConfig
from tests.commands import opening
from tests.log.support import flip
from tests.tools.support import mqstore, mqstore_json, snapshot

SLOTS, SEGMENT = 64, 1 << 16
DUE_S = shop.BEGIN_MS // 1000 + 7200 + 86_400 - 1  # the slot of a deliver time is the second before it
FILES = {
    "commitlog": "commitlog/00000000000000131072",
    "consumequeue": "consumequeue/orders/1/00000000000000000000",
    "index": "index/20260131010000000",
    "checkpoint": "checkpoint",
    "timerlog": "timerlog/00000000000000000000",
    "timerwheel": "timerwheel",
    "timercheck": "config/timercheck",
    "json": "config/consumerOrderInfo.json",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shop, and a batch that was popped in order."""
    path = tmp_path_factory.mktemp("bytes") / "shop"
    shop.fill(path)
    clock = SimulatedClock(shop.BEGIN_MS + 7_200_000)
    with library.open(path, config=StoreConfig(clock=clock)) as store:
        store.put("orders", b"\x1b[2J", queue_id=0)
        assert len(store.broker.pop("audit", "payments", 3, order=True)) == 3
    return path


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "shop"))


def items(*words: object, exit_code: int = 0) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = mqstore_json("inspect", "--file", *words, exit_code=exit_code)["items"]
    return found


def values(item: dict[str, Any]) -> dict[str, Any]:
    return {field["name"]: field["value"] for field in item["fields"]}


@pytest.mark.parametrize("kind", FILES)
def test_fields_show_the_bytes_of_their_position(made: Path, kind: str) -> None:
    data = (made / FILES[kind]).read_bytes()

    found = items(made / FILES[kind], "--limit", 30)

    assert found
    for item in found:
        assert (item["kind"], item["problem"]) == (kind, "")
        for field in item["fields"]:
            raw = data[field["position"] : field["position"] + field["size"]]
            assert bytes.fromhex(field["bytes"]) == raw[:64], field
        fields = [field for field in item["fields"] if not field["name"].startswith("body.")]
        ends = [field["position"] + field["size"] for field in fields]
        if kind != "json":  # no byte is left out
            assert [field["position"] for field in fields] == [item["position"], *ends[:-1]]
            assert item["position"] + item["size"] == ends[-1]


@pytest.mark.parametrize("kind", FILES)
def test_copy_is_recognized_by_its_content(made: Path, tmp_path: Path, kind: str) -> None:
    shutil.copy(made / FILES[kind], tmp_path / "copy")

    assert items(tmp_path / "copy", "--limit", 30) == items(made / FILES[kind], "--limit", 30)


def test_record_has_the_values_of_its_message(made: Path) -> None:
    with library.open(made, mode="r") as opened:
        message = opened.read("orders", 1, 50, 1)[0]
    where = message.physical_offset

    found = mqstore_json("get", made, "--physical-offset", where, "--hex")
    by_id = mqstore_json("get", made, "--id", message.message_id, "--hex")

    [item] = found["items"]
    assert by_id == found
    assert item["position"] == where % SEGMENT
    assert item["size"] == message.size
    expected = {
        "size": message.size, "queue_id": 1, "queue_offset": 50, "physical_offset": where, "flag": 0,
        "store_timestamp_ms": message.store_timestamp_ms, "born_host": "127.0.0.1:0", "magic": "DAA320A7",
        "body_size": len(message.body), "body": message.body[:64].decode(), "topic": "orders",
        "property KEYS": "o-201", "property TAGS": "card",
    }  # fmt: skip
    assert {name: values(item)[name] for name in expected} == expected


def test_chosen_unit_is_followed_by_its_record(made: Path) -> None:
    unit, record = items(made / FILES["consumequeue"], "--offset", 50)

    assert (unit["title"], unit["position"]) == ("unit 50", 1000)
    assert record["title"] == f"record at {values(unit)['physical_offset']}"
    assert values(record)["queue_offset"] == 50
    assert values(unit)["size"] == record["size"]


def test_slot_has_the_chain_of_a_key(made: Path) -> None:
    with library.open(made, mode="r") as opened:
        places = [message.physical_offset for message in opened.find("payments", key="o-192")]
    hashed = 0
    for letter in b"payments#o-192":  # as `String.hashCode` and `IndexFile.indexKeyHashMethod` do
        hashed = (hashed * 31 + letter) & 0xFFFFFFFF
    slot = abs(hashed - (hashed >> 31 << 32)) % SLOTS

    header, first, *chain = items(made / FILES["index"], "--offset", slot, "--limit", 999)

    assert values(header)["next_entry"] > 900
    assert first["title"] == f"slot {slot}"
    chain = [item for item in chain if item["title"].endswith(f" of slot {slot}")]
    assert [values(item)["physical_offset"] for item in chain if values(item)["key_hash"] % SLOTS != slot] == []
    assert {*places} <= {values(item)["physical_offset"] for item in chain}
    numbers = [values(first)["newest_entry"], *(values(item)["previous_entry"] for item in chain)]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[-1] == 0


def test_timer_order_info_and_pop_log_are_opened(made: Path) -> None:
    unit, waiting = items(made / FILES["timerlog"], "--offset", 0)
    [slot] = items(made / FILES["timerwheel"])
    check, progress = items(made / FILES["timercheck"])
    [order] = items(made / FILES["json"])
    _, pop = items(made / "consumequeue/rmq_sys_pop_log/0/00000000000000000000", "--offset", 0)

    assert values(waiting)["property KEYS"] == "o-17"
    assert (values(unit)["write_ms"] + values(unit)["delay_ms"]) // 1000 == values(slot)["time_s"] == DUE_S
    assert (values(slot)["number"], values(check)["queue_offset"], values(progress)["queue_offset"]) == (1, 1, 1)
    assert values(order)["table.payments@audit.0.popTime"] == str(shop.BEGIN_MS + 7_200_000)
    assert values(order)["table.payments@audit.0.o.1"] == "1"
    assert {"body.so", "body.pt", "body.it"} < {*values(pop)}
    assert values(pop)["body.pt"] == str(shop.BEGIN_MS)


RECORD = 131_072  # the first of its segment
DAMAGE: dict[str, tuple[str, int, str, str]] = {
    "checksum": ("commitlog", 9, "checksum", "checksum"),
    "magic": ("commitlog", 5, "magic", "magic"),
    "size": ("commitlog", 1, "size", "possible"),
    "place": ("commitlog", 33, "physical_offset", "claims position"),
    "body": ("commitlog", 100, "checksum", "checksum"),
    "body size": ("commitlog", 85, "body_size", "bodyLength"),
    "unit": ("consumequeue", 0, "", "points to no record"),
    "timer unit": ("timerlog", 30, "", "checksum"),
    "checkpoint": ("checkpoint", 75, "crc", "checksum"),
    "time of the checkpoint": ("checkpoint", 0, "crc", "impossible"),
    "index header": ("index", 36, "next_entry", "room"),
    "index slot": ("index", 40, "", "does not exist"),
    "index entry": ("index", 40 + 4 * SLOTS + 20 * 936 + 16, "previous_entry", "older"),
    "timer check": ("timercheck", 1060, "", "valid"),
    "json": ("json", 0, "", "JSON"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_field_says_the_problem(store: Path, name: str) -> None:
    kind, position, field, text = DAMAGE[name]
    flip(store / FILES[kind], position, 7)

    found = items(store / FILES[kind], "--limit", 2000, exit_code=1)
    [bad, *_] = [item for item in found if item["problem"]]
    shown = mqstore("inspect", "--file", store / FILES[kind], "--limit", found.index(bad) + 1, exit_code=1)

    assert text in bad["problem"]
    assert [each["name"] for each in bad["fields"] if each["problem"]][:1] == [field] * bool(field)
    assert f"problem: {bad['problem']}" in shown.stderr
    assert kind in ("checkpoint", "json", "timerlog") or any(not item["problem"] for item in found)


def test_unit_that_points_nowhere_is_shown_alone(store: Path) -> None:
    for bit in (7, 6):  # before the log, beyond it
        flip(store / FILES["consumequeue"], 0, bit)
        assert [item["title"] for item in items(store / FILES["consumequeue"], "--offset", 0, exit_code=bit // 7)] == [
            "unit 0"
        ]
        flip(store / FILES["consumequeue"], 0, bit)


def test_chain_that_does_not_lead_to_older_entries_ends(store: Path) -> None:
    newest = items(store / FILES["index"], "--limit", 3)[2]
    number = int(newest["title"].split()[1])
    with open(store / FILES["index"], "r+b") as file:
        file.seek(newest["position"] + 16)
        file.write(struct.pack(">i", number))

    _, _, bad, *others = items(store / FILES["index"], "--limit", 9, exit_code=1)

    assert "older" in bad["problem"]
    assert [item for item in others if item["title"] == bad["title"]] == []


def test_void_unit_and_unwritten_end_of_the_log_are_fine(store: Path) -> None:
    with open(store / FILES["consumequeue"], "r+b") as file:
        file.write(struct.pack(">qiq", 0, 0x7FFFFFFF, 0))
    last = sorted((store / "commitlog").glob("0*"))[-1]

    assert values(items(store / FILES["consumequeue"])[0])["size"] == 0x7FFFFFFF
    assert {item["title"].split()[0] for item in items(last, "--limit", 99)} == {"record"}


def test_log_continues_after_damage_with_the_next_record(store: Path) -> None:
    file = store / FILES["commitlog"]
    [first, second] = items(file, "--limit", 2)
    with open(file, "r+b") as opened:
        opened.write(b"?" * (first["size"] - 5))

    bad, good = items(file, "--limit", 2, exit_code=1)

    assert "record" in bad["title"]
    assert good == second


def test_offset_and_limit_choose_items(made: Path) -> None:
    units = items(made / FILES["consumequeue"], "--limit", 90)
    assert len(units) == 90
    assert items(made / FILES["consumequeue"], "--offset", 30, "--limit", 2) == units[30:32]
    assert items(made / FILES["consumequeue"]) == units[:4]
    assert len(items(made / FILES["commitlog"])) == 4
    assert items(made, "--offset", RECORD) == items(made / FILES["commitlog"], "--limit", 1)
    empty = items(made / FILES["consumequeue"], "--offset", 91, exit_code=1)  # no message has it
    assert values(empty[0])["size"] == 0


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["DIR", "--file", "DIR/checkpoint"],
        ["DIR", "--offset", "3"],
        ["DIR", "--as", "index"],
        ["--file", "DIR"],
        ["--file", "DIR/checkpoint", "--as", "nonsense"],
        ["--file", "DIR", "--offset", str(1 << 40)],
        ["--file", f"DIR/{FILES['consumequeue']}", "--offset", str(1 << 40)],
        ["--file", f"DIR/{FILES['index']}", "--offset", str(SLOTS)],
        ["--file", "/bin/sh"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_refused(made: Path, words: list[str]) -> None:
    assert mqstore("inspect", *(word.replace("DIR", str(made)) for word in words)).exit_code == 2


def test_opening_files_leaves_no_trace(store: Path) -> None:
    (store / FILES["index"]).rename(store / "index" / "20200101000000000")
    before = snapshot(store)

    codes = [mqstore(*words).exit_code for words in opening(store).values()]

    assert codes == [0] * len(codes)
    assert snapshot(store) == before


def test_device_and_fifo_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")

    for path in (tmp_path / "fifo", "/dev/zero", tmp_path / "absent"):
        assert mqstore("inspect", "--file", path).exit_code == 3


HOSTILE: dict[str, Callable[[random.Random], bytes]] = {
    "noise": lambda rng: rng.randbytes(9000),
    "controls": lambda rng: b"\x1b[2J\r\n\x9b" * 999,
    "records": lambda rng: b"".join(
        struct.pack(">iI", rng.choice([0, 91, 200, 1 << 30, -5]), 0xDAA320A7) + rng.randbytes(rng.randrange(200))
        for _ in range(50)
    ),
    "deep": lambda rng: b'{"\x1b":[' * 9999,
    "open string": lambda rng: b'{"' + b"\\" * 9999,
    "ones": lambda rng: b"\xff" * 5000,
    "short": lambda rng: b"\0\0\0",
    "nothing": lambda rng: b"",
}


@pytest.mark.parametrize("content", HOSTILE)
@pytest.mark.parametrize("kind", FILES)
def test_hostile_content_is_shown_within_bounds(tmp_path: Path, kind: str, content: str) -> None:
    for data in {HOSTILE[content](random.Random(seed)) for seed in range(2)}:
        (tmp_path / "file").write_bytes(data)

        result = mqstore("inspect", "--file", tmp_path / "file", "--as", kind, "--limit", 9)
        found = mqstore("inspect", "--file", tmp_path / "file", "--as", kind, "--limit", 9, "--json")

        assert result.exit_code in (0, 1)
        assert len(result.stdout) < 200_000
        assert len(json.loads(found.stdout)["items"]) <= 10


@pytest.mark.parametrize("kind", FILES)
def test_large_sparse_file_is_not_read_whole(tmp_path: Path, kind: str) -> None:
    with open(tmp_path / "file", "wb") as file:
        file.truncate(1 << 40)

    result = mqstore("inspect", "--file", tmp_path / "file", "--as", kind)

    assert result.exit_code in (0, 1)


def test_any_flipped_byte_of_a_record_is_a_problem(store: Path) -> None:
    file = store / FILES["commitlog"]
    [item] = items(file, "--limit", 1)
    for at in range(0, item["size"], 7):
        flip(file, at, 3)
        found = mqstore("inspect", "--file", file, "--limit", 1, "--json")
        flip(file, at, 3)
        assert (found.exit_code, bool(json.loads(found.stdout)["items"][0]["problem"])) == (1, True), at
