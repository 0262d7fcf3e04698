"""A recipe by name or by path."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from halfstep.errors import BadRecipe
from halfstep.recipe.sources import list_recipe_names, read_recipe


def test_the_shipped_recipes_are_found_by_name() -> None:
    assert len(list_recipe_names()) >= 14
    found = read_recipe("unet")
    assert found.label == "unet"
    assert found.raw["task"] == "segmentation"


@pytest.mark.parametrize("name", list_recipe_names())
def test_a_shipped_recipe_begins_with_its_command_and_says_what_it_is_for(name: str) -> None:
    found = read_recipe(name)
    first = found.text.splitlines()[0]
    assert first.startswith("# ")
    assert f"halfstep train {name}" in first
    assert 20 <= len(found.raw["about"]) <= 110


@pytest.mark.wording
def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(BadRecipe, match="did you mean unet_stable"):
        read_recipe("unet_stabel")
    with pytest.raises(BadRecipe, match="there is no recipe"):
        read_recipe("x" * 5000)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems accept only valid names")
def test_the_recipe_of_a_run_in_a_folder_of_an_undecodable_name_is_read(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/gr\xfcn"))
    folder.mkdir()
    (folder / "recipe.yaml").write_text("task: t\n")
    assert read_recipe(str(folder / "recipe.yaml")).label == "recipe"


def test_a_path_is_read_and_names_the_run(tmp_path: Path) -> None:
    file = tmp_path / "my.run.yaml"
    file.write_text("task: t\n")
    assert read_recipe(str(file))[:2] == ("my.run", {"task": "t"})


def test_the_recipe_of_a_run_is_named_by_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "unet-3"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("task: t\n")
    assert read_recipe(str(folder / "recipe.yaml")).label == "unet-3"


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(b"\xef\xbb\xbftask: t\n")
    assert read_recipe(str(file)).raw == {"task": "t"}


@pytest.mark.wording
def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe")
    began = time.monotonic()
    for name in ("pipe", "folder", "zero", "bytes", "absent", "no/such/folder"):
        with pytest.raises(BadRecipe, match=name):
            read_recipe(str(tmp_path / f"{name}.yaml"))
    assert time.monotonic() - began < 2


@pytest.mark.wording
def test_a_large_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "large.yaml"
    with file.open("wb") as large:
        large.truncate(50 * 2**30)
    with pytest.raises(BadRecipe, match="53,687,091,200 bytes"):
        read_recipe(str(file))
