"""What the doctor says of accelerate, held against accelerate itself."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from halfstep.doctor.sources import find_default_config, from_accelerate, has_unquoted_boolean
from halfstep.errors import BadRecipe

pytest.importorskip("accelerate")
BASE = "distributed_type: 'NO'\nnum_processes: 1\nnum_machines: 1\n"


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)


def launched(place: Path, *flags: str) -> str:
    """The precision that `accelerate launch` hands to the script, by accelerate's own code."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    args = launch_command_parser().parse_args([*flags, "--config_file", str(place), "train.py"])
    args, _, _ = _validate_launch_command(args)
    return str(prepare_simple_launcher_cmd_env(args)[1]["ACCELERATE_MIXED_PRECISION"])


def ours(place: Path) -> str:
    setting = from_accelerate(str(place)).precision[0]
    assert setting.claim is not None
    return {"fp32": "no"}.get(setting.claim.meaning, setting.claim.meaning)


@pytest.mark.parametrize("word", ["no", "fp16", "bf16"])
def test_a_file_from_accelerates_own_writer(tmp_path: Path, word: str) -> None:
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

    place = tmp_path / "default_config.yaml"
    ClusterConfig(
        compute_environment="LOCAL_MACHINE",
        distributed_type="NO",
        mixed_precision=word,
        use_cpu=True,
        debug=False,
        num_processes=1,
        downcast_bf16="no",
    ).to_yaml_file(place)
    found = {s.key: s.value for s in from_accelerate(str(place)).precision}
    loaded = load_config_from_file(str(place))
    assert found == {
        "mixed_precision": loaded.mixed_precision,
        "distributed_type": loaded.distributed_type.value,
        "use_cpu": loaded.use_cpu,
        "downcast_bf16": loaded.downcast_bf16,
    }
    assert ours(place) == launched(place) == word


@pytest.mark.parametrize(
    "text", ["mixed_precision: bf16", "mixed_precision: BF16", "mixed_precision: 'no'", "", "fp16: true", "fp16: false"]
)
def test_the_file_means_what_the_launcher_makes_of_it(tmp_path: Path, text: str) -> None:
    place = tmp_path / "config.yaml"
    place.write_text(f"{BASE}{text}\n")
    assert ours(place) == launched(place)
    assert not has_unquoted_boolean(place.read_text())


def test_words_that_both_refuse(tmp_path: Path) -> None:
    place = tmp_path / "config.yaml"
    place.write_text(f"{BASE}mixed_precision: fp32\n")
    with pytest.raises(ValueError, match="Unknown mixed_precision"):
        launched(place)
    with pytest.raises(BadRecipe):
        ours(place)


def test_no_without_quotes_ends_in_an_error_of_accelerate(tmp_path: Path) -> None:
    place = tmp_path / "config.yaml"
    place.write_text(f"{BASE}mixed_precision: no\n")
    assert has_unquoted_boolean(place.read_text())
    with pytest.raises(AttributeError):
        launched(place)


def test_a_file_without_distributed_type_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "config.yaml"
    place.write_text("mixed_precision: bf16\n")
    with pytest.raises(ValueError, match="distributed_type"):
        launched(place)


def test_the_launcher_puts_the_file_in_place_of_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    place = tmp_path / "config.yaml"
    place.write_text(f"{BASE}mixed_precision: bf16\n")
    assert launched(place) == "bf16"
    assert launched(place, "--mixed_precision", "fp16") == "fp16"
    place.write_text(BASE)
    assert launched(place) == "no"


def test_keys_that_the_launcher_does_not_read(tmp_path: Path) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    place = tmp_path / "config.yaml"
    text = "distributed_type: FSDP\nnum_processes: 2\nnum_machines: 1\nmixed_precision: bf16\ndowncast_bf16: true\n"
    place.write_text(text + "fsdp_config: {fsdp_mixed_precision_policy: fp32}\n")
    args = launch_command_parser().parse_args(["--config_file", str(place), "train.py"])
    args, _, _ = _validate_launch_command(args)
    assert args.downcast_bf16 is False
    before = set(os.environ)
    assert not any("POLICY" in name and "WRAP" not in name for name in set(prepare_multi_gpu_env(args)) - before)


def test_fsdp_sums_gradients_in_the_same_format() -> None:
    import torch
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.reduce_dtype is torch.bfloat16


OBSERVE = """
import json, os, sys, torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
for given, variables in json.loads(sys.argv[1]):
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    os.environ.update(variables)
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, **given)
    inner = torch.nn.Linear(4, 4)
    inner.register_forward_hook(lambda module, inputs, output: print(accelerator.mixed_precision, output.dtype))
    accelerator.prepare(torch.nn.Sequential(inner))(torch.ones(1, 4))
"""


def test_what_a_script_gets_under_plain_python(tmp_path: Path) -> None:
    variable = "ACCELERATE_MIXED_PRECISION"
    cases = {
        "fp16 torch.float32": ({"mixed_precision": "fp16"}, {}),  # silently, on a CPU
        "bf16 torch.bfloat16": ({"mixed_precision": "bf16"}, {variable: "fp16"}),  # the argument over the variable
        "bf16 torch.bfloat16 ": ({}, {variable: "bf16"}),
        "BF16 torch.float32": ({}, {variable: "BF16"}),  # silently
        "no torch.float32": ({}, {}),  # the file is not read
    }
    environment = {**os.environ, "HF_HOME": str(tmp_path)}
    place = find_default_config(environment)
    place.parent.mkdir(parents=True)
    place.write_text(f"{BASE}mixed_precision: bf16\n")
    words = [sys.executable, "-c", OBSERVE, json.dumps(list(cases.values()))]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [case.strip() for case in cases]


@pytest.mark.parametrize("variable", ["HF_HOME", "XDG_CACHE_HOME"])
def test_the_place_is_accelerates_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # runpy warns of a module that is imported already
        module = runpy.run_module("accelerate.commands.config.config_args")
    assert module["default_config_file"] == str(find_default_config(os.environ))


def test_what_torch_makes_of_its_variable() -> None:
    code = "import torch; print(torch.backends.cuda.matmul.allow_tf32)"
    environment = {**os.environ, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
