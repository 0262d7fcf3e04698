"""Every command and every option that `halfstep data check` prints as a remedy is accepted as printed."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

import halfstep
from faults.bad_images import encoded, picture
from halfstep.cli.main import build
from halfstep.data.check import report
from halfstep.errors import CONFIGURATION, DATA, USAGE, BadData
from halfstep.recipe.sources import read_recipe
from halfstep.runs.resolve import resolve_run_recipe
from tests.data.test_data_check import mask, pairs, photograph

REFUSED = {2, USAGE, CONFIGURATION}
"""Exit codes of a command line that cannot be parsed."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "300")


def typed(*words: str) -> Result:
    return CliRunner().invoke(build(), list(words))


def check(*words: object) -> Result:
    return typed("data", "check", *map(str, words))


def find_remedies(result: Result) -> list[str]:
    """What stands after `do:`, without the paragraph's indent."""
    return [line.partition("do: ")[2].strip() for line in result.output.splitlines() if line.strip().startswith("do: ")]


def find_commands(text: str) -> list[list[str]]:
    """The commands of halfstep in a remedy, as words; a comma or a parenthesis ends none of them."""
    parts = re.split(r"; then: |: (?=halfstep )| \((?=[a-z])|; ", text)
    return [shlex.split(part)[1:] for part in parts if part.startswith("halfstep ")]


def find_options(text: str) -> list[str]:
    """The options at the end of a remedy, to be added to the command that printed it."""
    found = re.search(r"(?<!\S)--[a-z_]+ \S+( --[a-z_]+ \S+)*$", text)
    return shlex.split(found[0]) if found else []


def wrongly_named(root: Path, images: str = "photos", masks: str = "labels") -> Path:
    for number in range(12):
        photograph(root / images / f"{number:02d}.png")
        mask(root / masks / f"{number:02d}_mask.png")
    return root


# -- folders of images ------------------------------------------------------------------------------------------------


@pytest.mark.wording
@pytest.mark.parametrize("root", ["messy", "my photos", "it's", "-odd"])
def test_photos_and_labels_are_checked_by_the_command_that_is_printed(root: str) -> None:
    wrongly_named(Path(root))
    given = Path.cwd() / root if root.startswith("-") else root
    first = check(given)
    assert first.exit_code == DATA
    [command] = find_commands(find_remedies(first)[0])
    assert command[:2] == ["data", "check"]
    again = typed(*command)
    assert again.exit_code == 0, again.output
    assert "12: 10 train, 2 val" in again.output


@pytest.mark.wording
@pytest.mark.parametrize("images", ["photos", "images"])
def test_the_folder_of_photos_alone_is_checked_with_the_masks_next_to_it(images: str) -> None:
    wrongly_named(Path("messy"), images)
    [command] = find_commands(find_remedies(check(f"messy/{images}"))[0])
    assert typed(*command).exit_code == 0
    # Nothing is suggested for the masks themselves, or for class folders.
    assert not find_commands(find_remedies(check("messy/labels"))[0])
    assert not find_commands(find_remedies(check(f"messy/{images}", "--task", "classification"))[0])


@pytest.mark.wording
def test_a_run_words_the_same_error_with_its_own_options() -> None:
    wrongly_named(Path("messy"))
    refused = typed("train", "segment", "--data_dir", "messy")
    assert refused.exit_code == DATA
    [remedy] = find_remedies(refused)
    assert remedy == "give --data_dir messy/photos --masks messy/labels"
    chosen = resolve_run_recipe(read_recipe("segment"), find_options(remedy))
    assert (chosen.recipe.data.path, chosen.recipe.data.masks) == ("messy/photos", "messy/labels")
    assert chosen.recipe.data.classes == 2


@pytest.mark.wording
def test_in_python_the_same_error_names_settings() -> None:
    wrongly_named(Path("messy"))
    with pytest.raises(BadData) as caught:
        halfstep.fit("segment", settings={"data.path": "messy"}, quiet=True)
    assert caught.value.do == "give data.path='messy/photos' and data.masks='messy/labels'"
    chosen = resolve_run_recipe(read_recipe("segment"), {"data.path": "messy/photos", "data.masks": "messy/labels"})
    assert chosen.recipe.data.classes == 2


def numbered(count: int, values: tuple[int, ...], odd: tuple[int, ...]) -> Path:
    root = Path("numbers")
    for number in range(count):
        photograph(root / "images" / f"{number:03d}.png")
        mask(root / "masks" / f"{number:03d}.png", values=odd if number == 3 else values)
    return root


MASKS: dict[str, tuple[int, tuple[int, ...], tuple[int, ...], list[str]]] = {
    "a rare class": (12, (0, 1, 2), (0, 1, 2, 7), ["--classes", "8"]),
    "a rare 255": (12, (0, 1, 2), (0, 1, 2, 255), ["--ignore_index", "255"]),
    "both": (12, (0, 1, 2), (0, 7, 2, 255), ["--classes", "8", "--ignore_index", "255"]),
    "a number among masks in black and white": (12, (0, 255), (0, 7), []),
}


