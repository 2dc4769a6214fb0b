"""Handlers annotated as the pages say. mypy checks this file with the library: one of them it refuses."""

from __future__ import annotations

from collections.abc import Sequence

import mqstore


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
