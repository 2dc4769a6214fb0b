"""What an operator reads: no line a thousand times, no line without its place, none that hides another."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import Interceptor
from tests.client.pushsupport import PushBench, hook

NUMBER = 200
FAST: dict[str, Any] = {"retry": mqstore.RetryPolicy(1, [0])}


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# --- consumers -------------------------------------------------------------------------------------------------------


class Failing(Interceptor):
    """Every hook of a consumer fails."""

    def on_receive(self, messages: Any) -> Any:
        raise KeyError("hook")

    def around_consume(self, call: Callable[[], None], messages: Any) -> None:
        raise KeyError("hook")

    def on_settle(self, message: Any, outcome: Any, seconds: float) -> None:
        raise KeyError("hook")

    def on_timeout(self, message: Any, stack: str) -> None:
        raise KeyError("hook")


def bad(given: Any) -> None:
    raise ValueError("bad")


def failing_listener(error: BaseException, message: object) -> None:
    raise KeyError("listener")


@pytest.mark.parametrize("mode", ["queue", "pop"])
@pytest.mark.parametrize("ordered", [False, True])
def test_failing_hooks_do_not_fill_the_log(
    bench: PushBench, mode: Any, ordered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """2,000 messages made 2,000 tracebacks of each, without the topic, without the group."""
    consumer = bench.consumer(
        bad, mode=mode, ordered=ordered, interceptors=[Failing()], on_error=failing_listener, **FAST
    )
    bench.put(*[b"x"] * NUMBER)
    bench.settle()
    consumer.stop()
    found = lines(caplog)
    assert len(found) <= 12
    for name in ("Failing.on_settle failed", "around_consume failed", "on_error failed", "the handler failed"):
        [first] = [line for line in found if name in line and "held back" not in line]
        assert first.startswith("group g: t/0, offset 0")
        [held] = [line for line in found if name in line and "held back" in line]
        assert held.startswith(f"group g: {NUMBER - 1} more were held back like this: t/0, offset 0")


@pytest.mark.parametrize("ordered", [False, True])
def test_broadcasting_losses_are_logged_with_a_place(
    bench: PushBench, ordered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def rejects(message: Any) -> None:
        raise mqstore.Reject("bad")

    consumer = bench.consumer(rejects, model="broadcasting", client_id="me", ordered=ordered)
    bench.put(*[b"x"] * NUMBER)
    bench.settle()
    consumer.stop()
    assert [line for line in lines(caplog) if line.startswith("group g: t/0, offset 0: ")]
    assert len(lines(caplog)) == 2
    assert f"{NUMBER - 1} more were held back" in lines(caplog)[1]


def test_full_disk_is_logged_once_per_queue(
    bench: PushBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "no space left")

    def retries(message: Any) -> None:
        raise mqstore.Retry

    told: list[object] = []
    monkeypatch.setattr(bench.broker, "send_back", full)
    bench.consumer(retries, on_error=lambda error, message: told.append(message))
    bench.put(*[b"x"] * NUMBER)
    bench.settle()
    [line] = lines(caplog)
    assert line.startswith("group g: t/0, offset 0: ")
    assert "OSError: [Errno 28] no space left" in line
    assert len(told) == NUMBER  # who is told by a call hears of each


@pytest.mark.parametrize("mode", ["queue", "pop"])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_batch_that_hangs_shows_its_stack_once(
    tmp_path: Path, mode: Any, ordered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """500 messages of one call made 500 stacks."""
    let_go, told = threading.Event(), threading.Semaphore(0)
    counts = hook(on_timeout=lambda message, stack: told.release())

    def hangs_here(batch: Any) -> None:
        let_go.wait(30)

    with mqstore.open(tmp_path) as store:
        store.create_topic("t", queues=1)
        store.put_many("t", [b"x"] * 20)
        consumer = store.push_consumer(
            "g", workers=1, mode=mode, ordered=ordered, batch_size=20, consume_timeout=0.1, interceptors=[counts]
        )
        consumer.subscribe("t", hangs_here)
        with consumer:
            for _ in range(20):
                assert told.acquire(timeout=20)
            let_go.set()
    [first] = [line for line in lines(caplog) if "in hangs_here" in line]
    assert first.startswith("group g: t/0, offset 0 and 19 more: ")
    assert "has been in its handler for 0.1 s" in first


def test_harmless_failures_do_not_hide_a_serious_one(bench: PushBench, caplog: pytest.LogCaptureFixture) -> None:
    """Of two ValueErrors that a handler raised, the second, which mattered, was never seen."""

    def handle(message: Any) -> None:
        if message.body == b"serious":
            raise ValueError("the database is gone")
        raise (KeyError if message.body == b"key" else ValueError)("not a number")

    consumer = bench.consumer(handle, run=False, **FAST)
    consumer.subscribe("u", handle)
    consumer.start()
    bench.put(*[b"harmless"] * 50, b"serious", b"key")
    bench.put(b"harmless", topic="u")
    bench.settle()
    errors = ["KeyError: 'not a number'", *["ValueError: not a number"] * 2, "ValueError: the database is gone"]
    assert sorted(line.split(": ", 3)[3] for line in lines(caplog)) == errors
    bench.advance(30)
    assert [line for line in lines(caplog) if "49 more" in line]  # without another failure, and without a stop
    caplog.clear()
    consumer.stop()
    assert lines(caplog) == []


# --- producers -------------------------------------------------------------------------------------------------------


def test_oneway_messages_that_are_not_stored_are_counted_not_listed(
    bench: PushBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def busy(*args: object, **kwargs: object) -> None:
        raise mqstore.errors.StoreBusyError("busy")

    monkeypatch.setattr(bench.broker, "put", busy)
    producer = mqstore.Producer(bench.broker, "p")
    for _ in range(NUMBER):
        producer.send_oneway("t", b"x")
    producer.close()
    first, held = lines(caplog)
    assert first.startswith("producer 'p': t: a message was not stored")
    assert f"{NUMBER - 1} more were held back" in held
