"""What a step costs inside the loop of another library, next to that loop's own step.

    python benchmarks/adapters.py [--pairs 15] [--steps 40] [--json] [--record]

The same model in the same loop, once as its library runs it and once with halfstep's adapter: four Linear layers of 512
with BatchNorm, batch 128, AdamW, clipping by norm and a schedule per step, in fp32, where the least time passes outside
of Python, on one thread and in processor time. The adapters check loss, gradients and buffers, keep what a rollback
needs, and have a Guardian; the libraries' own loops guard nothing. Runs of both kinds alternate, in a hand-written loop
single steps; a run's figure is the median of its steps without the first five. Reported: the median over the pairs of
runs. `aa` is a library's loop against itself.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import halfstep
from halfstep.clock import compare_paired_times, iterate_interleaved_times
from halfstep.measure.conditions import collect_conditions, describe_conditions

RECORD = Path(__file__).with_suffix(".json")
WARM_UP = 5
Batch = dict[str, Tensor]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU()) for _ in range(4)]
        self.net = nn.Sequential(*layers, nn.Linear(512, 10))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.net(x), labels)}


def parts(steps: int) -> tuple[Model, Any, Any, list[Batch]]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    batch = {"x": torch.randn(128, 512), "labels": torch.randint(10, (128,))}
    return model, optimizer, schedule, [batch] * steps


class Clock:
    """The processor time between two marks: on one thread it is the step's own, whatever else the machine does."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def mark(self) -> None:
        self.times.append(time.process_time())

    def median(self) -> float:
        return statistics.median(b - a for a, b in zip(self.times[WARM_UP:], self.times[WARM_UP + 1 :], strict=False))


def only(items: list[Any]) -> Any:
    return items[0]


# -- the loops --------------------------------------------------------------------------------------------------------


def lightning(steps: int, ours: bool) -> float:
    import lightning.pytorch as pl

    from halfstep.adapters.lightning import HalfstepPrecision

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    clock = Clock()
    model, optimizer, schedule, data = parts(steps)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def on_train_batch_end(self, *_: Any) -> None:
            clock.mark()

    step = HalfstepPrecision("fp32")
    precision = {"plugins": step, "callbacks": [step.callback]} if ours else {"precision": "32-true"}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet["enable_model_summary"] = False
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", gradient_clip_val=1.0, **quiet, **precision)
    trainer.fit(Module(), DataLoader(data, batch_size=None))
    return clock.median()


def transformers(steps: int, ours: bool) -> float:
    from transformers import Trainer, TrainerCallback, TrainingArguments, logging

    from halfstep.adapters.transformers import HalfstepMixin

    logging.set_verbosity_error()
    clock = Clock()
    model, optimizer, schedule, data = parts(steps)

    class Ours(HalfstepMixin, Trainer): ...

    class Marks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.mark()

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=1, max_grad_norm=1.0, use_cpu=True, report_to=[],
            save_strategy="no", logging_steps=10**6, disable_tqdm=True, remove_unused_columns=False,
        )  # fmt: skip
        kind = Ours if ours else Trainer
        given = {"train_dataset": data, "data_collator": only, "optimizers": (optimizer, schedule)}
        trainer = kind(model, settings, callbacks=[Marks()], **given)
        trainer.train()
    return clock.median()


def accelerate(steps: int, ours: bool) -> float:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    clock, accelerator = Clock(), Accelerator(cpu=True, mixed_precision="no")
    model, optimizer, schedule, data = parts(steps)
    loader = DataLoader(data, batch_size=1, collate_fn=only)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    stepper = halfstep.from_accelerate(accelerator, model, optimizer, schedule, clip_norm=1.0) if ours else None
    guardian = halfstep.Guardian(stepper) if stepper is not None else None
    for batch in loader:
        with accelerator.accumulate(model):
            if stepper is not None and guardian is not None:
                with stepper.forward(last=accelerator.sync_gradients):
                    loss = model(**batch)["loss"]
                stepper.backward(loss)
                if accelerator.sync_gradients:
                    guardian.look(stepper.apply())
            else:
                accelerator.backward(model(**batch)["loss"])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        clock.mark()
    return clock.median()


