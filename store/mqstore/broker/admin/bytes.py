"""Fields of a store's files with their bytes, also of damaged and of copied files.

`_FIELDS` has the fields of all binary formats. A file is cut into items: records, units, slots with their chains. An
item has a problem if its bytes cannot be right. Files are read by `pread`, never mapped, and in bounded pieces.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from mqstore.broker.delay import timerfiles
from mqstore.broker.delay.timercheck import decode_extension
from mqstore.broker.delay.timerfiles import WHEEL_BYTES, TimerFilesDamaged, decode_unit
from mqstore.broker.tables.names import POP_LOG_TOPIC
from mqstore.errors import ConfigError, FormatError, MQStoreError, OffsetOutOfRangeError
from mqstore.files.readonly_fs import QUIET
from mqstore.layout import checkpoint, consumequeue
from mqstore.layout.hosts import IPV4_BYTES, IPV6_BYTES, decode_host
from mqstore.layout.indexfile import ENTRY_BYTES, HEADER_BYTES, SLOT_BYTES, slots_entries_from_length
from mqstore.layout.jsontext import decode
from mqstore.layout.record import (
    BLANK_BYTES,
    BORN_HOST_V6,
    HEADER_FIELDS,
    MAGIC_AT,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    PHYSICAL_OFFSET_AT,
    STORE_HOST_V6,
    SYS_FLAG_AT,
    Checksum,
    check_record,
)
from mqstore.log.derived.indexshape import shape_of_file
from mqstore.log.directory.manifest import Manifest, stored
from mqstore.options import StoreConfig

Item = dict[str, Any]

_SHOWN: Final = 64
"""Bytes of a field that are shown."""
_BLOCK: Final = 1 << 20
_MOST: Final = 64 << 20
"""Largest number of bytes read for one answer."""
_JSON_FIELDS: Final = 16
"""Values of a JSON file for each item of the limit."""
_CHECKSUMS: Final[tuple[Checksum, ...]] = ("crc32c-record", "crc32-body")
_END: Final = 1 << 62
_LEAST: Final = SYS_FLAG_AT + 4

# Codes of `struct`. Unsigned numbers are shown in hex.
_FIELDS: Final = {
    name: tuple((words.split()[0], words.split()[1]) for words in text.split(", "))
    for name, text in {
        "blank": "size i, magic I",
        "unit": "physical_offset q, size i, tags_code q",
        "header": "begin_timestamp_ms q, end_timestamp_ms q, begin_physical_offset q, end_physical_offset q, "
        "used_slots i, next_entry i",
        "slot": "newest_entry i",
        "entry": "key_hash i, physical_offset q, seconds i, previous_entry i",
        "checkpoint": "physic_msg_timestamp_ms q, logics_msg_timestamp_ms q, index_msg_timestamp_ms q, "
        "master_flushed_offset q, confirm_physical_offset q, unused 24s, extension_magic I, extension_version i, "
        "flushed q, dispatched q, clean_end q, crc I, queues Q, queues_crc I, log_start q, log_start_crc I",
        "timer unit": "size i, previous_position q, magic I, write_ms q, delay_ms i, physical_offset q, record_size i, "
        "topic_hash i, crc Q",
        "wheel slot": "time_s q, first_position q, last_position q, number i, magic I",
        "timer check": "read_ms q, log_end q, queue_offset q, master_queue_offset q, state_version q, saved_ms q, "
        "counter q",
        "timer progress": "magic I, version i, counter q, read_ms q, log_end q, queue_offset q, log_low q, "
        "slot_done q, skip_ms q, skip_until q, late_offset q, crc I",
    }.items()
} | {
    "record": tuple((name, "I" if name in ("magic", "checksum", "sys_flag") else code) for name, code in HEADER_FIELDS)
}
_ALIASES: Final = {"total_size": "size", "body": "body_size", "topic": "topic_size", "properties": "properties_size"}
_MEMBER: Final = re.compile(rb'[\s,:]*+("[^"\\]*+(?:\\.[^"\\]*+)*+"?|[{}\[\]]|[^\s{}\[\]:,"]++)')


class _File:
    """File that is read in pieces."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self.fd, self.size = path, fd, QUIET.size(fd)
        inside = (each for each in list(path.absolute().parents)[:4] if (each / "commitlog").is_dir())
        self.root = next(inside, None)
        self.manifest: Manifest | None = None
        with suppress(MQStoreError, OSError):
            self.manifest = None if self.root is None else stored(self.root, StoreConfig(), QUIET)

    def read(self, at: int, size: int) -> bytes:
        return QUIET.pread(self.fd, max(0, min(size, self.size - at, _MOST)), at) if at < self.size else b""


