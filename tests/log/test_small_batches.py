"""The reader's compiled way gives what the arrays give, which the rest of this folder tests."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore import Message
from mqstore.errors import FormatError
from mqstore.layout.consumequeue import VOID_UNIT
from mqstore.log.reading.reader import GetResult
from mqstore.log.store import MessageStore
from mqstore.native import kernel
from tests.log.support import SEGMENT, Unsynced, files, flip_log, open_store, overwrite


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
            opened = open_store(root, mode, fs=Unsynced(), verify_reads=verify)
            with opened as store, pytest.MonkeyPatch.context() as patch:
                if only_arrays:
                    patch.setattr(store.records, "_read_units", None)
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
        patch.setattr(store.records, "check", None)
        for offset in range(4):
            result = store.get("t", 0, offset, count)
            assert [m.offset for m in result.messages] == list(range(offset, offset + count))
            assert result.next_offset == offset + count
            assert [m.body for m in result.messages] == [b"%d" % i * (i * 7) for i in range(offset, offset + count)]


def test_without_verification_lengths_are_followed_all_the_same(filled: dict[str, bytes], tmp_path: Path) -> None:
    root = write(tmp_path, filled)
    flip_log(root, 84)  # the length of the first body: 16 MiB more
    with open_store(root, "r", verify_reads=False) as store:
        assert [m.offset for m in store.get("t", 0, 0, 1).messages] == [1]
        assert store.stats().bad_records == 1
