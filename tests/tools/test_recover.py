"""`mqstore recover`: the contract's shape, a dry run that does nothing, and repair that a second run finds done."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import mqstore as library
from mqstore import SendReceipt, SimulatedClock, StoreConfig
from tests.commands import looking
from tests.log.support import flip_log, open_store, overwrite_log, reboot, segment_of
from tests.tools.brokers import broker
from tests.tools.support import mqstore, mqstore_json, snapshot

SMALL = {"segment_bytes": 1 << 14}
CONFIG = StoreConfig(**SMALL)
Store = tuple[Path, list[SendReceipt]]

#: What a program may rely on; there is more.
CONTRACT = {"changed", "truncated", "rebuilt", "messages"}
COUNTS = {"damaged_ranges", "quarantined", "moved_to_cut"}


def spoil(path: Path, receipt: SendReceipt) -> None:
    flip_log(path, receipt.physical_offset + 95)


def bodies(path: Path) -> list[bytes]:
    with library.open(path, "r") as store:
        return [message.body for message in store.iter("orders", 0)]


def check_shape(report: dict[str, Any]) -> None:
    assert report.keys() >= CONTRACT
    assert set(report["rebuilt"]) == {"consume_queues", "units", "index_entries"}
    assert all(set(cut) == {"file", "from", "to", "reason"} for cut in report["truncated"])


@pytest.mark.parametrize("way", ["opening", "recover", "recover --prefix"])
@pytest.mark.parametrize("machine", ["ran on", "went down"])
def test_whole_messages_behind_damage_are_kept_or_moved_to_cut(tmp_path: Path, machine: str, way: str) -> None:
    """A crash: nothing was ever flushed, one record in the middle does not verify."""
    with open_store(tmp_path / "live", segment_bytes=1 << 14, clock=SimulatedClock()) as store:
        receipts = [store.put("orders", b"%d" % i * 50) for i in range(20)]
        store.dispatch()
        shutil.copytree(tmp_path / "live", tmp_path / "s")
    if machine == "went down":
        reboot(tmp_path / "s")
    spoil(tmp_path / "s", receipts[15])

    if way == "opening":
        with open_store(tmp_path / "s") as store:
            report = store.recovery.as_dict()
    else:
        planned = mqstore_json(*way.split(), tmp_path / "s", "--dry-run", exit_code=1)
        report = mqstore_json(*way.split(), tmp_path / "s", exit_code=int(way == "recover"))
        assert {name: planned[name] for name in CONTRACT | COUNTS} == {name: report[name] for name in CONTRACT | COUNTS}

    check_shape(report)
    cut = way == "recover --prefix" or (way == "opening" and machine == "went down")
    whole = [b"%d" % i * 50 for i in range(20) if i != 15]
    assert bodies(tmp_path / "s") == (whole[:15] if cut else whole)
    assert (report["damaged_ranges"], report["quarantined"], report["moved_to_cut"]) == (
        (0, 0, 4) if cut else (1, 4, 0)
    )
    kept = b"".join(Path(kept).read_bytes() for kept in report["kept"])
    assert [Path(kept).parent for kept in report["kept"]] == [tmp_path / "s" / "cut"] * cut
    assert all((body in kept) == cut for body in whole[15:])
    assert [finding["kind"] for finding in report["findings"]] == ([] if cut else ["bad_record"])


def test_messages_behind_damage_are_counted(hundred: Store) -> None:
    path, receipts = hundred
    spoil(path, receipts[40])
    spoil(path, receipts[50])

    assert "would move 58 whole messages to cut/" in mqstore("recover", path, "--prefix", "--dry-run").stdout
    assert "kept 58 messages after the first damage; 2 damaged ranges" in mqstore("recover", path).stdout
    assert "moved 58 whole messages to cut/" in mqstore("recover", path, "--prefix").stdout
    assert bodies(path) == [b"%03d" % i * 100 for i in range(40)]
    assert mqstore_json("verify", path)["ok"]


def test_the_index_is_rebuilt_alone_when_asked(hundred: Store) -> None:
    path, _ = hundred

    report = mqstore_json("recover", path, "--rebuild", "index")

    assert report["rebuilt"] == {"consume_queues": 0, "units": 0, "index_entries": 100}
    assert mqstore("get", path, "--topic", "orders", "--key", "k77").stdout.startswith("orders/0@77")


@pytest.fixture
def without_manifest(hundred: Store) -> Path:
    path, _ = hundred
    for manifest in path.glob("mqstore.json*"):
        manifest.unlink()
    return path


def test_lost_manifest_is_rewritten_on_request(without_manifest: Path) -> None:
    plan = mqstore_json("recover", without_manifest, "--rebuild", "config", "--dry-run", exit_code=1)
    assert plan["changed"]
    assert not (without_manifest / "mqstore.json").exists()

    done = mqstore_json("recover", without_manifest, "--rebuild", "config", "--yes")

    check_shape(done)
    assert done["changed"]
    assert "mqstore.json" in done["config"][0]
    assert len(bodies(without_manifest)) == 100


def test_without_a_person_to_ask_config_needs_a_yes(without_manifest: Path) -> None:
    before = snapshot(without_manifest)

    result = mqstore("recover", without_manifest, "--rebuild", "config", exit_code=2)

    assert "--yes" in result.stderr
    assert snapshot(without_manifest) == before


@pytest.mark.parametrize("profile", ["mqstore", "rocketmq"])
def test_returning_a_damaged_directory_warns(tmp_path: Path, profile: Any) -> None:
    with open_store(tmp_path / "s", profile=profile, **SMALL) as store:
        receipts = [store.put("orders", b"%03d" % i * 100) for i in range(100)]
    assert "broker" not in mqstore("recover", tmp_path / "s").output
    spoil(tmp_path / "s", receipts[40])
    assert ("docs/recovery.md" in mqstore("recover", tmp_path / "s").output) == (profile == "rocketmq")


def test_a_value_of_the_wrong_type_is_found_and_mended(tmp_path: Path) -> None:
    """verify said that all was well, and `--rebuild config` that there was nothing to do, of a store that no broker
    opened."""
    with library.open(tmp_path / "s", config=CONFIG) as store:
        store.create_topic("jobs", queues=1)
        store.put("jobs", b"x", queue_id=0)
    file = tmp_path / "s" / "config" / "topics.json"
    (tmp_path / "s" / "config" / "topics.json.bak").unlink(missing_ok=True)
    file.write_text(file.read_text().replace('"perm": 6', '"perm": "6"', 1))
    assert '"perm": "6"' in file.read_text()
    assert mqstore("consume", tmp_path / "s", "jobs", "--group", "g").exit_code == 3
    assert [f["kind"] for f in mqstore_json("verify", tmp_path / "s", exit_code=1)["findings"]] == ["bad_json"]
    assert [f["kind"] for f in mqstore_json("recover", tmp_path / "s", exit_code=1)["findings"]] == ["bad_json"]
    assert mqstore("recover", tmp_path / "s", "--rebuild", "config", "--yes").exit_code == 0
    assert mqstore("verify", tmp_path / "s").exit_code == 0
    done = mqstore("consume", tmp_path / "s", "jobs", "--group", "g", "--idle-exit", "0", "--max-messages", "1")
    assert done.exit_code == 0


@pytest.mark.parametrize("name", ["config/topics.json", "mqstore.json", "config/spark/txn.json"])
def test_a_json_file_put_back_from_its_backup_is_a_change(tmp_path: Path, name: str) -> None:
    """It was moved aside and written anew, and the report said that nothing was changed, and of the manifest nothing at
    all."""
    with library.open(tmp_path / "s", config=CONFIG) as store:
        store.create_topic("jobs", queues=1)
    file = tmp_path / "s" / name
    good = b'{"apps": {}, "version": 1}' if name.endswith("txn.json") else file.read_bytes()
    file.parent.mkdir(exist_ok=True)
    file.with_name(f"{file.name}.bak").write_bytes(good)
    file.write_bytes(b"{")
    before = snapshot(tmp_path / "s")

    planned = mqstore_json("recover", tmp_path / "s", "--dry-run", exit_code=1)
    assert snapshot(tmp_path / "s") == before
    done = mqstore_json("recover", tmp_path / "s", exit_code=1)

    for report, dry_run in ((planned, True), (done, False)):
        assert (report["dry_run"], report["changed"]) == (dry_run, True)
        assert [(finding["kind"], finding["file"]) for finding in report["findings"]] == [("bad_json", name)]
    assert json.loads(file.read_bytes()) == json.loads(good)
    again = mqstore_json("recover", tmp_path / "s")
    assert (again["changed"], again["findings"]) == (False, [])


@pytest.mark.parametrize("lost", ["one copy", "both copies"])
@pytest.mark.parametrize(
    "name", ["config/spark/txn.json", "config/spark/overwrite.json", "local_offsets/caches/prices.json"]
)
def test_json_files_outside_of_config_are_found_and_mended(tmp_path: Path, name: str, lost: str) -> None:
    """verify said that all was well, and a dry run that nothing was to be done, of a store that recover then refused to
    open; and a splice that its file had forgotten could come in twice with nobody told."""
    with open_store(tmp_path / "s", **SMALL) as store:
        store.put("orders", b"x")
    file = tmp_path / "s" / name
    file.parent.mkdir(parents=True)
    for copy in (file, file.with_name(f"{file.name}.bak")):
        copy.write_text('{"version": 1}')
    file.write_bytes(bytes(20))
    if lost == "both copies":
        file.with_name(f"{file.name}.bak").write_bytes(b"")

    for command in (["verify"], ["recover", "--dry-run"]):
        [finding] = mqstore_json(command[0], tmp_path / "s", *command[1:], exit_code=1)["findings"]
        assert (finding["kind"], finding["file"]) == ("bad_json", name)
    if lost == "both copies":
        assert mqstore("recover", tmp_path / "s").exit_code == (3 if "txn" in name else 1)
        assert mqstore("recover", tmp_path / "s", "--rebuild", "config", "--yes").exit_code == 0
    else:
        assert [f["kind"] for f in mqstore_json("recover", tmp_path / "s", exit_code=1)["findings"]] == ["bad_json"]
        assert file.read_bytes().startswith(b"{")
    assert mqstore("recover", tmp_path / "s").exit_code == 0
    assert mqstore("verify", tmp_path / "s").exit_code == 0


def test_for_people_it_says_what_was_done(hundred: Store) -> None:
    path, receipts = hundred
    spoil(path, receipts[40])
    shutil.rmtree(path / "consumequeue")

    plan, run, again = (mqstore("recover", path, *options) for options in (["--dry-run"], [], []))

    assert "would rebuild" in plan.stdout
    assert "would be changed" in plan.stdout
    assert "bad_record: commitlog/" in run.stdout
    assert "rebuilt 1" in run.stdout or "rebuilt 9" in run.stdout
    assert "no new damage; nothing to do; 1 known" in again.stdout
    assert "bad_record" not in again.stdout
    assert (plan.exit_code, run.exit_code, again.exit_code) == (1, 1, 0)


def test_store_without_consumed_messages_is_usable(tmp_path: Path, path: Path) -> None:
    """Until a broker had been there once, each of these said that the store was opened for reading: the group's offset
    lies behind the end now, and who only reads it tried to write down that it is lowered."""
    with broker(path) as running:
        running.topics.create("orders", queues=1)
        running.put_many("orders", [bytes(1000)] * 100)
        running.commit("billing", "orders", 0, 100)
    (path / "commitlog" / f"{1 << 16:020d}").unlink()
    assert mqstore("recover", path).exit_code == 1
    before = snapshot(path)

    for name, words in looking(path, tmp_path / "copy").items():
        result = mqstore(*words)
        codes = (2,) if name.startswith("queue") else (0, 1)  # nobody has opened the topic as a queue
        assert (result.exit_code in codes, "for reading" in result.stderr) == (True, False), result.output
    [lag] = mqstore_json("lag", path)["groups"]

    assert snapshot(path) == before
    assert lag["messages"] == 0
    assert mqstore("produce", path, "orders", "--body", "next").exit_code == 0
    with broker(path) as running:
        assert [delivery.message.body for delivery in running.pop("billing", "orders")] == [b"next"]


def zero(path: Path, first: SendReceipt, last: SendReceipt) -> None:
    """Zeros over the records from `first` to `last`, which lie in one segment."""
    start, stop = first.physical_offset, last.physical_offset + last.size
    overwrite_log(path, start, bytes(stop - start))


#: What no recovery brings back, in a store of a hundred messages.
LOSSES: dict[str, Callable[[Path, list[SendReceipt]], Any]] = {
    "a flipped bit": lambda path, receipts: spoil(path, receipts[50]),
    "two flipped bits": lambda path, receipts: [spoil(path, receipts[n]) for n in (20, 50)],
    "zeros over three records": lambda path, receipts: zero(path, receipts[60], receipts[62]),
    "a missing segment": lambda path, receipts: segment_of(path, receipts[50].physical_offset).unlink(),
    "a missing segment behind a flipped bit": lambda path, receipts: [
        spoil(path, receipts[receipts.index(next(r for r in receipts if r.physical_offset >= 1 << 14)) - 1]),
        (path / "commitlog" / f"{1 << 14:020d}").unlink(),
    ],
    "a short segment": lambda path, receipts: os.truncate(segment_of(path, receipts[50].physical_offset), 5000),
    "a missing first segment": lambda path, receipts: segment_of(path, receipts[0].physical_offset).unlink(),
    "an empty segment": lambda path, receipts: os.truncate(segment_of(path, receipts[50].physical_offset), 0),
}


@pytest.mark.parametrize(
    ("profile", "loss"),
    # Where a broker's log began, nothing tells.
    [each for each in product(["mqstore", "rocketmq"], LOSSES) if each != ("rocketmq", "a missing first segment")],
)
def test_damage_that_recover_has_reported_is_known(path: Path, profile: library.Profile, loss: str) -> None:
    """One lost record made verify and recover exit with 1 until retention took its segment."""
    with open_store(path, profile=profile, **SMALL) as store:
        receipts = [store.put("orders", b"%03d" % i * 100, keys=f"k{i}") for i in range(100)]
    LOSSES[loss](path, receipts)
    assert mqstore("verify", path).exit_code == 1

    first = mqstore_json("recover", path, exit_code=1)
    second = mqstore_json("recover", path)

    assert {finding["known"] for finding in first["findings"]} == {False}
    assert {finding["known"] for finding in second["findings"]} == {True}
    assert not second["changed"]
    assert mqstore("recover", path, "--dry-run").exit_code == 0
    found = mqstore_json("verify", path)
    assert found["ok"]
    assert found["findings"]
    assert {finding["known"] for finding in found["findings"]} == {True}
    shown, everything = mqstore("verify", path), mqstore("verify", path, "--all")
    assert (shown.exit_code, everything.exit_code) == (0, 0)
    assert f"nothing new; {len(found['findings'])} known (--all lists them)" in shown.stdout
    assert "commitlog/" not in shown.stdout
    assert everything.stdout.count("known ") == len(found["findings"])


@pytest.mark.parametrize(
    ("new", "count"),
    [
        (lambda path, receipts: spoil(path, receipts[70]), 1),
        (lambda path, receipts: zero(path, receipts[50], receipts[51]), 0),  # the same place, but longer
        (lambda path, receipts: zero(path, receipts[49], receipts[50]), 0),
        (lambda path, receipts: segment_of(path, receipts[50].physical_offset).unlink(), 0),  # of another kind
    ],
    ids=["elsewhere", "longer", "earlier", "another kind"],
)
def test_damage_that_reaches_beyond_what_is_known_is_new(
    hundred: Store, new: Callable[[Path, list[SendReceipt]], None], count: int
) -> None:
    path, receipts = hundred
    spoil(path, receipts[50])
    mqstore_json("recover", path, exit_code=1)

    new(path, receipts)

    found = mqstore_json("verify", path, exit_code=1)
    assert not found["ok"]
    log = [finding for finding in found["findings"] if finding["file"].startswith("commitlog/")]
    assert [finding["known"] for finding in log].count(True) == count
    assert [finding["known"] for finding in log].count(False) == 1
    shown = mqstore("verify", path).stdout
    assert ("1 known" in shown) == bool(count)
    assert mqstore("recover", path).exit_code == 1
    assert mqstore("recover", path).exit_code == 0
    assert mqstore("verify", path).exit_code == 0


def test_an_opening_settles_nothing(hundred: Store) -> None:
    path, receipts = hundred
    spoil(path, receipts[50])

    assert mqstore("produce", path, "orders", "--body", "next").exit_code == 0
    mqstore("recover", path, "--dry-run")

    assert not mqstore_json("verify", path, exit_code=1)["ok"]
    assert not (path / "config" / "knownDamage.json").exists()


def test_known_damage_that_retention_has_taken_is_forgotten(hundred: Store) -> None:
    path, receipts = hundred
    for n in (3, 90):
        spoil(path, receipts[n])
    mqstore_json("recover", path, exit_code=1)
    table = path / "config" / "knownDamage.json"
    assert len(json.loads(table.read_bytes())["ranges"]["bad_record"]) == 2

    with open_store(path) as store:
        store.drop_before(receipts[50].physical_offset)
    assert mqstore_json("verify", path)["ok"]
    report = mqstore_json("recover", path)

    assert [finding["known"] for finding in report["findings"]] == [True]
    start = receipts[90].physical_offset
    assert json.loads(table.read_bytes()) == {"ranges": {"bad_record": [[start, start + receipts[90].size]]}}


def test_a_segment_that_was_put_back_is_forgotten(hundred: Store) -> None:
    """If it is lost once more, that is news."""
    path, receipts = hundred
    segment = segment_of(path, receipts[50].physical_offset)
    whole = segment.read_bytes()
    segment.unlink()
    mqstore_json("recover", path, exit_code=1)
    segment.write_bytes(whole)
    assert mqstore_json("recover", path)["findings"] == []

    segment.unlink()

    assert not mqstore_json("verify", path, exit_code=1)["ok"]


@pytest.mark.parametrize("content", [b"{", b'{"ranges": {"bad_record": [[5, 3]]}}', b'{"ranges": []}'])
def test_a_damaged_table_of_known_damage_makes_all_damage_new(hundred: Store, content: bytes) -> None:
    path, receipts = hundred
    spoil(path, receipts[50])
    mqstore_json("recover", path, exit_code=1)
    (path / "config" / "knownDamage.json").write_bytes(content)

    found = mqstore_json("verify", path, exit_code=1)["findings"]

    assert [(finding["kind"], finding["known"]) for finding in found] == [("bad_record", False), ("bad_json", False)]
    assert mqstore("recover", path).exit_code == 1
    assert mqstore("recover", path).exit_code == 0
    assert mqstore("verify", path).exit_code == 0


@pytest.mark.parametrize("surplus", [b"surplus", bytes(5000)], ids=["text", "zeros"])
def test_segments_that_are_too_long_are_mended(hundred: Store, surplus: bytes) -> None:
    path, _ = hundred
    first, *_, last = sorted((path / "commitlog").glob("0*"))
    for segment in (first, last):
        with open(segment, "ab") as file:
            file.write(surplus)
    assert mqstore("verify", path).exit_code == 1

    planned = mqstore_json("recover", path, "--dry-run", exit_code=1)
    assert first.stat().st_size == last.stat().st_size == (1 << 14) + len(surplus)
    done = mqstore_json("recover", path)

    for report in (planned, done):
        assert report["changed"]
        assert report["findings"] == []
        cut = {"from": 1 << 14, "to": (1 << 14) + len(surplus), "reason": "surplus"}
        assert report["truncated"] == [{"file": f"commitlog/{each.name}", **cut} for each in (first, last)]
    assert first.stat().st_size == last.stat().st_size == 1 << 14
    assert sorted(done["kept"]) == sorted(map(str, (path / "cut").iterdir()))
    assert [Path(kept).read_bytes() for kept in done["kept"]] == [surplus] * 2
    assert len(bodies(path)) == 100
    assert mqstore("recover", path).exit_code == 0
    assert mqstore_json("verify", path)["findings"] == []


def test_many_stores_are_recovered_and_one_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    for name in "ab":
        with open_store(tmp_path / name) as store:
            store.put("t", b"body")
        shutil.rmtree(tmp_path / name / "consumequeue")
    (tmp_path / "c").mkdir()

    planned = mqstore_json("recover", tmp_path / "a", tmp_path / "b", "--dry-run", exit_code=1)
    done = mqstore_json("recover", tmp_path / "*", exit_code=3)
    shown = mqstore("recover", tmp_path / "a", tmp_path / "b")

    assert [row["changed"] for row in planned["stores"]] == [True, True]
    assert [(row["store"], row.get("messages")) for row in done["stores"]] == [
        (str(tmp_path / "a"), 1),
        (str(tmp_path / "b"), 1),
        (str(tmp_path / "c"), None),
    ]
    assert str(tmp_path / "c") in done["stores"][2]["error"]
    assert shown.stdout.count("is in order; nothing to do") == 2


def test_circular_links_are_explained(tmp_path: Path) -> None:
    (tmp_path / "s").symlink_to(tmp_path / "s")

    result = mqstore("recover", tmp_path / "s", exit_code=3)
    assert "this is a bug" not in result.stderr
