"""`mqstore consume`: what was printed, or whose command ended well, is done, and nothing else."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

import mqstore as library
from tests.log.support import kill
from tests.tools.brokers import behind
from tests.tools.support import mqstore, mqstore_json, running, seen_on_a_terminal, snapshot
from tests.waiting import until

LIMIT_S = 60


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Ten messages of `orders` in two queues by turns, bodies 0..9; odd ones are tagged so."""
    path = tmp_path / "s"
    with library.open(path) as opened:
        opened.create_topic("orders", queues=2)
        for i in range(10):
            opened.put("orders", b"%d" % i, queue_id=i % 2, tag="odd" if i % 2 else None, keys=f"k-{i}")
    return path


def bodies(output: str) -> list[str]:
    return [line.strip() for line in output.splitlines() if line.startswith("    ")]


def taken(path: Path, *options: object, topic: str = "orders", group: str = "g", exit_code: int = 0) -> list[str]:
    """Bodies that a run until nothing is left printed, sorted."""
    result = mqstore("consume", path, topic, "--group", group, "--idle-exit", 0, *options, exit_code=exit_code)
    return sorted(bodies(result.stdout))


def left(path: Path, group: str = "g") -> int:
    return sum(messages for messages, _ in behind(path, group).values())


def script(folder: Path, code: str) -> str:
    """--exec CMD for a Python program, which has the body in `body` and appends it to the file `done`."""
    file = folder / "command.py"
    file.write_text(
        "import os, sys, time\n"
        "body = sys.stdin.read()\n"
        f"with open({str(folder / 'done')!r}, 'a') as log:\n"
        "    log.write(body + ' ' + os.environ['MQSTORE_ATTEMPT'] + '\\n')\n"
        f"{code}\n"
    )
    return shlex.join([sys.executable, "-S", "-E", str(file)])


def ran(folder: Path) -> list[tuple[str, int]]:
    """(body, attempt) of the commands that were run."""
    file = folder / "done"
    rows = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    return [(body, int(attempt)) for body, attempt in rows]


def letters(path: Path, group: str = "g") -> list[str]:
    lines = mqstore("dlq", "show", path, "--group", group, "--json").stdout.splitlines()
    return [json.loads(line)["properties"]["dlq_reason"] for line in lines]


# -- printing ----------------------------------------------------------------------------------------------------------


def test_each_message_is_printed_once_and_then_done(store: Path) -> None:
    assert taken(store) == [str(i) for i in range(10)]
    assert left(store) == 0
    assert taken(store) == []
    assert taken(store, group="another") == [str(i) for i in range(10)]


def test_json_lines_are_those_of_export(store: Path) -> None:
    exported = mqstore("export", store, "--topic", "orders").stdout.splitlines()

    found = mqstore("consume", store, "orders", "--group", "g", "--idle-exit", 0, "--format", "jsonl")

    assert sorted(found.stdout.splitlines()) == sorted(exported)
    assert found.stderr.splitlines()[-1].startswith("g: 10 messages")


def test_several_topics(store: Path) -> None:
    with library.open(store) as opened:
        opened.put("refunds", b"r")

    result = mqstore("consume", store, "orders", "refunds", "orders", "--group", "g", "--idle-exit", 0)

    assert sorted(bodies(result.stdout)) == [*map(str, range(10)), "r"]


def test_a_crashed_queue_gives_only_what_is_not_done(path: Path) -> None:
    """Its reader died with more items leased than one run of the housekeeper moves."""
    store = library.open(path, config=library.StoreConfig(clock=library.SimulatedClock()))
    queue = store.queue("jobs", visibility=3600)
    queue.put_many([b"%d" % i for i in range(9000)])
    for i in range(9000):
        task = queue.get()
        if i % 3:
            task.ack()
    kill(store.log)

    assert taken(path, topic="jobs", group="jobs") == sorted(str(i) for i in range(0, 9000, 3))
    assert left(path, "jobs") == 0


@pytest.mark.parametrize("only", [("--tags", "odd"), ("--sql", "TAGS = 'odd'")], ids=["tags", "sql"])
def test_filtered_messages_are_passed_to_the_end(path: Path, only: list[str]) -> None:
    with library.open(path) as opened:
        opened.create_topic("orders", queues=1)
        opened.put_many("orders", [b"no"] * 3000)
        opened.put("orders", b"yes", tag="odd")
        opened.put_many("orders", [b"no"] * 3000)

    assert taken(path, *only) == ["yes"]
    assert left(path) == 0


