"""Each kind of source of a project by itself: what is found, on which line, with which meaning."""

from __future__ import annotations

import pytest

from halfstep.doctor.settings import UNRESOLVED, FoundSetting, SettingSource
from halfstep.doctor.sources.kinds import from_configuration
from halfstep.doctor.sources.launch import from_shell
from halfstep.doctor.sources.python import from_python

Found = tuple[str, object, int | None, str]


def brief(settings: list[FoundSetting]) -> list[Found]:
    return [(s.key, s.value, s.line, s.claim.meaning if s.claim else "") for s in settings]


def configuration(text: str, place: str = "x.yaml") -> SettingSource:
    source = from_configuration(place, text)
    assert source is not None
    return source


@pytest.mark.parametrize(
    ("kind", "place", "text"),
    [
        ("accelerate", "x.yaml", "compute_environment: LOCAL_MACHINE\nmixed_precision: bf16\n"),
        ("accelerate", "x.yaml", "mixed_precision: bf16\ndistributed_type: MULTI_GPU\ngpu_ids: 1,2\n"),
        ("deepspeed", "x.json", '{"bf16": {"enabled": true}}'),
        ("deepspeed", "x.json", '{"zero_optimization": {"stage": 3}, "fp16": {"enabled": "auto"}}'),
        ("lightning", "x.yaml", "seed_everything: 1\ntrainer: {precision: 16}\n"),
        ("lightning", "x.yaml", "fit:\n  trainer: {precision: 16, max_epochs: 1}\n"),
        ("transformers", "x.json", '{"output_dir": "o", "num_train_epochs": 1, "bf16": true}'),
        ("transformers", "x.yaml", "output_dir: o\nper_device_train_batch_size: 1\nbf16: true\n"),
        ("hydra", "x.yaml", "defaults:\n  - trainer: gpu\namp: true\n"),
        ("hydra", "x.yaml", "trainer:\n  _target_: lightning.Trainer\n  precision: 16\n"),
        ("hydra", "x.yaml", "# @package _global_\ntrainer: {precision: 16}\n"),
        ("recipe", "x.yaml", "trainer: {amp: True, fp16: False, lr: 1e-5}\n"),
        ("recipe", "x.yaml", "task: segmentation\nprecision: bf16\n"),
        ("recipe", "x.yaml", "train:\n  use_amp: true\n"),
    ],
)
def test_a_file_is_known_by_its_content(kind: str, place: str, text: str) -> None:
    assert configuration(text, place).kind == kind


def test_deepspeeds_words_on_the_loss_scale_have_lines_and_meanings() -> None:
    text = (
        '{\n "fp16": {\n  "enabled": true,\n  "loss_scale": 0,\n  "initial_scale_power": 16,\n'
        '  "loss_scale_window": 1000,\n  "hysteresis": 2,\n  "min_loss_scale": 1\n }\n}'
    )
    found = configuration(text, "ds.json").precision
    assert [(s.leaf, s.value, s.line) for s in found] == [
        ("enabled", True, 3),
        ("loss_scale", 0, 4),
        ("initial_scale_power", 16, 5),
        ("loss_scale_window", 1000, 6),
        ("hysteresis", 2, 7),
        ("min_loss_scale", 1, 8),
    ]
    assert found[4].means == "overflows before the loss scale falls"


@pytest.mark.parametrize(
    ("word", "meaning", "means"),
    [
        ("bf16-mixed", "bf16", "compute in bf16"),
        ("16", "fp16", "compute in fp16"),
        ("32-true", "fp32", "compute in fp32"),
        ("bf16-true", "bf16", "weights are also stored in bf16"),
        ("16-true", "fp16", "weights are also stored in fp16"),
        ("bf16-mixd", "", "cannot be read"),
        ("64-true", "", "compute in 64 bits"),
    ],
)
def test_lightnings_words(word: str, meaning: str, means: str) -> None:
    [setting] = configuration(f"seed_everything: 1\ntrainer:\n  precision: {word}\n").precision
    assert (setting.key, setting.line) == ("trainer.precision", 3)
    assert (setting.claim.meaning if setting.claim else "") == meaning
    assert setting.means.startswith(means)


def test_hydra_is_read_as_data() -> None:
    text = (
        "defaults:\n  - trainer: gpu\n  - override hydra/launcher: basic\n  - model@net: ${size}\n  - _self_\n"
        "trainer:\n  precision: ${oc.env:PRECISION}\n  amp: true\nmetrics: {precision: 4}\n"
    )
    source = configuration(text)
    assert source.names == ["trainer/gpu.yaml", "hydra/launcher/basic.yaml"]
    assert next((s.key, s.means, s.claim is None) for s in source.precision) == ("trainer.precision", UNRESOLVED, True)
    assert brief(source.precision)[1:] == [("trainer.amp", True, 8, "fp16")]


