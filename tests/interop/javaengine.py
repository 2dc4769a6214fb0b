"""Apache RocketMQ's own engine in a process beside ours (`Engine.java`), asked by lines of JSON."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mqstore.files.jsonfile import decode_json
from tests.waiting import is_readable

__all__ = ["SIZES", "JavaEngine", "JavaError", "Jvm"]

SIZES = {"segment_bytes": 1 << 16, "consumequeue_units": 50, "index_slots": 53, "index_entries": 200}
"""Small files, so that all boundaries occur; options of `mqstore.StoreConfig`, and of `open` in `Engine.java`."""

_PATIENCE_S = 120


class JavaError(Exception):
    """What the engine threw."""


@dataclass(frozen=True)
class Jvm:
    """How to start one: the program, its class path, a home for its logs."""

    java: str
    class_path: str
    home: Path


class JavaEngine:
    """One JVM with at most one store open. Ends with the block, however that ends."""

    def __init__(self, jvm: Jvm) -> None:
        self._errors = open(jvm.home / "stderr", "ab")  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [jvm.java, "-Xmx512m", "-Xshare:auto", "-XX:TieredStopAtLevel=1", f"-Duser.home={jvm.home}"]
            # Somebody else's full disk is none of a test's business.
            + [f"-Drocketmq.broker.diskSpace{name}Ratio=0.99" for name in ("WarningLevel", "CleanForcibly")]
            + ["-cp", jvm.class_path, "Engine"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    def _ask(self, do: str, **what: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **what}).encode() + b"\n")
        self._process.stdin.flush()
        if not is_readable(self._process.stdout, _PATIENCE_S):
            raise JavaError(f"no answer to {do} within {_PATIENCE_S} s; see {self._errors.name}")
        line = self._process.stdout.readline()
        if not line:
            raise JavaError(f"the JVM ended at {do}; see {self._errors.name}")
        answer = json.loads(line)
        if "error" in answer:
            raise JavaError(f"{do}: {answer['error']}; see {self._errors.name}")
        return answer["said"]

    def open(self, path: Path, *, batch_topics: Sequence[str] = (), **settings: str | int | bool) -> None:
        """`DefaultMessageStore.load` and `start`; everything is dispatched when this returns. `settings`: of
        `MessageStoreConfig`, by its names."""
        batch = list(batch_topics)
        self._ask("open", path=str(path), ha_port=_free_port(), batch_topics=batch, settings=_texts(settings), **SIZES)

    def start_broker(self, path: Path) -> None:
        """A whole broker, with what it does on its own: delays, timers, transactions."""
        self._ask("broker", path=str(path), port=_free_port(), ha_port=_free_port(), settings={}, **SIZES)

    def put(
        self, topic: str, queue_id: int, body: bytes, properties: Mapping[str, str] | None = None, *, flag: int = 0
    ) -> tuple[int, int]:
        """(queue offset, physical offset)"""
        encoded = base64.b64encode(body).decode()
        said = self._ask(
            "put", topic=topic, queue_id=queue_id, body=encoded, properties=dict(properties or {}), flag=flag
        )
        return said["queue_offset"], said["physical_offset"]

    def delete_topics(self, *topics: str) -> None:
        """`DefaultMessageStore.deleteTopics`; in a broker the topics' settings go, too."""
        self._ask("delete_topics", topics=topics)

    def bounds(self) -> tuple[int, int]:
        """Physical offsets of the log: (min, max)."""
        said = self._ask("bounds")
        return said["min"], said["max"]

    def queues(self) -> dict[tuple[str, int], tuple[int, int]]:
        """(min offset, max offset) of each queue."""
        return {
            (line["topic"], line["queue_id"]): (line["min_offset"], line["max_offset"]) for line in self._ask("queues")
        }

    def messages(self, topic: str, queue_id: int) -> list[dict[str, Any]]:
        """All messages of a queue, read in the way of a consumer, in the shape of `mqstore export`."""
        lines: list[dict[str, Any]] = self._ask("messages", topic=topic, queue_id=queue_id)
        return lines

    def units(self, topic: str, queue_id: int) -> list[tuple[int, int, int]]:
        """(physical offset, size, tags code) from the queue's minimum on."""
        return [tuple(unit) for unit in self._ask("units", topic=topic, queue_id=queue_id)]

    def query(self, topic: str, key: str, *, begin_ms: int = 0, end_ms: int = 1 << 52, limit: int = 1000) -> list[int]:
        """Physical offsets that the index has for a key."""
        offsets: list[int] = self._ask("query", topic=topic, key=key, begin_ms=begin_ms, end_ms=end_ms, limit=limit)
        return offsets

    def at_time(self, topic: str, queue_id: int, timestamp_ms: int, *, last: bool = False) -> int:
        """`getOffsetInQueueByTime`, of the first or the last of equal times."""
        offset: int = self._ask("at_time", topic=topic, queue_id=queue_id, timestamp_ms=timestamp_ms, last=last)
        return offset

    def config(self) -> dict[str, Any]:
        """The broker's tables as it would write them: topics, groups, offsets, delay, order."""
        return {name: decode_json(text.encode()) for name, text in self._ask("config").items()}

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        self._ask("commit", group=group, topic=topic, queue_id=queue_id, offset=offset)

    def blocked(self, group: str, topic: str, queue_id: int, *, attempt_id: str, invisible_ms: int) -> bool:
        """Whether a pop in order would be held back."""
        held: bool = self._ask(
            "order", group=group, topic=topic, queue_id=queue_id, attempt_id=attempt_id, invisible_ms=invisible_ms
        )
        return held

    def settle(self, group: str, topic: str, queue_id: int, offset: int, pop_time_ms: int) -> int:
        """Acknowledge one message of a pop in order; how far the group is then, or a negative number."""
        where = {"group": group, "topic": topic, "queue_id": queue_id}
        following: int = self._ask("settle", **where, offset=offset, pop_time_ms=pop_time_ms)
        return following

    def end_transaction(
        self, producer_group: str, queue_offset: int, physical_offset: int, unique_key: str, *, commit: bool
    ) -> int:
        """Commit or roll back the half message there; the broker's code, 0 for well done."""
        half = {"queue_offset": queue_offset, "physical_offset": physical_offset, "unique_key": unique_key}
        code: int = self._ask("end_transaction", producer_group=producer_group, **half, commit=commit)
        return code

    def close(self) -> None:
        """Shut the store or broker down as its operator would."""
        self._ask("close")

    def halt(self) -> None:
        """The process is gone in this moment, as by SIGKILL. No JVM is left to ask."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> JavaEngine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            assert stream is not None
            stream.close()


def _free_port() -> int:
    """A port that is free, as is the one two below it, where a broker listens as well."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port - 2))
            except OSError:
                continue
            return port


def _texts(settings: Mapping[str, str | int | bool]) -> dict[str, str]:
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in settings.items()}
