"""SQL92 filters over message properties: from text to a tree, checked, to closures (delivery#sql92).

    text --_Lexer--> tokens --_Parser--> tree of nodes, checked as it grows --run()--> closures of a property mapping

It knows nothing of messages, queues or subscriptions: properties are a mapping of strings. Nothing here holds state but
the count of errors that `Expression.matches` keeps for its log.

    expr       := and (OR and)*                                                  weakest
    and        := equality (AND equality)*
    equality   := comparison ( '=' comparison | '<>' comparison | IS [NOT] NULL )*
    comparison := unary ( ('>'|'>='|'<'|'<=') unary | [NOT] BETWEEN unary AND unary
                        | [NOT] (CONTAINS|STARTSWITH|ENDSWITH) string | [NOT] IN '(' string (',' string)* ')' )*
    unary      := ('+'|'-'|NOT) unary | literal | name | '(' expr ')'            strongest: NOT a > 3 is (NOT a) > 3

Three values: True, False and None for SQL's NULL. What a value *is* follows from the text alone: a property is a string
or NULL, a literal is what it looks like, a comparison is a truth value or NULL. So how two operands meet is looked up
once, when the expression is compiled, and an evaluation does no case analysis (the table is `_KEYS`).

Where an operand is a string and the other a number, the string is parsed as exactly that type by the rules of Java's
`Integer`, `Long` and `Double.parse...`; doubles are ordered as Java's `Double.compareTo` orders them, which puts -0.0
below 0.0 and NaN above all. Both were checked against a JVM.

Hostile text costs little: it is bounded in length and nesting, every token is read once, and strings of operators that
lean left (`a AND b AND c`) become one node, not a deep tree.
"""

from __future__ import annotations

import itertools
import logging
import math
import operator
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

from mqstore.errors import EvaluationError, FilterError

__all__ = ["MAX_DEPTH", "MAX_LENGTH", "Expression", "compile"]

_log = logging.getLogger("mqstore")

MAX_LENGTH = 65_536
"""Characters of an expression."""
MAX_DEPTH = 50
"""Levels of nesting. The parser spends six frames on each, and callers may stand deep in the stack themselves."""


class Expression:
    """A compiled expression. Immutable and shared between threads."""

    __slots__ = ("_errors", "_run", "text")

    def __init__(self, text: str, run: Run) -> None:
        self.text = text
        self._run = run
        self._errors = itertools.count(1)

    def evaluate(self, properties: Mapping[str, str]) -> bool | None:
        """True, False, or None for NULL. Raises EvaluationError where a string does not parse as the number that it is
        compared with, or a truth value meets a string (delivery#sql92)."""
        result: bool | None = self._run(properties)
        return result

    def matches(self, properties: Mapping[str, str]) -> bool:
        """Whether a message with these properties is delivered: not if the result is False, NULL or an error.

        Errors are logged as they double in number (the 1st, 2nd, 4th, 8th, ...): a filter that fails on every message
        would drown the log.
        """
        try:
            return self._run(properties) is True
        except EvaluationError as error:
            count = next(self._errors)  # atomic, and no clock is needed
            if count & (count - 1) == 0:
                _log.warning("filter %s: %s; not delivered (error %d of this filter)", _quote(self.text), error, count)
            return False

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"


def compile(expression: str) -> Expression:  # noqa: A001 - as in `re.compile`
    """The expression that `expression` spells. Raises FilterError, whose `.position` is the index of the character.

    RocketMQ's parser differs in two ways: it ignores what follows a complete expression, so that `a = 3 garbage` is
    `a = 3`, and it refuses a float literal that is zero.

    >>> large = compile("amount > 100 AND region IN ('eu', 'us')")
    >>> large.evaluate({"amount": "250", "region": "eu"}), large.evaluate({"amount": "250"})
    (True, None)
    """
    if len(expression) > MAX_LENGTH:
        raise FilterError(f"the filter has {len(expression)} characters; at most {MAX_LENGTH} are allowed", MAX_LENGTH)
    return Expression(expression, _Parser(expression).parse().run())


