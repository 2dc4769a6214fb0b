"""Journal of deliveries to receivers in this process: the log has little of them, and a restart knows all the same.

A store with the journal is compared with one whose records are all in the log, step by step and after kills.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mqstore
from mqstore.broker.pop.poplog import journal
from mqstore.errors import MQStoreError, ReceiptExpiredError
from mqstore.files.filesystem import FileSystem
from tests.broker.popsupport import POP_LOG_TOPIC, PopBench, bodies, offsets

HOUR_MS = 3_600_000
FILE = Path("config", "popjournal")


class Booted(FileSystem):
    """Files of a machine that was booted under another name."""

    name: str | None = "first"

    def boot_id(self) -> str | None:
        return self.name


def records(pops: PopBench) -> list[str | None]:
    """Kinds of the records of the pop log."""
    log = pops.parts.store
    return [] if log.offsets_or_none(POP_LOG_TOPIC, 0) is None else [each.tag for each in pops.read(POP_LOG_TOPIC)]


def work(pops: PopBench, count: int, first: int = 0) -> None:
    pops.put("t", count, first=first)
    for _ in range(count):
        pops.ack(*pops.pop(invisible_ms=HOUR_MS))


# -- what is written --------------------------------------------------------------------------------------------------


def test_deliveries_in_this_process_leave_one_record_in_all(pops: PopBench) -> None:
    work(pops, 200)
    assert records(pops) == []
    pops.service.flush()
    assert records(pops) == ["ck"]
    work(pops, 3, first=200)
    pops.advance(5_000)
    assert records(pops) == ["ck"] * 2
    pops.advance(60_000)  # nothing more while nothing happens
    assert records(pops) == ["ck"] * 2
    assert pops.replay_position == 2


def test_deliveries_in_flight_share_a_record(pops: PopBench) -> None:
    pops.put("t", 100)
    held = [pops.pop(invisible_ms=HOUR_MS)[0] for _ in range(100)]
    pops.service.flush()
    assert records(pops) == ["ck"] * 4
    pops.ack(*held[10:])
    pops.service.flush()
    assert records(pops) == ["ck"] * 4 + ["ack"] * 4
    pops.crash(requeue_on_open=False)
    assert [each.offset for each in pops.service.pending("g")] == [*range(10)]


def test_journal_is_folded_when_it_is_full(pops: PopBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_FILE_BYTES", 4096)
    work(pops, 300)
    assert 2 <= len(records(pops)) <= 60
    pops.crash()
    assert pops.pop() == []
    assert pops.committed() == 300


def test_full_journal_is_folded_within_the_interval(pops: PopBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_FILE_BYTES", 900)
    pops.settle()
    pops.put("t", 9)
    while pops.tables.journal_end or not pops.tables.journal_map:
        pops.ack(*pops.pop())
    assert records(pops) == []
    due_ms = pops.service.run_once(pops.now_ms)
    assert due_ms is not None
    assert due_ms <= pops.now_ms + 5_000
    pops.advance(due_ms - pops.now_ms)
    assert records(pops) != []


@pytest.mark.parametrize("local", [False, True])
def test_only_receivers_in_this_process_use_the_journal(pops: PopBench, local: bool) -> None:
    pops.put("t", 2)
    for _ in range(2):
        pops.ack(*pops.pop(local=local))
    assert len(records(pops)) == (0 if local else 4)


def test_store_that_waits_for_the_disk_has_no_journal(tmp_path: Path) -> None:
    with mqstore.open(tmp_path, durability="flush") as store:
        queue = store.queue("jobs")
        queue.put(b"x")
        queue.get().ack()
        assert not (tmp_path / FILE).exists()


def test_close_removes_the_file(pops: PopBench) -> None:
    work(pops, 3)
    assert (pops.path / FILE).exists()
    pops.close()
    assert not (pops.path / FILE).exists()
    pops.reopen()
    assert pops.pop() == []


def test_journal_is_missing_if_its_file_cannot_be_made(pops: PopBench) -> None:
    (pops.path / FILE).mkdir(parents=True)
    work(pops, 2)
    assert records(pops) == ["ck", "ack"] * 2
    (pops.path / FILE).rmdir()


# -- after a kill -----------------------------------------------------------------------------------------------------


def test_kill_keeps_acknowledgements_and_counts_attempts(pops: PopBench) -> None:
    pops.put("t", 5)
    first, second, third = (pops.pop()[0] for _ in range(3))
    pops.ack(second)
    pops.release(third)
    pops.crash()
    pops.settle()
    found = {delivery.message.body: delivery.attempt for delivery in pops.pop(n=20)}
    assert found == {b"0": 2, b"2": 1, b"3": 1, b"4": 1}
    with pytest.raises(ReceiptExpiredError):
        pops.ack(first)
    pops.ack(second)  # again


def test_second_kill_finds_the_same(pops: PopBench) -> None:
    pops.put("t", 4)
    held = [pops.pop(invisible_ms=HOUR_MS)[0] for _ in range(3)]
    pops.ack(held[0])
    for _ in range(3):
        pops.crash(requeue_on_open=False)
        assert [each.offset for each in pops.service.pending("g")] == [1, 2]
        assert pops.committed() == 1
    assert offsets(pops.pop(n=9)) == [3]


def test_kill_between_folding_and_emptying_changes_nothing(pops: PopBench) -> None:
    pops.put("t", 6)
    held = [pops.pop(invisible_ms=HOUR_MS)[0] for _ in range(4)]
    pops.ack(held[1], held[3])
    before = (pops.path / FILE).read_bytes()
    pops.service.flush()
    pops.service.nack("g", "t", held[2].receipt, HOUR_MS)
    pops.kill()
    (pops.path / FILE).write_bytes(before)
    pops.reopen(requeue_on_open=False)
    assert [each.offset for each in pops.service.pending("g")] == [0, 2]
    assert [offset for offset, batch in pops.state.in_flight.items() if pops.state.reason(batch, offset)] == [2]
    assert offsets(pops.pop(n=9)) == [4, 5]


def test_acknowledged_item_that_was_released_before_stays_so(pops: PopBench) -> None:
    pops.put("t", 3)
    pops.release(*pops.pop())
    for _ in range(2):  # the second empties the file
        pops.ack(*pops.pop())
        pops.service.flush()
    pops.crash()
    assert offsets(pops.pop(n=5)) == [2]


def test_acknowledgements_of_logged_deliveries_survive_two_kills(pops: PopBench) -> None:
    pops.put("t", 3)
    held = [pops.pop(invisible_ms=HOUR_MS)[0] for _ in range(2)]
    pops.service.flush()
    pops.ack(held[0])
    for _ in range(2):
        pops.crash(requeue_on_open=False)
        assert [each.offset for each in pops.service.pending("g")] == [1]
    pops.pop(invisible_ms=HOUR_MS)  # in a new file
    pops.crash(requeue_on_open=False)
    assert [each.offset for each in pops.service.pending("g")] == [1, 2]


def test_replay_begins_before_the_entries(pops: PopBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may pop while the replay position moves."""
    pops.put("t", 4)
    pops.ack(*pops.pop(local=False))
    real = pops.tables.journal.fold_all

    def fold_all() -> None:
        real()
        monkeypatch.undo()
        pops.ack(*pops.pop())
        pops.pop(invisible_ms=HOUR_MS)
        pops.service.ack("other", "t", [each.receipt for each in pops.pop(group="other", local=False)])

    monkeypatch.setattr(pops.tables.journal, "fold_all", fold_all)
    pops.service._keeper.persist()
    pops.parts.offsets.save()
    pops.crash(requeue_on_open=False)
    assert [each.offset for each in pops.service.pending("g")] == [2]
    assert pops.committed() == 2


