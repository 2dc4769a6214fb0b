"""Progress of groups: what is committed, what a reset does to it, what is on disk when, what loading makes of it."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mqstore.broker.tables.names import POP_LOG_GROUP, START_GROUP, QueueKey
from mqstore.broker.tables.offsets import OffsetTable
from mqstore.errors import ConfigError, ReadOnlyStoreError, StoreFullError, StoreIOError
from mqstore.files.jsonfile import decode_json, encode_json
from tests.broker.support import START_MS, TableBench
from tests.log.support import kill, open_store


class _Offsets(TableBench[OffsetTable]):
    """A store, its offsets, and their file."""

    def __init__(self, path: Path, **config: Any) -> None:
        super().__init__(path, "consumerOffset.json", OffsetTable, **config)


@pytest.fixture
def offsets(tmp_path: Path) -> Any:
    offsets = _Offsets(tmp_path / "s")
    yield offsets
    offsets.store.close()


# -- committed ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("queue_id", "offset"), [(0, -1), (-1, 0), (0, 2**63), (2**31, 0), (0, 1.0)])
def test_a_number_that_cannot_be_is_refused(offsets: _Offsets, queue_id: int, offset: Any) -> None:
    with pytest.raises(ConfigError if type(offset) is int else TypeError):
        offsets.table.commit(QueueKey("g", "t", queue_id), offset)
    assert not offsets.table.dirty


def test_a_numpy_integer_is_one_and_can_be_saved(offsets: _Offsets) -> None:
    offsets.fill("t", 1, 3)
    offsets.table.commit(QueueKey("g", "t", np.int32(1)), np.int64(3))  # type: ignore[arg-type]
    offsets.table.save()
    assert offsets.stored()["offsetTable"] == {"t@g": {"1": 3}}


@pytest.mark.parametrize("name", ["a@b", "a/b", "\ud800"])
def test_a_name_that_the_file_could_not_give_back_is_refused(offsets: _Offsets, name: str) -> None:
    for group, topic in ((name, "t"), ("g", name)):
        with pytest.raises(ConfigError):
            offsets.table.commit(QueueKey(group, topic, 0), 0)
    offsets.table.save()
    assert not offsets.file.exists()


# -- whole groups and topics -------------------------------------------------------------------------------------------


def test_the_engine_is_no_group(offsets: _Offsets) -> None:
    table = offsets.table
    table.commit(QueueKey(POP_LOG_GROUP, "t", 0), 0)
    table.move_start("t", 0, 1)
    with pytest.raises(ConfigError):
        table.remove_group(START_GROUP)
    assert table.start_of("t", 0) == 1
    assert table.groups_of("t") == set()
    table.commit(QueueKey("g", "t", 0), 7)
    assert table.groups_of("t") == {"g"}


def test_burying_moves_starts_and_progress_at_once_or_not_at_all(offsets: _Offsets) -> None:
    offsets.fill("t", 0, 12)
    offsets.table.commit(QueueKey("g", "t", 0), 4)
    offsets.table.commit(QueueKey("ahead", "t", 0), 11)
    offsets.fs.fail("create", errno.ENOSPC, path_part="consumerOffset")
    with pytest.raises(StoreFullError):
        offsets.table.move_starts({"t": {0: 9}})
    assert (offsets.table.committed(QueueKey("g", "t", 0)), offsets.table.start_of("t", 0)) == (4, 0)
    offsets.table.save()
    assert (offsets.again().committed(QueueKey("g", "t", 0)), offsets.again().start_of("t", 0)) == (4, 0)
    offsets.table.move_starts({"t": {0: 9}})
    moved = [offsets.again().committed(QueueKey(group, "t", 0)) for group in ("g", "ahead")]
    assert (moved, offsets.again().start_of("t", 0)) == ([9, 11], 9)


def test_an_offset_that_compiled_code_notes_while_starts_move_is_kept(offsets: _Offsets) -> None:
    """It needs no lock, and may come between any two calls. All offsets were read, and then written again."""
    table = offsets.table

    class Starts(dict[int, int]):
        noted = 0

        def note(self) -> None:
            self.noted += 1
            table.by_topic["t"]["g"][1] += 1

        def get(self, *arguments: Any) -> Any:
            self.note()
            return super().get(*arguments)

        def items(self) -> Any:
            for item in super().items():
                self.note()
                yield item
                self.note()

    for queue_id in (0, 1):
        offsets.fill("t", queue_id, 20)
        table.commit(QueueKey("g", "t", queue_id), 4)
    starts = Starts({0: 9})
    table.move_starts({"t": starts})
    assert starts.noted
    assert [table.committed(QueueKey("g", "t", queue_id)) for queue_id in (0, 1)] == [9, 4 + starts.noted]


# -- on disk -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ['a"b', "a\\b", "ü, b:"])
def test_any_name_and_queue_comes_back_from_the_file(offsets: _Offsets, name: str) -> None:
    committed = {queue_id: queue_id * 2**40 for queue_id in (12, 0, 3)}
    for queue_id, offset in committed.items():
        offsets.table.commit(QueueKey(f"g {name}", f"t {name}", queue_id), offset)
    offsets.table.save()
    text = offsets.file.read_bytes()
    assert decode_json(text)["offsetTable"] == {
        f"t {name}@g {name}": {str(queue_id): offset for queue_id, offset in committed.items()}
    }
    assert text == encode_json({**json.loads(text), "offsetTable": {f"t {name}@g {name}": committed}})


def test_every_five_hundredth_commit_counts_for_the_version(offsets: _Offsets) -> None:
    offsets.fill("t", 0, 1)
    for _ in range(499):
        offsets.table.commit(QueueKey("g", "t", 0), 1)
    offsets.table.save()
    assert offsets.stored()["dataVersion"]["counter"] == 0
    for _ in range(502):
        offsets.table.commit(QueueKey("g", "t", 0), 1)
    offsets.table.save()
    assert offsets.stored()["dataVersion"] == {"counter": 2, "stateVersion": 0, "timestamp": START_MS}


_SYNCS = ("fdatasync",)


def test_when_the_log_cannot_be_flushed_the_file_says_what_it_said(offsets: _Offsets) -> None:
    offsets.fill("t", 0, 4)
    offsets.table.commit(QueueKey("g", "t", 0), 4, durability="flush")
    before = offsets.file.read_bytes()
    offsets.fill("t", 0, 4)
    offsets.table.commit(QueueKey("g", "t", 0), 8)
    offsets.fs.fail(_SYNCS, errno.EIO, path_part="commitlog", times=None)
    with pytest.raises(OSError, match=r"."):
        offsets.table.save()
    assert offsets.file.read_bytes() == before
    assert offsets.table.dirty
    offsets.fs.heal()
    with pytest.raises(OSError, match=r"."):  # a sync that failed is final: the log is not trusted again
        offsets.table.save()
    assert offsets.file.read_bytes() == before


def test_later_commits_are_not_part_of_a_running_save(offsets: _Offsets, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that comes while the log is being flushed may rest on a message behind what is flushed."""
    offsets.fill("t", 0, 4)
    offsets.table.commit(QueueKey("g", "t", 0), 4)
    flush = offsets.store.flush

    def flush_and_go_on() -> None:
        flush()
        offsets.fill("t", 0, 4)
        offsets.table.commit(QueueKey("g", "t", 0), 8)

    monkeypatch.setattr(offsets.store, "flush", flush_and_go_on)
    offsets.table.save()
    assert offsets.stored()["offsetTable"] == {"t@g": {"0": 4}}
    assert offsets.table.dirty
    monkeypatch.undo()
    offsets.table.save()
    assert offsets.stored()["offsetTable"] == {"t@g": {"0": 8}}


