"""Autocast in source: which calls open it, in which format, and what runs inside."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from halfstep.doctor.code.formats import Named, find_class_definition, find_function_definition, find_named_format
from halfstep.doctor.code.order import iterate_ancestors
from halfstep.doctor.code.script import (
    FUNCTIONS,
    Function,
    Script,
    find_argument,
    find_method_name,
    format_variable,
    has_unpacked_arguments,
)
from halfstep.doctor.code.words import collect_words

OLD = frozenset({"torch.cuda.amp.autocast", "torch.cpu.amp.autocast"})
NEW = frozenset({"torch.autocast", "torch.amp.autocast"})
_NAMES = OLD | NEW
_DEFAULTS: dict[str, Named] = {"cuda": "fp16", "cpu": "bf16"}
_MODULES = ("forward", "__call__")
_OPENED = re.compile(r"autocast\b")
_ISLAND = re.compile(r"autocast\((?:[^()]|\([^()]*\))*\benabled=False")


def can_open_autocast(text: str) -> bool:
    """Return whether a file may open autocast; models of transformers only switch it off, and need no parsing."""
    if "autocast" not in collect_words(text):
        return False
    # A pattern with a leading \b is tried at every letter of a file.
    places = [m.start() for m in _OPENED.finditer(text) if not re.match(r"\w", text[m.start() - 1 : m.start()])]
    islands = sum(_ISLAND.match(text, place) is not None for place in places)
    return len(places) > islands + text.count("import autocast")


@dataclass(frozen=True)
class Autocast:
    """A call that opens autocast; None is what the source does not say."""

    call: ast.Call
    device: str | None
    format: Named | None
    enabled: bool | None
    cached: bool
    """Whether it keeps the cast copies of weights until it ends."""

    @property
    def may_be_on(self) -> bool:
        return self.enabled is not False

    def __str__(self) -> str:
        return f"autocast of line {self.call.lineno}"


class Autocasts:
    """All autocast of a file."""

    def __init__(self, script: Script) -> None:
        self._script = script
        calls = script.calls() if "autocast" in script.source else ()
        self.all = [found for call in calls if (found := _parse_autocast(script, call))]
        self._by_call = {one.call: one for one in self.all}

    @property
    def on(self) -> list[Autocast]:
        """Those that are not certainly switched off."""
        return [one for one in self.all if one.may_be_on]

    def around(self, node: ast.AST) -> Autocast | None:
        """Return the innermost autocast around a node within its function, its decorators included."""
        for one in self._openers(node):
            found = self._by_call.get(one) if isinstance(one, ast.Call) else None
            if found is not None:
                return found
        return None

    def _openers(self, node: ast.AST) -> Iterator[ast.AST]:
        inside = node
        for outer in iterate_ancestors(self._script, node):
            if isinstance(outer, (ast.With, ast.AsyncWith)) and isinstance(inside, ast.stmt):
                # `with a, b:` opens b inside a.
                for item in reversed(outer.items):
                    yield self._script.value(item.context_expr)
            inside = outer
        scope = self._script.scopes.get(node)
        if isinstance(scope, FUNCTIONS):
            yield from scope.decorator_list

    def body(self, autocast: Autocast) -> list[ast.stmt]:
        """Return the statements that an autocast is opened for; none if it is not seen."""
        withs: Iterator[ast.With | ast.AsyncWith] = self._script.each(ast.With, ast.AsyncWith)
        for with_ in withs:
            if any(self._script.value(item.context_expr) is autocast.call for item in with_.items):
                return with_.body
        for function in self._script.functions():
            if autocast.call in function.decorator_list:
                return function.body
        return []

    @cached_property
    def reached(self) -> dict[ast.AST, list[Autocast]]:
        """Functions of this file that run under an autocast that is opened outside of them."""
        found: dict[ast.AST, list[Autocast]] = {}
        for autocast in self.on:
            for function in _find_reached_functions(self._script, self, autocast):
                found.setdefault(function, []).append(autocast)
        return found

    def over(self, node: ast.AST) -> list[Autocast]:
        """Return every autocast that a node may run under, the nearest alone where there is one in its function."""
        near = self.around(node)
        if near is not None:
            return [near] if near.may_be_on else []
        scope = self._script.scopes.get(node)
        return self.reached.get(scope, []) if scope is not None else []


def _parse_autocast(script: Script, call: ast.Call) -> Autocast | None:
    if find_method_name(call) == "autocast" and "accelerator" in (format_variable(call.func) or "").lower():
        return Autocast(call, None, None, None, cached=True)
    if not script.is_one_of(call.func, _NAMES):
        return None
    if script.is_one_of(call.func, OLD):
        device = min(script.names(call.func)).split(".")[1]
        given = {"enabled": find_argument(call, "enabled", 0), "dtype": find_argument(call, "dtype", 1)}
        given["cache_enabled"] = find_argument(call, "cache_enabled", 2)
    else:
        named = script.constant(find_argument(call, "device_type", 0))
        device = named.partition(":")[0] if isinstance(named, str) else ""
        given = {"dtype": find_argument(call, "dtype", 1), "enabled": find_argument(call, "enabled", 2)}
        given["cache_enabled"] = find_argument(call, "cache_enabled", 3)
    return _build_autocast(script, call, device or None, given)


def _build_autocast(script: Script, call: ast.Call, device: str | None, given: dict[str, ast.expr | None]) -> Autocast:
    hidden = has_unpacked_arguments(call)
    enabled = True if given["enabled"] is None and not hidden else script.constant(given["enabled"])
    dtype, format = given["dtype"], None
    if dtype is not None and script.constant(dtype) is not None:
        format = find_named_format(script, dtype)
    elif not hidden:
        format = _DEFAULTS.get(device or "")
    cached = script.constant(given["cache_enabled"]) is not False
    return Autocast(call, device, format, enabled if isinstance(enabled, bool) else None, cached)


def _find_reached_functions(script: Script, autocasts: Autocasts, autocast: Autocast) -> set[ast.AST]:
    """Return the functions of this file that code under an autocast calls, as far as names tell."""
    found: set[ast.AST] = set()
    waiting: list[ast.AST] = list(autocasts.body(autocast))
    while waiting:
        for function in _list_called(script, autocasts, autocast, waiting.pop()):
            if function not in found:
                found.add(function)
                waiting.extend(function.body)
    return found


def _list_called(script: Script, autocasts: Autocasts, autocast: Autocast, code: ast.AST) -> Iterator[Function]:
    for node in ast.walk(code):
        if not isinstance(node, (ast.Name, ast.Attribute)) or not isinstance(node.ctx, ast.Load):
            continue
        near = autocasts.around(node)
        if near is None or near is autocast:
            yield from _iterate_called_functions(script, node)


def _iterate_called_functions(script: Script, node: ast.AST) -> Iterator[Function]:
    """Yield the functions that run when a variable is called: its own, or the forward of a module's class."""
    if (function := find_function_definition(script, node)) is not None:
        yield function
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        yield from _iterate_methods(script.class_of(node), (node.attr,))
    yield from (one for made in _find_instance_classes(script, node) for one in _iterate_methods(made, _MODULES))


def _find_instance_classes(script: Script, node: ast.AST) -> Iterable[ast.ClassDef]:
    """Return the classes of this file that a variable may be an instance of."""
    found: list[ast.ClassDef] = []
    for value in script.bindings(node):
        for made in ast.walk(value) if value is not None else ():
            if isinstance(made, ast.Call):
                found += filter(
                    None, [find_class_definition(script, made.func), _find_returned_class(script, made.func)]
                )
    return found


def _find_returned_class(script: Script, node: ast.AST) -> ast.ClassDef | None:
    function = find_function_definition(script, node)
    for one in script.every(ast.Return) if function is not None else ():
        if script.scopes[one] is function and isinstance(one.value, ast.Call):
            return find_class_definition(script, one.value.func)
    return None


def _iterate_methods(owner: ast.ClassDef | None, names: tuple[str, ...]) -> Iterator[Function]:
    for node in owner.body if owner is not None else ():
        if isinstance(node, FUNCTIONS) and node.name in names:
            yield node
