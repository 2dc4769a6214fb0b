"""Receipts of puts: positions of messages in the store."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import overload

from mqstore.layout.messageid import encode_message_id
from mqstore.log.writing.log_tail import QueueRef


class SendReceipt(tuple[QueueRef, int, int, int, int, bytes, "str | None"]):
    """Position of a stored message. `unique_key` is the same in every copy, the other attributes describe this copy.

    An immutable value. It is a tuple, because an `__init__` would cost too much in a put.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     receipt = store.put("orders", b"o-1", queue_id=2)
    ...     store.get(receipt.message_id).body, receipt.topic, receipt.queue_id, receipt.offset
    (b'o-1', 'orders', 2, 0)
    """

    __slots__ = ()

    @property
    def queue(self) -> QueueRef:
        """Topic and queue id."""
        return self[0]

    @property
    def topic(self) -> str:
        """Topic of the queue."""
        return self[0].topic

    @property
    def queue_id(self) -> int:
        """Number of the queue in its topic, from 0."""
        return self[0].queue_id

    @property
    def offset(self) -> int:
        """Queue offset."""
        return self[1]

    @property
    def physical_offset(self) -> int:
        """Physical offset of the record in the commitlog."""
        return self[2]

    @property
    def size(self) -> int:
        """Size of the whole record in bytes."""
        return self[3]

    @property
    def store_timestamp_ms(self) -> int:
        """Time at which this copy was stored: ms since the epoch."""
        return self[4]

    @property
    def message_id(self) -> str:
        """Offset message id: store host and physical offset, upper-case hex (format#ids)."""
        return encode_message_id(self[5], self[2])

    @property
    def unique_key(self) -> str:
        """Key that identifies duplicates. It is this copy's `message_id` if the message was put without a key."""
        return self[6] or self.message_id

    @property
    def id(self) -> str:
        """Identity of the message, for `Queue.cancel`: its `unique_key`."""
        return self.unique_key

    @property
    def recall_handle(self) -> str | None:
        """Handle that cancels a delayed message. None for other messages."""
        return None

    def __repr__(self) -> str:
        return (
            f"SendReceipt({self.topic!r}, queue_id={self.queue_id}, offset={self.offset}, "
            f"physical_offset={self.physical_offset}, size={self.size}, message_id={self.message_id!r})"
        )


class SendReceipts(Sequence[SendReceipt]):
    """Receipts of messages put together. Each one is created when it is read."""

    __slots__ = ("_chunks", "_count", "_host", "_queue", "_unique")

    def __init__(self, queue: QueueRef, host: bytes, unique: dict[int, str]) -> None:
        self._queue = queue
        self._host = host
        self._unique = unique
        self._chunks: list[tuple[int, int, Sequence[int], int]] = []
        self._count = 0

    def add(self, offset: int, positions: Sequence[int], store_timestamp_ms: int) -> None:
        """Add contiguous messages: `positions` are the physical offset of each, and the end of the last one."""
        self._chunks.append((self._count, offset, positions, store_timestamp_ms))
        self._count += len(positions) - 1

    @property
    def queue(self) -> QueueRef:
        """Topic and queue id of all."""
        return self._queue

    @property
    def host(self) -> bytes:
        """Store host, encoded."""
        return self._host

    def chunks(self) -> list[tuple[int, Sequence[int], int]]:
        """Return the arguments of each `add`."""
        return [chunk for _, *chunk in self._chunks]  # type: ignore[misc]  # of three

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> SendReceipt: ...

    @overload
    def __getitem__(self, index: slice) -> list[SendReceipt]: ...

    def __getitem__(self, index: int | slice) -> SendReceipt | list[SendReceipt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if index < 0:
            index += self._count
        if not 0 <= index < self._count:
            raise IndexError(f"receipt {index} of {self._count}")
        first, offset, positions, stamp = self._chunks[bisect_right(self._chunks, index, key=itemgetter(0)) - 1]
        within = index - first
        at, end = positions[within], positions[within + 1]
        return SendReceipt((self._queue, offset + within, at, end - at, stamp, self._host, self._unique.get(index)))

    def __iter__(self) -> Iterator[SendReceipt]:
        for first, offset, positions, stamp in self._chunks:
            for i, (at, end) in enumerate(pairwise(positions)):
                key = self._unique.get(first + i)
                yield SendReceipt((self._queue, offset + i, at, end - at, stamp, self._host, key))

    def __repr__(self) -> str:
        return f"<{self._count} receipts of {self._queue}>"
