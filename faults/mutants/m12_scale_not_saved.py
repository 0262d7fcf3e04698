"""The loss scale and the schedule begin anew when a run goes on, for nobody saved them."""

from __future__ import annotations

from typing import Any

from halfstep.step.loss import LossSlot
from halfstep.step.optimizer_slot import OptimizerSlot

WHAT = "the states of the loss scale and of the schedule are not saved"
ROWS = ("F31",)


def apply() -> None:
    load_loss, load_optimizer = LossSlot.load_state_dict, OptimizerSlot.load_state_dict

    def forgets_the_scale(slot: LossSlot, saved: Any) -> None:
        load_loss(slot, {**saved, "loss_scale": slot.state_dict()["loss_scale"]})

    def forgets_the_schedule(slot: OptimizerSlot, saved: Any) -> None:
        load_optimizer(slot, {**saved, "schedule": slot.state_dict()["schedule"]})

    LossSlot.load_state_dict = forgets_the_scale  # type: ignore[method-assign]
    OptimizerSlot.load_state_dict = forgets_the_schedule  # type: ignore[method-assign]
