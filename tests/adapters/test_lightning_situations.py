"""Situations of people who train with Lightning, which the contract's own cases do not have; with the real library."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pl = pytest.importorskip("lightning.pytorch")

import torchmetrics  # noqa: E402
from lightning.pytorch import callbacks  # noqa: E402
from lightning.pytorch.tuner import Tuner  # noqa: E402

from halfstep.errors import WrongUse  # noqa: E402
from tests.adapters.test_lightning import Module, loader, plugin, trainer  # noqa: E402
from tests.support.foreign_loops import BAD, WINDOWS, Case, same  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
ONE, TWO = Case("fp32", 1, "loss", 1), Case("fp32", 2, "loss", 1)


class Scheduled(Module):
    """A module with a schedule of the test's own."""

    def __init__(self, case: Case, make: Any) -> None:
        super().__init__(case)
        self._make = make

    def configure_optimizers(self) -> Any:
        optimizer = self._case.optimizer_of(self)
        return {"optimizer": optimizer, "lr_scheduler": self._make(optimizer)}


class Quiet(Module):
    """A module without a schedule, which keeps nothing."""

    def configure_optimizers(self) -> Any:
        return self._case.optimizer_of(self)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...


class Stateful:
    """A loader that can be resumed inside an epoch."""

    def __init__(self, data: list[Any]) -> None:
        self._data, self._at = data, 0

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Any:
        while self._at < len(self._data):
            self._at += 1
            yield self._data[self._at - 1]
        self._at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"]


def run(module: Module, *others: Any, bad: bool = True, data: Any = None, first: bool = False, **settings: Any) -> Any:
    """Fit a module with other callbacks, before or after halfstep's; return the plugin and the Trainer."""
    step = plugin(module._case, **settings.pop("options", {}))
    both = [*others, step.callback] if first else [step.callback, *others]
    running = trainer(module._case, step, **{"callbacks": both, **settings})
    validation = loader(module._case.microbatches(bad=False)[:1]) if settings.get("val_check_interval") else None
    running.fit(module, data or loader(module._case.microbatches(bad=bad)), validation)
    return step, running


def every_second(optimizer: Any) -> dict[str, Any]:
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, WINDOWS)
    return {"scheduler": schedule, "interval": "step", "frequency": 2}


# -- schedules --------------------------------------------------------------------------------------------------------


def test_a_schedule_with_a_frequency_counts_applied_steps() -> None:
    module, without = Scheduled(ONE, every_second), Scheduled(ONE, every_second)
    _, running = run(module)
    run(without, bad=False)
    assert [lr for place, lr in enumerate(module.seen.lrs) if place != BAD] == without.seen.lrs
    assert same(module.seen.states[-1], without.seen.states[-1])
    assert running.lr_scheduler_configs[0].frequency == 2, "left as it was"


def test_a_plateau_sees_a_validation_after_a_skip() -> None:
    def plateau(optimizer: Any) -> dict[str, Any]:
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9, factor=0.5)
        return {"scheduler": schedule, "interval": "step", "frequency": BAD + 1, "monitor": "val_loss"}

    _, running = run(Scheduled(ONE, plateau), val_check_interval=BAD + 1)
    assert running.optimizers[0].param_groups[0]["lr"] == 0.01 * 0.5**2, "after each of two"


def test_a_plateau_does_not_see_the_loss_of_a_skipped_step() -> None:
    def plateau(optimizer: Any) -> dict[str, Any]:
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=100)
        return {"scheduler": schedule, "interval": "step", "monitor": "train_loss"}

    module = Scheduled(ONE, plateau)
    _, running = run(module)
    assert running.lr_scheduler_configs[0].scheduler.last_epoch == WINDOWS - 1


