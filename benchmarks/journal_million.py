"""What a long journal costs: a summary of 1,000,000 lines for a report, and their recall by a run that resumes.

    python benchmarks/journal_million.py [--lines 1000000] [--json]
    python benchmarks/journal_million.py --commands [--lines 2000000] [--json]

The journal is of an fp16 run that was restarted three times, with losses that are not finite, skips, speeds,
evaluations and epochs, in files of 100 MB as the trainer writes them. It is written to a temporary folder first, and
counts for nothing. Seconds are of the processor; rise is what the peak of the resident memory grew by. `recall` is what
a run that resumes spends on its console, its log and its curves; next to it the same with the parser of the standard
library. `--json` keeps the figures next to this file.

`--commands` runs real commands on a run whose journal has so many lines: `halfstep report`, `halfstep train` that
resumes from a checkpoint behind all these lines, and one that resumes from a checkpoint before them and cuts them off.
Seconds are those of the whole command, with the import of torch; MB is its peak, next to that of the same command on
the same run without the lines.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from halfstep.errors import TRY_AGAIN
from halfstep.journal import jsonl
from halfstep.journal.curves import CurvesListener
from halfstep.journal.events import END, FORMAT, START, Event
from halfstep.journal.jsonl import JOURNAL, format_event_line
from halfstep.journal.listeners import restore_listeners
from halfstep.journal.plain import PlainListener
from halfstep.journal.summary import summarize
from halfstep.journal.table import TableConsole

HERE = Path(__file__).parent
LINES, COMMAND_LINES, GOAL = 1_000_000, 2_000_000, 20.0
PART = 100_000_000
"""Bytes of a file of the journal: `run.journal_mb` of a recipe that does not set it."""
EPOCH_STEPS, SPEED_EVERY, SKIP_EVERY = 5000, 10, 997


def journal_lines(lines: int) -> Iterator[Event]:
    """Yield the events of a run, as many as asked for; the last one is its end."""
    yield _start(0)
    written, attempt, restarts = 1, 0, {lines // 5, lines // 3, lines // 2}
    while written < lines - 1:
        attempt += 1
        for event in _around_step(attempt):
            if written < lines - 1:
                yield event
                written += 1
                if written in restarts:
                    # Steps that were not saved are done again.
                    attempt = max(attempt - 137, 0)
                    yield _start(attempt)
                    written += 1
    best = {"metric": "top1", "value": 0.9, "epoch": attempt // EPOCH_STEPS}
    skipped = {"gradient_overflow": attempt // SKIP_EVERY}
    counts = {"seconds": attempt * 0.1234, "steps": attempt - attempt // SKIP_EVERY, "skipped": skipped}
    yield {**_stamp("end", attempt), "reason": "finished", "metrics": {"top1": 0.9}, "best": best, **counts}


def _around_step(attempt: int) -> Iterator[Event]:
    yield _step(attempt)
    if attempt % SPEED_EVERY == 0:
        memory = {"host_bytes": 808_308_736 + attempt, "device_bytes": None, "device_peak_bytes": None}
        yield {
            **_stamp("speed", attempt),
            "samples_per_second": 300.0 + 20.0 * math.sin(attempt / 700),
            "wait_share": 0.03,
            "seconds_left": 133.4772568019107,
            "seconds_left_in_epoch": 3.4100029109977186,
            "is_rough": False,
            "train_metrics": {"top1": 0.6543},
            "meters": {},
            "memory": memory,
            "gpu": None,
        }
    if attempt % EPOCH_STEPS == 0:
        epoch, top1 = attempt // EPOCH_STEPS, 1.0 - 1.0 / (1 + attempt / EPOCH_STEPS)
        yield {
            **_stamp("epoch", attempt),
            "epoch": epoch,
            "epochs": 200,
            "train": {"loss": 0.3, "top1": top1},
            "val": {"loss": 0.35, "top1": top1 - 0.01},
            "best": {"metric": "top1", "value": top1, "epoch": epoch},
            "is_best": True,
            "seconds": 12.0,
            "lr": 1e-3,
            "skipped": {"gradient_overflow": 5},
            "samples_per_second": 300.0,
        }


def _stamp(event: str, attempt: int) -> Event:
    seconds = attempt % 60
    return {"event": event, "time": round(attempt * 0.1234, 3), "utc": f"2026-11-16T22:47:{seconds:02d}.376+00:00"}


def _step(attempt: int) -> Event:
    skipped = attempt % SKIP_EVERY == 0
    fields = {
        **_stamp("step", attempt),
        "epoch": 1 + (attempt - 1) // EPOCH_STEPS,
        "step_in_epoch": 1 + (attempt - 1) % EPOCH_STEPS,
        "attempt": attempt,
        "step": attempt - attempt // SKIP_EVERY,
        "loss": math.inf if skipped else 2.3 / math.sqrt(attempt) + 0.1 * math.sin(attempt / 31) ** 2,
        "lr": 1e-3 * (1.0 - math.cos(attempt / 1e5)) / 2,
        "loss_scale": 2.0 ** (16 - attempt // 20_000 % 4),
        "grad_norm": math.nan if skipped else 1.5 + math.cos(attempt / 17),
        "applied": not skipped,
        "reason": "gradient_overflow" if skipped else None,
    }
    return fields | ({"ids": [attempt, attempt + 1], "quarantined": []} if skipped else {})


def _start(attempt: int) -> Event:
    resumed = {"attempt": attempt, "epoch": attempt // EPOCH_STEPS, "checkpoint": f"step-{attempt:08d}.0001"}
    return {
        **_stamp("start", attempt),
        "format": FORMAT,
        "label": "classification_tiny",
        "recipe": {"task": "classification", "train": {"epochs": 200}},
        "precision": {"asked": "fp16", "took": "", "chosen": "fp16", "summary": "", "reasons": []},
        "steps": 1_000_000,
        "steps_per_epoch": EPOCH_STEPS,
        "metric": {"name": "top1", "higher_is_better": True},
        "resumed": resumed if attempt else None,
    }


def write_journal(folder: Path, lines: int) -> int:
    """Write the journal in the files of a run, and return its bytes."""
    path, begin = folder / JOURNAL, 0
    file = path.open("wb")
    for event in journal_lines(lines):
        line = format_event_line(event).encode()
        if file.tell() + len(line) > PART:
            size = file.tell()
            file.close()
            path.rename(folder / f"journal.{begin:015d}.jsonl")
            begin += size
            file = path.open("wb")
        file.write(line)
    file.close()
    return begin + path.stat().st_size


# -- reading ----------------------------------------------------------------------------------------------------------


def summary(path: Path) -> int:
    """Return the points that are left of all curves of a journal."""
    found = summarize(path)
    return sum(len(curve.points) for group in (found.steps, found.speeds, found.epochs) for curve in group.values())


def recalled(path: Path) -> int:
    """Tell a journal to the console, the log and the curves of a run that resumes; return how many listened."""
    listeners = [
        PlainListener(io.StringIO(), TableConsole(is_live=False)),
        PlainListener(io.StringIO(), TableConsole(is_live=False)),
        CurvesListener(path.parent),
    ]
    restore_listeners(listeners, path)
    return len(listeners)


def recalled_by_standard_parser(path: Path) -> int:
    """Do the same with the parser of the standard library."""
    jsonl._parse = json.loads
    return recalled(path)


# -- commands ---------------------------------------------------------------------------------------------------------


LIMITS = {"report": 40.0, "resume": 60.0, "resume_and_cut": 60.0}
"""Processor seconds that a command may take."""
TINY = ["train.steps=100000", "train.epochs=null", "evaluate.every_epochs=100000", "train.num_workers=0"]
TINY += ["checkpoint.every_steps=1000000", "run.pictures=0"]


class Cost(NamedTuple):
    """Processor seconds and the peak memory of a command in MB."""

    cpu: float
    peak: float


def command(words: list[str], expected: int) -> Cost:
    """Run a command of halfstep to its end, and return what it took."""
    process = subprocess.Popen([sys.executable, "-m", "halfstep", *words], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != expected:
        raise SystemExit(f"halfstep {' '.join(words)} ended with {process.returncode}")
    return Cost(round(used.ru_utime + used.ru_stime, 1), round(used.ru_maxrss / 1024, 1))


def stopped_after(words: list[str], folder: Path, more: Callable[[], None] = lambda: None) -> None:
    """Start a run, do `more` while it stands still after its first steps, and ask it to stop."""
    process = subprocess.Popen([sys.executable, "-m", "halfstep", *words], stdout=subprocess.DEVNULL)
    while not (folder / JOURNAL).exists() or b'"event":"step"' not in (folder / JOURNAL).read_bytes():
        time.sleep(0.2)
    process.send_signal(signal.SIGSTOP)
    more()
    process.send_signal(signal.SIGCONT)
    process.terminate()
    if process.wait() != TRY_AGAIN:
        raise SystemExit(f"the run ended with {process.returncode}")


def append_steps(folder: Path, lines: int) -> None:
    """Append lines of a run to its journal, as the run itself does."""
    with (folder / JOURNAL).open("ab") as file:
        file.writelines(
            format_event_line(event).encode() for event in journal_lines(lines) if event["event"] not in (START, END)
        )


def measured_commands(lines: int) -> dict[str, Any]:
    """Return what commands take on a run with a long journal, and on the same run with a short one."""
    found: dict[str, dict[str, Cost]] = {way: {} for way in LIMITS}
    for length, some in (("short", 0), ("long", lines)):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "run"
            train = ["train", "segmentation_tiny", *TINY, f"run.dir={folder}"]
            stopped_after(train, folder, lambda: append_steps(folder, some))  # noqa: B023
            found["report"][length] = command(["report", str(folder), "--output", f"{place}/report.html"], 0)
            found["resume"][length] = command(
                [*train, "--accept-recipe-change", f"train.steps={_steps(folder) + 2}"], 0
            )
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "run"
            train = ["train", "segmentation_tiny", *TINY, f"run.dir={folder}"]
            stopped_after(train, folder)
            last = _steps(folder)
            append_steps(folder, some)
            found["resume_and_cut"][length] = command([*train, "--accept-recipe-change", f"train.steps={last + 2}"], 0)
    return {way: {length: cost._asdict() for length, cost in costs.items()} for way, costs in found.items()}


def _steps(folder: Path) -> int:
    """Return the steps at the newest checkpoint of a run, from its name."""
    return max(int(path.name.split("-")[1].split(".")[0]) for path in (folder / "checkpoints").glob("step-*"))


WAYS = {"journal_million": summary, "recall": recalled, "recall_standard_json": recalled_by_standard_parser}


def measure(way: str, folder: Path) -> dict[str, float]:
    """Return the processor seconds, the rise of the peak memory in MB, and what was found, of this process."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    points = WAYS[way](folder / JOURNAL)
    cpu, after = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"cpu": round(cpu, 2), "rise": round((after - before) / 1024, 1), "points": points}


