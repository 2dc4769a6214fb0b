"""A message on lease: the verbs, what `with` makes of the end of its block, what is settled stays settled. All of it
for groups with and without order, whose engines differ."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import Delivery, Message, Reject, Retry, RetryPolicy, SimpleConsumer
from tests.broker.support import full
from tests.client.popsupport import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "store")
    bench.store.create_topic("t", queues=1)
    yield bench
    bench.store.close()


@pytest.fixture(params=[False, True], ids=["standard", "ordered"])
def consumer(bench: Bench, request: pytest.FixtureRequest) -> SimpleConsumer:
    return bench.consumer(ordered=request.param, visibility=30, retry=RetryPolicy(3, [10, 20]))


def received(bench: Bench, consumer: SimpleConsumer, body: bytes = b"a") -> Delivery:
    bench.put(body)
    [delivery] = consumer.receive(wait=0)
    return delivery


def leave(delivery: Delivery) -> None:
    """Give it back unseen."""
    with suppress(KeyboardInterrupt), delivery:
        raise KeyboardInterrupt


def again(consumer: SimpleConsumer) -> list[tuple[bytes, int]]:
    """(body, attempt) of what can be received now, which is given back unseen."""
    found = consumer.receive(10, wait=0)
    for delivery in found:
        leave(delivery)
    return [(delivery.message.body, delivery.attempt) for delivery in found]


# -- the verbs --------------------------------------------------------------------------------------------------------


def test_ack_is_for_ever_and_again_is_harmless(bench: Bench, consumer: SimpleConsumer) -> None:
    delivery = received(bench, consumer)
    assert not delivery.settled
    delivery.ack()
    assert delivery.settled
    delivery.ack()
    bench.advance(100)
    assert again(consumer) == []
    assert bench.lag() == 0


def test_what_is_not_settled_comes_again_when_its_time_is_over(bench: Bench, consumer: SimpleConsumer) -> None:
    delivery = received(bench, consumer)
    begin_s = bench.clock.monotonic_ms() / 1000
    assert delivery.expires_at == begin_s + 30
    bench.advance(29.9)
    assert again(consumer) == []
    bench.advance(0.1)
    assert again(consumer) == [(b"a", 2)]
    assert not delivery.settled


def test_an_ack_that_is_late_counts_until_the_message_was_given_to_others(
    bench: Bench, consumer: SimpleConsumer
) -> None:
    delivery = received(bench, consumer)
    bench.advance(30)
    if consumer.ordered:  # nobody has popped it
        delivery.ack()
        assert (delivery.settled, again(consumer)) == (True, [])
    else:  # the copy is there
        with pytest.raises(mqstore.errors.ReceiptExpiredError):
            delivery.ack()
        assert not delivery.settled


def test_late_verbs_are_told_and_change_nothing(bench: Bench, consumer: SimpleConsumer) -> None:
    late = received(bench, consumer)
    bench.advance(30)
    [second] = consumer.receive(wait=0)
    for verb in (late.ack, late.nack, late.reject, lambda: late.extend(100)):
        with pytest.raises(mqstore.errors.ReceiptExpiredError):
            verb()
    assert not late.settled
    assert late.expires_at < second.expires_at
    bench.advance(29.9)
    assert again(consumer) == []
    second.ack()
    assert (bench.letters(), bench.lag()) == ([], 0)


def test_nack_comes_again_after_its_delay(bench: Bench, consumer: SimpleConsumer) -> None:
    delivery = received(bench, consumer)
    delivery.nack(5)
    delivery.nack(5)  # again is harmless
    assert delivery.settled
    bench.advance(4.9)
    assert again(consumer) == []
    bench.advance(0.1)
    assert again(consumer) == [(b"a", 2)]


def test_nack_without_a_delay_follows_the_policy_to_the_dead_letters(bench: Bench, consumer: SimpleConsumer) -> None:
    bench.put(b"a")
    for attempt, pause_s in ((1, 10), (2, 20)):
        [delivery] = consumer.receive(wait=0)
        assert delivery.attempt == delivery.message.attempt == attempt
        delivery.nack()
        bench.advance(pause_s - 0.1)
        assert again(consumer) == []
        bench.advance(0.1)
    [delivery] = consumer.receive(wait=0)
    delivery.nack()
    bench.advance(100)
    assert again(consumer) == []
    assert bench.letters() == [(b"a", "attempt 3 of 3 failed")]


def test_extend_keeps_it_longer_and_its_receipt_good(bench: Bench, consumer: SimpleConsumer) -> None:
    delivery = received(bench, consumer)
    bench.advance(20)
    delivery.extend(60)
    assert delivery.expires_at == bench.clock.monotonic_ms() / 1000 + 60
    bench.advance(40)
    delivery.extend(60)
    bench.advance(59.9)
    assert again(consumer) == []
    assert not delivery.settled
    delivery.ack()
    bench.advance(100)
    assert (again(consumer), bench.lag()) == ([], 0)


def test_extend_may_shorten(bench: Bench, consumer: SimpleConsumer) -> None:
    received(bench, consumer).extend(1)
    bench.advance(1)
    assert again(consumer) == [(b"a", 2)]


@pytest.mark.parametrize(("reason", "told"), [(("no such customer",), "no such customer"), ((), "rejected")])
def test_reject(bench: Bench, consumer: SimpleConsumer, reason: tuple[str, ...], told: str) -> None:
    delivery = received(bench, consumer)
    delivery.reject(*reason)
    delivery.reject("again is harmless")
    assert delivery.settled
    bench.advance(100)
    assert again(consumer) == []
    assert bench.letters() == [(b"a", told)]


VERBS: dict[str, tuple[Callable[[Delivery], object], list[tuple[bytes, int]]]] = {
    "ack": (lambda delivery: delivery.ack(), []),
    "nack": (lambda delivery: delivery.nack(), [(b"a", 2)]),
    "reject": (lambda delivery: delivery.reject(), []),
    "leave": (leave, [(b"a", 1)]),
}
"""Verbs, and what can be received afterwards."""


@pytest.mark.parametrize("first", VERBS)
def test_what_is_settled_stays_so(bench: Bench, consumer: SimpleConsumer, first: str) -> None:
    """In order the engine would take an ack of what was given back: the receipt of its batch is good until the next."""
    delivery = received(bench, consumer)
    VERBS[first][0](delivery)
    for other in VERBS.keys() - {first, "leave"}:
        with pytest.raises(mqstore.errors.ReceiptExpiredError, match="settled before"):
            VERBS[other][0](delivery)
    with pytest.raises(mqstore.errors.ReceiptExpiredError, match="settled before"):
        delivery.extend(100)
    bench.advance(10)
    assert again(consumer) == VERBS[first][1]
    assert len(bench.letters()) == (first == "reject")


def test_arguments_that_cannot_be_settle_nothing(bench: Bench, consumer: SimpleConsumer) -> None:
    delivery = received(bench, consumer)
    for wrong in (-1, 12 * 3600 + 1, float("nan"), float("inf")):
        with pytest.raises(mqstore.errors.ConfigError):
            delivery.nack(wrong)
        with pytest.raises(mqstore.errors.ConfigError):
            delivery.extend(wrong)
    assert not delivery.settled
    assert delivery.expires_at == bench.clock.monotonic_ms() / 1000 + 30
    delivery.ack()


# -- with -------------------------------------------------------------------------------------------------------------


def test_a_clean_end_acknowledges(bench: Bench, consumer: SimpleConsumer) -> None:
    with received(bench, consumer) as message:
        assert isinstance(message, Message)
        assert (message.body, message.topic) == (b"a", "t")
    bench.advance(100)
    assert (again(consumer), bench.lag()) == ([], 0)


def test_an_exception_gives_back_and_passes(bench: Bench, consumer: SimpleConsumer) -> None:
    delivery = received(bench, consumer)
    with pytest.raises(RuntimeError, match="mine"), delivery:
        raise RuntimeError("mine")
    assert delivery.settled
    bench.advance(9.9)
    assert again(consumer) == []
    bench.advance(0.1)
    assert again(consumer) == [(b"a", 2)]


class Bare(Retry):
    def __init__(self) -> None:
        """Forgets its parent's."""


