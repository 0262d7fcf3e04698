"""`halfstep doctor RECIPE`, as a person runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from halfstep.cli import main
from tests.report.looked_at import Page


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU", "NVIDIA_TF32_OVERRIDE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    Path("configs").mkdir()
    Path("configs/radio_train_m.yaml").write_text("trainer:\n  amp: False\n  fp16: False\n  lr: 1e-5\n")
    Path("configs/aligned.yaml").write_text("trainer:\n  amp: True\n  fp16: False\n  lr: 1e-5\n  grad_clip: 0.5\n")
    Path("default_config.yaml").write_text("mixed_precision: bf16\ndistributed_type: MULTI_GPU\ngpu_ids: 1,2\n")


def doctor(*words: str, width: int = 80) -> Result:
    return CliRunner().invoke(main.build(), ["doctor", *words], env={"COLUMNS": str(width)}, prog_name="halfstep")


@pytest.mark.wording
@pytest.mark.parametrize("width", [80, 120])
def test_a_contradiction_ends_in_78_and_two_lines_to_type(width: int) -> None:
    result = doctor("configs/radio_train_m.yaml", "--accelerate", "default_config.yaml", width=width)
    assert result.exit_code == 78
    assert max(map(len, result.output.splitlines())) <= width
    assert "\x1b" not in result.output
    lines = [line.strip() for line in result.output.splitlines()]
    assert "amp: True" in lines
    assert "mixed_precision: 'no'" in lines
    assert "configs/radio_train_m.yaml, line 2" in result.output
    assert "Configuration is not aligned: precision mismatch" in result.output


def test_long_names_leave_room_for_their_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    lines = doctor("configs/aligned.yaml").output.splitlines()
    assert any("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE" in line for line in lines)
    row = next(number for number, line in enumerate(lines) if "ACCELERATE_USE_CPU" in line)
    assert "accelerate runs on the CPU" in " ".join(" ".join(lines[row : row + 2]).split())


def test_the_verdict_is_the_end_of_the_page() -> None:
    result = doctor("configs/aligned.yaml", "--accelerate", "default_config.yaml", width=120)
    assert result.exit_code == 0
    assert result.output.splitlines()[-8:] == [
        "=== Configuration Status Check ===",
        "✅ Configuration is properly aligned: everything asks for bf16",
        "   AMP: enabled (in bf16)",
        "   FP16: disabled (the format is bf16)",
        "   Learning Rate: 1e-5 (trainer.lr, configs/aligned.yaml, line 4)",
        "   Gradient Clipping: 0.5 (trainer.grad_clip, configs/aligned.yaml, line 5)",
        "   NaN Handling: not set here (halfstep.Stepper skips such steps)",
        "   Final Status: ready",
    ]


def test_json_is_one_object_with_the_same_exit_code() -> None:
    result = doctor("configs/radio_train_m.yaml", "--accelerate", "default_config.yaml", "--json")
    assert result.exit_code == 78
    report = json.loads(result.stdout)
    assert report["status"]["aligned"] is False
    assert {s["key"] for s in report["settings"]} >= {"trainer.amp", "trainer.fp16", "mixed_precision"}
    assert all(set(s) == {"source", "file", "line", "key", "value", "means"} for s in report["settings"])


@pytest.mark.wording
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["configs/none.yaml"], 78),
        (["configs/aligned.yaml", "--accelerate", "none.yaml"], 78),
        (["configs/unsafe.yaml"], 77),
        (["no_such_recipe"], 78),
        (["configs/aligned.yaml", "--device", "cpu"], 78),
        (["configs/aligned.yaml", "--precision", "bf16", "--fresh"], 78),
    ],
)
def test_errors_are_three_lines_and_a_code(words: list[str], code: int) -> None:
    Path("configs/unsafe.yaml").write_text("amp: !!python/name:os.system\n")
    result = doctor(*words)
    assert result.exit_code == code
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 3
    assert "do: " in result.stderr


@pytest.mark.parametrize("name", ["doctor.md", "doctor.HTML"])
@pytest.mark.parametrize("what", [["configs/radio_train_m.yaml", "--accelerate", "default_config.yaml"], ["configs"]])
def test_the_page_is_written_as_a_document_too(name: str, what: list[str]) -> None:
    alone = doctor(*what)
    result = doctor(*what, "--report", name)
    assert result.exit_code == alone.exit_code
    assert result.stdout == f"{alone.stdout}\nwritten: {name}\n"
    text = Path(name).read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>" if name.endswith("HTML") else "## precision")
    plain = Page(text).text if name.endswith("HTML") else text.replace("\\", "")
    found = json.loads(doctor(*what, "--json").stdout)
    for said in (found["status"]["final"], *(finding["id"] for finding in found["findings"])):
        assert said in plain


@pytest.mark.parametrize("name", ["doctor.pdf", "doctor", "doctor.md.txt"])
@pytest.mark.wording
def test_other_documents_are_refused_before_anything_is_changed(name: str) -> None:
    before = Path("configs/radio_train_m.yaml").read_bytes()
    words = ["configs/radio_train_m.yaml", "--accelerate", "default_config.yaml", "--fix", "bf16", "--report", name]
    result = doctor(*words)
    assert result.exit_code == 78
    assert ".md or .html" in result.stderr
    assert Path("configs/radio_train_m.yaml").read_bytes() == before
    assert not Path(name).exists()


def test_an_ascii_terminal_gets_words_for_marks() -> None:
    code = "from halfstep.cli.main import main; main()"
    words = [sys.executable, "-c", code, "doctor", "configs/aligned.yaml"]
    done = subprocess.run(words, capture_output=True, env={"PYTHONIOENCODING": "ascii"}, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert "OK: Configuration is properly aligned" in done.stdout.decode("ascii")


def test_checking_settings_needs_no_torch() -> None:
    code = (
        "import sys; from halfstep.doctor.checkup import check_settings\n"
        "check_settings('configs/aligned.yaml', accelerate='default_config.yaml')\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
