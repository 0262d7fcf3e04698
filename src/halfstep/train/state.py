"""Define everything that the next step of a run depends on: the fields of `State` are the whole checkpoint."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from halfstep import distributed
from halfstep.checkpoint.commit import RankSnapshot
from halfstep.checkpoint.packing import pack, unpack
from halfstep.data.dataset import BadSampleBudget, Samples
from halfstep.errors import BadData, StateMismatch
from halfstep.precision.island import islands
from halfstep.train.environment import AutoChoices
from halfstep.train.epoch_metrics import EpochMetrics
from halfstep.train.guarding import stateful
from halfstep.train.rng import read_generators
from halfstep.train.setup import AnyRecipe, Parts
from halfstep.train.weights import fleeting

# -- progress ---------------------------------------------------------------------------------------------------------
# Track the progress, the best evaluation and early stopping; small enough for every checkpoint.


@dataclass
class Progress:
    """The position of a run in its data, and its best evaluation so far."""

    epoch: int = 0
    """Epochs completed."""
    in_epoch: int = 0
    """Windows attempted in the current epoch."""
    attempts: int = 0
    best: float | None = None
    best_epoch: int = 0
    stale: int = 0
    """Evaluations since the best one."""
    quarantined: list[int] = field(default_factory=list)
    """Training samples with non-finite values, replaced by others since this epoch began."""
    suspected: list[int] = field(default_factory=list)
    """Such samples found in this epoch. Workers prefetch, so only the end of an epoch is the same place for all."""

    def begin_epoch(self) -> set[int]:
        """Return the samples to leave out from now on: all that were found."""
        self.quarantined, self.suspected = sorted({*self.quarantined, *self.suspected}), []
        return set(self.quarantined)

    def judge(self, value: float, epoch: int, *, higher: bool, margin: float) -> bool:
        """Record an evaluation; return whether it is the best so far. A non-finite value never is."""
        gain = math.inf if self.best is None else (value - self.best if higher else self.best - value)
        better = math.isfinite(value) and gain > margin
        if better:
            self.best, self.best_epoch, self.stale = value, epoch, 0
        else:
            self.stale += 1
        return better


# -- state ------------------------------------------------------------------------------------------------------------


OWN = ("weights/buffers/", "weights/more/", "average/buffers/", "random/", "counts/epoch/metrics/")
"""Tensors that differ between ranks; rank 0 writes the others for all."""
FINITE, NUMBERS = ("weights/parameters/", "average/averages/"), ("weights/buffers/", "average/buffers/")
"""Tensors that must be finite in a checkpoint, and those in which an infinity may be intended."""

EXTRA = "_extra_state"
"""torch's key for the result of a module's `get_extra_state()`."""


@dataclass
class RunObjects:
    """The live objects that a `State` is read from and restored into."""

    recipe: AnyRecipe
    parts: Parts
    progress: Progress
    tally: EpochMetrics
    budget: BadSampleBudget
    samples: Samples
    measured: AutoChoices
    data: Mapping[str, Any]
    """The fingerprint of the data when the run began; see `data.fingerprint`."""
    latest: dict[str, float]
    """The metrics of the last evaluation."""
    journal: Callable[[], dict[str, int]]
    """Returns the sizes of the run's journal files."""


@dataclass(frozen=True)
class State:
    """A run between two steps, as plain data and tensors; the tensors are the run's own until they are copied."""

    weights: dict[str, Any]
    """Parameters and buffers, including non-persistent buffers."""
    optimizers: dict[str, Any]
    schedules: dict[str, Any]
    average: dict[str, Any] | None
    loss_scales: dict[str, Any]
    """The loss scales, and N0, the divisor of summed losses."""
    counts: dict[str, Any]
    """Steps attempted, applied and skipped, and the sums of the epoch so far."""
    random: dict[str, Any]
    cursor: dict[str, Any]
    """The position of the run in its data and its journal, and the bad samples found."""
    guards: dict[str, Any]
    recipe: dict[str, Any]
    precision: dict[str, Any]
    measured: dict[str, Any]

    @classmethod
    def of(cls, live: RunObjects) -> State:
        """Read the state of the live objects."""
        stepper = live.parts.stepper.state_dict()
        optimizers, losses = stepper["optimizers"], stepper["losses"]
        return cls(
            weights=_weights(live),
            optimizers={name: {**facts_of(live, name), **own["optimizer"]} for name, own in optimizers.items()},
            schedules={name: own["schedule"] for name, own in optimizers.items()},
            average=stepper["ema"],
            loss_scales={
                name: {"scale": loss["loss_scale"], "base_count": loss["base_count"]} for name, loss in losses.items()
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

    def snapshot(self, attempt: int, environment: Mapping[str, Any]) -> RankSnapshot:
        """Return what this rank has to write."""
        plain, tensors = {}, {}
        for name in COMPONENTS:
            plain[name], found = pack(getattr(self, name), name)
            tensors.update(
                {key: tensor for key, tensor in found.items() if distributed.rank() == 0 or key.startswith(OWN)}
            )
        return RankSnapshot(
            attempt,
            plain,
            tensors,
            finite=[key for key in tensors if key.startswith(FINITE)],
            numbers=[key for key in tensors if key.startswith(NUMBERS)],
            environment=environment,
        )

    @classmethod
    def from_parts(cls, plain: Any, tensors: Mapping[str, Tensor], where: str) -> State:
        """Return the state that `snapshot` wrote; raise StateMismatch or BadData for missing or unknown components."""
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


def facts_of(live: RunObjects, lane: str) -> dict[str, Any]:
    """Return what an optimizer's state lacks: its kind, and the names of the parameters that it refers to by number."""
    optimizer = live.parts.stepper.optimizers[lane]
    names = {id(parameter): name for name, parameter in live.parts.model.named_parameters()}
    groups = [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]
    return {"kind": type(optimizer).__name__, "names": groups}


def more_of(model: nn.Module) -> dict[str, Any]:
    """Return what a model saves besides parameters and buffers."""
    saved = model.state_dict()
    own = {name for name in saved if name.rpartition(".")[2] == EXTRA}
    return {name: value for name, value in saved.items() if name in own or not isinstance(value, Tensor)}


def _weights(live: RunObjects) -> dict[str, Any]:
    model = live.parts.model
    return {
        "parameters": dict(model.named_parameters()),
        "buffers": dict(model.named_buffers()),
        "fleeting": fleeting(model),
        "more": more_of(model),
    }
