"""Half messages: begun, committed, rolled back, asked about. delivery#transactions."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mqstore import Message
from mqstore.errors import (
    ConfigError,
    FlushTimeoutError,
    InvalidMessageError,
    NotPermittedError,
    ResultCode,
    StoreFullError,
    TransactionStateError,
)
from tests.broker.support import START_MS, full, new_parts
from tests.broker.transactionsupport import (
    GROUP,
    HALF_TOPIC,
    NOT_ASKED,
    OP_TOPIC,
    TIMER_TOPIC,
    TRANS_CHECK_TOPIC,
    TRANS_GROUP,
    Bench,
    QueueKey,
    Transactions,
    refuse_ops,
)
from tests.waiting import in_threads

CHECK_AFTER_MS, CHECK_EVERY_MS, OP_EVERY_MS = 6_000, 30_000, 3_000


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "store")
    yield bench
    bench.close()


def always(answer: Any, asked: list[Message] | None = None) -> Callable[[Message], Any]:
    def check(message: Message) -> Any:
        if asked is not None:
            asked.append(message)
        return answer

    return check


# -- formats ---------------------------------------------------------------------------------------------------------


def test_a_half_lies_in_its_topic_and_its_commit_says_where_it_was(bench: Bench) -> None:
    handle = bench.begin(b"paid", queue_id=2, tag="t", keys="k", unique_key="U", properties={"mine": "x"}, flag=5)
    [half] = bench.messages(HALF_TOPIC)
    kept = {"mine": "x", "KEYS": "k", "TAGS": "t", "UNIQ_KEY": "U", "__transactionId__": "U"}
    kept |= {"TRAN_MSG": "true", "PGROUP": GROUP}
    assert half.stored_properties() == {**kept, "REAL_TOPIC": "orders", "REAL_QID": "2"}
    assert (half.body, half.flag, half.sys_flag & 0xC) == (b"paid", 5, 0)
    assert handle == ("U", "orders", GROUP, half.offset, half.physical_offset)
    assert bench.bodies() == []
    assert bench.transactions.get("U") == handle
    receipt = bench.transactions.end(handle, "commit")
    assert receipt is not None
    message = bench.parts.store.at(receipt.physical_offset)
    assert (message.topic, message.queue_id, message.body, message.flag) == ("orders", 2, b"paid", 5)
    assert message.sys_flag & 0xC == 8
    assert message.prepared_transaction_offset == half.physical_offset
    assert (message.born_timestamp_ms, message.born_host) == (half.born_timestamp_ms, half.born_host)
    assert message.stored_properties() == {**kept, "WAIT": "false"}


def test_ops_of_commits_are_collected_for_three_seconds(bench: Bench) -> None:
    handles = [bench.begin() for _ in range(4)]
    bench.transactions.end(handles[2], "commit")
    bench.pass_ms(OP_EVERY_MS - 1)
    bench.transactions.end(handles[0], "commit")
    assert bench.messages(OP_TOPIC) == []
    bench.pass_ms(1)
    [op] = bench.messages(OP_TOPIC)
    assert (op.body, op.tag, op.stored_properties()) == (b"2,0,", "d", {"TAGS": "d"})
    bench.transactions.end(handles[3], "commit")
    bench.transactions.end(handles[1], "rollback")
    assert bench.bodies(OP_TOPIC) == [b"2,0,", b"1,"], "nothing else shows a rollback"
    bench.pass_ms(OP_EVERY_MS)
    assert bench.bodies(OP_TOPIC) == [b"2,0,", b"1,", b"3,"]


@pytest.mark.parametrize("refused", [False, True])
def test_many_ops_are_written_in_parts_and_none_is_lost(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """Ops of 1200 halves take more than 4096 bytes: 10 of 2 bytes, 90 of 3, 900 of 4, 200 of 5."""
    with monkeypatch.context() as patch:
        if refused:
            refuse_ops(patch)
        for _ in range(1200):
            bench.transactions.end(bench.begin(), "commit")
        assert len(bench.bodies(OP_TOPIC)) == (0 if refused else 1)
        if refused:
            with pytest.raises(StoreFullError):
                bench.transactions.run_once(START_MS + OP_EVERY_MS)
    bench.pass_ms(OP_EVERY_MS)
    bodies = bench.bodies(OP_TOPIC)
    assert [int(number) for body in bodies for number in body.decode().rstrip(",").split(",")] == [*range(1200)]
    assert [len(body) > 4096 for body in bodies] == [True, False]
    assert all(len(body) <= 4096 + 5 for body in bodies)


# -- ending ----------------------------------------------------------------------------------------------------------


def test_the_same_end_again_gives_the_same_answer_and_writes_nothing(bench: Bench) -> None:
    committed, rolled_back = bench.begin(), bench.begin()
    receipt = bench.transactions.end(committed, "commit")
    assert bench.transactions.end(rolled_back, "rollback") is None
    end = bench.parts.store.max_offset
    assert bench.transactions.end(committed, "commit") == receipt
    assert bench.transactions.end(committed.transaction_id, "commit", from_check=True) == receipt
    assert bench.transactions.end(rolled_back.transaction_id, "rollback") is None
    assert bench.parts.store.max_offset == end
    assert bench.bodies() == [b"b"]


@pytest.mark.parametrize(("first", "second"), [("commit", "rollback"), ("rollback", "commit")])
def test_the_other_way_afterwards_is_refused(bench: Bench, first: Any, second: Any) -> None:
    handle = bench.begin()
    bench.transactions.end(handle, first)
    for from_check in (False, True):
        with pytest.raises(TransactionStateError) as caught:
            bench.transactions.end(handle, second, from_check=from_check)
        assert (caught.value.code, caught.value.outcome) == (ResultCode.ILLEGAL_OPERATION, first)
    assert len(bench.bodies()) == (first == "commit")


def test_unknown_transaction_id_is_invalid(bench: Bench) -> None:
    handle = bench.begin()
    forged = handle._replace(physical_offset=handle.physical_offset + 1)
    for stranger in ("", "never", forged, handle._replace(producer_group="other")):
        with pytest.raises(InvalidMessageError) as caught:
            bench.transactions.end(stranger, "commit")
        assert caught.value.field == "transaction_id"
    with pytest.raises(ConfigError):
        bench.transactions.end(handle, "maybe")  # type: ignore[arg-type]
    assert bench.transactions.end(handle, "unknown") is None
    assert (bench.transactions.open_transactions(), bench.bodies()) == ([handle], [])


def test_two_threads_that_commit_at_once_commit_once(bench: Bench) -> None:
    handles = [bench.begin() for _ in range(50)]

    def commit_all() -> None:
        for handle in handles:
            bench.transactions.end(handle, "commit")

    in_threads(*[commit_all] * 4)
    assert len(bench.bodies()) == 50
    assert bench.transactions.open_count() == 0


def test_only_a_check_answer_ends_it_after_immunity(bench: Bench) -> None:
    early, late, short = bench.begin(immunity=10), bench.begin(immunity=10), bench.begin(immunity=1)
    bench.clock.advance(10_000)
    bench.transactions.end(early, "commit")
    bench.clock.advance(1)
    for handle in (late, short):
        with pytest.raises(TransactionStateError) as caught:
            bench.transactions.end(handle, "commit")
        assert caught.value.outcome is None
    plain = bench.begin()
    bench.clock.advance(3_600_000)
    bench.transactions.end(plain, "commit")  # without immunity there is no such limit
    bench.transactions.end(late, "commit", from_check=True)
    assert len(bench.bodies()) == 3


@pytest.mark.parametrize(("outcome", "bodies"), [("commit", [b"b"]), ("rollback", [])])
def test_an_end_that_cannot_be_stored_leaves_it_open(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, outcome: Any, bodies: list[bytes]
) -> None:
    handle = bench.begin()
    with monkeypatch.context() as patch:
        if outcome == "commit":
            patch.setattr(bench.parts.router, "copy", full)
        else:
            refuse_ops(patch)
        with pytest.raises(StoreFullError):
            bench.transactions.end(handle, outcome)
    assert bench.transactions.open_transactions() == [handle]
    bench.transactions.end(handle, outcome)
    bench.reopen(killed=outcome == "rollback")  # whose op is written at once
    assert (bench.bodies(), bench.transactions.open_count()) == (bodies, 0)


def slow(patch: pytest.MonkeyPatch, kind: Any, name: str) -> None:
    """Let a put report that it is stored, but perhaps not on disk."""
    real = getattr(kind, name)

    def call(*args: Any, **options: Any) -> None:
        raise FlushTimeoutError("stored", real(*args, **options))

    patch.setattr(kind, name, call)


def test_a_commit_that_is_stored_but_perhaps_not_on_disk_is_a_commit(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = bench.begin()
    with monkeypatch.context() as patch:
        slow(patch, bench.parts.router, "copy")
        with pytest.raises(FlushTimeoutError):
            bench.transactions.end(handle, "commit")
    assert bench.transactions.end(handle, "commit") is not None
    assert bench.bodies() == [b"b"]


def test_a_half_that_is_perhaps_not_on_disk_is_rolled_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """clients#transaction: any status but SEND_OK is a rollback, and the local transaction does not run."""
    with monkeypatch.context() as patch:
        slow(patch, bench.parts.store, "append")
        with pytest.raises(FlushTimeoutError):
            bench.begin(unique_key="U")
    assert bench.transactions.open_count() == 0
    bench.reopen()
    assert bench.transactions.open_count() == 0


