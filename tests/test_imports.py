"""Imports that the lint does not look at: circles between files, and test modules that others import."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from mqstore.native import kernel
from tests.client.aiosupport import environment

TESTS = Path(__file__).parent
IMPORT = re.compile(r"\s*(from tests\S*\.test_|from tests\S* import .*\btest_|import tests\S*\.test_)")


def test_no_module_imports_a_test_module() -> None:
    found = [
        f"{path.relative_to(TESTS)}: {line}"
        for path in sorted(TESTS.rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if IMPORT.match(line)
    ]

    assert found == [], "move what is shared into a module without `test_` in its name, such as support.py"


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph("mqstore", "mqstore_tools", exclude_type_checking_imports=True)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}

    TopologicalSorter(imported).prepare()  # CycleError names the circle


def test_no_module_imports_a_part_of_numpy_before_numpy() -> None:
    """`import numpy.typing` does not wait for a thread that is importing numpy, and both fail. A server that started
    right after the opening failed so, while the timer made its first array."""
    part = re.compile(r"^(import|from) numpy\.", re.MULTILINE)
    for path in (TESTS.parent / "store").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if (first := part.search(text)) is not None:
            assert "\nimport numpy as np\n" in text[: first.start()], path


@pytest.mark.skipif(kernel is None, reason="without compiled parts records are read as arrays")
def test_a_job_needs_no_numpy(tmp_path: Path) -> None:
    code = """
        import sys
        import mqstore

        for turn in range(3):
            with mqstore.open(sys.argv[1]) as store:
                queue = store.queue("jobs")
                for number in range(100 * turn + 1):
                    queue.put(b"%d" % number)
                for _ in range(len(queue)):
                    queue.get().ack()
                store.put("topic", b"body", keys="key", tag="tag")
                store.broker.stats()
            loaded = {"asyncio", "crc32c", "difflib", "email", "hashlib", "numpy"} & {*sys.modules}
            assert not loaded, (turn, loaded)
    """
    run = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "store")]
    subprocess.run(run, check=True, timeout=60, env=environment())
