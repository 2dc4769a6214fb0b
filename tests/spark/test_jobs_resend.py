"""Sending dead letters again without Spark: each once, whatever a run is stopped by, and as a broker's replay would."""

from __future__ import annotations

import json
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from mqstore import MessageStore
from mqstore.broker.deadletters import DeadLetters
from mqstore.broker.offsets import OffsetTable
from mqstore.broker.parts import open_parts
from mqstore.errors import (
    ConfigError,
    CorruptStoreError,
    FilterError,
    InvalidMessageError,
    StoreLockedError,
    UnsupportedStoreError,
)
from mqstore.layout.properties import encode_properties
from mqstore.spark.jobs import resend
from mqstore.spark.jobs.dlq import dlq_report
from mqstore.spark.jobs.resend import dlq_resend, resend_plan
from mqstore.spark.jobs.shape import select
from tests.spark.copies import fail, messages, tree
from tests.spark.support import Odd, write_store
from tests.tools.brokers import broker, clock_now
from tests.tools.support import mqstore, mqstore_json


def sent(path: Path, topic: str = "orders") -> list[tuple[bytes, str]]:
    """(body, letter) of all copies in a topic, in the order of the log."""
    with MessageStore(path, "r") as store:
        assert [*store.verify()] == []
        found = [m for ref in store.queues(topic) for m in store.iter(*ref) if "DLQ_RESENT" in m.stored_properties()]
        found.sort(key=lambda m: m.physical_offset)
        return [(bytes(m.body), m.stored_properties()["DLQ_RESENT"]) for m in found]


def left(path: Path, group: str = "billing") -> list[bytes]:
    with MessageStore(path, "r") as store:
        return [bytes(letter.body) for letter in DeadLetters(open_parts(store), group)]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    fail(tmp_path / "s", 6)
    return tmp_path / "s"


def test_letters_go_back_to_their_topic_as_new_messages_and_are_let_go_of(store: Path) -> None:
    letters = left(store)

    done = dlq_resend(None, store)

    [one] = done.stores
    assert (done.resent, one.topics, one.groups) == (6, {"orders": 6}, {"billing": 6})
    assert sent(store) == [(body, f"billing:{i}") for i, body in enumerate(letters)]
    assert left(store) == []
    assert not (store / "_staging").exists()


def test_a_copy_is_what_a_brokers_replay_makes_but_for_its_mark(store: Path, tmp_path: Path) -> None:
    fail(tmp_path / "other", 6)
    with MessageStore(tmp_path / "other") as other:
        DeadLetters(open_parts(other), "billing").replay(all_groups=True)
    dlq_resend(None, store)

    def copies(path: Path) -> dict[bytes, Any]:
        with MessageStore(path, "r") as opened:
            found = [m for ref in opened.queues("orders") for m in list(opened.iter(*ref))]
            newest = sorted(found, key=lambda m: m.physical_offset)[6:]
            assert len(newest) == 6
            return {bytes(m.body): m for m in newest}

    theirs, ours = copies(tmp_path / "other"), copies(store)
    assert ours.keys() == theirs.keys()
    for body, copy in ours.items():
        mine, its = copy.stored_properties(), theirs[body].stored_properties()
        assert mine.pop("DLQ_RESENT").startswith("billing:")
        assert mine.keys() == its.keys()
        assert {n: v for n, v in mine.items() if n not in ("UNIQ_KEY", "ORIGIN_MESSAGE_ID")} == {
            n: v for n, v in its.items() if n not in ("UNIQ_KEY", "ORIGIN_MESSAGE_ID")
        }
        assert (copy.reconsume_times, copy.flag, copy.tag, tuple(copy.keys)) == (0, 0, "T", (f"k{int(body)}",))


def test_what_was_sent_again_is_delivered_to_the_group_once_more(store: Path) -> None:
    dlq_resend(None, store)

    with broker(store, clock_now()) as running:
        running.run_once()
        got = [delivery for _ in range(4) for delivery in running.pop("billing", "orders", 16)]
    assert sorted(int(each.message.body) for each in got) == [0, 1, 2, 3, 4, 5]
    assert {each.message.reconsume_times for each in got} == {0}


def test_a_second_run_sends_nothing_and_a_later_one_what_came_since(store: Path) -> None:
    dlq_resend(None, store)
    before = tree(store)

    assert dlq_resend(None, store).resent == 0
    assert tree(store) == before

    fail(store, 2, topic="other", first=10)
    assert dlq_resend(None, store).stores[0].topics == {"other": 2}
    assert len(sent(store)) == 6
    assert left(store) == []


