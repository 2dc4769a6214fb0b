"""What columns save: messages of a store as Arrow batches, beside a loop that takes them one by one (S4 of the design).

    python -m bench.spark_columns [--messages N] [--rounds N] [--run N]

One process, page cache warm, the best of some rounds in which every side has its turn, after two. Two loops:

    decode   a unit, its record decoded (`decode_record`), a tuple made: what a data source without columns would do
    iter     `MessageStore.iter` and attributes of its messages: the engine's own best

Messages as in the measurements behind the design: four topics of four queues, interleaved, bodies of 100 to 300 bytes,
three properties. Goals: at least 20 times `decode` for four columns, at least 8 times for all.
"""

from __future__ import annotations

import argparse
import random
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.goals import ROUNDS, measure, report
from mqstore import OutgoingMessage, StoreConfig
from mqstore.columnar.columns import ColumnReader
from mqstore.columnar.rows import Policy
from mqstore.engine import MessageStore, ReadOnlyMessageStore
from mqstore.layout.record import Record, check_record, decode_record
from mqstore.log.message import row_of
from mqstore.log.tip import QueueRef

FOUR = ("topic", "queue_id", "queue_offset", "body")
_RUN = 50
_SEED = 20_240_229


def make(path: Path, messages: int, tags: Sequence[str] = "ABC", run: int = _RUN) -> None:
    """The store. `tags` take turns; so do the queues, with `run` messages each."""
    source = random.Random(_SEED)
    with MessageStore(path) as store:
        for i in range(messages // (16 * run)):
            for queue in range(16):
                batch = [
                    OutgoingMessage(
                        source.randbytes(source.randint(100, 300)),
                        tag=tags[(i * run + j) % len(tags)],
                        keys=[f"k{i}-{j}"],
                        properties={"colour": "blue"},
                    )
                    for j in range(run)
                ]
                store.put_many(f"topic-{queue % 4}", batch, queue_id=queue // 4)


def _refs(store: MessageStore) -> list[Any]:
    return [ref for topic in store.topics() for ref in store.queues(topic)]


def decoded(store: MessageStore, ref: QueueRef, low: int, high: int, *, verify: bool = False) -> Iterator[Record]:
    """The records of a part of a queue, one by one."""
    for physical, _, _ in struct.iter_unpack(">qiq", store.queue_table.get(*ref).read(low, high - low)):  # type: ignore[union-attr]
        segment = store.log_files.find(physical)
        assert segment is not None
        buffer, at = store.log_files.mapping(segment), physical - segment.start
        if verify:
            assert check_record(buffer, at, len(buffer), physical, store.manifest.checksum).status == "ok"
        yield decode_record(buffer, at)


def decode(store: MessageStore, every: bool, verify: bool = False) -> int:
    count = 0
    for ref in _refs(store):
        records = decoded(store, ref, *store.offsets(*ref), verify=verify)
        if every:
            count += len([(*record, record.properties) for record in records])
        else:
            count += len([(ref.topic, ref.queue_id, record.queue_offset, record.body) for record in records])
    return count


def decode_verified(store: MessageStore, every: bool) -> int:
    """As `decode`, and each record's checksum is compared before."""
    return decode(store, every, verify=True)


def iterate(store: MessageStore, every: bool) -> int:
    count = 0
    for ref in _refs(store):
        if every:
            count += len([row_of(message) for message in store.iter(*ref)])
        else:
            count += len([(m.topic, m.queue_id, m.offset, m.body) for m in store.iter(*ref)])
    return count


def columns(verify: bool) -> Callable[[MessageStore, bool], int]:
    def read(store: MessageStore, every: bool) -> int:
        reader = ColumnReader(store, None if every else FOUR, policy=Policy(verify=verify))
        return sum(batch.num_rows for ref in _refs(store) for batch in reader.queue(*ref, *store.offsets(*ref)))

    return read


PAIRS = (
    ("columns", "decode"),
    ("columns, checksums", "decode, checksums"),
    ("columns", "iter"),
    ("columns, checksums", "iter, checksums"),
)
SIDES: dict[str, tuple[Callable[[MessageStore, bool], int], bool]] = {
    "decode": (decode, False),
    "iter": (iterate, False),
    "columns": (columns(False), False),
    "decode, checksums": (decode_verified, True),
    "iter, checksums": (iterate, True),
    "columns, checksums": (columns(True), True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--messages", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--run", type=int, default=_RUN, help="messages of a queue that lie side by side")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder) / "s", given.messages, run=given.run)
        for every in (False, True):
            counts: dict[str, int] = {}

            def read(name: str, every: bool = every, counts: dict[str, int] = counts) -> None:
                side, verify = SIDES[name]
                with ReadOnlyMessageStore(Path(folder) / "s", config=StoreConfig(verify_reads=verify)) as store:
                    counts[name] = side(store, every)

            best = measure({name: partial(read, name) for name in SIDES}, given.rounds)
            [count] = {*counts.values()}
            print(f"\n{'all' if every else 'four'} columns of {count:,} messages")
            for name, seconds in best.items():
                print(f"  {name:20} {count / seconds / 1e6:6.2f} M/s")
            for name, loop in PAIRS:
                print(f"  {name} / {loop}: {best[loop] / best[name]:.1f}")
            what = f"{'all' if every else 'four'} columns, of the rate of a loop over records"
            report("S4", what, best["decode"] / best["columns"], 8 if every else 20)


if __name__ == "__main__":
    main()
