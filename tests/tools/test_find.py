"""The filters of `mqstore get` and `export`: what they find by every way, what they read, and what they say."""

from __future__ import annotations

import base64
import json
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import mqstore as library
from examples import shop
from mqstore import SimulatedClock
from tests.conftest import Golden
from tests.log.support import flip_log, open_store
from tests.tools.support import json_lines, mqstore

BEGIN_MS = 1_769_824_800_000  # 2026-01-31T02:00Z
STEP_MS = 30_000
SEGMENT = 1 << 12


@dataclass(frozen=True)
class Put:
    """A message that was put, as the test knows it."""

    number: int
    topic: str
    time_ms: int
    key: str
    unique_key: str
    tag: str
    amount: int
    body: bytes


@pytest.fixture(scope="module")
def hours(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Put]]:
    """A message each half a minute for two hours, in two topics, over many segments; every third body is compressed."""
    path, puts = tmp_path_factory.mktemp("hours") / "s", []
    clock = SimulatedClock(BEGIN_MS)
    with open_store(path, clock=clock, segment_bytes=SEGMENT) as store:
        for n in range(240):
            body = b"line %d\nof %s \xff" % (n, b"x" * 700)
            put = Put(n, "pay" if n % 5 == 0 else "orders", clock.now_ms(), f"k{n % 60}", f"u{n}", "ab"[n % 2], n, body)
            stored, flag = (zlib.compress(body), 1) if n % 3 == 0 else (body, 0)
            properties = {"KEYS": put.key, "UNIQ_KEY": put.unique_key, "TAGS": put.tag, "amount": str(n)}
            store.append(put.topic, n % 3, stored, properties=properties, sys_flag=flag)
            puts.append(put)
            clock.advance(STEP_MS)
    return path, puts


def numbers(stdout: str) -> list[int]:
    return [int(row["properties"]["amount"]) for row in json_lines(stdout)]


def searched(stderr: str) -> dict[str, Any]:
    [found] = [json.loads(line)["searched"] for line in stderr.splitlines() if '"searched"' in line]
    return found


def at(minutes: float) -> str:
    return f"2026-01-31T{2 + int(minutes) // 60:02d}:{int(minutes) % 60:02d}:{int(minutes % 1 * 60):02d}Z"


FILTERS: dict[str, tuple[list[str], Callable[[Put], bool]]] = {
    "key": (["--key", "k7"], lambda put: put.key == "k7"),
    "key and tag": (["--key", "k7", "--tag", "b"], lambda put: (put.key, put.tag) == ("k7", "b")),
    "key and time": (["--key", "k7", "--from", at(60)], lambda put: put.key == "k7" and put.number >= 120),
    "key until a time": (["--key", "k7", "--until", at(33.5)], lambda put: put.number == 7),
    "key of a topic": (["--key", "k10", "--topic", "pay"], lambda put: put.key == "k10"),
    "key of another topic": (["--key", "k10", "--topic", "orders"], lambda put: False),
    "unique key": (["--unique-key", "u7"], lambda put: put.unique_key == "u7"),
    "both keys": (["--unique-key", "u7", "--key", "k8"], lambda put: False),
    "tag": (["--tag", "a || c"], lambda put: put.tag == "a"),
    "tag of a topic": (["--tag", "a", "--topic", "orders"], lambda put: put.tag == "a" and put.topic == "orders"),
    "queue": (["--tag", "a", "--topic", "orders", "--queue-id", "1"],
              lambda put: put.tag == "a" and put.topic == "orders" and put.number % 3 == 1),
    "time": (["--from", at(60), "--until", at(70)], lambda put: 120 <= put.number < 140),
    "time between": (["--from", at(60.25), "--until", at(70.25)], lambda put: 121 <= put.number < 141),
    "time of a topic": (["--from", at(60), "--until", at(70), "--topic", "pay"],
                        lambda put: 120 <= put.number < 140 and put.topic == "pay"),
    "before all": (["--until", at(0)], lambda put: False),
    "after all": (["--from", at(120)], lambda put: False),
    "from the first": (["--from", at(0)], lambda put: True),
    "until the last": (["--until", at(119.5)], lambda put: put.number < 239),
    "sql": (["--where", "amount BETWEEN 10 AND 12 OR TAGS = 'c'"], lambda put: 10 <= put.amount <= 12),
    "body": (["--grep", r"^line 3\d\b"], lambda put: 30 <= put.number < 40),
    "body, over lines": (["--grep", r"line 3.of x+ \xff$"], lambda put: put.number == 3),
    "all": (["--from", at(0), "--until", at(100), "--topic", "orders", "--tag", "b", "--where", "amount > 100",
             "--grep", "line 1[0-4]1"], lambda put: put.number in (101, 111, 121, 131, 141)),
}  # fmt: skip