# -- Java's numbers ----------------------------------------------------------------------------------------------------

# Integer.parseInt takes char by char what Character.digit knows: any decimal digit of the BMP, no space, no fraction.
_INTEGER = re.compile(r"[+-]?(?:(?![^\0-\uffff])\d)+")
# Written so that no run of digits can be split in two ways: a failure costs one pass, not one pass per digit.
_DOUBLE = re.compile(
    r"""[+-]?(?: NaN | Infinity
      | (?: [0-9]+(?:\.[0-9]*)? | \.[0-9]+ ) (?:[eE][+-]?[0-9]+)? [fFdD]?
      | (?P<hex> 0[xX] (?: [0-9a-fA-F]+\.? | [0-9a-fA-F]*\.[0-9a-fA-F]+ ) [pP][+-]?[0-9]+ ) [fFdD]? )""",
    re.VERBOSE,
)
_JAVA_BLANKS = "".join(map(chr, range(0x21)))  # what String.trim removes


def _quote(text: str) -> str:
    """`text` in quotes, and not more than a log line bears."""
    return repr(text if len(text) <= 80 else text[:80] + "...")


def _java_integer(text: str, bits: int) -> int:
    """Java's `Integer.parseInt` for 32 bits, `Long.parseLong` for 64."""
    if _INTEGER.fullmatch(text):
        digits = text.lstrip("+-")
        if len(digits) > 19:  # zeros in front are free; int() would refuse thousands of them
            digits = "".join(str(unicodedata.decimal(c)) for c in digits).lstrip("0") or "0"
        value = int(digits[:20]) * (-1 if text[0] == "-" else 1)
        if -(1 << bits - 1) <= value < 1 << bits - 1:
            return value
    raise ValueError(f"{_quote(text)} is not an integer of {bits} bits")


def _int32(text: str) -> int:
    if len(text) < 10 and text.isascii() and text.isdigit():
        return int(text)
    return _java_integer(text, 32)


def _int64(text: str) -> int:
    if len(text) < 19 and text.isascii() and text.isdigit():
        return int(text)
    return _java_integer(text, 64)


def _java_double(text: str) -> float:
    """`Double.parseDouble`: blanks around, `NaN`, `Infinity`, hex floats and a type suffix are all welcome."""
    text = text.strip(_JAVA_BLANKS)
    match = _DOUBLE.fullmatch(text)
    if match is None:
        raise ValueError(f"{_quote(text)} is not a number")
    if match["hex"] is None:
        return float(text.rstrip("fFdD"))
    try:
        return float.fromhex(text.rstrip("fFdD"))
    except OverflowError:  # where Java, and Python for decimals, say Infinity
        return -math.inf if text[0] == "-" else math.inf


def _double_order(value: float) -> tuple[float, float]:
    """A key in the order of `Double.compareTo`: ... < -0.0 < 0.0 < ... < Infinity < NaN = NaN."""
    return (math.inf, 2.0) if value != value else (float(value), math.copysign(1.0, value))


def _parsed_double_order(text: str) -> tuple[float, float]:
    return _double_order(_java_double(text))


def _is_true(text: str) -> bool:
    return text.lower() == "true"


def _refuse_truth(value: bool) -> bool:
    raise ValueError(f"{str(value).upper()} on the left cannot be compared with a string on the right")


def _same(value: Any) -> Any:
    return value


# -- how operands meet -------------------------------------------------------------------------------------------------


class Kind(Enum):
    """What an operand yields when it is not NULL. `NULL`: it never yields anything else."""

    NULL = auto()
    BOOL = auto()
    INT = auto()
    LONG = auto()
    DOUBLE = auto()
    STRING = auto()


_NUMBERS = (Kind.INT, Kind.LONG, Kind.DOUBLE)
_WHOLE = (Kind.INT, Kind.LONG)

Run: TypeAlias = Callable[[Mapping[str, str]], Any]
Key: TypeAlias = Callable[[Any], Any]

