"""Queues and index built from the log in ranges: what was there, what the engine would build, and never less."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mqstore import MessageStore
from mqstore.errors import ConfigError, StoreLockedError
from mqstore.files.filesystem import FileSystem
from mqstore.log.recovery import RecoverOptions
from mqstore.log.repair import recover_store
from mqstore.spark.jobs import rebuild as job
from mqstore.spark.jobs.rebuild import plan_rebuild, rebuild
from tests.conftest import GOLDEN_NAMES, GoldenStore
from tests.log.support import files, flip
from tests.spark.support import Odd, many, odd_records, write_store
from tests.spark.test_verify_job import damage, damages, with_a_stale_record_in_a_blank, with_an_image_inside

Golden = Callable[[str], GoldenStore]


def below(path: Path, folder: str) -> dict[str, bytes]:
    return files(path / folder) if (path / folder).exists() else {}


def contents(path: Path) -> list[bytes]:
    """Of the index files, in their order; their names are times."""
    return [data for _, data in sorted(below(path, "index").items())]


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_queues_of_a_java_store_are_built_byte_for_byte_as_the_java_engine_built_them(
    golden: Golden, name: str, tmp_path: Path
) -> None:
    path = golden(name).path
    before = files(path)

    rebuild(None, path, dest=tmp_path / "new")

    assert below(tmp_path / "new", "consumequeue") == below(path, "consumequeue")
    assert files(path) == before
    assert sorted(os.listdir(tmp_path / "new")) == ["consumequeue", "index"]


# -- as the engine would -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def masters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("masters")
    records = many(160)
    records[20:20] = [
        Odd(body=b"half", sys_flag=4),
        Odd(topic="SCHEDULE_TOPIC_XXXX", queue_id=2, properties=b"DELAY\x013\x02"),
        Odd(body=b"rolled back", sys_flag=12),
    ]
    return [write_store(root / profile, records, profile, segment_bytes=6_000) for profile in ("mqstore", "rocketmq")]


def built(path: Path, range_bytes: int = 1 << 26) -> tuple[dict[str, bytes], list[bytes]]:
    """Queues and index that `rebuild` makes in place."""
    rebuild(None, path, range_bytes=range_bytes)
    assert not (path / "rebuild").exists()
    return below(path, "consumequeue"), contents(path)


def recovered(path: Path) -> tuple[dict[str, bytes], list[bytes]]:
    """Queues and index as `mqstore recover` leaves them, without the nonsense that it leaves behind a queue's end."""
    recover_store(path, RecoverOptions(rebuild_index=True))
    found = below(path, "consumequeue")
    for name, data in found.items():
        used = [i for i, (_, size, _) in enumerate(struct.iter_unpack(">qiq", data)) if size > 0]
        end = (used[-1] + 1) * 20 if used else 0
        found[name] = data[:end] + bytes(len(data) - end)
    return found, contents(path)


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@example(which=0, changes=[(0, 0.0, 0.0, "remove"), (2618, 0.0, 0.0, "flip")], range_bytes=300)
@given(which=st.integers(0, 1), changes=damages(), range_bytes=st.integers(300, 9_000))
def test_whatever_is_damaged_rebuilding_makes_what_recovery_makes(
    masters: list[Path],
    tmp_path_factory: pytest.TempPathFactory,
    which: int,
    changes: list[tuple[int, float, float, str]],
    range_bytes: int,
) -> None:
    mine, theirs = (tmp_path_factory.mktemp("damaged") / name for name in ("mine", "theirs"))
    for path in (mine, theirs):
        shutil.copytree(masters[which], path)
        damage(path, changes)
    log = below(mine, "commitlog")

    assert built(mine, range_bytes) == recovered(theirs)

    assert below(mine, "commitlog") == log
    for path in (mine, theirs):
        shutil.rmtree(path)


