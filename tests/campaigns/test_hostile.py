"""Hostile directories: a store one of whose names is another thing never hangs a command or harms what lies elsewhere.

Each file and each folder of a rich store is replaced in turn by each of `REPLACEMENTS`, and each of `COMMANDS` runs on
it. Every run is a process with a deadline. Afterwards nothing outside the store may differ in name, kind, mode, time
or content; every error must be one of mqstore's, and a command that writes must refuse a store whose own name is a link
or a special file, and say which.

    make hostile N=100000                  the whole matrix; a smaller N takes that many of its cases, by seed
    MQSTORE_CAMPAIGN_CASE=<id> pytest ...  one case again, by the id that its failure shows
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import stat
import struct
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore.errors import MQStoreError
from tests.children import in_child
from tests.commands import looking, opening
from tests.log.splicesupport import Row, bundle, publish
from tests.log.support import open_in
from tests.records import encode_record
from tests.tools.support import cli
from tests.waiting import until

ROUNDS = int(os.environ.get("MQSTORE_CAMPAIGN_ROUNDS", "20"))
ONE = os.environ.get("MQSTORE_CAMPAIGN_CASE", "")
PARTS = max(2, min(ROUNDS, 30_000) // 200)
"""Tests that share the cases, so that several processors can, and each ends in time."""
DEADLINE_S = 30
CHECKSUMS: dict[str, Any] = {"mqstore": "crc32c-record", "rocketmq": "crc32-body"}
PROFILES = tuple(CHECKSUMS)
CUT_AT = 10 << 20
"""Physical offset of a message in `cut/`."""
FOREIGN_IN_TMP = ("tmp/keep/precious", "tmp/precious", "tmp/00000000000000000000.7/inside")

Replace = Callable[[Path, Path], None]
"""Puts another thing in the place of a path; the second path is a folder outside of the store."""
Command = Callable[[Path, Path], None]
"""Does something with a store; the second path is a folder for what it makes."""


# -- what a name becomes -----------------------------------------------------------------------------------------------


def _gone(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _moved(path: Path, outside: Path) -> None:
    with suppress(FileNotFoundError):
        path.rename(outside / "moved")
    path.symlink_to(outside / "moved")


def _foreign(path: Path, outside: Path) -> None:
    there = outside / ("folder" if path.is_dir() else "letter.txt")
    _gone(path)
    path.symlink_to(there)


def _dangling(path: Path, outside: Path) -> None:
    _gone(path)
    path.symlink_to(outside / "nowhere")


def _circle(path: Path, outside: Path) -> None:
    _gone(path)
    path.symlink_to(path.name)


def _endless(path: Path, outside: Path) -> None:
    _gone(path)
    path.symlink_to("/dev/zero")


def _fifo(path: Path, outside: Path) -> None:
    _gone(path)
    os.mkfifo(path)


def _device(path: Path, outside: Path) -> None:
    _gone(path)
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero


def _folder(path: Path, outside: Path) -> None:
    _gone(path)
    path.mkdir()
    (path / "precious").write_bytes(b"precious")


def _zeros(path: Path, outside: Path) -> None:
    _gone(path)
    path.write_bytes(bytes(5000))


REPLACEMENTS: dict[str, Replace] = {
    "link to the same elsewhere": _moved,
    "link to another's": _foreign,
    "link to nowhere": _dangling,
    "link to itself": _circle,
    "link to a device": _endless,
    "fifo": _fifo,
    "device": _device,
    "folder": _folder,
    "zeros": _zeros,
}
HARMLESS = frozenset({"folder", "zeros"})
"""What leads nowhere: it is damage, which some commands mend."""


# -- what is done with the store ---------------------------------------------------------------------------------------


def _cli(*words: str) -> Command:
    def run(store: Path, out: Path) -> None:
        arguments = [word.replace("DIR", str(store)).replace("OUT", str(out)) for word in words]
        cli.main(arguments, prog_name="mqstore")

    return run


def _put(store: Path, out: Path) -> None:
    with mqstore.open(store) as opened:
        for number in range(8):
            opened.put("orders", b"x" * 9000, keys=f"k{number}")
        opened.put("orders", b"later", delay=3600)
        opened.put("new", b"x")
        with opened.simple_consumer("billing", {"orders": "*"}) as consumer:
            for delivery in consumer.receive(4, wait=0):
                delivery.ack()


def _read(store: Path, out: Path) -> None:
    with mqstore.open(store, "r") as opened:
        for topic in ("orders", "jobs"):
            for queue in opened.queues(topic):
                opened.read(*queue, 0)


READERS: dict[str, Command] = {
    "read": _read,
    **{name: _cli(*words) for name, words in (looking("DIR", "OUT/copy") | opening("DIR")).items()},
}
WRITERS: dict[str, Command] = {
    "open and put": _put,
    "produce": _cli("produce", "DIR", "orders", "--body", "body"),
    "recover": _cli("recover", "DIR"),
    "recover --prefix": _cli("recover", "DIR", "--prefix"),
    "recover --rebuild config": _cli("recover", "DIR", "--rebuild", "config"),
    "quarantine restore": _cli("quarantine", "restore", "DIR"),
    "topics create": _cli("topics", "create", "DIR", "fresh"),
    "topics delete": _cli("topics", "delete", "DIR", "orders", "--force", "--yes"),
    "groups delete": _cli("groups", "delete", "DIR", "billing", "--yes"),
    "offsets reset": _cli(
        "offsets", "reset", "DIR", "--group", "billing", "--topic", "orders", "--to", "earliest", "--yes"
    ),
    "dlq purge": _cli("dlq", "purge", "DIR", "--group", "billing", "--yes"),
    "consume": _cli("consume", "DIR", "orders", "--group", "other", "--idle-exit", "0"),
}
OTHERS: dict[str, Command] = {
    "snapshot --link": _cli("snapshot", "DIR", "OUT/linked", "--link"),
    "spark clean": _cli("spark", "clean", "DIR", "--older-than", "0s"),
    "carve": _cli("recover", "--carve", f"DIR/commitlog/{0:020d}", "--into", "OUT/carved"),
    "publish": lambda store, out: publish(store, "billing", {("orders", 0): 1}),
}
"""What changes a store, or its files' second names, without opening it."""
LOOK = "every reader"
COMMANDS: dict[str, dict[str, Command]] = {
    LOOK: READERS,
    **{name: {name: command} for name, command in {**WRITERS, **OTHERS}.items()},
}


