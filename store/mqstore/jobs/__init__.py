"""Jobs over one store or many: checks, reports and exports, each a function and a command.

    verify           check every record, unit, index entry and JSON file
    recover          repair stores
    export_parquet   write messages to Parquet
    lag_report       report the lag of groups
    traffic_report   count messages and their bytes by time
    trace            follow a key or unique key through topics, retries, delays and dead letters
    dlq_report       count dead letters by group and reason
    dlq_resend       send dead letters again
    clean_target     delete what jobs of Spark staged and never committed

All have one signature: `job(stores, *, spark=None, progress=None, ...)`. `stores` is a path, a glob, a list of them, a
dict of paths by the names shown in reports, or a `select`ion of messages. Work is cut into tasks, which run in this
process, or on the executors of the session `spark` (`mqstore.jobs.runner`). A task opens the stores it needs and
returns a small result, which is the same wherever it runs.

The data source of Spark (`mqstore.spark`) uses the same modules. Jobs are imported when used, because only
`export_parquet` needs pyarrow. None needs pyspark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mqstore.lazy import lazy

if TYPE_CHECKING:
    from mqstore.jobs.dlq import dlq_report as dlq_report
    from mqstore.jobs.dlq import dlq_resend as dlq_resend
    from mqstore.jobs.export import export_parquet as export_parquet
    from mqstore.jobs.lag import lag_report as lag_report
    from mqstore.jobs.options.optiontable import duration_s as duration_s
    from mqstore.jobs.options.selection import select as select
    from mqstore.jobs.tracing import trace as trace
    from mqstore.jobs.traffic import traffic_report as traffic_report
    from mqstore.jobs.verifying import recover as recover
    from mqstore.jobs.verifying import verify as verify
    from mqstore.jobs.writing.publish import clean_target as clean_target

_LAZY: Final = {
    "clean_target": ".writing.publish",
    "dlq_report": ".dlq",
    "dlq_resend": ".dlq",
    "duration_s": ".options.optiontable",
    "export_parquet": ".export",
    "lag_report": ".lag",
    "recover": ".verifying",
    "select": ".options.selection",
    "trace": ".tracing",
    "traffic_report": ".traffic",
    "verify": ".verifying",
}

__all__ = [*_LAZY]
__getattr__ = lazy(__name__, _LAZY)
