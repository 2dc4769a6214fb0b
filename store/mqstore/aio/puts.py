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
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

from mqstore.aio.bridge import Bridge
from mqstore.log.commitlog import SendReceipt
from mqstore.log.outgoing import Body
from mqstore.store import Store

__all__ = ["LARGE", "Puts", "size_of"]

LARGE: Final = 16 << 10
_LARGEST_RECORD: Final = 64 << 10
"""Maximum size in bytes of a record without a large body. Its properties have less than 32 KiB."""

T = TypeVar("T")


def size_of(body: object) -> int:
    """Return the number of bytes of a body, or 0 for a bad body, which the engine will refuse."""
    if isinstance(body, bytes | bytearray):
        return len(body)
    return body.nbytes if isinstance(body, memoryview) else 0


class Puts:
    """All puts of one aio store."""

    def __init__(self, bridge: Bridge, sync: Store) -> None:
        self._bridge = bridge
        self._sync = sync
        self._on_thread = 0

    def here(self, topic: str, size: int) -> bool:
        """Return True if the put may be made on the loop."""
        broker = self._sync.broker
        return (
            not self._on_thread
            and size <= LARGE
            and broker.topics.get(topic) is not None
            and broker.store.wakeups.log.has_room(_LARGEST_RECORD)
        )

    async def put(self, topic: str, body: Body, queue_id: int | None, options: Mapping[str, Any]) -> SendReceipt:
        """Put as `Store.put`. If cancelled, the message is stored whole or not at all."""
        self._bridge.check()
        broker = self._sync.broker
        here = self.here(topic, size_of(body))
        if not here and not isinstance(body, bytes) and isinstance(body, bytearray | memoryview):
            body = bytes(body)  # a cancelled caller may reuse the buffer
        if (options.get("durability") or broker.store.durability) == "flush":
            put = partial(broker.put_async, topic, body, queue_id=queue_id, **options)
            future = put() if here else await self.in_order(put)
            return await self._bridge.wait(future)
        if not here:
            return await self.in_order(partial(broker.put, topic, body, queue_id=queue_id, **options))
        receipt: SendReceipt = broker.put(topic, body, queue_id=queue_id, **options)
        if self._bridge.is_turn_over():
            await asyncio.sleep(0)  # the message is stored, even if the caller is cancelled here
        return receipt

    async def in_order(self, work: Callable[[], T]) -> T:
        """Call `work` on the thread. Later puts wait for it."""
        self._on_thread += 1
        try:
            return await self._bridge.call(work)
        finally:
            self._on_thread -= 1
