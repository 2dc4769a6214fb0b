"""`mqstore verify` of many stores, and in many processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mqstore import StoreConfig
from mqstore.engine import MessageStore
from tests.log.support import files, flip
from tests.tools.support import mqstore, mqstore_json


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    """Two stores; in `b` a message of the first of two segments is damaged, and a queue is gone."""
    root = tmp_path / "fleet"
    config = StoreConfig(segment_bytes=4096, consumequeue_units=32, index_slots=16, index_entries=64)
    for name in "ab":
        with MessageStore(root / name, config=config) as store:
            for i in range(40):
                store.put("orders", b"body %d" % i, keys=[f"k{i}"])
            store.put("bills", b"other")
    flip(root / "b" / "commitlog" / f"{0:020d}", 700)
    shutil.rmtree(root / "b" / "consumequeue" / "bills")
    return root


def test_many_stores_in_order_are_told_in_a_line(fleet: Path) -> None:
    shutil.copytree(fleet / "a", fleet.parent / "again")
    before = files(fleet)

    result = mqstore("verify", fleet / "a", fleet.parent / "again", "--jobs", 2)

    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("82 records, ")
    assert result.stdout.endswith(" verified; all is well\n")
    assert files(fleet) == before


def test_what_is_damaged_is_told_by_store_and_file_and_byte(fleet: Path) -> None:
    found = mqstore_json("verify", fleet / "*", "--jobs", 2, exit_code=1)

    assert {(each["store"], each["kind"]) for each in found["findings"]} == {
        (str(fleet / "b"), "bad_record"),
        (str(fleet / "b"), "missing_units"),
        (str(fleet / "b"), "bad_unit"),
    }
    [record] = [each for each in found["findings"] if each["kind"] == "bad_record"]
    assert record["file"] == f"commitlog/{0:020d}"
    assert record["position"] <= 700 < record["position"] + record["length"]
    shown = mqstore("verify", fleet / "*")
    assert shown.exit_code == 1
    assert f"{fleet / 'b'}: bad_record: commitlog/" in shown.stdout
    assert "1 x bad_record" in shown.stdout


def test_one_store_in_two_processes_is_told_as_in_one(fleet: Path) -> None:
    one, two = (mqstore_json("verify", fleet / "b", "--jobs", jobs, exit_code=1) for jobs in (1, 2))

    def plain(found: Any) -> list[str]:
        return sorted(json.dumps(each) for each in found["findings"])

    assert plain(one) == plain(two)
    assert {**one, "findings": 0} == {**two, "findings": 0}


def test_damage_that_recover_has_reported_is_known_in_many_stores_too(fleet: Path) -> None:
    mqstore("recover", fleet / "b")

    found = mqstore_json("verify", fleet / "*")

    assert (found["ok"], {(each["kind"], each["known"]) for each in found["findings"]}) == (
        True,
        {("bad_record", True)},
    )
    assert "1 known (--all lists them)" in mqstore("verify", fleet / "*").stdout


def test_a_store_that_cannot_be_opened_does_not_keep_the_others_from_being_checked(fleet: Path) -> None:
    (fleet / "c").mkdir()

    found = mqstore_json("verify", fleet / "a", fleet / "c", exit_code=3)

    assert (found["ok"], found["messages"], list(found["errors"])) == (False, 41, [str(fleet / "c")])
    shown = mqstore("verify", fleet / "a", fleet / "c")
    assert (shown.exit_code, str(fleet / "c") in shown.stderr) == (3, True)
    assert "1 stores cannot be read" in shown.stdout
