"""Operators that take functions: the same gradients while they are watched, and every listener lives through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch.nn.attention.flex_attention import flex_attention

from halfstep import Stepper, audit, diagnose
from halfstep.formats import BF16
from halfstep.observe.emulate import OutputRounder
from halfstep.observe.flops import is_uncounted_operation
from halfstep.observe.lint.listener import LintListener
from halfstep.observe.nonfinite_origin import NonfiniteOrigins
from halfstep.observe.recorder import OpaqueOperator, Operation, Recorder
from halfstep.precision.precision import resolve_precision_name

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning"),
]


class Cond(nn.Module):
    """Branches that close over weights, as people write them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda t: self.a(t).sin(), lambda t: self.b(t).cos(), (x,))


class Scan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.a.weight

        def combine(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            new = (carry @ weight + row).tanh()
            return new, new.clone()

        return scan(combine, torch.zeros(16), x)[1]


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def make(model: nn.Module, precision: str = "fp32") -> Stepper:
    return Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision=resolve_precision_name(precision))


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", [Cond, Scan])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_watched_step_learns_what_a_plain_one_does(kind: Callable[[], nn.Module], sign: float) -> None:
    torch.manual_seed(0)
    watched, plain = kind(), kind()
    plain.load_state_dict(watched.state_dict())
    x = sign * torch.rand(8, 16)
    stepper = make(watched)
    assert stepper.step(loss, x).applied
    loss(plain, x).backward()
    torch.optim.SGD(plain.parameters(), 0.1).step()
    for ours, theirs in zip(watched.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert stepper.observed is not None
    assert stepper.observed.share == 1.0
    assert stepper.observed.confidence == 1.0


@pytest.mark.parametrize("compiled", [False, True])
def test_flex_attention_is_counted(compiled: bool) -> None:
    attend: Any = torch.compile(flex_attention, backend="eager") if compiled else flex_attention

    class Flex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():  # its backward has no kernel on a CPU
                x = attend(x, x, x)
            return self.head(x)

    stepper = make(Flex(), "bf16")
    for _ in range(2):
        assert stepper.step(loss, torch.randn(2, 2, 32, 16)).applied
    assert stepper.observed is not None
    attention, head = 2 * 2 * (2 * 2 * 32 * 32 * 16), 2 * 2 * 2 * 2 * 32 * 16 * 4
    assert sum(stepper.observed.flops.values()) == attention + head


def test_a_loop_that_ends_by_its_numbers() -> None:
    w = torch.eye(4)
    seen: list[Operation] = []
    with Recorder(nn.Identity(), seen.append):
        steps, _ = while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x @ w), (torch.tensor(0), torch.ones(4, 4)))
    assert int(steps) == 3
    assert sum("mm" in str(op.function) for op in seen) == 3


def test_every_listener_is_told_of_an_operator_that_ran_unseen() -> None:
    class Unseen(torch._ops.HigherOrderOperator):
        def __init__(self) -> None:
            super().__init__("halfstep_test_unseen")

        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x)

    unseen = Unseen()
    unseen.py_impl(torch._C.DispatchKey.CPU)(lambda x: x * float("inf"))
    unseen.fallthrough(torch._C.DispatchKey.AutogradCPU)
    unseen.fallthrough(torch._C.DispatchKey.AutocastCPU)
    model, x, told = nn.Identity(), torch.ones(4), []
    origins, lint, rounding = NonfiniteOrigins(model, x), LintListener(model), OutputRounder(BF16)

    def listen(operation: Operation) -> None:
        told.append(operation)
        for listener in (origins, lint, rounding):
            listener(operation)

    with torch.no_grad(), Recorder(model, listen, rounding.run):
        out = unseen(x)
    (operation,) = told
    assert isinstance(operation.function, OpaqueOperator)
    assert is_uncounted_operation(operation)
    made = origins.reaching([out])
    assert made is not None
    assert "halfstep_test_unseen" in made.name


def test_a_diagnosis_goes_through_a_branch() -> None:
    class Bad(Cond):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda t: (self.a(t) * 0).log(), lambda t: self.b(t), (x,))

    stepper = make(Bad())
    report = stepper.step(loss, torch.rand(8, 16))
    assert not report.applied
    verdict = diagnose(stepper, report)
    assert "log" in str(verdict)


def test_an_audit_goes_through_a_branch() -> None:
    model, x = Cond(), torch.rand(8, 16)
    report = audit(model, loss, x, precision="bf16")
    assert report is not None
