"""What a run's guard had placed, for a run that goes on: read from its checkpoint, and placed before all else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from halfstep.errors import BadData
from halfstep.guard.guardian import Guardian
from halfstep.guard.remedy.remedies import Remedies


def cures_in(guards: Mapping[str, Any]) -> Remedies | None:
    """From the guards' states in a checkpoint; None where the run had no guard."""
    saved = guards.get(Guardian.name)
    if saved is None:
        return None
    return _read(saved.get("remedies") if isinstance(saved, Mapping) else None)


def cures_of(result: Mapping[str, Any]) -> Remedies:
    """From the result of a finished run; one that had no guard had no cures, either."""
    return _read(result["cures"]) if "cures" in result else Remedies()


def _read(plain: Any) -> Remedies:
    try:
        found = Remedies.from_dict(plain)
        texts = [text for one in found.placed for text in (one.kind, one.target, one.culprit, one.before)]
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise _made_up(error) from error
    if not all(isinstance(text, str) for text in texts):
        raise _made_up(TypeError("a remedy without a name"))
    return found


def placed_again(model: nn.Module, cures: Remedies) -> list[str]:
    """Place them, and say so. What the model has no place for is left to whoever compares it with the checkpoint."""
    paths = {path for path, _ in model.named_modules()}
    fitting = [one for one in cures.placed if one.kind != "island" or one.target in paths]
    replace(cures, placed=fitting).apply_to(model)
    return [f"placed again by the guard: {'; '.join(map(str, fitting))}"] if fitting else []


def _made_up(error: Exception) -> BadData:
    return BadData(
        f"the run holds what no guard placed: {type(error).__name__} {str(error)[:200]}",
        allowed="what halfstep wrote",
        do="use another checkpoint, or add --new to begin again in a folder of its own",
    )