@pytest.mark.parametrize("put", range(1, 6))
def test_kill_while_it_is_folded_loses_nothing(pops: PopBench, monkeypatch: pytest.MonkeyPatch, put: int) -> None:
    pops.put("t", 6)
    held = []
    for _ in range(4):  # at other times, so in a record each
        held += pops.pop(invisible_ms=HOUR_MS)
        pops.clock.advance(1)
    pops.ack(held[1])
    pops.fail_once(monkeypatch, "put_pop", call=put)
    try:
        pops.service.flush()
    except OSError:
        assert put <= 3
    monkeypatch.undo()
    for _ in range(2):
        pops.crash(requeue_on_open=False)
        assert [each.offset for each in pops.service.pending("g")] == [0, 2, 3]
        pops.advance(20_000)
    pops.ack(held[0])
    pops.crash(requeue_on_open=False)
    assert [each.offset for each in pops.service.pending("g")] == [2, 3]


@pytest.mark.parametrize(("method", "call"), [("put_pop", 1), ("put_pop", 2), ("put_settled", 1), ("put_settled", 2)])
def test_kill_while_it_is_folded_redelivers_nothing_acknowledged(
    pops: PopBench, monkeypatch: pytest.MonkeyPatch, method: str, call: int
) -> None:
    pops.put("t", 4)
    logged = pops.pop(local=False)
    for _ in range(2):
        pops.ack(*pops.pop())
    pops.ack(*logged)
    pops.fail_once(monkeypatch, method, call=call)
    with suppress(OSError):
        pops.service.flush()
    monkeypatch.undo()
    for _ in range(2):
        pops.crash()
        pops.settle()
    assert bodies(pops.pop(n=9)) == [b"3"]


