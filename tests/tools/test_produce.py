"""`mqstore produce`: what lines, JSON lines and CSV become; bad lines; how much was stored when it ends early."""

from __future__ import annotations

import json
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mqstore as library
from mqstore import Producer
from tests.tools.support import mqstore, mqstore_json, running, snapshot
from tests.waiting import until

WAIT_S = 30


def stored(path: Path, topic: str = "orders") -> list[library.Message]:
    with library.open(path, "r") as store:
        return sorted(store.iter(topic), key=lambda message: message.physical_offset)


def bodies(path: Path, topic: str = "orders") -> list[bytes]:
    return [message.body for message in stored(path, topic)]


def run(path: Path, text: str | bytes, *options: object) -> Any:
    return mqstore("produce", path, "orders", *options, stdin=text.encode() if isinstance(text, str) else text)


# -- what a line becomes -----------------------------------------------------------------------------------------------


def test_each_line_is_a_message_with_what_the_options_say(tmp_path: Path) -> None:
    options = ["--key", "k1", "--key", "@@k2", "--tag", "t", "--property", "a=b=c"]

    result = run(tmp_path / "s", b"one\n\nthr\xffee\r\nlast", *options, "--queue-id", 3, "--flush")

    assert result.exit_code == 0, result.output
    assert "sent 4 messages" in result.stdout
    assert "orders/3: 4, offsets 0..3" in result.stdout
    messages = stored(tmp_path / "s")
    assert [message.body for message in messages] == [b"one", b"", b"thr\xffee\r", b"last"]
    assert len({message.unique_key for message in messages}) == 4
    for message in messages:
        assert (message.tag, message.keys) == ("t", ("k1", "@k2"))
        assert dict(message.properties) == {"a": "b=c"}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"body": "é"}, {"body": "é".encode()}),
        ({"body": {"a": [1, "é"]}}, {"body": '{"a":[1,"é"]}'.encode()}),
        ({"body": 7}, {"body": b"7"}),
        ({"body": ""}, {"body": b""}),
        ({"body": "x", "key": 17}, {"keys": ("17",)}),
        ({"body": "x", "keys": ["a", 2]}, {"keys": ("a", "2")}),
        ({"body": "x", "key": "a", "keys": "b c"}, {"keys": ("a", "b", "c")}),
        ({"body": "x", "key": None, "tag": ""}, {"keys": (), "tag": None}),
        ({"body": "x", "tag": "t", "message_group": "g", "flag": 7}, {"tag": "t", "message_group": "g", "flag": 7}),
        ({"body": "x", "unique_key": "u"}, {"unique_key": "u"}),
        ({"body": "x", "properties": {"a": "b", "n": 1}}, {"properties": {"a": "b", "n": "1"}}),
        ({"body": "x", "colour": "red", "properties": []}, {"properties": {}}),
    ],
    ids=str,
)
def test_fields_of_a_json_line(tmp_path: Path, record: dict[str, Any], expected: dict[str, Any]) -> None:
    result = run(tmp_path / "s", json.dumps(record) + "\n\n", "--format", "jsonl")

    assert result.exit_code == 0, result.output
    [message] = stored(tmp_path / "s")
    found = {name: getattr(message, name) for name in expected}
    assert {**found, "properties": dict(found.get("properties", {}))} == {"properties": {}, **expected}


def test_a_value_is_taken_from_the_field_that_is_named(tmp_path: Path) -> None:
    text = (
        '{"text":"1","id":17,"customer":"c-1","kind":"paid","tag":"own","key":"own"}\n{"text":"2","customer":"c-2"}\n'
    )
    options = ["--key", "@id", "--key", "fixed", "--tag", "@kind", "--message-group", "@customer"]

    result = run(tmp_path / "s", text, "--format", "jsonl", "--body-field", "text", "--property", "by=@id", *options)

    assert result.exit_code == 0, result.output
    first, second = stored(tmp_path / "s")
    assert (first.keys, first.tag, first.message_group) == (("17", "fixed"), "paid", "c-1")
    assert dict(first.properties) == {"by": "17"}
    assert (second.keys, second.tag, second.message_group) == (("fixed",), None, "c-2")
    assert dict(second.properties) == {}


