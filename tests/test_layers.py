"""The house: imports point down, and precision is spoken of only in the layers that own it."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "halfstep"
ROOT = SOURCE.parents[1]
GROUND = {"_version", "errors", "formats", "finding", "clock", "files", "terminal", "user_code", "distributed"}
GROUND |= {"printable", "status_line", "host_memory", "out_of_memory", "safetensors_header", "ownership"}
GROUND |= {"deadline", "peers", "stop_signals", "launch_variables", "json_data", "status_files", "page", "numbers"}
GROUND |= {
    "callable_package",
    "random_state",
    "metric_names",
    "nearest_word",
    "processes",
    "cpu_cores",
    "save_interval",
}

# Every layer, lowest first: its name, the layers that it stands on, and what it owns. It may import those it stands
# on and all below them. CONTRIBUTING's picture is made from this list: `python -m tests.test_layers`.
LAYERS: list[tuple[str, tuple[str, ...], str]] = [
    ("ground", (), "errors, number formats, findings, pages as data, files, the terminal, ranks"),
    ("store", ("ground",), "object stores: addresses, requests, and the process that makes them"),
    ("draw", ("ground",), "pages on the terminal, in HTML, Markdown and notebooks; SVG charts; sheets"),
    ("precision", ("draw",), "precision names, capabilities of devices, choice of a precision, islands"),
    ("observe", ("precision",), "the operations that torch runs: formats, first non-finite numbers, lint"),
    ("step", ("observe",), "one update, all or nothing, on one rank or many"),
    ("guard", ("step",), "alarms, monitors, the diagnosis of a failed step, its repair"),
    ("measure", ("guard",), "audit, bench, estimate, plan, profile, survival"),
    ("checkpoint", ("ground",), "atomic saves and their digests, of runs and of failed steps"),
    ("failed_steps", ("guard", "checkpoint"), "failed steps on disk, in guard/failed_steps"),
    ("adapters", ("failed_steps",), "halfstep in the loops of other libraries"),
    ("recipe_yaml", ("ground",), "recipes as YAML: recipe/strict_yaml and recipe/sources"),
    ("recipe", ("precision", "recipe_yaml"), "a run as data: its schema, overrides, aliases, mistakes"),
    ("data", ("step", "checkpoint", "store"), "samples: sources, order, loader, checks"),
    ("journal", ("recipe",), "events of a run and their listeners"),
    ("train", ("failed_steps", "data", "journal"), "the loop, evaluation, resuming, the run's folder"),
    ("tasks", ("train",), "segmentation, classification, diffusion, slots, and their models"),
    ("runs", ("tasks", "measure"), "operations on a run: start, reopen, export, replay; measuring a recipe"),
    ("report", ("runs",), "one-page reports of runs, bench results and plans, from plain data"),
    ("selftest", ("runs",), "tests of halfstep's guarantees on the local device, in parts"),
    ("doctor", ("precision", "recipe_yaml", "store"), "settings from every source, and contradictions between them"),
    ("cli", ("selftest", "report", "doctor", "adapters"), "commands and the pages that they print"),
]
LIBRARY = {"ground", "store", "draw", "precision", "observe", "step", "guard", "measure"}
LIBRARY |= {"checkpoint", "failed_steps", "adapters"}
"""What a person with a loop of their own imports: nothing of it needs a recipe, a data set or a run's folder."""
TRAINER = {"recipe", "recipe_yaml", "data", "journal", "train", "tasks", "runs", "report", "cli"}
"""The trainer stands on the library."""
ROOMS = {
    ("guard", "failed_steps"): "failed_steps",
    ("recipe", "strict_yaml"): "recipe_yaml",
    ("recipe", "sources"): "recipe_yaml",
}
"""Parts of a folder that are layers themselves."""
# Tasks return pictures as arrays; who draws them is decided above and below.
NEVER = {"tasks": {"draw"}}


