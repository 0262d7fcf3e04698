"""Settings of accelerate that change an update: each gives the update of the loop without halfstep, or is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

accelerate = pytest.importorskip("accelerate")

from accelerate import Accelerator, DistributedType  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.utils import (  # noqa: E402
    AutocastKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    PrecisionType,
)

import halfstep  # noqa: E402
from halfstep.adapters.accelerate import build_accelerate_scale, read_accelerate_precision, refuse_other_engines  # noqa: E402
from halfstep.errors import WrongUse  # noqa: E402
from halfstep.step.loss import DynamicScale, StaticScale  # noqa: E402
from tests.support.foreign_loops import same  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
LIMIT = 0.02
"""Small enough for every gradient of these runs to be clipped, by either way."""


def accelerator(**settings: Any) -> Any:
    AcceleratorState._reset_state(True)
    return Accelerator(cpu=True, **settings)


def parts() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))
    # Two groups, which are in another order than the model's parameters: a norm in that order rounds differently.
    rest, decayed = ([p for p in model.parameters() if (p.ndim > 1) is large] for large in (False, True))
    optimizer = torch.optim.AdamW([{"params": rest, "weight_decay": 0.0}, {"params": decayed}], lr=0.05, eps=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 6)


def data() -> Any:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 8, generator=generator), 9 * torch.randn(24, 1, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def left(model: Any, optimizer: Any, schedule: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}


def theirs(clip: str = "none", **settings: Any) -> dict[str, Any]:
    """The loop of accelerate's documentation."""
    active = accelerator(**settings)
    model, optimizer, schedule, batches = active.prepare(*parts(), data())
    for batch in batches:
        with active.accumulate(model):
            active.backward(loss_of(model, batch))
            if active.sync_gradients and clip == "norm":
                active.clip_grad_norm_(model.parameters(), LIMIT)
            if active.sync_gradients and clip == "value":
                active.clip_grad_value_(model.parameters(), LIMIT)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return left(model, optimizer, schedule)


def ours(clip: str = "none", **settings: Any) -> dict[str, Any]:
    active = accelerator(**settings)
    model, optimizer, schedule, batches = active.prepare(*parts(), data())
    options = {} if clip == "none" else {f"clip_{clip}": LIMIT}
    stepper = halfstep.from_accelerate(active, model, optimizer, schedule, **options)
    for batch in batches:
        with active.accumulate(model):
            with stepper.forward(last=active.sync_gradients):
                loss = loss_of(model, batch)
            stepper.backward(loss)
            if active.sync_gradients:
                stepper.apply()
    return left(model, optimizer, schedule)


ACCUMULATION: dict[str, dict[str, Any]] = {
    "every batch": {},
    "two": {"gradient_accumulation_steps": 2},
    "plugin": {"gradient_accumulation_plugin": {"num_steps": 2}},
    "plugin, synced each batch": {"gradient_accumulation_plugin": {"num_steps": 2, "sync_each_batch": True}},
    "plugin, over the end of the data": {
        "gradient_accumulation_plugin": {"num_steps": 2, "sync_with_dataloader": False}
    },
    "plugin, schedule as it is": {"gradient_accumulation_plugin": {"num_steps": 2, "adjust_scheduler": False}},
}


@pytest.mark.parametrize("clip", ["value", "norm", "none"])
@pytest.mark.parametrize("settings", ACCUMULATION.values(), ids=ACCUMULATION)
def test_the_update_is_that_of_accelerates_own_loop_to_the_bit(clip: str, settings: dict[str, Any]) -> None:
    def made() -> dict[str, Any]:
        plugin = settings.get("gradient_accumulation_plugin")
        return settings if plugin is None else {"gradient_accumulation_plugin": GradientAccumulationPlugin(**plugin)}

    alone, with_halfstep = theirs(clip, **made()), ours(clip, **made())
    assert same(alone["model"], with_halfstep["model"])
    assert same(alone["optimizer"], with_halfstep["optimizer"])


def test_norms_are_summed_in_the_order_of_the_model() -> None:
    active = accelerator()
    model, optimizer, schedule = active.prepare(*parts())
    stepper = halfstep.from_accelerate(active, model, optimizer, schedule, clip_norm=LIMIT)
    [slot] = stepper._slots.values()
    assert list(map(id, slot.gradients.parameters)) == list(map(id, model.parameters()))
    assert list(map(id, slot.gradients.parameters)) != [id(p) for g in optimizer.param_groups for p in g["params"]]


def test_a_short_window_at_the_end_of_the_data_is_averaged_over_its_own_length() -> None:
    """Six batches by four: accelerate alone divides the sum of the last two by four."""
    short = {"gradient_accumulation_steps": 4}
    assert not same(theirs(**short)["optimizer"], ours(**short)["optimizer"])


