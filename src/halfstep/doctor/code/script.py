"""A Python file as a syntax tree with parents, scopes, imports and bindings. Nothing in it is imported or executed."""

from __future__ import annotations

import ast
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import chain
from typing import Any, NamedTuple, TypeAlias, TypeVar

from halfstep.doctor.code.patch import Patch
from halfstep.doctor.located import LocatedFinding, split_lines
from halfstep.finding import Severity

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (*FUNCTIONS, ast.Lambda, ast.ClassDef)
_MAGIC = re.compile(r"^(\s*)[%!].*$", re.MULTILINE)
"""A line for IPython's shell, in scripts that were exported from a notebook."""
_MOVED = {
    "torch.cuda.amp.autocast_mode.": "torch.cuda.amp.",
    "torch.cuda.amp.grad_scaler.": "torch.cuda.amp.",
    "torch.cpu.amp.autocast_mode.": "torch.cpu.amp.",
    "torch.cpu.amp.grad_scaler.": "torch.cpu.amp.",
    "torch.amp.autocast_mode.": "torch.amp.",
    "torch.amp.grad_scaler.": "torch.amp.",
    "torch.nn.utils.clip_grad.": "torch.nn.utils.",
    "pytorch_lightning.": "lightning.pytorch.",
}
"""Modules whose names torch also gives under a shorter one."""
_MOVED_FROM = tuple(_MOVED)
_DEEPEST = 8
"""How many bindings are followed from name to name."""
_MOST_BINDINGS = 50
"""How many values of one variable are kept; with more than one, its value is not certain anyway."""
_NO_NODES = frozenset(
    {"arg", "asname", "attr", "conversion", "ctx", "id", "is_async", "kind", "level", "module", "op", "ops", "simple"}
    | {"type_comment"}
)
"""Fields that hold words and numbers, or one of the objects that Python has for all contexts and operators."""
_FIELDS: dict[type[ast.AST], tuple[str, ...]] = {ast.Name: (), ast.Constant: ()}
"""The fields of each type that may hold nodes, of the types that were met."""
_Node = TypeVar("_Node", bound=ast.AST)


class Binding(NamedTuple):
    """One place where a name gets a value; the value is None if it cannot be read off."""

    scope: ast.AST
    value: ast.expr | None


