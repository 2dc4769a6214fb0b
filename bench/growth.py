"""How the cost of each operation grows with what the store holds.

    python -m bench.growth [AXIS ...] [--quick] [--json FILE] [--plot FILE]

One store an axis is filled step by step. After each step a process of its own opens it, does each operation a number of
times, and closes it; others inspect and verify it. Costs are CPU time of the whole process, all its threads included,
so a busy machine counts little; "wall" rows are wall time. Memory is RssAnon, the part that the kernel cannot take back
as it can pages of mapped files; "VmHWM" is the peak with those.

The table ends with the growth exponent between the last two steps (cost ~ size ** exponent), and the one that is
expected: 0 for what must not depend on the size, 1 for what looks at everything. "!" marks a row that grows faster.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import math
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mqstore
from bench.harness import scratch
from mqstore.broker.admin.contents import inspect_store
from mqstore.broker.admin.inspect import inspect_broker
from mqstore.jobs import verify

BODY = b"x" * 128
TOPIC, GROUP = "grown", "probe"
HALF_DAY_S = 12 * 3600
Costs = dict[str, float]


@dataclass(frozen=True, slots=True)
class Axis:
    """One size that grows. `fill(store, begin, end)` brings it from `begin` to `end`."""

    steps: tuple[int, ...]
    fill: Callable[[mqstore.Store, int, int], None]
    expected: Mapping[str, float] = field(default_factory=dict)
    """Exponents of rows that may grow; 0 for the others."""


def messages(store: mqstore.Store, begin: int, end: int) -> None:
    for at in range(begin, end, 1000):
        store.put_many(TOPIC, [BODY] * min(1000, end - at))


def queues(store: mqstore.Store, begin: int, end: int) -> None:
    store.create_topic(TOPIC, queues=1)
    store.broker.topics.alter(TOPIC, queues=end, force=True)
    for queue_id in range(begin, end):
        store.put(TOPIC, BODY, queue_id=queue_id)


def topics(store: mqstore.Store, begin: int, end: int) -> None:
    for number in range(begin, end):
        store.create_topic(f"topic-{number}", queues=1)
        store.put(f"topic-{number}", BODY)


def groups(store: mqstore.Store, begin: int, end: int) -> None:
    [queue, *_] = store.queues(TOPIC)
    for number in range(begin, end):
        store.broker.groups.create(f"group-{number}")
        store.commit_offset(f"group-{number}", queue, 1)


def in_flight(store: mqstore.Store, begin: int, end: int) -> None:
    messages(store, begin, end)
    store.log.dispatch()
    popped = begin
    while popped < end:
        popped += len(store.broker.pop(GROUP, TOPIC, min(32, end - popped), invisible=HALF_DAY_S, local=False))


def delayed(store: mqstore.Store, begin: int, end: int) -> None:
    for number in range(begin, end):
        store.put(TOPIC, BODY, delay=3600 + number * 7919 % HALF_DAY_S)


def linear(*rows: str) -> dict[str, float]:
    return dict.fromkeys((*rows, "verify", "inspect"), 1)


TABLES = ("open", "close", "memory", "inspect memory", "verify memory")
# As with RocketMQ, each create writes the whole file of topics or groups, and each save of progress all progress.
CONFIG = linear(*TABLES, "create topic", "create group", "commit, flush", "stats")
AXES = {
    "messages": Axis((10**4, 10**5, 10**6, 10**7), messages, linear()),
    "queues": Axis((1, 10, 100, 1000, 10**4), queues, CONFIG),
    "topics": Axis((1, 10, 100, 1000, 10**4), topics, CONFIG),
    "groups": Axis((1, 10, 100, 1000, 10**4), groups, CONFIG),
    "in flight": Axis((0, 10**4, 10**5, 10**6), in_flight, linear(*TABLES)),
    "delayed": Axis((0, 10**4, 10**5, 10**6), delayed, linear(*TABLES)),
}


def memory_mib(name: str) -> float:
    """Return a line of /proc/self/status, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"this system does not tell {name} of a process")


