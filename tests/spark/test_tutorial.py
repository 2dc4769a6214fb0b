"""The tutorial, typed in by somebody who has only the page: every block, in its order, in a folder that is empty."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parent.parent.parent
_BLOCK = re.compile(r"^```(py|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.spark


def _script() -> str:
    """The page as one Python program: one session, as the reader has. Shell lines run where they stand."""
    page = (_ROOT / "docs" / "spark-tutorial.md").read_text(encoding="utf-8")
    parts = ["import subprocess, sys"]
    for language, block in _BLOCK.findall(page):
        if language == "py":
            parts.append(block)
            continue
        for line in block.splitlines():
            command = line.replace("mqstore ", f"{sys.executable} -m mqstore_tools.main ", 1)
            if " spark sql " not in line:  # another Java each
                command += " --master none"
            parts.append(f"subprocess.run({command!r}, shell=True, check=True)")
    return "\n".join(parts)


@pytest.mark.timeout(1300)
def test_every_block_runs_and_runs_again(spark: Any, tmp_path: Path) -> None:
    del spark  # says whether there is one, and has set the environment; the page makes its own
    script = _script()
    assert script.count("subprocess.run") >= 5
    path = os.pathsep.join([str(_ROOT / "store"), str(_ROOT / "tools")])
    for orders in (10_000, 20_000):
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"{orders} orders in the lake" in done.stdout
