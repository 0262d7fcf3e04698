"""Find the statements of a loop from its forward pass to its backward pass, and run them again.

The statements are compiled with the file and the lines that they have in the user's code, so that an operation in a
rerun has the line that it has in the loop. Statements that the loss does not depend on, such as a meter, are left out.
"""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import inspect
import itertools
import linecache
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfstep.user_code import is_user_file


@functools.cache
def _is_loop_file(file: str) -> bool:
    """Return whether the loop may be in this file: the user's own, or text for `exec`, which has no lines."""
    return is_user_file(file) or file in ("<string>", "<stdin>")


Keys = set[str]
"""Names of variables and paths of attributes, such as `self.x`."""
_CONTAINER_METHODS = ("append", "extend", "add", "update", "insert", "setdefault", "clear", "pop", "appendleft")
_JUMPS = (ast.Break, ast.Continue, ast.Return)
_UNSUPPORTED = (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith, ast.Nonlocal, ast.Global)
_MOST_COPIED_ITEMS = 256
"""Items of a container up to which it is copied before a step."""
_DEEPEST_FRAME = 40
"""Frames of a stack that are looked at."""


# -- frames -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FramePlace:
    """A frame of the user's code at one time."""

    frame: int
    """The identity of the frame: no reference, which would keep its variables alive."""
    code: CodeType
    line: int

    def is_same_call(self, other: FramePlace) -> bool:
        """Return whether both are places in the same call of a function."""
        return self.frame == other.frame and self.code is other.code


