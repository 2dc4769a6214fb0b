"""Administration: topics, groups, clients (remoting-server, section 11). `queries` has what only reads the store.

The shapes are those that a broker 5.3.3 answered to the same requests. Requests that change the store write files, so
they run in a worker thread. Code 16 refuses to change the configuration, or what clients use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mqstore.broker.tables.groups import GroupConfig
from mqstore.broker.tables.names import is_system_topic
from mqstore.errors import ConfigError, MQStoreError, NotPermittedError, ResultCode
from mqstore.layout.javahash import java_hash
from mqstore.remoting.codes import CONSUMER_NOT_ONLINE, DEFAULT_TOPIC, QUERY_NOT_FOUND, Code
from mqstore.remoting.frames import VERSION, Frame
from mqstore.remoting.shapes import dumps, dumps_tables, loads, queue_key
from mqstore.serve.registry import Subscription

if TYPE_CHECKING:
    from mqstore.broker.broker import Broker
    from mqstore.log.commitlog import QueueRef
    from mqstore.serve.connection import Call
    from mqstore.serve.registry import Client
    from mqstore.serve.server import Handler, Server

Query = Callable[["Server", "Call"], Any]
"""Function that returns the body of the answer to a request: a value, bytes, or None."""
NO_VERSION: Final[Mapping[str, int]] = {"counter": 0, "stateVersion": 0, "timestamp": 0}
"""Version of a table. Only brokers that copy each other's tables compare it."""
_TYPE: Final = "message.type"
_SETTINGS: Final = ("consume_enable", "consume_broadcast_enable", "orderly", "retry_queues", "retry_policy")
"""Settings of a group that a request can change."""


