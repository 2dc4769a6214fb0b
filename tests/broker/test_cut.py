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
from unittest.mock import Mock

import pytest

import mqstore
from mqstore import Message
from mqstore.admin import cut_messages, restore_cut
from mqstore.engine import Finding
from mqstore.errors import ConfigError, FormatError, StoreIOError
from tests.broker.cutsupport import SENT, Sent, copy_of_log, crafted, cut_from, kept, make, open_again, sent_as
from tests.faults import STEP, Crash, FaultyFileSystem
from tests.log.support import SEGMENT, files, kill

BAD = 20
"""Index of the message at whose record the log is cut."""
RESTORED = SENT[:BAD] + SENT[BAD + 1 :]


@pytest.fixture(params=["mqstore", "rocketmq"])
def cut_store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A store whose messages from `BAD` on were cut; that one is damaged."""
    path = tmp_path / "store"
    cut_from(path, make(path, request.param)[BAD])
    return path


def read(path: Path, *names: str) -> tuple[list[Message], list[Finding]]:
    items = [item for _, found in cut_messages(path, names) for item in found]
    return [item for item in items if isinstance(item, Message)], [item for item in items if isinstance(item, Finding)]


def names_in(path: Path) -> list[str]:
    return sorted(each.name for each in (path / "cut").iterdir())


def test_all_cut_messages_come_back_in_their_order(cut_store: Path) -> None:
    before = {name: data for name, data in files(cut_store).items() if name.startswith("cut")}
    assert len(before) > 2
    assert kept(cut_store) == SENT[:BAD]
    done = restore_cut(cut_store)
    assert kept(cut_store) == RESTORED
    assert done.queues == Counter((each.topic, each.queue_id) for each in SENT[BAD + 1 :])
    with mqstore.open(cut_store, "r") as store:
        for (topic, queue_id), (first, end) in done.offsets.items():
            wanted = [each for each in SENT[BAD + 1 :] if (each.topic, each.queue_id) == (topic, queue_id)]
            assert [sent_as(message) for message in store.read(topic, queue_id, first, end - first)] == wanted
    assert sum(tally.appended for tally in done.files) == len(SENT) - BAD - 1
    after = {name: data for name, data in files(cut_store).items() if name.startswith("cut")}
    assert after == {name.replace("cut/", "cut/restored/"): data for name, data in before.items()}
    # A restore that an earlier version began is recognized by this name, and not appended twice.
    saved = json.loads((cut_store / "config" / "spark" / "txn.json").read_bytes())
    assert {app: entry["version"] for app, entry in saved["apps"].items()} == {"mqstore cut": 0}  # counted from 0


def test_messages_come_back_beside_new_ones_in_their_old_place(cut_store: Path) -> None:
    new = [Sent("orders", 0, b"new %d" % n * 50) for n in range(20)]
    with open_again(cut_store) as store:
        for each in new:
            store.append(each.topic, each.queue_id, each.body, **each.fields())
    restore_cut(cut_store)
    assert kept(cut_store) == SENT[:BAD] + new + SENT[BAD + 1 :]


def test_a_message_that_is_still_in_its_place_is_not_doubled(tmp_path: Path) -> None:
    path = tmp_path / "store"
    receipts = make(path)
    file = copy_of_log(path, 0, receipts[3].physical_offset)
    [tally] = restore_cut(path).files
    assert (tally.messages, tally.in_place, tally.appended) == (3, 3, 0)
    assert kept(path) == SENT
    assert (path / "cut/restored" / file.name).exists()


def test_record_in_two_files_is_restored_once(cut_store: Path) -> None:
    first = min((cut_store / "cut").iterdir())
    shutil.copy(first, f"{first}.2")
    before = files(cut_store)
    with pytest.raises(ConfigError, match=rf"{first.name} and {first.name}\.2 have the same message"):
        restore_cut(cut_store, [first.name])
    assert {name: data for name, data in files(cut_store).items() if name in before} | before == before
    assert not (cut_store / "cut/staged").exists()
    tallies = restore_cut(cut_store).files
    assert kept(cut_store) == RESTORED
    assert tallies[0].appended == tallies[1].repeated == tallies[0].messages > 0


def test_only_named_files_are_restored(cut_store: Path) -> None:
    names = names_in(cut_store)
    wanted = [sent_as(message) for message in read(cut_store, names[1])[0]]
    restore_cut(cut_store, [names[1]])
    assert kept(cut_store) == SENT[:BAD] + wanted
    assert [file.name for file, _ in cut_messages(cut_store)] == [names[0], *names[2:]]
    for name, why in (("nonesuch", "has no file"), (f"restored/{names[1]}", "was restored already")):
        with pytest.raises(ConfigError, match=why):
            restore_cut(cut_store, [name])
    assert [sent_as(message) for message in read(cut_store, f"restored/{names[1]}")[0]] == wanted


def test_a_cut_up_to_the_end_of_a_segment_has_no_bad_bytes_there(tmp_path: Path) -> None:
    path = tmp_path / "store"
    inside = [r for r in make(path) if r.physical_offset < SEGMENT]
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
    [tally] = restore_cut(path).files
    assert kept(path) == sent[-2:]  # also of topics that were gone
    assert (tally.messages, tally.appended, tally.bookkeeping) == (7, 2, 3)
    assert tally.refused == {"message of a transaction that was not committed": 2}
    [file] = (path / "cut/restored").iterdir()
    assert b"half" in file.read_bytes()


def test_topic_with_fewer_queues_is_refused_before_a_write(cut_store: Path) -> None:
    (cut_store / "config").mkdir(exist_ok=True)
    entry = {"topicName": "orders", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
    (cut_store / "config/topics.json").write_text(json.dumps({"topicConfigTable": {"orders": entry}}))
    before = files(cut_store / "commitlog")
    with pytest.raises(ConfigError, match=r"queue 1 of topic 'orders', which has 1 queues now.*alter --queues"):
        restore_cut(cut_store)
    assert files(cut_store / "commitlog") == before


# --- fields that belong to a place ---


def test_a_property_checksum_and_numbers_of_light_queues_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "store"
    make(path, "rocketmq", [])
    properties = b"a\1b\2INNER_MULTI_QUEUE_OFFSET\x017\2z\1y\2"
    crafted(path, 5 * SEGMENT, body=b"one", properties=properties, checksum="crc32-body", crc_tail=True)
    restore_cut(path)
    [found] = kept(path)
    assert (found.body, found.properties) == (b"one", {"a": "b", "z": "y"})


def test_compressed_bodies_ipv6_hosts_and_long_topics_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "store"
    make(path, sent=[])
    topic = "%RETRY%" + "g" * 200
    hosts = {name: bytes([*[0] * 15, n, *[0] * 3, n + 4]) for n, name in ((1, "born_host"), (2, "store_host"))}
    stored = zlib.compress(b"long " * 99)
    crafted(path, 3 * SEGMENT, topic=topic, body=stored, sys_flag=1, checksum="crc32c-record", **hosts)
    restore_cut(path)
    assert len(kept(path)) == 1
    with mqstore.open(path, "r") as store:
        [found] = store.read(topic, 0, 0)
        assert (found.body, found.born_host, found.store_host) == (b"long " * 99, "[::1]:5", "[::2]:6")


# --- killed ---


def test_a_restore_that_is_killed_anywhere_is_completed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store"
    cut_from(path, make(path, sent=SENT[:30])[BAD])
    wanted = SENT[:BAD] + SENT[BAD + 1 : 30]
    raw = sorted(each.read_bytes() for each in (path / "cut").iterdir())
    nth = 0
    for nth in range(1, 300, STEP):
        copy = Path(shutil.copytree(path, path.with_name(f"killed-{nth}")))
        fs = FaultyFileSystem()
        store = open_again(copy, fs)
        fs.crash(nth, torn=nth % 2 == 1)
        with monkeypatch.context() as patched:
            patched.setattr("mqstore.broker.admin.salvage.cut.MessageStore", Mock(return_value=store))
            try:
                restore_cut(copy)
            except Crash:
                kill(store)
            else:
                break
            finally:
                fs.heal()
        left = restore_cut(copy, dry_run=True).queues.total()  # type: ignore[attr-defined]
        open_again(copy).close()  # recovers it
        assert len(kept(copy)) + left == len(wanted), nth
        restore_cut(copy)
        assert kept(copy) == wanted, nth
        held = [Path(folder, name) for folder, _, names in os.walk(copy / "cut") for name in names]
        assert {each.parent for each in held} == {copy / "cut/restored"}, nth
        assert sorted(each.read_bytes() for each in held) == raw, nth
        shutil.rmtree(copy)
    assert nth > 15, "the run was too short to tell"


def test_a_damaged_note_of_a_killed_restore_is_refused_with_advice(cut_store: Path) -> None:
    (cut_store / "cut/restoring.json").write_text('{"number": 0, "files": ["../x"]}')
    with pytest.raises(FormatError, match=r"restoring\.json.*move those files"):
        restore_cut(cut_store)


def test_messages_cut_again_after_a_restore_come_back_again(tmp_path: Path) -> None:
    """What was in its place when a file was restored, and is cut later, is in a file of its own."""
    path = tmp_path / "store"
    receipts = make(path)
    copy_of_log(path, receipts[BAD + 1].physical_offset, receipts[BAD + 3].physical_offset)
    restore_cut(path)
    cut_from(path, receipts[BAD])
    restore_cut(path)
    assert kept(path) == RESTORED


# --- files that are anybody's work ---


@pytest.mark.parametrize(
    "content",
    [bytes(5000), random.Random(1).randbytes(9000), b"", bytes.fromhex("0fffffffdaa320a7") * 600],
    ids=["zeros", "random bytes", "empty", "magic words"],
)
@pytest.mark.parametrize("start", [0, 4096 * 7, (1 << 63) - 100, 10**20 - 1])
def test_a_file_without_messages_is_counted_and_left(tmp_path: Path, content: bytes, start: int) -> None:
    path = tmp_path / "store"
    make(path, sent=SENT[:3])
    file = path / "cut" / f"{start:020d}-1"
    file.parent.mkdir()
    file.write_bytes(content)
    [tally] = restore_cut(path).files
    assert (tally.messages, tally.other_bytes) == (0, len(content))
    assert kept(path) == SENT[:3]
    assert file.exists()


def test_a_file_with_the_wrong_offset_in_its_name_holds_no_message(cut_store: Path) -> None:
    first = min((cut_store / "cut").iterdir())
    wrong = first.rename(first.with_name(f"{int(first.name[:20]) + 1:020d}-3"))
    tally = restore_cut(cut_store, [wrong.name]).files[0]
    assert (tally.messages, tally.other_bytes) == (0, wrong.stat().st_size)
    wrong.rename(first)
    restore_cut(cut_store)
    assert kept(cut_store) == RESTORED


@pytest.mark.parametrize(
    "make_file",
    [
        lambda place, elsewhere: place.symlink_to(elsewhere),
        lambda place, elsewhere: place.symlink_to("nothing"),
        lambda place, elsewhere: os.mkfifo(place),
        lambda place, elsewhere: place.mkdir(),
    ],
    ids=["link", "link to nothing", "fifo", "folder"],
)
def test_irregular_file_is_refused_unopened(
    cut_store: Path, tmp_path: Path, make_file: Callable[[Path, Path], object]
) -> None:
    (tmp_path / "elsewhere").write_bytes(b"precious")
    place = cut_store / "cut" / f"{0:020d}-1"
    make_file(place, tmp_path / "elsewhere")
    [finding] = read(cut_store, place.name)[1]
    assert finding.file == f"cut/{place.name}"
    with pytest.raises(StoreIOError, match=str(place)):
        restore_cut(cut_store, dry_run=True)


def test_names_that_are_no_cut_files_are_left_alone(cut_store: Path) -> None:
    before = names_in(cut_store)
    for name in ("notes.txt", f"{0:020d}-1.tmp", f"{0:019d}-1", "\u0661" * 20 + "-1"):
        (cut_store / "cut" / name).write_bytes(b"x")
    assert [file.name for file, _ in cut_messages(cut_store)] == before
