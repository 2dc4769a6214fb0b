"""Requests of RocketMQ's clients: codes, fields and types (remoting-server, section 4).

A field is written `name`, `name!` if it is required, and with a type unless it is a text: `queueId!:i32`. A value after
`=` is the default. Fields that are not listed are ignored: Java clients add some to every request.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Final, NamedTuple

from mqstore.errors import ConfigError


class Code(IntEnum):
    """Codes of requests, as in RocketMQ's `RequestCode`."""

    SEND_MESSAGE = 10
    PULL_MESSAGE = 11
    QUERY_MESSAGE = 12
    QUERY_CONSUMER_OFFSET = 14
    UPDATE_CONSUMER_OFFSET = 15
    UPDATE_AND_CREATE_TOPIC = 17
    UPDATE_AND_CREATE_TOPIC_LIST = 18
    GET_ALL_TOPIC_CONFIG = 21
    UPDATE_BROKER_CONFIG = 25
    GET_BROKER_CONFIG = 26
    GET_BROKER_RUNTIME_INFO = 28
    SEARCH_OFFSET_BY_TIMESTAMP = 29
    GET_MAX_OFFSET = 30
    GET_MIN_OFFSET = 31
    GET_EARLIEST_MSG_STORETIME = 32
    VIEW_MESSAGE_BY_ID = 33
    HEART_BEAT = 34
    UNREGISTER_CLIENT = 35
    CONSUMER_SEND_MSG_BACK = 36
    END_TRANSACTION = 37
    GET_CONSUMER_LIST_BY_GROUP = 38
    CHECK_TRANSACTION_STATE = 39
    NOTIFY_CONSUMER_IDS_CHANGED = 40
    LOCK_BATCH_MQ = 41
    UNLOCK_BATCH_MQ = 42
    GET_ALL_CONSUMER_OFFSET = 43
    GET_ALL_DELAY_OFFSET = 45
    CHECK_CLIENT_CONFIG = 46
    GET_KV_CONFIG = 101
    DELETE_KV_CONFIG = 102
    GET_ROUTEINFO_BY_TOPIC = 105
    GET_BROKER_CLUSTER_INFO = 106
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP = 200
    GET_ALL_SUBSCRIPTIONGROUP_CONFIG = 201
    GET_TOPIC_STATS_INFO = 202
    GET_CONSUMER_CONNECTION_LIST = 203
    GET_PRODUCER_CONNECTION_LIST = 204
    GET_ALL_TOPIC_LIST_FROM_NAMESERVER = 206
    DELETE_SUBSCRIPTIONGROUP = 207
    GET_CONSUME_STATS = 208
    DELETE_TOPIC_IN_BROKER = 215
    DELETE_TOPIC_IN_NAMESRV = 216
    RESET_CONSUMER_CLIENT_OFFSET = 220
    INVOKE_BROKER_TO_RESET_OFFSET = 222
    GET_TOPICS_BY_CLUSTER = 224
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST = 225
    QUERY_TOPIC_CONSUME_BY_WHO = 300
    GET_SYSTEM_TOPIC_LIST_FROM_NS = 304
    GET_SYSTEM_TOPIC_LIST_FROM_BROKER = 305
    GET_CONSUMER_RUNNING_INFO = 307
    CONSUME_MESSAGE_DIRECTLY = 309
    SEND_MESSAGE_V2 = 310
    VIEW_BROKER_STATS_DATA = 315
    GET_BROKER_CONSUME_STATS = 317
    UPDATE_NAMESRV_CONFIG = 318
    GET_NAMESRV_CONFIG = 319
    SEND_BATCH_MESSAGE = 320
    QUERY_CONSUME_QUEUE = 321
    SEND_REPLY_MESSAGE = 324
    SEND_REPLY_MESSAGE_V2 = 325
    PUSH_REPLY_MESSAGE_TO_CLIENT = 326
    GET_ALL_PRODUCER_INFO = 328
    QUERY_TOPICS_BY_CONSUMER = 343
    QUERY_SUBSCRIPTION_BY_CONSUMER = 345
    GET_TOPIC_CONFIG = 351
    GET_SUBSCRIPTIONGROUP_CONFIG = 352
    LITE_PULL_MESSAGE = 361
    RECALL_MESSAGE = 370
    QUERY_ASSIGNMENT = 400
    SET_MESSAGE_REQUEST_MODE = 401
    POP_MESSAGE = 200_050
    ACK_MESSAGE = 200_051
    PEEK_MESSAGE = 200_052
    CHANGE_MESSAGE_INVISIBLETIME = 200_053
    NOTIFICATION = 200_054
    POLLING_INFO = 200_055
    BATCH_ACK_MESSAGE = 200_151


