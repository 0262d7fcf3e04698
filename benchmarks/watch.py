"""Loops as people write them under `halfstep.watch`: are planted failures named, and does the watch change any number?

    python benchmarks/watch.py [--only LOOP ...] [--json] [--record] [--cost]

The loops are in benchmarks/watched/, whose docstring describes their tags. A plant is named where the first verdict
names the operation and the line that were planted, or the variable with bad values. A healthy loop is false where it
gets a verdict. Every loop, healthy or planted, runs with and without the watch: `equal` counts those whose weights,
buffers and random numbers are equal to the bit. `--cost` times steps with and without the watch in pairs instead, for
an idle machine.
`--record` keeps the result in benchmarks/watch.json. The last line is
`watch plants=P named=N healthy=H false=F equal=E/T`, or with `--cost` one line for each model, `watch M cost=.. aa=..`.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import halfstep
from halfstep.guard.verdict import DATA, GuardEvent, Verdict

MOST_COST = 1.05
"""The limit of a step's time with the watch, as a ratio."""
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
        for path, leaf in _iterate_state(found[name].state_dict()):
            digest.update(path.encode())
            if isinstance(leaf, torch.Tensor):
                digest.update(leaf.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            else:
                digest.update(repr(leaf).encode())
    digest.update(torch.get_rng_state().numpy().tobytes())
    digest.update(repr(random.getstate()).encode())
    return digest.hexdigest()


def _iterate_state(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors and numbers of a state with their paths."""
    if isinstance(state, Mapping | list | tuple):
        for key, item in state.items() if isinstance(state, Mapping) else enumerate(state):
            yield from _iterate_state(item, f"{path}.{key}")
    elif isinstance(state, torch.Tensor | int | float | str | bool | None):
        yield path, state


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
    # In backward, the operation that the author wrote is the one whose derivative is not finite.
    operations = (culprit.operation, culprit.forward)
    return script.expected in operations and culprit.line.endswith(f"{script.name}.py:{script.line}")


WARM, TIMED = 4, 6
"""Steps before those that are timed: the first steps of a watch also search for numbers that modules count."""


class Cost(NamedTuple):
    """Medians over interleaved pairs: the ratio of watched to bare steps, and of bare to bare ones."""

    wall: float
    wall_same: float
    cpu: float
    """By the CPU time of the thread, which other programs on the machine do not lengthen."""
    cpu_same: float
    seconds: float
    """A bare step."""


def build_convolutions() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1),
        nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    return model, torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))


def build_attention() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    layers = [nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(100, 128), *layers, nn.Linear(128, 100))
    return model, torch.randint(0, 100, (16, 64)), torch.randint(0, 100, (16 * 64,))


MODELS = {"convolutions": build_convolutions, "attention": build_attention}


def measure_cost(build: Callable[[], tuple[nn.Module, torch.Tensor, torch.Tensor]], pairs: int) -> Cost:
    """Time blocks of steps with and without the watch, one after the other, in turn which is first."""
    torch.manual_seed(0)
    model, x, y = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def run_steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x).flatten(0, -2), y)
            loss.backward()
            optimizer.step()

    def measure(*, watched: bool) -> tuple[float, float]:
        watch = halfstep.watch(model, optimizer) if watched else None
        run_steps(WARM)
        start = time.perf_counter(), time.thread_time()
        run_steps(TIMED)
        took = time.perf_counter() - start[0], time.thread_time() - start[1]
        if watch is not None:
            watch.close()
        return took

    run_steps(WARM)
    rows, bare = [], []
    for pair in range(pairs):
        if pair % 2:
            a, b = measure(watched=True), measure(watched=False)
        else:
            b, a = measure(watched=False), measure(watched=True)
        c = measure(watched=False)
        rows.append((a[0] / b[0], c[0] / b[0], a[1] / b[1], c[1] / b[1]))
        bare.append(b[0] / TIMED)
    return Cost(*map(statistics.median, zip(*rows, strict=True)), statistics.median(bare))


def print_cost(pairs: int) -> int:
    worst = 0.0
    for name, build in MODELS.items():
        cost = measure_cost(build, pairs)
        worst = max(worst, cost.wall)
        print(
            f"watch {name} cost={cost.wall:.3f} aa={cost.wall_same:.3f} cpu_cost={cost.cpu:.3f} "
            f"cpu_aa={cost.cpu_same:.3f} step={cost.seconds * 1e3:.1f}ms pairs={pairs}",
            flush=True,
        )
    return 0 if worst <= MOST_COST else 1


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
        return print_cost(options.pairs)
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
