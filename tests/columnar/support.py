"""Stores for the Spark room's tests: records as odd as the format allows, written byte by byte, and rows to compare."""

from __future__ import annotations

import datetime
import json
import shutil
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from hypothesis import strategies as st

from mqstore import SimulatedClock, StoreConfig
from mqstore.columnar.columns import ColumnReader
from mqstore.columnar.rows import Policy
from mqstore.jobs.options.options import SourceOptions
from mqstore.jobs.reading.plan import plan
from mqstore.jobs.reading.tasks import read_slices
from mqstore.layout.hosts import LOCAL_HOST, encode_host
from mqstore.layout.properties import encode_properties
from mqstore.layout.record import encode_blank
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.recovery.recover import RecoverOptions
from mqstore.log.store import MessageStore
from mqstore_tools.main import cli
from tests.records import encode_record

SEGMENT = 1 << 14
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True)
class Odd:
    """A record as a test wants it; `properties` are raw bytes."""

    topic: str = "t"
    queue_id: int = 0
    body: bytes = b"x"
    properties: bytes = b""
    flag: int = 0
    sys_flag: int = 0
    born_ms: int = 1_700_000_000_000
    store_ms: int = 1_700_000_000_001
    born_host: bytes = LOCAL_HOST
    store_host: bytes = LOCAL_HOST
    reconsume_times: int = 0
    prepared_offset: int = 0


def write_store(path: Path, records: Sequence[Odd], profile: str = "mqstore", segment_bytes: int = SEGMENT) -> Path:
    """A store of these records in this order; its queues are what recovery makes of them."""
    config = StoreConfig(segment_bytes=segment_bytes, consumequeue_units=64, index_slots=16, index_entries=64)
    with MessageStore(path, profile=profile, config=config) as store:  # type: ignore[arg-type]
        checksum = store.manifest.checksum
        size = store.manifest.commitlog_segment_bytes
        store.put("seed", b"")  # makes the first segment
        start = store.max_offset
    log = bytearray((path / "commitlog" / f"{0:020d}").read_bytes()[:start])
    slots: Counter[tuple[str, int]] = Counter()
    for odd in records:
        key = (odd.topic, odd.queue_id)
        listed = odd.sys_flag & 0xC in (0, 8) and odd.queue_id >= 0 and "/" not in odd.topic

        def encoded(position: int, odd: Odd = odd, slot: int = slots[key] if listed else 0) -> bytes:
            return encode_record(
                topic=odd.topic,
                body=odd.body,
                queue_id=odd.queue_id,
                queue_offset=slot,
                physical_offset=position,
                born_timestamp_ms=odd.born_ms,
                store_timestamp_ms=odd.store_ms,
                checksum=checksum,
                properties=odd.properties,
                flag=odd.flag,
                sys_flag=odd.sys_flag,
                born_host=odd.born_host,
                store_host=odd.store_host,
                reconsume_times=odd.reconsume_times,
                prepared_transaction_offset=odd.prepared_offset,
            )

        left = size - len(log) % size
        if len(encoded(0)) + 8 > left:
            log += encode_blank(left)
            log += bytes(left - 8)
        log += encoded(len(log))
        slots[key] += listed
    log += bytes(-len(log) % size)
    for at in range(0, len(log), size):
        (path / "commitlog" / f"{at:020d}").write_bytes(log[at : at + size])
    with MessageStore(path, recover_options=RecoverOptions(full=True)) as store:
        assert sum(store.offsets(*ref)[1] for t in store.topics() for ref in store.queues(t)) == slots.total() + 1
    return path


def crashed_store(path: Path, listed: int, unlisted: int) -> Path:
    """A store as kill -9 leaves it: so many messages of `orders`, by turns in two queues, and then so many more that
    no queue has heard of."""
    config = StoreConfig(segment_bytes=1 << 16, clock=SimulatedClock())  # with that, nothing happens by itself
    with MessageStore(path.with_name(path.name + "-alive"), config=config) as store:
        for i in range(listed + unlisted):
            store.put("orders", b"%d" % i, queue_id=i % 2)
            if i == listed - 1:
                store.dispatch()
        shutil.copytree(store.path, path)
    return path


_NAMES = st.sampled_from(["TAGS", "KEYS", "UNIQ_KEY", "colour", "TAG", "KEYSX", "ä", "WAIT", "__SHARDINGKEY", "DELAY"])
_VALUES = st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), min_size=1, max_size=12)
_PIECES = st.one_of(
    st.tuples(_NAMES, _VALUES).map(lambda pair: f"{pair[0]}\x01{pair[1]}".encode()),
    st.binary(max_size=8),  # not UTF-8, no separator, too many, nothing
    st.sampled_from([b"TAGS\x01", b"\x01v", b"TAGS\x01a\x01b", b"TAGS\x01\xff\xfe", b"\xffn\x01v", b"\xfen\x01w"]),
)
_PROPERTIES = st.builds(
    lambda pieces, closed: b"\x02".join(pieces) + (b"\x02" if closed and pieces else b""),
    st.lists(_PIECES, max_size=5),
    st.booleans(),
)
_HOSTS = st.sampled_from([LOCAL_HOST, encode_host("10.0.0.7:10911"), encode_host("[2001:db8::7]:9"), bytes(20)])
_TIMES = st.one_of(
    st.integers(1_600_000_000_000, 1_800_000_000_000),
    st.sampled_from([0, -1, -62_135_596_800_000, 253_402_300_799_999, 253_402_300_800_000, (1 << 63) - 1, -(1 << 63)]),
)
_BODIES = st.one_of(
    st.tuples(st.binary(max_size=40), st.sampled_from([0, 0x300, 0x008])),
    st.tuples(st.binary(max_size=60).map(zlib.compress), st.sampled_from([0x301, 0x001, 0x309])),
    st.tuples(st.just(b"y"), st.sampled_from([0x004, 0x00C])),  # prepared, rolled back: in no queue
)


