"""A test of an installed mqstore: its compiled parts are used, and the first example of the README runs.

`make wheel`, and cibuildwheel for each wheel, run this with an interpreter that has nothing but mqstore and what it
needs, as `python -I tests/installed.py`.
"""

from __future__ import annotations

import os
import runpy
import tempfile
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from pathlib import Path

import mqstore
from mqstore import native

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    if ROOT / "store" in Path(mqstore.__file__).parents:
        raise SystemExit(f"mqstore comes from the sources, {mqstore.__file__}: start this with python -I")
    if native.kernel is None:
        raise SystemExit(native.described())
    [plugin] = entry_points(group="pytest11", name="pytest_mqstore")
    if find_spec(plugin.module) is None:
        raise SystemExit("the wheel has no pytest_mqstore, which pytest would load")
    if mqstore.__version__ != version("mqstore"):
        raise SystemExit(f"mqstore.__version__ is {mqstore.__version__}, and the wheel is {version('mqstore')}")
    example = (ROOT / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("example.py").write_text(example, encoding="utf-8")
        runpy.run_path("example.py")
        os.chdir(ROOT)


if __name__ == "__main__":
    main()
