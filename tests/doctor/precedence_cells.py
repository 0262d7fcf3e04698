"""Every combination of places that name a precision, as a project for the doctor and as a run of the library itself.

python -m tests.doctor.precedence_cells --record    # runs all of them and writes precedence.json beside this file
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("precedence.json")
Cell = dict[str, str]
"""The precision that each place names; a place that is silent is left out. `start` is how the run is started."""
SAID = ("", "fp32", "bf16", "fp16")
_ACCELERATE = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
# On a CPU Lightning puts bf16-mixed in place of 16-mixed; 16-true it takes as it is.
_LIGHTNING = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-true"}
_FLAGS = {"fp32": {"bf16": False, "fp16": False}, "bf16": {"bf16": True}, "fp16": {"fp16": True}}
_LAUNCHER = "distributed_type: 'NO'\nnum_processes: 1\nnum_machines: 1\nmixed_precision: '{}'\n"
_ERROR = "error"


def _all(start: str, *places: str) -> Iterator[Cell]:
    for words in itertools.product(SAID, repeat=len(places)):
        said = {place: word for place, word in zip(places, words, strict=True) if word}
        yield {"start": start, **said}


def cells() -> dict[str, list[Cell]]:
    """Return the cells of each tool."""
    own = ("code", "flag", "file")
    return {
        "accelerate": [
            *_all("accelerate", "code", "flag", "file", "environment"),
            *_all("python", "code", "file", "environment"),
        ],
        # TrainingArguments come from one of three places; the launcher's words are named for what they are.
        "transformers": [
            *(cell for place in own for cell in _all("accelerate", place, "launcher flag", "launcher file")),
            *(cell for place in own for cell in _all("python", place, "environment")),
        ],
        "lightning": list(_all("python", "code", "environment")),
        # jsonargparse reads from left to right: a flag before --config is an early one.
        "lightning cli": [
            *_all("python", "flag", "file", "default", "environment"),
            *_all("python", "early flag", "file", "default"),
        ],
        "fabric": [*_all("python", "code", "environment"), *_all("fabric", "code", "flag")],
    }


# -- as a project -----------------------------------------------------------------------------------------------------


def write_project(tool: str, cell: Cell, folder: Path) -> None:
    """Write the cell as the files that a person would have."""
    folder.mkdir(parents=True, exist_ok=True)
    files = _PROJECTS[tool](cell)
    for name, text in files.items():
        (folder / name).write_text(text)


def _accelerate_project(cell: Cell) -> dict[str, str]:
    given = f'mixed_precision="{_ACCELERATE[cell["code"]]}"' if "code" in cell else ""
    files = {"train.py": f"from accelerate import Accelerator\n\naccelerator = Accelerator({given})\n"}
    return files | _launcher(cell, cell.get("file"), cell.get("flag"), "train.py")


def _launcher(cell: Cell, file: str | None, flag: str | None, script: str) -> dict[str, str]:
    files = {"accelerate.yaml": _LAUNCHER.format(_ACCELERATE[file])} if file else {}
    named = "--config_file accelerate.yaml " if file else ""
    flagged = f"--mixed_precision {_ACCELERATE[flag]} " if flag else ""
    start = f"accelerate launch {named}{flagged}" if cell["start"] == "accelerate" else "python "
    variable = cell.get("environment")
    exported = f"export ACCELERATE_MIXED_PRECISION={_ACCELERATE[variable]}\n" if variable else ""
    return {**files, "run.sh": f"#!/bin/bash\n{exported}{start}{script}\n"}


def _transformers_project(cell: Cell) -> dict[str, str]:
    flags = "".join(f" --{k} {v}" for k, v in _FLAGS[cell["flag"]].items()) if "flag" in cell else ""
    given = "".join(f", {k}={v}" for k, v in _FLAGS[cell["code"]].items()) if "code" in cell else ""
    parser = "from transformers import HfArgumentParser, TrainingArguments\n\nHfArgumentParser(TrainingArguments)\n"
    direct = f'from transformers import TrainingArguments\n\nTrainingArguments("out"{given})\n'
    files = {"train.py": direct if "code" in cell else parser}
    script = f"train.py{flags}"
    if "file" in cell:
        content = {"output_dir": "out", "num_train_epochs": 1, **_FLAGS[cell["file"]]}
        files["args.json"] = json.dumps(content, indent=1)
        script = "train.py args.json"
    return files | _launcher(cell, cell.get("launcher file"), cell.get("launcher flag"), script)


def _lightning_project(cell: Cell) -> dict[str, str]:
    given = f'precision="{_LIGHTNING[cell["code"]]}"' if "code" in cell else ""
    return {"train.py": f"import lightning\n\nlightning.Trainer({given})\n", "run.sh": _shell(cell, "python train.py")}


def _shell(cell: Cell, command: str, variable: str = "PL_TRAINER_PRECISION") -> str:
    exported = f"export {variable}={_LIGHTNING[cell['environment']]}\n" if "environment" in cell else ""
    return f"#!/bin/bash\n{exported}{command}\n"


def _cli_project(cell: Cell) -> dict[str, str]:
    given = f'trainer_defaults={{"precision": "{_LIGHTNING[cell["default"]]}"}}' if "default" in cell else ""
    files = {"main.py": f"from lightning.pytorch.cli import LightningCLI\n\nLightningCLI({given})\n"}
    command = "python main.py fit"
    if "early flag" in cell:
        command += f" --trainer.precision {_LIGHTNING[cell['early flag']]}"
    if "file" in cell:
        files["config.yaml"] = f"trainer:\n  precision: {_LIGHTNING[cell['file']]}\n  max_epochs: 1\n"
        command += " --config config.yaml"
    if "flag" in cell:
        command += f" --trainer.precision {_LIGHTNING[cell['flag']]}"
    return {**files, "run.sh": _shell(cell, command)}


def _fabric_project(cell: Cell) -> dict[str, str]:
    given = f'precision="{_LIGHTNING[cell["code"]]}"' if "code" in cell else ""
    flag = f"--precision {_LIGHTNING[cell['flag']]} " if "flag" in cell else ""
    start = f"fabric run {flag}" if cell["start"] == "fabric" else "python "
    code = f"from lightning.fabric import Fabric\n\nFabric({given})\n"
    return {"train.py": code, "run.sh": _shell(cell, f"{start}train.py", "LT_PRECISION")}


_PROJECTS: dict[str, Callable[[Cell], dict[str, str]]] = {
    "accelerate": _accelerate_project,
    "transformers": _transformers_project,
    "lightning": _lightning_project,
    "lightning cli": _cli_project,
    "fabric": _fabric_project,
}


# -- as a run of the library ------------------------------------------------------------------------------------------


def _launched_by_accelerate(cell: Cell, file: str | None, flag: str | None) -> None:
    """Put the variable that `accelerate launch` hands to a script into the environment, by accelerate's own code."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    words = ["--cpu"]
    if flag:
        words += ["--mixed_precision", _ACCELERATE[flag]]
    if file:
        place = Path("accelerate.yaml")
        place.write_text(_LAUNCHER.format(_ACCELERATE[file]))
        words += ["--config_file", str(place)]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args([*words, "train.py"]))
    os.environ["ACCELERATE_MIXED_PRECISION"] = prepare_simple_launcher_cmd_env(args)[1]["ACCELERATE_MIXED_PRECISION"]


