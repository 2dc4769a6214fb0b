"""A store with its transactions alone, and time by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mqstore.broker.tables.names import HALF_TOPIC, OP_TOPIC, TIMER_TOPIC, TRANS_CHECK_TOPIC, TRANS_GROUP, QueueKey
from mqstore.broker.transactions.service import NOT_ASKED, TransactionHandle, Transactions
from mqstore.log.writing.writer import AppendHandle
from tests.broker.support import ServiceBench, full

__all__ = [
    "GROUP", "HALF_TOPIC", "NOT_ASKED", "OP_TOPIC", "TIMER_TOPIC", "TRANS_CHECK_TOPIC", "TRANS_GROUP",
    "Bench", "QueueKey", "Transactions", "refuse_ops",
]  # fmt: skip

GROUP = "payments"


class Bench(ServiceBench[Transactions]):
    def __init__(self, path: Path) -> None:
        super().__init__(path, Transactions)

    @property
    def transactions(self) -> Transactions:
        return self.service

    def begin(self, body: bytes = b"b", **options: Any) -> TransactionHandle:
        return self.transactions.begin("orders", body, **{"producer_group": GROUP, "queue_id": 0, **options})

    def crash(self, *, save: bool = False) -> None:
        """Open again after a kill, with progress as it was or saved."""
        if save:
            self.parts.offsets.save()
        self.reopen(killed=True)


def refuse_ops(patch: pytest.MonkeyPatch) -> None:
    """Let the disk be full for ops alone."""
    patch.setattr(AppendHandle, "put", full)
