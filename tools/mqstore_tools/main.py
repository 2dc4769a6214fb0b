"""The entry point: `mqstore SUB-COMMAND ...`. Each sub-command is a module, imported when used.

So is the library. Its import takes half a second, and Ctrl-C before `main` runs would print a traceback.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
import sys
from itertools import takewhile
from typing import Any

import click

from mqstore_tools import JSON_ASKED
from mqstore_tools.concepts import EXIT_CODES, TOPICS

COMMANDS = (
    *("produce", "get", "consume", "inspect", "du", "diff", "report", "verify", "recover", "quarantine", "snapshot"),
    *("export", "topics", "groups", "offsets", "lag", "top", "clients", "trace", "delay", "dlq", "queue"),
    *("spark", "serve", "bench", "completion", "help"),
)
"""Names of sub-commands, in the order of the help."""


class _Commands(click.Group):
    """Group that imports a sub-command, `NAME` in module `NAME`, when it is used: `mqstore produce` starts fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "traffic":
            ctx.fail("`mqstore traffic` is now `mqstore report`.")
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"mqstore_tools.{'help' if cmd_name == 'completion' else cmd_name}")
        command = getattr(module, f"{cmd_name}_" if cmd_name == "help" else cmd_name)
        assert isinstance(command, click.Command)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Before parsing, because a parse error must be printed as JSON, too.
        ctx.meta[JSON_ASKED] = "--json" in takewhile(lambda word: word != "--", args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # click would exit with 1, which means "findings"
            ctx.exit(130)
        except click.ClickException as error:
            if not ctx.meta[JSON_ASKED]:
                raise
            from mqstore_tools.shared import print_error

            print_error(error, error.format_message())
            ctx.exit(error.exit_code)


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        import mqstore
        from mqstore.engine import compiled_parts

        click.echo(f"mqstore, version {mqstore.__version__} ({compiled_parts()})")
        ctx.exit()


@click.group(
    "mqstore",
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    epilog=f"""Exit codes:\n\n{EXIT_CODES}\n
`mqstore help` also explains {", ".join(TOPICS)}. `mqstore COMMAND --help` has details.""",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Inspect, check, repair, fill and drain message stores: directories of mqstore or a RocketMQ broker.

    Only produce, consume, serve and recover change a store, and commands named create, alter, delete, reset, cancel,
    replay, restore or purge. All others only read, and work while a writer has the store open. If that is `mqstore
    serve`, it makes the changes of all these commands but recover and restore, which also take its HOST:PORT for DIR.
    """
    from mqstore_tools.render import EscapingHandler

    logger = logging.getLogger("mqstore")
    handler = EscapingHandler(logging.WARNING)
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False

    def restore() -> None:
        logger.removeHandler(handler)
        logger.propagate = propagate

    ctx.call_on_close(restore)


def main() -> None:
    """Run the command. Does not return."""
    _furnish_streams()
    try:
        cli.main(prog_name="mqstore")
    except OSError as error:  # of --help and --version, which are printed outside any StoreCommand
        sys.stdout = None  # else Python flushes it at exit, and fails again
        click.echo(f"mqstore: {OSError(error.errno, error.strerror, error.filename or 'standard output')}", err=True)
        sys.exit(3)


def _furnish_streams() -> None:
    """Make the standard streams usable, so that no command fails halfway at its own output.
    A stream that the shell closed (`>&-`) becomes the null device. Python has None for it, and the next opened file
    would get its number. Characters that the terminal cannot show are escaped."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in the order of their numbers: lowest first
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (as long as the process)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
