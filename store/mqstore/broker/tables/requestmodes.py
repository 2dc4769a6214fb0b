"""Request modes of groups: which clients of RocketMQ pull a topic, and which pop it (delivery#request-modes).

`config/messageRequestMode.json` has RocketMQ's shape (format#json-files).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

from mqstore.broker.tables.configfile import ConfigFile, entries, member
from mqstore.broker.tables.names import check_group, is_retry_topic
from mqstore.errors import ConfigError, NotPermittedError
from mqstore.log.directory.names import is_path_safe
from mqstore.log.reading.reader import StoreReader
from mqstore.signalsafe import Lock

_MODES_MAX: Final = 10_000
"""Entries of the table. Clients set them."""
_MAP: Final = "messageRequestModeMap"


class RequestMode(NamedTuple):
    """How the clients of a group ask for the messages of a topic."""

    mode: Literal["PULL", "POP"] = "PULL"
    share: int = 0
    """With POP: number of other members whose queues a member pops as well. 0: every member pops all queues."""


def check_request_modes(value: Mapping[str, Any]) -> dict[tuple[str, str], RequestMode]:
    """Return the modes in `messageRequestMode.json` by (topic, group). Raises ValueError for another content."""
    modes = {}
    for topic, groups in entries(value, _MAP):
        for group, entry in entries({_MAP: groups}, _MAP):
            mode = member(entry, "mode", str, "PULL")
            if mode not in ("PULL", "POP"):
                raise ValueError(f"mode must be PULL or POP, not {mode!r:.80}")
            modes[topic, group] = RequestMode(mode, member(entry, "popShareQueueNum", int, 0))
    return modes


class RequestModes:
    """Request modes of a store. Thread-safe. A change is saved before it takes effect."""

    def __init__(self, store: StoreReader) -> None:
        """Load the file. Raises CorruptStoreError if it is damaged."""
        self._lock = Lock()
        self._file = ConfigFile(store, "messageRequestMode.json", check_request_modes)
        self._modes = check_request_modes(self._file.load() or {})

    def get(self, topic: str, group: str) -> RequestMode:
        """Return the mode of a group in a topic. A retry topic of pulling consumers is always pulled."""
        return self._modes.get((topic, group), RequestMode())

    def put(self, topic: str, group: str, mode: RequestMode) -> None:
        """Set a mode. It is on disk when this returns. Raises ConfigError, NotPermittedError for a retry topic, and the
        errors of `ConfigFile.save`."""
        check_group(group)
        if not is_path_safe(topic) or mode.mode not in ("PULL", "POP") or not 0 <= mode.share < 1 << 31:
            raise ConfigError(f"topic {topic!r:.80} cannot have the request mode {tuple(mode)!r:.80}")
        if is_retry_topic(topic):
            raise NotPermittedError(f"{topic!r} is a retry topic, which is always pulled")
        with self._lock:
            modes = {**self._modes, (topic, group): mode}
            if len(modes) > _MODES_MAX:
                raise ConfigError(f"there are {_MODES_MAX} request modes already")
            table: dict[str, dict[str, Any]] = {}
            for (name, each), (kind, share) in modes.items():
                entry = {"consumerGroup": each, "mode": kind, "popShareQueueNum": share, "topic": name}
                table.setdefault(name, {})[each] = entry
            self._file.save({_MAP: table})
            self._modes = modes
