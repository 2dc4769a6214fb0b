"""The method `Queue.run`, whose parts are imported at its first call (`queueloop.py`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from mqstore.client.codecs import T
from mqstore.options import Duration

if TYPE_CHECKING:
    from mqstore.client.delivery import Task
    from mqstore.queue import Queue
    from mqstore.queueloop import RunSummary


def run(
    self: Queue[T],
    handler: Callable[[Task[T]], object],
    workers: int = 4,
    *,
    rate: str | None = None,
    rate_per: Callable[[T], Hashable] | None = None,
    grace: Duration = 30,
) -> RunSummary:
    """Handle items in `workers` threads, until SIGTERM, SIGINT or `shutdown`. Log and return a summary.

    `handler(task)` is the body of a `with task:` block. Its end acknowledges the item, and its exception is logged, and
    is a failed attempt. `Retry` and `Reject` are obeyed. The lease is renewed while it runs.

        rate       limit of starts, such as "10/s", "90/h" or "1/2.5s": evenly spaced, without bursts
        rate_per   function of an item. The rate then applies to the items of each result, such as a host. An item that
                   has to wait longer than 0.25 s is given back meanwhile, and holds up no other
        grace      seconds after which the run ends when that was asked for. Then the items of running handlers are
                   released, and their attempts do not count. Their threads cannot be ended

    At SIGTERM, SIGINT and `shutdown(immediate=True)` no further item is taken. After `shutdown()` the items that are
    ready are handled, too. A second signal raises KeyboardInterrupt here. Signals are handled only in the main thread,
    and their former handlers are restored. SystemExit of a handler stops the run, and is raised here. In a handler
    `mqstore.cancelled()` is True when no further item is taken. Each run has its own rate.

    Raises ConfigError for bad options, and for a coroutine function as handler: that is for `mqstore.aio`.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     jobs = store.queue("jobs", codec=mqstore.TEXT)
    ...     receipts = jobs.put_many(["a", "b", "c"])
    ...     jobs.shutdown()  # no more puts, so that the run ends when nothing is ready
    ...     summary = jobs.run(lambda task: task.value.index("b"), workers=2)  # ValueError for "a" and "c"
    ...     summary.handled, summary.failed, jobs.qsize()
    (1, 2, 2)
    """
    from mqstore.queueloop import ThreadRun

    return ThreadRun(self, handler, workers, rate, rate_per, grace).run()
