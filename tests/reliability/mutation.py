"""Mutants of a module: the same source with one small fault. Pure.

A mutant is known by what it does (place, line of text, what became what), not by a line number: an explanation of one
that survives stays true while lines move.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
}
_IN_PLACE: dict[type[ast.operator], type[ast.operator]] = _ARITHMETIC | {ast.BitOr: ast.BitAnd}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}
_JUMPS = {ast.Continue: ast.Break, ast.Break: ast.Continue}

Header = tuple[int, int]


@dataclass(frozen=True)
class Mutant:
    """One fault. `place`: function or class that holds it; `line`: text of its first line; `lines`: first and last
    line number of the statement's own part; `number`: which of several that would read alike; `at`: which node of the
    module, and which of that node's faults.
    """

    module: str
    place: str
    line: str
    was: str
    becomes: str
    number: int
    lines: Header
    at: tuple[int, int]

    @property
    def id(self) -> str:
        again = f" ({self.number})" if self.number > 1 else ""
        return f"{self.module} {self.place}: {self.was} → {self.becomes} in {self.line}{again}"


@dataclass(frozen=True)
class _Spot:
    """A node that may be mutated, how to replace it, and the statement and place that hold it."""

    node: ast.expr | ast.stmt
    replace: Callable[[ast.AST], None]
    statement: ast.AST
    place: str


def mutants(module: str, source: str) -> list[Mutant]:
    """All mutants of a module's source, in the order of its lines."""
    text = source.splitlines()
    seen: Counter[tuple[str, str, str, str]] = Counter()
    found = []
    tree = ast.parse(source)
    for nth, spot in enumerate(_spots(tree, tree, "")):
        for which, other in enumerate(_others(spot.node)):
            line, was, becomes = text[spot.node.lineno - 1].strip(), _short(spot.node), _short(other)
            seen[spot.place, line, was, becomes] += 1
            number = seen[spot.place, line, was, becomes]
            lines = _own_lines(spot.statement)
            found.append(Mutant(module, spot.place, line, was, becomes, number, lines, (nth, which)))
    return sorted(found, key=lambda mutant: mutant.lines)


def mutated(source: str, at: tuple[int, int]) -> ast.Module:
    """The module with one of its faults put in."""
    tree = ast.parse(source)
    nth, which = at
    spot = next(islice(_spots(tree, tree, ""), nth, None))
    other = next(islice(_others(spot.node), which, None))
    spot.replace(ast.copy_location(other, spot.node))
    return ast.fix_missing_locations(tree)


# -- where ------------------------------------------------------------------------------------------------------------


def _spots(node: ast.AST, statement: ast.AST, place: str) -> Iterator[_Spot]:
    for child, replace in list(_children(node)):
        inner = place
        holder = child if isinstance(child, ast.stmt) else statement
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = f"{place}.{child.name}" if place else child.name
        if isinstance(child, ast.expr | ast.stmt):
            yield _Spot(child, replace, holder, inner)
        yield from _spots(child, holder, inner)


def _children(node: ast.AST) -> Iterator[tuple[ast.AST, Callable[[ast.AST], None]]]:
    """What of a node runs: no annotations, docstrings, imports, type aliases, nor the literal parts of an f-string."""
    if isinstance(node, ast.Import | ast.ImportFrom) or _alias(node):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "ctx"):
            continue
        if isinstance(value, list):
            found = [(item, partial(value.__setitem__, at)) for at, item in enumerate(value)]
        else:
            found = [(value, partial(setattr, node, name))]
        yield from ((child, put) for child, put in found if isinstance(child, ast.AST) and not _is_text(node, child))


def _alias(node: ast.AST) -> bool:
    """`Row = tuple[...]`, `Ready = Literal[...]`, `__all__ = [...]`: nothing that runs."""
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
        return False
    value = node.value
    typed = isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name)
    return node.targets[0].id == "__all__" or (typed and node.targets[0].id[:1].isupper())


def _is_text(node: ast.AST, child: ast.AST) -> bool:
    if isinstance(node, ast.JoinedStr):
        return isinstance(child, ast.Constant)
    if isinstance(node, ast.FormattedValue):
        return child is node.format_spec
    return isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)


def _own_lines(statement: ast.AST) -> Header:
    """The lines of a statement without the statements inside it."""
    assert isinstance(statement, ast.stmt)
    body = getattr(statement, "body", None)
    last = body[0].lineno - 1 if body else statement.end_lineno or statement.lineno
    return statement.lineno, max(statement.lineno, last)


# -- which faults -----------------------------------------------------------------------------------------------------


def _short(node: ast.AST) -> str:
    if isinstance(node, ast.Pass):
        return "nothing"
    if isinstance(node, ast.If | ast.While):
        return f"{type(node).__name__.lower()} {_short(node.test)}"
    text = " ".join(ast.unparse(ast.fix_missing_locations(node)).split())
    return text if len(text) <= 70 else f"{text[:50]} … {text[-17:]}"


