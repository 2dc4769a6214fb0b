"""Handlers that do not run when they are called: messages were acknowledged, and nothing had been done with them."""

from __future__ import annotations

import asyncio
import functools
import gc
import types
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import Interceptor, PushConsumer, aio
from mqstore.errors import ConfigError
from tests.client.aiosupport import in_store, with_store
from tests.client.pushsupport import PushBench

AGAIN = mqstore.RetryPolicy(2, [0])
ENGINES: list[dict[str, Any]] = [
    {},
    {"batch_size": 3},
    {"ordered": True},
    {"ordered": True, "batch_size": 3},
    {"mode": "pop"},
    {"mode": "pop", "batch_size": 3},
    {"mode": "pop", "ordered": True},
    {"model": "broadcasting", "client_id": "me"},
]


async def coroutine(given: object) -> None: ...


def generator(given: object) -> Iterator[None]:
    yield


async def async_generator(given: object) -> AsyncIterator[None]:
    yield


@types.coroutine
def old_coroutine(given: object) -> Any:
    yield


class Awaited:
    def __await__(self) -> Any:
        yield


class Methods:
    async def coroutine(self, given: object) -> None: ...

    def generator(self, given: object) -> Iterator[None]:
        yield

    def plain(self, given: object) -> None: ...


def called_by(method: Callable[..., object]) -> Any:
    """An object whose class has `method` as `__call__`."""
    return type("Callable", (), {"__call__": method})()


def ways(function: Any, method: Any) -> list[Any]:
    """Return the ways to make a handler of a function and of a method of `Methods`."""
    return [
        function,
        method.__get__(Methods()),
        functools.partial(function),
        called_by(method),
        functools.partial(called_by(method)),
    ]


COROUTINES = [*ways(coroutine, Methods.coroutine), old_coroutine]
GENERATORS = [*ways(generator, Methods.generator), async_generator]
PLAIN = [*ways(lambda given: None, Methods.plain), print, list]


# --- what is to be seen before ---------------------------------------------------------------------------------------


def test_coroutine_function_is_rejected(bench: PushBench) -> None:
    consumer = PushConsumer(bench.broker, "g")
    for handler in COROUTINES:
        with pytest.raises(ConfigError, match=r"mqstore\.aio"):
            consumer.subscribe("t", handler)
    for handler in GENERATORS:
        with pytest.raises(ConfigError, match="yield"):
            consumer.subscribe("t", handler)
    for handler in PLAIN:
        consumer.subscribe("t", handler)


@in_store
async def test_of_those_aio_refuses_what_it_cannot_await_or_call(store: aio.Store) -> None:
    async def none() -> None: ...

    consumer = await store.push_consumer("g")
    for handler in GENERATORS:
        with pytest.raises(ConfigError, match="yield"):
            consumer.subscribe("t", handler)
    for handler in (none, no_arguments):
        with pytest.raises(ConfigError, match="one argument"):
            consumer.subscribe("t", handler)
    for handler in (*COROUTINES, *PLAIN):
        consumer.subscribe("t", handler)


# --- what is not -----------------------------------------------------------------------------------------------------


def stubborn(given: object) -> Iterator[int]:
    """Return a generator that cannot be closed."""

    def generate() -> Iterator[int]:
        try:
            yield 1
        except GeneratorExit:
            yield 2

    begun = generate()
    next(begun)
    return begun


UNDONE = {
    coroutine: "asyncio.run",
    generator: "loop over",
    async_generator: "loop over",
    old_coroutine: "asyncio.run",
    lambda given: Awaited(): "asyncio.run",
    stubborn: "loop over",
}
"""Functions, and the advice to whoever has them as handlers."""


