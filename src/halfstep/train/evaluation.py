"""Evaluate a model: every sample once, without gradients, with sums in float64."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import distributed
from halfstep.data.dataset import Batch, ReplacedSample
from halfstep.precision.precision import Precision, widen
from halfstep.step.loss import Counted
from halfstep.step.synchronizers import reshard_gathered_parameters
from halfstep.train.metrics import Metrics
from halfstep.train.task import BatchQuality, SampleDisplay, Task

WORST, TYPICAL, ONE_OF_FEW = "worst", "typical", ""


@dataclass(frozen=True)
class ChosenSample:
    """The number of a sample, and why it was chosen."""

    number: int
    why: str


class SampleChooser:
    """A listener of an evaluation that stores the quality of each sample on the device until `chosen` is called."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._numbers: list[int] = []
        self._quality: list[Tensor] = []
        self._kinds: list[Tensor] = []

    @property
    def judges(self) -> bool:
        """Return whether the task overrides `judge`; other tasks may pass anything to their metrics."""
        return type(self._task).judge is not Task.judge

    def on_outputs(self, batch: Batch, said: Any, truth: Any) -> None:
        """Judge the outputs of a batch with the task, and add the result."""
        self.add(batch, self._task.judge(said, truth))

    def add(self, batch: Batch, judged: BatchQuality) -> None:
        """Add the judged samples of a batch."""
        self._numbers += batch.ids
        self._quality.append(judged.quality)
        self._kinds += [judged.classes["truth"]] if "truth" in judged.classes else []

    @property
    def total(self) -> int:
        """Return the number of samples added."""
        return len(self._numbers)

    def chosen(self, count: int) -> list[ChosenSample]:
        """Return at most `count` samples: the worst first, then typical ones.

        Within each group, every class appears once before any appears twice.
        """
        if not self._numbers or not count:
            return []
        # A non-finite quality sorts first: the sample is among the worst.
        quality = torch.cat(self._quality).float().nan_to_num(nan=-torch.inf).tolist()
        kinds = torch.cat(self._kinds).tolist() if self._kinds else [0] * len(quality)
        return [
            ChosenSample(self._numbers[place], why) for place, why in choose_worst_and_typical(quality, kinds, count)
        ]


