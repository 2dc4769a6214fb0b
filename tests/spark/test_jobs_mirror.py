"""A mirror without Spark: batch after batch, each message once, whatever step it is stopped at."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mqstore import MessageStore
from mqstore.broker.parts import open_parts
from mqstore.errors import ConfigError, OffsetOutOfRangeError, StoreLockedError
from mqstore.files import jsonfile
from mqstore.files.lock import WriterLock
from mqstore.spark import publish
from mqstore.spark.jobs import mirror as module
from mqstore.spark.jobs.mirror import mirror, mirror_plan
from mqstore.spark.selection import select
from tests.spark.copies import joined, killed_once_recorded, members, messages, tree
from tests.spark.support import Odd, crashed_store, many, write_store
from tests.tools.brokers import broker


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write_store(tmp_path / "s", many(80))


def add(path: Path, *bodies: bytes, topic: str = "t") -> None:
    with MessageStore(path) as store:
        for body in bodies:
            store.put(topic, body)


def test_it_copies_what_is_there_and_later_what_came_since(store: Path, tmp_path: Path) -> None:
    first = mirror(None, store, tmp_path / "t", tmp_path / "cp")
    nothing = mirror(None, store, tmp_path / "t", tmp_path / "cp")
    add(store, b"new", b"newer")
    add(store, b"a new topic", topic="born-later")
    then = mirror(None, store, tmp_path / "t", tmp_path / "cp")

    assert messages(tmp_path / "t") == messages(store)
    assert (first.batches, first.messages, first.topics) == (1, 81, {"orders": 40, "seed": 1, "t": 40})
    assert (nothing.batches, nothing.messages, nothing.next_batch) == (0, 0, 1)
    assert (then.messages, then.topics) == (3, {"born-later": 1, "t": 2})
    assert first.id == then.id


@pytest.mark.parametrize("how", [{"max_messages": 7}, {"max_bytes": 900}])
def test_batches_are_as_large_as_they_may_be_and_keep_the_order(
    store: Path, tmp_path: Path, how: dict[str, int]
) -> None:
    done = mirror(None, store, tmp_path / "t", tmp_path / "cp", **how)  # type: ignore[arg-type]

    assert messages(tmp_path / "t") == messages(store)
    assert done.batches >= 10
    assert len([*(tmp_path / "cp" / "offsets").iterdir()]) <= 17


def test_it_goes_on_until_it_is_told_to_stop_and_waits_when_there_is_nothing(store: Path, tmp_path: Path) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        add(store, b"%d" % len(waits))

    mirror(
        None, store, tmp_path / "t", tmp_path / "cp", trigger="continuous", interval_s=0.25, wait=wait,
        stop=lambda: len(waits) >= 3,
    )  # fmt: skip

    assert waits == [0.25] * 3
    assert messages(tmp_path / "t") == messages(store)


def test_topics_are_renamed_and_marked_and_a_set_gets_a_store_a_batch(store: Path, tmp_path: Path) -> None:
    chosen = select(store, topics=["t", "orders"], where="n >= 0")

    done = mirror(None, chosen, tmp_path / "t", tmp_path / "cp", rename={"t": "x"}, tag=True, target="set")
    add(store, b"no property n")
    mirror(None, chosen, tmp_path / "t", tmp_path / "cp", rename={"t": "x"}, tag=True, target="set")

    found = joined(members(tmp_path / "t"))
    assert sorted(found) == [("orders", 0), ("orders", 1), ("x", 0), ("x", 1)]
    assert {dict(copy.properties)["REPLAY_ID"] for copies in found.values() for copy in copies} == {done.id}
    assert sum(map(len, found.values())) == 80


@pytest.mark.parametrize("topic", ["t", "%RETRY%g"])
def test_queues_that_a_topic_of_the_source_gets_later_are_copied(tmp_path: Path, topic: str) -> None:
    """The target's topic was made with two queues, so the first message in a third one stopped the mirror for good."""

    def put(queues: int) -> None:
        with MessageStore(tmp_path / "s") as source:
            topics = open_parts(source).topics
            if topics.get(topic) is None:
                topics.ensure(topic, queues)
            topics.alter(topic, read_queues=queues, write_queues=queues)
            for queue_id in range(queues):
                source.put(topic, b"%d" % queues, queue_id=queue_id)

    put(2)
    chosen = select(tmp_path / "s", topics=topic)
    mirror(None, chosen, tmp_path / "t", tmp_path / "cp", system=True)
    put(5)

    assert mirror_plan(chosen, tmp_path / "t", tmp_path / "cp", system=True).messages == 5
    assert mirror(None, chosen, tmp_path / "t", tmp_path / "cp", system=True).messages == 5

    assert messages(tmp_path / "t", system=True) == messages(tmp_path / "s", system=True)
    with MessageStore(tmp_path / "t", "r") as target:
        config = open_parts(target).topics.need(topic)
        assert (config.read_queues, config.write_queues) == (5, 5)
    with MessageStore(tmp_path / "s") as source:  # fewer in the source take none from the target
        open_parts(source).topics.alter(topic, read_queues=3, write_queues=3, force=True)
        source.put(topic, b"last", queue_id=0)
    assert mirror(None, chosen, tmp_path / "t", tmp_path / "cp", system=True).messages == 1
    with MessageStore(tmp_path / "t", "r") as target:
        assert open_parts(target).topics.need(topic).read_queues == 5


