"""Many steps: what a run does, writes and leaves, with a task that takes milliseconds."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import halfstep
from halfstep.errors import BadData, BadRecipe, FolderTaken
from halfstep.journal.jsonl import read_events
from halfstep.train.run import Run
from tests.support.tiny_task import Tiny

RECIPE = """
task: tiny
precision: fp32
optimizer: {name: sgd, lr: 0.05, momentum: 0.9, weight_decay: 0.0, fused: false}
schedule: {name: constant}
train: {epochs: 4, batch_size: 16, num_workers: 0, seed: 5}
run: {log_every: 2, pictures: 0}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE)
    return path


def fit(recipe: Path, task: Any = Tiny, **settings: Any) -> Run:
    changed = {key.replace("__", "."): value for key, value in settings.items()}
    changed.setdefault("run.dir", str(recipe.parent / "run"))
    return halfstep.fit(recipe, task=task, settings=changed, quiet=True)


def events(run: Run | Path, name: str) -> list[dict[str, Any]]:
    folder = run.dir if isinstance(run, Run) else run
    return [event for event in read_events(folder / "journal.jsonl") if event["event"] == name]


def test_a_run_learns_and_leaves_everything_in_its_folder(recipe: Path) -> None:
    run = fit(recipe, train__epochs=12)
    losses = [event["val"]["loss"] for event in events(run, "epoch")]
    assert losses[-1] < losses[0] / 2
    assert run.reason == "finished"
    assert run.metrics["loss"] == losses[-1]
    assert run.steps == 48 == len(events(run, "step"))
    left = {path.name for path in run.dir.iterdir()}
    assert {"recipe.yaml", "journal.jsonl", "train.log", "best.safetensors", "last.safetensors", "result.json"} <= left
    result = json.loads((run.dir / "result.json").read_text())
    assert result["observed"] == {"expected": "fp32", "share": 1.0}
    assert result["best"]["value"] == min(losses)


def test_fp32_is_bitwise_the_loop_that_a_person_writes(recipe: Path) -> None:
    run = fit(recipe)
    ids = []
    from halfstep.data.dataset import Order

    for epoch in range(4):
        ids += Order(64, 5).numbers(epoch).split(16)
    points = Tiny(_resolved(run)).source("train")
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for batch in ids:
        optimizer.zero_grad()
        F.mse_loss(model(points.x[batch]), points.y[batch]).backward()
        optimizer.step()
    saved = load_file(run.dir / "last.safetensors")
    assert saved.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(saved[name], tensor), name


def _resolved(run: Run) -> Any:
    from halfstep.recipe.sources import read_recipe

    return Tiny.schema.model_validate(read_recipe(str(run.dir / "recipe.yaml")).raw)


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(recipe: Path) -> None:
    weights = [
        load_file(fit(recipe, run__dir=str(recipe.parent / f"{i}"), train__seed=seed).dir / "last.safetensors")
        for i, seed in enumerate((5, 5, 6))
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not any(torch.equal(weights[0][name], weights[2][name]) for name in weights[0])


def test_best_is_the_best_and_last_is_the_last(recipe: Path) -> None:
    run = fit(recipe, optimizer__lr=0.2, train__epochs=8)
    losses = [event["val"]["loss"] for event in events(run, "epoch")]
    best = losses.index(min(losses))
    assert best != len(losses) - 1, "the learning rate was meant to be too high for a steady fall"
    assert run.best == {"metric": "loss", "value": losses[best], "epoch": best + 1}
    for name, expected in (("best", losses[best]), ("last", losses[-1])):
        task = Tiny(_resolved(run))
        model = task.model()
        model.load_state_dict(load_file(run.dir / f"{name}.safetensors"))
        points = task.source("val")
        assert F.mse_loss(model(points.x), points.y).item() == pytest.approx(expected, rel=1e-6)


def test_patience_ends_a_run_that_gets_no_better(recipe: Path) -> None:
    run = fit(recipe, optimizer__lr=1e-9, train__epochs=50, evaluate__patience=2, evaluate__min_delta=0.01)
    assert run.reason == "early_stopping"
    assert [event["is_best"] for event in events(run, "epoch")] == [True, False, False]


def test_steps_are_attempts_and_end_a_run_inside_an_epoch(recipe: Path) -> None:
    run = fit(recipe, train__steps=7, data__nan=[3])
    steps = events(run, "step")
    assert len(steps) == 7
    assert run.steps + sum(run.skipped.values()) == 7
    assert len(events(run, "epoch")) == 2


def test_a_sample_that_is_no_number_skips_one_step_and_is_not_used_again(recipe: Path) -> None:
    run = fit(recipe, data__nan=[3, 40])
    skipped = [event for event in events(run, "step") if not event["applied"]]
    assert {number for event in skipped for number in event["quarantined"]} == {3, 40}
    assert {event["epoch"] for event in skipped} == {1}
    assert all(event["reason"] == "loss_not_finite" for event in skipped)
    assert all(number in event["ids"] for event in skipped for number in event["quarantined"])
    assert all(math.isfinite(event["loss"]) for event in events(run, "step") if event["epoch"] > 1)
    assert all(tensor.isfinite().all() for tensor in load_file(run.dir / "last.safetensors").values())
    assert {event["index"] for event in events(run, "bad_sample")} == {3, 40}


@pytest.mark.wording
def test_unreadable_samples_are_replaced_until_the_budget_is_spent(recipe: Path) -> None:
    run = fit(recipe, data__unreadable=[1, 2], data__bad_samples=2)
    assert {event["name"] for event in events(run, "bad_sample")} == {"point 1", "point 2"}
    assert run.steps == 16
    with pytest.raises(BadData, match="point"):
        fit(recipe, data__unreadable=[1, 2, 7], data__bad_samples=2, run__dir=str(recipe.parent / "other"))
    assert events(recipe.parent / "other", "end")[0]["reason"] == "failed"
    assert not (recipe.parent / "other" / "result.json").exists()


@pytest.mark.wording
def test_unreadable_validation_samples_are_left_out_reported_and_counted(recipe: Path) -> None:
    whole = fit(recipe, train__epochs=1)
    run = fit(recipe, train__epochs=1, data__unreadable_val=[4], run__dir=str(recipe.parent / "less"))
    (told,) = events(run, "bad_sample")
    assert (told["name"], told["replacement"]) == ("point 4", -1)
    assert run.metrics["loss"] != whole.metrics["loss"]
    assert "left out of the evaluation" in (run.dir / "train.log").read_text()
    with pytest.raises(BadData, match="point 4"):
        fit(recipe, data__unreadable_val=[4], data__bad_samples=0, run__dir=str(recipe.parent / "none"))


def test_microbatches_make_the_same_update_as_one_large_batch(recipe: Path) -> None:
    large = fit(recipe, run__dir=str(recipe.parent / "large"))
    small = fit(recipe, run__dir=str(recipe.parent / "small"), train__batch_size=4, train__microbatches=4)
    assert large.steps == small.steps
    one, other = (load_file(run.dir / "last.safetensors") for run in (large, small))
    for name in one:
        assert torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-6), name
    assert events(small, "start")[0]["batch"] == {"per_device": 4, "devices": 1, "microbatches": 4, "total": 16}


