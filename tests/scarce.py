"""A process that may open only few descriptors more, for tests in it."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["free_descriptors"]


@contextmanager
def free_descriptors(count: int) -> Iterator[None]:
    """Let the process open `count` descriptors more, and no others: the limit bounds their numbers."""
    probes = [os.open(os.devnull, os.O_RDONLY) for _ in range(count + 1)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    for fd in probes:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(probes), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
