"""Importing without Spark: rows of files as messages, refused rows beside, each once."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mqstore import MessageStore
from mqstore.errors import ConfigError, InvalidMessageError
from mqstore.jobs.export import export_parquet
from mqstore.spark import publish
from mqstore.spark.jobs import importing
from mqstore.spark.jobs.importing import import_plan, import_rows
from tests.spark.copies import joined, killed_once_recorded, members, messages, tree
from tests.spark.support import many, write_store

ROWS = [
    {"id": i, "payload": f"body {i}", "tag": "ab"[i % 2], "who": f"w{i % 3}", "at": 1_700_000_000_000 + i}
    for i in range(50)
]
MAPPING = {"body": "payload", "tags": "tag", "keys": "id", "born_timestamp": "at", "properties.who": "who"}


def write(folder: Path, kind: str, rows: list[dict[str, Any]] = ROWS, name: str = "f") -> Path:
    path = folder / f"{name}.{kind}"
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    elif kind == "json":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        names = [*rows[0]]
        lines = [",".join("" if row[name] is None else str(row[name]) for name in names) for row in rows]
        path.write_text("\n".join([",".join(names), *lines]) + "\n")
    return path


def stored(path: Path, topic: str = "t") -> list[Any]:
    """All messages of a topic in the order of the log."""
    with MessageStore(path, "r") as store:
        assert [*store.verify()] == []
        found = [message for ref in store.queues(topic) for message in store.iter(*ref)]
        return [
            (m.body, m.tag, tuple(m.keys), m.born_timestamp_ms, m.stored_properties().get("who"))
            for m in sorted(found, key=lambda m: m.physical_offset)
        ]


EXPECTED = [(r["payload"].encode(), r["tag"], (str(r["id"]),), r["at"], r["who"]) for r in ROWS]  # type: ignore[attr-defined]


# -- formats -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["parquet", "json", "csv"])
def test_every_row_becomes_a_message_in_the_order_of_the_file(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind)

    done = import_rows(None, path, tmp_path / "t", format=kind, mapping=MAPPING, topic="t", queues=3)  # type: ignore[arg-type]

    assert stored(tmp_path / "t") == EXPECTED
    assert (done.read, done.messages, done.refused, done.topics) == (50, 50, 0, {"t": 50})
    with MessageStore(tmp_path / "t", "r") as store:
        keys = [m.unique_key for ref in store.queues("t") for m in store.iter(*ref)]
        assert len(store.queues("t")) == 3
        assert len(set(keys)) == 50


def test_a_large_file_is_cut_at_row_groups_and_files_follow_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "_TASK_BYTES", 1000)
    write(tmp_path / "in" / "b", "parquet", ROWS[30:])
    write(tmp_path / "in" / "a", "parquet", ROWS[:30])
    write(tmp_path / "in", "parquet", ROWS, "_hidden")

    plan = import_plan(tmp_path / "in", tmp_path / "t", mapping=MAPPING, topic="t")
    import_rows(None, tmp_path / "in", tmp_path / "t", mapping=MAPPING, topic="t")

    assert (plan.files, plan.rows) == (2, 50)
    assert plan.tasks > 2
    assert stored(tmp_path / "t") == EXPECTED


def test_what_was_exported_is_imported_as_it_was(tmp_path: Path) -> None:
    source = write_store(tmp_path / "s", many(40))
    export_parquet(source, tmp_path / "lake", topics=["t", "orders"])

    import_rows(None, tmp_path / "lake", tmp_path / "t", validate=False, queues=2)

    def plain(path: Path) -> dict[Any, Any]:
        """Rows that had no unique key got one."""
        return {
            key: sorted(
                (c.body, sorted(each for each in c.properties if each[0] != "UNIQ_KEY"), c.born_ms) for c in copies
            )
            for key, copies in messages(path).items()
            if key[0] != "seed"
        }

    assert plain(tmp_path / "t") == plain(source)


def test_a_column_says_the_topic_and_arrays_and_maps_are_taken(tmp_path: Path) -> None:
    table = pa.table(
        {
            "body": pa.array([b"\xff\x00", b""], pa.binary()),
            "topic": ["a", "b"],
            "keys": pa.array([["k1", "k2"], []], pa.list_(pa.string())),
            "properties": pa.array([[("x", "1"), ("y", None)], []], pa.map_(pa.string(), pa.string())),
            "queue_id": pa.array([1, None], pa.int64()),
            "born_timestamp": pa.array([datetime(2024, 1, 1), datetime(2024, 1, 2)], pa.timestamp("ns")),
            "other": [1, 2],
        }
    )
    pq.write_table(table, tmp_path / "f.parquet")

    done = import_rows(None, tmp_path / "f.parquet", tmp_path / "t", queues=2)

    assert done.topics == {"a": 1, "b": 1}
    with MessageStore(tmp_path / "t", "r") as store:
        [first] = [m for ref in store.queues("a") for m in store.iter(*ref)]
        assert (first.body, tuple(first.keys), first.queue_id) == (b"\xff\x00", ("k1", "k2"), 1)
        assert first.stored_properties()["x"] == "1"
        assert "y" not in first.stored_properties()
        assert first.born_timestamp_ms == int(datetime(2024, 1, 1, tzinfo=UTC).timestamp() * 1000)


def test_csv_knows_empty_text_from_nothing(tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text('body,tags,q\n"",a,1\nx,,0\n1.50,"b",\n')

    import_rows(
        None, tmp_path / "f.csv", tmp_path / "t", format="csv", topic="t",
        mapping={"body": "body", "tags": "tags", "queue_id": "q"}, queues=2,
    )  # fmt: skip

    assert [(row[0], row[1]) for row in stored(tmp_path / "t")] == [(b"", "a"), (b"x", None), (b"1.50", "b")]


@pytest.mark.parametrize("texts", [["2024-01-01T00:00:00", "2024-01-01T01:00:00+01:00", "1704067200000"]])
def test_times_are_read_from_text_with_a_zone_without_and_from_numbers(tmp_path: Path, texts: list[str]) -> None:
    write(tmp_path, "csv", [{"body": "x", "at": text} for text in texts])

    import_rows(
        None,
        tmp_path / "f.csv",
        tmp_path / "t",
        format="csv",
        topic="t",
        mapping={"body": "body", "born_timestamp": "at"},
    )

    assert [row[3] for row in stored(tmp_path / "t")] == [1_704_067_200_000] * 3


@pytest.mark.parametrize("order", [None, "n"])
@pytest.mark.parametrize("mapped", [True, False])
def test_columns_of_json_may_begin_anywhere_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mapped: bool, order: str | None
) -> None:
    """Arrow takes names and types from the beginning of a file: of 60 000 rows the last one alone had keys and tags,
    and was stored without."""
    monkeypatch.setattr(importing, "_JSON_BYTES", 100_000)
    rows: list[dict[str, Any]] = [{"body": f"{i}", "n": i, "pad": "x" * 4096} for i in range(500)]
    rows += [{"body": "late", "keys": "k", "tags": "a", "n": 500.5, "properties": None}]
    path = write(tmp_path / "region=eu", "json", rows)
    mapping = {"body": "body", "keys": "keys", "tags": "tags"} | ({"properties.who": "region"} if mapped else {})

    done = import_rows(
        None, tmp_path, tmp_path / "t", format="json", mapping=mapping if mapped else None, topic="t", order=order,
        queues=1,
    )  # fmt: skip

    found = stored(tmp_path / "t")
    assert [row[0] for row in found] == [row["body"].encode() for row in rows]
    assert found[-1][1:3] == ("a", ("k",))
    assert {row[4] for row in found} == {"eu" if mapped else None}
    assert done.refused == 0
    assert path.exists()


@pytest.mark.parametrize("rest", ["2024-01-01 00:00:00", "hello"])
def test_text_of_json_that_looks_like_a_time_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rest: str
) -> None:
    """It was stored as '2024-05-01 10:00:00', or, where another text followed, not at all."""
    monkeypatch.setattr(importing, "_JSON_BYTES", 4096)
    texts = ["2024-05-01T10:00:00Z", *["2024-01-01"] * 200, rest]
    keys = [["2024-05-01", "2024-05-02"]] * 201
    rows = [
        {"text": text, "k": key, "at": "2024-05-01T10:00:00Z"} for text, key in zip(texts, [*keys, None], strict=True)
    ]
    mapping = {"body": "text", "keys": "k", "born_timestamp": "at", "properties.who": "at"}

    import_rows(
        None, write(tmp_path, "json", rows), tmp_path / "t", format="json", mapping=mapping, topic="t", queues=1
    )

    found = stored(tmp_path / "t")
    assert [row[0].decode() for row in found] == texts
    assert found[0][2:] == (("2024-05-01", "2024-05-02"), 1_714_557_600_000, "2024-05-01T10:00:00Z")


def test_lines_of_json_may_be_long_empty_or_without_any_column_that_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.json").write_text('{"body": "%s"}\n\n{}\n' % ("x" * 3_000_000))
    (tmp_path / "in" / "2.json").write_text('{"other": 1}\n{}\n')
    (tmp_path / "in" / "3.json").write_text("{}\n")

    done = import_rows(
        None, tmp_path / "in", tmp_path / "t", format="json", topic="t", mapping={"body": "body"},
        refused=tmp_path / "no",
    )  # fmt: skip

    assert (done.read, done.messages, done.reasons) == (5, 1, {"column 'body': null": 4})


def test_a_column_of_json_that_changes_its_kind_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "_JSON_BYTES", 64)
    path = write(tmp_path, "json", [*({"body": f"{i}", "n": i} for i in range(9)), {"body": "x", "n": "text"}])

    with pytest.raises(ConfigError, match=r"f\.json cannot be read as json: .*Field n has incompatible types"):
        import_rows(None, path, tmp_path / "t", format="json", topic="t", mapping={"body": "body", "keys": "n"})
    assert not (tmp_path / "t").exists()


def test_a_first_file_of_json_without_rows_is_told_and_a_later_one_is_none_that_matters(tmp_path: Path) -> None:
    write(tmp_path, "json", [], "empty")
    write(tmp_path, "json", [{"body": "1"}], "full")
    how: Any = {"format": "json", "topic": "t"}

    with pytest.raises(ConfigError, match=r"empty\.json has no rows"):
        import_rows(None, [tmp_path / "empty.json", tmp_path / "full.json"], tmp_path / "t", **how)

    assert import_rows(None, [tmp_path / "full.json", tmp_path / "empty.json"], tmp_path / "t", **how).messages == 1


def test_a_column_of_json_that_nobody_wants_may_change_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "_JSON_BYTES", 64)
    rows = [{"body": f"{i}", "n": i if i % 3 else "text"} for i in range(50)]

    import_rows(None, write(tmp_path, "json", rows), tmp_path / "t", format="json", topic="t", queues=1)

    assert [row[0] for row in stored(tmp_path / "t")] == [b"%d" % i for i in range(50)]


def test_folders_of_json_are_columns(tmp_path: Path) -> None:
    for number, folder in enumerate(("10", "9", "__HIVE_DEFAULT_PARTITION__", "a%2Fb")):
        write(tmp_path / "in" / f"{number}" / f"q={folder}", "json", [{"body": folder}])
    done = import_rows(
        None, tmp_path / "in", tmp_path / "t", format="json", topic="t", queues=20,
        mapping={"body": "body", "queue_id": "q"}, refused=tmp_path / "no",
    )  # fmt: skip

    queues = {copy.body: queue for (_, queue), copies in messages(tmp_path / "t").items() for copy in copies}
    assert (queues[b"10"], queues[b"9"], len(queues)) == (10, 9, 3)
    [[reason, count]] = done.reasons.items()
    assert ("'a/b'" in reason, count, done.messages) == (True, 1, 3)


@pytest.mark.parametrize("format_", ["parquet", "csv", "json"])
def test_names_of_folders_that_look_like_numbers_stay_as_they_are(tmp_path: Path, format_: str) -> None:
    """Topic 007 of an export came back as 7, and 0x10 as 16."""
    names = ["007", "0x10", "42", "1e5", "nan", "00", "0", "2024-01-01", "99999999999999999999"]
    for name in names:
        write(tmp_path / "in" / f"topic={name}", format_, [{"body": name}])
    for number, order in enumerate(((), ("body",), ("topic",))):
        dest = tmp_path / f"to-{number}"
        mapping = {"body": "body", "topic": "topic"}
        import_rows(None, tmp_path / "in", dest, format=format_, mapping=mapping, order=order)
        found = {topic: copy.body.decode() for (topic, _), copies in messages(dest).items() for copy in copies}
        assert found == {name: name for name in names}, order


def test_files_whose_columns_differ_in_kind_cannot_be_sorted_together(tmp_path: Path) -> None:
    write(tmp_path / "in", "json", [{"body": "1", "n": 1}], "1")
    write(tmp_path / "in", "json", [{"body": "2", "n": "x"}], "2")

    with pytest.raises(ConfigError, match=r"in cannot be read as json: .*incompatible types"):
        import_rows(None, tmp_path / "in", tmp_path / "t", format="json", topic="t", order="n")


def test_rows_are_sorted_if_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path, "parquet")

    import_rows(None, path, tmp_path / "t", mapping=MAPPING, topic="t", order=["tag", "id desc"], queues=1)

    by = sorted(range(50), key=lambda i: (ROWS[i]["tag"], -ROWS[i]["id"]))  # type: ignore[operator]
    assert stored(tmp_path / "t") == [EXPECTED[i] for i in by]
    assert not (tmp_path / "t" / "_staging").exists()


# -- refused -----------------------------------------------------------------------------------------------------------

BAD: list[dict[str, Any]] = [
    {"body": "fine", "tag": "a", "q": 0},
    {"body": None, "tag": "a", "q": 0},
    {"body": "x", "tag": "a|b", "q": 0},
    {"body": "x", "tag": " ", "q": 1},
    {"body": "x", "tag": "a", "q": 7},
    {"body": "x", "tag": "a", "q": 1 << 40},
    {"body": "last", "tag": None, "q": 1},
]
BAD_MAPPING = {"body": "body", "tags": "tag", "queue_id": "q"}


def test_refused_rows_go_beside_with_their_reasons_and_all_others_are_in(tmp_path: Path) -> None:
    path = write(tmp_path, "json", BAD)

    done = import_rows(
        None, path, tmp_path / "t", format="json", mapping=BAD_MAPPING, topic="t", queues=2, refused=tmp_path / "no"
    )

    assert [row[0] for row in stored(tmp_path / "t")] == [b"fine", b"last"]
    assert (done.read, done.messages, done.refused) == (7, 2, 5)
    [file] = done.refused_files
    rows = pq.read_table(file).to_pylist()
    assert sorted(row["_row"] for row in rows) == [1, 2, 3, 4, 5]
    reasons = {row["_row"]: row["_reason"] for row in rows}
    assert reasons[1] == "column 'body': null"
    assert "a tag is a text without '|'" in reasons[2]
    assert "0 to 1" in reasons[4]
    assert "queue_id" in reasons[5]
    assert {row["_file"] for row in rows} == {str(path)}
    assert {row["_row"]: row["tag"] for row in rows}[2] == "a|b"
    assert [each.name for each in (tmp_path / "no").iterdir()] == [Path(file).name]


def test_without_a_place_for_them_the_first_refused_row_ends_it_and_leaves_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, "json", BAD)

    with pytest.raises(InvalidMessageError, match=r"f\.json, row 1: column 'body': null; refused=DIR"):
        import_rows(None, path, tmp_path / "t", format="json", mapping=BAD_MAPPING, topic="t")

    assert tree(tmp_path / "t") == {}


def test_a_remedy_is_called_as_an_import_calls_it(tmp_path: Path) -> None:
    """The command was told of an option of Spark's sink, which it does not have."""
    export_parquet(write_store(tmp_path / "s", many(8)), tmp_path / "out", topics="t")
    with pytest.raises(InvalidMessageError, match=r"or validate=False \(--no-validate\); refused=DIR"):
        import_rows(None, tmp_path / "out", tmp_path / "t")


