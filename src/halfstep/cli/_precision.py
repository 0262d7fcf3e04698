"""The precision that several options ask for together."""

from __future__ import annotations

from halfstep.precision.names import read_settings


def precision_word(precision: str | None, *, bf16: bool, fp16: bool) -> str | None:
    """One word, or a Contradiction; None where nothing was asked for."""
    asked = {"precision": precision, "bf16": bf16 or None, "fp16": fp16 or None}
    named = read_settings({key: value for key, value in asked.items() if value is not None})
    return named.name if named else None
