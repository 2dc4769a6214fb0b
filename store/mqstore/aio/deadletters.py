"""Dead letters with coroutines."""

from __future__ import annotations

from collections.abc import AsyncIterator

from mqstore.aio.bridge import Bridge
from mqstore.aio.forwards import DeadLettersForwards
from mqstore.aio.made import Pages
from mqstore.broker import deadletters
from mqstore.log.message import Message

__all__ = ["DeadLetters"]


class DeadLetters(DeadLettersForwards[deadletters.DeadLetters]):
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

    def __init__(self, bridge: Bridge, sync: deadletters.DeadLetters) -> None:
        super().__init__(bridge, sync)
        self.group = sync.group
        self.topic = sync.topic

    async def bounds(self) -> tuple[int, int]:
        """Return the offsets of the first letter and of the next one to come."""
        return await self._call(lambda: self.sync.bounds)

    async def count(self) -> int:
        """Return the number of letters, which is `len` in the synchronous class."""
        return await self._call(lambda: len(self.sync))

    def __aiter__(self) -> AsyncIterator[Message]:
        """Iterate over the letters, oldest first."""
        return Pages(self._bridge, self.sync.__iter__)
