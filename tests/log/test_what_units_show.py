"""Units and records of which one side is missing: what verify, recover and opening say of it.

units behind the end of the log     records are lost, such as when the last segments were not copied: `lost_tail`
records without units               `missing_units`; of a killed store some may only not be dispatched yet
a gap in a queue's numbers          `bad_unit`, if no damage in the log explains it. It condemns no other record
"""

from __future__ import annotations

import shutil
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqstore.engine import Finding
from mqstore.jobs import verify
from tests.log.support import SEGMENT, checkpointed, kill, open_store, overwrite_log, reboot, recovered, units_of

PROFILES = ("mqstore", "rocketmq")
QUEUES = [("orders", 0), ("orders", 1), ("clicks", 0)]
LATE = 9
"""Number of messages that were not dispatched before the kill."""


def make(path: Path, profile: str, *, went_down: bool = False) -> list[Any]:
    """Make a store whose writer was killed, or with `went_down` whose machine was. Return the receipts."""
    store = open_store(path, profile=profile)  # type: ignore[arg-type]
    receipts = []
    for n in range(90):
        topic, queue_id = QUEUES[n % 3]
        receipts.append(store.put(topic, b"message %03d " % n * (1 + n % 9), queue_id))
        if n == 40:
            checkpointed(store)
        if n == 89 - LATE:
            store.dispatch()
    kill(store)
    if went_down:
        reboot(path)
    return receipts


def found(path: Path, range_bytes: int | None = None) -> list[Finding]:
    """Return what verify finds, in one pass or in ranges."""
    if range_bytes is None:
        with open_store(path, "r") as store:
            return list(store.verify())
    listed = verify(path, range_bytes=range_bytes).findings
    return [Finding(each.kind, each.file, each.position, each.length, each.detail) for each in listed]


def counts(findings: list[Finding]) -> Counter[str]:
    """Return the number of units in `missing_units` findings, by what is said of them."""
    total: Counter[str] = Counter()
    for each in findings:
        if each.kind == "missing_units":
            total["late" if "not dispatched yet" in each.detail else "missing"] += each.length // 20
    return total


# -- records without units ---------------------------------------------------------------------------------------------


def _nothing(path: Path) -> int:
    return 0


def _no_queues(path: Path) -> int:
    shutil.rmtree(path / "consumequeue")
    return 90 - LATE


def _one_queue(path: Path) -> int:
    lost = len(units_of(path, "orders", 1))
    shutil.rmtree(path / "consumequeue" / "orders" / "1")
    return lost


def _half_of_each(path: Path) -> int:
    """Write zeros over the second half of the units of each queue, as an older copy of the files has them."""
    lost = 0
    for topic, queue_id in QUEUES:
        units = len(units_of(path, topic, queue_id))
        for slot in range(units // 2, units):
            file = path / "consumequeue" / topic / str(queue_id) / f"{slot // 8 * 160:020d}"
            data = bytearray(file.read_bytes())
            data[slot % 8 * 20 : slot % 8 * 20 + 20] = bytes(20)
            file.write_bytes(data)
            lost += 1
    return lost


@pytest.mark.parametrize(("profile", "range_bytes"), [("mqstore", None), ("mqstore", 4000), ("rocketmq", None)])
@pytest.mark.parametrize("lose", [_nothing, _no_queues, _one_queue, _half_of_each])
def test_missing_units_of_a_killed_store_count(
    tmp_path: Path, profile: str, lose: Callable[[Path], int], range_bytes: int | None
) -> None:
    make(tmp_path / "s", profile)
    lost = lose(tmp_path / "s")

    total = counts(found(tmp_path / "s", range_bytes))

    assert total.total() == lost + LATE
    assert total["late"] >= LATE or lose is _no_queues
    recovered(tmp_path / "s")
    assert found(tmp_path / "s") == []


@pytest.mark.parametrize("profile", PROFILES)
def test_units_before_the_last_dispatched_record_are_missing(tmp_path: Path, profile: str) -> None:
    """The writer had written units of later records, so it had dispatched these."""
    make(tmp_path / "s", profile)
    (tmp_path / "s" / "checkpoint").unlink()  # like that of a Java broker, which does not say how far dispatch was
    lost = _one_queue(tmp_path / "s")

    assert counts(found(tmp_path / "s")) == {"missing": lost, "late": LATE}


def test_beside_a_writer_no_unit_is_missing(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        store.put("orders", b"dispatched")
        store.dispatch()
        store.put("orders", b"not yet")
        assert found(tmp_path / "s") == []


# -- units without records ---------------------------------------------------------------------------------------------


def _lost_with(path: Path, first: int) -> tuple[int, int]:
    """Remove the segments from number `first` on. Return the numbers of units and queues that lead into them."""
    for file in (path / "commitlog").glob("0*"):
        if int(file.name) >= first * SEGMENT:
            file.unlink()
    if not first:
        (path / "checkpoint").unlink()  # else the log continues behind its old end
    per_queue = [
        sum(place >= first * SEGMENT for place, _, _ in units_of(path, topic, queue_id)) for topic, queue_id in QUEUES
    ]
    return sum(per_queue), sum(map(bool, per_queue))


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize(("profile", "went_down"), [("mqstore", False), ("mqstore", True), ("rocketmq", True)])
def test_units_behind_the_log_show_that_segments_are_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, profile: str, first: int, went_down: bool
) -> None:
    path = tmp_path / "s"
    receipts = make(path, profile, went_down=went_down)
    assert receipts[89 - LATE].physical_offset > 3 * SEGMENT
    units, queues = _lost_with(path, first)
    told = f"{units} units of {queues} queues point to records after it"
    opened = Path(shutil.copytree(path, tmp_path / "opened"))

    assert [told in each.detail for each in found(path) if each.kind == "lost_tail"] == [True]
    for dry_run in (True, False):
        [tail] = [each for each in recovered(path, dry_run=dry_run).new if each.kind == "lost_tail"]
        assert told in tail.detail
    again = recovered(path)
    assert (again.new, again.changed) == ([], False)
    with open_store(opened) as store:
        tails = [each.detail for each in store.recovery.findings if each.kind == "lost_tail"]
    # An opening after a reboot cannot tell this from a power cut, so it only logs what was not promised.
    assert told in (caplog.text if went_down and not tails else tails[0])


@pytest.mark.parametrize("profile", PROFILES)
def test_a_gap_without_damage_is_reported(tmp_path: Path, profile: str) -> None:
    """A marker hides the last records of a segment, and none behind it is whole."""
    path = tmp_path / "s"
    receipts = make(path, profile)
    last = [r for r in receipts if r.physical_offset < SEGMENT][-1]
    overwrite_log(path, last.physical_offset, struct.pack(">iI", SEGMENT - last.physical_offset, 0xCBD43194))

    for dry_run in (True, False):
        report = recovered(path, dry_run=dry_run)
        assert [(each.kind, each.file, each.position) for each in report.new] == [
            (
                "bad_unit",
                f"consumequeue/{last.topic}/{last.queue_id}/{last.offset // 8 * 160:020d}",
                last.offset % 8 * 20,
            )
        ]
    again = recovered(path)
    assert (again.new, again.changed) == ([], False)
