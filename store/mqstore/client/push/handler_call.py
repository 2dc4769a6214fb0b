"""Calls of a handler, and the meaning of its end (clients#handler-end).

    returns                    None                     done
    raises an Exception        Failure                  again, or a dead letter, as handlers.py says
    SystemExit, Ctrl-C         passes                   nothing is settled, the consumer stops

The caller deals with a failure.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, Final, Literal

from mqstore.broker.admin.statistics import Statistics
from mqstore.broker.redelivery.attempt_journal import note, note_run
from mqstore.client.group.groupsettings import Wanted
from mqstore.client.interceptors import DeliveryResult, Interceptors, Settled
from mqstore.client.limitedlog import text_of
from mqstore.client.push.handlers import COMMIT, BatchFailure, Decision, Reject, Retry, check_has_run, retry_delay
from mqstore.client.push.workers import Awaited, Flow, Worker
from mqstore.contract import Address, BrokerContract
from mqstore.log.commitlog import QueueRef
from mqstore.log.message import Message

# RocketMQ's names for these are CONSUME_OK_TPS, CONSUME_FAILED_TPS, CONSUME_RT, PULL_TPS and PULL_RT.
CONSUME_OK: Final = "CONSUME_OK"
CONSUME_FAILED: Final = "CONSUME_FAILED"
CONSUME_US: Final = "CONSUME_US"
"""Microseconds in handlers. The number of additions is the number of messages."""
PULL: Final = "PULL"
PULL_US: Final = "PULL_US"
"""Microseconds in pulls that found messages."""

OnError = Callable[[BaseException, Message | None], object]
_OUTCOMES: Final[tuple[tuple[Any, Literal["success", "retry", "reject", "exception"]], ...]] = (
    (NoneType, "success"),
    (Retry | BatchFailure, "retry"),
    (Reject, "reject"),
    (Exception, "exception"),
)
Ended = tuple["Failure | None", float]
"""Failure of a call, or None for success, and its duration in milliseconds."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """Handler of a topic, and the filter of its messages."""

    handler: Callable[..., object]
    wanted: Wanted


@dataclass(frozen=True, slots=True)
class Failure:
    kind: Literal["retry", "reject", "commit", "rollback"]
    """The last two are decisions and no failures."""
    reason: str
    delay_s: float | None = None
    failed: tuple[Message, ...] | None = None
    """Failed messages of a batch, or None for all."""
    untried: tuple[Message, ...] = ()
    """Messages of a batch whose attempt does not count."""


class Handling:
    """Handlers of a consumer, with the work that surrounds each call."""

    def __init__(
        self,
        broker: BrokerContract,
        group: str,
        *,
        batch: bool,
        ordered: bool,
        one_queue: bool,
        interceptors: Interceptors,
        on_error: OnError | None,
    ) -> None:
        """With `batch` handlers take sequences of messages, else one message.
        With `ordered` a handler that timed out counts when it ends. With `one_queue` the messages of a call are of one
        queue, ascending."""
        self.group = group
        self.hooks = interceptors
        self._around, self._after = interceptors.around_consume, interceptors.after_consume
        self.log = interceptors.log
        """Log for all that is said of messages."""
        self.statistics = Statistics(broker.clock)
        """Counters below, by topic."""
        self.subscriptions: Mapping[str, Subscription] = {}
        """Subscriptions by topic. The table is replaced, never changed."""
        self._batch = batch
        self._ordered = ordered
        self._note = note_run if one_queue else note
        self._on_error = on_error
        self.suspects = broker.begun.suspects
        """Messages of which only one at a time may be in a handler."""
        self._is_closed = False

    def watches(self) -> bool:
        """Return True if messages of the group are suspected of having ended the process."""
        return self.group in self.suspects.left

    def is_suspect(self, message: Message) -> bool:
        return self.suspects.holds(self.group, Address(*message.queue, message.offset))

    def together(self, messages: Sequence[Message]) -> int:
        """Return how many of the first messages one call may have. A suspected message is alone."""
        return next((i for i, message in enumerate(messages) if self.is_suspect(message)), len(messages)) or 1

    def in_turn(self, key: object, turn: Callable[[], object]) -> None:
        """Call `turn()`, now or later, once `key` may have a suspected message handled.
        `has_handled` or `suspects.release` must follow."""
        self.suspects.come(key, self, turn)
        if self._is_closed:  # a late worker of a stopped consumer: its turn would never end
            self.suspects.desert(self)

    def has_handled(self, key: object, messages: Sequence[Message]) -> None:
        """Note that these messages have been through a handler in the turn of `key`, or never will be."""
        self.suspects.clear(self.group, [Address(*message.queue, message.offset) for message in messages])
        self.suspects.release(key)

    def close(self) -> None:
        """Give up all turns, including those that workers ask for later."""
        self._is_closed = True
        self.suspects.desert(self)

    def call(self, worker: Worker, subscription: Subscription, messages: Sequence[Message]) -> Ended | Flow[Ended]:
        """Call the handler with `messages` on this thread, and return how the call ended.
        `messages` is one message unless handlers take batches. If the handler returned an `Awaited`, return the flow
        that waits for it. SystemExit and KeyboardInterrupt pass."""
        handler = subscription.handler
        argument = tuple(messages) if self._batch else messages[0]  # the handler must not change our list
        if self._batch:
            worker.begin(messages)
            self._note(worker.cells, messages)
        else:  # the same inline for one message, which may come every two microseconds
            worker.calls += 1
            worker.messages = messages
            worker.cells[0] = messages[0].physical_offset
        result: Any = None
        raised: Exception | None = None
        begin = time.perf_counter()
        try:
            if self._around:
                results: list[Decision | None] = [None]

                def consume() -> None:
                    returned = handler(argument)
                    # The result is checked inside, so that hooks see a failure.
                    results.append(returned.wait(worker) if isinstance(returned, Awaited) else check_has_run(returned))

                self.hooks.consuming(consume, messages)
                result = results[-1]
            elif (result := handler(argument)) is not None:
                if isinstance(result, Awaited):
                    return self._rest(worker, subscription, messages, begin, result)
                result = check_has_run(result)
        except Exception as error:
            raised = error
        worker.end()
        worker.ended_at = ended_at = time.perf_counter()  # before reporting, which may take time
        took_ms = (ended_at - begin) * 1000
        if self._after:
            self._consumed(worker, messages, took_ms, raised)
        if raised is not None:
            return self._failure(raised, messages), took_ms
        return None if result is None else _decided(result), took_ms

    def _rest(
        self, worker: Worker, subscription: Subscription, messages: Sequence[Message], begin: float, awaited: Awaited
    ) -> Flow[Ended]:
        raised: Exception | None = None
        try:
            yield awaited
        except Exception as error:
            raised = error
        took_ms = (worker.ended_at - begin) * 1000
        if self._after:
            self._consumed(worker, messages, took_ms, raised)
        return _decided(awaited.decision) if raised is None else self._failure(raised, messages), took_ms

    def _consumed(self, worker: Worker, messages: Sequence[Message], took_ms: float, error: Exception | None) -> None:
        """Report the end of a call to `after_consume`.
        A call that timed out has been reported already, and counts only in order."""
        if worker.lapsed == worker.calls and not self._ordered:
            return
        outcome = next(outcome for kinds, outcome in _OUTCOMES if isinstance(error, kinds))
        consumed = DeliveryResult(self.group, messages[0].topic, tuple(messages), outcome, took_ms / 1000, error)
        self.hooks.notify(self._after, consumed)

    def timed_out(self, message: Message, stack: str, timeout_ms: int) -> None:
        """Tell the interceptors that a handler has had a message for longer than `consume_timeout`."""
        if self.watches() and self.is_suspect(message):
            self.suspects.give_up(self)
        if self._after:
            consumed = DeliveryResult(self.group, message.topic, (message,), "timeout", timeout_ms / 1000, None)
            self.hooks.notify(self._after, consumed)
        self.hooks.notify(self.hooks.on_timeout, message, stack)

    def _failure(self, error: Exception, messages: Sequence[Message]) -> Failure:
        # The exception may be of a user's class and lack attributes. Its messages have failed in any case.
        if isinstance(error, Retry):
            return Failure("retry", text_of(error), retry_delay(error))
        if isinstance(error, Reject):
            return Failure("reject", text_of(getattr(error, "reason", "") or "") or "rejected by its handler")
        if isinstance(error, BatchFailure):
            named = _named(messages, error)
            if named is not None:
                return Failure("retry", text_of(error), failed=named[0], untried=named[1])
            wrong = ValueError("BatchFailure names messages that were not in the batch")
            self.report(wrong, "all of the batch is taken for failed", messages[0])
            return Failure("retry", text_of(error))
        first = messages[0]
        what = f"the handler failed, attempt {first.attempt}"
        self.log.say(logging.ERROR, what, at=messages, error=error, like="the handler failed", traceback=True)
        self._tell(error, first)
        return Failure("retry", f"{type(error).__name__}: {text_of(error)}")

    def report(self, error: BaseException, what: str, at: Message | QueueRef | None = None) -> None:
        """Report an error that reaches no caller to the log and to `on_error`."""
        self.log.say(logging.ERROR, what, at=at, error=error)
        self._tell(error, at if isinstance(at, Message) else None)

    def _tell(self, error: BaseException, message: Message | None) -> None:
        if self._on_error is None:
            return
        try:
            self._on_error(error, message)
        except Exception as failed:
            self.log.say(logging.ERROR, "on_error failed", at=message, error=failed, traceback=True)

    def settled(self, messages: Sequence[Message], outcome: Settled, took_ms: float) -> None:
        """Count these messages of one topic, and notify the interceptors."""
        name, topic, number = CONSUME_OK if outcome == "ack" else CONSUME_FAILED, messages[0].topic, len(messages)
        self.statistics.add_many(((name, topic, number, 1), (CONSUME_US, topic, int(took_ms * 1000), number)))
        if not self.hooks.on_settle:
            return
        for message in messages:
            self.hooks.notify(self.hooks.on_settle, message, outcome, took_ms / 1000)

    def pulled(self, topic: str, messages: int, took_ms: float) -> None:
        self.statistics.add_many(((PULL, topic, messages, 1), (PULL_US, topic, int(took_ms * 1000), 1)))


def _decided(decision: Decision | None) -> Failure | None:
    """Return a decision as the outcome of a call. With auto commit COMMIT is success, and ROLLBACK fails the call."""
    if decision is None:
        return None
    return Failure(decision.value, "ROLLBACK needs auto_commit=False", failed=() if decision is COMMIT else None)


def _named(messages: Sequence[Message], error: BatchFailure) -> list[tuple[Message, ...]] | None:
    """Return the failed and the untried messages, each once and in order, or None if something else is named."""
    try:
        failed, untried = (
            {(message.queue, message.offset) for message in named}
            for named in (error.failed, getattr(error, "untried", ()))
        )
    except Exception:
        return None
    found = [
        tuple(message for message in messages if (message.queue, message.offset) in names)
        for names in (failed, untried - failed)
    ]
    return found if sum(map(len, found)) == len(failed | untried) else None
