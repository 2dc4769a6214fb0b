"""The engine under queues and consumers: message store, clocks, reports of opening and checking.

For tools and tests. An application needs `mqstore.open`; the engine of an open store is `Store.log`.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder, MessageStore(folder) as store:
...     _ = store.put("orders", b"hello")
...     [message.body for message in store.read("orders")], [*store.verify()]
([b'hello'], [])
"""

from __future__ import annotations

from mqstore.clock import Clock, SimulatedClock, SystemClock
from mqstore.log.reader import GetResult, StoreReader
from mqstore.log.readonly import ReadOnlyMessageStore
from mqstore.log.recovery.report import Cut, Finding, RecoveryReport
from mqstore.log.snapshot.take import SnapshotPlan, SnapshotReport
from mqstore.log.stats import StoreStats
from mqstore.log.store import MessageStore

__all__ = [
    "Clock",
    "Cut",
    "Finding",
    "GetResult",
    "MessageStore",
    "ReadOnlyMessageStore",
    "RecoveryReport",
    "SimulatedClock",
    "SnapshotPlan",
    "SnapshotReport",
    "StoreReader",
    "StoreStats",
    "SystemClock",
]
