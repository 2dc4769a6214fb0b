"""`mqstore help` and `completion`: texts, man pages without a complaint, scripts that a shell runs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from mqstore_tools.concepts import TOPICS
from scripts.docs import man_pages
from tests.tools.support import cli, environment, mqstore, mqstore_json


def test_help_of_a_command_is_its_own_help() -> None:
    for words in ([], ["lag"], ["dlq"], ["dlq", "replay"], ["help"]):
        assert mqstore("help", *words, exit_code=0).stdout == mqstore(*words, "--help", exit_code=0).stdout


def test_each_option_says_what_it_is_for() -> None:
    missing = [f"{path} {option.opts}" for path, option in _options(cli, "mqstore") if not option.help]

    assert missing == []


def _options(command: click.Command, path: str) -> Iterator[tuple[str, click.Option]]:
    yield from ((path, each) for each in command.params if isinstance(each, click.Option))
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            if found := command.get_command(context, name):
                yield from _options(found, f"{path} {name}")


@pytest.mark.parametrize("topic", TOPICS)
def test_topic_fits_a_terminal_and_is_named_by_the_help(topic: str) -> None:
    text = mqstore("help", topic, exit_code=0).stdout

    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert topic in mqstore("--help").stdout
    assert topic in mqstore("help", "--help").stdout
    assert mqstore_json("help", topic) == {"topic": topic, "text": text.rstrip("\n")}


@pytest.mark.parametrize("words", ["nonesuch", "dlq nonesuch", "lag show", "filters more"])
def test_unknown_topic_is_wrong_usage_and_names_the_topics(words: str) -> None:
    stderr = mqstore("help", *words.split(), exit_code=2).stderr

    assert all(topic in stderr for topic in TOPICS)


@pytest.mark.skipif(not shutil.which("man"), reason="there is no man")
def test_man_pages_have_no_warnings_and_all_the_text(tmp_path: Path) -> None:
    man_pages(tmp_path)

    names = {path.name for path in tmp_path.iterdir()}
    assert {"mqstore.1", "mqstore-dlq.1", "mqstore-dlq-replay.1", "mqstore-top.1", "mqstore-filters.7"} <= names
    assert {f"mqstore-{name}.1" for name in cli.list_commands(click.Context(cli))} < names
    command = ["man", "--warnings", "-E", "UTF-8", "-l", *sorted(map(str, tmp_path.iterdir()))]
    run = subprocess.run(command, capture_output=True, text=True, env={**environment(), "MANWIDTH": "80"})
    assert (run.returncode, run.stderr) == (0, "")
    shown = " ".join(run.stdout.split())
    for text in ("--max-lag INTEGER RANGE", '--where "amount > 480"', '{"version": 1, "error"', "|| page-somebody"):
        assert text in shown.replace("\u2010", "-"), text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_names_its_installation(shell: str) -> None:
    script = mqstore("completion", shell, exit_code=0).stdout

    assert script.splitlines()[-1].startswith("# To install: ")
    assert "_MQSTORE_COMPLETE" in script
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("mqstore to", {"plain,top", "plain,topics"}),
        ("mqstore topics cr", {"plain,create", "dir,cr"}),
        ("mqstore topics var --sy", {"plain,--system"}),
        ("mqstore lag va", {"file,va"}),
        ("mqstore top --sort f", {"plain,flight"}),
        ("mqstore completion z", {"plain,zsh"}),
    ],
)
def test_commands_options_and_paths_are_completed(words: str, expected: set[str]) -> None:
    from click.testing import CliRunner

    variables = {"_MQSTORE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    result = CliRunner(env=variables).invoke(cli, [], prog_name="mqstore")

    assert {*result.stdout.split()} == expected
