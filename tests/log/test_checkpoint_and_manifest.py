"""What a directory is taken for, what manifest and checkpoint say, what opening costs (format#manifest)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mqstore import Retention, SimulatedClock, StoreConfig
from mqstore.errors import ConfigError, CorruptStoreError, InvalidMessageError, NotAStoreError, UnsupportedStoreError
from tests.conftest import GoldenStore
from tests.faults import Crash, FaultyFileSystem, deaths
from tests.log.recovering import checkpoint_of, rebuild_config, recover, write_checkpoint
from tests.log.support import SEGMENT, Unsynced, files, open_in, open_store

MODES: list[Any] = ["r", "rw"]


def tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


# -- what a directory is taken for -----------------------------------------------------------------------------------

NO_STORE_YET: dict[str, Callable[[Path], object]] = {
    "absent": lambda root: None,
    "absent, with parents": lambda root: None,
    "empty": lambda root: root.mkdir(),
    "lock": lambda root: (root.mkdir(), (root / "lock").write_bytes(b"lock")),
    "tmp": lambda root: ((root / "tmp").mkdir(parents=True), (root / "tmp" / "left").write_bytes(b"x")),
    "inbox": lambda root: (root / "inbox").mkdir(parents=True),
    "staging": lambda root: (root / "_staging").mkdir(parents=True),
    "manifest in the making": lambda root: (root.mkdir(), (root / "mqstore.json.tmp").write_bytes(b"{")),
}


@pytest.mark.parametrize("found", NO_STORE_YET)
def test_missing_store_is_created_only_on_request(tmp_path: Path, found: str) -> None:
    root = tmp_path / "a" / "b" / "s" if "parents" in found else tmp_path / "s"
    NO_STORE_YET[found](root)
    before = tree(tmp_path)
    for refused in (lambda: open_in("r", root), lambda: open_in("rw", root, create=False)):
        with pytest.raises(NotAStoreError):
            refused()
        assert tree(tmp_path) == before
    with open_store(root) as store:
        assert (store.manifest.profile, store.put("t", b"x").offset) == ("mqstore", 0)


@pytest.mark.parametrize(
    "name", ["notes.txt", "config", "consumequeue", "index", "checkpoint", "mqstore.json.corrupt-1", ""]
)
@pytest.mark.parametrize("mode", MODES)
def test_anything_else_is_no_store_and_is_left_alone(tmp_path: Path, mode: Any, name: str) -> None:
    path = tmp_path / "s" / name  # without a name `s` itself is a file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"mine")
    with pytest.raises(NotAStoreError, match=name or "file"):
        open_in(mode, tmp_path / "s")
    assert files(tmp_path) == {f"s/{name}".rstrip("/"): b"mine"}


@pytest.mark.parametrize("there", ["stray", "far stray", "first and stray", "hole"])
def test_the_size_of_segments_is_what_most_of_the_files_say(golden: Callable[[str], GoldenStore], there: str) -> None:
    """The least distance of two names was taken for it: a file that did not belong there made segments of one byte,
    two files with a hole between them segments of twice the size, and opening for writing cut the log by it."""
    root = golden("rolled").path
    segments = sorted((root / "commitlog").glob("0*"))
    size = segments[0].stat().st_size
    kept = {"hole": [0, 2 * size], "first and stray": [0]}.get(there, [int(file.name) for file in segments])
    for file in segments:
        if int(file.name) not in kept:
            file.unlink()
    if "stray" in there:
        (root / "commitlog" / f"{10**20 - 1 if 'far' in there else 1:020d}").write_bytes(b"x" * 40)
    before = {start: (root / "commitlog" / f"{start:020d}").read_bytes() for start in kept}
    with open_in("r", root) as store:
        assert store.manifest.commitlog_segment_bytes == size
    open_in("rw", root).close()
    assert {start: (root / "commitlog" / f"{start:020d}").read_bytes() for start in kept} == before


def spoil(manifest: Path, damage: str, content: dict[str, Any]) -> None:
    if damage == "missing":
        manifest.unlink()
    else:
        manifest.write_text(
            {
                "empty": "",
                "garbage": "\0" * 400,
                "other JSON": '{"hello": 1}',
                "no JSON object": "[1",
                "a key missing": json.dumps(content),
            }[damage]
        )


@pytest.mark.parametrize("damage", ["missing", "empty", "garbage", "no JSON object"])
def test_a_writer_restores_the_manifest_by_backup(path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """As of every JSON file (format#json-save). The damaged one stayed, unsaid, and its backup was the only copy."""
    open_store(path).close()
    manifest = path / "mqstore.json"
    good = manifest.read_bytes()
    (path / "mqstore.json.bak").write_bytes(good)
    spoil(manifest, damage, json.loads(good))
    spoilt = None if damage == "missing" else manifest.read_bytes()
    with open_store(path, "r") as store:  # who only reads changes nothing
        assert store.manifest.profile == "mqstore"
        assert (manifest.read_bytes() if manifest.exists() else None) == spoilt

    with open_store(path) as store:
        assert [(finding.kind, finding.file) for finding in store.recovery.findings] == [("bad_json", "mqstore.json")]
        assert store.recovery.changed

    assert "mqstore.json.bak was taken" in caplog.text
    assert manifest.read_bytes() == (path / "mqstore.json.bak").read_bytes() == good
    aside = [each.read_bytes() for each in path.glob("mqstore.json.corrupt-*")]
    assert aside == ([] if spoilt is None else [spoilt])
    with open_store(path) as store:
        assert (store.recovery.findings, store.recovery.changed) == ([], False)


@pytest.mark.parametrize(
    ("damage", "good_backup"),
    [
        *((damage, False) for damage in ("empty", "garbage", "other JSON", "no JSON object", "a key missing")),
        *((damage, True) for damage in ("other JSON", "a key missing")),  # does not replace one that is JSON
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_a_bad_manifest_names_the_mending_command(path: Path, mode: Any, damage: str, good_backup: bool) -> None:
    open_store(path).close()
    content = json.loads((path / "mqstore.json").read_text())
    shutil.copy(path / "mqstore.json", path / "mqstore.json.bak")
    del content["commitlog_segment_bytes"]
    for name in ("mqstore.json", "mqstore.json.bak")[: 1 if good_backup else 2]:
        spoil(path / name, damage, content)
    with pytest.raises(CorruptStoreError, match=r"recover .* --rebuild config") as caught:
        open_store(path, mode)
    assert caught.value.repair is not None


@pytest.mark.parametrize("keep_guard", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_a_lost_manifest_is_noticed_by_guard_or_record(path: Path, mode: Any, keep_guard: bool) -> None:
    with open_store(path) as store:
        store.put("t", b"x")
    for name in ("mqstore.json", "mqstore.json.bak"):
        (path / name).unlink(missing_ok=True)
    if not keep_guard:
        (path / "commitlog" / "mqstore.profile").unlink()
    if mode == "r":
        with open_store(path, mode) as store:
            assert "--rebuild config" in store.manifest.derived
        return
    with pytest.raises(CorruptStoreError, match=r"recover .* --rebuild config"):
        open_store(path, mode)


@pytest.mark.parametrize("profile", ["mqstore", "rocketmq"])
@pytest.mark.parametrize("damaged", [True, False])
def test_bad_first_record_does_not_hide_the_profile(path: Path, profile: Any, damaged: bool) -> None:
    """Of a store of ours that had lost its manifest it made a Java broker's, and of one of theirs ours: by the wrong
    checksum no record was good, and opening for writing zeroed the whole log."""
    with open_store(path, profile=profile) as store:
        store.put("t", b"")  # which the other checksum knows nothing against
        for n in range(1, 20):
            store.put("t", b"%d" % n)
    segment = path / "commitlog" / f"{0:020d}"
    data = bytearray(segment.read_bytes())
    data[87] ^= damaged  # the length of the body
    segment.write_bytes(data)
    for name in ("mqstore.json", "mqstore.json.bak"):
        (path / name).write_text("{}")
    if profile == "mqstore":
        (path / "mqstore.json").unlink()
        (path / "mqstore.json.bak").unlink(missing_ok=True)
        (path / "commitlog" / "mqstore.profile").unlink()
        with pytest.raises(CorruptStoreError, match=r"recover .* --rebuild config"):
            open_store(path)
    assert rebuild_config(path)
    with open_in("rw", path) as store:
        assert store.manifest.profile == profile
        assert [m.offset for m in store.iter("t", 0)] == [*range(damaged, 20)]


@pytest.mark.parametrize(
    "change", [{"schema": 2}, {"schema": 1 << 40}, {"requires": ["tape"]}, {"schema": 9, "format": "later"}]
)
@pytest.mark.parametrize("mode", MODES)
def test_a_newer_store_is_refused_untouched(path: Path, mode: Any, change: dict[str, Any]) -> None:
    with open_store(path) as store:
        store.put("t", b"x")
    content = json.loads((path / "mqstore.json").read_text()) | change
    (path / "mqstore.json").write_text(json.dumps(content))
    before, names = files(path), tree(path)
    with pytest.raises(UnsupportedStoreError, match="newer mqstore") as caught:
        open_store(path, mode)
    assert (caught.value.schema, list(caught.value.requires)) == (content["schema"], content["requires"])
    assert (files(path), tree(path)) == (before, names)


def test_unknown_keys_are_kept_when_the_manifest_is_rewritten(path: Path) -> None:
    open_store(path).close()
    content = json.loads((path / "mqstore.json").read_text()) | {"later": {"a": [1, None, "ü"]}, "created_by": "x 9"}
    (path / "mqstore.json").write_text(json.dumps(content))
    open_store(path).close()
    assert json.loads((path / "mqstore.json").read_text()) == content
    open_store(path, delay_levels="1s 2h").close()
    assert json.loads((path / "mqstore.json").read_text()) == content | {"delay_levels": "1s 2h"}
    with open_store(path) as store:  # and stays so without being asked for again
        assert store.manifest.delay_levels == "1s 2h"


def limit_of(path: Path, **options: Any) -> int:
    """Return the size of the largest body that the store takes, by trying."""
    with open_store(path, **options) as store:
        limit: int = store.manifest.max_message_size
        store.put("t", bytes(limit))
        with pytest.raises(InvalidMessageError, match=f"max_message_size is {limit}$"):
            store.put("t", bytes(limit + 1))
    return limit


def test_max_message_size_is_remembered(path: Path) -> None:
    """A message that one program could put was refused to the next one, which did not know the option."""
    assert (limit_of(path, max_message_size=3000), limit_of(path)) == (3000, 3000)
    assert limit_of(path, max_message_size=100) == 100  # the last one that was given, as with delay levels
    assert limit_of(path) == 100
    with open_store(path, "r") as store:
        assert store.manifest.max_message_size == 100


def test_store_of_an_earlier_version_takes_four_mebibytes(path: Path) -> None:
    """Opening it does not change its manifest, unless a size is given."""
    open_store(path).close()
    content = json.loads((path / "mqstore.json").read_text())
    del content["max_message_size"]
    (path / "mqstore.json").write_text(json.dumps(content))
    with open_store(path) as store:
        assert store.manifest.max_message_size == 4 << 20
    assert (json.loads((path / "mqstore.json").read_text()), limit_of(path, max_message_size=0)) == (content, 0)
    assert limit_of(path) == 0


def test_rocketmq_store_takes_the_size_that_is_given(path: Path) -> None:
    """It has no manifest."""
    for size in (1000, 2000):
        (path / "mqstore.json").unlink(missing_ok=True)
        with open_store(path, profile="rocketmq", max_message_size=size) as store:
            store.put("t", bytes(size))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [
        {"segment_bytes": 2 * SEGMENT},
        {"consumequeue_units": 9},
        {"index_slots": 17},
        {"index_entries": 33},
        {"group_hash": "siphash24"},
    ],
)
def test_sizes_of_creation_cannot_change(path: Path, mode: Any, options: dict[str, Any]) -> None:
    open_store(path).close()
    before = files(path)
    with pytest.raises(ConfigError, match=next(iter(options))):
        open_store(path, mode, **options)
    assert files(path) == before
    same = {"segment_bytes": SEGMENT, "consumequeue_units": 8, "index_slots": 16, "index_entries": 32}
    open_store(path, mode, **same).close()


@pytest.mark.parametrize(("made", "asked"), [("mqstore", "rocketmq"), ("rocketmq", "mqstore")])
def test_the_profile_is_chosen_once(tmp_path: Path, made: Any, asked: Any) -> None:
    with open_store(tmp_path / "s", profile=made) as store:
        store.put("t", b"x")
    with pytest.raises(ConfigError, match="profile"):
        open_store(tmp_path / "s", profile=asked)
    with open_store(tmp_path / "s", profile=made) as store:
        assert store.read("t")[0].body == b"x"
    assert (tmp_path / "s" / "commitlog" / "mqstore.profile").exists() == (made == "mqstore")


BAD_OPTIONS: list[dict[str, Any]] = [
    {"segment_bytes": 1023}, {"segment_bytes": 1 << 31}, {"consumequeue_units": 0}, {"consumequeue_units": 1 << 30},
    {"index_slots": 0}, {"index_entries": 1}, {"max_message_size": -1}, {"flush_interval": -1},
    {"flush_timeout": float("nan")},
    {"group_hash": "md5"}, {"delay_levels": ""}, {"delay_levels": "1s 5x"}, {"max_mappings": 3},
]  # fmt: skip


@pytest.mark.parametrize("options", BAD_OPTIONS)
def test_options_out_of_range(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        StoreConfig(**options)
    for wrong in ({"age": -1}, {"max_bytes": -1}, {"disk_ratio": 0}, {"disk_ratio": 1.1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Retention(**wrong)  # type: ignore[arg-type]  # wrong on purpose
    for arguments in ({"durability": "disk"}, {"profile": "kafka"}, {"lock_timeout": -1}):
        with pytest.raises(ConfigError):
            open_in("rw", tmp_path / "s", **arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "s" / "mqstore.json").exists()


def test_creation_killed_at_any_change_can_be_done_again(tmp_path: Path) -> None:
    """A kill between `abort` and the manifest once left a directory that no opening would take."""
    for n, fs in deaths(1):
        root = tmp_path / str(n)
        with contextlib.suppress(Crash):
            open_store(root, fs=fs).close()
        with open_store(root) as store:
            assert (store.put("t", b"x").offset, list(store.verify())) == (0, [])
        assert (root / "commitlog" / "mqstore.profile").stat().st_size > 0
    assert n > 15


# -- the checkpoint --------------------------------------------------------------------------------------------------


def test_the_checkpoint_of_each_moment(tmp_path: Path) -> None:
    clock = SimulatedClock(1_700_000_000_000)
    path = tmp_path / "s" / "checkpoint"
    store = open_store(tmp_path / "s", clock=clock)
    opened = checkpoint_of(path.parent)
    assert (opened.flushed, opened.dispatched, opened.clean_end, path.stat().st_size) == (0, 0, -1, 4096)
    receipt = store.put("t", b"x")
    end = receipt.physical_offset + receipt.size
    for _ in range(3):  # the interval flush, the thorough one, and the checkpoint of what is durable then
        store.run_once(clock.monotonic_ms())
        clock.advance(20_000)
    running = checkpoint_of(path.parent)
    assert (running.flushed, running.clean_end) == (end, -1)
    assert running.dispatched in (0, end)
    last = store.put("t", b"y")
    store.close()
    closed = checkpoint_of(path.parent)
    end = last.physical_offset + last.size
    assert (closed.flushed, closed.dispatched, closed.clean_end) == (end, end, end)
    assert closed.confirm_physical_offset == last.physical_offset
    assert (closed.physic_msg_timestamp_ms, closed.logics_msg_timestamp_ms) == (1_700_000_060_000,) * 2
    assert closed.master_flushed_offset == 0
    assert struct.unpack_from(">i", path.read_bytes(), 64) == (0x4D515331,)
    assert not (tmp_path / "s" / "abort").exists()


@pytest.mark.parametrize("profile", ["mqstore", "rocketmq"])
def test_the_time_of_the_checkpoint_never_leads_what_is_durable(tmp_path: Path, profile: Any) -> None:
    clock = SimulatedClock(1_700_000_000_000)
    with open_store(tmp_path / "s", clock=clock, profile=profile) as store:
        for i in range(50):
            clock.advance(1000)
            store.put("t", bytes(700))
            if i % 3 == 0:
                store.dispatch()
            store.run_once(clock.monotonic_ms())
            point = checkpoint_of(tmp_path / "s")
            times = {m.store_timestamp_ms: m for m in store.iter("t", 0)}
            assert point.flushed is not None
            stamp = point.physic_msg_timestamp_ms
            assert stamp == 0 or times[stamp].physical_offset + times[stamp].size <= point.flushed
            assert point.dispatched is not None
            assert point.dispatched <= point.flushed <= store.max_offset


def test_checkpoint_has_no_time_of_undispatched_records(tmp_path: Path) -> None:
    """The newest time was told before the position moved: who looked in between had a time beyond both watermarks."""
    clock = SimulatedClock(1_700_000_000_000)
    with open_store(tmp_path / "s", clock=clock) as store:
        store.put("t", b"0", durability="flush")
        store.dispatch()
        store.on_growth.append(lambda *_: store.background.save_checkpoint())
        clock.advance(5000)
        store.put("t", b"1")
        store.dispatch()
        point = checkpoint_of(tmp_path / "s")
        assert point.physic_msg_timestamp_ms == point.logics_msg_timestamp_ms == 1_700_000_000_000


def test_the_index_time_moves_only_with_a_sync_of_the_index(tmp_path: Path) -> None:
    """A broker that believes it keeps the file; it moved as soon as a file was full, synced or not."""
    clock = SimulatedClock(1_700_000_000_000)
    with open_store(tmp_path / "s", clock=clock) as store:
        store.background.save_checkpoint()
        for i in range(100):  # more queues than are synced every second
            store.put("t", b"", i, keys="k")
        store.flush()
        store.dispatch()
        assert store.index.full_end_timestamp_ms() > 0

        store.background.save_checkpoint()
        assert checkpoint_of(tmp_path / "s").index_msg_timestamp_ms == 0
        clock.advance(10_000)
        store.background.save_checkpoint()
        assert checkpoint_of(tmp_path / "s").index_msg_timestamp_ms == 1_700_000_000_000


def test_a_clean_opening_reads_nothing_and_a_second_close_is_as_clean(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        store.put_many("t", [bytes(500)] * 40)
    before = files(tmp_path / "s")
    for _ in range(3):
        with open_store(tmp_path / "s") as store:
            assert store.clean_shutdown is True
            assert (store.recovery.scanned_from, store.recovery.changed, store.recovery.messages) == (None, False, 0)
    after = files(tmp_path / "s")
    assert {k: v for k, v in after.items() if k != "lock"} == {k: v for k, v in before.items() if k != "lock"}


def test_a_store_closed_right_behind_a_roll_or_empty_is_clean(tmp_path: Path) -> None:
    open_store(tmp_path / "empty").close()
    with open_store(tmp_path / "empty") as store:
        assert store.recovery.scanned_from is None
    with open_store(tmp_path / "full") as store:
        store.put("t", bytes(SEGMENT - 8 - 93))
        assert store.put("t", bytes(SEGMENT - 8 - 93)).physical_offset == SEGMENT
    with open_store(tmp_path / "full") as store:
        assert store.recovery.scanned_from is None
        assert store.put("t", b"x").physical_offset == 2 * SEGMENT


@pytest.mark.parametrize(
    "lie", ["clean_end too low", "clean_end too high", "confirm elsewhere", "no record at confirm"]
)
def test_a_checkpoint_that_the_log_contradicts_is_not_believed(tmp_path: Path, lie: str) -> None:
    with open_store(tmp_path / "s") as store:
        receipts = store.put_many("t", [b"%d" % i for i in range(20)])
    path = tmp_path / "s" / "checkpoint"
    point = checkpoint_of(path.parent)
    assert point.clean_end is not None
    changed = {
        "clean_end too low": replace(point, clean_end=receipts[10].physical_offset),
        "clean_end too high": replace(point, clean_end=point.clean_end + 100),
        "confirm elsewhere": replace(point, confirm_physical_offset=receipts[3].physical_offset),
        "no record at confirm": replace(point, confirm_physical_offset=receipts[3].physical_offset + 1),
    }[lie]
    write_checkpoint(path.parent, changed)
    with open_store(tmp_path / "s") as store:
        assert store.recovery.scanned_from == 0
        assert [m.body for m in store.read("t")] == [b"%d" % i for i in range(20)]
        assert store.put("t", b"next").offset == 20


# -- what opening costs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_opening_does_not_read_old_segments_however_many(tmp_path: Path, mode: Any) -> None:
    """Bytes read and files mapped by a clean opening, for 4 and for 60 segments: the same."""
    costs = []
    for count in (4, 60):
        root = tmp_path / str(count)
        with open_store(root, consumequeue_units=8 * count, index_entries=256 * count) as store:
            for _ in range(count * 4):
                store.put("t", bytes(900), keys="k")
            assert len(list((root / "commitlog").iterdir())) == count + 1  # and the guard
        fs = FaultyFileSystem()
        with open_store(root, mode, fs=fs) as store:
            maps = [call for call in fs.calls if call.operation == "map"]
            reads = [call for call in fs.calls if call.operation == "pread"]
            last = f"{(count - 1) * SEGMENT:020d}"
            assert {call.path.rsplit("/", 1)[1] for call in maps if "commitlog" in call.path} <= {last}
            costs.append((len(maps), len(reads) - count.bit_length()))
            assert store.offsets("t") == (0, count * 4)
    assert costs[0][0] == costs[1][0]
    assert abs(costs[1][1] - costs[0][1]) <= 8  # a search in the queue's last file takes a step a doubling


# -- a manifest that says what cannot be -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, bad) for name in ("created_ms", "timerlog_segment_bytes") for bad in (None, "x", [], 1.5, True)),
        *(("timerlog_segment_bytes", bad) for bad in (0, -1, 67, 1 << 63)),
        *(("delay_levels", bad) for bad in ("", "x", "1s 2y")),
        *(("max_message_size", bad) for bad in (None, "x", -1, 1 << 31)),
        ("schema", -1),
        ("schema", 0),
    ],
)
def test_a_field_that_cannot_be_is_named_and_mended_and_the_others_stay(tmp_path: Path, field: str, value: Any) -> None:
    """They were a traceback in every command, the one that mends included."""
    with open_store(tmp_path / "s", group_hash="siphash24", delay_levels="1s 2s") as store:
        receipt = store.put("t", b"x")
    path = tmp_path / "s" / "mqstore.json"
    (tmp_path / "s" / "mqstore.json.bak").unlink(missing_ok=True)
    before = json.loads(path.read_text())
    path.write_text(json.dumps({**before, field: value}))
    with pytest.raises(CorruptStoreError, match=field) as caught:
        open_store(tmp_path / "s")
    assert "--rebuild config" in str(caught.value)
    with open_store(tmp_path / "s", "r") as reader:
        assert field in reader.manifest.derived
    (line,) = rebuild_config(tmp_path / "s")
    assert (f"{field} start from defaults" in line) == (field in ("delay_levels", "max_message_size"))
    after = json.loads(path.read_text())
    assert {name: after[name] for name in ("store_id", "group_hash", "commitlog_segment_bytes")} == {
        name: before[name] for name in ("store_id", "group_hash", "commitlog_segment_bytes")
    }
    if field != "delay_levels":
        assert after["delay_levels"] == "1s 2s"
    with open_store(tmp_path / "s") as store:
        assert store.read("t", 0, receipt.offset)[0].body == b"x"


def test_files_that_are_all_cut_to_one_page_do_not_contradict_a_manifest(tmp_path: Path) -> None:
    """Each store was refused, with the advice to rebuild its manifest. Of queues that wrote the same one again; of
    segments it took the page for their size, and lost where they had been."""
    for name, folder, kept in (("queues", "consumequeue", 300), ("segments", "commitlog", 84)):
        root = tmp_path / name
        with open_store(root, segment_bytes=16384, consumequeue_units=1000) as store:
            for n in range(300):
                store.put(f"t-{n % 2}", bytes(100))
        cut = [path for path in (root / folder).rglob("0*") if path.is_file()]
        assert len(cut) > 1
        for path in cut:
            os.truncate(path, 4096)

        assert recover(root).changed

        with open_in("r", root) as store:
            assert (store.manifest.commitlog_segment_bytes, store.manifest.consumequeue_segment_bytes) == (16384, 20000)
            found = sum(len(list(store.iter(topic))) for topic in store.topics())
            assert found == kept


@pytest.mark.parametrize("surplus", [1, 20, 4096])
@pytest.mark.parametrize("folder", ["commitlog", "consumequeue/t/0"])
def test_a_surplus_of_the_only_file_is_no_other_size(tmp_path: Path, folder: str, surplus: int) -> None:
    """The whole store was refused, and mending it took the length of the longer file for all that were to come."""
    with open_store(tmp_path / "s") as store:
        store.put("t", b"x")
    (file,) = [each for each in (tmp_path / "s" / folder).iterdir() if each.name.isdigit()]
    with file.open("ab") as longer:
        longer.write(b"\xff" * surplus)
    assert rebuild_config(tmp_path / "s") == []
    for mode in MODES:
        with open_store(tmp_path / "s", mode) as store:
            assert store.read("t")[0].body == b"x"
    with open_store(tmp_path / "s") as store:
        for n in range(200):
            store.put("t", b"%d" % n)
        assert len(list(store.iter("t", 0))) == 201


def test_a_checkpoint_that_is_read_while_it_is_written_is_read_again(path: Path) -> None:
    """`verify` beside a writer said that the watermarks do not fit their checksum."""
    with open_store(path) as store:
        store.put("t", b"x")
        old = (path / "checkpoint").read_bytes()
    whole = (path / "checkpoint").read_bytes()

    class HalfWritten(Unsynced):
        def __init__(self) -> None:
            super().__init__()
            self.is_first = True

        def pread(self, fd: int, length: int, position: int) -> bytes:
            data = super().pread(fd, length, position)
            if data[:128] != whole[:128] or not self.is_first:
                return data
            self.is_first = False
            return old[:80] + data[80:]

    with open_store(path, "r", fs=HalfWritten()) as store:
        assert list(store.verify()) == []
