"""Pop log: events of popped messages, as ordinary records of one queue (delivery#pop-log).

delivery#pop-log lists the kinds of records (TAGS) and their members. `cm` and `rel` are the acknowledged and released
messages that a batch with `skip_acked` keeps, but does not deliver. Without `rst` a replay would take batches from
before a reset for later ones.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from mqstore.broker.pop.batch import pop_body, settled_body
from mqstore.broker.pop.orderinfo import OrderInfo
from mqstore.broker.redelivery.reason import Reason
from mqstore.broker.tables.names import POP_LOG_GROUP, POP_LOG_TOPIC
from mqstore.errors import FormatError, MQStoreError
from mqstore.files.jsonfile import load_json
from mqstore.files.segment import place_in_file
from mqstore.layout.consumequeue import UNIT
from mqstore.layout.javahash import java_hash
from mqstore.layout.jsontext import decode_all
from mqstore.layout.properties import TAGS
from mqstore.log.message import Message
from mqstore.log.reading.reader import StoreReader
from mqstore.log.recovery.report import Finding
from mqstore.log.store import MessageStore
from mqstore.logger import log as _log

_ENCODE = json.JSONEncoder(separators=(",", ":")).encode

POP: Final = "ck"
ACK: Final = "ack"
CHANGE: Final = "chg"
REVIVE: Final = "rev"
GIVE: Final = "rel"
RESET: Final = "rst"
SKIP: Final = "skp"
KINDS = (POP, ACK, CHANGE, REVIVE, GIVE, RESET, SKIP)

_CHUNK = 8_192
"""Number of records that a replay reads at once."""
LOOK_BACK: Final = 16_384
"""Number of records before the replay position that are searched for redelivered messages.
A late acknowledgement of these messages is refused for as long as that is known."""


class Record(NamedTuple):
    """One entry: `position` is its queue offset, `value` the JSON object of its body.
    Entries of the journal have a negative position."""

    position: int
    kind: str
    value: dict[str, Any]


LOCAL: Final = ',"l":1'
"""Text for `more`: the receiver is in this process and ends with it."""
ACKED: Final = ',"cm":1'
"""Text for `more`: the first message is acknowledged already, and the batch only shows the cursor."""


def order_members(record: OrderInfo) -> str:
    """Return the text for `more` that makes a batch a FIFO one."""
    members = {
        "f": 1,
        "a": record.attempt_id,
        "oc": record.counts,
        "ot": record.visible_ms or None,
        "cm": record.acked or None,
        "rel": record.released or None,
    }
    return "," + _ENCODE({name: value for name, value in members.items() if value is not None})[1:-1]


class PopLog:
    """Writer and reader of the pop log.
    Each `put_...` returns the record's queue offset and never waits for the disk."""

    def __init__(self, store: StoreReader) -> None:
        self._store = store
        # A store opened for reading cannot be written, but its log can be read.
        outlets = {}
        if isinstance(store, MessageStore):
            outlets = {kind: store._outlet(POP_LOG_TOPIC, 0, {TAGS: kind}) for kind in KINDS}
        self._put = {kind: outlet.put for kind, outlet in outlets.items()}
        self.ways = {kind: outlet.way() for kind, outlet in outlets.items()}
        """Ways by kind, for compiled callers."""

    def put_pop(
        self, head: str, offsets: Sequence[int], pop_time_ms: int, invisible_ms: int, cursor: int, more: str = ""
    ) -> int:
        """Append the record of a batch (`pop_body`)."""
        return self._put[POP](pop_body(head, offsets, pop_time_ms, invisible_ms, cursor, more), "append")[1]

    def put_settled(self, kind: str, batch: int, offsets: Iterable[int], reason: Reason | None = None) -> int:
        """Append `ACK`, `REVIVE` or `GIVE` for some offsets of one batch (`settled_body`)."""
        return self._put[kind](settled_body(batch, offsets, reason.members() if reason else ""), "append")[1]

    def put_change(self, batch: int, offset: int, times: tuple[int, int], reason: Reason | None) -> int:
        """Append a new (pop time, invisible ms) of one message, and why no receiver holds it (`QueueState.reason`)."""
        more = ',"n":1' + reason.members() if reason else ""
        body = f'{{"k":{batch},"o":{offset},"pt":{times[0]},"it":{times[1]}{more}}}'
        return self._put[CHANGE](body.encode(), "append")[1]

    def put_reset(self, head: str, offset: int, *, reads: bool = False) -> int:
        """Append that the queue continues at `offset` with nothing in flight. -1: the queue is forgotten.
        `reads`: the group reads from now on instead of popping, so later positions are in the offset table."""
        more = ',"r":1' if reads else ""
        return self._put[RESET](f'{head}"o":{offset}{more}}}'.encode(), "append")[1]

    def put_skip(self, head: str, offsets: Iterable[int]) -> int:
        """Append messages of a queue that are settled before they are delivered."""
        return self._put[SKIP](f'{head}"o":[{",".join(map(str, offsets))}]}}'.encode(), "append")[1]

    def bounds(self) -> tuple[int, int]:
        """Return (position of the first record kept, position of the next record)."""
        return self._store.offsets_or_none(POP_LOG_TOPIC, 0) or (0, 0)

    def records(self, start: int, on_bad: Callable[[Message, str], None] | None = None) -> Iterator[Record]:
        """Yield all records from position `start` on, in order.
        Damaged records are skipped, and bodies that are not JSON objects. The latter are logged, or passed to `on_bad`
        with the reason. The loss of a record redelivers messages but never loses one."""
        hashes = {java_hash(kind): kind for kind in KINDS}
        low, end = self.bounds()
        position = max(start, low)
        while position < end:
            count = min(_CHUNK, end - position)
            units = self._store.unit_bytes(POP_LOG_TOPIC, 0, position, count)
            codes = [code for _, _, code in UNIT.iter_unpack(units)]
            found = self._store.get(POP_LOG_TOPIC, 0, position, count)
            messages = [message for message in found.messages if codes[message.offset - position] in hashes]
            for message, value in zip(messages, decode_all([message.body for message in messages]), strict=True):
                if isinstance(value, dict):
                    yield Record(message.offset, hashes[codes[message.offset - position]], value)
                else:
                    why = str(value) if isinstance(value, FormatError) else "not a JSON object"
                    (on_bad or self._log_bad)(message, why)
            if found.next_offset <= position:
                return
            position = found.next_offset  # also if retention has removed these records meanwhile

    def _log_bad(self, message: Message, why: str) -> None:
        _log.error("%s: record %d of %s is skipped (%s)", self._store.path, message.offset, POP_LOG_TOPIC, why)


def unreadable_records(store: StoreReader) -> Iterator[Finding]:
    """Yield a finding for each record of the pop log that is not JSON, so that opening skips it."""
    try:
        table = load_json(store.path / "config" / "consumerOffset.json", writer=False, fs=store.fs).value or {}
        begin = int(table["offsetTable"][f"{POP_LOG_TOPIC}@{POP_LOG_GROUP}"]["0"])
    except (KeyError, TypeError, ValueError, MQStoreError):  # then an opening reads all of the log
        begin = 0
    bad: list[tuple[Message, str]] = []
    deque(PopLog(store).records(max(0, begin - LOOK_BACK), lambda *found: bad.append(found)), maxlen=0)
    for message, why in bad:
        file, at = place_in_file(message.physical_offset, store.manifest.commitlog_segment_bytes)
        detail = f"record {message.offset} of {POP_LOG_TOPIC}, which opening skips: {why}"
        yield Finding("bad_json", file, at, message.size, detail)
