"""`mqstore verify`: the contract's shape, 0 for stores in order, 1 with what is wrong and where."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

import mqstore as library
from mqstore import OutgoingMessage, Profile, SendReceipt, SimulatedClock
from mqstore.jobs import verify
from tests.conftest import GOLDEN_NAMES, Golden
from tests.log.support import flip_log, open_store, overwrite
from tests.tools.support import mqstore, mqstore_json


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_stores_of_the_java_engine_are_in_order(golden: Golden, name: str) -> None:
    store = golden(name)

    found = mqstore_json("verify", store.path)

    assert set(found) == {"ok", "messages", "bytes", "body_checksum_only", "findings"}
    assert (found["ok"], found["findings"]) == (True, [])
    assert found["messages"] >= len(store.of("message"))
    assert found["bytes"] >= sum(m["size"] for m in store.of("message"))


def test_a_short_queue_file_of_a_clean_store_is_found(hundred: tuple[Path, list[SendReceipt]]) -> None:
    """Where only what is not in use yet was cut off, verify saw nothing."""
    path, _ = hundred
    file = path / "consumequeue" / "orders" / "0" / f"{0:020d}"
    os.truncate(file, file.stat().st_size - 1)

    [finding] = mqstore_json("verify", path, exit_code=1)["findings"]
    assert (finding["kind"], finding["length"]) == ("segment_size", 1)
    assert mqstore_json("recover", path)["changed"]
    assert mqstore("verify", path).exit_code == 0


@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_log_that_lost_every_segment_is_found(hundred: tuple[Path, list[SendReceipt]], checkpoint: bool) -> None:
    """All was well, it said, of a store whose messages were all gone."""
    path, _ = hundred
    for file in (path / "commitlog").glob("0*"):
        file.unlink()
    if not checkpoint:
        (path / "checkpoint").unlink()

    kinds = {f["kind"] for f in mqstore_json("verify", path, exit_code=1)["findings"]}

    assert kinds == ({"missing_segment"} if checkpoint else {"lost_tail"})
    assert mqstore("recover", path).exit_code == 1
    assert mqstore("verify", path).exit_code == 0
    assert mqstore("produce", path, "orders", "--body", "x").exit_code == 0
    assert mqstore("verify", path).exit_code == 0


@pytest.mark.parametrize(
    ("lost", "found"),
    [("*", ["config"]), ("[ct]*", ["config"]), ("topics.json*", []), ("consumerOffset.json*", []), ("none", [])],
)
def test_a_store_whose_tables_are_all_lost_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lost: str, found: list[str]
) -> None:
    """All was well, it said, of a store whose groups had all lost their offsets."""
    with library.open(tmp_path / "s") as store:
        store.queue("jobs").put(b"x")
        store.queue("jobs").get().ack()
    for file in (tmp_path / "s" / "config").glob(lost):
        file.unlink()

    for command in (["verify"], ["recover", "--dry-run"], ["recover"]):
        report = mqstore_json(command[0], tmp_path / "s", *command[1:], exit_code=len(found))
        assert [each["file"] for each in report["findings"]] == found
    caplog.clear()
    library.open(tmp_path / "s").close()
    assert [text for text in caplog.messages if "Put config/ back" in text] == caplog.messages
    assert len(caplog.messages) == len(found)


def test_for_people_it_lists_and_sums_up(hundred: tuple[Path, list[SendReceipt]]) -> None:
    path, _ = hundred
    (path / "checkpoint").unlink()

    result = mqstore("verify", path, exit_code=1)

    assert result.stdout.startswith("bad_checkpoint: checkpoint at 0")
    assert "100 records" in result.stdout
    assert "found: 1 x bad_checkpoint" in result.stdout


def test_beside_a_writer_it_finds_nothing(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        store.put_many("orders", [b"x"] * 1000)
        mqstore("verify", tmp_path / "s", exit_code=0)


def test_json_with_more_findings_than_people_are_shown_is_whole(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", segment_bytes=1 << 16, consumequeue_units=4) as store:
        store.put_many("orders", [b"x"] * 8000)
    for file in (tmp_path / "s" / "consumequeue" / "orders" / "0").iterdir():
        file.unlink()

    found = mqstore_json("verify", tmp_path / "s", exit_code=1)
    shown = mqstore("verify", tmp_path / "s").stdout

    assert len(found["findings"]) == 2000
    assert (found["ok"], found["messages"]) == (False, 8000)
    assert len(shown.splitlines()) == 1000 + 2
    assert "... and 1000 more" in shown


@pytest.mark.parametrize("taken", [50, 99])
def test_retention_meanwhile_ends_nothing(tmp_path: Path, taken: int) -> None:
    """It began again each time, and ended with a bare FileNotFoundError when the writer was the faster one."""
    with open_store(tmp_path / "s", segment_bytes=1 << 14) as writer:
        receipts = [writer.put("orders", b"x" * 1000, keys=f"k{n}") for n in range(100)]
        writer.flush()
        writer.dispatch()
        report = verify(
            tmp_path / "s", progress=lambda *_: writer.drop_before(receipts[taken].physical_offset), range_bytes=20_000
        )
        kept = writer.offsets("orders")

    assert kept[0] > 0
    assert (report.ok, report.messages) == (True, kept[1] - kept[0])


def test_a_segment_lost_from_the_middle_beside_a_writer_is_found(tmp_path: Path) -> None:
    """What retention takes is taken from the front."""
    with open_store(tmp_path / "s", segment_bytes=1 << 14) as writer:
        receipts = [writer.put("orders", b"x" * 1000) for _ in range(100)]
        writer.flush()
        writer.dispatch()
        assert writer.drop_before(receipts[40].physical_offset)
        lost = receipts[70].physical_offset >> 14 << 14
        (tmp_path / "s" / "commitlog" / f"{lost:020d}").unlink()

        found = mqstore_json("verify", tmp_path / "s", exit_code=1)["findings"]

    assert (found[0]["kind"], found[0]["file"]) == ("missing_segment", f"commitlog/{lost:020d}")


def copy_of_a_killed_store(path: Path, **options: Any) -> None:
    """Leave at `path` what a writer killed after its first checkpoint leaves; all 100 messages have keys."""
    clock = SimulatedClock()
    live = path.with_name("live")
    with open_store(live, segment_bytes=1 << 14, clock=clock, **options) as store:
        store.put_many("orders", [OutgoingMessage(b"%03d" % i, keys=f"k{i}") for i in range(100)])
        store.flush()
        store.dispatch()
        store.run_once(clock.now_ms())
        clock.advance(2000)
        store.run_once(clock.now_ms())
        shutil.copytree(live, path)


@pytest.mark.parametrize("profile", ["mqstore", "rocketmq"])
@pytest.mark.parametrize("closed", [True, False])
def test_a_deleted_index_is_found(path: Path, profile: Profile, closed: bool) -> None:
    """Of a store that was not closed, and of a broker's, verify said that all was well."""
    copy_of_a_killed_store(path, profile=profile)
    if closed:
        library.open(path).close()
    assert mqstore("verify", path).exit_code == 0
    shutil.rmtree(path / "index")

    [finding] = mqstore_json("verify", path, exit_code=1)["findings"]

    assert (finding["kind"], finding["file"]) == ("bad_index", "index")
    assert "100 keys" in finding["detail"]
    assert mqstore("recover", path).exit_code == 0
    assert mqstore("verify", path).exit_code == 0


