"""Where queues ended when a recovery may have shortened them: for whoever keeps positions in them (reliability#p3).

A group that had come to offset 100 of a queue that was cut at 43 has to go on at 43, or it skips what is put under the
numbers between. Who keeps the groups' progress lowers it when it opens (`broker/offsets.py`); but the store may be
opened, and put to, without that: by a `MessageStore`, `mqstore recover`, a job. So each recovery that changed anything
leaves a note, which the next to load progress takes, and then removes. It also does so if progress was saved quickly,
without a sync, and rests on more of the log than there is (`logEnd`):

    config/queueEnds.json   {"ends": {"orders": {"0": 43}}, "log": 8192, "of": [2190034171, 0]}

    ends    where each queue ended; one that is not named was not there, and ended at 0. Of several recoveries the least
    log     where the log ended; likewise
    of      CRC-32C of what `consumerOffset.json` and its `.bak` said when it was noted, 0 without one. When what is
            loaded says something else, it was written by somebody who knew how far the queues went (a Java broker), and
            the note is void
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import crc32c

from mqstore.errors import CorruptStoreError, FormatError
from mqstore.files.filesystem import FileSystem
from mqstore.files.jsonfile import decode_json, load_json, read_json, save_json
from mqstore.log.recovery.known import KNOWN_FILE

__all__ = ["LOG_END", "QueueEnds", "forget_ends", "is_progress_ahead", "load_ends", "note_ends"]

LOG_END: Final = "logEnd"
"""Member of a progress file that was saved quickly: the end of the log that it rests on."""

_FILE: Final = Path("config", "queueEnds.json")
_PROGRESS: Final = Path("config", "consumerOffset.json")
_DELAYS: Final = Path("config", "delayOffset.json")


@dataclass(frozen=True, slots=True)
class QueueEnds:
    """A note: (topic, queue id) -> offset, and the physical offset at which the log ended."""

    ends: Mapping[tuple[str, int], int]
    log_end: int
    readable: bool = True
    """False: there was one, and nobody knows what it said."""

    def of(self, topic: str, queue_id: int) -> int:
        return self.ends.get((topic, queue_id), 0)


def note_ends(root: Path, ends: Mapping[tuple[str, int], int], log_end: int, fs: FileSystem, file_mode: int) -> None:
    """Leave a note of where all queues and the log end. Durable on return. Nothing to note where there is no `config`,
    or only known damage in it: nobody keeps positions there. Raises as `save_json`."""
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
    with suppress(FileNotFoundError, FormatError):
        if decode_json(read_json(root / _FILE, fs)) == noted:
            return
    save_json(root / _FILE, noted, fs, file_mode=file_mode)


def is_progress_ahead(root: Path, log_end: int, fs: FileSystem) -> bool:
    """Return True if progress was saved quickly and rests on more of the log than up to `log_end`."""
    for name in (_PROGRESS, _DELAYS):
        try:
            end = decode_json(read_json(root / name, fs)).get(LOG_END)
        except (FileNotFoundError, FormatError):
            continue
        if type(end) is int and end > log_end:
            return True
    return False


def load_ends(root: Path, fs: FileSystem) -> QueueEnds | None:
    """The note that is there; None without one that counts."""
    try:
        value = load_json(root / _FILE, writer=False, fs=fs, root=root, check=_ends_of).value
    except CorruptStoreError:
        # Something was shortened, who knows by how much: of progress what comes twice is not skipped.
        return QueueEnds({}, 0, readable=False)
    if value is None or next((each for each in _said(root, fs) if each), 0) not in value["of"]:
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


def _said(root: Path, fs: FileSystem) -> list[int]:
    """A checksum of the value of the file, and of its backup; 0 for what is not there or does not decode."""
    found = []
    for name in (_PROGRESS, _PROGRESS.with_name(_PROGRESS.name + ".bak")):
        try:
            value = decode_json(read_json(root / name, fs))
        except (FileNotFoundError, FormatError):
            found.append(0)
        else:
            found.append(crc32c.crc32c(json.dumps(value, sort_keys=True).encode()) or 1)
    return found


def _ends_of(value: dict[str, Any]) -> QueueEnds:
    """ValueError unless this is such a note."""
    table, log_end, said = value.get("ends"), value.get("log"), value.get("of")
    if type(table) is not dict or type(log_end) is not int or type(said) is not list:
        raise ValueError("ends, log and of are missing, or of the wrong type")
    ends = {}
    for topic, queues in table.items():
        if type(queues) is not dict or any(type(end) is not int for end in queues.values()):
            raise ValueError(f"ends: {topic[:150]!r} must be an object of integers")
        ends.update({(topic, int(queue_id)): end for queue_id, end in queues.items()})
    return QueueEnds(ends, log_end)
