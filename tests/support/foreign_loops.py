"""One small model with every kind of trouble, and what a foreign loop must leave unchanged when a step is skipped."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

WINDOWS, BAD = 6, 2
"""The windows of a run, and the one that is bad."""
TROUBLES = ("loss", "last_loss", "gradient", "buffer", "written")
"""Where the non-finite number arises: in the first or last micro-batch's loss, in a gradient, in a buffer; or in the
loss after the forward pass has written to a parameter, as momentum encoders do."""
OPTIMIZERS: tuple[Any, ...] = (
    lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    lambda p: torch.optim.AdamW(p, 0.01),
    lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9),
)


class _Bomb(torch.autograd.Function):
    """The identity, whose backward gives infinity where the flag is set."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, armed: Tensor) -> Tensor:
        ctx.save_for_backward(armed)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (armed,) = ctx.saved_tensors
        return torch.where(armed.any(), torch.full_like(gradient, torch.inf), gradient), None


class Model(nn.Module):
    """Linear layers, BatchNorm, a buffer of its own, and a frozen copy that every forward pass moves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.register_buffer("largest", torch.zeros(()))
        self.target = nn.Parameter(torch.zeros(16, 8), requires_grad=False)

    def forward(self, x: Tensor, labels: Tensor, flag: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            self.target.lerp_(self.first.weight, 0.1)
            self.largest.copy_(torch.where((flag == 2).any(), torch.tensor(torch.inf), x.abs().amax().float()))
        hidden = self.norm(_Bomb.apply(self.first(x), flag == 1)).relu()
        out = self.last(hidden)
        return {"loss": nn.functional.cross_entropy(out.float(), labels), "logits": out}


@dataclass(frozen=True)
class Case:
    """One case of the contract."""

    precision: str
    accumulate: int
    trouble: str
    optimizer: int

    def __str__(self) -> str:
        return f"{self.precision}-x{self.accumulate}-{self.trouble}"

    def optimizer_of(self, model: nn.Module) -> Any:
        return OPTIMIZERS[self.optimizer]([p for p in model.parameters() if p.requires_grad])

    @property
    def without_trouble(self) -> Case:
        """The case whose run without the bad window is this one's too."""
        return replace(self, trouble=TROUBLES[0])

    def microbatches(self, *, bad: bool = True) -> list[dict[str, Tensor]]:
        """The data of a run; without its bad window where `bad` is False."""
        generator = torch.Generator().manual_seed(7)
        found = []
        for window, _ in product(range(WINDOWS), range(self.accumulate)):
            x = torch.randn(4, 8, generator=generator)
            labels = torch.randint(3, (4,), generator=generator)
            found.append({"x": x, "labels": labels, "flag": torch.full((4,), -1.0), "window": window})
        for place, microbatch in enumerate(found):
            if microbatch.pop("window") == BAD:
                microbatch["bad"] = True
                self._spoil(microbatch, place % self.accumulate)
        return [{k: v for k, v in m.items() if k != "bad"} for m in found if bad or "bad" not in m]

    def microbatches_of(self, rank: int) -> list[dict[str, Tensor]]:
        """The data of one of two ranks, of which the second has the bad window, and the first a healthy one for it."""
        if rank == 1:
            return self.microbatches()
        good, place = self.microbatches(bad=False), BAD * self.accumulate
        return [*good[:place], *good[: self.accumulate], *good[place:]]

    def dealt(self) -> list[dict[str, Tensor]]:
        """The data of both ranks as accelerate deals it: one batch to each in turn."""
        return [batch for pair in zip(*map(self.microbatches_of, range(2)), strict=True) for batch in pair]

    def _spoil(self, microbatch: dict[str, Any], place: int) -> None:
        if self.trouble == "gradient":
            microbatch["flag"] = torch.full((4,), 1.0)
        elif self.trouble == "buffer":
            microbatch["flag"] = torch.full((4,), 2.0)
        elif place == (self.accumulate - 1 if self.trouble == "last_loss" else 0):
            microbatch["x"][0, 0] = torch.nan


KINDS = list(product(("fp32", "bf16", "fp16"), (1, 2)))
CASES = [
    # One optimizer for all troubles of a kind, so that they share the run without any. CI has one trouble of each
    # kind, and each trouble at least once; the others come with --full.
    pytest.param(
        Case(precision, accumulate, trouble, kind % len(OPTIMIZERS)),
        id=f"{precision}-x{accumulate}-{trouble}",
        marks=[] if (kind + place) % 5 == 2 else pytest.mark.full,
    )
    for kind, (precision, accumulate) in enumerate(KINDS)
    for place, trouble in enumerate(TROUBLES)
]
assert len(CASES) == 30
ON_RANKS = [Case("bf16", 1, "loss", 1), pytest.param(Case("fp32", 2, "gradient", 0), marks=pytest.mark.full)]
"""The cases that two ranks go through."""


@dataclass
class Seen:
    """What a foreign loop looked like after each window."""

    states: list[dict[str, Any]] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)

    def look(self, model: nn.Module, optimizer: Any, schedule: Any = None) -> None:
        """Keep a copy of everything that a skip must not change."""
        torchs = getattr(optimizer, "optimizer", optimizer)
        self.states.append(
            copy.deepcopy(
                {
                    "model": {name.removeprefix("module."): value for name, value in model.state_dict().items()},
                    "optimizer": torchs.state_dict()["state"],
                    "schedule": None if schedule is None else schedule.state_dict(),
                }
            )
        )
        self.lrs.append(torchs.param_groups[0]["lr"])


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal to the bit, NaN included."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def check_contract(with_bad: Seen, without: Seen) -> None:
    """The bad window changed nothing, and the run went on as one that never had it."""
    assert len(with_bad.states) == WINDOWS
    assert len(without.states) == WINDOWS - 1
    assert same(with_bad.states[BAD], with_bad.states[BAD - 1]), "the skip changed something"
    assert with_bad.lrs[BAD] == with_bad.lrs[BAD - 1], "the schedule moved"
    assert not same(with_bad.states[-1], with_bad.states[BAD]), "nothing was trained after it"
    healthy = [state for place, state in enumerate(with_bad.states) if place != BAD]
    assert same(healthy, without.states), "the rest is not what it is without the bad window"
    finite = [torch.isfinite(value).all() for value in with_bad.states[-1]["model"].values()]
    assert all(finite)


def check_ranks(one: Seen, other: Seen) -> None:
    """Both ranks skipped the window that was bad on one, and have the same weights after every window."""
    for seen in (one, other):
        assert len(seen.states) == WINDOWS
        assert same(seen.states[BAD], seen.states[BAD - 1]), "the skip changed something"
        assert not same(seen.states[-1], seen.states[BAD]), "nothing was trained after it"
    for ours, theirs in zip(one.states, other.states, strict=True):
        for name in ("first.weight", "norm.weight", "last.weight", "last.bias"):
            [mine], [its] = ([v for k, v in state["model"].items() if k.endswith(name)] for state in (ours, theirs))
            assert same(mine, its), name
