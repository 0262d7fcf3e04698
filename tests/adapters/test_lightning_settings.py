"""Settings and hooks of Lightning that change an update: each gives Lightning's own update, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch import callbacks  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, XLAStrategy  # noqa: E402
from lightning.pytorch.utilities import GradClipAlgorithmType  # noqa: E402

from halfstep.adapters import lightning as adapter  # noqa: E402
from halfstep.adapters.hosted_step import Clipping  # noqa: E402
from halfstep.adapters.lightning import HalfstepPrecision  # noqa: E402
from halfstep.errors import UnknownName, WrongUse  # noqa: E402
from tests.support.foreign_loops import same  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
LIMIT = 0.02
"""Small enough for every gradient of these runs to be clipped, by either algorithm."""


class Module(pl.LightningModule):
    """A small network under AdamW with two groups, whose gradients are large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters() if p.ndim <= 1]
        return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest}], lr=0.05, eps=1e-3)


def data() -> Any:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 8, generator=generator), 9 * torch.randn(24, 1, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)


def fit(module: Any, *others: Any, ours: bool, change: Any = None, **settings: Any) -> Any:
    """Train six batches, with or without halfstep; return everything that an update writes."""
    step = HalfstepPrecision("fp32", tell=lambda event: None)
    chosen = {"plugins": step, "callbacks": [*others, step.callback]} if ours else {"callbacks": list(others)}
    running = pl.Trainer(max_epochs=1, accelerator="cpu", devices=1, **QUIET, **chosen, **settings)
    if change is not None:
        change(running)
    running.fit(module, data())
    return {"model": module.state_dict(), "optimizer": running.optimizers[0].state_dict()}


def both(make: Any = Module, *others: Any, **settings: Any) -> tuple[Any, Any]:
    """Return what Lightning alone and Lightning with halfstep leave."""
    return tuple(fit(make(), *(one() for one in others), ours=ours, **settings) for ours in (False, True))  # type: ignore[return-value]


CLIPPING: dict[str, dict[str, Any]] = {
    "value": {"gradient_clip_val": LIMIT, "gradient_clip_algorithm": "value"},
    "norm": {"gradient_clip_val": LIMIT, "gradient_clip_algorithm": "norm"},
    "none": {},
    "without algorithm": {"gradient_clip_val": LIMIT},
    "the enum's value": {"gradient_clip_val": LIMIT, "gradient_clip_algorithm": GradClipAlgorithmType.VALUE},
    "the enum's norm": {"gradient_clip_val": LIMIT, "gradient_clip_algorithm": GradClipAlgorithmType.NORM},
    "upper case": {"gradient_clip_val": LIMIT, "gradient_clip_algorithm": "VALUE"},
    "an integer": {"gradient_clip_val": 1},
    "zero": {"gradient_clip_val": 0},
    "zero by value": {"gradient_clip_val": 0.0, "gradient_clip_algorithm": "value"},
    "below zero": {"gradient_clip_val": -1.0, "gradient_clip_algorithm": "value"},
    "algorithm alone": {"gradient_clip_algorithm": "value"},
    "infinite": {"gradient_clip_val": float("inf")},
    "accumulated by value": {
        "accumulate_grad_batches": 2,
        "gradient_clip_val": LIMIT,
        "gradient_clip_algorithm": "value",
    },
    "accumulated by norm": {"accumulate_grad_batches": 2, "gradient_clip_val": LIMIT},
}


@pytest.mark.parametrize("settings", CLIPPING.values(), ids=CLIPPING)
def test_clipping_is_lightnings_own_to_the_bit(settings: dict[str, Any]) -> None:
    theirs, ours = both(**settings)
    assert same(theirs, ours)


def test_the_algorithms_differ_here() -> None:
    """Otherwise the test above could not tell them apart."""
    value, norm, none = (fit(Module(), ours=True, **CLIPPING[name]) for name in ("value", "norm", "none"))
    assert not same(value, norm)
    assert not same(value, none)
    assert not same(norm, none)


@pytest.mark.parametrize(
    ("limit", "algorithm", "expected"),
    [
        (None, None, Clipping()),
        (0, "value", Clipping()),
        (-1, None, Clipping()),
        (2, None, Clipping(norm=2.0)),
        (2, "Norm", Clipping(norm=2.0)),
        (2, GradClipAlgorithmType.NORM, Clipping(norm=2.0)),
        (2, GradClipAlgorithmType.VALUE, Clipping(value=2.0)),
        (2, "VALUE", Clipping(value=2.0)),
    ],
)
def test_settings_are_translated_by_lightnings_own_type(limit: Any, algorithm: Any, expected: Clipping) -> None:
    assert adapter.convert_clipping(limit, algorithm) == expected


