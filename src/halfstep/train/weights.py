"""Weights in files: safetensors written whole or not at all, and read with a report of what fits.

Nothing that is read can run code: safetensors holds numbers only, and others' .pt files are read by torch's restricted
reader, which refuses everything but tensors and plain containers.
"""

from __future__ import annotations

import hashlib
import pickle
import warnings
import zipfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import BadData, MissingExtra, StateMismatch, Unsafe
from halfstep.files import replacing
from halfstep.train.foreign import LOOKED_AT, runs_code

MOST_LINES = 20
PREFIXES = ("module.", "_orig_mod.", "model.")
"""What wrappers put before every name: data parallelism, compilation, and other people's trainers."""

LARGEST = 64 * 2**30
"""Bytes; larger weights are not for one process."""
NESTED = ("state_dict", "model_state_dict", "model", "module", "ema")
"""Where others' checkpoints keep the weights among other things."""
ALLOWED = ".safetensors, or .pt and .pth with tensors alone"
INSIDE = ("", "encoder.", "encoder.model.")
"""Where a model of several parts keeps the part that a file was made for."""


@dataclass(frozen=True)
class Loaded:
    """What a file gave to a model."""

    path: Path
    fitted: int
    missing: tuple[str, ...] = ()
    """In the model, not in the file."""
    unexpected: tuple[str, ...] = ()
    """In the file, not in the model."""
    shapes: tuple[str, ...] = ()
    """In both, in different shapes."""

    @property
    def complete(self) -> bool:
        return not (self.missing or self.unexpected or self.shapes)

    def __str__(self) -> str:
        lines = [f"weights: {self.fitted} tensors from {self.path}", *self._differences()]
        if len(lines) > MOST_LINES:
            lines = [*lines[: MOST_LINES - 1], f"  ... and {len(lines) - MOST_LINES + 1} more"]
        return "\n".join(lines)

    def _differences(self) -> Iterable[str]:
        yield from (f"  other shape: {text}" for text in self.shapes)
        yield from (f"  not in the file: {name}" for name in self.missing)
        yield from (f"  not in the model: {name}" for name in self.unexpected)


def save_weights(
    model: nn.Module | Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Replace `path` by the parameters and buffers of `model`; a reader sees the old file or the new one."""
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise MissingExtra(
            "saving weights without the package safetensors", allowed="safetensors", do="pip install halfstep[train]"
        ) from error
    with replacing(path) as draft:
        draft.touch()
        readers = draft.stat().st_mode
        save_file(as_saved(model), draft, metadata={"format": "pt", **(metadata or {})})
        draft.chmod(readers)  # safetensors lets nobody but the owner read what it writes


def load_weights(model: nn.Module, path: Path, partial: bool = False) -> Loaded:
    """Copy what a .safetensors or .pt file holds into `model`, and say what did not fit.

    All of it must fit, unless `partial`: then what fits is taken, as long as it is half of the smaller side. The model
    is changed only when everything that goes into it was found good.
    """
    own = _without_prefixes(_tensors(model), {})  # named as save_weights would name them
    found = _named_alike(_without_prefixes(_read(path), own), own)
    fitting = {name: found[name] for name in own if name in found and found[name].shape == own[name].shape}
    report = _compared(path, own, found, fitting)
    if not report.complete and (not partial or 2 * len(fitting) < min(len(own), len(found))):
        raise StateMismatch(
            f"{path} does not fit the model\n{report}",
            allowed=f"weights of this model: {len(own)} tensors",
            do="check model.name and its options against those that the file was made with",
        )
    _all_sound(path, fitting, own)
    with torch.no_grad():
        for name, tensor in fitting.items():
            own[name].copy_(tensor)
    return report


def finite(model: nn.Module, infinite: Collection[str] | None = None) -> bool:
    """Whether `load_weights` would take back what `model` holds now; `infinite` as when the model was built."""
    return all(
        _sound(tensor, isinstance(tensor, nn.Parameter) or (infinite is not None and name not in infinite))
        for name, tensor in _tensors(model).items()
    )


def infinite_buffers(model: nn.Module) -> frozenset[str]:
    """Those that hold infinities on purpose, as a causal mask does: asked of a model that was just built."""
    return frozenset(name for name, buffer in model.named_buffers() if not _sound(buffer, is_finite=True))


def digest(model: nn.Module) -> str:
    """A SHA-256 of names, types, shapes and numbers: equal for models that are equal to the bit."""
    total = hashlib.sha256()
    for name, tensor in sorted(as_saved(model).items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def as_saved(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in plain order of memory, one for each name: files know neither sharing nor layouts."""
    copies = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in _tensors(model).items()
    }
    return _without_prefixes(copies, {})


def _tensors(model: nn.Module | Mapping[str, Any]) -> dict[str, Tensor]:
    """Parameters as such and buffers; what a module keeps beside them in its state has no place in a file."""
    state = model.state_dict(keep_vars=True) if isinstance(model, nn.Module) else model
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def _without_prefixes(tensors: dict[str, Tensor], own: Mapping[str, Any]) -> dict[str, Tensor]:
    # A part of a model may be compiled too, so this one can stand anywhere in a name.
    tensors = {name.replace("_orig_mod.", ""): tensor for name, tensor in tensors.items()}
    wrappers = PREFIXES if own else PREFIXES[:1]
    for prefix in (p for _ in PREFIXES for p in wrappers):
        everywhere = bool(tensors) and all(name.startswith(prefix) for name in tensors)
        if everywhere and not any(name.startswith(prefix) for name in own):
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


