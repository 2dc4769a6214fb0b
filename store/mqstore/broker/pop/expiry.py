"""Messages that expire before they are first delivered (delivery#pop-expire).

A pop drops them when their turn comes, by the property `EXPIRES_MS`. Only topics with the attribute `EXPIRY` are
looked at. It is set before the first such message is put, and takes pops of this topic off the compiled path.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from mqstore.broker.delay.route import number
from mqstore.broker.names import DEAD_LETTER, EXPIRES_MS
from mqstore.broker.pop.skips import skip
from mqstore.broker.pop.state import QueueState
from mqstore.broker.pop.tables import PopTables
from mqstore.log.message import Message

EXPIRED: Final = "expired"
"""Reason of a dead letter."""


def unexpired(
    tables: PopTables, state: QueueState, messages: list[Message], known: Container[int] = ()
) -> list[Message]:
    """Return the messages that may be delivered, and settle the others. Call under the state's lock.
    `known` are the offsets of those that were delivered before. A crash may repeat a dead letter."""
    now_ms = tables.clock.now_ms()
    late = [
        message
        for message in messages
        if (at_ms := number(message._stored_property(EXPIRES_MS))) is not None
        and at_ms <= now_ms
        and message.offset not in known
    ]
    if not late:
        return messages
    if state.expiry == DEAD_LETTER:
        for message in late:
            tables.file_dead_letter(state.key.group, message, EXPIRED, message.reconsume_times)
    skip(tables.log, state, [message.offset for message in late])
    tables.parts.statistics.add("EXPIRED_NUMS", f"{state.key.topic}@{state.key.group}", len(late))
    return [message for message in messages if message.offset not in state.skipped]