@st.composite
def odd_records(draw: st.DrawFn) -> Odd:
    body, sys_flag = draw(_BODIES)
    return Odd(
        topic=draw(st.sampled_from(["t", "t", "orders", "%RETRY%g", "x" * 200])),
        queue_id=draw(st.integers(0, 2)),
        body=body,
        properties=draw(_PROPERTIES),
        flag=draw(st.integers(-(1 << 31), (1 << 31) - 1)),
        sys_flag=sys_flag,
        born_ms=draw(_TIMES),
        store_ms=draw(st.integers(1_600_000_000_000, 1_800_000_000_000)),
        born_host=draw(_HOSTS),
        store_host=draw(_HOSTS),
        reconsume_times=draw(st.integers(0, 20)),
        prepared_offset=draw(st.integers(0, 1 << 40)) if sys_flag & 0x008 else 0,
    )


def many(count: int) -> list[Odd]:
    """Ordinary messages of two topics with two queues each."""
    return [
        Odd(
            topic=("t", "orders")[i % 2],
            queue_id=i // 2 % 2,
            body=b"%06d" % i * (1 + i % 7),
            properties=encode_properties({"TAGS": "abc"[i % 3], "KEYS": f"k{i}", "n": str(i)}),
            store_ms=1_700_000_000_000 + i,
        )
        for i in range(count)
    ]


# -- rows --------------------------------------------------------------------------------------------------------------


def instant(ms: int) -> datetime.datetime | None:
    if not -62_135_596_800_000 <= ms <= 253_402_300_799_999:
        return None
    return _EPOCH + datetime.timedelta(milliseconds=ms)


def exported(path: Path) -> list[dict[str, Any]]:
    """What `mqstore export` writes of a store, queue by queue; bodies stay base64."""
    result = CliRunner().invoke(cli, ["export", str(path)])
    assert result.exit_code == 0, result.stderr
    return sorted((json.loads(line) for line in result.stdout.splitlines()), key=queue_order)


def queue_order(row: dict[str, Any]) -> tuple[str, int, int]:
    """Key to sort messages queue by queue."""
    return row["topic"], row["queue_id"], row["queue_offset"]


EXPORTED_AS = {"born_timestamp": "born_timestamp_ms", "store_timestamp": "store_timestamp_ms"}
NOT_EXPORTED = ("store", "body_crc", "tags_code", "error")


def as_exported(row: dict[str, Any]) -> dict[str, Any]:
    """A row of ours, without what an export lacks, times as instants in both."""
    return {name: value for name, value in row.items() if name not in NOT_EXPORTED}


def as_row(line: dict[str, Any]) -> dict[str, Any]:
    """A line of an export under our names and types."""
    import base64

    row = {name: value for name, value in line.items() if name != "prepared_transaction_offset"}
    row["body"] = base64.b64decode(row["body"])
    for ours, theirs in EXPORTED_AS.items():
        row[ours] = instant(row.pop(theirs))
    return row


def rows_of(batches: Iterable[Any]) -> list[dict[str, Any]]:
    """Rows of record batches, properties as dicts. Fails where a map has a name twice."""
    rows: list[dict[str, Any]] = []
    for batch in batches:
        batch.validate(full=True)
        for row in batch.to_pylist():
            if row.get("properties") is not None:
                pairs = row["properties"]
                row["properties"] = dict(pairs)
                assert len(row["properties"]) == len(pairs)
            rows.append(row)
    return rows


def read_all(
    path: Path, columns: Sequence[str] | None = None, *, policy: Policy | None = None, **options: Any
) -> list[Any]:
    """Batches of all queues, in the order of an export."""
    batches: list[Any] = []
    with ReadOnlyMessageStore(path) as store:
        reader = ColumnReader(store, columns, policy=policy, **options)
        for topic in store.topics():
            for ref in store.queues(topic):
                batches += reader.queue(*ref, *store.offsets(*ref))
    return batches


def by_log(
    path: Path, cuts: list[int], columns: Sequence[str] | None = None, policy: Policy | None = None, **options: Any
) -> list[Any]:
    """All of the log, read in ranges that are cut at these positions."""
    with ReadOnlyMessageStore(path) as store:
        reader = ColumnReader(store, columns, policy=policy, **options)
        end = log_end(store)
        edges = [0, *sorted({cut % (end + 1) for cut in cuts}), end]
        return [batch for low, high in pairwise(edges) for batch in reader.log(low, high)]


def log_end(store: MessageStore) -> int:
    """Behind the last record that a queue lists."""
    end = 0
    for topic in store.topics():
        for ref in store.queues(topic):
            low, high = store.offsets(*ref)
            for physical, size, _ in store.units(*ref, low, high - low).tolist():
                end = max(end, physical + size)
    return end


def java_at(path: Path, text: str = "#!/bin/sh\n") -> Path:
    """A program that may be taken for Java."""
    path.parent.mkdir(parents=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def query(path: Path, **options: str) -> list[dict[str, Any]]:
    """Rows of four columns, planned and read as a query does it."""
    given = SourceOptions.parse({"path": str(path), **options})
    names = ("topic", "queue_id", "queue_offset", "body")
    return rows_of(batch for slices in plan(given) for batch in read_slices(given, names, "binary", slices))
