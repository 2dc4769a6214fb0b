"""Ask the questions of bench/: `python -m bench [NAME ...] [--quick]`. See docs/benchmarks.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.endtoend import CASES, Case
from bench.harness import BODY_SIZES, SEED, Question, Settings
from bench.questions import QUESTIONS
from bench.report import summary, table, write_run
from bench.results import ResultsError, Row, Run, circumstances, read_history

RESULTS = Path("var", "bench", "results")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure mqstore beside its peers.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="questions or groups (default: all); see --list")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    parser.add_argument("--quick", action="store_true", help="--share 0.01 --rounds 1 --body 128: does everything run?")
    parser.add_argument("--share", type=float, help="of the messages, and of the seconds of latencies (default: 1)")
    parser.add_argument("--rounds", type=int, help="how often each side is timed (default: 7; latencies at most 3)")
    parser.add_argument("--body", type=int, action="append", choices=BODY_SIZES, help="only this body size, in bytes")
    parser.add_argument("--directory", type=Path, help="where stores are made (default: var/bench); use a real disk")
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        help=f"folder for results.json, report.md, its plots, and history.jsonl (default: {RESULTS})",
    )
    return parser


def _settings(options: argparse.Namespace) -> Settings:
    share, rounds, body_sizes = (0.01, 1, BODY_SIZES[:1]) if options.quick else (1.0, 7, BODY_SIZES)
    return Settings(
        options.share or share, options.rounds or rounds, tuple(options.body or body_sizes), options.directory
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    asked: list[Question | Case] = [*QUESTIONS, *CASES]
    groups = list(dict.fromkeys(each.group for each in asked))
    if unknown := set(options.names) - {*groups, *(each.name for each in asked)}:
        parser.error(f"no question or group is called {', '.join(sorted(unknown))}; --list prints all names")
    if (options.share or 1) <= 0 or (options.rounds or 1) < 1:
        parser.error("--share has to be more than 0, and --rounds at least 1")
    chosen = [each for each in asked if not options.names or {each.name, each.group} & {*options.names}]
    if options.list:
        for each in chosen:
            print(f"{each.group:10} {each.name:24} {each.title}")
        return 0
    settings = _settings(options)
    history = options.results / "history.jsonl"
    try:
        before = read_history(history)
    except ResultsError as error:
        parser.error(f"{error}. Move the file away, or name another folder by --results.")

    # Into a pipe or a file rich would fold the tables to 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 160)
    run = Run(circumstances(share=settings.share, rounds=settings.rounds, seed=SEED), [])
    try:
        for group in groups:
            rows: list[Row] = []
            for each in chosen:
                if each.group == group:
                    with console.status(each.name):
                        rows += each.ask(settings)
            if rows:
                console.print(table(group, rows))
            run.rows.extend(rows)
    finally:  # Answers so far are not lost to the question after them.
        if run.rows:
            console.print(f"{summary(run)}; report: {write_run(run, before, options.results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
