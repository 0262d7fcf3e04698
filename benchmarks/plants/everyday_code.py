"""Losses and layers of every day that have no finite answer for some batch, in any format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.plants.faults import Applies
from benchmarks.plants.models import Perceptron, Transformer, batch_for, squares
from benchmarks.plants.plant import LOSS, Expected, Plant, Scene, plants

ALL, TWO, ONE = "fp16 bf16 fp32", "bf16 fp32", "fp32"
Batch = tuple[Tensor, Tensor]


def _loss(loss_fn: Callable[..., Any]) -> Callable[[], Scene]:
    def make() -> Scene:
        model = Perceptron()
        return Scene(model, loss_fn, batch_for(model), scale=256.0)

    return make


def _layer(function: Callable[[Tensor], Tensor], model: Callable[..., nn.Module] = Perceptron) -> Callable[[], Scene]:
    def make() -> Scene:
        built = model(Applies(function))
        return Scene(built, squares, batch_for(built), scale=256.0)

    return make


# -- losses -------------------------------------------------------------------------------------------------------


def dice_of_nothing(model: nn.Module, batch: Batch) -> Tensor:
    """Neither a prediction nor a target: 0 / 0, and no smoothing term."""
    out = model(batch[0]).float()
    chance, target = out.relu() * 0, torch.zeros_like(batch[1])
    both, each = 2 * (chance * target).sum(), chance.sum() + target.sum()
    return 1 - both / each  # dice of nothing


def focal_of_a_sure_one(model: nn.Module, batch: Batch) -> Tensor:
    chance = (model(batch[0]).float() * 0 + 200).sigmoid()
    return -(chance.square() * (1 - chance).log()).mean()  # focal of a sure one


def divergence_by_hand(model: nn.Module, batch: Batch) -> Tensor:
    """A target that is 0 somewhere: 0 times log 0."""
    chance = model(batch[0]).float().softmax(-1)
    target = F.one_hot(torch.zeros(len(chance), dtype=torch.int64), 4).float()
    logarithm = target.log()  # divergence by hand
    return (target * (logarithm - chance.log())).sum(-1).mean()


def no_positive_pairs(model: nn.Module, batch: Batch) -> Tensor:
    """A contrastive loss over a batch in which every label is another one."""
    z = F.normalize(model(batch[0]).float(), dim=-1)
    labels = torch.arange(len(z))
    pairs = (labels[:, None] == labels[None]).float() - torch.eye(len(z))
    each = ((z @ z.T).log_softmax(-1) * pairs).sum(-1)
    return -(each / pairs.sum(-1)).mean()  # no positive pairs


def gaussian_without_spread(model: nn.Module, batch: Batch) -> Tensor:
    out = model(batch[0]).float()
    variance = out.detach() * 0
    return (((out - batch[1]).square() / variance) + 1).mean()  # gaussian without spread


def sum_of_no_logits(model: nn.Module, batch: Batch) -> Tensor:
    """The negatives of a sample are picked by a mask that picks none."""
    out = model(batch[0]).float()
    nobody = out[:, :0]
    return out.mean() - nobody.logsumexp(-1).mean()  # sum of no logits


def too_short_for_its_text(model: nn.Module, batch: Batch) -> Tensor:
    """CTC: four labels for two frames, and no `zero_infinity`."""
    frames = model(batch[0]).float().log_softmax(-1)[:2, None].expand(2, 6, 4)
    labels = torch.ones(6, 4, dtype=torch.int64)
    return F.ctc_loss(frames, labels, torch.full((6,), 2), torch.full((6,), 4))  # too short for its text


def rest_of_a_sum(model: nn.Module, batch: Batch) -> Tensor:
    """log(1 - sum) where the sum is above one."""
    out = model(batch[0]).float()
    total = out.softmax(-1).sum(-1) + 0.5
    return (1 - total).log().mean() + out.mean()  # rest of a sum


def sixtieth_power(model: nn.Module, batch: Batch) -> Tensor:
    """A range that fp32 lacks."""
    error = model(batch[0]).float().tanh() + 10
    return error.pow(60).mean()  # sixtieth power


def determinant_of_copies(model: nn.Module, batch: Batch) -> Tensor:
    """A log-determinant of a matrix whose rows are all the same."""
    out = model(batch[0]).float()
    matrix = out[:1].expand(4, 4) * 0
    return torch.logdet(matrix) + out.mean()


def penalty_of_no_gradient(model: nn.Module, batch: Batch) -> Tensor:
    """A gradient penalty by hand where the critic does not depend on its input: a root's slope at 0."""
    x = batch[0].clone().requires_grad_()
    out = model(x).float()
    (gradient,) = torch.autograd.grad((out * 0 + out.detach()).sum(), x, create_graph=True)
    norm = gradient.square().sum(-1).sqrt()
    return (norm - 1).square().mean() + out.mean()


def spread_of_a_constant(model: nn.Module, batch: Batch) -> Tensor:
    """VICReg's hinge without its epsilon, on features that have collapsed."""
    out = model(batch[0]).float()
    collapsed = out * 0
    return (1 - collapsed.var(0).sqrt()).relu().mean() + out.square().mean()


def geometric_mean_of_zero(model: nn.Module, batch: Batch) -> Tensor:
    out = model(batch[0]).float()
    return (out.relu() * 0).prod(-1).pow(0.25).mean() + out.square().mean()


def ratio_of_counts(model: nn.Module, batch: Batch) -> Tensor:
    """Class weights by the inverse of their frequency; one class is not there."""
    out = model(batch[0]).float()
    labels = torch.zeros(len(out), dtype=torch.int64)
    counts = torch.bincount(labels, minlength=4).float()
    weights = counts.sum() / counts  # ratio of counts
    return (F.cross_entropy(out, labels, reduction="none") * weights[3]).mean()


