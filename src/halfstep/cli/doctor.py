"""`halfstep doctor`: report on this device, or check the settings of a recipe or of a whole project."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.cli._options import HalfstepCommand, Json, OnDevice, check_report_suffix, create_flag_option, show_result
from halfstep.doctor.device_report import examine_device
from halfstep.errors import CONFIGURATION, STORAGE, FolderTaken, WrongUse
from halfstep.files import replace_storage_errors
from halfstep.json_data import convert_to_json_data
from halfstep.store.address import has_scheme, parse_address

if TYPE_CHECKING:
    from halfstep.doctor.linking import ProjectRun
    from halfstep.doctor.located import LocatedFinding
    from halfstep.doctor.project import Project
    from halfstep.doctor.project_page import ProjectStatus

GROUP = "Trouble"
SHOWN = "patch"
"""The value of --fix where no name follows it: what would be changed is shown."""


class _OptionalFixCommand(HalfstepCommand):
    """A command whose `--fix` may stand without a name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the value that an option of typer must have."""
        words = []
        for index, word in enumerate(args):
            alone = word == "--fix" and (index + 1 == len(args) or args[index + 1].startswith("-"))
            words += [word, SHOWN] if alone else [word]
        return super().parse_args(ctx, words)


COMMAND = {"cls": _OptionalFixCommand}


def run(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE|FOLDER|ADDRESS",
            help="A recipe, any project's YAML, or a project's folder: check settings, not the device. Or s3://...",
        ),
    ] = None,
    accelerate: Annotated[str | None, typer.Option(help="accelerate's default_config.yaml, to compare with.")] = None,
    deepspeed: Annotated[str | None, typer.Option(help="DeepSpeed's JSON configuration, to compare with.")] = None,
    device: OnDevice = None,
    precision: Annotated[str, typer.Option(help="The requested precision, in any spelling.")] = "auto",
    strict: Annotated[
        bool, create_flag_option("--strict", "As train.strict=true: this precision, or an error.")
    ] = False,
    fresh: Annotated[bool, create_flag_option("--fresh", "Measure again instead of reading the cache.")] = False,
    formats: Annotated[
        bool, create_flag_option("--formats", "Instead: range and digits of fp32, bf16, fp16 and fp8, and their uses.")
    ] = False,
    gpus: Annotated[
        bool, create_flag_option("--gpus", "Instead: the known GPUs, and the precision that suits each.")
    ] = False,
    known_bad: Annotated[
        bool, create_flag_option("--known-bad", "Instead: known defects of the installed libraries.")
    ] = False,
    fix: Annotated[
        str | None,
        typer.Option(
            help="Change all settings to this precision, and write the files; without NAME: show a folder's patch.",
            metavar="[NAME]",
        ),
    ] = None,
    yes: Annotated[bool, create_flag_option("--yes", "With --fix and no NAME: apply the patch.")] = False,
    sarif: Annotated[
        Path | None, typer.Option(help="A folder: write the findings as SARIF, for CI.", metavar="FILE")
    ] = None,
    write: Annotated[
        Path | None, typer.Option(help="A folder: write its settings as a recipe.", metavar="RECIPE")
    ] = None,
    settings: Annotated[
        bool, create_flag_option("--settings", "A folder: list every setting that was read, too.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(help="Also write the page to this file.", metavar="FILE.md|FILE.html")
    ] = None,
    json: Json = False,
) -> None:
    """Show which formats this device supports and which one to use; check a RECIPE, or the code in a FOLDER.

    With an ADDRESS such as s3://BUCKET/PREFIX, check that object store: it writes 2 MB there and removes them.

    A folder is read file by file: configurations, launch lines, scripts and notebooks. Nothing in it is imported or
    run. The verdict comes first; the exit code is 78 where there is an error outside of tests.
    """
    check_report_suffix(report)
    if recipe is not None and has_scheme(recipe):
        _refuse_store_options(
            **{"--accelerate": accelerate, "--deepspeed": deepspeed, "--device": device, "--strict": strict},
            **{"--fresh": fresh, "--formats": formats, "--gpus": gpus, "--known-bad": known_bad, "--fix": fix},
            **{"--yes": yes, "--sarif": sarif, "--write": write, "--settings": settings},
        )
        _report_object_store(recipe, report, json)
        return
    folder = recipe is not None and Path(recipe).is_dir()
    _refuse_script(recipe)
    if not folder:
        _refuse_folder_options(
            **{"--sarif": sarif, "--write": write, "--yes": yes, "--fix": fix == SHOWN, "--settings": settings}
        )
    if recipe or accelerate or deepspeed:
        tables = {"--formats": formats, "--gpus": gpus, "--known-bad": known_bad}
        _refuse_device_options(device, precision, strict, **{"--fresh": fresh, **tables})
    if recipe is not None and folder:
        _refuse_config_files(accelerate, deepspeed)
        _report_project(recipe, fix, yes, sarif, write, settings, report, json)
    elif recipe or accelerate or deepspeed:
        _report_settings(recipe, accelerate, deepspeed, fix, report, json)
    elif fix:
        raise WrongUse("--fix without settings", allowed="--fix NAME after a RECIPE", do="name the file to fix")
    elif formats or gpus or known_bad:
        _report_tables(formats, gpus, known_bad, report, json)
    else:
        found = examine_device(device, precision, strict=strict, fresh=fresh)
        show_result(found, found.page(), json, report)
        # Scripts can check the exit code before they start a run.
        if any(finding.severity == "error" for finding in found.findings):
            raise typer.Exit(CONFIGURATION)


def _report_object_store(address: str, report: Path | None, json: bool) -> None:
    from halfstep.doctor.store_check import check_store

    found = check_store(parse_address(address, "ADDRESS"))
    show_result(found, found.page(), json, report)
    if found.problem is not None:
        raise typer.Exit(STORAGE)


def _refuse_store_options(**given: Any) -> None:
    wrong = [name for name, value in given.items() if value]
    if wrong:
        raise WrongUse(
            f"{', '.join(wrong)} cannot be combined with the address of a store",
            allowed="halfstep doctor ADDRESS, also with --json or --report",
            do=f"leave out {', '.join(wrong)}",
        )


def _report_tables(formats: bool, gpus: bool, known_bad: bool, report: Path | None, json: bool) -> None:
    from halfstep.cli import _known as known
    from halfstep.doctor.machine import check_machine, read_machine

    found = (
        known.build_format_rows() if formats else None,
        known.build_gpu_rows() if gpus else None,
        check_machine(read_machine()) if known_bad else None,
    )
    names = ("formats", "gpus", "known_bad")
    data = {name: rows for name, rows in zip(names, found, strict=True) if rows is not None}
    show_result(data, known.build_known_page(*found), json, report)


def _report_settings(
    recipe: str | None, accelerate: str | None, deepspeed: str | None, fix: str | None, report: Path | None, json: bool
) -> None:
    from halfstep.doctor.checkup import check_settings
    from halfstep.doctor.fixing import make_settings_agree
    from halfstep.doctor.settings_page import build_settings_page

    # Changed first, so that the report shows the settings as they are now.
    changed = make_settings_agree(fix, recipe, accelerate=accelerate, deepspeed=deepspeed) if fix else None
    found = check_settings(recipe, accelerate=accelerate, deepspeed=deepspeed)
    data = {**convert_to_json_data(found), **({} if changed is None else {"changed": changed})}
    show_result(data, build_settings_page(found, changed), json, report)
    if not found.status.aligned:
        raise typer.Exit(CONFIGURATION)


def _report_project(
    folder: str,
    fix: str | None,
    yes: bool,
    sarif: Path | None,
    write: Path | None,
    settings: bool,
    report: Path | None,
    json: bool,
) -> None:
    """Check a folder; make the requested changes first, so that the report shows the current state."""
    from halfstep.doctor.fixing import parse_fix_precision, plan_fixes
    from halfstep.doctor.patch import ProjectPatch, format_unified_diff, write_texts
    from halfstep.doctor.project_check import build_project_report, examine_project
    from halfstep.doctor.project_page import build_project_page

    patch = None
    if fix:
        plan = plan_fixes(folder, None if fix == SHOWN else parse_fix_precision(fix))
        before = plan.project.texts
        modified = write_texts(plan.project.root, before, plan.texts) if yes or fix != SHOWN else None
        patch = ProjectPatch(format_unified_diff(before, plan.texts), plan.refused, modified)
    project, runs, findings = examine_project(folder)
    if sarif:
        _write_sarif(sarif, project.root, findings, runs)
    found = build_project_report(project, runs, findings)
    if write:
        _write_recipe(write, project, runs, found.status)
    data = {**convert_to_json_data(found), **convert_to_json_data(patch or {}), **({"written": write} if write else {})}
    show_result(data, build_project_page(found, patch, write, settings), json, report)
    if not found.status.aligned:
        raise typer.Exit(CONFIGURATION)


def _write_sarif(file: Path, folder: Path, findings: list[LocatedFinding], runs: list[ProjectRun]) -> None:
    from halfstep.doctor.sarif import convert_to_sarif
    from halfstep.files import write_json

    otherwise = runs[0].name.partition(":")[0] if runs else "."
    # Code scanning takes paths from the root of the repository, which is where CI runs.
    here = Path.cwd()
    below = folder.resolve().relative_to(here).as_posix() if folder.resolve().is_relative_to(here) else ""
    with replace_storage_errors(
        f"{file} cannot be written", allowed="a file in a folder that can be written", do="give another FILE"
    ):
        write_json(file, convert_to_sarif(findings, otherwise, below))


def _write_recipe(file: Path, project: Project, runs: list[ProjectRun], status: ProjectStatus) -> None:
    from halfstep.doctor.conversion import convert_to_recipe
    from halfstep.doctor.project_page import SEVERAL
    from halfstep.files import write_text
    from halfstep.recipe.resolve import explain_value_refusal

    if file.exists():
        raise FolderTaken(f"{file} already exists", allowed="a name that is free", do="give --write another name")
    if not status.aligned or status.precision == SEVERAL:
        raise WrongUse(
            f"--write {file}: the project requests more than one precision",
            allowed="a project whose settings agree",
            do="settle them first: halfstep doctor shows them, --fix NAME settles them",
        )
    if not status.decided:
        raise WrongUse(
            f"--write {file}: {status.final}",
            allowed="a project whose precision is known before the run",
            do="write the precision where the run decides it: halfstep doctor shows the line",
        )
    text = convert_to_recipe(project, runs, status.precision, explain_value_refusal)
    with replace_storage_errors(
        f"{file} cannot be written", allowed="a file in a folder that can be written", do="give another name"
    ):
        write_text(file, text)


def _refuse_folder_options(**given: Any) -> None:
    wrong = [name for name, value in given.items() if value]
    if wrong:
        raise WrongUse(
            f"{', '.join(wrong)} without a folder",
            allowed="halfstep doctor FOLDER with --sarif FILE, --write RECIPE, --fix and --yes; or --fix NAME",
            do="name the project's folder: halfstep doctor .",
        )


def _refuse_script(recipe: str | None) -> None:
    if recipe is not None and Path(recipe).suffix in (".py", ".sh", ".slurm", ".sbatch"):
        raise WrongUse(
            f"{recipe} is a script",
            allowed="a recipe, a YAML file, or the folder of a project",
            do=f"halfstep doctor {Path(recipe).parent}",
        )


def _refuse_config_files(accelerate: str | None, deepspeed: str | None) -> None:
    given = [name for name, value in {"--accelerate": accelerate, "--deepspeed": deepspeed}.items() if value]
    if given:
        raise WrongUse(
            f"{', '.join(given)} together with a folder",
            allowed="a folder, whose files are found automatically; or a RECIPE with the files to compare",
            do="leave it out, or name the configuration instead of its folder",
        )


def _refuse_device_options(device: str | None, precision: str, strict: bool, **others: bool) -> None:
    given = {"--device": device, "--precision": precision != "auto", "--strict": strict, **others}
    wrong = [name for name, value in given.items() if value]
    if wrong:
        raise WrongUse(
            f"{', '.join(wrong)} together with settings to check",
            allowed="a RECIPE with --accelerate, --deepspeed, --fix and --json; or a device report without them",
            do=f"leave out {', '.join(wrong)}, or request the device report by itself",
        )
