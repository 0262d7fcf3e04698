"""Each source by itself: what is found, on which line, with which meaning; and files that must be refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

import pytest

from halfstep.doctor.checkup import DEFAULT_GUARD
from halfstep.doctor.settings import FoundSetting
from halfstep.doctor.sources import (
    NOT_GIVEN,
    find_default_config,
    from_accelerate,
    from_deepspeed,
    from_environment,
    from_recipe,
)
from halfstep.errors import BadRecipe, HalfstepError, MissingExtra, PrecisionRefused, UnknownName, Unsafe
from halfstep.recipe.schema import GuardOptions

GUIDE = """\
model:
  unet: {dim: 128}
trainer:
  amp: False
  fp16: False
  lr: 1e-5
  max_grad_norm: 0.5
"""


def written(folder: Path, text: str, name: str = "given.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def brief(settings: list[FoundSetting]) -> list[tuple[str, object, int | None, str]]:
    return [(s.key, s.value, s.line, s.claim.meaning if s.claim else "") for s in settings]


def test_a_foreign_file_gives_its_precision_keys_with_their_lines(tmp_path: Path) -> None:
    source = from_recipe(written(tmp_path, GUIDE))
    assert brief(source.precision) == [("trainer.amp", False, 4, "fp32"), ("trainer.fp16", False, 5, "fp32")]
    assert [(s.key, s.value, s.line) for s in source.training] == [
        ("trainer.lr", 1e-5, 6),
        ("trainer.max_grad_norm", 0.5, 7),
    ]
    assert not source.halfstep


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("precision: bf16-mixed\n", [("precision", "bf16")]),
        ("use_amp: true\namp_dtype: bfloat16\n", [("use_amp", "fp16"), ("amp_dtype", "bf16")]),
        ("train: {use_amp: false, amp_dtype: bfloat16}\n", [("train.use_amp", "fp32"), ("train.amp_dtype", "")]),
        ("bf16: {enabled: true}\n", [("bf16", "bf16")]),
        ("training: {precision: 16}\n", [("training.precision", "fp16")]),
        ("model: {fp16: true}\n", [("model.fp16", "fp16")]),
        ("metrics: {precision: macro, recall: macro}\n", []),
        ("a: {b: {amp: false}}\n", []),
        ("amp: null\nlist: [1, 2]\n", []),
    ],
)
def test_keys_at_the_top_and_one_level_down(tmp_path: Path, text: str, found: list[tuple[str, str]]) -> None:
    settings = from_recipe(written(tmp_path, text)).precision
    assert [(s.key, s.claim.meaning if s.claim else "") for s in settings] == found


def test_a_recipe_of_ours_is_known_by_its_task(tmp_path: Path) -> None:
    source = from_recipe(written(tmp_path, "task: segmentation\nprecision: bf16\ntrain: {clip_norm: 1.0}\n"))
    assert source.halfstep
    assert brief(source.precision) == [("precision", "bf16", 2, "bf16")]


@pytest.mark.wording
@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("", BadRecipe, "contains nothing"),
        ("- amp\n", BadRecipe, "a list"),
        ("trainer: {amp: [\n", BadRecipe, "line"),
        ("amp: true\nlr: 1\namp: false\n", BadRecipe, "lines 1 and 3"),
        ("amp: !!python/object/apply:os.system ['touch pwned']\n", Unsafe, "tag"),
        ("a: &x [1]\nb: *x\n", BadRecipe, "anchor"),
        ("a: " + "x" * 2**21, BadRecipe, "bytes long"),
        ("a: " + "[" * 5000, BadRecipe, "levels"),
        ("trainer: {precision: bfoat16}\n", UnknownName, "did you mean 'bfloat16'"),
        ("trainer: {precision: bf16-true}\n", PrecisionRefused, "given.yaml (trainer)"),
    ],
)
@pytest.mark.parametrize("read", [from_recipe, from_accelerate])
def test_files_that_cannot_be_read(tmp_path: Path, read: object, text: str, error: type[Exception], words: str) -> None:
    if read is from_accelerate and error in (UnknownName, PrecisionRefused):
        pytest.skip("accelerate's file has no trainer")
    with pytest.raises(error) as caught:
        read(written(tmp_path, text))  # type: ignore[operator]
    assert words in str(caught.value)
    assert "do: " in str(caught.value)
    assert not (Path.cwd() / "pwned").exists()


@pytest.mark.wording
@pytest.mark.parametrize("read", [from_recipe, from_accelerate, from_deepspeed])
def test_files_that_are_not_there(tmp_path: Path, read: object) -> None:
    for place in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(BadRecipe, match="do:"):
            read(str(place))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("text", "value", "meaning"),
    [
        ("mixed_precision: bf16\n", "bf16", "bf16"),
        ("mixed_precision: BF16\n", "BF16", "bf16"),
        ("mixed_precision: 'no'\n", "no", "fp32"),
        ("mixed_precision: no\n", "no", "fp32"),
        ("mixed_precision: fp8\n", "fp8", "fp8"),
        ("use_cpu: false\n", NOT_GIVEN, "fp32"),
        ("mixed_precision: null\n", NOT_GIVEN, "fp32"),
        ("fp16: true\n", True, "fp16"),
    ],
)
def test_words_of_accelerate(tmp_path: Path, text: str, value: object, meaning: str) -> None:
    setting = from_accelerate(written(tmp_path, text)).precision[0]
    assert (setting.value, setting.claim.meaning if setting.claim else "") == (value, meaning)


@pytest.mark.wording
@pytest.mark.parametrize("word", ["fp32", "bfoat16", "true", "16", "[bf16]"])
def test_words_that_accelerate_refuses(tmp_path: Path, word: str) -> None:
    with pytest.raises(BadRecipe) as caught:
        from_accelerate(written(tmp_path, f"distributed_type: 'NO'\nmixed_precision: {word}\n"))
    assert "line 2" in caught.value.given
    assert caught.value.allowed == "no, fp16, bf16, fp8"


def test_nested_settings_of_accelerate(tmp_path: Path) -> None:
    text = (
        "deepspeed_config:\n  deepspeed_config_file: ds.json\n  gradient_clipping: 0.5\n"
        "fsdp_config:\n  fsdp_mixed_precision_policy: bf16\n"
    )
    source = from_accelerate(written(tmp_path, text))
    assert [(s.key, s.line) for s in source.precision] == [
        ("fsdp_config.fsdp_mixed_precision_policy", 5),
        ("deepspeed_config.deepspeed_config_file", 2),
    ]
    assert [(s.key, s.value) for s in source.training] == [("deepspeed_config.gradient_clipping", 0.5)]


def test_the_place_where_accelerate_looks() -> None:
    assert find_default_config({"HF_HOME": "/a"}) == Path("/a/accelerate/default_config.yaml")
    assert find_default_config({"XDG_CACHE_HOME": "/b"}) == Path("/b/huggingface/accelerate/default_config.yaml")
    assert find_default_config({}) == Path.home() / ".cache/huggingface/accelerate/default_config.yaml"


def test_deepspeed(tmp_path: Path) -> None:
    text = '{\n\t"bf16": {\n\t\t"enabled": true\n\t},\n\t"fp16": {"enabled": "auto"},\n"gradient_clipping": 1.0}'
    source = from_deepspeed(written(tmp_path, text, "ds_config.json"))
    assert brief(source.precision) == [("bf16.enabled", True, 3, "bf16"), ("fp16.enabled", "auto", 5, "")]
    assert source.training[0].line == 6


@pytest.mark.parametrize("text", ["bf16: {enabled: true}\n", '{"bf16": {"enabled": true},}', '{"fp16": 1, "fp16": 2}'])
def test_deepspeed_that_is_not_json(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadRecipe):
        from_deepspeed(written(tmp_path, text, "ds_config.json"))


def test_a_json_file_beside_us_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, '{"fp16": {"enabled": true}}', "ds_config.json")
    monkeypatch.chdir(tmp_path)
    assert from_deepspeed("ds_config.json").precision[0].value is True


def test_only_known_variables_are_looked_at() -> None:
    class Watched(dict[str, str]):
        asked: ClassVar[set[str]] = set()

        def get(self, key: str, default: object = None) -> object:  # type: ignore[override]
            self.asked.add(key)
            return super().get(key, default)

    variables = Watched(ACCELERATE_MIXED_PRECISION="bf16", NVIDIA_TF32_OVERRIDE="0", WANDB_API_KEY="secret")
    found = from_environment(variables).precision
    assert [s.key for s in found] == ["ACCELERATE_MIXED_PRECISION", "NVIDIA_TF32_OVERRIDE"]
    assert "WANDB_API_KEY" not in variables.asked
    assert from_environment({}).precision == []


@pytest.mark.wording
def test_a_variable_with_a_wrong_word() -> None:
    with pytest.raises(UnknownName, match="did you mean 'bf16'"):
        from_environment({"ACCELERATE_MIXED_PRECISION": "bff16"})


def test_values_cannot_play_with_the_terminal(tmp_path: Path) -> None:
    with pytest.raises(HalfstepError) as caught:
        from_recipe(written(tmp_path, '"tr\\e[2Jain": {amp: "\\e[2J\\e[31m", "fp16": false}\n'))
    assert "\x1b" not in str(caught.value)
    setting = from_recipe(written(tmp_path, 'amp: {enabled: false, "\\e[2J": "\\e[31m"}\n')).precision[0]
    assert "\x1b" not in str(setting)
    section = from_recipe(written(tmp_path, '"tr\\e[2Jain": {amp: true}\n')).precision[0]
    assert "\x1b" not in str(section)


def test_a_switch_is_no_section_and_other_mappings_are(tmp_path: Path) -> None:
    [off] = from_recipe(written(tmp_path, "amp: {enabled: false}\nfp16: {init_scale: 4}\n")).precision
    assert (off.key, off.means) == ("amp", "mixed precision off: fp32")
    assert not from_recipe(written(tmp_path, "trainer: {fp16: {init_scale: 4}, precision: {a: 1}}\n")).precision
    [inner] = from_recipe(written(tmp_path, "amp: {precision: bf16}\n")).precision
    assert (inner.key, inner.means) == ("amp.precision", "compute in bf16")


@pytest.mark.wording
def test_a_word_that_cannot_be_read_is_an_error_with_its_file(tmp_path: Path) -> None:
    with pytest.raises(HalfstepError, match="fp16 is 'O2'") as caught:
        from_recipe(written(tmp_path, "trainer: {fp16: O2}\n"))
    assert str(tmp_path) in caught.value.given


@pytest.mark.wording
def test_without_yaml_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("halfstep.recipe.sources", "halfstep.recipe.strict_yaml"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(MissingExtra, match=r"halfstep\[train\]"):
        from_recipe(written(tmp_path, GUIDE))


def test_a_recipe_without_a_guard_has_that_of_the_schema() -> None:
    assert GuardOptions().mode == DEFAULT_GUARD
