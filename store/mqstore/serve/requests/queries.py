"""Reads of the store for administration: messages, offsets, statistics (remoting-server, section 11)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mqstore.broker.admin.statistics import Rate
from mqstore.broker.tables.names import QueueKey
from mqstore.errors import ResultCode
from mqstore.options import seconds
from mqstore.remoting.codes import QUERY_NOT_FOUND, Code
from mqstore.remoting.frames import VERSION
from mqstore.remoting.shapes import dumps_tables, queue_key
from mqstore.serve.requests.admin import NO_VERSION, AdminError, answer_in_thread, at_once, in_thread

if TYPE_CHECKING:
    from mqstore.broker.admin.statistics import StatisticsSnapshot
    from mqstore.serve.connection import Call
    from mqstore.serve.server import Handler, Server

_FOUND_MAX: Final = 64
"""Messages of an answer, as RocketMQ's `maxMsgsNumBatch`."""
_BYTES_MAX: Final = 4 << 20
_UNITS_MAX: Final = 1_024
_NO_RATE: Final = Rate(0, 0, 0)

# -- messages -------------------------------------------------------------------------------------------------------


def _query(server: Server, call: Call) -> None:
    values = call.values
    unique = values["_UNIQUE_KEY_QUERY"]
    work = partial(
        server.broker.store.find,
        values["topic"],
        **{"unique_key" if unique else "key": values["key"]},
        start_ms=values["beginTimestamp"],
        stop_ms=values["endTimestamp"],
        limit=max(1, min(32 if unique else values["maxNum"], _FOUND_MAX)),
    )

    def records() -> list[tuple[bytes, int, int]]:
        found: list[tuple[bytes, int, int]] = []
        size = 0
        for message in work():
            record = message._whole()._record_bytes()
            size += len(record)
            if found and size > _BYTES_MAX:
                break
            found.append((record, message.store_timestamp_ms, message.physical_offset))
        return found[::-1]  # the newest ones, in the order of the log

    def answer(found: list[tuple[bytes, int, int]]) -> None:
        if not found:
            raise AdminError(QUERY_NOT_FOUND, f"no message of {values['topic']!r} has this key, or in this time")
        _, time_ms, offset = found[-1]
        fields = {"indexLastUpdateTimestamp": time_ms, "indexLastUpdatePhyoffset": offset}
        call.reply(fields=fields, body=b"".join(record for record, _, _ in found))

    server.do_in_thread(call, records, answer, long=True)


def _view(server: Server, call: Call) -> bytes:
    store, offset = server.broker.store, call.values["offset"]
    try:
        message = store.at(offset)
        if offset >= store.deleted_at(message.topic):
            return message._whole()._record_bytes()
    except LookupError:
        pass
    raise AdminError(ResultCode.SYSTEM_ERROR, f"there is no message at offset {offset}")


def _units(server: Server, call: Call) -> Any:
    values = call.values
    topic, queue_id, group = values["topic"], values["queueId"], values["consumerGroup"]
    count = max(0, min(values["count"], _UNITS_MAX))
    first, end = server.broker.min_offset(topic, queue_id), server.broker.max_offset(topic, queue_id)
    units = server.broker.store.units(topic, queue_id, max(0, values["index"]), count).tolist()
    shown = [
        {"eval": False, "physicOffset": offset, "physicSize": size, "tagsCode": code} for offset, size, code in units
    ]
    online = {"filterData": f"{group}@{topic} is not online!"} if group else {}
    return {"maxQueueIndex": end, "minQueueIndex": first, "queueData": shown, **online}


# -- offsets --------------------------------------------------------------------------------------------------------


def _stored_ms(server: Server, topic: str, queue_id: int, offset: int) -> int:
    """Return the store time of a message, or 0 if it is not there."""
    found = [] if offset < 0 else server.broker.store.get(topic, queue_id, offset, 1, tell=False).messages
    return found[0].store_timestamp_ms if found and found[0].offset == offset else 0


def _topic_stats(server: Server, call: Call) -> bytes:
    topic, table = call.values["topic"], {}
    config = server.broker.topics.require(topic)
    for queue_id in range(max(config.read_queues, config.write_queues)):
        first, end = server.broker.offsets.bounds(topic, queue_id)
        table[queue_key(server.broker_name, topic, queue_id)] = {
            "lastUpdateTimestamp": _stored_ms(server, topic, queue_id, end - 1),
            "maxOffset": end,
            "minOffset": first,
        }
    rate = _statistics(server).minute.get(("TOPIC_PUT_NUMS", topic), _NO_RATE)
    return dumps_tables({"offsetTable": table, "topicPutTps": rate.tps})


Subscribed = Callable[[str, str], bool]
"""(group, topic) -> False if the group has consumers, but none of this topic."""


