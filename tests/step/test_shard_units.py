"""The units of a model under FSDP2: repeated blocks, what stays in fp32, and a policy for each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from halfstep import island
from halfstep.errors import WrongUse
from halfstep.step.synchronizers.shard_units import list_shard_units
from tests.support.ranks import Ranks


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Transformer(nn.Module):
    def __init__(self, blocks: int = 10, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(48, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(32, 48, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Stage(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.merge = nn.Linear(32, 32)


def images() -> nn.Sequential:
    def block() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())

    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *(block() for _ in range(9)), nn.Flatten(), nn.Linear(512, 4))


def named(model: nn.Module) -> dict[str, str]:
    return {unit.name: unit.kind for unit in list_shard_units(model, torch.bfloat16) if unit.kind != "norms"}


def test_repeated_blocks_are_units_and_the_rest_is_the_model() -> None:
    assert named(Transformer(3)) == {**{f"blocks.{n}": "block" for n in (2, 1, 0)}, "": "root"}
    assert next(reversed(named(Transformer(3)))) == ""


def test_every_parameter_has_one_unit() -> None:
    model = nn.ModuleDict({"a": Transformer(tied=True), "b": images(), "c": nn.ModuleList([Stage(2), Stage(9)])})
    held: dict[int, str] = {}
    for unit in list_shard_units(model, torch.bfloat16):
        for parameter in unit.parameters():
            held.setdefault(id(parameter), unit.name)
    assert set(held) == {id(parameter) for parameter in model.parameters()}


def test_small_blocks_stay_with_the_model() -> None:
    model = Transformer(2)
    model.words = nn.Embedding(100_000, 32)
    assert named(model) == {"": "root"}


def test_a_stage_is_divided_into_its_blocks_and_a_block_is_not() -> None:
    found = named(nn.ModuleList([Stage(3), Stage(20)]))
    assert {"0", "1", "1.blocks.0", "1.blocks.19"} <= set(found)
    experts = nn.ModuleList(nn.ModuleDict({"experts": nn.ModuleList([Block(), Block()])}) for _ in range(10))
    assert set(named(experts)) == {*map(str, range(10)), ""}


def test_fp32_modules_are_units_gathered_as_they_are_stored() -> None:
    model = Transformer()
    island(model, "blocks.1.norm", "head")
    units = {unit.name: unit for unit in list_shard_units(model, torch.bfloat16) if unit.kind != "norms"}
    assert {name for name, unit in units.items() if unit.kind == "island"} == {"blocks.1.norm", "head"}
    assert list(units).index("blocks.1.norm") < list(units).index("blocks.1")
    assert {name for name, unit in units.items() if unit.wide} == {"blocks.1.norm", "head"}
    assert units["head"].policy(torch.bfloat16).param_dtype is None
    assert units["blocks.1"].policy(torch.bfloat16).param_dtype is torch.bfloat16
    assert all(unit.policy(torch.float16).reduce_dtype is torch.float32 for unit in units.values())


def test_the_norms_of_a_block_are_one_unit_that_stays_in_fp32() -> None:
    model = images()
    norms = [unit for unit in list_shard_units(model, torch.bfloat16) if unit.kind == "norms"]
    assert [unit.name for unit in norms] == [str(n) for n in range(9, 0, -1)]
    assert [unit.modules for unit in norms] == [(model[n][1],) for n in range(9, 0, -1)]
    assert norms[0].policy(torch.bfloat16).param_dtype is None
    assert not any(unit.kind == "norms" for unit in list_shard_units(nn.BatchNorm1d(4, affine=False), torch.bfloat16))
    several = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.RMSNorm(8))
    together = [unit for unit in list_shard_units(several, torch.bfloat16) if unit.kind == "norms"]
    assert [unit.modules for unit in together] == [(several[1], several[2], several[3])]


def test_a_tied_island_makes_the_unit_round_both_wide() -> None:
    model = Transformer(tied=True)
    island(model, "head")
    assert {unit.name for unit in list_shard_units(model, torch.bfloat16) if unit.wide and unit.kind != "norms"} == {""}


def test_a_model_that_is_an_island_has_wide_units_only() -> None:
    units = list_shard_units(island(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))), torch.bfloat16)
    assert [(unit.name, unit.wide) for unit in units] == [("2", True), ("0", True), ("", True)]


@pytest.mark.wording
def test_a_parameter_without_a_dimension_is_refused() -> None:
    model = Transformer()
    model.temperature = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(WrongUse, match="temperature"):
        list_shard_units(model, torch.bfloat16)


def sharded_run(rank: int) -> tuple[float, float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from halfstep import Stepper

    torch.manual_seed(0)
    model = images()
    island(model, "11")
    mesh = init_device_mesh("cpu", (2,))
    for unit in list_shard_units(model, torch.bfloat16):
        fully_shard(list(unit.modules), mesh=mesh, mp_policy=unit.policy(torch.bfloat16))
    stepper = Stepper(model, torch.optim.AdamW(model.parameters()), precision="bf16", observe=False)
    batch = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(rank))
    reports = [stepper.step(lambda net, x: net(x).float().square().mean(), batch) for _ in range(3)]
    assert all(report.applied for report in reports), [report.reason for report in reports]
    return reports[0].loss, reports[-1].loss


@pytest.mark.ranks
def test_the_plan_runs_in_bf16_with_batch_statistics_and_an_island() -> None:
    ranks = Ranks(2)
    try:
        first, second = ranks(sharded_run)
    finally:
        ranks.stop()
    assert first == second
    assert 0 < first[1] < first[0]


def test_in_fp32_nothing_needs_a_unit_for_its_format() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2)), island(nn.Linear(8, 8)))
    assert [unit.kind for unit in list_shard_units(model, torch.bfloat16)].count("norms") == 2
    assert [(unit.name, unit.kind) for unit in list_shard_units(model, None)] == [
        ("1", "block"),
        ("0", "block"),
        ("", "root"),
    ]