# -- what was there ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["clean", "rolled"])
def test_without_its_queues_a_java_store_gets_them_back_byte_for_byte(golden: Golden, name: str) -> None:
    path = golden(name).path
    before = files(path)
    for queue in sorted((path / "consumequeue").glob("*/*"))[1:]:  # one has to stay: its files tell how long they are
        shutil.rmtree(queue)

    report = rebuild(None, path, what=["queues"], range_bytes=10_000)

    assert report.changed
    after = files(path)
    del after["lock"], before["lock"]
    assert after == before


@pytest.mark.parametrize("profile", ["mqstore", "rocketmq"])
@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(records=st.lists(odd_records(), max_size=40), range_bytes=st.integers(200, 9_000))
def test_random_stores_are_built_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory, profile: str, records: list[Odd], range_bytes: int
) -> None:
    path = write_store(tmp_path_factory.mktemp("random") / "s", records, profile, segment_bytes=3_000)
    before = below(path, "consumequeue"), contents(path)
    shutil.rmtree(path / "consumequeue")
    shutil.rmtree(path / "index", ignore_errors=True)

    assert built(path, range_bytes) == before

    shutil.rmtree(path)


def test_a_store_in_order_is_not_touched(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(200), segment_bytes=6_000)
    before = files(path)

    report = rebuild(None, path, range_bytes=1_000)

    assert (report.changed, report.stores[0].messages, report.stores[0].index_entries) == (False, 201, 200)
    after = files(path)
    del after["lock"], before["lock"]
    assert after == before
    assert {(q.topic, q.queue_id, q.new_min, q.new_max, q.changed, q.way) for q in report.queues} == {
        *((topic, queue, 0, 50, 0, "slots") for topic in ("t", "orders") for queue in (0, 1)),
        ("seed", 0, 0, 1, 0, "slots"),
    }


def trimmed(path: Path) -> Path:
    """A store whose first segments retention took: the queue files begin before the first record there is."""
    write_store(path, many(300), segment_bytes=6_000)
    with MessageStore(path) as store:
        store.drop_before(store._run.starts[3])
        assert store.min_offset
    return path


def test_after_retention_the_numbers_of_queues_go_on_where_they_were(tmp_path: Path) -> None:
    path = trimmed(tmp_path / "s")
    with MessageStore(path, "r") as store:
        bounds = {ref: store.offsets(*ref) for topic in store.topics() for ref in store.queues(topic)}
        assert bounds["seed", 0] == (1, 1)  # no record of it is left
    queues = below(path, "consumequeue")
    (path / "consumequeue" / "t" / "0" / f"{64 * 20:020d}").unlink()

    report = rebuild(None, path, range_bytes=900)

    assert below(path, "consumequeue") == queues
    assert {(q.topic, q.queue_id): (q.new_min, q.new_max) for q in report.queues} == bounds
    assert [q.void for q in report.queues] == [0] * 5
    with MessageStore(path) as store:
        assert store.recovery.scanned_from is None
        assert store.put("seed", b"again").offset == 1


def test_after_retention_a_lost_queue_begins_with_void_units_as_the_engine_makes_them(tmp_path: Path) -> None:
    mine, theirs = (trimmed(tmp_path / name) for name in ("mine", "theirs"))
    for path in (mine, theirs):
        shutil.rmtree(path / "consumequeue" / "t")

    assert built(mine)[0] == recovered(theirs)[0]

    with MessageStore(mine, "r") as store:
        low, high = store.offsets("t", 0)
        assert 0 < low < high == 75
        assert store.read("t", 0, low)[0].offset == low


