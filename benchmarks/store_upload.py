"""What copying checkpoints to a store costs: processor time of the uploader per GB, memory, and the time of steps.

    python -m benchmarks.store_upload [--megabytes 256] [--times 4] [--steps 2000] [--pairs 5] [--record]

First, checkpoints of --megabytes are uploaded --times over, and the processor time of the uploader is read from the
system. Then a run of --steps steps saves and uploads every 20 steps, and the memory of trainer and uploader is read
all the while: the last quarter must not be above the second. Then --pairs pairs of runs, without and with a store,
that compute on every core and save a checkpoint of about 120 MB once, after a minute: by how much the steps of the 15
seconds that follow are longer than those before, as a share of the minute (idle machine; 0 pairs leaves it out). The
store is moto on this machine: it takes processor time of its own, which is in the share, and it is no measure of a
network.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

from benchmarks.store_kills import WHOLE, prepared, setting, uploader_of
from halfstep.files import read_json, write_json
from halfstep.journal.jsonl import JOURNAL, read_events
from halfstep.store.process import StoreProcess
from halfstep.train.remote import GENERATIONS
from tests.support.commands import Command
from tests.support.store_servers import BUCKET, moto

RECORD = Path(__file__).with_suffix(".json")
STEPS, AFTER = 290, 15.0
"""Of the runs whose steps are compared: about 80 s on two cores; the seconds within which a copy is complete."""
MODEL = [
    "data.length=128",
    "train.batch_size=4",
    "model.type=llama",
    "model.width=320",
    "model.layers=8",
    "model.heads=5",
    "model.mlp=864",
    "precision=fp32",
    "data.samples=24",
    "evaluate.every_epochs=1000",
]
"""A language model with a checkpoint of about 120 MB."""


def generation(folder: Path, number: int, megabytes: int) -> str:
    """Write a run folder with a checkpoint of this size, of random bytes; return the checkpoint's name."""
    name = f"step-{number:08d}.{number:04x}"
    place = folder / "checkpoints" / name
    place.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("task: tiny\n")
    seals = {}
    contents = {
        "rank-00000.safetensors": os.urandom(megabytes * 10**6),
        "rank-00000.json": json.dumps({"position": {"journal_sizes": {}}}).encode(),
    }
    for file, content in contents.items():
        (place / file).write_bytes(content)
        seals[file] = [len(content), hashlib.sha256(content).hexdigest()]
    (place / "MANIFEST.json").write_text(json.dumps({"files": seals}))
    return name


def cost(root: Path, megabytes: int, times: int) -> dict[str, float]:
    """The processor seconds of the uploader per GB, without its start."""
    address, process = f"s3://{BUCKET}/cost", StoreProcess()
    known = {"run": "0" * 16, "number": 0}
    request = {"address": address, "patience": 120.0, "launch": "1" * 16, "known": known, "recipe": ""}
    lease = process.call(f"{GENERATIONS}:claim", request)
    used = []
    for number in range(1, times + 1):
        shutil.rmtree(root / "cost", ignore_errors=True)
        name = generation(root / "cost", number, megabytes)
        before = sum(psutil.Process(process.pid).cpu_times()[:2])
        upload = {"lease": lease, "folder": str(root / "cost"), "name": name, "keep": 2, "skipped": [], "withdrawn": []}
        assert process.call(f"{GENERATIONS}:upload", upload) is not None
        used.append((sum(psutil.Process(process.pid).cpu_times()[:2]) - before) / (megabytes / 1000))
    memory = psutil.Process(process.pid).memory_info().rss / 1e6
    process.close()
    return {"processor_seconds_per_gb": round(statistics.median(used), 2), "uploader_mb": round(memory)}


