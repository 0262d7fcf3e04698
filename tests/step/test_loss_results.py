"""What a loss function may return, and what comes back of it."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep
from halfstep import Counted, DynamicScale, Out, Stepper, Window
from halfstep.errors import WrongUse
from tests.support.digest import digest_of
from tests.support.models import plain_model


def make(**options: Any) -> Stepper:
    model = plain_model()
    return Stepper(model, torch.optim.SGD(model.parameters(), 0.1), **{"precision": "fp32", **options})


def batch(seed: int = 1, size: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 8, generator=generator), torch.randint(4, (size,), generator=generator)


def loss_of(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(given[0]), given[1])


def moved_by(loss_fn: Any) -> str:
    stepper = make()
    stepper.step(loss_fn, batch())
    return digest_of(stepper.model.state_dict())


class LossAndAccuracy(NamedTuple):
    loss: Tensor
    accuracy: float


@dataclass
class ModelOutput:
    loss: Tensor
    logits: Tensor


class DictOutput(dict[str, Any]):
    """As Hugging Face's: a dict with attributes."""

    @property
    def loss(self) -> Tensor:
        return self["loss"]


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda m, b: Out(loss_of(m, b)),
        lambda m, b: Out(loss_of(m, b), aux={"accuracy": 1.0}),
        lambda m, b: Out(Counted(F.cross_entropy(m(b[0]), b[1], reduction="sum"), len(b[1]))),
        lambda m, b: LossAndAccuracy(loss_of(m, b), 0.25),
        lambda m, b: ModelOutput(loss_of(m, b), m(b[0])),
        lambda m, b: DictOutput(loss=loss_of(m, b), logits=m(b[0])),
        lambda m, b: {"loss": loss_of(m, b)},
    ],
)
def test_the_update_is_that_of_the_loss_alone(wrapped: Any) -> None:
    stepper, plain = make(), make()
    stepper.step(wrapped, batch())
    plain.step(loss_of, batch())
    for ours, theirs in zip(stepper.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.wording
@pytest.mark.parametrize("extra", [0.5, torch.tensor(0.5), torch.tensor(3), "text"])
def test_a_plain_tuple_is_refused_with_the_line_to_write(extra: Any) -> None:
    stepper = make()
    before = digest_of(stepper.model.state_dict())
    with pytest.raises(WrongUse, match=r"a tuple of 2(?s:.*)return halfstep\.Out\(loss, aux=accuracy\)"):
        stepper.step(lambda m, b: (loss_of(m, b), extra), batch())
    assert digest_of(stepper.model.state_dict()) == before
    assert stepper.step(loss_of, batch()).applied


def test_aux_comes_back_as_it_was_without_its_graph() -> None:
    stepper = make()

    def loss(model: nn.Module, given: Any) -> Out:
        logits = model(given[0])
        return Out(F.cross_entropy(logits, given[1]), aux={"logits": logits, "note": ["anything", 3]})

    report = stepper.step(loss, batch())
    assert report.aux["note"] == ["anything", 3]
    assert report.aux["logits"].shape == (6, 4)
    assert report.aux["logits"].grad_fn is None
    assert not report.aux["logits"].requires_grad


def test_a_window_gives_one_aux_for_each_micro_batch() -> None:
    report = make().step(lambda m, b: Out(loss_of(m, b), aux=len(b[0])), Window([batch(1, 3), batch(2, 5)]))
    assert report.aux == [3, 5]
    assert make().step(loss_of, Window([batch(1, 3), batch(2, 5)])).aux is None


def test_a_skipped_step_has_its_aux_too() -> None:
    report = make().step(lambda m, b: Out(loss_of(m, b) * float("nan"), aux="seen"), batch())
    assert (report.applied, report.aux) == (False, "seen")


def test_aux_keeps_no_graph_alive() -> None:
    stepper = make()
    seen: list[Any] = []

    class Marked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.marker = marker = type("Marker", (), {})()
            seen.append(weakref.ref(marker))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    def loss(model: nn.Module, given: Any) -> Out:
        out = Marked.apply(model(given[0]))
        return Out(F.cross_entropy(out, given[1]), aux=out)

    report = stepper.step(loss, batch())
    gc.collect()
    assert report.aux is not None
    assert seen[0]() is None


def test_counted_sums_weigh_micro_batches_by_their_size() -> None:
    one, several = make(), make()
    x, y = batch(3, 12)

    def counted(model: nn.Module, given: Any) -> Counted:
        return Counted(F.cross_entropy(model(given[0]), given[1], reduction="sum"), len(given[1]))

    one.step(counted, (x, y))
    several.step(counted, Window([(x[:1], y[:1]), (x[1:4], y[1:4]), (x[4:], y[4:])]))
    for a, b in zip(one.model.parameters(), several.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# -- gradient penalties --------------------------------------------------------------------------------------------


def critic() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 1))
    with torch.no_grad():
        model[2].weight.mul_(3e-4)
    return model


def penalty(model: nn.Module, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """torch's own recipe: scale the inner loss, and divide the gradients that come of it."""
    x = x.clone().requires_grad_()
    out = model(x).float().mean() * 1e-2
    (gradient,) = torch.autograd.grad(out * scale, x, create_graph=True)
    return out, (gradient.float() / scale).norm(dim=1).mean()


def test_gradient_penalties_in_fp16_through_the_scale_in_use() -> None:
    x = torch.randn(32, 64)
    _, wide = penalty(critic(), x, 1.0)
    model, seen = critic(), []
    scale = DynamicScale(init_scale=2.0**16)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp16", loss_scale=scale)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out, norm = penalty(model, x, stepper.scale_in_use)
        seen.append((stepper.scale_in_use, norm.item()))
        return out + norm

    report = stepper.step(loss, x)
    assert report.applied
    assert report.loss_scale == seen[0][0] == 2.0**16
    assert seen[0][1] == pytest.approx(wide.item(), rel=0.05)


def test_the_scale_in_use_is_the_one_of_the_optimizer_in_turn() -> None:
    model = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 1)})
    scales = {"g": DynamicScale(init_scale=256.0), "d": DynamicScale(init_scale=1024.0)}
    optimizers = {name: torch.optim.SGD(model[name].parameters(), 0.1) for name in "gd"}
    stepper = Stepper(model, optimizers, precision="fp16", loss_scale=scales)
    seen: dict[str, float] = {}

    def loss(name: str) -> Any:
        def of(model: Any, x: Tensor) -> Tensor:
            seen[name] = stepper.scale_in_use
            return model["d"](model["g"](x)).float().square().mean()

        return of

    for name in "gd":
        assert stepper.step(loss(name), torch.randn(8, 4), only=name).applied
    assert seen == {"g": 256.0, "d": 1024.0}
    assert make().scale_in_use == 1.0


def test_public_names() -> None:
    assert {"Counted", "Out", "Stepper"} <= set(halfstep.__all__)
