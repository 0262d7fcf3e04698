"""Values of an expression that are written in the source: the branches of a conditional, the entries of a table."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from halfstep.doctor.code.formats import find_named_format
from halfstep.doctor.code.script import (
    FUNCTIONS,
    Script,
    find_argument,
    find_method_name,
    format_variable,
    iterate_alternatives,
)

_DEEPEST = 6
_MOST = 32
"""Values of one expression; a table with more is not one of precisions."""
_CHANGES = ("update", "setdefault", "pop", "clear")


def list_possible_values(script: Script, node: ast.expr) -> tuple[object, ...] | None:
    """Return all values that an expression can have, each of them a constant or a dtype; None if they are not known.

    Branches, tables and names with one assignment are followed. Nothing is evaluated, conditions included.
    """
    # `exec` of a text can assign any name, as scripts do that are configured by a file of Python.
    if any(isinstance(call.func, ast.Name) and call.func.id == "exec" for call in script.calls()):
        return None
    found = _list_values(script, node, _DEEPEST)
    return tuple(dict.fromkeys(found)) if found is not None and len(found) <= _MOST else None


def find_lookup_key(script: Script, node: ast.expr) -> str:
    """Return the dotted key of a lookup in a configuration: `trainer.precision` of `cfg["trainer"].get("precision")`.

    A default is left out, as in `cfg.precision or "no"`. Return an empty text for any other expression.
    """
    keys: list[str] = []
    value: ast.AST = _strip_default(script.value(node))
    while not isinstance(value, ast.Name):
        key: object = None
        if isinstance(value, ast.Attribute):
            key, value = value.attr, value.value
        elif isinstance(value, ast.Subscript):
            key, value = script.constant(value.slice), value.value
        elif find_method_name(value) == "get" and isinstance(value, ast.Call) and value.args:
            assert isinstance(value.func, ast.Attribute)
            key, value = script.constant(value.args[0]), value.func.value
        if not isinstance(key, str):
            return ""
        keys.insert(0, key)
    # A parameter has the value that a caller looks up.
    return ".".join(keys) or (value.id if _is_parameter(script, value) else "")


def _strip_default(node: ast.AST) -> ast.AST:
    """Return the lookup of `lookup or default`, of `lookup if lookup else default`, and of `str(lookup)`."""
    while True:
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            node = node.values[0]
        elif isinstance(node, ast.IfExp) and (words := re.findall(r"\w+", ast.unparse(node.body))):
            # The condition is about the same key: `cfg["precision"] if "precision" in cfg else "no"`.
            if words[-1] not in re.findall(r"\w+", ast.unparse(node.test)):
                return node
            node = node.body
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("str", "int", "bool") and node.args:
            node = node.args[0]
        else:
            return node


def find_passed_argument(script: Script, call: ast.Call, name: str) -> ast.expr | None:
    """Return an argument by name, also from `**options` where `options` is a table or `dict(...)` in the source."""
    given = find_argument(call, name)
    for keyword in call.keywords if given is None else ():
        table = script.value(keyword.value) if keyword.arg is None else None
        if isinstance(table, ast.Call) and isinstance(table.func, ast.Name) and table.func.id == "dict":
            given = given or find_argument(table, name)
        elif isinstance(table, ast.Dict) and not _is_changed(script, keyword.value):
            pairs = zip(table.keys, table.values, strict=True)
            given = given or next((one for key, one in pairs if key and script.constant(key) == name), None)
    return given


def _is_parameter(script: Script, name: ast.Name) -> bool:
    scope: ast.AST | None = script.scopes.get(name)
    while scope is not None and not isinstance(scope, FUNCTIONS):
        scope = script.scopes.get(scope)
    given = (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs) if scope is not None else ()
    return any(one.arg == name.id for one in given) and script.bindings(name) == [None]


def _list_values(script: Script, node: ast.expr, deep: int) -> list[object] | None:
    value = _follow_names(script, node)
    if deep == 0 or value is None:
        return None
    if (named := find_named_format(script, value)) is not None:
        return [named]
    if isinstance(value, (ast.Constant, ast.UnaryOp)):
        constant = script.constant(value)
        return [constant] if constant is not ... else None
    inner = list(iterate_alternatives(value))
    if inner == [value]:
        looked_up = _list_table_entries(script, value)
        if looked_up is None:
            return None
        inner = looked_up
    found: dict[object, None] = {}
    for one in inner:
        own = _list_values(script, one, deep - 1)
        if own is None or len(found) > _MOST:
            return None
        found |= dict.fromkeys(own)
    return list(found)


def _follow_names(script: Script, node: ast.expr) -> ast.expr | None:
    """Return the expression behind names with one assignment; None behind another name.

    Attributes are not followed, because other code can set them.
    """
    for _ in range(_DEEPEST):
        if not isinstance(node, ast.Name):
            return node
        bound = script.bindings(node)
        if len(bound) != 1 or bound[0] is None:
            return None
        node = bound[0]
    return None


def _list_table_entries(script: Script, node: ast.expr) -> list[ast.expr] | None:
    """Return the entries that `{...}[key]` or `{...}.get(key, default)` can return."""
    if isinstance(node, ast.Subscript):
        holder, key, otherwise = node.value, node.slice, None
    elif find_method_name(node) == "get" and isinstance(node, ast.Call) and node.args and not node.keywords:
        assert isinstance(node.func, ast.Attribute)
        holder, key = node.func.value, node.args[0]
        otherwise = node.args[1] if len(node.args) > 1 else ast.Constant(None)
    else:
        return None
    table = _follow_names(script, holder)
    if not isinstance(table, ast.Dict) or None in table.keys or _is_changed(script, holder):
        return None
    default = [otherwise] if otherwise is not None else []
    wanted, keys = script.constant(key), [script.constant(one) for one in table.keys]
    if wanted is ... or ... in keys:
        return [*table.values, *default]
    return [table.values[index] for index, one in enumerate(keys) if one == wanted][-1:] or default or None


def _is_changed(script: Script, holder: ast.expr) -> bool:
    """Return whether a table gets further entries after its assignment."""
    path = format_variable(holder)
    if path is None:
        return False
    assigned: Iterable[ast.expr] = (target for assign in script.every(ast.Assign) for target in assign.targets)
    set_later = (one for one in assigned if isinstance(one, ast.Subscript) and format_variable(one.value) == path)
    calls = script.calls_of_methods(*_CHANGES)
    receivers = (call.func.value for call in calls if isinstance(call.func, ast.Attribute))
    return any(set_later) or any(format_variable(one) == path for one in receivers)
