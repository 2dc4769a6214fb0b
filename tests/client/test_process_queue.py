"""Cache of one queue (clients#process-queue): the parts of its order that no consumer shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mqstore import QueueRef
from mqstore.client.push.processqueue import ProcessQueue


def messages(*offsets: int) -> list[Any]:
    return [SimpleNamespace(offset=offset, size=123) for offset in offsets]


@pytest.fixture
def queue() -> ProcessQueue:
    queue = ProcessQueue(QueueRef("orders", 0), 5, 0)
    queue.put(messages(5, 6, 7), 8)
    return queue


def test_messages_that_are_put_back_in_parts_stay_in_order(queue: ProcessQueue) -> None:
    queue.take(2)
    queue.again(messages(5))
    assert [message.offset for message in queue.take(2)] == [5, 7]
    assert queue.position() == 5
    queue.again(messages(5))
    queue.again(messages(6))
    assert queue.position() == 5
    assert [message.offset for message in queue.take(9)] == [5, 6]


def test_cleared_queue_has_nothing_to_send_back(queue: ProcessQueue) -> None:
    queue.take(1)
    queue.clear()
    assert (len(queue), queue.info(0).size, queue.info(0).taken) == (0, 0, 0)
    assert not queue.contains(messages(6)[0])
