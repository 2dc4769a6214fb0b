"""A segment that cannot be opened is a missing range: it is named, all else is read, and nothing is written."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import mqstore
from mqstore import Profile
from mqstore.errors import StoreIOError
from tests.faults import FaultyFileSystem
from tests.log.recovering import recover
from tests.log.support import files, numbered, open_in
from tests.tools.support import mqstore as command
from tests.tools.support import mqstore_json

SIZE = 1 << 14
COUNT = 400
PROFILES: tuple[Profile, ...] = ("mqstore", "rocketmq")


def _offsets(path: Path) -> set[int]:
    return {json.loads(line)["queue_offset"] for line in command("export", path).stdout.splitlines()}


REPLACED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a folder": (lambda file: file.mkdir(), "folder"),
    "a link loop": (lambda file: file.symlink_to(file.name), "symbolic links"),
    "a FIFO": (lambda file: os.mkfifo(file), "FIFO"),
}


@pytest.mark.parametrize(
    ("kind", "number", "profile"), [*zip([*REPLACED] * 2, (0, 2, -1, -1, 0, 2), [*PROFILES] * 3, strict=True)]
)
def test_everything_else_is_read(tmp_path: Path, kind: str, number: int, profile: Profile) -> None:
    path, (replace, why) = tmp_path / "s", REPLACED[kind]
    segments = numbered(path, profile, "t")
    segment = segments[number]
    segment.rename(tmp_path / "aside")
    without = _offsets(path)
    replace(segment)
    before = files(path, lock=False)

    assert _offsets(path) == without < {*range(COUNT)}
    for name in ("verify", "export", "inspect", "recover --dry-run"):
        result = command(*name.split()[:1], path, *name.split()[1:], exit_code=1)
        assert segment.name in result.output
        assert why in result.output
    for name in ("recover", "quarantine restore"):
        assert segment.name in command(*name.split(), path, exit_code=3).stderr
    with pytest.raises(mqstore.MQStoreError, match=segment.name), mqstore.open(path):
        pass
    assert files(path, lock=False) == before
    segment.rmdir() if segment.is_dir() else segment.unlink()
    (tmp_path / "aside").rename(segment)
    assert mqstore_json("verify", path)["ok"]


def _denying(name: str, number: int) -> FaultyFileSystem:
    fs = FaultyFileSystem()
    fs.fail("open", number, times=None, path_part=f"commitlog/{name}")
    return fs


@pytest.mark.parametrize(
    ("at", "number", "profile"), [(0, errno.EACCES, "mqstore"), (2, errno.EIO, "rocketmq"), (-1, errno.EIO, "mqstore")]
)
def test_segment_without_permission_is_a_missing_range(tmp_path: Path, at: int, number: int, profile: Profile) -> None:
    path = tmp_path / "s"
    segments = numbered(path, profile, "t")
    name = segments[at].name
    before = files(path, lock=False)
    fs = _denying(name, number)

    with open_in("r", path, fs=fs) as store:
        findings = [*store.verify()]
    planned = recover(path, dry_run=True, fs=fs)

    for found in (findings, planned.findings):
        missing = [each for each in found if each.kind == "missing_segment"]
        assert [(each.file, each.length) for each in missing] == [(f"commitlog/{name}", SIZE)]
        assert f"{os.strerror(number)}; make it readable" in missing[0].detail
    for refused in (lambda: recover(path, fs=fs), lambda: open_in("rw", path, fs=fs)):
        with pytest.raises(mqstore.MQStoreError, match=os.strerror(number)) as caught:
            refused()
        assert name in str(caught.value)
    assert files(path, lock=False) == before


@pytest.mark.parametrize("name", ["get --key k0", "lag", "export --topic t --queue-id 0"])
def test_commands_name_an_unreadable_first_segment(tmp_path: Path, name: str) -> None:
    """Without it the messages there looked lost, or as if they had never been."""
    segment = numbered(tmp_path / "s", "mqstore", "t")[0]
    segment.unlink()
    segment.symlink_to(segment.name)
    verb, *options = name.split()

    output = command(verb, tmp_path / "s", *options, exit_code=None).output
    assert f"{segment.name} cannot be opened" in output
    assert "make it readable" in output


def test_lack_of_descriptors_is_no_missing_segment(tmp_path: Path) -> None:
    segments = numbered(tmp_path / "s", "mqstore", "t")

    with pytest.raises(StoreIOError):
        open_in("r", tmp_path / "s", fs=_denying(segments[2].name, errno.EMFILE))
