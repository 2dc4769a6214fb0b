# ruff: noqa: A002  (`filter` is the word of the engine contract, clients#contract)
"""The engine contract: every operation that clients, queues, asyncio and `Store` use of a broker (clients#contract).

`broker/broker.py` implements it in this process. Another implementation may send each call over a socket: arguments
and results are plain values. Times are integer milliseconds, receipts are strings. A filter travels as its `expression`
and `kind`, and a message as its record. Callbacks are called in any thread, and must only wake another one. Only `put`
with durability "flush", `sync` and a `pop` with `poll` block.

    Broker ── topics, groups           configuration, by name
         ├─── members, locks           who consumes in a group, and who holds which queue
         ├─── transactions             half messages, and the callback that is asked about them
         ├─── begun                    notes of the messages that handlers have started
         └─── items                    messages of a queue by state: ready, leased, delayed, retrying, dead

The classes of `broker/` document their methods, and the protocols here only list those that clients may call. The other
operations are documented in `BrokerContract`.

A few members make calls fast in one process. An implementation that does not have them answers with nothing, and the
caller takes the ordinary way: `_sender` None, `pop_at_once` [], `ack_at_once` 0, `has_room` False.

Clients import the types of these values from here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, Unpack

from mqstore.broker.items.state import Item as Item
from mqstore.broker.items.state import ItemPage as ItemPage
from mqstore.broker.items.state import Place as Place
from mqstore.broker.items.state import State as State
from mqstore.broker.pop.orderinfo import BlockedQueue as BlockedQueue
from mqstore.broker.pop.request import Delivery as Delivery
from mqstore.broker.pop.request import Pending as Pending
from mqstore.broker.pop.state import MAX_BATCH as MAX_BATCH
from mqstore.broker.reads.filters.filter import Filter as Filter
from mqstore.broker.reads.reading import Loss as Loss
from mqstore.broker.reads.reading import ReadResult as ReadResult
from mqstore.broker.reads.reading import Start as Start
from mqstore.broker.reads.waiting import Callback
from mqstore.broker.reads.waiting import Waiter as Waiter
from mqstore.broker.redelivery.attempt_journal import Address as Address
from mqstore.broker.redelivery.attempt_journal import AttemptNotes as AttemptNotes
from mqstore.broker.redelivery.attempt_journal import Suspects as Suspects
from mqstore.broker.redelivery.dead_letters import DeadLetters as DeadLetters
from mqstore.broker.routing.router import SendOptions as SendOptions
from mqstore.broker.routing.selection import RoundRobin
from mqstore.broker.tables.groups import GroupConfig as GroupConfig
from mqstore.broker.tables.groups import RetryPolicy as RetryPolicy
from mqstore.broker.tables.locks import QueueLock as QueueLock
from mqstore.broker.tables.members import Expression as Expression
from mqstore.broker.tables.members import Member as Member
from mqstore.broker.tables.members import Mode as Mode
from mqstore.broker.tables.members import Subscriptions as Subscriptions
from mqstore.broker.tables.topics import TopicConfig as TopicConfig
from mqstore.broker.transactions.prepared import TransactionHandle as TransactionHandle
from mqstore.broker.transactions.service import NOT_ASKED as NOT_ASKED
from mqstore.broker.transactions.service import NobodyAsked as NobodyAsked
from mqstore.broker.transactions.service import Outcome
from mqstore.clock import Clock
from mqstore.log.commitlog import QueueRef, SendReceipt
from mqstore.log.message import Message
from mqstore.log.writing.outgoing import Body, OutgoingMessage
from mqstore.options import Durability, Duration

T = TypeVar("T")

Event = Literal["topics", "members", "locks", "save"]
"""Kind of event that `listen` reports."""


class Limits(NamedTuple):
    """Limits of messages."""

    max_message_size: int
    """Largest body in bytes."""
    max_delay: Duration
    """Longest delay in seconds."""


class TopicCalls(Protocol):
    """Topics by name (`broker/tables/topics.py`)."""

    def get(self, name: str) -> TopicConfig | None: ...
    def entered(self, name: str) -> TopicConfig | None: ...
    def require(self, name: str) -> TopicConfig: ...
    def for_send(self, name: str) -> TopicConfig: ...
    def for_priority(self, name: str) -> TopicConfig: ...
    def names(self, system: bool = False) -> list[str]: ...
    def expire(self, name: str, dead_letter: bool | None = None) -> TopicConfig: ...
    def create(self, name: str, *, queues: int | None = None, exist_ok: bool = True) -> TopicConfig: ...


class GroupCalls(Protocol):
    """Consumer groups by name (`broker/tables/groups.py`)."""

    def get(self, name: str) -> GroupConfig | None: ...
    def require(self, name: str) -> GroupConfig: ...
    def create(self, name: str, *, exist_ok: bool = True, **settings: Any) -> GroupConfig: ...


class MemberCalls(Protocol):
    """Members of consumer groups (`broker/tables/members.py`). `owner` is a text that no other consumer has."""

    def register(
        self,
        client_id: str,
        group: str,
        subscriptions: Subscriptions,
        mode: Mode,
        *,
        owner: str | None = None,
        retry: RetryPolicy | None = None,
    ) -> bool: ...

    def check(
        self,
        client_id: str,
        group: str,
        subscriptions: Subscriptions | None,
        mode: Mode,
        *,
        owner: str | None = None,
        retry: RetryPolicy | None = None,
    ) -> None: ...

    def unregister(self, client_id: str, group: str, *, owner: str | None = None) -> bool: ...
    def check_retry(self, client_id: str, group: str, retry: RetryPolicy | None) -> None: ...
    def set_retry(self, client_id: str, group: str, retry: RetryPolicy) -> None: ...
    def get(self, client_id: str, group: str) -> Member | None: ...
    def members(self, group: str) -> list[str]: ...
    def mode(self, group: str) -> Mode | None: ...


class LockCalls(Protocol):
    """Leases on queues for members that own them (`broker/tables/locks.py`)."""

    def try_lock(self, group: str, queue: QueueRef, client_id: str) -> bool: ...
    def try_lock_batch(self, group: str, queues: Iterable[QueueRef], client_id: str) -> set[QueueRef]: ...
    def renew_batch(self, group: str, queues: Iterable[QueueRef], client_id: str) -> set[QueueRef]: ...
    def unlock_batch(self, group: str, queues: Iterable[QueueRef], client_id: str) -> set[QueueRef]: ...
    def begin_work(self, group: str, queue: QueueRef, client_id: str) -> bool: ...
    def end_work(self, group: str, queue: QueueRef) -> None: ...
    def owner(self, group: str, queue: QueueRef) -> str | None: ...
    def snapshot(self) -> list[QueueLock]: ...


class TransactionCalls(Protocol):
    """Half messages (`broker/transactions/service.py`)."""

    def prepare(
        self,
        topic: str,
        body: Body,
        properties: Mapping[str, str],
        *,
        producer_group: str,
        queue_id: int | None = None,
        flag: int = 0,
        sys_flag: int = 0,
        durability: Durability | None = None,
    ) -> TransactionHandle: ...

    def end(
        self,
        transaction: TransactionHandle | str,
        outcome: Outcome,
        *,
        from_check: bool = False,
        durability: Durability | None = None,
    ) -> SendReceipt | None: ...

    def on_check(
        self, producer_group: str | None, callback: Callable[[Message], bool | NobodyAsked | None] | None
    ) -> None: ...

    def half_message(self, transaction: TransactionHandle) -> Message: ...
    def get(self, transaction_id: str) -> TransactionHandle | None: ...


class NoteCalls(Protocol):
    """Notes of the messages that handlers have started (`broker/redelivery/attempt_journal.py`).
    The next process learns from them which message may have ended this one. An implementation may keep none."""

    suspects: Suspects
    """Messages that may have ended a process: handled one at a time."""

    def open(self, group: str, workers: int, cells: int) -> AttemptNotes: ...


class ItemCalls(Protocol):
    """Items: messages of a topic by their state for a group that pops it (`broker/items/state.py`)."""

    def page(
        self, group: str, topic: str, state: State | None = None, after: Place | None = None, limit: int = 256
    ) -> ItemPage: ...

    def by_key(self, group: str, topic: str, key: str) -> list[Item]: ...

    def put(
        self,
        group: str,
        topic: str,
        body: Body,
        unique: str,
        *,
        unique_for: Duration | None = None,
        queue_id: int = 0,
        **options: Unpack[SendOptions],
    ) -> SendReceipt: ...

    def cancel(self, group: str, topic: str, unique_key: str) -> bool: ...
    def counts(self, group: str, topic: str) -> dict[State, int]: ...
    def purge(self, group: str, topic: str, state: State | None = None) -> int: ...


class OffsetCalls(Protocol):
    """Offsets of one broadcasting client (`broker/tables/localoffsets.py`)."""

    def reload(self) -> None: ...
    def committed(self, queue: QueueRef) -> int | None: ...
    def commit(self, queue: QueueRef, offset: int) -> None: ...
    def save(self) -> None: ...


class BrokerContract(Protocol):
    """Delivery, as clients see it."""

    name: str
    """Place of the messages, for texts: the path of the store."""
    clock: Clock
    is_remote: bool
    """True if calls need a connection."""
    own_clock: bool
    """True if the application moves the clock. Then no thread runs by itself."""
    limits: Limits
    durability: Durability
    """Durability of a put that names none."""
    topics: TopicCalls
    groups: GroupCalls
    members: MemberCalls
    locks: LockCalls
    transactions: TransactionCalls
    begun: NoteCalls
    items: ItemCalls
    shared: dict[str, Any]
    """State that the clients of this object share, by producer group. It begins empty."""
    _sender: object
    """Compiled put (`native.py`), or None."""
    _listeners: Mapping[Event, list[Any]]
    """Callbacks by the kind of event."""
    turns: RoundRobin | None
    """Choice of queues for messages without a group. None: each queue in turn."""
    # Not methods: a call between costs as much as some of the work.
    pop_at_once: Callable[[str, str, int, int, bool], list[Delivery]]
    """(group, topic, n, invisible_ms, order) -> messages that can be delivered without waiting for the disk, and in
    compiled code for a lock. [] does not mean that there are none."""
    ack_at_once: Callable[[str, str, Sequence[str]], int]
    """(group, topic, receipts) -> number of receipts, from the front, that were settled in the same way. The others are
    for `ack`."""
    has_room: Callable[[int], bool]
    """(bytes) -> True if a put of a record of that size need not wait."""
    save_offsets: Callable[[], None]
    """Return once all commits so far are on disk."""

    @property
    def closed(self) -> bool:
        """True if the engine was closed, or this is a forked child of the process that opened it."""

    def check_open(self) -> None:
        """Raise StoreClosedError if the engine was closed, and MissingFileError if its directory is gone."""

    def listen(self, event: Event, callback: Callable[..., object]) -> None:
        """Call `callback` at each event of a kind. Listening again with the same callback changes nothing.

        "topics"    (topic) was created, altered or deleted
        "members"   the members of (group), or their subscriptions, have changed
        "locks"     locks of (group) were released
        "save"      () offsets will be saved: commit those that are due
        """
        if callback not in self._listeners[event]:
            self._listeners[event].append(callback)

    def unlisten(self, event: Event, callback: Callable[..., object]) -> None:
        """Stop calling `callback`. Repeating it is harmless."""
        if callback in self._listeners[event]:
            self._listeners[event].remove(callback)

    # -- in ---------------------------------------------------------------------------------------------------------

    def put(
        self, topic: str, body: Body, *, queue_id: int | None = None, **options: Unpack[SendOptions]
    ) -> SendReceipt:
        """Append one message as `Router.put` does."""

    def put_many(
        self,
        topic: str,
        bodies: Iterable[Body | OutgoingMessage],
        *,
        queue_id: int | None = None,
        durability: Durability | None = None,
        **options: object,
    ) -> Sequence[SendReceipt]:
        """Append many messages to one queue, with one flush wait. `queue_id` None: the next queue in turn.
        Raises the errors of `put`. `options` are those of one message: InvalidMessageError says which method takes
        them."""

    def put_async(
        self, topic: str, body: Body, *, queue_id: int | None = None, **options: Unpack[SendOptions]
    ) -> Future[SendReceipt]:
        """Append one message as `put` does, without waiting for the disk.
        With durability "flush" the future is done at the next sync, which all waiting puts share. Otherwise it is done
        on return, or over a connection when the server has answered. A signal handler may call this at any time. If the
        message cannot be stored before the handler has returned, a thread does it afterwards."""

    def sync(self) -> None:
        """Return once everything put before is on disk."""

    def recall(self, recall_handle: str) -> bool:
        """Cancel a message delayed to a given time. Return True if it was still waiting.
        Raises InvalidReceiptError if `recall_handle` is not a handle."""

    def message_at(self, receipt: SendReceipt) -> Message:
        """Return the stored message of a receipt. Raises LookupError if it is gone."""

    def find(self, topic: str, *, unique_key: str, limit: int = 32) -> list[Message]:
        """Return the messages of `topic` with this unique key, newest first."""

    # -- out, by offset ---------------------------------------------------------------------------------------------

    def read(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_messages: int = 32,
        *,
        max_bytes: int | None = None,
        filter: Filter | str | None = None,
        group: str | None = None,
    ) -> ReadResult:
        """Return a queue's messages from `offset` on that pass `filter`. Never blocks.
        With `group` its permissions count, a pending reset is applied, and messages lost to retention are counted."""

    def filter(self, expression: str, kind: Literal["TAG", "SQL92"] = "TAG") -> Filter | None:
        """Return the filter for an expression over tags or properties, for `read`, `wait` and `pop`.
        Returns None if all messages pass. Raises FilterError with the position of the mistake."""

    def min_offset(self, topic: str, queue_id: int) -> int:
        """Return the offset of the first message that still counts, or `max_offset` of an empty queue. Raises
        TopicNotFoundError."""

    def max_offset(self, topic: str, queue_id: int) -> int:
        """Return the offset of the next message that will be put. Raises TopicNotFoundError."""

    def offset_for_time(
        self, topic: str, queue_id: int, timestamp_ms: int, bound: Literal["lower", "upper"] = "lower"
    ) -> int:
        """Return the offset of the first message stored at or after `timestamp_ms`.
        With bound "upper" it is the last message stored at or before `timestamp_ms`."""

    def add_waiter(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        callback: Callback,
        *,
        filter: Filter | str | None = None,
        timeout: Duration | None = None,
    ) -> Waiter:
        """Call `callback(worth_a_read)` once: a message at or after `offset` passes `filter`, or a read would move on.
        The dispatching thread calls it, or after the timeout the housekeeper, with False. The callback may only wake
        another thread. It must not block, put or read."""

    def add_pop_waiter(
        self,
        group: str,
        topic: str,
        callback: Callback,
        *,
        queue_id: int = -1,
        filter: Filter | str | None = None,
        order: bool = False,
        timeout: Duration | None = None,
    ) -> Waiter:
        """Call `callback(worth_a_pop)` once, when a pop may find a message, under the rules of `add_waiter`.
        Each message wakes one of several waiters."""

    def remove_waiter(self, waiter: Waiter) -> bool:
        """Remove a waiter. Return False if its callback has been called, or is about to be."""

    def wake_one(self, group: str, topic: str, queue_id: int = -1) -> None:
        """Pass a turn on to another waiting receiver, if the one called back will not pop."""

    # -- committed offsets ------------------------------------------------------------------------------------------

    def committed(self, group: str, topic: str, queue_id: int) -> int | None:
        """Return the group's committed offset, or None if it never committed."""

    def commit(
        self,
        group: str,
        topic: str,
        queue_id: int,
        offset: int,
        *,
        durability: Durability | None = None,
        owner: str | None = None,
    ) -> None:
        """Note that the group has consumed everything below `offset`.
        With "flush" it is on disk before this returns. A group that commits reads, so its deliveries by pop end,
        and their receipts expire. With `owner`, raises NotPermittedError if another client holds the queue's lock.
        Raises OffsetOutOfRangeError for an offset or a queue that does not exist."""

    def start_of(self, group: str, topic: str, queue_id: int, start: Start | None = None) -> int:
        """Return the group's committed offset, or commit and return the offset where it begins.
        `start` decides where a group begins that never committed; None: the group's configuration does."""

    def local_offsets(self, client_id: str, group: str) -> OffsetCalls:
        """Return the offsets of a broadcasting client, which are kept in a separate file.
        Raises ConfigError for names that cannot be those of a folder and a file, CorruptStoreError, StoreIOError."""

    def lag(self, group: str) -> dict[QueueRef, int]:
        """Return the number of messages of each queue that the group has not consumed.
        Messages in flight and retries count, also retries that wait. A queue in which the group has not started is left
        out. Raises GroupNotFoundError for a group without settings and committed offsets, whose lag is not known, and
        ConfigError for one that broadcasts."""

    def attempts(self, group: str, topic: str, queue_id: int) -> dict[int, int]:
        """Return the failed attempts of an orderly group, by offset."""

    def note_attempt(
        self, group: str, topic: str, queue_id: int, offset: int, attempts: int, *, error: str = ""
    ) -> None:
        """Note the number of failed attempts of an orderly group at a message, and the last error.
        It is on disk within a second."""

    def suspended(self, group: str) -> dict[QueueRef, BlockedQueue]:
        """Return the queues of an ordered group that a failed message blocks.
        A queue is listed from the first failure of its message until that message is settled, also while the next
        attempt runs. The group may pop with `order=True` or have ordered push consumers."""

    # -- out, by receipt --------------------------------------------------------------------------------------------

    def pop(
        self,
        group: str,
        topic: str,
        n: int = 1,
        *,
        queue_id: int = -1,
        invisible: Duration = 60,
        poll: Duration = 0,
        filter: Filter | str | None = None,
        order: bool = False,
        start: Start | None = None,
        attempt_id: str | None = None,
        local: bool = True,
        durability: Durability | None = None,
        skip_acked: bool = False,
        acks: Sequence[str] = (),
    ) -> list[Delivery]:
        """Deliver up to `n` (at most 32) messages, each invisible to the group for `invisible` seconds.
        First it acknowledges `acks`, as `ack` does.
        A message is redelivered unless it is acknowledged by then. With `order`, nothing after an unsettled message of
        its queue is delivered. That message is redelivered with all later ones of its batch, or with `skip_acked` only
        with those that were not acknowledged. Waits up to `poll` seconds for a first message."""

    def ack(self, group: str, topic: str, receipts: Sequence[str], *, durability: Durability | None = None) -> None:
        """Acknowledge deliveries. Settling one again is harmless.
        Raises ReceiptExpiredError for a message that was redelivered, InvalidReceiptError for a receipt that is not one
        of this group and topic."""

    def renew(
        self,
        group: str,
        topic: str,
        receipt: str,
        invisible: Duration,
        *,
        progress: str | None = None,
        durability: Durability | None = None,
    ) -> str:
        """Extend a delivery that is still being handled. The receipt stays valid, and is returned.
        `progress` is shown by `items` until the delivery ends, and lost with the process of the engine."""

    def nack(
        self,
        group: str,
        topic: str,
        receipt: str,
        delay: Duration | None = None,
        *,
        error: str = "",
        durability: Durability | None = None,
    ) -> str | None:
        """Settle a delivery as failed: it is redelivered after `delay`.
        `delay` None uses the group's retry policy. `error` is shown by `suspended` for a queue that is popped in
        order."""

    def release(
        self,
        group: str,
        topic: str,
        receipts: Sequence[str],
        *,
        delay: Duration = 0,
        durability: Durability | None = None,
    ) -> None:
        """Release deliveries: they are redelivered after `delay`, and the attempt does not count."""

    def dead_letter(
        self, group: str, topic: str, receipt: str, reason: str, *, durability: Durability | None = None
    ) -> None:
        """Move a delivery to the group's dead letters and settle it."""

    def take_losses(self, group: str) -> tuple[Loss, ...]:
        """Return the messages that the group, by popping, has lost since the last call.
        Retention removed them before they were popped or settled. Each loss is returned once, to the first caller. A
        consumer with an interceptor for `on_offset_reset` calls this itself. `stats().counters.lost` is the sum. A
        reader finds its losses in the result of `read`."""

    def pending(self, group: str) -> list[Pending]:
        """Return the group's deliveries in flight, by topic, queue and offset."""

    # -- failures ---------------------------------------------------------------------------------------------------

    def release_all(self, group: str, topic: str, queue_id: int) -> None:
        """End popping from a queue that the group now reads by offset, with its pop retry topics.
        Messages popped without order and not settled move there, to be delivered at their time. In order they are read
        from the first on. Existing receipts expire. Raises the errors of a put."""

    def pop_retry_topics(self, group: str, topic: str) -> list[str]:
        """Return the names of the topics that hold failed messages of `topic` for a group that pops.
        The topics need not exist. A group that reads has its failed messages of any topic in `%RETRY%group`."""

    def send_back(
        self,
        group: str,
        message: Message | SendReceipt | int,
        *,
        delay_level: int = 0,
        delay: Duration | None = None,
        max_reconsume: int | None = None,
        attempts: int | None = None,
        reason: str | None = None,
        durability: Durability | None = None,
    ) -> SendReceipt:
        """Redeliver a failed message to this group only, or dead-letter it.
        `message` may be given by its receipt, or by its physical offset. The delay is `delay`, a level, or with level 0
        the group's policy. The message becomes a dead letter if it has no attempt left, or `delay_level` is negative.
        `attempts` is the number of attempts that have ended; None: one more than the message's `reconsume_times`."""

    def dead_letters(self, group: str) -> DeadLetters:
        """Return the group's dead letters, to list, replay or purge."""

    # -- the store --------------------------------------------------------------------------------------------------

    def saved(self, work: Callable[[], T]) -> T:
        """Write to disk everything that `close` would write, and return `work()`.
        No service runs in between, so snapshots have the saved state."""

    def close(self, timeout: Duration = 30) -> None:
        """Wait for running work, save every table, and close the engine.
        Calling it again only closes the store, as `MessageStore.close` does. In a forked child it does nothing. Raises
        StoreBusyError in a signal handler that interrupted a call with a lock."""
