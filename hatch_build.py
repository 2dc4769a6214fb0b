"""The build hook of hatchling: compiles store/native to `mqstore._native`, if this machine can.

Without a C compiler, on another processor than x86-64 or another interpreter than CPython mqstore is installed without
it and does the same by Python and numpy, more slowly. MQSTORE_NATIVE=0 leaves it out on purpose; MQSTORE_NATIVE=require
makes it an error that it cannot be built.
"""

from __future__ import annotations

import os
import platform
import sys
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_MODULE = "mqstore._native"


def sources_crc32(folder: Path) -> int:
    """What the module says it was built from: a test holds it against the sources beside it."""
    crc = 0
    for path in sorted(folder.glob("*.[ch]")):
        crc = zlib.crc32(path.name.encode() + b"\0" + path.read_bytes(), crc)
    return crc


def compile_native(root: Path) -> Path:
    """Build the module into store/mqstore; its path. Raises whatever keeps it from being built."""
    if sys.implementation.name != "cpython" or platform.machine().lower() not in ("x86_64", "amd64"):
        raise RuntimeError(f"{sys.implementation.name} on {platform.machine()}: only for CPython on x86-64")
    from setuptools import Distribution, Extension

    sources = root / "store" / "native"
    extension = Extension(
        _MODULE,
        [os.path.relpath(path, root) for path in sorted(sources.glob("*.c"))],
        depends=[os.path.relpath(path, root) for path in sources.glob("*.h")],
        define_macros=[("MQSTORE_NATIVE_SOURCES", f"{sources_crc32(sources)}L")],
        extra_compile_args=["-O3", "-std=c11"],
    )
    before = os.getcwd()
    os.chdir(root)
    try:
        command = Distribution({"name": "mqstore", "ext_modules": [extension]}).get_command_obj("build_ext")
        command.build_lib = os.path.join("build", "lib")
        command.build_temp = os.path.join("build", "temp")
        command.ensure_finalized()
        command.run()
        built = Path(command.get_ext_fullpath(_MODULE))
        target = root / "store" / "mqstore" / built.name
        os.replace(built, target)  # in one step: another process may have the old one loaded
        return target
    finally:
        os.chdir(before)


class NativeHook(BuildHookInterface):
    """Called before a wheel is put together, an editable one too."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wanted = os.environ.get("MQSTORE_NATIVE", "")
        if self.target_name != "wheel" or wanted == "0":
            return
        try:
            module = compile_native(Path(self.root))
        except (Exception, SystemExit) as error:
            if wanted == "require":
                raise
            self.app.display_warning(f"mqstore is built without its compiled parts, and works more slowly: {error}")
            return
        build_data["artifacts"].append(f"/store/mqstore/{module.name}")
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