def test_chosen_letters_are_sent_and_the_others_stay_and_are_sent_later(store: Path) -> None:
    odd = [body for body in left(store) if int(body) % 2]

    done = dlq_resend(None, store, "dlq_reason = 'no item'")

    assert [body for body, _ in sent(store)] == odd
    assert (done.resent, done.stores[0].others) == (3, 3)
    again = dlq_resend(None, store)
    assert again.stores[0].resent == 3
    assert sorted(int(body) for body, _ in sent(store)) == [0, 1, 2, 3, 4, 5]
    assert left(store) == []


def test_groups_topics_and_times_choose_too(store: Path) -> None:
    fail(store, 3, topic="other", group="audit", first=20)

    with pytest.raises(ConfigError, match="no store knows the group 'nobody'; there are 'audit', 'billing'"):
        dlq_resend(None, store, groups=["nobody", "audit"])
    assert resend_plan(store, groups=["audit"]).letters[0].groups == {"audit": 3}
    assert resend_plan(select(store, topics="orders")).letters[0].groups == {"billing": 6}
    late = select(store, start=datetime(2100, 1, 1, tzinfo=UTC))
    assert resend_plan(late).letters[0].others == 9


def test_all_may_be_sent_to_another_topic_or_to_their_group_alone(store: Path) -> None:
    done = dlq_resend(None, store, to="again")

    assert done.stores[0].topics == {"again": 6}
    assert len(sent(store, "again")) == 6
    assert sent(store) == []


def test_of_two_letters_of_one_message_the_first_is_sent_but_a_new_failure_is_a_new_letter(store: Path) -> None:
    marks = encode_properties({"DLQ_ORIGIN_TOPIC": "t", "DLQ_ORIGIN_MESSAGE_ID": "A" * 32})
    twice = write_store(store.parent / "w", [Odd(topic="%DLQ%g", body=b"1", properties=marks) for _ in range(2)])

    done = dlq_resend(None, twice)
    assert (done.resent, done.stores[0].doubles) == (1, 1)
    assert dlq_resend(None, twice).resent == 0

    with MessageStore(twice) as opened:
        [first, *_] = opened.iter("%DLQ%g", 0)
        open_parts(opened).road.copy(first, "%DLQ%g", 0, first.stored_properties())
    assert dlq_resend(None, twice).resent == 1


def test_a_dry_run_counts_and_writes_nothing(store: Path) -> None:
    before = tree(store)

    found = resend_plan(store)

    assert (found.stores, found.queues, found.messages, found.tasks) == (1, 1, 6, 1)
    assert found.letters[0].topics == {"orders": 6}
    assert tree(store) == before
    with MessageStore(store) as opened:
        end = opened.max_offset
    done = dlq_resend(None, store)
    assert done.stores == found.letters
    with MessageStore(store, "r") as opened:
        all_there_are = [each for ref in opened.queues("orders") for each in opened.iter(*ref)]
    new = [each.size for each in all_there_are if each.physical_offset >= end]
    assert (len(new), sum(new)) == (found.messages, found.bytes)