def _subscribed(server: Server, groups: list[str]) -> Subscribed:
    """Return the subscriptions of these groups now, for a worker thread."""
    registry = server.registry
    topics = {
        group: {topic for consumer in registry.consumers(group).values() for topic in consumer.subscriptions}
        for group in groups
        if registry.consumers(group)
    }
    return lambda group, topic: group not in topics or topic in topics[group]


def _consume_stats(server: Server, call: Call) -> None:
    values = call.values
    group = values["consumerGroup"]
    named = list(filter(None, (values["topicList"] or "").split(";")))
    subscribed = _subscribed(server, [group])

    def stats() -> bytes:
        committed = {topic for topic, _ in server.broker.offsets.of_group(group)}
        asked = [values["topic"]] if values["topic"] else sorted(committed)
        topics = named or [topic for topic in asked if subscribed(group, topic)]
        return dumps_tables(_stats_of(server, group, topics, _statistics(server)))

    answer_in_thread(server, call, stats)


def _stats_of(server: Server, group: str, topics: list[str], statistics: StatisticsSnapshot) -> dict[str, Any]:
    """Return the shape of the offsets of a group in topics. A topic that does not exist is left out."""
    table, tps, broker = {}, 0.0, server.broker
    for topic in topics:
        if (config := broker.topics.get(topic)) is None:
            continue
        for queue_id in range(config.read_queues):
            key = QueueKey(group, topic, queue_id)
            offset = broker.offsets.committed(key) or 0
            table[queue_key(server.broker_name, topic, queue_id)] = {
                "brokerOffset": broker.offsets.bounds(topic, queue_id)[1],
                "consumerOffset": offset,
                "lastTimestamp": _stored_ms(server, topic, queue_id, offset - 1),
                "pullOffset": max(offset, broker.offsets.query_pull(key) or 0),
            }
        tps += statistics.minute.get(("GROUP_GET_NUMS", f"{topic}@{group}"), _NO_RATE).tps
    return {"consumeTps": tps, "offsetTable": table}


def _broker_consume_stats(server: Server, call: Call) -> None:
    subscribed, address = _subscribed(server, server.registry.groups()), server.address_for(call.connection)

    def stats() -> bytes:
        broker, statistics, groups = server.broker, _statistics(server), []
        for group in sorted({*broker.groups.names(), *broker.offsets.groups()}):
            topics = sorted({topic for topic, _ in broker.offsets.of_group(group) if subscribed(group, topic)})
            if call.values["isOrder"]:
                topics = [topic for topic in topics if (config := broker.topics.get(topic)) and config.order]
            groups.append({group: [_stats_of(server, group, [topic], statistics) for topic in topics]})
        tables = [one["offsetTable"] for group in groups for each in group.values() for one in each]
        rows = [row for table in tables for row in table.values()]
        return dumps_tables(
            {
                "brokerAddr": address,
                "consumeStatsList": groups,
                "totalDiff": sum(row["brokerOffset"] - row["consumerOffset"] for row in rows),
                "totalInflightDiff": sum(row["pullOffset"] - row["consumerOffset"] for row in rows),
            }
        )

    answer_in_thread(server, call, stats)


def _all_offsets(server: Server, call: Call) -> Any:
    table = {f"{topic}@{group}": queues for group, topic, queues in server.broker.offsets.of_all()}
    return {"dataVersion": NO_VERSION, "offsetTable": table}


def _delay_offsets(server: Server, call: Call) -> Any:
    levels = server.broker.stats().delay_levels
    return {"dataVersion": NO_VERSION, "offsetTable": {level: at for level, (at, _) in levels.items()}}


# -- statistics -----------------------------------------------------------------------------------------------------


def _statistics(server: Server) -> StatisticsSnapshot:
    return server.broker._statistics.snapshot()


def _counter(server: Server, call: Call) -> Any:
    name, key = call.values["statsName"], call.values["statsKey"]
    statistics = _statistics(server)
    if (name, key) not in statistics.totals:
        raise AdminError(ResultCode.SYSTEM_ERROR, f"nothing is counted as {name} of {key!r}")
    windows = {"Minute": statistics.minute, "Hour": statistics.hour, "Day": statistics.day}
    rates = {window: table.get((name, key), _NO_RATE) for window, table in windows.items()}
    return {
        f"stats{window}": {"avgpt": rate.average, "sum": rate.value, "tps": rate.tps} for window, rate in rates.items()
    }


