"""Histories of the messages with a key, id or place, in one store or many (`mqstore.broker.admin.history`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Unpack

from mqstore.broker.admin.history import Histories, History
from mqstore.errors import ConfigError
from mqstore.jobs.errors import of_store
from mqstore.jobs.options.selection import Selection, Shaped, Stores, check_followed, names_of, select
from mqstore.jobs.reading.opening import StoreName
from mqstore.jobs.runner import Runner, Where
from mqstore.log.reading.directory import StoreFiles


@dataclass(frozen=True, slots=True)
class Trace(Shaped):
    """Result of `trace`."""

    key: str
    messages: tuple[History, ...]
    """Messages, by store and by the place of the first copy."""
    missed: tuple[str, ...]
    """Reasons why something may be missing."""


def trace(stores: Stores | Selection, key: str, groups: Sequence[str] = (), **where: Unpack[Where]) -> Trace:
    """Find the messages with a key, unique key, unique name, message id, or place: `topic/queue@offset`,
    or the physical offset of a record. `groups` are the only ones to show. Copies and events are those that the files
    still have: `missed` names the gaps.

    `spark` and `progress`: see `mqstore.jobs`. Raises ConfigError for an invalid key, and for a selection with more
    than stores.
    """
    if type(key) is not str or not key.strip() or any(each in key for each in "\x01\x02"):
        raise ConfigError(f"key={key!r} is not a key: give a key, an id, or a place such as orders/0@17")
    chosen = select(stores)
    check_followed(chosen)
    found = Runner(**where).run(chosen.stores(), partial(_look, key, names_of(groups)), "mqstore trace")
    histories, missed = [history for part, _ in found for history in part], [each for _, part in found for each in part]
    return Trace(key, tuple(histories), tuple(dict.fromkeys(missed)))


def _look(key: str, groups: Sequence[str], name: StoreName) -> tuple[list[History], list[str]]:
    with of_store(name.path), StoreFiles(name.path) as files:
        histories = Histories(files, name.id, groups)
        return histories.find(key), histories.missed
