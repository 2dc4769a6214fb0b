"""Dead letters with coroutines."""

from __future__ import annotations

from mqstore import contract
from mqstore.aio.base import AsyncBase, Value, called, paged

__all__ = ["DeadLetters"]


class DeadLetters(AsyncBase[contract.DeadLetters]):
    """Dead letters of a group: list, replay and purge them, as with the synchronous class.

    >>> import asyncio, mqstore, mqstore.aio, tempfile
    >>> async def main(folder):
    ...     async with mqstore.aio.open(folder) as store, store.queue("jobs") as jobs:
    ...         await jobs.put(b"poison")
    ...         await (await jobs.get()).reject("no such page")
    ...         async for letter in jobs.dead_letters:
    ...             print(letter.body, letter.properties["dlq_reason"])
    ...         print((await jobs.dead_letters.replay()).count, await jobs.dead_letters.count())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(main(folder))
    b'poison' no such page
    1 0
    """

    group = Value[str]()
    topic = Value[str]()
    select = paged(contract.DeadLetters.select)
    replay = called(contract.DeadLetters.replay)
    purge = called(contract.DeadLetters.purge)
    count = called(contract.DeadLetters.__len__)
    __aiter__ = paged(contract.DeadLetters.__iter__)

    async def bounds(self) -> tuple[int, int]:
        """Return the offsets of the first letter and of the next one to come."""
        return await self._bridge.call(lambda: self.sync.bounds)
