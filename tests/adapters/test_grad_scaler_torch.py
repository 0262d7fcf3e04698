"""One changed import line: the same bits as torch's scaler, states that both can load, and no more waiting."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from halfstep.errors import StateMismatch
from tests.support.combinations import pairwise
from tests.support.digest import digest_of
from tests.support.models import plain_model

Make = Callable[[list[Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, 1e-2),
    "sgd_momentum": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
    "sgd_momentum_fused": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-3),
    "muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=1e-3),
}
BAD = (3, 4, 11)
"""Iterations whose scaled gradients overflow, while the loss stays finite."""


class Run:
    """The loop of torch's AMP recipe, with a scaler of either kind."""

    def __init__(
        self, kind: Any, make: Make, *, several: bool = False, accumulate: int = 1, clip: bool = False, **options: Any
    ):
        self.model: Any = plain_model()
        parts = [self.model[0], self.model[2]] if several else [self.model]
        self.optimizers = [make(list(part.parameters())) for part in parts]
        self.scaler = kind("cpu", **{"init_scale": 2.0**12, "growth_interval": 3, **options})
        self.accumulate, self.clip, self.scales = accumulate, clip, [self.scaler.get_scale()]

    def iteration(self, number: int, *, bad: bool = False) -> None:
        made = torch.Generator().manual_seed(number)
        self.model.zero_grad()
        for _ in range(self.accumulate):
            x = torch.randn(6, 8, generator=made)
            with torch.autocast("cpu", dtype=torch.float16):
                out = self.model(x)
            if bad:
                out.register_hook(lambda gradient: gradient * float("inf"))
            self.scaler.scale(out.float().square().mean() / self.accumulate).backward()
        if self.clip:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        self.scales.append(self.scaler.get_scale())

    def digest(self) -> str:
        return digest_of(self.model.state_dict(), [optimizer.state_dict() for optimizer in self.optimizers])


@pytest.mark.parametrize(*pairwise(kind=OPTIMIZERS, accumulate=[1, 3], several=[False, True], clip=[False, True]))
def test_the_same_bits_as_torch(kind: str, accumulate: int, several: bool, clip: bool) -> None:
    options = {"several": several, "accumulate": accumulate, "clip": clip}
    # A scale that is no power of two: dividing by it is not multiplying by its inverse.
    odd = 1000.0 if accumulate == 3 else 2.0**12
    torchs, ours = (
        Run(k, OPTIMIZERS[kind], init_scale=odd, **options) for k in (torch.amp.GradScaler, halfstep.GradScaler)
    )
    # A fused optimizer that torch calls on a skip gets a state from it; torch is left out of those iterations.
    bad = () if "fused" in kind else BAD
    for number in range(14):
        for run in (torchs, ours):
            run.iteration(number, bad=number in bad)
        assert ours.digest() == torchs.digest(), number
    assert ours.scales == torchs.scales
    assert len(set(ours.scales)) >= 3
    assert {key: ours.scaler.state_dict()[key] for key in torchs.scaler.state_dict()} == torchs.scaler.state_dict()


@pytest.mark.parametrize(("first", "second"), [("torch", "halfstep"), ("halfstep", "torch")])
def test_a_run_goes_on_with_the_other_scaler(first: str, second: str) -> None:
    kinds = {"torch": torch.amp.GradScaler, "halfstep": halfstep.GradScaler}
    whole = Run(kinds[first], OPTIMIZERS["adam"], clip=True)
    part = Run(kinds[first], OPTIMIZERS["adam"], clip=True)
    for number in range(12):
        whole.iteration(number, bad=number in BAD)
        if number == 6:
            saved = copy.deepcopy(part.scaler.state_dict())
            # Other arguments than those that were saved, as in a script that was changed meanwhile.
            part.scaler = kinds[second]("cpu", init_scale=2.0, growth_interval=7)
            part.scaler.load_state_dict(saved)
        part.iteration(number, bad=number in BAD)
    assert part.digest() == whole.digest()
    assert part.scales[8:] == whole.scales[8:]


def test_the_interface_is_torchs() -> None:
    ours, torchs = halfstep.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    assert isinstance(ours, torch.amp.GradScaler)
    for name in ("get_scale", "get_growth_factor", "get_backoff_factor", "get_growth_interval", "is_enabled"):
        assert getattr(ours, name)() == getattr(torchs, name)()
    ours.set_growth_factor(3.0)
    ours.set_backoff_factor(0.25)
    ours.set_growth_interval(5)
    assert (ours.get_growth_factor(), ours.get_backoff_factor(), ours.get_growth_interval()) == (3.0, 0.25, 5)
    losses = [torch.ones(2, requires_grad=True), (torch.ones((), requires_grad=True),)]
    scaled = ours.scale(losses)
    assert type(scaled) is list
    assert type(scaled[1]) is tuple
    assert scaled[0].tolist() == [65536.0, 65536.0]
    assert [loss.item() for loss in ours.scale(loss for loss in losses[1])] == [65536.0]
    with pytest.raises(ValueError, match="must be a Tensor"):
        ours.scale(3)
    ours.load_state_dict({**torchs.state_dict(), "scale": 8.0})
    assert ours.get_scale() == 8.0
    copied = pickle.loads(pickle.dumps(ours))
    assert copied.state_dict() == copy.deepcopy(ours).state_dict() == ours.state_dict()


