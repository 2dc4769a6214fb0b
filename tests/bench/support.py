"""Rows and runs of benchmarks, made up."""

from __future__ import annotations

from typing import Any

from bench.results import Row, Run

__all__ = ["row", "run"]


def row(value: float | None = 2.0, **changed: Any) -> Row:
    made = {"group": "engine", "question": "put", "beside": "queuelib", "body_bytes": 128, "unit": "x rate"}
    return Row(**{**made, "value": value, "low": value, "high": value, **changed})


def run(*rows: Row, **changed: Any) -> Run:
    said = {"started": "2026-11-26T12:00:00+00:00", "commit": "abc", "share": 1.0, "rounds": 7, "load": 0.5}
    return Run({**said, "machine": {"processors": 2}, "versions": {"python": "3.11.2"}, **changed}, [*rows])
