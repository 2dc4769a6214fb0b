"""Subscriptions by tag, as the table of delivery#tags has them, and by SQL92 (the language: test_sql92.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mqstore
from mqstore.errors import FilterError, ResultCode

Parse = Callable[..., Any]
"""Broker.filter: None means that all passes."""


@pytest.fixture(scope="module")
def parse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parse]:
    with mqstore.open(tmp_path_factory.mktemp("filters")) as store:
        yield store.broker.filter


# -- tags --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expression", [None, "", "*"])
def test_nothing_and_the_star_alone_pass_everything(parse: Parse, expression: str | None) -> None:
    assert parse(expression) is None


@pytest.mark.parametrize(
    ("expression", "tags"),
    [
        ("TagA || TagB", {"TagA", "TagB"}),
        ("TagA||TagB", {"TagA", "TagB"}),
        ("TagA||", {"TagA"}),
        ("||TagA", {"TagA"}),
        ("||||TagA", {"TagA"}),
        ("TagA || TagA", {"TagA"}),
        (" || ", set()),
        ("|| ", set()),
        (" ", set()),
        ("\t\n", set()),
        ("a | b", {"a | b"}),
        ("|", {"|"}),
        ("|||", {"|"}),
        ("* || TagA", {"*", "TagA"}),
        ("*||*", {"*"}),
        (" * ", {"*"}),
        # String.trim takes what is below U+0021 and nothing else.
        ("\x00TagA\x1f", {"TagA"}),
        ("\u00a0TagA\u3000", {"\u00a0TagA\u3000"}),
        ("\u8ba2\u5355", {"\u8ba2\u5355"}),
    ],
)
def test_tag_expressions(parse: Parse, expression: str, tags: set[str]) -> None:
    found = parse(expression)

    assert found.tags == tags
    assert (found.kind, found.expression) == ("TAG", expression)


@pytest.mark.parametrize(
    ("expression", "kind", "position", "says"),
    [
        *((bars, "TAG", 0, "a bar without a tag") for bars in ("||", "||||")),
        *((blank, "SQL92", len(blank or ""), ".") for blank in (None, "", " ")),
        ("*", "SQL92", 0, "."),
        ("a > ", "SQL92", 4, "."),
        *(("a", kind, 0, "use 'TAG' or 'SQL92'") for kind in ("SQL", "tag", "")),
        (3, "TAG", 0, "not int"),
    ],
)
def test_invalid_filter_is_refused(parse: Parse, expression: Any, kind: str, position: int, says: str) -> None:
    with pytest.raises(FilterError, match=says) as caught:
        parse(expression, kind)
    assert (caught.value.position, caught.value.code) == (position, ResultCode.SUBSCRIPTION_PARSE_FAILED)


# `Aa` and `BB` share their hash; the last one's is the smallest of all.
HASHES = {
    "TagA": 2598919,
    "TagB": 2598920,
    "\u8ba2\u5355": 1129459,
    "Aa": 2112,
    "BB": 2112,
    "polygenelubricants": -(1 << 31),
}


@pytest.mark.parametrize(("tag", "code"), HASHES.items())
def test_units_are_judged_by_the_low_32_bits_of_their_code(parse: Parse, tag: str, code: int) -> None:
    same = [code, code + (1 << 32), code - (5 << 32)]
    others = [code ^ 1, code ^ 0x4000_0000, (code ^ 1) + (1 << 32), 0, -1, (1 << 63) - 1]
    found = parse(f"another || {tag}")

    assert found.prefilter(np.array(same + others, np.int64)).tolist() == [True] * len(same) + [False] * len(others)
    assert not parse("  ").prefilter(np.array([0, 2112], np.int64)).any()


def test_a_message_is_judged_by_its_tag_not_by_the_hash(parse: Parse) -> None:
    found = parse("Aa")

    assert found.prefilter(np.array([HASHES["BB"]], np.int64)).all()
    assert found.matches({"TAGS": "Aa"})
    assert not found.matches({"TAGS": "BB"})
    assert not found.matches({"TAGS": "aa"})
    assert not found.matches({"TAGS": "Aa || BB"})
    assert not found.matches({})


@given(st.text(alphabet="ab|* \u8ba2\x00", max_size=12))
def test_any_text_is_a_tag_filter_or_a_filter_error(parse: Parse, text: str) -> None:
    try:
        found = parse(text)
    except FilterError:
        assert set(text) == {"|"}
        return
    for tag in text.split("||"):
        assert found is None or found.matches({"TAGS": tag.strip()}) is (tag.strip("\x00 ") == tag.strip() != "")


# -- SQL92 -------------------------------------------------------------------------------------------------------------


def test_sql_filters_judge_properties_and_let_every_unit_pass(parse: Parse) -> None:
    found = parse("a > 3 AND TAGS = 'x'", "SQL92")

    assert (found.kind, found.expression) == ("SQL92", "a > 3 AND TAGS = 'x'")
    assert found.matches({"a": "4", "TAGS": "x"})
    assert not found.matches({"a": "4", "TAGS": "y"})
    assert not found.matches({"TAGS": "x"})  # NULL
    assert not found.matches({"a": "x", "TAGS": "x"})  # an error
    assert found.prefilter(np.zeros(3, np.int64)).tolist() == [True] * 3
    assert found.prefilter(np.zeros(0, np.int64)).tolist() == []


def test_many_threads_may_parse_at_once(parse: Parse) -> None:
    def use(i: int) -> bool:
        return parse(f"a = {i % 150}", "SQL92").matches({"a": str(i % 150)}) and parse(f"t{i % 150}").matches(
            {"TAGS": f"t{i % 150}"}
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(use, range(3_000)))
