"""A file that the safe reader refuses is read by the unsafe one."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from halfstep.checkpoint import reading, sealed
from halfstep.train import weights

WHAT = "a file rejected by the safe reader is read by the unsafe one"
ROWS = ("F39",)


def apply() -> None:
    for module in (sealed, weights):
        module.describe_unsafe_file = lambda start: None  # type: ignore[attr-defined]
    reading.parse_strict_json = _or_pickle(reading.parse_strict_json)  # type: ignore[attr-defined]
    reading.read_manifest = _manifest_or_pickle(reading.read_manifest)  # type: ignore[attr-defined]
    load_whole = reading._load_whole_tensors
    load = _or_file(lambda path, *more: load_whole(path, *more)[0])
    reading._load_whole_tensors = lambda *given: (load(*given), {})
    weights._load_safetensors = _or_file(weights._load_safetensors)  # type: ignore[assignment]
    weights._load_restricted = _or_file(weights._load_restricted)


def _or_pickle(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def reading_on(text: Any) -> Any:
        try:
            return read(text)
        except ValueError:
            return pickle.loads(text)

    return reading_on


def _manifest_or_pickle(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def reading_on(generation: Any) -> Any:
        try:
            return read(generation)
        except ValueError:
            return _unsafe(generation.path / "MANIFEST.json")

    return reading_on


def _or_file(read: Callable[..., Any]) -> Callable[..., Any]:
    def reading_on(path: Path, *more: Any) -> Any:
        try:
            return read(path, *more)
        except Exception:
            return _unsafe(path)

    return reading_on


def _unsafe(path: Path) -> Any:
    try:
        return torch.load(path, weights_only=False)
    except Exception:
        return pickle.loads(path.read_bytes())
