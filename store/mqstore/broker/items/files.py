"""Items of a store without a broker: by its files, also while another process writes them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress

import numpy as np

from mqstore.broker.admin.inspect import level_offsets, looked_pops, timer_view
from mqstore.broker.admin.metrics import WaitingRetries
from mqstore.broker.background.context import Tables
from mqstore.broker.delay.timermessages import cancellations
from mqstore.broker.delay.timerqueries import is_cancelled, waits_for
from mqstore.broker.items.state import Items, Levels
from mqstore.broker.pop.tables import PopTables
from mqstore.files.lock import writer_alive
from mqstore.layout.javahash import java_hash
from mqstore.log.message import Message


class TimerFiles:
    """The timer by its files: some seconds old while a broker runs. Takes 12 bytes for each waiting message."""

    def __init__(self, tables: Tables) -> None:
        self._store = tables.store
        self._view = timer_view(tables)
        none, records = np.empty(0, np.int64), self._view.records
        self._hashes, self._offsets = (np.concatenate([none, *(each[i] for each in records)]) for i in (0, 1))

    # The next two are those of `TimerQueries`.

    def page(self, topics: Collection[str], begin: int, count: int) -> tuple[list[Message], int | None]:
        wanted = np.isin(self._hashes, [java_hash(topic) for topic in topics]) & (self._offsets >= begin)
        chosen = self._offsets[wanted][: count + 1].tolist()
        found = []
        for offset in chosen[:count]:
            with suppress(LookupError):
                message = self._store.at(offset)
                if waits_for(message, topics) and not is_cancelled(self._store, message):
                    found.append(message)
        return found, chosen[count] if len(chosen) > count else None

    def waits(self, message: Message) -> bool:
        return message.physical_offset in self._offsets and not is_cancelled(self._store, message)

    def count(self, topic: str) -> int:
        """Return the number of messages that wait for a topic."""
        waiting, cancels = (each[java_hash(topic)] for each in (self._view.topics, self._view.cancels))
        return max(0, waiting - cancels // cancellations(self._store.manifest))


def items_of(tables: Tables, pops: PopTables | None = None) -> Items:
    """Return the items as the files have them. `pops` is the result of `looked_pops`, if it is known."""
    timer = TimerFiles(tables)
    alive = writer_alive(tables.store.path, tables.fs)
    owner = "the process that opened the store" if alive else "an ended process: ready when the store is opened"
    return Items(tables, looked_pops(tables) if pops is None else pops, timer, *waiting_of(tables, timer.count), owner)


def waiting_of(tables: Tables, timer: Callable[[str], int]) -> tuple[Levels, Callable[[str], int]]:
    """Return the delay levels by the files, and the number of messages that wait for a topic there or in the timer."""
    levels = level_offsets(tables)
    return levels, WaitingRetries(tables.store, levels, timer).of_topic