@pytest.mark.wording
@pytest.mark.parametrize("algorithm", ["agc", "by_value", 3, "GradClipAlgorithmType.VALUE"])
@pytest.mark.parametrize("limit", [None, 1.0])
def test_an_algorithm_that_lightning_does_not_have_is_refused_by_name(algorithm: Any, limit: float | None) -> None:
    def change(running: Any) -> None:
        running.gradient_clip_algorithm = algorithm

    with pytest.raises(WrongUse, match=f"gradient_clip_algorithm={algorithm!r}") as refused:
        fit(Module(), ours=True, gradient_clip_val=limit, change=change)
    assert refused.value.allowed == "'norm', 'value'"


@pytest.mark.wording
def test_a_limit_that_is_no_number_is_refused_by_name() -> None:
    def change(running: Any) -> None:
        running.gradient_clip_val = "1.0"

    with pytest.raises(WrongUse, match=r"gradient_clip_val='1\.0'"):
        fit(Module(), ours=True, change=change)


@pytest.mark.wording
def test_an_option_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(UnknownName, match="option 'gaurd'") as refused:
        HalfstepPrecision("fp32", gaurd="off")  # type: ignore[call-arg]
    assert "'guard'" in refused.value.do


@pytest.mark.parametrize(("batches", "close"), [(3, True), (4, False)])
def test_accumulation_that_is_no_power_of_two_or_has_a_short_end(batches: int, close: bool) -> None:
    """By 3 the division rounds elsewhere; a short last window is averaged over its own length, as the page says."""
    theirs, ours = both(accumulate_grad_batches=batches)
    # Not the bias before BatchNorm, whose gradient is nothing but rounding.
    pairs = [(theirs["model"][name], ours["model"][name]) for name in ("net.0.weight", "net.1.weight", "net.3.weight")]
    assert not same(theirs["model"], ours["model"])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs) is close


# -- hooks of the module ----------------------------------------------------------------------------------------------


class ClipsByValue(Module):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=LIMIT, gradient_clip_algorithm="value")


class ClipsBoth(Module):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=LIMIT, gradient_clip_algorithm="value")
        self.clip_gradients(optimizer, gradient_clip_val=LIMIT, gradient_clip_algorithm="norm")


class ClipsAsAsked(Module):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        if self.global_step % 2:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


class ClipsByItself(Module):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        nn.utils.clip_grad_norm_(self.net[0].parameters(), LIMIT, norm_type=1.0)


class HasItsOwnClip(Module):
    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        for p in self.parameters():
            p.grad.sign_().mul_(LIMIT)


class HalvesBefore(Module):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            p.grad.mul_(0.5)