def test_it_stops_after_so_many_and_goes_on_there(store: Path) -> None:
    first = mqstore("consume", store, "orders", "--group", "g", "--max-messages", 4, exit_code=0)

    assert (len(bodies(first.stdout)), left(store)) == (4, 6)
    assert sorted(bodies(first.stdout) + taken(store)) == [str(i) for i in range(10)]


def test_new_group_begins_at_its_option(store: Path) -> None:
    with library.open(store, "r") as opened:
        times = {message.store_timestamp_ms for message in opened.iter("orders")}
    future = datetime.fromtimestamp(max(times) / 1000 + 1, UTC).isoformat()

    assert taken(store, "--from", "latest", group="a") == []
    assert taken(store, "--from", future, group="b") == []
    assert len(taken(store, "--from", "1h", group="c")) == 10
    assert taken(store, "--from", "earliest", group="a") == []  # it is no new one any more


def test_nothing_that_steers_a_terminal_is_printed(tmp_path: Path) -> None:
    with library.open(tmp_path / "s") as opened:
        opened.put("orders", b"\x1b[2J\xff", keys="\u202ekey")

    assert taken(tmp_path / "s") == ["\\x1b[2J\\xff"]  # and the runner looks at all of it


@pytest.mark.parametrize("how", [["--format", "text"], ["--format", "jsonl"], ["--exec", "true"]], ids=" ".join)
def test_a_body_that_cannot_be_read_is_not_done(path: Path, how: list[str]) -> None:
    with library.open(path) as opened:
        opened.put("orders", b"no stream of zlib's", queue_id=0, compressed="zlib")

    result = mqstore("consume", path, "orders", "--group", "g", "--idle-exit", 0, *how, exit_code=1)

    assert "orders, queue 0, offset 0: " in result.stderr
    assert "1 failed, to be redelivered" in result.stderr


@pytest.mark.parametrize("read", [0, 1])
def test_unread_output_is_not_done(path: Path, read: int) -> None:
    with library.open(path) as opened:
        opened.create_topic("orders", queues=1)
        opened.put_many("orders", [b"%d" % i * 200_000 for i in range(4)])  # none of which fits into a pipe
    with running("consume", path, "orders", "--group", "g", "--body-bytes", 200_000) as child:
        for _ in range(2 * read):
            child.stdout.readline()
        child.stdout.close()
        assert child.wait(LIMIT_S) == 141

    assert left(path) == 4 - read
    assert [body[0] for body in taken(path)] == [str(i) for i in range(read, 4)]


def test_buffered_output_is_not_done(store: Path) -> None:
    with running("consume", store, "orders", "--group", "g", "--idle-exit", 0) as child:
        child.stdout.close()
        assert child.wait(LIMIT_S) == 141

    assert left(store) == 10


def test_a_progress_bar_is_for_terminals_alone(store: Path) -> None:
    _, out, seen = seen_on_a_terminal("consume", store, "orders", "--group", "g", "--idle-exit", "0.3")

    assert (len(bodies(out)), "consuming" in out) == (10, False)
    assert "consuming" in seen
    assert "10/10" in seen
    piped = mqstore("consume", store, "orders", "--group", "h", "--idle-exit", 0, exit_code=0)
    [line] = piped.stderr.splitlines()
    assert line.startswith("h: 10 messages in ")
    assert line.endswith(": 10 done; 0 left (stopped by idle)")


def test_the_summary_as_json(store: Path) -> None:
    printed = mqstore("consume", store, "orders", "--group", "g", "--max-messages", 3, "--json")
    summary = json.loads(printed.stderr.splitlines()[-1])
    silent = mqstore_json("consume", store, "orders", "--group", "g", "--idle-exit", 0, "--exec", "true")

    assert summary.pop("seconds") >= 0
    assert summary.pop("version") == 1
    assert summary == {
        "group": "g",
        "topics": ["orders"],
        "messages": 3,
        "done": 3,
        "failed_attempts": 0,
        "failing": 0,
        "dead_letters": 0,
        "not_settled": 0,
        "left": 7,
        "stopped_by": "max-messages",
    }
    assert (silent["messages"], silent["left"], silent["stopped_by"]) == (7, 0, "idle")


def test_it_ends_when_nothing_came_for_a_while_and_not_before(store: Path) -> None:
    begin = time.monotonic()

    assert taken(store, "--idle-exit", 0.4) == [str(i) for i in range(10)]
    assert time.monotonic() - begin >= 0.4


# -- commands ----------------------------------------------------------------------------------------------------------


