"""Runs under FSDP2 and HSDP: what DDP trains, saved in chunks, and resumed on other ranks to the bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import halfstep
from halfstep import distributed
from halfstep.checkpoint.paths import list_generations
from halfstep.checkpoint.reading import read_rank_state
from halfstep.checkpoint.sealed import read_manifest
from halfstep.errors import HalfstepError
from halfstep.journal import table
from halfstep.journal.events import Journal
from halfstep.journal.text import describe_precision
from halfstep.precision.precision import PRECISIONS
from halfstep.recipe.sources import read_recipe
from halfstep.runs.resolve import resolve_run_recipe
from halfstep.step.experiment import reduction_error
from halfstep.train.checkpointing import estimate_checkpoint_size
from halfstep.train.evaluation import StopEvaluation, evaluate_model
from halfstep.train.loaders import make_val_loader
from halfstep.train.resume import find_checkpoint, resume_from
from halfstep.train.run import make_loop
from halfstep.train.state import State
from tests.support.ranks import Ranks
from tests.support.tiny_task import Tiny
from tests.train.test_loop import RECIPE, events

pytestmark = pytest.mark.ranks
GLOBAL_BATCH = 24
ADAM = {"optimizer.name": "adamw", "optimizer.lr": 0.01, "train.ema": 0.9, "checkpoint.keep": 10, "train.epochs": 2}
"""Moments, an average and a schedule; a parameter of one row, which most ranks hold nothing of."""

WIDE = {"model.width": 50_000}
"""So many weights that they make up the checkpoint."""


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    """Return a function that runs another one on any number of ranks; those of each number are started once."""
    started: dict[int, Ranks] = {}

    def on(size: int, function: Any, *arguments: Any) -> list[Any]:
        return started.setdefault(size, Ranks(size, deadline=400.0))(function, *arguments)

    yield on
    for ranks in started.values():
        ranks.stop()


def settings(folder: str, mode: str, **more: Any) -> dict[str, Any]:
    sized = {
        "train.batch_size": GLOBAL_BATCH // distributed.count_ranks(),
        "world.mode": mode,
        "run.dir": f"{folder}/run",
    }
    if mode == "hsdp":
        sized["world.shard_size"] = 2
    return {**ADAM, **sized, **more}


def fit(rank: int, folder: str, mode: str, more: dict[str, Any], task: type[Tiny] = Tiny) -> dict[str, Any]:
    recipe = Path(folder) / f"tiny-{rank}.yaml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text(RECIPE)
    try:
        run = halfstep.fit(recipe, task=task, settings=settings(folder, mode, **more), quiet=True)
    except HalfstepError as error:
        return {"error": str(error), "code": error.exit_code}
    return {"steps": run.steps, "loss": run.metrics["loss"]}


def weights(folder: Path) -> str:
    return str(json.loads((folder / "run" / "result.json").read_text())["weights"])


def interrupted(folder: Path, at: int) -> None:
    """Leave a finished run as a kill after its checkpoint of step `at` would have."""
    (folder / "run" / "result.json").unlink()
    for one in list_generations(folder / "run" / "checkpoints"):
        if one.attempt > at:
            shutil.rmtree(one.path)


def restored(rank: int, folder: str, mode: str, more: dict[str, Any] | None = None) -> list[str]:
    """Return the tensors of the checkpoint that a run built on these ranks does not hold to the bit."""
    recipe = Path(folder) / f"again-{rank}.yaml"
    recipe.write_text(RECIPE)
    asked = resolve_run_recipe(
        read_recipe(str(recipe)), settings(folder, mode, **(more or {})), schema=Tiny.schema
    ).recipe
    run = Path(folder) / "run"
    found = find_checkpoint(run)
    assert found is not None
    loop = make_loop(Tiny(asked), asked, run, Journal(), auto_choices=found.auto_choices)
    resume_from(loop, found, Path(folder) / "elsewhere", ())
    state = State.of(loop.live)
    plain, saved = read_rank_state(found.generation, 0)
    then = State.from_parts(plain, saved, "the checkpoint")
    pairs = {
        "parameters": (state.weights["parameters"], then.weights["parameters"]),
        "averages": ((state.ema or {})["averages"], (then.ema or {})["averages"]),
        "moments": (_moments(state), _moments(then)),
    }
    return [
        f"{what} {name}"
        for what, (now, before) in pairs.items()
        for name in before
        if not torch.equal(distributed.gather_full_tensor(now[name]), before[name])
    ]


def expected_size(rank: int, folder: str, mode: str) -> int:
    """Return the bytes that this rank expects to write for a checkpoint of a run that has not begun."""
    recipe = Path(folder) / f"sized-{rank}.yaml"
    recipe.write_text(RECIPE)
    asked = resolve_run_recipe(read_recipe(str(recipe)), settings(folder, mode, **WIDE), schema=Tiny.schema).recipe
    return estimate_checkpoint_size(make_loop(Tiny(asked), asked, Path(folder) / "run", Journal()).live)


def _moments(state: State) -> dict[str, torch.Tensor]:
    found = state.optimizers["loss"]["state"]
    return {f"{number} {key}": value for number, kept in found.items() for key, value in kept.items()}


def test_every_mode_trains_what_one_process_trains(world: Any, tmp_path: Path) -> None:
    more = {"train.epochs": 7}
    alone = fit(0, str(tmp_path / "alone"), "auto", more)
    ran = {
        mode: world(size, fit, str(tmp_path / mode), mode, more)
        for size, mode in ((2, "ddp"), (2, "fsdp"), (4, "hsdp"))
    }
    for mode, found in ran.items():
        assert all(one == found[0] for one in found), (mode, found)
        assert found[0]["steps"] == alone["steps"] == 21
        assert found[0]["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert away(tmp_path / mode, tmp_path / "alone") < 1e-5
    # Every sum over two ranks has the same two terms, so that not even its order differs.
    assert weights(tmp_path / "fsdp") == weights(tmp_path / "ddp")
    notes = events(tmp_path / "fsdp" / "run", "start")[0]["notes"]
    assert any("every rank holds 1/2 of the weights" in note for note in notes), notes


def away(run: Path, other: Path) -> float:
    """Return the norm of the difference between the last weights of two runs, relative to the weights."""
    one, two = (load_file(folder / "run" / "last.safetensors") for folder in (run, other))
    differences = torch.cat([(one[name] - two[name]).flatten() for name in two])
    return float(differences.norm() / torch.cat([tensor.flatten() for tensor in two.values()]).norm())


def test_weights_are_gathered_as_autocast_would_cast_them(world: Any, tmp_path: Path) -> None:
    """In bf16, with a norm that stays in fp32: the same bits as under DDP."""
    more = {"precision": "bf16", "model.batchnorm": True}
    for mode in ("ddp", "fsdp"):
        found = world(2, fit, str(tmp_path / mode), mode, more)
        assert found[0]["steps"] == 6, found
    assert weights(tmp_path / "fsdp") == weights(tmp_path / "ddp")
    # The first line and the journal name the formats of each group.
    (whole,), (start,) = (events(tmp_path / mode / "run", "start") for mode in ("ddp", "fsdp"))
    assert whole["shards"] is None
    assert "shards" not in describe_precision(whole)
    assert {group["reduced"] for group in start["shards"]["groups"]} == {"fp32"}
    gathered = {group["group"]: group["gathered"] for group in start["shards"]["groups"]}
    assert sorted(map(tuple, gathered.values())) == [("bf16",), ("bf16",), ("fp32",)], gathered
    for line in (describe_precision(start), table.describe_precision(start)):
        assert line.endswith("; shards gathered in bf16 and fp32, summed in fp32")


def fit_otherwise(rank: int, folder: str, key: str) -> dict[str, Any]:
    return fit(rank, folder, "ddp", {"train.epochs": 1, key: rank + 1})


@pytest.mark.wording
def test_a_rank_that_was_given_other_settings_is_named(world: Any, tmp_path: Path) -> None:
    found = world(2, fit_otherwise, str(tmp_path), "run.log_every")
    assert [one["code"] for one in found] == [78, 78], found
    assert found[0]["error"].startswith("rank 1: started differently from rank 0:\n    run.log_every: 1 -> 2")
    assert not (tmp_path / "run").exists()


def test_a_seed_that_each_rank_draws_is_no_other_setting(world: Any, tmp_path: Path) -> None:
    found = world(2, fit, str(tmp_path), "ddp", {"train.epochs": 1, "train.seed": None})
    assert found[0]["steps"] == 3, found


def test_four_ranks_hold_a_quarter_each(world: Any, tmp_path: Path) -> None:
    held = world(4, held_after_training, str(tmp_path))
    parameters, moments = zip(*held, strict=True)
    whole = 4 * sum(parameter.numel() for parameter in Square(None).model().parameters())  # type: ignore[arg-type]
    assert all(one == pytest.approx(whole / 4, rel=0.05) for one in parameters), held
    assert all(one == pytest.approx(2 * whole / 4, rel=0.05) for one in moments), held


class Square(Tiny):
    """The tiny task with a model whose weights are almost all in one matrix."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 500), nn.Tanh(), nn.Linear(500, 500), nn.Linear(500, 1))


