"""Bundles in the inbox: taken in once by whoever owns the store, bad ones moved aside and never lost (spark#inbox)."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mqstore import SimulatedClock
from mqstore.admin import inspect_store
from mqstore.errors import (
    MQStoreError,
    StoreBusyError,
    StoreClosedError,
    StoreFullError,
)
from tests.faults import STEP, Crash, FaultyFileSystem
from tests.log.splicesupport import Row, bodies, broker_on, bundle, refused, shown, waiting
from tests.log.support import files, kill, open_store

ONE, TWO = [Row(b"1"), Row(b"2", queue_id=1)], [Row(b"3"), Row(b"4", "clicks")]


def test_the_owner_looks_every_two_seconds(tmp_path: Path) -> None:
    clock = SimulatedClock()
    with open_store(tmp_path, clock=clock) as store:
        store.run_once(clock.monotonic_ms())
        bundle(tmp_path, "job", 0, [ONE])
        clock.advance(1_999)
        store.run_once(clock.monotonic_ms())
        assert store.max_offset == 0
        clock.advance(1)
        store.run_once(clock.monotonic_ms())
        assert bodies(store) == [b"1", b"2"]


def test_versions_of_an_application_go_in_their_order(tmp_path: Path) -> None:
    for version in (10, 9, 2):
        bundle(tmp_path, "job", version, [[Row(b"%d" % version)]])
    with open_store(tmp_path) as store:
        assert shown(store) == {("orders", 0): [b"2", b"9", b"10"]}


def test_unfinished_bundle_is_ignored(tmp_path: Path) -> None:
    for name in (".job-0", "_job-0"):
        bundle(tmp_path, "job", 0, [ONE], name=name)
    (tmp_path / "inbox" / "note").write_text("no folder")
    with open_store(tmp_path) as store:
        assert store.max_offset == 0
        assert waiting(tmp_path) == refused(tmp_path) == ()
    assert sorted(os.listdir(tmp_path / "inbox")) == [".job-0", "_job-0", "note"]


def test_a_replayed_bundle_is_removed_and_not_spliced_again(tmp_path: Path) -> None:
    bundle(tmp_path, "job", 1, [ONE])
    with open_store(tmp_path) as store:
        bundle(tmp_path, "job", 1, [ONE], name="job-1-again")
        store.take_inbox()
        assert bodies(store) == [b"1", b"2"]
        assert os.listdir(tmp_path / "inbox") == []


def test_a_bundle_that_is_mended_and_put_back_too_late_is_kept(tmp_path: Path) -> None:
    """A later version is in meanwhile: whether this one ever was nobody can tell from the table."""
    path = bundle(tmp_path, "job", 0, [ONE])
    good = (path / "0-0-abc" / "shard.json").read_bytes()
    (path / "0-0-abc" / "shard.json").write_text("{}")
    bundle(tmp_path, "job", 1, [TWO])
    with open_store(tmp_path) as store:
        assert bodies(store) == [b"3", b"4"]
        aside = tmp_path / "inbox" / "refused" / "job-0"
        (aside / "0-0-abc" / "shard.json").write_bytes(good)
        (aside / "reason.txt").unlink()
        kept = files(aside)
        aside.rename(path)
        bundle(tmp_path, "other", 0, [[Row(b"5")]])
        assert store.take_inbox() == 1
        assert bodies(store) == [b"3", b"4", b"5"]
        reason = (aside / "reason.txt").read_text()
        assert "a later version of the application was appended. Stage it again under another app" in reason
        (aside / "reason.txt").unlink()
        assert files(aside) == kept
        (aside / "bundle.json").write_text((aside / "bundle.json").read_text().replace('"job"', '"job-again"'))
        aside.rename(path)
        store.take_inbox()
        assert bodies(store) == [b"1", b"2", b"3", b"4", b"5"]


def _edit(name: str, **changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def _pipe(name: str) -> Callable[[Path], None]:
    """A named pipe that nobody writes, in place of a file."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def _folder(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def _large(name: str) -> Callable[[Path], None]:
    """More than a JSON file of a bundle may have, in a file with holes."""
    return lambda folder: os.truncate(folder / name, 33 << 20)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no bundle.json": (lambda f: (f / "bundle.json").unlink(), "bundle.json: the file is missing"),
    "no JSON": (lambda f: (f / "bundle.json").write_text("?"), "not JSON"),
    "a newer version": (_edit("bundle.json", version=2), "version 2 is not 1"),
    "no app": (_edit("bundle.json", app=""), "app is ''"),
    "a version that is none": (_edit("bundle.json", ver="1"), "ver is '1'"),
    "a shard elsewhere": (_edit("bundle.json", shards=["../../other"]), "shards is"),
    "a shard twice": (_edit("bundle.json", shards=["0-0-abc", "0-0-abc"]), "named twice"),
    "a shard that is not there": (_edit("bundle.json", shards=["9-0-abc"]), "9-0-abc"),
    "an app too long": (_edit("bundle.json", app="é" * 128), "app is"),
    "topics that are none": (_edit("bundle.json", create={"orders": 0}), "create is"),
    "too many queues": (_edit("bundle.json", create={"orders": 16_385}), "create is"),
    "queues beyond any number": (_edit("bundle.json", create={"orders": 1 << 70}), "create is"),
    "a queue that is no number": (_edit("bundle.json", highest={"orders": "1"}), "highest is"),
    "queues that are no number": (_edit("bundle.json", create={"orders": True}), "create is"),
    "a topic that cannot be": (_edit("bundle.json", create={"../evil": 3}), "create: topic '../evil'"),
    "a bad shard": (_edit("0-0-abc/shard.json", crc32c=1), "it is damaged"),
    "another profile": (_edit("0-0-abc/shard.json", profile="rocketmq"), "profile"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_bundle_is_moved_and_others_are_taken(tmp_path: Path, name: str) -> None:
    change, why = BAD[name]
    bad = bundle(tmp_path, "job", 0, [ONE])
    change(bad)
    kept = files(bad)
    bundle(tmp_path, "job", 1, [TWO])
    with open_store(tmp_path) as store:
        assert bodies(store) == [b"3", b"4"]
        aside = tmp_path / "inbox" / "refused" / "job-0"
        assert why in (aside / "reason.txt").read_text()
        (aside / "reason.txt").unlink()
        assert files(aside) == kept
        assert os.listdir(tmp_path / "inbox") == ["refused"]
        assert store.stats().inbox_refused == 1
        assert refused(tmp_path) == ("job-0",)
        before = files(tmp_path)
        store.take_inbox()  # not looked at again
        assert files(tmp_path) == before
    found = inspect_store(tmp_path)
    assert found["splice"]["refused"] == ["job-0"]
    assert any("refused" in problem for problem in found["problems"])


def test_two_refused_bundles_of_one_name_are_both_kept(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for _ in range(2):
            (bundle(tmp_path, "job", 0, [ONE]) / "bundle.json").unlink()
            store.take_inbox()
    assert sorted(os.listdir(tmp_path / "inbox" / "refused")) == ["job-0", "job-0.1"]


def test_links_lead_nowhere_and_what_they_point_at_stays(tmp_path: Path, path: Path) -> None:
    elsewhere = bundle(tmp_path / "else", "job", 0, [ONE])
    (path / "inbox").mkdir(parents=True)
    (path / "inbox" / "job-0").symlink_to(elsewhere)
    inner = bundle(path, "job", 1, [ONE])
    (inner / "0-0-abc").rename(tmp_path / "shard")
    (inner / "0-0-abc").symlink_to(tmp_path / "shard")
    with open_store(path) as store:
        assert store.max_offset == 0
        assert refused(path) == ("job-0", "job-1")
    assert (elsewhere / "bundle.json").exists()
    assert (tmp_path / "shard" / "records.bin").exists()


def test_a_crash_at_any_change_neither_loses_nor_doubles_a_bundle(tmp_path: Path) -> None:
    for nth in range(1, 200, STEP):
        root = tmp_path / str(nth)
        fs = FaultyFileSystem()
        store = open_store(root, fs=fs)
        store.put("orders", b"0")
        bundle(root, "job", 0, [ONE, TWO])
        fs.crash(nth, torn=nth % 2 == 0)
        try:
            store.take_inbox()
        except Crash:
            fs.heal()
            kill(store)
        else:
            break
        with open_store(root) as store:
            assert bodies(store) == [b"0", b"1", b"2", b"3", b"4"], nth
            assert os.listdir(root / "inbox") == [], nth
            assert store.stats().errors == {}
    assert nth > 20


def test_bundle_refused_by_the_disk_waits(tmp_path: Path) -> None:
    clock, fs = SimulatedClock(), FaultyFileSystem()
    with open_store(tmp_path, clock=clock, fs=fs) as store:
        store.run_once(clock.monotonic_ms())
        first = bundle(tmp_path, "job", 0, [ONE])
        bundle(tmp_path, "job", 1, [TWO])
        bundle(tmp_path, "other", 0, [[Row(b"5")]])
        fs.fail({"allocate", "create"}, errno.ENOSPC, times=None)
        with pytest.raises(StoreFullError):
            store.take_inbox()
        fs.heal()
        fs.fail({"open"}, errno.EIO, times=None, path_part=str(first / "0-0-abc"))
        clock.advance(10_000)
        store.run_once(clock.monotonic_ms())
        assert bodies(store) == [b"5"], "a later version must not overtake, another application may"
        assert "job-0" in store.stats().errors["inbox"]
        assert waiting(tmp_path) == ("job-0", "job-1")
        clock.advance(2_000)  # not yet tried again: the pause grows
        calls = len(fs.calls)
        store.run_once(clock.monotonic_ms())
        assert not any("records" in call.path or "shard.json" in call.path for call in fs.calls[calls:])
        assert "inbox" in store.stats().errors
        fs.heal()
        clock.advance(600_000)
        store.run_once(clock.monotonic_ms())
        assert bodies(store) == [b"1", b"2", b"3", b"4", b"5"]
        assert "inbox" not in store.stats().errors


@pytest.mark.parametrize(
    ("change", "why"),
    [(_pipe("0-0-abc/records.bin"), "records.bin: it is a"), (_folder("0-0-abc/records.bin"), "records.bin: it is a")],
)
def test_special_file_is_moved_at_once(tmp_path: Path, change: Callable[[Path], None], why: str) -> None:
    change(bundle(tmp_path, "job", 0, [ONE]))
    bundle(tmp_path, "job", 1, [TWO])
    with open_store(tmp_path) as store:
        assert bodies(store) == [b"3", b"4"]
        assert why in (tmp_path / "inbox" / "refused" / "job-0" / "reason.txt").read_text()


UNREADABLE: dict[str, Callable[[Path], None]] = {
    "a folder for bundle.json": _folder("bundle.json"),
    "a pipe for bundle.json": _pipe("bundle.json"),
    "a pipe for shard.json": _pipe("0-0-abc/shard.json"),
    "a large bundle.json": _large("bundle.json"),
    "a large shard.json": _large("0-0-abc/shard.json"),
}


REFUSED_BY_THE_DISK = {
    "bundle.json of somebody else": ("bundle.json", errno.EACCES),
    "a bad sector": ("0-0-abc", errno.EIO),
}


@pytest.mark.parametrize("name", [*UNREADABLE, *REFUSED_BY_THE_DISK])
def test_unreadable_bundle_delays_only_its_application(tmp_path: Path, name: str) -> None:
    clock, fs = SimulatedClock(), FaultyFileSystem()
    bad = bundle(tmp_path, "job", 0, [ONE])
    if name in UNREADABLE:
        UNREADABLE[name](bad)
    else:
        part, number = REFUSED_BY_THE_DISK[name]
        fs.fail({"open"}, number, times=None, path_part=str(bad / part))
    bundle(tmp_path, "job", 1, [TWO])
    bundle(tmp_path, "aaa", 0, [[Row(b"5")]])
    bundle(tmp_path, "zzz", 0, [[Row(b"6")]])
    with open_store(tmp_path, clock=clock, fs=fs) as store:  # which is the first try
        assert bodies(store) == [b"5", b"6"]
        assert "job-0" in store.stats().errors["inbox"]
        with pytest.raises(OSError, match="job-0"):
            store.take_inbox()  # too early to count
        for _ in range(6):
            clock.advance(600_000)
            with pytest.raises(OSError, match="job-0"):
                store.take_inbox()
        assert waiting(tmp_path) == ("job-0", "job-1")
        clock.advance(600_000)
        store.take_inbox()
        assert bodies(store) == [b"3", b"4", b"5", b"6"]
        assert waiting(tmp_path) == ()
        assert refused(tmp_path) == ("job-0",)


@pytest.mark.parametrize("error", [StoreClosedError("closing"), StoreBusyError("busy")])
def test_a_store_that_takes_none_keeps_bundles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: MQStoreError
) -> None:
    def take(*_: object, **__: object) -> None:
        raise error

    with open_store(tmp_path) as store:
        bundle(tmp_path, "job", 0, [ONE])
        monkeypatch.setattr("mqstore.log.bulk.splice.Splicer.splice", take)
        with pytest.raises(type(error)):
            store.take_inbox()
        assert waiting(tmp_path) == ("job-0",)


def test_a_bundle_that_cannot_be_moved_aside_keeps_no_other_waiting(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    (bundle(tmp_path, "job", 0, [ONE]) / "bundle.json").unlink()
    bundle(tmp_path, "other", 0, [[Row(b"5")]])
    fs.fail({"replace"}, errno.EIO, times=None, path_part="job-0")
    with open_store(tmp_path, fs=fs) as store:
        assert bodies(store) == [b"5"]
        assert "job-0" in store.stats().errors["inbox"]
        assert waiting(tmp_path) == ("job-0",)


def test_a_bundle_that_stays_when_in_keeps_nobody_waiting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock, fs = SimulatedClock(), FaultyFileSystem()
    done = tmp_path / "inbox" / "_done-job-0"
    with open_store(tmp_path, clock=clock, fs=fs) as store:
        bundle(tmp_path, "job", 0, [ONE])
        fs.fail({"unlink"}, errno.EIO, times=None, path_part=str(done))
        store.take_inbox()
        bundle(tmp_path, "job", 1, [TWO])
        bundle(tmp_path, "job", 1, [TWO], name="job-0")  # its name once more
        store.take_inbox()
        assert bodies(store) == [b"1", b"2", b"3", b"4"]
        assert sorted(os.listdir(tmp_path / "inbox")) == ["_done-job-0", "_done-job-0.1"]
        told = [record.getMessage() for record in caplog.records if "cannot be deleted" in record.getMessage()]
        assert len(told) == 2, "each of them once"
        fs.heal()
        store.take_inbox()
        assert os.listdir(tmp_path / "inbox") == []


def test_a_link_with_the_name_of_one_that_is_done_with_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "file").touch()
    (tmp_path / "store" / "inbox").mkdir(parents=True)
    (tmp_path / "store" / "inbox" / "_done-job-0").symlink_to(tmp_path / "else")
    open_store(tmp_path / "store").close()
    assert (tmp_path / "else" / "file").exists()


# -- topics ------------------------------------------------------------------------------------------------------------


def test_a_broker_enters_the_topics_of_a_bundle(tmp_path: Path) -> None:
    with broker_on(open_store(tmp_path)) as broker:
        bundle(tmp_path, "job", 0, [ONE], {"orders": 8})
        broker.store.take_inbox()
        assert broker.topics.require("orders").write_queues == 8
        broker.topics.create("clicks", queues=3)
        bundle(tmp_path, "job", 1, [TWO], {"clicks": 8, "orders": 1})
        broker.store.take_inbox()
        assert (broker.topics.require("clicks").write_queues, broker.topics.require("orders").write_queues) == (3, 8)


def test_a_noted_topic_that_is_refused_keeps_no_other_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bundle(tmp_path, "job", 0, [ONE], {"SCHEDULE_TOPIC_XXXX": 4, "orders": 8})
    open_store(tmp_path).close()
    path = tmp_path / "config/spark/txn.json"
    value = json.loads(path.read_text())
    value["create"].update({"a/b": 1, "clicks": 1 << 40, "zebra": 2})  # of a program that did not check them
    path.write_text(json.dumps(value))
    with broker_on(open_store(tmp_path)) as broker:
        found = [broker.topics.require(name) for name in ("orders", "zebra")]
        assert [(each.write_queues, each.read_queues) for each in found] == [(8, 8), (2, 2)]
        assert broker.store.stats().errors == {}
        assert bodies(broker.store) == [b"1", b"2"]
    assert "create" not in json.loads(path.read_text())
    told = [record.getMessage() for record in caplog.records if "cannot be created" in record.getMessage()]
    for name in ("'SCHEDULE_TOPIC_XXXX'", "'a/b'", "'clicks'"):
        assert name in " ".join(told)


@pytest.mark.parametrize("broker_is_there", [True, False])
def test_a_bundle_for_queues_that_its_topic_has_no_more_is_refused(tmp_path: Path, broker_is_there: bool) -> None:
    """Nobody would read what it has there. Opening takes bundles in before there is a broker."""
    with broker_on(open_store(tmp_path)) as broker:
        broker.topics.create("orders", queues=2)
        if broker_is_there:
            bundle(tmp_path, "job", 0, [[Row(b"1", queue_id=2)]], {"orders": 8}, highest={"orders": 2})
            broker.store.take_inbox()
    if not broker_is_there:
        bundle(tmp_path, "job", 0, [[Row(b"1", queue_id=2)]], {"orders": 8}, highest={"orders": 2})
    bundle(tmp_path, "job", 1, [ONE], {"orders": 8}, highest={"orders": 1})
    with open_store(tmp_path) as store:
        assert bodies(store) == [b"1", b"2"]
    reason = (tmp_path / "inbox" / "refused" / "job-0" / "reason.txt").read_text()
    assert "queue 2 of topic 'orders', which was altered and now has 2 queues" in reason


@pytest.mark.parametrize("create", [{"a/b": 1}, {"orders": 16_385}, {"SCHEDULE_TOPIC_XXXX": 4}, {"%RETRY%g": 1}])
def test_a_bundle_whose_topics_no_broker_may_enter_is_refused(tmp_path: Path, create: dict[str, int]) -> None:
    with broker_on(open_store(tmp_path)) as broker:
        bundle(tmp_path, "job", 0, [ONE], create)
        broker.store.take_inbox()
        assert refused(tmp_path) == ("job-0",)
        assert broker.store.max_offset == 0
