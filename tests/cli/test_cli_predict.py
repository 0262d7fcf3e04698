"""`halfstep predict` as a person types it: samples without a folder, and settings that change how."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from halfstep.cli._predict_outputs import split_folder_and_settings
from halfstep.cli.main import build

PAINTER = '''
"""Paints noise as bright as its guidance says."""

import torch
from halfstep.data.synthetic.shapes import ShapeLabels
from halfstep.recipe.schema import DataOptions, LossOptions, ModelOptions, Recipe
from halfstep.train.task import Prediction, Task
from torch import nn


class Model(ModelOptions):
    width: int = 4
    """Pixels across."""
    guidance: float = 1.0
    """How bright."""


class Data(DataOptions):
    samples: int = 8
    """How many."""


class Painter(Task):
    schema = Recipe[Model, Data, LossOptions]
    metric = "loss"
    higher_is_better = False

    def model(self):
        return nn.Conv2d(3, 3, 1)

    def source(self, split):
        return ShapeLabels(self.recipe.data.samples, 8, 3, seed=0)

    def transform(self, split, sample):
        return {"image": sample["image"].float() / 255}

    def loss(self, model, batch, metrics=None):
        return model(batch["image"]).float().square().mean()

    def predict(self, model, image):
        return Prediction(values={"brightness": float(image.float().mean()), "guidance": self.recipe.model.guidance})

    def sample(self, model, count, told):
        found = []
        for number in range(count if self.recipe.model.guidance else 0):
            width = self.recipe.model.width
            noise = torch.rand(width, width, 3) * 100 * self.recipe.model.guidance
            found.append(noise.clamp(max=255).byte().numpy())
            told(number + 1, count)
        return found
'''
RECIPE = """
task: painter
precision: fp32
train: {steps: 1, batch_size: 2, num_workers: 0, seed: 0}
run: {pictures: 0}
"""


def halfstep(*words: object) -> Result:
    return CliRunner().invoke(build(), [str(word) for word in words], catch_exceptions=False)


@pytest.fixture(scope="module")
def painter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of a task that makes pictures, and the file of the task."""
    root = tmp_path_factory.mktemp("painter")
    file = root / "painter.py"
    file.write_text(PAINTER)
    (root / "painter.yaml").write_text(RECIPE)
    done = halfstep("train", root / "painter.yaml", "--task", file, f"run.dir={root / 'run'}")
    assert done.exit_code == 0, done.output
    return root / "run", file


def sampled(painter: tuple[Path, Path], out: Path, *words: object) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    folder, file = painter
    words = (*words, "--task", file, "--out", out, "--overwrite", "--weights", "last", "--json")
    done = halfstep("predict", folder, *words)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    return report, np.asarray(Image.open(report["picture"]))


def test_samples_are_one_grid(painter: tuple[Path, Path], tmp_path: Path) -> None:
    report, picture = sampled(painter, tmp_path)
    assert (report["samples"], report["columns"], report["seed"]) == (40, 10, 0)
    assert report["picture"] == str(tmp_path / "samples.png")
    assert picture.shape == (4 * 64 + 3 * 4, 10 * 64 + 9 * 4, 3)
    report, picture = sampled(painter, tmp_path, "--samples", 5, "--columns", 3)
    assert (report["samples"], report["columns"]) == (5, 3)
    assert picture.shape == (2 * 64 + 4, 3 * 64 + 2 * 4, 3)
    assert (picture[-64:, -64:] == 255).all(), "the last place of the last row is empty"


def test_a_seed_decides_what_is_drawn(painter: tuple[Path, Path], tmp_path: Path) -> None:
    first, again, other = (sampled(painter, tmp_path, "--seed", seed)[1] for seed in (3, 3, 4))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert np.array_equal(sampled(painter, tmp_path)[1], sampled(painter, tmp_path, "--seed", 0)[1])


