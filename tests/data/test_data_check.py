"""`halfstep data check`: faults are planted, one of each kind, and every one of them is found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from halfstep.cli import main
from halfstep.data.check import facts, report
from halfstep.data.layout import compute_split_position, find_layout
from halfstep.errors import DATA, BadData

CHANCE = np.random.default_rng(0)


def photograph(path: Path, size: tuple[int, int] = (40, 48), mode: str = "RGB", **options: Any) -> None:
    pixels = CHANCE.integers(0, 256, (*size, 3), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).convert(mode).save(path, **options)


def mask(path: Path, size: tuple[int, int] = (40, 48), values: tuple[int, ...] = (0, 255), **options: Any) -> None:
    pixels = np.full(size, values[0], np.uint8)
    for number, value in enumerate(values[1:]):
        pixels[5 + 5 * number : 10 + 5 * number, 5:20] = value
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)


def pairs(root: Path, count: int = 12) -> Path:
    for number in range(count):
        photograph(root / "images" / f"{number:02d}.png")
        mask(root / "masks" / f"{number:02d}.png")
    return root


def checked(root: Path, **options: Any) -> dict[str, Any]:
    return report.check_dataset(find_layout(root), **options).as_dict()


def ids(found: dict[str, Any], severity: str = "") -> set[str]:
    return {one["id"] for one in found["findings"] if one["severity"] == severity or not severity}


def test_a_good_set_has_nothing_wrong(tmp_path: Path) -> None:
    found = checked(pairs(tmp_path))
    assert found["ok"]
    assert found["findings"] == []
    assert found["masks"]["read_as"] == "0 is the background, 255 the foreground"
    assert found["classes"][1]["pixels"] == pytest.approx(75 / 1920, abs=1e-4)
    assert sum(found["samples"].values()) == found["readable"] == 12


def animated(path: Path) -> None:
    frames = [Image.fromarray(CHANCE.integers(0, 256, (40, 48, 3), np.uint8)) for _ in range(2)]
    frames[0].save(path, save_all=True, append_images=frames[1:])


def turned(path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    photograph(path, exif=exif.tobytes())


def antialiased(path: Path) -> None:
    image = Image.new("L", (480, 400))
    image.paste(255, (100, 100, 200, 203))
    image.resize((48, 40), Image.Resampling.BICUBIC).rotate(20, Image.Resampling.BICUBIC).save(path)


def in_color(path: Path) -> None:
    pixels = np.zeros((40, 48, 3), np.uint8)
    pixels[5:9, 5:9] = (200, 10, 10)
    Image.fromarray(pixels).save(path)


def cut_off(path: Path) -> None:
    photograph(path)
    path.write_bytes(path.read_bytes()[:900])


def deep(path: Path) -> None:
    pixels = CHANCE.integers(0, 2**16, (40, 48), np.uint16)
    Image.fromarray(pixels).save(path)


def huge(path: Path) -> None:
    Image.new("1", (9000, 8000)).save(path)


PLANTED: dict[str, Callable[[Path], object]] = {
    "empty-file": lambda root: (root / "images/00.png").write_bytes(b""),
    "no-image": lambda root: (root / "images/01.png").write_text("<html>not found</html>"),
    "damaged": lambda root: cut_off(root / "images/02.png"),
    "huge": lambda root: huge(root / "masks/03.png"),
    "size-mismatch": lambda root: mask(root / "masks/04.png", (20, 24)),
    "exif-rotation": lambda root: turned(root / "images/05.png"),
    "no-mask": lambda root: photograph(root / "images/lonely.png"),
    "no-photograph": lambda root: mask(root / "masks/lost.png"),
    "same-name": lambda root: photograph(root / "images/06.jpg"),
    "mask-values": lambda root: mask(root / "masks/06.png", values=(0, 7)),
    "mask-blurred": lambda root: antialiased(root / "masks/07.png"),
    "mask-in-colour": lambda root: in_color(root / "masks/08.png"),
    "empty-mask": lambda root: mask(root / "masks/09.png", values=(0,)),
    "link-outside": lambda root: (root / "images/99.png").symlink_to("/etc/hostname"),
    "link-broken": lambda root: (root / "images/98.png").symlink_to("nowhere.png"),
    "hidden": lambda root: (root / "images/.DS_Store").write_bytes(b"x"),
    "kind-not-read": lambda root: (root / "images/IMG_1.HEIC").write_bytes(b"x"),
    "not-images": lambda root: (root / "images/notes.txt").write_text("x"),
    "animated": lambda root: animated(root / "images/10.png"),
    "mixed-channels": lambda root: photograph(root / "images/11.png", mode="L"),
    "mixed-depth": lambda root: deep(root / "images/12.png"),
    "misnamed": lambda root: photograph(root / "images/13.png", format="JPEG"),
    "no-file": lambda root: os.mkfifo(root / "images/pipe.png"),
    "tiny": lambda root: (photograph(root / "images/14.png", (8, 8)), mask(root / "masks/14.png", (8, 8))),
    "mask-turned": lambda root: mask(root / "masks/15.png", exif=b"Exif\0\0" + turning()),
}


def turning() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 3
    return exif.tobytes().removeprefix(b"Exif\0\0")


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found_alone(fault: str, tmp_path: Path) -> None:
    PLANTED[fault](pairs(tmp_path, 20))
    found = checked(tmp_path)
    assert fault in ids(found)
    (one,) = [one for one in found["findings"] if one["id"] == fault]
    assert one["fix"]
    assert one["count"] == len(one["files"]) >= 1


def test_all_planted_faults_are_found_together(tmp_path: Path) -> None:
    pairs(tmp_path, 40)
    for plant in PLANTED.values():
        plant(tmp_path)
    found = checked(tmp_path)
    assert ids(found) >= set(PLANTED)
    assert len(PLANTED) >= 15
    assert not found["ok"]
    severities = [one["severity"] for one in found["findings"]]
    assert severities == sorted(severities, key=("error", "warning", "note").index)


def test_a_damaged_file_without_a_partner_is_found(tmp_path: Path) -> None:
    root = pairs(tmp_path)
    (root / "images/empty.jpg").write_bytes(b"")
    (root / "masks/lonely.png").write_bytes((root / "masks/00.png").read_bytes()[:-40])
    assert ids(checked(root)) == {"empty-file", "damaged", "no-mask", "no-photograph"}


def test_the_same_picture_on_both_sides_is_an_error_and_on_one_a_warning(tmp_path: Path) -> None:
    pairs(tmp_path, 20)
    names = [f"copy{n}.png" for n in range(200)]
    held = next(name for name in names if compute_split_position(name) < 0.2)
    kept = [name for name in names if compute_split_position(name) >= 0.2][:2]
    for name in (held, *kept):
        (tmp_path / "images" / name).write_bytes((tmp_path / "images/00.png").read_bytes())
        mask(tmp_path / "masks" / name)
    assert "same-on-both-sides" in ids(checked(tmp_path), "error")
    (tmp_path / "images" / held).unlink()
    (tmp_path / "masks" / held).unlink()
    found = checked(tmp_path)
    inside = compute_split_position("00.png") >= 0.2
    assert ("copies" if inside else "same-on-both-sides") in ids(found)
    assert found["ok"] == inside


def test_masks_without_any_object_have_one_class(tmp_path: Path) -> None:
    for number in range(4):
        photograph(tmp_path / "images" / f"{number}.png")
        mask(tmp_path / "masks" / f"{number}.png", values=(0,))
    assert "one-class" in ids(checked(tmp_path), "error")


def classes(root: Path, counts: dict[str, int]) -> Path:
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            photograph(root / name / f"{number}.jpg")
    return root


def test_class_folders_are_told_apart_and_counted(tmp_path: Path) -> None:
    found = checked(classes(tmp_path, {"cat": 12, "dog": 9}))
    assert (found["task"], found["recipe"], found["ok"]) == ("classification", "classify", True)
    assert found["classes"] == [{"name": "cat", "images": 12}, {"name": "dog", "images": 9}]


def test_faults_of_class_folders(tmp_path: Path) -> None:
    classes(tmp_path, {"cat": 45, "dog": 2, "fish": 1, "void": 0})
    photograph(tmp_path / "loose.jpg")
    (tmp_path / "dog" / "same.jpg").write_bytes((tmp_path / "cat" / "0.jpg").read_bytes())
    found = checked(tmp_path)
    assert ids(found, "error") >= {"class-empty", "no-class", "two-classes"}
    assert ids(found, "warning") >= {"one-image", "lopsided"}
    (tmp_path / "only").mkdir()
    classes(tmp_path / "only", {"cat": 3})
    assert "one-class" in ids(report.check_dataset(find_layout(tmp_path / "only", "classification")).as_dict(), "error")


def test_splits_are_checked_against_each_other(tmp_path: Path) -> None:
    classes(tmp_path / "train", {"cat": 4, "dog": 4})
    classes(tmp_path / "val", {"cat": 2, "bird": 2})
    (tmp_path / "val" / "cat" / "x.jpg").write_bytes((tmp_path / "train" / "cat" / "0.jpg").read_bytes())
    found = checked(tmp_path)
    assert ids(found, "error") >= {"class-unknown", "same-on-both-sides"}
    assert "class-unjudged" in ids(found, "warning")
    assert found["samples"] == {"train": 8, "val": 5}


@pytest.mark.skipif(os.geteuid() == 0, reason="everything can be read by root")
def test_a_file_without_permission_is_found(tmp_path: Path) -> None:
    pairs(tmp_path)
    (tmp_path / "images" / "00.png").chmod(0)
    assert "no-permission" in ids(checked(tmp_path), "error")


@pytest.mark.wording
@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("img", "labels"), r"do: give data\.path='.*img' and data\.masks='.*labels'"),
        (("a",), "contains a"),
        ((), "no folder at all"),
    ],
)
def test_a_layout_that_is_none_says_what_to_type(names: tuple[str, ...], words: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).mkdir()
    with pytest.raises(BadData, match=words):
        find_layout(tmp_path)


@pytest.mark.wording
def test_a_folder_of_shards_says_how_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "s-000.tar").touch()
    with pytest.raises(BadData, match=r"data\.name=shards"):
        find_layout(tmp_path)


@pytest.mark.wording
def test_photographs_beside_their_masks_are_told_where_to_go(tmp_path: Path) -> None:
    photograph(tmp_path / "x.png")
    with pytest.raises(BadData, match="move them into images/"):
        find_layout(tmp_path, "segmentation")


def test_many_files_are_looked_at_in_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs(tmp_path, 30)
    (tmp_path / "images" / "00.png").write_bytes(b"")
    alone = checked(tmp_path)
    monkeypatch.setattr(facts, "FEW", 8)
    done: list[tuple[int, int]] = []
    assert checked(tmp_path, on_progress=lambda *so_far: done.append(so_far)) == alone
    assert done[-1] == (60, 60)


def call(*words: str) -> Result:
    return CliRunner().invoke(main.build(), ["data", *words], env={"COLUMNS": "80"}, prog_name="halfstep")


def test_the_command_prints_a_page_and_ends_with_65(tmp_path: Path) -> None:
    pairs(tmp_path)
    good = call("check", str(tmp_path))
    assert good.exit_code == 0
    assert f"next: halfstep train segment --data_dir {tmp_path}" in good.output
    (tmp_path / "images" / "\x1b[31mred.png").write_bytes(b"")
    mask(tmp_path / "masks" / "\x1b[31mred.png")
    bad = call("check", str(tmp_path))
    assert bad.exit_code == DATA
    assert "error empty-file (1)" in bad.output
    assert "\x1b[31m" not in bad.output
    assert json.loads(call("check", str(tmp_path), "--json").stdout)["ok"] is False
    assert call("check").exit_code == 78
    assert call("chekc", str(tmp_path)).exit_code == 78
