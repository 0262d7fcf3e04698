"""Work that no rule counts: it lowers the confidence, and never makes the verdict surer than what is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import Stepper, island
from halfstep.errors import PrecisionNotObserved
from halfstep.observe.flops import (
    Observation,
    count_flops,
    estimate_unknown_flops,
    is_uncounted_operation,
    name_operation_format,
)
from halfstep.observe.recorder import Operation, Recorder
from halfstep.precision.precision import resolve_precision_name


def mse(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def make(model: nn.Module, precision: str = "bf16", **options: Any) -> Stepper:
    trained = [p for p in model.parameters() if p.requires_grad]
    return Stepper(model, torch.optim.SGD(trained, 0.01), precision=resolve_precision_name(precision), **options)


def recorded(model: nn.Module, run: Any) -> list[Operation]:
    seen: list[Operation] = []
    with Recorder(model, seen.append):
        run()
    return seen


@torch.library.custom_op("halfstep_test::product", mutates_args=())
def product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def _backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    a, b = context.saved_tensors
    return product(gradient, b.t().contiguous()), product(a.t().contiguous(), gradient)


product.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class Custom(nn.Module):
    """A product by a kernel of its own in `dtype`, beside a small layer in fp32 and one that autocast casts."""

    def __init__(self, dtype: torch.dtype, *, router: int = 4, rest: int = 4) -> None:
        super().__init__()
        self.dtype = dtype
        self.router, self.rest = nn.Linear(64, router), nn.Linear(64, rest)
        self.weight = nn.Parameter(torch.randn(64, 512) / 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            gate = self.router(x).softmax(-1)[:, :1]
        return product(x.to(self.dtype), self.weight.to(self.dtype)).float() * gate + self.rest(x)[:, :1].float()


# -- verdicts ------------------------------------------------------------------------------------------------------


@pytest.mark.wording
def test_a_wide_router_beside_experts_of_unknown_work_is_a_warning() -> None:
    stepper = make(Custom(torch.bfloat16))
    with pytest.warns(UserWarning, match=r"unknown: no rule counts the work of halfstep_test\.product"):
        assert stepper.step(mse, torch.randn(32, 64)).applied
    assert [finding.id for finding in stepper.findings] == ["precision.unknown"]
    assert stepper.observed is not None
    assert (stepper.observed.share or 0) < 0.9
    assert stepper.observed.confidence < 0.1
    assert "of the work known" in str(stepper.observed)


@pytest.mark.wording
def test_known_work_in_the_wrong_format_is_refused_however_much_is_unknown_in_small_things() -> None:
    model = Custom(torch.bfloat16, router=65536)
    with pytest.raises(PrecisionNotObserved, match=r"router \[fp32\]"):
        make(model).step(mse, torch.randn(32, 64))


def test_unknown_work_in_the_asked_format_beside_known_work_in_it_is_no_finding() -> None:
    stepper = make(Custom(torch.bfloat16, router=1, rest=256))
    assert stepper.step(mse, torch.randn(32, 64)).applied
    assert stepper.findings == []
    assert stepper.observed is not None
    assert stepper.observed.unknown
    assert stepper.observed.confidence < 1


@pytest.mark.wording
def test_unknown_work_in_another_format_is_a_warning_though_all_that_is_known_is_right() -> None:
    model = Custom(torch.float32, router=1, rest=64)
    stepper = make(model)
    with pytest.warns(UserWarning, match=r"halfstep_test\.product in the model itself \[fp32\]"):
        assert stepper.step(mse, torch.randn(32, 64)).applied


def test_unknown_work_in_an_island_is_nobodys_business() -> None:
    stepper = make(nn.Sequential(nn.Linear(64, 64), Custom(torch.float32)))
    island(stepper.model, "1")
    assert stepper.step(mse, torch.randn(32, 64)).applied
    assert stepper.findings == []
    assert stepper.observed is not None
    assert not stepper.observed.unknown


def test_confidence_and_verdict_at_the_ends() -> None:
    nothing = Observation("bf16", {}, 0, {})
    assert (nothing.share, nothing.confidence, nothing.as_asked, nothing.in_doubt) == (None, 1.0, True, False)
    unseen = Observation("bf16", {}, 0, {}, unknown={"x [fp32]": 10})
    assert (unseen.confidence, unseen.as_asked, unseen.in_doubt) == (0.0, True, True)
    right = Observation("bf16", {}, 0, {}, unknown={"x [bf16]": 10}, unknown_as_expected=10)
    assert (right.as_asked, right.in_doubt) == (True, False)
    wrong = Observation("bf16", {"fp32": 10**30}, 0, {"a": 10**30}, unknown={"x [bf16]": 10}, unknown_as_expected=10)
    assert (wrong.as_asked, wrong.in_doubt) == (False, False)


# -- recurrent layers ----------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], wide: bool) -> None:
        super().__init__()
        self.wide, self.layers, self.head = wide, kind(8, 16, 2, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not self.wide):
            hidden, _ = self.layers(x)
        return self.head(hidden[:, -1])


@pytest.mark.wording
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_in_fp32_is_seen(kind: type[nn.Module]) -> None:
    with pytest.raises(PrecisionNotObserved, match=r"layers \[fp32\]"):
        make(Recurrent(kind, wide=True)).step(mse, torch.randn(3, 5, 8))


def test_a_recurrent_layer_under_autocast_is_as_asked() -> None:
    stepper = make(Recurrent(nn.LSTM, wide=False))
    assert stepper.step(mse, torch.randn(3, 5, 8)).applied
    assert stepper.observed is not None
    assert stepper.observed.share == 1.0
    assert stepper.observed.confidence == 1.0


@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_work_of_an_lstm_is_counted_exactly(bidirectional: bool) -> None:
    model = nn.LSTM(8, 16, bidirectional=bidirectional)
    seen = recorded(model, lambda: model(torch.randn(5, 3, 8))[0].sum().backward())
    forward = sum(count_flops(op) for op in seen if not op.backward)
    directions = 2 if bidirectional else 1
    assert forward == directions * 2 * 5 * 3 * (4 * 16 * 8 + 4 * 16 * 16)
    assert sum(count_flops(op) for op in seen if op.backward) == 2 * forward


def test_the_kernel_of_a_gpu_is_counted_by_its_matrices() -> None:
    weights = [torch.empty(64, 8), torch.empty(64, 16), torch.empty(64), torch.empty(64)]
    function = torch.ops.aten._cudnn_rnn.default
    operation = Operation(function, (torch.empty(5, 3, 8), weights), {}, None, "", False, False)
    assert count_flops(operation) == 2 * 5 * 3 * (64 * 8 + 64 * 16)
    assert name_operation_format(operation) == "fp32"


# -- sparse and fp8 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_sparse_products_count_what_is_stored(layout: str) -> None:
    dense = (torch.rand(50, 40) < 0.05).float()
    sparse, x = getattr(dense, layout)(), torch.randn(40, 8, requires_grad=True)
    seen = recorded(nn.Identity(), lambda: torch.sparse.mm(sparse, x).sum().backward())
    stored = int(dense.count_nonzero())
    assert [count_flops(op) for op in seen if count_flops(op)] == [2 * stored * 8, 2 * stored * 8]
    assert not any(map(is_uncounted_operation, seen))


def test_a_product_of_two_sparse_matrices_is_unknown() -> None:
    a = (torch.rand(20, 20) < 0.2).float().to_sparse()
    seen = recorded(nn.Identity(), lambda: torch.sparse.mm(a, a))
    assert [str(op.function._overloadpacket) for op in seen if is_uncounted_operation(op)] == [
        "aten._sparse_sparse_matmul"
    ]


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_sparse_rows_on_a_cpu_can_be_nothing_but_fp32_and_are_not_held_against_the_model() -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
            self.register_buffer("edges", torch.ones(60, 60).to_sparse_csr())

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            with torch.autocast("cpu", enabled=False):
                x = torch.sparse.mm(self.edges, x.float())
            return self.last(x)

    stepper = make(Graph())
    assert stepper.step(mse, torch.randn(60, 8)).applied
    assert stepper.observed is not None
    assert stepper.observed.share == 1.0


@pytest.mark.wording
def test_fp8_that_the_model_asks_for_is_reported_and_not_refused() -> None:
    class Fp8(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            one, narrow = torch.ones(()), torch.float8_e4m3fn
            return torch._scaled_mm(x.to(narrow), w.to(narrow).t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
            x, w = (saved.bfloat16() for saved in ctx.saved_tensors)
            return (g.bfloat16() @ w).float(), (g.bfloat16().t() @ x).float()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(64, 64) / 8)

        def forward(self, x: Tensor) -> Tensor:
            return Fp8.apply(x, self.w)

    stepper = make(Model())
    with pytest.warns(UserWarning, match="Fp8"):
        assert stepper.step(mse, torch.randn(32, 64)).applied
    assert stepper.observed is not None
    assert stepper.observed.fp8 == {"fp8_e4m3": 2 * 32 * 64 * 64}
    assert stepper.observed.share == 1.0
    assert "in fp8_e4m3" in str(stepper.observed)


# -- guesses -------------------------------------------------------------------------------------------------------


def test_the_guess_for_a_product_is_exact_and_for_nothing_is_nothing() -> None:
    function = torch.ops.halfstep_test.product.default
    given = torch.empty(6, 8), torch.empty(8, 10)
    operation = Operation(function, given, {}, torch.empty(6, 10), "", False, False)
    assert is_uncounted_operation(operation)
    assert estimate_unknown_flops(operation) == (2 * 6 * 8 * 10, "fp32")
    empty = torch.empty(0, 8), torch.empty(8, 10)
    assert estimate_unknown_flops(Operation(function, empty, {}, torch.empty(0, 10), "", False, False))[0] == 0
    whole = torch.ones(3, dtype=torch.int64)
    assert not is_uncounted_operation(Operation(function, (whole, whole), {}, whole, "", False, False))


def test_what_torch_computes_one_by_one_is_not_unknown() -> None:
    x = torch.randn(2, 3, 8, 8, requires_grad=True)

    def run() -> None:
        y = nn.functional.interpolate(x, scale_factor=2, mode="bilinear").relu()
        y = nn.functional.group_norm(y, 3).softmax(-1).cumsum(-1).sort(-1)[0]
        (y.sum() + torch.linalg.norm(x) + nn.functional.cross_entropy(x.flatten(2)[0], torch.ones(3).long())).backward()

    assert [op for op in recorded(nn.Identity(), run) if is_uncounted_operation(op)] == []
