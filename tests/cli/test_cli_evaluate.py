"""`halfstep evaluate`: elsewhere, by class, by sample, as a table, CSV, JSON and a picture."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from halfstep.cli.main import build
from halfstep.runs.evaluate import measure_weights
from halfstep.runs.finished import open_finished

SHORT = ["train.steps=4", "train.batch_size=4", "data.samples=24", "run.pictures=2", "num_workers=0", "--fp32"]


def halfstep(*words: object) -> Result:
    return CliRunner().invoke(build(), [str(word) for word in words], catch_exceptions=False, env={"COLUMNS": "80"})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs")
    words = {"segmentation": ["data.classes=3", "model.width=4", "model.depth=1"], "classification": []}
    for task, more in words.items():
        done = halfstep("train", f"{task}_tiny", *more, *SHORT, f"run.dir={root / task}")
        assert done.exit_code == 0, done.output
    return {task: root / task for task in words}


@pytest.fixture(scope="module")
def masks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Labeled photographs of several sizes, one of which cannot be read."""
    root, draw = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for kind in ("images", "masks"):
        (root / kind).mkdir()
    for number, (high, wide) in enumerate([(40, 50), (33, 21), (64, 64)]):
        Image.fromarray(draw.integers(0, 256, (high, wide, 3), np.uint8)).save(root / "images" / f"{number}.png")
        Image.fromarray(draw.integers(0, 3, (high, wide), np.uint8)).save(root / "masks" / f"{number}.png")
    for kind in ("images", "masks"):
        (root / kind / "[bold]x[").mkdir()
    Image.new("L", (8, 8)).save(root / "masks" / "[bold]x[" / "b].png")
    (root / "images" / "[bold]x[" / "b].png").write_bytes(b"no image")
    return root


def report(*words: object) -> dict[str, Any]:
    done = halfstep("evaluate", *words, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_folder_elsewhere_is_evaluated_whole(runs: dict[str, Path], masks: Path) -> None:
    found = report(runs["segmentation"], masks)
    assert (found["data"], found["samples"], found["counted"]) == (str(masks), 3, "pixels")
    assert [Path(row["file"]).name for row in found["each"]] == ["0.png", "1.png", "2.png"]
    assert [Path(one["file"]).name for one in found["left_out"]] == ["b].png"]
    counts = np.array(found["confusion"]["counts"])
    assert counts.sum() == 40 * 50 + 33 * 21 + 64 * 64
    truth = [np.asarray(Image.open(masks / "masks" / f"{n}.png")) for n in range(3)]
    assert counts.sum(1).tolist() == [sum(int((one == c).sum()) for one in truth) for c in range(3)]
    assert found["metrics"]["iou"] == pytest.approx(np.mean([row["iou"] for row in found["classes"]]))
    worst = [row["iou"] for row in found["worst"]]
    assert worst == sorted(worst)
    assert {row["file"] for row in found["worst"]} == {row["file"] for row in found["each"]}


def test_what_is_counted_is_what_is_predicted(runs: dict[str, Path], masks: Path, tmp_path: Path) -> None:
    found = report(runs["segmentation"], masks)
    words = ["predict", runs["segmentation"], masks / "images" / "0.png", "--out", tmp_path]
    assert halfstep(*words).exit_code == 0
    said = np.asarray(Image.open(tmp_path / "masks" / "0.png"))
    truth = np.asarray(Image.open(masks / "masks" / "0.png"))
    assert found["each"][0]["accuracy"] == pytest.approx((said == truth).mean())


def test_names_of_files_are_harmless_on_a_terminal(runs: dict[str, Path], masks: Path) -> None:
    done = halfstep("evaluate", runs["segmentation"], masks)
    assert done.exit_code == 0, done.output
    assert "[bold]x[/b].png" in done.stdout
    assert "worst samples:" in done.stdout
    assert "true \\ predicted" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if "/" not in line) <= 80


def test_an_evaluation_is_a_page_in_a_notebook(runs: dict[str, Path]) -> None:
    finished = open_finished(runs["classification"], weights="best", precision=None, own=None)
    found = measure_weights(finished, "validation", lambda done, of: None).report
    assert "<table" in found._repr_html_()
    assert "predicted" in found._repr_html_()
    assert str(found) in halfstep("evaluate", runs["classification"]).stdout


@pytest.mark.wording
@pytest.mark.parametrize("task", ["segmentation", "classification"])
def test_tables_and_a_picture(runs: dict[str, Path], task: str, tmp_path: Path) -> None:
    table, picture = tmp_path / "t.csv", tmp_path / "new" / "p.png"
    words = [runs[task], "--csv", table, "--picture", picture]
    found = report(*words)
    files = [tmp_path / name for name in ("t.csv", "t_classes.csv", "t_confusion.csv")]
    assert found["written"] == [str(file) for file in (*files, picture)]
    each, classes, confusion = (list(csv.DictReader(file.read_text().splitlines())) for file in files)
    assert len(each) == found["samples"]
    assert [row["class"] for row in classes] == found["confusion"]["names"]
    assert [[int(row[n]) for n in found["confusion"]["names"]] for row in confusion] == found["confusion"]["counts"]
    with Image.open(picture) as image:
        assert image.width <= 1200
        assert np.asarray(image).std() > 20
    again = halfstep("evaluate", *words)
    assert again.exit_code == 73
    assert f"{table} already exists" in again.stderr.replace("\n", "")
    assert "--overwrite" in again.stderr
    assert halfstep("evaluate", *words, "--overwrite").exit_code == 0


