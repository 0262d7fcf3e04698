"""Several ranks make one decision: a NaN or an error on one skips or fails the step on all."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.errors import RankFailed
from halfstep.selftest.part import PartContext, PartResult, PartSkipped, require
from halfstep.selftest.small import Batch, build_convolutional_model, compute_classification_loss, create_image_batch
from halfstep.step.report import LOSS_NOT_FINITE
from halfstep.step.stepper import Stepper

MOST_RANKS = 8
PATIENCE = 300.0
"""Seconds that a rank waits for another one. Loading torch takes long where many processes do."""


class _Planted(Exception):
    """The error of one rank's loss function."""


def check(place: PartContext) -> PartResult:
    """Start a rank for each device, or two on a CPU, and compare their decisions."""
    count, backend = _choose_world(place.device)
    rank = partial(join_and_run_windows, kind=place.device.type, count=count, store=place.written("ranks") / "store")
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as ranks:
        answers = dict(enumerate(ranks.map(rank, range(count))))
    check_rank_decisions(answers)
    return PartResult(f"{count} ranks on {backend}: 4 of 4 decisions equal", {"ranks": count, "backend": backend})


def check_rank_decisions(answers: dict[int, dict[str, Any]]) -> None:
    """Raise PartFailed if the ranks did not decide alike, or did not decide right."""
    wanted = {"clean": None, "nan": LOSS_NOT_FINITE, "again": None}
    for rank, answer in sorted(answers.items()):
        for window, reason in wanted.items():
            found = answer[window]["reason"]
            require(found == reason, f"rank {rank}: a {window} window ended as {found or 'applied'}")
        require(answer["nan"]["weights"] == answer["clean"]["weights"], f"rank {rank}: a skipped window moved")
        raised = "RankFailed" if rank != max(answers) else "_Planted"
        require(answer["error_of_one"] == raised, f"rank {rank}: an error of one rank was {answer['error_of_one']}")
    for window in wanted:
        weights = {str(answer[window]["weights"]) for answer in answers.values()}
        require(len(weights) == 1, f"after a {window} window the ranks have different weights")
    first = answers[0]
    require(first["clean"]["weights"] != first["again"]["weights"], "an applied window did not change the weights")


def _choose_world(device: torch.device) -> tuple[int, str]:
    """Return the number of ranks and the backend; raise PartSkipped where several ranks cannot run."""
    if not dist.is_available():
        raise PartSkipped("this torch was built without torch.distributed")
    if device.type == "cpu":
        return 2, "gloo"
    count = torch.accelerator.device_count()
    if count < 2:
        raise PartSkipped("one device only")
    backend = dist.get_default_backend_for_device(device)
    return min(count, MOST_RANKS), str(backend)


def run_windows(device: torch.device) -> dict[str, Any]:
    """Take the windows on this rank of a process group, and return how each ended, as plain data."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    model = build_convolutional_model(device)
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), 1e-3), precision="fp32")
    found: dict[str, Any] = {}
    for seed, window in enumerate(("clean", "nan", "again")):
        images, classes = create_image_batch(device, seed=10 * seed + rank)
        if window == "nan" and rank == last:
            images = images * float("nan")
        report = stepper.step(compute_classification_loss, (images, classes))
        # Sums to the last bit, of parameters alone: buffers are each rank's own, as batch statistics are.
        weights = [float(p.detach().double().sum()).hex() for p in model.parameters()]
        found[window] = {"reason": report.reason, "weights": weights}
    try:
        stepper.step(partial(_compute_failing_loss, fails=rank == last), create_image_batch(device, seed=rank))
        found["error_of_one"] = "lost"
    except (_Planted, RankFailed) as error:
        found["error_of_one"] = type(error).__name__
    return found


def _compute_failing_loss(model: nn.Module, data: Batch, fails: bool) -> Tensor:
    loss = compute_classification_loss(model, data)
    if fails:
        raise _Planted
    return loss


def join_and_run_windows(rank: int, kind: str, count: int, store: Path) -> dict[str, Any]:
    """Join the other ranks, take the windows, and return how they ended."""
    device, backend = torch.device(kind), "gloo"
    if kind != "cpu":
        device = torch.device(kind, rank)
        torch.accelerator.set_device_index(rank)
        backend = f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(device)}"
    torch.set_num_threads(1)
    limit = timedelta(seconds=PATIENCE)
    dist.init_process_group(backend, store.as_uri(), limit, rank=rank, world_size=count)
    found = run_windows(device)
    dist.destroy_process_group()
    return found
