"""Options: names, values, and what people are told who get them wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mqstore.errors import ConfigError
from mqstore.jobs.options.options import ANY, SINK_OPTIONS, SOURCE_OPTIONS, Key, SinkOptions, SourceOptions
from mqstore.jobs.options.optiontable import unknown_option
from mqstore.jobs.reading.plan import stores_of
from mqstore.jobs.views import VIEWS


def parse(**given: str) -> SourceOptions:
    return SourceOptions.parse({"path": "/p", **given})


def to_write(**given: str) -> SinkOptions:
    return SinkOptions.parse({"path": "/p", **given})


def test_names_are_taken_in_any_case() -> None:
    options = SourceOptions.parse({"PATH": "/p", "SubScribe": "a, b", "READBY": "Queue"})
    assert (options.paths, options.topics, options.read_by) == (["/p"], ("a", "b"), "queue")


READING: list[tuple[str, str, str, Any]] = [
    ("subscribe", "a", "topics", ("a",)),
    ("tags", "A || B", "tags", "A || B"),
    ("assign", '{"a":[0,1]}', "assign", {"a": [0, 1]}),
    ("startingOffsets", "LATEST", "starting_offsets", {ANY: -1}),
    (
        *("startingOffsets", '{"a":{"0":23,"1":-2}}', "starting_offsets"),
        {ANY: -2, Key("", "a", 0): 23, Key("", "a", 1): -2},
    ),
    ("endingOffsets", '{"s":{"a":{"0":5}}}', "ending_offsets", {ANY: -1, Key("s", "a", 0): 5}),
    ("startingTimestamp", "1700000000000", "starting_timestamp_ms", 1_700_000_000_000),
    ("startingTimestamp", "-5", "starting_timestamp_ms", -5),
    ("endingTimestamp", "2023-11-14T22:13:20", "ending_timestamp_ms", 1_700_000_000_000),
    ("endingTimestamp", "2023-11-15T00:13:20.000001+02:00", "ending_timestamp_ms", 1_700_000_000_001),
    ("includeProperties", "FALSE", "include_properties", False),
    ("maxRowsPerBatch", "7", "max_rows_per_batch", 7),
    ("filter", "a > 3", "filter", "a > 3"),
    ("keys", "k1,k2", "keys", ("k1", "k2")),
    ("tags", "*", "tags", "*"),
]
WRITING: list[tuple[str, str, str, Any]] = [
    ("PATH", "file:///a/b", "path", "/a/b"),
    ("topic", "t", "topic", "t"),
    ("Target", "SET", "target", "set"),
    ("queues", "16384", "queues", 16_384),
    ("maxRowsPerShard", "7", "max_rows_per_shard", 7),
    ("lockTimeout", "5", "lock_timeout_s", 5.0),
    ("lockTimeout", "250ms", "lock_timeout_s", 0.25),
    ("stagingTtl", "2 d", "staging_ttl_s", 172_800.0),
    ("confirmOverwrite", "true", "confirm_overwrite", True),
    ("checkpointLocation", "/cp", "path", "/p"),
    ("queryName", "q", "path", "/p"),
]


@pytest.mark.parametrize(
    ("options", "name", "text", "field", "value"),
    [*((SourceOptions, *row) for row in READING), *((SinkOptions, *row) for row in WRITING)],
)
def test_values_become_what_they_mean(options: Any, name: str, text: str, field: str, value: Any) -> None:
    given = {name: text} if field == "path" and value != "/p" else {"path": "/p", name: text}
    assert getattr(options.parse(given), field) == value


NO_READING: list[tuple[dict[str, str], str]] = [
    ({"colums": "x"}, r"no option 'colums'; did you mean 'columns'\?$"),
    ({"qwertz": "x"}, r"no option 'qwertz'; to read there are path, paths, .*, commitGroup$"),
    ({"readBy": "fast"}, r"option readBy='fast': .*; give auto, queue or log"),
    ({"minPartitions": "0"}, r"option minPartitions='0': .*; give a number from 1"),
    ({"minPartitions": "many"}, r"option minPartitions='many'"),
    ({"verify": "yes"}, "true or false"),
    ({"subscribe": " , "}, "option subscribe"),
    ({"subscribePattern": "("}, "not a regular expression"),
    ({"assign": '{"a": 1}'}, r'JSON \{"topic": \[queue id, ...\]\}'),
    ({"assign": "a"}, "option assign='a'"),
    ({"startingOffsets": "{}"}, "option startingOffsets"),
    ({"startingOffsets": '{"a": 1}'}, "option startingOffsets"),
    ({"startingOffsets": '{"a": {"x": 1}}'}, "option startingOffsets"),
    ({"startingOffsets": '{"a": {"0": -3}}'}, "option startingOffsets"),
    ({"startingOffsets": '{"a": {"b": {"c": {"0": 1}}}}'}, "option startingOffsets"),
    ({"startingOffsets": '{"a": {"00": 1}}'}, r"option startingOffsets='.*': '00' is not a queue id"),
    ({"startingOffsets": '{"a": {"\\u0663": 1}}'}, "option startingOffsets"),
    ({"endingOffsets": '{"s": {"a": {"01": 1}}}'}, "option endingOffsets"),
    ({"assign": '{"a":[0],"a":[1]}'}, r"option assign=.*: 'a' is given twice; give JSON"),
    ({"startingOffsets": '{"a":{"0":1,"0":2}}'}, r"option startingOffsets=.*: '0' is given twice"),
    ({"assign": "{}"}, r'option assign=.*not that form; give JSON \{"topic": \[queue id, ...\]\}'),
    ({"tags": "a|b"}, r"option tags='a\|b': .*A tag cannot contain a single bar; give `A \|\| B`, or `\*`"),
    ({"tags": "a || *"}, r"option tags='a \|\| \*': .*'\*' means every tag"),
    ({"tags": " || "}, r"option tags=' \|\| ': .*no tag between the bars"),
    ({"startingTimestamp": "yesterday"}, "ISO 8601"),
    ({"filter": "a >"}, "option filter='a >': "),
    ({"paths": '["a"]'}, "options 'path' and 'paths' are the same; give only one"),
    ({"subscribe": "a", "SUBSCRIBE": "b"}, "'subscribe' and 'SUBSCRIBE' are the same"),
    ({"topic": "a"}, r"no option 'topic'"),
    ({"scan": "log"}, r"no option 'scan'"),
    ({"subscribe": "a", "assign": '{"a":[0]}'}, "subscribe and assign exclude each other"),
    ({"startingGroup": "g", "startingTimestamp": "1"}, "exclude each other"),
    ({"commitGroup": "a@b"}, "option commitGroup='a@b': .*must be 1 to 120 letters"),
    ({"commitGroup": "CID_RMQ_SYS_TRANS"}, "option commitGroup='CID_RMQ_SYS_TRANS': .*this is a system group"),
]
NO_WRITING: list[tuple[dict[str, str], str]] = [
    ({"txnApId": "x"}, r"no option 'txnApId'; did you mean 'txnAppId'\?$"),
    ({"target": "table"}, "option target='table': .*; give store, set or inbox"),
    ({"queues": "0"}, "option queues='0': out of range; give a number from 1 to 16384"),
    ({"queues": "16385"}, "option queues='16385': out of range"),
    ({"txnAppId": "a/b", "txnVersion": "1"}, "option txnAppId='a/b': .*letters, digits"),
    ({"txnAppId": "..", "txnVersion": "1"}, "option txnAppId='..'"),
    ({"txnAppId": "_done", "txnVersion": "1"}, "option txnAppId='_done': .*; the first a letter or a digit"),
    ({"txnAppId": "a" * 101, "txnVersion": "1"}, "option txnAppId"),
    ({"txnAppId": "a", "txnVersion": "-1"}, "option txnVersion='-1': out of range"),
    ({"txnAppId": "a", "txnVersion": str(1 << 63)}, "option txnVersion.*out of range"),
    ({"txnAppId": "a"}, "txnAppId and txnVersion go together; txnVersion is missing"),
    ({"txnVersion": "1"}, "txnAppId and txnVersion go together; txnAppId is missing"),
    ({"lockTimeout": "soon"}, "option lockTimeout='soon': not a duration; give seconds, or a number with ms"),
    ({"stagingTtl": "-1s"}, "option stagingTtl='-1s'"),
    ({"confirmOverwrite": "yes"}, "true or false"),
    ({"topic": " "}, "option topic=' ': it is empty"),
]


@pytest.mark.parametrize(
    ("options", "given", "says"),
    [*((SourceOptions, *row) for row in NO_READING), *((SinkOptions, *row) for row in NO_WRITING)],
)
def test_invalid_option_names_value_and_remedy(options: Any, given: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        options.parse({"path": "/p", **given})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("paths", "[" * 200_000),
        ("startingOffsets", '{"a":' * 100_000),
        ("assign", "[" * 200_000),
        ("subscribePattern", "(" * 50_000),
    ],
)
def test_deeply_nested_option_is_refused(name: str, text: str) -> None:
    """It ended in a RecursionError, below a traceback of its own depth."""
    given = {name: text} if name == "paths" else {"path": "/p", name: text}
    with pytest.raises(ConfigError, match=rf"option {name}=.*: (it is )?nested too deeply.*; ") as caught:
        SourceOptions.parse(given)
    assert str(caught.value).endswith(SOURCE_OPTIONS.options[name].accepts)


def test_a_long_value_is_shown_by_its_beginning() -> None:
    with pytest.raises(ConfigError, match=r"option assign='\[0, 0[0, ]*: not that form") as caught:
        parse(assign="[" + "0, " * 9999 + "0]")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["maxRowsPerBatch", "maxBytesPerBatch"])
def test_a_batch_is_not_larger_than_arrow_can_address(name: str) -> None:
    """Arrow counts the bytes of a column of a batch in 32 bits, which a larger one overflowed."""
    parse(**{name: str(1 << 30)})
    with pytest.raises(
        ConfigError, match=rf"option {name}='1073741825': out of range; give a number from 1 to 1073741824$"
    ):
        parse(**{name: str((1 << 30) + 1)})


_MESSAGES = (
    ("tags", "A"),
    ("filter", "n = '1'"),
    ("keys", "k"),
    ("startingOffsets", "latest"),
    ("isolation", "flushed"),
)
_BOUNDS = (("endingOffsets", "earliest"), ("startingTimestamp", "1"), ("endingTimestamp", "1"), ("startingGroup", "g"))
_READING = (("readBy", "log"), ("includeProperties", "false"), ("bodyAs", "string"), ("decompress", "false"))
_TOPICS = (("subscribe", "a"), ("subscribePattern", "a.*"), ("assign", '{"a":[0]}'), ("includeSystemTopics", "true"))


@pytest.mark.parametrize(("name", "value"), [*_MESSAGES, *_BOUNDS, *_READING, ("minPartitions", "8"), *_TOPICS])
def test_small_table_refuses_foreign_options(name: str, value: str) -> None:
    """It was accepted, and did nothing: the table was of all messages, or of all topics."""
    parse(**{name: value}).for_batch()
    for view in VIEWS:
        given = parse(view=view, **{name: value})
        if (name, value) in _TOPICS and view in ("queues", "groups", "traffic"):
            given.for_batch()
        else:
            says = rf"option {name} is for messages, but the view {view} has a row for a whole .* by where\(\)"
            with pytest.raises(ConfigError, match=says):
                given.for_batch()


def test_small_tables_accept_session_options() -> None:
    """`mqstore spark sql` gives its options to all of them."""
    for view in VIEWS:
        given = parse(view=view, interval="5m", onCorrupt="keep", failOnDataLoss="false", verify="false")
        assert given.for_batch() is given


def test_properties_are_not_both_named_and_left_out() -> None:
    """They were there."""
    says = "options columns, with properties, and includeProperties=false exclude each other"
    with pytest.raises(ConfigError, match=says):
        parse(columns="topic,properties", includeProperties="false")
    parse(columns="topic", includeProperties="false")
    for columns in ({}, {"columns": "topic,headers"}):
        with pytest.raises(ConfigError, match="option includeHeaders needs columns=kafka"):
            parse(**columns, includeHeaders="true")
    assert not parse(columns="kafka", includeHeaders="false").include_headers
    parse(columns="topic,properties", includeProperties="true")


def test_a_query_says_where_its_stores_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no store: give \.load\(PATH\), .*; to write, \.save\(PATH\)"):
        SourceOptions.parse({})
    catalogue = tmp_path / "fleet.json"
    catalogue.write_text(json.dumps({"a": "/a", "b": "/b"}))
    assert SourceOptions.parse({"pathsFile": str(catalogue)}).paths == {"a": "/a", "b": "/b"}
    assert SourceOptions.parse({"paths": '["/a", "/b"]'}).paths == ["/a", "/b"]
    with pytest.raises(ConfigError, match="cannot be read"):
        SourceOptions.parse({"pathsFile": str(tmp_path / "none")})
    for wrong in ("[]", "{}", '"a"', "[1]", "a,b"):
        with pytest.raises(ConfigError, match="a JSON array of paths"):
            SourceOptions.parse({"paths": wrong})


def test_an_id_that_stands_twice_is_refused(tmp_path: Path) -> None:
    """JSON lets the last one win: of a fleet's catalogue a store was left out, and nobody knew."""
    twice = '{"a": "/x", "b": "/y", "a": "/z"}'
    (tmp_path / "fleet.json").write_text(twice)
    for given in ({"paths": twice}, {"pathsFile": str(tmp_path / "fleet.json")}):
        with pytest.raises(ConfigError, match=rf"option {next(iter(given))}=.*: 'a' is given twice"):
            SourceOptions.parse(given)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        *(("startingOfsets", "startingOffsets"), ("startingoffset", "startingOffsets"), ("tag", "tags")),
        *(("startingTimestmp", "startingTimestamp"), ("topci", "topic"), ("qeues", "queues"), ("key", "keys")),
    ],
)
def test_hint_is_nearest_name_of_both_tables(name: str, near: str) -> None:
    """Where a source is made, Spark does not say whether it is to read or to write. The sink's names came first:
    `tag` was said to mean `target`."""
    for tables in ((SOURCE_OPTIONS, SINK_OPTIONS), (SINK_OPTIONS, SOURCE_OPTIONS)):
        assert str(unknown_option(name, *tables)) == f"no option {name!r}; did you mean {near!r}?"


