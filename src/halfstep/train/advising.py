"""What goes into a command that is to cure a run: how it is launched, and a learning rate that is worth a try."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from halfstep.errors import HalfstepError
from halfstep.train.recipe.sources import read_recipe

LOWER = 10
"""What a learning rate that was too high is divided by; one so many times its recipe's is no slip of the pen."""


def launcher(processes: int) -> list[str]:
    """The words before those of `halfstep`, for so many processes."""
    if processes == 1:
        return ["halfstep"]
    return ["torchrun", "--nproc-per-node", str(processes), "-m", "halfstep"]


def lower_rate(rate: float, rates: Sequence[float] = (), written: float | None = None) -> str:
    """In place of `rate`, which failed; `rates` are those of the last steps, `written` is what the recipe's file says.

    Who made it far higher than the recipe has it gets back the recipe's. Otherwise a tenth of the highest that was
    reached: a schedule may have been on its way up, and the rate of its last step may be a small one on its way down.
    """
    if written is not None and 0 < LOWER * written <= rate:
        return f"{written:g}"
    reached = max(rates, default=0.0)
    tenth = min(rate, reached if reached > 0 else rate) / LOWER
    digit, _, exponent = f"{tenth:.9e}".partition("e")
    return f"{float(f'{digit[0]}e{exponent}'):g}"  # the first digit alone, which is not more


def written_rate(command: str) -> float | None:
    """What the file of the recipe says that was trained with `halfstep train RECIPE`; None where it says nothing."""
    words = shlex.split(command)
    if words[:2] != ["halfstep", "train"] or len(words) < 3:
        return None
    try:
        section: Any = read_recipe(words[2]).raw.get("optimizer")
    except HalfstepError:
        return None
    rate: Any = section.get("lr") if isinstance(section, dict) else None
    try:
        return float(rate)  # YAML reads 2e-3 as a text
    except (TypeError, ValueError):
        return None
