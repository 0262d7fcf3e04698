"""`halfstep doctor FOLDER`, as a person and as CI runs it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from halfstep.cli import main
from halfstep.doctor.project_check import examine_project
from halfstep.doctor.sarif import convert_to_sarif
from halfstep.recipe.resolve import resolve_recipe
from halfstep.recipe.sources import read_recipe

CORPUS = Path(__file__).parent / "corpus"


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU", "NVIDIA_TF32_OVERRIDE", "LT_PRECISION"):
        monkeypatch.delenv(name, raising=False)


def doctor(*words: str, width: int = 80) -> Result:
    return CliRunner().invoke(main.build(), ["doctor", *words], env={"COLUMNS": str(width)}, prog_name="halfstep")


def project(name: str) -> Path:
    ignored = shutil.ignore_patterns("expected.json")
    return Path(shutil.copytree(CORPUS / name, Path.cwd() / name, ignore=ignored)).relative_to(Path.cwd())


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["guide_004_before", "accelerate_code_over_file", "deepspeed_scaler_words"])
def test_a_page_fits_its_terminal_and_begins_with_one_verdict(name: str, width: int) -> None:
    result = doctor(str(project(name)), width=width)
    assert max(map(len, result.output.splitlines())) <= width
    assert "\x1b" not in result.output
    assert result.output.splitlines()[0].startswith(("ready", "not ready: "))
    assert result.output.count("ready") == 1


def test_the_guides_mismatch_is_one_verdict_and_the_exit_code() -> None:
    result = doctor(str(project("guide_004_before")), width=120)
    assert result.exit_code == 78
    page = result.output.splitlines()
    assert page[0] == "not ready: 1 error; --fix shows the patch (precision mismatch)"
    assert "  mixed precision: disputed (mixed_precision: bf16 against trainer.amp: False)" in [
        line.rstrip() for line in page
    ]
    assert doctor(str(project("guide_004_after"))).exit_code == 0


def test_a_folder_without_a_script_or_a_configuration_is_not_called_ready(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").write_text("bf16\n")
    result = doctor("notes")
    assert (result.exit_code, result.output.splitlines()[0].split(":")[0]) == (0, "nothing to check")


def test_the_table_says_who_wins_over_what() -> None:
    result = doctor(str(project("accelerate_code_over_file")), "--json")
    assert result.exit_code == 78
    [run] = json.loads(result.stdout)["runs"]
    [row] = run["provenance"]
    assert (row["tool"], row["start"], row["precision"]) == ("accelerate", "accelerate", "fp16")
    assert [(s["file"], s["line"]) for s in row["wins"]] == [("train.py", 3)]
    assert [(s["file"], s["line"]) for s in row["overrode"]] == [("accelerate.yaml", 2)]


def test_what_only_the_run_knows_is_not_called_silence() -> None:
    result = doctor(str(project("hydra_unresolved")))
    assert result.exit_code == 0
    assert "precision: the deciding value is known only at run time" in result.output


def test_accelerates_own_default_file_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Path.cwd() / "hf" / "accelerate" / "default_config.yaml"
    place.parent.mkdir(parents=True)
    place.write_text("mixed_precision: bf16\n")
    monkeypatch.setenv("HF_HOME", str(Path.cwd() / "hf"))
    report = json.loads(doctor(str(project("accelerate_file_not_named")), "--json").stdout)
    assert "accelerate.default_file" in [finding["id"] for finding in report["findings"]]
    named = json.loads(doctor(str(project("accelerate_agrees")), "--json").stdout)
    assert named["findings"] == []


CLIP = """import torch


def update(scaler, loss, model, optimizer):
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.wording
def test_one_mistake_in_many_files_is_one_entry_and_its_paths_are_whole() -> None:
    folder = "a_long_name_for_a_folder/that_is_wider_than_a_terminal/with_the_scripts_of_a_project"
    Path(folder).mkdir(parents=True)
    for number in range(3):
        Path(f"{folder}/train_{number}.py").write_text(CLIP)
    page = doctor(".").output
    assert page.count("code.clip_before_unscale") == 1
    assert "in 3 places:" in page
    assert all(f"{folder}/train_{number}.py:6" in page for number in range(3))


def test_a_mistake_in_a_test_is_shown_apart_and_fails_nothing() -> None:
    Path("tests").mkdir()
    Path("tests/test_step.py").write_text(CLIP)
    result = doctor(".")
    assert result.exit_code == 0
    assert "In tests" in result.output
    assert "code.clip_before_unscale  tests/test_step.py:6" in result.output
    Path("step.py").write_text(CLIP)
    assert doctor(".").exit_code == 78


