"""What really ran: counted on the first step, refused before anything is applied, and gone afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import Stepper, Window, island
from halfstep.errors import PrecisionNotObserved
from halfstep.observe.precision_check import PrecisionObserver
from halfstep.observe.recorder import Operation, Recorder
from halfstep.precision.names import list_precision_names
from halfstep.precision.precision import resolve_precision_name
from tests.support.digest import digest_of_run
from tests.support.models import buffered_model, plain_model


def mse(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def make(model: nn.Module, precision: str = "bf16", **options: Any) -> Stepper:
    return Stepper(
        model, torch.optim.SGD(model.parameters(), 0.1), precision=resolve_precision_name(precision), **options
    )


class SwitchesOff(nn.Module):
    """A layer that a person protects by hand, without saying so."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return self.linear(x.float())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_share_is_counted_forward_and_backward(precision: str) -> None:
    stepper = make(plain_model(), precision)
    stepper.step(mse, torch.randn(6, 8))
    assert stepper.observed is not None
    # Linear 8-16-4, batch 6: forward 2mnk each; backward the same for the weights, and for the second layer's input.
    forward = 2 * 6 * 8 * 16 + 2 * 6 * 16 * 4
    assert stepper.observed.flops == {precision: 2 * forward + 2 * 6 * 16 * 4}
    assert stepper.observed.share == 1.0
    assert str(stepper.observed).startswith(f"{precision}: 100 % of")


@pytest.mark.wording
def test_work_in_another_format_is_refused_before_anything_moves() -> None:
    model = nn.Sequential(nn.Linear(8, 8), SwitchesOff(8), nn.Linear(8, 4))
    stepper = make(model)
    before = digest_of_run(stepper)
    for _ in range(2):
        with pytest.raises(PrecisionNotObserved, match=r"bf16 was requested.*fp32 \d.*1\.linear \[fp32\]"):
            stepper.step(mse, torch.randn(6, 8))
    assert digest_of_run(stepper) == before
    assert stepper.counts.attempted == 0


def test_the_same_work_on_an_island_is_as_asked() -> None:
    model = nn.Sequential(nn.Linear(8, 8), SwitchesOff(8), nn.Linear(8, 4))
    island(model, "1")
    stepper = make(model)
    assert stepper.step(mse, torch.randn(6, 8)).applied
    assert stepper.observed is not None
    assert stepper.observed.share == 1.0
    assert stepper.observed.island_flops == 3 * 2 * 6 * 8 * 8
    assert "in islands" in str(stepper.observed)


class OnlyMethods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_context_form_is_watched_as_well(dropout: float) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=dropout, batch_first=True)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), layer)
    island(model, "1")
    shares = []
    for form in ("function", "context"):
        stepper = make(model)
        if form == "function":
            stepper.step(mse, Window([torch.randn(2, 32, 16), torch.randn(2, 32, 16)]))
        else:
            for last in (False, True):
                with stepper.forward(last=last):
                    loss = mse(model, torch.randn(2, 32, 16))
                stepper.backward(loss)
            assert stepper.apply().applied
        assert stepper.observed is not None
        shares.append((stepper.observed.share, stepper.observed.island_flops))
    assert shares[0] == shares[1]
    assert shares[0][0] == 1.0


def test_an_island_entered_by_another_method_is_set_aside_too() -> None:
    model = nn.ModuleDict({"vae": island(OnlyMethods()), "head": nn.Linear(8, 4)})
    stepper = make(model)
    stepper.step(lambda m, x: m["head"](m["vae"].encode(x)).float().square().mean(), torch.randn(6, 8))
    assert stepper.observed is not None
    assert set(stepper.observed.flops) == {"bf16"}
    assert stepper.observed.island_flops > 0


def test_a_little_work_elsewhere_is_tolerated() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4), SwitchesOff(4))
    stepper = make(model)
    stepper.step(mse, torch.randn(6, 64))
    assert stepper.observed is not None
    assert 0.9 < (stepper.observed.share or 0) < 1.0
    assert list(stepper.observed.strays) == ["2.linear [fp32]"]


@pytest.mark.wording
def test_fp32_asked_for_and_16_bits_run() -> None:
    class CastsDown(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x.bfloat16(), self.weight.bfloat16()).float()

    with pytest.raises(PrecisionNotObserved, match=r"fp32 was requested.*\[bf16\]"):
        make(CastsDown(8, 8), "fp32").step(mse, torch.randn(6, 8))


