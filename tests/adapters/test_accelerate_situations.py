"""Situations of people whose loops accelerate prepares, which the contract's own cases do not have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

accelerate = pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import halfstep  # noqa: E402
from halfstep.errors import WrongUse  # noqa: E402
from tests.support.foreign_loops import BAD, WINDOWS, Case, Model, Seen, same  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
ONE, TWO = Case("fp32", 1, "loss", 1), Case("fp32", 2, "loss", 1)


def accelerator(**settings: Any) -> Any:
    AcceleratorState._reset_state(True)
    return accelerate.Accelerator(cpu=True, **settings)


def parts() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = Model()
    optimizer = ONE.optimizer_of(model)
    return model, optimizer, lr_scheduler.LinearLR(optimizer, 1.0, 0.1, WINDOWS)


def loader(case: Case, **chosen: Any) -> Any:
    return DataLoader(case.microbatches(**chosen), batch_size=1, collate_fn=lambda items: items[0])  # type: ignore[arg-type]


def train(active: Any, stepper: Any, model: Any, optimizer: Any, schedule: Any, data: Any) -> Seen:
    seen = Seen()
    for batch in data:
        with active.accumulate(model):
            with stepper.forward(last=active.sync_gradients):
                loss = model(**batch)["loss"]
            stepper.backward(loss)
            if active.sync_gradients:
                stepper.apply()
                seen.look(active.unwrap_model(model), optimizer, schedule)
    return seen


def loss_of(model: Any, batch: Any) -> Any:
    return model(**batch)["loss"]


# -- what was prepared, and what was not ------------------------------------------------------------------------------


def _register(active: Any, model: Any, optimizer: Any, schedule: Any) -> tuple[Any, ...]:
    active.register_for_checkpointing(schedule)
    return (*active.prepare(model, optimizer), schedule)


@pytest.mark.parametrize(
    "prepare",
    [
        lambda active, model, optimizer, schedule: active.prepare(model, optimizer, schedule),
        lambda active, model, optimizer, schedule: (*active.prepare(model, optimizer), schedule),
        _register,
    ],
    ids=["prepared", "schedule not prepared", "schedule registered"],
)
def test_it_resumes_exactly_however_the_schedule_is_saved(tmp_path: Path, prepare: Callable[..., Any]) -> None:
    def build() -> tuple[Any, ...]:
        active = accelerator()
        given = prepare(active, *parts())
        return active, halfstep.from_accelerate(active, *given, clip_norm=1.0), *given

    whole = train(*build(), loader(ONE))
    half = build()
    train(*half, list(loader(ONE))[: BAD + 1])
    half[0].save_state(str(tmp_path))
    rest = build()
    rest[0].load_state(str(tmp_path))
    assert same(train(*rest, list(loader(ONE))[BAD + 1 :]).states, whole.states[BAD + 1 :])


@pytest.mark.wording
def test_a_model_or_an_optimizer_that_accelerate_does_not_save_is_refused_by_name() -> None:
    model, optimizer, _ = parts()
    active = accelerator()
    with pytest.raises(WrongUse, match="Model that is not a prepared model"):
        halfstep.from_accelerate(active, model, active.prepare(optimizer))
    active = accelerator()
    with pytest.raises(WrongUse, match="AdamW that is not a prepared optimizer"):
        halfstep.from_accelerate(active, active.prepare(model), optimizer)
    active = accelerator()
    model, optimizer = active.prepare(model, optimizer)
    with pytest.raises(WrongUse, match="dict that is not a prepared optimizer"):
        halfstep.from_accelerate(active, model, {"one": optimizer})


@pytest.mark.wording
def test_schedules_that_do_not_fit_are_refused_by_name() -> None:
    model, optimizer, schedule = parts()
    plateau, (_, _, others) = lr_scheduler.ReduceLROnPlateau(optimizer), parts()
    active = accelerator()
    model, optimizer, plateau = active.prepare(model, optimizer, plateau)
    for given, words in ((plateau, "ReduceLROnPlateau"), ([schedule], "list as the scheduler"), (others, "another")):
        with pytest.raises(WrongUse, match=words):
            halfstep.from_accelerate(active, model, optimizer, given)
    after = lr_scheduler.ExponentialLR(optimizer, 0.5)  # of accelerate's optimizer, which is ours
    halfstep.from_accelerate(active, model, optimizer, after).step(loss_of, next(iter(loader(ONE))))
    assert optimizer.param_groups[0]["lr"] == 0.005


# -- one accelerator, several Steppers --------------------------------------------------------------------------------


def test_two_models_are_trained_and_saved_beside_each_other(tmp_path: Path) -> None:
    active = accelerator()
    one, other = active.prepare(*parts()), active.prepare(*parts())
    steppers = [halfstep.from_accelerate(active, *given) for given in (one, other)]
    for batch in loader(ONE):
        steppers[0].step(loss_of, batch)
    active.save_state(str(tmp_path))
    steppers[1].step(loss_of, next(iter(loader(ONE))))
    active.load_state(str(tmp_path))
    assert [stepper.counts.applied for stepper in steppers] == [WINDOWS - 1, 0]


@pytest.mark.parametrize("freed", [True, False])
def test_a_second_stepper_takes_the_place_of_the_first(tmp_path: Path, freed: bool) -> None:
    """As in a notebook, where a cell is run again: over the same optimizer, the second one continues its counts."""
    active = accelerator()
    given = active.prepare(*parts())
    train(active, halfstep.from_accelerate(active, *given), *given, loader(ONE))
    if freed:
        active.free_memory(*given)
        given = active.prepare(*parts())
    stepper = halfstep.from_accelerate(active, *given)
    train(active, stepper, *given, loader(ONE))
    assert stepper.counts.applied == (WINDOWS - 1) * (1 if freed else 2)
    active.save_state(str(tmp_path))
    assert len(list(tmp_path.glob("custom_checkpoint_*"))) == 1


# -- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
def test_a_checkpoint_inside_a_window_has_the_buffers_of_before_it(tmp_path: Path, compiled: bool) -> None:
    active = accelerator(gradient_accumulation_steps=2, **({"dynamo_backend": "eager"} if compiled else {}))
    *given, data = active.prepare(*parts(), loader(TWO, bad=False))
    stepper, model = halfstep.from_accelerate(active, *given), given[0]
    before = None
    for place, batch in enumerate(data):
        with active.accumulate(model):
            with stepper.forward(last=active.sync_gradients):
                loss = model(**batch)["loss"]
            stepper.backward(loss)
            if place == 4:
                active.save_state(str(tmp_path))
            if active.sync_gradients:
                stepper.apply()
                before = before or ({k: v.clone() for k, v in model.state_dict().items()} if place == 3 else None)
    saved = load_file(tmp_path / "model.safetensors")
    assert before is not None
    for name in ("norm.running_mean", "norm.num_batches_tracked", "largest", "first.weight"):
        assert same(saved[name], before[f"_orig_mod.{name}" if compiled else name]), name


def test_a_short_end_of_the_data_is_a_window() -> None:
    active = accelerator(gradient_accumulation_steps=2)
    model, optimizer, schedule, data = active.prepare(*parts(), DataLoader(TWO.microbatches(bad=False)[:5], None))
    stepper = halfstep.from_accelerate(active, model, optimizer, schedule)
    assert len(train(active, stepper, model, optimizer, schedule, data).states) == 3
    assert not stepper.in_window


def test_the_schedule_follows_updates_and_not_accelerates_windows() -> None:
    active = accelerator(gradient_accumulation_steps=2)
    *given, data = active.prepare(*parts(), loader(ONE, bad=False))
    stepper = halfstep.from_accelerate(active, *given)
    for batch in data:
        with active.accumulate(given[0]):
            stepper.step(loss_of, batch)  # an update of its own, for every batch
    assert given[2].scheduler.last_epoch == stepper.counts.applied == WINDOWS - 1


@pytest.mark.wording
@pytest.mark.parametrize("call", ["autocast", "backward", "clip"])
def test_calls_of_accelerate_that_were_left_in_the_loop_are_named(call: str) -> None:
    active = accelerator(mixed_precision="bf16" if call == "autocast" else "no")
    model, optimizer, schedule = active.prepare(*parts())
    stepper = halfstep.from_accelerate(active, model, optimizer, schedule)
    batch = next(iter(loader(ONE)))
    around = active.autocast() if call == "autocast" else torch.enable_grad()
    with pytest.raises(WrongUse, match=r"autocast|apply|between backward"), around:  # noqa: PT012
        with stepper.forward():
            loss = model(**batch)["loss"]
        (active.backward if call == "backward" else stepper.backward)(loss)
        if call == "clip":
            active.clip_grad_norm_(model.parameters(), 1.0)
        stepper.apply()
    assert stepper.counts.applied == 0


@pytest.mark.parametrize("settings", [{"step_scheduler_with_optimizer": False}, {"split_batches": True}], ids=str)
def test_settings_of_the_accelerator_hold(settings: dict[str, Any]) -> None:
    if "split_batches" in settings:
        settings = {"dataloader_config": accelerate.utils.DataLoaderConfiguration(split_batches=True)}
    active = accelerator(**settings)
    given = active.prepare(*parts())
    seen = train(active, halfstep.from_accelerate(active, *given), *given, loader(ONE))
    assert same(seen.states[BAD], seen.states[BAD - 1])
    assert given[2].scheduler.last_epoch == WINDOWS - 1


# -- what it cannot protect -------------------------------------------------------------------------------------------


def test_a_checkpoint_of_accelerate_alone_is_refused_by_accelerate(tmp_path: Path) -> None:
    active = accelerator()
    given = active.prepare(*parts())
    active.save_state(str(tmp_path))
    halfstep.from_accelerate(active, *given)
    with pytest.raises(RuntimeError, match="custom checkpoints"):
        active.load_state(str(tmp_path))