@pytest.mark.parametrize(
    ("options", "made", "wrapped"),
    [
        (options, [*UNDONE][number % len(UNDONE)], number % 2 == 1)
        for number, options in enumerate([*ENGINES, *ENGINES[::-1]])
    ],
)
def test_work_that_comes_back_instead_of_having_been_done_is_a_failure(
    bench: PushBench, options: dict[str, Any], made: Callable[..., object], wrapped: bool
) -> None:
    """The lag went to 0 with every message acknowledged and none handled."""
    told: list[BaseException] = []
    outcomes: list[str] = []
    around: list[BaseException] = []

    class Told(Interceptor):
        def on_settle(self, message: mqstore.Message, outcome: Any, seconds: float) -> None:
            outcomes.append(outcome)

    class Around(Told):
        def around_consume(self, call: Callable[[], None], messages: Any) -> None:
            try:
                call()
            except Exception as error:
                around.append(error)
                raise

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        broadcasts = "model" in options
        bench.consumer(
            lambda given: made(given),
            retry=None if broadcasts else AGAIN,
            interceptors=[Around() if wrapped else Told()],
            on_error=lambda error, message: told.append(error),
            **options,
        )
        bench.put(b"a", b"b", b"c")
        bench.advance(5)
        gc.collect()
    assert bool(around) == wrapped
    assert "ack" not in outcomes
    assert outcomes.count("dlq") == 3
    assert told
    assert all("nobody runs" in str(error) and UNDONE[made] in str(error) for error in told)
    if not broadcasts:
        assert sorted(bench.dead()) == [b"a", b"b", b"c"]


def test_hooks_that_nobody_awaits_are_refused(bench: PushBench) -> None:
    """`async def on_settle` never ran, and neither did an `on_error` that is a coroutine."""

    class Settles(Interceptor):
        async def on_settle(self, message: object, outcome: object, seconds: float) -> None: ...

    class Around(Interceptor):
        async def around_consume(self, call: object, messages: object) -> None: ...

    class Receives(Interceptor):
        def on_receive(self, messages: list[Any]) -> Any:
            yield from messages

    for wrong in (Settles(), Around()):
        with pytest.raises(ConfigError, match="plain function"):
            PushConsumer(bench.broker, "g", interceptors=[wrong])
    for handler in COROUTINES:
        with pytest.raises(ConfigError, match="on_error"):
            PushConsumer(bench.broker, "g", on_error=handler)
    PushConsumer(bench.broker, "g", interceptors=[Receives()], on_error=print)


@pytest.mark.parametrize("waits", [False, True])
def test_aio_awaits_what_comes_back_and_no_more(tmp_path: Path, waits: bool) -> None:
    ran: list[str] = []
    told: list[str] = []

    async def handle(message: mqstore.Message) -> None:
        ran.append(message.text())

    async def forgets(message: mqstore.Message) -> Coroutine[Any, Any, None]:
        return handle(message)

    def hands_on(message: mqstore.Message) -> Awaitable[None]:
        return handle(message)

    class Around(Interceptor):
        def around_consume(self, call: Callable[[], None], messages: Any) -> None:
            call()

    async def test(store: aio.Store) -> None:
        consumer = await store.push_consumer(
            "g",
            retry=mqstore.RetryPolicy(1, [0]),
            interceptors=[Around()] if waits else [],
            on_error=lambda error, message: told.append(str(error)),
        )
        consumer.subscribe("forgets", forgets)
        consumer.subscribe("generates", lambda message: async_generator(message))
        consumer.subscribe("hands_on", hands_on)
        consumer.subscribe("object", called_by(lambda self, message: handle(message)))
        async with consumer:
            for topic in ("forgets", "generates", "hands_on", "object"):
                await store.put(topic, topic.encode())
            while len(ran) + await store.dead_letters("g").count() < 4:
                await asyncio.sleep(0.005)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with_store(test, tmp_path)
        gc.collect()
    assert sorted(ran) == ["hands_on", "object"]
    assert len(told) == 2


# --- how many arguments -----------------------------------------------------------------------------------------------


def no_arguments() -> None: ...


def two_arguments(message: object, more: object) -> None: ...


def keyword_wanted(message: object, *, more: object) -> None: ...


class NotCallableAsShown:
    """`inspect` cannot say how it is called."""

    __signature__ = "no signature"

    def __call__(self, message: object) -> None: ...


TOO_FEW_OR_MANY = [no_arguments, two_arguments, keyword_wanted, called_by(lambda self: None)]
FITTING = [
    lambda message, more=None: "a result",
    lambda *messages: None,
    functools.partial(two_arguments, more=1),
    [].append,
    dict,
    NotCallableAsShown(),
]


def test_a_handler_of_the_wrong_arity_is_refused(bench: PushBench) -> None:
    consumer = PushConsumer(bench.broker, "g")
    for handler in TOO_FEW_OR_MANY:
        with pytest.raises(ConfigError, match="one argument"):
            consumer.subscribe("t", handler)
    with pytest.raises(ConfigError, match="subscribe"):  # it was refused: nothing is handled
        consumer.start()
    for handler in FITTING:
        consumer.subscribe("t", handler)
