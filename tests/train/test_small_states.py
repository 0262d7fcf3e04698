"""Moments of Adam in 8 bits: which tensors have them, their bytes, and that nothing is lost in a checkpoint."""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import halfstep
from faults import rig
from halfstep import Stepper
from halfstep.checkpoint.packing import pack_state, unpack_state
from halfstep.checkpoint.paths import CHECKPOINTS, list_generations
from halfstep.checkpoint.reading import read_rank_state
from halfstep.errors import BadRecipe, MissingExtra, StateMismatch
from halfstep.journal.jsonl import JOURNAL, read_events
from halfstep.precision.precision import resolve_precision_name
from halfstep.recipe.schema import OptimizerOptions
from halfstep.step.storage.small_states import KIND, find_small_state_kind, split_small_state
from halfstep.train.optimizers import make_optimizer
from halfstep.train.state import State
from tests.support.digest import digest_of_run
from tests.support.ranks import Ranks
from tests.support.tiny_task import Tiny
from tests.train.test_run_resumed import Stopping, fit, stopped
from tests.train.test_sharded_runs import fit as fit_on
from tests.train.test_sharded_runs import interrupted, settings

KINDS = {"int8": "OptimState8bit", "fp8": "OptimStateFp8"}
FORMATS = pytest.mark.parametrize("state", KINDS)


@pytest.fixture(autouse=True)
def _with_torchao(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("without_torchao") is None:
        pytest.importorskip("torchao")


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(256, 64), nn.LayerNorm([64, 64])
        self.up, self.down, self.small = nn.Linear(64, 512), nn.Linear(512, 64), nn.Linear(64, 8)
        self.odd, self.conv = nn.Linear(64, 65), nn.Conv2d(1, 512, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.down(self.up(self.norm(self.table(ids)[None])).relu())
        return self.small(x).float().mean() + self.odd(x).float().square().mean() + self.conv(x[:, None]).float().mean()


def text_stepper(state: str, seed: int = 0, weight_format: str = "fp32") -> Stepper:
    torch.manual_seed(seed)
    model = Text().to(memory_format=torch.channels_last)
    optimizer = make_optimizer(OptimizerOptions(name="adamw", lr=1e-3, state=state), model)  # type: ignore[arg-type]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return Stepper(
        model,
        optimizer,
        precision=resolve_precision_name("bf16"),
        schedule=schedule,
        clip_norm=1.0,
        weight_format=weight_format,
    )


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids)


def ids(number: int) -> Tensor:
    return torch.randint(0, 256, (64,), generator=torch.Generator().manual_seed(number))


@FORMATS
def test_matrices_have_small_moments_and_others_fp32(state: str) -> None:
    stepper = text_stepper(state)
    for number in range(3):
        assert stepper.step(loss_of, ids(number)).applied
    optimizer = stepper.optimizers["loss"]
    small = {
        name
        for name, p in stepper.model.named_parameters()
        if find_small_state_kind(optimizer.state[p]["exp_avg"]) == KINDS[state]
    }
    assert small == {"up.weight", "down.weight", "conv.weight"}
    assert isinstance(optimizer.param_groups[0]["lr"], float)
    loaded = text_stepper(state, seed=1)
    plain, tensors = pack_state(stepper.state_dict(), "state")
    loaded.load_state_dict(unpack_state(plain, {name: tensor.clone() for name, tensor in tensors.items()}, "a file"))
    for one in (stepper, loaded):
        own = one.optimizers["loss"].state
        quantized = [p for name, p in one.model.named_parameters() if name in small]
        parts = [value for p in quantized for key in ("exp_avg", "exp_avg_sq") for value in plain_of(own[p][key])]
        unique = {part.data_ptr(): part.nbytes for part in parts}
        assert sum(unique.values()) <= 0.26 * sum(8 * p.numel() for p in quantized)


def plain_of(value: Tensor) -> list[Tensor]:
    return [part for part in split_small_state(value).values() if isinstance(part, Tensor)]


