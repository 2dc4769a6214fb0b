"""Codecs of typed items: dataclasses, models of pydantic, MessagePack (clients#queue).

A codec of a dataclass has a function for each field and direction, made once. The function has a table of steps: by the
value's type in Python when it is stored, by its type in JSON when it is read. A union is the tables of its members in
one, and is refused if JSON cannot tell the members apart.
"""

from __future__ import annotations

import dataclasses
import inspect
from base64 import b64decode, b64encode
from collections.abc import Callable
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from functools import cached_property, partial
from importlib import import_module
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, Generic, Literal, Union, get_args, get_origin, get_type_hints
from uuid import UUID

from mqstore.client.items.codecs import JSON, Codec, T
from mqstore.errors import ConfigError, FormatError, InvalidMessageError, MQStoreError

Step = Callable[[Any], Any]
_Steps = tuple[dict[type, Step], dict[type, Step]]
"""Steps to store the values of a type, by type in Python, and to read them, by type in JSON."""


def _same(value: Any) -> Any:
    return value


_SIMPLE: dict[Any, tuple[Step, Step, type]] = {
    # type: (put, take, type in JSON)
    NoneType: (_same, _same, NoneType),
    bool: (_same, _same, bool),
    int: (_same, _same, int),
    float: (float, float, float),
    str: (_same, _same, str),
    bytes: (lambda value: b64encode(value).decode(), partial(b64decode, validate=True), str),
    date: (date.isoformat, date.fromisoformat, str),
    time: (time.isoformat, time.fromisoformat, str),
    datetime: (datetime.isoformat, datetime.fromisoformat, str),
    Decimal: (str, Decimal, str),
    UUID: (str, UUID, str),
}
_NOT_A = {bool: int, datetime: date}
"""Subclasses in Python whose values are of another type to everybody else."""


class _WrongError(ValueError):
    """A value does not fit its field, which the text names."""


def _through(where: str, steps: dict[type, Step]) -> Step:
    """Return a function that converts a value by the step of its type."""
    names = " | ".join("None" if kind is NoneType else kind.__name__ for kind in steps)
    steps = {int: float, **steps} if float in steps else steps

    def convert(value: Any) -> Any:
        kind = type(value)
        step = steps.get(kind)
        if step is None:
            bases = [base for base in kind.__mro__ if base in steps and base is not _NOT_A.get(kind)]
            if not bases:
                raise _WrongError(f"{where} must be {names}, not {kind.__name__}")
            step = steps[bases[0]]
        try:
            return step(value)
        except (_WrongError, RecursionError):
            raise
        except Exception as error:  # of a constructor, which may raise anything
            raise _WrongError(f"{where} cannot be {value!r:.80} ({error!r:.200})") from error

    return convert


def _steps(hint: Any, where: str, known: dict[type, _Steps]) -> _Steps:
    """Return the steps of a type. Raises ConfigError for one that is not supported."""
    hint = getattr(hint, "__supertype__", hint)  # of a NewType
    origin, args = get_origin(hint) or hint, get_args(hint)
    inner = f"{where}[]"
    if hint in _SIMPLE:
        put, take, stored = _SIMPLE[hint]
        return {hint: put}, {stored: take}
    if hint is Any:
        return {object: _same}, {object: _same}
    if origin in (Union, UnionType):
        both: _Steps = ({}, {})
        for member in (_steps(arg, where, known) for arg in args):
            for table, more in zip(both, member, strict=True):
                if twice := table.keys() & more.keys():
                    kind = twice.pop().__name__
                    raise ConfigError(f"{where} has two types that are both stored as {kind}: give each its own field")
                table.update(more)
        return both
    if origin in (list, set, frozenset) or (origin is tuple and (not args or args[1:] == (...,))):
        put, take = (_through(inner, each) for each in _steps(args[0] if args else Any, inner, known))
        return {origin: lambda value: [*map(put, value)]}, {list: lambda value: origin(map(take, value))}
    if origin is dict and (not args or args[0] is str):
        put, take = (_through(inner, each) for each in _steps(args[1] if args else Any, inner, known))
        name = _through(f"a key of {where}", {str: _same})
        return (
            {dict: lambda value: {name(key): put(each) for key, each in value.items()}},
            {dict: lambda value: {key: take(each) for key, each in value.items()}},
        )
    if origin is Literal or (isinstance(hint, type) and issubclass(hint, Enum)):
        values = args or [member.value for member in hint]
        one = {value: value for value in values}.__getitem__ if args else hint
        table = {type(value): one for value in values}
        if table.keys() <= {bool, int, str, NoneType}:
            return table if args else {hint: attrgetter("value")}, table
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return known[hint] if hint in known else _dataclass(hint, known)
    raise ConfigError(
        f"{where} is of type {hint}, which DATACLASS does not store; help(mqstore.DATACLASS) lists those it does"
    )


