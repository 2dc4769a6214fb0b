"""Ops: notes in the log of half messages that have ended (delivery#transactions).

op         RMQ_SYS_TRANS_OP_HALF_TOPIC, queue 0, tag d, body "12,15," = queue offsets of halves that are done

add ---> collected, for 3 s or until they take 4096 bytes ---> written as one op ---> needed, until all halves before
                                                                                     its largest one are done
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from mqstore.broker.names import OP_TOPIC
from mqstore.broker.parts import Parts, messages_of
from mqstore.layout.properties import TAGS
from mqstore.log.message import Message
from mqstore.log.writer import Outlet

__all__ = ["OP_EVERY_MS", "OpLog"]

OP_EVERY_MS: Final = 3_000
OP_BYTES: Final = 4_096
_QUEUE: Final = 0


class OpLog:
    """Collected ops, and written ones that are still needed. Thread-safe."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._bytes_max = min(OP_BYTES, parts.store.manifest.commitlog_segment_bytes // 2)
        self._writing = threading.Lock()
        """Lock for a whole write, taken before `_lock`."""
        self._outlet: Outlet | None = None
        self._lock = threading.Lock()
        self._gathered: list[int] = []
        self._gathered_bytes = 0
        self._gathered_ms = 0
        self._written: deque[tuple[int, int]] = deque()
        """Queue offset of each op, and the largest half in it."""
        self._end = 0

    def load(self, first: int, end: int) -> set[int]:
        """Read the ops in [first, end) of their queue. Return the queue offsets of the halves that they name."""
        done: set[int] = set()
        for message in messages_of(self._parts.store, OP_TOPIC, first, end):
            halves = _halves_of(message)
            done.update(halves)
            self._written.append((message.offset, max(halves, default=-1)))
        self._end = end
        return done

    @property
    def due_ms(self) -> int | None:
        """Time at which the collected ops must be written (wall clock). None without any."""
        with self._lock:
            return self._gathered_ms + OP_EVERY_MS if self._gathered else None

    def add(self, half: int) -> bool:
        """Collect the queue offset of a half that has ended. Return True if an op is full, to be written now."""
        with self._lock:
            if not self._gathered:
                self._gathered_ms = self._parts.clock.now_ms()
            self._gathered.append(half)
            self._gathered_bytes += len(str(half)) + 1
            return self._gathered_bytes > self._bytes_max

    def write(self) -> None:
        """Put the collected ops into the op topic. Raises what a put raises. Unwritten ops stay collected."""
        with self._writing:
            while self._gathered:
                with self._lock:
                    count, size = 0, 0
                    while count < len(self._gathered) and size <= self._bytes_max:
                        size += len(str(self._gathered[count])) + 1
                        count += 1
                    halves = self._gathered[:count]
                if self._outlet is None:
                    self._parts.topics.ensure(OP_TOPIC, 1)
                    self._outlet = self._parts.store.outlet(OP_TOPIC, _QUEUE, {TAGS: "d"})
                receipt = self._outlet.put("".join(f"{half}," for half in halves).encode(), "append")
                with self._lock:
                    del self._gathered[:count]
                    self._gathered_bytes -= size
                    self._written.append((receipt.offset, max(halves)))
                    self._end = receipt.offset + 1

    def needed_from(self, half_done: int) -> int:
        """Return the queue offset of the first op still needed if all halves before `half_done` are done."""
        with self._lock:
            while self._written and self._written[0][1] < half_done:
                self._written.popleft()
            return self._written[0][0] if self._written else self._end


def _halves_of(op: Message) -> list[int]:
    """Return the half offsets that an op names. Other content of its body is ignored."""
    return [
        int(piece) for piece in op.body.decode("ascii", "replace").split(",") if piece.isascii() and piece.isdigit()
    ]
