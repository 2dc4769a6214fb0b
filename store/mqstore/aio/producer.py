"""Producer with coroutines (clients#submit).

    send, submit    on the loop, as a put, if it needs no sync and nothing is on its way before it; else checked here,
                    and stored by the producer's writer, in the order of the calls
    rest            on the store's thread

The limit on submitted messages that are not stored is kept here: callers beyond it wait on the loop, in line. It is
taken from the synchronous producer, which would block the loop.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from mqstore.aio.base import Closable, Value, called, like
from mqstore.aio.loop_thread import LoopThread, owned, size_of
from mqstore.client.send import producer, transaction
from mqstore.errors import SendError, StoreIOError
from mqstore.log.commitlog import SendReceipt
from mqstore.log.writing.outgoing import Body


class Transaction(Closable[transaction.Transaction]):
    """`mqstore.Transaction` with coroutines: messages become visible when its `async with` block ends well.
    The end of the block is not cancelled. A cancellation is raised after it."""

    receipts = Value[list[SendReceipt | None]]()
    send = called(transaction.Transaction.send)

    async def __aenter__(self) -> Transaction:
        await self._bridge.call(self.sync.__enter__)
        return self


class Producer(Closable[producer.Producer]):
    """`mqstore.Producer` with coroutines, made by `Store.producer`.
    Interceptors, selector and checker are plain functions, called on the loop and on other threads."""

    group = Value[str]()
    send_oneway = called(producer.Producer.send_oneway, LoopThread.in_order)
    send_many = called(producer.Producer.send_many, LoopThread.in_order)
    flush = called(producer.Producer.flush, LoopThread.apart)
    run_once = called(producer.Producer.run_once)
    close = called(producer.Producer.close, LoopThread.finish)

    def __init__(self, bridge: LoopThread, sync: producer.Producer) -> None:
        super().__init__(bridge, sync)
        line = sync._submitter
        self._max, self._max_bytes, self._lingers = line.max_loads, line.max_bytes, line.linger_ms > 0
        line.max_loads = line.max_bytes = 1 << 60
        self._flushes = (sync._preparer.durability or bridge.store.broker.durability) == "flush"
        self._held: dict[asyncio.Future[SendReceipt], int] = {}
        """Submitted messages that are not stored, oldest first, with their sizes."""
        self._held_bytes = 0
        self._line = asyncio.Lock()
        """Line of the callers that submit."""

    @like(producer.Producer.send)
    async def send(self, topic: str, body: Body, **options: Any) -> SendReceipt:
        """Messages are stored in the order of the calls. If cancelled, it is stored whole or not at all."""
        return await (await self.submit(topic, body, **options))

    @like(producer.Producer.submit)
    async def submit(self, topic: str, body: Body, **options: Any) -> asyncio.Future[SendReceipt]:
        """It waits for room on the loop, and returns a future of asyncio. A message whose future is cancelled in time
        is not stored. A message that needs no sync is usually stored on return."""
        self._bridge.check()
        size = size_of(body)
        durability = options.get("durability")
        flushes = self._flushes if durability is None else durability == "flush"
        if not (flushes or self._held or self._line.locked()) and self._bridge.here(topic, size):
            stored: asyncio.Future[SendReceipt] = self._bridge.loop.create_future()
            try:
                stored.set_result(self.sync.send(topic, body, **options))
            except (SendError, StoreIOError) as error:  # errors of the engine come with the future
                stored.set_exception(error)
            if self._bridge.is_turn_over():
                await asyncio.sleep(0)
            return stored
        async with self._line:
            while self._held and (len(self._held) >= self._max or self._held_bytes + size > self._max_bytes):
                # A flush ends all lingering. Messages are stored in order, the oldest first.
                await (self.flush() if self._lingers else asyncio.wait([next(iter(self._held))]))
            self._bridge.check()
            here = self._bridge.here(topic, size)
            body = body if here else owned(body)
            submit = partial(self.sync.submit, topic, body, **options)
            mine = asyncio.wrap_future(submit() if here else await self._bridge.in_order(submit))
            self._held[mine] = size
            self._held_bytes += size
            mine.add_done_callback(self._stored)
            return mine

    def _stored(self, mine: asyncio.Future[SendReceipt]) -> None:
        self._held_bytes -= self._held.pop(mine)

    @like(producer.Producer.transaction)
    def transaction(self, **options: Any) -> Transaction:
        """A cancelled block is rolled back."""
        self._bridge.check()
        return Transaction(self._bridge, self.sync.transaction(**options))