@contextmanager
def timed(costs: Costs, name: str) -> Iterator[None]:
    """Note CPU and wall time, in milliseconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    yield
    costs[name], costs[f"{name} wall"] = (time.process_time() - cpu) * 1e3, (time.perf_counter() - wall) * 1e3


def rest() -> None:
    """Wait until background threads have done what the calls before left to them."""
    busy = True
    while busy:
        begin = time.process_time()
        time.sleep(0.25)
        busy = time.process_time() - begin > 0.003


def each_us(count: int, work: Callable[[int], object], rounds: int = 3) -> float:
    """CPU time of one call of `work`, in microseconds: the best of `rounds` of `count` calls with numbers from 0."""
    best = math.inf
    for turn in range(rounds):
        rest()
        begin = time.process_time()
        for number in range(turn * count, (turn + 1) * count):
            work(number)
        best = min(best, (time.process_time() - begin) / count * 1e6)
    return best


def serve(path: Path, mark: str) -> Costs:
    """Open the store, do each operation, and close it. `mark` makes names that are new in each step."""
    costs: Costs = {}
    before = memory_mib("RssAnon")
    with timed(costs, "open"):
        store = mqstore.open(path)
    topic = TOPIC if TOPIC in store.topics() else "topic-0"
    [queue, *_] = store.queues(topic)
    broker = store.broker

    def get_and_ack(_: int) -> None:
        [delivery] = broker.pop(GROUP, topic, 1)
        broker.ack(GROUP, topic, [delivery.receipt])

    for _ in store.queues(topic):  # the first put to a queue costs more, however many there are
        store.put(topic, BODY)
    costs["put"] = each_us(3000, lambda _: store.put(topic, BODY))
    costs["put_many, 1000"] = each_us(3, lambda _: store.put_many(topic, [BODY] * 1000))
    store.log.dispatch()
    get_and_ack(0)
    costs["get and ack"] = each_us(1000, get_and_ack)
    broker.pop("idle", topic, start="latest")
    costs["get, nothing there"] = each_us(20, lambda _: broker.pop("idle", topic))
    costs["put with a delay"] = each_us(1000, lambda _: store.put(topic, BODY, delay=HALF_DAY_S))
    costs["read, 32"] = each_us(100, lambda _: store.read(*queue, 0, 32))
    costs["create topic"] = each_us(3, lambda number: store.create_topic(f"{mark}-{number}"))
    costs["create group"] = each_us(3, lambda number: broker.groups.create(f"{mark}-{number}"))
    costs["commit"] = each_us(1000, lambda _: store.commit_offset(GROUP, queue, 1))
    costs["commit, flush"] = each_us(3, lambda _: store.commit_offset(GROUP, queue, 1, durability="flush"))
    costs["stats"] = each_us(5, lambda _: broker.stats())
    time.sleep(12)  # until the flusher has synced what was put: `flush_thorough` and more
    begin = time.process_time()
    time.sleep(6)  # longer than `commit_interval`
    costs["at rest, a second"] = (time.process_time() - begin) / 6 * 1e6
    gc.collect()
    costs["memory"] = memory_mib("RssAnon") - before
    costs["VmHWM"] = memory_mib("VmHWM")
    with timed(costs, "close"):
        store.close()
    return costs


def examine(path: Path, name: str) -> Costs:
    """Inspect or verify the store. The memory is the peak of samples."""
    costs: Costs = {}
    gc.collect()
    before = most = memory_mib("RssAnon")
    done = threading.Event()

    def look() -> None:
        nonlocal most
        while not done.wait(0.01):
            most = max(most, memory_mib("RssAnon"))

    watcher = threading.Thread(target=look)
    watcher.start()
    with timed(costs, name):
        if name == "verify":
            assert verify(path).ok
        else:
            inspect_store(path)
            inspect_broker(path)
    done.set()
    watcher.join()
    costs[f"{name} memory"] = most - before
    return costs


def filled(path: Path, axis: str, begin: int, end: int) -> Costs:
    with mqstore.open(path) as store:
        AXES[axis].fill(store, begin, end)
    return {}


def alone(work: Callable[..., Costs], *arguments: Any) -> Costs:
    """Run `work` in a new process, which has memory and caches of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def measure(name: str, steps: tuple[int, ...]) -> dict[int, Costs]:
    found: dict[int, Costs] = {}
    with scratch(f"growth-{name.replace(' ', '-')}") as folder:
        path, begin = folder / "store", 0
        if name != "topics":
            alone(filled, path, "messages", 0, 20_000)  # what the probes take
        for end in steps:
            alone(filled, path, name, begin, end)
            begin = end
            found[end] = alone(serve, path, f"step-{end}") | alone(examine, path, "inspect")
            found[end] |= alone(examine, path, "verify")
    return found