@pytest.mark.parametrize(("retry", "pause_s"), [(Retry(5), 5), (Retry(0), 0), (Retry(), 10), (Bare(), 10)])
def test_retry_is_done_and_goes_no_farther(
    bench: Bench, consumer: SimpleConsumer, retry: Retry, pause_s: float
) -> None:
    with received(bench, consumer):
        raise retry
    if pause_s:
        bench.advance(pause_s - 0.1)
        assert again(consumer) == []
    bench.advance(0.1)
    assert again(consumer) == [(b"a", 2)]


def test_reject_is_done_and_goes_no_farther(bench: Bench, consumer: SimpleConsumer) -> None:
    with received(bench, consumer):
        raise Reject("no such customer")
    assert bench.letters() == [(b"a", "no such customer")]
    bench.advance(100)
    assert again(consumer) == []


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_ctrl_c_and_the_like_are_no_failure_of_the_message(
    bench: Bench, consumer: SimpleConsumer, kind: type[BaseException]
) -> None:
    delivery = received(bench, consumer)
    with pytest.raises(kind), delivery:
        raise kind
    bench.settle()
    assert again(consumer) == [(b"a", 1)]


@pytest.mark.parametrize(
    ("verb", "comes", "dead"),
    [
        (lambda delivery: delivery.ack(), [], 0),
        (lambda delivery: delivery.nack(5), [(b"a", 2)], 0),
        (lambda delivery: delivery.reject("bad"), [], 1),
    ],
    ids=["ack", "nack", "reject"],
)
@pytest.mark.parametrize("error", [None, RuntimeError("mine"), KeyboardInterrupt()], ids=["clean", "error", "ctrl-c"])
def test_what_was_settled_inside_is_left_so(
    bench: Bench, consumer: SimpleConsumer, verb: Any, comes: list[Any], dead: int, error: BaseException | None
) -> None:
    delivery = received(bench, consumer)
    caught = None
    try:
        with delivery:
            verb(delivery)
            if error is not None:
                raise error
    except BaseException as raised:
        caught = raised
    assert caught is error
    bench.advance(5)
    assert again(consumer) == comes
    assert len(bench.letters()) == dead


