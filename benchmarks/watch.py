"""Loops as people write them under `halfstep.watch`: are planted failures named, and does the watch change any number?

    python benchmarks/watch.py [--only LOOP ...] [--json] [--record] [--cost]

The loops are in benchmarks/watched/, whose docstring describes their tags. A plant is named where the first verdict
names the operation and the line that were planted, or the variable with bad values. A healthy loop is false where it
gets a verdict. Every loop, healthy or planted, runs with and without the watch: `equal` counts those whose weights,
buffers and random numbers are equal to the bit. `--cost` times steps with and without the watch in pairs instead, for
an idle machine.
`--record` keeps the result in benchmarks/watch.json. The last line is
`watch plants=P named=N healthy=H false=F equal=E/T`, or with `--cost` `watch cost=.. aa=..`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import logging
import random
import re
import runpy
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import halfstep
from halfstep.guard.verdict import DATA, GuardEvent, Verdict

WATCHED = Path(__file__).with_name("watched")
RECORD = Path(__file__).with_suffix(".json")
FAILED = "failed:"
_TAGGED = re.compile(r"^(\s*)#@(\w+) (?:-> ((?:data )?[\w.]+): ?)?(.*)$")
_REPLACED = re.compile(r"^(\s*)(.*?)\s*#!(\w+) ?(.*)$")


@dataclass(frozen=True)
class Script:
    """A loop with some of its tags chosen."""

    name: str
    text: str
    results: tuple[str, ...]
    expected: str = ""
    """The operation, or `data` and a variable."""
    line: int = 0


@dataclass(frozen=True)
class Outcome:
    """What came of one script."""

    loop: str
    plant: str
    variant: str
    named: bool
    equal: bool
    said: str
    expected: str = ""


def list_loops(only: Sequence[str] = ()) -> list[Path]:
    """The loops, by name."""
    return [path for path in sorted(WATCHED.glob("*.txt")) if not only or path.stem in only]


def read_header(path: Path, word: str) -> list[str]:
    found = re.search(rf"^# {word}: (.*)$", path.read_text(), re.MULTILINE)
    return found.group(1).split() if found else []


def build_script(path: Path, tags: Sequence[str]) -> Script:
    """The loop with the lines of these tags."""
    expected, at, lines = "", 0, []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if (tagged := _TAGGED.match(line)) is not None:
            indent, tag, operation, code = tagged.groups()
            if tag in tags:
                line = indent + code.replace("halfstep.watch(", "WATCH(")
                if operation:
                    expected, at = operation, number
            else:
                line = ""
        elif (replaced := _REPLACED.match(line)) is not None:
            indent, code, tag, other = replaced.groups()
            line = indent + ((other or "pass") if tag in tags else code)
        lines.append(line)
    return Script(path.stem, "\n".join(lines) + "\n", tuple(read_header(path, "result")), expected, at)


def run_script(script: Script, watched: Callable[..., Any] | None) -> str:
    """Run a loop, and return a digest of its results and of the random numbers that it leaves."""
    random.seed(0)
    torch.manual_seed(0)
    forget_accelerator()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{script.name}.py"
        file.write_text(script.text)
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = runpy.run_path(str(file), {"WATCH": watched})
    digest = hashlib.sha256()
    for name in script.results:
        for tensor in found[name].state_dict().values():
            digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    digest.update(torch.get_rng_state().numpy().tobytes())
    digest.update(repr(random.getstate()).encode())
    return digest.hexdigest()


def forget_accelerator() -> None:
    """Let the next script make an Accelerator with other settings in this process."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def judge(path: Path, plant: str, variant: str) -> Outcome:
    """Run a loop with and without the watch."""
    tags = [tag for tag in (plant, variant) if tag]
    events: list[GuardEvent] = []
    watches: list[Any] = []

    def watched(*arguments: Any, **options: Any) -> Any:
        watches.append(halfstep.watch(*arguments, tell=events.append, **options))
        return watches[-1]

    script = build_script(path, [*tags, "watch"])
    try:
        seen = run_script(script, watched)
    except Exception as error:
        seen = f"{FAILED} {type(error).__name__}: {error}"
    try:
        plain = run_script(build_script(path, tags), None)
    except Exception as error:
        plain = f"{FAILED} {type(error).__name__}: {error}"
    verdicts = [event for event in events if event.level == "warning"]
    for one in watches:
        one.close()
    said = verdicts[0].text if verdicts else ""
    if plant:
        named = bool(verdicts) and is_named(script, verdicts[0].facts, said)
    else:
        # Weights that are NaN may end a planted loop with an error of torch; a healthy one ends without.
        named = not verdicts and not seen.startswith(FAILED)
        said = said or seen
    return Outcome(path.stem, plant, variant, named, seen == plain, said, f"{script.expected} line {script.line}")


