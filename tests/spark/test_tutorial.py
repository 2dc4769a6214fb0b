"""Pages typed in by somebody who has nothing else: every block, in its order, in a folder that is empty; and again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parent.parent.parent
_BLOCK = re.compile(r"^```(py|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = [pytest.mark.spark_alone, pytest.mark.usefixtures("spark_environment")]


def _script(page: str) -> str:
    """The page as one Python program: one session, as the reader has. Shell lines run where they stand."""
    parts = ["import subprocess, sys"]
    for language, block in _BLOCK.findall((_ROOT / "docs" / page).read_text(encoding="utf-8")):
        if language == "py":
            parts.append(block)
            continue
        for line in block.splitlines():
            command = line.replace("mqstore ", f"{sys.executable} -m mqstore_tools.main ", 1)
            if " spark sql " not in line:  # another Java each
                command += " --master none"
            parts.append(f"subprocess.run({command!r}, shell=True, check=True)")
    return "\n".join(parts)


SAYS = {
    "spark-tutorial.md": (["10000 orders in the lake"], ["20000 orders in the lake"]),
    # Of 500 orders each 50th is broken and each 10th, so all of these, not paid; one of each 25 was sent twice.
    "spark-recipes.md": (
        ["510 can be read, 10 cannot", "40 orders wait", "490 orders, each once", "450 orders paid within ten minutes"],
    )
    * 2,
}
"""What a page prints when it is typed in, and when it is typed in once more."""


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("page", SAYS)
def test_every_block_runs_and_runs_again(tmp_path: Path, page: str) -> None:
    path = os.pathsep.join([str(_ROOT / "store"), str(_ROOT / "tools")])
    for says in SAYS[page]:
        done = subprocess.run(
            [sys.executable, "-c", _script(page)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert [line for line in says if line not in done.stdout] == [], done.stdout
