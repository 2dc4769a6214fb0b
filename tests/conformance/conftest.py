"""The store of a conformance test. Another implementation of the engine runs the suite by its own `open_store`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import mqstore
from tests.conformance.consumers import KINDS, Kind, OpenStore, World
from tests.connecting import ServedStore

DIFFERENT = {
    "test_kill_in_a_handler_loses_nothing": "a lease of a killed client ends at its time, not with the next open"
}
"""Tests of kinds with leases that are different behind a server, and why (docs/processes.md)."""


def _has_its_turn(item: pytest.Item) -> bool:
    """Return True if a test runs. Kinds of asyncio take turns at the two doors: in the next test it is the other one.

    `make test-connect` runs all of them behind a server.
    """
    params = item.callspec.params if hasattr(item, "callspec") else {}
    kind, door = params.get("kind"), params.get("open_store")
    if not isinstance(kind, Kind) or not kind.aio or door is None or os.environ.get("MQSTORE_TEST_CONNECT") == "1":
        return True
    return (KINDS.index(kind) + len(item.name.partition("[")[0])) % 2 == (door == "connect")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if _has_its_turn(item)]


@pytest.fixture(params=["open", "connect"])
def open_store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> OpenStore:
    """Function that opens the stores of a test: in this process, or behind a server."""
    if request.param == "open":
        return mqstore.open
    if (why := DIFFERENT.get(request.node.originalname)) and not request.node.callspec.params["kind"].commits:
        pytest.skip(why)
    monkeypatch.setattr("mqstore.store.Store", ServedStore)  # which `aio.open` opens
    return ServedStore


@pytest.fixture
def world(kind: Kind, tmp_path: Path, open_store: OpenStore) -> Iterator[World]:
    """Store for consumers of one kind. Its time stands still."""
    world = World(kind, tmp_path / "store", open_store)
    yield world
    world.close()
