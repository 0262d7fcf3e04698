"""An error in a person's own code, told with its line instead of a traceback through torch."""

from __future__ import annotations

from collections.abc import Sequence

from halfstep.errors import WrongUse
from halfstep.measure.code_lines import HALFSTEP, NO_FILE, TORCH, lines_outside, place_and_text

_INSTALLED = "site-packages"
_LONGEST = 200


def raised_at(error: BaseException) -> str | None:
    """The innermost line that is a person's, as file:line: its text; of an installed package where there is none."""
    lines = lines_outside(error, HALFSTEP, TORCH, NO_FILE)
    own = [line for line in lines if _INSTALLED not in line.filename] or lines
    return place_and_text(own[-1]) if own else None


def in_one_line(error: BaseException) -> str:
    """What it says, and where."""
    said = (str(error).splitlines() or [""])[0][:_LONGEST]
    place = raised_at(error)
    what = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return f"{place} raised {what}" if place else what


def as_wrong_use(error: Exception, samples: Sequence[str], do: str) -> WrongUse | None:
    """The error in three parts; None where no line of it is a person's, so that it is an error of ours."""
    if raised_at(error) is None:
        return None
    taken = f"; {', '.join(samples)} were taken as samples" if samples else ""
    return WrongUse(
        f"{in_one_line(error)}{taken}",
        allowed="a model, a loss and a batch that run together",
        do=do or "run the loss once by itself: loss_fn(model, batch)",
    )
