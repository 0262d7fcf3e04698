"""The transaction inside Lightning's Trainer, with automatic optimization and the real library."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

pl = pytest.importorskip("lightning.pytorch")

from halfstep.adapters.lightning import HalfstepPrecision  # noqa: E402
from halfstep.errors import Diverged, WrongUse  # noqa: E402
from halfstep.guard.streak import Limits  # noqa: E402
from halfstep.step.loss import StaticScale  # noqa: E402
from tests.support.foreign_loops import (  # noqa: E402
    BAD,
    CASES,
    ON_RANKS,
    WINDOWS,
    Case,
    Model,
    Seen,
    check_contract,
    check_ranks,
    same,
)
from tests.support.ranks import Ranks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
SCALE = 2.0**10
_RUNS = Counter[int]()
"""Not in the module, where a skip would restore it."""


class Module(pl.LightningModule):
    """A module as people write it; it keeps what each window left."""

    def __init__(self, case: Case, interval: str = "step") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self._case, self._interval = Model(), case, interval
        self.seen, self.steps = Seen(), []
        self.calls = 0
        self.call_numbers: list[int] = []
        _RUNS[id(self)] = 0

    @property
    def runs(self) -> int:
        """The number of times that `training_step` ran, skipped steps and reruns included."""
        return _RUNS[id(self)]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.calls += 1
        self.call_numbers.append(self.calls)
        _RUNS[id(self)] += 1
        loss = self.model(**batch)["loss"]
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch)["loss"])

    def configure_optimizers(self) -> Any:
        optimizer = self._case.optimizer_of(self)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, WINDOWS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self._interval}}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self._case.accumulate == 0:
            self.seen.look(self.model, self.trainer.optimizers[0], self.lr_schedulers())
            self.steps.append(self.trainer.global_step)


def trainer(case: Case, step: Any, **settings: Any) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "cpu", "devices": 1, "max_epochs": 1}
    quiet |= {"accumulate_grad_batches": case.accumulate, "gradient_clip_val": 1.0}
    return pl.Trainer(**{**quiet, "plugins": step, "callbacks": [step.callback], **settings})


def plugin(case: Case, **options: Any) -> HalfstepPrecision:
    # A static scale: a dynamic one is lower after the skip, and fp16 rounds other gradients away then.
    scale = {"loss_scale": StaticScale(SCALE)} if case.precision == "fp16" else {}
    return HalfstepPrecision(case.precision, **{"tell": lambda event: None, **scale, **options})


def loader(microbatches: list[Any]) -> Any:
    return DataLoader(microbatches, batch_size=None, shuffle=False)


def fit(case: Case, *, bad: bool = True, **settings: Any) -> tuple[Module, HalfstepPrecision, Any]:
    module, step = Module(case), plugin(case)
    running = trainer(case, step, **settings)
    running.fit(module, loader(case.microbatches(bad=bad)))
    return module, step, running


@cache
def without_trouble(case: Case) -> Seen:
    return fit(case, bad=False)[0].seen


@pytest.mark.parametrize("case", CASES)
def test_a_skip_changes_nothing_and_the_run_goes_on_as_if_it_had_not_been(case: Case) -> None:
    module, step, running = fit(case)
    check_contract(module.seen, without_trouble(case.without_trouble))
    assert step.hosted is not None
    assert (step.hosted.stepper.counts.applied, running.global_step) == (WINDOWS - 1, WINDOWS - 1)
    assert module.steps == [1, 2, 2, 3, 4, 5]


def test_healthy_steps_are_lightnings_own_to_the_bit() -> None:
    case = Case("fp32", 2, "loss", 1)
    ours, _, _ = fit(case, bad=False)
    theirs = Module(case)
    plain = {"plugins": None, "callbacks": None, "precision": "32-true"}
    trainer(case, plugin(case), **plain).fit(theirs, loader(case.microbatches(bad=False)))
    assert same(ours.seen.states, theirs.seen.states)


def test_max_steps_counts_applied_steps() -> None:
    case = Case("fp32", 1, "loss", 1)
    module, step, running = fit(case, max_steps=4)
    assert running.global_step == 4
    assert step.hosted is not None
    assert step.hosted.stepper.counts.attempted == 5
    assert step.report is not None
    assert step.report.applied
    assert module.runs == 5 + 1, "five training steps, and the rerun of a diagnosis"
    assert module.calls == 4


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_it_resumes_exactly(tmp_path: Path, precision: str) -> None:
    case = Case(precision, 1, "gradient", 1)
    whole, step, _ = fit(case)
    first = Module(case)
    half = trainer(case, plugin(case), max_steps=3, enable_checkpointing=True, default_root_dir=tmp_path)
    half.fit(first, loader(case.microbatches()))
    half.save_checkpoint(tmp_path / "half.ckpt")
    second, again = Module(case), plugin(case)
    # To Lightning an epoch is over where max_steps ends it: what was not seen yet comes first in the next one.
    rest, data = trainer(case, again, max_steps=5, max_epochs=2), case.microbatches()
    rest.fit(second, loader(data[4:] + data[:4]), ckpt_path=tmp_path / "half.ckpt", weights_only=False)
    assert same(second.seen.states[-1], whole.seen.states[-1])
    assert step.hosted is not None
    assert again.hosted is not None
    ours, theirs = again.hosted.stepper, step.hosted.stepper
    assert ours.counts.state_dict() == theirs.counts.state_dict()
    assert ours.scale_in_use == theirs.scale_in_use


def test_a_run_that_only_skips_is_ended() -> None:
    case = Case("fp32", 1, "loss", 1)
    bad = case.microbatches()[BAD]
    step = HalfstepPrecision("fp32", limits=Limits(skips_in_a_row=3, diagnoses=0), tell=lambda event: None)
    with pytest.raises(Diverged):
        trainer(case, step, max_steps=100, max_epochs=-1).fit(Module(case), loader([bad] * 10))
    assert step.hosted is not None
    assert step.hosted.stepper.counts.applied == 0


def test_schedules_by_epoch_advance_by_epoch() -> None:
    case = Case("fp32", 1, "loss", 0)
    module = Module(case, interval="epoch")
    trainer(case, plugin(case), max_epochs=2).fit(module, loader(case.microbatches()))
    assert module.lr_schedulers().last_epoch == 2
    assert "lr_scheduler_step" not in vars(module), "the hook was taken off"


def test_the_average_moves_with_applied_steps_and_is_validated() -> None:
    case = Case("fp32", 1, "loss", 1)
    step = plugin(case, ema_decay=0.5)
    module = Module(case)
    data = case.microbatches()
    running = trainer(case, step)
    running.fit(module, loader(data), loader(data[:1]))
    without = plugin(case, ema_decay=0.5)
    trainer(case, without).fit(Module(case), loader(case.microbatches(bad=False)))
    assert step.hosted is not None
    assert without.hosted is not None
    ours, theirs = step.hosted.stepper.ema, without.hosted.stepper.ema
    assert ours is not None
    assert theirs is not None
    assert same(ours.averages(), theirs.averages())
    with ours.in_place(), torch.no_grad():
        module.eval()
        expected = float(module.model(**data[0])["loss"])
    assert math.isclose(float(running.callback_metrics["val_loss"]), expected, rel_tol=1e-6)


def test_a_failed_step_is_diagnosed_and_recorded(tmp_path: Path) -> None:
    from halfstep.adapters.replay import replay

    case, told = Case("fp32", 2, "loss", 1), []
    step = HalfstepPrecision("fp32", record=tmp_path, tell=told.append)
    module = Module(case)
    trainer(case, step).fit(module, loader(case.microbatches()))
    assert any("batch" in event.text for event in told if event.kind == "verdict"), [event.text for event in told]
    fresh = Module(case)
    verdict = replay(tmp_path, fresh, lambda model, inputs: model.training_step(*inputs))
    assert verdict.cause == "data"


def test_gradients_are_unscaled_where_lightning_shows_them() -> None:
    case, norms = Case("fp16", 2, "loss", 1), []

    class Shows(Module):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms.append(float(nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])))

    step = plugin(case)
    trainer(case, step).fit(Shows(case), loader(case.microbatches(bad=False)[:2]))
    assert step.report is not None
    assert math.isclose(norms[-1], step.report.grad_norm, rel_tol=1e-3)


def test_a_module_that_clips_in_its_own_way_is_obeyed() -> None:
    case, norms = Case("fp32", 1, "loss", 1), []

    class Clips(Module):
        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any
        ) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=1e-3, gradient_clip_algorithm="norm")
            norms.append(float(nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])))

    trainer(case, plugin(case), gradient_clip_val=None).fit(Clips(case), loader(case.microbatches(bad=False)))
    assert all(norm < 1.01e-3 for norm in norms), norms


class Manual(Module):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.automatic_optimization = False


class OwnBackward(Module):
    def backward(self, loss: Tensor) -> None:
        loss.backward()


class SometimesNone(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 2 else super().training_step(batch, batch_idx)


@pytest.mark.wording
@pytest.mark.parametrize("kind", [Manual, OwnBackward])
def test_what_would_update_past_the_plugin_is_refused(kind: type[Module]) -> None:
    case = Case("fp32", 1, "loss", 1)
    with pytest.raises(WrongUse, match="HalfstepPrecision"):
        trainer(case, plugin(case), gradient_clip_val=None).fit(kind(case), loader(case.microbatches()))


@pytest.mark.wording
def test_the_plugin_wants_its_callback() -> None:
    case = Case("fp32", 1, "loss", 1)
    with pytest.raises(WrongUse, match="callback"):
        trainer(case, plugin(case), callbacks=None).fit(Module(case), loader(case.microbatches()))


@pytest.mark.wording
def test_no_loss_drops_the_step_alone_and_is_refused_inside_a_window() -> None:
    case = Case("fp32", 1, "loss", 1)
    module = SometimesNone(case)
    trainer(case, plugin(case)).fit(module, loader(case.microbatches(bad=False)))
    assert same(module.seen.states[2], module.seen.states[1])
    case = Case("fp32", 2, "loss", 1)
    with pytest.raises(WrongUse, match="None"):
        trainer(case, plugin(case)).fit(SometimesNone(case), loader(case.microbatches(bad=False)))


def test_validation_alone_computes_in_the_precision() -> None:
    case = Case("bf16", 1, "loss", 1)

    class Looks(Module):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.dtype_seen = self.model(**batch)["logits"].dtype

    module = Looks(case)
    trainer(case, plugin(case)).validate(module, loader(case.microbatches()[:1]), verbose=False)
    assert module.dtype_seen is torch.bfloat16


def test_numbers_and_lists_of_the_module_are_restored() -> None:
    case = Case("fp32", 1, "loss", 1)
    module, step, _ = fit(case)
    assert step.hosted is not None
    assert module.calls == step.hosted.stepper.counts.applied
    assert module.call_numbers == list(range(1, module.calls + 1))
    assert module.runs > module.calls


# -- two ranks --------------------------------------------------------------------------------------------------------


def _fit_on(rank: int, case: Case) -> Any:
    torch.manual_seed(0)
    module, step = Module(case), plugin(case)
    settings = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    running = trainer(case, step, **settings)
    running.fit(module, loader(case.microbatches_of(rank)))
    assert step.hosted is not None
    return module.seen, step.hosted.stepper.counts.state_dict(), running.global_step


@pytest.mark.ranks
@pytest.mark.parametrize("case", ON_RANKS, ids=str)
def test_two_ranks_skip_together(two_ranks: Ranks, case: Case) -> None:
    (seen, counts, steps), (other, other_counts, _) = two_ranks(_fit_on, case)
    check_ranks(seen, other)
    assert counts == other_counts
    assert steps == WINDOWS - 1