def held_after_training(rank: int, folder: str) -> tuple[int, int]:
    """Return the bytes of the storages of this rank's parameters and moments: what is there, not what it shows."""
    held = [0, 0]
    recipe = Path(folder) / f"held-{rank}.yaml"
    recipe.write_text(RECIPE)
    asked = resolve_run_recipe(read_recipe(str(recipe)), settings(folder, "fsdp"), schema=Tiny.schema).recipe
    loop = make_loop(Square(asked), asked, Path(folder) / "run", Journal())
    for _ in loop.attempts():
        held = [_held(loop.model.parameters()), _held(_moments(State.of(loop.live)).values())]
    return held[0], held[1]


def _held(tensors: Iterable[torch.Tensor]) -> int:
    found = [distributed.unwrap_local_tensor(tensor.detach()) for tensor in tensors]
    # Views of one storage are counted once.
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in found}.values())


def test_a_sum_in_bf16_is_measured_and_noted(world: Any, tmp_path: Path) -> None:
    ran = {every: world(2, fit_measured, str(tmp_path / str(every)), every) for every in (1, 2**40)}
    assert ran[1] == ran[2**40] == [ran[1][0]] * 2
    # Measuring changes nothing of the run.
    assert weights(tmp_path / "1") == weights(tmp_path / str(2**40))
    said = [one["text"] for one in events(tmp_path / "1" / "run", "note") if "summed in bf16" in one["text"]]
    groups = events(tmp_path / "1" / "run", "start")[0]["shards"]["groups"]
    assert {group["reduced"] for group in groups} == {"bf16"}
    [size] = [float(text.split("bf16 are ")[1].split("%")[0]) for text in said]
    assert 0.0 < size < 1.0, said