class AdminError(MQStoreError):
    """Answer with a code that no error of the library has."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code  # type: ignore[assignment]


def at_once(query: Query) -> Handler:
    """Return the handler of a request that is answered from memory."""
    return lambda server, call: call.reply(body=_body(query(server, call)))


def in_thread(query: Query) -> Handler:
    """Return the handler of a request that takes long, or waits for the disk. `query` runs in a worker thread: it must
    not use the registry."""
    return lambda server, call: answer_in_thread(server, call, lambda: query(server, call))


def answer_in_thread(server: Server, call: Call, work: Callable[[], Any]) -> None:
    """Answer with the body that `work` returns in a worker thread."""
    server.do_in_thread(call, lambda: _body(work()), lambda body: call.reply(body=body), long=True)


def _body(value: Any) -> bytes:
    return b"" if value is None else value if isinstance(value, bytes) else dumps(value)


def _items(call: Call, name: str) -> Iterable[dict[str, Any]]:
    items = loads(call.frame.body).get(name)
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ConfigError(f"the body of the request has no list {name}")
    return items


# -- topics ---------------------------------------------------------------------------------------------------------


def _put_topic(server: Server, call: Call) -> None:
    values = call.values
    pairs = filter(None, (values["attributes"] or "").split(","))
    attributes = {name: value for name, _, value in (pair.partition("=") for pair in pairs)}
    _set_topic(server.broker, values["topic"], values, attributes, force=values["force"])


def _put_topics(server: Server, call: Call) -> None:
    for entry in _items(call, "topicConfigList"):
        _set_topic(server.broker, str(entry.get("topicName") or ""), entry, entry.get("attributes") or {})


def _set_topic(
    broker: Broker, name: str, values: Mapping[str, Any], attributes: Mapping[str, Any], *, force: bool = False
) -> None:
    """Create or alter a topic. Attributes have names as `+message.type`, to set, or `-message.type`, to remove."""
    if type(attributes) is not dict or {each.lstrip("+-") for each in attributes} - {_TYPE}:
        raise ConfigError(f"a topic has no attribute {attributes!r:.80}; it can have {_TYPE}")
    wanted: dict[str, Any] = {
        "read_queues": values.get("readQueueNums", 8),
        "write_queues": values.get("writeQueueNums", 8),
        "perm": values.get("perm", 6),
        "message_type": "UNSPECIFIED" if f"-{_TYPE}" in attributes else next(map(str, attributes.values()), None),
    }
    if broker.topics.get(name) is None:
        broker.topics.create(name, **wanted)
        wanted = {}
    if wanted or values.get("order"):
        broker.topics.alter(name, order=bool(values.get("order")), force=force, **wanted)


def check_topic_unused(server: Server, topic: str) -> None:
    """Raise NotPermittedError if a connected consumer subscribes to a topic."""
    registry, members = server.registry, server.broker.members
    groups = [group for group in registry.groups() if registry.subscription(group, topic) is not None]
    groups += [group for group in members.groups() if topic in members.subscriptions(group)]
    if groups:
        raise NotPermittedError(f"topic {topic!r} is consumed by {', '.join(groups[:8])}; let their consumers leave")


def _delete_topic(server: Server, call: Call) -> None:
    topic = call.values["topic"]
    check_topic_unused(server, topic)

    def delete() -> None:
        if server.broker.topics.get(topic) is not None or server.broker.offsets.groups_of(topic):
            server.broker.topics.delete(topic, force=True)

    server.do_in_thread(call, delete, lambda _: call.reply())


def _topic_config(server: Server, call: Call) -> Any:
    return _topic_entry(server.broker.topics.require(call.values["topic"]).as_json())


def _topic_configs(server: Server, call: Call) -> Any:
    table = {config.name: _topic_entry(config.as_json()) for config in server.broker.topics.configs()}
    return {"dataVersion": NO_VERSION, "topicConfigTable": table}


def _topic_entry(entry: dict[str, Any]) -> dict[str, Any]:
    return {"topicFilterType": "SINGLE_TAG", "topicSysFlag": 0} | entry


def _topic_list(server: Server, call: Call) -> Any:
    known = call.values.get("cluster", server.cluster) == server.cluster
    return {"topicList": server.broker.topics.names(system=True) if known else []}


def _system_topics(server: Server, call: Call) -> Any:
    names = [server.cluster, server.broker_name]
    if call.frame.code == Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER:
        names += [DEFAULT_TOPIC, *filter(is_system_topic, server.broker.topics.names(system=True))]
    return {"brokerAddr": server.address_for(call.connection), "topicList": names}


def _no_kv(server: Server, call: Call) -> None:
    raise AdminError(QUERY_NOT_FOUND, "there are no settings by key")


# -- groups ---------------------------------------------------------------------------------------------------------


def _put_group(server: Server, call: Call) -> None:
    _set_group(server.broker, loads(call.frame.body))


def _put_groups(server: Server, call: Call) -> None:
    for entry in _items(call, "groupConfigList"):
        _set_group(server.broker, entry)


def _set_group(broker: Broker, entry: Mapping[str, Any]) -> None:
    name: Any = entry.get("groupName")
    try:
        config = GroupConfig.from_json(name, entry)
    except ValueError as error:
        raise ConfigError(f"group {name!r:.150}: {error}") from None
    settings = {setting: getattr(config, setting) for setting in _SETTINGS}
    known = type(name) is str and broker.groups.get(name) is not None
    (broker.groups.alter if known else broker.groups.create)(name, **settings)


def check_group_unused(server: Server, group: str) -> None:
    """Raise NotPermittedError if a group has connected consumers."""
    if members := [*server.registry.consumers(group), *server.broker.members.members(group)]:
        raise NotPermittedError(f"group {group!r} has consumers: {', '.join(members[:8])}; let them leave first")


def _delete_group(server: Server, call: Call) -> None:
    group = call.values["groupName"]
    check_group_unused(server, group)

    def delete() -> None:
        if server.broker.groups.get(group) is not None:
            server.broker.delete_group(group)

    server.do_in_thread(call, delete, lambda _: call.reply())


def _group_config(server: Server, call: Call) -> Any:
    name = call.values["group"]
    if (config := server.broker.groups.get(name)) is None:
        raise AdminError(ResultCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"there is no group {name!r}")
    return config.as_json()


def _group_configs(server: Server, call: Call) -> Any:
    groups = server.broker.groups
    configs = filter(None, map(groups.get, groups.names()))
    table = {config.name: config.as_json() for config in configs}
    return {"dataVersion": NO_VERSION, "forbiddenTable": {}, "subscriptionGroupTable": table}


def _reset(server: Server, call: Call) -> None:
    """Move a group's offsets to a time. Its consumers get the new ones, and begin again there. As in a broker 5.3.3 the
    offsets move forward and back, whatever `isForce` says."""
    values = call.values
    group, topic = values["group"], values["topic"]

    def notify(offsets: dict[QueueRef, int]) -> None:
        call.reply(body=reset_consumers(server, group, topic, offsets, values["timestamp"]))

    server.do_in_thread(call, partial(_reset_offsets, server.broker, values), notify)


def reset_consumers(
    server: Server, group: str, topic: str, offsets: Mapping[QueueRef, int], timestamp_ms: int = 0
) -> bytes:
    """Let the consumers of a group begin again at these offsets. Return the table that they get."""
    table = {queue_key(server.broker_name, *queue): offset for queue, offset in offsets.items()}
    body = dumps_tables({"offsetTable": table})
    fields = {"group": group, "topic": topic, "timestamp": str(timestamp_ms), "isForce": "true"}
    for consumer in server.registry.consumers(group).values():
        server.notify(consumer.connection, Frame(Code.RESET_CONSUMER_CLIENT_OFFSET, fields, body))
    return body


def _reset_offsets(broker: Broker, values: Mapping[str, Any]) -> dict[QueueRef, int]:
    group, topic, time_ms, one = values["group"], values["topic"], values["timestamp"], values["queueId"]
    if one >= 0 and (offset := -1 if values["offset"] is None else values["offset"]) >= 0:
        return broker.reset(group, topic, one, offset)
    start: Any = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=min(max(0, time_ms), 1 << 47))
    start = "latest" if time_ms < 0 else "earliest" if time_ms == 0 else start
    return broker.reset(group, topic, None if one < 0 else one, start)


# -- clients --------------------------------------------------------------------------------------------------------


def _consumers(server: Server, call: Call) -> Any:
    group, members = call.values["consumerGroup"], server.broker.members
    consumers = server.registry.consumers(group)
    own = {"clientAddr": "", "language": "PYTHON", "version": VERSION}
    connections = [_connection(name, server.registry.clients[name]) for name in consumers]
    connections += [own | {"clientId": name} for name in members.members(group) if name not in consumers]
    if not connections:
        raise AdminError(CONSUMER_NOT_ONLINE, f"the group {group!r} has no consumers")
    last, mode = next(reversed([*consumers.values()]), None), members.mode(group)
    broadcasting = mode is not None and mode.broadcasting if last is None else last.broadcasting
    table = {topic: Subscription(topic, text, kind) for topic, (kind, text) in members.subscriptions(group).items()}
    table |= {topic: each for consumer in consumers.values() for topic, each in consumer.subscriptions.items()}
    return {
        "connectionSet": connections,
        "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET" if last is None else last.start,
        "consumeType": "CONSUME_PASSIVELY" if last is None else last.kind,
        "messageModel": "BROADCASTING" if broadcasting else "CLUSTERING",
        "subscriptionTable": {topic: _subscription(each) for topic, each in table.items()},
    }


def _connection(client_id: str, client: Client) -> dict[str, Any]:
    return {
        "clientAddr": client.connection.peer,
        "clientId": client_id,
        "language": client.language,
        "version": client.version,
    }


def _subscription(each: Subscription) -> dict[str, Any]:
    tagged = each.kind == "TAG" and each.expression != "*"
    tags = sorted({tag.strip() for tag in each.expression.split("||")} - {""}) if tagged else []
    return {
        "classFilterMode": False,
        "codeSet": [java_hash(tag) for tag in tags],
        "expressionType": each.kind,
        "subString": each.expression,
        "subVersion": 0,
        "tagsSet": tags,
        "topic": each.topic,
    }


def _producers(server: Server, call: Call) -> Any:
    group, clients = call.values["producerGroup"], server.registry.clients
    found = [_connection(name, client) for name, client in clients.items() if group in client.produces]
    if not found:
        raise AdminError(ResultCode.SYSTEM_ERROR, f"the group {group!r} has no producers")
    return {"connectionSet": found}


def _all_producers(server: Server, call: Call) -> Any:
    data: dict[str, list[dict[str, Any]]] = {}
    now_s, wall_s = server.loop.time(), time.time()
    for name, client in server.registry.clients.items():
        shown = _connection(name, client)
        shown["remoteIP"] = f"/{shown.pop('clientAddr')}"
        shown["lastUpdateTimestamp"] = round((wall_s - now_s + client.seen_s) * 1000)
        for group in client.produces:
            data.setdefault(group, []).append(shown)
    return {"data": data}


def _groups_of_topic(server: Server, call: Call) -> Any:
    topic, registry = call.values["topic"], server.registry
    online = {group for group in registry.groups() if registry.subscription(group, topic) is not None}
    return {"groupList": sorted(online | server.broker.offsets.groups_of(topic))}


def _topics_of_group(server: Server, call: Call) -> Any:
    topics = {topic for topic, _ in server.broker.offsets.of_group(call.values["group"])}
    return {"brokerAddr": server.address_for(call.connection), "topicList": sorted(topics)}


def _subscription_of(server: Server, call: Call) -> Any:
    group, topic = call.values["group"], call.values["topic"]
    found = server.registry.subscription(group, topic)
    data = {} if found is None else {"subscriptionData": _subscription(found)}
    return {"group": group, "topic": topic, **data}


def _consume_directly(server: Server, call: Call) -> None:
    """Let a consumer handle one stored message, and answer with what its handler did."""

    def record() -> bytes:
        try:
            return server.broker.store.get_by_id(call.values["msgId"])._whole()._record_bytes()
        except LookupError as error:
            raise AdminError(ResultCode.SYSTEM_ERROR, str(error)) from None

    server.do_in_thread(call, record, partial(_ask, server, call), long=True)


def _ask(server: Server, call: Call, body: bytes) -> None:
    group, client_id = call.values["consumerGroup"], call.values["clientId"]
    if (consumer := server.registry.consumers(group).get(client_id)) is None:
        raise AdminError(ResultCode.SYSTEM_ERROR, f"the group {group!r} has no consumer {client_id!r}")
    fields = {**call.frame.fields, "brokerName": server.broker_name}
    server.forward(call, consumer.connection, Frame(call.frame.code, fields, body))


def _refuse(server: Server, call: Call) -> None:
    raise NotPermittedError("the options of the server are those of its command line")


HANDLERS: Mapping[Code, Handler] = {
    Code.UPDATE_AND_CREATE_TOPIC: in_thread(_put_topic),
    Code.UPDATE_AND_CREATE_TOPIC_LIST: in_thread(_put_topics),
    Code.DELETE_TOPIC_IN_BROKER: _delete_topic,
    Code.DELETE_TOPIC_IN_NAMESRV: at_once(lambda server, call: None),  # the broker's part has deleted it
    Code.GET_TOPIC_CONFIG: at_once(_topic_config),
    Code.GET_ALL_TOPIC_CONFIG: in_thread(_topic_configs),
    Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: in_thread(_topic_list),
    Code.GET_TOPICS_BY_CLUSTER: in_thread(_topic_list),
    Code.GET_SYSTEM_TOPIC_LIST_FROM_NS: at_once(_system_topics),
    Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: in_thread(_system_topics),
    Code.GET_KV_CONFIG: _no_kv,
    Code.DELETE_KV_CONFIG: at_once(lambda server, call: None),  # there are none
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: in_thread(_put_group),
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: in_thread(_put_groups),
    Code.DELETE_SUBSCRIPTIONGROUP: _delete_group,
    Code.GET_SUBSCRIPTIONGROUP_CONFIG: at_once(_group_config),
    Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: in_thread(_group_configs),
    Code.INVOKE_BROKER_TO_RESET_OFFSET: _reset,
    Code.GET_CONSUMER_CONNECTION_LIST: at_once(_consumers),
    Code.GET_PRODUCER_CONNECTION_LIST: at_once(_producers),
    Code.GET_ALL_PRODUCER_INFO: at_once(_all_producers),
    Code.QUERY_TOPIC_CONSUME_BY_WHO: at_once(_groups_of_topic),
    Code.QUERY_TOPICS_BY_CONSUMER: at_once(_topics_of_group),
    Code.QUERY_SUBSCRIPTION_BY_CONSUMER: at_once(_subscription_of),
    Code.GET_CONSUMER_RUNNING_INFO: lambda server, call: _ask(server, call, call.frame.body),
    Code.CONSUME_MESSAGE_DIRECTLY: _consume_directly,
    Code.UPDATE_BROKER_CONFIG: _refuse,
    Code.UPDATE_NAMESRV_CONFIG: _refuse,
}