@pytest.mark.parametrize("name", ["clean", "propcrc", "rolled", "trimmed"])
@pytest.mark.parametrize("lost", ["all", "first", "last"])
def test_lost_index_files_of_the_java_engine_are_found(golden: Golden, name: str, lost: str) -> None:
    path = golden(name).path
    files = sorted((path / "index").iterdir())
    if name == "trimmed":  # the first of its files are of records that are gone
        files = files[-3:]
    for file in {"all": files, "first": files[:1], "last": files[-1:]}[lost]:
        file.unlink()

    kinds = {finding["kind"] for finding in mqstore_json("verify", path, exit_code=1)["findings"]}

    assert kinds == {"bad_index"}


@pytest.mark.parametrize("closed", [True, False])
def test_index_files_that_retention_removed_are_no_finding(tmp_path: Path, closed: bool) -> None:
    with open_store(tmp_path / "live", segment_bytes=1 << 14, index_entries=8) as store:
        receipts = [store.put("orders", b"x" * 1000, keys=f"k{n}") for n in range(100)]
        store.flush()
        store.dispatch()
        assert store.drop_before(receipts[50].physical_offset)
        if not closed:
            shutil.copytree(tmp_path / "live", tmp_path / "s")
    path = tmp_path / ("live" if closed else "s")
    assert 0 < len(list((path / "index").iterdir())) < 10

    assert mqstore_json("verify", path)["findings"] == []


