"""A stand-in for the broker of another process: the engine contract over pipes, with every value pickled.

Each thread of a client has a pipe of its own to a thread of the broker's side, and the other way round for threads of
the broker that call back. Either end may call while the other waits for its answer, so that a callback can use the
broker, as in one process. What is no value stays on its side, and travels as a number: callbacks, waiters, futures and
dead letters. Nothing else of the broker can be reached: a name that the contract does not have is an AttributeError.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import BuiltinMethodType, FunctionType, MappingProxyType, MethodType
from typing import Any

from mqstore import contract
from mqstore.broker.redelivery.attempt_journal import UNREAD
from mqstore.broker.tables.localoffsets import LocalOffsets
from mqstore.contract import BrokerContract, DeadLetters, Suspects, Waiter
from mqstore.log.commitlog import SendReceipts

__all__ = ["RemoteBroker"]

_BY_NUMBER = (FunctionType, MethodType, BuiltinMethodType, partial, Waiter, Future, DeadLetters, LocalOffsets)
_TABLES = {
    "topics": contract.TopicCalls,
    "groups": contract.GroupCalls,
    "members": contract.MemberCalls,
    "locks": contract.LockCalls,
    "transactions": contract.TransactionCalls,
}


_ADMINISTRATION = {
    "": ("change_invisible", "delete_group", "reset", "run_once", "save", "stats", "wait"),
    "topics": ("alter", "configs", "delete"),
    "groups": ("alter", "delete", "names"),
    "members": ("groups", "subscriptions"),
}
"""What tests call that no client does."""


class Far:
    """An object of the other side."""

    def __init__(self, side: Side, number: int) -> None:
        self._side = side
        self._number = number

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._side.call(self._number, "__call__", args, options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return partial(self._side.remote, self._number, name)

    def __len__(self) -> int:
        return int(self._side.remote(self._number, "__len__"))


class Letters(Far):
    """Dead letters: their methods are those of `DeadLetters`, and functions are applied on this side."""

    @property
    def group(self) -> str:
        return str(self._side.remote(self._number, "__getattribute__", "group"))

    @property
    def bounds(self) -> tuple[int, int]:
        return tuple(self._side.remote(self._number, "__getattribute__", "bounds"))  # type: ignore[return-value]

    def select(self, *args: Any, where: Callable[[Any], bool] | None = None, **options: Any) -> Iterator[Any]:
        return filter(where, self._side.remote(self._number, "select", *args, **options))

    def __iter__(self) -> Iterator[Any]:
        return self.select()


class Side:
    """One of the two sides: what it has given out by number, and the pipes of its threads."""

    def __init__(self) -> None:
        self.other: Side = self
        self.given: dict[int, Any] = {}
        self.got: dict[int, Any] = {}
        self._numbers: dict[Any, int] = {}
        self._lock = threading.Lock()
        self._mine = threading.local()

    # -- values -----------------------------------------------------------------------------------------------------

    def number(self, value: Any) -> int:
        """Return the number of an object, the same one for equal callbacks."""
        with self._lock:
            key = value if callable(value) else id(value)
            number = self._numbers.setdefault(key, len(self._numbers))
            self.given[number] = value
            return number

    def dumps(self, value: Any) -> bytes:
        file = io.BytesIO()
        pickler = pickle.Pickler(file)
        pickler.dispatch_table = {
            **copyreg.dispatch_table,
            MappingProxyType: lambda members: (_frozen, (dict(members),)),
            SendReceipts: lambda receipts: (list, (list(receipts),)),
        }
        pickler.persistent_id = self._outgoing  # type: ignore[method-assign, assignment]
        pickler.dump(value)
        return file.getvalue()

    def _outgoing(self, value: Any) -> Any:
        if isinstance(value, Far):
            return "yours", value._number, ""
        if isinstance(value, Iterator):  # it would be read on the other side, a call for each item
            return None
        if isinstance(value, FunctionType) and "<" not in value.__qualname__:
            return None  # a function of a module, which both sides have
        if isinstance(value, _BY_NUMBER):
            return "mine", self.number(value), type(value).__name__
        return None

    def loads(self, data: bytes) -> Any:
        unpickler = pickle.Unpickler(io.BytesIO(data))
        unpickler.persistent_load = self._incoming  # type: ignore[method-assign, assignment]
        return unpickler.load()

    def _incoming(self, name: Any) -> Any:
        whose, number, kind = name
        if whose == "yours":
            return self.given[number]
        if number not in self.got:
            self.got[number] = (Letters if kind == "DeadLetters" else Far)(self, number)
        far = self.got[number]
        if kind != "Future":
            return far
        future: Future[Any] = Future()
        far.add_done_callback(lambda done: _settle(future, done))
        return future

    # -- calls ------------------------------------------------------------------------------------------------------

    def remote(self, number: int, name: str, *args: Any, **options: Any) -> Any:
        return self.call(number, name, args, options)

    def call(self, number: int, name: str, args: Any, options: Any) -> Any:
        pipe = getattr(self._mine, "pipe", None)
        if pipe is None:
            pipe, far = Pipe()
            self._mine.pipe = pipe
            threading.Thread(target=self.other.serve, args=(far,), daemon=True).start()
        try:
            pipe.send_bytes(self.dumps(("call", number, name, args, options)))
            return self._answers(pipe)
        except (EOFError, OSError):
            self._mine.pipe = None
            raise
        except BaseException as error:
            if not getattr(error, "was_sent", False):  # interrupted: the answer may still come
                self._mine.pipe = None
            raise

    def _answers(self, pipe: Connection) -> Any:
        """Return the next answer. Until it comes, serve the calls of the other side."""
        while True:
            kind, *rest = self.loads(pipe.recv_bytes())
            if kind == "call":
                self._serve(pipe, *rest)
            elif kind == "error":
                rest[0].was_sent = True
                raise rest[0]
            else:
                return rest[0]

    def _serve(self, pipe: Connection, number: int, name: str, args: Any, options: Any) -> None:
        try:
            found = getattr(self.given[number], name)(*args, **options)
            answer = self.dumps(("answer", list(found) if isinstance(found, Iterator) else found))
        except BaseException as error:
            answer = self.dumps(("error", error))
        pipe.send_bytes(answer)

    def serve(self, pipe: Connection) -> None:
        """Serve one thread of the other side until it ends."""
        self._mine.pipe = pipe
        with suppress(EOFError, OSError):
            self._answers(pipe)


def _frozen(members: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(members)


def _settle(future: Future[Any], done: Far) -> None:
    try:
        future.set_result(done.result())
    except BaseException as error:
        future.set_exception(error)


class _Calls:
    """Calls of one object of the broker's side: those of these names, and no others."""

    def __init__(self, side: Side, number: int, names: Iterable[str]) -> None:
        for name in names:
            if not name.startswith("_"):
                setattr(self, name, partial(side.remote, number, name))


