"""Requests of RocketMQ's clients: codes, fields and types (remoting-server, section 4).

A field is written `name`, `name!` if it is required, and with a type unless it is a text: `queueId!:i32`. A value after
`=` is the default. Fields that are not listed are ignored: Java clients add some to every request.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Final, NamedTuple

from mqstore.errors import ConfigError

NOT_SUPPORTED, QUERY_NOT_FOUND, CONSUMER_NOT_ONLINE = 3, 22, 206
POLLING_FULL, POLLING_NOT_FOUND, GO_AWAY = 209, 210, 1500
"""Codes of answers that no error of the library has. All others are in `ResultCode`."""
DEFAULT_TOPIC: Final = "TBW102"
"""Topic that a producer names as the model of topics that do not exist."""
MASTER: Final = "0"
"""Id of the broker that takes messages, in the addresses of a broker name. The others are its copies."""


class _Field(NamedTuple):
    name: str
    """Name in the header."""
    shown: str
    """Name in `SEND_MESSAGE`, for a send with short names."""
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


def _fields(texts: str) -> tuple[_Field, ...]:
    fields = []
    for each in texts.split():
        text, _, default = each.partition("=")
        name, _, kind = text.partition(":")
        kind = kind or "text"
        value = _value(default, kind, name) if default else False if kind == "bool" else None
        fields.append(_Field(name.rstrip("!"), name.rstrip("!"), name.endswith("!"), kind, value))
    return tuple(fields)


_SEND: Final = _fields(
    "producerGroup! topic! defaultTopic! defaultTopicQueueNums!:i32 queueId!:i32 sysFlag!:i32 bornTimestamp!:i64 "
    "flag!:i32 properties reconsumeTimes:i32=0 unitMode:bool batch:bool maxReconsumeTimes:i32"
)
_SEND_V2: Final = tuple(each._replace(name=letter) for letter, each in zip("abcdefghijkml", _SEND, strict=True))
_QUEUE: Final = "topic! queueId!:i32"
_GROUP_QUEUE: Final = "consumerGroup! topic! queueId!:i32"
_RECEIPT: Final = f"{_GROUP_QUEUE} extraInfo! offset!:i64"
_PULL: Final = (
    f"{_GROUP_QUEUE} queueOffset!:i64 maxMsgNums!:i32 sysFlag!:i32 commitOffset!:i64 "
    "suspendTimeoutMillis!:i64 subVersion!:i64 subscription expressionType maxMsgBytes:i32=-1"
)
_POP: Final = (
    f"{_GROUP_QUEUE} maxMsgNums!:i32 invisibleTime!:i64 pollTime!:i64 bornTime!:i64 initMode!:i32 "
    "expType exp order:bool attemptId"
)
_SEND_BACK: Final = "offset!:i64 group! delayLevel!:i32 originMsgId originTopic unitMode:bool maxReconsumeTimes:i32=-1"
_END: Final = (
    "producerGroup! tranStateTableOffset!:i64 commitLogOffset!:i64 commitOrRollback!:i32 "
    "fromTransactionCheck:bool msgId! transactionId topic"
)
_TOPIC: Final = "topic! readQueueNums!:i32 writeQueueNums!:i32 perm!:i32 order:bool attributes force:bool"


class Code(IntEnum):
    """Codes of requests, as in RocketMQ's `RequestCode`, with their fields."""

    fields: tuple[_Field, ...]

    def __new__(cls, number: int, fields: str | tuple[_Field, ...] = "") -> Code:
        code = int.__new__(cls, number)
        code._value_ = number
        code.fields = _fields(fields) if isinstance(fields, str) else fields
        return code

    SEND_MESSAGE = 10, _SEND
    PULL_MESSAGE = 11, _PULL
    QUERY_MESSAGE = 12, "topic! key! maxNum!:i32 beginTimestamp!:i64 endTimestamp!:i64 _UNIQUE_KEY_QUERY:bool"
    QUERY_CONSUMER_OFFSET = 14, "consumerGroup! topic! queueId!:i32 setZeroIfNotFound:bool=true"
    UPDATE_CONSUMER_OFFSET = 15, "consumerGroup! topic! queueId!:i32 commitOffset!:i64"
    UPDATE_AND_CREATE_TOPIC = 17, _TOPIC
    UPDATE_AND_CREATE_TOPIC_LIST = 18
    GET_ALL_TOPIC_CONFIG = 21
    UPDATE_BROKER_CONFIG = 25
    GET_BROKER_CONFIG = 26
    GET_BROKER_RUNTIME_INFO = 28
    SEARCH_OFFSET_BY_TIMESTAMP = 29, "topic! queueId!:i32 timestamp!:i64 boundaryType=LOWER"
    GET_MAX_OFFSET = 30, _QUEUE
    GET_MIN_OFFSET = 31, _QUEUE
    GET_EARLIEST_MSG_STORETIME = 32, _QUEUE
    VIEW_MESSAGE_BY_ID = 33, "offset!:i64"
    HEART_BEAT = 34
    UNREGISTER_CLIENT = 35, "clientID! producerGroup consumerGroup"
    CONSUMER_SEND_MSG_BACK = 36, _SEND_BACK
    END_TRANSACTION = 37, _END
    GET_CONSUMER_LIST_BY_GROUP = 38, "consumerGroup!"
    CHECK_TRANSACTION_STATE = 39
    NOTIFY_CONSUMER_IDS_CHANGED = 40
    LOCK_BATCH_MQ = 41
    UNLOCK_BATCH_MQ = 42
    GET_ALL_CONSUMER_OFFSET = 43
    GET_ALL_DELAY_OFFSET = 45
    CHECK_CLIENT_CONFIG = 46
    GET_KV_CONFIG = 101
    DELETE_KV_CONFIG = 102
    GET_ROUTEINFO_BY_TOPIC = 105, "topic!"
    GET_BROKER_CLUSTER_INFO = 106
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP = 200
    GET_ALL_SUBSCRIPTIONGROUP_CONFIG = 201
    GET_TOPIC_STATS_INFO = 202, "topic!"
    GET_CONSUMER_CONNECTION_LIST = 203, "consumerGroup!"
    GET_PRODUCER_CONNECTION_LIST = 204, "producerGroup!"
    GET_ALL_TOPIC_LIST_FROM_NAMESERVER = 206
    DELETE_SUBSCRIPTIONGROUP = 207, "groupName!"
    GET_CONSUME_STATS = 208, "consumerGroup! topic topicList"
    DELETE_TOPIC_IN_BROKER = 215, "topic!"
    DELETE_TOPIC_IN_NAMESRV = 216
    RESET_CONSUMER_CLIENT_OFFSET = 220
    INVOKE_BROKER_TO_RESET_OFFSET = 222, "group! topic! timestamp!:i64 queueId:i32=-1 offset:i64"
    GET_TOPICS_BY_CLUSTER = 224, "cluster!"
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST = 225
    QUERY_TOPIC_CONSUME_BY_WHO = 300, "topic!"
    GET_SYSTEM_TOPIC_LIST_FROM_NS = 304
    GET_SYSTEM_TOPIC_LIST_FROM_BROKER = 305
    GET_CONSUMER_RUNNING_INFO = 307, "consumerGroup! clientId!"
    CONSUME_MESSAGE_DIRECTLY = 309, "consumerGroup! clientId! msgId!"
    SEND_MESSAGE_V2 = 310, _SEND_V2
    VIEW_BROKER_STATS_DATA = 315, "statsName! statsKey!"
    GET_BROKER_CONSUME_STATS = 317, "isOrder:bool"
    UPDATE_NAMESRV_CONFIG = 318
    GET_NAMESRV_CONFIG = 319
    SEND_BATCH_MESSAGE = 320, _SEND_V2
    QUERY_CONSUME_QUEUE = 321, "topic! queueId!:i32 index!:i64 count!:i32 consumerGroup"
    SEND_REPLY_MESSAGE = 324, _SEND
    SEND_REPLY_MESSAGE_V2 = 325, _SEND_V2
    PUSH_REPLY_MESSAGE_TO_CLIENT = 326
    GET_ALL_PRODUCER_INFO = 328
    QUERY_TOPICS_BY_CONSUMER = 343, "group!"
    QUERY_SUBSCRIPTION_BY_CONSUMER = 345, "group! topic!"
    GET_TOPIC_CONFIG = 351, "topic!"
    GET_SUBSCRIPTIONGROUP_CONFIG = 352, "group!"
    LITE_PULL_MESSAGE = 361, _PULL
    RECALL_MESSAGE = 370, "topic! recallHandle! producerGroup"
    QUERY_ASSIGNMENT = 400
    SET_MESSAGE_REQUEST_MODE = 401
    POP_MESSAGE = 200_050, _POP
    ACK_MESSAGE = 200_051, _RECEIPT
    PEEK_MESSAGE = 200_052, f"{_GROUP_QUEUE} maxMsgNums!:i32"
    CHANGE_MESSAGE_INVISIBLETIME = 200_053, f"{_RECEIPT} invisibleTime!:i64"
    NOTIFICATION = 200_054, f"{_GROUP_QUEUE} pollTime!:i64 bornTime!:i64 expType exp order:bool attemptId"
    POLLING_INFO = 200_055, _GROUP_QUEUE
    BATCH_ACK_MESSAGE = 200_151


_REQUESTS: Final[Mapping[int, tuple[_Field, ...]]] = {code: code.fields for code in Code}


def values_of(code: int, fields: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a request by their names in `SEND_MESSAGE`, with their types. A missing one is its default.
    Requests of mqstore's own clients have none: their arguments are in the body (`calls`).
    Raises ConfigError for a required field that is missing, and for a number that is none.

    >>> fields = dict(topic="orders", queueId="3", bname="mqstore")
    >>> list(values_of(Code.GET_MAX_OFFSET, fields).items())
    [('topic', 'orders'), ('queueId', 3)]
    """
    values = {}
    for name, shown, required, kind, default in _REQUESTS.get(code, ()):
        if (text := fields.get(name)) is not None:
            values[shown] = _value(text, kind, shown)
        elif required:
            raise ConfigError(f"the request {Code(code).name} has no field {shown}")
        else:
            values[shown] = default
    return values
