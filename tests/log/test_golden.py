"""Stores that the real Java engine wrote, read back field by field; and written to, as a Java broker's successor would.

Expected values are the Java engine's own listing. Two things in it are not ours: it prints IPv6 hosts in its own
notation, and in the store `trimmed` it leaves minima below the first message there is (format#queue-start).
"""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest

import mqstore
from mqstore import SimulatedClock
from mqstore.engine import row_of
from mqstore.errors import ConfigError, OffsetOutOfRangeError
from tests.conftest import GOLDEN_NAMES, Golden, GoldenStore
from tests.log.support import EXPORTED, as_ours, open_store


def by_queue(store: GoldenStore, kind: str) -> dict[tuple[str, int], list[dict[str, Any]]]:
    queues: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for line in store.of(kind):
        queues.setdefault((line["topic"], line["queue_id"]), []).append(line)
    return queues


@pytest.mark.parametrize("mode", ["r", "rw"])
@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_every_message_of_a_java_store_is_read_field_by_field(golden: Golden, name: str, mode: Any) -> None:
    java = golden(name)
    with open_store(java.path, mode) as store:
        assert store.manifest.profile == "rocketmq"
        count = 0
        for (topic, queue_id), lines in by_queue(java, "message").items():
            messages = list(store.iter(topic, queue_id))
            assert [m.offset for m in messages] == [line["queue_offset"] for line in lines]
            for message, line in zip(messages, lines, strict=True):
                row = row_of(message)
                assert {k: row[k] for k in EXPORTED} == {k: as_ours(k, line[k]) for k in EXPORTED}
                assert message.body == base64.b64decode(line["body"])
                assert bytes(message.body_view) == base64.b64decode(line.get("stored_body") or line["body"])
                assert message.tags_code == line["tags_code"]
                assert struct.unpack_from(">ii", message._record_bytes(), 4) == (line["magic"], line["body_crc"])
                count += 1
        assert count == java.of("store")[0]["readable"]


def test_read_below_java_retention_names_the_bounds(golden: Golden) -> None:
    java = golden("trimmed")
    (topic, queue_id), lines = next(iter(by_queue(java, "lost").items()))
    with open_store(java.path, "r") as store, pytest.raises(OffsetOutOfRangeError) as caught:
        store.read(topic, queue_id, lines[-1]["queue_offset"])
    assert caught.value.min_offset == lines[-1]["queue_offset"] + 1


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_keys_of_a_java_store_find_what_the_java_engine_finds(golden: Golden, name: str) -> None:
    java = golden(name)
    with open_store(java.path, "rw") as store:
        for line in java.of("key"):
            by_key = store.find(line["topic"], key=line["key"], limit=10_000)
            by_unique_key = store.find(line["topic"], unique_key=line["key"], limit=10_000)
            found = {m.physical_offset for m in by_key} | {m.physical_offset for m in by_unique_key}
            if name == "trimmed":  # there the Java engine misses some whose chain leads through what is gone
                bearing = [m for m in java.of("message") if m["topic"] == line["topic"]]
                bearing = [m for m in bearing if line["key"] in [*(m["keys"] or "").split(" "), m["unique_key"]]]
                assert found == {m["physical_offset"] for m in bearing} >= set(line["physical_offsets"])
            else:
                assert found == set(line["physical_offsets"]), line["key"]


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_java_messages_are_found_by_id_and_key(golden: Golden, name: str) -> None:
    java = golden(name)
    with open_store(java.path, "rw") as store:
        for line in java.of("message")[::7]:
            assert store.get_by_id(line["message_id"]).offset == line["queue_offset"]
            assert store.get_by_id(line["message_id"].lower()).tags_code == line["tags_code"]
            if line["unique_key"]:
                found = store.find(line["topic"], unique_key=line["unique_key"], limit=100)
                assert line["physical_offset"] in [m.physical_offset for m in found]


def test_writing_to_a_java_store_adds_no_manifest(golden: Golden) -> None:
    java = golden("clean")
    with open_store(java.path, "rw") as store:
        store.put("mine", b"x")
    assert not (java.path / "mqstore.json").exists()
    assert not (java.path / "commitlog" / "mqstore.profile").exists()


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_a_java_store_goes_on_where_the_java_engine_stopped(golden: Golden, name: str) -> None:
    java = golden(name)
    ends = {(line["topic"], line["queue_id"]): line["max_offset"] for line in java.of("queue")}
    (bounds,) = java.of("store")
    clock = SimulatedClock(1_900_000_000_000)  # later than anything in the store
    with open_store(java.path, "rw", clock=clock) as store:
        receipts = {}
        for (topic, queue_id), end in ends.items():
            receipt = store.append(topic, queue_id, b"after", properties={"TAGS": "new", "KEYS": "k-new"})
            assert receipt.offset == end
            receipts[topic, queue_id] = receipt
        assert min(r.physical_offset for r in receipts.values()) >= bounds["max_physical_offset"]
    with open_store(java.path, "rw") as store:
        assert store.recovery.scanned_from is None  # closed cleanly: nothing had to be read
        assert list(store.verify()) == []
        for (topic, queue_id), receipt in receipts.items():
            (message,) = store.read(topic, queue_id, receipt.offset, tags="new" if "SCHEDULE" not in topic else "*")
            assert (message.body, message.physical_offset) == (b"after", receipt.physical_offset)
            assert receipt.physical_offset in [m.physical_offset for m in store.find(topic, key="k-new", limit=100)]
        for line in java.of("message")[::11]:
            (message,) = store.read(line["topic"], line["queue_id"], line["queue_offset"], 1)
            assert message.physical_offset == line["physical_offset"]


def test_put_into_a_java_store_uses_its_checksum(golden: Golden) -> None:
    java = golden("clean")
    with open_store(java.path, "rw") as store:
        receipt = store.put("mine", b"hello")
        empty = store.put("mine", b"")
    start = receipt.physical_offset // 65536 * 65536
    segment = (java.path / "commitlog" / f"{start:020d}").read_bytes()
    assert struct.unpack_from(">i", segment, receipt.physical_offset - start + 8) == (0x3610A686,)  # crc32(b"hello")
    assert struct.unpack_from(">i", segment, empty.physical_offset - start + 8) == (0,)


def test_the_other_profile_is_refused_for_a_java_store(golden: Golden) -> None:
    java = golden("clean")
    with pytest.raises(ConfigError, match="mqstore produce --exported"):
        mqstore.open(java.path, profile="mqstore")


def test_a_java_store_is_read_without_write_permission(golden: Golden) -> None:
    java = golden("propcrc")
    for folder in [java.path, *java.path.rglob("*")]:
        folder.chmod(0o500 if folder.is_dir() else 0o400)
    try:
        with open_store(java.path, "r") as store:
            assert sum(1 for topic in store.topics() for _ in store.iter(topic)) == 129
    finally:
        for folder in [java.path, *java.path.rglob("*")]:
            folder.chmod(0o700)
