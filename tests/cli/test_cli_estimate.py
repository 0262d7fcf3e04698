"""`halfstep estimate` as a person types it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from halfstep.cli.main import build

CASE = "tests.support.cases:linear"
OWN = """
import torch
from torch import nn
from torch.nn import functional as F

opened = 0

def interrupted():
    global opened
    opened += 1
    if opened > {limit}:
        raise KeyboardInterrupt
    return nn.Linear(8, 8), lambda model, batch: model(batch).sum(), torch.ones(4, 8)

def refused():
    loss = lambda model, batch: F.binary_cross_entropy(model(batch).sigmoid(), torch.zeros_like(batch))
    return nn.Linear(8, 8), loss, torch.ones(4, 8)

def large():
    return nn.Linear(1 << 15, 1 << 15), lambda model, batch: model(batch).sum(), torch.ones(4, 1 << 15)

def shape():
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(5, 2))
    return model, lambda model, batch: model(batch).sum(), torch.ones(4, 8)

def single():
    return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), lambda model, batch: model(batch).sum(), torch.ones(1, 8)

def as_long_by_accident():
    def loss(model, batch):
        return F.cross_entropy(model(batch["image"]) @ batch["matrix"], batch["label"])
    batch = {{"image": torch.ones(3, 8), "label": torch.tensor([0, 1, 2]), "matrix": torch.ones(3, 3)}}
    return nn.Linear(8, 3), loss, batch

def recurrent():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTM(8, 8, batch_first=True)
        def forward(self, x):
            return self.cell(x)[0]
    return Net(), lambda model, batch: model(batch).sum(), torch.ones(4, 5, 8)

def frozen():
    return nn.Linear(8, 8).requires_grad_(False), lambda model, batch: model(batch).sum(), torch.ones(4, 8)

def many_modules():
    built.append(1)
    float(torch.ones(1))  # cannot be built on tensors without numbers
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(50)]
    return nn.Sequential(*layers), lambda model, batch: model(batch).sum(), torch.ones(4, 8)

built = []

def value_needed():
    def loss(model, batch):
        out = model(batch).sum()
        return out if out.item() > 0 else -out
    return nn.Linear(8, 8), loss, torch.ones(4, 8)
