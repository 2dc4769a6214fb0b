"""What columns save on the way in: rows of a frame as records; a write by Arrow beside one by rows (S8 of the design).

    python -m bench.spark_sink [--rows N] [--rounds N] [--spark]

    encode      in one process: record batches -> records (`Encoder`), beside two loops that take rows one by one
                pack     values as they are -> properties and header packed: the least that a row writer has to do
                checked  the same with the checks of a producer's put, which `encode` makes as well
    write       with --spark: the same frame to a new store, by Arrow writers and by row writers; local[2], all of a
                job with its commit, the clock on the wall. Goal: at least 1.8 times as fast

Rows as in the measurements behind the design: bodies of 100 to 300 bytes, a tag, a key, one property more. The best of
some rounds in which every side has its turn, after two.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench.goals import ROUNDS, SOCKETS, measure, report
from mqstore.columnar.encode import Encoder
from mqstore.columnar.rules import Rules
from mqstore.layout.hosts import LOCAL_HOST
from mqstore.layout.properties import encode_properties
from mqstore.layout.record import MAGIC_V1, header_struct, record_bytes
from mqstore.log.outgoing import user_properties

_SEED = 20_240_229
_BATCH = 10_000
_TOPIC = "topic-0"


def batches(rows: int) -> list[pa.RecordBatch]:
    """The frame, in batches of the size that Spark makes."""
    source = random.Random(_SEED)
    made = []
    for start in range(0, rows, _BATCH):
        numbers = range(start, min(start + _BATCH, rows))
        columns = {
            "body": pa.array([source.randbytes(source.randint(100, 300)) for _ in numbers], pa.binary()),
            "tags": pa.array(["ABC"[i % 3] for i in numbers]),
            "keys": pa.array([f"k{i}" for i in numbers]),
            "properties": pa.array([[("colour", "blue")] for _ in numbers], pa.map_(pa.string(), pa.string())),
        }
        made.append(pa.RecordBatch.from_pydict(columns))
    return made


def encode(given: list[pa.RecordBatch]) -> int:
    encoder = Encoder(Rules(), app="bench", version=0, partition=0, topic=_TOPIC)
    return sum(len(piece.data) for batch in given for piece in encoder.encode(batch))


def by_rows(properties_of: Callable[[str, str, dict[str, str], str], dict[str, str]]) -> Callable[[Any], int]:
    """A loop that packs each row."""
    head = header_struct(8, 8)
    topic = bytes([len(_TOPIC)]) + _TOPIC.encode()

    def run(given: list[pa.RecordBatch]) -> int:
        done, number, now = 0, 0, time.time_ns() // 1_000_000
        for batch in given:
            columns = [column.to_pylist() for column in batch.columns]
            records = []
            for body, tag, key, others in zip(*columns, strict=True):
                stored = encode_properties(properties_of(tag, key, dict(others), f"01{number:032X}"))
                size = record_bytes(body_bytes=len(body), topic_bytes=len(_TOPIC), properties_bytes=len(stored))
                start = head.pack(
                    size, MAGIC_V1, 0, number % 8, 0, 0, 0, 0, now, LOCAL_HOST, 0, LOCAL_HOST, 0, 0, len(body)
                )
                records.append(b"".join((start, body, topic, len(stored).to_bytes(2, "big"), stored)))
                number += 1
            done += len(b"".join(records))
        return done

    return run


def _plain(tag: str, key: str, others: dict[str, str], unique: str) -> dict[str, str]:
    return {**others, "KEYS": key, "TAGS": tag, "UNIQ_KEY": unique}


SIDES: dict[str, Callable[[list[pa.RecordBatch]], int]] = {
    "encode": encode,
    "pack": by_rows(_plain),
    "checked": by_rows(user_properties),
}


def bench_encode(rows: int, rounds: int) -> None:
    given = batches(rows)
    sizes = {name: side(given) for name, side in SIDES.items()}
    size = sizes["encode"]
    assert {*sizes.values()} == {size}, "the sides made records of different sizes"
    best = measure({name: partial(side, given) for name, side in SIDES.items()}, rounds)
    print(f"\nencode: {rows:,} rows, {size / rows:.0f} bytes a record")
    for name, seconds in best.items():
        print(f"  {name:10} {rows / seconds / 1e6:6.2f} M/s {size / seconds / (1 << 20):7.0f} MiB/s")
    for name in ("pack", "checked"):
        print(f"  encode / {name}: {best[name] / best['encode']:.1f}")


def bench_write(rows: int, rounds: int) -> None:
    from pyspark.sql.datasource import DataSourceWriter

    from mqstore.spark import session
    from mqstore.spark.source import MQStoreDataSource

    class RowWriter(DataSourceWriter):
        """Takes rows one by one, and puts as many together as Spark does."""

        def __init__(self, writer: Any) -> None:
            self._writer = writer

        def write(self, iterator: Any) -> Any:
            return self._writer.write(self._batches(iterator))

        def _batches(self, rows: Any) -> Any:
            kinds = {name: pa.string() for name in ("body", "tags", "keys", "properties")}
            kinds |= {"body": pa.binary(), "properties": pa.map_(pa.string(), pa.string())}
            while chunk := list(islice(rows, _BATCH)):
                columns = {name: [row[name] for row in chunk] for name in kinds}
                columns["properties"] = [list(each.items()) for each in columns["properties"]]
                yield pa.RecordBatch.from_pydict(columns, pa.schema(kinds))

        def commit(self, messages: Any) -> None:
            self._writer.commit(messages)

        def abort(self, messages: Any) -> None:
            self._writer.abort(messages)

    class ByRows(MQStoreDataSource):
        @classmethod
        def name(cls) -> str:
            return "mqstore_rows"

        def writer(self, schema: Any, overwrite: bool) -> Any:
            return RowWriter(super().writer(schema, overwrite))

    spark = session("bench", {"spark.master": "local[2]", "spark.driver.memory": "2g", **SOCKETS})
    spark.dataSource.register(ByRows)
    with tempfile.TemporaryDirectory() as folder:
        parquet = f"{folder}/frame.parquet"
        spark.range(0, rows, 1, 2).selectExpr(
            "unhex(repeat(sha1(cast(id as string)), 5 + cast(id % 10 as int))) as body",
            "element_at(array('A', 'B', 'C'), cast(id % 3 as int) + 1) as tags",
            "concat('k', id) as keys",
            "map('colour', 'blue') as properties",
        ).write.parquet(parquet)
        frame = spark.read.parquet(parquet)
        target = Path(folder) / "target"

        def write(name: str) -> None:
            frame.write.format(name).mode("append").option("topic", _TOPIC).save(str(target))

        sides = {name: partial(write, name) for name in ("mqstore", "mqstore_rows")}
        best = measure(sides, rounds, tidy=lambda: shutil.rmtree(target))
        print(f"\nwrite: {rows:,} rows to a new store, local[2]")
        for name, seconds in best.items():
            print(f"  {name:14} {seconds:6.2f} s {rows / seconds / 1e6:6.2f} M/s")
        report("S8", "a write by Arrow, of the rate of one by rows", best["mqstore_rows"] / best["mqstore"], 1.8)
    spark.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--spark", action="store_true", help="the write inside Spark as well")
    given = parser.parse_args()
    bench_encode(given.rows, given.rounds)
    if given.spark:
        bench_write(given.rows, given.rounds)


if __name__ == "__main__":
    main()
