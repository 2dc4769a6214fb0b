"""Administration of a store: topics, groups, dead letters, messages in flight, and store directories.

`Store.broker` is the broker of a store that is open for writing. These functions work on a directory, for operators:
`look` and `inspect_store` read it, also while a broker runs, and `offline` changes it while none runs.

>>> import mqstore, tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     with mqstore.open(folder) as store:
...         store.broker.topics.create("orders", queues=4).write_queues
...     with look(folder) as opened:
...         opened.topics.names(), opened.groups.names()
4
(['orders'], [])
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from mqstore.broker.admin.bytes import inspect_file
from mqstore.broker.admin.compare import compare_stores
from mqstore.broker.admin.contents import inspect_store
from mqstore.broker.admin.offline import Offline, look, offline
from mqstore.broker.admin.operations import of_directory as operations
from mqstore.broker.admin.salvage.carve import carve
from mqstore.broker.admin.salvage.cut import cut_messages, restore_cut
from mqstore.broker.admin.search import Search
from mqstore.broker.admin.usage import disk_usage
from mqstore.broker.redelivery.dead_letters import DeadLetters
from mqstore.broker.tables.configchecks import CONFIG_CHECKS
from mqstore.broker.tables.groups import default_retry
from mqstore.broker.tables.names import check_group, check_user_topic, queue_name, queue_topic, retry_topics
from mqstore.client.send.preparing import check_options, options_of
from mqstore.contract import Limits
from mqstore.files.filesystem import REAL
from mqstore.files.readonly_fs import QUIET
from mqstore.log.recovery import repair
from mqstore.log.snapshot.copy import SnapshotReport, plan_snapshot, snapshot_store
from mqstore.log.writing.outgoing import OutgoingMessage
from mqstore.options import DEFAULT_MESSAGE_BYTES, StoreConfig

__all__ = [
    "DeadLetters",
    "Offline",
    "Search",
    "carve",
    "check_group",
    "check_message",
    "check_user_topic",
    "compare_stores",
    "cut_messages",
    "default_retry",
    "disk_usage",
    "inspect_file",
    "inspect_store",
    "look",
    "offline",
    "operations",
    "queue_name",
    "queue_topic",
    "rebuild_config",
    "restore_cut",
    "retry_topics",
    "snapshot",
]


def check_message(message: OutgoingMessage, max_message_size: int | None = None) -> None:
    """Raise InvalidMessageError or ConfigError if a store with this limit of bodies refuses the message.
    None: the limit of a new store. Topic and queue of the message are not checked."""
    size = DEFAULT_MESSAGE_BYTES if max_message_size is None else max_message_size
    limits = Limits(size, StoreConfig().max_delay)
    check_options(message.body, options_of(message), limits, time.time_ns() // 1_000_000)


def rebuild_config(path: str | os.PathLike[str], *, dry_run: bool = False) -> list[str]:
    """Replace the bad JSON files of a store by defaults, and return a sentence about each. Their contents are lost.
    With `dry_run` only describe the changes. Raises NotAStoreError, and StoreLockedError if a writer has the store."""
    fs = QUIET if dry_run else REAL
    return repair.rebuild_config(path, dry_run=dry_run, json_checks=CONFIG_CHECKS, fs=fs)


def snapshot(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    link: bool = False,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> SnapshotReport:
    """Copy the store at `path`, in use by another process or not, to the folder `target`, as `Store.snapshot` does.
    With `dry_run` only `plan` of the report is filled, and nothing is changed."""
    if dry_run:
        return SnapshotReport(plan_snapshot(path, target, link=link))
    return snapshot_store(path, target, link=link, progress=progress, json_checks=CONFIG_CHECKS)