def test_options_of_kafka_connections_get_a_sentence() -> None:
    for options in (SourceOptions, SinkOptions):
        with pytest.raises(ConfigError, match=r"no option 'kafka.bootstrap.servers': a store is a folder.*load"):
            options.parse({"path": "/p", "kafka.bootstrap.servers": "host:9092"})


# -- writing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["hdfs://nn:9000/mq", "s3a://b/mq", "dbfs:/mq", "S3:x", "file://h/mq", "~/mq", "~x"])
def test_remote_path_is_not_a_local_folder(path: str) -> None:
    for options in (SinkOptions, SourceOptions):
        with pytest.raises(ConfigError, match=f"option path='{path}': (.* is not supported|'~' is not expanded)"):
            options.parse({"path": path})
    with pytest.raises(ConfigError, match=r"option paths=.*: (.* is not supported|'~' is not expanded)"):
        SourceOptions.parse({"paths": f'["/a", "{path}"]'})


@pytest.mark.parametrize("path", ["./s3:a", "/a/b:c", "file:a", "file:/a", "file:///a", "a b"])
def test_local_path_may_contain_any_character(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plain = path.removeprefix("file://").removeprefix("file:")
    assert SinkOptions.parse({"path": path}).path == str(tmp_path / plain)
    assert SourceOptions.parse({"path": path}).paths == [str(tmp_path / plain)]


def test_relative_path_is_refused_in_a_session_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write by Spark Connect to "relstore" succeeded, and its store was in a temporary folder of the session: Python
    workers of a session with artifacts stand in a folder that has the name of this variable."""
    (tmp_path / "a-session").mkdir()
    monkeypatch.chdir(tmp_path / "a-session")
    monkeypatch.setenv("SPARK_JOB_ARTIFACT_UUID", "a-session")
    for options in (SinkOptions, SourceOptions):
        with pytest.raises(ConfigError, match=r"option path='relstore'.*give the whole path"):
            options.parse({"path": "relstore"})
        options.parse({"path": str(tmp_path / "store")})
    with pytest.raises(ConfigError, match=r"option pathsFile='fleet.json'.*give the whole path"):
        SourceOptions.parse({"pathsFile": "fleet.json"})


def test_relative_glob_may_be_below_a_folder_with_brackets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "[x]").mkdir()
    (tmp_path / "[x]" / "a").mkdir()
    monkeypatch.chdir(tmp_path / "[x]")
    options = SourceOptions.parse({"path": "*"})
    monkeypatch.chdir(tmp_path)
    assert [store.path for store in stores_of(options)] == [str(tmp_path / "[x]" / "a")]


def test_a_write_says_where_it_goes() -> None:
    with pytest.raises(ConfigError, match="no target: give"):
        SinkOptions.parse({"topic": "t"})


def test_a_stream_has_an_identity_of_its_own() -> None:
    to_write().check_stream()
    with pytest.raises(ConfigError, match="are for batch writes: a stream is identified by its checkpoint"):
        to_write(txnAppId="a", txnVersion="1").check_stream()


def test_overwriting_what_others_consume_has_to_be_confirmed() -> None:
    to_write(target="set").check_overwrite()
    to_write(confirmOverwrite="true").check_overwrite()
    with pytest.raises(ConfigError, match=r"would hide the old messages.*confirmOverwrite=true"):
        to_write().check_overwrite()
    with pytest.raises(ConfigError, match="does not work with target=inbox"):
        to_write(target="inbox", confirmOverwrite="true").check_overwrite()
