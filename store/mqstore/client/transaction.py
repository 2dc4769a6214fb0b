"""Messages that are sent if, and only if, a block of code ends well (clients#transaction).

    with producer.transaction() as tx:
        tx.send(...)           half message: stored, seen by nobody
        db.commit()
                               clean end: commit, one message after the other     exception: roll back

    the process died inside    the engine asks the group's checker, once there is a producer that has one:
                               True commits, False rolls back, None: ask again. After 15 times None it is given up

The engine asks about a half message from 6 s on, and a block may take longer. So the callback that it has is not the
user's checker but a `GroupChecks`, which knows what goes on in this process:

    the block is still running           the answer is put off, and not counted: asked now, a checker that looks into a
                                         database before `db.commit()` would roll back what is about to be true
    the block has ended, the commit      as the block ended: nobody knows better
    could not be carried out
    else                                 what the checker says; None where there is no checker
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Unpack
from weakref import WeakKeyDictionary

from mqstore.broker.road import SendOptions
from mqstore.broker.transactions import NOT_ASKED, NotAsked, TransactionHandle, Transactions
from mqstore.errors import FlushTimeoutError, MQStoreError, TransactionStateError
from mqstore.log.commitlog import SendReceipt
from mqstore.log.message import Message
from mqstore.log.outgoing import Body, OutgoingMessage

if TYPE_CHECKING:
    from mqstore.client.producer import Producer

__all__ = ["Checker", "GroupChecks", "Transaction", "checks_of"]

_log = logging.getLogger("mqstore")

Checker = Callable[[Message], bool | None]
"""What became of the transaction of this half message: True it was committed, False rolled back, None: unknown."""


class GroupChecks:
    """What the producers of one group know about its transactions. The engine has one callback a group, so it is
    shared by all of them."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._checkers: list[Checker | None] = []
        """One entry a producer; the newest that is no None is asked."""
        self._running: set[str] = set()
        """Unique keys of half messages whose block has not ended."""
        self._decided: dict[str, bool] = {}
        """Of those that were to be committed, or rolled back, and could not."""

    def join(self, transactions: Transactions, checker: Checker | None) -> None:
        """A producer of the group has come."""
        with self._lock:
            self._checkers.append(checker)
        transactions.on_check(self._group, self.answer)

    def leave(self, transactions: Transactions, checker: Checker | None) -> None:
        """It has gone. What is decided is still told, and what still runs is not asked about."""
        with self._lock:
            self._checkers.remove(checker)
        self._withdraw(transactions)

    def begin(self, unique_key: str) -> None:
        with self._lock:
            self._running.add(unique_key)

    def end(self, transactions: Transactions, unique_key: str, decided: bool | None = None) -> None:
        """A block is over; `decided`: how, where that could not be carried out."""
        with self._lock:
            self._running.discard(unique_key)
            if decided is not None:
                self._decided[unique_key] = decided
        self._withdraw(transactions)

    def _withdraw(self, transactions: Transactions) -> None:
        with self._lock:
            self._decided = {key: how for key, how in self._decided.items() if transactions.get(key) is not None}
            if self._checkers or self._running or self._decided:
                return
            transactions.on_check(self._group, None)

    def answer(self, message: Message) -> bool | NotAsked | None:
        """The engine's callback."""
        with self._lock:
            if message.unique_key in self._running:
                return NOT_ASKED
            decided = self._decided.get(message.unique_key)
            if decided is not None:
                return decided
            checker = next((each for each in reversed(self._checkers) if each is not None), None)
            if checker is None:
                return None if self._checkers else NOT_ASKED
        return checker(message)


# Keyed by an engine and gone with it: what its producers share, though they are made one by one and know nothing of
# each other. A `GroupChecks` must not hold its key, so it is given the engine with each call.
_shared: WeakKeyDictionary[Transactions, dict[str, GroupChecks]] = WeakKeyDictionary()
_shared_lock = threading.Lock()


def checks_of(transactions: Transactions, group: str) -> GroupChecks:
    """The one of that group of that engine."""
    with _shared_lock:
        return _shared.setdefault(transactions, {}).setdefault(group, GroupChecks(group))


