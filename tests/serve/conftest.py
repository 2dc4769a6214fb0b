"""Server of the tests' store, and a client that speaks both header types."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mqstore import Store
from tests.serve.support import Client, serving


@pytest.fixture
def store(mq_store: Store) -> Store:
    """A store with a topic of four queues."""
    mq_store.create_topic("orders")
    return mq_store


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pull that finds nothing and may not wait is answered a second later. Here after 10 ms."""
    monkeypatch.setattr("mqstore.serve.requests.pull._NO_WAIT_MS", 10)


@pytest.fixture
def address(store: Store) -> Iterator[tuple[str, int]]:
    with serving(store) as address:
        yield address


@pytest.fixture(params=[False, True], ids=["json", "binary"])
def client(address: tuple[str, int], request: pytest.FixtureRequest) -> Iterator[Client]:
    with Client(address, binary=request.param) as client:
        yield client