def _set_accelerates_variable(cell: Cell) -> None:
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    if "environment" in cell:
        os.environ["ACCELERATE_MIXED_PRECISION"] = _ACCELERATE[cell["environment"]]


def _run_accelerate(cell: Cell) -> str:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    _set_accelerates_variable(cell)
    if cell["start"] == "accelerate":
        _launched_by_accelerate(cell, cell.get("file"), cell.get("flag"))
    AcceleratorState._reset_state(True)
    given = {"mixed_precision": _ACCELERATE[cell["code"]]} if "code" in cell else {}
    word = Accelerator(cpu=True, **given).mixed_precision
    return {"no": "fp32"}.get(word, word)


def _run_transformers(cell: Cell) -> str:
    from transformers import HfArgumentParser, TrainingArguments

    _set_accelerates_variable(cell)
    if cell["start"] == "accelerate":
        _launched_by_accelerate(cell, cell.get("launcher file"), cell.get("launcher flag"))
    if "flag" in cell:
        flags = [word for k, v in _FLAGS[cell["flag"]].items() for word in (f"--{k}", str(v))]
        words = ["--output_dir", "out", "--use_cpu", "True", *flags]
        (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words, look_for_args_file=False)
    elif "file" in cell:
        Path("args.json").write_text(json.dumps({"output_dir": "out", "use_cpu": True, **_FLAGS[cell["file"]]}))
        (arguments,) = HfArgumentParser(TrainingArguments).parse_json_file("args.json")
    else:
        arguments = TrainingArguments("out", use_cpu=True, **_FLAGS.get(cell.get("code", ""), {}))
    return {"no": "fp32"}.get(arguments.mixed_precision, arguments.mixed_precision)


