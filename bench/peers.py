"""Peers that are Python libraries, each used as its own documentation recommends for speed.

A library is imported where it is used, so a side is left out where it is not installed.

queuelib, litequeue, persist-queue   put; get and ack of each, for the last two a transaction either
diskcache       popleft of each: nothing is acknowledged, so a crash loses popped items
SQLite          WAL, autocommit: one INSERT a put; a get is an UPDATE ... RETURNING of the oldest row that is ready, an
                ack a DELETE. synchronous=off, NORMAL, or FULL: each commit is synced
LMDB            nosync, writemap, ascending 8-byte keys (append=True), putmulti of 1000 a transaction; a cursor over all
O_DSYNC         pwrite of as many bytes as a record has, one after the other, into blocks that were written before: it
                needs no journal, which is the best that a disk can do for a log
crc32c          the checksum over a mapped log in the page cache: one call a segment, or one a record
"""

from __future__ import annotations

import logging
import mmap
import os
import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from crc32c import crc32c

from bench.harness import Load, Side, Work, each, needs_modules

BATCH = 1000
"""Messages a transaction, a `put_many`."""

# Share of the messages of a round: the whole load would take these sides minutes.
_SQLITE, _ACK_QUEUE, _DSYNC = 0.2, 0.02, 0.25

_key = struct.Struct(">Q").pack

Opened = tuple[Callable[[bytes], object], Callable[[], Any]]
"""Functions that put a body, and that take and acknowledge the oldest one and return it."""
Open = Callable[[Path], AbstractContextManager[Opened]]


@contextmanager
def puts(
    directory: Path, load: Load, *, open_queue: Open, share: float = 1, then_takes: bool = False
) -> Iterator[Work]:
    """Put the bodies, or with `then_takes` take and acknowledge what was put before."""
    bodies = load.bodies(share)
    with open_queue(directory) as (put, take):

        def take_one(_: bytes) -> None:
            assert len(take()) == load.body_bytes

        if then_takes:
            each(bodies, put)()
        yield each(bodies, take_one if then_takes else put)


@contextmanager
def queuelib(directory: Path) -> Iterator[Opened]:
    from queuelib import FifoDiskQueue

    with closing(FifoDiskQueue(directory / "queuelib")) as queue:
        yield queue.push, queue.pop


@contextmanager
def sqlite(directory: Path, *, synchronous: str) -> Iterator[Opened]:
    with closing(sqlite3.connect(directory / "queue.db", isolation_level=None)) as connection:
        execute = connection.execute
        execute("PRAGMA journal_mode=WAL")
        execute(f"PRAGMA synchronous={synchronous}")
        execute("CREATE TABLE job (id INTEGER PRIMARY KEY, body BLOB NOT NULL, state TEXT NOT NULL DEFAULT 'ready')")
        if synchronous != "OFF":
            execute("CREATE INDEX ready ON job (id) WHERE state = 'ready'")
        oldest = "(SELECT id FROM job WHERE state = 'ready' ORDER BY id LIMIT 1)"

        taken = f"UPDATE job SET state = 'taken' WHERE id = {oldest} RETURNING id, body"

        def take() -> Any:
            [(number, body)] = execute(taken).fetchall()
            execute("DELETE FROM job WHERE id = ?", (number,))
            return body

        yield lambda body: execute("INSERT INTO job (body) VALUES (?)", (body,)), take


@contextmanager
def persist_queue(directory: Path) -> Iterator[Opened]:
    from persistqueue import SQLiteAckQueue

    with closing(SQLiteAckQueue(str(directory / "ackqueue"), multithreading=True)) as queue:

        def take() -> Any:
            body = queue.get(block=False)
            queue.ack(body)
            return body

        yield queue.put, take


@contextmanager
def litequeue(directory: Path) -> Iterator[Opened]:
    from litequeue import LiteQueue

    with closing(LiteQueue(str(directory / "litequeue.db"))) as queue:

        def take() -> Any:
            message = queue.pop()
            queue.done(message.message_id)
            return message.data

        yield lambda body: queue.put(body.hex()[: len(body)]), take  # it keeps text


@contextmanager
def diskcache(directory: Path) -> Iterator[Opened]:
    from diskcache import Deque

    deque = Deque(directory=str(directory / "diskcache"))
    with closing(deque.cache):
        yield deque.append, deque.popleft