# -- beginning -------------------------------------------------------------------------------------------------------


def test_invalid_half_message_is_refused(bench: Bench) -> None:
    bench.parts.topics.create("closed", perm=4)
    far = str(START_MS + 367 * 86_400_000)
    bad: list[tuple[Any, dict[str, Any]]] = [
        (InvalidMessageError, {"topic": "orders", "properties": {"DELAY": "3"}}),
        (InvalidMessageError, {"topic": "orders", "properties": {"TIMER_DELIVER_MS": far}}),
        (InvalidMessageError, {"topic": "orders", "properties": {"TIMER_DELAY_MS": "soon"}}),
        (InvalidMessageError, {"topic": "orders", "properties": {}, "queue_id": 4}),
        (InvalidMessageError, {"topic": "orders", "properties": {}, "queue_id": -1}),
        (InvalidMessageError, {"topic": "orders", "properties": {}, "producer_group": ""}),
        (InvalidMessageError, {"topic": "no/topic", "properties": {}}),
        (NotPermittedError, {"topic": "closed", "properties": {}}),
        (NotPermittedError, {"topic": HALF_TOPIC, "properties": {}}),
    ]
    bench.begin()
    end = bench.parts.store.max_offset
    for error, options in bad:
        with pytest.raises(error):
            bench.transactions.prepare(body=b"b", **{"producer_group": GROUP, **options})
    assert bench.parts.store.max_offset == end
    assert bench.transactions.open_count() == 1