@pytest.mark.parametrize("words", [["model.guidance=2"], ["--guidance", "2"], ["--guidance=2"], ["guidance=2"]])
def test_a_setting_changes_how(painter: tuple[Path, Path], tmp_path: Path, words: list[str]) -> None:
    dark = sampled(painter, tmp_path, "--samples", 1)[1].astype(float)
    bright = sampled(painter, tmp_path, "--samples", 1, *words)[1].astype(float)
    assert bright.mean() == pytest.approx(2 * dark.mean(), rel=0.05)


def test_a_setting_comes_after_a_folder_too(painter: tuple[Path, Path], tmp_path: Path) -> None:
    folder, file = painter
    (tmp_path / "images").mkdir()
    Image.new("RGB", (4, 4), (30, 30, 30)).save(tmp_path / "images" / "a=b.png")
    for given in (tmp_path / "images", tmp_path / "images" / "a=b.png"):
        words = ["--task", file, "--out", tmp_path / "out", "--overwrite", "--weights", "last"]
        done = halfstep("predict", folder, given, "model.guidance=3", *words)
        assert done.exit_code == 0, done.output
        with (tmp_path / "out" / "predictions.csv").open() as rows:
            assert list(csv.DictReader(rows)) == [{"file": "a=b.png", "brightness": "30.0", "guidance": "3.0"}]


@pytest.mark.wording
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.width=8"], ["model.width", "model.guidance"]),
        (["optimizer.lr=1"], ["optimizer.lr", "model.guidance"]),
        (["precision=bf16"], ["write --precision P"]),
        (["--fp32"], ["write --precision P"]),
        (["model.guidence=4"], ["did you mean model.guidance?"]),
        (["--guidence", "4"], ["did you mean model.guidance?"]),
        (["model.guidance=much"], ["model.guidance", "a number"]),
        (["model.guidance=.inf"], ["model.guidance"]),
        (["model.guidance=4", "images"], ["'images' is no setting"]),
    ],
)
def test_settings_that_cannot_be_are_refused(
    painter: tuple[Path, Path], tmp_path: Path, words: list[str], said: list[str]
) -> None:
    folder, file = painter
    done = halfstep("predict", folder, *words, "--task", file, "--out", tmp_path / "out", "--weights", "last")
    assert done.exit_code == 78, done.output
    assert all(word in done.stderr for word in said), done.stderr
    assert "do:" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.wording
