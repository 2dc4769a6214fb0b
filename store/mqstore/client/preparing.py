"""What a producer makes of a message before it is stored (clients#send, clients#compression).

    validate -> unique key -> `before_send` hooks -> validate what they return -> queue -> compress -> `Ready`

    queue                           chosen by                                                        tried again
    `queue_id=`                     the caller; below the topic's write queues                       no
    `selector`                      its function of (queues, message group)                          no
    `message_group=`                the store's group hash: all of a group in one queue              on that queue
    else                            turns, a counter a topic from a random start                     on that queue

RocketMQ compresses before its hooks. Here they see the body that the application gave, and all that they change is
honoured: queue and compression are decided on what they return.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

from mqstore.broker.broker import Broker
from mqstore.broker.road import SendOptions
from mqstore.broker.selection import RoundRobin
from mqstore.broker.uniquekey import new_unique_key
from mqstore.client.interceptors import Interceptors
from mqstore.client.sendrules import check_options, check_size, options_of
from mqstore.errors import ConfigError, FlushTimeoutError, InvalidMessageError
from mqstore.log.commitlog import QueueRef, SendReceipt
from mqstore.log.outgoing import ROUTING, Body, OutgoingMessage, checked_group, flat_body
from mqstore.options import Durability

__all__ = ["Batch", "Preparer", "Ready", "Selector", "go_together", "is_routed", "plain"]

Selector = Callable[[Sequence[QueueRef], "str | None"], QueueRef]
"""(the topic's queues, message group) -> the one to send to."""

_LEVEL: Final = 5


class Ready(NamedTuple):
    """A message that was checked and is as it will be stored."""

    topic: str
    body: bytes
    queue_id: int | None
    """None: by message group."""
    options: SendOptions
    flush: bool
    """Whether its sender wants to hear of it when it is on disk."""
    retries: int
    message: OutgoingMessage | None
    """For `after_send`, if anybody listens."""

    @property
    def unique_key(self) -> str:
        return cast(str, self.options["unique_key"])


Batch = dict[str, tuple[int | None, int]]
"""Of messages that are sent together: by topic, the queue of those that may lie anywhere, and their retries."""


class Preparer:
    """Prepares the messages of one producer, and tells its hooks what became of them. Thread-safe."""

    def __init__(
        self,
        broker: Broker,
        hooks: Interceptors,
        check_open: Callable[[], None],
        *,
        retries: int,
        durability: Durability | None,
        compress_over: int | None,
        selector: Selector | None,
    ) -> None:
        """`check_open` raises when nothing is sent any more. `compress_over` None: nothing is compressed."""
        self._broker = broker
        self._clock = broker.store.clock
        self._for_send = broker.topics.for_send
        self._turns = RoundRobin()
        self._hooks = hooks
        self.hooked = bool(hooks.before_send or hooks.after_send)
        """Whether hooks hear of messages."""
        self._check_open = check_open
        self._retries = retries
        self._durability = durability
        self.compress_over = compress_over
        self._selector = selector

    def place(
        self, topic: str, queue_id: int | None, options: SendOptions, batch: Batch | None, selector: Selector | None
    ) -> tuple[int | None, int]:
        """The queue to put to (None: by message group), and how often to try again. All of a `batch` that are free to
        lie anywhere lie together."""
        if selector is None:
            selector = self._selector
        elif queue_id is not None:
            raise InvalidMessageError("queue_id and selector exclude each other: give one of them", "queue_id")
        queues = self._for_send(topic).write_queues
        if queue_id is not None:
            if type(queue_id) is not int or not 0 <= queue_id < queues:
                raise InvalidMessageError(
                    f"queue_id {queue_id!r} does not lie in 0..{queues - 1}, the queues of {topic!r} for writing",
                    "queue_id",
                )
            return queue_id, 0
        group = options.get("message_group") if options else None
        if group is not None:
            return (None, self._retries) if selector is None else (_selected(selector, topic, queues, group), 0)
        if batch is not None and topic in batch:
            return batch[topic]
        if selector is None:
            placed = self._turns.next(topic, queues), self._retries
        else:
            placed = _selected(selector, topic, queues, None), 0
        if batch is not None:
            batch[topic] = placed
        return placed

    def complete(self, options: SendOptions) -> None:
        """Add what a producer adds."""
        if options.get("unique_key") is None:
            options["unique_key"] = new_unique_key()
        if self._durability is not None and options.get("durability") is None:
            options["durability"] = self._durability

    def compressed(self, body: Body, options: SendOptions) -> Body:
        """The body to store: compressed if it is large, was not compressed by the caller, and gets smaller."""
        if self.compress_over is None or options.get("compressed") is not None:
            return body
        flat = flat_body(body)
        if len(flat) < self.compress_over:
            return flat
        check_size(flat, self._broker.store.config.max_message_size)  # of the message, not of what is stored of it
        small = zlib.compress(flat, _LEVEL)
        if len(small) * 20 > len(flat) * 19:
            return flat
        options["compressed"] = "zlib"
        return small

    def _check(self, body: Body, options: SendOptions) -> bytes:
        """Everything about a message that can be told without its topic; the body as bytes."""
        config = self._broker.store.config
        return check_options(
            body,
            options,
            now_ms=self._clock.now_ms(),
            max_delay=config.max_delay,
            max_message_size=config.max_message_size,
        )

    def ready(
        self,
        topic: str,
        body: Body,
        queue_id: int | None,
        options: SendOptions,
        batch: Batch | None = None,
        selector: Selector | None = None,
    ) -> Ready:
        """A message as it will be stored: checked, so that what comes later can only be the engine's fault. With hooks
        `before_send` has its say; from there on `after_send` hears of the message."""
        self._check_open()
        flat = self._check(body, options)
        sent: OutgoingMessage | None = None
        if self.hooked:
            if options.get("unique_key") is None:
                options["unique_key"] = new_unique_key()
            sent = OutgoingMessage(flat, topic=topic, queue_id=queue_id, **options)
        try:
            if sent is not None:
                changed: object = self._hooks.sending(sent)
                if not isinstance(changed, OutgoingMessage):
                    raise TypeError(f"a before_send returned {changed!r:.80}; it has to return the message")
                if changed is not sent:
                    sent = changed
                    topic = topic if sent.topic is None else sent.topic
                    queue_id = sent.queue_id
                    selector = None if queue_id is not None else selector  # the hook has chosen
                    options = options_of(sent)
                    flat = self._check(sent.body, options)
            self.complete(options)
            queue_id, retries = self.place(topic, queue_id, options, batch, selector)
            if batch is None:
                flat = cast(bytes, self.compressed(flat, options))
            flush = (options.get("durability") or self._broker.store.durability) == "flush"
            return Ready(topic, flat, queue_id, options, flush, retries, sent)
        except BaseException as error:
            self.tell(sent, None, error)
            raise

    def half(self, topic: str, body: Body, queue_id: int | None, options: SendOptions) -> Ready:
        """As `ready`, for a half message."""
        for name in ROUTING:
            if options.get(name) is not None:
                raise InvalidMessageError(f"a message of a transaction cannot have {name}", name)
        ready = self.ready(topic, body, queue_id, options)
        wrong = next((name for name in ROUTING if ready.options.get(name) is not None), None)
        if wrong is not None:  # of an interceptor
            error = InvalidMessageError(f"a message of a transaction cannot have {wrong}", wrong)
            self.tell(ready.message, None, error)
            raise error
        return ready

    def one_of_many(
        self, topic: str, item: Body | OutgoingMessage, queue_id: int | None, options: SendOptions, batch: Batch
    ) -> Ready:
        if not isinstance(item, OutgoingMessage):
            return self.ready(topic, item, queue_id, options.copy(), batch)
        return self.ready(
            topic if item.topic is None else item.topic,
            item.body,
            queue_id if item.queue_id is None else item.queue_id,
            {**options, **options_of(item)},
            batch,
        )

    def tell(self, message: OutgoingMessage | None, receipt: SendReceipt | None, error: BaseException | None) -> None:
        """Tell the hooks what became of a message. One whose sync failed is stored: it has its receipt as well."""
        if message is None:
            return
        if receipt is None and isinstance(error, FlushTimeoutError) and isinstance(error.receipt, SendReceipt):
            receipt = error.receipt
        self._hooks.tell(self._hooks.after_send, message, receipt, error)


def is_routed(ready: Ready) -> bool:
    """Whether a message takes the road by itself: a put of many knows neither delay nor message group."""
    options: Mapping[str, Any] = ready.options
    return any(options.get(name) is not None for name in (*ROUTING, "compressed"))


def go_together(first: Ready, other: Ready) -> bool:
    return (other.topic, other.queue_id) == (first.topic, first.queue_id) and not is_routed(other)


def plain(ready: Ready) -> OutgoingMessage:
    """What a put of many takes of it."""
    options = ready.options
    return OutgoingMessage(
        ready.body,
        options.get("tag"),
        options.get("keys"),
        options.get("properties"),
        options.get("unique_key"),
        options.get("flag", 0),
    )


def _selected(selector: Selector, topic: str, queues: int, group: str | int | None) -> int:
    """Return the queue that `selector` chooses among those of `topic` for writing."""
    if not callable(selector):
        raise ConfigError(f"a selector is a function of (queues, message group), not {selector!r:.80}")
    name = None if group is None else checked_group(group)
    chosen: object = selector([QueueRef(topic, queue_id) for queue_id in range(queues)], name)
    if isinstance(chosen, tuple) and len(chosen) == 2 and chosen[0] == topic:
        queue_id = chosen[1]
        if type(queue_id) is int and 0 <= queue_id < queues:
            return queue_id
    raise InvalidMessageError(f"the selector returned {chosen!r}, which is no queue of {topic!r}", "queue_id")
