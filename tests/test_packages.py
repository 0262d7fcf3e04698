"""The wheel and the sdist: what is in them, what they say of themselves, and that types reach a user."""

from __future__ import annotations

import email
import email.message
import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hatchling import build

import halfstep

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


EXAMPLES = {f"halfstep/examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}


class Built(NamedTuple):
    """The two packages, and the wheel that is built from the sdist."""

    wheel: Path
    sdist: Path
    wheel_of_sdist: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    out, again, unpacked = (tmp_path_factory.mktemp(name) for name in ("dist", "again", "unpacked"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        wheel, sdist = out / build.build_wheel(str(out)), out / build.build_sdist(str(out))
        with tarfile.open(sdist) as archive:
            archive.extractall(unpacked, filter="data")
        (inner,) = unpacked.iterdir()
        patch.chdir(inner)
        yield Built(wheel, sdist, again / build.build_wheel(str(again)))


def contents(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def tracked() -> set[str]:
    listed = subprocess.run(["git", "ls-files", "src/halfstep"], cwd=ROOT, check=True, capture_output=True, text=True)
    return {line.removeprefix("src/") for line in listed.stdout.splitlines()}


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_holds_the_tracked_files_of_the_package_and_no_others(built: Built) -> None:
    inside = set(contents(built.wheel))
    own = {name for name in inside if not name.startswith(f"halfstep-{halfstep.__version__}.dist-info/")}
    assert own == tracked() | EXAMPLES
    assert len(own) > 400
    assert {"halfstep/py.typed", "halfstep/precision/known_bad.json", "halfstep/measure/memory/devices.json"} <= own
    assert sum(name.startswith("halfstep/recipes/") for name in own) >= 25
    assert f"halfstep-{halfstep.__version__}.dist-info/licenses/LICENSE" in inside


def test_the_wheel_has_the_examples_as_they_are(built: Built) -> None:
    assert len(EXAMPLES) >= 3
    with zipfile.ZipFile(built.wheel) as archive:
        for name in EXAMPLES:
            assert archive.read(name) == (ROOT / "examples" / Path(name).name).read_bytes()


def test_the_sdist_builds_the_same_wheel_byte_for_byte(built: Built) -> None:
    assert built.wheel.name == built.wheel_of_sdist.name
    assert contents(built.wheel) == contents(built.wheel_of_sdist)


def test_the_sdist_holds_what_the_wheel_is_built_from_and_no_tests(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    top = {name.partition("/")[0] for name in names}
    assert top == {
        "src",
        "examples",
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "CITATION.cff",
        "SECURITY.md",
        "constraints.txt",
    } | {*("pyproject.toml", "PKG-INFO", ".gitignore")}


def test_neither_holds_a_path_of_the_machine_that_built_it(built: Built) -> None:
    # A checkout that stands at the root of a disk has a path that many words contain.
    places = [place.encode() for place in (str(ROOT), os.path.expanduser("~") + "/") if len(place) > 5]
    with zipfile.ZipFile(built.wheel) as wheel, tarfile.open(built.sdist) as sdist:
        files = {name: wheel.read(name) for name in wheel.namelist()}
        for member in sdist.getmembers():
            if (file := sdist.extractfile(member)) is not None:
                files[member.name] = file.read()
    assert [name for name, content in files.items() for place in places if place in content] == []


def test_the_metadata_says_what_pyproject_says(built: Built) -> None:
    said = metadata(built.wheel)
    assert said["Version"] == halfstep.__version__ == PROJECT["version"]
    assert said["Requires-Python"] == PROJECT["requires-python"]
    assert said["License-Expression"] == "Apache-2.0"
    assert set(said.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    core = [need for need in said.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert sorted(core) == sorted(PROJECT["dependencies"])
    assert "Typing :: Typed" in said.get_all("Classifier", [])


def test_every_extra_that_an_error_names_is_there() -> None:
    named = {
        extra
        for path in (ROOT / "src" / "halfstep").rglob("*.py")
        for names in re.findall(r"halfstep\[([a-z,]+)\]", path.read_text())
        for extra in names.split(",")
    }
    assert {"train", "vision"} <= named <= set(PROJECT["optional-dependencies"])


DISTRIBUTIONS = {
    "mlflow": "mlflow-skinny",
    "PIL": "pillow",
    "yaml": "pyyaml",
    "pynvml": "nvidia-ml-py",
    "huggingface_hub": "timm",
}
DISTRIBUTIONS |= {"segmentation_models_pytorch": "segmentation-models-pytorch", "pytorch_lightning": "lightning"}
DISTRIBUTIONS |= {"torchmetrics": "lightning", "typing_extensions": "torch"}
DISTRIBUTIONS |= {"markupsafe": "jinja2", "pydantic_core": "pydantic"}
"""Packages by what is imported of them, where the names differ; or a package that cannot be installed without them."""


def test_every_package_that_is_imported_is_asked_for() -> None:
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    asked = {re.split(r"[<>=!~\[ ]", need)[0] for group in groups for need in group}
    imported = {
        name.partition(".")[0]
        for path in (ROOT / "src" / "halfstep").rglob("*.py")
        for name in re.findall(r"^\s*(?:import|from) ([\w.]+)(?= import|$| as|,)", path.read_text(), flags=re.MULTILINE)
    } - set(sys.stdlib_module_names)
    assert {"torch", "numpy", "yaml"} <= imported
    assert {DISTRIBUTIONS.get(name, name) for name in imported - {"halfstep"}} <= asked


def test_a_missing_package_of_an_extra_is_named_with_its_extra() -> None:
    from halfstep.errors import _EXTRAS

    names = {DISTRIBUTIONS.get(name, name) for packages in _EXTRAS.values() for name in packages}
    extras = {name: group for name, group in PROJECT["optional-dependencies"].items() if name in _EXTRAS}
    asked = {re.split(r"[<>=!~\[ ]", need)[0] for group in extras.values() for need in group}
    # Without the last there are no figures of a GPU's load, and no error.
    assert names == asked - {"nvidia-ml-py"}


CHOICE = "halfstep.precision.select.Choice"
USER = """
import halfstep
import torch

def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    stepper = halfstep.Stepper(model, optimizer, precision="bf16")
    report = stepper.step(lambda model, x: model(x), None)
    reveal_type(report.applied)
    reveal_type(report.reason)
    reveal_type(halfstep.choose_precision("auto"))
    halfstep.Stepper(model, optimizer, precison="bf16")
"""


def test_types_reach_the_code_of_a_user(built: Built, tmp_path: Path) -> None:
    """An environment with the wheel in it, where `py.typed` decides; torch is left out, which takes half a minute."""
    venv.create(tmp_path / "env", with_pip=False)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    with zipfile.ZipFile(built.wheel) as archive:
        archive.extractall(site)
    (tmp_path / "user.py").write_text(USER)
    told = _mypy(tmp_path)
    assert re.findall(r'Revealed type is "(.*)"', told) == ["bool", "str | None", CHOICE]
    assert 'Unexpected keyword argument "precison" for "Stepper"' in told
    assert "py.typed" not in told
    (site / "halfstep" / "py.typed").unlink()
    assert "missing library stubs or py.typed marker" in _mypy(tmp_path)


def _mypy(folder: Path) -> str:
    (folder / "mypy.ini").write_text("[mypy]\nstrict = True\n[mypy-torch.*]\nfollow_imports = skip\n")
    command = [sys.executable, "-m", "mypy", "--python-executable", str(folder / "env" / "bin" / "python"), "user.py"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment).stdout