# (left, right) -> what makes the two comparable in Python. Raises ValueError where RocketMQ fails on the values.
# Pairs that are absent are never equal; orderings of such pairs do not pass the parser.
_KEYS: dict[tuple[Kind, Kind], tuple[Key, Key]] = {
    **{(left, right): (_same, _same) for left in _WHOLE for right in _WHOLE},
    **{(kind, Kind.DOUBLE): (_double_order, _double_order) for kind in _NUMBERS},
    **{(Kind.DOUBLE, kind): (_double_order, _double_order) for kind in _NUMBERS},
    (Kind.STRING, Kind.INT): (_int32, _same),
    (Kind.STRING, Kind.LONG): (_int64, _same),
    (Kind.STRING, Kind.DOUBLE): (_parsed_double_order, _double_order),
    (Kind.INT, Kind.STRING): (_same, _int32),
    (Kind.LONG, Kind.STRING): (_same, _int64),
    (Kind.DOUBLE, Kind.STRING): (_double_order, _parsed_double_order),
    (Kind.STRING, Kind.STRING): (_same, _same),
    (Kind.BOOL, Kind.BOOL): (_same, _same),
    (Kind.STRING, Kind.BOOL): (_is_true, _same),
    (Kind.BOOL, Kind.STRING): (_refuse_truth, _same),
}
_NEVER_EQUAL: tuple[Key, Key] = (lambda _: 0, lambda _: 1)
_STRINGS_IN_ORDER: tuple[Key, Key] = (_parsed_double_order, _parsed_double_order)

_ORDERINGS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_SEARCHES: dict[str, Callable[[str, str], bool]] = {
    "CONTAINS": operator.contains,
    "STARTSWITH": str.startswith,
    "ENDSWITH": str.endswith,
}


# -- the tree ----------------------------------------------------------------------------------------------------------
# `at`: where the node starts in the text. `height`: of the tree below and with the node. `boolean`: it can stand where
# a truth value is asked for. `run()` gives the closure that evaluates it; a closure returns None for NULL.


class Node(Protocol):
    @property
    def at(self) -> int: ...
    @property
    def height(self) -> int: ...
    @property
    def kind(self) -> Kind: ...
    @property
    def boolean(self) -> bool: ...
    def run(self) -> Run: ...


@dataclass(frozen=True, slots=True)
class Constant:
    at: int
    kind: Kind
    value: str | int | float | bool | None
    height: ClassVar[int] = 1

    @property
    def boolean(self) -> bool:
        return self.kind in (Kind.BOOL, Kind.NULL)

    def run(self) -> Run:
        value = self.value
        return lambda properties: value


@dataclass(frozen=True, slots=True)
class Property:
    at: int
    name: str
    height: ClassVar[int] = 1
    kind: ClassVar[Kind] = Kind.STRING
    boolean: ClassVar[bool] = False

    def run(self) -> Run:
        name = self.name
        return lambda properties: properties.get(name)


@dataclass(frozen=True, slots=True)
class Negate:
    """`-operand`; NULL unless the operand is a number. No `Constant`, and so exempt from the checks of constants."""

    at: int
    height: int
    operand: Node
    boolean: ClassVar[bool] = False

    @property
    def kind(self) -> Kind:
        kind = self.operand.kind
        return kind if kind in _NUMBERS else Kind.NULL

    def run(self) -> Run:
        number, operand = _number(self), self.operand.run()
        if number is not None:
            return lambda properties: number

        def negate(properties: Mapping[str, str]) -> None:
            operand(properties)  # its errors count

        return negate


def _number(node: Node) -> int | float | None:
    """The number that `node` is in every evaluation; None if it is none."""
    if isinstance(node, Negate):
        inner = _number(node.operand)
        return None if inner is None else -inner
    if isinstance(node, Constant) and node.kind in _NUMBERS:
        assert isinstance(node.value, int | float)
        return node.value
    return None


