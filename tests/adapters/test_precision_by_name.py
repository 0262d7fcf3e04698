"""A precision given by name in the loops of other libraries, and the line that a warning shows; with the real ones."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.errors import PrecisionRefused
from halfstep.precision import select
from halfstep.user_code import HALFSTEP
from tests.support.devices import named

accelerate = pytest.importorskip("accelerate")
pl = pytest.importorskip("lightning.pytorch")
transformers = pytest.importorskip("transformers")

import halfstep  # noqa: E402
from halfstep.adapters.lightning import HalfstepPrecision  # noqa: E402
from halfstep.adapters.transformers import HalfstepMixin  # noqa: E402

ROWS = [{"x": torch.full((4,), value), "labels": torch.zeros(1)} for value in (1.0, 2.0, float("nan"), 3.0)]
"""The second batch of two is skipped, with a warning of the Guardian."""


_SEEN: list[torch.dtype] = []
"""Not in the module, where a skip would restore it."""


class Net(nn.Module):
    """One layer that notes the format it computes in, and writes into its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        _SEEN.clear()

    @property
    def seen(self) -> list[torch.dtype]:
        """The formats of all passes, those of skipped steps included."""
        return _SEEN

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.layer(x.add_(1.0))
        self.seen.append(out.dtype)
        return {"loss": (out.float() - labels).square().mean()}


class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Any, _: int) -> Tensor:
        return self.net(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Trainer(HalfstepMixin, transformers.Trainer):  # type: ignore[misc]
    """The Trainer with halfstep's step."""


def with_lightning(precision: str, folder: Path) -> tuple[Net, list[str]]:
    step, module = HalfstepPrecision(precision), Module()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "barebones": False}
    trainer = pl.Trainer(plugins=step, callbacks=[step.callback], accelerator="cpu", max_steps=2, **quiet)
    trainer.fit(module, torch.utils.data.DataLoader(ROWS, batch_size=2))
    return module.net, [finding.id for finding in step.hosted.stepper.findings]


def with_transformers(precision: str, folder: Path) -> tuple[Net, list[str]]:
    words = {} if precision == "tf32" else {precision: True}
    arguments = transformers.TrainingArguments(
        str(folder), use_cpu=True, max_steps=2, report_to=[], save_strategy="no", disable_tqdm=True, **words
    )
    # The Trainer itself accepts tf32 on a GPU of its kind only; the mixin does not rely on that.
    arguments.tf32 = precision == "tf32"
    net = Net()
    trainer = Trainer(net, arguments, train_dataset=ROWS)
    trainer.train()
    return net, [finding.id for finding in trainer.hosted.stepper.findings]


def with_accelerate(precision: str, folder: Path) -> tuple[Net, list[str]]:
    active = accelerate.Accelerator(cpu=True)
    net = Net()
    model, optimizer = active.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    stepper = halfstep.from_accelerate(active, model, optimizer, precision=precision)
    stepper.step(lambda model, batch: model(**batch)["loss"], {key: value.clone() for key, value in ROWS[0].items()})
    return net, [finding.id for finding in stepper.findings]


LOOPS = {"lightning": with_lightning, "transformers": with_transformers, "accelerate": with_accelerate}


@pytest.fixture(autouse=True)
def _core_i7(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(select, "describe_device", lambda _: named("Core i7"))
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("loop", LOOPS)
def test_bf16_runs_is_called_slow_and_warns_at_the_users_line(loop: str, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        net, findings = LOOPS[loop]("bf16", tmp_path)
    assert set(net.seen) == {torch.bfloat16}
    assert "precision.slow" in findings
    files = {one.filename for one in seen}
    assert __file__ in files
    assert not any(file.startswith(HALFSTEP) for file in files)


@pytest.mark.wording
@pytest.mark.parametrize("loop", LOOPS)
def test_tf32_without_the_hardware_is_refused(loop: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(PrecisionRefused, match="tf32 on Core i7 is refused: CPUs have no tf32"):
            LOOPS[loop]("tf32", tmp_path)
