"""`copy_many`: copies built together are the records that `append` would have made one by one, all of them or none."""

from __future__ import annotations

import errno
import random
from pathlib import Path
from typing import Any

import pytest

from mqstore import Message, Profile
from mqstore.errors import InvalidMessageError, StoreFullError
from mqstore.layout.arrays.dispatch import SCHEDULE_TOPIC
from mqstore.layout.properties import decode_properties, encode_properties
from mqstore.log.store import MessageStore
from mqstore.log.writing.outgoing import Copy
from tests.faults import FaultyFileSystem
from tests.log.support import open_store

LONG_TOPIC = "%RETRY%" + "g" * 200
"""Over 127 bytes: its records are V2."""

SOURCES: list[dict[str, Any]] = [
    {},
    {"flag": -7, "reconsume_times": 3},
    {"born_timestamp_ms": 12345, "born_host": "10.1.2.3:4567"},
    {"sys_flag": 0x8, "prepared_transaction_offset": 99},
    {"sys_flag": 0x2},
    {"born_host": "[2001:db8::7]:80"},
]


def filled(path: Path, **options: Any) -> MessageStore:
    store = open_store(path, **{"segment_bytes": 1 << 14, **options})
    for n, fields in enumerate(SOURCES * 2):
        store.append("from", 0, b"body %d" % n * n, properties={"KEYS": f"k{n}", "TAGS": "t"}, **fields)
    return store


def copies_of(store: MessageStore) -> list[Copy]:
    targets = [("to", 0), ("to", 5), (LONG_TOPIC, 0)]
    return [
        (message, *targets[n % 3], encode_properties({"n": str(n), "KEYS": f"k{n} c{n}"}))
        for n, message in enumerate(store.read("from", 0, 0, 100))
    ]


def one_by_one(store: MessageStore, copies: list[Copy]) -> None:
    for message, topic, queue_id, properties in copies:
        store.append(
            topic, queue_id, bytes(message.body_view), properties=decode_properties(properties), flag=message.flag,
            sys_flag=message.sys_flag, born_timestamp_ms=message.born_timestamp_ms, born_host=message.born_host,
            reconsume_times=message.reconsume_times,
        )  # fmt: skip


def all_of(store: MessageStore, topic: str, queue_id: int) -> list[Message]:
    return store.read(topic, queue_id, 0, 1000)


@pytest.mark.parametrize("profile", ["mqstore", "rocketmq"])
@pytest.mark.parametrize("store_host", ["127.0.0.1:0", "[::1]:9"])
@pytest.mark.parametrize("source_host", ["127.0.0.1:0", "[::1]:9"])
def test_copies_are_as_append_makes_them(tmp_path: Path, profile: Profile, store_host: str, source_host: str) -> None:
    logs = []
    for name in ("many", "single"):
        path = tmp_path / name
        filled(path, profile=profile, store_host=source_host).close()
        config = {"segment_bytes": 1 << 14, "consumequeue_units": 8} if profile == "rocketmq" else {}
        if profile == "rocketmq":
            config |= {"index_slots": 16, "index_entries": 32}
        store = open_store(path, profile=profile, store_host=store_host, **config)
        copies = copies_of(store)
        if name == "single":
            one_by_one(store, copies)
        else:
            done = 0
            while done < len(copies):
                done += store.copy_many(copies[done:])
        logs.append(store.log_files.mapping(store.log_files.segments()[0])[: store.max_offset])
        assert [message.offset for message in all_of(store, "to", 5)] == [0, 1, 2, 3]
        assert [message.stored_properties()["n"] for message in store.find("to", key="c4")] == ["4"]
        store.close()
        with open_store(path, "r") as reader:
            assert list(reader.verify()) == []
    assert logs[0] == logs[1]


