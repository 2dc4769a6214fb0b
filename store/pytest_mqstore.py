"""pytest's fixtures of mqstore (`mqstore.testing`). pytest loads this at each start, so it loads nothing of mqstore."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mqstore import Store
    from mqstore.testing import StoreClock


@pytest.fixture
def mq_store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """Store in a new directory, with small files, closed and removed after the test."""
    from mqstore import testing

    clock = testing.StoreClock() if "mq_clock" in request.fixturenames else None
    with testing.temporary_store(clock=clock) as store:
        yield store


@pytest.fixture
def mq_clock(mq_store: Store) -> StoreClock:
    """Clock of `mq_store`, which moves only when the test calls `advance(duration_ms)`."""
    clock: StoreClock = mq_store.log.config.clock  # type: ignore[assignment]
    return clock


@pytest.fixture
def mq_server(mq_store: Store) -> Iterator[str]:
    """Address of a server of `mq_store`, in this process: `mqstore.connect(mq_server)`."""
    with mq_store.serve("127.0.0.1:0") as server:
        yield server.address