def test_an_average_is_what_is_evaluated_and_saved_as_best(recipe: Path) -> None:
    run = fit(recipe, train__ema=0.9, train__epochs=3)
    best, last, average = (load_file(run.dir / f"{name}.safetensors") for name in ("best", "last", "last-ema"))
    assert run.best["epoch"] == 3
    assert all(torch.equal(best[name], average[name]) for name in best)
    assert not any(torch.equal(last[name], average[name]) for name in best)


def test_the_learning_rate_follows_its_schedule(recipe: Path) -> None:
    run = fit(recipe, **{"schedule.name": "cosine", "schedule.warmup_steps": 4})
    rates = [event["lr"] for event in events(run, "step")]
    assert rates[:5] == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.05])
    assert all(a > b for a, b in itertools.pairwise(rates[4:]))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precisions_learn_too_and_are_observed(recipe: Path, precision: str) -> None:
    run = fit(recipe, precision=precision, train__epochs=12)
    losses = [event["val"]["loss"] for event in events(run, "epoch")]
    assert losses[-1] < losses[0] / 2
    observed = events(run, "precision_check")[0]
    assert (observed["expected"], observed["share"]) == (precision, 1.0)
    scales = {event["loss_scale"] for event in events(run, "step")}
    assert (scales == {1.0}) == (precision == "bf16")


def test_the_loss_scale_is_the_recipes(recipe: Path) -> None:
    run = fit(recipe, precision="fp16", loss_scale__init_scale=256.0, loss_scale__growth_interval=5)
    assert [event["loss_scale"] for event in events(run, "step")][:7] == [256.0] * 5 + [512.0] * 2


def test_an_interrupted_run_says_so_and_is_not_finished(recipe: Path) -> None:
    class Interrupted(Tiny):
        calls = 0

        def loss(self, model: Any, batch: Any, metrics: Any = None) -> Any:
            type(self).calls += 1
            if type(self).calls == 6:
                raise KeyboardInterrupt
            return super().loss(model, batch, metrics)

    with pytest.raises(KeyboardInterrupt):
        fit(recipe, Interrupted)
    folder = recipe.parent / "run"
    assert events(folder, "end")[0]["reason"] == "interrupted"
    assert not (folder / "result.json").exists()
    whole = fit(recipe, run__dir=str(recipe.parent / "whole"))
    gone_on = fit(recipe)
    (first, second) = events(folder, "start")
    assert first["resumed"] is None
    assert second["resumed"]["checkpoint"].startswith("step-00000004.")
    assert second["resumed"]["exact"]
    assert [event["loss"] for event in events(folder, "step")] == [event["loss"] for event in events(whole, "step")]
    for name in ("best", "last"):
        one, other = (load_file(run.dir / f"{name}.safetensors") for run in (whole, gone_on))
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.wording
def test_a_finished_run_is_returned_and_another_recipe_is_refused(recipe: Path) -> None:
    first = fit(recipe)
    before = (first.dir / "last.safetensors").read_bytes()
    assert fit(recipe) == first
    with pytest.raises(FolderTaken, match=r"optimizer\.lr: 0\.05 -> 0\.5"):
        fit(recipe, optimizer__lr=0.5)
    second = halfstep.fit(recipe, task=Tiny, settings={"run.dir": str(first.dir)}, new=True, quiet=True)
    assert second.dir.name == "run-2"
    assert (first.dir / "last.safetensors").read_bytes() == before
    (first.dir / "result.json").write_text("{}")
    with pytest.raises(FolderTaken, match="finished"):
        fit(recipe)


