"""Messages that are settled before they are delivered, because they were cancelled or have expired (delivery#pop-skip).

A record of the pop log names them, and the queue's state until the cursor passes them. A reset keeps them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mqstore.broker.pop.state import QueueState
from mqstore.log.message import Message

if TYPE_CHECKING:
    from mqstore.broker.pop.log import PopLog

_RECORD_MAX = 4_096
"""Maximum number of offsets in one record."""


def skip(log: PopLog, state: QueueState, offsets: Sequence[int]) -> None:
    """Settle messages that were not delivered yet. Call under the state's lock."""
    state.skip(offsets, log.put_skip(state.head, offsets))


def wanted(state: QueueState, messages: list[Message]) -> list[Message]:
    """Return the messages that may be delivered. Call under the state's lock."""
    return [message for message in messages if message.offset not in state.skipped]


def keep(log: PopLog, state: QueueState, bound: int) -> float:
    """Append those named by records before log position `bound` again. Return the position of the first record that is
    needed. Call under the state's lock."""
    # Not after each pop: one that fails sets the cursor back. A pop that found only such messages has no record, so
    # after a kill only the log and the offset table show the cursor.
    passed = min(state.cursor, max(state.logged, state.committed))
    state.skipped = {offset: name for offset, name in state.skipped.items() if offset >= passed}
    old = [offset for offset, name in state.skipped.items() if name < bound]
    for at in range(0, len(old), _RECORD_MAX):
        skip(log, state, old[at : at + _RECORD_MAX])
    return next(iter(state.skipped.values()), math.inf)
