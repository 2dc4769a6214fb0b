"""Rules of the broker as a whole that no mechanism's own tests show, through its door."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqstore import QueueRef
from mqstore.errors import ConfigError, StoreClosedError
from tests.broker.support import Bench, Broker, Mode
from tests.children import in_child
from tests.tools.support import mqstore, mqstore_json, snapshot

# -- the number of queues, and order (delivery#queue-choice) -----------------------------------------------------------


def _fifo_topic(bench: Bench) -> None:
    bench.broker.topics.create("t", message_type="FIFO")
    bench.broker.start_of("g", "t", 0)


def _orderly_group(bench: Bench) -> None:
    bench.broker.topics.create("t")
    bench.broker.groups.create("g", orderly=True)
    bench.broker.start_of("g", "t", 0)


def _ordered_pop(bench: Bench) -> None:
    bench.broker.put("t", b"a", queue_id=0)
    bench.broker.pop("g", "t", order=True)


def _counted_attempts(bench: Bench) -> None:
    bench.broker.put("t", b"a", queue_id=0)
    bench.broker.start_of("g", "t", 0)
    bench.broker.note_attempt("g", "t", 0, 0, 1)


@pytest.mark.parametrize("prepare", [_fifo_topic, _orderly_group, _ordered_pop, _counted_attempts])
@pytest.mark.parametrize("restart", [False, True])
def test_the_number_of_queues_stays_while_a_group_relies_on_order(bench: Bench, prepare: Any, restart: bool) -> None:
    prepare(bench)
    broker = bench.again() if restart else bench.broker
    for queues in (2, 8):
        with pytest.raises(ConfigError, match=r"in order by g.*`force`"):
            broker.topics.alter("t", write_queues=queues, read_queues=8)
    assert broker.topics.require("t").write_queues == 4
    broker.topics.alter("t", read_queues=8)  # moves no message
    broker.topics.alter("t", perm=4)
    for queues in (2, 8):
        assert broker.topics.alter("t", write_queues=queues, force=True).write_queues == queues


def test_a_topic_may_not_become_fifo_and_change_its_queues_at_once(bench: Bench) -> None:
    bench.broker.topics.create("t")
    bench.broker.start_of("g", "t", 0)
    with pytest.raises(ConfigError, match="in order by g"):
        bench.broker.topics.alter("t", write_queues=2, message_type="FIFO")


# -- a broker that was closed (reliability#p9) -------------------------------------------------------------------------

CALLS: dict[str, Callable[[Broker], object]] = {
    "put": lambda broker: broker.put("t", b"late"),
    "put_many": lambda broker: broker.put_many("t", [b"late"]),
    "put_async": lambda broker: broker.put_async("t", b"late").result(),
    "read": lambda broker: broker.read("t", 0, 0, group="g"),
    "pop": lambda broker: broker.pop("g", "t"),
    "commit": lambda broker: broker.commit("g", "t", 0, 0),
    "commit at once": lambda broker: broker.commit("g", "t", 0, 0, durability="flush"),
    "reset": lambda broker: broker.reset("g", "t", None, "latest"),
    "note_attempt": lambda broker: broker.note_attempt("g", "t", 0, 0, 1),
    "send_back": lambda broker: broker.send_back("g", 0),
    "begin": lambda broker: broker.transactions.begin("t", b"late", producer_group="p"),
    "create a topic": lambda broker: broker.topics.create("late"),
    "alter a topic": lambda broker: broker.topics.alter("t", perm=4),
    "delete a topic": lambda broker: broker.topics.delete("t", force=True),
    "create a group": lambda broker: broker.groups.create("late"),
    "alter a group": lambda broker: broker.groups.alter("g", consume_enable=False),
    "forbid": lambda broker: broker.groups.forbid("g", "t"),
    "delete a group": lambda broker: broker.delete_group("g"),
    "delete settings": lambda broker: broker.groups.delete("g"),
    "a new group": lambda broker: broker.groups.require("late"),
    "try_lock": lambda broker: broker.locks.try_lock("g", QueueRef("t", 0), "c"),
    "register": lambda broker: broker.members.register("d", "g", {"t": ("TAG", "*")}, Mode("queue")),
    "on_check": lambda broker: broker.transactions.on_check("q", lambda half: True),
    "min_offset": lambda broker: broker.min_offset("t", 0),
    "max_offset": lambda broker: broker.max_offset("t", 0),
    "offset_for_time": lambda broker: broker.offset_for_time("t", 0, 0),
    "committed": lambda broker: broker.committed("g", "t", 0),
    "start_of": lambda broker: broker.start_of("g", "t", 0),
    "attempts": lambda broker: broker.attempts("g", "t", 0),
    "pending": lambda broker: broker.pending("g"),
    "dead_letters": lambda broker: broker.dead_letters("g"),
    "stats": lambda broker: broker.stats(),
    "prometheus": lambda broker: broker.prometheus(),
}


@pytest.mark.parametrize("forked", [False, True], ids=["closed", "forked"])
def test_closed_broker_leaves_the_files_to_the_next_owner(bench: Bench, forked: bool) -> None:
    """A group that was created on a broker closed long ago used to be written over the groups of its successor. Others
    granted locks that another process may hold, made members, or told how far a group had come until the closing."""
    late = bench.broker
    late.topics.create("t", queues=1)
    late.groups.create("g")
    late.start_of("g", "t", 0)
    late.put("t", b"a")
    late.save()
    if not forked:
        late.close()
        bench.open().groups.create("new")
    before = {path: path.read_bytes() for path in bench.path.rglob("*.json")}

    def refuses() -> None:
        for name, call in CALLS.items():
            with pytest.raises(StoreClosedError):
                pytest.fail(f"{name} gave {call(late)!r}")
            assert {path: path.read_bytes() for path in bench.path.rglob("*.json")} == before, name

    assert in_child(refuses) == 0 if forked else refuses() is None  # type: ignore[func-returns-value]


# -- the command: what is misspelt is said to be, and changes nothing --------------------------------------------------


@pytest.fixture
def letters(bench: Bench) -> Path:
    """A store with two dead letters of group `g`."""
    for body in (b"a", b"b"):
        bench.broker.put("t", body, queue_id=0)
    for delivery in bench.broker.pop("g", "t", 2):
        bench.broker.dead_letter("g", "t", delivery.receipt, "no")
    bench.broker.close()
    return bench.path


@pytest.mark.parametrize("command", [("list",), ("show",), ("replay",), ("replay", "--dry-run"), ("purge", "--yes")])
def test_dead_letters_of_a_group_that_never_was_are_wrong_usage(letters: Path, command: tuple[str, ...]) -> None:
    before = snapshot(letters)
    result = mqstore("dlq", command[0], letters, "--group", "G", *command[1:])
    assert (result.exit_code, "group 'G'" in result.stderr) == (2, True)
    assert snapshot(letters) == before
    assert mqstore("dlq", command[0], letters, "--group", "g", *command[1:]).exit_code == 0


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
def test_a_replay_of_a_letter_that_is_not_there_sends_none(letters: Path, dry_run: list[str]) -> None:
    before = snapshot(letters)
    result = mqstore("dlq", "replay", letters, "--group", "g", "--offset", 1, "--offset", 7, *dry_run)
    assert (result.exit_code, "offset 7" in result.stderr) == (2, True)
    assert snapshot(letters) == before


@pytest.mark.parametrize("words", [("topics", "crate", "S", "n"), ("dlq", "purg", "S"), ("offsets", "rest", "S")])
def test_a_sub_command_that_is_misspelt_is_named(letters: Path, words: tuple[str, ...]) -> None:
    result = mqstore(*(letters if word == "S" else word for word in words))
    assert (result.exit_code, f"No such command '{words[1]}', and no such directory." in result.stderr) == (2, True)


@pytest.mark.parametrize(
    "words", [("topics", "create", "t"), ("topics", "alter", "t", "--write-queues", 9), ("topics", "delete", "t")]
)
def test_a_refusal_names_no_argument_that_the_command_does_not_have(letters: Path, words: tuple[str, ...]) -> None:
    result = mqstore(*words[:2], letters, *words[2:], *(["--yes"] if words[1] == "delete" else []), exit_code=2)
    assert "=True" not in result.stderr


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
def test_recover_reports_messages_of_a_removed_level(tmp_path: Path, dry_run: list[str]) -> None:
    bench = Bench(tmp_path / "store", delay_levels="1s 1h")
    for _ in range(2):
        bench.broker.put("t", b"x", delay_level=2)
    bench.broker.close()
    assert mqstore_json("recover", bench.path, *dry_run)["orphan_levels"] == {}
    bench.open(delay_levels="1s").close()
    assert json.loads(mqstore("recover", bench.path, "--json", *dry_run).stdout)["orphan_levels"] == {"2": 2}
    assert "2 messages wait in delay level 2" in mqstore("recover", bench.path, *dry_run).stderr
