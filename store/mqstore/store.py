"""Store object that an application opens: a store directory with everything in it.

    Store ── put, put_many, recall, queue, dead_letters, commit_offset ...  the broker (mode "rw")
      └───── read, iter, find, get, to_arrow, offsets, verify ...           the log (either mode)

It unites the broker and the log: one object to open and to close, with names that need no knowledge of their parts. For
everything that they can do, use `broker` and `log`. The class is long because each of these names has its documentation
here.
"""

from __future__ import annotations

import atexit
import inspect
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial, update_wrapper
from itertools import chain
from os import PathLike
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, NoReturn, ParamSpec, TypeVar, Unpack, overload
from weakref import WeakSet

from mqstore import client
from mqstore.broker.opening import CONFIG_CHECKS, Broker, findings
from mqstore.broker.tables.names import is_system_topic
from mqstore.client.items.codecs import Codec, T
from mqstore.closing import Closing
from mqstore.contract import BrokerContract, DeadLetters, SendOptions
from mqstore.errors import ConfigError, OffsetOutOfRangeError, ReadOnlyStoreError, TopicNotFoundError
from mqstore.files.lock import refusal_to_reader
from mqstore.log.commitlog import QueueRef, SendReceipt
from mqstore.log.message import Message
from mqstore.log.reading.iteration import AtEnd, Begin
from mqstore.log.reading.reader import to_ms
from mqstore.log.recovery.report import Finding, RecoveryReport
from mqstore.log.stats import StoreStats
from mqstore.log.store import MessageStore
from mqstore.log.writing.outgoing import Body, OutgoingMessage
from mqstore.logger import log as _log
from mqstore.native import Sending, compiled_put
from mqstore.options import Durability, Duration, Profile, StoreConfig, check_durability, seconds
from mqstore.queue import Queue, QueueOptions
from mqstore.signalsafe import check_holds_none

if TYPE_CHECKING:
    from mqstore.log.reading.readonly import ReadOnlyMessageStore
    from mqstore.log.snapshot.copy import SnapshotReport
    from mqstore.serve.thread import ServerThread

_P = ParamSpec("_P")
_T = TypeVar("_T")

_EXIT_S = 5.0
"""Time that handlers have at the end of the process."""

_open: WeakSet[Store] = WeakSet()
"""Stores that are open for writing: at the end of the process each is stopped and saved."""


@atexit.register
def _close_all() -> None:
    stores = [store for store in list(_open) if not store.closed]
    until = time.monotonic() + _EXIT_S  # shared by all stores
    for store in stores:
        store._stop_handlers()
    for store in stores:
        try:
            store._close_stopped(_EXIT_S, until)
        except Exception:  # the others must still be closed
            _log.exception("%s: not closed cleanly", store.path)


class _Maker:
    """Method that makes an object for its store. Its parameters are those of the object's class, except the broker.
    The class is imported when the method is called, or its parameters are asked for."""

    def __init__(self, kind: Callable[[], Any], method: Callable[..., object]) -> None:
        self._kind = kind
        update_wrapper(self, method)
        self.__annotations__ = {}  # those of the class are in `__signature__`

    def __get__(self, store: Store | None, owner: type) -> Any:
        return self if store is None else MethodType(self, store)

    def __call__(self, store: Store, /, *args: Any, **options: Any) -> Any:
        made = self._kind()(store.broker, *args, **options)
        store._made[self.__name__].add(made)  # type: ignore[attr-defined]  # noqa: SLF001  (a method of it)
        return made

    @property
    def __signature__(self) -> inspect.Signature:
        kind = self._kind()
        broker, *others = inspect.signature(kind).parameters.values()
        store = broker.replace(name="self", annotation=broker.empty)
        return inspect.Signature([store, *others], return_annotation=kind)


def _makes(
    kind: Callable[[], Callable[Concatenate[BrokerContract, _P], _T]],
) -> Callable[[Callable[[Any], object]], Callable[Concatenate[Any, _P], _T]]:
    return partial(_Maker, kind)


def _in_time(end: Callable[[float], object], until: float) -> None:
    end(max(0.0, until - time.monotonic()))


