"""Reserved names: system topics and groups, retry and dead-letter topics (delivery#system-names).

A user may not send to a system topic, or create a name that begins with `%`, which is reserved for the engine.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from mqstore.errors import ConfigError, InvalidMessageError, NotPermittedError
from mqstore.layout.arrays.dispatch import SCHEDULE_TOPIC as SCHEDULE_TOPIC
from mqstore.log.directory.names import HALF_TOPIC as HALF_TOPIC
from mqstore.log.directory.names import MAX_TOPIC, SYSTEM_PREFIX
from mqstore.log.directory.names import RETRY_PREFIX as RETRY_PREFIX
from mqstore.log.directory.names import TIMER_TOPIC as TIMER_TOPIC

BROKER_NAME: Final = "mqstore"
"""Name of the broker in receipts and recall handles."""
OP_TOPIC = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
TRANS_CHECK_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
POP_LOG_TOPIC = "rmq_sys_pop_log"
DLQ_PREFIX = "%DLQ%"

SCHEDULE_GROUP = "CID_RMQ_SYS_SCHEDULE"
"""Group whose dead letters are delayed messages that could not be restored."""
POP_LOG_GROUP = "CID_RMQ_SYS_POP_LOG"
TRANS_GROUP = "CID_RMQ_SYS_TRANS"
START_GROUP = "CID_RMQ_SYS_START"
"""Group whose committed offset is a queue's logical start.
Earlier messages were purged, replayed or expired."""

MAX_GROUP = 120
_NO_GROUP = "DEFAULT_CONSUMER"
_SYSTEM_TOPICS = frozenset(
    {
        SCHEDULE_TOPIC,
        HALF_TOPIC,
        OP_TOPIC,
        TRANS_CHECK_TOPIC,
        TIMER_TOPIC,
        "TBW102",
        "SELF_TEST_TOPIC",
        "BenchmarkTest",
        "OFFSET_MOVED_EVENT",
        "RMQ_SYS_TRACE_TOPIC",
        "CHECKPOINT_TOPIC",
    }
)
_SYSTEM_GROUP_PREFIX = "CID_RMQ_SYS_"
_PLAIN_NAME = re.compile(r"[a-zA-Z0-9_-]+(?:%[a-zA-Z0-9_-]+)*")
"""With namespaces of RocketMQ's clients, as in `ns%orders`. The engine's own names begin with `%`."""
_USER_NAME = re.compile(r"(?:[a-zA-Z0-9_-]|\|[0-9a-f]{2})+(?:%(?:[a-zA-Z0-9_-]|\|[0-9a-f]{2})+)*")
"""With the escapes of `queue_topic`, too."""
_ESCAPED = [chr(byte) if _PLAIN_NAME.fullmatch(chr(byte)) else f"|{byte:02x}" for byte in range(256)]
_ESCAPE = re.compile(rb"\|([0-9a-f]{2})")
_INVISIBLE = re.compile(r"[\0-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Control characters, separators of lines, and halves of characters, which have no UTF-8."""
EXPIRY, DROP, DEAD_LETTER = "mqstore.expiry", "drop", "dead-letter"
"""Attribute of a topic with messages that may expire, and its values for expired ones."""
KEPT_NAMES: Final = "mqstore.names"
"""Attribute of a topic: number of seconds for which names of its items may be unique."""
_UNIQUE = "unique:"
_NOT_IN_KEYS = re.compile(r"[%\s\x00-\x1f\x7f-\x9f]")


class QueueKey(NamedTuple):
    """Key of the state of one group in one queue. `topic` has the messages and may be a retry topic."""

    group: str
    topic: str
    queue_id: int


POP_LOG_KEY = QueueKey(POP_LOG_GROUP, POP_LOG_TOPIC, 0)
"""Key of the offset from which the pop log is replayed."""


def retry_topic(group: str) -> str:
    """Return the topic in which a group's failed messages wait for redelivery, in the queue model."""
    return RETRY_PREFIX + group


def dlq_topic(group: str) -> str:
    """Return the topic of a group's dead letters."""
    return DLQ_PREFIX + group


def pop_retry_topic(group: str, topic: str, version: int = 2) -> str:
    """Return the topic for copies of popped messages that were not acknowledged.

    Version 1 is ambiguous: group `a`, topic `b_c` and group `a_b`, topic `c` share one. Version 2 has a `+`, which
    users' names cannot have.

    >>> pop_retry_topic("billing", "orders")
    '%RETRY%billing+orders'
    """
    return f"{RETRY_PREFIX}{group}{'+' if version == 2 else '_'}{topic}"


def retry_topics(group: str, topic: str) -> set[str]:
    """Return the topics in which failed messages of `topic` may wait for a group, in whatever mode it consumed.

    >>> sorted(retry_topics("billing", "orders"))
    ['%RETRY%billing', '%RETRY%billing+orders', '%RETRY%billing_orders']
    """
    return {retry_topic(group), *(pop_retry_topic(group, topic, version) for version in (1, 2))}


