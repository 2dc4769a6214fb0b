"""`python -m mqstore_tools.docs PAGE` prints a page of docs/ with what is generated of it as the code has it now.

commands.md        all of it: the commands' own help
spark-options.md   its tables; the text between them is written by hand
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from mqstore_tools.main import cli

__all__ = ["page", "with_tables"]

_WIDTH = 100

_HEAD = """\
# The command `mqstore`

This page is the command's own help, written by `make docs`; don't edit it. What findings mean, and what to do about
them, is in [recovery.md](recovery.md).

Exit codes of all commands: 0 fine, 1 findings, 2 wrong usage, 3 the directory cannot be opened, read or written.
Whatever a store holds is printed escaped: no byte of it reaches a terminal as a control sequence.
"""


def page() -> str:
    """The page, the same at any width of terminal."""
    with click.Context(cli, info_name="mqstore", **cli.context_settings) as ctx:
        return "\n".join([_HEAD, _block("mqstore", cli, None), *_blocks("mqstore", cli, ctx)])


def _blocks(title: str, group: click.Group, ctx: click.Context) -> Iterator[str]:
    """The commands of a group, each followed by its own if it is one."""
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None
        yield _block(f"{title} {name}", command, ctx)
        if isinstance(command, click.Group):
            with click.Context(command, info_name=name, parent=ctx) as inner:
                yield from _blocks(f"{title} {name}", command, inner)


def _block(title: str, command: click.Command, parent: click.Context | None) -> str:
    name = title.rpartition(" ")[2]
    settings = {**command.context_settings, "terminal_width": _WIDTH, "max_content_width": _WIDTH}
    with click.Context(command, info_name=name, parent=parent, **settings) as ctx:
        text = command.get_help(ctx)
    return f"## {title}\n\n```text\n{text.rstrip()}\n```\n"


_TABLE = re.compile(r"(<!-- table: ([a-z ]+) -->\n)\n*(?:\|.*\n)*\n*")


def with_tables(text: str) -> str:
    """Return the text of spark-options.md with each table, which follows a comment with its name, as it is now."""
    from mqstore.columnar import columns, inputs
    from mqstore.jobs import options, views

    tables = {
        "source options": options.SOURCE_OPTIONS.as_markdown,
        "columns": columns.as_markdown,
        "views": views.as_markdown,
        "sink columns": inputs.as_markdown,
        "sink options": options.SINK_OPTIONS.as_markdown,
    }
    return _TABLE.sub(lambda found: f"{found[1]}\n{tables[found[2]]()}\n", text).rstrip() + "\n"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    print(page() if file.name == "commands.md" else with_tables(file.read_text(encoding="utf-8")), end="")