# -- crashes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["before the file", "after the file", "after the splice", "before the start moves"])
def test_a_crash_at_any_step_and_a_second_run_send_each_letter_once(
    store: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def killed(*args: Any, **how: Any) -> Any:
        raise OSError("killed")

    real = MessageStore.splice

    def splice_and_die(*args: Any, **how: Any) -> Any:
        real(*args, **how)
        raise OSError("killed")

    with monkeypatch.context() as patch:
        if step == "before the file":
            patch.setattr(resend, "save_json", killed)
        elif step == "after the file":
            patch.setattr(MessageStore, "splice", killed)
        elif step == "after the splice":
            patch.setattr(MessageStore, "splice", splice_and_die)
        else:
            patch.setattr(OffsetTable, "move_start", killed)
        with pytest.raises(OSError, match="killed"):
            dlq_resend(None, store)

    again = dlq_resend(None, store)

    assert again.resent == (6 if step in ("before the file", "after the file") else 0)
    assert sorted(body for body, _ in sent(store)) == sorted(b"%d" % i for i in range(6))
    # Where nothing was left to send, letters that had been sent stayed: reports counted them, a replay sent them again.
    assert left(store) == []
    before = tree(store)
    assert dlq_resend(None, store).resent == 0
    assert tree(store) == before


def test_what_was_sent_is_known_when_the_record_of_splices_has_forgotten_it(store: Path) -> None:
    """It keeps some 10,000 applications, and others for a month. Which letters the last run had sent was told by it
    alone, and they were sent again."""
    dlq_resend(None, select(store, start=3))
    for path in (store / "config" / "spark").glob("txn.json*"):
        path.unlink()

    assert dlq_resend(None, store).resent == 3

    assert sorted(body for body, _ in sent(store)) == sorted(b"%d" % i for i in range(6))
    assert left(store) == []


def test_a_run_that_another_one_overtook_sends_nothing(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = resend._publish

    def overtaken(*args: Any) -> None:
        monkeypatch.setattr(resend, "_publish", real)
        dlq_resend(None, store, "dlq_reason = 'no item'")
        real(*args)

    monkeypatch.setattr(resend, "_publish", overtaken)
    with pytest.raises(ConfigError, match="another resend has run meanwhile"):
        dlq_resend(None, store)

    assert len(sent(store)) == 3
    assert dlq_resend(None, store).resent == 3
    assert len(sent(store)) == 6


def test_a_run_that_is_refused_takes_nothing_from_another_one(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both staged in one folder: a run that named a group wrongly deleted what another one, which was waiting for the
    lock, had staged there, and that one failed for it."""
    real = resend._publish

    def beside(*args: Any) -> None:
        monkeypatch.setattr(resend, "_publish", real)
        with pytest.raises(ConfigError, match="no store knows the group 'biling'"):
            dlq_resend(None, store, groups=["biling"])
        with MessageStore(store), pytest.raises(StoreLockedError):
            dlq_resend(None, store, lock_timeout_s=0.0)
        real(*args)

    monkeypatch.setattr(resend, "_publish", beside)
    assert dlq_resend(None, store).resent == 6

    assert len(sent(store)) == 6
    assert not (store / "_staging").exists()


def test_a_lost_list_of_what_was_sent_is_told_and_not_taken_for_an_empty_one(store: Path) -> None:
    dlq_resend(None, store)
    for path in (store / "config" / "spark").glob("resent.json*"):
        path.unlink()

    with pytest.raises(CorruptStoreError, match="does not tell which dead letters run 0 has sent"):
        dlq_resend(None, store)


@pytest.mark.parametrize(
    "content",
    [
        b"\0" * 20,
        b'{"version": 1, "done": "0", "sent": {}, "next": {}}',
        b'{"version": 1, "done": 0, "sent": {}}',
        b'{"version": 1, "done": 0, "sent": {"billing": [3, 6]}, "next": {}}',
        b'{"version": 1, "done": 0, "sent": {"billing": [["3", "6"]]}, "next": {}}',
    ],
)
def test_a_damaged_list_of_what_was_sent_is_mended_by_the_command_that_the_error_names(
    store: Path, content: bytes
) -> None:
    """`recover --rebuild config` said that every JSON file decodes, verify that all was well: neither looked at it. And
    once it was moved aside, by hand, the next run refused since it was lost."""
    dlq_resend(None, select(store, start=3))
    path = store / "config" / "spark" / "resent.json"
    for name in (path, path.with_name("resent.json.bak")):
        name.write_bytes(content)
    with pytest.raises(CorruptStoreError) as caught:
        dlq_resend(None, store)
    assert caught.value.repair in str(caught.value)
    _, *command = shlex.split(caught.value.repair)

    for look in (["verify"], ["recover", "--dry-run"]):
        findings = mqstore_json(look[0], store, *look[1:], exit_code=1)["findings"]
        assert [(each["kind"], each["file"]) for each in findings] == [("bad_json", "config/spark/resent.json")]
    assert mqstore(*command, "--yes").exit_code == 0

    assert mqstore_json("verify", store)["ok"]
    assert dlq_resend(None, store).resent == 3  # it starts from defaults: what is still listed was never sent
    assert left(store) == []
    assert dlq_resend(None, store).resent == 0
    assert json.loads(path.read_text()) == {"version": 1, "done": 1, "sent": {"billing": [[0, 3]]}, "next": {}}


def test_a_replay_and_a_resend_send_nothing_that_the_other_has_sent(store: Path) -> None:
    letters = left(store)
    assert dlq_resend(None, select(store, start=2, stop=4)).resent == 2
    assert left(store) == [letters[0], letters[1], letters[4], letters[5]]
    assert mqstore_json("dlq", "replay", store, "--group", "billing", "--offset", 1)["count"] == 1
    assert dlq_resend(None, select(store, start=1, stop=5)).resent == 1
    assert mqstore_json("dlq", "replay", store, "--group", "billing")["count"] == 2
    assert dlq_resend(None, store).resent == 0


def test_a_list_of_what_was_sent_by_a_newer_program_is_refused_and_kept(store: Path) -> None:
    """It counted as damage: the command that the error named would have moved it aside, and the letters been sent
    twice."""
    dlq_resend(None, store)
    path = store / "config" / "spark" / "resent.json"
    path.write_text('{"version": 2}')

    with pytest.raises(UnsupportedStoreError, match=r"resent\.json was written by a newer mqstore .*upgrade"):
        dlq_resend(None, store)

    assert mqstore("recover", store, "--rebuild", "config", "--yes").exit_code == 3
    assert path.read_text() == '{"version": 2}'


def test_a_store_that_is_open_is_refused_and_nothing_stays_staged(store: Path) -> None:
    with MessageStore(store) as owner:
        with pytest.raises(StoreLockedError, match="mqstore dlq replay"):
            dlq_resend(None, store, lock_timeout_s=0.0)
        assert owner.path == store
    assert not (store / "_staging").exists()
    assert sent(store) == []


def test_wrong_arguments_are_told(store: Path) -> None:
    before = tree(store)

    with pytest.raises(ConfigError, match="to='%DLQ%x'"):
        dlq_resend(None, store, to="%DLQ%x")
    with pytest.raises(InvalidMessageError):
        dlq_resend(None, store, to="no blanks")
    with pytest.raises((FilterError, ConfigError)):
        dlq_resend(None, store, "n >")
    assert tree(store) == before


@pytest.mark.parametrize(
    "options",
    [
        {"keys": "k1"},
        {"tags": "T"},
        {"assign": '{"orders": [0]}'},
        {"subscribePattern": "o.*"},
        {"startingTimestamp": "2999-01-01"},
        {"endingOffsets": "earliest"},
    ],
)
def test_an_option_that_would_choose_is_not_passed_over(store: Path, options: dict[str, str]) -> None:
    """All letters were sent, whatever the option said, and counted."""
    before = tree(store)
    chosen = select(store, options=options)

    for job in (dlq_resend, dlq_report):
        with pytest.raises(ConfigError, match=f"option {next(iter(options))}: this job does not go by it"):
            job(None, chosen)
    assert tree(store) == before


def test_the_file_is_as_it_is_documented(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said() -> Any:
        return json.loads((store / "config" / "spark" / "resent.json").read_text())

    dlq_resend(None, select(store, start=3))
    assert said() == {"version": 1, "done": 0, "sent": {"billing": [[3, 6]]}, "next": {}}

    with monkeypatch.context() as patch:
        patch.setattr(MessageStore, "splice", lambda *args, **how: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(OSError, match="killed"):
            dlq_resend(None, store)
    assert said() == {"version": 1, "done": 0, "sent": {"billing": [[3, 6]]}, "next": {"billing": [[0, 3]]}}

    dlq_resend(None, store)
    assert said() == {"version": 1, "done": 1, "sent": {"billing": [[0, 6]]}, "next": {}}


def test_a_copy_of_the_file_counts_only_if_it_lacks_no_run(store: Path) -> None:
    dlq_resend(None, select(store, start=3))
    path = store / "config" / "spark" / "resent.json"
    before = path.read_bytes()
    dlq_resend(None, store)

    path.write_bytes(b"torn")  # the copy names what the last run was about to send
    assert dlq_resend(None, store).resent == 0

    path.write_bytes(before)
    with pytest.raises(CorruptStoreError, match="run 1 has sent"):
        dlq_resend(None, store)


@pytest.mark.spark
def test_spark_sends_each_letter_once(spark: Any, tmp_path: Path) -> None:
    marks = encode_properties({"DLQ_ORIGIN_TOPIC": "t"})
    paths = {
        name: write_store(tmp_path / name, [Odd(topic="%DLQ%g", body=b"1", properties=marks), Odd(body=b"2")])
        for name in ("x", "y")
    }

    assert dlq_resend(spark, paths).resent == 2
    assert dlq_resend(spark, paths).resent == 0

    for path in paths.values():
        assert sorted(copy.body for key, found in messages(path).items() if key[0] == "t" for copy in found) == [
            b"1",
            b"2",
        ]
