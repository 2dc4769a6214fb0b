"""Common parts of all sub-commands: exit codes of errors (`mqstore help exit-codes`), and shared options."""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click

from mqstore import MQStoreError, QueueRef, errors
from mqstore_tools import JSON_ASKED
from mqstore_tools.render import VERSION, as_json, note, safe

FINDINGS, WRONG_USAGE, UNUSABLE, INTERRUPTED, READER_GONE = 1, 2, 3, 130, 141

_USAGE_ERRORS = (
    *(errors.ConfigError, errors.FilterError, errors.GroupNotFoundError, errors.InvalidMessageError),
    *(errors.InvalidReceiptError, errors.NotPermittedError, errors.NotSupportedError),
    *(errors.OffsetOutOfRangeError, errors.TopicNotFoundError),
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Help(click.HelpFormatter):
    """Help whose examples fit 80 columns: a comment is above its command, and options continue on the next line."""

    def write_text(self, text: str) -> None:
        super().write_text("\n".join(map(self._folded, text.split("\n"))))

    def _folded(self, line: str) -> str:
        if len(line) + self.current_indent <= self.width or not line.startswith("  mqstore "):
            return line
        command, _, comment = line.partition("   #")
        first, *others = re.split(r" (?=--|\| |&& )", command.rstrip())
        lines = [first]
        for part in others:
            if len(lines[-1]) + len(part) + self.current_indent < self.width - 2:
                lines[-1] += f" {part}"
            else:
                lines[-1] += " \\"
                lines.append(f"      {part}")
        return "\n".join([*([f"  #{comment}"] if comment else []), *lines])


class Context(click.Context):
    """Context of all sub-commands."""

    formatter_class = _Help


class WithExamples(click.Command):
    """Command or group whose help ends with `examples`."""

    context_class = Context

    def __init__(self, *arguments: Any, examples: str = "", **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.epilog = f"\b\nExamples:{examples}" if examples else self.epilog


class StoreCommand(WithExamples):
    """Sub-command with --json, unless `json_help` is empty. `render.json_asked` is its value.
    Errors of the library become one escaped line on stderr and an exit code."""

    def __init__(self, *arguments: Any, json_help: str = "Print JSON, for programs.", **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        if json_help:
            option = click.Option(["--json"], is_flag=True, expose_value=False, callback=_note_json, help=json_help)
            self.params.append(option)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            # `mqstore export ... | head` is fine. Without this, Python prints an error when it flushes at exit.
            _forget_stdout()
            ctx.exit(READER_GONE)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except _USAGE_ERRORS as error:
            self._fail(ctx, error, WRONG_USAGE)
        except (MQStoreError, OSError) as error:
            if isinstance(error, OSError) and error.filename is None and error.errno in _FULL:
                # A stream has no file name. Without one, the user would think that the store's disk is full.
                error = OSError(error.errno, error.strerror, "standard output")
                _forget_stdout()
            self._fail(ctx, error, UNUSABLE)
        except LookupError as error:
            # Raised by `at` and `get_by_id` if there is no message at that offset.
            self._fail(ctx, error, WRONG_USAGE, error.args[0] if error.args else error)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            # A bug. Its text may quote bytes of the store, so the traceback is escaped, too, line by line.
            for line in "".join(traceback.format_exception(error)).splitlines():
                click.echo(safe(line), err=True)
            self._fail(ctx, error, UNUSABLE, "this is a bug; please report it with the lines above")

    def _fail(self, ctx: click.Context, error: Exception, code: int, message: object = None) -> None:
        message = error if message is None else message
        if ctx.meta.get(JSON_ASKED):
            print_error(error, message)
            ctx.exit(code)
        # Further lines of a FilterError show the user's own expression and point to the mistake.
        first, *others = str(message).splitlines() if isinstance(error, errors.FilterError) else [message]
        note(f"{ctx.command_path}: {first}")
        for line in others:
            click.echo(safe(line), err=True)
        ctx.exit(code)


def _note_json(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    ctx.meta[JSON_ASKED] = asked  # before, it was only seen as a word, which may also be the value of an option


command = partial(click.command, cls=StoreCommand)


def finish(findings: object, code: int = FINDINGS) -> None:
    """End the command with this exit code if there are findings."""
    if findings:
        raise click.exceptions.Exit(code)


def print_error(error: Exception, message: object) -> None:
    """Print an error as one line of JSON on stderr."""
    row = {**VERSION, "error": {"type": type(error).__name__, "message": str(message)}}
    click.echo(as_json(row), err=True)


def _forget_stdout() -> None:
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError):  # not a real file: stdout of a test
        pass


class NumberRange(click.FloatRange):
    """Range of finite numbers. click accepts nan, and infinity without a bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


# Not checked by click, which would call an unreadable directory wrong usage. The store reports it with exit code 3.
directory_argument = click.argument("directory", metavar="DIR", type=click.Path(path_type=Path, readable=False))
output_option = click.option(
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write to FILE, which appears when it is complete, instead of stdout.",
)


@contextmanager
def findings_on_stderr() -> Iterator[list[logging.LogRecord]]:
    """Hide log warnings that repeat findings, which the command prints itself.
    Yields the list of logged errors, which are still printed."""
    errors: list[logging.LogRecord] = []
    log = logging.getLogger("mqstore")
    before = log.level
    log.setLevel(logging.ERROR)

    def keep(record: logging.LogRecord) -> bool:
        errors.append(record)
        return True

    log.addFilter(keep)
    try:
        yield errors
    finally:
        log.removeFilter(keep)
        log.setLevel(before)


@contextmanager
def on_signals(call: Callable[..., None]) -> Iterator[None]:
    """Let `call` handle SIGINT and SIGTERM. Only the main thread can do this, so it has no effect in another one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, call) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def note_incomplete(queue: QueueRef, directory: Path) -> None:
    """Print on stderr that a queue lacks messages of the log, so reads by queue miss some."""
    note(
        f"{queue.topic}, queue {queue.queue_id}, lacks messages that are in the log, and other queues may, too: run "
        f"`mqstore recover {directory}`"
    )


def note_front(began: int, ended: int) -> None:
    """Print on stderr that retention has moved the front of the log, if it has."""
    if ended > began:
        note(f"meanwhile, the writer's retention has moved the front of the log from {began} to {ended}")


def was_given(name: str) -> bool:
    """Return True if an option was given, not left at its default."""
    return click.get_current_context().get_parameter_source(name) is not click.core.ParameterSource.DEFAULT


def refuse_given(names: Collection[str], why: str) -> None:
    """Raise UsageError if one of these options was given. `why` is a phrase like "goes with --to"."""
    for option in click.get_current_context().command.params:
        if option.name in names and was_given(option.name):
            raise click.UsageError(f"{option.opts[0]} {why}")


def within(path: Path, *folders: Path) -> bool:
    """Return True if a path, with its links followed, is one of `folders` or below one."""
    # Not `Path.resolve`, which raises for a circle of links: opening the path reports that better.
    inner = Path(os.path.realpath(path))
    return any(outer in (inner, *inner.parents) for outer in (Path(os.path.realpath(each)) for each in folders))
