"""What a consumer holds of a queue: positions, room, and the two ways of settling (clients#process-queue)."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore import QueueRef
from mqstore.client.push.processqueue import Limits, ProcessQueue, QueueInfo

Q = QueueRef("orders", 0)


def sized(messages: Sequence[Any]) -> int:
    return sum(message.size for message in messages)


def messages(*offsets: int, size: int = 123) -> list[Any]:
    return [SimpleNamespace(offset=offset, size=size) for offset in offsets]


def queue_at(offset: int, **limits: Any) -> ProcessQueue:
    return ProcessQueue(Q, offset, 0, Limits(**limits), size_of=sized)


def test_message_pulled_twice_counts_once() -> None:
    queue = queue_at(0)
    queue.put(messages(0, 1, 2), 3)
    again = messages(1, 2, 3)
    queue.put(again, 4)

    assert (len(queue), queue.info(0).size) == (4, 4 * 123)
    assert queue.take(2)[1] is again[0]


def test_clear_leaves_nothing() -> None:
    queue = queue_at(0)
    queue.put(messages(0, 1, 2), 3)
    queue.take(1)
    queue.clear()
    assert (len(queue), queue.info(0).size, queue.info(0).taken) == (0, 0, 0)
    assert not queue.contains(messages(1)[0])


def test_info_shows_the_cache() -> None:
    queue = queue_at(10)
    assert queue.info(5).first is None
    queue.put(messages(10, 12), 20)
    queue.take(1)
    queue.remove((), 1_000)
    assert queue.info(1_250) == QueueInfo(Q, 2, 246, 10, 1, 20, False, 250)


# --- room ----------------------------------------------------------------------------------------------------------


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


def test_parts_stay_in_order() -> None:
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


def test_smaller_limit_drains_and_larger_counts_at_once() -> None:
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


@given(st.lists(st.sampled_from(["put", "gap", "take", "remove", "again", "rollback"]), max_size=40), st.data())
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
        elif step == "rollback":
            assert {message.offset for message in queue.rollback()} == taken
            waiting |= taken
            taken.clear()
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
        assert position >= previous or step in ("again", "rollback")
        assert (len(queue), queue.info(0).size) == (len(waiting) + len(taken), 123 * (len(waiting) + len(taken)))
        previous = position
    queue.remove(messages(*waiting, *taken))
    assert queue.remove(messages(0)) == -1  # nothing is there to settle
