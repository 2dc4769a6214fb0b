"""Popping of messages that failed while the group read by offset, from `%RETRY%group`.

its topic is        the message is
subscribed to       delivered, under that topic; it is settled in the retry topic
nobody's any more   failed, as in a push consumer that reads: it is redelivered by the retry policy, in case
                    somebody subscribes again, and becomes a dead letter in the end
"""

from __future__ import annotations

import logging
from collections.abc import Container

from mqstore.broker.broker import Broker
from mqstore.broker.names import retry_topic
from mqstore.broker.pop.service import Delivery
from mqstore.broker.retry import origin_topic
from mqstore.client.delivery import fail
from mqstore.errors import MQStoreError

__all__ = ["pop_retries"]

_log = logging.getLogger("mqstore")


def pop_retries(
    broker: Broker,
    group: str,
    topics: Container[str],
    count: int,
    visibility_s: float,
    *,
    order: bool,
    skip_acked: bool = False,
) -> tuple[list[Delivery], bool]:
    """Pop up to `count` messages of the group's retry topic that were sent to one of `topics`.
    Return them, and True if there may be more. In order the messages behind one that failed here are released. Raises
    what `Broker.pop` raises."""
    found = broker.pop(
        group, retry_topic(group), count, invisible=visibility_s, order=order, start="earliest", skip_acked=skip_acked
    )
    wanted: list[Delivery] = []
    blocked: set[int] = set()
    for each in found:
        origin = origin_topic(each.message, group)
        try:
            if each.queue_id in blocked:
                broker.release(group, each.topic, [each.receipt])
            elif origin in topics:
                wanted.append(each)
            else:
                if order:
                    blocked.add(each.queue_id)
                fail(broker, group, each, f"nobody subscribes to its topic {origin} any more")
        except MQStoreError as error:  # it is redelivered when its lease is over
            _log.warning("group %s: %s/%d could not be released: %s", group, each.topic, each.queue_id, error)
    return wanted, len(found) == count