def test_a_scale_may_be_set() -> None:
    run = Run(halfstep.GradScaler, OPTIMIZERS["adam"])
    run.iteration(0)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = run.model(torch.randn(6, 8)).float().square().mean()
    run.optimizers[0].zero_grad()
    run.scaler.scale(loss).backward()
    run.scaler.step(run.optimizers[0])
    run.scaler.update(512.0)
    assert run.scaler.get_scale() == 512.0
    run.iteration(1)
    assert run.scaler.report.loss_scale == 512.0


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled")
def test_disabled_it_does_what_torchs_does() -> None:
    plain, ours = (Run(kind, OPTIMIZERS["adam"], enabled=False) for kind in (torch.amp.GradScaler, halfstep.GradScaler))
    ours.scaler.include(ours.model, ours.optimizers[0])
    for number in range(3):
        plain.iteration(number)
        ours.iteration(number)
    assert ours.digest() == plain.digest()
    assert ours.scaler.state_dict() == {}
    assert (ours.scaler.report, ours.scaler.get_scale()) == (None, 1.0)
    if not torch.cuda.is_available():
        assert not halfstep.GradScaler("cuda").is_enabled()


def test_the_scale_stays_within_its_bounds() -> None:
    run = Run(halfstep.GradScaler, OPTIMIZERS["sgd"], init_scale=8.0, growth_interval=1, cap=16.0)
    for number in range(6):
        run.iteration(number, bad=True)
    assert run.scales == [8.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    assert run.scaler.counts.skipped == {"gradient_overflow": 3, "gradient_not_finite": 3}
    for number in range(6):
        run.iteration(number)
    assert run.scales[7:] == [2.0, 4.0, 8.0, 16.0, 16.0, 16.0]
    # A scale below the floor was asked for, and is kept.
    assert halfstep.GradScaler("cpu", init_scale=0.5).floor == 0.5


@pytest.mark.wording
def test_states_that_do_not_fit_are_refused() -> None:
    ours = halfstep.GradScaler("cpu")
    before = ours.state_dict()
    for wrong in ({**before, "scale": float("nan")}, halfstep.GradScaler("cpu", precision="bf16").state_dict()):
        with pytest.raises(StateMismatch):
            ours.load_state_dict(wrong)
    with pytest.raises(StateMismatch, match="for fp16"):
        halfstep.GradScaler("cpu", precision="bf16").load_state_dict(torch.amp.GradScaler("cpu").state_dict())
    with pytest.raises(RuntimeError, match="state dict is empty"):
        ours.load_state_dict({})
    assert ours.state_dict() == before
    zero = {**torch.amp.GradScaler("cpu").state_dict(), "scale": 0.0}  # where torch's ends after 166 bad batches
    ours.load_state_dict(zero)
    assert ours.get_scale() == 1.0


# -- waiting for the device -------------------------------------------------------------------------------------------


class Reads(TorchDispatchMode):
    """Counts how often the host reads a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.many = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.many += func._overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal)
        return func(*args, **(kwargs or {}))


def reads_of(run: Run, monkeypatch: pytest.MonkeyPatch, *, bad: bool = False) -> int:
    """Return the host reads of one iteration's `step` and `update`."""
    lists: list[int] = []
    original = Tensor.tolist
    run.scaler.get_scale = lambda: 0.0
    with monkeypatch.context() as patched, Reads() as reads:
        patched.setattr(Tensor, "tolist", lambda self: lists.append(1) or original(self))
        run.iteration(50, bad=bad)
    # tolist() of n numbers reads the storage at once; what dispatch still sees is read one by one.
    return reads.many + len(lists)


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize(
    ("kind", "several", "clip", "torchs", "ours"),
    [
        ("sgd", False, False, 1, 1),
        ("sgd", False, True, 1, 1),
        ("sgd", True, False, 2, 2),
        ("sgd", True, True, 2, 1),  # unscaled first, so decided on together
        ("adamw_fused", False, False, 0, 1),  # the price of not calling a fused optimizer on a skip
    ],
)
def test_how_often_the_host_waits(
    kind: str,
    several: bool,
    clip: bool,
    torchs: int,
    ours: int,
    included: bool,
    bad: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for scaler, many in ((torch.amp.GradScaler, torchs), (halfstep.GradScaler, ours)):
        run = Run(scaler, OPTIMIZERS[kind], several=several, clip=clip)
        if included and scaler is halfstep.GradScaler:
            run.model.register_buffer("mean", torch.zeros(4))
            run.scaler.include(run.model, *(torch.optim.lr_scheduler.StepLR(o, 1) for o in run.optimizers))
        for number in range(3):
            run.iteration(number)
        if bad and included and scaler is halfstep.GradScaler:
            continue  # rolling back compares and copies: a skip may wait
        assert reads_of(run, monkeypatch, bad=bad) == many


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("leave_out", [False, True])
def test_gradients_that_the_loop_drops_are_free_before_the_next_backward_pass(bad: bool, leave_out: bool) -> None:
    run = Run(halfstep.GradScaler, OPTIMIZERS["adam"], clip=True)
    run.iteration(0)
    (optimizer,) = run.optimizers
    run.model.zero_grad()
    run.scaler.scale(run.model(torch.randn(4, 8)).sum() * (float("inf") if bad else 1.0)).backward()
    run.scaler.unscale_(optimizer)
    if not leave_out:
        run.scaler.step(optimizer)
    run.scaler.update()
    gradients = [weakref.ref(p.grad) for p in run.model.parameters()]
    run.model.zero_grad()
    gc.collect()
    assert [gradient() for gradient in gradients] == [None] * len(gradients)
    assert len(gradients) > 2