def test_rows_of_a_table(tmp_path: Path) -> None:
    text = '\ufeffid, body,tag,property.by\r\n1,"a, ""b""\nc",paid,me\r\n\r\n2,,,\r\n'

    result = run(tmp_path / "s", text, "--format", "csv", "--key", "@id")

    assert result.exit_code == 0, result.output
    first, second = stored(tmp_path / "s")
    assert (first.body, first.keys, first.tag) == (b'a, "b"\nc', ("1",), "paid")
    assert dict(first.properties) == {"by": "me"}
    assert (second.body, second.keys, second.tag, dict(second.properties)) == (b"", ("2",), None, {})


def test_a_whole_record_may_be_the_body(tmp_path: Path) -> None:
    run(tmp_path / "s", "id,name\n1,Zoë\n", "--format", "csv", "--body-is-record", "--key", "@id")
    run(tmp_path / "s", '{"id": 2, "body": "x"}\n', "--format", "jsonl", "--body-is-record")

    assert [json.loads(body) for body in bodies(tmp_path / "s")] == [{"id": "1", "name": "Zoë"}, {"id": 2, "body": "x"}]


def test_delays(tmp_path: Path) -> None:
    for option in (["--delay", "90s"], ["--delay", "12.25"]):
        assert run(tmp_path / "s", "later\n", *option).exit_code == 0
    text = '{"body":"x","delay":5}\n{"body":"y","delay_level":3}\n'
    assert run(tmp_path / "s", text, "--format", "jsonl").exit_code == 0

    with library.open(tmp_path / "s", "r") as store:
        timers = list(store.iter("rmq_sys_wheel_timer"))
        [level] = store.iter("SCHEDULE_TOPIC_XXXX")
    waits = [int(m.system_properties["TIMER_DELIVER_MS"]) - m.store_timestamp_ms for m in timers]
    assert waits == [pytest.approx(wait, abs=900) for wait in (90_000, 12_250, 5_000)]
    assert level.queue.queue_id == 2


def test_export_and_produce_round_trip(tmp_path: Path) -> None:
    with library.open(tmp_path / "old") as store:
        store.put("orders", b"\xff\x00", tag="t", keys=["a", "b"], properties={"p": "v"}, flag=-3, unique_key="u")
        store.put("orders", b"in a group", message_group="g", unique_key="v")
    mqstore("export", tmp_path / "old", "--topic", "orders", "--output", tmp_path / "all.jsonl")

    mqstore("produce", tmp_path / "new", "orders", tmp_path / "all.jsonl", "--exported", exit_code=0)

    names = ("body", "tag", "keys", "properties", "flag", "unique_key", "message_group")
    old, new = (
        sorted(([getattr(message, name) for name in names] for message in stored(tmp_path / which)), key=str)
        for which in ("old", "new")
    )
    assert old == new
    assert "__SHARDINGKEY" not in dict(stored(tmp_path / "new")[0].properties)


def test_several_files_and_stdin_one_after_the_other(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"{name}1\n{name}2")

    mqstore("produce", tmp_path / "s", "orders", tmp_path / "a", "-", tmp_path / "b", stdin=b"in\n")

    assert bodies(tmp_path / "s") == [b"a1", b"a2", b"in", b"b1", b"b2"]


@pytest.mark.parametrize("piece", [1, 3, 1000])
@pytest.mark.parametrize("block", [1, 7, 4096])
def test_neither_blocks_nor_pieces_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, block: int
) -> None:
    monkeypatch.setattr("mqstore_tools.produce._PIECE", piece)
    monkeypatch.setattr("mqstore_tools.produce._BLOCK_BYTES", block)
    lines = [b"x" * (i % 11) for i in range(40)]

    found = json.loads(run(tmp_path / "s", b"\n".join(lines), "--json").stdout)

    # The last line is empty or not: an empty rest behind the last line end is no line.
    assert bodies(tmp_path / "s") == (lines if lines[-1] else lines[:-1])
    assert found["messages"] == sum(queue["messages"] for queue in found["queues"]) == len(bodies(tmp_path / "s"))


