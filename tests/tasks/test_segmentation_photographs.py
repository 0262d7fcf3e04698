"""A person's own photographs: of any size, gray or with alpha, turned by EXIF; in every precision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import halfstep
from halfstep.precision.precision import resolve_precision_name
from halfstep.train.evaluation import evaluate_model
from halfstep.train.loaders import make_val_loader
from tests.tasks.made import made

SIZES = {"tall": (70, 33), "wide": (31, 90), "tile": (32, 32), "small": (9, 13), "grey": (40, 40), "alpha": (64, 20)}
TURNED = {"turned6": 6, "turned3": 3, "turned8": 8}
"""Photographs that lie in their file otherwise than they are seen, by EXIF's number."""
RECIPE = """
task: segmentation
model: {width: 4, depth: 2}
data: {name: pairs, path: PLACE, val: 0.5, crop: 32, tile: 32, overlap: 8}
train: {epochs: 1, batch_size: 8, num_workers: 0, seed: 1, clip_norm: 1.0}
"""


def write_photographs(root: Path, copies: int = 1) -> None:
    draw = np.random.default_rng(3)
    for folder in ("images", "masks"):
        (root / folder).mkdir(parents=True)
    for copy in range(copies):
        for name, (high, wide) in {**SIZES, **dict.fromkeys(TURNED, (44, 30))}.items():
            mask = (draw.random((high, wide)) > 0.5).astype(np.uint8)
            colors = np.repeat((mask * 200 + 20)[..., None], 3, 2)
            save(root / "images", f"{name}{copy}", colors, name)
            Image.fromarray(mask * 255).save(root / "masks" / f"{name}{copy}.png")


def save(folder: Path, file: str, colors: np.ndarray, kind: str) -> None:
    image = Image.fromarray(colors)
    if kind in TURNED:
        turns = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
        exif = Image.Exif()
        exif[0x0112] = TURNED[kind]
        image.transpose(turns[TURNED[kind]]).save(folder / f"{file}.jpg", exif=exif, quality=95)
    elif kind == "grey":
        image.convert("L").save(folder / f"{file}.png")
    else:
        image.convert("RGBA" if kind == "alpha" else "RGB").save(folder / f"{file}.png")


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photographs") / "all"
    write_photographs(root, copies=2)
    return root


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_whole_images_and_tiled_ones_share_a_batch(photographs: Path, precision: str) -> None:
    data = {"name": "pairs", "path": str(photographs), "classes": 2, "val": 0.5}
    task = made("segmentation", data=data)
    task.recipe = task.recipe.model_copy(update={"train": task.recipe.train.model_copy(update={"batch_size": 9})})
    here, kind = torch.device("cpu"), resolve_precision_name(precision)
    torch.manual_seed(0)
    model = task.model()
    kind.prepare(model, here)
    loader = make_val_loader(task, task.recipe, here)
    assert len({tuple(size) for batch in loader for size in batch.tensors["size"].tolist()}) > 3
    found = evaluate_model(task, model, loader, precision=kind, device=here)
    plain = evaluate_model(task, model, loader, precision=resolve_precision_name("fp32"), device=here)
    assert found == pytest.approx(plain, abs=0.02)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_what_tiles_join_into_is_wide_whatever_came_first(photographs: Path, precision: str) -> None:
    task = made("segmentation", data={"name": "pairs", "path": str(photographs), "classes": 2, "val": 0.5})
    source, model = task.source("val"), task.model().eval()
    samples = [task.transform("val", source.read(n)) for n in range(len(source))]
    for order in (samples, samples[::-1]):
        batch = task.collate("val", order)
        with resolve_precision_name(precision).inference(torch.device("cpu")):
            logits = task._logits_of_whole_images(model, batch)  # type: ignore[attr-defined]
            loss = task.loss(model, batch)
        assert logits.dtype is torch.float32
        assert loss.dtype is torch.float32
        assert logits.isfinite().all()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_on_them_comes_to_its_end(photographs: Path, tmp_path: Path, precision: str) -> None:
    recipe = tmp_path / "own.yaml"
    recipe.write_text(RECIPE.replace("PLACE", str(photographs)))
    run = halfstep.fit(recipe, precision=precision, settings={"run.dir": str(tmp_path / "run")}, quiet=True)
    assert run.reason == "finished"
    assert run.precision == precision
    assert 0.0 < run.metrics["iou"] <= 1.0
    assert (run.dir / "pictures" / "epoch-0001.png").is_file()


@pytest.mark.parametrize("kind", TURNED)
def test_a_photograph_is_upright_as_its_mask_is(photographs: Path, kind: str) -> None:
    task = made("segmentation", data={"name": "pairs", "path": str(photographs), "classes": 2, "val": 0.5})
    for source in (task.source("train"), task.source("val")):
        for number in range(len(source)):
            if kind in source.name(number):
                sample = source.read(number)
                agree = (sample["image"][0] > 128) == (sample["mask"] == 1)
                assert agree.float().mean() > 0.97  # JPEG blurs single pixels