def test_failed_save_is_repeated(offsets: _Offsets) -> None:
    offsets.fill("t", 0, 9)
    offsets.fs.fail("create", errno.EIO, path_part="consumerOffset")
    with pytest.raises(StoreIOError):
        offsets.table.commit(QueueKey("g", "t", 0), 7, durability="flush")
    assert offsets.table.committed(QueueKey("g", "t", 0)) == 7
    assert offsets.table.dirty
    offsets.table.save()
    assert offsets.again().committed(QueueKey("g", "t", 0)) == 7


# -- quick saves -------------------------------------------------------------------------------------------------------


class _Waking(_Offsets):
    """A table that has saved durably once, with a housekeeper that counts wake-ups. Time begins at 0."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.wakes = self.flushes = 0
        self.table.wake = self._wake
        self.fill("t", 0, 9)
        self.table.commit(QueueKey("g", "t", 0), 1, durability="flush")
        flush = self.store.flush

        def counted() -> None:
            self.flushes += 1
            flush()

        self.store.flush = counted  # type: ignore[method-assign]
        assert self.table.run_once(0) == 5_000

    def _wake(self) -> None:
        self.wakes += 1

    def save_quickly(self, offset: int, now_ms: int) -> None:
        """Commit, and let 100 ms pass."""
        self.table.commit(QueueKey("g", "t", 0), offset)
        self.table.run_once(now_ms)
        self.table.run_once(now_ms + 100)

    def on_disk(self, suffix: str = "") -> int:
        value = json.loads(Path(f"{self.file}{suffix}").read_text())
        return value["offsetTable"]["t@g"]["0"]  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def no_save_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a slow machine sets the pauses between quick saves."""
    monkeypatch.setattr("mqstore.broker.tables.offsets.thread_time", lambda: 0.0)


