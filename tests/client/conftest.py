"""Stores for tests of clients: one whose time stands still, and two that have their threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import mqstore
from mqstore import Store
from mqstore.broker.broker import Broker
from mqstore.log.store import MessageStore
from tests.client.pushsupport import PushBench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[PushBench]:
    """A broker whose time stands still, with push consumers that a test runs."""
    bench = PushBench(tmp_path)
    yield bench
    bench.close()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    """A broker that has its threads."""
    with Broker(MessageStore(tmp_path / "store")) as broker:
        yield broker


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store that has its threads."""
    with mqstore.open(tmp_path / "store") as store:
        yield store
