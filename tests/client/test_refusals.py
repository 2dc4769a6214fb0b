"""Mistakes of a newcomer: each is refused in the same words by every door, and nothing is stored or leased."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import mqstore
import mqstore.aio
from mqstore import errors
from tests.client.doors import Doors

Put = dict[str, Any]


PUTS: list[tuple[Put, type[Exception], str]] = [
    ({"prority": 3}, TypeError, "did you mean 'priority'"),
    ({"keys": "k"}, TypeError, "did you mean 'key'"),
    ({"delay": -1}, errors.InvalidMessageError, "delay"),
    *[({"priority": bad}, errors.ConfigError, f"priority is 0 to 9, not {bad!r}") for bad in (-1, 1.5, "high", True)],
    ({"priority": 10}, errors.ConfigError, "priority is 0 to 9, not 10"),
    ({"key": 5}, errors.InvalidMessageError, "keys must be a str or several, not 5"),
    ({"key": b"x"}, errors.InvalidMessageError, "keys must be a str or several, not b'x'"),
    ({"key": ("a", 5)}, errors.InvalidMessageError, "keys 5: a key must be a str"),
    ({"key": "a b"}, errors.InvalidMessageError, "keys 'a b': a key must be a str without spaces"),
    ({"key": ""}, errors.InvalidMessageError, "keys '': a key must be a str without spaces"),
    ({"tag": "a|b"}, errors.InvalidMessageError, "tag"),
    ({"tag": 5}, errors.InvalidMessageError, "tag 5: a tag must be a str"),
    ({"properties": [("a", "b")]}, errors.InvalidMessageError, "properties must be a mapping"),
    ({"properties": {"KEYS": "k"}}, errors.InvalidMessageError, "KEYS"),
    ({"properties": {"a": 1}}, errors.InvalidMessageError, "the value of 'a' must be a str"),
    *[({"unique": bad}, errors.InvalidMessageError, "unique must be a str, and not blank") for bad in ("", " ")],
    ({"unique": 5}, errors.InvalidMessageError, "unique must be a str, and not blank, not 5"),
    ({"unique": b"x"}, errors.InvalidMessageError, "unique must be a str, and not blank, not b'x'"),
    ({"unique": "n", "key": 5}, errors.InvalidMessageError, "keys must be a str or several, not 5"),
    ({"unique_for": 5}, errors.InvalidMessageError, "give unique=, too"),
    ({"unique": "n", "unique_for": -1}, errors.ConfigError, "unique_for"),
    *[
        ({"expires": bad}, errors.InvalidMessageError, "leaves no time")
        for bad in (0, datetime(2000, 1, 1, tzinfo=UTC))
    ],
    ({"expires": -1}, errors.ConfigError, "expires"),
    ({"expires": "5"}, errors.ConfigError, "expires"),
    ({"expires": datetime(2000, 1, 1)}, ValueError, "time zone"),
    ({"expires": 5, "delay": 10}, errors.InvalidMessageError, "expires=5 leaves no time"),
]


@pytest.mark.parametrize(("options", "kind", "words"), PUTS, ids=[str(case[0]) for case in PUTS])
def test_bad_option_of_put_is_refused_alike(doors: Doors, options: Put, kind: type[Exception], words: str) -> None:
    queue = doors.queue()
    with pytest.raises(kind, match=words):
        queue.put(b"x", **options)
    assert not any(queue.counts().values())


@pytest.mark.parametrize("key", [None, 5, b"x", "", "a b"])
def test_find_refuses_what_cannot_be_a_key(doors: Doors, key: Any) -> None:
    with pytest.raises(errors.InvalidMessageError, match="a key must be a str without spaces"):
        doors.queue().find(key)


@pytest.mark.parametrize("verb", ["purge", "items"])
def test_wrong_state_is_refused_with_the_states(doors: Doors, verb: str) -> None:
    queue = doors.queue()
    with pytest.raises(errors.ConfigError, match=r"ready, leased, retry, delayed.*not 'Ready'") as found:
        list(getattr(queue, verb)("Ready"))
    assert "byte" not in str(found.value)


@pytest.mark.parametrize("options", [{}, {"delay": 60}])
def test_receipt_of_another_queue_cancels_nothing(doors: Doors, options: Put) -> None:
    one, other = doors.queue("one"), doors.queue("other")
    receipt = one.put(b"x", **options)
    assert other.cancel(receipt) is False
    assert sum(one.counts().values()) == 1
    assert one.cancel(receipt) is True


@pytest.mark.parametrize(
    "wrong", [lambda queue: queue, lambda queue: [queue, "x"], lambda queue: [], lambda queue: None]
)
def test_get_any_takes_a_list_of_queues(doors: Doors, wrong: Callable[[Any], Any]) -> None:
    queue = doors.queue()
    queue.put(b"x")
    name = "mqstore.aio.Queue" if doors.door == "aio" else "mqstore.Queue"
    with pytest.raises(errors.ConfigError, match=f"get_any takes a list of one or more {name}"):
        doors.mqstore.get_any(wrong(queue))
    assert queue.counts()["ready"] == 1  # nothing was leased


def test_pickling_names_the_way_of_another_process(mq_store: mqstore.Store, mq_server: str) -> None:
    """A queue in the arguments of a `multiprocessing.Process`: the reason was a lock, or a lambda of the engine."""
    with mqstore.connect(mq_server) as connected:
        for store in (mq_store, connected):
            for wrong in (store, store.queue("jobs"), store.push_consumer("g"), store.producer()):
                with pytest.raises(TypeError, match="open the store in the other process, with shared=True"):
                    pickle.dumps(wrong)


def test_run_of_a_closed_store_raises(tmp_path: Path) -> None:
    with mqstore.open(tmp_path / "mq") as store:
        queue = store.queue("jobs")
    with pytest.raises(errors.StoreClosedError):
        queue.run(print)
