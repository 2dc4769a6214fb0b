"""`mqstore lag`, `groups list` and `groups show` say which queue is suspended, and why, beside a running broker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mqstore import Message, RetryPolicy
from tests.client.orderlysupport import Bench
from tests.tools.brokers import clock_now
from tests.tools.support import mqstore, mqstore_json


def by_lag(path: Path) -> list[dict[str, Any]]:
    [group] = [each for each in mqstore_json("lag", path)["groups"] if each["group"] == "g"]
    return [
        {"topic": row["topic"], "queue_id": row["queue_id"], **row["suspended"]}
        for row in group["queues"]
        if row["suspended"] is not None
    ]


def by_groups(path: Path) -> list[dict[str, Any]]:
    [group] = [each for each in mqstore_json("groups", "list", path)["groups"] if each["name"] == "g"]
    return list(group["suspended"])


def by_group(path: Path) -> list[dict[str, Any]]:
    return list(mqstore_json("groups", "show", path, "g")["suspended"])


class Outage:
    """A group whose handler fails at message "1" as long as `on`."""

    def __init__(self, path: Path, mode: Any) -> None:
        self.on = True
        self.bench = bench = Bench(path, queues=2)
        bench.clock.advance(clock_now().now_ms() - bench.clock.now_ms())
        bench.put("0", "1", "2")
        bench.put("a", queue_id=1)
        bench.join(handler=self.handle, mode=mode, retry=RetryPolicy(None, [10]))
        self.since_ms = bench.clock.now_ms()
        bench.advance(1)

    def handle(self, message: Message) -> None:
        if self.on and message.text() == "1":
            raise ConnectionError("the\ndatabase is away")


COMMANDS = [("lag", "DIR"), ("lag", "DIR", "--group", "g"), ("groups", "list", "DIR"), ("groups", "show", "DIR", "g")]


@pytest.mark.parametrize("mode", ["queue", "pop"])
def test_a_suspended_queue_is_shown_until_it_goes_on(path: Path, mode: str) -> None:
    def shown() -> list[dict[str, Any]]:
        found = by_lag(path)
        assert by_groups(path) == by_group(path) == found
        return found

    outage = Outage(path, mode)
    where = {"topic": "t", "queue_id": 0, "offset": 1, "since_ms": outage.since_ms}
    error = "ConnectionError: the\ndatabase is away"
    assert shown() == [{**where, "attempt": 1, "error": error}]
    for command in COMMANDS:
        printed = mqstore(*(path if word == "DIR" else word for word in command)).stdout.splitlines()
        [line] = [line for line in printed if "database is away" in line]
        assert line.split()[:5] == ["g", "t", "0", "1", "1"]
        assert line.endswith(r"ConnectionError: the\ndatabase is away")
    outage.bench.advance(10)
    assert shown() == [{**where, "attempt": 2, "error": error}]

    outage.on = False
    outage.bench.advance(15)  # offsets are written every 5 s
    assert outage.bench.bodies[-1] == "2"
    assert shown() == []
    outage.bench.close()
    assert shown() == []


def test_a_group_that_does_not_consume_in_order_is_not_suspended(path: Path) -> None:
    bench = Bench(path)
    bench.put("0")
    bench.broker.groups.create("g")
    bench.broker.start_of("g", "t", 0)
    bench.close()
    assert by_lag(path) == by_groups(path) == []
    assert "suspended" not in mqstore("lag", path).stdout + mqstore("groups", path).stdout
