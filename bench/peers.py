"""Peers that are Python libraries, each used as its own documentation would have it used for speed.

A library is imported where it is used, so that a side is left out where it is not installed.

queuelib        FifoDiskQueue.push: one write(2) of length and body
SQLite          WAL, synchronous=off, autocommit: one INSERT a transaction
LMDB            nosync, writemap, ascending 8-byte keys (append=True), 1000 a transaction, by put and by putmulti;
                a cursor over all to read
persist-queue   Queue.put: pickles to a file and rewrites its info file each time
SQLiteAckQueue  persist-queue's: put, then get and ack of each, a transaction either
SQLite table    what one writes by hand: a table with a state, WAL, one INSERT a put; a get is an UPDATE ... RETURNING
                of the oldest row that is ready, an ack a DELETE. synchronous=NORMAL, or FULL: each commit is synced
queue.Queue     put, or get and task_done: a ceiling, since it keeps everything in memory
litequeue       LiteQueue.pop and done of each, a transaction either
localqueue      SimpleQueue.get and ack of each, in its relaxed mode, which does not wait for the disk either
diskcache       Deque.append, then popleft of each: nothing to acknowledge, so what a crash finds popped is lost
O_DSYNC         pwrite of as many bytes as a record has, one after the other, into blocks that were written before
                (no allocation, no journal): what the disk grants a synchronous log at best
crc32c          the checksum alone over a mapped log that is in the page cache: in one sweep a segment, and one call
                a record with its place known beforehand
"""

from __future__ import annotations

import logging
import mmap
import os
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Literal

from crc32c import crc32c

from bench.harness import Load, Side, Work, needs_modules

if TYPE_CHECKING:
    import lmdb

BATCH = 1000
"""Messages a transaction, a `put_many`."""

_SQLITE_SHARE = 0.2
_PERSIST_QUEUE_SHARE = 0.005
_ACK_QUEUE_SHARE = 0.02
"""Of the messages of a round: these sides are so slow that the full load would only make the others wait."""

_key = struct.Struct(">Q").pack


@contextmanager
def queuelib_push(directory: Path, load: Load) -> Iterator[Work]:
    from queuelib import FifoDiskQueue

    bodies = load.bodies()
    with closing(FifoDiskQueue(directory / "queuelib")) as queue:
        push = queue.push

        def work() -> int:
            for body in bodies:
                push(body)
            return len(bodies)

        yield work


