"""Options and columns of the sink: names, values, and what people are told who get them wrong."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from mqstore.errors import ConfigError
from mqstore.jobs.options import ONLY_FOR_WRITING, SINK_OPTIONS, SOURCE_OPTIONS, SinkOptions, SourceOptions


def parse(**given: str) -> SinkOptions:
    return SinkOptions.parse({"path": "/p", **given})


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("PATH", "file:///a/b", "path", "/a/b"),
        ("topic", "t", "topic", "t"),
        ("Target", "SET", "target", "set"),
        ("queues", "16384", "queues", 16_384),
        ("flush", "none", "flush", "none"),
        ("validate", "False", "validate", False),
        ("maxRowsPerShard", "7", "max_rows_per_shard", 7),
        ("lockTimeout", "5", "lock_timeout_s", 5.0),
        ("lockTimeout", "250ms", "lock_timeout_s", 0.25),
        ("stagingTtl", "2 d", "staging_ttl_s", 172_800.0),
        ("confirmOverwrite", "true", "confirm_overwrite", True),
        ("checkpointLocation", "/cp", "path", "/p"),
        ("queryName", "q", "path", "/p"),
    ],
)
def test_values_become_what_they_mean(name: str, text: str, field: str, value: Any) -> None:
    given = {name: text} if field == "path" and value != "/p" else {"path": "/p", name: text}
    assert getattr(SinkOptions.parse(given), field) == value


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"txnApId": "x"}, r"no option 'txnApId'; did you mean 'txnAppId'\?$"),
        ({"target": "table"}, "option target='table': .*; store, set or inbox"),
        ({"queues": "0"}, "option queues='0': out of range; a number from 1 to 16384"),
        ({"queues": "16385"}, "option queues='16385': out of range"),
        ({"txnAppId": "a/b", "txnVersion": "1"}, "option txnAppId='a/b': .*letters, digits"),
        ({"txnAppId": "..", "txnVersion": "1"}, "option txnAppId='..'"),
        ({"txnAppId": "_done", "txnVersion": "1"}, "option txnAppId='_done': .*; the first a letter or a digit"),
        ({"txnAppId": "a" * 101, "txnVersion": "1"}, "option txnAppId"),
        ({"txnAppId": "a", "txnVersion": "-1"}, "option txnVersion='-1': out of range"),
        ({"txnAppId": "a", "txnVersion": str(1 << 63)}, "option txnVersion.*out of range"),
        ({"txnAppId": "a"}, "txnAppId and txnVersion go together; txnVersion is missing"),
        ({"txnVersion": "1"}, "txnAppId and txnVersion go together; txnAppId is missing"),
        ({"lockTimeout": "soon"}, "option lockTimeout='soon': no length of time; seconds, or a number with ms"),
        ({"stagingTtl": "-1s"}, "option stagingTtl='-1s'"),
        ({"validate": "yes"}, "true or false"),
        ({"topic": " "}, "option topic=' ': it is empty"),
    ],
)
def test_what_does_not_fit_is_refused_with_name_value_and_remedy(given: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(**given)


@pytest.mark.parametrize("path", ["hdfs://nn:9000/mq", "s3a://b/mq", "dbfs:/mq", "S3:x", "file://h/mq", "~/mq", "~x"])
def test_a_path_that_is_not_local_is_never_taken_for_a_folder_below_the_working_directory(path: str) -> None:
    for options in (SinkOptions, SourceOptions):
        with pytest.raises(ConfigError, match=f"option path='{path}': (only local paths|'~' is not replaced)"):
            options.parse({"path": path})
    with pytest.raises(ConfigError, match=r"option paths=.*: (only local paths|'~' is not replaced)"):
        SourceOptions.parse({"paths": f'["/a", "{path}"]'})


@pytest.mark.parametrize("path", ["./s3:a", "/a/b:c", "file:a", "file:/a", "file:///a", "a b"])
def test_a_local_path_may_hold_what_it_likes(path: str) -> None:
    assert SinkOptions.parse({"path": path}).path == path.removeprefix("file://").removeprefix("file:")


def test_a_write_says_where_it_goes() -> None:
    with pytest.raises(ConfigError, match="no target: give"):
        SinkOptions.parse({"topic": "t"})


def test_a_stream_has_an_identity_of_its_own() -> None:
    parse().check_stream()
    with pytest.raises(ConfigError, match="belong to batch writes: a stream is known by its checkpoint"):
        parse(txnAppId="a", txnVersion="1").check_stream()


def test_overwriting_what_others_consume_has_to_be_confirmed() -> None:
    parse(target="set").check_overwrite()
    parse(confirmOverwrite="true").check_overwrite()
    with pytest.raises(ConfigError, match=r"a queue is not a table.*confirmOverwrite=true"):
        parse().check_overwrite()
    with pytest.raises(ConfigError, match="does not go with target=inbox"):
        parse(target="inbox", confirmOverwrite="true").check_overwrite()


def test_an_option_that_tells_a_write_is_none_of_a_query() -> None:
    assert [name for name in ONLY_FOR_WRITING if name in SOURCE_OPTIONS] == []


def test_the_table_and_the_fields_are_one() -> None:
    assert {option.field for option in SINK_OPTIONS.options.values()} == {field.name for field in fields(SinkOptions)}
    defaults = SinkOptions("/p")
    for option in SINK_OPTIONS.options.values():
        if option.default and option.field not in ("topic", "max_rows_per_shard"):
            assert option.parse(option.default) == getattr(defaults, option.field)