def test_training_arguments_off_and_on() -> None:
    source = configuration(
        "output_dir: o\nnum_train_epochs: 1\nfp16: false\nbf16: true\ntf32: true\ndeepspeed: d.json\n"
    )
    assert brief(source.precision) == [("fp16", False, 3, "fp32"), ("bf16", True, 4, "bf16"), ("tf32", True, 5, "")]
    assert source.names == ["d.json"]


# -- launch lines -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "launcher", "script", "found"),
    [
        (
            "accelerate launch --mixed_precision bf16 train.py",
            "accelerate",
            "train.py",
            [("--mixed_precision", "bf16")],
        ),
        (
            "accelerate launch --mixed_precision=fp16 -m pkg.train",
            "accelerate",
            "pkg.train",
            [("--mixed_precision", "fp16")],
        ),
        ("torchrun --nproc_per_node=2 train.py --bf16", "torchrun", "train.py", [("--bf16", "bf16")]),
        ("python train.py --fp16 True", "python", "train.py", [("--fp16", "fp16")]),
        (
            "python3 -u train.py --amp --amp-dtype bfloat16",
            "python",
            "train.py",
            [("--amp", "fp16"), ("--amp-dtype", "bf16")],
        ),
        ("python train.py --no-amp", "python", "train.py", [("--no-amp", "fp32")]),
        ("python train.py --bf16 data/ --x 1", "python", "train.py", [("--bf16", "bf16")]),
        ("deepspeed --num_gpus 2 train.py --deepspeed_config ds.json", "deepspeed", "train.py", []),
        (
            "python -m torch.distributed.run --nproc_per_node 2 train.py --fp16",
            "torchrun",
            "train.py",
            [("--fp16", "fp16")],
        ),
        (
            "python -m accelerate.commands.launch --mixed_precision no t.py",
            "accelerate",
            "t.py",
            [("--mixed_precision", "fp32")],
        ),
        ("halfstep train unet.yaml --bf16", "halfstep", "unet.yaml", [("--bf16", "bf16")]),
        ("torchrun -m halfstep train unet --fp16", "torchrun", "halfstep", [("--fp16", "fp16")]),
        ("fabric run --precision bf16-mixed train.py", "fabric", "train.py", [("--precision", "bf16")]),
        ("python train.py trainer.precision=16-mixed +model=x", "python", "train.py", [("trainer.precision", "fp16")]),
        (
            "CUDA_VISIBLE_DEVICES=0 nohup python train.py --bf16 > log 2>&1 &",
            "python",
            "train.py",
            [("--bf16", "bf16")],
        ),
        ("srun --ntasks=2 --gres gpu:2 torchrun train.py --fp16", "torchrun", "train.py", [("--fp16", "fp16")]),
        ("cd x && python train.py --bf16; echo done", "python", "train.py", [("--bf16", "bf16")]),
        ("python train.py --mixed_precision $MP", "python", "train.py", [("--mixed_precision", "")]),
    ],
)
def test_a_launch_line(line: str, launcher: str, script: str, found: list[tuple[str, str]]) -> None:
    [launch] = from_shell("run.sh", f"#!/bin/bash\n# python other.py --fp16\n{line}\n")
    assert (launch.launcher, launch.script, launch.line) == (launcher, script, 3)
    settings = launch.source.precision
    assert [(s.key, s.claim.meaning if s.claim else "") for s in settings] == found
    assert all(s.line == 3 for s in settings)


@pytest.mark.parametrize(
    "line", ["pip install accelerate", "echo python train.py", "# torchrun a.py", "python", "accelerate config"]
)
def test_what_is_no_launch_line(line: str) -> None:
    assert from_shell("run.sh", f"{line}\n") == []


def test_a_continued_line_has_the_line_of_each_flag_and_the_variables_above_it() -> None:
    text = (
        "#!/bin/bash\nexport NVIDIA_TF32_OVERRIDE=0\nexport WANDB_API_KEY=secret\n"
        "ACCELERATE_MIXED_PRECISION=bf16 python train.py \\\n  --learning_rate 1e-4 \\\n  --fp16\n"
    )
    [launch] = from_shell("run.sh", text)
    assert [(s.kind, s.key, s.line) for s in launch.source.precision] == [
        ("environment", "NVIDIA_TF32_OVERRIDE", 2),
        ("environment", "ACCELERATE_MIXED_PRECISION", 4),
        ("launch", "--fp16", 6),
    ]
    assert [(s.key, s.value, s.line) for s in launch.source.training] == [("learning_rate", "1e-4", 5)]


IMPORTS = (
    "import accelerate, os, torch\nimport lightning as L\nfrom accelerate import Accelerator\n"
    "from lightning import Fabric\nfrom lightning.pytorch import Trainer\n"
    "from lightning.pytorch.cli import LightningCLI\nfrom torch import autocast\n"
    "from transformers import Seq2SeqTrainingArguments, TrainingArguments\n"
)