@pytest.fixture
def waking(tmp_path: Path) -> Any:
    waking = _Waking(tmp_path / "s")
    yield waking
    waking.store.close()


def test_a_commit_is_with_the_kernel_100_ms_later_without_a_flush(waking: _Waking) -> None:
    table = waking.table
    table.commit(QueueKey("g", "t", 0), 2)
    assert table.run_once(1_000) == 1_100
    table.commit(QueueKey("g", "t", 0), 3)
    assert table.run_once(1_099) == 1_100
    assert waking.on_disk() == 1
    assert table.run_once(1_100) == 5_000
    assert (waking.on_disk(), waking.flushes) == (3, 0)
    assert table.dirty
    assert table.run_once(5_000) == 10_000
    assert (waking.on_disk(), waking.flushes) == (3, 1)
    assert not table.dirty


@pytest.mark.parametrize("quiet", ["note", "flush"])
def test_unneeded_quick_save_does_not_wake(waking: _Waking, quiet: str) -> None:
    """What pop has in its log, and what is on disk when the commit returns."""
    if quiet == "note":
        waking.table.note(QueueKey("g", "t", 0), 5)
    else:
        waking.table.commit(QueueKey("g", "t", 0), 5, durability="flush")
    assert waking.wakes == 0
    assert waking.table.run_once(1_000) == 5_000


def test_quick_saves_leave_the_last_synced_one_as_the_backup(waking: _Waking) -> None:
    for offset, now_ms in ((2, 1_000), (3, 2_000)):
        waking.save_quickly(offset, now_ms)
        assert (waking.on_disk(), waking.on_disk(".bak")) == (offset, 1)
    waking.table.commit(QueueKey("g", "t", 0), 4, durability="flush")
    assert (waking.on_disk(), waking.on_disk(".bak")) == (4, 1)  # 3 may be torn on disk
    waking.save_quickly(5, 3_000)
    assert (waking.on_disk(), waking.on_disk(".bak")) == (5, 4)


def test_the_first_save_of_a_process_is_never_a_quick_one(waking: _Waking) -> None:
    """What the process before has left is perhaps not on disk, and there may be no backup."""
    waking.table = waking.again()
    waking.table.run_once(0)
    waking.save_quickly(2, 1_000)
    assert waking.flushes == 1
    assert not waking.table.dirty


def test_a_large_table_is_saved_quickly_less_often(waking: _Waking, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.02])
    monkeypatch.setattr("mqstore.broker.tables.offsets.thread_time", lambda: next(times))
    waking.save_quickly(2, 1_000)
    waking.table.commit(QueueKey("g", "t", 0), 3)
    assert waking.table.run_once(1_101) == 1_101 + 50 * 20


def test_failed_quick_save_is_repeated(waking: _Waking) -> None:
    waking.table.commit(QueueKey("g", "t", 0), 2)
    waking.table.run_once(1_000)
    waking.fs.fail("create", errno.ENOSPC, path_part="consumerOffset")
    with pytest.raises(StoreFullError):
        waking.table.run_once(1_100)
    assert waking.on_disk() == 1
    waking.table.run_once(1_200)
    assert waking.on_disk() == 2


