"""Manifest of a store set. Stores in the folder that it does not list are ignored (spark#options).

mqstore-set.json
{"version": 1,
 "stores":   {ID: "path relative to the folder"},      absolute paths and `..` are refused
 "recorded": {APP: n}}                                the last version that each application has written (`publish`)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mqstore.errors import ConfigError
from mqstore.files.jsonfile import decode_json
from mqstore.jobs.errors import of_store

SET_FILE = "mqstore-set.json"
RECORDED = "recorded"
MEMBERS: Final = "shards"
"""Folder of a set for the stores that the sink has made. The sink deletes no others."""


def read_set(root: Path) -> dict[str, Any] | None:
    """Return the manifest of the set in `root`, or None if there never was one.
    Unknown members, written by newer programs, are included.

    Raises ConfigError if the manifest is damaged or was lost. If it were taken for an empty one, its stores would be
    lost, too. Raises StoreIOError without permission to read it.
    """
    path = root / SET_FILE
    try:
        with of_store(str(root)):
            value = decode_json(path.read_bytes())
        _check(value)
        return value
    except (FileNotFoundError, NotADirectoryError):
        members = root / MEMBERS
        if not Path(f"{path}.bak").exists() and not (members.is_dir() and any(members.iterdir())):
            return None
        what = "is missing"
    except ValueError as error:
        what = f"is not a manifest of a store set: {error}"
    raise ConfigError(
        f"{path} {what}. Repair it by hand, or restore the previous one from {path}.bak and add the newest stores in "
        f"{root / MEMBERS}: mqstore spark clean deletes stores that it does not list"
    )


def _check(value: Mapping[str, Any]) -> None:
    """Check the shape of a manifest. Raises ValueError, or ConfigError for a newer version.

    The check is strict, because an overwrite deletes the listed folders, and a version that is not recorded is written
    a second time."""
    version, stores, recorded = value.get("version"), value.get("stores"), value.get(RECORDED, {})
    if type(version) is int and version > 1:
        raise ConfigError(f"{SET_FILE} has version {version}, but this mqstore supports only 1: upgrade mqstore")
    if type(version) is not int or version != 1:
        raise ValueError("version must be 1")
    if not isinstance(stores, dict) or not all(map(_is_inside, stores, stores.values())):
        raise ValueError("stores must be paths in the folder")
    if not isinstance(recorded, dict) or not all(type(each) is int and each >= 0 for each in recorded.values()):
        raise ValueError(f"{RECORDED} must be numbers from 0")


def _is_inside(name: str, where: Any) -> bool:
    """Return True if a store's name and its path in the folder are valid. Links are not followed."""
    if not isinstance(where, str) or "\0" in where or where.startswith("/") or ".." in where.split("/"):
        return False
    try:  # JSON may have lone surrogates (`"\ud800"`), which neither a file system nor a column accepts
        (name + where).encode()
    except UnicodeEncodeError:
        return False
    return True
