"""Topics, groups, members and locks of a cluster, as the engine contract has them (remoting-server, sections 6 and 10).

The brokers know topics, group settings, members and locks. This process knows in which order a group consumes, and
where it begins: RocketMQ leaves that to the clients.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final, NoReturn

from mqstore.broker.tables.groups import GroupConfig, RetryPolicy, default_retry
from mqstore.broker.tables.locks import LEASE_MS
from mqstore.broker.tables.names import check_group, check_user_topic, is_system_topic, retry_topic
from mqstore.clock import Clock
from mqstore.contract import Member, Mode, QueueLock, Subscriptions
from mqstore.errors import ConfigError, ConnectionLostError, GroupInUseError, MQStoreError, TopicNotFoundError
from mqstore.layout.javahash import java_hash
from mqstore.log.commitlog import QueueRef
from mqstore.logger import log as _log
from mqstore.remote.cluster.degrade import refuse
from mqstore.remote.cluster.links import Links, named
from mqstore.remote.cluster.routes import RoutedTopic, fastjson, spread
from mqstore.remoting.codes import DEFAULT_TOPIC, Code
from mqstore.remoting.shapes import dumps
from mqstore.signalsafe import Lock

HEARTBEAT_S: Final = 30.0
_QUEUES: Final = 4
_ROUTE_WAIT_S: Final = 10.0
"""Time in which a name server learns of a new topic."""
_FRESH_MS: Final = LEASE_MS // 2
"""Age up to which a lock is ours without another look: half of the brokers' lease, as in RocketMQ."""


class Topics:
    """Topics of the cluster (`contract.TopicCalls`)."""

    def __init__(self, links: Links) -> None:
        self._links = links

    def get(self, name: str) -> RoutedTopic | None:
        return self._links.route(name)

    entered = get

    def require(self, name: str) -> RoutedTopic:
        if (route := self.get(name)) is None:
            raise TopicNotFoundError(f"the cluster {self._links.name} has no topic {name!r}; create it")
        return route

    def for_send(self, name: str) -> RoutedTopic:
        route = self.get(name)
        if route is None:
            check_user_topic(name)
            if self._links.config(self._links.brokers[0]).get("autoCreateTopicEnable") == "false":
                why = "and its brokers create none (autoCreateTopicEnable); call create_topic"
                raise TopicNotFoundError(f"the cluster {self._links.name} has no topic {name!r}, {why}")
            route = self.create(name)
        return route

    def for_priority(self, name: str) -> NoReturn:
        refuse("priority=", "use a queue for each priority, and mqstore.get_any")

    def names(self, system: bool = False) -> list[str]:
        return [name for name in self._links.topic_names() if system or not is_system_topic(name)]

    def expire(self, name: str, dead_letter: bool | None = None) -> NoReturn:
        refuse("expires=", "let the receiver compare a time in the item")

    def create(self, name: str, *, queues: int | None = None, exist_ok: bool = True) -> RoutedTopic:
        check_user_topic(name)
        if queues is not None and (type(queues) is not int or queues < 1):
            raise ConfigError(f"queues must be 1 or more, not {queues!r}")
        self._links.forget(name)
        if (known := self.get(name)) is not None:
            if exist_ok:
                return known
            raise ConfigError(f"topic {name!r} exists already")
        brokers = sorted(self._links.brokers)
        names = "topic defaultTopic readQueueNums writeQueueNums perm topicFilterType topicSysFlag order attributes"
        for broker, number in zip(brokers, spread(queues or _QUEUES, len(brokers)), strict=True):
            if number:
                fields = named(names, name, DEFAULT_TOPIC, number, number, 6, "SINGLE_TAG", 0, False, "")
                self._links.call(broker, Code.UPDATE_AND_CREATE_TOPIC, fields)
        end_s = time.monotonic() + _ROUTE_WAIT_S
        while (route := self.get(name)) is None or len(route.places) < (queues or _QUEUES):
            if time.monotonic() > end_s:
                raise TopicNotFoundError(f"{name!r} was created, and the name servers do not know it yet; try again")
            time.sleep(0.02)
            self._links.forget(name)
        return route


