"""k + k = 2k: what a proof finds equal, and that it finds what is not."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep
from halfstep.checkpoint.paths import CheckpointDir, list_generations
from halfstep.errors import StorageFailed, WrongUse
from halfstep.guard.repair.remedies import Remedies
from halfstep.journal.events import Journal
from halfstep.journal.jsonl import read_events
from halfstep.recipe.strict_yaml import parse_yaml
from halfstep.train.environment import AutoChoices
from halfstep.train.epoch_metrics import EpochMetrics
from halfstep.train.resume_proof import Build, find_first_difference, prove_exact_resume
from halfstep.train.run import make_loop
from halfstep.train.state import COMPONENTS, State
from tests.support.combinations import one_per_value
from tests.support.tiny_task import Tiny

RECIPE = """
task: tiny
precision: fp32
model: {batchnorm: true}
optimizer: {name: adamw, lr: 0.05}
schedule: {name: cosine}
train: {epochs: 4, batch_size: 16, num_workers: 0, seed: 5, ema: 0.9}
run: {log_every: 2, pictures: 0}
checkpoint: {every_steps: 3, keep: 9}
"""
PLANNED = 16


class Dropping(Tiny):
    """Draws from the generators that a checkpoint keeps."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor], metrics: Any = None) -> Tensor:
        noise = 0.1 * random.random() * torch.randn_like(batch["x"]) if model.training else 0.0
        return F.mse_loss(model(batch["x"] + noise), batch["y"])


class OwnSeeded(Tiny):
    """Draws from a generator of its own, which begins again with every launch."""

    def begin(self, recipe: Any) -> None:
        super().begin(recipe)
        self.draw = random.Random(0)

    def loss(self, model: nn.Module, batch: dict[str, Tensor], metrics: Any = None) -> Tensor:
        # In what is to be learned: batch normalization would take a shift of the input out again.
        return F.mse_loss(model(batch["x"]), batch["y"] + self.draw.random())


class OwnUnseeded(OwnSeeded):
    def begin(self, recipe: Any) -> None:
        super().begin(recipe)
        self.draw = random.Random()


def recipe(tmp_path: Path, kind: type[Tiny], **settings: Any) -> Any:
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    changed = {key.replace("__", "."): value for key, value in settings.items()}
    changed.setdefault("run.dir", str(tmp_path / "run"))
    halfstep.fit(tmp_path / "tiny.yaml", task=kind, settings=changed, quiet=True)
    return kind.schema.model_validate(parse_yaml((tmp_path / "run" / "recipe.yaml").read_text(), "recipe"))


def building(kind: type[Tiny], made: Any) -> Build:
    def build(where: Path, auto_choices: AutoChoices | None, remedies: Remedies | None) -> Any:
        return make_loop(kind(made), made, where, Journal(), auto_choices=auto_choices, remedies=remedies)

    return build


def saved(tmp_path: Path) -> list[CheckpointDir]:
    return list_generations(tmp_path / "run" / "checkpoints")


def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(*one_per_value(steps=[1, 3, 4, 8], precision=["fp32", "fp16"]))
def test_a_run_that_keeps_its_randomness_is_equal(tmp_path: Path, steps: int, precision: str) -> None:
    made = recipe(tmp_path, Dropping, precision=precision)
    heard: list[tuple[int, int]] = []
    before = torch.get_rng_state(), random.getstate()
    proof = prove_exact_resume(
        building(Dropping, made), saved(tmp_path), steps, scratch(tmp_path), lambda *told: heard.append(told)
    )
    assert proof.equal, (proof.loss, proof.state)
    # The newest checkpoint with 2k of 16 steps left; they are taken every 3 steps, and at the end of each epoch of 4.
    assert proof.begin == {1: 12, 3: 9, 4: 8, 8: 0}[steps]
    told = [event for event in read_events(tmp_path / "run" / "journal.jsonl") if event["event"] == "step"]
    assert list(proof.losses) == [event["loss"] for event in told[proof.begin :][: 2 * steps]]
    assert proof.tensors > 30
    assert heard == [(done, 4 * steps) for done in range(1, 4 * steps + 1)]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_a_generator_of_its_own_is_found_behind_the_resume(tmp_path: Path) -> None:
    made = recipe(tmp_path, OwnSeeded)
    proof = prove_exact_resume(building(OwnSeeded, made), saved(tmp_path), 2, scratch(tmp_path))
    assert not proof.equal
    assert proof.repeatable
    assert proof.loss is not None
    assert proof.loss.what == f"the loss of step {proof.begin + 3}"
    assert proof.loss.in_one_go != proof.loss.resumed
    assert proof.state is not None
    assert proof.state.what.startswith("weights/parameters/")


def test_what_never_repeats_is_found_before_the_resume(tmp_path: Path) -> None:
    made = recipe(tmp_path, OwnUnseeded)
    proof = prove_exact_resume(building(OwnUnseeded, made), [], 2, scratch(tmp_path))
    assert proof.loss is not None
    assert (proof.loss.what, proof.begin, proof.repeatable) == ("the loss of step 1", 0, False)


def _forgets_random(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("halfstep.train.state.restore_rng_states", lambda *_: None)


def _forgets_the_epoch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EpochMetrics, "load_state_dict", lambda *_: None)


