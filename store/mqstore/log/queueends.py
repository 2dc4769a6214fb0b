"""Where queues ended when a recovery may have shortened them: for whoever keeps positions in them (P3).

A group that had come to offset 100 of a queue that was cut at 43 has to go on at 43, or it skips what is put under the
numbers between. Who keeps the groups' progress lowers it when it opens (`broker/offsets.py`); but the store may be
opened, and put to, without that: by `mqstore put`, `mqstore recover`, a job. So each recovery that changed anything
leaves a note, which the next to load progress takes, and then removes:

    config/queueEnds.json   {"ends": {"orders": {"0": 43}}, "of": 2190034171}

    ends    where each queue ended; one that is not named was not there, and ended at 0. Of several recoveries the least
    of      CRC-32C of `consumerOffset.json` when it was noted. Another one was written by somebody who knew how far the
            queues went (a Java broker), and the note is void
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import crc32c

from mqstore.errors import CorruptStoreError
from mqstore.files.filesystem import FileSystem
from mqstore.files.jsonfile import JSON_BYTES_MAX, load_json, save_json

__all__ = ["forget_ends", "load_ends", "note_ends"]

_FILE: Final = Path("config", "queueEnds.json")
_PROGRESS: Final = Path("config", "consumerOffset.json")

Ends = dict[str, dict[int, int]]
"""Topic -> queue id -> offset."""


def note_ends(root: Path, ends: Mapping[tuple[str, int], int], fs: FileSystem, file_mode: int) -> None:
    """Leave a note of where all queues end, (topic, queue id) -> offset. Durable on return. Nothing to note where
    nobody keeps progress. Raises as `save_json`."""
    if not (root / _PROGRESS).exists():
        return
    before = load_ends(root, fs)
    table: dict[str, dict[str, int]] = {}
    for (topic, queue_id), end in ends.items():
        if before is not None:
            end = min(end, before.get(topic, {}).get(queue_id, 0))
        table.setdefault(topic, {})[str(queue_id)] = end
    save_json(root / _FILE, {"ends": table, "of": _digest(root, fs)}, fs, file_mode=file_mode)


def load_ends(root: Path, fs: FileSystem) -> Ends | None:
    """The note that is there; None without one that counts."""
    try:
        value = load_json(root / _FILE, writer=False, fs=fs, root=root, check=_ends_of).value
    except CorruptStoreError:
        return {}  # something was shortened, who knows by how much: what comes twice is not skipped
    if value is None or value["of"] != _digest(root, fs):
        return None
    return _ends_of(value)


def forget_ends(root: Path, fs: FileSystem) -> None:
    """Remove the note, once what it says is on disk elsewhere. Raises StoreIOError."""
    removed = False
    for name in (_FILE, _FILE.with_name(_FILE.name + ".bak")):
        if (root / name).exists():
            fs.unlink(root / name, missing_ok=True)
            removed = True
    if removed:
        fs.sync_directory(root / _FILE.parent)


def _digest(root: Path, fs: FileSystem) -> int:
    try:
        return crc32c.crc32c(fs.read_whole(os.fspath(root / _PROGRESS), JSON_BYTES_MAX))
    except FileNotFoundError:
        return 0


def _ends_of(value: dict[str, Any]) -> Ends:
    """ValueError unless this is such a note."""
    table, digest = value.get("ends"), value.get("of")
    if type(table) is not dict or type(digest) is not int:
        raise ValueError("ends and of are missing, or no object and number")
    ends: Ends = {}
    for topic, queues in table.items():
        if type(queues) is not dict or any(type(end) is not int for end in queues.values()):
            raise ValueError(f"ends: {topic[:150]!r} must be an object of integers")
        ends[topic] = {int(queue_id): end for queue_id, end in queues.items()}
    return ends
