"""A lost or damaged manifest keeps nobody from reading: it is derived from the files, which is a finding."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import mqstore
from mqstore import Profile, StoreConfig
from tests.log.support import files
from tests.tools.support import mqstore as command
from tests.tools.support import mqstore_json

COUNT = 300
SIZES = {"segment_bytes": 1 << 14, "consumequeue_units": 64, "index_slots": 64, "index_entries": 256}


def _alone(file: Path, content: bytes) -> None:
    file.with_name(f"{file.name}.bak").unlink(missing_ok=True)
    file.write_bytes(content)


def _other_size(file: Path) -> None:
    value = json.loads(file.read_bytes())
    _alone(file, json.dumps({**value, "commitlog_segment_bytes": 1 << 12}).encode())


LOSSES: dict[str, Callable[[Path], object]] = {
    "lost": lambda file: [each.unlink() for each in file.parent.glob("mqstore.json*")],
    "half-written": lambda file: _alone(file, file.read_bytes()[: file.stat().st_size // 2]),
    "empty": lambda file: _alone(file, b""),
    "no manifest": lambda file: _alone(file, b"{}"),
    "too deep": lambda file: _alone(file, b'{"a":' * 2000),
    "another segment size": _other_size,
}


@pytest.mark.parametrize("profile", ["mqstore", "rocketmq"])
@pytest.mark.parametrize("loss", LOSSES)
def test_reading_derives_the_manifest_and_says_so(tmp_path: Path, loss: str, profile: Profile) -> None:
    path = tmp_path / "s"
    with mqstore.open(path, profile=profile, config=StoreConfig(**SIZES)) as store:
        for n in range(COUNT):
            store.put("t", b"%d" % n, queue_id=0, keys=f"k{n}")
    sound = command("export", path, exit_code=0).stdout
    assert sound.count("\n") == COUNT
    LOSSES[loss](path / "mqstore.json")
    before = files(path)
    # A directory of this profile without a manifest is a Java broker's, which never has one.
    is_lost = (loss, profile) != ("lost", "rocketmq")

    verified = mqstore_json("verify", path, exit_code=int(is_lost))
    assert [(each["kind"], each["file"]) for each in verified["findings"]] == [("bad_json", "mqstore.json")] * is_lost
    assert verified["messages"] == COUNT
    assert command("export", path, exit_code=int(is_lost)).stdout == sound
    inspected = mqstore_json("inspect", path, exit_code=int(is_lost))
    assert (inspected["profile"], inspected["commitlog"]["segment_bytes"]) == (profile, SIZES["segment_bytes"])
    assert ["--rebuild config" in problem for problem in inspected["problems"]] == [True] * is_lost
    with mqstore.open(path, "r") as store:
        assert [int(message.body) for message in store.iter("t", 0)] == [*range(COUNT)]
        assert [each.kind for each in store.recovery.findings] == ["bad_json"] * is_lost
        assert [int(message.body) for message in store.find("t", key="k7")] == [7]
    assert files(path) == before
    if not is_lost:
        return
    for arguments in (("recover",), ("recover", "--dry-run"), ("quarantine", "restore")):
        assert "--rebuild config" in command(*arguments, path, exit_code=3).stderr
    assert files(path, lock=False).items() == before.items() - {("lock", before["lock"])}
    [sentence] = mqstore_json("recover", path, "--rebuild", "config", "--yes")["config"]
    assert sentence.partition(": ")[2] in verified["findings"][0]["detail"]
    assert mqstore_json("verify", path)["ok"]
    assert command("export", path, exit_code=0).stdout == sound
