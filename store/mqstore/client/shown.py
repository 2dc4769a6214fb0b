"""Messages as a handler sees them: with their original topic and all their attempts.

source                             its record has                    it is shown with
a copy from a retry topic          that topic; the right attempt      the topic it was sent to
redelivered in order               its topic; attempt 1               the attempts that were counted elsewhere
"""

from __future__ import annotations

from mqstore.broker.retry import origin_topic
from mqstore.log.message import Message

__all__ = ["as_sent", "shown"]


class _Shown(Message):
    """Message whose record lacks some values. `queue` and `offset` are where it is stored."""

    __slots__ = ("_redeliveries", "_topic")

    def __init__(self, message: Message, topic: str, redeliveries: int) -> None:
        super().__init__(message._batch, message._start, message.offset, message._body_end)
        self._topic = topic
        self._redeliveries = redeliveries

    @property
    def topic(self) -> str:
        """Topic it was sent to."""
        return self._topic

    @property
    def reconsume_times(self) -> int:
        """Number of earlier deliveries to the group."""
        return self._redeliveries


def shown(message: Message, topic: str, redeliveries: int | None = None) -> Message:
    """Return `message` with this topic and number of earlier deliveries. None means its record's number."""
    if message.topic == topic and (redeliveries is None or message.reconsume_times == redeliveries):
        return message
    return _Shown(message, topic, message.reconsume_times if redeliveries is None else redeliveries)


def as_sent(message: Message, group: str) -> Message:
    """Return `message`, from a retry topic of the group with the topic that it was sent to."""
    return shown(message, origin_topic(message, group))
