"""Columns: what `read` gives message by message, as arrays."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mqstore import Binary, ConfigError, FormatError, OffsetOutOfRangeError, OutgoingMessage, TopicNotFoundError
from mqstore.log.columns import NAMES
from mqstore.log.message import row_of
from tests.conftest import GOLDEN_NAMES, GoldenStore
from tests.log.support import flip, open_store

INT32 = {"queue_id", "size", "flag", "sys_flag", "reconsume_times"}
INT64 = {
    *("queue_offset", "physical_offset", "born_timestamp_ms", "store_timestamp_ms", "prepared_transaction_offset"),
    "tags_code",
}


def plain(name: str, column: Any) -> list[Any]:
    """A column as Python values, bytes for texts."""
    return column if name == "properties" else column.tolist()


def expected(name: str, row: dict[str, Any]) -> Any:
    value = row[name]
    return value.encode() if isinstance(value, str) and name != "properties" else value


def rows_of(store: Any, topic: str, queue_id: int) -> list[dict[str, Any]]:
    return [row_of(m) | {"tags_code": m.tags_code} for m in store.iter(topic, queue_id)]


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_columns_are_the_fields_of_the_messages(golden: Callable[[str], GoldenStore], name: str) -> None:
    """Java's mixtures: both versions, both host families, compressed bodies, odd properties."""
    java = golden(name)
    with open_store(java.path, "r") as store:
        for topic in store.topics():
            for ref in store.queues(topic):
                low, high = store.offsets(*ref)
                columns = store.read_columns(*ref, low, 1 << 20)
                rows = rows_of(store, *ref)
                assert (columns.count, columns.next_offset) == (len(rows), high)
                for column in NAMES:
                    assert plain(column, columns[column]) == [expected(column, row) for row in rows], column


@pytest.mark.parametrize("count", [0, 1, 30])
def test_the_kinds_of_columns_do_not_depend_on_what_is_in_them(tmp_path: Path, count: int) -> None:
    """Of no message they once were all of one kind, and nothing that wanted bytes could use them."""
    with open_store(tmp_path / "s") as store:
        store.put("t", b"")
        store.put_many("t", [OutgoingMessage(b"x" * i, tag="T" if i % 2 else None) for i in range(count)])
        columns = store.read_columns("t", 0, 1)
        assert (list(columns), columns.count, columns.next_offset) == (list(NAMES), count, 1 + count)
        for name, column in columns.items():
            assert len(column) == count
            if name in INT32 or name in INT64:
                assert isinstance(column, np.ndarray)
                assert column.dtype == (np.int32 if name in INT32 else np.int64), name
            elif name != "properties":
                assert isinstance(column, Binary)
                assert (column.offsets.dtype, column.data.dtype) == (np.int64, np.uint8)
                assert len(column.offsets) == count + 1
                assert (column.offsets[0], column.offsets[-1]) == (0, len(column.data))


@pytest.mark.parametrize("step", [1, 3, 7, 8, 100])
def test_next_offset_leads_through_a_queue(tmp_path: Path, step: int) -> None:
    with open_store(tmp_path / "s") as store:
        store.put_many("t", [b"%d" % i * 20 for i in range(60)])
        offset, bodies = 0, []
        while (columns := store.read_columns("t", 0, offset, step, ["body", "queue_offset"])).count:
            assert columns["queue_offset"].tolist() == list(range(offset, min(60, offset + step)))
            bodies += columns["body"].tolist()
            offset = columns.next_offset
        assert bodies == [b"%d" % i * 20 for i in range(60)]


def test_one_column_costs_one_column(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        store.append("t", 0, b"no zlib at all", sys_flag=1)
        assert list(store.read_columns("t", columns=["flag", "topic"])) == ["flag", "topic"]
        with pytest.raises(FormatError):
            store.read_columns("t", columns=["body"])


def test_bodies_are_inflated(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        store.put("t", b"plain")
        store.append("t", 0, zlib.compress(b"packed" * 99), sys_flag=0x301)
        store.put("t", b"")
        assert store.read_columns("t")["body"].tolist() == [b"plain", b"packed" * 99, b""]
        assert [m.body for m in store.read("t")] == [b"plain", b"packed" * 99, b""]


def test_null_is_not_empty(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        store.put("t", b"x", tag="T")
        store.put("t", b"x", keys=["a", "b"], unique_key="u", properties={"n": "v"})
        columns = store.read_columns("t")
        assert columns["tags"].tolist() == [b"T", None]
        assert columns["keys"].tolist() == [None, b"a b"]
        assert columns["unique_key"].tolist() == [None, b"u"]
        assert columns["properties"] == [{"TAGS": "T"}, {"n": "v", "KEYS": "a b", "UNIQ_KEY": "u"}]


def test_columns_pass_over_what_read_passes_over(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        receipts = [store.put("t", bytes([i]) * 40) for i in range(60)]
    for slot in (0, 13, 14, 58):
        segment, at = divmod(receipts[slot].physical_offset, 4096)
        flip(tmp_path / "s" / "commitlog" / f"{segment * 4096:020d}", at + 90)
    with open_store(tmp_path / "s") as store:
        columns = store.read_columns("t")
        assert columns["queue_offset"].tolist() == [i for i in range(60) if i not in (0, 13, 14, 58)]
        assert columns["physical_offset"].tolist() == [m.physical_offset for m in store.iter("t", 0)]
        assert columns.next_offset == 60


@pytest.mark.parametrize("odd", [None, "compressed", "host", "size"])
def test_bodies_that_were_copied_with_the_check_are_those_of_the_messages(tmp_path: Path, odd: str | None) -> None:
    """Over several segments, with one among them that cannot simply be copied; or a unit whose size says gigabytes."""
    bodies = [bytes([i]) * (i * 37 % 300) for i in range(70)]
    with open_store(tmp_path / "s") as store:
        for i, body in enumerate(bodies):
            if i == 40 and odd == "compressed":
                store.append("t", 0, zlib.compress(body), sys_flag=1)
            elif i == 40 and odd == "host":
                store.append("t", 0, body, born_host="[::1]:80")
            else:
                store.put("t", body)
    wanted = list(range(70))
    if odd == "size":
        file = tmp_path / "s" / "consumequeue" / "t" / "0" / f"{40 // 8 * 160:020d}"
        data = bytearray(file.read_bytes())
        data[8:12] = (0x7FFF_0000).to_bytes(4, "big")
        file.write_bytes(data)
        wanted.remove(40)
    with open_store(tmp_path / "s", mode="r") as store:
        columns = store.read_columns("t", columns=("body", "queue_offset"))
    assert columns["queue_offset"].tolist() == wanted
    assert columns["body"].tolist() == [bodies[i] for i in wanted]


def test_errors_are_those_of_read(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        store.put("t", b"x")
        with pytest.raises(ConfigError, match="'bodies'"):
            store.read_columns("t", columns=["body", "bodies"])
        with pytest.raises(ConfigError, match="'bodies'"):
            store.read_columns("t", 0, 1, columns=["bodies"])
        with pytest.raises(TopicNotFoundError):
            store.read_columns("u")
        for offset in (-1, 2):
            with pytest.raises(OffsetOutOfRangeError) as caught:
                store.read_columns("t", 0, offset)
            assert (caught.value.min_offset, caught.value.max_offset) == (0, 1)


def test_columns_outlive_the_store(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        store.put_many("t", [b"same size"] * 20)
        columns = store.read_columns("t")
    assert columns["body"].tolist() == [b"same size"] * 20
    assert columns["store_timestamp_ms"].tolist() == [1_700_000_000_000] * 20
