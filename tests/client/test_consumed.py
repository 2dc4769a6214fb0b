"""The hook that is told how each call of a handler ended: of which group, on which topic (clients#handler-end)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import mqstore
from mqstore import BatchFailure, DeliveryResult, Interceptor, Message, Reject, Retry, RetryPolicy, aio
from tests.client.aiosupport import in_store
from tests.client.pushsupport import PushBench, hook

MODES: list[dict[str, Any]] = [
    {},
    {"ordered": True},
    {"mode": "pop"},
    {"mode": "pop", "ordered": True},
    {"model": "broadcasting", "client_id": "me"},
]
LAST = RetryPolicy(1)


class Notes(Interceptor):
    def __init__(self) -> None:
        self.calls: list[DeliveryResult] = []

    def after_consume(self, consumed: DeliveryResult) -> None:
        self.calls.append(consumed)

    def told(self) -> list[tuple[str, str, list[bytes], str]]:
        return [(each.group, each.topic, [m.body for m in each.messages], each.outcome) for each in self.calls]


ENDS: list[tuple[BaseException | None, str]] = [
    (None, "success"),
    (Retry(1), "retry"),
    (Reject("no"), "reject"),
    (ValueError("broken"), "exception"),
]


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(("error", "outcome"), ENDS, ids=[outcome for _, outcome in ENDS])
def test_each_call_is_reported_with_its_outcome(
    bench: PushBench, mode: dict[str, Any], error: BaseException | None, outcome: str, around: bool
) -> None:
    class Around(Notes):
        def around_consume(self, call: Any, messages: Any) -> None:
            call()

    def handler(message: Message) -> None:
        if error is not None:
            raise error

    notes = Around() if around else Notes()
    if mode.get("model") != "broadcasting":
        mode = {**mode, "retry": LAST}
    bench.put(b"m")
    bench.consumer(handler, interceptors=[notes], **mode)
    bench.settle()
    assert notes.told() == [("g", "t", [b"m"], outcome)]
    assert notes.calls[0].error is error
    assert notes.calls[0].seconds >= 0


def test_redelivery_is_reported_under_its_topic(bench: PushBench) -> None:
    def handler(message: Message) -> None:
        if message.attempt == 1:
            raise ValueError

    notes = Notes()
    bench.put(b"m")
    bench.consumer(handler, interceptors=[notes], retry=RetryPolicy(3, [1]))
    bench.advance(60)
    assert notes.told() == [("g", "t", [b"m"], "exception"), ("g", "t", [b"m"], "success")]


def test_a_batch_is_one_call(bench: PushBench) -> None:
    def handler(batch: tuple[Message, ...]) -> None:
        if batch[0].attempt == 1:
            raise BatchFailure(batch[1:])

    notes = Notes()
    bench.put(b"0", b"1")
    bench.consumer(handler, interceptors=[notes], batch_size=2, retry=LAST)
    bench.settle()
    assert notes.told() == [("g", "t", [b"0", b"1"], "retry")]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_call_that_takes_too_long_is_a_timeout(bench: PushBench, mode: dict[str, Any]) -> None:
    """Its end is told only where it counts: in order. Elsewhere the message comes again."""

    def handler(message: Message) -> None:
        for _ in range(6 if message.attempt == 1 else 0):
            bench.clock.advance(10_000)
            consumer.run_once()  # the timer thread, which goes on meanwhile

    notes = Notes()
    consumer = bench.consumer(handler, interceptors=[notes], consume_timeout=20, workers=1, **mode)
    bench.put(b"m")
    bench.advance(100)
    expected = ["timeout", "success"] if mode.get("ordered") or "model" not in mode else ["timeout"]
    assert [each.outcome for each in notes.calls] == expected
    assert {each.messages[0].attempt for each in notes.calls[1:]} <= {1 if mode.get("ordered") else 2}
    assert notes.calls[0].seconds == 20


def test_a_hook_that_fails_changes_nothing(bench: PushBench, caplog: pytest.LogCaptureFixture) -> None:
    def after_consume(consumed: DeliveryResult) -> None:
        raise ValueError("mine")

    notes = Notes()
    bench.consumer(interceptors=[hook(after_consume=after_consume), notes])
    bench.put(b"m")
    bench.settle()
    assert bench.committed() == 1
    assert notes.told() == [("g", "t", [b"m"], "success")]
    assert "after_consume failed" in caplog.text


@in_store
async def test_aio_handlers_are_reported_alike(store: aio.Store) -> None:
    notes = Notes()
    done = asyncio.Event()

    async def handler(message: mqstore.Message) -> None:
        await asyncio.sleep(0)
        if message.body == b"bad":
            raise ValueError
        done.set()

    await store.create_topic("t", queues=1)
    consumer = await store.push_consumer("g", workers=1, interceptors=[notes], retry=LAST)
    consumer.subscribe("t", handler)
    async with consumer:
        await store.put("t", b"bad")
        await store.put("t", b"good")
        await done.wait()
    assert notes.told() == [("g", "t", [b"bad"], "exception"), ("g", "t", [b"good"], "success")]
