"""Lines of an error that are a person's own."""

from __future__ import annotations

from pathlib import Path

import torch

from halfstep.user_code import MEASURING, NO_FILE, TORCH, format_line_place, format_line_with_text, list_lines_outside


def wrong() -> torch.Tensor:
    return torch.nn.Linear(2, 2)(torch.zeros(3))


def raised(text: str = "wrong()") -> RuntimeError:
    try:
        exec(text, {"wrong": wrong})
    except RuntimeError as error:
        return error
    raise AssertionError(text)


def test_the_innermost_line_that_is_not_torch_s() -> None:
    error = raised()
    assert list_lines_outside(error)[-1].filename.startswith(TORCH)
    line = list_lines_outside(error, *MEASURING)[-1]
    assert format_line_place(line) == f"{__file__}:{wrong.__code__.co_firstlineno + 1}"
    assert format_line_with_text(line) == f"{format_line_place(line)}: `return torch.nn.Linear(2, 2)(torch.zeros(3))`"


def test_code_in_no_file_is_a_place_without_a_text_or_left_out() -> None:
    here, error = str(Path(__file__).parent), raised()
    (line,) = list_lines_outside(error, TORCH, here)
    assert format_line_with_text(line) == format_line_place(line) == "<string>:1"
    assert list_lines_outside(error, TORCH, here, NO_FILE) == []
    assert list_lines_outside(RuntimeError("never raised")) == []
