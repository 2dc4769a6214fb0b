"""A name server and two brokers of Apache RocketMQ in one JVM."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mqstore.spark.sessions import NO_JAVA, find_java

BROKERS = ("broker-a", "broker-b")


class Cluster:
    """The running JVM. It ends with this process, because that closes its standard input."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.name_server = self._line("ready").split()[1]

    def _line(self, start: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(start):
                return line
        raise AssertionError(f"the JVM has ended, with code {self._process.wait()}")

    def do(self, command: str, *words: object) -> list[str]:
        """Stop or start a broker, or have a Java member join a group. Return the words of the answer."""
        assert self._process.stdin is not None
        print(command, *(words or "-"), file=self._process.stdin, flush=True)
        return self._line("done").split()[1:]


@contextmanager
def running(jars: Path, folder: Path) -> Iterator[Cluster]:
    home = find_java()
    assert home is not None, NO_JAVA
    classes, store = folder / "classes", folder / "store"
    store.mkdir()
    class_path = f"{jars}/*"
    source = Path(__file__).parent / "java" / "Cluster.java"
    binaries = Path(home) / "bin"
    subprocess.run([binaries / "javac", "-cp", class_path, "-d", classes, source], check=True)
    command = [binaries / "java", "-Xmx512m", f"-Duser.home={folder}", "-cp", f"{classes}{os.pathsep}{class_path}"]
    process = subprocess.Popen(
        [*command, "Cluster", store, *BROKERS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield Cluster(process)
    finally:
        process.kill()
        process.communicate()
