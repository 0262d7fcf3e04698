"""Files that are made to run code, to read secrets or to fill the memory: none of it happens, and little is spent."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path

from faults import mutants
from faults.memory import highest, in_a_new_process
from faults.outcome import Outcome
from faults.recipe_check import Ending, in_process, through_the_command

ID = "F03"
WHAT = "a malicious recipe is refused: no code runs, no secret is shown, memory and time stay bounded"
REFUSED = (77, 78)
TOKEN = "HALFSTEP_FAULT_TOKEN"
MOST_SECONDS = 2.0
MOST_BYTES = 100e6
"""Both beyond what a good recipe takes."""
BASE = "task: segmentation\ntrain: {epochs: 1}\n"


def attacks(canary: Path) -> dict[str, str | Callable[[Path], None]]:
    """A text, or a function that makes the file."""
    touch = f"touch {canary}"
    tagged = {
        "object/apply": f"x: !!python/object/apply:os.system ['{touch}']",
        "object/new": f"x: !!python/object/new:os.system ['{touch}']",
        "object/apply, subprocess": f"x: !!python/object/apply:subprocess.check_output [[touch, {canary}]]",
        "object/apply, eval": f"x: !!python/object/apply:eval ['open({str(canary)!r}, \"w\")']",
        "name": "x: !!python/name:os.system",
        "module": "x: !!python/module:antigravity",
        "object": "x: !!python/object:subprocess.Popen {args: [id]}",
        "tuple": "x: !!python/tuple [1, 2]",
        "tag by a directive": f"%TAG ! tag:yaml.org,2002:python/\n---\nx: !object/apply:os.system ['{touch}']",
        "tag in full": f"x: !<tag:yaml.org,2002:python/object/apply:os.system> ['{touch}']",
        "tag on a key": f"? !!python/object/apply:os.system ['{touch}']\n: 1",
        "tag in the data section": f"data: {{path: !!python/object/apply:os.system ['{touch}']}}",
        "own tag": "x: !include /etc/passwd",
    }
    keyed = {
        "_target_": f"model: {{_target_: os.system, command: '{touch}'}}",
        "_target_ by an alias": f"model: {{_target_: logging.os.system, command: '{touch}'}}",
        "class_path": f"model: {{class_path: os.system, init_args: {{command: '{touch}'}}}}",
        "path that leaves": "run: {dir: ../../../tmp/escaped}",
        "secret by interpolation": f"data: {{path: '${{oc.env:{TOKEN}}}'}}",
        "secret by the shell's way": f"about: ${{{TOKEN}}}",
    }
    return {
        **{name: f"{text}\n" if "---" in text else f"{BASE}{text}\n" for name, text in {**tagged, **keyed}.items()},
        "anchor bomb": BASE + _bomb(),
        "alias of itself": f"{BASE}model: &a\n  freeze: [*a]\n",
        "merge of itself": f"{BASE}data: &a\n  <<: *a\n",
        "depth of 10,000": f"{BASE}x: {'[' * 10_000}{']' * 10_000}\n",
        "depth of 10,000, in blocks": BASE + "".join(f"{' ' * depth}x:\n" for depth in range(400)),
        "300,000 values": f"{BASE}x: [{'1,' * 300_000}]\n",
        "a number of a million digits": f"{BASE}x: {'9' * 1_000_000}\n",
        "50 MB": _long,
        "not text": lambda path: path.write_bytes(b"\xff\xfe\x00" + os.urandom(5000)) and None,
        "a pipe": lambda path: os.mkfifo(path),
        "a device": lambda path: path.symlink_to("/dev/zero"),
    }


def _long(path: Path) -> None:
    """In pieces: what making the file takes must not look like what reading it does."""
    with path.open("wb") as file:
        file.write(b"x: ")
        file.writelines(b"a" * 1_000_000 for _ in range(50))


def run(full: bool) -> Outcome:
    results = in_a_new_process(attacked, full)
    slowest = max(seconds for _, seconds in results.values())
    failed = [name for name, (held, _) in results.items() if not held]
    worst = f"{slowest * 1e3:.0f}ms" + (f",{failed[0].replace(' ', '-')}" if failed else "")
    return Outcome(len(results) - len(failed), len(results), worst)


def attacked(full: bool) -> dict[str, tuple[bool, float]]:
    """For each attack whether it was held, and its seconds. Shows its memory in a new process only."""
    mutants.apply(mutants.current())
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as empty:
        canary = Path(folder) / "canary"
        token = secrets.token_hex(16)
        os.environ[TOKEN] = token
        try:
            _, usual = _spent("segmentation_tiny", Path(empty), full)
            return {name: _attack(make, canary, token, usual, full) for name, make in attacks(canary).items()}
        finally:
            del os.environ[TOKEN]


def _attack(make: str | Callable[[Path], None], canary: Path, token: str, usual: int, full: bool) -> tuple[bool, float]:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as empty:
        file = Path(folder) / "attack.yaml"
        if callable(make):
            make(file)
        else:
            file.write_text(make)
        ending, peak = _spent(str(file), Path(empty), full)
        harmless = not canary.exists() and token not in ending.said and not any(Path(empty).iterdir())
        canary.unlink(missing_ok=True)
        bounded = ending.seconds <= MOST_SECONDS and peak - usual <= MOST_BYTES
        return harmless and bounded and ending.code in REFUSED, ending.seconds


def _spent(recipe: str, empty: Path, full: bool) -> tuple[Ending, int]:
    """How it ended, and the most memory: of the command, or of this process up to now."""
    if full:
        ending = through_the_command(recipe, empty)
        return ending, ending.peak
    return in_process(recipe, empty), highest()


def _bomb() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    return "\n".join(lines) + "\n"