def test_a_rate_that_the_module_sets_by_global_step_is_right_after_a_skip() -> None:
    class WarmsUp(Quiet):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            optimizer.step(closure=optimizer_closure)
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (self.trainer.global_step + 1)

    module, without = WarmsUp(ONE), WarmsUp(ONE)
    run(module)
    run(without, bad=False)
    assert same(module.state_dict(), without.state_dict())


# -- averages of Lightning itself -------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False])
def test_lightnings_average_does_not_move_with_a_skip(first: bool) -> None:
    module, without = Quiet(ONE), Quiet(ONE)
    run(module, callbacks.EMAWeightAveraging(decay=0.5), first=first)
    run(without, callbacks.EMAWeightAveraging(decay=0.5), first=first, bad=False)
    assert same(module.state_dict(), without.state_dict())


def test_stochastic_weight_averaging_ends_with_an_epoch_that_only_measures() -> None:
    """Its last epoch runs training_step without backward, to renew BatchNorm's statistics."""
    module = Module(ONE, interval="epoch")
    step, running = run(module, callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1), bad=False, max_epochs=3)
    counts = step.hosted.stepper.counts
    assert (counts.applied, running.global_step) == (3 * (WINDOWS - 1), 3 * (WINDOWS - 1))
    assert same(module.seen.states[-1]["model"]["first.weight"], module.seen.states[-2]["model"]["first.weight"])
    assert not same(module.model.norm.running_mean, torch.zeros(16))


def test_validate_after_a_fit_leaves_the_step_alone() -> None:
    module, data = Quiet(ONE), ONE.microbatches(bad=False)
    step, running = run(module, options={"ema_decay": 0.5})
    hosted, applied = step.hosted, step.hosted.stepper.counts.applied
    running.validate(module, loader(data[:1]), verbose=False)
    assert step.hosted is hosted
    assert step.hosted.stepper.counts.applied == applied == WINDOWS - 1
    with torch.no_grad():
        expected = float(module.eval().model(**data[0])["loss"])
    assert float(running.callback_metrics["val_loss"]) == pytest.approx(expected), "the module's own weights"


# -- windows that are not concluded -----------------------------------------------------------------------------------


def test_an_error_in_a_callback_inside_a_window_drops_it() -> None:
    class Fails(callbacks.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            if args[-1] == 4:
                raise ValueError("mine")

    module = Module(TWO)
    with pytest.raises(ValueError, match="mine"):
        run(module, Fails(), bad=False)
    assert same(dict(module.model.state_dict()), module.seen.states[-1]["model"])
    assert all(p.grad is None for p in module.parameters())
    assert "lr_scheduler_step" not in vars(module)


def test_an_epoch_that_is_cut_short_drops_its_open_window() -> None:
    class CutsShort(Module):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 3 and self.trainer.current_epoch == 0 else None

    module, without = CutsShort(TWO), Module(TWO)
    data = TWO.microbatches(bad=False)
    _, running = run(module, bad=False, max_epochs=2)
    run(without, data=loader(data[:2] + data))
    assert same(module.seen.states[-1], without.seen.states[-1])
    assert running.global_step == WINDOWS


def test_a_run_that_stops_inside_a_window_drops_it() -> None:
    class Stops(callbacks.Callback):
        def on_train_batch_end(self, running: Any, *args: Any) -> None:
            running.should_stop = args[-1] == 2

    module = Module(TWO)
    run(module, Stops(), bad=False)
    assert same(dict(module.model.state_dict()), module.seen.states[-1]["model"])


def test_a_batch_that_is_none_is_no_step() -> None:
    data = ONE.microbatches()
    data.insert(BAD + 1, None)  # type: ignore[arg-type]
    module = Module(ONE)
    _, running = run(module, data=loader(data))
    assert module.steps == [1, 2, 2, 2, 3, 4, 5]
    assert running.lr_scheduler_configs[0].scheduler.last_epoch == WINDOWS - 1


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [ONE, TWO, Case("fp16", 1, "gradient", 1)], ids=str)
def test_it_resumes_exactly_from_a_checkpoint_inside_an_epoch(tmp_path: Path, case: Case) -> None:
    saving = callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    whole, average = Scheduled(case, every_second), {"ema_decay": 0.5}
    data = case.microbatches()
    step, _ = run(whole, saving, data=Stateful(data), enable_checkpointing=True, options=average)
    assert len(list(tmp_path.iterdir())) == WINDOWS - 1, "a skipped step is no step to save"
    again = Scheduled(case, every_second)
    resumed = plugin(case, **average)
    trainer(case, resumed).fit(again, Stateful(data), ckpt_path=tmp_path / f"epoch=0-step={BAD + 1}.ckpt")
    assert resumed.hosted is not None
    assert same(again.seen.states[-1], whole.seen.states[-1])
    assert same(resumed.hosted.state_dict()["stepper"], step.hosted.state_dict()["stepper"])


