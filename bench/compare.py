"""Compare two runs of the benchmarks: `python -m bench.compare OLD [NEW] [--worse SHARE]`.

Prints for each answer how many times as good it became, and exits with 1 if one became worse by more than the share.
OLD and NEW are files that `python -m bench` writes; of a history (`history.jsonl`) the newest run that is not NEW is
taken. Exit code 2: a file that holds no results, or two runs that cannot be compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.__main__ import RESULTS
from bench.results import ResultsError, Run, number_text, read_run

WORSE = 0.2


def compare(old: Run, new: Run, worse: float) -> tuple[Table, int, int]:
    """Return a table of the answers that both runs have, how many there are, and how many are worse.

    `worse`: 0.2 takes an answer for worse that is less than 0.8 times as good.
    """
    table = Table()
    for heading in ("question", "body", "beside", "old", "new", "times as good", ""):
        table.add_column(heading, justify="right" if heading in ("body", "old", "new", "times as good") else "left")
    before, count, lost = old.by_key(), 0, 0
    for key, row in new.by_key().items():
        if key not in before:
            continue
        gain = row.gain(before[key].value)
        assert gain is not None
        is_worse = gain < 1 - worse
        count, lost = count + 1, lost + is_worse
        values = (f"{number_text(each.value)} {each.unit}" for each in (before[key], row))
        verdict = "[red]worse[/]" if is_worse else ""
        table.add_row(row.question, f"{row.body_bytes} B", row.beside, *values, f"{gain:.2f}", verdict)
    return table, count, lost


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__.partition("\n\n")[0])
    parser.add_argument("old", type=Path, help="results.json of an earlier run, or a history.jsonl")
    parser.add_argument("new", type=Path, nargs="?", default=RESULTS / "results.json", help="default: the last run")
    parser.add_argument("--worse", type=float, default=WORSE, help="share from which on worse is worse (default: 0.2)")
    options = parser.parse_args(arguments)
    if not 0 <= options.worse < 1:
        parser.error("--worse is a share: 0 or more, and less than 1")
    try:
        new = read_run(options.new)
        old = read_run(options.old, other_than=new)
    except ResultsError as error:
        parser.error(str(error))
    if old.circumstances["share"] != new.circumstances["share"]:
        shares = " and ".join(f"{run.circumstances['share']:g}" for run in (old, new))
        parser.error(f"the runs had {shares} of the messages; run both with the same --share or --quick")
    table, count, lost = compare(old, new, options.worse)
    if not count:
        parser.error(f"{options.old} and {options.new} have no answer in common")
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    if not old.comparable(new):
        console.print("The machines differ, so absolute values (ms, k/s) say little.")
    console.print(f"{lost} of {count} answers became worse by more than {options.worse:.0%}.")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