def clips_on_the_instance() -> Any:
    module = Module()

    def clip(optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        module.clip_gradients(optimizer, LIMIT, "value")

    module.configure_gradient_clipping = clip
    return module


OWN: dict[str, tuple[Any, dict[str, Any]]] = {
    "by value": (ClipsByValue, {}),
    "by value, then by norm": (ClipsBoth, {}),
    "every second step": (ClipsAsAsked, CLIPPING["value"]),
    "by torch": (ClipsByItself, {}),
    "by torch, with a setting that it ignores": (ClipsByItself, CLIPPING["norm"]),
    "clip_gradients": (HasItsOwnClip, CLIPPING["norm"]),
    "edited before": (HalvesBefore, CLIPPING["value"]),
    "on the instance": (clips_on_the_instance, {}),
}


@pytest.mark.parametrize(("make", "settings"), OWN.values(), ids=OWN)
def test_a_module_that_clips_by_itself_is_obeyed_to_the_bit(make: Any, settings: dict[str, Any]) -> None:
    theirs, ours = both(make, **settings)
    assert same(theirs, ours)


def test_an_infinite_gradient_is_not_clipped_to_a_finite_one() -> None:
    once: list[int] = []  # not an attribute of the module, which a skip would restore

    class Infinite(ClipsByValue):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.trainer.global_step == 2 and not once:
                once.append(2)
                self.net[0].weight.grad[0, 0] = float("inf")

    class NotThere(ClipsByValue):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 2 else super().training_step(batch, batch_idx)

    module = Infinite()
    left = fit(module, ours=True)
    assert once
    assert same(left, fit(NotThere(), ours=True)), "as if the batch had not been there"


class ClosureFirst(Module):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer_closure()
        optimizer.step()


class EverySecond(Module):
    """Runs the closure of other batches without the optimizer, as Lightning's documentation does for GANs."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class WarmsUp(Module):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (self.trainer.global_step + 1)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


@pytest.mark.parametrize("make", [ClosureFirst, WarmsUp])
@pytest.mark.parametrize("clipping", ["value", "norm", "none"])
def test_an_optimizer_step_of_the_modules_own_gives_the_same_update(make: Any, clipping: str) -> None:
    theirs, ours = both(make, **CLIPPING[clipping])
    assert same(theirs, ours)


@pytest.mark.parametrize("clipping", ["value", "norm", "none"])
def test_a_batch_whose_closure_runs_without_the_optimizer_is_dropped_with_its_statistics(clipping: str) -> None:
    """Lightning alone clears its gradients with the next batch, and keeps what it wrote to BatchNorm."""
    theirs, ours = both(EverySecond, **CLIPPING[clipping])
    assert same(theirs["optimizer"], ours["optimizer"])
    assert all(
        same(value, ours["model"][name])
        for name, value in theirs["model"].items()
        if "running" not in name and "num_" not in name
    )
    counts = [left["model"]["net.1.num_batches_tracked"].item() for left in (theirs, ours)]
    assert counts == [6, 3]


# -- settings and callbacks of the Trainer ----------------------------------------------------------------------------


class Accumulates(callbacks.GradientAccumulationScheduler):
    def __init__(self) -> None:
        super().__init__({0: 2})


class Averages(callbacks.EMAWeightAveraging):
    def __init__(self) -> None:
        super().__init__(decay=0.5)


class Clips(callbacks.Callback):
    """A callback that clips by Lightning's own method."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pl_module.clip_gradients(optimizer, gradient_clip_val=LIMIT, gradient_clip_algorithm="value")


class Tightens(callbacks.Callback):
    """A callback that moves the Trainer's setting, as schedules of clipping do."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            trainer.gradient_clip_val = LIMIT / 2


@pytest.mark.parametrize("callback", [Accumulates, Averages, Clips])
@pytest.mark.parametrize("clipping", ["value", "none"])
def test_callbacks_of_lightning_give_the_same_update(callback: Any, clipping: str) -> None:
    theirs, ours = both(Module, callback, **CLIPPING[clipping])
    assert same(theirs, ours)


@pytest.mark.wording
@pytest.mark.parametrize("clipping", ["value", "none"])
def test_clipping_that_changes_during_a_fit_is_refused_by_name(clipping: str) -> None:
    with pytest.raises(WrongUse, match=f"gradient_clip_val={LIMIT / 2}.*changed during fit"):
        fit(Module(), Tightens(), ours=True, **CLIPPING[clipping])


# -- what would update weights past the plugin ------------------------------------------------------------------------


class StepsInside(Module):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer_closure()
        optimizer.optimizer.step()


class KeepsGradients(Module):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def backward_on_the_instance() -> Any:
    module = Module()
    module.backward = lambda loss: (2 * loss).backward()
    return module


@pytest.mark.wording
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (StepsInside, "AdamW.step.. inside an open window of the Stepper"),
        (KeepsGradients, "optimizer_zero_grad overridden"),
        (Manual, "manual optimization"),
        (backward_on_the_instance, "backward overridden"),
    ],
)
def test_updates_past_the_plugin_are_refused_by_name(make: Any, words: str) -> None:
    module = make()
    before = {name: value.clone() for name, value in module.named_parameters()}
    with pytest.raises(WrongUse, match=words):
        fit(module, ours=True)
    assert same(dict(module.named_parameters()), before)


def test_the_optimizer_may_be_stepped_by_hand_after_a_fit() -> None:
    module = Module()
    step = HalfstepPrecision("fp32")
    running = pl.Trainer(max_steps=1, accelerator="cpu", **QUIET, plugins=step, callbacks=[step.callback])
    running.fit(module, data())
    before = module.net[0].weight.detach().clone()
    module.training_step(next(iter(data())), 0).backward()
    running.optimizers[0].step()
    assert not same(module.net[0].weight.detach(), before)


@pytest.mark.wording
@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (object.__new__(XLAStrategy), "XLAStrategy"),
        (DDPStrategy(model_averaging_period=4), "model_averaging_period=4"),
    ],
)
def test_strategies_that_update_weights_by_themselves_are_refused_by_name(strategy: Any, words: str) -> None:
    with pytest.raises(WrongUse, match=words):
        adapter._check_strategy(strategy)


def test_the_two_strategies_are_accepted() -> None:
    adapter._check_strategy(DDPStrategy())
    adapter._check_strategy(SingleDeviceStrategy("cpu"))
