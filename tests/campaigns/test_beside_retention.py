"""Readers beside a writer that rolls segments and drops them as fast as it can.

A child process puts batches, takes some of them by pop, has others wait for later, and deletes the oldest segments of
64 KiB all the while. Beside it each command that reads, and each call of a store in mode "r", is run in turn:

    no finding, no traceback, the exit code that the documentation promises
    it ends: a process that does not is killed after DEADLINE_S, and that is a failure
    messages are whole and in order; one that is left out was dropped by retention; the last ones are not left out

Message `n` of a queue says so in its body, so that what is read needs nothing to be compared with but itself.
`make retention N=500` runs that many rounds, each with every look in an order of its own; without a number two rounds
run a few looks each. MQSTORE_CAMPAIGN_SEED runs the round of one seed.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from pathlib import Path

import pytest

import mqstore
from mqstore import Message, OutgoingMessage, Retention, StoreConfig
from mqstore.admin import inspect_store
from mqstore.errors import OffsetOutOfRangeError
from mqstore.jobs import verify
from tests.children import in_child, speaking_child
from tests.commands import looking
from tests.log.support import open_in
from tests.tools.support import main

ROUNDS = os.environ.get("MQSTORE_CAMPAIGN_ROUNDS")
ONLY = os.environ.get("MQSTORE_CAMPAIGN_SEED")
SEEDS = [int(ONLY)] if ONLY else range(int(ROUNDS or 2))
FEW = None if ROUNDS or ONLY else 12
"""Looks of a round; None: all."""
DEADLINE_S = 60
"""No look takes a second on a machine that is not busy."""
QUEUES = 3
SEGMENT = 64 << 10
CONFIG = {"segment_bytes": SEGMENT, "consumequeue_units": 256, "index_slots": 256, "index_entries": 1024}


def body_of(queue_id: int, n: int) -> bytes:
    return b"%d/%d " % (queue_id, n) * (20 + n % 60)


# --- the writer ---


def write(path: Path, seed: int, ready: int) -> None:
    """Put, roll and drop until somebody ends this process. Every other seed has a broker, and messages that wait hold
    its front for a while; a log alone drops faster."""
    logging.disable()  # the broker tells which groups retention has passed
    rng = random.Random(seed)
    kept = rng.choice([4, 16, 64]) * SEGMENT
    config = StoreConfig(
        **CONFIG, retention=Retention(age=None, max_bytes=kept, unconsumed="drop"), flush_interval=0.01
    )
    if seed % 2:
        with open_in("rw", path, config=config) as log:
            for turn in _puts(rng, log.put_many):
                log.drop_before(log.max_offset - kept)
                if turn == 100:
                    log.dispatch()  # a reader finds no topic before
                    os.write(ready, b"!")
    with mqstore.open(path, config=config) as store:
        store.create_topic("orders", queues=QUEUES)
        consumer = store.simple_consumer("poppers")
        consumer.subscribe("orders")
        for turn in _puts(rng, store.put_many):
            if turn % 2000 == 50:
                store.put("later", b"level", delay_level=1)
                store.put("later", b"moment", delay=0.1)
            if turn % 20 == 0:
                for message in consumer.receive(8, wait=0):
                    with suppress(mqstore.MQStoreError):
                        message.ack()
            store.log.clean()
            time.sleep(0.01)  # the replay of the pop log holds the front for seconds, and what comes in these is kept
            if turn == 100:
                os.write(ready, b"!")


def _puts(rng: random.Random, put_many: Callable[..., object]) -> Iterator[int]:
    """Put a batch at each turn."""
    counts = [0] * QUEUES
    for turn in count(1):
        queue_id = turn % QUEUES
        first = counts[queue_id]
        counts[queue_id] += rng.randrange(1, 60)
        bodies = [
            OutgoingMessage(body_of(queue_id, n), keys=f"k{n}", tag="even" if n % 2 == 0 else "odd")
            for n in range(first, counts[queue_id])
        ]
        put_many("orders", bodies, queue_id=queue_id)
        yield turn


@contextmanager
def writer(path: Path, seed: int) -> Iterator[None]:
    with speaking_child(partial(write, path, seed), limit_s=600) as (_, reader):
        assert os.read(reader, 1) == b"!", "the writer failed"
        yield


# --- looks ---

Rows = list[tuple[int, int, bytes]]
"""(queue id, queue offset, body) of messages of `orders`, in the order in which they were read."""


@dataclass(frozen=True)
class Look:
    """One way of looking: a command's arguments, or a function that yields messages."""

    name: str
    arguments: tuple[str, ...] = ()
    call: Callable[[Path], Rows | None] | None = None
    codes: tuple[int, ...] = (0,)
    complete: bool = False
    """Whether it gives every message of the topic."""


