"""Kill ranks of one FSDP2 run under `torchrun --max-restarts`, and compare its end with a run that was never killed.

    python benchmarks/rank_kills.py [--kills 50] [--steps 200] [--ranks 2] [--seed 0] [--record]

A rank is killed a few steps after the last restart, in between at any moment of a start; the rank and the moment are
drawn. Counted are hangs (no newer checkpoint and no end within --patience seconds), lost checkpoints (a restart that
began from an older one than was on disk when a rank died), and whether the weights at the end are those of the other
run, to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from halfstep.checkpoint.paths import CHECKPOINTS, generations
from halfstep.files import read_json
from halfstep.measure.conditions import conditions, in_words
from halfstep.train.status import RUNNING, status_file

RECORD = Path(__file__).with_suffix(".json")
RECIPE, SAVE_EVERY = "classification_tiny", 2
AT_START = 0.2
"""The share of kills in the middle of a start, never twice in a row: three restarts without progress end a run."""
FARTHEST = 4
"""Steps after a restart up to which a rank is killed: so 50 kills fit into 200 steps."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=240.0, help="seconds without progress that count as a hang")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = Killed(asked, Path(folder)).run()
    print(in_words(conditions()))
    line = " ".join(f"{key}={value}" for key, value in found.items())
    print(f"rank_kills {line}")
    if asked.record:
        command = "python benchmarks/rank_kills.py --record" + "".join(
            f" --{key} {getattr(asked, key)}" for key in ("kills", "steps", "ranks", "seed")
        )
        RECORD.write_text(json.dumps({"command": command, "conditions": conditions(), **found}, indent=1) + "\n")
    if found["hangs"] or found["lost"] or found["kills"] < asked.kills or not found["bitwise"]:
        sys.exit(1)


class Killed:
    """One run under torchrun, and the kills of its ranks."""

    def __init__(self, asked: argparse.Namespace, folder: Path) -> None:
        self._asked, self._folder = asked, folder
        self._draw = random.Random(asked.seed)
        self._run = folder / "killed"
        self.kills = self.at_start = self.hangs = self.lost = 0
        self._committed = -1
        """The newest checkpoint that was on disk at any kill so far; -1 for none."""
        self._launch, self._last_was_early = "", False

    def run(self) -> dict[str, Any]:
        """Train both runs and return what was counted."""
        self._torchrun("quiet", 0).wait()
        began = time.monotonic()
        agent = self._torchrun("killed", self._asked.kills + 10)
        while self.kills < self._asked.kills and agent.poll() is None and not self.hangs:
            self._next_kill(agent)
        code = self._end_of(agent)
        digests = [_digest(self._folder / name) for name in ("quiet", "killed")]
        return {
            "kills": self.kills,
            "at_start": self.at_start,
            "steps": self._asked.steps,
            "ranks": self._asked.ranks,
            "hangs": self.hangs,
            "lost": self.lost,
            "exit": code,
            "bitwise": digests[0] is not None and digests[0] == digests[1],
            "seconds_a_restart": round((time.monotonic() - began) / max(1, self.kills), 1),
        }

    def _next_kill(self, agent: subprocess.Popen[bytes]) -> None:
        """Wait for the moment that is drawn, and kill a rank."""
        statuses = self._started(agent)
        if not statuses:
            return
        early = self._draw.random() < AT_START and not self._last_was_early
        if early:
            time.sleep(self._draw.uniform(0.0, 3.0))
        else:
            target = max(0, self._newest()) + self._draw.randint(SAVE_EVERY, FARTHEST)
            if not self._reached(agent, target):
                return
            time.sleep(self._draw.uniform(0.0, 0.2))
        self._last_was_early = early
        newest = self._newest()
        try:
            os.kill(self._draw.choice(statuses)["pid"], signal.SIGKILL)
        except ProcessLookupError:
            return
        self.kills += 1
        self.at_start += early
        self._committed = max(self._committed, newest)
        print(f"\rkill {self.kills} of {self._asked.kills}, step {newest} of {self._asked.steps} saved ", end="")
        sys.stdout.flush()

    def _started(self, agent: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
        """Return the statuses of the ranks of an attempt that no rank of was killed yet."""

        def found() -> list[dict[str, Any]]:
            read = [read_json(self._run / status_file(rank)) for rank in range(self._asked.ranks)]
            good = [one for one in read if isinstance(one, dict) and one.get("state") == RUNNING]
            launches = {one["launch"] for one in good}
            is_new = len(good) == self._asked.ranks and len(launches) == 1 and self._launch not in launches
            return good if is_new else []

        statuses = self._waited(agent, found)
        if statuses:
            self._launch = statuses[0]["launch"]
            self.lost += statuses[0]["checkpoint"] < self._committed
        return statuses or []

    def _reached(self, agent: subprocess.Popen[bytes], step: int) -> bool:
        return bool(self._waited(agent, lambda: self._newest() >= min(step, self._asked.steps)))

    def _waited(self, agent: subprocess.Popen[bytes], ready: Any) -> Any:
        """Return what `ready` returns once that is true; None where the run ended, or hung."""
        until = time.monotonic() + self._asked.patience
        while time.monotonic() < until:
            if found := ready():
                return found
            if agent.poll() is not None:
                return None
            time.sleep(0.05)
        self.hangs += 1
        return None

    def _newest(self) -> int:
        found = generations(self._run / CHECKPOINTS) if (self._run / CHECKPOINTS).is_dir() else []
        return found[0].attempt if found else -1

    def _end_of(self, agent: subprocess.Popen[bytes]) -> int:
        try:
            return agent.wait(self._asked.patience * 4 if not self.hangs else 1.0)
        except subprocess.TimeoutExpired:
            self.hangs += not self.hangs
            os.killpg(agent.pid, signal.SIGKILL)
            return agent.wait()

    def _torchrun(self, name: str, restarts: int) -> subprocess.Popen[bytes]:
        settings = ["world=fsdp", "precision=fp32", f"train.steps={self._asked.steps}", "train.num_workers=0"]
        settings += [f"checkpoint.every_steps={SAVE_EVERY}", "run.pictures=0", f"run.dir={self._folder / name}"]
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={self._asked.ranks}"]
        command = [sys.executable, "-m", *launcher, f"--max-restarts={restarts}", "--monitor-interval=0.1"]
        with (self._folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [*command, "-m", "halfstep", "train", RECIPE, *settings],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )


def _digest(run: Path) -> str | None:
    result = read_json(run / "result.json")
    return result.get("weights") if isinstance(result, dict) else None


if __name__ == "__main__":
    main()
