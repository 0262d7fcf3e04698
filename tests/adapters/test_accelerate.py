"""The transaction in loops that accelerate prepares, with the real library."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

accelerate = pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import halfstep  # noqa: E402
from halfstep.errors import WrongUse  # noqa: E402
from halfstep.step.loss import StaticScale  # noqa: E402
from tests.support.foreign_loops import CASES, ON_RANKS, WINDOWS, Case, Model, Seen, check_contract, check_ranks, same  # noqa: E402
from tests.support.ranks import Ranks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def _only(items: list[Any]) -> Any:
    return items[0]


class Loop:
    """The loop of accelerate's documentation, with halfstep."""

    def __init__(self, case: Case, *, bad: bool = True, data: list[Any] | None = None, **options: Any) -> None:
        AcceleratorState._reset_state(True)
        word = {"fp32": "no"}.get(case.precision, case.precision)
        self.accelerator = accelerate.Accelerator(
            cpu=True, mixed_precision=word, gradient_accumulation_steps=case.accumulate
        )
        torch.manual_seed(0)
        model = Model()
        optimizer = case.optimizer_of(model)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, WINDOWS * self.accelerator.num_processes)
        loader = DataLoader(data or case.microbatches(bad=bad), batch_size=1, collate_fn=_only, shuffle=False)
        prepared = self.accelerator.prepare(model, optimizer, loader, schedule)
        self.model, self.optimizer, self.loader, self.schedule = prepared
        # A static scale: a dynamic one is lower after the skip, and fp16 rounds other gradients away then.
        scale = {"loss_scale": StaticScale(2.0**10)} if case.precision == "fp16" else {}
        self.stepper = halfstep.from_accelerate(
            self.accelerator, self.model, self.optimizer, self.schedule, clip_norm=1.0, **scale, **options
        )
        self.seen = Seen()

    def train(self, skip: int = 0) -> Loop:
        for batch in self.accelerator.skip_first_batches(self.loader, skip) if skip else self.loader:
            with self.accelerator.accumulate(self.model):
                with self.stepper.forward(last=self.accelerator.sync_gradients):
                    loss = self.model(**batch)["loss"]
                self.stepper.backward(loss)
                if self.accelerator.sync_gradients:
                    self.stepper.apply()
                    self.seen.look(self.accelerator.unwrap_model(self.model), self.optimizer, self.schedule)
        return self


@pytest.mark.parametrize("case", CASES)
def test_a_skip_changes_nothing_and_the_run_goes_on_as_if_it_had_not_been(case: Case) -> None:
    check_contract(Loop(case).train().seen, without_trouble(case.without_trouble))


@cache
def without_trouble(case: Case) -> Seen:
    return Loop(case, bad=False).train().seen


def test_healthy_steps_are_accelerates_own_to_the_bit() -> None:
    case = Case("fp32", 2, "loss", 1)
    ours = Loop(case, bad=False).train()
    theirs = Loop(case, bad=False)
    theirs.optimizer.optimizer._optimizer_step_pre_hooks.clear()  # the one that names a second call
    seen = Seen()
    for batch in theirs.loader:
        with theirs.accelerator.accumulate(theirs.model):
            theirs.accelerator.backward(theirs.model(**batch)["loss"])
            if theirs.accelerator.sync_gradients:
                theirs.accelerator.clip_grad_norm_(theirs.model.parameters(), 1.0)
            theirs.optimizer.step()
            theirs.schedule.step()
            if theirs.accelerator.sync_gradients:
                seen.look(theirs.model, theirs.optimizer, theirs.schedule)
            theirs.optimizer.zero_grad()
    assert same([s["model"] for s in ours.seen.states], [s["model"] for s in seen.states])
    assert ours.seen.lrs == seen.lrs


def test_the_function_form_works_with_prepared_objects() -> None:
    case = Case("bf16", 1, "loss", 1)
    loop = Loop(case)
    for batch in loop.loader:
        loop.stepper.step(lambda model, b: model(**b)["loss"], batch)
        loop.seen.look(loop.model, loop.optimizer, loop.schedule)
    check_contract(loop.seen, Loop(case, bad=False).train().seen)


def test_nothing_is_done_twice() -> None:
    loop = Loop(Case("bf16", 1, "loss", 1), bad=False)
    assert "forward" not in vars(loop.model) or not hasattr(loop.model.forward, "__wrapped__")
    assert [finding.id for finding in loop.stepper.findings if finding.id.startswith("accelerate")]
    formats = []
    loop.model.last.register_forward_hook(lambda *given: formats.append(given[2].dtype))
    loop.train()
    with loop.stepper.evaluating() as model:
        model(**next(iter(loop.loader)))
    assert set(formats) == {torch.bfloat16}


@pytest.mark.wording
@pytest.mark.parametrize("call", ["optimizer", "schedule"])
def test_a_call_that_was_left_in_the_loop_is_named(call: str) -> None:
    loop = Loop(Case("fp32", 1, "loss", 1), bad=False)
    apply = loop.stepper.apply
    loop.stepper.apply = lambda: (apply(), getattr(loop, call).step())  # type: ignore[assignment]
    with pytest.raises(WrongUse, match="in a loop with a Stepper"):
        loop.train()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_it_resumes_exactly(tmp_path: Path, precision: str) -> None:
    case = Case(precision, 1, "gradient", 1)
    whole = Loop(case).train()
    first = Loop(case, data=case.microbatches()[:4]).train()
    first.accelerator.save_state(str(tmp_path))
    rest = Loop(case)
    rest.accelerator.load_state(str(tmp_path))
    rest.train(skip=4)
    assert same(rest.seen.states, whole.seen.states[4:])
    assert rest.stepper.counts.state_dict() == whole.stepper.counts.state_dict()
    assert rest.stepper.scale_in_use == whole.stepper.scale_in_use


def test_fp16_on_a_cpu_is_fp16() -> None:
    """accelerate itself computes in fp32 there, and says fp16."""
    loop = Loop(Case("fp16", 1, "loss", 1), bad=False)
    formats = []
    loop.model.last.register_forward_hook(lambda *given: formats.append(given[2].dtype))
    loop.train()
    assert set(formats) == {torch.float16}


# -- two ranks --------------------------------------------------------------------------------------------------------


def _train_on(rank: int, case: Case) -> Any:
    loop = Loop(case, data=case.dealt()).train()
    return loop.seen, loop.stepper.counts.state_dict()


@pytest.mark.ranks
@pytest.mark.parametrize("case", ON_RANKS, ids=str)
def test_two_ranks_skip_together(two_ranks: Ranks, case: Case) -> None:
    (seen, counts), (other, other_counts) = two_ranks(_train_on, case)
    check_ranks(seen, other)
    assert counts == other_counts