def _fixed(node: Node) -> Any:
    """What `node` is in every evaluation; None if that is NULL or not known."""
    return node.value if isinstance(node, Constant) else _number(node)


@dataclass(frozen=True, slots=True)
class Truth:
    """A property where a truth value is asked for: False if there, whatever it says, else NULL."""

    at: int
    name: str
    height: ClassVar[int] = 1
    kind: ClassVar[Kind] = Kind.BOOL
    boolean: ClassVar[bool] = True

    def run(self) -> Run:
        name = self.name
        return lambda properties: None if properties.get(name) is None else False


@dataclass(frozen=True, slots=True)
class Not:
    at: int
    height: int
    operand: Node
    kind: ClassVar[Kind] = Kind.BOOL
    boolean: ClassVar[bool] = True

    def run(self) -> Run:
        operand = self.operand.run()

        def negate(properties: Mapping[str, str]) -> bool | None:
            value = operand(properties)
            return None if value is None else not value

        return negate


@dataclass(frozen=True, slots=True)
class Junction:
    """AND (`decisive` False) or OR (`decisive` True) of the operands: the first that is decisive ends it."""

    at: int
    height: int
    operands: tuple[Node, ...]
    decisive: bool
    kind: ClassVar[Kind] = Kind.BOOL
    boolean: ClassVar[bool] = True

    def run(self) -> Run:
        operands, decisive = tuple(node.run() for node in self.operands), self.decisive

        def join(properties: Mapping[str, str]) -> bool | None:
            result: bool | None = not decisive
            for operand in operands:
                value: bool | None = operand(properties)
                if value is decisive:
                    return decisive
                if value is None:
                    result = None
            return result

        return join


@dataclass(frozen=True, slots=True)
class IsNull:
    at: int
    height: int
    operand: Node
    kind: ClassVar[Kind] = Kind.BOOL
    boolean: ClassVar[bool] = True

    def run(self) -> Run:
        operand = self.operand.run()
        return lambda properties: operand(properties) is None


@dataclass(frozen=True, slots=True)
class Equal:
    """`left = right`. NULL on the left gives NULL, on the right alone False, on both sides True."""

    at: int
    height: int
    left: Node
    right: Node
    kind: ClassVar[Kind] = Kind.BOOL
    boolean: ClassVar[bool] = True

    def run(self) -> Run:
        keys = _KEYS.get((self.left.kind, self.right.kind), _NEVER_EQUAL)
        if isinstance(self.left, Property) and (value := _fixed(self.right)) is not None:
            return _property_against(self.left.name, operator.eq, value, keys, self.at)
        (left_key, right_key), at = keys, self.at
        left, right = self.left.run(), self.right.run()

        def equal(properties: Mapping[str, str]) -> bool | None:
            a, b = left(properties), right(properties)
            if a is None or b is None:
                return False if a is not None else True if b is None else None
            try:
                return bool(left_key(a) == right_key(b))
            except ValueError as error:
                raise _unfit(error, at) from None

        return equal


@dataclass(frozen=True, slots=True)
class Ordering:
    """`left op right` with op one of < <= > >=; NULL if either is. Two strings are compared as doubles."""

    at: int
    height: int
    op: str
    left: Node
    right: Node
    kind: ClassVar[Kind] = Kind.BOOL
    boolean: ClassVar[bool] = True

    def run(self) -> Run:
        kinds = self.left.kind, self.right.kind
        keys = _STRINGS_IN_ORDER if kinds == (Kind.STRING, Kind.STRING) else _KEYS.get(kinds, _NEVER_EQUAL)
        test, at = _ORDERINGS[self.op], self.at
        if isinstance(self.left, Property) and (value := _fixed(self.right)) is not None:
            return _property_against(self.left.name, test, value, keys, at)
        left_key, right_key = keys
        left, right = self.left.run(), self.right.run()

        def compare(properties: Mapping[str, str]) -> bool | None:
            a = left(properties)
            if a is None:
                return None
            b = right(properties)
            if b is None:
                return None
            try:
                return test(left_key(a), right_key(b))
            except ValueError as error:
                raise _unfit(error, at) from None

        return compare


