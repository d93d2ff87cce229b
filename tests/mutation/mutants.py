# SPDX-License-Identifier: Apache-2.0
"""Small wrong changes to a module's source, one at a time."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from typing import NamedTuple

#: What an operator becomes, besides one of its operands alone.
_OPERATORS: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,),
    ast.LShift: (ast.RShift,),
    ast.BitOr: (ast.BitAnd,),
}

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}

_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}

#: Fields that say nothing about what the program does.
_SILENT = {"annotation", "returns", "type_comment", "bases", "ctx", "decorator_list"}


class Mutant(NamedTuple):
    """A change.

    Attributes:
        name: Where and what: ``function: before -> after``, and ``#n`` where that comes again.
        line: In the original source.
        source: The whole module, changed; without comments.
    """

    name: str
    line: int
    source: str


def mutants(source: str) -> Iterator[Mutant]:
    """All mutants of a module's functions."""
    tree = ast.parse(source)
    seen: dict[str, int] = {}
    for where, owner, field, index, node in _nodes(tree, ""):
        for replacement in _values(node) if isinstance(node, ast.expr) else _statements(node):
            ast.fix_missing_locations(ast.copy_location(replacement, node))
            before, after = _text(node), _text(replacement)
            if before == after or not where:
                continue
            name = f"{where}: {before} -> {after}"
            seen[name] = seen.get(name, 0) + 1
            if seen[name] > 1:
                name += f" #{seen[name]}"
            with _replaced(owner, field, index, node, replacement):
                text = ast.unparse(tree)
            yield Mutant(name, node.lineno, text)


def _text(node: ast.AST) -> str:
    """A node in one line, without what hangs below it."""
    return ast.unparse(node).split("\n", maxsplit=1)[0]


def _nodes(
    node: ast.AST, where: str
) -> Iterator[tuple[str, ast.AST, str, int | None, ast.expr | ast.stmt]]:
    """Every expression and statement: the function it is in, and its place in its parent."""
    for field, value in ast.iter_fields(node):
        if field in _SILENT:
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            # Messages are tested for what they must name, not word by word.
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                continue
            inside = where
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                inside = f"{where}.{child.name}".lstrip(".")
            if isinstance(child, (ast.expr, ast.stmt)):
                yield where, node, field, index, child
            yield from _nodes(child, inside)


@contextlib.contextmanager
def _replaced(
    owner: ast.AST, field: str, index: int | None, node: ast.AST, replacement: ast.AST
) -> Iterator[None]:
    value = getattr(owner, field)
    if index is None:
        setattr(owner, field, replacement)
    else:
        value[index] = replacement
    yield
    if index is None:
        setattr(owner, field, node)
    else:
        value[index] = node


def _values(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
            yield ast.Constant(value - 1)
        case ast.BinOp(left, operator, right):
            for other in _OPERATORS.get(type(operator), ()):
                yield ast.BinOp(left, other(), right)
            yield left
            yield right
        case ast.UnaryOp(operand=operand):
            yield operand
        case ast.BoolOp(operator, values):
            yield ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values)
            for index in range(len(values)):
                rest = values[:index] + values[index + 1 :]
                yield ast.BoolOp(operator, rest) if len(rest) > 1 else rest[0]
        case ast.Compare(left, [operator], right):
            for other in _COMPARISONS[type(operator)]:
                yield ast.Compare(left, [other()], right)
        case ast.IfExp(body=body, orelse=orelse):
            yield body
            yield orelse
        case ast.Call(function, args, keywords):
            if isinstance(function, ast.Name) and function.id in _CALLS:
                yield ast.Call(ast.Name(_CALLS[function.id]), args, keywords)
            for index in range(len(keywords)):
                yield ast.Call(function, args, keywords[:index] + keywords[index + 1 :])
            if len(args) > 1:
                yield ast.Call(function, args[:-1], keywords)
        case ast.Slice(lower, upper, step):
            if lower is not None:
                yield ast.Slice(None, upper, step)
            if upper is not None:
                yield ast.Slice(lower, None, step)
        case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
            for index, generator in enumerate(node.generators):
                if generator.ifs:
                    plain = ast.comprehension(generator.target, generator.iter, [], 0)
                    others = [*node.generators[:index], plain, *node.generators[index + 1 :]]
                    yield type(node)(node.elt, others)


def _statements(node: ast.stmt) -> Iterator[ast.stmt]:
    match node:
        case ast.Expr(ast.Constant()):
            pass  # a docstring
        case ast.Expr() | ast.Raise() | ast.AugAssign():
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()
        case ast.Return(value) if value is not None and _text(value) != "None":
            yield ast.Return(None)
        case ast.If(_, body, orelse):
            yield ast.If(ast.Constant(True), body, orelse)
            yield ast.If(ast.Constant(False), body, orelse)
        case ast.While(body=body, orelse=orelse):
            yield ast.While(ast.Constant(False), body, orelse)
        case ast.For(target, _, body, orelse):
            yield ast.For(target, ast.Tuple([]), body, orelse)
        case ast.With(items, body):
            if all(item.optional_vars is None for item in items):
                yield ast.If(ast.Constant(True), body, [])
        case ast.Try(body, handlers, orelse, finalbody):
            if finalbody:
                yield ast.Try(body, handlers, orelse, [ast.Pass()])
            if handlers:
                yield ast.If(ast.Constant(True), [*body, *orelse, *finalbody], [])