def test_nothing_to_draw_is_said(painter: tuple[Path, Path], tmp_path: Path) -> None:
    folder, file = painter
    done = halfstep("predict", folder, "model.guidance=0", "--task", file, "--out", tmp_path, "--weights", "last")
    assert done.exit_code == 65, done.output
    assert f"halfstep predict {folder} FOLDER" in done.stderr.replace("\n", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.wording
def test_a_task_that_predicts_nothing_is_used_without_a_folder(painter: tuple[Path, Path], tmp_path: Path) -> None:
    folder, file = painter
    silent = tmp_path / "painter.py"
    silent.write_text(file.read_text().replace("def predict(", "def foretell("))
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    done = halfstep("predict", folder, tmp_path / "a.png", "--task", silent, "--weights", "last")
    assert done.exit_code == 78, done.output
    assert "does not take images" in done.stderr
    assert f"do: halfstep predict {folder}" in done.stderr.replace("\n", "")


@pytest.mark.wording
def test_a_folder_that_is_not_there_is_said(painter: tuple[Path, Path], tmp_path: Path) -> None:
    folder, file = painter
    done = halfstep("predict", folder, tmp_path / "none", "--task", file, "--weights", "last")
    assert done.exit_code == 65, done.output
    assert f"{tmp_path / 'none'} does not exist" in done.stderr.replace("\n", "")
    assert "data.path" not in done.stderr
    assert f"halfstep predict {folder} FOLDER" in done.stderr.replace("\n", "")


@pytest.mark.wording
@pytest.mark.parametrize("written", ["samples.png", "predictions.csv"])
@pytest.mark.parametrize("known_before", [True, False], ids=["a file for the folder", "a folder for the file"])
def test_a_place_that_cannot_be_written_to_is_said(
    painter: tuple[Path, Path], tmp_path: Path, written: str, known_before: bool
) -> None:
    folder, file = painter
    images, out = tmp_path / "images", tmp_path / "out"
    images.mkdir()
    Image.new("RGB", (8, 8)).save(images / "a.png")
    out.write_text("no folder") if known_before else (out / written).mkdir(parents=True)
    inputs = [images] if written == "predictions.csv" else []
    words = ["--task", file, "--out", out, "--overwrite", "--weights", "last"]
    done = halfstep("predict", folder, *inputs, *words)
    assert done.exit_code == 74, done.output
    assert f"{out} cannot be written to" in done.stderr.replace("\n", "")
    assert "--out FOLDER" in done.stderr


@pytest.mark.parametrize("words", [["--samples", "0"], ["--samples", "1001"], ["--seed", "-1"], ["--columns", "0"]])
def test_counts_are_bounded(painter: tuple[Path, Path], words: list[str]) -> None:
    folder, file = painter
    assert halfstep("predict", folder, *words, "--task", file).exit_code == 64


@pytest.mark.wording
def test_a_task_that_makes_nothing_asks_for_a_folder(tmp_path: Path) -> None:
    words = ["train.steps=1", "data.samples=8", "train.batch_size=2", "--fp32", f"run.dir={tmp_path / 'run'}"]
    assert halfstep("train", "classification_tiny", *words).exit_code == 0
    done = halfstep("predict", tmp_path / "run", "--weights", "last")
    assert done.exit_code == 78
    assert "generates nothing by itself" in done.stderr
    assert f"halfstep predict {tmp_path / 'run'} FOLDER" in done.stderr.replace("\n", "")
    assert not (tmp_path / "run" / "predictions").exists()


def test_a_folder_is_told_from_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lr=1").mkdir()
    assert split_folder_and_settings([]) == (None, [])
    assert split_folder_and_settings(["images", "a=1"]) == (Path("images"), ["a=1"])
    assert split_folder_and_settings(["a=1"]) == (None, ["a=1"])
    assert split_folder_and_settings(["--a", "1"]) == (None, ["--a", "1"])
    assert split_folder_and_settings(["lr=1"]) == (Path("lr=1"), [])


# -- the two tasks that draw by themselves ---------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["diffusion", "slots"])
def drawing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param) / "run"
    words = ["train.steps=2", "data.samples=20", "data.size=16", "train.batch_size=4", "run.pictures=0", "--fp32"]
    done = halfstep("train", f"{request.param}_tiny", *words, f"run.dir={folder}")
    assert done.exit_code == 0, done.output
    return request.param, folder


def test_their_samples_are_in_the_runs_folder(drawing: tuple[str, Path]) -> None:
    _, folder = drawing
    done = halfstep("predict", folder, "--weights", "last", "--samples", 3, "--bf16")
    assert done.exit_code == 0, done.output
    assert "3 samples in bf16" in done.stdout
    assert str(folder / "predictions" / "samples.png") in done.stdout.replace("\n", "")
    picture = np.asarray(Image.open(folder / "predictions" / "samples.png"))
    assert picture.dtype == np.uint8
    assert picture.std() > 0


def test_guidance_changes_what_diffusion_draws(drawing: tuple[str, Path], tmp_path: Path) -> None:
    task, folder = drawing
    pictures = []
    for number, words in enumerate([[], [], ["model.guidance=9"], ["--sample_steps", "3"]]):
        done = halfstep("predict", folder, *words, "--weights", "last", "--samples", 4, "--out", tmp_path / str(number))
        if words and task == "slots":
            assert done.exit_code == 78
            continue
        assert done.exit_code == 0, done.output
        pictures.append((tmp_path / str(number) / "samples.png").read_bytes())
    assert pictures[0] == pictures[1]
    assert len(set(pictures)) == (3 if task == "diffusion" else 1)


