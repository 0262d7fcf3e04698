"""Reading a folder: what is skipped, what is bounded, how long it takes, and that nothing in it is run."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from halfstep.doctor import project as reading
from halfstep.doctor.project_check import check_project, examine_project
from halfstep.errors import WrongUse

SCRIPT = (
    "import torch\nfrom torch import nn\n\n\n"
    + "".join(
        f"class Block{i}(nn.Module):\n    def forward(self, x, scale=1.0):\n        return x.relu() * scale + {i}\n\n\n"
        for i in range(30)
    )
    + 'def main():\n    with torch.autocast("cuda", dtype=torch.bfloat16):\n        pass\n'
)
CONFIG = "model:\n  layers: [1, 2, 3]\n  width: 128\ntrainer:\n  amp: true\n  lr: 1e-4\n" + "".join(
    f"  key_{i}: {i}\n" for i in range(40)
)
LAUNCH = "#!/bin/bash\n" + "echo preparing\n" * 30 + "torchrun --nproc_per_node 8 train_{}.py --bf16 --lr 1e-4\n"


def write_many(folder: Path, files: int) -> None:
    """Write a project of this many files: six tenths scripts, three tenths configurations, one tenth launch lines."""
    for number in range(files):
        part = folder / f"part_{number % 20}"
        part.mkdir(exist_ok=True)
        if number % 10 < 6:
            (part / f"train_{number}.py").write_text(f"{SCRIPT}# no two are the same: {number}\n")
        elif number % 10 < 9:
            (part / f"config_{number}.yaml").write_text(CONFIG)
        else:
            (part / f"run_{number}.sh").write_text(LAUNCH.format(number - 5))


def test_a_thousand_files_in_five_seconds(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """In CI a tenth of them in a tenth of the time, with a margin for what else the machine does; all with --full."""
    files = 1000 if request.config.getoption("--full") else 100
    write_many(tmp_path, files)
    begun = time.process_time()
    report = check_project(str(tmp_path), variables={})
    seconds = time.process_time() - begun
    print(f"{files} files in {seconds:.2f} s")
    assert report.files.read == files
    assert seconds < 5.0 * files / 1000 * (1 if files == 1000 else 2)


def test_what_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = tmp_path / "outside"
    inside = tmp_path / "project"
    for folder in (".git", ".venv", "node_modules", "__pycache__", "runs", "sub"):
        (inside / folder).mkdir(parents=True)
        (inside / folder / "config.yaml").write_text("amp: true\n")
    outside.mkdir()
    (outside / "config.yaml").write_text("amp: false\n")
    (inside / "linked.yaml").symlink_to(outside / "config.yaml")
    (inside / "linked").symlink_to(outside)
    (inside / "large.yaml").write_text("amp: false\n" + "#" * reading.LARGEST)
    (inside / "binary.yaml").write_bytes(b"amp: false\n\0")
    (inside / "latin.yaml").write_bytes(b"amp: false # \xe9\n")
    report = check_project(str(inside), variables={})
    assert {setting.place for setting in report.settings} == {"sub/config.yaml"}
    monkeypatch.setattr(reading, "MOST_FILES", 2)
    assert check_project(str(inside), variables={}).files.more is True


@pytest.mark.wording
def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="not a folder"):
        check_project(str(tmp_path / "none"))


TOUCH = "import os\nos.system('touch pwned')\nopen('pwned', 'w').close()\n"
HOSTILE: dict[str, str | bytes] = {
    "train.py": TOUCH + "import torch\nwith torch.autocast('cuda', dtype=torch.bfloat16): pass\n",
    "setup.py": TOUCH + "# mixed_precision",
    "conftest.py": TOUCH + "# bf16",
    "sitecustomize.py": TOUCH + "# bf16",
    "yaml.py": TOUCH + "# bf16",
    "torch.py": TOUCH + "# bf16",
    "accelerate.py": TOUCH + "Accelerator(mixed_precision=__import__('os').system('touch pwned'))\n",
    "metaclass.py": "class M(type):\n    def __new__(c, *a): open('pwned', 'w')\nclass T(metaclass=M): bf16 = 1\n",
    "decorated.py": "@__import__('os').system('touch pwned')\ndef main(): autocast()\n",
    "default.py": "parser.add_argument('--amp', default=open('pwned', 'w'))\n",
    "parentheses.py": "autocast" + "(" * 50_000,
    "minus.py": "bf16 = " + "-" * 50_000 + "1\n",
    "attributes.py": "autocast" + ".a" * 50_000 + "()\n",
    "digits.py": "fp16 = " + "9" * 100_000 + "\n",
    "nul.py": b"autocast\0()",
    "encoding.py": b"# -*- coding: rot13 -*-\nvzcbeg bf # bf16\n",
    "tag.yaml": "amp: !!python/object/apply:os.system ['touch pwned']\n",
    "new.yaml": "precision: !!python/object/new:os.system [touch pwned]\n",
    "laughs.yaml": "a: &a [lol, lol]\nb: &b [*a, *a]\namp: [*b, *b]\n",
    "deep.yaml": "amp: " + "[" * 10_000 + "\n",
    "repeated.yaml": "amp: true\namp: false\n",
    "hydra.yaml": "precision: ${oc.env:HOME}\ndefaults: ['${oc.decode:x}']\nmodel: {_target_: os.system, amp: true}\n",
    "deep.json": '{"fp16": ' + '{"enabled": ' * 10_000 + "}" * 10_001,
    "numbers.json": '{"fp16": {"enabled": true, "loss_scale": 1' + "0" * 5_000 + "}}",
    "run.sh": "$(touch pwned)\n`touch pwned`\npython $(touch pwned) --bf16\n",
    "export.sh": "export ACCELERATE_MIXED_PRECISION=$(touch pwned)\naccelerate launch `touch pwned` --fp16\n",
    "quotes.sh": "python train.py --bf16 'never closed\n" + "\\\n" * 5_000,
    "words.sh": "python train.py --fp16 " + "x " * 9_000 + "\n",
    "clips.yaml": "clip" * 200_000 + "\n",
    "escape.yaml": 'trainer: {amp: "\\e[2J\\e[31m"}\n',
}  # fmt: skip


def test_hostile_files_are_neither_run_nor_waited_for(tmp_path: Path) -> None:
    assert len(HOSTILE) >= 25
    folder = tmp_path / "project"
    folder.mkdir()
    for name, content in HOSTILE.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    os.mkfifo(folder / "pipe.yaml")
    (folder / "endless.sh").symlink_to("/dev/zero")
    # The installed command, whose own folder stands first in sys.path; not `python -m`, which puts this one there.
    code = (
        "import sys; sys.path = [p for p in sys.path if p]; import halfstep.doctor.project_check as check, json\n"
        "from halfstep.json_data import convert_to_json_data\n"
        "report = check.check_project('.', variables={})\n"
        "assert 'torch' not in sys.modules\n"
        "print(json.dumps(convert_to_json_data(report))); print(check.__file__, file=sys.stderr)"
    )
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert time.monotonic() - begun < 60
    assert not (folder / "pwned").exists()
    assert "\x1b" not in done.stdout


def test_tags_anchors_and_merges_are_read(tmp_path: Path) -> None:
    text = "train:\n  lr: !!float 2e-4\n  amp: !!bool true\nsize: !Custom 3\nnames: {0: x}\n"
    (tmp_path / "a.yaml").write_text(text)
    (tmp_path / "b.yml").write_text("base: &base\n  amp: true\n  lr: 1e-4\ntrain:\n  <<: *base\n  lr: 1e-3\n")
    project, _, findings = examine_project(str(tmp_path), {})
    assert findings == []
    found = {(s.place, s.key, s.value) for source in project.sources for s in (*source.precision, *source.training)}
    assert {("a.yaml", "train.lr", 2e-4), ("a.yaml", "train.amp", True), ("b.yml", "train.amp", True)} <= found
    assert ("b.yml", "train.lr", 1e-3) in found


def test_an_alias_is_no_bomb(tmp_path: Path) -> None:
    rows = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60)]
    (tmp_path / "bomb.yaml").write_text("amp: true\n" + "\n".join(rows) + "\nself: &me {<<: *me}\n")
    assert examine_project(str(tmp_path), {})[2] == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="has no reader of TOML")
def test_toml_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[train]\nmixed_precision = "bf16"\nlr = 1e-4\n')
    [source] = examine_project(str(tmp_path), {})[0].sources
    assert [(s.key, s.value, s.line) for s in source.precision] == [("train.mixed_precision", "bf16", 2)]


def test_a_notebook_is_read_with_its_own_lines_and_never_edited(tmp_path: Path) -> None:
    code = [
        "!pip install -q \\\n", "    torch\n", "import torch\n", "def update(scaler, loss, model, optimizer):\n",
        "    scaler.scale(loss).backward()\n", "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
        "    scaler.step(optimizer)\n", "    scaler.update()",
    ]  # fmt: skip
    cells = [
        {"cell_type": "markdown", "source": ["`scaler.step`"]},
        {"cell_type": "code", "source": ["this is no Python"]},
        {"cell_type": "code", "source": code},
    ]
    text = json.dumps({"cells": cells}, indent=1)
    (tmp_path / "a.ipynb").write_text(text)
    [finding] = examine_project(str(tmp_path), {})[2]
    assert finding.id == "code.clip_before_unscale"
    assert "clip_grad_norm_" in text.splitlines()[(finding.line or 0) - 1]
    assert finding.edits == ()


@pytest.mark.wording
def test_files_that_are_not_read_are_one_note(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"{number}.yaml").write_text("amp: [true\n")
    [finding] = examine_project(str(tmp_path), {})[2]
    assert (finding.id, finding.severity) == ("project.not_read", "note")
    assert "9 files were not read" in finding.evidence
    assert "and 4 more" in finding.evidence


def test_a_checkpoint_is_read_without_torch(tmp_path: Path) -> None:
    header = json.dumps({"running_var": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    numbers = struct.pack("<ff", 1.0, float("inf"))
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + numbers)
    code = f"""
