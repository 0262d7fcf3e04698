"""`halfstep export`: write a run's model as weights, as ONNX or as a torch.export program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfstep.cli._options import Json, OwnTask, RunFolder, create_flag_option, show_result
from halfstep.errors import WrongUse

GROUP = "Files"


def run(
    folder: RunFolder,
    format: Annotated[
        str | None,
        typer.Option(
            help="safetensors, onnx or torch_export. Default: by the suffix of --out, else safetensors. "
            "A language model: transformers, a folder."
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="best, last or checkpoint. Default: best of a finished run, else the newest checkpoint."),
    ] = None,
    ema: Annotated[
        bool | None,
        typer.Option("--ema/--no-ema", help="Averaged or trained weights. Default: averaged, if there are any."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file. Default: RUN/export.safetensors, .onnx or .pt2.", metavar="FILE")
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            help="Hugging Face's sharded layout, in files of up to this size, such as 5GB; --out is then a folder.",
            metavar="SIZE",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", "--overwrite", help="Replace an existing file.", metavar="")
    ] = False,
    merge: Annotated[bool, create_flag_option("--merge", "Merge an adapter into its base, and compare both.")] = False,
    task: OwnTask = None,
    json: Json = False,
) -> None:
    """Write a run's model to one file, verify it against the model, and print Python code that predicts with it.

    The file's metadata contains the preprocessing, the classes and the meaning of the output.
    """
    from halfstep.runs.export_run import export, export_sharded

    if max_shard_size is None:
        one = export(folder, out, format=format, weights=weights, ema=ema, overwrite=force, merge=merge, task=task)
        show_result(one, one.page(), json)
        return
    if format not in (None, "safetensors"):
        raise WrongUse(
            f"--max-shard-size with --format {format}", allowed="--format safetensors", do="leave --format out"
        )
    several = export_sharded(folder, out, max_shard_size=max_shard_size, weights=weights, ema=ema, task=task)
    show_result(several, several.page(), json)
