"""Checks of the broker's JSON files, for loading, `verify` and `recover` (format#json-load).

A table refuses a file with a value of the wrong type, and then the store does not open. So `verify` and `recover` use
the same functions.

The check of a file of Spark is here, too, because `verify` and `recover` must not import `spark/`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from mqstore.broker.delay.levels import check_delay_offsets
from mqstore.broker.pop.orderinfo import check_order_info
from mqstore.broker.tables.groups import check_groups
from mqstore.broker.tables.localoffsets import LOCAL_OFFSETS, check_local_offsets
from mqstore.broker.tables.locks import check_lock_list
from mqstore.broker.tables.offsets import check_offsets
from mqstore.broker.tables.requestmodes import check_request_modes
from mqstore.broker.tables.topics import check_topics
from mqstore.errors import UnsupportedStoreError
from mqstore.files.jsonfile import Check
from mqstore.log.directory.names import is_path_safe

OVERWRITE_FILE: Final = "config/spark/overwrite.json"


def check_overwrite(value: Mapping[str, Any], file: str | os.PathLike[str] = OVERWRITE_FILE) -> None:
    """Raise ValueError if this is not a valid overwrite file, with or without an overwrite (`jobs.publish`).
    Raises UnsupportedStoreError, which names `file`, for a newer version: that is not damage, and the file must not be
    moved aside."""
    _check_version(value, file)
    if "ends" not in value:
        return
    if type(value.get("app")) is not str or not _is_number(value.get("ver")):
        raise ValueError(f"invalid app {value.get('app')!r:.80} or ver {value.get('ver')!r:.80}")
    for topic, ends in _object(value, "ends").items():
        if "@" in topic or not is_path_safe(topic):  # the ends go to the table of offsets, which has this rule
            raise ValueError(f"ends: {topic!r:.80} is not a topic")
        for queue_id, end in _object({topic: ends}, topic).items():
            if not (queue_id.isascii() and queue_id.isdecimal() and len(queue_id) < 11 and _is_number(end)):
                raise ValueError(f"ends: {topic!r:.80}, queue {queue_id!r:.20}: {end!r:.80} is not an offset")


def _check_version(value: Mapping[str, Any], file: str | os.PathLike[str]) -> None:
    version = value.get("version")
    if type(version) is not int or version < 1:
        raise ValueError(f"version must be 1, not {version!r:.80}")
    if version > 1:
        raise UnsupportedStoreError(
            f"{os.fspath(file)} has version {version}, but this mqstore supports only version 1: upgrade mqstore",
            version,
            (),
        )


def _object(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if not isinstance(found := value.get(name), dict):
        raise ValueError(f"{name!r:.80} must be an object, not {found!r:.80}")
    return found


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


CONFIG_CHECKS: Final[Mapping[str, Check]] = {
    "config/topics.json": check_topics,
    "config/subscriptionGroup.json": check_groups,
    "config/consumerOffset.json": check_offsets,
    "config/delayOffset.json": check_delay_offsets,
    "config/consumerOrderInfo.json": check_order_info,
    "config/locks.json": check_lock_list,
    "config/messageRequestMode.json": check_request_modes,
    f"{LOCAL_OFFSETS}/*/*.json": check_local_offsets,
    OVERWRITE_FILE: check_overwrite,
}
"""Check functions by path in the store, where `*` is any name.
Each raises ValueError for an object of the wrong shape."""