def test_a_command_has_the_body_and_knows_the_message(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No property can name another variable, nor one of the run in which this one runs."""
    monkeypatch.setenv("MQSTORE_PROPERTY_outer", "of the run in which this one runs")
    properties = {"region": "eu", "x-y.z": "\u00fc", "A=B": "c", "LD\u00fc-": "d"}
    with library.open(path) as opened:
        opened.create_topic("orders", queues=3)
        receipt = opened.put("orders", b"a\0body", queue_id=2, tag="t", keys=["k1", "k2"], properties=properties)
    code = (
        "import os, sys, json\n"
        f"file = open({str(tmp_path / 'seen')!r}, 'w')\n"
        "json.dump({n: v for n, v in os.environ.items() if n.startswith('MQSTORE_')}\n"
        "          | {'body': sys.stdin.read()}, file)\n"
    )
    (tmp_path / "command.py").write_text(code)
    command = shlex.join([sys.executable, str(tmp_path / "command.py")])

    assert taken(path, "--exec", command) == []

    seen = json.loads((tmp_path / "seen").read_text())
    assert seen == {
        "body": "a\0body",
        "MQSTORE_TOPIC": "orders",
        "MQSTORE_QUEUE_ID": "2",
        "MQSTORE_OFFSET": "0",
        "MQSTORE_TAG": "t",
        "MQSTORE_KEYS": "k1 k2",
        "MQSTORE_MESSAGE_ID": receipt.message_id,
        "MQSTORE_UNIQUE_KEY": receipt.unique_key,
        "MQSTORE_ATTEMPT": "1",
        "MQSTORE_GROUP": "g",
        "MQSTORE_PROPERTY_region": "eu",
        "MQSTORE_PROPERTY_x_y_z": "\u00fc",
        "MQSTORE_PROPERTY_A_B": "c",
        "MQSTORE_PROPERTY_LD__": "d",
    }
    assert left(path) == 0


@pytest.mark.parametrize(("code", "given"), [(65, ()), (3, ("--reject-code", 3))], ids=["default", "another"])
def test_the_exit_code_settles_a_message(store: Path, tmp_path: Path, code: int, given: tuple[object, ...]) -> None:
    command = script(
        tmp_path,
        "if body in '3': print('', 'no such customer\\x1b[2J', 'at all', sep='\\n', file=sys.stderr)\n"
        f"if body in '3': sys.exit({code})\n"
        "if body in '45' and os.environ['MQSTORE_ATTEMPT'] == '1': sys.exit(75 if body == '4' else 1)",
    )
    options = ("--exec", command, "--retry-delay", 3600, *given)

    result = mqstore("consume", store, "orders", "--group", "g", "--idle-exit", 0, *options, "--json", exit_code=1)

    summary = json.loads(result.stdout)
    assert [summary[name] for name in ("messages", "done", "failing", "dead_letters", "not_settled")] == [
        10,
        7,
        2,
        1,
        0,
    ]
    assert "no such customer\\x1b[2J\nat all\n" in result.stderr
    assert letters(store) == ["no such customer\\x1b[2J"]
    assert sorted(ran(tmp_path)) == [(str(i), 1) for i in range(10)]


def test_a_failed_message_comes_again_and_is_fine_in_the_end(store: Path, tmp_path: Path) -> None:
    command = script(tmp_path, "if body == '4' and os.environ['MQSTORE_ATTEMPT'] != '3': sys.exit(1)")
    options = ("--exec", command, "--retry-delay", 0.05, "--retry-delay", 0.1, "--max-messages", 12)

    assert mqstore("consume", store, "orders", "--group", "g", *options, exit_code=0)
    assert [(body, attempt) for body, attempt in ran(tmp_path) if body == "4"] == [("4", 1), ("4", 2), ("4", 3)]
    assert len(ran(tmp_path)) == 12
    assert left(store) == 0


def test_the_last_attempt_leaves_a_dead_letter(store: Path, tmp_path: Path) -> None:
    command = script(tmp_path, "if body == '4': print('out of paper', file=sys.stderr); sys.exit(9)")
    options = ("--exec", command, "--max-attempts", 2, "--retry-delay", 0.05, "--max-messages", 11)

    result = mqstore("consume", store, "orders", "--group", "g", *options, exit_code=1)

    assert "1 dead letters" in result.stderr
    assert len(letters(store)) == 1
    assert letters(store) == ["out of paper"]


def test_a_command_that_takes_too_long_is_killed_with_all_it_started(store: Path, tmp_path: Path) -> None:
    code = (
        "import subprocess\n"
        "if body == '4':\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "    time.sleep(600)"
    )
    options = ("--exec", script(tmp_path, code), "--exec-timeout", 2, "--max-attempts", 1)

    taken(store, *options, exit_code=1)

    pid = int((tmp_path / "pid").read_text())
    until(lambda: not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text())
    assert len(letters(store)) == 1
    assert letters(store) == ["its command took longer than 2 s"]


def test_shell_runs_the_command_on_request(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "out"

    taken(store, "--exec", f'echo "$(cat) $MQSTORE_QUEUE_ID" >> {shlex.quote(str(file))}', "--shell")
    taken(store, "--exec", f"touch {shlex.quote(str(tmp_path))}/$MQSTORE_GROUP", group="h")

    assert sorted(file.read_text().splitlines()) == [f"{i} {i % 2}" for i in range(10)]
    assert (tmp_path / "$MQSTORE_GROUP").exists()


def test_so_many_commands_run_at_a_time(store: Path, tmp_path: Path) -> None:
    """Each waits for three others; fewer at a time would never end, so they give up then, and fail."""
    with library.open(store) as opened:
        opened.create_topic("four", queues=4)
        for i in range(4):
            opened.put("four", b"%d" % i, queue_id=i)
    code = (
        f"end = time.monotonic() + {LIMIT_S}\n"
        f"while len(open({str(tmp_path / 'done')!r}).readlines()) < 4:\n"
        "    if time.monotonic() > end: sys.exit(1)\n"
        "    time.sleep(0.01)"
    )

    taken(store, "--exec", script(tmp_path, code), "--workers", 4, topic="four")

    assert sorted(ran(tmp_path)) == [(str(i), 1) for i in range(4)]


def test_a_command_that_does_not_read_is_no_failure(tmp_path: Path) -> None:
    with library.open(tmp_path / "s") as opened:
        opened.put("orders", b"x" * 1_000_000)

    taken(tmp_path / "s", "--exec", "true")


def test_ordered_failure_blocks_the_rest(store: Path, tmp_path: Path) -> None:
    command = script(tmp_path, "sys.exit(body == '4')")
    options = ("--ordered", "--exec", command, "--retry-delay", 20)

    taken(store, *options, exit_code=1)

    assert [body for body, _ in ran(tmp_path) if int(body) % 2 == 0] == ["0", "2", "4"]
    assert [body for body, _ in ran(tmp_path) if int(body) % 2] == ["1", "3", "5", "7", "9"]
    assert left(store) == 3
    # The group has its order from then on, whether it is asked for again or not.
    again = mqstore("consume", store, "orders", "--group", "g", "--exec", command, "--idle-exit", 0)
    assert again.exit_code in (0, 1)  # it may not be due yet
    assert left(store) == 3
    with library.open(store) as opened:
        opened.broker.groups.create("loose")
    wrong = mqstore("consume", store, "orders", "--group", "loose", "--ordered", exit_code=2)
    assert "--ordered" in wrong.stderr


def test_new_ordered_group_is_limited_on_request(store: Path) -> None:
    for group, options in {"g": (), "h": ("--max-attempts", 4)}.items():
        taken(store, "--ordered", "--retry-delay", 20, *options, group=group)
    listed = {row["name"]: row for row in mqstore_json("groups", "list", store)["groups"]}
    assert [(row["retry"], row["max_attempts"]) for row in (listed["g"], listed["h"])] == [("20s", None), ("20s", 4)]


def test_group_begins_at_its_creation_option(store: Path) -> None:
    """`groups create --start latest` was ignored."""
    mqstore("groups", "create", store, "late", "--start", "latest", exit_code=0)
    planned = mqstore_json("consume", store, "orders", "--group", "late", "--dry-run")
    assert planned["messages"] == 0
    assert taken(store, group="late") == []
    mqstore("groups", "create", store, "young", "--start", "1h", exit_code=0)
    planned = mqstore_json("consume", store, "orders", "--group", "young", "--dry-run")
    assert planned["messages"] == 10
    mqstore("groups", "create", store, "obeys", "--start", "latest", exit_code=0)
    assert len(taken(store, "--from", "earliest", group="obeys")) == 10


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_what_runs_end_and_begins_nothing(store: Path, tmp_path: Path, number: int) -> None:
    command = script(tmp_path, f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)")
    with running("consume", store, "orders", "--group", "g", "--exec", command) as child:
        until(lambda: ran(tmp_path))
        child.send_signal(number)
        said = b""
        while b"waiting for 1 running messages; interrupt again to kill them\n" not in said:
            said += child.stderr.readline()
        (tmp_path / "go").touch()
        _, error = child.communicate(timeout=LIMIT_S)

    assert child.returncode == 0, error
    assert b"1 messages in " in error
    assert b": 1 done; 9 left (stopped by signal)" in error
    assert (len(ran(tmp_path)), left(store)) == (1, 9)


def test_a_second_signal_kills_what_runs_and_that_is_no_attempt(store: Path, tmp_path: Path) -> None:
    command = script(tmp_path, "time.sleep(600)")
    with running("consume", store, "orders", "--group", "g", "--exec", command) as child:
        until(lambda: ran(tmp_path))
        child.send_signal(signal.SIGINT)
        said = b""
        while b"interrupt again" not in said:
            said += child.stderr.readline()
        child.send_signal(signal.SIGINT)
        _, error = child.communicate(timeout=LIMIT_S)

    assert child.returncode == 0, error
    assert b"1 not settled, to be redelivered; 10 left (stopped by signal)" in error
    assert b"handler" not in said + error
    [(body, _)] = ran(tmp_path)
    again = script(tmp_path, "")
    (tmp_path / "done").unlink()
    taken(store, "--exec", again)
    assert (body, 1) in ran(tmp_path)
    assert len(ran(tmp_path)) == 10


def test_a_third_signal_ends_it_though_nobody_reads_the_output(path: Path) -> None:
    with library.open(path) as opened:
        opened.put("orders", b"x" * 200_000)
    with running("consume", path, "orders", "--group", "g", "--body-bytes", 200_000) as child:
        child.stdout.readline()
        presses = 0
        while child.poll() is None:
            presses += 1
            assert presses < 100
            child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.3)

    assert child.returncode == -signal.SIGINT
    assert presses >= 3
    assert len(taken(path)) == 1


def test_an_idle_consumer_ends_by_a_signal_at_once(store: Path) -> None:
    with running("consume", store, "orders", "--group", "g", "--format", "jsonl") as child:
        for _ in range(10):
            child.stdout.readline()
        child.send_signal(signal.SIGTERM)
        rest, error = child.communicate(timeout=LIMIT_S)

    assert (child.returncode, rest) == (0, b""), error
    assert left(store) == 0


def test_a_command_that_cannot_be_started_ends_the_run_and_fails_nothing(store: Path, tmp_path: Path) -> None:
    command = tmp_path / "command"
    command.write_bytes(b"\x7fELF, it is not")
    command.chmod(0o700)

    mqstore("consume", store, "orders", "--group", "g", "--exec", command, exit_code=3)
    assert left(store) == 10
    assert mqstore_json("consume", store, "orders", "--group", "g", "--dry-run")["messages"] == 10


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_filter_error_is_located(store: Path) -> None:
    """The lines that point were one, with `\\n` in it."""
    result = mqstore("consume", store, "orders", "--group", "g", "--sql", "price >")

    assert result.stderr.splitlines()[1:] == ["    price >", "           ^"]


def test_a_command_that_may_not_be_run_is_not_called_absent(store: Path, tmp_path: Path) -> None:
    script = tmp_path / "book.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o644)

    result = mqstore("consume", store, "orders", "--group", "g", "--exec", script, exit_code=2)

    assert "is not executable" in result.stderr


def test_missing_topic_is_reported_and_awaited(store: Path) -> None:
    result = mqstore("consume", store, "odrers", "--group", "g", "--idle-exit", 0, exit_code=0)

    assert "topic odrers does not exist" in result.stderr


# -- --dry-run ---------------------------------------------------------------------------------------------------------


def test_a_dry_run_says_what_is_before_the_group_and_changes_nothing(store: Path) -> None:
    mqstore("consume", store, "orders", "--group", "g", "--max-messages", 4, exit_code=0)
    before = snapshot(store)

    known = mqstore_json("consume", store, "orders", "nonesuch", "--group", "g", "--dry-run")
    new = [
        mqstore_json("consume", store, "orders", "--group", "new", "--from", start, "--dry-run")
        for start in ("earliest", "latest", "1h")
    ]
    shown = mqstore("consume", store, "orders", "--group", "g", "--dry-run")

    assert (known["messages"], known["missing"]) == (6, ["nonesuch"])
    assert sum(row["end"] - row["from"] for row in known["queues"] if row["topic"] == "orders") == 6
    assert [each["messages"] for each in new] == [10, 0, 10]
    assert "would consume 6 messages for group g" in shown.stdout
    assert snapshot(store) == before


def test_a_dry_run_counts_what_failed_before(store: Path) -> None:
    taken(store, "--exec", "false", "--retry-delay", 0, "--max-messages", 10, exit_code=1)

    found = mqstore_json("consume", store, "orders", "--group", "g", "--dry-run")

    assert found["messages"] == left(store) > 0
    assert {row["topic"] for row in found["queues"]} == {"orders", "%RETRY%g"}