@dataclass(frozen=True, slots=True)
class Between:
    """`value >= low AND value <= high`; negated `value < low OR value > high`, for which no bound need be the lower."""

    at: int
    height: int
    value: Node
    low: Node
    high: Node
    negated: bool
    kind: ClassVar[Kind] = Kind.BOOL
    boolean: ClassVar[bool] = True

    def run(self) -> Run:
        if self.value.kind is Kind.NULL:
            # NULL whatever the bounds are. Evaluated once: a value that nests further BETWEENs would double all their
            # work at each level. What remains are properties and literals, which cost nothing to evaluate twice.
            return self.value.run()
        ops = ("<", ">") if self.negated else (">=", "<=")
        sides = zip(ops, (self.low, self.high), strict=True)
        return Junction(
            self.at,
            self.height,
            tuple(Ordering(self.at, self.height, op, self.value, bound) for op, bound in sides),
            decisive=self.negated,
        ).run()


@dataclass(frozen=True, slots=True)
class In:
    at: int
    height: int
    name: str
    values: frozenset[str]
    negated: bool
    kind: ClassVar[Kind] = Kind.BOOL
    boolean: ClassVar[bool] = True

    def run(self) -> Run:
        name, values, negated = self.name, self.values, self.negated

        def contained(properties: Mapping[str, str]) -> bool | None:
            value = properties.get(name)
            return None if value is None else (value in values) is not negated

        return contained


@dataclass(frozen=True, slots=True)
class Search:
    """CONTAINS, STARTSWITH, ENDSWITH: False for what is no string, and for an empty search even when negated."""

    at: int
    height: int
    op: str
    operand: Node
    search: str
    negated: bool
    kind: ClassVar[Kind] = Kind.BOOL
    boolean: ClassVar[bool] = True

    def run(self) -> Run:
        test, operand, search, negated = _SEARCHES[self.op], self.operand.run(), self.search, self.negated
        if not search:
            return lambda properties: False

        def found(properties: Mapping[str, str]) -> bool:
            value = operand(properties)
            return isinstance(value, str) and test(value, search) is not negated

        return found


def _property_against(name: str, test: Callable[[Any, Any], bool], value: Any, keys: tuple[Key, Key], at: int) -> Run:
    """`name op literal`, the comparison that most filters are made of, with the literal's key computed beforehand."""
    key, wanted = keys[0], keys[1](value)
    if key is _same:  # strings, and only with `=`

        def equal(properties: Mapping[str, str]) -> bool | None:
            found = properties.get(name)
            return None if found is None else found == wanted

        return equal

    def compare(properties: Mapping[str, str]) -> bool | None:
        found = properties.get(name)
        if found is None:
            return None
        try:
            return test(key(found), wanted)
        except ValueError as error:
            raise EvaluationError(f"property {name} (column {at + 1}): {error}", at) from None

    return compare


def _unfit(error: ValueError, at: int) -> EvaluationError:
    return EvaluationError(f"column {at + 1}: {error}", at)


# -- from text to tokens -----------------------------------------------------------------------------------------------


class Token(NamedTuple):
    """`kind`: a keyword in capitals, an operator as it stands, or one of name, float, integer, string, end."""

    kind: str
    text: str
    at: int


