"""The dispatcher's short way for few records, and the reader's compiled way, do what the arrays do.

Both are switched off for the model, which is then the way that the rest of this folder tests.
"""

from __future__ import annotations

import errno
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore import Message, SimulatedClock
from mqstore.errors import FormatError, StoreFullError
from mqstore.files.descriptors import DescriptorCache
from mqstore.files.segmentwriter import SegmentWriter
from mqstore.layout.consumequeue import VOID_UNIT
from mqstore.layout.hosts import encode_host
from mqstore.layout.properties import encode_properties
from mqstore.log.consumequeue import QueueTable
from mqstore.log.index import Index
from mqstore.log.reading.reader import GetResult
from mqstore.log.store import MessageStore
from mqstore.log.writing import dispatcher as reput
from mqstore.log.writing.dispatcher import Dispatcher
from mqstore.native import kernel
from tests.faults import FaultyFileSystem
from tests.log.support import SEGMENT, Unsynced, files, flip_log, open_store, overwrite
from tests.records import encode_record

HOSTS = [encode_host("127.0.0.1:0"), encode_host("[::1]:9")]


@contextmanager
def arrays_only() -> Iterator[None]:
    """The way of many, for any number."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reput, "few", lambda *args: None)
        yield


# -- in -------------------------------------------------------------------------------------------------------------

Spec = tuple[str, int, int, dict[str, str], int, bytes]
SPECS = st.tuples(
    st.sampled_from(["t", "t", "u", "SCHEDULE_TOPIC_XXXX", "../bad"]),
    st.sampled_from([0, 0, 1, -1]),
    st.sampled_from([0, 1, 1, 2, 2, 3, 4, 9, 20]),
    st.dictionaries(st.sampled_from(["TAGS", "KEYS", "UNIQ_KEY", "DELAY"]), st.sampled_from(["1", "a b", "é"])),
    st.sampled_from([0, 0, 4, 8, 12]),
    st.sampled_from(HOSTS),
)
STEPS = st.lists(st.lists(SPECS, min_size=1, max_size=8), min_size=1, max_size=4)


def run_dispatcher(
    root: Path, steps: list[list[Spec]], damage: Sequence[tuple[int, int, int, int]], fail_at: int
) -> tuple[list[Any], dict[str, bytes]]:
    """One pass or more a step, over records laid into a segment as they are; what could be seen of it."""
    fs = FaultyFileSystem()
    clock = SimulatedClock(1_700_000_000_000)
    for name in ("commitlog", "consumequeue", "tmp"):
        (root / name).mkdir(parents=True)
    run = SegmentWriter(root / "commitlog", root / "tmp", SEGMENT * 4, fs=fs)
    mapping = run.mapping(run.create(0))
    descriptors = DescriptorCache(fs)
    queues = QueueTable(
        root / "consumequeue", root / "tmp", 160, fs=fs, descriptors=descriptors, file_mode=0o600,
        delay_table_ms=(1_000, 5_000),
    )  # fmt: skip
    index = Index(root / "index", root / "tmp", 4, 16, fs=fs, clock=clock, writable=True, file_mode=0o600)
    end = 0
    log: Any = SimpleNamespace(run=run)
    dispatcher = Dispatcher(log, queues, index, checksum="crc32c-record", end_of=lambda: end)
    seen: list[Any] = []
    dispatcher.listeners.append(lambda *grown: seen.append(grown))
    if fail_at:
        fs.fail("pwrite", errno.ENOSPC, nth=fail_at)
    for number, specs in enumerate(steps):
        starts = []
        for topic, queue_id, slot, properties, sys_flag, host in specs:
            data = encode_record(
                topic=topic, body=b"x", queue_id=queue_id, queue_offset=slot, physical_offset=end, sys_flag=sys_flag,
                born_timestamp_ms=1, store_timestamp_ms=1_700_000_000_000 + end, checksum="crc32c-record",
                properties=encode_properties(properties), born_host=host, store_host=host,
            )  # fmt: skip
            mapping[end : end + len(data)] = data
            starts.append(end)
            end += len(data)
        for step, which, at, value in damage:
            if step == number:
                mapping[starts[which % len(starts)] + at] = value
        try:
            dispatcher.run_once()
        except StoreFullError as error:
            seen.append(type(error))
            dispatcher.run_once()
        seen.append((dispatcher.position, dispatcher.dispatched, dispatcher.last_store_timestamp_ms))
        seen.append(sorted((q.topic, q.queue_id, q.min_offset, q.max_offset, q.next_offset) for q in queues))
    descriptors.close()
    for file in index.files:
        file.close()
    return seen, files(root)


@given(
    STEPS,
    # Not the queue offset: a great one is a great gap, which is filled.
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(0, 7),
            st.sampled_from([0, 2, 3, 4, 7, 8, 12, 15, 36, 39, 85, 87, 88, 89]),
            st.sampled_from([0, 0xFF]),
        ),
        max_size=2,
    ),
    st.sampled_from([0, 0, 1, 2, 3, 4]),
)
def test_few_records_are_dispatched_as_many_are(
    steps: list[list[Spec]], damage: list[tuple[int, int, int, int]], fail_at: int
) -> None:
    """Repeats, gaps, several queues at once, transactions, names that are no folder's, damage, and a disk that is full
    half-way: files, numbers, and what listeners hear, in this order."""
    with tempfile.TemporaryDirectory() as folder:
        with arrays_only():
            expected = run_dispatcher(Path(folder) / "many", steps, damage, fail_at)
        assert run_dispatcher(Path(folder) / "few", steps, damage, fail_at) == expected


# -- out ------------------------------------------------------------------------------------------------------------


def fill(path: Path) -> None:
    """Thirty messages of t/0 over several segments, some with tags, some of other queues between them."""
    with open_store(path, consumequeue_units=64) as store:
        for i in range(30):
            store.put("t", b"%d" % i * (i * 7), tag=("a", "b", None)[i % 3])
            store.put("other", b"x" * 40, queue_id=1)
            store.dispatch()


def body_of(message: Message) -> bytes | str:
    """The body, or why there is none: damage may have made it a compressed one, where checksums are not compared."""
    try:
        return message.body
    except FormatError as error:
        return str(error)


def told(result: GetResult) -> tuple[Any, ...]:
    messages = [
        (m.offset, m.physical_offset, m.tags_code, body_of(m), m.queue, m.size, m._record_bytes())
        for m in result.messages
    ]
    return result.status, messages, result.next_offset, result.min_offset, result.max_offset


def read_all(store: MessageStore, ask: Sequence[tuple[int, int, int | None, str]]) -> list[Any]:
    """Answers to some questions, and what the store then says of itself."""
    answers: list[Any] = [told(store.get("t", 0, o, n, max_bytes=size, tags=tags)) for o, n, size, tags in ask]
    stats = store.stats()
    return [*answers, stats.bad_records, stats.get_bytes, sorted(store.records.bad)]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("filled") / "s"
    fill(path)
    return {name: data for name, data in files(path).items() if not name.endswith("lock")}


def write(root: Path, image: dict[str, bytes]) -> Path:
    for name, data in image.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


UNITS = f"consumequeue/t/0/{0:020d}"
ASK = st.lists(
    st.tuples(
        st.integers(0, 31),
        st.integers(1, 9),
        st.sampled_from([None, None, None, 1, 300, 700, 4000]),
        st.sampled_from(["*", "*", "a", "a || b", "none"]),
    ),
    min_size=1,
    max_size=6,
)
HARM = st.lists(
    st.tuples(
        st.integers(0, 29),
        st.one_of(
            st.sampled_from([VOID_UNIT, bytes(20), struct.pack(">qiq", -1, 100, 0), struct.pack(">qiq", 0, -5, 0)]),
            st.sampled_from([struct.pack(">qiq", 1 << 50, 100, 0), struct.pack(">qiq", SEGMENT - 4, 100, 0)]),
            st.integers(0, 29),  # the unit of another message
            st.tuples(st.integers(0, 7), st.integers(1, 19)),  # a changed byte
        ),
    ),
    max_size=3,
)


@given(
    ASK,
    HARM,
    st.lists(st.tuples(st.integers(0, 29), st.integers(0, 120)), max_size=3),
    st.sampled_from(["r", "rw"]),
    st.booleans(),
)
def test_compiled_code_reads_what_arrays_do(
    filled: dict[str, bytes],
    ask: list[tuple[int, int, int | None, str]],
    harm: list[tuple[int, Any]],
    damage: list[tuple[int, int]],
    mode: Any,
    verify: bool,
) -> None:
    """Any offset, number, limit of bytes and tags, before and after units and records were changed behind the store's
    back (what verified once stays verified), by the writer and by another process."""
    ask = [*ask, *ask]
    results = []
    for only_arrays in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            root = write(Path(folder), filled)
            with open_store(root, mode, fs=Unsynced(), verify_reads=verify) as store:
                if only_arrays:
                    store.records.checker.kernel = None
                found = read_all(store, ask[:2])
                units = (root / UNITS).read_bytes()
                for slot, change in harm:
                    new = bytearray(units[slot * 20 : slot * 20 + 20])
                    if isinstance(change, bytes):
                        new[:] = change
                    elif isinstance(change, int):
                        new[:] = units[change * 20 : change * 20 + 20]
                    else:
                        new[change[1]] ^= 1 << change[0]
                    overwrite(root / UNITS, slot * 20, new)
                for slot, at in damage:
                    physical = struct.unpack_from(">q", units, slot * 20)[0]
                    flip_log(root, physical + at)
                found += read_all(store, ask)
            results.append(found)
    assert results[1] == results[0]


@pytest.mark.skipif(kernel is None, reason="without compiled parts all reads use arrays")
@pytest.mark.parametrize("count", [1, 2, 8])
def test_ordinary_messages_are_read_by_compiled_code(filled: dict[str, bytes], tmp_path: Path, count: int) -> None:
    with open_store(write(tmp_path, filled)) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(store.records.checker, "check", None)
        for offset in range(4):
            result = store.get("t", 0, offset, count)
            assert [m.offset for m in result.messages] == list(range(offset, offset + count))
            assert result.next_offset == offset + count
            assert [m.body for m in result.messages] == [b"%d" % i * (i * 7) for i in range(offset, offset + count)]


@pytest.mark.parametrize("verify", [True, False])
def test_a_unit_of_another_queue_is_not_believed(filled: dict[str, bytes], tmp_path: Path, verify: bool) -> None:
    """One of a topic whose name begins alike, with the same queue id and slot."""
    with open_store(write(tmp_path, filled), verify_reads=verify) as store:
        store.put("tt", b"other")
        ((physical, size, code),) = store.units("tt", 0, 0, 1).tolist()
        queue = store.queue_table.get("t", 0)
        assert queue is not None
        queue.write(0, struct.pack(">qiq", physical, size, code))
        assert [m.offset for m in store.get("t", 0, 0, 1).messages] == [1]
        assert store.stats().bad_records == 1


def test_without_verification_lengths_are_followed_all_the_same(filled: dict[str, bytes], tmp_path: Path) -> None:
    root = write(tmp_path, filled)
    flip_log(root, 84)  # the length of the first body: 16 MiB more
    with open_store(root, "r", verify_reads=False) as store:
        assert [m.offset for m in store.get("t", 0, 0, 1).messages] == [1]
        assert store.stats().bad_records == 1
