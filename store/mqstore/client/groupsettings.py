"""Settings that a consumer shares with its group: order, start, retry policy (clients#group).

given to the consumer     the group is not there yet    the group is there
ordered    None           False                         as the group has it
           True, False    the group is created so       ConfigError if it differs
start      None           "earliest"                    as the group has it
           given          the group is created so       counts in queues without a position of the group
retry      None           the default                   as the group has it
           given          the group is created so       replaces the group's when the consumer joins; beside members
                                                        GroupInUseError if it differs (`Members.set_retry`)

A `Queue` is no member of its group; its `retry` follows the same rule when the `Queue` is made.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from mqstore.broker.broker import Broker
from mqstore.broker.groups import GroupConfig, RetryPolicy
from mqstore.client.progress import Start
from mqstore.errors import ConfigError
from mqstore.log.reader import to_ms

__all__ = ["check_order", "enter_group", "order_of"]


def order_of(broker: Broker, group: str, ordered: bool | None) -> bool:
    """Return True if a consumer of `group` consumes in order.
    With None it follows the group. A new group has no order."""
    if ordered is not None:
        return ordered
    known = broker.groups.get(group)
    return known is not None and known.orderly


def check_order(known: GroupConfig, ordered: bool) -> None:
    """Raise ConfigError, with advice, if the group consumes in another order."""
    if known.orderly != ordered:
        raise ConfigError(
            f"group {known.name!r} was made to consume {'in order' if known.orderly else 'without order'}: give "
            f"ordered={known.orderly}, use another group, or alter it: broker.groups.alter({known.name!r}, "
            f"orderly={ordered})"
        )


def enter_group(
    broker: Broker, group: str, *, ordered: bool = False, start: Start | None = None, retry: RetryPolicy | None = None
) -> GroupConfig:
    """Return the group, created with these settings if it is new. Raises what `GroupTable.create` raises."""
    settings: dict[str, Any] = {"orderly": ordered}
    if retry is not None:
        settings["retry_policy"] = retry
    if start is not None:
        settings["start"] = max(0, to_ms(start)) if isinstance(start, datetime) else start
    return broker.groups.get(group) or broker.groups.create(group, **settings)
