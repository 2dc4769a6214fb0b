"""What the tests of the command share."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqstore import SendReceipt
from tests.log.support import open_store
from tests.tools.brokers import filled


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a store will be."""
    return tmp_path / "s"


@pytest.fixture
def hundred(path: Path) -> tuple[Path, list[SendReceipt]]:
    """A hundred messages over several segments, closed cleanly."""
    with open_store(path, segment_bytes=1 << 14) as store:
        return path, [store.put("orders", b"%03d" % i * 100, keys=f"k{i}") for i in range(100)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`orders` with 10 messages in each of two queues, of which `billing` has consumed 7 and 2; a dead letter."""
    return filled(tmp_path_factory.mktemp("store") / "s")
