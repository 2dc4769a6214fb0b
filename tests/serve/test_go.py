"""RocketMQ's Go client against `mqstore serve` (`make conformance`; remoting-server, section 15.1)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.serve.support import started

CLIENT = os.environ.get("MQSTORE_GO_CLIENT", "")
"""The compiled program of the folder `go`."""
SCENARIOS = ["send", "push", "filters", "order", "delay", "retry", "pull", "transactions"]
ONLY = os.environ.get("SCENARIOS", "").split()


@pytest.mark.timeout(600)
@pytest.mark.skipif(not CLIENT, reason="needs Go: make conformance")
def test_go_client(tmp_path: Path) -> None:
    with started(tmp_path / "mq", "--listen", "127.0.0.1:0") as (_, (host, port)):
        done = subprocess.run(
            [Path(CLIENT).absolute(), f"{host}:{port}", *ONLY], capture_output=True, text=True, check=False
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("ok ", "FAILED "))]
    assert lines == [f"ok {name}" for name in SCENARIOS if not ONLY or name in ONLY], done.stdout + done.stderr