@pytest.mark.parametrize("drawing", ["slots"], indirect=True)
def test_clips_become_animations(drawing: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = drawing
    draw = np.random.default_rng(0)
    for clip, frames in (("long", 7), ("short", 3)):
        (tmp_path / "clips" / clip).mkdir(parents=True)
        for number in range(frames):
            pixels = draw.integers(0, 255, (20, 24, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "clips" / clip / f"{number}.png")
    done = halfstep("predict", folder, tmp_path / "clips", "--weights", "last", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "3 clips" in done.stdout
    assert "animations" in done.stdout
    with (tmp_path / "out" / "predictions.csv").open() as file:
        rows = {row["file"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"long-00000", "long-00003", "short"}
    with Image.open(tmp_path / "out" / rows["short"]["animation"]) as animation:
        assert (animation.format, animation.n_frames) == ("GIF", 3)
    with Image.open(tmp_path / "out" / rows["long-00003"]["overlay"]) as picture:
        assert picture.mode == "RGB"
    alone = halfstep("predict", folder, tmp_path / "clips" / "short", "--weights", "last", "--out", tmp_path / "one")
    assert alone.exit_code == 0, alone.output
    assert (tmp_path / "one" / "overlays" / "short.gif").is_file()
    frame = halfstep("predict", folder, tmp_path / "clips" / "short" / "0.png", "--weights", "last", "--out", tmp_path)
    assert frame.exit_code == 0, frame.output
    assert "1 image in" in frame.stdout


@pytest.mark.wording
@pytest.mark.parametrize("drawing", ["slots"], indirect=True)
def test_clips_of_another_length_are_predicted_when_asked_for(drawing: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = drawing
    (tmp_path / "clip").mkdir()
    for number in range(2):
        Image.new("RGB", (20, 24), (100 * number, 50, 0)).save(tmp_path / "clip" / f"{number}.png")
    words = ["predict", folder, tmp_path / "clip", "--weights", "last", "--out", tmp_path / "out"]
    short = halfstep(*words)
    assert short.exit_code == 65, short.output
    assert "has 2 frames, and 3 are needed" in short.stderr
    assert "add a smaller data.frames" in short.stderr
    assert "data.path" not in short.stderr
    done = halfstep(*words, "data.frames=2")
    assert done.exit_code == 0, done.output
    with (tmp_path / "out" / "predictions.csv").open() as file:
        assert [row["frames"] for row in csv.DictReader(file)] == ["2"]


@pytest.mark.parametrize("drawing", ["slots"], indirect=True)
def test_a_clip_that_is_named_like_a_part_of_another_overwrites_nothing(
    drawing: tuple[str, Path], tmp_path: Path
) -> None:
    _, folder = drawing
    for clip, frames in (("a", 6), ("a-00003", 3)):
        (tmp_path / "clips" / clip).mkdir(parents=True)
        for number in range(frames):
            Image.new("RGB", (20, 24), (40 * number, 50, 0)).save(tmp_path / "clips" / clip / f"{number}.png")
    done = halfstep("predict", folder, tmp_path / "clips", "--weights", "last", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    animations = {path.name for path in (tmp_path / "out" / "overlays").glob("*.gif")}
    assert animations == {"a-00000.gif", "a-00003.gif", "a-00003-00000.gif"}


@pytest.mark.wording
@pytest.mark.parametrize("drawing", ["slots"], indirect=True)
@pytest.mark.parametrize("given", ["empty", "notes.txt"])
def test_what_holds_no_clip_is_told_what_does(drawing: tuple[str, Path], given: str, tmp_path: Path) -> None:
    _, folder = drawing
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("no film")
    refused = halfstep("predict", folder, tmp_path / given, "--weights", "last", "--out", tmp_path / "out")
    assert refused.exit_code == 65, refused.output
    holds, allowed, do = refused.stderr.splitlines()
    assert holds == f"{tmp_path / given} contains no clip"
    assert "a folder of frames" in allowed
    assert ".mp4" in allowed
    assert "data." not in do, "no setting makes a clip of it"


@pytest.mark.parametrize("drawing", ["diffusion"], indirect=True)
def test_a_column_has_one_class(drawing: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = drawing
    words = ["--weights", "last", "--samples", 9, "--out", tmp_path, "--json"]
    assert json.loads(halfstep("predict", folder, *words).stdout)["columns"] == 8, "twice the four classes"