NOT_SUPPORTED, QUERY_NOT_FOUND, CONSUMER_NOT_ONLINE = 3, 22, 206
POLLING_FULL, POLLING_NOT_FOUND, GO_AWAY = 209, 210, 1500
"""Codes of answers that no error of the library has. All others are in `ResultCode`."""


class _Field(NamedTuple):
    name: str
    required: bool
    kind: str
    default: Any


_RANGES: Final = {"i32": 1 << 31, "i64": 1 << 63}


def _value(text: str, kind: str, name: str) -> Any:
    if kind == "text":
        return text
    if kind == "bool":
        return text.strip().lower() == "true"  # as Java's Boolean.parseBoolean
    try:
        value = int(text)
    except ValueError:
        raise ConfigError(f"the field {name} of the request must be a number, not {text[:80]!r}") from None
    if not -_RANGES[kind] <= value < _RANGES[kind]:
        raise ConfigError(f"the field {name} of the request must be an {kind}, not {text[:80]}")
    return value


def _field(text: str) -> _Field:
    text, _, default = text.partition("=")
    name, _, kind = text.partition(":")
    kind = kind or "text"
    value = _value(default, kind, name) if default else False if kind == "bool" else None
    return _Field(name.rstrip("!"), name.endswith("!"), kind, value)


def _fields(text: str) -> tuple[_Field, ...]:
    return tuple(map(_field, text.split()))


_SEND: Final = _fields(
    "producerGroup! topic! defaultTopic! defaultTopicQueueNums!:i32 queueId!:i32 sysFlag!:i32 bornTimestamp!:i64 "
    "flag!:i32 properties reconsumeTimes:i32=0 unitMode:bool batch:bool maxReconsumeTimes:i32"
)
_LETTERS: Final = dict(zip((each.name for each in _SEND), "abcdefghijkml", strict=True))
_PULL: Final = _fields(
    "consumerGroup! topic! queueId!:i32 queueOffset!:i64 maxMsgNums!:i32 sysFlag!:i32 commitOffset!:i64 "
    "suspendTimeoutMillis!:i64 subVersion!:i64 subscription expressionType maxMsgBytes:i32=-1"
)
_SEND_V2: Final = tuple(each._replace(name=_LETTERS[each.name]) for each in _SEND)
_QUEUE: Final = _fields("topic! queueId!:i32")
_GROUP_QUEUE: Final = _fields("consumerGroup! topic! queueId!:i32")
_RECEIPT: Final = _GROUP_QUEUE + _fields("extraInfo! offset!:i64")
_TOPIC: Final = _fields("topic!")
_GROUP: Final = _fields("group!")