@pytest.mark.parametrize("size", [40, 128, 4096])
@pytest.mark.parametrize("profile", ["mqstore", "rocketmq"])
def test_a_checkpoint_of_random_bytes_is_found(tmp_path: Path, profile: Profile, size: int) -> None:
    """Of a store with a broker's checksums verify said that all was well, and opening believed the times in it."""
    with open_store(tmp_path / "s", profile=profile) as store:
        store.put("orders", b"hello")
    overwrite(tmp_path / "s" / "checkpoint", 0, random.Random(size).randbytes(size))

    [finding] = mqstore_json("verify", tmp_path / "s", exit_code=1)["findings"]

    assert (finding["kind"], finding["file"]) == ("bad_checkpoint", "checkpoint")
    assert mqstore("recover", tmp_path / "s").exit_code == 0
    assert mqstore("verify", tmp_path / "s").exit_code == 0


@pytest.mark.parametrize(("name", "covered"), [("clean", False), ("propcrc", True)])
def test_records_whose_properties_no_checksum_covers_are_counted(golden: Golden, name: str, covered: bool) -> None:
    path = golden(name).path

    found, shown = mqstore_json("verify", path), mqstore("verify", path)

    assert found["ok"]
    assert found["body_checksum_only"] == (0 if covered else found["messages"])
    assert ("changed properties" in shown.stdout) == (not covered)
    assert shown.exit_code == 0


# -- many stores, and many processes -----------------------------------------------------------------------------------


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    """Two stores; in `b` a message of the first of two segments is damaged, and a queue is gone."""
    root = tmp_path / "fleet"
    for name in "ab":
        with open_store(root / name, consumequeue_units=32, index_entries=64) as store:
            for i in range(40):
                store.put("orders", b"body %d" % i, keys=[f"k{i}"])
            store.put("bills", b"other")
    flip_log(root / "b", 700)
    shutil.rmtree(root / "b" / "consumequeue" / "bills")
    return root


def test_damage_is_located(fleet: Path) -> None:
    found = mqstore_json("verify", fleet / "*", exit_code=1)

    assert (found["ok"], found["messages"]) == (False, 81)
    assert {*found["findings"][0]} == {"store", "kind", "file", "position", "length", "detail", "known"}
    assert {(each["store"], each["kind"]) for each in found["findings"]} == {
        (str(fleet / "b"), "bad_record"),
        (str(fleet / "b"), "missing_units"),
        (str(fleet / "b"), "bad_unit"),
    }
    [record] = [each for each in found["findings"] if each["kind"] == "bad_record"]
    assert record["file"] == f"commitlog/{0:020d}"
    assert record["position"] <= 700 < record["position"] + record["length"]
    shown = mqstore("verify", fleet / "*", exit_code=1)
    assert f"{fleet / 'b'}: bad_record: commitlog/" in shown.stdout
    assert "1 x bad_record" in shown.stdout
    assert mqstore("verify", fleet / "a").stdout.endswith(" verified; all is well\n")


def test_damage_that_recover_has_reported_is_known_in_many_stores_too(fleet: Path) -> None:
    mqstore("recover", fleet / "b")

    found = mqstore_json("verify", fleet / "*")

    assert (found["ok"], {(each["kind"], each["known"]) for each in found["findings"]}) == (
        True,
        {("bad_record", True)},
    )
    assert "1 known (--all lists them)" in mqstore("verify", fleet / "*").stdout


def test_unopenable_store_does_not_stop_the_others(fleet: Path) -> None:
    (fleet / "c").mkdir()

    found = mqstore_json("verify", fleet / "a", fleet / "c", exit_code=3)

    assert (found["ok"], found["messages"], list(found["errors"])) == (False, 41, [str(fleet / "c")])
    shown = mqstore("verify", fleet / "a", fleet / "c")
    assert (shown.exit_code, str(fleet / "c") in shown.stderr) == (3, True)
    assert "1 stores cannot be read" in shown.stdout
