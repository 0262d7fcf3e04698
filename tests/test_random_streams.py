"""Random numbers belong to the caller: no public function moves the streams of Python, NumPy and torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, Dataset

import halfstep
from halfstep.errors import WrongUse
from halfstep.runs.registry import resolve_own_task
from tests.support.random_streams import (
    FailingLoss,
    OwnStreams,
    augment,
    loss_fn,
    read_streams,
    seed_streams,
    seeding_case,
    small_model,
)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def streams() -> None:
    seed_streams(3)


# -- measuring --------------------------------------------------------------------------------------------------------


class Drawn(Dataset[torch.Tensor]):
    """Samples that draw from all streams when they are read."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return augment(torch.full((8,), float(index)))


def _loader() -> DataLoader[torch.Tensor]:
    return DataLoader(Drawn(), batch_size=4, shuffle=True)


class Rebuilt(nn.Module):
    """A model that is built again when it is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model()

    def __deepcopy__(self, memo: dict[int, Any]) -> Rebuilt:
        copied = Rebuilt()
        copied.load_state_dict(self.state_dict())
        return copied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)
        return found


MEASURING: dict[str, Callable[..., object]] = {
    "audit": lambda *subject: halfstep.audit(*subject, precision="bf16"),
    "audit of an absent device": lambda *subject: halfstep.audit(*subject, device="a100-80gb"),
    "survival": halfstep.survival,
    "estimate": halfstep.estimate,
    "bench": lambda *subject: halfstep.bench(*subject, seeds=1),
    "plan": lambda *subject: halfstep.plan(*subject, seconds=4, device="cpu"),
    "profile": lambda *subject: halfstep.profile(*subject, seconds=4, device="cpu"),
}
SUBJECTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "a model": lambda: (halfstep_island(small_model()), loss_fn, torch.randn(4, 8)),
    "a loader": lambda: (Rebuilt(), loss_fn, _loader()),
    "a function": lambda: (seeding_case,),
    "a name": lambda: ("tests.support.random_streams:seeding_case",),
    "an error in the first call": lambda: (small_model(), FailingLoss(0), torch.randn(4, 8)),
    "an error in the third call": lambda: (small_model(), FailingLoss(2), torch.randn(4, 8)),
}
SLOW = {"bench", "plan", "profile"}
"""They take seconds, and start processes for a name."""
PAIRS = [
    (tool, subject)
    for tool in MEASURING
    for subject in SUBJECTS
    if tool not in SLOW or subject in ("a loader", "a function", "an error in the third call")
]


def halfstep_island(model: nn.Module) -> nn.Module:
    halfstep.island(model, "2")
    return model


@pytest.mark.parametrize(("tool", "subject"), PAIRS)
def test_a_tool_leaves_the_streams_of_its_caller(tool: str, subject: str) -> None:
    given = SUBJECTS[subject]()
    before = read_streams()
    try:
        MEASURING[tool](*given)
    except (WrongUse, KeyError):
        assert "error" in subject
    assert read_streams() == before


@pytest.mark.parametrize("tool", MEASURING)
def test_a_tool_leaves_the_generators_that_a_loss_function_holds(tool: str) -> None:
    own, model, batch = OwnStreams(), small_model(), torch.randn(4, 8)
    before, calls = own.read(), own.calls
    MEASURING[tool](model, own, batch)
    assert own.calls > calls
    assert own.read() == before


def test_a_tool_leaves_the_generator_of_a_loader() -> None:
    generator = torch.Generator().manual_seed(2)
    loader = DataLoader(Drawn(), batch_size=4, shuffle=True, generator=generator)
    before = generator.get_state()
    halfstep.profile(small_model(), loss_fn, loader, seconds=4, device="cpu")
    assert torch.equal(generator.get_state(), before)


# -- steps ------------------------------------------------------------------------------------------------------------


def _steps(take: Callable[[nn.Module, torch.optim.Optimizer], Callable[[Any, torch.Tensor], object]]) -> list[Any]:
    """What five steps leave behind."""
    seed_streams(1)
    own, model = OwnStreams(), small_model()
    step = take(model, torch.optim.SGD(model.parameters(), 1e-2))
    for _ in range(5):
        batch = augment(torch.zeros(4, 8))
        step(loss_fn, batch)
        step(own, batch)
    return [read_streams(), own.read(), [p.tolist() for p in model.parameters()]]


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Any, torch.Tensor], object]:
    def step(loss: Any, batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("options", [{}, {"observe": False}, {"check": True}], ids=str)
def test_an_observed_or_checked_step_draws_what_the_plain_one_draws(options: dict[str, bool], precision: str) -> None:
    plain = _steps(_plain)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Any, torch.Tensor], object]:
        return halfstep.Guardian(halfstep.Stepper(model, optimizer, precision=precision, **options)).step  # type: ignore[arg-type]

    drawn = _steps(step)
    assert drawn[:2] == plain[:2]
    assert (drawn == plain) == (precision == "fp32")


# -- runs -------------------------------------------------------------------------------------------------------------

TASK = """
import random
import numpy as np
import torch
from tests.support.random_streams import augment, seed_streams
from tests.support.tiny_task import Tiny