def inspect_file(
    path: str | os.PathLike[str], *, kind: str | None = None, offset: int | None = None, limit: int = 4
) -> Item:
    """Return the fields of a file of a store, or of a copy of one, as plain values. Changes nothing.

    `kind` is by default that of the path, or of the content. At most `limit` items are returned, from `offset` on: a
    physical offset of the log, or the number of a unit, slot or JSON value, by default the first that is not empty. A
    unit that `offset` chooses is followed by its record. With a directory, `offset` names a record of its log. Raises
    ConfigError for an unknown kind, OffsetOutOfRangeError, and StoreIOError.
    """
    place = Path(path)
    if place.is_dir():
        if offset is None:
            raise ConfigError(f"{place} is a directory: give a file in it, or the physical offset of a record")
        starts = {_start(name): name for name in QUIET.scandir(place / "commitlog")}
        before = [start for start in starts if start is not None and start <= offset]
        if not before:
            raise OffsetOutOfRangeError(f"{place} has no segment with physical offset {offset}", 0, 0)
        place = place / "commitlog" / starts[max(before)]
    with QUIET.opened(place, os.O_RDONLY) as fd:
        file = _File(place, fd)
        kind = kind or _kind(file)
        if kind not in _KINDS:
            raise ConfigError(f"{place} is of no known kind: give one, {', '.join(_KINDS)}")
        items = [*islice(_KINDS[kind](file, offset), limit + (kind == "index"))]
    for item in items:
        item["kind"] = kind
    places = [each["value"] for item in items for each in item["fields"] if each["name"] == "physical_offset"]
    if offset is not None and limit == 1 and file.root is not None and kind in ("consumequeue", "timerlog"):
        with suppress(MQStoreError, OSError):  # the unit may point anywhere
            items += inspect_file(file.root, offset=places[0], limit=1)["items"] if places else []
    return {"path": str(place), "kind": kind, "bytes": file.size, "items": items}


def _start(name: str) -> int | None:
    return int(name[:20]) if len(name) >= 20 and name[:20].isascii() and name[:20].isdigit() else None


def _item(title: str, position: int, fields: list[Item], problem: str = "", wrong: str = "") -> Item:
    for each in fields:
        if wrong and each["name"] == _ALIASES.get(wrong, wrong):
            each["problem"] = problem
    end = max((each["position"] + each["size"] for each in fields), default=position)
    return {"title": title, "position": position, "size": end - position, "problem": problem, "fields": fields}


def _field(name: str, position: int, data: bytes, value: int | str | None = None) -> Item:
    row = {"name": name, "position": position, "size": len(data), "bytes": data[:_SHOWN].hex()}
    return {**row, "value": _text(data) if value is None else value, "problem": ""}


def _text(data: bytes) -> str:
    return data[:_SHOWN].decode("utf-8", "backslashreplace")


def _fields(table: str, data: bytes, base: int, hosts: tuple[int, ...] = ()) -> list[Item]:
    """Return the fields of a table for the bytes that are at position `base`. Fields beyond their end are left out."""
    found, at, sizes = [], 0, iter(hosts)
    for name, letter in _FIELDS[table]:
        code = f">{next(sizes)}s" if letter == "s" else f">{letter}"
        size = struct.calcsize(code)
        raw = data[at : at + size]
        if len(raw) < size:
            break
        (value,) = struct.unpack(code, raw)
        if isinstance(value, bytes):
            value = decode_host(value) if letter == "s" else value.hex()
        found.append(_field(name, base + at, raw, f"{value:0{2 * size}X}" if letter in "IQ" else value))
        at += size
    return found


# -- commit log --------------------------------------------------------------------------------------------------------


