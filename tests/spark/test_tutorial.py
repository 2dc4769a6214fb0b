"""The tutorial and its recipes, typed into Python in an empty folder, and once more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import mqstore

_ROOT = Path(__file__).parent.parent.parent
_TYPIST = r"""
import code, re, subprocess, sys

class Typist(code.InteractiveConsole):
    def showtraceback(self): raise
    def showsyntaxerror(self, *args, **options): raise

def shown(value):
    if value is not None:
        sys.exit(f"typed in, this prints {value!r:.200}")

sys.displayhook = shown
typist = Typist()
for language, block in re.findall(r"^```(py|sh)\n(.*?)^```$", open(sys.argv[1]).read(), re.M | re.S):
    for line in [*block.splitlines(), ""]:
        if language == "py":
            typist.push(line)
        else:
            command = line.replace("mqstore ", sys.executable + " -m mqstore_tools.main ", 1)
            subprocess.run(command, shell=True, check=True)
"""
"""Types the blocks of a page as one session. A block that fails ends it, and so does one that echoes a value."""

pytestmark = [pytest.mark.spark_alone, pytest.mark.usefixtures("spark_environment")]


class Copy(NamedTuple):
    """What a copy has in common with its original."""

    body: bytes
    properties: tuple[tuple[str, str], ...]
    flag: int
    sys_flag: int
    born_ms: int
    born_host: str
    attempts: int


Queues = dict[tuple[str, int], list[Copy]]


def messages(path: Path) -> Queues:
    """By queue, in order. The store verifies, to the last byte."""
    found: Queues = {}
    with mqstore.open(path, "r") as store:
        assert [*store.verify()] == []
        for topic in store.topics(system=True):
            if not topic.startswith("%"):
                for ref in store.queues(topic):
                    copies = [_copy(message) for message in store.iter(*ref)]
                    if copies:
                        found[ref.topic, ref.queue_id] = copies
    return found


def _copy(message: Any) -> Copy:
    properties = message.stored_properties()
    return Copy(
        bytes(message.body_view),
        tuple((name, value) for name, value in properties.items() if name != "__CRC32#"),
        message.flag,
        message.sys_flag,
        message.born_timestamp_ms,
        str(message.born_host),
        message.reconsume_times,
    )


def _type(folder: Path) -> str:
    """What the page prints."""
    path = os.pathsep.join([str(_ROOT / "store"), str(_ROOT / "tools")])
    done = subprocess.run(
        [sys.executable, "-c", _TYPIST, str(_ROOT / "docs" / "spark-tutorial.md")],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _paid(copies: Queues) -> list[list[bytes]]:
    """Bodies of the paid orders of each queue."""
    found = [[copy.body for copy in queue if ("TAGS", "paid") in copy.properties] for queue in copies.values()]
    return [bodies for bodies in found if bodies]


def _customer(copy: Copy) -> str:
    return dict(copy.properties)["KEYS"]


def test_every_block_runs_and_runs_again(tmp_path: Path) -> None:
    for run in (1, 2):
        printed = _type(tmp_path)
        shop = messages(tmp_path / "shop")
        if run == 1:
            first, paid = shop, _paid(shop)
            # One queue has all orders of a customer.
            last = {_customer(copy): copy for queue in shop.values() for copy in queue}
            kept = {key: [copy for copy in queue if last[_customer(copy)] == copy] for key, queue in shop.items()}
            latest = {key: queue for key, queue in kept.items() if queue}

        for says in (
            f"{10_000 * run} orders in the lake",
            f"{sum(map(len, paid))} paid orders again",  # the second run of a replay writes nothing
            f"{10_000 * run} orders in the mirror",
            "200 customers have a last order",
            "10000 different orders",
            "2000 events imported",
        ):
            assert says in printed
        assert [[copy.body for copy in queue] for queue in messages(tmp_path / "again").values()] == paid
        assert messages(tmp_path / "backup") == shop

    assert messages(tmp_path / "latest") == latest
    assert messages(tmp_path / "distinct") == first
