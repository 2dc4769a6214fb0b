"""The consume-queue unit, a queue's entry for one message (format#unit).

    offset size type  field
         0    8 i64   physicalOffset   start of the record in the commitlog
         8    4 i32   size             totalSize of the record, not of its body
        12    8 i64   tagsCode         Java hash of TAGS; in SCHEDULE_TOPIC_XXXX the time of delivery in ms
        20

No header, no checksum: unit k of a queue is at byte 20 k of its stream. Unwritten space is zero, so size 0 ends the
data. The unit (0, 0x7FFFFFFF, 0) is void: its slot is used, but it is not a message (format#void).
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Final

from mqstore import arrays as np

UNIT: Final = struct.Struct(">qiq")
UNIT_BYTES: Final = UNIT.size
UNIT_SIZE_AT: Final = 8
UNIT_TAGS_CODE_AT: Final = UNIT_SIZE_AT + 4

VOID_SIZE: Final = 0x7FFF_FFFF
VOID: Final = (0, VOID_SIZE, 0)
VOID_UNIT: Final = UNIT.pack(*VOID)
_UNUSED: Final = bytes(50 * UNIT_BYTES)
LAST_ADDRESS: Final = -(1 << 31) - 1
"""Tags codes up to this are addresses in files next to the queue (`consumequeue_ext`), which RocketMQ can write.
mqstore does not read these files. The address may belong to any tag."""


@cache
def unit_dtype() -> np.dtype[np.void]:
    """Return the dtype of units: physical_offset, size, tags_code."""
    return np.dtype([("physical_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])


def used_units(data: bytes) -> int:
    """Return the number of units in `data` up to the last used one."""
    end = len(data)
    while data.endswith(_UNUSED, 0, end):
        end -= len(_UNUSED)
    count = -(-len(data[:end].rstrip(b"\0")) // UNIT_BYTES)  # counting one by one takes longer
    while count and UNIT.unpack_from(data, (count - 1) * UNIT_BYTES)[1] <= 0:
        count -= 1
    return count


def is_void(units: np.NDArray[np.void]) -> np.NDArray[np.bool_]:
    """Return a mask of the units that have a slot but no message (format#void)."""
    mask: np.NDArray[np.bool_] = units["size"] == VOID_SIZE
    if mask.any():
        mask &= (units["physical_offset"] == 0) & (units["tags_code"] == 0)
    return mask


def count_messages(data: bytes) -> tuple[int, int]:
    """Return the number of units in `data` that point to a record, and the size of these records."""
    if len(data) > 1000 * UNIT_BYTES:  # for fewer it is not worth importing numpy
        units = np.frombuffer(data, unit_dtype())
        sizes = units["size"][is_message(units)]
        return len(sizes), int(sizes.sum(dtype=np.int64))
    few = [unit[1] for unit in UNIT.iter_unpack(data) if unit[0] >= 0 and unit[1] > 0 and unit != VOID]
    return len(few), sum(few)


def differing(units: np.NDArray[np.void], others: np.NDArray[np.void]) -> np.NDArray[np.bool_]:
    """Return a mask of the units that are not equal.

    Fields are compared one by one. numpy's comparison of whole units runs Python code, and turns the exception of a
    signal handler into a TypeError.
    """
    mask: np.NDArray[np.bool_] = (
        (units["physical_offset"] != others["physical_offset"])
        | (units["size"] != others["size"])
        | (units["tags_code"] != others["tags_code"])
    )
    return mask


def is_message(units: np.NDArray[np.void]) -> np.NDArray[np.bool_]:
    """Return a mask of the units that point to a record (format#queue-repair): offset >= 0, size > 0, not void."""
    mask: np.NDArray[np.bool_] = (units["size"] > 0) & (units["physical_offset"] >= 0) & ~is_void(units)
    return mask