_KEYWORDS = frozenset(
    {"NOT", "AND", "OR", "BETWEEN", "IN", "TRUE", "FALSE", "NULL", "IS", "CONTAINS", "STARTSWITH", "ENDSWITH"}
)
_BLANKS = re.compile(r"[ \t\n\r\f]*")
_LINE_COMMENT = re.compile(r"--[^\n\r]*(?:\r\n|\n|\r)")
# The longest match wins, so floats stand before the integers that they start with.
_TOKEN = re.compile(
    r"""(?P<name>    [A-Za-z_$][A-Za-z0-9_$]* )
      | (?P<float>   [0-9]+\.[0-9]*(?:[eE][+-]?[0-9]+)? | \.[0-9]+(?:[eE][+-]?[0-9]+)? | [0-9]+[eE][+-]?[0-9]+ )
      | (?P<integer> 0 | [1-9][0-9]*[lL]? )
      | (?P<string>  '[^']*(?:''[^']*)*' )
      | (?P<sign>    <> | >= | <= | [=<>+\-(),] )""",
    re.VERBOSE,
)
_NO_ARITHMETIC = "there is no arithmetic, and a property name has letters, digits, _ and $ only"
_HINTS = {
    "=": "equal is written =",
    "(": "there are no functions",
    "!": "not equal is written <>",
    '"': "strings stand in single quotes",
    ".": "a property name has letters, digits, _ and $ only",
    "LIKE": "there is no LIKE; use CONTAINS, STARTSWITH or ENDSWITH",
    "&": "use AND",
    "|": "use OR",
    ";": "leave it out",
    **dict.fromkeys("+-*/%", _NO_ARITHMETIC),
}


def _columns(text: str) -> int:
    """Columns of a screen that `text` takes."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text if not unicodedata.combining(c))


def _error(text: str, at: int, problem: str, hint: str | None = None) -> FilterError:
    """`problem`, with the line of `text` that it lies in and a caret below the place."""
    before = re.split(r"\r\n|\n|\r", text[:at])
    first, line = at - len(before[-1]), len(before)
    last = re.compile(r"[\r\n]|\Z").search(text, at).start()  # type: ignore[union-attr]  # \Z is found at least
    low, high = max(first, at - 60), min(last, at + 40)
    left, right = ("".join(c if c.isprintable() else " " for c in piece) for piece in (text[low:at], text[at:high]))
    left, right = ("..." if low > first else "") + left, right + ("..." if high < last else "")
    where = f"column {at - first + 1}" if line == 1 and last == len(text) else f"line {line}, column {at - first + 1}"
    message = f"SQL92 filter, {where}: {problem}{f' ({hint})' if hint else ''}"
    return FilterError(f"{message}\n    {left}{right}\n    {' ' * _columns(left)}^", at)


class _Lexer:
    """Tokens on demand: RocketMQ never looks at what lies behind the token after a complete expression."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._at = 0
        # A `--` without a line end behind it is two minus signs. Known beforehand, so that none looks for it in vain.
        self._last_line_end = max(text.rfind("\n"), text.rfind("\r"))

    def _skip(self) -> None:
        text = self.text
        while True:
            at = _BLANKS.match(text, self._at).end()  # type: ignore[union-attr]  # matches nothing at least
            self._at = at
            if text.startswith("/*", at):
                end = text.find("*/", at + 2)
                if end < 0:
                    raise _error(text, at, "this comment is not closed")
                self._at = end + 2
            elif at < self._last_line_end and (comment := _LINE_COMMENT.match(text, at)):
                self._at = comment.end()
            else:
                return

    def next(self) -> Token:
        self._skip()
        text, at = self.text, self._at
        if at == len(text):
            return Token("end", "", at)
        match = _TOKEN.match(text, at)
        if match is None:
            if text[at] == "'":
                raise _error(text, at, "this string is not closed")
            hint = _HINTS["."] if text[at].isalpha() else _HINTS.get(text[at])
            raise _error(text, at, f"unexpected character {text[at]!r}", hint)
        self._at = match.end()
        kind, word = str(match.lastgroup), match[0]
        if kind == "sign":
            kind = word
        elif kind == "name" and word.upper() in _KEYWORDS:
            kind = word.upper()
        return Token(kind, word, at)


# -- from tokens to the tree -------------------------------------------------------------------------------------------


