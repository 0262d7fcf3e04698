"""One loop: what it is made of, the same loop by hand, and the checks that tell whether the promise held."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

import halfstep
from halfstep import Counted, Out, Stepper, StepReport, Window

DOCS = Path(__file__).parents[2] / "docs"
NAN, INF = float("nan"), float("inf")
SPOIL = object()
"""In place of a bad batch: the loss itself becomes infinite, for batches of whole numbers."""
REASONS = ("loss_not_finite", "gradient_overflow", "gradient_not_finite", "buffer_not_finite")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Broken(AssertionError):
    """The promise did not hold, and this is what was seen."""


class Documented(str):
    """A limit that the documentation states was seen as it is stated there."""


def limit(words: str, evidence: str, page: str = "step.md") -> Documented:
    """This limit was met; the page has to state it, in these words."""
    text = " ".join((DOCS / page).read_text(encoding="utf-8").lower().split())
    require(words.lower() in text, f"docs/{page} does not say '{words}': {evidence}")
    return Documented(evidence)


@dataclass(frozen=True)
class Loop:
    """A loop by name. `run` returns a line of evidence, or raises."""

    name: str
    family: str
    run: Callable[[], str]


LOOPS: dict[str, Loop] = {}


def loop(function: Callable[[], str]) -> Callable[[], str]:
    """Register a loop under its function's name; its file is its family."""
    named(function.__name__, function)
    return function


def named(name: str, function: Callable[[], str], family: str | None = None) -> None:
    """Register a loop that is one of a series."""
    name = name.strip("_")
    if name in LOOPS:
        raise ValueError(f"two loops are called {name}")
    LOOPS[name] = Loop(name, family or function.__module__.rpartition(".")[2], function)


def require(condition: object, seen: str) -> None:
    if not condition:
        raise Broken(seen)


# -- what a loop is made of ---------------------------------------------------------------------------------------


@dataclass
class Case:
    """A model, its optimizers, a loss function, and whatever else a step may write."""

    model: nn.Module
    optimizer: Any
    loss_fn: Callable[..., Any]
    beside: Sequence[Any] = ()
    schedule: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    stepper: Stepper = field(init=False)

    def start(self, **options: Any) -> Stepper:
        given = {"precision": "fp32", **self.options, **options}
        if self.schedule is not None:
            given["schedule"] = self.schedule
        self.stepper = Stepper(self.model, self.optimizer, **given)
        return self.stepper

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return list(self.optimizer.values()) if isinstance(self.optimizer, Mapping) else [self.optimizer]

    @property
    def schedules(self) -> list[Any]:
        if self.schedule is None:
            return []
        return list(self.schedule.values()) if isinstance(self.schedule, Mapping) else [self.schedule]

    def state(self) -> dict[str, Any]:
        """Every number of this loop, by name, copied."""
        riders = [self.options["ema"]] if "ema" in self.options else []
        things = [self.model, *self.optimizers, *self.schedules, *self.beside, *riders]
        return {name: value for i, thing in enumerate(things) for name, value in flat(thing, str(i))}


class Seen:
    """What a loop writes that is neither a weight nor a buffer, read anew each time: for `Case.beside`."""

    def __init__(self, read: Callable[[], Mapping[str, Any]]) -> None:
        self.state_dict = read


