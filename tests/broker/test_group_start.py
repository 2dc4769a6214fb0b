"""Start of a group in memory and on disk, also when the process dies at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mqstore.broker.broker import Broker
from mqstore.broker.tables.configfile import ConfigFile
from tests.broker.support import Bench, full


@pytest.mark.parametrize("old", [0, 3])
@pytest.mark.parametrize("joins", ["start_of", "pop"])
def test_group_that_begins_at_the_end_skips_nothing_after_a_kill(bench: Bench, joins: str, old: int) -> None:
    """What was put between its coming and the crash was skipped for ever (reliability#p3)."""
    broker = bench.broker
    broker.topics.create("t", queues=2)
    for queue_id in range(2):
        broker.put_many("t", [b"old"] * old, queue_id=queue_id)
    broker.groups.create("g", start="latest")
    if joins == "pop":
        assert broker.pop("g", "t") == []
    else:
        assert broker.start_of("g", "t", 0) == old
    for queue_id in (0, 1):
        broker.put("t", b"new", queue_id=queue_id)
    broker.store.flush()
    bench.kill()
    assert bench.drain() == [b"new", b"new"]


def test_start_that_cannot_be_saved_is_not_used(bench: Bench, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    broker.groups.create("g", start="latest")

    with monkeypatch.context() as patch:
        patch.setattr(ConfigFile, "save", full)
        with pytest.raises(OSError, match="no space"):
            broker.start_of("g", "t", 0)
        assert broker.committed("g", "t", 0) is None
    broker.put("t", b"old", queue_id=0)
    assert broker.start_of("g", "t", 0) == 1
    broker.put("t", b"new", queue_id=0)
    bench.kill()
    assert bench.drain() == [b"new"]


def test_start_is_used_by_others_only_once_it_is_saved(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two members that come at once the second took what the first was just saving; and when that failed, what the
    second had committed since was taken back with it."""
    broker.put_many("t", [b"old"] * 3, queue_id=0)
    broker.groups.create("g", start="latest")
    saving, go_on, save = threading.Event(), threading.Event(), ConfigFile.save

    def slow(file: ConfigFile, value: Any, **options: Any) -> None:
        saving.set()
        assert go_on.wait(30)
        save(file, value, **options)

    monkeypatch.setattr(ConfigFile, "save", slow)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(broker.start_of, "g", "t", 0)
        assert saving.wait(30)
        second = pool.submit(broker.start_of, "g", "t", 0)
        assert broker.committed("g", "t", 0) is None
        with pytest.raises(TimeoutError):
            second.result(0.1)
        go_on.set()
        assert (first.result(30), second.result(30)) == (3, 3)


def test_start_given_by_a_call_survives_a_kill(bench: Bench) -> None:
    broker = bench.broker
    broker.topics.create("t", queues=2)
    broker.groups.create("g", start="latest")
    assert broker.start_of("g", "t", 0, "earliest") == 0
    broker.put("t", b"new", queue_id=0)
    broker.store.flush()
    bench.kill()
    assert bench.drain() == [b"new"]