@pytest.mark.parametrize("weight_format", ["fp32", "bf16-split", "bf16-stochastic"])
@FORMATS
def test_stop_save_load_go_on(state: str, weight_format: str) -> None:
    straight, first = text_stepper(state, 0, weight_format), text_stepper(state, 0, weight_format)
    second = text_stepper(state, 1, weight_format)
    for number in range(8):
        straight.step(loss_of, ids(number))
    for number in range(4):
        first.step(loss_of, ids(number))
    saved = copy.deepcopy(first.state_dict())
    kept = saved["optimizers"]["loss"]["optimizer"]["state"]
    assert {value[KIND] for one in kept.values() for value in one.values() if isinstance(value, dict)} == {KINDS[state]}
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(saved)
    for number in range(4, 8):
        second.step(loss_of, ids(number))
    assert digest_of_run(second) == digest_of_run(straight)


def test_a_state_of_another_kind_is_refused() -> None:
    for one, other in (("int8", "fp8"), ("int8", "fp32"), ("fp32", "int8")):
        own = text_stepper(one)
        with pytest.raises(StateMismatch):
            own.load_state_dict(text_stepper(other).state_dict())


def test_an_optimizer_of_torchao_itself_is_saved_too() -> None:
    import torchao.optim

    def make(seed: int) -> Stepper:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
        return Stepper(model, torchao.optim.AdamW8bit(model.parameters(), lr=1e-3), precision="fp32")

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    first, second = make(0), make(1)
    x = torch.randn(8, 64)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(3):
            first.step(loss, x)
        second.model.load_state_dict(first.model.state_dict())
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        for stepper in (first, second):
            stepper.step(loss, x)
    assert digest_of_run(first) == digest_of_run(second)


def test_only_adam_has_small_moments() -> None:
    for name in ("sgd", "muon", "rmsprop"):
        with pytest.raises(BadRecipe):
            make_optimizer(OptimizerOptions(name=name, state="int8"), Text())  # type: ignore[arg-type]


@pytest.mark.wording
def test_without_torchao_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao.optim", None)
    with pytest.raises(MissingExtra) as refused:
        make_optimizer(OptimizerOptions(name="adamw", state="int8"), Text())
    assert "narrow" in refused.value.do


# -- runs -----------------------------------------------------------------------------------------------------------

RUN = {"optimizer__name": "adamw", "model__width": 4096, "train__ema": 0.9, "precision": "bf16"}
KILLED_AT = 8


class Killed(Tiny):
    """Ends with SIGKILL in its eighth step, while the checkpoint of the sixth is there."""

    batches = 0

    def loss(self, model: nn.Module, batch: Any, metrics: Any = None) -> Tensor:
        self.batches += int(model.training)
        if self.batches == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch, metrics)


@pytest.mark.parametrize(
    ("state", "weight_format"),
    [
        ("int8", "fp32"),
        ("fp8", "fp32"),
        ("int8", "bf16-stochastic"),
        ("fp32", "bf16-split"),
        pytest.param("fp8", "bf16-split", marks=pytest.mark.full),
    ],
)
def test_a_run_that_was_killed_ends_as_one_that_was_not(tmp_path: Path, state: str, weight_format: str) -> None:
    more = {key.replace("__", "."): value for key, value in RUN.items()}
    more |= {"optimizer.state": state, "train.weight_format": weight_format, "train.steps": 12}
    more["checkpoint.background"] = False
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    assert rig.run(cut, more, task=Killed) == -signal.SIGKILL, rig.said(cut)
    plain, tensors = read_rank_state(list_generations(cut / CHECKPOINTS)[0], 0)
    then = State.from_parts(plain, tensors, "the checkpoint").optimizers["loss"]["state"]
    kinds = {value[KIND] for kept in then.values() for value in kept.values() if isinstance(value, dict)}
    assert kinds == ({KINDS[state]} if state in KINDS else set())
    assert {p.dtype for name, p in tensors.items() if name.startswith("weights/parameters/")} == {torch.float32}
    for folder in (cut, whole):
        assert rig.run(folder, more) == 0, rig.said(folder)
    starts = [event for event in read_events(cut / JOURNAL) if event["event"] == "start"]
    assert starts[-1]["resumed"]["checkpoint"]
    assert rig.ending(cut) == rig.ending(whole)