@contextmanager
def lmdb(directory: Path, load: Load, *, reads: bool) -> Iterator[Work]:
    import lmdb

    bodies = load.bodies()
    # Twice the bytes and a little: B+tree pages are half full at worst, and copied once a transaction.
    size = 3 * load.messages * (load.body_bytes + 64) + (64 << 20)
    with closing(lmdb.open(str(directory / "lmdb"), map_size=size, sync=False, writemap=True, map_async=True)) as env:

        def putmulti() -> int:
            for start in range(0, len(bodies), BATCH):
                items = [(_key(number), body) for number, body in enumerate(bodies[start : start + BATCH], start)]
                with env.begin(write=True) as transaction:
                    transaction.cursor().putmulti(items, append=True)
            return len(bodies)

        def cursor() -> int:
            count = read_bytes = 0
            with env.begin() as transaction:
                for _, body in transaction.cursor():
                    read_bytes += len(body)
                    count += 1
            assert read_bytes == len(bodies) * load.body_bytes
            return count

        if reads:
            putmulti()
        yield cursor if reads else putmulti


@contextmanager
def dsync(directory: Path, load: Load) -> Iterator[Work]:
    size, count = load.record_bytes, len(load.bodies(_DSYNC))
    record = load.bodies()[0].ljust(size, b"\1")[:size]
    descriptor = os.open(directory / "log", os.O_RDWR | os.O_CREAT | os.O_DSYNC, 0o600)
    try:
        os.pwrite(descriptor, bytes(count * size), 0)

        def work() -> int:
            for position in range(0, count * size, size):
                os.pwrite(descriptor, record, position)
            return count

        yield work
    finally:
        os.close(descriptor)


@contextmanager
def mapped_segments(commitlog: Path) -> Iterator[list[memoryview]]:
    """Yield every segment of a commit log, mapped for reading, its pages touched."""
    views = []
    for path in sorted(path for path in commitlog.iterdir() if path.name.isdigit()):
        with path.open("rb") as file:
            views.append(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
        crc32c(views[-1])
    yield views
    for view in views:
        view.release()


def crc32c_sweep(views: list[memoryview], log_bytes: int) -> int:
    """Checksum `log_bytes` of a log, one call a segment. Returns the bytes covered."""
    left, state = log_bytes, 0
    for view in views:
        with view[:left] as part:
            state = crc32c(part, state)
            left -= len(part)
    return log_bytes - left


def crc32c_records(views: list[memoryview], places: list[tuple[int, int, int]]) -> int:
    """Checksum each record, given its place (segment, begin, end). Returns the bytes covered."""
    covered = 0
    for segment, begin, end in places:
        crc32c(views[segment][begin:end])
        covered += end - begin
    return covered


def _sqlite_missing() -> str | None:
    return None if sqlite3.sqlite_version_info >= (3, 35) else f"SQLite {sqlite3.sqlite_version} has no RETURNING"


def _side(name: str, open_queue: Open, share: float, module: str = "sqlite3", **how: bool) -> Side:
    return Side(name, partial(puts, open_queue=open_queue, share=share, **how), needs_modules(module))


_off, _normal, _full = (partial(sqlite, synchronous=name) for name in ("OFF", "NORMAL", "FULL"))

QUEUELIB = _side("queuelib FifoDiskQueue", queuelib, 1, "queuelib")
SQLITE = _side("SQLite WAL, synchronous=off", _off, _SQLITE)
SQLITE_PUT = _side("SQLite table, NORMAL", _normal, _SQLITE)
SQLITE_PUT_FULL = _side("SQLite table, FULL", _full, _SQLITE)
SQLITE_GET = replace(_side("SQLite table, NORMAL", _normal, _SQLITE, then_takes=True), missing=_sqlite_missing)
SQLITE_ACK_QUEUE = _side("persist-queue SQLiteAckQueue", persist_queue, _ACK_QUEUE, "persistqueue", then_takes=True)
LITEQUEUE = _side("litequeue", litequeue, _ACK_QUEUE, "litequeue", then_takes=True)
DISKCACHE_DEQUE = _side("diskcache Deque", diskcache, _ACK_QUEUE, "diskcache", then_takes=True)
LMDB_PUTMULTI = Side("LMDB putmulti, 1000 a transaction", partial(lmdb, reads=False), needs_modules("lmdb"))
LMDB_CURSOR = Side("LMDB cursor", partial(lmdb, reads=True), needs_modules("lmdb"))
DSYNC = Side("bare pwrite O_DSYNC", dsync)

# persist-queue warns by the root logger whenever it opens; the report is no place for that.
logging.getLogger("persistqueue").setLevel(logging.ERROR)
