"""Leased item of a `mqstore.Queue` (clients#queue)."""

from __future__ import annotations

from typing import Any, Generic, Self

from mqstore.broker.names import queue_name
from mqstore.client.codecs import Codec, T
from mqstore.client.delivery import Lease, LeaseContext
from mqstore.contract import Delivery

_UNREAD: Any = object()


class Task(Lease, Generic[T]):
    """Leased item. `with task:` acknowledges it at a clean end, and gives it back after an exception.
    The exception passes on, except `Retry` and `Reject`, which are obeyed. `Queue.run` is a loop that survives it.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     queue = store.queue("jobs", codec=mqstore.JSON)
    ...     receipt = queue.put({"page": 7})
    ...     with queue.get() as task:
    ...         task.value, task.attempt, queue.qsize()
    ...     queue.qsize()
    ({'page': 7}, 1, 1)
    0
    """

    __slots__ = ("_codec", "_value")

    def __init__(self, context: LeaseContext, delivery: Delivery, codec: Codec[T]) -> None:
        # Inline `Lease.__init__`: one call less for each item.
        self._context = context
        self._delivery = delivery
        self._message = None
        self._verb = None
        self._expires_at = None
        self._codec = codec
        self._value: Any = _UNREAD

    @property
    def value(self) -> T:
        """Item that was put. Raises FormatError if the queue's codec cannot decode it.
        Inside `with` that is a failed attempt."""
        if self._value is _UNREAD:
            self._value = self._codec.decode(self._delivery.message.body)
        value: T = self._value
        return value

    @property
    def _source(self) -> str:
        return repr(queue_name(self._context.group))

    def __enter__(self) -> Self:
        return self
