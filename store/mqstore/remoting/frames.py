"""Frames of RocketMQ's remoting protocol: both header types, encoded and read (remoting-server, section 2).

    i32 length      of all that follows
    i32 mark        header type in the high byte (0 JSON, 1 binary), length of the header in the low three
    header
    body            the rest

    JSON header     {"code", "flag", "language", "opaque", "version", "remark", "extFields", "serializeTypeCurrentRPC"}
    binary header   i16 code | i8 language | i16 version | i32 opaque | i32 flag | i32 size, remark | i32 size, fields
    fields          i16 size, name | i32 size, value       repeated, UTF-8; a value is a text in both types

An answer has the header type and the `opaque` of its request. Compiled code (store/native/frames.c) reads and writes
ordinary binary headers. The functions here do the same, and handle JSON headers and damage.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from struct import Struct
from types import MappingProxyType
from typing import Any, Final

from mqstore.errors import FormatError
from mqstore.layout.jsontext import decode
from mqstore.native import kernel

FRAME_BYTES_MAX: Final = 16 << 20
"""Default limit of a frame. A peer that announces more is not one of ours, or would fill the memory."""
HEADER_BYTES_MAX: Final = 64 << 10
"""Limit of a header. It has the properties of a message, at most 32 KiB, and some numbers."""
RESPONSE, ONE_WAY = 1, 2
"""Bits of `flag`: this frame is an answer; nobody waits for an answer."""
VERSION: Final = 479
"""Version in our frames, V5_3_3. Java clients ask a server below 4.1.0 for no SQL filters, and say nothing."""

_JSON, _BINARY = 0, 1
_I32: Final = Struct(">i")
_PREFIX: Final = Struct(">iI")
_HEAD: Final = Struct(">hbhii")
_NAME: Final = Struct(">h")
_LANGUAGES: Final = (
    "JAVA", "CPP", "DOTNET", "PYTHON", "DELPHI", "ERLANG", "RUBY", "OTHER",
    "HTTP", "GO", "PHP", "OMS", "RUST", "NODE_JS",
)  # fmt: skip
_LANGUAGE_BYTES: Final = {name: value for value, name in enumerate(_LANGUAGES)}
_OTHER: Final = _LANGUAGE_BYTES["OTHER"]
_WIDE: Final = {code & 0xFFFF: code for code in (*range(200_050, 200_057), 200_151)}
"""Codes that do not fit the 16 bits of a binary header, by their lower bits. No other request has these numbers."""
_NO_FIELDS: Mapping[str, Any] = MappingProxyType({})
_AT_ONCE: Final = 64
"""Frames that are read together."""


@dataclass(slots=True)
class Frame:
    """One request or answer."""

    code: int
    fields: Mapping[str, Any] = field(default_factory=lambda: _NO_FIELDS)
    """Texts. In a frame to send also numbers and booleans, which become texts."""
    body: bytes = b""
    opaque: int = 0
    """Number by which the sender of a request finds the answer."""
    flag: int = 0
    remark: str | None = None
    """Text for people, in answers."""
    version: int = VERSION
    language: str = "PYTHON"
    binary: bool = False
    """True for a binary header."""

    @property
    def is_response(self) -> bool:
        """True for an answer."""
        return self.flag & RESPONSE != 0


def encode(frame: Frame, body_bytes: int | None = None) -> bytes:
    """Return a frame as bytes, or with `body_bytes` everything before a body of that size, which the caller sends."""
    body, size = (frame.body, len(frame.body)) if body_bytes is None else (b"", body_bytes)
    if frame.binary and kernel is not None:
        language, fields = _LANGUAGE_BYTES.get(frame.language, _OTHER), frame.fields
        head: bytes | None = kernel.frame_head(
            frame.code,
            language,
            frame.version,
            frame.opaque,
            frame.flag,
            frame.remark,
            fields if type(fields) is dict else dict(fields),
            size,
        )
        if head is not None:
            return head + body if body else head
    header = _binary_header(frame) if frame.binary else _json_header(frame)
    mark = len(header) | (_BINARY if frame.binary else _JSON) << 24
    return b"".join((_PREFIX.pack(4 + len(header) + size, mark), header, body))


def sent_text(value: object) -> str:
    """Return a value as Java writes it."""
    return value if type(value) is str else ("true" if value else "false") if isinstance(value, bool) else str(value)


def _json_header(frame: Frame) -> bytes:
    header = {
        "code": frame.code,
        "flag": frame.flag,
        "language": frame.language,
        "opaque": frame.opaque,
        "serializeTypeCurrentRPC": "JSON",
        "version": frame.version,
    }
    if frame.fields:
        header["extFields"] = {name: sent_text(value) for name, value in frame.fields.items()}
    if frame.remark is not None:
        header["remark"] = frame.remark
    return json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def _binary_header(frame: Frame) -> bytes:
    remark = (frame.remark or "").encode(errors="replace")
    pairs: list[bytes] = []
    for name, value in frame.fields.items():
        name_bytes, value_bytes = name.encode(), sent_text(value).encode(errors="replace")
        pairs += (_NAME.pack(len(name_bytes)), name_bytes, _I32.pack(len(value_bytes)), value_bytes)
    fields = b"".join(pairs)
    language = _LANGUAGE_BYTES.get(frame.language, _OTHER)
    code = (frame.code + 0x8000 & 0xFFFF) - 0x8000  # as Java's cast to short does
    head = _HEAD.pack(code, language, frame.version, frame.opaque, frame.flag)
    return b"".join((head, _I32.pack(len(remark)), remark, _I32.pack(len(fields)), fields))


class FrameReader:
    """The frames of one connection, in the order of their bytes.

    >>> reader = FrameReader()
    >>> data = encode(Frame(105, {"topic": "orders"}, opaque=7))
    >>> reader.feed(data[:9]); list(reader)
    []
    >>> reader.feed(data[9:]); [(frame.code, frame.opaque, dict(frame.fields)) for frame in reader]
    [(105, 7, {'topic': 'orders'})]
    """

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._limit = frame_bytes_max
        self._buffer: bytes | bytearray = b""
        self._at = 0
        self._read: list[Frame] = []
        """Frames that were read together and not yielded, the last one first."""

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        if self._at == len(self._buffer):  # nearly always: then nothing is copied
            self._buffer, self._at = data, 0
            return
        if type(self._buffer) is not bytearray:
            self._buffer = bytearray(self._buffer)
        if self._at:  # once a block, not once a frame: each deletion moves the rest
            del self._buffer[: self._at]
            self._at = 0
        self._buffer += data

    def __iter__(self) -> Iterator[Frame]:
        """Yield each whole frame once. Raises FormatError for bytes that cannot be a frame: close the connection,
        since nothing after them can be found."""
        read = self._read
        while read or self._at < len(self._buffer):
            if kernel is not None and not read:
                self._at = kernel.frames(self._buffer, self._at, self._limit, _AT_ONCE, _SLOTS, _WIDE, _NAMES, read)
                read.reverse()
            frame = read.pop() if read else self._next_by_python()
            if frame is None:
                return
            yield frame

    def _next_by_python(self) -> Frame | None:
        buffer, at = self._buffer, self._at
        if len(buffer) - at < _PREFIX.size:
            return None
        length, mark = _PREFIX.unpack_from(buffer, at)
        header_bytes, kind = mark & 0xFF_FFFF, mark >> 24
        # Before the rest has arrived, so that a wrong length fills no memory.
        if not 4 <= length <= self._limit:
            raise FormatError(f"a frame has 4 to {self._limit} bytes, not {length}", "length", 0)
        if kind not in (_JSON, _BINARY):
            raise FormatError(f"the type of a header is 0 (JSON) or 1 (binary), not {kind}", "mark", 4)
        if header_bytes > min(length - 4, HEADER_BYTES_MAX):
            raise FormatError(
                f"a header of {header_bytes} bytes is larger than its frame, or {HEADER_BYTES_MAX} bytes", "mark", 4
            )
        end = at + 4 + length
        if len(buffer) < end:
            return None
        body_at = at + _PREFIX.size + header_bytes
        with memoryview(buffer) as view:
            header, body = bytes(view[at + _PREFIX.size : body_at]), bytes(view[body_at:end])
        frame = _from_binary(header) if kind == _BINARY else _from_json(header)
        frame.body = body
        self._at = end
        return frame


_SLOTS: Final = tuple(
    getattr(Frame, name)
    for name in ("code", "fields", "body", "opaque", "flag", "remark", "version", "language", "binary")
)
_NAMES: Final = (*_LANGUAGES, "OTHER")
"""Languages by number, and the last for all others."""


def _from_json(header: bytes) -> Frame:
    value: Any = decode(header)
    if type(value) is not dict:
        raise FormatError("the header is not a JSON object", "header", _PREFIX.size)
    fields, remark, language = value.get("extFields"), value.get("remark"), value.get("language")
    fields = {} if fields is None else fields
    numbers = [value.get(name, 0) for name in ("code", "opaque", "flag", "version")]
    if type(fields) is not dict or not all(type(number) is int and -1 << 31 <= number < 1 << 31 for number in numbers):
        raise FormatError("code, opaque, flag or version is not an i32, or extFields is not an object", "header", 8)
    code, opaque, flag, version = numbers
    return Frame(
        code,
        {name: _text(each) for name, each in fields.items() if each is not None},
        opaque=opaque,
        flag=flag,
        remark=remark if type(remark) is str else None,
        version=version,
        language=language if type(language) is str and language in _LANGUAGE_BYTES else "OTHER",
    )


def _text(value: Any) -> str:
    """Return the text of a field. Clients send texts; a number or boolean has the text that Java gives it."""
    return value if type(value) is str else json.dumps(value)


def _from_binary(header: bytes) -> Frame:
    try:
        code, language, version, opaque, flag = _HEAD.unpack_from(header)
        remark, at = _sized(header, _HEAD.size, _I32)
        pairs, end = _sized(header, at, _I32)
        if end != len(header):
            raise ValueError(f"{len(header) - end} bytes after the fields")
        fields, at = {}, 0
        while at < len(pairs):
            name, at = _sized(pairs, at, _NAME)
            value, at = _sized(pairs, at, _I32)
            fields[name.decode()] = value.decode()
        return Frame(
            code if flag & RESPONSE else _WIDE.get(code & 0xFFFF, code),
            fields,
            opaque=opaque,
            flag=flag,
            remark=remark.decode() or None,
            version=version,
            language=_LANGUAGES[language] if 0 <= language < len(_LANGUAGES) else "OTHER",
            binary=True,
        )
    except Exception as error:  # struct.error, UnicodeDecodeError, ValueError
        raise FormatError(f"the binary header is damaged: {error}", "header", _PREFIX.size) from None


def _sized(data: bytes, at: int, size: Struct) -> tuple[bytes, int]:
    """Return the bytes after a size, and the position after them. Raises ValueError if they are not all there."""
    start = at + size.size
    length: int = size.unpack_from(data, at)[0]
    if not 0 <= length <= len(data) - start:
        raise ValueError(f"a size of {length} at byte {at} of {len(data)}")
    return data[start : start + length], start + length
