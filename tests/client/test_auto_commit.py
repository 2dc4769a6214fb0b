"""Ordered consumers with `auto_commit=False`: what COMMIT settles and ROLLBACK brings again, beside a model
(clients#auto-commit).

The model is that of RocketMQ's orderly consumer with autoCommit=false: success settles nothing, COMMIT settles what was
taken since the last one, ROLLBACK brings it again, a failure brings only its message again. A bound is new: RocketMQ's
consumer stands still when its cache is full of messages that were not committed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import mqstore
from mqstore import COMMIT, ROLLBACK, Message, PushConsumer, Reject, Retry, RetryPolicy, aio
from mqstore.errors import ConfigError
from tests.children import in_child
from tests.client.aiosupport import in_store, until
from tests.client.orderlysupport import Bench
from tests.client.pushsupport import hook

NUMBER = 12


@dataclass
class Model:
    """One queue of 12 messages, and the calls that its handler must get."""

    prefetch: int
    committed: int = 0
    next: int = 0
    calls: list[int] = field(default_factory=list)

    def run(self, decisions: Sequence[str]) -> None:
        for decision in decisions:
            if self.next == NUMBER:
                return
            self.calls.append(self.next)
            if decision in ("commit", "go"):
                self.next += 1
            if decision == "commit":
                self.committed = self.next
            if decision == "rollback" or self.next - self.committed >= self.prefetch:
                self.next = self.committed

    def restart(self) -> None:
        """Continue where it was committed, for the message in hand too."""
        if self.next < NUMBER:
            self.calls.append(self.next)
        self.next = self.committed


DECISIONS = st.lists(st.sampled_from(["go", "go", "go", "commit", "rollback", "fail"]), max_size=12)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    parts=st.lists(st.tuples(DECISIONS, st.sampled_from(["leave", "kill"])), max_size=3),
    prefetch=st.integers(1, 14),
    broadcasts=st.booleans(),
)
@example(parts=[(["fail", "commit", "go", "go", "go", "commit", "go"], "kill")], prefetch=4, broadcasts=False)
def test_settlement_and_redelivery_agree_with_the_model(
    parts: list[tuple[list[str], str]], prefetch: int, broadcasts: bool
) -> None:
    model = Model(prefetch)
    calls: list[int] = []
    script: list[str] = []
    options: dict[str, Any] = {"model": "broadcasting"} if broadcasts else {}
    ends = False

    def handle(message: Message) -> object:
        calls.append(message.offset)
        if not script:
            if ends:
                return COMMIT
            raise Retry(60)
        decision = script.pop(0)
        if decision == "fail":
            raise Retry(0.01)
        return {"commit": COMMIT, "rollback": ROLLBACK, "go": "anything"}[decision]

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("mqstore.client.push.orderly.AGAIN_MS", 10)
        bench = Bench(Path(folder) / "mq")
        try:
            bench.put(*map(str, range(NUMBER)))

            def run() -> PushConsumer:
                consumer = bench.join(
                    handler=handle, auto_commit=False, prefetch=prefetch, suspend=0.01, consume_timeout=1000, **options
                )
                bench.advance(1)
                return consumer

            for decisions, then in parts:
                script[:] = decisions
                model.run(decisions)
                consumer = run()
                model.restart()
                assert calls == model.calls
                if not broadcasts:
                    assert bench.committed() == model.committed
                if then == "leave":
                    assert bench.leave(consumer)
                else:
                    bench.kill()
                    bench.open()
            script.clear()
            ends = True
            model.run(["commit"] * NUMBER)
            run()
            assert calls == model.calls
            assert model.committed == NUMBER
        finally:
            bench.close()


@pytest.fixture
def bench(tmp_path: Path) -> Any:
    bench = Bench(tmp_path / "mq")
    yield bench
    bench.close()


@pytest.mark.parametrize("killed_at", [1, 2, 4])
def test_kill_brings_again_exactly_what_was_not_committed(tmp_path: Path, killed_at: int) -> None:
    """Positions are saved within 100 ms otherwise, and a kill would bring committed messages again."""

    def decides(message: Message) -> object:
        return COMMIT if message.offset % 3 == 1 else None

    def work() -> None:
        with mqstore.open(tmp_path / "mq") as store:
            store.create_topic("t", queues=1)
            store.put_many("t", [b"m"] * 8)
            consumer = store.push_consumer("g", ordered=True, auto_commit=False, workers=1)

            def handle(message: Message) -> object:
                if message.offset == killed_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return decides(message)

            consumer.subscribe("t", handle)
            consumer.run()

    assert in_child(work) == -signal.SIGKILL
    seen: list[tuple[int, int]] = []
    done = threading.Event()

    def handle(message: Message) -> object:
        seen.append((message.offset, message.attempt))
        if message.offset == 7:
            done.set()
        return decides(message)

    with mqstore.open(tmp_path / "mq") as store:
        consumer = store.push_consumer("g", ordered=True, auto_commit=False, workers=1)
        consumer.subscribe("t", handle)
        with consumer:
            assert done.wait(20)
        committed = (killed_at + 1) // 3 * 3 - 1 if killed_at > 1 else 0
        assert seen == [(offset, 1 + (offset == killed_at)) for offset in range(committed, 8)]
        assert store.broker.committed("g", "t", 0) == 8


def test_decision_of_a_batch_is_about_all_its_messages(bench: Bench) -> None:
    decisions = iter([None, ROLLBACK, None, COMMIT, ROLLBACK, COMMIT])
    bench.put(*"012345")
    bench.join(handler=lambda messages: next(decisions), auto_commit=False, batch_size=2, suspend=0.01)
    bench.advance(1)
    assert bench.bodies == list("0123" + "0123" + "45" + "45")
    assert {attempt for _, attempt in bench.attempts} == {1}
    assert bench.committed() == 6


def test_rejected_message_is_a_dead_letter_once_despite_rollback(bench: Bench) -> None:
    def handle(message: Message) -> object:
        if message.text() == "1":
            raise Reject("odd")
        return ROLLBACK if message.text() == "3" and len(bench.calls) < 5 else COMMIT if message.text() == "3" else None

    bench.put(*"0123")
    bench.join(handler=handle, auto_commit=False, suspend=0.01, retry=RetryPolicy(3, [1]))
    bench.advance(1)
    assert bench.bodies == ["0", "1", "2", "3", "0", "2", "3"]
    assert bench.dead() == ["1"]
    assert bench.committed() == 4


def test_full_cache_without_commit_is_reported(bench: Bench) -> None:
    bench.put(*"0123")
    bench.join(handler=lambda message: COMMIT if len(bench.calls) > 3 else None, auto_commit=False, prefetch=3)
    bench.advance(6)
    assert bench.bodies == ["0", "1", "2", "0", "1", "2", "3"]
    assert "COMMIT" in bench.told(ConfigError)[0]
    assert bench.committed() == 4


@pytest.mark.parametrize("mode", ["queue", "pop"])
def test_rollback_with_auto_commit_fails_its_message(bench: Bench, mode: Any) -> None:
    """Taken for success, it would lose what the handler wanted back."""
    bench.put("0", "1")
    bench.join(handler=lambda message: ROLLBACK if len(bench.calls) == 1 else COMMIT, mode=mode)
    bench.advance(3)
    assert bench.attempts == [("0", 1), ("0", 2), ("1", 1)]
    assert "auto_commit" in bench.told(TypeError)[0]


@pytest.mark.parametrize("limit", [{"prefetch_total": 5}, {"prefetch_total_bytes": 5}])
def test_total_limits_with_auto_commit_off_are_refused(bench: Bench, limit: dict[str, int]) -> None:
    """They shrink under a queue whose messages wait for COMMIT, which would stand still."""
    with pytest.raises(ConfigError, match="prefetch_total"):
        bench.join(auto_commit=False, **limit)


@pytest.mark.parametrize("hooked", [False, True])
@in_store
async def test_coroutine_decides_like_a_function(store: aio.Store, hooked: bool) -> None:
    seen: list[str] = []
    done = asyncio.Event()

    async def handle(message: Message) -> object:
        await asyncio.sleep(0)
        seen.append(message.text())
        if len(seen) == 2:
            return ROLLBACK
        if len(seen) == 5:
            done.set()
            return COMMIT
        return None

    await store.create_topic("t", queues=1)
    await store.put_many("t", [b"0", b"1", b"2"])
    interceptors = [hook(around_consume=lambda call, messages: call())] if hooked else []
    consumer = await store.push_consumer(
        "g", ordered=True, auto_commit=False, suspend=0.01, interceptors=interceptors, workers=1
    )
    consumer.subscribe("t", handle)
    async with consumer:
        await done.wait()
        await until(lambda: store.sync.broker.committed("g", "t", 0) == 3)
    assert seen == ["0", "1", "0", "1", "2"]
