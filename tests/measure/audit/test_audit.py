"""The audit: formats are those that ran, islands are judged by running without them, and nothing of ours is moved."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from halfstep import audit, island, survival
from halfstep.errors import UnknownName, WrongUse
from halfstep.measure.audit import audit as auditing
from halfstep.measure.audit.page import Audit
from halfstep.measure.audit.report import ModuleRow
from halfstep.measure.audit.watched import ObservedStep, run_watched_step
from halfstep.measure.subject import Subject

CASE = "tests.support.cases:linear"


def classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batch(features: int = 16) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    return torch.randn(8, features, generator=random), torch.arange(8) % 4


class Net(nn.Module):
    """Three layers; the middle one multiplies by `gain`, and divides again."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.large, self.last = nn.Linear(16, 32), Large(gain), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.large(self.first(x)))


class Large(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain, self.layer = gain, nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.gain) / self.gain


def row(found: Audit, module: str) -> ModuleRow:
    (only,) = [one for one in found.rows if one.module == module]
    return only


def ids(found: Audit) -> list[str]:
    return [one.finding.id for one in found.spotted]


@pytest.fixture(scope="module")
def with_island() -> Audit:
    model = Net()
    island(model, "large")
    return audit(model, classify, batch(), precision="bf16")


def test_formats_are_those_that_autocast_chose(with_island: Audit) -> None:
    first, large = row(with_island, "first"), row(with_island, "large.layer")
    assert first.stored == {"fp32": 2}
    assert first.computed == {"bf16": 1.0}
    # The batch, 8 × 16, which the gradient of the weight needs; the batch itself has no gradient to keep weights for.
    assert first.saved == {"bf16": 8 * 16 * 2}
    assert large.computed == {"fp32": 1.0}
    assert large.saved == {"fp32": 8 * 32 * 4}, "its input; the weight is there anyway"
    assert large.island == "large"
    assert first.island is None
    assert row(with_island, "(outside the model)").computed == {"fp32": 1.0}, "the loss is in fp32"


def test_work_is_counted_by_hand(with_island: Audit) -> None:
    """Each layer multiplies in forward, for its weight, and for its input where that has a gradient."""
    layers = {"first": 2 * 16 * 32, "large.layer": 3 * 32 * 32, "last": 3 * 32 * 4}
    flops = {name: 2 * 8 * count for name, count in layers.items()}
    for name, count in flops.items():
        assert sum(row(with_island, name).flops.values()) == count
        assert row(with_island, name).share == pytest.approx(count / sum(flops.values()))
    assert with_island.flops == {"fp32": flops["large.layer"], "bf16": flops["first"] + flops["last"]}
    assert with_island.share == 1.0
    assert with_island.island_share == pytest.approx(flops["large.layer"] / sum(flops.values()))
    assert with_island.verdict.startswith("100 % of the work outside islands in bf16, as requested; 1 finding")


def test_headroom_is_that_of_the_largest_number() -> None:
    x = batch()
    x[0][0, 0] = 1000.0
    found = row(audit(Net(), classify, x, precision="fp16"), "first")
    assert found.forward is not None
    assert found.backward is not None
    assert found.forward.headroom_bits == pytest.approx(torch.tensor(65504 / found.forward.largest).log2().item())
    assert 1000 <= found.forward.largest < 2000


def test_an_island_that_saves_nothing_and_one_that_does(with_island: Audit) -> None:
    (verdict,) = with_island.islands
    assert verdict.needed is False
    assert "bits" in verdict.why
    assert ids(with_island) == ["island-not-needed"]
    model = Net(1e6)
    island(model, "large")
    found = audit(model, classify, batch(), precision="fp16")
    (verdict,) = found.islands
    assert verdict.needed is True
    assert "without it the step overflows in large (aten.mul)" in verdict.why
    assert ids(found) == []


def test_an_island_that_keeps_positions_apart_is_needed_in_bf16() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4))
    island(model, "0")
    positions = torch.arange(900, 1028.0).reshape(8, 16)
    found = audit(model, classify, (positions, batch()[1]), precision="bf16")
    assert found.islands[0].needed is True
    assert "integers-rounded" in found.islands[0].why


@pytest.mark.wording
def test_an_overflow_is_found_with_the_island_that_cures_it() -> None:
    found = audit(Net(1e6), classify, batch(), precision="fp16")
    assert ids(found) == ["overflow"]
    assert "in large (aten.mul)" in found.spotted[0].finding.evidence
    assert 'island(model, "large")' in found.spotted[0].finding.fix
    assert found.loss_scale is None
    numbers = row(found, "large").forward
    assert numbers is not None
    assert numbers.headroom_bits is not None
    assert numbers.headroom_bits < 0
    assert ids(audit(Net(1e6), classify, batch(), precision="bf16")) == []


