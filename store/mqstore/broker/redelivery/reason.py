"""Reason of a redelivery or a dead letter: its value, and its form in records (delivery#pop-log).

    message                                  its reason is in
    failed, or given back until later        its `chg` record in the pop log; in memory `QueueState.reasons`
    whose receiver has ended                 its `rev` or `rel` record
    that nobody settled in time              its `rev` record, without a text
    of which a copy was made to be retried   the property RETRY_REASON of the copy
    after its last attempt                   the property DLQ_REASON of its dead letter

For people, `BlockedQueue` has the reason of a failure in order, too.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from itertools import chain
from json import JSONEncoder
from typing import Any, Final, NamedTuple

from mqstore.layout.properties import DLQ_REASON, MAX_PROPERTIES_BYTES, RETRY_REASON
from mqstore.log.message import Message

REASON_CHARS: Final = 300
DLQ_REASON_BYTES: Final = 1024
"""Maximum length of `dlq_reason` in UTF-8 bytes (delivery#backoff)."""
_RETRY_REASON_BYTES: Final = 300
_ROOM_CHARS: Final = MAX_PROPERTIES_BYTES // 8
_CONTROLS: Final = dict.fromkeys((*range(32), *range(127, 160)), " ")
_ENCODE = JSONEncoder().encode


class Reason(NamedTuple):
    """Reason why a delivery has ended without an acknowledgement, or will be redelivered later."""

    text: str = ""
    """Error of the receiver, or what ended it. Empty if nobody settled the delivery, or gave no text."""
    holder: str = ""
    """Client of a server that had the delivery."""
    counts: bool = True
    """False: it was given back, so that its attempt does not count."""

    def members(self) -> str:
        """Return its members of a record of the pop log."""
        texts = (("e", self.text), ("h", self.holder))
        given = "" if self.counts else ',"g":1'
        return given + "".join([f',"{name}":{_ENCODE(text[:REASON_CHARS])}' for name, text in texts if text])

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Reason:
        """Return the reason that a record of the pop log has."""
        return cls(str(value.get("e", "")), str(value.get("h", "")), value.get("g") != 1)


EXPIRED: Final = Reason()
GIVEN_BACK: Final = Reason(counts=False)
REOPENED: Final = Reason("the store was reopened")
"""The receiver had ended with its process."""
PROCESS_ENDED: Final = Reason("the process ended while it was handled")
"""The handler was running when its process was killed."""


def set_reason(properties: MutableMapping[str, str], name: str, reason: Reason) -> None:
    """Set DLQ_REASON or RETRY_REASON of a copy, without separators and surrogates, which properties cannot contain.
    A retry has none if the properties have little room left: it must not prevent the copy."""
    size = DLQ_REASON_BYTES if name == DLQ_REASON else _RETRY_REASON_BYTES
    properties.pop(name, None)
    if name == RETRY_REASON and sum(map(len, chain(*properties.items()))) > _ROOM_CHARS:
        return
    if plain := reason.text.translate(_CONTROLS).encode("utf-8", "replace")[:size].decode("utf-8", "ignore").strip():
        properties[name] = plain


def reason_of(copy: Message) -> str:
    """Return the reason that a retry or a dead letter has, or ""."""
    return copy._stored_property(DLQ_REASON) or copy._stored_property(RETRY_REASON) or ""
