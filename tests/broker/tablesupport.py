"""A store with one table of its broker: the topics, or the groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mqstore.broker.names import QueueKey
from mqstore.broker.tables.groups import GroupConfig, GroupTable
from mqstore.broker.tables.offsets import OffsetTable
from mqstore.broker.tables.topics import TopicConfig, TopicTable
from mqstore.log.store import MessageStore
from tests.broker.support import TableBench

__all__ = ["GroupConfig", "Groups", "QueueKey", "TopicConfig", "Topics", "topics_of"]


class Topics(TableBench[TopicTable]):
    """A store, its topics and offsets, and the topics' file."""

    def __init__(self, path: Path, **config: Any) -> None:
        super().__init__(path, "topics.json", self._load_both, **config)

    def _load_both(self, store: MessageStore) -> TopicTable:
        self.offsets = OffsetTable(store)
        return TopicTable(store, self.offsets)


class Groups(TableBench[GroupTable]):
    """A store, its groups, and their file."""

    def __init__(self, path: Path, **config: Any) -> None:
        super().__init__(path, "subscriptionGroup.json", GroupTable, **config)


def topics_of(store: MessageStore) -> TopicTable:
    return TopicTable(store, OffsetTable(store))
