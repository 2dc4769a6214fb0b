"""Two stores with something of everything, and a session that commands do not stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mqstore import SimulatedClock
from tests.tools.brokers import broker

T0 = 1_760_000_000_000


def two_stores(folder: Path) -> dict[str, Path]:
    """Stores with topics `orders` and `t`, groups, a delayed message, and a dead letter."""
    for name in ("a", "b"):
        clock = SimulatedClock(T0)
        with broker(folder / name, clock, dlq_retention=None) as running:
            running.topics.create("orders", queues=2)
            for i in range(30):
                running.put("orders", b"%d" % i * i, queue_id=i % 2, keys=[f"k-{i % 7}"], tag="ab"[i % 2])
                clock.advance(1000)
            running.put("t", b"x", keys=["k-1"], delay_level=2)
            running.commit("g", "orders", 0, 5)
            running.run_once()
            [delivery] = running.pop("h", "orders", 1)
            running.dead_letter("h", "orders", delivery.receipt, "why not")
    return {name: folder / name for name in ("a", "b")}


class KeptSession:
    """A session that outlives the command."""

    def __init__(self, spark: Any) -> None:
        self._spark = spark

    def __getattr__(self, name: str) -> Any:
        return (lambda: None) if name == "stop" else getattr(self._spark, name)