# -- scripts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('Accelerator(mixed_precision="bf16")', [("Accelerator(mixed_precision)", "bf16")]),
        ("Accelerator()", []),
        ("Accelerator(mixed_precision=None)", []),
        ('MP = "fp16"\nAccelerator(mixed_precision=MP)', [("Accelerator(mixed_precision)", "fp16")]),
        ("accelerate.Accelerator(mixed_precision=choose())", [("Accelerator(mixed_precision)", "")]),
        ('L.Trainer(precision="bf16-mixed")', [("Trainer(precision)", "bf16")]),
        ("Trainer(precision=16)", [("Trainer(precision)", "fp16")]),
        ("from transformers import Trainer as T\nT(model=m, args=a, train_dataset=d)", []),
        ('TrainingArguments("o", bf16=True)', [("TrainingArguments(bf16)", "bf16")]),
        ("Seq2SeqTrainingArguments(fp16=True)", [("Seq2SeqTrainingArguments(fp16)", "fp16")]),
        ('Fabric(precision="16-mixed")', [("Fabric(precision)", "fp16")]),
        ('LightningCLI(trainer_defaults={"precision": "bf16-mixed"})', [("trainer_defaults(precision)", "bf16")]),
        ('torch.autocast("cuda", dtype=torch.bfloat16)', [("autocast", "bf16")]),
        ("torch.cuda.amp.autocast()", [("autocast", "fp16")]),
        ('torch.autocast("cpu")', [("autocast", "bf16")]),
        ("torch.autocast(device)", [("autocast", "")]),
        ('torch.autocast("cuda", enabled=False)', []),
        ("accelerator.autocast()", []),
        ("torch.amp.GradScaler()", [("GradScaler(enabled)", "")]),
        ("torch.backends.cuda.matmul.allow_tf32 = True", [("torch.backends.cuda.matmul.allow_tf32", "")]),
        ('torch.set_float32_matmul_precision("high")', [("set_float32_matmul_precision", "")]),
        ('p.add_argument("--amp", default=False)', [("--amp default", "fp32")]),
        ('p.add_argument("--fp16", action="store_true")', [("--fp16 default", "")]),
        ('p.add_argument("--mixed_precision", default="no")', [("--mixed_precision default", "fp32")]),
        ('p.add_argument("--epochs", default=3)', []),
        ('os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"', [("ACCELERATE_MIXED_PRECISION", "bf16")]),
        (
            'autocast("cuda", dtype=torch.float16)\nautocast("cuda", dtype=torch.bfloat16)',
            [("autocast", ""), ("autocast", "")],
        ),
    ],
)
def test_a_script(code: str, found: list[tuple[str, str]]) -> None:
    settings = from_python("train.py", f"{IMPORTS}{code}\n").precision
    assert [(s.key, s.claim.meaning if s.claim else "") for s in settings] == found
    last = len((IMPORTS + code).splitlines())
    assert all(s.line == last or "\n" in code for s in settings)


@pytest.mark.parametrize(
    "code",
    [
        'from composer import Trainer\nTrainer(max_duration="1ep", precision="amp_bf16")',
        'from mine import Accelerator\nAccelerator(mixed_precision="most")',
        "def step(model, x, autocast):\n    with autocast():\n        return model(x)",
        "import torch\n@torch.autocast('cuda', dtype=torch.float32)\ndef rays(x): ...",
        "import torch\nwith torch.autocast('cuda', enabled=False): pass",
    ],
)
def test_a_name_of_another_program_and_an_island_are_no_setting(code: str) -> None:
    assert from_python("train.py", f"{code}\n").precision == []


@pytest.mark.parametrize(
    "code",
    [
        "if use_amp:\n    with torch.autocast('cuda'): pass",
        "def forward(x):\n    with torch.autocast('cuda'): pass",
        "with torch.autocast('cuda', enabled=use_amp): pass",
    ],
)
def test_autocast_that_something_chooses_claims_nothing(code: str) -> None:
    [setting] = from_python("train.py", f"import torch\n{code}\n").precision
    assert setting.claim is None


def test_numbers_and_names_in_a_script() -> None:
    code = (
        "import model.unet\nfrom losses import dice\nconfig = load('configs/a.yaml')\n"
        "opt = AdamW(params, lr=1e-4)\nclip_grad_norm_(params, 0.5)\n"
        "@hydra.main(config_path='conf', config_name='train')\ndef main(cfg): ...\n"
    )
    source = from_python("train.py", code)
    assert [(s.key, s.value, s.line) for s in source.training] == [("lr", 1e-4, 4), ("max_norm", 0.5, 5)]
    assert {"model/unet.py", "losses.py", "configs/a.yaml", "conf/train.yaml"} <= set(source.names)
