"""Calls that cannot be meant: exit code 2 and the reason, and nothing is printed, made or changed."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.support import listed, mqstore

WRONG: dict[str, dict[str, str]] = {
    "bench": {"--directory nonesuch": "'nonesuch' does not exist"},
    "consume STORE orders --group new": {
        "--shell": "--shell goes with --exec",
        "--exec-timeout 2": "--exec-timeout goes with --exec",
        "--reject-code 2": "--reject-code goes with --exec",
        "--exec true --format jsonl": "--format does not go with --exec",
        "--exec no-such-command-there": "is not a command",
        '--exec "\'unbalanced"': "No closing quotation; --shell runs it in a shell",
        "--exec ''": "'' is not a command",
        "--tags a --sql 'a > 1'": "give --tags or --sql, not both",
        "--sql 'a >'": "but the filter ends",
        "--from yesterday": "neither a time",
        "--idle-exit -1": "is not in the range",
        "--idle-exit nan": "'nan' is not a finite number",
        "--retry-delay 1e300": "is not in the range",
        "--exec true --exec-timeout nan": "'nan' is not a finite number",
        "--exec true --exec-timeout 3000000": "is not in the range",
        "no/topic": "topic 'no/topic' must be",
    },
    "dlq STORE": {"--group nope": "no store has the group 'nope'; existing:"},
    "export STORE": {
        "--topic nonesuch": "has no topic 'nonesuch'",
        "--topic orders --queue-id 7": "has no queue 7 of topic 'orders'",
        "--queue-id 1": "--queue-id needs one --topic",
        "--output STORE/all.jsonl": "must not be in the store's directory",
        "--to out --queue-id 1": "--queue-id does not go with --to",
        "--to out --output x": "--output does not go with --to",
        "--to out --option nonsense": "--option 'nonsense' is not NAME=VALUE",
        "--to out --until 4": "4 is not a time (2026-01-31, 36h); for queue offsets use --option startingOff",
        "--spark 'local[2]'": "--spark goes with --to",
        "--columns body": "--columns goes with --to",
        "--to out --grep a": "--grep does not go with --to",
        "other": "several stores need --to",
    },
    "get STORE": {
        "": "give --topic, --id, --physical-offset, or a filter",
        "--topic nonesuch": "has no topic 'nonesuch'",
        "--topic nonesuch --key k": "has no topic 'nonesuch'",
        "--topic orders --queue-id 7": "queue 7 of 'orders' is empty; there are messages in 0, 1",
        "--topic orders --queue-id 0 --offset 10": "holds offsets from 0 to before 10",
        "--message-id nonsense": "is not a message id",
        "--physical-offset 1": "has no message at physical offset 1",
        f"--physical-offset {1 << 62}": "has nothing at physical offset",
        "--id m --grep x": "--grep does not go with --id",
        "--grep '('": "is not a regular expression of bytes",
        "--where 'a ='": "but the filter ends",
        "--tag 'a|b'": "separate tags with `||`",
        "--from 2026-01-02 --until 2026-01-01": "give an earlier begin",
        "--message-id m --physical-offset 0": "give only one of --id and --physical-offset",
        "--topic orders --physical-offset 0": "--topic does not go with --physical-offset",
        "--physical-offset 0 --max-messages 5": "--limit does not go with --physical-offset",
        "--topic t --offset -1": "is not in the range",
        "--topic t --max-messages 0": "is not in the range",
        "--last 3": "give --topic, --id, --physical-offset, or a filter",
        "--topic orders --last 0": "is not in the range",
        "--topic orders --last 3 --max-messages 2": "--limit does not go with --last",
        "--topic orders --last 3 --offset 2": "--offset does not go with --last",
        "--topic orders --follow --message-id m": "give only one of --follow and --id",
        "--topic orders --follow --offset 0": "--offset does not go with --follow",
    },
    "lag STORE": {
        "--topic nope": "no store has the topic 'nope'; existing:",
        "--group nope": "no store has the group 'nope'; existing:",
        "--max-age foo": "'foo' is not a length of time, such as 36h",
        "--watch --max-lag 3": "--max-lag does not go with --watch",
        "--interval 3": "--interval goes with --watch",
    },
    "produce STORE orders": {
        "--tag 'a|b'": "a tag must be a str without '|'",
        "--key 'a b'": "a key must be a str without spaces",
        f"--message-group {'g' * 64}": "is longer than 63 bytes",
        "--message-group g --delay 5": "message_group and delay exclude each other",
        "--property novalue": "--property 'novalue' is not NAME=VALUE",
        "--property TAGS=x": "property 'TAGS' is reserved",
        "--key @id": "@FIELD needs --format jsonl or csv",
        "--body-is-record": "--body-is-record is for --format jsonl and csv",
        "--exported --body-is-record": "--exported chooses the body",
        "--exported --format csv": "leave out --format",
        "--queue-id 2": "queue_id 2 does not lie in 0..1",
        "--queue-id 16384": "queue_id 16384 does not lie in 0..1",
        "--rate 0": "is not in the range",
        "--rate nan": "'nan' is not a finite number",
        "--rate inf": "'inf' is not a finite number",
        "--delay -1": "'-1' is not a length of time",
        "--delay soon": "'soon' is not a length of time",
        "--format xml": "'xml' is not one of",
        "--format file --key @id": "@FIELD needs --format jsonl or csv",
        "--body x -": "--body is the only message",
        "--body x --format csv": "--body is the only message",
        "--body x --exported": "--body is the only message",
    },
    "produce new": {
        "or/ders": "topic 'or/ders' must be",
        "''": "topic '' must be",
        "SCHEDULE_TOPIC_XXXX": "is a system topic",
    },
    "recover": {
        "STORE STORE --rebuild config": "--rebuild config is for one store, without other options",
        "STORE --rebuild config --rebuild index": "--rebuild config is for one store, without other options",
    },
    "serve new": {
        "--listen 127.0.0.1": "is not HOST:PORT",
        "--listen 127.0.0.1:x": "is not HOST:PORT",
        "--listen 127.0.0.1:70000": "is not HOST:PORT",
        "--listen :9876": "is not HOST:PORT",
        "--listen 0.0.0.0:9876": "add --auth FILE or --insecure-bind",
        "--listen '[::]:9876'": "add --auth FILE or --insecure-bind",
        "--listen 10.1.2.3:9876": "add --auth FILE or --insecure-bind",
        "--listen queue.example:9876": "add --auth FILE or --insecure-bind",
        "--listen 127.0.0.1:0 --metrics 0.0.0.0:0": "add --auth FILE or --insecure-bind",
    },
    "spark clean": {
        "nowhere": "nowhere is not a folder",
        ". --older-than soon": "'soon' is not a length of time",
    },
    "report STORE": {
        "--interval fast": "interval='fast'",
        "--by tag": "by=",
        "--verify": "--verify goes with --html",
        "--html page.html --by topic": "--by does not go with --html",
        "STORE --html page.html": "--html is for one store",
    },
    "traffic": {"STORE": "`mqstore traffic` is now `mqstore report`"},
}
"""By the beginning of a call: what follows it -> what is said."""


@pytest.fixture(scope="module")
def untouched(store: Path) -> Iterator[Path]:
    """The store, which is the same after all calls."""
    before = listed(store)
    yield store
    assert listed(store) == before


@pytest.mark.parametrize(
    ("call", "says"), [(f"{begin} {rest}", says) for begin, table in WRONG.items() for rest, says in table.items()]
)
def test_wrong_usage_is_named_and_does_nothing(
    untouched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)

    result = mqstore(*shlex.split(call.replace("STORE", str(untouched))), stdin=b"a line\n")

    said = " ".join(result.stderr.split())
    assert (result.exit_code, result.stdout, says in said, "line 1" in said) == (2, "", True, False), said
    assert list(tmp_path.iterdir()) == []
