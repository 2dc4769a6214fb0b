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
from typing import Final

import numpy as np
import numpy.typing as npt

UNIT: Final = struct.Struct(">qiq")
UNIT_BYTES: Final = UNIT.size
UNIT_SIZE_AT: Final = 8
UNIT_TAGS_CODE_AT: Final = UNIT_SIZE_AT + 4
UNIT_DTYPE: Final = np.dtype([("physical_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])

VOID_SIZE: Final = 0x7FFF_FFFF
VOID_UNIT: Final = UNIT.pack(0, VOID_SIZE, 0)
LAST_ADDRESS: Final = -(1 << 31) - 1
"""Tags codes up to this are addresses in files next to the queue (`consumequeue_ext`), which RocketMQ can write.
mqstore does not read these files. The address may belong to any tag."""


def is_void(units: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Return a mask of the units that have a slot but no message (format#void)."""
    mask: npt.NDArray[np.bool_] = units["size"] == VOID_SIZE
    if mask.any():
        mask &= (units["physical_offset"] == 0) & (units["tags_code"] == 0)
    return mask


def differing(units: npt.NDArray[np.void], others: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Return a mask of the units that are not equal.

    Fields are compared one by one. numpy's comparison of whole units runs Python code, and turns the exception of a
    signal handler into a TypeError.
    """
    mask: npt.NDArray[np.bool_] = (
        (units["physical_offset"] != others["physical_offset"])
        | (units["size"] != others["size"])
        | (units["tags_code"] != others["tags_code"])
    )
    return mask


def is_message(units: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Return a mask of the units that point to a record (format#queue-repair): offset >= 0, size > 0, not void."""
    mask: npt.NDArray[np.bool_] = (units["size"] > 0) & (units["physical_offset"] >= 0) & ~is_void(units)
    return mask
