"""The one object that an application opens: a store directory with everything on it.

    Store ── put, put_many, recall, queue, dead_letters, commit_offset ...  the broker (mode "rw")
      └───── read, iter, find, get, to_arrow, offsets, verify ...           the log (either mode)

It keeps nothing of its own: what it adds to the two is that there is one of them to open and to close, and names that
need no knowledge of rooms. `broker` and `log` are there for whoever wants all that they can.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NoReturn, Unpack
from weakref import WeakSet

from mqstore.broker.broker import Broker
from mqstore.broker.configchecks import CONFIG_CHECKS
from mqstore.broker.deadletters import DeadLetters
from mqstore.broker.names import is_system_topic
from mqstore.broker.road import SendOptions
from mqstore.client.producer import Producer, ProducerOptions
from mqstore.client.pullconsumer import PullConsumer, PullConsumerOptions
from mqstore.client.pushconsumer import PushConsumer, PushConsumerOptions
from mqstore.client.simpleconsumer import SimpleConsumer, SimpleConsumerOptions
from mqstore.closing import Closing
from mqstore.errors import ConfigError, OffsetOutOfRangeError, ReadOnlyStoreError, TopicNotFoundError
from mqstore.log.commitlog import QueueRef, SendReceipt
from mqstore.log.message import Message
from mqstore.log.outgoing import Body, OutgoingMessage
from mqstore.log.reader import to_ms
from mqstore.log.readonly import ReadOnlyMessageStore
from mqstore.log.recovery.report import Finding, RecoveryReport
from mqstore.log.snapshot.take import SnapshotReport, snapshot_store
from mqstore.log.stats import StoreStats
from mqstore.log.store import MessageStore
from mqstore.log.writer import Sending, compiled_put
from mqstore.options import Durability, Duration, Profile, StoreConfig, check_durability, seconds
from mqstore.queue import Queue, QueueOptions

__all__ = ["Store"]

_log = logging.getLogger("mqstore")

_LOOK_S = 0.02
_EXIT_S = 5.0
"""What handlers are given at the end of the process."""

_open: dict[Store, None] = {}
"""Those opened for writing. Not weakly: the threads of its broker and its consumers go on when nobody holds a store any
more, and somebody has to stop them and write what they have come to."""


def _remember(store: Store) -> None:
    for each in list(_open):
        if each.closed:  # by way of its broker or its log
            _open.pop(each, None)
    _open[store] = None


@atexit.register
def _close_all() -> None:
    stores = [store for store in list(_open) if not store.closed]
    until = time.monotonic() + _EXIT_S  # for all of them: who has several waits no longer
    for store in stores:
        store.halt()
    for store in stores:
        store.close_halted(_EXIT_S, until)


def _in_time(end: Callable[[float], object], until: float) -> None:
    end(max(0.0, until - time.monotonic()))


class Store(Closing, Sending):
    """A store directory, opened by `mqstore.open`. Thread-safe.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     receipt = store.put("orders", b"hello", keys="o-1")
    ...     [message] = store.read(*receipt.queue, receipt.offset)
    ...     jobs = store.queue("jobs")
    ...     jobs.put(b"resize 1.png")
    ...     with jobs.get() as task:
    ...         message.body, message.keys, task.value
    (b'hello', ('o-1',), b'resize 1.png')
    """

    log: MessageStore | ReadOnlyMessageStore
    """The message store: every record, unit and offset. Which of the two depends on the mode."""

    def __init__(
        self,
        path: str | PathLike[str],
        mode: Literal["rw", "r"] = "rw",
        *,
        create: bool = True,
        profile: Profile | None = None,
        durability: Durability = "append",
        lock_timeout: Duration = 0,
        config: StoreConfig | None = None,
    ) -> None:
        """As `mqstore.open`."""
        self._pid = os.getpid()
        self._consumers: WeakSet[PullConsumer | PushConsumer | SimpleConsumer] = WeakSet()
        self._producers: WeakSet[Producer] = WeakSet()
        self._broker: Broker | None = None
        # Both have their name before they open anything, so that they can be closed whatever a signal handler raises.
        broker = Broker.__new__(Broker)
        if mode not in ("rw", "r"):
            raise ConfigError(f"mode must be 'rw' or 'r', not {mode!r}")
        check_durability(durability)
        if mode == "r":
            self.log = ReadOnlyMessageStore(path, profile=profile, config=config)
            return
        self.log = log = MessageStore.__new__(MessageStore)
        try:
            MessageStore.__init__(
                log,
                path,
                create=create,
                profile=profile,
                durability=durability,
                lock_timeout=lock_timeout,
                config=config,
            )
            Broker.__init__(broker, log)
            self._broker = broker
            self._sender = broker._sender
            _remember(self)
        except BaseException:
            _open.pop(self, None)
            if self._broker is not None:
                broker.close()
            log.close()
            raise

    @property
    def broker(self) -> Broker:
        """Delivery, all of it: groups, offsets, pop, locks, filters, transactions. ReadOnlyStoreError in mode "r"."""
        if self._broker is None:
            self._refuse()
        return self._broker

    def _refuse(self) -> NoReturn:
        raise ReadOnlyStoreError(f"{self.path} was opened for reading; open it with mode='rw'")

    @property
    def path(self) -> Path:
        """The store's directory."""
        return self.log.path

    @property
    def mode(self) -> str:
        """ "rw" or "r"."""
        return self.log.mode

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or this is a forked child of the process that opened it."""
        return self.log.closed

    @property
    def recovery(self) -> RecoveryReport:
        """What opening found and did: how the store was closed, what was cut and rebuilt."""
        return self.log.recovery

    # -- topics -----------------------------------------------------------------------------------------------------

    def create_topic(self, name: str, *, queues: int = 4, exist_ok: bool = True) -> None:
        """Enter a topic with so many queues. One that is there stays as it is, which is logged if it has another
        number of them; without `exist_ok` it is a ConfigError. InvalidMessageError for a bad name."""
        topic = self.broker.topics.create(name, queues=queues, exist_ok=exist_ok)
        if topic.write_queues != queues:
            _log.warning(
                "topic %r has %d queues already, not %d, and stays so; broker.topics.alter(%r, queues=%d) alters it",
                name,
                topic.write_queues,
                queues,
                name,
                queues,
            )

    def topics(self, *, system: bool = False) -> list[str]:
        """Names of the topics, sorted; the engine's own only with `system`. In mode "r": of those with a message."""
        if self._broker is not None:
            return self._broker.topics.names(system)
        return [name for name in self.log.topics() if system or not is_system_topic(name)]

    def queues(self, topic: str) -> list[QueueRef]:
        """The queues of a topic. TopicNotFoundError."""
        if self._broker is None:
            return self.log.queues(topic)
        config = self._broker.topics.need(topic)
        return [QueueRef(topic, i) for i in range(max(config.read_queues, config.write_queues))]

    # -- in ---------------------------------------------------------------------------------------------------------

    @compiled_put
    def put(
        self, topic: str, body: Body, *, queue_id: int | None = None, **options: Unpack[SendOptions]
    ) -> SendReceipt:
        """Append one message; a topic that is not known yet is entered with 4 queues (`auto_create_topics`).

            queue           `queue_id`, else by `message_group` (all of a group in one queue), else by turns
            to be found     `tag`, `keys`, `properties`, `unique_key`, `flag`
            later           `delay` (seconds), `deliver_at` (aware datetime, seconds since the epoch), `delay_level`
            on disk         `durability="flush"`: when this returns

        Raises InvalidMessageError, TopicNotFoundError, NotPermittedError, StoreFullError (nothing was written then),
        FlushTimeoutError (stored, not known to be on disk), ReadOnlyStoreError.
        """
        return self.broker._parts.road.put(topic, body, queue_id=queue_id, **options)

    def put_many(
        self,
        /,
        topic: str,
        bodies: Iterable[Body | OutgoingMessage],
        *,
        queue_id: int | None = None,
        durability: Durability | None = None,
        **options: object,
    ) -> Sequence[SendReceipt]:
        """Append many messages to one queue (None: whose turn it is), with one wait for the disk. Chunks of about
        `max_message_size` bytes are stored whole or not at all. Errors as `put`. Other options are those of one
        message, as an `OutgoingMessage` has them; a delay and a message group are for `Producer.send_many`."""
        return self.broker.put_many(topic, bodies, queue_id=queue_id, durability=durability, **options)

    def recall(self, recall_handle: str) -> bool:
        """Cancel a message that was put with `delay` or `deliver_at`; whether it was still waiting."""
        return self.broker.recall(recall_handle)

    # -- out --------------------------------------------------------------------------------------------------------

    def read(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_messages: int = 32,
        *,
        max_bytes: int | None = None,
        tags: str | None = "*",
    ) -> list[Message]:
        """Messages of a queue from `offset` on, [] at the end; `tags` is an expression such as "paid || refunded".

        The list has at most `max_messages` messages: `iter` yields all. Messages that cannot be read are passed over;
        the log names each file that they are lost from once, at level ERROR.

        Raises TopicNotFoundError, OffsetOutOfRangeError (which carries the bounds), FilterError.
        """
        try:
            return self.log.read(topic, queue_id, offset, max_messages, max_bytes=max_bytes, tags=tags)
        except TopicNotFoundError:
            if not self._is_empty(topic, queue_id):
                raise
        if offset:
            raise OffsetOutOfRangeError(f"{topic!r}, queue {queue_id} is empty: offset {offset} is not there", 0, 0)
        return []

    def iter(
        self,
        topic: str,
        queue_id: int | None = None,
        *,
        start: Literal["earliest", "latest"] | datetime | int = "earliest",
        stop: int | None = None,
        follow: bool = False,
        tags: str | None = "*",
    ) -> Iterator[Message]:
        """Messages of one queue in order, or of all queues merged by store time. `follow`: waits for more, for ever.

        Messages that cannot be read are passed over; the log names each file that they are lost from once, at level
        ERROR.
        """
        while self._is_empty(topic, queue_id):
            if not follow:
                return
            time.sleep(_LOOK_S)
            if start == "latest":
                start = "earliest"  # whatever comes came after we began
        yield from self.log.iter(topic, queue_id, start=start, stop=stop, follow=follow, tags=tags)

    def _is_empty(self, topic: str, queue_id: int | None) -> bool:
        """Whether nothing was ever put to a queue, or to any queue of a topic, that is there."""
        if self._broker is None or (config := self._broker.topics.get(topic)) is None:
            return False
        if queue_id is None:
            return all(self.log.offsets_or_none(*ref) is None for ref in self.queues(topic))
        known = 0 <= queue_id < max(config.read_queues, config.write_queues)
        return known and not self.closed and self.log.offsets_or_none(topic, queue_id) is None

    def to_arrow(
        self,
        topic: str,
        queue_id: int | None = None,
        columns: Sequence[str] | None = None,
        *,
        start: datetime | int | None = None,
        stop: datetime | int | None = None,
        tags: str | None = "*",
        on_corrupt: Literal["fail", "skip", "keep"] = "fail",
    ) -> Any:
        """The messages of a queue, or of all queues of a topic one behind the other, as a `pyarrow.Table`: for pandas,
        DuckDB, Polars, Parquet. Rows and columns are those of `spark.read.format("mqstore")` (`docs/spark-options.md`);
        columns that are not asked for are not decoded.

        `start` and `stop` (exclusive): store times, or with `queue_id` offsets; None for all there is. `on_corrupt`:
        "fail" raises CorruptStoreError at a damaged message, "skip" leaves it out, "keep" gives a row whose `error`
        says what it is. Raises TopicNotFoundError, ConfigError, FilterError; ImportError without pyarrow.
        """
        from mqstore.columnar.columns import table_of

        if self._is_empty(topic, queue_id):
            return table_of(self.log, [], columns, start, stop, tags, on_corrupt)
        refs = self.log.queues(topic) if queue_id is None else [QueueRef(topic, queue_id)]
        return table_of(self.log, refs, columns, start, stop, tags, on_corrupt)

    def find(
        self,
        topic: str,
        *,
        key: str | None = None,
        unique_key: str | None = None,
        start: datetime | None = None,
        stop: datetime | None = None,
        limit: int = 32,
    ) -> list[Message]:
        """Messages that bear a key, or a unique key, stored between two times, the newest first."""
        return self.log.find(
            topic,
            key=key,
            unique_key=unique_key,
            start_ms=0 if start is None else to_ms(start),
            stop_ms=1 << 62 if stop is None else to_ms(stop),
            limit=limit,
        )

    def get(self, message_id: str) -> Message:
        """The message with that id. LookupError when it is gone; InvalidMessageError for what is no id."""
        return self.log.get_by_id(message_id)

    # -- positions --------------------------------------------------------------------------------------------------

    def offsets(self, topic: str, queue_id: int) -> tuple[int, int]:
        """(offset of the first message, offset of the next one to come)."""
        return (0, 0) if self._is_empty(topic, queue_id) else self.log.offsets(topic, queue_id)

    def offset_at(self, topic: str, queue_id: int, when: datetime) -> int:
        """Offset of the first message stored at or after `when`; the end if there is none."""
        return 0 if self._is_empty(topic, queue_id) else self.log.offset_at(topic, queue_id, when)

    def committed(self, group: str, queue: QueueRef) -> int | None:
        """Where the group goes on in a queue; None: it never committed."""
        return self.broker.committed(group, *queue)

    def commit_offset(self, group: str, queue: QueueRef, offset: int, *, durability: Durability | None = None) -> None:
        """Note that the group has consumed everything below `offset`. "flush": on disk when this returns, else within
        `commit_interval`. OffsetOutOfRangeError."""
        self.broker.commit(group, *queue, offset, durability=durability)

    def lag(self, group: str) -> dict[QueueRef, int]:
        """Messages of each queue that the group has not consumed. A queue in which it has not started is left out;
        GroupNotFoundError for a group that was never there."""
        return self.broker.lag(group)

    # -- what works on it -------------------------------------------------------------------------------------------

    def queue(self, name: str, **options: Unpack[QueueOptions]) -> Queue:
        """A persistent queue with the verbs of `queue.Queue`; see `Queue`."""
        return Queue(self.broker, name, **options)

    def producer(self, group: str = "default", **options: Unpack[ProducerOptions]) -> Producer:
        """Sends messages, one or many, now or by a thread of its own, and in transactions. See `Producer`."""
        producer = Producer(self.broker, group, **options)
        self._producers.add(producer)
        return producer

    def simple_consumer(
        self, group: str, topics: Mapping[str, str] | None = None, **options: Unpack[SimpleConsumerOptions]
    ) -> SimpleConsumer:
        """A consumer that takes messages when it wants some, each for a while; `topics`: name -> tags, "*" for all. See
        `SimpleConsumer`."""
        consumer = SimpleConsumer(self.broker, group, topics, **options)
        self._consumers.add(consumer)
        return consumer

    def pull_consumer(self, group: str, **options: Unpack[PullConsumerOptions]) -> PullConsumer:
        """A consumer that reads when it is polled, and keeps track of how far it has come. See `PullConsumer`."""
        consumer = PullConsumer(self.broker, group, **options)
        self._consumers.add(consumer)
        return consumer

    def push_consumer(self, group: str, **options: Unpack[PushConsumerOptions]) -> PushConsumer:
        """A consumer that calls handlers on threads of its own, from `start` to `stop`. See `PushConsumer`."""
        consumer = PushConsumer(self.broker, group, **options)
        self._consumers.add(consumer)
        return consumer

    def dead_letters(self, group: str) -> DeadLetters:
        """What a group gave up: to list, replay and purge."""
        return self.broker.dead_letters(group)

    # -- the whole --------------------------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """A snapshot of the log: puts, bytes, latencies, lags, errors. Of delivery: `store.broker.stats()`."""
        return self.log.stats()

    def verify(self) -> Iterator[Finding]:
        """Check every record, unit and index entry; changes nothing (format#damage)."""
        return self.log.verifier(CONFIG_CHECKS).findings()

    def snapshot(
        self,
        target: str | PathLike[str],
        *,
        link: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> SnapshotReport:
        """Copy the store as it is now to the folder `target`, which must not exist or be empty, while it goes on being
        used. The copy is a store that was closed cleanly, and has been read back: `findings` of the report says what is
        wrong with it, nothing as a rule. What is lent comes again in it, as after a crash. `link`: closed segments get
        a second name (hard links) in place of a copy. `progress(bytes done, bytes in all)`.

        After an error nothing of it is left. Raises ConfigError for a target that is in the way, StoreLockedError when
        another call is at it, StoreFullError, StoreIOError, StoreBusyError when topics change all the time.

        >>> import mqstore, tempfile
        >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(f"{folder}/mq") as store:
        ...     receipt = store.put("orders", b"hello")
        ...     report = store.snapshot(f"{folder}/monday")
        ...     with mqstore.open(f"{folder}/monday", "r") as copy:
        ...         report.messages, report.findings, [m.body for m in copy.read(*receipt.queue, 0)]
        (1, [], [b'hello'])
        """
        self.log.check_open()
        if self._broker is not None:
            self._broker.save()
        return snapshot_store(
            self.path,
            target,
            link=link,
            config=self.log.config,
            progress=progress,
            json_checks=CONFIG_CHECKS,
        )

    def flush(self) -> None:
        """Return once everything put before is on disk."""
        self.broker.store.flush()

    def close(self, timeout: Duration = 30) -> None:
        """Stop its consumers, then its producers; write every table, give the directory back. From the call on no
        handler begins, and those that run have `timeout` seconds, all together; so have the producers then. Fine to
        call twice. In a forked child it does nothing: all of it is the parent's."""
        timeout_s = seconds(timeout, "timeout")
        until = time.monotonic() + timeout_s
        self.halt()
        self.close_halted(timeout_s, until)

    def halt(self) -> None:
        """Let push consumers start no handler any more, as the first step of `close`.

        It waits for none, so that a consumer that hangs does not leave the others running. An application calls
        `close`.
        """
        if os.getpid() != self._pid:  # locks may be held by threads that are not here
            return
        self._end_all(consumer._halt for consumer in tuple(self._consumers) if isinstance(consumer, PushConsumer))

    def close_halted(self, timeout_s: float, until: float) -> None:
        """Close after `halt`, and wait for handlers until `until` (`time.monotonic`). An application calls `close`."""
        if os.getpid() != self._pid:
            return
        consumers = tuple(self._consumers)
        pushing = [each for each in consumers if isinstance(each, PushConsumer)]
        # Those at nothing first: their progress is not to wait, unsaved, for a handler of another that hangs.
        pushing.sort(key=lambda each: len(each._workers.busy()))
        self._end_all(partial(_in_time, each.stop, until) for each in pushing)
        for each in consumers:
            if isinstance(each, PullConsumer):
                self._end_all([partial(each.close, done=False)])  # nobody said of its last messages that they are done
            elif isinstance(each, SimpleConsumer):
                self._end_all([each.close])
        until = time.monotonic() + timeout_s  # not what handlers have left: what was submitted is to be stored
        self._end_all(partial(_in_time, producer.close, until) for producer in tuple(self._producers))
        if self._broker is not None:
            self._broker.close(timeout_s)
        else:
            self.log.close(timeout_s)
        _open.pop(self, None)

    def _end_all(self, ends: Iterable[Callable[[], object]]) -> None:
        for end in ends:
            try:
                end()
            except Exception:  # a listener's, or a full disk: the store is closed all the same
                _log.exception("%s: not all was well while closing", self.path)

    def __repr__(self) -> str:
        return f"<Store {str(self.path)!r} {self.mode}{' closed' if self.closed else ''}>"
