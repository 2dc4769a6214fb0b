"""Uses of the library that mypy checks with it: handlers annotated as the pages say, and methods of `mqstore.aio`.
Lines with an ignored error are those that mypy must refuse."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import assert_type

import mqstore
import mqstore.aio


def use(consumer: mqstore.PushConsumer) -> None:
    """Handlers of batches, `tuple[Message, ...]`, were refused by mypy, though they worked."""

    @consumer.subscribe("orders")
    def one(message: mqstore.Message) -> None: ...

    @consumer.subscribe("orders")
    def batch(messages: tuple[mqstore.Message, ...]) -> None: ...

    @consumer.subscribe("orders")
    def sequence(messages: Sequence[mqstore.Message]) -> None: ...

    @consumer.subscribe("orders")  # type: ignore[type-var]
    def none(number: int) -> None: ...


class Words:
    """A codec with parameter names of its own. pyright refused it, and those of the pages."""

    def encode(self, words: list[str]) -> bytes:
        return " ".join(words).encode()

    def decode(self, data: bytes) -> list[str]:
        return data.decode().split()


def queue_of(store: mqstore.Store) -> mqstore.Queue:
    codec: mqstore.Codec = Words()
    return store.queue("words", codec=codec)


async def use_on_a_loop() -> None:
    """`mqstore.aio` makes its methods of the synchronous ones: their parameters and results must stay."""
    async with mqstore.aio.open("mq", durability="flush") as store, store.queue("jobs", maxsize=3) as queue:
        assert_type(store.path, Path)
        store.mode = "r"  # type: ignore[assignment]
        assert_type(await store.read("t", 0, 0, max_bytes=3), list[mqstore.Message])
        await store.read("t", "0", 0)  # type: ignore[arg-type]
        await store.topics(nothing=3)  # type: ignore[call-arg]
        await store.queue("jobs", size=3)  # type: ignore[call-overload]
        await mqstore.aio.open("mq", nothing=3)  # type: ignore[call-arg]
        assert_type([each async for each in queue.dead_letters.select(start_ms=3)], list[mqstore.Message])
        task = await queue.get()
        assert_type(task.attempt, int)
        await task.nack("soon")  # type: ignore[arg-type]
        producer = await store.producer(linger=3)
        assert_type(await producer.send_many("t", [b"x"], tag="a"), Sequence[mqstore.SendReceipt])
        await producer.send_many("t", [b"x"], label="a")  # type: ignore[call-arg]
        async with store.simple_consumer("g", {"t": "*"}) as consumer:
            async for delivery in consumer:
                async with delivery as message:
                    assert_type(message, mqstore.Message)
