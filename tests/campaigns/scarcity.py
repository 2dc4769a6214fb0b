"""A process with few descriptors, in which a campaign goes through the doors of a store (`test_descriptors.py`).

Run as a program it takes one JSON object from its command line, and prints one JSON line for each case:

    {"folder": where the stores of `make_stores` are, or will be, "cases": [[door, limit, held], ...]}

A negative limit leaves so many descriptors free, be there open what may.
Each case is a process of its own, forked from one that has imported everything: it opens `held` descriptors, sets the
limit, and goes through the door. Who writes has a copy of the store: without the limit it is then looked through for
what is lost.
"""

from __future__ import annotations

import codecs
import json
import logging
import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import mqstore
from mqstore.files import system
from mqstore_tools.main import COMMANDS, cli
from tests.commands import looking

__all__ = ["DOORS", "make_stores"]

TOPICS, QUEUES, MESSAGES = 25, 4, 600
SECONDS = 60
"""After so long a case is taken for one that hangs. The longest take one or two."""
CONFIG = mqstore.StoreConfig(
    segment_bytes=1536, consumequeue_units=8, index_slots=32, index_entries=24, default_queues=QUEUES
)


def body_of(number: int) -> bytes:
    return b"%06d" % number * 80


# -- the stores --------------------------------------------------------------------------------------------------------


def _fill(path: Path, *, kill: bool) -> None:
    store = mqstore.open(path, config=CONFIG)
    for number in range(MESSAGES):
        topic, queue_id = f"t{number % TOPICS}", number // TOPICS % QUEUES
        store.put(topic, body_of(number), queue_id=queue_id, keys=f"k{number}")
    store.put("later", b"by level", delay_level=18)
    store.put("later", b"by moment", delay=7200)
    jobs = store.queue("jobs")
    for number in range(20):
        jobs.put(b"job %d" % number)
    with jobs.get():
        pass
    store.commit_offset("billing", mqstore.QueueRef("t1", 0), 3)
    store.log.flush()
    if kill:
        store.put("t0", body_of(MESSAGES), queue_id=0)
        os._exit(0)
    store.close()
    os._exit(0)


def make_stores(folder: Path) -> None:
    """Make the stores that the doors open: `clean`, `killed`, and `full`, whose whole log has to be read."""
    for name in ("clean", "killed"):
        if (child := os.fork()) == 0:
            try:
                _fill(folder / name, kill=name == "killed")
            finally:
                traceback.print_exc()
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
    shutil.copytree(folder / "killed", folder / "full")
    (folder / "full" / "checkpoint").unlink()
    shutil.rmtree(folder / "full" / "index")


# -- the doors ---------------------------------------------------------------------------------------------------------


def _read_all(store: mqstore.Store) -> int:
    count = 0
    for topic in range(TOPICS):
        for queue_id in range(QUEUES):
            offset = 0
            while found := store.read(f"t{topic}", queue_id, offset):
                count += len(found)
                offset = found[-1].offset + 1
    return count


def _write(store: mqstore.Store, done: list[bytes]) -> None:
    for number in range(30):
        body = b"new %d " % number * 80
        store.put("t0", body, queue_id=number % QUEUES, keys=f"n{number}")
        done.append(body)
    many = [b"many %d " % number * 80 for number in range(12)]
    store.put_many("t1", many, queue_id=1)
    done += many
    store.put("t0", b"durable", queue_id=0, durability="flush")
    done.append(b"durable")
    store.put("later", b"in an hour", delay=3600)
    store.put("later", b"in two", delay_level=18)
    jobs = store.queue("jobs")
    jobs.put(b"one more")
    for _ in range(3):
        with jobs.get() as task:
            assert task.value


def writer(path: Path, done: list[bytes]) -> None:
    with mqstore.open(path) as store:
        _write(store, done)
        assert _read_all(store) >= MESSAGES
        assert [message.body for message in store.find("t7", key="k7")] == [body_of(7)]