def test_units_before_the_log_that_point_into_it_become_void_as_recovery_makes_them(tmp_path: Path) -> None:
    mine, theirs, apart = (tmp_path / name for name in ("mine", "theirs", "apart"))
    for path in (mine, theirs, apart):
        write_store(path, [Odd(body=b"%d" % i) for i in range(300)], segment_bytes=6_000)
        for segment in sorted((path / "commitlog").iterdir())[:4]:
            segment.unlink()
        with MessageStore(path, "r") as store:
            assert store.offsets("t", 0)[0] >= 128, "both files lie before the log"
        queue = path / "consumequeue" / "t" / "0"
        for name, slot in ((0, 3), (0, 4), (0, 63), (64, 5)):
            file = queue / f"{name * 20:020d}"
            data = bytearray(file.read_bytes())
            data[slot * 20 : slot * 20 + 8] = (1 << 40).to_bytes(8, "big")
            file.write_bytes(data)

    assert built(mine)[0] == recovered(theirs)[0]
    report = rebuild(None, apart, dest=tmp_path / "dest")

    assert below(tmp_path / "dest", "consumequeue") == below(mine, "consumequeue")
    assert [(q.changed, q.void) for q in report.queues if q.topic == "t"] == [(4, 0)]


def test_messages_lost_to_damage_keep_their_queue_offsets(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(60))
    with MessageStore(path, "r") as store:
        messages = [*store.iter("orders", 0)]
        places = [message.physical_offset for message in messages]
    for place in (places[0], places[5], places[-1]):
        flip(path / "commitlog" / f"{0:020d}", place + 100)
    shutil.rmtree(path / "consumequeue" / "t")

    report = rebuild(None, path, what=["queues"])

    [queue] = [each for each in report.queues if (each.topic, each.queue_id) == ("orders", 0)]
    assert (queue.new_min, queue.new_max, queue.void, queue.way) == (1, len(places), 3, "order")
    assert report.stores[0].bad_stretches == 3
    with MessageStore(path, "r") as store:
        assert [m.body for m in store.iter("orders", 0)] == [m.body for m in messages[1:5] + messages[6:-1]]
        assert {finding.kind for finding in store.verify()} <= {"bad_record", "bad_index"}


@pytest.mark.parametrize("topic", ["t", "never"])
def test_a_record_image_inside_a_body_gets_no_unit(tmp_path: Path, topic: str) -> None:
    """A task that began there wrote the image's unit over that of the queue's first message."""
    path = with_an_image_inside(tmp_path / "s", topic)
    before = below(path, "consumequeue")

    for size in (300, 700, 1_100, 1_600):
        rebuild(None, path, dest=tmp_path / str(size), range_bytes=size)
        assert below(tmp_path / str(size), "consumequeue") == before


def test_a_stale_record_in_a_blank_gets_no_unit(tmp_path: Path) -> None:
    """It has a queue offset that another message has by right, and a task whose range lies in the BLANK finds it."""
    path = with_a_stale_record_in_a_blank(tmp_path / "s")
    before = below(path, "consumequeue")

    rebuild(None, path, dest=tmp_path / "new", range_bytes=500)

    assert below(tmp_path / "new", "consumequeue") == before


def test_new_files_have_the_mode_of_the_old_ones(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(20))
    (path / "commitlog").chmod(0o750)
    shutil.rmtree(path / "consumequeue" / "t")
    shutil.rmtree(path / "index")

    rebuild(None, path)

    file = path / "consumequeue" / "t" / "0" / f"{0:020d}"
    modes = [each.stat().st_mode & 0o777 for each in (file, file.parent, path / "index", *(path / "index").iterdir())]
    assert modes == [0o640, 0o750, 0o750, 0o640]


def test_delayed_messages_keep_the_times_of_another_table_of_delays(tmp_path: Path) -> None:
    delayed = [Odd(topic="SCHEDULE_TOPIC_XXXX", queue_id=2, properties=b"DELAY\x013\x02") for _ in range(5)]
    path = write_store(tmp_path / "s", delayed)
    file = path / "consumequeue" / "SCHEDULE_TOPIC_XXXX" / "2" / f"{0:020d}"
    data = bytearray(file.read_bytes())
    [deliver] = struct.unpack_from(">q", data, 12)
    struct.pack_into(">q", data, 12, deliver + 60_000)
    struct.pack_into(">q", data, 32, deliver + 1)  # no table has that
    file.write_bytes(data)

    report = rebuild(None, path)

    times = [time for _, _, time in struct.iter_unpack(">qiq", file.read_bytes()[:100])]
    assert times == [deliver + 60_000, *[deliver] * 4]
    assert [q.changed for q in report.queues if q.queue_id == 2] == [1]


