import ast
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from halfstep import __version__, cli
from halfstep.cli import main
from halfstep.cli._commands import GROUPS, list_command_names
from halfstep.errors import Contradiction, MissingExtra, PrecisionRefused, WrongUse

FOLDER = Path(cli.__path__[0])


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def call(*words: str, width: int = 80) -> Result:
    return CliRunner().invoke(main.build(), list(words), env={"COLUMNS": str(width)}, prog_name="halfstep")


def test_help_lists_the_folder_in_its_groups() -> None:
    shown = call("--help").output
    assert len(list_command_names()) >= 1
    for name in list_command_names():
        assert name in shown
    assert "Trouble" in shown


def test_a_terminal_that_is_not_in_utf_8_gets_question_marks_and_no_traceback(tmp_path: Path) -> None:
    run = tmp_path / ("a name that no narrow terminal has room for, ünd more" * 2)
    run.mkdir()
    (run / "recipe.yaml").write_text("task: segmentation\n")
    (run / "train.log").write_text("")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "COLUMNS": "60"}
    command = [sys.executable, "-m", "halfstep", "runs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, env={**os.environ, **ascii_only})
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"a name that no narr?" in done.stdout


@pytest.mark.wording
def test_a_torchvision_for_another_torch_is_named(tmp_path: Path) -> None:
    """As it happens where a folder of wheels offers a torch without CUDA: the package itself fails while imported."""
    package = tmp_path / "packages" / "torchvision"
    package.mkdir(parents=True)
    package.joinpath("__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    command = [sys.executable, "-m", "halfstep", "train", "segmentation_tiny", "--fp32"]
    path = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == MissingExtra.exit_code
    assert "Traceback" not in done.stderr
    assert "torchvision was built for another build of torch" in done.stderr
    assert "do: pip install --force-reinstall torch torchvision" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_an_error_that_nobody_expected_ends_with_70_and_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(names: Any) -> Any:
        raise ZeroDivisionError("of a test")

    monkeypatch.setattr(main, "build", broken)
    monkeypatch.setattr(sys, "argv", ["halfstep", "recipes"])
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == 70
    assert "ZeroDivisionError: of a test" in capsys.readouterr().err


def test_every_command_has_a_known_group_and_a_docstring_of_one_line() -> None:
    for name in list_command_names():
        module = __import__(f"halfstep.cli.{name}", fromlist=["run"])
        assert module.GROUP in GROUPS
        assert module.run.__doc__.strip().endswith(".")


def test_a_file_more_is_a_command_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "greet.py").write_text(
        'GROUP = "Files"\n\n\ndef run() -> None:\n    """Say hello."""\n    print("hello")\n'
    )
    (tmp_path / "_part.py").write_text("raise ImportError\n")
    monkeypatch.setattr(cli, "__path__", [*cli.__path__, str(tmp_path)])
    assert "greet" in list_command_names()
    assert call("greet").output == "hello\n"
    monkeypatch.delitem(sys.modules, "halfstep.cli.greet")


def test_help_imports_no_torch_and_is_quick() -> None:
    code = (
        "import sys; sys.argv = ['halfstep', '--help']\n"
        "from halfstep.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    # Processor time: on a quiet machine it is the time that a person waits, and a busy one does not change it much.
    assert min(times) <= 0.8


def test_version_and_module() -> None:
    assert call("--version").output == f"halfstep {__version__}\n"
    done = subprocess.run([sys.executable, "-m", "halfstep", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"halfstep {__version__}\n"


def test_doctor_as_json_is_one_object() -> None:
    report = json.loads(call("doctor", "--device", "cpu", "--json").stdout)
    assert {row["name"] for row in report["formats"]} == {"fp32", "tf32", "bf16", "fp16", "fp8"}
    assert report["choice"]["precision"] in ("bf16", "fp32")
    assert "deterministic" in report["flags"]
    assert report["device"]["facts"]["torch"]


@pytest.mark.parametrize("width", [80, 120])
def test_doctor_fits_its_terminal_and_is_plain_without_one(width: int) -> None:
    result = call("doctor", "--device", "cpu", width=width)
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= width
    assert "\x1b" not in result.output
    for word in ("Device", "Formats", "GEMM", "conv3d", "bf16", "Choice", "chosen by auto", "chosen"):
        assert word in result.output


def test_doctor_says_what_it_took_and_prints_findings() -> None:
    result = call("doctor", "--device", "cpu", "--precision", "16-mixed", width=120)
    assert "Lightning's word for fp16" in result.output
    assert "warning precision.slow" in result.output


def test_doctor_measures_again_only_when_told() -> None:
    call("doctor", "--device", "cpu")
    assert json.loads(call("doctor", "--device", "cpu", "--json").stdout)["measured"]["cached"]
    assert not json.loads(call("doctor", "--device", "cpu", "--fresh", "--json").stdout)["measured"]["cached"]


@pytest.mark.wording
@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["--precision", "bfoat16"], 78, "did you mean 'bfloat16'?"),
        (["--precision", "bf16-true"], 78, "write precision='bf16'"),
        (["--precision", "tf32", "--strict"], 78, "request one of these"),
        (["--device", "tpu"], 78, "choose another device"),
    ],
)
def test_errors_are_three_lines_and_a_code(words: list[str], code: int, line: str) -> None:
    device = [] if "--device" in words else ["--device", "cpu"]
    result = call("doctor", *device, *words)
    assert result.exit_code == code
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 3
    assert line in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Contradiction("a against b"), 78),
        (PrecisionRefused("no"), 78),
        (WrongUse("no"), 78),
        (MissingExtra("no"), 70),
    ],
)
def test_the_exit_code_of_each_error(error: Exception, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_named: object) -> None:
        raise error

    monkeypatch.setattr("halfstep.cli.doctor.examine_device", fail)
    assert call("doctor").exit_code == code
    assert call("--debug", "doctor").exception is error
    monkeypatch.setenv("HALFSTEP_DEBUG", "1")
    assert call("doctor").exception is error


def test_ctrl_c_while_a_command_loads_is_a_word_and_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_args: object, **_named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("halfstep.cli.doctor.examine_device", interrupted)
    done = call("doctor")
    assert (done.exit_code, done.stderr) == (130, "stopped\n")


def test_ctrl_c_before_the_commands_are_loaded_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_names: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "build", interrupted)
    monkeypatch.setattr(sys, "argv", ["halfstep", "recipes"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "stopped\n"


def test_commands_import_torch_only_inside_functions() -> None:
    files = list(FOLDER.glob("*.py"))
    assert len(files) >= 3
    for file in files:
        for node in ast.parse(file.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "torch" for name in names), file


@pytest.mark.parametrize("words", [["--wrong"], ["wrong"], ["doctor", "--wrong"], ["train"]])
def test_words_that_cannot_be_read_end_with_64(words: list[str]) -> None:
    assert CliRunner().invoke(main.build(), words).exit_code == 64
