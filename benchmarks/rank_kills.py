"""Kill ranks of runs at uniformly random moments, and compare the ends of these runs with one that was left alone.

    python benchmarks/rank_kills.py [--kills 100] [--seed 0] [--record]

Two fifths of the kills hit DDP and FSDP on two ranks each, one fifth HSDP on four. A moment is drawn uniformly from the
time that a whole run takes, from the start of its processes to their end, and a rank is drawn; it gets SIGKILL. The
same command then goes on, until the run is finished. Counted are hangs (survivors that are there after --patience
seconds), survivors that are gone after more than 15 s, and finished runs that do not have the losses and the weights of
the undisturbed one, to the bit. No launcher helps: survivors notice by themselves, unless the ranks had not met yet;
then they get SIGTERM after a second, as from torchrun or srun, since nobody knows whether the killed one will come.

The processes are forked from one that has loaded torch, so that the moments are those of the run.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import halfstep.cli.train
import halfstep.tasks.segmentation  # noqa: F401
from halfstep.checkpoint.paths import CHECKPOINTS, list_drafts, list_generations
from halfstep.cli import main as command
from halfstep.files import read_json
from halfstep.journal import curves
from halfstep.journal.jsonl import JOURNAL, read_events
from halfstep.measure.conditions import collect_conditions, describe_conditions
from halfstep.runs import fit  # noqa: F401
from halfstep.train import process_group
from halfstep.train.watchdog import ENDING, Watchdog

RECORD = Path(__file__).with_suffix(".json")
RECIPE = "segmentation_tiny"
SETTINGS = [
    "precision=fp32",
    "train.epochs=4",
    "train.seed=5",
    "train.ema=0.9",
    "train.num_workers=0",
    "run.pictures=0",
]
SETTINGS += ["data.samples=40", "checkpoint.every_steps=3"]
LATEST = 15.0
"""Seconds in which survivors are gone."""
UNMET, START, STEP, SAVE, EVALUATION, END = "unmet", "start", "step", "save", "evaluation", "end"
PHASES = (UNMET, START, STEP, SAVE, EVALUATION, END)
_PHASE_OF = {"reading": STEP, "computing": STEP, "saving": SAVE, "evaluating": EVALUATION, "drawing": EVALUATION}
_PHASE_OF |= {ENDING: END}


@dataclass(frozen=True)
class Mode:
    """How the ranks of a run share the model."""

    name: str
    ranks: int
    share: float
    """The part of all kills that this mode gets."""
    more: tuple[str, ...] = ()

    @property
    def settings(self) -> list[str]:
        """The settings of a run, with as many samples a step for any number of ranks."""
        return [*SETTINGS, f"world.mode={self.name}", f"train.batch_size={8 // self.ranks}", *self.more]


MODES = (Mode("ddp", 2, 0.4), Mode("fsdp", 2, 0.4), Mode("hsdp", 4, 0.2, ("world.shard_size=2",)))


@dataclass
class Row:
    """What was counted of one mode."""

    mode: str
    ranks: int
    kills: int = 0
    by_phase: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    hangs: int = 0
    late: int = 0
    lost: int = 0
    """Checkpoints that were there at a kill, and not at the next launch."""
    seconds: list[float] = field(default_factory=list)
    codes: Counter[int] = field(default_factory=Counter)
    runs: int = 0
    bitwise: int = 0
    steps: int = 0
    """Of all finished runs."""

    def as_dict(self) -> dict[str, Any]:
        """Return the row as plain data, with the times of all kills in two numbers."""
        facts = {key: value for key, value in asdict(self).items() if key not in ("seconds", "codes")}
        codes = {str(code): count for code, count in sorted(self.codes.items())}
        return {**facts, "median": round(statistics.median(self.seconds or [0.0]), 1), "longest": self.longest} | {
            "survivors": codes
        }

    @property
    def longest(self) -> float:
        """The seconds until the survivors were gone, at their longest."""
        return round(max(self.seconds, default=0.0), 1)

    @property
    def held(self) -> bool:
        """Whether nothing hung, everything was in time, and all runs came to the same bits."""
        return not self.hangs and not self.late and not self.lost and 0 < self.runs == self.bitwise


# -- one launch -------------------------------------------------------------------------------------------------------


class Launch:
    """The ranks of one launch of a run, each a forked process; `phase` tells where a rank is."""

    def __init__(self, mode: Mode, run: Path) -> None:
        self._mode, self._run = mode, run
        self._phases = mmap.mmap(-1, mode.ranks)  # shared with the ranks, which write theirs
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.pids = [self._forked(rank) for rank in range(mode.ranks)]
        self.codes: dict[int, int] = {}

    def phase(self, rank: int) -> str:
        """Return the phase of a rank; a save in the background counts as one."""
        found = PHASES[self._phases[rank]]
        return SAVE if found == STEP and list_drafts(self._run / CHECKPOINTS) else found

    def running(self) -> list[int]:
        """Return the ranks whose processes have not ended."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
        return [rank for rank in range(len(self.pids)) if rank not in self.codes]

    def ended_within(self, seconds: float) -> bool:
        """Wait until all processes have ended."""
        until = time.monotonic() + seconds
        while self.running():
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    def send(self, ranks: list[int], number: signal.Signals) -> None:
        """Send a signal to these ranks."""
        for rank in ranks:
            os.kill(self.pids[rank], number)

    def _forked(self, rank: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            code = self._be(rank)
        finally:
            os._exit(code)

    def _be(self, rank: int) -> int:
        log = os.open(f"{self._run}-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self._mode.ranks)})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port)})
        torch.set_num_threads(1)
        self._tell_phases(rank)
        sys.argv = ["halfstep", "train", RECIPE, *self._mode.settings, f"run.dir={self._run}"]
        try:
            command.main()
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else 0
        return 0

    def _tell_phases(self, rank: int) -> None:
        # Curves take longer than the steps of so small a run.
        curves.CurvesListener._draw = lambda drawn: None  # type: ignore[method-assign]
        met: Callable[..., Any] = process_group._wait_for_ranks
        beat = Watchdog.beat

        def meet(*given: Any) -> Any:
            found = met(*given)
            self._phases[rank] = PHASES.index(START)
            return found

        def tell(watchdog: Watchdog, phase: str, step: int) -> None:
            self._phases[rank] = PHASES.index(_PHASE_OF.get(phase, START))
            beat(watchdog, phase, step)

        process_group._wait_for_ranks = meet
        Watchdog.beat = tell  # type: ignore[method-assign]


# -- all of them ------------------------------------------------------------------------------------------------------


class Killed:
    """The kills of one mode."""

    def __init__(self, mode: Mode, kills: int, draw: random.Random, folder: Path, patience: float) -> None:
        self._mode, self._kills, self._draw, self._folder, self._patience = mode, kills, draw, folder, patience
        self.row, self._saved = Row(mode.name, mode.ranks), -1

    def run(self) -> Row:
        """Kill as often as asked, and let every run come to its end."""
        began = time.monotonic()
        quiet = self._folder / "quiet"
        launch = Launch(self._mode, quiet)
        if not launch.ended_within(600.0) or set(launch.codes.values()) != {0}:
            sys.exit(f"the undisturbed run ended with {launch.codes}; see {quiet}-0.log")
        whole, expected = time.monotonic() - began, _ending(quiet)
        while self.row.kills < self._kills and not self.row.hangs:
            run, self._saved = self._folder / f"run-{self.row.runs}", -1
            while not (run / "result.json").exists() and not self.row.hangs:
                self._launch(run, whole)
            self.row.runs += 1
            self.row.steps += len(expected[1])
            self.row.bitwise += not self.row.hangs and _ending(run) == expected
        return self.row

    def _launch(self, run: Path, whole: float) -> None:
        """Launch once, and kill a rank unless the launch has ended before, or there were enough kills."""
        self.row.lost += _newest(run) < self._saved
        launch, began = Launch(self._mode, run), time.monotonic()
        moment = self._draw.uniform(0.0, whole) if self.row.kills < self._kills else float("inf")
        victim = self._draw.randrange(self._mode.ranks)
        while len(launch.running()) == self._mode.ranks and time.monotonic() - began < min(moment, 600.0):
            time.sleep(0.002)
        if len(launch.running()) < self._mode.ranks or moment == float("inf"):
            self.row.hangs += not launch.ended_within(self._patience)
            launch.send(launch.running(), signal.SIGKILL)
            return
        self._kill(launch, victim)
        self._saved = _newest(run)

    def _kill(self, launch: Launch, victim: int) -> None:
        phase = launch.phase(victim)
        launch.send([victim], signal.SIGKILL)
        killed = time.monotonic()
        if phase == UNMET:
            launch.ended_within(1.0)
            launch.send(launch.running(), signal.SIGTERM)
        is_hung = not launch.ended_within(self._patience)
        seconds = time.monotonic() - killed
        launch.send(launch.running(), signal.SIGKILL)
        launch.ended_within(10.0)
        row = self.row
        row.kills += 1
        row.by_phase[phase] += 1
        row.hangs += is_hung
        row.late += seconds > LATEST
        row.seconds.append(seconds)
        row.codes.update(code for rank, code in launch.codes.items() if rank != victim)
        told = f"{row.mode}: kill {row.kills} of {self._kills} ({phase}), survivors gone after {seconds:.1f} s"
        print(f"\r{told:<78}", end="" if sys.stdout.isatty() else "\n", flush=True)


def _ending(run: Path) -> tuple[str, list[Any]]:
    """Return the digest of the weights at the end of a run, and the loss of each of its steps."""
    losses = {event["attempt"]: event["loss"] for event in read_events(run / JOURNAL) if event["event"] == "step"}
    return read_json(run / "result.json")["weights"], sorted(losses.items())  # type: ignore[index]


def _newest(run: Path) -> int:
    """Return the step of the newest checkpoint; -1 for none."""
    return max((one.attempt for one in list_generations(run / CHECKPOINTS)), default=-1)


def table(rows: list[Row]) -> str:
    """Return the rows as text."""
    head = f"{'mode':6}{'ranks':>6}{'kills':>7}" + "".join(f"{phase:>11}" for phase in PHASES)
    lines = [head + f"{'hangs':>7}{'> 15 s':>8}{'longest':>9}{'runs':>6}{'bitwise':>9}"]
    for row in rows:
        line = f"{row.mode:6}{row.ranks:>6}{row.kills:>7}" + "".join(f"{row.by_phase[phase]:>11}" for phase in PHASES)
        lines.append(line + f"{row.hangs:>7}{row.late:>8}{row.longest:>7} s{row.runs:>6}{row.bitwise:>9}")
    return "\n".join(lines)


def main() -> None:
    """Kill, print one table, and exit with 1 where something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=60.0, help="seconds after which survivors have hung")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    asked = parser.parse_args()
    draw, rows = random.Random(asked.seed), []
    with tempfile.TemporaryDirectory() as folder:
        for mode in MODES:
            own = Path(folder) / mode.name
            own.mkdir()
            kills = (
                asked.kills - sum(row.kills for row in rows) if mode is MODES[-1] else round(asked.kills * mode.share)
            )
            rows.append(Killed(mode, kills, draw, own, asked.patience).run())
    print(f"\n{table(rows)}")
    print(describe_conditions(collect_conditions()))
    kills, hangs, late = (sum(getattr(row, name) for row in rows) for name in ("kills", "hangs", "late"))
    runs, bitwise = sum(row.runs for row in rows), sum(row.bitwise for row in rows)
    longest = max(row.longest for row in rows)
    print(f"rank_kills kills={kills} hangs={hangs} late={late} longest={longest} runs={runs} bitwise={bitwise}")
    if asked.record:
        steps = sum(row.steps for row in rows)
        facts = {
            "kills": kills,
            "steps": steps,
            "hangs": hangs,
            "late": late,
            "longest": longest,
            "runs": runs,
            "bitwise": bitwise,
        }
        command_line = f"python benchmarks/rank_kills.py --record --kills {asked.kills} --seed {asked.seed}"
        content = {
            "command": command_line,
            "conditions": collect_conditions(),
            **facts,
            "rows": [row.as_dict() for row in rows],
        }
        RECORD.write_text(json.dumps(content, indent=1) + "\n")
    if not all(row.held for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
