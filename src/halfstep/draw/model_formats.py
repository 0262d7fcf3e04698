"""Draw a model as its tree of modules, as wide as their FLOPs and colored by the format they compute in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from halfstep.draw.figures import write_figure
from halfstep.errors import MissingExtra
from halfstep.printable import shortened

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle
except ImportError as missing:
    raise MissingExtra(
        "matplotlib, which is not installed",
        allowed="drawing a model with matplotlib",
        do="pip install 'halfstep[train]'",
    ) from missing

# Okabe and Ito's palette, distinguishable with any color vision.
COLOURS = {"bf16": "#56B4E9", "fp16": "#009E73", "fp32": "#E69F00", "tf32": "#F0E442", "fp64": "#D55E00"}
OTHER = "#CC79A7"
_ISLAND, _EDGE, _TEXT = "#B2182B", "#FFFFFF", "#222222"
_WIDTH, _ROW, _ABOVE, _BELOW, _DPI = 14.0, 0.42, 0.5, 0.45, 100
DEEPEST = 12
_NARROWEST = 0.0015
"""The least share of the width: narrower modules appear only in their parent's colors."""
_LETTER = 0.0049
"""The width of a letter as a share of the whole."""
_MODEL_ITSELF = "(the model itself)"


@dataclass
class Node:
    """A module and its submodules."""

    name: str
    path: str
    flops: dict[str, int] = field(default_factory=dict)
    """FLOPs of the whole subtree, by format."""
    own: dict[str, int] = field(default_factory=dict)
    """FLOPs of the module without its submodules."""
    island: bool = False
    children: dict[str, Node] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.flops.values())

    def add(self, flops: Mapping[str, int]) -> None:
        """Add FLOPs by format."""
        for name, count in flops.items():
            self.flops[name] = self.flops.get(name, 0) + count

    def stripes(self) -> Iterator[tuple[str, int]]:
        """Yield FLOPs by format, in the order the children are drawn below."""
        for child in self.children.values():
            yield from child.stripes()
        yield from self.own.items()


def tree(rows: Sequence[Mapping[str, Any]], name: str) -> Node:
    """Return the tree of modules by path, with the FLOPs of each subtree summed."""
    root = Node(name, "")
    for row in rows:
        module = row["module"]
        parts = [] if module == _MODEL_ITSELF else [module] if module.startswith("(") else module.split(".")
        node, steps = root, [root]
        for part in parts:
            path = f"{node.path}.{part}" if node.path else part
            node = node.children.setdefault(part, Node(part, path))
            steps.append(node)
        node.own = dict(row["flops"])
        for step in steps:
            step.add(row["flops"])
            step.island |= row["island"] is not None and row["island"] == step.path and not module.startswith("(out")
    return root


def draw_model_formats(report: Mapping[str, Any], path: Path) -> None:
    """Write a picture of an audit's plain data atomically."""
    root = tree(report["modules"], "the model")
    depth = min(depth_of(root), DEEPEST)
    height = _ABOVE + _ROW * depth + _BELOW
    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI)
    axes = figure.add_axes((0.015, _BELOW / height, 0.97, _ROW * depth / height))
    axes.set_xlim(0, 1)
    axes.set_ylim(depth, 0)
    axes.axis("off")
    if root.total:
        for node, left, width, level in placed(root, 0.0, 1.0, 0, depth):
            _draw(axes, node, left, width, level)
    else:
        axes.text(0.5, depth / 2, "no matrix product or convolution was seen", ha="center", color=_TEXT)
    figure.suptitle(
        _printable(f"{report['subject']}: {report['verdict']}", 110),
        x=0.015,
        y=1 - 0.12 / height,
        ha="left",
        fontsize=12,
    )
    _legend(figure, root)
    write_figure(figure, path)


def depth_of(node: Node) -> int:
    """Return the levels of modules with work in them."""
    return 1 + max((depth_of(child) for child in node.children.values() if child.total), default=0)


def placed(node: Node, left: float, width: float, level: int, depth: int) -> Iterator[tuple[Node, float, float, int]]:
    """Yield each node with its position: parents above children, each as wide as its share of the FLOPs."""
    yield node, left, width, level
    # Deeper modules appear in the colors of their parents.
    if level + 1 == depth:
        return
    for child in node.children.values():
        part = width * child.total / node.total if node.total else 0.0
        if part >= _NARROWEST:
            yield from placed(child, left, part, level + 1, depth)
        left += part


def _draw(axes: Axes, node: Node, left: float, width: float, level: int) -> None:
    at = left
    for name, stripe in groupby(node.stripes(), key=lambda stripe: stripe[0]):
        part = width * sum(count for _, count in stripe) / node.total
        axes.add_patch(Rectangle((at, level), part, 0.94, facecolor=COLOURS.get(name, OTHER), linewidth=0))
        at += part
    axes.add_patch(Rectangle((left, level), width, 0.94, fill=False, edgecolor=_EDGE, linewidth=0.8))
    if node.island:
        inset = min(0.0012, width / 4)
        outline = Rectangle((left + inset, level + 0.05), width - 2 * inset, 0.84, fill=False, edgecolor=_ISLAND)
        outline.set(linewidth=2.2, zorder=3)
        axes.add_patch(outline)
    letters = int((width - 0.003) / _LETTER)
    words = _printable(node.name, letters) if letters >= min(len(node.name), 3) else ""
    axes.text(left + width / 2, level + 0.47, words, ha="center", va="center", fontsize=8, color=_TEXT, clip_on=True)


def _legend(figure: Figure, root: Node) -> None:
    total = root.total or 1
    shown = sorted(root.flops.items(), key=lambda item: -item[1])
    handles = [Patch(color=COLOURS.get(name, OTHER), label=f"{name} {_percent(n / total)}") for name, n in shown]
    if any(node.island for node, *_ in placed(root, 0.0, 1.0, 0, DEEPEST)):
        handles.append(Patch(facecolor="white", edgecolor=_ISLAND, linewidth=2, label="island"))
    if handles:
        title = "width: share of FLOPs, forward and backward      "
        handles.insert(0, Patch(facecolor="none", edgecolor="none", label=title))
        look: dict[str, Any] = {"frameon": False, "fontsize": 9, "handlelength": 1.2, "ncols": len(handles)}
        figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.01, 0.0), **look)


def _percent(share: float) -> str:
    return f"{share:.1%}" if 0.001 <= share < 1 else "100%" if share == 1 else "<0.1%"


def _printable(text: str, longest: int) -> str:
    """Return text without mathtext markup, shortened to its place."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    # Shortened before the dollar signs are escaped, so that an escape is not cut in half.
    plain = shortened(plain, longest)
    return plain.replace("$", r"\$")
