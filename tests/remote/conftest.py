"""A server of the test's own store, in this process."""

from __future__ import annotations

import pytest

from mqstore import Store
from mqstore.serve.thread import ServerThread


@pytest.fixture
def serving(behind: Store) -> ServerThread:
    """Serve the store `behind`, which the test module makes, until it is closed."""
    return behind.serve("127.0.0.1:0")
