"""The router without compiled parts, taken where they are there, to hold both against each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Literal
from unittest import mock

import pytest

from mqstore import native
from mqstore.layout import indexfile
from mqstore.layout.arrays import dispatch, pairs, scan
from mqstore.log.reading import checking, records
from mqstore.log.store import MessageStore
from mqstore.native import Sending, compiled_put

COMPILED: Final = native.kernel is not None
compiled: Final = pytest.mark.skipif(not COMPILED, reason=f"no compiled parts: {native.why_not}")
"""Of tests that would hold Python against itself without them."""


@contextmanager
def compiled_parts_left_out() -> Iterator[None]:
    """In all that reads many records, and in index files."""
    with ExitStack() as patches:
        for module in (scan, dispatch, pairs, indexfile, checking, records):
            patches.enter_context(mock.patch.object(module, "kernel", None))
        yield


def put_by_python(door: Sending) -> None:
    """Leave each put of `door` to Python from now on."""
    door._sender = None


class Door(Sending):
    """An object that puts by a sender, and notes what that leaves to Python."""

    def __init__(self, sender: object) -> None:
        """Take a sender, or an object that has one."""
        self._sender = sender._sender if isinstance(sender, Sending) else sender
        self.left: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    @compiled_put
    def put(self, *arguments: Any, **options: Any) -> Any:
        self.left.append((arguments, options))


def tip_put(tip: Any, *arguments: object) -> Any:
    """The compiled call that appends a record to a log, with any arguments."""
    return tip._put(*arguments)


def append_compiled(store: MessageStore, topic: str, body: object) -> Any:
    """Append to queue 0 of `topic` by the compiled call alone: its receipt, or None where it leaves that to Python."""
    queue = store.queue_table.create(topic, 0)
    return tip_put(store.wakeups.log, queue, body, queue.plain_tail, None)


@contextmanager
def read_by_compiled_put(store: MessageStore, name: Literal["fd", "now_ns"], value: object) -> Iterator[Any]:
    """Give the compiled call another `value` of what it reads of the log, whose own value it yields."""
    log = store.wakeups.log
    own = getattr(log, f"_{name}")
    setattr(log, f"_{name}", value)
    yield own
    setattr(log, f"_{name}", own)