def fit_measured(rank: int, folder: str, every: int) -> dict[str, Any]:
    usual, reduction_error.EVERY = reduction_error.EVERY, every
    try:
        return fit(rank, folder, "fsdp", {"world.reduce": "bf16"})
    finally:
        reduction_error.EVERY = usual


@pytest.mark.wording
def test_a_sum_in_bf16_is_for_shards(world: Any, tmp_path: Path) -> None:
    refused = world(2, fit, str(tmp_path / "ddp"), "ddp", {"world.reduce": "bf16"})
    assert [one["code"] for one in refused] == [78, 78], refused
    assert "which sums gradients in fp32" in refused[0]["error"]
    world(2, fit, str(tmp_path / "auto"), "auto", {"world.reduce": "bf16", "train.epochs": 1})
    notes = events(tmp_path / "auto" / "run", "start")[0]["notes"]
    assert any("gradients are summed in fp32" in note for note in notes), notes


class Block(nn.Module):
    """A layer that is repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.inner(self.norm(x)).tanh()
        return out


class Blocks(Tiny):
    """The tiny task with a model of two blocks."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 16), Block(), Block(), nn.Linear(16, 1))


@pytest.mark.full
@pytest.mark.timeout(600)
def test_blocks_are_compiled_and_learn_the_same(world: Any, tmp_path: Path) -> None:
    plain, compiled = (world(2, fit_blocks, str(tmp_path / str(one)), one) for one in (False, True))
    assert [one["graphs"] > 0 for one in (*plain, *compiled)] == [False, False, True, True]
    assert compiled[0]["loss"] == pytest.approx(plain[0]["loss"], rel=1e-4)