def test_an_overflow_that_lint_names_is_told_once() -> None:
    class Masked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).masked_fill(x[:, :4] > 0, -1e9)

    found = audit(nn.Sequential(Masked(16, 4)), classify, batch(), precision="fp16")
    assert ids(found) == ["mask-overflows"]


@pytest.mark.wording
def test_an_island_whose_result_does_not_fit_is_told_to_reach_further() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 4))
    model[1].weight.data.mul_(1e7)
    island(model, "1")
    found = audit(model, classify, batch(), precision="fp16")
    assert ids(found) == ["overflow"]
    assert "the island casts its result back" in found.spotted[0].finding.evidence
    assert found.spotted[0].finding.fix.startswith("extend the island")


@pytest.mark.wording
def test_numbers_near_the_end_are_told_before_they_overflow() -> None:
    x = batch()
    x[0][0, 0] = 50_000.0
    found = audit(nn.Linear(16, 4), classify, x, precision="fp16")
    assert "little-headroom" in ids(found)
    assert "50,000 in (the model itself) against 65,504: 0.4 bits" in found.spotted[-1].finding.evidence


@pytest.mark.wording
def test_work_in_another_format_is_told() -> None:
    class Stubborn(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(x.float())

    found = audit(
        nn.Sequential(nn.Linear(16, 16), Stubborn(16, 64), nn.Linear(64, 4)), classify, batch(), precision="bf16"
    )
    assert ids(found) == ["work-elsewhere"]
    assert "1 [fp32]" in found.spotted[0].finding.evidence
    assert found.verdict.startswith("only ")


def test_an_island_that_nothing_runs_in_is_told() -> None:
    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.layer.weight)

    model = Aside()
    island(model, "layer")
    found = audit(model, classify, batch(), precision="bf16")
    assert ids(found) == ["island-idle"]
    assert found.islands == ()


def test_a_loop_in_the_loss_is_a_finding_and_not_a_crash() -> None:
    def loop(model: nn.Module, batch: Any) -> Tensor:
        loss = classify(model, batch)
        loss.backward()
        return loss.detach()

    found = audit(Net(), loop, batch(), precision="bf16")
    assert ids(found) == ["loop-in-loss"]
    assert found.stopped is not None
    assert found.verdict.endswith("1 finding, an error")


@pytest.mark.wording
def test_a_loss_that_does_not_run_is_told_with_its_line() -> None:
    with pytest.raises(WrongUse, match=r"test_audit\.py"):
        audit(Net(), lambda model, batch: model(batch[0])[:, 99].sum(), batch(), precision="bf16")
    with pytest.raises(WrongUse, match="as the loss"):
        audit(Net(), lambda model, batch: model(batch[0]), batch(), precision="bf16")


def test_nothing_of_ours_is_moved() -> None:
    model, x = nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Dropout()), batch()
    island(model, "1")
    before, given = copy.deepcopy(model.state_dict()), x[0].clone()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    audit(model, classify, x, precision="fp16")
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(x[0], given)
    assert not torch.is_autocast_enabled("cpu")


def test_in_fp32_nothing_is_rounded_and_no_island_is_judged() -> None:
    model = Net()
    island(model, "large")
    found = audit(model, classify, batch(), precision="fp32")
    assert found.flops.keys() == {"fp32"}
    assert found.islands == ()
    assert found.spotted == ()
    assert all(one.forward is None for one in found.rows)
    json.dumps(found.as_dict(), allow_nan=False)


def test_by_cudas_rules_without_a_gpu() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 4))
    island(model, "2")
    found = audit(model, classify, batch(), precision="fp16", device="a100-80gb")
    assert not found.run
    assert row(found, "0").computed == {"fp16": 1.0}
    assert row(found, "1").computed == {"fp32": 1.0}, "CUDA's autocast normalizes in fp32"
    assert row(found, "2").island == "2"
    assert row(found, "0").forward is None
    assert found.islands == ()
    assert found.notes[0].startswith("by CUDA's rules, not run")
    assert model[0].weight.device.type == "cpu"


def test_cudas_rules_refuse_a_loss() -> None:
    def bce(model: nn.Module, batch: Any) -> Tensor:
        return F.binary_cross_entropy(model(batch[0]).sigmoid(), torch.ones(8, 4))

    found = audit(nn.Linear(16, 4), bce, batch(), precision="bf16", device="t4")
    assert ids(found) == ["loss-refused"]
    assert found.stopped is not None
    assert "unsafe to autocast" in found.stopped
    there = audit(nn.Linear(16, 4), bce, batch(), precision="bf16")
    assert ids(there) == ["loss-refused"]
    assert there.stopped is None, "the CPU runs it"


def test_group_norm_with_wide_weights_is_followed_here_and_by_cudas_rules() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.GroupNorm(2, 8), nn.Linear(8, 4))
    assert survival(model, classify, batch(), format_name="bf16").survives
    assert audit(model, classify, batch(), precision="bf16").spotted == ()
    assert audit(model, classify, batch(), precision="bf16", device="a100-80gb").spotted == ()


