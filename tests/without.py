"""The road without compiled parts, taken where they are there, to hold both against each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from mqstore.layout import dispatch, pairs, scan


@contextmanager
def compiled_parts_left_out() -> Iterator[None]:
    """In all that reads many records."""
    with ExitStack() as patches:
        for module in (scan, dispatch, pairs):
            patches.enter_context(mock.patch.object(module, "kernel", None))
        yield
