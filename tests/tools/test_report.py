"""`mqstore report`: a page that shows the figures of a store, needs nothing else, and is safe for any store."""

from __future__ import annotations

import json
import re
import shutil
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import mqstore as library
from mqstore import SimulatedClock, StoreConfig
from mqstore_tools import plots
from mqstore_tools.session import show_ms
from tests.tools.support import SHOULD_NOT_REACH_A_SCREEN, mqstore, mqstore_json, snapshot

BEGIN_MS, HOUR_MS = 1_769_821_200_000, 3_600_000
EVIL = "<script>alert(1)</script>\"'&\x1b[2J\u202e"
VOID = {"meta"}


class Page(HTMLParser):
    """Text by heading, and the elements of a page. Fails if elements are not closed in order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_bytes().decode("ascii")
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.sections: dict[str, list[str]] = {}
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.sections[data] = []
        elif self.sections:
            [*self.sections.values()][-1].append(data)

    def row(self, section: str, name: str) -> list[str]:
        words = self.sections[section]
        at = words.index(name)
        return words[at : at + 6]


def written(store: Path, tmp_path: Path, *words: object, exit_code: int = 0) -> Page:
    page = tmp_path / "page.html"
    mqstore("report", store, "--html", page, *words, exit_code=exit_code)
    return Page(page)


def fill(path: Path) -> None:
    """Write three hours: 1, 2 and 3 messages of 100 bytes, of which `billing` has consumed the first two."""
    clock = SimulatedClock(BEGIN_MS)
    with library.open(path, config=StoreConfig(clock=clock, segment_bytes=1 << 14)) as store:
        store.broker.topics.create("orders", queues=1)
        consumer = store.simple_consumer("billing", {"orders": "*"})
        for hour in range(3):
            for _ in range(hour + 1):
                store.put("orders", b"x" * 100)
            if hour < 2:
                [delivery] = consumer.receive(1, wait=0)
                delivery.ack()
            clock.advance(HOUR_MS)
        for delay in (60, 60, HOUR_MS):
            store.put("orders", b"later", delay=delay)
        store.put("orders", b"by level", delay_level=18)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "mq"
    fill(path)
    return path


def test_page_shows_the_figures_of_the_store(store: Path, tmp_path: Path) -> None:
    before = snapshot(store)
    page = written(store, tmp_path)

    assert [*page.sections] == [
        *("Findings", "Traffic", "Sizes", "Map of the log", "Lag by group", "Delayed messages by due time", "Settings")
    ]
    assert page.sections["Findings"][0] == "No findings."
    assert page.sections["Traffic"][0].startswith("6 messages")
    assert page.row("Sizes", "orders")[1] == "6"
    assert page.row("Lag by group", "billing")[1:4] == ["4", "0", "0"]
    assert page.row("Settings", "orders")[1:3] == ["1", "1"]
    assert snapshot(store) == before


def test_json_counts_traffic_delays_and_each_byte_of_the_log(store: Path, tmp_path: Path) -> None:
    found = mqstore_json("report", store, "--html", tmp_path / "page.html")

    hours = dict.fromkeys(range(3), 0)
    for point in found["traffic"]["series"]:
        hours[(point["start_ms"] - BEGIN_MS) // HOUR_MS] += point["messages"]
    assert hours == {0: 1, 1: 2, 2: 3}
    assert sum(count for _, count in found["store"]["broker"]["due"]["counts"]) == 4
    disk, log = found["disk"], found["disk"]["map"]
    consumed = sum(row["consumed_bytes"] or 0 for row in disk["topics"])
    system = sum(row["log_bytes"] for row in disk["topics"] if row["consumed_bytes"] is None)
    assert sum(log["consumed"]) == consumed > 0
    assert sum(log["system"]) == system > 0
    assert sum(log["live"]) == disk["log"]["topic_bytes"] - consumed - system
    cells = zip(log["consumed"], log["live"], log["system"], strict=True)
    assert max(map(sum, cells)) <= log["cell_bytes"]


@pytest.mark.parametrize(("options", "messages"), [((), 2), (("--option", "tags=none"), 0)])
def test_page_has_the_traffic_that_is_chosen(
    store: Path, tmp_path: Path, options: tuple[str, ...], messages: int
) -> None:
    second_hour = [datetime.fromtimestamp(BEGIN_MS / 1000 + hour * 3600, UTC).isoformat() for hour in (1, 2)]
    chosen = ("--from", second_hour[0], "--until", second_hour[1], "--interval", "10m", *options)
    found = mqstore_json("report", store, "--html", tmp_path / "page.html", *chosen)

    assert (found["traffic"]["interval_ms"], found["traffic"]["total"]["messages"]) == (600_000, messages)
    assert sum(row["messages"] for row in found["disk"]["topics"]) > 2


def test_delays_count_at_their_due_times(store: Path, tmp_path: Path) -> None:
    due = mqstore_json("inspect", store)["broker"]["due"]

    now_ms = BEGIN_MS + 3 * HOUR_MS
    # 18 is the level of two hours. The timer looks again after two days at one that is due in 41 days.
    expected = {now_ms + 60_000: 2, now_ms + 2 * HOUR_MS: 1, now_ms + 48 * HOUR_MS: 1}
    near = {
        time_ms: sum(n for at, n in due["counts"] if abs(at - time_ms) <= due["interval_ms"] + 2000)
        for time_ms in expected
    }
    assert near == expected


def test_page_needs_nothing_else(store: Path, tmp_path: Path) -> None:
    page = written(store, tmp_path)

    names = {name for name, _ in page.tags}
    assert names.isdisjoint({"script", "link", "img", "iframe", "object", "image", "use", "foreignobject", "a", "base"})
    assert not any(key in ("src", "href", "xlink:href", "style") or key[:2] == "on" for _, a in page.tags for key in a)
    assert not re.search(r"url\(|@import|https?:|//", page.source)
    for svg in re.findall(r"<svg.*?</svg>", page.source):
        ElementTree.fromstring(svg)


def test_hostile_names_and_findings_are_text(tmp_path: Path) -> None:
    path = tmp_path / EVIL.replace("/", "_")
    fill(path)
    file = path / "config" / "topics.json"
    topics = json.loads(file.read_text())
    table = topics["topicConfigTable"]
    table[EVIL] = {**table["orders"], "topicName": EVIL}
    file.write_text(json.dumps(topics))
    groups = path / "config" / "consumerOffset.json"
    offsets = json.loads(groups.read_text())
    offsets["offsetTable"] = {f"orders@{EVIL}": {"0": 1}}
    groups.write_text(json.dumps(offsets))
    (path / "consumequeue" / EVIL.replace("/", "_")).mkdir()
    (path / "config" / "subscriptionGroup.json").write_text(f'"{EVIL}')
    for backup in (path / "config").glob("*.bak"):
        backup.unlink()

    page = written(path, tmp_path, exit_code=1)

    assert "<script>alert" in "".join(page.sections["Findings"])
    assert {name for name, _ in page.tags}.isdisjoint({"script", "b"})
    assert not SHOULD_NOT_REACH_A_SCREEN.search(page.source)


@pytest.mark.parametrize("words", [(), ("--verify",)])
def test_damage_is_found_and_mapped(store: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    path = tmp_path / "mq"
    shutil.copytree(store, path)
    [log] = (path / "commitlog").glob("0*0")
    with open(log, "r+b") as file:
        file.seek(200)
        file.write(b"\xff" * 20)

    page = written(path, tmp_path, *words, exit_code=1)

    assert "bad_record" in "".join(page.sections["Findings"])
    assert ("bad_record: commitlog" in "".join(page.sections["Findings"])) == bool(words)
    assert any("Not checked" in text for text in page.sections["Findings"]) != bool(words)
    assert ("rect", "damaged") in [(name, attributes.get("class")) for name, attributes in page.tags]
    assert "197 B are damaged" in page.sections["Map of the log"][0]
    assert page.sections["Traffic"][0].startswith("5 messages")


@pytest.mark.parametrize("table", ["consumerOffset.json", "topics.json"])
def test_damaged_tables_leave_the_rest_of_the_page(store: Path, tmp_path: Path, table: str) -> None:
    path = tmp_path / "mq"
    shutil.copytree(store, path)
    for file in (path / "config").glob(f"{table}*"):
        file.write_bytes(b"\x1b[2J")

    page = written(path, tmp_path, exit_code=1)

    assert page.sections["Lag by group"][0].startswith("Not shown: ")
    assert page.sections["Findings"][0].startswith(f"config/{table}: ")
    assert page.row("Sizes", "orders")[1] == "6"


def test_empty_store_has_a_page(tmp_path: Path) -> None:
    library.open(tmp_path / "mq").close()

    page = written(tmp_path / "mq", tmp_path)

    assert page.sections["Traffic"] == page.sections["Sizes"] == page.sections["Map of the log"] == ["Nothing to show."]


def test_hundreds_of_topics_are_cut_and_added_up(tmp_path: Path) -> None:
    with library.open(tmp_path / "mq", config=StoreConfig(default_queues=1)) as store:
        for number in range(60):
            for _ in range(2 if number == 59 else 1):
                store.put(f"t{number}", b"x")

    page = written(tmp_path / "mq", tmp_path)

    assert page.row("Sizes", "t59")[1] == "2"
    assert page.row("Sizes", "35 others")[1] == "35"
    assert "and 35 more topics" in page.sections["Settings"]
    assert [each.get("class") for name, each in page.tags if name == "svg"].count("bar") == 26


def test_groups_that_are_cut_have_the_sum_of_their_lag_and_the_highest_age(tmp_path: Path) -> None:
    clock = SimulatedClock(BEGIN_MS)
    with library.open(tmp_path / "mq", config=StoreConfig(clock=clock, default_queues=1)) as store:
        for number in range(30):
            consumer = store.simple_consumer(f"g{number}", {f"t{number}": "*"})
            for _ in range(2 if number < 25 else 1):
                store.put(f"t{number}", b"x")
            consumer.receive(1, wait=0)
            consumer.close()
            clock.advance(24 * HOUR_MS)
        store.broker.run_once()

    found = mqstore_json("report", tmp_path / "mq", "--html", tmp_path / "page.html")
    row = Page(tmp_path / "page.html").row("Lag by group", "5 others")

    ages = [each["oldest_age_ms"] for each in found["lag"]["groups"] if int(each["group"][1:]) >= 25]
    assert row[1] == "5"
    assert row[4] == show_ms(max(ages))


def test_page_appears_whole_or_not_at_all(store: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("old")

    mqstore("report", tmp_path / "missing", "--html", page, exit_code=3)
    assert page.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]
    assert "must not be in the store" in mqstore("report", store, "--html", store / "x.html", exit_code=2).stderr
    mqstore("report", store, "--html", page, exit_code=0)
    assert page.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 1)],
        [(BEGIN_MS, 1 << 62)],
        [(-62_135_596_800_000, 1), (253_402_300_799_999, 1)],
        [(BEGIN_MS + each * 1000, each) for each in range(100_000)],
    ],
)
def test_plots_are_bounded_and_inside_their_area(rows: list[tuple[int, int]]) -> None:
    [_, svg] = ElementTree.fromstring(plots.columns(rows, "x"))
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    assert len(svg) < 100
    for rect in svg.iter("rect"):
        x, y, wide, high = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        assert min(x, y, wide, high) >= 0
        assert x + wide <= width
        assert y + high <= height


@pytest.mark.parametrize("segments", [1, 39, 41, 23_000, 1 << 40])
def test_map_of_any_log_is_bounded(segments: int) -> None:
    cell = plots.cell_bytes(segments, 1 << 26)

    cells = -(-(segments << 26) // cell)
    assert cells <= 40 * plots.CELLS
    kinds: Any = [("live", None, "dead")[number % 3] for number in range(cells)]
    assert len(plots.strip(0, cell, kinds)) < 1_500_000