@pytest.mark.wording
def test_wrong_words() -> None:
    with pytest.raises(WrongUse, match="without loss_fn"):
        audit(Net())
    with pytest.raises(UnknownName):
        audit(Net(), classify, batch(), device="rtx9999")
    with pytest.raises(WrongUse, match="CUDA's rules could not be followed"):
        audit(nn.LSTM(16, 4), lambda model, batch: model(batch[0])[0].sum(), batch(), precision="bf16", device="t4")


@pytest.mark.wording
def test_code_that_reads_a_number_cannot_be_described() -> None:
    def reads(model: nn.Module, batch: Any) -> Tensor:
        return classify(model, batch) * (1 if batch[0].sum().item() > 0 else 2)

    with pytest.raises(WrongUse, match="of another machine is traced without any"):
        audit(Net(), reads, batch(), precision="bf16", device="t4")


def test_ctrl_c_leaves_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def interrupted(*given: Any) -> ObservedStep:
        asked.append(given)
        if len(asked) == stops_at:
            raise KeyboardInterrupt
        return run_watched_step(*given)

    monkeypatch.setattr(auditing, "run_watched_step", interrupted)
    model = Net()
    island(model, "large")
    stops_at = 1
    nothing = audit(model, classify, batch(), precision="bf16")
    assert nothing.interrupted
    assert nothing.rows == ()
    assert nothing.verdict == "interrupted before a step was seen"
    stops_at = len(asked) + 3
    some = audit(model, classify, batch(), precision="bf16")
    assert some.interrupted
    assert some.islands == ()
    assert row(some, "first").computed == {"bf16": 1.0}
    json.dumps(some.as_dict(), allow_nan=False)


@pytest.mark.wording
def test_numbers_that_are_not_finite() -> None:
    x = batch()
    x[0][:] = torch.nan
    found = audit(Net(), classify, x, precision="fp16")
    assert found.loss is None
    assert ids(found) == ["not-finite"]
    assert "not finite in fp32 either" in found.spotted[0].finding.evidence
    json.dumps(found.as_dict(), allow_nan=False)


def test_a_batch_that_is_not_finite_is_no_overflow_of_fp16() -> None:
    x = batch()
    x[0][0, 0] = torch.inf
    # The other rows are finite, and their gradients too large at the first loss scale.
    found = audit(Net(), lambda m, b: 1e4 * m(b[0]).float().square().mean(), x, precision="fp16")
    assert ids(found) == ["not-finite"]


class Attends(nn.Module):
    """Attention whose mask is a number that fp16 does not have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.heads(x).chunk(3, -1)
        scores = torch.where(keep[:, None], q @ k.transpose(1, 2) / 4, -1e9)
        return self.out(scores.softmax(-1) @ v)


@pytest.mark.parametrize("left", [0, 3])
def test_a_mask_that_does_not_fit_is_told_as_one_and_as_nothing_else(left: int) -> None:
    keep = torch.ones(2, 6, dtype=torch.bool)
    keep[1, left:] = False
    given = torch.randn(2, 6, 16), keep
    found = audit(Attends(), lambda m, b: m(*b).float().square().mean(), given, precision="fp16")
    assert ids(found) == ["mask-overflows"]
    assert (found.loss is None) is (left == 0), "a row that is masked whole"


def test_a_number_that_torch_refuses_is_a_finding() -> None:
    def refused(model: nn.Module, given: Any) -> Tensor:
        return classify(model, given) + torch.full((2,), -1e9, dtype=torch.float16).sum()

    found = audit(Net(), refused, batch(), precision="fp16")
    assert ids(found) == ["mask-overflows"]
    assert "overflow" in str(found.stopped)
    assert found.verdict.endswith("1 finding, an error")


def test_a_gradient_of_a_few_rows() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 16, sparse=True), nn.Linear(16, 4))
    found = audit(model, classify, (torch.arange(8), torch.arange(8) % 4), precision="bf16")
    assert ids(found) == []
    assert found.loss is not None


def test_all_work_in_islands_is_said_so() -> None:
    model = Net()
    island(model, "first", "large", "last")
    assert audit(model, classify, batch(), precision="bf16").verdict.startswith("all work is in islands; ")


def test_a_case_with_a_loader_is_audited_in_what_a_run_would_take() -> None:
    loader = DataLoader(TensorDataset(*batch()), batch_size=4)
    for data in (next(iter(loader)), loader):
        assert audit(Net(), classify, data, device="a100-80gb").precision == "bf16"


def test_a_subject_is_opened_and_its_own_precision_is_taken() -> None:
    found = audit(Subject(CASE), precision="bf16")
    assert found.subject == CASE
    assert [one.module for one in found.rows] == ["0", "1", "2", "(outside the model)"]
