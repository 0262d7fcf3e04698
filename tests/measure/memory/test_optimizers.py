"""Ledgers with a person's own optimizer: every kind that torch has, its groups, its defaults on a GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.errors import HalfstepError, WrongUse
from halfstep.measure.memory.estimate import estimate
from tests.support.peaks import peak_of_update

KINDS: dict[str, Any] = {
    name: kind
    for name in (
        "Adafactor Muon Adadelta Adagrad Adam Adamax AdamW ASGD NAdam RAdam RMSprop Rprop SGD".split()  # noqa: SIM905
    )
    if (kind := getattr(torch.optim, name, None)) is not None
}


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64, bias=False), nn.Tanh(), nn.Linear(64, 8, bias=False))


def squared(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch)
    return out.pow(2).mean()


def real_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes that a real update leaves."""
    squared(model, torch.randn(4, 32)).backward()
    optimizer.step()
    kept = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in kept if isinstance(value, Tensor))


@pytest.mark.parametrize("name", KINDS)
def test_every_optimizer_of_torch_has_the_state_of_a_real_update(name: str) -> None:
    net = model()
    optimizer = KINDS[name](net.parameters(), lr=0.01)
    before = copy.deepcopy(optimizer.state_dict())  # Adagrad has its state from the beginning
    made = estimate(net, squared, torch.randn(4, 32), precision="fp32", optimizer=lambda m: KINDS[name](m.parameters()))
    given = estimate(net, squared, torch.randn(4, 32), precision="fp32", optimizer=optimizer)
    assert str(optimizer.state_dict()) == str(before)
    assert given.whole["optimizer"] == made.whole["optimizer"] == real_state(net, optimizer)


@pytest.mark.parametrize("t0", [1e6, 0.0], ids=["copies the weights", "averages them"])
def test_asgd_takes_what_a_real_update_takes_before_and_after_it_averages(t0: float) -> None:
    net = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256))

    def asgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.ASGD(model.parameters(), t0=t0)

    found = estimate(net, squared, torch.randn(4, 256), precision="fp32", optimizer=asgd)
    optimizer = asgd(net)
    if not t0:  # its first two steps are on the way there
        for _ in range(2):
            squared(net, torch.randn(4, 256)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert found.verified
    assert found.peak == pytest.approx(peak_of_update(net, squared, torch.randn(4, 256), optimizer, "fp32"), rel=0.01)


def test_groups_keep_their_options_and_the_given_optimizer_is_not_touched() -> None:
    net = model()
    groups = [{"params": net[0].parameters(), "momentum": 0.9}, {"params": net[2].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts a step of its own into the optimizer
    weights = copy.deepcopy(net.state_dict())
    found = estimate(net, squared, torch.randn(4, 32), precision="fp32", optimizer=optimizer)
    assert found.whole["optimizer"] == 64 * 32 * 4
    assert all(torch.equal(tensor, weights[name]) for name, tensor in net.state_dict().items())
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"][0] is net[0].weight


def test_state_that_is_there_already_is_not_carried_over() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    before = real_state(net, optimizer)
    found = estimate(net, squared, torch.randn(4, 32), precision="fp32", optimizer=optimizer)
    assert found.whole["optimizer"] == before
    assert len(optimizer.state) == 2


@pytest.mark.wording
def test_an_optimizer_that_runs_the_model_itself_is_refused() -> None:
    net = model()
    with pytest.raises(HalfstepError, match="LBFGS") as refused:
        estimate(net, squared, torch.randn(4, 32), optimizer=torch.optim.LBFGS(net.parameters()))
    assert refused.value.do


@pytest.mark.wording
@pytest.mark.parametrize(
    ("change", "given", "do"),
    [
        ({"subject": nn.Linear(16, 4)}, "test_optimizers.py", "loss_fn(model, batch).backward()"),
        (
            {"subject": nn.Sequential(nn.Linear(32, 4), nn.BatchNorm1d(4)), "batch_size": 1},
            "batch (4, 32) were taken as samples",
            "batch_size=2 runs",
        ),
        (
            {"optimizer": lambda m: torch.optim.AdamW(m.parameters(), fused=True, foreach=True)},
            "`fused` and `foreach` cannot be `True` together",
            "optimizer.step()",
        ),
    ],
    ids=["shape", "one sample", "optimizer"],
)
def test_an_error_of_torch_is_told_as_ours_with_what_to_type_in_python(
    change: dict[str, Any], given: str, do: str, capfd: pytest.CaptureFixture[str]
) -> None:
    case = {"subject": model(), "loss_fn": squared, "batch": torch.randn(4, 32), **change}
    for device in (None, "a100-40gb"):
        with pytest.raises(WrongUse) as refused:
            estimate(**case, device=device)
        assert given in refused.value.given
        assert do in refused.value.do
        assert "--" not in refused.value.do
        assert refused.value.__cause__ is not None
    assert not capfd.readouterr().err


def test_gradients_of_a_sparse_embedding_are_estimated() -> None:
    net = nn.Embedding(1000, 8, sparse=True)

    def sparse(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters())

    found = estimate(net, squared, torch.arange(4), precision="fp32", optimizer=sparse)
    assert found.at_peak["weights"] == 1000 * 8 * 4
    assert found.at_peak["gradients"] == 0


def test_on_a_gpu_defaults_update_all_parameters_together() -> None:
    net = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(8)])
    batch = torch.randn(4, 256)

    def peak(**options: Any) -> int:
        optimizer = torch.optim.AdamW(net.parameters(), **options)
        return estimate(net, squared, batch, precision="fp32", optimizer=optimizer, device="a100-40gb").peak

    assert peak() == peak(foreach=True)
    assert peak() > peak(foreach=False) + 4 * 256 * 256 * 4  # temporaries of all weights, not of one
    assert peak(fused=True) <= peak(foreach=False)


def test_a_ledger_with_an_operation_that_nobody_has_held_says_so() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.past = nn.LSTM(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.past(x)[0]
            return out

    plain = estimate(model(), squared, torch.randn(4, 32), precision="fp32")
    assert plain.verified
    for net, named in ((Recurrent(), "lstm in past"), (nn.Sequential(Sorted()), "sort in 0")):
        found = estimate(net, squared, torch.randn(4, 3, 32), precision="fp32")
        assert not found.verified
        assert any(named in note for note in found.notes)


class Sorted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).sort().values
