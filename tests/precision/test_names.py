import subprocess
import sys

import pytest
import torch

from halfstep.errors import Contradiction, PrecisionRefused, UnknownName
from halfstep.precision.names import NamedPrecision, list_precision_names, parse_precision, parse_precision_settings


@pytest.mark.parametrize("name", [*list_precision_names(), "auto"])
def test_a_canonical_name_is_taken_as_it_is(name: str) -> None:
    assert parse_precision(name) == NamedPrecision(name, "")
    assert parse_precision(f" {name.upper()} ") == NamedPrecision(name, "")


@pytest.mark.parametrize(
    ("given", "name", "whose"),
    [
        ("16-mixed", "fp16", "Lightning"),
        ("bf16-mixed", "bf16", "Lightning"),
        ("BF16-Mixed", "bf16", "Lightning"),
        ("32-true", "fp32", "Lightning"),
        ("32", "fp32", "Lightning"),
        ("16", "fp16", "Lightning"),
        (16, "fp16", "Lightning"),
        (32, "fp32", "Lightning"),
        ("bfloat16", "bf16", "torch"),
        ("float16", "fp16", "torch"),
        ("half", "fp16", "torch"),
        ("float32", "fp32", "torch"),
        ("float", "fp32", "torch"),
        ("torch.bfloat16", "bf16", "torch"),
        (torch.bfloat16, "bf16", "torch"),
        (torch.float16, "fp16", "torch"),
        (torch.float32, "fp32", "torch"),
        ("no", "fp32", "accelerate"),
        (False, "fp32", "YAML"),
    ],
)
def test_an_alias_says_what_it_was_taken_for(given: object, name: str, whose: str) -> None:
    read = parse_precision(given)
    assert read.name == name
    assert repr(given) in read.took
    assert whose in read.took
    assert read.took.endswith(name)


@pytest.mark.parametrize(("given", "taken"), [("fp8", False), ("FP8", False), (torch.float8_e4m3fn, True)])
def test_fp8_is_read(given: object, taken: bool) -> None:
    read = parse_precision(given)
    assert read.name == "fp8"
    assert bool(read.took) == taken


@pytest.mark.wording
@pytest.mark.parametrize(("given", "use"), [("bf16-true", "bf16"), ("16-true", "fp16"), ("64-true", "fp32")])
def test_what_is_not_built_is_refused_with_what_to_use(given: str, use: str) -> None:
    with pytest.raises(PrecisionRefused) as refused:
        parse_precision(given)
    assert repr(use) in refused.value.do


@pytest.mark.wording
def test_true_does_not_say_which_format() -> None:
    with pytest.raises(PrecisionRefused, match="not in which format"):
        parse_precision(True)


@pytest.mark.wording
@pytest.mark.parametrize(("typo", "meant"), [("bfoat16", "bfloat16"), ("bf-16", "bf16"), ("fp-32", "fp32")])
def test_a_typo_is_an_error_with_the_nearest_spelling(typo: str, meant: str) -> None:
    with pytest.raises(UnknownName, match=f"did you mean '{meant}'"):
        parse_precision(typo)


def test_none_is_not_a_precision() -> None:
    with pytest.raises(UnknownName):
        parse_precision(None)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"use_amp": True, "amp_dtype": "bfloat16"}, "bf16"),
        ({"use_amp": True, "amp_dtype": torch.float16}, "fp16"),
        ({"use_amp": False, "amp_dtype": "bfloat16"}, "fp32"),
        ({"amp_dtype": "bfloat16"}, "bf16"),
        ({"amp": True, "fp16": True}, "fp16"),
        ({"amp": True, "bf16": True, "fp16": False}, "bf16"),
        ({"amp": True, "bf16": False}, "fp16"),
        ({"amp": True, "fp16": False}, "bf16"),
        ({"amp": False}, "fp32"),
        ({"fp16": False, "bf16": False}, "fp32"),
        ({"mixed_precision": True, "precision_type": "bf16"}, "bf16"),
        ({"mixed_precision": False, "precision_type": "bf16"}, "fp32"),
        ({"mixed_precision": "bf16"}, "bf16"),
        ({"mixed_precision": "no"}, "fp32"),
        ({"precision": "16-mixed"}, "fp16"),
        ({"precision": 16}, "fp16"),
        ({"trainer": {"precision": "bf16-mixed"}}, "bf16"),
        ({"trainer.precision": "bf16-mixed"}, "bf16"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": False}}, "bf16"),
        ({"precision": "bf16", "mixed_precision": "bf16", "lr": 1e-3}, "bf16"),
        ({"use_amp": "bf16"}, "bf16"),
        ({"amp": "float16"}, "fp16"),
        ({"amp": {"enabled": True}, "fp16": False}, "bf16"),
        ({"amp": False, "amp_dtype": "bfloat16"}, "fp32"),
        ({"use_amp": False, "precision_type": "bf16"}, "fp32"),
        ({"fp32": "on"}, "fp32"),
        ({"fp32": True, "precision": 32}, "fp32"),
        ({"fp32": True, "amp": False, "fp16": False}, "fp32"),
        ({"fp32": False}, "auto"),
        ({"fp32": False, "fp16": False}, "bf16"),
    ],
)
def test_settings_of_other_projects(settings: dict[str, object], name: str) -> None:
    read = parse_precision_settings(settings)
    assert read is not None
    assert read.name == name
    assert read.took.endswith(f"read as {name}")