def test_the_settings_are_listed_on_request() -> None:
    folder = str(project("accelerate_agrees"))
    assert "mixed_precision = bf16" not in doctor(folder).output
    assert "mixed_precision = bf16" in doctor(folder, "--settings").output


def test_the_python_function_is_the_command() -> None:
    import halfstep

    report = halfstep.doctor(project("guide_004_before"), variables={})
    assert not report.ready
    assert [finding.id for finding in report.findings] == ["settings.precision_mismatch"]
    assert str(report).startswith(report.status.final)
    assert "settings.precision_mismatch" in report._repr_html_()
    # A part of the package that was imported before is in the function's place, and does the same.
    assert halfstep.doctor(project("guide_004_after"), variables={}).precision == "bf16"


# -- fixing -----------------------------------------------------------------------------------------------------------


def test_fix_shows_a_patch_that_git_applies_and_writes_nothing() -> None:
    folder = project("guide_004_before")
    before = {path: path.read_text() for path in folder.rglob("*.yaml")}
    result = doctor(str(folder), "--fix", "--json")
    assert result.exit_code == 78
    assert {path: path.read_text() for path in folder.rglob("*.yaml")} == before
    patch = json.loads(result.stdout)["patch"]
    assert "-  amp: False\n+  amp: True" in patch
    Path("fix.patch").write_text(patch + "\n")
    subprocess.run(["git", "apply", "--directory", str(folder), "fix.patch"], check=True, capture_output=True)
    assert doctor(str(folder)).exit_code == 0


def test_fix_with_yes_applies_it_and_checks_again() -> None:
    folder = project("accelerate_code_over_file")
    result = doctor(str(folder), "--fix", "--yes")
    assert result.exit_code == 0, result.output
    assert (folder / "accelerate.yaml").read_text().splitlines()[1] == "mixed_precision: fp16"
    assert "Files modified: accelerate.yaml" in result.output
    assert "precision: everything asks for fp16" in result.output


