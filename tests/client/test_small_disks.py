"""Stores on small disks: what they take, and what they do when the disk is full (format#allocation, format#room)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import pytest

import mqstore

MIB = 1 << 20


def blocks(root: Path) -> int:
    """Return the number of bytes on disk below `root`, as `du` counts them."""
    return sum(
        os.lstat(os.path.join(folder, name)).st_blocks * 512 for folder, _, names in os.walk(root) for name in names
    )


@pytest.mark.parametrize("profile", ["mqstore", "rocketmq"])
def test_store_with_three_messages_takes_at_most_two_mib(
    tmp_path: Path, profile: Literal["mqstore", "rocketmq"]
) -> None:
    with mqstore.open(tmp_path / "mq", profile=profile) as store:
        for number in range(3):
            store.put("orders", b"body", keys=f"o-{number}")
        queue = store.queue("jobs")
        queue.put(b"item")
        with queue.get() as task:
            assert task.value == b"item"
        assert len(store.find("orders", key="o-1")) == 1
        assert blocks(tmp_path) <= 2 * MIB
    assert blocks(tmp_path) <= 2 * MIB
