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