def _log(file: _File, offset: int | None) -> Iterator[Item]:
    base = _start(file.path.name)
    if base is None or base >= _END:  # a copy
        base = next((claimed - at for at, claimed in _claims(file, 0) if at <= claimed < _END), 0)
    at = 0 if offset is None else offset - base
    if not 0 <= at < max(file.size, 1):
        raise OffsetOutOfRangeError(
            f"{file.path} has physical offsets {base} to {base + file.size - 1}", base, file.size
        )
    while at < file.size:
        item, size = _record(file, at, base + at)
        claims = () if size else _claims(file, at + 1)
        after = next((place for place, claimed in claims if claimed == base + place), file.size)
        if not size and after == file.size and base + at != offset and not file.read(at, _LEAST).strip(b"\0"):
            return  # zeros after the last record
        yield item
        at = at + size if size else after


def _claims(file: _File, at: int) -> Iterator[tuple[int, int]]:
    """Yield (position, physical offset that it claims) of what looks like a record, from a position on."""
    for block in range(at, min(file.size, at + _MOST), _BLOCK):
        data = file.read(block, _BLOCK + _LEAST)
        for magic in re.finditer(b"\xda\xa3\x20[\xa7\xab]", data):
            start = magic.start() - MAGIC_AT
            if start >= 0 and len(data) >= start + _LEAST:
                yield block + start, int.from_bytes(data[start + PHYSICAL_OFFSET_AT : start + SYS_FLAG_AT])


def _record(file: _File, at: int, physical: int) -> tuple[Item, int]:
    """Return the record at a position, and its size, 0 if that cannot be believed."""
    title, left = f"record at {physical}", file.size - at
    size, magic = struct.unpack(">ii", file.read(at, BLANK_BYTES).ljust(BLANK_BYTES, b"\0"))
    data = file.read(at, size if _LEAST <= size <= left else 256)
    checksums = _CHECKSUMS if file.manifest is None else (file.manifest.checksum,)
    checks = [check_record(data, 0, left, physical, checksum) for checksum in checksums]
    check = next((each for each in checks if each.status != "bad"), checks[0])
    if size > _MOST:
        check = check._replace(detail=f"{size} bytes, of which at most {_MOST} are read", field="total_size")
    if magic == MAGIC_BLANK:
        return _item(f"end of segment at {physical}", at, _fields("blank", data, at), check.detail, check.field), left
    if magic not in (MAGIC_V1, MAGIC_V2) or len(data) < _LEAST:
        fields = [*_fields("blank", data, at), _field("data", at + BLANK_BYTES, data[BLANK_BYTES:_SHOWN])]
        return _item(title, at, fields, check.detail, check.field), 0
    flags = int.from_bytes(data[SYS_FLAG_AT : SYS_FLAG_AT + 4])
    hosts = tuple(IPV6_BYTES if flags & bit else IPV4_BYTES for bit in (BORN_HOST_V6, STORE_HOST_V6))
    fields = _fields("record", data, at, hosts)
    end, length = sum(each["size"] for each in fields), fields[-1]["value"]
    parts: dict[str, tuple[bytes, int]] = {}
    for name, code in (("body", ""), ("topic", ">b" if magic == MAGIC_V1 else ">h"), ("properties", ">h")):
        if code and len(data) >= end + struct.calcsize(code):
            (length,) = struct.unpack_from(code, data, end)
            fields.append(_field(f"{name}_size", at + end, data[end : end + struct.calcsize(code)], length))
            end += struct.calcsize(code)
        if len(fields) < len(HEADER_FIELDS) or not 0 <= length <= len(data) - end:
            break
        part, parts[name] = data[end : end + length], (data[end : end + length], at + end)
        fields += _properties(part, at + end) if name == "properties" else [_field(name, at + end, part)]
        end += length
    if parts.get("topic", (b"",))[0] == POP_LOG_TOPIC.encode():
        fields += _members(*parts["body"], "body.")
    fields.sort(key=itemgetter("position"))
    return _item(title, at, fields, check.detail, check.field), check.size


def _properties(data: bytes, base: int) -> Iterator[Item]:
    """Yield each property, with its name and separators among the bytes."""
    for pair in re.finditer(rb"[^\x02]+\x02?", data):
        name, _, value = pair.group().rstrip(b"\x02").partition(b"\x01")
        yield _field(f"property {_text(name)}", base + pair.start(), pair.group(), _text(value))


