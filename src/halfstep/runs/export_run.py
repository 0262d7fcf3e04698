"""`halfstep.export`: write a run's model to one file; `halfstep.export_sharded`: its weights to several."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep.errors import (
    FolderTaken,
    WrongUse,
    build_unknown_name_error,
    choose_caller_wording,
    format_option,
    format_option_with_value,
)
from halfstep.files import check_file_free, replace_storage_errors
from halfstep.terminal import display_progress

if TYPE_CHECKING:
    from halfstep.runs.export import ExportedWeights
    from halfstep.runs.export_page import ExportReport
    from halfstep.runs.folder_export import FolderExport
    from halfstep.runs.sharded_export import ShardedExport
    from halfstep.train.task import Task

FILE = "export"
SUFFIXES = {"safetensors": ".safetensors", "onnx": ".onnx", "torch_export": ".pt2"}
FOLDER = "transformers"
"""The format of a folder, for tasks with models of transformers; it is their default."""
BLOCK = 2**20
"""Bytes hashed at a time."""
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")


def export(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    format: str | None = None,
    weights: str | None = None,
    ema: bool | None = None,
    overwrite: bool = False,
    merge: bool = False,
    task: type[Task] | str | os.PathLike[str] | None = None,
) -> ExportReport | FolderExport:
    """Write a run's model to one file, and verify the file against the model; a language model to a folder.

    The file's metadata contains the preprocessing, the classes and the meaning of the output.

    Args:
        run: The folder of a run.
        out: The file; `export.safetensors`, `.onnx` or `.pt2` in the run's folder by default. For a language model a
            new folder, `export` in the run's folder by default.
        format: `safetensors`, `onnx` or `torch_export`; by default as `out` ends, else `safetensors`. A language
            model: `transformers`, its default, a folder that transformers loads.
        weights: `best`, `last` or `checkpoint`; by default the best of a finished run, else the newest checkpoint.
        ema: Averaged or trained weights. Default: averaged, if there are any.
        overwrite: Replace an existing file.
        merge: Make an adapter a part of its base's weights.
        task: The class of a task of your own, or its file.

    Returns:
        The file, where its weights come from, and Python code that predicts with it.

    Raises:
        BadData: The folder holds no run, or its weights are missing or not finite.
        FolderTaken: The file exists already, or has no folder.
        StorageFailed: The file cannot be written.
        WrongUse: The name of the file does not fit its format, or the format cannot hold the model.
    """
    folder = Path(os.path.expanduser(run))
    file = None if out is None else Path(os.path.expanduser(out))
    # The format given by name, or by the suffix of the file.
    by_suffix = next((kind for kind, suffix in SUFFIXES.items() if file is not None and file.suffix == suffix), None)
    if format is not None and format not in (*SUFFIXES, FOLDER):
        raise build_unknown_name_error(choose_caller_wording("--format", "format"), format, [*SUFFIXES, FOLDER])
    if format == FOLDER or merge or (format is None and by_suffix is None and _has_layout(folder)):
        return _write_folder(folder, file or folder / FILE, weights, ema, task, merge)
    kind = format or by_suffix or "safetensors"
    file = file or folder / f"{FILE}{SUFFIXES[kind]}"
    _refuse_output_file(folder, file, kind, overwrite)
    from halfstep.train.run_folder import find_recipe_file

    find_recipe_file(folder)  # fails before torch is loaded, which takes seconds
    from halfstep.random_state import preserve_random_state
    from halfstep.runs.export import load_export_weights
    from halfstep.runs.registry import resolve_own_task

    own = None if task is None else resolve_own_task(task)
    with preserve_random_state():
        return _write_export(load_export_weights(folder, weights, ema, own), folder, file, kind)


def export_sharded(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    max_shard_size: str = "5GB",
    weights: str | None = None,
    ema: bool | None = None,
    task: type[Task] | str | os.PathLike[str] | None = None,
) -> ShardedExport:
    """Write a run's weights to a new folder in Hugging Face's sharded layout, without building the model.

    Args:
        run: The folder of a run.
        out: The folder to make; by default `export` in the run's folder.
        max_shard_size: The most bytes of a file, such as `5GB`.
        weights: As for `export`.
        ema: As for `export`.
        task: As for `export`.

    Returns:
        The files, and where their weights come from.

    Raises:
        BadData: The folder holds no run, or its weights are missing or not finite.
        FolderTaken: The folder exists already.
        StorageFailed: The folder cannot be written.
        WrongUse: The size is not one.
    """
    folder = Path(os.path.expanduser(run))
    place = folder / FILE if out is None else Path(os.path.expanduser(out))
    # The file of an earlier export may have the name: a folder is never replaced.
    check_file_free(place, False, do=f"give {format_option_with_value('out', 'FOLDER')}, a new one")
    from halfstep.train.run_folder import find_recipe_file

    find_recipe_file(folder)
    if _has_layout(folder):
        raise WrongUse(
            f"{format_option_with_value('max_shard_size', max_shard_size)} for a language model",
            allowed="a folder that transformers loads, in its own shards",
            do=f"leave {format_option_with_value('max_shard_size', max_shard_size)} out",
        )
    from halfstep.runs.registry import resolve_own_task
    from halfstep.runs.sharded_export import export_layout, parse_byte_size

    most = parse_byte_size(max_shard_size)
    with _replace_write_errors(place, "FOLDER"):
        return export_layout(folder, place, most, weights, ema, None if task is None else resolve_own_task(task))


def _has_layout(run: Path) -> bool:
    """Return whether the task of a run writes folders of another library."""
    from halfstep.recipe.sources import read_recipe
    from halfstep.runs.registry import import_task_options
    from halfstep.train.run_folder import RECIPE

    if not (run / RECIPE).is_file():  # refused later, with a reason
        return False
    options = import_task_options(str(read_recipe(str(run / RECIPE)).raw.get("task")))
    return bool(getattr(options, "WRITES_FOLDER", False))


def _write_folder(
    run: Path,
    place: Path,
    weights: str | None,
    ema: bool | None,
    task: type[Task] | str | os.PathLike[str] | None,
    merge: bool,
) -> FolderExport:
    check_file_free(place, False, do=f"give {format_option_with_value('out', 'FOLDER')}, a new one")
    from halfstep.train.run_folder import find_recipe_file

    find_recipe_file(run)
    from halfstep.random_state import preserve_random_state
    from halfstep.runs.folder_export import export_folder
    from halfstep.runs.registry import resolve_own_task

    with _replace_write_errors(place, "FOLDER"), preserve_random_state():
        return export_folder(run, place, weights, ema, None if task is None else resolve_own_task(task), merge)


def _replace_write_errors(place: Path, kind: str) -> AbstractContextManager[None]:
    return replace_storage_errors(
        f"{place} cannot be written",
        allowed="a folder that this user can write to, with room for the weights",
        do=f"give {format_option_with_value('out', kind)}, in a place of your own",
    )


def _write_export(found: ExportedWeights, run: Path, file: Path, format: str) -> ExportReport:
    """Write the file, verify it against the model, and return a report."""
    from halfstep._version import __version__
    from halfstep.runs.export import write_verified_file as write_checked
    from halfstep.runs.export_page import ExportedMetric, ExportReport
    from halfstep.runs.snippet import build_loading_code

    signature = found.signature()
    python, kept = (
        build_loading_code(found.task, found.model, signature, place, format)
        # The file's own copy has no path in it: the same weights give the same bytes wherever they are written.
        for place in (file, Path(f"{FILE}{SUFFIXES[format]}"))
    )
    notes = {**found.metadata(), "python": kept, "halfstep": __version__}
    with _replace_write_errors(file, "FILE"):
        with display_progress("exporting", "steps") as on_progress:
            checked = write_checked(found, file, format, notes, on_progress)
        sha256 = _compute_file_sha256(file)
    return ExportReport(
        run=run,
        file=file,
        format=format,
        source=found.source,
        step=found.step,
        epoch=found.epoch,
        metric=ExportedMetric(found.task.metric, found.value),
        averaged=found.averaged,
        model=found.name,
        trained_in=str(found.task.recipe.precision),
        tensors=len(found.model.state_dict()),
        bytes=file.stat().st_size,
        sha256=sha256,
        preprocessing=signature.preprocessing if signature else None,
        classes=signature.classes if signature else None,
        output=signature.meaning if signature else None,
        answer=signature.answer if signature else None,
        checked=checked,
        python=python,
    )


def _compute_file_sha256(file: Path) -> str:
    import hashlib

    digest = hashlib.sha256()
    with file.open("rb") as written:
        while block := written.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _refuse_output_file(folder: Path, file: Path, format: str, overwrite: bool) -> None:
    """Raise `WrongUse` or `FolderTaken` for an unusable output file, before torch is loaded or anything is written."""
    _refuse_name(file, format)
    if _is_own_run_file(folder, file):
        raise FolderTaken(
            f"{file} is the run's own file",
            allowed="another file, in the same folder or elsewhere",
            do=format_option_with_value("out", f"{folder / FILE}{SUFFIXES[format]}"),
        )
    # A missing run folder has a separate error, raised by `find_recipe_file`.
    if file.parent != folder and not os.path.lexists(file.parent):
        raise FolderTaken(
            f"{format_option_with_value('out', file)}: there is no folder {file.parent}",
            allowed="a file in an existing folder",
            do=f"make the folder, or {format_option_with_value('out', f'{folder / FILE}{SUFFIXES[format]}')}",
        )
    replaced = choose_caller_wording("--force", format_option("overwrite"))
    check_file_free(
        file, overwrite, do=f"give {format_option_with_value('out', 'FILE')}, with another name", flag=replaced
    )


def _refuse_name(file: Path, format: str) -> None:
    suffix = SUFFIXES[format]
    if file.suffix.lower() in PICKLES:
        raise WrongUse(
            f"{format_option_with_value('out', file)}: files of this kind are pickles, which can run code when they "
            "are read, "
            "and we write none",
            allowed=f"a name that ends in {' or '.join(SUFFIXES.values())}",
            do=format_option_with_value("out", file.with_suffix(suffix)),
        )
    if file.suffix != suffix:
        other = next((kind for kind, end in SUFFIXES.items() if end == file.suffix), None)
        raise WrongUse(
            format_option_with_value("out", file)
            + (f" with {format_option_with_value('format', format)}" if other else ""),
            allowed=f"for the format {format}, a file name that ends in {suffix}",
            do=format_option_with_value("format", other)
            if other
            else format_option_with_value("out", file.with_name(file.name + suffix)),
        )


def _is_own_run_file(folder: Path, file: Path) -> bool:
    from halfstep.checkpoint.paths import CHECKPOINTS

    # Resolved, so that a link cannot lead to the run's own weights.
    place, root = file.resolve(), folder.resolve()
    names = (f"{name}{SUFFIXES['safetensors']}" for name in ("best", "last", "last-ema"))
    return place in [root / name for name in names] or root / CHECKPOINTS in place.parents