seed_streams(0)  # as scripts do


class Drawing(Tiny):
    def model(self):
        torch.rand(3), random.random(), np.random.rand()
        return super().model()

    def loss(self, model, batch, metrics=None):
        return super().loss(model, {**batch, "x": augment(batch["x"])}, metrics)
"""


class Folders:
    """A finished run, a run that gave up, and a task."""

    def __init__(self, place: Path) -> None:
        self.place, self.run, self.task = place, place / "run", place / "drawing.py"
        self.task.write_text(TASK)
        self.fit("run")
        self.fit("failed", "data.nan=[1,5,9]")

    def fit(self, name: str, *settings: str) -> None:
        short = ["train.steps=6", "train.batch_size=16", "train.num_workers=0", "run.pictures=0"]
        halfstep.fit(
            {"task": "drawing", "guard": {"mode": "watch"}},
            task=resolve_own_task(self.task),
            settings=[*short, *settings, f"run.dir={self.place / name}"],
            quiet=True,
        )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("drawing"))


def _train_another(folders: Folders) -> None:
    folders.fit("another")


def _diagnose(_: Folders) -> None:
    model = small_model()
    stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), 1e-2), precision="fp32")
    report = stepper.step(loss_fn, torch.full((4, 8), torch.nan))
    before = read_streams()
    halfstep.diagnose(stepper, report)
    assert read_streams() == before
    seed_streams(3)


def _from_accelerate(_: Folders) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator, model = accelerate.Accelerator(cpu=True), MODEL
    given = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-2))
    before = read_streams()
    halfstep.from_accelerate(accelerator, *given)
    assert read_streams() == before
    seed_streams(3)


def _watch(_: Folders) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    watched = halfstep.watch(model, optimizer, tell=lambda event: None)
    loss = loss_fn(model, torch.full((4, 8), torch.nan))
    loss.backward()
    before = read_streams()
    optimizer.step()
    assert read_streams() == before
    watched.close()
    seed_streams(3)


MODEL = small_model()
CALLS: dict[str, Callable[[Folders], object]] = {
    "choose_precision": lambda _: halfstep.choose_precision("auto"),
    "diagnose": _diagnose,
    "doctor": lambda folders: halfstep.doctor(folders.place),
    "evaluate": lambda folders: halfstep.evaluate(folders.run, task=folders.task),
    "export": lambda folders: halfstep.export(folders.run, folders.place / "one.safetensors", task=folders.task),
    "export_sharded": lambda folders: halfstep.export_sharded(folders.run, folders.place / "many", task=folders.task),
    "failed_steps": lambda folders: halfstep.failed_steps(folders.place / "failed"),
    "fit": _train_another,
    "from_accelerate": _from_accelerate,
    "island": lambda _: halfstep.island(MODEL, "2"),
    "load": lambda folders: halfstep.load(folders.run, task=resolve_own_task(folders.task)),
    "replay": lambda folders: halfstep.replay(folders.place / "failed", task=folders.task),
    "report": lambda folders: halfstep.report(folders.run, output=folders.place / "page.html"),
    "runs": lambda folders: halfstep.runs(folders.place),
    "watch": _watch,
    "verify": lambda folders: halfstep.verify(folders.run, resume_steps=2, data=True, task=folders.task),
    "widen": lambda _: halfstep.widen(torch.zeros(3, dtype=torch.bfloat16)),
    "windows": lambda _: list(halfstep.windows([torch.zeros(2), torch.zeros(2)], 2)),
}


def test_all_public_functions_are_here() -> None:
    public = {name: getattr(halfstep, name) for name in halfstep.__all__}
    functions = {name for name, value in public.items() if callable(value) and not inspect.isclass(value)}
    assert functions | {"windows"} == {*CALLS, *MEASURING} - {"audit of an absent device"}


@pytest.mark.parametrize("name", CALLS)
def test_a_function_leaves_the_streams_of_its_caller(name: str, folders: Folders) -> None:
    seed_streams(3)
    before = read_streams()
    CALLS[name](folders)
    assert read_streams() == before


def test_a_run_whose_failed_steps_are_diagnosed_has_the_weights_of_one_without_a_guard(folders: Folders) -> None:
    short = ["train.steps=24", "train.batch_size=4", "train.seed=3", "data.nan=[1,5]"]
    folders.fit("guarded", *short)
    folders.fit("unguarded", *short, "guard.mode=off")
    assert len(halfstep.failed_steps(folders.place / "guarded").failed_steps) == 2
    one, other = (load_file(folders.place / name / "last.safetensors") for name in ("guarded", "unguarded"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
