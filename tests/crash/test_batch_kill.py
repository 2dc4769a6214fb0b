"""A process that dies while it stores a batch: whole records remain at the front, and no hole before others."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import mqstore
from mqstore.native import kernel

CHILD = """
import ctypes, mmap, sys
import mqstore
from mqstore.log.store import MessageStore

store = MessageStore(sys.argv[1])
store.put_many("t", [b"first"] * 3, queue_id=0)
mapping = store._log._mapping  # the segment that is written; a store to the locked page ends the process
page = ctypes.addressof(ctypes.c_char.from_buffer(mapping)) + 4 * mmap.PAGESIZE
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, mmap.PROT_READ) == 0
store.put_many("t", [b"%d" % i * 40 for i in range(300)], queue_id=0)
"""


@pytest.mark.skipif(kernel is None, reason="without compiled parts batches are written by a system call")
def test_a_batch_that_was_being_stored_leaves_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "store"
    child = subprocess.run([sys.executable, "-c", CHILD, path], check=False)
    assert child.returncode == -signal.SIGSEGV

    with mqstore.open(path) as store:
        bodies = [message.body for message in store.iter("t", 0)]
        assert store.recovery.damaged_ranges == 0
    whole = [b"first"] * 3 + [b"%d" % i * 40 for i in range(300)]
    assert 3 < len(bodies) < 303
    assert bodies == whole[: len(bodies)]
    with mqstore.open(path, "r") as store:
        assert list(store.verify()) == []
