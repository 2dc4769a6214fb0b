"""Peers that are programs of their own, where they are installed: each does as much work as it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import servers
from bench.harness import Load, Side

SIDES = [side for side in vars(servers).values() if isinstance(side, Side)]


@pytest.mark.parametrize("side", SIDES, ids=lambda side: side.name)
def test_a_server_does_the_work(tmp_path: Path, side: Side) -> None:
    reason = side.missing()
    if reason is not None:
        pytest.skip(reason)

    with side.prepare(tmp_path, Load(16, 40)) as work:
        assert 1 <= work() <= 40


@pytest.mark.parametrize("side", SIDES, ids=lambda side: side.name)
def test_a_server_that_is_not_there_is_missing(tmp_path: Path, side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("MQSTORE_ROCKETMQ", str(tmp_path))

    assert side.missing() is not None