@pytest.mark.parametrize(("held", "options"), [(0, {"local": False}), (1, {"local": False}), (0, {"order": True})])
@pytest.mark.parametrize("way", ["crash", "reopen"])
def test_pop_that_fails_after_folding_delivered_nothing(
    pops: PopBench, monkeypatch: pytest.MonkeyPatch, held: int, options: dict[str, Any], way: str
) -> None:
    pops.put("t", 5)
    pops.ack(*pops.pop())
    for _ in range(held):
        pops.pop(invisible_ms=HOUR_MS)
    pops.fail_once(monkeypatch, "put_pop", call=2)
    with pytest.raises(OSError, match="no space"):
        pops.pop(n=2, **options)
    monkeypatch.undo()
    getattr(pops, way)(requeue_on_open=False)
    assert offsets(pops.pop(n=9)) == [*range(1 + held, 5)]


def test_full_disk_at_opening_keeps_the_journal(pops: PopBench, monkeypatch: pytest.MonkeyPatch) -> None:
    pops.put("t", 3)
    pops.ack(pops.pop()[0])
    held = pops.pop()
    pops.kill()
    with pytest.MonkeyPatch.context() as patched:
        pops.refuse(patched, "put_pop")
        pops.reopen(requeue_on_open=False)
        assert [each.offset for each in pops.service.pending("g")] == [1]
        with pytest.raises(MQStoreError):
            pops.ack(*held)
        pops.crash(requeue_on_open=False)
    pops.ack(*held)
    assert offsets(pops.pop(n=5)) == [2]
    assert pops.committed() == 2


@pytest.mark.parametrize("name", ["second", None])
def test_journal_of_another_boot_is_ignored(tmp_path: Path, name: str | None) -> None:
    fs = Booted()
    with PopBench(tmp_path / "store", fs, queues=1) as pops:
        work(pops, 2)
        pops.kill()
        Booted.name = name
        try:
            pops.reopen()
            assert bodies(pops.pop(n=5)) == [b"0", b"1"]
        finally:
            Booted.name = "first"


@pytest.mark.parametrize("end", [b"", b"\xff" * 60, b"\x20" + bytes(15) + b"{" * 32, b"\x02" + bytes(15) + b"[]"])
def test_entries_up_to_a_torn_one_count(pops: PopBench, end: bytes) -> None:
    pops.put("t", 2)
    pops.ack(*pops.pop())
    at = pops.tables.journal_end
    pops.kill()
    data = (pops.path / FILE).read_bytes()
    (pops.path / FILE).write_bytes(data[:at] + end + data[at + len(end) :])
    pops.reopen()
    assert bodies(pops.pop(n=5)) == [b"1"]


def test_release_that_knows_no_journal_delivers_again(pops: PopBench) -> None:
    """It ignores the file. So does one that opens the store afterwards, since the log has gone on."""
    work(pops, 2)
    pops.kill()
    aside = pops.path.with_name("aside")
    shutil.move(pops.path / FILE, aside)
    pops.reopen()
    held = pops.pop(n=2, local=False)
    assert bodies(held) == [b"0", b"1"]
    pops.ack(held[0])
    pops.advance(20_000)
    pops.kill()
    shutil.move(aside, pops.path / FILE)
    pops.reopen()
    assert [each.offset for each in pops.service.pending("g")] == [1]


def test_entries_that_the_log_has_are_not_read_again(pops: PopBench, tmp_path: Path) -> None:
    """Here they are of messages that the log lacks: it was copied before them, or was cut. Others take their place."""
    work(pops, 1)
    pops.kill()
    shutil.copytree(pops.path, tmp_path / "copy")
    pops.reopen()
    work(pops, 3, first=1)
    pops.kill()
    shutil.copy(pops.path / FILE, tmp_path / "copy" / FILE)
    with PopBench(tmp_path / "copy") as copy:
        copy.put("t", 3, first=100)
        copy.crash()
        assert bodies(copy.pop(n=5))[-3:] == [b"100", b"101", b"102"]


def test_reset_and_deletion_are_not_undone_by_older_entries(pops: PopBench) -> None:
    work(pops, 4)
    pops.reset(1)
    pops.crash()
    assert bodies(pops.pop(n=9)) == [b"1", b"2", b"3"]
    pops.kill()
    pops.reopen()
    pops.parts.groups.delete("g")
    pops.crash()
    assert pops.tables.states == {}


