"""The broker for `Store`, and checks of a store without a broker."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from mqstore.broker.background.context import broker_findings
from mqstore.broker.broker import Broker
from mqstore.broker.tables.configchecks import CONFIG_CHECKS
from mqstore.log.reading.reader import StoreReader
from mqstore.log.recovery.report import Finding

__all__ = ["CONFIG_CHECKS", "Broker", "findings"]


def findings(store: StoreReader) -> Iterator[Finding]:
    """Check every record, unit, index entry and table of a store (format#damage)."""
    return chain(store.verifier(CONFIG_CHECKS).findings(), broker_findings(store))
