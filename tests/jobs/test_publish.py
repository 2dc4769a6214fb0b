"""Staging and committing without Spark: all or none of a batch, once, whatever happens in between."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shlex
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import QueueRef, SimulatedClock, StoreConfig
from mqstore.broker.background.context import open_parts, open_tables
from mqstore.broker.broker import Broker
from mqstore.broker.tables.offsets import OffsetTable
from mqstore.errors import (
    ConfigError,
    CorruptStoreError,
    FormatError,
    MQStoreError,
    NotAStoreError,
    StoreLockedError,
    UnsupportedStoreError,
)
from mqstore.files.filesystem import REAL
from mqstore.files.lock import WriterLock
from mqstore.jobs.options.options import SinkOptions, SourceOptions
from mqstore.jobs.reading.plan import stores_of
from mqstore.jobs.writing.publish import Commit, abort, clean_target, commit, plan_target
from mqstore.jobs.writing.staging import STAGING, transaction_folder
from mqstore.log.bulk.txn import read_txn
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.store import MessageStore
from tests.crash.recording import Event, RecordingFileSystem, build_image
from tests.faults import STEP, Crash, FaultyFileSystem, deaths
from tests.jobs.staged import batch_of, bodies, manifest, options_of, set_bodies, stage, write
from tests.tools.support import mqstore as mqstore_command
from tests.tools.support import mqstore_json

ONE = [f"a{i}" for i in range(5)]
TWO = [f"b{i}" for i in range(4)]
SMALL = StoreConfig(segment_bytes=1 << 16, consumequeue_units=64, index_slots=16, index_entries=64, default_queues=4)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small store, with nothing in it."""
    MessageStore(tmp_path / "store", config=SMALL).close()
    return tmp_path / "store"


def staged(root: Path) -> list[str]:
    try:
        return sorted(os.listdir(root / STAGING))
    except FileNotFoundError:
        return []


# -- shards ------------------------------------------------------------------------------------------------------------


def test_rows_are_staged_in_shards(tmp_path: Path) -> None:
    options = options_of(tmp_path / "s", maxRowsPerShard="2")

    none, several = (stage(options, "a", 0, [batch_of(rows)]) for rows in ([], ONE))

    assert (none, [shard.records for shard in several]) == ([], [2, 2, 1])


def test_a_task_that_fails_takes_the_shard_it_was_at_away(tmp_path: Path) -> None:
    options = options_of(tmp_path / "s")
    with pytest.raises(mqstore.errors.InvalidMessageError):
        stage(options, "a", 0, [batch_of(ONE), batch_of(ONE, queue_id=[99] * 5)])

    assert [name[:4] for name in os.listdir(transaction_folder(tmp_path / "s", "a", 0))] == ["0-0-"]