REQUESTS: Final[Mapping[int, tuple[_Field, ...]]] = {
    **dict.fromkeys((*Code, *range(31_000, 31_200)), ()),  # mqstore's own have their arguments in the body (`calls`)
    Code.SEND_MESSAGE: _SEND,
    Code.SEND_MESSAGE_V2: _SEND_V2,
    Code.SEND_BATCH_MESSAGE: _SEND_V2,
    Code.SEND_REPLY_MESSAGE: _SEND,
    Code.SEND_REPLY_MESSAGE_V2: _SEND_V2,
    Code.RECALL_MESSAGE: _fields("topic! recallHandle! producerGroup"),
    Code.PULL_MESSAGE: _PULL,
    Code.LITE_PULL_MESSAGE: _PULL,
    Code.QUERY_CONSUMER_OFFSET: _fields("consumerGroup! topic! queueId!:i32 setZeroIfNotFound:bool=true"),
    Code.UPDATE_CONSUMER_OFFSET: _fields("consumerGroup! topic! queueId!:i32 commitOffset!:i64"),
    Code.SEARCH_OFFSET_BY_TIMESTAMP: _fields("topic! queueId!:i32 timestamp!:i64 boundaryType=LOWER"),
    Code.GET_MAX_OFFSET: _QUEUE,
    Code.GET_MIN_OFFSET: _QUEUE,
    Code.GET_EARLIEST_MSG_STORETIME: _QUEUE,
    Code.UNREGISTER_CLIENT: _fields("clientID! producerGroup consumerGroup"),
    Code.CONSUMER_SEND_MSG_BACK: _fields(
        "offset!:i64 group! delayLevel!:i32 originMsgId originTopic unitMode:bool maxReconsumeTimes:i32=-1"
    ),
    Code.END_TRANSACTION: _fields(
        "producerGroup! tranStateTableOffset!:i64 commitLogOffset!:i64 commitOrRollback!:i32 "
        "fromTransactionCheck:bool msgId! transactionId topic"
    ),
    Code.GET_CONSUMER_LIST_BY_GROUP: _fields("consumerGroup!"),
    Code.POP_MESSAGE: _GROUP_QUEUE
    + _fields(
        "maxMsgNums!:i32 invisibleTime!:i64 pollTime!:i64 bornTime!:i64 initMode!:i32 expType exp order:bool attemptId"
    ),
    Code.ACK_MESSAGE: _RECEIPT,
    Code.PEEK_MESSAGE: _GROUP_QUEUE + _fields("maxMsgNums!:i32"),
    Code.CHANGE_MESSAGE_INVISIBLETIME: _RECEIPT + _fields("invisibleTime!:i64"),
    Code.NOTIFICATION: _GROUP_QUEUE + _fields("pollTime!:i64 bornTime!:i64 expType exp order:bool attemptId"),
    Code.POLLING_INFO: _GROUP_QUEUE,
    Code.GET_ROUTEINFO_BY_TOPIC: _fields("topic!"),
    Code.QUERY_MESSAGE: _fields("topic! key! maxNum!:i32 beginTimestamp!:i64 endTimestamp!:i64 _UNIQUE_KEY_QUERY:bool"),
    Code.UPDATE_AND_CREATE_TOPIC: _fields(
        "topic! readQueueNums!:i32 writeQueueNums!:i32 perm!:i32 order:bool attributes force:bool"
    ),
    Code.VIEW_MESSAGE_BY_ID: _fields("offset!:i64"),
    Code.GET_TOPIC_STATS_INFO: _TOPIC,
    Code.GET_CONSUMER_CONNECTION_LIST: _fields("consumerGroup!"),
    Code.GET_PRODUCER_CONNECTION_LIST: _fields("producerGroup!"),
    Code.DELETE_SUBSCRIPTIONGROUP: _fields("groupName!"),
    Code.GET_CONSUME_STATS: _fields("consumerGroup! topic topicList"),
    Code.DELETE_TOPIC_IN_BROKER: _TOPIC,
    Code.INVOKE_BROKER_TO_RESET_OFFSET: _fields("group! topic! timestamp!:i64 queueId:i32=-1 offset:i64"),
    Code.GET_TOPICS_BY_CLUSTER: _fields("cluster!"),
    Code.QUERY_TOPIC_CONSUME_BY_WHO: _TOPIC,
    Code.GET_CONSUMER_RUNNING_INFO: _fields("consumerGroup! clientId!"),
    Code.CONSUME_MESSAGE_DIRECTLY: _fields("consumerGroup! clientId! msgId!"),
    Code.VIEW_BROKER_STATS_DATA: _fields("statsName! statsKey!"),
    Code.GET_BROKER_CONSUME_STATS: _fields("isOrder:bool"),
    Code.QUERY_CONSUME_QUEUE: _fields("topic! queueId!:i32 index!:i64 count!:i32 consumerGroup"),
    Code.QUERY_TOPICS_BY_CONSUMER: _GROUP,
    Code.QUERY_SUBSCRIPTION_BY_CONSUMER: _fields("group! topic!"),
    Code.GET_TOPIC_CONFIG: _TOPIC,
    Code.GET_SUBSCRIPTIONGROUP_CONFIG: _GROUP,
}
"""Fields of each request that the server answers."""
_LONG_NAMES: Final = {letter: name for name, letter in _LETTERS.items()}


def values_of(code: int, fields: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a request by their names in `SEND_MESSAGE`, with their types. A missing one is its default.
    Raises ConfigError for a required field that is missing, and for a number that is none.

    >>> fields = dict(topic="orders", queueId="3", bname="mqstore")
    >>> list(values_of(Code.GET_MAX_OFFSET, fields).items())
    [('topic', 'orders'), ('queueId', 3)]
    """
    short = REQUESTS[code] is _SEND_V2
    values = {}
    for name, required, kind, default in REQUESTS[code]:
        text = fields.get(name)
        shown = _LONG_NAMES[name] if short else name
        if text is not None:
            values[shown] = _value(text, kind, shown)
        elif required:
            raise ConfigError(f"the request {Code(code).name} has no field {shown}")
        else:
            values[shown] = default
    return values
