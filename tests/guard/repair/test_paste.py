"""The code to paste for a line without a finite result: it has one, in forward and in backward."""

from __future__ import annotations

import linecache
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.guard.repair.paste import suggest_code
from halfstep.guard.verdict import Culprit, ProposedRemedy, Verdict
from halfstep.precision.island import island

PLAIN = Culprit("aten.div", "", False, None, "fp32", ("nan",), 1.0, None, 3.4e38)


def suggest(
    folder: Path, text: str, line: int, culprit: Culprit, cause: Any = "code", tried: tuple[ProposedRemedy, ...] = ()
) -> str:
    file = folder / "train.py"
    file.write_text(text)
    linecache.checkcache()
    placed = replace(culprit, line=f"{file}:{line}")
    remedies = (ProposedRemedy("precision", "fp32", True), *tried) if cause == "precision" else ()
    (code,) = suggest_code(Verdict(cause, f"{cause}: a sentence", placed, (), remedies), loop="torch")
    return code


def of(operation: str, **fields: Any) -> Culprit:
    return replace(PLAIN, operation=operation, **fields)


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize(
    ("line", "culprit"),
    [
        ("out = x / z", of("aten.div")),
        ("out = x / z", of("aten.div", divisor="signed")),
        ("out = x / (z > 0).sum()", of("aten.div", divisor="count")),
        ("out = x / zero", of("aten.div", divisor="number")),
        ("out = x.sum() / len(x[:0])", of("aten.div", divisor="number")),
        ("out = torch.log(z)", of("aten.log")),
        ("out = (z ** 2).sum(1).sqrt().mean()", of("aten.div", backward=True, forward="aten.sqrt")),
        ("out = z ** 0.5", of("aten.pow", backward=True, forward="aten.pow")),
        ("out = (z + 1e30) ** 2", of("aten.pow", kinds=("inf",), largest_input=1e30)),
        ("out = x[:1].std(0)", of("aten.std")),
        ("out = x[:0].mean()", of("aten.mean")),
        ("out = F.mse_loss(x[:0], z[:0], reduction='none').mean()", of("aten.mean")),
        ("out = torch.lgamma(z)", of("aten.lgamma")),
        ("out = torch.acos(z + 1)", of("aten.acos")),
    ],
)
def test_the_code_is_finite_where_the_line_is_not(tmp_path: Path, line: str, culprit: Culprit) -> None:
    def run(expression: str) -> tuple[bool, bool]:
        x = torch.linspace(-2, 2, 12).reshape(3, 4).requires_grad_()
        z = torch.zeros(3, 4, requires_grad=True)
        out: Tensor = eval(expression, {"torch": torch, "F": F, "x": x, "z": z, "zero": 0.0})
        out.sum().backward()
        grads = [g for g in (x.grad, z.grad) if g is not None]
        return bool(out.isfinite().all()), all(bool(g.isfinite().all()) for g in grads)

    assert run(line.partition(" = ")[2]) != (True, True), "the line fails"
    assert run(suggest(tmp_path, line + "\n", 1, culprit).partition("   #")[0]) == (True, True)


@pytest.mark.parametrize(
    "line", ["out = z.norm(dim=1)", "out = torch.norm(z, 2, 1)", "out = torch.linalg.norm(z, dim=1)"]
)
def test_a_norm_keeps_its_dimension(tmp_path: Path, line: str) -> None:
    culprit = of("aten.div", backward=True, forward="aten.linalg_vector_norm")
    z = torch.arange(12.0).reshape(3, 4)
    code = suggest(tmp_path, line + "\n", 1, culprit).partition("   #")[0]
    torch.testing.assert_close(eval(code, {"z": z}), z.norm(dim=1))


def test_a_division_by_a_signed_tensor_keeps_its_sign(tmp_path: Path) -> None:
    code = suggest(tmp_path, "out = x / y\n", 1, of("aten.div", divisor="signed")).partition("   #")[0]
    x, y = torch.ones(3), torch.tensor([-2.0, 0.0, 4.0])
    assert torch.equal(eval(code, {"x": x, "y": y})[::2], torch.tensor([-0.5, 0.25]))


@pytest.mark.wording
def test_labels_that_are_all_ignored_are_checked_with_the_ignored_label(tmp_path: Path) -> None:
    line = "loss = F.cross_entropy(out, y.view(-1), ignore_index=pad)\n"
    assert suggest(tmp_path, line, 1, of("aten.nll_loss_forward")).startswith("if (y.view(-1) != pad).any():")


@pytest.mark.wording
def test_a_number_beyond_fp16_is_computed_in_fp32(tmp_path: Path) -> None:
    culprit = of("aten.pow", format="fp16", in_fp32=4.6e8, limit=65504.0)
    assert suggest(tmp_path, "energy = h.pow(2)\n", 1, culprit).startswith("h.float()   #")


@pytest.mark.wording
def test_large_numbers_of_a_batch_are_checked_by_their_size(tmp_path: Path) -> None:
    code = suggest(tmp_path, "x = 1\n", 1, of("aten._to_copy", batch_path="['images']"), "data")
    assert code.startswith("if not images.abs().max() < 10000: continue")


LOOP = """
def penalty(out):
    return (out ** 2).mean()

class Net:
    def forward(self, x):
        return x ** 2

def train():
    loss = (out ** 2).mean()
    loss.backward()
"""


@pytest.mark.wording
@pytest.mark.parametrize(
    ("line", "tried", "code"),
    [
        (3, (ProposedRemedy("island_function", "penalty", True),), "penalty = halfstep.island(penalty)"),
        (3, (ProposedRemedy("island_function", "penalty", False),), "with torch.autocast(device.type, enabled=False):"),
        (7, (), "with torch.autocast(device.type, enabled=False):"),
        (10, (), "with torch.autocast(device.type, enabled=False):"),
    ],
)
def test_a_function_is_an_island_and_the_loop_leaves_autocast(
    tmp_path: Path, line: int, tried: tuple[ProposedRemedy, ...], code: str
) -> None:
    culprit = of("aten.pow", format="fp16", in_fp32=90000.0, limit=65504.0)
    pasted = suggest(tmp_path, LOOP, line, culprit, "precision", tried)
    assert pasted.startswith(f"{code}   #")
    useless = any(remedy.works is False for remedy in tried)
    assert ("forward pass" in pasted) is useless, "after an island that does not help: the whole step in fp32"
    names: dict[str, Any] = {}
    exec(LOOP, names)
    with torch.autocast("cpu", torch.float16):
        product = torch.full((2, 2), 300.0) @ torch.eye(2)
        assert not bool(names["penalty"](product).isfinite())
        assert bool(island(names["penalty"])(product).isfinite())