def test_a_switch_with_the_name_of_its_format_needs_no_words() -> None:
    assert parse_precision_settings({"bf16": True}) == NamedPrecision("bf16")


@pytest.mark.parametrize(
    "settings",
    [
        {"use_amp": True},
        {"amp": True},
        {"mixed_precision": "yes"},
        {"fp32": False, "amp": True},
        {"amp": {"enabled": 1}},
    ],
)
def test_a_switch_alone_leaves_the_format_to_the_device(settings: dict[str, object]) -> None:
    read = parse_precision_settings(settings)
    assert read is not None
    assert read.name == "amp"
    assert read.took.endswith("names no format: bf16 if the device has it, else fp16")


def test_amp_as_a_word_is_the_switch() -> None:
    assert parse_precision("amp") == parse_precision_settings({"precision": "amp"}) == NamedPrecision("amp", "")
    assert parse_precision_settings({"precision": "amp", "amp_dtype": "bfloat16"}).name == "bf16"  # type: ignore[union-attr]
    assert parse_precision_settings({"precision": "amp", "bf16": False}).name == "fp16"  # type: ignore[union-attr]
    with pytest.raises(Contradiction):
        parse_precision_settings({"precision": "amp", "use_amp": False})


def test_our_own_key_needs_no_explanation() -> None:
    assert parse_precision_settings({"precision": "bf16"}) == NamedPrecision("bf16", "")
    assert parse_precision_settings({"precision": "tf32", "use_amp": False}) == NamedPrecision("tf32", "")


@pytest.mark.parametrize(
    "silent",
    [{}, {"lr": 0.1}, {"trainer": {"devices": 2}}, {"trainer": 3}, {"precision": None}, {"fp16": {"enabled": "auto"}}],
)
def test_settings_that_do_not_speak_of_precision(silent: dict[str, object]) -> None:
    assert parse_precision_settings(silent) is None


@pytest.mark.wording
@pytest.mark.parametrize(
    ("settings", "one", "other"),
    [
        ({"fp16": True, "bf16": True}, "fp16=True", "bf16=True"),
        ({"use_amp": False, "precision": "bf16"}, "use_amp=False", "precision='bf16'"),
        ({"use_amp": False, "precision": "auto"}, "use_amp=False", "precision='auto'"),
        ({"use_amp": True, "precision": 32}, "use_amp=True", "precision=32"),
        ({"use_amp": True, "amp_dtype": "float32"}, "use_amp=True", "amp_dtype='float32'"),
        ({"use_amp": True, "amp": False}, "use_amp=True", "amp=False"),
        ({"amp": True, "fp16": False, "bf16": False}, "amp=True", "fp16=False"),
        ({"fp32": True, "bf16": True}, "bf16=True", "fp32=True"),
        ({"fp32": True, "amp": True}, "fp32=True", "amp=True"),
        ({"fp32": False, "amp": False}, "fp32=False", "amp=False"),
        ({"fp32": False, "fp16": False, "bf16": False}, "fp32=False", "fp16=False"),
        ({"mixed_precision": "bf16", "bf16": False}, "mixed_precision='bf16'", "bf16=False"),
        ({"mixed_precision": "no", "bf16": {"enabled": True}}, "mixed_precision='no'", "bf16={'enabled': True}"),
        (
            {"precision": "bf16", "trainer": {"precision": "16-mixed"}},
            "precision='bf16'",
            "trainer.precision='16-mixed'",
        ),
    ],
)
def test_a_contradiction_names_both_and_says_what_to_delete(settings: dict[str, object], one: str, other: str) -> None:
    with pytest.raises(Contradiction) as caught:
        parse_precision_settings(settings)
    assert one in caught.value.given
    assert other in caught.value.given
    assert f"delete {one.split('=')[0]}" in caught.value.do
    assert f"delete {other.split('=')[0]}" in caught.value.do


@pytest.mark.wording
def test_a_wrong_word_inside_settings_is_an_error_not_silence() -> None:
    with pytest.raises(UnknownName, match="bfoat16"):
        parse_precision_settings({"mixed_precision": "bfoat16"})


@pytest.mark.wording
@pytest.mark.parametrize("key", ["use_amp", "amp", "mixed_precision", "fp16", "bf16", "fp32"])
@pytest.mark.parametrize("value", ["O1", "enabled", "", [], {"enabled": "O1"}, {"level": "O1"}, 2.5])
def test_a_switch_that_cannot_be_read_is_an_error_that_names_it(key: str, value: object) -> None:
    with pytest.raises((UnknownName, PrecisionRefused)) as caught:
        parse_precision_settings({key: value})
    assert caught.value.given.startswith(key)
    assert "true" in caught.value.allowed
    assert caught.value.do


def test_reading_names_needs_no_torch() -> None:
    code = (
        "import sys; from halfstep.precision.names import parse_precision as r; r('16'); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
