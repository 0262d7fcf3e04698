"""Ledgers: exact where bytes can be counted by hand, near where only the allocator knows, and honest about the rest."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import Counted
from halfstep.errors import HalfstepError
from halfstep.measure.case import Case, build_case
from halfstep.measure.memory.estimate import estimate, estimate_ledger
from halfstep.measure.memory.ledger import PARTS, Ledger
from halfstep.measure.setting import StepSetting
from halfstep.measure.subject import Subject
from tests.support.cpu import emulates_bf16
from tests.support.peaks import peak_of_update

Parts = tuple[nn.Module, Callable[[nn.Module, Any], Any], Any]
W = 64 * 32 * 4  # bytes of a weight of 64 × 32
"""Two layers, 32-64-32, without biases."""
N = 8


def summed(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch)
    return out.sum()


def two_layers() -> Parts:
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Tanh(), nn.Linear(64, 32, bias=False))
    return model, summed, torch.randn(N, 32)


def ledger(make: Callable[[], Parts], precision: str = "fp32", **setting: Any) -> Ledger:
    return estimate_ledger(lambda: build_case(*make()), StepSetting(precision, **setting))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "tf32"])
@pytest.mark.parametrize("case", ["linear", "convolutions"])
def test_parts_add_up_to_the_peak_and_none_exceeds_its_own_largest(case: str, precision: str) -> None:
    found = estimate_ledger(Subject(f"tests.support.cases:{case}").open, StepSetting(precision))
    assert tuple(found.at_peak) == PARTS == tuple(found.whole)
    assert found.peak == sum(found.at_peak.values()) == found.as_dict()["peak"]
    assert all(0 <= found.at_peak[part] <= found.whole[part] for part in PARTS)
    assert max(found.whole.values()) <= found.peak <= sum(found.whole.values())
    assert found.verified == (precision in ("fp32", "bf16"))
    json.dumps(found.as_dict(), allow_nan=False)


def test_two_layers_in_fp32_are_counted_exactly() -> None:
    found = ledger(two_layers)
    hidden, out = N * 64 * 4, N * 32 * 4
    # Tanh's result is kept, by Tanh and by the second layer; the loss is a number; the sum keeps nothing.
    assert found.by_format == {"fp32": hidden + 4}
    assert found.by_module == {"1": hidden, "(outside the model)": 4}
    assert found.at_peak["weights"] == found.whole["gradients"] == 2 * W
    assert found.at_peak["batch"] == out
    assert found.at_peak["optimizer"] == 2 * (2 * W + 4)  # two moments and a counter of each weight
    # Highest while the first weight's gradient is made: all gradients, and tanh's gradient, which is its factor.
    assert found.moment == "the backward of 0"
    assert found.at_peak["gradients"] == 2 * W
    assert found.at_peak["activations"] == 4
    assert found.at_peak["temporary"] == hidden + 4  # and the gradient of the loss itself, which is 1
    assert found.peak == 2 * W * 4 + 2 * 4 + out + hidden + 8


def test_two_layers_in_bf16_keep_half_of_the_activations_and_copies_of_the_weights() -> None:
    found = ledger(two_layers, "bf16")
    # The batch in bf16 for the first layer, tanh's result; and the loss, in fp32.
    assert found.by_format == {"bf16": N * 32 * 2 + N * 64 * 2, "fp32": 4}
    assert found.whole["cast copies"] == W  # of two weights, half as large
    assert found.whole["weights"] == found.whole["gradients"] == 2 * W
    assert "is still in fp32" in found.notes[0]
    assert "optimizer" in found.notes[0]


def cnn() -> Parts:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 48, 3, stride=2, padding=1),
        nn.BatchNorm2d(48), nn.ReLU(), nn.Conv2d(48, 48, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10),
    )  # fmt: skip
    return model, classified, (torch.randn(8, 3, 64, 64), torch.randint(0, 10, (8,)))


def mlp() -> Parts:
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 10))
    return model, classified, (torch.randn(512, 256), torch.randint(0, 10, (512,)))


def classified(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def real_peak(make: Callable[[], Parts], precision: str) -> int:
    """Of a second update, by a loop that knows nothing of ledgers."""
    model, loss_fn, batch = make()
    return peak_of_update(model, loss_fn, batch, torch.optim.AdamW(model.parameters(), fused=True), precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("make", [cnn, mlp])
def test_the_allocator_of_a_real_run_agrees(make: Callable[[], Parts], precision: str) -> None:
    if precision == "bf16" and emulates_bf16():
        pytest.skip("this CPU emulates bf16, with workspaces of its own")
    assert ledger(make, precision).peak == pytest.approx(real_peak(make, precision), rel=0.03)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 64)
        self.head = nn.Linear(64, 1000, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.words(tokens))
        return out


def test_tied_weights_count_once() -> None:
    model = Tied()
    tokens = torch.randint(0, 1000, (4,))
    for found in (ledger(lambda: (Tied(), summed, tokens)), estimate(model, summed, tokens, precision="fp32")):
        assert found.at_peak["weights"] == 1000 * 64 * 4
        assert found.whole["gradients"] == 1000 * 64 * 4
        assert found.whole["optimizer"] == 2 * 1000 * 64 * 4 + 4


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32)) for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_recomputing_keeps_only_what_enters_each_block() -> None:
    def make() -> Parts:
        return Blocks(), summed, torch.randn(256, 32)

    kept, again = ledger(make), ledger(make, recompute=True)
    entering = 256 * 32 * 4
    # The first one's is the batch itself, and the last sum is not needed for the sum's gradient.
    assert sum(again.by_format.values()) < 7 * entering + 20_000  # and a state of the generator for each
    assert sum(kept.by_format.values()) > 6 * 2 * 256 * 128 * 4
    assert again.peak < kept.peak
    one_block = 2 * 256 * 128 * 4
    assert again.whole["activations"] > 5 * entering + one_block  # one block's are there again in its backward


def test_gradients_are_there_during_later_microbatches_and_all_batches_of_the_window() -> None:
    one, three = ledger(two_layers), ledger(two_layers, microbatches=3)
    assert three.at_peak["gradients"] == 2 * W
    assert three.at_peak["batch"] == 3 * one.at_peak["batch"]
    assert three.peak > one.peak + 2 * one.at_peak["batch"]
    assert three.samples == one.samples == N


def test_frozen_parameters_have_neither_gradients_nor_state() -> None:
    def make() -> Parts:
        model, loss_fn, batch = two_layers()
        model[0].requires_grad_(False)  # type: ignore[index]
        return model, loss_fn, batch

    found = ledger(make)
    assert found.whole["weights"] == 2 * W
    assert found.whole["gradients"] == W
    assert found.whole["optimizer"] == 2 * W + 4


def test_an_average_is_a_copy_and_buffers_are_kept_twice() -> None:
    plain = estimate_ledger(Subject("tests.support.cases:convolutions").open, StepSetting())
    averaged = estimate_ledger(
        lambda: replace(Subject("tests.support.cases:convolutions").open(), average=True), StepSetting()
    )
    statistics = 2 * 16 * 4 + 8
    assert plain.at_peak["buffers"] == 2 * statistics
    assert averaged.at_peak["average"] == plain.at_peak["weights"] + statistics
    assert averaged.peak - plain.peak == averaged.at_peak["average"]


def test_batches_of_any_size_without_their_memory() -> None:
    small, huge = ledger(two_layers, batch=1), ledger(two_layers, batch=10**9)
    assert small.samples == 1
    assert huge.samples == 10**9
    assert huge.at_peak["batch"] == 10**9 * 32 * 4
    assert huge.peak > 10**9 * 64 * 4
    assert estimate(*two_layers(), batch_size=5).samples == 5


@pytest.mark.wording
@pytest.mark.parametrize("wrong", [{"microbatches": 0}, {"batch_size": 0}])
def test_nothing_cannot_be_estimated(wrong: dict[str, int]) -> None:
    with pytest.raises(HalfstepError, match="=0"):
        estimate(*two_layers(), **wrong)


def test_a_persons_optimizer_counts_as_it_is() -> None:
    model, loss_fn, batch = two_layers()
    sizes = {
        "sgd": estimate(model, loss_fn, batch, optimizer=torch.optim.SGD(model.parameters(), 0.1)),
        "momentum": estimate(model, loss_fn, batch, optimizer=torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)),
        "adam": estimate(model, loss_fn, batch, optimizer=torch.optim.Adam(model.parameters(), foreach=True)),
        "half": estimate(model, loss_fn, batch, optimizer=torch.optim.Adam(model[2].parameters())),  # type: ignore[index]
        "made": estimate(model, loss_fn, batch, optimizer=lambda m: torch.optim.Adam(m.parameters())),
    }
    found = {name: ledger.whole["optimizer"] for name, ledger in sizes.items()}
    assert found == {"sgd": 0, "momentum": 2 * W, "adam": 4 * W + 8, "half": 2 * W + 4, "made": 4 * W + 8}


def test_the_persons_model_is_not_touched() -> None:
    model, loss_fn, batch = cnn()
    loss_fn(model, batch).backward()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pointers = [p.data_ptr() for p in model.parameters()]
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    random = torch.get_rng_state()
    estimate(model, loss_fn, batch, precision="fp16", recompute=True, channels_last=True, batch_size=3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True) if p.grad is not None)
    assert torch.equal(random, torch.get_rng_state())
    assert not any("forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.isfinite(loss_fn(model, batch))


@pytest.mark.wording
@pytest.mark.parametrize("loss", [lambda m, b: m(b), lambda m, b: m(b).sum().detach(), lambda m, b: 3.0])
def test_what_is_no_loss_is_refused(loss: Any) -> None:
    with pytest.raises(HalfstepError, match="loss"):
        estimate(two_layers()[0], loss, torch.randn(N, 32))


def test_sums_with_counts_and_dicts_are_losses() -> None:
    model, _, batch = two_layers()
    plain = estimate(model, summed, batch).peak
    assert abs(estimate(model, lambda m, b: Counted(m(b).sum(), b.sum()), batch).peak - plain) <= 16
    assert abs(estimate(model, lambda m, b: {"loss": m(b).sum()}, batch).peak - plain) <= 16


def test_an_interrupted_estimate_leaves_nothing_switched() -> None:
    def interrupted(model: nn.Module, batch: Tensor) -> Tensor:
        model(batch)
        raise KeyboardInterrupt

    model, _, batch = two_layers()
    with pytest.raises(KeyboardInterrupt):
        estimate(model, interrupted, batch)
    assert type(torch.ones(1) + 1) is Tensor
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.wording
def test_a_precision_that_is_not_native_is_estimated_and_marked() -> None:
    found = ledger(two_layers, "tf32")
    assert found.peak == ledger(two_layers).peak
    assert any("not native" in note for note in found.notes)
    with pytest.raises(HalfstepError, match="bf17"):
        ledger(two_layers, "bf17")


def large_case() -> Case:
    # Few and wide: the time goes by layers, and the parameters by their width.
    layers = [nn.TransformerEncoderLayer(4096, 16, 16384, batch_first=True, norm_first=True) for _ in range(5)]
    model = nn.Sequential(nn.Embedding(32000, 4096), *layers, nn.Linear(4096, 32000, bias=False))

    def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return build_case(model, loss_fn, torch.randint(0, 32000, (8, 1025)))


@pytest.mark.slow
def test_a_billion_parameters_take_seconds_and_no_memory() -> None:
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    found = estimate_ledger(large_case, StepSetting("bf16"))
    assert time.process_time() - begin < 30  # of this process: other work on the machine does not count
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20 < 1  # GiB
    assert found.at_peak["weights"] > 4 * 10**9
    assert found.whole["optimizer"] > 2 * found.whole["weights"]
    assert found.peak > 16 * 10**9


def test_islands_keep_their_activations_wide() -> None:
    from halfstep import island

    def make(islands: bool) -> Parts:
        model, loss_fn, batch = mlp()
        return (island(model, "1") if islands else model), loss_fn, batch

    plain, wide = ledger(partial(make, False), "bf16"), ledger(partial(make, True), "bf16")
    assert wide.by_format["fp32"] - plain.by_format["fp32"] >= 512 * 1024 * 4
