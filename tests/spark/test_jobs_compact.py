"""Compaction and de-duplication without Spark, against a model that looks at one message after the other."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mqstore
from mqstore import MessageStore, SimulatedClock
from mqstore.errors import ConfigError
from mqstore.layout.properties import encode_properties
from mqstore.spark import publish
from mqstore.spark.jobs import keyed
from mqstore.spark.jobs.compact import compact, compact_plan
from mqstore.spark.jobs.dedup import dedup, dedup_plan
from mqstore.spark.selection import select
from tests.spark.copies import Copy, Queues, joined, killed_once_recorded, members, messages, tree
from tests.spark.support import Odd, many, write_store

T0 = 1_700_000_000_000


def odd(key: str | None, body: bytes = b"x", at_s: int = 0, **more: Any) -> Odd:
    """A message with that key, stored at that second."""
    properties = more.pop("properties", {}) | ({} if key is None else {"KEYS": key})
    return Odd(body=body, properties=encode_properties(properties), store_ms=T0 + 1000 * at_s, **more)


# -- the model ---------------------------------------------------------------------------------------------------------


def listed(paths: Mapping[str, Path]) -> list[tuple[str, Any, Copy]]:
    """(store, message, copy) of all messages of users, store by store, in the order of its log."""
    found = []
    for name, path in paths.items():
        copies = messages(path)
        with MessageStore(path, "r") as store:
            for topic, queue in copies:
                low, _ = store.offsets(topic, queue)
                for number, message in enumerate(store.iter(topic, queue)):
                    assert low == 0
                    found.append((name, message, copies[topic, queue][number]))
    names = [*paths]
    return sorted(found, key=lambda each: (names.index(each[0]), each[1].physical_offset))


def kept(paths: Mapping[str, Path], choose: Callable[[list[tuple[str, Any, Copy]]], list[int]]) -> Queues:
    """The messages that `choose` leaves of each (topic, key), and all that have none, queue by queue."""
    groups: dict[Any, list[tuple[str, Any, Copy]]] = {}
    stay: set[tuple[str, int]] = set()
    everything = listed(paths)
    for each in everything:
        name, message, copy = each
        key = dict(copy.properties).get("KEYS")
        if key is None:
            stay.add((name, message.physical_offset))
        else:
            groups.setdefault((message.topic, key), []).append(each)
    for group in groups.values():
        stay.update((group[i][0], group[i][1].physical_offset) for i in choose(group))
    found: Queues = {}
    for name, message, copy in everything:
        if (name, message.physical_offset) in stay:
            found.setdefault((message.topic, message.queue_id), []).append(copy)
    return found


def last(group: list[tuple[str, Any, Copy]]) -> list[int]:
    """Of one store the last in its log; of several of those the one that was stored last."""
    of_store = {name: number for number, (name, _, _) in enumerate(group)}
    numbers = [*of_store.values()]
    return [max(numbers, key=lambda number: (group[number][1].store_timestamp_ms, number))]


_KEYS = st.one_of(st.none(), st.sampled_from(["a", "b", "c", "a b"]))
_RECORDS = st.lists(
    st.builds(
        odd,
        _KEYS,
        body=st.sampled_from([b"", b"x", b"yy"]),
        at_s=st.integers(0, 40),
        topic=st.sampled_from(["t", "orders"]),
        queue_id=st.integers(0, 1),
    ),
    max_size=40,
)


@given(first=_RECORDS, second=_RECORDS, shares=st.sampled_from([1, 3]))
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_of_each_key_the_last_message_stays_and_all_without_one_in_their_order(
    tmp_path_factory: pytest.TempPathFactory, first: list[Odd], second: list[Odd], shares: int
) -> None:
    folder = tmp_path_factory.mktemp("c")
    paths = {"1": write_store(folder / "1", first), "2": write_store(folder / "2", second)}
    chosen = select(paths, options={"minPartitions": "3"})

    with pytest.MonkeyPatch.context() as patch:
        if shares > 1:
            patch.setattr(keyed, "_SHARE", 10)
        done = compact(None, chosen, str(folder / "out"))

    expected = kept(paths, last)
    assert messages(folder / "out") == expected
    everything = listed(paths)
    assert (done.before, done.after) == (len(everything), sum(map(len, expected.values())))
    keys = {(m.topic, k) for _, m, c in everything if (k := dict(c.properties).get("KEYS"))}
    without = [c for _, _, c in everything if "KEYS" not in dict(c.properties)]
    assert (done.keys, done.without_key) == (len(keys), len(without))
    assert done.bytes_before == sum(m.size for _, m, _ in everything)
    assert {each.topic: each.before - each.after for each in done.topics} == {
        topic: sum(m.topic == topic for _, m, _ in everything)
        - sum(len(c) for k, c in expected.items() if k[0] == topic)
        for topic in {m.topic for _, m, _ in everything}
    }


@given(records=_RECORDS, window_s=st.sampled_from([5, 1000]))
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_of_equal_messages_within_the_window_the_first_stays(
    tmp_path_factory: pytest.TempPathFactory, records: list[Odd], window_s: int
) -> None:
    folder = tmp_path_factory.mktemp("d")
    paths = {"1": write_store(folder / "1", records)}

    dedup(None, select(paths), str(folder / "out"), by="keys", window=float(window_s))

    def firsts(group: list[tuple[str, Any, Copy]]) -> list[int]:
        chosen: list[int] = []
        for number in sorted(range(len(group)), key=lambda n: (group[n][1].store_timestamp_ms, n)):
            at_ms = group[number][1].store_timestamp_ms
            if not chosen or at_ms - group[chosen[-1]][1].store_timestamp_ms > 1000 * window_s:
                chosen.append(number)
        return chosen

    assert messages(folder / "out") == kept(paths, firsts)


def test_a_window_reaches_from_the_one_that_was_kept_to_its_last_moment(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", [odd("k", b"%d" % at, at) for at in (0, 5, 6, 11, 12)])

    dedup(None, path, str(tmp_path / "out"), by="keys", window=5.0, topics="t")

    assert [copy.body for copy in messages(tmp_path / "out")["t", 0]] == [b"0", b"6", b"12"]


def test_without_a_window_the_log_says_which_is_first(tmp_path: Path) -> None:
    """The clock went back: by times the second would be the first."""
    path = write_store(tmp_path / "s", [odd("k", b"1", 50), odd("k", b"2", 10), odd("j", b"3", 10), odd("k", b"4", 60)])

    done = dedup(None, path, str(tmp_path / "out"), by="keys", window=None, topics="t")

    assert [copy.body for copy in messages(tmp_path / "out")["t", 0]] == [b"1", b"3"]
    assert (done.before, done.after) == (4, 2)


@pytest.mark.parametrize("window", [None, 1000.0])
def test_between_stores_the_time_of_storing_says_and_then_the_order_they_are_named_in(
    tmp_path: Path, window: float | None
) -> None:
    """In each store the clock went back once: there the log says."""
    paths = {
        "1": write_store(tmp_path / "1", [odd("a", b"1", 20), odd("b", b"2", 5), odd("c", b"3", 7)]),
        "2": write_store(tmp_path / "2", [odd("a", b"4", 10), odd("b", b"5", 30), odd("c", b"6", 7)]),
    }
    chosen = select(paths, topics="t")

    compact(None, chosen, str(tmp_path / "last"))
    dedup(None, chosen, str(tmp_path / "first"), by="keys", window=window)

    assert sorted(bodies(tmp_path / "last")) == [b"1", b"5", b"6"]
    assert sorted(bodies(tmp_path / "first")) == [b"2", b"3", b"4"]


def test_within_a_store_the_log_says_which_is_last_also_across_its_queues(tmp_path: Path) -> None:
    records = [odd("a", b"1", 50, queue_id=1), odd("x", b"x", queue_id=1), odd("a", b"2", 10, queue_id=0)]
    path = write_store(tmp_path / "s", records)

    compact(None, path, str(tmp_path / "last"), topics="t")

    assert sorted(bodies(tmp_path / "last")) == [b"2", b"x"]


# -- keys --------------------------------------------------------------------------------------------------------------


def bodies(path: Path) -> list[bytes]:
    return [copy.body for copies in messages(path).values() for copy in copies]


@pytest.mark.parametrize(
    ("key", "stay"),
    [
        ("keys", [b"2", b"3", b"4"]),
        ("device", [b"1", b"3", b"4"]),
        ("keys,device", [b"1", b"2", b"3", b"4"]),
        (("tags",), [b"1", b"2", b"3", b"4"]),
        ("body", [b"1", b"2", b"3", b"4"]),
    ],
)
def test_a_key_is_made_of_columns_and_properties(tmp_path: Path, key: Any, stay: list[bytes]) -> None:
    records = [
        odd("a", b"1", properties={"device": "x"}),
        odd("a", b"2", properties={"device": "y"}),
        odd("b", b"3", properties={"device": "y"}),
        odd(None, b"4"),
    ]
    path = write_store(tmp_path / "s", records)

    compact(None, path, str(tmp_path / "out"), key=key, topics="t")

    assert bodies(tmp_path / "out") == stay


def test_values_that_only_look_alike_when_joined_are_different_keys(tmp_path: Path) -> None:
    records = [
        Odd(body=b"1", properties=b"x\x01a\x01b\x02y\x01c\x02"),
        Odd(body=b"2", properties=b"x\x01a\x02y\x01b\x01c\x02"),
    ]
    path = write_store(tmp_path / "s", records)

    compact(None, path, str(tmp_path / "out"), key="x,y", topics="t")

    assert bodies(tmp_path / "out") == [b"1", b"2"]


def test_equal_bodies_are_found(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", [odd("a", b"same"), odd("b", b"same"), odd("a", b"other"), odd(None, b"")])

    dedup(None, path, str(tmp_path / "out"), by="body", topics="t")

    assert bodies(tmp_path / "out") == [b"same", b"other", b""]


def test_members_of_json_bodies_are_keys(tmp_path: Path) -> None:
    """1 and "1" differ, order in an object does not; what is no JSON, or lacks the member, has no key."""
    values = [
        {"order": {"id": 1}, "n": 1},
        {"order": {"id": "1"}, "n": 2},
        {"order": {"id": 1}, "n": 3},
        {"order": {"id": {"a": 1, "b": [2]}}, "n": 4},
        {"order": {"id": {"b": [2], "a": 1}}, "n": 5},
        {"order": {"id": None}, "n": 6},
        {"order": {"id": None}, "n": 7},
        {"order": 1, "n": 8},
        {"order": 1, "n": 9},
        [{"order": {"id": 1}}],
    ]
    others = [b"", b"{", b'{"order": {"id": 1}', b"\xff", b"[" * 100_000, b"null"]
    with mqstore.open(tmp_path / "s") as store:
        store.create_topic("t", queues=1)
        for value in values:
            store.put("t", json.dumps(value).encode())
        for body in others:
            store.put("t", body)
        squeezed = json.dumps({"order": {"id": 1}, "n": 10}).encode()
        store.put("t", zlib.compress(squeezed), compressed="zlib")

    dedup(None, tmp_path / "s", str(tmp_path / "first"), by="body.order.id", window=None)
    compact(None, tmp_path / "s", str(tmp_path / "last"), key="body.order.id")

    def numbers(path: Path) -> list[int]:
        plain = [zlib.decompress(body) if body[:1] == b"x" else body for body in bodies(path)]
        return [json.loads(body)["n"] for body in plain if b'"n"' in body]

    assert numbers(tmp_path / "first") == [1, 2, 4, 6, 7, 8, 9]
    assert numbers(tmp_path / "last") == [2, 5, 6, 7, 8, 9, 10]
    for path in (tmp_path / "first", tmp_path / "last"):
        assert [body for body in bodies(path) if body in others] == others


@pytest.mark.parametrize("name", ["body.", "body..a", "body.a.", "body.a..b"])
def test_a_member_without_a_name_is_refused(tmp_path: Path, name: str) -> None:
    path = write_store(tmp_path / "s", [odd("a", b"1")])
    with pytest.raises(ConfigError, match=r"body\.NAME for a member"):
        dedup(None, path, str(tmp_path / "out"), by=name)
    assert not (tmp_path / "out").exists()


def test_of_a_doubled_property_the_last_counts(tmp_path: Path) -> None:
    path = write_store(
        tmp_path / "s",
        [Odd(body=b"1", properties=b"KEYS\x01old\x02KEYS\x01k\x02"), Odd(body=b"2", properties=b"KEYS\x01k\x02")],
    )

    compact(None, path, str(tmp_path / "out"), topics="t")

    assert bodies(tmp_path / "out") == [b"2"]


def test_unique_keys_tell_what_was_sent_twice_and_a_clients_are_kept(tmp_path: Path) -> None:
    with MessageStore(tmp_path / "s") as store:
        for key in ("u1", "u2", "u1", "u3", "u2"):
            store.put("t", b"", unique_key=key)

    dedup(None, tmp_path / "s", str(tmp_path / "out"))

    found = messages(tmp_path / "out")["t", 0]
    assert [dict(copy.properties)["UNIQ_KEY"] for copy in found] == ["u1", "u2", "u3"]


# -- tombstones --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "stay"),
    [
        ({}, [b"", b"", b"n", b"b2"]),
        ({"retention": 100.0}, [b"", b"n", b"b2"]),
        ({"retention": 1e6}, [b"", b"", b"n", b"b2"]),
        ({"tombstones": False}, [b"", b"", b"n", b"b2"]),
    ],
)
def test_a_tombstone_takes_its_key_away_and_goes_when_it_is_old(
    tmp_path: Path, how: dict[str, Any], stay: list[bytes]
) -> None:
    records = [
        odd("a", b"a1", 0),
        odd("b", b"b1", 0),
        odd("a", b"", 10),  # old
        odd("c", b"c1", 20),
        odd("c", b"", 1000),  # young
        odd(None, b"n", 0),
        odd("b", b"b2", 0),
    ]
    path = write_store(tmp_path / "s", records)
    clock = SimulatedClock(T0 + 1_050_000)

    compact(None, path, str(tmp_path / "out"), topics="t", clock=clock, **how)

    assert bodies(tmp_path / "out") == stay


# -- once, and new -----------------------------------------------------------------------------------------------------


def test_a_set_is_made_and_fewer_queues_if_asked_for(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(60))

    done = compact(None, path, str(tmp_path / "set"), key="tags", topics="t", target="set", queues=1)

    assert list(done.stores) == [member.name for member in members(tmp_path / "set")]
    found = joined(members(tmp_path / "set"))
    assert [*found] == [("t", 0)]
    assert len(found["t", 0]) == 3


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_crash_around_the_commit_and_a_second_run_give_the_result_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    path = write_store(tmp_path / "s", many(60))
    real = publish.commit

    def crashing(*args: Any, **how: Any) -> Any:
        if moment == "after":
            real(*args, **how)
        raise OSError("killed")

    monkeypatch.setattr(publish, "commit", crashing)
    with pytest.raises(OSError, match="killed"):
        compact(None, path, str(tmp_path / "out"), key="tags")
    monkeypatch.setattr(publish, "commit", real)
    assert not (tmp_path / "out" / "_staging").exists()

    again = compact(None, path, str(tmp_path / "out"), key="tags")

    assert again.already == (moment == "after")
    assert compact(None, path, str(tmp_path / "other"), key="tags").after == sum(
        map(len, messages(tmp_path / "out").values())
    )
    assert messages(tmp_path / "out") == messages(tmp_path / "other")


def test_a_result_that_was_recorded_when_the_run_was_killed_is_there_once_the_next_says_so(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(60))
    with killed_once_recorded(tmp_path / "out"):
        compact(None, path, str(tmp_path / "out"), key="tags")

    assert compact(None, path, str(tmp_path / "out"), key="tags").already

    compact(None, path, str(tmp_path / "other"), key="tags")
    assert messages(tmp_path / "out") == messages(tmp_path / "other")


def test_the_result_is_new_and_what_is_there_is_left_alone(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(20))
    other = write_store(tmp_path / "o", many(4))
    compact(None, path, str(tmp_path / "set"), target="set")
    before = tree(tmp_path)

    with pytest.raises(ConfigError, match="has messages: the result is a new one"):
        compact(None, path, str(other))
    with pytest.raises(ConfigError, match="has stores: the result is a new one"):
        compact(None, path, str(tmp_path / "set"), target="set", key="tags")
    with pytest.raises(ConfigError, match="has messages"):
        compact(None, path, str(path))
    with pytest.raises(ConfigError, match="target='inbox'"):
        compact(None, path, str(tmp_path / "n"), target="inbox")
    with pytest.raises(ConfigError, match="keep='first'"):
        compact(None, path, str(tmp_path / "n"), keep="first")
    with pytest.raises(ConfigError, match="tombstones=False"):
        compact(None, path, str(tmp_path / "n"), tombstones=False, retention=1.0)
    with pytest.raises(ConfigError, match="key=''"):
        compact(None, path, str(tmp_path / "n"), key="")
    with pytest.raises(ConfigError, match="window=0"):
        dedup(None, path, str(tmp_path / "n"), window=0)
    for wrong in ({"key": ""}, {"tombstones": False, "retention": 1.0}, {"target": "inbox"}):
        with pytest.raises(ConfigError):
            compact_plan(path, str(tmp_path / "n"), **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="window=0"):
        dedup_plan(path, str(tmp_path / "n"), window=0)
    for plan in (compact_plan(path, str(tmp_path / "n")), dedup_plan(path, str(tmp_path / "n"))):
        assert (plan.stores, plan.queues, plan.messages, plan.already) == (1, 5, 21, False)
    assert compact_plan(path, str(tmp_path / "set"), target="set").already
    assert tree(tmp_path) == before


def test_a_task_that_fails_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_store(tmp_path / "s", many(20))
    monkeypatch.setattr(np, "save", lambda *args: (_ for _ in ()).throw(OSError("disk full")))

    with pytest.raises(OSError, match="disk full"):
        compact(None, path, str(tmp_path / "out"))

    assert not (tmp_path / "out").exists()