class _Parser:
    """Recursive descent, one token ahead; a method for each rule of the grammar above, and its checks."""

    def __init__(self, text: str) -> None:
        self._lexer = _Lexer(text)
        self._level = 0
        self._ahead = self._lexer.next()

    def parse(self) -> Node:
        tree = self._truth(self._or())
        if self._ahead.kind != "end":
            raise self._unexpected("the end, AND or OR")
        return tree

    # -- tokens -----------------------------------------------------------------------------------------------------

    def _take(self) -> Token:
        token = self._ahead
        self._ahead = self._lexer.next()
        return token

    def _accept(self, *kinds: str) -> Token | None:
        return self._take() if self._ahead.kind in kinds else None

    def _expect(self, wanted: str, *kinds: str) -> Token:
        token = self._accept(*kinds)
        if token is None:
            raise self._unexpected(wanted)
        return token

    def _error(self, at: int, problem: str, hint: str | None = None) -> FilterError:
        return _error(self._lexer.text, at, problem, hint)

    def _unexpected(self, wanted: str) -> FilterError:
        token, text = self._ahead, self._lexer.text
        hint = _HINTS.get(token.text.upper())
        if text.startswith("--", token.at):
            hint = "a comment after -- ends with a line end"
        found = "the filter ends" if token.kind == "end" else f"found {_quote(token.text)}"
        return self._error(token.at, f"{found} where {wanted} is expected", hint)

    # -- rules ------------------------------------------------------------------------------------------------------

    def _or(self) -> Node:
        operands = [self._and()]
        while self._accept("OR"):
            operands.append(self._and())
        return self._joined(operands, decisive=True)

    def _and(self) -> Node:
        operands = [self._equality()]
        while self._accept("AND"):
            operands.append(self._equality())
        return self._joined(operands, decisive=False)

    def _joined(self, operands: list[Node], *, decisive: bool) -> Node:
        if len(operands) == 1:
            return operands[0]
        nodes = tuple(map(self._truth, operands))
        return Junction(nodes[0].at, self._over(*nodes), nodes, decisive)

    def _equality(self) -> Node:
        left = self._comparison()
        while token := self._accept("=", "<>", "IS"):
            if token.kind == "IS":
                negated = self._accept("NOT") is not None
                self._expect("NULL" if negated else "NULL or NOT NULL", "NULL")
                left = IsNull(left.at, self._over(left), left)
            else:
                negated = token.kind == "<>"
                left = self._equal(left, self._comparison())
            if negated:
                left = Not(left.at, self._over(left), left)
        return left

    def _comparison(self) -> Node:
        left = self._unary()
        while True:
            if token := self._accept(*_ORDERINGS):
                left = self._ordering(token.kind, left, self._unary())
                continue
            negated = self._accept("NOT") is not None
            if token := self._accept(*_SEARCHES):
                left = Search(left.at, self._over(left), token.kind, left, self._string(), negated)
            elif self._accept("BETWEEN"):
                left = self._between(left, negated)
            elif self._accept("IN"):
                left = self._in(left, negated)
            elif negated:
                raise self._unexpected("CONTAINS, STARTSWITH, ENDSWITH, BETWEEN or IN")
            else:
                return left

    def _unary(self) -> Node:
        token = self._accept("+", "-", "NOT")
        if token is None:
            return self._primary()
        self._enter(token)
        operand = self._unary()
        self._level -= 1
        if token.kind == "+":
            return operand
        if token.kind == "-":
            return Negate(token.at, self._over(operand), operand)
        return Not(token.at, self._over(operand), self._truth(operand))

    def _primary(self) -> Node:
        token = self._expect(
            "a property, a literal or (", "name", "string", "integer", "float", "TRUE", "FALSE", "NULL", "("
        )
        match token.kind:
            case "(":
                self._enter(token)
                inner = self._or()
                self._expect("AND, OR or )", ")")
                self._level -= 1
                return inner
            case "name":
                return Property(token.at, token.text)
            case "string":
                return Constant(token.at, Kind.STRING, _unquoted(token))
            case "integer":
                return self._integer(token)
            case "float":
                return self._float(token)
            case "NULL":
                return Constant(token.at, Kind.NULL, None)
            case _:
                return Constant(token.at, Kind.BOOL, token.kind == "TRUE")

    def _string(self) -> str:
        return _unquoted(self._expect("a string in single quotes", "string"))

    def _integer(self, token: Token) -> Constant:
        digits = token.text.rstrip("lL")
        if len(digits) > 19 or int(digits) > 0x7FFF_FFFF_FFFF_FFFF:
            raise self._error(token.at, "an integer has at most 64 bits")
        value = int(digits)
        return Constant(token.at, Kind.INT if value <= 0x7FFF_FFFF else Kind.LONG, value)

    def _float(self, token: Token) -> Constant:
        value = float(token.text)
        if math.isinf(value):
            raise self._error(token.at, "this number is larger than 1.7976931348623157E308")
        # Zero itself is meant; what rounds to zero is not.
        if value == 0.0 and token.text.lower().partition("e")[0].strip("0."):
            raise self._error(token.at, "this number is smaller than 4.9E-324", "write 0 for zero")
        return Constant(token.at, Kind.DOUBLE, value)

    # -- checks -----------------------------------------------------------------------------------------------------

    def _enter(self, token: Token) -> None:
        self._level += 1
        if self._level > MAX_DEPTH:
            raise self._error(token.at, f"nested deeper than {MAX_DEPTH} levels")

    def _over(self, *operands: Node) -> int:
        """Height of a node over `operands`. Chains of `=` and the like grow a tree without nesting in the text."""
        height = 1 + max(operand.height for operand in operands)
        if height > 2 * MAX_DEPTH:
            raise self._error(
                self._ahead.at, f"more than {2 * MAX_DEPTH} operators, each on the result of the one before"
            )
        return height

    def _truth(self, node: Node) -> Node:
        if node.boolean:
            return node
        if isinstance(node, Property):
            return Truth(node.at, node.name)
        raise self._error(node.at, "this is neither true nor false", "a condition is expected")

    def _equal(self, left: Node, right: Node) -> Node:
        for node in (left, right):
            if isinstance(node, Constant) and node.value is None:
                raise self._error(node.at, "NULL cannot be compared", "use IS NULL or IS NOT NULL")
        if isinstance(left, Constant) and left.boolean and isinstance(right, Constant) and not right.boolean:
            raise self._error(right.at, "TRUE and FALSE on the left are equal to truth values only")
        return Equal(left.at, self._over(left, right), left, right)

    def _ordering(self, op: str, left: Node, right: Node) -> Node:
        self._check_ordered(op, left, right)
        return Ordering(left.at, self._over(left, right), op, left, right)

    def _check_ordered(self, op: str, *operands: Node) -> None:
        for node in operands:
            if isinstance(node, Not) and self._lexer.text[node.at : node.at + 3].upper() == "NOT":
                raise self._error(node.at, f"NOT binds tighter than {op}", "write NOT (...)")
            if node.boolean or (isinstance(node, Constant) and node.kind not in _NUMBERS):
                raise self._error(node.at, f"{op} compares numbers and properties only")

    def _between(self, value: Node, negated: bool) -> Node:
        low = self._unary()
        self._expect("AND", "AND")
        high = self._unary()
        self._check_ordered("BETWEEN", value, low, high)
        if not negated and isinstance(low, Constant) and isinstance(high, Constant):
            low_key, high_key = _KEYS[low.kind, high.kind]
            if low_key(low.value) > high_key(high.value):
                raise self._error(
                    low.at, f"nothing lies between {low.value} and {high.value}", "put the lower one first"
                )
        return Between(value.at, self._over(value, low, high), value, low, high, negated)

    def _in(self, left: Node, negated: bool) -> Node:
        if not isinstance(left, Property):
            raise self._error(left.at, "only a property can be tested with IN")
        self._expect("(", "(")
        values = [self._string()]
        while self._accept(","):
            values.append(self._string())
        self._expect(", or )", ")")
        return In(left.at, 1, left.name, frozenset(values), negated)


def _unquoted(token: Token) -> str:
    return token.text[1:-1].replace("''", "'")
