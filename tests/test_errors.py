"""Errors between processes: a pool and Spark send them as pickles."""

from __future__ import annotations

import copy
import errno
import pickle
from typing import Any

import pytest

from mqstore import BatchFailure, Reject, Retry, Store, errors
from mqstore.errors import MQStoreError

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "InvalidMessageError": ("too long", "body"),
    "FormatError": ("bad", "magic", 7),
    "FilterError": ("bad", 3),
    "EvaluationError": ("bad", 3),
    "TransactionStateError": ("too late", "commit"),
    "OffsetOutOfRangeError": ("gone", 3, 9),
    "StoreLockedError": ("locked", 17, "here", 5),
    "ConnectionLostError": ("lost", True),
    "CorruptStoreError": ("bad", "commitlog/0", 7, "mqstore recover s"),
    "UnsupportedStoreError": ("newer", 99, ("x",)),
    "MissingFileError": (errno.ENOENT, "gone", "s/commitlog/0", "open"),
    "StoreIOError": (errno.EIO, "broken", "s/commitlog/0", "read"),
    "FlushTimeoutError": ("late", ("t", 0)),
    "StoreFullError": (errno.ENOSPC, "no space", "s/commitlog/0", "put"),
    "ReadOnlyStoreError": (errno.EROFS, "read only", "s/lock"),
}
PUBLIC = [getattr(errors, name) for name in errors.__all__]
CLASSES = [each for each in PUBLIC if isinstance(each, type) and issubclass(each, MQStoreError)]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_is_the_same_after_pickle_and_copy(kind: type[MQStoreError]) -> None:
    error = kind(*ARGUMENTS.get(kind.__name__, ("a text",)))
    error.receipts = ["r"]
    error.add_note("in a task")

    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))
        for name in ("errno", "strerror", "filename"):
            assert getattr(again, name, None) == getattr(error, name, None)


def test_order_of_a_handler_is_the_same_after_pickle(mq_store: Store) -> None:
    """A `Retry` of a handler's work in a process pool broke the pool."""
    mq_store.put("t", b"x")
    [message] = mq_store.iter("t")

    for order in (Retry(5), Retry(), Reject("why"), Reject(), Reject(ValueError("x")), BatchFailure([message])):
        again = pickle.loads(pickle.dumps(order))
        assert type(again) is type(order)
        assert (str(again), repr(vars(again))) == (str(order), repr(vars(order)))
