"""Transactions: messages sent if, and only if, a block of code ends well (clients#transaction).

    with producer.transaction() as tx:
        tx.send(...)           half message: stored, and invisible
        db.commit()
                               commits at a clean end, one message after the other; an exception rolls back

    the process died inside    the engine asks the group's checker, once there is a producer that has one:
                               True commits, False rolls back, None: ask again. After 15 times None it is given up

With `check` the checker is asked at a clean end, too: a database session may end without a commit. Unless it says True
of each message, the engine asks later, as if the process had died.

The engine asks about a half message after 6 s, and a block may take longer. So the engine's callback is not the user's
checker but a `GroupChecks`, which knows the transactions of this process:

    the block is still running           the answer is deferred, and not counted: a checker that looks into a
                                         database before `db.commit()` would roll back a good transaction
    the block has ended, the commit      the result of the block
    failed
    else                                 the checker's answer; None without a checker
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Literal, Unpack

from mqstore.client.send.preparing import Preparer, Ready
from mqstore.contract import NOT_ASKED, BrokerContract, NobodyAsked, SendOptions, TransactionCalls, TransactionHandle
from mqstore.errors import FlushTimeoutError, MQStoreError, TransactionStateError
from mqstore.log.commitlog import SendReceipt
from mqstore.log.message import Message
from mqstore.log.writing.outgoing import Body, OutgoingMessage
from mqstore.logger import log as _log
from mqstore.signalsafe import Lock

Checker = Callable[[Message], bool | None]
"""Function that returns True if this half message's transaction was committed, False if rolled back.
None means unknown."""


class GroupChecks:
    """State of a group's transactions in this process.
    The engine has one callback for each group, so all producers of the group share it."""

    def __init__(self, transactions: TransactionCalls, group: str) -> None:
        self._transactions = transactions
        self._group = group
        self._lock = Lock()
        self._checkers: list[Checker | None] = []
        """One entry for each producer. The newest that is not None is asked."""
        self._running: set[str] = set()
        """Unique keys of half messages whose block has not ended."""
        self._decided: dict[str, bool] = {}
        """Outcome of half messages that could not be committed or rolled back: True for a commit."""

    def join(self, checker: Checker | None) -> None:
        """Add a producer of the group."""
        with self._lock:
            self._checkers.append(checker)
        self._transactions.on_check(self._group, self.answer)

    def leave(self, checker: Checker | None) -> None:
        """Remove a producer. Decided outcomes are still answered. Running blocks are not asked about."""
        with self._lock:
            self._checkers.remove(checker)
        self._withdraw()

    def begin(self, unique_key: str) -> None:
        with self._lock:
            self._running.add(unique_key)

    def end(self, unique_key: str, decided: bool | None = None) -> None:
        """Note that a block has ended. `decided` is an outcome that could not be carried out."""
        with self._lock:
            self._running.discard(unique_key)
            if decided is not None:
                self._decided[unique_key] = decided
        self._withdraw()

    def _withdraw(self) -> None:
        with self._lock:
            self._decided = {key: how for key, how in self._decided.items() if self._transactions.get(key) is not None}
            if not (self._checkers or self._running or self._decided):
                self._transactions.on_check(self._group, None)

    def answer(self, message: Message) -> bool | NobodyAsked | None:
        """Answer the engine about a half message."""
        with self._lock:
            if message.unique_key in self._running:
                return NOT_ASKED
            decided = self._decided.get(message.unique_key)
            if decided is not None:
                return decided
            if not self._checkers:
                return NOT_ASKED
        return self.ask(message)

    def ask(self, message: Message) -> bool | None:
        """Return the answer of the newest checker, or None without one."""
        with self._lock:
            checker = next((each for each in reversed(self._checkers) if each is not None), None)
        return None if checker is None else checker(message)


def checks_of(broker: BrokerContract, group: str) -> GroupChecks:
    """Return the checks of that group of that engine. Without a lock, since `setdefault` is one step."""
    checks: GroupChecks = broker.shared.setdefault(group, GroupChecks(broker.transactions, group))
    return checks


class Transaction:
    """Messages that become visible, one by one, when its `with` block ends well.
    For one thread and one block.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     with store.producer() as producer, producer.transaction() as tx:
    ...         _ = tx.send("orders", b"paid", queue_id=0)
    ...         before = store.read("orders", 0, 0)
    ...     before, [message.body for message in store.read("orders", 0, 0)]
    ([], [b'paid'])
    """

    def __init__(
        self,
        broker: BrokerContract,
        checks: GroupChecks,
        preparer: Preparer,
        prepare: Callable[[Ready], TransactionHandle],
        *,
        check: bool,
    ) -> None:
        self._broker = broker
        self._preparer = preparer
        self._prepare = prepare
        self._checks = checks
        self._check = check
        self._state: Literal["new", "open", "commit", "rollback", "unknown"] = "new"
        self._halves: list[tuple[TransactionHandle, OutgoingMessage | None]] = []
        self._flush = False
        self.receipts: list[SendReceipt | None] = []
        """Receipts after the commit, in order. None means that the commit of a message failed."""

    def send(self, topic: str, body: Body, *, queue_id: int | None = None, **options: Unpack[SendOptions]) -> str:
        """Store a message that stays invisible until the block ends well. Return its unique key.
        The checker knows the message by this key. Options are those of `Producer.send`, but a delay or a message group
        raises InvalidMessageError."""
        if self._state != "open":
            raise TransactionStateError("a transaction sends inside its `with` block", self._outcome())
        ready = self._preparer.half(topic, body, queue_id, options)
        unique_key = ready.unique_key
        try:  # after Ctrl-C in here the engine asks about the half message, so that it ends
            self._checks.begin(unique_key)
            self._halves.append((self._prepare(ready), ready.message))
        except BaseException as error:
            self._checks.end(unique_key)
            self._preparer.notify(ready.message, None, error)
            raise
        self._flush = self._flush or ready.flush
        return unique_key

    def _outcome(self) -> str | None:
        return self._state if self._state in ("commit", "rollback") else None

    def __enter__(self) -> Transaction:
        if self._state != "new":
            raise TransactionStateError("a transaction is one `with` block; make another", self._outcome())
        self._state = "open"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None and self._check:
            self._check_committed()
        if error is None:
            self._commit()
        else:
            self._roll_back(error)

    def _check_committed(self) -> None:
        """Leave all messages to the checks of the engine unless the checker says True of each now."""
        self._state = "unknown"
        denial = TransactionStateError("the checker does not say that the block was committed: nothing is sent", None)
        try:
            half = self._broker.transactions.half_message
            if all(self._checks.ask(half(handle)) is True for handle, _ in self._halves):
                return
            raise denial
        except BaseException as error:
            for handle, message in self._halves:
                self._checks.end(handle.transaction_id)
                self._preparer.notify(message, None, error)
            raise

    def _commit(self) -> None:
        """Make all messages visible. An error of one message is raised after the others are done.
        Its half message stays open, and is committed when the engine asks next."""
        self._state = "commit"
        failed: MQStoreError | None = None
        for receipt, error in self._end_all("commit", None):
            self.receipts.append(receipt)
            failed = failed or error
        if self._flush and any(self.receipts):
            try:
                self._broker.sync()
            except FlushTimeoutError as late:
                failed = failed or FlushTimeoutError(str(late), self.receipts[-1])
            except MQStoreError as error:
                failed = failed or error
        if failed is not None:
            failed.receipts = [receipt for receipt in self.receipts if receipt is not None]
            raise failed

    def _roll_back(self, cause: BaseException) -> None:
        """Roll back all messages. Errors are logged, so that the caller sees why it was rolled back."""
        self._state = "rollback"
        errors = [error for _, error in self._end_all("rollback", cause) if error is not None]
        if self._flush:
            try:
                self._broker.sync()
            except MQStoreError as late:
                errors.append(late)
        for each in errors:
            _log.warning("a transaction could not be rolled back yet: %s", each)

    def _end_all(
        self, outcome: Literal["commit", "rollback"], cause: BaseException | None
    ) -> list[tuple[SendReceipt | None, MQStoreError | None]]:
        """End every half message. Return the receipt or the error of each.
        Ends that fail, or that Ctrl-C prevents, are noted, and made when the engine asks."""
        ended: list[tuple[SendReceipt | None, MQStoreError | None]] = []
        try:
            for handle, message in self._halves:
                receipt: SendReceipt | None = None
                error: MQStoreError | None = None
                try:
                    receipt = self._broker.transactions.end(handle, outcome, durability="append")
                except (MQStoreError, LookupError) as raised:
                    error = raised if isinstance(raised, MQStoreError) else MQStoreError(str(raised))
                later = error is not None and not isinstance(error, TransactionStateError)
                self._checks.end(handle.transaction_id, outcome == "commit" if later else None)
                ended.append((receipt, error))
                self._preparer.notify(message, receipt, error or cause)
        finally:
            for handle, _ in self._halves[len(ended) :]:
                self._checks.end(handle.transaction_id, outcome == "commit")
        return ended
