"""Common parts of the commands about the broker: open a store, ask for confirmation, read and show times.

    HOST:PORT, unix:PATH                      the server there
    a directory that a server has open        the server; commands that only read read the files
    any other directory                       its files, with the writer's lock for a change

A server names itself in the directory's `serve.json`. That counts only while its process has the writer's lock.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Timer
from typing import Any, Literal

import click
from click.shell_completion import CompletionItem

import mqstore
from mqstore import Store
from mqstore.admin import operations
from mqstore.errors import ConnectionLostError
from mqstore.jobs import duration_s
from mqstore_tools.render import note, pick, print_if_json, safe, show_bytes
from mqstore_tools.shared import StoreCommand, WithExamples

_AGE = re.compile(r"\d{1,9}[smhd]")
_SILENCE_S = 2.0
"""Time after which people learn that a command waits for a server."""
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^/:\s\[\]]+):\d{1,5}")

dry_run_option = click.option("--dry-run", is_flag=True, help="Only print what would be done.")
yes_option = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")


def is_address(target: Path) -> bool:
    """Return True for HOST:PORT and unix:PATH. An existing path is one, and so is ./HOST:PORT."""
    text = os.fspath(target)
    return not target.exists() and (text.startswith("unix:") or _ADDRESS.fullmatch(text) is not None)


class _Target(click.Path):
    """DIR or an address. A directory of that form is written ./HOST:PORT."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, readable=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = Path(os.fsdecode(super().convert(value, param, ctx)))
        return found.absolute() if str(value).startswith("./") and is_address(found) else found


target_argument = click.argument("target", metavar="DIR|HOST:PORT", type=_Target())


_ENVIRONMENT = {"access_key": "MQSTORE_ACCESS_KEY", "secret_key": "MQSTORE_SECRET_KEY", "tls": "MQSTORE_CACERT"}
"""Variables with options of `mqstore.connect`. As options of a command everybody on the machine could read the keys."""


def _access() -> dict[str, Any]:
    return {option: value for option, name in _ENVIRONMENT.items() if (value := os.environ.get(name))}


def connected(target: Path) -> Any:
    """Return the store of the server at an address, or of the one that has a directory open. None: no server has it.
    Raises ConnectionLostError for an address, and ConfigError for a server of another kind."""
    if not is_address(target) and not os.path.isfile(target / "serve.json"):
        return None
    try:
        return server_of(target)
    except ConnectionLostError as error:  # opening the directory says who has it, if anybody has
        if is_address(target):
            raise
        if error.errno != errno.ENOENT:  # it runs, and does not answer
            note(f"{target}: {error}")
        return None


def server_of(target: Path) -> Any:
    """Return the store of a server, as `connected`. Raises ConnectionLostError without one."""
    waiting = Timer(_SILENCE_S, note, [f"{target}: the server has not answered yet; waiting for it"])
    waiting.start()
    try:
        return mqstore.connect(os.fspath(target if is_address(target) else target.absolute()), **_access())
    finally:
        waiting.cancel()


def open_store(target: Path, *, create: bool) -> Store:
    """Connect to the store of a server, or open a directory for writing."""
    store: Store | None = connected(target)
    return store or mqstore.open(target, create=create)


@contextmanager
def administer(target: Path) -> Iterator[Any]:
    """Yield the operations of an operator (`mqstore.admin.operations`), by the server if one has the store."""
    if (store := connected(target)) is None:
        yield operations(target)
        return
    with store:
        yield store.admin


@contextmanager
def examine(target: Path) -> Iterator[Any]:
    """Yield the same for a command that only reads. It reads a directory itself, also while a server has it."""
    if is_address(target):
        with administer(target) as desk:
            yield desk
    else:
        yield operations(target)


