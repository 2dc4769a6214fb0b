"""The optional compiled parts: loops over thousands of records, and the put.

    kernel      the module `mqstore._native` (store/native), or None: Python and numpy then do the same work
    why_not     reason why `kernel` is None, or ""
    crc32c      checksum of bytes
    fence       keep loads and stores of mappings in order, for other processes that map the same file

The compiled parts are optional. Each use of `kernel` is next to the Python code that defines it. MQSTORE_NATIVE=0 in
the environment disables the compiled parts. MQSTORE_NATIVE=require makes `import mqstore` fail if they are missing.
"""

from __future__ import annotations

import os
from _thread import allocate_lock
from collections.abc import Callable
from functools import update_wrapper
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar, cast

_Put = TypeVar("_Put", bound=Callable[..., Any])

_VERSION = 45
"""Version of the functions' parameters and results. A module built from older sources is not used."""


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
        return None, f"mqstore._native has version {found.VERSION}, expected {_VERSION}; reinstall mqstore"
    return found, ""


kernel, why_not = _load()


def _fence() -> None:
    # Acquiring a lock after its release is a full barrier: no load or store moves across both.
    with (lock := allocate_lock()):
        pass
    lock.acquire()


fence: Callable[[], None] = _fence if kernel is None else kernel.fence
"""Order this thread's loads and stores: those before the call take effect before those after it.

Processors such as arm64 may show stores to other processors out of order, also stores to a mapped file.
"""


def _sums() -> Callable[..., int]:
    if kernel is not None:
        return kernel.crc32c  # type: ignore[no-any-return]
    from crc32c import crc32c  # it takes as long to import as a third of mqstore

    return crc32c


crc32c: Callable[..., int] = _sums()
"""Return the CRC-32C of bytes. A second argument is the CRC-32C of the preceding bytes."""


class Sending:
    """Base of a class with a `compiled_put`."""

    __slots__ = ("_sender",)

    _sender: object
    """Result of `LogWriter.sender`."""


def compiled_put(put: _Put) -> _Put:
    """Decorate the method `put` of a `Sending`: compiled code puts ordinary messages, `put` puts others.

    Without compiled parts, and for an object whose `_sender` is None or not set, `put` puts all messages.
    """
    return put if kernel is None else cast(_Put, update_wrapper(kernel.PutMethod(put), put))


def described() -> str:
    """Return a text that says whether compiled parts are used, and if not, why.

    >>> described().startswith(("with compiled parts", "without compiled parts: "))
    True
    """
    return f"without compiled parts: {why_not}" if kernel is None else "with compiled parts"
