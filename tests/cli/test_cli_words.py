"""Words that people type because other projects have them: understood, or answered with what to type."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import halfstep
from halfstep.cli.main import build
from halfstep.errors import BadRecipe, HalfstepError
from halfstep.recipe.names import ELSEWHERE, parse_typed_settings
from halfstep.recipe.sources import list_recipe_names, read_recipe
from halfstep.recipe.strict_yaml import parse_yaml
from halfstep.runs.registry import build_task_schemas, find_task_schema
from halfstep.runs.resolve import resolve_run_recipe
from tests.support.digest import digest_of

RECIPE = "segmentation_tiny"


def run(*words: str, **options: Any) -> Any:
    return CliRunner().invoke(build(), list(words), **options)


def shown(*flags: str) -> dict[str, Any]:
    done = run("train", RECIPE, *flags, "--show")
    assert done.exit_code == 0, done.output
    return parse_yaml(done.stdout, "shown")


def test_the_module_train_is_the_command_train(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(read_recipe(RECIPE).text)
    words = [sys.executable, "-m", "halfstep.train", "mine.yaml", "--bf16", "--use-optimizations"]
    here = {**os.environ, "PYTHONPATH": str(Path(halfstep.__file__).parents[1])}
    done = subprocess.run([*words, "--show"], cwd=tmp_path, env=here, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    recipe = parse_yaml(done.stdout, "shown")
    assert (recipe["precision"], recipe["train"]["compile"]) == ("bf16", True)
    wrong = subprocess.run([*words[:3], "no_such"], cwd=tmp_path, env=here, capture_output=True, text=True, check=False)
    assert (wrong.returncode, "there is no recipe 'no_such'" in wrong.stderr) == (78, True)


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        ("--tf32", "precision", "tf32"),
        ("--tf32 true", "precision", "tf32"),
        ("--bf16 --tf32", "precision", "bf16"),
        ("--bf16 True --tf32 True", "precision", "bf16"),
        ("--tf32 false", "precision", "fp32"),
        ("--precision bf16-mixed", "precision", "bf16"),
        ("--torch_compile", "train.compile", True),
        ("--torch-compile True", "train.compile", True),
        ("--accumulate_grad_batches 4", "train.microbatches", 4),
        ("--gradient_accumulation_steps 4", "train.microbatches", 4),
        ("--per_device_train_batch_size 8", "train.batch_size", 8),
        ("--train_batch_size 8", "train.batch_size", 8),
        ("--learning_rate 5e-5", "optimizer.lr", 5e-5),
        ("--num_train_epochs 3", "train.epochs", 3),
        ("--max_epochs 3", "train.epochs", 3),
        ("trainer.max_epochs=3", "train.epochs", 3),
        ("--max_steps 30", "train.steps", 30),
        ("--gradient_clip_val 0.5", "train.clip_norm", 0.5),
        ("--clip-grad 0.5", "train.clip_norm", 0.5),
        ("--gradient_checkpointing", "train.checkpoint_activations", True),
        ("--dataloader_num_workers 2", "train.num_workers", 2),
        ("--lr_scheduler_type cosine", "schedule.name", "cosine"),
        ("--check_val_every_n_epoch 2", "evaluate.every_epochs", 2),
        ("--save_steps 50", "checkpoint.every_steps", 50),
        ("--output_dir out", "run.dir", "out"),
        ("--default_root_dir out", "run.dir", "out"),
        ("--logging_steps 5", "run.log_every", 5),
        ("--report_to tensorboard", "run.tracker", "tensorboard"),
        ("--strategy ddp", "world.mode", "ddp"),
        ("--gpu_ids 0", "train.device", "0"),
        ("--optim Adafactor", "optimizer.name", "adafactor"),
    ],
)
def test_flags_of_other_projects(flags: str, key: str, value: object) -> None:
    found: Any = shown(*flags.split())
    for part in key.split("."):
        found = found[part]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.wording
def test_tf32_against_strict_fp32_is_a_contradiction() -> None:
    done = run("train", RECIPE, "--fp32", "--tf32", "--show")
    assert done.exit_code == 78
    assert "fp32=True asks for fp32, but tf32=True asks for tf32" in done.stderr


@pytest.mark.wording
@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("--resume", "type the same command again"),
        ("--resume_from_checkpoint", "type the same command again"),
        ("--gpus", "torchrun --nproc_per_node"),
        ("--devices", "torchrun --nproc_per_node"),
        ("--config", "halfstep train FILE"),
        ("--overwrite-output-dir", "--new"),
        ("--wandb", "--tracker wandb"),
        ("--warmup_ratio", "schedule.warmup_steps"),
        ("--per_device_eval_batch_size", "the batch and the precision of training"),
        ("--cpu", "--device"),
        ("--batchsize", "did you mean train.batch_size?"),
    ],
)
def test_unknown_flags_are_answered_with_the_right_word(word: str, hint: str) -> None:
    done = run("train", RECIPE, word, "1")
    assert done.exit_code == 78
    assert hint in done.stderr
    assert "world.reduce" not in done.stderr


@pytest.mark.wording
@pytest.mark.parametrize("words", [["--config", "a b.yaml", "--bf16"], ["--cfg=a b.yaml", "--bf16"]])
def test_a_config_flag_before_the_recipe_is_answered_with_the_command(words: list[str]) -> None:
    done = run("train", *words)
    assert (done.exit_code, "do: halfstep train 'a b.yaml' --bf16" in done.stderr) == (78, True)


@pytest.mark.wording
def test_the_same_words_in_a_recipe_are_answered_alike() -> None:
    raw = {**read_recipe(RECIPE).raw, "resume": "last", "trainer": {"gpus": 2}}
    with pytest.raises(BadRecipe) as caught:
        resolve_run_recipe(read_recipe(RECIPE)._replace(raw=raw))
    assert "type the same command again" in str(caught.value)
    assert "torchrun --nproc_per_node" in str(caught.value)


def test_no_word_is_both_a_setting_and_elsewhere() -> None:
    assert len(ELSEWHERE) >= 50
    for schema in map(find_task_schema, build_task_schemas()):
        for word in ELSEWHERE:
            with pytest.raises(BadRecipe):
                parse_typed_settings([f"--{word}", "1"], schema)


@pytest.mark.wording
def test_one_number_is_a_gpu_and_several_are_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from halfstep.precision import hardware

    monkeypatch.setattr(hardware.torch.accelerator, "current_accelerator", lambda check_available: None)
    with pytest.raises(HalfstepError, match="no GPU"):
        hardware.describe_device("0")
    gpu = hardware.torch.device("cuda")
    monkeypatch.setattr(hardware.torch.accelerator, "current_accelerator", lambda check_available: gpu)
    monkeypatch.setitem(hardware._READERS, "cuda", lambda where: where)
    assert hardware.describe_device("1") == hardware.torch.device("cuda:1")
    with pytest.raises(HalfstepError, match="one process") as caught:
        hardware.describe_device("0,1")
    assert "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 2" in caught.value.do


# -- plan without a recipe --------------------------------------------------------------------------------------------


@pytest.mark.wording
def test_plan_without_a_recipe_lists_them_and_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = run("plan")
    assert done.exit_code == 78
    assert "do: halfstep plan segmentation_tiny" in done.stderr
    assert all(name in done.stderr for name in list_recipe_names())
    assert done.stdout == ""
    assert max(map(len, done.stderr.partition("a plan of which")[0].splitlines())) <= 80
    assert run("plan", "--json").exit_code == 78


@pytest.mark.wording
def test_plan_without_a_recipe_asks_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfstep.cli.plan.has_terminal", lambda: True)
    done = run("plan", input="no_such_recipe\n")
    assert "unet_best_quality" in done.stdout
    assert "there is no recipe 'no_such_recipe'" in done.stderr


# -- fit --------------------------------------------------------------------------------------------------------------


def test_a_dict_trains_as_the_recipe_with_its_content_does(tmp_path: Path) -> None:
    settings = {"train.seed": 3, "train.steps": 2, "train.epochs": None, "data.samples": 8, "run.pictures": 0}
    settings |= {"train.num_workers": 0, "precision": "fp32"}
    named = halfstep.fit(RECIPE, settings={**settings, "run.dir": str(tmp_path / "named")}, quiet=True)
    content = {**read_recipe(RECIPE).raw, **settings, "run.dir": tmp_path / "dict"}
    written = halfstep.fit(content, quiet=True)
    one, other = (halfstep.load(run.dir).model.state_dict() for run in (named, written))
    assert digest_of(one) == digest_of(other)
    assert (tmp_path / "dict" / "recipe.yaml").is_file()


@pytest.mark.wording
def test_mistakes_in_a_dict_are_named() -> None:
    with pytest.raises(HalfstepError, match=r"train\.epohcs is not known; did you mean train\.epochs"):
        halfstep.fit({"task": "segmentation", "train.epohcs": 3, "train": {"epochs": 1}, "x": 1}, quiet=True)
    with pytest.raises(HalfstepError, match="names no task"):
        halfstep.fit({"train": {"epochs": 1}}, quiet=True)
    with pytest.raises(BadRecipe, match=r"train\.epochs next to train=3"):
        halfstep.fit({"task": "segmentation", "train": 3, "train.epochs": 1}, quiet=True)


# -- scripts ----------------------------------------------------------------------------------------------------------


def test_an_example_script_is_written_here_and_never_over_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("recipes", "copy", "--script", "unet")
    assert (done.exit_code, done.stdout) == (0, "wrote train_unet.py\nedit it, then: python train_unet.py\n")
    written = (tmp_path / "train_unet.py").read_text()
    assert written == (Path(__file__).parents[2] / "examples" / "train_unet.py").read_text()
    (tmp_path / "train_unet.py").write_text("mine")
    assert run("recipes", "copy", "--script", "unet").exit_code == 73
    assert (tmp_path / "train_unet.py").read_text() == "mine"
    assert run("recipes", "copy", "--script", "own_loop", "mine.py").exit_code == 0
    assert (tmp_path / "mine.py").is_file()


@pytest.mark.wording
@pytest.mark.parametrize("to", ["../x.py", "/x.py", "away/x.py"])
def test_a_script_stays_in_the_folder(to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "away").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path / "here")
    done = run("recipes", "copy", "--script", "unet", to)
    assert (done.exit_code, "outside of this folder" in done.stderr) == (77, True)
    assert not (tmp_path / "x.py").exists()


@pytest.mark.wording
def test_a_script_that_there_is_not_is_answered_with_those_there_are() -> None:
    done = run("recipes", "copy", "--script", "../unet")
    assert (done.exit_code, "imagenet100, own_loop, unet" in done.stderr) == (78, True)
    assert run("recipes", "copy", "--script").exit_code == 78
    assert run("recipes", "explain", "unet", "--script").exit_code == 78
