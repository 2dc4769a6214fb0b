"""The compiled parts, where there are any: loops over thousands of records, and the put.

    kernel      the module `mqstore._native` (store/native), or None: then Python and numpy do the same work
    why_not     why `kernel` is None; "" when it is there
    fence       keep loads and stores of mappings in order, for other processes that map the same file

Everything works without. Each use of `kernel` has the same in Python beside it, which is the definition. With
MQSTORE_NATIVE=0 in the environment the compiled parts are left out. With MQSTORE_NATIVE=require mqstore is not imported
without them.
"""

from __future__ import annotations

import os
from _thread import allocate_lock
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

__all__ = ["described", "fence", "kernel", "why_not"]

_VERSION = 29
"""Version of what the functions take and give. A module built from older sources is not used."""


def _load() -> tuple[ModuleType | None, str]:
    wanted = os.environ.get("MQSTORE_NATIVE")
    if wanted == "0":
        return None, "MQSTORE_NATIVE=0"
    try:
        found = import_module("mqstore._native")
    except ImportError as error:  # not built: no compiler, another processor; or imported from an archive
        if wanted == "require":
            raise
        return None, str(error)
    if found.VERSION != _VERSION:
        return None, f"mqstore._native has version {found.VERSION}, wanted is {_VERSION}: install mqstore again"
    return found, ""


kernel, why_not = _load()


def _fence() -> None:
    # Nothing passes a lock that is released and then acquired: neither what comes before nor what comes after.
    with (lock := allocate_lock()):
        pass
    lock.acquire()


fence: Callable[[], None] = _fence if kernel is None else kernel.fence
"""Order what this thread loads and stores before the call ahead of what it loads and stores after it.

Processors such as arm64 show stores to each other in another order, also those to a mapping of a file.
"""


def described() -> str:
    """Return a text that says whether compiled parts are used.

    >>> described().startswith(("with compiled parts", "without compiled parts: "))
    True
    """
    return f"without compiled parts: {why_not}" if kernel is None else "with compiled parts"
