"""Codecs that turn an application's items into stored bytes and back.

    BYTES    bytes, bytearray, memoryview    as they are
    TEXT     str                             UTF-8
    JSON     types of JSON                   UTF-8, no spaces

Pickle is not supported: anyone who can write to the directory could run code in every reader. An application that
accepts that can pass a codec of four lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from mqstore.errors import FormatError, InvalidMessageError
from mqstore.layout.arrays.encode import lengths_of
from mqstore.layout.jsontext import BODY, check, decode

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=Any)
    """Type of the items. `Queue` without one is `Queue[Any]`, so that older annotations stay right."""
else:
    from typing import TypeVar

    T = TypeVar("T")  # default= needs Python 3.13


class Codec(Protocol[T]):
    """Codec that turns items into bytes and back. A queue with a `Codec[Job]` is a `Queue[Job]` for type checkers.

    >>> class Numbers:
    ...     def encode(self, item):
    ...         return b"%d" % item
    ...
    ...     def decode(self, body):
    ...         return int(body)
    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     queue = store.queue("numbers", codec=Numbers())
    ...     receipt = queue.put(7)
    ...     queue.get().value
    7
    """

    def encode(self, item: T, /) -> bytes:
        """Return the bytes to store. Raises InvalidMessageError, ValueError or TypeError for a bad item."""

    def decode(self, body: bytes, /) -> T:
        """Return the item of these bytes. Raises ValueError if they hold none."""


class _Codec:
    def __repr__(self) -> str:
        return f"mqstore.{type(self).__name__[1:].upper()}"


class _Bytes(_Codec):
    def encode(self, item: Any) -> bytes:
        if type(item) is bytes:
            return item
        if isinstance(item, bytes | bytearray | memoryview):
            return bytes(item)
        raise InvalidMessageError(
            f"an item of this queue is bytes, not {type(item).__name__}; other items take a codec: mqstore.TEXT, JSON",
            "body",
        )

    def decode(self, body: bytes) -> bytes:
        return body


class _Text(_Codec):
    def encode(self, item: Any) -> bytes:
        if not isinstance(item, str):
            raise InvalidMessageError(f"an item of this queue is str, not {type(item).__name__}", "body")
        try:
            return item.encode()
        except UnicodeEncodeError as error:
            raise InvalidMessageError(f"the text cannot be stored as UTF-8: {error}", "body") from error

    def decode(self, body: bytes) -> str:
        try:
            return body.decode()
        except UnicodeDecodeError as error:
            raise FormatError(f"the item is not UTF-8 text: {error.reason}", "body", error.start) from error


class _Json(_Codec):
    def encode(self, item: Any) -> bytes:
        try:
            text = json.dumps(item, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            check(text, BODY)  # each stored item can be read
            return text.encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidMessageError(f"the item cannot be stored as JSON: {error}", "body") from error

    def decode(self, body: bytes) -> Any:
        try:
            return decode(body, BODY)
        except FormatError as error:
            raise FormatError(f"the item is not JSON: {error.__cause__}", "body", error.position) from error


BYTES: Codec[bytes] = _Bytes()
TEXT: Codec[str] = _Text()
JSON: Codec[Any] = _Json()


def encoded(codec: Codec[T], items: Iterable[T]) -> list[bytes]:
    """Return the bytes to store for many items. Plain bytes need no call each, which is a third of a put of many."""
    listed: list[Any] = list(items)
    return listed if codec is BYTES and lengths_of(listed) is not None else [codec.encode(item) for item in listed]
