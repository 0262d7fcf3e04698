"""A model's modules as rows: what each is stored, computed and kept in, and how its numbers lie in the format."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from halfstep.formats import name_of
from halfstep.measure.audit.watched import Watched
from halfstep.measure.audit.work import Work
from halfstep.measure.survival_report import named
from halfstep.observe.ranges import BACKWARD, FORWARD, WEIGHTS, Range, Ranges
from halfstep.observe.recorder import OUTSIDE
from halfstep.precision.island import islands


@dataclass(frozen=True)
class Numbers:
    """How the numbers of one way through a module lie in the format."""

    largest: float
    headroom_bits: float | None
    """Factors of two from the largest to the end of the format; negative where it does not fit."""
    underflow: float
    """Share of the numbers that were not zero and became zero."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One module, without those inside it."""

    module: str
    kind: str
    stored: Mapping[str, int]
    """Its own weights by format."""
    computed: Mapping[str, float]
    """Shares by format, most first: of its work, or of what it made where it has no matrix work."""
    flops: Mapping[str, int]
    saved: Mapping[str, int]
    """Bytes that are kept for backward, by format."""
    share: float
    """Of the model's FLOPs."""
    island: str | None
    """The island that it is, or lies in."""
    forward: Numbers | None
    backward: Numbers | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def rows_of(model: nn.Module, watched: Watched) -> tuple[Row, ...]:
    """Modules that computed or hold weights of their own, in the model's order; then what ran outside of it."""
    modules = {path.replace("_orig_mod.", ""): module for path, module in model.named_modules()}
    total = sum(sum(work.flops.values()) for work in watched.works.values()) or 1
    declared = tuple(islands(model))
    found = []
    for path in (*modules, OUTSIDE):
        module, work = modules.get(path), watched.works.get(path, Work())
        stored = Counter(name_of(p.dtype) for p in module.parameters(recurse=False)) if module is not None else {}
        if not (work.computed or stored):
            continue
        found.append(
            Row(
                module=named(path),
                kind="" if module is None else type(module).__name__,
                stored=dict(stored),
                computed=work.computed,
                flops=dict(work.flops.most_common()),
                saved=dict(work.saved.most_common()),
                share=sum(work.flops.values()) / total,
                island=island_of(path, declared),
                forward=_numbers(watched.ranges, path, (WEIGHTS, FORWARD)),
                backward=_numbers(watched.ranges, path, (BACKWARD,)),
            )
        )
    return tuple(found)


def island_of(module: str, declared: tuple[str, ...]) -> str | None:
    for path in declared:
        if module == path or module.startswith(f"{path}.") or (not path and module != OUTSIDE):
            return path
    return None


def _numbers(ranges: Ranges | None, module: str, parts: tuple[str, ...]) -> Numbers | None:
    together = Range()
    for part in parts:
        together.add(ranges.by_place.get((module, part), Range()) if ranges is not None else Range())
    if not together.nonzero:
        return None
    headroom = together.headroom if math.isfinite(together.headroom) else None
    return Numbers(together.largest, headroom, together.underflow_share)