def test_one_body_is_given_on_the_command_line(tmp_path: Path) -> None:
    options = ["--unique-key", "u", "--queue-id", 3]

    mqstore("produce", tmp_path / "s", "orders", "--body", "h\u00e9\nllo", *options, exit_code=0)

    [message] = stored(tmp_path / "s")
    assert (message.body, message.unique_key, message.queue_id) == ("h\u00e9\nllo".encode(), "u", 3)


def test_a_whole_file_is_one_body(tmp_path: Path) -> None:
    data = [bytes(range(256)) * 10, b"", b"x\n"]
    files = [tmp_path / f"body{i}" for i in range(len(data))]
    for file, each in zip(files, data, strict=True):
        file.write_bytes(each)

    result = run(tmp_path / "s", "stdin\n", "--format", "file", *files, "-")

    assert result.exit_code == 0, result.output
    assert bodies(tmp_path / "s") == [*data, b"stdin\n"]


# -- what it says ------------------------------------------------------------------------------------------------------


def test_json_has_counts_and_offsets(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("a\nbc\n")

    found = mqstore_json("produce", tmp_path / "s", "orders", tmp_path / "in", "--queue-id", 1)

    first, last = stored(tmp_path / "s")
    assert (found["messages"], found["body_bytes"], found["bad_lines"], found["dry_run"]) == (2, 3, 0, False)
    [queue] = found["queues"]
    assert (queue["topic"], queue["queue_id"], queue["messages"]) == ("orders", 1, 2)
    for row, message in ((queue["first"], first), (queue["last"], last)):
        assert row == {
            "queue_offset": message.offset,
            "physical_offset": message.physical_offset,
            "store_timestamp_ms": message.store_timestamp_ms,
            "message_id": message.message_id,
            "unique_key": message.unique_key,
        }


# -- bad lines ---------------------------------------------------------------------------------------------------------

_BAD = [
    ("jsonl", b'{"body":"1"}', b"{", "line 2: not JSON"),
    ("jsonl", b'{"body":"1"}', b"[1]", "line 2: a JSON value, but not an object"),
    ("jsonl", b'{"body":"1"}', b"{}", "line 2: no field 'body'"),
    ("jsonl", b'{"body":"1"}', b'{"body":"x","tag":"a|b"}', "line 2: tag 'a|b'"),
    ("jsonl", b'{"body":"1"}', b'{"body":"x","tag":["a"]}', "line 2: field 'tag' is neither"),
    ("jsonl", b'{"body":"1"}', b'{"body":"x","tag":true}', "line 2: field 'tag' is neither"),
    ("jsonl", b'{"body":"1"}', b'{"body":"x","delay":"soon"}', "line 2: field 'delay' is not a number"),
    ("jsonl", b'{"body":"1"}', b'{"body":"x","flag":1.5}', "line 2: field 'flag' is not a whole number"),
    ("jsonl", b'{"body":"1"}', b'{"body":"x","properties":"p"}', "line 2: field 'properties' is not an object"),
    ("jsonl", b'{"body":"1"}', b'{"body":"x","properties":{"UNIQ_KEY":"u"}}', "line 2: property 'UNIQ_KEY'"),
    ("jsonl", b'{"body":"1"}', b'{"body":"x","delay":1,"message_group":"g"}', "line 2: message_group and delay"),
    ("jsonl", b'{"body":"1"}', b'{"body":"\\ud800"}', "line 2: "),
    ("csv", b"body\n1", b"a,b", "line 3: 2 fields, but the header has 1"),
    ("csv", b"body,tag\n1,", b"x,a|b", "line 3: tag 'a|b'"),
    ("csv", b"body\n1", b'"a"b', "line 3: not CSV"),
    ("lines", b"1", b"x" * ((4 << 20) + 1), "line 2: the body has 4194305 bytes"),
]


@pytest.mark.parametrize(("format_", "good", "bad", "says"), _BAD, ids=[f"{f}-{s}" for f, _, _, s in _BAD])
def test_invalid_line_ends_it(tmp_path: Path, format_: str, good: bytes, bad: bytes, says: str) -> None:
    text = good + b"\n" + bad + b"\n"

    result = run(tmp_path / "s", text, "--format", format_)
    skipped = run(tmp_path / "t", text + good.split(b"\n")[-1], "--format", format_, "--skip-bad", "--json")

    assert result.exit_code == 2
    assert says in result.stderr
    assert "; 1 messages before it were stored" in result.stderr
    assert bodies(tmp_path / "s") == [b"1"]
    assert skipped.exit_code == 1
    assert (json.loads(skipped.stdout)["messages"], json.loads(skipped.stdout)["bad_lines"]) == (2, 1)
    assert bodies(tmp_path / "t") == [b"1", b"1"]


def test_bad_line_is_json_too(tmp_path: Path) -> None:
    result = run(tmp_path / "s", '{"body":"1"}\n{}\n', "--format", "jsonl", "--json")

    found = json.loads(result.stdout)
    assert result.exit_code == 2
    assert (found["messages"], found["queues"][0]["messages"]) == (1, 1)
    assert "line 2" in found["failed"]


def test_of_many_bad_lines_only_the_first_are_shown(tmp_path: Path) -> None:
    result = run(tmp_path / "s", "{\n" * 30, "--format", "jsonl", "--skip-bad")

    assert result.exit_code == 1
    assert result.stderr.count("skipped") == 10
    assert "30 bad lines were skipped" in result.stdout


def test_a_directory_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert mqstore("produce", tmp_path / "file", "orders", stdin=b"x\n").exit_code == 3
    for given in ("--no-create", "no-such-file"):
        assert mqstore("produce", tmp_path / "none", "orders", given, stdin=b"x\n").exit_code == 3
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "one").write_text("dear")
    with library.open(tmp_path / "held"):
        for name in ("held", "letters"):
            for option in ([], ["--dry-run"]):
                mqstore("produce", tmp_path / name, "orders", *option, stdin=b"x\n", exit_code=3)
    assert [file.name for file in (tmp_path / "letters").iterdir()] == ["one"]


