"""Expressions that users write in files and flags: parsed to an allow-list of AST nodes, never evaluated as Python.

Allowed: names, whole and decimal numbers, comparisons, `and`, `or`, `not`, `+ - * // %`, `min(...)`, `max(...)`. The
value of every step is bounded, so that an expression can take neither time nor memory.
"""

import ast
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from echo_explore.core.errors import SpecError
from echo_explore.core.names import nearest

Number = int | float
MAX_LENGTH: Final = 500
"""Characters of an expression; longer ones are refused before they are parsed."""
MAX_DEPTH: Final = 40
"""Levels of nesting."""
MAX_MAGNITUDE: Final = 1e18
"""Largest value of a constant or of any step."""

_BINARY: Final[dict[type[ast.operator], Callable[[Number, Number], Number]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: Final[dict[type[ast.cmpop], Callable[[Number, Number], bool]]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_CALLS: Final[dict[str, Callable[..., Number]]] = {"min": min, "max": max}
_ALLOWED: Final = "use names, numbers, comparisons, and, or, not, + - * // %, min(), max()"


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression.

    Attributes:
        text: as the user wrote it.
        field: where it stands, for messages.
        names: names that it reads.
    """

    text: str
    field: str
    names: frozenset[str]
    _tree: ast.expr

    def value(self, values: Mapping[str, Number]) -> Number:
        """The value under `values`, which hold every name of `names`; comparisons give True or False.

        Raises:
            SpecError: division by zero, or a step that exceeds `MAX_MAGNITUDE`.
        """
        try:
            return _evaluate(self._tree, values)
        except ZeroDivisionError:
            raise SpecError(self.field, self.text, "divides by zero", "guard it or change the divisor") from None
        except OverflowError:
            raise SpecError(self.field, self.text, f"a step exceeds {MAX_MAGNITUDE:g}", "use smaller numbers") from None

    def holds(self, values: Mapping[str, Number]) -> bool:
        """Whether the rule is true under `values`.

        Raises:
            SpecError: it is a number instead of true or false; see also `value`.
        """
        answer = self.value(values)
        if not isinstance(answer, bool):
            raise SpecError(self.field, self.text, f"gives the number {answer}, not true or false", "compare it")
        return answer


def parse_expression(text: str, *, names: Collection[str], field: str) -> Expression:
    """The expression in `text`.

    Args:
        text: what the user wrote.
        names: names that may occur.
        field: where it stands, for messages.

    Raises:
        SpecError: too long, not an expression, a node that is not on the allow-list, an unknown name.
    """
    if len(text) > MAX_LENGTH:
        raise SpecError(field, text, f"is longer than {MAX_LENGTH} characters", "split it into several rules")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise SpecError(field, text, "is not an expression", _ALLOWED) from None
    found: set[str] = set()
    _check(tree, text, field, frozenset(names), found, depth=0)
    return Expression(text=text, field=field, names=frozenset(found), _tree=tree)


def _check(node: ast.AST, text: str, field: str, known: frozenset[str], found: set[str], *, depth: int) -> None:
    """Refuse anything that is not on the allow-list; collects names into `found`."""
    if depth > MAX_DEPTH:
        raise SpecError(field, text, f"is nested deeper than {MAX_DEPTH} levels", "split it into several rules")
    match node:
        case ast.Name():
            if node.id not in known:
                hint = ", ".join(nearest(node.id, known))
                raise SpecError(field, text, f"unknown name {node.id!r}", f"did you mean {hint}?")
            found.add(node.id)
            return
        case ast.Constant():
            value = node.value
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise SpecError(field, text, f"{value!r} is not a number", _ALLOWED)
            if not abs(value) <= MAX_MAGNITUDE:
                raise SpecError(field, text, f"a number exceeds {MAX_MAGNITUDE:g}", "use smaller numbers")
            return
        case ast.BoolOp():
            children: list[ast.expr] = node.values
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            children = [node.operand]
        case ast.BinOp() if type(node.op) in _BINARY:
            children = [node.left, node.right]
        case ast.Compare() if all(type(op) in _COMPARE for op in node.ops):
            children = [node.left, *node.comparators]
        case ast.Call(func=ast.Name(id="min" | "max"), keywords=[]) if len(node.args) >= 2:
            children = node.args
        case _:
            raise SpecError(field, text, f"{type(node).__name__} is not allowed", _ALLOWED)
    for child in children:
        _check(child, text, field, known, found, depth=depth + 1)


def _evaluate(node: ast.expr, values: Mapping[str, Number]) -> Number:
    match node:
        case ast.Name():
            return values[node.id]
        case ast.Constant(value=int() | float() as constant):
            return constant
        case ast.BoolOp():
            parts = (bool(_evaluate(part, values)) for part in node.values)
            return all(parts) if isinstance(node.op, ast.And) else any(parts)
        case ast.UnaryOp():
            inner = _evaluate(node.operand, values)
            return (not inner) if isinstance(node.op, ast.Not) else -inner
        case ast.BinOp():
            return _bounded(_BINARY[type(node.op)](_evaluate(node.left, values), _evaluate(node.right, values)))
        case ast.Compare():
            left = _evaluate(node.left, values)
            for op, part in zip(node.ops, node.comparators, strict=True):
                right = _evaluate(part, values)
                if not _COMPARE[type(op)](left, right):
                    return False
                left = right
            return True
        case ast.Call(func=ast.Name(id=name)):
            return _CALLS[name](*(_evaluate(part, values) for part in node.args))
        case _:  # pragma: no cover - _check let nothing else through
            raise AssertionError(ast.dump(node))


def _bounded(value: Number) -> Number:
    if not abs(value) <= MAX_MAGNITUDE:
        raise OverflowError
    return value