def test_the_owner_of_an_inbox_is_asked_to_give_a_topic_more_queues(tmp_path: Path) -> None:
    with MessageStore(tmp_path / "t") as target:
        open_parts(target).topics.create("t", queues=2)
    path = write_store(tmp_path / "s", [Odd(queue_id=4)])

    with pytest.raises(ConfigError, match=r"'t' has 2 queues, and the copies want 5: .* alter the topic"):
        mirror(None, select(path, topics="t"), tmp_path / "t", tmp_path / "cp", target="inbox")


def test_a_new_one_begins_where_the_options_say(store: Path, tmp_path: Path) -> None:
    chosen = select(store, topics="t", options={"startingOffsets": '{"t": {"0": 15, "1": 18}}'})

    done = mirror(None, chosen, tmp_path / "t", tmp_path / "cp")

    assert done.messages == 5 + 2
    add(store, b"more")
    assert mirror(None, chosen, tmp_path / "t", tmp_path / "cp").messages == 1


def test_where_a_new_one_would_begin_is_not_looked_at_once_it_has_begun(store: Path, tmp_path: Path) -> None:
    begun = select(store, topics="t", options={"startingOffsets": '{"t": {"0": 15, "1": 18}}'})
    mirror(None, begun, tmp_path / "t", tmp_path / "cp")
    add(store, b"more")

    # As if retention, or a group that was deleted, had made nonsense of what was said once.
    for options in ({"startingOffsets": '{"t": {"0": 999}}'}, {"startingGroup": "nosuch"}):
        chosen = select(store, topics="t", options=options)
        with pytest.raises((ConfigError, OffsetOutOfRangeError)):
            mirror(None, chosen, tmp_path / "t2", tmp_path / "cp2")
        add(store, b"and more")
        planned = mirror_plan(chosen, tmp_path / "t", tmp_path / "cp").messages
        assert mirror(None, chosen, tmp_path / "t", tmp_path / "cp").messages == planned > 0

    assert sum(map(len, messages(tmp_path / "t").values())) == 5 + 2 + 3


