"""Routes of a cluster, without one: bodies, numbers of queues, their division."""

from __future__ import annotations

from inspect import getsource, isfunction, signature
from typing import Any

import pytest

from mqstore.client.group.allocation import avg
from mqstore.contract import BrokerContract, SendOptions
from mqstore.errors import FormatError
from mqstore.log.commitlog import QueueRef
from mqstore.remote.cluster import pops
from mqstore.remote.cluster.broker import ClusterBroker
from mqstore.remote.cluster.routes import RoutedTopic, fastjson, routed, spread

READ, WRITE = 4, 2


def route(**brokers: tuple[int, int]) -> dict[str, Any]:
    """Return the route of a topic: queues and permissions by broker."""
    return {
        "brokerDatas": [{"brokerName": name, "brokerAddrs": {"0": f"{name}:1"}} for name in brokers],
        "queueDatas": [
            {"brokerName": name, "perm": perm, "readQueueNums": queues, "writeQueueNums": queues}
            for name, (queues, perm) in brokers.items()
        ],
    }


def queues(topic: RoutedTopic, ids: list[int]) -> list[tuple[str, int]]:
    return [topic.places[i][:2] for i in ids]


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b'{"a":{0:"x",12:"y"}}', {"a": {"0": "x", "12": "y"}}),  # name server, unquoted
        (b'{"a":{"0":"x"}}', {"a": {"0": "x"}}),  # name server, quoted
        (b'{"t":{{"queueId":1,"topic":"o"}:{"n":2}}}', {"t": {'{"queueId":1,"topic":"o"}': {"n": 2}}}),
        (b'{"t":{{"queueId":1}:2,{"queueId":2}:3}}', {"t": {'{"queueId":1}': 2, '{"queueId":2}': 3}}),
        (b'{"a":"{1:2}","b":"\\"{3:4}"}', {"a": "{1:2}", "b": '"{3:4}'}),  # texts stay as they are
        (b'{"a":[1,{2:3}],"b":{}}', {"a": [1, {"2": 3}], "b": {}}),
    ],
)  # fmt: skip
def test_bodies_of_fastjson_are_read(body: bytes, value: dict[str, Any]) -> None:
    assert fastjson(body) == value


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"a":{{1}}', b"\xff\xfe"])
def test_other_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(FormatError):
        fastjson(body)


def test_queues_are_numbered_by_broker_and_id() -> None:
    topic = routed("t", route(b=(2, READ | WRITE), a=(2, READ | WRITE)))

    assert [place[:2] for place in topic.places] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert (topic.read_queues, topic.write_queues, topic.perm) == (4, 4, READ | WRITE)


def test_numbers_stay_when_brokers_come_and_go() -> None:
    first = routed("t", route(b=(1, READ | WRITE), c=(1, READ | WRITE)))
    more = routed("t", route(a=(1, READ | WRITE), b=(1, READ | WRITE), c=(2, READ | WRITE)), first)
    less = routed("t", route(a=(1, READ | WRITE)), more)

    assert [place[:2] for place in more.places] == [("b", 0), ("c", 0), ("a", 0), ("c", 1)]
    assert queues(more, more.queue_ids) == [("a", 0), ("b", 0), ("c", 0), ("c", 1)]
    assert (less.queue_ids, less.writable_ids, len(less.places)) == ([2], [2], 4)


def test_permissions_of_a_broker_decide_about_its_queues() -> None:
    topic = routed("t", route(a=(1, READ), b=(1, WRITE), c=(1, 0)))

    assert (topic.queue_ids, topic.writable_ids, topic.brokers) == ([0], [1], ["a"])
    assert (topic.readable, topic.writable) == (True, True)


def test_broker_without_a_master_has_no_queues() -> None:
    found = route(a=(2, READ | WRITE), b=(2, READ | WRITE))
    found["brokerDatas"][1]["brokerAddrs"] = {"1": "slave:1"}

    assert routed("t", found).brokers == ["a"]


def test_members_divide_queues_like_java() -> None:
    topic = routed("t", route(b=(2, READ | WRITE), a=(3, READ | WRITE)))
    refs = [QueueRef("t", i) for i in topic.queue_ids]

    shares = [queues(topic, [ref.queue_id for ref in avg(member, refs, ["m1", "m2"])]) for member in ("m1", "m2")]

    # AllocateMessageQueueAveragely over queues sorted by topic, broker name and id
    assert shares == [[("a", 0), ("a", 1), ("a", 2)], [("b", 0), ("b", 1)]]


@pytest.mark.parametrize(("number", "brokers", "each"), [(1, 2, [1, 0]), (4, 2, [2, 2]), (5, 3, [2, 2, 1])])
def test_queues_of_a_new_topic_are_spread(number: int, brokers: int, each: list[int]) -> None:
    assert spread(number, brokers) == each


IGNORED = {"durability", "owner", "local"}
"""Options that the brokers decide themselves."""


@pytest.mark.parametrize(
    "call", [name for name, each in vars(BrokerContract).items() if isfunction(each) and name[0] != "_"]
)
def test_every_option_of_the_contract_is_known(call: str) -> None:
    """Methods take options by `**`, so a new one of the contract would be ignored without a word."""
    method = getattr(ClusterBroker, call)
    known = getsource(method) + str(SendOptions.__annotations__) + str(pops._POP_OPTIONS)
    options = [
        each.name
        for each in signature(getattr(BrokerContract, call)).parameters.values()
        if each.kind == each.KEYWORD_ONLY
    ]

    assert [name for name in options if name not in known and name not in IGNORED] == []
