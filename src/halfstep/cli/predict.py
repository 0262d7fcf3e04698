"""`halfstep predict`: predict images or continue texts with a run's model, or draw samples from it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfstep.cli._options import (
    Bf16,
    Fp16,
    Json,
    OwnTask,
    Precision,
    RunFolder,
    Weights,
    create_flag_option,
    load_finished_run,
    show_result,
)
from halfstep.errors import WrongUse

GROUP = "Run"
SAMPLES_DRAWN = 40
COMMAND = {"context_settings": {"ignore_unknown_options": True}}


def run(
    folder: RunFolder,
    rest: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FOLDER] [KEY=VALUE]...",
            help="Images, clips or prompts, in any folders below FOLDER, or one file; then settings of the prediction.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The output folder. Default: RUN/predictions.")] = None,
    overwrite: Annotated[bool, create_flag_option("--overwrite", "Replace existing predictions.")] = False,
    samples: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="Without FOLDER: how many to generate. Default: 40 pictures, or 4 texts."),
    ] = None,
    columns: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Without FOLDER: pictures in a row. Default: 10, if they fit.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="The seed of samples and of written text.")] = 0,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to continue, by a language model; may be repeated.", metavar="TEXT")
    ] = None,
    weights: Weights = "best",
    precision: Precision = None,
    bf16: Bf16 = False,
    fp16: Fp16 = False,
    task: OwnTask = None,
    json: Json = False,
) -> None:
    """Predict masks or classes for images, or objects in video clips; a diffusion model generates samples.

    Writes pictures if the task draws them, and a table of values; or one picture of all samples. Settings after FOLDER
    change inference only, not the trained weights: model.guidance=4, or --sample_steps 100. A language model continues
    --prompt TEXT or the text files of FOLDER: --temperature 0 takes the most likely tokens.
    """
    from halfstep.cli._predict_outputs import (
        DrawnSamples,
        Predictions,
        change_inference_settings,
        check_output_folder,
        draw_samples,
        predict_inputs,
        split_folder_and_settings,
    )  # fmt: skip
    from halfstep.train.run_folder import find_recipe_file

    find_recipe_file(folder)  # first: a file in the place of RUN is no folder for predictions
    images, settings = split_folder_and_settings(rest or [])
    place = out or folder / "predictions"
    check_output_folder(place, overwrite)
    finished = change_inference_settings(load_finished_run(folder, weights, precision, bf16, fp16, task), settings)
    if finished.task.reads == "text":
        from halfstep.cli._predict_text import SAMPLES, generate_texts

        texts = generate_texts(finished, images, prompt or (), place, samples=samples or SAMPLES, seed=seed)
        show_result(texts, texts.page(), json)
        return
    if prompt:
        raise WrongUse(
            f"--prompt for {folder}, whose task {finished.recipe.task} reads no text",
            allowed="runs of the task text",
            do="leave --prompt out",
        )
    if images is None:
        count = samples or SAMPLES_DRAWN
        report: DrawnSamples | Predictions = draw_samples(finished, place, samples=count, columns=columns, seed=seed)
    else:
        report = predict_inputs(finished, images, place)
    show_result(report, report.page(), json)
