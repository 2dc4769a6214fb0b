"""The limit of open descriptors: how many are left, and what happens when none is.

There is one rule. Everything that is only cached is given back, and the call that failed is made once more. The limit
belongs to the process, so all caches of all its stores give back.

`FileSystem` makes every call that takes a descriptor, and applies the rule there (`takes_descriptor`). A cache takes
part by `register`. Its `give_back` runs in any thread and with any lock of a store held. So it must not wait for a lock
under which a file is opened or mapped.
"""

from __future__ import annotations

import errno
import os
import resource
import weakref
from typing import Protocol

__all__ = ["TOO_MANY_OPEN", "free_descriptors", "give_back", "register"]

TOO_MANY_OPEN = (errno.EMFILE, errno.ENFILE)
"""Error numbers for "no descriptor is free", in the process or in the system."""


class _Cache(Protocol):
    def give_back(self) -> None: ...


_caches: weakref.WeakValueDictionary[int, _Cache] = weakref.WeakValueDictionary()


os.register_at_fork(after_in_child=_caches.clear)  # their locks may be held by threads that are not in the child


def register(cache: _Cache) -> None:
    """Have `cache.give_back()` called when no descriptor is free, for as long as the cache exists."""
    _caches[id(cache)] = cache


def give_back() -> None:
    for reference in _caches.valuerefs():
        cache = reference()
        if cache is not None:
            cache.give_back()


def free_descriptors() -> int:
    """Return how many descriptors the process may still open, half of the limit where that is unknown."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return 1 << 31
    try:
        used = len(os.listdir("/dev/fd"))
    except OSError:
        used = limit // 2
    return max(0, limit - used)