class Groups:
    """Groups that consumers of this process are in (`contract.GroupCalls`)."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._known: dict[str, GroupConfig] = {}

    def get(self, name: str) -> GroupConfig | None:
        return self._known.get(name)

    def require(self, name: str) -> GroupConfig:
        return self._known.get(name) or self.create(name)

    def create(self, name: str, *, exist_ok: bool = True, **settings: Any) -> GroupConfig:
        check_group(name)
        config = GroupConfig.from_json(name, self.ask(self._links.brokers[0], name))
        orderly = settings.get("orderly", False)
        if (policy := settings.pop("retry_policy", None)) is not None:
            config = self.set_retry(name, policy, config)
        elif orderly:  # kept by ordered consumers themselves, as in RocketMQ
            config = replace(config, retry_policy=default_retry(orderly=True))
        self._known[name] = replace(config, **settings)
        return self._known[name]

    def ask(self, broker: str, name: str) -> dict[str, Any]:
        """Return the settings of a group at a broker, which creates it if it may (autoCreateSubscriptionGroup)."""
        return fastjson(self._links.call(broker, Code.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": name}).body)

    def set_retry(self, name: str, policy: RetryPolicy, config: GroupConfig | None = None) -> GroupConfig:
        """Make a policy that of the group, at every broker. Raises NotPermittedError."""
        config = self.require(name) if config is None else config
        if config.retry_policy != policy:
            config = replace(config, retry_policy=policy)
            for broker in self._links.brokers:
                self._links.call(broker, Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, dumps(config.as_json()))
        if name in self._known:
            self._known[name] = config
        return config


class Members:
    """Members of groups (`contract.MemberCalls`): those of this process, by heartbeat, and the brokers' lists."""

    def __init__(self, links: Links, groups: Groups) -> None:
        self.on_change: list[Callable[[str], object]] = []
        self.producers: set[str] = set()
        """Producer groups that brokers may ask about half messages."""
        self._links = links
        self._groups = groups
        self._lock = Lock()
        self._mine: dict[tuple[str, str], Member] = {}
        links.every(HEARTBEAT_S, self.beat)

    def register(
        self, client_id: str, group: str, subscriptions: Subscriptions, mode: Mode, *, retry: Any = None, **asked: Any
    ) -> bool:
        self.check(client_id, group, subscriptions, mode, **asked)
        if retry is not None:
            self._groups.set_retry(group, retry)
        member = Member(client_id, mode, dict(subscriptions), asked.get("owner"))
        with self._lock:
            before = self._mine.get((group, client_id))
            self._mine[group, client_id] = member
        if before == member:
            return False
        self._heartbeat(client_id, group, member)
        self._links.forget(retry_topic(group))  # the heartbeat creates it
        self.changed(group)
        return True

    def check(self, client_id: str, group: str, *others: object, owner: str | None = None, **asked: object) -> None:
        """Refuse a client id that another consumer of this process has. The brokers refuse nobody."""
        check_group(group)
        known = self._mine.get((group, client_id))
        if known is not None and known.owner != owner:
            raise GroupInUseError(f"{client_id!r} is a member of group {group!r} already; choose another client id")

    def unregister(self, client_id: str, group: str, *, owner: str | None = None) -> bool:
        with self._lock:
            known = self._mine.get((group, client_id))
            if known is None or owner not in (None, known.owner):
                return False
            del self._mine[group, client_id]
        self._everywhere(client_id, Code.UNREGISTER_CLIENT, named("clientID consumerGroup", client_id, group), b"")
        if not any(each == client_id for _, each in self._mine):
            self._links.leave(client_id)
        self.changed(group)
        return True

    def check_retry(self, client_id: str, group: str, retry: RetryPolicy | None) -> None:
        pass

    def set_retry(self, client_id: str, group: str, retry: RetryPolicy) -> None:
        self._groups.set_retry(group, retry)

    def get(self, client_id: str, group: str) -> Member | None:
        return self._mine.get((group, client_id))

    def members(self, group: str) -> list[str]:
        for broker in self._links.brokers:
            try:
                answer = self._links.call(broker, Code.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": group}, ok=(0, 1))
            except ConnectionLostError:
                continue
            if answer.code == 0:
                return sorted(fastjson(answer.body).get("consumerIdList") or [])
        return sorted(client_id for each, client_id in self._mine if each == group)

    def mode(self, group: str) -> Mode | None:
        return next((member.mode for (each, _), member in list(self._mine.items()) if each == group), None)

    def changed(self, group: str) -> None:
        """Report to listeners that a group has other members."""
        for listener in list(self.on_change):
            listener(group)

    def beat(self) -> None:
        """Send the heartbeats of all members, and of the producers."""
        for (group, client_id), member in list(self._mine.items()):
            self._heartbeat(client_id, group, member)
        self.beat_producers()

    def beat_producers(self) -> None:
        """Send the heartbeat of this client's producer groups, so that brokers ask about open transactions."""
        if self.producers:
            body = {"clientID": self._links.client_id, "producerDataSet": [{"groupName": g} for g in self.producers]}
            self._everywhere("", Code.HEART_BEAT, {}, dumps(body))

    def _heartbeat(self, client_id: str, group: str, member: Member) -> None:
        subscriptions = []
        names = "topic subString expressionType subVersion classFilterMode tagsSet codeSet"
        for topic, (kind, text) in member.subscriptions.items():
            tags = [tag.strip() for tag in text.split("||")] if kind == "TAG" and text != "*" else []
            version, codes = time.time_ns() // 1_000_000, [java_hash(tag) for tag in tags]
            subscriptions.append(named(names, topic, text, kind, version, False, tags, codes))
        model = "BROADCASTING" if member.mode.broadcasting else "CLUSTERING"
        names = "groupName consumeType messageModel consumeFromWhere subscriptionDataSet unitMode"
        values = group, "CONSUME_PASSIVELY", model, "CONSUME_FROM_FIRST_OFFSET", subscriptions, False
        body = {"clientID": client_id, "consumerDataSet": [named(names, *values)], "producerDataSet": []}
        self._everywhere(client_id, Code.HEART_BEAT, {}, dumps(body))

    def _everywhere(self, member: str, code: int, fields: dict[str, object], body: bytes) -> None:
        """Send a request to every broker. Those that cannot be reached get the next heartbeat."""
        for broker in self._links.brokers:
            try:
                self._links.call(broker, code, fields, body, member=member)
                self._links.attend(broker, member)
            except MQStoreError as error:
                _log.info("%s: no heartbeat: %s", self._links.name, error)


class Locks:
    """Locks of queues (`contract.LockCalls`). The brokers grant them for 60 s, this process knows how old they are.

    Groups without order have locks here, too, so that members of mqstore never share a queue while it moves. They are
    asked for in another name than the group's: a broker takes a group with locks for an ordered one.
    """

    def __init__(self, links: Links, clock: Clock, members: Members, release: Callable[..., object]) -> None:
        """`release(group, queues, lost=)` is called before locks are released, and after they were lost."""
        self.on_release: list[Callable[[str], object]] = []
        self._release = release
        self._links = links
        self._clock = clock
        self._members = members
        self._held: dict[tuple[str, QueueRef], tuple[str, int]] = {}
        """Client and time of the last renewal, by group and queue."""

    def try_lock(self, group: str, queue: QueueRef, client_id: str) -> bool:
        return bool(self.try_lock_batch(group, (queue,), client_id))

    def try_lock_batch(self, group: str, queues: Iterable[QueueRef], client_id: str) -> set[QueueRef]:
        if group.startswith("@"):  # seats: heartbeats tell the brokers who is alive
            return set(queues)
        now_ms = self._clock.monotonic_ms()
        mine = [queue for queue in queues if self.owner(group, queue) in (None, client_id)]
        got = self._ask(Code.LOCK_BATCH_MQ, group, mine, client_id)
        self._held.update({(group, queue): (client_id, now_ms) for queue in got})
        return got

    def renew_batch(self, group: str, queues: Iterable[QueueRef], client_id: str) -> set[QueueRef]:
        asked = set(queues)
        got = self.try_lock_batch(group, asked, client_id)
        if lost := asked - got:
            self._release(group, lost, lost=True)
        return got

    def unlock_batch(self, group: str, queues: Iterable[QueueRef], client_id: str) -> set[QueueRef]:
        if group.startswith("@"):
            return set(queues)
        mine = {queue for queue in queues if self.owner(group, queue) == client_id}
        self._release(group, mine, lost=False)
        for queue in mine:
            self._held.pop((group, queue), None)
        self._ask(Code.UNLOCK_BATCH_MQ, group, mine, client_id)
        if mine:
            for listener in list(self.on_release):
                listener(group)
        return mine

    def _ask(self, code: int, group: str, queues: Iterable[QueueRef], client_id: str) -> set[QueueRef]:
        """Lock or unlock queues at their brokers. Return those that are locked now."""
        by_broker: defaultdict[str, list[QueueRef]] = defaultdict(list)
        for queue in queues:
            by_broker[self._links.place(*queue).broker].append(queue)
        mode = self._members.mode(group)
        name = group if mode is None or mode.ordered else f"{group}@mqstore"
        locked: set[QueueRef] = set()
        for broker, each in by_broker.items():
            bodies = [self._links.place(*queue).body(queue.topic) for queue in each]
            body = named("consumerGroup clientId mqSet onlyThisBroker", name, client_id, bodies, False)
            try:
                answer = self._links.call(broker, code, {}, dumps(body))
            except ConnectionLostError as error:
                _log.warning("group %s: %s", group, error)
                continue
            found = fastjson(answer.body) if answer.body else {}
            locked.update(map(self._links.ref, found.get("lockOKMQSet") or ()))
        return locked

    def begin_work(self, group: str, queue: QueueRef, client_id: str) -> bool:
        held = self._held.get((group, queue))
        if held is not None and held[0] == client_id and self._clock.monotonic_ms() - held[1] < _FRESH_MS:
            return True
        return self.try_lock(group, queue, client_id)

    def end_work(self, group: str, queue: QueueRef) -> None:
        pass

    def owner(self, group: str, queue: QueueRef) -> str | None:
        held = self._held.get((group, queue))
        return None if held is None or self._clock.monotonic_ms() - held[1] > LEASE_MS else held[0]

    def snapshot(self) -> list[QueueLock]:
        now_ms = self._clock.monotonic_ms()
        ages = [(*key, client_id, now_ms - since) for key, (client_id, since) in [*self._held.items()]]
        return [QueueLock(group, queue, client_id, age, age > LEASE_MS) for group, queue, client_id, age in ages]
