"""`mqstore inspect`: the contract's shape, right on the Java engine's stores, harmless and hard to upset."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mqstore as library
from mqstore import Profile, SimulatedClock
from mqstore.admin import inspect_store
from tests.commands import looking
from tests.conftest import GOLDEN_NAMES, Golden, GoldenStore
from tests.log.support import kill, open_store
from tests.tools.brokers import broker, clock_now
from tests.tools.damages import DAMAGES, filled
from tests.tools.support import environment, mqstore, mqstore_json, snapshot


def queues_of(store: GoldenStore) -> dict[str, dict[str, dict[str, int]]]:
    """What `topics` must say, from the Java engine's listing. Its minimum is not taken: it may lie below the first
    message that still exists (see the README of the golden stores)."""
    expected: dict[str, dict[str, dict[str, int]]] = {}
    for queue in store.of("queue"):
        topic, queue_id = queue["topic"], queue["queue_id"]
        messages = [m for m in store.of("message") if m["topic"] == topic and m["queue_id"] == queue_id]
        first = min(messages, key=lambda m: m["queue_offset"], default=None)
        last = max(messages, key=lambda m: m["queue_offset"], default=None)
        expected.setdefault(topic, {})[str(queue_id)] = {
            "min_offset": first["queue_offset"] if first else queue["max_offset"],
            "max_offset": queue["max_offset"],
            "min_physical_offset": first["physical_offset"] if first else -1,
            "max_physical_offset": last["physical_offset"] + last["size"] if last else -1,
        }
    return expected


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_inspect_agrees_with_the_java_listing(golden: Golden, name: str) -> None:
    """No manifest tells the shape of the index: it is read from its files."""
    store = golden(name)
    [expected] = store.of("store")

    # The engine alone put half messages of which nobody can tell the place: that is an error.
    found = mqstore_json("inspect", store.path, exit_code=int(name != "propcrc"))

    log, index = found["commitlog"], found["index"]
    assert {topic: entry["queues"] for topic, entry in found["topics"].items()} == queues_of(store)
    assert (found["profile"], found["checksum"]) == ("rocketmq", "crc32-body")
    assert (found["clean_shutdown"], log["min_offset"]) == (expected["clean"], expected["min_physical_offset"])
    assert log["max_offset"] == expected["max_physical_offset"]
    assert log["segment_bytes"] == expected["commitlog_segment_bytes"]
    assert [s["start"] for s in log["segments"]] == [start for start, _ in store.segments]
    assert all(s["end"] - s["start"] == s["length"] == log["segment_bytes"] for s in log["segments"])
    # Prepared and rolled-back halves of transactions lie in the log and in no queue.
    halves = log["messages"] - expected["readable"]
    assert 0 <= halves < expected["readable"] / 10
    assert sum(s["messages"] for s in log["segments"]) == log["messages"]
    entries = 60 if name in ("rolled", "trimmed") else 200
    assert (index["slots"], index["entries_per_file"]) == ({60: 17, 200: 53}[entries], entries)
    assert (index["files"] - 1) * (entries - 1) <= index["entries"] <= index["files"] * (entries - 1)


CONFIG_FASTJSON = {
    "consumerOffset.json": '{\n\t"offsetTable":{\n\t\t"orders@g1":{0:250,1:251\n\t\t},"%RETRY%g1@g1":{0:7\n\t\t}\n}}',
    "delayOffset.json": '{\n\t"offsetTable":{3:12,4:0\n\t}\n}',
    "consumerOrderInfo.json": '{\n\t"table":{\n\t\t"orders@g1":{0:{\n\t\t\t\t"cm":3,\n\t\t\t\t"o":[\n460,1]}}}}',
}
CONFIG_STRICT = {
    "consumerOffset.json": '{"offsetTable": {"orders@g1": {"0": 250, "1": 251}, "%RETRY%g1@g1": {"0": 7}}}',
    "delayOffset.json": '{"offsetTable": {"3": 12, "4": 0}}',
    "consumerOrderInfo.json": '{"table": {"orders@g1": {"0": {"cm": 3, "o": [460, 1]}}}}',
}


OFFSETS = (
    {"g1": {"orders": {"0": 250, "1": 251}, "%RETRY%g1": {"0": 7}}},
    {"3": 12, "4": 0},
    {"orders@g1": {"0": {"cm": 3, "o": [460, 1]}}},
)


@pytest.mark.parametrize("files", [CONFIG_FASTJSON, CONFIG_STRICT, {}], ids=["fastjson", "strict", "none"])
def test_offsets_are_read_in_both_dialects(golden: Golden, files: dict[str, str]) -> None:
    path = golden("clean").path
    (path / "config").mkdir()
    for name, text in files.items():
        (path / "config" / name).write_text(text)

    found = mqstore_json("inspect", path, exit_code=1)

    offsets = found["consumer_offsets"], found["delay_offsets"], found["order_info"]
    assert (offsets, found["problems"]) == (OFFSETS if files else ({}, {}, {}), [])
    assert found["checkpoint"]["physic_msg_timestamp_ms"] > 0


def test_lost_half_messages_are_one_line(golden: Golden) -> None:
    """A line for each, and all of them twice, once for each section that asks, pushed the store off the screen."""
    told = [line for line in mqstore("inspect", golden("rolled").path).stderr.splitlines() if "half message" in line]

    assert len(told) == 1
    assert "18 half messages have no valid target and are skipped, the first at 0" in told[0]


def test_an_unreadable_config_file_is_a_problem_and_hides_nothing_else(golden: Golden) -> None:
    path = golden("clean").path
    (path / "config").mkdir()
    (path / "config" / "consumerOffset.json").write_bytes(b"\0" * 100)
    (path / "config" / "delayOffset.json").write_text('{"offsetTable": {"3": -1, "x": 2, "4": 5, "5": 1e3, "6": true}}')
    (path / "config" / "consumerOrderInfo.json").write_text('{"table": [1]}')

    found = mqstore_json("inspect", path, exit_code=1)

    assert (found["consumer_offsets"], found["delay_offsets"], found["order_info"]) == ({}, {}, {})
    assert sum("consumerOffset.json" in problem for problem in found["problems"]) == 1
    assert sum("delayOffset.json" in problem for problem in found["problems"]) == 1
    assert sum("consumerOrderInfo.json" in problem for problem in found["problems"]) == 1
    assert len(found["topics"]) > 5


@pytest.mark.parametrize("name", ["topics.json", "subscriptionGroup.json"])
@pytest.mark.parametrize("backup", [True, False])
def test_a_damaged_table_is_a_problem_also_with_a_backup(tmp_path: Path, name: str, backup: bool) -> None:
    with library.open(tmp_path) as store:
        store.queue("jobs")
        store.queue("mail")
    file = tmp_path / "config" / name
    file.write_bytes(b"")
    if not backup:
        file.with_name(f"{name}.bak").unlink()
    found = mqstore_json("inspect", tmp_path, exit_code=1)
    assert sum(name in problem for problem in found["problems"]) == 1


def test_hostile_names_reach_the_screen_escaped(tmp_path: Path) -> None:
    """`mqstore` checks every character of each command."""
    path, evil = tmp_path / "s", "g\x1b]0;title\x07\u202e\x9b2J"
    with open_store(path) as store:
        store.append("orders", 0, os.fsencode(evil), properties={"TAGS": evil, "KEYS": evil, evil: evil})
    (path / "consumequeue" / evil).mkdir()
    (path / "config").mkdir(exist_ok=True)
    (path / "config" / f"{evil}.json").write_bytes(b"\x1b")
    offsets = {"offsetTable": {f"orders@{evil}": {"0": 1}, f"{evil}@a@b": {}}}
    (path / "config" / "consumerOffset.json").write_text(json.dumps(offsets))
    topics = {"topicConfigTable": {evil: {"topicName": "x", "readQueueNums": 1}, "orders": {"topicName": "orders"}}}
    (path / "config" / "topics.json").write_text(json.dumps(topics))

    shown = {name: mqstore(*words) for name, words in looking(path, tmp_path / "copy").items()}

    escaped = "g\\x1b]0;title\\x07\\u202e\\x9b2J"
    assert (escaped in mqstore("inspect", path).stdout, escaped in shown["verify"].stdout) == (True, True)
    assert (shown["topics list"].exit_code, "orders" in shown["topics list"].stdout) == (0, True)
    assert mqstore_json("inspect", path, exit_code=1)["consumer_offsets"] == {evil: {"orders": {"0": 1}}}
    assert f"consumequeue/{evil}" in {each["file"] for each in mqstore_json("verify", path, exit_code=1)["findings"]}


def test_records_that_no_queue_knows_are_counted(tmp_path: Path) -> None:
    """The store of a process that was killed before it dispatched: a copy of a store that never was closed."""
    live = tmp_path / "live"
    with open_store(live, clock=SimulatedClock(), segment_bytes=1 << 16) as store:
        store.put("orders", b"dispatched")
        store.dispatch()
        late = [store.put("orders", b"late"), store.put("payments", b"later")]
        shutil.copytree(live, tmp_path / "crashed")

    found = mqstore_json("inspect", tmp_path / "crashed", exit_code=1)

    assert found["undispatched_bytes"] == sum(receipt.size for receipt in late)
    assert found["recovery_needed"]
    assert not found["clean_shutdown"]
    assert found["commitlog"]["messages"] == 3
    assert found["commitlog"]["max_offset"] == late[-1].physical_offset + late[-1].size
    assert found["topics"]["orders"]["queues"]["0"]["max_offset"] == 1


@pytest.mark.parametrize("name", ["clean", "crashed"])
def test_looking_leaves_no_trace(golden: Golden, tmp_path: Path, name: str) -> None:
    """Not a byte, not a time: neither of files nor of folders, access times included where the system lets us."""
    path = golden(name).path
    for each in [path, *path.rglob("*")]:
        os.utime(each, (1_000_000_000, 1_600_000_000))  # read before it was written: relatime would update that
    before = snapshot(path)

    for command, words in looking(path, tmp_path / "copy").items():
        result = mqstore(*words)

        assert result.exit_code in (0, 1, 2), (command, result.output)  # the crashed store knows no group
        assert snapshot(path) == before, command


MAKING = {"produce, dry", "recover, dry, config", "spark clean, dry"}
"""Looks for what may not be a store yet, or no more."""


@pytest.mark.parametrize("command", ["recover", *sorted(looking("", "").keys() - MAKING)])
def test_other_folder_exits_with_3(tmp_path: Path, command: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("hello")

    for path, told in {
        "absent": "absent is not a store: there is no such directory",  # a path that was mistyped, mostly
        "empty": "empty is not a store",
        "letters": "letters",
        "letters/dear.txt": "dear.txt is a file; a store is a directory",
    }.items():
        words = {"recover": ["recover", tmp_path / path], **looking(tmp_path / path, tmp_path / "copy")}[command]
        result = mqstore(*words, exit_code=3)
        assert str(tmp_path / path) in result.stderr
        assert told in result.stderr
        assert result.stdout == ""
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["dear.txt", "empty", "letters"]


def damage(path: Path, rng: random.Random) -> str:
    """Spoil the content of a file of the store; how. Names that lead to other things are in tests/campaigns."""
    victim = rng.choice(sorted(p for p in path.rglob("*") if p.is_file() and p.name != "lock"))
    data = bytearray(victim.read_bytes())
    at = rng.randrange(len(data) + 1)
    kind = rng.choice(["cut", "grow", "flip", "garbage"])
    match kind:
        case "cut":
            del data[at:]
        case "grow":
            data += bytes(rng.randrange(1, 5000))
        case "flip":
            data[at : at + 1] = bytes(byte ^ 1 << rng.randrange(8) for byte in data[at : at + 1])
        case "garbage":
            data[at : at + 3000] = rng.randbytes(len(data[at : at + 3000]))
    victim.write_bytes(data)
    return f"{kind} {victim.relative_to(path)}"


@pytest.mark.parametrize("seed", [1, 2])
def test_no_damage_makes_a_tool_fall_over(golden: Golden, tmp_path: Path, seed: int) -> None:
    """Findings or an error: never a crash, a hang or a control sequence (which `mqstore` checks). Seeded, so that a
    failure can be looked at again."""
    rng = random.Random(seed)
    path = golden(rng.choice(GOLDEN_NAMES)).path
    done = [damage(path, rng) for _ in range(rng.randrange(1, 5))]
    before = snapshot(path)

    for name, words in looking(path, tmp_path / "copy").items():
        result = mqstore(*words)
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        assert "this is a bug" not in result.output, (done, name, result.output)
        assert snapshot(path) == before, (done, name)
        assert result.exit_code in (0, 1, 2, 3), (done, name)


# -- the broker's side -------------------------------------------------------------------------------------------------


def worked_on(path: Path, clock: SimulatedClock) -> dict[str, Any]:
    """A store with something of everything; what its broker said of itself at the end."""
    with broker(path, clock, delay_levels="1s 10s 1h") as running:
        running.topics.create("orders", queues=2)
        for i in range(10):
            running.put("orders", b"%d" % i, queue_id=i % 2)
        running.put("orders", b"later", delay_level=3)
        running.put("orders", b"timed", delay=3600)
        running.transactions.begin("orders", b"half", producer_group="pg")
        running.run_once()
        popped = running.pop("billing", "orders", 4, queue_id=0, local=False)
        running.ack("billing", "orders", [popped[1].receipt])
        running.dead_letter("billing", "orders", popped[2].receipt, "no good")
        running.change_invisible("billing", "orders", popped[3].receipt, 30)
        ordered = running.pop("ledger", "orders", 3, queue_id=1, order=True, local=False)
        running.ack("ledger", "orders", [ordered[1].receipt])
        running.note_attempt("audit", "orders", 1, 4, 2)
        running.run_once()
        # What is committed counts for inspect when it is on disk, so both are asked with all of it there.
        running.save()
        pin = running.stats().oldest_pin
        assert pin is not None
        return {
            "pending": [(group, *each) for group in ("billing", "ledger") for each in running.pending(group)],
            "pin": pin._asdict(),
            "levels": running.stats().delay_levels,
            "in_flight": running.stats().in_flight,
        }


def test_broker_state_agrees_with_the_broker(tmp_path: Path) -> None:
    clock = clock_now()
    now_ms = clock.now_ms()
    said = worked_on(tmp_path / "s", clock)

    found = mqstore_json("inspect", tmp_path / "s")["broker"]

    assert found["not_shown"] == {}
    assert sum(each["messages"] for each in found["in_flight"]) == said["in_flight"] == len(said["pending"]) == 4
    assert [list(each.values()) for each in found["in_flight"]] == [
        ["billing", "orders", 0, False, 2, 0, 0, now_ms + 30_000],
        ["ledger", "orders", 1, True, 2, 0, 0, now_ms + 60_000],
    ]
    assert [(level["level"], level["delay_ms"], level["waiting"]) for level in found["delay_levels"]] == [
        (3, 3_600_000, 1)
    ]
    assert (said["levels"], found["timer"]["waiting"], found["dead_letters"]) == ({3: (0, 1)}, 1, {"billing": 1})
    assert found["transactions"] == {"open": 1, "given_up": 0, "newest_given_up": []}
    orders = {(each["group"], each["queue_id"]): each for each in found["order_info"]}
    ledger = orders["ledger", 1]
    assert (ledger["offsets"], ledger["unacked"], ledger["pop_time_ms"]) == ([0, 1, 2], [0, 2], now_ms)
    assert ledger["next_visible_ms"] == now_ms + 60_000


def test_pin_of_the_log_is_named(tmp_path: Path) -> None:
    said = worked_on(tmp_path / "s", clock_now())["pin"]

    found = mqstore_json("inspect", tmp_path / "s")["broker"]["oldest_pin"]

    assert found == {**said, "queue_offset": 0}
    assert (found["topic"], found["queue_id"], found["group"]) == ("orders", 0, "billing")
    shown = mqstore("inspect", tmp_path / "s").stdout
    assert "orders, queue 0 at 0, group billing: not consumed" in shown


@pytest.mark.parametrize(
    ("keep", "topic"),
    [("level", "SCHEDULE_TOPIC_XXXX"), ("timer", "rmq_sys_wheel_timer"), ("half", "RMQ_SYS_TRANS_HALF_TOPIC")],
)
def test_delayed_message_pins_the_log(path: Path, keep: str, topic: str) -> None:
    with broker(path) as running:
        running.groups.create("billing")
        if keep == "level":
            running.put("orders", b"later", delay_level=18)
        elif keep == "timer":
            running.put("orders", b"later", delay=3600)
        else:
            running.transactions.begin("orders", b"half", producer_group="pg")
        running.put("orders", b"consumed", queue_id=0)
        running.run_once()
        running.commit("billing", "orders", 0, 1)
        pin = running.stats().oldest_pin
        assert pin is not None

    found = mqstore_json("inspect", path)["broker"]["oldest_pin"]

    assert (found["topic"], found["physical_offset"], found["queue_offset"]) == (topic, 0, 0)
    assert pin.physical_offset == 0


def test_the_order_info_of_a_java_broker_is_read(golden: Golden) -> None:
    path = golden("clean").path
    [first] = [q for q in golden("clean").of("queue") if (q["topic"], q["queue_id"]) == ("orders", 0)]
    assert first["max_offset"] > 3
    (path / "config").mkdir()
    (path / "config" / "subscriptionGroup.json").write_text('{"subscriptionGroupTable":{"g1":{"groupName":"g1"}}}')
    (path / "config" / "consumerOrderInfo.json").write_text(
        '{"table":{"orders@g1":{0:{"popTime":1700000000000,"i":60000,"o":[0,1,2],"cm":2,"l":1700000000000}}}}'
    )

    found = mqstore_json("inspect", path, exit_code=1)["broker"]

    [order] = found["order_info"]
    assert (order["offsets"], order["unacked"], order["next_visible_ms"]) == ([0, 1, 2], [0, 2], None)
    assert found["in_flight"] == []  # its time is long over


def test_transactions_given_up_can_be_read(tmp_path: Path) -> None:
    clock = clock_now()
    with broker(tmp_path / "s", clock) as running:
        handle = running.transactions.begin("orders", b"half", producer_group="pg")
        running.transactions.on_check("pg", lambda message: None)
        for _ in range(20):
            running.run_once()
            clock.advance(31_000)
        running.run_once()

    found = mqstore_json("inspect", tmp_path / "s")["broker"]["transactions"]

    assert (found["open"], found["given_up"]) == (0, 1)
    [row] = found["newest_given_up"]
    assert (row["transaction_id"], row["topic"], row["producer_group"]) == (handle.transaction_id, "orders", "pg")
    assert handle.transaction_id in mqstore("inspect", tmp_path / "s").stdout


@pytest.mark.parametrize(
    ("file", "sections"),
    [
        ("topics.json", {"broker"}),
        ("consumerOffset.json", {"broker"}),
        ("delayOffset.json", {"delay_levels", "due", "oldest_pin"}),
        ("consumerOrderInfo.json", {"in_flight", "order_info"}),
    ],
)
def test_a_damaged_table_hides_what_hangs_on_it_and_nothing_else(path: Path, file: str, sections: set[str]) -> None:
    worked_on(path, clock_now())
    for each in [path / "config" / file, *(path / "config").glob(f"{file}.*")]:
        each.write_bytes(b"\0" * 60)

    result = mqstore("inspect", path, exit_code=1)
    found = mqstore_json("inspect", path, exit_code=1)

    assert set(found["broker"]["not_shown"]) == sections
    assert f"not shown: {min(sections).replace('_', ' ')}" in result.stderr
    assert found["topics"]["orders"]["queues"]["0"]["max_offset"] == 5
    if sections != {"broker"}:
        assert found["broker"]["timer"]["waiting"] == 1


NONSENSE = [
    b'{"t":"orders","c":"billing","q":0,"so":1,"pt":5,"it":"x","d":[0],"nx":2}',
    b'{"t":1,"c":"billing","q":0,"so":1,"pt":5,"it":6,"d":[0],"nx":2}',
    b'{"t":"orders","c":["g"],"q":0,"so":1,"pt":5,"it":6,"d":[0],"nx":2}',
    b'{"t":"orders","c":"billing","q":0,"so":1,"pt":5,"it":6,"d":[0],"nx":null}',
    b'{"t":"orders","c":"billing","q":0,"so":1,"pt":5,"it":6,"d":[0],"f":1,"oc":{"x":1}}',
    b'{"so":1}',
    b"[1]",
    b"\xff",
]


@pytest.mark.parametrize("body", NONSENSE)
def test_nonsense_in_the_pop_log_is_passed_over(path: Path, body: bytes) -> None:
    with broker(path) as running:
        running.put("orders", b"x", queue_id=0)
        running.groups.create("billing")
        running.commit("billing", "orders", 0, 0)
        running.store.append("rmq_sys_pop_log", 0, body, properties={"TAGS": "ck"})

    mqstore("lag", path, exit_code=0)
    result = mqstore("inspect", path, "--json")
    assert result.exit_code == ("error: " in result.stderr)
    assert json.loads(result.stdout)["broker"]["in_flight"] == []


def test_splice_and_inbox_are_shown(path: Path) -> None:
    with open_store(path) as store:
        end = store.put("orders", b"x").size
        store.splice([], app="other", version=1)
    nothing = mqstore_json("inspect", path)["splice"]
    assert (nothing["pending"], nothing["inbox"], nothing["refused"]) == (None, [], [])
    file = path / "config" / "spark" / "txn.json"
    state = json.loads(file.read_text())
    intent = {"app": "job \x1b[31m", "version": 7, "start": end, "stamp_ms": 1}
    file.write_text(json.dumps({**state, "intent": intent}))
    for name in ("job-8", "refused/job-6\x1b[31m"):
        (path / "inbox" / name).mkdir(parents=True)

    found = mqstore_json("inspect", path, exit_code=1)
    assert found["splice"]["pending"] == {"app": intent["app"], "version": 7, "start": end}
    assert (found["splice"]["inbox"], len(found["splice"]["refused"])) == (["job-8"], 1)
    shown = mqstore("inspect", path).output
    assert "version 7 of job" in shown
    assert "1 bundles wait" in shown
    assert "reason.txt" in shown


_PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def test_the_worst_file_that_is_read_takes_a_bounded_amount_of_memory(tmp_path: Path) -> None:
    """35 MB of JSON took 2 GiB. As large as the limits allow it takes 0.6 GiB, and a quarter of it less than 0.25."""
    with library.open(tmp_path / "store") as store:
        store.put("a", b"x")
    entries = (b'"t%x@g":{"0":1}' % n for n in range(125_000))  # a quarter of the limit
    content = b'{"offsetTable":{' + b",".join(entries) + b"}}"
    (tmp_path / "store" / "config").mkdir(exist_ok=True)
    (tmp_path / "store" / "config" / "consumerOffset.json").write_bytes(content)

    # A child's peak is at least what its parent has when it forks, so a small process starts the command.
    command = [sys.executable, "-m", "mqstore_tools.main", "inspect", str(tmp_path / "store")]
    ran = subprocess.run([sys.executable, "-c", _PEAK, *command], env=environment(), capture_output=True, check=True)
    kibibytes = int(ran.stdout) // (1024 if sys.platform == "darwin" else 1)
    assert kibibytes < 1 << 18, f"{kibibytes >> 10} MiB"


# -- queues that lack messages -----------------------------------------------------------------------------------------


CLOSED = ("none", "index gone", "queue gone", "topic gone", "queues gone", "queue's end gone")


@pytest.mark.parametrize(
    ("name", "killed"), [*((name, False) for name in CLOSED), ("none", True), ("queue gone", True)]
)
@pytest.mark.parametrize("profile", ["mqstore", "rocketmq"])
def test_a_queue_that_lacks_messages_is_named(path: Path, name: str, profile: Profile, killed: bool) -> None:
    """`lag` exits with 1, too: what it counts is then too little. A queue of a killed store lacks what was not yet
    dispatched."""
    puts = filled(path, profile, killed=killed)
    (path / "config").mkdir(exist_ok=True)
    table = {"topic0@billing": {"0": 1, "1": 1, "2": 1}, "topic1@billing": {"0": 1}}
    (path / "config" / "consumerOffset.json").write_text(json.dumps({"offsetTable": table}))
    DAMAGES[name](path, puts)
    lacks = killed or name not in ("none", "index gone")

    found, lag = mqstore("inspect", path, "--json"), mqstore("lag", path, "--json")

    assert (found.exit_code, lag.exit_code) == (int(lacks), int(lacks))
    named = json.loads(found.stdout)["incomplete_queue"]
    assert (named is not None) == lacks
    for result in found, lag:
        assert ("lacks messages that are in the log" in result.stderr) == lacks
        assert (f"`mqstore recover {path}`" in result.stderr) == lacks
    if lacks and not killed:
        assert named["topic"] == ("topic1" if name == "topic gone" else "topic0")
        assert f"{named['topic']}, queue {named['queue_id']}, lacks" in found.stderr
    mqstore("recover", path)
    assert (mqstore("inspect", path).exit_code, mqstore("lag", path).exit_code) == (0, 0)


def test_undispatched_records_are_not_lost(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        store.put("t", b"a")
        store.dispatch()
        store.put("t", b"b")

        result = mqstore("inspect", tmp_path / "s", "--json")

    found = json.loads(result.stdout)
    assert (result.exit_code, found["incomplete_queue"]) == (0, None)
    assert (found["writer_alive"], found["recovery_needed"]) == (True, False)


@pytest.mark.parametrize("killed", [False, True], ids=["closed", "killed"])
def test_holes_of_a_sparse_store_are_not_read(tmp_path: Path, killed: bool) -> None:
    """10 GiB of holes behind the log took seconds."""
    size = 64 << 20
    store = open_store(tmp_path / "s", segment_bytes=size)
    for _ in range(100):
        store.put("orders", b"x" * 100)
    kill(store) if killed else store.close()
    for start in range(size, 10 << 30, size):
        with (tmp_path / "s" / "commitlog" / f"{start:020d}").open("xb") as file:
            file.truncate(size)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    found = inspect_store(tmp_path / "s")
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    assert found["commitlog"]["messages"] == 100
    assert pages < (10 << 30) / 4096 / 20


def test_human_output_names_what_matters(golden: Golden) -> None:
    shown: Any = mqstore("inspect", golden("crashed").path)

    assert shown.exit_code == 1
    for word in ("rocketmq", "not closed cleanly", "mqstore recover", "orders", "from byte"):
        assert word in shown.stdout


@pytest.mark.parametrize("kept", [[1, 2, 3], [0, 1, 2], [1, 2], []])
def test_bounds_of_a_queue_are_those_of_its_messages(tmp_path: Path, kept: list[int]) -> None:
    """Units of lost records are void."""
    with library.open(tmp_path) as store:
        receipts = [store.put("t", b"x", queue_id=0) for _ in range(4)]
    [file] = (tmp_path / "consumequeue/t/0").iterdir()
    with open(file, "r+b") as units:
        for n in {0, 1, 2, 3}.difference(kept):
            units.seek(20 * n)
            units.write(bytes.fromhex("00000000000000007fffffff0000000000000000"))
    found = inspect_store(tmp_path)["topics"]["t"]["queues"]["0"]
    ends = [(receipts[n].physical_offset, receipts[n].physical_offset + receipts[n].size) for n in kept] or [(-1, -1)]
    assert (found["min_physical_offset"], found["max_physical_offset"]) == (ends[0][0], ends[-1][1])
