"""`mqstore diff`: the differences of two stores, made one by one, and none between a store and its snapshot."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mqstore as library
from examples import shop
from mqstore import SimulatedClock, StoreConfig
from tests.log.support import flip_log
from tests.tools.support import mqstore, mqstore_json, snapshot


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("diff") / "shop"
    shop.fill(path)
    return path


@pytest.fixture
def pair(made: Path, tmp_path: Path) -> tuple[Path, Path]:
    shutil.copytree(made, tmp_path / "b")
    return made, tmp_path / "b"


def differences(a: Path, b: Path, *options: object) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = mqstore_json("diff", a, b, *options, exit_code=1)["differences"]
    return found


def test_snapshot_is_the_same_and_nothing_changes(made: Path, tmp_path: Path) -> None:
    mqstore("snapshot", made, tmp_path / "copy", exit_code=0)
    before = snapshot(made)

    found = mqstore_json("diff", made, tmp_path / "copy")

    assert (found["same"], found["differences"], found["unlisted"]) == (True, [], 0)
    assert found["messages"] == sum(row["messages"] for row in mqstore_json("du", made)["topics"])
    assert snapshot(made) == before


def _messages(first: int, stop: int, where: str, *fields: str) -> dict[str, Any]:
    row = {"kind": "messages", "topic": "orders", "queue_id": 1, "first": first, "stop": stop}
    return {**row, "in": where, "fields": [*fields]}


def _put(store: Any) -> None:
    for _ in range(2):
        store.put("orders", b"more", queue_id=1)


CHANGES: dict[str, tuple[Callable[[Any], object], list[dict[str, Any]]]] = {
    "messages": (_put, [_messages(90, 92, "b")]),
    "offset": (
        lambda store: store.broker.reset("billing", "orders", 3, 7),
        [{"kind": "offset", "group": "billing", "topic": "orders", "queue_id": 3, "a": 67, "b": 7}],
    ),
    "topic": (
        lambda store: store.broker.topics.alter("payments", queues=2),
        [{"kind": "topic", "name": "payments", "field": f"{way}_queues", "a": 1, "b": 2} for way in ("read", "write")],
    ),
    "group": (
        lambda store: store.broker.groups.create("audit"),
        [{"kind": "group", "name": "audit", "field": "exists", "a": False, "b": True}],
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_one_change_is_one_difference_either_way(pair: tuple[Path, Path], name: str) -> None:
    change, expected = CHANGES[name]
    config = StoreConfig(clock=SimulatedClock(shop.BEGIN_MS + 7_200_000))
    with library.open(pair[1], config=config) as store:
        change(store)
    kinds = {each["kind"] for each in expected}

    assert [each for each in differences(*pair) if each["kind"] in kinds and _is_user(each)] == expected
    swap = {"a": "b", "b": "a"}
    turned = [{**each, "in": swap[each["in"]]} if "in" in each else each for each in expected]
    turned = [{**each, "a": each["b"], "b": each["a"]} if "a" in each else each for each in turned]
    assert [each for each in differences(*reversed(pair)) if each["kind"] in kinds and _is_user(each)] == turned


def _is_user(row: dict[str, Any]) -> bool:
    """Return False for the records of the broker itself, which each opening may add."""
    return not row.get("topic", "").startswith("rmq_sys")


def _two(folder: Path, left: list[dict[str, Any]], right: list[dict[str, Any]], begin: int = 0) -> tuple[Path, Path]:
    paths = folder / "a", folder / "b"
    for path, rows in zip(paths, (left, right), strict=True):
        with library.open(path, config=StoreConfig(clock=SimulatedClock(shop.BEGIN_MS))) as store:
            store.broker.topics.create("orders", queues=2)
            for number, row in enumerate(rows):
                row = {"queue_id": 1, "unique_key": f"{number:032X}", **row}
                store.put("orders", row.pop("body", b"x"), **row)
    return paths


def test_differing_fields_are_named_and_neighbours_are_one_line(tmp_path: Path) -> None:
    left: list[dict[str, Any]] = [{} for _ in range(9)]
    right = [*left]
    right[2] = right[3] = {"body": b"y"}
    right[4] = {"tag": "t", "properties": {"shop": "\u202e"}}

    a, b = _two(tmp_path, left, right)

    assert differences(a, b) == [
        _messages(2, 4, "both", "body"),
        _messages(4, 5, "both", "property TAGS", "property shop"),
    ]
    lines = mqstore("diff", a, b, exit_code=1).stdout.splitlines()
    assert lines[0] == "messages orders/1 [2, 4) differ in body"


def test_place_in_the_log_is_no_difference(tmp_path: Path) -> None:
    """The same messages, but those of another queue were put before them in one store."""
    left = [{"queue_id": 0, "unique_key": "A"}, {"unique_key": "B"}, {"unique_key": "C"}]

    a, b = _two(tmp_path, left, [left[1], left[0], left[2]])

    assert mqstore_json("diff", a, b)["messages"] == 3


def test_damaged_message_is_in_the_other_store(pair: tuple[Path, Path]) -> None:
    with library.open(pair[1], "r") as store:
        [message] = store.read("orders", 1, 5, 1)
    flip_log(pair[1], message.physical_offset + 100)

    found = mqstore_json("diff", *pair, exit_code=1)

    assert found["differences"] == [_messages(5, 6, "a")]
    assert found["damaged"] == {"a": 0, "b": 1}


def test_front_that_retention_deleted_is_in_the_other_store(pair: tuple[Path, Path]) -> None:
    with library.open(pair[1], config=StoreConfig(clock=SimulatedClock(shop.BEGIN_MS))) as store:
        store.log.drop_before(1 << 16)
        refs = [ref for topic in ("orders", "payments") for ref in store.queues(topic)]
        kept = {tuple(ref): store.offsets(*ref)[0] for ref in refs}

    rows = [row for row in differences(*pair) if row["kind"] == "messages" and row["topic"] in ("orders", "payments")]

    assert min(kept.values()) > 0
    assert {(row["topic"], row["queue_id"]): row["stop"] for row in rows} == kept
    assert {(row["in"], row["first"]) for row in rows} == {("a", 0)}


def test_limit_bounds_the_list_and_counts_the_rest(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{} for _ in range(20)]
    a, b = _two(tmp_path, rows, [{"body": b"y"} if n % 2 else {} for n in range(20)])

    found = mqstore_json("diff", a, b, "--limit", 3, exit_code=1)

    assert ([row["first"] for row in found["differences"]], found["unlisted"]) == ([1, 3, 5], 7)


def test_topic_restricts_the_comparison(pair: tuple[Path, Path]) -> None:
    with library.open(pair[1], config=StoreConfig(clock=SimulatedClock(shop.BEGIN_MS + 7_200_000))) as store:
        _put(store)
        store.broker.groups.create("audit")

    assert differences(*pair, "--topic", "orders") == [_messages(90, 92, "b")]
    assert mqstore_json("diff", *pair, "--topic", "payments")["same"]
