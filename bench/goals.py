"""How the goals of the data source are measured: sides in turn, the best of five rounds after two that do not count;
for each ratio a line that says whether its goal is met. Ratios are taken between sides of one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

__all__ = ["ROUNDS", "SOCKETS", "WARM_UPS", "Side", "measure", "report"]

ROUNDS, WARM_UPS = 5, 2
SOCKETS = {"spark.python.unix.domain.socket.enabled": "true"}
"""Settings of the sessions that are measured: TCP between Spark and its workers would hide the time of the source.
`mqstore.spark.session` leaves them alone, since pyspark 4.3 then prints a traceback for each idle worker it closes."""

Side = Callable[[], object]


def measure(
    sides: Mapping[str, Side],
    rounds: int = ROUNDS,
    warm_ups: int = WARM_UPS,
    *,
    tidy: Side = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """The best time of each side, in seconds by `clock`. `tidy` comes after each, and does not count."""
    best = dict.fromkeys(sides, float("inf"))
    for number in range(warm_ups + rounds):
        for name, side in sides.items():
            begin = clock()
            side()
            if number >= warm_ups:
                best[name] = min(best[name], clock() - begin)
            tidy()
    return best


def report(number: str, what: str, ratio: float, goal: float | None = None, *, most: bool = False) -> None:
    """A ratio, and beside its goal, which it is to reach, or with `most` not to pass, whether it is met."""
    if goal is None:
        print(f"{number:4} {what:64} {ratio:7.2f}")
        return
    met = ratio <= goal if most else ratio >= goal
    print(
        f"{number:4} {what:64} {ratio:7.2f}   wanted {'<=' if most else '>='} {goal:<5} {'met' if met else 'NOT met'}"
    )
