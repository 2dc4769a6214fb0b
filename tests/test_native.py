"""The compiled parts: what they are built from, that they refuse bad arguments, and that a put writes the same bytes.

What their functions give is tested where the Python ones are: `make test` runs the tests of layout and log twice, with
and without them.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import os
import re
import resource
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mqstore
from mqstore import Message, SimulatedClock, StoreConfig, native
from mqstore.errors import StoreIOError
from mqstore.layout.arrays.scan import Headers, read_run
from mqstore.layout.properties import decode_properties
from mqstore.layout.record import Checksum
from mqstore.log.message import UnitBatch
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.reading.records import Request
from mqstore.log.store import MessageStore
from mqstore.log.writing.outgoing import SLOTS
from tests.faults import FaultyFileSystem
from tests.records import encode_record
from tests.scarce import limited
from tests.without import append_compiled, compiled, read_by_compiled_put, tip_put

ROOT = Path(__file__).resolve().parents[1]
kernel: Any = native.kernel


def run_python(code: str, **environment: str) -> str:
    """The output of a fresh interpreter that sees this one's packages."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path), **environment}, text=True,
        capture_output=True, check=True,
    )  # fmt: skip
    return done.stdout


@compiled
def test_the_module_was_built_from_the_sources_that_are_here() -> None:
    """An edit of store/native without `make` would be tested by no test."""
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)

    assert hook.sources_crc32(ROOT / "store" / "native") == kernel.SOURCES


def test_the_environment_leaves_them_out() -> None:
    code = "from mqstore import native; print(native.kernel, native.why_not)"
    assert run_python(code, MQSTORE_NATIVE="0").strip() == "None MQSTORE_NATIVE=0"


@pytest.mark.parametrize(("wanted", "status"), [("require", 1), ("", 0)])
def test_the_environment_requires_them(wanted: str, status: int) -> None:
    code = "import sys; sys.modules['mqstore._native'] = None; import mqstore.native"
    environment = {"PYTHONPATH": ":".join(sys.path), "MQSTORE_NATIVE": wanted}
    done = subprocess.run([sys.executable, "-c", code], env=environment, text=True, capture_output=True, check=False)
    assert (done.returncode, "ModuleNotFoundError: import of mqstore._native" in done.stderr) == (status, bool(status))


def test_wheels_are_built_for_every_python_that_is_named() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named = re.findall(r"Python :: 3\.(\d+)'", str(settings["project"]["classifiers"]))
    assert re.findall(r"cp3(\d+)-", settings["tool"]["cibuildwheel"]["build"]) == named


def test_a_module_of_another_version_is_not_used() -> None:
    code = """
import sys, types
sys.modules["mqstore._native"] = types.SimpleNamespace(VERSION=0)
from mqstore import native
print(native.kernel, native.why_not)
"""
    told = r"None mqstore\._native has version 0, expected [1-9]\d*; reinstall mqstore"
    assert re.fullmatch(told, run_python(code).strip())


# --- checksums of every length and place ---


@compiled
@pytest.mark.parametrize("by_table", [False, True])
@pytest.mark.parametrize(("checksum", "covered"), [("crc32c-record", 12), ("crc32-body", 88)])
@given(st.lists(st.integers(0, 2500), min_size=1, max_size=4), st.integers(0, 64), st.randoms(use_true_random=False))
def test_checksums_of_records_are_those_of_the_package(
    checksum: Checksum, covered: int, by_table: bool, sizes: list[int], gap: int, random: Any
) -> None:
    """Three strands, three records at once, eight or sixteen bytes at a time, the rest: at all lengths and places."""
    log, starts = bytearray(gap), []
    for size in sizes:
        starts.append(len(log))
        log += encode_record(
            topic="t", body=random.randbytes(size), queue_id=0, queue_offset=0, physical_offset=len(log),
            born_timestamp_ms=0, store_timestamp_ms=0, checksum=checksum,
        )  # fmt: skip
    damaged = random.choice([*range(len(sizes)), None])
    if damaged is not None and (sizes[damaged] or checksum == "crc32c-record"):
        begin = starts[damaged] + covered
        end = begin + sizes[damaged] if checksum == "crc32-body" else [*starts, len(log)][damaged + 1]
        log[random.randrange(begin, end)] ^= 1 << random.randrange(8)
    else:
        damaged = None

    assert kernel.crc32c_by_table(by_table) or not by_table
    try:
        headers, _, _ = read_run(log, gap, len(log), 0, checksum, 100)
    finally:
        kernel.crc32c_by_table(False)
    assert headers.positions.tolist() == starts[:damaged]


