"""Kill the trainer, the uploader, both, or the store at random moments; audit the store after each kill.

    python -m benchmarks.store_kills [--trainer 10] [--uploader 10] [--both 5] [--server 5] [--seed 0] [--record]

A run of 120 steps with checkpoints of about 13 MB every 4 steps copies them to a store: moto for the first three,
which keeps everything in memory and honors conditions; s3rver for the last (`HALFSTEP_S3RVER` names the folder of
`npm install s3rver`), which keeps objects on disk and ignores conditions. Every second time the trainer is killed, its
folder is removed too: the same command then continues from the store alone. After every kill each byte behind each
commit is compared with its digest. At the end the weights are compared with those of a run that was left alone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from halfstep.files import write_json
from halfstep.store.process import StoreProcess
from tests.support.commands import Command
from tests.support.store_servers import BUCKET, S3RVER, free_port, moto, s3rver, variables

RECORD = Path(__file__).with_suffix(".json")
TASK = """
import time
from tests.support.tiny_task import Tiny
class Slow(Tiny):
    def loss(self, model, batch, metrics=None):
        time.sleep(0.05)
        return super().loss(model, batch, metrics)
"""
RECIPE = """
task: slow
precision: fp32
model: {width: 400000}
optimizer: {name: sgd, lr: 0.00000001, momentum: 0.9, weight_decay: 0.0, fused: false}
schedule: {name: constant}
train: {steps: 120, batch_size: 16, num_workers: 0, seed: 5}
checkpoint: {every_steps: 4}
run: {log_every: 20, pictures: 0}
"""
WHOLE = 600.0
"""Seconds within which a launch ends."""


@dataclass
class Kills:
    """The kills of one kind, and what was found after them; a process that had ended before its kill does not count."""

    what: str
    kills: int = 0
    launches: int = 0
    emptied: int = 0
    audits: int = 0
    whole: int = 0
    torn: int = 0
    finished: int = 0
    """Runs that ended; each following kill has another run, in another place."""
    bitwise_equal: int = 0
    seconds: float = 0.0


class Story:
    """Runs that are killed again and again, one after the other."""

    def __init__(self, folder: Path, address: str, what: str, draw: random.Random, alone: Path) -> None:
        self.folder, self._address, self.draw, self.found = folder, address, draw, Kills(what)
        self.alone, self.process = alone, StoreProcess()

    @property
    def address(self) -> str:
        return f"{self._address}/{self.found.finished}"

    @property
    def run(self) -> Path:
        return self.folder / f"run-{self.found.finished}"

    def launch(self) -> Command:
        self.found.launches += 1
        remote = [f"checkpoint.remote={self.address}", "checkpoint.remote_wait=30", "store.patience=60"]
        words = ["train", self.folder / "slow.yaml", "--task", self.folder / "slow.py", f"run.dir={self.run}"]
        return Command(*words, *remote)

    def audit(self) -> None:
        found = self.process.call("tests.store.calls:audit", {"address": self.address, "patience": 120.0})
        self.found.audits += 1
        self.found.whole += len(found["whole"])
        self.found.torn += len(found["torn"])

    def empty(self) -> None:
        shutil.rmtree(self.run)
        self.found.emptied += 1

    def compare(self) -> None:
        """Compare a run that has ended with the one that was left alone; what follows is another run."""
        self.audit()
        names = ("last.safetensors", "best.safetensors")
        pairs = [(load_file(self.alone / name), load_file(self.run / name)) for name in names]
        self.found.bitwise_equal += all(torch.equal(one[key], other[key]) for one, other in pairs for key in one)
        self.found.finished += 1

    def finish(self) -> Kills:
        while self.launch().ended(WHOLE)[0] != 0:
            self.audit()
        self.compare()
        self.process.close()
        return self.found


def uploader_of(trainer: int) -> psutil.Process | None:
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(trainer).children():
            is_it = any("halfstep.store.process" in word for word in child.cmdline())
            if is_it and child.status() != psutil.STATUS_ZOMBIE:
                return child
    return None


def kill(story: Story, longest: float) -> None:
    """Launch, wait for a random moment, kill what is there, audit."""
    what, command = story.found.what, story.launch()
    until = time.monotonic() + WHOLE
    while what != "trainer" and uploader_of(command.pid) is None and command.code is None and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(story.draw.uniform(0.5, longest))
    helper = uploader_of(command.pid)
    if command.code is not None or (what != "trainer" and helper is None):
        code, out, err = command.ended(WHOLE)
        assert code == 0, out + err
        story.compare()
        return
    if what in ("uploader", "both"):
        assert helper is not None
        helper.kill()
    if what in ("trainer", "both"):
        command.send_signal(signal.SIGKILL)
        if command.ended(WHOLE)[0] == 0:  # just before
            story.compare()
            return
        if story.found.kills % 2 and story.run.exists():
            story.empty()
    story.found.kills += 1
    story.audit()
    if what == "uploader":
        # The run continues and starts another uploader; it is stopped later, for the next kill to find it training.
        time.sleep(story.draw.uniform(1.0, 4.0))
        command.send_signal(signal.SIGKILL)
        if command.ended(WHOLE)[0] == 0:
            story.compare()
        else:
            story.audit()


def told(kills: Kills) -> Kills:
    print(kills, flush=True)
    return kills


@contextmanager
def setting(port: int) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables(port))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def prepared(folder: Path) -> Path:
    folder.mkdir()
    (folder / "slow.py").write_text(TASK)
    (folder / "slow.yaml").write_text(RECIPE)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, count in {"trainer": 10, "uploader": 10, "both": 5, "server": 5, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--record", action="store_true")
    given, rows = parser.parse_args(), []
    draw = random.Random(given.seed)
    root = Path(tempfile.mkdtemp(prefix="store-kills-"))
    try:
        alone = prepared(root / "alone")
        began = time.monotonic()
        words = ["train", alone / "slow.yaml", "--task", alone / "slow.py", f"run.dir={alone / 'run'}"]
        code, out, err = Command(*words).ended(WHOLE)
        assert code == 0, out + err
        longest = time.monotonic() - began
        with moto() as port, setting(port):
            for what in ("trainer", "uploader", "both"):
                place = f"s3://{BUCKET}/{root.name}/{what}"
                story = Story(prepared(root / what), place, what, draw, alone / "run")
                began = time.monotonic()
                while story.found.kills < getattr(given, what):
                    kill(story, longest)
                rows.append(story.finish())
                rows[-1].seconds = round(time.monotonic() - began, 1)
                print(rows[-1], flush=True)
        if given.server and S3RVER.exists():
            rows.append(told(kill_server(root, given.server, longest, draw, alone / "run")))
    finally:
        shutil.rmtree(root)
    torn, kills = sum(row.torn for row in rows), sum(row.kills for row in rows)
    equal, ended = sum(row.bitwise_equal for row in rows), sum(row.finished for row in rows)
    print(
        f"{kills} kills: {sum(row.audits for row in rows)} audits, "
        f"{sum(row.whole for row in rows)} whole and {torn} torn"
    )
    print(f"{equal} of {ended} finished runs are bitwise equal to the one that was left alone")
    if given.record:
        write_json(
            RECORD,
            {"command": f"python -m benchmarks.store_kills --seed {given.seed}", "rows": [asdict(row) for row in rows]},
        )
    sys.exit(torn > 0 or equal < ended)


def kill_server(root: Path, times: int, longest: float, draw: random.Random, alone: Path) -> Kills:
    """Kill the server in the middle of a run; it is started again on the same folder after some seconds."""
    port, data, began = free_port(), root / "objects", time.monotonic()
    data.mkdir()
    with setting(port):
        story = Story(prepared(root / "server"), f"s3://{BUCKET}/server", "server", draw, alone)
        command: Command | None = None
        while story.found.kills < times:
            with s3rver(data, port):
                if story.found.kills:
                    story.audit()
                command = command or story.launch()
                time.sleep(draw.uniform(0.5, longest / 2))
                if command.code is not None:
                    ended(story, command)
                    command = None
                    continue
            story.found.kills += 1
            time.sleep(draw.uniform(0.5, 3.0))
        with s3rver(data, port):
            story.audit()
            if command is not None:
                ended(story, command)
            found = story.finish()
    found.seconds = round(time.monotonic() - began, 1)
    return found


def ended(story: Story, command: Command) -> None:
    """Compare a run that has ended, after an empty disk has repeated its end from the store."""
    if command.ended(WHOLE)[0] == 0:
        story.empty()
        while story.launch().ended(WHOLE)[0] != 0:
            story.audit()
        story.compare()


if __name__ == "__main__":
    main()
