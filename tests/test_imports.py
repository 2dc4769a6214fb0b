"""Imports that the lint does not look at: circles between files, and test modules that others import."""

from __future__ import annotations

import re
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

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
