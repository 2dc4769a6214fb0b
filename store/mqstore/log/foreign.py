"""Description of files that only a RocketMQ broker uses in a store's directory (format#manifest).

    batchconsumequeue/                      queues of another kind, for topics of another kind
    consumequeue/CURRENT                    queues in RocksDB, in the same folder as mqstore's
    consumequeue_ext/                       data of units whose tags codes are addresses
    config/{topics,subscriptionGroups,      tables in RocksDB, in place of the JSON files of like names
        consumerOffsets,metadata,rdb}/

None of these is damage, and all are left as they are. docs/recovery.md explains what follows from each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mqstore.files.filesystem import FileSystem
from mqstore.log.consumequeue import QueueTable

__all__ = ["foreign"]

_TABLES: Final = ("topics", "subscriptionGroups", "consumerOffsets", "metadata", "rdb")
_SHOWN: Final = 8


def foreign(root: Path, queues: QueueTable, fs: FileSystem) -> list[str]:
    """Return a sentence for each kind of file. The store's `queues` must have been loaded."""
    found = []
    if queues.batch_topics:
        names = ", ".join(sorted(queues.batch_topics)[:_SHOWN])
        more = " ..." if len(queues.batch_topics) > _SHOWN else ""
        found.append(
            f"batchconsumequeue/: RocketMQ has batch queues of {names}{more}; they are neither read nor changed, and a "
            "store with an unclean end stays so until a broker has brought them up to date"
        )
    if queues.in_rocksdb:
        found.append(
            "consumequeue/: RocketMQ keeps the queues in RocksDB, which is neither read nor changed; queues in files "
            "are built beside it by whoever opens the store for writing, and the mark of an unclean end stays, for a "
            "broker to bring its own up to date"
        )
    if queues.has_addresses:
        found.append("consumequeue_ext/: RocketMQ has put bit maps and tags of messages there; filters look at records")
    if tables := [name for name in _TABLES if _is_rocksdb(root / "config" / name, fs)]:
        found.append(
            f"config/: RocketMQ keeps tables in RocksDB ({', '.join(tables)}), which are neither read nor changed: "
            "settings and progress that are not in JSON files there seem not to be; RocketMQ's mqadmin exports them"
        )
    return found


def _is_rocksdb(folder: Path, fs: FileSystem) -> bool:
    if not folder.is_dir():
        return False
    inside = [folder, *(folder / name for name in fs.scandir_directories(folder))]  # some are one folder deeper
    return any(fs.exists(each / "CURRENT") for each in inside)
