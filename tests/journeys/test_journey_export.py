"""A model taken away: exported, and run where halfstep is not installed, from the printed lines alone."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.journeys.snippet import printed_python, run_outside, run_python
from tests.journeys.trained import Trained

pytestmark = pytest.mark.full

AGREE = 0.999


@pytest.fixture(scope="module")
def predicted(segmented: Trained, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    """A few photographs of different kinds, and the masks that `predict` wrote for them."""
    few = segmented.desk.folder / "few"
    few.mkdir()
    for name in ("IMG_0006.JPG", "house 2 (1).png", "Straße_3.jpg", "été #4.png"):
        (few / name).write_bytes((segmented.desk.folder / "photos" / "images" / name).read_bytes())
    before = segmented.desk.files("*.png")
    segmented.desk.run("predict", segmented.run, "few", "--out", "masks_of_few")
    written = segmented.desk.files("*.png") - before
    return {path: mask_for(path, written) for path in sorted(few.iterdir())}


def mask_for(photograph: Path, written: set[Path]) -> Path:
    named = {photograph.with_suffix(".png").name, f"{photograph.name}.png"}
    (found,) = [path for path in written if path.parent.name == "masks" and path.name in named]
    return found


def last_name(code: str) -> str:
    """The variable that a snippet assigns last: what it is for."""
    assigned = [node for node in ast.parse(code).body if isinstance(node, ast.Assign)]
    target = assigned[-1].targets[-1]
    assert isinstance(target, ast.Name)
    return target.id


def agreement(code: str, folder: Path, masks: dict[Path, Path]) -> list[float]:
    """The share of equal pixels for each photograph, where the snippet's own file name is replaced by it."""
    shares = []
    for number, (photograph, mask) in enumerate(masks.items()):
        mine = re.sub(r"""(["'])[^"'\n]*\.(?:jpe?g|png)\1""", lambda _, path=photograph: repr(str(path)), code)
        assert mine != code, f"the snippet opens no image:\n{code}"
        out = folder / f"outside_{number}.npy"
        saved = f"\nimport numpy; numpy.save({str(out)!r}, numpy.asarray({last_name(code)}))"
        # Our own U-Net is in no other package; the weights alone need it.
        run = run_python if "halfstep" in code else run_outside
        run(mine + saved, folder)
        with Image.open(mask) as written:
            shares.append(equal(np.squeeze(np.load(out)), np.asarray(written)))
    return shares


def equal(outside: np.ndarray, written: np.ndarray) -> float:
    assert outside.shape == written.shape
    return float(((outside > 0) == (written > 0)).mean())


@pytest.mark.parametrize("form", ["weights", "torch_export", "onnx"])
def test_the_printed_lines_agree_with_predict_where_halfstep_is_not(
    segmented: Trained, predicted: dict[Path, Path], form: str
) -> None:
    if form == "onnx":
        pytest.importorskip("onnxruntime")
    chosen = [] if form == "weights" else ["--format", form]
    terminal = segmented.desk.run("export", segmented.run, *chosen)
    assert terminal.shows(r"mean|normal"), terminal.text
    assert terminal.screen.broken_lines == [], "lines that a person cannot select as they were printed"
    code = printed_python(terminal.text)
    assert ("halfstep" in code) == (form == "weights")
    shares = agreement(code, segmented.desk.folder, predicted)
    print(f"{form}: at least {min(shares):.4%} of pixels agree with predict")
    assert min(shares) >= AGREE


def test_exported_classes_are_named_outside(classified: Trained) -> None:
    terminal = classified.desk.run("export", classified.run)
    code = printed_python(terminal.text)
    photograph = classified.desk.folder / "classes" / "cross" / "house 2 (1).png"
    mine = re.sub(r"""(["'])[^"'\n]*\.(?:jpe?g|png)\1""", lambda _: repr(str(photograph)), code)
    said = run_outside(f"{mine}\nprint({last_name(code)})", classified.desk.folder)
    assert any(name in said + terminal.text for name in ("circle", "cross", "square", "stripes", "triangle")), said