def measured(way: str, folder: Path) -> dict[str, float]:
    """Return the figures of one way to read the journal, in a process of its own."""
    words = [sys.executable, __file__, "--read", way, "--folder", str(folder)]
    return dict(json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout))


def main() -> None:
    """Write the journal, read it in each way, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int)
    parser.add_argument("--commands", action="store_true", help="measure whole commands on 2,000,000 lines")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--read", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read:
        print(json.dumps(measure(given.read, given.folder)))
        return
    if given.commands:
        show_commands(given.lines or COMMAND_LINES, given.json)
        return
    given.lines = given.lines or LINES
    with tempfile.TemporaryDirectory() as folder:
        size = write_journal(Path(folder), given.lines)
        found: dict[str, Any] = {way: measured(way, Path(folder)) for way in WAYS}
    for way, one in found.items():
        points = f" points={one['points']}" if way == "journal_million" else ""
        print(f"{way} lines={given.lines} cpu={one['cpu']:.1f}s rise={one['rise']:.0f}MB{points}")
    if given.json:
        machine = {"python": platform.python_version(), "machine": platform.machine()}
        record = {"lines": given.lines, "bytes": size, "goal_cpu": GOAL, **found, **machine}
        (HERE / "journal_million.json").write_text(json.dumps(record, indent=1) + "\n")
    if found["journal_million"]["cpu"] > GOAL:
        raise SystemExit(f"more than {GOAL:.0f} s of the processor")


def show_commands(lines: int, keep: bool) -> None:
    """Print and keep what commands take; fail where one takes longer than it may."""
    found = measured_commands(lines)
    for way, costs in found.items():
        long, short = costs["long"], costs["short"]
        print(
            f"{way} lines={lines} cpu={long['cpu']:.1f}s limit={LIMITS[way]:.0f}s short={short['cpu']:.1f}s "
            f"peak={long['peak']:.0f}MB short={short['peak']:.0f}MB"
        )
    if keep:
        machine = {"python": platform.python_version(), "machine": platform.machine()}
        said = " ".join(["python", "benchmarks/journal_million.py", *sys.argv[1:]])
        record = {"command": said, "lines": lines, "limits": LIMITS, **found, **machine}
        (HERE / "journal_commands.json").write_text(json.dumps(record, indent=1) + "\n")
    late = [way for way, costs in found.items() if costs["long"]["cpu"] > LIMITS[way]]
    if late:
        raise SystemExit(f"more processor seconds than allowed: {', '.join(late)}")


if __name__ == "__main__":
    main()
