"""Tests of the compiled parts on Linux arm64, emulated: `make arm64`.

Debian's packages of Python for arm64, and wheels for arm64, are unpacked below var/arm64. Nothing is installed. The
module is built by the hook that an installation uses: it runs in the emulated interpreter and calls the cross-compiler.
Arguments are given to pytest; without any the tests of the module itself, of layout, and of opening files.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from tests.sanitized import ROOT, copy_sources

TESTS = ("tests/test_native.py", "tests/layout", "tests/files/test_beneath.py")
NEEDED = {"qemu-aarch64-static": "qemu-user-static", "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu", "apt-get": "apt"}
PACKAGES = ("python3", "libpython3-dev", "libstdc++6")
PLACE = ROOT / "var" / "arm64"
SYSTEM = PLACE / "root"
PYTHON = PLACE / "python"
APT = """
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
APT::Install-Recommends "false";
APT::Sandbox::User "root";
Dir::State "PLACE";
Dir::State::status "PLACE/status";
Dir::Cache "PLACE";
"""
BUILD = "import hatch_build, pathlib; hatch_build.compile_native(pathlib.Path.cwd())"


def unpack_system() -> None:
    """Unpack Debian's Python and all that it needs. Apt keeps lists of its own for this, so the system's stay."""
    apt = PLACE / "apt"
    for name in ("lists/partial", "archives/partial"):
        (apt / name).mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    (apt / "apt.conf").write_text(APT.replace("PLACE", str(apt)))
    for arguments in (["update"], ["install", "--yes", "--download-only", *PACKAGES]):
        subprocess.run(["apt-get", "-qq", *arguments], env=os.environ | {"APT_CONFIG": f"{apt}/apt.conf"}, check=True)
    for package in sorted(apt.glob("archives/*.deb")):
        subprocess.run(["dpkg-deb", "--extract", package, SYSTEM], check=True)


def make_python() -> None:
    """Make `PYTHON`, a script that starts the emulated interpreter, and unpack what mqstore and its tests import."""
    python = next(SYSTEM.glob("usr/bin/python3.*"))
    # By the loader, not by qemu's -L, with which the root folder that a test opens would be `SYSTEM`.
    libraries = f"{SYSTEM}/lib/aarch64-linux-gnu:{SYSTEM}/usr/lib/aarch64-linux-gnu"
    loader = f"{SYSTEM}/lib/ld-linux-aarch64.so.1 --library-path {libraries}"
    emulator = shutil.which("qemu-aarch64-static")
    PYTHON.write_text(f'#!/bin/sh\nPYTHONHOME={SYSTEM}/usr exec {emulator} {loader} {python} "$@"\n')
    PYTHON.chmod(0o755)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = settings["project"]
    testing = [name for name in project["optional-dependencies"]["dev"] if name.startswith(("pytest", "hypothesis"))]
    packages = [*settings["build-system"]["requires"], *project["dependencies"], *testing]
    target = SYSTEM / "usr" / "lib" / "python3" / "dist-packages"
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--quiet", "install", "--upgrade", "--target", target),
            *("--only-binary=:all:", f"--python-version={python.name.removeprefix('python')}"),
            *(f"--platform=manylinux_2_{minor}_aarch64" for minor in (17, 27, 28)),
            *packages,
        ],
        check=True,
    )
    (target / "emulated.pth").write_text(f"import sys; sys.executable = {str(PYTHON)!r}\n")


def main() -> int:
    if lacking := [package for tool, package in NEEDED.items() if shutil.which(tool) is None]:
        raise SystemExit(f"make arm64 runs on Debian. It needs packages that are missing: {', '.join(lacking)}")
    done = PLACE / "done"
    if not done.exists():
        unpack_system()
        make_python()
        done.touch()
    with tempfile.TemporaryDirectory(prefix="mqstore-arm64-") as folder:
        copy = Path(folder)
        copy_sources(copy)
        # Debian's interpreter names the folder of its headers as if it were installed.
        headers = SYSTEM / "usr" / "include"
        environment = os.environ | {
            "MQSTORE_NATIVE": "require",
            "PYTHONPATH": os.pathsep.join(str(copy / name) for name in ("store", "tools", ".")),
            "CFLAGS": f"-I{next(headers.glob('python3.*'))} -idirafter {headers}",
        }
        subprocess.run([PYTHON, "-c", BUILD], cwd=copy, env=environment, check=True)
        wanted = sys.argv[1:] or TESTS
        command = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=3600", *wanted]
        return subprocess.run(command, cwd=copy, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