def test_a_plan_says_what_is_left_and_writes_nothing(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(tmp_path)
    assert mirror_plan(store, tmp_path / "t", tmp_path / "cp").messages == 81
    assert tree(tmp_path) == before
    with monkeypatch.context() as patch:
        patch.setattr(publish, "commit", lambda *args, **how: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(OSError, match="killed"):
            mirror(None, store, tmp_path / "t", tmp_path / "cp", max_messages=11)
    add(store, b"1", b"2")
    before = tree(tmp_path)

    undone = mirror_plan(store, tmp_path / "t", tmp_path / "cp").messages
    with pytest.raises(ConfigError, match="no checkpoint of a mirror"):
        mirror_plan(store, tmp_path / "u", tmp_path / "s")
    with pytest.raises(ConfigError, match="the checkpoint of a mirror with target 'store'"):
        mirror_plan(store, tmp_path / "t", tmp_path / "cp", target="set")
    assert tree(tmp_path) == before
    mirror(None, store, tmp_path / "t", tmp_path / "cp")

    assert undone == 83
    assert mirror_plan(store, tmp_path / "t", tmp_path / "cp").to_dict()["messages"] == 0


# -- crashes -----------------------------------------------------------------------------------------------------------

STEPS = ["before the offsets", "before the commit", "after the commit", "before the note"]


@pytest.mark.parametrize("step", STEPS)
def test_a_crash_at_any_step_and_more_messages_meanwhile_give_each_once(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def killed(*args: Any, **how: Any) -> Any:
        raise OSError("killed")

    real_commit, real_save = publish.commit, jsonfile.save_json

    def commit_and_die(*args: Any, **how: Any) -> Any:
        real_commit(*args, **how)
        raise OSError("killed")

    def save(path: Path, value: dict[str, Any], *args: Any) -> None:
        if path.parent.name == "offsets":
            raise OSError("killed")
        real_save(path, value, *args)

    mirror(None, store, tmp_path / "t", tmp_path / "cp")
    add(store, b"1", b"2")
    with monkeypatch.context() as patch:
        if step == "before the offsets":
            patch.setattr(module, "save_json", save)
        elif step == "before the commit":
            patch.setattr(publish, "commit", killed)
        elif step == "after the commit":
            patch.setattr(publish, "commit", commit_and_die)
        else:
            patch.setattr(module._Checkpoint, "done", killed)
        with pytest.raises(OSError, match="killed"):
            mirror(None, store, tmp_path / "t", tmp_path / "cp")
    add(store, b"3")

    mirror(None, store, tmp_path / "t", tmp_path / "cp")

    assert messages(tmp_path / "t") == messages(store)


def test_a_batch_that_was_recorded_when_the_run_was_killed_is_seen_after_the_next(store: Path, tmp_path: Path) -> None:
    """There may be nothing more to copy for long: then nobody else opens the target."""
    with killed_once_recorded(tmp_path / "t"):
        mirror(None, store, tmp_path / "t", tmp_path / "cp")
    (tmp_path / "cp" / "commits" / "0").unlink()

    assert mirror(None, store, tmp_path / "t", tmp_path / "cp").messages == 0

    assert messages(tmp_path / "t") == messages(store)


def test_a_batch_is_done_again_with_the_bounds_that_were_written_down(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(publish, "commit", lambda *args, **how: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(OSError, match="killed"):
            mirror(None, store, tmp_path / "t", tmp_path / "cp")
    add(store, b"later")

    done = mirror(None, store, tmp_path / "t", tmp_path / "cp", max_messages=1)

    assert (done.batches, done.messages) == (2, 82)


def test_a_source_whose_queues_are_lost_or_behind_its_log_is_refused(store: Path, tmp_path: Path) -> None:
    source = crashed_store(tmp_path / "crashed", 10, 6)
    with pytest.raises(ConfigError, match="a crash left messages"):
        mirror(None, source, tmp_path / "t", tmp_path / "c")
    shutil.rmtree(store / "consumequeue")
    with pytest.raises(ConfigError, match="has records, and no consume queues"):
        mirror(None, store, tmp_path / "t", tmp_path / "c")
    assert not (tmp_path / "t").exists()
    assert not (tmp_path / "c").exists()


def test_what_was_deleted_does_not_rise_in_a_mirror(tmp_path: Path) -> None:
    with broker(tmp_path / "s") as running:
        for topic in ("gone", "kept"):
            running.topics.create(topic, queues=1)
            running.put(topic, b"old")
        running.topics.delete("gone")
    assert mirror_plan(tmp_path / "s", tmp_path / "t", tmp_path / "c").messages == 1

    assert mirror(None, tmp_path / "s", tmp_path / "t", tmp_path / "c").topics == {"kept": 1}
    with broker(tmp_path / "s") as running:
        running.put("kept", b"soon gone")
        running.topics.delete("kept")
    assert mirror_plan(tmp_path / "s", tmp_path / "t", tmp_path / "c").messages == 0
    assert mirror(None, tmp_path / "s", tmp_path / "t", tmp_path / "c").topics == {}

    assert [copy.body for copies in messages(tmp_path / "t").values() for copy in copies] == [b"old"]


def test_lost_messages_stop_it_unless_that_is_allowed(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", [Odd(body=b"x" * 900, queue_id=0) for _ in range(60)])
    mirror(None, select(path, topics="t"), tmp_path / "t", tmp_path / "cp")
    position = json.loads((tmp_path / "cp" / "offsets" / "0").read_text())
    text = json.dumps(position).replace("60", "90")  # as if the source had been restored from an older copy
    (tmp_path / "cp" / "offsets" / "0").write_text(text)

    with pytest.raises(OffsetOutOfRangeError, match="90"):
        mirror(None, select(path, topics="t"), tmp_path / "t", tmp_path / "cp")
    lax = select(path, topics="t", options={"failOnDataLoss": "false"})
    assert mirror(None, lax, tmp_path / "t", tmp_path / "cp").messages == 0


@pytest.mark.parametrize("target", ["store", "set"])
def test_a_target_that_lost_what_was_written_to_it_stops_the_mirror(store: Path, tmp_path: Path, target: str) -> None:
    """It was restored from a backup: the mirror went on behind what the backup lacks, and told nobody of the hole."""
    mirror(None, store, tmp_path / "t", tmp_path / "cp", target=target)
    shutil.copytree(tmp_path / "t", tmp_path / "backup")
    add(store, b"1", b"2")
    mirror(None, store, tmp_path / "t", tmp_path / "cp", target=target)
    (tmp_path / "t").rename(tmp_path / "later")
    (tmp_path / "backup").rename(tmp_path / "t")
    add(store, b"3")
    before = tree(tmp_path)

    for job in (mirror_plan, partial(mirror, None)):
        with pytest.raises(ConfigError, match=r"t lacks batch 1 of this mirror.*restored or replaced"):
            job(store, tmp_path / "t", tmp_path / "cp", target=target)  # type: ignore[operator]
    assert {*tree(tmp_path)} == {*before}

    shutil.rmtree(tmp_path / "t")
    with pytest.raises(ConfigError, match="t lacks batch 1 of this mirror"):
        mirror(None, store, tmp_path / "t", tmp_path / "cp", target=target)
    (tmp_path / "later").rename(tmp_path / "t")
    assert mirror(None, store, tmp_path / "t", tmp_path / "cp", target=target).messages == 1


@pytest.mark.parametrize("target", ["store", "set", "inbox"])
@pytest.mark.parametrize("batches", [1, 3])
def test_a_checkpoint_that_was_put_back_from_a_copy_stops_the_mirror(
    store: Path, tmp_path: Path, target: str, batches: int
) -> None:
    """It decided a batch under a number that the target had: what was new in it was taken for copied, and is in no
    target."""
    if target == "inbox":
        MessageStore(tmp_path / "t").close()
    mirror(None, store, tmp_path / "t", tmp_path / "cp", target=target)
    shutil.copytree(tmp_path / "cp", tmp_path / "copy")
    for number in range(batches):
        add(store, b"%d" % number)
        mirror(None, store, tmp_path / "t", tmp_path / "cp", target=target)
    shutil.rmtree(tmp_path / "cp")
    (tmp_path / "copy").rename(tmp_path / "cp")
    add(store, b"new")
    before = tree(tmp_path)

    for job in (mirror_plan, partial(mirror, None)):
        with pytest.raises(ConfigError, match=r"t has batch 1 of this mirror, of which .*cp knows nothing.*put back"):
            job(store, tmp_path / "t", tmp_path / "cp", target=target)  # type: ignore[operator]
    assert {*tree(tmp_path)} == {*before}


def test_a_batch_without_a_message_is_none_that_a_target_must_have(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", [Odd(queue_id=0)])
    only_few = select(path, topics="t", where="n = '1'")

    for number in range(3):
        done = mirror(None, only_few, tmp_path / "t", tmp_path / "cp")
        assert (done.batches, done.messages, done.next_batch) == (1, 0, number + 1)
        add(path, b"no property n")

    assert mirror(None, select(path, topics="t"), tmp_path / "t", tmp_path / "cp").messages == 1
    assert mirror(None, only_few, tmp_path / "t", tmp_path / "cp").batches == 0


def test_a_checkpoint_of_an_earlier_version_goes_on(store: Path, tmp_path: Path) -> None:
    """It has not noted which batches had messages."""
    mirror(None, store, tmp_path / "t", tmp_path / "cp")
    (tmp_path / "cp" / "commits" / "0").write_text("{}")
    add(store, b"new")

    assert mirror(None, store, tmp_path / "t", tmp_path / "cp").messages == 1

    shutil.rmtree(tmp_path / "t")
    with pytest.raises(ConfigError, match="t lacks batch 1 of this mirror"):
        mirror(None, store, tmp_path / "t", tmp_path / "cp")


# -- wrong use ---------------------------------------------------------------------------------------------------------


def test_a_checkpoint_belongs_to_one_mirror(store: Path, tmp_path: Path) -> None:
    mirror(None, store, tmp_path / "t", tmp_path / "cp")
    before = tree(tmp_path / "cp")

    with pytest.raises(ConfigError, match="the checkpoint of a mirror with dest"):
        mirror(None, store, tmp_path / "other", tmp_path / "cp")
    with pytest.raises(ConfigError, match="the checkpoint of a mirror with target 'store'"):
        mirror(None, store, tmp_path / "t", tmp_path / "cp", target="inbox")
    with pytest.raises(ConfigError, match="no checkpoint of a mirror"):
        mirror(None, store, tmp_path / "u", store)
    lock = WriterLock(tmp_path / "cp", "test")
    lock.acquire()
    with pytest.raises(StoreLockedError):
        mirror(None, store, tmp_path / "t", tmp_path / "cp")
    lock.release()
    assert {*tree(tmp_path / "cp")} == {*before}


@pytest.mark.parametrize(
    ("name", "texts", "remedy"),
    [
        ("metadata.json", ("", "[]", "3", "{}", "[" * 200_000), "or begin anew"),
        ("offsets/0", ("", "[]", "3", "{}", '{"start": {}, "end": 5}', '{"end": {}}', "[" * 200_000), "or begin anew"),
        ("commits/0", ("", "[]", "3", '{"written": "x"}', '{"written": -1}', "[" * 200_000), "delete this file"),
    ],
)
def test_a_damaged_checkpoint_is_told_with_its_file_and_the_way_out(
    store: Path, tmp_path: Path, name: str, texts: tuple[str, ...], remedy: str
) -> None:
    """What was JSON, and no object with the right members, ended in `please report it`, or said nothing but `end`."""
    mirror(None, store, tmp_path / "t", tmp_path / "cp")
    file = tmp_path / "cp" / name
    sound = file.read_bytes()
    for text in texts:
        file.write_text(text)
        for job in (mirror_plan, partial(mirror, None)):
            with pytest.raises(ConfigError, match=rf"cp/{name}, of the checkpoint, is damaged \(.*\): .*{remedy}"):
                job(store, tmp_path / "t", tmp_path / "cp")  # type: ignore[operator]

    file.write_bytes(sound)
    assert mirror(None, store, tmp_path / "t", tmp_path / "cp").batches == 0


@pytest.mark.parametrize("member", ["id", "initial"])
def test_a_checkpoint_that_lacks_a_member_is_told_with_its_file(store: Path, tmp_path: Path, member: str) -> None:
    mirror(None, store, tmp_path / "t", tmp_path / "cp")
    file = tmp_path / "cp" / "metadata.json"
    metadata = json.loads(file.read_text())
    for wrong in (None, 3, []):
        file.write_text(json.dumps({**metadata, member: wrong}))
        with pytest.raises(ConfigError, match=r"cp/metadata\.json, of the checkpoint, is damaged \(.*or begin anew"):
            mirror(None, store, tmp_path / "t", tmp_path / "cp")


def test_a_batch_whose_damaged_commit_was_deleted_is_not_copied_twice(store: Path, tmp_path: Path) -> None:
    """As the error of a damaged one advises."""
    mirror(None, store, tmp_path / "t", tmp_path / "cp")
    (tmp_path / "cp" / "commits" / "0").unlink()

    assert mirror(None, store, tmp_path / "t", tmp_path / "cp").messages == 0
    assert messages(tmp_path / "t") == messages(store)


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("s/cp", "checkpoint .*s/cp and source .*s lie in one another"),
        ("link/cp", "checkpoint .*link/cp and source .*s lie in one another"),
        ("t/cp", "checkpoint .*t/cp and target .*t lie in one another"),
        ("t", "checkpoint .*t and target .*t lie in one another"),
        ("new/..", "is no checkpoint of a mirror"),
    ],
)
@pytest.mark.parametrize("target", ["store", "set"])
def test_a_checkpoint_lies_in_no_store_and_no_store_in_it(
    store: Path, tmp_path: Path, place: str, says: str, target: str
) -> None:
    (tmp_path / "link").symlink_to(store)
    before = tree(tmp_path)

    for job in (mirror_plan, partial(mirror, None)):
        with pytest.raises(ConfigError, match=says):
            job(store, tmp_path / "t", tmp_path / place, target=target)  # type: ignore[operator]

    assert tree(tmp_path) == before


def test_a_checkpoint_that_an_earlier_version_put_into_the_target_goes_on(store: Path, tmp_path: Path) -> None:
    mirror(None, store, tmp_path / "t", tmp_path / "cp")
    (tmp_path / "cp").rename(tmp_path / "t" / "cp")
    add(store, b"new")

    assert mirror(None, store, tmp_path / "t", tmp_path / "t" / "cp").messages == 1


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"trigger": "once"}, "trigger='once'"),
        ({"max_messages": 1, "max_bytes": 1}, "exclude"),
        ({"max_messages": 0}, "from 1"),
        ({"interval_s": float("nan")}, "interval_s=nan is not a number of seconds"),
        ({"interval_s": -1}, "interval_s=-1 is not"),
        ({"interval_s": float("inf"), "trigger": "continuous"}, "interval_s=inf is not"),
        ({"queues": 0}, "queues=0"),
        ({"rename": {"t": "%DLQ%x"}}, "belongs to a group"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_written(
    store: Path, tmp_path: Path, how: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        mirror(None, store, tmp_path / "t", tmp_path / "cp", **how)

    assert not (tmp_path / "t").exists()
    assert not (tmp_path / "cp").exists()


@pytest.mark.parametrize(
    "how", [{"start": 3}, {"options": {"endingOffsets": "earliest"}}, {"options": {"endingTimestamp": "2020-01-01"}}]
)
def test_bounds_are_refused(store: Path, tmp_path: Path, how: dict[str, Any]) -> None:
    """An end that was given as an option of the source was passed over, and all was copied."""
    with pytest.raises(ConfigError, match="a mirror has no bounds"):
        mirror(None, select(store, **how), tmp_path / "t", tmp_path / "cp")

    assert not (tmp_path / "cp").exists()
