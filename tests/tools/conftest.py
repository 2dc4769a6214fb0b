"""What the tests of the command share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a store will be."""
    return tmp_path / "s"
