"""Replay without Spark: every message once, in the order of its queue, whatever a run is stopped by."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mqstore import MessageStore, StoreConfig
from mqstore.broker.names import is_system_topic
from mqstore.broker.parts import open_parts
from mqstore.broker.selection import group_queue
from mqstore.errors import ConfigError, CorruptStoreError, InvalidMessageError, NotPermittedError, TopicNotFoundError
from mqstore.layout.hosts import encode_host
from mqstore.layout.properties import encode_properties
from mqstore.spark import publish
from mqstore.spark.jobs.compact import compact
from mqstore.spark.jobs.dedup import dedup
from mqstore.spark.jobs.export import export_parquet
from mqstore.spark.jobs.replay import replay, replay_plan
from mqstore.spark.jobs.rewrite import Pace
from mqstore.spark.jobs.shape import select
from tests.conftest import GoldenStore
from tests.spark.copies import Copy, Queues, fail, joined, killed_once_recorded, members, messages, tree
from tests.spark.support import Odd, crashed_store, many, odd_records, write_store
from tests.tools.brokers import broker

Golden = Callable[[str], GoldenStore]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write_store(tmp_path / "s", many(80))


def without(copies: Queues, *topics: str) -> Queues:
    return {key: found for key, found in copies.items() if key[0] not in topics}


# -- what a copy is ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", ["1", "5"])
def test_every_message_is_copied_once_in_the_order_of_its_queue(store: Path, tmp_path: Path, cut: str) -> None:
    chosen = select(store, options={"minPartitions": cut})

    done = replay(None, chosen, tmp_path / "t")

    assert messages(tmp_path / "t") == messages(store)
    [dest] = done.dests
    assert (done.read, done.messages, done.left_out, done.damaged, done.already) == (81, 81, 0, 0, False)
    assert dest.topics == {"orders": 40, "seed": 1, "t": 40}
    assert dest.bytes == sum(map(sum, sizes(store).values())) == sum(map(sum, sizes(tmp_path / "t").values()))


@pytest.mark.parametrize("rows", ["7", "20000"])
def test_messages_of_a_log_that_queues_share_are_copied_in_pieces_of_any_size(tmp_path: Path, rows: str) -> None:
    """Enough of them, so that their records are put together before they are checked."""
    source = write_store(tmp_path / "s", many(900))
    chosen = select(source, options={"maxRowsPerBatch": rows, "minPartitions": "2"})

    replay(None, chosen, tmp_path / "t", keep_time=True)

    def stamped(copies: list[Copy]) -> list[Copy]:
        return [copy._replace(properties=copy.properties[1:]) for copy in copies]

    found = messages(tmp_path / "t")
    assert {key: stamped(copies) for key, copies in found.items()} == messages(source)
    stamps = [dict(copy.properties)["REPLAY_STORE_TIME"] for copy in found["t", 0]]
    assert stamps == [str(1_700_000_000_000 + i) for i in range(0, 900, 4)]


def test_what_is_damaged_ends_it_or_is_left_out_and_counted(store: Path, tmp_path: Path) -> None:
    before = messages(store)
    with MessageStore(store, "r") as opened:
        bad = next(message for message in opened.iter("t", 1) if message.offset == 7)
        place = bad.physical_offset + bad.size - 3
    segment = 1 << 14
    file = store / "commitlog" / f"{place // segment * segment:020d}"
    data = bytearray(file.read_bytes())
    data[place % segment] ^= 1
    file.write_bytes(data)

    with pytest.raises(CorruptStoreError, match="offset 7"):
        replay(None, store, tmp_path / "t")
    assert not (tmp_path / "t").exists()
    done = replay(None, select(store, options={"onCorrupt": "skip"}), tmp_path / "t")

    del before["t", 1][7]
    assert messages(tmp_path / "t") == before
    assert (done.damaged, done.messages) == (1, 80)
    with pytest.raises(ConfigError, match="onCorrupt=keep"):
        replay(None, select(store, options={"onCorrupt": "keep"}), tmp_path / "u")
    with pytest.raises(ConfigError, match="readBy=log"):
        replay(None, select(store, options={"readBy": "log"}), tmp_path / "u")


@pytest.mark.parametrize("job", [replay, compact, dedup])
def test_a_store_whose_queues_a_crash_left_behind_its_log_is_not_copied_in_part(tmp_path: Path, job: Any) -> None:
    """It was, and the same command after the store had been opened said that all was done."""
    source = crashed_store(tmp_path / "s", 10, 6)

    with pytest.raises(ConfigError, match=r"a crash left messages .* `mqstore recover` it; a copy would lack them"):
        job(None, source, str(tmp_path / "t"))
    assert not (tmp_path / "t").exists()
    with MessageStore(source):
        pass
    job(None, source, str(tmp_path / "t"))

    assert messages(tmp_path / "t") == messages(source)
    assert sum(map(len, messages(source).values())) == 16


def test_a_crashed_store_whose_queues_list_everything_is_copied(tmp_path: Path) -> None:
    source = crashed_store(tmp_path / "s", 10, 0)
    assert replay(None, source, tmp_path / "t").messages == 10


@pytest.mark.parametrize("job", [replay, compact, dedup])
def test_a_store_without_queues_is_not_copied_as_if_it_had_no_messages(store: Path, tmp_path: Path, job: Any) -> None:
    shutil.rmtree(store / "consumequeue")
    with pytest.raises(ConfigError, match=r"s has records, and no consume queues .* `mqstore recover`"):
        job(None, store, str(tmp_path / "t"))
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("lost", ["orders", "orders/0"])
@pytest.mark.parametrize("job", [replay, compact, dedup, export_parquet])
def test_a_store_that_lost_some_queues_is_not_copied_without_their_messages(
    tmp_path: Path, job: Any, lost: str
) -> None:
    """It was, with a warning in the log: what has an id is never copied again."""
    source = write_store(tmp_path / "s", many(40))
    before = messages(source)
    shutil.rmtree(source / "consumequeue" / lost)

    for chosen in (source, select(source, options={"readBy": "queue"})):
        with pytest.raises(
            ConfigError, match=r"s have lost files since it was closed: open it .* `mqstore recover` it"
        ):
            job(None, chosen, str(tmp_path / "t"))
    assert not (tmp_path / "t").exists()
    with MessageStore(source):
        pass

    job(None, source, str(tmp_path / "t"))
    assert messages(source) == before
    if job is not export_parquet:
        assert messages(tmp_path / "t") == before


@pytest.mark.parametrize("job", [replay, compact, dedup])
def test_what_was_deleted_or_purged_does_not_rise_in_a_copy(tmp_path: Path, job: Any) -> None:
    """It is in the log, and in queues, until retention takes it."""
    fail(tmp_path / "s", 6)
    with broker(tmp_path / "s", dlq_retention=None) as running:
        running.dead_letters("billing").purge(before_offset=4)
        for topic in ("gone", "again"):
            running.topics.create(topic, queues=1)
            for i in range(5):
                running.put(topic, b"old %d" % i)
            running.topics.delete(topic, force=True)
        running.topics.create("again", queues=1)
        running.put("again", b"new")

    job(None, tmp_path / "s", str(tmp_path / "t"))

    found = messages(tmp_path / "t")
    assert {topic for topic, _ in found} == {"orders", "again"}
    assert [copy.body for copy in found["again", 0]] == [b"new"]
    replay(None, tmp_path / "s", tmp_path / "letters", topics="%DLQ%billing", system=True)
    assert len(messages(tmp_path / "letters", system=True)["%DLQ%billing", 0]) == 2


def sizes(path: Path) -> dict[tuple[str, int], list[int]]:
    with MessageStore(path, "r") as store:
        refs = [ref for topic in store.topics() for ref in store.queues(topic)]
        return {(ref.topic, ref.queue_id): [message.size for message in store.iter(*ref)] for ref in refs}


@pytest.mark.parametrize(("of", "to"), [("mqstore", "mqstore"), ("mqstore", "rocketmq"), ("rocketmq", "mqstore")])
@given(records=st.lists(odd_records(), max_size=30))
@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_records_as_odd_as_the_format_allows_are_copied_whole(
    tmp_path_factory: pytest.TempPathFactory, of: Any, to: Any, records: list[Odd]
) -> None:
    folder = tmp_path_factory.mktemp("odd")
    # A target takes no topic of a group, unless that is asked for, and no name that no topic may have.
    source = write_store(folder / "s", [odd for odd in records if odd.topic in ("t", "orders")], of)
    small = StoreConfig(segment_bytes=1 << 16, consumequeue_units=64, index_slots=16, index_entries=64)
    with MessageStore(folder / "t", profile=to, config=small):
        pass

    replay(None, source, folder / "t")

    assert messages(folder / "t") == messages(source)


@pytest.mark.parametrize("name", ["trimmed", "propcrc"])
def test_the_topics_of_users_of_a_java_store_are_copied_into_one_of_ours(
    golden: Golden, tmp_path: Path, name: str
) -> None:
    path = golden(name).path

    replay(None, path, tmp_path / "t")

    originals = {key: found for key, found in messages(path).items() if not is_system_topic(key[0])}
    assert messages(tmp_path / "t") == originals
    assert originals
    with MessageStore(tmp_path / "t", "r") as copy:
        assert copy.manifest.profile == "mqstore"


def test_hosts_flags_and_attempts_are_kept_and_the_store_host_is_the_targets(tmp_path: Path) -> None:
    odd = Odd(
        born_host=encode_host("[2001:db8::7]:9"),
        store_host=encode_host("10.0.0.7:10911"),
        flag=-7,
        reconsume_times=3,
        sys_flag=0x308,
    )
    source = write_store(tmp_path / "s", [odd])

    replay(None, source, tmp_path / "t", topics="t")

    with MessageStore(tmp_path / "t", "r") as copy:
        [message] = copy.iter("t", 0)
        assert (message.flag, message.reconsume_times, message.sys_flag & 0x308) == (-7, 3, 0x308)
        assert "2001:db8::7" in str(message.born_host)
        assert "10.0.0.7" not in str(message.store_host)
        assert message.born_timestamp_ms == odd.born_ms
        assert message.store_timestamp_ms > odd.store_ms


def test_a_topic_is_renamed_and_nothing_else_of_its_messages_changes(store: Path, tmp_path: Path) -> None:
    replay(None, store, tmp_path / "t", topics=["t", "orders"], rename={"t": "a-much-longer-name"})

    expected = {("a-much-longer-name" if topic == "t" else topic, q): c for (topic, q), c in messages(store).items()}
    assert messages(tmp_path / "t") == without(expected, "seed")


def test_names_of_topics_may_be_longer_than_a_byte_can_say(tmp_path: Path) -> None:
    """Records of the second version, which have two bytes for that, from and to those of the first."""
    retry = "%RETRY%" + "g" * 130
    source = write_store(tmp_path / "s", [Odd(topic="x" * 200, body=b"1"), Odd(topic=retry, body=b"2"), Odd()])

    replay(
        None, source, tmp_path / "t", topics=["x" * 200, retry, "t"], rename={"x" * 200: "short"}, system=True, tag=True
    )

    found = messages(tmp_path / "t", system=True)
    originals = messages(source, system=True)
    expected = {"short": originals["x" * 200, 0], retry: originals[retry, 0], "t": originals["t", 0]}
    assert {key: [c._replace(properties=c.properties[1:]) for c in copies] for key, copies in found.items()} == {
        (topic, 0): copies for topic, copies in expected.items()
    }


def test_two_topics_may_become_one(store: Path, tmp_path: Path) -> None:
    replay(None, store, tmp_path / "t", topics=["t", "orders"], rename={"t": "all", "orders": "all"})

    source, copy = messages(store), messages(tmp_path / "t")
    assert {key: sorted(found) for key, found in copy.items()} == {
        ("all", queue): sorted(source["t", queue] + source["orders", queue]) for queue in (0, 1)
    }


def test_a_tag_and_the_time_of_storing_are_added_and_an_earlier_replays_tag_is_replaced(tmp_path: Path) -> None:
    before = encode_properties({"REPLAY_ID": "old", "TAGS": "a", "REPLAY_STORE_TIME": "5"})
    source = write_store(tmp_path / "s", [Odd(properties=before), Odd(properties=b"TAGS\x01b"), Odd()])

    replay(None, source, tmp_path / "t", topics="t", tag=True, keep_time=True, id="new")

    added = (("REPLAY_ID", "new"), ("REPLAY_STORE_TIME", "1700000000001"))
    properties = [copy.properties for copy in messages(tmp_path / "t")["t", 0]]
    assert properties == [(*added, ("TAGS", "a")), (*added, ("TAGS", "b")), added]


def test_properties_that_would_become_too_long_refuse_the_replay_and_leave_nothing(tmp_path: Path) -> None:
    full = encode_properties({"x": "y" * 32_700})
    source = write_store(tmp_path / "s", [Odd(), Odd(properties=full)], segment_bytes=1 << 17)

    with pytest.raises(InvalidMessageError, match=r"t, queue 0, offset 1 cannot be copied to 't': its properties"):
        replay(None, source, tmp_path / "t", topics="t", tag=True, id="x" * 90)

    assert tree(tmp_path / "t") == {}


def test_a_body_that_the_target_does_not_take_refuses_the_replay_and_leaves_it_as_it_was(tmp_path: Path) -> None:
    source = write_store(tmp_path / "s", [Odd(), Odd(body=b"b" * 10_000)])
    with MessageStore(tmp_path / "t", config=StoreConfig(segment_bytes=1 << 13)) as target:
        target.put("t", b"there")
    before = tree(tmp_path / "t")

    with pytest.raises(InvalidMessageError, match="offset 1 cannot be copied"):
        replay(None, source, tmp_path / "t", topics="t")

    assert tree(tmp_path / "t") == before


# -- which messages ----------------------------------------------------------------------------------------------------


def test_only_the_messages_that_were_asked_for_are_copied(store: Path, tmp_path: Path) -> None:
    chosen = select(store, topics="t", start=3, stop=15, where="n > 20", options={"tags": "a || c"})

    done = replay(None, chosen, tmp_path / "t")

    def wanted(copy: Copy) -> bool:
        properties = dict(copy.properties)
        return int(properties["n"]) > 20 and properties["TAGS"] in ("a", "c")

    found = {key: [c for c in copies[3:15] if wanted(c)] for key, copies in messages(store).items() if key[0] == "t"}
    assert messages(tmp_path / "t") == found
    assert done.messages == sum(map(len, found.values())) > 0


def test_topics_of_groups_are_copied_only_if_that_is_said_and_those_of_the_engine_never(tmp_path: Path) -> None:
    records = [Odd(topic="%RETRY%g"), Odd(topic="%DLQ%g"), Odd(topic="SCHEDULE_TOPIC_XXXX"), Odd()]
    source = write_store(tmp_path / "s", records)

    replay(None, source, tmp_path / "a")
    assert {key[0] for key in messages(tmp_path / "a", system=True)} == {"seed", "t"}
    with pytest.raises(ConfigError, match=r"'%RETRY%g' holds what a group has again.*--system"):
        replay(None, source, tmp_path / "b", topics="%RETRY%g")
    replay(None, source, tmp_path / "b", topics=["%RETRY%g", "%DLQ%g"], system=True)
    assert {key[0] for key in messages(tmp_path / "b", system=True)} == {"%RETRY%g", "%DLQ%g"}
    replay(None, source, tmp_path / "c", topics="%DLQ%g", rename={"%DLQ%g": "look"})
    assert {key[0] for key in messages(tmp_path / "c", system=True)} == {"look"}
    with pytest.raises(ConfigError, match="belongs to the engine"):
        replay(None, source, tmp_path / "d", topics="SCHEDULE_TOPIC_XXXX", system=True)
    assert not (tmp_path / "d").exists()


# -- queues ------------------------------------------------------------------------------------------------------------


def test_new_topics_have_as_many_queues_as_the_source(tmp_path: Path) -> None:
    with MessageStore(tmp_path / "s") as source:
        open_parts(source).topics.create("t", queues=5)
        source.put("t", b"x", queue_id=1)

    replay(None, tmp_path / "s", tmp_path / "t")

    with MessageStore(tmp_path / "t", "r") as copy:
        config = open_parts(copy).topics.need("t")
        assert (config.read_queues, config.write_queues) == (5, 5)


def test_fewer_queues_take_whole_queues_and_keep_their_order(tmp_path: Path) -> None:
    records = [Odd(queue_id=i % 5, body=b"%d" % i) for i in range(50)]
    source = write_store(tmp_path / "s", records)

    replay(None, source, tmp_path / "t", topics="t", queues=2)

    found = messages(tmp_path / "t")
    originals = messages(source)
    for queue in (0, 1):
        for old in range(queue, 5, 2):
            kept = [copy for copy in found["t", queue] if copy in originals["t", old]]
            assert kept == originals["t", old]
    assert sum(map(len, found.values())) == 50


def test_message_groups_find_the_queue_that_a_producer_would_send_them_to(tmp_path: Path) -> None:
    groups = ["ada", "bob", "cleo", "dan"]
    records = [
        Odd(queue_id=0, body=b"%d" % i, properties=encode_properties({"__SHARDINGKEY": groups[i % 4]}))
        for i in range(24)
    ]
    source = write_store(tmp_path / "s", [*records, Odd(queue_id=4, body=b"none")])

    replay(None, source, tmp_path / "t", topics="t", queues=3, spread="key")

    found = messages(tmp_path / "t")
    for number, group in enumerate(groups):
        queue = group_queue(group, 3, "jump")
        mine = [int(c.body) for c in found["t", queue] if dict(c.properties).get("__SHARDINGKEY") == group]
        assert mine == list(range(number, 24, 4))
    assert b"none" in [copy.body for copy in found["t", 4 % 3]]


def test_a_topic_of_the_target_with_too_few_queues_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    source = write_store(tmp_path / "s", [Odd(queue_id=4)])
    with MessageStore(tmp_path / "t") as target:
        open_parts(target).topics.create("t", queues=3)
    before = tree(tmp_path / "t")

    with pytest.raises(ConfigError, match=r"'t' has 3 queues, and the copies want 5: give queues=3"):
        replay(None, source, tmp_path / "t", topics="t")
    assert tree(tmp_path / "t") == before

    replay(None, source, tmp_path / "t", topics="t", queues=3)
    assert [*messages(tmp_path / "t")] == [("t", 1)]


def test_queues_of_the_source_that_nothing_is_copied_of_need_no_place(tmp_path: Path) -> None:
    with MessageStore(tmp_path / "s") as source:
        open_parts(source).topics.create("t", queues=9)
        source.put("t", b"x", queue_id=1)
    with MessageStore(tmp_path / "t") as target:
        open_parts(target).topics.create("t", queues=2)

    replay(None, tmp_path / "s", tmp_path / "t")

    assert messages(tmp_path / "t") == messages(tmp_path / "s")


# -- several targets ---------------------------------------------------------------------------------------------------


def test_all_targets_get_all(store: Path, tmp_path: Path) -> None:
    done = replay(None, store, [tmp_path / "a", tmp_path / "b"], route="all")

    assert messages(tmp_path / "a") == messages(tmp_path / "b") == messages(store)
    assert done.messages == 162


def test_queues_are_shared_among_targets_and_each_is_whole_in_one(store: Path, tmp_path: Path) -> None:
    names = {name: tmp_path / name for name in "abc"}

    replay(None, store, names, route="queue")

    found = [messages(path) for path in names.values() if path.exists()]
    assert sum(map(len, found)) == len(messages(store))
    assert {key: copies for each in found for key, copies in each.items()} == messages(store)


def test_topics_are_led_to_targets_by_name(store: Path, tmp_path: Path) -> None:
    route = {"t": "a", "orders": "b", "seed": "b"}

    replay(None, store, {"a": tmp_path / "1", "b": tmp_path / "2"}, route=route)

    assert messages(tmp_path / "1") == without(messages(store), "orders", "seed")
    assert messages(tmp_path / "2") == without(messages(store), "t")


def test_a_set_gets_new_stores_and_several_sources_are_joined(store: Path, tmp_path: Path) -> None:
    other = write_store(tmp_path / "o", [Odd(body=b"%d" % i) for i in range(10)])

    done = replay(None, {"x": store, "y": other}, tmp_path / "set", topics="t", target="set")
    replay(None, other, tmp_path / "set", topics="t", target="set", id="second")

    assert len(members(tmp_path / "set")) == len(done.dests[0].stores) + 1
    copies, expected = joined(members(tmp_path / "set")), joined([store, other, other])
    assert {key: sorted(found) for key, found in copies.items()} == {
        key: sorted(found) for key, found in without(expected, "orders", "seed").items()
    }


def test_a_store_that_is_open_gets_its_copies_by_the_inbox(store: Path, tmp_path: Path) -> None:
    with MessageStore(tmp_path / "t") as owner:
        owner.put("mine", b"x")
        done = replay(None, store, tmp_path / "t", topics="t", target="inbox")
        assert done.messages == 40
        assert replay(None, store, tmp_path / "t", topics="t", target="inbox").already
    with MessageStore(tmp_path / "t"):
        pass

    assert without(messages(tmp_path / "t"), "mine") == without(messages(store), "orders", "seed")


# -- once --------------------------------------------------------------------------------------------------------------


def test_the_same_replay_once_more_writes_nothing_even_if_the_source_has_grown(store: Path, tmp_path: Path) -> None:
    replay(None, store, tmp_path / "t")
    with MessageStore(store) as writer:
        writer.put("t", b"later")
    before = tree(tmp_path / "t")

    again = replay(None, store, tmp_path / "t")

    assert (again.already, again.messages, again.read) == (True, 0, 0)
    assert tree(tmp_path / "t") == before
    assert replay(None, store, tmp_path / "t", start=20, id="the rest".replace(" ", "-")).messages == 1


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("target", ["store", "set"])
def test_a_crash_around_the_commit_and_a_second_run_give_each_message_once(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, target: str
) -> None:
    real = publish.commit

    def crashing(*args: Any, **how: Any) -> Any:
        if moment == "after":
            real(*args, **how)
        raise OSError("killed")

    monkeypatch.setattr(publish, "commit", crashing)
    with pytest.raises(OSError, match="killed"):
        replay(None, store, tmp_path / "t", target=target)
    monkeypatch.setattr(publish, "commit", real)
    assert not (tmp_path / "t" / "_staging").exists()

    again = replay(None, store, tmp_path / "t", target=target)

    assert again.already == (moment == "after")
    found = joined(members(tmp_path / "t")) if target == "set" else messages(tmp_path / "t")
    assert found == messages(store)


def test_staging_of_a_run_that_was_killed_is_nobodys_message(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill runs no `finally`: what it staged lies there when the second run comes."""
    real = publish.abort
    monkeypatch.setattr(publish, "abort", lambda *args, **how: None)
    monkeypatch.setattr(publish, "commit", lambda *args, **how: (_ for _ in ()).throw(OSError("killed")))
    with pytest.raises(OSError, match="killed"):
        replay(None, store, tmp_path / "t")
    monkeypatch.undo()
    assert publish.abort is real
    assert [*(tmp_path / "t" / "_staging").iterdir()]

    replay(None, store, tmp_path / "t")

    assert messages(tmp_path / "t") == messages(store)
    assert not (tmp_path / "t" / "_staging").exists()


