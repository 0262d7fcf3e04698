"""Look at checkpoints without loading them: headers and numbers of safetensors, opcodes of pickles."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from halfstep.doctor.located import LocatedFinding
from halfstep.doctor.pickled import find_tensor_format, iterate_values, read_pickle_outline
from halfstep.files import LARGEST_JSON, parse_strict_json
from halfstep.finding import Severity

PICKLED = (".pt", ".pth", ".ckpt", ".bin", ".tar")
"""The endings of files that `torch.save` writes."""
MOST_FILES = 1000
LARGEST_TENSOR = 2**22
"""Bytes of a tensor whose numbers are read: buffers are small, and weights that are not finite show in small ones."""
MOST_READ = 2**28
"""Bytes that are read from one file."""
_NARROW = {"F16": "fp16", "BF16": "bf16"}


class _FloatFormat(NamedTuple):
    """A format of numbers: its bytes, and the bits of its exponent in the two highest of them."""

    size: int
    high: int
    low: int


_FLOATS = {
    "F16": _FloatFormat(2, 0x7C, 0),
    "BF16": _FloatFormat(2, 0x7F, 0x80),
    "F32": _FloatFormat(4, 0x7F, 0x80),
    "F64": _FloatFormat(8, 0x7F, 0xF0),
}
_SCALERS = ("scaler", "grad_scaler", "loss_scaler", "amp", "native_amp_scaling_state", "MixedPrecision", "loss_scale")


class TensorEntry(NamedTuple):
    """A tensor as a safetensors header describes it."""

    dtype: str
    start: int
    size: int


def check_checkpoint(path: Path, name: str) -> list[LocatedFinding]:
    """Return the findings about a file of weights or a folder of a checkpoint, under `name`; none for other files."""
    if path.is_dir():
        return _check_folder(path, name)
    if path.suffix == ".safetensors":
        return list(_check_safetensors(path, name))
    return list(_check_pickle(path, name)) if path.suffix in PICKLED else []


def _check_folder(folder: Path, name: str) -> list[LocatedFinding]:
    """Return the findings in the files of a folder, and on missing files."""
    files = sorted(path for path in islice(folder.iterdir(), MOST_FILES) if path.is_file())
    found: list[LocatedFinding] = []
    for one in (one for path in files for one in check_checkpoint(path, f"{name}/{path.name}")):
        # Weights in thirty files are in 16 bits for one reason.
        if one.severity == "error" or one.id not in {other.id for other in found}:
            found.append(one)
    names = {path.name for path in files}
    # transformers' Trainer writes its scaler and its arguments into files of their own.
    if {"optimizer.pt", "training_args.bin"} <= names and "scaler.pt" not in names:
        asked = _find_fp16_setting(read_pickle_outline(folder / "training_args.bin"))
        if asked is not None:
            found.append(_build_scaler_finding(name, "optimizer.pt", f"training_args.bin has {asked}"))
    return found


def read_header(path: Path) -> dict[str, TensorEntry] | None:
    """Return the tensors of a safetensors file by name; None if its header is damaged or too large."""
    try:
        with open(path, "rb", opener=_open_nonblocking) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            length = int.from_bytes(file.read(8), "little")
            if length > LARGEST_JSON:
                return None
            table = parse_strict_json(file.read(length))
        return {name: _parse_tensor_entry(entry, 8 + length) for name, entry in table.items() if name != "__metadata__"}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _parse_tensor_entry(entry: Any, data: int) -> TensorEntry:
    begin, end = map(int, entry["data_offsets"])
    if not 0 <= begin <= end:
        raise ValueError
    return TensorEntry(str(entry["dtype"]), data + begin, end - begin)


def _check_safetensors(path: Path, name: str) -> Iterator[LocatedFinding]:
    tensors = read_header(path)
    if tensors is None:
        yield _build_checkpoint_finding(
            "checkpoint.unread", "note", name, "its header cannot be read", "save the file again"
        )
        return
    weights = {key: one for key, one in tensors.items() if one.dtype in _FLOATS and "optimizer" not in key}
    narrow = {key: _NARROW[one.dtype] for key, one in weights.items() if one.dtype in _NARROW}
    if narrow:
        yield _build_narrow_finding(name, narrow, len(weights), "note")
    for key in islice(_find_nonfinite(path, tensors), 1):
        yield _build_checkpoint_finding(
            "checkpoint.not_finite",
            "error",
            name,
            f"`{key}` has numbers that are not finite"
            + (": evaluation is NaN, though training looks well" if "running_" in key else ""),
            "use an earlier checkpoint; a skipped step does not undo what its forward pass wrote into buffers",
        )


def _find_nonfinite(path: Path, tensors: Mapping[str, TensorEntry]) -> Iterator[str]:
    """Yield the names of small tensors that hold an inf or a NaN, buffers of normalization first."""
    left = MOST_READ
    with open(path, "rb") as file:
        for key, one in sorted(tensors.items(), key=lambda item: ("running_" not in item[0], item[0])):
            if one.dtype not in _FLOATS or not 0 < one.size <= min(LARGEST_TENSOR, left):
                continue
            left -= one.size
            file.seek(one.start)
            content, form = file.read(one.size), _FLOATS[one.dtype]
            # A mask of 0 and -inf is meant so.
            if _has_exponent_of_inf(content, form) and not ("running_" not in key and _is_mask(content, form)):
                yield key


def _has_exponent_of_inf(content: bytes, form: _FloatFormat) -> bool:
    """Return whether a number has all bits of its exponent set, as inf and NaN have; numbers are little-endian."""
    whole = content[: len(content) // form.size * form.size]
    high = whole[form.size - 1 :: form.size].translate(_build_mask_table(form.high))
    low = whole[form.size - 2 :: form.size].translate(_build_mask_table(form.low))
    at = high.find(b"\1")
    while at >= 0:
        if low[at]:
            return True
        at = high.find(b"\1", at + 1)
    return False


@cache
def _build_mask_table(mask: int) -> bytes:
    """Return the table that maps a byte to 1 where all bits of the mask are set."""
    return bytes(int(byte & mask == mask) for byte in range(256))


def _is_mask(content: bytes, form: _FloatFormat) -> bool:
    numbers = {content[at : at + form.size] for at in range(0, len(content), form.size)}
    zeros = bytes(form.size - 2)
    return numbers <= {zeros + b"\0\0", zeros + b"\0\x80", zeros + bytes((form.low, 0x80 | form.high))}


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _check_pickle(path: Path, name: str) -> Iterator[LocatedFinding]:
    root = read_pickle_outline(path)
    if not isinstance(root, dict):
        return
    optimizers = [key for key in root if isinstance(key, str) and "optim" in key.lower()]
    weights = {
        f"{key}": format
        for key, one in iterate_values(_drop_keys(root, optimizers))
        if (format := find_tensor_format(one))
    }
    narrow = {key: format for key, format in weights.items() if format in ("fp16", "bf16")}
    if narrow:
        yield _build_narrow_finding(name, narrow, len(weights), "warning" if optimizers else "note")
    asked = _find_fp16_setting(_drop_keys(root, optimizers))
    has_scaler = any(isinstance(key, str) and (key in _SCALERS or "scaler" in key.lower()) for key in root)
    if optimizers and asked is not None and not has_scaler:
        yield _build_scaler_finding(name, optimizers[0], f"it says {asked}")


def _drop_keys(root: Mapping[Any, Any], keys: list[str]) -> dict[Any, Any]:
    return {key: value for key, value in root.items() if key not in keys}


def _find_fp16_setting(root: Any) -> str | None:
    """Return the setting by which a run was certainly in fp16, such as `fp16=True`; None if that is not known."""
    for key, value in iterate_values(root):
        if key == "fp16" and value is True:
            return "fp16=True"
        is_plain = isinstance(value, (str, int)) and key in ("precision", "mixed_precision", "amp_dtype")
        if is_plain and str(value) in ("16-mixed", "16", "fp16", "float16"):
            return f"{key}={value}"
    return None


def _build_narrow_finding(name: str, narrow: Mapping[str, str], total: int, severity: Severity) -> LocatedFinding:
    key, format = next(iter(narrow.items()))
    trained = "; an optimizer state is saved with them, so they are trained in 16 bits" if severity == "warning" else ""
    evidence = f"{len(narrow)} of {total} tensors are in 16 bits, such as `{key}` in {format}{trained}"
    fix = "load them into a model in fp32 before training, and let autocast compute in 16 bits"
    return _build_checkpoint_finding("checkpoint.weights_in_16_bits", severity, name, evidence, fix)


def _build_scaler_finding(name: str, optimizer: str, asked: str) -> LocatedFinding:
    evidence = f"`{optimizer}` is saved, but no scaler, for a run in fp16 ({asked}): a resumed run starts with a loss "
    evidence += "scale of 65536 again, and skips steps until the scale fits"
    return _build_checkpoint_finding(
        "checkpoint.no_scaler", "warning", name, evidence, 'save "scaler": scaler.state_dict() as well'
    )


def _build_checkpoint_finding(id: str, severity: Severity, name: str, evidence: str, fix: str) -> LocatedFinding:
    shown = evidence if evidence.isprintable() else repr(evidence)
    return LocatedFinding(id, severity, shown[:400], fix, name)
