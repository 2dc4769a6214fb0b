"""Stores for tests of clients: one whose time stands still, and two that have their threads."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from mqstore import Store
from mqstore.broker import opening
from mqstore.broker.broker import Broker
from mqstore.log.store import MessageStore
from tests.client.doors import DOORS, Doors, opened
from tests.client.pushsupport import PushBench
from tests.connecting import ConnectedBroker

_CONNECTED = (
    "aio_clients",
    "bad_options",
    "producer",
    "pull_consumer",
    "pop_push",
    "push_consumer",
    "queue",
    "queue_run",
    "simple_consumer",
    "suspended",
)
"""Files of tests that run behind a server, too. That shows what `contract.py` promises: clients need nothing else of a
broker. Of a test with many parameters one does, and one of each `kind`. `make test-connect` runs all tests of this
folder there."""

ALL = os.environ.get("MQSTORE_TEST_CONNECT") == "1"
_STEP = 5
"""A test with the parameter `then` (go on, restart or kill) runs with every combination of its parameters in this
process. By connect and by asyncio it runs with every fifth one, which includes each value of each parameter."""
_LISTENERS = "counts the listeners in the broker's tables"
_THREADS = "counts threads, and a connection has some of its own"
_BELLS = "replaces the waits of all threads, and a connection has some of its own"
_LEASES = "a lease of a killed client ends at its time, not with the next open"
_LOG = "looks into the log by `broker.store`"
_NOTES = "a server keeps no notes of the messages that its clients have begun"
_TEXTS = "an opening of a served directory has another text"
_AT_ONCE = "a server delivers nothing without a call"
_NOT_CONNECTED = {
    "arguments": "the server checks the types of arguments, and its texts are others",
    "fork": "a forked child of a client has a connection of its own",
    "forgotten": "a connection that nobody refers to stays until the process ends",
    "handler_calls": "calls everything in the process, administration included",
    "place": "the directory is that of the server",
    "reprs": "has a connection of its own, and texts of both kinds of store",
    "small_disks": "the disk is that of the server",
}
"""Files of tests that are about the process that has the directory, and why."""
_HERE_ONLY = {
    "test_a_callback_of_a_future_may_submit_and_flush": _LOG,
    "test_a_broker_asked_at_once_declines_what_would_wait": _AT_ONCE,
    "test_a_consumer_leaves_no_waiter_and_no_listener_behind": _LISTENERS,
    "test_a_consumer_that_is_not_permitted_changes_nothing": _LISTENERS,
    "test_a_group_that_popped_does_not_read_what_it_acknowledged": _LEASES,
    "test_a_put_behind_a_full_segment_waits_on_the_thread": _LOG,
    "test_a_start_on_a_full_disk_may_be_tried_again": _LISTENERS,
    "test_a_start_that_was_refused_may_be_tried_again": _LISTENERS,
    "test_a_refusal_names_a_step_that_works": _TEXTS,
    "test_a_thousand_who_get_and_put_need_no_thread_and_lose_nothing": _THREADS,
    "test_ctrl_c_in_the_wait_gives_the_turn_to_another": _BELLS,
    "test_consumers_that_were_never_started_are_forgotten": _LISTENERS,
    "test_crash_leaves_every_leased_item_ready": _LEASES,
    "test_each_thread_s_submits_keep_their_order": _LOG,
    "test_failed_attempt_writes_the_body_at_most_once": _LOG,
    "test_failed_messages_precede_the_prefetch": _AT_ONCE,
    "test_forked_child_hears_the_remedy": "a forked child of a client has a connection of its own",
    "test_get_and_ack_of_items_that_were_read_ahead_need_no_thread": _AT_ONCE,
    "test_handlers_that_run_hold_no_thread": _THREADS,
    "test_hanging_handler_is_void_and_the_rest_is_settled": _THREADS,
    "test_it_is_a_member_from_its_first_receive_to_its_end": _LISTENERS,
    "test_kill_brings_again_exactly_what_was_not_committed": _NOTES,
    "test_letters_of_an_ordered_group_come_in_their_order_and_one_at_a_time": "settles by one text, not a list of them",
    "test_lock_holder_is_named": _TEXTS,
    "test_pause_survives_a_failed_start": _LISTENERS,
    "test_starting_and_stopping_leaves_nothing_behind": _THREADS,
    "test_submit_blocks_when_so_much_is_in_flight_and_not_before": _LOG,
    "test_with_closes_and_stores_what_was_submitted_even_when_it_raises": _LOG,
}
"""Tests that cannot, and why."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.module.__name__.rpartition(".test_")[2]
    # Tests by each door run behind a server by themselves.
    by_doors = "doors" in metafunc.fixturenames
    others = ALL and name not in _NOT_CONNECTED and not hasattr(metafunc.module, "Doors")
    if not by_doors and (name in _CONNECTED or others):
        why = _HERE_ONLY.get(metafunc.function.__name__)
        pipe = pytest.param("connect", marks=pytest.mark.skip(reason=why) if why else ())
        metafunc.parametrize("_broker_at", ["here", pipe], indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: set[object] = set()
    numbers: defaultdict[object, Iterator[int]] = defaultdict(count)
    kept = []
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        connected = params.get("_broker_at") == "connect"
        which = (item.obj, params.get("kind")) if connected else None
        door = params.get("doors", "here")
        number = 0 if door == "here" or "then" not in params else next(numbers[item.obj, door])
        if ALL or not ((connected and which in seen) or number % _STEP):
            kept.append(item)
        if connected:
            seen.add(which)
    items[:] = kept


@pytest.fixture(autouse=True)
def _broker_at(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if getattr(request, "param", "here") == "connect":
        here = opening.Broker
        for module in ("mqstore.store", "mqstore.broker.opening"):
            monkeypatch.setattr(f"{module}.Broker", lambda store: ConnectedBroker(here(store)))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[PushBench]:
    """A broker whose time stands still, with push consumers that a test runs."""
    bench = PushBench(tmp_path)
    yield bench
    bench.close()


@pytest.fixture(params=DOORS)
def doors(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Doors]:
    """A store whose time stands still, by each door."""
    with opened(tmp_path / "store", request.param, monkeypatch) as doors:
        yield doors


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    """A broker that has its threads."""
    broker = opening.Broker(MessageStore(tmp_path / "store"))
    yield broker
    broker.close()


@pytest.fixture
def store(mq_store: Store) -> Store:
    """A store that has its threads."""
    return mq_store
