"""What the end of a handler means (clients#handler-end), on one thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mqstore import BatchFailure, Interceptor, Message, Reject, Retry
from mqstore.broker.redelivery.attempt_journal import Suspects
from mqstore.client.groupsettings import Wanted
from mqstore.client.interceptors import Interceptors
from mqstore.client.push.handler_call import (
    Failure,
    Handling,
    Subscription,
)
from mqstore.client.push.workers import Worker
from mqstore.errors import ConfigError
from tests.client.pushsupport import PushBench

ALL = Wanted(("TAG", "*"), None)


@pytest.fixture
def given(bench: PushBench) -> list[Message]:
    bench.put(b"0", b"1", b"2")
    return bench.broker.read("t", 0, 0).messages


Handle = Callable[..., tuple[Failure | None, Handling, list[Any]]]


@pytest.fixture
def handle(bench: PushBench, given: list[Message]) -> Handle:
    def run(
        handler: Callable[..., object],
        *,
        batch: bool = True,
        interceptor: Interceptor | None = None,
        on_error: Any = None,
    ) -> tuple[Failure | None, Handling, list[Any]]:
        told: list[Any] = []
        handling = Handling(
            "g",
            bench.clock,
            batch=batch,
            ordered=False,
            interceptors=Interceptors([interceptor] if interceptor else ()),
            on_error=on_error or (lambda error, message: told.append((error, message))),
        )
        worker = Worker()
        failure, took_ms = handling.call(worker, Subscription(handler, ALL), given)
        assert worker.messages == ()
        assert took_ms >= 0
        return failure, handling, told

    return run


def raising(error: BaseException) -> Callable[[Any], None]:
    def handler(given: Any) -> None:
        raise error

    return handler


class NoTextError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("cannot be shown")


class BareRetry(Retry):
    def __init__(self) -> None:
        """Forgets its parent's."""


class BareReject(Reject):
    def __init__(self) -> None:
        """Likewise."""


class BareBatch(BatchFailure):
    def __init__(self) -> None:
        """Likewise."""


class OddRetry(Retry):
    def __init__(self, delay_s: object) -> None:
        Exception.__init__(self)
        self.delay_s = delay_s  # type: ignore[assignment]


class OddBatch(BatchFailure):
    def __init__(self) -> None:
        """Its failed ones it cannot tell."""

    @property
    def failed(self) -> Any:
        raise RuntimeError("cannot be told")

    @failed.setter
    def failed(self, value: Any) -> None: ...


def test_handlers_of_batches_get_a_sequence_others_one_message(handle: Handle, given: list[Message]) -> None:
    seen: list[Any] = []
    handle(seen.append, batch=True)
    handle(seen.append, batch=False)
    assert seen == [tuple(given), given[0]]  # not our list, which a handler might change


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Retry(), Failure("retry", "again")),
        (Retry(2.5), Failure("retry", "again in 2.5 s", 2.5)),
        (Reject("bad"), Failure("reject", "bad")),
        (Reject(), Failure("reject", "rejected by its handler")),
        (Reject(17), Failure("reject", "17")),  # type: ignore[arg-type]
        (ValueError("x"), Failure("retry", "ValueError: x")),
        (NoTextError(), Failure("retry", "NoTextError: NoTextError (it cannot be shown)")),
        (BareRetry(), Failure("retry", "")),
        (BareReject(), Failure("reject", "rejected by its handler")),
        (BareBatch(), Failure("retry", "")),
        (OddBatch(), Failure("retry", "")),
        (OddRetry("soon"), Failure("retry", "")),
        (OddRetry(float("nan")), Failure("retry", "")),
        (OddRetry(float("inf")), Failure("retry", "")),
        (OddRetry(-1), Failure("retry", "")),
        (OddRetry(3), Failure("retry", "", 3)),
    ],
)
def test_exception_becomes_its_outcome(handle: Handle, error: Exception, expected: Failure) -> None:
    """Whatever an exception of the user's lacks: if it got out of here, its messages would be nowhere."""
    assert handle(raising(error))[0] == expected


def test_orders_are_not_reported_as_errors(handle: Handle, given: list[Message]) -> None:
    for order in (Retry(), Reject("x"), BatchFailure([])):
        assert handle(raising(order))[2] == []
    error = ValueError("x")
    assert handle(raising(error))[2] == [(error, given[0])]


@pytest.mark.parametrize("chosen", [[], [1], [2, 0], [1, 1], [0, 1, 2]])
def test_of_a_batch_those_that_are_named_failed_each_once_in_order(
    handle: Handle, given: list[Message], chosen: list[int]
) -> None:
    failure, _, told = handle(raising(BatchFailure([given[i] for i in chosen])))
    assert failure is not None
    assert failure.failed == tuple(given[i] for i in sorted(set(chosen)))
    assert told == []


@pytest.mark.parametrize("untried", [[], [2], [2, 1], [0, 2, 2]])
def test_message_named_failed_and_untried_has_failed(handle: Handle, given: list[Message], untried: list[int]) -> None:
    failure, _, told = handle(raising(BatchFailure([given[1]], [given[i] for i in untried])))
    assert failure is not None
    assert failure.failed == (given[1],)
    assert failure.untried == tuple(given[i] for i in sorted({*untried} - {1}))
    assert told == []


def test_batch_failure_of_untried_messages_only_is_refused(given: list[Message]) -> None:
    """An endless loop: nothing failed, so nothing would change."""
    with pytest.raises(ConfigError, match="failed"):
        BatchFailure([], given)


def test_copies_of_messages_name_them_too(handle: Handle, bench: PushBench) -> None:
    others = bench.broker.read("t", 0, 0).messages
    failure, _, _ = handle(raising(BatchFailure(others[1:2])))
    assert failure is not None
    assert failure.failed is not None
    assert [message.offset for message in failure.failed] == [1]


@pytest.mark.parametrize("what", ["another message", "no message", "nothing iterable"])
def test_failure_naming_other_messages_fails_all(
    handle: Handle, bench: PushBench, given: list[Message], what: str
) -> None:
    bench.put(b"3")
    error = BatchFailure([])
    named: dict[str, Any] = {
        "another message": tuple(bench.broker.read("t", 0, 2).messages),
        "no message": (given[0], "x"),
        "nothing iterable": 7,
    }
    error.failed = named[what]
    failure, _, told = handle(raising(error))
    assert failure is not None
    assert (failure.kind, failure.failed) == ("retry", None)
    assert [type(each) for each, _ in told] == [ValueError]


def test_late_worker_blocks_no_suspected_message(bench: PushBench) -> None:
    suspects, told = Suspects(), []
    first, second = (
        Handling("g", bench.clock, batch=False, ordered=False, interceptors=Interceptors(()), suspects=suspects)
        for _ in range(2)
    )
    first.in_turn("a", lambda: told.append("a"))
    first.close()
    first.in_turn("b", lambda: told.append("b"))  # its job is forgotten
    second.in_turn("c", lambda: told.append("c"))
    assert told[-1] == "c"
    assert second.suspects.is_in("c")
