"""Where the messages of one member of a group come from that consumes by pop (clients#simple).

    change --> positions of the group, from now on --> join: a member --> look, look, ... --> leave

    look: one pop of each topic, the next topic first each time, or the one whose turn was given; again of those that
          gave as many as they were asked for. `%RETRY%group` is one more topic if it is there: what the group failed
          at as long as it read by offset (popretries.py)

No queue is anybody's, so there is nothing to share out. Knows topics, filters and turns; what becomes of a delivery is
the matter of who holds it.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping

from mqstore.broker.broker import Broker, Start
from mqstore.broker.filters import Filter
from mqstore.broker.groups import RetryPolicy
from mqstore.broker.members import Mode, Subscriptions
from mqstore.broker.names import retry_topic
from mqstore.broker.pop.service import MAX_BATCH, Delivery
from mqstore.client.popretries import pop_retries
from mqstore.client.progress import check_start
from mqstore.client.waits import Waits
from mqstore.client.wanted import Wanted
from mqstore.errors import ConfigError, MQStoreError, StoreClosedError, TopicNotFoundError
from mqstore.log.commitlog import QueueRef

__all__ = ["PopSource"]

_log = logging.getLogger("mqstore")

Topics = list[tuple[str, Filter | None]]


class PopSource:
    """The messages of `group` for one member. Thread-safe.

    >>> import mqstore, tempfile
    >>> from mqstore.client.wanted import wanted
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     _ = store.put("mail", b"hello")
    ...     source = PopSource(store.broker, "mailer", "c1")
    ...     source.change({"mail": wanted(store.broker, "mail")})
    ...     [delivery.message.body for delivery in source.look(source.topics() or [], None, 10, 60)]
    [b'hello']
    """

    def __init__(
        self,
        broker: Broker,
        group: str,
        client_id: str,
        *,
        ordered: bool = False,
        start: Start | None = None,
        retry: RetryPolicy | None = None,
        on_loss: Callable[[QueueRef, int, int], object] | None = None,
    ) -> None:
        """`start`: where the group begins in a topic in which it never was, None: as the group has it; ConfigError for
        what is none. `retry`: the policy that the group is to have once it has this member. `on_loss`: who looks
        tells it of each loss of the group that nobody was told of (queue, first lost, where it goes on); must not
        raise."""
        check_start(start)
        self.waits = Waits(broker, group, order=ordered)
        """Of those who found nothing. Rung when topics come, when what is wanted changes, and at the end."""
        self.wanted: Mapping[str, Wanted] = {}
        """By topic. Replaced, never changed."""
        self.closed = False
        self._broker = broker
        self._group = group
        self._client_id = client_id
        self._mode = Mode("pop", ordered)
        self._start = start
        self._retry = retry
        self._on_loss = on_loss
        self._lock = threading.Lock()
        """Of what is wanted, of membership, and of whose turn it is."""
        self._topics: Topics = []
        self._retries = retry_topic(group)
        self._turn = random.getrandbits(16)
        self._is_member = False

    # -- what is wanted ---------------------------------------------------------------------------------------------

    def change(self, after: Mapping[str, Wanted], *, join: bool = False) -> None:
        """Want this from now on; with `join` as a member, which one stays. What comes from now on is found.

        StoreClosedError; of a member GroupInUseError, SubscriptionConflictError; NotPermittedError. Then nothing has
        changed.
        """
        with self._lock:
            self.check_open()
            joins = join or self._is_member
            if joins:
                self.check(after)
            for topic in after:
                if topic not in self.wanted:
                    self._begin(topic)
            if joins:  # last: who may not begin has not changed the group
                self._join(after)
            self.wanted = dict(after)
            self._topics = [(topic, each.filter) for topic, each in after.items()]
            listeners = self._broker.topics.on_change
            if self._topic_changed not in listeners:  # not before: who never receives is never closed, perhaps
                listeners.append(self._topic_changed)
        self.waits.ring()

    def check_open(self) -> None:
        if self.closed:
            raise StoreClosedError(f"this consumer of group {self._group!r} was closed; make another one")

    def check(self, after: Mapping[str, Wanted] | None) -> None:
        """Raise what `change` with `join` would raise because of other members. None: it is not known yet."""
        wanted = None if after is None else _subscriptions(after)
        self._broker.members.check(self._client_id, self._group, wanted, self._mode, owner=self, retry=self._retry)

    def _join(self, after: Mapping[str, Wanted]) -> None:
        self._broker.members.register(
            self._client_id, self._group, _subscriptions(after), self._mode, owner=self, retry=self._retry
        )
        self._is_member = True

    def _begin(self, topic: str) -> None:
        """Note where the group begins in each queue that is there: what comes from now on is found, and kept by
        retention until then. So in queues that come later it begins at their first message (`_pop`)."""
        config = self._broker.topics.get(topic)
        if config is None:
            _log.warning("topic %r is not there; group %s waits for it", topic, self._group)
            return
        for queue_id in range(config.read_queues):
            self._broker.start_of(self._group, topic, queue_id, self._start)

    def _topic_changed(self, topic: str) -> None:
        """Perhaps one that was not there."""
        if topic in self.wanted or topic == self._retries:
            self.waits.ring()

    def leave(self) -> None:
        """Find nothing any more, and be no member. Again is harmless."""
        with self._lock:
            self.closed = True
        if self._topic_changed in self._broker.topics.on_change:
            self._broker.topics.on_change.remove(self._topic_changed)
        self._broker.members.unregister(self._client_id, self._group, owner=self)
        self._is_member = False
        self.waits.ring()

    # -- what is found ----------------------------------------------------------------------------------------------

    def topics(self, turn: str | None = None) -> Topics | None:
        """What to look through now, `turn` first, else each first in its turn; None: it was closed. Whoever asks is a
        member from then on: errors as `change`. ConfigError when nothing is wanted."""
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

    def look(self, topics: Topics, turn: str | None, count: int, loan_s: float) -> list[Delivery]:
        """Up to `count` messages, each invisible for `loan_s`. `turn`: as given to `topics`, which is used up. What
        fails for one topic is raised only when no other has anything."""
        found: list[Delivery] = []
        failure: MQStoreError | None = None
        if turn is not None and topics[0][0] != turn:  # not wanted any more
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
                        got, is_full = self._pop(topic, only, number, loan_s)
                    except MQStoreError as error:
                        if not isinstance(error, TopicNotFoundError):  # not there yet: we hear of it when it comes
                            failure = failure or error
                        if turn is not None:
                            self.waits.pass_on(turn)
                        got, is_full = [], False
                    turn = None
                    found += got
                    if is_full:
                        more.append((topic, only))
                topics = more
        except BaseException:  # Ctrl-C: nobody will ever hold what was found
            if turn is not None:
                self.waits.pass_on(turn)
            self.give_back(found)
            raise
        if self._on_loss is not None:
            for loss in self._broker.take_losses(self._group):
                self._on_loss(*loss)
        if failure is not None and not found:
            raise failure
        return found

    def _pop(self, topic: str, only: Filter | None, count: int, loan_s: float) -> tuple[list[Delivery], bool]:
        """What a topic gives, and whether it may have more."""
        order = self._mode.ordered
        if topic == self._retries and topic not in self.wanted:
            wanted = self.wanted
            return pop_retries(self._broker, self._group, wanted, count, loan_s, order=order)
        found = self._broker.pop(
            self._group, topic, count, invisible=loan_s, filter=only, order=order, start="earliest"
        )
        return found, len(found) == count

    def give_back(self, found: list[Delivery]) -> None:
        """Unseen: they come again at once."""
        for each in found:
            try:
                self._broker.release(self._group, each.topic, [each.receipt])
            except MQStoreError as error:  # it comes again when its loan is over
                _log.warning("group %s: %s/%d could not be given back: %s", self._group, *each[3:5], error)


def _subscriptions(wanted: Mapping[str, Wanted]) -> Subscriptions:
    return {topic: each.expression for topic, each in wanted.items()}
