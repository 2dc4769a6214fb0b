"""Recovery of stores in tests, on any file system."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mqstore import StoreConfig
from mqstore.files.filesystem import FileSystem
from mqstore.files.jsonfile import Check
from mqstore.layout.checkpoint import Checkpoint, encode
from mqstore.log.recovery.recover import RecoverOptions
from mqstore.log.recovery.repair import rebuild_config, recover_store
from mqstore.log.recovery.report import RecoveryReport
from tests.log.support import Unsynced, checkpoint_of, open_store

__all__ = ["checkpoint_of", "plan_of_opening", "rebuild_config", "recover", "write_checkpoint"]


def recover(
    path: Path,
    *,
    fs: FileSystem | None = None,
    config: StoreConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
    checks: dict[str, Check] | None = None,
    **options: Any,
) -> RecoveryReport:
    """Do what `mqstore recover` does, with `RecoverOptions` of these `options`. `checks` are of JSON files."""
    return recover_store(
        path,
        RecoverOptions(**options),
        config=config,
        progress=progress,
        json_checks=checks or {},
        fs=fs or Unsynced(),
    )


def plan_of_opening(path: Path) -> RecoveryReport:
    """Return the plan of what an opening for writing would do."""
    with open_store(path, "r") as store:
        plan: RecoveryReport = store.plan_recovery(RecoverOptions(dry_run=True))
    return plan


def write_checkpoint(root: Path, checkpoint: Checkpoint) -> None:
    (root / "checkpoint").write_bytes(encode(checkpoint).ljust(4096, b"\0"))
