"""The engine contract over an Apache RocketMQ cluster (remoting-server, section 13).

    ClusterBroker ── Links                      name servers, brokers, background thread
                  ├─ Sends, Pops, Reads         its methods
                  └─ Topics, Groups, Members, Locks, Transactions

`degrade.py` and docs/cluster.md list the differences from a store.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections import defaultdict
from collections.abc import Collection
from datetime import datetime
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from mqstore.broker.reads.filters.filter import parse_filter
from mqstore.broker.tables.names import is_system_topic
from mqstore.clock import SYSTEM_CLOCK
from mqstore.contract import BlockedQueue, DeadLetters, Limits, OffsetCalls
from mqstore.errors import ConfigError
from mqstore.layout.messageid import decode_message_id
from mqstore.log.commitlog import QueueRef
from mqstore.log.message import Message
from mqstore.log.reading.reader import GetResult, to_ms
from mqstore.logger import log as _log
from mqstore.options import Durability, Duration, seconds
from mqstore.remote.broker import Later
from mqstore.remote.cluster.degrade import DIFFERENCES, refuse, refuse_items
from mqstore.remote.cluster.letters import ClusterLetters
from mqstore.remote.cluster.links import Links
from mqstore.remote.cluster.pops import Pops
from mqstore.remote.cluster.reads import COMMIT_S
from mqstore.remote.cluster.routes import fastjson
from mqstore.remote.cluster.sends import Sends, Transactions, Turns
from mqstore.remote.cluster.tables import Groups, Locks, Members, Topics
from mqstore.remoting.codes import Code
from mqstore.remoting.frames import Frame
from mqstore.remoting.signing import Signer

if TYPE_CHECKING:
    import ssl


class _NamedOffsets:
    """Offsets of a broadcasting client in a file, where queues have the names of their brokers."""

    def __init__(self, offsets: OffsetCalls, links: Links) -> None:
        self._offsets = offsets
        self._links = links
        self.reload, self.save = offsets.reload, offsets.save

    def _named(self, queue: QueueRef) -> QueueRef:
        place = self._links.place(*queue)
        return QueueRef(f"{queue.topic}@{place.broker}", place.queue_id)

    def committed(self, queue: QueueRef) -> int | None:
        return self._offsets.committed(self._named(queue))

    def commit(self, queue: QueueRef, offset: int) -> None:
        self._offsets.commit(self._named(queue), offset)


class ClusterBroker(Sends, Pops):
    """Delivery by the brokers of a cluster. Thread-safe. Closing it closes its connections."""

    def __init__(
        self,
        addresses: str | Collection[str],
        *,
        timeout: Duration = 10,
        client_id: str | None = None,
        sign: Signer | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Connect. `addresses` is "host:port;host:port" of the name servers, or several texts. Raises ConfigError for
        bad ones, and ConnectionLostError if no name server answers."""
        super().__init__()
        names = [name for name in (addresses.split(";") if isinstance(addresses, str) else addresses) if name]
        if not names:
            raise ConfigError(f"a cluster is given by its name servers, as in 'host:9876', not by {addresses!r}")
        client = client_id or f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        links = Links(names, client, timeout_s=seconds(timeout, "timeout"), sign=sign, tls=tls)
        self._links = links
        self.name = links.name
        self.clock = SYSTEM_CLOCK
        self.durability: Durability = "append"
        self.turns = Turns(links)
        self.save_offsets = self._save
        self.items: Any = SimpleNamespace(
            **dict.fromkeys(("page", "counts", "by_key", "purge"), refuse_items),
            put=partial(refuse, "unique=", "let the receiver remember the names"),
            cancel=partial(refuse, "cancelling an item that is not delayed", "let the receiver look if it is wanted"),
        )
        config = links.config(links.brokers[0]) if links.brokers else {}
        self.limits = Limits(int(config.get("maxMessageSize", 4 << 20)), int(config.get("timerMaxDelaySec", 259_200)))
        self.topics = Topics(links)
        self.groups = Groups(links)
        self.members = Members(links, self.groups)
        self.locks = Locks(links, self.clock, self.members, self._release)
        self.transactions = Transactions(links, self, self.members)
        self._attempts: defaultdict[tuple[str, QueueRef], dict[int, BlockedQueue]] = defaultdict(dict)
        self._asked = Later("mqstore-checks")
        self._listeners = {"topics": [], "members": self.members.on_change, "locks": self.locks.on_release, "save": []}
        self.log = _log_of(self, links)
        self._store_id = hashlib.sha256(self.name.encode()).hexdigest()[:32]
        links.topics_changed = self._topic_changed
        links.requested = self._requested
        links.every(COMMIT_S, self._save)
        texts = len(DIFFERENCES), ", ".join(DIFFERENCES)
        _log.info("%s is an Apache RocketMQ cluster; it differs from a store in %d ways (docs/cluster.md): %s",
                  self.name, *texts)  # fmt: skip

    @property
    def closed(self) -> bool:
        return self._links.closed

    def check_open(self) -> None:
        self._links.check_open()

    def _topic_changed(self, topic: str) -> None:
        for listener in list(self._listeners["topics"]):
            listener(topic)

    def _requested(self, broker: str, frame: Frame) -> None:
        """Act on a request of a broker, in the background thread."""
        group = frame.fields.get("consumerGroup") or frame.fields.get("group") or ""
        if frame.code == Code.NOTIFY_CONSUMER_IDS_CHANGED:
            self.members.changed(group)
        elif frame.code == Code.CHECK_TRANSACTION_STATE:
            self._asked(partial(self.transactions.answer, broker, frame))
        elif frame.code == Code.RESET_CONSUMER_CLIENT_OFFSET:
            for key, offset in (fastjson(frame.body).get("offsetTable") or {}).items():
                self._drop(group, self._links.ref(fastjson(key.encode())), offset)

    def _release(self, group: str, queues: Collection[QueueRef], *, lost: bool) -> None:
        """Commit before locks are given away. Noted offsets of lost queues do not count."""
        for queue in queues:
            if lost:
                self._drop(group, queue)
        self._save([(group, queue) for queue in queues])

    # -- failures of ordered consumers, which nobody else knows ------------------------------------------------------

    def attempts(self, group: str, topic: str, queue_id: int) -> dict[int, int]:
        noted = self._attempts.get((group, QueueRef(topic, queue_id)), {})
        return {offset: blocked.attempt for offset, blocked in noted.items()}

    def note_attempt(
        self, group: str, topic: str, queue_id: int, offset: int, attempts: int, *, error: str = ""
    ) -> None:
        noted = self._attempts[group, QueueRef(topic, queue_id)]
        since_ms = noted[offset].since_ms if offset in noted else self.clock.now_ms()
        noted[offset] = BlockedQueue(offset, attempts, since_ms, error[:300])

    def commit(self, group: str, topic: str, queue_id: int, offset: int, **options: Any) -> None:
        super().commit(group, topic, queue_id, offset, **options)
        if noted := self._attempts.get((group, QueueRef(topic, queue_id))):
            for failed in [each for each in noted if each < offset]:
                del noted[failed]

    def suspended(self, group: str) -> dict[QueueRef, BlockedQueue]:
        return {queue: noted[min(noted)] for (each, queue), noted in self._attempts.items() if each == group and noted}

    def dead_letters(self, group: str) -> DeadLetters:
        return ClusterLetters(self, group)

    def local_offsets(self, client_id: str, group: str) -> OffsetCalls:
        return _NamedOffsets(super().local_offsets(client_id, group), self._links)

    # -- the end ----------------------------------------------------------------------------------------------------

    def close(self, timeout: Duration = 30) -> None:
        if self.closed:
            return
        try:
            self.saved(lambda: None)
        finally:
            self._links.close()
            self._asked.end()

    def __repr__(self) -> str:
        return f"<ClusterBroker of {self.name!r}{' closed' if self.closed else ''}>"


