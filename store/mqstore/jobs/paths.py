"""Paths given to a job, made absolute here, since executors and later batches have other working directories."""

from __future__ import annotations

import glob
import os
import re
from typing import Final

from mqstore.errors import ConfigError
from mqstore.files.safe_open import resolved

_SCHEME: Final = re.compile(r"(?!file:)[A-Za-z][A-Za-z0-9+.-]*:|file://(?!/)")


def checked_path(value: str) -> str:
    """Return the absolute path of a local path, without `file:`. Raises ValueError for any other scheme.

    A URL of another scheme would be taken for a folder's name, and a job would silently write below its working
    directory. So would a relative path in Spark Connect, where Python workers run in a temporary folder of the session.

    >>> checked_path("file:///var/mq")
    '/var/mq'
    """
    if found := _SCHEME.match(value):
        raise ValueError(f"{found[0]!r} is not supported, only paths of mounted file systems (a folder: ./NAME)")
    if value.startswith("~"):
        raise ValueError("'~' is not expanded; give the whole path (a folder: ./NAME)")
    path = value.removeprefix("file://") if value.startswith("file://") else value.removeprefix("file:")
    if not path.strip():
        raise ValueError("it is empty")
    if os.path.isabs(path):
        return os.path.normpath(path)
    here, session = resolved(os.curdir), os.environ.get("SPARK_JOB_ARTIFACT_UUID", "default")
    if session != "default" and os.path.basename(here) == session:
        raise ValueError("a relative path would be in a temporary folder of this Spark session: give the whole path")
    if glob.has_magic(path) and not os.path.isdir(path):
        here = glob.escape(here)
    return os.path.normpath(os.path.join(here, path))


def local_path(path: str | os.PathLike[str]) -> str:
    """Return `checked_path(path)`. Raises ConfigError instead of ValueError."""
    try:
        return checked_path(os.fspath(path))
    except ValueError as error:
        raise ConfigError(f"cannot use the path {os.fspath(path)!r}: {error}") from error