@pytest.mark.wording
@pytest.mark.parametrize("kind", MASKS)
def test_options_for_the_values_of_masks_give_each_a_class(kind: str) -> None:
    count, values, odd, options = MASKS[kind]
    root = numbered(count, values, odd)
    first = check(root)
    assert first.exit_code == DATA
    [remedy] = [one for one in find_remedies(first) if one.startswith("correct them")]
    assert find_options(remedy) == options
    if not options:
        assert remedy == "correct them"  # --classes 8 would take its class from the white of all others
        return
    again = check(root, *options)
    assert again.exit_code == 0, again.output
    # The next line has the same meaning of the masks.
    [following] = [line.removeprefix("next: ") for line in again.output.splitlines() if line.startswith("next: ")]
    chosen = resolve_run_recipe(read_recipe("segment"), shlex.split(following)[3:]).recipe.data
    assert chosen.classes == (8 if "--classes" in options else 3)
    assert chosen.ignore_index == (255 if "--ignore_index" in options else None)


def test_values_above_255_have_no_option() -> None:
    root = pairs(Path("wide"))
    pixels = np.zeros((40, 48), np.uint16)
    pixels[5:9] = 300
    for number in range(12):
        mask(root / "masks" / f"{number:02d}.png", values=(0, 1, 2))
    Image.fromarray(pixels).save(root / "masks" / "03.png")
    assert all(not find_options(one) for one in find_remedies(check(root)))


def test_an_option_for_masks_has_both_spellings() -> None:
    root = numbered(12, (0, 1, 2), (0, 1, 2, 255))
    for option in ("--ignore_index", "--ignore-index"):
        assert check(root, option, 255).exit_code == 0


@pytest.mark.wording
def test_no_rule_names_a_command_or_an_option_that_is_not_tested_here() -> None:
    fixed = {rule.id: rule.do for rule in report.RULES if isinstance(rule.do, str)}
    assert not [id for id, do in fixed.items() if "halfstep" in do]
    others = ("cp ", "magick ", "exiftool ", "chmod ")
    assert not [id for id, do in fixed.items() if re.search(r"(?<!\S)--?\w", do) and not any(o in do for o in others)]
    assert [rule.id for rule in report.RULES if callable(rule.do)] == ["mask-values"]


@pytest.mark.wording
@pytest.mark.skipif(os.name == "nt", reason="cp and readlink")
def test_the_command_for_a_link_replaces_it_by_the_file() -> None:
    root = pairs(Path("some photos"))
    outside = Path("elsewhere/one photo.png")
    photograph(outside)
    (root / "images" / "03.png").unlink()
    (root / "images" / "03.png").symlink_to(outside.resolve())
    first = check(root)
    [command] = [one for one in find_remedies(first) if one.startswith("cp ")]
    subprocess.run(command, shell=True, check=True)
    assert check(root).exit_code == 0
    assert not (root / "images" / "03.png").is_symlink()


@pytest.mark.wording
def test_a_name_of_a_task_that_is_suggested_is_one() -> None:
    root = pairs(Path("set"))
    first = check(root, "--task", "segmentaton")
    assert first.exit_code != 0
    quoted = re.findall(r"'(\w+)'", find_remedies(first)[0])
    assert check(root, "--task", quoted[0]).exit_code == 0


# -- shards, text, tokens, addresses ----------------------------------------------------------------------------------


def tar_shard(folder: Path) -> None:
    folder.mkdir(parents=True)
    with tarfile.open(folder / "a.tar", "w") as tar:
        for number in range(8):
            parts = ((f"{number}.png", encoded(picture(number), "PNG")), (f"{number}.cls", str(number % 2).encode()))
            for name, content in parts:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def parquet_shard(folder: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder.mkdir(parents=True)
    images = [{"bytes": encoded(picture(n), "PNG"), "path": None} for n in range(8)]
    pq.write_table(pa.table({"image": images, "label": [n % 2 for n in range(8)]}), folder / "a.parquet")


@pytest.mark.wording
@pytest.mark.parametrize("given", ["shards", "shards in train", "one shard", "a pattern"])
@pytest.mark.parametrize("write", [tar_shard, parquet_shard])
def test_shards_are_indexed_and_trained_on_as_printed(given: str, write: Callable[[Path], None]) -> None:
    folder = Path("my shards")
    write(folder / "train" if given == "shards in train" else folder)
    suffix = ".tar" if write is tar_shard else ".parquet"
    place = folder
    if given == "one shard":
        place = folder / f"a{suffix}"
    elif given == "a pattern":
        (folder / f"a{suffix}").rename(folder / f"a-0{suffix}")
        place = folder / f"a-{{0..0}}{suffix}"
    first = check(place)
    assert first.exit_code == DATA
    index, train = find_commands(find_remedies(first)[0])
    done = typed(*index)
    assert (index[:2], done.exit_code) == (["data", "index"], 0), done.output
    assert train[:2] == ["train", "classify"]
    chosen = resolve_run_recipe(read_recipe("classify"), train[2:]).recipe
    assert (chosen.data.name, chosen.data.path) == ("shards", str(place))


@pytest.mark.wording
@pytest.mark.parametrize("recipe", ["segment", "classify"])
def test_a_run_on_shards_names_its_setting(recipe: str) -> None:
    tar_shard(Path("shards"))
    refused = typed("train", recipe, "--data_dir", "shards")
    assert find_remedies(refused) == ["add data.name=shards"]
    assert resolve_run_recipe(read_recipe(recipe), ["--data_dir", "shards", "data.name=shards"]).recipe


def text_folder() -> Path:
    from tests.data.test_tokens import sentence

    for number in range(6):
        path = Path("corpus") / "part" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(sentence(40 * number + k) for k in range(40)))
    return Path("corpus")


