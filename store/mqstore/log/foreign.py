"""What a RocketMQ broker may keep in a store's directory that mqstore does not know, in words (format#manifest).

    batchconsumequeue/                      queues of another kind, for topics of another kind
    consumequeue/CURRENT                    queues in RocksDB, in the very folder of ours
    consumequeue_ext/                       what tags codes of units lead to that are addresses
    config/{topics,subscriptionGroups,      tables in RocksDB, in place of the JSON files of like names
        consumerOffsets,metadata,rdb}/

None of it is damage, and all of it is left as it is; docs/recovery.md tells what follows from each.
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
    """A sentence for each kind of thing that is there. `queues` of the store at `root` must have been loaded."""
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
    inside = [folder, *(folder / name for name in fs.scandir_directories(folder))]  # one is a generation further down
    return any(fs.exists(each / "CURRENT") for each in inside)
