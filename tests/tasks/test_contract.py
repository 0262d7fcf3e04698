"""What every task in the folder keeps, whoever wrote it."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep import Stepper
from halfstep.measure.batches import move_batch as placed_batch
from halfstep.measure.case import Case
from halfstep.measure.memory.fake_tensors import convert_case_to_fake, move_fake_model
from halfstep.precision.precision import resolve_precision_name
from halfstep.runs.registry import list_task_names
from halfstep.train.task import Task
from tests.support.digest import digest_of_run
from tests.tasks.made import batch_of, made, mean_loss

TASKS = list_task_names()


def test_the_folder_is_not_empty() -> None:
    assert len(TASKS) >= 4
    assert {"segmentation", "classification", "diffusion", "slots"} <= set(TASKS)


@pytest.fixture(params=TASKS)
def task(request: pytest.FixtureRequest) -> Task:
    return made(request.param)


def stepper_of(task: Task, precision: str = "fp32") -> Stepper:
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    return Stepper(model, optimizer, precision=resolve_precision_name(precision))


def test_loss_is_finite_and_reaches_every_parameter(task: Task) -> None:
    model = task.model()
    loss = mean_loss(task.loss(model, batch_of(task, "train")))
    assert torch.isfinite(loss)
    loss.backward()
    unmoved = [name for name, p in model.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()]
    assert unmoved == []


def test_steps_lower_the_loss(task: Task) -> None:
    stepper, batch = stepper_of(task), batch_of(task, "train")
    losses = []
    for _ in range(12):
        torch.manual_seed(0)  # the same noise, where a loss draws some
        losses.append(float(stepper.step(task.loss, batch).loss))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_losses_in_16_bits_are_wide_and_close(task: Task, precision: str) -> None:
    model, batch = task.model(), batch_of(task, "train")
    torch.manual_seed(0)
    reference = mean_loss(task.loss(model, batch))
    torch.manual_seed(0)
    with resolve_precision_name(precision).autocast(torch.device("cpu")):
        narrow = mean_loss(task.loss(model, batch))
    assert narrow.dtype is torch.float32
    assert narrow.item() == pytest.approx(reference.item(), rel=0.05)


def test_a_skipped_step_did_not_happen(task: Task) -> None:
    stepper, batch = stepper_of(task, "bf16"), batch_of(task, "train")
    assert stepper.step(task.loss, batch).applied
    before = digest_of_run(stepper)
    spoiled = {name: t * math.nan if t.is_floating_point() else t for name, t in batch.items()}
    if any(t.is_floating_point() for t in batch.values()):
        assert not stepper.step(task.loss, spoiled).applied
    else:
        assert not stepper.step(lambda *given: mean_loss(task.loss(*given)) * math.nan, batch).applied
    assert digest_of_run(stepper) == before
    assert stepper.step(task.loss, batch).applied


@torch.no_grad()
def test_metrics_hold_the_one_that_decides(task: Task) -> None:
    model = task.model().eval()
    metrics = task.metrics()
    for size in (4, 1):
        task.loss(model, batch_of(task, "val", size), metrics)
    values = metrics.compute()
    assert task.metric == "loss" or task.metric in values
    assert all(value.dtype in (torch.float32, torch.float64) and torch.isfinite(value) for value in values.values())


class Leaving(TorchDispatchMode):
    """Copies from a device to the main memory. Other ways to wait for it are errors of their own on fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor) and leaf.is_cuda]
        if given and any(isinstance(leaf, Tensor) and leaf.is_cpu for leaf in pytree.tree_leaves(found)):
            self.copies.append(str(func))
        return found


def copies_from_a_gpu(task: Task) -> list[str]:
    """Of the loss and the metrics of a training step, on a GPU that is only described."""
    gpu, model, batch, mode = torch.device("cuda"), task.model(), batch_of(task, "train"), FakeTensorMode()
    case = convert_case_to_fake(Case("tiny", model, task.loss, batch), mode)
    metrics = task.metrics()
    with mode:
        there = move_fake_model(case.model, gpu, False)
        for _, metric in metrics.items():
            for name, state in metric.metric_state.items():
                setattr(metric, name, torch.empty_like(mode.from_tensor(state), device=gpu))
        with Leaving() as leaving:
            task.loss(there, placed_batch(case.batch, gpu), metrics)
    return leaving.copies


def test_loss_and_metrics_do_not_wait_for_the_gpu(task: Task) -> None:
    assert copies_from_a_gpu(task) == []


def test_waiting_for_the_gpu_is_seen() -> None:
    task = made("classification")
    whole = task.loss
    task.loss = lambda *given: whole(*given) * whole(*given).detach().cpu().to(torch.device("cuda"))  # type: ignore[method-assign]
    assert copies_from_a_gpu(task) == ["aten._to_copy.default"]


def test_facts_are_enough_to_predict_without_data(task: Task) -> None:
    model = task.model().eval()
    image = task.prompt("def ") if task.reads == "text" else task.source("val").read(0)["image"]
    torch.manual_seed(0)
    expected = task.predict(model, image)
    kept = json.loads(json.dumps(task.facts()))

    again = type(task)(task.recipe)
    again.remember(kept)
    again.source = None  # type: ignore[assignment, method-assign]
    copy = again.model()
    copy.load_state_dict(model.state_dict())
    torch.manual_seed(0)
    got = again.predict(copy.eval(), image)
    assert got.values == expected.values
    assert got.values
    assert (got.mask is None) == (expected.mask is None)
    assert got.mask is None or np.array_equal(got.mask, expected.mask)


def test_nothing_to_remember_is_no_error(task: Task) -> None:
    task.remember({})
    assert task.facts() == made(task.recipe.task).facts()


@torch.no_grad()
def test_pictures_are_8_bit_colour(task: Task) -> None:
    shown = task.shown(task.model().eval(), batch_of(task, "val", 2))
    assert len(shown) == (0 if task.reads == "text" else 2)
    for picture in (picture for one in shown for picture in one.panels.values()):
        assert picture.dtype == np.uint8
        assert picture.ndim == 3
        assert picture.shape[2] == 3
        assert picture.std() > 0


def test_augmentation_is_decided_by_torchs_generator(task: Task) -> None:
    def drawn(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        return list(batch_of(task, "train").values())

    assert all(torch.equal(a, b) for a, b in zip(drawn(1), drawn(1), strict=True))
    # Text is not augmented.
    is_same = all(torch.equal(a, b) for a, b in zip(drawn(1), drawn(2), strict=True))
    assert is_same == (task.reads == "text")


def test_every_field_has_a_sentence(task: Task) -> None:
    for section in ("model", "data", "loss"):
        for name, field in type(getattr(task.recipe, section)).model_fields.items():
            assert field.description, f"{section}.{name}"
            assert field.description.endswith("."), f"{section}.{name}"