def _forgets_the_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("halfstep.train.state._load_weights", lambda *_: None)


@pytest.mark.parametrize(
    ("forget", "named"),
    [
        (_forgets_random, "rng/"),
        (_forgets_the_epoch, "counts/epoch/"),
        (_forgets_the_weights, "weights/"),
    ],
)
def test_a_resume_that_forgets_something_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget: Callable[[pytest.MonkeyPatch], None], named: str
) -> None:
    # Noise in the loss would show in the weights first.
    kind = Draws if named == "rng/" else Dropping
    made = recipe(tmp_path, kind)
    forget(monkeypatch)
    proof = prove_exact_resume(building(kind, made), [], 2, scratch(tmp_path))
    assert proof.state is not None
    assert proof.state.what.startswith(named)


class Draws(Tiny):
    """Draws, and makes nothing of it."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor], metrics: Any = None) -> Tensor:
        random.random()
        return super().loss(model, batch, metrics)


@pytest.mark.wording
def test_a_run_that_is_too_short_is_refused_with_what_would_do(tmp_path: Path) -> None:
    made = recipe(tmp_path, Tiny)
    build = building(Tiny, made)
    with pytest.raises(WrongUse, match=r"9 \+ 9 steps of a run of 16 steps[\s\S]*resume_steps=8"):
        prove_exact_resume(build, saved(tmp_path), 9, scratch(tmp_path))


@pytest.mark.wording
def test_a_run_that_patience_ends_is_too_short_too(tmp_path: Path) -> None:
    made = recipe(tmp_path, Tiny, optimizer__lr=1e-9, evaluate__patience=1, evaluate__min_delta=1.0)
    with pytest.raises(WrongUse, match=r"patience[\s\S]*resume_steps=4"):
        prove_exact_resume(building(Tiny, made), [], 6, scratch(tmp_path))


@pytest.mark.wording
def test_a_save_that_fails_is_told_with_its_reason(tmp_path: Path) -> None:
    made = recipe(tmp_path, Tiny)
    build = building(Tiny, made)

    def blocked(where: Path, auto_choices: AutoChoices | None, remedies: Remedies | None) -> Any:
        (where / "checkpoints").write_text("in the way")
        return build(where, auto_choices, remedies)

    with pytest.raises(StorageFailed, match="nothing to resume from: no checkpoint of step 2: "):
        prove_exact_resume(blocked, [], 2, scratch(tmp_path))


# -- first_difference -------------------------------------------------------------------------------------------------


def state(**components: Any) -> State:
    return State(**{name: components.get(name, {}) for name in COMPONENTS})


@pytest.mark.parametrize(
    ("one", "two", "said"),
    [
        ({"a": torch.zeros(2, 3)}, {"a": torch.zeros(2, 3)}, None),
        (
            {"a": torch.tensor([[0.0, 1.0], [2.0, 3.0]])},
            {"a": torch.tensor([[0.0, 1.0], [5.0, 4.0]])},
            "a[1, 0] 2.0 5.0",
        ),
        ({"a": torch.tensor(1)}, {"a": torch.tensor(2)}, "a 1 2"),
        ({"a": torch.tensor([float("nan")])}, {"a": torch.tensor([float("nan")])}, None),
        ({"a": torch.tensor([0.0])}, {"a": torch.tensor([-0.0])}, "a[0] 0.0 -0.0"),
        ({"a": torch.empty(0, 3)}, {"a": torch.empty(0, 3)}, None),
        ({"a": torch.tensor([True])}, {"a": torch.tensor([False])}, "a[0] True False"),
        ({"a": (1, [2.0, "x"])}, {"a": (1, [2.5, "x"])}, "a/1/0 2.0 2.5"),
        ({"a": float("nan")}, {"a": float("nan")}, None),
        ({"a": 1}, {"a": True}, "a 1 True"),
        ({"a": 1, "b": 2}, {"a": 1}, "b there absent"),
        ({"a": 1}, {"a": 1, "b": {}}, "b absent there"),
        ({"a": []}, {"a": ()}, "a [] ()"),
        ({"a": None}, {"a": torch.zeros(1)}, "a None tensor([0.])"),
    ],
)
def test_the_first_difference_is_named(one: dict[str, Any], two: dict[str, Any], said: str | None) -> None:
    found = find_first_difference(state(rng=one), state(rng=two))
    assert (found and f"{found.what} {found.in_one_go} {found.resumed}") == (said and f"rng/{said}")


def test_layout_shape_and_kind_are_parts_of_a_tensor() -> None:
    image = torch.zeros(1, 2, 3, 3)
    for other in (image.contiguous(memory_format=torch.channels_last), image.double(), image[:, :1]):
        found = find_first_difference(state(weights={"w": image}), state(weights={"w": other}))
        assert found is not None
        assert found.what == "weights/w"


def test_components_come_in_the_order_of_the_state() -> None:
    one = state(**{name: {"x": 1} for name in COMPONENTS})
    for name in COMPONENTS:
        found = find_first_difference(one, dataclasses.replace(one, **{name: {"x": 2}, "auto_choices": {"x": 3}}))
        assert found is not None
        assert found.what == f"{name}/x"
