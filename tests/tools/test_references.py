"""Records that refer to the body of an earlier one, as commands, columns and repairs see them (delivery#send-back):
with that body, or with an error where it is lost."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqstore import StoreConfig
from mqstore.admin import restore_cut
from mqstore.broker.tables.names import SCHEDULE_TOPIC, TIMER_TOPIC
from mqstore.columnar.columns import ColumnReader
from mqstore.columnar.rows import Policy
from mqstore.errors import CorruptStoreError
from mqstore.layout.bodyref import is_reference
from mqstore.layout.record import BODY_AT_V4
from mqstore.log.recovery.recover import RecoverOptions
from mqstore.log.recovery.repair import recover_store
from tests.broker.referencesupport import BODY, SEGMENT, Bench
from tests.log.support import flip_log, open_store
from tests.tools.support import mqstore

WAITING = (SCHEDULE_TOPIC, TIMER_TOPIC)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A message waits in a level, another in the timer."""
    made = Bench(tmp_path / "store")
    made.to_the_edge()
    made.fail(unique_key="by level")
    made.fail("timer", BODY[::-1])
    made.broker.save()
    yield made
    if not made.store.closed:
        made.broker.close()


def exported(path: Path, exit_code: int) -> tuple[dict[str, bytes], str]:
    """Bodies of the waiting messages by topic, and what is on stderr."""
    result = mqstore("export", path, exit_code=exit_code)
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    return {row["topic"]: base64.b64decode(row["body"]) for row in rows if row["topic"] in WAITING}, result.stderr


def columns(bench: Bench, scan: str, **options: Any) -> list[bytes]:
    reader = ColumnReader(bench.store, ["topic", "body"], **options)
    if scan == "log":
        batches = list(reader.log(bench.store.min_offset, bench.store.max_offset, lambda topic: topic in WAITING))
    else:
        batches = [*reader.queue(SCHEDULE_TOPIC, 2, 0, 1), *reader.queue(TIMER_TOPIC, 0, 0, 1)]
    return [row["body"] for batch in batches for row in batch.to_pylist()]


def origin_of(bench: Bench) -> int:
    return bench.store.read("orders", 0, 0)[0].physical_offset


def test_export_and_get_have_the_bodies(bench: Bench) -> None:
    bodies, _ = exported(bench.path, 0)
    assert bodies == {SCHEDULE_TOPIC: BODY, TIMER_TOPIC: BODY[::-1]}
    [row] = [
        json.loads(line)
        for line in mqstore("get", bench.path, "--topic", TIMER_TOPIC, "--json", exit_code=0).stdout.splitlines()
    ]
    assert base64.b64decode(row["body"]) == BODY[::-1]


@pytest.mark.parametrize("scan", ["queue", "log"])
def test_columns_have_the_bodies(bench: Bench, scan: str) -> None:
    assert columns(bench, scan) == [BODY, BODY[::-1]]


def test_body_that_retention_removed_is_no_damage(bench: Bench) -> None:
    """Both messages were delivered since. The record that had the first body is gone, the waiting record is not yet."""
    bench.wait()
    bench.store.drop_before(SEGMENT)
    assert bench.store.offsets(SCHEDULE_TOPIC, 2) == (0, 1)
    bench.broker.close()
    assert exported(bench.path, 0)[0] == {TIMER_TOPIC: BODY[::-1]}


@pytest.mark.parametrize("scan", ["queue", "log"])
def test_row_whose_body_retention_removed_counts_as_removed(bench: Bench, scan: str) -> None:
    bench.store.drop_before(SEGMENT)
    policy = Policy()
    assert columns(bench, scan, policy=policy) == [BODY[::-1]]
    assert (policy.removed, policy.corrupt) == (1, 0)


def test_damaged_body_is_a_finding_of_each_command(bench: Bench) -> None:
    flip_log(bench.path, origin_of(bench) + BODY_AT_V4 + 500)
    bench.broker.close()
    bodies, told = exported(bench.path, 1)
    assert bodies == {TIMER_TOPIC: BODY[::-1]}
    assert f"{SCHEDULE_TOPIC}, queue 2, offset 0: skipped" in told
    assert "bad_record" in mqstore("verify", bench.path, exit_code=1).output
    mqstore("get", bench.path, "--topic", SCHEDULE_TOPIC, "--queue-id", 2, exit_code=1)


@pytest.mark.parametrize("scan", ["queue", "log"])
def test_damaged_body_is_damage_of_the_row(bench: Bench, scan: str) -> None:
    flip_log(bench.path, origin_of(bench) + BODY_AT_V4 + 500)
    with pytest.raises(CorruptStoreError):
        columns(bench, scan)
    told: list[str] = []
    policy = Policy(on_corrupt="skip", tell=lambda finding: told.append(finding.detail))
    assert columns(bench, scan, policy=policy) == [BODY[::-1]]
    assert f"{SCHEDULE_TOPIC}, queue 2, offset 0: its body does not inflate (its body is in the record at" in told[-1]


def test_recovery_leaves_what_waits_and_is_done_in_one_go(bench: Bench) -> None:
    flip_log(bench.path, origin_of(bench) + BODY_AT_V4 + 500)
    bench.broker.close()
    mqstore("recover", bench.path)
    once = {file: file.read_bytes() for file in (bench.path / "commitlog").iterdir()}
    mqstore("recover", bench.path)
    assert {file: file.read_bytes() for file in (bench.path / "commitlog").iterdir()} == once
    assert "1 known" in mqstore("verify", bench.path, exit_code=0).output
    bench.open()
    assert [each.body for each in bench.wait()] == [BODY[::-1]]


@pytest.mark.parametrize("damaged", ["before", "between", "body"])
def test_cut_waiting_message_comes_back_whole_or_stays_in_its_file(tmp_path: Path, damaged: str) -> None:
    bench, places = Bench(tmp_path / "store"), {}
    for name in ("first", "before", "body", "between"):
        places[name] = bench.broker.put("orders", BODY, queue_id=0).physical_offset
    bench.broker.send_back("g", places["body"])
    bench.broker.close()
    flip_log(bench.path, places[damaged] + BODY_AT_V4 + 1)
    recover_store(bench.path, RecoverOptions(prefix=True), config=StoreConfig(clock=bench.clock))
    with open_store(bench.path, clock=bench.clock) as store:
        store.put_many("busy", [bytes(9_000)] * 4)  # over the place of what was cut
    done = restore_cut(bench.path)
    with open_store(bench.path, clock=bench.clock) as store:
        refused = sum((tally.refused for tally in done.files), start=Counter())
        if damaged == "body":
            assert refused == {"message whose body is in a deleted record": 1}
            assert SCHEDULE_TOPIC not in store.topics()
        else:
            assert not refused
            [waiting] = store.read(SCHEDULE_TOPIC, 2)
            assert (waiting.body, is_reference(waiting.sys_flag)) == (BODY, False)
        assert list(store.verify()) == []
    bench.open()
    assert [each.body for each in bench.wait()] == ([] if damaged == "body" else [BODY])
    bench.broker.close()
