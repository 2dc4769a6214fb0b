"""`mqstore`'s dead letters with coroutines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial

from mqstore.aio.bridge import Bridge
from mqstore.aio.made import Pages
from mqstore.broker import deadletters
from mqstore.broker.deadletters import Replay
from mqstore.log.message import Message

__all__ = ["DeadLetters"]


class DeadLetters:
    """What a group gave up: to list, replay and purge. Arguments and errors are those of the sync class.

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

    def __init__(self, bridge: Bridge, letters: deadletters.DeadLetters) -> None:
        self._bridge = bridge
        self.sync = letters
        self.group = letters.group
        self.topic = letters.topic

    async def bounds(self) -> tuple[int, int]:
        """(offset of the first letter, offset of the next one to come)."""
        return await self._bridge.call(lambda: self.sync.bounds)

    async def count(self) -> int:
        """How many there are; of the sync class that is `len`."""
        return await self._bridge.call(lambda: len(self.sync))

    def __aiter__(self) -> AsyncIterator[Message]:
        """Oldest first."""
        return Pages(self._bridge, self.sync.__iter__)

    def select(
        self,
        *,
        offsets: Iterable[int] | None = None,
        start_ms: int | None = None,
        stop_ms: int | None = None,
        where: Callable[[Message], bool] | None = None,
    ) -> AsyncIterator[Message]:
        """Some of them; `where` is called on the store's thread."""
        chosen = None if offsets is None else list(offsets)
        select = partial(self.sync.select, offsets=chosen, start_ms=start_ms, stop_ms=stop_ms, where=where)
        return Pages(self._bridge, select)

    async def replay(
        self,
        offsets: Iterable[int | Message] | None = None,
        *,
        all_groups: bool = False,
        to_topic: str | None = None,
        start_ms: int | None = None,
        stop_ms: int | None = None,
        where: Callable[[Message], bool] | None = None,
        dry_run: bool = False,
    ) -> Replay:
        """Send letters again."""
        chosen = None if offsets is None else list(offsets)
        replay = partial(
            self.sync.replay,
            chosen,
            all_groups=all_groups,
            to_topic=to_topic,
            start_ms=start_ms,
            stop_ms=stop_ms,
            where=where,
            dry_run=dry_run,
        )
        return await self._bridge.call(replay)

    async def purge(
        self, *, before_offset: int | None = None, before_ms: int | None = None, dry_run: bool = False
    ) -> int:
        """Let go of letters; how many."""
        purge = partial(self.sync.purge, before_offset=before_offset, before_ms=before_ms, dry_run=dry_run)
        return await self._bridge.call(purge)

    async def expire(self, before_ms: int) -> int:
        """Let go of the letters filed before `before_ms`, in memory at first; how many."""
        return await self._bridge.call(partial(self.sync.expire, before_ms))

    def __repr__(self) -> str:
        return repr(self.sync)
