"""Commands to type next."""

from __future__ import annotations

from dataclasses import replace

from halfstep.measure.profile import next_command
from halfstep.measure.profile.facts import ProfileFacts

HEALTHY = ProfileFacts(asked="bf16", format="bf16", kind="cpu", subject=("mine:case",))


def test_commands_carry_precision_and_device_and_no_setting_twice() -> None:
    words = ("unet", "--bf16", "train.num_workers=1", "--lr", "0.1", "--precision", "bf16", "precision=bf16")
    recipe = replace(HEALTHY, own_code=False, subject=words, device="cuda:1", asked="fp16")
    assert next_command.suggest_train_setting(recipe, "train.num_workers=4") == (
        "halfstep train unet --bf16 --lr 0.1 --precision bf16 precision=bf16 train.num_workers=4"
    )
    assert next_command.suggest_training(recipe) == "halfstep train unet train.num_workers=1 --lr 0.1 precision=fp16"
    mine = replace(HEALTHY, device="cuda:1")
    assert next_command.suggest_profile_again(mine) == "halfstep profile mine:case --precision bf16 --device cuda:1"
    assert next_command.suggest_plan(mine) == "halfstep plan mine:case --device cuda:1"
    assert next_command.suggest_growing_plan(mine).endswith("--grow-batch")