def choose_worst_and_typical(quality: Sequence[float], kinds: Sequence[int], count: int) -> list[tuple[int, str]]:
    """Return positions of samples with the reason for each; all of them, worst first, where `count` allows."""
    ascending = sorted(range(len(quality)), key=lambda place: quality[place])
    if len(ascending) <= count:
        return [(place, ONE_OF_FEW) for place in ascending]
    # The worst come from the lower half only: beyond it, variety would call an average sample the worst.
    many, middle = (count + 1) // 2, len(ascending) // 2
    worst = _choose_varied_places(ascending, kinds, many, among=max(many, middle))
    usual = quality[ascending[middle]]
    rest = sorted(set(ascending) - set(worst), key=lambda place: (abs(quality[place] - usual), place))
    typical = _choose_varied_places(rest, kinds, count // 2, among=len(rest), but=[kinds[place] for place in worst])
    return [(place, WORST) for place in worst] + [(place, TYPICAL) for place in typical]


def _choose_varied_places(
    places: Sequence[int], kinds: Sequence[int], count: int, among: int, but: Sequence[int] = ()
) -> list[int]:
    """Return the first `count` places, preferring kinds not seen yet within the first `among`."""
    left, taken, seen = list(places[:among]), list[int](), set(but)
    while left and len(taken) < count:
        place = next((one for one in left if kinds[one] not in seen), left[0])
        seen.add(kinds[place])
        taken.append(place)
        left.remove(place)
    return taken


def format_caption_start(why: str, name: str) -> str:
    """Return the start of a caption: why the sample was chosen, and its file name without folders."""
    short = PurePath(name).name
    return f"{why}: {short}" if why else short


def format_caption(words: str, shown: SampleDisplay) -> str:
    """Return a whole caption: one line above panels side by side, several lines below a single panel."""
    return ("\n" if len(shown.panels) == 1 else ", ").join(part for part in (words, shown.caption) if part)


def describe_chosen_samples(chosen: Sequence[ChosenSample], total: int) -> str:
    """Return how many samples of how many are shown, and which."""
    worst, typical = (sum(one.why == why for one in chosen) for why in (WORST, TYPICAL))
    if not worst:
        return f"all {total} validation samples, the worst first"
    return f"the {worst} worst and {typical} typical of {total} validation samples"


Progress = Callable[[int, int], None]
"""A callback with the number of batches done, and of all batches."""
OnOutputs = Callable[[Batch, Any, Any], None]
"""A callback with each batch, the outputs of the model and the targets, as the metrics get them."""


SoFar = Callable[[], dict[str, float]]
"""Returns the loss and metrics so far, on this rank; the call synchronizes with the device."""


class StopEvaluation(Exception):
    """An evaluation that was stopped on all ranks, since `stop` was true on one of them."""


def _never_stop() -> bool:
    return False


def evaluate_model(
    task: Task,
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    precision: Precision,
    device: torch.device,
    progress: Progress = lambda done, of: None,
    left_out: Callable[[Sequence[ReplacedSample]], None] = lambda samples: None,
    begun: Callable[[SoFar], None] = lambda so_far: None,
    on_outputs: OnOutputs | None = None,
    stop: Callable[[], bool] = _never_stop,
) -> dict[str, float]:
    """Return the loss and the task's metrics over all batches and all ranks; raise StopEvaluation after `stop`.

    `stop` is asked after every batch; where it is true on one rank, all of them end here. `left_out` gets the
    unreadable samples of each batch. `begun` gets a function that reads the numbers so far. `on_outputs` gets what the
    metrics get, batch by batch.
    """
    metrics = task.metrics().to(device)
    sums: list[Tensor] = []
    # Sums stay on the device: reading them costs a synchronization, which only a listener pays.
    begun(lambda: _compute_mean_metrics(_add_loss_sums(sums), metrics))
    # An iterable without a length is shown without a total.
    of = len(batches) if isinstance(batches, Sized) else 0
    # The caller's mode is restored, since a model may be evaluated outside of training.
    training, stopped = model.training, False
    if distributed.is_sharded(model.parameters()):
        batches, stop = _iterate_in_step(task, model, batches, stop), _never_stop
    model.eval()
    try:
        with precision.inference(device):
            for done, batch in enumerate(batches, 1):
                listeners: Any = (
                    metrics
                    if on_outputs is None
                    else _MetricsWithListener(metrics, functools.partial(on_outputs, batch))
                )
                sums.append(_sum_loss(task.loss(model, batch.tensors, listeners), len(batch.ids)))
                left_out(batch.replaced)
                progress(done, of)
                if stopped := stop():
                    break
    finally:
        reshard_gathered_parameters(model)
        model.train(training)
    # Only the loss is summed here: metrics sum over the ranks in their own compute(). A rank that stopped takes part:
    # the others may be here already.
    *total, stops = distributed.sum_counts_over_ranks(
        torch.cat([_add_loss_sums(sums), torch.tensor([float(stopped)])])
    ).tolist()
    if stops:
        raise StopEvaluation
    return _compute_mean_metrics(torch.tensor(total, dtype=torch.float64), metrics)


def _iterate_in_step(
    task: Task, model: nn.Module, batches: Iterable[Batch], stop: Callable[[], bool]
) -> Iterator[Batch]:
    """Yield the batches of this rank, in step with the other ranks; raise StopEvaluation where `stop` is true on one.

    A sharded model gathers its weights in every forward pass, so all ranks must run the same number of them: a rank
    that has no batch left repeats one, uncounted, while others have more.
    """
    iterator, last = iter(batches), None
    while True:
        batch = next(iterator, None)
        more, stops = distributed.sum_tensor_over_ranks(
            torch.tensor([batch is not None, stop()], dtype=torch.int64)
        ).tolist()
        if stops:
            raise StopEvaluation
        if not more:
            return
        if batch is not None:
            yield batch
            last = batch
        else:
            last = last or batches.read([0])  # type: ignore[attr-defined]  # fewer samples than ranks
            task.loss(model, last.tensors)


def _compute_mean_metrics(total: Tensor, metrics: Metrics) -> dict[str, float]:
    loss, count = total.tolist()
    return {"loss": loss / max(count, 1.0), **compute_metric_values(metrics)}


class _MetricsWithListener:
    """Metrics and one more listener of outputs and targets."""

    def __init__(self, metrics: Metrics, other: Callable[[Any, Any], None]) -> None:
        self._metrics, self._other = metrics, other

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._metrics.update(*args, **kwargs)
        # Tasks may call update() with keywords alone; there is then no pair of output and target to pass on.
        if len(args) == 2:
            self._other(*args)


def compute_metric_values(metrics: Metrics) -> dict[str, float]:
    """Return the computed metrics over all ranks; a metric with a value per class becomes `name_0`, `name_1`, ..."""
    with warnings.catch_warnings():
        # A rank may have had no batch: torchmetrics warns of compute() before update().
        warnings.filterwarnings("ignore", message="The ``compute`` method", category=UserWarning)
        with distributed.mark_thread_waiting():
            computed = metrics.compute()
    found: dict[str, float] = {}
    for name, value in computed.items():
        _add_metric_values(found, name, value.tolist())
    return found


def _add_metric_values(found: dict[str, float], name: str, numbers: Any) -> None:
    if isinstance(numbers, list):
        for place, number in enumerate(numbers):
            _add_metric_values(found, f"{name}_{place}", number)
    else:
        found[name] = float(numbers)


def _sum_loss(loss: Any, samples: int) -> Tensor:
    """Return a loss as sum and count on its own device, without synchronizing."""
    # A plain loss is a mean over its batch: weighted by samples, since the last batch may be smaller.
    total, count = loss if isinstance(loss, Counted) else (loss * samples, samples)
    total = widen(torch.as_tensor(total))
    return torch.stack([total, torch.as_tensor(count).to(total)])


def _add_loss_sums(sums: list[Tensor]) -> Tensor:
    """Return the sums in float64, on the host: not every device supports it."""
    return torch.stack(sums).cpu().to(torch.float64).sum(0) if sums else torch.zeros(2, dtype=torch.float64)
