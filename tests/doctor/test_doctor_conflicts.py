"""Sources together: what agrees, what contradicts, and whether the proposed lines really make peace."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from halfstep.doctor.checkup import check_settings
from halfstep.json_data import convert_to_json_data


def check(
    folder: Path, recipe: str | None, accelerate: str | None = None, deepspeed: object = None, **variables: str
) -> dict[str, Any]:
    given = {}
    for name, text in (("recipe", recipe), ("accelerate", accelerate)):
        if text is not None:
            given[name] = str(folder / f"{name}.yaml")
            Path(given[name]).write_text(text)
    if deepspeed is not None:
        given["deepspeed"] = str(folder / "ds.json")
        Path(given["deepspeed"]).write_text(json.dumps(deepspeed, indent=1))
    report = check_settings(given.pop("recipe", None), **given, variables={"HF_HOME": str(folder / "hf"), **variables})
    return convert_to_json_data(report)


LAUNCHER = "distributed_type: MULTI_GPU\nmixed_precision: bf16\n"


def ids(report: dict[str, Any]) -> set[str]:
    return {finding["id"] for finding in report["findings"]}


@pytest.mark.wording
def test_the_mismatch_of_the_guide(tmp_path: Path) -> None:
    report = check(tmp_path, "trainer:\n  amp: False\n  fp16: False\n  lr: 1e-5\n", LAUNCHER)
    assert not report["status"]["aligned"]
    [conflict] = report["conflicts"]
    assert [(s["key"], s["line"]) for s in conflict["settings"]] == [("mixed_precision", 2), ("trainer.amp", 2)]
    assert [(w["precision"], w["write"]) for w in conflict["ways"]] == [
        ("bf16", "amp: True"),
        ("fp32", "mixed_precision: 'no'"),
    ]
    evidence = next(f["evidence"] for f in report["findings"] if f["id"] == "settings.precision_mismatch")
    assert "recipe.yaml, line 2" in evidence
    assert "accelerate.yaml, line 2" in evidence


def test_its_solution(tmp_path: Path) -> None:
    status = check(tmp_path, "trainer: {amp: True, fp16: False, lr: 1e-5, grad_clip: 0.5}\n", LAUNCHER)["status"]
    assert status["aligned"]
    assert status["precision"] == "bf16"
    assert status["amp"] == "enabled (in bf16)"
    assert status["fp16"].startswith("disabled")
    assert status["learning_rate"].startswith("1e-5 (trainer.lr")
    assert status["clipping"].startswith("0.5 (trainer.grad_clip")


def test_a_lone_amp_is_fp16_in_other_projects_and_the_device_s_own_format_in_a_recipe_of_halfstep(
    tmp_path: Path,
) -> None:
    own = check(tmp_path, "task: segmentation\namp: true\n")["status"]
    assert (own["aligned"], own["precision"]) == (True, "amp")
    assert own["amp"] == "enabled (bf16 if the device has it, else fp16)"
    assert own["fp16"] == "enabled if the device has no bf16"
    assert check(tmp_path, "amp: true\n")["status"]["precision"] == "fp16"
    assert check(tmp_path, "task: segmentation\namp: true\nfp16: false\n")["status"]["precision"] == "bf16"
    assert check(tmp_path, "task: segmentation\namp: true\n", LAUNCHER)["status"]["precision"] == "bf16"
    [conflict] = check(tmp_path, "task: segmentation\namp: true\n", "mixed_precision: 'no'\n")["conflicts"]
    assert [(w["precision"], w["write"]) for w in conflict["ways"]] == [
        ("bf16", "mixed_precision: bf16"),
        ("fp32", "amp: False"),
    ]


@pytest.mark.parametrize(
    ("recipe", "accelerate", "variables"),
    [
        ("amp: true\n", "mixed_precision: fp16\n", {}),
        ("amp: false\n", "mixed_precision: 'no'\n", {}),
        ("amp: false\nfp16: false\n", "use_cpu: false\n", {}),
        ("precision: tf32\n", "mixed_precision: 'no'\n", {}),
        ("precision: auto\n", "mixed_precision: bf16\n", {}),
        ("precision: auto\n", "mixed_precision: 'no'\n", {}),
        ("fp16: false\n", "mixed_precision: bf16\n", {}),
        ("lr: 1\n", "mixed_precision: bf16\n", {"ACCELERATE_MIXED_PRECISION": "bf16"}),
        ("use_amp: false\namp_dtype: bfloat16\n", "mixed_precision: 'no'\n", {}),
        ("amp: true\nfp16: false\n", None, {}),
        ("fp32: true\namp: false\n", "mixed_precision: 'no'\n", {}),
        ("amp: {enabled: true}\n", "mixed_precision: bf16\n", {}),
        ("amp: false\namp_dtype: bfloat16\n", "mixed_precision: 'no'\n", {}),
        ("lr: 1\n", None, {}),
    ],
)
def test_settings_that_agree(tmp_path: Path, recipe: str, accelerate: str | None, variables: dict[str, str]) -> None:
    report = check(tmp_path, recipe, accelerate, **variables)
    assert report["status"]["aligned"], report["conflicts"]


CONTRADICTIONS: list[tuple[str | None, str | None, object, dict[str, str]]] = [
    ("amp: false\n", "mixed_precision: bf16\n", None, {}),
    ("trainer: {amp: false, fp16: false}\n", "mixed_precision: fp16\n", None, {}),
    ("amp: true\n", "mixed_precision: 'no'\n", None, {}),
    ("amp: true\n", "distributed_type: 'NO'\n", None, {}),
    ("amp: true\nfp16: false\n", "mixed_precision: fp16\n", None, {}),
    ("precision: bf16\n", "mixed_precision: fp16\n", None, {}),
    ("trainer: {precision: 16-mixed}\n", "mixed_precision: bf16\n", None, {}),
    ("trainer: {precision: 32-true}\n", "mixed_precision: bf16\n", None, {}),
    ("bf16: true\n", "mixed_precision: 'no'\n", None, {}),
    ("fp32: true\n", "mixed_precision: bf16\n", None, {}),
    ("fp32: false\n", "mixed_precision: 'no'\n", None, {}),
    ("amp: {enabled: false}\n", "mixed_precision: bf16\n", None, {}),
    ("fp16: true\n", None, {"bfloat16": {"enabled": True}}, {}),
    ("bf16: true\n", "mixed_precision: fp16\n", None, {}),
    ("use_amp: true\namp_dtype: float16\n", "mixed_precision: bf16\n", None, {}),
    ("mixed_precision: true\n", "mixed_precision: 'no'\n", None, {}),
    ("mixed_precision: bf16\n", "mixed_precision: 'no'\n", None, {}),
    ("use_amp: false\nprecision: auto\n", None, None, {}),
    (None, "mixed_precision: bf16\n", None, {"ACCELERATE_MIXED_PRECISION": "fp16"}),
    (None, "mixed_precision: bf16\n", None, {"ACCELERATE_MIXED_PRECISION": "no"}),
    ("precision: tf32\n", None, None, {"NVIDIA_TF32_OVERRIDE": "0"}),
    (None, "mixed_precision: bf16\n", {"fp16": {"enabled": True}, "bf16": {"enabled": False}}, {}),
    (None, "mixed_precision: bf16\n", {"bf16": {"enabled": False}}, {}),
    (None, "mixed_precision: 'no'\n", {"bf16": {"enabled": True}}, {}),
]


@pytest.mark.parametrize(("recipe", "accelerate", "deepspeed", "variables"), CONTRADICTIONS)
@pytest.mark.parametrize("way", [0, 1])
def test_either_way_out_leads_out(
    tmp_path: Path,
    recipe: str | None,
    accelerate: str | None,
    deepspeed: object,
    variables: dict[str, str],
    way: int,
) -> None:
    """A person who types what is proposed, again while there is something proposed, ends with settings that agree."""
    variables = dict(variables)
    report = check(tmp_path, recipe, accelerate, deepspeed, **variables)
    assert not report["status"]["aligned"]
    for _ in range(3):
        if report["conflicts"]:
            conflict = report["conflicts"][0]
            setting = conflict["settings"][1 - way]
            recipe, accelerate, deepspeed = obey(
                setting, conflict["ways"][way]["write"], recipe, accelerate, deepspeed, variables
            )
            report = check(tmp_path, recipe, accelerate, deepspeed, **variables)
    assert report["status"]["aligned"], report["conflicts"]


def obey(
    setting: dict[str, Any],
    write: str,
    recipe: str | None,
    accelerate: str | None,
    deepspeed: Any,
    variables: dict[str, str],
) -> tuple[str | None, str | None, Any]:
    if setting["source"] == "recipe":
        recipe = typed(recipe or "", write)
    elif setting["source"] == "accelerate":
        accelerate = typed(accelerate or "", write)
    elif setting["source"] == "deepspeed":
        deepspeed = {**deepspeed, **json.loads("{" + write + "}")}
    elif write.startswith("unset "):
        del variables[write.removeprefix("unset ")]
    else:
        name, word = write.removeprefix("export ").split("=")
        variables[name] = word
    return recipe, accelerate, deepspeed


def typed(text: str, write: str) -> str:
    for line in write.split(" and "):
        key = line.split(":")[0]
        pattern = rf"(?<![\w]){key}: (\{{[^}}\n]*\}}|[^,}}\n]*)"
        text = re.sub(pattern, line, text) if re.search(pattern, text) else text + line + "\n"
    return text


@pytest.mark.parametrize(
    ("recipe", "accelerate", "variables", "expected"),
    [
        (None, "mixed_precision: fp16\nuse_cpu: true\n", {}, "accelerate.fp16_on_cpu"),
        (None, "mixed_precision: fp16\n", {"ACCELERATE_USE_CPU": "true"}, "accelerate.fp16_on_cpu"),
        (None, "mixed_precision: no\n", {}, "accelerate.unquoted_no"),
        (None, "mixed_precision: bf16\n", {}, "accelerate.no_distributed_type"),
        ("lr: 1\n", None, {"ACCELERATE_MIXED_PRECISION": "BF16"}, "accelerate.variable_case"),
        (None, "distributed_type: FSDP\nmixed_precision: bf16\n", {}, "accelerate.fsdp_reduces_narrow"),
        (None, "fsdp_config: {mixed_precision_policy: bf16}\n", {}, "accelerate.key_not_read"),
        (None, "downcast_bf16: true\n", {}, "accelerate.key_not_read"),
        (
            None,
            "mixed_precision: bf16\ndeepspeed_config: {deepspeed_config_file: d.json}\n",
            {},
            "accelerate.deepspeed_file",
        ),
        (None, "mixed_precision: fp8\n", {}, "accelerate.fp8_falls_to_fp16"),
        ("lr: 1\n", None, {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}, "torch.tf32_override"),
        ("task: segmentation\nprecision: bf16\n", "mixed_precision: bf16\n", {}, "recipe.not_accelerate"),
    ],
)
def test_what_people_trip_over(
    tmp_path: Path, recipe: str | None, accelerate: str | None, variables: dict[str, str], expected: str
) -> None:
    assert expected in ids(check(tmp_path, recipe, accelerate, **variables))


def test_a_plain_file_gives_no_warning(tmp_path: Path) -> None:
    quiet = check(tmp_path, "amp: true\n", "distributed_type: 'NO'\nmixed_precision: bf16\ndowncast_bf16: 'no'\n")
    assert {f["id"] for f in quiet["findings"]} == {"accelerate.order"}
    assert check(tmp_path, "lr: 1\n")["findings"] == []


@pytest.mark.wording
def test_a_file_in_accelerates_place_is_noted_and_not_compared(tmp_path: Path) -> None:
    place = tmp_path / "hf" / "accelerate" / "default_config.yaml"
    place.parent.mkdir(parents=True)
    place.write_text("mixed_precision: bf16\n")
    report = check(tmp_path, "amp: false\n")
    assert report["status"]["aligned"]
    assert [(f["id"], f["severity"]) for f in report["findings"]] == [("accelerate.default_file", "note")]
    assert str(place) in report["findings"][0]["fix"]


def test_nothing_that_nobody_measured_is_claimed(tmp_path: Path) -> None:
    text = json.dumps(check(tmp_path, "trainer: {amp: true, lr: 1e-5}\n", LAUNCHER)).lower()
    for word in ("optimi", "stability", "faster", "reduced"):
        assert word not in text