def test_refused_rows_are_known_by_their_number_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "_TASK_BYTES", 500)
    monkeypatch.setattr(importing, "_ROWS", 3)
    rows = [{"body": None if i % 10 == 4 else str(i)} for i in range(50)]
    path = write(tmp_path, "parquet", rows)
    assert import_plan(path, tmp_path / "t", topic="t").tasks > 1

    import_rows(None, path, tmp_path / "t", topic="t", refused=tmp_path / "no")

    assert sorted(row["_row"] for row in pq.read_table(tmp_path / "no").to_pylist()) == [4, 14, 24, 34, 44]


def test_refused_rows_of_a_run_that_failed_do_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "in", "json", [{"body": "1"}, {"body": None}], "1")
    write(tmp_path / "in", "json", [{"body": "2"}, {"body": None}], "2")
    how: Any = {"format": "json", "topic": "t", "refused": tmp_path / "no"}
    with monkeypatch.context() as patch:
        patch.setattr(publish, "commit", lambda *args, **given: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(OSError, match="killed"):
            import_rows(None, tmp_path / "in", tmp_path / "t", **how)
    write(tmp_path / "in", "json", [{"body": "2"}, {"body": "3"}], "2")

    done = import_rows(None, tmp_path / "in", tmp_path / "t", **how)

    assert (done.messages, done.refused) == (3, 1)
    assert [str(each) for each in (tmp_path / "no").iterdir()] == [*done.refused_files]


def test_a_file_of_refused_rows_alone_makes_no_store(tmp_path: Path) -> None:
    path = write(tmp_path, "json", [{"body": None}, {"body": None}])

    done = import_rows(None, path, tmp_path / "t", format="json", topic="t", refused=tmp_path / "no")

    assert (done.messages, done.refused) == (0, 2)
    assert not (tmp_path / "t").exists()


def test_topics_that_rows_may_not_go_to_are_refused_row_by_row(tmp_path: Path) -> None:
    names = ["a", "%DLQ%g", "no blanks", "a"]
    pq.write_table(pa.table({"body": ["1", "2", "3", "4"], "topic": names}), tmp_path / "f.parquet")

    done = import_rows(None, tmp_path / "f.parquet", tmp_path / "t", refused=tmp_path / "no")

    assert (done.topics, done.refused) == ({"a": 2}, 2)


# -- once --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("target", ["store", "set"])
def test_a_crash_around_the_commit_and_a_second_run_give_each_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, target: str
) -> None:
    path = write(tmp_path / "in", "json", [*BAD, *({"body": f"{i}", "tag": "a", "q": 0} for i in range(20))])
    how: Any = {"format": "json", "mapping": BAD_MAPPING, "topic": "t", "target": target, "refused": tmp_path / "no"}
    real = publish.commit

    def crashing(*args: Any, **given: Any) -> Any:
        if moment == "after":
            real(*args, **given)
        raise OSError("killed")

    monkeypatch.setattr(publish, "commit", crashing)
    with pytest.raises(OSError, match="killed"):
        import_rows(None, path, tmp_path / "t", **how)
    monkeypatch.setattr(publish, "commit", real)

    again = import_rows(None, path, tmp_path / "t", **how)

    assert again.already == (moment == "after")
    found = joined(members(tmp_path / "t")) if target == "set" else messages(tmp_path / "t")
    bodies = sorted(copy.body for copies in found.values() for copy in copies)
    assert bodies == sorted([b"fine", b"last", b"x", *(b"%d" % i for i in range(20))])
    assert len([*(tmp_path / "no").iterdir()]) == 1
    assert pq.read_table(next((tmp_path / "no").iterdir())).num_rows == 4


