"""The message store below queues and consumers: clocks, messages and damage in its files, reports about it.

For tools and tests. An application needs `mqstore.open`.

>>> import mqstore, tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     with mqstore.open(folder) as store:
...         _ = store.put("orders", b"hello", queue_id=0)
...     with StoreFiles(folder) as files:
...         [[message.body for message in found] for found in files.log()]
[[b'hello']]
"""

from __future__ import annotations

from mqstore.clock import Clock, SimulatedClock
from mqstore.layout.properties import user_properties
from mqstore.log.message import row_of
from mqstore.log.reading.directory import StoreFiles
from mqstore.log.recovery.report import Finding
from mqstore.native import described as compiled_parts

__all__ = ["Clock", "Finding", "SimulatedClock", "StoreFiles", "compiled_parts", "row_of", "user_properties"]
