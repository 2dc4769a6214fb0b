"""The store of docs/operating.md: two hours of a shop, the same bytes at each run.

    python -m examples.shop shop

    orders     4 queues, one message every 20 s from 01:00 to 03:00 UTC, consumed by `billing`
    payments   1 queue, one message for each third order
    mail       a queue of jobs in order, with one that a worker has

At 02:04 and 02:07 a card is refused: `billing` gives up after three attempts. At 02:10 it forgets an order, whose
lease ends after a minute. At 02:30 it stops.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import mqstore
from mqstore import RetryPolicy, SimulatedClock, StoreConfig

BEGIN_MS = 1_769_821_200_000
"""2026-01-31 01:00 UTC."""
STEP_MS = 20_000
REFUSED, FORGOTTEN, STOPS = {192, 201}, "o-210", 270
"""Numbers of the orders that fail, key of the one that is forgotten once, number of the first that is not consumed."""


def fill(path: str | Path) -> None:
    """Write the store into the new directory `path`."""
    clock = SimulatedClock(BEGIN_MS)
    config = StoreConfig(clock=clock, segment_bytes=1 << 16, index_slots=64, index_entries=1024)
    with mqstore.open(path, config=config) as store:
        store.broker.topics.create("orders", queues=4)
        store.broker.topics.create("payments", queues=1)
        billing = store.simple_consumer("billing", {"orders": "*"}, retry=RetryPolicy(3, [30, 60]))
        for number in range(360):
            order, paid = f"o-{number}", number % 3 == 0
            text = "card refused" if number in REFUSED else "paid" if paid else "created"
            body = b'{"order": %d, "note": "%s %s"}' % (number, text.encode(), b"." * 200)
            properties = {"amount": str(number * 7 % 500)}
            store.put(
                "orders", body, tag=text.split()[0], keys=order, properties=properties,
                queue_id=number % 4, unique_key=f"{number:032X}",
            )  # fmt: skip
            if paid:
                store.put("payments", b"%d" % (number * 7 % 500), keys=order, unique_key=f"{number:031X}P")
            if number < STOPS:
                for delivery in billing.receive(16, wait=0):
                    if delivery.message.keys == (FORGOTTEN,) and delivery.attempt == 1:
                        continue
                    with suppress(ValueError), delivery as message:
                        if b"refused" in message.body:
                            raise ValueError("declined by the bank")
            clock.advance(STEP_MS)
            store.broker.run_once()
        store.put("orders", b"remind", keys="o-17", delay=86_400, queue_id=0, unique_key=f"{17:031X}R")
        mail = store.queue("mail", ordered=True)
        mail.put(b"to ada: thank you")
        mail.get_nowait()
        store.broker.run_once()


if __name__ == "__main__":
    fill(sys.argv[1])
