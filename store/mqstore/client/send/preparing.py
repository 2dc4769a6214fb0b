"""Preparation of a producer's messages before they are stored (clients#send, clients#compression).

validate -> unique key -> `before_send` hooks -> validate again -> queue -> compress -> `Ready`

queue                           chosen by                                                        tried again
`queue_id=`                     the caller; below the topic's write queues                       no
`selector`                      its function of (queues, None)                                   no
`message_group=`                the store's group hash: all of a group in one queue              on that queue
else                            turns, a counter a topic from a random start                     on that queue
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final, NamedTuple, cast

from mqstore.broker.delay.route import routed_properties
from mqstore.broker.routing.selection import RoundRobin
from mqstore.broker.routing.uniquekey import new_unique_key
from mqstore.client.interceptors import Interceptors
from mqstore.contract import BrokerContract, Limits, SendOptions
from mqstore.errors import ConfigError, FlushTimeoutError, InvalidMessageError
from mqstore.layout.properties import encode_properties
from mqstore.log.commitlog import QueueRef, SendReceipt
from mqstore.log.writing.outgoing import (
    ROUTING,
    Body,
    OutgoingMessage,
    check_integer,
    checked_pairs,
    flat_body,
    key_words,
    no_such_option,
)
from mqstore.options import Durability, seconds

MAX_PROPERTIES: Final = 128
MAX_PROPERTIES_BYTES: Final = 16 << 10

_UNSET: Final = {
    field.name: field.default for field in fields(OutgoingMessage) if field.name not in ("body", "topic", "queue_id")
}
"""Options of a put, each with the value that means "not given"."""


def options_of(message: OutgoingMessage) -> SendOptions:
    """Return the options of a put that a message has, without topic, body and queue."""
    given = {name: value for name, unset in _UNSET.items() if (value := getattr(message, name)) != unset}
    return cast(SendOptions, given)


def check_options(body: object, options: SendOptions, limits: Limits, now_ms: int) -> bytes:
    """Check all of a message but its topic and queue. Return its body as bytes.
    A producer checks these rules before it calls hooks or gives a message to another thread, so that the caller gets
    the error at once. A put checks most of them, too.

    Options that can be read only once are replaced by copies, as `check_limits` does.

    Raises InvalidMessageError, ConfigError for an unknown durability, and TypeError for an unknown option.
    """
    flat = flat_body(body)
    check_size(flat, limits.max_message_size)
    if not options:
        return flat
    unknown = options.keys() - _UNSET.keys()
    if unknown:
        raise no_such_option(unknown, _UNSET)
    check_limits(options)
    check_integer(options.get("flag", 0), 32, "flag")
    one_of(options.get("durability"), "durability", (None, "append", "flush"))
    if options.get("compressed") not in (None, "zlib"):
        raise InvalidMessageError(f"compressed {options.get('compressed')!r} is not 'zlib'", "compressed")
    max_delay_ms = int(seconds(limits.max_delay, "max_delay") * 1000)
    encode_properties(routed_properties(options, now_ms=now_ms, max_delay_ms=max_delay_ms))
    return flat


def check_size(body: bytes, max_message_size: int) -> None:
    if len(body) > max_message_size:
        raise InvalidMessageError(f"the body has {len(body)} bytes; max_message_size is {max_message_size}", "body")


def check_limits(options: SendOptions) -> None:
    """Check the size of tag, keys and properties.
    `keys` that can be read only once, and `properties` that may change, are replaced by copies."""
    keys, properties, tag = options.get("keys"), options.get("properties"), options.get("tag")
    texts: list[object] = [tag]
    if isinstance(keys, str):
        texts.append(keys)
    elif keys is not None:
        options["keys"] = keys = key_words(keys)
        texts += keys
    if properties:
        options["properties"] = properties = dict(checked_pairs(properties))
        if len(properties) > MAX_PROPERTIES:
            raise InvalidMessageError(
                f"the message has {len(properties)} properties; at most {MAX_PROPERTIES} are allowed", "properties"
            )
        texts += properties.keys()
        texts += properties.values()
    words = [text for text in texts if isinstance(text, str)]  # other types are refused elsewhere
    if 4 * sum(map(len, words)) <= MAX_PROPERTIES_BYTES:  # no character takes more than four bytes
        return
    size = sum(len(word.encode("utf-8", "surrogatepass")) for word in words)
    if size > MAX_PROPERTIES_BYTES:
        raise InvalidMessageError(
            f"properties, tag and keys take {size} bytes; at most {MAX_PROPERTIES_BYTES} are allowed", "properties"
        )


def one_of(value: object, name: str, allowed: tuple[object, ...]) -> None:
    """Raise ConfigError unless `value` is allowed for the option `name`."""
    if value not in allowed:
        raise ConfigError(f"{name} is one of {', '.join(map(repr, allowed))}, not {value!r}")


Selector = Callable[[Sequence[QueueRef], "str | None"], QueueRef]
"""Function (the topic's queues, None) -> the queue to send to. A message with a group has its queue by the group."""

_LEVEL: Final = 5


class Ready(NamedTuple):
    """Checked message, in the form in which it will be stored."""

    topic: str
    body: bytes
    queue_id: int | None
    """Queue, or None to choose by message group."""
    options: SendOptions
    flush: bool
    """True if its sender waits until it is on disk."""
    retries: int
    message: OutgoingMessage | None
    """Message for `after_send`, if there are such hooks."""

    @property
    def unique_key(self) -> str:
        return cast(str, self.options["unique_key"])


Batch = dict[str, tuple[int | None, int]]
"""Queue and retries, by topic, of the messages sent together that may be in any queue."""


class Preparer:
    """Prepares the messages of one producer, and reports the results to its hooks. Thread-safe."""

    def __init__(
        self,
        broker: BrokerContract,
        hooks: Interceptors,
        check_open: Callable[[], None],
        *,
        retries: int,
        durability: Durability | None,
        compress_over: int | None,
        selector: Selector | None,
    ) -> None:
        """`check_open` raises once sending has ended. With `compress_over` None nothing is compressed."""
        self._broker = broker
        self._clock = broker.clock
        self._for_send = broker.topics.for_send
        self._turns = RoundRobin() if broker.turns is None else broker.turns
        self._hooks = hooks
        self.hooked = bool(hooks.before_send or hooks.after_send)
        """True if hooks are called for messages."""
        self._check_open = check_open
        self._retries = retries
        self.durability = durability
        self.compress_over = compress_over
        self._selector = selector

    def place(
        self, topic: str, queue_id: int | None, options: SendOptions, batch: Batch | None, selector: Selector | None
    ) -> tuple[int | None, int]:
        """Return the queue to put to, or None for the message group's, and the number of retries.
        All messages of a `batch` that may be in any queue get the same one."""
        if selector is None:
            selector = self._selector
        elif queue_id is not None:
            raise InvalidMessageError("queue_id and selector exclude each other: give one of them", "queue_id")
        queues = self._for_send(topic).write_queues
        if options and options.get("message_group") is not None:
            if queue_id is not None or selector is not None:
                raise InvalidMessageError(
                    "message_group chooses the queue: leave out queue_id and selector", "message_group"
                )
            return None, self._retries
        if queue_id is not None:
            if type(queue_id) is not int or not 0 <= queue_id < queues:
                raise InvalidMessageError(
                    f"queue_id {queue_id!r} does not lie in 0..{queues - 1}, the queues of {topic!r} for writing",
                    "queue_id",
                )
            return queue_id, 0
        if batch is not None and topic in batch:
            return batch[topic]
        if selector is None:
            placed = self._turns.next(topic, queues), self._retries
        else:
            placed = _selected(selector, topic, queues), 0
        if batch is not None:
            batch[topic] = placed
        return placed

    def complete(self, options: SendOptions) -> None:
        """Add the producer's default options."""
        if options.get("unique_key") is None:
            options["unique_key"] = new_unique_key()
        if self.durability is not None and options.get("durability") is None:
            options["durability"] = self.durability

    def compressed(self, body: Body, options: SendOptions) -> Body:
        """Return the body to store, compressed if large, not compressed by the caller, and then smaller."""
        if self.compress_over is None or options.get("compressed") is not None:
            return body
        flat = flat_body(body)
        if len(flat) < self.compress_over:
            return flat
        check_size(flat, self._broker.limits.max_message_size)  # before compression
        small = zlib.compress(flat, _LEVEL)
        if len(small) * 20 > len(flat) * 19:
            return flat
        options["compressed"] = "zlib"
        return small

    def _check(self, body: Body, options: SendOptions) -> bytes:
        """Check all that does not depend on the topic. Return the body as bytes."""
        return check_options(body, options, self._broker.limits, self._clock.now_ms())

    def ready(
        self,
        topic: str,
        body: Body,
        queue_id: int | None,
        options: SendOptions,
        batch: Batch | None = None,
        selector: Selector | None = None,
    ) -> Ready:
        """Return a message as it will be stored, checked, so that later errors can only be the engine's.
        With hooks, `before_send` may change it. From then on `after_send` is called for the message."""
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
            flush = (options.get("durability") or self._broker.durability) == "flush"
            return Ready(topic, flat, queue_id, options, flush, retries, sent)
        except BaseException as error:
            self.notify(sent, None, error)
            raise

    def half(self, topic: str, body: Body, queue_id: int | None, options: SendOptions) -> Ready:
        """Prepare a half message, as `ready` does."""
        for name in ROUTING:
            if options.get(name) is not None:
                raise InvalidMessageError(f"a message of a transaction cannot have {name}", name)
        ready = self.ready(topic, body, queue_id, options)
        wrong = next((name for name in ROUTING if ready.options.get(name) is not None), None)
        if wrong is not None:  # set by an interceptor
            error = InvalidMessageError(f"a message of a transaction cannot have {wrong}", wrong)
            self.notify(ready.message, None, error)
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

    def notify(self, message: OutgoingMessage | None, receipt: SendReceipt | None, error: BaseException | None) -> None:
        """Report the result of a message to the hooks. If its sync failed it is stored, and has its receipt too."""
        if message is None:
            return
        if receipt is None and isinstance(error, FlushTimeoutError) and isinstance(error.receipt, SendReceipt):
            receipt = error.receipt
        self._hooks.notify(self._hooks.after_send, message, receipt, error)


def is_routed(ready: Ready) -> bool:
    """Return True if a message must be put alone. A put of many knows neither delay nor message group."""
    options: Mapping[str, Any] = ready.options
    return any(options.get(name) is not None for name in (*ROUTING, "compressed"))


def go_together(first: Ready, other: Ready) -> bool:
    return (other.topic, other.queue_id) == (first.topic, first.queue_id) and not is_routed(other)


def plain(ready: Ready) -> OutgoingMessage:
    """Return the message in the form for a put of many."""
    options = ready.options
    return OutgoingMessage(
        ready.body,
        options.get("tag"),
        options.get("keys"),
        options.get("properties"),
        options.get("unique_key"),
        options.get("flag", 0),
    )


def _selected(selector: Selector, topic: str, queues: int) -> int:
    """Return the queue that `selector` chooses among those of `topic` for writing."""
    if not callable(selector):
        raise ConfigError(f"a selector is a function of (queues, None), not {selector!r:.80}")
    chosen: object = selector([QueueRef(topic, queue_id) for queue_id in range(queues)], None)
    if isinstance(chosen, tuple) and len(chosen) == 2 and chosen[0] == topic:
        queue_id = chosen[1]
        if type(queue_id) is int and 0 <= queue_id < queues:
            return queue_id
    raise InvalidMessageError(f"the selector returned {chosen!r}, which is not a queue of {topic!r}", "queue_id")
