"""Arguments of a wrong kind: an error of ours that says what was given and what is wanted, and nothing has happened."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore.errors import ConfigError, FilterError, InvalidMessageError, NotPermittedError

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
]


@pytest.mark.parametrize("case", REFUSED, ids=[f"{i}: {words}" for i, (_, _, words) in enumerate(REFUSED)])
def test_says_what_was_given_and_changes_nothing(store: mqstore.Store, case: Case) -> None:
    call, error, words = case
    with pytest.raises(error, match=words) as caught:
        call(store)
    assert type(caught.value) is error
    assert [message.body for message in store.iter("orders")] == [b"first"]
    assert "jobs" not in store.topics()


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "producer": [
        *({"group": name} for name in ("", "a b", "g" * 121, None)),
        *({"retries": value} for value in (-1, 1.5)),
        *({"linger": value} for value in (-1, 31)),
        *({"linger_bytes": value} for value in (0, (2 << 20) + 1)),
        *({"timeout": -1}, {"durability": "maybe"}, {"compression": "lz4"}, {"max_inflight": 0}),
        {"max_inflight_bytes": 0},
    ],
    "push_consumer": [
        *({"workers": value} for value in (0, 1_001)),
        *({"batch_size": value} for value in (0, 1_025)),
        *({"prefetch": value} for value in (0, 65_536)),
        *({"prefetch_total": value} for value in (0, 6_553_501, True)),
        *({"prefetch_total_bytes": value} for value in (0, (102_400 << 20) + 1)),
        *({"max_span": value} for value in (0, 65_536)),
        *({"ordered": True, "suspend": suspend} for suspend in (0.009, 60.001, float("nan"))),
        *({"consume_timeout": value} for value in (0, float("inf"))),
        *({"prefetch_bytes": 0}, {"model": "both"}, {"mode": "push"}, {"model": "broadcasting"}, {"strategy": "best"}),
        {"model": "broadcasting", "client_id": "a/b"},
        *({"client_id": client_id} for client_id in ("", ".", "..", "a/b", "a b", "ü", "x" * 121, 7, "a\n")),
        *({"start": start} for start in ("now", 0, datetime(2026, 1, 1))),  # of which time zone?
    ],
    "pull_consumer": [
        *({"start": start} for start in ("first", 7, datetime(2030, 1, 1))),
        *({"fetch_max": value} for value in (0, 1025, "32")),
        *({"strategy": "AVG"}, {"client_id": "a/b"}, {"auto_commit_interval": -1}, {"group": "a b"}),
    ],
    "simple_consumer": [
        *({"visibility": value} for value in (0.05, 13 * 3600)),
        *({"start": start} for start in ("first", datetime(2030, 1, 1))),
        *({"client_id": client_id} for client_id in ("", "a b")),
        *({"topics": {topic: tags}} for topic, tags in (("a b", "*"), ("rmq_sys_pop_log", "*"))),
        *({"topics": {"t": tags}} for tags in ("price > 5", "||")),
    ],
    "queue": [
        *({"visibility": value} for value in (0, -1, 13 * 3600)),
        *({"maxsize": value} for value in (-1, 1.5)),
        *(
            {"name": name}
            for name in ("", "a\nb", "\x7f", "\u2028", "\ud800", "%RETRY%x", "%DLQ%x", "." * 41, "x" * 121)
        ),
        *({"name": name} for name in ("SCHEDULE_TOPIC_XXXX", None, b"jobs")),
    ],
}


def trace(store: mqstore.Store) -> list[Any]:
    """Return what a consumer, producer or queue leaves in a store."""
    broker = store.broker
    members = {group: broker.members.members(group) for group in broker.members.groups()}
    return [broker.topics.names(), broker.groups.names(), members, list(broker.topics.on_change)]


@pytest.mark.parametrize(("kind", "options"), [(kind, each) for kind in OPTIONS for each in OPTIONS[kind]], ids=ascii)
def test_bad_option_is_refused_and_leaves_no_trace(store: mqstore.Store, kind: str, options: dict[str, Any]) -> None:
    before = trace(store)
    name = "name" if kind == "queue" else "group"
    with pytest.raises((ConfigError, InvalidMessageError, FilterError, NotPermittedError)):
        getattr(store, kind)(**{name: "g", **options})
    assert trace(store) == before


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
