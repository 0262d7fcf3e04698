"""Gradient scalers in source: where they are made, and the calls of theirs in each function."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Literal, NamedTuple

from halfstep.doctor.code.order import are_mutually_exclusive, is_earlier_node
from halfstep.doctor.code.script import (
    Script,
    find_argument,
    find_method_name,
    find_receiver,
    format_variable,
    has_unpacked_arguments,
    iterate_alternatives,
)

OLD = frozenset({"torch.cuda.amp.GradScaler", "torch.cpu.amp.GradScaler"})
_NEW = frozenset({"torch.amp.GradScaler", "torch.GradScaler"})
_SHARDED = frozenset({"torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"})
_NAMES = OLD | _NEW | _SHARDED
_CLIPS = frozenset({"torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_"})
_METHODS: dict[str, Kind] = {"scale": "backward", "unscale_": "unscale", "step": "step", "update": "update"}

Kind = Literal["backward", "unscale", "step", "update"]


class ScalerCall(NamedTuple):
    """A call of a scaler's method, with the optimizer that it is given."""

    kind: Kind
    scaler: str
    call: ast.Call
    optimizer: str | None


@dataclass(frozen=True)
class ScalerConstruction:
    """A call that makes a scaler; None is what the source does not say."""

    call: ast.Call
    enabled: bool | None


class Scalers:
    """All gradient scalers of a file, known by how they are made or by how they are used."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.made = [ScalerConstruction(call, _is_enabled(script, call)) for call in script.calls_of(_NAMES)]
        self._paths = self._list_known_paths()
        used = (call for call in script.calls() if find_method_name(call) in _METHODS) if self._paths else ()
        self.calls = [found for call in used if (found := self._read(call))]
        self.clips = script.calls_of(_CLIPS)

    def of(self, kind: Kind, scope: ast.AST | None = None, scaler: str | None = None) -> list[ScalerCall]:
        """Return the calls of one kind, in one function and of one scaler where these are given."""
        return [
            one for one in self.calls
            if one.kind == kind
            and scope in (None, self._script.scopes[one.call])
            and scaler in (None, one.scaler)
        ]  # fmt: skip

    def made_as(self, call: ast.Call) -> list[ScalerConstruction]:
        """Return how the scaler of a call is made; an empty list where it comes from elsewhere."""
        assert isinstance(call.func, ast.Attribute)
        values = self._script.bindings(call.func.value)
        return [
            made
            for made in self.made
            if any(value is not None and made.call in iterate_alternatives(value) for value in values)
        ]

    def is_off(self, call: ast.Call) -> bool:
        """Return whether the scaler of a call is certainly switched off."""
        made = self.made_as(call)
        return bool(made) and all(one.enabled is False for one in made)

    def _list_known_paths(self) -> set[str]:
        made = {one.call for one in self.made}
        bound = self._script.bound() if made else ()
        paths = {path for path, value in bound if any(part in made for part in iterate_alternatives(value))}
        paths |= {find_receiver(call) or "" for call in self._script.calls_of_methods("unscale_") if call.args}
        for call in self._script.calls_of_methods("backward"):
            scaled = call.func.value if isinstance(call.func, ast.Attribute) else None
            paths.add(
                find_receiver(scaled) or ""
                if isinstance(scaled, ast.Call) and find_method_name(scaled) == "scale"
                else ""
            )
        return paths - {""}

    def _read(self, call: ast.Call) -> ScalerCall | None:
        name = find_method_name(call)
        path = find_receiver(call) if name in _METHODS else None
        if name is None or path is None or path not in self._paths:
            return None
        kind = _METHODS[name]
        if kind != "update" and not call.args:
            return None
        optimizer = format_variable(call.args[0]) if kind in ("step", "unscale") else None
        return ScalerCall(kind, path, call, optimizer)


def can_reach(script: Script, first: ast.AST, second: ast.AST) -> bool:
    """Return whether one pass through a function can reach the second call after the first."""
    return is_earlier_node(first, second) and not are_mutually_exclusive(script, first, second)


def _is_enabled(script: Script, call: ast.Call) -> bool | None:
    given = find_argument(call, "enabled", 4 if script.is_one_of(call.func, OLD) else 5)
    if given is None:
        return None if has_unpacked_arguments(call) else True
    found = script.constant(given)
    return found if isinstance(found, bool) else None