# -- files of equal items ----------------------------------------------------------------------------------------------

_Reader = Callable[[_File, int | None], Iterator[Item]]


def _equal(table: str, size: int, check: Callable[[_File, Item, int, bytes], str], first: int = 0) -> _Reader:
    """Return a reader of items of one size, from byte `first` on. Items of zeros are left out, except a chosen one.
    `check` returns the problem of an item by its values, position and bytes, or ""."""

    def items(file: _File, offset: int | None) -> Iterator[Item]:
        begin = first + size * (offset or 0)
        if offset is not None and begin >= file.size:
            raise OffsetOutOfRangeError(f"{file.path} has {(file.size - first) // size} items", 0, begin)
        step = _BLOCK // size * size
        for block in range(begin, min(file.size, begin + _MOST), step):
            data = file.read(block, step)
            for at in range(0, len(data), size) if offset is not None or data.strip(b"\0") else ():
                raw, place = data[at : at + size], block + at
                if raw.strip(b"\0") or (place == begin and offset is not None):
                    fields = _fields(table, raw, place)
                    why = f"{len(raw)} of {size} bytes" if len(raw) < size else ""
                    why = why or check(file, {each["name"]: each["value"] for each in fields}, place, raw)
                    yield _item(f"{table} {(place - first) // size}", place, fields, why)

    return items


def _check_unit(_: _File, unit: Item, *__: object) -> str:
    return "" if unit["size"] > 0 <= unit["physical_offset"] else "points to no record"


def _check_timer_unit(file: _File, unit: Item, at: int, raw: bytes) -> str:
    ends = int(unit["magic"], 16) - (1 << 32) == MAGIC_BLANK  # of a segment
    if ends or (unit["size"] == len(raw) and not int(unit["crc"], 16)):  # a Java broker writes no checksum
        return ""
    with suppress(TimerFilesDamaged):
        decode_unit((_start(file.path.name) or 0) + at, raw)
        return ""
    return "its checksum is that of another place, or of other bytes"


