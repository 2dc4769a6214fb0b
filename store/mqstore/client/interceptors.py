"""Interceptors: user code called around every step of every message (clients#interceptors).

    before_send --> stored --> after_send     on_receive --> around_consume(handler) --> after_consume --> on_settle

Hooks run in the order in which the interceptors were given. An error in a hook is logged, though not for every message
(limitedlog.py), and stops nothing. Two hooks differ. `before_send` can forbid a message by raising, and
`around_consume` passes the handler's error on. A hook that nobody overrides costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from mqstore.client.limitedlog import LimitedLog
from mqstore.client.push.handlers import check_plain
from mqstore.errors import ConfigError
from mqstore.log.commitlog import QueueRef, SendReceipt
from mqstore.log.message import Message
from mqstore.log.writing.outgoing import OutgoingMessage

Settled = Literal["ack", "retry", "dlq"]
"""Outcome of a message: done, to be redelivered, or dead-lettered."""


@dataclass(frozen=True, slots=True)
class DeliveryResult:
    """End of one call of a push consumer's handler.

    >>> consumed = DeliveryResult("billing", "orders", (), "exception", 0.25, ValueError("no such order"))
    >>> consumed.group, consumed.topic, consumed.outcome
    ('billing', 'orders', 'exception')
    """

    group: str
    topic: str
    """Topic that the messages were sent to, even if they came from a retry topic."""
    messages: tuple[Message, ...]
    outcome: Literal["success", "retry", "reject", "exception", "timeout"]
    """"success": it returned. "retry": it raised `Retry` or `BatchFailure`. "reject": it
    raised `Reject`. "exception": it raised anything else. "timeout": it has not ended within `consume_timeout`."""
    seconds: float
    """Time in the handler, up to the timeout if it timed out."""
    error: BaseException | None
    """Exception that the handler raised."""


class Interceptor:
    """Base class of interceptors. Override the hooks that you need.

    >>> class TimelineFields(Interceptor):
    ...     def on_settle(self, message, outcome, seconds):
    ...         print(message.topic, outcome)
    """

    def before_send(self, message: OutgoingMessage) -> OutgoingMessage:
        """Return the message to send: `message` or another one. If this raises, the sender gets the error.
        Then nothing is sent."""
        return message

    def after_send(self, message: OutgoingMessage, receipt: SendReceipt | None, error: BaseException | None) -> None:
        """React to a message that was stored (`receipt`) or was not (`error`)."""

    def on_receive(self, messages: list[Message]) -> list[Message]:
        """Return the received messages to handle. Messages left out count as done."""
        return messages

    def around_consume(self, call: Callable[[], None], messages: Sequence[Message]) -> None:
        """Call the handler, which is `call`, and do your work before and after."""
        call()

    def after_consume(self, consumed: DeliveryResult) -> None:
        """React to the end or the timeout of a push consumer's handler.
        Without order the end of a handler that timed out is not reported, since it does not count."""

    def on_settle(self, message: Message, outcome: Settled, seconds: float) -> None:
        """React to a settled message. Its handler took `seconds`."""

    def on_assign(self, queues: frozenset[QueueRef]) -> None:
        """React to queues that are consumed here from now on. Their messages wait until this returns.
        It runs on a worker, and the locks of the queues are renewed meanwhile. `seek` may be called."""

    def on_revoke(self, queues: frozenset[QueueRef]) -> None:
        """React to queues that are no longer consumed here."""

    def on_offset_reset(self, queue: QueueRef, old: int, new: int) -> None:
        """React to a jump of the group from offset `old`, which does not exist, to `new`.
        If `new` is higher than `old`, the group has lost the messages between them. In mode "pop" and for a
        `SimpleConsumer` queues have no owner. Then one member of the group is called for each loss when it next looks
        for messages, and none for a `Broker.reset`."""

    def on_timeout(self, message: Message, stack: str) -> None:
        """React to a handler that exceeded `consume_timeout`. `stack` shows where it is now."""


class Interceptors:
    """Hooks of several interceptors, by name. A name that nobody overrides is an empty tuple."""

    before_send: tuple[Callable[[OutgoingMessage], OutgoingMessage], ...]
    after_send: tuple[Callable[[OutgoingMessage, SendReceipt | None, BaseException | None], None], ...]
    on_receive: tuple[Callable[[list[Message]], list[Message]], ...]
    around_consume: tuple[Callable[[Callable[[], None], Sequence[Message]], None], ...]
    after_consume: tuple[Callable[[DeliveryResult], None], ...]
    on_settle: tuple[Callable[[Message, Settled, float], None], ...]
    on_assign: tuple[Callable[[frozenset[QueueRef]], None], ...]
    on_revoke: tuple[Callable[[frozenset[QueueRef]], None], ...]
    on_offset_reset: tuple[Callable[[QueueRef, int, int], None], ...]
    on_timeout: tuple[Callable[[Message, str], None], ...]

    def __init__(self, interceptors: Sequence[Interceptor] = (), log: LimitedLog | None = None) -> None:
        """`log` is the log of the consumer or producer that has the interceptors."""
        if not isinstance(interceptors, Sequence):
            raise ConfigError(f"interceptors is a list of them, not {interceptors!r:.80}")
        for each in interceptors:
            if not isinstance(each, Interceptor):
                raise ConfigError(f"{each!r:.80} is not made from a class derived from mqstore.Interceptor")
        for name in self.__annotations__:
            plain = getattr(Interceptor, name)
            hooks = tuple(getattr(each, name) for each in interceptors if getattr(type(each), name) is not plain)
            for hook in hooks:
                check_plain(f"an interceptor's {name}", hook)
            setattr(self, name, hooks)
        self.log = LimitedLog() if log is None else log

    def notify(self, hooks: Sequence[Callable[..., object]], *arguments: Any) -> None:
        """Call each of `hooks`. Exceptions are logged."""
        for hook in hooks:
            try:
                hook(*arguments)
            except Exception as error:
                first = arguments[0]
                self._report(_name(hook), first.messages if isinstance(first, DeliveryResult) else first, error)

    def _report(self, name: str, at: object, error: Exception) -> None:
        self.log.say(logging.ERROR, f"an interceptor's {name} failed", at=at, error=error, traceback=True)

    def loss_teller(self) -> Callable[[QueueRef, int, int], None] | None:
        """Return a function that calls `on_offset_reset`, or None without hooks.
        With None the news is left to other members."""
        return partial(self.notify, self.on_offset_reset) if self.on_offset_reset else None

    def sending(self, message: OutgoingMessage) -> OutgoingMessage:
        """Return the message to send in place of `message`. Raises the errors of the hooks."""
        for hook in self.before_send:
            message = hook(message)
        return message

    def receiving(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages to handle, in their order. A hook that fails leaves them all.
        A hook's own order is ignored, because a position is the lowest unfinished offset."""
        for hook in self.on_receive:
            try:
                kept = {(message.queue, message.offset) for message in hook(list(messages))}
            except Exception as error:
                self._report(_name(hook), messages, error)
            else:
                messages = [message for message in messages if (message.queue, message.offset) in kept]
        return messages

    def consuming(self, call: Callable[[], object], messages: Sequence[Message]) -> None:
        """Call the handler inside every `around_consume`, the first one outermost.

        Raises the handler's exception, whatever the hooks do with it. An error of a hook itself is logged. A handler
        that no hook has called is called anyway.
        """
        called = False
        raised: BaseException | None = None

        def handle() -> None:
            nonlocal called, raised
            if called:
                return
            called = True
            try:
                call()
            except BaseException as error:
                raised = error
                raise

        inner: Callable[[], None] = handle
        for hook in reversed(self.around_consume):
            inner = partial(hook, inner, messages)
        try:
            inner()
        except Exception as error:
            if error is not raised:
                self._report("around_consume", messages, error)
        if not called:
            handle()
        elif raised is not None:
            raise raised


def _name(hook: Callable[..., object]) -> str:
    return str(getattr(hook, "__qualname__", hook))
