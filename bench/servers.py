"""Peers that are programs of their own: Redis, and Apache RocketMQ's store in its JVM.

Redis       a stream in a server of its own, on a Unix socket, append-only file: XADD of one field; XREADGROUP of one
            message and XACK. appendfsync everysec, or always: each command is on disk when it returns
RocketMQ    `DefaultMessageStore.putMessage` in a loop within the JVM (`JavaStore.java`): one thread, a tag, two keys
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

from bench.harness import Load, Side, Work, needs_modules
from bench.peers import Opened, puts, takes
from mqstore.spark.sessions import find_java

_SHARE = {"everysec": 0.05, "always": 0.2}
"""Share of the messages of a round, since a round trip to a server takes a hundred times as long as a put."""
_WARM_UP = 2.5
"""Messages that the JVM puts before anything is timed, as a multiple of the timed ones. After half a million a put
takes half of the CPU time that it takes after a hundred thousand."""
_PATIENCE_S = 60


@contextmanager
def redis_client(directory: Path, *, fsync: Literal["everysec", "always"] = "everysec") -> Iterator[Any]:
    """Start a server, and yield a client of it."""
    import redis

    # The name of a socket has to be shorter than a path may be.
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        socket = f"{folder}/socket"
        command = ["redis-server", "--port", "0", "--unixsocket", socket, "--dir", str(directory), "--save", ""]
        command += ["--appendonly", "yes", "--appendfsync", fsync]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        try:
            with closing(redis.Redis(unix_socket_path=socket)) as client:
                until = time.monotonic() + _PATIENCE_S
                while True:
                    try:
                        client.ping()
                        break
                    except redis.ConnectionError:
                        if process.poll() is not None or time.monotonic() > until:
                            raise
                        time.sleep(0.01)
                yield client
        finally:
            process.terminate()
            process.wait()


@contextmanager
def redis_stream(directory: Path, *, fsync: Literal["everysec", "always"]) -> Iterator[Opened]:
    with redis_client(directory, fsync=fsync) as client:
        client.xgroup_create("bench", "group", id="0", mkstream=True)

        def take() -> Any:
            found: Any = client.xreadgroup("group", "consumer", {"bench": ">"}, count=1)
            [[_, [(number, fields)]]] = found
            client.xack("bench", "group", number)
            return fields[b"body"]

        yield lambda body: client.xadd("bench", {"body": body}), take


def redis_missing() -> str | None:
    if shutil.which("redis-server") is None:
        return "redis-server not installed (Debian has a package of that name)"
    return needs_modules("redis")()


def _jars() -> Path | None:
    """Folder with RocketMQ's jars: the one in the environment, else the one that the Makefile has fetched."""
    named = os.environ.get("MQSTORE_ROCKETMQ")
    if named is not None:
        return Path(named)
    fetched = sorted(Path(__file__).parent.parent.glob("var/rocketmq-*/fetched"))
    return fetched[-1].parent if fetched else None


def _java_missing() -> str | None:
    home = find_java()
    if home is None or not (home / "bin" / "javac").exists():
        return "no JDK 11 or later found (JAVA_HOME, PATH)"
    jars = _jars()
    if jars is None or next(jars.glob("rocketmq-store-*.jar"), None) is None:
        return "RocketMQ's jars not fetched (`make bench` does, with Maven and a network)"
    return None


@contextmanager
def java_put(directory: Path, load: Load) -> Iterator[Work]:
    home, jars = find_java(), _jars()
    assert home is not None
    assert jars is not None
    pool = directory / "bodies"
    pool.write_bytes(b"".join(load.bodies()[:1024]))
    command = [str(home / "bin" / "java"), f"-Duser.home={directory}"]  # its logs go there
    # A disk that others have filled is no reason to refuse messages.
    command += [f"-Drocketmq.broker.diskSpace{name}Ratio=0.99" for name in ("WarningLevel", "CleanForcibly")]
    command += ["-cp", f"{jars.resolve()}/*", str(Path(__file__).with_name("JavaStore.java"))]
    command += [str(directory / "store"), str(pool), str(load.body_bytes)]
    command += [str(load.messages), str(int(_WARM_UP * load.messages))]
    with (directory / "errors").open("w+b") as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def line() -> bytes:
            said = stdout.readline()
            if not said:
                errors.seek(0)
                raise RuntimeError(f"the JVM ended: {errors.read().decode(errors='replace')[-2000:]}")
            return said

        def work() -> int:
            stdin.write(b"\n")
            stdin.flush()
            return int(line())

        try:
            while line() != b"ready\n":
                pass  # output of a library
            yield work
        finally:
            process.kill()
            process.wait()
            stdin.close()
            stdout.close()


def _redis(name: str, prepare: Any, fsync: Literal["everysec", "always"]) -> Side:
    stream = partial(redis_stream, fsync=fsync)
    return Side(f"Redis {name}, {fsync}", partial(prepare, open_queue=stream, share=_SHARE[fsync]), redis_missing)


REDIS_ADD, REDIS_ADD_ALWAYS = _redis("XADD", puts, "everysec"), _redis("XADD", puts, "always")
REDIS_GET = _redis("XREADGROUP and XACK", takes, "everysec")
REDIS_GET_ALWAYS = _redis("XREADGROUP and XACK", takes, "always")
JAVA_PUT = Side("RocketMQ putMessage", java_put, _java_missing)
