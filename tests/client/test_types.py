"""Programs that annotate what the pages say pass a type checker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """\
from __future__ import annotations

from collections.abc import Sequence

import mqstore


def use(consumer: mqstore.PushConsumer) -> None:
    @consumer.subscribe("orders")
    def one(message: mqstore.Message) -> None: ...

    @consumer.subscribe("orders")
    def batch(messages: tuple[mqstore.Message, ...]) -> None: ...

    @consumer.subscribe("orders")
    def sequence(messages: Sequence[mqstore.Message]) -> None: ...

    @consumer.subscribe("orders")  # type: ignore[type-var]
    def none(number: int) -> None: ...
"""


def test_handlers_are_annotated_with_what_they_get(tmp_path: Path) -> None:
    """A handler of batches, `tuple[Message, ...]`, was refused by mypy, though it worked."""
    pytest.importorskip("mypy")
    (tmp_path / "program.py").write_text(PROGRAM)
    sources = Path(__file__).parents[2]
    command = [sys.executable, "-m", "mypy", "--strict", f"--config-file={sources / 'pyproject.toml'}", "program.py"]
    environment = {**os.environ, "MYPYPATH": str(sources / "store")}

    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    assert (run.returncode, run.stderr) == (0, ""), run.stdout
