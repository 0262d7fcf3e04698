"""`halfstep export`: what it prints is pasted and run, with halfstep and without, and agrees with `predict`."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from typer.testing import CliRunner, Result

from halfstep.cli.main import build
from halfstep.errors import WrongUse
from halfstep.runs.export import RunnableFile, compare_with_model
from halfstep.train.signature import Preprocessing, Signature

pytestmark = pytest.mark.usefixtures("forked_python")
SHORT = ["train.steps=6", "train.batch_size=4", "data.samples=40", "run.pictures=0", "num_workers=0", "--fp32"]
TILED = ["data.crop=32", "data.tile=64", "data.overlap=16"]
SEGMENTATION = ["segmentation_tiny", *TILED]
RUNS: dict[str, list[str]] = {
    # The photograph is shrunk to 120 pixels, which are two tiles.
    "unet": [*SEGMENTATION, "model.width=4", "model.depth=2", "train.ema=0.9", "data.max_side=120"],
    "smp": [*SEGMENTATION, "model.name=smp-unet", "model.encoder=resnet18"],
    "classes": [*SEGMENTATION, "model.name=fpn", "model.encoder=resnet18", "data.classes=3"],
    "timm": ["classification_tiny", "train.ema=0.9", "data.crop=resize"],
    "sized": ["classification_tiny", "model.name=test_vit"],
    "stem": ["classification_tiny", "model.name=resnet18", "model.small_stem=true"],
}
BLOCKED = """
import sys
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "halfstep":
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Gone())
"""


def halfstep(*words: object) -> Result:
    return CliRunner().invoke(build(), [str(word) for word in words], catch_exceptions=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """A run of each kind, trained when it is first asked for."""
    root, made = tmp_path_factory.mktemp("runs"), {}

    def get(name: str) -> Path:
        if name not in made:
            done = halfstep("train", *RUNS[name], *SHORT, f"run.dir={root / name}")
            assert done.exit_code == 0, done.output
            made[name] = root / name
        return made[name]

    return get


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Larger than a tile, of no round size, lying on its side as cameras leave it."""
    pixels = np.random.default_rng(0).integers(0, 256, (9, 13, 3)).astype(np.uint8)
    image = Image.fromarray(pixels).resize((151, 97), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path_factory.mktemp("photos") / "photo.png"
    image.save(path, exif=exif)
    return path


def predicted(run: Path, photo: Path, out: Path) -> tuple[Any, dict[str, str]]:
    import csv

    done = halfstep("predict", run, photo, "--out", out, "--overwrite", "--precision", "fp32")
    assert done.exit_code == 0, done.output
    mask = out / "masks" / "photo.png"
    with (out / "predictions.csv").open() as file:
        row = next(iter(csv.DictReader(file)))
    return (np.asarray(Image.open(mask)) if mask.exists() else None), row


def agrees(scope: dict[str, Any], mask: Any, row: dict[str, str]) -> None:
    """Of the names that the lines leave: `mask`, or `probabilities` and `classes`."""
    if mask is not None:
        said = scope["mask"] * (255 if len(scope["classes"]) == 2 else 1)
        assert said.shape == mask.shape
        assert (said == mask).mean() >= 0.999
        return
    probabilities = np.asarray(scope["probabilities"])
    assert scope["classes"][int(probabilities.argmax())] == row["class"]
    assert float(probabilities.max()) == pytest.approx(float(row["score"]), abs=5e-3)


def pasted(python: str, photo: Path) -> dict[str, Any]:
    scope: dict[str, Any] = {}
    exec(python.replace("photo.jpg", str(photo)), scope)  # strict, as load_state_dict is
    return scope


ONE_OF_EACH = ("unet", "timm", "classes")
"""A run with a model of each package; the others are variants that take ten seconds each."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ONE_OF_EACH else pytest.mark.full) for name in sorted(RUNS)]
)
@pytest.mark.slow
def test_the_lines_that_are_printed_predict_what_halfstep_does(
    trained: Any, photo: Path, name: str, tmp_path: Path
) -> None:
    run, file = trained(name), tmp_path / "out.safetensors"
    done = halfstep("export", run, "--out", file)
    assert done.exit_code == 0, done.output
    python, summary = done.stdout.split(f"\n\n{file}: ")
    assert ("halfstep" in python) == (name == "unet")
    scope = pasted(python, photo)
    agrees(scope, *predicted(run, photo, tmp_path / "out"))
    assert hashlib.sha256(file.read_bytes()).hexdigest() in summary
    assert f"{len(scope['model'].state_dict())} tensors" in summary
    said = " ".join(summary.split())
    assert "checked on 3 validation images: the outputs differ from those of the run's model by at most 0" in said
    assert "the printed code, run on 3 validation images of the original size, predicts the same class as" in said
    with safe_open(file, "pt") as opened:
        told = opened.metadata()
    assert told["python"] == python.replace(str(file), "export.safetensors"), "and nothing of where it lay"
    assert json.loads(told["classes"]) == scope["classes"]
    assert json.loads(told["preprocessing"])["mean"] == [0.485, 0.456, 0.406]
    assert told["output"].startswith("logits, N × ")
    metric = "iou" if RUNS[name][0] == "segmentation_tiny" else "top1"
    assert (told["metric"], told["averaged"]) == (metric, str(name in ("unet", "timm")).lower())
    best = json.loads((run / "result.json").read_text())["best"]
    assert (float(told[metric]), int(told["epoch"])) == (best["value"], best["epoch"])
    assert f"epoch {best['epoch']}, {metric} {best['value']:.4f}" in summary


@pytest.mark.parametrize("name", [pytest.param("smp", marks=pytest.mark.full), "timm"])
@pytest.mark.slow
def test_the_lines_run_where_there_is_no_halfstep(trained: Any, photo: Path, name: str, tmp_path: Path) -> None:
    run = trained(name)
    told = json.loads(halfstep("export", run, "--out", tmp_path / "x.safetensors", "--json").stdout)
    kept = "\nnp.savez({!r}, **({{'mask': mask}} if 'mask' in globals() else {{'probabilities': probabilities}}))\n"
    file = tmp_path / "answer.npz"
    code = BLOCKED + told["python"].replace("photo.jpg", str(photo)) + kept.format(str(file))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert told["classes"][0] in done.stdout
    agrees({**np.load(file), "classes": told["classes"]}, *predicted(run, photo, tmp_path / "out"))


@pytest.mark.parametrize(
    ("name", "format"),
    [("unet", "onnx"), pytest.param("timm", "onnx", marks=pytest.mark.full), ("unet", "torch_export")],
)
@pytest.mark.slow
def test_programs_predict_what_halfstep_does(trained: Any, photo: Path, name: str, format: str, tmp_path: Path) -> None:
    if format == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    run, file = trained(name), tmp_path / ("x.onnx" if format == "onnx" else "x.pt2")
    done = halfstep("export", run, "--format", format, "--out", file, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert "halfstep" not in told["python"]
    assert told["checked"]["max_difference"] < 1e-4
    assert told["checked"]["takes"].startswith("any batch size")
    assert ("any height and width" in told["checked"]["takes"]) == (name == "unet")
    agrees(pasted(told["python"], photo), *predicted(run, photo, tmp_path / "out"))
    notes = notes_in(file)
    assert notes["python"] == told["python"].replace(str(file), f"export{file.suffix}")
    assert json.loads(notes["classes"]) == told["classes"]


def notes_in(file: Path) -> dict[str, str]:
    if file.suffix == ".onnx":
        import onnxruntime

        notes: dict[str, str] = onnxruntime.InferenceSession(str(file)).get_modelmeta().custom_metadata_map
        return notes
    with zipfile.ZipFile(file) as archive:
        # Nothing that is written is a pickle.
        parts = [archive.read(name) for name in archive.namelist()]
        assert not any(part[:2] in (b"\x80\x02", b"\x80\x04") for part in parts)
        assert not any(part[:4] == b"PK\x03\x04" for part in parts), "torch.save would be an archive within"
        (found,) = [name for name in archive.namelist() if name.endswith("halfstep.json")]
        kept: dict[str, str] = json.loads(archive.read(found))
        return kept


@pytest.mark.wording
@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_without_the_packages_it_says_what_to_install(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    done = halfstep("export", trained("unet"), "--format", "onnx", "--out", tmp_path / "x.onnx")
    assert done.exit_code == 70
    assert "pip install 'halfstep[onnx]'" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.wording
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--format", "onx"], "did you mean 'onnx'?"),
        (["--format", "onnx", "--out", "x.safetensors"], "--format safetensors"),
        (["--format", "torch_export", "--out", "x.pt"], "--out x.pt2"),
        (["--format", "onnx", "--out", "x"], "--out x.onnx"),
    ],
)
def test_formats_and_names_that_do_not_fit(trained: Any, words: list[str], said: str) -> None:
    done = halfstep("export", trained("unet"), *words)
    assert done.exit_code == 78, done.output
    assert said in done.stderr


def test_the_sharded_layout_is_a_new_folder_of_files_of_that_size(trained: Any, tmp_path: Path) -> None:
    run, out = trained("timm"), tmp_path / "sharded"
    done = halfstep("export", run, "--max-shard-size", "1MB", "--out", out, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(told["files"]) > 1
    assert sorted(set(index["weight_map"].values())) == told["files"]
    with safe_open(run / "best.safetensors", "pt") as whole:
        for name, file in index["weight_map"].items():
            with safe_open(out / file, "pt") as part:
                assert torch.equal(part.get_tensor(name), whole.get_tensor(name))
    again = halfstep("export", run, "--max-shard-size", "1MB", "--out", out)
    assert again.exit_code == 73
    wrong = halfstep("export", run, "--max-shard-size", "1MB", "--format", "onnx", "--out", tmp_path / "other")
    assert wrong.exit_code == 78
    shown = halfstep("export", run, "--max-shard-size", "1GB", "--weights", "checkpoint", "--out", tmp_path / "one")
    assert "model.safetensors" in shown.stdout


def test_without_its_data_a_run_is_checked_with_noise(trained: Any, tmp_path: Path) -> None:
    import shutil

    run = Path(shutil.copytree(trained("unet"), tmp_path / "run"))
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("name: shapes", "name: pairs").replace("path: data", "path: gone"))
    told = json.loads(halfstep("export", run, "--json").stdout)
    assert "noise" in told["checked"]["source"]
    assert "noise" in told["checked"]["code"]["source"]
    assert told["checked"]["code"]["agreement"] >= 0.999
    assert told["checked"]["max_difference"] == 0


@pytest.mark.wording
def test_a_task_that_does_not_say_what_it_takes_gives_its_weights_alone(tmp_path: Path) -> None:
    words = ["train.steps=1", "data.samples=8", "data.size=16", "train.batch_size=2", "--fp32", "run.pictures=0"]
    assert halfstep("train", "slots_tiny", *words, f"run.dir={tmp_path / 'run'}").exit_code == 0
    done = halfstep("export", tmp_path / "run", "--weights", "last")
    assert done.exit_code == 0, done.output
    assert "does not describe the model's input" in done.stdout
    refused = halfstep("export", tmp_path / "run", "--weights", "last", "--format", "torch_export")
    assert refused.exit_code == 78
    assert "do: write --format safetensors" in refused.stderr


@pytest.mark.wording
@pytest.mark.parametrize("wrong", [1.0, float("nan")])
def test_a_file_that_computes_something_else_is_refused(wrong: float) -> None:
    signature = Signature(Preprocessing(3, (0.5,) * 3, (0.5,) * 3), ["a", "b"], "mask", 1, variable_size=True)
    model = torch.nn.Conv2d(3, 1, 1)
    images = [torch.randn(1, 3, 9, 7)]
    assert compare_with_model(model, RunnableFile(model), signature, images, "images").max_difference == 0
    with pytest.raises(WrongUse, match="the file and the model disagree"):
        compare_with_model(model, RunnableFile(lambda x: model(x) + wrong), signature, images, "images")
