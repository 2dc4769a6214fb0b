"""The build hook of hatchling: compiles store/native to `mqstore._native`, if this machine can.

Without a C compiler, for an interpreter other than CPython, and on processors that native.h refuses, mqstore is
installed without the module and does the same by Python and numpy, more slowly. MQSTORE_NATIVE=0 leaves it out on
purpose; MQSTORE_NATIVE=require makes it an error that it cannot be built.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
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
    if sys.implementation.name != "cpython":
        raise RuntimeError(f"only for CPython, not for {sys.implementation.name}")
    from setuptools import Distribution, Extension

    sources = root / "store" / "native"
    extension = Extension(
        _MODULE,
        [os.path.relpath(path, root) for path in sorted(sources.glob("*.c"))],
        depends=[os.path.relpath(path, root) for path in sources.glob("*.h")],
        define_macros=[("MQSTORE_NATIVE_SOURCES", f"{sources_crc32(sources)}L")],
        # An error since GCC 14: so it is one for everybody who changes the sources.
        extra_compile_args=["-O3", "-std=c11", "-fvisibility=hidden", "-Werror=incompatible-pointer-types"],
    )
    (root / "build").mkdir(exist_ok=True)
    before = os.getcwd()
    os.chdir(root)
    try:
        # Of its own: another interpreter may be building here at the same time.
        with tempfile.TemporaryDirectory(dir="build") as folder:
            command = Distribution({"name": "mqstore", "ext_modules": [extension]}).get_command_obj("build_ext")
            command.build_lib = command.build_temp = folder
            command.ensure_finalized()
            command.run()
            # In one step: another process may have the old one loaded.
            os.replace(command.get_ext_fullpath(_MODULE), module_path(root))
        return module_path(root)
    finally:
        os.chdir(before)


def module_path(root: Path) -> Path:
    """Where the module for this interpreter belongs."""
    return root / "store" / "mqstore" / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"


class NativeHook(BuildHookInterface):
    """Called before a wheel is put together, an editable one too."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wanted = os.environ.get("MQSTORE_NATIVE", "")
        if self.target_name != "wheel":
            return
        module_path(Path(self.root)).unlink(missing_ok=True)  # an older one would be used if none is built now
        if wanted == "0":
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
