"""The package as a newcomer meets it: names, README, the example, and what may be imported without extras."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import halfstep
from tests.support import forked_python

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_every_public_name_is_there_and_no_other() -> None:
    assert halfstep.__all__ == sorted(halfstep.__all__)
    assert {"Stepper", "island", "choose_precision", "windows", "Ema"} <= set(halfstep.__all__)
    for name in halfstep.__all__:
        assert getattr(halfstep, name) is not None
        assert name in dir(halfstep)
    with pytest.raises(AttributeError, match="no attribute 'Steper'"):
        halfstep.Steper  # noqa: B018


def test_importing_halfstep_does_not_import_torch() -> None:
    code = "import sys, halfstep; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_step_loads_nothing_slow_that_it_may_not_need() -> None:
    code = (
        "import sys; from halfstep import Stepper; assert not {'torch.distributed.tensor', 'sympy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_core_needs_no_extra() -> None:
    """Every module is imported with the packages of the extras made absent."""
    code = """
import importlib, pkgutil, sys
ABSENT = {"yaml", "pydantic", "safetensors", "psutil", "matplotlib", "jinja2", "tensorboard", "pynvml", "torchvision",
          "timm", "segmentation_models_pytorch", "torchmetrics", "PIL", "webdataset", "diffusers", "wandb",
          "accelerate", "lightning", "transformers", "peft", "pytest", "hypothesis"}
class Gone:
    def find_spec(self, name, path=None, target=None):
        frame = sys._getframe(1)
        while "importlib" in frame.f_globals["__name__"]:
            frame = frame.f_back
        if name.split(".")[0] in ABSENT and frame.f_globals["__name__"].startswith("halfstep"):
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Gone())
import halfstep
LATER = ("halfstep.cli._", "halfstep.recipe", "halfstep.data", "halfstep.journal",
         "halfstep.checkpoint", "halfstep.train", "halfstep.runs", "halfstep.tasks",
         "halfstep.draw", "halfstep.doctor", "halfstep.report", "halfstep.__main__", "halfstep.guard.failed_steps",
         "halfstep.adapters.accelerate", "halfstep.adapters.lightning", "halfstep.adapters.transformers",
         "halfstep.adapters.replay", "halfstep.selftest.page", "halfstep.selftest.parts.resume")
found = [m.name for m in pkgutil.walk_packages(halfstep.__path__, "halfstep.", onerror=lambda name: None)]
names = [name for name in found if not name.startswith(LATER)]
for name in names:
    importlib.import_module(name)
try:
    halfstep.fit
except halfstep.HalfstepError as error:
    assert error.id == "missing-extra"
else:
    raise AssertionError("training needs extras")
print(len(names))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(done.stdout) >= 35


def test_the_readme_is_short_and_its_loop_is_ten_lines() -> None:
    """What its blocks print is compared by tests/docs/test_blocks.py."""
    assert len(README.splitlines()) <= 120
    (loop,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    lines = [line for line in loop.splitlines() if line and not line.startswith(("import", "print"))]
    assert len(lines) <= 10


def _record(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())


def _figures() -> dict[str, str]:
    """What the records say, in README's words, by the benchmark that made them."""
    loops, named, healthy, kills = (_record(n) for n in ("real_loops", "culprits", "healthy_runs", "rank_kills"))
    unet = next(one for one in _record("real_data")["results"] if one["recipe"] == "aerial_buildings")
    fp32, bf16 = (f"{row['metric_mean']:.3f} ± {row['metric_sd']:.3f}" for row in unet["rows"])
    worst = max(abs(cell["error"]) for cell in _record("estimate_accuracy")["cells"])
    assert loops["failed"] == kills["hangs"] == kills["late"] == sum(row["lost"] for row in kills["rows"]) == 0
    assert kills["bitwise"] == kills["runs"]
    return {
        "real_loops": f"{loops['held']} of {loops['loops']}; the other {loops['documented']} are documented",
        "culprits": f"{named['named']} of {named['of']}",
        "healthy_runs": f"{healthy['stopped']} of {healthy['healthy']}",
        "step_overhead": f"{_record('step_overhead')['halfstep']['median']:.2f}x",
        "estimate_accuracy": f"off by {worst:.2%}".replace("%", " %"),
        "rank_kills": f"a run of {kills['steps']} steps in which ranks were killed {kills['kills']} times",
        "real_data": f"{unet['speedup']['median']:.2f}x as fast as fp32, IoU {bf16} against {fp32}",
    }


@pytest.mark.parametrize("benchmark", _figures())
def test_the_readme_has_the_figures_of_the_records(benchmark: str) -> None:
    (row,) = [line for line in README.splitlines() if f"`python benchmarks/{benchmark}.py" in line]
    assert _figures()[benchmark] in row
    if benchmark == "real_data":
        steps = re.search(r"train.steps=(\d+)", _record(benchmark)["command"])
        assert steps is not None
        assert f"{steps[1]} steps" in row


def test_the_docs_quote_the_overhead_that_was_measured() -> None:
    page = (ROOT / "docs" / "step.md").read_text()
    measured = json.loads((ROOT / "benchmarks" / "step_overhead.json").read_text())
    assert measured["command"].startswith("python benchmarks/step_overhead.py")
    assert all(measured[arm]["pairs"] >= 60 for arm in ("aa", "halfstep", "fabric", "accelerate"))
    names = {
        "aa": "by hand, measured twice",
        "halfstep": "halfstep",
        "fabric": "Lightning Fabric",
        "accelerate": "accelerate",
    }
    for arm, name in names.items():
        low, median, high = (measured[arm][key] for key in ("low", "median", "high"))
        assert f"| {name} | {median:.2f} | {low:.2f} - {high:.2f} |" in page


@pytest.mark.parametrize(
    "precision", ["auto", *(pytest.param(p, marks=pytest.mark.full) for p in ("fp32", "bf16", "fp16"))]
)
@pytest.mark.slow
def test_the_example_trains_and_skips_one_batch(precision: str) -> None:
    done = forked_python.run([sys.executable, "examples/own_loop.py", precision], cwd=ROOT, check=True)
    last = done.stdout.splitlines()[-1]
    assert "'loss_not_finite': 1" in last
    assert float(last.rpartition(" ")[2]) > 0.9


def test_links_in_the_front_pages_lead_somewhere() -> None:
    for page in ("README.md", "CONTRIBUTING.md", "zoo/README.md", "docs/step.md", "docs/replay.md"):
        text = (ROOT / page).read_text()
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"


@pytest.mark.slow
def test_a_case_loads_nothing_of_the_trainer() -> None:
    code = """
import contextlib, io, sys
from halfstep.cli.main import main
with contextlib.redirect_stdout(io.StringIO()) as shown:
    for words in (["audit", "tests.support.cases:linear", "--precision", "bf16"],
                  ["estimate", "tests.support.cases:linear", "--device", "t4", "--no-search"]):
        sys.argv = ["halfstep", *words]
        with contextlib.suppress(SystemExit):
            main()
assert "linear" in shown.getvalue(), shown.getvalue()
trainer = tuple(f"halfstep.{name}" for name in ("recipe", "data", "journal", "checkpoint", "train", "tasks", "runs"))
print([name for name in sys.modules if name.startswith(trainer)])
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout
