"""Puts, made on the loop or on the store's thread (clients#runtime).

A put into the page cache takes some microseconds, less than handing it over. So it is made on the loop, except:

    durability "flush"           appended on the loop, and a shared sync awaited (`put_async`)
    a large body                 copied and checked on the thread: a megabyte takes a millisecond
    an unknown topic             creating it writes a file
    a full segment               creating the next one may wait for the disk
    a log in a bulk append       the put waits until that has ended
    an earlier put not stored    messages are stored in the order of the calls
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, TypeVar
from weakref import WeakSet

from mqstore.aio.loop_thread import LoopThread
from mqstore.log.commitlog import SendReceipt
from mqstore.log.writing.outgoing import Body
from mqstore.store import Store

__all__ = ["Puts", "owned", "size_of"]

_LARGE: Final = 16 << 10
_LARGEST_RECORD: Final = 64 << 10
"""Maximum size in bytes of a record without a large body. Its properties have less than 32 KiB."""

T = TypeVar("T")


def size_of(body: object) -> int:
    """Return the number of bytes of a body, or 0 for a bad body, which the engine will refuse."""
    return memoryview(body).nbytes if isinstance(body, bytes | bytearray | memoryview) else 0


class Puts(LoopThread):
    """Bridge of one store, with its puts."""

    store: Store
    """The synchronous store, once it is open."""
    _on_thread = 0

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.consumers: WeakSet[Any] = WeakSet()
        """Push consumers of the store, which it stops."""

    def here(self, topic: str, size: int) -> bool:
        """Return True if the put may be made on the loop."""
        broker = self.store.broker
        return (
            not self._on_thread
            and size <= _LARGE
            and broker.topics.get(topic) is not None
            and broker.has_room(_LARGEST_RECORD)
        )

    async def put(self, topic: str, body: Body, **options: Any) -> SendReceipt:
        """Put as `Store.put`. If cancelled, the message is stored whole or not at all."""
        self.check()
        broker = self.store.broker
        put: Callable[..., Any] = broker.put
        flushes = (options.get("durability") or broker.durability) == "flush"
        if flushes:
            put = broker.put_async
        if self.here(topic, size_of(body)):
            stored = put(topic, body, **options)
            if not flushes and self.is_turn_over():
                await asyncio.sleep(0)  # the message is stored, even if the caller is cancelled here
        else:
            stored = await self.in_order(partial(put, topic, owned(body), **options))
        receipt: SendReceipt = await self.wrapped(stored) if flushes else stored
        return receipt

    async def in_order(self, work: Callable[[], T]) -> T:
        """Call `work` on the thread. Later puts wait for it."""
        self._on_thread += 1
        try:
            return await self.call(work)
        finally:
            self._on_thread -= 1


def owned(value: Any) -> Any:
    """Return a copy of an argument, so that its caller may change it while the call waits.
    Iterables are read here, on the loop, since they belong to the caller."""
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | tuple):
        return [bytes(each) if isinstance(each, bytearray | memoryview) else each for each in value]
    return value
