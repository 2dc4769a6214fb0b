"""A JVM with the real engine, for those who have fetched its jars: `make interop` does, and sets MQSTORE_ROCKETMQ to
their folder. Without it these tests are skipped."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqstore.spark.sessions import NO_JAVA, find_java
from tests.interop.javaengine import JavaEngine, Jvm

_HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def jvm(tmp_path_factory: pytest.TempPathFactory) -> Jvm:
    jars = os.environ.get("MQSTORE_ROCKETMQ")
    if jars is None:
        pytest.skip("MQSTORE_ROCKETMQ names no folder with RocketMQ's jars: `make interop` fetches them")
    home = find_java()
    assert home is not None, NO_JAVA
    classes = tmp_path_factory.mktemp("classes")
    class_path = f"{Path(jars).resolve()}/*"
    javac = str(Path(home) / "bin" / "javac")
    subprocess.run([javac, "-cp", class_path, "-d", str(classes), str(_HERE / "Engine.java")], check=True)
    return Jvm(str(Path(home) / "bin" / "java"), f"{classes}:{class_path}", tmp_path_factory.mktemp("home"))


@pytest.fixture
def engine(jvm: Jvm) -> Iterator[JavaEngine]:
    """A JVM for one test."""
    with JavaEngine(jvm) as started:
        yield started
