"""The house: imports point down, and precision is spoken of only on the floors that own it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "halfstep"
GROUND = {"errors", "formats", "finding", "freed_memory", "clock", "files", "progress", "tensor_header", "world"}

# A floor may import the floors below it. Floors that do not exist yet are listed, so that they open in their place.
BELOW: dict[str, set[str]] = {"ground": set()}
BELOW["precision"] = {"ground"}
BELOW["observe"] = BELOW["precision"] | {"precision"}
BELOW["step"] = BELOW["observe"] | {"observe"}
BELOW["guard"] = BELOW["step"] | {"step"}
BELOW["draw"] = {"ground"}
BELOW["train"] = BELOW["guard"] | {"guard", "draw"}
BELOW["tasks"] = (BELOW["train"] | {"train"}) - {"draw"}
BELOW["measure"] = BELOW["tasks"] | {"tasks", "draw"}
BELOW["doctor"] = BELOW["train"] | {"train"} - {"draw"}
BELOW["adapters"] = BELOW["guard"] | {"guard"}
BELOW["cli"] = set().union(*BELOW.values()) | {"measure", "doctor", "adapters", "tasks", "train"}

SPEAKS_NO_DTYPE = ("tasks", "train", "draw", "cli")
FORBIDDEN_NAMES = {"half", "bfloat16", "float16", "autocast"}
DEVICE_WORDS = {"cpu", "cuda", "mps", "xpu", "hip", "rocm", "tpu", "xla"}


def floor(parts: tuple[str, ...]) -> str | None:
    """The floor of a module path below halfstep; None for the package's own front door."""
    if parts and parts[0] in GROUND:
        return "ground"
    return parts[0] if parts and parts[0] in BELOW else None


def files() -> list[Path]:
    found = sorted(SOURCE.rglob("*.py"))
    assert len(found) >= 30, "the source tree was not found"
    return found


def imported(tree: ast.AST) -> list[tuple[str, ...]]:
    """Every halfstep module that a file imports, wherever in it."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which floor is meant"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return [tuple(name.split(".")[1:]) for name in found if name.split(".")[0] == "halfstep"]


def upward_arrows(path: Path, tree: ast.AST) -> list[str]:
    own = floor(path.relative_to(SOURCE).with_suffix("").parts)
    if own is None:
        return []
    arrows = []
    for target in imported(tree):
        other = floor(target)
        if other != own and other not in BELOW[own] and target != ("__version__",):
            arrows.append(f"{path.relative_to(SOURCE)} ({own}) imports halfstep.{'.'.join(target)} ({other})")
    return arrows


def words_about_dtypes(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        name = {ast.Attribute: "attr", ast.Name: "id", ast.alias: "name"}.get(type(node))
        word = getattr(node, name) if name else None
        if word in FORBIDDEN_NAMES:
            found.append(f"line {getattr(node, 'lineno', '?')}: {word}")
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value.split(":")[0].lower()
            if text in DEVICE_WORDS or text in FORBIDDEN_NAMES:
                found.append(f"line {node.lineno}: {node.value!r}")
    return found


def test_every_folder_is_a_known_floor() -> None:
    folders = {p.name for p in SOURCE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders <= set(BELOW) | {"recipes"}
    modules = {p.stem for p in SOURCE.glob("*.py")} - {"__init__", "__main__"}
    assert modules <= GROUND


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_down(path: Path) -> None:
    assert upward_arrows(path, ast.parse(path.read_text())) == []


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_upper_floors_speak_no_dtype(path: Path) -> None:
    if path.relative_to(SOURCE).parts[0] in SPEAKS_NO_DTYPE:
        assert words_about_dtypes(ast.parse(path.read_text())) == []


def test_the_step_is_usable_alone() -> None:
    for path in (SOURCE / "step").glob("*.py"):
        tree = ast.parse(path.read_text())
        names = {alias.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
        names |= {(n.module or "").split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert not names & {"yaml", "logging", "pathlib", "io", "typer", "rich", "json"}, path.name


def test_files_stay_small() -> None:
    long = {str(p.relative_to(SOURCE)): n for p in files() if (n := len(p.read_text().splitlines())) > 300}
    assert long == {}


@pytest.mark.parametrize(
    ("place", "code", "wrong"),
    [
        ("precision/bad.py", "from halfstep.step.window import Window", 1),
        ("errors.py", "import halfstep.precision.names", 1),
        ("step/fine.py", "from halfstep.observe.watch import Watch", 0),
        ("step/bad.py", "from halfstep import Stepper", 1),
        ("cli/fine.py", "from halfstep import __version__", 0),
        ("observe/bad.py", "def f():\n    from halfstep.step import lane", 1),
        ("tasks/bad.py", "from halfstep.draw.curves import plot", 1),
        ("train/fine.py", "from halfstep.draw.curves import plot", 0),
    ],
)
def test_the_arrow_check_can_fail(place: str, code: str, wrong: int) -> None:
    assert len(upward_arrows(SOURCE / place, ast.parse(code))) == wrong


@pytest.mark.parametrize(
    "code",
    ["x.half()", "x.bfloat16()", "torch.float16", "torch.bfloat16", "torch.autocast('cpu')", "x.to('cuda:0')"],
)
def test_the_dtype_check_can_fail(code: str) -> None:
    assert words_about_dtypes(ast.parse(code))