def test_attention_and_convolutions_are_counted() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.qkv = nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x.transpose(1, 2)).transpose(1, 2)
            q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
            return nn.functional.scaled_dot_product_attention(q, k, v)

    seen: list[str] = []
    model = Attends()
    with Recorder(model, lambda op: seen.append(str(op.function._overloadpacket))):
        model(torch.randn(2, 5, 8)).sum().backward()
    assert any("attention" in name for name in seen)
    stepper = make(model)
    stepper.step(mse, torch.randn(2, 5, 8))
    attention = 2 * (2 * 2 * 5 * 5 * 8)
    convolution, linear = 2 * 2 * 5 * 8 * 8 * 3, 2 * 2 * 5 * 8 * 24
    assert stepper.observed is not None
    total = sum(stepper.observed.flops.values())
    assert total > 2 * attention + 2 * convolution + 3 * linear
    assert stepper.observed.share == 1.0


def test_attention_that_torch_widens_by_itself_is_nobodys_fault() -> None:
    """With dropout the CPU has no fused kernel, and torch computes the attention of narrow inputs in fp32."""
    layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.1, batch_first=True)
    stepper = make(layer)
    assert stepper.step(mse, torch.randn(2, 40, 16)).applied
    assert stepper.observed is not None
    assert stepper.observed.share == 1.0


@pytest.mark.wording
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_numbers_that_no_precision_casts_are_not_held_against_it(precision: str) -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.mix = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64) / 5)
            self.register_buffer("table", torch.ones(8, 8, dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.fft.irfft(torch.fft.rfft(x.float()) @ self.mix, n=8)
            _ = torch.ones(64, 8, dtype=torch.int64) @ self.table
            return self.linear(x)

    stepper = make(Spectral(), precision)
    doubt = pytest.warns(UserWarning, match="aten.mm in the model itself .fp32; torch has nothing narrower")
    with doubt if precision == "bf16" else nullcontext():
        assert stepper.step(mse, torch.randn(6, 8)).applied
    assert stepper.observed is not None
    assert set(stepper.observed.flops) == {precision}
    assert stepper.observed.confidence < 1


def test_a_scripted_part_is_counted_as_its_parents() -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Linear(8, 8))
        model = nn.Sequential(nn.Linear(8, 8), scripted)
        stepper = make(model)
        assert stepper.step(mse, torch.randn(6, 8)).applied
    assert stepper.observed is not None
    assert stepper.observed.share == 1.0


@pytest.mark.wording
def test_an_island_that_is_never_entered_is_found() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
    island(layer, "self_attn.out_proj", "norm1")
    stepper = make(layer)
    with pytest.warns(UserWarning, match=r"nothing ran in the island 'self_attn\.out_proj'"):
        stepper.step(mse, torch.randn(2, 4, 16))
    assert [finding.id for finding in stepper.findings] == ["island.idle"]


def test_a_frozen_island_may_rest() -> None:
    model = nn.ModuleDict({"learns": nn.Linear(8, 8), "frozen": nn.Linear(8, 8).requires_grad_(False)})
    island(model, "frozen")
    stepper = Stepper(
        model, torch.optim.SGD(model["learns"].parameters(), 0.1), precision=resolve_precision_name("bf16")
    )
    assert stepper.step(lambda m, x: m["learns"](x).float().square().mean(), torch.randn(3, 8)).applied
    assert stepper.findings == []


@pytest.mark.wording
def test_each_optimizer_is_watched_once() -> None:
    model = nn.ModuleDict({"g": SwitchesOff(8), "d": nn.Linear(8, 4)})
    optimizers = {n: torch.optim.SGD(model[n].parameters(), 0.1) for n in ("g", "d")}
    stepper = Stepper(model, optimizers, precision=resolve_precision_name("bf16"))
    assert stepper.step(lambda m, x: m["d"](x).float().square().mean(), torch.randn(3, 8), only="d").applied
    with pytest.raises(PrecisionNotObserved, match=r"g\.linear"):
        stepper.step(lambda m, x: m["g"](x).float().square().mean(), torch.randn(3, 8), only="g")


def test_after_the_first_step_nothing_of_it_is_left() -> None:
    stepper = make(plain_model())
    assert isinstance(stepper._scope, PrecisionObserver)
    stepper.step(mse, torch.randn(6, 8))
    assert not isinstance(stepper._scope, PrecisionObserver)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in stepper.model.modules())
    assert torch._C._len_torch_dispatch_stack() == 0


