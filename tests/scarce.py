"""A process that may have only few descriptors more, or no large files, for tests in it."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["free_descriptors", "limited"]


@contextmanager
def limited(kind: int, value: int) -> Iterator[None]:
    """Limit a resource of the process, such as `resource.RLIMIT_FSIZE`."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@contextmanager
def free_descriptors(count: int) -> Iterator[None]:
    """Let the process open `count` descriptors more, and no others: the limit bounds their numbers."""
    probes = [os.open(os.devnull, os.O_RDONLY) for _ in range(count + 1)]
    for fd in probes:
        os.close(fd)
    with limited(resource.RLIMIT_NOFILE, max(probes)):
        yield