@pytest.mark.parametrize("wanted", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(
    "name",
    [
        "guide_004_before",
        "transformers_both",
        "deepspeed_both_formats",
        "hydra_against_accelerate",
    ],
)
def test_fix_with_a_name_makes_every_setting_ask_for_it(name: str, wanted: str) -> None:
    folder = project(name)
    result = doctor(str(folder), "--fix", wanted, "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0, (report["findings"], report["patch"])
    assert report["status"]["precision"] == wanted, report["patch"]


@pytest.mark.parametrize(
    ("name", "wanted", "line"),
    [
        ("accelerate_code_over_file", "bf16", 'Accelerator(mixed_precision="bf16")'),
        ("fabric_variable_wins", "fp32", 'Fabric(precision="32-true")'),
        ("transformers_over_accelerate", "bf16", "TrainingArguments(bf16=True)"),
        ("script_against_its_file", "fp16", "autocast(dtype=torch.float16)"),
    ],
)
@pytest.mark.wording
def test_a_script_that_asks_for_another_precision_is_left_to_its_author(name: str, wanted: str, line: str) -> None:
    folder = project(name)
    before = {path: path.read_bytes() for path in folder.rglob("*.*")}
    result = doctor(str(folder), "--fix", wanted)
    assert result.exit_code == 78
    assert f"do: write there: {line}" in result.stderr
    assert {path: path.read_bytes() for path in folder.rglob("*.*")} == before


ACCELERATE_AND_DEEPSPEED = {
    "default_config.yaml": "compute_environment: LOCAL_MACHINE\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
    "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 4\n",
    "ds.json": '{"train_micro_batch_size_per_gpu": 4,\n "fp16": {"enabled": true, "loss_scale": 0},\n'
    ' "zero_optimization": {"stage": 2}}\n',
    "train.py": "import argparse\nfrom accelerate import Accelerator\np = argparse.ArgumentParser()\n"
    'p.add_argument("--mixed_precision", default="fp16", choices=["no", "fp16", "bf16"])\n'
    "accelerator = Accelerator()\n",
    "run.sh": "#!/bin/bash\nexport ACCELERATE_MIXED_PRECISION=fp16\n"
    "accelerate launch --config_file default_config.yaml train.py --mixed_precision fp16\n",
}


def test_two_files_that_disagree_are_left_alone_until_a_precision_is_named() -> None:
    folder = Path("ad")
    folder.mkdir()
    for name, text in ACCELERATE_AND_DEEPSPEED.items():
        (folder / name).write_text(text)
    report = json.loads(doctor("ad", "--fix", "--yes", "--json").stdout)
    assert {f["id"] for f in report["findings"]} == {
        "deepspeed.format_mismatch", "accelerate.deepspeed_file", "settings.ignored",
    }  # fmt: skip
    assert report["patch"] == ""
    assert report["refused"]
    assert {path.name: path.read_text() for path in folder.iterdir()} == ACCELERATE_AND_DEEPSPEED
    named = doctor("ad", "--fix", "bf16", "--json")
    assert named.exit_code == 0, named.output
    assert json.loads(named.stdout)["findings"] == []
    deepspeed = json.loads((folder / "ds.json").read_text())
    assert deepspeed["bf16"]["enabled"]
    assert not deepspeed["fp16"]["enabled"]
    assert "mixed_precision" not in (folder / "default_config.yaml").read_text()
    assert "ACCELERATE_MIXED_PRECISION=bf16" in (folder / "run.sh").read_text()
    assert (folder / "train.py").read_text() == ACCELERATE_AND_DEEPSPEED["train.py"]


def test_json_stays_json() -> None:
    Path("own").mkdir()
    Path("own/config.json").write_text('{\n "trainer": {"precision": "fp16"},\n "train": {"amp": false}\n}\n')
    report = json.loads(doctor("own", "--fix", "bf16", "--json").stdout)
    assert report["status"]["precision"] == "bf16", report
    assert json.loads(Path("own/config.json").read_text()) == {"trainer": {"precision": "bf16"}, "train": {"amp": True}}


@pytest.mark.wording
def test_a_file_that_changed_meanwhile_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    from halfstep.doctor.located import Edit
    from halfstep.errors import WrongUse
    from tests.doctor.editing import apply_edits

    Path("a.yaml").write_bytes(b"amp: true\r\nlr: 1\r\n")
    Path("b.yaml").write_text("amp: no longer\n")
    edits = [Edit("a.yaml", 1, "amp: true", "amp: false"), Edit("b.yaml", 1, "amp: true", "amp: false")]
    with pytest.raises(WrongUse, match=r"b\.yaml, line 1"):
        apply_edits(Path(), edits)
    assert Path("a.yaml").read_bytes() == b"amp: true\r\nlr: 1\r\n"
    apply_edits(Path(), edits[:1])
    assert Path("a.yaml").read_bytes() == b"amp: false\r\nlr: 1\r\n"


@pytest.mark.wording
@pytest.mark.parametrize(
    "words",
    [
        ["--fix"],
        ["train.py"],
        ["recipe.yaml", "--fix"],
        ["recipe.yaml", "--yes"],
        ["recipe.yaml", "--sarif", "out.sarif"],
        ["recipe.yaml", "--write", "x.yaml"],
        ["folder", "--accelerate", "a.yaml"],
        ["folder", "--device", "cpu"],
        ["folder", "--fix", "fp8"],
        ["folder", "--fix", "bff16"],
    ],
)
def test_wrong_words_are_three_lines_and_a_code(words: list[str]) -> None:
    Path("recipe.yaml").write_text("amp: true\n")
    Path("folder").mkdir()
    result = doctor(*words)
    assert result.exit_code == 78
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 3
    assert "do: " in result.stderr


# -- SARIF ------------------------------------------------------------------------------------------------------------


def check_sarif(content: dict[str, Any]) -> None:
    """Fail where GitHub's code scanning would not take the file."""
    assert content["version"] == "2.1.0"
    assert content["$schema"].startswith("https://")
    for run in content["runs"]:
        driver = run["tool"]["driver"]
        assert driver["name"]
        rules = [rule["id"] for rule in driver["rules"]]
        assert len(rules) == len(set(rules))
        for rule in driver["rules"]:
            assert rule["shortDescription"]["text"]
            assert rule["fullDescription"]["text"]
            assert rule["help"]["text"]
        for result in run["results"]:
            assert rules[result["ruleIndex"]] == result["ruleId"]
            assert result["level"] in ("error", "warning", "note")
            assert result["message"]["text"]
            assert result["partialFingerprints"]
            [location] = result["locations"]
            place = location["physicalLocation"]
            assert not place["artifactLocation"]["uri"].startswith(("/", ".."))
            assert place["region"]["startLine"] >= 1


def test_sarif_has_what_code_scanning_asks_for() -> None:
    folder = project("guide_004_before")
    result = doctor(str(folder), "--sarif", "out.sarif")
    assert result.exit_code == 78
    content = json.loads(Path("out.sarif").read_text())
    check_sarif(content)
    [found] = content["runs"][0]["results"]
    place = found["locations"][0]["physicalLocation"]
    assert (found["ruleId"], found["level"]) == ("settings.precision_mismatch", "error")
    assert place["artifactLocation"]["uri"] == "guide_004_before/configs/radio_train_m.yaml"
    assert place["region"] == {"startLine": 2}


def test_sarif_of_every_project() -> None:
    for folder in sorted(CORPUS.iterdir()):
        _, runs, findings = examine_project(str(folder), variables={"ACCELERATE_MIXED_PRECISION": "BF16"})
        check_sarif(convert_to_sarif(findings, runs[0].name.partition(":")[0] if runs else "."))


# -- writing a recipe -------------------------------------------------------------------------------------------------

ARGUMENTS = {
    "output_dir": "out",
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "learning_rate": 5e-5,
    "max_grad_norm": 0.5,
    "lr_scheduler_type": "linear",
    "seed": 42,
    "bf16": True,
}


def resolved(file: str) -> Any:
    """Return the recipe as `halfstep train` reads it, with the parts that a person adds."""
    from halfstep.tasks.classification import Classification

    own = read_recipe("classification_tiny").raw
    given = read_recipe(f"./{file}").raw
    whole = {**{key: own[key] for key in ("task", "model", "data")}, **given}
    if not {"epochs", "steps"} & set(whole["train"]):
        # DeepSpeed's file does not say how long a run is.
        whole["train"] = {**whole["train"], "epochs": 1}
    return resolve_recipe(whole, Classification.schema).recipe


def test_training_arguments_become_a_recipe_that_halfstep_reads() -> None:
    Path("hf").mkdir()
    Path("hf/args.json").write_text(json.dumps(ARGUMENTS, indent=1))
    result = doctor("hf", "--write", "ours.yaml")
    assert result.exit_code == 0, result.output
    recipe = resolved("ours.yaml")
    assert (recipe.precision, recipe.optimizer.lr, recipe.train.clip_norm) == ("bf16", 5e-5, 0.5)
    assert (recipe.train.epochs, recipe.train.batch_size, recipe.train.microbatches) == (3, 8, 4)
    assert recipe.train.seed == 42
    comments = [line for line in Path("ours.yaml").read_text().splitlines() if line.startswith("#   ")]
    assert "#   lr_scheduler_type: linear  (hf/args.json:9)" not in comments
    assert any("lr_scheduler_type: linear  (args.json:9)" in line for line in comments)
    assert any("output_dir: out  (args.json:2): not mapped" in line for line in comments)


def test_lightning_deepspeed_and_hydra_become_recipes() -> None:
    Path("pl").mkdir()
    Path("pl/config.yaml").write_text(
        "seed_everything: 7\ntrainer:\n  precision: 16-mixed\n  max_steps: 100\n  max_epochs: 5\n"
        "  gradient_clip_val: 0.1\n  gradient_clip_algorithm: value\n  accumulate_grad_batches: 2\n"
    )
    Path("ds").mkdir()
    Path("ds/ds.json").write_text(
        '{"fp16": {"enabled": true, "initial_scale_power": 12, "loss_scale_window": 500, "min_loss_scale": 2},\n'
        '"train_batch_size": 64, "gradient_clipping": 1.0}\n'
    )
    Path("hy").mkdir()
    Path("hy/config.yaml").write_text(
        "defaults: [_self_]\ntrain:\n  amp: false\n  batch_size: 4\n  lr: ${lr}\nepochs: 2\n"
    )
    for name in ("pl", "ds", "hy"):
        result = doctor(name, "--write", f"{name}.yaml")
        assert result.exit_code == 0, result.output
    lightning, deepspeed, hydra = (resolved(f"{name}.yaml") for name in ("pl", "ds", "hy"))
    assert (lightning.precision, lightning.train.steps, lightning.train.epochs) == ("fp16", 100, None)
    assert (lightning.train.clip_value, lightning.train.clip_norm, lightning.train.microbatches) == (0.1, None, 2)
    assert (deepspeed.loss_scale.init_scale, deepspeed.loss_scale.growth_interval) == (4096.0, 500)
    assert (deepspeed.loss_scale.floor, deepspeed.train.global_batch, deepspeed.train.clip_norm) == (2.0, 64, 1.0)
    assert (hydra.precision, hydra.train.batch_size, hydra.train.epochs) == ("fp32", 4, 2)
    assert "train.lr: ${lr}  (config.yaml:5): not a value of optimizer.lr" in Path("hy.yaml").read_text()


def test_what_cannot_be_written_is_refused() -> None:
    Path("taken.yaml").write_text("x: 1\n")
    fine = str(project("guide_004_after"))
    assert doctor(fine, "--write", "taken.yaml").exit_code != 0
    assert Path("taken.yaml").read_text() == "x: 1\n"
    for name in ("guide_004_before", "two_alternatives", "nothing_about_precision"):
        result = doctor(str(project(name)), "--write", "new.yaml")
        assert result.exit_code == 78, name
        assert not Path("new.yaml").exists()
