"""Code of the user's that is called around every step of every message (clients#interceptors).

    before_send --> stored --> after_send     on_receive --> around_consume(handler) --> after_consume --> on_settle

Hooks run in the order in which the interceptors were given. What one raises is logged, not for every message
(limitedlog.py), and stops nothing, except in `before_send`, which may so forbid a message to be sent, and in
`around_consume`, where what the handler raised passes. A hook that nobody overrides costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from mqstore.client.handlers import check_plain
from mqstore.client.limitedlog import LimitedLog
from mqstore.errors import ConfigError
from mqstore.log.commitlog import QueueRef, SendReceipt
from mqstore.log.message import Message
from mqstore.log.outgoing import OutgoingMessage

__all__ = ["Consumed", "Interceptor", "Interceptors", "Settled"]

Settled = Literal["ack", "retry", "dlq"]
"""What became of a message: done, to come again, given up."""


@dataclass(frozen=True, slots=True)
class Consumed:
    """End of one call of a handler of a push consumer.

    >>> consumed = Consumed("billing", "orders", (), "exception", 0.25, ValueError("no such order"))
    >>> consumed.group, consumed.topic, consumed.outcome
    ('billing', 'orders', 'exception')
    """

    group: str
    topic: str
    """Topic that the messages were sent to, also when they came from a retry topic."""
    messages: tuple[Message, ...]
    outcome: Literal["success", "retry", "reject", "exception", "timeout"]
    """"success": it returned. "retry": it raised `Retry` or `BatchFailure`. "reject": it
    raised `Reject`. "exception": it raised anything else. "timeout": it has not ended within `consume_timeout`."""
    seconds: float
    """Time in the handler; in one that timed out, until then."""
    error: BaseException | None
    """What it raised."""


class Interceptor:
    """Override what you need.

    >>> class Timed(Interceptor):
    ...     def on_settle(self, message, outcome, seconds):
    ...         print(message.topic, outcome)
    """

    def before_send(self, message: OutgoingMessage) -> OutgoingMessage:
        """What is sent in place of `message`, or it itself. What this raises, the sender gets: nothing is sent."""
        return message

    def after_send(self, message: OutgoingMessage, receipt: SendReceipt | None, error: BaseException | None) -> None:
        """A message was stored (`receipt`), or was not (`error`)."""

    def on_receive(self, messages: list[Message]) -> list[Message]:
        """Which of the messages that came are to be handled; those left out count as done."""
        return messages

    def around_consume(self, call: Callable[[], None], messages: Sequence[Message]) -> None:
        """Call the handler, which is `call`, and do what is to be done before and after."""
        call()

    def after_consume(self, consumed: Consumed) -> None:
        """A handler of a push consumer has ended, or has timed out. Of one that timed out without order the end is not
        told, for it does not count."""

    def on_settle(self, message: Message, outcome: Settled, seconds: float) -> None:
        """A message is dealt with; its handler took so long."""

    def on_assign(self, queues: frozenset[QueueRef]) -> None:
        """These queues are consumed here from now on. No message of them is handed out before this returns. It runs on
        a worker: the locks of the queues are renewed meanwhile. `seek` may be called."""

    def on_revoke(self, queues: frozenset[QueueRef]) -> None:
        """These queues are consumed here no longer."""

    def on_offset_reset(self, queue: QueueRef, old: int, new: int) -> None:
        """Offset `old` does not exist (any more): it goes on at `new`. Between them lies what the group has lost, if
        `new` is behind `old`. Where queues belong to nobody (`SimpleConsumer`, mode "pop") one member of the group is
        told of each loss, when it next looks for messages, and of no `Broker.reset`."""

    def on_timeout(self, message: Message, stack: str) -> None:
        """A handler has had a message for longer than `consume_timeout`; where it is now."""


class Interceptors:
    """The hooks of several interceptors, by name. A name that nobody overrides is an empty tuple.

    >>> chain = Interceptors([Interceptor()])
    >>> chain.on_settle
    ()
    """

    before_send: tuple[Callable[[OutgoingMessage], OutgoingMessage], ...]
    after_send: tuple[Callable[[OutgoingMessage, SendReceipt | None, BaseException | None], None], ...]
    on_receive: tuple[Callable[[list[Message]], list[Message]], ...]
    around_consume: tuple[Callable[[Callable[[], None], Sequence[Message]], None], ...]
    after_consume: tuple[Callable[[Consumed], None], ...]
    on_settle: tuple[Callable[[Message, Settled, float], None], ...]
    on_assign: tuple[Callable[[frozenset[QueueRef]], None], ...]
    on_revoke: tuple[Callable[[frozenset[QueueRef]], None], ...]
    on_offset_reset: tuple[Callable[[QueueRef, int, int], None], ...]
    on_timeout: tuple[Callable[[Message, str], None], ...]

    def __init__(self, interceptors: Sequence[Interceptor] = (), log: LimitedLog | None = None) -> None:
        """`log`: that of whose interceptors they are."""
        if not isinstance(interceptors, Sequence):
            raise ConfigError(f"interceptors is a list of them, not {interceptors!r:.80}")
        for each in interceptors:
            if not isinstance(each, Interceptor):
                raise ConfigError(f"{each!r:.80} is not made from a class derived from mqstore.Interceptor")
        for name in self.__annotations__:
            hooks = _hooks(interceptors, name)
            for hook in hooks:
                check_plain(f"an interceptor's {name}", hook)
            setattr(self, name, tuple(hooks))
        self.log = LimitedLog() if log is None else log

    def tell(self, hooks: Sequence[Callable[..., object]], *arguments: Any) -> None:
        """Call each of `hooks`; an exception of one is logged."""
        for hook in hooks:
            try:
                hook(*arguments)
            except Exception as error:
                first = arguments[0]
                self._report(_name(hook), first.messages if isinstance(first, Consumed) else first, error)

    def _report(self, name: str, at: object, error: Exception) -> None:
        self.log.say(logging.ERROR, f"an interceptor's {name} failed", at=at, error=error, traceback=True)

    def loss_teller(self) -> Callable[[QueueRef, int, int], None] | None:
        """What tells `on_offset_reset`; None where nobody listens, and the news is left to other members."""
        return partial(self.tell, self.on_offset_reset) if self.on_offset_reset else None

    def sending(self, message: OutgoingMessage) -> OutgoingMessage:
        """What is to be sent in place of `message`. Raises what a hook raises."""
        for hook in self.before_send:
            message = hook(message)
        return message

    def receiving(self, messages: list[Message]) -> list[Message]:
        """Which of `messages` are to be handled, in their order, whatever order a hook gives them back in: a position
        is the lowest of what is not done. A hook that fails leaves them all."""
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

        Raises what the handler raised, whatever the hooks do with it. A hook that fails by itself is logged, and one
        that never called the handler does not keep it from being called.
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
            inner = _around(hook, inner, messages)
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


def _around(
    hook: Callable[[Callable[[], None], Sequence[Message]], None],
    inner: Callable[[], None],
    messages: Sequence[Message],
) -> Callable[[], None]:
    return lambda: hook(inner, messages)


def _hooks(interceptors: Sequence[Interceptor], name: str) -> list[Any]:
    plain = getattr(Interceptor, name)
    return [getattr(each, name) for each in interceptors if getattr(type(each), name, plain) is not plain]
