"""Note of the queue ends after a recovery that may have shortened queues (reliability#p3).

Suppose that a group has committed offset 100 of a queue, and the queue is cut at 43. The group must continue at 43, or
it skips the next messages. The broker lowers committed offsets when it opens (`broker/tables/offsets.py`). But a
`MessageStore`, `mqstore recover` or a job may open the store, and append to it, without a broker. So each recovery that
changed anything leaves a note. The next broker that loads the offsets applies the note and removes it. A recovery also
leaves one if offsets were saved without a sync, and refer to more of the log than exists (`logEnd`):

    config/queueEnds.json   {"ends": {"orders": {"0": 43}}, "log": 8192, "of": [2190034171, 0]}

    ends    end of each queue; a queue that is not named did not exist, and ended at 0. The lowest of several recoveries
    log     end of the log, also the lowest of several recoveries
    of      CRC-32C of the values of `consumerOffset.json` and its `.bak` at the time of the note, 0 for a missing file.
            If the loaded values differ, they were written later by a program that knew the queue ends (a Java broker),
            and the note is void
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from mqstore.errors import CorruptStoreError, FormatError
from mqstore.files.filesystem import FileSystem
from mqstore.files.jsonfile import decode_json, load_json, read_json, save_json
from mqstore.log.recovery.known_damage import KNOWN_FILE
from mqstore.native import crc32c

LOG_END: Final = "logEnd"
"""Member of a file of offsets that was saved without a sync: the end of the log that it refers to."""

_FILE: Final = Path("config", "queueEnds.json")
_PROGRESS: Final = Path("config", "consumerOffset.json")
_DELAYS: Final = Path("config", "delayOffset.json")


class QueueEnds(NamedTuple):
    """Queue ends by (topic, queue id), and the physical offset at which the log ended."""

    ends: Mapping[tuple[str, int], int]
    log_end: int
    readable: bool = True
    """False if a note existed that could not be read."""

    def of(self, topic: str, queue_id: int) -> int:
        return self.ends.get((topic, queue_id), 0)


def note_ends(root: Path, ends: Mapping[tuple[str, int], int], log_end: int, fs: FileSystem, file_mode: int) -> None:
    """Save the ends of all queues and of the log. Durable on return. Raises the errors of `save_json`.
    Does nothing if `config` is missing, or has known damage alone, since then no offsets were committed."""
    folder = root / _FILE.parent
    if not folder.is_dir() or all(name.startswith(Path(KNOWN_FILE).name) for name in fs.scandir(folder)):
        return
    said = _said(root, fs)
    before = load_ends(root, fs)
    table: dict[str, dict[str, int]] = {}
    for (topic, queue_id), end in ends.items():
        least = end if before is None else min(end, before.of(topic, queue_id))
        table.setdefault(topic, {})[str(queue_id)] = least
    least = log_end if before is None else min(log_end, before.log_end)
    noted = {"ends": table, "log": least, "of": said}
    if _read(root / _FILE, fs) != noted:
        save_json(root / _FILE, noted, fs, file_mode=file_mode)


def is_progress_ahead(root: Path, log_end: int, fs: FileSystem) -> bool:
    """Return True if offsets were saved without a sync and refer to a log that ends beyond `log_end`."""
    ends = ((_read(root / name, fs) or {}).get(LOG_END) for name in (_PROGRESS, _DELAYS))
    return any(type(end) is int and end > log_end for end in ends)


def load_ends(root: Path, fs: FileSystem) -> QueueEnds | None:
    """Return the note of the last recoveries, or None if there is none or it is void."""
    try:
        value = load_json(root / _FILE, writer=False, fs=fs, root=root, check=_ends_of).value
    except CorruptStoreError:
        # A queue was shortened by an unknown amount. Offset 0 redelivers messages and skips none.
        return QueueEnds({}, 0, readable=False)
    if value is None or next((each for each in _said(root, fs) if each), 0) not in value["of"]:
        return None
    return _ends_of(value)


def forget_ends(root: Path, fs: FileSystem) -> None:
    """Remove the note. Its content must be durable elsewhere. Raises StoreIOError."""
    removed = False
    for name in (_FILE, _FILE.with_name(_FILE.name + ".bak")):
        if (root / name).exists():
            fs.unlink(root / name, missing_ok=True)
            removed = True
    if removed:
        fs.sync_directory(root / _FILE.parent)


def _read(path: Path, fs: FileSystem) -> dict[str, Any] | None:
    """Return the content of a file, or None if it is missing or bad."""
    with suppress(FileNotFoundError, FormatError):
        return decode_json(read_json(path, fs))
    return None


def _said(root: Path, fs: FileSystem) -> list[int]:
    """Return a checksum of the offsets file and of its backup. It is 0 if the file is missing or bad."""
    files = (_read(root / name, fs) for name in (_PROGRESS, _PROGRESS.with_name(_PROGRESS.name + ".bak")))
    return [0 if value is None else crc32c(json.dumps(value, sort_keys=True).encode()) or 1 for value in files]


def _ends_of(value: dict[str, Any]) -> QueueEnds:
    """Return the note in `value`. Raises ValueError if it is not one."""
    table, log_end, said = value.get("ends"), value.get("log"), value.get("of")
    if type(table) is not dict or type(log_end) is not int or type(said) is not list:
        raise ValueError("ends, log and of are missing, or of the wrong type")
    ends = {}
    for topic, queues in table.items():
        if type(queues) is not dict or any(type(end) is not int for end in queues.values()):
            raise ValueError(f"ends: {topic[:150]!r} must be an object of integers")
        ends.update({(topic, int(queue_id)): end for queue_id, end in queues.items()})
    return QueueEnds(ends, log_end)