def _others(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the node's place."""
    for kind, ways in _WAYS:
        if isinstance(node, kind):
            yield from ways(node)
    if isinstance(node, ast.If | ast.While):
        yield from (_with(node, test=test) for test in _negated(node.test))


def _with(node: ast.AST, **changes: object) -> ast.AST:
    return type(node)(**{**dict(ast.iter_fields(node)), **changes})


def _negated(test: ast.expr) -> Iterator[ast.expr]:
    """Comparisons and `not` have faults of their own that say the same."""
    if not isinstance(test, ast.Compare | ast.UnaryOp):
        yield ast.UnaryOp(ast.Not(), test)


def _compare(node: ast.Compare) -> Iterator[ast.AST]:
    for at, op in enumerate(node.ops):
        for other in _COMPARISONS[type(op)]:
            yield _with(node, ops=[*node.ops[:at], other(), *node.ops[at + 1 :]])


def _bool_op(node: ast.BoolOp) -> Iterator[ast.AST]:
    yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    for at in range(len(node.values)):
        left = [*node.values[:at], *node.values[at + 1 :]]
        yield left[0] if len(left) == 1 else _with(node, values=left)


def _unary_op(node: ast.UnaryOp) -> Iterator[ast.AST]:
    yield node.operand


def _conditional(node: ast.IfExp) -> Iterator[ast.AST]:
    yield from (_with(node, test=test) for test in _negated(node.test))


def _generator(node: ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp) -> Iterator[ast.AST]:
    for at, part in enumerate(node.generators):
        for which, test in enumerate(part.ifs):
            for negated in _negated(test):
                changed = _with(part, ifs=[*part.ifs[:which], negated, *part.ifs[which + 1 :]])
                yield _with(node, generators=[*node.generators[:at], changed, *node.generators[at + 1 :]])


def _constant(node: ast.Constant) -> Iterator[ast.AST]:
    value = node.value
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int | float):
        yield ast.Constant(value + 1)
    elif isinstance(value, str):
        yield ast.Constant("" if value else "x")
    elif isinstance(value, bytes):
        yield ast.Constant(b"" if value else b"x")


def _f_string(node: ast.JoinedStr) -> Iterator[ast.AST]:
    yield ast.Constant("")


def _bin_op(node: ast.BinOp) -> Iterator[ast.AST]:
    if isinstance(node.op, ast.BitOr):  # a union: of dicts, sets or flags
        yield node.left
        yield node.right
    elif other := _ARITHMETIC.get(type(node.op)):
        yield _with(node, op=other())


def _in_place(node: ast.AugAssign) -> Iterator[ast.AST]:
    if other := _IN_PLACE.get(type(node.op)):
        yield _with(node, op=other())
    yield ast.Pass()


def _call(node: ast.Call) -> Iterator[ast.AST]:
    if isinstance(node.func, ast.Name) and node.func.id in _CALLS:
        yield _with(node, func=ast.Name(_CALLS[node.func.id], ast.Load()))


def _return(node: ast.Return) -> Iterator[ast.AST]:
    if node.value is None:
        yield ast.Pass()
    elif not isinstance(node.value, ast.Constant):
        yield _with(node, value=ast.Constant(None))


def _expression(node: ast.Expr) -> Iterator[ast.AST]:
    if isinstance(node.value, ast.Call):
        yield ast.Pass()


def _assign(node: ast.Assign) -> Iterator[ast.AST]:
    """A name that is never bound would only be a crash; what is kept elsewhere may go unmissed."""
    if not any(isinstance(part, ast.Name) for target in node.targets for part in _targets(target)):
        yield ast.Pass()


def _targets(target: ast.expr) -> list[ast.expr]:
    return list(target.elts) if isinstance(target, ast.Tuple | ast.List) else [target]


def _jump(node: ast.Continue | ast.Break) -> Iterator[ast.AST]:
    yield _JUMPS[type(node)]()


def _gone(node: ast.Raise | ast.Delete) -> Iterator[ast.AST]:
    yield ast.Pass()


_WAYS: tuple[tuple[type[ast.AST] | tuple[type[ast.AST], ...], Callable[[Any], Iterator[ast.AST]]], ...] = (
    (ast.Compare, _compare),
    (ast.BoolOp, _bool_op),
    (ast.UnaryOp, _unary_op),
    (ast.IfExp, _conditional),
    ((ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp), _generator),
    (ast.Constant, _constant),
    (ast.JoinedStr, _f_string),
    (ast.BinOp, _bin_op),
    (ast.AugAssign, _in_place),
    (ast.Call, _call),
    (ast.Return, _return),
    (ast.Expr, _expression),
    (ast.Assign, _assign),
    ((ast.Continue, ast.Break), _jump),
    ((ast.Raise, ast.Delete), _gone),
)
