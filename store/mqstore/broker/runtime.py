"""What RocketMQ's brokers tell of themselves by name (broker-semantics 13), of what is counted here.

    stats of the store, counters, progress of delay levels and timer --- `values` --> name -> value
    counters, every ten seconds --- `sample` --> rates over 10, 60 and 600 s, and what they were at midnight

Nothing is counted for these names alone but failures, reads that found nothing, and the longest of each. Names that
have no meaning here are not there: `dispatchMaxBuffer` (between log and queues nothing is buffered, what is behind is
`dispatchBehindBytes`) and `pageCacheLockTimeMills` (a put holds its lock for the copy of one record, and never waits
for the disk under it; the longest is `putMessageEntireTimeMax`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from mqstore.broker import statistics as names
from mqstore.broker.names import HALF_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC

if TYPE_CHECKING:
    from mqstore.broker.delay import DelayService
    from mqstore.broker.parts import Parts
    from mqstore.broker.reading import Reads
    from mqstore.broker.statistics import Samples
    from mqstore.broker.timer import TimerService
    from mqstore.log.stats import StoreStats

__all__ = ["LEVEL_OFFSETS", "RUNTIME_HELP", "Runtime", "RuntimeValue", "message_type", "runtime_series"]

RuntimeValue = int | float | str | tuple[float, float, float] | Mapping[float, int]

_PERIOD_MS: Final = 10_000
_SPANS: Final = (1, 6, 60)
"""10, 60 and 600 s, in periods."""
LEVEL_OFFSETS: Final = "scheduleMessageOffset_"
"""Followed by the number of a delay level."""
_SERVES: Final = {SCHEDULE_TOPIC: "delay", TIMER_TOPIC: "delay", HALF_TOPIC: "transaction"}
_RATES: Final = ("10s", "60s", "600s")

_NAMES: Final[dict[str, tuple[str, str]]] = {
    "putMessageTimesTotal": ("counter", "Messages put."),
    "putMessageSizeTotal": ("counter", "Bytes appended to the log."),
    "putMessageAverageSize": ("gauge", "Bytes appended for a message, on average."),
    "putMessageFailedTimes": ("counter", "Puts that raised."),
    "putMessageEntireTimeMax": ("gauge", "Milliseconds that the longest put of a sample took."),
    "putMessageDistributeTime": ("counter", "Sampled puts that took less than `below_ms`, and at least half of it."),
    "putLatency99": ("gauge", "Milliseconds in which 99 % of a sample of puts were done."),
    "putLatency999": ("gauge", "Milliseconds in which 99.9 % of a sample of puts were done."),
    "getMessageEntireTimeMax": ("gauge", "Milliseconds that the longest read took that found something."),
    "putTps": ("gauge", "Messages put a second."),
    "getFoundTps": ("gauge", "Reads and pops a second that gave messages."),
    "getMissTps": ("gauge", "Looks at a queue a second that found nothing."),
    "getTotalTps": ("gauge", "The two together."),
    "getTransferredTps": ("gauge", "Messages a second that consumers were given."),
    "bootTimestamp": ("gauge", "When the store was opened, in ms since the epoch."),
    "dispatchBehindBytes": ("gauge", "Bytes appended and not yet visible to readers."),
    "remainHowManyDataToFlush": ("gauge", "Bytes appended and not yet known to be on disk."),
    "commitLogMaxOffset": ("gauge", "Physical offset of the next record."),
    "commitLogMinOffset": ("gauge", "Physical offset of the first record kept."),
    "commitLogDiskRatio": ("gauge", "How full the file system of the log is, 0 to 1."),
    "consumeQueueDiskRatio": ("gauge", "How full the file system of the queues is: that of the log."),
    "earliestMessageTimeStamp": ("gauge", "When the oldest message kept was stored, ms since the epoch; -1 without."),
    "scheduleMessageOffset": ("gauge", "A delay level's next offset to look at (of=delay), and its end (of=max)."),
    "timerReadBehind": ("gauge", "Seconds that the timer is behind with messages that are due."),
    "timerOffsetBehind": ("gauge", "Messages that came to the timer and are not in its wheel yet."),
    "timerCongestNum": ("gauge", "Messages that wait in the timer."),
    "msgPutTotalToday": ("gauge", "Messages of users put since midnight, local time, or since the store was opened."),
    "msgGetTotalToday": ("gauge", "Messages that consumers were given since then."),
}  # fmt: skip

RUNTIME_HELP: Final = {f"mqstore_{name}": told for name, told in _NAMES.items()}
"""Series -> its type and what it tells."""


class _Counted(NamedTuple):
    """What rates are made of; since opening."""

    puts: int = 0
    """Of all topics, as the other three; what a day has is told without the engine's own."""
    found: int = 0
    missed: int = 0
    transferred: int = 0


