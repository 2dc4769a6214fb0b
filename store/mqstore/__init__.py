"""mqstore: a durable, file-backed message queue engine with Apache RocketMQ's store layout, inside your process.

>>> import mqstore, tempfile
>>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
...     receipt = store.put("greetings", b"hello")
...     [message.body for message in store.read(*receipt.queue, receipt.offset)]
[b'hello']

Everything begins with `mqstore.open`, or with `mqstore.connect` to a process that serves a store. Then

    store.queue(name)                jobs, each done once: put, get, ack           help(mqstore.Queue)
    mqstore.get_any(queues)          the next item of several queues               help(mqstore.get_any)
    store.push_consumer(group)       handlers that are called, in order or not     help(mqstore.PushConsumer)
    store.simple_consumer(group)     receive some, acknowledge each                help(mqstore.SimpleConsumer)
    store.pull_consumer(group)       poll, and commit how far you are              help(mqstore.PullConsumer)
    store.producer()                 send: batches, retries, transactions          help(mqstore.Producer)
    store.put, store.read            messages of a topic, by number                help(mqstore.Store)
    mqstore.aio                      all of it for asyncio                         help(mqstore.aio)
    mqstore.errors                   all errors                                     help(mqstore.errors)
    mqstore.admin                    look into a directory, and change it          help(mqstore.admin)
    mqstore.engine                   messages and damage in its files, clocks      help(mqstore.engine)
    mqstore.testing                  stores for tests, as fixtures of pytest       help(mqstore.testing)

and on a shell: `mqstore --help`.
"""

from __future__ import annotations

from importlib import import_module
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

from mqstore.broker.tables.groups import RetryPolicy, backoff, exponential
from mqstore.client.interceptors import DeliveryResult, Interceptor
from mqstore.client.items.codecs import BYTES, JSON, TEXT, Codec
from mqstore.client.pop.delivery import Delivery, Task
from mqstore.client.push.handlers import COMMIT, ROLLBACK, BatchFailure, Reject, Retry
from mqstore.clock import SimulatedClock
from mqstore.errors import MQStoreError, QueueEmpty, QueueFull, QueueShutDown
from mqstore.getany import get_any
from mqstore.lazy import lazy
from mqstore.log.commitlog import QueueRef, SendReceipt
from mqstore.log.message import Message
from mqstore.log.writing.outgoing import Body, OutgoingMessage
from mqstore.options import Durability, Duration, Profile, Retention, StoreConfig
from mqstore.queue import Queue
from mqstore.store import Store
from mqstore.version import VERSION as __version__  # noqa: N811

if TYPE_CHECKING:
    from mqstore import admin as admin
    from mqstore import aio as aio
    from mqstore import engine as engine
    from mqstore import testing as testing
    from mqstore.client import Producer as Producer
    from mqstore.client import PullConsumer as PullConsumer
    from mqstore.client import PushConsumer as PushConsumer
    from mqstore.client import SimpleConsumer as SimpleConsumer
    from mqstore.client.group.allocation import fixed_queues as fixed_queues
    from mqstore.client.items.typedcodecs import DATACLASS as DATACLASS
    from mqstore.client.items.typedcodecs import MSGPACK as MSGPACK
    from mqstore.client.items.typedcodecs import PYDANTIC as PYDANTIC
    from mqstore.client.push.workers import cancelled as cancelled
    from mqstore.remote.store import connect as connect

_MODULES = ("admin", "aio", "engine", "errors", "testing")
__all__ = [
    "BYTES",
    "COMMIT",
    "DATACLASS",
    "JSON",
    "MSGPACK",
    "PYDANTIC",
    "ROLLBACK",
    "TEXT",
    "BatchFailure",
    "Body",
    "Codec",
    "Delivery",
    "DeliveryResult",
    "Durability",
    "Interceptor",
    "MQStoreError",
    "Message",
    "OutgoingMessage",
    "Producer",
    "Profile",
    "PullConsumer",
    "PushConsumer",
    "Queue",
    "QueueEmpty",
    "QueueFull",
    "QueueRef",
    "QueueShutDown",
    "Reject",
    "Retention",
    "Retry",
    "RetryPolicy",
    "SendReceipt",
    "SimpleConsumer",
    "SimulatedClock",
    "Store",
    "StoreConfig",
    "Task",
    "__version__",
    "backoff",
    "cancelled",
    "connect",
    "exponential",
    "fixed_queues",
    "get_any",
    "open",
]


def open(
    path: str | PathLike[str],
    mode: Literal["rw", "r"] = "rw",
    *,
    create: bool = True,
    profile: Profile | None = None,
    durability: Durability = "append",
    lock_timeout: Duration = 0,
    config: StoreConfig | None = None,
    shared: bool = False,
) -> Store:
    """Open a store directory.

    "rw" takes the exclusive lock: StoreLockedError (with the holder's pid) if another process has it for longer than
    `lock_timeout` seconds; it delivers due messages from then on. "r" takes no lock and can only read; a writer may be
    at work meanwhile. A store that was not closed cleanly is recovered first; `store.recovery` is the report.
    `profile` None: the directory's own, "mqstore" for a new one. When `put` returns, a message is in the page cache
    (`durability` "append") or on disk ("flush"). A killed process loses neither. Close the store, best by `with`: one
    that nobody refers to closes itself, with a ResourceWarning. If its directory is removed or moved meanwhile, every
    call raises MissingFileError within a second.

    With `shared` any number of processes use the directory at once: the first starts a server process, which ends a
    second after the last has closed the store. The options of the first count. The result is that of
    `mqstore.connect`, and differs as that does (`docs/processes.md`).

    Raises NotAStoreError, StoreLockedError, CorruptStoreError, UnsupportedStoreError, ConfigError.
    """
    if shared:
        from mqstore.remote.shared import open_shared

        return open_shared(
            path, mode, create=create, profile=profile, durability=durability, lock_timeout=lock_timeout, config=config
        )
    # Built by hand: after a call of the class a signal handler may raise, and nobody could close the store then.
    store = Store.__new__(Store)
    Store.__init__(
        store,
        path,
        mode,
        create=create,
        profile=profile,
        durability=durability,
        lock_timeout=lock_timeout,
        config=config,
    )
    return store


_of_module = lazy(
    __name__,
    {
        "DATACLASS": ".client.items.typedcodecs",
        "MSGPACK": ".client.items.typedcodecs",
        "PYDANTIC": ".client.items.typedcodecs",
        "Producer": ".client",
        "PullConsumer": ".client",
        "PushConsumer": ".client",
        "SimpleConsumer": ".client",
        "cancelled": ".client.push.workers",
        "connect": ".remote.store",
        "fixed_queues": ".client.group.allocation",
    },
)


def __getattr__(name: str) -> Any:
    """Return a module, class or function that is imported when it is first asked for."""
    return import_module(f"mqstore.{name}") if name in _MODULES else _of_module(name)


def __dir__() -> list[str]:
    """Return the public names, for completion."""
    return sorted({*__all__, *_MODULES})
