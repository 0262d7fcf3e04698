"""The operations of docs/custom-operations.md, taken from the page: right in every precision, and found when not."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from halfstep import Stepper, audit, island
from halfstep.precision.precision import resolve_precision_name

PAGE = Path(__file__).parents[2] / "docs" / "custom-operations.md"
# The rounding of each format, over the few operations from the loss to the first weight.
APART = {"fp32": 1e-4, "bf16": 0.04, "fp16": 0.005}


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found.group(1)


@pytest.fixture
def page(tmp_path: Path) -> ModuleType:
    return written(tmp_path, block("python"))


def written(folder: Path, code: str) -> ModuleType:
    """In a file, as a person's code is."""
    file = folder / "my_operations.py"
    file.write_text(code)
    module = ModuleType("my_operations")
    exec(compile(code, str(file), "exec"), vars(module))
    return module


def unit_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-8)


def product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


def cosine(x: Tensor, prototypes: Tensor) -> Tensor:
    return functional.cosine_similarity(x[:, None], prototypes[None], dim=-1)


BY_HAND: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, int], ...]]] = {
    "UnitNorm": (unit_norm, ((4, 6),)),
    "Product": (product, ((4, 6), (3, 6))),
    "Cosine": (cosine, ((4, 6), (3, 6))),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_each_backward_is_the_derivative_of_its_forward(page: ModuleType, name: str) -> None:
    torch.manual_seed(0)
    by_hand, shapes = BY_HAND[name]
    given = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    function = getattr(page, name).apply
    torch.testing.assert_close(function(*given), by_hand(*given), rtol=1e-6, atol=1e-6)
    assert torch.autograd.gradcheck(function, given)


class Plainly(nn.Module):
    """The page's model without an operation of its own, on the same weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        parts: Any = self.model
        return cosine(product(unit_norm(parts.first(x)), parts.weight), parts.head.prototypes)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(64, 16), torch.randint(10, (64,))


def gradients(page: ModuleType, precision: str) -> dict[str, Tensor]:
    """What one step of SGD at a learning rate of 1 takes from the weights."""
    torch.manual_seed(0)
    model = island(page.Model(), "head")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 1.0), precision=resolve_precision_name(precision))
    assert stepper.step(page.loss_fn, batch()).applied
    assert not [finding for finding in stepper.findings if finding.id == "function-mixes-formats"]
    assert stepper.observed is not None
    assert stepper.observed.share == 1.0
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("precision", APART)
def test_gradients_are_those_of_plain_torch_in_fp32(page: ModuleType, precision: str) -> None:
    found = gradients(page, precision)
    torch.manual_seed(0)
    plain = page.Model()
    page.loss_fn(Plainly(plain), batch()).backward()
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        apart = (found[name] - parameter.grad).norm() / parameter.grad.norm()
        assert apart < APART[precision], f"{name}: {apart:.3g}"


@pytest.mark.parametrize("precision", APART)
def test_the_page_trains(page: ModuleType, precision: str) -> None:
    losses = page.train(resolve_precision_name(precision))
    assert losses[-1] < 0.6 * losses[0]


def test_a_small_constant_and_a_large_sum_survive_fp16(page: ModuleType) -> None:
    """Squares of 300 do not fit fp16, and 1e-8 is 0 there: both are right because they are computed in fp32."""
    rows = torch.stack([torch.full((8,), 300.0), torch.zeros(8)]).to(torch.float16).requires_grad_()
    with torch.autocast("cpu", dtype=torch.float16):
        out = page.UnitNorm.apply(rows)
    out.sum().backward()
    torch.testing.assert_close(out[0], torch.ones(8))
    assert rows.grad is not None
    assert rows.grad.dtype is torch.float16
    assert rows.grad.isfinite().all()
    assert rows.grad[1, 0] == pytest.approx(1e4, rel=0.01)


def forgotten(folder: Path) -> ModuleType:
    """The page with the decorators of `Product` left out."""
    before, after = block("python").split("class Product")
    inside, rest = after.split("class Cosine")
    bare = re.sub(r"    @custom_(fwd|bwd)\(device_type=DEVICE\)\n", "", inside)
    assert bare != inside
    return written(folder, f"{before}class Product{bare}class Cosine{rest}")


@pytest.mark.wording
def test_the_page_shows_what_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = forgotten(tmp_path)
    model = island(page.Model(), "head")
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 1.0), precision="bf16")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError, match="dtype"):
            stepper.step(page.loss_fn, batch())
    [told] = [str(one.message) for one in caught if "function-mixes-formats" in str(one.message)]
    assert [str(finding) for finding in stepper.findings if finding.id == "function-mixes-formats"] == [told]
    # The page has the warning on lines of its own.
    shown = re.search(r"in bf16:\n\n<!-- output.*? -->\n```\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None
    assert " ".join(shown[1].split()) == told


@pytest.mark.wording
def test_audit_finds_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = forgotten(tmp_path)
    found = audit(page.Model(), page.loss_fn, batch(), precision="bf16")
    ours = {one.module: one.finding.evidence for one in found.spotted if one.finding.id == "function-mixes-formats"}
    assert set(ours) == {"", "head"}
    assert ": Product takes" in ours[""]
    assert "in head: Cosine takes" in ours["head"]
