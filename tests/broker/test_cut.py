"""What recovery has cut: listed message by message, and appended again, each message once and with all that it had."""

from __future__ import annotations

import json
import os
import random
import shutil
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from mqstore import Message
from mqstore.broker.admin.cut import contents, cut_files, restore
from mqstore.engine import Finding
from mqstore.errors import ConfigError, FormatError, StoreIOError
from mqstore.layout.hosts import encode_host
from mqstore.layout.properties import encode_properties
from tests.broker.cutsupport import SENT, Sent, all_of, copied, copy_of_log, cut_from, make, open_again, sent_as
from tests.faults import STEP, Crash, FaultyFileSystem
from tests.log.support import SEGMENT, files, kill, open_store
from tests.records import encode_record

BAD = 20
"""Index of the message at whose record the log is cut."""


@pytest.fixture(params=["mqstore", "rocketmq"])
def cut_store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A store whose messages from `BAD` on were cut; that one is damaged."""
    path = tmp_path / "store"
    cut_from(path, make(path, request.param)[BAD])
    return path


def read(path: Path) -> tuple[list[Message], list[Finding]]:
    with open_store(path, "r") as store:
        items = [item for file in cut_files(store) for item in contents(store, file)]
    return [item for item in items if isinstance(item, Message)], [item for item in items if isinstance(item, Finding)]


def test_all_cut_messages_come_back_in_their_order(cut_store: Path) -> None:
    before = {name: data for name, data in files(cut_store).items() if name.startswith("cut")}
    assert len(before) > 2
    with open_again(cut_store) as store:
        assert all_of(store) == SENT[:BAD]
        done = restore(store)
        assert all_of(store) == SENT[:BAD] + SENT[BAD + 1 :]
        assert done.queues == Counter((each.topic, each.queue_id) for each in SENT[BAD + 1 :])
        for (topic, queue_id), (first, end) in done.offsets.items():
            wanted = [each for each in SENT[BAD + 1 :] if (each.topic, each.queue_id) == (topic, queue_id)]
            assert [sent_as(message) for message in store.read(topic, queue_id, first, end - first)] == wanted
        assert list(store.verify()) == []
        assert sum(tally.appended for tally in done.files) == len(SENT) - BAD - 1
    after = {name: data for name, data in files(cut_store).items() if name.startswith("cut")}
    assert after == {name.replace("cut/", "cut/restored/"): data for name, data in before.items()}


def test_number_of_a_restore_keeps_its_name_on_disk(cut_store: Path) -> None:
    """A restore that an earlier version began is recognized by it, and not appended twice."""
    with open_again(cut_store) as store:
        restore(store)
    saved = json.loads((cut_store / "config" / "spark" / "txn.json").read_bytes())
    assert {app: entry["version"] for app, entry in saved["apps"].items()} == {"mqstore cut": 0}  # counted from 0


def test_messages_come_back_beside_new_ones_in_their_old_place(cut_store: Path) -> None:
    with open_again(cut_store) as store:
        new = [Sent("orders", 0, b"new %d" % n * 50) for n in range(20)]
        for each in new:
            store.append(each.topic, each.queue_id, each.body, **each.fields())
        restore(store)
        assert all_of(store) == SENT[:BAD] + new + SENT[BAD + 1 :]


def test_a_message_that_is_still_in_its_place_is_not_doubled(tmp_path: Path) -> None:
    path = tmp_path / "store"
    receipts = make(path)
    file = copy_of_log(path, 0, receipts[3].physical_offset)
    with open_again(path) as store:
        [tally] = restore(store).files
        assert (tally.messages, tally.in_place, tally.appended) == (3, 3, 0)
        assert all_of(store) == SENT
    assert (path / "cut/restored" / file.name).exists()


def test_record_in_two_files_is_restored_once(cut_store: Path) -> None:
    first = min((cut_store / "cut").iterdir())
    shutil.copy(first, f"{first}.2")
    with open_again(cut_store) as store:
        tallies = restore(store).files
        assert all_of(store) == SENT[:BAD] + SENT[BAD + 1 :]
    assert tallies[0].appended == tallies[1].repeated == tallies[0].messages > 0


def test_files_that_share_messages_are_not_restored_one_by_one(cut_store: Path) -> None:
    first = min((cut_store / "cut").iterdir())
    shutil.copy(first, f"{first}.2")
    with open_again(cut_store) as store:
        before = files(cut_store / "commitlog")
        with pytest.raises(ConfigError, match=rf"{first.name} and {first.name}\.2 have the same message"):
            restore(store, [first.name])
        assert files(cut_store / "commitlog") == before
        assert not (cut_store / "cut/staged").exists()


def test_only_named_files_are_restored(cut_store: Path) -> None:
    names = sorted(each.name for each in (cut_store / "cut").iterdir())
    with open_again(cut_store) as store:
        wanted = [sent_as(item) for item in contents(store, cut_files(store)[1]) if isinstance(item, Message)]
        restore(store, [names[1]])
        assert all_of(store) == SENT[:BAD] + wanted
        assert [file.name for file in cut_files(store)] == [names[0], *names[2:]]
        for name, why in (("nonesuch", "has no file"), (f"restored/{names[1]}", "was restored already")):
            with pytest.raises(ConfigError, match=why):
                restore(store, [name])
        restored = [
            sent_as(item)
            for file in cut_files(store, [f"restored/{names[1]}"])
            for item in contents(store, file)
            if isinstance(item, Message)
        ]
        assert restored == wanted


def test_a_cut_up_to_the_end_of_a_segment_has_no_bad_bytes_there(tmp_path: Path) -> None:
    path = tmp_path / "store"
    receipts = make(path)
    inside = [r for r in receipts if r.physical_offset < SEGMENT]
    blank = inside[-1].physical_offset + inside[-1].size
    copy_of_log(path, 0, blank + 8)
    messages, findings = read(path)
    assert ([m.physical_offset for m in messages], findings) == ([r.physical_offset for r in inside], [])


# --- what is not restored ---

ENGINE = ["rmq_sys_pop_log", "RMQ_SYS_TRANS_OP_HALF_TOPIC", "rmq_sys_REVIVE_LOG_c"]


def test_system_records_and_transactions_are_counted_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "store"
    sent = [
        Sent("orders", 0, b"damaged"),
        *(Sent(topic, 0, b"note") for topic in ENGINE),
        Sent("RMQ_SYS_TRANS_HALF_TOPIC", 0, b"half", {"REAL_TOPIC": "orders"}),
        Sent("orders", 0, b"prepared", sys_flag=4),
        Sent("rmq_sys_wheel_timer", 0, b"later", {"REAL_TOPIC": "orders", "TIMER_OUT_MS": "1700000000000"}),
        Sent("orders", 0, b"fine"),
    ]
    cut_from(path, make(path, sent=sent)[0])
    with open_again(path) as store:
        [tally] = restore(store).files
        assert all_of(store) == sent[-2:]
    assert (tally.messages, tally.appended, tally.bookkeeping) == (7, 2, 3)
    assert tally.refused == {"message of a transaction that was not committed": 2}
    [kept] = (path / "cut/restored").iterdir()
    assert b"half" in kept.read_bytes()


def test_a_topic_that_is_gone_comes_back_with_its_messages(tmp_path: Path) -> None:
    path = tmp_path / "store"
    cut_from(path, make(path)[0])
    with open_again(path) as store:
        assert store.topics() == []
        restore(store)
        assert set(store.topics()) == {each.topic for each in SENT[1:]}


def test_topic_with_fewer_queues_is_refused_before_a_write(cut_store: Path) -> None:
    (cut_store / "config").mkdir(exist_ok=True)
    entry = {"topicName": "orders", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
    (cut_store / "config/topics.json").write_text(json.dumps({"topicConfigTable": {"orders": entry}}))
    with open_again(cut_store) as store:
        before = files(cut_store)
        with pytest.raises(ConfigError, match=r"queue 1 of topic 'orders', which has 1 queues now.*alter --queues"):
            restore(store)
        assert files(cut_store) == before


# --- fields that belong to a place ---


def crafted(path: Path, start: int, **fields: object) -> None:
    """A file in `cut/` of one record at `start`."""
    record = encode_record(
        **{  # type: ignore[arg-type]
            "topic": "orders",
            "queue_id": 0,
            "queue_offset": 5,
            "physical_offset": start,
            "born_timestamp_ms": 1,
            "store_timestamp_ms": 2,
            **fields,
        }
    )
    (path / "cut").mkdir(exist_ok=True)
    (path / "cut" / f"{start:020d}-9").write_bytes(record)


def test_a_property_checksum_and_numbers_of_light_queues_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "store"
    make(path, "rocketmq", [])
    properties = encode_properties({"a": "b", "INNER_MULTI_QUEUE_OFFSET": "7", "z": "y"})
    crafted(path, 5 * SEGMENT, body=b"one", properties=properties, checksum="crc32-body", crc_tail=True)
    with open_again(path) as store:
        restore(store)
        [found] = store.read("orders")
        assert (found.body, found.stored_properties()) == (b"one", {"a": "b", "z": "y"})
        assert list(store.verify()) == []


def test_compressed_bodies_ipv6_hosts_and_long_topics_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "store"
    make(path, sent=[])
    topic = "%RETRY%" + "g" * 200
    crafted(
        path,
        3 * SEGMENT,
        topic=topic,
        body=zlib.compress(b"long " * 99),
        sys_flag=1,
        born_host=encode_host("[::1]:5"),
        store_host=encode_host("[::2]:6"),
        checksum="crc32c-record",
    )
    with open_again(path) as store:
        restore(store)
        [found] = store.read(topic)
        assert (found.body, found.born_host, found.store_host) == (b"long " * 99, "[::1]:5", "[::2]:6")
        assert list(store.verify()) == []


# --- killed ---


def test_a_restore_that_is_killed_anywhere_is_completed_once(tmp_path: Path) -> None:
    path = tmp_path / "store"
    cut_from(path, make(path, sent=SENT[:30])[BAD])
    wanted = SENT[:BAD] + SENT[BAD + 1 : 30]
    raw = sorted(each.read_bytes() for each in (path / "cut").iterdir())
    nth = 0
    for nth in range(1, 300, STEP):
        copy = copied(path, f"killed-{nth}")
        fs = FaultyFileSystem()
        store = open_again(copy, fs)
        fs.crash(nth, torn=nth % 2 == 1)
        try:
            restore(store)
        except Crash:
            fs.heal()
            kill(store)
        else:
            fs.heal()
            store.close()
            break
        with open_store(copy, "r") as reader:
            left = restore(reader, dry_run=True).queues.total()  # type: ignore[attr-defined]
        with open_again(copy) as store:
            assert len(all_of(store)) + left == len(wanted), nth
            restore(store)
            assert all_of(store) == wanted, nth
            assert list(store.verify()) == [], nth
        held = [Path(folder, name) for folder, _, names in os.walk(copy / "cut") for name in names]
        assert {each.parent for each in held} == {copy / "cut/restored"}, nth
        assert sorted(each.read_bytes() for each in held) == raw, nth
        shutil.rmtree(copy)
    assert nth > 15, "the run was too short to tell"


def test_a_damaged_note_of_a_killed_restore_is_refused_with_advice(cut_store: Path) -> None:
    (cut_store / "cut/restoring.json").write_text('{"number": 0, "files": ["../x"]}')
    with open_again(cut_store) as store, pytest.raises(FormatError, match=r"restoring\.json.*move those files"):
        restore(store)


def test_messages_cut_again_after_a_restore_come_back_again(tmp_path: Path) -> None:
    """What was in its place when a file was restored, and is cut later, is in a file of its own."""
    path = tmp_path / "store"
    receipts = make(path)
    copy_of_log(path, receipts[BAD + 1].physical_offset, receipts[BAD + 3].physical_offset)
    with open_again(path) as store:
        restore(store)
    cut_from(path, receipts[BAD])
    with open_again(path) as store:
        restore(store)
        assert all_of(store) == SENT[:BAD] + SENT[BAD + 1 :]


# --- files that are anybody's work ---


@pytest.mark.parametrize(
    ("name", "make_file"),
    [
        ("zeros", lambda file: file.write_bytes(bytes(5000))),
        ("random bytes", lambda file: file.write_bytes(random.Random(1).randbytes(9000))),
        ("empty", lambda file: file.write_bytes(b"")),
        ("magic words", lambda file: file.write_bytes(bytes.fromhex("0fffffffdaa320a7") * 600)),
    ],
)
@pytest.mark.parametrize("start", [0, 4096 * 7, (1 << 63) - 100, 10**20 - 1])
def test_a_file_without_messages_is_counted_and_left(
    tmp_path: Path, name: str, make_file: Callable[[Path], object], start: int
) -> None:
    path = tmp_path / "store"
    make(path)
    file = path / "cut" / f"{start:020d}-1"
    file.parent.mkdir()
    make_file(file)
    with open_again(path) as store:
        [tally] = restore(store).files
        assert (tally.messages, tally.other_bytes) == (0, file.stat().st_size)
        assert all_of(store) == SENT
    assert file.exists()


def test_a_file_with_the_wrong_offset_in_its_name_holds_no_message(cut_store: Path) -> None:
    first = min((cut_store / "cut").iterdir())
    wrong = first.rename(first.with_name(f"{int(first.name[:20]) + 1:020d}-3"))
    with open_again(cut_store) as store:
        tally = restore(store, [wrong.name]).files[0]
        assert (tally.messages, tally.other_bytes) == (0, wrong.stat().st_size)
        wrong.rename(first)
        restore(store)
        assert all_of(store) == SENT[:BAD] + SENT[BAD + 1 :]


@pytest.mark.parametrize("kind", ["link", "link to nothing", "fifo", "folder"])
def test_irregular_file_is_refused_unopened(cut_store: Path, tmp_path: Path, kind: str) -> None:
    place = cut_store / "cut" / f"{0:020d}-1"
    if kind == "link":
        (tmp_path / "elsewhere").write_bytes(b"precious")
        place.symlink_to(tmp_path / "elsewhere")
    elif kind == "link to nothing":
        place.symlink_to(tmp_path / "elsewhere")
    elif kind == "fifo":
        os.mkfifo(place)
    else:
        place.mkdir()
    with open_store(cut_store, "r") as store:
        file = cut_files(store)[0]
        with pytest.raises(StoreIOError, match=str(place)):
            list(contents(store, file))
        with pytest.raises(StoreIOError, match=str(place)):
            restore(store, dry_run=True)


def test_names_that_are_no_cut_files_are_left_alone(cut_store: Path) -> None:
    with open_store(cut_store, "r") as store:
        before = cut_files(store)
        for name in ("notes.txt", f"{0:020d}-1.tmp", f"{0:019d}-1", "\u0661" * 20 + "-1"):
            (cut_store / "cut" / name).write_bytes(b"x")
        assert cut_files(store) == before
