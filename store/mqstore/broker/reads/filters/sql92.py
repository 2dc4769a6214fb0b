"""SQL92 filters over message properties: text, a checked tree, closures (delivery#sql92).

    text --`sqltokens`--> tokens --_Parser--> nodes, checked as the tree grows; each has the closure that evaluates it

    expr       := and (OR and)*                                                  weakest
    and        := equality (AND equality)*
    equality   := comparison ( '=' comparison | '<>' comparison | IS [NOT] NULL )*
    comparison := unary ( ('>'|'>='|'<'|'<=') unary | [NOT] BETWEEN unary AND unary
                        | [NOT] (CONTAINS|STARTSWITH|ENDSWITH) string | [NOT] IN '(' string (',' string)* ')' )*
    unary      := ('+'|'-'|NOT) unary | literal | name | '(' expr ')'            strongest: NOT a > 3 is (NOT a) > 3

There are three values: True, False, and None for SQL's NULL. The type of a value follows from the text: a property is a
string or NULL, a literal has its own type, a comparison is a truth value or NULL. So the comparison of two operands is
chosen once, when the expression is compiled (the table is `_KEYS`), and not in each evaluation.

If one operand is a string and the other a number, the string is parsed as exactly that type by Java's rules. Doubles
have Java's order (`double_order`).

Hostile text costs little: length and nesting are limited, every token is read once, and a chain of one operator
(`a AND b AND c`) becomes one node, not a deep tree.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from mqstore import arrays as np
from mqstore.broker.reads.filters.sqltokens import (
    HINTS,
    Lexer,
    Token,
    double_order,
    error_at,
    parse_double,
    parse_int,
    parse_long,
)
from mqstore.errors import EvaluationError, FilterError
from mqstore.logger import log as _log

if TYPE_CHECKING:
    from mqstore.log.message import Message

MAX_LENGTH = 65_536
"""Maximum number of characters of an expression."""
MAX_DEPTH = 50
"""Maximum levels of nesting. The parser uses six frames for each, and callers may use many, too."""


class SqlSubscription:
    """Filter for messages whose properties, system properties included, make an expression True.
    Immutable and shared between threads."""

    __slots__ = ("_errors", "_run", "expression")

    kind: Literal["SQL92"] = "SQL92"
    hashes: None = None
    """None, because a unit has no properties."""

    def __init__(self, expression: str, run: Run) -> None:
        self.expression = expression
        self._run = run
        self._errors = itertools.count(1)

    def evaluate(self, properties: Mapping[str, str]) -> bool | None:
        """Return True, False, or None for NULL.
        Raises EvaluationError if a string does not parse as the number that it is compared with, or a truth value meets
        a string (delivery#sql92)."""
        result: bool | None = self._run(properties)
        return result

    def matches(self, properties: Mapping[str, str]) -> bool:
        """Return True if the expression is True for these properties, not for False, NULL or an error.
        Only the 1st, 2nd, 4th, 8th, ... error is logged, because a filter that fails on every message would fill the
        log."""
        try:
            return self._run(properties) is True
        except EvaluationError as error:
            count = next(self._errors)  # atomic, and no clock is needed
            if count & (count - 1) == 0:
                _log.warning("filter %.80r: %s; not delivered (error %d of this filter)", self.expression, error, count)
            return False

    def prefilter(self, tags_codes: np.NDArray[np.int64]) -> np.NDArray[np.bool_]:
        """Pass all units."""
        return np.ones(len(tags_codes), np.bool_)

    def apply(self, messages: list[Message]) -> list[Message]:
        """Return the messages whose properties match."""
        return [message for message in messages if self.matches(message.stored_properties())]

    def __reduce__(self) -> tuple[object, ...]:
        return compile, (self.expression,)

    def __repr__(self) -> str:
        return f"SqlSubscription({self.expression!r})"


def compile(expression: str) -> SqlSubscription:  # noqa: A001 - as in `re.compile`
    """Compile an expression. Raises FilterError, whose `.position` is the index of the character.

    RocketMQ's parser differs in two ways. It ignores text after a complete expression, so `a = 3 garbage` is `a = 3`.
    It also refuses a float literal that is zero.

    >>> large = compile("amount > 100 AND region IN ('eu', 'us')")
    >>> large.evaluate({"amount": "250", "region": "eu"}), large.evaluate({"amount": "250"})
    (True, None)
    """
    if len(expression) > MAX_LENGTH:
        raise FilterError(f"the filter has {len(expression)} characters; at most {MAX_LENGTH} are allowed", MAX_LENGTH)
    return SqlSubscription(expression, _Parser(expression).parse().run)


# -- how operands meet -------------------------------------------------------------------------------------------------


class Kind(Enum):
    """Type of an operand's values other than NULL. `NULL` means that it is always NULL."""

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


def _same(value: Any) -> Any:
    return value


def _parsed_double_order(text: str) -> tuple[float, float]:
    return double_order(parse_double(text))


def _is_true(text: str) -> bool:
    return text.lower() == "true"


def _refuse_truth(value: bool) -> bool:
    raise ValueError(f"{str(value).upper()} on the left cannot be compared with a string on the right")


# (left, right) -> functions that make the two comparable in Python. They raise ValueError if RocketMQ fails on the
# values. Absent pairs are never equal, and the parser refuses to order them.
_KEYS: dict[tuple[Kind, Kind], tuple[Key, Key]] = {
    **{(left, right): (_same, _same) for left in _WHOLE for right in _WHOLE},
    **{(kind, Kind.DOUBLE): (double_order, double_order) for kind in _NUMBERS},
    **{(Kind.DOUBLE, kind): (double_order, double_order) for kind in _NUMBERS},
    (Kind.STRING, Kind.INT): (parse_int, _same),
    (Kind.STRING, Kind.LONG): (parse_long, _same),
    (Kind.STRING, Kind.DOUBLE): (_parsed_double_order, double_order),
    (Kind.INT, Kind.STRING): (_same, parse_int),
    (Kind.LONG, Kind.STRING): (_same, parse_long),
    (Kind.DOUBLE, Kind.STRING): (double_order, _parsed_double_order),
    (Kind.STRING, Kind.STRING): (_same, _same),
    (Kind.BOOL, Kind.BOOL): (_same, _same),
    (Kind.STRING, Kind.BOOL): (_is_true, _same),
    (Kind.BOOL, Kind.STRING): (_refuse_truth, _same),
}
_NEVER_EQUAL: tuple[Key, Key] = (lambda _: 0, lambda _: 1)
_STRINGS_IN_ORDER: tuple[Key, Key] = (_parsed_double_order, _parsed_double_order)

_ORDERINGS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_TESTS: dict[str, Callable[[Any, Any], bool]] = {**_ORDERINGS, "=": operator.eq}
_SEARCHES: dict[str, Callable[[str, str], bool]] = {
    "CONTAINS": operator.contains,
    "STARTSWITH": str.startswith,
    "ENDSWITH": str.endswith,
}


# -- the tree, and its closures ----------------------------------------------------------------------------------------


class Node(NamedTuple):
    """Part of an expression."""

    at: int
    """Start of the part in the text."""
    kind: Kind
    run: Run
    """Function from properties to the value, None for NULL."""
    height: int = 1
    """Height of the tree that ends with this node."""
    form: Literal["literal", "property", "-", "NOT", "other"] = "other"
    value: Any = None
    """Value of a literal, or of a number after minus signs. For a property, its name."""

    @property
    def is_truth(self) -> bool:
        """True if it is allowed where a truth value is expected."""
        return self.kind is Kind.BOOL or (self.form == "literal" and self.kind is Kind.NULL)

    @property
    def fixed(self) -> Any:
        """Its value in every evaluation, None if that is NULL or not known."""
        return self.value if self.form in ("literal", "-") else None


def _literal(at: int, kind: Kind, value: str | int | float | bool | None) -> Node:
    return Node(at, kind, lambda properties: value, form="literal", value=value)


def _property(at: int, name: str) -> Node:
    return Node(at, Kind.STRING, lambda properties: properties.get(name), form="property", value=name)


def _property_as_truth(name: str) -> Run:
    """Return a function that returns False if the property exists, or else NULL."""
    return lambda properties: None if properties.get(name) is None else False


def _minus(operand: Node) -> Run:
    """Return the negation of a number, NULL for any other operand."""
    if operand.kind in _NUMBERS:
        number = -operand.value
        return lambda properties: number
    run = operand.run

    def evaluate(properties: Mapping[str, str]) -> None:
        run(properties)  # its errors count

    return evaluate


def _not(operand: Run) -> Run:
    def evaluate(properties: Mapping[str, str]) -> bool | None:
        value = operand(properties)
        return None if value is None else not value

    return evaluate


def _join(operands: Sequence[Run], *, decisive: bool) -> Run:
    """Return AND (`decisive` False) or OR (`decisive` True). The first decisive operand ends it."""

    def evaluate(properties: Mapping[str, str]) -> bool | None:
        result: bool | None = not decisive
        for operand in operands:
            value: bool | None = operand(properties)
            if value is decisive:
                return decisive
            if value is None:
                result = None
        return result

    return evaluate


def _is_null(operand: Run) -> Run:
    return lambda properties: operand(properties) is None


def _compared(op: str, left: Node, right: Node) -> Run:
    """Return `left op right`, op being = < <= > >=. Two strings are ordered as doubles.
    With an ordering the result is NULL if either side is. NULL = gives NULL, = NULL False, and NULL = NULL True."""
    kinds, test, equality, at = (left.kind, right.kind), _TESTS[op], op == "=", left.at
    keys = _KEYS.get(kinds, _NEVER_EQUAL)
    if kinds == (Kind.STRING, Kind.STRING) and not equality:
        keys = _STRINGS_IN_ORDER
    if left.form == "property" and right.fixed is not None:
        return _property_against(left, test, right.fixed, keys)
    (left_key, right_key), run_left, run_right = keys, left.run, right.run

    def evaluate(properties: Mapping[str, str]) -> bool | None:
        a = run_left(properties)
        if a is None and not equality:
            return None
        b = run_right(properties)
        if a is None or b is None:
            return None if not equality else False if a is not None else True if b is None else None
        try:
            return bool(test(left_key(a), right_key(b)))
        except ValueError as error:
            raise EvaluationError(f"column {at + 1}: {error}", at) from None

    return evaluate


def _property_against(left: Node, test: Callable[[Any, Any], bool], value: Any, keys: tuple[Key, Key]) -> Run:
    """Return `name op literal`, the most common comparison, with the literal's key computed once."""
    name, key, wanted, at = left.value, keys[0], keys[1](value), left.at
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


def _between(value: Node, low: Node, high: Node, *, negated: bool) -> Run:
    """Return `value >= low AND value <= high`, negated `value < low OR value > high`.
    No bound of the negated form needs to be the lower one."""
    if value.kind is Kind.NULL:
        # NULL for any bounds. Evaluated once: nested BETWEENs would double the work at each level. Other values are
        # properties and literals, which cost nothing to evaluate twice.
        return value.run
    ops = ("<", ">") if negated else (">=", "<=")
    return _join([_compared(op, value, bound) for op, bound in zip(ops, (low, high), strict=True)], decisive=negated)


def _in(name: str, values: frozenset[str], *, negated: bool) -> Run:
    def evaluate(properties: Mapping[str, str]) -> bool | None:
        value = properties.get(name)
        return None if value is None else (value in values) is not negated

    return evaluate


def _search(op: str, operand: Run, search: str, *, negated: bool) -> Run:
    """Return CONTAINS, STARTSWITH or ENDSWITH: False for a non-string, and always for an empty search."""
    test = _SEARCHES[op]
    if not search:
        return lambda properties: False

    def evaluate(properties: Mapping[str, str]) -> bool:
        value = operand(properties)
        return isinstance(value, str) and test(value, search) is not negated

    return evaluate


# -- from tokens to the tree -------------------------------------------------------------------------------------------


class _Parser:
    """Parser by recursive descent, one token ahead, with a method for each grammar rule and its checks."""

    def __init__(self, text: str) -> None:
        self._lexer = Lexer(text)
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
        return error_at(self._lexer.text, at, problem, hint)

    def _unexpected(self, wanted: str) -> FilterError:
        token, text = self._ahead, self._lexer.text
        hint = HINTS.get(token.text.upper())
        if text.startswith("--", token.at):
            hint = "a comment after -- ends with a line end"
        found = "the filter ends" if token.kind == "end" else f"found {token.text[:80]!r}"
        return self._error(token.at, f"expected {wanted}, but {found}", hint)

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
        nodes = [*map(self._truth, operands)]
        return self._over(nodes[0].at, _join([node.run for node in nodes], decisive=decisive), *nodes)

    def _equality(self) -> Node:
        left = self._comparison()
        while token := self._accept("=", "<>", "IS"):
            if token.kind == "IS":
                negated = self._accept("NOT") is not None
                self._expect("NULL" if negated else "NULL or NOT NULL", "NULL")
                left = self._over(left.at, _is_null(left.run), left)
            else:
                negated = token.kind == "<>"
                left = self._equal(left, self._comparison())
            if negated:
                left = self._over(left.at, _not(left.run), left)
        return left

    def _comparison(self) -> Node:
        left = self._unary()
        while True:
            if token := self._accept(*_ORDERINGS):
                right = self._unary()
                self._check_ordered(token.kind, left, right)
                left = self._over(left.at, _compared(token.kind, left, right), left, right)
                continue
            negated = self._accept("NOT") is not None
            if token := self._accept(*_SEARCHES):
                left = self._over(left.at, _search(token.kind, left.run, self._string(), negated=negated), left)
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
        if token.kind == "NOT":
            return self._over(token.at, _not(self._truth(operand).run), operand)._replace(form="NOT")
        is_number = operand.kind in _NUMBERS
        return self._over(token.at, _minus(operand), operand)._replace(
            kind=operand.kind if is_number else Kind.NULL, form="-", value=-operand.value if is_number else None
        )

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
                return _property(token.at, token.text)
            case "string":
                return _literal(token.at, Kind.STRING, _unquoted(token))
            case "integer":
                return self._integer(token)
            case "float":
                return self._float(token)
            case "NULL":
                return _literal(token.at, Kind.NULL, None)
            case _:
                return _literal(token.at, Kind.BOOL, token.kind == "TRUE")

    def _string(self) -> str:
        return _unquoted(self._expect("a string in single quotes", "string"))

    def _integer(self, token: Token) -> Node:
        digits = token.text.rstrip("lL")
        if len(digits) > 19 or int(digits) > 0x7FFF_FFFF_FFFF_FFFF:
            raise self._error(token.at, "an integer has at most 64 bits")
        value = int(digits)
        return _literal(token.at, Kind.INT if value <= 0x7FFF_FFFF else Kind.LONG, value)

    def _float(self, token: Token) -> Node:
        value = float(token.text)
        if math.isinf(value):
            raise self._error(token.at, "this number is larger than 1.7976931348623157E308")
        # Zero itself is allowed, but not a number that rounds to zero.
        if value == 0.0 and token.text.lower().partition("e")[0].strip("0."):
            raise self._error(token.at, "this number is smaller than 4.9E-324", "write 0 for zero")
        return _literal(token.at, Kind.DOUBLE, value)

    # -- checks -----------------------------------------------------------------------------------------------------

    def _enter(self, token: Token) -> None:
        self._level += 1
        if self._level > MAX_DEPTH:
            raise self._error(token.at, f"nested deeper than {MAX_DEPTH} levels")

    def _over(self, at: int, run: Run, *operands: Node) -> Node:
        """Return a truth value made of `operands`.
        Chains of `=` and similar operators make a deep tree without nesting in the text."""
        height = 1 + max(operand.height for operand in operands)
        if height > 2 * MAX_DEPTH:
            raise self._error(
                self._ahead.at, f"more than {2 * MAX_DEPTH} operators, each on the result of the one before"
            )
        return Node(at, Kind.BOOL, run, height)

    def _truth(self, node: Node) -> Node:
        if node.is_truth:
            return node
        if node.form == "property":
            return Node(node.at, Kind.BOOL, _property_as_truth(node.value))
        raise self._error(node.at, "this is neither true nor false", "a condition is expected")

    def _equal(self, left: Node, right: Node) -> Node:
        for node in (left, right):
            if node.form == "literal" and node.value is None:
                raise self._error(node.at, "NULL cannot be compared", "use IS NULL or IS NOT NULL")
        if left.form == right.form == "literal" and left.is_truth and not right.is_truth:
            raise self._error(right.at, "TRUE and FALSE on the left are equal to truth values only")
        return self._over(left.at, _compared("=", left, right), left, right)

    def _check_ordered(self, op: str, *operands: Node) -> None:
        for node in operands:
            if node.form == "NOT":
                raise self._error(node.at, f"NOT binds tighter than {op}", "write NOT (...)")
            if node.is_truth or (node.form == "literal" and node.kind not in _NUMBERS):
                raise self._error(node.at, f"{op} compares numbers and properties only")

    def _between(self, value: Node, negated: bool) -> Node:
        low = self._unary()
        self._expect("AND", "AND")
        high = self._unary()
        self._check_ordered("BETWEEN", value, low, high)
        if not negated and low.form == high.form == "literal":
            low_key, high_key = _KEYS[low.kind, high.kind]
            if low_key(low.value) > high_key(high.value):
                raise self._error(
                    low.at, f"no value is between {low.value} and {high.value}", "put the lower one first"
                )
        return self._over(value.at, _between(value, low, high, negated=negated), value, low, high)

    def _in(self, left: Node, negated: bool) -> Node:
        if left.form != "property":
            raise self._error(left.at, "only a property can be tested with IN")
        self._expect("(", "(")
        values = [self._string()]
        while self._accept(","):
            values.append(self._string())
        self._expect(", or )", ")")
        return Node(left.at, Kind.BOOL, _in(left.value, frozenset(values), negated=negated))


def _unquoted(token: Token) -> str:
    return token.text[1:-1].replace("''", "'")