def test_a_checkpoint_inside_a_window_has_the_buffers_of_before_it(tmp_path: Path) -> None:
    class Saves(callbacks.Callback):
        def on_train_batch_end(self, running: Any, *args: Any) -> None:
            if args[-1] == 4:
                running.save_checkpoint(tmp_path / "inside.ckpt")

    module = Module(TWO)
    run(module, Saves(), bad=False)
    saved = torch.load(tmp_path / "inside.ckpt", weights_only=True)["state_dict"]
    before = module.seen.states[1]["model"]
    for name in ("norm.running_mean", "norm.num_batches_tracked", "largest", "first.weight"):
        assert same(saved[f"model.{name}"], before[name]), name


# -- what else people do ----------------------------------------------------------------------------------------------


def test_a_diagnosis_does_not_count_in_metrics() -> None:
    class Measures(Quiet):
        def __init__(self, case: Case) -> None:
            super().__init__(case)
            self.seen_batches = torchmetrics.SumMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen_batches.update(1)
            return super().training_step(batch, batch_idx)

    module = Measures(ONE)
    run(module)
    assert module.runs > WINDOWS, "the skipped one was run again"
    assert module.seen_batches.compute() == WINDOWS - 1, "neither the skipped batch nor its rerun counts"


@pytest.mark.wording
def test_another_optimizer_in_the_middle_is_refused_by_name() -> None:
    class Replaces(callbacks.Callback):
        def on_train_epoch_start(self, running: Any, module: Any) -> None:
            if running.current_epoch == 1:
                running.optimizers = [torch.optim.SGD(module.model.last.parameters(), 0.1)]

    with pytest.raises(WrongUse, match="another SGD"):
        run(Quiet(ONE), Replaces(), bad=False, max_epochs=2)


def test_layers_that_are_unfrozen_later_are_protected() -> None:
    class Unfreezes(callbacks.BaseFinetuning):
        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.model.first)

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.model.first, optimizer, lr=0.01)

    module, without = Quiet(ONE), Quiet(ONE)
    run(module, Unfreezes(), max_epochs=2)
    run(without, Unfreezes(), max_epochs=2, bad=False)
    assert same(module.state_dict(), without.state_dict())
    torch.manual_seed(0)
    assert not same(module.model.first.weight, nn.Linear(8, 16).weight)


def test_the_search_for_a_rate_leaves_nothing_behind(tmp_path: Path) -> None:
    class HasRate(Quiet):
        lr = 0.01

    module, without = HasRate(ONE), HasRate(ONE)
    step = plugin(ONE)
    running = trainer(ONE, step, default_root_dir=tmp_path)
    Tuner(running).lr_find(module, loader(ONE.microbatches()), num_training=5, update_attr=False)
    running.fit(module, loader(ONE.microbatches()))
    run(without)
    assert same(module.state_dict(), without.state_dict())
    assert running.global_step == WINDOWS - 1


