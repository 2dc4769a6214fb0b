"""The command as a whole: every sub-command has help with an example, errors keep their codes, logs are escaped."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import mqstore as library
from tests.commands import ASKING, CHANGING, EXPLAINING, looking
from tests.tools.support import cli, environment, mqstore, process


def registered(group: click.Group, *above: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield the words of each command, and the command; of a group first itself, then its own."""
    ctx = click.Context(group)
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None
        yield (*above, name), command
        if isinstance(command, click.Group):
            yield from registered(command, *above, name)


REGISTERED = dict(registered(cli))
LEAVES = [words for words, command in REGISTERED.items() if not isinstance(command, click.Group)]
PLAIN = {"topic", "queue_id", "max_messages", "body_bytes", "format_"}
"""Options that explain themselves."""


@pytest.mark.parametrize("words", REGISTERED, ids=" ".join)
def test_every_command_has_help_with_an_example_and_explains_its_options(words: tuple[str, ...]) -> None:
    result = mqstore(*words, "--help", exit_code=0)

    assert f"\n    mqstore {' '.join(words)}" in result.stdout
    assert [line for line in result.stdout.splitlines() if len(line) > 80] == []
    command = REGISTERED[words]
    assert command.short_help or command.help
    assert [o.name for o in command.params if isinstance(o, click.Option) and not (o.help or o.name in PLAIN)] == []


