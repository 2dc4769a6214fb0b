"""Administration of a store: topics, groups, dead letters, and what consumers have in flight.

`Store.broker` gives the broker of a store that is open for writing; these are the types that it takes and returns.

>>> import mqstore, tempfile
>>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
...     store.broker.topics.create("orders", queues=4).write_queues
4
"""

from __future__ import annotations

from mqstore.broker.broker import Broker
from mqstore.broker.deadletters import DeadLetters
from mqstore.broker.groups import GroupConfig
from mqstore.broker.pop.orderinfo import Suspended
from mqstore.broker.topics import TopicConfig
from mqstore.client.consumerstats import ConsumerStats
from mqstore.client.simpleconsumer import PendingInfo

__all__ = ["Broker", "ConsumerStats", "DeadLetters", "GroupConfig", "PendingInfo", "Suspended", "TopicConfig"]
