"""Frames beside those that RocketMQ's own encoder wrote, and bytes that are no frames."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore.errors import FormatError
from mqstore.remoting import frames as module
from mqstore.remoting.frames import FRAME_BYTES_MAX, HEADER_BYTES_MAX, ONE_WAY, RESPONSE, Frame, FrameReader, encode
from mqstore.remoting.shapes import batch_item, batch_items, properties_of
from tests.without import compiled

_LINES = (Path(__file__).parent.parent / "golden" / "remoting_frames.txt").read_text().splitlines()[1:]
JAVA = {(kind, case): bytes.fromhex(data) for kind, case, data in map(str.split, _LINES)}
PROPERTIES = "TAGS\x01paid\x02KEYS\x01ü\x02"
_VALUES = ("pg", "orders", "TBW102", "4", "1", "0", "1700000000000", "0", PROPERTIES, "0", "false", "16", "false")
SEND = dict(zip("abcdefghijklm", _VALUES, strict=True))


def one(data: bytes) -> Frame:
    reader = FrameReader()
    reader.feed(data)
    [frame] = reader
    return frame


@pytest.mark.parametrize("kind", ["JSON", "BINARY"])
@pytest.mark.parametrize(
    ("case", "code", "opaque", "flag", "fields", "remark", "body"),
    [
        ("send", 310, 7, 0, SEND, None, b"hello"),
        ("answer", 17, 8, RESPONSE, {}, "no topic", b""),
        ("oneway", 34, 9, ONE_WAY, {}, None, b""),
        ("pop", 200050, 10, 0, {}, None, b""),  # its code has 18 bits, a binary header 16
    ],
)
def test_frames_of_java_are_read(
    kind: str, case: str, code: int, opaque: int, flag: int, fields: dict[str, str], remark: str | None, body: bytes
) -> None:
    frame = one(JAVA[kind, case])
    assert (frame.code, frame.opaque, frame.flag, dict(frame.fields)) == (code, opaque, flag, fields)
    assert (frame.remark, frame.body, frame.version, frame.language) == (remark, body, 479, "JAVA")
    assert (frame.binary, frame.is_response, bool(frame.flag & ONE_WAY)) == (
        kind == "BINARY",
        case == "answer",
        case == "oneway",
    )


@pytest.mark.parametrize("case", ["answer", "oneway", "pop"])
def test_binary_frames_have_the_bytes_of_java(case: str) -> None:
    assert encode(one(JAVA["BINARY", case])) == JAVA["BINARY", case]


def test_json_frame_has_the_members_of_java() -> None:
    ours, java = (json.loads(data[8:-5]) for data in (encode(one(JAVA["JSON", "send"])), JAVA["JSON", "send"]))
    assert ours == java


_TEXT = st.text(max_size=40)
_I32 = st.integers(-(1 << 31), (1 << 31) - 1)


_FRAMES = st.lists(
    st.builds(
        Frame,
        st.integers(0, 32_000).filter(lambda code: not 3442 <= code <= 3543),
        st.dictionaries(_TEXT, _TEXT, max_size=5),
        st.binary(max_size=100),
        opaque=_I32,
        flag=st.integers(0, 3),
        remark=st.none() | st.text(min_size=1, max_size=40),
        version=st.integers(0, 600),
        language=st.sampled_from(["JAVA", "PYTHON", "GO", "OTHER"]),
        binary=st.booleans(),
    ),
    max_size=4,
)


@given(_FRAMES, st.integers(1, 60))
def test_frames_arrive_whole_from_pieces_of_any_size(frames: list[Frame], piece: int) -> None:
    data = b"".join(map(encode, frames))
    reader, found = FrameReader(), []
    for at in range(0, len(data), piece):
        reader.feed(data[at : at + piece])
        found += reader
    assert found == frames


_PARTS = [0, 1, 2, 3, 5, 8, 15, 16, 255]
_DAMAGE = st.lists(st.tuples(st.integers(0, 150), st.sampled_from(_PARTS)), max_size=3)
_WITH_JAVA = _FRAMES.map(lambda frames: b"".join(map(encode, frames))) | st.sampled_from(sorted(JAVA)).map(
    JAVA.__getitem__
)


def read_in_pieces(blocks: list[bytes], limit: int) -> tuple[list[Frame], str | None]:
    """The frames of these blocks, and the error that ends them."""
    reader = FrameReader(limit)
    found: list[Frame] = []
    try:
        for block in blocks:
            reader.feed(block)
            found += reader
    except FormatError as error:
        return found, str(error)
    return found, None


@compiled
@given(st.lists(_WITH_JAVA, max_size=4).map(b"".join), _DAMAGE, st.integers(1, 200), st.sampled_from([150, 1 << 20]))
def test_compiled_reader_agrees_with_python(data: bytes, damage: list[tuple[int, int]], piece: int, limit: int) -> None:
    damaged = bytearray(data)
    for at, value in damage:
        damaged[at : at + 1] = bytes([value])
    blocks = [bytes(damaged[at : at + piece]) for at in range(0, len(damaged), piece)]
    ours = read_in_pieces(blocks, limit)
    with mock.patch.object(module, "kernel", None):
        assert read_in_pieces(blocks, limit) == ours


_VALUES_SENT = st.text(max_size=8) | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.just("v" * 5000)


@compiled
@given(
    st.builds(
        Frame,
        st.integers(-40_000, 300_000),
        st.dictionaries(st.text(max_size=8) | st.just("\ud800"), _VALUES_SENT, max_size=3),
        st.binary(max_size=9),
        st.integers(-(1 << 32), 1 << 32) | _I32,
        st.integers(0, 3),
        st.none() | st.text(max_size=9),
        st.integers(-40_000, 40_000),
        st.sampled_from(["JAVA", "PYTHON", "KLINGON"]),
        st.just(True),
    ),
    st.none() | st.integers(0, 1 << 20),
)
def test_compiled_encoder_agrees_with_python(frame: Frame, body_bytes: int | None) -> None:
    def written() -> object:
        try:
            return encode(frame, body_bytes)
        except (struct.error, UnicodeEncodeError) as error:
            return type(error)

    ours = written()
    with mock.patch.object(module, "kernel", None):
        assert written() == ours


@compiled
@pytest.mark.parametrize("binary", [True, False])
def test_binary_frames_are_read_and_written_by_compiled_code(binary: bool) -> None:
    frames = [Frame(310, dict(SEND), b"body", opaque=7, binary=binary, language="OTHER") for _ in range(100)]
    reader = FrameReader()
    with (
        mock.patch.object(FrameReader, "_next_by_python", return_value=None),
        mock.patch.object(module, "_binary_header", side_effect=AssertionError),
    ):
        reader.feed(b"".join(map(encode, frames)))
        assert list(reader) == (frames if binary else [])


def _binary(remark_bytes: int = 0, fields: bytes = b"", tail: bytes = b"") -> bytes:
    header = struct.pack(">hbhiii", 34, 0, 479, 1, 0, remark_bytes) + struct.pack(">i", len(fields)) + fields + tail
    return struct.pack(">iI", 4 + len(header), len(header) | 1 << 24) + header


def _json(header: bytes) -> bytes:
    return struct.pack(">iI", 4 + len(header), len(header)) + header


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(struct.pack(">iI", 3, 0), id="shorter than a mark"),
        pytest.param(struct.pack(">iI", -1, 0), id="negative length"),
        pytest.param(struct.pack(">iI", FRAME_BYTES_MAX + 1, 10), id="length above the limit"),
        pytest.param(struct.pack(">iI", 100, 97), id="header longer than the frame"),
        pytest.param(struct.pack(">iI", 1 << 20, HEADER_BYTES_MAX + 1), id="header above the limit"),
        pytest.param(struct.pack(">iI", 20, 2 << 24), id="unknown type of header"),
        pytest.param(_json(b"[]"), id="JSON, not an object"),
        pytest.param(_json(b"{"), id="not JSON"),
        pytest.param(_json(b'{"code": "34"}'), id="code is a text"),
        pytest.param(_json(b'{"code": 4294967296}'), id="code above 32 bits"),
        pytest.param(_json(b'{"code": true}'), id="code is a boolean"),
        pytest.param(_json(b'{"extFields": []}'), id="fields are a list"),
        pytest.param(_json(b'{"a":' + b"[" * 60_000), id="deeply nested"),
        pytest.param(_json(b"\xff\xfe"), id="not UTF-8"),
        pytest.param(_binary(remark_bytes=-1), id="negative size of the remark"),
        pytest.param(_binary(remark_bytes=1000), id="remark after the end"),
        pytest.param(_binary(fields=struct.pack(">h", -5) + bytes(8)), id="negative size of a name"),
        pytest.param(_binary(fields=struct.pack(">h", 1) + b"a" + struct.pack(">i", 9)), id="value after the end"),
        pytest.param(_binary(fields=struct.pack(">h", 1) + b"\xff" + struct.pack(">i", 0)), id="name is not UTF-8"),
        pytest.param(_binary(tail=b"x"), id="bytes after the fields"),
    ],
)
def test_bytes_that_are_no_frame_are_refused(data: bytes) -> None:
    reader = FrameReader()
    reader.feed(data)
    with pytest.raises(FormatError):
        list(reader)


@given(st.binary(max_size=200), st.sampled_from(sorted(JAVA)), st.integers(0, 300))
def test_no_bytes_raise_another_error(noise: bytes, good: tuple[str, str], at: int) -> None:
    data = JAVA[good]
    reader = FrameReader()
    reader.feed(data[:at] + noise + data[at:])
    with contextlib.suppress(FormatError):
        list(reader)


def test_batch_of_java_is_read_and_written() -> None:
    found = [(flag, body, properties_of(text)) for flag, body, text in batch_items(JAVA["BATCH", "batch"])]
    assert found == [(3, b"one", {"KEYS": "k", "WAIT": "true", "TAGS": "A"}), (0, b"two", {"WAIT": "true"})]
    assert b"".join(batch_item(*each) for each in found) == JAVA["BATCH", "batch"]


@given(st.integers(0, 83), st.binary(min_size=1, max_size=4))
def test_damaged_batch_is_refused_or_read(at: int, noise: bytes) -> None:
    data = bytearray(JAVA["BATCH", "batch"])
    data[at : at + len(noise)] = noise
    with contextlib.suppress(FormatError):
        list(batch_items(bytes(data)))
