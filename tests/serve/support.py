"""A server in a thread, and a small client that speaks frames over a socket."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mqstore import Store
from mqstore.layout.record import Record, decode_record
from mqstore.remoting.frames import ONE_WAY, RESPONSE, Frame, FrameReader, encode
from tests.tools.support import running

SEND, PULL, LITE_PULL, HEART_BEAT, ROUTE, LOCK, UNLOCK = 310, 11, 361, 34, 105, 41, 42
ORDERS: Mapping[str, Any] = {
    "a": "producers",
    "b": "orders",
    "c": "TBW102",
    "d": 4,
    "e": 0,
    "f": 0,
    "g": 1_700_000_000_000,
    "h": 0,
    "i": "",
    "m": "false",
}
"""Fields of a send to queue 0 of `orders`."""
PULL_ORDERS: Mapping[str, Any] = {
    "consumerGroup": "billing",
    "topic": "orders",
    "queueId": 0,
    "queueOffset": 0,
    "maxMsgNums": 32,
    "sysFlag": 4,
    "commitOffset": 0,
    "suspendTimeoutMillis": 0,
    "subVersion": 0,
    "subscription": "*",
    "expressionType": "TAG",
}
"""Fields of a pull from the first message of this queue, which does not wait."""


@contextmanager
def serving(store: Store, listen: str | list[str] = "127.0.0.1:0", **options: Any) -> Iterator[tuple[str, int]]:
    """Serve an open store in a thread. Yield its first address."""
    with store.serve(listen, **options) as server:
        yield address(server.address)


def resident_bytes() -> int:
    """Return the memory of this process, or 0 where the system does not tell."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * 4096 if pages.exists() else 0


def notice(directory: Path) -> dict[str, Any]:
    """Return what a server says about itself in serve.json."""
    value: dict[str, Any] = json.loads((directory / "serve.json").read_text())
    return value


def address(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    return host, int(port)


@contextmanager
def started(*args: object) -> Iterator[tuple[subprocess.Popen[bytes], tuple[str, int]]]:
    """Start the command. Yield it and its first address."""
    with started_line(*args) as (server, line):
        yield server, address(line.split()[1].removeprefix("remoting=").partition(",")[0])


@contextmanager
def started_line(*args: object, **options: Any) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start the command. Yield it and its ready line."""
    with running("serve", *args, **options) as server:
        line = server.stdout.readline().decode()
        assert line.startswith("ready remoting="), server.communicate()
        yield server, line


class Client:
    """A client on one connection."""

    def __init__(self, address: tuple[str, int] | Path | socket.socket, *, binary: bool = False) -> None:
        if isinstance(address, socket.socket):
            self.socket = address
        elif isinstance(address, Path):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(20)
            self.socket.connect(str(address))
        else:
            self.socket = socket.create_connection(address, timeout=20)
        self.notices: list[Frame] = []
        """Requests of the server."""
        self._binary = binary
        self._reader = FrameReader()
        self._answers: dict[int, Frame] = {}
        self._opaque = 0

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, code: int, fields: Mapping[str, Any] | None = None, body: bytes = b"", *, flag: int = 0) -> int:
        """Send a request. Return its number."""
        self._opaque += 1
        texts = {name: str(value) for name, value in (fields or {}).items()}
        frame = Frame(code, texts, body, opaque=self._opaque, flag=flag, binary=self._binary)
        self.socket.sendall(encode(frame))
        return self._opaque

    def answer(self, opaque: int) -> Frame:
        """Return the answer to a request, whatever else arrives before it."""
        while opaque not in self._answers:
            self.receive()
        return self._answers.pop(opaque)

    def receive(self) -> None:
        """Wait for bytes. Raises ConnectionError when the server has closed the connection."""
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionResetError("closed by the server")
        self._reader.feed(data)
        for frame in self._reader:
            if frame.is_response:
                self._answers[frame.opaque] = frame
            else:
                assert frame.flag in (0, ONE_WAY)
                self.notices.append(frame)

    def notice(self) -> Frame:
        """Return the next request of the server."""
        while not self.notices:
            self.receive()
        return self.notices.pop(0)

    def reply(self, request: Frame, code: int, body: bytes = b"", remark: str | None = None) -> None:
        """Answer a request of the server."""
        answer = Frame(code, {}, body, opaque=request.opaque, flag=RESPONSE, remark=remark, binary=self._binary)
        self.socket.sendall(encode(answer))

    def ask(self, code: int, fields: Mapping[str, Any] | None = None, body: bytes = b"") -> Frame:
        """Send a request and return its answer."""
        return self.answer(self.send(code, fields, body))

    def heartbeat(self, client_id: str, group: str = "billing", **subscriptions: str) -> Frame:
        """Be a consumer of `group`, by default of all `orders`."""
        topics = [
            {"topic": topic, "subString": text, "expressionType": "TAG"}
            for topic, text in (subscriptions or {"orders": "*"}).items()
        ]
        consumer = {"groupName": group, "messageModel": "CLUSTERING", "subscriptionDataSet": topics}
        return self.ask(HEART_BEAT, body=json.dumps({"clientID": client_id, "consumerDataSet": [consumer]}).encode())

    @staticmethod
    def record(frame: Frame) -> Record:
        """Return the first message in the body of a frame."""
        return decode_record(frame.body)

    def lock(self, client_id: str, *queue_ids: int, group: str = "billing") -> list[int]:
        """Lock queues of `orders` for a client. Return the ids of those that it has."""
        answer = self.ask(LOCK, body=queues_of(group, client_id, *queue_ids))
        return [each["queueId"] for each in json.loads(answer.body)["lockOKMQSet"]]


def queues_of(group: str, client_id: str, *queue_ids: int) -> bytes:
    """Return the body of a request that locks or unlocks queues of `orders`."""
    queues = [{"topic": "orders", "brokerName": "mqstore", "queueId": each} for each in queue_ids]
    return json.dumps({"consumerGroup": group, "clientId": client_id, "mqSet": queues}).encode()
