"""Repeat a report each interval, in place on a terminal, with keys, or else one after the other.

Keys are read if stdin is a terminal, too. Its mode is restored at the end, also after Ctrl-C and SIGTERM. A failed look
ends the command, so that scripts notice it. On a terminal only the first one does, and later ones are tried again.
"""

from __future__ import annotations

import os
import selectors
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
from mqstore_tools.render import VERSION, Cells, as_json, console, json_asked, safe, table
from mqstore_tools.shared import NumberRange

interval_option = click.option(
    "--interval", type=NumberRange(0.1, 86_400), default=2.0, help="Seconds between two looks."
)


def watch(
    look: Callable[[], Any],
    tables: Callable[[Any], Sequence[Cells]],
    *,
    interval: float,
    once: bool = False,
    press: Callable[[str], bool] = lambda key: False,
    hint: Callable[[], str] = lambda: "q quit",
) -> None:
    """Show the `tables` of what `look` returns every `interval` seconds, until the key q, or `once`.
    `press` gets each key and returns True if q has another meaning now. `hint` is the last line of the page."""
    value, screen = look(), console()
    while once or json_asked() or not screen.is_terminal:
        if json_asked():
            print(as_json({**VERSION, **value}))
        for each in () if json_asked() else tables(value):
            screen.print(table(*each))
        if once:
            return
        sys.stdout.flush()
        time.sleep(interval)
        value = look()
    with _keys() as keys, Live(console=screen, screen=True, auto_refresh=False) as live:
        due, problem = time.monotonic() + interval, ""
        while True:
            live.update(_page(tables(value), *screen.size, problem or hint()), refresh=True)
            for key in keys(max(0.0, due - time.monotonic())):
                if not press(key) and key == "q":
                    return
            if time.monotonic() >= due:
                try:
                    value, problem = look(), ""
                except (MQStoreError, OSError) as error:
                    problem = f"this is the last answer: {error}"
                due = time.monotonic() + interval


def _page(tables: Sequence[Cells], width: int, height: int, last: str) -> Group:
    """Return the tables and the last line, each row in one line, with as many rows as fit the screen."""
    free = height - 1 - sum(1 + bool(title) for title, _, _ in tables)
    shown: list[Any] = []
    for left, (title, columns, rows) in zip(range(len(tables), 0, -1), tables, strict=True):
        some = rows[: max(1, free // left)]
        free -= len(some)
        shown.append(table(safe(title)[:width], columns, some, name_width=max(8, width // 3)))
    return Group(*shown, Text(safe(last), style="dim", no_wrap=True, overflow="ellipsis"))


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits some seconds for keys and returns them. A terminal that went away presses q."""
    try:
        fd = sys.stdin.fileno()
        mode = termios.tcgetattr(fd)
    except (termios.error, OSError, ValueError):  # not a terminal, or closed
        yield lambda seconds: (time.sleep(seconds), "")[1]  # type: ignore[func-returns-value]
        return
    keyboard = selectors.DefaultSelector()  # not `select`, which takes no descriptor above 1,023
    keyboard.register(fd, selectors.EVENT_READ)

    def read(seconds: float) -> str:
        ready = keyboard.select(seconds)
        keys = (os.read(fd, 64).decode(errors="replace") or "q") if ready else ""
        return "" if keys[1:] and keys[0] == "\x1b" else keys  # an arrow, for example

    ended = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        tty.setcbreak(fd)
        yield read
    finally:
        keyboard.close()
        termios.tcsetattr(fd, termios.TCSADRAIN, mode)
        signal.signal(signal.SIGTERM, ended)
