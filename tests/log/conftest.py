"""What the log's tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqstore.log.store import MessageStore
from tests.log.support import open_store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a store will be."""
    return tmp_path / "s"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MessageStore]:
    """A small new store, closed at the end."""
    with open_store(tmp_path / "store") as opened:
        yield opened