def test_full_disk_while_staging_leaves_no_shard(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    fs.fail("pwrite", errno.ENOSPC, path_part="records.bin")
    with pytest.raises(mqstore.errors.StoreFullError):
        stage(options_of(tmp_path / "s"), "a", 0, [batch_of(ONE)], fs=fs)

    assert os.listdir(transaction_folder(tmp_path / "s", "a", 0)) == []


@pytest.mark.parametrize("file", ["records.bin", "shard.json"])
@pytest.mark.parametrize("damage", ["empty", "zeros", "half"])
def test_shard_that_a_power_cut_has_torn_is_not_committed(root: Path, file: str, damage: str) -> None:
    """Another machine may have staged it, and have lost its power before the commit."""
    options, before = options_of(root), bodies(root)
    shards = stage(options, "a", 0, [batch_of(ONE)])
    path = transaction_folder(root, "a", 0) / shards[0].name / file
    data = path.read_bytes()
    path.write_bytes({"empty": b"", "zeros": bytes(len(data)), "half": data[: len(data) // 2]}[damage])
    with pytest.raises(mqstore.errors.FormatError):
        commit(options, Commit("a", 0, shards))
    assert bodies(root) == before
    assert write(options, "a", 0, ONE) == len(ONE)


@pytest.mark.parametrize("target", ["store", "inbox"])
def test_body_of_the_stores_own_limit_is_written_and_no_larger_one(tmp_path: Path, target: str) -> None:
    root, limit = tmp_path / "s", 6 << 20  # above the 4 MiB of a new store
    with MessageStore(root, config=StoreConfig(max_message_size=limit)) as store:
        store.put("seed", b"")
    options = options_of(root, target=target)
    assert write(options, "a", 0, ["x" * limit]) == 1
    with pytest.raises(mqstore.errors.InvalidMessageError, match=f"at most {limit} bytes"):
        write(options, "a", 1, ["x" * (limit + 1)])
    with MessageStore(root) as store:
        store.take_inbox()
    assert bodies(root) == ["", "x" * limit]


# -- leftovers ---------------------------------------------------------------------------------------------------------


def test_a_job_that_still_writes_into_an_old_folder_is_not_old(root: Path) -> None:
    [shard] = stage(options_of(root), "a", 0, [batch_of(ONE)])
    folder = transaction_folder(root, "a", 0)
    for path in [folder, folder / shard.name, folder / shard.name / "shard.json"]:
        os.utime(path, (0, 0))

    assert clean_target(root, 3600) == []


def test_a_commit_takes_away_what_jobs_left_long_ago(root: Path) -> None:
    options = options_of(root, stagingTtl="1h")
    stage(options, "crashed", 7, [batch_of(ONE)])
    for path in (root / STAGING).rglob("*"):
        os.utime(path, (0, 0))

    write(options, "a", 0, TWO)

    assert (staged(root), sorted(bodies(root))) == ([], TWO)


def test_removing_never_follows_a_link_out_of_the_folder(root: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("x")
    stage(options_of(root), "a", 0, [batch_of(ONE)])
    (transaction_folder(root, "a", 0) / "link").symlink_to(tmp_path / "precious")

    abort(options_of(root), "a", 0)

    assert (staged(root), (tmp_path / "precious" / "file").read_text()) == ([], "x")


# -- planning ----------------------------------------------------------------------------------------------------------


def test_the_rules_are_those_of_the_store(tmp_path: Path) -> None:
    config = StoreConfig(segment_bytes=1 << 16, group_hash="siphash24", delay_levels="1s 2s", default_queues=3)
    with mqstore.open(tmp_path / "s", profile="rocketmq", config=config) as store:
        store.broker.topics.create("wide", read_queues=9, write_queues=2)
        store.broker.topics.create("closed", perm=4)
        store.producer().send("found", b"")
    rules = plan_target(options_of(tmp_path / "s", queues="5"))

    assert rules.profile == "rocketmq"
    assert (rules.group_hash, rules.levels, rules.max_record_bytes) == ("siphash24", 2, (1 << 16) - 8)
    assert (rules.topic("wide"), rules.topic("new")) == ((2, 9, ""), (5, 5, ""))
    with pytest.raises(MQStoreError, match="'closed' may not be written to"):
        rules.topic("closed")
    for name in ("SCHEDULE_TOPIC_XXXX", "rmq_sys_x"):
        with pytest.raises(MQStoreError, match="is a system topic"):
            rules.topic(name)


def test_a_target_that_is_not_what_the_option_says_is_refused(root: Path, tmp_path: Path) -> None:
    write(options_of(tmp_path / "set", target="set"), "a", 0, ONE)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letters.txt").write_text("dear")
    cases: list[tuple[str, str, type[Exception], str]] = [
        ("set", "store", ConfigError, "is a store set: use target=set"),
        ("set", "inbox", ConfigError, "is a store set"),
        ("store", "set", ConfigError, "is a store: use target=store"),
        ("other", "set", NotAStoreError, "is not a store directory .contains letters.txt"),
        ("other", "store", NotAStoreError, "letters.txt"),
        ("other/letters.txt", "store", NotAStoreError, "is a file"),
        ("other/letters.txt", "set", NotAStoreError, "is a file"),
        ("nowhere", "inbox", ConfigError, "is not a store, .* use target=store, which creates it"),
    ]
    for name, target, kind, says in cases:
        with pytest.raises(kind, match=says):
            plan_target(options_of(tmp_path / name, target=target))
    assert not (tmp_path / "nowhere").exists()


def test_a_target_whose_creation_was_killed_is_written_to_all_the_same(tmp_path: Path) -> None:
    """What the engine itself opens: its mark, a manifest that was not yet renamed."""
    root = tmp_path / "s"
    for name in ("tmp", "inbox"):
        (root / name).mkdir(parents=True)
    for name in ("lock", "abort", "mqstore.json.tmp", "serve.json"):
        (root / name).touch()

    write(options_of(root), "a", 0, ONE)

    assert sorted(bodies(root)) == ONE


# -- store -------------------------------------------------------------------------------------------------------------


def test_missing_store_is_created_in_partition_order(tmp_path: Path) -> None:
    options = options_of(tmp_path / "s", queues="1")

    assert write(options, "a", 0, ONE, TWO, [], ["c"]) == 10

    assert bodies(tmp_path / "s") == [*ONE, *TWO, "c"]
    assert staged(tmp_path / "s") == []
    with ReadOnlyMessageStore(tmp_path / "s") as store:
        assert open_tables(store).topics.require("t").write_queues == 1


@pytest.mark.parametrize("profile", ["mqstore", "rocketmq"])
def test_earlier_messages_stay_and_later_ones_follow(tmp_path: Path, profile: Any) -> None:
    with MessageStore(tmp_path / "s", profile=profile, config=SMALL) as store:
        store.put("t", b"first")
    options = options_of(tmp_path / "s")
    write(options, "a", 0, ONE)
    with MessageStore(tmp_path / "s") as store:
        store.put("t", b"last")
        assert [*store.verify()] == []

    assert sorted(bodies(tmp_path / "s")) == sorted([*ONE, "first", "last"])


@pytest.mark.parametrize("target", ["store", "set", "inbox"])
def test_a_version_counts_once_and_an_older_one_never(
    target: str, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A new checkpoint counts its batches from 0: with the txnAppId of the old one they were dropped in silence."""
    where = root if target != "set" else tmp_path / "set"
    options = options_of(where, target=target)
    skipped = []
    for version in (3, 3, 2, 4):
        skipped.append(write(options, "a", version, [f"v{version}"]) is None)
        if target == "inbox":
            MessageStore(where).close()

    assert skipped == [False, True, True, False]
    for version in (3, 2):
        assert f"version {version} of 'a' was written before (last 3); nothing was written" in caplog.text
    assert sorted(bodies(where) if target != "set" else set_bodies(where)) == ["v3", "v4"]
    assert staged(where) == []


@pytest.mark.parametrize("target", ["store", "set", "inbox", "waiting"])
def test_a_query_whose_checkpoint_was_put_back_is_refused(target: str, root: Path, tmp_path: Path) -> None:
    """Its batches bear numbers again that are in, with other rows: these were passed over, batch after batch, and the
    query did as if all was well."""
    where = root if target != "set" else tmp_path / "set"
    options = options_of(where, target="inbox" if target == "waiting" else target)

    def batch(version: int, rows: list[str]) -> int | None:
        shards = stage(options, "q", version, [batch_of(rows)])
        done = commit(options, Commit("q", version, shards, query=True))
        if target == "inbox":
            MessageStore(where).close()  # its owner takes it in
        return done

    assert [batch(version, [f"v{version}"]) is None for version in (1, 2, 2, 3)] == [False, False, True, False]
    for version in (0, 2):
        with pytest.raises(
            ConfigError, match=f"batch 3 of query 'q', but the query is at batch {version} again.*restored"
        ):
            batch(version, ["other"])
        abort(options, "q", version)
    assert batch(4, ["v4"]) is not None

    MessageStore(root).close()
    found = set_bodies(where) if target == "set" else bodies(where)
    assert sorted(found) == ["v1", "v2", "v3", "v4"]


def test_a_store_remembers_no_job_that_never_comes_again(root: Path) -> None:
    """Jobs without a txnAppId, a foreachBatch say, filled the table, until it forgot those that count on it."""
    options = options_of(root, confirmOverwrite="true", queues="1")
    write(options, "daily", 3, ["once"])
    commit(options, Commit("job-1", 0, stage(options, "job-1", 0, [batch_of(ONE)]), remembered=False))
    commit(options, Commit("job-2", 0, [], remembered=False))

    assert [*read_txn(root, REAL).apps] == ["daily"]
    assert sorted(bodies(root)) == [*ONE, "once"]
    assert write(options, "daily", 3, ["once"]) is None

    shards = stage(options, "job-3", 0, [batch_of(TWO)])
    commit(options, Commit("job-3", 0, shards, remembered=False, overwrite=True))
    with mqstore.open(root) as store:
        assert sorted(task.message.body.decode() for task in store.queue("t").get_many(99)) == TWO


@pytest.mark.parametrize(
    ("target", "when"),
    [("store", "before"), ("store", "between"), ("store", "behind"), ("set", "between"), ("inbox", "between")],
)
def test_of_two_attempts_at_once_the_one_that_loses_may_die_at_any_step(
    target: str, when: str, root: Path, tmp_path: Path
) -> None:
    """A task is tried twice at once where one is slow. The slow one is killed before the quick one is done, between
    that and the commit, or behind the commit, which it knows nothing of; what it leaves is litter."""
    for nth, fs in deaths():
        where = tmp_path / f"killed-{nth}"
        if target != "set":
            shutil.copytree(root, where)
        options = options_of(where, target=target)

        def lose(options: Any = options, fs: FaultyFileSystem = fs) -> None:
            with contextlib.suppress(Crash):
                stage(options, "a", 1, [batch_of(TWO)], attempt=0, fs=fs)

        if when == "before":
            lose()
        shards = stage(options, "a", 1, [batch_of(ONE)], attempt=1)
        if when == "between":
            lose()
        commit(options, Commit("a", 1, shards))
        if when == "behind":
            lose()
        if target == "inbox":
            with MessageStore(where) as owner:
                owner.take_inbox()
        assert sorted(set_bodies(where) if target == "set" else bodies(where)) == ONE, nth
        clean_target(where, 0)
        assert staged(where) == []
        assert sorted(set_bodies(where) if target == "set" else bodies(where)) == ONE, nth
        shutil.rmtree(where)
    assert nth >= 7


def test_delayed_messages_come_when_they_are_due(tmp_path: Path) -> None:
    clock = SimulatedClock(1_700_000_000_000)
    options = options_of(tmp_path / "s", queues="1")
    shards = stage(options, "a", 0, [batch_of(ONE, delay_level=[1, None, 1, None, None])], clock=clock)
    commit(options, Commit("a", 0, shards), clock=clock)

    with Broker(MessageStore(tmp_path / "s", config=StoreConfig(clock=clock))) as broker:
        assert broker.store.offsets("t", 0) == (0, 3)
        clock.advance(2000)
        broker.run_once()
        broker.store.dispatch()
        assert [m.body for m in broker.store.read("t", 0, 0, 9)] == [b"a1", b"a3", b"a4", b"a0", b"a2"]


@pytest.mark.parametrize("target", ["store", "inbox"])
@pytest.mark.parametrize(
    ("altered", "says"),
    [
        ({"read_queues": 16, "write_queues": 16}, "now has 16 queues to write to and 16 in all"),
        ({"write_queues": 2}, "now has 2 queues to write to and 8 in all"),
        ({"perm": 4}, "now may not be written to"),
    ],
)
def test_changed_topic_is_not_written(root: Path, target: str, altered: dict[str, int], says: str) -> None:
    """A topic that got more queues while the tasks ran had the message groups of a batch go on in other queues."""
    options = options_of(root, target=target)
    with MessageStore(root) as store:
        open_parts(store).topics.create("t", queues=8)
    shards = stage(options, "a", 0, [batch_of(ONE, sharding_key=list("abcde"))])
    with MessageStore(root) as store:
        open_parts(store).topics.alter("t", **altered)

    with pytest.raises(ConfigError, match=f"topic 't' was altered .* {says}.* again"):
        commit(options, Commit("a", 0, shards))

    MessageStore(root).close()
    assert bodies(root) == []


@pytest.mark.parametrize("target", ["store", "set"])
def test_a_target_that_somebody_has_open_is_waited_for_and_then_named(target: str, root: Path, tmp_path: Path) -> None:
    where = root if target == "store" else tmp_path / "set"
    options = options_of(where, target=target, lockTimeout="1ms")
    write(options, "a", 0, TWO)
    shards = stage(options, "b", 0, [batch_of(ONE)])
    says = rf"process {os.getpid()}.*lockTimeout=0.001 s " + (
        ".*target=inbox" if target == "store" else "was not enough$"
    )
    lock = WriterLock(where, "the other")
    lock.acquire()
    try:
        with pytest.raises(StoreLockedError, match=says) as caught:
            commit(options, Commit("b", 0, shards))
    finally:
        lock.release()
    assert caught.value.pid == os.getpid()

    commit(options, Commit("b", 0, shards))
    assert sorted(bodies(where) if target == "store" else set_bodies(where)) == [*ONE, *TWO]


def test_overwrite_takes_old_messages_once(root: Path) -> None:
    options = options_of(root, confirmOverwrite="true", queues="1")
    write(options, "a", 0, ONE)
    assert write(options, "a", 1, TWO, overwrite=True) is not None
    assert write(options, "a", 1, TWO, overwrite=True) is None

    with mqstore.open(root) as store:
        consumer = store.pull_consumer("g", start="earliest")
        consumer.assign(QueueRef("t", 0))
        assert [message.body.decode() for message in consumer.poll(timeout=10)] == TWO

        assert store.log.offsets("t", 0) == (0, len(ONE) + len(TWO))


def test_late_overwrite_keeps_newer_progress(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its job was killed when the messages were in and the old ones not yet taken away. Weeks later an append to
    another topic finishes it; the group had gone on meanwhile, and got all of it again."""

    def consume(count: int) -> list[str]:
        with mqstore.open(root) as store:
            consumer = store.pull_consumer("g", start="earliest", auto_commit=False)
            consumer.assign(QueueRef("t", 0))
            found = [message.body.decode() for message in consumer.poll(timeout=0, max_messages=count)]
            consumer.commit()
            return found

    options = options_of(root, confirmOverwrite="true", queues="1")
    write(options, "a", 0, ONE)
    assert consume(2) == ONE[:2]

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(OffsetTable, "move_starts", killed)
        with pytest.raises(KeyboardInterrupt):
            write(options, "a", 1, TWO, overwrite=True)
    assert consume(len(ONE)) == [*ONE[2:], *TWO[:2]]

    write(options_of(root, topic="other"), "b", 0, ["x"])

    assert consume(99) == TWO[2:]


WRONG_NOTES = [
    b"\0" * 20,
    b'{"version": 1, "ends": 5}',
    b'{"version": 1, "app": "a", "ver": "0", "ends": {}}',
    b'{"version": 1, "app": 5, "ver": 0, "ends": {}}',
    b'{"version": 1, "app": "a", "ver": 0, "ends": null}',
    b'{"version": 1, "app": "a", "ver": 0, "ends": {"t": 5}}',
    b'{"version": 1, "app": "a", "ver": 0, "ends": {"t": {"x": 5}}}',
    b'{"version": 1, "app": "a", "ver": 0, "ends": {"../t": {"0": 5}}}',
    b'{"version": 1, "app": "a", "ver": 0, "ends": {"t@g": {"0": 5}}}',
    b'{"version": 1, "app": "a", "ver": 0, "ends": {"t": {"0": -5}}}',
    b'{"version": "1"}',
]


@pytest.mark.parametrize("content", WRONG_NOTES)
def test_damaged_overwrite_note_is_repaired_by_its_command(root: Path, content: bytes) -> None:
    """No job could write to the store any more. `recover --rebuild config` said that every JSON file decodes, verify
    that all was well: neither looked at this one. Where it was JSON of another shape, jobs ended in a KeyError."""
    options = options_of(root, confirmOverwrite="true", queues="1")
    write(options, "a", 0, ONE)
    write(options, "a", 1, TWO, overwrite=True)
    note = root / "config" / "spark" / "overwrite.json"
    for path in (note, note.with_name("overwrite.json.bak")):
        path.write_bytes(content)
    with pytest.raises(CorruptStoreError) as caught:
        write(options, "a", 2, ["more"])
    assert caught.value.repair in str(caught.value)
    _, *command = shlex.split(caught.value.repair)

    for look in (["verify"], ["recover", "--dry-run"]):
        findings = mqstore_json(look[0], root, *look[1:], exit_code=1)["findings"]
        assert [(each["kind"], each["file"]) for each in findings] == [("bad_json", "config/spark/overwrite.json")]
    assert mqstore_command(*command, "--yes").exit_code == 0

    assert mqstore_json("verify", root)["ok"]
    assert write(options, "a", 2, ["more"]) is not None
    assert mqstore_command(*command).exit_code == 0


def test_a_note_of_an_overwrite_by_a_newer_program_is_refused_and_kept(root: Path) -> None:
    write(options_of(root), "a", 0, ONE)
    note = root / "config" / "spark" / "overwrite.json"
    note.write_text('{"version": 2, "ends": []}')

    with pytest.raises(UnsupportedStoreError, match=r"overwrite\.json has version .*upgrade"):
        write(options_of(root), "a", 1, TWO)

    assert mqstore_command("recover", root, "--rebuild", "config", "--yes").exit_code == 3
    assert [path.name for path in note.parent.glob("overwrite.json*")] == ["overwrite.json"]


# -- set ---------------------------------------------------------------------------------------------------------------


def test_a_set_gets_a_store_for_each_shard_which_a_query_finds(tmp_path: Path) -> None:
    options = options_of(tmp_path / "set", target="set", queues="2")
    write(options, "a", 0, ONE, TWO)
    first = {*manifest(tmp_path / "set")["stores"]}
    write(options, "a", 1, ["c"])
    shards = stage(options, "job-1", 0, [batch_of(["once"])])
    commit(options, Commit("job-1", 0, shards, remembered=False))  # it never comes again

    assert sorted(set_bodies(tmp_path / "set")) == sorted([*ONE, *TWO, "c", "once"])
    names = [store.id for store in stores_of(SourceOptions.parse({"path": str(tmp_path / "set")}))]
    second, third = {*names} - first
    assert (len(first), names) == (2, sorted([*first, second, third]))
    assert manifest(tmp_path / "set")["recorded"] == {"a": 1}
    with mqstore.open(tmp_path / "set" / "shards" / second) as store:  # a store like any other
        assert store.broker.topics.require("t").write_queues == 2
        store.producer().send("t", b"more")


def test_overwriting_a_set_replaces_then_deletes(tmp_path: Path) -> None:
    root = tmp_path / "set"
    options = options_of(root, target="set")
    write(options, "a", 0, ONE)
    MessageStore(root / "own").close()
    known = manifest(root)
    known["stores"]["own"] = "own"
    (root / "mqstore-set.json").write_text(json.dumps({**known, "note": "kept"}))

    write(options, "a", 1, TWO, overwrite=True)

    assert sorted(set_bodies(root)) == TWO
    assert len(os.listdir(root / "shards")) == 1
    assert (root / "own").exists()
    assert manifest(root)["note"] == "kept"


def test_an_empty_overwrite_empties_a_set_and_an_empty_append_makes_one(tmp_path: Path) -> None:
    options = options_of(tmp_path / "set", target="set")
    write(options, "a", 0)
    assert manifest(tmp_path / "set")["stores"] == {}
    write(options, "a", 1, ONE)
    write(options, "a", 2, overwrite=True)

    assert set_bodies(tmp_path / "set") == []


def test_members_are_as_small_as_their_messages(tmp_path: Path) -> None:
    options = options_of(tmp_path / "set", target="set")
    write(options, "a", 0, ["x" * 100_000])

    [name] = manifest(tmp_path / "set")["stores"]
    folder = tmp_path / "set" / "shards" / name
    assert sum(path.stat().st_blocks * 512 for path in folder.rglob("*")) < 1 << 20
    assert set_bodies(tmp_path / "set") == ["x" * 100_000]


def test_a_member_holds_delayed_messages_and_topics_of_its_own(tmp_path: Path) -> None:
    options = options_of(tmp_path / "set", target="set", queues="3")
    shards = stage(options, "a", 0, [batch_of(["now", "later"], delay_level=[None, 3])])
    commit(options, Commit("a", 0, shards))

    [where] = manifest(tmp_path / "set")["stores"].values()
    with ReadOnlyMessageStore(tmp_path / "set" / where) as store:
        assert {config.name: config.write_queues for config in open_tables(store).topics.configs()} == {
            "SCHEDULE_TOPIC_XXXX": 18,
            "t": 3,
        }


def test_jobs_that_commit_at_the_same_time_wait_for_each_other(tmp_path: Path) -> None:
    apps = [f"app{i}" for i in range(4)]
    ready = threading.Barrier(len(apps))

    def run(app: str) -> None:
        options = options_of(tmp_path / "set", target="set")
        shards = stage(options, app, 0, [batch_of([app])])
        ready.wait(60)
        commit(options, Commit(app, 0, shards))

    with ThreadPoolExecutor(len(apps)) as pool:
        [*pool.map(run, apps)]

    assert sorted(set_bodies(tmp_path / "set")) == apps
    assert staged(tmp_path / "set") == []


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b'{"version": 2, "stores": {}}',
        b'{"version": true, "stores": {}}',
        b'{"version": 1, "stores": []}',
        b'{"version": 1, "stores": {"one": 5}}',
        # Read as never written, so that its rows came in twice.
        b'{"version": 1, "stores": {}, "recorded": {"a": "5"}}',
        b'{"version": 1, "stores": {}, "recorded": {"a": 5.0}}',
        b'{"version": 1, "stores": {}, "recorded": {"a": true}}',
        b'{"version": 1, "stores": {}, "recorded": {"a": -1}}',
        b'{"version": 1, "stores": {}, "recorded": {"a": null}}',
        # Tracebacks, the last ones inside of tasks.
        b'{"version": 1, "stores": {}, "more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"version": 1, "stores": {"\\ud800": "shards/a"}}',
        b'{"version": 1, "stores": {"one": "shards/\\ud800"}}',
        b'{"version": 1, "stores": {"one": "shards/\\u0000"}}',
        # Folders of others, which an overwrite took for its own.
        b'{"version": 1, "stores": {"one": "shards/.."}}',
        b'{"version": 1, "stores": {"one": "../other"}}',
        b'{"version": 1, "stores": {"one": "/srv/other"}}',
    ],
)
def test_invalid_manifest_is_reported_and_kept(content: bytes, tmp_path: Path) -> None:
    root = tmp_path / "set"
    options = options_of(root, target="set")
    shards = stage(options, "a", 5, [batch_of(TWO)])
    write(options, "a", 0, ONE)
    (root / "mqstore-set.json").write_bytes(content)
    before = sorted(root.glob("shards/*"))

    for attempt in (
        lambda: plan_target(options),
        lambda: commit(options, Commit("a", 5, shards)),
        lambda: commit(options, Commit("a", 5, shards, overwrite=True)),
        lambda: clean_target(root, 0),
        lambda: stores_of(SourceOptions.parse({"path": str(root)})),
    ):
        with pytest.raises(ConfigError, match=r"mqstore-set\.json.*(upgrade mqstore|from .*\.bak)"):
            attempt()

    assert (root / "mqstore-set.json").read_bytes() == content
    assert sorted(root.glob("shards/*")) == before


def test_overwriting_a_set_follows_no_links(tmp_path: Path) -> None:
    """The sink makes no links; one that it met among its stores it followed, and emptied what it led to."""
    root = tmp_path / "set"
    options = options_of(root, target="set")
    write(options, "a", 0, ONE)
    with MessageStore(tmp_path / "other") as store:
        store.put("t", b"theirs")
    (root / "shards" / "link").symlink_to(tmp_path / "other")
    known = manifest(root)
    known["stores"]["theirs"] = "shards/link"
    (root / "mqstore-set.json").write_text(json.dumps(known))
    assert sorted(set_bodies(root)) == sorted([*ONE, "theirs"])

    write(options, "a", 1, TWO, overwrite=True)

    assert sorted(set_bodies(root)) == TWO
    assert bodies(tmp_path / "other") == ["theirs"]
    assert (root / "shards" / "link").is_symlink()


def test_cleaning_a_set_keeps_a_store_that_somebody_has_put_deeper(tmp_path: Path) -> None:
    """It went by the last part of a path, and deleted the folder that the store lay in."""
    root = tmp_path / "set"
    write(options_of(root, target="set"), "a", 0, ONE)
    known = manifest(root)
    [(name, where)] = known["stores"].items()
    known["stores"][name] = "shards/old/kept"
    (root / "shards" / "old").mkdir()
    (root / where).rename(root / "shards" / "old" / "kept")
    (root / "mqstore-set.json").write_text(json.dumps(known))

    clean_target(root, 0)

    assert sorted(set_bodies(root)) == ONE


@pytest.mark.parametrize("commits", [1, 2])
def test_a_manifest_that_was_lost_is_not_taken_for_an_empty_one(commits: int, tmp_path: Path) -> None:
    """The next job wrote a manifest without the stores of the first ones, and cleaning would have deleted them. After
    the first commit there is no backup of it."""
    root = tmp_path / "set"
    options = options_of(root, target="set")
    for version in range(commits):
        write(options, "a", version, ONE)
    (root / "mqstore-set.json").unlink()
    if commits == 1:
        (root / "mqstore-set.json.bak").unlink()

    for attempt in (lambda: plan_target(options), lambda: commit(options, Commit("a", 1, []))):
        with pytest.raises(ConfigError, match=r"mqstore-set\.json is missing\. .* from .*\.bak.*shards"):
            attempt()
    assert not (root / "mqstore-set.json").exists()


# -- abort -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["store", "set", "inbox"])
def test_an_abort_takes_what_is_staged_and_never_what_counts(target: str, root: Path, tmp_path: Path) -> None:
    """Spark calls it after a commit that had succeeded and then raised."""
    where = root if target != "set" else tmp_path / "set"
    options = options_of(where, target=target)
    stage(options, "other", 0, [batch_of(TWO)])
    write(options, "a", 0, ONE)
    stage(options, "a", 0, [batch_of(ONE)], attempt=1)

    abort(options, "a", 0)
    abort(options, "never", 5)

    assert staged(where) == ["other-0"]
    if target == "inbox":
        assert os.listdir(where / "inbox") == ["a-0"]
    else:
        assert sorted(bodies(where) if target == "store" else set_bodies(where)) == ONE


@pytest.mark.parametrize(
    ("target", "name"),
    [("store", "."), ("set", "."), *(("inbox", name) for name in (".", "shard.json", "records.bin"))],
)
def test_a_commit_never_says_done_of_shards_that_somebody_deleted(
    target: str, name: str, root: Path, tmp_path: Path
) -> None:
    where = root if target != "set" else tmp_path / "set"
    options = options_of(where, target=target)
    shards = stage(options, "a", 0, [batch_of(ONE), batch_of(TWO)])
    path = transaction_folder(where, "a", 0) / shards[1].name / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()

    with pytest.raises(FormatError, match=shards[1].name):
        commit(options, Commit("a", 0, shards))

    assert not (where / "inbox").exists()
    write(options, "a", 0, TWO)
    if target == "inbox":
        MessageStore(where).close()
    assert sorted(bodies(where) if target != "set" else set_bodies(where)) == TWO


def test_an_abort_that_fails_does_not_hide_why_there_was_one(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    fs = FaultyFileSystem()
    stage(options_of(root), "a", 0, [batch_of(ONE)])
    fs.fail("unlink", errno.EIO, path_part=STAGING, times=None)

    abort(options_of(root), "a", 0, fs=fs)

    assert "cannot delete the staged files" in caplog.text


_EVERYTHING = [
    *("open", "create", "pread", "read_into", "pwrite", "fdatasync", "sync_directory", "allocate"),
    *("replace", "link", "unlink", "mkdir", "rmdir", "scandir", "stat", "exists", "truncate_sparse"),
]


@pytest.mark.parametrize(
    ("target", "overwrite"), [("store", False), ("store", True), ("set", False), ("set", True), ("inbox", False)]
)
def test_successful_job_is_not_reported_failed(target: str, overwrite: bool, root: Path, tmp_path: Path) -> None:
    """Whichever call fails, once. Who is told so runs the job again, and a job without a txnAppId then writes twice.
    FlushFailedError says that it is not known."""

    def found(where: Path) -> list[str]:
        if target == "set":
            return set_bodies(where)
        MessageStore(where).close()
        return bodies(where)

    source = root if target != "set" else tmp_path / "set"
    given = {"target": target, "queues": "1", "confirmOverwrite": "true"}
    write(options_of(source, target="set" if target == "set" else "store", queues="1"), "a", 0, ["before"])
    shards = stage(options_of(source, **given), "job-1", 0, [batch_of(ONE)])
    told = {True: 0, False: 0}
    for nth in range(1, 1000, STEP):
        where = tmp_path / f"at-{nth}"
        shutil.copytree(source, where)
        fs = FaultyFileSystem()
        fs.fail(_EVERYTHING, errno.EIO, nth=nth)
        wanted = Commit("job-1", 0, shards, remembered=False, overwrite=overwrite)
        said: MQStoreError | None = None
        try:
            commit(options_of(where, **given), wanted, fs=fs)
        except MQStoreError as error:
            said = error
        if isinstance(said, mqstore.errors.FlushFailedError):
            assert "check whether they are in" in str(said)
        else:
            assert (ONE[0] in found(where)) == (said is None), f"{nth}: {said}"
            told[said is None] += 1
        shutil.rmtree(where)
        if sum(call.operation in _EVERYTHING for call in fs.calls) < nth:
            break
    assert min(told.values()) > 0


# -- inbox -------------------------------------------------------------------------------------------------------------


def test_owner_takes_a_bundle_and_delivers_it(root: Path) -> None:
    clock = SimulatedClock(1_700_000_000_000)
    options = options_of(root, target="inbox", queues="1")
    with Broker(MessageStore(root, config=StoreConfig(clock=clock))) as broker:
        broker.put("other", b"mine")
        for _ in range(2):  # the second is a batch that Spark does again, not knowing that it was done
            shards = stage(options, "a", 0, [batch_of(ONE, delay_level=[1, None, None, None, None])], clock=clock)
            commit(options, Commit("a", 0, shards))
            broker.store.take_inbox()
        assert broker.topics.require("t").write_queues == 1
        clock.advance(2000)
        broker.run_once()
        broker.store.dispatch()
        found = [message.body.decode() for message in broker.store.iter("t", 0)]

    assert found == [*ONE[1:], ONE[0]]
    assert (os.listdir(root / "inbox"), staged(root)) == ([], [])


def test_bundle_taken_by_spark_gets_its_topics(root: Path) -> None:
    write(options_of(root, target="inbox", queues="6"), "a", 0, ONE)
    with pytest.raises(ConfigError, match=r"topic 't' was altered .* has 6 queues .*Run the job again"):
        write(options_of(root, queues="2"), "b", 0, TWO)
    write(options_of(root, queues="2"), "b", 0, TWO)

    assert sorted(bodies(root)) == [*ONE, *TWO]
    with ReadOnlyMessageStore(root) as store:
        assert open_tables(store).topics.require("t").write_queues == 6


def test_deleted_topic_returns_with_its_queues(root: Path) -> None:
    options = options_of(root, target="inbox", queues="2")
    with Broker(MessageStore(root, config=StoreConfig(clock=SimulatedClock(1)))) as broker:
        broker.topics.create("t", queues=8)
        shards = stage(options, "a", 0, [batch_of(ONE, queue_id=[7] * 5)])
        broker.topics.delete("t")
        commit(options, Commit("a", 0, shards))
        assert json.loads((root / "inbox" / "a-0" / "bundle.json").read_text())["highest"] == {"t": 7}
        broker.store.take_inbox()

        assert broker.topics.require("t").read_queues == 8
        assert broker.store.stats().inbox_refused == 0


def test_a_bundle_that_waits_is_not_handed_over_twice(root: Path) -> None:
    options = options_of(root, target="inbox")
    with MessageStore(root, config=StoreConfig(clock=SimulatedClock(1))):
        assert [write(options, "a", 0, ONE) is None for _ in range(2)] == [False, True]
        assert write(options, "b", 0) is not None

    assert (os.listdir(root / "inbox"), staged(root)) == (["a-0"], [])


@pytest.mark.parametrize("query", [True, False])
def test_refused_bundle_blocks_its_application(root: Path, query: bool) -> None:
    """A stream went on behind a batch that its owner had put aside: its rows were missing, and nobody was told."""
    options = options_of(root, target="inbox")

    def hand_over(app: str, version: int) -> None:
        shards = stage(options, app, version, [batch_of(ONE)])
        commit(options, Commit(app, version, shards, query=query))

    with MessageStore(root, config=StoreConfig(clock=SimulatedClock(1))) as owner:
        hand_over("a", 3)
        (root / "inbox" / "a-3" / "bundle.json").write_text("{")
        owner.take_inbox()

        with pytest.raises(
            ConfigError, match=r"refused/a-3 has version 3 of 'a'.*reason\.txt.*continue without its rows"
        ):
            hand_over("a", 4)
        hand_over("b", 4)
        with pytest.raises(ConfigError, match=r"refused/a-3 has version 3 of 'a'"):
            hand_over("a", 3)  # it is not said to be in
        shutil.rmtree(root / "inbox" / "refused" / "a-3")
        hand_over("a", 4)
        owner.take_inbox()
        assert (owner.spliced_version("a"), owner.spliced_version("b")) == (4, 4)


# -- power cuts --------------------------------------------------------------------------------------------------------


class RenamingInTwo(RecordingFileSystem):
    """A rename from folder to folder as a name that comes and one that goes, each durable with its own folder: only by
    a journal does the sync of either stand for both."""

    def replace(self, source: Any, target: Any) -> None:
        super().replace(source, target)
        kind, (gone, come) = self.events.pop()
        apart = gone[0] != come[0]
        self.events += [Event(kind, (come,)), Event(kind, (gone,))] if apart else [Event(kind, (gone, come))]


@dataclass(frozen=True)
class Jobs:
    """Two jobs, the second one an append or an overwrite."""

    target: str
    overwrite: bool

    @property
    def partitions(self) -> list[list[list[str]]]:
        """The partitions of each."""
        return [[ONE], [TWO] if self.overwrite else [ONE, TWO]]

    @property
    def states(self) -> list[list[str]]:
        """What is to be seen in turn, from the beginning until both are done."""
        states = [[], ONE, TWO if self.overwrite else sorted([*ONE, *ONE, *TWO])]
        if self.target == "store" and self.overwrite:  # the old messages go when the new ones are in
            states.insert(2, sorted([*ONE, *TWO]))
        return states

    def make(self, root: Path, clock: SimulatedClock) -> None:
        """Make the store that the jobs write to; they make a set by themselves."""
        if self.target != "set":
            MessageStore(root, config=replace(SMALL, clock=clock)).close()

    def options(self, root: Path) -> SinkOptions:
        given = {"confirmOverwrite": "true"} if self.overwrite else {}
        return options_of(root, target=self.target, queues="1", **given)

    def stage(self, root: Path, version: int, **how: Any) -> Commit:
        batches = [batch_of(rows) for rows in self.partitions[version]]
        shards = stage(self.options(root), "a", version, batches, **how)
        return Commit("a", version, shards, overwrite=self.overwrite and version == 1)

    def redo(self, root: Path) -> None:
        """Run both jobs once more, as a scheduler does that does not know how far they came."""
        for version in range(2):
            commit(self.options(root), self.stage(root, version))

    def seen(self, root: Path) -> list[str]:
        """What consumers get, or readers of a set; in any order."""
        if self.target == "set":
            return sorted(set_bodies(root))
        MessageStore(root).close()  # takes in what waits in the inbox
        if not bodies(root):  # looks at all of it, too
            return []
        with mqstore.open(root) as store:
            consumer = store.pull_consumer("g", start="earliest", auto_commit=False)
            consumer.assign(QueueRef("t", 0))
            return sorted(message.body.decode() for message in consumer.poll(max_messages=99, timeout=0))


@pytest.fixture(
    scope="module",
    params=[("set", False), ("set", True), ("store", False), ("store", True), ("inbox", False)],
    ids=["set", "set-overwrite", "store", "store-overwrite", "inbox"],
)
def jobs(request: pytest.FixtureRequest) -> Jobs:
    return Jobs(*request.param)


def test_kill_in_a_commit_leaves_all_or_none(jobs: Jobs, tmp_path: Path) -> None:
    clock = SimulatedClock(1_700_000_000_000)
    source = tmp_path / "source"
    jobs.make(source, clock)
    commit(jobs.options(source), jobs.stage(source, 0), clock=clock)
    second = jobs.stage(source, 1)
    outcomes: list[int] = []
    for nth, fs in deaths():
        image, left = tmp_path / f"killed-{nth}", tmp_path / f"left-{nth}"
        shutil.copytree(source, image)
        with contextlib.suppress(Crash):
            commit(jobs.options(image), second, fs=fs, clock=clock)
        shutil.copytree(image, left)  # to be looked at; a process that is gone holds no lock on it
        outcomes.append(jobs.states.index(jobs.seen(left)))
        again = tmp_path / f"again-{nth}"
        shutil.copytree(image, again)
        jobs.redo(again)
        clean_target(again, 0)
        assert jobs.seen(again) == jobs.states[-1], nth
        if jobs.target == "set":
            assert len(os.listdir(again / "shards")) == len(manifest(again)["stores"])
        for folder in (image, left, again):
            shutil.rmtree(folder)
    assert outcomes == sorted(outcomes)  # from some step on all of it: no later one takes it back
    assert {1, len(jobs.states) - 1} <= {*outcomes}


@dataclass(frozen=True)
class Recorded:
    """Both jobs on a file layer that remembers what was synced. Marks: jobs whose commit returned."""

    jobs: Jobs
    events: list[Event]
    begins: list[int]
    """Where in `events` the first job begins, and each commit."""


@pytest.fixture(scope="module")
def recorded(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    root = tmp_path_factory.mktemp("run")
    clock = SimulatedClock(1_700_000_000_000)
    jobs.make(root / "t", clock)
    fs = RenamingInTwo(root)
    found = Recorded(jobs, fs.events, [len(fs.events)])
    for version in range(2):
        job = jobs.stage(root / "t", version, fs=fs, clock=clock)
        found.begins.append(len(fs.events))
        commit(jobs.options(root / "t"), job, fs=fs, clock=clock)
        fs.mark(version + 1)
    fs.dispose()
    return found


def check_image(jobs: Jobs, image: Path, marks: Sequence[int]) -> None:
    """All or none of each job, those that had returned, and all of both once they are done again."""
    again = image.with_name("again")
    shutil.copytree(image, again)
    least = len(jobs.states) - 1 if 2 in marks else max(marks, default=0)
    try:
        assert jobs.seen(image / "t") in jobs.states[least:]
        jobs.redo(again / "t")
        assert jobs.seen(again / "t") == jobs.states[-1]
    finally:
        shutil.rmtree(image)
        shutil.rmtree(again)


@pytest.mark.parametrize("seed", range(0, 16, STEP))
def test_power_cut_leaves_all_or_none_of_a_batch(seed: int, recorded: Recorded, tmp_path: Path) -> None:
    """Unsynced pages in any order: a set names no store that is not whole on disk."""
    rng = random.Random(seed)
    begin = rng.choice(recorded.begins)
    cut = rng.randrange(begin, len(recorded.events)) + 1
    check_image(recorded.jobs, tmp_path / "image", build_image(recorded.events[:cut], rng, tmp_path / "image"))


def test_power_cut_keeps_reported_batches(recorded: Recorded, tmp_path: Path) -> None:
    """The harshest of images, each in which something more has become durable."""
    begin = recorded.begins[-1]
    steps = [
        at for at in range(begin, len(recorded.events)) if recorded.events[at].kind in ("sync", "sync_folder", "mark")
    ]
    for at in steps[::-STEP]:
        image = tmp_path / "image"
        check_image(recorded.jobs, image, build_image(recorded.events[: at + 1], random.Random(at), image, luck=0))