class Transaction:
    """Messages that become visible, one by one, when its `with` block ends well. For one thread and one block.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     with store.producer() as producer, producer.transaction() as tx:
    ...         _ = tx.send("orders", b"paid", queue_id=0)
    ...         before = store.read("orders", 0, 0)
    ...     before, [message.body for message in store.read("orders", 0, 0)]
    ([], [b'paid'])
    """

    def __init__(self, producer: Producer, transactions: Transactions, checks: GroupChecks, group: str) -> None:
        self._producer = producer
        self._transactions = transactions
        self._checks = checks
        self._group = group
        self._state: Literal["new", "open", "commit", "rollback"] = "new"
        self._halves: list[tuple[TransactionHandle, OutgoingMessage | None]] = []
        self._flush = False
        self.receipts: list[SendReceipt | None] = []
        """After the commit: where each message went, in order; None of one whose commit failed."""

    def send(self, topic: str, body: Body, *, queue_id: int | None = None, **options: Unpack[SendOptions]) -> str:
        """Store a message that nobody sees before the block has ended well; its unique key, which is what the checker
        will know it by. Options as of `Producer.send`, but no delay and no message group: InvalidMessageError."""
        if self._state != "open":
            raise TransactionStateError("a transaction sends inside its `with` block", self._outcome())
        ready = self._producer._preparer.half(topic, body, queue_id, options)
        unique_key = ready.unique_key
        self._checks.begin(unique_key)
        try:  # Ctrl-C between the two leaves a half that is asked about, not one that runs for ever
            self._halves.append((self._producer._prepare(ready, self._group), ready.message))
        except BaseException as error:
            self._checks.end(self._transactions, unique_key)
            self._producer._preparer.tell(ready.message, None, error)
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
        if error is None:
            self._commit()
        else:
            self._roll_back(error)

    def _commit(self) -> None:
        """Make all visible. Of one that cannot be, the error is raised once the others are; it stays open, and is
        committed when the engine asks next."""
        self._state = "commit"
        failed: MQStoreError | None = None
        for receipt, error in self._end_all("commit", None):
            self.receipts.append(receipt)
            failed = failed or error
        if self._flush and any(self.receipts):
            try:
                self._producer._sync()
            except FlushTimeoutError as late:
                failed = failed or FlushTimeoutError(str(late), self.receipts[-1])
            except MQStoreError as error:
                failed = failed or error
        if failed is not None:
            failed.receipts = [receipt for receipt in self.receipts if receipt is not None]
            raise failed

    def _roll_back(self, cause: BaseException) -> None:
        """Forget all. What fails here is logged: the caller is to see why it came to this."""
        self._state = "rollback"
        for _, error in self._end_all("rollback", cause):
            if error is not None:
                _log.warning("a transaction could not be rolled back yet: %s", error)

    def _end_all(
        self, outcome: Literal["commit", "rollback"], cause: BaseException | None
    ) -> list[tuple[SendReceipt | None, MQStoreError | None]]:
        """End every half; of each its receipt, or the error. What could not be done is noted, to be done when the
        engine asks: also when Ctrl-C comes in between."""
        ended: list[tuple[SendReceipt | None, MQStoreError | None]] = []
        try:
            for handle, message in self._halves:
                receipt: SendReceipt | None = None
                error: MQStoreError | None = None
                try:
                    receipt = self._transactions.end(handle, outcome, durability="append")
                except (MQStoreError, LookupError) as raised:
                    error = raised if isinstance(raised, MQStoreError) else MQStoreError(str(raised))
                later = error is not None and not isinstance(error, TransactionStateError)
                self._checks.end(self._transactions, handle.transaction_id, outcome == "commit" if later else None)
                ended.append((receipt, error))
                self._producer._preparer.tell(message, receipt, error or cause)
        finally:
            for handle, _ in self._halves[len(ended) :]:
                self._checks.end(self._transactions, handle.transaction_id, outcome == "commit")
        return ended
