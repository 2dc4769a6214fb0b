"""Peers that are programs of their own: Redis, and Apache RocketMQ's store in its JVM.

Redis       a server of its own, on a Unix socket, with an append-only file that is synced each second
RocketMQ    `DefaultMessageStore.putMessage` in a loop within the JVM (`JavaStore.java`): one thread, a tag, two keys
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.harness import Load, Side, Work, needs_modules
from mqstore.spark.sessions import find_java

_WARM_UP = 2.5
"""Messages that the JVM puts before anything is timed, as a multiple of the timed ones. After half a million a put
takes half of the CPU time that it takes after a hundred thousand."""
_LOOKS = 6000


@contextmanager
def redis_client(directory: Path) -> Iterator[Any]:
    """Start a server, and yield a client of it."""
    import redis

    # The name of a socket has to be shorter than a path may be.
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        socket = f"{folder}/socket"
        command = ["redis-server", "--port", "0", "--unixsocket", socket, "--dir", str(directory), "--save", ""]
        command += ["--appendonly", "yes", "--appendfsync", "everysec"]
        with (
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL) as process,
            closing(redis.Redis(unix_socket_path=socket)) as client,
        ):
            try:
                for _ in range(_LOOKS):
                    with suppress(redis.ConnectionError):
                        client.ping()
                        break
                    time.sleep(0.01)
                yield client
            finally:
                process.terminate()


def redis_missing() -> str | None:
    if shutil.which("redis-server") is None:
        return "redis-server not installed (Debian has a package of that name)"
    return needs_modules("redis")()


def _jars() -> Path | None:
    """Folder with RocketMQ's jars: the one in the environment, else the one that the Makefile has fetched."""
    fetched = sorted(Path(__file__).parent.parent.glob("var/rocketmq-*/fetched"))
    named = os.environ.get("MQSTORE_ROCKETMQ", fetched[-1].parent if fetched else None)
    return None if named is None else Path(named)


def _java_missing() -> str | None:
    home, jars = find_java(), _jars()
    if home is None or not (home / "bin" / "javac").exists():
        return "no JDK 11 or later found (JAVA_HOME, PATH)"
    if jars is None or next(jars.glob("rocketmq-store-*.jar"), None) is None:
        return "RocketMQ's jars not fetched (`make bench` does, with Maven and a network)"
    return None


@contextmanager
def java_put(directory: Path, load: Load) -> Iterator[Work]:
    home, jars = find_java(), _jars()
    assert home is not None and jars is not None  # noqa: PT018
    pool = directory / "bodies"
    pool.write_bytes(b"".join(load.bodies()[:1024]))
    command = [str(home / "bin" / "java"), f"-Duser.home={directory}"]  # its logs go there
    # A disk that others have filled is no reason to refuse messages.
    command += [f"-Drocketmq.broker.diskSpace{name}Ratio=0.99" for name in ("WarningLevel", "CleanForcibly")]
    command += ["-cp", f"{jars.resolve()}/*", str(Path(__file__).with_name("JavaStore.java"))]
    command += [str(directory / "store"), str(pool), str(load.body_bytes)]
    command += [str(load.messages), str(int(_WARM_UP * load.messages))]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
    with (directory / "errors").open("w+b") as errors, subprocess.Popen(command, stderr=errors, **pipes) as process:

        def line() -> bytes:
            said: bytes = process.stdout.readline()
            if not said:
                errors.seek(0)
                raise RuntimeError(f"the JVM ended: {errors.read().decode(errors='replace')[-2000:]}")
            return said

        def work() -> int:
            process.stdin.write(b"\n")
            return int(line())

        try:
            while line() != b"ready\n":
                pass  # output of a library
            yield work
        finally:
            process.kill()


JAVA_PUT = Side("RocketMQ putMessage", java_put, _java_missing)
