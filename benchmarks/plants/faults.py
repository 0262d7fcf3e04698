"""Modules and functions that spoil numbers, each in one line that a comment names."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def times_hundred_thousand(h: Tensor) -> Tensor:
    return h * 1e5  # functional


def in_place(h: Tensor) -> Tensor:
    copy = h.clone()
    copy.mul_(1e5)  # in place
    return copy


def in_a_list(h: Tensor) -> Tensor:
    return torch._foreach_mul([h, h * 0], 1e5)[0]  # in a list


def through_a_view(h: Tensor) -> Tensor:
    copy = h.clone()
    copy[:, :2].view(-1, 2).mul_(1e5)  # through a view
    return copy


def exponential(h: Tensor) -> Tensor:
    return (h.detach() * 0 + 12).exp() + h  # exponential of 12


def exponential_of_hundred(h: Tensor) -> Tensor:
    return (h.detach() * 0 + 100).exp() + h  # exponential of 100


def sum_of_large(h: Tensor) -> Tensor:
    return (h.abs() + 9000).sum(-1, keepdim=True) + h  # sum


def by_zero(h: Tensor) -> Tensor:
    nothing = h.detach() * 0
    return h / nothing  # by zero


def vanishing_epsilon(h: Tensor) -> Tensor:
    nothing = h.detach() * 0
    return h / (nothing + 1e-8)  # epsilon


def by_little(h: Tensor) -> Tensor:
    """There is a zero, and nothing is divided by it."""
    return (h.relu() * 1e20) / 1e-30 + h  # by little


def square_of_large(h: Tensor) -> Tensor:
    return (h.relu() * 1e25).pow(2) + h  # square of large


def log_of_zero(h: Tensor) -> Tensor:
    nothing = h.detach() * 0
    return nothing.log() + h  # log of zero


def log_of_rest(h: Tensor) -> Tensor:
    """What is left of one when 0.9999 is taken away: nothing, where 0.9999 is rounded to one."""
    sure = h.detach() * 0 + 0.9999
    return (1 - sure).log() + h  # log of rest


def root_of_negative(h: Tensor) -> Tensor:
    return (h - 100).sqrt()  # root of negative


def spread_of_one(h: Tensor) -> Tensor:
    return h / h[:1].var(0)  # spread of one


def root_of_zero(h: Tensor) -> Tensor:
    """Finite; its gradient is not."""
    return (h * 0).sqrt() + h  # root of zero


def where_trap(h: Tensor) -> Tensor:
    """The branch that is not taken has a gradient of 0 times infinity."""
    nothing = h * 0
    return torch.where(h > 1e9, nothing.sqrt(), h)  # where trap


def spectrum(h: Tensor) -> Tensor:
    large = 1e38 * (1 + h.float().abs())
    return h + torch.fft.rfft(large).abs().mean().to(h.dtype)  # spectrum


def recomputed(h: Tensor, reentrant: bool) -> Tensor:
    """No module runs when it is computed again."""
    return checkpoint(root_of_zero, h, use_reentrant=reentrant)  # type: ignore[no-any-return]


class Applies(nn.Module):
    """A module round one of these functions."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, h: Tensor) -> Tensor:
        return self.function(h)  # type: ignore[operator, no-any-return]


class Deep(nn.Module):
    """Wraps a module, so that there is something round it for an island."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, h: Tensor) -> Tensor:
        return self.inner(h) / 1e4


class LargeLinear(nn.Linear):
    """Weights of 300 and inputs of up to 300 in 16 places."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        nn.init.constant_(self.weight, 300.0)

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h.abs() * 0 + 300)  # large linear


class RootMeanSquare(nn.Module):
    """A normalization by hand: tiny inputs, whose squares vanish in fp16, as does its epsilon."""

    def forward(self, h: Tensor) -> Tensor:
        tiny = h * 1e-5
        return tiny * (tiny.mul(tiny).mean(-1, keepdim=True) + 1e-12).rsqrt()  # root mean square


class SteepBack(nn.Module):
    """Forward fits: backward multiplies by a hundred thousand, and then makes it small again."""

    def forward(self, h: Tensor) -> Tensor:
        small = h * 1e-4
        return small * 1e5  # steep back


class _Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, h: Tensor) -> Tensor:
        return (h * 0 + 12).exp()  # custom forward

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _Steep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        ones = gradients[0] * 0 + 1
        return ones * 1e6  # custom backward


class CustomForward(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return _Exponential.apply(h) + h  # type: ignore[no-any-return, no-untyped-call]


class CustomBackward(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return _Steep.apply(h)  # type: ignore[no-any-return, no-untyped-call]


class Recomputed(nn.Module):
    """Runs a module under activation checkpointing."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, h: Tensor) -> Tensor:
        return checkpoint(self.inner, h, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class Once(nn.Module):
    """Spoils a number the first time it runs, as a device that fails now and then does."""

    def __init__(self) -> None:
        super().__init__()
        # In an iterator: a skip restores a module's plain attributes and lists, and the event would repeat.
        self.left = iter([torch.nan])

    def forward(self, h: Tensor) -> Tensor:
        return h * next(self.left, 1.0)


class Scales(nn.Module):
    """Multiplies by a buffer."""

    factor: Tensor

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(factor))

    def forward(self, h: Tensor) -> Tensor:
        return h * self.factor


class SpoilsItsBuffer(nn.Module):
    """An average that is divided by the number of updates, which is 0 at first."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(1))

    def forward(self, h: Tensor) -> Tensor:
        self.average.div_(0.0)  # buffer in place
        return h * self.average