def test_a_refused_half_leaves_its_id_free(bench: Bench) -> None:
    with pytest.raises(InvalidMessageError):
        bench.begin(b"x" * (5 << 20), unique_key="U")
    bench.transactions.end(bench.begin(unique_key="U"), "commit")
    assert len(bench.bodies()) == 1


def test_a_timer_on_a_half_message_starts_at_its_commit(bench: Bench) -> None:
    options: dict[str, Any] = {"producer_group": GROUP, "queue_id": 0}
    handle = bench.transactions.prepare("orders", b"b", {"TIMER_DELAY_MS": "60000"}, **options)
    assert len(bench.messages(HALF_TOPIC)) == 1
    assert bench.messages(TIMER_TOPIC) == []
    bench.clock.advance(3_000)
    bench.transactions.end(handle, "commit")
    [waiting] = bench.messages(TIMER_TOPIC)
    out_ms = int(waiting.stored_properties()["TIMER_OUT_MS"])
    assert START_MS + 63_000 - 1_000 <= out_ms <= START_MS + 63_000
    assert waiting.stored_properties()["REAL_TOPIC"] == "orders"


# -- after a restart -------------------------------------------------------------------------------------------------


def test_the_table_comes_back_from_the_log(bench: Bench) -> None:
    handles = [bench.begin(str(i).encode(), unique_key=f"U{i}") for i in range(8)]
    for i in (0, 1, 5):
        bench.transactions.end(handles[i], "commit" if i else "rollback")
    bench.reopen()
    assert bench.transactions.open_transactions() == [handles[i] for i in (2, 3, 4, 6, 7)]
    bench.transactions.end(handles[2], "commit")
    bench.transactions.end("U3", "rollback")
    bench.reopen()
    assert bench.transactions.open_transactions() == [handles[i] for i in (4, 6, 7)]
    assert sorted(bench.bodies()) == [b"1", b"2", b"5"]