def test_a_full_index_file_is_followed_by_another_and_the_checkpoint_says_when_it_ended(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(200), "rocketmq")
    before = contents(path)
    assert len(before) == 4
    flip(sorted((path / "index").iterdir())[1], 700)
    checkpoint = (path / "checkpoint").read_bytes()
    (path / "checkpoint").write_bytes(checkpoint[:16] + bytes(8) + checkpoint[24:64] + bytes(64) + checkpoint[128:])

    report = rebuild(None, path, range_bytes=2_000)

    assert report.stores[0].index_changed
    assert contents(path) == before
    after = (path / "checkpoint").read_bytes()
    assert struct.unpack_from(">q", after, 16) == struct.unpack_from(">q", before[2], 8)
    assert after[:16] + after[24:] == checkpoint[:16] + checkpoint[24:64] + bytes(64) + checkpoint[128:]


# -- the swap ----------------------------------------------------------------------------------------------------------


class Killed(Exception):  # noqa: N818  (it is no error)
    pass


class Dying(FileSystem):
    """Files of a process that is killed before its n-th change."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def _change(self) -> None:
        if not self.left:
            raise Killed
        self.left -= 1

    def pwrite(self, fd: int, data: Any, position: int) -> None:
        self._change()
        super().pwrite(fd, data, position)

    def replace(self, source: Any, target: Any) -> None:
        self._change()
        super().replace(source, target)

    def unlink(self, path: Any, *, missing_ok: bool = False) -> None:
        self._change()
        super().unlink(path, missing_ok=missing_ok)

    def mkdir(self, path: Any, mode: int = 0o700, *, exist_ok: bool = False) -> None:
        self._change()
        super().mkdir(path, mode, exist_ok=exist_ok)


@pytest.mark.parametrize("profile", ["mqstore", "rocketmq"])
def test_a_crash_at_any_step_of_the_swap_leaves_what_the_next_opening_mends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str
) -> None:
    good = write_store(tmp_path / "good", many(50), profile)
    with MessageStore(good, "r") as store:
        bodies = {ref: [m.body for m in store.iter(*ref)] for topic in store.topics() for ref in store.queues(topic)}
    queues = below(good, "consumequeue")
    log = below(good, "commitlog")
    publish = job._publish
    step = 0
    while True:
        path = tmp_path / str(step)
        shutil.copytree(good, path)
        shutil.rmtree(path / "consumequeue" / "t")
        flip(path / "consumequeue" / "orders" / "0" / f"{0:020d}", 100)
        flip(sorted((path / "index").iterdir())[0], 400)
        monkeypatch.setattr(job, "_publish", partial(publish, fs=Dying(step)))
        try:
            rebuild(None, path)
        except Killed:
            if not step:  # nothing was changed yet
                assert (path / "checkpoint").read_bytes() == (good / "checkpoint").read_bytes()
                assert below(path, "consumequeue").keys() < queues.keys()
                step += 1
                shutil.rmtree(path)
                continue
            with MessageStore(path) as store:
                assert not store.recovery.findings
                assert {ref: [m.body for m in store.iter(*ref)] for ref in bodies} == bodies
                assert store.find("orders", key="k1")
                assert {finding.kind for finding in store.verify()} == set()
            assert below(path, "commitlog") == log
            assert below(path, "consumequeue") == queues
            step += 1
            shutil.rmtree(path)
            continue
        break
    assert step > 10
    assert below(path, "consumequeue") == queues
    assert contents(path) == contents(good)
    assert (path / "checkpoint").read_bytes() == (good / "checkpoint").read_bytes()
    assert not (path / "abort").exists()


def test_what_a_killed_one_left_is_cleared_away(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(20))
    (path / "rebuild" / "old" / "consumequeue").mkdir(parents=True)

    with MessageStore(path) as store:
        assert store.recovery.scanned_from is None
    rebuild(None, path)

    assert not (path / "rebuild").exists()


def test_a_store_with_a_writer_is_refused_by_its_process_and_none_is_changed(tmp_path: Path) -> None:
    paths = [write_store(tmp_path / name, many(20)) for name in "ab"]
    shutil.rmtree(paths[0] / "consumequeue")
    with MessageStore(paths[1]):
        for attempt in (rebuild, lambda spark, stores: plan_rebuild(stores)):
            with pytest.raises(StoreLockedError, match=f"process {os.getpid()}"):
                attempt(None, paths)
    assert not (paths[0] / "consumequeue").exists()
    assert sorted(os.listdir(paths[0])) == sorted({*os.listdir(paths[1]), "lock"} - {"consumequeue"})
    MessageStore(paths[0]).close()  # its lock was given back


def test_a_writer_waits_until_the_store_is_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_store(tmp_path / "s", many(20))
    publish = job._publish

    def look(joined: Any) -> Any:
        with pytest.raises(StoreLockedError):
            MessageStore(path)
        return publish(joined)

    monkeypatch.setattr(job, "_publish", look)
    rebuild(None, path)
    MessageStore(path).close()


def test_an_unclean_store_is_rebuilt_and_recovers_as_it_would_have(masters: list[Path], tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for path in (mine, theirs):
        shutil.copytree(masters[0], path)
        (path / "abort").write_bytes(b"1")
        with MessageStore(masters[0], "r") as store:
            end = store._checkpoint.current.flushed
        assert end is not None
        flip(path / "commitlog" / f"{end - end % 6_000:020d}", end % 6_000 - 20)  # the last record is torn
        shutil.rmtree(path / "consumequeue" / "orders")

    rebuild(None, mine)
    assert (mine / "abort").read_bytes() == b"1"

    for path in (mine, theirs):
        with MessageStore(path) as store:
            assert [finding.kind for finding in store.recovery.findings] == ["lost_tail"]
    assert recovered(mine) == recovered(theirs)


def test_half_of_what_a_spark_job_wrote_gets_into_no_queue(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(20))
    intent = {"app": "a", "version": 1, "start": 1 << 14, "stamp_ms": 1, "queues": {}}
    (path / "config" / "spark").mkdir(parents=True)
    (path / "config" / "spark" / "txn.json").write_text(json.dumps({"version": 1, "apps": {}, "intent": intent}))
    before = files(path)

    with pytest.raises(ConfigError, match="open the store once"):
        rebuild(None, path)

    assert files(path) == before


def test_an_empty_store_has_nothing_to_build(tmp_path: Path) -> None:
    MessageStore(tmp_path / "s").close()

    report = rebuild(None, tmp_path / "s")

    assert (report.changed, report.queues) == (False, ())


def test_wrong_wishes_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(3))
    before = files(path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()

    for options, text in (
        ({"what": []}, "what="),
        ({"what": "units"}, "what="),
        ({"dest": tmp_path / "full"}, "not an empty directory"),
        ({"dest": path / "new"}, "lies in the store"),
    ):
        with pytest.raises(ConfigError, match=text):
            rebuild(None, path, **options)  # type: ignore[arg-type]
    (tmp_path / "other").mkdir()
    shutil.copytree(path, tmp_path / "other" / "s")
    with pytest.raises(ConfigError, match="the same folder"):
        rebuild(None, [path, tmp_path / "other" / "s"], dest=tmp_path / "new")
    assert files(path) == before
    assert not (tmp_path / "new").exists()
