"""Properties of a failed message that each kind of copy keeps: retries, dead letters, replayed dead letters."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mqstore import Message
from mqstore.admin import DeadLetters
from mqstore.broker.pop import unordered
from mqstore.broker.redelivery.reason import Reason
from mqstore.broker.redelivery.retry import Retries
from tests.broker.popsupport import DLQ, RETRY, PopBench

USER = ["mine", "TIMER_MINE", "TAGS", "UNIQ_KEY", "__SHARDINGKEY"]
DELIVERY = ["mqstore_expires_ms", "1ST_POP_TIME"]
FIRST = ["ORIGIN_MESSAGE_ID", "RETRY_TOPIC", "REAL_TOPIC", "REAL_QID", "RECONSUME_TIME", "MAX_RECONSUME_TIMES"]
LETTER = ["DLQ_ORIGIN_TOPIC", "DLQ_ORIGIN_MESSAGE_ID", "dlq_reason"]
DROPPED = [
    "DELAY",
    "POP_CK",
    "TIMER_DELAY_SEC",
    "TIMER_DELAY_MS",
    "TIMER_DELIVER_MS",
    "TIMER_OUT_MS",
    "TIMER_ENQUEUE_MS",
]
DROPPED += ["TIMER_DEQUEUE_MS", "TIMER_ROLL_TIMES", "TIMER_DEL_UNIQKEY", "TIMER_DELAY_LEVEL", "mqstore_retry_reason"]
OLD = {name: f"old {name}" for name in (*USER, *DELIVERY, *FIRST, *LETTER, *DROPPED, "WAIT")}


def failed(bench: PopBench, topic: str = "t") -> int:
    bench.parts.topics.ensure(topic, 1)
    return bench.parts.store.append(topic, 0, b"x", properties=OLD).physical_offset


def sent_back(bench: PopBench, **options: int) -> Message:
    return bench.parts.store.at(Retries(bench.parts).send_back("g", failed(bench), **options).physical_offset)


def popped(bench: PopBench) -> Message:
    failed(bench)
    bench.pop()
    bench.advance(60_000)
    return bench.read(RETRY)[0]


def rejected(bench: PopBench) -> Message:
    failed(bench)
    bench.service.dead_letter("g", "t", bench.pop()[0].receipt, "no")
    return bench.read(DLQ)[0]


def replayed(bench: PopBench) -> Message:
    failed(bench, DLQ)
    bench.parts.topics.ensure("other", 1)
    DeadLetters(bench.parts, "g").replay(to_topic="other")
    return bench.read("other")[0]


KINDS: dict[str, tuple[Callable[[PopBench], Message], list[str]]] = {
    "retry": (lambda bench: sent_back(bench, delay_ms=0), [*FIRST, *LETTER]),
    "dead letter": (lambda bench: sent_back(bench, delay_level=-1), FIRST),
    "retry of a pop": (popped, [*FIRST, *LETTER, *DELIVERY, "WAIT"]),
    "dead letter of a pop": (rejected, [*FIRST, "1ST_POP_TIME"]),
    "replay": (replayed, ["ORIGIN_MESSAGE_ID"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_copy_keeps_what_belongs_to_the_message(pops: PopBench, kind: str) -> None:
    copy, kept = KINDS[kind]
    assert OLD.items() & copy(pops).stored_properties().items() == {(name, OLD[name]) for name in (*USER, *kept)}


@pytest.mark.parametrize("way", ["by offset", "popped", "popped, without compiled parts"])
@pytest.mark.parametrize(("size", "reason"), [(4_000, "boom"), (4_100, None), (32_000, None)])
def test_reason_is_left_out_of_a_retry_with_long_properties(
    pops: PopBench, monkeypatch: pytest.MonkeyPatch, way: str, size: int, reason: str | None
) -> None:
    properties = {"UNIQ_KEY": "u", "mine": "x" * size}
    receipts = [pops.parts.store.append("t", 0, b"x", properties=properties) for _ in range(3)]
    if way == "by offset":
        places, options = [each.physical_offset for each in receipts], {"delay_ms": 0, "reason": Reason("boom")}
        places = [Retries(pops.parts).send_back("g", place, **options).physical_offset for place in places]
        copies = [pops.parts.store.at(place) for place in places]
    else:
        if way != "popped":
            monkeypatch.setattr(unordered, "kernel", None)
        for delivery in pops.pop(n=3):
            pops.service.nack("g", "t", delivery.receipt, 1_000, error="boom")
        pops.advance(1_000)
        copies = pops.read(RETRY)
    assert [each.system_properties.get("mqstore_retry_reason") for each in copies] == [reason] * 3
