"""`halfstep replay`: run a failed step again here, name the origin of its non-finite values, and the fix."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.cli._completion import run_folders
from halfstep.cli._options import Json, OwnTask, end, flag, print_json
from halfstep.errors import BadData, HalfstepError, reason_in
from halfstep.json_data import json_data

if TYPE_CHECKING:
    from halfstep.checkpoint.paths import CheckpointDir
    from halfstep.runs.replay_page import FailedStepList, ReplayReport
    from halfstep.train.failed_steps.reading import Record

GROUP = "Trouble"


def run(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="A run's folder, or one failed step of it: RUN/failed_steps/step-00000123.0001.",
            autocompletion=run_folders,
        ),
    ],
    attempt: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Which failed step; the newest if left out.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="Another precision than the step's.")] = None,
    list: Annotated[bool, flag("--list", "List the failed steps that were recorded, and run nothing.")] = False,
    task: OwnTask = None,
    json: Json = False,
) -> None:
    """Run a failed step again: name the operation that produced its NaN, whether precision caused it, and the fix."""
    from halfstep.draw.terminal import show_page

    run_folder, found = _recorded(folder)
    if list or not found:
        listing = _listing(run_folder, found)
        _print_json(listing) if json else show_page(listing.page())
        return
    report = _replayed(run_folder, _chosen(run_folder, found, attempt), precision, task)
    _print_json(report) if json else show_page(report.page())
    end(report.interrupted)


def _recorded(folder: Path) -> tuple[Path, list[CheckpointDir]]:
    """Return the run's folder and its failed steps; for the folder of one failed step, only that one."""
    from halfstep.train.failed_steps.reading import recorded_at, recorded_in, refuse_earlier, refuse_elsewhere, run_of
    from halfstep.train.run_folder import recipe_in

    refuse_earlier(folder)
    # A user may point at one failed step instead of its run.
    if (only := recorded_at(folder)) is not None:
        return recipe_in(run_of(folder)).parent, [only]
    run = recipe_in(folder).parent
    try:
        refuse_elsewhere(run)
    except OSError as error:
        raise BadData(
            str(error),
            allowed="the folder that the run made",
            do="move it away: the next step that fails makes a folder",
        ) from None
    return folder, recorded_in(run)


def _chosen(run_folder: Path, found: list[CheckpointDir], attempt: int | None) -> CheckpointDir:
    if attempt is None:
        # Where none is intact, opening the newest reports what is wrong.
        records = ((place, _read(place)) for place in reversed(found))
        whole = (place for place, record in records if not isinstance(record, str) and not record.step.without)
        return next(whole, found[-1])
    for place in reversed(found):
        if place.attempt == attempt:
            return place
    raise BadData(
        f"attempt {attempt:,} of {run_folder} was not recorded",
        allowed=", ".join(str(place.attempt) for place in found),
        do=f"halfstep replay {run_folder} --attempt {found[-1].attempt}",
    )


def _replayed(run_folder: Path, place: CheckpointDir, precision: str | None, task: Path | None) -> ReplayReport:
    from halfstep.precision.names import read_precision
    from halfstep.runs.registry import task_from_file
    from halfstep.runs.replay import advice, described, open_recorded, replay
    from halfstep.runs.replay_page import ReplayReport
    from halfstep.terminal import progress
    from halfstep.train.failed_steps.reading import read

    asked = read_precision(precision).name if precision else None
    record = read(place)
    replayed = open_recorded(record, precision=asked, own=task_from_file(task)[0] if task else None)
    choice = replayed.choice
    report = ReplayReport(
        run_folder, described(record), choice.precision.name, choice.device.name, notes=tuple(replayed.notes)
    )
    try:
        with progress("replaying", "reruns") as on_progress:
            verdict = replay(replayed, report, on_progress)
        report.do, report.command = advice(verdict, replayed, run_folder, task)
    except KeyboardInterrupt:
        report.interrupted = True
    return report


def _listing(run_folder: Path, found: list[CheckpointDir]) -> FailedStepList:
    from halfstep.runs.replay import described
    from halfstep.runs.replay_page import FailedStepList, ListedStep

    rows = []
    for place in found:
        record = _read(place)
        known = (None, record) if isinstance(record, str) else (described(record), "")
        rows.append(ListedStep(place.path, place.attempt, *known))
    return FailedStepList(run_folder, _guard_of(run_folder), rows)


def _read(place: CheckpointDir) -> Record | str:
    """Return the record, or what is wrong with it as far as it shows without reading its tensors."""
    from halfstep.train.failed_steps.reading import cut_off, read

    try:
        record = read(place)
        return cut_off(record) or record
    except HalfstepError as error:
        return reason_in(error)


def _guard_of(run_folder: Path) -> str:
    """Return the guard mode of the run's recipe, from its long or short form."""
    from halfstep.recipe.sources import read_recipe
    from halfstep.train.run_folder import RECIPE

    section = read_recipe(str(run_folder / RECIPE)).raw.get("guard")
    mode = section.get("mode") if isinstance(section, dict) else section
    # YAML 1.1 reads the word off as a boolean.
    return "off" if mode in (False, "off") else str(mode or "watch")


def _print_json(report: object) -> None:
    """Print a report as JSON; non-finite numbers become words, as in the journal."""
    from halfstep.journal.jsonl import in_strict_json

    print_json(in_strict_json(json_data(report)))