# -- layers -------------------------------------------------------------------------------------------------------


def to_the_range_of_one(h: Tensor) -> Tensor:
    """Rescaled to [0, 1] by its own range, which is nothing."""
    constant = h.detach() * 0 + 1
    low, high = constant.amin(), constant.amax()
    return h + (constant - low) / (high - low)  # to the range of one


def signed_root(h: Tensor) -> Tensor:
    """Bilinear pooling: sign(x) * sqrt(|x|), at 0. Its gradient has no answer."""
    return h + (h * 0).abs().sqrt() * h.sign()  # signed root


def all_padding(h: Tensor) -> Tensor:
    """A sequence of padding alone: attention over no keys."""
    scores = h @ h.transpose(-1, -2)
    hidden = torch.zeros_like(scores, dtype=torch.bool)
    hidden[0] = True
    return h + scores.masked_fill(hidden, -torch.inf).softmax(-1) @ h  # all padding


def minus_its_highest(h: Tensor) -> Tensor:
    """A stable softmax by hand: -inf minus -inf."""
    scores = h.float().masked_fill(torch.ones_like(h, dtype=torch.bool), -torch.inf)
    return h + (scores - scores.amax(-1, keepdim=True)).exp().to(h.dtype)  # minus its highest


class _ByItsSize(torch.autograd.Function):
    """Normalizes gradients by their size; they are zero."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        zero = gradients[0] * 0
        return zero / zero.abs().amax()  # by its size


class NormalisedGradient(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return _ByItsSize.apply(h)  # type: ignore[no-any-return, no-untyped-call]


def gradient_by_its_norm() -> Scene:
    """A tensor hook divides by a norm of zero."""

    def divide(gradient: Tensor) -> Tensor:
        nothing = gradient * 0
        return nothing / nothing.norm()  # gradient by its norm

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch[0])
        if out.requires_grad:
            out.register_hook(divide)
        return (out.float() - batch[1]).square().mean()

    model = Perceptron()
    return Scene(model, loss_fn, batch_for(model), scale=256.0)


def mask_of_a_later_batch() -> Scene:
    """The mask that came with the fourth batch counts nothing."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        error = (model(batch[0]).float() - batch[1]).square().mean(-1)
        return (error * batch[2]).sum() / batch[2].sum()  # mask of a later batch

    model = Perceptron()
    x, y = batch_for(model)
    full, empty = (x, y, torch.ones(len(x))), (x, y, torch.zeros(len(x)))
    return Scene(model, loss_fn, full, steps=6, scale=256.0, batch_at=lambda step: full if step < 3 else empty)


def all_of_them() -> list[Plant]:
    def code(operation: str | None = None, module: str = LOSS, **given: Any) -> Expected:
        return Expected("code", operation, module if operation else None, **given)

    return [
        *plants("dice_of_nothing", ALL, _loss(dice_of_nothing), code("aten.div", mark="dice of nothing")),
        *plants("focal_of_a_sure_one", TWO, _loss(focal_of_a_sure_one), code("aten.log", mark="focal of a sure one")),
        *plants("divergence_by_hand", TWO, _loss(divergence_by_hand), code("aten.log", mark="divergence by hand")),
        *plants("no_positive_pairs", TWO, _loss(no_positive_pairs), code("aten.div", mark="no positive pairs")),
        *plants("gaussian_without_spread", TWO, _loss(gaussian_without_spread),
                code("aten.div", mark="gaussian without spread", words=("divides by zero",))),
        *plants("sum_of_no_logits", TWO, _loss(sum_of_no_logits), code("aten.logsumexp", mark="sum of no logits")),
        *plants("too_short_for_its_text", ONE, _loss(too_short_for_its_text), code()),
        *plants("rest_of_a_sum", TWO, _loss(rest_of_a_sum),
                code("aten.log", mark="rest of a sum", words=("negative number",))),
        *plants("sixtieth_power", TWO, _loss(sixtieth_power), code("aten.pow", mark="sixtieth power")),
        *plants("determinant_of_copies", ONE, _loss(determinant_of_copies), code()),
        *plants("penalty_of_no_gradient", ONE, _loss(penalty_of_no_gradient), code()),
        *plants("spread_of_a_constant", TWO, _loss(spread_of_a_constant), code()),
        *plants("geometric_mean_of_zero", TWO, _loss(geometric_mean_of_zero), code()),
        *plants("ratio_of_counts", TWO, _loss(ratio_of_counts), code("aten.div", mark="ratio of counts")),
        *plants("to_the_range_of_one", ALL, _layer(to_the_range_of_one),
                code("aten.div", "fault", mark="to the range of one")),
        *plants("signed_root", TWO, _layer(signed_root), code("aten.div", "fault", backward=True, mark="signed root")),
        *plants("all_padding", ALL, _layer(all_padding, Transformer),
                code("aten._softmax", "blocks.1.fault", mark="all padding", words=("all -inf",))),
        *plants("minus_its_highest", TWO, _layer(minus_its_highest), code()),
        *plants("by_its_size", TWO, lambda: _built(NormalisedGradient),
                code("aten.div", "fault", backward=True, mark="by its size")),
        *plants("gradient_by_its_norm", TWO, gradient_by_its_norm, code()),
        *plants("mask_of_a_later_batch", TWO, mask_of_a_later_batch, code("aten.div", mark="mask of a later batch")),
    ]  # fmt: skip


def _built(fault: Callable[[], nn.Module]) -> Scene:
    model = Perceptron(fault())
    return Scene(model, squares, batch_for(model), scale=256.0)
