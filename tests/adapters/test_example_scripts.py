"""The scripts of timm, diffusers and nnU-Net's shape in `examples/`: what breaks, what holds, how few lines differ."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import halfstep
from zoo.real_accelerate import accelerator_with_fp16, fresh_accelerator

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = EXAMPLES.parent / "docs" / "adapters" / "scripts.md"


def loaded(folder: str, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES / folder))
    monkeypatch.delitem(sys.modules, "before", raising=False)
    spec = importlib.util.spec_from_file_location(f"example_{folder}_{name}", EXAMPLES / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_both(folder: str, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], dict[str, Any]]:
    before, after = (loaded(folder, name, monkeypatch).main() for name in ("before", "after"))
    return before, after


def lines_changed(folder: str) -> list[str]:
    """Return the lines of code that the script with halfstep has and the one without it has not."""
    before, after = ((EXAMPLES / folder / name).read_text().split('"""', 2)[2] for name in ("before.py", "after.py"))
    differing = difflib.ndiff(before.splitlines(), after.splitlines())
    return [line[2:].strip() for line in differing if line.startswith("+ ") and line[2:].strip()]


@pytest.mark.parametrize(
    ("name", "updates", "rate"), [("timm", (8, 7), (0.0, 3.8060e-05)), ("diffusers", (5, 4), (0.0, 3.3333e-04))]
)
def test_a_script_and_the_same_with_halfstep(
    name: str, updates: tuple[int, int], rate: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(name)
    fresh_accelerator("bf16")  # one state a process, which other tests may have left
    plain, held = run_both(name, monkeypatch)
    assert not plain["finite"]
    assert held["finite"]
    # The schedule is where as many applied updates take it.
    assert (plain["updates"], held["updates"]) == updates
    assert (plain["lr"], held["lr"]) == (pytest.approx(rate[0]), pytest.approx(rate[1], rel=1e-4))


@pytest.mark.parametrize("fused", [False, True])
def test_two_optimizers_of_an_accelerator_are_unscaled_once(fused: bool) -> None:
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    accelerator = accelerator_with_fp16()
    accelerator.scaler = halfstep.GradScaler("cpu", init_scale=1024.0)
    parts = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(part.parameters(), 1.0, fused=fused) for part in parts]
    first, second, *prepared = accelerator.prepare(*parts, *optimizers)
    for factor in (1.0, float("inf"), 1.0):
        before = [p.detach().clone() for part in parts for p in part.parameters()]
        accelerator.backward(second(first(torch.randn(6, 4))).square().mean() * factor)
        accelerator.clip_grad_norm_([p for part in parts for p in part.parameters()], 0.01)
        for optimizer in prepared:
            optimizer.step()
            optimizer.zero_grad()
        after = [p for part in parts for p in part.parameters()]
        moved = torch.cat([(a - b).flatten() for a, b in zip(after, before, strict=True)]).norm().item()
        assert moved == pytest.approx(0.01 if factor == 1.0 else 0.0, rel=1e-3)
        assert [optimizer.step_was_skipped for optimizer in prepared] == [factor != 1.0] * 2
    assert (accelerator.scaler.counts.applied, accelerator.scaler.counts.attempted) == (2, 3)


def test_a_trainer_of_nnunets_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, held = run_both("nnunet", monkeypatch)
    assert not plain["finite"]
    assert held["finite"]
    assert (held["report"].step, held["report"].attempt) == (7, 8)


def test_nnunets_own_train_step(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = pytest.importorskip("nnunetv2.training.nnUNetTrainer.nnUNetTrainer").nnUNetTrainer
    toy = loaded("nnunet", "before", monkeypatch)
    parts = vars(toy.ToyTrainer)

    def without_files(self: Any) -> None:
        self.device, self.grad_scaler = torch.device("cpu"), None

    made = type("Real", (trainer,), {"__init__": without_files, "initialize": parts["initialize"]})()
    made.initialize()
    made.grad_scaler = halfstep.GradScaler("cpu", precision="fp32")
    made.grad_scaler.include(made.network)
    for batch in toy.batches():
        made.train_step(batch)
    assert (made.grad_scaler.counts.applied, made.grad_scaler.counts.attempted) == (7, 8)
    assert all(bool(tensor.isfinite().all()) for tensor in made.network.state_dict().values())


@pytest.mark.parametrize("name", ["timm", "diffusers"])
def test_few_lines_change_and_the_page_shows_them(name: str) -> None:
    changed = lines_changed(name)
    assert 1 <= len(changed) <= 5
    page = PAGE.read_text()
    assert all(line in page for line in changed), changed
