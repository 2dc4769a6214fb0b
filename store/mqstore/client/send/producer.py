"""Producer: sending, with the options that applications need around a put (clients#send).

    send                in the caller's thread; returns the receipt
    send_oneway         like send, but errors of the engine are only logged
    submit              prepared in the caller's thread (preparing.py), stored by one writer thread; returns a future
    send_many           one queue, one put, one wait for the disk, where the messages allow it
    transaction         half messages, made visible at the end of a `with` block (`transaction.py`)

A send is tried again only if nothing was stored (StoreBusyError), and never for an explicit queue or a selector
(clients#send-retry). A message that has an offset is not sent again, even if its sync failed.

This module knows only the `Broker` of the engine.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from functools import partial
from typing import Final, Literal, NamedTuple, NoReturn, TypeVar, Unpack, cast

from mqstore.broker.delay.route import routed_properties
from mqstore.broker.tables.names import check_group
from mqstore.client.interceptors import Interceptor, Interceptors
from mqstore.client.limitedlog import LimitedLog
from mqstore.client.send.preparing import (
    Batch,
    Preparer,
    Ready,
    Selector,
    check_limits,
    go_together,
    is_routed,
    one_of,
    plain,
)
from mqstore.client.send.submitter import Submitter
from mqstore.client.send.transaction import Checker, GroupChecks, Transaction, checks_of
from mqstore.closing import Closing
from mqstore.contract import BrokerContract, SendOptions, TransactionHandle
from mqstore.errors import (
    ConfigError,
    FlushFailedError,
    FlushTimeoutError,
    InvalidMessageError,
    MQStoreError,
    NotPermittedError,
    StoreBusyError,
    StoreClosedError,
    TopicNotFoundError,
)
from mqstore.layout.record import COMPRESSED, COMPRESSION_ZLIB
from mqstore.log.commitlog import SendReceipt
from mqstore.log.writing.outgoing import Body, OutgoingMessage
from mqstore.logger import log as _log
from mqstore.options import Durability, Duration, check_whole, seconds
from mqstore.signalsafe import Future, Gate, Lock

_BUSY_S: Final = 0.01
_BUSY_MAX_S: Final = 1.0
"""Pauses before another attempt, doubled from the first value to the second (clients#send-retry)."""
_MAX_LINGER_S: Final = 30
_MAX_LINGER_BYTES: Final = 2 << 20

_MISUSE = (ConfigError, InvalidMessageError, NotPermittedError, StoreClosedError, TopicNotFoundError)
"""Errors that `send_oneway` raises too."""

T = TypeVar("T")


class _Load(NamedTuple):
    ready: Ready
    future: Future[SendReceipt]


class Producer(Closing):
    """Sends messages for a group of producers. Thread-safe. A context manager.

        retries, timeout        further attempts if the store is busy, within this many seconds
        durability              "append" or "flush"; None: the store's
        compression             "zlib": bodies of `compress_over` bytes and more are stored compressed if that saves 5 %
        linger, linger_bytes    `submit` waits this many seconds, or for this many bytes, to share a sync
        max_inflight            `submit` blocks while this many messages, or `max_inflight_bytes`, are not stored yet
        selector                chooses the queue of a message that names none; `send` may be given another
        interceptors            are called around each message, in this order
        checker                 decides about a transaction whose process died (`transaction`)
    Each message gets a unique key, the same in all its copies, for deduplication. Raises ConfigError for bad options.
    The class is long because it sends one message, many and later. `preparing` makes messages, `submitter` has the
    queue of `submit`.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     with Producer(store.broker) as producer:
    ...         receipt = producer.send("orders", b"created", message_group="o-17")
    ...         future = producer.submit("orders", b"paid", message_group="o-17")
    ...     future.result().queue == receipt.queue, future.result().offset
    (True, 1)
    """

    def __init__(
        self,
        broker: BrokerContract,
        group: str = "default",
        *,
        retries: int = 2,
        timeout: Duration = 3.0,
        durability: Durability | None = None,
        compression: Literal["zlib"] | None = None,
        compress_over: int = 4096,
        linger: Duration = 0,
        linger_bytes: int = 32 << 10,
        max_inflight: int = 1024,
        max_inflight_bytes: int = 100 << 20,
        selector: Selector | None = None,
        interceptors: Sequence[Interceptor] = (),
        checker: Checker | None = None,
    ) -> None:
        self.group = check_group(group)
        check_whole("retries", retries, 0)
        self._timeout_ms = int(min(seconds(timeout, "timeout"), threading.TIMEOUT_MAX) * 1000)
        one_of(durability, "durability", (None, "append", "flush"))
        one_of(compression, "compression", (None, "zlib"))
        check_whole("compress_over", compress_over, 0)
        linger_s = seconds(linger, "linger")
        if linger_s > _MAX_LINGER_S:
            raise ConfigError(f"linger is at most {_MAX_LINGER_S} s, not {linger!r}")
        check_whole("linger_bytes", linger_bytes, 1, _MAX_LINGER_BYTES)
        self._broker = broker
        self._clock = broker.clock
        self._put = broker.put
        self._log = LimitedLog(f"producer {group!r}", broker.clock)
        self._preparer = preparer = Preparer(
            broker,
            Interceptors(interceptors, self._log),
            self._check_open,
            retries=retries,
            durability=durability,
            compress_over=compress_over if compression else None,
            selector=selector,
        )
        self._place, self._complete, self._compressed = preparer.place, preparer.complete, preparer.compressed
        self._hooked, self._compresses = preparer.hooked, compression is not None
        self._checks: GroupChecks = checks_of(broker, group)
        self._checker = checker
        self._joined = False
        self._closed = False
        self._closing = Gate()
        self._lock = Lock()
        threaded = not broker.own_clock
        self._pause: Callable[[float], object] = self._closing.wait if threaded else _no_pause
        self._submitter: Submitter[_Load] = Submitter(
            self._store,
            self._clock,
            name=f"producer {group!r} of {broker.name}",
            threaded=threaded,
            alive=self._check_open,
            max_loads=check_whole("max_inflight", max_inflight, 1),
            max_bytes=check_whole("max_inflight_bytes", max_inflight_bytes, 1),
            linger_ms=int(linger_s * 1000),
            linger_bytes=linger_bytes,
        )
        if checker is not None:
            self._join()

    # -- one --------------------------------------------------------------------------------------------------------

    def send(
        self,
        topic: str,
        body: Body,
        *,
        queue_id: int | None = None,
        selector: Selector | None = None,
        **options: Unpack[SendOptions],
    ) -> SendReceipt:
        """Store one message and return its receipt. Does not wait for messages submitted before.
        Options are those of `Store.put`. `selector` chooses the queue of this message, in place of the producer's.

        Raises InvalidMessageError, TopicNotFoundError, NotPermittedError or StoreFullError (then nothing is stored).
        Raises StoreBusyError if the store stays busy, FlushTimeoutError (stored, perhaps not on disk),
        StoreClosedError, and errors of a `before_send`.
        """
        if self._closed:
            self._refuse()
        if self._hooked:
            ready = self._preparer.ready(topic, body, queue_id, options, selector=selector)
            return self._send_told(ready, ready.options)
        if options:
            check_limits(options)
        queue_id, retries = self._place(topic, queue_id, options, None, selector)
        self._complete(options)
        if self._compresses:
            body = self._compressed(body, options)
        try:
            return self._put(topic, body, queue_id=queue_id, **options)
        except StoreBusyError as busy:
            return self._again(lambda: self._put(topic, body, queue_id=queue_id, **options), retries, busy)

    def send_oneway(
        self,
        topic: str,
        body: Body,
        *,
        queue_id: int | None = None,
        selector: Selector | None = None,
        **options: Unpack[SendOptions],
    ) -> None:
        """Store a message that may be lost, as `send` does, but without waiting for the disk or retrying.
        `durability=` can still ask to wait. Only errors of the caller are raised; errors of the engine are logged."""
        if options.get("durability") is None:
            options["durability"] = "append"
        ready = self._preparer.ready(topic, body, queue_id, options, selector=selector)
        try:
            self._send_told(ready._replace(retries=0), ready.options)
        except _MISUSE:
            raise
        except (MQStoreError, OSError) as error:
            what = "a message was not stored, or not as durably as asked"
            self._log.say(logging.WARNING, what, at=topic, error=error)

    def _send_told(self, ready: Ready, options: SendOptions) -> SendReceipt:
        """Append a message, and report the result to the hooks."""
        try:
            receipt = self._append(ready, options)
        except BaseException as error:
            self._preparer.notify(ready.message, None, error)
            raise
        self._preparer.notify(ready.message, receipt, None)
        return receipt

    def _append(self, ready: Ready, options: SendOptions) -> SendReceipt:
        put = partial(self._put, ready.topic, ready.body, queue_id=ready.queue_id, **options)
        return self._tried(put, ready.retries)

    def _tried(self, attempt: Callable[[], T], retries: int) -> T:
        """Return `attempt()`. A busy store gets up to `retries` more attempts within `timeout`."""
        try:
            return attempt()
        except StoreBusyError as busy:
            return self._again(attempt, retries, busy)

    def _again(self, attempt: Callable[[], T], retries: int, busy: StoreBusyError) -> T:
        """Repeat an attempt that met a busy store, up to `retries` times within `timeout`."""
        end_ms = self._clock.monotonic_ms() + self._timeout_ms
        pause_s = _BUSY_S
        for _ in range(retries):
            left_s = (end_ms - self._clock.monotonic_ms()) / 1000
            if left_s <= 0 or self._closed:
                break
            self._pause(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _BUSY_MAX_S)
            try:
                return attempt()
            except StoreBusyError as again:
                busy = again
        raise busy

    # -- many -------------------------------------------------------------------------------------------------------

    def send_many(
        self,
        topic: str,
        bodies: Iterable[Body | OutgoingMessage],
        *,
        queue_id: int | None = None,
        **options: Unpack[SendOptions],
    ) -> Sequence[SendReceipt]:
        """Store many messages, with one wait for the disk. Return their receipts, in order.

        Options of an `OutgoingMessage` go before those of the call. Messages without delay, message group or
        compression go to one queue, in chunks of about `max_message_size` bytes. Other messages are put one by one.
        Each queue keeps the given order. Nothing is compressed here. All are checked before the first is stored. Raises
        the errors of `send`. `error.receipts` are those of the stored messages, the first of the call. A kill may leave
        some, too: see `Store.put_many`.
        """
        self._check_open()
        if options.get("unique_key") is not None:
            raise InvalidMessageError("a unique key names one message; give each its own", "unique_key")
        check_limits(options)  # and keeps keys that can be read only once
        batch: Batch = {}
        readies = [self._preparer.one_of_many(topic, each, queue_id, options, batch) for each in bodies]
        done: list[SendReceipt] = []
        try:
            self._store_many(readies, done)
        except BaseException as error:
            if isinstance(error, MQStoreError):
                error.receipts = done
            self._notify_many(readies, done, error)
            raise
        self._notify_many(readies, done, None)
        return done

    def _store_many(self, readies: Sequence[Ready], done: list[SendReceipt]) -> None:
        """Store all, many at once where possible. Append the receipts of stored messages to `done`."""
        at = 0
        while at < len(readies):
            first, stop = readies[at], at + 1
            if is_routed(first):
                done.append(self._append(first, {**first.options, "durability": "append"}))
            else:
                while stop < len(readies) and go_together(first, readies[stop]):
                    stop += 1
                self._put_run(readies[at:stop], done)
            at = stop
        if any(ready.flush for ready in readies):
            try:
                self._broker.sync()
            except FlushTimeoutError as late:
                raise FlushTimeoutError(str(late), done[-1]) from late

    def _put_run(self, run: Sequence[Ready], done: list[SendReceipt]) -> None:
        """Put messages of one queue that need no routing."""
        messages = [plain(ready) for ready in run]
        start = len(done)

        def put() -> None:
            rest = messages[len(done) - start :]
            try:
                done.extend(self._broker.put_many(run[0].topic, rest, queue_id=run[0].queue_id, durability="append"))
            except MQStoreError as error:
                done.extend(cast(Sequence[SendReceipt], error.receipts))
                raise

        self._tried(put, run[0].retries)

    def _notify_many(self, readies: Sequence[Ready], done: Sequence[SendReceipt], error: BaseException | None) -> None:
        if not self._hooked:
            return
        for i, ready in enumerate(readies):
            stored = i < len(done)
            late = error is not None and ready.flush  # stored, but perhaps not on disk
            self._preparer.notify(ready.message, done[i] if stored else None, None if stored and not late else error)

    # -- later ------------------------------------------------------------------------------------------------------

    def submit(
        self,
        topic: str,
        body: Body,
        *,
        queue_id: int | None = None,
        selector: Selector | None = None,
        **options: Unpack[SendOptions],
    ) -> Future[SendReceipt]:
        """Give a message to the writer thread, and return the future of its receipt.
        Submitted messages are stored in the order of the calls, and share syncs.

        Blocks while `max_inflight` messages or `max_inflight_bytes` wait. Raises errors of the message, and
        StoreClosedError. The future has errors of the engine. A message whose future is cancelled in time is not
        stored.
        """
        ready = self._preparer.ready(topic, body, queue_id, options, selector=selector)
        load = _Load(ready, Future())
        try:
            self._check_open()
            self._submitter.put(load, len(ready.body))
        except BaseException as error:
            self._preparer.notify(ready.message, None, error)
            raise
        return load.future

    def _store(self, loads: list[_Load]) -> None:
        """Write submitted messages: append each, sync once for all that need it, answer every future."""
        unanswered = dict(enumerate(loads))
        synced: list[tuple[int, SendReceipt]] = []
        failures: list[BaseException] = []

        def answer(index: int, receipt: SendReceipt | None, error: BaseException | None) -> None:
            ready, future = unanswered.pop(index)
            if error is not None:
                failures.append(error)
            try:
                try:
                    self._preparer.notify(ready.message, receipt, error)
                finally:
                    if error is not None:
                        future.set_exception(error)
                    else:
                        future.set_result(cast(SendReceipt, receipt))
            except SystemExit:  # other exceptions of hooks and callbacks are caught where these are called
                _log.exception("a hook or callback of a submitted message raised SystemExit; the writer continues")

        try:
            for index, (ready, future) in enumerate(loads):
                if not future.set_running_or_notify_cancel():
                    del unanswered[index]
                    self._preparer.notify(ready.message, None, CancelledError())
                    continue
                try:
                    receipt = self._append(ready, {**ready.options, "durability": "append"})
                except Exception as error:
                    answer(index, None, error)
                else:
                    if ready.flush:
                        synced.append((index, receipt))
                    else:
                        answer(index, receipt, None)
            failed: Exception | None = None
            if synced:
                try:
                    self._broker.sync()
                except Exception as error:
                    failed = error
                for index, receipt in synced:
                    answer(index, receipt, None if failed is None else _own_error(failed, receipt))
        finally:  # at a Ctrl-C in the main thread no future may wait for ever
            for index, (_, future) in list(unanswered.items()):
                if future.running() or future.set_running_or_notify_cancel():
                    answer(index, None, StoreClosedError("interrupted while writing submitted messages"))
        if failures:  # the application may have dropped the futures
            what = f"{len(failures)} submitted messages failed, the first"
            self._log.say(logging.WARNING, what, error=failures[0], like="submitted", times=len(failures))

    def run_once(self) -> int | None:
        """Write submitted messages that are due, for a store with its own clock.
        Return when to call again (wall ms), or None for the next `submit`."""
        due_ms = self._submitter.run_once()
        return None if due_ms is None else self._clock.now_ms() + due_ms

    # -- transactions -----------------------------------------------------------------------------------------------

    def transaction(self, *, check: bool = False) -> Transaction:
        """Return a `with` block whose messages become visible at its end, one by one, and never if it raises.

        If the process dies inside, the `checker` of a producer of the same group is asked about each message. Without a
        checker, messages are given up after 15 fruitless questions. With `check` the checker is also asked at a clean
        end. Unless it says True of each message, TransactionStateError is raised, and the checker is asked again later.
        """
        self._check_open()
        if check and self._checker is None:
            raise ConfigError("check=True asks the producer's checker: give the producer one")
        self._join()
        return Transaction(self._broker, self._checks, self._preparer, self._prepare, check=check)

    def _join(self) -> None:
        """Have the engine ask here about open transactions of the group."""
        with self._lock:
            if not self._joined and not self._closed:
                self._joined = True
                self._checks.join(self._checker)

    def _prepare(self, ready: Ready) -> TransactionHandle:
        """Store a half message."""
        options = ready.options
        prepare = partial(
            self._broker.transactions.prepare,
            ready.topic,
            ready.body,
            routed_properties(options, now_ms=0, max_delay_ms=0),
            producer_group=self.group,
            queue_id=ready.queue_id,
            flag=options.get("flag", 0),
            sys_flag=COMPRESSED | COMPRESSION_ZLIB if options.get("compressed") else 0,
            durability=options.get("durability"),
        )
        return self._tried(prepare, ready.retries)

    # -- the end ----------------------------------------------------------------------------------------------------

    def flush(self, timeout: Duration | None = None) -> None:
        """Wait until everything submitted before is stored, with its durability. Nothing lingers.
        Futures have the errors of their messages. Raises FlushTimeoutError after `timeout` seconds, and at once in the
        callback of a future, which would wait for itself. The rest is stored later. Raises StoreClosedError after
        `close`."""
        timeout_s = None if timeout is None else seconds(timeout, "timeout")
        self._check_open()
        if not self._submitter.flush(timeout_s):
            raise FlushTimeoutError("not all that was submitted is stored yet; flush again to wait on")

    def close(self, timeout: Duration = 30) -> None:
        """Store the submitted messages, and refuse more. Repeating it is harmless.
        Futures that are left after `timeout` seconds fail with StoreClosedError, so none hangs."""
        timeout_s = seconds(timeout, "timeout")
        if self._lock.is_inherited:
            return
        with self._lock:
            closed, self._closed = self._closed, True
            joined, self._joined = self._joined, False
        if closed:
            return
        try:
            left = self._submitter.close(timeout_s)
        finally:
            self._closing.open()
            if joined:
                self._checks.leave(self._checker)
        for ready, future in left:
            error = StoreClosedError(f"producer {self.group!r} was closed before this message was stored")
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            self._preparer.notify(ready.message, None, error)
        self._log.close()
        if left:
            _log.error("producer %r: %d submitted messages were not stored in %g s", self.group, len(left), timeout_s)

    def _check_open(self) -> None:
        if self._closed or self._broker.closed:
            self._refuse()

    def _refuse(self) -> NoReturn:
        self._broker.check_open()
        raise StoreClosedError(f"producer {self.group!r} was closed")

    def __repr__(self) -> str:
        state = " closed" if self._closed or self._broker.closed else ""
        return f"<Producer {self.group!r} on {self._broker.name!r}{state}>"


# -- helpers ---------------------------------------------------------------------------------------------------------


def _own_error(error: Exception, receipt: SendReceipt) -> Exception:
    """Return a copy of a sync's error for one of the threads that waited for it.
    If all threads raised one object, it would gather the frames of all."""
    own = error
    if isinstance(error, FlushTimeoutError):
        own = FlushTimeoutError(str(error), receipt)
    elif isinstance(error, FlushFailedError):
        own = FlushFailedError(*error.args)
    if own is not error:
        own.__cause__ = error
    return own


def _no_pause(duration_s: float) -> None:
    """Do not sleep: a test owns the time."""
