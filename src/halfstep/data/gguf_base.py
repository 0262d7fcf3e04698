"""Convert a GGUF file once into a folder that transformers reads (`halfstep data base`)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from halfstep import numbers
from halfstep.draw.notebook import PageResult
from halfstep.errors import BadData, check_packages_installed, format_error_line
from halfstep.files import check_file_free, create_folder_atomically, replace_storage_errors
from halfstep.json_data import JsonResult
from halfstep.page import Page, Paragraph, Span
from halfstep.printable import escape_to_one_line


@dataclass(frozen=True)
class ConvertedBase(PageResult, JsonResult):
    """A base that was converted."""

    folder: Path
    model: str
    parameters: int
    vocabulary: int

    def page(self) -> Page:
        """Return the facts, and what to type next."""
        head = (
            f"{escape_to_one_line(self.folder)}: {self.model}, {numbers.format_short_count(self.parameters)} "
            "parameters in fp32"
        )
        line = f"next: halfstep data tokens FILES --tokenizer {escape_to_one_line(self.folder)} --out tokens"
        return Page("base", (Paragraph(Span(head, strong=True), wrap=False), Paragraph(line, wrap=False)))


def _read_magic(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(4)


@contextmanager
def hide_progress_bars() -> Iterator[None]:
    """Do without transformers' own progress bars, which break the status line."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def convert_gguf(file: Path, out: Path) -> ConvertedBase:
    """Write the model and the tokenizer of a GGUF file to a new folder, complete or not at all.

    Weights are dequantized to fp32. Nothing of the file is run.
    """
    check_file_free(out, False, do="give --out FOLDER, a new one")
    if not file.is_file() or _read_magic(file) != b"GGUF":
        raise BadData(f"{file} is not a GGUF file", allowed="a file that starts with GGUF", do="check the path")
    check_packages_installed("transformers", "gguf")
    with hide_progress_bars():
        return _load_and_save_gguf(file, out)


def _load_and_save_gguf(file: Path, out: Path) -> ConvertedBase:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        folder, name = str(file.parent), file.name
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32, local_files_only=True)
    except Exception as error:  # a truncated file raises anything: struct.error, IndexError, ...
        raise BadData(
            f"{file} cannot be converted: {format_error_line(error)[:200]}",
            allowed="an architecture and a quantization that transformers reads",
            do="copy the file again, or get the model as safetensors instead",
        ) from error
    # transformers refuses to save quantized weights; a plain model with the same weights is saved instead.
    config = copy.deepcopy(model.config)
    config.__dict__.pop("quantization_config", None)
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    failed = replace_storage_errors(
        f"{out} cannot be written", allowed="a writable folder with room", do="give --out FOLDER"
    )
    with failed, create_folder_atomically(out) as draft:
        plain.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
    parameters = sum(p.numel() for p in plain.parameters())
    return ConvertedBase(out, type(plain).__name__, parameters, len(tokenizer))
