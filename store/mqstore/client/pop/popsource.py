"""Source of messages for one member of a group that consumes by pop (clients#simple).

    change --> positions of the group, from now on --> join: a member --> look, look, ... --> leave

    look: one pop of each topic, beginning with the next topic each time, or with the one whose turn it is; again of
          topics that gave as many as were requested. `%RETRY%group` is one more topic if it exists, with the
          messages that failed while the group read by offset, see `pop_retries`

Queues have no owner, so nothing is shared out. The holder of a delivery settles it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Container, Mapping

from mqstore.broker.redelivery.retry import origin_topic
from mqstore.broker.tables.names import retry_topic
from mqstore.client.group.groupsettings import Wanted, begin_in, check_start
from mqstore.client.pop.delivery import fail
from mqstore.client.waits import Waits
from mqstore.contract import MAX_BATCH, BrokerContract, Delivery, Filter, Mode, RetryPolicy, Start, Subscriptions
from mqstore.errors import ConfigError, MQStoreError, StoreClosedError, TopicNotFoundError
from mqstore.log.commitlog import QueueRef
from mqstore.logger import log as _log
from mqstore.options import milliseconds
from mqstore.signalsafe import Lock

Topics = list[tuple[str, Filter | None]]


class PopSource:
    """Messages of `group` for one member. Thread-safe."""

    def __init__(
        self,
        broker: BrokerContract,
        group: str,
        client_id: str,
        *,
        ordered: bool = False,
        start: Start | None = None,
        retry: RetryPolicy | None = None,
        on_loss: Callable[[QueueRef, int, int], object] | None = None,
    ) -> None:
        """`start` is where the group begins in new topics, None for the group's own start.
        A bad one raises ConfigError. `retry` is the policy that the group has once it has this member. `on_loss` is
        called with each unreported loss of the group (queue, first lost offset, next offset). It must not raise."""
        check_start(start)
        self.waits = Waits(broker, group, order=ordered)
        """Waits of receivers that found nothing. Rung for new topics, other subscriptions, and at the end."""
        self.wanted: Mapping[str, Wanted] = {}
        """Subscriptions by topic. The table is replaced, never changed."""
        self.closed = False
        self._broker = broker
        self._group = group
        self._client_id = client_id
        self._token = os.urandom(16).hex()
        self._mode = Mode("pop", ordered)
        self._start = start
        self._retry = retry
        self._on_loss = on_loss
        self._lock = Lock()
        """Guards subscriptions, membership, and turns."""
        self._topics: Topics = []
        self._retries = retry_topic(group)
        self._turn = random.getrandbits(16)
        self._is_member = False

    def change(self, after: Mapping[str, Wanted], *, join: bool = False) -> None:
        """Change the subscriptions, and with `join` become a member. Messages that come later are found.

        Raises StoreClosedError and NotPermittedError, for a member also GroupInUseError and SubscriptionConflictError.
        Then nothing has changed.
        """
        with self._lock:
            self.check_open()
            joins = join or self._is_member
            if joins:
                self.check(after)
            for topic in after:
                # In queues that come later the group begins at their first message (`_pop`).
                if topic not in self.wanted and not begin_in(self._broker, self._group, topic, self._start):
                    _log.warning("topic %r is not there; group %s waits for it", topic, self._group)
            if joins:  # last, so that an error above does not change the group
                self._join(after)
            self.wanted = dict(after)
            self._topics = [(topic, each.filter) for topic, each in after.items()]
            # Not earlier: a consumer that never receives may never be closed.
            self._broker.listen("topics", self._topic_changed)
        self.waits.ring()

    def check_open(self) -> None:
        if self.closed:
            raise StoreClosedError(f"this consumer of group {self._group!r} was closed; make another one")

    def check(self, after: Mapping[str, Wanted] | None) -> None:
        """Raise the errors of `change` with `join` because of other members. None: not known yet."""
        wanted = None if after is None else _subscriptions(after)
        self._broker.members.check(
            self._client_id, self._group, wanted, self._mode, owner=self._token, retry=self._retry
        )

    def _join(self, after: Mapping[str, Wanted]) -> None:
        self._broker.members.register(
            self._client_id, self._group, _subscriptions(after), self._mode, owner=self._token, retry=self._retry
        )
        self._is_member = True

    def _topic_changed(self, topic: str) -> None:
        """Wake receivers, since a topic may have been created."""
        if topic in self.wanted or topic == self._retries:
            self.waits.ring()

    def leave(self) -> None:
        """Find no more messages, and leave the group. Repeating it is harmless."""
        with self._lock:
            self.closed = True
        self._broker.unlisten("topics", self._topic_changed)
        self._broker.members.unregister(self._client_id, self._group, owner=self._token)
        self._is_member = False
        self.waits.ring()

    def topics(self, turn: str | None = None) -> Topics | None:
        """Return the topics to look through, `turn` first, else in rotation. None if this was closed.
        The caller is a member from then on. Raises the errors of `change`, and ConfigError without subscriptions."""
        with self._lock:
            if not self.closed:
                if not self._topics:
                    raise ConfigError(f"group {self._group!r}: nothing to receive from; subscribe to a topic first")
                if not self._is_member:
                    self._join(self.wanted)
                self._turn += 1
                topics = self._topics
                if self._retries not in self.wanted and self._broker.topics.entered(self._retries) is not None:
                    topics = [*topics, (self._retries, None)]
                names = [name for name, _ in topics]
                first = names.index(turn) if turn in names else self._turn % len(topics)
                return topics[first:] + topics[:first]
        if turn is not None:
            self.waits.pass_on(turn)
        return None

    def look(self, topics: Topics, turn: str | None, count: int, visibility_s: float) -> list[Delivery]:
        """Return up to `count` messages, each leased for `visibility_s` seconds.
        `turn` is that of the call of `topics`, and is used up. An error of one topic is raised only if no other has
        messages."""
        found: list[Delivery] = []
        failure: MQStoreError | None = None
        if turn is not None and topics[0][0] != turn:  # no longer subscribed
            self.waits.pass_on(turn)
            turn = None
        try:
            while topics and len(found) < count:
                more = []
                for topic, only in topics:
                    number = min(MAX_BATCH, count - len(found))
                    if not number:
                        break
                    try:
                        got, is_full = self._pop(topic, only, number, visibility_s)
                    except MQStoreError as error:
                        if not isinstance(error, TopicNotFoundError):  # not created yet, which will be reported
                            failure = failure or error
                        if turn is not None:
                            self.waits.pass_on(turn)
                        got, is_full = [], False
                    turn = None
                    found += got
                    if is_full:
                        more.append((topic, only))
                topics = more
        except BaseException:  # Ctrl-C: no caller will get the messages
            if turn is not None:
                self.waits.pass_on(turn)
            self.release(found)
            raise
        if self._on_loss is not None:
            for loss in self._broker.take_losses(self._group):
                self._on_loss(*loss)
        if failure is not None and not found:
            raise failure
        return found

    def _pop(self, topic: str, only: Filter | None, count: int, visibility_s: float) -> tuple[list[Delivery], bool]:
        """Return messages of a topic, and True if it may have more."""
        order = self._mode.ordered
        if topic == self._retries and topic not in self.wanted:
            wanted = self.wanted
            return pop_retries(self._broker, self._group, wanted, count, visibility_s, order=order)
        found = []
        if only is None:
            visibility_ms = milliseconds(visibility_s, "visibility")
            found = self._broker.pop_at_once(self._group, topic, count, visibility_ms, order)
        if not found:
            found = self._broker.pop(
                self._group, topic, count, invisible=visibility_s, filter=only, order=order, start="earliest"
            )
        return found, len(found) == count

    def release(self, found: list[Delivery]) -> None:
        """Release deliveries that no handler has seen. They are redelivered at once."""
        for each in found:
            try:
                self._broker.release(self._group, each.topic, [each.receipt])
            except MQStoreError as error:  # it is redelivered when its lease expires
                _log.warning("group %s: %s/%d could not be released (%s)", self._group, *each[3:5], error)


def _subscriptions(wanted: Mapping[str, Wanted]) -> Subscriptions:
    return {topic: each.expression for topic, each in wanted.items()}


def pop_retries(
    broker: BrokerContract,
    group: str,
    topics: Container[str],
    count: int,
    visibility_s: float,
    *,
    order: bool,
    skip_acked: bool = False,
) -> tuple[list[Delivery], bool]:
    """Pop up to `count` messages of the group's retry topic that were sent to one of `topics`.
    Return them, and True if there may be more. In order the messages after one that failed here are released. Raises
    the errors of `Broker.pop`.

    its topic is        the message is
    subscribed to       delivered, under that topic; it is settled in the retry topic
    nobody's any more   failed, as in a push consumer that reads: it is redelivered by the retry policy, in case
                        somebody subscribes again, and becomes a dead letter in the end
    """
    found = broker.pop(
        group, retry_topic(group), count, invisible=visibility_s, order=order, start="earliest", skip_acked=skip_acked
    )
    wanted: list[Delivery] = []
    blocked: set[int] = set()
    for each in found:
        origin = origin_topic(each.message, group)
        try:
            if each.queue_id in blocked:
                broker.release(group, each.topic, [each.receipt])
            elif origin in topics:
                wanted.append(each)
            else:
                if order:
                    blocked.add(each.queue_id)
                fail(broker, group, each, f"nobody subscribes to its topic {origin} any more")
        except MQStoreError as error:  # it is redelivered when its lease is over
            _log.warning("group %s: %s/%d could not be released (%s)", group, each.topic, each.queue_id, error)
    return wanted, len(found) == count