_WORDS = {word: name for name, word in _LIGHTNING.items()}


def _set_variable(name: str, cell: Cell) -> None:
    os.environ.pop(name, None)
    if "environment" in cell:
        os.environ[name] = _LIGHTNING[cell["environment"]]


def _run_lightning(cell: Cell) -> str:
    from lightning import Trainer

    _set_variable("PL_TRAINER_PRECISION", cell)
    given = {"precision": _LIGHTNING[cell["code"]]} if "code" in cell else {}
    return _WORDS[Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, **given).precision]


def _run_cli(cell: Cell) -> str:
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    _set_variable("PL_TRAINER_PRECISION", cell)
    words = ["--trainer.precision", _LIGHTNING[cell["early flag"]]] if "early flag" in cell else []
    if "file" in cell:
        Path("config.yaml").write_text(f"trainer:\n  precision: {_LIGHTNING[cell['file']]}\n")
        words += ["--config", "config.yaml"]
    if "flag" in cell:
        words += ["--trainer.precision", _LIGHTNING[cell["flag"]]]
    quiet: dict[str, Any] = {"accelerator": "cpu", "logger": False}
    given = {"precision": _LIGHTNING[cell["default"]]} if "default" in cell else {}
    cli = LightningCLI(
        BoringModel, args=words, run=False, trainer_defaults={**quiet, **given}, save_config_callback=None
    )
    return _WORDS[cli.trainer.precision]


def _run_fabric(cell: Cell) -> str:
    from lightning.fabric import Fabric

    _set_variable("LT_PRECISION", cell)
    os.environ.pop("LT_CLI_USED", None)
    if cell["start"] == "fabric":
        # What `fabric run` sets before it runs the script (lightning/fabric/cli.py, _set_env_variables).
        os.environ["LT_CLI_USED"] = "1"
        if "flag" in cell:
            os.environ["LT_PRECISION"] = _LIGHTNING[cell["flag"]]
    given = {"precision": _LIGHTNING[cell["code"]]} if "code" in cell else {}
    fabric = Fabric(accelerator="cpu", devices=1, **given)
    return _WORDS[fabric._connector._precision_input]


_RUNS: dict[str, Callable[[Cell], str]] = {
    "accelerate": _run_accelerate,
    "transformers": _run_transformers,
    "lightning": _run_lightning,
    "lightning cli": _run_cli,
    "fabric": _run_fabric,
}


def observe_here(tool: str, chosen: Iterable[Cell]) -> list[str]:
    """Return what the library itself makes of each cell; `error` where it refuses."""
    warnings.simplefilter("ignore")
    found = []
    for cell in chosen:
        try:
            found.append(_RUNS[tool](cell))
        except ValueError:
            found.append(_ERROR)
    return found


def observe(chosen: dict[str, list[Cell]], folder: Path) -> dict[str, list[str]]:
    """Return the same for cells of several tools, from a process of its own that keeps files in `folder`."""
    from tests.support import forked_python

    root = Path(__file__).parents[2]
    # No file in accelerate's own place, and no variable of this process.
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "PL_", "LT_"))}
    path = os.pathsep.join([str(root / "src"), str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**kept, "HF_HOME": str(folder / "hf"), "PYTHONPATH": path}
    words = [sys.executable, "-m", "tests.doctor.precedence_cells"]
    done = forked_python.run(words, input=json.dumps(chosen), env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def record() -> None:
    """Run every cell and write the record."""
    import tempfile

    names = ("accelerate", "transformers", "lightning", "jsonargparse")
    found: dict[str, Any] = {}
    chosen = cells()
    with tempfile.TemporaryDirectory() as folder:
        seen = observe(chosen, Path(folder))
    for tool, results in seen.items():
        found[tool] = [{**cell, "runs in": result} for cell, result in zip(chosen[tool], results, strict=True)]
        print(f"{tool}: {len(results)} cells, {results.count(_ERROR)} refused")
    rows = ",\n".join(
        f"  {json.dumps(tool)}: [\n" + ",\n".join(f"   {json.dumps(row)}" for row in rows) + "\n  ]"
        for tool, rows in found.items()
    )
    head = {
        "command": "python -m tests.doctor.precedence_cells --record",
        "versions": {name: metadata.version(name) for name in names},
    }
    RECORD.write_text(json.dumps(head, indent=1)[:-2] + f',\n "cells": {{\n{rows}\n }}\n}}\n')


if __name__ == "__main__":
    if sys.argv[1:] == ["--record"]:
        record()
    else:
        print(json.dumps({tool: observe_here(tool, given) for tool, given in json.load(sys.stdin).items()}))