class Store(Closing, Sending):
    """A store directory, opened by `mqstore.open`. Thread-safe.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     receipt = store.put("orders", b"hello", keys="o-1")
    ...     [message] = store.read(*receipt.queue, receipt.offset)
    ...     jobs = store.queue("jobs")
    ...     receipt = jobs.put(b"resize 1.png")
    ...     with jobs.get() as task:
    ...         message.body, message.keys, task.value
    (b'hello', ('o-1',), b'resize 1.png')
    """

    log: MessageStore | ReadOnlyMessageStore
    """Message store: every record, unit and offset. Its class depends on the mode."""

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
        """Open a store as `mqstore.open` does."""
        self._prepare()
        self._broker: Broker | None = None
        if mode not in ("rw", "r"):
            raise ConfigError(f"mode must be 'rw' or 'r', not {mode!r}")
        check_durability(durability)
        if mode == "r":
            from mqstore.log.reading.readonly import ReadOnlyMessageStore

            self.log = ReadOnlyMessageStore(path, profile=profile, config=config)
            return
        # Assigned before it opens anything, so that it can be closed after any error of a signal handler.
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
            self._broker = Broker(log)
            self._sender = self._broker._sender
            # A reference to the log or the broker keeps the store, so that closing it finds its consumers, too.
            log.closer = self.close
            self._register()
        except BaseException:
            if self._broker is not None:
                self._broker.close()
            log.close()
            raise

    def _prepare(self) -> None:
        self._pid = os.getpid()
        makers = ("queue", "producer", "simple_consumer", "pull_consumer", "push_consumer")
        self._made: dict[str, WeakSet[Any]] = {name: WeakSet() for name in makers}
        """Objects that the methods of these names have made."""
        self._servers: list[ServerThread] = []

    def _register(self) -> None:
        """Have the store closed at the end of the process."""
        _open.add(self)

    @property
    def broker(self) -> Broker:
        """All of delivery: groups, offsets, pop, locks, filters, transactions.
        Raises ReadOnlyStoreError in mode "r"."""
        if self._broker is None:
            self._refuse()
        return self._broker

    def _refuse(self) -> NoReturn:
        raise ReadOnlyStoreError(refusal_to_reader(self.path, self.log.fs))

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
        """True if `close` was called, or this is a forked child of the process that opened it."""
        return self.log.closed

    @property
    def recovery(self) -> RecoveryReport:
        """Report of the opening: how the store was closed, which parts were cut or rebuilt."""
        return self.log.recovery

    # -- topics -----------------------------------------------------------------------------------------------------

    def create_topic(self, name: str, *, queues: int = 4, exist_ok: bool = True) -> None:
        """Create a topic. An existing topic is left unchanged, and a different number of queues is logged.
        Raises ConfigError for an existing topic without `exist_ok`, InvalidMessageError for a bad name."""
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
        """Return the topic names, sorted. System topics are included only if `system` is true.
        In mode "r" only topics with a message are included."""
        if self._broker is not None:
            return self._broker.topics.names(system)
        return [name for name in self.log.topics() if system or not is_system_topic(name)]

    def queues(self, topic: str) -> list[QueueRef]:
        """Return the queues of a topic. Raises TopicNotFoundError."""
        self.log.check_open()
        if self._broker is None:
            return self.log.queues(topic)
        config = self._broker.topics.require(topic)
        return [QueueRef(topic, i) for i in range(max(config.read_queues, config.write_queues))]

    # -- in ---------------------------------------------------------------------------------------------------------

    @compiled_put
    def put(
        self, topic: str, body: Body, *, queue_id: int | None = None, **options: Unpack[SendOptions]
    ) -> SendReceipt:
        """Append one message. An unknown topic is created with 4 queues (`auto_create_topics`).

            queue           `queue_id`, else by `message_group` (all of a group in one queue), else by turns
            search          `tag`, `keys`, `properties`, `unique_key`, `flag`
            delay           `delay` (seconds), `deliver_at` (aware datetime, seconds since the epoch), `delay_level`
            durability      `durability="flush"`: on disk when this returns

        Raises InvalidMessageError, TopicNotFoundError, NotPermittedError, StoreFullError (then nothing is written),
        FlushTimeoutError (stored, perhaps not on disk), and ReadOnlyStoreError.
        """
        broker = self._broker
        if broker is None:
            self._refuse()
        return broker.put(topic, body, queue_id=queue_id, **options)

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
        """Append many messages to one queue, with one wait for the disk. Raises the errors of `put`.
        With `queue_id` None queues take turns. A kill leaves the first messages of a call, from none to all: give them
        unique keys, and put again what `find` does not find. Other options are those of an `OutgoingMessage`. For a
        delay or message group use `Producer.send_many`."""
        return self.broker.put_many(topic, bodies, queue_id=queue_id, durability=durability, **options)

    def recall(self, recall_handle: str) -> bool:
        """Cancel a message that was put with `delay` or `deliver_at`. Return True if it was still waiting."""
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
        """Return the messages of a queue from `offset` on, or [] at the end.

        The list has at most `max_messages` messages, while `iter` yields all. `tags` is an expression such as "paid ||
        refunded". Unreadable messages are skipped, and each damaged file is logged once at level ERROR.

        Raises TopicNotFoundError, OffsetOutOfRangeError (with the bounds), and FilterError.
        """
        try:
            return self.log.read(topic, queue_id, offset, max_messages, max_bytes=max_bytes, tags=tags)
        except TopicNotFoundError:
            if not self._is_empty(topic, queue_id):
                raise
        except OffsetOutOfRangeError:
            self.queues(topic)  # raises TopicNotFoundError if it was deleted
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
        """Yield the messages of one queue in order, or of all queues merged by store time.
        With `follow` it waits for more, for ever. Unreadable messages are skipped, and each damaged file is logged once
        at level ERROR.
        """
        parts = self._in_parts(topic, queue_id, start, stop, follow, tags)
        return chain.from_iterable(self.log.waiting(topic, queue_id, parts))

    def _in_parts(
        self, topic: str, queue_id: int | None, start: Begin, stop: int | None, follow: bool, tags: str | None
    ) -> Iterator[Iterable[Message]]:
        """Yield the messages of `iter` in parts, and an `AtEnd` for each wait, for `mqstore.aio`, too."""
        while self._is_empty(topic, queue_id):
            if not follow:
                return
            yield AtEnd({ref: 0 for ref in self.queues(topic) if queue_id in (None, ref.queue_id)})
            if start == "latest":
                start = "earliest"  # all later messages are new
        yield from self.log.in_parts(topic, queue_id, start, stop, follow, tags)

    def _is_empty(self, topic: str, queue_id: int | None) -> bool:
        """Return True if an existing queue, or all queues of an existing topic, never had a message.
        A topic that was deleted and created again counts as new."""
        if self._broker is None or (config := self._broker.topics.get(topic)) is None:
            return False
        if queue_id is None:
            try:
                return not self.log.queues(topic)
            except TopicNotFoundError:
                return True
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
        """Return the messages of a queue, or of a topic queue by queue, as a `pyarrow.Table`.
        It is for pandas, DuckDB, Polars, or Parquet. Rows and columns are those of `spark.read.format("mqstore")`
        (`docs/spark-options.md`). Other columns than the requested ones are not decoded.

        `start` and `stop` (exclusive) are store times, or with `queue_id` offsets. None means no limit. At a
        damaged message, `on_corrupt` "fail" raises CorruptStoreError, "skip" leaves the message out, and "keep" adds a
        row whose `error` describes it. Raises TopicNotFoundError, ConfigError, and FilterError; without pyarrow
        ImportError.
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
        """Return the messages with a key, or a unique key, stored between two times, newest first."""
        return self.log.find(
            topic,
            key=key,
            unique_key=unique_key,
            start_ms=0 if start is None else to_ms(start),
            stop_ms=1 << 62 if stop is None else to_ms(stop),
            limit=limit,
        )

    def get(self, message_id: str) -> Message:
        """Return the message with that id. Raises LookupError if gone, InvalidMessageError for a bad id."""
        return self.log.get_by_id(message_id)

    # -- positions --------------------------------------------------------------------------------------------------

    def offsets(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Return (offset of the first message, offset of the next one to come)."""
        return (0, 0) if self._is_empty(topic, queue_id) else self.log.offsets(topic, queue_id)

    def offset_at(self, topic: str, queue_id: int, when: datetime) -> int:
        """Return the offset of the first message stored at or after `when`, or the end if there is none."""
        return 0 if self._is_empty(topic, queue_id) else self.log.offset_at(topic, queue_id, when)

    def committed(self, group: str, queue: QueueRef) -> int | None:
        """Return the group's committed offset in a queue, or None if there is none."""
        return self.broker.committed(group, *queue)

    def commit_offset(self, group: str, queue: QueueRef, offset: int, *, durability: Durability | None = None) -> None:
        """Note that the group has consumed everything below `offset`. Raises OffsetOutOfRangeError.
        It is on disk when this returns with "flush", else within `commit_interval`."""
        self.broker.commit(group, *queue, offset, durability=durability)

    def lag(self, group: str) -> dict[QueueRef, int]:
        """Return the number of unconsumed messages of the group in each queue that it has started.
        Raises GroupNotFoundError for an unknown group."""
        return self.broker.lag(group)

    # -- queues, producers, consumers -------------------------------------------------------------------------------

    @overload
    def queue(self, name: str, *, codec: Codec[T], **options: Unpack[QueueOptions]) -> Queue[T]: ...

    @overload
    def queue(self, name: str, *, codec: None = None, **options: Unpack[QueueOptions]) -> Queue[bytes]: ...

    @_makes(lambda: Queue)  # type: ignore[misc]  # for `help`, which shows no overloads
    def queue(self) -> None:
        """Return a persistent queue with the verbs of `queue.Queue`. See `Queue`."""

    @_makes(lambda: client.Producer)
    def producer(self) -> None:
        """Return a producer of messages, one or many, now or later, or in transactions. See `Producer`."""

    @_makes(lambda: client.SimpleConsumer)
    def simple_consumer(self) -> None:
        """Return a consumer that receives messages on request, each leased for a time. See `SimpleConsumer`.
        `topics` maps names to tags, "*" for all."""

    @_makes(lambda: client.PullConsumer)
    def pull_consumer(self) -> None:
        """Return a consumer that reads when it is polled, and keeps its offsets. See `PullConsumer`."""

    @_makes(lambda: client.PushConsumer)
    def push_consumer(self) -> None:
        """Return a consumer that calls handlers on its own threads. See `PushConsumer`."""

    def dead_letters(self, group: str) -> DeadLetters:
        """Return the dead letters of a group, to list, replay and purge."""
        return self.broker.dead_letters(group)

    def serve(
        self,
        /,
        listen: str | Iterable[str] = "127.0.0.1:9876",
        *,
        unix: str | PathLike[str] | None = None,
        insecure_bind: bool = False,
        **options: Any,
    ) -> ServerThread:
        """Serve the store to other processes from a thread of this one (`docs/processes.md`), and return the server.

            listen          one or several HOST:PORT for RocketMQ's clients and `mqstore.connect`; () for none. Port 0
                            is any free one: see `address` of the result
            unix            path of the Unix socket for this user's processes, by default DIR/serve.sock
            insecure_bind   allow an address that other machines can reach, if clients need no password
            options         others of `mqstore.serve.Server`: advertise, limits, metrics, tls, users

        The server keeps the store open. `close` of the server, or of the store, ends it.

        Raises ConfigError, OSError if an address is taken, ReadOnlyStoreError, StoreClosedError, and StoreBusyError in
        a signal handler that interrupted a call with a lock."""
        from mqstore.serve.thread import ServerThread  # a program that does not serve does not load it

        check_holds_none()
        broker = self.broker
        self.log.check_open()
        server = ServerThread(broker, listen, unix=unix, insecure_bind=insecure_bind, **options)
        self._servers.append(server)
        return server

    # -- the store --------------------------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """Return statistics of the log: puts, bytes, latencies, lags, errors.
        For delivery call `store.broker.stats()`."""
        return self.log.stats()

    def verify(self) -> Iterator[Finding]:
        """Check every record, unit and index entry that the store has now, without changes (format#damage)."""
        return findings(self.log)

    def snapshot(
        self, target: str | PathLike[str], *, link: bool = False, progress: Callable[[int, int], None] | None = None
    ) -> SnapshotReport:
        """Copy the store as it is now to the folder `target`, while it is in use.
        The folder must be empty or not exist. All progress is saved first. The copy is a cleanly closed store, and was
        read back. `findings` of the report lists its faults, normally none. Leased messages are redelivered in it. With
        `link` closed segments get a second name (hard links), not a copy. It calls `progress(bytes done, of all)`.

        After an error nothing of it is left. Raises ConfigError for an occupied target, StoreLockedError if another
        call writes it, StoreFullError, StoreIOError, and StoreBusyError if topics change all the time.

        >>> import mqstore, tempfile
        >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(f"{folder}/mq") as store:
        ...     receipt = store.put("orders", b"hello")
        ...     report = store.snapshot(f"{folder}/monday")
        ...     with mqstore.open(f"{folder}/monday", "r") as copy:
        ...         report.messages, report.findings, [m.body for m in copy.read(*receipt.queue, 0)]
        (1, [], [b'hello'])
        """
        from mqstore.log.snapshot.copy import snapshot_store

        self.log.check_open()
        return snapshot_store(
            self.path,
            target,
            link=link,
            config=self.log.config,
            progress=progress,
            json_checks=CONFIG_CHECKS,
            saved=None if self._broker is None else self._broker.saved,
        )

    def flush(self) -> None:
        """Return once everything put before is on disk."""
        self.broker.sync()

    def close(self, timeout: Duration = 30) -> None:
        """Stop all consumers, then all producers, write every table, and release the directory.
        From the call on no handler begins. Running handlers together have `timeout` seconds, and so have the producers
        after them. Repeating it is harmless. In a forked child it does nothing, since everything is the parent's.
        Raises StoreBusyError in a signal handler that interrupted a call with a lock."""
        timeout_s = seconds(timeout, "timeout")
        check_holds_none()
        until = time.monotonic() + timeout_s
        self._stop_handlers()
        self._close_stopped(timeout_s, until)

    def _stop_handlers(self) -> None:
        """Have push consumers start no more handlers, as the first step of `close`.

        It waits for none, so that a hanging consumer does not leave the others running. An application calls `close`.
        """
        self._end_all(consumer._stop_handlers for consumer in tuple(self._made["push_consumer"]))

    def _close_stopped(self, timeout_s: float, until: float) -> None:
        """Close after `_stop_handlers`, and wait for handlers until `until` (`time.monotonic`).
        An application calls `close`."""
        if os.getpid() != self._pid:
            return
        # Idle consumers first, so that their offsets are saved before the wait for a handler that hangs. Halting again
        # only counts the handlers that run.
        pushing = sorted(self._made["push_consumer"], key=lambda each: each._stop_handlers())
        self._end_all(server.close for server in self._servers)  # first, while what its clients wait for still works
        self._end_all(partial(_in_time, each.stop, until) for each in pushing)
        # The last messages of a pull consumer may be unfinished.
        self._end_all(partial(each.close, done=False) for each in tuple(self._made["pull_consumer"]))
        self._end_all(each.close for each in tuple(self._made["simple_consumer"]))
        until = time.monotonic() + timeout_s  # a new timeout: submitted messages must be stored
        self._end_all(partial(_in_time, producer.close, until) for producer in tuple(self._made["producer"]))
        if self._broker is not None:
            self._broker.close(timeout_s)
        else:
            self.log.close(timeout_s)

    def _end_all(self, ends: Iterable[Callable[[], object]]) -> None:
        for end in ends:
            try:
                end()
            except Exception:  # a listener's error, or a full disk: close the store anyway
                _log.exception("%s: not all was well while closing", self.path)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {str(self.path)!r} {self.mode}{' closed' if self.closed else ''}>"
