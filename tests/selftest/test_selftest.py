"""The self-test around its parts: what it tells, what it never tells, what it skips, and the page of devices."""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import socket
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from halfstep.cli.main import build
from halfstep.errors import convert_import_error
from halfstep.precision.hardware import describe_device
from halfstep.selftest import names, worker
from halfstep.selftest.facts import anonymize_text, collect_device_facts
from halfstep.selftest.names import FAILED, PARTS, PASSED, SKIPPED
from halfstep.selftest.part import PartContext, PartFailed, PartResult, PartSkipped
from halfstep.selftest.parts import memory, overhead, parity, plan, ranks, scale
from halfstep.selftest.run import selftest
from tests.selftest.test_sabotage import ROOT
from tests.support.devices import cuda

DEVICES = sorted((ROOT / "docs" / "devices").glob("*.json"))


def invoked(words: list[str]) -> Any:
    return CliRunner().invoke(build(["selftest"]), ["selftest", *words])


# -- one real run -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any], Path]:
    """The command with its cheapest part, and the JSON that it wrote."""
    folder = tmp_path_factory.mktemp("selftest")
    file = folder / "device.json"
    result = invoked(["--only", "scale", "--json", str(file)])
    return result, json.loads(file.read_text()), folder


def test_a_part_that_passes_ends_with_0(ran: tuple[Any, dict[str, Any], Path]) -> None:
    result, report, _ = ran
    assert result.exit_code == 0, result.output
    assert re.search(r"scale\s+passed\s+update", result.output)
    assert "1 passed, in" in result.output
    assert [row["part"] for row in report["parts"]] == ["scale"]
    assert report["passed"]


def test_the_json_has_what_a_reader_needs(ran: tuple[Any, dict[str, Any], Path]) -> None:
    report = ran[1]
    assert report["versions"]["torch"] == torch.__version__
    assert report["device"]["name"] == describe_device("cpu").name
    assert {"cuda.matmul", "mkldnn.enabled"} <= set(report["flags"])
    (row,) = report["parts"]
    assert set(row) == {"part", "result", "figure", "figures", "error", "seconds"}
    assert row["figures"]["update_error"] < 0.02


def test_the_json_names_no_host_no_user_and_no_path(ran: tuple[Any, dict[str, Any], Path]) -> None:
    text = json.dumps(ran[1])
    assert socket.gethostname() not in text
    assert str(Path.home()) not in text
    assert str(ROOT) not in text
    assert not re.search(r'"[^"]*/(tmp|home|root|usr|work|var)\b', text)


def test_nothing_is_left_behind(ran: tuple[Any, dict[str, Any], Path]) -> None:
    assert [path.name for path in ran[2].iterdir()] == ["device.json"]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_crash_is_one_part_s_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT / "tests/selftest/site", ROOT / "src", ROOT))))
    monkeypatch.setenv("SELFTEST_SABOTAGE", "the driver crashes")
    report = selftest(["scale", "observed"])
    assert [row["result"] for row in report["parts"]] == [FAILED, PASSED]
    assert not report["passed"]


# -- the ways in which a part ends ------------------------------------------------------------------------------------


def ended(monkeypatch: pytest.MonkeyPatch, end: BaseException | PartResult) -> dict[str, Any]:
    """Run a part that ends in this way."""

    def check(_place: PartContext) -> PartResult:
        if isinstance(end, BaseException):
            raise end
        return end

    monkeypatch.setitem(sys.modules, "halfstep.selftest.parts.made_up", types.SimpleNamespace(check=check))
    return worker._answer_question(PartContext(describe_device("cpu")), {"do": "made_up"})[1]


def test_a_failure_and_a_bug_are_told_without_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ended(monkeypatch, PartFailed(f"{Path.home()}/secret/run.log of {socket.gethostname()} is gone"))
    assert (row["result"], row["error"]) == (FAILED, "run.log of (host) is gone")
    row = ended(monkeypatch, FileNotFoundError(2, "No such file", "/data/person/weights.pt"))
    assert row["result"] == FAILED
    assert re.fullmatch(
        r"FileNotFoundError: \[Errno 2\] No such file: 'weights.pt' \(test_selftest.py:\d+\)", row["error"]
    )