def _runtime(server: Server, call: Call) -> Any:
    """Return what `mqadmin` prints of a broker. A number that RocketMQ has and this server has not is 0."""
    stats, now_ms = server.broker.stats(), server.broker.clock.now_ms()
    store, counters = stats.store, stats.counters
    tps = {name: counters.minute.get((f"BROKER_{name}_NUMS", ""), _NO_RATE).tps for name in ("PUT", "GET")}
    up = timedelta(milliseconds=max(0, now_ms - store.opened_ms))
    minutes, up_s = divmod(up.seconds, 60)
    try:
        earliest_ms = server.broker.store.at(store.min_offset).store_timestamp_ms
    except LookupError:
        earliest_ms = now_ms
    pools = ("send", "pull", "ack")
    table: dict[str, object] = {
        "bootTimestamp": store.opened_ms,
        "brokerActive": "true",
        "brokerVersion": VERSION,
        "brokerVersionDesc": "V5_3_3",
        "commitLogDiskRatio": f"{store.disk_ratio:.2f}",
        "commitLogMaxOffset": store.max_offset,
        "commitLogMinOffset": store.min_offset,
        "dispatchBehindBytes": store.dispatch_lag_bytes,
        "earliestMessageTimeStamp": earliest_ms,
        **dict.fromkeys(("getTransferredTps", "getTransferedTps"), f"{tps['GET']:.2f}"),  # the other one in 4.9
        # Counted since the store was opened, since nothing is kept of the day before.
        **{f"msg{name}Total{day}": 0 for name in ("Put", "Get") for day in ("YesterdayMorning", "TodayMorning")},
        "msgPutTotalTodayNow": counters.total("BROKER_PUT_NUMS"),
        "msgGetTotalTodayNow": counters.total("BROKER_GET_NUMS"),
        "pageCacheLockTimeMills": 0,
        "putMessageEntireTimeMax": store.put_longest_ns // 1_000_000,
        "putMessageFailedTimes": store.failed_puts,
        "putMessageTimesTotal": store.puts,
        "putTps": f"{tps['PUT']:.2f}",
        "remainHowManyDataToFlush": f"{store.flush_lag_bytes} B",
        "runtime": f"[ {up.days} days, {minutes // 60} hours, {minutes % 60} minutes, {up_s} seconds ]",
        **{f"{pool}ThreadPoolQueueSize": 0 for pool in pools},
        **{f"{pool}ThreadPoolQueueHeadWaitTimeMills": 0 for pool in pools},
        "timerCongestNum": stats.timer_waiting,
        **dict.fromkeys(("timerReadBehind", "timerOffsetBehind", "timerEnqueueTps", "timerDequeueTps"), 0),
    }
    return {"table": {name: str(value) for name, value in table.items()}}


def _options(server: Server, call: Call) -> bytes:
    """Return the options by RocketMQ's names, for clients and dashboards."""
    store = server.broker.store
    host, _, port = server.address_for(call.connection).rpartition(":")
    options: dict[str, object] = {
        "autoCreateSubscriptionGroup": store.config.auto_create_groups,
        "autoCreateTopicEnable": store.config.auto_create_topics,
        "brokerClusterName": server.cluster,
        "brokerIP1": host,
        "brokerId": 0,
        "brokerName": server.broker_name,
        "brokerPermission": 6,
        "brokerRole": "ASYNC_MASTER",
        "defaultTopicQueueNums": store.config.default_queues,
        "flushDiskType": "SYNC_FLUSH" if store.durability == "flush" else "ASYNC_FLUSH",
        "listenPort": port,
        "mappedFileSizeCommitLog": store.manifest.commitlog_segment_bytes,
        "maxMessageSize": store.manifest.max_message_size,
        "messageDelayLevel": store.manifest.delay_levels,
        "recallMessageEnable": True,
        "timerMaxDelaySec": round(seconds(server.broker.limits.max_delay, "max_delay")),
        "timerWheelEnable": True,
    }
    shown = {name: str(value).lower() if isinstance(value, bool) else value for name, value in options.items()}
    return "".join(f"{name}={value}\n" for name, value in shown.items()).encode()


def _config(server: Server, call: Call) -> None:
    call.reply(fields={"version": '{"counter":0,"stateVersion":0,"timestamp":0}'}, body=_options(server, call))


HANDLERS: Mapping[Code, Handler] = {
    Code.QUERY_MESSAGE: _query,
    Code.VIEW_MESSAGE_BY_ID: in_thread(_view),
    Code.QUERY_CONSUME_QUEUE: in_thread(_units),
    Code.GET_TOPIC_STATS_INFO: in_thread(_topic_stats),
    Code.GET_CONSUME_STATS: _consume_stats,
    Code.GET_BROKER_CONSUME_STATS: _broker_consume_stats,
    Code.GET_ALL_CONSUMER_OFFSET: in_thread(_all_offsets),
    Code.GET_ALL_DELAY_OFFSET: in_thread(_delay_offsets),
    Code.VIEW_BROKER_STATS_DATA: in_thread(_counter),
    Code.GET_BROKER_RUNTIME_INFO: in_thread(_runtime),
    Code.GET_BROKER_CONFIG: _config,
    Code.GET_NAMESRV_CONFIG: at_once(_options),
}