@pytest.mark.wording
@pytest.mark.parametrize("is_there", [False, True])
def test_text_becomes_tokens_by_the_command_that_is_printed(is_there: bool) -> None:
    pytest.importorskip("tokenizers")
    root = text_folder()
    if is_there:
        (Path("tokens") / "of another corpus").mkdir(parents=True)
    [command] = find_commands(find_remedies(check(root))[0])
    assert command[:2] == ["data", "tokens"]
    done = typed(*[word.replace("train:4096", "train:400") for word in command])
    assert done.exit_code == 0, done.output
    assert check(command[-1]).exit_code == 0


@pytest.mark.wording
def test_a_folder_without_text_has_no_remedy_for_text() -> None:
    Path("empty").mkdir()
    assert find_remedies(check("empty")) == ["give the folder above or below it, or rename these"]


def damage_shard(folder: Path) -> None:
    content = bytearray((folder / "val-00000.bin").read_bytes())
    content[10] ^= 1
    (folder / "val-00000.bin").write_bytes(content)


TOKENS: dict[str, Callable[[Path], object]] = {
    "shard-damaged": damage_shard,
    "tokenizer-changed": lambda folder: (folder / "tokenizer.json").write_text("{} "),
    "index": lambda folder: (folder / "tokens.json").write_text('{"version": 1}'),
    "documents": lambda folder: (folder / "val.documents.bin").write_bytes(np.asarray([3], "<i8").tobytes()),
}


@pytest.mark.wording
@pytest.mark.parametrize("fault", TOKENS)
def test_tokens_are_made_again_by_the_command_that_is_printed(fault: str) -> None:
    pytest.importorskip("tokenizers")
    root = text_folder()
    assert typed("data", "tokens", str(root), "--tokenizer", "train:400", "--out", "my tokens").exit_code == 0
    TOKENS[fault](Path("my tokens"))
    first = check("my tokens")
    assert first.exit_code == DATA
    commands = [command for one in find_remedies(first) for command in find_commands(one)]
    assert commands
    words = [str(root) if word == "FILES" else word.replace("train:4096", "train:400") for word in commands[0]]
    done = typed(*words)
    assert done.exit_code == 0, done.output
    assert check(words[-1]).exit_code == 0


@pytest.mark.wording
def test_the_address_of_a_store_is_for_another_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from halfstep.cli import data

    wrong = typed("data", "index", "s3:///nothing")
    assert find_commands(find_remedies(wrong)[0])[0][:2] == ["data", "index"]
    first = check("s3://bucket/my set")
    [command] = find_commands(find_remedies(first)[0])
    indexed: list[Any] = []
    monkeypatch.setattr(data, "_index_store_shards", lambda *given: indexed.append(given[0]))
    assert typed(*command).exit_code == 0
    assert indexed == ["s3://bucket/my set"]
    assert find_commands(find_remedies(check("https://host/set"))[0]) == [["data", "check", "FOLDER"]]
    assert "hunter2" not in check("s3://key:hunter2@bucket/set").output


@pytest.mark.wording
def test_a_recipe_is_explained_by_the_command_that_is_printed() -> None:
    first = check("segment")
    explain, again = find_commands(find_remedies(first)[0])
    assert typed(*explain).exit_code == 0
    assert typed(*again).exit_code not in REFUSED  # FOLDER does not exist
    assert typed("recipes", "copy", "segment", "mine.yaml").exit_code == 0
    assert typed(*find_commands(find_remedies(check("mine.yaml"))[0])[0]).exit_code == 0
    assert "does not exist" in check("nothing.yaml").output


@pytest.mark.wording
def test_a_data_set_of_the_cache_is_got_by_the_command_that_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    from halfstep.cli import data

    got: list[str] = []
    monkeypatch.setattr(data, "_download_data_set", lambda name, json: got.append(name))
    [command] = find_commands(find_remedies(check("cache:cifar10"))[0])
    assert typed(*command).exit_code == 0
    assert got == ["cifar10"]
    assert find_remedies(check("cache:mine")) == ["give the path of your own folder"]


def test_the_words_of_every_remedy_are_read_by_these_tests() -> None:
    """The reader of remedies finds what is planted in it."""
    assert find_commands("text: halfstep data tokens a --out b; then: halfstep x") == [
        ["data", "tokens", "a", "--out", "b"], ["x"],
    ]  # fmt: skip
    assert find_options("correct them: --classes 8 --ignore_index 255") == ["--classes", "8", "--ignore_index", "255"]
    assert find_options("correct them") == []
