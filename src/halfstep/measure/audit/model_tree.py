"""Draw a model as its tree of modules, as wide as their FLOPs and colored by the format they compute in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from halfstep import numbers
from halfstep.page import Tree, TreeNode

_MODEL_ITSELF = "(the model itself)"


class ModuleFlops(NamedTuple):
    """A module's own FLOPs by format, and the island that it is, or lies in."""

    module: str
    flops: Mapping[str, int]
    island: str | None


@dataclass
class _ModuleNode:
    path: str
    own: Mapping[str, int] = field(default_factory=dict)
    flops: dict[str, int] = field(default_factory=dict)
    """FLOPs of the whole subtree, by format."""
    is_island: bool = False
    children: dict[str, _ModuleNode] = field(default_factory=dict)


def draw_model_tree(modules: Iterable[ModuleFlops]) -> Tree:
    """Return the chart of a model's modules, with the FLOPs of each subtree summed."""
    root = _ModuleNode("")
    for module, flops, island in modules:
        parts = [] if module == _MODEL_ITSELF else [module] if module.startswith("(") else module.split(".")
        found = root
        steps = [root]
        for part in parts:
            path = f"{found.path}.{part}" if found.path else part
            found = found.children.setdefault(part, _ModuleNode(path))
            steps.append(found)
        found.own = flops
        for step in steps:
            for name, count in flops.items():
                step.flops[name] = step.flops.get(name, 0) + count
            step.is_island |= island is not None and island == step.path and not module.startswith("(out")
    total = sum(root.flops.values()) or 1
    by_size = sorted(root.flops.items(), key=lambda item: -item[1])
    return Tree(
        "Work by format",
        _build_tree_node(root, "the model", total),
        "width: share of FLOPs, forward and backward",
        tuple((name, numbers.format_percent(count / total)) for name, count in by_size),
        "island" if _has_island(root) else "",
    )


def _has_island(module: _ModuleNode) -> bool:
    return module.is_island or any(map(_has_island, module.children.values()))


def _build_tree_node(module: _ModuleNode, name: str, whole: int) -> TreeNode:
    total = sum(module.flops.values()) or 1
    shares = ", ".join(f"{format} {numbers.format_percent(count / total)}" for format, count in module.flops.items())
    island = ", an island" if module.is_island else ""
    return TreeNode(
        name,
        f"{module.path or name}: {shares}, {numbers.format_percent(total / whole)} of the FLOPs{island}",
        dict(module.own),
        tuple(_build_tree_node(child, part, whole) for part, child in module.children.items()),
        module.is_island,
    )
