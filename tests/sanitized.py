"""Tests of the compiled parts, built with the address and undefined-behaviour sanitizers: `make sanitize`.

In a copy of the sources, so that nobody else meets a module that only runs beside a preloaded library. Arguments are
given to pytest; without any the tests of layout, log, frames, pop, queues and the broker's puts, and of the module.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BROKER = sorted(f"tests/broker/{path.name}" for path in (ROOT / "tests" / "broker").glob("test_[pr]o[pa]*.py"))
TESTS = ("tests/test_native.py", "tests/layout", "tests/log", "tests/serve/test_frames.py", *BROKER)
TESTS += ("tests/client/test_queue.py",)
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g"


def copy_sources(to: Path) -> None:
    """What is built and tested, without a module that was compiled in another way."""
    unwanted = shutil.ignore_patterns("_native.*", "__pycache__")
    for name in ("store", "tools", "tests", "bench"):
        shutil.copytree(ROOT / name, to / name, ignore=unwanted)
    for name in ("pyproject.toml", "hatch_build.py"):
        shutil.copy(ROOT / name, to / name)


def build(copy: Path) -> None:
    """The module, in `copy`, by the hook that an installation uses."""
    os.environ.update(CFLAGS=FLAGS, LDFLAGS=FLAGS)
    runpy.run_path(str(copy / "hatch_build.py"))["compile_native"](copy)


def library() -> str:
    """What has to be loaded first: the interpreter itself was not built for it."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    done = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    path = done.stdout.strip()
    if not os.path.isabs(path):
        raise SystemExit(f"{compiler} has no libasan.so: install it, or another compiler (CC=...)")
    return path


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="mqstore-sanitized-") as folder:
        copy = Path(folder)
        copy_sources(copy)
        build(copy)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(str(copy / name) for name in ("store", "tools", ".")),
            "LD_PRELOAD": library(),
            "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
            "PYTHONMALLOC": "malloc",  # else a block is many objects, and what is read beyond one is not noticed
        }
        wanted = sys.argv[1:] or TESTS
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *wanted]
        return subprocess.run(command, cwd=copy, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
