"""Code that reads numbers is estimated: those of the data are followed, those of the model assumed and stated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from halfstep.errors import WrongUse
from halfstep.measure.case import adamw
from halfstep.measure.memory.estimate import estimate
from halfstep.measure.memory.values import EVEN, SELECTED
from tests.support.peaks import peak_of_update


def real_peak(make: Callable[[], Any], precision: str = "fp32") -> int:
    model, loss_fn, batch = make()
    return peak_of_update(model, loss_fn, batch, adamw(model), precision)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10))


def batch_of(labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return torch.randn(64, 32), torch.arange(64) % 10 if labels is None else labels


def labeled(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Drop what has no label, as losses on padded words do."""
    rows = batch[1] >= 0
    return F.cross_entropy(model(batch[0][rows]), batch[1][rows])


def test_numbers_of_the_batch_are_followed_and_nothing_is_assumed() -> None:
    labels = torch.arange(64) % 10
    labels[10:] = -1
    found, whole = (estimate(layers(), labeled, batch_of(given), precision="fp32") for given in (labels, None))
    assert not found.assumptions
    assert found.by_format["fp32"] < 0.5 * whole.by_format["fp32"]
    assert found.peak == pytest.approx(real_peak(lambda: (layers(), labeled, batch_of(labels))), rel=0.01)


def test_a_loss_that_logs_has_the_memory_of_the_same_loss_without() -> None:
    def plain(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def logs(model: nn.Module, batch: Any) -> Tensor:
        loss = plain(model, batch)
        return loss if loss.item() < 1e9 else loss * 2  # READS

    silent, found = (estimate(layers(), loss, batch_of(), precision="fp32") for loss in (plain, logs))
    assert found.peak == silent.peak
    assert silent.verified
    assert not found.verified
    [assumption] = found.assumptions
    assert "# READS" in assumption.place
    assert str(assumption) in found.notes
    assert found.as_dict()["assumptions"] == [{"place": assumption.place, "what": "the number is 1"}]


def test_numbers_in_a_printed_text_need_no_assumption() -> None:
    printed = []

    def logs(model: nn.Module, batch: Any) -> Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        printed.append(f"{loss:.3f} {loss} {batch[1].sum():d} {model(batch[0])}")
        return loss

    found = estimate(layers(), logs, batch_of(), precision="fp32")
    assert printed
    assert found.verified
    assert FakeTensor.__format__ is Tensor.__format__


@pytest.mark.full
@pytest.mark.parametrize("kind", ["Llama", "Mixtral"])
def test_models_of_transformers_have_the_masks_and_experts_of_a_real_run(kind: str) -> None:
    transformers = pytest.importorskip("transformers")

    def make() -> Any:
        torch.manual_seed(0)
        experts = {"num_local_experts": 4} if kind == "Mixtral" else {}
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=200, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, use_cache=False, **experts,
        )  # fmt: skip
        words = torch.randint(0, 200, (2, 256))
        model = getattr(transformers, f"{kind}ForCausalLM")(config).train()
        return model, lambda model, batch: model(**batch).loss, {"input_ids": words, "labels": words.clone()}

    assert estimate(*make(), precision="fp32").peak == pytest.approx(real_peak(make), rel=0.01)


def test_a_check_that_would_raise_is_assumed_to_pass() -> None:
    def checked(model: nn.Module, batch: Any) -> Tensor:
        scores = model(batch[0])
        if not torch.isfinite(scores).all():
            raise ValueError("not finite")
        if (scores > 100).any():
            raise ValueError("too large")
        return F.cross_entropy(scores, batch[1])

    found = estimate(layers(), checked, batch_of(), precision="fp32")
    assert {a.what for a in found.assumptions} == {"every number is finite", "the condition is false"}


