"""RocketMQ's own Java clients against `mqstore serve` (`make conformance`; remoting-server, section 15.1)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.serve.support import started

CLIENTS = [Path(path).absolute() for path in os.environ.get("MQSTORE_ROCKETMQ_CLIENTS", "").split(":") if path]
"""Folders with the jars of one version each."""
SCENARIOS = [
    "send", "push", "filters", "delay", "retry", "order", "poison", "broadcast", "litepull", "transactions", "members",
    "pull",
]  # fmt: skip
PROGRAMS = {
    "3": (["Clients3"], ["send", "push", "retry", "order", "delay", "pull"]),
    "4": (["Clients"], [*SCENARIOS, "requests"]),
    "5": (["Clients", "Clients5"], [*SCENARIOS, "timer", "pop", "codecs"]),
}
"""Classes, the main one first, and scenarios, by the major version of the client."""
ONLY = os.environ.get("SCENARIOS", "").split()
"""Scenarios to run, for a change of one. Default: all."""


@pytest.mark.timeout(900)
@pytest.mark.skipif(not CLIENTS, reason="needs a JDK and Maven: make conformance")
@pytest.mark.parametrize("binary", [False, True], ids=["json", "binary"])
@pytest.mark.parametrize("jars", CLIENTS, ids=lambda path: path.name)
def test_java_clients(tmp_path: Path, jars: Path, binary: bool) -> None:
    major = jars.name.rpartition("-")[2][0]
    if binary and major == "3":
        pytest.skip("clients 3.x know only the JSON header")
    classes, scenarios = PROGRAMS[major]
    sources = [Path(__file__).parent / "java" / f"{name}.java" for name in classes]
    subprocess.run(["javac", "-cp", f"{jars}/*", "-d", tmp_path, *sources], check=True)
    header = ["-Drocketmq.serialize.type=ROCKETMQ"] if binary else []
    home = f"-Duser.home={tmp_path}"  # logs, and the offsets of broadcasting
    with started(tmp_path / "mq", "--listen", "127.0.0.1:0") as (_, (host, port)):
        done = subprocess.run(
            ["java", home, *header, "-cp", f"{tmp_path}:{jars}/*", classes[0], f"{host}:{port}", *ONLY],
            capture_output=True,
            text=True,
            check=True,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("ok ", "FAILED "))]
    assert lines == [f"ok {name}" for name in scenarios if not ONLY or name in ONLY], done.stderr
