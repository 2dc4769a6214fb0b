"""Whether it pays to take a few records one at a time, without arrays: dispatch of one message (`dispatch.few`), and a
read of one in profile "rocketmq" (`RecordChecker`), each beside the same through arrays. `python -m bench.few`"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import mqstore
from mqstore.engine import MessageStore

_MESSAGES = 3_000
_ROUNDS = 5


def dispatch_s(folder: str) -> float:
    """Seconds of dispatching each message by itself."""
    config = mqstore.StoreConfig(clock=mqstore.SimulatedClock())  # no threads: nobody else dispatches
    with MessageStore(folder, config=config) as store:
        spent = 0.0
        for _ in range(_MESSAGES):
            store.put("t", b"x" * 128, 0, tag="a", keys="k")
            begin = time.thread_time()
            store.dispatch()
            spent += time.thread_time() - begin
        return spent


def read_s(folder: str) -> float:
    """Seconds of reading each message by itself."""
    with MessageStore(folder, profile="rocketmq") as store:
        store.put_many("t", [b"x" * 128] * _MESSAGES, 0)
        store.dispatch()
        begin = time.thread_time()
        for offset in range(_MESSAGES):
            store.read("t", 0, offset, 1)
        return time.thread_time() - begin


def ratio(work: Callable[[str], float], arrays: Any) -> float:
    """How much longer it takes through arrays, in the best of some rounds."""

    def once() -> float:
        with tempfile.TemporaryDirectory() as folder:
            return work(folder)

    few, many = [], []
    for _ in range(_ROUNDS):  # in turn: the machine may be busy for a while
        few.append(once())
        with arrays:
            many.append(once())
    return min(many) / min(few)


if __name__ == "__main__":
    through_arrays = mock.patch("mqstore.log.reput.few", return_value=None)
    print(f"dispatch of one message, through arrays: {ratio(dispatch_s, through_arrays):.2f} times the time")
    through_arrays = mock.patch("mqstore.log.checking.SMALL_BATCH", 0)
    print(
        f'read of one message, profile "rocketmq", through arrays: {ratio(read_s, through_arrays):.2f} times the time'
    )
