"""The limit of open descriptors: how many are left, and the reaction if none is.

The rule is: every cache is emptied, and the failed call is repeated once. The limit belongs to the process, so the
caches of all its stores are emptied.

`FileSystem` makes every call that needs a descriptor, and applies the rule there (`takes_descriptor`). A cache takes
part by `register`. Its `give_back` runs in any thread and with any lock of a store held. So it must not wait for a lock
under which a file is opened or mapped.
"""

from __future__ import annotations

import errno
import os
import resource
import weakref
from typing import Protocol

__all__ = ["TOO_MANY_OPEN", "free_descriptors", "register", "release"]

TOO_MANY_OPEN = (errno.EMFILE, errno.ENFILE)
"""Error numbers for "no descriptor is free", in the process or in the system."""


class _Cache(Protocol):
    def release(self) -> None: ...


_caches: weakref.WeakValueDictionary[int, _Cache] = weakref.WeakValueDictionary()


os.register_at_fork(after_in_child=_caches.clear)  # their locks may belong to threads that the child lacks


def register(cache: _Cache) -> None:
    """Call `cache.release()` when no descriptor is free, for as long as the cache exists."""
    _caches[id(cache)] = cache


def release() -> None:
    for reference in _caches.valuerefs():
        cache = reference()
        if cache is not None:
            cache.release()


def free_descriptors() -> int:
    """Return how many descriptors the process may still open, or half of the limit if that is unknown."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return 1 << 31
    try:
        used = len(os.listdir("/dev/fd"))
    except OSError:
        used = limit // 2
    return max(0, limit - used)