class Runtime:
    """Values by RocketMQ's names. Thread-safe."""

    def __init__(self, parts: Parts, reads: Reads, delay: DelayService, timer: TimerService) -> None:
        self._store = parts.store
        self._clock = parts.clock
        self._statistics = parts.statistics
        self._reads = reads
        self._delay = delay
        self._timer = timer
        self._lock = threading.Lock()
        self._samples: deque[tuple[int, _Counted]] = deque(maxlen=_SPANS[-1] + 1)
        self._samples.append((parts.clock.monotonic_ms(), _Counted()))
        self._day = _day(parts.clock.now_ms())
        self._morning = 0, 0

    def sample(self) -> None:
        """Note where the counters stand, if that is due."""
        now_ms = self._clock.monotonic_ms()
        with self._lock:
            if now_ms - self._samples[-1][0] >= _PERIOD_MS:
                self._samples.append((now_ms, self._counted()))
            self._today()

    def _counted(self) -> _Counted:
        puts, gets, missed = self._statistics.totals(
            names.BROKER_PUT_NUMS, names.BROKER_GET_NUMS, names.BROKER_GET_MISSES
        )
        return _Counted(puts.value, gets.times, missed.value, gets.value)

    def _today(self) -> tuple[int, int]:
        """Put and got since midnight. Under the lock."""
        puts, gets = self._statistics.totals(
            names.BROKER_PUT_NUMS_WITHOUT_SYSTEM_TOPIC, names.BROKER_GET_NUMS_WITHOUT_SYSTEM_TOPIC
        )
        day = _day(self._clock.now_ms())
        if day != self._day:  # noticed within ten seconds, as long as somebody keeps house
            self._day, self._morning = day, (puts.value, gets.value)
        return puts.value - self._morning[0], gets.value - self._morning[1]

    def values(self, stats: StoreStats) -> Mapping[str, RuntimeValue]:
        """Name -> value; `stats` of the store, taken before what is behind was dispatched."""
        with self._lock:
            samples = list(self._samples)
            put_today, got_today = self._today()
        rates = {field: _rates(samples, i) for i, field in enumerate(_Counted._fields)}
        levels = {f"{LEVEL_OFFSETS}{level}": f"{at},{end}" for level, (at, end) in self._delay.progress().items()}
        found, missed = rates["found"], rates["missed"]
        values: dict[str, RuntimeValue] = {
            "putMessageTimesTotal": stats.puts,
            "putMessageSizeTotal": stats.put_bytes,
            "putMessageAverageSize": stats.put_bytes / stats.puts if stats.puts else 0.0,
            "putMessageFailedTimes": stats.failed_puts,
            "putMessageEntireTimeMax": stats.put_longest_ns / 1e6,
            "putMessageDistributeTime": MappingProxyType({ns / 1e6: n for ns, n in stats.put_latency_ns.items()}),
            "putLatency99": _percentile_ms(stats.put_latency_ns, 99),
            "putLatency999": _percentile_ms(stats.put_latency_ns, 99.9),
            "getMessageEntireTimeMax": self._reads.longest_ns / 1e6,
            "putTps": rates["puts"],
            "getFoundTps": found,
            "getMissTps": missed,
            "getTotalTps": (found[0] + missed[0], found[1] + missed[1], found[2] + missed[2]),
            "getTransferredTps": rates["transferred"],
            "bootTimestamp": stats.opened_ms,
            "dispatchBehindBytes": stats.dispatch_lag_bytes,
            "remainHowManyDataToFlush": stats.flush_lag_bytes,
            "commitLogMaxOffset": stats.max_offset,
            "commitLogMinOffset": stats.min_offset,
            "commitLogDiskRatio": stats.disk_ratio,
            "consumeQueueDiskRatio": stats.disk_ratio,
            "earliestMessageTimeStamp": self._earliest_ms(stats.min_offset),
            **levels,
            "timerReadBehind": self._timer.behind_ms(self._clock.now_ms()) // 1000,
            "timerOffsetBehind": self._timer.unplaced(),
            "timerCongestNum": self._timer.waiting(),
            "msgPutTotalToday": put_today,
            "msgGetTotalToday": got_today,
        }
        return MappingProxyType(values)

    def _earliest_ms(self, physical_offset: int) -> int:
        try:
            return self._store.at(physical_offset).store_timestamp_ms
        except LookupError:  # none, or none that can be read
            return -1


def runtime_series(values: Mapping[str, RuntimeValue]) -> dict[str, float | Samples]:
    """The same as Prometheus' series: those of rates by `window`, of delay levels by `level`."""
    series: dict[str, float | Samples] = {}
    levels: Samples = []
    for name, value in values.items():
        if isinstance(value, str):
            level = name.removeprefix(LEVEL_OFFSETS)
            at, end = value.split(",")
            levels += [({"level": level, "of": "delay"}, int(at)), ({"level": level, "of": "max"}, int(end))]
        elif isinstance(value, tuple):
            series[f"mqstore_{name}"] = [({"window": window}, rate) for window, rate in zip(_RATES, value, strict=True)]
        elif isinstance(value, Mapping):
            series[f"mqstore_{name}"] = [({"below_ms": f"{ms:g}"}, count) for ms, count in value.items()]
        else:
            series[f"mqstore_{name}"] = value
    series[f"mqstore_{LEVEL_OFFSETS[:-1]}"] = levels
    return series


def _rates(samples: list[tuple[int, _Counted]], field: int) -> tuple[float, float, float]:
    """Growth a second over the last 10, 60 and 600 s, or as long as there are samples."""
    newest_ms, newest = samples[-1]
    found = []
    for periods in _SPANS:
        then_ms, then = samples[max(0, len(samples) - 1 - periods)]
        span_ms = newest_ms - then_ms
        found.append((newest[field] - then[field]) * 1000 / span_ms if span_ms else 0.0)
    return found[0], found[1], found[2]


def _percentile_ms(buckets: Mapping[int, int], percent: float) -> float:
    wanted, seen = sum(buckets.values()) * percent / 100, 0
    for bound_ns in sorted(buckets):
        seen += buckets[bound_ns]
        if seen >= wanted:
            return bound_ns / 1e6
    return 0.0


def _day(now_ms: int) -> tuple[int, int]:
    local = time.localtime(now_ms / 1000)
    return local.tm_year, local.tm_yday


def message_type(topic: str, declared: str | None) -> str:
    """What a topic's messages are, in RocketMQ's words for its metrics: what it was declared to be, or serves for.

    >>> message_type("orders", "FIFO"), message_type("orders", None), message_type(SCHEDULE_TOPIC, None)
    ('fifo', 'unspecified', 'delay')
    """
    return _SERVES.get(topic) or (declared or "UNSPECIFIED").lower()
