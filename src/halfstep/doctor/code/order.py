"""Where two places of a function stand to each other: in which loop, under which conditions, on which branch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise

from halfstep.doctor.code.script import Script

LOOPS = (ast.For, ast.AsyncFor, ast.While)
_JUMPS = (ast.Return, ast.Continue, ast.Break, ast.Raise)


def iterate_ancestors(script: Script, node: ast.AST) -> Iterator[ast.AST]:
    """Yield what a node stands in, from the inside out, within its function."""
    scope = script.scopes.get(node)
    current = script.parents.get(node)
    while current is not None and current is not scope:
        yield current
        current = script.parents.get(current)


def find_enclosing_loop(script: Script, node: ast.AST) -> ast.AST | None:
    """Return the innermost loop around a node within its function."""
    return next((one for one in iterate_ancestors(script, node) if isinstance(one, LOOPS)), None)


def list_enclosing_conditions(script: Script, node: ast.AST) -> list[ast.If]:
    """Return the `if` statements that a node stands in, within its function."""
    return [one for one in iterate_ancestors(script, node) if isinstance(one, ast.If)]


def list_own_conditions(script: Script, node: ast.AST, other: ast.AST) -> list[ast.If]:
    """Return the `if` statements around a node that are not around the other."""
    shared = list_enclosing_conditions(script, other)
    return [one for one in list_enclosing_conditions(script, node) if one not in shared]


def is_earlier_node(one: ast.AST, other: ast.AST) -> bool:
    """Return whether a node stands before another in the source."""
    return _locate_node(one) < _locate_node(other)


def are_mutually_exclusive(script: Script, first: ast.AST, second: ast.AST) -> bool:
    """Return whether one pass through the code cannot reach the second place after the first."""
    chain = [first, *iterate_ancestors(script, first)]
    others = [second, *iterate_ancestors(script, second)]
    for inner, outer in pairwise(chain):
        if outer in others:
            return _name_branch(outer, inner) != _name_branch(outer, others[others.index(outer) - 1])
        if isinstance(outer, ast.If):
            block = outer.orelse if inner in outer.orelse else outer.body
            # Nothing after the statement follows a block that ends in a jump.
            if isinstance(block[-1], _JUMPS):
                return True
    return False


def _locate_node(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def _name_branch(parent: ast.AST, child: ast.AST) -> object:
    """Return which way of a branching statement a child is on; the same for all children of other statements."""
    if isinstance(parent, (ast.If, ast.IfExp)):
        body, orelse = parent.body, parent.orelse
        is_in_else = child in orelse if isinstance(orelse, list) else child is orelse
        is_in_body = child in body if isinstance(body, list) else child is body
        return "else" if is_in_else else "body" if is_in_body else "test"
    if isinstance(parent, ast.Try):
        return child if isinstance(child, ast.ExceptHandler) else "body"
    return child if isinstance(parent, ast.Match) else None
