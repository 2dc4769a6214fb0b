"""Answer the questions of bench/ as ratios: `python -m bench.compare [QUESTION ...] [--quick] [--json FILE]`.

Each round times every side of a question once, one right after the other, in an order that turns from round to round.
A ratio is taken within its round; the report gives the median over the rounds and how far they spread. Absolute rates
are printed to give a feeling, and are not to be compared between runs or machines.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.harness import BODY_SIZES, SEED, Load, Question, Sample, Side, measure
from bench.peers import PEERS
from bench.targets import target_for

MODULES = (
    "test_put",
    "test_put_many",
    "test_flush",
    "test_read",
    "test_reput",
    "test_recovery",
    "test_open",
    "test_pop",
    "test_delay",
    "test_queue",
    "test_push",
)
WARM_UP_MESSAGES = 1000


def rate_text(rate: float, unit: str) -> str:
    """A rate as people read it.

    >>> rate_text(612_345.0, "messages"), rate_text(2.5e9, "bytes"), rate_text(80.0, "openings")
    ('612 k/s', '2.50 GB/s', '12.5 ms')
    """
    if unit == "openings":
        return f"{1000 / rate:.1f} ms"
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if rate >= factor:
            digits = 2 if rate / factor < 10 else 1 if rate / factor < 100 else 0
            return f"{rate / factor:.{digits}f} {letter}{'B' if unit == 'bytes' else ''}/s"
    return f"{rate:.0f} {'B' if unit == 'bytes' else ''}/s"


def ratio_text(ratio: float) -> str:
    """A ratio to three figures: 0.954, 12.2, 1034."""
    return f"{ratio:.0f}" if ratio >= 100 else f"{ratio:.3g}"


def run_rounds(
    question: Question, sides: Sequence[Side], load: Load, rounds: int, parent: Path | None
) -> dict[str, list[Sample]]:
    """`rounds` samples of each side, by name; one small unmeasured round goes before."""
    for side in sides:
        measure(question, side, Load(load.body_bytes, min(WARM_UP_MESSAGES, load.messages)), parent=parent)
    samples: dict[str, list[Sample]] = {side.name: [] for side in sides}
    for number in range(rounds):
        turn = number % len(sides)
        order = [*sides[turn:], *sides[:turn]]
        for side in order:
            samples[side.name].append(measure(question, side, load, parent=parent))
    return samples


def answer(question: Question, load: Load, samples: dict[str, list[Sample]]) -> list[dict[str, Any]]:
    """One row for each thing our side is held against: plain values, as `--json` writes them."""
    ours = samples[question.ours.name]
    beside = {peer.name: [sample.rate for sample in samples[peer.name]] for peer in question.peers}
    if question.limit_seconds is not None:
        beside[f"limit of {question.limit_seconds * 1000:.0f} ms"] = [1 / question.limit_seconds] * len(ours)
    rows = []
    for name, rates in beside.items():
        ratios = [mine.rate / other for mine, other in zip(ours, rates, strict=True)]
        median = statistics.median(ratios)
        target = target_for(question.name, name)
        rate = statistics.median(sample.rate for sample in ours)
        rows.append(
            {
                "question": question.name,
                "body_bytes": load.body_bytes,
                "messages": load.messages,
                "unit": question.unit,
                "ours": question.ours.name,
                "ours_rate": rate,
                "peer": name,
                "peer_rate": statistics.median(rates),
                "ratio": median,
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
                "ratios": ratios,
                "target": str(target) if target else None,
                "met": target.met(median, rate) if target else None,
            }
        )
    return rows


def answer_peers_alone(question: Question, load: Load, samples: dict[str, list[Sample]]) -> list[dict[str, Any]]:
    """Rates of the peers, nothing to compare them with."""
    rows = []
    for name, timings in samples.items():
        rates = [sample.rate for sample in timings]
        rows.append(
            {
                "question": question.name,
                "body_bytes": load.body_bytes,
                "messages": load.messages,
                "unit": question.unit,
                "peer": name,
                "peer_rate": statistics.median(rates),
                "peer_rate_min": min(rates),
                "peer_rate_max": max(rates),
            }
        )
    return rows


def render(question: Question, rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=f"{question.name}: {question.title}", title_justify="left", title_style="bold")
    alone = all("ratio" not in row for row in rows)
    for heading in ("body", *(() if alone else ("mqstore",)), "beside"):
        table.add_column(heading, justify="left" if heading == "beside" else "right", no_wrap=True)
    for heading in ("its rate", *(("spread",) if alone else ("ratio", "spread", "target"))):
        table.add_column(heading, justify="right", no_wrap=True)
    if not alone:
        table.add_column("verdict")
    for row in rows:
        unit = row["unit"]
        body = f"{row['body_bytes']} B"
        if alone:
            spread = f"{rate_text(row['peer_rate_min'], unit)} .. {rate_text(row['peer_rate_max'], unit)}"
            table.add_row(body, row["peer"], rate_text(row["peer_rate"], unit), spread)
            continue
        table.add_row(
            body,
            rate_text(row["ours_rate"], unit),
            row["peer"],
            rate_text(row["peer_rate"], unit),
            f"{ratio_text(row['ratio'])} x",
            f"{ratio_text(row['ratio_min'])} .. {ratio_text(row['ratio_max'])}",
            row["target"] or "",
            {None: "", True: "[green]met[/]", False: "[red]not met[/]"}[row["met"]],
        )
    return table


def circumstances(rounds: int, quick: bool) -> dict[str, Any]:
    """Where and how the figures came about."""
    packages = {}
    for name in (
        "mqstore",
        "numpy",
        "crc32c",
        "lmdb",
        "queuelib",
        "persist-queue",
        "litequeue",
        "localqueue",
        "diskcache",
    ):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = "not installed"
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processors": os.cpu_count(),
        "packages": packages,
        "seed": SEED,
        "rounds": rounds,
        "quick": quick,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    questions = {question.name: question for name in MODULES for question in import_module(f"bench.{name}").QUESTIONS}
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description="mqstore beside its peers, as ratios.")
    parser.add_argument(
        "questions", nargs="*", metavar="QUESTION", help=f"any of: {', '.join(questions)} (default: all)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of the messages, three rounds: a first impression"
    )
    parser.add_argument("--rounds", type=int, help="how often each side is timed (default: 7, quick: 3)")
    parser.add_argument("--body", type=int, action="append", choices=BODY_SIZES, help="only this body size, in bytes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples' ratios there as well")
    parser.add_argument("--directory", type=Path, help="where stores are made (default: ./var/bench); use a real disk")
    parser.add_argument("--peers-only", action="store_true", help="time the peers alone, without mqstore")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.questions if name not in questions]:
        parser.error(f"no such question: {', '.join(unknown)}; there are {', '.join(questions)}")
    rounds = options.rounds or (3 if options.quick else 7)

    # Into a pipe or a file rich would fold the tables to 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 120)
    results: list[dict[str, Any]] = []
    for name in options.questions or questions:
        question = questions[name]
        sides = [side for side in question.sides if not options.peers_only or side in PEERS]
        if not sides:
            continue
        rows: list[dict[str, Any]] = []
        for body_bytes in options.body or BODY_SIZES:
            load = question.load(body_bytes, quick=options.quick)
            with console.status(f"{name}, {body_bytes} B"):
                samples = run_rounds(question, sides, load, rounds, options.directory)
            rows += (answer_peers_alone if options.peers_only else answer)(question, load, samples)
        console.print(render(question, rows))
        results += rows
        if options.json:
            report = {"circumstances": circumstances(rounds, options.quick), "results": results}
            options.json.write_text(json.dumps(report, indent=2) + "\n")

    verdicts = [row["met"] for row in results if row.get("met") is not None]
    if verdicts:
        console.print(
            f"{sum(verdicts)} of {len(verdicts)} targets met; ratios are medians over {rounds} rounds, seed {SEED}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
