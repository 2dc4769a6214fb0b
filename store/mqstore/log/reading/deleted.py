"""Deleted topics: the position in the log below which a topic's records no longer count (delivery#topics).

    config/deletedTopics.json   {"topics": {"orders": 8192}, "ends": {"orders": {"0": 5}}}

The records stay in the log until retention removes them. Their queues' files are deleted at once, and nothing rebuilds
them (`TopicGenerations`). The next message of such a queue continues at its `ends`, so no queue offset is used twice.
Retention removes a topic's entry once the log begins after its position.

The file is saved before the queue files are deleted, so the next opening for writing completes an interrupted deletion.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from mqstore.errors import CorruptStoreError, StoreIOError
from mqstore.files.jsonfile import load_json, save_json
from mqstore.log.derived.consumequeue import QueueTable
from mqstore.logger import log as _log

if TYPE_CHECKING:
    from mqstore.log.directory.store_files import StoreParts


DELETED_FILE: Final = "config/deletedTopics.json"


def check_deleted(value: Mapping[str, Any]) -> None:
    """Raise ValueError unless `value` has offsets by topic, and by topic and queue."""
    ends = value.get("ends")
    tables = [value.get("topics"), *(ends.values() if type(ends) is dict else [None])]
    if not all(type(each) is dict and all(type(at) is int and at >= 0 for at in each.values()) for each in tables):
        raise ValueError("topics and ends must be offsets by topic, and by topic and queue")


def load_deleted(parts: StoreParts, *, writer: bool) -> dict[str, dict[str, int]]:
    """Load the position of each topic's deletion. Return the queue ends then. Without a valid file there are none."""
    path = parts.root / DELETED_FILE
    try:
        value, problems = load_json(path, writer=writer, fs=parts.fs, root=parts.root, check=check_deleted)
    except CorruptStoreError as error:
        value, problems = None, [f"{error}. Messages of deleted topics may be visible again"]
    for problem in problems:
        _log.warning("%s", problem)
    value = value or {"topics": {}, "ends": {}}
    parts.queue_table.deleted = value["topics"]
    return value["ends"]  # type: ignore[no-any-return]


def save_deleted(parts: StoreParts, topics: Mapping[str, int]) -> None:
    """Save the position of each deletion, durably. If it raises an error of `save_json`, nothing has changed."""
    path, queues = parts.root / DELETED_FILE, parts.queue_table
    ends = {topic: {str(queue.queue_id): queue.max_offset for queue in queues.of(topic)} for topic in topics}
    parts.fs.mkdir(path.parent, exist_ok=True)
    parts.fs.sync_directory(parts.root)
    value = {"topics": dict(topics), "ends": ends}
    save_json(path, value, parts.fs, check=check_deleted, file_mode=parts.config.file_mode)
    queues.deleted = dict(topics)


def remove_queues(queues: QueueTable, topics: Iterable[str]) -> None:
    """Delete the files of queues whose messages are all older than the deletion of their topic. Their ends stay.
    Nothing may be dispatched meanwhile."""
    for topic in topics:
        for queue in queues.of(topic):
            if queue.last_message()[0] >= queues.deleted[topic]:
                continue
            for name in queue.list_files():
                queues.remove_file(os.path.join(queue.directory, name))
            queue.forget_files()
            queue.min_offset = queue.max_offset
            for folder in (queue.directory, os.path.dirname(queue.directory)):
                with suppress(StoreIOError):  # the topic has another queue
                    queues.fs.rmdir(folder)
                    queues.made_directories.discard(folder)


def continue_numbers(queues: QueueTable, ends: Mapping[str, Mapping[str, int]]) -> None:
    """Continue queues without files at the ends they had when their topics were deleted."""
    for topic, numbers in ends.items():
        for queue_id, end in numbers.items():
            queue = queues.create(topic, int(queue_id))
            if not queue.list_files():
                queue.min_offset = queue.max_offset = queue.next_offset = end