@pytest.mark.parametrize("form", ["iterator", "barebones", "compiled"])
def test_other_forms_of_training(form: str) -> None:
    class Takes(Quiet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(**batch)["loss"]

    class Iterates(Quiet):
        def training_step(self, dataloader_iter: Any) -> Any:
            return self.model(**next(dataloader_iter)[0])["loss"]

    step, module = plugin(ONE), Iterates(ONE) if form == "iterator" else Takes(ONE)
    bare = {"barebones": True, "max_epochs": 1, "accelerator": "cpu", "devices": 1}
    running = pl.Trainer(plugins=step, callbacks=[step.callback], **bare) if form == "barebones" else trainer(ONE, step)
    running.fit(torch.compile(module, backend="eager") if form == "compiled" else module, loader(ONE.microbatches()))
    assert step.hosted is not None
    assert step.hosted.stepper.counts.state_dict()["applied"] == running.global_step == WINDOWS - 1


@pytest.mark.full
def test_pytorch_lightning_without_lightning() -> None:
    """Imports in alphabetical order, where only the older package is installed."""
    pytest.importorskip("pytorch_lightning")
    code = "import sys; sys.modules['lightning'] = None\n"
    code += "from halfstep.adapters.lightning import HalfstepPrecision\nimport pytorch_lightning as pl\n"
    code += "step = HalfstepPrecision('fp32')\n"
    code += "pl.Trainer(plugins=step, callbacks=[step.callback], accelerator='cpu', logger=False)"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True)


# -- what it cannot protect -------------------------------------------------------------------------------------------


def test_a_training_loss_that_is_logged_by_epoch_has_seen_the_skipped_batch() -> None:
    """`self.log` has taken the number before the step is judged; EarlyStopping that monitors it ends the run."""

    class LogsByEpoch(Quiet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.model(**batch)["loss"]
            self.log("train_loss", loss, on_step=False, on_epoch=True)
            return loss

    stopping = callbacks.EarlyStopping("train_loss", check_on_train_epoch_end=True)
    _, running = run(LogsByEpoch(ONE), stopping, max_epochs=3)
    assert running.current_epoch == 1


@pytest.mark.wording
def test_gradients_are_edited_before_the_step_and_not_after_backward() -> None:
    class Edits(Quiet):
        def on_after_backward(self) -> None:
            self.model.last.bias.grad.zero_()

    with pytest.raises(WrongUse, match="between backward"):
        run(Edits(ONE))


@pytest.mark.wording
def test_a_closure_that_is_run_twice_is_refused() -> None:
    """As by SAM: Lightning clears the gradients in between, and the Stepper would divide by two."""
    case = Case("fp32", 1, "loss", 1)

    class Twice(Module):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            optimizer_closure()
            optimizer.step(closure=optimizer_closure)

    module = Twice(case)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(WrongUse, match="2 times for an update of 1"):
        trainer(case, plugin(case)).fit(module, loader(case.microbatches(bad=False)))
    assert same(before, dict(module.state_dict()))


def test_each_logged_row_has_the_counts_of_its_batch(tmp_path: Path) -> None:
    """Lightning's loggers count batches; a row after a skipped one must not have the counts of an earlier row."""
    from lightning.pytorch.loggers import CSVLogger

    step = plugin(ONE)
    running = trainer(ONE, step, logger=CSVLogger(tmp_path), log_every_n_steps=5, max_epochs=2)
    batches = ONE.microbatches(bad=True)
    running.fit(Quiet(ONE), loader(batches * 3))
    found = {}
    for line in csv.DictReader((Path(running.logger.log_dir) / "metrics.csv").open()):
        if line.get("halfstep/applied"):
            found[int(line["step"])] = float(line["halfstep/applied"]) + float(line["halfstep/skipped"])
    due = [n for n in range(2 * 3 * len(batches)) if (n + 1) % 5 == 0]
    assert {n: found.get(n) for n in due} == {n: n + 1 for n in due}
    assert float(running.callback_metrics["halfstep/applied"]) == step.hosted.stepper.counts.applied
