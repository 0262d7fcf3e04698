"""Fabric's SpikeDetection meets one bad batch, and the run is started again as its documentation says."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from zoo.outcome import Outcome
from zoo.real_lightning import fabric_in, quiet

with quiet():
    from lightning.fabric.utilities.spike import SpikeDetection, TrainingSpikeException

BATCHES, BAD, SAVED = 60, 40, 30
Batch = tuple[Tensor, Tensor]


def make_model() -> tuple[nn.Linear, torch.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def batch(number: int) -> Batch:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(number))
    target = x.sum(1, keepdim=True) + 0.5 * torch.randn(16, 1, generator=torch.Generator().manual_seed(number + 1000))
    return x, 100 * target if number == BAD else target


def loss_fn(model: nn.Module, given: Batch) -> Tensor:
    x, target = given
    return (model(x) - target).square().mean()


def error_of(model: nn.Linear) -> float:
    """Return how far the weights are from the right ones, which are all 1."""
    return (model.weight - 1).abs().max().item()


class Training:
    """A run with a checkpoint some batches before the bad one, from which it is started again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.fabric = folder, fabric_in("32-true")
        self.model, self.optimizer = make_model()
        self.checkpoint: tuple[dict[str, Tensor], dict[str, object]] | None = None
        self.error = 0.0
        """That of the weights before the last update."""

    def start(self, *, with_its_state: bool = True) -> str:
        """Begin, or begin again at the checkpoint; return how it ended: `done`, or the error in its own words."""
        spikes = SpikeDetection(exclude_batches_path=str(self.folder / "skip_batches.json"), rtol=5.0)
        try:
            first = self._restore(spikes, with_its_state)
            for number in range(first, BATCHES):
                if number == SAVED:
                    self.checkpoint = copy.deepcopy((self.model.state_dict(), spikes.state_dict()))
                self._step(spikes, number)
        except (TrainingSpikeException, AttributeError) as error:
            return f"{type(error).__name__}: {error}"
        return "done"

    def _restore(self, spikes: SpikeDetection, with_its_state: bool) -> int:
        if self.checkpoint is None:
            return 0
        weights, state = copy.deepcopy(self.checkpoint)
        self.model.load_state_dict(weights)
        if with_its_state:
            spikes.load_state_dict(state)
        return SAVED

    def _step(self, spikes: SpikeDetection, number: int) -> None:
        self.error = error_of(self.model)
        loss = loss_fn(self.model, batch(number))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        spikes.on_train_batch_end(self.fabric, loss.detach(), batch(number), number)


def run() -> Outcome:
    with tempfile.TemporaryDirectory() as folder, quiet():
        training = Training(Path(folder))
        ended = training.start()
        before, after = training.error, error_of(training.model)
        listed = json.loads((Path(folder) / "skip_batches.json").read_text())
        again, anew = training.start(), training.start(with_its_state=False)
    return Outcome(
        good="done" in (again, anew),
        seen=f"{ended}, after its update: the weights were off by {before:.3f} before and are by {after:.3f}; "
        f"started again with its state: {again}; without: {anew}, although skip_batches.json lists {listed}",
        word="cannot resume",
    )