@pytest.mark.parametrize("seed", range(2))
def test_runs_to_one_queue_with_others_among_them(tmp_path: Path, seed: int) -> None:
    """Copies of every kind in any order: the ordinary ones that follow each other are dealt with together."""
    odd = [
        b"",
        b"INNER_NUM\x017\x02",
        b"a\x01INNER_\x02",
        b"a\x01__CRC32#1234567890\x02",
        b"__CRC32#\x011234567890\x02",
        b"k\x01" + b"v" * 900 + b"\x02",
    ]
    draw = random.Random(seed)
    logs = []
    for name in ("many", "single"):
        store = filled(tmp_path / name, max_message_size=4096)
        draw.seed(seed)
        messages = all_of(store, "from", 0)
        copies: list[Copy] = []
        while len(copies) < 60:
            topic, queue_id = draw.choice([("to", 0), ("to", 5), (LONG_TOPIC, 0)])
            for _ in range(draw.choice([1, 1, 2, 9])):
                properties = encode_properties({"n": str(len(copies)), "KEYS": f"k{len(copies)}"})
                if draw.random() < 0.2:
                    properties += draw.choice(odd)
                copies.append((draw.choice(messages), topic, queue_id, properties))
        if name == "single":
            one_by_one(store, copies)
        else:
            done = 0
            while done < len(copies):
                done += store.copy_many(copies[done:])
        logs.append(b"".join(store.log_files.mapping(segment)[:] for segment in store.log_files.segments()))
        store.close()
        with open_store(tmp_path / name, "r") as reader:
            assert list(reader.verify()) == []
    assert logs[0] == logs[1]


def test_as_many_as_go_together_are_stored_and_counted(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s", segment_bytes=8192, max_message_size=8192)
    for n in range(7):
        store.put("from", b"%d" % n * 2_000)
    copies = [(message, "to", 0, b"") for message in store.read("from", 0, 0, 100)]
    counts = []
    while copies:
        counts.append(store.copy_many(copies))
        copies = copies[counts[-1] :]
    assert counts == [3, 3, 1]
    assert [message.body[:1] for message in all_of(store, "to", 0)] == [b"%d" % n for n in range(7)]


def test_invalid_first_copy_raises(tmp_path: Path) -> None:
    store = filled(tmp_path / "s", segment_bytes=1 << 20)
    good = copies_of(store)[:3]
    message = good[0][0]
    store.append(SCHEDULE_TOPIC, 0, b"", properties={"DELAY": "1"})
    end = store.max_offset
    bad = [
        (message, "to", -1, b""),
        (message, "../x", 0, b""),
        (message, "to", 0, b"x\x01" + b"y" * 32_766 + b"\x02"),
        (message, "to", 0, b"INNER_NUM\x01many\x02"),
        (message, SCHEDULE_TOPIC, 0, b"DELAY\x01many\x02"),
    ]
    for copy in bad:
        with pytest.raises(InvalidMessageError):
            store.copy_many([copy, *good])
        assert store.max_offset == end
    for copy in bad:
        assert store.copy_many([good[0], copy, good[1]]) == 1
    assert len(all_of(store, "to", 0)) == len(bad)


def test_a_body_that_is_larger_than_may_be_put_by_now_is_copied(path: Path) -> None:
    """It was taken once; who delays or retries it must not lose it for a limit that was lowered since."""
    with open_store(path) as store:
        store.put("from", b"short")
        store.put("from", b"long" * 100)
    store = open_store(path, max_message_size=100)
    copies = [(message, "to", 0, b"") for message in store.read("from")]
    assert store.copy_many(copies) == 2
    assert [message.body for message in store.read("to")] == [b"short", b"long" * 100]
    with pytest.raises(InvalidMessageError, match="max_message_size"):
        store.put("to", b"long" * 100)


def test_a_full_disk_stores_none_of_them_and_takes_no_number(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    store = open_store(tmp_path / "s", fs=fs, segment_bytes=4096)
    store.put("to", b"first")
    for _ in range(3):
        store.put("from", b"x" * 1_000)
    copies = [(message, "to", n % 2, b"") for n, message in enumerate(store.read("from"))]
    end = store.max_offset
    fs.fail("allocate", errno.ENOSPC)
    with pytest.raises(StoreFullError):
        store.copy_many(copies)
    assert store.max_offset == end
    assert store.offsets("to") == (0, 1)