def test_progress_passes_only_finished_transactions(bench: Bench) -> None:
    def progress() -> tuple[int | None, int | None]:
        halves, ops = QueueKey(TRANS_GROUP, HALF_TOPIC, 0), QueueKey(TRANS_GROUP, OP_TOPIC, 0)
        return bench.parts.offsets.committed(halves), bench.parts.offsets.committed(ops)

    handles = [bench.begin() for _ in range(4)]
    for i in (1, 2):
        bench.transactions.end(handles[i], "rollback")
        bench.pass_ms(OP_EVERY_MS)
    assert progress() == (0, 0)
    [pin] = bench.transactions.pins()
    assert (pin.physical_offset, pin.topic, pin.group) == (handles[0].physical_offset, HALF_TOPIC, TRANS_GROUP)
    bench.transactions.end(handles[0], "rollback")
    bench.pass_ms(OP_EVERY_MS)
    assert progress() == (3, 3)
    bench.reopen()
    assert bench.transactions.open_transactions() == [handles[3]]
    bench.transactions.end(handles[3], "rollback")
    bench.pass_ms(OP_EVERY_MS)
    assert progress() == (4, 4)
    assert list(bench.transactions.pins()) == []


def test_progress_waits_for_a_half_that_is_being_put(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a crash after the put returned would find its half behind the offset where the search begins."""
    append = bench.parts.store.append

    def interrupted(*args: Any, **options: Any) -> Any:
        receipt = append(*args, **options)
        bench.settle()
        return receipt

    with monkeypatch.context() as patch:
        patch.setattr(bench.parts.store, "append", interrupted)
        handle = bench.begin()
    bench.crash(save=True)
    assert bench.transactions.open_transactions() == [handle]


@pytest.mark.parametrize("save", [False, True])
def test_a_commit_whose_op_was_lost_is_not_made_twice(bench: Bench, save: bool) -> None:
    """RocketMQ asks again and commits again (11, "Guarantee")."""
    options: dict[str, Any] = {"producer_group": GROUP, "queue_id": 0}
    plain = bench.begin(unique_key="plain")
    timed = bench.transactions.prepare("orders", b"t", {"TIMER_DELAY_MS": "60000", "UNIQ_KEY": "timed"}, **options)
    still = bench.begin(b"still", unique_key="still")
    bench.transactions.end(plain, "commit")
    bench.transactions.end(timed, "commit")
    bench.crash(save=save)
    assert bench.transactions.open_count() == 3
    asked: list[Message] = []
    bench.transactions.on_check(GROUP, always(True, asked))
    with pytest.raises(TransactionStateError) as caught:  # everybody can read it
        bench.transactions.end("plain", "rollback")
    assert caught.value.outcome == "commit"
    assert bench.transactions.end("timed", "commit") is None
    bench.pass_ms(CHECK_AFTER_MS)
    assert [message.unique_key for message in asked] == ["still"]
    assert bench.bodies() == [b"b", b"still"]
    assert len(bench.messages(TIMER_TOPIC)) == 1
    assert still not in bench.transactions.open_transactions()


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("by_check", [False, True])
def test_a_rollback_that_returned_survives_a_kill(bench: Bench, save: bool, by_check: bool) -> None:
    """It was kept in memory for three seconds, and a checker that said commit made the message visible."""
    handles = [bench.begin(str(i).encode()) for i in range(6)]
    if by_check:
        bench.transactions.on_check(GROUP, always(False))
        bench.pass_ms(CHECK_AFTER_MS)
    else:
        for i in (4, 0, 3):
            bench.transactions.end(handles[i], "rollback")
    left = [] if by_check else [handles[i] for i in (1, 2, 5)]
    bench.crash(save=save)
    assert bench.transactions.open_transactions() == left
    bench.transactions.on_check(GROUP, always(True))
    bench.pass_ms(CHECK_AFTER_MS)
    assert bench.bodies() == [str(handle.offset).encode() for handle in left]


@pytest.mark.parametrize(
    ("of_store", "of_call", "synced"),
    [("append", None, False), ("append", "flush", True), ("flush", None, True), ("flush", "append", False)],
)
@pytest.mark.parametrize("outcome", ["commit", "rollback"])
def test_an_end_is_as_durable_as_a_put(tmp_path: Path, of_store: Any, of_call: Any, synced: bool, outcome: Any) -> None:
    parts = new_parts(tmp_path / "store", durability=of_store)
    with parts.store as store:
        transactions = Transactions(parts, lambda: None)
        handle = transactions.begin("orders", b"b", producer_group=GROUP, durability="flush")
        transactions.end(handle, outcome, durability=of_call)
        assert (store.stats().flush_lag_bytes == 0) is synced


def test_halves_that_rocketmq_left_are_understood(bench: Bench) -> None:
    store = bench.parts.store
    base = {"REAL_TOPIC": "orders", "REAL_QID": "0", "PGROUP": GROUP, "TRAN_MSG": "true"}
    store.append(HALF_TOPIC, 0, b"0", properties=base | {"UNIQ_KEY": "a"})
    store.append(HALF_TOPIC, 0, b"1", properties=base | {"UNIQ_KEY": "a", "TRAN_PREPARED_QUEUE_OFFSET": "0"})
    store.append(HALF_TOPIC, 0, b"2", properties=base | {"UNIQ_KEY": "c", "TRANSACTION_CHECK_TIMES": "14"})
    store.append(HALF_TOPIC, 0, b"3", properties={"UNIQ_KEY": "nowhere"})
    store.append(HALF_TOPIC, 0, b"4", properties=base | {"UNIQ_KEY": "d", "REAL_QID": "x"})
    store.append(OP_TOPIC, 0, b"0,junk,,-3,", properties={"TAGS": "d"})
    bench.crash()
    assert [handle.transaction_id for handle in bench.transactions.open_transactions()] == ["c"]
    bench.transactions.on_check(GROUP, always(None))
    bench.pass_ms(CHECK_AFTER_MS + CHECK_EVERY_MS)
    assert bench.bodies(TRANS_CHECK_TOPIC) == [b"2"], "its fifteenth check was its last"


# -- asking ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("immunity", "first_ms"), [(None, 6_000), (60, 60_000), (1, 6_000), (6.4, 6_000)])
def test_checks_come_after_six_seconds_or_the_immunity(bench: Bench, immunity: float | None, first_ms: int) -> None:
    """Then one comes every thirty seconds."""
    times: list[int] = []

    def check(message: Message) -> None:
        times.append(bench.clock.now_ms() - START_MS)

    bench.transactions.on_check(GROUP, check)
    bench.begin(immunity=immunity)
    bench.pass_ms(first_ms + 2 * CHECK_EVERY_MS)
    assert times == [first_ms, first_ms + 30_000, first_ms + 60_000]


@pytest.mark.parametrize(("answer", "visible", "open_after"), [(True, 1, 0), (False, 0, 0), (None, 0, 1)])
def test_check_answer_ends_the_transaction(bench: Bench, answer: bool | None, visible: int, open_after: int) -> None:
    asked: list[Message] = []
    bench.transactions.on_check(GROUP, always(answer, asked))
    bench.begin(b"paid", immunity=10)
    bench.pass_ms(10_001)
    assert [(message.body, message.system_properties["REAL_TOPIC"]) for message in asked] == [(b"paid", "orders")]
    assert (len(bench.bodies()), bench.transactions.open_count()) == (visible, open_after)


def test_a_callback_that_raises_is_an_unknown_and_is_logged(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def check(message: Message) -> bool:
        raise RuntimeError("database gone")

    bench.transactions.on_check(GROUP, check)
    bench.begin()
    with caplog.at_level(logging.ERROR, "mqstore"):
        bench.pass_ms(CHECK_AFTER_MS)
    assert "database gone" in caplog.text
    assert bench.transactions.open_count() == 1


def test_a_callback_may_end_it_itself_and_others_meanwhile(bench: Bench) -> None:
    """No lock is held: not even one that another thread would need."""
    other = bench.begin(b"other")

    def check(message: Message) -> None:
        done = threading.Thread(target=bench.transactions.end, args=(message.unique_key, "commit"))
        done.start()
        done.join(10)
        assert not done.is_alive()
        if bench.transactions.get(other.transaction_id):
            bench.transactions.end(other, "rollback")

    bench.begin(b"mine")
    bench.transactions.on_check(GROUP, check)
    bench.pass_ms(CHECK_AFTER_MS)
    assert bench.transactions.open_count() == 0


def test_fifteen_times_unknown_gives_it_up_into_its_own_topic(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    asked: list[Message] = []
    bench.transactions.on_check(GROUP, always(None, asked))
    bench.begin(b"lost", tag="t")
    bench.pass_ms(CHECK_AFTER_MS + 15 * CHECK_EVERY_MS - 1)
    assert (len(asked), bench.transactions.open_count()) == (15, 1)
    with caplog.at_level(logging.ERROR, "mqstore"):
        bench.pass_ms(1)
    [kept] = bench.messages(TRANS_CHECK_TOPIC)
    properties = kept.stored_properties()
    assert (kept.body, kept.tag, properties["TRANSACTION_CHECK_TIMES"]) == (b"lost", "t", "15")
    assert (properties["REAL_TOPIC"], properties["PGROUP"]) == ("orders", GROUP)
    assert "is discarded" in caplog.text
    assert (bench.bodies(), bench.transactions.open_count()) == ([], 0)
    bench.reopen()
    assert bench.transactions.open_count() == 0


def test_unanswered_transaction_ends_by_age(bench: Bench) -> None:
    bench.begin(b"one")
    asked: list[Message] = []
    bench.pass_ms(20 * CHECK_EVERY_MS)
    bench.transactions.on_check(None, always(NOT_ASKED, asked))
    bench.pass_ms(20 * CHECK_EVERY_MS)
    assert len(asked) > 15
    assert bench.transactions.open_count() == 1
    bench.clock.advance(72 * 3_600_000)
    bench.pass_ms(CHECK_EVERY_MS)
    assert bench.bodies(TRANS_CHECK_TOPIC) == [b"one"]


def test_new_producer_is_asked_at_once(bench: Bench) -> None:
    bench.begin()
    bench.pass_ms(CHECK_AFTER_MS + 10)
    asked: list[Message] = []
    before = bench.wakes
    bench.transactions.on_check(GROUP, always(None, asked))
    assert bench.wakes > before
    bench.settle()
    assert len(asked) == 1


def test_a_group_of_its_own_is_asked_before_the_one_for_all(bench: Bench) -> None:
    mine: list[Message] = []
    others: list[Message] = []
    bench.transactions.on_check(GROUP, always(False, mine))
    bench.transactions.on_check(None, always(False, others))
    bench.begin(b"1")
    bench.begin(b"2", producer_group="other")
    bench.pass_ms(CHECK_AFTER_MS)
    assert ([m.body for m in mine], [m.body for m in others]) == ([b"1"], [b"2"])


def test_an_answer_that_cannot_be_carried_out_does_not_count(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a disk that is full for seven minutes would end in giving up what its producer had committed."""
    bench.transactions.on_check(GROUP, always(True))
    bench.begin(b"paid")
    now_ms = START_MS + CHECK_AFTER_MS
    with monkeypatch.context() as patch:
        patch.setattr(bench.parts.router, "copy", full)
        for _ in range(20):
            with pytest.raises(StoreFullError):
                bench.transactions.run_once(now_ms)
            now_ms += CHECK_EVERY_MS
    bench.transactions.run_once(now_ms)
    assert (bench.bodies(), bench.messages(TRANS_CHECK_TOPIC)) == ([b"paid"], [])


@pytest.mark.parametrize("closed", [False, True])
def test_a_clock_that_was_set_back_does_not_put_checks_off(bench: Bench, closed: bool) -> None:
    asked: list[Message] = []
    bench.begin()
    bench.settle()
    bench.clock.set_wall(START_MS - 86_400_000)
    if closed:
        bench.reopen()
    bench.transactions.on_check(GROUP, always(None, asked))
    bench.settle()
    assert len(asked) == 1, "age <= -1: asked at once"
    bench.pass_ms(CHECK_EVERY_MS)
    assert len(asked) == 2
