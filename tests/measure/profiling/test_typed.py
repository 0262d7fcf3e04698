"""Commands to type next."""

from __future__ import annotations

from dataclasses import replace

from halfstep.measure.profiling import typed
from halfstep.measure.profiling.facts import Facts

HEALTHY = Facts(asked="bf16", format="bf16", kind="cpu", subject=("mine:case",))


def test_commands_carry_precision_and_device_and_no_setting_twice() -> None:
    words = ("mine.yaml", "--bf16", "train.num_workers=1", "--lr", "0.1", "--precision", "bf16", "precision=bf16")
    recipe = replace(HEALTHY, own_code=False, subject=words, device="cuda:1", asked="fp16")
    assert typed.changed(recipe, "train.num_workers=4") == (
        "halfstep train mine.yaml --bf16 --lr 0.1 --precision bf16 precision=bf16 train.num_workers=4"
    )
    assert typed.trained(recipe) == "halfstep train mine.yaml train.num_workers=1 --lr 0.1 precision=fp16"
    mine = replace(HEALTHY, device="cuda:1")
    assert typed.again(mine) == "halfstep profile mine:case --precision bf16 --device cuda:1"
    assert typed.planned(mine) == "halfstep plan mine:case --device cuda:1"
    assert typed.grown(mine).endswith("--grow-batch")