def of(messages: Iterator[Message] | list[Message]) -> Rows:
    return [(message.queue_id, message.offset, message.body) for message in messages]


def _read(path: Path) -> Rows:
    """As a program reads that goes on where it is told to."""
    rows: Rows = []
    with open_in("r", path) as store:
        for ref in store.queues("orders"):
            position, end = store.offsets(*ref)
            while position < end:
                try:
                    messages = store.read(*ref, position, 100)
                except OffsetOutOfRangeError as error:
                    position = error.min_offset
                    continue
                assert messages or store.offsets(*ref)[0] > position, f"nothing at {position}"
                rows += of(messages)
                position = messages[-1].offset + 1 if messages else position
    return rows


def _iter(path: Path) -> Rows:
    with open_in("r", path) as store:
        return [row for ref in store.queues("orders") for row in of(store.iter(*ref))]


def _iter_all(path: Path) -> Rows:
    with mqstore.open(path, mode="r") as store:
        return of(store.iter("orders"))


def _arrow(path: Path) -> Rows:
    with mqstore.open(path, mode="r") as store:
        table = store.to_arrow("orders", columns=["queue_id", "queue_offset", "body"])
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def _find(path: Path) -> None:
    with mqstore.open(path, mode="r") as store:
        for ref in store.queues("orders"):
            low, high = store.log.offsets(*ref)
            for n in (low, (low + high) // 2, high - 1):
                for message in store.find("orders", key=f"k{n}"):
                    assert message.body == body_of(message.queue_id, n)


def _times(path: Path) -> None:
    with mqstore.open(path, mode="r") as store:
        for ref in store.queues("orders"):
            for ms in (0, time.time_ns() // 1_000_000 - 100, 1 << 50):
                assert store.log.offsets(*ref)[0] <= store.log.offset_at(*ref, ms)


def _verify(path: Path) -> None:
    with open_in("r", path) as store:
        assert list(store.verify()) == []


def _spark(path: Path) -> None:
    report = verify(path, range_bytes=SEGMENT // 3)
    assert report.ok, report


def _facts(path: Path) -> None:
    with mqstore.open(path, mode="r") as store:
        store.log.stats()
        store.log.foreign()
        assert "orders" in store.topics()
        assert not store.log.has_unlisted()


def _inspect(path: Path) -> None:
    assert inspect_store(path)["problems"] == []


_NOT_BESIDE = [
    name
    for name in looking("", "")
    if ", dry" in name or name.startswith(("groups show", "dlq", "report, traffic", "trace"))
]
"""Refused beside a writer, of a group that the writer does not have, or told what retention took."""

LOOKS = [
    # Of a busy machine all that the queue held when the look began may be gone, and so may a key.
    *(
        # Nobody may have opened the topic as a queue.
        Look(name, tuple(words), codes=(0, 1, 2) if name.startswith("queue") else (0, 1))
        for name, words in looking("DIR", "OUT").items()
        if name not in _NOT_BESIDE
    ),
    Look("export of a topic", ("export", "DIR", "--topic", "orders"), complete=True),
    Look("get many", ("get", "DIR", "--topic", "orders", "--json", "--max-messages", "500"), codes=(0, 1)),
    Look(
        "get by tag",
        ("get", "DIR", "--topic", "orders", "--json", "--max-messages", "500", "--tag", "even"),
        codes=(0, 1),
    ),
    Look(  # this writer, on a file system in memory, may have dropped all that was there before it is searched
        "get the newest by tag",
        ("get", "DIR", "--topic", "orders", "--tag", "odd", "--last", "500", "--json"),
        codes=(0, 1),
    ),
    Look("MessageStore.read", call=_read, complete=True),
    Look("MessageStore.iter", call=_iter, complete=True),
    Look("Store.iter", call=_iter_all, complete=True),
    Look("to_arrow", call=_arrow, complete=True),
    Look("find", call=_find),
    Look("offset_at", call=_times),
    Look("MessageStore.verify", call=_verify),
    Look("Spark's verify", call=_spark),
    Look("statistics", call=_facts),
    Look("inspect_store", call=_inspect),
]


def bounds(path: Path) -> dict[int, tuple[int, int]]:
    with open_in("r", path) as store:
        return {ref.queue_id: store.offsets(*ref) for ref in store.queues("orders")}


def run(look: Look, path: Path, tmp: Path) -> tuple[int, str, str]:
    """(exit code, that of an alarm if it took too long; stdout; stderr) of a look in a process of its own."""
    out, err = tmp / "out", tmp / "err"
    code = in_child(partial(_look, look, path, tmp / "target", out, err), DEADLINE_S)
    return code, out.read_text(), err.read_text()


def _look(look: Look, path: Path, target: Path, out: Path, err: Path) -> None:
    for file, fd in ((out, 1), (err, 2)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    code = 0
    if look.call is not None:
        for queue_id, offset, body in look.call(path) or ():
            sys.stdout.write(json.dumps(_as_row(queue_id, offset, body)) + "\n")
    else:
        places = {"DIR": str(path), "OUT": str(target)}
        sys.argv = ["mqstore", *(places.get(word, word) for word in look.arguments)]
        try:
            main()
        except SystemExit as over:
            code = int(over.code or 0)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _as_row(queue_id: int, offset: int, body: bytes) -> dict[str, object]:
    return {"queue_id": queue_id, "queue_offset": offset, "body": base64.b64encode(body).decode()}


def wrong_in(rows: Rows, before: dict[int, tuple[int, int]], after: dict[int, tuple[int, int]]) -> str:
    """What is wrong with messages: one that is not whole, order, one left out that retention has not dropped; or ""."""
    for queue_id, offset, body in rows:
        if body != body_of(queue_id, offset):
            return f"queue {queue_id}: message {offset} is {body[:50]!r}"
    for queue_id, (_, end) in before.items():
        offsets = [offset for of_queue, offset, _ in rows if of_queue == queue_id]
        for behind, ahead in pairwise([*offsets, max(end, offsets[-1] + 1 if offsets else 0)]):
            if behind >= ahead:
                return f"queue {queue_id}: {ahead} comes behind {behind}"
            if ahead != behind + 1 and ahead > after[queue_id][0]:
                return f"queue {queue_id}: [{behind + 1}, {ahead}) left out; the first one kept is {after[queue_id][0]}"
        if not offsets and end > after[queue_id][0]:
            return f"queue {queue_id}: nothing, though [{after[queue_id][0]}, {end}) are there"
    return ""


def wrong_with(look: Look, path: Path, tmp: Path) -> str:
    """What went wrong with a look; or ""."""
    before = bounds(path)
    code, out, err = run(look, path, tmp)
    after = bounds(path)
    if code == -signal.SIGALRM:
        return f"not ended after {DEADLINE_S} s"
    if code not in look.codes or "Traceback" in err:
        return f"exit code {code}: {err[-1500:] or out[-500:]}"
    if not look.complete:
        return ""
    lines = [json.loads(line) for line in out.splitlines()]
    rows = [(line["queue_id"], line["queue_offset"], base64.b64decode(line["body"])) for line in lines]
    return wrong_in(rows, before, after)


@pytest.mark.timeout(2 * DEADLINE_S * len(LOOKS))
@pytest.mark.parametrize("seed", SEEDS)
def test_every_look_beside_a_writer_that_drops_segments(tmp_path: Path, seed: int) -> None:
    failures = []
    order = LOOKS[:]
    random.Random(seed).shuffle(order)
    with writer(tmp_path / "s", seed):
        for number, look in enumerate(order[:FEW]):
            (tmp_path / str(number)).mkdir()
            wrong = wrong_with(look, tmp_path / "s", tmp_path / str(number))
            if wrong:
                failures.append(f"{look.name}: {wrong}")
    if failures:
        pytest.fail(f"MQSTORE_CAMPAIGN_SEED={seed} replays it:\n" + "\n".join(failures), pytrace=False)
