"""Options of producers, queues and consumers that are refused: by which error, and nothing has happened."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

import mqstore
from mqstore.errors import ConfigError, FilterError, InvalidMessageError, NotPermittedError

START = "an aware datetime"
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
    ],
    "queue": [
        *({"visibility": value} for value in (0, -1, 13 * 3600)),
        *({"maxsize": value} for value in (-1, 1.5)),
        *(
            {"name": name}
            for name in ("", "a\nb", "\x7f", "\u2028", "\ud800", "%RETRY%x", "%DLQ%x", "." * 41, "x" * 121)
        ),
        *({"name": name} for name in (None, b"jobs")),
    ],
}
"""Options that a ConfigError refuses."""
CASES: list[tuple[str, dict[str, Any], type[Exception], str | None]] = [
    *((kind, each, ConfigError, START if "start" in each else None) for kind in OPTIONS for each in OPTIONS[kind]),
    ("simple_consumer", {"topics": {"a b": "*"}}, InvalidMessageError, "topic"),
    ("simple_consumer", {"topics": {"rmq_sys_pop_log": "*"}}, NotPermittedError, "system topic"),
    ("simple_consumer", {"topics": {"t": "price > 5"}}, FilterError, "tag expression"),
    ("simple_consumer", {"topics": {"t": "||"}}, FilterError, "bar without a tag"),
    ("queue", {"retry": 3}, ConfigError, "retry must be a mqstore.RetryPolicy or None, not 3"),
    ("queue", {"ordered": "x"}, ConfigError, "ordered must be True or False, not 'x'"),
    ("queue", {"dead_letter_expired": "x"}, ConfigError, "must be True, False or None, not 'x'"),
    ("queue", {"name": "SCHEDULE_TOPIC_XXXX"}, NotPermittedError, "system topic"),
]


def trace(store: mqstore.Store) -> list[Any]:
    """Return what a consumer, producer or queue leaves in a store."""
    broker = store.broker
    members = {group: broker.members.members(group) for group in broker.members.groups()}
    return [broker.topics.names(), broker.groups.names(), members, list(broker.topics.on_change)]


@pytest.mark.parametrize(("kind", "options", "error", "text"), CASES, ids=ascii)
def test_bad_option_is_refused_and_leaves_no_trace(
    store: mqstore.Store, kind: str, options: dict[str, Any], error: type[Exception], text: str | None
) -> None:
    before = trace(store)
    name = "name" if kind == "queue" else "group"
    with pytest.raises(error, match=text) as caught:
        getattr(store, kind)(**{name: "g", **options})
    assert caught.type is error
    assert trace(store) == before
