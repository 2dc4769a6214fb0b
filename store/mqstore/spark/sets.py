"""The manifest of a store set: which stores a folder holds (spark#options). Only those it names count.

mqstore-set.json
{"version": 1,
 "stores":   {ID: "path relative to the folder"},      in it: absolute ones and `..` are refused
 "recorded": {APP: n}}                                the last version that each application has written (`publish`)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mqstore.errors import ConfigError
from mqstore.files.jsonfile import decode_json
from mqstore.spark.telling import readable

__all__ = ["RECORDED", "SET_FILE", "read_set"]

SET_FILE = "mqstore-set.json"
RECORDED = "recorded"


def read_set(root: Path) -> dict[str, Any] | None:
    """The manifest of the set in `root`, members of newer programs included; None where there never was one.
    ConfigError for one that is not to be read, and so not to be written over either; StoreIOError for no permission."""
    path = root / SET_FILE
    backup = Path(f"{path}.bak")
    try:
        with readable(str(root)):
            value = decode_json(path.read_bytes())
        _check(value)
    except (FileNotFoundError, NotADirectoryError):
        if backup.exists():  # taken for empty, all stores of the set would be lost, and what was written too
            raise ConfigError(
                f"{path} is missing; {backup} has the one before: copy it back. It lacks what was written last: before "
                "mqstore spark clean, which would delete it, add those stores of the folder"
            ) from None
        return None
    except ValueError as error:
        raise ConfigError(
            f"{path} is no manifest of a store set: {error}. Mend it by hand, or copy {backup} over it, if there is "
            "one: it has the one before, which lacks what was written last"
        ) from error
    return value


def _check(value: Mapping[str, Any]) -> None:
    """ValueError for another shape; ConfigError for that of a newer program. Strict, since of what passes folders are
    read, and deleted by an overwrite, and a version that is not seen has its rows written twice."""
    version = value.get("version")
    if type(version) is not int or version < 1:
        raise ValueError(f"version must be 1, not {version!r:.80}")
    if version > 1:
        raise ConfigError(f"{SET_FILE} is of version {version}; this mqstore knows 1: upgrade it")
    stores, recorded = value.get("stores"), value.get(RECORDED, {})
    if not isinstance(stores, dict):
        raise ValueError(f"stores must be an object, not {stores!r:.80}")
    for name, where in stores.items():
        if not _is_text(name) or not isinstance(where, str) or not _is_inside(where):
            raise ValueError(f"store {name!r:.80} is at {where!r:.80}, which must be a path in the folder, without ..")
    if not isinstance(recorded, dict):
        raise ValueError(f"{RECORDED} must be an object, not {recorded!r:.80}")
    for app, last in recorded.items():
        if type(last) is not int or last < 0:
            raise ValueError(f"{RECORDED}: the version of {app!r:.80} must be a number from 0 on, not {last!r:.80}")


def _is_inside(where: str) -> bool:
    """Whether this can be the path of a store within the folder. What links there lead to, it does not say."""
    return _is_text(where) and "\0" not in where and not where.startswith("/") and ".." not in where.split("/")


def _is_text(name: str) -> bool:
    """JSON may hold halves of characters (`"\\ud800"`), and neither a file system nor a column takes those."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
