"""The manifest of a store set: which stores a folder holds (spark.md B2). Only those it names count.

mqstore-set.json
{"version": 1,
 "stores":   {ID: "path relative to the folder"},
 "recorded": {APP: n}}                                the last version that each application has written (`publish`)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mqstore.errors import ConfigError
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
            value = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        if backup.exists():  # taken for empty, all stores of the set would be lost, and what was written too
            raise ConfigError(
                f"{path} is missing; {backup} has the one before: copy it back. It lacks what was written last: before "
                "mqstore spark clean, which would delete it, add those stores of the folder"
            ) from None
        return None
    except ValueError as error:
        raise ConfigError(f"{path} is no manifest of a store set: {error}; {backup} has the one before") from error
    if isinstance(value, dict) and value.get("version", 1) != 1:
        raise ConfigError(f"{path} is of version {value['version']!r}; this mqstore knows 1: upgrade it")
    if not _is_manifest(value):
        raise ConfigError(f"{path} is no manifest of a store set; {backup} has the one before")
    return value  # type: ignore[no-any-return]  # it was looked at


def _is_manifest(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.get("version") == 1
        and isinstance(value.get("stores"), dict)
        and all(isinstance(where, str) for where in value["stores"].values())
        and isinstance(value.get(RECORDED, {}), dict)
    )
