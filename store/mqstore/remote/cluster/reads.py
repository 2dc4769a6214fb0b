# ruff: noqa: A002  (`filter` is the word of the engine contract, clients#contract)
"""Reads, waits and committed offsets in a cluster (remoting-server, sections 8 and 10).

    read     -> PULL_MESSAGE, answered at once
    wait     -> PULL_MESSAGE that the broker holds for 15 s; its messages are kept for the next read
    commit   -> noted here, sent each 5 s, before a lock is given away, and by `save_offsets`

A broker stores any offset that is committed, so nothing is committed that was not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from typing import Any, Final, Literal, get_args

from mqstore.broker.reads.filters.filter import as_filter
from mqstore.broker.reads.waiting import Callback, Waiter
from mqstore.broker.tables.names import is_retry_topic
from mqstore.clock import Clock
from mqstore.contract import Filter, ReadResult, Start
from mqstore.errors import ConfigError, GroupNotFoundError, MQStoreError, ResultCode, StoreClosedError
from mqstore.log.commitlog import QueueRef
from mqstore.log.reading.reader import GetStatus, to_ms
from mqstore.logger import log as _log
from mqstore.options import Duration, seconds
from mqstore.remote.broker import RemoteContract
from mqstore.remote.cluster.links import Fields, Links, named
from mqstore.remote.cluster.records import expression_of, message_at, records
from mqstore.remote.cluster.routes import fastjson
from mqstore.remote.cluster.tables import Groups, Topics
from mqstore.remoting.codes import QUERY_NOT_FOUND, Code
from mqstore.remoting.frames import Frame
from mqstore.signalsafe import Lock

PULLED: Final = (0, ResultCode.PULL_NOT_FOUND, ResultCode.PULL_RETRY_IMMEDIATELY, ResultCode.PULL_OFFSET_MOVED)
COMMIT_S: Final = 5.0
_NOBODY: Final = "TOOLS_CONSUMER"
"""Group of reads without a group, which every broker has for its tools."""
_HOLD_MS: Final = 15_000
_AGAIN_S: Final = 1.0
"""Time after which a wait at a broker that cannot be reached is tried again."""
_SUSPEND, _SUBSCRIPTION = 2, 4
_STATUSES: Final = frozenset(get_args(GetStatus))
_BY_CODE: Final = {0: "FOUND", 19: "OFFSET_OVERFLOW_ONE", 20: "NO_MATCHED_MESSAGE", 21: "OFFSET_OVERFLOW_BADLY"}
_UNKNOWN_GROUP: Final = (1, ResultCode.TOPIC_NOT_EXIST, ResultCode.SUBSCRIPTION_GROUP_NOT_EXIST, 206)


def pull_fields(
    group: str | None,
    topic: str,
    queue_id: int,
    offset: int,
    number: int,
    filter: Filter | None = None,
    hold_ms: int = 0,
) -> Fields:
    """Return the fields of PULL_MESSAGE. Retries pass any filter, as in RocketMQ."""
    kind, text = ("TAG", "*") if is_retry_topic(topic) else expression_of(filter)
    return named(
        "consumerGroup topic queueId queueOffset maxMsgNums sysFlag commitOffset suspendTimeoutMillis subVersion "
        "subscription expressionType",
        *(group or _NOBODY, topic, queue_id, offset, number, _SUBSCRIPTION | (_SUSPEND if hold_ms else 0)),
        *(0, hold_ms, 0, text, kind),
    )


class Reads(RemoteContract):
    """Reads and offsets of a `ClusterBroker`. Thread-safe."""

    _links: Links
    topics: Topics
    groups: Groups
    clock: Clock

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()
        self._kept: dict[QueueRef, tuple[int, tuple[str, str], ReadResult]] = {}
        """Result of a wait by queue, with the offset and filter for which it counts."""
        self._commits: dict[tuple[str, QueueRef], int] = {}
        """Offsets that the brokers do not know yet."""
        self._resets: dict[tuple[str, QueueRef], int] = {}
        """Offsets at which the next read of a group must begin."""

    # -- reads ------------------------------------------------------------------------------------------------------

    def read(self, topic: str, queue_id: int, offset: int, max_messages: int = 32, **asked: Any) -> ReadResult:
        """Return messages (`BrokerContract.read`). `asked` is some of max_bytes, filter and group."""
        if max_messages < 1:
            raise ConfigError(f"max_messages must be at least 1, got {max_messages}")
        max_bytes, group, chosen = asked.get("max_bytes"), asked.get("group"), as_filter(asked.get("filter"))
        place, queue = self._links.place(topic, queue_id), QueueRef(topic, queue_id)
        if group is not None and (target := self._resets.pop((group, queue), None)) is not None:
            return ReadResult("OFFSET_RESET", [], target, *self._bounds(queue), 0)
        kept = self._kept.pop(queue, None)
        if kept is not None and kept[:2] == (offset, expression_of(chosen)) and len(kept[2].messages) <= max_messages:
            return kept[2]
        fields = pull_fields(group, topic, place.queue_id, offset, max_messages, chosen)
        answer = self._links.call(place.broker, Code.PULL_MESSAGE, {**fields, "maxMsgBytes": max_bytes}, ok=PULLED)
        return _result(answer, queue, offset, chosen)

    def min_offset(self, topic: str, queue_id: int) -> int:
        return self._number(Code.GET_MIN_OFFSET, QueueRef(topic, queue_id))

    def max_offset(self, topic: str, queue_id: int) -> int:
        return self._number(Code.GET_MAX_OFFSET, QueueRef(topic, queue_id))

    def _bounds(self, queue: QueueRef) -> tuple[int, int]:
        return self.min_offset(*queue), self.max_offset(*queue)

    def offset_for_time(
        self, topic: str, queue_id: int, timestamp_ms: int, bound: Literal["lower", "upper"] = "lower"
    ) -> int:
        fields = named("timestamp boundaryType", timestamp_ms, bound.upper())
        return self._number(Code.SEARCH_OFFSET_BY_TIMESTAMP, QueueRef(topic, queue_id), **fields)

    def _number(self, code: int, queue: QueueRef, **fields: object) -> int:
        place = self._links.place(*queue)
        asked = {"topic": queue.topic, "queueId": place.queue_id, **fields}
        return int(self._links.call(place.broker, code, asked).fields["offset"])

    # -- waits ------------------------------------------------------------------------------------------------------

    def add_waiter(self, topic: str, queue_id: int, offset: int, callback: Callback, **asked: Any) -> Waiter:
        """Park a waiter (`BrokerContract.add_waiter`). `asked` is some of filter and timeout."""
        waiter = self._waiter(offset, callback, asked.get("timeout"))
        self._wait(waiter, QueueRef(topic, queue_id), offset, as_filter(asked.get("filter")))
        return waiter

    def remove_waiter(self, waiter: Waiter) -> bool:
        return self._end(waiter, outcome=False)

    def wake_one(self, group: str, topic: str, queue_id: int = -1) -> None:
        pass  # every receiver asks the brokers itself

    def _waiter(self, offset: int | None, callback: Callback, timeout: Duration | None) -> Waiter:
        """Return a waiter that is parked nowhere yet."""
        self._links.check_open()
        wait_ms = None if timeout is None else math.ceil(seconds(timeout, "timeout") * 1000)
        return Waiter(offset, None if wait_ms is None else self.clock.monotonic_ms() + wait_ms, callback)

    def _fire(self, waiter: Waiter, *, worth: bool = True) -> None:
        if self._end(waiter, outcome=worth) and waiter.callback is not None:
            waiter.callback(worth)

    def _end(self, waiter: Waiter, *, outcome: bool) -> bool:
        """End a wait. Return False if it was over."""
        with self._lock:
            if waiter.outcome is not None:
                return False
            waiter.outcome = outcome
            return True

    def _park(
        self, waiter: Waiter, request: Callable[[int], tuple[str, int, Fields]], took: Callable[[Frame], float | None]
    ) -> None:
        """Ask a broker until a wait is over. `request` gets the time in ms that the broker may hold it. `took` gets its
        answer, and returns the seconds to wait before the callback, or None to ask again."""

        def answered(answer: Frame | None) -> None:
            if waiter.outcome is not None:
                return
            pause_s = None if answer is None else took(answer)
            if pause_s is None:
                self._links.later(_AGAIN_S if answer is None else 0, again)
            elif pause_s:
                self._links.later(pause_s, lambda: self._fire(waiter))
            else:
                self._fire(waiter)

        again = partial(self._park, waiter, request, took)
        left_ms = _HOLD_MS if waiter.deadline_ms is None else waiter.deadline_ms - self.clock.monotonic_ms()
        if waiter.outcome is not None or left_ms <= 0:
            self._fire(waiter, worth=False)
            return
        try:
            broker, code, fields = request(min(left_ms, _HOLD_MS))
            self._links.park(broker, code, fields, answered)
        except StoreClosedError:
            self._fire(waiter, worth=False)
        except MQStoreError as error:
            _log.info("%s: %s", self._links.name, error)
            self._links.later(_AGAIN_S, again)

    def _wait(self, waiter: Waiter, queue: QueueRef, offset: int, filter: Filter | None) -> None:
        place = self._links.place(*queue)

        def request(hold_ms: int) -> tuple[str, int, Fields]:
            fields = pull_fields(None, queue.topic, place.queue_id, offset, 32, filter, hold_ms)
            return place.broker, Code.PULL_MESSAGE, fields

        def took(answer: Frame) -> float | None:
            if answer.code == ResultCode.PULL_NOT_FOUND:
                return None
            if answer.code in PULLED:  # a read raises any error
                self._kept[queue] = offset, expression_of(filter), _result(answer, queue, offset, filter)
            return 0

        self._park(waiter, request, took)

    # -- committed offsets ------------------------------------------------------------------------------------------

    def committed(self, group: str, topic: str, queue_id: int) -> int | None:
        if (noted := self._commits.get((group, QueueRef(topic, queue_id)))) is not None:
            return noted
        place = self._links.place(topic, queue_id)
        fields = named("consumerGroup topic queueId setZeroIfNotFound", group, topic, place.queue_id, False)
        answer = self._links.call(place.broker, Code.QUERY_CONSUMER_OFFSET, fields, ok=(0, QUERY_NOT_FOUND))
        return int(answer.fields["offset"]) if answer.code == 0 else None

    def commit(self, group: str, topic: str, queue_id: int, offset: int, **asked: Any) -> None:
        """Note an offset (`BrokerContract.commit`). The broker does not look at its owner."""
        self._links.place(topic, queue_id)
        key = group, QueueRef(topic, queue_id)
        with self._lock:
            if key not in self._resets:  # until the next read, commits of a queue that was reset do not count
                self._commits[key] = offset
        if asked.get("durability") == "flush":
            self._save([key])

    def _save(self, keys: Iterable[tuple[str, QueueRef]] | None = None) -> None:
        """Send noted offsets. Raises the error of the first that fails, after the others."""
        failed: MQStoreError | None = None
        for key in list(self._commits) if keys is None else keys:
            if (offset := self._commits.get(key)) is None:
                continue
            try:
                self._commit(*key, offset)
            except MQStoreError as error:
                failed = failed or error
                continue
            with self._lock:
                if self._commits.get(key) == offset:
                    del self._commits[key]
        if failed is not None:
            raise failed

    def _commit(self, group: str, queue: QueueRef, offset: int) -> None:
        place = self._links.place(*queue)
        fields = named("consumerGroup topic queueId commitOffset", group, queue.topic, place.queue_id, offset)
        try:
            self._links.call(place.broker, Code.UPDATE_CONSUMER_OFFSET, fields)
        except GroupNotFoundError:  # unlike a read or a heartbeat, a commit creates no group
            self.groups.ask(place.broker, group)
            self._links.call(place.broker, Code.UPDATE_CONSUMER_OFFSET, fields)

    def _drop(self, group: str, queue: QueueRef, reset_to: int | None = None) -> None:
        """Drop a noted offset, of a queue that another member has, or that was reset."""
        with self._lock:
            self._commits.pop((group, queue), None)
            if reset_to is not None:
                self._resets[group, queue] = reset_to

    def start_of(self, group: str, topic: str, queue_id: int, start: Start | None = None) -> int:
        if (known := self.committed(group, topic, queue_id)) is not None:
            return known
        begin = "earliest" if is_retry_topic(topic) else start or self.groups.require(group).start
        offset = self._place(topic, queue_id, begin)
        self._commit(group, QueueRef(topic, queue_id), offset)  # not later: it could undo what others have settled
        return offset

    def _place(self, topic: str, queue_id: int, to: Start | int) -> int:
        """Return the offset that a word or a time names."""
        if isinstance(to, str):
            return self.min_offset(topic, queue_id) if to == "earliest" else self.max_offset(topic, queue_id)
        return self.offset_for_time(topic, queue_id, to_ms(to) if isinstance(to, datetime) else to)

    def lag(self, group: str) -> dict[QueueRef, int]:
        lags: dict[QueueRef, int] = {}
        for broker in self._links.brokers:
            answer = self._links.call(broker, Code.GET_CONSUME_STATS, {"consumerGroup": group}, ok=(0, *_UNKNOWN_GROUP))
            for key, at in (fastjson(answer.body).get("offsetTable") or {}).items() if answer.code == 0 else ():
                lags[self._links.ref(fastjson(key.encode()))] = max(0, at["brokerOffset"] - at["consumerOffset"])
        if not lags and self.groups.get(group) is None:
            raise GroupNotFoundError(f"the cluster {self._links.name} has no offsets of group {group!r}")
        return lags

    def reset(self, group: str, topic: str, queue_id: int | None, to: Start | int) -> dict[QueueRef, int]:
        """Move the group's committed offset in one queue, or all. Return the offsets set. An int is an offset
        (`Broker.reset`). Members begin there with their next read."""
        targets = {}
        for each in self.topics.require(topic).queue_ids if queue_id is None else [queue_id]:
            place = self._links.place(topic, each)
            target = to if type(to) is int else self._place(topic, each, to)
            names = "topic group queueId offset timestamp isForce"
            fields = named(names, topic, group, place.queue_id, target, -1, True)
            self._links.call(place.broker, Code.INVOKE_BROKER_TO_RESET_OFFSET, fields)
            self._drop(group, QueueRef(topic, each), target)
            targets[QueueRef(topic, each)] = target
        return targets


def _result(answer: Frame, queue: QueueRef, offset: int, filter: Filter | None) -> ReadResult:
    messages = [message_at(answer.body, at, queue, where) for at, _, _, where in records(answer.body)]
    if filter is not None and filter.kind == "TAG":  # brokers compare only hashes of tags
        messages = [message for message in messages if filter.matches(message.stored_properties())]
    next_offset, low, high = (int(answer.fields[name]) for name in ("nextBeginOffset", "minOffset", "maxOffset"))
    status: Any = answer.remark if answer.remark in _STATUSES else _BY_CODE[answer.code]
    if status == "FOUND" and not messages:
        status = "NO_MATCHED_MESSAGE"
    lost = low - max(offset, 0) if status == "OFFSET_TOO_SMALL" else 0
    return ReadResult(status, messages, next_offset, low, high, lost)
