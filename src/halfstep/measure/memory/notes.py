"""What a reader of a ledger has to know."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from halfstep.measure.memory.ledger import Note
from halfstep.measure.setting import Setting
from halfstep.measure.sizes import size_in_words
from halfstep.precision.abilities import ability
from halfstep.precision.hardware import describe
from halfstep.precision.precision import Precision

_WORTH_NAMING = 0.01


def notes_of(
    setting: Setting, precision: Precision, device: torch.device, at_peak: Mapping[str, int], wide: Mapping[str, int]
) -> tuple[Note, ...]:
    """`wide` is what is fp32 at the peak, by part."""
    peak = sum(at_peak.values())
    notes = [Note(_why_not_half(precision, peak, wide))] if precision.casts and peak else []
    if device.type == "cpu":
        found = ability(describe(device), precision.name)
        if not found.native:
            notes.append(Note(f"{precision.name} is not native here: {found.reason}", only_here=True))
        if precision.scaled:
            inside = "what convolutions take inside themselves in this precision on a CPU is not counted"
            notes.append(Note(inside, only_here=True))
    if setting.compile:
        notes.append(Note("estimated as it runs without compilation; compiled code keeps other tensors, mostly fewer"))
    if at_peak["buffers"] > _WORTH_NAMING * peak:
        notes.append(Note("buffers count twice: a step keeps a copy of them, to take an update back"))
    return tuple(notes)


def _why_not_half(precision: Precision, peak: int, wide: Mapping[str, int]) -> str:
    largest = sorted(wide.items(), key=lambda item: -item[1])
    named = ", ".join(f"{part} {size_in_words(size)}" for part, size in largest if size > _WORTH_NAMING * peak)
    share = sum(wide.values()) / peak
    return f"{share:.0%} of the peak is fp32 in {precision.name} too, which no cast makes smaller: {named or 'little'}"