def ask(question: str, *, yes: bool) -> None:
    """Ask the user to confirm a change that cannot be undone. Exits if the answer is no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} Cannot ask without a terminal: give --yes")
    if not click.confirm(question, err=True):
        note("nothing was changed")
        raise click.exceptions.Exit(1)


def print_done(row: dict[str, Any], text: str) -> None:
    """Print the result of a change or a dry run: `row` as JSON, or else `text`."""
    if not print_if_json(row):
        print(safe(text))


def carry_out(
    what: str, target: Path, change: Callable[[Any], Any], row: Callable[[Any], dict[str, Any]], *, dry_run: bool
) -> None:
    """Run `change` and print that `what`, such as "create topic orders", was done. JSON is the `row` of its result."""
    verb, kind, name = what.split(" ", 2)
    with administer(target) as desk:
        done = change(desk)
    if dry_run:
        print_done({"dry_run": True, "name": name}, f"would {what}")
    else:
        print_done(row(done), f"{verb.removesuffix('e')}ed {kind} {name}")


def delete_after_asking(
    target: Path,
    delete: Callable[..., Any],
    describe: Callable[[Any], tuple[str, dict[str, Any]]],
    *,
    dry_run: bool,
    yes: bool,
) -> None:
    """Run `delete(desk, dry_run=...)` if the user agrees. `describe` returns text and row of its plan."""
    with administer(target) as desk:
        what, row = describe(delete(desk, dry_run=True))
        if dry_run:
            print_done({"dry_run": True, **row}, f"would delete {what}")
            return
        ask(safe(f"Delete {what}?"), yes=yes)
        delete(desk, dry_run=False)
    print_done(row, f"deleted {what}")


def purge_after_asking(
    count: int, what: str, row: dict[str, Any], purge: Callable[[], int], *, dry_run: bool, yes: bool
) -> None:
    """Run `purge`, which returns the number of messages that it removed, if the user agrees.
    `count` is the number that it would remove, and `what` describes them, such as "dead letters of billing"."""
    if not dry_run:
        if count:
            ask(safe(f"Purge {count} {what}?"), yes=yes)
        count = purge()  # also if there are none: a store that may not be written is refused
    verb = "would purge" if dry_run else "purged"
    print_done({"dry_run": dry_run, **row, "count": count}, f"{verb} {count or 'no'} {what}")


class Commands(WithExamples, click.Group):
    """Group of sub-commands, listed as they were added."""

    command_class = StoreCommand

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


class DefaultGroup(Commands):
    """Group whose first sub-command is the default: `mqstore topics DIR` means `topics list DIR`.
    A directory with the name of a sub-command is written `./list`."""

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*click.Command.collect_usage_pieces(self, ctx), "[COMMAND] DIR [ARGS]..."]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        names = self.list_commands(ctx)
        if args and args[0] not in names and args[0] not in ctx.help_option_names:
            # A first word that is not a path, with a second one after it, is a misspelt command, not a missing store.
            missing = not os.path.exists(args[0]) and not is_address(Path(args[0])) and os.sep not in args[0]
            if len(args) > 1 and missing and not args[0].startswith("-") and args[1][:1] != "-":
                ctx.fail(f"No such command {args[0]!r}, and no such directory.")
            args = [names[0], *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        return [*super().shell_complete(ctx, incomplete), CompletionItem(incomplete, type="dir")]


def moment(value: Any) -> datetime:
    """Parse an option's time: ISO 8601, by default UTC, or an age (90m, 36h, 30d)."""
    if isinstance(value, datetime):
        return value
    if _AGE.fullmatch(value):
        try:
            return datetime.now(UTC) - timedelta(seconds=duration_s(value))
        except OverflowError:
            raise click.BadParameter(f"{value!r} is too long ago") from None
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is neither a time (2026-01-31T12:00:00Z) nor an age (90m, 36h, 30d)"
        ) from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


Position = Literal["earliest", "latest"] | datetime


def position(value: Any) -> Position:
    """Parse an option's place in a queue: earliest, latest, or a time."""
    return value if value in ("earliest", "latest") else moment(value)


def to_ms(when: datetime) -> int:
    """Return the milliseconds since the epoch of a time with a zone."""
    return (when - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)


def show_ms(duration_ms: int | None) -> str:
    """Return a duration as text for people, in its two largest units, or a dash for None.

    >>> [show_ms(ms) for ms in (None, 0, 250, 90_000, 7_200_000, 100_000_000)]
    ['-', '0s', '250ms', '1m 30s', '2h', '1d 3h']
    """
    if duration_ms is None:
        return "-"
    if duration_ms < 0:
        return f"-{show_ms(-duration_ms)}"
    if 0 < duration_ms < 1000:
        return f"{duration_ms}ms"
    rest, words = duration_ms // 1000, []
    for unit, seconds in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        if rest >= seconds:
            words.append(f"{rest // seconds}{unit}")
            rest %= seconds
    return " ".join(words[:2]) or "0s"


_SHOWN: dict[str, Callable[[Any], str]] = {"bytes": show_bytes, "ms": show_ms, "s": "{:.1f}".format}


def as_cells(row: Mapping[str, Any], names: str) -> list[object]:
    """Return the members of a row whose names are given, separated by blanks, as cells of a table.
    Sizes, durations and rates are text with units, by the last word of the name. None stays None."""
    found = zip(names.split(), pick(row, names), strict=True)
    shows = ((_SHOWN.get(name.rpartition("_")[2]), value) for name, value in found)
    return [value if value is None or show is None else show(value) for show, value in shows]
