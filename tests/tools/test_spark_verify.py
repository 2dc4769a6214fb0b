"""`mqstore spark verify`, without Spark."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mqstore import MessageStore, StoreConfig
from mqstore_tools.main import cli
from tests.log.support import files, flip


def spark(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["spark", *map(str, arguments)])


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


def test_a_fleet_in_order_is_told_in_a_line(fleet: Path) -> None:
    before = files(fleet)

    result = spark("verify", fleet / "a", "--master", "none")

    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("41 records, ")
    assert result.stdout.endswith(" of 1 stores verified; all is well\n")
    assert files(fleet) == before


def test_what_is_damaged_is_told_by_store_and_file_and_byte_and_the_exit_code_is_1(fleet: Path) -> None:
    result = spark("verify", fleet / "*", "--master", "none", "--json")

    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert {(each["store"], each["kind"]) for each in found["findings"]} == {
        (str(fleet / "b"), "bad_record"),
        (str(fleet / "b"), "missing_units"),
        (str(fleet / "b"), "bad_unit"),
    }
    [record] = [each for each in found["findings"] if each["kind"] == "bad_record"]
    assert record["file"] == f"commitlog/{0:020d}"
    assert record["position"] <= 700 < record["position"] + record["length"]
    [lost] = found["lost"]
    assert (lost["store"], lost["topic"], lost["queue_id"], lost["stop"] - lost["first"]) == (
        str(fleet / "b"),
        "orders",
        0,
        1,
    )

    shown = spark("verify", fleet / "*", "--master", "none")
    assert shown.exit_code == 1
    assert f"lost: orders, queue 0, offsets {lost['first']}..{lost['first']}" in shown.stdout
    assert "1 x bad_record" in shown.stdout


def test_a_store_that_cannot_be_opened_does_not_keep_the_others_from_being_checked(fleet: Path) -> None:
    (fleet / "c").mkdir()

    result = spark("verify", fleet / "a", fleet / "c", "--master", "none", "--json")

    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert [(row["messages"], row["error"] is None) for row in found["stores"]] == [(41, True), (0, False)]
    assert str(fleet / "c") in found["stores"][1]["error"]


def test_topics_and_bounds_are_refused_before_anything_is_read(fleet: Path) -> None:
    for option in (["--topics", "orders"], ["--from", "3"], ["--where", "a = 1"]):
        result = spark("verify", fleet / "a", "--master", "none", *option)

        assert (result.exit_code, result.stdout) == (2, "")
        assert "reads whole logs" in result.stderr


def test_a_dry_run_tells_how_much_would_be_read_and_changes_nothing(fleet: Path) -> None:
    before = files(fleet)

    result = spark("verify", fleet / "*", "--dry-run", "--json")

    assert result.exit_code == 0
    log = sum(len(data) for name, data in before.items() if "commitlog" in name and name[-20:].isdigit())
    plan = json.loads(result.stdout)["plan"]
    assert (plan["stores"], plan["bytes"], plan["tasks"]) == (2, log, 1)
    assert files(fleet) == before