@pytest.mark.parametrize("target", ["store", "set"])
def test_a_run_that_fails_takes_nothing_from_the_same_one_beside_it(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """As when a scheduler starts a job again that it takes for dead. Both staged in one folder: the one that gave up
    first took away what the other had staged, and that failed, too."""
    real = publish.commit

    def beside(*args: Any, **how: Any) -> Any:
        monkeypatch.setattr(publish, "commit", lambda *args, **how: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            replay(None, store, tmp_path / "t", target=target)
        monkeypatch.setattr(publish, "commit", real)
        return real(*args, **how)

    monkeypatch.setattr(publish, "commit", beside)
    replay(None, store, tmp_path / "t", target=target)

    found = joined(members(tmp_path / "t")) if target == "set" else messages(tmp_path / "t")
    assert found == messages(store)
    assert not (tmp_path / "t" / "_staging").exists()


@pytest.mark.parametrize("there", [False, True])
def test_what_a_run_had_recorded_when_it_was_killed_is_seen_once_the_next_says_already(
    store: Path, tmp_path: Path, there: bool
) -> None:
    """The next run found its id in the target, said that all was done and opened nothing: readers saw an empty store,
    until somebody opened it for writing."""
    if there:
        with MessageStore(tmp_path / "t") as target:
            target.put("before", b"x")
    with killed_once_recorded(tmp_path / "t"):
        replay(None, store, tmp_path / "t")
    assert without(messages(tmp_path / "t"), "before") == {}
    before = tree(tmp_path / "t")
    assert replay_plan(store, tmp_path / "t").already
    assert tree(tmp_path / "t") == before  # a plan writes nothing

    again = replay(None, store, tmp_path / "t")

    assert again.already
    assert without(messages(tmp_path / "t"), "before") == messages(store)


def test_a_target_that_somebody_has_open_already_is_left_to_him(store: Path, tmp_path: Path) -> None:
    with killed_once_recorded(tmp_path / "t"):
        replay(None, store, tmp_path / "t")

    with MessageStore(tmp_path / "t") as owner:
        assert replay(None, store, tmp_path / "t").already
        assert owner.offsets("t", 0) == (0, 20)


def test_of_two_targets_the_second_run_completes_the_one_that_lacks_it(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = publish.commit

    def crashing(options: Any, *args: Any, **how: Any) -> Any:
        if options.path.endswith("b"):
            raise OSError("killed")
        return real(options, *args, **how)

    monkeypatch.setattr(publish, "commit", crashing)
    with pytest.raises(OSError, match="killed"):
        replay(None, store, [tmp_path / "a", tmp_path / "b"], route="all")
    monkeypatch.setattr(publish, "commit", real)
    assert not (tmp_path / "b").exists()

    again = replay(None, store, [tmp_path / "a", tmp_path / "b"], route="all")

    assert [dest.already for dest in again.dests] == [True, False]
    assert messages(tmp_path / "a") == messages(tmp_path / "b") == messages(store)


def test_a_replay_of_nothing_is_not_remembered_as_done(store: Path, tmp_path: Path) -> None:
    assert replay(None, store, tmp_path / "t", topics="t", start=20).messages == 0
    assert not (tmp_path / "t").exists()
    with MessageStore(store) as writer:
        writer.put("t", b"later")

    assert replay(None, store, tmp_path / "t", topics="t", start=20).messages == 1


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_", "error", "says"),
    [
        ({"queues": 0}, ConfigError, "queues=0"),
        ({"spread": "key"}, ConfigError, "give queues"),
        ({"spread": "hash", "queues": 2}, ConfigError, "there are queue and key"),
        ({"rate": 0}, ConfigError, "rate=0"),
        ({"rename": {"t": "%DLQ%x"}}, ConfigError, "belongs to a group"),
        ({"rename": {"t": "no blanks"}}, InvalidMessageError, "a topic is"),
        ({"rename": {"absent": "x"}}, ConfigError, "'absent', of which nothing"),
        ({"id": "../x"}, ConfigError, "replay id '../x'"),
        ({"target": "table"}, ConfigError, "table"),
        ({"topics": "absent"}, TopicNotFoundError, "absent"),
        ({"route": "some"}, ConfigError, "route='some'"),
        ({"route": {"t": "elsewhere"}}, ConfigError, "'elsewhere', which is no target"),
        ({"where": "n >"}, Exception, "filter"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_written(
    store: Path, tmp_path: Path, given_: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        replay(None, store, tmp_path / "t", **given_)

    assert tree(tmp_path / "t") == {}


def test_several_targets_want_a_route_and_are_not_the_source(store: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 targets: say by route"):
        replay(None, store, [tmp_path / "a", tmp_path / "b"])
    with pytest.raises(ConfigError, match="lie in one another"):
        replay(None, store, store)
    with pytest.raises(ConfigError, match="lie in one another"):
        replay(None, store, store / "sub")
    with pytest.raises(ConfigError, match="two targets are one folder"):
        replay(None, store, {"a": tmp_path / "a", "b": tmp_path / "x" / ".." / "a"}, route="all")


def test_a_topic_that_may_not_be_written_to_is_refused(store: Path, tmp_path: Path) -> None:
    with MessageStore(tmp_path / "t") as target:
        open_parts(target).topics.create("t", queues=2, perm=4)

    with pytest.raises((NotPermittedError, InvalidMessageError), match="may not be written"):
        replay(None, store, tmp_path / "t")


def test_a_plan_counts_what_would_be_read_and_writes_nothing(store: Path, tmp_path: Path) -> None:
    before = tree(tmp_path)

    plan = replay_plan(store, [tmp_path / "a", tmp_path / "b"], topics="t", route="all")

    assert (plan.stores, plan.queues, plan.messages, plan.already) == (1, 2, 80, False)
    assert tree(tmp_path) == before


def test_a_plan_says_when_it_was_written_before(store: Path, tmp_path: Path) -> None:
    done = replay(None, store, tmp_path / "a", topics="t")

    plan = replay_plan(store, tmp_path / "a", topics="t")
    both = replay_plan(store, [tmp_path / "a", tmp_path / "b"], topics="t", route="all", id=done.id)

    assert (plan.id, plan.messages, plan.tasks, plan.already) == (done.id, 0, 0, True)
    assert (both.tasks > 0, both.messages, both.already) == (True, 40, False)


# -- pace --------------------------------------------------------------------------------------------------------------


def test_a_pace_waits_until_the_time_for_what_was_taken_has_come() -> None:
    now, waits = [100.0], []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        now[0] += seconds

    pace = Pace(10.0, lambda: now[0], wait)
    pace.take(5)
    pace.take(10)
    assert now[0] == pytest.approx(101.5)
    assert max(waits) <= 0.5
    now[0] = 200.0
    pace.take(1)
    assert now[0] == 200.0


def test_a_rate_copies_the_same(store: Path, tmp_path: Path) -> None:
    replay(None, store, tmp_path / "t", rate=1e9)

    assert messages(tmp_path / "t") == messages(store)
