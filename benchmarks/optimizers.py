"""Optimizer classes in a Stepper next to the same classes in a plain loop: bitwise equal, skipped and resumed.

    python benchmarks/optimizers.py [--only NAME] [--json] [--record]

Every class of torch.optim, timm.optim and pytorch_optimizer that can be imported trains a small model for ten steps in
fp32: (equal) the Stepper's run is the plain loop's, (skip) a run with one NaN batch in it is the run without that
batch, and (resume) a run that is saved after five steps and loaded into new objects is the run that never stopped;
weights, buffers and optimizer state to the bit. Where a resumed run differs, the plain loop is resumed as well: a class
that does not save what it needs differs there too, in the same bits, and is counted as `own`. Classes that a Stepper
refuses by name, and classes that a plain loop cannot step, have a row and are not counted.

pytorch_optimizer is no dependency: `pip install --no-deps --target DIR pytorch_optimizer`, and DIR in PYTHONPATH.
`--record` keeps the result in benchmarks/optimizers.json.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.metadata
import inspect
import io
import json
import logging
import random
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from halfstep import Stepper
from halfstep.errors import HalfstepError, WrongUse, format_error_line

PACKAGES = {"torch.optim": "torch", "timm.optim": "timm", "pytorch_optimizer": "pytorch_optimizer"}
RECORD = Path(__file__).with_suffix(".json")
STEPS, HALF = 10, 5
Batch = tuple[Tensor, Tensor, Tensor]


# -- the model ---------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """An embedding, a convolution, a norm with buffers, matrices and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.mix = nn.Conv1d(8, 8, 3, padding=1)
        self.rows, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        words = self.mix(self.words(tokens).transpose(1, 2)).mean(2)
        # The words come after the norm, which would take the gradient of a bias before it to zero.
        return self.head(torch.tanh(self.norm(self.rows(x)) + words))


class Matrices(nn.Module):
    """Two matrices and nothing else, for optimizers that take no other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.rows(x)))


class Sparse(nn.Module):
    """An embedding with sparse gradients and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 4, sparse=True)

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        return self.words(tokens).mean(1) * x[:, :4]


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    tokens, x, target = batch
    return (model(tokens, x) - target).square().mean()


def batch_at(step: int) -> Batch:
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(11, (5, 4), generator=draw)
    return tokens, torch.randn(5, 6, generator=draw), torch.randn(5, 4, generator=draw)


BAD = 3
"""The step before which a run with a NaN batch has it."""


def bad_batch() -> Batch:
    tokens, x, target = batch_at(BAD)
    return tokens, x * torch.nan, target


# -- the classes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """How a class is built, where its parameters alone do not build it."""

    model: type[nn.Module] = Small
    options: Mapping[str, Any] | None = None
    build: Callable[[Any, nn.Module], torch.optim.Optimizer] | None = None


def _around_adam(kind: Any, model: nn.Module) -> Any:
    return kind(torch.optim.AdamW(model.parameters(), 1e-2))


