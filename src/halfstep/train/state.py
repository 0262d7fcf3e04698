"""Everything that the next step of a run depends on. The fields of `State` are the checkpoint; no other list exists."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from halfstep import world
from halfstep.errors import BadData, StateMismatch
from halfstep.precision.island import islands
from halfstep.train.checkpoint.commit import Snapshot
from halfstep.train.checkpoint.packing import pack, unpack
from halfstep.train.data.budget import Budget
from halfstep.train.data.samples import Samples
from halfstep.train.fleeting import fleeting
from halfstep.train.guards_state import stateful
from halfstep.train.measured import Measured
from halfstep.train.progress import Progress
from halfstep.train.randomness import read_generators
from halfstep.train.setup import AnyRecipe, Parts
from halfstep.train.tally import Tally

OWN = ("weights/buffers/", "weights/more/", "average/buffers/", "random/", "counts/epoch/metrics/")
"""Tensors that differ between processes which train one model; rank 0 writes the others for all."""
FINITE, NUMBERS = ("weights/parameters/", "average/averages/"), ("weights/buffers/", "average/buffers/")
"""Tensors that a checkpoint keeps only while they are finite, and those in which infinities may have a meaning."""

EXTRA = "_extra_state"
"""What torch calls a module's `get_extra_state()`."""


@dataclass
class Live:
    """The things themselves, of which `State` is the picture."""

    recipe: AnyRecipe
    parts: Parts
    progress: Progress
    tally: Tally
    budget: Budget
    samples: Samples
    measured: Measured
    data: Mapping[str, Any]
    """What the data was when the run began; see `data.fingerprint`."""
    latest: dict[str, float]
    """The metrics of the last evaluation."""
    journal: Callable[[], dict[str, int]]
    """How long the run's journal is."""


@dataclass(frozen=True)
class State:
    """A run between two steps: plain data and tensors, which are the run's own until they are copied."""

    weights: dict[str, Any]
    """Parameters and buffers, also those that a model does not save by itself."""
    optimizers: dict[str, Any]
    schedules: dict[str, Any]
    average: dict[str, Any] | None
    loss_scales: dict[str, Any]
    """With N0, what sums are divided by."""
    counts: dict[str, Any]
    """Steps attempted, applied and skipped, and what adds up over the epoch."""
    random: dict[str, Any]
    cursor: dict[str, Any]
    """Where the run is in its data and in its journal, and what it found there."""
    guards: dict[str, Any]
    recipe: dict[str, Any]
    precision: dict[str, Any]
    measured: dict[str, Any]

    @classmethod
    def of(cls, live: Live) -> State:
        stepper = live.parts.stepper.state_dict()
        lanes = stepper["lanes"]
        return cls(
            weights=_weights(live),
            optimizers={name: {**facts_of(live, name), **lane["optimizer"]} for name, lane in lanes.items()},
            schedules={name: lane["schedule"] for name, lane in lanes.items()},
            average=stepper["ema"],
            loss_scales={
                name: {"scale": lane["loss_scale"], "base_count": lane["base_count"]} for name, lane in lanes.items()
            },
            counts={"steps": stepper["counts"], "epoch": live.tally.state_dict(), "latest": dict(live.latest)},
            random=read_generators(live.parts.stepper.device),
            cursor={
                "progress": vars(live.progress),
                "bad": sorted(live.budget.bad),
                "data": dict(live.data),
                "journal": live.journal(),
            },
            guards={guard.name: guard.state_dict() for guard in stateful(live.parts.stepper)},
            recipe=live.recipe.model_dump(mode="json"),
            precision={"name": stepper["precision"], "islands": sorted(islands(live.parts.model))},
            measured=live.measured.as_dict(),
        )

    def snapshot(self, attempt: int, environment: Mapping[str, Any]) -> Snapshot:
        """What this process has to write of it."""
        plain, tensors = {}, {}
        for name in COMPONENTS:
            plain[name], found = pack(getattr(self, name), name)
            tensors.update({key: tensor for key, tensor in found.items() if world.rank() == 0 or key.startswith(OWN)})
        return Snapshot(
            attempt,
            plain,
            tensors,
            finite=[key for key in tensors if key.startswith(FINITE)],
            numbers=[key for key in tensors if key.startswith(NUMBERS)],
            environment=environment,
        )

    @classmethod
    def from_parts(cls, plain: Any, tensors: Mapping[str, Tensor], where: str) -> State:
        """What `snapshot` wrote; a component that is missing, or one too many, is refused."""
        found = list(plain) if isinstance(plain, dict) else []
        lacks, more = [n for n in COMPONENTS if n not in found], [n for n in found if n not in COMPONENTS]
        if lacks or more:
            words = [f"lacks {', '.join(lacks)}"] if lacks else []
            words += [f"has {', '.join(map(str, more[:5]))}, which is no part of a run"] if more else []
            raise StateMismatch(
                f"{where} {' and '.join(words)}",
                allowed=", ".join(COMPONENTS),
                do="use another checkpoint, or add --new to begin again in a folder of its own",
            )
        odd = [n for n in COMPONENTS if not isinstance(plain[n], dict) and (n, plain[n]) != NO_AVERAGE]
        if odd:
            raise BadData(
                f"{where} is not the state of a run: {odd[0]} is a {type(plain[odd[0]]).__name__}",
                allowed="what halfstep wrote",
                do="use another checkpoint, or add --new to begin again in a folder of its own",
            )
        return cls(**{name: unpack(plain[name], tensors, f"{where}, {name}") for name in COMPONENTS})


COMPONENTS = tuple(field.name for field in dataclasses.fields(State))
NO_AVERAGE = ("average", None)
"""The one component that a run may do without."""


def facts_of(live: Live, lane: str) -> dict[str, Any]:
    """What an optimizer's own state does not say: its kind, and which parameters its numbers stand for."""
    optimizer = live.parts.stepper.optimizers[lane]
    names = {id(parameter): name for name, parameter in live.parts.model.named_parameters()}
    groups = [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]
    return {"kind": type(optimizer).__name__, "names": groups}


def more_of(model: nn.Module) -> dict[str, Any]:
    """What a model saves besides parameters and buffers."""
    saved = model.state_dict()
    own = {name for name in saved if name.rpartition(".")[2] == EXTRA}
    return {name: value for name, value in saved.items() if name in own or not isinstance(value, Tensor)}


def _weights(live: Live) -> dict[str, Any]:
    model = live.parts.model
    return {
        "parameters": dict(model.named_parameters()),
        "buffers": dict(model.named_buffers()),
        "fleeting": fleeting(model),
        "more": more_of(model),
    }
