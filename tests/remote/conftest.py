"""A server of the test's own store, in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mqstore import Store
from tests.connecting import Serving


@pytest.fixture
def serving(behind: Store) -> Iterator[Serving]:
    """Serve the store `behind`, which the test module makes."""
    serving = Serving(behind.broker)
    yield serving
    serving.close()
