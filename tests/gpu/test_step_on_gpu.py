"""The step's promises on a CUDA device. Run them with: scripts/test tests/gpu -m gpu"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import Ema, Stepper, Window, island
from halfstep.precision.flags import read_fp32_flags
from halfstep.precision.hardware import describe_device
from halfstep.precision.select import choose_precision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )
    return model.cuda().to(memory_format=torch.channels_last)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 3, 16, 16, device="cuda"), torch.randint(0, 4, (8,), device="cuda")


def snapshot(stepper: Stepper) -> list[Tensor]:
    state = stepper.state_dict()["optimizers"]["loss"]["optimizer"]["state"]
    moments = [t for values in state.values() for t in values.values() if isinstance(t, Tensor)]
    return [t.detach().clone() for t in (*stepper.model.state_dict().values(), *moments)]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_a_skip_moves_nothing(precision: str, fused: bool) -> None:
    model = convolutional()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=fused)
    stepper = Stepper(model, optimizer, precision=precision, clip_norm=1.0, ema=Ema(model))
    for _ in range(3):
        stepper.step(loss_fn, Window([batch(), batch()]))
    before = snapshot(stepper)
    x, y = batch()
    report = stepper.step(loss_fn, Window([batch(), (x * float("nan"), y)]))
    assert report.reason == "loss_not_finite"
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(stepper), strict=True))


def test_one_synchronisation_a_step() -> None:
    model = convolutional()
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), 1e-3, fused=True), precision="auto", clip_norm=1.0)
    for _ in range(3):
        stepper.step(loss_fn, batch())
    data = batch()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchroniz") as caught:
            stepper.step(loss_fn, data)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(caught) == 1


def test_what_was_chosen_is_what_ran() -> None:
    choice = choose_precision("auto", fresh=True)
    model = convolutional()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision=choice.precision)
    stepper.step(loss_fn, batch())
    assert stepper.observed is not None
    assert (stepper.observed.share or 0) >= 0.9
    assert describe_device("cuda").capability == torch.cuda.get_device_capability()


def test_fp32_and_islands_are_not_tf32() -> None:
    before = read_fp32_flags()
    model = convolutional()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp32")
    stepper.step(loss_fn, batch())
    assert stepper.observed is not None
    assert set(stepper.observed.flops) == {"fp32"}
    assert read_fp32_flags() == before


def test_an_island_is_finite_where_fp16_is_not() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).cuda()
    with torch.no_grad():
        model[1].weight.fill_(1e4)
    island(model, "1")
    with torch.autocast("cuda", torch.float16):
        hidden = model[0](torch.full((1, 8), 100.0, device="cuda"))
        assert torch.isfinite(island(nn.Identity())(hidden)).all()