import sys
from halfstep.doctor.project_check import examine_project
assert [f.id for f in examine_project({str(tmp_path)!r}, {{}})[2]] == ["checkpoint.not_finite"]
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "files",
    [
        {
            "params.py": 'p.add_argument("--precision", choices=["amp", "mine"], default="mine")\n',
            "a.yaml": "precision: mine\n",
        },
        {"words.py": 'import torch\nWORDS = {"mine": torch.float16}\nallow_tf32 = 1\n', "a.yaml": "precision: mine\n"},
        {"words.py": 'class P(str, Enum):\n    A = "mine"\nallow_tf32 = 1\n', "a.yaml": "precision: mine\n"},
        {"a.yaml": "precision: amp_bf16\nmax_duration: 1ep\n"},
        {"a.yaml": "precision: bf16-true\ncheckpoint_dir: x\n"},
        {"a.yaml": "base_model: a/b\nbf16: auto\nfp16:\nlearning_rate: 0.1\nfsdp_config:\nfsdp:\n"},
        {"vocab_bpe.json": '{"the": 1, "amp": 1435, "lr": 7}'},
        {"columns.json": '{"amp": "float32", "precision": "float64"}'},
        {"a.py": 'p.add_argument("--amp", action="store_true")\np.add_argument("--amp-dtype", default="float16")\n'},
        {
            "rays.py": "import torch\n@torch.autocast('cuda', dtype=torch.float32)\ndef rays(x): return x\n",
            "train.py": "from lightning import Trainer\nfrom rays import rays\nTrainer(precision=16)\n",
        },
        {
            "engine.py": "import torch\ndef go(m, x, amp):\n    if amp:\n        with torch.autocast('cuda'): m(x)\n",
            "main.py": 'from engine import go\np.add_argument("--use_amp", type=bool, default=False)\n',
        },
        {
            "a.py": "from accelerate import Accelerator\nAccelerator(mixed_precision='bf16')\n",
            "b.py": "from accelerate import Accelerator\nAccelerator(mixed_precision='fp16')\n",
        },
    ],
)  # fmt: skip
def test_words_of_others_and_separate_programs_are_no_finding(files: dict[str, str], tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert examine_project(str(tmp_path), {})[2] == []


def test_losses_that_logs_leave_out_are_noted(tmp_path: Path) -> None:
    text = "output_dir: o\nnum_train_epochs: 1\nbf16: true\nlogging_nan_inf_filter: true\n"
    (tmp_path / "args.yaml").write_text(text)
    [finding] = examine_project(str(tmp_path), {})[2]
    assert (finding.id, finding.line) == ("transformers.nan_hidden_from_logs", 4)
