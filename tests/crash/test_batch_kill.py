"""A process that dies while it stores a batch: whole records remain at the front, and no hole before others."""

from __future__ import annotations

import ctypes
import mmap
import signal
from pathlib import Path

import pytest

import mqstore
from mqstore.remoting.short import bodies_bytes
from tests.children import in_child
from tests.log.support import open_in
from tests.without import compiled

BODIES = [b"%d" % i * 10 for i in range(100)]


def put_over_a_locked_page(path: Path, *, packed: bool) -> None:
    """Put a batch, in which a write to the segment's third page ends the process."""
    store = open_in("rw", path)
    store.put_many("t", [b"first"] * 3, queue_id=0)
    page = ctypes.addressof(ctypes.c_char.from_buffer(store._log._mapping)) + 2 * mmap.PAGESIZE
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, mmap.PROT_READ) == 0
    if packed:
        store.writer.put_packed("t", bodies_bytes(BODIES), 0)
    else:
        store.put_many("t", BODIES, queue_id=0)


@compiled
@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_that_was_being_stored_leaves_no_damage(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / "store"
    assert in_child(lambda: put_over_a_locked_page(path, packed=packed)) == -signal.SIGSEGV

    with mqstore.open(path) as store:
        bodies = [message.body for message in store.iter("t", 0)]
        assert store.recovery.damaged_ranges == 0
    assert 3 < len(bodies) < 103
    assert bodies == ([b"first"] * 3 + BODIES)[: len(bodies)]
    with mqstore.open(path, "r") as store:
        assert list(store.verify()) == []
