"""`mqstore help`: the help of a command or a topic, also as a man page. `mqstore completion`: scripts for shells."""

from __future__ import annotations

import re
from collections.abc import Iterable

import click
from click.shell_completion import get_completion_class

import mqstore
from mqstore_tools.concepts import TOPICS
from mqstore_tools.render import print_if_json
from mqstore_tools.shared import Context, command

_INSTALL = {
    "bash": 'eval "$(mqstore completion bash)"  # in ~/.bashrc',
    "zsh": 'eval "$(mqstore completion zsh)"  # in ~/.zshrc, after compinit',
    "fish": "mqstore completion fish > ~/.config/fish/completions/mqstore.fish  # once",
}


@command(
    short_help="Print the completion script of a shell.",
    examples="\n" + "\n".join(f"  {line}" for line in _INSTALL.values()),
)
@click.argument("shell", type=click.Choice([*_INSTALL]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script with which bash, zsh or fish completes commands, options and paths.

    The last line of the script says how to install it.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(ctx.find_root().command, {}, "mqstore", "_MQSTORE_COMPLETE").source().rstrip()
    _show({"shell": shell, "script": f"{script}\n\n# To install: {_INSTALL[shell]}"})


@command(
    "help",
    short_help="Print the help of a command, or of a topic.",
    examples="""
  mqstore help dlq replay
  mqstore help filters
  mqstore help --man dlq replay | man -l -""",
)
@click.argument("words", metavar="[COMMAND|TOPIC]...", nargs=-1)
@click.option("--man", is_flag=True, help="Print a man page.")
@click.pass_context
def help_(ctx: click.Context, words: tuple[str, ...], man: bool) -> None:
    """Print the help of a command, or of a topic: exit-codes, places, time or filters.

    `make man` in the source writes the man pages of all commands and topics.
    """
    _show({"topic": " ".join(words), "text": page(ctx.find_root(), words, man=man)})


def _show(row: dict[str, str]) -> None:
    if not print_if_json(row):
        print([*row.values()][-1])


def page(root: click.Context, words: Iterable[str], *, man: bool) -> str:
    """Return the help of a command or topic, or its man page. Raises UsageError."""
    ctx, name = root, " ".join(words)
    if name in TOPICS:
        ctx = Context(click.Command(name, help=TOPICS[name]), parent=root)
    for word in () if name in TOPICS else name.split():
        found = ctx.command.get_command(ctx, word) if isinstance(ctx.command, click.Group) else None
        if found is None:
            raise click.UsageError(f"No command or topic {name!r}. Topics: {', '.join(TOPICS)}")
        ctx = found.context_class(found, info_name=word, parent=ctx)
    formatter = _Roff() if man else ctx.make_formatter()
    (ctx.command.format_help_text if name in TOPICS else ctx.command.format_help)(ctx, formatter)
    text = formatter.getvalue().strip("\n")
    title = "-".join(["mqstore", *name.split()])
    head = f'.TH "{title.upper()}" "{7 if name in TOPICS else 1}" "" "mqstore {mqstore.__version__}"'
    about = _escaped(f"{title} - {ctx.command.get_short_help_str(80).rstrip('.')}")
    return f"{head}\n.SH NAME\n{about}\n{text}" if man else text


class _Roff(click.HelpFormatter):
    """Help in the language of man pages."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        self.write(f".SH SYNOPSIS\n{_escaped(f'{prog} {args}')}\n.SH DESCRIPTION\n")

    def write_heading(self, heading: str) -> None:
        self.write(f".SH {_escaped(heading.upper())}\n")

    def write_paragraph(self) -> None:
        pass  # an empty line would be one of the page

    def write_text(self, text: str) -> None:
        for first, *lines in (part.split("\n") for part in text.split("\n\n")):
            if first != "\b":
                self.write(f".PP\n{_escaped(' '.join([first, *lines]))}\n")
                continue
            if re.fullmatch(r"\w+:", lines[0]):
                self.write_heading(lines.pop(0)[:-1])
            self.write("\n".join([".PP", ".nf", *map(_escaped, lines), ".fi", ""]))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        for name, text in rows:
            self.write(f".TP\n.B {_escaped(name)}\n{_escaped(text)}\n")


def _escaped(line: str) -> str:
    r"""Return a line of text for roff.

    >>> print(_escaped("'--a' C:\\"))
    \&'\-\-a' C:\e
    """
    return re.sub(r"^(?=[.'])", r"\\&", line.replace("\\", "\\e").replace("-", "\\-"))