def test_a_loop_that_waits_for_the_model_ends() -> None:
    def until(model: nn.Module, batch: Any) -> Tensor:
        scores = model(batch[0])
        while scores.abs().mean() > 0.01:
            scores = scores * 0.5
        return F.cross_entropy(scores, batch[1])

    assert estimate(layers(), until, batch_of(), precision="fp32").peak > 0


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.choose = nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.choose(x).softmax(-1).topk(2, -1)
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            assert rows.numel() == 2 * len(x) // 4 or not isinstance(x, torch._subclasses.FakeTensor)
            total = total.index_add(0, rows, expert(x[rows]) * weight[rows, places, None])
        return total


def test_experts_are_chosen_evenly() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return Experts(), lambda model, x: model(x).square().mean(), torch.randn(256, 32)

    found = estimate(*make(), precision="fp32")
    assert {a.what for a in found.assumptions} == {EVEN}
    assert found.peak == pytest.approx(real_peak(make), rel=0.05)


def test_a_mask_of_the_model_selects_everything() -> None:
    def positive(model: nn.Module, batch: Any) -> Tensor:
        scores = model(batch[0])
        return scores[scores > 0].sum()

    found = estimate(layers(), positive, batch_of(), precision="fp32")
    assert {a.what for a in found.assumptions} == {SELECTED}
    for device in ("a100-80gb", "mi300x"):
        assert estimate(layers(), positive, batch_of(), device=device).assumptions == found.assumptions


def test_the_user_s_tensors_and_random_numbers_stay_as_they_are() -> None:
    model, batch = layers(), batch_of()
    model.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def counts(model: nn.Module, batch: Any) -> Tensor:
        model.seen.add_(1)
        assert int(model.seen) > 0
        return labeled(model, batch) * torch.randint(1, 2, (1,)).item()

    before = torch.get_rng_state()
    assert not estimate(model, counts, batch, precision="fp32").assumptions
    assert model.seen == 0
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.wording
def test_numpy_is_refused_with_its_line() -> None:
    with pytest.raises(WrongUse, match="numpy") as told:
        estimate(layers(), lambda m, b: m(b[0]).sum() * m(b[0]).detach().numpy().max(), batch_of())
    assert __file__ in told.value.given


# -- kinds of models --------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.LSTM(48, 80, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(160, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.inside(x)[0])
        return out


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.cfloat) @ self.weight).abs()


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Transformer(32, 2, 1, 1, 64, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        out: Tensor = self.inside(x, x, tgt_mask=mask)
        return out


@pytest.mark.parametrize(
    ("kind", "shape", "precision"),
    [
        (Recurrent, (8, 30, 48), "fp32"),
        (Recurrent, (8, 30, 48), "bf16"),
        (Complex, (16, 64), "fp32"),
        (Masked, (4, 24, 32), "fp32"),
    ],
)
def test_the_estimate_is_that_of_a_real_run(kind: type[nn.Module], shape: tuple[int, ...], precision: str) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return kind(), lambda model, x: model(x).float().square().mean(), torch.randn(shape)

    assert estimate(*make(), precision=precision).peak == pytest.approx(real_peak(make, precision), rel=0.04)


def test_a_compiled_model_is_not_verified() -> None:
    model = layers()
    model.compile(backend="eager")
    found = estimate(model, labeled, batch_of(), precision="fp32")
    assert not found.verified
    assert any("without compilation" in note for note in found.notes)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_grouped_queries_count_no_scores(precision: str) -> None:
    class Attention(nn.Module):
        def __init__(self, heads: int) -> None:
            super().__init__()
            self.q, self.kv, self.heads = nn.Linear(64, 64), nn.Linear(64, 2 * heads * 16), heads

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x).unflatten(-1, (4, 16)).transpose(1, 2)
            k, v = self.kv(x).unflatten(-1, (2, self.heads, 16)).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads < 4)

    peaks = [
        estimate(
            Attention(heads), lambda m, x: m(x).float().mean(), torch.randn(1, 1024, 64), precision=precision,
            device="a100-80gb",
        ).peak
        for heads in (4, 1)
    ]  # fmt: skip
    assert peaks[1] < 1.1 * peaks[0]