def popped_topic(group: str, topic: str) -> str:
    """Return the original topic of `topic`, if that is a retry topic of a popping `group`.

    Otherwise returns `topic`.

    >>> popped_topic("billing", "%RETRY%billing+orders"), popped_topic("billing", "%RETRY%billing")
    ('orders', '%RETRY%billing')
    """
    for between in "+_":
        prefix = f"{RETRY_PREFIX}{group}{between}"
        if topic.startswith(prefix):
            return topic[len(prefix) :]
    return topic


def is_retry_topic(topic: str) -> bool:
    return topic.startswith(RETRY_PREFIX)


def is_dlq_topic(topic: str) -> bool:
    return topic.startswith(DLQ_PREFIX)


def is_system_topic(topic: str) -> bool:
    """Return True for a system topic, to which only the engine writes. Retry and dead-letter topics are none."""
    return topic in _SYSTEM_TOPICS or topic.startswith(SYSTEM_PREFIX)


def is_system_group(group: str) -> bool:
    """Return True for a system group, which is not a group of consumers."""
    return group.startswith(_SYSTEM_GROUP_PREFIX)


def check_user_topic(topic: object) -> str:
    """Return `topic` if a user may create it or send to it.
    Raises InvalidMessageError for an invalid name, NotPermittedError for a system topic."""
    if not isinstance(topic, str):
        raise InvalidMessageError(f"topic must be a str, not {type(topic).__name__}", "topic")
    if not _USER_NAME.fullmatch(topic) or len(topic) > MAX_TOPIC:
        raise InvalidMessageError(
            f"topic {topic[:150]!r} must be 1 to {MAX_TOPIC} letters, digits, '_' and '-', and may have a namespace "
            "before a '%'",
            "topic",
        )
    if is_system_topic(topic):
        raise NotPermittedError(f"topic {topic!r} is a system topic; choose another name")
    return topic


def check_group(group: object) -> str:
    """Return `group` if it is a valid name. Raises ConfigError with the rule that it breaks."""
    if not isinstance(group, str):
        raise ConfigError(f"group must be a str, not {type(group).__name__}")
    if not _USER_NAME.fullmatch(group) or len(group) > MAX_GROUP:
        raise ConfigError(
            f"group {group[:150]!r} must be 1 to {MAX_GROUP} letters, digits, '_' and '-', and may have a "
            "namespace before a '%'"
        )
    if group == _NO_GROUP:
        raise ConfigError(f"group {group!r} means no group in RocketMQ; choose another name")
    return group


def unique_word(name: object) -> str:
    """Return the key of a message that has an item's unique `name`. A key has no spaces, so some letters are escaped.
    Raises InvalidMessageError for a name that is not a str, or blank.

    >>> unique_word("report-7"), unique_word("report 7")
    ('unique:report-7', 'unique:report%20;7')
    """
    if not isinstance(name, str) or not name.strip():
        raise InvalidMessageError(f"unique must be a str, and not blank, not {name!r:.80}", "unique")
    return _UNIQUE + _NOT_IN_KEYS.sub(lambda found: f"%{ord(found[0]):x};", name)


def queue_topic(name: object) -> str:
    """Return the name of the topic, and group, of the queue `name` (format#queue-names).

    A name that a topic can have is kept. In any other name each byte of UTF-8 becomes `|` and two hexadecimal digits,
    except letters of ASCII, digits, `_` and `-`. RocketMQ allows `|` in names, and applications here cannot use it
    otherwise. So two queues never have the same topic. Raises ConfigError with the rule that the name breaks.

    >>> queue_topic("jobs"), queue_topic("ns%jobs"), queue_topic("mail to.do"), queue_topic("100%")
    ('jobs', 'ns%jobs', 'mail|20to|2edo', '100|25')
    """
    if not isinstance(name, str):
        raise ConfigError(f"the name of a queue is a str, not {name!r:.80}")
    if not name or _INVISIBLE.search(name):
        raise ConfigError(f"the name of a queue has one character or more, and no control characters, not {name!r:.80}")
    if name.startswith((RETRY_PREFIX, DLQ_PREFIX)):
        raise ConfigError(f"{name!r:.80} is a topic of the engine; a queue has its dead letters as `dead_letters`")
    topic = name if _PLAIN_NAME.fullmatch(name) else "".join(map(_ESCAPED.__getitem__, name.encode()))
    if len(topic) > MAX_GROUP:
        raise ConfigError(
            f"the name of a queue has at most {MAX_GROUP} characters, where a dot or space counts as 3 and another "
            f"letter as 6 to 12; {name[:40]!r}... has {len(topic)}"
        )
    return topic


def queue_name(topic: str) -> str:
    """Return the name of the queue whose topic this is, as its owner typed it.

    >>> queue_name("mail|20to|2edo"), queue_name("a|b")  # RocketMQ's, and no queue here
    ('mail to.do', 'a|b')
    """
    try:
        name = _ESCAPE.sub(lambda escape: bytes.fromhex(escape[1].decode()), topic.encode()).decode()
        return name if queue_topic(name) == topic else topic
    except ValueError:
        return topic
