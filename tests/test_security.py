"""What SECURITY.md says, held to the source: who unpickles, who executes, who starts a process."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "halfstep"
PAGE = " ".join((ROOT / "SECURITY.md").read_text().split())

# By the last part of a call's name, so that an alias of a module hides nothing; `load` alone is everybody's word.
ALWAYS = {"eval", "exec", "__import__", "import_module", "Unpickler", "read_pickle", "load_state_dict_from_url"}
ALWAYS |= {"full_load", "unsafe_load", "spec_from_file_location", "run_module", "run_path", "system", "popen"}
ALWAYS |= {"Popen", "check_output", "check_call", "from_pretrained", "ProcessPoolExecutor", "DataLoader", "load_url"}
ALWAYS |= {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "send_object_list"}
READERS = {"pickle", "torch", "marshal", "dill", "cloudpickle", "joblib", "shelve", "yaml", "numpy", "np", "hub", "dcp"}
READERS |= {"serialization", "_pickle", "checkpoint", "cPickle"}

ALLOWED = {
    # Restricted to tensors: the one place that unpickles a file.
    "train/weights.py": {"torch.load"},
    # Code of the user's own, named on the command line or installed.
    "runs/registry.py": {"exec", "importlib.import_module"},
    "measure/subject.py": {"importlib.import_module"},
    # The statements of the user's own loop, from its source, run again for a diagnosis by `halfstep.watch`.
    "adapters/loop_code.py": {"exec"},
    # The display of a kernel that has loaded IPython.
    "journal/notebook.py": {"importlib.import_module"},
    # Modules of this package, by the names of its own files.
    "__init__.py": {"_importlib.import_module"},
    "callable_package.py": {"import_module"},
    "cli/_commands.py": {"importlib.import_module"},
    "data/sets/getting.py": {"importlib.import_module"},
    "doctor/code/checking.py": {"importlib.import_module"},
    "runs/resolve.py": {"importlib.import_module"},
    "selftest/worker.py": {"importlib.import_module"},
    "store/process.py": {"importlib.import_module", "subprocess.Popen"},
    # Two modules of torchao, by the kind of a state: any other kind is a KeyError.
    "step/storage/small_states.py": {"import_module"},
    # Safetensors and GGUF files only, without remote code; from the hub only with --download.
    "data/gguf_base.py": {"AutoModelForCausalLM.from_pretrained", "AutoTokenizer.from_pretrained"},
    "tasks/models/text/building.py": {"AutoConfig.from_pretrained", "AutoModelForCausalLM.from_pretrained"},
    # A folder that an export has written, without remote code.
    "tasks/models/text/tokenizer_files.py": {"AutoTokenizer.from_pretrained"},
    # Local folders of safetensors only.
    "tasks/models/latent/pretrained.py": {"kind.from_pretrained"},
    # Processes of our own, which speak JSON lines, or pickle between parent and child.
    "measure/worker_process.py": {"subprocess.Popen"},
    "runs/bench_recipe.py": {"subprocess.Popen"},
    "cli/_out_of_memory.py": {"subprocess.run"},
    "selftest/parts/ranks.py": {"ProcessPoolExecutor"},
    "data/loader.py": {"DataLoader"},
    "data/check/facts.py": {"ProcessPoolExecutor"},
    # The code that an export prints, in a process of its own; its answers are arrays, read without pickles.
    "runs/printed_code.py": {"subprocess.run", "np.load"},
    # `python -m halfstep.train`, which is the command.
    "train/__main__.py": {"runpy.run_module"},
    # A fixed program: sysctl.
    "precision/hardware.py": {"subprocess.run"},
    # The name of the operating system.
    "selftest/facts.py": {"platform.system"},
}


def dotted(node: ast.expr) -> str:
    """Return a call's name as it is written; calls in the middle of it are left out."""
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else node.attr
    return node.id if isinstance(node, ast.Name) else ""


