"""Options of an item that is put into a `mqstore.Queue` (clients#queue)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final, TypedDict, cast

from mqstore.broker.tables.names import EXPIRY, unique_word
from mqstore.broker.tables.priorities import priority_queue
from mqstore.contract import BrokerContract, SendOptions
from mqstore.errors import InvalidMessageError
from mqstore.layout.properties import EXPIRES_MS
from mqstore.log.commitlog import SendReceipt
from mqstore.log.reading.reader import to_ms
from mqstore.log.writing.outgoing import checked_pairs, no_such_option
from mqstore.options import Duration, seconds


class ItemOptions(TypedDict, total=False):
    """Options of `Queue.put`. None is the same as leaving an option out.

    >>> options: ItemOptions = {"key": "order-7", "tag": "express", "properties": {"by": "web"}}
    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     queue = store.queue("jobs", codec=mqstore.TEXT)
    ...     receipt = queue.put("pack", **options)
    ...     message = queue.get().message
    ...     message.keys, message.tag, dict(message.properties), message.unique_key == receipt.id
    (('order-7',), 'express', {'by': 'web'}, True)
    """

    delay: Duration | None
    """Seconds after which the item becomes available."""
    priority: int | None
    """0 (None) to 9: of the items that are ready, those of the highest priority are taken first."""
    key: str | Iterable[str] | None
    """Key by which `Queue.find` finds the item, or several: not empty, without spaces."""
    tag: str | None
    properties: Mapping[str, str] | None
    """Names and values that are not blank, for the receiver: `task.message.properties`."""
    expires: Duration | datetime | None
    """Seconds, or an aware time, until when the item must have been delivered for the first time, or it is dropped."""
    unique: str | None
    """Name of the item: while one of that name is not done, the put stores nothing and returns its receipt."""
    unique_for: Duration | None
    """Seconds for which the name counts instead, from the put of the item on, done or not."""


_NAMES: Final = {"key": "keys"} | {name: name for name in ("delay", "tag", "properties")}
"""Option of an item -> option of a put."""
BLOCKING: Final = frozenset(ItemOptions.__annotations__) - _NAMES.keys()
"""The others. Their put may wait for a lock, or for the disk whatever the durability."""


def put_item(
    broker: BrokerContract, queue: str, body: bytes, given: ItemOptions, *, ordered: bool = False
) -> SendReceipt:
    """Put an encoded item. Raises the errors of `send_options`, `priority_queue` and `put`."""
    unique, unique_for = given.get("unique"), given.get("unique_for")
    options = send_options(broker, queue, given)
    queue_id = priority_queue(broker.topics, queue, given.get("priority"), ordered=ordered)
    if unique is not None:
        unique_word(unique)  # a server would refuse another type in its own words
        return broker.items.put(queue, queue, body, unique, unique_for=unique_for, queue_id=queue_id, **options)
    if unique_for is not None:
        raise InvalidMessageError("unique_for is for items with a name: give unique=, too", "unique_for")
    return broker.put(queue, body, queue_id=queue_id, **options)


def send_options(broker: BrokerContract, queue: str, given: ItemOptions) -> SendOptions:
    """Return the options of a put. Raises TypeError for an unknown one, which names the closest, and
    InvalidMessageError for a bad one that no put has."""
    if unknown := given.keys() - ItemOptions.__annotations__.keys():
        raise no_such_option(unknown, ItemOptions.__annotations__)
    options: Any = {_NAMES[name]: value for name, value in given.items() if value is not None and name in _NAMES}
    if (expires := given.get("expires")) is not None:
        expires_ms = _expires_ms(expires, given.get("delay"), broker.clock.now_ms())
        options["properties"] = {**checked_pairs(options.get("properties") or {}), EXPIRES_MS: str(expires_ms)}
        if EXPIRY not in broker.topics.require(queue).attributes:
            broker.topics.expire(queue)
    return cast("SendOptions", options)


def _expires_ms(expires: Duration | datetime, delay: Duration | None, now_ms: int) -> int:
    if isinstance(expires, datetime):
        at_ms = to_ms(expires)
    else:
        at_ms = now_ms + math.ceil(1000 * seconds(expires, "expires"))
    if at_ms <= now_ms + 1000 * (0 if delay is None else seconds(delay, "delay")):
        why = "it is over" if delay is None else f"the item becomes available after {delay} s"
        raise InvalidMessageError(f"expires={expires} leaves no time for a delivery: {why}", "expires")
    return at_ms