def test_a_task_may_be_given_as_an_object(recipe: Path) -> None:
    recipe_free = Tiny(None)
    assert fit(recipe, recipe_free).reason == "finished"


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_no_bit(recipe: Path, workers: int) -> None:
    alone = fit(recipe, train__epochs=2)
    helped = fit(recipe, train__epochs=2, train__num_workers=workers, run__dir=str(recipe.parent / "helped"))
    one, other = (load_file(run.dir / "last.safetensors") for run in (alone, helped))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_compiled_model_is_compiled_and_learns_the_same(recipe: Path) -> None:
    from torch._dynamo.utils import counters

    class Curve(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = torch.nn.Linear(2, 16), torch.nn.Linear(16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.outer(self.inner(x).tanh())
            return out

    class Compiled(Tiny):
        def model(self) -> torch.nn.Module:
            return Curve()

    plain = fit(recipe, Compiled, train__epochs=2)
    counters.clear()
    compiled = fit(recipe, Compiled, train__epochs=2, train__compile=True, run__dir=str(recipe.parent / "compiled"))
    assert counters["stats"]["unique_graphs"] >= 1
    assert compiled.metrics["loss"] == pytest.approx(plain.metrics["loss"], rel=1e-4)
    one, other = (load_file(run.dir / "last.safetensors") for run in (plain, compiled))
    assert one.keys() == other.keys()


@pytest.mark.wording
def test_a_run_that_cannot_begin_leaves_no_folder(recipe: Path) -> None:
    class Empty(Tiny):
        def source(self, split: Any) -> Any:
            raise BadData("no samples here", allowed="samples", do="look")

    with pytest.raises(BadData, match="no samples here"):
        fit(recipe, Empty)
    assert not (recipe.parent / "run").exists()
    assert fit(recipe).reason == "finished"


def test_the_callers_random_numbers_go_on_as_if_nothing_had_run(recipe: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first = torch.rand(1)
    fit(recipe)
    assert torch.equal(torch.cat([first, torch.rand(1)]), expected)


def test_an_object_keeps_what_it_was_made_with(recipe: Path) -> None:
    class Wide(Tiny):
        def __init__(self, width: int) -> None:
            self.width = width
            super().__init__(None)

        def model(self) -> torch.nn.Module:
            return torch.nn.Sequential(torch.nn.Linear(2, self.width), torch.nn.Tanh(), torch.nn.Linear(self.width, 1))

    task = Wide(width=5)
    run = fit(recipe, task)
    assert load_file(run.dir / "last.safetensors")["0.weight"].shape == (5, 2)
    assert task.recipe is None


@pytest.mark.wording
def test_compiling_and_checkpointing_together_are_refused(recipe: Path) -> None:
    with pytest.raises(BadRecipe, match=r"train\.compile"):
        fit(recipe, train__compile=True, train__checkpoint_activations=True)


def test_a_metric_that_is_a_table_is_told_number_by_number(recipe: Path) -> None:
    from torchmetrics import MetricCollection
    from torchmetrics.classification import BinaryConfusionMatrix

    class Counting(Tiny):
        def metrics(self) -> Any:
            return MetricCollection({"table": BinaryConfusionMatrix()})

        def loss(self, model: Any, batch: Any, metrics: Any = None) -> Any:
            if metrics is not None:
                metrics.update(model(batch["x"]).detach().sigmoid(), (batch["y"] > 0).long())
            return super().loss(model, batch)

    run = fit(recipe, Counting)
    assert {f"table_{i}_{j}" for i in (0, 1) for j in (0, 1)} <= run.metrics.keys()
    assert sum(value for name, value in run.metrics.items() if name != "loss") == 16


def test_a_metric_that_is_never_finite_leaves_a_result_in_strict_json(recipe: Path) -> None:
    class Lost(Tiny):
        def loss(self, model: Any, batch: Any, metrics: Any = None) -> Any:
            loss = super().loss(model, batch)
            return loss if model.training else loss * float("nan")

    run = fit(recipe, Lost)
    assert run.best["value"] is None
    text = (run.dir / "result.json").read_text()
    assert json.loads(text, parse_constant=lambda word: pytest.fail(word))["metrics"]["loss"] == "NaN"
    assert (run.dir / "last.safetensors").exists()
    assert not (run.dir / "best.safetensors").exists()
