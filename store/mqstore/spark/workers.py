"""What makes a Python worker of Spark quick, within tasks and between. Knows no pyspark.

Spark runs as many tasks at once as it has been given processors, so one that reads ahead in a second thread takes the
other's time, and a tenth more for the two to take turns.

A worker serves one task after the other, and collects garbage after each, which looks at every object that the imported
modules have made: with numpy, pyarrow and pyspark some 30 ms for a task of nothing, ten times what the rest of it
takes. `settle` takes what is there when a task begins out of that search, unless the environment variable
`MQSTORE_GC_FREEZE` is 0: it holds for all tasks of the worker, also for those of others.
"""

from __future__ import annotations

import gc
import os
import sys

from mqstore.log.ahead import stay_alone

__all__ = ["settle"]

_DAEMON = "pyspark.daemon"
_known = 0


def settle() -> None:
    """To be called when a task, or a call of a data source, begins. Does nothing in a process that is no worker.

    Once for the modules that are imported by then: what was frozen and becomes garbage in a cycle stays, so this must
    not go on with every task. There is little of it at that moment, for the worker has just collected.
    """
    global _known
    if len(sys.modules) > _known and _is_worker():
        stay_alone()
        if os.environ.get("MQSTORE_GC_FREEZE") != "0":
            gc.freeze()
        _known = len(sys.modules)


def _is_worker() -> bool:
    return getattr(getattr(sys.modules.get("__main__"), "__spec__", None), "name", None) == _DAEMON
