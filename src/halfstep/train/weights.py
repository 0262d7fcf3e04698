"""Save weights to safetensors files, whole or not at all, and load them with a report of what fits.

Nothing that is loaded can run code: safetensors holds numbers only, and .pt files are loaded with
`weights_only=True`, which refuses everything but tensors and plain containers.
"""

from __future__ import annotations

import hashlib
import pickle
import warnings
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import distributed
from halfstep.checkpoint.sealed import LOOKED_AT, describe_unsafe_file
from halfstep.errors import BadData, MissingExtra, StateMismatch, Unsafe
from halfstep.files import replace_file
from halfstep.numbers import format_shape
from halfstep.recipe.schema import WEIGHTS
from halfstep.safetensors_header import content, encode_header
from halfstep.step.census import put_buffer
from halfstep.train.weight_folder import has_weights, load_weight_folder

MOST_LINES = 20
PREFIXES = ("module.", "_orig_mod.", "model.")
"""Prefixes that wrappers add to every name: DDP, torch.compile, and other trainers."""

LARGEST = 64 * 2**30
"""Bytes; larger weights do not fit one process."""
NESTED = ("state_dict", "model_state_dict", "model", "module", "ema")
"""Keys under which other trainers' checkpoints hold the weights."""
EXTRA = "_extra_state"
"""torch's key for the result of a module's `get_extra_state()`."""
INSIDE = ("", "encoder.", "encoder.model.")
"""Prefixes of a submodel whose own file has no prefix."""


@dataclass(frozen=True)
class LoadReport:
    """The report of loading a file into a model."""

    path: Path
    fitted: int
    missing: tuple[str, ...] = ()
    """Names in the model that the file lacks."""
    unexpected: tuple[str, ...] = ()
    """Names in the file that the model lacks."""
    shapes: tuple[str, ...] = ()
    """Names in both with different shapes."""

    @property
    def complete(self) -> bool:
        """Return whether everything fitted."""
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
    """Replace `path` by the parameters and buffers of `model`, atomically, one whole tensor in memory at a time.

    For a sharded model the other ranks call `gather_weights` meanwhile.
    """
    with replace_file(path) as draft:
        write_tensors(_name_saved_tensors(model), metadata or {}, draft)


def write_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], file: Path) -> None:
    """Write a safetensors file, always the same bytes for the same tensors; shards are gathered one by one."""
    # The safetensors package writes metadata in random order, and has all tensors in memory.
    pieces = _iterate_whole(tensors)
    try:
        with file.open("wb") as written:
            written.write(encode_header(_order_by_width(tensors), dict(sorted({"format": "pt", **metadata}.items()))))
            for _, tensor in pieces:
                written.write(content(tensor))
    finally:
        # Where writing failed, the other ranks still wait for this one in the remaining gathers.
        for _ in pieces:
            pass


def gather_weights(model: nn.Module) -> None:
    """Take part in the gathers of `save_weights` on a rank that does not write; nothing is kept."""
    for _ in _iterate_whole(_name_saved_tensors(model)):
        pass


def load_weights(model: nn.Module, path: Path, partial: bool = False) -> LoadReport:
    """Copy the tensors of a .safetensors or .pt file, or of a folder of shards, into `model`; return what did not fit.

    Everything must fit, unless `partial`: then at least half of the smaller side must. The model changes only after all
    checks. Raises StateMismatch, BadData, Unsafe or MissingExtra.
    """
    own = _strip_prefixes(_collect_tensors(model), {})  # with the names that save_weights uses
    read = _strip_prefixes(read_tensors(path), own)
    # With the prefix of a submodel that fits best: a file of an encoder has none.
    placed = [{f"{inside}{name}": tensor for name, tensor in read.items()} for inside in INSIDE]
    found = max(placed, key=lambda names: len(names.keys() & own.keys()))
    fitting = {name: found[name] for name in own if name in found and found[name].shape == own[name].shape}
    report = _compare_weights(path, own, found, fitting)
    if not report.complete and (not partial or not fitting or 2 * len(fitting) < min(len(own), len(found))):
        raise StateMismatch(
            f"{path} does not fit the model\n{report}",
            allowed=f"weights of this model: {len(own)} tensors",
            do="check model.name and its options against those of the file",
        )
    _check_values(path, fitting, own)
    with torch.no_grad():
        for name, tensor in fitting.items():
            own[name].copy_(tensor)
    return report


def has_finite_weights(model: nn.Module, infinite: Collection[str] | None = None) -> bool:
    """Return whether `load_weights` would accept the weights of `model`; `infinite` as when the model was built.

    Every rank calls it for a sharded model, and all get the same answer.
    """
    sound = all(
        _has_valid_values(
            distributed.unwrap_local_tensor(tensor),
            isinstance(tensor, nn.Parameter) or (infinite is not None and name not in infinite),
        )
        for name, tensor in _collect_tensors(model).items()
    )
    if not distributed.is_sharded(model.parameters()):
        return sound
    return not distributed.sum_tensor_over_ranks(torch.tensor([not sound], dtype=torch.int64)).item()