def _dataclass(cls: Any, known: dict[type, _Steps]) -> _Steps:
    """Return the steps of a dataclass: an object of the fields that its constructor takes."""
    fields: dict[str, list[Step]] = {}

    def put(item: Any) -> dict[str, Any]:
        if type(item) is not cls:
            raise _WrongError(f"an item must be {cls.__name__} itself, not {type(item).__name__}")
        return {name: each(getattr(item, name)) for name, (each, _) in fields.items()}

    def take(found: dict[str, Any]) -> Any:
        return cls(**{name: each(found[name]) for name, (_, each) in fields.items() if name in found})

    known[cls] = {cls: put}, {dict: take}
    try:
        hints = get_type_hints(cls, localns={cls.__name__: cls})
        for field in dataclasses.fields(cls):
            if field.init:
                where = f"{cls.__name__}.{field.name}"
                fields[field.name] = [_through(where, each) for each in _steps(hints[field.name], where, known)]
        inspect.signature(cls).bind(**fields)
    except (NameError, TypeError) as error:  # a type that only type checkers import, an argument that is not a field
        raise ConfigError(f"DATACLASS cannot make {cls.__name__} from its fields: {error}") from error
    return known[cls]


class _Typed(Generic[T]):
    """Codec of two functions, which may raise any error."""

    def __init__(self, name: str, put: Callable[[T], bytes], take: Callable[[bytes], T]) -> None:
        self._name, self._put, self._take = name, put, take

    def encode(self, item: T) -> bytes:
        try:
            return self._put(item)
        except MQStoreError:
            raise
        except Exception as error:
            raise InvalidMessageError(f"{self!r} cannot store the item: {str(error) or repr(error)}", "body") from error

    def decode(self, body: bytes) -> T:
        try:
            return self._take(body)
        except MQStoreError:
            raise
        except Exception as error:
            raise FormatError(f"{self!r} cannot read the item: {str(error) or repr(error)}", "body", 0) from error

    def __repr__(self) -> str:
        return f"mqstore.{self._name}"


def DATACLASS(kind: type[T]) -> Codec[T]:  # noqa: N802  (beside JSON and TEXT)
    """Return a codec of a dataclass, stored as JSON.

    A field may be `bool`, `int`, `float`, `str`, `bytes` (base64), `date`, `time`, `datetime` (ISO 8601), `Decimal`,
    `UUID`, `Enum` or `Literal` (their values), `None`, `Any` (a value of JSON), a dataclass, `list`, `set`,
    `tuple[X, ...]` or `dict[str, X]` of these, or a union whose members JSON can tell apart. Other types raise
    ConfigError here. A value of a wrong type raises InvalidMessageError when it is put, FormatError when it is read. A
    stored field that the class does not have is ignored, and a field that is not stored has its default.

    >>> import dataclasses, mqstore
    >>> @dataclasses.dataclass
    ... class Job:
    ...     url: str
    ...     tries: int = 3
    >>> jobs = mqstore.DATACLASS(Job)
    >>> jobs.encode(Job("a")), jobs.decode(b'{"url":"b"}')
    (b'{"url":"a","tries":3}', Job(url='b', tries=3))
    >>> jobs.encode(Job(7))
    Traceback (most recent call last):
    mqstore.errors.InvalidMessageError: mqstore.DATACLASS(Job) cannot store the item: Job.url must be str, not int
    """
    cls: Any = kind
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ConfigError(f"DATACLASS takes a dataclass, not {cls!r:.80}")
    put, take = (_through("an item", each) for each in _steps(cls, "", {}))
    name = f"DATACLASS({cls.__name__})"
    return _Typed(name, lambda item: JSON.encode(put(item)), lambda body: take(JSON.decode(body)))


def PYDANTIC(model: type[T]) -> Codec[T]:  # noqa: N802
    """Return a codec of a model of pydantic 2, stored as its JSON.
    Raises ConfigError without pydantic. An item that the model does not read back raises InvalidMessageError."""
    cls: Any = model
    if _needed("pydantic", "PYDANTIC").BaseModel not in getattr(cls, "__mro__", ()):
        raise ConfigError(f"PYDANTIC takes a model of pydantic, not {cls!r:.80}")
    read: Callable[[str | bytes], T] = cls.model_validate_json

    def put(item: Any) -> bytes:
        if type(item) is not cls:
            raise _WrongError(f"an item must be {cls.__name__} itself, not {type(item).__name__}")
        text: str = item.model_dump_json(by_alias=True, round_trip=True, warnings="error")
        read(text)
        return text.encode()

    return _Typed(f"PYDANTIC({cls.__name__})", put, read)


class _Msgpack:
    """Codec of MessagePack. `Queue` looks for `encode` first, and raises ConfigError without msgpack."""

    @cached_property
    def _codec(self) -> _Typed[Any]:
        msgpack = _needed("msgpack", "MSGPACK")
        return _Typed("MSGPACK", msgpack.packb, partial(msgpack.unpackb, strict_map_key=False))

    encode = property(lambda self: self._codec.encode)
    decode = property(lambda self: self._codec.decode)

    def __repr__(self) -> str:
        return "mqstore.MSGPACK"


def _needed(package: str, codec: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        raise ConfigError(f"mqstore.{codec} needs {package}: pip install {package}") from error


MSGPACK: Codec[Any] = _Msgpack()