def test_watching_changes_no_bit() -> None:
    def run(observe: bool) -> str:
        stepper = make(buffered_model(), observe=observe)
        torch.manual_seed(1)
        for _ in range(3):
            stepper.step(mse, Window([torch.randn(6, 8), torch.randn(6, 8)]))
        return digest_of_run(stepper)

    assert run(True) == run(False)


def test_an_error_while_watching_leaves_nothing_behind_and_it_is_watched_again() -> None:
    stepper = make(plain_model())
    with pytest.raises(ZeroDivisionError):
        stepper.step(lambda m, x: mse(m, x) / (1 // 0), torch.randn(6, 8))
    assert torch._C._len_torch_dispatch_stack() == 0
    assert stepper.observed is None
    stepper.step(mse, torch.randn(6, 8))
    assert stepper.observed is not None


def test_a_skipped_first_step_counts_as_watched() -> None:
    stepper = make(plain_model())
    assert not stepper.step(lambda m, x: mse(m, x) * float("nan"), torch.randn(6, 8)).applied
    assert stepper.observed is not None


def test_a_model_without_products_has_no_share() -> None:
    model = nn.BatchNorm1d(8)
    stepper = make(model)
    stepper.step(mse, torch.randn(6, 8))
    assert stepper.observed is not None
    assert stepper.observed.share is None
    assert "no matrix product" in str(stepper.observed)


def test_every_precision_names_a_format_that_can_be_observed() -> None:
    names = list_precision_names()
    assert len(names) >= 4
    for name in names:
        assert resolve_precision_name(name).computes.name == name


# -- the recorder --------------------------------------------------------------------------------------------------


def test_backward_is_attributed_to_the_module_whose_forward_made_it() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 4)))
    seen: list[tuple[str, str, bool]] = []

    def listen(operation: Operation) -> None:
        if "mm" in str(operation.function):
            seen.append((str(operation.function._overloadpacket), operation.module, operation.backward))

    with Recorder(model, listen):
        model(torch.randn(2, 8, requires_grad=True)).sum().backward()
    assert [module for _, module, backward in seen if not backward] == ["0", "1.1"]
    assert [module for _, module, backward in seen if backward] == ["1.1", "1.1", "0", "0"]


def test_activation_checkpointing_is_recorded_where_it_recomputes() -> None:
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    stepper = make(model)
    stepper.step(lambda m, x: checkpoint(m, x, use_reentrant=False).float().square().mean(), torch.randn(6, 8))
    assert stepper.observed is not None
    assert stepper.observed.share == 1.0


# -- compiled models -----------------------------------------------------------------------------------------------


class TwoLayers(nn.Module):
    """Of our own class: torch leaves its own containers uncompiled by `module.compile()`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


@pytest.fixture
def compiled() -> Iterator[dict[str, int]]:
    """Counts graphs that were compiled, and how often compiled code ran."""
    torch._dynamo.reset()
    yield {"graphs": 0, "runs": 0}
    torch._dynamo.reset()


@pytest.mark.parametrize("how", ["torch.compile", "module.compile", "inside the loss", "part of the model"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_compiled_model_compiles_once_and_only_once(compiled: dict[str, int], how: str, precision: str) -> None:
    def backend(graph: Any, _inputs: Any) -> Any:
        compiled["graphs"] += 1

        def run(*args: Any) -> Any:
            compiled["runs"] += 1
            return graph.forward(*args)

        return run

    model: Any = TwoLayers()
    loss: Any = mse
    if how == "torch.compile":
        model = torch.compile(model, backend=backend)
    elif how == "module.compile":
        model.compile(backend=backend)
    elif how == "part of the model":
        model.a = torch.compile(model.a, backend=backend)
    else:
        inner = torch.compile(lambda m, x: m(x).float(), backend=backend)
        loss = lambda m, x: inner(m, x).square().mean()  # noqa: E731
    stepper = make(model, precision)
    runs = []
    for _ in range(6):
        assert stepper.step(loss, torch.randn(6, 8)).applied
        runs.append(compiled["runs"])
    assert compiled["graphs"] == 1
    assert runs == [0, 1, 2, 3, 4, 5]
    assert stepper.observed is not None
    assert stepper.observed.share == 1.0


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
def test_inductor_compiles_once_with_observation_on(compiled: dict[str, int]) -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    model = torch.compile(plain_model())
    stepper = make(model)
    losses = [stepper.step(mse, torch.randn(6, 8)).loss for _ in range(4)]
    assert counters["stats"]["unique_graphs"] == 1
    assert len(set(losses)) == 4
    assert stepper.observed is not None
