"""Codecs of dataclasses, models and MessagePack: values that come back, and values that are refused, where."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, IntEnum
from pathlib import Path
from typing import Any, Literal, NewType
from uuid import UUID

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mqstore
from mqstore import DATACLASS, MSGPACK, PYDANTIC
from mqstore.errors import ConfigError, FormatError, InvalidMessageError


class Colour(Enum):
    RED = "red"
    BLUE = 3


class Level(IntEnum):
    LOW = 1


class Right(Flag):
    READ = 1
    WRITE = 2


UserId = NewType("UserId", int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    street: str
    zip: str | None = None


@dataclass
class Tree:
    name: str
    below: list[Tree] = field(default_factory=list)


def _one(hint: Any) -> Any:
    """Return a dataclass with one field of this type."""

    @dataclass
    class One:
        it: Any

    One.__annotations__["it"] = hint
    return One


_UUID = UUID(int=7)
_AT = datetime(2026, 11, 29, 20, 45, 1, 7, UTC)
_KINDS: list[tuple[Any, list[tuple[Any, str]], list[Any], list[str]]] = [
    # type; values as they are stored; values that are refused; JSON that is refused
    (
        int,
        [(7, "7"), (-(10**30), f"-1{'0' * 30}"), (Level.LOW, "1")],
        [True, 7.0, "7", None],
        ["true", "7.0", '"7"', "null"],
    ),
    (
        float,
        [(0.5, "0.5"), (3, "3.0"), (1e300, "1e+300")],
        [True, "1", float("nan"), float("inf"), 10**400],
        ["true", '"1"'],
    ),
    (bool, [(True, "true")], [1, None], ["1", '"true"']),
    (str, [("ü", '"ü"'), ("", '""')], [b"a", None, "\ud800"], ["1", "null", "{}"]),
    (bytes, [(b"\xff", '"/w=="'), (b"", '""')], ["a", bytearray(b"a")], ["1", '"?"', '"a"']),
    (None, [(None, "null")], [0, ""], ["0", "false"]),
    (date, [(date(2026, 1, 2), '"2026-01-02"')], [_AT, "2026-01-02"], ['"2026-13-01"', "1"]),
    (time, [(time(1, 2, 3), '"01:02:03"')], [_AT], ['"25:00"']),
    (
        datetime,
        [
            (_AT, '"2026-11-29T20:45:01.000007+00:00"'),
            (datetime(2026, 1, 2), '"2026-01-02T00:00:00"'),
            (datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=-3))), '"2026-01-02T00:00:00-03:00"'),
        ],
        [date(2026, 1, 2), 0.5],
        ['"yesterday"', "0"],
    ),
    (Decimal, [(Decimal("1.10"), '"1.10"')], [1.1, 1, "1"], ['"x"', "1.1"]),
    (UUID, [(_UUID, '"00000000-0000-0000-0000-000000000007"')], [str(_UUID)], ['"7"', "7"]),
    (Colour, [(Colour.RED, '"red"'), (Colour.BLUE, "3")], ["red", 3, Level.LOW], ['"green"', "4", "null"]),
    (Right, [(Right.READ, "1"), (Right.READ | Right.WRITE, "3")], [1], ['"1"', "8"]),
    (Literal["a", 3], [("a", '"a"'), (3, "3")], ["b", 4, True, None], ['"b"', "true"]),
    (UserId, [(7, "7")], ["7"], ['"7"']),
    (list[int], [([1, 2], "[1,2]"), ([], "[]")], [(1, 2), [1, "2"], None, "12"], ['["1"]', "{}", "null"]),
    (list, [([1, "a", None], '[1,"a",null]')], [()], ["{}"]),
    (set[str], [({"a"}, '["a"]')], [["a"], {1}], ["[1]", "[[]]"]),
    (frozenset[date], [(frozenset([date(2026, 1, 2)]), '["2026-01-02"]')], [set()], ['["x"]']),
    (tuple[int, ...], [((1, 2), "[1,2]")], [[1]], ['["1"]']),
    (dict[str, UUID], [({"a": _UUID}, f'{{"a":"{_UUID}"}}')], [{1: _UUID}, {"a": 1}, []], ['{"a":1}', "[]"]),
    (dict, [({"a": [1]}, '{"a":[1]}')], [{1: 2}], ["[]"]),
    (int | None, [(None, "null"), (7, "7")], ["7", 0.5], ['"7"', "0.5"]),
    (int | float, [(7, "7"), (7.0, "7.0")], ["7", True], ["true"]),
    (
        int | str | list[date] | None,
        [(7, "7"), ("7", '"7"'), ([date(2026, 1, 2)], '["2026-01-02"]')],
        [0.5, [7]],
        ["0.5"],
    ),
    (
        Place | None,
        [(Place(street="a"), '{"street":"a","zip":null}'), (None, "null")],
        ["a", Tree("a")],
        ["[]", '{"zip":"a"}'],
    ),
    (Tree, [(Tree("a", [Tree("b")]), '{"name":"a","below":[{"name":"b","below":[]}]}')], [Tree("a", ["b"])], ["null"]),  # type: ignore[list-item]
    (Any, [({"a": [None, 1]}, '{"a":[null,1]}')], [{1, 2}, b"a"], []),
]


@pytest.mark.parametrize(("hint", "stored", "refused", "unread"), _KINDS, ids=lambda value: str(value)[:30])
def test_each_type_of_a_field(hint: Any, stored: list[tuple[Any, str]], refused: list[Any], unread: list[str]) -> None:
    one = _one(hint)
    codec = DATACLASS(one)
    for value, text in stored:
        assert codec.encode(one(value)).decode() == f'{{"it":{text}}}'
        back = codec.decode(f'{{"it":{text}}}'.encode())
        assert back == one(value)
    for value in refused:
        with pytest.raises(InvalidMessageError) as caught:
            codec.encode(one(value))
        assert caught.value.field == "body"
    for text in unread:
        with pytest.raises(FormatError):
            codec.decode(f'{{"it":{text}}}'.encode())


@given(
    st.builds(
        Tree,
        st.text(st.characters(exclude_categories=["Cs"])),
        st.lists(st.builds(Tree, st.sampled_from("ab"), st.just([])), max_size=3),
    )
)
def test_items_come_back_equal(tree: Tree) -> None:
    codec = DATACLASS(Tree)
    assert codec.decode(codec.encode(tree)) == tree


@pytest.mark.parametrize(
    ("hint", "says"),
    [
        (complex, "complex"),
        (timedelta, "timedelta"),
        (Path, "Path"),
        (object, "object"),
        (tuple[int, str], "tuple"),
        (tuple[int], "tuple"),
        (dict[int, str], "dict"),
        (list[set[complex]], r"^One\.it\[\]\[\] .*complex"),
        (str | datetime, "both stored as str: give each its own field"),
        (Place | Tree, "both stored as dict"),
        (list[int] | set[int], "both stored as list"),
        (Any | None, None),
        (Literal[b"a"], "Literal"),
        (Enum("Odd", {"A": 0.5}), "Odd"),
        ("Missing", "Missing"),
    ],
)
def test_unsupported_type_is_refused_when_the_codec_is_made(hint: Any, says: str | None) -> None:
    if says is None:
        DATACLASS(_one(hint))
        return
    with pytest.raises(ConfigError, match=says):
        DATACLASS(_one(hint))


@dataclass
class Extra:
    a: int
    b: InitVar[int]


@dataclass(init=False)
class Own:
    a: int

    def __init__(self, other: int) -> None:
        self.a = other


@pytest.mark.parametrize("kind", [Extra, Own, int, Place(street="a"), "Place", None, dict[str, int]])
def test_class_that_cannot_be_made_from_its_fields_is_refused(kind: Any) -> None:
    with pytest.raises(ConfigError):
        DATACLASS(kind)


@dataclass
class First:
    url: str
    old: int = 0


@dataclass
class Second:
    url: str
    tries: int = 3
    tags: list[str] = field(default_factory=list)
    size: int = field(init=False, default=1)

    def __post_init__(self) -> None:
        if self.tries < 0:
            raise KeyError("tries")
        self.size = len(self.url)


def test_items_of_another_version_of_the_class() -> None:
    new = DATACLASS(Second)
    assert new.decode(DATACLASS(First).encode(First("abc", 7))) == Second("abc")
    assert new.encode(Second("abc")) == b'{"url":"abc","tries":3,"tags":[]}'
    with pytest.raises(FormatError, match="url"):
        new.decode(b'{"tries":3}')
    with pytest.raises(FormatError, match=r"KeyError\('tries'\)"):
        new.decode(b'{"url":"a","tries":-1}')


@dataclass
class Sub(First):
    more: int = 0


def test_subclass_would_lose_its_fields() -> None:
    with pytest.raises(InvalidMessageError, match="an item must be First itself, not Sub"):
        DATACLASS(First).encode(Sub("a"))


def test_error_names_the_field() -> None:
    with pytest.raises(InvalidMessageError, match=r"Tree\.name must be str, not int"):
        DATACLASS(Tree).encode(Tree("a", [Tree(7)]))  # type: ignore[arg-type]
    with pytest.raises(FormatError, match=r"Tree\.below\[\] must be dict, not int"):
        DATACLASS(Tree).decode(b'{"name":"a","below":[7]}')


def test_endless_item_is_refused() -> None:
    tree = Tree("a")
    tree.below.append(tree)
    with pytest.raises(InvalidMessageError):
        DATACLASS(Tree).encode(tree)
    with pytest.raises(FormatError):
        DATACLASS(Tree).decode(b'{"name":"a","below":[' * 600 + b"]}" * 600)


class Model(pydantic.BaseModel):
    url: str
    tries: int = pydantic.Field(3, alias="Tries", ge=0)
    at: datetime | None = None


class SubModel(Model):
    more: int = 0


def _changed(**values: Any) -> Model:
    model = Model(url="a")
    for name, value in values.items():
        setattr(model, name, value)
    return model


def test_models_come_back() -> None:
    codec = PYDANTIC(Model)
    model = Model(url="a", Tries=4, at=_AT)
    assert codec.decode(codec.encode(model)) == model
    assert codec.decode(b'{"url":"b"}') == Model(url="b")
    for bad in (_changed(url=7), _changed(tries=-1), SubModel(url="a"), {"url": "a"}, None):
        with pytest.raises(InvalidMessageError):
            codec.encode(bad)  # type: ignore[arg-type]
    for body in (b"", b"{}", b'{"url":7}', b"[" * 100_000, b"\xff"):
        with pytest.raises(FormatError):
            codec.decode(body)
    for kind in (Tree, Model(url="a"), None):
        with pytest.raises(ConfigError):
            PYDANTIC(kind)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [None, True, -7, 0.5, "ü", b"\xff", [1, [2]], {"a": {1: b"x"}}])
def test_messagepack_comes_back(value: Any) -> None:
    assert MSGPACK.decode(MSGPACK.encode(value)) == value


@pytest.mark.parametrize("value", [{1, 2}, 1 << 64, "\ud800", object(), _AT])
def test_messagepack_refuses(value: Any) -> None:
    with pytest.raises(InvalidMessageError):
        MSGPACK.encode(value)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x81\x80\x01", b"\x01\x02", b"\x91" * 5000, b"\xdd\xff\xff\xff\xff"])
def test_bytes_that_are_not_messagepack(body: bytes) -> None:
    with pytest.raises(FormatError, match=r"MSGPACK cannot read the item: \S"):
        MSGPACK.decode(body)


@pytest.mark.parametrize(
    ("package", "make"),
    [
        ("pydantic", lambda store: store.queue("jobs", codec=PYDANTIC(Model))),
        ("msgpack", lambda store: store.queue("jobs", codec=type(MSGPACK)())),  # one that has not found it yet
    ],
)
def test_missing_package_is_named_before_a_queue_is_made(
    package: str, make: Callable[[mqstore.Store], object], monkeypatch: pytest.MonkeyPatch, mq_store: mqstore.Store
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        make(mq_store)
    assert mq_store.topics() == []


@pytest.mark.parametrize("codec", [DATACLASS(Tree), PYDANTIC(Model), MSGPACK, mqstore.JSON])
def test_codecs_show_their_public_names(codec: mqstore.Codec) -> None:
    names = {"Tree": Tree, "Model": Model, "mqstore": mqstore}
    assert repr(eval(repr(codec), names)) == repr(codec)
