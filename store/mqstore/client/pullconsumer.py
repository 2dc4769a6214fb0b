"""A consumer that reads when it is asked to, and keeps track of how far it has come (clients#pull-consumer).

    subscribe ──► poll: join the group ──► rebalance ──► read ──► messages, or wait for some and begin again
    assign ─────────────────────────────────────────────►

Nothing happens but in a call: a poll renews the locks, takes and gives queues, commits what earlier polls returned, and
reads; there is no thread, and nothing is read ahead (but by the loop `for message in consumer`, which hands out one
poll's messages one by one). The broker is in this process: a read costs less than a cache would.

Locks are kept by polling. Who polls again after more than 60 s may find queues gone: another has gone on from what was
committed. Then they are dropped as they are, `on_revoke` is told, and nothing of them is committed.

The file is long because polls, assignment, seeks and commits change the same positions under one lock.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Final, TypedDict

from mqstore.broker.broker import Broker
from mqstore.broker.filters import Filter
from mqstore.broker.members import Mode
from mqstore.client.allocation import Strategy, strategy_named
from mqstore.client.groupsettings import enter_group
from mqstore.client.interceptors import Interceptor, Interceptors
from mqstore.client.limitedlog import LimitedLog
from mqstore.client.membership import Membership, client_id_of
from mqstore.client.progress import Start, check_start, place
from mqstore.client.pullpositions import Positions, named
from mqstore.client.sendrules import one_of
from mqstore.client.waits import Ready
from mqstore.client.wanted import Wanted, wanted
from mqstore.errors import (
    ConfigError,
    MQStoreError,
    NotPermittedError,
    StoreClosedError,
)
from mqstore.log.commitlog import QueueRef
from mqstore.log.message import Message
from mqstore.log.tip import as_queue
from mqstore.options import Durability, Duration, check_whole, seconds
from mqstore.signalsafe import Bell

__all__ = ["PullConsumer", "PullConsumerOptions"]

_log = logging.getLogger("mqstore")

REBALANCE_MS: Final = 20_000
"""How often shares are looked at though nobody said that they changed."""
UNBALANCED_MS: Final = 1_000
"""The same while a queue of ours is still another's: of an owner who died nobody tells."""
RENEW_MS: Final = 20_000
"""How long a wait may leave the locks (which last 60 s) alone."""
RENEW_AGAIN_MS: Final = 1_000
"""How old a renewal must be for a poll to renew."""
_FETCH_MAX: Final = 1024
Told = Callable[[frozenset[QueueRef]], None]


class PullConsumerOptions(TypedDict, total=False):
    """Options of a `PullConsumer`, which has their meanings and defaults."""

    auto_commit: bool
    auto_commit_interval: Duration
    start: Start | None
    fetch_max: int
    strategy: str | Strategy
    client_id: str | None
    interceptors: Sequence[Interceptor]