def below() -> dict[str, set[str]]:
    """For every layer, all the layers that it may import."""
    found: dict[str, set[str]] = {}
    for name, on, _ in LAYERS:
        found[name] = set(on).union(*(found[other] for other in on))
    return {name: under - NEVER.get(name, set()) for name, under in found.items()}


def picture() -> str:
    """The layers as text, highest first."""
    lines = [f"{name:13}{owns:76}{'-> ' + ', '.join(on) if on else ''}".rstrip() for name, on, owns in LAYERS[::-1]]
    return "\n".join(lines)


def drawing() -> str:
    """The layers as a Mermaid graph, with an arrow for every real import that no longer way explains."""
    direct: dict[str, set[str]] = {name: set() for name, _, _ in LAYERS}
    for path, tree in parsed().items():
        own = layer(path.relative_to(SOURCE).with_suffix("").parts)
        for target in imported(tree) if own else ():
            direct[str(own)].add(layer(target) or "ground")
    under: dict[str, set[str]] = {}
    lines = ["graph TD"]
    for name, _, _ in LAYERS:
        others = direct[name] - {name}
        under[name] = others.union(*(under[other] for other in others))
        nearest = {other for other in others if not any(other in under[via] for via in others - {other})}
        lines += [f"    {name} --> {other}" for other in sorted(nearest)]
    return "\n".join(lines)


BELOW = below()
SPEAKS_NO_DTYPE = ("recipe", "checkpoint", "data", "journal", "train", "tasks", "runs", "draw", "cli")
FORBIDDEN_NAMES = {"half", "bfloat16", "float16", "autocast"}
DEVICE_WORDS = {"cpu", "cuda", "mps", "xpu", "hip", "rocm", "tpu", "xla"}


def layer(parts: tuple[str, ...]) -> str | None:
    """The layer of a module path below halfstep; None for the package's own front door."""
    if parts and parts[0] in GROUND:
        return "ground"
    room = ROOMS.get(parts[:2])
    return room or (parts[0] if parts and parts[0] in BELOW else None)


def files() -> list[Path]:
    found = sorted(SOURCE.rglob("*.py"))
    assert len(found) >= 30, "the source tree was not found"
    return found


@cache
def parsed() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in files()}


def imported(tree: ast.AST) -> list[tuple[str, ...]]:
    """Every halfstep module that a file imports, wherever in it."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which layer is meant"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return [tuple(name.split(".")[1:]) for name in found if name.split(".")[0] == "halfstep"]


def upward_arrows(path: Path, tree: ast.AST) -> list[str]:
    own = layer(path.relative_to(SOURCE).with_suffix("").parts)
    if own is None:
        return []
    arrows = []
    for target in imported(tree):
        other = layer(target)
        if other != own and other not in BELOW[own]:
            arrows.append(f"{path.relative_to(SOURCE)} ({own}) imports halfstep.{'.'.join(target)} ({other})")
    return arrows


def arrows_into(tower: set[str], path: Path, tree: ast.AST) -> list[str]:
    """Return the imports of a tower's modules, those by a name in a string included."""
    named = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    modules = [tuple(name.split(".")[1:]) for name in named if re.fullmatch(r"halfstep(\.[a-z_]+)+", name)]
    return [
        f"{path.relative_to(SOURCE)} imports halfstep.{'.'.join(target)}"
        for target in [*imported(tree), *modules]
        if layer(target) in tower
    ]


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


