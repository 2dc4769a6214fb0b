"""A saved run as Markdown: `python -m bench.report [RUN] [--folder DIR]`.

RUN is a file that `pytest bench --benchmark-autosave` saved, by default the newest one in .benchmarks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.goals import HEADINGS, Answer, summary

__all__ = ["main", "write_report"]

_LEGEND = (
    "Values are medians over the rounds, with the lowest and the highest. `x rate`: our rate divided by the other's."
    " `x time`: our time divided by the other's. docs/benchmarks.md says what each question asks."
)


def write_report(run: Path, folder: Path) -> Path:
    """Write `report.md` about a saved run into `folder`. Returns its path.

    Raises ValueError for a file without answers.
    """
    try:
        said = json.loads(run.read_text())
        answers = [Answer(**each) for question in said["benchmarks"] for each in question["extra_info"]["answers"]]
        lines = ["# Benchmarks of mqstore", "", *_circumstances(said), "", f"**{summary(answers)}.** {_LEGEND}", ""]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{run} is not a run that `pytest bench --benchmark-autosave` saved") from error
    folder.mkdir(parents=True, exist_ok=True)
    lines += [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    lines += [f"| {' | '.join(answer.cells())} |" for answer in answers]
    path = folder / "report.md"
    path.write_text("\n".join([*lines, ""]))
    return path


def _circumstances(said: Mapping[str, Any]) -> list[str]:
    machine, commit = said["machine_info"], said["commit_info"]
    packages = ", ".join(f"{name} {version}" for name, version in said["packages"].items())
    dirty = ", with uncommitted changes" if commit.get("dirty") else ""
    return [
        f"Saved {said['datetime'][:19]}, commit {(commit.get('id') or 'unknown')[:12]}{dirty}.",
        f"{said['rounds']} rounds, {said['share']:g} of the messages, load average {said['load']:.1f}.",
        f"{machine['system']} {machine['release']}, {machine['cpu']['count']} x {machine['cpu']['brand_raw']}.",
        f"Python {machine['python_version']}, {packages}.",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, nargs="?", help="default: the newest file in .benchmarks")
    parser.add_argument("--folder", type=Path, default=Path("var", "bench"), help="folder for report.md")
    options = parser.parse_args(arguments)
    run = options.run or max(
        Path(".benchmarks").rglob("[0-9]*_*.json"), key=lambda path: path.stat().st_mtime, default=None
    )
    if run is None:
        parser.error("there is no saved run; `make bench` saves one")
    try:
        print(f"report: {write_report(run, options.folder)}")
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