def _quickly_saved(path: Path, offset: int) -> _Waking:
    """A store whose process was killed after a quick save."""
    waking = _Waking(path)
    waking.save_quickly(offset, 1_000)
    assert waking.on_disk() == offset
    waking.store.dispatch()  # so there is nothing that opening has to mend
    return waking


@pytest.mark.parametrize("between", [0, 30])
def test_a_quick_save_that_is_ahead_of_the_log_gives_way_to_the_synced_one(tmp_path: Path, between: int) -> None:
    """The power went: the log lost its end, perhaps the copy of a message that was sent back and then passed by the
    commit. Neither does it help that somebody without a broker has put messages `between`."""
    waking = _quickly_saved(tmp_path / "s", 7)
    value = waking.stored()
    kill(waking.store)
    value["logEnd"] += 1
    waking.file.write_text(json.dumps(value))
    if between:
        with open_store(tmp_path / "s") as store:
            for _ in range(between):
                store.put("t", b"x", 0)
    again = _Offsets(tmp_path / "s")
    assert again.table.committed(QueueKey("g", "t", 0)) == 1
    assert "saved without a sync" in again.table._file.problems[0]
    assert again.stored()["offsetTable"] == {"t@g": {"0": 1}}
    again.store.close()


def test_a_clock_set_back_a_day_does_not_hold_up_saving_for_a_day(offsets: _Offsets) -> None:
    offsets.fill("t", 0, 9)
    offsets.table.run_once(START_MS)
    offsets.table.commit(QueueKey("g", "t", 0), 1)
    day_ms = 86_400_000
    assert offsets.table.run_once(START_MS - day_ms) == START_MS - day_ms + 5_000
    assert not offsets.table.dirty


def test_after_an_error_the_save_stays_due(offsets: _Offsets) -> None:
    offsets.fill("t", 0, 9)
    offsets.table.run_once(START_MS)
    offsets.table.commit(QueueKey("g", "t", 0), 1)
    offsets.fs.fail("create", errno.EIO, path_part="consumerOffset")
    with pytest.raises(StoreIOError):
        offsets.table.run_once(START_MS + 5_000)
    assert offsets.table.run_once(START_MS + 5_001) == START_MS + 10_001
    assert not offsets.table.dirty


# -- loading -----------------------------------------------------------------------------------------------------------

JAVAS = """{
\t"dataVersion":{
\t\t"counter":7,
\t\t"stateVersion":1,
\t\t"timestamp":1600000000000
\t},
\t"groupTopicTable":{"g1":["T"]},
\t"offsetTable":{
\t\t"T@g1":{0:2,1:0
\t\t},
\t\t"T@g1@broadcast":{0:9
\t\t},
\t\t"no at":{0:1
\t\t}
\t}
}"""


def test_a_java_brokers_file_is_read_and_what_is_not_ours_is_written_back(offsets: _Offsets) -> None:
    offsets.fill("T", 0, 5)
    table = offsets.write(JAVAS)
    assert table.of_group("g1") == {("T", 0): 2, ("T", 1): 0}
    assert table.groups_of("T") == {"g1"}
    assert len(table._file.problems) == 1  # a broadcast entry is as it should be, and invisible
    assert "'no at' is not topic@group" in table._file.problems[0]
    table.commit(QueueKey("g1", "T", 0), 3)
    table.save()
    assert offsets.stored() == {
        "dataVersion": {"counter": 7, "stateVersion": 1, "timestamp": 1_600_000_000_000},
        "groupTopicTable": {"g1": ["T"]},
        "offsetTable": {"T@g1": {"0": 3, "1": 0}, "T@g1@broadcast": {"0": 9}, "no at": {"0": 1}},
    }


