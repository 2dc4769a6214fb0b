"""Commands that change a store: what is the same for all of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import mqstore as library
from mqstore.broker.names import is_dlq_topic
from tests.tools.brokers import filled, tables
from tests.tools.support import mqstore, snapshot

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
    "cut restore": (),
    "consume": ("orders", "--group", "billing"),
}
ASKING = {
    "topics delete": "Delete topic orders, 20 messages, the progress of billing?",
    "groups delete": "Delete group billing and its progress on orders?",
    "offsets reset": "would reset group billing",
    "dlq purge": "Purge 1 dead letters of audit?",
}
"""Commands that ask before what cannot be undone, and what they say of it."""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """`orders`, which `billing` consumes, and a dead letter of `audit`."""
    return filled(tmp_path / "s")


def words(name: str, path: Path, *more: str) -> list[object]:
    return [*name.partition(",")[0].split(), path, *(CHANGES | OTHERS)[name], *more]


@pytest.mark.parametrize("name", CHANGES)
def test_a_dry_run_says_what_would_be_done_and_writes_nothing(store: Path, name: str) -> None:
    before = snapshot(store)

    result = mqstore(*words(name, store, "--dry-run"), exit_code=0)

    assert f"would {name.split()[1].replace('replay', 'send')}" in result.stdout
    assert snapshot(store) == before


@pytest.mark.parametrize("name", ASKING)
def test_a_program_that_does_not_say_yes_is_told_the_plan_and_changes_nothing(store: Path, name: str) -> None:
    before = snapshot(store)

    result = mqstore(*words(name, store))

    assert (result.exit_code, result.stdout) == (2, "")
    assert ASKING[name] in result.stderr
    assert "? There is no terminal to ask at: give --yes" in result.stderr
    assert snapshot(store) == before


@pytest.mark.parametrize("dry_run", [False, True], ids=["real", "dry"])
@pytest.mark.parametrize("name", CHANGES | OTHERS)
def test_beside_a_writer_a_change_is_3_and_names_the_holder(store: Path, name: str, dry_run: bool) -> None:
    with library.engine.MessageStore(store):
        result = mqstore(*words(name, store, *(["--dry-run"] if dry_run else ["--yes"] if name in ASKING else [])))

    assert result.exit_code == 3
    assert f"process {os.getpid()}" in result.stderr
    with tables(store) as parts:
        assert parts.topics.need("orders").perm == 6
        assert parts.offsets.of_group("billing") == {("orders", 0): 7, ("orders", 1): 2}
        assert any(map(is_dlq_topic, parts.store.topics()))


@pytest.mark.parametrize("name", sorted((CHANGES | OTHERS).keys() - {"recover, config"}))
def test_a_change_makes_no_store(tmp_path: Path, name: str) -> None:
    result = mqstore(*words(name, tmp_path / "absent"))

    assert (result.exit_code, "absent" in result.stderr) == (3, True)
    assert list(tmp_path.iterdir()) == []
