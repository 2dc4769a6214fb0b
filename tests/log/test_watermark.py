"""Torn tail or damage: everybody who looks at bad bytes gives the same answer (format#damage, format#watermark).

`verify` once said `bad_record` of bytes that opening called a torn tail and cut. The expected answer comes from the
watermark in the checkpoint and from the abort mark alone: bad bytes below the watermark are damage; bytes at or beyond
it are a torn tail if the machine went down with the writer, and damage if only the writer was killed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mqstore.admin import inspect_store
from mqstore.engine import Finding
from mqstore.jobs import verify
from tests.faults import Crash, deaths
from tests.log.recovering import checkpoint_of, plan_of_opening, recover
from tests.log.support import SEGMENT, checkpointed, flip_log, kill, open_store, overwrite_log, reboot

PROFILES = ("mqstore", "rocketmq")
JUDGED = {"bad_record", "torn_tail", "lost_tail", "missing_segment", "segment_size"}

Judgement = set[tuple[str, str, int]]
"""(kind, file, position in it)."""


def make(path: Path, profile: str, *, went_down: bool = True) -> tuple[list[int], int]:
    """A store of several segments whose writer, or with `went_down` whose machine, died behind a flush: (where records
    begin, the watermark)."""
    store = open_store(path, profile=profile)  # type: ignore[arg-type]
    places = []
    for n in range(60):
        places.append(store.put("orders", b"message %03d " % n * (1 + n % 9), n % 2, keys=f"k{n}").physical_offset)
        if n == 30:
            checkpointed(store)
    store.dispatch()
    kill(store)
    if went_down:
        reboot(path)
    flushed = checkpoint_of(path).flushed
    assert flushed is not None
    return places, flushed


def damage(path: Path, place: int) -> tuple[str, int]:
    """Flip a bit of the body of a record that begins at `place`: its file, and where it begins there."""
    name = f"commitlog/{place - place % SEGMENT:020d}"
    flip_log(path, place + 93)
    return name, place % SEGMENT


def of_findings(findings: Iterable[Finding]) -> Judgement:
    return {(each.kind, each.file, each.position) for each in findings if each.kind in JUDGED}


def of_report(report: Any) -> Judgement:
    """What opening does: bytes that it cuts are a torn tail."""
    cut = {("torn_tail", each.file, each.start) for each in report.truncated if each.stop > each.start}
    return of_findings(report.findings) | cut


def by_verify(path: Path) -> Judgement:
    with open_store(path, "r") as store:
        return of_findings(store.verify())


def by_spark(path: Path) -> Judgement:
    found = verify(path, range_bytes=1000).findings
    return {(each.kind, each.file, each.position) for each in found if each.kind in JUDGED}


def by_plan(path: Path) -> Judgement:
    return of_report(plan_of_opening(path))


def by_full_plan(path: Path) -> Judgement:
    return of_report(recover(path, dry_run=True))


def by_opening(path: Path) -> Judgement:
    copy = shutil.copytree(path, path.with_name("copy"))
    with open_store(copy) as store:
        return of_report(store.recovery)


JUDGES: dict[str, Callable[[Path], Judgement]] = {
    "verify": by_verify,
    "Spark's verify": by_spark,
    "recover --dry-run": by_plan,
    "opening": by_opening,
}
ALL = {**JUDGES, "recover": by_full_plan}
"""`recover` keeps what is whole behind damage, wherever that is."""


def agree(path: Path, expected: Judgement, judges: Iterable[str] = ALL) -> None:
    """Each of `judges` gives the expected answer."""
    assert {judge: ALL[judge](path) for judge in judges} == dict.fromkeys(judges, expected)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_bad_record_below_the_watermark_is_damage(path: Path, profile: str) -> None:
    places, flushed = make(path, profile)
    name, at = damage(path, [place for place in places if place < flushed][-1])

    agree(path, {("bad_record", name, at)})


@pytest.mark.parametrize("went_down", [False, True])
@pytest.mark.parametrize("profile", PROFILES)
def test_a_bad_record_of_a_kill_is_damage(path: Path, profile: str, went_down: bool) -> None:
    places, flushed = make(path, profile, went_down=went_down)
    beyond = [place for place in places if place >= flushed]
    bad = [damage(path, place) for place in (beyond[0], beyond[len(beyond) // 2])]

    agree(path, {("bad_record", name, at) for name, at in bad}, ["recover"] if went_down else ALL)
    if went_down:
        report = recover(path)
        assert (report.damaged_ranges, report.moved_to_cut) == (2, 0)
        assert report.quarantined == len([place for place in beyond if place > beyond[0]]) - 1
    else:
        open_store(path).close()
    with open_store(path, "r") as store:
        found = [m.physical_offset for ref in store.queues("orders") for m in store.iter(*ref)]
    assert sorted(found) == [place for place in places if place not in (beyond[0], beyond[len(beyond) // 2])]


@pytest.mark.parametrize("profile", PROFILES)
def test_bad_record_of_a_closed_store_is_damage(tmp_path: Path, path: Path, profile: str) -> None:
    """Even with the checkpoint of another store."""
    places, _ = make(path, profile)
    with open_store(path), open_store(tmp_path / "other", profile=profile) as other:  # type: ignore[arg-type]
        other.put("orders", b"one")
    shutil.copyfile(tmp_path / "other" / "checkpoint", path / "checkpoint")
    name, at = damage(path, places[-8])

    agree(path, {("bad_record", name, at)})


def test_killed_opening_does_not_hide_a_machine_crash(tmp_path: Path) -> None:
    """Else the next one would keep what the first one was moving to `cut/`."""
    places, flushed = make(tmp_path / "made", "mqstore")
    torn = next(place for place in places if place >= flushed)
    damage(tmp_path / "made", torn)
    for nth, fs in deaths(torn=False):
        path = tmp_path / f"{nth}"
        shutil.copytree(tmp_path / "made", path)
        with suppress(Crash):
            kill(open_store(path, fs=fs))
        with open_store(path) as store:
            assert store.max_offset == torn, f"killed before change {nth}"
    assert nth > 10


def test_a_store_that_went_on_after_a_reboot_knows_when_it_is_only_killed(tmp_path: Path) -> None:
    make(tmp_path / "s", "mqstore")
    store = open_store(tmp_path / "s")
    receipts = [store.put("orders", b"later %03d" % n, 0) for n in range(20)]
    kill(store)
    damage(tmp_path / "s", receipts[5].physical_offset)

    with open_store(tmp_path / "s") as store:
        found = [m.body for m in store.iter("orders", 0) if m.offset >= receipts[0].offset]
    assert found == [b"later %03d" % n for n in range(20) if n != 5]


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("which", ["first", "middle", "last"])
def test_a_bad_record_beyond_the_watermark_tears_the_tail(path: Path, profile: str, which: str) -> None:
    places, flushed = make(path, profile)
    beyond = [place for place in places if place >= flushed]
    place = {"first": beyond[0], "middle": beyond[len(beyond) // 2], "last": beyond[-1]}[which]
    name, at = damage(path, place)
    behind = sorted({each - each % SEGMENT for each in places if each - each % SEGMENT > place})

    # Units that lead to what is cut are no findings, either.
    with open_store(path, "r") as store:
        assert {finding.kind for finding in store.verify()} == {"torn_tail"}
    assert {finding.kind for finding in verify(path, range_bytes=1000).findings} == {"torn_tail"}
    agree(
        path,
        {("torn_tail", name, at), *(("torn_tail", f"commitlog/{start:020d}", 0) for start in behind)},
        JUDGES,
    )


def test_damage_on_both_sides_is_separate(path: Path) -> None:
    places, flushed = make(path, "mqstore")
    below = [place for place in places if place < flushed][-2]
    torn, behind = [place for place in places if place >= flushed][:2]
    bad, cut = damage(path, below), damage(path, torn)
    damage(path, behind)

    for judge in JUDGES.values():
        found = judge(path)
        assert {each for each in found if each[0] == "bad_record"} == {("bad_record", *bad)}
        assert ("torn_tail", *cut) in found


def test_inspect_counts_nothing_behind_a_torn_tail(tmp_path: Path) -> None:
    places, flushed = make(tmp_path / "s", "mqstore")
    place = next(place for place in places if place >= flushed)
    name = f"commitlog/{place - place % SEGMENT:020d}"
    overwrite_log(tmp_path / "s", place, bytes(40))

    found = inspect_store(tmp_path / "s")

    assert found["commitlog"]["max_offset"] == place
    assert found["commitlog"]["messages"] == len([each for each in places if each < place])
    assert found["recovery_needed"]
    [problem] = found["problems"]
    assert problem.startswith(f"{name}: the log ends at {place % SEGMENT}")


def test_beside_a_writer_bad_bytes_are_damage(tmp_path: Path) -> None:
    """Whatever lies before the end that a look has taken was written whole."""
    with open_store(tmp_path / "s") as writer:
        places = [writer.put("orders", b"message %03d " % n).physical_offset for n in range(40)]
        writer.dispatch()
        name, at = damage(tmp_path / "s", places[20])
        with open_store(tmp_path / "s", "r") as store:
            assert of_findings(store.verify()) == {("bad_record", name, at)}
