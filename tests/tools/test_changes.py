"""Commands that change a store: what is the same for all of them."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.log.support import open_store
from tests.tools.brokers import filled
from tests.tools.support import listed, mqstore, snapshot

CHANGES: dict[str, tuple[str, ...]] = {
    "topics create": ("payments", "--queues", "2"),
    "topics alter": ("orders", "--perm", "r"),
    "topics delete": ("orders", "--force"),
    "groups create": ("ledger",),
    "groups alter": ("billing", "--fifo"),
    "groups delete": ("billing",),
    "offsets reset": ("--group", "billing", "--topic", "orders", "--to", "latest"),
    "dlq replay": ("--group", "audit"),
    "dlq purge": ("--group", "audit"),
}
OTHERS: dict[str, tuple[str, ...]] = {
    "recover": (),
    "recover, config": ("--rebuild", "config", "--yes"),
    "quarantine restore": (),
    "consume": ("orders", "--group", "billing"),
}
"""Other commands that nothing else may write beside."""
ASKING = {
    "topics delete": "Delete topic orders, 20 messages, the offsets of billing?",
    "groups delete": "Delete group billing and its offsets in orders?",
    "offsets reset": "would reset group billing",
    "dlq purge": "Purge 1 dead letters of audit?",
}
"""Commands that ask before what cannot be undone, and what they say of it."""
REFUSED = {
    "topics create orders": "exists already",
    "topics create 'a b'": "letters",
    "topics create rmq_sys_mine": "is a system topic",
    "topics create x --queues 0": "--queues",
    "topics alter nonesuch --perm r": "no topic",
    "topics alter orders": "give --queues",
    "topics alter orders --read-queues 1": "never read",
    "topics delete orders --yes": "consumed by billing",
    "topics delete nonesuch --yes": "no topic",
    "topics delete rmq_sys_pop_log --yes": "is a system topic",
    "groups create billing": "exists already",
    "groups create 'a b'": "letters",
    "groups create CID_RMQ_SYS_X": "is a system group",
    "groups create x --retry soon": "'5s x2 2h'",
    "groups create x --retry '5s x0 2h'": "'5s x2 2h'",
    "groups create x --retry ''": "'5s x2 2h'",
    "groups create x --max-attempts 0": "x>=1",
    "groups create x --max-attempts many": "--max-attempts",
    "groups create x --start yesterday": "2026-01-31T12:00:00Z",
    "groups create x --start 999999999d": "too long ago",
    "groups alter nonesuch --fifo": "no group",
    "groups alter billing": "give --max-attempts",
    "groups delete nonesuch --yes": "no group",
    "offsets reset --group nonesuch --topic orders --to latest --yes": "no group",
    "offsets reset --group billing --topic nonesuch --to latest --yes": "no topic",
    "offsets reset --group billing --topic orders --to 11 --yes": "must be 0..10",
    "offsets reset --group billing --topic orders --to -1 --yes": "neither a time",
    "offsets reset --group billing --topic orders --to noon --yes": "neither a time",
    "offsets reset --group billing --topic orders --to 0 --queue-id 2 --yes": "queues 0..1",
    "offsets reset --group billing --topic orders --yes": "--to",
    "dlq replay --group audit --to %DLQ%audit": "to the dead-letter topic",
    "dlq replay --group audit --to %RETRY%nobody": "there is no topic",
    "dlq replay --group audit --to rmq_sys_mine": "is a system topic",
    "dlq replay --group audit --to 'a b'": "letters",
}
"""Changes that cannot be made -> why."""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    path = filled(tmp_path_factory.mktemp("original") / "s")
    return path, listed(path)


@pytest.fixture
def store(original: tuple[Path, list[Any]], tmp_path: Path) -> Path:
    """`orders`, which `billing` consumes, and a dead letter of `audit`."""
    return Path(shutil.copytree(original[0], tmp_path / "s"))


def words(name: str, path: Path, *more: str) -> list[object]:
    return [*name.partition(",")[0].split(), path, *(CHANGES | OTHERS)[name], *more]


@pytest.mark.parametrize("name", CHANGES)
def test_a_dry_run_says_what_would_be_done_and_writes_nothing(store: Path, name: str) -> None:
    before = snapshot(store)

    result = mqstore(*words(name, store, "--dry-run"), exit_code=0)

    assert f"would {name.split()[1].replace('replay', 'send')}" in result.stdout
    assert snapshot(store) == before


@pytest.mark.parametrize("name", ASKING)
def test_declined_plan_changes_nothing(store: Path, name: str) -> None:
    before = snapshot(store)

    result = mqstore(*words(name, store))

    assert (result.exit_code, result.stdout) == (2, "")
    assert ASKING[name] in result.stderr
    assert "? Cannot ask without a terminal: give --yes" in result.stderr
    assert snapshot(store) == before


@pytest.mark.parametrize("dry_run", [False, True], ids=["real", "dry"])
def test_beside_a_writer_a_change_is_3_and_names_the_holder(
    original: tuple[Path, list[Any]], store: Path, dry_run: bool
) -> None:
    with open_store(store):
        for name in CHANGES | OTHERS:
            result = mqstore(*words(name, store, *(["--dry-run"] if dry_run else ["--yes"] if name in ASKING else [])))
            assert (result.exit_code, f"process {os.getpid()}" in result.stderr) == (3, True), name

    assert listed(store) == original[1]


@pytest.mark.parametrize("name", sorted((CHANGES | OTHERS).keys() - {"recover, config"}))
def test_a_change_makes_no_store(tmp_path: Path, name: str) -> None:
    result = mqstore(*words(name, tmp_path / "absent"))

    assert (result.exit_code, "absent" in result.stderr) == (3, True)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def untouched(original: tuple[Path, list[Any]]) -> Path:
    """A copy of the store for changes that are all refused."""
    return Path(shutil.copytree(original[0], original[0].with_name("untouched")))


@pytest.mark.parametrize("command", REFUSED)
def test_impossible_request_exits_with_2(original: tuple[Path, list[Any]], untouched: Path, command: str) -> None:
    group, name, *more = shlex.split(command)

    for dry_run in ([], ["--dry-run"]):
        result = mqstore(group, name, untouched, *more, *dry_run, exit_code=2)
        assert REFUSED[command] in result.stderr.replace("1<=x", "x>=1")
    assert listed(untouched) == original[1]
