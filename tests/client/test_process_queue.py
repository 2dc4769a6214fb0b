"""What a consumer holds of a queue: positions, room, and the two ways of settling (clients#process-queue)."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore.client.processqueue import Limits, ProcessQueue
from mqstore.log.commitlog import QueueRef

Q = QueueRef("orders", 0)
MIB = 1 << 20


def sized(messages: Sequence[Any]) -> int:
    return sum(message.size for message in messages)


def messages(*offsets: int, size: int = 123) -> list[Any]:
    return [SimpleNamespace(offset=offset, size=size) for offset in offsets]


def queue_at(offset: int, **limits: Any) -> ProcessQueue:
    return ProcessQueue(Q, offset, 0, Limits(**limits), size_of=sized)


# --- positions -----------------------------------------------------------------------------------------------------


def test_the_positions_of_clients_process_queue() -> None:
    """clients#process-queue: put 100-109; settled one by one out of order, then the rest."""
    queue = queue_at(100)
    queue.put(messages(*range(100, 110)), 110)

    assert [queue.remove(messages(offset)) for offset in (103, 100, 101, 102, 109, 104)] == [
        100,
        101,
        102,
        104,
        104,
        105,
    ]
    assert queue.remove(messages(*range(105, 109))) == 110
    assert queue.remove(messages(105)) == -1  # nothing was there to settle


def test_what_is_pulled_twice_counts_once_and_is_replaced() -> None:
    queue = queue_at(0)
    queue.put(messages(0, 1, 2), 3)
    again = messages(1, 2, 3)
    queue.put(again, 4)

    assert (len(queue), queue.info(0).size) == (4, 4 * 123)
    assert queue.take(2)[1] is again[0]


def test_a_filtered_end_of_a_pull_is_part_of_the_position_once_all_before_it_is_settled() -> None:
    queue = queue_at(0)
    queue.put(messages(2, 5), 20)

    assert queue.position() == 2
    assert queue.remove(messages(5)) == 2
    assert queue.remove(messages(2)) == 20
    queue.put((), 30)
    assert queue.position() == 30