@pytest.mark.wording
def test_what_cannot_run_is_skipped_and_never_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ended(monkeypatch, PartSkipped("one device only"))
    assert (row["result"], row["figure"]) == (SKIPPED, "one device only")
    row = ended(monkeypatch, ModuleNotFoundError("No module named 'pydantic'", name="pydantic"))
    assert row["result"] == SKIPPED
    assert "pip install 'halfstep[train" in row["figure"]
    extra = convert_import_error(ModuleNotFoundError("", name="yaml"))
    assert extra is not None
    assert ended(monkeypatch, extra)["result"] == SKIPPED
    assert ended(monkeypatch, ModuleNotFoundError("No module named 'torch.gone'", name="torch"))["result"] == FAILED


def test_resume_without_a_folder_or_room_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = worker._answer_question(PartContext(describe_device("cpu"), folder=None), {"do": "resume"})[1]
    assert row["result"] == SKIPPED
    assert "TMPDIR" in row["figure"]
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: types.SimpleNamespace(free=3 * 2**20))
    row = worker._answer_question(PartContext(describe_device("cpu"), folder=tmp_path), {"do": "resume"})[1]
    assert row["result"] == SKIPPED
    assert "3 of 64 MiB free" in row["figure"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("/home/ada/runs/x.json: broken", "x.json: broken"),
        ("see C:\\Users\\ada\\x.json", "see x.json"),
        ("in ~/runs/a, and 3/4 of aten::mul/1", "in a, and 3/4 of aten::mul/1"),
        ('File "/usr/lib/python3/site.py", line 3', 'File "site.py", line 3'),
        (f"by {getpass.getuser()}", "by (user)"),
    ],
)
def test_paths_and_names_are_taken_out(text: str, told: str) -> None:
    assert anonymize_text(text) == told


