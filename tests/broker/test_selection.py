"""Queue selection: the hash vectors of delivery#queue-choice and clients#invariants, models, and the round robin."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore.broker.routing.selection import RoundRobin, group_queue, java_selector_queue, jump_hash, siphash24
from mqstore.layout.javahash import java_hash
from tests.waiting import in_threads

# Broker-semantics 12, measured against Guava 32.1.3: group, javaHash, jump for 4, 8, 16, sipHash24, its mod 4, 8, 16.
GUAVA = [
    ("", 0, (0, 0, 0), 8246050544436514353, (1, 1, 1)),
    ("a", 97, (0, 0, 0), 3144613055062689994, (2, 2, 10)),
    ("order-1", -1207111310, (3, 3, 3), -4360020059536918905, (3, 7, 7)),
    ("order-2", -1207111309, (2, 2, 11), -2743014572121975930, (2, 6, 6)),
    ("order-42", 1234255197, (3, 3, 10), -7687897554513327571, (1, 5, 13)),
    ("用户-7", 917655545, (1, 1, 12), 3272148689607412603, (3, 3, 11)),
    ("0123456789abcdef", 285443752, (1, 1, 1), -1016181572602893123, (1, 5, 13)),
]

# Run through Java and Guava: key, javaHash, jump for 1, 2, 3, 4, 8, 16, the 4.x selector for 8.
JAVA = [
    ("order-0", -1207111311, (0, 0, 0, 0, 0, 11), 7),
    ("order-1", -1207111310, (0, 0, 0, 3, 3, 3), 6),
    ("order-2", -1207111309, (0, 0, 2, 2, 2, 11), 5),
    ("order-3", -1207111308, (0, 1, 1, 3, 7, 7), 4),
    ("order-42", 1234255197, (0, 0, 2, 3, 3, 10), 5),
    ("fifo-group-1", 362194018, (0, 1, 2, 2, 5, 5), 2),
    ("订单1", 35013278, (0, 1, 1, 3, 7, 13), 6),
    ("GydZG_", -2147483648, (0, 1, 2, 2, 2, 2), 0),
    ("", 0, (0, 0, 0, 0, 0, 0), 0),
]

# The first of the 64 vectors that SipHash's authors publish: key 00..0f, input 00, 00 01, ...; little-endian output.
SIPHASH = [
    "310e0edd47db6f72", "fd67dc93c539f874", "5a4fa9d909806c0d", "2d7efbd796666785", "b7877127e09427cf",
    "8da699cd64557618", "cee3fe586e46c9cb", "37d1018bf50002ab", "6224939a79f5f593",
]  # fmt: skip

i64 = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.parametrize(("group", "java", "jump", "sip", "sip_mod"), GUAVA)
def test_guava_vector(group: str, java: int, jump: tuple[int, ...], sip: int, sip_mod: tuple[int, ...]) -> None:
    assert java_hash(group) == java
    assert tuple(jump_hash(java, n) for n in (4, 8, 16)) == jump
    assert tuple(group_queue(group, n) for n in (4, 8, 16)) == jump
    assert siphash24(group.encode()) == sip
    assert tuple(group_queue(group, n, "siphash24") for n in (4, 8, 16)) == sip_mod
    assert group_queue(group, 1) == group_queue(group, 1, "siphash24") == 0


@pytest.mark.parametrize(("key", "java", "jump", "selector"), JAVA)
def test_java_vector(key: str, java: int, jump: tuple[int, ...], selector: int) -> None:
    assert java_hash(key) == java
    assert tuple(group_queue(key, n) for n in (1, 2, 3, 4, 8, 16)) == jump
    assert java_selector_queue(key, 8) == selector


def test_the_queue_of_a_negative_siphash_is_javas_floor_mod() -> None:
    """Powers of two hide a hash read as unsigned; 3 and 7 do not."""
    for group, _, _, sip, _ in GUAVA:
        for queues in (3, 7):
            assert group_queue(group, queues, "siphash24") == sip - math.floor(Fraction(sip, queues)) * queues


@pytest.mark.parametrize(("size", "expected"), list(enumerate(SIPHASH)))
def test_siphash_is_that_of_its_authors(size: int, expected: str) -> None:
    value = siphash24(bytes(range(size)))
    assert (value % 2**64).to_bytes(8, "little").hex() == expected


def jump_model(state: int, buckets: int) -> int:
    """Jump hash by its definition: bucket b is left for a later one with the generator's own probability, in exact
    fractions, and Java's int arithmetic written out."""
    bucket = 0
    while True:
        state = (state * 2862933555777941757 + 1) % 2**64
        high = state // 2**33 + 1
        if high == 2**31:
            high = -(2**31)
        ahead = Fraction(bucket + 1) / Fraction(high, 2**31)
        following = min(math.trunc(ahead), 2**31 - 1)
        if not 0 <= following < buckets:
            return bucket
        bucket = following


@given(i64, st.integers(1, 10_000))
def test_jump_hash_equals_a_model(state: int, buckets: int) -> None:
    assert jump_hash(state, buckets) == jump_model(state, buckets)


def test_javas_int_overflow_stops_the_jump() -> None:
    """A state whose successor has 31 ones on top: in Java adding 1 turns them negative and the first bucket it is.
    Without that the next of the buckets would be taken."""
    state = ((2**64 - 1) - 1) * pow(2862933555777941757, -1, 2**64) % 2**64
    assert jump_hash(state, 16) == jump_model(state, 16) == 0


@given(st.text(st.characters(exclude_categories=())), st.integers(1, 64))
def test_any_group_has_a_queue(group: str, queues: int) -> None:
    for how in ("jump", "siphash24"):
        assert 0 <= group_queue(group, queues, how) < queues
    assert 0 <= java_selector_queue(group, queues) < queues


@pytest.mark.parametrize("queues", [0, -1])
def test_no_queues_is_an_error(queues: int) -> None:
    for call in (
        lambda: group_queue("g", queues),
        lambda: group_queue("g", queues, "siphash24"),
        lambda: java_selector_queue("g", queues),
    ):
        with pytest.raises(ValueError, match="at least one"):
            call()


def test_round_robin_goes_round_and_topics_have_counters_of_their_own() -> None:
    robin = RoundRobin()
    first = robin.next("a", 4)
    assert [robin.next("a", 4) for _ in range(5)] == [(first + n) % 4 for n in range(1, 6)]
    other = robin.next("b", 3)
    assert [robin.next("b", 3) for _ in range(4)] == [(other + n) % 3 for n in range(1, 5)]
    assert robin.next("a", 4) == (first + 6) % 4


def test_threads_share_one_counter_and_skip_no_queue() -> None:
    robin = RoundRobin()
    taken: list[list[int]] = [[] for _ in range(4)]

    def put(mine: list[int]) -> None:
        mine.extend(robin.next("a", 2**62) for _ in range(2_000))

    in_threads(*(partial(put, mine) for mine in taken))
    numbers = sorted(number for mine in taken for number in mine)
    assert numbers == list(range(numbers[0], numbers[0] + 8_000))