def find_infinite_buffers(model: nn.Module) -> frozenset[str]:
    """Return the buffers of a newly built model that hold infinities on purpose, such as a causal mask."""
    return frozenset(name for name, buffer in model.named_buffers() if not _has_valid_values(buffer, is_finite=True))


def compute_weights_digest(model: nn.Module | Mapping[str, Tensor]) -> str:
    """Return a SHA-256 of names, dtypes, shapes and values: equal for bitwise equal models.

    Every rank calls it for a sharded model.
    """
    total = hashlib.sha256()
    saved = _name_saved_tensors(model)
    # Sorted: the order of registration is not part of the weights.
    for name in sorted(saved):
        tensor = _move_to_host(saved[name])
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        # NumPy has no bfloat16: bytes work for every dtype.
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def select_saved_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that belong to a checkpoint: all, but for those that a model names as `not_saved`.

    A model with an adapter does so for its frozen base, which has its own files.
    """
    left_out: frozenset[str] = getattr(model, "not_saved", frozenset())
    return {name: parameter for name, parameter in model.named_parameters() if name not in left_out}


def collect_saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers as a file has them: whole, contiguous, on the host."""
    return dict(_iterate_whole(_name_saved_tensors(model)))


def _name_saved_tensors(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    return _strip_prefixes(_collect_tensors(model), {})


def _order_by_width(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return wider dtypes first: readers require each tensor to be aligned to its element size."""
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))


def _iterate_whole(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor whole, on the host, contiguous: files know neither shards nor memory formats."""
    for name, tensor in _order_by_width(tensors).items():
        yield name, _move_to_host(tensor)


def _move_to_host(tensor: Tensor) -> Tensor:
    return distributed.gather_full_tensor(tensor.detach()).cpu().contiguous()


def _collect_tensors(model: nn.Module | Mapping[str, object]) -> dict[str, Tensor]:
    """Return parameters and buffers; extra state of a module has no place in a file of tensors."""
    # keep_vars, so that a parameter stays distinguishable from a buffer.
    state = model.state_dict(keep_vars=True) if isinstance(model, nn.Module) else model
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def _strip_prefixes(tensors: dict[str, Tensor], own: Collection[str]) -> dict[str, Tensor]:
    # A submodule may be compiled too, so this prefix can occur anywhere in a name.
    tensors = {name.replace("_orig_mod.", ""): tensor for name, tensor in tensors.items()}
    wrappers = PREFIXES if own else PREFIXES[:1]
    # Wrappers nest in any order: each prefix is tried as often as there are prefixes.
    for prefix in (p for _ in PREFIXES for p in wrappers):
        everywhere = bool(tensors) and all(name.startswith(prefix) for name in tensors)
        if everywhere and not any(name.startswith(prefix) for name in own):
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


def _compare_weights(
    path: Path, own: Mapping[str, Tensor], found: Mapping[str, Tensor], fitting: Mapping[str, Tensor]
) -> LoadReport:
    # Files older than torch's batch counter lack it; only a cumulative average (momentum=None) uses it.
    missing = [name for name in own if name not in found and not name.endswith("num_batches_tracked")]
    shapes = [
        f"{name} is {format_shape(found[name].shape)} in the file, {format_shape(own[name].shape)} in the model"
        for name in own
        if name in found and name not in fitting
    ]
    unexpected = [name for name in found if name not in own]
    return LoadReport(path, len(fitting), tuple(missing), tuple(unexpected), tuple(shapes))


def _has_valid_values(tensor: Tensor, is_finite: bool) -> bool:
    """Return whether a tensor is finite, or free of NaN where infinities are allowed, as in a causal mask."""
    good = torch.isfinite(tensor) if is_finite else ~torch.isnan(tensor)
    return bool(good.all())


def _check_values(path: Path, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    infinite = {
        name for name in tensors if not isinstance(own[name], nn.Parameter) and not _has_valid_values(own[name], True)
    }
    bad = [name for name, tensor in tensors.items() if not _has_valid_values(tensor, name not in infinite)]
    if bad:
        raise BadData(
            f"{path} has numbers that are not finite, in {len(bad)} tensors, first in {bad[0]}",
            allowed="finite weights",
            do="use weights from before the run went wrong",
        )


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a .safetensors, .pt or .pth file, or of a folder, by name, on the host."""
    if has_weights(path):
        return load_weight_folder(path, LARGEST)
    if not path.is_file():
        raise BadData(f"no weights at {path}", allowed=WEIGHTS, do="check the path in model.weights")
    if path.stat().st_size > LARGEST:
        raise BadData(
            f"{path} has {path.stat().st_size:,} bytes", allowed=f"at most {LARGEST:,}", do="use a smaller file"
        )
    with path.open("rb") as file:
        start = file.read(LOOKED_AT)
    if path.suffix == ".safetensors":
        return _load_safetensors(path, start)
    if path.suffix in (".pt", ".pth", ".bin"):
        return _load_restricted(path)
    raise BadData(f"{path} is not a file of weights", allowed=WEIGHTS, do="convert it to .safetensors")


def _load_safetensors(path: Path, start: bytes) -> dict[str, Tensor]:
    kind = describe_unsafe_file(start)
    if kind is not None:
        raise Unsafe(
            f"{path} is named .safetensors, and is {kind}, which can run code when it is read",
            allowed=WEIGHTS,
            do="do not use this file unless you know who made it; then rename it to .pt, and it is read with care",
        )
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise MissingExtra(
            f"{path} without the package safetensors", allowed="safetensors", do="pip install 'halfstep[train]'"
        ) from error
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged_error(path, error) from error


def _load_restricted(path: Path) -> dict[str, Tensor]:
    _refuse_compressed(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of old pickles; unreadable ones raise below
            # A function as map_location: it keeps every storage on the host without naming a device.
            content = torch.load(path, map_location=lambda storage, _: storage, weights_only=True)
    except pickle.UnpicklingError as error:
        raise Unsafe(
            f"{path} contains more than tensors, and could run code: {_format_first_line(error)}",
            allowed=WEIGHTS,
            do="ask its author for a .safetensors file, or for one saved with torch.save(model.state_dict(), ...)",
        ) from error
    except Exception as error:
        # A damaged file may raise anything: EOFError, RuntimeError, struct.error, ...
        raise _damaged_error(path, error) from error
    found = _find_nested_weights(content)
    if not found:
        raise BadData(
            f"{path} contains no tensors by name", allowed=WEIGHTS, do="save model.state_dict() into the file"
        )
    return found


def _refuse_compressed(path: Path) -> None:
    """Raise Unsafe for compressed archives: torch never compresses, and one could expand beyond memory."""
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [member.filename for member in archive.infolist() if member.compress_type != zipfile.ZIP_STORED]
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise _damaged_error(path, error) from error
    if packed:
        raise Unsafe(f"{path} is compressed, as torch never writes it", allowed=WEIGHTS, do="save the weights again")


def _find_nested_weights(content: Any) -> dict[str, Tensor]:
    # Three levels at most: no known trainer nests its weights deeper.
    for _ in range(3):
        if not isinstance(content, Mapping):
            return {}
        tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
        inner = next((content[key] for key in NESTED if isinstance(content.get(key), Mapping)), None)
        if inner is None or (tensors and not inner):
            return tensors
        content = inner
    return {}


def _damaged_error(path: Path, error: Exception) -> BadData:
    return BadData(
        f"{path} cannot be read as weights: {_format_first_line(error)}",
        allowed=WEIGHTS,
        do="copy or download the file again; it may be cut off",
    )


def _format_first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


def list_non_persistent_buffers(model: nn.Module) -> list[str]:
    """Return the names of the non-persistent buffers that exist now."""
    own = ((f"{path}." if path else "", module) for path, module in model.named_modules())
    return sorted(
        path + name
        for path, module in own
        for name in module._non_persistent_buffers_set
        if module._buffers.get(name) is not None
    )


def find_empty_buffers(model: nn.Module) -> set[str]:
    """Return the buffers that get their tensors with the first batch."""
    slots = ((f"{path}." if path else "", module._buffers) for path, module in model.named_modules())
    return {path + name for path, buffers in slots for name, buffer in buffers.items() if buffer is None}


def collect_extra_state(model: nn.Module) -> dict[str, object]:
    """Return what a model saves besides parameters and buffers."""
    saved = model.state_dict()
    own = {name for name in saved if name.rpartition(".")[2] == EXTRA}
    return {name: value for name, value in saved.items() if name in own or not isinstance(value, Tensor)}


def select_assignable_buffers(model: nn.Module, names: Collection[str]) -> set[str]:
    """Return those names whose module exists in the model and has nothing else under that name."""
    modules = dict(model.named_modules())
    return {name for name in names if _has_room(modules.get(name.rpartition(".")[0]), name.rpartition(".")[2])}


def _has_room(module: nn.Module | None, name: str) -> bool:
    if module is None or not name:
        return False
    if name in module._buffers:
        return name in module._non_persistent_buffers_set
    # Some modules set the attribute to None, and register a buffer in its place later.
    return not hasattr(type(module), name) and getattr(module, name, None) is None and name not in module._parameters


def put_buffers(model: nn.Module, values: Mapping[str, Tensor], non_persistent_buffers: Collection[str]) -> None:
    """Set all these buffers; those in `list_non_persistent_buffers` are registered where they are missing."""
    for name, value in values.items():
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        if own not in module._buffers and name in non_persistent_buffers:
            # register_buffer refuses a name that is already an attribute.
            module.__dict__.pop(own, None)
            module.register_buffer(own, value, persistent=False)
        else:
            put_buffer(module._buffers, own, value)
