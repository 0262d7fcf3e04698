"""The precision and the loss scales that a Stepper was built with, to go back to after another precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halfstep.precision.ladder import Choice, choose_precision
from halfstep.step.lane import Lane
from halfstep.step.lanes import scale_for


class Original:
    """Kept as they were given: a precision may be nobody's but the caller's, and a loss scale has its own knobs."""

    def __init__(self, choice: Choice, lanes: Sequence[Lane]) -> None:
        self._choice = choice
        self._scales = {lane.name: (lane.scale, lane.scale.state_dict()) for lane in lanes}

    def choice(self, name: str, device: torch.device) -> Choice:
        """The first one where it is called that, else what the ladder gives."""
        return self._choice if name == self._choice.precision.name else choose_precision(name, device=device)

    def scale_anew(self, lanes: Sequence[Lane], choice: Choice) -> None:
        """Loss scales for a run that goes on in this precision; they begin anew, as in a run that is resumed."""
        for lane in lanes:
            if choice is self._choice:
                lane.scale, first = self._scales[lane.name]
                lane.scale.load_state_dict(first)
            else:
                lane.scale = scale_for(choice.precision)
