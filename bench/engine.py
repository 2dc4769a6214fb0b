"""mqstore's side of each question, through its public interface, with the defaults that a user gets.

The one departure: where a question is about dispatch or recovery, the store's files are prepared by hand (a folder
removed, the mark of a crash set) to make the work happen that is to be timed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import mqstore
from bench import peers
from bench.harness import Load, Side, Work
from bench.peers import BATCH

READ_BATCH = 1000
"""Messages asked for at once when a whole queue is read as messages."""
SEGMENTS = 200


def _fill(store: Any, load: Load, batch: int = BATCH) -> list[Any]:
    """All bodies into queue 0; returns the receipts, dispatched."""
    bodies = load.bodies()
    receipts = []
    for start in range(0, len(bodies), batch):
        receipts += store.put_many(load.topic, bodies[start : start + batch], queue_id=0)
    store.dispatch()
    return receipts


@contextmanager
def put(directory: Path, load: Load) -> Iterator[Work]:
    bodies = load.bodies()
    with closing(mqstore.engine.MessageStore(directory / "store")) as store:

        def work() -> int:
            put_one, topic = store.put, load.topic
            for body in bodies:
                put_one(topic, body, queue_id=0)
            return len(bodies)

        yield work


@contextmanager
def put_many(directory: Path, load: Load) -> Iterator[Work]:
    bodies = load.bodies()
    with closing(mqstore.engine.MessageStore(directory / "store")) as store:

        def work() -> int:
            for start in range(0, len(bodies), BATCH):
                store.put_many(load.topic, bodies[start : start + BATCH], queue_id=0)
            return len(bodies)

        yield work


@contextmanager
def put_flushed(directory: Path, load: Load, *, threads: int) -> Iterator[Work]:
    bodies = load.bodies()
    with closing(mqstore.engine.MessageStore(directory / "store", durability="flush")) as store:
        # Creating segment, queue and folders belongs to the first message of a store, not to each.
        store.put(load.topic, bodies[0], queue_id=0)

        def one(part: list[bytes]) -> None:
            put_one, topic = store.put, load.topic
            for body in part:
                put_one(topic, body, queue_id=0)

        if threads == 1:

            def work() -> int:
                one(bodies)
                return len(bodies)

            yield work
            return

        errors: list[BaseException] = []
        gate = threading.Barrier(threads + 1)

        def run(part: list[bytes]) -> None:
            gate.wait()
            try:
                one(part)
            except BaseException as error:  # handed to the caller: a rate with a dead thread in it would be a lie
                errors.append(error)

        crew = [threading.Thread(target=run, args=(bodies[start::threads],)) for start in range(threads)]
        for thread in crew:
            thread.start()

        def work_together() -> int:
            gate.wait()
            for thread in crew:
                thread.join()
            if errors:
                raise errors[0]
            return len(bodies)

        yield work_together


@contextmanager
def read_messages(directory: Path, load: Load) -> Iterator[Work]:
    with closing(mqstore.engine.MessageStore(directory / "store")) as store:
        _fill(store, load)

        def work() -> int:
            offset = read_bytes = 0
            while messages := store.read(load.topic, 0, offset, READ_BATCH):
                for message in messages:
                    read_bytes += len(message.body)
                offset = messages[-1].offset + 1
            assert (offset, read_bytes) == (load.messages, load.messages * load.body_bytes)
            return offset

        yield work


@contextmanager
def reput(directory: Path, load: Load) -> Iterator[Work]:
    # With a clock of its own a store starts no thread, so what is put stays undispatched until we say so.
    config = mqstore.StoreConfig(clock=mqstore.engine.SystemClock())
    with closing(mqstore.engine.MessageStore(directory / "store", config=config)) as store:
        bodies = load.bodies()
        for start in range(0, len(bodies), BATCH):
            store.put_many(load.topic, bodies[start : start + BATCH], queue_id=0)

        def work() -> int:
            assert store.dispatch() > 0
            return store.offsets(load.topic, 0)[1]

        yield work


def _crashed(path: Path, load: Load) -> tuple[int, list[tuple[int, int, int]]]:
    """Fill a store at `path` and leave it as a crash that also lost the checkpoint: opening must scan all of it.

    Returns the length of the log and each record's place (segment, begin, end).
    """
    with closing(mqstore.engine.MessageStore(path)) as store:
        receipts = _fill(store, load)
    (path / "abort").write_text("0")
    (path / "checkpoint").unlink()
    segment_bytes = next(file for file in (path / "commitlog").iterdir() if file.name.isdigit()).stat().st_size
    places = []
    for receipt in receipts:
        segment, begin = divmod(receipt.physical_offset, segment_bytes)
        places.append((segment, begin, begin + load.record_bytes))
    return receipts[-1].physical_offset + load.record_bytes, places


@contextmanager
def recovery(directory: Path, load: Load) -> Iterator[Work]:
    path = directory / "store"
    log_end, _ = _crashed(path, load)
    opened: list[Any] = []

    def work() -> int:
        opened.append(mqstore.engine.MessageStore(path))
        return log_end

    try:
        yield work
        recovered = [store.offsets(load.topic, 0)[1] for store in opened]
        assert recovered == [load.messages], recovered
    finally:
        for store in opened:
            store.close()


@contextmanager
def crc32c(directory: Path, load: Load, *, how: Literal["sweep", "records"]) -> Iterator[Work]:
    """The peer of recovery; it stands here since it works on the bytes that mqstore wrote."""
    path = directory / "store"
    log_end, places = _crashed(path, load)
    with peers.mapped_segments(path / "commitlog") as mappings:
        if how == "sweep":
            yield lambda: peers.crc32c_sweep(mappings, log_end)
        else:
            yield lambda: peers.crc32c_records(mappings, places)


@contextmanager
def open_clean(directory: Path, load: Load, *, share: float) -> Iterator[Work]:
    """Open a cleanly closed store of 200 segments that hold `load.messages * share` messages, as evenly as they go."""
    path = directory / "store"
    # 8 bytes stay free behind the last record of a segment; 1024 is the smallest segment there is.
    per_segment = max(int(load.messages * share) // SEGMENTS, -(-1016 // load.record_bytes))
    config = mqstore.StoreConfig(segment_bytes=per_segment * load.record_bytes + 8)
    with closing(mqstore.engine.MessageStore(path, config=config)) as store:
        # A batch rolls as a whole; one that is as long as a segment leaves none half empty.
        _fill(store, Load(load.body_bytes, per_segment * SEGMENTS, load.topic), per_segment)
    found = sum(file.name.isdigit() for file in (path / "commitlog").iterdir())
    assert found == SEGMENTS, f"{found} segments instead of {SEGMENTS}"
    opened: list[Any] = []

    def work() -> int:
        opened.append(mqstore.engine.MessageStore(path))
        return 1

    try:
        yield work
    finally:
        for store in opened:
            store.close()


PUT = Side("mqstore put", put)
PUT_MANY = Side("mqstore put_many, 1000 at once", put_many)
FLUSH_1 = Side("mqstore, 1 thread", partial(put_flushed, threads=1))
FLUSH_16 = Side("mqstore, 16 threads", partial(put_flushed, threads=16))
READ = Side("mqstore read", read_messages)
REPUT = Side("mqstore reput", reput)
RECOVERY = Side("mqstore open after a crash", recovery)
CRC32C_SWEEP = Side("bare crc32c, one sweep", partial(crc32c, how="sweep"))
CRC32C_RECORDS = Side("bare crc32c, a call a record", partial(crc32c, how="records"))
OPEN = Side("mqstore open, 200 segments", partial(open_clean, share=1.0))
OPEN_FEWER = Side("200 segments, an eighth of the messages", partial(open_clean, share=0.125))