def test_reader_of_an_open_store_sees_the_deliveries(tmp_path: Path) -> None:
    with mqstore.open(tmp_path) as store:
        queue = store.queue("jobs")
        for _ in range(3):
            queue.put(b"x")
        queue.get().ack()
        task = queue.get()
        with mqstore.admin.look(tmp_path) as view:
            [lag] = [each for each in view.lag("jobs") if each.topic == "jobs"]
        assert (lag.messages, lag.in_flight) == (2, 1)
        task.ack()


# -- beside a store whose log has all ---------------------------------------------------------------------------------

STEPS = st.one_of(
    st.tuples(st.just("put"), st.integers(1, 5), st.none()),
    st.tuples(st.just("pop"), st.sampled_from([1, 1, 2, 32]), st.sampled_from([True, True, True, False])),
    st.tuples(st.just("ack"), st.integers(0, 40), st.sampled_from([1, 1, 3])),
    st.tuples(st.just("release"), st.integers(0, 40), st.sampled_from([1, 2])),
    st.tuples(st.sampled_from(["nack", "extend"]), st.integers(0, 40), st.sampled_from([0, 500, 70_000])),
    st.tuples(st.just("time"), st.sampled_from([1, 999, 5_000, 60_000]), st.none()),
    st.tuples(st.just("reset"), st.integers(0, 9), st.none()),
    st.tuples(st.just("flush"), st.none(), st.none()),
    st.tuples(st.just("restart"), st.booleans(), st.booleans()),
)


class Beside:
    """A store with the journal, and one without. Both are told the same."""

    def __init__(self, folder: Path) -> None:
        self.benches = [PopBench(folder / name, queues=1) for name in ("journal", "log")]
        self.held: list[list[str]] = [[], []]
        self.only_log()

    def only_log(self) -> None:
        self.benches[1].tables.journal.wanted = False

    def step(self, kind: str, first: Any, second: Any) -> None:
        answers = []
        for pops, held in zip(self.benches, self.held, strict=True):
            count = second if kind in ("ack", "release") and held else 0
            chosen = [held[(first + i) % len(held)] for i in range(count)]
            try:
                answers.append(self.one(pops, held, kind, first, second, chosen))
            except MQStoreError as error:
                answers.append(type(error))
        self.only_log()
        assert answers[0] == answers[1]
        assert self.seen(self.benches[0]) == self.seen(self.benches[1])

    def one(self, pops: PopBench, held: list[str], kind: str, first: Any, second: Any, chosen: list[str]) -> Any:
        match kind:
            case "put":
                pops.put("t", first)
            case "pop":
                found = pops.pop(n=first, local=second)
                held += [delivery.receipt for delivery in found]
                return [(delivery.message.body, delivery.attempt, delivery.visible_at_ms) for delivery in found]
            case "ack":
                pops.service.ack("g", "t", chosen) if chosen else None
            case "release":
                pops.service.release("g", "t", chosen) if chosen else None
            case "nack" | "extend" if held:
                change = pops.service.nack if kind == "nack" else pops.service.change_invisible
                receipt = change("g", "t", held[first % len(held)], second)
                held.append(receipt) if receipt is not None else None
            case "time":
                pops.advance(first)
            case "reset":
                pops.reset(first)
            case "flush":
                pops.service.flush()
            case "restart":
                (pops.kill if first else pops.close)()
                pops.reopen(requeue_on_open=second)
                if second:
                    pops.settle()
        return None

    @staticmethod
    def seen(pops: PopBench) -> Any:
        """Return the state of each queue without names of batches, and with the end of each lease but not its begin.
        After a reset and a kill the last pop time is unknown to a log without that pop, so the next is 1 ms later."""
        return {
            key: (
                *(state.cursor, state.advance(), sorted(state.released), sorted(state.revived)),
                {
                    offset: (sum(batch.times(offset)), state.holds(batch, offset))
                    for offset, batch in state.in_flight.items()
                },
            )
            for key, state in pops.tables.states.items()
            if state.cursor > 0
        }


@given(steps=st.lists(STEPS, max_size=50), room=st.sampled_from([400, 1500, 1 << 18]))
def test_journal_and_log_say_the_same(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, Any, Any]], room: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(journal, "_FILE_BYTES", room)
        both = Beside(tmp_path_factory.mktemp("beside"))
        try:
            both.step("put", 8, None)
            for step in steps:
                both.step(*step)
            both.step("restart", True, True)
            both.step("pop", 32, True)
        finally:
            for pops in both.benches:
                pops.__exit__()