def test_the_ways_of_clipping_differ_here() -> None:
    """Otherwise the test above could not tell them apart."""
    value, norm, none = map(ours, ("value", "norm", "none"))
    assert not same(value, norm)
    assert not same(value, none)
    assert not same(norm, none)


@pytest.mark.wording
@pytest.mark.parametrize("call", ["clip_grad_norm_", "clip_grad_value_"])
@pytest.mark.parametrize("every", [True, False], ids=["in every micro-batch", "before the update"])
def test_clipping_of_accelerate_that_was_left_in_the_loop_is_refused_by_name(call: str, every: bool) -> None:
    active = accelerator(gradient_accumulation_steps=2)
    model, optimizer, schedule, batches = active.prepare(*parts(), data())
    stepper = halfstep.from_accelerate(active, model, optimizer, schedule, clip_norm=LIMIT)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def loop() -> None:
        for batch in batches:
            with active.accumulate(model):
                with stepper.forward(last=active.sync_gradients):
                    loss = loss_of(model, batch)
                stepper.backward(loss)
                if every or active.sync_gradients:
                    getattr(active, call)(model.parameters(), LIMIT)
                if active.sync_gradients:
                    stepper.apply()

    with pytest.raises(WrongUse, match="between backward"):
        loop()
    assert same(dict(model.state_dict()), before)


@pytest.mark.wording
def test_clipping_by_both_at_once_is_refused_by_name() -> None:
    active = accelerator()
    given = active.prepare(*parts())
    with pytest.raises(WrongUse, match="clip_norm and clip_value together"):
        halfstep.from_accelerate(active, *given, clip_norm=1.0, clip_value=1.0)


# -- precision and loss scale -----------------------------------------------------------------------------------------


def fake(**settings: Any) -> Any:
    """An Accelerator with settings that this machine cannot have."""
    given = {"mixed_precision": "no", "autocast_handler": None, "scaler_handler": None}
    return SimpleNamespace(**{**given, "distributed_type": DistributedType.NO, **settings})


@pytest.mark.parametrize(("given", "expected"), [("no", "fp32"), ("fp16", "fp16"), ("bf16", "bf16")])
def test_each_precision_of_accelerate_has_one_of_ours(given: str, expected: str) -> None:
    assert read_accelerate_precision(fake(mixed_precision=given)) == expected
    assert read_accelerate_precision(fake(mixed_precision=PrecisionType(given))) == expected


@pytest.mark.wording
@pytest.mark.parametrize("given", ["fp8", "fp4", PrecisionType.FP8])
def test_a_precision_without_one_of_ours_is_refused_by_name(given: Any) -> None:
    with pytest.raises(WrongUse, match="mixed_precision=fp") as refused:
        read_accelerate_precision(fake(mixed_precision=given))
    assert refused.value.allowed == "no, fp16, bf16"


@pytest.mark.wording
def test_an_autocast_that_is_off_is_refused_by_name_where_it_would_change_the_precision() -> None:
    active = accelerator(mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=False)])
    given = active.prepare(*parts())
    with pytest.raises(WrongUse, match=r"AutocastKwargs\(enabled=False\)"):
        halfstep.from_accelerate(active, *given)
    assert halfstep.from_accelerate(active, *given, precision="fp32").precision.name == "fp32"


def test_the_loss_scale_is_the_accelerators_own() -> None:
    handler = GradScalerKwargs(init_scale=0.5, growth_factor=4.0, backoff_factor=0.25, growth_interval=7)
    active = accelerator(mixed_precision="fp16", kwargs_handlers=[handler])
    given = active.prepare(*parts())
    stepper = halfstep.from_accelerate(active, *given)
    assert stepper.scale_in_use == 0.5
    found = build_accelerate_scale(active)
    assert isinstance(found, DynamicScale)
    assert (found.value, found.growth_factor, found.backoff_factor, found.growth_interval) == (0.5, 4.0, 0.25, 7)
    assert halfstep.from_accelerate(active, *given, loss_scale=StaticScale(8.0)).scale_in_use == 8.0
    assert halfstep.from_accelerate(active, *given, precision="fp32").precision.name == "fp32"


@pytest.mark.wording
def test_a_loss_scale_that_is_off_is_refused_by_name() -> None:
    with pytest.raises(WrongUse, match=r"GradScalerKwargs\(enabled=False\)"):
        build_accelerate_scale(fake(mixed_precision="fp16", scaler_handler=GradScalerKwargs(enabled=False)))


@pytest.mark.wording
@pytest.mark.parametrize("kind", DistributedType)
def test_every_engine_of_accelerate_is_either_supported_or_refused_by_name(kind: DistributedType) -> None:
    engine = fake(distributed_type=kind)
    if kind is DistributedType.NO or kind.name.startswith("MULTI_"):
        refuse_other_engines(engine)
        return
    with pytest.raises(WrongUse, match=kind.value):
        refuse_other_engines(engine)
