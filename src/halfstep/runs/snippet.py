"""Generate Python code that uses exported weights without halfstep."""

from __future__ import annotations

import json
import pprint
from pathlib import Path
from typing import Any

from halfstep.tasks.models.smp_models import PREFIX
from halfstep.tasks.models.unet import UNet
from halfstep.train.signature import MODES, Signature
from halfstep.train.task import Task

PHOTO = "photo.jpg"
"""The image the code opens; users replace it with their own."""
COLUMNS = 80
"""The width of a terminal. Code broken across lines cannot be copied, so templates stay within."""
WHOLE = 2**30
"""The tile of a model that takes whole images."""

_LOAD_IMAGE = """\
def load_image(file):  # upright, {order}; 16- and 32-bit gray as floats
    image = ImageOps.exif_transpose(Image.open(file))
    if image.mode == "P":
        image = image.convert("RGBA")
    if not image.mode.startswith(("I", "F")):
        return image.convert("{order}").split()
    return {planes}
"""
_LOAD_PAGES = """\
def load_image(file):  # a TIFF with a gray page for each channel
    pages = ImageSequence.Iterator(Image.open(file))
    pages = [ImageOps.exif_transpose(page) for page in pages]
    return [p.convert("L") if p.mode in "1L" else to_float(p) for p in pages]
"""
_TO_FLOAT = """\
def to_float(image):  # 16-bit values are scaled to [0, 1]
    largest = 65535 if "16" in image.mode else 1
    return Image.fromarray(np.asarray(image, np.float32) / np.float32(largest))
"""
_PLANES = {
    1: "[to_float(image)]",
    2: '[to_float(image), Image.new("F", image.size, 1)]',
    3: "[to_float(image)] * 3",
    4: '[to_float(image)] * 3 + [Image.new("F", image.size, 1)]',
}
"""The channels of a gray image that is deeper than 8 bits: repeated, and opaque."""
_DOWNSCALE = """\
def downscale(image):  # at most {max_side} pixels on the longer side
    factor = min(1, {max_side} / max(image.size))
    size = [max(1, round(side * factor)) for side in image.size]
    return image.resize(size, Image.BILINEAR)
"""
_CROP_CENTER = """\
def crop_center(image):  # resize the shorter side to {resize}, crop {crop} × {crop}
    width, height = image.size
    short = min(width, height)
    size = int({resize} * width / short), int({resize} * height / short)
    image = image.resize(size, Image.BILINEAR)
    left, top = (round((side - {crop}) / 2) for side in image.size)
    return image.crop((left, top, left + {crop}, top + {crop}))
"""
_PREPROCESS = """\
def preprocess(images):  # 1 × {channels} × height × width, float32
    def to_array(image):
        largest = 1 if image.mode == "F" else 255
        return np.atleast_3d(np.asarray({resized}, np.float32) / largest)
    mean = np.float32({mean})
    std = np.float32({std})
    x = (np.concatenate([to_array(image) for image in images], -1) - mean) / std
    return np.ascontiguousarray(x.transpose(2, 0, 1)[None])
"""
_PREDICT_TILES = """\
def predict(x, tile={tile}, overlap={overlap}):  # large images in overlapping tiles
    def starts(length):
        n = max(1, math.ceil((length - overlap) / (tile - overlap)))
        return [round(i * (length - tile) / max(n - 1, 1)) for i in range(n)]
    def ramp(n):
        return np.maximum(np.sin(np.pi * (np.arange(n) + 0.5) / n) ** 2, 1e-3)
    height, width = x.shape[2:]
    h, w = min(tile, height), min(tile, width)
    window = np.outer(ramp(h), ramp(w))
    total = np.zeros((1, {outputs}, height, width))
    weight = np.zeros((height, width))
    for top in starts(height):
        for left in starts(width):
            area = (..., slice(top, top + h), slice(left, left + w))
            padding = (0, 0), (0, 0), (0, -h % {multiple}), (0, -w % {multiple})
            logits = forward(np.pad(x[area], padding, "edge"))
            total[area] += logits[..., :h, :w] * window
            weight[area] += window
    return total / weight
"""
_UPSCALE = """\
def upscale(logits, size):  # to the size of the photograph
    maps = [Image.fromarray(x.astype(np.float32)) for x in logits]
    return np.stack([np.asarray(x.resize(size, Image.BILINEAR)) for x in maps])
"""
_PRINT_CLASSES = """\
logits = forward(preprocess(load_image({photo})))[0]
probabilities = np.exp(logits - logits.max())
probabilities /= probabilities.sum()
for number in probabilities.argsort()[::-1][:5]:
    print(f"{{classes[number]}}: {{probabilities[number]:.3f}}")
"""
_PRINT_MASK = """\
photo = load_image({photo})
logits = {logits}
mask = {chosen}  # height × width: class index
for number, name in enumerate(classes):
    print(f"{{name}}: {{(mask == number).mean():.2%}} of the pixels")
"""


