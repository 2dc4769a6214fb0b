"""The store of a conformance test. Another implementation of the engine runs the suite by its own `open_store`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import mqstore
from tests.conformance.consumers import Kind, OpenStore, World


@pytest.fixture
def open_store() -> OpenStore:
    """Function that opens the stores of a test."""
    return mqstore.open


@pytest.fixture
def world(kind: Kind, tmp_path: Path, open_store: OpenStore) -> Iterator[World]:
    """Store for consumers of one kind. Its time stands still."""
    world = World(kind, tmp_path / "store", open_store)
    yield world
    world.close()
