"""transformers' Trainer with a criterion, a teacher or carried state that is not the model's own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from benchmarks.loops.harness import (
    NAN,
    HalfstepError,
    Seen,
    differences,
    flat,
    frozen_copy,
    limit,
    loop,
    mlp,
    pairs,
    refuses,
    require,
    require_same,
)
from halfstep.adapters.transformers import HalfstepMixin

BATCHES = pairs(6)
PAGE = "adapters/transformers.md"


class Net(nn.Module):
    """Returns a dict with the loss, as the Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(norm=True)

    def outside(self) -> list[Any]:
        return []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.net(x)
        return {"loss": F.mse_loss(out.float(), labels), "logits": out}


class HiddenTeacher(Net):
    """A teacher in a list, a running mean and a counter as plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self._teacher, self.mean, self.calls = [frozen_copy(self.net)], torch.zeros(4), 0

    def outside(self) -> list[Any]:
        return [self._teacher[0], Seen(lambda: {"mean": self.mean, "calls": self.calls})]

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            for t, s in zip(self._teacher[0].parameters(), self.net.parameters(), strict=True):
                t.lerp_(s, 0.1)
            aim = self._teacher[0](x)
        out = self.net(x)
        self.mean = 0.9 * self.mean + 0.1 * out.detach().float().mean(0)
        self.calls += 1
        return {"loss": F.mse_loss(out.float() - self.mean, labels) + 0.1 * F.mse_loss(out, aim), "logits": out}


class Rows(Dataset):  # type: ignore[type-arg]
    def __init__(self, batches: Sequence[Any]) -> None:
        self.rows = [(x, y) for batch in batches for x, y in zip(*batch, strict=True)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        x, y = self.rows[place]
        return {"x": x, "labels": y}


class InOrder:
    """No shuffling: the sampler is the order of the rows."""

    def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[attr-defined]


class Stock(InOrder, Trainer): ...


class Safe(HalfstepMixin, InOrder, Trainer): ...


def trained(
    make: Callable[[], Any], batches: Sequence[Any], ours: bool, kind: type | None = None, **options: Any
) -> Any:
    """A Trainer that has trained once over these batches."""
    torch.manual_seed(0)
    kind = kind or (Safe if ours else Stock)
    extra = {"halfstep": {"guard": "off"}} if ours else {}
    callbacks = options.pop("callbacks", [])
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            **{
                "num_train_epochs": 1,
                "per_device_train_batch_size": 8,
                "learning_rate": 1e-2,
                "lr_scheduler_type": "constant",
                "max_grad_norm": 0.0,
                "logging_strategy": "no",
                "save_strategy": "no",
                "use_cpu": True,
                "report_to": [],
                "disable_tqdm": True,
                **options,
            },
        )
        trainer = kind(make(), arguments, train_dataset=Rows(batches), callbacks=callbacks, **extra)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return trainer


def numbers(trainer: Any) -> dict[str, Any]:
    model = trainer.model
    things = [model, *model.outside(), *getattr(trainer, "beside", [])]
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    things.append(optimizer.state_dict()["state"])
    return {name: value for i, thing in enumerate(things) for name, value in flat(thing, str(i))}


def spoil(batch: Any) -> Any:
    return batch[0] * NAN, batch[1]


def kept(
    make: Callable[[], Any],
    bad: Sequence[int] = (0, 3),
    many: int = 1,
    kinds: tuple[type, type] | None = None,
    **options: Any,
) -> str:
    given: list[Any] = []
    for i in range(0, 6, many):
        if i // many in bad:
            given += [*BATCHES[i : i + many - 1], spoil(BATCHES[i + many - 1])]
        given += BATCHES[i : i + many]
    options = {"gradient_accumulation_steps": many, **options}
    stock, safe = kinds or (Stock, Safe)
    hand = numbers(trained(make, BATCHES, False, stock, **options))
    ours = numbers(trained(make, given, True, safe, **options))
    differ = differences(hand, ours)
    require(not differ, f"compared with the Trainer's run without the bad batches: {len(differ)} differ: {differ[:4]}")
    return f"{len(bad)} bad windows left no trace; bitwise as the Trainer without them"


@loop
def transformers_teacher_and_running_mean() -> str:
    return kept(HiddenTeacher)


@loop
def transformers_teacher_over_windows() -> str:
    return kept(HiddenTeacher, bad=(0, 2), many=2)


@loop
def transformers_clipping_by_norm() -> str:
    return kept(HiddenTeacher, max_grad_norm=0.1)


class Centre(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))
        self.calls = 0

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        self.centre.lerp_(out.detach().float().mean(0), 0.1)
        self.calls += 1
        return F.mse_loss(out.float() - self.centre.clone(), y)


class OwnLoss(InOrder):
    """`compute_loss` with a criterion that hangs on the Trainer, as distillation trainers have it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.criterion = Centre()
        self.beside = [self.criterion, Seen(lambda: {"calls": self.criterion.calls})]

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        out = model(**inputs)
        loss = self.criterion(out["logits"], inputs["labels"])
        return (loss, out) if return_outputs else loss


class StockOwnLoss(OwnLoss, Trainer): ...


class SafeOwnLoss(HalfstepMixin, OwnLoss, Trainer): ...


@loop
def transformers_criterion_of_the_trainer() -> str:
    return kept(Net, kinds=(StockOwnLoss, SafeOwnLoss))


@loop
def transformers_two_bad_in_a_row_at_the_beginning() -> str:
    hand = numbers(trained(HiddenTeacher, BATCHES, False))
    ours = trained(HiddenTeacher, [spoil(BATCHES[0])] * 2 + BATCHES, True)
    require_same(hand, numbers(ours), "compared with the Trainer's run without the bad batches")
    require(ours.hosted.stepper.counts.applied == 6, f"{ours.hosted.stepper.counts}")
    return "2 bad batches at the beginning left no trace"


@loop
def transformers_global_step_counts_attempts() -> str:
    ours = trained(Net, [BATCHES[0], spoil(BATCHES[1]), *BATCHES[1:]], True)
    require(ours.state.global_step == 7, f"global_step is {ours.state.global_step}")
    require(ours.hosted.stepper.counts.applied == 6, f"{ours.hosted.stepper.counts}")
    return limit("`state.global_step` counts skipped steps", "7 attempts, 6 applied", PAGE)


@loop
def transformers_mixin_in_the_wrong_place_is_refused() -> str:
    with refuses(HalfstepError, "HalfstepMixin"):

        class Wrong(InOrder, Trainer, HalfstepMixin): ...

        trained(Net, BATCHES, True, Wrong)
    return "refused by name"
