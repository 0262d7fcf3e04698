"""Choose width, crop and length of a U-Net's run for a user's photographs and masks."""

from __future__ import annotations

from collections.abc import Mapping

from halfstep.data.set_facts import SetFacts
from halfstep.recipe.resolve import ChosenSetting
from halfstep.tasks.sizing.choices import MEMORY_SHARE, Choices, choose_target_minutes
from halfstep.train.machine import Machine

KEYS = frozenset(
    {
        "data.val", "data.classes", "data.ignore_index", "data.palette", "data.max_side", "data.crop", "model.width",
        "train.batch_size", "train.epochs", "evaluate.every_epochs",
    }
)  # fmt: skip
"""Every setting these rules may choose."""
DATA = ("pairs",)
"""The kinds of data that can be inspected before the run."""
ENOUGH_STEPS = 400
"""Steps in which a U-Net learns to separate objects; a smaller network that gets them beats a larger one without."""
LADDER = ((64, 512), (64, 384), (64, 256), (32, 256), (32, 192), (32, 128), (16, 128), (16, 96), (8, 96), (8, 64))
"""Width and crop, from large machines down to any machine."""
DEPTH = 4
BATCH = 8
MAX_SIDE, ACCELERATED_MAX_SIDE = 512, 1024
STRIDE = 32
"""A multiple that every architecture can halve often enough."""


def sized(facts: SetFacts, machine: Machine, given: Mapping[str, object]) -> list[ChosenSetting]:
    """Return a choice with its reason for each setting the user left out."""
    choices = Choices(given)
    train, val = choices.validation(facts)
    _choose_mask_settings(choices, facts)
    limit = ACCELERATED_MAX_SIDE if machine.has_accelerator else MAX_SIDE
    side = choices.choose("data.max_side", limit, "larger photographs are shrunk, so that a crop shows whole objects")
    shrink = min(1.0, side / max(facts.longer, 1)) if side else 1.0
    width, crop = _choose_width_and_crop(choices, round(facts.shorter * shrink), machine)
    batch = choices.batch(train, BATCH, crop**2 * _count_activation_bytes(width), machine)
    per_epoch = -(-train // (batch * machine.devices))
    step = batch * machine.devices * crop**2 * 3 * _count_operations(width) / machine.speed
    whole = facts.width * facts.height * shrink**2 * _count_operations(width) / machine.speed
    choices.length(per_epoch, step, val * whole, machine)
    return choices.made


def _choose_mask_settings(choices: Choices, facts: SetFacts) -> None:
    if facts.masks is None:
        return
    reason = f"{facts.masks_read} masks: {facts.masks.words}"
    settings = facts.masks.settings()
    if "data.classes" in choices.given or "data.palette" in choices.given:
        return  # the user knows the masks already
    for key in ("classes", "ignore_index", "palette"):
        if key == "classes" or settings[key] is not None:
            choices.choose(f"data.{key}", settings[key], reason)


def _choose_width_and_crop(choices: Choices, shorter: int, machine: Machine) -> tuple[int, int]:
    """Return the first rung at which enough steps fit into the time, with a crop not above the photographs' size."""
    seconds = choose_target_minutes(machine) * 60
    largest = max(STRIDE, -(-shorter // STRIDE) * STRIDE)
    for width, crop in LADDER:
        crop = min(crop, largest)
        # Backward costs about twice as much as forward, hence 3.
        step = BATCH * machine.devices * crop**2 * 3 * _count_operations(width)
        fits = BATCH * crop**2 * _count_activation_bytes(width) <= MEMORY_SHARE * machine.memory
        if fits and ENOUGH_STEPS * step <= seconds * machine.speed:
            break
    reason = f"{ENOUGH_STEPS} steps of this size fit into {choose_target_minutes(machine)} minutes on {machine}"
    width = choices.choose("model.width", width, reason)
    why = (
        "about the shorter side of the photographs"
        if crop == largest
        else "the larger, the fewer steps fit into the time"
    )
    return int(width), int(choices.choose("data.crop", crop, why))


def _count_operations(width: int) -> float:
    """Return a U-Net's forward operations per pixel: two 3 × 3 convolutions per level, down and up.

    Each level has twice the channels on a quarter of the pixels, so every level costs the same.
    """
    # 18 is a multiplication and an addition for each of 3 × 3 weights. In units of width² and pixels of the image: 4 at
    # the first level (1 down, 3 up), 4.5 at each level below (1.5 down, 3 up), and 1.5 at the bottom.
    return 18.0 * width**2 * (4.0 + 4.5 * (DEPTH - 1) + 1.5)


def _count_activation_bytes(width: int) -> float:
    """Return bytes of activations per pixel: eight fp32 maps per level, half as large at each level below."""
    return 4.0 * 16 * 2 * width