def is_named(script: Script, facts: Any, said: str) -> bool:
    """Whether a verdict names what was planted."""
    if "culprit" not in facts:
        return False
    verdict = Verdict.from_dict({key: value for key, value in facts.items() if key != "attempt"})
    if script.expected.startswith("data "):
        return verdict.cause == DATA and re.search(rf"\b{script.expected[5:]}\b", verdict.sentence) is not None
    culprit = verdict.culprit
    if culprit is None or culprit.line is None:
        return False
    return culprit.operation == script.expected and culprit.line.endswith(f"{script.name}.py:{script.line}")


def measure_cost(pairs: int) -> tuple[float, float]:
    """Return the median ratio of a step's time with and without the watch, and of bare to bare, on a small network."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1),
        nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))

    def step() -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return time.perf_counter() - start

    def with_watch() -> float:
        watched = halfstep.watch(model, optimizer)
        step()
        took = step()
        watched.close()
        return took

    def bare() -> float:
        step()
        return step()

    for _ in range(5):
        bare()
    ratios, same = [], []
    for pair in range(pairs):
        first, second = (with_watch, bare) if pair % 2 else (bare, with_watch)
        a, b = first(), second()
        ratios.append(a / b if pair % 2 else b / a)
        same.append(bare() / bare())
    return statistics.median(ratios), statistics.median(same)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    if options.cost:
        cost, same = measure_cost(options.pairs)
        print(f"watch cost={cost:.3f} aa={same:.3f} pairs={options.pairs}")
        return 0 if cost <= 1.05 else 1
    outcomes: list[Outcome] = []
    for path in list_loops(options.only):
        runs = [("", variant) for variant in read_header(path, "variants")]
        runs += [(plant, variant) for plant, _, variant in (p.partition("@") for p in read_header(path, "plants"))]
        for plant, variant in runs:
            outcome = judge(path, plant, variant)
            outcomes.append(outcome)
            if not (outcome.named and outcome.equal) or options.verbose:
                state = "named" if outcome.named else "NOT NAMED" if plant else "FALSE"
                same = "equal" if outcome.equal else "NOT EQUAL"
                print(f"{path.stem} {plant or 'healthy'} {variant}: {state}, {same}; expected {outcome.expected}")
                print(outcome.said, flush=True)
    plants, healthy = [o for o in outcomes if o.plant], [o for o in outcomes if not o.plant]
    named, false = sum(o.named for o in plants), sum(not o.named for o in healthy)
    equal = sum(o.equal for o in outcomes)
    if options.json:
        print(json.dumps([asdict(o) for o in outcomes], indent=1))
    last = (
        f"watch plants={len(plants)} named={named} healthy={len(healthy)} false={false} equal={equal}/{len(outcomes)}"
    )
    if options.record:
        rows = [
            {"loop": o.loop, "plant": o.plant, "variant": o.variant, "named": o.named, "equal": o.equal}
            for o in outcomes
        ]
        RECORD.write_text(
            json.dumps({"command": "python benchmarks/watch.py --record", "result": last, "runs": rows}, indent=1)
            + "\n"
        )
    print(last)
    return 0 if named >= 0.95 * len(plants) and not false and equal == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
