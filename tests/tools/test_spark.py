"""`mqstore spark`: help, exit codes, and what is said when Spark is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import pytest

from mqstore.spark import java
from mqstore_tools.main import cli
from mqstore_tools.spark import COMMANDS, spark
from tests.tools.brokers import filled
from tests.tools.support import mqstore


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`orders` with 10 messages in each of two queues, of which `billing` has consumed 7 and 2; a dead letter."""
    return filled(tmp_path_factory.mktemp("store") / "s")


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pyspark nor Java."""
    monkeypatch.setitem(sys.modules, "pyspark", None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)  # type: ignore[arg-type]
    monkeypatch.setattr(java, "find", lambda: None)


def arguments(name: str, store: Path) -> list[object]:
    """A call of the command that is right."""
    return ["spark", name, store, *{"sql": ["select 1"]}.get(name, [])]


MINE = ["sql", "shell"]


# -- help --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example_and_explains_its_options(name: str) -> None:
    shown = mqstore("spark", name, "--help")

    assert shown.exit_code == 0
    assert f"\n    mqstore spark {name}" in shown.stdout
    assert "--json" in shown.stdout
    command = spark.get_command(click.Context(cli), name)
    assert command is not None
    assert command.short_help
    for option in command.params:
        assert not isinstance(option, click.Option) or option.help, (name, option.name)


# -- no Spark --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MINE)
@pytest.mark.usefixtures("no_spark")
def test_without_spark_one_line_says_what_to_install(name: str, store: Path) -> None:
    result = mqstore(*arguments(name, store))

    assert result.exit_code == 3
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert "pip install 'mqstore[spark]'" in line
    assert java.MISSING in line


# -- wrong usage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MINE)
@pytest.mark.parametrize(
    ("more", "text"),
    [
        (("--conf", "nonsense"), "--conf 'nonsense' is not NAME=VALUE"),
        (("--option", "nonsense=1"), "no option 'nonsense'"),
        (("--option", "nonsense"), "--option 'nonsense' is not NAME=VALUE"),
        (("--from", "yesterday"), "'yesterday' is neither a time"),
        (("--where", "a = "), "option filter='a = '"),
    ],
)
@pytest.mark.usefixtures("no_spark")
def test_wrong_usage_ends_before_spark_is_looked_for(name: str, more: tuple[str, ...], text: str, store: Path) -> None:
    result = mqstore(*arguments(name, store), *more)

    if more[0] != "--conf":
        assert (result.exit_code, text in result.stderr) == (2, True), result.stderr
    else:
        assert result.exit_code == 2
