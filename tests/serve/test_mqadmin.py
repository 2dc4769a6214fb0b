"""RocketMQ's mqadmin against `mqstore serve` (`make conformance`; remoting-server, section 11)."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.support import ORDERS, SEND, Client, started

TOOLS = Path(os.environ.get("MQSTORE_ROCKETMQ_TOOLS") or "none").absolute()
"""Folder with the jars of rocketmq-tools."""
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not TOOLS.is_dir(), reason="needs a JDK and Maven: make conformance"),
]


class Mqadmin:
    """mqadmin, and a consumer, in one process of Java."""

    def __init__(self, folder: Path, address: str) -> None:
        self.address = address
        source = Path(__file__).parent / "java" / "Admin.java"
        subprocess.run(["javac", "-cp", f"{TOOLS}/*", "-d", folder, source], check=True)
        home = [f"-Duser.home={folder}", f"-Drocketmq.home.dir={folder}"]
        self.process = subprocess.Popen(
            ["java", *home, "-cp", f"{folder}:{TOOLS}/*", "Admin", address],
            cwd=folder,  # consumerStatus writes files there
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __call__(self, line: str) -> str:
        """Run a command. Return what it prints, with one space for several."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        command, *words = line.split(" ")
        name_server = [] if command in ("start", "consume", "leave") else ["-n", self.address]
        self.process.stdin.write("\t".join([command, *name_server, *words]) + "\n")
        self.process.stdin.flush()
        printed = list(iter(self.process.stdout.readline, "###\n"))
        return re.sub(r"[ \t]+", " ", "".join(printed))


@pytest.fixture
def mqadmin(tmp_path: Path) -> Iterator[Mqadmin]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with started(tmp_path / "mq", "--listen", f"127.0.0.1:{port}") as (_, (host, port)):
        mqadmin = Mqadmin(tmp_path, f"{host}:{port}")
        with mqadmin.process:
            yield mqadmin
            mqadmin.process.kill()


def test_mqadmin_commands(mqadmin: Mqadmin) -> None:
    broker = f"-b {mqadmin.address}"
    offsets = "orders mqstore {} {} {} {} "  # queue, its end, the group's offset, difference

    def shows(line: str, *facts: str) -> str:
        printed = mqadmin(line)
        missing = [fact for fact in facts if fact not in printed]
        assert not missing, (line, missing, printed)
        assert "Exception: " not in printed, (line, printed)
        return printed

    shows(f"updateTopic {broker} -t orders -r 2 -w 2", "create topic", "success")
    shows("updateTopic -c DefaultCluster -t other -r 1 -w 1", "create topic", "success")
    shows(f"updateSubGroup {broker} -g billing -r 5", "success", "retryMaxTimes=5")
    shows("getConsumerConfig -g billing", "DefaultCluster:mqstore", "retryMaxTimes = 5\n")
    shows("sendMessage -t orders -p c -k key-c -c tag-c -b mqstore -i 1", "mqstore 1 SEND_OK")
    host, _, port = mqadmin.address.rpartition(":")
    with Client((host, int(port))) as client:  # sendMessage works once in a process
        for body in "ab":
            client.ask(SEND, ORDERS | {"i": f"TAGS\x01tag-{body}\x02KEYS\x01key-{body}\x02"}, body.encode())
    shows("clusterList", f"DefaultCluster mqstore 0 {mqadmin.address} V5_3_3")
    shows("clusterList -m", "DefaultCluster mqstore 0 0 3 ")
    shows(f"brokerStatus {broker}", "putMessageTimesTotal : 3\n", "brokerActive : true\n")
    shows("topicList", "orders\n", "other\n")
    shows("topicRoute -t orders", f'{{0:"{mqadmin.address}"', '"readQueueNums":2')
    shows("topicStatus -t orders", "mqstore 0 0 2 ", "mqstore 1 0 1 ")
    shows("topicClusterList -t orders", "DefaultCluster")

    [message_id] = re.findall(r"^(\w+) 0 1\n", shows("queryMsgByKey -t orders -k key-b"), re.M)
    by_offset = shows("queryMsgByOffset -t orders -b mqstore -i 0 -o 1", "Keys: [key-b]", "Tags: [tag-b]")
    [offset_id] = re.findall(r"OffsetID: (\w+)", by_offset)
    shows(f"queryMsgByUniqueKey -t orders -i {message_id}", "Keys: [key-b]", "Queue Offset: 1")
    shows(f"queryMsgById -t orders -i {offset_id}", "Keys: [key-b]", f"Store Host: {mqadmin.address}")
    shows("printMsg -t orders -d true", "minOffset=0, maxOffset=2", *(f"BODY: {body}" for body in "abc"))
    shows("queryCq -t orders -q 0 -i 0 -c 5", "max: 2, min: 0", "idx: 1")

    client_id = shows("start").strip()
    shows("consume 3")
    shows("consumerConnection -g billing", client_id, "JAVA V5_3_3", "orders", "CONSUME_FROM_FIRST_OFFSET")
    shows("producerConnection -g shop -t orders", "JAVA V5_3_3")
    shows(f"producer {broker}", "producer group (shop)")
    shows("consumerStatus -g billing", client_id, "Rebalance OK")
    shows(f"consumerStatus -g billing -i {client_id}", "#Consumer MQ Detail#", "orders mqstore 1 ")
    shows("topicList -c", "orders billing")
    shows(f"queryMsgById -t orders -i {offset_id} -g billing -d {client_id}", "consumeResult=CR_SUCCESS")
    assert "CODE: 16" in mqadmin("deleteTopic -c DefaultCluster -t orders")
    shows("resetOffsetByTime -g billing -t orders -s 0", "mqstore 0 0 ", "mqstore 1 0 ")
    shows("consume 7")  # three, one of them directly, and three again
    shows("leave")

    shows("consumerProgress -g billing", offsets.format(0, 2, 2, 0), offsets.format(1, 1, 1, 0), "Diff Total: 0")
    shows("consumerProgress", "billing 0 OFFLINE 0 0")
    shows("resetOffsetByTime -g billing -t orders -s 0", "mqstore 0 0 ", "mqstore 1 0 ")
    shows("consumerProgress -g billing -t orders", offsets.format(0, 2, 0, 2), "Diff Total: 3")
    shows(f"brokerConsumeStats {broker}", "Diff Total: 3")
    shows("skipAccumulatedMessage -g billing -t orders", "mqstore 0 2 ", "mqstore 1 1 ")
    shows("statsAll -t orders", "orders billing 0 ")
    shows(f"setConsumeMode {broker} -t orders -g billing -m POP", "success")
    shows(f"getBrokerConfig {broker}", "brokerName = mqstore\n")
    shows("getNamesrvConfig", "brokerName = mqstore\n")
    shows(f"updateTopicPerm {broker} -t orders -p 4", "from 6 to 4")
    shows("deleteSubGroup -c DefaultCluster -g billing", "success")
    shows("deleteTopic -c DefaultCluster -t orders", "success")
    assert "orders" not in shows("topicList", "other")