def risky(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls that unpickle, execute or start something; names imported from a module count as its own."""
    nodes = list(ast.walk(tree))
    homes: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            homes |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            homes |= {alias.asname: alias.name for alias in node.names if alias.asname}
    for node in (node for node in nodes if isinstance(node, ast.Call)):
        written = dotted(node.func)
        first, _, rest = written.partition(".")
        name = f"{homes.get(first, first)}{'.' if rest else ''}{rest}"
        *owner, last = name.split(".")
        method = isinstance(node.func, ast.Attribute) and last == "eval"  # a module's own mode
        loads = last in ("load", "loads", "open") and bool(owner) and owner[-1] in READERS
        if loads or (last in ALWAYS and not method) or (owner == ["subprocess"] and last in ("run", "call")):
            yield written, node


@cache
def found() -> dict[str, list[tuple[str, ast.Call]]]:
    """Return such calls of every file, by its name."""
    calls = {path.relative_to(SOURCE).as_posix(): list(risky(ast.parse(path.read_text()))) for path in files()}
    return {name: some for name, some in calls.items() if some}


def files() -> list[Path]:
    some = sorted(SOURCE.rglob("*.py"))
    assert len(some) > 300
    return some


def test_nothing_unpickles_executes_or_starts_a_process_outside_the_list() -> None:
    assert {name: {call for call, _ in calls} for name, calls in found().items()} == ALLOWED


def test_a_file_is_unpickled_in_one_place_and_restricted() -> None:
    ((_, call),) = found()["train/weights.py"]
    given = {word.arg: word.value for word in call.keywords}
    assert isinstance(given["weights_only"], ast.Constant)
    assert given["weights_only"].value is True
    assert "torch.load(weights_only=True)`, in one place" in PAGE


def test_no_process_is_started_through_a_shell() -> None:
    words = [word for calls in found().values() for _, call in calls for word in call.keywords]
    assert any(word.arg == "capture_output" for word in words), "keywords are read"
    assert [word for word in words if word.arg == "shell"] == []


def test_pickles_are_looked_at_by_their_opcodes_alone() -> None:
    """The modules that import anything of pickle's, and what they take from it."""
    users = {
        path.relative_to(SOURCE).as_posix(): set(re.findall(r"\b(?:pickle|pickletools)\.\w+", path.read_text()))
        for path in files()
        if re.search(r"^\s*(import|from) (pickle|pickletools)\b", path.read_text(), flags=re.MULTILINE)
    }
    assert users == {
        "checkpoint/sealed.py": {"pickletools.genops"},
        "doctor/pickled.py": {"pickletools.genops"},
        "train/weights.py": {"pickle.UnpicklingError"},
    }


def test_nothing_is_written_as_a_pickle() -> None:
    written = re.compile(r"\b(torch\.save|pickle\.dumps?|Pickler|np\.save|numpy\.save|joblib\.dump)\(")
    # Names in strings are advice to a person; only files that name one at all are parsed.
    naming = [path for path in files() if written.search(path.read_text())]
    assert naming
    calls = [dotted(n.func) for p in naming for n in ast.walk(ast.parse(p.read_text())) if isinstance(n, ast.Call)]
    assert [name for name in calls if written.match(f"{name}(")] == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle\npickle.loads(b'')",
        "import torch as t\nt.load('x')",
        "from torch import load as read\nread('x')",
        "eval('1')",
        "exec('1')",
        "__import__('os')",
        "import os\nos.system('ls')",
        "import subprocess as s\ns.run('ls', shell=True)",
        "from yaml import unsafe_load\nunsafe_load('')",
        "import torch.distributed as dist\ndist.broadcast_object_list([])",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import torch.distributed.checkpoint as dcp\ndcp.load({})",
    ],
)
def test_the_scan_can_fail(code: str) -> None:
    assert len(list(risky(ast.parse(code)))) == 1


def test_a_models_own_mode_is_no_evaluation() -> None:
    assert list(risky(ast.parse("model.eval()\njson.loads(x)\nself.load(x)"))) == []


def test_the_floor_of_torch_is_the_one_that_the_page_explains() -> None:
    assert '"torch>=2.10"' in (ROOT / "pyproject.toml").read_text()
    assert "PyTorch 2.10 is the oldest version supported" in PAGE
