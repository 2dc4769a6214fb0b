"""Jobs over one store or many: checks, reports and exports, each a function and a command.

    verify           check every record, unit, index entry and JSON file
    recover          bring stores in order
    export_parquet   write messages to Parquet; the next run writes what came since
    lag_report       how far groups are behind
    traffic_report   how many messages, how large, when
    trace            a key or message id on its way through topics, retries, delays and dead letters
    dlq_report       what groups gave up, and why
    dlq_resend       send dead letters again

All have one signature: `job(stores, *, jobs=1, spark=None, progress=None, ...)`. `stores` is a path, a glob, several,
paths by the names that reports call them, or a `select`ion of messages. Work is cut into tasks, which run in this
process, in a pool of `jobs` processes, or on the executors of the session `spark` (`mqstore.jobs.runner`). A task opens
the stores it needs, and returns little; the results are the same wherever it runs.

Nothing is imported here: pyarrow is needed only by the jobs that read messages, pyspark by none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mqstore.jobs.dlq import dlq_report, dlq_resend
    from mqstore.jobs.export import export_parquet
    from mqstore.jobs.lag import lag_report
    from mqstore.jobs.recovering import recover
    from mqstore.jobs.tracing import trace
    from mqstore.jobs.traffic import traffic_report
    from mqstore.jobs.verifying import verify
    from mqstore.spark.selection import select

__all__ = [
    "dlq_report",
    "dlq_resend",
    "export_parquet",
    "lag_report",
    "recover",
    "select",
    "trace",
    "traffic_report",
    "verify",
]

_MODULES: Final = {
    "dlq_report": "mqstore.jobs.dlq",
    "dlq_resend": "mqstore.jobs.dlq",
    "export_parquet": "mqstore.jobs.export",
    "lag_report": "mqstore.jobs.lag",
    "recover": "mqstore.jobs.recovering",
    "select": "mqstore.spark.selection",
    "trace": "mqstore.jobs.tracing",
    "traffic_report": "mqstore.jobs.traffic",
    "verify": "mqstore.jobs.verifying",
}
"""Module of each function, which is imported when the function is first asked for."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        found = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
