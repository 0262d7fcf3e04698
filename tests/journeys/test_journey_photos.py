"""Sixty photographs of one's own: train, look, predict, measure."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.journeys.terminal import Terminal, surroundings
from tests.journeys.trained import Trained

pytestmark = pytest.mark.full


def images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in {".png", ".jpg"})


@pytest.fixture(scope="module")
def predicted(segmented: Trained) -> Terminal:
    return segmented.desk.run("predict", segmented.run, "photos/images")


def test_a_run_on_messy_photographs_comes_to_its_end(segmented: Trained) -> None:
    said = " ".join(segmented.screen.split())
    assert "Traceback" not in said
    assert re.search(r"IoU", said)
    for what in ("curves.svg", "best.safetensors", "recipe.yaml", "result.json"):
        assert (segmented.folder / what).stat().st_size > 0
    assert images(segmented.folder / "pictures")


def test_the_last_lines_say_what_to_type_next_and_it_can_be_typed(segmented: Trained) -> None:
    typed = re.findall(r"halfstep (\w+) (\S+)", " ".join(segmented.screen.split("\n")[-24:]))
    assert {"predict", "evaluate", "export"} <= {command for command, _ in typed}, segmented.screen
    assert any(Path(where).name == "segment" for _, where in typed), typed


def test_no_line_is_wider_than_the_terminal(predicted: Terminal) -> None:
    assert predicted.screen.broken_lines == []


def test_every_photograph_gets_a_mask_of_the_size_that_people_see(segmented: Trained, predicted: Terminal) -> None:
    masks = {path.stem: path for path in segmented.folder.rglob("*.png") if "photos" not in path.parts}
    for photograph in images(segmented.desk.folder / "photos" / "images"):
        found = [path for stem, path in masks.items() if stem.startswith(photograph.stem)]
        assert found, f"{photograph.name}: no mask in {segmented.folder}\n{predicted.text}"
        with Image.open(photograph) as opened:
            upright = ImageOps.exif_transpose(opened).size
        assert upright in {size_of(path) for path in found}, photograph.name


def size_of(path: Path) -> tuple[int, int]:
    with Image.open(path) as opened:
        return opened.size


def test_a_second_predict_does_not_overwrite_in_silence(segmented: Trained, predicted: Terminal) -> None:
    folders = {path.parent for path in segmented.folder.rglob("*.png")}
    before = {path: path.stat().st_mtime_ns for folder in folders for path in folder.iterdir() if path.is_file()}
    with segmented.desk.type("predict", segmented.run, "photos/images") as terminal:
        code = terminal.finish(60)
    changed = [path for path, time in before.items() if path.stat().st_mtime_ns != time]
    assert code != 0 or not changed or terminal.shows(r"overw|replac|already|again"), terminal.text


def test_evaluate_has_a_figure_for_each_class(segmented: Trained) -> None:
    terminal = segmented.desk.run("evaluate", segmented.run)
    assert terminal.shows(r"IoU")
    numbers = re.findall(r"\b[01]\.\d{2,}\b|\b\d{1,2}\.\d+ ?%", terminal.text)
    assert len(numbers) >= 3, terminal.text


LOADED = """
import sys, numpy, halfstep
from PIL import Image
loaded = halfstep.load("runs/segment")
numpy.save(sys.argv[2], loaded.predict(Image.open(sys.argv[1])).mask)
"""


def test_load_in_python_predicts_what_the_command_predicts(
    segmented: Trained, predicted: Terminal, tmp_path: Path
) -> None:
    photograph = next(path for path in images(segmented.desk.folder / "photos" / "images") if "(1)" in path.name)
    words = [sys.executable, "-c", LOADED, str(photograph), str(tmp_path / "mask.npy")]
    subprocess.run(words, cwd=segmented.desk.folder, env=surroundings(), check=True)
    mask = np.squeeze(np.load(tmp_path / "mask.npy"))
    with Image.open(photograph) as opened:
        assert mask.shape[:2] == opened.size[::-1]
    with Image.open(segmented.folder / "predictions" / "masks" / photograph.with_suffix(".png").name) as written:
        assert (mask == np.asarray(written)).mean() >= 0.999
