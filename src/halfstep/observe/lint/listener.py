"""The listener that applies every rule to every operation, and reports each finding once, with its place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverloadPacket

from halfstep.finding import Finding
from halfstep.json_data import JsonResult, convert_to_json_data
from halfstep.observe.lint import angles, eps, integers, masks, merged_positions, softmax, stored, sums, variance
from halfstep.observe.lint.seen import Rule, find_narrow_operation
from halfstep.observe.recorder import OUTSIDE, Operation
from halfstep.user_code import find_running_line

_RULES: tuple[Any, ...] = (integers, merged_positions, angles, sums, masks, softmax, variance)


@dataclass(frozen=True)
class PlacedFinding(JsonResult):
    """A finding and its place."""

    finding: Finding
    """The evidence starts with the location."""
    module: str
    line: str | None
    modules: tuple[str, ...] = field(default=())
    """All modules in which the same line did the same."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain data: those of the finding, then the place."""
        return {
            **convert_to_json_data(self.finding),
            "module": self.module,
            "line": self.line,
            "modules": list(self.modules),
        }


class LintListener:
    """A listener that collects findings; `spotted()` returns them, errors first."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = {buffer.untyped_storage()._cdata: name for name, buffer in model.named_buffers()}
        self._rules: dict[OpOverloadPacket, list[Rule]] = defaultdict(list)
        for rule in _RULES:
            self._add_rule(rule.PACKETS, rule.look)
        for follows in (eps.EpsRule(), variance.DifferenceRule()):
            self._add_rule(follows.packets, follows)
        self._found: dict[tuple[str, str], list[PlacedFinding]] = {}
        if (narrow := stored.find_narrow_weights(model)) is not None:
            self.emit(narrow, "", None)
        for module, finding in merged_positions.find_merged_stored_positions(model):
            self.emit(finding, module, None)

    @torch.no_grad()
    def __call__(self, operation: Operation) -> None:
        rules = self._rules.get(operation.function._overloadpacket)
        looked_at = find_narrow_operation(operation, self._buffers) if rules else None
        if not rules or looked_at is None:
            return
        for rule in rules:
            finding = rule(looked_at)
            if finding is not None:
                self.emit(finding, operation.module, find_running_line())

    def emit(self, finding: Finding, module: str, line: str | None) -> None:
        """Store a finding; the same finding from one line in many modules is reported once."""
        self._found.setdefault((finding.id, line or module), []).append(PlacedFinding(finding, module, line))

    def spotted(self) -> tuple[PlacedFinding, ...]:
        """Return the findings, errors first."""
        merged = [_merge_findings(group) for group in self._found.values()]
        order = {"error": 0, "warning": 1, "note": 2}
        return tuple(sorted(merged, key=lambda one: order[one.finding.severity]))

    def _add_rule(self, packets: Iterable[OpOverloadPacket], rule: Rule) -> None:
        for packet in dict.fromkeys(packets):
            self._rules[packet].append(rule)


def add_finding_location(finding: Finding, module: str, line: str | None) -> Finding:
    """Return a finding whose evidence starts with the location and whose fix names the module."""
    return _merge_findings([PlacedFinding(finding, module, line)]).finding


def _merge_findings(group: list[PlacedFinding]) -> PlacedFinding:
    first = group[0]
    modules = tuple(dict.fromkeys(one.module for one in group))
    named = first.module not in ("", OUTSIDE)
    island = f'island(model, "{first.module}")' if named else "halfstep.island around the function that does it"
    more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
    places = [first.line or "", f"in {first.module}{more}" if named else ""]
    place = " ".join(filter(None, places))
    evidence = f"{place}: {first.finding.evidence}" if place else first.finding.evidence
    finding = replace(first.finding, evidence=evidence, fix=first.finding.fix.replace("{island}", island))
    return replace(first, finding=finding, modules=modules)