def test_offset_beyond_the_end_is_lowered_and_reported(offsets: _Offsets) -> None:
    offsets.fill("t", 0, 5)
    table = offsets.write('{"offsetTable":{"t@g":{"0":5,"1":3},"t@h":{"0":6},"gone@g":{"2":9}}}')
    assert table.of_group("g") == {("t", 0): 5, ("t", 1): 0, ("gone", 2): 0}
    assert table.of_group("h") == {("t", 0): 5}
    assert len(table._file.problems) == 3
    assert any("t@h, queue 0: offset 6" in problem and "lowered to 5" in problem for problem in table._file.problems)
    assert not table.dirty
    assert offsets.again()._file.problems == []


def test_a_reader_that_may_lag_behind_the_writer_lowers_nothing(tmp_path: Path) -> None:
    offsets = _Offsets(tmp_path / "s")
    offsets.fill("t", 0, 5)
    offsets.table.commit(QueueKey("g", "t", 0), 9, durability="flush")
    with open_store(tmp_path / "s", "r") as store:
        table = OffsetTable(store)
        assert (table.committed(QueueKey("g", "t", 0)), table._file.problems, table.dirty) == (9, [], False)
        table.commit(QueueKey("g", "t", 0), 1)
        with pytest.raises(ReadOnlyStoreError):
            table.save()
    offsets.store.close()


def test_a_negative_value_counts_as_never_committed(offsets: _Offsets) -> None:
    table = offsets.write('{"offsetTable":{"t@g":{"0":-1}}}')
    assert table.committed(QueueKey("g", "t", 0)) is None
    assert table.groups_of("t") == set()
    assert "negative" in table._file.problems[0]


@pytest.mark.parametrize("key", ["-1", "01", "", "2147483648", "\u0663", "9" * 4000])
def test_invalid_queue_id_is_ignored_and_reported(offsets: _Offsets, key: str) -> None:
    table = offsets.write(json.dumps({"offsetTable": {"t@g": {key: 0, "1": 0}}}))
    assert table.of_group("g") == {("t", 1): 0}
    assert "invalid queue id" in table._file.problems[0]


@pytest.mark.parametrize("key", ["t", "t@", "a@b@c", "../t@g"])
def test_an_entry_that_names_no_topic_and_group_is_not_used_but_kept(offsets: _Offsets, key: str) -> None:
    table = offsets.write(json.dumps({"offsetTable": {key: {"0": 1}}}))
    assert len(table._file.problems) == 1
    assert not table.dirty
    table.commit(QueueKey("g", "t", 0), 0)
    table.save()
    assert offsets.stored()["offsetTable"] == {key: {"0": 1}, "t@g": {"0": 0}}


# -- a model -----------------------------------------------------------------------------------------------------------

GROUPS, TOPICS, QUEUES, END = ("g", "h"), ("t", "u"), (0, 1), 6