def flat(thing: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of modules, of objects with `state_dict`, and of containers."""
    if isinstance(thing, nn.Module):
        for name, tensor in [
            *thing.named_parameters(remove_duplicate=False),
            *thing.named_buffers(remove_duplicate=False),
        ]:
            yield f"{path}.{name}", "uninitialised" if is_lazy(tensor) else _kept(tensor)
    elif isinstance(thing, Tensor):
        yield path, _kept(thing)
    elif isinstance(thing, Mapping):
        for key, value in thing.items():
            yield from flat(value, f"{path}.{key}")
    elif isinstance(thing, (list, tuple)):
        for i, value in enumerate(thing):
            yield from flat(value, f"{path}.{i}")
    elif hasattr(thing, "state_dict"):
        yield from flat(thing.state_dict(), path)
    else:
        yield path, repr(thing)


def _kept(tensor: Tensor) -> Tensor:
    local = getattr(tensor, "to_local", None)
    return (local() if local else tensor).detach().clone()


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: -0.0 and 0.0 differ, NaN equals itself."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.contiguous().flatten().view(torch.uint8)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))
    return type(one) is type(other) and one == other


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names of what is not bitwise the same."""
    missing = [name for name in {**one, **other} if (name in one) != (name in other)]
    return missing + [name for name in one if name in other and not same(one[name], other[name])]


def require_same(one: Mapping[str, Any], other: Mapping[str, Any], when: str) -> None:
    differ = differences(one, other)
    require(not differ, f"{when}: {len(differ)} differ: {', '.join(differ[:4])}")


def require_close(one: Any, other: Any, when: str, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    a, b = dict(flat(one)), dict(flat(other))
    differ = [k for k in a if isinstance(a[k], Tensor) and not torch.allclose(a[k], b[k], rtol=rtol, atol=atol)]
    require(not differ, f"{when}: {', '.join(differ[:4])} not close")


# -- batches ------------------------------------------------------------------------------------------------------


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


def whole(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=generator(seed))


def pairs(many: int = 3, n: int = 8, inputs: int = 16, outputs: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Batches for regression."""
    return [(normal(n, inputs, seed=i), normal(n, outputs, seed=50 + i)) for i in range(many)]


def labelled(
    many: int = 3, n: int = 8, shape: tuple[int, ...] = (16,), classes: int = 4
) -> list[tuple[Tensor, Tensor]]:
    """Batches for classification."""
    return [(normal(n, *shape, seed=i), whole(classes, n, seed=50 + i)) for i in range(many)]


def poisoned(batch: Any, value: float = NAN) -> Any:
    """The same batch with every floating point number spoilt; of a window, the last micro-batch."""
    if isinstance(batch, Window):
        return Window([*batch[:-1], poisoned(batch[-1], value)])

    def spoil(t: Tensor) -> Tensor:
        return t.detach() * value if t.is_floating_point() or t.is_complex() else t

    return pytree.tree_map_only(Tensor, spoil, batch)


def mse(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def ce(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])


def mlp(*widths: int, norm: bool = False) -> nn.Sequential:
    widths = widths or (16, 32, 4)
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        layers.append(nn.Linear(a, b))
        if i < len(widths) - 2:
            layers += [nn.BatchNorm1d(b)] if norm else []
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


# -- the same loop by hand ----------------------------------------------------------------------------------------


def plain(result: Any) -> Tensor:
    """The loss in what a loss function returned."""
    if isinstance(result, Out):
        result = result.loss
    if isinstance(result, Counted):
        return result.sum / result.count
    if isinstance(result, dict) and not hasattr(result, "loss"):
        return sum(result.values())  # type: ignore[return-value]
    return result if isinstance(result, Tensor) else result.loss


def by_hand(case: Case, batch: Any, precision: str = "fp32", scaler: torch.amp.GradScaler | None = None) -> None:
    """One step as everyone writes it."""
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for optimizer in case.optimizers:
        optimizer.zero_grad()
    micro = batch if isinstance(batch, Window) else [batch]
    for one in micro:
        with torch.autocast("cpu", DTYPES.get(precision, torch.bfloat16), enabled=precision in DTYPES):
            loss = plain(case.loss_fn(case.model, one))
        scaler.scale(loss / len(micro)).backward()
    _update(case, scaler)


def _update(case: Case, scaler: torch.amp.GradScaler) -> None:
    clip = case.options.get("clip_norm")
    for optimizer in case.optimizers:
        scaler.unscale_(optimizer)
    if clip is not None:
        nn.utils.clip_grad_norm_([p for o in case.optimizers for g in o.param_groups for p in g["params"]], clip)
    for optimizer in case.optimizers:
        scaler.step(optimizer)
    scaler.update()
    for schedule in case.schedules:
        schedule.step()


# -- the promise --------------------------------------------------------------------------------------------------


def skips(case: Case, bad: Any, reasons: Sequence[str] = REASONS, **how: Any) -> StepReport:
    """A bad batch: the step says why it was not applied, and nothing has changed, to the bit."""
    before = case.state()
    applied = case.stepper.counts.applied
    loss_fn = case.loss_fn
    if bad is SPOIL:
        batch = how.pop("batch")
        report = case.stepper.step(lambda m, b: _spoilt(loss_fn(m, b)), batch, **how)
    else:
        how.pop("batch", None)
        report = case.stepper.step(loss_fn, bad, **how)
    require(not report.applied, f"a bad batch was applied: {report}")
    require(report.reason in reasons, f"reason {report.reason}, not one of {reasons}")
    require(case.stepper.counts.applied == applied, "the counter of applied steps moved on a skip")
    require_same(before, case.state(), f"after a skip ({report.reason}, attempt {report.attempt})")
    return report


def _spoilt(result: Any) -> Any:
    if isinstance(result, dict) and not hasattr(result, "loss"):
        return {name: _spoilt(loss) for name, loss in result.items()}
    if isinstance(result, Counted):
        return Counted(result.sum * INF, result.count)
    return plain(result) * INF


def promise(
    build: Callable[[], Case],
    batches: Sequence[Any],
    bad: Any = None,
    *,
    precision: str = "fp32",
    exact: bool = True,
    init_scale: float = 65536.0,
    at: Sequence[int] = (0, 1),
    **options: Any,
) -> str:
    """Bad batches before the steps `at` and after the last change nothing; the rest is the loop by hand, bitwise."""
    torch.manual_seed(0)
    hand = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, enabled=precision == "fp16")
    if precision == "fp16":
        options = {"loss_scale": halfstep.DynamicScale(init_scale=init_scale), **options}
    for i, batch in enumerate(batches):
        torch.manual_seed(100 + i)
        by_hand(hand, batch, precision, scaler)
    torch.manual_seed(0)
    ours = build()
    ours.start(precision=precision, **options)
    bad = poisoned(batches[0]) if bad is None else bad
    for i, batch in enumerate(batches):
        for _ in range(at.count(i)):
            skips(ours, bad, batch=batch)
        torch.manual_seed(100 + i)
        report = ours.stepper.step(ours.loss_fn, batch)
        require(report.applied, f"a good batch was not applied: {report}")
    last = skips(ours, bad, batch=batches[-1])
    if not exact:
        require_close(hand.model, ours.model, "compared with the loop by hand", rtol=2e-3, atol=1e-4)
        return f"close to the loop by hand; {len(at) + 1} skips ({last.reason}) bitwise undone"
    require_same(hand.state(), ours.state(), "compared with the loop by hand")
    return f"{len(batches)} steps bitwise as by hand; {len(at) + 1} skips ({last.reason}) bitwise undone"


def in_three_calls(case: Case, batch: Any) -> StepReport:
    """One step in the context form: forward, backward, apply."""
    micro = batch if isinstance(batch, Window) else [batch]
    for i, one in enumerate(micro, 1):
        with case.stepper.forward(last=i == len(micro)):
            loss = case.loss_fn(case.model, one)
        case.stepper.backward(loss)
    return case.stepper.apply()


def promise_in_three_calls(
    build: Callable[[], Case], batches: Sequence[Any], bad: Any = None, *, at: Sequence[int] = (0, 1), **options: Any
) -> str:
    """`promise` in the context form, where no loss function is known."""
    torch.manual_seed(0)
    hand = build()
    for batch in batches:
        by_hand(hand, batch)
    torch.manual_seed(0)
    ours = build()
    ours.start(**options)
    bad = poisoned(batches[0]) if bad is None else bad
    for i, batch in enumerate([*batches, None]):
        if i in at or batch is None:
            before = ours.state()
            require(in_three_calls(ours, bad).reason in REASONS, "a bad batch was applied")
            require_same(before, ours.state(), f"after a skip before step {i}")
        if batch is not None:
            require(in_three_calls(ours, batch).applied, "a good batch was not applied")
    require_same(hand.state(), ours.state(), "compared with the loop by hand")
    return f"{len(batches)} steps in three calls bitwise as by hand; {len(at) + 1} skips bitwise undone"


def findings(stepper: Stepper) -> set[str]:
    """The ids of what the Stepper has reported so far."""
    return {finding.id for finding in stepper.findings}


def trains(case: Case, batches: Sequence[Any], **how: Any) -> list[StepReport]:
    """Every batch is applied and finite."""
    reports = [case.stepper.step(case.loss_fn, batch, **how) for batch in batches]
    for report in reports:
        require(report.applied and math.isfinite(report.loss), f"a good batch was not applied: {report}")
    return reports


@contextmanager
def refuses(error: type[BaseException] | tuple[type[BaseException], ...], *words: str) -> Iterator[None]:
    """What is inside is refused with this error, which names these words."""
    try:
        yield
    except error as refusal:
        missing = [word for word in words if word.lower() not in str(refusal).lower()]
        require(not missing, f"refused without naming {missing}: {str(refusal).splitlines()[0]}")
        return
    except Exception as other:
        raise Broken(f"raised {type(other).__name__}: {str(other).splitlines()[0][:150]}") from other
    raise Broken("was not refused")


def sgd(model: nn.Module, lr: float = 0.1, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, **options)


def adamw(model: nn.Module, lr: float = 1e-2, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, **options)


def frozen_copy(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).requires_grad_(False)


HalfstepError = halfstep.HalfstepError
