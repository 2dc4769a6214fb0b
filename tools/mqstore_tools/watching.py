"""Repeat a report each interval: in place on a terminal, with keys, or else one after the other.

    stdout a terminal    the other screen of the terminal, cut to its height; an error is shown until a look succeeds
    otherwise, --json    each report below the last one; an error ends the command, so that scripts notice it

Keys are read if stdin is a terminal, too. Its mode is restored at the end, also after Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Group
from rich.live import Live
from rich.text import Text

from mqstore import MQStoreError
from mqstore_tools.render import VERSION, Cells, as_json, console, safe, table
from mqstore_tools.shared import NumberRange

interval_option = click.option(
    "--interval", type=NumberRange(0.1, 86_400), default=2.0, show_default=True, help="Seconds between two looks."
)
_NAMES = 3
"""Names get this part of the width of a screen."""


def watch(
    look: Callable[[], Any],
    tables: Callable[[Any], Sequence[Cells]],
    *,
    interval: float,
    json_output: bool,
    press: Callable[[str], bool] = lambda key: False,
    hint: Callable[[], str] = lambda: "q quit",
) -> None:
    """Show the `tables` of what `look` returns every `interval` seconds, until the key q.
    `press` gets each key and returns True if it has used it. `hint` is the last line of the screen."""
    value = look()  # its errors end the command
    screen = console()
    if json_output or not screen.is_terminal:
        while True:
            _print(value, tables, json_output=json_output)
            time.sleep(interval)
            value = look()
    with _keys() as key, Live(console=screen, screen=True, auto_refresh=False) as live:
        due, problem = time.monotonic() + interval, ""
        while True:
            live.update(_page(tables(value), screen.size.height, screen.width, problem or hint()), refresh=True)
            for char in key(due - time.monotonic()):
                if not press(char) and char in "qQ":
                    return
            if time.monotonic() >= due:
                try:
                    value, problem = look(), ""
                except (MQStoreError, OSError) as error:
                    problem = f"this is the last answer: {error}"
                due = time.monotonic() + interval


def show_once(value: Any, tables: Callable[[Any], Sequence[Cells]], *, json_output: bool) -> None:
    """Print one report, as `watch` does without a terminal."""
    _print(value, tables, json_output=json_output)


def _print(value: Any, tables: Callable[[Any], Sequence[Cells]], *, json_output: bool) -> None:
    if json_output:
        print(as_json({**VERSION, **value}))
    else:
        for each in tables(value):
            console().print(table(*each))
    sys.stdout.flush()


def _page(tables: Sequence[Cells], height: int, width: int, last: str) -> Group:
    """Return the tables and the last line, with as many rows as fit the screen."""
    fixed = sum(bool(title) + any(columns) for title, columns, _ in tables) + 1
    free, left = max(0, height - fixed), len(tables)
    shown: list[Any] = []
    for title, columns, rows in tables:
        some = rows[: max(1, free // left)]
        free, left = free - len(some), left - 1
        shown.append(table(safe(title)[:width], columns, some, name_width=max(8, width // _NAMES)))
    return Group(*shown, Text(safe(last), style="dim", no_wrap=True, overflow="ellipsis"))


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits some seconds for keys and returns them. A terminal that went away presses q."""
    try:
        fd = sys.stdin.fileno()
        mode = termios.tcgetattr(fd)
    except (termios.error, OSError, ValueError):  # not a terminal, closed, or not a file

        def sleep(seconds: float) -> str:
            time.sleep(max(0.0, seconds))
            return ""

        yield sleep
        return

    def read(seconds: float) -> str:
        ready, _, _ = select.select([fd], [], [], max(0.0, seconds))
        keys = (os.read(fd, 64).decode(errors="replace") or "q") if ready else ""
        return "" if keys[1:] and keys[0] == "\x1b" else keys  # an arrow, for example

    ended = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        tty.setcbreak(fd)
        yield read
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, mode)
        signal.signal(signal.SIGTERM, ended)