def grad_scaler(steps: int, ours: bool) -> Iterator[None]:
    model, optimizer, schedule, data = parts(steps)
    scaler = (halfstep if ours else torch.amp).GradScaler("cpu", init_scale=1024.0)
    if ours:
        scaler.include(model, schedule)
    for batch in data:
        optimizer.zero_grad()
        scaler.scale(model(**batch)["loss"]).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        yield


RUNS: dict[str, Callable[[int, bool], float]] = {
    "lightning": lightning,
    "transformers": transformers,
    "accelerate": accelerate,
}
"""Loops that a library owns: whole runs alternate, and each returns the median of its steps."""
STEPS: dict[str, Callable[[int, bool], Iterator[None]]] = {"grad_scaler": grad_scaler}
"""A loop of one's own, that can be taken step by step: single steps alternate."""
LOOPS = (*RUNS, *STEPS)
ARMS = {"own": False, "aa": False, "ours": True}


# -- measuring --------------------------------------------------------------------------------------------------------


def rounds_of(name: str, steps: int, pairs: int) -> Iterator[dict[str, float]]:
    """Yield the seconds of a step of each arm, for each pair."""
    if name in RUNS:
        yield from iterate_interleaved_times(
            {arm: partial(RUNS[name], steps, ours) for arm, ours in ARMS.items()}, pairs
        )
        return
    for _ in range(pairs):
        loops = {arm: STEPS[name](steps, ours) for arm, ours in ARMS.items()}
        turns = list(
            iterate_interleaved_times({arm: partial(seconds_of_next, loop) for arm, loop in loops.items()}, steps)
        )
        yield {arm: statistics.median(turn[arm] for turn in turns[WARM_UP:]) for arm in ARMS}


def seconds_of_next(loop: Iterator[None]) -> float:
    begun = time.process_time()
    next(loop)
    return time.process_time() - begun


def measured(name: str, steps: int, pairs: int, told: Callable[[int], None]) -> dict[str, Any]:
    """Return the ratio with its spread, the library's own step time, and its loop against itself."""
    rounds = []
    for times in rounds_of(name, steps, pairs):
        rounds.append(times)
        told(len(rounds))
    own, aa, ours = ([times[arm] for times in rounds] for arm in ARMS)
    ratio = compare_paired_times(ours, own)
    return {
        "ratio": round(ratio.median, 4),
        "low": round(ratio.low, 4),
        "high": round(ratio.high, 4),
        "aa": round(compare_paired_times(aa, own).median, 4),
        "step_ms": round(statistics.median(own) * 1e3, 3),
        "added_us": round(ratio.added_seconds * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", choices=sorted(LOOPS), action="append")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    before, found = collect_conditions(), {}
    for name in given.only or LOOPS:
        begun = time.monotonic()

        def told(pair: int, name: str = name, begun: float = begun) -> None:
            left = (time.monotonic() - begun) / pair * (given.pairs - pair)
            print(f"\r{name}: pair {pair} of {given.pairs}, {left:.0f} s left ", end="", file=sys.stderr, flush=True)

        found[name] = measured(name, given.steps, given.pairs, told)
        print(file=sys.stderr)
    command = f"python benchmarks/adapters.py --pairs {given.pairs} --steps {given.steps} --record"
    report = {"command": command, "conditions": before, "loops": found}
    if given.record:
        RECORD.write_text(json.dumps(report, indent=1) + "\n")
    if given.json:
        print(json.dumps(report))
        return
    print(describe_conditions(before))
    for name, row in found.items():
        print(f"{name:>13}: {row}")
    print("adapters " + " ".join(f"{name}={row['ratio']:.3f}" for name, row in found.items()))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
