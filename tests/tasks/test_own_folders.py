"""`segment` and `classify` on folders as people have them: they train, say what they chose, and go on with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import halfstep
from halfstep.errors import BadRecipe

CHANCE = np.random.default_rng(1)


def photographs(root: Path, sizes: tuple[tuple[int, int], ...] = ((40, 56), (64, 40), (48, 48))) -> Path:
    for number in range(9):
        size = sizes[number % len(sizes)]
        mask = np.zeros(size, np.uint8)
        mask[8:24, 8:30] = 255
        noise = CHANCE.integers(0, 100, size, np.uint8)
        for kind, pixels in (("images", np.repeat((noise + mask // 2)[..., None], 3, 2)), ("masks", mask)):
            (root / kind).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(root / kind / f"{number}.png")
    return root


def started(folder: Path) -> dict[str, object]:
    lines = (folder / "journal.jsonl").read_text().splitlines()
    start: dict[str, object] = next(event for event in map(json.loads, lines) if event["event"] == "start")
    return start


@pytest.mark.wording
def test_photographs_of_mixed_sizes_train_without_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"data.path": str(photographs(tmp_path / "photos")), "train.steps": 2, "model.width": 4}
    run = halfstep.fit("segment", settings={**settings, "train.num_workers": 64}, quiet=True)
    assert run.steps == 2
    assert (run.dir / "pictures").is_dir()
    start = started(run.dir)
    chosen = {one["key"]: one["reason"] for one in start["sizing"]}  # type: ignore[attr-defined]
    assert {"data.val", "data.classes", "data.crop", "train.batch_size"} <= chosen.keys()
    assert "model.width" not in chosen
    assert all(chosen.values())
    assert any("cores" in note and "64 were requested" in note for note in start["notes"])  # type: ignore[attr-defined]
    # Another photograph changes what would be chosen, and not what the run was begun with.
    assert halfstep.fit("segment", settings=settings, quiet=True) == run


def test_class_folders_train_without_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("cat", "dog", "emu"):
        (tmp_path / "animals" / name).mkdir(parents=True)
        for number in range(4):
            pixels = CHANCE.integers(0, 256, (33, 36, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "animals" / name / f"{number}.jpg")
    run = halfstep.fit("classify", settings={"data.path": str(tmp_path / "animals"), "train.steps": 1}, quiet=True)
    assert run.steps == 1
    assert "top1" in run.metrics


@pytest.mark.wording
def test_a_warmup_that_outlasts_the_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"data.path": str(photographs(tmp_path / "photos")), "train.epochs": 1, "schedule.warmup_steps": 1000}
    with pytest.raises(BadRecipe, match=r"warmup_steps=1000, and the whole run has \d+ steps"):
        halfstep.fit("segment", settings=settings, quiet=True)
    assert not (tmp_path / "runs" / "segment").exists()


def test_looking_a_folder_over_loads_no_torch(tmp_path: Path) -> None:
    photographs(tmp_path)
    code = (
        "import sys; from halfstep.cli.data import run; run('check', sys.argv[1]); run('list');"
        "assert not {'torch', 'torchvision'} & set(sys.modules), 'torch is loaded'"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True)