def memory(root: Path, steps: int) -> dict[str, list[float]]:
    """The anonymous memory of trainer and uploader, in MB, over a run: one number for each quarter."""
    folder = prepared(root / "memory")
    settings = [f"train.steps={steps}", "checkpoint.every_steps=20", "model.width=100000", f"run.dir={folder / 'run'}"]
    task = (folder / "slow.py").read_text().replace("0.05", "0.005")
    (folder / "slow.py").write_text(task)
    remote = [f"checkpoint.remote=s3://{BUCKET}/memory"]
    command = Command("train", folder / "slow.yaml", "--task", folder / "slow.py", *settings, *remote)
    seen: dict[str, list[float]] = {"trainer": [], "uploader": []}
    while command.code is None:
        helper = uploader_of(command.pid)
        if helper is not None:
            for name, pid in (("trainer", command.pid), ("uploader", helper.pid)):
                status = Path(f"/proc/{pid}/status")
                text = status.read_text() if status.exists() else ""
                seen[name] += [int(line.split()[1]) / 1000 for line in text.splitlines() if line.startswith("RssAnon")]
        time.sleep(0.1)
    code, out, err = command.ended(WHOLE)
    assert code == 0, out + err
    return {name: [round(max(part), 1) for part in quarters(values)] for name, values in seen.items()}


def quarters(values: list[float]) -> list[list[float]]:
    size = max(1, len(values) // 4)
    return [values[number * size : (number + 1) * size] or [0.0] for number in range(4)]


@dataclass
class Minute:
    """The steps of a run that computes on every core and saves once, after a minute."""

    step: float
    """The median of the seconds of a step within AFTER seconds before the save."""
    extra: float
    """The seconds by which the steps within AFTER seconds after it are longer."""

    @classmethod
    def of(cls, folder: Path, remote: list[str]) -> Minute:
        often = ["checkpoint.every_steps=100000", "checkpoint.every_minutes=1"]
        words = ["train", "text_tiny", *MODEL, *often, *remote, f"train.steps={STEPS}", f"run.dir={folder}"]
        subprocess.run([sys.executable, "-m", "halfstep", *words], check=True, capture_output=True, timeout=WHOLE)
        events = read_events(folder / JOURNAL)
        shutil.rmtree(folder)
        times = [event["time"] for event in events if event["event"] == "step"]
        saved = next(e["time"] - e["seconds"] for e in events if e["event"] == "saved" and e["kind"] == "checkpoint")
        assert saved + AFTER < times[-1], f"{STEPS} steps end {times[-1] - saved:.0f} s after the save: give more steps"
        lengths = [(end, end - start) for start, end in pairwise(times)]
        step = statistics.median(length for end, length in lengths if saved - AFTER <= end < saved)
        after = [length for end, length in lengths if saved <= end < saved + AFTER]
        return cls(step, sum(after) - step * len(after))


def compare_steps(root: Path, count: int) -> dict[str, object]:
    """The share of step time that saving takes at one save a minute, without a store and with one, in turns."""
    plain, copied = [], []
    for pair in range(count):
        plain.append(Minute.of(root / "plain", []))
        copied.append(Minute.of(root / "copied", [f"checkpoint.remote=s3://{BUCKET}/pair{pair}"]))
        print(plain[-1], copied[-1], flush=True)
    added = [(one.extra - other.extra) / 60 for one, other in zip(copied, plain, strict=True)]
    return {
        "pairs": count,
        "step_seconds": round(statistics.median(minute.step for minute in plain + copied), 3),
        "share_of_save": round(statistics.median(minute.extra / 60 for minute in plain), 4),
        "share_of_upload": {
            "median": round(statistics.median(added), 4),
            "low": round(min(added), 4),
            "high": round(max(added), 4),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, count in {"megabytes": 256, "times": 4, "steps": 2000, "pairs": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--record", action="store_true")
    given, root = parser.parse_args(), Path(tempfile.mkdtemp(prefix="store-upload-"))
    found: dict[str, object] = {"command": " ".join(["python -m benchmarks.store_upload", *sys.argv[1:]])}
    try:
        with moto() as port, setting(port):
            found |= cost(root, given.megabytes, given.times)
            print(found, flush=True)
            if given.steps:
                found["rss_anon_mb_by_quarter"] = memory(root, given.steps)
                print(found, flush=True)
            if given.pairs:
                found |= compare_steps(root, given.pairs)
                print(found, flush=True)
    finally:
        shutil.rmtree(root)
    if given.record:
        write_json(RECORD, {**(read_json(RECORD) or {}), **found})


if __name__ == "__main__":
    main()
