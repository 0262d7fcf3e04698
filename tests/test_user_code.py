"""The line of a person's code that is running."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest
import torch

from halfstep import user_code
from halfstep.observe import nonfinite_origin
from halfstep.step import stepper
from halfstep.step.experiment import rerun
from halfstep.user_code import find_running_line, is_user_file, is_user_or_package, shorten_path

HERE = "test_user_code.py"


def number_of(line: str | None) -> int:
    assert line is not None
    file, _, number = line.rpartition(":")
    assert file.endswith(HERE)
    return int(number)


def test_the_innermost_line_that_is_a_persons() -> None:
    assert number_of(find_running_line()) == sys._getframe().f_lineno
    # Python's own sorted() and functools run it, from here.
    found = [find_running_line() for _ in map(str, [1])]
    assert number_of(found[0]) == sys._getframe().f_lineno - 1


def test_code_without_a_file_is_left_out() -> None:
    place: dict[str, object] = {"running_line": find_running_line}
    exec("found = running_line()", place)
    assert number_of(str(place["found"])) == sys._getframe().f_lineno - 1


@pytest.mark.parametrize("runner", [stepper, rerun])
def test_lines_outside_of_what_runs_a_loss_function_asked_for_nothing(runner: ModuleType) -> None:
    place: dict[str, object] = {"running_line": find_running_line}
    exec(compile("found = running_line()", str(runner.__file__), "exec"), place)
    assert place["found"] is None


def test_backward_has_no_line_unless_a_person_wrote_it() -> None:
    lines: list[str | None] = []

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
            lines.append(find_running_line())
            return gradients[0]

    x = torch.ones(1, requires_grad=True)
    y = Own.apply(x)
    y.register_hook(lambda gradient: None)
    y.backward()
    assert len(lines) == 1
    assert number_of(lines[0]) == Own.backward.__code__.co_firstlineno + 2


def test_whose_a_file_is() -> None:
    packages = Path(sysconfig.get_path("purelib"))
    assert is_user_or_package(__file__)
    assert is_user_or_package(str(packages / "timm" / "models" / "resnet.py"))
    assert is_user_or_package(str(packages / "torchvision" / "models" / "resnet.py"))
    assert not is_user_or_package(str(Path(torch.__file__).parent / "nn" / "modules" / "linear.py"))
    assert not is_user_or_package(nonfinite_origin.__file__)
    assert not is_user_or_package(user_code.__file__)
    assert not is_user_or_package(str(Path(sysconfig.get_path("stdlib")) / "functools.py"))
    assert not is_user_or_package("<string>")
    assert is_user_file(__file__)
    assert not is_user_file(str(packages / "timm" / "models" / "resnet.py"))
    assert not is_user_file(nonfinite_origin.__file__)


def test_files_are_shown_as_people_know_them() -> None:
    packages = Path(sysconfig.get_path("purelib"))
    assert shorten_path(str(packages / "timm" / "layers" / "norm.py")) == str(Path("timm/layers/norm.py"))
    assert shorten_path(str(Path.cwd() / "train.py")) == "train.py"
    assert shorten_path("/elsewhere/train.py") == "/elsewhere/train.py"
