"""The trainer on a GPU: pinned memory, memory and meters, and the same step count as on a CPU. Not run without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import halfstep
from halfstep.journal.jsonl import read_events

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("recipe", ["segmentation_tiny", "classification_tiny"])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_a_run_learns_in_the_precision_asked_for(recipe: str, precision: str, tmp_path: Path) -> None:
    settings = {"run.dir": str(tmp_path / "run"), "train.num_workers": 2}
    run = halfstep.fit(recipe, precision=precision, settings=settings, quiet=True)
    events = read_events(run.dir / "journal.jsonl")
    metric = [e["val"][run.best["metric"]] for e in events if e["event"] == "epoch"]
    assert max(metric[1:]) > metric[0]
    observed = next(e for e in events if e["event"] == "precision_check")
    assert observed["expected"] == run.precision
    speed = next(e for e in events if e["event"] == "speed")
    assert speed["memory"]["device_bytes"] > 0


def test_the_hot_path_synchronises_once_a_step(tmp_path: Path) -> None:
    """torch names every synchronization that is not asked for; the step's own read is the only one."""
    from halfstep.journal.events import Journal
    from halfstep.recipe.resolve import resolve_recipe
    from halfstep.recipe.sources import read_recipe
    from halfstep.runs.registry import find_task_class
    from halfstep.train.run import make_loop

    kind = find_task_class("classification")
    changes = [("precision", "bf16"), ("train.num_workers", 2), ("run.log_every", 1000)]
    recipe = resolve_recipe(read_recipe("classification_tiny").raw, kind.schema, changes, "gpu").recipe
    loop = make_loop(kind(recipe), recipe, tmp_path, Journal())
    loop.model.train()
    steps = loop.steps()
    for _ in range(3):
        next(steps)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchroniz") as caught:
            next(steps)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in caught if "synchroniz" in str(w.message)]) == 1
