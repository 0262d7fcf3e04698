"""Make gradients the same on all ranks; one class per situation, so that the step has no branch on it.

torch's own machinery does the work: DistributedDataParallel around a module whose forward *is* the loss function, so
that `model.encode(...)` inside it synchronizes as well as `model(...)`; FSDP2 where the model is sharded already. Every
class knows which collectives of a window remain, so that a failed rank can join them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn

from halfstep.errors import WrongUse
from halfstep.finding import Finding
from halfstep.step.optimizer_slot import Gradients

if TYPE_CHECKING:
    from halfstep.step.synchronizers.shard_formats import ShardFormats

LossFunction = Callable[[Any, Any], Any]


class Synchronizer(ABC):
    """A runner of loss functions that averages gradients over ranks in the last micro-batch."""

    fix: str = ""
    """The advice where gradients differ between ranks."""

    backward_goes_everywhere: bool = False
    """Whether backward cannot be restricted to some parameters, so that unwanted gradients are cleared."""
    findings: Sequence[Finding] = ()
    """What to report about how ranks are synchronized."""
    shard_formats: Sequence[ShardFormats] = ()
    """The formats of each shard group of FSDP2; empty where every rank holds all weights."""
    needs_rebuild: bool = False
    """Whether `complete` left something that all ranks have to rebuild together."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @property
    def gathered_bytes(self) -> int | None:
        """The bytes of weights that FSDP2 gathered in the last window; None if weights are not sharded."""
        return None

    def begin(self, microbatches: int) -> None:
        """Start a window; `microbatches` is 0 if their number is unknown."""
        return

    @abstractmethod
    def run(self, loss_fn: LossFunction, batch: Any, last: bool) -> Any:
        """Run one micro-batch, in the function form of the step."""

    @abstractmethod
    def forward(self, last: bool) -> AbstractContextManager[object]:
        """Return the context for a forward pass that the caller writes."""

    def finish(self, gradients: Sequence[Gradients]) -> None:
        """Finish the window after the last backward."""
        return

    def without_batch(self, gradients: Sequence[Gradients], autocast: AbstractContextManager[object]) -> None:
        """Replace `run` and backward on a rank without a batch: it adds nothing to the others' gradients."""
        raise WrongUse(
            "step(None) although no other process can have a batch, or with the caller's own forward pass",
            allowed="step(None) on several processes with the function form",
            do="end the loop with the last batch",
        )

    def complete(self, gradients: Sequence[Gradients], autocast: AbstractContextManager[object]) -> bool:
        """Join the remaining collectives of the window, in which the others wait, after this rank failed.

        Returns False if that is impossible: they must be informed in another way.
        """
        return True

    @property
    def begun(self) -> str:
        """The collectives started here in this window, as text that is equal on ranks at the same point."""
        return ""

    def abandon(self) -> None:
        """Remove everything that a dropped window left."""
        return

    def rebuild(self) -> None:
        """Rebuild what a rank's failure left incomplete; called on every rank if one of them requested it."""
        self.needs_rebuild = False

    def settle(self) -> None:
        """Prepare parameters for being looked at."""
        return

    def follow(self) -> Synchronizer:
        """Return the synchronizer to use after parameters were added, removed or unfrozen."""
        return self


class SingleRankSynchronizer(Synchronizer):
    """A single rank: nothing to synchronize."""

    def run(self, loss_fn: LossFunction, batch: Any, last: bool) -> Any:
        """Run the loss function."""
        return loss_fn(self.model, batch)

    def forward(self, last: bool) -> AbstractContextManager[object]:
        """Return an empty context."""
        return nullcontext()
