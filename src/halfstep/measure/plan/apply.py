"""How a choice is applied: as settings of a recipe, or as lines of Python for a loop of one's own."""

from __future__ import annotations

from typing import Any

from halfstep.measure.plan.growth import Growth
from halfstep.measure.setting import Setting


def recipe_changes(choice: Setting, growth: Growth | None = None) -> dict[str, Any]:
    """Keys of a recipe with the values that the plan gives them."""
    taken = growth.setting if growth else choice
    found: dict[str, Any] = {
        "precision": taken.precision,
        "train.channels_last": taken.channels_last,
        "train.compile": taken.compile,
        "train.batch_size": taken.batch,
        "train.microbatches": taken.microbatches,
    }
    if growth:
        found |= {"optimizer.lr": growth.learning_rate, "schedule.warmup_steps": growth.warmup_steps}
    return found


def python_lines(choice: Setting, growth: Growth | None = None) -> list[str]:
    """The same in a person's own loop."""
    taken = growth.setting if growth else choice
    lines = []
    if taken.channels_last:
        lines.append("model = model.to(memory_format=torch.channels_last)  # and images, before the model gets them")
    if taken.compile:
        lines.append("model.compile()")
    if growth:
        lines.append(f"optimizer.param_groups[0]['lr'] = {growth.learning_rate:g}  # {growth.rule}, after a warm-up")
    lines.append(f'stepper = halfstep.Stepper(model, optimizer, precision="{taken.precision}")')
    if taken.microbatches > 1:
        lines.append(f"for batch in halfstep.windows(loader, {taken.microbatches}):  # batches of {taken.batch}")
    else:
        lines.append(f"for batch in loader:  # batches of {taken.batch}")
    lines.append("    report = stepper.step(loss_fn, batch)")
    return lines
