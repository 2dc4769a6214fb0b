"""The name server's part: routes of topics, and the cluster of one broker (remoting-server, section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from mqstore.errors import ResultCode
from mqstore.remoting.codes import DEFAULT_TOPIC, MASTER, Code
from mqstore.remoting.shapes import dumps

if TYPE_CHECKING:
    from mqstore.serve.connection import Call
    from mqstore.serve.server import Handler, Server

TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
"""System topic to which clients that trace their messages send."""
_DEFAULT_QUEUES: Final = 8


def _route(server: Server, call: Call) -> None:
    topic = call.values["topic"]
    if topic == DEFAULT_TOPIC and server.auto_create:
        perm, read_queues, write_queues = 7, _DEFAULT_QUEUES, _DEFAULT_QUEUES
    elif (config := server.broker.topics.get(topic)) is not None:
        perm, read_queues, write_queues = config.perm, config.read_queues, config.write_queues
    else:
        call.reply(ResultCode.TOPIC_NOT_EXIST, remark=f"there is no topic {topic!r}")
        return
    queues = {
        "brokerName": server.broker_name,
        "perm": perm,
        "readQueueNums": read_queues,
        "topicSysFlag": 0,
        "writeQueueNums": write_queues,
    }
    route = {"brokerDatas": [_broker(server, call)], "filterServerTable": {}, "queueDatas": [queues]}
    call.reply(body=dumps(route))


def _cluster(server: Server, call: Call) -> None:
    name = server.broker_name
    table = {"brokerAddrTable": {name: _broker(server, call)}, "clusterAddrTable": {server.cluster: [name]}}
    call.reply(body=dumps(table))


def _broker(server: Server, call: Call) -> dict[str, Any]:
    return {
        "brokerAddrs": {MASTER: server.address_for(call.connection)},
        "brokerName": server.broker_name,
        "cluster": server.cluster,
        "enableActingMaster": False,
    }


HANDLERS: Mapping[Code, Handler] = {Code.GET_ROUTEINFO_BY_TOPIC: _route, Code.GET_BROKER_CLUSTER_INFO: _cluster}