# -- the store ---------------------------------------------------------------------------------------------------------


def _build(root: Path, profile: Any) -> None:
    config = mqstore.StoreConfig(
        segment_bytes=1 << 16, consumequeue_units=64, index_slots=16, index_entries=64, default_queues=1
    )
    open_in("rw", root, profile=profile, config=config).close()
    manifest = root / "mqstore.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"timerlog_segment_bytes": 4096}))
    with mqstore.open(root, config=config) as store:
        for number in range(40):
            store.put("orders", b"x" * 3000, tag="created", keys=f"k{number}")
        store.put("jobs", b"y")
        store.put("orders", b"in an hour", delay=3600)
        store.put("orders", b"by level", delay_level=3)
        store.broker.topics.create("settled", queues=1)
        for group in ("billing", "shipping"):
            with store.simple_consumer(group, {"orders": "*"}) as consumer:
                for delivery in consumer.receive(8, wait=0)[::2]:
                    delivery.ack()
        letter = store.simple_consumer("billing", {"jobs": "*"})
        for delivery in letter.receive(1, wait=0):
            delivery.reject("of no use")
        letter.close()
        until(lambda: (root / "timerlog").exists())
    (root / "timerwheel").unlink(missing_ok=True)  # 37 MB, and made anew at each opening
    (root / "timerwheel").write_bytes(bytes(4096))
    [index] = (root / "index").iterdir()
    index.rename(index.with_name("20200101000000000"))  # a time: the cases of each run have the same names
    publish(root, "elsewhere", {("orders", 0): 3})
    bundle(root, "job", 0, [[Row(b"1"), Row(b"2", queue_id=1)]])
    bundle(root, "bad", 0, [[Row(b"3")]])
    (root / "inbox" / "bad-0" / "bundle.json").write_text("{")
    (root / "config" / "begun").mkdir(exist_ok=True)
    head = json.dumps({"group": "billing", "workers": 1, "cells": 3}).encode()
    (root / "config" / "begun" / "0").write_bytes(head.ljust(512, b"\0") + struct.pack("<3q", 0, 0, -1))
    (root / "cut").mkdir()
    (root / "cut" / f"{CUT_AT:020d}-10").write_bytes(
        encode_record(
            topic="orders",
            body=b"cut",
            queue_id=0,
            queue_offset=90,
            physical_offset=CUT_AT,
            born_timestamp_ms=1,
            store_timestamp_ms=1,
            checksum=CHECKSUMS[profile],
        )
    )
    for name in ("_staging/app-1/shard/records.bin", "local_offsets/me/group.json"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("{}")
    for name in FOREIGN_IN_TMP:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("precious")
    (root / "tmp" / "cq-1").write_text("left by a crash")


ABSENT = (
    *("abort", "mqstore.json.bak", "mqstore.json.tmp", "config/topics.json.tmp", "config/topics.json.bak.tmp"),
    *("commitlog/00000000000000131072", "consumequeue/new", "consumequeue/orders/1", "tmp/cq.0", "tmp/index.1"),
    *("timerlog/00000000000000004096", "config/spark/groups/billing.json", "config/spark/txn.json"),
    *("cut/staged", "cut/restored", "cut/restoring.json", "cut/restoring.json.tmp"),
)
"""Names that a writer may come to make."""


def _names(root: Path) -> list[str]:
    found = []
    for folder, folders, names in os.walk(root):
        found += [os.path.relpath(os.path.join(folder, name), root) for name in (*folders, *names)]
    return sorted(found)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for profile in PROFILES:
        made[profile] = tmp_path_factory.mktemp("rich") / profile
        _build(made[profile], profile)
    return made


# -- one case ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    profile: str
    name: str
    replacement: str
    command: str

    def __str__(self) -> str:
        return f"{self.profile}|{self.name}|{self.replacement}|{self.command}"

    @property
    def must_be_refused(self) -> bool:
        """Whether a writer has to refuse the store: a name of its own is a link or a special file."""
        inside = self.name.split("/")
        others = inside[0] in ("inbox", "_staging", "tmp") and len(inside) > 1
        data = inside[0] in ("commitlog", "consumequeue") and len(inside) > 1
        untouched = data and self.command == "recover --rebuild config"
        return self.command in WRITERS and self.replacement not in HARMLESS and not others and not untouched


def _outside(folder: Path) -> None:
    """Somebody's folder, with names that mqstore makes in its own."""
    (folder / "folder" / "deeper").mkdir(parents=True)
    for name in (
        *("letter.txt", "folder/letter.txt", "folder/cq-1", "folder/index", "folder/timerwheel", "folder/checkpoint"),
        *("folder/00000000000000000000", "folder/00000000000000000000.1", "folder/20200101000000000"),
        *("folder/topics.json", "folder/bundle.json", "folder/deeper/00000000000000000000", "folder/me.json"),
    ):
        (folder / name).write_text("precious")


def _seen(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ["", *_names(folder)]:
        path = folder / name
        status = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(status.st_mode) else ""
        found[name] = (status.st_mode, status.st_mtime_ns, status.st_size, status.st_uid, content)
    return found


def _run(case: Case, store: Path, out: Path) -> str:
    """Run a command in a process of its own; what it said, with the class of an error that it raised before it."""
    file = out.parent / "said"
    code = in_child(partial(_say, case, store, out, file), DEADLINE_S)
    said = file.read_text("utf-8")
    assert not code, f"it hangs, or ended by {code}; it had said {said!r:.500}"
    return said


def _say(case: Case, store: Path, out: Path, file: Path) -> None:
    sys.stdin = open(os.devnull)  # noqa: SIM115  (as long as the process)
    with (
        open(file, "w", buffering=1, encoding="utf-8", errors="replace") as text,
        redirect_stdout(text),
        redirect_stderr(text),
    ):
        for name, command in COMMANDS[case.command].items():
            text.write(f"\n-- {name}\n")
            try:
                command(store, out)
            except SystemExit as end:
                text.write(f"\nexit {end.code}")
            except MQStoreError as error:
                text.write(f"\nMQStoreError {error}")
            except BaseException as error:
                text.write(f"\nraw {type(error).__name__}: {error}")
                traceback.print_exc(file=text)


def _check(case: Case, rich: Path, work: Path) -> None:
    store, outside, out = work / "store", work / "outside", work / "out"
    for folder in (outside, out):
        folder.mkdir(parents=True)
    shutil.copytree(rich, store, symlinks=True)
    _outside(outside)
    try:
        REPLACEMENTS[case.replacement](store / case.name, outside)
    except PermissionError:
        return  # a device can be made by root alone
    before = _seen(outside)
    within = _seen(store) if case.command == LOOK else {}
    said = _run(case, store, out)
    assert "this is a bug" not in said, said
    assert "\nraw " not in said, said
    assert "[Errno" not in said, said
    assert _seen(outside) == before, f"something elsewhere was changed; it said {said}"
    if case.command == LOOK:
        assert _seen(store) == within, f"it was only to look; it said {said}"
    if case.name == "tmp" or case.name.startswith("tmp/"):
        kept = [name for name in FOREIGN_IN_TMP if not f"{name}/".startswith(f"{case.name}/")]
    else:
        kept = list(FOREIGN_IN_TMP)
    for name in kept:
        assert (store / name).read_text() == "precious", said
    # Some commands look before they open it for writing, and find no such group.
    if case.must_be_refused and "\nexit 2" not in said:
        assert "\nexit 3" in said or "\nMQStoreError" in said, f"it was not refused: {said}"
        assert str(store / case.name) in said, f"the name is missing: {said}"


def _cases(stores: dict[str, Path]) -> list[Case]:
    if ONE:
        return [Case(*ONE.split("|"))]
    found = [
        Case(profile, name, replacement, command)
        for profile, root in stores.items()
        for name in (*_names(root), *ABSENT)
        for replacement in REPLACEMENTS
        for command in COMMANDS
    ]
    random.Random(len(found)).shuffle(found)
    return found[:ROUNDS]


@pytest.mark.parametrize("part", range(PARTS))
def test_no_command_hangs_or_harms_what_lies_elsewhere(stores: dict[str, Path], tmp_path: Path, part: int) -> None:
    failed = []
    cases = _cases(stores)[part::PARTS]
    for number, case in enumerate(cases):
        work = tmp_path / str(number)
        try:
            _check(case, stores[case.profile], work)
        except AssertionError as error:
            failed.append(f"MQSTORE_CAMPAIGN_CASE='{case}'\n    {str(error)[-2500:]}")
        shutil.rmtree(work, ignore_errors=True)
    assert not failed, f"{len(failed)} of {len(cases)} cases:\n" + "\n".join(failed[:200])
