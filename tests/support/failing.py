"""One rank of a job fails, at a place that the test names; what every rank then saw and kept."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import Ema, Stepper, Window
from halfstep.precision.precision import resolve_precision_name
from tests.support.digest import digest_of_run, feed  # noqa: F401

PLACES = ["before the model", "after the model", "in forward", "in backward", "Ctrl-C"]


class Unreadable(ValueError):
    pass


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise Unreadable("sample 7")


class Fails(nn.Module):
    """Raises where it is told to, once."""

    def __init__(self) -> None:
        super().__init__()
        self.place = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.place == "in forward":
            raise Unreadable("sample 7")
        return RaisesInBackward.apply(x) if self.place == "in backward" else x


class Model(nn.Module):
    def __init__(self, buffers: bool) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16) if buffers else nn.Identity()
        self.fails = Fails()

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.fails(self.norm(self.first(x)).tanh())).tanh())


def loss(model: Any, batch: tuple[Tensor, str]) -> Tensor:
    """Of a batch that says where its loss fails."""
    x, place = batch
    if place == "before the model":
        raise Unreadable("sample 7")
    model.fails.place = place
    out = model(x)
    if place == "after the model":
        raise Unreadable("sample 7")
    if place == "Ctrl-C":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)  # the interpreter raises it here
    return out.float().square().mean()


def stepper_for(kind: str, buffers: bool, **options: Any) -> Stepper:
    torch.manual_seed(0)
    model: Any = Model(buffers)
    if kind == "FSDP2":
        from torch.distributed.fsdp import fully_shard

        for part in (model.first, model.second, model.third):
            fully_shard(part)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    ema = None if kind == "FSDP2" else Ema(model)
    if kind == "DDP":
        options.setdefault("ddp", {"bucket_cap_mb": 1e-3})
    return Stepper(model, optimizer, precision=resolve_precision_name("fp32"), ema=ema, clip_norm=1.0, **options)


def batches(rank: int, step: int, microbatches: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(6, 8, generator=generator) for _ in range(microbatches)]


def local_digest(stepper: Stepper) -> str:
    """Everything of a run, of shards what this rank holds."""
    from tests.support.digest import digest_of

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to_local() if hasattr(value, "to_local") else value
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items()}
        return value

    state = stepper.state_dict()
    optimizers = {name: plain(own["optimizer"]["state"]) for name, own in state["optimizers"].items()}
    parameters, buffers = dict(stepper.model.named_parameters()), dict(stepper.model.named_buffers())
    return digest_of(plain(parameters), plain(buffers), optimizers, state["ema"], state["counts"])


def attempted(stepper: Stepper, rank: int, step: int, place: str, microbatches: int, bad: int) -> dict[str, Any]:
    """One window, in which micro-batch `bad` fails at `place`; what came of it."""
    window = Window((x, place if i == bad else "") for i, x in enumerate(batches(rank, step, microbatches)))
    before, since = local_digest(stepper), time.monotonic()
    found: dict[str, Any] = {"error": "", "words": "", "rank": None, "usable": None}
    try:
        found["reason"] = stepper.step(loss, window).reason
    except BaseException as error:
        found |= {"error": type(error).__name__, "words": str(error)}
        found |= {"rank": getattr(error, "rank", None), "usable": getattr(error, "usable", None)}
        found["notes"] = list(getattr(error, "__notes__", []))
    found["seconds"] = time.monotonic() - since
    found["unchanged"] = local_digest(stepper) == before
    return found
