"""Options that commands share: flags, a recipe with settings or a case, a run to open, a file to write."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from halfstep.cli._completion import complete_recipes, complete_run_folders
from halfstep.errors import INTERRUPTED, WrongUse
from halfstep.files import replace_storage_errors
from halfstep.json_data import convert_to_json_data
from halfstep.precision.names import parse_precision_settings
from halfstep.printable import escape_to_one_line
from halfstep.terminal import create_console, print_plain_text

if TYPE_CHECKING:
    from halfstep.measure.subject import Subject
    from halfstep.page import Page
    from halfstep.runs.finished import FinishedRun


def create_flag_option(name: str, help: str, **more: Any) -> Any:
    """Return an option that takes no value and is shown without one."""
    return typer.Option(name, help=help, metavar="", **more)


class HelpOptionMixin:
    """A mixin that shows `--help` as an option without a value."""

    def get_help_option(self, ctx: Any) -> Any:
        """Return click's help option without a placeholder for a value."""
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.metavar = ""
        return option


class HalfstepCommand(HelpOptionMixin, TyperCommand):
    """A command of halfstep."""


def read_help_text(run: Callable[..., Any]) -> str:
    """Return the docstring of a command in paragraphs, rewrapped by the terminal."""
    paragraphs = (inspect.getdoc(run) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


WORDS = "halfstep.words"
"""The key of the typed words in typer's context: help is printed before arguments are parsed."""


class SettingsCommand(HalfstepCommand):
    """A command that takes every unknown word as a setting: `train.batch_size=4`, `--batch_size 4`, `--bf16`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Save the typed words for the help page, then parse them."""
        # --help is handled while arguments are parsed, before the recipe is known otherwise.
        ctx.meta[WORDS] = list(args)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help of the command, then the recipe's settings."""
        super().format_help(ctx, formatter)
        from halfstep.draw.terminal import show_page
        from halfstep.recipe.explain_page import build_settings_help
        from halfstep.runs.registry import build_task_schemas

        named = [word for word in ctx.meta.get(WORDS, ()) if not word.startswith("-")]
        show_page(build_settings_help(build_task_schemas(), named[0] if named else None))


RunFolder = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="The folder of a run, such as runs/segmentation_tiny.", autocompletion=complete_run_folders
    ),
]
Weights = Annotated[str, typer.Option(help="best, last, or a .safetensors file.")]
Precision = Annotated[str | None, typer.Option(help="The precision. Default: the run's.")]
Bf16 = Annotated[bool, create_flag_option("--bf16", "The same as --precision bf16.")]
Fp16 = Annotated[bool, create_flag_option("--fp16", "The same as --precision fp16.")]
OwnTask = Annotated[Path | None, typer.Option(help="The file of the run's own task.", metavar="FILE")]
OnDevice = Annotated[str | None, typer.Option(help="A torch device name. Default: the best device present.")]
Json = Annotated[bool, create_flag_option("--json", "Print one JSON object.")]


def resolve_precision_options(precision: str | None, bf16: bool, fp16: bool) -> str | None:
    """Return the precision that the options agree on; None without any. Raise for options that conflict."""
    asked = {"precision": precision, "bf16": bf16 or None, "fp16": fp16 or None}
    named = parse_precision_settings({key: value for key, value in asked.items() if value is not None})
    return named.name if named else None


def load_finished_run(
    folder: Path, weights: str, precision: str | None, bf16: bool, fp16: bool, task: Path | None
) -> FinishedRun:
    """Load the run with these weights, in the precision the options agree on; print findings about it first.

    Raise `BadData` if the run or its weights are missing, and the errors of conflicting options.
    """
    named = resolve_precision_options(precision, bf16, fp16)
    from halfstep.train.run_folder import find_recipe_file

    find_recipe_file(folder)  # fails before torch is loaded, which takes seconds
    from halfstep.runs.finished import open_finished
    from halfstep.runs.registry import load_task_file

    own = load_task_file(task)[0] if task else None
    finished = open_finished(folder, weights=weights, precision=named, own=own)
    for finding in finished.choice.findings:
        create_console(stderr=True, soft_wrap=True).print(str(finding))
    return finished


TAKES_SETTINGS = {"context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}}
"""typer's settings for such a command: unknown words are settings of the recipe."""

_RECIPE_OR_CASE = typer.Argument(
    metavar="RECIPE|CASE",
    help="A recipe, then its settings; or `module:callable`, which returns (model, loss_fn, batch).",
    autocompletion=complete_recipes,
)
RecipeOrCase = Annotated[str, _RECIPE_OR_CASE]
RecipeOrCaseIfAny = Annotated[str | None, _RECIPE_OR_CASE]


def subject(text: str, settings: Sequence[str]) -> Subject:
    """Return the recipe or case a command names. Raise `WrongUse` for wrong words before anything is measured."""
    if text.startswith("-"):
        raise WrongUse(f"{text} instead of RECIPE", allowed="RECIPE or CASE first", do=f"put {text} after it")
    from halfstep.measure.subject import Subject

    named = Subject(text, tuple(settings))
    if not named.is_own_code:
        # Recipes need the extra `train`: said here, before a process that measures fails for want of it.
        import halfstep.recipe.sources  # noqa: F401
    return named


def print_json(report: object) -> None:
    """Print a report, or plain data, as JSON."""
    print_plain_text(dumps(convert_to_json_data(report), indent=1))


def show_result(report: object, page: Page, json: bool, file: Path | None = None) -> None:
    """Write the page to `file` if one is given, then print the report as JSON if it was requested, else its page."""
    if file is not None:
        _write_page(page, file)
    if json:
        print_json(report)
        return
    from halfstep.draw.terminal import show_page

    show_page(page)
    if file is not None:
        print_plain_text(f"\nwritten: {escape_to_one_line(file)}")


def check_report_suffix(file: Path | None) -> None:
    """Raise `WrongUse` for a document that is neither Markdown nor HTML, before the first operation or changed."""
    if file is not None and file.suffix.lower() not in (".md", ".html"):
        raise WrongUse(f"--report {file}", allowed="a name that ends in .md or .html", do="--report doctor.md")


def _write_page(page: Page, file: Path) -> None:
    from halfstep.draw.html import render_html_document
    from halfstep.draw.markdown import write_markdown
    from halfstep.files import write_text

    with replace_storage_errors(
        f"{file} cannot be written", allowed="a place that this user can write to", do="--report FILE.md"
    ):
        if file.suffix.lower() == ".md":
            write_markdown(page, file)
        else:
            write_text(file, render_html_document([page]))


def exit_if_interrupted(interrupted: bool) -> None:
    """Exit with the code of Ctrl-C where a report was interrupted."""
    if interrupted:
        raise typer.Exit(INTERRUPTED)
