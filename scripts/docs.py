"""`python -m scripts.docs FILE`: print a file with its generated parts made again.

docs/commands.md        all of it: the commands' own help
docs/spark-options.md   its tables; the text between them is written by hand
store/native/table.h    all of it: the numbers that C shares with Python

`python -m scripts.docs --man DIR` writes a man page of each command and topic into a directory.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from mqstore_tools.concepts import TOPICS
from mqstore_tools.help import page as help_page
from mqstore_tools.main import cli

__all__ = ["man_pages", "native_table", "page", "with_tables"]

_WIDTH = 100
_HELP = re.compile(r"(\nOptions:\n)?  -h, --help +Show this message and exit\.\n?")
"""The option that all commands have, which the page names once."""

_HEAD = """\
# The command `mqstore`

Every command with its options and examples. `make docs` writes this page from the commands' own help.

    mqstore --help
    mqstore COMMAND --help

Exit codes: 0 done, 1 findings ([recovery.md](recovery.md#findings)), 2 wrong usage, 3 the directory cannot be opened,
read or written. Contents of a store are printed escaped, without control sequences. Every command has `-h, --help`.
"""


def page() -> str:
    """Return the page, the same at any width of terminal."""
    wide = {**cli.context_settings, "terminal_width": _WIDTH, "max_content_width": _WIDTH}
    with click.Context(cli, info_name="mqstore", **wide) as ctx:
        topics = [f"## mqstore help {name}\n\n```text\n{help_page(ctx, [name], man=False)}\n```\n" for name in TOPICS]
        return "\n".join([_HEAD, _block("mqstore", cli, None), *_blocks("mqstore", cli, ctx), *topics])


def man_pages(folder: Path) -> None:
    """Write a man page of each command and topic."""
    folder.mkdir(parents=True, exist_ok=True)
    titles = ["mqstore", *re.findall("^## (mqstore .+)", page(), re.M)]
    with click.Context(cli, info_name="mqstore", **cli.context_settings) as ctx:
        for _, *words in map(str.split, titles):
            topic = any(word in TOPICS for word in words)
            words = words[-1:] if topic else words
            name = f"{'-'.join(['mqstore', *words])}.{7 if topic else 1}"
            (folder / name).write_text(help_page(ctx, words, man=True) + "\n", encoding="utf-8")


def _blocks(title: str, group: click.Group, ctx: click.Context) -> Iterator[str]:
    """Yield the commands of a group, each followed by its sub-commands."""
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
        text = _HELP.sub("", command.get_help(ctx))
    return f"## {title}\n\n```text\n{text.rstrip()}\n```\n"


_TABLE = re.compile(r"(<!-- table: ([a-z ]+) -->\n)\n*(?:\|.*\n)*\n*")


def with_tables(text: str) -> str:
    """Return spark-options.md with its tables made again. Each follows a comment with its name."""
    from mqstore.columnar.columns import COLUMNS
    from mqstore.columnar.inputs import INPUTS
    from mqstore.jobs.options.options import SINK_OPTIONS, SOURCE_OPTIONS
    from mqstore.jobs.views import VIEWS

    tables = {
        "columns": _table(
            "Column|Type|Cost|What it is", ([f"`{c.name}`", f"`{c.sql}`", c.cost, c.meaning] for c in COLUMNS.values())
        ),
        "views": _table(
            "View|Columns",
            (
                [f"`{view}`", ", ".join(f"`{name}` {sql}" for name, sql in t.columns.items())]
                for view, t in VIEWS.items()
            ),
        ),
        "sink columns": _table(
            "Column|Type|Null or missing|Meaning",
            ([f"`{each.name}`", " or ".join(each.types), each.absent, each.meaning] for each in INPUTS.values()),
        ),
    }
    for name, options in (("source options", SOURCE_OPTIONS), ("sink options", SINK_OPTIONS)):
        cells = ([f"`{o.name}`", o.default or "-", o.accepts, o.meaning] for o in options.options.values())
        tables[name] = _table("Option|Default|Accepts|Meaning", cells)
    return _TABLE.sub(lambda found: f"{found[1]}\n{tables[found[2]]}\n", text).rstrip() + "\n"


def _table(names: str, rows: Iterable[list[str]]) -> str:
    """Return a table in Markdown. `names` are those of its columns, separated by bars."""
    lines = [f"| {names.replace('|', ' | ')} |", "|" + "---|" * len(names.split("|"))]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def native_table() -> str:
    """Return table.h: the integers of these modules that C uses, without the underscore of a private name."""
    from mqstore.broker.pop import batch, state
    from mqstore.layout import consumequeue, hosts, indexfile, properties, record
    from mqstore.log.writing import outgoing

    files = [file for file in Path(__file__).parents[1].glob("store/native/*.[ch]") if file.name != "table.h"]
    used = {name for file in files for name in re.findall(r"\b[A-Z][A-Z0-9_]+\b", file.read_text(encoding="utf-8"))}
    lines = ["/* The numbers that C shares with Python, written by `make docs`; don't edit them. */"]
    for module in (hosts, properties, record, consumequeue, indexfile, outgoing, batch, state):
        lines.append(f"/* {module.__name__} */")
        numbers = [(name.strip("_"), value) for name, value in vars(module).items() if type(value) is int]
        found = [f"#define {name} {value}" for name, value in numbers if name in used]
        lines += [line for line in found if line not in lines]  # a name may have been imported from a module before
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    file = Path(sys.argv[-1])
    if "--man" in sys.argv:
        man_pages(file)
        sys.exit()
    made = {"commands.md": page, "table.h": native_table}.get(file.name)
    print(made() if made else with_tables(file.read_text(encoding="utf-8")), end="")
