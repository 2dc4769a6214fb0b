"""Arguments of a wrong kind: an error of ours that says what was given and what is wanted, and nothing has happened."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore.errors import ConfigError, FilterError, InvalidMessageError

Case = tuple[Callable[[Any], object], type[Exception], str]


@pytest.fixture
def store(mq_store: mqstore.Store) -> mqstore.Store:
    mq_store.put("orders", b"first")
    return mq_store


def _assigned(store: Any) -> Any:
    consumer = store.pull_consumer("billing")
    consumer.assign(("orders", 0))
    return consumer


def _leased(store: Any) -> Any:
    [delivery] = store.simple_consumer("billing", {"orders": "*"}).receive(wait=0)
    return delivery


def _delayed() -> mqstore.OutgoingMessage:
    return mqstore.OutgoingMessage(b"x", delay=5)


def _placed() -> mqstore.OutgoingMessage:
    return mqstore.OutgoingMessage(b"x", queue_id=1)


REFUSED: list[Case] = [
    (lambda s: s.queue(5), ConfigError, "not 5"),
    (lambda s: s.queue(None), ConfigError, "not None"),
    (lambda s: s.queue("jobs", codec=5), ConfigError, "codec .*TEXT.*5"),
    (lambda s: s.queue("jobs", codec="json"), ConfigError, "codec .*'json'"),
    (lambda s: s.queue("waiting").get(timeout="soon"), ConfigError, "timeout .*'soon'"),
    (lambda s: s.queue("jobs", visibility=None), ConfigError, "visibility .*None"),
    (lambda s: _leased(s).extend(86_400), ConfigError, "visibility is 86400; give 12 hours at most"),
    (lambda s: _leased(s).nack(86_400), ConfigError, "delay is 86400; give 12 hours at most"),
    (lambda s: s.simple_consumer("billing", "orders"), ConfigError, "topics .*'orders'"),
    (lambda s: s.simple_consumer("billing", interceptors=[5]), ConfigError, "5 .*Interceptor"),
    (lambda s: s.push_consumer("billing", interceptors=5), ConfigError, "interceptors .*5"),
    (lambda s: s.pull_consumer("billing", interceptors=[print]), ConfigError, "Interceptor"),
    (lambda s: s.producer(interceptors=[mqstore.Interceptor]), ConfigError, "Interceptor"),
    (lambda s: s.producer(compress_over=-1), ConfigError, "compress_over .*-1"),
    (lambda s: s.producer(linger="long"), ConfigError, "linger .*'long'"),
    (lambda s: s.producer(timeout=[]), ConfigError, r"timeout .*\[\]"),
    (lambda s: s.pull_consumer("billing", strategy="fixed"), ConfigError, r"mqstore\.fixed_queues\(queues\)"),
    (lambda s: s.push_consumer("DEFAULT_CONSUMER"), ConfigError, "DEFAULT_CONSUMER.*choose another name"),
    (lambda s: s.simple_consumer("DEFAULT_CONSUMER", {"orders": "*"}), ConfigError, "choose another name"),
    (lambda s: s.pull_consumer("billing").assign("orders"), ConfigError, "pair .*'orders'"),
    (lambda s: s.pull_consumer("billing").assign(5), ConfigError, "pair .*5"),
    (lambda s: s.pull_consumer("billing").assign(("orders", "0")), ConfigError, "pair .*'0'"),
    (lambda s: _assigned(s).assign([("orders", 0)]), ConfigError, "pair"),
    (lambda s: _assigned(s).seek("orders", 0), ConfigError, "pair .*'orders'"),
    (lambda s: _assigned(s).pause("orders"), ConfigError, "pair .*'orders'"),
    (lambda s: _assigned(s).commit(5), ConfigError, "mapping.*5"),
    (lambda s: _assigned(s).poll("soon"), ConfigError, "timeout.*'soon'"),
    (lambda s: s.dead_letters(5), ConfigError, "group .*int"),
    (lambda s: s.broker.locks.try_lock_batch("billing", ["orders"], "me"), ConfigError, "pair .*'orders'"),
    (lambda s: mqstore.fixed_queues(["orders"]), ConfigError, "pair .*'orders'"),
    (lambda s: s.put("orders", b"x", keys=5), InvalidMessageError, "keys .*5"),
    (lambda s: s.put("orders", b"x", properties=["a"]), InvalidMessageError, r"properties .*\['a'\]"),
    (lambda s: s.producer().send("orders", b"x", keys=5), InvalidMessageError, "keys .*5"),
    (lambda s: s.put_many("orders", [b"x"], delay=5), InvalidMessageError, r"Producer\.send_many"),
    (lambda s: s.put_many("orders", [b"x"], message_group="g"), InvalidMessageError, r"Producer\.send_many"),
    (lambda s: s.put_many("orders", [b"x"], compressed="zlib"), InvalidMessageError, r"Producer\.send_many"),
    (lambda s: s.put_many("orders", [b"x"], tag="a"), InvalidMessageError, r"OutgoingMessage\(body, tag=\.\.\.\)"),
    (lambda s: s.put_many("orders", [_delayed()]), InvalidMessageError, r"Producer\.send_many((?!to the call).)*$"),
    (lambda s: s.put_many("orders", [_placed()]), InvalidMessageError, "give it to the call"),
    (lambda s: s.put_many("orders", [b"x"], dellay=1), TypeError, "did you mean 'delay'"),
    (lambda s: list(s.iter("orders", tags=["a"])), FilterError, r"tags must be a str .* not \['a'\]"),
    (lambda s: s.simple_consumer("billing", {"orders": ["a"]}), FilterError, r"tags .* not \['a'\]"),
    (
        lambda s: s.push_consumer("billing").subscribe("orders", print, tags=("a",)),
        FilterError,
        r"tags .* not \('a',\)",
    ),
    (lambda s: s.broker.pop("billing", "orders", filter=["a"]), FilterError, r"tags .* not \['a'\]"),
    (lambda s: s.push_consumer("billing").seek(("orders", 0), 0), ConfigError, "queue 0 of 'orders' is not assigned"),
    (lambda s: s.serve(9876), ConfigError, "9876 is not HOST:PORT"),
]


@pytest.mark.parametrize("case", REFUSED, ids=[f"{i}: {words}" for i, (_, _, words) in enumerate(REFUSED)])
def test_says_what_was_given_and_changes_nothing(store: mqstore.Store, case: Case) -> None:
    call, error, words = case
    with pytest.raises(error, match=words) as caught:
        call(store)
    assert type(caught.value) is error
    assert [message.body for message in store.iter("orders")] == [b"first"]
    assert "jobs" not in store.topics()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("segment_bytes", "64M"),
        ("segment_bytes", 1e6),
        ("consumequeue_units", 0x7FFF_FFFF),
        ("default_queues", "4"),
        ("default_queues", 16_385),
        ("default_queues", None),
        ("delay_levels", 5),
        ("flush_interval", "often"),
    ],
)
def test_an_option_of_the_wrong_kind_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        mqstore.StoreConfig(**{field: value})


@pytest.mark.parametrize(("field", "value"), [("max_bytes", "1G"), ("disk_ratio", "most"), ("age", "old")])
def test_a_rule_of_retention_of_the_wrong_kind_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        mqstore.Retention(**{field: value})


def test_invalid_config_makes_no_store(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="StoreConfig, not 5"):
        mqstore.open(tmp_path / "store", config=5)  # type: ignore[arg-type]
    assert not (tmp_path / "store").exists()


def test_a_queue_may_be_any_pair(store: mqstore.Store) -> None:
    import numpy as np

    consumer = store.pull_consumer("billing")
    consumer.assign(("orders", np.int64(0)))  # type: ignore[arg-type]
    consumer.seek(["orders", 0], 0)  # type: ignore[arg-type]
    assert consumer.assignment() == {mqstore.QueueRef("orders", 0)}


@pytest.mark.parametrize(
    ("method", "made"),
    [
        ("producer", mqstore.Producer),
        ("simple_consumer", mqstore.SimpleConsumer),
        ("pull_consumer", mqstore.PullConsumer),
        ("push_consumer", mqstore.PushConsumer),
        ("queue", mqstore.Queue),
    ],
)
@pytest.mark.parametrize("store", [mqstore.Store, mqstore.aio.Store])
def test_a_store_takes_the_options_of_what_it_makes(store: type, method: str, made: type) -> None:
    _, *own = inspect.signature(getattr(store, method)).parameters.values()
    _, *those = inspect.signature(made).parameters.values()

    assert own == those
