"""`mqstore top` and `lag --watch`: figures of a store and of a server, rates, keys, and the terminal left as it was."""

from __future__ import annotations

import json
import os
import pty
import re
import selectors
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mqstore as library
from tests.children import fork
from tests.tools.brokers import broker, clock_now
from tests.tools.support import cli, forked, mqstore, mqstore_json
from tests.waiting import until

ONCE = ("--once", "--interval", "0.1")


def _row(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    [row] = [row for row in rows if row["name"] == name]
    return row


def test_figures_are_those_of_the_store(path: Path) -> None:
    clock = clock_now()
    with broker(path, clock) as running:
        running.topics.create("orders", queues=2)
        for i in range(20):
            running.put("orders", b"x", queue_id=i % 2)
        running.put("orders", b"later", delay=3600)
        running.put("orders", b"level", delay_level=18)
        running.groups.create("popping")
        running.run_once()
        bad, *others = running.pop("popping", "orders", 8)
        running.dead_letter("popping", "orders", bad.receipt, "no such card")
        running.ack("popping", "orders", others[0].receipt)
        running.commit("reading", "orders", 0, 4)
        running.run_once()
        said = {group: sum(running.lag(group).values()) for group in ("popping", "reading")}

    view = mqstore_json("top", path, *ONCE)

    assert (view["delayed"], view["dead_letters"], view["in_flight"], view["clients"]) == (2, 1, 6, None)
    assert _row(view["topics"], "orders") == {"name": "orders", "messages": 20, "in_per_s": 0.0, "out_per_s": 0.0}
    assert "%DLQ%popping" not in {row["name"] for row in view["topics"]}
    popping, reading = _row(view["groups"], "popping"), _row(view["groups"], "reading")
    assert (popping["messages"], popping["in_flight"], popping["dead_letters"]) == (18, 6, 1)
    assert (reading["messages"], reading["in_flight"], reading["dead_letters"]) == (6, 0, 0)
    assert said == {"popping": 18, "reading": 6}
    assert popping["oldest_age_ms"] >= 0
    assert view["free_bytes"] > 0
    assert view["log_bytes"] == sum(each.stat().st_size for each in (path / "commitlog").glob("0*"))


@pytest.mark.parametrize("way", ["files", "server", "address"])
def test_rates_are_the_growth_between_two_looks(path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Commits of a group that had not started in a queue say nothing about a rate, nor does a reset."""
    with library.open(path) as store:
        store.broker.topics.create("orders", queues=2)
        store.put_many("orders", [b"old"] * 40, queue_id=0)
        for group in ("billing", "back"):
            store.broker.commit(group, "orders", 0, 10)
        store.broker.save()

        def meanwhile(seconds: float) -> None:
            store.put_many("orders", [b"new"] * 30, queue_id=1)
            store.put_many("fresh", [b"new"] * 7, queue_id=0)
            store.broker.commit("billing", "orders", 0, 15)
            store.broker.commit("late", "orders", 0, 39)
            store.broker.reset("back", "orders", 0, "earliest")
            store.broker.save()
            until(dispatched)

        def dispatched() -> bool:
            with library.open(path, "r") as reader:
                return reader.log.offsets_or_none("fresh", 0) == (0, 7)

        server = None if way == "files" else store.serve("127.0.0.1:0")
        monkeypatch.setattr("mqstore_tools.top.time", SimpleNamespace(sleep=meanwhile))
        view = mqstore_json("top", server.address if server and way == "address" else path, *ONCE)

    def grown(of: dict[str, Any], name: str) -> int:
        return round(of[name] * max(1, view["span_ms"]) / 1000)

    orders, fresh = _row(view["topics"], "orders"), _row(view["topics"], "fresh")
    assert [grown(orders, "in_per_s"), grown(orders, "out_per_s"), grown(fresh, "in_per_s")] == [30, 5, 7]
    assert [grown(view, "in_per_s"), grown(view, "out_per_s")] == [37, 5]
    assert {row["name"]: grown(row, "out_per_s") for row in view["groups"]} == {"billing": 5, "back": 0, "late": 0}
    assert view["clients"] == (None if way == "files" else 0)


def test_store_that_is_restored_between_two_looks_has_no_negative_rate(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, count in ((path, 5), (path.with_name("older"), 2)):
        with broker(place) as running:
            for _ in range(count):
                running.put("orders", b"x", queue_id=0)

    def restore(seconds: float) -> None:
        path.rename(path.with_name("newer"))
        path.with_name("older").rename(path)

    monkeypatch.setattr("mqstore_tools.top.time", SimpleNamespace(sleep=restore))
    view = mqstore_json("top", path, *ONCE)

    assert _row(view["topics"], "orders") == {"name": "orders", "messages": 2, "in_per_s": 0.0, "out_per_s": 0.0}


def test_clients_of_a_server_are_counted_by_group(path: Path) -> None:
    with library.open(path) as store:
        server = store.serve("127.0.0.1:0")
        with library.connect(server.address) as client, client.simple_consumer("billing", {"orders": "*"}) as consumer:
            consumer.receive(1, wait=0)
            view = mqstore_json("top", path, *ONCE)

    assert view["clients"] == 1
    assert _row(view["groups"], "billing")["clients"] == 1


@pytest.mark.parametrize(
    ("options", "topics", "groups"),
    [
        ((), ["b-few", "a-few", "c"], ["b-few", "c"]),
        (("--sort", "name"), ["a-few", "b-few", "c"], ["b-few", "c"]),
        (("--sort", "flight", "--match", "c"), ["c"], ["c"]),
        (("--match", "few", "--sort", "age"), ["a-few", "b-few"], ["b-few"]),
    ],
)
def test_rows_are_sorted_and_chosen(path: Path, options: tuple[str, ...], topics: list[str], groups: list[str]) -> None:
    with broker(path) as running:
        for topic, count in {"c": 1, "a-few": 2, "b-few": 3}.items():
            for _ in range(count):
                running.put(topic, b"x", queue_id=0)
        running.commit("c", "c", 0, 0)
        running.commit("b-few", "b-few", 0, 0)

    view = mqstore_json("top", path, *ONCE, *options)

    assert [row["name"] for row in view["topics"]] == topics
    assert [row["name"] for row in view["groups"]] == groups
    lines = mqstore("top", path, *ONCE, *options, exit_code=0).stdout.splitlines()
    assert [line.split()[0] for line in lines[3:]] == ["topic", *topics, "group", *groups]


# -- again and again ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["top STORE --interval 0.1", "lag STORE --watch --interval 0.1"])
def test_json_is_an_object_a_line_until_it_is_interrupted(store: Path, words: str) -> None:
    child = forked(*(store if word == "STORE" else word for word in words.split()), "--json")
    assert child.stdout is not None
    rows = [json.loads(child.stdout.readline()) for _ in range(3)]
    child.send_signal(signal.SIGINT)
    _, err = child.communicate()

    assert (child.returncode, err) == (130, b"")
    assert [row["version"] for row in rows] == [1, 1, 1]
    assert rows[0]["taken_ms"] < rows[1]["taken_ms"] < rows[2]["taken_ms"]


def test_error_ends_the_command_without_a_terminal(path: Path) -> None:
    with broker(path):
        pass
    child = forked("top", path, "--interval", "0.1")
    assert child.stdout is not None
    child.stdout.readline()
    path.rename(path.with_name("gone"))
    _, err = child.communicate(timeout=60)

    assert child.returncode == 3
    assert b"not a store" in err or b"No such file" in err or b"gone" in err, err


@contextmanager
def on_terminal(*words: object, rows: int = 24) -> Iterator[tuple[int, int, Callable[[str], str]]]:
    """Run a command in a child with a terminal of 80 columns.
    Yield its process id, the terminal, and a function that returns what is shown from a text on."""
    ours, its = pty.openpty()
    ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", rows, 80, 0, 0))

    def work() -> None:
        for fd in (0, 1, 2):
            os.dup2(its, fd)
        for name, fd in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
            setattr(sys, name, open(fd, "r" if fd == 0 else "w", closefd=False))  # noqa: SIM115
        os.environ |= {"TERM": "xterm", "COLUMNS": "80", "LINES": str(rows)}
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in a shell's background
        code = 0
        try:
            cli.main([str(word) for word in words], prog_name="mqstore")
        except SystemExit as error:
            code = int(error.code or 0)
        os._exit(code)

    seen, terminal = "", selectors.DefaultSelector()
    terminal.register(ours, selectors.EVENT_READ)

    def shown(text: str) -> str:
        nonlocal seen
        end = time.monotonic() + 20
        while not (found := re.search(text, seen)):
            assert time.monotonic() < end, seen
            if terminal.select(0.2):
                seen += re.sub("\x1b\\[[0-9;]*m", "", os.read(ours, 1 << 16).decode())
        page, seen = seen[: found.end()], seen[found.end() :]
        return page

    pid = fork(work)
    try:
        yield pid, ours, shown
    finally:
        os.close(its)
        os.close(ours)


def _end(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _mode(terminal: int) -> list[Any]:
    return termios.tcgetattr(terminal)[:6]


@pytest.mark.parametrize(("end", "code"), [("q", 0), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_keys_choose_and_the_terminal_is_restored(store: Path, end: str | signal.Signals, code: int) -> None:
    with on_terminal("top", store, "--interval", "0.2") as (pid, terminal, shown):
        before = _mode(terminal)
        first = shown("by messages.*q=quit")
        during = _mode(terminal)
        os.write(terminal, b"n")
        shown("by name")
        os.write(terminal, b"/bq")
        shown("/bq_")
        os.write(terminal, b"\x7fill\r")
        chosen = shown("/bill q=quit")
        if isinstance(end, str):
            os.write(terminal, end.encode())
        else:
            os.kill(pid, end)
        last = shown(re.escape("\x1b[?1049l"))
        assert (_end(pid), _mode(terminal)) == (code, before)

    assert "orders" in first
    assert "billing" in first
    assert during != before
    assert "billing" in chosen[chosen.rindex("\x1b[H") :]
    assert "audit" not in chosen[chosen.rindex("\x1b[H") :]
    assert "orders" not in chosen[chosen.rindex("\x1b[H") :]
    assert "\x1b[?25h" in last  # the cursor


def test_page_fits_a_small_terminal(path: Path) -> None:
    with broker(path) as running:
        for i in range(60):
            running.put(f"topic-{i:02}-{'n' * 90}", b"x", queue_id=0)
            running.commit(f"group-{i:02}-{'g' * 100}", f"topic-{i:02}-{'n' * 90}", 0, 0)

    with on_terminal("top", path, "--interval", "0.2", rows=12) as (pid, terminal, shown):
        page = shown("by messages.*q=quit")
        os.write(terminal, b"q")
        assert _end(pid) == 0

    lines = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", page[page.rindex("\x1b[H") :]).replace("\r", "").split("\n")
    assert len(lines) <= 12
    assert [line for line in lines if len(line) > 80] == []
    assert sum("…" in line for line in lines if line.startswith(("topic-", "group-"))) >= 4
    assert any(line.startswith("group-") for line in lines)


def test_watched_lag_shows_an_error_until_the_store_is_back(path: Path) -> None:
    with broker(path) as running:
        running.put("orders", b"x", queue_id=0)
        running.commit("billing", "orders", 0, 0)

    with on_terminal("lag", path, "--watch", "--interval", "0.1") as (pid, terminal, shown):
        shown("q quit")
        path.rename(path.with_name("gone"))
        problem = shown("this is the last answer: [^\x1b]*")
        path.with_name("gone").rename(path)
        shown("q quit")
        os.write(terminal, b"q")
        assert _end(pid) == 0

    assert "billing" in problem[problem.rindex("\x1b[H") :]