def test_settings_that_change_the_result_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFSTEP_CPUINFO", "/somewhere/else")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = collect_device_facts(describe_device("cpu"))["settings"]
    assert settings["HALFSTEP_CPUINFO"] == "set"
    assert settings["OMP_NUM_THREADS"] == "1"


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_list_has_every_part() -> None:
    result = invoked(["--list"])
    assert result.exit_code == 0
    assert all(f"\n {part}" in f"\n{result.output}" for part in PARTS)
    files = {path.stem for path in (Path(names.__file__).parent / "parts").glob("*.py")} - {"__init__"}
    assert files == set(PARTS)
    assert all(len(what) > 20 for what in PARTS.values())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "rank"], "did you mean 'ranks'?"),
        (["--json", "device.txt"], "a name that ends in .json"),
        (["--json", "missing/folder/device.json"], "cannot be written"),
        (["--json", "folder.json"], "is a folder"),
        pytest.param(["--device", "cuda:99"], "device 'cuda:99' is not on this machine", marks=pytest.mark.full),
    ],
)
@pytest.mark.wording
def test_wrong_words_end_before_anything_runs(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.json").mkdir()
    if "--device" not in words:
        monkeypatch.setattr("halfstep.selftest.run.selftest", lambda *_, **__: pytest.fail("it ran"))
    result = invoked(words)
    assert result.exit_code in (73, 74, 78), result.output
    assert said in result.output.replace("\n", " ")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.json"]


@pytest.mark.wording
def test_one_of_several_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    result = invoked([])
    assert result.exit_code == 78
    assert "without torchrun" in result.output


def test_the_page_tells_the_bounds_that_hold() -> None:
    page = (ROOT / "docs" / "selftest.md").read_text()
    for words in (
        f"a factor of {memory.WITHIN} ",
        f"at most {overhead.MOST} times",
        f"{overhead._PAIRS} interleaved pairs",
        f"{parity.STEPS} updates",
        f"over {parity.SEEDS} seeds",
        f"a plan of {plan.SECONDS:.0f} seconds",
        f"to {scale._TOLERANCE:.0%} of its norm".replace("%", " %"),
    ):
        assert words in page, words
    assert re.findall(r"^\| (\w+) \| (?!means)", page.partition("passes if")[2], re.M)[: len(PARTS)] == [*PARTS]


def report_of(**results: str) -> dict[str, Any]:
    rows = [
        {
            "part": part,
            "result": results.get(part, PASSED),
            "figure": f"figure of {part}",
            "figures": {},
            "error": f"error of {part}" if results.get(part) == FAILED else None,
            "seconds": 1.0,
        }
        for part in PARTS
    ]
    failed = FAILED in results.values()
    known = {"form": 1, "interrupted": False, "passed": not failed, "seconds": 11.0, "parts": rows}
    return {**collect_device_facts(describe_device("cpu")), **known}


@pytest.mark.parametrize("words", [[], ["--json"], ["--json", "-"], ["--json", "--only", "ranks"]])
def test_a_failure_ends_with_70_and_names_the_part(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    given = report_of(ranks=FAILED, resume=SKIPPED)
    monkeypatch.setattr("halfstep.selftest.run.selftest", lambda *_, **__: given)
    result = invoked(words)
    assert result.exit_code == 70
    if words:
        assert json.loads(result.output) == given
    else:
        assert "failed here: ranks" in result.output
        assert "error of ranks" in result.output
        assert "halfstep selftest --only ranks --json selftest.json" in result.output
        assert "attach selftest.json to an issue" in result.output


def test_an_interruption_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {**report_of(ranks=SKIPPED), "interrupted": True, "passed": False}
    monkeypatch.setattr("halfstep.selftest.run.selftest", lambda *_, **__: given)
    result = invoked([])
    assert result.exit_code == 130
    assert "interrupted: 10 passed, 0 failed, 1 skipped" in result.output


# -- a GPU that is not here -------------------------------------------------------------------------------------------


def test_one_gpu_skips_the_ranks_and_several_have_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    assert ranks._choose_world(torch.device("cpu")) == (2, "gloo")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    with pytest.raises(PartSkipped, match="one device only"):
        ranks._choose_world(device)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    assert ranks._choose_world(device) == (4, "nccl")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 16)
    assert ranks._choose_world(device)[0] == 8


def test_a_gpu_s_memory_is_counted_without_what_was_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workspaces of an earlier part are no part of an update."""
    stepped: list[str] = []
    predicted = types.SimpleNamespace(peak=1000)
    monkeypatch.setattr(memory, "estimate_ledger", lambda *_: predicted)
    monkeypatch.setattr(memory, "Candidate", lambda *_: types.SimpleNamespace(step=lambda: stepped.append("step")))
    monkeypatch.setattr(memory, "measure_update_peak", lambda _candidate: 5000 + 1100)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda _device: 5000)
    monkeypatch.setattr(PartContext, "device", property(lambda self: torch.device("cpu")))
    monkeypatch.setattr(PartContext, "chosen", lambda self: self.native()[0])
    found = memory.check(PartContext(cuda("A100", 8, 0)))
    assert found.figures == {"fp32": {"predicted": 1000, "counted": 1100}}
    assert stepped == ["step"]
    with pytest.raises(PartSkipped, match="mps keeps no peak"):
        memory.check(PartContext(describe_as("mps")))


def describe_as(kind: str) -> Any:
    from dataclasses import replace

    return replace(describe_device("cpu"), kind=kind)


def test_a_gpu_s_native_precisions_are_checked() -> None:
    assert [p.name for p in PartContext(cuda("A100", 8, 0)).native()] == ["fp32", "bf16", "fp16", "tf32"]
    assert [p.name for p in PartContext(cuda("Tesla T4", 7, 5)).native()] == ["fp32", "fp16"]


# -- the page of devices ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DEVICES, ids=lambda path: path.stem)
def test_a_device_passes_and_says_nothing_private(path: Path) -> None:
    report = json.loads(path.read_text())
    assert report["passed"]
    assert not re.search(r"/(tmp|home|root|usr|work|var)\b", path.read_text())


def test_the_issue_template_asks_for_the_json() -> None:
    template = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "device.yml").read_text())
    asked = {part["id"]: part for part in template["body"] if "id" in part}
    assert asked["json"]["validations"] == {"required": True}
    assert "halfstep selftest --json device.json" in template["body"][0]["attributes"]["value"]
