"""Values that look right and are read wrong elsewhere: read as meant here, or refused by key, value and range."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from faults.outcome import Outcome
from faults.recipe_check import Ending, in_process, through_the_command

ID = "F02"
WHAT = "a value that other YAML readers interpret differently is read as intended, or refused by name"
BASE = "task: segmentation\n"
LENGTH = "train: {epochs: 1}\n"


class Trap(NamedTuple):
    text: str
    reads: dict[str, Any] | None = None
    """Dotted keys with the values that they must come to."""
    says: tuple[str, ...] = ()
    """Where it must be refused: words that the refusal must have."""
    code: int = 78
    words: tuple[str, ...] = ()
    """What follows RECIPE on the command line."""


TRAPS: dict[str, Trap] = {
    "number without a dot": Trap(f"{LENGTH}optimizer: {{lr: 1e-4}}", {"optimizer.lr": 1e-4}),
    "number without a dot, on the line": Trap(LENGTH, {"optimizer.lr": 1e-4}, words=("optimizer.lr=1e-4",)),
    "number with a plus": Trap(f"{LENGTH}optimizer: {{lr: 1E+0}}", {"optimizer.lr": 1.0}),
    "whole number for a number": Trap(f"{LENGTH}optimizer: {{lr: 1}}", {"optimizer.lr": 1.0}),
    "number in quotes": Trap(f"{LENGTH}optimizer: {{lr: '1e-4'}}", says=("optimizer.lr", "'1e-4'", "a number above 0")),
    "a word that was false": Trap(f"{LENGTH}mixed_precision: no", {"precision": "fp32"}),
    "a folder called no": Trap(f"{LENGTH}data: {{path: no}}", {"data.path": "no"}),
    "a folder called on": Trap(f"{LENGTH}run: {{dir: on}}", {"run.dir": "on"}),
    "yes for a switch": Trap("train: {epochs: 1, compile: yes}", says=("train.compile", "'yes'", "true or false")),
    "1 for a switch": Trap("train: {epochs: 1, compile: 1}", says=("train.compile", "1", "true or false")),
    "TRUE for a switch": Trap("train: {epochs: 1, compile: TRUE}", {"train.compile": True}),
    "true for a number": Trap("train: {epochs: true}", says=("train.epochs", "True", "an integer above 0")),
    "time of day": Trap("train: {epochs: 1:30}", says=("train.epochs", "'1:30'", "an integer above 0")),
    "date": Trap(f"{LENGTH}run: {{dir: 2024-01-01}}", {"run.dir": "2024-01-01"}),
    "leading zero": Trap("train: {epochs: 010}", {"train.epochs": 10}),
    "octal": Trap("train: {epochs: 0o17}", {"train.epochs": 15}),
    "hexadecimal": Trap("train: {epochs: 0x10}", {"train.epochs": 16}),
    "underscore in a number": Trap("train: {epochs: 1_000}", says=("train.epochs", "'1_000'", "an integer")),
    "fraction of an epoch": Trap("train: {epochs: 1.5}", says=("train.epochs", "1.5", "an integer above 0")),
    "no epoch": Trap("train: {epochs: 0}", says=("train.epochs", "0", "above 0")),
    "epochs and steps": Trap("train: {epochs: 1, steps: 5}", says=("train.epochs", "train.steps", "one of the two")),
    "neither epochs nor steps": Trap("", says=("train.epochs", "train.steps")),
    "steps over epochs": Trap(LENGTH, {"train.steps": 5, "train.epochs": None}, words=("--steps", "5")),
    "NaN learning rate": Trap(f"{LENGTH}optimizer: {{lr: .nan}}", says=("optimizer.lr", "nan", "above 0")),
    "infinite learning rate": Trap(f"{LENGTH}optimizer: {{lr: .inf}}", says=("optimizer.lr", "inf", "above 0")),
    "overflowing learning rate": Trap(f"{LENGTH}optimizer: {{lr: 1e999}}", says=("optimizer.lr", "inf", "above 0")),
    "negative learning rate": Trap(f"{LENGTH}optimizer: {{lr: -0.1}}", says=("optimizer.lr", "-0.1", "above 0")),
    "key given twice": Trap(f"{LENGTH}optimizer:\n  lr: 1\n  lr: 2", says=("optimizer.lr", "twice", "lines 4 and 5")),
    "section given twice": Trap(f"{LENGTH}train: {{epochs: 2}}", says=("train is given twice", "lines 2 and 3")),
    "fp17": Trap(f"{LENGTH}precision: fp17", says=("fp17", "fp16")),
    "16 for a precision": Trap(f"{LENGTH}precision: 16", {"precision": "fp16"}),
    "Lightning's word": Trap(f"{LENGTH}trainer: {{precision: bf16-mixed}}", {"precision": "bf16"}),
    "two precisions": Trap(f"{LENGTH}precision: bf16\nfp16: true", says=("precision='bf16'", "fp16=True")),
    "amp off against bf16": Trap(f"{LENGTH}amp: false\nbf16: true", says=("amp=False", "bf16=True")),
    "flat and in place": Trap(f"{LENGTH}num_epochs: 2", says=("num_epochs", "train.epochs", "2", "1")),
    "flat words": Trap("num_epochs: 2\nbatch_size: 4", {"train.epochs": 2, "train.batch_size": 4}),
    "tab": Trap("train:\n\tepochs: 1", says=("line 3", "spaces")),
    "scale under its floor": Trap(f"{LENGTH}loss_scale: {{init_scale: 0.5}}", says=("init_scale 0.5", "floor")),
    "a word outside the choices": Trap(f"{LENGTH}optimizer: {{name: adamx}}", says=("optimizer.name", "adamx", "adam")),
    "a list for a section": Trap(f"{LENGTH}optimizer: [lr, 1]", says=("optimizer", "keys with values")),
    "plateau that is never seen": Trap(
        f"{LENGTH}schedule: {{name: plateau}}\nevaluate: {{every_epochs: 5}}", says=("plateau", "every_epochs")
    ),
    "key without a value": Trap(f"{LENGTH}optimizer:", {"optimizer.lr": 1e-3}),
    "a number for a key": Trap(f"{LENGTH}1: 2", says=("the key 1", "line 3")),
}


def run(full: bool) -> Outcome:
    failed = [name for name, trap in TRAPS.items() if not _held(trap, full)]
    return Outcome(len(TRAPS) - len(failed), len(TRAPS), failed[0].replace(" ", "-") if failed else "none")


def _held(trap: Trap, full: bool) -> bool:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as empty:
        file = Path(folder) / "trap.yaml"
        file.write_text(BASE + trap.text + "\n")
        endings = [in_process(str(file), Path(empty), trap.words)]
        if full:
            endings.append(through_the_command(str(file), Path(empty), trap.words))
        return all(_as_expected(trap, ending) for ending in endings) and not any(Path(empty).iterdir())


def _as_expected(trap: Trap, ending: Ending) -> bool:
    if trap.reads is None:
        return ending.code == trap.code and all(word in ending.said for word in trap.says)
    read = ending.recipe.model_dump() if ending.recipe else _shown(ending)
    return ending.code == 0 and all(_same(_at(read, key), value) for key, value in trap.reads.items())


def _shown(ending: Ending) -> dict[str, Any]:
    from halfstep.recipe.strict_yaml import parse_yaml

    return parse_yaml(ending.said, "what --show printed") if ending.code == 0 else {}


def _at(content: Any, key: str) -> Any:
    for part in key.split("."):
        content = content.get(part) if isinstance(content, dict) else None
    return content


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)
