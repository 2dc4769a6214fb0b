"""Unique keys: the identity that all copies of a message share (clients#unique-key).

    digits  bytes  what
         2      1  version, 01
        12      6  node: RocketMQ takes the network card's address. mqstore draws a random one for each process, because
                   containers share addresses and process ids. Its multicast bit is set, as RFC 9562 requires
         4      2  process id, low bytes
         8      4  seconds since 2021-01-01 UTC, low bytes: wall clock at the start of the process, plus monotonic
                   time, so that a clock set back does not repeat old keys
         8      4  sequence number, from a random start, one more each time
        34     17  upper-case hexadecimal digits

A forked child draws a new node and sequence. Otherwise it would repeat its parent's keys.
"""

from __future__ import annotations

import os
from itertools import count

from mqstore.clock import SYSTEM_CLOCK

_EPOCH_MS = 1_609_459_200_000
_MULTICAST = 1 << 40


class UniqueKeys:
    """Generator of unique keys. Thread-safe.

    >>> keys = UniqueKeys()
    >>> first, second = keys.new(), keys.new()
    >>> len(first), first[:2], first == second
    (34, '01', False)
    """

    def __init__(self) -> None:
        self.reseed()

    def reseed(self) -> None:
        """Draw a new node and a new sequence, as for a new process."""
        node = int.from_bytes(os.urandom(6), "big") | _MULTICAST
        self._prefix = f"01{node:012X}{os.getpid() & 0xFFFF:04X}"
        self._origin_ms = SYSTEM_CLOCK.now_ms() - _EPOCH_MS - SYSTEM_CLOCK.monotonic_ms()
        self._sequence = count(int.from_bytes(os.urandom(4), "big"))  # its `next` is atomic: no lock needed

    def new(self) -> str:
        """Return 34 upper-case hexadecimal digits that no other call returns, here or elsewhere."""
        seconds = (self._origin_ms + SYSTEM_CLOCK.monotonic_ms()) // 1000
        return f"{self._prefix}{seconds & 0xFFFF_FFFF:08X}{next(self._sequence) & 0xFFFF_FFFF:08X}"


PROCESS_KEYS = UniqueKeys()
"""Generator of this process's unique keys."""
os.register_at_fork(after_in_child=PROCESS_KEYS.reseed)

new_unique_key = PROCESS_KEYS.new
