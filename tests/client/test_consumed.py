"""The hook that is told how each call of a handler ended: of which group, on which topic (clients#handler-end)."""

from __future__ import annotations

from typing import Any

import pytest

from mqstore import BatchFailure, DeliveryResult, Interceptor, Message, Reject, Retry, RetryPolicy
from tests.client.pushsupport import PushBench

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
