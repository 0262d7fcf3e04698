"""Choose model, image size and length of a run for a user's folder of classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from halfstep.data.set_facts import SetFacts
from halfstep.recipe.resolve import ChosenSetting
from halfstep.tasks.sizing.choices import Choices, choose_target_minutes
from halfstep.train.machine import Machine

KEYS = frozenset(
    {
        "data.val", "model.name", "model.small_stem", "data.size", "data.crop", "train.batch_size", "train.epochs",
        "evaluate.every_epochs",
    }
)  # fmt: skip
"""Every setting these rules may choose."""
DATA = ("folder",)
ENOUGH_IMAGES = 6_000
"""Images, counted with repetition, after which a randomly initialized network starts to separate classes."""
SMALL = 80
"""Shorter side in pixels up to which a ResNet's usual stem would shrink images too far."""
MANY = 20_000
"""Images from which on a larger network learns more than a small one."""


class SizedModel(NamedTuple):
    """A model and an image size, one step of the ladder."""

    model: str
    size: int


class NetworkCost(NamedTuple):
    """The cost of a model."""

    operations: float
    """Forward operations for one image of 224 × 224."""
    kept: float
    """Bytes of activations saved for backward for such an image, in fp32."""


NETWORKS = {
    "resnet50": NetworkCost(8.2e9, 90e6),
    "resnet34": NetworkCost(7.3e9, 45e6),
    "resnet18": NetworkCost(3.6e9, 30e6),
    "resnet10t": NetworkCost(2.2e9, 25e6),
}
LADDER = (
    SizedModel("resnet50", 224), SizedModel("resnet34", 224), SizedModel("resnet18", 224), SizedModel("resnet18", 160),
    SizedModel("resnet18", 128), SizedModel("resnet10t", 128), SizedModel("resnet10t", 96), SizedModel("resnet10t", 64),
)  # fmt: skip
BATCH, ACCELERATED_BATCH = 16, 64


def sized(facts: SetFacts, machine: Machine, given: Mapping[str, object]) -> list[ChosenSetting]:
    """Return a choice with its reason for each setting the user left out."""
    choices = Choices(given)
    train, val = choices.validation(facts)
    model, size, small = _choose_network_size(choices, facts, machine)
    network = NETWORKS.get(model, NETWORKS["resnet18"])
    area = (size / 224) ** 2 * (16 if small else 1)  # stride 1 and no pooling: 4 × 4 as many positions
    wanted = ACCELERATED_BATCH if machine.has_accelerator else BATCH
    batch = choices.batch(train, wanted, network.kept * area, machine)
    per_epoch = -(-train // (batch * machine.devices))
    image = network.operations * area / machine.speed
    # Backward costs about twice as much as forward, hence 3.
    choices.length(per_epoch, batch * machine.devices * 3 * image, val * image, machine)
    return choices.made


def _choose_network_size(choices: Choices, facts: SetFacts, machine: Machine) -> tuple[str, int, bool]:
    """Return the first rung at which enough images fit into the time, with a size not above that of the images."""
    seconds = choose_target_minutes(machine) * 60
    if 0 < facts.shorter <= SMALL:
        return _choose_small_network(choices, facts)
    ladder = [rung for rung in LADDER if facts.images >= MANY or rung.model not in ("resnet50", "resnet34")]
    # ResNets halve an image five times, so sizes are multiples of 32.
    largest = max(64, facts.shorter // 32 * 32)
    for rung in ladder:
        model, size = rung.model, min(rung.size, largest)
        # Backward costs about twice as much as forward, hence 3; convolutions scale with the area.
        each = 3 * NETWORKS[model].operations * (size / 224) ** 2
        if ENOUGH_IMAGES * each <= seconds * machine.speed:
            break
    reason = f"{ENOUGH_IMAGES:,} images of this size fit into {choose_target_minutes(machine)} minutes on {machine}"
    if model == "resnet18" and machine.has_accelerator:
        reason = f"{facts.images:,} images teach a larger one no more"
    model = choices.choose("model.name", model, reason)
    why = "as large as the images" if size == largest else "the larger, the fewer images fit into the time"
    return model, int(choices.choose("data.size", size, why)), bool(choices.given.get("model.small_stem"))


def _choose_small_network(choices: Choices, facts: SetFacts) -> tuple[str, int, bool]:
    why = f"the images have {facts.shorter} pixels"
    model = choices.choose("model.name", "resnet18", "the usual network for small images")
    size = choices.choose("data.size", 32 if facts.shorter <= 40 else 64, why)
    choices.choose("data.crop", "shift", f"{why}, too few to enlarge a part of")
    # timm's resnet10t has a stem of three convolutions, which model.small_stem does not replace.
    small = str(model) in ("resnet18", "resnet34", "resnet50")
    return model, int(size), bool(choices.choose("model.small_stem", small, f"{why}; the usual stem shrinks them"))
