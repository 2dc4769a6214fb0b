"""`python -m mqstore_tools.docs` prints docs/commands.md: the commands' own help, so that the page cannot lie."""

from __future__ import annotations

import click

from mqstore_tools.main import cli

__all__ = ["page"]

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
    parts = [_HEAD, _block("mqstore", cli, None)]
    with click.Context(cli, info_name="mqstore", **cli.context_settings) as parent:
        for name in cli.list_commands(parent):
            command = cli.get_command(parent, name)
            assert command is not None
            parts.append(_block(f"mqstore {name}", command, parent))
            if isinstance(command, click.Group):
                with click.Context(command, info_name=name, parent=parent) as group:
                    for each in command.list_commands(group):
                        sub_command = command.get_command(group, each)
                        assert sub_command is not None
                        parts.append(_block(f"mqstore {name} {each}", sub_command, group))
    return "\n".join(parts)


def _block(title: str, command: click.Command, parent: click.Context | None) -> str:
    name = title.rpartition(" ")[2]
    settings = {**command.context_settings, "terminal_width": _WIDTH, "max_content_width": _WIDTH}
    with click.Context(command, info_name=name, parent=parent, **settings) as ctx:
        text = command.get_help(ctx)
    return f"## {title}\n\n```text\n{text.rstrip()}\n```\n"


if __name__ == "__main__":
    print(page(), end="")
