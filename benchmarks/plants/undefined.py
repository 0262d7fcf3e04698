"""Code that has no finite answer in any precision, of numbers that are ordinary."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.plants.models import Perceptron, batch_for, squares
from benchmarks.plants.plant import LOSS, ROOT, Expected, Plant, Scene, plants

TWO = "bf16 fp32"
Batch = tuple[Tensor, Tensor]


# -- in the model ----------------------------------------------------------------------------------------------------


def acos_of_one(h: Tensor) -> Tensor:
    """0 forward, and a slope without end."""
    return (h * 0 + 1).acos() + h  # acos of one


def acosh_of_one(h: Tensor) -> Tensor:
    return (h * 0 + 1).acosh() + h  # acosh of one


def half_power_of_zero(h: Tensor) -> Tensor:
    return (h * 0).pow(0.5) + h  # half power


def logit_of_one(h: Tensor) -> Tensor:
    return torch.logit(h.float() * 0 + 1) + h  # logit of one


def log_of_negative(h: Tensor) -> Tensor:
    return (h - 100).log() + h  # log of negative


def log1p_of_minus_one(h: Tensor) -> Tensor:
    return torch.log1p(h.detach() * 0 - 1) + h  # log1p


def asin_of_two(h: Tensor) -> Tensor:
    return (h.detach() * 0 + 2).asin() + h  # asin of two


def atanh_of_one(h: Tensor) -> Tensor:
    return (h.detach() * 0 + 1).atanh() + h  # atanh of one


def gamma_of_zero(h: Tensor) -> Tensor:
    return torch.lgamma(h.detach() * 0) + h  # gamma of zero


def inverse_of_zero(h: Tensor) -> Tensor:
    return (h.detach() * 0) ** -1 + h  # inverse of zero


def rsqrt_of_zero(h: Tensor) -> Tensor:
    return (h.detach() * 0).rsqrt() + h  # rsqrt of zero


def remainder_of_zero(h: Tensor) -> Tensor:
    return torch.remainder(h.detach(), h.detach() * 0) + h  # remainder of zero


def softmax_by_hand(h: Tensor) -> Tensor:
    """Without taking the largest away, all of them vanish."""
    chances = (h.float().detach() * 0 - 1e4).exp()
    return h + chances / chances.sum(-1, keepdim=True)  # softmax by hand


def norm_by_hand(h: Tensor) -> Tensor:
    """A constant row has no spread, and there is no epsilon."""
    flat = h * 0
    return h + (flat - flat.mean(-1, keepdim=True)) / flat.std(-1, keepdim=True)  # norm by hand


def cosine_by_hand(h: Tensor) -> Tensor:
    nothing = h * 0
    length = nothing.square().sum(-1, keepdim=True)
    return h + (nothing * h).sum(-1, keepdim=True) / length  # cosine by hand


def log_of_a_product(h: Tensor) -> Tensor:
    chances = torch.full((4000,), 0.5).cumprod(0)
    return h + chances.log().mean()  # log of a product


def nan_in_the_code(h: Tensor) -> Tensor:
    return h * float("nan")  # nan in the code


def by_its_largest(h: Tensor) -> Tensor:
    nothing = h.detach() * 0
    return h + nothing / nothing.amax()  # by its largest


# -- in the loss -----------------------------------------------------------------------------------------------------


def literal_nan(model: nn.Module, batch: Batch) -> Tensor:
    return squares(model, batch) + torch.tensor(float("nan"))


def tiles_ignored(model: nn.Module, batch: Batch) -> Tensor:
    """Labels of pictures, none of which counts."""
    logits = model(batch[0]).float()[:, :, None, None].expand(-1, 4, 3, 3)
    return F.cross_entropy(logits, torch.full((len(logits), 3, 3), 255), ignore_index=255)  # tiles ignored


def weights_of_zero(model: nn.Module, batch: Batch) -> Tensor:
    labels = torch.zeros(len(batch[0]), dtype=torch.int64)
    return F.cross_entropy(model(batch[0]).float(), labels, weight=torch.tensor([0.0, 1, 1, 1]))  # weights of zero


def smoothed_and_ignored(model: nn.Module, batch: Batch) -> Tensor:
    labels = torch.full((len(batch[0]),), -100)
    return F.cross_entropy(model(batch[0]).float(), labels, label_smoothing=0.1)  # smoothed and ignored


def entropy_by_hand(model: nn.Module, batch: Batch) -> Tensor:
    """A chance of exactly 0 for a label of 1."""
    chance = model(batch[0]).float() * 0
    return -(chance.log()).mean()  # entropy by hand


def weighted_mean_of_nothing(model: nn.Module, batch: Batch) -> Tensor:
    mask = torch.zeros(len(batch[0]))
    error = (model(batch[0]).float() - batch[1]).square().mean(-1)
    return (error * mask).sum() / mask.sum()  # weighted mean of nothing


def distance_of_the_same(model: nn.Module, batch: Batch) -> Tensor:
    """A sample and itself are 0 apart, where a root has no slope."""
    out = model(batch[0]).float()
    return (out - out).square().sum(-1).sqrt().mean() + out.mean()  # distance of the same


def iou_of_nothing(model: nn.Module, batch: Batch) -> Tensor:
    out = (model(batch[0]).float() * 0).relu()
    return 1 - (out * 0).sum() / out.sum()  # iou of nothing


def all_masked_attention(model: nn.Module, batch: Batch) -> Tensor:
    scores = model(batch[0]).float()
    return (scores + torch.full_like(scores, -torch.inf)).softmax(-1).square().mean()  # all masked


def _changed(change: Callable[[Tensor], Tensor]) -> Callable[[], Scene]:
    return _with(partial(Perceptron, change=change), squares)


def _with(model: Callable[[], nn.Module], loss_fn: Callable[..., Any]) -> Callable[[], Scene]:
    def make() -> Scene:
        built = model()
        return Scene(built, loss_fn, batch_for(built))

    return make


def _in_the_model() -> list[Plant]:
    cause = "code"
    rows: list[tuple[Callable[[Tensor], Tensor], str, str, bool]] = [
        (acos_of_one, "aten.rsqrt", "acos of one", True),
        (acosh_of_one, "aten.rsqrt", "acosh of one", True),
        (half_power_of_zero, "aten.pow", "half power", True),
        (logit_of_one, "aten.logit", "logit of one", False),
        (log_of_negative, "aten.log", "log of negative", False),
        (log1p_of_minus_one, "aten.log1p", "log1p", False),
        (asin_of_two, "aten.asin", "asin of two", False),
        (atanh_of_one, "aten.atanh", "atanh of one", False),
        (gamma_of_zero, "aten.lgamma", "gamma of zero", False),
        (inverse_of_zero, "aten.pow", "inverse of zero", False),
        (rsqrt_of_zero, "aten.rsqrt", "rsqrt of zero", False),
        (remainder_of_zero, "aten.remainder", "remainder of zero", False),
        (softmax_by_hand, "aten.div", "softmax by hand", False),
        (norm_by_hand, "aten.div", "norm by hand", False),
        (cosine_by_hand, "aten.div", "cosine by hand", False),
        (log_of_a_product, "aten.log", "log of a product", False),
        (nan_in_the_code, "aten.mul", "nan in the code", False),
        (by_its_largest, "aten.div", "by its largest", False),
    ]
    return [
        plant
        for change, operation, mark, backward in rows
        for plant in plants(
            change.__name__, TWO, _changed(change), Expected(cause, operation, ROOT, backward=backward, mark=mark)
        )
    ]


def _in_the_loss() -> list[Plant]:
    cause = "code"
    rows: list[tuple[Callable[..., Tensor], str, str, bool]] = [
        (tiles_ignored, "aten.nll_loss2d_forward", "tiles ignored", False),
        (weights_of_zero, "aten.nll_loss_forward", "weights of zero", False),
        (smoothed_and_ignored, "aten.nll_loss_forward", "smoothed and ignored", False),
        (entropy_by_hand, "aten.log", "entropy by hand", False),
        (weighted_mean_of_nothing, "aten.div", "weighted mean of nothing", False),
        (distance_of_the_same, "aten.div", "distance of the same", True),
        (iou_of_nothing, "aten.div", "iou of nothing", False),
        (all_masked_attention, "aten._softmax", "all masked", False),
    ]
    return [
        plant
        for loss_fn, operation, mark, backward in rows
        for plant in plants(
            loss_fn.__name__,
            TWO,
            _with(Perceptron, loss_fn),
            Expected(cause, operation, LOSS, backward=backward, mark=mark),
        )
    ]


def all_of_them() -> list[Plant]:
    literal = Expected("code", outside="a number in the code")
    return [*_in_the_model(), *_in_the_loss(), *plants("literal_nan", TWO, _with(Perceptron, literal_nan), literal)]
