"""`halfstep export`: a run's weights as a plain safetensors file, by the names that timm and smp know them by."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.cli._flag import flag
from halfstep.cli._opened import OwnTask, RunFolder
from halfstep.cli._printable import printable
from halfstep.cli._storing import storing
from halfstep.errors import FolderTaken, WrongUse

if TYPE_CHECKING:
    from halfstep.tasks._exported import Exported

GROUP = "Files"
FILE = "export.safetensors"
SUFFIX = ".safetensors"
BLOCK = 2**20
"""Bytes that are hashed at a time."""
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")


def run(
    folder: RunFolder,
    weights: Annotated[
        str | None,
        typer.Option(help="best, last or checkpoint; if left out, best of a finished run, else the newest checkpoint."),
    ] = None,
    ema: Annotated[
        bool | None,
        typer.Option("--ema/--no-ema", help="Averaged weights, or those that were trained; averaged if there are any."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help=f"The file; RUN/{FILE} if left out.", metavar="FILE")] = None,
    force: Annotated[bool, flag("--force", "Replace the file where there is one.")] = False,
    task: OwnTask = None,
    json: Annotated[bool, flag("--json", "Print one JSON object.")] = False,
) -> None:
    """Write a run's weights as one safetensors file that timm and smp load."""
    file = out or folder / FILE
    _refuse(folder, file, force)
    from halfstep.tasks._exported import exported
    from halfstep.tasks._folder import task_from_file

    found = exported(folder, weights, ema, task_from_file(task)[0] if task else None)
    report = write(found, file)
    if json:
        from json import dumps

        typer.echo(dumps({"run": str(folder), **report}, indent=1))
    else:
        _print(report)


def write(found: Exported, file: Path) -> dict[str, Any]:
    """Write the file, read it back, and say what is in it."""
    from halfstep.tasks._exported import loading, remark, write_weights

    with storing(
        f"{file} cannot be written",
        allowed="a folder that this user can write to, with room for the weights",
        do="give --out FILE, in a place of your own",
    ):
        write_weights(found, file)
        sha256 = _sha256(file)
    return {
        "file": str(file),
        "source": found.source,
        "step": found.step,
        "epoch": found.epoch,
        "metric": {"name": found.task.metric, "value": found.value},
        "averaged": found.averaged,
        "model": found.name,
        "tensors": _count(file),
        "bytes": file.stat().st_size,
        "sha256": sha256,
        "python": loading(found, file),
        "remark": remark(found),
    }


def _sha256(file: Path) -> str:
    import hashlib

    digest = hashlib.sha256()
    with file.open("rb") as written:
        while block := written.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _count(file: Path) -> int:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:  # type: ignore[no-untyped-call]
        return len(opened.keys())


def _refuse(folder: Path, file: Path, force: bool) -> None:
    """Before torch is loaded, and before anything is written."""
    if file.suffix.lower() in PICKLES:
        raise WrongUse(
            f"--out {file}: files of this kind are pickles, which can run code when they are read, and we write none",
            allowed=f"a name that ends in {SUFFIX}; timm and smp load it by the line that is printed",
            do=f"--out {file.with_suffix(SUFFIX)}",
        )
    if file.suffix != SUFFIX:
        raise WrongUse(
            f"--out {file}", allowed=f"a name that ends in {SUFFIX}", do=f"--out {file.with_name(file.name + SUFFIX)}"
        )
    if _is_the_runs_own(folder, file):
        raise FolderTaken(
            f"{file} is the run's own file", allowed="a file beside it, or elsewhere", do=f"--out {folder / FILE}"
        )
    if file.parent != folder and not os.path.lexists(file.parent):
        raise FolderTaken(
            f"--out {file}: there is no folder {file.parent}",
            allowed="a file in a folder that is there",
            do=f"make the folder, or --out {folder / FILE}",
        )
    if file.exists() and (file.is_dir() or not force):
        raise FolderTaken(
            f"{file} is there already",
            allowed="a name that is free",
            do="give --out FILE, with another name" + ("" if file.is_dir() else ", or add --force to replace it"),
        )


def _is_the_runs_own(folder: Path, file: Path) -> bool:
    from halfstep.train.checkpoint.generation import CHECKPOINTS

    place, root = file.resolve(), folder.resolve()
    names = ("best", "last", "last-ema")
    return place in [root / f"{name}{SUFFIX}" for name in names] or root / CHECKPOINTS in place.parents


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    metric, value = report["metric"]["name"], report["metric"]["value"]
    moment = [f"step {report['step']:,}"] if report["step"] is not None else []
    moment += [f"epoch {report['epoch']}"] if report["epoch"] is not None else []
    moment += [f"{metric} {value:.4f}"] if value is not None else []
    when = f" ({', '.join(moment)})" if moment else ""
    average = ", averaged" if report["averaged"] else ""
    lines = [
        f"[bold]{escape(report['file'])}[/]: {report['tensors']} tensors, {report['bytes'] / 1e6:,.1f} MB",
        f"  {report['model']} from {report['source']}{average}{when}",
        f"  sha256 {report['sha256']}",
        f"\n{escape(report['python'])}",
    ]
    lines += [f"[dim]{report['remark']}[/]"] if report["remark"] else []
    for line in lines:
        console.print(printable(line), soft_wrap=True)