@contextmanager
def sqlite_insert(directory: Path, load: Load) -> Iterator[Work]:
    bodies = load.bodies(_SQLITE_SHARE)
    with closing(sqlite3.connect(directory / "queue.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=OFF")
        connection.execute("CREATE TABLE message (id INTEGER PRIMARY KEY, body BLOB NOT NULL)")
        execute = connection.execute

        def work() -> int:
            for body in bodies:
                execute("INSERT INTO message (body) VALUES (?)", (body,))
            return len(bodies)

        yield work


@contextmanager
def sqlite_table(
    directory: Path, load: Load, *, work: Literal["put", "get"], synchronous: Literal["NORMAL", "FULL"]
) -> Iterator[Work]:
    bodies = load.bodies(_SQLITE_SHARE)
    with closing(sqlite3.connect(directory / "queue.db", isolation_level=None)) as connection:
        execute = connection.execute
        execute("PRAGMA journal_mode=WAL")
        execute(f"PRAGMA synchronous={synchronous}")
        execute("CREATE TABLE job (id INTEGER PRIMARY KEY, body BLOB NOT NULL, state TEXT NOT NULL DEFAULT 'ready')")
        execute("CREATE INDEX ready ON job (id) WHERE state = 'ready'")
        insert = "INSERT INTO job (body) VALUES (?)"
        take = (
            "UPDATE job SET state = 'taken' WHERE id = (SELECT id FROM job WHERE state = 'ready' ORDER BY id LIMIT 1)"
            " RETURNING id, body"
        )

        def put() -> int:
            for body in bodies:
                execute(insert, (body,))
            return len(bodies)

        def get() -> int:
            for _ in bodies:
                [(number, body)] = execute(take).fetchall()
                assert len(body) == load.body_bytes
                execute("DELETE FROM job WHERE id = ?", (number,))
            return len(bodies)

        if work == "get":
            with connection:  # in one transaction, for it is not timed
                execute("BEGIN")
                put()
        yield put if work == "put" else get


@contextmanager
def in_memory(directory: Path, load: Load, *, work: Literal["put", "get"]) -> Iterator[Work]:
    bodies = load.bodies()
    queue: Queue[bytes] = Queue()

    def put() -> int:
        for body in bodies:
            queue.put(body)
        return len(bodies)

    def get() -> int:
        for _ in bodies:
            assert len(queue.get()) == load.body_bytes
            queue.task_done()
        return len(bodies)

    if work == "get":
        put()
    yield put if work == "put" else get


@contextmanager
def persist_queue_put(directory: Path, load: Load) -> Iterator[Work]:
    from persistqueue import Queue as PersistQueue

    bodies = load.bodies(_PERSIST_QUEUE_SHARE)
    queue = PersistQueue(str(directory / "persistqueue"), tempdir=str(directory))
    put = queue.put

    def work() -> int:
        for body in bodies:
            put(body)
        return len(bodies)

    try:
        yield work
    finally:
        # It has no close(); its two files would otherwise wait for the garbage collector, with a ResourceWarning.
        queue.headf.close()
        queue.tailf.close()


@contextmanager
def persist_queue_ack(directory: Path, load: Load) -> Iterator[Work]:
    from persistqueue import SQLiteAckQueue

    bodies = load.bodies(_ACK_QUEUE_SHARE)
    with closing(SQLiteAckQueue(str(directory / "ackqueue"), multithreading=True)) as queue:
        for body in bodies:
            queue.put(body)

        def work() -> int:
            for _ in bodies:
                body = queue.get(block=False)
                assert len(body) == load.body_bytes
                queue.ack(body)
            return len(bodies)

        yield work


@contextmanager
def litequeue_done(directory: Path, load: Load) -> Iterator[Work]:
    from litequeue import LiteQueue

    bodies = load.bodies(_ACK_QUEUE_SHARE)
    with closing(LiteQueue(str(directory / "litequeue.db"))) as queue:
        for body in bodies:
            queue.put(body.hex()[: load.body_bytes])  # it keeps text

        def work() -> int:
            for _ in bodies:
                message = queue.pop()
                assert len(message.data) == load.body_bytes
                queue.done(message.message_id)
            return len(bodies)

        yield work


class _Bytes:
    """A serializer for localqueue, whose own knows JSON alone."""

    def dumps(self, item: bytes) -> bytes:
        return item

    def loads(self, data: bytes) -> bytes:
        return data


@contextmanager
def localqueue_ack(directory: Path, load: Load) -> Iterator[Work]:
    from localqueue import DurabilityMode, SimpleQueue

    bodies = load.bodies(_ACK_QUEUE_SHARE)
    path = str(directory / "localqueue.db")
    with closing(SimpleQueue(path, serializer=_Bytes(), durability=DurabilityMode.RELAXED)) as queue:
        for body in bodies:
            queue.put(body)

        def work() -> int:
            for _ in bodies:
                job = queue.get(block=False)
                assert len(job.data) == load.body_bytes
                queue.ack(job)
            return len(bodies)

        yield work


@contextmanager
def diskcache_popleft(directory: Path, load: Load) -> Iterator[Work]:
    from diskcache import Deque

    bodies = load.bodies(_ACK_QUEUE_SHARE)
    deque = Deque(directory=str(directory / "diskcache"))
    with closing(deque.cache):
        for body in bodies:
            deque.append(body)

        def work() -> int:
            for _ in bodies:
                assert len(deque.popleft()) == load.body_bytes
            return len(bodies)

        yield work


@contextmanager
def _lmdb(directory: Path, load: Load) -> Iterator[lmdb.Environment]:
    import lmdb

    # Twice the bytes and a little: B+tree pages are half full at worst, and copied once a transaction.
    size = 3 * load.messages * (load.body_bytes + 64) + (64 << 20)
    with closing(lmdb.open(str(directory / "lmdb"), map_size=size, sync=False, writemap=True, map_async=True)) as env:
        yield env


def _lmdb_fill(env: lmdb.Environment, bodies: list[bytes]) -> None:
    number = 0
    for start in range(0, len(bodies), BATCH):
        with env.begin(write=True) as transaction:
            put = transaction.put
            for body in bodies[start : start + BATCH]:
                put(_key(number), body, append=True)
                number += 1


@contextmanager
def lmdb_put(directory: Path, load: Load) -> Iterator[Work]:
    bodies = load.bodies()
    with _lmdb(directory, load) as env:

        def work() -> int:
            _lmdb_fill(env, bodies)
            return len(bodies)

        yield work


@contextmanager
def lmdb_putmulti(directory: Path, load: Load) -> Iterator[Work]:
    bodies = load.bodies()
    with _lmdb(directory, load) as env:

        def work() -> int:
            for start in range(0, len(bodies), BATCH):
                chunk = bodies[start : start + BATCH]
                with env.begin(write=True) as transaction:
                    items = [(_key(number), body) for number, body in enumerate(chunk, start)]
                    transaction.cursor().putmulti(items, append=True)
            return len(bodies)

        yield work


@contextmanager
def lmdb_cursor(directory: Path, load: Load) -> Iterator[Work]:
    bodies = load.bodies()
    with _lmdb(directory, load) as env:
        _lmdb_fill(env, bodies)

        def work() -> int:
            count = read_bytes = 0
            with env.begin() as transaction:
                for _key_bytes, body in transaction.cursor():
                    read_bytes += len(body)
                    count += 1
            assert (count, read_bytes) == (len(bodies), len(bodies) * load.body_bytes)
            return count

        yield work


@contextmanager
def dsync_pwrite(directory: Path, load: Load) -> Iterator[Work]:
    size = load.record_bytes
    record = load.bodies()[0].ljust(size, b"\1")[:size]
    descriptor = os.open(directory / "log", os.O_RDWR | os.O_CREAT | os.O_DSYNC, 0o600)
    try:
        os.pwrite(descriptor, bytes(load.messages * size), 0)

        def work() -> int:
            pwrite = os.pwrite
            for position in range(0, load.messages * size, size):
                pwrite(descriptor, record, position)
            return load.messages

        yield work
    finally:
        os.close(descriptor)


@contextmanager
def mapped_segments(commitlog: Path) -> Iterator[list[mmap.mmap]]:
    """Every segment of a commit log, mapped for reading, its pages touched."""
    mappings = []
    try:
        for name in sorted(path for path in commitlog.iterdir() if path.name.isdigit()):
            with name.open("rb") as file:
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            mappings.append(mapping)
            crc32c(mapping)
        yield mappings
    finally:
        for mapping in mappings:
            mapping.close()


def crc32c_sweep(mappings: list[mmap.mmap], log_bytes: int) -> int:
    """One checksum over `log_bytes` of a log, a call a segment. Returns the bytes covered."""
    left = log_bytes
    state = 0
    for mapping in mappings:
        take = min(left, len(mapping))
        with memoryview(mapping) as view, view[:take] as part:
            state = crc32c(part, state)
        left -= take
    return log_bytes - left


def crc32c_records(mappings: list[mmap.mmap], places: list[tuple[int, int, int]]) -> int:
    """A checksum a record, its place (segment, begin, end) known beforehand. Returns the bytes covered."""
    views = [memoryview(mapping) for mapping in mappings]
    covered = 0
    try:
        for segment, begin, end in places:
            crc32c(views[segment][begin:end])
            covered += end - begin
    finally:
        for view in views:
            view.release()
    return covered


def _sqlite_missing() -> str | None:
    old = sqlite3.sqlite_version_info < (3, 35)
    return f"SQLite {sqlite3.sqlite_version} knows no RETURNING, 3.35 does" if old else None


_LMDB = needs_modules("lmdb")
_PERSISTQUEUE = needs_modules("persistqueue")

QUEUELIB = Side("queuelib FifoDiskQueue", queuelib_push, needs_modules("queuelib"))
SQLITE = Side("SQLite WAL, synchronous=off", sqlite_insert)
SQLITE_TABLE_PUT = Side(
    "SQLite table, NORMAL", partial(sqlite_table, work="put", synchronous="NORMAL"), _sqlite_missing
)
SQLITE_TABLE_PUT_FULL = Side(
    "SQLite table, FULL", partial(sqlite_table, work="put", synchronous="FULL"), _sqlite_missing
)
SQLITE_TABLE_GET = Side(
    "SQLite table, NORMAL", partial(sqlite_table, work="get", synchronous="NORMAL"), _sqlite_missing
)
SQLITE_TABLE_GET_FULL = Side(
    "SQLite table, FULL", partial(sqlite_table, work="get", synchronous="FULL"), _sqlite_missing
)
MEMORY_PUT = Side("queue.Queue in memory", partial(in_memory, work="put"))
MEMORY_GET = Side("queue.Queue in memory", partial(in_memory, work="get"))
PERSIST_QUEUE = Side("persist-queue Queue", persist_queue_put, _PERSISTQUEUE)
LMDB_PUT = Side("LMDB put, 1000 a transaction", lmdb_put, _LMDB)
LMDB_PUTMULTI = Side("LMDB putmulti, 1000 a transaction", lmdb_putmulti, _LMDB)
LMDB_CURSOR = Side("LMDB cursor", lmdb_cursor, _LMDB)
SQLITE_ACK_QUEUE = Side("persist-queue SQLiteAckQueue", persist_queue_ack, _PERSISTQUEUE)
LITEQUEUE = Side("litequeue", litequeue_done, needs_modules("litequeue"))
LOCALQUEUE = Side("localqueue", localqueue_ack, needs_modules("localqueue"))
DISKCACHE_DEQUE = Side("diskcache Deque", diskcache_popleft, needs_modules("diskcache"))
DSYNC = Side("bare pwrite O_DSYNC", dsync_pwrite)

# persist-queue warns on the root logger's behalf whenever it opens; the report is no place for that.
logging.getLogger("persistqueue").setLevel(logging.ERROR)
