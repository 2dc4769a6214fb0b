"""Log lines that may come by the thousand, and are held back (clients#runtime).

    group billing: orders/3, offset 17: the handler failed, attempt 2: KeyError: 'id' (41 more like this were held back)
    whose          where                what                           the error      how many since the last one

Among similar lines the first is logged, then one every 10 s. The next one reports the number of lines held back. So do
`log_held`, which the owner calls now and then, and `close` at the end. Lines are similar if they say the same of
the same topic, with an error of the same type from the same line of code. So a harmless mistake does not hide a harmful
one.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from mqstore.clock import Clock, SystemClock
from mqstore.log.commitlog import QueueRef
from mqstore.log.message import Message
from mqstore.logger import log as _log
from mqstore.signalsafe import Lock

EVERY_MS: Final = 10_000
_KINDS_MAX: Final = 1_000
"""Maximum number of kinds that are counted. More occur only if code is generated."""


@dataclass(slots=True)
class _Kind:
    level: int
    line: str
    """Last line that was logged."""
    said_ms: int
    every_ms: float
    held: int = 0


class LimitedLog:
    """Log of one consumer or producer. Thread-safe."""

    def __init__(self, owner: str = "", clock: Clock | None = None) -> None:
        self._prefix = f"{owner}: " if owner else ""
        self._clock = clock or SystemClock()
        self._lock = Lock()
        self._kinds: dict[object, _Kind] = {}

    def say(
        self,
        level: int,
        what: str,
        *,
        at: object = None,
        error: BaseException | None = None,
        like: object = None,
        traceback: bool = False,
        stack: str = "",
        times: int = 1,
        once: bool = False,
    ) -> None:
        """Log `what`, unless a similar line was logged recently.

        at          place: a Message, a QueueRef, several of these, a topic
        like        key of similar lines, with topic and error; None: `what`
        traceback   True to log the traceback of `error`
        stack       stack of a thread, logged below the line
        times       number of events that this line reports
        once        True to log it only once, and report the number of others at the end
        """
        topic, where = _where(at)
        key = (what if like is None else like, topic, type(error), None if error is None else _raised_at(error))
        now_ms = self._clock.monotonic_ms()
        with self._lock:
            kind = self._kinds.get(key)
            if kind is not None and now_ms - kind.said_ms < kind.every_ms:
                kind.held += times
                return
            is_full = kind is None and len(self._kinds) >= _KINDS_MAX
        if is_full:
            self.close()
        line = f"{where}: {what}" if where else what
        if error is not None:
            line = f"{line}: {type(error).__name__}: {text_of(error)}"
        new = _Kind(level, line, now_ms, math.inf if once else EVERY_MS)
        with self._lock:
            before, self._kinds[key] = self._kinds.get(key), new
        held = f" ({before.held} more like this were held back)" if before is not None and before.held else ""
        below = f". It is at\n{stack}" if stack else ""
        _log.log(level, "%s%s%s%s", self._prefix, line, held, below, exc_info=error if traceback else None)

    def log_held(self) -> None:
        """Report the held-back lines of kinds that no longer occur. To be called now and then."""
        now_ms = self._clock.monotonic_ms()
        with self._lock:
            over = [key for key, kind in self._kinds.items() if now_ms - kind.said_ms >= kind.every_ms]
        self._tell(over)

    def close(self) -> None:
        """Report the held-back lines of all kinds. Later lines are logged again."""
        with self._lock:
            keys = list(self._kinds)
        self._tell(keys)

    def _tell(self, keys: Collection[object]) -> None:
        with self._lock:
            kinds = [kind for key in keys if (kind := self._kinds.pop(key, None)) is not None and kind.held]
        for kind in kinds:
            _log.log(kind.level, "%s%d more were held back like this: %s", self._prefix, kind.held, kind.line)


def _where(at: object) -> tuple[str, str]:
    """Return the topic, and the place as text."""
    if isinstance(at, Message):
        topic, queue = at.topic, at.queue
        retried = "" if queue.topic == topic else f" (of {topic})"
        return topic, f"{queue.topic}/{queue.queue_id}, offset {at.offset}{retried}"
    if isinstance(at, QueueRef):
        return at.topic, f"{at.topic}/{at.queue_id}"
    if isinstance(at, str):
        return at, at
    if isinstance(at, Collection) and at:
        topic, first = _where(next(iter(at)))
        return topic, f"{first} and {len(at) - 1} more" if first and len(at) > 1 else first
    return "", ""


def _raised_at(error: BaseException) -> tuple[str, int] | None:
    """Return the file and line of the innermost frame."""
    trace: TracebackType | None = error.__traceback__
    if trace is None:
        return None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename, trace.tb_lineno


def text_of(what: object) -> str:
    """Return `what` as text, or the type's name for an exception that cannot be shown."""
    try:
        return str(what)
    except Exception:
        return f"{type(what).__name__} (it cannot be shown)"