def test_the_size_vectors_of_rocketmq_s_test() -> None:
    """102 400 messages of 123 bytes."""
    queue = queue_at(0)
    queue.put(messages(*range(102_400)), 102_400)

    shown = [queue.info(0).size // MIB]
    for number in (10_000, 10_000, 80_000):
        queue.remove(queue.take(number))
        shown.append(queue.info(0).size // MIB)

    assert shown == [12, 10, 9, 0]


def test_what_is_taken_counts_until_it_is_removed() -> None:
    """What is taken and committed leaves the count (clients#process-queue)."""
    queue = queue_at(0)
    queue.put(messages(*range(100)), 100)
    taken = queue.take(10)
    assert (len(queue), queue.info(0).taken) == (100, 10)  # what is taken still counts
    assert queue.remove(taken) == 10
    assert (len(queue), queue.info(0).size) == (90, 90 * 123)
    assert queue.remove(messages(99)) == 10
    assert (len(queue), queue.info(0).size) == (89, 89 * 123)


def test_what_comes_again_comes_first_and_in_order() -> None:
    queue = queue_at(0)
    queue.put(messages(*range(6)), 6)
    batch = queue.take(4)
    queue.again([batch[3], batch[1]])

    assert queue.position() == 0
    assert queue.remove([batch[0], batch[2]]) == 1
    assert [message.offset for message in queue.take(9)] == [1, 3, 4, 5]
    assert [message.offset for message in queue.rollback()] == [1, 3, 4, 5]
    assert [message.offset for message in queue.take(2)] == [1, 3]
    assert queue.remove(messages(1, 4)) == 3  # 4 was given back, and is done all the same
    assert queue.remove(messages(3)) == 5


def test_one_worker_at_a_time_for_who_takes() -> None:
    queue = queue_at(0)
    assert not queue.put((), 0)  # nothing to be at
    assert queue.put(messages(0), 1)
    assert not queue.put(messages(1), 2)  # somebody is
    taken = queue.take(2)
    assert len(taken) == 2
    queue.remove(taken)
    assert queue.take(2) == []  # and is no longer
    assert queue.put(messages(2), 3)


def test_clear_leaves_nothing() -> None:
    queue = queue_at(0)
    queue.put(messages(0, 1, 2), 3)
    queue.take(1)
    queue.clear()
    assert (len(queue), queue.info(0).size, queue.info(0).taken) == (0, 0, 0)
    assert not queue.contains(messages(1)[0])


def test_info_tells_what_is_held() -> None:
    queue = queue_at(10)
    assert queue.info(5).first is None
    queue.put(messages(10, 12), 20)
    queue.take(1)
    queue.remove((), 1_000)
    info = queue.info(1_250)
    assert (info.queue, info.messages, info.size, info.first, info.taken, info.next_offset, info.idle_ms) == (
        Q,
        2,
        246,
        10,
        1,
        20,
        250,
    )


# --- room ----------------------------------------------------------------------------------------------------------


def test_there_is_room_for_as_many_as_are_missing() -> None:
    queue = queue_at(0, messages=10, size=10_000)
    assert queue.room() == (10, 10_000)
    queue.put(messages(0, 1, 2), 3)
    assert queue.room() == (7, 10_000 - 3 * 123)
    assert not queue.throttled


@pytest.mark.parametrize(
    ("limits", "offsets"),
    [({"messages": 3}, (0, 1, 2)), ({"size": 3 * 123}, (0, 1, 2)), ({"span": 9}, (0, 10))],
    ids=["messages", "bytes", "span"],
)
def test_a_full_queue_says_once_when_it_has_room_again(limits: dict[str, int], offsets: tuple[int, ...]) -> None:
    queue = queue_at(0, **limits)
    queue.put(messages(*offsets), offsets[-1] + 1)
    assert not queue.begins_to_have_room()  # nobody was refused
    assert queue.room() == (0, 0)
    assert queue.throttled
    assert not queue.begins_to_have_room()
    queue.remove(messages(*offsets))
    assert queue.begins_to_have_room()
    assert not queue.begins_to_have_room()


def test_a_span_at_its_limit_is_none_beyond_it() -> None:
    queue = queue_at(0, span=9)
    queue.put(messages(0, 9), 10)
    assert queue.room()[0] > 0
    queue.put(messages(10), 11)
    assert queue.room() == (0, 0)


def test_without_a_span_only_number_and_bytes_count() -> None:
    queue = queue_at(0, span=None)
    queue.put(messages(0, 100_000), 100_001)
    assert queue.room()[0] == 998


def test_a_pause_ends_when_it_is_worth_a_pull() -> None:
    """At half of a small cache, at 256 places of a large one."""
    for number, free in ((10, 5), (1_000, 256)):
        queue = queue_at(0, messages=number, span=None)
        queue.put(messages(*range(number)), number)
        assert queue.room() == (0, 0)
        queue.remove(messages(*range(free - 1)))
        assert not queue.begins_to_have_room()
        queue.remove(messages(free - 1))
        assert queue.begins_to_have_room()


def test_what_comes_back_in_pieces_stays_in_order() -> None:
    queue = queue_at(5)
    queue.put(messages(5, 6, 7), 8)
    queue.take(2)
    queue.again(messages(5))
    assert [message.offset for message in queue.take(2)] == [5, 7]
    assert queue.position() == 5
    queue.again(messages(5))
    queue.again(messages(6))
    assert queue.position() == 5
    assert [message.offset for message in queue.take(9)] == [5, 6]


# --- what the queues of a topic hold together ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "queues", "messages_max", "size_max"),
    [
        ({"messages": 65_535, "total": 1024}, 1, 1024, 100 << 20),
        ({"messages": 65_535, "total": 1024}, 2, 512, 100 << 20),
        ({"messages": 65_535, "total": 1024}, 3, 341, 100 << 20),
        ({"messages": 400, "total": 1024}, 2, 400, 100 << 20),
        ({"total": 2}, 3, 1, 100 << 20),
        ({"total_size": 30 << 20}, 3, 1000, 10 << 20),
        ({"total_size": 1 << 40}, 3, 1000, 100 << 20),
        ({}, 3, 1000, 100 << 20),
    ],
    ids=str,
)
def test_a_total_is_divided_into_equal_parts(
    limits: dict[str, int], queues: int, messages_max: int, size_max: int
) -> None:
    """clients#topic-limits, and that the limit of a queue holds beside it."""
    share = Limits(**limits).divided(queues)
    assert (share.messages, share.size) == (messages_max, size_max)


def test_a_smaller_limit_waits_for_what_is_beyond_it_and_a_larger_one_counts_at_once() -> None:
    queue = queue_at(0, messages=4, span=None)
    queue.put(messages(0, 1, 2), 3)
    queue.limits = Limits(messages=2, span=None)
    assert queue.room() == (0, 0)
    queue.remove(messages(0))
    assert not queue.begins_to_have_room()
    queue.limits = Limits(messages=3, span=None)
    assert queue.room()[0] == 1
    queue.limits = Limits(messages=2, span=None)
    assert queue.room() == (0, 0)
    queue.limits = Limits(messages=10, span=None)
    assert queue.begins_to_have_room()


# --- any order, against a set --------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(["put", "gap", "take", "remove", "again"]), max_size=40), st.data())
def test_the_position_is_the_lowest_offset_that_is_not_settled(steps: list[str], data: st.DataObject) -> None:
    queue, next_offset, previous = queue_at(5), 5, 5
    waiting: set[int] = set()
    taken: set[int] = set()
    for step in steps:
        if step == "put":
            number = data.draw(st.integers(1, 4))
            new = range(next_offset, next_offset + number)
            next_offset += number
            queue.put(messages(*new), next_offset)
            waiting.update(new)
        elif step == "gap":
            next_offset += 3
            queue.put((), next_offset)
        elif step == "take":
            got = {message.offset for message in queue.take(2)}
            assert got == set(sorted(waiting)[:2])
            waiting -= got
            taken |= got
        else:
            pool = waiting | taken if step == "remove" else taken
            some = set(data.draw(st.lists(st.sampled_from(sorted(pool)), unique=True))) if pool else set()
            {"remove": queue.remove, "again": queue.again}[step](messages(*sorted(some)))
            waiting -= some
            taken -= some
            if step == "again":
                waiting |= some
        position = queue.position()
        assert position == min(waiting | taken, default=next_offset)
        assert position >= previous or step == "again"
        assert (len(queue), queue.info(0).size) == (len(waiting) + len(taken), 123 * (len(waiting) + len(taken)))
        previous = position
