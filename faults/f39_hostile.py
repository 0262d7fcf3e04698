"""Somebody has put code into a file that a run reads."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from typer.testing import CliRunner

from faults import rig
from faults.abusive_files import refit
from faults.judged import first_wrong, outcome
from faults.outcome import Outcome
from faults.payloads import MANIFEST, PAYLOADS, Payload, fires
from halfstep.checkpoint.paths import CHECKPOINTS, list_generations
from halfstep.cli.main import build
from tests.support import tiny_task

ID = "F39"
WHAT = "a file that would run code is refused with 77, neither run nor skipped"
REFUSED = 77
TASK = ["--task", str(tiny_task.__file__)]
COMMANDS = {False: 0, True: 4}
"""Payloads that are also given to commands of their own."""
End = tuple[int, str]
Way = Callable[[Path, Payload, bytes], list[str]]
"""Puts the payload into a run, or beside it; the command that then reads it."""


def run(full: bool) -> Outcome:
    trials, fired, ran = {}, 0, 0
    with rig.scratch() as folder:
        assert rig.run(folder / "whole", {"train.steps": 12}) == 0, rig.said(folder / "whole")
        for number, (name, payload) in enumerate(PAYLOADS.items()):
            canary = folder / "canary"
            content = payload.content(canary)
            for way in WAYS if full else list(WAYS)[number % len(WAYS) :][:1]:
                place = shutil.copytree(folder / "whole", folder / "run")
                command = WAYS[way](place, payload, content)
                trials[f"{name}, {way}"] = _refused(place, command, canary, in_process)
                ran += _put_out(canary)
                if number < COMMANDS[full]:
                    trials[f"{name}, {way}, as a command"] = _refused(place, command, canary, as_command)
                    ran += _put_out(canary)
                shutil.rmtree(place)
            fires(content)
            fired += _put_out(canary)
    worst = f"{ran} canaries in {len(trials)} readings"
    # A payload that does nothing in any reader would prove nothing here.
    trials["payloads are real"] = None if fired == len(PAYLOADS) else f"{fired} of {len(PAYLOADS)} do anything"
    return outcome(trials, worst)


def _put_out(canary: Path) -> bool:
    """Whether there was one."""
    was = canary.exists()
    canary.unlink(missing_ok=True)
    return was


def _refused(place: Path, command: list[str], canary: Path, call: Callable[[list[str]], End]) -> str | None:
    journal, saved = (place / "journal.jsonl").read_bytes(), list_generations(place / CHECKPOINTS)
    ended: list[End] = []
    return first_wrong(
        ("it is refused with 77", lambda: not ended.append(call(command)) and ended[0][0] == REFUSED),
        ("nothing was run", lambda: not canary.exists()),
        ("it says why", lambda: "run code" in ended[0][1]),
        ("nothing else is taken instead", lambda: list_generations(place / CHECKPOINTS) == saved),
        ("and the run is as it was", lambda: (place / "journal.jsonl").read_bytes() == journal),
    )


def in_process(command: list[str]) -> End:
    done = CliRunner().invoke(build(), command)
    return done.exit_code, done.output if done.exception is None or done.exit_code != 1 else repr(done.exception)


def as_command(command: list[str]) -> End:
    done = subprocess.run([sys.executable, "-m", "halfstep", *command], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def _in_checkpoint(place: Path, payload: Payload, content: bytes) -> None:
    """In the newest one, with the digest that the manifest then must have."""
    (place / "result.json").unlink()
    newest = list_generations(place / CHECKPOINTS)[0].path
    (newest / payload.place).write_bytes(content)
    if payload.place != MANIFEST:
        refit(newest)


def _resume(place: Path, payload: Payload, content: bytes) -> list[str]:
    _in_checkpoint(place, payload, content)
    return ["train", str(place / "recipe.yaml"), f"run.dir={place}", *TASK]


def _weights(place: Path, payload: Payload, content: bytes) -> list[str]:
    file = place.with_name(payload.weights)
    file.write_bytes(content)
    new = [f"run.dir={place.with_name('other')}", f"model.weights={file}"]
    return ["train", str(place / "recipe.yaml"), *new, *TASK]


def _verify(place: Path, payload: Payload, content: bytes) -> list[str]:
    _in_checkpoint(place, payload, content)
    return ["verify", str(place)]


def _export(place: Path, payload: Payload, content: bytes) -> list[str]:
    _in_checkpoint(place, payload, content)
    return ["export", str(place), *TASK]


WAYS: dict[str, Way] = {"resume": _resume, "weights": _weights, "verify": _verify, "export": _export}
