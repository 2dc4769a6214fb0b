"""Puts, made on the loop or on the store's thread (clients#runtime).

A put into the page cache takes some microseconds, less than handing it over. So it is made on the loop, except:

    durability "flush"           appended on the loop, and the sync waited for with all others that wait (`put_async`)
    a large body                 copied and checked on the thread: a megabyte takes a millisecond
    a topic that is not there    entering it writes a file
    a full segment               making the next one may wait for the disk
    a log that is held           by a bulk append, as long as that takes
    a put before it is there     what is stored is stored in the order of the calls
"""

from __future__ import annotations

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
"""Bytes of a record whose body is not large: its properties have less than 32 KiB."""

T = TypeVar("T")


def size_of(body: object) -> int:
    """Bytes of a body; 0 for what is none, which the engine will say."""
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
        """Whether it may be made on the loop."""
        broker = self._sync.broker
        return (
            not self._on_thread
            and size <= LARGE
            and broker.topics.get(topic) is not None
            and broker.store.wakeups.log.has_room(_LARGEST_RECORD)
        )

    async def put(self, topic: str, body: Body, queue_id: int | None, options: Mapping[str, Any]) -> SendReceipt:
        """`Store.put`. Cancelled: stored whole, or not at all."""
        self._bridge.check()
        broker = self._sync.broker
        here = self.here(topic, size_of(body))
        if not here and not isinstance(body, bytes) and isinstance(body, bytearray | memoryview):
            body = bytes(body)  # who is cancelled may use it for something else
        if (options.get("durability") or broker.store.durability) == "flush":
            put = partial(broker.put_async, topic, body, queue_id=queue_id, **options)
            future = put() if here else await self.in_order(put)
            return await self._bridge.wait(future)
        if not here:
            return await self.in_order(partial(broker.put, topic, body, queue_id=queue_id, **options))
        receipt: SendReceipt = broker.put(topic, body, queue_id=queue_id, **options)
        await self._bridge.breathe()  # it is stored: a caller that is cancelled here has put
        return receipt

    async def in_order(self, work: Callable[[], T]) -> T:
        """Call `work` on the thread; puts that come now come behind it."""
        self._on_thread += 1
        try:
            return await self._bridge.call(work)
        finally:
            self._on_thread -= 1