class Script:
    """A parsed file, and answers about it."""

    def __init__(self, file: str, text: str, tree: ast.Module) -> None:
        self.source = text
        self.file, self.lines, self.tree = file, [line.rstrip("\r\n") for line in split_lines(text)], tree
        self.parents: dict[ast.AST, ast.AST] = {}
        self.scopes: dict[ast.AST, ast.AST] = {}
        self._by_type: dict[type[ast.AST], list[ast.AST]] = defaultdict(list)
        self._imports: dict[str, set[str]] = defaultdict(set)
        self._bindings: dict[str, list[Binding]] = defaultdict(list)
        self._calls_in: dict[ast.AST, list[ast.Call]] = defaultdict(list)
        self._calls_by_method: dict[str, list[ast.Call]] = defaultdict(list)
        self._named: dict[str, list[Function | ast.ClassDef]] = defaultdict(list)
        self._walk()
        self._read_imports()
        self._read_bindings()

    def every(self, kind: type[_Node]) -> Iterator[_Node]:
        """Yield all nodes of a type, in the order of the source."""
        return iter(self._by_type.get(kind, ()))  # type: ignore[arg-type]

    def each(self, *kinds: type[ast.AST]) -> Iterator[Any]:
        """Yield all nodes of several types, one type after the other."""
        return chain.from_iterable(map(self.every, kinds))

    def functions(self) -> Iterator[Function]:
        """Yield all functions and methods."""
        return self.each(*FUNCTIONS)

    def calls(self, scope: ast.AST | None = None) -> Iterator[ast.Call]:
        """Yield all calls, or those directly in one function."""
        return self.every(ast.Call) if scope is None else iter(self._calls_in.get(scope, ()))

    def calls_of(self, wanted: frozenset[str]) -> list[ast.Call]:
        """Return all calls of what certainly is one of these, by their full names."""
        # A full name ends with a word of the source, also where it is imported under another name.
        if not any(name in self.source for name in _collect_last_names(wanted)):
            return []
        return [call for call in self.calls() if self.is_one_of(call.func, wanted)]

    def calls_of_methods(self, *names: str) -> list[ast.Call]:
        """Return all calls of methods with these names, one name after the other."""
        return [call for name in names for call in self._calls_by_method.get(name, ())]

    def named(self, name: str) -> list[Function | ast.ClassDef]:
        """Return the functions and classes of this name, methods left out."""
        return self._named.get(name, [])

    # -- names --------------------------------------------------------------------------------------------------------

    def names(self, node: ast.AST) -> frozenset[str]:
        """Return the full names that an expression may stand for; none if that is not known."""
        return self._names(node, _DEEPEST)

    def is_one_of(self, node: ast.AST, wanted: frozenset[str]) -> bool:
        """Return whether an expression certainly is one of these."""
        # Most calls are of something else, which the last name tells without following any binding.
        if isinstance(node, ast.Attribute) and node.attr not in _collect_last_names(wanted):
            return False
        if isinstance(node, ast.Name) and node.id not in self._imports and node.id not in self._bindings:
            return False
        found = self.names(node)
        return bool(found) and found <= wanted

    def _names(self, node: ast.AST, deep: int) -> frozenset[str]:
        rest: list[str] = []
        while isinstance(node, ast.Attribute):
            rest.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or deep == 0:
            return frozenset()
        found = {".".join((base, *rest)) for base in self._roots(node, deep)}
        return frozenset(map(_shorten_name, found))

    def _roots(self, name: ast.Name, deep: int) -> frozenset[str]:
        imported = frozenset(self._imports.get(name.id, ()))
        bound = self.bindings(name)
        if not bound:
            return imported
        if imported or len(bound) > 1 or not isinstance(bound[0], (ast.Attribute, ast.Name)):
            return frozenset({f"?{name.id}"})
        return self._names(bound[0], deep - 1)

    # -- values -------------------------------------------------------------------------------------------------------

    def bindings(self, node: ast.AST) -> list[ast.expr | None]:
        """Return all values that a variable, or an attribute such as `self.scaler`, is given where it is visible."""
        path = format_variable(node)
        if path is None:
            return []
        if path.startswith("self."):
            owner = self.class_of(node)
            return [one.value for one in self._bindings.get(path, ()) if self.class_of(one.scope) is owner]
        found = self._bindings.get(path, [])
        scope: ast.AST | None = self.scopes.get(node)
        while scope is not None and found:
            if here := [one.value for one in found if one.scope is scope]:
                return here
            scope = self.scopes.get(scope)
        return []

    def bound(self) -> Iterator[tuple[str, ast.expr]]:
        """Yield every variable with every value that can be read off."""
        for path, found in self._bindings.items():
            yield from ((path, one.value) for one in found if one.value is not None)

    def value(self, node: ast.AST) -> ast.AST:
        """Return the expression that a variable stands for, or the node itself where that is not certain."""
        for _ in range(_DEEPEST):
            bound = self.bindings(node)
            if len(bound) != 1 or bound[0] is None:
                break
            node = bound[0]
        return node

    def constant(self, node: ast.AST | None) -> object:
        """Return a number, word or boolean that is certain; the ellipsis where it is not."""
        node = self.value(node) if node is not None else None
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            value = node.operand.value
            return -value if isinstance(value, (int, float)) else ...
        return node.value if isinstance(node, ast.Constant) else ...

    # -- places -------------------------------------------------------------------------------------------------------

    def class_of(self, node: ast.AST | None) -> ast.ClassDef | None:
        """Return the class around a node."""
        while node is not None and not isinstance(node, ast.ClassDef):
            node = self.parents.get(node)
        return node

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the statement that a node is part of."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def text(self, node: ast.AST) -> str:
        """Return an expression or statement as it is written; in other words where it is on several lines."""
        first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", None)
        if not first or first != last:
            return ast.unparse(node)
        # Columns are counted in bytes of UTF-8.
        line = self.lines[first - 1].encode(errors="surrogatepass")
        return line[node.col_offset : node.end_col_offset].decode(errors="replace")  # type: ignore[attr-defined]

    def with_argument(self, call: ast.Call, given: str) -> str:
        """Return a call as it is written, with one more argument at its end."""
        start = self.text(call).removesuffix(")").rstrip().removesuffix(",")
        return f"{start}{', ' if call.args or call.keywords else ''}{given})"

    def patch(self) -> Patch:
        """Return an empty patch of this file."""
        return Patch(self.file, self.lines, self.parents)

    def finding(
        self, name: str, severity: Severity, node: ast.AST, evidence: str, fix: str, patch: Patch | None = None
    ) -> LocatedFinding:
        """Return a finding at a node; a patch that cannot be made safely gives no edits."""
        line = getattr(node, "lineno", 1)
        edits = patch.edits() if patch else ()
        return LocatedFinding(f"code.{name}", severity, f"line {line}: {evidence}", fix, self.file, line, edits)

    # -- reading ------------------------------------------------------------------------------------------------------

    def _walk(self) -> None:
        # Half a million nodes in a large project: every lookup, call or object here is paid for each of them.
        stack: list[ast.AST] = [self.tree]
        scopes, parents, by_type = self.scopes, self.parents, self._by_type
        scopes[self.tree] = self.tree
        while stack:
            node = stack.pop()
            kind = node.__class__
            by_type[kind].append(node)
            scope = scopes[node]
            if kind is ast.Call:
                self._calls_in[scope].append(node)  # type: ignore[arg-type]
                if node.func.__class__ is ast.Attribute:  # type: ignore[attr-defined]
                    self._calls_by_method[node.func.attr].append(node)  # type: ignore[attr-defined,arg-type]
            if kind not in _FIELDS:
                _FIELDS[kind] = tuple(name for name in kind._fields if name not in _NO_NODES)
            fields = _FIELDS[kind]
            if not fields:
                continue
            inner = node if kind in _SCOPES else scope
            first = len(stack)
            for name in fields:
                value = getattr(node, name, None)
                if value.__class__ is list:
                    stack += [one for one in value if isinstance(one, ast.AST)]  # type: ignore[union-attr]
                elif isinstance(value, ast.AST):
                    stack.append(value)
            children = stack[first:]
            for child in children:
                parents[child] = node
                scopes[child] = inner
            # The first child is the next.
            children.reverse()
            stack[first:] = children
        del scopes[self.tree]

    def _read_imports(self) -> None:
        for node in self.every(ast.Import):
            for alias in node.names:
                root = alias.name if alias.asname else alias.name.partition(".")[0]
                self._imports[alias.asname or root].add(root)
        for source in self.every(ast.ImportFrom):
            for alias in source.names:
                start = "." * source.level + (source.module or "")
                self._imports[alias.asname or alias.name].add(f"{start}.{alias.name}")

    def _read_bindings(self) -> None:
        for assign in self.every(ast.Assign):
            for target in assign.targets:
                self._bind(target, assign.value)
        for node in self.each(ast.AnnAssign, ast.NamedExpr):
            self._bind(node.target, node.value)
        for target in self._opaque_targets():
            self._bind(target, None)
        for function in self.each(*FUNCTIONS, ast.ClassDef):
            self._add(function.name, Binding(self.scopes[function], None))
            if not isinstance(self.parents[function], ast.ClassDef):
                self._named[function.name].append(function)
        for argument in self.every(ast.arg):
            self._add(argument.arg, Binding(self.scopes[argument], None))

    def _opaque_targets(self) -> Iterator[ast.expr]:
        yield from (node.target for node in self.each(ast.AugAssign, ast.For, ast.AsyncFor, ast.comprehension))
        yield from (item.optional_vars for item in self.every(ast.withitem) if item.optional_vars)

    def _bind(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            values = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
            paired = values if len(values) == len(target.elts) else [None] * len(target.elts)
            for one, its in zip(target.elts, paired, strict=True):
                self._bind(one, its)
        elif (path := format_variable(target)) is not None:
            self._add(path, Binding(self.scopes[target], value))

    def _add(self, path: str, binding: Binding) -> None:
        if len(self._bindings[path]) < _MOST_BINDINGS:
            self._bindings[path].append(binding)


def parse_script(file: str, text: str) -> Script:
    """Return the parsed file; raise SyntaxError, ValueError, RecursionError or MemoryError where Python cannot."""
    return Script(file, text, parse_syntax_tree(text))


def parse_syntax_tree(text: str) -> ast.Module:
    """Return the tree of a file, without lines for IPython's shell; raise as `parse` does."""
    with warnings.catch_warnings():
        # An invalid escape such as "\d" in third-party code is not our concern, even under `-W error`.
        warnings.simplefilter("ignore")
        try:
            return ast.parse(text)
        except SyntaxError:
            return ast.parse(_MAGIC.sub(r"\1pass", text))


def format_variable(node: ast.AST) -> str | None:
    """Return a variable as text, such as `self.scaler` or `optimizers['d']`; None for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = format_variable(node.value)
        return f"{base}.{node.attr}" if base else None
    if isinstance(node, ast.Subscript) and isinstance(node.slice, (ast.Constant, ast.Name)):
        base = format_variable(node.value)
        return f"{base}[{ast.unparse(node.slice)}]" if base else None
    return None


def find_method_name(call: ast.AST) -> str | None:
    """Return the name of the method that is called; None for any other expression."""
    return call.func.attr if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else None


def find_receiver(call: ast.Call) -> str | None:
    """Return the variable whose method is called."""
    return format_variable(call.func.value) if isinstance(call.func, ast.Attribute) else None


def find_argument(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """Return an argument by name or position; None if it is not given."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    has = position is not None and position < len(call.args)
    return call.args[position] if has and position is not None else None


def has_unpacked_arguments(call: ast.Call) -> bool:
    """Return whether a call has arguments that cannot be seen, as `**options`."""
    return any(keyword.arg is None for keyword in call.keywords) or any(isinstance(a, ast.Starred) for a in call.args)


def iterate_alternatives(node: ast.expr, is_true: bool = False) -> Iterator[ast.expr]:
    """Yield the expressions that a value may be: `a if b else c` is a or c, and so is `b and a or c`.

    With `is_true`, yield those that the value may be where it is true.
    """
    if isinstance(node, ast.IfExp):
        yield from (*iterate_alternatives(node.body, is_true), *iterate_alternatives(node.orelse, is_true))
    elif isinstance(node, ast.BoolOp):
        *first, last = node.values
        for one in first:
            if isinstance(node.op, ast.Or):
                yield from iterate_alternatives(one, is_true=True)
            elif not is_true:
                yield from iterate_alternatives(one)
        yield from iterate_alternatives(last, is_true)
    else:
        yield node


def iterate_names(node: ast.AST) -> Iterator[str]:
    """Yield every name and attribute in an expression."""
    for one in ast.walk(node):
        if isinstance(one, ast.Name):
            yield one.id
        elif isinstance(one, ast.Attribute):
            yield one.attr


def has_matching_name(node: ast.AST, pattern: re.Pattern[str]) -> bool:
    """Return whether a name or attribute in an expression matches."""
    return any(pattern.search(word) for word in iterate_names(node))


@cache
def _collect_last_names(wanted: frozenset[str]) -> frozenset[str]:
    return frozenset(name.rpartition(".")[2] for name in wanted)


def _shorten_name(name: str) -> str:
    for long, short in _MOVED.items() if name.startswith(_MOVED_FROM) else ():
        if name.startswith(long):
            return short + name[len(long) :]
    return name