def exponent(found: Mapping[int, Costs], row: str) -> float:
    """Return how the row grew over the last two steps: 0 is constant, 1 in proportion, 2 as the square."""
    *_, low, high = sorted(found)
    if low < 1 or found[low][row] <= 0 or found[high][row] <= 0:
        return 0.0
    return math.log(found[high][row] / found[low][row]) / math.log(high / low)


def is_judged(row: str) -> bool:
    """Return False for wall time, and for memory that the kernel may take back."""
    return not row.endswith("wall") and row != "VmHWM"


def unit_of(row: str) -> str:
    if "memory" in row or row == "VmHWM":
        return "MiB"
    return "ms" if row.removesuffix(" wall") in ("open", "close", "inspect", "verify") else "us"


def table(name: str, found: Mapping[int, Costs]) -> str:
    """Return the costs as a table in Markdown."""
    head = f"| {name} | unit | {' | '.join(f'{step:,}' for step in found)} | exponent | expected |\n"
    lines = [head, "|---|---|" + "--:|" * (len(found) + 2) + "\n"]
    for row in found[next(iter(found))]:
        grows, expected = exponent(found, row), AXES[name].expected.get(row, 0)
        judged = f"{grows:.2f}{' !' if grows > expected + 0.2 else ''} | {expected}" if is_judged(row) else " | "
        cells = " | ".join(f"{costs[row]:,.4g}" for costs in found.values())
        lines.append(f"| {row} | {unit_of(row)} | {cells} | {judged} |\n")
    return "".join(lines)


def plot(results: Mapping[str, Mapping[int, Costs]], file: Path) -> None:
    """Draw cost beside size, both logarithmic, a panel for each axis."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, panels = pyplot.subplots(1, len(results), figsize=(7 * len(results), 7), squeeze=False)
    for panel, (name, found) in zip(panels[0], results.items(), strict=True):
        for row in filter(is_judged, found[next(iter(found))]):
            panel.loglog([max(1, step) for step in found], [costs[row] for costs in found.values()], "o-", label=row)
        panel.set(title=name, xlabel=name, ylabel="us, ms or MiB: see the table")
        panel.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3)
    figure.savefig(file, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.growth", description=__doc__.partition("\n")[0])
    parser.add_argument("axes", nargs="*", metavar="AXIS", help=", ".join(AXES) + "; without any, all")
    parser.add_argument("--quick", action="store_true", help="without the last step of each axis")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--plot", type=Path, help="draw them into this file; needs matplotlib")
    options = parser.parse_args()
    if unknown := set(options.axes) - set(AXES):
        parser.error(f"no such axis: {', '.join(sorted(unknown))}; there are {', '.join(AXES)}")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    results: dict[str, dict[int, Costs]] = {}
    for name in options.axes or AXES:
        results[name] = measure(name, AXES[name].steps[: -1 if options.quick else None])
        print(table(name, results[name]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=2) + "\n")
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