class PullConsumer:
    """Polls the queues it has a share of (`subscribe`), or those it is told (`assign`). One thread polls; the other
    methods may be called by any.

        auto_commit            polls commit what *earlier* polls returned, every `auto_commit_interval` seconds, when a
                               queue is given away, and at `close`; False: only `commit` does
        start                  where the group begins in a queue in which it never committed: "earliest", "latest" or an
                               aware datetime; None: as the group has it
        fetch_max              messages of one poll, unless it says otherwise: 1 to 1024
        strategy               how members share queues: "avg", "circle", or a function (`Strategy`)
        client_id              by which the group knows it; None: made up

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, Broker(mqstore.engine.MessageStore(folder)) as broker:
    ...     receipts = broker.put_many("orders", [b"a", b"b"])
    ...     with PullConsumer(broker, "billing") as consumer:
    ...         consumer.subscribe("orders")
    ...         [message.body for message in consumer.poll()]
    ...     broker.committed("billing", *receipts[0].queue)
    [b'a', b'b']
    2
    """

    def __init__(
        self,
        broker: Broker,
        group: str,
        *,
        auto_commit: bool = True,
        auto_commit_interval: Duration = 5.0,
        start: Start | None = None,
        fetch_max: int = 32,
        strategy: str | Strategy = "avg",
        client_id: str | None = None,
        interceptors: Sequence[Interceptor] = (),
    ) -> None:
        """The group is created if it is not there, with `start` if that is given. ConfigError for an option that cannot
        be."""
        check_start(start)
        self.group = group
        self.client_id = client_id_of(client_id)
        """By which the group knows this consumer."""
        self._broker = broker
        self._clock = broker.store.clock
        self._threads_time_themselves = broker.store.config.clock is None
        self._auto_commit = auto_commit
        self._interval_ms = seconds(auto_commit_interval, "auto_commit_interval") * 1000
        self._start = start
        self.fetch_max = check_whole("fetch_max", fetch_max, 1, _FETCH_MAX)
        """Messages of one poll at most."""
        self._log = LimitedLog(f"group {group}", broker.store.clock)
        self._hooks = Interceptors(interceptors, self._log)
        self._seat = Membership(
            broker, group, self.client_id, Mode("queue"), strategy_named(strategy), self._shares_changed
        )
        enter_group(broker, group, start=start)

        self._lock = threading.RLock()
        """Of all that follows; not held while a poll waits. Reentrant: what is told of queues may seek and commit."""
        self._wanted: dict[str, Wanted] = {}
        self._assigns = False
        self._joined = False
        self._on_assign: Told | None = None
        self._on_revoke: Told | None = None
        self._positions = Positions(broker, group, self.client_id, self._hooks, self._filter_of)
        self._lost: set[QueueRef] = set()
        """Found gone, and `on_revoke` was not told yet."""
        self.caller: Callable[[], object] = threading.current_thread
        """Returns the identity of the caller. `mqstore.aio` replaces it, since one thread calls for all tasks there."""
        self._poller: object = None
        """The caller that polled last."""
        self._polling = False
        now_ms = self._clock.monotonic_ms()
        self._rebalance_ms = self._renewed_ms = self._committed_ms = now_ms

        self._bell = threading.Lock()
        """Of the three below: for those who bring news, and must not wait for a poll. Taken last."""
        self._changed = False
        self._closed = False
        self._waiting: set[Ready] = set()

    # -- what is read -----------------------------------------------------------------------------------------------

    def subscribe(
        self,
        *topics: str,
        tags: str = "*",
        sql: str | None = None,
        on_assign: Told | None = None,
        on_revoke: Told | None = None,
    ) -> None:
        """Read a share of the queues of these topics, too, the other queues being the other members'. With the first
        poll the consumer becomes a member of the group; until then it keeps nobody from anything.

        Messages with one of `tags` ("paid || refunded"), or for which the SQL92 expression over their properties holds,
        are returned; the others are passed over, for the whole group. Topics subscribed to already: by this expression
        from now on. A topic that is not there yet is waited for.

        `on_assign` and `on_revoke`, which replace earlier ones, are called by polls (and `close`) with queues that came
        and that go: what comes may be sought in, of what goes the rest may be committed, unless it was lost.

        ConfigError after `assign`, or without a topic; InvalidMessageError for a bad name, FilterError,
        NotPermittedError; once it is a member SubscriptionConflictError: members of a group subscribe alike, so then
        only one that is alone may change. Nothing has changed then.
        """
        if not topics:
            raise ConfigError("subscribe takes at least one topic")
        parsed = {topic: wanted(self._broker, topic, tags, sql) for topic in topics}
        with self._lock:
            self._check_open()
            if self._assigns:
                raise ConfigError("this consumer was assigned queues by hand; make another one to subscribe")
            before, after = self._wanted, {**self._wanted, **parsed}
            if self._joined:
                self._join(after)
            try:
                for topic in topics:
                    self._begin(topic)
            except BaseException:
                if self._joined:
                    self._join(before)
                raise
            self._wanted = after
            self._on_assign = on_assign or self._on_assign
            self._on_revoke = on_revoke or self._on_revoke
        self._shares_changed()

    def unsubscribe(self, *topics: str) -> None:
        """Read of these topics (none given: of all) no more; the next poll gives their queues away. Errors as
        `subscribe`."""
        with self._lock:
            self._check_open()
            wanted = {topic: each for topic, each in self._wanted.items() if topics and topic not in topics}
            if self._joined and wanted:
                self._join(wanted)
            self._wanted = wanted
            if not wanted:
                self._come_back()
                self._leave()
        self._shares_changed()

    def assign(self, *queues: QueueRef) -> None:
        """Read these queues and no others, whoever else reads them: no group membership, no locks, no rebalancing. Of
        those it had, positions stay.

        ConfigError after `subscribe`, or for a queue that is not there; TopicNotFoundError, NotPermittedError. Nothing
        has changed then.
        """
        with self._lock:
            self._check_open()
            if self._wanted or self._joined:
                raise ConfigError("this consumer has subscribed; make another one to assign queues by hand")
            wanted = [as_queue(queue) for queue in queues]
            begins = {
                queue: self._broker.start_of(self.group, *queue, self._start)
                for queue in dict.fromkeys(wanted)
                if queue not in self._positions.by_queue
            }
            self._come_back()
            self._revoke(self._positions.by_queue.keys() - set(wanted))
            self._assigns = True
            self._positions.add(begins)
            if begins:
                self._hooks.tell(self._hooks.on_assign, frozenset(begins))
        self._ring()

    def _begin(self, topic: str) -> None:
        """Note where the group begins in each queue that is there, so that what comes from now on is read, and kept by
        retention until then."""
        config = self._broker.topics.get(topic)
        for queue_id in range(0 if config is None else config.read_queues):
            self._broker.start_of(self.group, topic, queue_id, self._start)

    def _join(self, wanted: Mapping[str, Wanted]) -> None:
        self._seat.join({topic: each.expression for topic, each in wanted.items()})
        self._joined = True
        self._renewed_ms = self._clock.monotonic_ms()

    # -- messages ---------------------------------------------------------------------------------------------------

    def poll(self, timeout: Duration | None = 5.0, max_messages: int | None = None) -> list[Message]:
        """Up to `max_messages` (None: `fetch_max`) messages; [] when none came for `timeout` seconds (None: for ever),
        or when the consumer is closed meanwhile. Of each queue they are in order, and go on where the last poll ended;
        queues take turns.

        A poll says that the caller is done with what polls before it returned. `timeout=0` looks once and does not
        wait.

        Raises ConfigError when nothing is subscribed to or assigned; with the first poll as `subscribe`, and
        GroupInUseError when the group is consumed otherwise, or has a member of this name; what `on_assign` and
        `on_revoke` raise; StoreClosedError; and what a read raises: it is tried again by the next poll.
        """
        count = self.fetch_max if max_messages is None else check_whole("max_messages", max_messages, 1)
        with self._lock:
            self._check_open()
        return self.take(math.inf if timeout is None else seconds(timeout, "timeout"), count, count)

    def __iter__(self) -> Iterator[Message]:
        """Messages one at a time, waiting for ever, until the consumer is closed. Asking for the next one says that the
        caller is done with the last. Errors as `poll`."""
        while not self._closed:
            yield from self.take(math.inf, self.fetch_max, 1)

    def take(self, timeout_s: float, read: int, give: int) -> list[Message]:
        """Return at most `give` messages: prefetched ones, else of up to `read` that are read now or waited for.

        `poll` and the iterators are made of it, also those of `mqstore.aio`; an application calls `poll`.
        """
        end_ms = self._clock.monotonic_ms() + timeout_s * 1000
        begun = False
        while True:
            with self._lock:
                if self._closed:
                    return []
                if self._polling:
                    raise ConfigError("poll was called by what poll has called; return first")
                self._polling = True
                try:
                    if not begun:
                        begun = True
                        self._poller = self.caller()
                        self._come_back()
                    self._do_duties()
                    goes_on = not self._positions.ahead and self._positions.read_some(read, self._assigns)
                finally:
                    self._polling = False
                if self._positions.ahead:
                    return self._positions.hand_out(give)
                left_ms = end_ms - self._clock.monotonic_ms()
                if left_ms <= 0:
                    return []
                if goes_on:
                    continue
                bell = Bell()
                left_ms = min(left_ms, self._ms_to_duty())
                wait = self._park(bell.ring, None if self._threads_time_themselves else left_ms)
            try:
                bell.wait(left_ms / 1000 if self._threads_time_themselves else None)
            finally:
                wait.cancel()

    def _filter_of(self, topic: str) -> Filter | None:
        wanted = self._wanted.get(topic)
        return None if wanted is None else wanted.filter

    # -- waiting ----------------------------------------------------------------------------------------------------

    def when_ready(self, callback: Callable[[], object]) -> Ready:
        """Have `callback()` called once, when `poll(timeout=0)` may find messages or has something else to do: for who
        waits without a thread, such as an event loop.

        It is called by the store's housekeeper, by who brought the news, or right here, and must be quick: let it hand
        on the news (`loop.call_soon_threadsafe`) and return. Poll first, then register, then poll when called: what
        comes in between calls. StoreBusyError with 100 000 waiting, StoreClosedError.
        """
        with self._lock:
            self._check_open()
            return self._park(callback, self._ms_to_duty())

    def _ms_to_duty(self) -> float:
        """How long it may wait before there is something to do though no message comes."""
        due_ms = math.inf
        if self._joined:
            due_ms = min(self._rebalance_ms, self._renewed_ms + RENEW_MS)
        if self._auto_commit and self._positions.uncommitted:
            due_ms = min(due_ms, self._committed_ms + self._interval_ms)
        return max(0, due_ms - self._clock.monotonic_ms())

    def _park(self, callback: Callable[[], object], timeout_ms: float | None) -> Ready:
        """Under the lock, so that nobody moves a position between the look and the parking."""
        ready = Ready(callback, self._bell, self._waiting)
        with self._bell:
            news = self._changed or self._closed or bool(self._positions.ahead)
            if not news:
                self._waiting.add(ready)
        if news:
            ready.fire()
            return ready
        try:
            for position in self._positions.turns:
                # Of a topic that is gone units may be there all the same: it would be called again and again.
                if not position.paused and not position.missing:
                    ready.park(self._broker, *position.queue, position.read, self._filter_of(position.queue.topic))
            if timeout_ms is not None and timeout_ms != math.inf:
                # A place of its own to wait for the time: no topic bears such a name.
                ready.park(self._broker, f"@{self.client_id}", 0, 0, timeout_s=timeout_ms / 1000)
        except BaseException:
            ready.cancel()
            raise
        return ready

    def _ring(self) -> None:
        """There is something new to look at."""
        with self._bell:
            waiting = list(self._waiting)
        for ready in waiting:
            ready.fire()

    def _shares_changed(self) -> None:
        """From any thread, at any time: it waits for nobody."""
        with self._bell:
            self._changed = True
        self._ring()

    # -- duties -----------------------------------------------------------------------------------------------------

    def _come_back(self) -> None:
        """The caller is done with what was returned, if it is the one who polls."""
        if self._poller is self.caller():
            self._positions.settle()

    def _do_duties(self) -> None:
        now_ms = self._clock.monotonic_ms()
        if self._wanted:
            if not self._joined:
                self._join(self._wanted)
            elif now_ms - self._renewed_ms >= RENEW_AGAIN_MS:
                self._renew()
            self._tell_lost()
            if self._changed or now_ms >= self._rebalance_ms:
                self._rebalance(now_ms)
        elif not self._positions.by_queue:
            raise ConfigError("there is nothing to poll: subscribe to a topic, or assign queues")
        if self._auto_commit and self._positions.uncommitted and now_ms - self._committed_ms >= self._interval_ms:
            self._committed_ms = now_ms
            self._positions.commit_done(self._positions.uncommitted)

    def _renew(self) -> None:
        """Renew the locks, and drop what others have by now."""
        lost = self._seat.renew()
        self._renewed_ms = self._clock.monotonic_ms()
        if lost:
            self._positions.drop(lost)
            self._lost |= lost
            self._shares_changed()

    def _tell_lost(self) -> None:
        if self._lost:
            lost, self._lost = frozenset(self._lost), set()
            _log.warning(
                "%s of group %s was away for more than 60 s: others go on with %s",
                self.client_id,
                self.group,
                named(lost),
            )
            self._tell(self._hooks.on_revoke, self._on_revoke, lost)

    def _rebalance(self, now_ms: int) -> None:
        with self._bell:
            self._changed = False
        try:
            shares = self._seat.share()
            mine = frozenset().union(*shares.values())
            self._revoke(
                queue
                for queue in list(self._positions.by_queue)
                if queue not in mine and (queue.topic in shares or queue.topic not in self._wanted)
            )
            if not self._joined:  # what was told may have closed this, or unsubscribed
                return
            wanted = mine - self._positions.by_queue.keys()
            begins = self._starts_of(self._seat.take(wanted)) if wanted else {}
            self._positions.add(begins)
        except BaseException:
            with self._bell:
                self._changed = True
            raise
        self._rebalance_ms = now_ms + (REBALANCE_MS if begins.keys() == wanted else UNBALANCED_MS)
        if begins:
            self._tell(self._hooks.on_assign, self._on_assign, frozenset(begins))

    def _starts_of(self, queues: Iterable[QueueRef]) -> dict[QueueRef, int]:
        """Where to go on in queues that were taken. What is not known of is given back."""
        begins = {}
        for queue in queues:
            try:
                # What came into being after `subscribe` came after "latest".
                latest = (self._start or self._broker.groups.need(self.group).start) == "latest"
                start = "earliest" if latest else self._start
                self._broker.end_pops(self.group, *queue)
                begins[queue] = self._broker.start_of(self.group, *queue, start)
            except MQStoreError as error:
                self._seat.give([queue])
                _log.warning(
                    "group %s cannot begin in queue %d of %r: %s", self.group, queue.queue_id, *queue[:1], error
                )
        return begins

    def _revoke(self, queues: Iterable[QueueRef]) -> None:
        """Give queues away, after what is done was committed, and who wants to know was told."""
        going = frozenset(queues)
        if not going:
            return
        if self._auto_commit:
            self._positions.commit_done(
                [position for position in self._positions.uncommitted if position.queue in going]
            )
        try:
            self._tell(self._hooks.on_revoke, self._on_revoke, going)
        finally:
            self._positions.drop(going)
            if self._joined:
                self._seat.give(going)

    def _tell(self, hooks: Sequence[Told], told: Told | None, queues: frozenset[QueueRef]) -> None:
        self._hooks.tell(hooks, queues)
        if told is not None:
            told(queues)

    # -- positions --------------------------------------------------------------------------------------------------

    def assignment(self) -> frozenset[QueueRef]:
        """The queues that it reads now."""
        with self._lock:
            return frozenset(self._positions.by_queue)

    def position(self, queue: QueueRef) -> int:
        """Offset from which the next poll goes on. ConfigError for a queue that it does not have."""
        with self._lock:
            return self._positions.own(queue).next

    def committed(self, queue: QueueRef) -> int | None:
        """Where the group goes on in a queue, be it this consumer's or not; None: it never committed."""
        return self._broker.committed(self.group, *queue)

    def commit(self, offsets: Mapping[QueueRef, int] | None = None, *, durability: Durability | None = None) -> None:
        """Note that the group has consumed all that polls returned; or everything below `offsets`, which are those of
        the next messages to come. "flush": on disk when this returns.

        ConfigError for a queue that it does not have, OffsetOutOfRangeError: nothing was committed then.
        NotPermittedError when queues were lost to another member: the others are committed.
        """
        one_of(durability, "durability", (None, "append", "flush"))
        with self._lock:
            self._check_open()
            if self._joined:
                self._renew()
            if offsets is None:
                self._positions.settle()
                self._positions.commit_all()
            else:
                for position, offset in self._positions.checked(offsets, self._lost).items():
                    self._positions.commit(position, offset)
            if durability == "flush":
                self._broker.save()
            if self._lost:
                raise NotPermittedError(
                    f"{named(self._lost)}: other members of group {self.group!r} go on with these since this one did "
                    f"not poll for 60 s; what was returned of them is returned to those again"
                )

    def seek(self, queue: QueueRef, to: int | Start) -> None:
        """Go on at an offset, at "earliest", at "latest", or at the first message stored at or after an aware datetime.
        Takes effect in a poll that waits, too.

        ConfigError for a queue that it does not have, or a place that is none; OffsetOutOfRangeError, with the bounds.
        """
        with self._lock:
            self._check_open()
            position = self._positions.own(queue)
            target = place(self._broker, position.queue, to)
            self._positions.read_again(position)
            self._positions.move(position, target)
        self._ring()

    def pause(self, *queues: QueueRef) -> None:
        """Read these queues (none given: all that it has) no more until `resume`. They stay this consumer's.
        ConfigError for a queue that it does not have."""
        with self._lock:
            for position in self._positions.chosen(queues):
                position.paused = True
                self._positions.read_again(position)
        self._ring()

    def resume(self, *queues: QueueRef) -> None:
        """Go on with these queues (none given: all). ConfigError as `pause`."""
        with self._lock:
            for position in self._positions.chosen(queues):
                position.paused = False
        self._ring()

    def paused(self) -> frozenset[QueueRef]:
        """The queues that are not read until `resume`."""
        with self._lock:
            return frozenset(position.queue for position in self._positions.turns if position.paused)

    # -- the end ----------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether it receives no more."""
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"this consumer of group {self.group!r} was closed; make another one")

    def close(self, *, done: bool = True) -> None:
        """Read no more, and leave the group; who waits in `poll` gets []. Again is harmless.

        With auto_commit what polls returned is committed. Not what the last poll returned (of the loop: the last
        message) when `done` is False, or another thread than the one that polled closes, for nobody knows whether it is
        done; it comes again. `with` that is left by an exception closes so.
        """
        with self._bell:
            if self._closed:
                return
            self._closed = True
        self._ring()
        with self._lock:
            if done:
                self._come_back()
            self._leave()
        self._log.close()

    def _leave(self) -> None:
        """Give everything away, and be no member."""
        try:
            if self._joined:
                self._renew()  # what others have by now must not be committed
        except StoreClosedError:
            pass  # nobody else in this process has it then, and the commit below says what becomes of it
        except MQStoreError as error:  # its seat is another's
            _log.warning("group %s: nothing is committed of %s: %s", self.group, named(self._positions.by_queue), error)
            self._lost |= self._positions.by_queue.keys()
            self._positions.drop(self._lost)
        try:
            self._tell_lost()
            self._revoke(self._positions.by_queue)
        except StoreClosedError:
            _log.warning("group %s: the store was closed before this consumer: what it had comes again", self.group)
        finally:
            self._positions.drop(list(self._positions.by_queue))
            self._joined = False
            self._seat.leave()

    def __enter__(self) -> PullConsumer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(done=error is None)

    def __repr__(self) -> str:
        topics = ", ".join(sorted(self._wanted)) or ("queues by hand" if self._assigns else "nothing")
        return f"<PullConsumer {self.client_id} of {self.group!r} for {topics}{', closed' if self._closed else ''}>"