def test_a_body_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(b"x" * ((4 << 20) + 1))

    result = run(tmp_path / "s", "", "--format", "file", tmp_path / "long")

    assert result.exit_code == 2
    assert "max_message_size is 4194304" in result.stderr


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_the_limit_is_that_of_the_store(tmp_path: Path, options: tuple[str, ...]) -> None:
    config = library.StoreConfig(max_message_size=5 << 20)
    library.open(tmp_path / "s", config=config).close()
    (tmp_path / "long").write_bytes(b"x" * (5 << 20))

    for format_ in ("file", "lines"):
        assert run(tmp_path / "s", "", "--format", format_, tmp_path / "long", *options).exit_code == 0
    (tmp_path / "long").write_bytes(b"x" * ((5 << 20) + 1))
    result = run(tmp_path / "s", "", "--format", "file", tmp_path / "long", *options)
    assert result.exit_code == 2
    assert "max_message_size is 5242880" in result.stderr


# -- writing nothing ---------------------------------------------------------------------------------------------------


def test_a_dry_run_reads_and_checks_everything_and_writes_nothing(tmp_path: Path) -> None:
    with library.open(tmp_path / "s") as store:
        store.create_topic("orders", queues=2)
    before = snapshot(tmp_path / "s")

    good = run(tmp_path / "s", "a\nb\n", "--dry-run", "--queue-id", 1)
    found = json.loads(run(tmp_path / "s", "a\nb\n", "--dry-run", "--json").stdout)
    assert run(tmp_path / "s", "a\n", "--dry-run", "--queue-id", 2).exit_code == 2
    assert run(tmp_path / "s", '{"body":1}\n{\n', "--dry-run", "--format", "jsonl").exit_code == 2
    assert run(tmp_path / "s", '{"body":1}\n{\n', "--dry-run", "--format", "jsonl", "--skip-bad").exit_code == 1
    assert run(tmp_path / "none", "a\n", "--dry-run", "--no-create").exit_code == 3
    assert run(tmp_path / "none", "a\n", "--dry-run").exit_code == 0

    assert "would send 2 messages, 2 B" in good.stdout
    assert (found["messages"], found["dry_run"], found["queues"]) == (2, True, [])
    assert snapshot(tmp_path / "s") == before
    assert not (tmp_path / "none").exists()