def test_an_order_that_contradicts_what_was_done_is_told(bench: Bench, consumer: SimpleConsumer) -> None:
    delivery = received(bench, consumer)
    with pytest.raises(mqstore.errors.ReceiptExpiredError, match="settled before, by ack"), delivery:  # noqa: PT012
        delivery.ack()
        raise Retry(5)
    assert bench.lag() == 0


def test_a_clean_end_that_is_too_late_is_told(bench: Bench, consumer: SimpleConsumer) -> None:
    delivery = received(bench, consumer)
    with pytest.raises(mqstore.errors.ReceiptExpiredError), delivery:  # noqa: PT012
        bench.advance(30)
        [second] = consumer.receive(wait=0)
    second.ack()


@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_what_happened_first_is_what_the_caller_sees(
    bench: Bench, consumer: SimpleConsumer, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    delivery = received(bench, consumer)
    caught = None
    try:
        with delivery:
            bench.advance(30)
            [second] = consumer.receive(wait=0)
            raise error
    except BaseException as raised:
        caught = raised
    assert caught is error
    assert "could not be released" in caplog.text
    second.ack()
    assert bench.lag() == 0


# -- a full disk ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["ack", "nack", "reject"])
def test_a_full_disk_is_told_and_the_verb_may_be_said_again(
    bench: Bench, consumer: SimpleConsumer, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivery = received(bench, consumer)
    with monkeypatch.context() as disk:
        for name in ("ack", "_ack_at_once", "nack", "dead_letter"):
            disk.setattr(bench.broker, name, full)
        with pytest.raises(mqstore.errors.StoreFullError):
            getattr(delivery, verb)()
        assert not delivery.settled
        with pytest.raises(RuntimeError, match="mine"), delivery:
            raise RuntimeError("mine")
        assert not delivery.settled
    getattr(delivery, verb)()
    assert delivery.settled
    bench.advance(10)
    assert again(consumer) == ([(b"a", 2)] if verb == "nack" else [])
    assert len(bench.letters()) == (verb == "reject")


# -- what it shows ----------------------------------------------------------------------------------------------------


def test_one_that_comes_again_is_shown_as_it_was_sent(bench: Bench, consumer: SimpleConsumer) -> None:
    bench.put(b"a", tag="red", keys="k", properties={"p": "1"})
    [delivery] = consumer.receive(wait=0)
    first = delivery.message
    delivery.nack(1)
    bench.advance(1)
    [delivery] = consumer.receive(wait=0)
    message = delivery.message
    assert delivery.message is message
    assert (message.topic, message.attempt, message.reconsume_times) == ("t", 2, 1)
    assert (message.body, message.tag, message.keys, dict(message.properties)) == (b"a", "red", ("k",), {"p": "1"})
    assert message.unique_key == first.unique_key
    assert message.queue.topic == ("t" if consumer.ordered else "%RETRY%g+t")


FACTS = (
    *("topic", "queue", "offset", "body", "text", "tag", "keys", "properties", "unique_key", "message_id", "attempt"),
    *("reconsume_times", "tags_code", "message_group", "born_host", "store_timestamp_ms", "physical_offset", "flag"),
)


def facts_of(message: Message) -> list[Any]:
    found = [getattr(message, name) for name in FACTS]
    return [each() if callable(each) else dict(each) if isinstance(each, Mapping) else each for each in found]


@pytest.mark.parametrize("batch", [1, 40], ids=["one", "a batch of arrays"])
def test_messages_can_be_pickled(bench: Bench, consumer: SimpleConsumer, batch: int) -> None:
    """The pages offer a process pool for handlers that compute: a task's message could not be passed to it."""
    producer = mqstore.Producer(bench.broker, compress_over=100)
    for body in (b"small", b"large" * 1000):
        producer.send("t", body, tag="a", keys="k", properties={"p": "x"}, flag=7, queue_id=0)
    bench.broker.put_many("t", [b"more"] * (batch - 1), queue_id=0)
    [delivery] = consumer.receive(1, wait=0)
    first = delivery.message
    delivery.nack(0)
    bench.advance(1)
    received = (each.message for _ in range(20) for each in consumer.receive(32, wait=0))
    again = next(message for message in received if message.attempt == 2)
    messages = [first, again, *bench.broker.read("t", 0, 0, 64).messages]
    expected = [facts_of(message) for message in messages]
    copies = pickle.loads(pickle.dumps(messages))
    assert copies == messages
    bench.broker.close()
    assert [facts_of(copy) for copy in copies] == expected
    assert again.topic == "t", "as it was sent"


def test_a_receipt_settles_from_elsewhere(bench: Bench, consumer: SimpleConsumer) -> None:
    delivery = received(bench, consumer)
    bench.broker.ack("g", "t", [delivery.receipt])
    delivery.ack()
    assert bench.lag() == 0


def test_its_name_says_which_one_it_is(bench: Bench, consumer: SimpleConsumer) -> None:
    delivery = received(bench, consumer)
    assert repr(delivery) == "<Delivery of t/0, offset 0, attempt 1>"
    delivery.ack()
    assert repr(delivery) == "<Delivery of t/0, offset 0, attempt 1, ack>"
