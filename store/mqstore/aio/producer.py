"""Producer with coroutines (clients#submit).

    send      on the loop, as a put, if it needs no sync and nothing is on its way before it; else as `submit`
    submit    the same; else checked here, and stored by the producer's writer, in the order of the calls
    rest      on the store's thread

The limit on submitted messages that are not stored is kept here: callers beyond it wait on the loop, in line. The
synchronous producer beneath has none, since it would block the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, Unpack

from mqstore.aio.bridge import Bridge
from mqstore.aio.puts import Puts, size_of
from mqstore.aio.twin import Closable, apart, called, owned
from mqstore.broker.road import SendOptions
from mqstore.client import producer, transaction
from mqstore.client.producer import Selector
from mqstore.errors import (
    SendError,
    StoreClosedError,
    StoreIOError,
    TransactionStateError,
)
from mqstore.log.commitlog import SendReceipt
from mqstore.log.outgoing import Body
from mqstore.options import Duration, check_whole, seconds
from mqstore.store import Store

__all__ = ["Producer", "Transaction"]

T = TypeVar("T")


class Producer(Closable[producer.Producer]):
    """Producer with coroutines, made by `Store.producer`.
    Interceptors, selector and checker are plain functions, called on the loop and on other threads.

    >>> import mqstore.aio, tempfile
    >>> async def main(folder):
    ...     async with mqstore.aio.open(folder) as store, store.producer(durability="flush") as producer:
    ...         futures = [await producer.submit("metrics", b"%d" % i, queue_id=0) for i in range(3)]
    ...         return [receipt.offset for receipt in await asyncio.gather(*futures)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(main(folder))
    [0, 1, 2]
    """

    def __init__(
        self,
        bridge: Bridge,
        puts: Puts,
        store: Store,
        group: str = "default",
        *,
        max_inflight: int = 1024,
        max_inflight_bytes: int = 100 << 20,
        **options: Any,
    ) -> None:
        """Make the producer, on the store's thread. Options are those of `mqstore.Producer`."""
        for name, value in (("max_inflight", max_inflight), ("max_inflight_bytes", max_inflight_bytes)):
            check_whole(name, value, 1)
        # The bound is kept here, so the synchronous producer has none.
        super().__init__(bridge, store.producer(group, max_inflight=1 << 40, max_inflight_bytes=1 << 60, **options))
        self.group = group
        self._puts = puts
        self._flushes = (options.get("durability") or store.broker.store.durability) == "flush"
        self._lingers = bool(seconds(options.get("linger", 0), "linger"))
        self._max = max_inflight
        self._max_bytes = max_inflight_bytes
        self._held: dict[asyncio.Future[SendReceipt], int] = {}
        """Submitted messages that are not stored, oldest first, with their sizes."""
        self._held_bytes = 0
        self._line = asyncio.Lock()
        """Line of the callers that wait for room."""
        self._room: asyncio.Future[None] | None = None
        """Future of the first of them."""
        self._closing = False

    # -- messages ---------------------------------------------------------------------------------------------------

    async def _in_order(self, work: Callable[[], T]) -> T:
        """Store messages in the order of the calls. If cancelled, it has not begun, or runs to its end."""
        self._check()
        return await self._puts.in_order(work)

    send_oneway = called(producer.Producer.send_oneway, _in_order)
    send_many = called(producer.Producer.send_many, _in_order)
    flush = called(producer.Producer.flush, apart)
    run_once = called(producer.Producer.run_once)

    async def send(
        self,
        topic: str,
        body: Body,
        *,
        queue_id: int | None = None,
        selector: Selector | None = None,
        **options: Unpack[SendOptions],
    ) -> SendReceipt:
        """Store a message as `mqstore.Producer.send` does, in the order of the calls.
        If cancelled, it is stored whole or not at all."""
        if not self._goes_here(topic, body, options):
            return await (await self.submit(topic, body, queue_id=queue_id, selector=selector, **options))
        self._check()
        receipt = self.sync.send(topic, body, queue_id=queue_id, selector=selector, **options)
        if self._bridge.is_turn_over():
            await asyncio.sleep(0)
        return receipt

    def _goes_here(self, topic: str, body: Body, options: SendOptions) -> bool:
        """Return True if it is stored on the loop: it needs no sync, and nothing is before it."""
        durability = options.get("durability")
        flushes = self._flushes if durability is None else durability == "flush"
        return not (flushes or self._held or self._line.locked()) and self._puts.here(topic, size_of(body))

    async def submit(
        self,
        topic: str,
        body: Body,
        *,
        queue_id: int | None = None,
        selector: Selector | None = None,
        **options: Unpack[SendOptions],
    ) -> asyncio.Future[SendReceipt]:
        """Wait for room, hand the message over, and return the future of its receipt.
        It works as `mqstore.Producer.submit`. A message whose future is cancelled in time is not stored. A message that
        needs no sync is usually stored on return."""
        self._check()
        if self._goes_here(topic, body, options):
            stored: asyncio.Future[SendReceipt] = self._bridge.loop.create_future()
            try:
                stored.set_result(self.sync.send(topic, body, queue_id=queue_id, selector=selector, **options))
            except (SendError, StoreIOError) as error:  # errors of the engine come with the future
                stored.set_exception(error)
            if self._bridge.is_turn_over():
                await asyncio.sleep(0)
            return stored
        size = size_of(body)
        if self._line.locked() or not self._has_room(size):
            async with self._line:
                while not self._has_room(size):
                    await self._wait_for_room()
                return await self._submit(topic, body, size, queue_id, selector, options)
        return await self._submit(topic, body, size, queue_id, selector, options)

    async def _submit(
        self,
        topic: str,
        body: Body,
        size: int,
        queue_id: int | None,
        selector: Selector | None,
        options: SendOptions,
    ) -> asyncio.Future[SendReceipt]:
        self._check()
        mine: asyncio.Future[SendReceipt] = self._bridge.loop.create_future()

        def hand_in() -> Future[SendReceipt]:
            future = self.sync.submit(topic, body, queue_id=queue_id, selector=selector, **options)
            future.add_done_callback(lambda done: self._bridge.tell(partial(self._answer, mine, done)))
            return future

        self._held[mine] = size  # before the call, since the answer may come at once
        self._held_bytes += size
        try:
            if self._puts.here(topic, size):
                future = hand_in()
            else:
                body = owned(body)
                future = await self._puts.in_order(hand_in)
        except BaseException:
            self._stored(mine)
            mine.cancel()
            raise
        mine.add_done_callback(lambda done: done.cancelled() and future.cancel())
        return mine

    def _answer(self, mine: asyncio.Future[SendReceipt], done: Future[SendReceipt]) -> None:
        self._stored(mine)
        if mine.done():  # cancelled
            return
        if done.cancelled():
            mine.cancel()
        elif (error := done.exception()) is not None:
            mine.set_exception(error)
        else:
            mine.set_result(done.result())

    # -- limit on unstored messages ---------------------------------------------------------------------------------

    def _has_room(self, size: int) -> bool:
        held = len(self._held)
        return not held or (held < self._max and self._held_bytes + size <= self._max_bytes)

    async def _wait_for_room(self) -> None:
        if self._lingers:  # a flush ends all lingering
            await self.flush()
            return
        self._room = self._bridge.loop.create_future()
        try:
            await self._room
        finally:
            self._room = None

    def _stored(self, mine: asyncio.Future[SendReceipt]) -> None:
        size = self._held.pop(mine, None)
        if size is not None:
            self._held_bytes -= size
            if self._room is not None and not self._room.done():
                self._room.set_result(None)

    # -- transactions -----------------------------------------------------------------------------------------------

    def transaction(self, *, check: bool = False) -> Transaction:
        """Return a transaction for `async with`, as `mqstore.Producer.transaction` does.
        A cancelled block is rolled back."""
        self._check()
        return Transaction(self._bridge, partial(self.sync.transaction, check=check))

    # -- the end ----------------------------------------------------------------------------------------------------

    async def close(self, timeout: Duration = 30) -> None:
        """Close as `mqstore.Producer.close`. A cancellation is raised once it is closed."""
        timeout_s = seconds(timeout, "timeout")
        self._closing = True
        if not self._bridge.closed:
            await self._bridge.finish(partial(self.sync.close, timeout_s))

    @property
    def closed(self) -> bool:
        """True if it was closed, or its store was."""
        return self._closing or self.sync.closed

    def _check(self) -> None:
        self._bridge.check()
        if self._closing:
            raise StoreClosedError(f"producer {self.group!r} was closed")

    async def _leave(self, error: BaseException | None) -> None:
        await self.close()


class Transaction:
    """Transaction with coroutines: messages become visible when its `async with` block ends well.
    The end of the block is not cancelled. A cancellation is raised after it.

    >>> import asyncio, mqstore, tempfile
    >>> async def main(folder):
    ...     async with mqstore.aio.open(folder) as store, store.producer() as producer:
    ...         async with producer.transaction() as tx:
    ...             await tx.send("orders", b"paid", queue_id=0)
    ...         return [message.body for message in await store.read("orders", 0, 0)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(main(folder))
    [b'paid']
    """

    def __init__(self, bridge: Bridge, make: Callable[[], transaction.Transaction]) -> None:
        self._bridge = bridge
        self._make = make
        self._sync: transaction.Transaction | None = None

    @property
    def receipts(self) -> list[SendReceipt | None]:
        """Receipts of the messages after the commit, in order."""
        return [] if self._sync is None else self._sync.receipts

    async def send(self, topic: str, body: Body, *, queue_id: int | None = None, **options: Unpack[SendOptions]) -> str:
        """Store a message in the transaction. Return the unique key by which the checker will know it."""
        if self._sync is None:
            raise TransactionStateError("a transaction sends inside its `async with` block", None)
        return await self._bridge.call(partial(self._sync.send, topic, owned(body), queue_id=queue_id, **options))

    async def __aenter__(self) -> Transaction:
        self._sync = await self._bridge.call(lambda: (self._sync or self._make()).__enter__())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._sync is not None
        await self._bridge.finish(partial(self._sync.__exit__, kind, error, traceback))
