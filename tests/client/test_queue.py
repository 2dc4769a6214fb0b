"""The persistent queue: verbs of `queue.Queue`, leases, attempts, the end. Redelivery by a clock moved by hand; what
blocks, with threads and short real times."""

from __future__ import annotations

import queue as standard
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import Queue, RetryPolicy, Store
from mqstore.errors import InvalidReceiptError, ReceiptExpiredError
from tests.broker.support import full
from tests.client import popsupport
from tests.client.support import ended, failing, in_thread, parked, until, waits_of


class Bench(popsupport.Bench):
    def queue(self, **options: Any) -> Queue:
        return self.store.queue("jobs", **options)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "store")
    yield bench
    bench.store.close()


def taken(queue: Queue) -> list[Any]:
    """All that is ready, settled."""
    values = []
    for task in queue:
        with task:
            values.append(task.value)
    return values


# -- the verbs of queue.Queue ----------------------------------------------------------------------------------------


def test_unfinished_items_are_counted(bench: Bench) -> None:
    queue = bench.queue()
    assert (queue.qsize(), len(queue), queue.empty(), queue.full()) == (0, 0, True, False)
    queue.put_many([b"a", b"b"])
    task = queue.get()
    assert (queue.qsize(), queue.empty()) == (2, False)
    task.ack()
    assert queue.qsize() == 1
    queue.get().nack(delay=5)
    assert queue.qsize() == 1
    bench.advance(5)
    assert queue.qsize() == 1
    assert taken(queue) == [b"b"]
    assert len(queue) == 0
    assert queue  # empty, but there


def test_nothing_to_get(bench: Bench) -> None:
    queue = bench.queue()
    for get in (queue.get_nowait, lambda: queue.get(block=False), lambda: queue.get(timeout=0)):
        with pytest.raises(standard.Empty):
            get()
    assert queue.get_many(5) == []
    with pytest.raises(mqstore.QueueEmpty, match="'jobs'"):
        queue.get(timeout=0.01)
    assert parked(bench.broker) == 0


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize(("verb", "left"), [("nack", 1), ("release", 1), ("reject", 0), ("ack", 0), ("extend", 0)])
def test_task_done_does_not_take_back_what_was_said_of_the_item(
    bench: Bench, ordered: bool, here: bool, verb: str, left: int
) -> None:
    """As of a loop whose `finally` calls it after a nack: the item comes again."""
    queue = bench.queue(ordered=ordered)
    queue.put(b"a")
    task = queue.get()
    say = partial(getattr(task, verb), *[5] * (verb in ("nack", "extend")))
    say() if here else in_thread(say)[0].join()
    if verb in ("ack", "extend"):
        queue.task_done()
    else:
        with pytest.raises(ReceiptExpiredError):
            queue.task_done()
    bench.advance(5)
    assert (taken(queue), len(queue.dead_letters)) == ([b"a"] * left, verb == "reject")


def test_ack_of_several_settles_none_if_one_is_not_a_receipt(bench: Bench) -> None:
    queue = bench.queue()
    queue.put_many([b"a", b"b"])
    first, last = bench.broker.pop("jobs", "jobs", 2)
    with pytest.raises(InvalidReceiptError):
        bench.broker.ack("jobs", "jobs", [first.receipt, "no", last.receipt])
    assert queue.counts()["leased"] == 2


def test_task_done_is_for_what_the_thread_got_last(bench: Bench) -> None:
    queue = bench.queue()
    with pytest.raises(ValueError, match="task_done"):
        queue.task_done()
    queue.put_many([b"a", b"b"])
    first = queue.get()
    assert isinstance(ended(*in_thread(queue.task_done)), ValueError)
    queue.task_done()
    with pytest.raises(ValueError, match="task_done"):
        queue.task_done()
    assert queue.qsize() == 1
    first.ack()  # again is harmless
    assert taken(queue) == [b"b"]


