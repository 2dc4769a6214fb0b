"""The whole life of a message that nobody can consume: 17 attempts, 34 records, one dead letter (delivery#send-back).

Held against delivery#backoff's table of delays, typed in again, with the real delay service and a clock moved by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore import Message, RetryPolicy
from tests.broker.support import START_MS, Bench

MINUTE = 60
DELAYS_S = [10, 30, *(MINUTE * n for n in range(1, 11)), 20 * MINUTE, 30 * MINUTE, 60 * MINUTE, 120 * MINUTE]
"""What the 1st, 2nd, ... failure waits for, in seconds."""
ATTEMPTS = 17


class Life(Bench):
    """A broker, and a consumer that reads topic `orders` and the retry topic, and fails."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.read = {"orders": 0, "%RETRY%g": 0}

    def arrived(self) -> list[Message]:
        """What is there to be consumed and was not seen yet."""
        found: list[Message] = []
        for topic, offset in self.read.items():
            if self.broker.store.offsets_or_none(topic, 0) is not None:
                messages = self.broker.store.read(topic, 0, offset, 1000)
                self.read[topic] += len(messages)
                found += messages
        return found


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    life = Life(tmp_path / "store")
    yield life
    life.broker.close()


def test_seventeen_attempts_at_the_times_of_the_table_then_one_dead_letter(life: Life) -> None:
    store = life.broker.store
    first = life.broker.put("orders", b"poison", queue_id=0, tag="t", unique_key="U")
    begin_ms, seen = life.clock.now_ms(), []
    for delay_s in [*DELAYS_S, None]:
        [message] = life.arrived()
        seen.append((message.attempt, (life.clock.now_ms() - begin_ms) // 1000))
        assert (message.body, message.tag, message.unique_key) == (b"poison", "t", "U")
        life.broker.send_back("g", message.physical_offset, reason="boom")
        if delay_s is not None:
            life.jump(delay_s * 1000 - 1)
            assert life.arrived() == [], "early"
            life.jump(1)
    elapsed_s = [sum(DELAYS_S[:i]) for i in range(ATTEMPTS)]
    assert seen == [(i + 1, elapsed_s[i]) for i in range(ATTEMPTS)]
    assert elapsed_s[-1] == ((4 * 60) + 45) * 60 + 40, "4:45:40"
    life.jump(3 * 7_200_000)
    assert life.arrived() == []
    [letter] = life.broker.dead_letters("g")
    properties = letter.stored_properties()
    assert (letter.body, letter.reconsume_times, properties["dlq_reason"]) == (b"poison", ATTEMPTS, "boom")
    assert (properties["RETRY_TOPIC"], properties["ORIGIN_MESSAGE_ID"]) == ("orders", first.message_id)
    numbers = [store.offsets(*ref)[1] for topic in store.topics() for ref in store.queues(topic)]
    assert sum(numbers) == 1 + 16 * 2 + 1

    assert life.broker.dead_letters("g").replay().count == 1
    copies = [message for ref in store.queues("orders") for message in store.read(*ref)]
    again = max(copies, key=lambda message: message.physical_offset)
    assert (again.unique_key, again.attempt, again.body) == ("U", 1, b"poison")


@given(data=st.data())
def test_failures_and_restarts_deliver_each_attempt_once(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A model of one message: (attempt, due) follows from the outcomes alone, whatever the store does in between."""
    life = Life(tmp_path_factory.mktemp("life") / "store")
    limit = data.draw(st.integers(1, 8), label="max_attempts")
    life.broker.groups.create("g", retry_policy=RetryPolicy(max_attempts=limit))
    life.broker.put("orders", b"x", queue_id=0, unique_key="U")
    attempt, due_ms, dead = 1, START_MS, False
    while not dead:
        ahead_ms = due_ms - life.clock.now_ms()
        if ahead_ms > 1 and data.draw(st.booleans(), label="restart while it waits"):
            life.jump(ahead_ms // 2)
            life.again()
            ahead_ms -= ahead_ms // 2
        if ahead_ms:
            life.jump(ahead_ms - 1)
            assert life.arrived() == []
            life.jump(1)
        [message] = life.arrived()
        assert (message.attempt, message.unique_key, message.body) == (attempt, "U", b"x")
        outcome = data.draw(st.sampled_from(["policy", "policy", "policy", "level", "success", "reject"]))
        if outcome == "success":
            break
        level = {"policy": 0, "level": data.draw(st.integers(1, 25)), "reject": -1}[outcome]
        life.broker.send_back("g", message.physical_offset, delay_level=level)
        dead = attempt >= limit or outcome == "reject"
        levels_s = [1, 5, *DELAYS_S]
        due_ms = life.clock.now_ms() + 1000 * levels_s[min(level or 2 + attempt, 18) - 1]
        attempt += 1
    life.jump(3 * 7_200_000)
    assert life.arrived() == []
    letters = [letter.reconsume_times for letter in life.broker.dead_letters("g")]
    assert letters == ([attempt - 1] if dead else [])
    life.broker.close()