def test_every_folder_is_a_known_layer() -> None:
    folders = {p.name for p in SOURCE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders <= set(BELOW) - set(ROOMS.values()) | {"recipes"}
    assert all((SOURCE / folder / name).exists() or (SOURCE / folder / f"{name}.py").exists() for folder, name in ROOMS)
    modules = {p.stem for p in SOURCE.glob("*.py")} - {"__init__", "__main__"}
    assert modules <= GROUND


def test_imports_point_down() -> None:
    assert [arrow for path, tree in parsed().items() for arrow in upward_arrows(path, tree)] == []


def test_the_library_imports_nothing_of_the_trainer() -> None:
    """By the list of layers, and by every import, also by one inside a function or by a name in a string."""
    assert {name: BELOW[name] - LIBRARY for name in LIBRARY if BELOW[name] - LIBRARY} == {}
    assert BELOW["doctor"] & TRAINER == {"recipe_yaml"}
    assert LIBRARY.isdisjoint(TRAINER)
    assert LIBRARY | TRAINER | {"doctor", "selftest"} == set(BELOW)
    ours = {
        path: tree
        for path, tree in parsed().items()
        if layer(path.relative_to(SOURCE).with_suffix("").parts) in LIBRARY
    }
    assert len(ours) > 150
    assert [arrow for path, tree in ours.items() for arrow in arrows_into(TRAINER, path, tree)] == []


def test_upper_layers_speak_no_dtype() -> None:
    upper = {p: tree for p, tree in parsed().items() if p.relative_to(SOURCE).parts[0] in SPEAKS_NO_DTYPE}
    assert len(upper) > 100
    assert {str(p.relative_to(SOURCE)): words for p, tree in upper.items() if (words := words_about_dtypes(tree))} == {}


def test_the_step_is_usable_alone() -> None:
    for path in (SOURCE / "step").glob("*.py"):
        tree = ast.parse(path.read_text())
        names = {alias.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
        names |= {(n.module or "").split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert not names & {"yaml", "logging", "pathlib", "io", "typer", "rich", "json"}, path.name


@pytest.mark.parametrize(
    ("place", "code", "wrong"),
    [
        ("precision/bad.py", "from halfstep.step.window import Window", 1),
        ("errors.py", "import halfstep.precision.names", 1),
        ("step/fine.py", "from halfstep.observe.precision_check import PrecisionObserver", 0),
        ("step/bad.py", "from halfstep import Stepper", 1),
        ("cli/fine.py", "from halfstep._version import __version__", 0),
        ("observe/bad.py", "def f():\n    from halfstep.step import lane", 1),
        ("tasks/bad.py", "from halfstep.draw.curves import plot", 1),
        ("train/fine.py", "from halfstep.draw.curves import plot", 0),
        ("measure/bad.py", "from halfstep.runs.recipe_case import build_recipe_case", 1),
        ("guard/bad.py", "from halfstep.checkpoint.packing import pack_state", 1),
        ("guard/failed_steps/fine.py", "from halfstep.checkpoint.packing import pack_state", 0),
        ("adapters/bad.py", "from halfstep.recipe.sources import read_recipe", 1),
        ("doctor/fine.py", "from halfstep.recipe.sources import read_recipe_text", 0),
        ("doctor/bad.py", "from halfstep.recipe.schema import GuardOptions", 1),
        ("runs/fine.py", "from halfstep.measure.case import Case", 0),
    ],
)
def test_the_arrow_check_can_fail(place: str, code: str, wrong: int) -> None:
    assert len(upward_arrows(SOURCE / place, ast.parse(code))) == wrong


def test_a_trainer_module_by_its_name_is_an_arrow_too() -> None:
    lazy = ast.parse("import importlib\nimportlib.import_module('halfstep.runs.recipe_case')")
    assert len(arrows_into(TRAINER, SOURCE / "measure" / "bad.py", lazy)) == 1


@pytest.mark.parametrize(
    "code",
    ["x.half()", "x.bfloat16()", "torch.float16", "torch.bfloat16", "torch.autocast('cpu')", "x.to('cuda:0')"],
)
def test_the_dtype_check_can_fail(code: str) -> None:
    assert words_about_dtypes(ast.parse(code))


def test_the_picture_in_contributing_is_of_these_layers() -> None:
    assert picture() in (ROOT / "CONTRIBUTING.md").read_text()


def test_the_drawing_of_the_architecture_is_of_these_imports() -> None:
    assert drawing() in (ROOT / "docs" / "architecture.md").read_text()


if __name__ == "__main__":
    print(drawing() if "--drawing" in sys.argv else picture())