def _by_dimensions(kind: Any, model: nn.Module) -> Any:
    """Build an optimizer that is told which parameters are matrices."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    return kind([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}])


def _of_model(kind: Any, model: nn.Module) -> Any:
    return kind(model, lr=1e-2)


def _two_steps(kind: Any, model: nn.Module) -> Any:
    return kind(model.parameters(), base_optimizer=torch.optim.SGD, lr=1e-2)


ENTRIES = {
    "torch.optim.Muon": Entry(Matrices),
    "torch.optim.SparseAdam": Entry(Sparse),
    "timm.optim.Lookahead": Entry(build=_around_adam),
    "pytorch_optimizer.AdaGO": Entry(build=_by_dimensions),
    "pytorch_optimizer.AdaMuon": Entry(build=_by_dimensions),
    "pytorch_optimizer.AdamMini": Entry(build=_of_model),
    "pytorch_optimizer.AdaLOMO": Entry(build=_of_model),
    # The defaults of these move no weight, or renew no preconditioner, in ten steps.
    "pytorch_optimizer.AdaShift": Entry(options={"keep_num": 3}),
    "pytorch_optimizer.DAdaptAdaGrad": Entry(options={"lr": 1.0}),
    "pytorch_optimizer.DAdaptAdam": Entry(options={"lr": 1.0}),
    "pytorch_optimizer.DAdaptAdan": Entry(options={"lr": 1.0}),
    "pytorch_optimizer.DAdaptLion": Entry(options={"lr": 1.0}),
    "pytorch_optimizer.DAdaptSGD": Entry(options={"lr": 1.0, "d0": 1e-3}),
    "pytorch_optimizer.Prodigy": Entry(options={"lr": 1.0}),
    "pytorch_optimizer.SOAP": Entry(options={"precondition_frequency": 2}),
    "pytorch_optimizer.ScalableShampoo": Entry(
        options={"start_preconditioning_step": 3, "preconditioning_compute_steps": 2}
    ),
    "pytorch_optimizer.BSAM": Entry(options={"num_data": 50}),
    "pytorch_optimizer.DistributedMuon": Entry(build=_by_dimensions),
    "pytorch_optimizer.FriendlySAM": Entry(build=_two_steps),
    "pytorch_optimizer.LOMO": Entry(build=_of_model),
    "pytorch_optimizer.LookSAM": Entry(build=_two_steps),
    "pytorch_optimizer.Lookahead": Entry(build=_around_adam),
    "pytorch_optimizer.Muon": Entry(build=_by_dimensions),
    "pytorch_optimizer.MuonClip": Entry(build=_by_dimensions),
    "pytorch_optimizer.NorMuon": Entry(build=_by_dimensions),
    "pytorch_optimizer.OrthoGrad": Entry(build=_around_adam),
    "pytorch_optimizer.PCGrad": Entry(build=_around_adam),
    "pytorch_optimizer.Ranger21": Entry(options={"num_iterations": STEPS}),
    "pytorch_optimizer.SAM": Entry(build=_two_steps),
    "pytorch_optimizer.SafeFP16Optimizer": Entry(build=_around_adam),
    "pytorch_optimizer.ScheduleFreeWrapper": Entry(build=_around_adam),
    "pytorch_optimizer.SpectralSphere": Entry(Matrices),
    "pytorch_optimizer.TRAC": Entry(build=_around_adam),
    "pytorch_optimizer.WSAM": Entry(
        build=lambda kind, model: kind(model, model.parameters(), torch.optim.SGD, lr=1e-2)
    ),
}


def classes() -> tuple[dict[str, type[torch.optim.Optimizer]], list[str]]:
    """Return the classes by package and name, each once, and the packages that are not installed."""
    found: dict[str, type[torch.optim.Optimizer]] = {}
    missing = []
    for name in PACKAGES:
        try:
            package = importlib.import_module(name)
        except ImportError:
            missing.append(name)
            continue
        for own, kind in sorted(vars(package).items()):
            is_class = inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
            if is_class and kind is not torch.optim.Optimizer and kind not in found.values():
                found[f"{name}.{own}"] = kind
    return found, missing


# -- runs --------------------------------------------------------------------------------------------------------------


class Run:
    """A model and an optimizer of one class."""

    def __init__(self, kind: type[torch.optim.Optimizer], entry: Entry, seed: int = 0) -> None:
        _seed(seed)
        self.model = entry.model()
        if entry.build:
            self.optimizer = entry.build(kind, self.model)
        else:
            usual = {"lr": 1e-2} if "lr" in inspect.signature(kind).parameters else {}
            self.optimizer = kind(self.model.parameters(), **{**usual, **(entry.options or {})})
        # Schedule-free optimizers hold other weights while they evaluate.
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()

    def state(self) -> list[Any]:
        return copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict()])

    def plain(self, steps: Sequence[int]) -> None:
        for step in steps:
            _seed(step)
            self.model.zero_grad()
            loss_fn(self.model, batch_at(step)).backward()
            self.optimizer.step()

    def stepper(self) -> Stepper:
        return Stepper(self.model, self.optimizer, precision="fp32")


def transact(stepper: Stepper, steps: Sequence[int], *, bad: int | None = None) -> None:
    """Step through the batches; `bad` is the step before which a NaN batch comes, which must be skipped."""
    for step in steps:
        if step == bad and stepper.step(loss_fn, bad_batch()).applied:
            raise AssertionError("the NaN batch was applied")
        _seed(step)
        if not stepper.step(loss_fn, batch_at(step)).applied:
            raise AssertionError(f"step {step} was skipped")


def _seed(seed: int) -> None:
    # Before each step, for optimizers that draw numbers: a skipped step in between must not shift them.
    # The CPU's own generator: torch.manual_seed formats a stack for each kind of device that is not there.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def same(one: Any, two: Any) -> bool:
    """Return whether two states are the same to the bit."""
    if isinstance(one, Tensor) or isinstance(two, Tensor):
        if not isinstance(one, Tensor) or not isinstance(two, Tensor) or one.dtype is not two.dtype:
            return False
        return (
            one.shape == two.shape and torch.equal(one.isnan(), two.isnan()) and bool((one == two)[~one.isnan()].all())
        )
    if type(one) is not type(two):
        return False
    if isinstance(one, Mapping):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, float) and one != one:
        return two != two
    if isinstance(one, (Enum, type)) or not hasattr(one, "__dict__"):
        return bool(one == two)
    # A function has nothing to compare; any other object, such as a projection, is what its attributes are.
    return inspect.isroutine(one) or same(vars(one), vars(two))


# -- rows --------------------------------------------------------------------------------------------------------------

REFUSED, NOT_APPLICABLE, OK, OWN, FAILED = "refused", "not applicable", "ok", "own", "failed"


@dataclass
class Row:
    """One class and its outcomes; `why` is empty where all of them are ok."""

    name: str
    equal: str = OK
    skip: str = OK
    resume: str = OK
    why: str = ""

    @property
    def counted(self) -> bool:
        return self.equal not in (REFUSED, NOT_APPLICABLE)

    @property
    def failed(self) -> bool:
        return FAILED in (self.equal, self.skip, self.resume)


def examine(name: str, kind: type[torch.optim.Optimizer]) -> Row:
    """Run one class through all comparisons."""
    entry = ENTRIES.get(name, Entry())
    row = Row(name)
    try:
        plain = Run(kind, entry)
        try:
            plain.stepper()
        except WrongUse as error:
            row.equal = row.skip = row.resume = REFUSED
            row.why = format_error_line(error)
            return row
        start = plain.state()
        plain.plain(range(STEPS))
        _check_moved(start[0], plain.model)
    except Exception as error:
        row.equal = row.skip = row.resume = NOT_APPLICABLE
        row.why = f"the plain loop: {format_error_line(error)}"
        return row
    expected = plain.state()
    row.equal = _outcome(row, "equal", lambda: same(_clean(kind, entry, None), expected))
    row.skip = _outcome(row, "skip", lambda: same(_clean(kind, entry, BAD), expected))
    row.resume = _outcome(row, "resume", lambda: same(_resumed(kind, entry), expected))
    if row.resume == FAILED and row.equal == OK:
        _compare_with_plain_resume(row, kind, entry)
    return row


def _check_moved(start: Mapping[str, Tensor], model: nn.Module) -> None:
    # Weights that stand still, or are NaN, would be equal whatever a Stepper did.
    if not all(bool(parameter.isfinite().all()) for parameter in model.parameters()):
        raise AssertionError("weights became non-finite")
    if any(torch.equal(matrix, start[name]) for name, matrix in model.named_parameters() if matrix.ndim > 1):
        raise AssertionError("a weight did not move")


def _outcome(row: Row, what: str, holds: Callable[[], bool]) -> str:
    try:
        if holds():
            return OK
        row.why += f"{what}: other bits. "
    except Exception as error:
        row.why += f"{what}: {format_error_line(error)} "
    return FAILED


def _clean(kind: Any, entry: Entry, bad: int | None) -> list[Any]:
    run = Run(kind, entry)
    transact(run.stepper(), range(STEPS), bad=bad)
    return run.state()


def _resumed(kind: Any, entry: Entry) -> list[Any]:
    first = Run(kind, entry)
    stepper = first.stepper()
    transact(stepper, range(HALF))
    model, state = through_a_file([first.model.state_dict(), stepper.state_dict()])
    second = Run(kind, entry, seed=1)
    again = second.stepper()
    second.model.load_state_dict(model)
    again.load_state_dict(state)
    transact(again, range(HALF, STEPS))
    return second.state()


def _resumed_plain(kind: Any, entry: Entry) -> list[Any]:
    first = Run(kind, entry)
    first.plain(range(HALF))
    model, state = through_a_file([first.model.state_dict(), first.optimizer.state_dict()])
    second = Run(kind, entry, seed=1)
    second.model.load_state_dict(model)
    second.optimizer.load_state_dict(state)
    second.plain(range(HALF, STEPS))
    return second.state()


def _compare_with_plain_resume(row: Row, kind: Any, entry: Entry) -> None:
    """Take a failed resume for the class's own if the plain loop ends in the same bits, or in the same error."""
    ends: list[Any] = []
    for resumed in (_resumed, _resumed_plain):
        try:
            ends.append(resumed(kind, entry))
        except HalfstepError:
            return
        except Exception as error:
            ends.append(f"{type(error).__name__} {error}")
    if same(*ends):
        row.resume = OWN
        row.why += "The plain loop resumes to the same end."


