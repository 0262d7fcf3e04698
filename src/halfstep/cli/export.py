"""`halfstep export`: write a run's model as weights, as ONNX or as a torch.export program."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.cli._options import Json, OwnTask, RunFolder, refuse_taken, show_result, storing
from halfstep.errors import FolderTaken, WrongUse, unknown_name
from halfstep.terminal import progress

if TYPE_CHECKING:
    from halfstep.runs.export import Exported
    from halfstep.runs.export_page import ExportReport

GROUP = "Files"
FILE = "export"
SUFFIXES = {"safetensors": ".safetensors", "onnx": ".onnx", "torch_export": ".pt2"}
BLOCK = 2**20
"""Bytes hashed at a time."""
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")


def run(
    folder: RunFolder,
    format: Annotated[
        str | None,
        typer.Option(help="safetensors, onnx or torch_export; if left out, as --out ends, else safetensors."),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="best, last or checkpoint; if left out, best of a finished run, else the newest checkpoint."),
    ] = None,
    ema: Annotated[
        bool | None,
        typer.Option("--ema/--no-ema", help="Averaged weights, or those that were trained; averaged if there are any."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help=f"The file; RUN/{FILE}.safetensors, .onnx or .pt2 if left out.", metavar="FILE")
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            help="Hugging Face's sharded layout, in files of up to this size, such as 5GB; --out is then a folder.",
            metavar="SIZE",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", "--overwrite", help="Replace the file where there is one.", metavar="")
    ] = False,
    task: OwnTask = None,
    json: Json = False,
) -> None:
    """Write a run's model to one file, verify it against the model, and print Python code that predicts with it.

    The file's metadata contains the preprocessing, the classes and the meaning of the output.
    """
    if max_shard_size is not None:
        _layout(folder, out or folder / FILE, max_shard_size, format, weights, ema, task, json)
        return
    kind = _format(format, out)
    file = out or folder / f"{FILE}{SUFFIXES[kind]}"
    _refuse(folder, file, kind, force)
    from halfstep.train.run_folder import recipe_in

    recipe_in(folder)  # fails before torch is loaded, which takes seconds
    from halfstep.runs.export import exported
    from halfstep.runs.registry import task_from_file

    found = exported(folder, weights, ema, task_from_file(task)[0] if task else None)
    report = write(found, folder, file, kind)
    show_result(report, report.page(), json)


def _layout(
    folder: Path,
    out: Path,
    size: str,
    format: str | None,
    weights: str | None,
    ema: bool | None,
    task: Path | None,
    json: bool,
) -> None:
    """Write the sharded layout to a new folder, and print what is in it."""
    if format not in (None, "safetensors"):
        raise WrongUse(
            f"--max-shard-size with --format {format}", allowed="--format safetensors", do="leave --format out"
        )
    # The file of an earlier export may have the name: a folder is never replaced.
    refuse_taken(out, False, do="give --out FOLDER, a new one", flag="--out")
    from halfstep.train.run_folder import recipe_in

    recipe_in(folder)
    from halfstep.runs.registry import task_from_file
    from halfstep.runs.sharded_export import bytes_in, export_layout

    most = bytes_in(size)
    with storing(
        f"{out} cannot be written",
        allowed="a folder that this user can write to, with room for the weights",
        do="give --out FOLDER, in a place of your own",
    ):
        report = export_layout(folder, out, most, weights, ema, task_from_file(task)[0] if task else None)
    show_result(report, report.page(), json)


def write(found: Exported, run: Path, file: Path, format: str) -> ExportReport:
    """Write the file, verify it against the model, and return a report."""
    from halfstep._version import __version__
    from halfstep.runs.export import write as write_checked
    from halfstep.runs.export_page import ExportedMetric, ExportReport
    from halfstep.runs.snippet import snippet

    signature = found.signature()
    python, kept = (
        snippet(found.task, found.model, signature, place, format)
        # The file's own copy has no path in it: the same weights give the same bytes wherever they are written.
        for place in (file, Path(f"{FILE}{SUFFIXES[format]}"))
    )
    notes = {**found.metadata(), "python": kept, "halfstep": __version__}
    with storing(
        f"{file} cannot be written",
        allowed="a folder that this user can write to, with room for the weights",
        do="give --out FILE, in a place of your own",
    ):
        with progress("exporting", "steps") as on_progress:
            checked = write_checked(found, file, format, notes, on_progress)
        sha256 = _sha256(file)
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


def _sha256(file: Path) -> str:
    import hashlib

    digest = hashlib.sha256()
    with file.open("rb") as written:
        while block := written.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _format(format: str | None, out: Path | None) -> str:
    """Return the format given by name, or by the suffix of the file."""
    by_suffix = next((kind for kind, suffix in SUFFIXES.items() if out is not None and out.suffix == suffix), None)
    if format is not None and format not in SUFFIXES:
        raise unknown_name("--format", format, SUFFIXES)
    return format or by_suffix or "safetensors"


def _refuse(folder: Path, file: Path, format: str, force: bool) -> None:
    """Raise `WrongUse` or `FolderTaken` for an unusable output file, before torch is loaded or anything is written."""
    _refuse_name(file, format)
    if _is_the_runs_own(folder, file):
        raise FolderTaken(
            f"{file} is the run's own file",
            allowed="a file beside it, or elsewhere",
            do=f"--out {folder / FILE}{SUFFIXES[format]}",
        )
    # A missing run folder has an error of its own, raised by `recipe_in`.
    if file.parent != folder and not os.path.lexists(file.parent):
        raise FolderTaken(
            f"--out {file}: there is no folder {file.parent}",
            allowed="a file in a folder that is there",
            do=f"make the folder, or --out {folder / FILE}{SUFFIXES[format]}",
        )
    refuse_taken(file, force, do="give --out FILE, with another name", flag="--force")


def _refuse_name(file: Path, format: str) -> None:
    suffix = SUFFIXES[format]
    if file.suffix.lower() in PICKLES:
        raise WrongUse(
            f"--out {file}: files of this kind are pickles, which can run code when they are read, and we write none",
            allowed=f"a name that ends in {' or '.join(SUFFIXES.values())}",
            do=f"--out {file.with_suffix(suffix)}",
        )
    if file.suffix != suffix:
        other = next((kind for kind, end in SUFFIXES.items() if end == file.suffix), None)
        raise WrongUse(
            f"--out {file}" + (f" with --format {format}" if other else ""),
            allowed=f"a name that ends in {suffix} for {format}",
            do=f"--format {other}" if other else f"--out {file.with_name(file.name + suffix)}",
        )


def _is_the_runs_own(folder: Path, file: Path) -> bool:
    from halfstep.checkpoint.paths import CHECKPOINTS

    # Resolved, so that a link cannot lead to the run's own weights.
    place, root = file.resolve(), folder.resolve()
    names = (f"{name}{SUFFIXES['safetensors']}" for name in ("best", "last", "last-ema"))
    return place in [root / name for name in names] or root / CHECKPOINTS in place.parents
