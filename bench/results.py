"""Answers of a run as rows, with where and how they came about. A run is one JSON object, a history has one a line."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["UNITS", "ResultsError", "Row", "Run", "circumstances", "number_text", "read_history", "read_run"]

UNITS = {"x rate": True, "x time": False, "k/s": True, "ms": False}
"""Units of a value. True: more is better. The first two are ratios: our rate, or our time, divided by the other's."""

_VERSION = 1
_PACKAGES = (
    *("mqstore", "numpy", "crc32c", "lmdb", "queuelib", "persist-queue", "litequeue", "localqueue", "diskcache"),
    *("redis", "hiredis"),
)


class ResultsError(Exception):
    """A file that holds no results of a benchmark, or results that cannot be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One answer: a question at one body size, beside one peer."""

    group: str
    question: str
    beside: str
    """Peer or case; empty for a value that stands alone."""
    body_bytes: int
    unit: str
    """One of `UNITS`."""
    value: float | None
    """Median over the rounds. None: left out, and `said` gives the reason."""
    low: float | None = None
    high: float | None = None
    goal: float | None = None
    said: str = ""
    """Absolute figures for people."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """The same figures, and more, for programs."""

    @property
    def key(self) -> tuple[str, str, int, str]:
        """Identity of an answer in other runs."""
        return self.question, self.beside, self.body_bytes, self.unit

    @property
    def more_is_better(self) -> bool:
        return UNITS[self.unit]

    @property
    def met(self) -> bool | None:
        """Return True if the goal is reached, and None without a goal or a value."""
        reached = self.gain(self.goal)
        return None if reached is None else reached >= 1

    def gain(self, other: float | None, value: float | None = None) -> float | None:
        """Return how many times as good `value` (default: this row's) is as `other`; None if either is missing."""
        value = self.value if value is None else value
        if not value or not other:
            return None
        return value / other if self.more_is_better else other / value


@dataclass(frozen=True, slots=True)
class Run:
    """All answers of one run of the benchmarks."""

    circumstances: Mapping[str, Any]
    rows: list[Row]

    def by_key(self) -> dict[tuple[str, str, int, str], Row]:
        """Rows that have a value, by their identity."""
        return {row.key: row for row in self.rows if row.value is not None}

    def comparable(self, other: Run) -> bool:
        """Return True if both runs had the same share of the messages on a machine of the same description."""
        return all(self.circumstances[name] == other.circumstances[name] for name in ("share", "machine"))

    def to_json(self, indent: int | None = None) -> str:
        rows = [{**asdict(row), "met": row.met} for row in self.rows]
        return json.dumps({"version": _VERSION, **self.circumstances, "results": rows}, indent=indent)

    @classmethod
    def from_json(cls, text: str, source: object) -> Run:
        """Raises ResultsError, with the name of `source`, for anything but the results of a run."""
        try:
            found = json.loads(text)
            if found.pop("version") != _VERSION:
                raise ResultsError(f"{source} has another version of results than {_VERSION}; run the benchmarks again")
            rows = [{name: value for name, value in row.items() if name != "met"} for row in found.pop("results")]
            run = cls(found, [Row(**row) for row in rows])
            if not {"share", "machine", "started"} <= found.keys() or {row.unit for row in run.rows} - {*UNITS}:
                raise ValueError("members are missing, or a unit is unknown")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ResultsError(
                f"{source} holds no results of `python -m bench`, which writes results.json and history.jsonl"
            ) from error
        return run


def read_history(path: Path) -> list[Run]:
    """Return the runs of a history, oldest first; none if the file does not exist."""
    if not path.exists():
        return []
    return [Run.from_json(line, f"line {n} of {path}") for n, line in enumerate(path.read_text().splitlines(), 1)]


def read_run(path: Path, other_than: Run | None = None) -> Run:
    """Return the run in `path`. Of a history (`.jsonl`) that is its newest run which did not begin with `other_than`.

    Raises ResultsError for a file that cannot be read or holds nothing of the kind.
    """
    try:
        if path.suffix != ".jsonl":
            return Run.from_json(path.read_text(), path)
        started = other_than and other_than.circumstances["started"]
        runs = [run for run in read_history(path) if run.circumstances["started"] != started]
    except (OSError, UnicodeDecodeError) as error:
        raise ResultsError(f"{path} cannot be read: {error}") from error
    if not runs:
        raise ResultsError(f"{path} has no earlier run; give the file of one, or run the benchmarks twice")
    return runs[-1]


def circumstances(**chosen: Any) -> dict[str, Any]:
    """Return machine, versions, commit and time of a run, with what was `chosen` for it."""
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": {"system": platform.platform(), "processor": _processor(), "processors": os.cpu_count()},
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "load": os.getloadavg()[0],
        **chosen,
    }


def number_text(number: float | None) -> str:
    """A number to three figures: 0.954, 12.2, 1034.

    >>> number_text(0.95432), number_text(12.249), number_text(1034.4), number_text(None)
    ('0.954', '12.2', '1034', '')
    """
    return "" if number is None else f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _commit() -> str | None:
    """Commit of the sources, with a `+` if files have changed since; None outside of a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + "+" * bool(git("status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):
        return None