"""


def halfstep(*words: object) -> Result:
    return CliRunner().invoke(build(), ["estimate", *map(str, words)], catch_exceptions=False)


def report_of(*words: object) -> dict[str, Any]:
    done = halfstep(*words, "--json")
    assert done.exit_code == 0, done.output

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    found: dict[str, Any] = json.loads(done.stdout, parse_constant=refuse)
    return found


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of a person's own, a new one for each test."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OWN.format(limit=4))
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_the_first_line_answers_and_the_last_one_can_be_typed() -> None:
    done = halfstep(CASE, "--device", "t4", "--precision", "fp32,bf16,fp16", "--recompute", "off")
    assert done.exit_code == 0, done.output
    lines = done.stdout.strip().splitlines()
    assert lines[0].startswith("fits: peak ")
    assert "of 15.00 GiB on t4 in fp16 at batch 8; no limit found up to batch 1048576" in " ".join(done.stdout.split())
    assert lines[-1] == f"next: halfstep plan {CASE}"
    page = " ".join(done.stdout.split())
    assert "bf16: not native on NVIDIA Tesla T4: compute capability 7.5 < 8.0: bf16 is emulated" in page
    assert "fp16 is the one for it" in page
    assert "not verified on this device" in page
    assert "assumed: 768 MiB" in page


def test_the_page_fits_80_columns_and_has_no_colour_in_a_pipe() -> None:
    done = CliRunner(env={"COLUMNS": "80"}).invoke(
        build(), ["estimate", CASE, "--device", "4GB", "--recompute", "off", "--precision", "fp32,bf16,fp16"]
    )
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines()[1:-1])) <= 80


def test_json_is_strict_and_adds_up() -> None:
    report = report_of(CASE, "--device", "rtx 4090,4GB", "--batch", "8,16", "--recompute", "both")
    first, second = report["devices"]
    assert [page["device"]["id"] for page in (first, second)] == ["rtx4090", "4GB"]
    assert first["device"]["usable"] > second["device"]["usable"] > 0
    assert [(c["setting"]["precision"], c["samples"], c["setting"]["recompute"]) for c in first["columns"]] == [
        (precision, batch, recompute)
        for precision in ("fp32", "bf16")
        for batch in (8, 16)
        for recompute in (False, True)
    ]
    for page in (first, second):
        for column in page["columns"]:
            assert column["peak"] == sum(column["at_peak"].values())
            assert column["device"] == page["device"]["id"]
            assert column["fits"]
        for row in page["largest"]:
            peaks = dict(row["searched"])
            assert peaks[row["batch"]] <= page["device"]["usable"]
            assert row["at_least"] or peaks[row["batch"] + 1] > page["device"]["usable"]
    assert report["interrupted"] is False
    assert report["verdict"]["take"] == {"precision": "bf16", "batch": 8, "recompute": False}


def test_without_a_device_it_is_this_machine() -> None:
    report = report_of(CASE, "--recompute", "off", "--precision", "fp32")
    (page,) = report["devices"]
    assert page["device"]["id"] == "here"
    assert "on this machine in fp32" in report["verdict"]["lines"][0]
    assert page["columns"][0]["samples"] == 8


@pytest.mark.slow
def test_a_recipe_ends_in_the_command_that_trains_it() -> None:
    report = report_of("classification_tiny", "data.samples=16", "train.batch_size=4", "--device", "a100-80gb",
                       "--recompute", "off", "--precision", "bf16")  # fmt: skip
    assert report["devices"][0]["columns"][0]["samples"] == 4
    assert report["next"] == "halfstep train classification_tiny data.samples=16 --bf16 train.batch_size=4"


def test_what_does_not_fit_is_told_with_what_is_missing_and_the_size_that_would(own: str) -> None:
    report = report_of(f"{own}:large", "--device", "4GB", "--recompute", "off")
    (page,) = report["devices"]
    assert all(row["batch"] == 0 and row["missing"] > 0 for row in page["largest"])
    assert all(lever["fits"] is False for row in page["largest"] for lever in row["levers"])
    assert report["verdict"]["lines"][0].startswith("does not fit: peak 1")
    assert "in every setting tried" in report["verdict"]["lines"][0]
    assert report["verdict"]["take"] is None
    size = report["next"].split("--device ")[1]
    assert report_of(f"{own}:large", "--device", size, "--recompute", "off", "--batch", 1)["verdict"]["take"]


@pytest.mark.wording
def test_a_precision_that_cuda_refuses_leaves_the_others(own: str) -> None:
    report = report_of(f"{own}:refused", "--device", "a100-80gb")
    (page,) = report["devices"]
    assert {column["setting"]["precision"] for column in page["columns"]} == {"fp32"}
    assert [row["precision"] for row in page["refused"]] == ["bf16"]
    assert "BCEWithLogitsLoss" in page["refused"][0]["do"]
    assert "BCEWithLogitsLoss" in halfstep(f"{own}:refused", "--device", "a100-80gb").stdout


@pytest.mark.parametrize("json_wanted", [True, False])
def test_ctrl_c_leaves_what_there_is(own: str, json_wanted: bool) -> None:
    done = halfstep(f"{own}:interrupted", "--device", "4GB", *(["--json"] if json_wanted else []))
    assert done.exit_code == 130
    if json_wanted:
        report = json.loads(done.stdout)
        assert report["interrupted"] is True
        assert len(report["devices"][0]["columns"]) == 2
        assert report["verdict"]["lines"][0].startswith("fits: ")
    else:
        assert "interrupted" in done.stdout
        assert done.stdout.startswith("fits: ")


def test_ctrl_c_before_anything_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_at_once.py").write_text(OWN.format(limit=0))
    monkeypatch.syspath_prepend(str(tmp_path))
    done = halfstep("own_at_once:interrupted", "--json")
    assert done.exit_code == 130
    report = json.loads(done.stdout)
    assert report["devices"] == []
    assert report["verdict"] == {"lines": ["nothing was estimated"], "savings": [], "take": None}
    assert halfstep("own_at_once:interrupted").exit_code == 130


@pytest.mark.wording
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--device", "rtx409"], "did you mean 'rtx4090'"),
        (["--device", "a100"], "a100-40gb, a100-80gb"),
        (["--device", "cuda:0"], "--device a100-80gb"),
        (["--device", "cpu:7"], "has no cpu:7"),
        (["--device", "a1000"], "is another card"),
        (["--batch", str(10**20)], "up to 1048576"),
        (["--batch", "0"], "1 sample or more"),
        (["--batch", "eight"], "whole numbers"),
        (["--batch", "-3"], "whole numbers"),
        (["--precision", "fp17"], "did you mean"),
        (["--precision", "nvfp4"], "--survive nvfp4"),
        (["--recompute", "maybe"], "auto, both, off, on"),
    ],
)
def test_wrong_words_are_told_before_anything_is_built(words: list[str], told: str) -> None:
    done = halfstep("no.such.module:case", *words)
    assert done.exit_code == 78
    assert told in done.stderr
    assert done.stdout == ""


def test_what_is_assumed_of_a_loss_that_needs_a_value_is_printed_with_its_line(own: str) -> None:
    done = halfstep(f"{own}:value_needed", "--device", "4GB", "--precision", "fp32", "--no-search", "--json")
    assert done.exit_code == 0, done.output
    [page] = json.loads(done.stdout)["devices"]
    assert page["largest"] == []
    [assumption] = page["columns"][0]["assumptions"]
    assert f"{own}.py" in assumption["place"]
    assert any(assumption["place"] in note for note in page["columns"][0]["notes"])


def test_a_recipe_needs_no_data_here() -> None:
    done = halfstep("classify", "data.size=32", "model.name=resnet18", "--device", "a100-80gb", "--no-search", "--json")
    assert done.exit_code == 0, done.output
    [page] = json.loads(done.stdout)["devices"]
    assert all("which does not exist here" in column["assumptions"][0]["place"] for column in page["columns"])


@pytest.mark.wording
def test_an_error_of_their_own_is_told_once_with_their_line(own: str, tmp_path: Path) -> None:
    for case, said in (("shape", "same reduction dim"), ("single", "more than 1 value per channel")):
        done = halfstep(f"{own}:{case}", "--device", "a100-80gb")
        assert done.exit_code == 78
        lines = done.stderr.splitlines()
        told = [line for line in lines if said in line]
        assert len(told) == 1
        assert told[0].startswith(str(tmp_path / f"{own}.py:"))
        assert "Traceback" not in done.stderr
    assert "--batch 2 runs" in lines[-1]
    assert halfstep(f"{own}:single", "--device", "4GB", "--batch", 2).exit_code == 0


@pytest.mark.wording
def test_nothing_to_train_is_told(own: str) -> None:
    done = halfstep(f"{own}:frozen", "--device", "4GB")
    assert done.exit_code == 78
    assert "do: " in done.stderr


@pytest.mark.wording
def test_a_batch_that_cannot_be_resized_keeps_its_own_column(own: str) -> None:
    report = report_of(f"{own}:as_long_by_accident", "--device", "4GB", "--precision", "fp32")
    (page,) = report["devices"]
    assert [column["samples"] for column in page["columns"]] == [3]
    assert page["largest"] == []
    (row,) = page["not_searched"]
    assert "batch['image'] (3, 8), batch['label'] (3,), batch['matrix'] (3, 3) were taken as samples" in row["why"]
    asked = halfstep(f"{own}:as_long_by_accident", "--device", "4GB", "--batch", 6)
    assert asked.exit_code == 78
    assert "batch['matrix'] (3, 3) were taken as samples" in asked.stderr
    page_of_it = " ".join(halfstep(f"{own}:as_long_by_accident", "--device", "4GB").stdout.split())
    assert "were taken as samples" in page_of_it
    assert "(the model itself)" in page_of_it


def test_a_fallback_is_told_in_the_first_line_and_facts_of_this_cpu_are_not(own: str) -> None:
    report = report_of(f"{own}:recurrent", "--device", "a100-80gb", "--precision", "fp32,fp16,bf16")
    assert report["verdict"]["lines"][0].startswith("fits, by the CPU's rules: peak ")
    notes = [note for column in report["devices"][0]["columns"] for note in column["notes"]]
    assert notes
    assert not [note for note in notes if "here" in note or "on a CPU" in note]


@pytest.mark.slow
def test_a_deep_model_takes_few_ledgers_and_is_built_once(own: str) -> None:
    import importlib

    before = time.process_time()
    report = report_of(f"{own}:many_modules", "--device", "t4", "--precision", "fp16")
    assert time.process_time() - before < 60
    assert len(importlib.import_module(own).built) <= 2
    (page,) = report["devices"]
    assert {column["setting"]["recompute"] for column in page["columns"]} == {False}
    assert all(len(row["searched"]) <= 4 for row in page["largest"])


def test_recomputing_is_tried_by_itself_where_it_is_needed(own: str) -> None:
    report = report_of(f"{own}:large", "--device", "4GB", "--precision", "fp32")
    assert [c["setting"]["recompute"] for c in report["devices"][0]["columns"]] == [False, True]


@pytest.mark.wording
def test_survival_ends_in_a_command_with_its_subject() -> None:
    done = halfstep(CASE, "--survive", "bf16")
    assert done.exit_code == 0
    assert f"halfstep plan {CASE} " in done.stdout
    refused = halfstep(CASE, "--survive", ",")
    assert refused.exit_code == 78
    assert "--survive fp16,fp8_e4m3" in refused.stderr


def test_ctrl_c_while_a_case_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_import.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert halfstep("own_import:case", "--survive", "fp16").exit_code == 130
    assert halfstep("own_import:case", "--json").exit_code == 130


def test_help_says_what_it_takes() -> None:
    done = halfstep("--help")
    assert done.exit_code == 0
    for word in ("--device", "--precision", "--batch", "--recompute", "--json", "RECIPE|CASE"):
        assert word in done.stdout