@pytest.mark.parametrize("name", [name for name in looking("", "") if not name.split(",")[0].endswith("export")])
def test_output_fits_a_terminal_of_80_columns(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """JSON is for programs, so its lines may be longer."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("mqstore_tools.render._is_terminal", lambda stream: True)
    words = [word for word in looking(store, tmp_path / "copy")[name] if word != "--json"]

    result = mqstore(*words)

    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in result.output.splitlines()]
    assert [line for line in lines if len(line) > 80] == []


def test_the_first_sub_command_is_meant_when_none_is_named(tmp_path: Path) -> None:
    assert mqstore("produce", tmp_path / "s", "orders", "--body", "x").exit_code == 0

    assert mqstore("topics", tmp_path / "s").stdout == mqstore("topics", "list", tmp_path / "s").stdout
    assert mqstore("topics", "--json", tmp_path / "s").exit_code == 0
    assert mqstore("topics").exit_code in (0, 2)  # help, with the code of click's version
    assert mqstore("topics", tmp_path / "absent").exit_code == 3
    assert mqstore("topics", "create").exit_code == 2


def test_version_and_help_are_printed() -> None:
    assert mqstore("--version").stdout.startswith("mqstore, version ")
    assert " compiled parts" in mqstore("--version").stdout
    help_text = mqstore("--help").stdout
    assert all(f"\n  {name} " in help_text for name in cli.list_commands(click.Context(cli)))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("command", [("inspect",), ("verify",), ("produce", "orders", "--body", "x"), ("topics",)])
def test_a_directory_that_may_not_be_read_is_no_wrong_usage(tmp_path: Path, command: tuple[str, ...]) -> None:
    name, *more = command
    store = tmp_path / "s"
    assert mqstore("produce", store, "orders", "--body", "x").exit_code == 0
    store.chmod(0)
    try:
        result = mqstore(name, store, *more)
    finally:
        store.chmod(0o755)

    assert result.exit_code == 3, result.output
    assert str(store) in result.stderr


def test_one_command_does_not_load_the_others() -> None:
    """`mqstore produce` in a shell loop is as fast as Python, numpy and click start. An import can be interrupted only
    by `main`, which itself loads nothing slow."""
    program = (
        "import sys; from mqstore_tools.main import cli; print({'mqstore', 'numpy', 'rich'} & {*sys.modules}); "
        "cli(['produce', '--help'], standalone_mode=False); "
        "print(sorted(m for m in sys.modules if m.startswith('mqstore_tools.')))"
    )
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())

    first, *_, loaded = run.stdout.splitlines()
    assert first == "set()"
    assert "mqstore_tools.produce" in loaded
    assert not any(f"mqstore_tools.{name}'" in loaded for (name, *_) in REGISTERED if name != "produce")


def test_internal_error_is_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("quoting a store: \x1b[2J")

    monkeypatch.setattr("mqstore.admin.snapshot", broken)

    result = CliRunner().invoke(cli, ["snapshot", str(tmp_path), str(tmp_path / "copy")])

    assert result.exit_code == 3
    assert "\\x1b[2J" in result.stderr
    assert "\x1b" not in result.output


def test_the_librarys_log_reaches_stderr_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("mqstore")
    handlers = list(logger.handlers)

    with click.Context(cli) as ctx:
        assert cli.callback is not None
        ctx.invoke(cli.callback)
        logger.warning("topic %s", "\x1b]0;t\x07")

    assert capsys.readouterr().err == "warning: topic \\x1b]0;t\\x07\n"
    assert (logger.handlers, logger.propagate) == (handlers, True)


@pytest.mark.parametrize("command", [("topics",), ("export",)])
def test_a_reader_that_went_away_is_no_finding(tmp_path: Path, command: tuple[str, ...]) -> None:
    """Tables ended with 1, so `mqstore verify ... | head` with `pipefail` told of findings that there are not."""
    assert mqstore("produce", tmp_path / "s", "orders", "--body", "x").exit_code == 0
    reading, writing = os.pipe()
    os.close(reading)

    child = process(command[0], tmp_path / "s", *command[1:], stdout=writing)
    os.close(writing)
    _, err = child.communicate()

    assert (child.returncode, err) == (141, b"")


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_streams_are_harmless(tmp_path: Path, closed: str) -> None:
    """They were None, so commands ended in the middle, some with a message stored, and asked to be reported."""
    store = tmp_path / "s"
    commands = [
        ("produce", store, "orders", "--body", "x", "--queue-id", 0),
        ("produce", store, "orders"),
        ("consume", store, "orders", "--group", "g", "--idle-exit", "0"),
        ("inspect", store),
    ]
    # A process for each command, forked from one that has imported what they need.
    program = f"""if True:
        import os, sys
        import mqstore_tools.main
        commands = {[[*map(str, command)] for command in commands]!r}
        for name, *_ in commands:
            mqstore_tools.main.cli.get_command(None, name)
        for command in commands:
            if (child := os.fork()) == 0:
                sys.argv[1:] = command
                mqstore_tools.main.main()
            if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
                os._exit(code)
    """
    shell = ["/bin/sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", program]
    run = subprocess.run(shell, env=environment(), stdin=subprocess.DEVNULL, timeout=60)

    assert run.returncode == 0
    assert mqstore("get", store, "--topic", "orders").exit_code == 0
    assert mqstore("verify", store).exit_code == 0


def test_unprintable_text_is_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mqstore("produce", tmp_path / "s", "orders", "--body", "ключ", "--tag", "été").exit_code == 0
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")

    child = process("get", tmp_path / "s", "--topic", "orders", "--last", 1)
    out, err = child.communicate()

    assert (child.returncode, err) == (0, b"")
    assert "tag=été" in out.decode("latin-1")
    assert b"\\u043a\\u043b\\u044e\\u0447" in out


def test_an_interrupt_while_a_command_is_loaded_is_130(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It was 1, findings, and half a second before that a traceback."""

    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mqstore_tools.main.importlib.import_module", interrupted)

    result = mqstore("verify", tmp_path)

    assert (result.exit_code, result.output) == (130, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_standard_output_that_is_full_is_not_taken_for_the_store(tmp_path: Path) -> None:
    """The message was stored, and all that was told is that no space is left on a device."""
    with open("/dev/full", "wb") as full:
        child = process("produce", tmp_path / "s", "orders", "--body", "hello", "--queue-id", 0, stdout=full)
        _, err = child.communicate()

    assert (child.returncode, b"'standard output'" in err) == (3, True)
    assert mqstore("get", tmp_path / "s", "--topic", "orders").exit_code == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_full_output_device_is_one_line() -> None:
    with open("/dev/full", "wb") as full:
        _, err = process("inspect", "--help", stdout=full).communicate()

    assert err == b"mqstore: [Errno 28] No space left on device: 'standard output'\n"


def test_each_command_looks_or_changes_something() -> None:
    looked = {name.partition(",")[0] for name in looking("", "")}

    assert looked | CHANGING | ASKING | EXPLAINING == set(map(" ".join, LEAVES))
    assert {name for name in looked & CHANGING if f"{name}, dry" not in looking("", "")} == set()


@pytest.mark.parametrize("words", [words for words in LEAVES if words != ("spark", "shell")], ids=" ".join)
def test_wrong_option_is_json_for_every_command(words: tuple[str, ...]) -> None:
    result = mqstore(*words, "--json", "--nonesuch")

    assert (result.exit_code, result.stdout) == (2, "")
    [line] = result.stderr.splitlines()
    error = json.loads(line)
    assert set(error) == {"version", "error"}
    assert error["version"] == 1
    assert error["error"]["type"] == "NoSuchOption"
    assert "--nonesuch" in error["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (("inspect", "ABSENT"), 3, "NotAStoreError"),
        (("recover", "LOCKED"), 3, "StoreLockedError"),
        (("inspect",), 2, "MissingParameter"),
        (("topics", "nonesuch", "ABSENT"), 2, "UsageError"),
        (("nonesuch",), 2, "NoSuchCommand"),
        (("get", "STORE"), 2, "UsageError"),
        (("get", "STORE", "--topic", "nonesuch"), 2, "TopicNotFoundError"),
        (("get", "STORE", "--physical-offset", "7"), 2, "LookupError"),
        (("export", "STORE", "--topic", "nonesuch"), 2, "TopicNotFoundError"),
        (("get", "STORE", "--topic", "nonesuch", "--last", "1"), 2, "TopicNotFoundError"),
        (("produce", "STORE", "a/b", "--body", "x"), 2, "InvalidMessageError"),
        (("groups", "delete", "STORE", "nonesuch", "--yes"), 2, "GroupNotFoundError"),
        (("offsets", "STORE", "--group", "nonesuch"), 2, "GroupNotFoundError"),
        (("offsets", "STORE", "--topic", "nonesuch"), 2, "TopicNotFoundError"),
        (("delay", "cancel", "STORE", "garbage"), 2, "InvalidReceiptError"),
        (("delay", "cancel", "STORE", "garbage", "--dry-run"), 2, "InvalidReceiptError"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_refusals_honour_json(tmp_path: Path, arguments: tuple[str, ...], code: int, kind: str) -> None:
    """A program got a line for people, and no way to tell a locked store from one that is not there."""
    paths = {"ABSENT": tmp_path / "absent", "STORE": tmp_path / "s", "LOCKED": tmp_path / "locked"}
    assert mqstore("produce", tmp_path / "s", "orders", "--body", "x").exit_code == 0
    with library.open(paths["LOCKED"]):
        words = [paths.get(word, word) for word in arguments]
        plain, as_json = mqstore(*words), mqstore(*words, "--json")

    assert (plain.exit_code, as_json.exit_code) == (code, code)
    assert as_json.stdout == ""
    [line] = as_json.stderr.splitlines()
    error = json.loads(line)["error"]
    assert set(error) == {"type", "message"}
    assert error["type"] == kind
    assert error["message"] in plain.stderr.replace("\n", " ")


def test_an_option_value_behind_two_dashes_asks_for_no_json(tmp_path: Path) -> None:
    result = mqstore("produce", tmp_path / "s", "a/b", "--", "--json")

    assert result.stderr.startswith("mqstore produce: ")
