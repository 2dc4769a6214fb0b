"""Recovery of stores, each by a task: `log/recovery/repair.py` in one store or many."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Unpack

from mqstore.broker.configchecks import CONFIG_CHECKS
from mqstore.broker.pop.log import unreadable_records
from mqstore.errors import MQStoreError
from mqstore.files.filesystem import REAL
from mqstore.files.quiet import QUIET
from mqstore.jobs.plan import StoreName
from mqstore.jobs.runner import Progress, Runner, Where
from mqstore.jobs.selection import Selection, Stores, check_followed, select
from mqstore.log.recovery.recover import RecoverOptions
from mqstore.log.recovery.repair import recover_store
from mqstore.log.recovery.report import RecoveryReport

__all__ = ["Recovered", "recover"]


@dataclass(frozen=True, slots=True)
class Recovered:
    """Result of recovering one store, or of a dry run."""

    store: str
    path: str
    report: RecoveryReport | None
    error: str | None
    """Reason why the store could not be recovered, or None if it could."""


def recover(
    stores: Stores | Selection, *, options: RecoverOptions | None = None, **where: Unpack[Where]
) -> tuple[Recovered, ...]:
    """Recover each of the stores as `mqstore recover` does, and return what was done, store by store.

    A store that cannot be recovered is named with its error, and the others are recovered. With a single store the
    error is raised. `options`: as of `recover_store`. `jobs`, `spark` and `progress`: see `mqstore.jobs`. With a single
    store in this process, progress is in bytes of its log. Raises ConfigError.
    """
    chosen = select(stores)
    check_followed(chosen)
    names = chosen.stores()
    work = partial(_recover, options or RecoverOptions())
    with Runner(**where) as runner:
        if len(names) == 1 and where.get("spark") is None:
            report = work(names[0], where.get("progress"))
            return (Recovered(names[0].id, names[0].path, report, None),)
        return tuple(runner.run(names, partial(_attempt, work), "mqstore recover"))


def _attempt(work: partial[RecoveryReport], name: StoreName) -> Recovered:
    try:
        return Recovered(name.id, name.path, work(name), None)
    except (MQStoreError, OSError) as error:
        return Recovered(name.id, name.path, None, str(error))


def _recover(options: RecoverOptions, name: StoreName, progress: Progress | None = None) -> RecoveryReport:
    fs = QUIET if options.dry_run else REAL
    work = partial(recover_store, json_checks=CONFIG_CHECKS, record_check=unreadable_records)
    return work(name.path, options, progress=progress, fs=fs)