class OffsetModel(RuleBasedStateMachine):
    """Random calls against the three tables written plainly, with crashes: after one, what was saved."""

    group, topic = st.sampled_from(GROUPS), st.sampled_from(TOPICS)
    queue_id, offset = st.sampled_from(QUEUES), st.integers(0, END)

    root: Path

    def __init__(self) -> None:
        super().__init__()
        self.offsets = _Offsets(self.root)
        for topic in TOPICS:
            for queue_id in QUEUES:
                self.offsets.fill(topic, queue_id, END)
        self.committed: dict[QueueKey, int] = {}
        self.resets: dict[QueueKey, int] = {}
        self.pulled: dict[QueueKey, int] = {}
        self.starts: dict[tuple[str, int], int] = {}
        self.saved: tuple[dict[Any, int], dict[Any, int]] = ({}, {})

    @rule(group=group, topic=topic, queue_id=queue_id, offset=offset, flush=st.booleans())
    def commit(self, group: str, topic: str, queue_id: int, offset: int, flush: bool) -> None:
        self.offsets.table.commit(QueueKey(group, topic, queue_id), offset, durability="flush" if flush else None)
        key = QueueKey(group, topic, queue_id)
        if key not in self.resets:
            self.committed[key] = offset
        if flush:
            self._note_saved()

    @rule(group=group, topic=topic, queue_id=queue_id, offset=offset)
    def pull(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        self.offsets.table.note_pull(QueueKey(group, topic, queue_id), offset)
        self.pulled[QueueKey(group, topic, queue_id)] = offset

    @rule(group=group, topic=topic, queue_id=queue_id, offset=offset)
    def reset(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        offset = max(offset, self.starts.get((topic, queue_id), 0))
        key = QueueKey(group, topic, queue_id)
        self.offsets.table.reset(key, offset)
        self.committed[key] = self.resets[key] = offset
        self.pulled.pop(key, None)

    @rule(group=group, topic=topic, queue_id=queue_id)
    def take(self, group: str, topic: str, queue_id: int) -> None:
        key = QueueKey(group, topic, queue_id)
        assert self.offsets.table.take_reset(key) == self.resets.pop(key, None)

    @rule(topic=topic, queue_id=queue_id, offset=offset)
    def move_start(self, topic: str, queue_id: int, offset: int) -> None:
        self.offsets.table.move_start(topic, queue_id, offset)
        if offset > self.starts.get((topic, queue_id), 0):
            self.starts[topic, queue_id] = offset

    @rule(group=group)
    def remove_group(self, group: str) -> None:
        self.offsets.table.remove_group(group)
        self._drop(lambda key: key[0] == group)

    @rule(topic=topic)
    def delete_topic(self, topic: str) -> None:
        self.offsets.table.remove_topics([topic])
        self._drop(lambda key: key[1] == topic)
        for queue_id in QUEUES:
            self.starts.pop((topic, queue_id), None)
        self._note_saved()

    @rule()
    def save(self) -> None:
        self.offsets.table.save()
        self._note_saved()

    @precondition(lambda self: self.committed)
    @rule()
    def crash(self) -> None:
        self.offsets.table = self.offsets.again()
        self.committed, self.starts = dict(self.saved[0]), dict(self.saved[1])
        self.resets.clear()
        self.pulled.clear()

    @invariant()
    def agrees(self) -> None:
        table = self.offsets.table
        assert table.resets == self.resets
        for group in GROUPS:
            expected = {key[1:]: offset for key, offset in self.committed.items() if key[0] == group}
            assert table.of_group(group) == expected
            for topic in TOPICS:
                for queue_id in QUEUES:
                    key = QueueKey(group, topic, queue_id)
                    assert table.committed(key) == self.committed.get(key)
                    assert table.query_pull(key) == self.pulled.get(key, self.committed.get(key))
        for topic in TOPICS:
            groups = {key[0] for key in self.committed if key[1] == topic}
            assert table.groups_of(topic) == groups
            for queue_id in QUEUES:
                start = self.starts.get((topic, queue_id), 0)
                assert table.start_of(topic, queue_id) == start

    def teardown(self) -> None:
        self.offsets.store.close()

    def _note_saved(self) -> None:
        self.saved = (dict(self.committed), dict(self.starts))

    def _drop(self, concerned: Callable[[QueueKey], bool]) -> None:
        for table in (self.committed, self.resets, self.pulled):
            for key in [key for key in table if concerned(key)]:
                del table[key]


def test_random_calls_agree_with_the_plain_tables(tmp_path_factory: pytest.TempPathFactory) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    class Machine(OffsetModel):
        @property
        def root(self) -> Path:  # type: ignore[override]
            return tmp_path_factory.mktemp("offsets") / "s"

    run_state_machine_as_test(Machine, settings=settings(stateful_step_count=30, max_examples=30))  # type: ignore[no-untyped-call]


def test_group_of_a_lost_expired_queue_begins_at_its_start(tmp_path: Path) -> None:
    """The log tells nothing of such a queue, so no note of its end was left: put to without a broker it had soon more
    messages than the group had once consumed, and the group passed over as many."""
    path = tmp_path / "s"
    with open_store(path, segment_bytes=4096) as store:
        for n in range(60):
            store.put("T" if n < 10 else "U", bytes(100))
        store.dispatch()
        OffsetTable(store).commit(QueueKey("G", "T", 0), 10, durability="flush")
        store.drop_before(4096)
        assert store.offsets("T") == (10, 10)
    shutil.rmtree(path / "consumequeue" / "T")

    with open_store(path) as store:
        for _ in range(20):
            store.put("T", b"new")
    with open_store(path) as store:
        assert OffsetTable(store).committed(QueueKey("G", "T", 0)) == 0