def fit_blocks(rank: int, folder: str, compiled: bool) -> dict[str, Any]:
    from torch._dynamo.utils import counters

    counters.clear()
    found = fit(rank, folder, "fsdp", {"train.compile": compiled}, task=Blocks)
    return {**found, "graphs": counters["stats"]["unique_graphs"]}


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_the_room_for_a_checkpoint_is_asked_for_once_and_not_for_every_rank(
    world: Any, tmp_path: Path, mode: str
) -> None:
    world(2, fit, str(tmp_path), mode, {"train.epochs": 1, **WIDE})
    newest = list_generations(tmp_path / "run" / "checkpoints")[0]
    written = sum(sealed.size for sealed in read_manifest(newest).files if sealed.name.endswith(".safetensors"))
    assert sum(world(2, expected_size, str(tmp_path), mode)) == pytest.approx(written, rel=0.05)


@pytest.mark.parametrize(("size", "mode"), [(4, "fsdp"), (4, "hsdp"), (2, "ddp")])
def test_a_checkpoint_is_restored_to_the_bit_on_other_ranks(world: Any, tmp_path: Path, size: int, mode: str) -> None:
    world(size, fit, str(tmp_path), mode, {})
    interrupted(tmp_path, at=3)
    assert bool(read_manifest(list_generations(tmp_path / "run" / "checkpoints")[0]).chunks) == (mode != "ddp")
    for now, then in ((2, "fsdp"), (1, "auto"), (3, "fsdp"), (4, "hsdp"), (2, "ddp"), (4, "fsdp")):
        differ = restored(0, str(tmp_path), then) if now == 1 else world(now, restored, str(tmp_path), then)[0]
        assert differ == [], (now, then)


def test_a_run_goes_on_with_fewer_ranks_and_the_same_samples(world: Any, tmp_path: Path) -> None:
    whole = world(4, fit, str(tmp_path / "whole"), "fsdp", {})
    world(4, fit, str(tmp_path / "cut"), "fsdp", {})
    interrupted(tmp_path / "cut", at=3)
    went_on = world(2, fit, str(tmp_path / "cut"), "ddp", {})
    assert went_on[0]["loss"] == pytest.approx(whole[0]["loss"], rel=1e-5)
    began = events(tmp_path / "cut" / "run", "start")[-1]
    assert began["resumed"]["attempt"] == 3
    assert any("saved by 4 ranks, and resumes with 2" in reason for reason in began["resumed"]["reasons"])
    assert began["resumed"]["exact"] is False


def test_four_ranks_that_go_on_with_copies_in_place_of_shards_do_not_claim_the_same_bits(
    world: Any, tmp_path: Path
) -> None:
    world(4, fit, str(tmp_path), "fsdp", {})
    interrupted(tmp_path, at=3)
    assert world(4, fit, str(tmp_path), "ddp", {})[0]["steps"] == 6
    began = events(tmp_path / "run", "start")[-1]["resumed"]
    assert began["exact"] is False
    assert any("more than two ranks" in reason for reason in began["reasons"]), began


@pytest.mark.parametrize(("before", "after"), [("fsdp", "ddp"), ("ddp", "fsdp")])
def test_two_ranks_with_copies_in_place_of_shards_do_not_claim_the_same_bits(
    world: Any, tmp_path: Path, before: str, after: str
) -> None:
    world(2, fit, str(tmp_path), before, {})
    interrupted(tmp_path, at=3)
    assert world(2, fit, str(tmp_path), after, {})[0]["steps"] == 6
    began = events(tmp_path / "run", "start")[-1]["resumed"]
    assert began["exact"] is False
    assert any("2 ranks to a copy of the weights" in reason for reason in began["reasons"]), began


def test_the_same_ranks_go_on_to_the_same_bits(world: Any, tmp_path: Path) -> None:
    whole = world(2, fit, str(tmp_path / "whole"), "fsdp", {})
    world(2, fit, str(tmp_path / "cut"), "fsdp", {})
    interrupted(tmp_path / "cut", at=3)
    assert world(2, fit, str(tmp_path / "cut"), "fsdp", {}) == whole
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")
    assert events(tmp_path / "cut" / "run", "start")[-1]["resumed"]["exact"] is True