def _named_alike(found: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An encoder's own file names its tensors as if there were nothing around it."""
    placed = [{f"{inside}{name}": tensor for name, tensor in found.items()} for inside in INSIDE]
    return max(placed, key=lambda names: len(names.keys() & own.keys()))


def _compared(
    path: Path, own: Mapping[str, Tensor], found: Mapping[str, Tensor], fitting: Mapping[str, Tensor]
) -> Loaded:
    # Files from before torch counted batches lack the count, which nothing but a moving average without momentum uses.
    missing = [name for name in own if name not in found and not name.endswith("num_batches_tracked")]
    shapes = [
        f"{name} is {_size(found[name])} in the file, {_size(own[name])} in the model"
        for name in own
        if name in found and name not in fitting
    ]
    unexpected = [name for name in found if name not in own]
    return Loaded(path, len(fitting), tuple(missing), tuple(unexpected), tuple(shapes))


def _size(tensor: Tensor) -> str:
    return "×".join(str(side) for side in tensor.shape) or "one number"


def _sound(tensor: Tensor, is_finite: bool) -> bool:
    """Parameters are finite; buffers may hold infinities where they always did, as a causal mask does, and no NaN."""
    good = torch.isfinite(tensor) if is_finite else ~torch.isnan(tensor)
    return bool(good.all())


def _all_sound(path: Path, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    infinite = {name for name in tensors if not isinstance(own[name], nn.Parameter) and not _sound(own[name], True)}
    bad = [name for name, tensor in tensors.items() if not _sound(tensor, name not in infinite)]
    if bad:
        raise BadData(
            f"{path} has numbers that are not finite, in {len(bad)} tensors, first in {bad[0]}",
            allowed="finite weights",
            do="use weights from before the run went wrong",
        )


def _read(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors, .pt or .pth file by name, in main memory."""
    if not path.is_file():
        raise BadData(f"no weights at {path}", allowed=ALLOWED, do="check the path in model.weights")
    if path.stat().st_size > LARGEST:
        raise BadData(
            f"{path} has {path.stat().st_size:,} bytes", allowed=f"at most {LARGEST:,}", do="use a smaller file"
        )
    with path.open("rb") as file:
        start = file.read(LOOKED_AT)
    if path.suffix == ".safetensors":
        return _numbers_only(path, start)
    if path.suffix in (".pt", ".pth", ".bin"):
        return _restricted(path)
    raise BadData(f"{path} is not a file of weights", allowed=ALLOWED, do="convert it to .safetensors")


def _numbers_only(path: Path, start: bytes) -> dict[str, Tensor]:
    kind = runs_code(start)
    if kind is not None:
        raise Unsafe(
            f"{path} is named .safetensors, and is {kind}, which can run code when it is read",
            allowed=ALLOWED,
            do="do not use this file unless you know who made it; then rename it to .pt, and it is read with care",
        )
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise MissingExtra(
            f"{path} without the package safetensors", allowed="safetensors", do="pip install halfstep[train]"
        ) from error
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, error) from error


def _restricted(path: Path) -> dict[str, Tensor]:
    _not_packed(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch doubts old pickles; what it cannot read is refused below
            content = torch.load(path, map_location=lambda storage, _: storage, weights_only=True)
    except pickle.UnpicklingError as error:
        raise Unsafe(
            f"{path} holds more than tensors, and could run code: {_first_line(error)}",
            allowed=ALLOWED,
            do="ask its author for a .safetensors file, or for one saved with torch.save(model.state_dict(), ...)",
        ) from error
    except Exception as error:
        # A damaged file ends in whatever the reader stumbled over: EOFError, RuntimeError, struct.error, ...
        raise _damaged(path, error) from error
    found = _innermost(content)
    if not found:
        raise BadData(f"{path} holds no tensors by name", allowed=ALLOWED, do="save model.state_dict() into the file")
    return found


def _not_packed(path: Path) -> None:
    """torch never compresses; a file that does could unfold into more than the memory."""
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [member.filename for member in archive.infolist() if member.compress_type != zipfile.ZIP_STORED]
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise _damaged(path, error) from error
    if packed:
        raise Unsafe(f"{path} is compressed, as torch never writes it", allowed=ALLOWED, do="save the weights again")


def _innermost(content: Any) -> dict[str, Tensor]:
    for _ in range(3):
        if not isinstance(content, Mapping):
            return {}
        tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
        inner = next((content[key] for key in NESTED if isinstance(content.get(key), Mapping)), None)
        if inner is None or (tensors and not inner):
            return tensors
        content = inner
    return {}


def _damaged(path: Path, error: Exception) -> BadData:
    return BadData(
        f"{path} cannot be read as weights: {_first_line(error)}",
        allowed=ALLOWED,
        do="copy or download the file again; it may be cut off",
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