def build_loading_code(
    task: Task, model: Any, signature: Signature | None, file: Path, format: str, photo: str = PHOTO
) -> str:
    """Return code that loads the file and, where the task has a signature, predicts an image with it."""
    imports, loading = _LOADING[format](task, model, file)
    if signature is None:
        return "\n".join([*imports, "", loading])
    imports = ["import math", *imports] if signature.answer == "mask" else imports
    pages = signature.preprocessing.channels not in MODES
    names = "Image, ImageOps, ImageSequence" if pages else "Image, ImageOps"
    # isort's order: plain imports first.
    head = "\n".join(sorted({*imports, "import numpy as np", f"from PIL import {names}"}, key=_build_import_key))
    return "\n".join([head, "", loading + _format_forward_code(format), *_build_usage_lines(signature, photo)])


def _build_import_key(line: str) -> tuple[bool, str]:
    return line.startswith("from"), line.lower()


def _build_weights_loading(task: Task, model: Any, file: Path) -> tuple[list[str], str]:
    imports, built = _build_lines(task, model)
    lines = [*built, f"model.load_state_dict(load_file({json.dumps(str(file))}))", "model.eval()"]
    return ["import torch", *imports, "from safetensors.torch import load_file"], "\n".join(lines)


def _build_program_loading(task: Task, model: Any, file: Path) -> tuple[list[str], str]:
    return ["import torch"], f"model = torch.export.load({json.dumps(str(file))}).module()"


def _build_session_loading(task: Task, model: Any, file: Path) -> tuple[list[str], str]:
    arguments = f'    {json.dumps(str(file))}, providers=["CPUExecutionProvider"]'
    return ["import onnxruntime as ort"], f"session = ort.InferenceSession(\n{arguments}\n)"


_LOADING = {
    "safetensors": _build_weights_loading,
    "torch_export": _build_program_loading,
    "onnx": _build_session_loading,
}


def _format_forward_code(format: str) -> str:
    if format == "onnx":
        return '\n\n\ndef forward(x):\n    return session.run(None, {"image": x})[0]\n'
    return "\n\n\n@torch.inference_mode()\ndef forward(x):\n    return model(torch.from_numpy(x)).numpy()\n"


def name_class_to_build(model: Any, format: str) -> str | None:
    """Return the name of the class that the code leaves to the user; None if it builds the model, or needs none."""
    theirs = type(model).__module__.partition(".")[0] in ("timm", "segmentation_models_pytorch")
    return None if format != "safetensors" or theirs or type(model) is UNet else type(model).__name__


def _build_lines(task: Task, model: Any) -> tuple[list[str], list[str]]:
    """Return the imports, and the lines that build the model."""
    options: Any = task.recipe.model
    data: Any = getattr(task.recipe, "data", None)
    home = type(model).__module__.partition(".")[0]
    if home == "timm":
        return ["import timm"], _build_timm_lines(options, data, model)
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


def _build_timm_lines(options: Any, data: Any, model: Any) -> list[str]:
    import timm

    settings = timm.get_pretrained_cfg(options.name)
    size = f", img_size={data.size}" if settings is not None and settings.fixed_input_size else ""
    shape = f"in_chans={data.channels}, num_classes={model.num_classes}{size}"
    built = [f"model = timm.create_model({json.dumps(options.name)}, {shape})"]
    if not options.small_stem:
        return built
    stem = f"torch.nn.Conv2d({data.channels}, {model.conv1.out_channels}, 3, padding=1, bias=False)"
    return [*built, f"model.conv1 = {stem}  # model.small_stem", "model.maxpool = torch.nn.Identity()"]


def _build_usage_lines(signature: Signature, photo: str) -> list[str]:
    taken = signature.preprocessing
    shrinks = taken.max_side is not None and taken.resize is None
    resized = "crop_center(image)" if taken.resize is not None else "downscale(image)" if shrinks else "image"
    parts = [
        _LOAD_PAGES
        if taken.channels not in MODES
        else _LOAD_IMAGE.format(order=taken.order, planes=_PLANES[taken.channels]),
        _TO_FLOAT,
        *([_DOWNSCALE.format(max_side=taken.max_side)] if shrinks else []),
        *([_CROP_CENTER.format(resize=taken.resize, crop=taken.crop)] if taken.resize is not None else []),
        _PREPROCESS.format(channels=taken.channels, mean=list(taken.mean), std=list(taken.std), resized=resized),
    ]
    if signature.answer == "mask":
        tile = taken.tile or WHOLE
        many = {"outputs": signature.outputs, "multiple": taken.multiple, "tile": tile, "overlap": taken.overlap}
        parts.append(_PREDICT_TILES.format(**many))
    if signature.answer == "mask" and taken.max_side is not None:
        parts.append(_UPSCALE)
    names = pprint.pformat(signature.classes, width=COLUMNS - len("classes = "), indent=4, compact=True)
    code = [line for part in parts for line in ("", part)]
    return [*code, "", f"classes = {names}", _format_answer_code(signature, photo).rstrip()]


def _format_answer_code(signature: Signature, photo: str) -> str:
    if signature.answer == "class":
        return _PRINT_CLASSES.format(photo=json.dumps(photo))
    logits = "predict(preprocess(photo))[0]"
    logits = logits if signature.preprocessing.max_side is None else f"upscale({logits}, photo[0].size)"
    chosen = "(logits[0] > 0).astype(np.uint8)" if signature.outputs == 1 else "logits.argmax(0).astype(np.uint8)"
    return _PRINT_MASK.format(photo=json.dumps(photo), logits=logits, chosen=chosen)
