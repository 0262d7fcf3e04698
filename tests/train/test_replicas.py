"""A bit that flips on one rank ends the run, is named, is not saved, and does not reach a finished run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import halfstep
from halfstep import distributed
from halfstep.errors import HalfstepError
from halfstep.train import replicas
from halfstep.train.replicas import _compute_checksum
from tests.support.ranks import Ranks
from tests.support.tiny_task import Tiny
from tests.train.test_loop import RECIPE, events

pytestmark = pytest.mark.ranks
SETTINGS = {"optimizer.name": "adamw", "train.ema": 0.9, "checkpoint.every_steps": 4, "train.epochs": 3}
"""24 steps on four ranks with two samples each."""


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.stop()


def flip(tensor: torch.Tensor, bit: int) -> None:
    with torch.no_grad():
        distributed.unwrap_local_tensor(tensor).detach().view(-1)[:1].view(torch.int32).bitwise_xor_(bit)


class Flipping(Tiny):
    """One bit of one tensor flips on one rank, once, while the loss of a step is computed."""

    rank, step, what = -1, 10, "weight"

    def loss(self, model: nn.Module, batch: Any, metrics: Any = None) -> Any:
        if model.training:
            self.seen = getattr(self, "seen", 0) + 1
            if self.seen == self.step and distributed.rank() == self.rank:
                self.flip(model)
        return super().loss(model, batch, metrics)

    def flip(self, model: nn.Module) -> None:
        # The last bit: the smallest change that there is.
        parameter = next(p for name, p in model.named_parameters() if name.endswith("0.weight"))
        flip(self.moment(parameter) if self.what == "moment" else parameter, 1)

    def moment(self, parameter: torch.Tensor) -> torch.Tensor:
        # Of the optimizers of all runs in this process, the one that holds this parameter.
        optimizers = [one for one in gc.get_objects() if isinstance(one, torch.optim.AdamW)]
        [moment] = [one.state[parameter]["exp_avg"] for one in optimizers if parameter in one.state]
        return moment


def run_on(
    rank: int, folder: str, mode: str, where: int, what: str = "weight", step: int = 10, **more: Any
) -> dict[str, Any]:
    recipe = Path(folder) / f"tiny-{rank}.yaml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text(RECIPE)
    Flipping.rank, Flipping.what, Flipping.step = where, what, step
    asked = {**SETTINGS, "run.dir": f"{folder}/run", "train.batch_size": 2, "world.mode": mode}
    asked |= {"world.shard_size": 2} if mode == "hsdp" else {}
    asked |= {key.replace("__", "."): value for key, value in more.items()}
    try:
        run = halfstep.fit(recipe, task=Flipping, settings=asked, quiet=True)
    except HalfstepError as error:
        return {"code": error.exit_code, "error": error.given}
    return {"code": 0, "steps": run.steps}


@pytest.mark.parametrize(
    ("mode", "what"),
    [("ddp", "weight"), pytest.param("ddp", "moment", marks=pytest.mark.full), ("hsdp", "weight")],
)
@pytest.mark.wording
def test_a_flipped_bit_is_named_and_never_finishes(four: Ranks, tmp_path: Path, mode: str, what: str) -> None:
    flipped = four(run_on, str(tmp_path / "flipped"), mode, 2, what)
    assert [one["code"] for one in flipped] == [80] * 4, flipped
    assert len({one["error"] for one in flipped}) == 1
    named = {"weight": "the weight 0.weight", "moment": "exp_avg of 0.weight"}[what]
    # In HSDP a shard has two copies, which cannot tell which of them is right.
    assert (f"{named} is another one on rank 2" if mode == "ddp" else f"{named} differs between ranks 0, 2") in (
        flipped[0]["error"]
    )
    saved = [event["attempt"] for event in events(tmp_path / "flipped" / "run", "saved") if "attempt" in event]
    assert saved
    assert max(saved) < 10, "what differs was saved"
    assert not (tmp_path / "flipped" / "run" / "result.json").exists()
    # The same command goes on from the last checkpoint, and ends as if nothing had been.
    assert four(run_on, str(tmp_path / "flipped"), mode, -1, what)[0] == {"code": 0, "steps": 24}
    four(run_on, str(tmp_path / "clean"), mode, -1, what)
    again, clean = (load_file(tmp_path / run / "run" / "last.safetensors") for run in ("flipped", "clean"))
    # DDP may order the sums of four ranks anew after a restart; FSDP2 does not.
    same = torch.equal if mode == "hsdp" else torch.allclose
    assert all(same(again[name], clean[name]) for name in clean)


@pytest.mark.wording
def test_a_comparison_comes_after_some_steps_without_a_save(four: Ranks, tmp_path: Path) -> None:
    never = {"checkpoint__every_steps": 1000, "data__samples": 256}
    found = four(run_on, str(tmp_path), "ddp", 1, step=replicas.FIRST - 1, **never)
    assert [one["code"] for one in found] == [80] * 4
    assert f"after step {replicas.FIRST}" in found[0]["error"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
def test_every_single_bit_changes_the_sum(dtype: torch.dtype) -> None:
    tensor = (torch.randn(5, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)
    clean = _compute_checksum(tensor).item()
    raw = tensor.view(torch.uint8)
    for place in range(raw.numel()):
        for bit in range(8):
            raw[place] ^= 1 << bit
            assert _compute_checksum(tensor).item() != clean
            raw[place] ^= 1 << bit
    assert _compute_checksum(tensor).item() == clean


def test_a_memory_format_is_no_difference_in_the_sum() -> None:
    image = torch.randn(2, 3, 4, 5)
    assert (
        _compute_checksum(image).item() == _compute_checksum(image.contiguous(memory_format=torch.channels_last)).item()
    )
