"""Dead letters of a group of another process."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from mqstore.broker.redelivery.dead_letters import DeadLetters, Replay, _checked_offset, _Letter
from mqstore.log.message import Message

_PAGE: Final = 256


class RemoteLetters(DeadLetters):
    """Dead letters of one group, read a page at a time. Functions are applied here."""

    def __init__(self, call: Callable[[str, tuple[Any, ...], dict[str, Any]], Any], group: str) -> None:
        super().__init__(None, group)  # type: ignore[arg-type]  # its tables are in another process
        self._call = call

    @property
    def bounds(self) -> tuple[int, int]:
        bounds: tuple[int, int] = self._call("letters.bounds", (self.group,), {})
        return bounds

    def __len__(self) -> int:
        return int(self._call("letters.count", (self.group,), {}))

    def select(
        self,
        *,
        offsets: Iterable[int] | None = None,
        start_ms: int | None = None,
        stop_ms: int | None = None,
        where: Callable[[Message], bool] | None = None,
    ) -> Iterator[Message]:
        chosen = range(*self.bounds) if offsets is None else sorted(set(map(_checked_offset, offsets)))
        letters = self._pages(chosen, {"start_ms": start_ms, "stop_ms": stop_ms})
        return letters if where is None else filter(where, letters)

    def _pages(self, chosen: Sequence[int], options: dict[str, Any]) -> Iterator[Message]:
        while chosen:
            page = chosen[:_PAGE]
            letters = self._call("letters.select", (self.group,), {"offsets": list(page), **options})
            yield from (_Letter(each._batch, each._start, each.offset) for each in letters)
            # An answer has a limit, so it may lack the last ones of a page.
            chosen = chosen[bisect_right(chosen, letters[-1].offset if letters else page[-1]) :]

    def replay(
        self,
        offsets: Iterable[int | Message] | None = None,
        *,
        start_ms: int | None = None,
        stop_ms: int | None = None,
        where: Callable[[Message], bool] | None = None,
        **options: Any,
    ) -> Replay:
        chosen = None if offsets is None else [each.offset if isinstance(each, Message) else each for each in offsets]
        if where is not None:
            letters = self.select(offsets=chosen, start_ms=start_ms, stop_ms=stop_ms, where=where)
            chosen = [letter.offset for letter in letters]
        times = {"start_ms": start_ms, "stop_ms": stop_ms}
        replay: Replay = self._call("letters.replay", (self.group,), {"offsets": chosen, **times, **options})
        return replay

    def purge(self, **options: Any) -> int:
        return int(self._call("letters.purge", (self.group,), options))