def _log_of(broker: ClusterBroker, links: Links) -> SimpleNamespace:
    """Return the reads of a cluster without a group, as `RemoteStore` asks for them (`remoting.calls.LogCalls`)."""

    def get(
        topic: str, queue_id: int, offset: int, max_messages: int = 32, *, tags: str | None = "*", **asked: Any
    ) -> GetResult:
        result = broker.read(topic, queue_id, offset, max_messages, filter=parse_filter(tags), **asked)
        return GetResult(*result[:5])  # type: ignore[arg-type]  # without a group there is no reset

    def find(
        topic: str, *, key: str | None = None, unique_key: str | None = None, limit: int = 32, **asked: Any
    ) -> list[Message]:
        start_ms, stop_ms = asked.get("start_ms", 0), asked.get("stop_ms", 1 << 62)
        if unique_key is not None:
            found = broker.find(topic, unique_key=unique_key, limit=limit)
        else:
            found = broker.find_by(topic, key or "", start_ms, stop_ms, limit)
        return [message for message in found if start_ms <= message.store_timestamp_ms < stop_ms]

    def offsets(topic: str, queue_id: int) -> tuple[int, int]:
        return broker.min_offset(topic, queue_id), broker.max_offset(topic, queue_id)

    def offsets_or_none(topic: str, queue_id: int) -> tuple[int, int] | None:
        route = broker.topics.get(topic)
        return offsets(topic, queue_id) if route is not None and 0 <= queue_id < len(route.places) else None

    def stats() -> NoReturn:
        refuse("counting segments and bytes", "use mqadmin brokerStatus")

    def verify() -> NoReturn:
        refuse("verifying the store", "the brokers check their files when they start")

    def snapshot(target: str, *, link: bool = False) -> NoReturn:
        refuse("a snapshot", "copy the brokers' folders, or run slaves")

    def get_by_id(message_id: str) -> Message:
        address, physical_offset = decode_message_id(message_id)
        return links.record(links.broker_at(address), physical_offset)

    def offset_at(topic: str, queue_id: int, when: datetime) -> int:
        return broker.offset_for_time(topic, queue_id, to_ms(when))

    def queues(topic: str) -> list[QueueRef]:
        return [QueueRef(topic, i) for i in broker.topics.require(topic).queue_ids]

    def topics() -> list[str]:
        return [name for name in links.topic_names() if not is_system_topic(name)]

    return SimpleNamespace(
        **{call.__name__: call for call in (
            get, find, get_by_id, offsets, offsets_or_none, offset_at, queues, topics, stats, verify, snapshot
        )}
    )  # fmt: skip
