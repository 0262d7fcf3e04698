"""Outline the content of a `torch.save` file from the opcodes of its pickle. Nothing is unpickled. Imports no torch."""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LARGEST = 64 * 2**20
"""Bytes of the pickle alone; tensors are in separate files."""
MOST = 2_000_000
"""Opcodes that are followed. The state of a model with a thousand tensors has some 50,000."""
_DICTS = ("collections OrderedDict", "collections defaultdict", "builtins dict")
_STORAGES = {
    "torch HalfStorage": "fp16", "torch BFloat16Storage": "bf16", "torch FloatStorage": "fp32",
    "torch DoubleStorage": "fp64",
}  # fmt: skip


@dataclass
class PickledObject:
    """An object that unpickling would make: the name of its class or function, its arguments and its state."""

    name: str
    given: Any = ()
    state: Any = None


class UnsupportedPickle(Exception):
    """A pickle that does what no file of `torch.save` needs."""


def read_pickle_outline(path: Path) -> Any | None:
    """Return the content of a file as dicts, lists, plain values and `PickledObject`s; None for a file not of torch."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist()[:MOST] if name.rpartition("/")[2] == "data.pkl"]
            if len(names) != 1:
                return None
            with archive.open(names[0]) as file:
                content = file.read(LARGEST + 1)
        return _PickleMachine().run(content) if len(content) <= LARGEST else None
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError, UnsupportedPickle, LookupError, RuntimeError):
        # RuntimeError: an encrypted archive. LookupError: a stack or a memo that a damaged pickle leaves empty.
        return None


def iterate_values(root: Any) -> Iterator[tuple[str, Any]]:
    """Yield every value with its key, each container once."""
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", root)]
    while waiting:
        key, value = waiting.pop()
        yield key, value
        inner: list[tuple[str, Any]] = []
        if isinstance(value, dict):
            inner = [(str(name), one) for name, one in value.items()]
        elif isinstance(value, (list, tuple)):
            inner = [(key, one) for one in value]
        elif isinstance(value, PickledObject):
            inner = [(key, value.given), (key, value.state)]
        if inner and id(value) not in seen:
            seen.add(id(value))
            waiting.extend(inner)


def find_tensor_format(value: Any) -> str | None:
    """Return the format of a tensor; None for any other value."""
    while isinstance(value, PickledObject) and value.name == "torch._utils _rebuild_parameter" and value.given:
        value = value.given[0]
    is_tensor = isinstance(value, PickledObject) and value.name.startswith("torch._utils _rebuild_tensor")
    storage = value.given[0] if is_tensor and isinstance(value.given, tuple) and value.given else None
    described = storage.given if isinstance(storage, PickledObject) and storage.name == "storage" else ()
    kind = described[1] if isinstance(described, tuple) and len(described) > 1 else None
    return _STORAGES.get(kind.name) if isinstance(kind, PickledObject) else None


_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_NOTHING = ("PROTO", "FRAME")


class _PickleMachine:
    """A pickle machine that calls nothing: what would be made is described instead."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, content: bytes) -> Any:
        for count, (opcode, given, _) in enumerate(pickletools.genops(content)):
            if count > MOST:
                raise UnsupportedPickle
            if opcode.name == "STOP":
                return self._stack.pop()
            self._do(opcode.name, given)
        raise UnsupportedPickle

    def _do(self, name: str, given: Any) -> None:
        if name in _NOTHING:
            return
        if name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in _OPERATIONS:
            _OPERATIONS[name](self)
        elif name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            self._memo[len(self._memo) if given is None else given] = self._stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            self._stack.append(self._memo[given])
        elif name == "GLOBAL":
            self._stack.append(PickledObject(str(given)))
        elif isinstance(given, (str, bytes, int, float, bytearray)):
            self._stack.append(given)
        else:
            raise UnsupportedPickle

    def _since_mark(self) -> list[Any]:
        found: list[Any] = []
        while (value := self._stack.pop()) is not _MARK:
            found.append(value)
        return found[::-1]

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._stack.append(PickledObject(f"{module} {name}"))

    def _reduce(self) -> None:
        given, function = self._stack.pop(), self._stack.pop()
        name = function.name if isinstance(function, PickledObject) else "?"
        self._stack.append({} if name in _DICTS else PickledObject(name, given))

    def _build(self) -> None:
        state = self._stack.pop()
        if isinstance(self._stack[-1], PickledObject):
            self._stack[-1].state = state

    def _persistent(self) -> None:
        self._stack.append(PickledObject("storage", self._stack.pop()))

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, dict):
            keys = (key if isinstance(key, (str, int, float, bool)) else repr(type(key)) for key in items[::2])
            target.update(zip(keys, items[1::2], strict=False))

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set_items([key, value])

    def _append(self, items: list[Any]) -> None:
        if isinstance(self._stack[-1], list):
            self._stack[-1].extend(items)

    def _tuple_of(self, count: int) -> None:
        items = tuple(self._stack[len(self._stack) - count :])
        del self._stack[len(self._stack) - count :]
        self._stack.append(items)

    def _dict(self) -> None:
        items = self._since_mark()
        self._stack.append({})
        self._set_items(items)


_OPERATIONS: dict[str, Callable[[_PickleMachine], Any]] = {
    "MARK": lambda machine: machine._stack.append(_MARK),
    "POP": lambda machine: machine._stack.pop(),
    "POP_MARK": lambda machine: machine._since_mark(),
    "DUP": lambda machine: machine._stack.append(machine._stack[-1]),
    "EMPTY_DICT": lambda machine: machine._stack.append({}),
    "EMPTY_LIST": lambda machine: machine._stack.append([]),
    "EMPTY_SET": lambda machine: machine._stack.append([]),
    "EMPTY_TUPLE": lambda machine: machine._stack.append(()),
    "DICT": _PickleMachine._dict,
    "LIST": lambda machine: machine._stack.append(machine._since_mark()),
    "FROZENSET": lambda machine: machine._stack.append(machine._since_mark()),
    "TUPLE": lambda machine: machine._stack.append(tuple(machine._since_mark())),
    "TUPLE1": lambda machine: machine._tuple_of(1),
    "TUPLE2": lambda machine: machine._tuple_of(2),
    "TUPLE3": lambda machine: machine._tuple_of(3),
    "SETITEM": _PickleMachine._set_item,
    "SETITEMS": lambda machine: machine._set_items(machine._since_mark()),
    "APPEND": lambda machine: machine._append([machine._stack.pop()]),
    "APPENDS": lambda machine: machine._append(machine._since_mark()),
    "ADDITEMS": lambda machine: machine._append(machine._since_mark()),
    "STACK_GLOBAL": _PickleMachine._stack_global,
    "REDUCE": _PickleMachine._reduce,
    "NEWOBJ": _PickleMachine._reduce,
    "BUILD": _PickleMachine._build,
    "BINPERSID": _PickleMachine._persistent,
}
