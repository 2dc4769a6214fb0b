"""One group with members of RocketMQ's Java client and of mqstore (`make conformance`; remoting-server, row 41)."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

import mqstore
from tests.serve.support import started

CLIENTS = [Path(path).absolute() for path in os.environ.get("MQSTORE_ROCKETMQ_CLIENTS", "").split(":") if path]
QUEUES, EACH = 4, 50
WAIT_S = 90
"""A 4.9 client asks again for a lock that was refused 20 s later."""


class Seen:
    """Texts of the messages, by the kind of the member that got them, in order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.by: dict[str, list[str]] = {"java": [], "mqstore": []}

    def add(self, kind: str, text: str) -> None:
        with self._changed:
            self.by[kind].append(text)
            self._changed.notify_all()

    def wait(self, prefix: str, kind: str | None = None) -> None:
        """Wait until all messages of a phase have arrived, or one at that kind of member."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._has(prefix, kind), WAIT_S), self.by

    def _has(self, prefix: str, kind: str | None) -> bool:
        if kind is not None:
            return any(text.startswith(prefix) for text in self.by[kind])
        return len({text for texts in self.by.values() for text in texts if text.startswith(prefix)}) == QUEUES * EACH


@pytest.mark.timeout(600)
@pytest.mark.skipif(not CLIENTS, reason="needs a JDK and Maven: make conformance")
@pytest.mark.parametrize("order", ["concurrent", "ordered"])
@pytest.mark.parametrize("binary", [False, True], ids=["json", "binary"])
@pytest.mark.parametrize("jars", [path for path in CLIENTS if "-3." not in path.name], ids=lambda path: path.name)
def test_java_and_mqstore_members_share_a_group(tmp_path: Path, jars: Path, binary: bool, order: str) -> None:
    source, seen = Path(__file__).parent / "java" / "Member.java", Seen()
    subprocess.run(["javac", "-cp", f"{jars}/*", "-d", tmp_path, source], check=True)
    header = ["-Drocketmq.serialize.type=ROCKETMQ"] if binary else []
    command = ["java", f"-Duser.home={tmp_path}", *header, "-cp", f"{tmp_path}:{jars}/*", "Member"]
    with (
        started(tmp_path / "mq", "--listen", "127.0.0.1:0") as (_, (host, port)),
        mqstore.connect(f"{host}:{port}") as store,
    ):
        store.create_topic("mixed", queues=QUEUES)
        store.broker.groups.create("mixed", orderly=order == "ordered")

        def send(phase: str) -> None:
            for number in range(EACH):
                for queue in range(QUEUES):
                    store.put("mixed", f"{phase} {queue} {number:02}".encode(), queue_id=queue)

        def member() -> mqstore.PushConsumer:
            consumer = store.push_consumer("mixed", mode="queue", ordered=order == "ordered")
            consumer.subscribe("mixed", handler=lambda message: seen.add("mqstore", message.body.decode()))
            return consumer

        java = subprocess.Popen([*command, f"{host}:{port}", order], stdin=-1, stdout=-1, text=True)
        assert java.stdout is not None
        assert java.stdin is not None
        assert java.stdout.readline() == "ready\n"
        lines = iter(java.stdout.readline, "")
        reader = threading.Thread(target=lambda: [seen.add("java", line[4:].strip()) for line in lines])
        reader.start()
        with java:
            send("alone")
            seen.wait("alone")
            with member():
                number = 0
                while not seen._has("probe", "mqstore"):  # until it has its share
                    store.put("mixed", f"probe {number % QUEUES} {number:04}".encode(), queue_id=number % QUEUES)
                    number += 1
                    time.sleep(0.05)
                    assert number < 20 * WAIT_S, seen.by
                send("both")
                seen.wait("both")
                seen.wait("both", "java")
                seen.wait("both", "mqstore")
                java.stdin.close()  # it leaves
                send("left")
                seen.wait("left")
            java.wait(WAIT_S)
            reader.join(WAIT_S)
    counted = Counter(text for texts in seen.by.values() for text in texts if text.startswith("both"))
    if order == "ordered":
        assert set(counted.values()) == {1}
        for texts in seen.by.values():
            for queue in range(QUEUES):
                mine = [text for text in texts if text.split()[1] == str(queue) and not text.startswith("probe")]
                assert mine == sorted(mine, key=lambda text: (["alone", "both", "left"].index(text.split()[0]), text))
