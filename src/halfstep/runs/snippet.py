"""Generate Python code that uses exported weights without halfstep."""

from __future__ import annotations

import json
import pprint
from pathlib import Path
from typing import Any

from halfstep.tasks.models.smp_models import PREFIX
from halfstep.tasks.models.unet import UNet
from halfstep.train.signature import MODES, Preprocessing, Signature
from halfstep.train.task import Task

PHOTO = "photo.jpg"
"""The image the code opens; users replace it with their own."""
COLUMNS = 80
"""The width of a terminal. Code that it breaks cannot be selected as it was printed, so templates stay within."""

_PIXELS = """\
def pixels(file):  # height × width × channels, {order}, upright
    image = ImageOps.exif_transpose(Image.open(file)).convert("{order}")
{cut}    return np.atleast_3d(np.asarray(image, np.float32)) / 255
"""
_PAGES = """\
def pixels(file):  # height × width × channels
    # a TIFF with a grey page for each channel
    pages = [np.array(page) for page in ImageSequence.Iterator(Image.open(file))]
    return np.stack(pages, -1) / np.float32(np.iinfo(pages[0].dtype).max)
"""
_CUT = """\
    # the shorter side becomes {resize}, and the middle {crop} × {crop} is looked at
    wide, high = image.size
    short = min(wide, high)
    size = int({resize} * wide / short), int({resize} * high / short)
    image = image.resize(size, Image.BILINEAR)
    left, top = (round((side - {crop}) / 2) for side in image.size)
    image = image.crop((left, top, left + {crop}, top + {crop}))
"""
_PREPARED = """\
def prepared(file):  # 1 × {channels} × height × width, float32
    mean = np.float32({mean})
    std = np.float32({std})
    x = (pixels(file) - mean) / std
    return np.ascontiguousarray(x.transpose(2, 0, 1)[None])
"""
_TILES = """\
def answer(x, tile={tile}, overlap={overlap}):  # large images in tiles that overlap
    def starts(length):
        n = max(1, math.ceil((length - overlap) / (tile - overlap)))
        return [round(i * (length - tile) / max(n - 1, 1)) for i in range(n)]
    def ramp(n):
        return np.maximum(np.sin(np.pi * (np.arange(n) + 0.5) / n) ** 2, 1e-3)
    high, wide = x.shape[2:]
    h, w = min(tile, high), min(tile, wide)
    window = np.outer(ramp(h), ramp(w))
    total, weight = np.zeros((1, {outputs}, high, wide)), np.zeros((high, wide))
    for top in starts(high):
        for left in starts(wide):
            here = (..., slice(top, top + h), slice(left, left + w))
            more = ((0, 0), (0, 0), (0, -h % {multiple}), (0, -w % {multiple}))
            logits = forward(np.pad(x[here], more, "edge"))
            total[here] += logits[..., :h, :w] * window
            weight[here] += window
    return total / weight
"""
_CHANCES = """\
logits = forward(prepared("{photo}"))[0]
chances = np.exp(logits - logits.max())
chances /= chances.sum()
for number in chances.argsort()[::-1][:5]:
    print(f"{{classes[number]}}: {{chances[number]:.3f}}")
"""
_MASK = """\
logits = answer(prepared("{photo}"))[0]
mask = {chosen}  # height × width: the number of a class
for number, name in enumerate(classes):
    print(f"{{name}}: {{(mask == number).mean():.2%}} of the pixels")
"""


def snippet(task: Task, model: Any, signature: Signature | None, file: Path, format: str) -> str:
    """Return code that loads the file and, where the task has a signature, predicts an image with it."""
    imports, loading = _LOADING[format](task, model, file)
    if signature is None:
        return "\n".join([*imports, "", loading])
    imports = ["import math", *imports] if signature.answer == "mask" else imports
    names = "Image, ImageSequence" if signature.preprocessing.channels not in MODES else "Image, ImageOps"
    # isort's order: plain imports first.
    head = "\n".join(sorted({*imports, "import numpy as np", f"from PIL import {names}"}, key=_isorted))
    return "\n".join([head, "", loading + _forward(format), *_using(signature)])


def _isorted(line: str) -> tuple[bool, str]:
    return line.startswith("from"), line.lower()


# -- the model ---------------------------------------------------------------------------------------------------------


