"""A segment that ended early (format#room): a BLANK behind its records, and then a hole, is read as any other one."""

from __future__ import annotations

import json
import subprocess
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import mqstore
from mqstore import Profile, StoreConfig
from tests.log.support import kill
from tests.smalldisk import small_disk
from tests.tools.support import mqstore as command

MIB = 1 << 20
SEGMENT = 4 * MIB  # blocks come in steps from 1 MiB, so most of it is a hole
EACH = 30
BODIES = [b"%d" % number for number in range(3 * EACH)]
PROFILES: tuple[Profile, ...] = ("mqstore", "rocketmq")


def _make(path: Path, profile: Profile, *, is_killed: bool = False) -> Path:
    """Make a store whose first three segments have ended early. The fourth is empty."""
    with mqstore.open(path, profile=profile, config=StoreConfig(segment_bytes=SEGMENT)) as store:
        log = store.broker.store
        for body in BODIES:
            receipt = store.put("t", body, queue_id=0)
            if receipt.offset % EACH == EACH - 1:
                log._log.end_segment()
                log.dispatch()
        assert log.max_offset == 3 * SEGMENT
        if is_killed:
            log.wakeups.stop()
            log._join_threads(10)
            kill(log)
    return path


def _closed(path: Path, profile: Profile) -> Path:
    return _make(path / "s", profile)


def _killed(path: Path, profile: Profile) -> Path:
    return _make(path / "s", profile, is_killed=True)


def _sparse(path: Path, profile: Profile) -> Path:
    _make(path / "whole", profile)
    subprocess.run(["cp", "-a", "--sparse=always", path / "whole", path / "s"], check=True)
    return path / "s"


STATES: dict[str, Callable[[Path, Profile], Path]] = {"closed": _closed, "killed": _killed, "sparse copy": _sparse}


@pytest.fixture(params=PROFILES)
def profile(request: pytest.FixtureRequest) -> Profile:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=STATES)
def store(request: pytest.FixtureRequest, tmp_path: Path, profile: Profile) -> Path:
    return STATES[request.param](tmp_path, profile)


def _log(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.glob("commitlog/*")}


def _exported(path: Path) -> list[bytes]:
    lines = command("export", path, exit_code=0).stdout.splitlines()
    return [b64decode(json.loads(line)["body"]) for line in lines]


def _read(path: Path) -> list[bytes]:
    with mqstore.open(path, mode="r") as reader:
        return [bytes(message.body) for message in reader.iter("t")]


def test_reader_and_export_show_every_message(store: Path) -> None:
    assert _read(store) == BODIES
    assert _exported(store) == BODIES


def test_verify_finds_nothing(store: Path) -> None:
    result = command("verify", store)
    assert result.exit_code == 0, result.stdout


def test_recover_changes_nothing_but_an_empty_last_segment(store: Path) -> None:
    before = _log(store)
    assert not any(before.pop(f"{3 * SEGMENT:020}", b""))
    for _ in range(2):
        result = command("recover", store)
        assert result.exit_code == 0, result.stdout
        after = _log(store)
        after.pop(f"{3 * SEGMENT:020}", None)
        assert after == before
    with mqstore.open(store) as opened:
        opened.put("t", b"next", queue_id=0)
        assert [bytes(message.body) for message in opened.iter("t")] == [*BODIES, b"next"]


def test_rebuilding_everything_shows_every_message(store: Path) -> None:
    for name in ("consumequeue", "index"):
        for file in sorted((store / name).rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
    assert command("recover", store).exit_code == 0
    assert _read(store) == BODIES
    assert command("verify", store).exit_code == 0


def test_snapshot_has_every_message(store: Path, tmp_path: Path) -> None:
    assert command("snapshot", store, tmp_path / "copy").exit_code == 0
    assert _read(tmp_path / "copy") == BODIES
    assert command("verify", tmp_path / "copy").exit_code == 0


def test_follower_in_another_process_passes_the_end(tmp_path: Path, profile: Profile) -> None:
    with mqstore.open(tmp_path / "s", profile=profile, config=StoreConfig(segment_bytes=SEGMENT)) as writer:
        writer.put("t", b"0", queue_id=0)
        writer.broker.store.dispatch()
        with mqstore.open(tmp_path / "s", mode="r") as reader:
            followed: Iterator[mqstore.Message] = reader.iter("t", queue_id=0, follow=True)
            for number in range(4):
                assert bytes(next(followed).body) == b"%d" % number
                writer.broker.store._log.end_segment()
                writer.put("t", b"%d" % (number + 1), queue_id=0)
                writer.broker.store.dispatch()


def test_no_hole_is_looked_at_on_a_full_disk(tmp_path: Path, profile: Profile) -> None:
    """On a full tmpfs a look at a hole of a mapped file is SIGBUS."""
    with small_disk(tmp_path / "disk", 48 * MIB, needs_mount=True) as disk:
        path = _make(disk / "s", profile, is_killed=True)
        with pytest.raises(OSError, match="No space"):
            (disk / "others").write_bytes(bytes(48 * MIB))
        assert _exported(path) == BODIES
        assert command("verify", path).exit_code == 0
        with mqstore.open(path) as opened:
            assert [bytes(message.body) for message in opened.iter("t")] == BODIES