class _NoNotes:
    """Attempt notes that nobody keeps."""

    def __init__(self) -> None:
        self.suspects = Suspects()

    def open(self, group: str, workers: int, cells: int) -> Any:
        self.workers = [UNREAD] * workers
        return self

    def close(self) -> None:
        pass


class RemoteBroker(BrokerContract):
    """The contract of `behind`, a broker that only the other ends of the pipes touch."""

    def __init__(self, behind: Any) -> None:
        near, far = Side(), Side()
        near.other, far.other = far, near
        self.behind = behind
        """For looks of tests past the wall."""
        self.name, self.own_clock = behind.name, behind.own_clock
        self.clock = behind.clock  # that of the machine, or the one that the test moves
        self.limits, self.durability = behind.limits, behind.durability
        self.shared = {}
        self.turns = None
        self._sender = None
        self.pop_at_once = lambda *args: []
        self.ack_at_once = lambda *args: 0
        self.has_room = lambda size: False
        self._remote = partial(near.remote, far.number(behind))
        self.save_offsets = partial(self._remote, "save_offsets")
        for table, calls in _TABLES.items():
            names = (*vars(calls), *_ADMINISTRATION.get(table, ()))
            setattr(self, table, _Calls(near, far.number(getattr(behind, table)), names))
        vars(self).update(vars(_Calls(near, far.number(behind), _ADMINISTRATION[""])))
        self.begun = _NoNotes()

    @property
    def closed(self) -> bool:
        return bool(self._remote("__getattribute__", "closed"))

    def saved(self, work: Callable[[], Any]) -> Any:
        self.save()
        return work()


def _forwarded(name: str) -> Callable[..., Any]:
    def call(self: RemoteBroker, *args: Any, **options: Any) -> Any:
        return self._remote(name, *args, **options)

    return call


for _name, _member in vars(BrokerContract).items():
    if isinstance(_member, FunctionType) and not _name.startswith("_") and _name not in vars(RemoteBroker):
        setattr(RemoteBroker, _name, _forwarded(_name))
