"""`halfstep train`, `evaluate` and `predict` as a person types them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from halfstep.cli.main import build
from halfstep.journal.jsonl import read_events
from tests.support import curves
from tests.support.commands import typed
from tests.support.ranks import Ranks

SHORT = ["train.steps=3", "data.samples=24", "train.batch_size=4", "--fp32"]


def halfstep(*words: object) -> Result:
    return CliRunner().invoke(build(), [str(word) for word in words], catch_exceptions=False)


@pytest.fixture(scope="module", params=["segmentation", "classification"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param) / "run"
    with curves.drawn():
        done = halfstep("train", f"{request.param}_tiny", *SHORT, f"run.dir={folder}")
    assert done.exit_code == 0, done.output
    return request.param, folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of several kinds in folders, and one that is none."""
    root, draw = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    (root / "below").mkdir()
    Image.fromarray(draw.integers(0, 255, (70, 50, 3), np.uint8)).save(root / "colour.png")
    Image.fromarray(draw.integers(0, 255, (40, 40), np.uint8)).save(root / "below" / "grey.jpg")
    Image.fromarray(draw.integers(0, 255, (33, 90, 4), np.uint8)).save(root / "alpha.png")
    (root / "broken.png").write_bytes(b"not an image")
    return root


def test_a_run_says_what_it_does(trained: tuple[str, Path]) -> None:
    task, folder = trained
    log = (folder / "train.log").read_text()
    metric = {"segmentation": "IoU", "classification": "Top-1"}[task]
    for words in ("Mixed precision training is off: fp32", "4 per step", "observed: fp32: 100 %", "Epoch 1 Summary:"):
        assert words in log
    assert f"Val {metric}:" in log
    assert {"curves.svg", "pictures", "best.safetensors"} <= {path.name for path in folder.iterdir()}
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["train"]["steps"] == 3


def test_evaluate_measures_what_training_measured(trained: tuple[str, Path]) -> None:
    _, folder = trained
    found = json.loads(halfstep("evaluate", folder, "--json").stdout)
    told = [event for event in read_events(folder / "journal.jsonl") if event["event"] == "epoch"][-1]["val"]
    assert found["metrics"] == pytest.approx(told)
    assert found["precision"] == "fp32"
    lower = json.loads(halfstep("evaluate", folder, "--json", "--bf16").stdout)
    assert lower["precision"] == "bf16"
    assert lower["metrics"]["loss"] == pytest.approx(told["loss"], rel=0.05)
    assert "selects the best checkpoint" in halfstep("evaluate", folder, "--weights", "last").stdout


def test_predict_writes_masks_or_a_table(trained: tuple[str, Path], images: Path, tmp_path: Path) -> None:
    task, folder = trained
    done = halfstep("predict", folder, images, "--out", tmp_path, "--bf16")
    assert done.exit_code == 0, done.output
    assert "left out broken.png" in done.stdout
    with (tmp_path / "predictions.csv").open() as file:
        rows = {row["file"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"colour.png", "alpha.png", "below/grey.jpg"}
    if task == "segmentation":
        mask = np.asarray(Image.open(tmp_path / rows["colour.png"]["mask"]))
        assert mask.shape == (70, 50)
        assert set(np.unique(mask)) <= {0, 255}
        overlay = np.asarray(Image.open(tmp_path / "overlays" / "below" / "grey.jpg.png"))
        assert max(overlay.shape) > 400, "a small image is enlarged, with its legend beside it"
    else:
        assert 0 < float(rows["alpha.png"]["score"]) <= 1
        assert not (tmp_path / "masks").exists()


@pytest.mark.wording
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["train", "segmentation_tyni"], 78, "segmentation_tiny"),
        (["train", "segmentation_tiny", "train.batchsize=3"], 78, "train.batch_size"),
        (["train", "segmentation_tiny", "--bf16", "--fp16"], 78, "fp16"),
        (["train", "segmentation_tiny", "optimizer.lr=-1"], 78, "optimizer.lr"),
        (["train", "no/such.yaml"], 78, "no/such.yaml"),
        (["train", "segmentation_tiny", "--task", "absent.py"], 78, "absent.py"),
        (["evaluate", "no/such/run"], 65, "there is no folder"),
        (["predict", "no/such/run", "."], 65, "there is no folder"),
        (["evaluate", ".", "--bf16", "--fp16"], 78, "bf16"),
    ],
)
def test_what_cannot_be_is_refused_in_three_lines(
    words: list[str], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = halfstep(*words)
    assert done.exit_code == code, done.output
    assert said in done.stderr
    assert "do:" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.wording
def test_a_taken_folder_is_refused(trained: tuple[str, Path]) -> None:
    task, folder = trained
    done = halfstep("train", f"{task}_tiny", *SHORT, f"run.dir={folder}")
    assert done.exit_code == 73
    assert "--new" in done.stderr


def test_show_prints_the_recipe_and_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = halfstep("train", "segmentation_tiny", "train.batch_size=3", "--bf16", "--show").stdout
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine.yaml").write_text(shown)
    assert yaml.safe_load(shown)["train"]["batch_size"] == 3
    again = halfstep("train", "mine.yaml", "--show").stdout
    assert again == shown


def test_json_is_the_only_thing_printed(tmp_path: Path) -> None:
    done = halfstep("train", "classification_tiny", *SHORT, f"run.dir={tmp_path / 'run'}", "--json")
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["reason"] == "finished"
    assert found["steps"] == 3
    assert Path(found["dir"]) == tmp_path / "run"


@pytest.mark.ranks
def test_torchrun_ends_with_the_same_weights_on_both_ranks(tmp_path: Path) -> None:
    """In torchrun's environment; torchrun itself starts `halfstep train` in the guide of slots, with --full."""
    folder = tmp_path / "run"
    words = ["train", "segmentation_tiny", "--bf16", "train.steps=3", "--batch_size", "8", f"run.dir={folder}"]
    ranks = Ranks(2, backend=None)
    try:
        (code, out, err), (other_code, other_out, _) = ranks(typed, *words)
    finally:
        ranks.stop()
    assert (code, other_code) == (0, 0), err
    assert "batch 16 on 2 devices" in out
    assert "weights are bitwise equal on 2 processes" in (folder / "train.log").read_text()
    assert out.count("Finished after") == 1
    assert other_out == ""
    assert all(tensor.isfinite().all() for tensor in load_file(tmp_path / "run" / "last.safetensors").values())
