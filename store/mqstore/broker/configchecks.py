"""What each JSON file of the broker has to look like, for who looks for damage or mends it (format#json-load).

A table that finds a value of the wrong type in its file does not load it, and nor does the store: so `verify` and
`recover` judge by the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from mqstore.broker.delay.levels import check_delay_offsets
from mqstore.broker.groups import check_groups
from mqstore.broker.localoffsets import LOCAL_OFFSETS, check_local_offsets
from mqstore.broker.offsets import check_offsets
from mqstore.broker.pop.orderinfo import check_order_info
from mqstore.broker.topics import check_topics
from mqstore.files.jsonfile import Check

__all__ = ["CONFIG_CHECKS"]

CONFIG_CHECKS: Final[Mapping[str, Check]] = {
    "config/topics.json": check_topics,
    "config/subscriptionGroup.json": check_groups,
    "config/consumerOffset.json": check_offsets,
    "config/delayOffset.json": check_delay_offsets,
    "config/consumerOrderInfo.json": check_order_info,
    f"{LOCAL_OFFSETS}/*/*.json": check_local_offsets,
}
"""By path within the store, `*` standing for any name: a function that raises ValueError for an object of the wrong
shape."""
