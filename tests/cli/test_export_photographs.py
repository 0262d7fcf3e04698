"""`halfstep export` of a run on photographs that are shrunk: the printed code predicts what `halfstep predict` does."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

import halfstep as package
from halfstep.cli.main import build
from halfstep.errors import WrongUse
from halfstep.runs.printed_code import check_code, run_code
from halfstep.runs.snippet import build_loading_code
from halfstep.train.signature import Preprocessing, Signature
from tests.tasks.made import made

SIZES = [(160, 120), (120, 160), (96, 96), (40, 30), (201, 77), (160, 120), (128, 100), (90, 150)]
MAX_SIDE = 48
FORMATS = {"safetensors": ".safetensors", "onnx": ".onnx", "torch_export": ".pt2"}


def halfstep(*words: object) -> Result:
    return CliRunner().invoke(build(), [str(word) for word in words], catch_exceptions=False)


def photograph(number: int, wide: int, high: int) -> tuple[Image.Image, Image.Image]:
    """Return an ellipse on a textured ground, and its mask."""
    draw = np.random.default_rng(number)
    y, x = np.mgrid[0:high, 0:wide]
    ground = 110 + 40 * np.sin(x / 17 + number) + 30 * np.cos(y / 11)
    pixels = np.stack([ground * 0.6, ground, ground * 0.4], -1) + draw.normal(0, 14, (high, wide, 3))
    inside = ((x - wide * draw.uniform(0.3, 0.7)) / wide) ** 2 + ((y - high / 2) / high) ** 2 < 0.05
    pixels[inside] = (200, 60, 50)
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    return image, Image.fromarray(inside.astype(np.uint8) * 255)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    for kind in ("images", "masks"):
        (root / kind).mkdir()
    for number, (wide, high) in enumerate(SIZES):
        image, mask = photograph(number, wide, high)
        exif = Image.Exif()
        if number == 1:  # the pixels lie on their side, the mask is drawn upright
            exif[0x0112], image = 6, image.transpose(Image.Transpose.ROTATE_90)
        image = image.convert({2: "RGBA", 3: "L"}.get(number, "RGB"))
        image.save(root / "images" / f"{number}.{'png' if number == 2 else 'jpg'}", exif=exif)
        mask.save(root / "masks" / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = ["train.steps=12", "train.batch_size=4", f"data.max_side={MAX_SIDE}", "data.crop=32", "model.width=4"]
    words += ["data.tile=32", "data.overlap=8", "--fp32", "run.pictures=0", "num_workers=0", "data.val=0.4"]
    done = halfstep("train", "segment", "--data_dir", photos, *words, f"run.dir={folder}")
    assert done.exit_code == 0, done.output
    return folder


@pytest.mark.parametrize(
    "format", ["safetensors", *(pytest.param(name, marks=pytest.mark.full) for name in ("onnx", "torch_export"))]
)
@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_the_printed_code_predicts_masks_in_the_size_of_each_photograph(
    run: Path, photos: Path, tmp_path: Path, format: str
) -> None:
    if format == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    done = halfstep("export", run, "--format", format, "--out", tmp_path / f"x{FORMATS[format]}", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["preprocessing"]["max_side"] == MAX_SIDE
    assert "enlarged to its own size" in told["output"]
    code = told["checked"]["code"]
    assert (code["images"], code["source"]) == (3, "validation images of the original size")
    assert code["agreement"] >= 0.999
    assert halfstep("predict", run, photos / "images", "--out", tmp_path / "out", "--precision", "fp32").exit_code == 0
    for number, (wide, high) in enumerate(SIZES):
        scope: dict[str, Any] = {}
        file = next((photos / "images").glob(f"{number}.*"))
        exec(told["python"].replace("photo.jpg", str(file)), scope)
        name = file.name if file.suffix == ".png" else f"{file.name}.png"
        mask = np.asarray(Image.open(tmp_path / "out" / "masks" / name))
        assert scope["mask"].shape == mask.shape == (high, wide)
        assert (scope["mask"] * 255 == mask).mean() >= 0.999


def test_preprocessing_of_a_loaded_run_shrinks_as_predict_does(run: Path, photos: Path) -> None:
    loaded = package.load(run)
    assert loaded.preprocessing is loaded.task.preprocessing  # type: ignore[attr-defined]
    prepared = loaded.preprocessing(photos / "images" / "0.jpg")
    assert prepared.shape == (1, 3, 36, 48)
    sample = loaded.task.source("val").read(0)
    name = loaded.task.source("val").name(0)
    assert torch.equal(loaded.preprocessing(name)[0], loaded.task.transform("val", sample)["image"])


@pytest.mark.usefixtures("forked_python")
def test_classes_of_photographs_agree(tmp_path: Path) -> None:
    for label, tint in (("red", (200, 40, 40)), ("blue", (40, 40, 200))):
        (tmp_path / "data" / label).mkdir(parents=True)
        for number, (wide, high) in enumerate(SIZES[:5]):
            image, _ = photograph(number, wide, high)
            Image.blend(image, Image.new("RGB", image.size, tint), 0.5).save(tmp_path / f"data/{label}/{number}.jpg")
    words = ["train.steps=6", "train.batch_size=4", "data.size=32", "model.name=resnet10t", "--fp32", "num_workers=0"]
    words += ["run.pictures=0", "data.val=0.4", f"run.dir={tmp_path / 'run'}"]
    assert halfstep("train", "classify", "--data_dir", tmp_path / "data", *words).exit_code == 0
    done = halfstep("export", tmp_path / "run", "--out", tmp_path / "x.safetensors", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["checked"]["code"]["agreement"] == 1.0
    out = tmp_path / "out"
    assert halfstep("predict", tmp_path / "run", tmp_path / "data", "--out", out, "--precision", "fp32").exit_code == 0
    with (out / "predictions.csv").open() as file:
        for row in csv.DictReader(file):
            scope: dict[str, Any] = {}
            exec(told["python"].replace("photo.jpg", str(tmp_path / "data" / row["file"])), scope)
            assert scope["classes"][int(scope["probabilities"].argmax())] == row["class"]
            assert float(scope["probabilities"].max()) == pytest.approx(float(row["score"]), abs=1e-4)


# -- the check itself -------------------------------------------------------------------------------------------------


@pytest.mark.wording
def test_code_that_predicts_something_else_is_refused(tmp_path: Path, photos: Path) -> None:
    data = {"name": "pairs", "path": str(photos), "max_side": MAX_SIDE, "crop": 32, "tile": 32, "overlap": 8}
    task = made("segmentation", data={**data, "classes": 2})
    model, signature = task.model().eval(), task.signature()
    from halfstep.train.weights import save_weights

    save_weights(model, tmp_path / "x.safetensors")

    def code(photo: str) -> str:
        return build_loading_code(task, model, signature, tmp_path / "x.safetensors", "safetensors", photo)

    assert check_code(task, model, signature, code).agreement == pytest.approx(1.0, abs=1e-3)
    with pytest.raises(WrongUse, match="the printed code gives the class"):
        check_code(task, model, signature, lambda photo: code(photo) + "\nmask = 1 - mask")
    with pytest.raises(WrongUse, match="the printed code fails: ZeroDivisionError"):
        check_code(task, model, signature, lambda photo: "1 / 0")


@pytest.mark.parametrize(
    ("channels", "mode"), [(1, "L"), (1, "I;16"), (1, "F"), (2, "LA"), (3, "RGB"), (3, "I;16"), (3, "P"), (4, "RGBA")]
)
@pytest.mark.usefixtures("forked_python")
def test_the_code_reads_files_of_every_depth_as_training_does(tmp_path: Path, channels: int, mode: str) -> None:
    taken = Preprocessing(channels, (0.5,) * channels, (0.25,) * channels, max_side=40)
    signature = Signature(taken, ["a", "b"], "mask", 1, variable_size=True)
    pixels = np.random.default_rng(0).integers(0, 2**16, (60, 90), np.uint16)
    color = np.random.default_rng(1).integers(0, 256, (60, 90, 4), np.uint8)
    deep = {"I;16": pixels, "F": (pixels / 65535).astype(np.float32)}
    image = Image.fromarray(deep[mode]) if mode in deep else Image.fromarray(color).convert(mode)
    file = tmp_path / ("x.tiff" if mode in deep else "x.png")
    image.save(file)
    task = made("segmentation", data={"channels": channels})
    text = build_loading_code(task, task.model(), signature, tmp_path / "none", "onnx", str(file))
    functions = text.partition("def load_image")[2].partition("def predict")[0]
    scope: dict[str, Any] = {}
    names = "import numpy as np\nfrom PIL import Image, ImageOps\n"
    exec(f"{names}def load_image{functions}\nx = preprocess(load_image({str(file)!r}))", scope)
    expected = taken(file)
    assert expected.shape == (1, channels, 27, 40)
    assert torch.allclose(torch.from_numpy(scope["x"]), expected, atol=1e-6)


@pytest.mark.usefixtures("forked_python")
def test_pages_of_a_tiff_are_shrunk_too(tmp_path: Path) -> None:
    taken = Preprocessing(5, (0.5,) * 5, (0.25,) * 5, max_side=40)
    signature = Signature(taken, ["a", "b"], "mask", 1, variable_size=True)
    pages = [Image.fromarray(p) for p in np.random.default_rng(0).integers(0, 2**16, (5, 60, 90), np.uint16)]
    pages[0].save(tmp_path / "x.tiff", save_all=True, append_images=pages[1:])
    task = made("segmentation", data={"channels": 5})
    text = build_loading_code(task, task.model(), signature, tmp_path / "none", "onnx", str(tmp_path / "x.tiff"))
    head, _, rest = text.partition("session = ")
    kept = head.replace("import onnxruntime as ort", "") + "def load_image" + rest.partition("def load_image")[2]
    kept = kept.partition("classes = ")[0] + f"mask = preprocess(load_image({str(tmp_path / 'x.tiff')!r}))"
    (found,) = run_code([kept], signature, tmp_path)
    assert torch.allclose(torch.from_numpy(found), taken(tmp_path / "x.tiff"), atol=1e-6)