def reader(path: Path, done: list[bytes]) -> None:
    with mqstore.open(path, mode="r") as store:
        assert _read_all(store) >= MESSAGES
        assert [message.body for message in store.find("t7", key="k7")] == [body_of(7)]
        assert not list(store.verify())


def opening(path: Path, done: list[bytes]) -> None:
    mqstore.open(path).close()


def _command(name: str) -> Callable[[Path, list[bytes]], None]:
    def run(path: Path, done: list[bytes]) -> None:
        copy = f"{path}-copy-{os.getpid()}"
        out, err = StringIO(), StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            try:
                topic = "jobs" if name.startswith("queue ") else "t1"
                cli.main(looking(path, copy, topic=topic)[name], prog_name="mqstore")
            except SystemExit as end:
                code = end.code
        shutil.rmtree(copy, ignore_errors=True)
        if code == 3:
            raise CommandError(err.getvalue())
        # A rebuild of the index would change the store, and no message is at the place that is traced.
        assert code == (name in ("recover, dry, index", "trace, an offset")), f"exit code {code}: {err.getvalue()}"

    return run


class CommandError(mqstore.MQStoreError):
    """A command said that it could not open the store."""


DOORS: dict[str, tuple[str, Callable[[Path, list[bytes]], None]]] = {
    **{f"open {kind}": (kind, opening) for kind in ("clean", "killed", "full")},
    **{f"write {kind}": (kind, writer) for kind in ("clean", "killed", "full")},
    "read": ("clean", reader),
    **{name: ("clean", _command(name)) for name in looking("", "")},
}


def _look(path: Path, done: list[bytes]) -> None:
    """Nothing that was stored is gone."""
    with mqstore.open(path) as store:
        found = {message.body for topic in (f"t{n}" for n in range(TOPICS)) for queue_id in range(QUEUES)
                 for message in store.iter(topic, queue_id)}  # fmt: skip
        missing = {body_of(number) for number in range(MESSAGES)} | set(done)
        missing -= found
        assert not missing, f"lost: {[body[:12] for body in missing]}"
    with mqstore.open(path, mode="r") as store:
        assert not (findings := list(store.verify())), findings


def _case(folder: Path, door: str, limit: int, held: int) -> dict[str, Any]:
    kind, go = DOORS[door]
    writes = go in (opening, writer)
    path = folder / f"case-{os.getpid()}" if writes else folder / kind
    if writes:
        shutil.copytree(folder / kind, path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held_fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(held)]
    used = len(os.listdir("/dev/fd")) - 1
    limit = used - limit if limit < 0 else limit
    done: list[bytes] = []
    told: dict[str, Any] = {"door": door, "limit": limit, "held": held, "free": limit - used, "error": ""}
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        go(path, done)
    except mqstore.MQStoreError as error:
        told["error"] = f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held_fds:
            os.close(fd)
    if writes:
        _look(path, done)
        shutil.rmtree(path)
    return told


def main() -> None:
    wanted = json.loads(sys.argv[1])
    folder = Path(wanted["folder"])
    logging.disable()
    # Nothing here cuts the power, and a sync costs more than all else.
    system.sync_data = lambda fd: None  # type: ignore[assignment]
    os.fsync = lambda fd: None  # type: ignore[assignment]
    if not (folder / "full").exists():
        make_stores(folder)
    codecs.lookup("ascii")  # as click does; an import needs a descriptor, too
    for name in COMMANDS:
        with suppress(ImportError):
            cli.get_command(None, name)  # type: ignore[arg-type]
    for door, limit, held in wanted["cases"]:
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(ours)
            signal.alarm(SECONDS)
            try:
                told = _case(folder, door, limit, held)
            except BaseException:
                told = {"door": door, "limit": limit, "held": held, "fault": traceback.format_exc()}
            os.write(theirs, json.dumps(told).encode()[:60_000])
            os._exit(0)
        os.close(theirs)
        with os.fdopen(ours, "rb") as pipe:
            data = pipe.read()
        status = os.waitpid(child, 0)[1]
        told = json.loads(data) if data else {"door": door, "limit": limit, "held": held, "fault": f"status {status}"}
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
