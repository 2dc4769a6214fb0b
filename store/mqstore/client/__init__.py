"""Producers and consumers: the part of delivery that applications use, and that runs their code.

This room knows the broker only by `mqstore.contract`, and nothing of files and records. Its classes are imported when
used, because few programs use more than one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mqstore.lazy import lazy

if TYPE_CHECKING:
    from mqstore.client.pop.simpleconsumer import SimpleConsumer as SimpleConsumer
    from mqstore.client.pull.consumer import PullConsumer as PullConsumer
    from mqstore.client.push.consumer import PushConsumer as PushConsumer
    from mqstore.client.send.producer import Producer as Producer

_LAZY: Final = {
    "Producer": ".send.producer",
    "PullConsumer": ".pull.consumer",
    "PushConsumer": ".push.consumer",
    "SimpleConsumer": ".pop.simpleconsumer",
}

__getattr__ = lazy(__name__, _LAZY)
