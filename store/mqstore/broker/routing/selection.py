"""Choice of the queue of a topic to which a message is put (delivery#queue-choice)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final, Literal

from mqstore import arrays as np
from mqstore.layout.javahash import java_hash

GroupHash = Literal["jump", "siphash24"]

_MASK: Final = 2**64 - 1
_CACHED_GROUPS = 16_384
_I31_MAX = 2**31 - 1


def jump_hash(state: int, buckets: int) -> int:
    """Return the bucket (from 0) of a 64-bit `state`: Lamping and Veach's jump hash, as in Guava.

    A new bucket takes one in `buckets` + 1 of the states, and no others move. Raises ValueError without buckets.

    >>> [jump_hash(java_hash("order-2"), n) for n in (1, 4, 8, 16)]
    [0, 2, 2, 11]
    """
    if buckets < 1:
        raise ValueError(f"there must be at least one bucket, not {buckets}")
    candidate = 0
    while True:
        state = (2862933555777941757 * state + 1) & _MASK
        high = state >> 33
        if high == _I31_MAX:  # Java adds 1 to this int, gets a negative number, and stops here
            return candidate
        following = int((candidate + 1) / ((high + 1) / 2**31))
        if following >= buckets:
            return candidate
        candidate = following


def jump_hash_many(states: np.NDArray[np.integer[Any]], buckets: np.NDArray[np.int64]) -> np.NDArray[np.int64]:
    """Return `jump_hash` of many states, each with its own number of buckets.
    Raises ValueError if one is below 1.

    >>> jump_hash_many(np.array([java_hash("order-2")] * 4), np.array([1, 4, 8, 16])).tolist()
    [0, 2, 2, 11]
    """
    if buckets.size and int(buckets.min()) < 1:
        raise ValueError("there must be at least one bucket for each")
    state = states.astype(np.int64).view(np.uint64)  # `astype` copies, so `states` is not changed
    result = np.zeros(len(state), np.int64)
    active = np.arange(len(state))
    while len(active):
        now = state[active] * np.uint64(2862933555777941757) + np.uint64(1)  # modulo 2**64
        state[active] = now
        high = (now >> np.uint64(33)).astype(np.int64)
        following = ((result[active] + 1) / ((high + 1) / 2**31)).astype(np.int64)
        continues = (high != _I31_MAX) & (following < buckets[active])
        active = active[continues]
        result[active] = following[continues]
    return result


def siphash24(data: bytes) -> int:
    """Return SipHash-2-4 of `data` as Java's signed long. The key is Guava's, bytes 00 to 0f.

    >>> siphash24(b"order-1")
    -4360020059536918905
    """
    k0, k1 = int.from_bytes(bytes(range(8)), "little"), int.from_bytes(bytes(range(8, 16)), "little")
    # The constants spell "somepseudorandomlygeneratedbytes".
    state = (k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573)
    whole = len(data) & ~7
    for start in range(0, whole, 8):
        state = _absorb(state, int.from_bytes(data[start : start + 8], "little"))
    state = _absorb(state, int.from_bytes(data[whole:], "little") | (len(data) & 0xFF) << 56)
    v0, v1, v2, v3 = state
    v0, v1, v2, v3 = _rounds(4, (v0, v1, v2 ^ 0xFF, v3))
    value = v0 ^ v1 ^ v2 ^ v3
    return value - 2**64 if value >> 63 else value


_State = tuple[int, int, int, int]


def _absorb(state: _State, word: int) -> _State:
    v0, v1, v2, v3 = _rounds(2, (*state[:3], state[3] ^ word))
    return v0 ^ word, v1, v2, v3


def _rounds(count: int, state: _State) -> _State:
    v0, v1, v2, v3 = state
    for _ in range(count):
        v0 = (v0 + v1) & _MASK
        v1 = (v1 << 13 | v1 >> 51) & _MASK ^ v0
        v0 = (v0 << 32 | v0 >> 32) & _MASK
        v2 = (v2 + v3) & _MASK
        v3 = (v3 << 16 | v3 >> 48) & _MASK ^ v2
        v0 = (v0 + v3) & _MASK
        v3 = (v3 << 21 | v3 >> 43) & _MASK ^ v0
        v2 = (v2 + v1) & _MASK
        v1 = (v1 << 17 | v1 >> 47) & _MASK ^ v2
        v2 = (v2 << 32 | v2 >> 32) & _MASK
    return v0, v1, v2, v3


@lru_cache(maxsize=_CACHED_GROUPS)
def group_queue(message_group: str, queues: int, how: GroupHash = "jump") -> int:
    """Return the queue id of a message group, always the same for the same arguments.

    `queues` is the number of writable queues. Results are cached: each message of a group needs one, and the hash of a
    short name takes microseconds. Raises ValueError without queues.

    >>> group_queue("order-42", 8), group_queue("order-42", 8, "siphash24")
    (3, 5)
    """
    if how == "jump":
        return jump_hash(java_hash(message_group), queues)
    if queues < 1:
        raise ValueError(f"there must be at least one queue, not {queues}")
    # "replace": like Java, a lone surrogate becomes a question mark.
    return siphash24(message_group.encode("utf-8", "replace")) % queues


def java_selector_queue(argument: str, queues: int) -> int:
    """Return the queue of the selector `SelectMessageQueueByHash` of 4.x clients.
    For producers that replace such a client. Raises ValueError without queues.

    >>> java_selector_queue("order-1", 8)
    6
    """
    if queues < 1:
        raise ValueError(f"there must be at least one queue, not {queues}")
    return abs(java_hash(argument)) % queues  # Java takes abs of the remainder, which is the same number


class RoundRobin(dict[str, Iterator[int]]):
    """Queue choice for messages without a group: a counter for each topic, shared by all threads.
    It starts at a random number, so that many short processes that put one message each do not all fill queue 0."""

    def __missing__(self, topic: str) -> Iterator[int]:
        return self.setdefault(topic, itertools.count(random.getrandbits(31)))

    def forget(self, topic: str) -> None:
        """Start with a new random number at the next message of a topic that was changed or deleted."""
        self.pop(topic, None)

    def next(self, topic: str, queues: int) -> int:
        """Return the next queue id of `topic`, 0 <= id < `queues`. Raises ZeroDivisionError without queues."""
        return next(self[topic]) % queues  # no lock, because a step of `itertools.count` is atomic
