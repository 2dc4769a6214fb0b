"""JSON of a store that exhausts a reader's stack or memory is an error or a finding, wherever it is."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import mqstore
from tests.log.support import open_store
from tests.tools.support import mqstore as command
from tests.tools.support import mqstore_json

DEEP = b'{"a":' * 2000
HOSTILE = {
    "deep objects": DEEP,
    "deep arrays": b'{"k":' + b"[" * 100_000,
    "many values": b'{"k":0,"o":[' + b"0," * 1_000_001 + b"0]}",
    "a long number": b'{"k":0,"o":[' + b"9" * 5000 + b"]}",
    "an infinite number": b'{"k":0,"o":[1e999]}',
    "no object": b"[]",
    "no JSON": b"\xff\xfe\xff",
}
SENSELESS = {
    "a huge batch": b'{"k":1000000000000000000000000000000,"o":[0]}',
    "a huge offset": b'{"k":0,"o":[1000000000000000000000000000000]}',
    "lists for numbers": b'{"k":[],"o":{}}',
    "a number for a list": b'{"k":0,"o":5}',
    "deeper than any record": b'{"k":0,"o":' + b"[" * 60 + b"]" * 60 + b"}",
}


def _store(path: Path, *records: bytes, tag: str = "ack") -> Path:
    """Make a store with a message in flight, whose pop log continues with `records`."""
    with mqstore.open(path) as store:
        store.put("t", b"hello")
        assert store.broker.pop("g", "t")
    with open_store(path) as log:
        for body in records:
            log.put("rmq_sys_pop_log", body, tag=tag)
    return path


@pytest.mark.parametrize("name", HOSTILE)
def test_unreadable_record_of_the_pop_log_is_reported_and_skipped(tmp_path: Path, name: str) -> None:
    path = _store(tmp_path / "s", HOSTILE[name])

    found = mqstore_json("verify", path, exit_code=1)["findings"]
    assert [each["kind"] for each in found] == ["bad_json"]
    file = path / found[0]["file"]
    size, magic = struct.unpack_from(">Ii", file.read_bytes(), found[0]["position"])
    assert (size, magic) == (found[0]["length"], -626843481)
    assert [f["kind"] for f in mqstore_json("recover", path, "--dry-run", exit_code=1)["findings"]] == ["bad_json"]
    assert [f["kind"] for f in mqstore_json("recover", path, exit_code=1)["findings"]] == ["bad_json"]
    assert mqstore_json("verify", path)["findings"][0]["known"]
    for _ in range(2):
        with mqstore.open(path) as store:
            assert [each.message.body for each in store.broker.pop("g", "t")] == [b"hello"]


@pytest.mark.parametrize("tag", ["ck", "ack", "chg", "rev", "rel", "rst"])
def test_readable_record_without_sense_does_not_keep_a_store_closed(tmp_path: Path, tag: str) -> None:
    path = _store(tmp_path / "s", *SENSELESS.values(), tag=tag)

    for _ in range(2):
        with mqstore.open(path) as store:
            store.put("t", b"more", queue_id=0)
    assert mqstore_json("verify", path)["ok"]


PLACES = [
    "mqstore.json",
    "config/topics.json",
    "config/subscriptionGroup.json",
    "config/consumerOffset.json",
    "config/delayOffset.json",
    "config/consumerOrderInfo.json",
    "config/knownDamage.json",
    "config/queueEnds.json",
    "config/spark/txn.json",
    "config/spark/overwrite.json",
    "config/spark/groups/g.json",
    "config/begun/0",
    "config/begun/suspects.json",
    "cut/restoring.json",
    "inbox/ready-1/bundle.json",
    "inbox/ready-1/shard.json",
    "local_offsets/c@default/g/offsets.json",
    "serve.json",
    "lock",
]
COMMANDS = ("inspect", "export", "lag", "groups", "topics", "offsets", "delay", "dlq", "quarantine")


def _deep(file: Path) -> None:
    file.write_bytes(DEEP)


def _large(file: Path) -> None:
    file.write_bytes(b"{")
    os.truncate(file, (32 << 20) + 1)


@pytest.mark.parametrize(
    ("place", "fill"), [*((place, _deep) for place in PLACES), *((place, _large) for place in PLACES[::3])]
)
def test_hostile_file_is_an_error_or_a_finding(tmp_path: Path, place: str, fill: Callable[[Path], None]) -> None:
    """Both files of a pair, so that no backup helps. Each command ends with a sentence and no traceback."""
    path = _store(tmp_path / "s")
    file = path / place
    file.parent.mkdir(parents=True, exist_ok=True)
    for each in (file, file.with_name(f"{file.name}.bak")):
        fill(each)

    at = PLACES.index(place)  # a third of the commands for each place; the campaign has all
    for name in (*COMMANDS[at % 3 :: 3], "verify", "recover"):
        result = command(name, path)
        assert result.exit_code in (0, 1, 2, 3), result.output
        assert "this is a bug" not in result.output
    with suppress(mqstore.MQStoreError), mqstore.open(path) as store:
        store.put("t", b"more")
