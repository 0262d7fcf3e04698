"""Numbers of ordinary layers that fp32 holds and 16 bits do not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.plants.faults import Applies
from benchmarks.plants.models import Perceptron, Pictures, batch_for, squares
from benchmarks.plants.plant import LOSS, ROOT, Expected, Plant, Scene, plants


def _changed(change: Callable[[Tensor], Tensor]) -> Callable[[], Scene]:
    def make() -> Scene:
        model = Perceptron(change=change)
        return Scene(model, squares, batch_for(model), scale=256.0)

    return make


def _layer(fault: Callable[[], nn.Module], model: Callable[..., nn.Module] = Perceptron) -> Callable[[], Scene]:
    def make() -> Scene:
        built = model(fault())
        return Scene(built, squares, batch_for(built), scale=256.0)

    return make


def cold_temperature(h: Tensor) -> Tensor:
    """A temperature of 1e-6, in front of a softmax that would not mind."""
    return h + (h / 1e-6).softmax(-1)  # cold temperature


def second_moment(h: Tensor) -> Tensor:
    """A variance by hand, of features of about 300."""
    large = h.abs() * 0 + 300
    return h + large.square().mean(-1, keepdim=True).sqrt() - 300  # second moment


def softplus_by_hand(h: Tensor) -> Tensor:
    large = h * 0 + 13
    return h + (1 + large.exp()).log()  # softplus by hand


def safe_logarithm(h: Tensor) -> Tensor:
    """`log(p + 1e-8)`: fp16 has no 1e-8."""
    nothing = h.detach() * 0
    return h + (nothing + 1e-8).log()  # safe logarithm


def inverse_tanh(h: Tensor) -> Tensor:
    """0.999 is one in bf16."""
    sure = h.detach() * 0 + 0.999
    return h + sure.atanh()  # inverse tanh


def odds(h: Tensor) -> Tensor:
    """p / (1 - p) with a p of 0.999, which bf16 rounds to one."""
    sure = h.detach() * 0 + 0.999
    return h + sure / (1 - sure)  # odds


def bilinear(h: Tensor) -> Tensor:
    """An outer product of features that are not normalized."""
    large = h.abs() * 0 + 400
    outer = torch.bmm(large[:, :, None], large[:, None, :])  # bilinear
    return h + outer.mean(-1).log()


def cubed(h: Tensor) -> Tensor:
    """A polynomial feature of an activation of 60."""
    large = h * 0 + 60
    return h + 1e-6 * large.pow(3)  # cubed


class LargeFilter(nn.Module):
    """A convolution with filters of 300 over a picture of 300."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(4, 4, 3, padding=1)
        nn.init.constant_(self.inner.weight, 300.0)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.inner(h * 0 + 300) / 1e7


class Summed(nn.Module):
    """A sum instead of a mean over many positions."""

    def forward(self, h: Tensor) -> Tensor:
        total = (h.abs() * 0 + 5000).sum((2, 3), keepdim=True)  # summed
        return h + total / 36 / 5000


def counted_in_half(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A sum of errors in the format of the output, divided afterwards."""
    error = (model(batch[0]) - batch[1].to(torch.float16)).abs() + 9000
    return (error.sum() / error.numel()).float()  # counted in half


def in_the_loss() -> Scene:
    model = Perceptron()
    return Scene(model, counted_in_half, batch_for(model), scale=256.0)


def after_some_steps() -> Scene:
    """A gain that a schedule of the loop raises: the fourth step is the first that does not fit."""
    gain = [1.0]

    def change(h: Tensor) -> Tensor:
        return h + h * gain[0] / gain[0]  # after some steps

    def before(step: int) -> None:
        gain[0] = 1e7 if step >= 3 else 1.0

    model = Perceptron(change=change)
    return Scene(model, squares, batch_for(model), steps=5, scale=256.0, before=before)


def all_of_them() -> list[Plant]:
    cause = "precision"
    return [
        *plants("cold_temperature", "fp16", _changed(cold_temperature),
                Expected(cause, "aten.div", ROOT, mark="cold temperature")),
        *plants("second_moment", "fp16", _changed(second_moment),
                Expected(cause, "aten.pow", ROOT, mark="second moment")),
        *plants("softplus_by_hand", "fp16", _layer(lambda: Applies(softplus_by_hand)),
                Expected(cause, "aten.exp", "fault", mark="softplus by hand",
                         words=("an island around fault is finite",))),
        *plants("safe_logarithm", "fp16", _changed(safe_logarithm),
                Expected(cause, "aten.log", ROOT, mark="safe logarithm")),
        *plants("inverse_tanh", "bf16", _changed(inverse_tanh),
                Expected(cause, "aten.atanh", ROOT, mark="inverse tanh")),
        *plants("odds", "bf16", _layer(lambda: Applies(odds)),
                Expected(cause, "aten.div", "fault", mark="odds", words=("an island around fault is finite",))),
        *plants("bilinear", "fp16", _layer(lambda: Applies(bilinear)),
                Expected(cause, "aten.bmm", "fault", mark="bilinear")),
        *plants("cubed", "fp16", _changed(cubed), Expected(cause, "aten.pow", ROOT, mark="cubed")),
        *plants("large_filter", "fp16", _layer(LargeFilter, Pictures),
                Expected(cause, "aten.convolution", "fault.inner")),
        *plants("summed", "fp16", _layer(Summed, Pictures), Expected(cause, "aten.sum", "fault", mark="summed")),
        *plants("counted_in_half", "fp16", in_the_loss,
                Expected(cause, "aten.sum", LOSS, mark="counted in half")),
        *plants("after_some_steps", "fp16", after_some_steps,
                Expected(cause, "aten.mul", ROOT, mark="after some steps")),
    ]  # fmt: skip
