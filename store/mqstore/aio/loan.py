"""Base of `Task` and `Delivery`: a lease of the synchronous library whose verbs are coroutines."""

from __future__ import annotations

from types import TracebackType
from typing import TypeVar

from mqstore.aio.forward import Twin, Value, on_loop
from mqstore.client import delivery
from mqstore.log.message import Message
from mqstore.queue import Task

__all__ = ["Loan"]

L = TypeVar("L", Task, delivery.Delivery)


class Loan(Twin[L]):
    """A delivery that has to be settled. No verb can be cancelled half way."""

    __slots__ = ()

    message = Value[Message](delivery.Loan)
    attempt = Value[int](delivery.Loan)
    expires_at = Value[float](delivery.Loan)
    settled = Value[bool](delivery.Loan)

    ack = on_loop(delivery.Loan.ack)
    nack = on_loop(delivery.Loan.nack)
    extend = on_loop(delivery.Loan.extend)
    reject = on_loop(delivery.Loan.reject)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return self.sync.__exit__(kind, error, traceback)
