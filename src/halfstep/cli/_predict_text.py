"""Continue prompts with a run's language model, or write texts from nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from halfstep.cli._predict_outputs import TABLE, replace_write_errors
from halfstep.draw.notebook import PageResult
from halfstep.errors import BadData
from halfstep.files import write_csv, write_text
from halfstep.json_data import JsonResult
from halfstep.page import Block, Page, Paragraph, Span
from halfstep.printable import escape_to_one_line, escape_unprintable
from halfstep.runs.left_out import LeftOutFile, build_left_out_line
from halfstep.terminal import display_progress

if TYPE_CHECKING:
    from halfstep.runs.finished import FinishedRun

TEXTS = "texts"
SAMPLES = 4
SHOWN = 8
"""Texts that are printed; the files have them all."""


class WrittenText(NamedTuple):
    """A prompt, and what the model wrote after it."""

    name: str
    prompt: str
    text: str
    ended: bool
    """Whether the model ended the document by itself."""
    left_out: int
    """New tokens without a place in the model's context."""


@dataclass(frozen=True)
class WrittenTexts(PageResult, JsonResult):
    """The texts that a model wrote."""

    out: Path
    seed: int
    temperature: float
    precision: str
    device: str
    texts: list[WrittenText]
    unreadable: list[LeftOutFile]

    def page(self) -> Page:
        """Return the texts, and where they are."""
        blocks: list[Block] = [build_left_out_line(one) for one in self.unreadable]
        for one in self.texts[:SHOWN]:
            # The end of a long prompt is what the text follows.
            before = Span(escape_unprintable(one.prompt[-200:]), "dim")
            blocks += [Paragraph(Span(escape_to_one_line(one.name), strong=True), gap=True)]
            blocks += [Paragraph((before, escape_unprintable(one.text)), indent=True)]
        how = f"sampled at temperature {self.temperature:g}, seed {self.seed}" if self.temperature else "greedy"
        many = f"{len(self.texts)} text{'s' * (len(self.texts) != 1)}"
        cut = [one for one in self.texts if one.left_out]
        if cut:
            places = f"{cut[0].name}: {cut[0].left_out:,} new tokens left out, because the model's context is full"
            more = f"; {len(cut) - 1:,} more such texts" if len(cut) > 1 else ""
            blocks += [Paragraph(escape_to_one_line(places + more), gap=True)]
        line = (Span(many, strong=True), f" in {self.precision} on {escape_to_one_line(self.device)}, {how}: ")
        return Page(
            "texts",
            (*blocks, Paragraph((*line, Span(escape_to_one_line(self.out), strong=True)), gap=True, wrap=False)),
        )


def generate_texts(
    finished: FinishedRun, where: Path | None, prompts: Sequence[str], out: Path, *, samples: int, seed: int
) -> WrittenTexts:
    """Continue the prompts, the text files of a folder, or nothing at all, and write the texts to `out`."""
    from halfstep.train.environment import seed_all
    from halfstep.train.process_group import preserve_rng

    given, unreadable = _read_prompts(where, prompts, samples)
    texts: list[WrittenText] = []
    with display_progress("writing", "texts") as on_progress, preserve_rng():
        # Once for all: texts without a prompt differ from each other.
        seed_all(seed)
        for number, (name, prompt) in enumerate(given, 1):
            tokens = finished.task.prompt(prompt)
            try:
                found = finished.predict_tensor(tokens, allowed="no prompt", do="leave it out").values
            except BadData as error:  # longer than the model's context
                if len(given) == 1:
                    raise
                unreadable.append(LeftOutFile(name, error.given))
            else:
                left_out = int(str(found.get("left_out", 0)))
                texts.append(WrittenText(name, prompt, str(found["text"]), bool(found["ended"]), left_out))
            on_progress(number, len(given))
    if not texts:
        first = unreadable[-1]
        raise BadData(
            f"no prompt fits into the model's context: {first.file}: {first.reason}",
            allowed="prompts that leave room for one token",
            do="shorten the prompts",
        )
    with replace_write_errors(out):
        for one in texts:
            write_text(out / TEXTS / f"{one.name}.txt", one.prompt + one.text)
        write_csv(out / TABLE, [one._asdict() for one in texts])
    choice, temperature = finished.choice, finished.recipe.model.temperature
    return WrittenTexts(out, seed, temperature, choice.precision.name, choice.device.name, texts, unreadable)


def _read_prompts(
    where: Path | None, prompts: Sequence[str], samples: int
) -> tuple[list[tuple[str, str]], list[LeftOutFile]]:
    from halfstep.data.image_files import find_files
    from halfstep.data.tokenizing import SUFFIXES

    found = [(f"prompt-{number}", prompt) for number, prompt in enumerate(prompts, 1)]
    bad: list[LeftOutFile] = []
    if where is None:
        return found or [(f"sample-{number}", "") for number in range(1, samples + 1)], bad
    if not where.exists():
        raise BadData(f"{where} does not exist", allowed="a text file, or a folder of them", do="check the path")
    root, names = (where.parent, [where.name]) if where.is_file() else (where, find_files(where, SUFFIXES))
    for name in names:
        try:
            found.append((name, (root / name).read_text(encoding="utf-8-sig").rstrip("\n")))
        except (OSError, UnicodeDecodeError) as error:
            bad.append(LeftOutFile(name, getattr(error, "strerror", None) or "not UTF-8"))
    if not found:
        raise BadData(
            f"no prompt in {where}",
            allowed="text files in UTF-8",
            do=f"look at {bad[0].file}: {bad[0].reason}" if bad else "give a file with the beginning of a text",
        )
    return found, bad
