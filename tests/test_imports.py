"""Helpers of tests are in modules without `test_` in their names: no test module is imported by another module."""

from __future__ import annotations

import re
from pathlib import Path

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