@pytest.mark.parametrize("weight_format", ["fp32", "bf16-split"])
def test_a_failed_step_is_replayed(tmp_path: Path, weight_format: str) -> None:
    more = {"optimizer__state": "int8", "train__weight_format": weight_format, "data__nan": [5], "train__check": False}
    fit(tmp_path, **RUN, **more)
    replayed = halfstep.replay(tmp_path / "run", task=Tiny)
    assert replayed.verdict is not None
    assert replayed.same_culprit
    own, *others = replayed.reruns
    assert (own.finite, own.precision) == (False, "bf16")
    assert "fp32" in [other.precision for other in others]


def test_a_run_in_another_weight_format_continues_from_the_same_bits(tmp_path: Path) -> None:
    stopped(tmp_path, Stopping, **RUN)
    with pytest.raises(StateMismatch):
        fit(tmp_path, **RUN, train__weight_format="bf16-split")
    run = fit(tmp_path, accept=True, **RUN, train__weight_format="bf16-split")
    assert run.steps == 16
    files = load_file(tmp_path / "run" / "last.safetensors")
    assert {tensor.dtype for tensor in files.values()} == {torch.float32}


def test_files_of_weights_have_all_bits(tmp_path: Path) -> None:
    fit(tmp_path, **RUN, train__weight_format="bf16-split")
    files = load_file(tmp_path / "run" / "last.safetensors")
    low = torch.cat([tensor.flatten().view(torch.int32) & 0xFFFF for tensor in files.values()])
    assert (low != 0).float().mean() > 0.9


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(600)
@FORMATS
def test_saved_by_two_ranks_loaded_by_one_and_back(tmp_path: Path, state: str) -> None:
    more = {"optimizer.state": state, "model.width": 8192, "train.epochs": 3}
    two = Ranks(2, deadline=200.0)
    try:
        found = two(fit_on, str(tmp_path), "fsdp", more)
        assert found[0]["steps"] == 9, found
        interrupted(tmp_path, 3)
        before = moments(tmp_path)
        assert any(name.endswith("codes") for name in before)
        alone = fit_on(0, str(tmp_path), "auto", {**more, "checkpoint.every_steps": 1, "train.epochs": 3})
        assert alone["steps"] == 9, alone
        interrupted(tmp_path, 6)
        assert two(unequal, str(tmp_path), more) == [[], []]
        back = two(fit_on, str(tmp_path), "fsdp", more)
        assert back[0]["steps"] == 9, back
    finally:
        two.stop()


def moments(folder: Path) -> dict[str, Tensor]:
    """Return the optimizer's tensors of the newest checkpoint, whole."""
    _, tensors = read_rank_state(list_generations(folder / "run" / "checkpoints")[0], 0)
    return {name: tensor for name, tensor in tensors.items() if name.startswith("optimizers/")}


def unequal(rank: int, folder: str, more: dict[str, Any]) -> list[str]:
    """Return the moments that ranks in shards do not hold as the newest checkpoint has them."""
    from halfstep import distributed
    from halfstep.checkpoint.packing import pack_state
    from halfstep.journal.events import Journal
    from halfstep.recipe.sources import read_recipe
    from halfstep.runs.resolve import resolve_run_recipe
    from halfstep.train.resume import find_checkpoint, resume_from
    from halfstep.train.run import make_loop
    from tests.train.test_loop import RECIPE

    recipe = Path(folder) / f"again-{rank}.yaml"
    recipe.write_text(RECIPE)
    asked = resolve_run_recipe(read_recipe(str(recipe)), settings(folder, "fsdp", **more), schema=Tiny.schema).recipe
    run = Path(folder) / "run"
    found = find_checkpoint(run)
    assert found is not None
    loop = make_loop(Tiny(asked), asked, run, Journal(), auto_choices=found.auto_choices)
    resume_from(loop, found, Path(folder) / "elsewhere", ())
    _, now = pack_state(State.of(loop.live).optimizers, "optimizers")
    then = moments(Path(folder))
    assert now.keys() == then.keys()
    mine = {
        name: held.chunk(2) if distributed.is_dtensor_shard(now[name]) else (held, held) for name, held in then.items()
    }
    # Of a parameter of one row, the second rank has nothing.
    shares = {name: parts[rank] if rank < len(parts) else parts[0][:0] for name, parts in mine.items()}
    return [name for name, held in shares.items() if bits(distributed.unwrap_local_tensor(now[name])) != bits(held)]


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