# --- bad arguments: an error, never a look outside the buffer ---

_ONE = np.zeros(1, np.int64)
_FAR = np.array([1 << 62], np.int64)
_BEFORE = np.array([-1], np.int64)
_OUT = np.zeros(1, np.bool_)
_END = np.zeros(1, np.int64)
_BUFFER = bytes(200)
_UNITS = (_BUFFER, _ONE, _ONE, _ONE)
_OTHER_SLOT = kernel and kernel.LogTail.end


@compiled
@pytest.mark.parametrize(
    ("function", "arguments", "error"),
    [
        ("walk", (_BUFFER, 0, 201, 1), ValueError),
        ("walk", (_BUFFER, -1, 100, 1), ValueError),
        ("walk", (_BUFFER, 101, 100, 1), ValueError),
        ("walk", (_BUFFER, 0, 1 << 70, 1), OverflowError),
        ("walk", (_BUFFER, 0, 100), TypeError),
        ("walk", ("text", 0, 100, 1), TypeError),
        ("join", (_BUFFER, _ONE, np.array([201]), bytearray(201)), IndexError),
        ("join", (_BUFFER, np.array([200]), np.array([1]), bytearray(1)), IndexError),
        ("join", (_BUFFER, _ONE, _BEFORE, bytearray(1)), IndexError),
        ("join", (_BUFFER, _FAR, np.array([1]), bytearray(1)), IndexError),
        ("join", (_BUFFER, _ONE, _FAR, bytearray(1)), IndexError),
        ("join", (_BUFFER, _ONE, np.array([2]), bytearray(1)), IndexError),
        ("join", (_BUFFER, _ONE, np.array([1]), bytearray(2)), ValueError),
        ("join", (_BUFFER, _ONE, np.zeros(2, np.int64), bytearray(2)), ValueError),
        ("measure", (_BUFFER, _FAR, _OUT, np.zeros((6, 1), np.int64)), ValueError),
        ("measure", (_BUFFER, np.array([110]), _OUT, np.zeros((6, 1), np.int64)), ValueError),
        ("measure", (_BUFFER, _ONE, _OUT, np.zeros((5, 1), np.int64)), ValueError),
        ("encode", (bytes(88), 88, [b"a"], [], None, None, 0, True), ValueError),
        ("encode", (bytes(88), 88, [b"a"], b"", [], None, 0, True), ValueError),
        ("encode", (bytes(176), 88, [b"a"], b"", None, None, 0, True), ValueError),
        ("encode", (bytes(8), 8, [b"a"], b"", None, None, 0, True), ValueError),
        ("encode", (bytes(888), 888, [b"a"], b"", None, None, 0, True), ValueError),
        ("encode", (bytes(88), -88, [b"a"], b"", None, None, 0, True), ValueError),
        ("encode", (bytes(88), 88, ["a"], b"", None, None, 0, True), TypeError),
        ("encode", (bytes(88), 88, (b"a",), b"", None, None, 0, True), TypeError),
        ("encode", (bytes(88), 88, [b"a"], b"", None, "0", 0, True), TypeError),
        ("renumber", (bytearray(200), _FAR, _ONE, _ONE, 0), IndexError),
        ("renumber", (bytearray(200), _ONE, _ONE, _ONE, 0), IndexError),
        ("renumber", (bytearray(b"\x7f" * 200), _ONE, _ONE, _ONE, 0), IndexError),
        ("renumber", (bytearray(200), np.array([110]), _ONE, _ONE, 0), IndexError),
        ("renumber", (bytearray(200), _ONE, np.zeros(2, np.int64), _ONE, 0), ValueError),
        ("renumber", (bytearray(200), _ONE, _ONE, _ONE, 1 << 70), OverflowError),
        ("renumber", (_BUFFER, _ONE, _ONE, _ONE, 0), BufferError),
        ("put_entries", (bytes(84), 1, 1, _ONE, _ONE, _ONE), BufferError),
        ("put_entries", (bytearray(83), 1, 1, _ONE, _ONE, _ONE), ValueError),
        ("put_entries", (bytearray(84), 0, 1, _ONE, _ONE, _ONE), ValueError),
        ("put_entries", (bytearray(84), 1 << 62, 1, _ONE, _ONE, _ONE), ValueError),
        ("put_entries", (bytearray(84), 1, 0, _ONE, _ONE, _ONE), ValueError),
        ("put_entries", (bytearray(84), 1, 1 << 62, _ONE, _ONE, _ONE), ValueError),
        ("put_entries", (bytearray(84), 1, 1, _ONE, _ONE, np.zeros(2, np.int64)), ValueError),
        ("put_entries", (bytearray(84), 1, 1, _BEFORE, _ONE, _ONE), ValueError),
        ("record_holds", (_BUFFER, 0, 200), TypeError),
        ("tagged", ((), set()), TypeError),
        ("tagged", ([], ("a",)), TypeError),
        ("tagged", ([None], {"a"}), TypeError),
        ("read_units", (int, None, _BUFFER, 0, bytes(20), 0, 0, None, 1, 0, b"t", -1), TypeError),
        ("check_units", (*_UNITS, np.zeros(2, np.int64), 0, b"t", _OUT, _END, None, None, True), ValueError),
        ("check_units", (*_UNITS, _ONE, 0, b"t", _OUT, np.zeros(2, np.int64), None, None, True), ValueError),
        ("check_units", (*_UNITS, _ONE, 0, b"t", _OUT, _END, b"x", None, True), BufferError),
        ("check_units", (*_UNITS, _ONE, 0, b"t", _OUT, _END, None, np.zeros(5, np.int64), True), ValueError),
        ("check_units", (*_UNITS, _ONE, 0, b"t", _OUT), TypeError),
        ("lengths", ((b"a",),), TypeError),
        ("read_at", (_ONE, _ONE), TypeError),
        ("read_at", (_ONE, np.zeros(2, np.int64), _ONE), ValueError),
        ("read_at", (_ONE, _ONE, _ONE - 1), ValueError),
        ("read_at", (np.zeros(2, np.int64), np.zeros(2, np.int64), np.full(2, 2**62)), (ValueError, MemoryError)),
        ("pairs", (b"a\1b\2", b"1234567"), ValueError),
        ("pairs", ("a", b""), TypeError),
        ("encode", (bytes(87), 87, [b"a"], b"", None, 0, 0, True), ValueError),
        ("encode", (bytes(88), 88, [b"a"], b"", ["1"], 0, 0, True), TypeError),
        ("encode", (bytes(88), 88, [b"a"], b"", [1 << 70], 0, 0, True), OverflowError),
        ("encode", (bytes(88), 88, [b"a"], b"", None, 1 << 70, 0, True), OverflowError),
        ("copy_parts", ([], 0, {}, 0, 0, [], [], []), TypeError),
        ("copy_parts", ((), 0, {}, 0, 0, [], [], [], []), TypeError),
        ("copy_parts", ([], 0, b"", 0, 0, [], [], [], []), TypeError),
        ("copy_parts", ([], 0, {}, 0, 0, [], [], (), []), TypeError),
        ("copy_parts", ([], -1, {}, 0, 0, [], [], [], []), ValueError),
        ("copy_parts", ([], 0, {}, -1, 0, [], [], [], []), ValueError),
        ("copy_parts", ([], 0, {}, 0, 1 << 70, [], [], [], []), OverflowError),
        ("restore", ([], 0, b"m", {}, ()), TypeError),
        ("restore", ((), 0, b"m", {}, (), []), TypeError),
        ("restore", ([], 0, b"", {}, (), []), TypeError),
        ("restore", ([], 0, b"m", {}, ("n",), []), TypeError),
        ("restore", ([], 0, b"m", [], (), []), TypeError),
        ("restore", ([], -1, b"m", {}, (), []), ValueError),
        ("restore", ([], "0", b"m", {}, (), []), TypeError),
        ("identify", ([], (b"n",)), TypeError),
        ("identify", ((), (b"n",), b"o"), TypeError),
        ("identify", ([], (1,), b"o"), TypeError),
        ("identify", ([], b"n", b"o"), TypeError),
        ("message_parts", ([], 0, "t", b"\0\0", SLOTS, frozenset(), [], [], []), TypeError),
        ("message_parts", ((), 0, "t", b"\0\0", SLOTS, frozenset(), [], [], [], {}), TypeError),
        ("message_parts", ([], -1, "t", b"\0\0", SLOTS, frozenset(), [], [], [], {}), (TypeError, ValueError)),
        ("message_parts", ([], "0", "t", b"\0\0", SLOTS, frozenset(), [], [], [], {}), TypeError),
        ("message_parts", ([], 0, b"t", b"\0\0", SLOTS, frozenset(), [], [], [], {}), TypeError),
        ("message_parts", ([], 0, "t", b"\0", SLOTS, frozenset(), [], [], [], {}), TypeError),
        ("message_parts", ([], 0, "t", b"\0\0", SLOTS[:6], frozenset(), [], [], [], {}), TypeError),
        ("message_parts", ([], 0, "t", b"\0\0", list(SLOTS), frozenset(), [], [], [], {}), TypeError),
        ("message_parts", ([], 0, "t", b"\0\0", (*SLOTS, "body"), frozenset(), [], [], [], {}), TypeError),
        ("message_parts", ([], 0, "t", b"\0\0", (*SLOTS, _OTHER_SLOT), frozenset(), [], [], [], {}), TypeError),
        ("message_parts", ([], 0, "t", b"\0\0", SLOTS, set(), [], [], [], {}), TypeError),
        ("message_parts", ([], 0, "t", b"\0\0", SLOTS, frozenset(), [], (), [], {}), TypeError),
        ("message_parts", ([], 0, "t", b"\0\0", SLOTS, frozenset(), [], [], [], []), TypeError),
    ],
)
def test_bad_arguments_are_refused(function: str, arguments: tuple[Any, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        getattr(kernel, function)(*arguments)


@compiled
@given(st.binary(max_size=300), st.lists(st.integers(-(2**63), 2**63 - 1), min_size=4, max_size=4), st.integers(0, 3))
def test_units_and_records_of_any_bytes_are_not_changed(data: bytes, numbers: list[int], zeros: int) -> None:
    for i in range(zeros):
        numbers[i] = 0
    start, physical, size, slot = (np.array([n], np.int64) for n in numbers)
    out, end = np.ones(1, np.bool_), np.zeros(1, np.int64)

    copied = kernel.check_units(
        data, start, physical, size, slot, 0, b"t", out, end, bytearray(300), None, sum(numbers) % 2
    )
    assert (copied, bool(out[0]), int(end[0])) == (-1, False, -1)
    assert kernel.record_holds(data, numbers[0], numbers[1], numbers[2]) == 0


@compiled
@pytest.mark.parametrize("checksums", [True, False])
def test_without_checksums_all_else_is_still_compared(checksums: bool) -> None:
    record = encode_record(
        topic="t", body=b"body", queue_id=1, queue_offset=2, physical_offset=3, properties=b"a\1b\2",
        born_timestamp_ms=0, store_timestamp_ms=0, checksum="crc32c-record",
    )  # fmt: skip
    sound, told = set(), []
    for at in range(len(record)):
        bad = bytearray(record)
        bad[at] ^= 0x40
        out, end = np.ones(1, np.bool_), np.zeros(1, np.int64)
        table = np.full((6, 1), -1)
        units = (_ONE, _ONE + 3, np.array([len(record)]), _ONE + 2)
        copied = kernel.check_units(bytes(bad), *units, 1, b"t", out, end, bytearray(9), table, checksums)
        if not out[0]:
            assert (table == -1).all()
        else:
            headers = Headers(bytes(bad), [0])
            parts = ("body", "topic", "properties")
            columns = [getattr(headers, f"{part}_{what}") for part in parts for what in ("position", "size")]
            assert table[:, 0].tolist() == [int(column[0]) for column in columns]
            sound.add(at)
            told.append(copied)
    # Size, magic, own numbers, host flags, lengths and topic are held against the unit and each other.
    compared = {*range(8), *range(12, 16), *range(20, 36), *range(84, 88), 92, 93, 94, 95}
    assert not sound & compared
    assert sound == (set() if checksums else {*range(len(record))} - compared)
    assert set(told) <= {4, -1}


@compiled
def test_bytes_are_read_wherever_they_lie(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    (tmp_path / "b").write_bytes(b"abcdefghij")
    with open(tmp_path / "a", "rb") as a, open(tmp_path / "b", "rb") as b:

        def read(*places: tuple[Any, int, int]) -> bytes | None:
            files, positions, sizes = zip(*places, strict=True)
            fds = np.array([getattr(file, "fileno", lambda: 10**6)() for file in files])
            found: bytes | None = kernel.read_at(fds, np.array(positions), np.array(sizes))
            return found

        assert read((a, 3, 2), (b, 0, 10), (a, 0, 1), (a, 10, 0)) == b"34abcdefghij0"
        assert read((a, 3, 2), (b, 5, 6)) is None  # it ends before
        assert read((a, 3, 2), (None, 0, 1)) is None  # no such descriptor


@compiled
@pytest.mark.parametrize("limit", [-(2**63), 1 - 2**63, -1, 0, 90])
def test_nothing_is_read_where_the_limit_leaves_no_room(limit: int) -> None:
    """Once a limit far below zero wrapped round and let everything through."""
    assert kernel.record_holds(bytes(300), 0, limit, 0) == 0
    assert kernel.record_holds(bytes(300), 2**62, limit, 0) == 0


@compiled
@pytest.mark.parametrize("room", [0, 9, 10, 11])
def test_bodies_are_copied_as_far_as_there_is_room(room: int) -> None:
    data, starts = b"", []
    for i, body in enumerate((b"01234", b"", b"56789")):
        starts.append(len(data))
        data += encode_record(
            topic="t", body=body, queue_id=0, queue_offset=i, physical_offset=len(data),
            born_timestamp_ms=0, store_timestamp_ms=0, checksum="crc32c-record",
        )  # fmt: skip
    at = np.array(starts)
    sizes = np.diff([*starts, len(data)])
    out, ends, bodies = np.zeros(3, np.bool_), np.zeros(3, np.int64), bytearray(b"." * (room + 1))
    copied = kernel.check_units(
        data, at, at, sizes, np.arange(3), 0, b"t", out, ends, memoryview(bodies)[:room], None, True
    )
    assert out.all()
    assert copied == (10 if room >= 10 else -1)
    assert bodies == (b"0123456789" if room >= 10 else b"01234" if room else b"").ljust(room + 1, b".")


@compiled
def test_read_releases_the_interpreter_between_parts(tmp_path: Path) -> None:
    """And goes on where it stopped."""
    with MessageStore(tmp_path, config=StoreConfig(clock=SimulatedClock())) as store:
        bodies = [bytes([i]) * (1 << 20) for i in range(12)]
        store.put_many("t", bodies)
        store.put_many("t", [b"%d" % i for i in range(9000)])
        first = store.records.views(Request(store.queue_named("t", 0, 12), 0, 12, None, 12, None, True, True))
        assert (len(first[0]), first[1:]) == (4, (4, False))
        assert [message.body for message in store.read("t", 0, 0, 12)] == bodies
        assert [message.offset for message in store.read("t", 0, 0, 9012)] == list(range(9012))
        assert len(store.read("t", 0, 0, 12, max_bytes=sys.maxsize)) == 12
        assert len(store.read("t", 0, 0, 12, max_bytes=1 << 100)) == 12
        assert len(store.read("t", 0, 0, 12, max_bytes=(2 << 20) + 1000)) == 2
        assert len(store.read("t", 0, 0, 12, max_bytes=0)) == 1


@compiled
def test_receipts_and_messages_are_values(tmp_path: Path) -> None:
    with MessageStore(tmp_path, config=StoreConfig(clock=SimulatedClock())) as store:
        receipt = store.put("t", b"a")
        assert hash(receipt) == hash(tuple(receipt))
        message = store.read("t")[0]
        assert copy.copy(message) == message


@compiled
@pytest.mark.parametrize(
    "copy", [None, (), (1, 2, 3), ("message", "to", 0, b""), (kernel and kernel.Located, "to", 0, b"")]
)
def test_odd_copy_is_left_to_python(copy: Any) -> None:
    lists: tuple[list[Any], ...] = [], [], [], []
    assert kernel.copy_parts([copy], 0, {"to": {0: None}}, 88, 1000, *lists) == (0, 1000)
    assert kernel.copy_parts([], 5, {}, 88, 1000, *lists) == (0, 1000)
    assert lists == ([], [], [], [])
    assert kernel.identify([copy], (b"n",), b"o") == []
    assert kernel.restore([copy], 0, b"m", {}, (), []) == 0


@compiled
def test_queues_and_ways_that_are_odd_are_left_to_python(tmp_path: Path) -> None:
    text, short = kernel.QueueTail(), kernel.QueueTail()
    text.plain_tail, short.plain_tail = "", b"1"
    with MessageStore(tmp_path / "s") as store:
        store.put("t", b"body", 0, tag="a")
        message = store.read("t", 0, 0, 1)[0]
        for putters in ({}, {"to": 1}, {"to": {}}, *({"to": {0: odd}} for odd in (object(), text, short))):
            lists: tuple[list[Any], ...] = [], [], [], []
            assert kernel.copy_parts([(message, "to", 0, b"")], 0, putters, 88, 1000, *lists) == (0, 1000)
            assert lists == ([], [], [], [])
        for topic, queue_id in (([], 0), ("to", []), ("to", "0"), (b"to", 0)):
            assert kernel.copy_parts([(message, topic, queue_id, b"")], 0, {"to": {0: 1}}, 88, 1, [], [], [], []) == (
                0,
                1,
            )
        for way in (1, ("to", 0), ("to", 0, "end")):
            assert kernel.restore([message], 0, b"m", {message._encoded_properties: way}, (), []) == 0
        copies: list[Any] = []
        assert kernel.restore([message], 0, b"\2m", {message._encoded_properties: ("to", 3, b"end")}, (), copies) == 1
        assert copies == [(message, "to", 3, b"end")]


# --- a put ---


@compiled
def test_a_put_that_syncs_is_written_by_a_call_and_a_long_one_by_python(tmp_path: Path) -> None:
    with MessageStore(tmp_path, durability="flush") as store:
        store.put("t", b"a")
        assert append_compiled(store, "t", b"b").offset == 1
        assert append_compiled(store, "t", bytes(1 << 14)) is None
        store.put("t", bytes(1 << 14))
        assert [len(message.body) for message in store.read("t")] == [1, 1, 1 << 14]
    fs = FaultyFileSystem()
    with MessageStore(tmp_path, durability="flush", fs=fs) as store:
        store.put("t", b"c")
        assert append_compiled(store, "t", b"d") is None, "this file system is to see what is written"


@compiled
@pytest.mark.parametrize("written", [0, 50])
def test_a_call_that_fails_is_made_again_by_python_which_says_why(tmp_path: Path, written: int) -> None:
    with MessageStore(tmp_path, durability="flush") as store:
        receipt = store.put("t", b"a")
        end = receipt.physical_offset + receipt.size
        with limited(resource.RLIMIT_FSIZE, end + written), pytest.raises(StoreIOError, match="File too large"):
            store.put("t", b"b" * 100)
        assert (store.max_offset, store.offsets("t")) == (end, (0, 1))
        with open(os.devnull, "rb") as unwritable, read_by_compiled_put(store, "fd", unwritable.fileno()):
            assert store.put("t", b"c").offset == 1
        assert store.put("t", b"d").offset == 2
    with ReadOnlyMessageStore(tmp_path) as store:
        assert [message.body for message in store.read("t")] == [b"a", b"c", b"d"]
        assert list(store.verify()) == []


@compiled
def test_an_error_of_the_clock_in_a_put_leaves_the_log_free(tmp_path: Path) -> None:
    with MessageStore(tmp_path, config=StoreConfig(clock=SimulatedClock())) as store:
        store.put("t", b"a")

        def fail() -> int:
            raise KeyboardInterrupt

        with read_by_compiled_put(store, "now_ns", fail), pytest.raises(KeyboardInterrupt):
            store.put("t", b"b")
        store.wakeups.log.hold()  # which is refused who has it
        store.wakeups.log.release()
        assert store.put("t", b"c").offset == 1
        assert [message.body for message in store.read("t")] == [b"a", b"c"]


_NAMES = ["A", "AB", "订"]


@given(
    st.lists(
        st.sampled_from(
            [
                *[b"A\1v\2", b"A\1w\2", b"A\1\2", b"A\2", b"AB\1\xff\2", b"\xe4", b"A", b"\1", "订\1单\2".encode()],
                *[b"TAGS\1t\2", b"__SHARDINGKEY\1g\2", b"KEYS\1one\2", b"KEYS\1 \2"],
                b"KEYS\1  k\xe2\x82 \xf0\x9f  \xe5\x8d\x95\xe2\2",
            ]
        ),
        max_size=8,
    ),
    st.sampled_from([b"t", b"t" * 200]),
)
def test_a_property_alone_is_what_it_is_among_all(pieces: list[bytes], topic: bytes) -> None:
    record = encode_record(
        topic=topic.decode(), body=b"A\1body\2", queue_id=0, queue_offset=0, physical_offset=0,
        properties=b"".join(pieces), born_timestamp_ms=0, store_timestamp_ms=0, checksum="crc32c-record",
    )  # fmt: skip
    before = b"A\1before\2"
    batch: Any = SimpleNamespace(buffer=before + record + b"A\1after\2")
    message = Message(batch, len(before), 0)
    expected = decode_properties(b"".join(pieces))
    assert [message._stored_property(name) for name in _NAMES] == [expected.get(name) for name in _NAMES]
    assert (message.tag, message.message_group) == (expected.get("TAGS"), expected.get("__SHARDINGKEY"))
    assert message.keys == tuple(filter(None, expected.get("KEYS", "").split(" ")))


@compiled
@pytest.mark.parametrize("arguments", [(), (None, b"", b"", None), (1, 2, 3, 4)])
def test_a_put_of_something_else_is_refused(tmp_path: Path, arguments: tuple[Any, ...]) -> None:
    with MessageStore(tmp_path, config=StoreConfig(clock=SimulatedClock())) as store:
        with pytest.raises(TypeError):
            tip_put(store.wakeups.log, *arguments)
        assert append_compiled(store, "t", bytearray(b"for Python")) is None
        assert store.put("t", b"a").offset == 0


@compiled
def test_a_message_without_anything_behind_it_is_an_error_and_no_crash() -> None:
    bare = kernel.Located.__new__(kernel.Located)
    with pytest.raises(AttributeError):
        _ = bare.body
    outside = kernel.Located(type("RecordBatch", (), {"buffer": b"short"}), 0, 0)
    with pytest.raises(IndexError):
        _ = outside.size
    bare_tip, bare_queue = kernel.LogTail(), kernel.QueueTail()
    assert tip_put(bare_tip, bare_queue, b"", b"", None) is None


class _Holder(Message):
    """A message with more fields."""

    other: object


@compiled
@pytest.mark.parametrize(
    ("kind", "find", "tracked"), [(Message, None, False), (Message, print, True), (_Holder, None, True)]
)
def test_collector_sees_only_messages_that_may_be_in_cycles(
    kind: type[Message], find: Any, tracked: bool, tmp_path: Path
) -> None:
    """Collections of a reader's thousands of messages took a sixth of the time of an export."""
    with mqstore.open(tmp_path / "s") as store:
        read = store.read(*store.put("t", b"x").queue, 0)  # the class of batches is known from here on
        batch = UnitBatch(read[0].queue, bytes(100), bytes(20), 0, find)
    assert [gc.is_tracked(each) for each in read] == [False]
    assert gc.is_tracked(kind(batch, 0, 0)) is tracked


@compiled
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100])
def test_lay_copies_all_bytes_to_their_place(size: int) -> None:
    out, data = bytearray(b"." * 120), bytes(range(size))
    kernel.lay(out, 11, data)
    assert out == b"." * 11 + data + b"." * (109 - size)
    for position in (-1, 121 - size):
        with pytest.raises(ValueError, match="not within 120"):
            kernel.lay(out, position, data)
