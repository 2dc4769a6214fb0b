"""Journal of deliveries to receivers in this process: the pop log gets only the outcome (delivery#pop-journal).

    config/popjournal    0  "mqstore popjournal 1 " and the id of the machine's boot, then zeros
                       128  entries, up to the first one of size 0. Numbers are i64, in the machine's byte order
                            size of the body | next position of the pop log | body of a `ck` or an `ack` | zeros, to 8

The entries are written through a mapping. This takes no system call, and the kernel keeps the bytes when the process is
killed. The bodies are those of the log, so a replay reads both, by their positions. The name of a batch whose `ck` is
only here is minus the position of its entry.

    open     from the first pop for a receiver in this process, until the file is full, and at most `commit_interval`
    folding  the log gets a `ck` of messages in flight, the acknowledgements of batches that the log has, and the cursor
    closed   pops and acknowledgements are appended to the log

A replay may read entries that were folded: the records of the log come after them and say the same. If a message was
released, its next pop is appended to the log, because the log has it as released.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from itertools import groupby, takewhile
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from mqstore.broker.background.service import Wake
from mqstore.broker.pop.batch import ENTRY, entry_bytes
from mqstore.broker.pop.poplog.log import ACK, ACKED, LOCAL, POP, Record
from mqstore.broker.pop.state import QueueState
from mqstore.errors import FormatError, MQStoreError
from mqstore.layout.jsontext import decode
from mqstore.logger import log as _log
from mqstore.signalsafe import Lock

if TYPE_CHECKING:
    from mqstore.broker.pop.tables import PopTables

ENTRY_ROOM: Final = 512
"""The journal is full if it has less room than this, which suffices for most entries."""
_HEAD_BYTES: Final = 128
_FILE_BYTES: Final = 1 << 18
"""Room for more than a thousand deliveries. Folding costs as much as two deliveries."""
_BATCHES: Final = 32
"""Maximum number of batches in one `ck`."""
_times = attrgetter("pop_time_ms", "invisible_ms")


class PopJournal:
    """Journal of one store. Its mapping and its end are fields of `PopTables`, for compiled code.
    The tables are its states: `noted` of a queue is true if the journal has something of it that the log does not."""

    def __init__(self, tables: PopTables, wake: Wake, *, wanted: bool) -> None:
        """`wanted` False: it is only read."""
        self._tables = tables
        self._wake = wake
        self._fs = tables.parts.fs
        self._path = tables.store.path / "config" / "popjournal"
        self._folding = Lock()
        boot_id = self._fs.boot_id()
        self.wanted = wanted and boot_id is not None
        self._head = f"mqstore popjournal 1 {boot_id}".encode().ljust(_HEAD_BYTES, b"\0")
        self.base = 0
        """Position of the pop log before all entries."""
        self.folded = True
        """False from its opening until all entries are folded, also while it is full, and after an error."""

    def read(self) -> list[tuple[int, Record]]:
        """Return (next position of the pop log, record) of each entry, also while the store's owner writes more."""
        try:
            data = self._fs.read_whole(self._path, _FILE_BYTES)
        except (FileNotFoundError, MQStoreError):
            return []
        at, found = _HEAD_BYTES, list[tuple[int, Record]]()
        while data[:_HEAD_BYTES] == self._head and at + ENTRY.size <= len(data):
            size, position = ENTRY.unpack_from(data, at)
            body = data[at + ENTRY.size : at + ENTRY.size + max(0, size)]
            value = None
            with suppress(FormatError):
                value = decode(body)
            if not isinstance(value, dict):
                break  # the end
            found.append((position, Record(-at, ACK if "k" in value else POP, value)))
            at += entry_bytes(size)
        return found

    def open(self) -> None:
        """Begin again with an empty file, after folding, unless it is open."""
        tables = self._tables
        with self._folding:
            if tables.journal_end or not self.wanted:
                return
            self._fold_all()
            try:
                if tables.journal_map is None:
                    tables.journal_map = self._create()
            except (MQStoreError, OSError) as error:
                _log.warning("cannot create %s (%s). Each delivery is appended to the log", self._path, error)
                self.wanted = False
                return
            tables.journal_map[_HEAD_BYTES : _HEAD_BYTES + 8] = bytes(8)
            self.base = tables.log.bounds()[1]
            self.folded, tables.journal_end = False, _HEAD_BYTES
        self._wake()  # it is folded within an interval

    def remove(self) -> None:
        """Remove the file, if there is one. Nothing may be noted in it any more."""
        self._fs.unlink(self._path, missing_ok=True)

    def _create(self) -> mmap.mmap:
        self.remove()
        with self._fs.opened(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, self._tables.parts.config.file_mode) as fd:
            self._fs.pwrite(fd, self._head.ljust(_FILE_BYTES, b"\0"), 0)  # all of it: a full disk cannot be met later
            return self._fs.map(fd, _FILE_BYTES, writable=True)

    def fold_all(self) -> None:
        """Append the outcome of all entries to the log, and close the journal until the next pop.
        Call without a state's lock. Raises the errors of a put. Then the journal has it still, and a later call
        repeats it."""
        with self._folding:
            self._fold_all()

    def _fold_all(self) -> None:
        self.folded = False
        with self._tables.noting:
            self._tables.journal_end = 0
        for state in list(self._tables.states.values()):
            if state.noted:
                with state.lock:
                    self.fold(state)
        self.folded = True

    def fold(self, state: QueueState, cursor: int | None = None) -> None:
        """Append the outcome of a queue's entries to the log. Call under the state's lock.
        `cursor` is that before the present pop, whose messages count as delivered only with their own record."""
        if not state.noted:
            return
        log, cursor = self._tables.log, state.cursor if cursor is None else cursor
        acked: dict[int, list[int]] = {}
        for offset, name in state.acks.items():
            acked.setdefault(name, []).append(offset)
        for name, offsets in acked.items():
            log.put_settled(ACK, name, offsets)
        state.acks.clear()
        # They are the last in `in_flight`, which has the order of their names.
        new = list(dict.fromkeys(takewhile(lambda batch: batch.name < 0, reversed(state.in_flight.values()))))[::-1]
        for (pop_time_ms, invisible_ms), alike in groupby(new, _times):
            batches = list(alike)
            for at in range(0, len(batches), _BATCHES):
                some = batches[at : at + _BATCHES]
                offsets = sorted(offset for batch in some for offset in batch.open_offsets())
                name = log.put_pop(state.head, offsets, pop_time_ms, invisible_ms, cursor, LOCAL)
                for batch in some:
                    batch.name = name
        last = cursor - 1
        if not (new or last < 0 or cursor == state.logged or last in state.in_flight or last in state.released):
            # Nothing else shows the cursor: a batch of the last message. The same record says that it was acknowledged,
            # since a kill before a second one would deliver it again.
            log.put_pop(state.head, [last], state.last_pop_ms, 0, cursor, LOCAL + ACKED)
        state.logged = cursor
        state.noted = False

    def close(self) -> None:
        """Fold, and remove the file. Raises the errors of `fold_all`, after which the next opening reads the file."""
        with self._folding:
            self.wanted = False
            self._fold_all()
            self._tables.journal_map = None
            self.remove()
