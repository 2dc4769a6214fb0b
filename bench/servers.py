"""Peers that are programs of their own: Redis, and Apache RocketMQ's store in its JVM.

Redis       a stream in a server of our own, on a Unix socket, append-only file: XADD of one field; XREADGROUP of one
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
from typing import TYPE_CHECKING, Any, Literal

from bench.harness import Load, Side, Work, needs_modules
from mqstore.spark.sessions import find_java

if TYPE_CHECKING:
    import redis

_SHARE = {"everysec": 0.05, "always": 0.2}
"""Share of the messages of a round of puts, since a round trip to a server takes a hundred times as long as a put."""
_WARM_UP = 2.5
"""Messages that the JVM puts before anything is timed, as a multiple of those that are timed. Behind half a million a
put takes half of the CPU time that it takes behind a hundred thousand."""
_PATIENCE_S = 60

Fsync = Literal["everysec", "always"]


@contextmanager
def _redis(directory: Path, fsync: Fsync) -> Iterator[redis.Redis]:
    import redis

    # The name of a socket has to be shorter than a path may be.
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        socket = f"{folder}/socket"
        command = ["redis-server", "--port", "0", "--unixsocket", socket, "--dir", str(directory), "--save", ""]
        process = subprocess.Popen(
            [*command, "--appendonly", "yes", "--appendfsync", fsync],
            stdout=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
        )
        try:
            with closing(redis.Redis(unix_socket_path=socket)) as client:
                _until_it_answers(client, process)
                yield client
        finally:
            process.terminate()
            process.wait()


def _until_it_answers(client: redis.Redis, process: subprocess.Popen[bytes]) -> None:
    from redis import ConnectionError as NotYet

    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            client.ping()
            return
        except NotYet:
            if process.poll() is not None or time.monotonic() > until:
                raise
            time.sleep(0.01)


@contextmanager
def redis_add(directory: Path, load: Load, *, fsync: Fsync) -> Iterator[Work]:
    bodies = load.bodies(_SHARE[fsync])
    with _redis(directory, fsync) as client:

        def work() -> int:
            for body in bodies:
                client.xadd("bench", {"body": body})
            return len(bodies)

        yield work


@contextmanager
def redis_get(directory: Path, load: Load, *, fsync: Fsync) -> Iterator[Work]:
    with _redis(directory, fsync) as client:
        with client.pipeline(transaction=False) as pipeline:
            for body in load.bodies():
                pipeline.xadd("bench", {"body": body})
            pipeline.execute()
        client.xgroup_create("bench", "group", id="0")

        def work() -> int:
            for _ in range(load.messages):
                found: Any = client.xreadgroup("group", "consumer", {"bench": ">"}, count=1)
                [[_, [(number, fields)]]] = found
                assert len(fields[b"body"]) == load.body_bytes
                client.xack("bench", "group", number)
            return load.messages

        yield work


def _redis_missing() -> str | None:
    if shutil.which("redis-server") is None:
        return "redis-server not installed (Debian has a package of that name)"
    return needs_modules("redis")()


def _jars() -> Path | None:
    """Folder with RocketMQ's jars: the one that is named, else the one that the Makefile has fetched."""
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
        assert process.stdin is not None
        assert process.stdout is not None

        def line() -> bytes:
            assert process.stdout is not None
            said = process.stdout.readline()
            if not said:
                errors.seek(0)
                raise RuntimeError(f"the JVM ended: {errors.read().decode(errors='replace')[-2000:]}")
            return said

        def work() -> int:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
            return int(line())

        try:
            while line() != b"ready\n":
                pass  # what a library prints
            yield work
        finally:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


REDIS_ADD = Side("Redis XADD, everysec", partial(redis_add, fsync="everysec"), _redis_missing)
REDIS_ADD_ALWAYS = Side("Redis XADD, always", partial(redis_add, fsync="always"), _redis_missing)
REDIS_GET = Side("Redis XREADGROUP and XACK, everysec", partial(redis_get, fsync="everysec"), _redis_missing)
REDIS_GET_ALWAYS = Side("Redis XREADGROUP and XACK, always", partial(redis_get, fsync="always"), _redis_missing)
JAVA_PUT = Side("RocketMQ putMessage", java_put, _java_missing)
