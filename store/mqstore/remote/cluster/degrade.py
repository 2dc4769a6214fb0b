"""Differences of an Apache RocketMQ cluster from a store or `mqstore serve` (remoting-server, section 13.5).

`DIFFERENCES` is the table of docs/cluster.md. The log says once for each connection that it counts, at level INFO.
"""

from __future__ import annotations

from typing import Final, NamedTuple, NoReturn

from mqstore.errors import NotSupportedError


class Difference(NamedTuple):
    """One operation that a cluster does in another way."""

    store: str
    """Behaviour of a store, also of a served one."""
    cluster: str
    """Behaviour that a user notices with a cluster."""


DIFFERENCES: Final[dict[str, Difference]] = {
    "ack of an expired delivery": Difference(
        "ReceiptExpiredError",
        "raised by the client's clock once its own visibility time is over; the brokers accept any",
    ),
    "release": Difference("after its delay, the attempt does not count", "a second later, and the attempt counts"),
    "rate_per= of queue.run": Difference(
        "an item that waits loses no attempt", "each wait is an attempt: use a queue and a rate= for each key"
    ),
    "priority=": Difference("the highest first", "NotSupportedError; use a queue for each, and mqstore.get_any"),
    "progress": Difference("extends the lease, and is shown by `peek`", "extends the lease"),
    "nack": Difference("counted by the store", "delay and last attempt are computed here, from the group's policy"),
    "reject, last attempt": Difference(
        "one step", "a copy to the dead letters, then the ack: two dead letters if the process ends in between"
    ),
    "delays of retries": Difference(
        "to the millisecond", "some seconds late after a pop, a level of the brokers for a push consumer"
    ),
    "attempts of ordered consumers": Difference("kept on disk, shown by `suspended`", "kept by this process"),
    "take_losses": Difference("every lost message", "nothing for groups that pop"),
    "poison messages": Difference("handled one at a time after a crash", "not known after a crash"),
    "members": Difference("a member of another mode or subscription is refused", "accepted, as RocketMQ does"),
    "retry=": Difference("the group's policy from then on", "the same, and needs the right to change groups"),
    "lag": Difference("with deliveries in flight and retries", "messages that are not committed"),
    'durability="flush"': Difference("each message", "the brokers' flushDiskType"),
    "expires=, unique=": Difference("yes", "NotSupportedError"),
    "cancel": Difference("ready, delayed and retrying items", "delayed ones; NotSupportedError for others"),
    "delay, deliver_at": Difference("any time", "needs timerWheelEnable; without it one of the brokers' levels"),
    "recall": Difference("yes", "needs recallMessageEnable"),
    "put_many": Difference("whole or not", "in batches of at most 4 MiB, each whole or not"),
    "ordered queues, get_many": Difference(
        "a failed item is redelivered alone", "it is redelivered with all later items of its batch"
    ),
    "create_topic": Difference("any number of queues", "the queues are spread over the brokers, in turn"),
    "a read after a put": Difference("finds the message", "finds it some milliseconds later"),
    "queue numbers": Difference("the same for everybody", "those of this client; RocketMQ names broker and id"),
    "dead letters": Difference("list, replay, purge", "list and replay; a letter that was sent again stays listed"),
    "join": Difference("waits for delayed items", "counts them once they are due"),
    "items of a queue by state": Difference("find, peek, list, count, purge", "NotSupportedError"),
    "verify, snapshot, stats": Difference("yes", "NotSupportedError; use RocketMQ's tools"),
}


def refuse(what: str, instead: str) -> NoReturn:
    """Raise NotSupportedError with advice.

    >>> refuse("verify", "use RocketMQ's tools")
    Traceback (most recent call last):
    mqstore.errors.NotSupportedError: verify is not possible with an Apache RocketMQ cluster; use RocketMQ's tools
    """
    raise NotSupportedError(f"{what} is not possible with an Apache RocketMQ cluster; {instead}")


def refuse_items(*args: object, **options: object) -> NoReturn:
    """Refuse each call of `ItemCalls`."""
    refuse("a look at the items of a queue by state", "use mqadmin consumerProgress, or resetOffsetByTime to skip all")
