"""Surplus bytes of segment files that come to `cut/`. `tests/damage` has those that become segments again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import mqstore
from mqstore import Profile
from tests.log.support import numbered
from tests.tools.support import mqstore as command
from tests.tools.support import mqstore_json

SIZE = 1 << 14
COUNT = 400
PROFILES: tuple[Profile, ...] = ("mqstore", "rocketmq")


def _append(file: Path, data: bytes) -> None:
    with file.open("ab") as opened:
        opened.write(data)


def _move(source: Path, target: Path) -> None:
    _append(target, source.read_bytes())
    source.unlink()


def _exported(*arguments: object, exit_code: int = 0) -> list[int]:
    lines = command(*arguments, exit_code=exit_code).stdout.splitlines()
    return [json.loads(line)["queue_offset"] for line in lines]


def test_second_copy_of_a_segment_is_dropped(tmp_path: Path) -> None:
    """A recovery that was killed leaves the same."""
    path = tmp_path / "s"
    segments = numbered(path, "mqstore", "t")
    _append(segments[2], segments[3].read_bytes())

    done = mqstore_json("recover", path)

    assert [(cut["from"], cut["to"], cut["reason"]) for cut in done["truncated"]] == [(SIZE, 2 * SIZE, "surplus")]
    assert (done["kept"], segments[2].stat().st_size, (path / "cut").exists()) == ([], SIZE, False)
    assert _exported("export", path) == [*range(COUNT)]


@pytest.mark.parametrize("profile", PROFILES)
def test_whole_messages_of_a_surplus_can_be_listed_exported_and_restored(tmp_path: Path, profile: Profile) -> None:
    """The place of the segment is taken by another file, of which nothing can be read."""
    path = tmp_path / "s"
    segments = numbered(path, profile, "t")
    _move(segments[3], segments[2])
    segments[3].write_bytes(b"?" * SIZE)
    inside = {*range(COUNT)} - {*_exported("export", path, exit_code=1)}
    assert inside

    done = mqstore_json("recover", path, exit_code=1)

    name = Path(done["kept"][0]).name
    assert name.startswith(segments[3].name)
    listed = mqstore_json("quarantine", "list", path)["files"]
    assert [(each["file"], {row["queue_offset"] for row in each["messages"]}) for each in listed] == [(name, inside)]
    assert {*_exported("quarantine", "export", path)} == inside
    command("quarantine", "restore", path, exit_code=0)
    with mqstore.open(path) as store:
        assert {int(message.body.split()[0]) for message in store.iter("t", 0)} == {*range(COUNT)}


def test_surplus_of_no_record_is_listed_as_bytes(tmp_path: Path) -> None:
    segments = numbered(tmp_path / "s", "mqstore", "t")
    _append(segments[2], b"?" * (SIZE + 100))

    done = mqstore_json("recover", tmp_path / "s")

    assert [Path(kept).read_bytes() for kept in done["kept"]] == [b"?" * SIZE, b"?" * 100]
    listed = mqstore_json("quarantine", "list", tmp_path / "s", exit_code=1)["files"]
    assert [(each["count"], each["other_bytes"]) for each in listed] == [(0, SIZE), (0, 100)]


SMALL, LARGE = 1 << 13, 1 << 15


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(("first", "second", "gone"), [(LARGE, SMALL, 0), (LARGE, SMALL, 4), (SMALL, LARGE, 4)])
def test_stores_of_different_segment_sizes_in_one_are_refused(
    tmp_path: Path, profile: Profile, first: int, second: int, gone: int
) -> None:
    """`gone`: number of files that retention has removed from the front of the first store, or from its end."""
    mine, other = (
        numbered(tmp_path / "s", profile, "t", size=first),
        numbered(tmp_path / "t", profile, "t", size=second, body=b"y" * 90),
    )
    for file in mine[gone:] if gone and first == LARGE else mine[:gone]:
        file.unlink()
    for file in other:
        if not (target := tmp_path / "s" / "commitlog" / file.name).exists():
            shutil.copy(file, target)
    files = sorted(tmp_path.glob("s/commitlog/0*"))
    before = {file: file.read_bytes() for file in files}

    for name in ("verify", "export", "inspect", "recover"):
        stderr = command(name, tmp_path / "s", exit_code=3).stderr
        for size in (first, second):
            of_size = [file.name for file in files if file.stat().st_size == size]
            more = f" and {len(of_size) - 3} more" if len(of_size) > 3 else ""
            assert f"{', '.join(of_size[:3])}{more} of {size} bytes" in stderr
    with pytest.raises(mqstore.MQStoreError, match="several stores"), mqstore.open(tmp_path / "s"):
        pass
    assert {file: file.read_bytes() for file in tmp_path.glob("s/commitlog/0*")} == before
