"""Commands that look at damage agree: between profiles, with their help, and with what they print."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mqstore import Profile
from tests.log.support import numbered
from tests.tools.support import mqstore as command
from tests.tools.support import mqstore_json

SIZE = 1 << 14
PROFILES: tuple[Profile, ...] = ("mqstore", "rocketmq")


def _at(file: Path, start: int) -> Path:
    return file.with_name(f"{start:020d}")


STRANGE: dict[str, Callable[[list[Path]], object]] = {
    "a copy behind the end": lambda s: shutil.copy(s[1], _at(s[0], int(s[-1].name) + SIZE)),
    "a copy at the greatest offsets": lambda s: shutil.copy(s[2], _at(s[0], 1 << 62)),
    "a copy beyond all offsets": lambda s: shutil.copy(s[2], _at(s[0], (1 << 63) + SIZE)),
    "a copy in the place of another": lambda s: shutil.copy(s[1], s[3]),
    "the last one far away": lambda s: s[-1].rename(_at(s[0], 1 << 40)),
    "one of zeros far away": lambda s: _at(s[0], 1 << 40).write_bytes(bytes(SIZE)),
}


@pytest.mark.parametrize("name", STRANGE)
def test_exit_codes_of_strange_segments_agree_between_profiles(tmp_path: Path, name: str) -> None:
    codes: dict[str, list[int]] = {}
    for profile in PROFILES:
        path = tmp_path / profile
        STRANGE[name](numbered(path, profile, "t", as_java=False))
        steps = ("verify", "export", "inspect", "recover --dry-run", "recover", "verify")
        codes[profile] = [command(step.split()[0], path, *step.split()[1:]).exit_code for step in steps]

    assert codes["mqstore"] == codes["rocketmq"]


def test_topic_with_dots_survives_a_cut_and_a_restore(tmp_path: Path) -> None:
    """No put may use such a name, but a Java store may have it. No checksum covers names there."""
    path = tmp_path / "s"
    for file in [*numbered(path, "rocketmq", "t", "comXorders", as_java=False), path / "config" / "topics.json"]:
        file.write_bytes(file.read_bytes().replace(b"comXorders", b"com.orders"))
    (path / "consumequeue" / "comXorders").rename(path / "consumequeue" / "com.orders")
    shutil.rmtree(path / "index")
    command("recover", path)
    first = command("export", path, exit_code=0).stdout.count("\n")
    segment = sorted(path.glob("commitlog/0*"))[1]
    segment.write_bytes(segment.read_bytes()[:3000] + b"?" * 300 + segment.read_bytes()[3300:])
    whole = command("export", path, exit_code=1).stdout.count("\n")
    assert (first, whole < first) == (400, True)

    moved = mqstore_json("recover", path, "--prefix", exit_code=0)["moved_to_cut"]
    restored = mqstore_json("quarantine", "restore", path, exit_code=1)

    assert moved > 200
    assert [each["refused"] for each in restored["files"]] == [{}] * len(restored["files"])
    assert {each["topic"] for each in restored["queues"]} == {"t", "com.orders"}
    assert command("export", path, exit_code=0).stdout.count("\n") == whole
    assert mqstore_json("verify", path)["ok"]


def test_surplus_that_an_earlier_version_has_moved_is_listed_and_restored(tmp_path: Path) -> None:
    segments = numbered(tmp_path / "s", "mqstore", "t")
    name = f"{segments[1].name}-surplus-1760000000000"
    (tmp_path / "s" / "cut").mkdir()
    segments[2].rename(tmp_path / "s" / "cut" / name)
    command("recover", tmp_path / "s", exit_code=1)

    [listed] = mqstore_json("quarantine", "list", tmp_path / "s")["files"]

    assert (listed["file"], listed["physical_offset"], listed["other_bytes"]) == (name, 2 * SIZE, 0)
    assert mqstore_json("quarantine", "restore", tmp_path / "s")["files"][0]["appended"] == listed["count"] > 50


@pytest.mark.parametrize("group", ["quarantine", "topics", "groups", "offsets", "delay", "dlq"])
def test_help_of_a_group_says_that_its_command_may_be_left_out(tmp_path: Path, group: str) -> None:
    path = tmp_path / "s"
    numbered(path, "mqstore", "t")
    usage = command(group, "--help").stdout.split("\n\n")[0]

    assert "[COMMAND] DIR" in usage
    given, left_out = command(group, "show" if group in ("offsets", "delay") else "list", path), command(group, path)
    assert (given.exit_code, given.stdout, given.stderr) == (left_out.exit_code, left_out.stdout, left_out.stderr)


def test_recovered_index_takes_room_by_its_keys(tmp_path: Path) -> None:
    """A Java broker's directory without an index: the broker's files have room for 20 million entries."""
    path = tmp_path / "s"
    numbered(path, "rocketmq", "t", as_java=False)
    for file in path.glob("mqstore.json*"):
        file.unlink()
    shutil.rmtree(path / "index")

    assert mqstore_json("recover", path)["rebuilt"]["index_entries"] == 400
    [file] = (path / "index").iterdir()
    assert file.stat().st_blocks * 512 < 32 << 20  # the table of slots, by which a broker finds keys, has 20 MB
    assert mqstore_json("verify", path)["ok"]