def test_the_runs_own_validation_gives_what_training_said(runs: dict[str, Path]) -> None:
    for task, run in runs.items():
        best = json.loads((run / "result.json").read_text())["best"]
        assert report(run)["metrics"][best["metric"]] == pytest.approx(best["value"], abs=1e-6), task


def test_pictures_of_training_fit_a_screen(runs: dict[str, Path]) -> None:
    for run in runs.values():
        pictures = sorted((run / "pictures").glob("*.png"))
        assert pictures
        with Image.open(pictures[-1]) as image:
            assert image.width <= 1200


@pytest.fixture
def classes(runs: dict[str, Path], tmp_path: Path) -> Path:
    """Two of the four classes, in folders of their names."""
    draw = np.random.default_rng(0)
    for name in ("triangle", "circle"):
        (tmp_path / "set" / name).mkdir(parents=True)
        for number in range(2):
            pixels = draw.integers(0, 256, (40, 40, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "set" / name / f"{number}.png")
    return tmp_path / "set"


@pytest.mark.wording
def test_classes_are_numbered_as_in_training(runs: dict[str, Path], classes: Path) -> None:
    found = report(runs["classification"], classes)
    names = found["confusion"]["names"]
    assert len(names) == 4
    truth = dict(zip(names, np.array(found["confusion"]["counts"]).sum(1).tolist(), strict=True))
    assert truth == {**dict.fromkeys(names, 0), "triangle": 2, "circle": 2}
    assert {row["truth"] for row in found["each"]} == {"triangle", "circle"}
    assert found["metrics"]["top1"] == np.mean([row["truth"] == row["answer"] for row in found["each"]])
    absent = next(row for row in found["classes"] if row["class"] == "cross")
    assert absent["recall"] is None
    (classes / "unknown").mkdir()
    Image.new("RGB", (4, 4)).save(classes / "unknown" / "a.png")
    done = halfstep("evaluate", runs["classification"], classes)
    assert done.exit_code == 65
    assert "'unknown', which is missing from the training set" in done.stderr


@pytest.mark.wording
@pytest.mark.parametrize(
    ("make", "said"),
    [(None, "does not exist"), ("file", "is not a folder"), ("empty", "images"), ("splits", "test")],
)
def test_folders_that_cannot_be_evaluated(runs: dict[str, Path], tmp_path: Path, make: str | None, said: str) -> None:
    place = tmp_path / "data"
    if make == "file":
        place.write_text("")
    elif make:
        (place / "test" if make == "splits" else place).mkdir(parents=True)
    done = halfstep("evaluate", runs["segmentation"], place)
    assert done.exit_code == 65
    assert said in done.stderr
    assert "do: " in done.stderr
    assert "data.path" not in done.stderr.partition("do: ")[2]


@pytest.mark.wording
def test_tasks_without_figures_say_so(tmp_path: Path) -> None:
    words = ["train.steps=1", "data.samples=8", "data.size=16", "train.batch_size=2", "--fp32", "run.pictures=0"]
    run = tmp_path / "run"
    assert halfstep("train", "slots_tiny", *words, f"run.dir={run}").exit_code == 0
    assert "loss" in report(run, "--weights", "last")["metrics"]
    for more in ([tmp_path], ["--csv", tmp_path / "x.csv"], ["--picture", tmp_path / "x.png"]):
        done = halfstep("evaluate", run, *more, "--weights", "last")
        assert done.exit_code == 78, done.output
        assert "segmentation and classification" in done.stderr


@pytest.mark.wording
def test_predictions_are_not_replaced_unasked(runs: dict[str, Path], masks: Path, tmp_path: Path) -> None:
    words = ["predict", runs["segmentation"], masks / "images", "--out", tmp_path / "out"]
    assert halfstep(*words).exit_code == 0
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("*.*")}
    done = halfstep(*words)
    assert done.exit_code == 73
    assert "already contains predictions: predictions.csv, masks, overlays" in done.stderr.replace("\n", "")
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("*.*")} == before
    assert halfstep(*words, "--overwrite").exit_code == 0
    overlay = np.asarray(Image.open(tmp_path / "out" / "overlays" / "2.png"))
    assert 64 < overlay.shape[1] <= 1200
    with Image.open(tmp_path / "out" / "masks" / "2.png") as mask:
        assert mask.size == (64, 64), "as the image"
