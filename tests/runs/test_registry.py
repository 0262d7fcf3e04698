"""The folder is the registry; packages and single files may add to it."""

from __future__ import annotations

import hashlib
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from halfstep import tasks
from halfstep.errors import Contradiction, MissingExtra, UnknownName, WrongUse
from halfstep.runs import registry
from halfstep.runs.registry import find_task_class, list_task_names, load_task_file
from halfstep.tasks.segmentation import Segmentation

OWN = """
from __future__ import annotations
from dataclasses import dataclass
from torch import nn
from halfstep.train.task import Task
from halfstep.tasks.segmentation import Segmentation  # imported, so not a task of this file

Sizes = list[int]  # an alias, and no class

@dataclass
class Options:
    width: int = 3

class Mine(Task):
    metric = "loss"
    def model(self): return nn.Linear(Options().width, 1)
    def source(self, split): return []
    def loss(self, model, batch, metrics=None): return 0
"""


def points(monkeypatch: pytest.MonkeyPatch, *values: tuple[str, str]) -> None:
    found = [EntryPoint(name, value, registry.GROUP) for name, value in values]
    monkeypatch.setattr(registry, "entry_points", lambda group: found if group == registry.GROUP else [])


def test_files_without_an_underscore_are_tasks() -> None:
    folder = Path(tasks.__path__[0])
    files = {p.stem for p in folder.glob("*.py") if not p.name.startswith("_")}
    assert set(list_task_names()) >= files >= {"segmentation", "classification"}
    assert not any(name.startswith("_") or name == "models" for name in list_task_names())
    assert find_task_class("segmentation") is Segmentation


@pytest.mark.wording
def test_an_unknown_task_is_told_its_nearest_name() -> None:
    with pytest.raises(UnknownName, match="did you mean 'segmentation'"):
        find_task_class("segmentaton")


@pytest.mark.parametrize("name", ["models", "_folder", "os", "../tasks", ""])
def test_nothing_but_tasks_can_be_named(name: str) -> None:
    with pytest.raises(UnknownName):
        find_task_class(name)


def test_an_entry_point_is_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    points(monkeypatch, ("theirs", "halfstep.tasks.segmentation:Segmentation"))
    assert "theirs" in list_task_names()
    assert find_task_class("theirs") is Segmentation


@pytest.mark.wording
def test_an_entry_point_that_is_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    points(monkeypatch, ("theirs", "os.path:join"))
    with pytest.raises(WrongUse, match="not a task"):
        find_task_class("theirs")


@pytest.mark.wording
def test_two_tasks_of_one_name_are_a_contradiction(monkeypatch: pytest.MonkeyPatch) -> None:
    points(monkeypatch, ("segmentation", "a:B"))
    with pytest.raises(Contradiction, match="comes with halfstep"):
        find_task_class("segmentation")
    points(monkeypatch, ("theirs", "a:B"), ("theirs", "c:D"))
    with pytest.raises(Contradiction, match=r"a:B.*c:D"):
        list_task_names()


@pytest.mark.wording
@pytest.mark.parametrize(
    ("task", "package", "extras"),
    [("segmentation", "torchvision", "train,vision"), ("diffusion", "diffusers", "train,vision,diffusion")],
)
def test_a_missing_package_names_the_extra(
    task: str, package: str, extras: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_task_class(task)
    for module in [name for name in sys.modules if name.startswith("halfstep.tasks.")]:
        if not module.startswith("halfstep.runs.registry"):
            monkeypatch.delitem(sys.modules, module)
    for module in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra) as caught:
        find_task_class(task)
    assert package in str(caught.value)
    assert f"pip install 'halfstep[{extras}]'" in caught.value.do


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    kind, digest = load_task_file(path)
    assert kind.__name__ == "Mine"
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert kind(None).model().in_features == 3
    assert sys.modules[kind.__module__].Mine is kind


@pytest.mark.wording
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "contains 0 tasks"),
        (OWN + OWN.replace("Mine", "Other"), "contains 2 tasks"),
        (OWN.replace("def model", "def other"), "lacks model"),
        (OWN.replace('metric = "loss"', "pass"), "lacks metric"),
        ("def (", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import nothing_of_this_name", "ModuleNotFoundError"),
    ],
)
def test_a_file_that_is_not_one_task(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text.replace("from __future__ import annotations\n", ""))
    with pytest.raises(WrongUse, match=words) as caught:
        load_task_file(path)
    assert caught.value.exit_code == 78
    assert caught.value.do


@pytest.mark.wording
@pytest.mark.parametrize("name", ["missing.py", "folder.py", "text.txt", "large.py"])
def test_what_is_not_a_python_file_is_not_run(tmp_path: Path, name: str, monkeypatch: Any) -> None:
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "text.txt").write_text(OWN)
    (tmp_path / "large.py").write_text(OWN + "#" * registry.LARGEST_FILE)
    with pytest.raises(WrongUse, match=name):
        load_task_file(tmp_path / name)
