"""Run the code that an export prints, in a separate process, on image files, and compare it with `halfstep predict`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from halfstep.data.dataset import BadSample, Source, complete_source
from halfstep.data.image_files import SUFFIXES
from halfstep.data.image_io import read_image
from halfstep.errors import HalfstepError, WrongUse
from halfstep.train.signature import MODES, Signature
from halfstep.train.task import MissingTaskMethod, Prediction, Task

IMAGES = 3
MOST_PIXELS = 12_000_000
"""Pixels the model sees in one check: a processor needs minutes for more. One image is always checked."""
LEAST_AGREEMENT = 0.999
"""The least share of pixels, or of images, with the same class."""
TIE = 0.01
"""Chances this close are a tie: two libraries round a resized image differently."""

_RUNNER = """
import json, sys
import numpy as np
texts, name, place = json.load(sys.stdin)
answers = {}
for number, text in enumerate(texts):
    scope = {}
    exec(compile(text, "<printed code>", "exec"), scope)
    answers[str(number)] = scope[name]
np.savez(place, **answers)
"""

Array = np.ndarray[Any, Any]
Code = Callable[[str], str]
"""Returns the printed code for an image file."""


@dataclass(frozen=True)
class CodeComparison:
    """The comparison of the printed code with `halfstep predict --precision fp32`, on image files."""

    images: int
    source: str
    """The origin of the files, in words."""
    agreement: float | None
    """The share of pixels, or of images, with the same class; None if the code was not run."""
    not_run: str | None = None
    """Why the code was not run, in words."""


def check_code(task: Task, model: nn.Module, signature: Signature, code: Code) -> CodeComparison:
    """Run the code on validation images as they are stored. Raise `WrongUse` if it fails or predicts otherwise."""
    with tempfile.TemporaryDirectory(prefix="halfstep-export-") as folder:
        files, source = collect_image_files(task, signature, Path(folder))
        channels = signature.preprocessing.channels
        try:
            expected = [task.predict(model, read_image(file, channels)) for file in files]
        except MissingTaskMethod:
            return CodeComparison(0, source, None, "its task predicts nothing about images")
        if any(prediction.mask is None for prediction in expected) and signature.answer == "mask":
            return CodeComparison(0, source, None, "its task predicts no mask")
        if any("class" not in prediction.values for prediction in expected) and signature.answer == "class":
            return CodeComparison(0, source, None, "its task predicts no class")
        answers = run_code([code(str(file)) for file in files], signature, Path(folder))
    shares = [_compute_agreement(signature, *pair) for pair in zip(expected, answers, strict=True)]
    agreement = float(np.mean(shares))
    if not agreement >= LEAST_AGREEMENT:
        things = "the images" if signature.answer == "class" else "the pixels"
        raise WrongUse(
            f"the printed code gives the class of `halfstep predict` in {agreement:.2%} of {things} alone",
            allowed=f"{LEAST_AGREEMENT:.1%} or more, on {len(files)} {source}",
            do="use halfstep.load(RUN).predict(image), which reads images as training does",
        )
    return CodeComparison(len(files), source, agreement)


def run_code(texts: list[str], signature: Signature, folder: Path) -> list[Array]:
    """Run each text and return what it left: its `mask`, or its `probabilities`. Raise `WrongUse` if one fails."""
    name = "mask" if signature.answer == "mask" else "probabilities"
    place = folder / "answers.npz"
    # Absolute, because the process has another working folder: a file there must not be imported by accident.
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", _RUNNER],
        input=json.dumps([texts, name, str(place)]),
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"},
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise WrongUse(
            f"the printed code fails: {last}",
            allowed="code that runs on the run's own images",
            do="use halfstep.load(RUN).predict(image), or write another format",
        )
    with np.load(place) as answers:
        return [answers[str(number)] for number in range(len(texts))]


def _compute_agreement(signature: Signature, prediction: Prediction, answer: Array) -> float:
    """Return the share of pixels with the same class; for a class, 1 where it is the same or a tie."""
    if signature.answer == "class":
        chance = float(answer[signature.classes.index(str(prediction.values["class"]))])
        return float(chance >= float(answer.max()) - TIE)
    assert prediction.mask is not None
    mask = prediction.mask
    if len(signature.classes) == 2 and mask.max() == 255:  # 0 and 255, for image viewers
        mask = mask // 255
    return float((mask == answer).mean()) if mask.shape == answer.shape else 0.0


def collect_image_files(task: Task, signature: Signature, folder: Path) -> tuple[list[Path], str]:
    """Return files of validation images in their stored size, and their origin in words.

    Images that are no files (drawn, or in a shard) are written to `folder`; without any, it is noise.
    """
    found: list[Path] = []
    pixels = 0
    for file in _pick_validation_files(task, folder):
        high, wide = read_image(file, signature.preprocessing.channels).shape[-2:]
        small = signature.preprocessing.shrunk_size(high, wide)
        pixels += small[0] * small[1] if signature.answer == "mask" else 0
        if found and pixels > MOST_PIXELS:
            break
        found.append(file)
    if found:
        return found, "validation images of the original size"
    return _write_noise_images(signature, folder), "images of noise, as the run's data is not here"


def _pick_validation_files(task: Task, folder: Path) -> Iterator[Path]:
    """Yield readable files spread over the validation set; neighbors often look the same."""
    channels = getattr(task, "channels_read", getattr(task.recipe.data, "channels", 3))
    try:
        source = complete_source(task.source("val"))
    except (HalfstepError, BadSample, OSError):
        return
    for number in sorted({n * (len(source) - 1) // max(IMAGES - 1, 1) for n in range(IMAGES)}):
        try:
            file = _find_stored_file(source, number, folder)
            read_image(file, channels)
        except (HalfstepError, BadSample, OSError):
            continue
        yield file


def _find_stored_file(source: Source, number: int, folder: Path) -> Path:
    """Return the image file of a sample, as it is stored."""
    for _, file in source.files_of(number):
        if Path(file).suffix.lower() in SUFFIXES:
            return Path(file).resolve()
    whole = source.base.read(source.index_in_base(number))  # a wrapper may have shrunk the image
    return write_image(whole["image"], folder / f"image-{number}")


def write_image(image: Tensor, path: Path) -> Path:
    """Write channels × height × width without loss, in the form that `read_image` reads back; return the path."""
    planes: list[Array] = list(image.cpu().numpy())
    if image.dtype == torch.uint8 and len(planes) in MODES:
        file = path.with_name(f"{path.name}.png")
        pixels = planes[0] if len(planes) == 1 else np.stack(planes, -1)
        Image.fromarray(pixels).save(file)
        return file
    file = path.with_name(f"{path.name}.tiff")
    # Deeper images of up to four channels are gray, repeated.
    first, *rest = (Image.fromarray(plane) for plane in (planes if len(planes) not in MODES else planes[:1]))
    first.save(file, save_all=bool(rest), append_images=rest)
    return file


def _write_noise_images(signature: Signature, folder: Path) -> list[Path]:
    """Return files of smooth noise in three sizes, one of them larger than `max_side`."""
    taken = signature.preprocessing
    side = max(taken.max_side or 0, taken.crop or 0, 192)
    sizes = [(side, side * 2 // 3), (side * 2 // 3, side), (side * 5 // 4, side)]
    draw = torch.Generator().manual_seed(0)
    files = []
    for number, size in enumerate(sizes):
        coarse = torch.rand(1, taken.channels, 12, 12, generator=draw)
        smooth = torch.nn.functional.interpolate(coarse, size, mode="bicubic").clamp(0, 1)[0]
        files.append(write_image((smooth * 255).to(torch.uint8), folder / f"noise-{number}"))
    return files
