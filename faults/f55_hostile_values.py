"""Launch variables, settings, weights, checkpoints and journals that no careful person would write."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from faults import child, rig
from faults.judged import first_wrong, outcome
from faults.outcome import Outcome
from halfstep.errors import HalfstepError
from halfstep.launch_variables import convert_slurm_variables, read_launched_rank
from halfstep.recipe.sources import read_recipe
from halfstep.report.run_charts import compute_moving_mean
from halfstep.runs.resolve import resolve_run_recipe
from halfstep.train.process_group import resolve_device
from halfstep.train.run_folder import check_run
from halfstep.train.state import check_state_components
from halfstep.train.weights import load_weights

ID = "F55"
WHAT = "invalid launch variables, settings, weights and checkpoints are refused by name, without a traceback"
DATA, TAKEN, CONFIGURATION, INCOMPATIBLE, GAVE_UP = 65, 73, 78, 79, 80
TWO = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
NUMBERS = ("", "abc", "-1", "1e3", "9" * 5000, "\u0663", "0x2", " 2", "2.0", "1" + "0" * 18)
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}


@dataclass(frozen=True)
class Case:
    code: int
    names: str
    """What the message must name."""
    use: Callable[[Path], object]


def run(full: bool) -> Outcome:
    trials: dict[str, str | None] = {}
    with rig.scratch() as folder:
        for name, case in _cases(full).items():
            place = folder / "here"
            place.mkdir()
            trials[name] = _refused(case, place)
            shutil.rmtree(place)
        trials["a run of one process"] = first_wrong(("it is one", lambda: read_launched_rank({}).world_size == 1))
        trials["a rank of two"] = first_wrong(("it is one", lambda: read_launched_rank({**TWO, "RANK": "1"}).rank == 1))
        trials["a curve of nothing"] = first_wrong(("it is empty", lambda: compute_moving_mean([]) == []))
    return outcome(trials, "refused by name")


def _refused(case: Case, place: Path) -> str | None:
    try:
        case.use(place)
    except HalfstepError as error:
        said, code = str(error), error.exit_code
        return first_wrong(
            (f"exit code {code}: {said[:200]}", lambda: code == case.code),
            (f"it is named: {said[:200]}", lambda: case.names in said),
        )
    except Exception as error:
        return f"a traceback: {type(error).__name__} {str(error)[:100]}"
    return "not refused"


def _cases(full: bool) -> dict[str, Case]:
    cases = {**_launches(), **_settings(), **_files()}
    if full:
        cases |= {f"{name}, through the command": _commanded(name) for name in COMMANDS}
    return cases


def _launches() -> dict[str, Case]:
    cases = {}
    for name in ("WORLD_SIZE", "RANK", "MASTER_PORT", "LOCAL_RANK"):
        for text in NUMBERS:
            cases[f"{name}={text[:12]!r}"] = _launch({**TWO, name: text}, name)
    for text in ("2", "5", "99999"):
        cases[f"RANK={text} of 2"] = _launch({**TWO, "RANK": text}, "RANK")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        cases[f"no {name}"] = _launch({key: value for key, value in TWO.items() if key != name}, name)
    for name in ("MASTER_PORT", "WORLD_SIZE"):
        cases[f"{name}=0"] = _launch({**TWO, name: "0"}, name)
    cases["MASTER_PORT=65536"] = _launch({**TWO, "MASTER_PORT": "65536"}, "MASTER_PORT")
    for name in ("SLURM_NTASKS", "SLURM_JOB_ID"):
        variables = {**STEP, name: "x"}
        cases[f"{name}=x"] = Case(CONFIGURATION, name, lambda place, given=variables: convert_slurm_variables(given))  # type: ignore[misc]
    return cases


def _launch(variables: dict[str, str], names: str) -> Case:
    return Case(CONFIGURATION, names, lambda place: read_launched_rank(variables))


def _settings() -> dict[str, Case]:
    words = {
        "world.timeout": ("1e308", "1e12"),
        "world.start_timeout": ("1e300",),
        "data.timeout": ("1e300",),
        "data.samples": ("1000000000000", "1000000001"),
    }
    cases = {
        f"{key}={value}": Case(CONFIGURATION, key, lambda place, word=f"{key}={value}": _resolved([word]))  # type: ignore[misc]
        for key, values in words.items()
        for value in values
    }
    for path in ("/etc/x.prom", "../x.prom", "a/../../x.prom"):
        cases[f"{path} in a recipe"] = Case(
            CONFIGURATION, "run.prometheus", lambda place, to=path: _own_recipe(place, to)
        )  # type: ignore[misc]
    for length in (300, 5000):
        name = "x" * 250 + "/" if length > 300 else "x"
        path = (name * length)[:length]
        cases[f"run.dir of {length} bytes"] = Case(TAKEN, "x" * 200, lambda place, to=path: _checked(place, to))  # type: ignore[misc]
    cases["train.device=meta"] = Case(CONFIGURATION, "meta", lambda place: resolve_device("meta"))
    cases["optimizer.lr=1e308"] = Case(GAVE_UP, "not finite", _diverging)
    return cases


def _resolved(words: list[str]) -> Any:
    return resolve_run_recipe(read_recipe("segmentation_tiny"), words).recipe


def _own_recipe(place: Path, metrics: str) -> None:
    file = place / "own.yaml"
    content = {**read_recipe("segmentation_tiny").raw, "run": {"prometheus": metrics}}
    file.write_text(yaml.safe_dump(content))
    resolve_run_recipe(read_recipe(str(file)))


def _checked(place: Path, path: str) -> None:
    check_run(_resolved([f"run.dir={place}/{path}"]), "long")


def _diverging(place: Path) -> None:
    """Train for one step and one skipped one: the guard has seen too few to give up."""
    import halfstep
    from tests.support.tiny_task import Tiny

    recipe = place / "own.yaml"
    recipe.write_text("task: tiny\n")
    settings = {**child.RECIPE, "optimizer.lr": 1e308, "schedule.warmup_steps": 0, "train.steps": 2, "train.ema": None}
    halfstep.fit(recipe, task=Tiny, settings={**settings, "run.dir": str(place / "run")}, quiet=True)


def _files() -> dict[str, Case]:
    good = {"task": "tiny", "train": {"batch_size": 4, "microbatches": 1}}
    recipes: dict[str, Any] = {
        "without train": {"task": "tiny"},
        "with a list for train": {**good, "train": []},
        "without a batch size": {**good, "train": {"microbatches": 1}},
        "with a text for a batch size": {**good, "train": {"batch_size": "4", "microbatches": 1}},
        "without micro-batches": {**good, "train": {"batch_size": 4}},
    }
    cases = {
        f"a checkpoint {name}": Case(DATA, "the checkpoint", lambda place, recipe=recipe: _opened(recipe))  # type: ignore[misc]
        for name, recipe in recipes.items()
    }
    cases["weights of no tensor"] = Case(INCOMPATIBLE, "empty.safetensors", _empty_weights)
    return cases


def _opened(recipe: dict[str, Any]) -> None:
    from halfstep.train.state import COMPONENTS

    plain: dict[str, Any] = {name: {} for name in COMPONENTS}
    check_state_components({**plain, "recipe": recipe}, "the checkpoint")


def _empty_weights(place: Path) -> None:
    file = place / "empty.safetensors"
    file.write_bytes(struct.pack("<Q", 2) + b"{}")
    load_weights(nn.Linear(2, 2), file, partial=True)


COMMANDS: dict[str, dict[str, str]] = {
    "WORLD_SIZE of nothing": {"WORLD_SIZE": ""},
    "RANK 5 of 2": {**TWO, "RANK": "5"},
    "no MASTER_ADDR": {"WORLD_SIZE": "2", "RANK": "0"},
    "MASTER_PORT of letters": {**TWO, "MASTER_PORT": "x"},
    "SLURM_NTASKS of letters": {**STEP, "SLURM_NTASKS": "x"},
}


def _commanded(name: str) -> Case:
    return Case(CONFIGURATION, "the variable" if "no " not in name else "without", lambda place: _command(name, place))


def _command(name: str, place: Path) -> None:
    import os
    import subprocess
    import sys

    words = [sys.executable, "-m", "halfstep", "train", "segmentation_tiny", f"run.dir={place / 'run'}"]
    done = subprocess.run(words, env={**os.environ, **COMMANDS[name]}, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, json.dumps(done.stderr)
    error = HalfstepError(done.stderr)
    error.exit_code = done.returncode
    raise error
