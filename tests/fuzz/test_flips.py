"""Byte flips in every file of a small store that holds every kind of record.

Each outcome is one of three, and which one is checked:

    detected    `verify` names the file, or opening raises an error that names it
    repaired    recovery makes it whole again from the commitlog
    harmless    the byte means nothing; `HARMLESS` says why, and nothing else may go unnoticed

In profile `mqstore` no message ever comes back with another byte than was put; in profile `rocketmq`, whose checksum
covers bodies alone (format#checksum), no body does. Nothing but an MQStoreError (or LookupError) is ever raised.

Each file is flipped at every 101st byte, others for each file and profile; MQSTORE_FLIP_ALL=1 takes all.
"""

from __future__ import annotations

import os
import shutil
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mqstore import OutgoingMessage, Profile, SimulatedClock, StoreConfig
from mqstore.errors import MQStoreError
from tests.log.recovering import recover
from tests.log.support import open_in

STEP = 1 if os.environ.get("MQSTORE_FLIP_ALL") else 101
SIZES = {"segment_bytes": 1024, "consumequeue_units": 4, "index_slots": 4, "index_entries": 16}
LONG_TOPIC = "%RETRY%" + "g" * 130
PROFILES: tuple[Profile, ...] = ("mqstore", "rocketmq")

Record = tuple[str, int, int, bytes, tuple[tuple[str, str], ...]]
"""topic, queue id, offset, body, properties"""


@dataclass
class Made:
    path: Path
    profile: Profile
    messages: dict[int, Record] = field(default_factory=dict)
    """By physical offset, as they were read when the store was whole."""
    original: dict[str, bytes] = field(default_factory=dict)
    end: int = 0
    ends: list[int] = field(default_factory=list)
    """Where each message's record ends."""


def config() -> StoreConfig:
    return StoreConfig(clock=SimulatedClock(), **SIZES)


def read_all(store: Any) -> dict[int, Record]:
    found = {}
    for topic in store.topics():
        for queue in store.queues(topic):
            low, _ = store.offsets(*queue)
            for message in store.iter(topic, queue.queue_id, start=low):
                properties = tuple(sorted(message.stored_properties().items()))
                found[message.physical_offset] = (topic, queue.queue_id, message.offset, message.body, properties)
    return found


def make(path: Path, profile: Profile) -> Made:
    with open_in("rw", path, profile=profile, config=config()) as store:
        store.put("t", b"plain")
        store.put("t", b"tagged", tag="paid", keys=["k1", "k2"], unique_key="u1", properties={"colour": "blue"})
        store.put("t", b"", queue_id=1)
        store.put("orders", b"x" * 300, keys="big")
        store.put_many("orders", [b"one", OutgoingMessage(b"two", tag="a", flag=7), b"three"])
        packed = zlib.compress(b"compressed" * 20)
        store.append("t", 0, packed, sys_flag=0x301, properties={"TAGS": "z"})
        store.append("t", 1, b"from afar", born_host="[2001:db8::1]:5000", reconsume_times=3)
        store.append("SCHEDULE_TOPIC_XXXX", 2, b"later", properties={"DELAY": "3", "REAL_TOPIC": "t", "REAL_QID": "0"})
        store.append("t", 0, b"half", sys_flag=0x4, properties={"TRAN_MSG": "true"})
        store.append("t", 0, b"commit", sys_flag=0x8, prepared_transaction_offset=123)
        store.append(LONG_TOPIC, 0, b"version two")
        for n in range(6):
            store.put("t", b"filler %d" % n * 10, n % 2, keys=f"f{n}")
        store.dispatch()
    made = Made(path, profile)
    with open_in("r", path) as store:
        assert list(store.verify()) == []
        made.messages = read_all(store)
        made.end = store.parts.checkpoint.clean_end or 0
    for folder, _, names in os.walk(path):
        for name in names:
            full = os.path.join(folder, name)
            made.original[os.path.relpath(full, path)] = Path(full).read_bytes()
    return made


@pytest.fixture(scope="module", params=PROFILES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("flips") / "store", request.param)


def harmless(made: Made, name: str, position: int) -> str:
    """Why nobody need notice another byte there; "" when somebody must."""
    data = made.original[name]
    kind = name.split("/")[0]
    if name == "lock":
        return "says who holds the lock, to people; the locks themselves are the kernel's"
    if name == "commitlog/mqstore.profile":
        return "only its length keeps a Java broker out"
    if kind == "commitlog":
        start = int(name.split("/")[1])
        at = 0
        while at + 8 <= len(data):
            size, magic = struct.unpack_from(">iI", data, at)
            if magic == 0xCBD43194:
                return "filler of a BLANK" if position >= at + 8 else ""
            if not size:
                return ""
            if start + at <= start + position < start + at + size:
                return "no checksum there in profile rocketmq" if made.profile == "rocketmq" else ""
            at += size
    if kind == "consumequeue":
        size = struct.unpack_from(">i", data, position // 20 * 20 + 8)[0]
        return "a unit not in use yet: written over by the next" if size == 0 else ""
    if kind == "index":
        count = struct.unpack_from(">i", data, 36)[0]
        entry = (position - 40 - 4 * SIZES["index_slots"]) // 20
        if position >= 40 + 4 * SIZES["index_slots"] and (entry == 0 or entry >= max(count, 1)):
            return "an entry not in use"
        if count <= 1:
            return "a file without entries"
        return "its first entry's time counts from the file before, in RocketMQ" if entry == 1 else ""
    if kind == "checkpoint":
        if 40 <= position < 64 or position >= 100:
            return "not used"
        return "a Java broker may have written it" if made.profile == "rocketmq" else ""
    if name.startswith("mqstore.json"):
        line_start = data.rfind(b"\n", 0, position) + 1
        line = data[line_start : data.find(b"\n", position)]
        for key, why in MANIFEST_HARMLESS.items():
            if key in line:
                return why
        return "white space, or a key that nobody knows any more"
    return ""


MANIFEST_HARMLESS = {
    b"created_": "tells people",
    b"store_id": "tells stores apart, nothing more",
    b"timerlog_segment_bytes": "no timer log here",
    b"index_": "index files of another shape are reported, and rebuilt by recover",
    b"schema": "older than we are, or a newer one, which is refused",
    b"delay_levels": "another table, as a person may choose",
}
DETECTED_IN_MANIFEST = (
    b"commitlog_segment_bytes",
    b"consumequeue_segment_bytes",
    b"profile",
    b"checksum",
    b"group_hash",
)


def outcome(made: Made) -> tuple[str, dict[int, Record]]:
    """("detected" or "", the messages that can be read) of the store as it now is, opened for reading."""
    try:
        with open_in("r", made.path) as store:
            findings = list(store.verify())
            return ("detected" if findings else ""), read_all(store)
    except MQStoreError:
        return "detected", {}


def compare(made: Made, found: dict[int, Record], where: str) -> None:
    for physical, record in found.items():
        original = made.messages.get(physical)
        if made.profile == "mqstore":
            assert original == record, f"{where}: a changed message was served"
        elif original is not None:
            assert original[3] == record[3], f"{where}: a changed body was served"


def put_back(made: Made, name: str) -> None:
    (made.path / name).write_bytes(made.original[name])


def names(made: Made, kind: str) -> Iterator[str]:
    yield from sorted(name for name in made.original if name.startswith(kind))


@pytest.mark.parametrize("kind", ["commitlog", "consumequeue", "index", "checkpoint", "mqstore.json", "lock"])
def test_every_flipped_byte_is_detected_or_harmless(made: Made, kind: str) -> None:
    for k, name in enumerate(names(made, kind)):
        data = made.original[name]
        stop = min(len(data), 160) if kind == "checkpoint" else len(data)
        for position in range((k + len(made.profile)) % STEP, stop, STEP):
            changed = bytearray(data)
            changed[position] ^= 1 << position % 8
            (made.path / name).write_bytes(changed)
            where = f"{name} byte {position}"
            result, found = outcome(made)
            if result != "detected":
                assert harmless(made, name, position), f"{where}: unnoticed"
            compare(made, found, where)
            if result == "detected" and kind in ("consumequeue", "index", "checkpoint"):
                missing = set(made.messages) - set(found)
                assert kind == "consumequeue" or not missing, f"{where}: {len(missing)} messages hidden"
        put_back(made, name)


def test_a_manifest_with_other_sizes_is_refused_before_it_does_harm(made: Made) -> None:
    for line in made.original["mqstore.json"].splitlines():
        for key in DETECTED_IN_MANIFEST:
            if key in line and b": " in line:
                value = line.split(b": ")[1].rstrip(b",")
                other = b"20480" if value.isdigit() else b'"else"'
                changed = made.original["mqstore.json"].replace(line, line.replace(value, other))
                (made.path / "mqstore.json").write_bytes(changed)
                with pytest.raises(MQStoreError):
                    open_in("rw", made.path)
                with open_in("r", made.path) as store:  # reads by what the files show
                    assert store.manifest.derived
                    assert read_all(store).keys() == made.messages.keys()
    put_back(made, "mqstore.json")


def test_flipped_bytes_are_repaired_as_far_as_the_log_knows(made: Made, tmp_path: Path) -> None:
    """On a copy: recover, after which only lost records may be reported, and nothing else is missing."""
    places = [
        (name, position)
        for kind, step in (("commitlog", 397), ("consumequeue", 251), ("index", 251), ("checkpoint", 1000))
        for name in names(made, kind)
        for position in range(step // 2, len(made.original[name]), step)
    ]
    for number, (name, position) in enumerate(places):
        copy = tmp_path / f"copy-{number}"
        shutil.copytree(made.path, copy)
        data = bytearray(made.original[name])
        data[position] ^= 0xFF
        (copy / name).write_bytes(data)
        where = f"{name} byte {position}"
        reports = []
        if number % 2:
            with open_in("rw", copy, config=StoreConfig(clock=SimulatedClock())) as store:
                reports.append(store.recovery)
        reports.append(recover(copy, config=StoreConfig(clock=SimulatedClock())))
        with open_in("r", copy) as store:
            found = read_all(store)
            kinds = {finding.kind for finding in store.verify()}
        compare(made, found, where)
        lost = set(made.messages) - set(found)
        if name.startswith("commitlog"):
            assert len(lost) <= 1, f"{where}: {len(lost)} messages lost"
            assert kinds <= {"bad_record", "unsafe_name"}, f"{where}: {kinds}"
            told = any(report.findings or report.truncated for report in reports)
            assert not lost or told or made.profile == "rocketmq", f"{where}: lost in silence"
        else:
            assert not lost, where
            assert not kinds, f"{where}: {kinds}"
        shutil.rmtree(copy)