def test_get_with_a_visibility_takes_prefetched_items(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = bench.queue()
    queue.put_many([b"%d" % n for n in range(60)])
    pop, pops = bench.broker.pop, []
    monkeypatch.setattr(bench.broker, "pop", lambda *request, **options: pops.append(1) or pop(*request, **options))
    tasks = [queue.get() for _ in range(30)]
    usual = len(pops)
    tasks += [queue.get(visibility=5) for _ in range(30)]
    assert len(pops) < 2 * usual + 10  # items are prefetched in batches
    bench.advance(5)
    assert [task.value for task in tasks] == [b"%d" % n for n in range(60)]
    assert taken(queue) == [b"%d" % n for n in range(30, 60)]


def test_get_acknowledges_tasks_that_are_done(store: Store) -> None:
    queue, other = store.queue("jobs"), store.queue("other")
    queue.put_many([b"1", b"2", b"3", b"4"])
    other.put(b"else")
    first, foreign = queue.get(), other.get()
    second = queue.get(done=[first, foreign])
    assert (first.settled, foreign.settled, second.value, queue.qsize(), other.qsize()) == (True, True, b"2", 3, 0)
    rest = queue.get_many(5, done=[first, second])  # one again
    assert [task.value for task in rest] == [b"3", b"4"]
    assert queue.get_many(5, done=rest) == []
    assert queue.qsize() == 0


def test_get_takes_nothing_if_a_done_task_was_settled_otherwise(store: Store) -> None:
    queue = store.queue("jobs")
    queue.put_many([b"1", b"2"])
    failed = queue.get()
    failed.nack(delay=60)
    with pytest.raises(mqstore.errors.ReceiptExpiredError):
        queue.get(done=[failed])
    assert queue.get(block=False).value == b"2"


def test_get_acknowledges_although_nothing_is_left(store: Store) -> None:
    queue = store.queue("jobs")
    queue.put(b"1")
    with pytest.raises(mqstore.QueueEmpty):
        queue.get(block=False, done=[queue.get()])
    assert queue.qsize() == 0


def test_ctrl_c_in_the_wait_gives_the_turn_to_another(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = bench.queue()
    called: list[str] = []

    def interrupted(bell: Any, timeout_s: float) -> None:
        queue._when_ready(lambda: called.append("another"))
        queue.put(b"a")
        bench.advance(0)  # it is called for the one who waits
        assert called == []
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mqstore.signalsafe.Bell.wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            queue.get()
    bench.advance(0)
    assert called == ["another"]
    assert parked(bench.broker) == 0


def test_join_waits_for_the_last_ack(store: Store) -> None:
    queue = store.queue("jobs")
    assert queue.join(timeout=0)
    queue.put(b"a")
    task = queue.get()
    assert not queue.join(timeout=0.02)
    waiting = in_thread(queue.join)
    task.ack()
    assert ended(*waiting) is True


@pytest.mark.parametrize("delays_s", [[0.2], [1], [1.3], [60], [2.9, 2.1], [0.3, 7, 4]])
def test_join_is_not_over_before_what_was_delayed_has_come(bench: Bench, delays_s: list[float]) -> None:
    """An item comes at the end of the second in which it is due. To `join` it was gone between the two."""
    queue, other = bench.queue(), bench.queue()
    for delay_s in delays_s:
        other.put(b"later", delay=delay_s)
    for _ in delays_s:
        while not (tasks := queue.get_many(1)):
            assert not queue.join(timeout=0)
            bench.advance(0.1)
        assert not queue.join(timeout=0)
        tasks[0].ack()
    assert queue.join(timeout=0)


@pytest.mark.parametrize("wait", [lambda queue: queue.put(b"b"), lambda queue: queue.join()])
def test_join_ends_with_a_closed_store(store: Store, wait: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = store.queue("jobs", maxsize=1)
    queue.put(b"a")
    looked, lag = threading.Event(), store.broker.lag
    monkeypatch.setattr(store.broker, "lag", lambda group: (looked.set(), lag(group))[1])
    waiting = in_thread(lambda: wait(queue))
    assert looked.wait(20)
    store.close()
    assert isinstance(ended(*waiting), mqstore.errors.StoreClosedError)
    assert isinstance(ended(*in_thread(lambda: wait(queue))), mqstore.errors.StoreClosedError)  # and who comes later


# -- room ------------------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses(bench: Bench) -> None:
    queue = bench.queue(maxsize=2)
    queue.put_many([b"a", b"b"])
    assert queue.full()
    for put in (lambda: queue.put_nowait(b"c"), lambda: queue.put(b"c", timeout=0.01), lambda: queue.put_many([b"c"])):
        with pytest.raises(standard.Full):
            put()
    task = queue.get()
    with pytest.raises(mqstore.QueueFull):  # on lease is not done
        queue.put_nowait(b"c")
    task.ack()
    with pytest.raises(mqstore.QueueFull):
        queue.put_many([b"c", b"d"])  # all or none
    queue.put(b"c")
    assert taken(queue) == [b"b", b"c"]


def test_many_putters_never_put_too_much(store: Store) -> None:
    queue = store.queue("jobs", maxsize=3)
    threads = [in_thread(lambda: [queue.put(b"x") for _ in range(20)]) for _ in range(4)]
    most = done = 0
    while done < 80:
        with queue.get(timeout=20):
            most = max(most, queue.qsize())
        done += 1
    for each in threads:
        ended(*each)
    assert most <= 3


# -- leases -----------------------------------------------------------------------------------------------------------


def test_too_long_pause_is_shortened_and_logged(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with bench.queue() as queue:
        for body in b"a", b"b", b"c":
            queue.put(body)
        for task in queue.get_many(3):
            with task:
                raise mqstore.Retry(delay=13 * 3600)
        assert caplog.text.count("the longest delay here is 43200 s") == 1
        bench.clock.advance(12 * 3_600_000)
        bench.settle()
        assert taken(queue) == [b"a", b"b", b"c"]
        caplog.clear()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("group jobs: 2 more were held back like this")


def test_many_at_once(bench: Bench) -> None:
    queue = bench.queue()
    queue.put_many(b"%d" % i for i in range(100))
    tasks = queue.get_many(70)
    assert [task.value for task in tasks] == [b"%d" % i for i in range(70)]
    for task in tasks[1:]:
        task.ack()
    assert queue.qsize() == 31
    assert len(queue.get_many(1000)) == 30


def test_partial_get_many_is_returned(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = bench.queue()
    queue.put_many(b"%d" % i for i in range(40))
    busy = mqstore.errors.StoreBusyError("not now")
    monkeypatch.setattr(bench.broker, "pop", failing(bench.broker.pop, None, busy, busy))
    assert len(queue.get_many(40)) == 32
    with pytest.raises(mqstore.errors.StoreBusyError):
        queue.get_many(40)


# -- order -----------------------------------------------------------------------------------------------------------


def test_an_ordered_queue_gives_a_batch_in_order(bench: Bench) -> None:
    queue = bench.queue(ordered=True)
    queue.put_many(b"%d" % i for i in range(50))
    tasks = queue.get_many(50)
    assert [task.value for task in tasks] == [b"%d" % i for i in range(len(tasks))]
    for task in tasks:
        task.ack()
    rest = queue.get_many(50)
    assert [task.value for task in tasks + rest] == [b"%d" % i for i in range(50)]


@pytest.mark.parametrize("one_by_one", [False, True])
def test_acked_items_behind_a_failed_one_stay_done(bench: Bench, one_by_one: bool) -> None:
    """The whole batch came again, acknowledged or not: work that was done was done once more."""
    queue = bench.queue(ordered=True, retry=RetryPolicy(5, [10]))
    queue.put_many([b"a", b"b", b"c", b"d"])
    a, b, c = queue.get_many(3)
    b.ack()
    c.nack()
    a.nack()
    assert queue.get_many(3) == []  # nothing passes what waits for its next attempt
    bench.advance(10)
    again = []
    while not queue.empty():
        tasks = [queue.get_nowait()] if one_by_one else queue.get_many(4)
        for task in tasks:
            again.append((task.value, task.attempt))
            task.ack()
    assert again == [(b"a", 2), (b"c", 2), (b"d", 1)]


def test_acked_items_behind_a_failed_one_survive_a_restart(bench: Bench) -> None:
    queue = bench.queue(ordered=True, retry=RetryPolicy(5, [10]))
    queue.put_many([b"a", b"b", b"c"])
    a, b, c = queue.get_many(3)
    b.ack()
    c.reject("bad")
    a.nack()
    bench.store.close()
    bench.open()
    bench.advance(10)
    assert taken(bench.queue(ordered=True)) == [b"a"]
    assert bench.broker.committed("jobs", "jobs", 0) == 3


# -- items -----------------------------------------------------------------------------------------------------------


def test_an_item_that_the_codec_refuses_stores_nothing(bench: Bench) -> None:
    queue = bench.queue()
    for put in (lambda: queue.put("text"), lambda: queue.put_many([b"good", "bad"])):
        with pytest.raises(mqstore.errors.InvalidMessageError, match="codec"):
            put()
    assert queue.empty()


# -- what it is on disk ----------------------------------------------------------------------------------------------


def test_retention_keeps_what_was_never_got(bench: Bench) -> None:
    queue = bench.queue()
    queue.put(b"a")
    assert bench.broker.committed("jobs", "jobs", 0) == 0


# -- the end ---------------------------------------------------------------------------------------------------------


def test_shutdown_lets_what_is_there_be_taken(bench: Bench) -> None:
    queue = bench.queue()
    queue.put_many([b"a", b"b"])
    task = queue.get()
    queue.shutdown()
    for put in (lambda: queue.put(b"c"), lambda: queue.put_many([b"c"])):
        with pytest.raises(mqstore.QueueShutDown):
            put()
    assert queue.get().value == b"b"
    with pytest.raises(mqstore.QueueShutDown):
        queue.get()
    task.ack()
    assert queue.qsize() == 1


def test_immediate_shutdown_gives_nothing_more_and_loses_nothing(bench: Bench) -> None:
    queue = bench.queue()
    queue.put(b"a")
    queue.shutdown(immediate=True)
    queue.shutdown()  # no way back
    with pytest.raises(mqstore.QueueShutDown):
        queue.get()
    assert list(queue) == []
    assert taken(bench.queue()) == [b"a"]


def test_join_does_not_wait_for_what_an_immediate_shutdown_left_there(store: Store) -> None:
    """Nobody takes it any more: it waited for ever, where the standard library's returns."""
    queue = store.queue("jobs")
    queue.put_many([b"a", b"b"])
    task = queue.get()
    joining = in_thread(queue.join)
    queue.shutdown()
    time.sleep(0.01)
    assert joining[0].is_alive()  # what is there may still be taken
    queue.shutdown(immediate=True)
    assert ended(*joining) is False
    assert queue.join() is False
    task.ack()
    with store.queue("jobs") as other:
        other.get().ack()
    assert queue.join() is True


@pytest.mark.parametrize("immediate", [False, True])
def test_shutdown_wakes_who_waits_for_room(store: Store, immediate: bool) -> None:
    queue = store.queue("jobs", maxsize=1)
    queue.put(b"a")
    putting = in_thread(lambda: queue.put(b"b"))
    queue.shutdown(immediate)
    assert isinstance(ended(*putting), mqstore.QueueShutDown)
    assert queue.qsize() == 1


def test_as_a_context_it_is_shut_at_the_end(bench: Bench) -> None:
    with bench.queue() as queue:
        queue.put(b"a")
    for verb in (lambda: queue.put(b"b"), queue.get):  # nothing is given out either
        with pytest.raises(mqstore.QueueShutDown):
            verb()


# -- misuse ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("earlier", ["messages", "queue", "nothing"])
def test_all_queues_of_an_older_topic_are_read(bench: Bench, earlier: str) -> None:
    """A producer made the topic before `store.queue`, with four queues, and the queue was refused."""
    if earlier == "queue":  # which somebody gave more queues
        bench.queue()
        bench.broker.topics.alter("jobs", queues=4)
    else:
        bench.broker.topics.create("jobs", queues=4)
    if earlier != "nothing":
        for i in range(8):
            bench.broker.put("jobs", b"%d" % i, queue_id=i % 4)
    queue = bench.queue()
    queue.put(b"8")
    queue.put_many([b"9"])
    expected = [b"%d" % i for i in range(8 if earlier == "nothing" else 0, 10)]
    assert queue.qsize() == len(expected)
    queue.get().nack(delay=0)
    bench.advance(1)
    assert queue.qsize() == len(expected)
    assert sorted(taken(queue)) == expected
    assert queue.join(0)


def test_queues_of_an_older_topic_are_read_in_turn(bench: Bench) -> None:
    bench.broker.topics.create("jobs", queues=4)
    for queue_id in range(4):
        bench.broker.put_many("jobs", [b"%d" % queue_id] * 100, queue_id=queue_id)
    queue = bench.queue()
    assert {queue.get().value for _ in range(100)} == {b"0", b"1", b"2", b"3"}


def test_bad_arguments_take_nothing(bench: Bench) -> None:
    queue = bench.queue()
    queue.put(b"a")
    for wrong in (
        lambda: queue.get_many(0),
        lambda: queue.get(visibility=0),
        lambda: queue.get(timeout=-1),
        lambda: queue.put(b"b", delay=-1),
    ):
        with pytest.raises(mqstore.MQStoreError):
            wrong()
    assert taken(queue) == [b"a"]


# -- all together ----------------------------------------------------------------------------------------------------


def test_workers_that_fail_now_and_then_do_everything(store: Store) -> None:
    queue = store.queue("jobs", retry=RetryPolicy(None, [0]), codec=mqstore.JSON, maxsize=64)
    done: list[int] = []
    lock = threading.Lock()

    def work() -> None:
        while True:
            try:
                task = queue.get()
            except mqstore.QueueShutDown:
                return
            try:
                with task:
                    number = task.value
                    if (number * 7 + task.attempt) % 5 == 0:
                        raise RuntimeError("now and then")
                    with lock:
                        done.append(number)
            except RuntimeError:
                pass

    workers = [in_thread(work) for _ in range(4)]
    putters = [in_thread(lambda start=start: [queue.put(start + i) for i in range(100)]) for start in (0, 100, 200)]
    for each in putters:
        ended(*each)
    assert queue.join(timeout=60)
    queue.shutdown()
    for each in workers:
        assert ended(*each) is None
    assert sorted(done) == list(range(300))
    assert list(queue.dead_letters) == []


# -- two objects, one queue --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [False, True])
def test_a_queue_is_ordered_for_all_or_for_none(bench: Bench, ordered: bool) -> None:
    """Two that disagree would overtake each other, and nobody would be told."""
    queue = bench.queue(ordered=ordered)
    queue.put(b"a")
    for _ in range(2):
        with pytest.raises(mqstore.errors.ConfigError, match=f"give ordered={ordered}, .*alter"):
            bench.queue(ordered=not ordered)
        assert bench.queue(ordered=ordered).qsize() == 1
        bench.store.close()
        bench.open()


def test_shut_queue_passes_the_turn(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = store.queue("jobs"), store.queue("jobs")
    called, go_on = threading.Event(), threading.Event()
    wait = waits_of(first).wait

    def slow(*arguments: Any) -> str | None:
        turn = wait(*arguments)
        called.set()
        assert go_on.wait(20)
        return turn

    monkeypatch.setattr(waits_of(first), "wait", slow)
    shut = in_thread(first.get)
    until(lambda: parked(store.broker) == 1)
    lucky = in_thread(second.get)
    until(lambda: parked(store.broker) == 2)
    second.put(b"a")  # the first one's turn: it was there before
    assert called.wait(20)
    first.shutdown(immediate=True)
    go_on.set()
    assert isinstance(ended(*shut), mqstore.QueueShutDown)
    assert ended(*lucky).value == b"a"


def test_task_done_may_be_said_again_when_the_disk_was_full(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = bench.queue()
    queue.put(b"a")
    queue.get()
    with monkeypatch.context() as patch:
        for name in ("ack", "ack_at_once"):
            patch.setattr(bench.broker, name, full)
        with pytest.raises(mqstore.errors.StoreFullError):
            queue.task_done()
    queue.task_done()
    assert queue.empty()
    with pytest.raises(ValueError, match="no item"):
        queue.task_done()


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_interrupted_get_many_releases_its_items(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """By Ctrl-C, or by what a signal handler raises."""
    queue = bench.queue()
    queue.put_many([b"%d" % i for i in range(40)])
    with monkeypatch.context() as patch:
        patch.setattr(bench.broker, "pop", failing(bench.broker.pop, None, error()))
        with pytest.raises(error):
            queue.get_many(40)
    tasks = queue.get_many(40)
    assert sorted(int(task.value) for task in tasks) == list(range(40))
    assert {task.attempt for task in tasks} == {1}


def test_shutdown_hides_a_later_close(tmp_path: Path) -> None:
    """A worker that was not waiting just then found the store closed, where its loop expects `QueueShutDown`."""
    store = mqstore.open(tmp_path / "s")
    queue, other = store.queue("a"), store.queue("b")
    queue.put(b"x")
    queue.shutdown()
    store.close()
    with pytest.raises(mqstore.QueueShutDown):
        queue.get()
    with pytest.raises(mqstore.QueueShutDown):
        queue.get_many(3, timeout=1)
    with pytest.raises(mqstore.errors.StoreClosedError):
        other.get()