# -- pace, and the end -------------------------------------------------------------------------------------------------


def test_the_rate_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    sleeps: list[float] = []

    def sleep(duration_s: float) -> None:
        sleeps.append(duration_s)
        now[0] += duration_s

    monkeypatch.setattr("mqstore_tools.produce.time", SimpleNamespace(sleep=sleep, monotonic=lambda: now[0]))
    run(tmp_path / "s", b"x\n" * 25, "--rate", 50)

    # Pieces of 5 ten times a second: the first at once, the last after 0.4 s.
    assert sleeps == [pytest.approx(0.1)] * 4
    sleeps.clear()
    run(tmp_path / "s", b"x\n" * 3, "--rate", 0.5)
    assert sleeps == [pytest.approx(2.0)] * 2


def follow(command: subprocess.Popen[bytes], path: Path, count: int) -> None:
    """Wait until so many messages are stored."""

    def stored_so_many() -> bool:
        assert command.poll() is None, command.communicate()
        with suppress(library.MQStoreError, OSError):
            return len(bodies(path)) >= count
        return False

    until(stored_so_many)


@pytest.mark.parametrize(
    ("options", "text", "number"),
    [
        ([], b"one\ntwo\nunfinis", signal.SIGINT),
        (["--rate", "1000", "--flush"], b"one\ntwo\nunfinis", signal.SIGTERM),
        (["--format", "csv"], b'body\none\ntwo\n"three\nunfinis', signal.SIGINT),
    ],
    ids=["lines", "rate", "csv"],
)
def test_lines_are_stored_before_waiting(tmp_path: Path, options: list[str], text: bytes, number: int) -> None:
    with running("produce", tmp_path / "s", "orders", *options, stdin=subprocess.PIPE) as command:
        command.stdin.write(text)
        command.stdin.flush()
        follow(command, tmp_path / "s", 2)

        command.send_signal(number)
        assert command.wait(WAIT_S) == 130  # though its input is still open
        out, err = command.communicate()

    assert b"interrupted; sent 2 messages" in out
    assert b"Traceback" not in err
    assert bodies(tmp_path / "s") == [b"one", b"two"]
    assert mqstore_json("inspect", tmp_path / "s")["clean_shutdown"]


def test_ctrl_c_ends_the_wait_for_the_next_second(tmp_path: Path) -> None:
    with running("produce", tmp_path / "s", "orders", "--rate", "0.001", stdin=subprocess.PIPE) as command:
        command.stdin.write(b"one\ntwo\nthree\n")
        command.stdin.flush()
        follow(command, tmp_path / "s", 1)

        command.send_signal(signal.SIGINT)
        out, err = command.communicate(timeout=WAIT_S)

    assert command.returncode == 130, err
    assert b"interrupted; sent" in out
    count = int(out.split(b"sent ")[1].split()[0])
    assert len(bodies(tmp_path / "s")) == count < 3


def test_failing_store_reports_the_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send_many = Producer.send_many
    calls = []

    def failing(self: Any, topic: str, messages: Any, **options: Any) -> Any:
        calls.append(len(messages))
        if len(calls) == 2:
            error = library.errors.StoreFullError(28, "no space", "file", "append")
            error.receipts = send_many(self, topic, messages[:3], **options)
            raise error
        return send_many(self, topic, messages, **options)

    monkeypatch.setattr("mqstore_tools.produce._PIECE", 10)
    monkeypatch.setattr(Producer, "send_many", failing)
    result = run(tmp_path / "s", b"x\n" * 40)

    assert result.exit_code == 3
    assert "13 messages were stored before this" in result.stderr
    assert len(bodies(tmp_path / "s")) == 13