def _gone(*names: str) -> Callable[[Path], object]:
    return lambda path: [shutil.rmtree(path / name) for name in names]


STATES: dict[str, Callable[[Path], object]] = {
    "whole": lambda path: None,
    "without index": _gone("index"),
    "without queues": _gone("consumequeue"),
    "without either": _gone("consumequeue", "index"),
    "after a kill": lambda path: ((path / "checkpoint").unlink(), (path / "abort").touch()),
}


def test_topic_alone_is_read_from_all_queues(hours: tuple[Path, list[Put]]) -> None:
    """It printed the first message of queue 0."""
    path, puts = hours
    result = mqstore("get", path, "--topic", "pay", "--json", exit_code=0)

    assert numbers(result.stdout) == [put.number for put in puts if put.topic == "pay"][:32]
    assert searched(result.stderr)["limited"] is True
    assert mqstore("get", path, "--topic", "pay", "--queue-id", 1, "--limit", 3, "--json").stdout.count("\n") == 3


@pytest.fixture(scope="module")
def damaged(hours: tuple[Path, list[Put]], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`damaged(state)`: a copy in this state, only to be read."""

    @cache
    def copy(state: str) -> Path:
        path = Path(shutil.copytree(hours[0], tmp_path_factory.mktemp("damaged") / "s"))
        STATES[state](path)
        return path

    return copy


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", FILTERS)
def test_filters_find_the_same_in_damaged_stores(
    hours: tuple[Path, list[Put]], damaged: Callable[[str], Path], name: str, state: str
) -> None:
    path, puts = damaged(state), hours[1]
    words, wanted = FILTERS[name]
    expected = [put.number for put in puts if wanted(put)]

    got = mqstore("get", path, *words, "--limit", 999, "--json")
    exported = mqstore("export", path, *words, "--json")

    found = numbers(got.stdout)
    assert found == (expected[::-1] if "--key" in words or "--unique-key" in words else expected)
    assert exported.stdout == got.stdout
    assert [base64.b64decode(row["body"]) for row in json_lines(got.stdout)] == [puts[number].body for number in found]
    if state == "whole":
        assert (got.exit_code, exported.exit_code) == (0 if expected else 1, 0)


@pytest.mark.parametrize(
    ("words", "state", "by"),
    [
        (["--key", "k7"], "whole", "index"),
        (["--key", "k7", "--topic", "orders"], "whole", "index"),
        (["--tag", "a", "--topic", "orders"], "whole", "queue"),
        (["--tag", "a"], "whole", "log"),
        (["--key", "k7", "--topic", "orders"], "without index", "queue"),
        (["--key", "k7"], "without index", "log"),
        (["--tag", "a", "--topic", "orders"], "without queues", "log"),
    ],
)
def test_way_of_a_search_depends_on_its_files(
    hours: tuple[Path, list[Put]], tmp_path: Path, words: list[str], state: str, by: str
) -> None:
    shutil.copytree(hours[0], tmp_path / "s")
    STATES[state](tmp_path / "s")

    result = mqstore("get", tmp_path / "s", *words, "--json")

    assert searched(result.stderr)["by"] == by
    assert bool(searched(result.stderr)["missed"]) == (state == "without index")


def test_store_whose_messages_have_no_keys_lacks_no_index(tmp_path: Path) -> None:
    """The advice was to rebuild the index, which then was in order, and was advised again."""
    with library.open(tmp_path / "s") as store:
        store.put("orders", b"x")

    result = mqstore("get", tmp_path / "s", "--key", "k", "--json", exit_code=1)

    assert (searched(result.stderr)["by"], searched(result.stderr)["missed"]) == ("log", [])
    assert "index" not in mqstore("trace", tmp_path / "s", "k", exit_code=1).stderr


@pytest.mark.parametrize("topic", [[], ["--topic", "orders"]], ids=["log", "queues"])
def test_search_reads_only_the_requested_time(hours: tuple[Path, list[Put]], topic: list[str]) -> None:
    """The figures count every message that was read, matching or not, except those by which the time is found."""
    path, _ = hours
    with library.open(path, mode="r") as store:
        refs = [ref for each in store.topics() for ref in store.queues(each)]
        inside = sorted(
            (each.physical_offset, each.size)
            for ref in refs
            for each in store.iter(*ref)
            if BEGIN_MS + 3_600_000 <= each.store_timestamp_ms < BEGIN_MS + 4_200_000 and ref.topic in (topic or ref)
        )
    used = {place // SEGMENT for place, _ in inside}

    result = mqstore("get", path, *topic, "--from", at(60), "--until", at(70), "--grep", "line", "--json", exit_code=0)

    figures = searched(result.stderr)
    assert len(numbers(result.stdout)) == figures["messages"] == len(inside)
    assert (figures["bytes"], figures["segments"]) == (sum(size for _, size in inside), len(used))
    assert 8 * len(used) < len(list((path / "commitlog").iterdir()))


def test_messages_of_one_millisecond_in_many_segments_are_all_found(tmp_path: Path) -> None:
    clock = SimulatedClock(BEGIN_MS)
    with open_store(tmp_path / "s", clock=clock, segment_bytes=SEGMENT) as store:
        for n in range(90):
            if n in (30, 60):
                clock.advance(60_000)
            store.append("orders", 0, b"x" * 700, properties={"amount": str(n)})

    for words in ([], ["--topic", "orders"]):
        found = mqstore("get", tmp_path / "s", "--from", at(1), "--until", at(2), "--json", "--limit", 99, *words)
        assert numbers(found.stdout) == [*range(30, 60)]


def test_damage_is_reported_only_inside_the_time(hours: tuple[Path, list[Put]], tmp_path: Path) -> None:
    path = tmp_path / "s"
    shutil.copytree(hours[0], path)
    with library.open(path, mode="r") as store:
        [hit] = [m for ref in store.queues("orders") for m in store.iter(*ref) if m.unique_key == "u131"]
        place = hit.physical_offset
    flip_log(path, place + 90)

    inside = mqstore("get", path, "--from", at(60), "--until", at(70), "--grep", "line", "--json", exit_code=1)
    by_index = mqstore("get", path, "--unique-key", "u131", exit_code=1)
    outside = mqstore("get", path, "--from", at(80), "--until", at(90), "--grep", "line", "--json", exit_code=0)

    assert numbers(inside.stdout) == [n for n in range(120, 140) if n != 131]
    assert "bad_record: commitlog/" in inside.stderr
    assert "bad_record: commitlog/" in by_index.stderr
    assert numbers(outside.stdout) == [*range(160, 180)]


def test_limit_gives_the_newest_of_a_key_and_the_first_of_a_time(hours: tuple[Path, list[Put]]) -> None:
    path, _ = hours

    keys = mqstore("get", path, "--key", "k7", "--limit", 2, "--json")
    times = mqstore("get", path, "--from", at(60), "--limit", 2, "--json")
    usual = mqstore("get", path, "--from", at(60), "--json")

    assert numbers(keys.stdout) == [187, 127]
    assert numbers(times.stdout) == [120, 121]
    assert numbers(usual.stdout) == [*range(120, 152)]
    assert [searched(each.stderr)["limited"] for each in (keys, times, usual)] == [True] * 3
    assert "there may be more (--limit)" in mqstore("get", path, "--key", "k7", "--limit", 2).stderr


def test_key_with_very_many_messages_says_that_older_ones_are_left_out(
    hours: tuple[Path, list[Put]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mqstore.broker.admin.search._CANDIDATES", 3)

    result = mqstore("get", hours[0], "--key", "k7", "--json", exit_code=1)

    assert numbers(result.stdout) == [187, 127, 67]
    assert "older messages of orders" in searched(result.stderr)["missed"][0]


def test_filters_apply_to_last_and_offset(hours: tuple[Path, list[Put]]) -> None:
    path, _ = hours
    newest = mqstore("get", path, "--topic", "orders", "--last", 2, "--grep", "line 1[0-4]1", "--json")
    later = mqstore("get", path, "--topic", "orders", "--queue-id", 1, "--offset", 40, "--tag", "b", "--json")

    assert numbers(newest.stdout) == [131, 141]
    assert len(numbers(later.stdout)) == 1


def test_body_that_cannot_be_decompressed_is_not_searched(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        store.append("orders", 0, b"no zlib", sys_flag=1)
        store.append("orders", 0, b"plain", properties={"amount": "1"})

    result = mqstore("get", tmp_path / "s", "--grep", "plain|zlib", "--json", exit_code=1)

    assert numbers(result.stdout) == [1]
    assert searched(result.stderr)["missed"][0].startswith("bodies of 1: ")


def test_messages_of_the_engine_are_shown_under_their_topics(tmp_path: Path) -> None:
    """Retries, dead letters, delays, half messages, and items of a queue."""
    path = tmp_path / "s"
    with library.open(path) as store:
        store.queue("jobs").put(b"needle: an item")
        store.put("orders", b"needle: delayed", delay=3600)
        store.put("orders", b"needle: by level", delay_level=3)
        store.put("letters", b"needle: a letter")
        with store.simple_consumer("billing", {"letters": "*"}) as consumer:
            for delivery in consumer.receive(1, wait=0):
                delivery.reject("of no use")
        store.broker.transactions.begin("orders", b"needle: half", producer_group="shop")

    found = json_lines(mqstore("get", path, "--grep", "^needle", "--json").stdout)

    engine = {"rmq_sys_wheel_timer", "SCHEDULE_TOPIC_XXXX", "%DLQ%billing", "RMQ_SYS_TRANS_HALF_TOPIC"}
    assert {row["topic"] for row in found} == {"jobs", "letters", *engine}


@pytest.mark.parametrize("words", [["--key", "k3"], ["--grep", "body 3$"], ["--topic", "orders", "--grep", "body 3$"]])
def test_search_works_next_to_a_writer(tmp_path: Path, words: list[str]) -> None:
    with library.open(tmp_path / "s") as store:
        for n in range(5):
            store.put("orders", b"body %d" % n, keys=f"k{n}", properties={"amount": str(n)})
        assert store.find("orders", key="k4")  # dispatches
        result = mqstore("get", tmp_path / "s", *words, "--json", exit_code=0)

    assert numbers(result.stdout) == [3]


@pytest.mark.parametrize("name", ["clean", "crashed", "propcrc"])
def test_stores_of_a_java_broker_are_searched(golden: Golden, name: str) -> None:
    """By the broker's own index, and by the log, each message of its listing is found by a key and by its time."""
    path = golden(name).path
    exported = json_lines(mqstore("export", path).stdout)
    keyed = [row for row in exported if row["keys"]][:20]
    assert len(exported) > 2

    for row in keyed:
        found = mqstore("get", path, "--key", row["keys"].split()[0], "--limit", 999, "--json")
        assert row in json_lines(found.stdout)
    ms = exported[1]["store_timestamp_ms"]
    until = [row for row in exported if row["store_timestamp_ms"] < ms]
    stamp = datetime.fromtimestamp(ms // 1000, UTC) + timedelta(milliseconds=ms % 1000)
    found = mqstore("export", path, "--until", stamp.isoformat())
    assert json_lines(found.stdout) == until


def test_id_is_that_of_a_record_or_a_unique_key_of_all_copies(tmp_path: Path) -> None:
    shop.fill(tmp_path / "s")
    [row] = json_lines(mqstore("get", tmp_path / "s", "--topic", "orders", "--limit", 1, "--json").stdout)

    one = mqstore("get", tmp_path / "s", "--id", row["message_id"], "--json", exit_code=0)
    copies = mqstore("get", tmp_path / "s", "--id", f"{192:032X}", "--json", exit_code=0)

    assert json_lines(one.stdout) == [row]
    topics = [each["topic"] for each in json_lines(copies.stdout)]
    assert topics == ["%DLQ%billing", "%RETRY%billing+orders", "%RETRY%billing+orders", "orders"]
    assert searched(copies.stderr)["limited"] is False