def test_an_import_that_fails_takes_nothing_from_the_same_one_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both staged in one folder: the one that gave up first deleted messages and refused rows of the other, which
    failed for it."""
    path = write(tmp_path / "in", "json", [*BAD, *({"body": f"{i}", "tag": "a", "q": 0} for i in range(20))])
    how: Any = {"format": "json", "mapping": BAD_MAPPING, "topic": "t", "refused": tmp_path / "no"}
    real = importing._place_refused

    def beside(*args: Any) -> Any:
        monkeypatch.setattr(importing, "_place_refused", lambda *args: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            import_rows(None, path, tmp_path / "t", **how)
        return real(*args)

    monkeypatch.setattr(importing, "_place_refused", beside)
    done = import_rows(None, path, tmp_path / "t", **how)

    assert (done.messages, done.refused, len(stored(tmp_path / "t"))) == (23, 4, 23)
    assert [pq.read_table(each).num_rows for each in (tmp_path / "no").iterdir()] == [4]
    assert not (tmp_path / "t" / "_staging").exists()


def test_rows_that_were_recorded_when_the_run_was_killed_are_seen_once_the_next_says_already(tmp_path: Path) -> None:
    path = write(tmp_path, "parquet")
    with killed_once_recorded(tmp_path / "t"):
        import_rows(None, path, tmp_path / "t", mapping=MAPPING, topic="t")

    assert import_rows(None, path, tmp_path / "t", mapping=MAPPING, topic="t").already
    assert stored(tmp_path / "t") == EXPECTED


def test_the_same_import_once_more_writes_nothing_and_another_id_does(tmp_path: Path) -> None:
    path = write(tmp_path, "parquet")
    import_rows(None, path, tmp_path / "t", mapping=MAPPING, topic="t")

    assert import_rows(None, path, tmp_path / "t", mapping=MAPPING, topic="t").already
    assert not import_rows(None, path, tmp_path / "t", mapping=MAPPING, topic="t", id="second").already

    assert len(stored(tmp_path / "t")) == 100


# -- wrong use ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"format": "xml"}, "format='xml'"),
        ({"format": "delta"}, "format=delta needs Spark"),
        ({"mapping": {"body": "concat(payload, tag)"}}, "names no column; there are id, payload.*needs Spark"),
        ({"mapping": {"tags": "tag"}}, "say what the body is"),
        ({"mapping": {"body": "payload", "colour": "tag"}}, "no 'colour'; there are body"),
        ({"mapping": {"body": "payload", "properties.": "tag"}}, "no 'properties.'"),
        ({"mapping": {**MAPPING, "properties": "tag"}}, "not both"),
        ({"topic": None}, "no topic"),
        ({"order": "nothing"}, "order: nothing is no column"),
        ({"id": "a b"}, "import id 'a b'"),
        ({"target": "heap"}, "heap"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_written(tmp_path: Path, given: dict[str, Any], says: str) -> None:
    path = write(tmp_path, "parquet")
    how = {"mapping": MAPPING, "topic": "t", **given}
    before = tree(tmp_path)

    with pytest.raises(ConfigError, match=says):
        import_rows(None, path, tmp_path / "t", **how)

    assert tree(tmp_path) == before


def test_files_that_are_not_there_or_are_something_else_are_told(tmp_path: Path) -> None:
    (tmp_path / "f.parquet").write_bytes(b"no parquet at all")

    with pytest.raises(ConfigError, match="no file in"):
        import_rows(None, tmp_path / "absent", tmp_path / "t", topic="t")
    with pytest.raises(ConfigError, match="cannot be read as parquet"):
        import_rows(None, tmp_path / "f.parquet", tmp_path / "t", topic="t")


@pytest.mark.parametrize("text", ["text\nx,y\n", "", "text\nx\n" + "y,z\n"])
def test_csv_whose_rows_do_not_fit_is_told(tmp_path: Path, text: str) -> None:
    path = tmp_path / "f.csv"
    path.write_text(text)

    for mapping in ({"body": "text"}, None):
        with pytest.raises(ConfigError, match=r"f\.csv cannot be read as csv"):
            import_rows(None, path, tmp_path / "t", format="csv", topic="t", mapping=mapping)
    assert not (tmp_path / "t").exists()


def test_a_file_may_lack_columns_that_the_first_one_has(tmp_path: Path) -> None:
    write(tmp_path / "in", "json", [{"body": "1", "tag": "a"}], "1")
    write(tmp_path / "in", "json", [{"body": "2"}, {"tag": "b"}], "2")

    done = import_rows(
        None, tmp_path / "in", tmp_path / "t", format="json", mapping={"body": "body", "tags": "tag"}, topic="t",
        refused=tmp_path / "no",
    )  # fmt: skip

    assert [(row[0], row[1]) for row in stored(tmp_path / "t")] == [(b"1", "a"), (b"2", None)]
    assert done.reasons == {"column 'body': null": 1}


def test_a_file_that_is_damaged_further_on_ends_it_and_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path / "in", "json", [{"body": "1"}], "1")
    (tmp_path / "in" / "2.json").write_text('{"body": "2"}\n{"body": ' + "\n")

    with pytest.raises(ConfigError, match=r"2\.json cannot be read as json"):
        import_rows(None, tmp_path / "in", tmp_path / "t", format="json", topic="t")

    assert not (tmp_path / "t").exists()


def test_a_column_of_another_kind_says_how_spark_could_take_it(tmp_path: Path) -> None:
    path = write(tmp_path, "json", [{"body": {"a": 1}}])

    with pytest.raises(ConfigError, match="to_json"):
        import_rows(None, path, tmp_path / "t", format="json", topic="t", refused=tmp_path / "no")
    assert not (tmp_path / "t").exists()


def test_a_plan_writes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, "csv")
    before = tree(tmp_path)

    plan = import_plan(path, tmp_path / "t", format="csv", mapping=MAPPING, topic="t")

    assert (plan.files, plan.rows, plan.tasks, plan.bytes) == (1, None, 1, path.stat().st_size)
    assert tree(tmp_path) == before
