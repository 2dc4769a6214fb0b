"""The compiled parts, where there are any: loops over thousands of records, and the put.

    kernel      the module `mqstore._native` (store/native), or None: then Python and numpy do the same work
    why_not     why `kernel` is None; "" when it is there

Everything works without. Whoever uses `kernel` has the same thing in Python beside it, which says what it does; tests
hold both against each other. MQSTORE_NATIVE=0 in the environment leaves the compiled parts out.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType

__all__ = ["described", "kernel", "why_not"]

_VERSION = 13
"""Of what the functions take and give: a module built from older sources is not used."""


def _load() -> tuple[ModuleType | None, str]:
    if os.environ.get("MQSTORE_NATIVE") == "0":
        return None, "MQSTORE_NATIVE=0"
    try:
        found = import_module("mqstore._native")
    except ImportError as error:  # not built: no compiler, another processor; or imported from an archive
        return None, str(error)
    if found.VERSION != _VERSION:
        return None, f"mqstore._native has version {found.VERSION}, wanted is {_VERSION}: install mqstore again"
    return found, ""


kernel, why_not = _load()


def described() -> str:
    """Whether they are used, in words.

    >>> described().startswith(("with compiled parts", "without compiled parts: "))
    True
    """
    return f"without compiled parts: {why_not}" if kernel is None else "with compiled parts"
