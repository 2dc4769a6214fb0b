"""Pull consumer: reads when it is asked to, and keeps its offsets (clients#pull-consumer).

    subscribe ──► poll: join the group ──► rebalance ──► read ──► messages, or wait for some and begin again
    assign ─────────────────────────────────────────────►

Everything happens in a call. A poll renews the locks, takes and releases queues, commits messages of earlier polls,
and reads. It has no thread. Only the loop `for message in consumer` prefetches: it hands out the messages of one poll
one by one. The broker is in this process, so a read costs less than a cache would.

Polling renews the locks. After more than 60 s without a poll, other members may have taken queues, and continue at
their committed offsets. Then these queues are dropped, `on_revoke` is called, and nothing of them is committed.

The file is long because polls, assignment, seeks and commits change the same positions under one lock.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Final

from mqstore.client.group.allocation import Strategy, strategy_named
from mqstore.client.group.groupsettings import GroupProgress, Wanted, begin_in, check_start, enter_group, place, wanted
from mqstore.client.group.membership import Membership, client_id_of
from mqstore.client.interceptors import Interceptor, Interceptors
from mqstore.client.limitedlog import LimitedLog
from mqstore.client.pull.positions import Positions, named
from mqstore.client.send.preparing import one_of
from mqstore.client.waits import Ready
from mqstore.contract import BrokerContract, Filter, Mode, Start
from mqstore.errors import ConfigError, MQStoreError, NotPermittedError, StoreClosedError
from mqstore.log.commitlog import QueueRef
from mqstore.log.message import Message
from mqstore.log.writing.log_tail import as_queue
from mqstore.logger import log as _log
from mqstore.options import Durability, Duration, check_whole, seconds
from mqstore.signalsafe import Bell, Lock

REBALANCE_MS: Final = 20_000
"""Time between rebalances without news of a change."""
UNBALANCED_MS: Final = 1_000
"""Time between rebalances while another client holds a queue of ours. Its death is not reported."""
RENEW_MS: Final = 20_000
"""Longest time that a wait leaves the locks (which last 60 s) unrenewed."""
RENEW_AGAIN_MS: Final = 1_000
"""Age of a renewal from which a poll renews."""
_FETCH_MAX: Final = 1024
Told = Callable[[frozenset[QueueRef]], None]


class PullConsumer:
    """Polls its share of the queues of topics (`subscribe`), or given queues (`assign`).
    One thread polls. Any thread may call the other methods.

        auto_commit            polls commit messages of *earlier* polls, every `auto_commit_interval` seconds, when a
                               queue is released, and at `close`; False: only `commit` does
        start                  where the group begins in a queue in which it never committed: "earliest", "latest" or an
                               aware datetime; None: the group's own start
        fetch_max              messages of one poll, unless it says otherwise: 1 to 1024
        strategy               how members share queues: "avg", "circle", or a function (`Strategy`)
        client_id              name of this consumer in the group; None: a new one

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     receipts = store.put_many("orders", [b"a", b"b"])
    ...     with store.pull_consumer("billing") as consumer:
    ...         consumer.subscribe("orders")
    ...         [message.body for message in consumer.poll()]
    ...     store.committed("billing", receipts[0].queue)
    [b'a', b'b']
    2
    """

    def __init__(
        self,
        broker: BrokerContract,
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
        """Create the group if it is new, with `start` if that is given. Raises ConfigError for bad options."""
        check_start(start)
        self.group = group
        self.client_id = client_id_of(client_id)
        """Name of this consumer in its group."""
        self._broker = broker
        self._clock = broker.clock
        self._threads_time_themselves = not broker.own_clock
        self._auto_commit = auto_commit
        self._interval_ms = seconds(auto_commit_interval, "auto_commit_interval") * 1000
        self._start = start
        self.fetch_max = check_whole("fetch_max", fetch_max, 1, _FETCH_MAX)
        """Maximum number of messages of one poll."""
        self._log = LimitedLog(f"group {group}", broker.clock)
        self._hooks = Interceptors(interceptors, self._log)
        self._seat = Membership(
            broker, group, self.client_id, Mode("queue"), strategy_named(strategy), self._shares_changed
        )
        enter_group(broker, group, start=start)

        self._lock = Lock()
        """Guards all that follows, except while a poll waits. Passed on to callbacks, which may seek and commit."""
        self._wanted: dict[str, Wanted] = {}
        self._assigns = False
        self._joined = False
        self._on_assign: Told | None = None
        self._on_revoke: Told | None = None
        # Not told of the topics that exist (`enter`), because `subscribe` begins in their queues at once.
        self._progress = GroupProgress(broker, group, self.client_id, start)
        self._positions = Positions(broker, group, self._progress, self._hooks, self._filter_of, auto_commit)
        self._lost: set[QueueRef] = set()
        """Queues that were found lost, and not yet passed to `on_revoke`."""
        self.caller: Callable[[], object] = threading.current_thread
        """Returns the identity of the caller. `mqstore.aio` replaces it: there one thread makes all calls."""
        self._poller: object = None
        """Caller that polled last."""
        self._polling = False
        now_ms = self._clock.monotonic_ms()
        self._rebalance_ms = self._renewed_ms = self._committed_ms = now_ms

        self._bell = Lock()
        """Guards the three below, for threads with news, which must not wait for a poll. Taken last."""
        self._changed = False
        self._closed = False
        self._waiting: set[Ready] = set()

    # -- subscriptions ----------------------------------------------------------------------------------------------

    def subscribe(
        self,
        *topics: str,
        tags: str = "*",
        sql: str | None = None,
        on_assign: Told | None = None,
        on_revoke: Told | None = None,
    ) -> None:
        """Read a share of the queues of these topics, too. Other members read the other queues.
        The first poll makes the consumer a member of the group. Before that it affects nobody.

        Messages with one of `tags` ("paid || refunded"), or for which the SQL92 expression over their properties holds,
        are returned. The others are skipped, for the whole group. A topic that is already subscribed gets the new
        expression. A topic that does not exist yet is awaited.

        Polls and `close` call `on_assign` with new queues and `on_revoke` with queues that leave. They replace earlier
        ones. `on_assign` may seek, and `on_revoke` may commit the rest, unless the queue was lost. Raises ConfigError
        after `assign` or without a topic, InvalidMessageError for a bad name, FilterError, and NotPermittedError.
        Raises SubscriptionConflictError for a member that is not alone, since all members of a group subscribe alike.
        After an error nothing has changed.
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
                    begin_in(self._broker, self.group, topic, self._start)
            except BaseException:
                if self._joined:
                    self._join(before)
                raise
            self._wanted = after
            self._on_assign = on_assign or self._on_assign
            self._on_revoke = on_revoke or self._on_revoke
        self._shares_changed()

    def unsubscribe(self, *topics: str) -> None:
        """Stop reading these topics, or all if none is named. The next poll releases their queues.
        Raises the errors of `subscribe`."""
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
        """Read these queues and no others, without membership in the group, locks, or rebalancing.
        Other consumers may read them too. Queues that it had already keep their positions.

        Raises ConfigError after `subscribe` or for an unknown queue, TopicNotFoundError, and NotPermittedError. Then
        nothing has changed.
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
                self._tell(self._hooks.on_assign, None, frozenset(begins))
        self._ring()

    def _join(self, wanted: Mapping[str, Wanted]) -> None:
        self._seat.join({topic: each.expression for topic, each in wanted.items()})
        self._joined = True
        self._renewed_ms = self._clock.monotonic_ms()

    # -- messages ---------------------------------------------------------------------------------------------------

    def poll(self, timeout: Duration | None = 5.0, max_messages: int | None = None) -> list[Message]:
        """Return up to `max_messages` messages, or [] after `timeout` seconds without any.
        With `max_messages` None the limit is `fetch_max`. With `timeout` None it waits for ever. If the consumer is
        closed meanwhile, it returns []. Messages of a queue are in order, and continue where the last poll ended.
        Queues take turns.

        A poll means that the caller is done with the messages of earlier polls. `timeout=0` looks once and does not
        wait.

        Raises ConfigError if nothing is subscribed or assigned. The first poll raises the errors of `subscribe`, and
        GroupInUseError if the group is consumed otherwise, or has a member of this name. Passes on errors of
        `on_assign` and `on_revoke`, StoreClosedError, and errors of a read, which the next poll repeats.
        """
        count = self._asked(max_messages)
        return self._take(math.inf if timeout is None else seconds(timeout, "timeout"), count, count)

    def _asked(self, max_messages: int | None) -> int:
        """Return the limit of a `poll` that begins now, for `mqstore.aio`, too."""
        count = self.fetch_max if max_messages is None else check_whole("max_messages", max_messages, 1)
        with self._lock:
            self._check_open()
        return count

    def __iter__(self) -> Iterator[Message]:
        """Yield messages one at a time, waiting for ever, until the consumer is closed.
        A request for the next message means that the caller is done with the last. Raises the errors of `poll`."""
        while not self._closed:
            yield from self._take(math.inf, self.fetch_max, 1)

    def _take(self, timeout_s: float, read: int, give: int) -> list[Message]:
        """Return at most `give` messages: prefetched ones, else of up to `read` that are read or waited for.

        `poll` and the iterators, including those of `mqstore.aio`, call it. An application calls `poll`.
        """
        end_ms = self._clock.monotonic_ms() + timeout_s * 1000
        begun = False
        while True:
            with self._lock:
                if self._closed:
                    return []
                if self._polling:
                    raise ConfigError("poll was called from its own callback; return first")
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
                    return self._positions.deliver(give)
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

    def _when_ready(self, callback: Callable[[], object]) -> Ready:
        """Call `callback()` once, under the rules of `Waits.add`, when `poll(timeout=0)` may find messages or work."""
        with self._lock:
            self._check_open()
            return self._park(callback, self._ms_to_duty())

    def _ms_to_duty(self) -> float:
        """Return the milliseconds until there is work even without messages."""
        due_ms = math.inf
        if self._joined:
            due_ms = min(self._rebalance_ms, self._renewed_ms + RENEW_MS)
        if self._auto_commit and self._positions.uncommitted:
            due_ms = min(due_ms, self._committed_ms + self._interval_ms)
        return max(0, due_ms - self._clock.monotonic_ms())

    def _park(self, callback: Callable[[], object], timeout_ms: float | None) -> Ready:
        """Register `callback`. The caller holds the lock, so that no position moves after the last look."""
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
                # A deleted topic may still have units, which would call back again and again.
                if not position.paused and not position.missing:
                    ready.park(self._broker, *position.queue, position.read, self._filter_of(position.queue.topic))
            if timeout_ms is not None and timeout_ms != math.inf:
                # Wait for the time under a name that no topic can have.
                ready.park(self._broker, f"@{self.client_id}", 0, 0, timeout_s=timeout_ms / 1000)
        except BaseException:
            ready.cancel()
            raise
        return ready

    def _ring(self) -> None:
        """Call all waiting callbacks, since there is news."""
        with self._bell:
            waiting = list(self._waiting)
        for ready in waiting:
            ready.fire()

    def _shares_changed(self) -> None:
        """Note that shares have changed. Any thread may call it. It does not wait."""
        with self._bell:
            self._changed = True
        self._ring()

    # -- duties -----------------------------------------------------------------------------------------------------

    def _come_back(self) -> None:
        """Settle the returned messages, if the caller is the one that polls."""
        if self._poller is self.caller():
            self._positions.settle()

    def _do_duties(self) -> None:
        now_ms = self._clock.monotonic_ms()
        if self._wanted:
            if not self._joined:
                self._join(self._wanted)
            elif now_ms - self._renewed_ms >= RENEW_AGAIN_MS:
                self._renew()
            self._log_lost()
            if self._changed or now_ms >= self._rebalance_ms:
                self._rebalance(now_ms)
        elif not self._positions.by_queue:
            raise ConfigError("there is nothing to poll: subscribe to a topic, or assign queues")
        if self._auto_commit and self._positions.uncommitted and now_ms - self._committed_ms >= self._interval_ms:
            self._committed_ms = now_ms
            self._positions.save()

    def _renew(self) -> None:
        """Renew the locks, and drop queues that others have taken."""
        lost = self._seat.renew()
        self._renewed_ms = self._clock.monotonic_ms()
        if lost:
            self._positions.drop(lost)
            self._lost |= lost
            self._shares_changed()

    def _log_lost(self) -> None:
        if self._lost:
            lost, self._lost = frozenset(self._lost), set()
            _log.warning(
                "%s of group %s did not poll for 60 s: other members have taken %s",
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
            if not self._joined:  # a callback may have closed this, or unsubscribed
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
        """Return where to continue in queues that were taken. Queues without a known start are released."""
        begins = {}
        for queue in queues:
            try:
                begins[queue] = self._progress.begin(queue)
            except MQStoreError as error:
                self._seat.give([queue])
                _log.warning(
                    "group %s cannot begin in queue %d of %r: %s", self.group, queue.queue_id, *queue[:1], error
                )
        return begins

    def _revoke(self, queues: Iterable[QueueRef]) -> None:
        """Release queues, after a commit of the settled messages and the calls of `on_revoke`."""
        if not (going := frozenset(queues)):
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
        self._lock.lend(partial(self._hooks.notify, hooks, queues))
        if told is not None:
            self._lock.lend(partial(told, queues))

    # -- positions --------------------------------------------------------------------------------------------------

    def assignment(self) -> frozenset[QueueRef]:
        """Return the queues that it reads now."""
        with self._lock:
            return frozenset(self._positions.by_queue)

    def position(self, queue: QueueRef) -> int:
        """Return the offset of the next poll. Raises ConfigError for a queue that is not ours."""
        with self._lock:
            return self._positions.own(queue).next

    def committed(self, queue: QueueRef) -> int | None:
        """Return the group's committed offset in any queue, or None if there is none."""
        return self._progress.committed(queue)

    def commit(self, offsets: Mapping[QueueRef, int] | None = None, *, durability: Durability | None = None) -> None:
        """Commit all that polls returned, or everything below `offsets`, those of the next messages.
        With "flush" it is on disk when this returns.

        Raises ConfigError for a queue that is not ours, and OffsetOutOfRangeError. Then nothing is committed. Raises
        NotPermittedError if queues were lost, to another member or with a server. The others are committed.
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
                self._broker.save_offsets()
                if self._joined:
                    self._renew()  # a server that was started again meanwhile may have given queues to others
            if self._lost:
                raise NotPermittedError(
                    f"{named(self._lost)}: this member of group {self.group!r} has lost these queues, since it did not "
                    f"poll for 60 s, or its server was started again; their uncommitted messages are redelivered"
                )

    def seek(self, queue: QueueRef, to: int | Start) -> None:
        """Continue at an offset, at "earliest", "latest", or the first message stored at or after a datetime.
        The datetime must be aware. A poll that waits notices it, too. Raises ConfigError for a queue that is not ours
        or a bad place, OffsetOutOfRangeError (with the bounds) for an offset.
        """
        with self._lock:
            self._check_open()
            position = self._positions.own(queue)
            target = place(self._broker, position.queue, to)
            self._positions.read_again(position)
            self._positions.move(position, target)
        self._ring()

    def pause(self, *queues: QueueRef) -> None:
        """Stop reading these queues, or all if none is named, until `resume`. They stay this consumer's.
        Raises ConfigError for a queue that is not ours."""
        with self._lock:
            for position in self._positions.chosen(queues):
                position.paused = True
                self._positions.read_again(position)
        self._ring()

    def resume(self, *queues: QueueRef) -> None:
        """Read these queues again, or all if none is named. Raises ConfigError as `pause` does."""
        with self._lock:
            for position in self._positions.chosen(queues):
                position.paused = False
        self._ring()

    # -- the end ----------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"this consumer of group {self.group!r} was closed; make another one")

    def close(self, *, done: bool = True) -> None:
        """Stop reading and leave the group. A waiting `poll` returns []. Repeating it is harmless.

        With auto_commit, messages that polls returned are committed. The messages of the last poll (in a loop: the last
        message) are redelivered instead if `done` is False or another thread than the polling one closes. Nobody knows
        then if they are done. A `with` block that ends by an exception closes with `done=False`.
        """
        if self._lock.is_inherited:
            return
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
        """Release all queues, and leave the group."""
        try:
            if self._joined:
                self._renew()  # queues that others have taken must not be committed
        except StoreClosedError:
            pass  # the store is closed for all, and the commit below reports it
        except MQStoreError as error:  # another client has its seat
            _log.warning("group %s: no offset of %s committed (%s)", self.group, named(self._positions.by_queue), error)
            self._lost |= self._positions.by_queue.keys()
            self._positions.drop(self._lost)
        try:
            self._log_lost()
            self._revoke(self._positions.by_queue)
        except StoreClosedError:
            _log.warning("group %s: the store was closed before its consumer; messages are redelivered", self.group)
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