def iterate_user_frames(innermost: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of the user's own files, the innermost first."""
    frame, left = innermost, _DEEPEST_FRAME
    while frame is not None and left:
        if _is_loop_file(frame.f_code.co_filename):
            yield frame
        frame, left = frame.f_back, left - 1


def read_frame_place(frame: FrameType) -> FramePlace:
    """Return where a frame is."""
    return FramePlace(id(frame), frame.f_code, frame.f_lineno)


def read_frame_column(frame: FrameType) -> int | None:
    """Return the column at which a frame is in its line; None if Python runs without columns."""
    places = itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    return next((column for _, _, column, _ in places), None)


def copy_frame_variables(frame: FrameType) -> dict[str, Any]:
    """Return the variables of a frame; the frame itself holds none of them longer."""
    found = frame.f_locals
    values = dict(found)
    # Until Python 3.12 the frame keeps this dictionary, and with it the tensors of this moment.
    if found is not frame.f_globals and type(found) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        found.clear()
    return values


# -- variables --------------------------------------------------------------------------------------------------------


_MISSING = object()


def holds_attributes(thing: Any) -> bool:
    """Return whether attributes of this object are variables of a loop: a trainer's are, a module's are not."""
    if isinstance(thing, (ModuleType, type, nn.Module, Tensor, FunctionType, MethodType, torch.optim.Optimizer)):
        return False
    return type(thing).__module__.partition(".")[0] != "torch" and type(getattr(thing, "__dict__", None)) is dict


def capture_variables(
    values: Mapping[str, Any], known: Mapping[str, Any], keys: Iterable[str] | None
) -> dict[str, Any]:
    """Return the values of these keys at this moment; all of them, and the attributes of plain objects, without keys.

    `known` are the global variables, for objects whose attributes are captured.
    """
    if keys is None:
        captured = {name: _copy_container(value) for name, value in values.items()}
        for name, thing in values.items():
            if holds_attributes(thing):
                captured |= {f"{name}.{key}": _copy_container(value) for key, value in vars(thing).items()}
        return captured
    captured = {}
    for key in keys:
        name, _, rest = key.partition(".")
        thing = values.get(name, known.get(name, _MISSING))
        if not rest:
            if name in values or not isinstance(thing, (ModuleType, type, FunctionType)):
                captured[key] = thing
        elif holds_attributes(thing):
            captured[key] = vars(thing).get(rest.partition(".")[0], _MISSING)
    return {key: _copy_container(value) for key, value in captured.items() if value is not _MISSING}


def _copy_container(value: Any) -> Any:
    """Return a copy of a short list or dictionary, which the loop may fill after this moment."""
    return value.copy() if type(value) in (list, dict, set) and len(value) <= _MOST_COPIED_ITEMS else value


# -- statements -------------------------------------------------------------------------------------------------------


class LoopSource:
    """The source of one function or module, as statements."""

    def __init__(self, code: CodeType) -> None:
        self._file = code.co_filename
        text = "".join(linecache.getlines(self._file))
        self._body: list[ast.stmt] = []
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            return
        if code.co_name == "<module>":
            self._body = tree.body
            return
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == code.co_name:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                if first == code.co_firstlineno:
                    self._body = node.body

    def between(
        self, forward: int | None, backward: int, values: Mapping[str, Any], column: int | None = None
    ) -> LoopSlice | None:
        """Return the statements from the line of the forward pass to that of the backward pass; None if unknown.

        `column` is that of the backward pass, where a line has several statements.
        Without a line of the forward pass, they start with the innermost loop around the backward pass.
        """
        ends = _find_path(self._body, backward, column)
        if not ends:
            return None
        if forward is None:
            loops = [level for level, (block, place) in enumerate(ends) if level and _is_loop(ends[level - 1])]
            level = loops[-1] if loops else 0
            block, end = ends[level]
            start = 0
        else:
            starts = _find_path(self._body, forward)
            shared = [level for level, pair in enumerate(zip(starts, ends, strict=False)) if pair[0][0] is pair[1][0]]
            if not shared:
                return None
            level = shared[-1]
            block, end = ends[level]
            start = starts[level][1]
        # A loop that starts with the backward pass of the batch before.
        chosen = block[start : end + 1] if start <= end else [*block[start:], *block[: end + 1]]
        return _build_slice(self._file, chosen, backward, column, values)

    def locate(self, forward: int, backward: int) -> ForwardPlace | None:
        """Return where a forward pass is in the block that it shares with the backward pass; None if unknown."""
        starts, ends = _find_path(self._body, forward), _find_path(self._body, backward)
        shared = [level for level, pair in enumerate(zip(starts, ends, strict=False)) if pair[0][0] is pair[1][0]]
        if not shared:
            return None
        level = shared[-1]
        return ForwardPlace(id(starts[level][0]), starts[level][1], any(map(_is_loop, starts[level:])))


class ForwardPlace(NamedTuple):
    """Where a forward pass is in a block of statements."""

    block: int
    statement: int
    in_loop: bool
    """Whether a loop inside the block repeats it."""

    def may_precede(self, later: ForwardPlace) -> bool:
        """Return whether this pass and a later one belong to one round through the block."""
        if self.block != later.block or self.statement > later.statement:
            return False
        return self.statement < later.statement or self.in_loop


Path = list[tuple[list[ast.stmt], int]]


def _is_loop(level: tuple[list[ast.stmt], int]) -> bool:
    return isinstance(level[0][level[1]], (ast.For, ast.While))


def _list_blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return []
    blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
    blocks += [handler.body for handler in getattr(statement, "handlers", [])]
    blocks += [case.body for case in getattr(statement, "cases", [])]
    return [block for block in blocks if block]


def _contains(node: ast.stmt, line: int, column: int | None = None) -> bool:
    if not node.lineno <= line <= (node.end_lineno or node.lineno):
        return False
    if column is None:
        return True
    return (node.lineno, node.col_offset) <= (line, column) < (node.end_lineno or line, node.end_col_offset or column)


def _find_path(body: list[ast.stmt], line: int, column: int | None = None) -> Path:
    """Return the blocks around a line, the outermost first, each with the place of the statement in it."""
    path: Path = []
    block: list[ast.stmt] | None = body
    while block is not None:
        place = next((place for place, statement in enumerate(block) if _contains(statement, line, column)), None)
        if place is None:
            break
        path.append((block, place))
        inner = _list_blocks(block[place])
        block = next((each for each in inner if any(_contains(statement, line, column) for statement in each)), None)
    return path


@dataclass(frozen=True)
class LoopSlice:
    """Statements of a loop that make the loss and call backward, compiled."""

    before: CodeType | None
    last: CodeType
    """The statement that calls backward."""
    keys: tuple[str, ...]
    """The variables that they read."""
    late: tuple[str, ...] = ()
    """Those of them with values from the time of the backward pass."""

    def run(self, namespace: dict[str, Any], capture: Callable[[], None]) -> None:
        """Run the statements; `capture` is called before the last one."""
        if self.before is not None:
            exec(self.before, namespace)
        capture()
        exec(self.last, namespace)


def _build_slice(
    file: str, chosen: Sequence[ast.stmt], line: int, column: int | None, values: Mapping[str, Any]
) -> LoopSlice | None:
    if any(isinstance(node, _UNSUPPORTED) for statement in chosen for node in ast.walk(statement)):
        return None
    pruner = _Pruner(values)
    last = pruner.truncate(chosen[-1], line, column)
    needed = pruner.loads(last)
    before, needed = pruner.prune(chosen[:-1], needed)
    # What the loop has read from an iterator is read from its variables.
    late = tuple(sorted(pruner.read & needed))
    try:
        compiled = [
            compile(ast.fix_missing_locations(ast.Module(_remove_jumps(part), [])), file, "exec")
            for part in (before, [last])
        ]
    except (SyntaxError, ValueError, TypeError):
        return None
    builtin = set(dir(builtins))
    return LoopSlice(compiled[0] if before else None, compiled[1], tuple(sorted(needed - builtin)), late)


def _remove_jumps(statements: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return a copy without `return`, and without `break` and `continue` of the loop around: they would not compile."""
    return [_JumpRemover().visit(copy.deepcopy(statement)) for statement in statements]


class _JumpRemover(ast.NodeTransformer):
    def __init__(self) -> None:
        self._loops = 0

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Return) or (isinstance(node, (ast.Break, ast.Continue)) and not self._loops):
            return ast.copy_location(ast.Pass(), node)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Lambda)):
            return node
        is_loop = isinstance(node, (ast.For, ast.While))
        self._loops += is_loop
        visited = self.generic_visit(node)
        self._loops -= is_loop
        return visited


def _format_key(node: ast.AST) -> str | None:
    """Return `a` or `a.b.c` for a name or an attribute of one; for an item, that of its container."""
    parts: list[str] = []
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
        else:
            parts.clear()
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def _reads_next(node: ast.expr) -> bool:
    """Return whether an expression takes the next item of an iterator, which is gone afterwards."""
    calls = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    return any(isinstance(function, ast.Name) and function.id == "next" for function in calls)


def _overlaps(key: str, keys: Iterable[str]) -> bool:
    return any(key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.") for other in keys)


class _Pruner:
    """Keep the statements that values depend on. `values` are variables at the time of the backward pass."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.read: Keys = set()
        """Variables that `next` has given their values."""

    def loads(self, *nodes: ast.AST) -> Keys:
        """Return the variables that these read."""
        found: Keys = set()
        for top in nodes:
            inner = {id(node.value) for node in ast.walk(top) if isinstance(node, ast.Attribute)}
            bound = {node.arg for node in ast.walk(top) if isinstance(node, ast.arg)}
            for node in ast.walk(top):
                if not isinstance(node, (ast.Name, ast.Attribute)) or id(node) in inner:
                    continue
                if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                    continue
                key = _format_key(node)
                if key is None or key.partition(".")[0] in bound:
                    continue
                found.add(key.partition(".")[0])
                if "." in key:
                    name, attribute = key.split(".")[:2]
                    # A method reads any attribute of its object.
                    method = inspect.ismethod(getattr(self._values.get(name), attribute, None))
                    found.add(f"{name}.*" if method else f"{name}.{attribute}")
        return found

    def prune(self, statements: Sequence[ast.stmt], needed: Keys) -> tuple[list[ast.stmt], Keys]:
        """Return the statements that `needed` depends on, and what these need themselves."""
        kept: list[ast.stmt] = []
        needed = set(needed)
        for statement in reversed(statements):
            found, needed = self._prune_one(statement, needed)
            if found is not None:
                kept.insert(0, found)
        return kept, needed

    def _prune_one(self, statement: ast.stmt, needed: Keys) -> tuple[ast.stmt | None, Keys]:
        if _list_blocks(statement):
            return self._prune_blocks(statement, needed)
        if isinstance(statement, (ast.Assert, ast.Delete, ast.Pass, ast.Raise, *_JUMPS)):
            return None, needed
        if isinstance(statement, ast.Expr) and not self._acts_on(statement.value, needed):
            return None, needed
        written, replaced = self._list_targets(statement)
        if isinstance(statement, ast.Assign) and _reads_next(statement.value):
            self.read |= written & needed
            return None, needed
        if not isinstance(statement, ast.Expr) and not any(self._is_needed(key, needed) for key in written):
            return None, needed
        return statement, (needed - replaced) | self.loads(statement)

    def _prune_blocks(self, statement: ast.stmt, needed: Keys) -> tuple[ast.stmt | None, Keys]:
        copied: Any = ast.copy_location(type(statement)(**dict(ast.iter_fields(statement))), statement)
        total, kept = set(needed), False
        # Twice: what a loop reads, its earlier rounds may have written.
        for _ in range(2 if isinstance(statement, (ast.For, ast.While)) else 1):
            wanted, kept = set(total), False
            for name in ("body", "orelse", "finalbody"):
                block = getattr(statement, name, [])
                left, reads = self.prune(block, wanted)
                kept = kept or bool(left)
                total |= reads
                setattr(copied, name, left or ([ast.copy_location(ast.Pass(), statement)] if name == "body" else []))
        if not kept and not any(self._is_needed(key, needed) for key in self._list_targets(statement)[0]):
            return None, needed
        heads = [child for child in ast.iter_child_nodes(statement) if not isinstance(child, ast.stmt)]
        return copied, total | self.loads(*heads)

    def _is_needed(self, key: str, needed: Keys) -> bool:
        name, _, rest = key.partition(".")
        if not rest:
            return name in needed
        return f"{name}.{rest.partition('.')[0]}" in needed or f"{name}.*" in needed

    def _list_targets(self, statement: ast.stmt) -> tuple[Keys, Keys]:
        """Return the variables that a statement writes, and those of them whose values before do not matter."""
        written: Keys = set()
        replaced: Keys = set()
        for node in ast.walk(statement):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                written.add(node.name)
            elif isinstance(node, ast.alias):
                written.add((node.asname or node.name).partition(".")[0])
            elif isinstance(getattr(node, "ctx", None), ast.Store) and (key := _format_key(node)) is not None:
                written.add(key)
                if (isinstance(node, ast.Name) and isinstance(statement, (ast.Assign, ast.AnnAssign))) or (
                    isinstance(node, ast.Attribute) and isinstance(statement, ast.Assign) and key.count(".") == 1
                ):
                    replaced.add(key)
        return written, replaced

    def _acts_on(self, node: ast.expr, needed: Keys) -> bool:
        """Return whether an expression without a result changes something that is needed."""
        if not isinstance(node, ast.Call):
            return False
        function = node.func
        if isinstance(function, ast.Attribute):
            base = _format_key(function.value)
            own = base is not None and (base in needed or self._is_needed(base, needed))
            in_place = function.attr.endswith("_") and not function.attr.endswith("__")
            if own and (in_place or function.attr in _CONTAINER_METHODS):
                return True
            method: Any = getattr(self._values.get(base or ""), function.attr, None)
            is_users = inspect.ismethod(method) and not isinstance(method.__self__, (nn.Module, type))
            if is_users and base is not None and is_user_file(method.__func__.__code__.co_filename):
                return f"{base}.*" in needed or any(key.startswith(f"{base}.") for key in needed)
            return in_place and any(self.loads(each) & needed for each in node.args)
        return False

    # -- the last statement -----------------------------------------------------------------------------------------

    def truncate(self, statement: ast.stmt, line: int, column: int | None) -> ast.stmt:
        """Return the statement that calls backward in this line, without what follows the call in its blocks."""
        for name in ("body", "orelse", "finalbody"):
            block = getattr(statement, name, None)
            if not isinstance(block, list) or not any(_contains(each, line, column) for each in block):
                continue
            place = next(place for place, each in enumerate(block) if _contains(each, line, column))
            last = self.truncate(block[place], line, column)
            before, _ = self.prune(block[:place], self.loads(last))
            copied: Any = ast.copy_location(type(statement)(**dict(ast.iter_fields(statement))), statement)
            setattr(copied, name, [*before, last])
            return copied  # type: ignore[no-any-return]
        return statement
