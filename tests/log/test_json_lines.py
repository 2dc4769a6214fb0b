"""Lines of an export, byte for byte those of `json.dumps`, from compiled code and from Python."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import mqstore
from mqstore.engine import StoreFiles
from mqstore.layout.consumequeue import UNIT
from mqstore.log import message as messages
from mqstore.log.message import Message, UnitBatch
from mqstore.log.writing.log_tail import QueueRef
from tests.log.support import open_store
from tests.records import LOCAL_HOST, encode_record
from tests.without import compiled

PLAIN: dict[str, Any] = {
    "topic": "orders", "body": b"hello", "queue_id": 3, "queue_offset": 7, "physical_offset": 1 << 40,
    "born_timestamp_ms": 1_700_000_000_000, "store_timestamp_ms": 1_700_000_000_001,
}  # fmt: skip
V6 = bytes(15) + b"\x01" + (77).to_bytes(4, "big")
MANY = b"".join(b"n%d\x01%d\x02" % (i, i) for i in range(65))
#: Fields of a record, and the properties that they mean (format#properties).
KINDS: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({}, {}),
    *(
        ({"body": bytes(range(253, 253 + size)) if size < 4 else bytes(range(256)) * size}, {})
        for size in (0, 1, 2, 3, 9)
    ),
    (
        {"properties": b"TAGS\x01paid\x02KEYS\x01a b\x02UNIQ_KEY\x01k7"},
        {"TAGS": "paid", "KEYS": "a b", "UNIQ_KEY": "k7"},
    ),
    (
        {"properties": b'a\x01say "x\\y" \x7f\t\x02b\x01\xc3\xa9\xf0\x9f\x98\x80\x02'},
        {"a": 'say "x\\y" \x7f\t', "b": "é😀"},
    ),
    ({"properties": b'\xc3\xa9\x01v\x02"\x01v\x02'}, {"é": "v", '"': "v"}),
    ({"properties": b"a\x01\xff\x02b\x01x\x01y\x02"}, {"a": "\ufffd", "b": "x\x01y"}),
    ({"properties": b"junk\x02\x01v\x02a\x01\x02\x02TAGSX\x01v\x02TAG\x01w"}, {"TAGSX": "v", "TAG": "w"}),
    ({"properties": b"a\x011\x02b\x012\x02a\x013\x02TAGS\x01x\x02TAGS\x01y\x02"}, {"a": "3", "b": "2", "TAGS": "y"}),
    ({"properties": MANY}, {f"n{i}": str(i) for i in range(65)}),
    ({"flag": -(1 << 31), "reconsume_times": (1 << 31) - 1, "sys_flag": 12}, {}),
    ({"born_timestamp_ms": -(1 << 63), "prepared_transaction_offset": (1 << 63) - 1}, {}),
    ({"born_host": b"\xff\x00\x0a\x01\xff\xff\xff\xff"}, {}),
    ({"born_host": V6}, {}),
    ({"store_host": V6}, {}),
    ({"body": zlib.compress(b"packed"), "sys_flag": 1}, {}),
]


def host_text(host: bytes) -> str:
    port = int.from_bytes(host[-4:], "big", signed=True)
    return "[::1]:77" if len(host) == 20 else f"{'.'.join(map(str, host[:4]))}:{port}"


def expected_line(record: bytes, given: dict[str, Any], properties: dict[str, str], stored: bool) -> str:
    get = {
        "flag": 0,
        "reconsume_times": 0,
        "prepared_transaction_offset": 0,
        "born_host": LOCAL_HOST,
        "store_host": LOCAL_HOST,
    } | given
    packed = get.get("sys_flag", 0) & 1
    body = zlib.decompress(get["body"]) if packed and not stored else get["body"]
    flags = get.get("sys_flag", 0) | 16 * (get["born_host"] == V6) | 32 * (get["store_host"] == V6)
    row = {
        **{name: get[name] for name in ("topic", "queue_id", "queue_offset", "physical_offset")},
        "size": len(record), "body": base64.b64encode(body).decode(),
        "tags": properties.get("TAGS"), "keys": properties.get("KEYS"), "properties": properties,
        "flag": get["flag"], "sys_flag": flags,
        "born_timestamp_ms": get["born_timestamp_ms"], "born_host": host_text(get["born_host"]),
        "store_timestamp_ms": get["store_timestamp_ms"], "store_host": host_text(get["store_host"]),
        "reconsume_times": get["reconsume_times"], "prepared_transaction_offset": get["prepared_transaction_offset"],
        "message_id": (get["store_host"] + get["physical_offset"].to_bytes(8, "big")).hex().upper(),
        "unique_key": properties.get("UNIQ_KEY"),
    }  # fmt: skip
    return json.dumps(row) + "\n"


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("way", [pytest.param("compiled", marks=compiled), "python"])
def test_lines_are_those_of_json(tmp_path: Path, way: str, stored: bool) -> None:
    with open_store(tmp_path / "s"):
        pass
    chosen, wanted = list[Message](), list[str]()
    for given, properties in KINDS * 2:
        record = encode_record(**PLAIN | given, checksum="crc32c-record")
        unit = UNIT.pack(1 << 40, len(record), 0)
        chosen.append(Message(UnitBatch(QueueRef("orders", 3), record, unit, 7), 0, 7))
        wanted.append(expected_line(record, PLAIN | given, properties, stored))

    kernel = messages.kernel if way == "compiled" else None
    with StoreFiles(tmp_path / "s") as files, mock.patch.object(messages, "kernel", kernel):
        found = [item for item in files.lines(chosen, stored=stored) if isinstance(item, tuple)]

    assert "".join(text for text, _ in found).splitlines(True) == wanted
    assert [text.count("\n") for text, _ in found] == [number for _, number in found]


def test_text_of_large_messages_comes_in_pieces(tmp_path: Path) -> None:
    with mqstore.open(tmp_path / "s") as store:
        for _ in range(5):
            store.put("orders", bytes(600_000))

    with StoreFiles(tmp_path / "s") as files:
        [batch] = [found for found in files.log() if isinstance(found, list)]
        sizes = [item[1] for item in files.lines(batch) if isinstance(item, tuple)]

    assert sum(sizes) == 5
    assert max(sizes) <= 2
