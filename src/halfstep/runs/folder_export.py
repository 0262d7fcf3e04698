"""Export a run's model as a folder in the layout of another library, verified before it has its name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from halfstep import numbers
from halfstep.draw.notebook import PageResult
from halfstep.errors import WrongUse
from halfstep.files import create_folder_atomically
from halfstep.page import Code, Items, Page, Paragraph, Span
from halfstep.printable import escape_to_one_line
from halfstep.runs.export import load_export_weights
from halfstep.train.task import MissingTaskMethod, Task


@dataclass(frozen=True)
class FolderExport(PageResult):
    """A folder that was written, where its weights come from, and how to use it."""

    run: Path
    folder: Path
    source: str
    """The weights file or the checkpoint they come from."""
    step: int | None
    epoch: int | None
    averaged: bool
    files: list[str]
    bytes: int
    lines: list[str]
    """The comparison, and other facts."""
    python: str
    """Code that loads the folder."""

    def page(self) -> Page:
        """Return the code and the facts."""
        moment = [f"step {self.step:,}"] if self.step is not None else []
        moment += [f"epoch {self.epoch}"] if self.epoch is not None else []
        origin = f"from {self.source}{', averaged' if self.averaged else ''}"
        origin += f" ({', '.join(moment)})" if moment else ""
        size = f"{len(self.files)} files, {numbers.format_bytes(self.bytes)}"
        lines = [origin, *self.lines]
        place = Paragraph((Span(escape_to_one_line(self.folder), strong=True), f": {size}"), gap=True, wrap=False)
        return Page(
            f"export of {self.run}", (Code(self.python, "python"), place, Items(tuple(map(escape_to_one_line, lines))))
        )


def export_folder(
    run: Path, place: Path, weights: str | None, ema: bool | None, own: type[Task] | None, merge: bool
) -> FolderExport:
    """Write the folder, complete or not at all. Raise `WrongUse` for a task without such a layout."""
    found = load_export_weights(run, weights, ema, own)
    try:
        with create_folder_atomically(place) as draft:
            lines = found.task.write_folder(found.model, draft, merge)
    except MissingTaskMethod:
        raise WrongUse(
            f"a folder of transformers for the task {found.task.recipe.task}",
            allowed="the task text",
            do="leave --format out",
        ) from None
    files = sorted(path.name for path in place.iterdir())
    size = sum(path.stat().st_size for path in place.iterdir())
    python = _format_loading_code(place, "adapter_config.json" in files)
    return FolderExport(run, place, found.source, found.step, found.epoch, found.averaged, files, size, lines, python)


def _format_loading_code(place: Path, adapter: bool) -> str:
    kind, package = ("AutoPeftModelForCausalLM", "peft") if adapter else ("AutoModelForCausalLM", "transformers")
    return "\n".join(
        (
            f"from {package} import {kind}",
            "from transformers import AutoTokenizer",
            "",
            f"model = {kind}.from_pretrained({str(place)!r})",
            f"tokenizer = AutoTokenizer.from_pretrained({str(place)!r})",
            'tokens = tokenizer("Once", return_tensors="pt")',
            "print(tokenizer.decode(model.generate(**tokens, max_new_tokens=40)[0]))",
        )
    )
