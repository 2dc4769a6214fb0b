"""Rules for names that become paths, and for new topics (format#names, clients#message-rules)."""

from __future__ import annotations

import re
from functools import lru_cache

from mqstore.errors import InvalidMessageError

HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
TIMER_TOPIC = "rmq_sys_wheel_timer"
SYSTEM_PREFIX = "rmq_sys_"
RETRY_PREFIX = "%RETRY%"
_DLQ_PREFIX = "%DLQ%"
_LEGAL = re.compile(r"[%|a-zA-Z0-9_-]+|%RETRY%[%|a-zA-Z0-9_+-]+")
MAX_QUEUE_ID = 16_383
"""Maximum queue id of a message that is put. Files of a RocketMQ broker may have greater ones."""
_MAX_STORED_QUEUE_ID = 0x7FFF_FFFF
MAX_TOPIC = 127
MAX_SYSTEM_TOPIC = 255


@lru_cache(maxsize=4096)
def is_path_safe(name: str) -> bool:
    """Return True if a name from a record or a JSON file may become a file name.

    It must have 1..255 bytes of UTF-8, no `/` and no control character, and not be `.` or `..`.

    >>> is_path_safe("%RETRY%billing"), is_path_safe("../etc"), is_path_safe("")
    (True, False, False)
    """
    if name in (".", "..") or "/" in name:
        return False
    try:
        encoded = name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return 1 <= len(encoded) <= 255 and not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 for c in name)


def check_topic(topic: str) -> bytes:
    """Return `topic` as bytes if a message may be put to it, else raise InvalidMessageError."""
    if not isinstance(topic, str):
        raise InvalidMessageError(f"topic must be a str, not {type(topic).__name__}", "topic")
    if not _LEGAL.fullmatch(topic):
        raise InvalidMessageError(
            f"topic {topic!r} must have at least one character, and only letters, digits and % | _ -", "topic"
        )
    limit = MAX_SYSTEM_TOPIC if topic.startswith((RETRY_PREFIX, _DLQ_PREFIX)) else MAX_TOPIC
    if len(topic) > limit:
        raise InvalidMessageError(f"topic {topic[:40]!r}... has {len(topic)} characters. The limit is {limit}", "topic")
    return topic.encode("ascii")


def is_queue_id(name: str) -> bool:
    """Return True if a folder of this name belongs to a queue."""
    return name.isascii() and name.isdigit() and str(int(name)) == name and int(name) <= _MAX_STORED_QUEUE_ID
