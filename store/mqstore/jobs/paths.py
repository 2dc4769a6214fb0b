"""Paths that a job is given. They are made absolute here, since executors and later batches have other directories."""

from __future__ import annotations

import glob
import os
import re
from typing import Final

from mqstore.errors import ConfigError
from mqstore.files.beneath import resolved

__all__ = ["checked_path", "local_path"]

_SCHEME: Final = re.compile(r"(?!file:)[A-Za-z][A-Za-z0-9+.-]*:|file://(?!/)")


def checked_path(value: str) -> str:
    """Return the absolute path of a place in a mounted file system, without `file:`. ValueError for any other scheme.

    It would be taken for a folder's name: a job would write below its driver's working directory, and say done. So
    would a relative path where Python workers of a session (Spark Connect) stand in a temporary folder of that session.

    >>> checked_path("file:///var/mq")
    '/var/mq'
    """
    if found := _SCHEME.match(value):
        raise ValueError(f"only local paths, of a mounted file system; {found[0]!r} leads elsewhere (a folder: ./NAME)")
    if value.startswith("~"):
        raise ValueError("'~' is not replaced here: give the whole path (a folder: ./NAME)")
    path = value.removeprefix("file://") if value.startswith("file://") else value.removeprefix("file:")
    if not path.strip():
        raise ValueError("it is empty")
    if os.path.isabs(path):
        return os.path.normpath(path)
    here, session = resolved(os.curdir), os.environ.get("SPARK_JOB_ARTIFACT_UUID", "default")
    if session != "default" and os.path.basename(here) == session:
        raise ValueError("a relative path would lead to a temporary folder of this Spark session: give the whole path")
    if glob.has_magic(path) and not os.path.isdir(path):
        here = glob.escape(here)
    return os.path.normpath(os.path.join(here, path))


def local_path(path: str | os.PathLike[str]) -> str:
    """Return what `checked_path` does. Raises ConfigError instead of ValueError."""
    try:
        return checked_path(os.fspath(path))
    except ValueError as error:
        raise ConfigError(f"{os.fspath(path)!r} is no path to read stores from or write files to: {error}") from error
