"""Stores for tests of clients: one whose time stands still, and two that have their threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import mqstore
from mqstore import Store
from mqstore.broker import opening
from mqstore.broker.broker import Broker
from mqstore.log.store import MessageStore
from tests.client.pushsupport import PushBench
from tests.connecting import ConnectedBroker

_CONNECTED = (
    "aio_clients",
    "producer",
    "pull_consumer",
    "pop_push",
    "push_consumer",
    "queue",
    "simple_consumer",
    "suspended",
)
"""Files of tests that run behind a server, too. That shows what `contract.py` promises: clients need nothing else of a
broker. Of a test with many parameters one does. `make test-connect` runs all tests of this folder there."""

ALL = os.environ.get("MQSTORE_TEST_CONNECT") == "1"
_LISTENERS = "counts the listeners in the broker's tables"
_THREADS = "counts threads, and a connection has some of its own"
_BELLS = "replaces the waits of all threads, and a connection has some of its own"
_LEASES = "a lease of a killed client ends at its time, not with the next open"
_LOG = "looks into the log by `broker.store`"
_HERE_ONLY = {
    "test_a_callback_of_a_future_may_submit_and_flush": _LOG,
    "test_after_a_crash_it_goes_on": "a server keeps no notes of the messages that its clients have begun",
    "test_after_kill_9_what_was_on_lease_comes_again_at_once": _LEASES,
    "test_ctrl_c_in_the_wait_gives_the_turn_to_another": _BELLS,
    "test_consumers_that_were_never_started_are_forgotten": _LISTENERS,
    "test_each_thread_s_submits_keep_their_order": _LOG,
    "test_handlers_that_run_hold_no_thread": _THREADS,
    "test_it_is_a_member_from_its_first_receive_to_its_end": _LISTENERS,
    "test_join_does_not_wait_for_ever_for_a_delayed_item_that_never_comes": _LOG,
    "test_options_that_cannot_be_leave_no_trace": _LISTENERS,
    "test_starting_and_stopping_leaves_nothing_behind": _THREADS,
    "test_submit_blocks_when_so_much_is_in_flight_and_not_before": _LOG,
    "test_with_closes_and_stores_what_was_submitted_even_when_it_raises": _LOG,
}
"""Tests that cannot, and why."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if ALL or metafunc.module.__name__.rpartition(".test_")[2] in _CONNECTED:
        why = _HERE_ONLY.get(metafunc.function.__name__)
        pipe = pytest.param("connect", marks=pytest.mark.skip(reason=why) if why else ())
        metafunc.parametrize("_broker_at", ["here", pipe], indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: set[object] = set()
    kept = []
    for item in items:
        place = getattr(item, "callspec", None)
        if place is None or place.params.get("_broker_at") != "connect" or item.obj not in seen or ALL:
            kept.append(item)
        if place is not None and place.params.get("_broker_at") == "connect":
            seen.add(item.obj)
    items[:] = kept


@pytest.fixture(autouse=True)
def _broker_at(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if getattr(request, "param", "here") == "connect":
        here = opening.open_broker
        for module in ("mqstore.store", "mqstore.broker.opening"):
            monkeypatch.setattr(f"{module}.open_broker", lambda store: ConnectedBroker(here(store)))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[PushBench]:
    """A broker whose time stands still, with push consumers that a test runs."""
    bench = PushBench(tmp_path)
    yield bench
    bench.close()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    """A broker that has its threads."""
    broker = opening.open_broker(MessageStore(tmp_path / "store"))
    yield broker
    broker.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store that has its threads."""
    with mqstore.open(tmp_path / "store") as store:
        yield store
