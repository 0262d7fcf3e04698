"""The code that `halfstep export` prints, on 40 photographs of mixed sizes, next to `halfstep predict`.

    python benchmarks/export_agreement.py [--photographs 40] [--record]

Photographs are drawn, some of them turned by EXIF, gray, or with transparency. `segment` is trained with the `max_side`
that it chooses and with 192, and exported in every format; the printed code runs in a process of its own on the files,
and its masks are compared pixel by pixel with those that `predict` wrote. A format whose runtime is missing is named.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from typer.testing import CliRunner

import halfstep
from halfstep.cli.main import build
from halfstep.runs.printed_code import run_code

RECORD = Path(__file__).with_suffix(".json")
SIZES = [(640, 480), (480, 640), (800, 600), (1024, 768), (512, 512), (300, 400), (700, 500), (201, 77)]
FORMATS = {"safetensors": "safetensors", "onnx": "onnxruntime", "torch_export": "torch"}
"""The package that runs each format."""


def photograph(number: int) -> tuple[Image.Image, Image.Image]:
    draw, (wide, high) = np.random.default_rng(number), SIZES[number % len(SIZES)]
    y, x = np.mgrid[0:high, 0:wide]
    ground = 110 + 40 * np.sin(x / 37 + draw.uniform(0, 6)) + 30 * np.cos(y / 51 + draw.uniform(0, 6))
    pixels = np.stack([ground * 0.6, ground, ground * 0.4], -1) + draw.normal(0, 14, (high, wide, 3))
    mask = np.zeros((high, wide), np.uint8)
    for _ in range(int(draw.integers(1, 5))):
        radius, kind = draw.uniform(0.1, 0.2) * min(wide, high), int(draw.integers(1, 3))
        inside = ((x - draw.uniform(0, wide)) ** 2 + ((y - draw.uniform(0, high)) / 0.7) ** 2) < radius**2
        pixels[inside], mask[inside] = ((200, 60, 50), (225, 215, 190))[kind - 1], kind
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), Image.fromarray(mask)


def write_photographs(root: Path, count: int) -> None:
    for kind in ("images", "masks"):
        (root / kind).mkdir(parents=True)
    for number in range(count):
        (image, mask), exif = photograph(number), Image.Exif()
        if number % 8 == 7:
            exif[0x0112], image = 6, image.transpose(Image.Transpose.ROTATE_90)
        image = image.convert({5: "RGBA", 11: "L"}.get(number, "RGB"))
        image.save(root / "images" / f"{number:02d}.{'png' if number == 5 else 'jpg'}", exif=exif)
        mask.save(root / "masks" / f"{number:02d}.png")


def command(*words: object) -> str:
    done = CliRunner().invoke(build(), [str(word) for word in words])
    if done.exit_code:
        raise SystemExit(done.output)
    return done.stdout


def agreement(run: Path, photos: Path, out: Path, format: str) -> dict[str, Any]:
    """Return the share of pixels with the same class, over all photographs and of the worst one."""
    if find_spec(FORMATS[format]) is None:
        return {"not_run": f"{FORMATS[format]} is not installed"}
    told = json.loads(command("export", run, "--format", format, "--force", "--json"))
    files = sorted((photos / "images").iterdir())
    signature = halfstep.load(run).signature
    texts = [told["python"].replace("photo.jpg", str(file)) for file in files]
    texts = [text.replace(str(told["file"]), str(Path(told["file"]).resolve())) for text in texts]
    same = []
    for file, mask in zip(files, run_code(texts, signature, out), strict=True):
        name = file.name if file.suffix == ".png" else f"{file.name}.png"
        expected = np.asarray(Image.open(out / "masks" / name))
        same.append(mask == expected)
    pixels = sum(one.size for one in same)
    share = sum(int(one.sum()) for one in same) / pixels
    return {
        "photographs": len(files),
        "pixels": pixels,
        "agreement": share,
        "worst": min(float(s.mean()) for s in same),
    }


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--photographs", type=int, default=40)
    asked.add_argument("--record", action="store_true")
    options = asked.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_photographs(root / "photos", options.photographs)
        for name, words in {"default": [], "192": ["data.max_side=192"]}.items():
            run, out = root / name, root / f"{name}-predicted"
            more = [
                "train.steps=60",
                "evaluate.every_epochs=99",
                "model.width=8",
                "train.num_workers=0",
                "run.pictures=0",
                "--fp32",
                *words,
            ]
            command("train", "segment", "--data_dir", root / "photos", *more, f"run.dir={run}")
            command("predict", run, root / "photos" / "images", "--out", out)
            for format in FORMATS:
                row = {"max_side": halfstep.load(run).preprocessing.max_side, "format": format}
                rows.append(row | agreement(run, root / "photos", out, format))
                print(json.dumps(rows[-1]), flush=True)
    if options.record:
        RECORD.write_text(
            json.dumps({"command": "python benchmarks/export_agreement.py --record", "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