# -- the page ----------------------------------------------------------------------------------------------------------


def _rows(only: str | None) -> Iterator[Row]:
    found, _ = classes()
    for name, kind in found.items():
        if only is None or only.lower() in (name.lower(), kind.__name__.lower()):
            row = examine(name, kind)
            print(f"{name:40} {row.equal:14} {row.skip:14} {row.resume:14} {row.why}", file=sys.stderr, flush=True)
            yield row


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", metavar="NAME", help="only the classes of this name")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_argument("--record", action="store_true", help="keep the result next to this file")
    given = options.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = list(_rows(given.only))
    _, missing = classes()
    counted = [row for row in rows if row.counted]
    report = {
        "command": "python benchmarks/optimizers.py",
        "versions": {
            package: importlib.metadata.version(package) for name, package in PACKAGES.items() if name not in missing
        },
        "missing": missing,
        "classes": len(counted),
        "equal": sum(row.equal == OK for row in counted),
        "skip": sum(row.skip == OK for row in counted),
        "resume": sum(row.resume == OK for row in counted),
        "own": sum(row.resume == OWN for row in counted),
        "failed": sum(row.failed for row in counted),
        "rows": [asdict(row) for row in rows],
    }
    if given.record:
        _record(report)
    if given.json:
        print(json.dumps(report, indent=1))
        return
    for name in missing:
        many = sum(row["name"].startswith(f"{name}.") for row in json.loads(RECORD.read_text())["rows"])
        print(f"{many} classes are missing: pip install --no-deps --target DIR {PACKAGES[name]}, and PYTHONPATH=DIR")
    left_out = [row for row in rows if not row.counted]
    print(f"not counted: {len(left_out)} that a Stepper refuses, or that a plain loop cannot step")
    figures = " ".join(f"{key}={report[key]}" for key in ("classes", "equal", "skip", "resume", "own", "failed"))
    print(f"optimizers {figures}")


def _record(report: Mapping[str, Any]) -> None:
    lines = ",\n".join(f"  {json.dumps(row)}" for row in report["rows"])
    head = json.dumps({key: value for key, value in report.items() if key != "rows"}, indent=1).removesuffix("\n}")
    text = f'{head},\n "rows": [\n{lines}\n ]\n}}\n'
    RECORD.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