def _check_slot(_: _File, slot: Item, at: int, raw: bytes) -> str:
    number = slot["time_s"] % (WHEEL_BYTES // len(raw))
    return "" if number == at // len(raw) and slot["number"] >= 0 else "its time belongs to another slot"


# -- index -------------------------------------------------------------------------------------------------------------


def _index(file: _File, offset: int | None) -> Iterator[Item]:
    """Yield the header, then each used slot with its chain of entries."""
    shape = shape_of_file(file.path, QUIET) or slots_entries_from_length(file.size)
    if file.manifest is not None:
        shape = file.manifest.index_slots, file.manifest.index_entries
    header = _fields("header", file.read(0, HEADER_BYTES), 0)
    if shape is None or len(header) < len(_FIELDS["header"]):
        yield _item("header", 0, header, f"{file.size} bytes, from which the number of slots cannot be known")
        return
    slots, used = shape[0], header[-1]["value"]
    table = HEADER_BYTES + SLOT_BYTES * slots
    most = (file.size - table) // ENTRY_BYTES
    wrong = "" if 0 <= used <= most else f"a file of {slots} slots has room for {most} entries"
    yield _item("header", 0, header, wrong, "next_entry")
    if offset is not None and offset >= slots:
        raise OffsetOutOfRangeError(f"{file.path} has {slots} slots, the first has number 0", 0, slots)
    for slot in _equal("slot", SLOT_BYTES, lambda *_: "", HEADER_BYTES)(file, offset):
        number, newest = (slot["position"] - HEADER_BYTES) // SLOT_BYTES, slot["fields"][0]["value"]
        if number >= slots:
            return
        yield slot if 0 <= newest <= most else {**slot, "problem": f"entry {newest} does not exist"}
        before = most + 1
        while 0 < newest < before:
            at = table + ENTRY_BYTES * newest
            fields = _fields("entry", file.read(at, ENTRY_BYTES), at)
            if len(fields) < len(_FIELDS["entry"]):
                break
            key_hash, previous = fields[0]["value"], fields[-1]["value"]
            faults = {
                "key_hash": "" if key_hash >= 0 and key_hash % slots == number else "its key belongs to another slot",
                "previous_entry": "" if 0 <= previous < newest else "previous_entry is not an older entry",
            }
            wrong = next((name for name, why in faults.items() if why), "")
            yield _item(f"entry {newest} of slot {number}", at, fields, faults.get(wrong, ""), wrong)
            before, newest = newest, previous


# -- small files -------------------------------------------------------------------------------------------------------


def _of_a_page(file: _File) -> str:
    return "" if file.size == checkpoint.FILE_BYTES else f"{file.size} bytes instead of {checkpoint.FILE_BYTES}"


def _checkpoint(file: _File, _: int | None) -> Iterator[Item]:
    data = file.read(0, checkpoint.ENCODED_BYTES)
    found = checkpoint.decode(data)
    fields = _fields("checkpoint", data, 0)
    values = {"crc": found.flushed, "queues_crc": found.queues, "log_start_crc": found.log_start}
    for each in fields:
        if each["name"] in values and int(each["value"], 16) and values[each["name"]] is None:
            each["problem"] = "the checksum of other bytes: these fields do not count"
    wrong = next((each["problem"] for each in fields if each["problem"]), _of_a_page(file))
    yield _item("checkpoint", 0, fields, wrong if checkpoint.is_plausible(data) else "a time or offset is impossible")


def _timer_check(file: _File, _: int | None) -> Iterator[Item]:
    data = file.read(0, 4096)
    yield _item("timer check", 0, _fields("timer check", data, 0), _of_a_page(file))
    for at in (1024, 2048):
        if (part := data[at : at + 84]).strip(b"\0"):
            whole = len(part) == 84 and decode_extension(bytearray(data), at) is not None
            yield _item(
                f"timer progress at {at}", at, _fields("timer progress", part, at), "" if whole else "no valid record"
            )


def _members(data: bytes, base: int = 0, prefix: str = "") -> Iterator[Item]:
    """Yield the values of a JSON text by their paths, also of a damaged one, up to a depth of 64."""
    path: list[str | int | None] = []
    at = 0
    while len(path) <= 64 and (token := _MEMBER.match(data, at)) is not None:
        start, at, word = token.start(1), token.end(), token.group(1)
        if path and b"," in data[token.start() : start]:
            path[-1] = path[-1] + 1 if isinstance(path[-1], int) else None
        if word in b"}]":
            del path[-1:]
        elif path and path[-1] is None and word[:1] == b'"':
            path[-1] = _text(word.strip(b'"'))
        elif word in b"{[":
            path.append(None if word == b"{" else 0)
        else:
            yield _field(prefix + ".".join(map(str, path)), base + start, word)


def _json(file: _File, offset: int | None) -> Iterator[Item]:
    data = file.read(0, _MOST)
    problem = ""
    try:
        decode(data)
    except FormatError as error:
        problem = str(error)
    members = islice(_members(data), offset or 0, None)
    while fields := [*islice(members, _JSON_FIELDS)]:
        yield _item("values", fields[0]["position"], fields, problem)
    if problem and not data:
        yield _item("values", 0, [], problem)


_KINDS: Final[dict[str, _Reader]] = {
    "json": _json,
    "commitlog": _log,
    "checkpoint": _checkpoint,
    "timercheck": _timer_check,
    "timerlog": _equal("timer unit", timerfiles.UNIT_BYTES, _check_timer_unit),
    "index": _index,
    "timerwheel": _equal("wheel slot", timerfiles.SLOT_BYTES, _check_slot),
    "consumequeue": _equal("unit", consumequeue.UNIT_BYTES, _check_unit),
}
"""Readers by kind of file. A content of which no path tells the kind has the first one with the fewest problems."""


def _kind(file: _File) -> str | None:
    """Return the kind of a file, by its path or else by its content, or None."""
    name, *parents = [each.name for each in [file.path.absolute(), *file.path.absolute().parents][:4]]
    cut = "commitlog" if "cut" in parents else ""
    for each in ("json" if ".json" in name else name, parents[0], parents[-1], cut):
        if each in _KINDS:
            return each
    problems = {}
    for kind, read in _KINDS.items():
        with suppress(OffsetOutOfRangeError):
            items = [*islice(read(file, None), 16)]
            problems[kind] = sum(bool(item["problem"]) for item in items) / len(items) if items else 1
    best = min(problems, key=lambda kind: problems[kind])
    return best if problems[best] < 0.5 else None
