"""`mqstore snapshot`: what it prints, its exit codes, and that there is a whole one or none."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

import mqstore as library
from mqstore import StoreConfig
from tests.log.support import flip
from tests.tools.brokers import clock_now
from tests.tools.support import forked, mqstore, mqstore_json, seen_on_a_terminal, snapshot

CONFIG = StoreConfig(segment_bytes=1 << 14)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with library.open(tmp_path / "mq", config=CONFIG) as opened:
        for i in range(300):
            opened.put("orders", b"%03d" % i * 100, keys=f"k{i}")
        opened.queue("jobs").put(b"one")
    return tmp_path / "mq"


def test_copy_is_made_and_reported(store: Path, tmp_path: Path) -> None:
    before = snapshot(store)
    result = mqstore("snapshot", store, tmp_path / "copy", exit_code=0)
    assert result.stdout.startswith(f"{tmp_path / 'copy'}: ")
    assert "301 records verified, the log ends at " in result.stdout
    assert result.stderr == ""
    assert snapshot(store) == before
    assert mqstore("export", tmp_path / "copy").stdout == mqstore("export", store).stdout
    assert mqstore_json("verify", tmp_path / "copy")["ok"]
    assert mqstore_json("inspect", tmp_path / "copy")["clean_shutdown"]


def test_a_copy_is_used_like_the_original(store: Path, tmp_path: Path) -> None:
    clock = clock_now()
    config = StoreConfig(clock=clock)
    with library.open(store, config=config) as opened:
        opened.create_topic("late", queues=1)
        opened.put("late", b"a moment", delay=1.5)
        opened.put("late", b"a level", delay_level=1)
        opened.broker.run_once()
        mqstore("snapshot", store, tmp_path / "copy")
        assert opened.offsets("late", 0) == (0, 0)
    clock.advance(2_500)
    with library.open(tmp_path / "copy", config=config) as copy:
        task = copy.queue("jobs").get(timeout=0)
        assert task.value == b"one"
        task.ack()
        for _ in range(5):
            copy.broker.run_once()
        assert sorted(message.body for message in copy.read("late", 0, 0)) == [b"a level", b"a moment"]
    with library.open(store, config=config) as original:
        assert original.queue("jobs").get(timeout=0).value == b"one"


def test_dry_run_makes_nothing(store: Path, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    told = mqstore_json("snapshot", store, tmp_path / "copy", "--dry-run", "--link")
    assert told["dry_run"] is True
    assert told["plan"]["linked"] == told["plan"]["segments"] - 1 > 0
    text = mqstore("snapshot", store, tmp_path / "copy", "--dry-run").stdout
    assert text.startswith(f"would copy {store} (not in use) to {tmp_path / 'copy'}: ")
    assert snapshot(tmp_path) == before


def test_beside_its_owner(store: Path, tmp_path: Path) -> None:
    with library.open(store) as opened:
        opened.put("orders", b"new")
        told = mqstore_json("snapshot", store, tmp_path / "copy", "--link")
    assert told["dry_run"] is False
    assert told["writer_alive"] is True
    assert (told["messages"], told["findings"], told["truncated"]) == (302, [], [])
    assert Path(told["snapshot"]) == tmp_path / "copy"


def test_damage_is_reported_and_copied(store: Path, tmp_path: Path) -> None:
    flip(store / "commitlog" / f"{1 << 14:020d}", 5000)
    result = mqstore("snapshot", store, tmp_path / "copy", exit_code=1)
    assert "bad_record: commitlog/00000000000000016384" in result.stdout
    assert result.stderr == ""
    assert mqstore("export", tmp_path / "copy").stdout.count("\n") == 300


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("mq", "mq/copy"), 2, "is inside the store"),
        (("mq", "."), 2, "above the store"),
        (("mq", "there"), 2, "already exists"),
        (("mq",), 2, "Missing argument 'DEST'"),
    ],
)
def test_impossible_snapshot_is_refused(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int, words: str
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a\x1b[2J").write_text("a")
    monkeypatch.chdir(tmp_path)
    for more in ((), ("--dry-run",)):
        result = mqstore("snapshot", *arguments, *more, exit_code=code)
        assert words in result.stderr
    assert sorted(os.listdir(tmp_path)) == ["mq", "there"]


def test_omissions_are_reported(store: Path, tmp_path: Path) -> None:
    (store / "a\x1b[2Jb").write_text("mine")
    result = mqstore("snapshot", store, tmp_path / "copy")
    assert result.stderr == "not copied: a\\x1b[2Jb: not a part of the store\n"


def test_terminal_shows_progress(store: Path, tmp_path: Path) -> None:
    code, out, seen = seen_on_a_terminal("snapshot", store, tmp_path / "copy", "--json")
    assert code == 0
    assert json.loads(out)["messages"] == 301
    assert "copying and verifying" in seen


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    with library.open(tmp_path / "mq") as opened:
        for _ in range(30):
            opened.put_many("orders", [bytes(1 << 20)] * 4)
    running = forked("snapshot", tmp_path / "mq", tmp_path / "copy")
    while not (tmp_path / "copy.partial" / "store" / "commitlog").exists() and running.poll() is None:
        time.sleep(0.001)
    running.send_signal(signal.SIGINT)
    _, told = running.communicate()
    if running.returncode != 0:  # it may have been at the last step
        assert running.returncode == 130
        assert told == b""
        assert os.listdir(tmp_path) == ["mq"]
    else:
        assert json.loads(mqstore("verify", tmp_path / "copy", "--json").stdout)["ok"]
