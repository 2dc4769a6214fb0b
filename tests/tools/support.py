"""What the tests of the command share: running it, and telling whether a directory was touched."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from mqstore_tools.main import cli, main

#: Control characters other than the line end, C1 controls, and the overrides that turn text around.
SHOULD_NOT_REACH_A_SCREEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def mqstore(*arguments: object, stdin: bytes | None = None, exit_code: int | None = None) -> Result:
    """Run `mqstore ARGUMENTS` in this process. The test fails if the exit code is not `exit_code`, where that is given,
    and if there is an exception that is no exit."""
    result = CliRunner().invoke(cli, [os.fspath(a) if isinstance(a, Path) else str(a) for a in arguments], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert "Traceback" not in result.output, result.output
    assert not SHOULD_NOT_REACH_A_SCREEN.search(result.output), result.output
    assert exit_code in (None, result.exit_code), result.output
    return result


def mqstore_json(*arguments: object, exit_code: int = 0) -> Any:
    """Run with --json; the value that it printed on stdout, without the version that each object begins with."""
    value = json.loads(mqstore(*arguments, "--json", exit_code=exit_code).stdout)
    if isinstance(value, dict):
        assert value.pop("version") == 1
    return value


def listed(path: Path) -> list[Any]:
    """Return all that commands of administration may change."""
    return [mqstore_json(*what.split(), path) for what in ("topics list --system", "groups", "offsets", "dlq")]


def json_lines(text: str) -> list[dict[str, Any]]:
    """Return the values of lines that are each an object."""
    return [json.loads(line) for line in text.splitlines()]


def environment() -> dict[str, str]:
    """Return the variables of a process that imports the library and the command. Its output is buffered, as it is for
    everybody, also where the tests' own is not."""
    path = os.pathsep.join(str(Path(__file__).parents[2] / folder) for folder in ("store", "tools"))
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return {**ours, "PYTHONPATH": path}


def process(*arguments: object, **options: Any) -> subprocess.Popen[bytes]:
    """The command as a process of its own, which Ctrl-C can reach: a test run in the background of a shell inherits,
    and would hand on, that SIGINT is ignored."""
    command = [sys.executable, "-m", "mqstore_tools.main", *map(str, arguments)]
    return subprocess.Popen(
        command,
        env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )


def forked(*arguments: object, **options: Any) -> subprocess.Popen[bytes]:
    """The command in a child that is forked and never executes another program. All is imported there: an interpreter
    of its own takes half a second longer. Closed streams and the end of the interpreter are `process`es' alone."""

    def run() -> None:
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # also the pipe by which Popen learns that the child has begun
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
        sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
        logging.root.handlers.clear()  # pytest's
        warnings.simplefilter("ignore")
        sys.argv = ["mqstore", *map(str, arguments)]
        code: object = 1
        try:
            main()
        except SystemExit as error:
            code = error.code or 0
            if sys.stdout is not None:
                sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code if isinstance(code, int) else 1)

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(["true"], preexec_fn=run, restore_signals=False, **{**pipes, **options})


@contextmanager
def running(*arguments: object, **options: Any) -> Iterator[Any]:
    """Such a child, which ends with the block at the latest."""
    with forked(*arguments, **options) as child:
        try:
            yield child
        finally:
            child.kill()


def seen_on_a_terminal(*arguments: object) -> tuple[int, str, str]:
    """Run the command with a terminal at stderr, as rich sees it: its exit code, its stdout, what the terminal got."""
    result = CliRunner(env={"FORCE_COLOR": "1"}).invoke(cli, [str(each) for each in arguments])
    return result.exit_code, result.stdout, result.stderr


def snapshot(root: Path) -> dict[str, tuple[Any, ...]]:
    """Names, bytes and times of everything below `root`, taken without moving an access time where that can be."""
    quietly = getattr(os, "O_NOATIME", 0)
    found: dict[str, tuple[Any, ...]] = {}
    for path in sorted([root, *root.rglob("*")]):
        status = path.lstat()
        times: tuple[int, ...] = (status.st_mtime_ns, status.st_ctime_ns)
        if quietly and os.geteuid() in (0, status.st_uid):
            times += (status.st_atime_ns,)
        found[str(path)] = (status.st_mode, status.st_ino, status.st_size, *times)
    for name, entry in found.items():
        if Path(name).is_file():
            fd = os.open(name, os.O_RDONLY | quietly)
            try:
                with open(fd, "rb", closefd=False) as file:
                    found[name] = (*entry, hashlib.sha256(file.read()).hexdigest())
            finally:
                os.close(fd)
    return found