def _weights(task: Task, model: Any, file: Path) -> tuple[list[str], str]:
    imports, built = _built(task, model)
    lines = [*built, f"model.load_state_dict(load_file({json.dumps(str(file))}))", "model.eval()"]
    return ["import torch", *imports, "from safetensors.torch import load_file"], "\n".join(lines)


def _program(task: Task, model: Any, file: Path) -> tuple[list[str], str]:
    return ["import torch"], f"model = torch.export.load({json.dumps(str(file))}).module()"


def _session(task: Task, model: Any, file: Path) -> tuple[list[str], str]:
    arguments = f'    {json.dumps(str(file))}, providers=["CPUExecutionProvider"]'
    return ["import onnxruntime as ort"], f"session = ort.InferenceSession(\n{arguments}\n)"


_LOADING = {"safetensors": _weights, "torch_export": _program, "onnx": _session}


def _forward(format: str) -> str:
    if format == "onnx":
        return '\n\n\ndef forward(x):\n    return session.run(None, {"image": x})[0]\n'
    return "\n\n\n@torch.inference_mode()\ndef forward(x):\n    return model(torch.from_numpy(x)).numpy()\n"


def _built(task: Task, model: Any) -> tuple[list[str], list[str]]:
    """Return the imports, and the lines that build the model."""
    options: Any = task.recipe.model
    data: Any = getattr(task.recipe, "data", None)
    home = type(model).__module__.partition(".")[0]
    if home == "timm":
        return ["import timm"], _timms(options, data, model)
    if home == "segmentation_models_pytorch":
        kind, outputs = options.name.removeprefix(PREFIX), 1 if data.classes == 2 else data.classes
        shape = f"in_channels={data.channels}, classes={outputs}"
        built = f"model = smp.create_model({json.dumps(kind)}, {json.dumps(options.encoder)}, None, {shape})"
        return ["import segmentation_models_pytorch as smp"], [built]
    # A subclass may have other arguments.
    if type(model) is UNet:
        outputs = 1 if data.classes == 2 else data.classes
        arguments = f"{data.channels}, {outputs}, {options.width}, {options.depth}"
        return ["from halfstep.tasks.models.unet import UNet"], [f"model = UNet({arguments})"]
    return [], [f"model = {type(model).__name__}(...)"]


def _timms(options: Any, data: Any, model: Any) -> list[str]:
    import timm

    settings = timm.get_pretrained_cfg(options.name)
    size = f", img_size={data.size}" if settings is not None and settings.fixed_input_size else ""
    shape = f"in_chans={data.channels}, num_classes={model.num_classes}{size}"
    built = [f"model = timm.create_model({json.dumps(options.name)}, {shape})"]
    if not options.small_stem:
        return built
    stem = f"torch.nn.Conv2d({data.channels}, {model.conv1.out_channels}, 3, padding=1, bias=False)"
    return [*built, f"model.conv1 = {stem}  # model.small_stem", "model.maxpool = torch.nn.Identity()"]


# -- the image, and the answer ----------------------------------------------------------------------------------------


def _using(signature: Signature) -> list[str]:
    taken = signature.preprocessing
    lines = [
        "",
        _pixels(taken),
        "",
        _PREPARED.format(channels=taken.channels, mean=list(taken.mean), std=list(taken.std)),
    ]
    if signature.answer == "mask":
        many = {"outputs": signature.outputs, "multiple": taken.multiple, "tile": taken.tile, "overlap": taken.overlap}
        lines += ["", _TILES.format(**many)]
    names = pprint.pformat(signature.classes, width=COLUMNS - len("classes = "), indent=4, compact=True)
    return [*lines, "", f"classes = {names}", _answer(signature).rstrip()]


def _pixels(taken: Preprocessing) -> str:
    if taken.channels not in MODES:
        return _PAGES
    cut = "" if taken.resize is None else _CUT.format(resize=taken.resize, crop=taken.crop)
    return _PIXELS.format(order=taken.order, cut=cut)


def _answer(signature: Signature) -> str:
    if signature.answer == "class":
        return _CHANCES.format(photo=PHOTO)
    chosen = "(logits[0] > 0).astype(np.uint8)" if signature.outputs == 1 else "logits.argmax(0).astype(np.uint8)"
    return _MASK.format(photo=PHOTO, chosen=chosen)