@pytest.mark.wording
def test_another_global_batch_is_refused_with_the_setting_that_keeps_it(world: Any, tmp_path: Path) -> None:
    world(4, fit, str(tmp_path), "fsdp", {})
    interrupted(tmp_path, at=3)
    found = world(2, fit, str(tmp_path), "fsdp", {"train.batch_size": GLOBAL_BATCH // 4})
    assert [one["code"] for one in found] == [79, 79]
    assert "add train.microbatches=2" in found[0]["error"]


def test_samples_that_do_not_divide_are_each_evaluated_once(world: Any, tmp_path: Path) -> None:
    """Sixteen validation samples on three ranks in batches of one: the ranks run out at different batches."""
    uneven = {"train.batch_size": 1, "train.steps": 2, "train.epochs": None}
    three = world(3, fit, str(tmp_path / "three"), "fsdp", uneven)
    plain = world(3, fit, str(tmp_path / "plain"), "ddp", uneven)
    assert three[0]["loss"] == pytest.approx(plain[0]["loss"], rel=1e-6)


def stopped_evaluation(rank: int) -> str:
    from torch.distributed.fsdp import fully_shard

    # Eight samples a rank, in batches of two.
    sections: dict[str, Any] = {"model": {}, "data": {}, "loss": {}, "train": {"batch_size": 2}}
    recipe = Tiny.schema.model_validate({"task": "tiny", **sections})
    task = Tiny(recipe)
    model, here = fully_shard(task.model()), torch.empty(0).device
    batches = make_val_loader(task, recipe, here)
    asked = iter([False, False, rank == 1])
    try:
        evaluate_model(task, model, batches, precision=PRECISIONS["fp32"], device=here, stop=lambda: next(asked, True))
    except StopEvaluation:
        return f"stopped, {sum(1 for _ in asked)} left"
    return "evaluated"


def test_an_evaluation_in_shards_stops_on_all_ranks_at_the_same_batch(world: Any) -> None:
    assert world(2, stopped_evaluation) == ["stopped, 0 left"] * 2


class Wider(Tiny):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))


def gathered(folder: Path) -> float:
    """Return the kilobytes that an update gathers, as the journal has them."""
    [text] = [one["text"] for one in events(folder / "run", "precision_check")][:1]
    return float(text.partition("gathers ")[2].split()[0])


@pytest.mark.full
def test_a_run_in_fp8_gathers_in_fp8_and_continues_on_other_ranks(world: Any, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    kinds = ("bf16", "fp8")
    for kind in kinds:
        more = {"precision": kind, "train.strict": True, "train.check": False}
        found = world(2, fit, str(tmp_path / kind), "fsdp", more, Wider)
        assert found[0] == found[1]
        assert "loss" in found[0], found[0]
    narrow, wide = (gathered(tmp_path / kind) for kind in reversed(kinds))
    assert narrow < 0.6 * wide
    saved = load_file(tmp_path / "fp8" / "run" / "last.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert set(saved) == set(Wider.model(None).state_dict())  # type: ignore[arg-type]
    whole = (tmp_path / "fp8" / "run" / "result.json").read_text()
    interrupted(tmp_path / "fp8", at=3)
    world(2, fit, str(tmp_path / "fp8"), "fsdp", more, Wider)
    assert json.loads((tmp_path / "fp8" / "run" / "result.json").read_text())["weights"] == json.loads(whole)["weights"]
    for size in (1, 2):
        interrupted(tmp_path / "fp8", at=3)
        again = world(size, fit, str(tmp_path / "fp8"), "fsdp" if size > 1 else "ddp", more, Wider)
        # Each rank scales its own part of a batch.
        assert again[0]["loss"] == pytest.approx(found[0]["loss"], rel=1e-2)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_64_ranks_in_groups_of_8_are_restored_to_the_bit_on_others(world: Any, tmp_path: Path) -> None:
    """Saved by HSDP 8 x 8; restored on fewer ranks, on one, and on 64 in each mode."""

    def sized(size: int, mode: str) -> dict[str, Any]:
        grouped = {"world.shard_size": 8} if mode == "hsdp" else {}
        return {"data.samples": 256, "train.batch_size": 128 // size, **grouped}

    found = world(64, fit, str(tmp_path), "hsdp", sized(64, "hsdp"))
    assert all(one == found[0] for one in found), found[0]
    interrupted(tmp_path, at=2)
    [newest, *_] = list_generations(tmp_path / "run" / "checkpoints")
    table = read_manifest(newest).chunks
    assert {rank for one in table.values() for rank in one.ranks} > set(range(8)), "replicas share the writing"
    for size, mode in ((32, "hsdp"), (16, "fsdp"), (1, "ddp"), (64, "ddp"), (64, "fsdp"), (64, "hsdp")):
        assert not any(world(size, restored, str(tmp_path), mode, sized(size, mode))), (size, mode)
